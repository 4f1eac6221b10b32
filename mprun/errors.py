"""The ways a run can end other than by a bug, each with its exit code.

Exit codes: 0 done, 1 a bug in mprun or an error in a user's code, 2 bad input, 3 diverged,
4 damaged data or checkpoint, 5 resource (disk, memory, lost worker), 75 asked to stop: resume, or
start again where no run had begun, 130 interrupted.
"""

import os
import signal
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DONE, BUG, BAD_INPUT, DIVERGED, DAMAGED, RESOURCE = range(6)
PREEMPTED, INTERRUPTED = 75, 130

STATUS_EXIT_CODE = {"done": DONE, "failed": BUG, "diverged": DIVERGED, "preempted": PREEMPTED}

# From the worst: of several processes' exit codes the first of these says how all ended.
SEVERITY = (BUG, DAMAGED, RESOURCE, BAD_INPUT, DIVERGED, INTERRUPTED, PREEMPTED)

# The signals with which a terminal, a batch system or a person asks a process to stop.
ASKING = tuple(
    signal.Signals[f"SIG{name}"] for name in ("INT", "TERM", "HUP", "USR1", "USR2", "XCPU", "ALRM")
)


class MprunError(Exception):
    """The base of the errors that end with one line on stderr and a certain exit code."""

    exit_code = BUG
    longest = 200  # characters of its line; a longer one loses its end, or its middle


class BadInput(MprunError):
    """A request cannot be fulfilled; the message names key, value and what is allowed."""

    exit_code = BAD_INPUT


class Untrusted(BadInput):
    """A record names code or a path that the command does not name; the line has it in full."""

    longest = 600


class Refused(BadInput):
    """A run does not take this command; the line ends with one that it takes, in full."""

    longest = 2000


class MissingExtra(BadInput, ImportError):
    """A package is missing that an extra of mprun installs; the message names the extra."""


# Modules of packages that only extras install.
OF_EXTRAS = (
    *("hydra", "torchvision", "tensorboard", "scipy", "matplotlib", "PIL", "pynvml", "rich"),
    *("pandas", "lightning", "pytorch_lightning", "transformers"),
)


@contextmanager
def needing(extra: str) -> Iterator[None]:
    """Raise MissingExtra if the block imports a missing package that `extra` installs.

    Of two nested blocks the outer one names the extra: the command knows which one it needs.
    """
    try:
        yield
    except (ModuleNotFoundError, MissingExtra) as error:
        module = (error.name or "").partition(".")[0]
        if module not in OF_EXTRAS:
            raise
        raise MissingExtra(
            f"{module}: is not installed; pip install 'mprun[{extra}]', in a clone pip install -e "
            f"'.[{extra}]'",
            name=module,
        ) from None


def shortened(text: str, most: int) -> str:
    """Return `text` in one line of at most `most` characters: whole words, then " ...".

    Only a first word that is longer loses its middle, so that both of its ends tell what it was.
    """
    words = text.split()
    text, end = " ".join(words), " ..."
    if len(text) <= most:
        return text
    if len(words[0]) > most - len(end) * (len(words) > 1):
        tail = max(1, (most - 3) // 3)
        return f"{words[0][: most - 3 - tail]}...{words[0][-tail:]}"
    whole = text[: most - len(end) + 1].rpartition(" ")[0]
    return whole.rstrip(",;") + end


def no_folder(path: str | Path) -> str:
    """Return what is wrong with a path that is no folder, after its name."""
    # Not Path.exists, which raises for a name that is too long.
    return "a file, must be a folder" if os.path.exists(path) else "no such folder"


class Damaged(MprunError):
    """A file that should be whole is damaged: a checkpoint, a record or a data file."""

    exit_code = DAMAGED
    longest = 600  # a file is named in full, however long its path


class Resource(MprunError):
    """The machine ran out of a resource: disk, memory, a worker process."""

    exit_code = RESOURCE
    longest = 600  # what memory lacked, and what is smaller


class RankFailed(MprunError):
    """Another rank ended the run; the message names it, and the exit code comes from it."""

    def __init__(self, message: str, code: int):
        super().__init__(message)
        self.exit_code = code


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of a command that ends with this error."""
    if isinstance(error, MprunError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):  # carries the signal's name
        return exit_code_after(getattr(signal, str(error) or "SIGINT", signal.SIGINT))
    return BUG


def exit_code_after(number: int) -> int:
    """Return the exit code of a command that a signal asked to stop, however far it was."""
    return INTERRUPTED if number == signal.SIGINT else PREEMPTED


def raised(error: BaseException) -> str:
    """Return an exception of foreign code as one line, with its newest line in that code.

    Example: "KeyError: 'width' (mynet.py, line 12)".
    """
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    what = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if isinstance(error, SyntaxError):
        return what if "line" in text else f"{what} (line {error.lineno})"
    place = place_of(error)
    return f"{what} ({place})" if place else what


def place_of(error: BaseException) -> str | None:
    """Return the newest line of a user's code in an exception's traceback, or None.

    Example: "mynet.py, line 12".
    """
    installed = map(sysconfig.get_path, ("stdlib", "purelib", "platlib"))
    others = (*installed, str(Path(__file__).parent), "<")
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(others):
            return f"{Path(frame.filename).name}, line {frame.lineno}"
    return None


def report_bug(error: Exception) -> int:
    """Print the traceback and whose code to look at first, a user's or mprun's; return the code."""
    traceback.print_exception(error)
    place = place_of(error)
    where = f"raised in or below {place}: an error there, or" if place else "this is"
    print(f"mprun: {where} a bug in mprun", file=sys.stderr)
    return BUG
