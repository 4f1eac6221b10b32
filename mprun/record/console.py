"""Console output: progress on stderr, and tables that are aligned as plain text too.

Progress is a bar on a terminal and plain lines otherwise; stdout stays free for results.
"""

import os
import shlex
import shutil
import sys
import textwrap
import threading
import time
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO, TypeVar, cast

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

T = TypeVar("T")
# Below this share of the time a faster loader would not speed up the run, so it is not shown.
DATA_BOUND = 0.1
# Behind TensorBoard's address, `http://localhost:6006/`: curves without smoothing; a page that also
# brings hidden outliers back, where TensorBoard has mprun's plugin (mprun.compare).
UNSMOOTHED = "?smoothing=0#timeseries"
_OF_PLUGIN = "data/plugin/mprun/table"
_LEAST_BAR = 8  # columns of a bar beside its text
_REDRAWN_S = 0.1  # least time between two counts on a bar


class _Steady:
    """A stream that ignores failing writes; it passes everything else to the wrapped stream."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):  # OSError: full or gone; ValueError: closed
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def to_watch(folder: os.PathLike) -> str:
    """Return the lines that say how to look at the curves in a folder, with the table's numbers."""
    command = f"curves: tensorboard --logdir {shlex.quote(str(folder))}"
    return f"{command}\n        at http://localhost:6006/{opening()}"


def opening() -> str:
    """Return what goes behind TensorBoard's address, so that curves end at the table's numbers."""
    from importlib.metadata import entry_points  # takes 35 ms

    plugins = entry_points(group="tensorboard_plugins")
    return _OF_PLUGIN if any(one.name == "mprun" for one in plugins) else UNSMOOTHED


def printable(text: str) -> str:
    """Return `text` with an escape like `\\x1b` for each character that is not to be seen.

    Line ends, tabs and blanks of any width stay. A terminal obeys control characters, and file
    names, records and logs may hold any.
    """
    lines = text.split("\n")
    return "\n".join(x if x.isprintable() else "".join(map(_seen, x)) for x in lines)


def _seen(character: str) -> str:
    if character.isprintable() or character == "\t" or unicodedata.category(character) == "Zs":
        return character
    return character.encode("unicode_escape").decode()


