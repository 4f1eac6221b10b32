"""What is known of each case while a bench goes on, and the file that keeps it as it comes in."""

import json
import math
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mprun.bench.contender import Case
from mprun.bench.plan import case_key


@dataclass(slots=True)
class Row:
    """One case.

    status: measured, failed, refused, unequal or not measured. reason: of the last four, or why
    there is no more of a measured one. kind: of a failure, "memory" or "error". facts: what the
    child said of itself, by request. windows: as in `mprun.bench.measure.Window`, each with its
    cohort and round. limit: of the roofline, or {"why_not": reason}.
    """

    case: Case
    status: str = "not measured"
    reason: str = "its turn did not come within the budget"
    kind: str | None = None
    facts: dict = field(default_factory=dict)
    equality: dict = field(default_factory=dict)
    warm_up: dict = field(default_factory=dict)
    windows: list[dict] = field(default_factory=list)
    details: dict = field(default_factory=dict)
    limit: dict = field(default_factory=dict)

    @property
    def key(self) -> str:
        return case_key(self.case)

    def failed(self, status: str, reason: str, kind: str | None = None) -> None:
        """Note why there is nothing, or nothing more, of this case."""
        if self.windows:
            self.reason = f"later: {reason}"
            return
        self.status, self.reason, self.kind = status, reason, kind

    def add(self, window: dict) -> None:
        """Keep a window: from the first one on the case is measured."""
        self.windows.append(window)
        self.status, self.reason = "measured", ""

    def as_dict(self) -> dict:
        return asdict(self)


def writable(value):
    """The value for a JSON file, which has no NaN: "nan", "inf" and "-inf" stand for these."""
    if isinstance(value, dict):
        return {key: writable(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [writable(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class Log:
    """bench.jsonl: one event a line, written at once; and what a user sees on stderr meanwhile."""

    def __init__(self, path: Path, budget_s: float):
        self.file = open(path, "x", encoding="utf-8")  # noqa: SIM115 - lives as long as the bench
        self.started, self.budget_s = time.monotonic(), budget_s

    def write(self, event: str, **content) -> None:
        """Append an event with the seconds since the start."""
        line = {"event": event, "t": round(self.elapsed(), 3), **content}
        self.file.write(json.dumps(writable(line), allow_nan=False) + "\n")
        self.file.flush()

    def say(self, text: str) -> None:
        """A line of progress with the time that is gone."""
        print(f"[{self.elapsed():4.0f}/{self.budget_s:.0f} s] {text}", file=sys.stderr, flush=True)

    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    def close(self) -> None:
        self.file.close()
