"""The roofline limit of each row, counted by a process of its own while the children start.

It has to be there before the windows begin, because nothing else may work beside them; what is not
counted by then stays without a limit.
"""

import time
from pathlib import Path

from mprun.bench.child_process import ChildFailed, ChildProcess, TimeUp
from mprun.bench.rows import Row
from mprun.training.signals import Interruption

_PATIENCE = 0.25  # of a model's remaining time, at most


class Limits:
    """ceilings: as measured; None: no limits are asked for, for the reason `why_not`."""

    def __init__(
        self, ceilings: dict | None, device: str, log: Path, interruption: Interruption, name: str
    ):
        self.ceilings, self.device, self.log = ceilings, device, log
        self.interruption, self.name = interruption, name
        self._child: ChildProcess | None = None
        self._asked: list[tuple[str, str]] = []
        self._known: dict[tuple[str, str], dict] = {}

    def ask(self, rows: list[Row]) -> None:
        """Have the steps of these rows counted, each model and mode once."""
        if self.ceilings is None:
            return
        for row in rows:
            wanted = (row.case.label, row.case.mode)
            if wanted in self._known or wanted in self._asked:
                continue
            if self.device == "cpu" and row.case.mode != "fp32":
                self._known[wanted] = {"why_not": "emulated on a CPU: no ceiling of its own"}
                continue
            if self._child is None:
                self._child = ChildProcess(self.log, self.interruption)
            request = {"overrides": list(row.case.overrides), "mode": row.case.mode}
            try:
                self._child.post("limit", **request, ceilings=self.ceilings, name=self.name)
                self._asked.append(wanted)
            except ChildFailed as failure:
                self._known[wanted] = {"why_not": failure.reason}

    def collect(self, rows: list[Row], until: float) -> None:
        """Give each row its limit; waits for the counts, but not for ever, and ends the process."""
        by = time.monotonic() + _PATIENCE * max(0.0, until - time.monotonic())
        while self._asked:
            wanted = self._asked.pop(0)
            try:
                self._known[wanted] = self._child.take(by)
            except ChildFailed as failure:
                self._known[wanted] = {"why_not": failure.reason}
            except TimeUp:
                for late in (wanted, *self._asked):
                    self._known[late] = {"why_not": "not counted within the budget"}
                self._asked.clear()
        self.close()
        for row in rows:
            row.limit = self._known.get((row.case.label, row.case.mode), row.limit)

    def close(self) -> None:
        """End the process."""
        if self._child is not None:
            self._child.end()
            self._child = None
