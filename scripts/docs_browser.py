"""Drive Chromium by its own pipe: JSON between NUL bytes (the DevTools protocol), no other program.

Reads descriptor 3 and writes descriptor 4 of the browser (`--remote-debugging-pipe`).
"""

import base64
import io
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from PIL import Image

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    *("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-sync"),
    *("disable-background-networking", "disable-component-update", "hide-scrollbars"),
    *("disable-dev-shm-usage", "remote-debugging-pipe"),
)
_WAIT_S = 0.25  # between two looks at a page
_LOOKS = 240
_SETTLES_S = 6.0  # TensorBoard draws its curves after its cards, late on a busy machine


def found_browser() -> str | None:
    """Return the browser's path, None where none is installed."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


class Page:
    """A window of the browser."""

    def __init__(self, asked: IO[bytes], answered: IO[bytes]):
        self._asked, self._answered = asked, answered
        self._rest, self._count, self._session = b"", 0, ""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        attached = self.ask("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]

    def ask(self, method: str, **given: Any) -> Any:
        """Call a method of the protocol and return its result."""
        self._count += 1
        call = {"id": self._count, "method": method, "params": given}
        if self._session:
            call["sessionId"] = self._session
        self._asked.write(json.dumps(call).encode() + b"\0")
        self._asked.flush()
        while True:
            while b"\0" not in self._rest:
                part = os.read(self._answered.fileno(), 1 << 20)
                if not part:
                    raise SystemExit(f"docs_pictures: the browser ended at {method}")
                self._rest += part
            message, _, self._rest = self._rest.partition(b"\0")
            answer = json.loads(message)
            if answer.get("id") == self._count:  # others are events
                if "error" in answer:
                    raise SystemExit(f"docs_pictures: {method}: {answer['error']['message']}")
                return answer["result"]

    def open(self, address: str, width: int, height: int = 900, scale: float = 1.0) -> None:
        """Load an address in a window of this size, in CSS pixels; scale: pixels of each."""
        shown = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
        self.ask("Emulation.setDeviceMetricsOverride", **shown)
        self.width = width
        # From here, so that the page before is never taken for this one.
        self.ask("Page.navigate", url="about:blank")
        self._until("location.href == 'about:blank'")
        self.ask("Page.navigate", url=address)
        self._until("location.href != 'about:blank' && document.readyState == 'complete'")

    def run(self, script: str) -> Any:
        """Return what a script's `return` gives."""
        given = {"expression": f"(() => {{ {script} }})()", "returnByValue": True}
        return self.ask("Runtime.evaluate", **given)["result"].get("value")

    def wait(self, condition: str) -> None:
        """Wait until a condition holds, and then for its animations."""
        self._until(condition)
        time.sleep(_SETTLES_S)

    def _until(self, condition: str) -> None:
        for _ in range(_LOOKS):
            if self.run(f"return {condition}"):
                return
            time.sleep(_WAIT_S)
        raise SystemExit(f"docs_pictures: never in the page: {condition}")

    def save(self, path: Path, height: int = 0, of: str = "", scale: float = 1.0) -> None:
        """Write the top of the page, or the part that a selector finds, as a PNG."""
        box = {"x": 0, "y": 0, "width": self.width, "height": height}
        if of:
            box = self.run(
                f"const box = document.querySelector({json.dumps(of)}).getBoundingClientRect();"
                "return {x: box.x - 8, y: box.y + scrollY - 4, width: box.width + 16,"
                " height: box.height + 8}"
            )
        clip = {**box, "scale": scale}
        shot = self.ask("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        image = Image.open(io.BytesIO(base64.b64decode(shot["data"]))).convert("RGB")
        # The octree keeps the few colours of lines; the median cut merges them into the greys.
        palette = Image.Quantize.FASTOCTREE
        image.quantize(256, palette, dither=Image.Dither.NONE).save(path, optimize=True)
        print(f"{path.name}: {image.width} x {image.height}, {path.stat().st_size / 1000:.0f} kB")


@contextmanager
def browsing(browser: str, profile: Path) -> Iterator[Page]:
    """Start the browser with an empty profile and yield its window."""
    (reads, asked), (answered, writes) = os.pipe(), os.pipe()
    command = [browser, *(f"--{flag}" for flag in FLAGS), f"--user-data-dir={profile}"]
    # The shell puts the two pipes where the browser looks for them.
    placed = ["bash", "-c", f'exec "$@" 3<&{reads} 4>&{writes}', "bash", *command]
    with (
        open(asked, "wb") as calls,
        open(answered, "rb") as answers,
        subprocess.Popen(placed, pass_fds=(reads, writes), stderr=subprocess.DEVNULL) as process,
    ):
        os.close(reads)
        os.close(writes)
        try:
            page = Page(calls, answers)
            yield page
            page.ask("Browser.close")
        finally:
            process.terminate()
