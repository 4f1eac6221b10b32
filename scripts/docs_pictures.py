"""Make docs/_static/pictures: reports and TensorBoard of two sweeps, as a browser shows them.

    scripts/docs_pictures [FOLDER]

FOLDER holds the sweeps, which are made if they are missing. Chromium is driven by chromedriver,
whose protocol is JSON over HTTP. Exit codes: 0 made, or no browser here; 1 a run or the browser
failed.
"""

import base64
import io
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

from mprun.record.console import opening

PICTURES = Path(__file__).resolve().parents[1] / "docs" / "_static" / "pictures"
# The two of scripts/quickstart. The second's intervals are wide: it shows how one is read.
LOST_UPDATES, UNDERFLOW = "quickstart_lost_updates", "quickstart_underflow"
MODES = "fp32,fp16_naive,fp16_master,fp16_master_scaled,amp"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    *("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-sync"),
    *("disable-background-networking", "disable-component-update", "hide-scrollbars"),
)


def main(words: list[str]) -> int:
    """Entry point; returns the exit code."""
    browser, driver = tools()
    if browser is None or driver is None:
        print("docs_pictures: skipped, needs chromium and chromedriver", file=sys.stderr)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        runs = Path(words[0] if words else scratch).resolve()
        report, wide = (_sweep(runs / name) for name in (LOST_UPDATES, UNDERFLOW))
        PICTURES.mkdir(parents=True, exist_ok=True)
        with browsing(driver, browser, Path(scratch) / "profile") as page:
            page.open(report.as_uri(), 1280)
            page.save("report", height=860)
            page.save("report_intervals", of="figure", scale=1.4)
            page.open(wide.as_uri(), 1280)
            page.save("report_intervals_wide", of="figure", scale=1.4)
            page.open(report.as_uri(), 390, scale=1.5)
            page.save("report_phone", height=844)
            with tensorboard(report.parents[1] / "_summary") as address:
                page.open(address + opening(), 1280, height=800)
                page.wait("document.querySelectorAll('scalar-card line-chart').length > 2")
                page.save("tensorboard", height=800)
    return 0


def tools() -> tuple[str | None, str | None]:
    """Return the browser and chromedriver, None where it is not installed."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    return browser, shutil.which("chromedriver")


def _sweep(runs: Path) -> Path:
    """Make the runs that are missing, compare them and return the report."""
    mprun = [sys.executable, "-m", "mprun"]
    swept = [f"precision={MODES}", "seed=0,1,2", f"output_root={runs.parent}"]
    command = [*mprun, "-m", "-j", "2", "threads=1", f"experiment={runs.name}", *swept]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    command = [*mprun, "compare", "--tensorboard", str(runs)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return runs / "compare" / "report.html"


@contextmanager
def _server(command: list[str], says: str) -> Iterator[str]:
    """Start a server and yield what the pattern's group finds in its output."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1
    ) as process:
        try:
            assert process.stdout is not None
            address = next(filter(None, (re.search(says, line) for line in process.stdout)), None)
            if address is None:
                raise SystemExit(f"docs_pictures: {command[0]} ended without an address")
            yield address[1]
        finally:
            process.terminate()


def tensorboard(folder: Path) -> AbstractContextManager[str]:
    """Serve a folder; the address ends with a slash."""
    command = [sys.executable, "-m", "tensorboard.main", "--port", "0", "--logdir", str(folder)]
    return _server(command, r"at (http://localhost:\d+/)")


class _Page:
    """A window of the browser."""

    def __init__(self, session: str):
        self.session = session

    def open(self, address: str, width: int, height: int = 900, scale: float = 1.0) -> None:
        """Load an address in a window of this size, in CSS pixels; scale: pixels of each."""
        shown = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
        self.ask("Emulation.setDeviceMetricsOverride", **shown)
        self.width = width
        _post(f"{self.session}/url", url=address)

    def run(self, script: str) -> Any:
        """Return what a script's `return` gives."""
        return _post(f"{self.session}/execute/sync", script=script, args=[])

    def wait(self, condition: str) -> None:
        """Wait until a condition holds, and then for its animations."""
        for _ in range(120):
            if self.run(f"return {condition}"):
                break
            time.sleep(0.25)
        else:
            raise SystemExit(f"docs_pictures: never in the page: {condition}")
        time.sleep(1.5)

    def ask(self, method: str, **given: Any) -> Any:
        """Call a method of the browser's DevTools protocol."""
        return _post(f"{self.session}/goog/cdp/execute", cmd=method, params=given)

    def save(self, name: str, height: int = 0, of: str = "", scale: float = 1.0) -> None:
        """Write the top of the page, or the part that a selector finds, as NAME.png."""
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
        path = PICTURES / f"{name}.png"
        # The octree keeps the few colours of lines; the median cut merges them into the greys.
        palette = Image.Quantize.FASTOCTREE
        image.quantize(256, palette, dither=Image.Dither.NONE).save(path, optimize=True)
        print(f"{path.name}: {image.width} x {image.height}, {path.stat().st_size / 1000:.0f} kB")


def _post(address: str, **content: Any) -> Any:
    request = urllib.request.Request(address, json.dumps(content).encode(), method="POST")
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["value"]


@contextmanager
def browsing(driver: str, browser: str, profile: Path) -> Iterator[_Page]:
    """Start the browser with an empty profile and yield its window."""
    flags = [*FLAGS, f"user-data-dir={profile}"]
    options = {"binary": browser, "args": [f"--{flag}" for flag in flags]}
    with _server([driver, "--port=0"], r"successfully on port (\d+)") as port:
        root = f"http://localhost:{port}/session"
        wanted = {"alwaysMatch": {"goog:chromeOptions": options}}
        session = f"{root}/{_post(root, capabilities=wanted)['sessionId']}"
        try:
            yield _Page(session)
        finally:
            request = urllib.request.Request(session, method="DELETE")
            urllib.request.urlopen(request, timeout=60).close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