class _Printable:
    """A stream whose text passes through `printable`; what mprun draws itself goes to `drawn`."""

    def __init__(self, stream: TextIO):
        self.drawn: TextIO = getattr(stream, "drawn", stream)

    def write(self, text: str) -> int:
        self.drawn.write(printable(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drawn, name)


@contextmanager
def steady_terminal() -> Iterator[None]:
    """Let only printable text out, and keep output on stderr from ending a run inside the block.

    Closed standard descriptors become the null device. The next file opened would otherwise take
    their number and receive what is printed.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    before, hook = (sys.stdin, sys.stdout, sys.stderr), threading.excepthook
    out = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115 - until the end
    steady: Any = _Steady(sys.stderr or open(2, "w", closefd=False))  # noqa: SIM115
    sys.stdout, sys.stderr = cast(TextIO, _Printable(out)), cast(TextIO, _Printable(steady))
    threading.excepthook = _print_of_thread
    try:
        yield
    finally:
        sys.stdin, sys.stdout, sys.stderr = before
        threading.excepthook = hook


def _print_of_thread(args: threading.ExceptHookArgs) -> None:
    """Print a thread's error in one line; TensorBoard's writer, say, raises it in its next call."""
    name = args.thread.name if args.thread is not None else "a thread"
    print(f"mprun: {name}: {args.exc_value}", file=sys.stderr)


def columns(most: int = 80, stream: TextIO | None = None) -> int:
    """Return the width of the terminal behind `stream` (default: stdout), from 30 to `most`.

    COLUMNS comes first, then the terminal's current width, then 80.
    """
    width = shutil.get_terminal_size((80, 24)).columns
    if stream is not None and not os.environ.get("COLUMNS"):
        with suppress(OSError, ValueError):  # OSError: no terminal; ValueError: closed
            width = os.get_terminal_size(stream.fileno()).columns or 80
    return max(30, min(most, width))


def draws(stream: TextIO) -> bool:
    """Return whether a line of the stream can be drawn again in its place."""
    return stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


class Progress:
    """Show step, loss, scale, skipped updates, throughput and the time left.

    A bar moves with every step that the host has taken; what stands beside it is of the newest
    record. A line fits the width of a terminal: the least important parts are left out. Without a
    terminal there is a line for a record, and until the first one for the count alone; lines are at
    least `seconds` apart.

    samples: in a step, if a step that was taken has ended too, so that the count shows the speed;
    0: the device works behind the host.
    """

    def __init__(
        self,
        total: int,
        sample: str,
        stream: TextIO | None = None,
        seconds: float = 5.0,
        samples: float = 0.0,
    ):
        self.total, self.sample, self.seconds, self.samples = total, sample, seconds, samples
        self.stream = sys.stderr if stream is None else stream
        self.terminal = self.stream.isatty()
        self.drawn = draws(self.stream)
        self.started, self.printed, self.counted = time.monotonic(), -1e9, -1e9
        self.first_step: int | None = None
        self.step, self._text = 0, ""
        self._known: list[tuple[int, str]] = []  # parts of a line, of the newest record
        self._bar: Bar | None = None

    def begin(self, step: int) -> None:
        """Say that a first step is being computed, which may take long."""
        self.counted = time.monotonic()
        self._show(f"computing step {step}/{self.total}")

    def count(self, step: int) -> None:
        """Note that the host has taken `step`; it costs a look at the clock, and no wait."""
        self.step, now = step, time.monotonic()
        if self.samples and self.first_step is None:
            self.first_step, self.started = step, now
        if now - self.counted < (_REDRAWN_S if self.drawn else self.seconds):
            return
        self.counted = now
        if self.drawn or not self._known:
            parts = [(0, f"step {step}/{self.total}"), *(self._known or self._speed(step, now))]
            left = self._left(step, now) if self.samples else []
            self._show(_fitted([*parts, *left], self._room()))

    def show(self, step: int, record: dict) -> None:
        """Report the newest training record; `step` counts from 1."""
        now = time.monotonic()
        if self.first_step is None:
            self.first_step, self.started = step, now
        self.step = max(self.step, step)
        # The number ranks a part: a line that is too long drops the highest first.
        parts = [(1, f"loss {record['loss']:.5g}")]
        if record["loss_scale"] != 1:
            parts.append((6, f"scale {record['loss_scale']:g}"))
        if record["skipped"]:
            parts.append((3, f"skipped {record['skipped']}"))
        if record.get("samples_per_s"):
            parts.append((5, f"{record['samples_per_s']:.0f} {self.sample}s/s"))
        if record.get("data_wait", 0) > DATA_BOUND:
            parts.append((4, f"waiting for data {record['data_wait']:.0%}"))
        left = self._left(step, now)
        self._known = parts if self.samples else parts + left
        if not self.drawn and now - self.printed < self.seconds and step < self.total:
            return
        self.printed = now
        step = self.step if self.drawn else step  # the host's count may be ahead of the record
        self._show(_fitted([(0, f"step {step}/{self.total}"), *parts, *left], self._room()))

    def _speed(self, step: int, now: float) -> list[tuple[int, str]]:
        """Return the speed by the count, as a part of a line; none while it is unknown."""
        if self.first_step is None or step <= self.first_step or now <= self.started:
            return []
        speed = self.samples * (step - self.first_step) / (now - self.started)
        return [(5, f"{speed:.0f} {self.sample}s/s")] if speed else []

    def _left(self, step: int, now: float) -> list[tuple[int, str]]:
        """Return the time left, as a part of a line; none while it is unknown."""
        if self.first_step is None or step <= self.first_step:
            return []
        left = (now - self.started) / (step - self.first_step) * (self.total - step)
        return [(2, f"ETA {_clock(left)}")]

    def _show(self, text: str) -> None:
        self._text = text
        self._draw(text) if self.drawn else self._print(text)

    def evaluated(self, samples: int, total: int) -> None:
        """Show how many held-out samples a running evaluation has done."""
        now = time.monotonic()
        if now - self.printed < (_REDRAWN_S if self.drawn else self.seconds):
            return
        self.printed = now
        text = f"evaluating {samples}/{max(samples, total)} {self.sample}s"
        if self.drawn:
            self._draw(_fitted([(1, f"step {self.step}/{self.total}"), (0, text)], self._room()))
        else:
            self._print(text)

    def evaluation(self) -> None:
        """Note that an evaluation begins; a short one needs no line."""
        if not self.drawn:
            self.printed = time.monotonic()

    def note(self, text: str) -> None:
        """Print separate lines above the bar."""
        text = printable(text)
        if self.terminal:
            text = "\n".join(_broken(line, self._width()) for line in text.splitlines())
        if self._bar is None:
            self._print(text)
        else:
            self._draw(self._text)  # in place of the text of a finished evaluation
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _width(self) -> int:
        """Return the width of a line that ends before the last column, where terminals wrap."""
        return columns(1000, self.stream) - 1

    def _room(self) -> int:
        return self._width() - _LEAST_BAR * self.drawn if self.terminal else 1000

    def _draw(self, text: str) -> None:
        self._bar = self._bar or _started_bar(
            self.total, getattr(self.stream, "drawn", self.stream)
        )
        self._bar.console.width = self._width()  # the window may have changed
        task = self._bar.task_ids[0]
        self._bar.update(task, completed=self.step, description=text, refresh=True)

    def _print(self, text: str) -> None:
        self.stream.write(text + "\n")
        self.stream.flush()


def counted(items: Iterable[T], what: str, seconds: float = 5.0) -> Iterator[T]:
    """Yield the items; print "WHAT: 640 of 2,000" on stderr every `seconds`, if they last."""
    items = list(items)
    printed = time.monotonic()
    for number, item in enumerate(items):
        if time.monotonic() - printed >= seconds:
            printed = time.monotonic()
            print(f"{what}: {number:,} of {len(items):,}", file=sys.stderr, flush=True)
        yield item


def _fitted(parts: list[tuple[int, str]], room: int) -> str:
    """Join the texts of (rank, text) in their order; drop the highest ranks that do not fit."""
    kept = sorted(parts)
    while len(kept) > 1 and sum(len(text) + 2 for _, text in kept) - 2 > room:
        kept.pop()
    return "  ".join(part[1] for part in parts if part in kept)


def _broken(line: str, width: int) -> str:
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    return textwrap.fill(
        line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _started_bar(total: int, stream: TextIO) -> "Bar":
    """Start a bar with one task beside its description, in one line of the terminal."""
    # Imported here because rich takes 70 ms to import and only a terminal needs it.
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn
    from rich.table import Column

    text = Column(no_wrap=True, overflow="ellipsis")
    bar = Progress(
        BarColumn(bar_width=None),  # as wide as the text leaves it
        TextColumn("{task.description}", markup=False, table_column=text),
        console=Console(file=stream),
        expand=True,
        auto_refresh=False,  # no thread that redraws an unchanged bar
        redirect_stdout=False,
        redirect_stderr=False,
    )
    bar.add_task("", total=total)
    bar.start()
    bar.console.show_cursor(True)  # a killed run would leave the terminal without a cursor
    return bar


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes:02}:{seconds:02}"


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    """Render the table as text, columns as wide as their longest cell; a `|` in it is escaped."""
    header, *rows = [[cell.replace("|", "\\|") for cell in row] for row in [header, *rows]]
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: list[str]) -> str:
        return "| " + " | ".join(c.ljust(w) for c, w in zip(cells, widths, strict=True)) + " |"

    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([line(header), rule, *(line(row) for row in rows)])
