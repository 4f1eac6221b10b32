"""The order of a bench: who is alive when, whose window is next, what is left out when time ends.

Contenders of one model are started one after the other, each in a process of its own, and stay
alive together as long as memory lasts: a cohort. Then their windows follow one another round
robin, so that drift of clock and temperature meets all of them alike. Only one of them works at a
time. Where memory does not hold all of them, the rest follow in further cohorts, each together
with mprun's own contender of the mode, for the sake of a paired ratio.
"""

import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mprun.bench.child import ChildFailed, ChildProcess, TimeUp
from mprun.bench.own import Contest
from mprun.bench.plan import OWN, Group, Options, Row
from mprun.training.signals import Interruption

START_SHARE = 0.6  # of a model's time, at most, until its windows begin
FIRST_SHARE = 0.85  # the same, where nobody is ready yet
LIMITS_SHARE = 0.25  # of a model's remaining time, at most, until its steps are counted
# Least and most. Steps that are bound by their launches may never agree within 2 %.
WARM_UP_S = (1.0, {"cuda": 6.0, "cpu": 8.0})
DETAILS_S, DETAILS_STEPS = 12.0, 30  # most for what is measured beside the windows, and about
ROUNDS = 3  # that come before that, where time is short
ROOM = 1.5  # free memory over that of the last child, below which no other one is started
AHEAD = {"cuda": 3, "cpu": 1}  # children that import while another one is prepared
_KINDS = {"refused": "refused", "memory": "failed", "error": "failed"}
_LATE = "not ready within its share of the budget"


def writable(value: Any) -> Any:
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

    def write(self, event: str, **content: Any) -> None:
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


@dataclass(frozen=True, slots=True)
class Bench:
    """What all parts of a bench share. folder: of its files. deadline: of time.monotonic."""

    contest: Contest
    options: Options
    device: str
    folder: Path
    log: Log
    interruption: Interruption
    deadline: float

    def child(self, name: str) -> ChildProcess:
        """A new child, with a log file of that name."""
        log = self.folder / "logs" / f"{name}.log"
        return ChildProcess(log, self.interruption, self.contest.command)


class Limits:
    """The roofline limit of each row, counted by a process of its own while the children start.

    It has to be there before the windows begin, because nothing else may work beside them; what is
    not counted by then stays without a limit.

    Args:
        ceilings: as measured; None: no limits are asked for.
        name: of the device.
    """

    def __init__(self, bench: Bench, ceilings: dict | None, name: str):
        self.bench, self.ceilings, self.name = bench, ceilings, name
        self._child: ChildProcess | None = None
        self._asked: list[tuple[str, str]] = []
        self._known: dict[tuple[str, str], dict] = {}

    def ask(self, rows: Sequence[Row]) -> None:
        """Have the steps of these rows counted, each model and mode once."""
        for row in rows if self.ceilings is not None else ():
            wanted = (row.case.label, row.case.mode)
            if wanted in self._known or wanted in self._asked:
                continue
            if self.bench.device == "cpu" and row.case.mode != "fp32":
                self._known[wanted] = {"why_not": "emulated on a CPU: no ceiling of its own"}
                continue
            self._child = self._child or self.bench.child("limits")
            try:
                case = asdict(row.case)
                self._child.post("limit", case=case, ceilings=self.ceilings, name=self.name)
                self._asked.append(wanted)
            except ChildFailed as failure:
                self._known[wanted] = {"why_not": failure.reason}

    def collect(self, rows: Sequence[Row], until: float) -> None:
        """Give each row its limit; waits for the counts, but not for ever, and ends the process."""
        by = time.monotonic() + LIMITS_SHARE * max(0.0, until - time.monotonic())
        while self._asked and self._child is not None:
            wanted = self._asked.pop(0)
            try:
                self._known[wanted] = self._child.take(by)
            except ChildFailed as failure:
                self._known[wanted] = {"why_not": failure.reason}
            except TimeUp:
                late = {"why_not": "not counted within the budget"}
                self._known |= dict.fromkeys((wanted, *self._asked), late)
                self._asked.clear()
        self.close()
        for row in rows:
            row.limit = self._known.get((row.case.label, row.case.mode), row.limit)

    def close(self) -> None:
        """End the process."""
        if self._child is not None:
            self._child.end()
            self._child = None


