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
from dataclasses import asdict, dataclass
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


@dataclass(slots=True)
class Member:
    """A child that is ready to be measured."""

    row: Row
    child: ChildProcess
    steps: int = 1
    step_s: float = 0.0


class Session:
    """Measures groups until all is done or the deadline has come.

    `run` raises Interrupted, and TimeUp at the deadline; `close` ends every child, always.
    """

    def __init__(self, bench: Bench, groups: Sequence[Group], limits: Limits):
        self.bench, self.groups, self.limits = bench, groups, limits
        self.log, self.deadline = bench.log, bench.deadline
        self.rows = {group.label: [Row(case) for case in group.cases] for group in groups}
        self._children: list[ChildProcess] = []
        self._started: dict[str, ChildProcess] = {}
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
        for child in self._children:
            child.end()
        self._children.clear()
        self._started.clear()
        self.limits.close()

    def _measure_group(self, rows: list[Row], until: float) -> None:
        self.limits.ask(rows)
        waiting = list(rows)
        # Another cohort only where there is time for one more child at least.
        while waiting and START_SHARE * (until - time.monotonic()) > self._fastest_s:
            members = self._admit(waiting, rows, until)
            try:
                self.limits.collect(rows, until)
                self._measure(members, until)
            finally:
                for member in members:
                    self._end(member.child)
        for row in rows:
            self._end(self._started.pop(row.key, None))

    def _admit(self, waiting: list[Row], rows: list[Row], until: float) -> list[Member]:
        """Start children from the front of `waiting` until memory or time ends; those that may be
        timed."""
        self._cohort += 1
        now = time.monotonic()
        start_by, first_by = (now + share * (until - now) for share in (START_SHARE, FIRST_SHARE))
        members: list[Member] = []
        anchored: set[str] = set()
        while waiting and time.monotonic() < (start_by if members else first_by):
            row = waiting[0]
            anchor = self._anchor(row, rows, members)
            if anchor is not None and anchor.key not in anchored:
                anchored.add(anchor.key)
                partner = self._ready(anchor, start_by)
                members += [] if partner is None else [partner]
            for soon in waiting[: 1 + AHEAD[self.bench.device]]:
                self._start(soon)
            member = self._ready(row, start_by if members else first_by)
            if member is None and row.kind == "memory" and members and row.key not in self._late:
                self._late.add(row.key)
                self.log.say(f"{row.key}: no memory beside {len(members)} others; in turn later")
                break
            waiting.pop(0)
            if member is None:
                continue
            members.append(member)
            if row.facts["prepare"]["free"] < ROOM * row.facts["prepare"]["held"]:
                break
        if all(member.row.windows for member in members):
            # Nobody new is there to be held to them.
            for member in members:
                self._end(member.child)
            return []
        return self._equal(members, rows)

    def _anchor(self, row: Row, rows: list[Row], members: list[Member]) -> Row | None:
        """mprun's row that another tool's row is held to, if it was measured and is gone."""
        alive = {member.row.key for member in members}
        if row.case.real_data or row.case.contender in OWN:
            return None
        for own in rows:
            of_mode = own.case.contender == "mprun" and own.case.mode == row.case.mode
            if of_mode and own.windows and own.key not in alive and not own.case.real_data:
                return own
        return None

    def _ready(self, row: Row, start_by: float) -> Member | None:
        """Build a contender, take its first steps, prepare it; None if it does not get there."""
        child = self._start(row)
        self._started.pop(row.key)
        by, began = min(start_by, self.deadline), time.monotonic()
        try:
            row.facts["build"] = child.ask(
                by, "build", case=asdict(row.case), device=self.bench.device
            )
            found = child.ask(by, "first_steps")
            row.facts["prepare"] = child.ask(by, "prepare")
        except ChildFailed as failure:
            self._failed(row, child, failure, timed=False)
            return None
        except TimeUp:
            self._end(child)
            if not row.windows:
                row.failed("not measured", _LATE)
            self.log.say(f"{row.key}: {_LATE}")
            if time.monotonic() >= self.deadline:
                raise
            return None
        took = time.monotonic() - began
        self._fastest_s = min(took, self._fastest_s or took)
        row.kind = None
        row.equality = row.equality or found
        self.log.write("ready", case=row.key, equality=found, **row.facts)
        self.log.say(f"{row.key}: ready after {sum(found['seconds']):.1f} s of first steps")
        return Member(row, child)

    def _equal(self, members: list[Member], rows: list[Row]) -> list[Member]:
        """Those that compute the same as the others; the rest is ended and says why."""
        taken = [row for row in rows if "losses" in row.equality and not row.case.real_data]
        answers = self.bench.contest.check(taken)
        for row in taken:
            if row.key in answers:
                row.equality |= dict(zip(("ok", "reason"), answers[row.key], strict=True))
        kept = []
        for member in members:
            row = member.row
            if row.equality.get("ok", True):
                kept.append(member)
                continue
            self._end(member.child)
            row.failed("unequal", row.equality["reason"])
            self.log.write("unequal", case=row.key, reason=row.reason)
            self.log.say(f"{row.key}: not timed, {row.reason}")
        return kept

    def _measure(self, members: list[Member], until: float) -> None:
        alive = list(members)
        left = max(0.0, until - time.monotonic())
        least, most = WARM_UP_S
        limit = min(max(least, 0.4 * left / max(1, len(alive))), most[self.bench.device])
        for member in members:
            self._try(member, alive, self._warm_up, limit)
        windows = self.bench.options.windows
        for number in range(windows if alive else 0):
            steps = DETAILS_STEPS if number >= ROUNDS else 0
            length = sum((member.steps + steps) * member.step_s for member in alive)
            if number and time.monotonic() + length > until:
                self.log.say(f"{number} of {windows} rounds within the budget")
                break
            for member in list(alive):
                self._try(member, alive, self._window, number)
        for position, member in enumerate(list(alive)):
            left = until - time.monotonic()
            seconds = min(DETAILS_S, left / (len(alive) - position + 1))
            if seconds > 0 and not member.row.details:
                self._try(member, alive, self._details, seconds)

    def _try(
        self, member: Member, alive: list[Member], measure: Callable[..., None], argument: float
    ) -> None:
        try:
            measure(member, argument)
        except ChildFailed as failure:
            alive.remove(member)
            self._failed(member.row, member.child, failure, timed=True)

    def _failed(self, row: Row, child: ChildProcess, failure: ChildFailed, timed: bool) -> None:
        """End the child and note why; `timed`: while it was measured, not while it got ready."""
        self._end(child)
        if timed or not row.windows:
            row.failed(_KINDS[failure.kind], failure.reason, failure.kind)
        self.log.write("failed", case=row.key, kind=failure.kind, reason=failure.reason)
        if timed or failure.kind != "memory":
            self.log.say(f"{row.key}: {failure.reason}")

    def _warm_up(self, member: Member, limit_s: float) -> None:
        steps = self.bench.options.steps_per_window
        found = member.child.ask(self.deadline, "warm_up", limit_s=limit_s, steps=steps)
        member.steps, member.step_s = found["steps_per_window"], found["step_s"]
        member.row.warm_up = found
        self.log.write("warm_up", case=member.row.key, cohort=self._cohort, **found)

    def _window(self, member: Member, number: int) -> None:
        found = member.child.ask(self.deadline, "window", steps=member.steps)
        found = {"cohort": self._cohort, "round": number, **found}
        member.row.add(found)
        self.log.write("window", case=member.row.key, **found)
        rate, sample = found["samples"] / found["seconds"], member.row.facts["build"]["sample"]
        self.log.say(f"{member.row.key}: {rate:,.0f} {sample}s/s")

    def _details(self, member: Member, seconds: float) -> None:
        step_s = member.row.windows[-1]["seconds"] / member.row.windows[-1]["steps"]
        found = member.child.ask(self.deadline, "details", step_s=step_s, seconds=seconds)
        member.row.details = found
        self.log.write("details", case=member.row.key, **found)

    def _start(self, row: Row) -> ChildProcess:
        if row.key not in self._started:
            number = len(list((self.bench.folder / "logs").glob("*.log"))) + 1
            name = f"{row.case.label}-{row.case.mode}-{row.case.contender}"
            name = "".join(c if c.isalnum() or c in "+-." else "_" for c in name)
            self._started[row.key] = self.bench.child(f"{number:03d}-{name}")
            self._children.append(self._started[row.key])
        return self._started[row.key]

    def _end(self, child: ChildProcess | None) -> None:
        if child is not None and child in self._children:
            child.end()
            self._children.remove(child)
