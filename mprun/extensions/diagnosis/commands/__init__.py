"""The verbs, a file each, and what they share: the record that they read, the page they print."""

import json
import shlex
import sys
from argparse import Namespace
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mprun.cli.arguments import Arguments, filled, number
from mprun.errors import DONE, BadInput, Refused
from mprun.record.console import columns
from mprun.record.layout import hanging
from mprun.record.run_directory import plain
from mprun.record.run_record import Record, read_record
from mprun.spelling import must_be

if TYPE_CHECKING:
    from mprun.config.schema import PrecisionConfig

SECONDS = 60  # for the trials of a verb, unless asked otherwise


def record_of(verb: str, directory: Path, instead: str = "a run directory") -> Record:
    """Return run.json; BadInput if `directory` has none, Damaged if it is broken."""
    if not (directory / "run.json").is_file():
        raise BadInput(f"{verb} {directory}: no run.json there; pass {instead}")
    return read_record(directory)


def refused(verb: str, directory: Path, record: Record, why: str) -> Refused:
    """Return the error of a run that a verb cannot take, with the commands that take it."""
    from mprun.training.next_commands import commands  # here: takes a moment, and few need it

    fits = [fit for fit in commands(directory, record) if fit.acts]
    same = shlex.join(["mprun", verb, str(directory)])
    others = [str(fit) for fit in fits if not fit.command.startswith(same)]
    return Refused("; ".join([f"{verb} {directory}: {why}", *others]))


def split_words(options: Namespace, parser: Arguments, known: Collection[str] = ()) -> None:
    """Split `options.words` into `overrides`, `named` (those of `known`) and `run`.

    run: a path, None without one. BadInput for a second run, or for an override beside a run that
    names neither the user's code nor a path.
    """
    options.overrides = [word for word in options.words if "=" in word and not Path(word).is_dir()]
    others = [word for word in options.words if word not in options.overrides]
    options.named = [word for word in others if word in known]
    runs = [word for word in others if word not in known]
    for word in runs:
        if known and not Path(word).exists():
            allowed = must_be(word, known, "precision")
            raise BadInput(f"{parser.verb} {word}: is neither a folder nor a mode; {allowed}")
    if len(runs) > 1:
        parser.error(f"{runs[1]}: a second run directory, only one is allowed")
    options.run = Path(runs[0]) if runs else None
    from mprun.config.trust import is_outside  # here: loads Hydra, which a list of verbs need not

    for override in options.overrides if runs else ():
        if not is_outside(override):
            raise BadInput(
                f"{parser.verb} {runs[0]} {override}: a recorded run keeps its configuration; "
                "leave the override out"
            )


def unfinished(record: Record) -> Record:
    """Say that a run without an end is read as far as it goes; return its record."""
    if record.get("status") == "running":
        what = "goes on or was killed; it is read as far as it goes"
        print(f"mprun: {record.directory}: status running: {what}", file=sys.stderr)
    return record


def announce(text: str) -> None:
    """Tell a waiting user at a terminal, before torch is imported, which takes seconds."""
    if sys.stderr.isatty():
        note(f"{text} ...")


def tell_switch(precision: "PrecisionConfig") -> None:
    """Say that of a mode that changes the first one alone is measured."""
    from mprun.config.switches import told  # here: loads Hydra

    if later := told(precision):
        modes = ", ".join(f"{name} {place}" for name, place in later)
        note(f"advise measures {precision.name} alone, not precision.switch ({modes})")


def note(text: str) -> None:
    """Print a line on stderr, broken at the width of a terminal."""
    line = f"mprun: {text}"
    width = columns(200, sys.stderr) if sys.stderr.isatty() else None
    print(line if width is None else hanging(line, width, 4), file=sys.stderr, flush=True)


def add_seconds(parser: Arguments) -> None:
    """Add --seconds, the budget for trials."""
    seconds = number("--seconds", 0, 86400, "seconds")
    what = f"train changes for at most S seconds in all ({SECONDS})"
    parser.add_argument("--seconds", type=seconds, metavar="S", help=what)


def say_seconds(verb: str, seconds: float) -> None:
    """Say beforehand how long the trials may take."""
    note(f"{verb}: tries changes for at most {seconds:g} seconds (--seconds S)")


def command(config_dir: str | None, overrides: Iterable[str]) -> str:
    """Return the command line of a run, to be copied."""
    from mprun.config.overrides import in_shell  # here: loads Hydra

    place = [] if config_dir is None else ["--config-dir", config_dir]
    return " ".join([shlex.join(["mprun", *place]), in_shell(overrides)]).rstrip()


def page_width(beside: int = 0) -> int | None:
    """Return the columns of a page, less those `beside` a table; None: any, without a terminal."""
    return columns(200, sys.stdout) - beside if sys.stdout.isatty() else None


def page(content: dict[str, Any], lines: Iterable[str], as_json: bool) -> int:
    """Print the content as JSON, non-finite numbers as text, or the lines; return the exit code.

    On a terminal, lines are broken at its width, and commands so that they can be copied.
    """
    if as_json:
        print(json.dumps(plain(content), indent=1, allow_nan=False))
        return DONE
    width = page_width()
    for line in "\n".join(lines).split("\n"):
        if width is None or len(line) <= width:
            print(line)
        elif line.lstrip().startswith("mprun "):
            print(_broken_command(line, width))
        else:
            print(filled(line, width))
    return DONE


def _broken_command(line: str, width: int) -> str:
    """Break a command at its words; a shell joins the lines again."""
    indent = " " * (len(line) - len(line.lstrip()))
    rows = [f"{indent}mprun"]
    for word in map(shlex.quote, shlex.split(line)[1:]):
        if len(rows[-1]) + len(word) > width - 3:
            rows.append(f"{indent} ")
        rows[-1] += f" {word}"
    return " \\\n".join(rows)
