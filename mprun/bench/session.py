"""The order of a bench: who is alive when, whose window is next, what is left out when time ends.

Contenders of one model are started one after the other, each in a process of its own, and stay
alive together as long as memory lasts: a cohort. Then their windows follow one another round
robin, so that drift of clock and temperature meets all of them alike. Only one of them works at a
time. Where memory does not hold all of them, the rest follow in further cohorts, each together
with mprun's own contender of the mode, for the sake of a paired ratio.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mprun.bench.child_process import CHILD_COMMAND, ChildFailed, ChildProcess, TimeUp
from mprun.bench.contender import Case
from mprun.bench.equality import TWINS
from mprun.bench.limits import Limits
from mprun.bench.plan import Group
from mprun.bench.registry import OWN
from mprun.bench.rows import Log, Row
from mprun.training.signals import Interruption

START_SHARE = 0.6  # of a model's time, at most, until its windows begin
FIRST_SHARE = 0.85  # the same, where nobody is ready yet
# Least and most. Steps that are bound by their launches may never agree within 2 %.
WARM_UP_S = (1.0, {"cuda": 6.0, "cpu": 8.0})
DETAILS_S, DETAILS_STEPS = 12.0, 30  # most for what is measured beside the windows, and about
ROUNDS = 3  # that come before that, where time is short
ROOM = 1.5  # free memory over that of the last child, below which no other one is started
_KINDS = {"refused": "refused", "memory": "failed", "error": "failed"}


@dataclass(slots=True)
class Member:
    """A child that is ready to be measured."""

    row: Row
    child: ChildProcess
    steps: int = 1
    step_s: float = 0.0


class Session:
    """Measures groups until all is done or the deadline (of time.monotonic) has come.

    check: from the rows of a label with their equality losses to (ok, reason) by row key.
    `run` raises Interrupted, and TimeUp at the deadline; `close` ends every child, always.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        device: str,
        folder: Path,
        log: Log,
        interruption: Interruption,
        deadline: float,
        limits: Limits,
        check: Callable[[list[Row]], dict[str, tuple[bool, str]]],
        *,
        windows: int = 5,
        steps_per_window: int | None = None,
        ahead: int = 1,
        command: Sequence[str] = CHILD_COMMAND,
    ):
        self.groups, self.device, self.folder, self.log = groups, device, folder, log
        self.interruption, self.deadline, self.limits = interruption, deadline, limits
        self.check, self.windows, self.steps_per_window = check, windows, steps_per_window
        self.ahead, self.command = ahead, command
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
            self._measure_group(group, until)

    def close(self) -> None:
        """End every child."""
        for child in self._children:
            child.end()
        self._children.clear()
        self._started.clear()

    def _measure_group(self, group: Group, until: float) -> None:
        rows = self.rows[group.label]
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
                member = self._ready(anchor, start_by)
                members += [] if member is None else [member]
            for soon in waiting[: 1 + self.ahead]:
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
        """Build a contender, take the equality steps, prepare it; None if it does not get there."""
        child = self._start(row)
        self._started.pop(row.key)
        by, began = min(start_by, self.deadline), time.monotonic()
        case = asdict(row.case)
        try:
            row.facts["build"] = child.ask(by, "build", case=case, device=self.device)
            found = child.ask(by, "equality")
            if row.case.contender in TWINS and not row.case.real_data:
                found |= child.ask(by, "twin")
            row.facts["prepare"] = child.ask(by, "prepare")
        except ChildFailed as failure:
            self._end(child)
            if not row.windows:
                row.failed(_KINDS[failure.kind], failure.reason, failure.kind)
            self.log.write("failed", case=row.key, kind=failure.kind, reason=failure.reason)
            if failure.kind != "memory":
                self.log.say(f"{row.key}: {failure.reason}")
            return None
        except TimeUp:
            self._end(child)
            if not row.windows:
                row.failed("not measured", "not ready within its share of the budget")
            self.log.say(f"{row.key}: not ready within its share of the budget")
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
        verdicts = self.check(taken)
        for key, (ok, reason) in verdicts.items():
            row = next(row for row in rows if row.key == key)
            row.equality |= {"ok": ok, "reason": reason}
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
        limit = min(max(WARM_UP_S[0], 0.4 * left / max(1, len(alive))), WARM_UP_S[1][self.device])
        for member in list(alive):
            self._try(member, alive, self._warm_up, limit)
        for number in range(self.windows if alive else 0):
            length = sum(member.steps * member.step_s for member in alive)
            if number >= ROUNDS:
                length += sum(DETAILS_STEPS * member.step_s for member in alive)
            if number and time.monotonic() + length > until:
                self.log.say(f"{number} of {self.windows} rounds within the budget")
                break
            for member in list(alive):
                self._try(member, alive, self._window, number)
        for position, member in enumerate(list(alive)):
            left = until - time.monotonic()
            seconds = min(DETAILS_S, left / (len(alive) - position + 1))
            if seconds > 0 and not member.row.details:
                self._try(member, alive, self._details, seconds)

    def _try(self, member: Member, alive: list[Member], measure: Callable, argument) -> None:
        try:
            measure(member, argument)
        except ChildFailed as failure:
            alive.remove(member)
            self._end(member.child)
            self.log.write("failed", case=member.row.key, reason=failure.reason, kind=failure.kind)
            self.log.say(f"{member.row.key}: {failure.reason}")
            member.row.failed(_KINDS[failure.kind], failure.reason, failure.kind)

    def _warm_up(self, member: Member, limit_s: float) -> None:
        found = member.child.ask(
            self.deadline, "warm_up", limit_s=limit_s, steps=self.steps_per_window
        )
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
            number = len(list((self.folder / "logs").glob("*.log"))) + 1
            log = self.folder / "logs" / f"{number:03d}-{_file_name(row.case)}.log"
            child = ChildProcess(log, self.interruption, self.command)
            self._started[row.key] = child
            self._children.append(child)
        return self._started[row.key]

    def _end(self, child: ChildProcess | None) -> None:
        if child in self._children:
            child.end()
            self._children.remove(child)


def _file_name(case: Case) -> str:
    text = f"{case.label}-{case.mode}-{case.contender}"
    return "".join(c if c.isalnum() or c in "+-." else "_" for c in text)
