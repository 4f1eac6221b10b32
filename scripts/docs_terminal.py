"""Draw what commands show on a terminal of 80 columns as one SVG, which fetches nothing."""

import fcntl
import io
import os
import pty
import re
import shlex
import struct
import subprocess
import termios
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text

COLUMNS, ROWS = 80, 40
FONTS = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


def shown(command: str, folder: Path, environment: dict[str, str]) -> str:
    """Run a command on a terminal of its own and return all it wrote there, escapes as well."""
    outer, inner = pty.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    own = {**environment, "TERM": "xterm-256color"}
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        own.pop(name, None)
    ends = {"stdin": subprocess.DEVNULL, "stdout": inner, "stderr": inner}
    with subprocess.Popen(shlex.split(command), cwd=folder, env=own, **ends) as process:
        os.close(inner)
        written = b""
        while part := _read(outer):
            written += part
    os.close(outer)
    if process.returncode not in (0, 3):  # 3: the run diverged
        raise SystemExit(f"docs_pictures: {command}: exit code {process.returncode}")
    return written.decode()


def _read(outer: int) -> bytes:
    try:
        return os.read(outer, 1 << 16)
    except OSError:  # the last process that held the other end is gone
        return b""


def last_screen(written: str) -> str:
    """Return the lines as they stood at the end: of what was drawn again only the last."""
    # Cursor and erasing escapes; colours (those that end with m) stay.
    written = re.sub(r"\x1b\[[?0-9;]*[A-LN-Za-ln-z]", "", written.replace("\r\n", "\n"))
    lines = [re.sub(r"^.*\r(?=.)", "", line).rstrip("\r") for line in written.split("\n")]
    return "\n".join(lines).strip("\n")


def draw(command: str, text: str, path: Path) -> None:
    """Write a command and its text as a terminal; the same text gives the same bytes.

    path: its stem is the prefix of the ids in the drawing.
    """
    console = Console(
        record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, legacy_windows=False
    )
    console.print(Text.assemble(("$ ", "green"), (command, "bold")))
    for line in Text.from_ansi(text).split("\n", allow_blank=True):
        # Broken where a terminal breaks it, inside a word if need be.
        for start in range(0, max(len(line), 1), COLUMNS):
            console.print(line[start : start + COLUMNS])
    console.print()  # the drawing cuts the lowest pixels of its last line
    form = re.sub(r"@font-face \{\{.*?\}\}\n", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    form = form.replace("Fira Code, monospace", FONTS).replace("arial", "sans-serif")
    drawn = console.export_svg(
        title="", theme=SVG_EXPORT_THEME, code_format=form, unique_id=path.stem
    )
    drawn = "\n".join(line.rstrip() for line in drawn.splitlines() if line.strip())
    path.write_text(drawn + "\n", encoding="utf-8")
    print(f"{path.name}: {drawn.count('<clipPath') - 1} lines, {len(drawn) / 1000:.0f} kB")
