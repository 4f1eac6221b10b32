"""The verbs, a file each, and what they share: the record that they read, the page they print."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mprun.errors import DONE, BadInput
from mprun.numerics.post_mortem import plain
from mprun.record.run_record import Record, read_record


def record_of(verb: str, directory: Path, instead: str = "a run directory") -> Record:
    """Return run.json; BadInput if `directory` has none, Damaged if it is broken."""
    if not (directory / "run.json").is_file():
        raise BadInput(f"{verb} {directory}: no run.json there; pass {instead}")
    return read_record(directory)


def page(content: dict[str, Any], lines: Iterable[str], as_json: bool) -> int:
    """Print the content as JSON, non-finite numbers as text, or the lines; return the exit code."""
    print(json.dumps(plain(content), indent=1, allow_nan=False) if as_json else "\n".join(lines))
    return DONE