class Session:
    """Measures groups until all is done or the deadline has come.

    `run` raises Interrupted, and TimeUp at the deadline; `close` ends every child, always.
    """

    def __init__(self, bench: Bench, groups: Sequence[Group], limits: Limits):
        self.bench, self.groups, self.limits = bench, groups, limits
        self.log, self.deadline = bench.log, bench.deadline
        self.rows = {group.label: [Row(case) for case in group.cases] for group in groups}
        self._children: dict[str, ChildProcess] = {}  # that are alive, by the key of their row
        self._late: set[str] = set()  # keys of rows that found no memory beside others
        self._fastest_s = 0.0  # the fastest of all children until it was ready
        self._cohort = 0

    def all_rows(self) -> list[Row]:
        """Every case, measured or not, in order."""
        return [row for rows in self.rows.values() for row in rows]

    def run(self) -> None:
        """Measure group after group; what a group does not use of its time, the later ones have."""
        for number, group in enumerate(self.groups):
            now = time.monotonic()
            weights = [later.weight for later in self.groups[number:]]
            until = now + (self.deadline - now) * group.weight / sum(weights)
            self._measure_group(self.rows[group.label], until)

    def close(self) -> None:
        """End every child."""
        self._end(self.all_rows())
        self.limits.close()

    def _measure_group(self, rows: list[Row], until: float) -> None:
        self.limits.ask(rows)
        waiting = list(rows)
        # Another cohort only where there is time for one more child at least.
        while waiting and START_SHARE * (until - time.monotonic()) > self._fastest_s:
            alive = self._admit(waiting, rows, until)
            try:
                self.limits.collect(rows, until)
                self._measure(alive, until)
            finally:
                self._end(alive)
        self._end(rows)

    def _admit(self, waiting: list[Row], rows: list[Row], until: float) -> list[Row]:
        """Start children from the front of `waiting` until memory or time ends; those that may be
        timed."""
        self._cohort += 1
        now = time.monotonic()
        start_by, first_by = (now + share * (until - now) for share in (START_SHARE, FIRST_SHARE))
        alive: list[Row] = []
        tried: set[str] = set()  # keys of anchors
        while waiting and time.monotonic() < (start_by if alive else first_by):
            row = waiting[0]
            for anchor in self._anchors(row, rows, tried):
                tried.add(anchor.key)
                alive += self._ready(anchor, start_by)
            for soon in waiting[: 1 + AHEAD[self.bench.device]]:
                self._start(soon)
            ready = self._ready(row, start_by if alive else first_by)
            if not ready and self._waits_for_memory(row, alive):
                break
            alive += ready
            waiting.pop(0)
            if ready and not row.leaves_room(ROOM):
                break
        return self._worth_timing(alive, rows)

    def _anchors(self, row: Row, rows: list[Row], tried: set[str]) -> list[Row]:
        """mprun's row that another tool's row is held to, if it was measured and is gone."""
        if row.case.real_data or row.case.contender in OWN:
            return []
        wanted = replace(row.case, contender="mprun").key
        alive = tried | self._children.keys()
        return [own for own in rows if own.key == wanted and own.windows and wanted not in alive]

    def _waits_for_memory(self, row: Row, alive: list[Row]) -> bool:
        """Whether a row that found no memory beside others is tried once more without them."""
        if row.kind != "memory" or not alive or row.key in self._late:
            return False
        self._late.add(row.key)
        self.log.say(f"{row.key}: no memory beside {len(alive)} others; in turn later")
        return True

    def _ready(self, row: Row, start_by: float) -> list[Row]:
        """Build a contender, take its first steps, prepare it; the row, if it gets there."""
        child = self._start(row)
        by, began = min(start_by, self.deadline), time.monotonic()
        case = asdict(row.case)
        try:
            row.facts["build"] = child.ask(by, "build", case=case, device=self.bench.device)
            found = child.ask(by, "first_steps")
            row.facts["prepare"] = child.ask(by, "prepare")
        except ChildFailed as failure:
            self._failed(row, failure, timed=False)
            return []
        except TimeUp:
            self._end([row])
            if not row.windows:
                row.failed("not measured", _LATE)
            self.log.say(f"{row.key}: {_LATE}")
            if time.monotonic() >= self.deadline:
                raise
            return []
        took = time.monotonic() - began
        self._fastest_s = min(took, self._fastest_s or took)
        row.kind = None
        row.equality = row.equality or found
        self.log.write("ready", case=row.key, equality=found, **row.facts)
        self.log.say(f"{row.key}: ready after {sum(found['seconds']):.1f} s of first steps")
        return [row]

    def _worth_timing(self, alive: list[Row], rows: list[Row]) -> list[Row]:
        """Those that compute the same as the others; the rest is ended and says why."""
        if all(row.windows for row in alive):
            self._end(alive)  # nobody new is there to be held to them
            return []
        taken = [row for row in rows if "losses" in row.equality and not row.case.real_data]
        answers = self.bench.contest.check(taken)
        for row in taken:
            ok, reason = answers.get(row.key, (True, ""))
            row.equality |= {"ok": ok, "reason": reason}
        wrong = [row for row in alive if not row.equality.get("ok", True)]
        self._end(wrong)
        for row in wrong:
            row.failed("unequal", row.equality["reason"])
            self.log.write("unequal", case=row.key, reason=row.reason)
            self.log.say(f"{row.key}: not timed, {row.reason}")
        return [row for row in alive if row not in wrong]

    def _measure(self, alive: list[Row], until: float) -> None:
        left = max(0.0, until - time.monotonic())
        least, most = WARM_UP_S
        limit = min(max(least, 0.4 * left / max(1, len(alive))), most[self.bench.device])
        alive = [row for row in alive if self._asked(row, self._warm_up, limit)]
        alive = self._rounds(alive, until)
        for position, row in enumerate(alive):
            seconds = min(DETAILS_S, (until - time.monotonic()) / (len(alive) - position + 1))
            if seconds > 0 and not row.details:
                self._asked(row, self._details, seconds)

    def _rounds(self, alive: list[Row], until: float) -> list[Row]:
        """A window of each, again and again; those that are alive then."""
        windows = self.bench.options.windows
        for number in range(windows if alive else 0):
            more = DETAILS_STEPS if number >= ROUNDS else 0
            warm = [row.warm_up for row in alive]
            length = sum((found["steps_per_window"] + more) * found["step_s"] for found in warm)
            if number and time.monotonic() + length > until:
                self.log.say(f"{number} of {windows} rounds within the budget")
                break
            alive = [row for row in alive if self._asked(row, self._window, number)]
        return alive

    def _asked(self, row: Row, measure: Callable[..., None], argument: float) -> bool:
        """Whether it went well; else the child is ended and the row says why."""
        try:
            measure(row, self._children[row.key], argument)
        except ChildFailed as failure:
            self._failed(row, failure, timed=True)
            return False
        return True

    def _failed(self, row: Row, failure: ChildFailed, timed: bool) -> None:
        """End the child and note why; `timed`: while it was measured, not while it got ready."""
        self._end([row])
        if timed or not row.windows:
            row.failed(_KINDS[failure.kind], failure.reason, failure.kind)
        self.log.write("failed", case=row.key, kind=failure.kind, reason=failure.reason)
        if timed or failure.kind != "memory":
            self.log.say(f"{row.key}: {failure.reason}")

    def _warm_up(self, row: Row, child: ChildProcess, limit_s: float) -> None:
        steps = self.bench.options.steps_per_window
        row.warm_up = child.ask(self.deadline, "warm_up", limit_s=limit_s, steps=steps)
        self.log.write("warm_up", case=row.key, cohort=self._cohort, **row.warm_up)

    def _window(self, row: Row, child: ChildProcess, number: int) -> None:
        found = child.ask(self.deadline, "window", steps=row.warm_up["steps_per_window"])
        row.add({"cohort": self._cohort, "round": number, **found})
        self.log.write("window", case=row.key, **row.windows[-1])
        rate, sample = found["samples"] / found["seconds"], row.facts["build"]["sample"]
        self.log.say(f"{row.key}: {rate:,.0f} {sample}s/s")

    def _details(self, row: Row, child: ChildProcess, seconds: float) -> None:
        step_s = row.windows[-1]["seconds"] / row.windows[-1]["steps"]
        row.details = child.ask(self.deadline, "details", step_s=step_s, seconds=seconds)
        self.log.write("details", case=row.key, **row.details)

    def _start(self, row: Row) -> ChildProcess:
        if row.key not in self._children:
            number = len(list((self.bench.folder / "logs").glob("*.log"))) + 1
            name = f"{row.case.label}-{row.case.mode}-{row.case.contender}"
            name = "".join(c if c.isalnum() or c in "+-." else "_" for c in name)
            self._children[row.key] = self.bench.child(f"{number:03d}-{name}")
        return self._children[row.key]

    def _end(self, rows: Sequence[Row]) -> None:
        for row in rows:
            child = self._children.pop(row.key, None)
            if child is not None:
                child.end()
