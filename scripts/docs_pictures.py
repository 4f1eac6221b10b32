"""Make docs/_static/pictures: reports, TensorBoard and a terminal, as a reader sees them.

    scripts/docs_pictures [FOLDER]

FOLDER is where the sweeps are made; runs that are in its `outputs` are not made again. Exit codes:
0 made, or no browser here; 1 a run or the browser failed.
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from docs_browser import Page, browsing, found_browser
from docs_terminal import draw, last_screen, shown

from mprun.record.console import opening

PICTURES = Path(__file__).resolve().parents[1] / "docs" / "_static" / "pictures"
# README's sweep, and one whose intervals are wide: it shows how one is read.
LOST_UPDATES, UNDERFLOW = "quickstart_lost_updates", "quickstart_underflow"
MODES = {
    LOST_UPDATES: "fp32,fp16_naive,amp",
    UNDERFLOW: "fp32,fp16_naive,fp16_master,fp16_master_scaled,amp",
}
SWEEP = "mprun -m -j 2 experiment={} precision={} seed=0,1,2"
# What a terminal shows in each picture. The run that the last one explains is not shown.
DIVERGES = f"mprun experiment={UNDERFLOW} precision=fp16_naive"
TERMINALS = {
    "terminal_run": "mprun precision=amp",
    "terminal_explain": f"mprun explain outputs/{UNDERFLOW}/fp16_naive-s0 --seconds 600",
}


def main(words: list[str]) -> int:
    """Entry point; returns the exit code."""
    browser = found_browser()
    if browser is None:
        print("docs_pictures: skipped, needs chromium", file=sys.stderr)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(words[0] if words else scratch).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        PICTURES.mkdir(parents=True, exist_ok=True)
        own = _environment(Path(scratch))
        reports = [_sweep(name, folder, own) for name in MODES]
        apart = Path(scratch) / "terminal"
        apart.mkdir()
        shown(DIVERGES, apart, own)
        for name, command in TERMINALS.items():
            text = last_screen(shown(command, apart, own))
            draw(command, text, PICTURES / f"{name}.svg")
        with browsing(browser, Path(scratch) / "profile") as page:
            _photograph(page, *reports)
    return 0


def _photograph(page: Page, report: Path, wide: Path) -> None:
    page.open(report.as_uri(), 1280)
    page.save(PICTURES / "report.png", height=860)
    page.save(PICTURES / "report_intervals.png", of="figure", scale=1.4)
    page.open(wide.as_uri(), 1280)
    page.save(PICTURES / "report_intervals_wide.png", of="figure", scale=1.4)
    page.open(report.as_uri(), 390, scale=1.5)
    page.save(PICTURES / "report_phone.png", height=844)
    with tensorboard(report.parents[1] / "_summary") as address:
        page.open(address + opening(), 1280, height=800)
        page.wait("document.querySelectorAll('scalar-card line-chart').length > 2")
        page.save(PICTURES / "tensorboard.png", height=800)


def _environment(scratch: Path) -> dict[str, str]:
    """Return an environment in which `mprun` is this interpreter's."""
    program = scratch / "bin" / "mprun"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m mprun "$@"\n')
    program.chmod(0o755)
    return {**os.environ, "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}"}


def _sweep(name: str, folder: Path, environment: dict[str, str]) -> Path:
    """Make the runs that are missing, compare them and return the report."""
    runs = folder / "outputs" / name
    compare = f"mprun compare --tensorboard outputs/{name}"
    for command in (SWEEP.format(name, MODES[name]), compare):
        given = {"cwd": folder, "env": environment, "stdout": subprocess.DEVNULL}
        subprocess.run(command.split(), check=True, **given)
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
