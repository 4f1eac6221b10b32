"""The order of a bench: which children are alive, whose window is next, what a late end drops.

Contenders of one model start one after the other, each in a separate process. They stay alive
together as long as memory lasts: a cohort. Then their windows follow one another round robin, so
that drift of clock and temperature affects all of them alike. Only one of them works at a time.
"""

import json
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from mprun.config.compose import compose_config
from mprun.errors import BadInput
from mprun.extensions.bench.cases import BenchGroup, BenchRow
from mprun.extensions.bench.child import ChildFailed, ChildProcess, TimeUp
from mprun.extensions.bench.contest import Contest
from mprun.extensions.bench.report import write_figure
from mprun.record.run_directory import claim, json_values, write_json, write_text
from mprun.recording.environment import environment
from mprun.training.run import resolve_device
from mprun.training.signals import Interruption, Stopped

CEILINGS_S = 6.0
CEILINGS_SHARE = 0.4  # the ceilings' largest share of the budget
START_SHARE = 0.6  # largest share of a model's time until its windows begin
FIRST_SHARE = 0.85  # the same while no child is ready
LIMITS_SHARE = 0.25  # largest share of a model's remaining time to count its steps
# Minimum and maximum. Steps that are bound by their launches may never agree within 2 %.
WARM_UP_S = (1.0, {"cuda": 6.0, "cpu": 8.0})
DETAILS_S, DETAILS_STEPS = 12.0, 30  # of the details: most seconds, and their steps, roughly
ROUNDS = 3  # rounds of windows that come before the details if time is short
ROOM = 1.5  # no other child starts below this ratio of free memory to the last child's
AHEAD = {"cuda": 3, "cpu": 1}  # children that import while another one is prepared
FORMAT = 1  # version of bench.json
_REPORT_S = 6.0  # reserve in the budget for tables and figure
_EMULATED = {"why_not": "emulated on a CPU: no ceiling of its own"}
_LATE = "not ready within its share of the budget"


class Log:
    """bench.jsonl, one event a line, written at once, and the progress lines on stderr."""

    def __init__(self, path: Path, budget_s: float):
        self.file = open(path, "x", encoding="utf-8")  # noqa: SIM115 - lives as long as the bench
        self.started, self.budget_s = time.monotonic(), budget_s

    def write(self, event: str, **content: Any) -> None:
        """Append an event with the seconds since the start."""
        line = {"event": event, "t": round(time.monotonic() - self.started, 3), **content}
        self.file.write(json.dumps(json_values(line), allow_nan=False) + "\n")
        self.file.flush()

    def say(self, text: str) -> None:
        """Print a line of progress with the elapsed time."""
        elapsed = time.monotonic() - self.started
        print(f"[{elapsed:4.0f}/{self.budget_s:.0f} s] {text}", file=sys.stderr, flush=True)


class Session:
    """A measurement of all groups until the end or the deadline (a time of time.monotonic).

    `run` raises TimeUp at the deadline; `close` always ends every child.

    Attributes:
        rows: every case, measured or not, in order.
        machine: ceilings, driver and NVML's errors, or why there are none.
    """

    def __init__(
        self,
        contest: Contest,
        options: Namespace,
        groups: Sequence[BenchGroup],
        device: torch.device,
        folder: Path,
        deadline: float,
    ):
        self.contest, self.options, self.groups, self.device = contest, options, groups, device
        self.folder, self.deadline = folder, deadline
        self.log = Log(folder / "bench.jsonl", options.budget_s)
        self.log.write("start", options=vars(options))
        self.rows = [BenchRow(case) for group in groups for case in group.cases]
        self.machine: dict = {}
        self._children: dict[str, ChildProcess] = {}  # living ones, by the key of their row
        self._late: set[str] = set()  # keys of rows that found no memory beside others
        self._fastest_s = 0.0  # time until ready of the fastest child
        self._cohort = 0

    def measure_ceilings(self) -> None:
        """Fill `machine` by a separate child."""
        child, options, log = self._child("ceilings"), self.options, self.log
        by = min(log.started + CEILINGS_SHARE * options.budget_s, self.deadline)
        request = {
            "device": self.device.type,
            "seconds": min(CEILINGS_S, 0.1 * options.budget_s),
            "threads": compose_config(options.overrides, options.config_dir).config.threads,
        }
        try:
            self.machine = child.ask(by, "ceilings", **request)
            log.say(f"copy {self.machine['ceilings']['bandwidth'] / 1e9:,.0f} GB/s")
        except (ChildFailed, TimeUp) as error:
            log.say(f"ceilings: {error.reason}")
            self.machine = {"why_not": error.reason}
        finally:
            child.end()
        log.write("ceilings", **self.machine)

    def run(self, after_group: Callable[[], object] = lambda: None) -> None:
        """Measure group after group; later groups get the time that a group does not use."""
        rows = iter(self.rows)
        for number, group in enumerate(self.groups):
            now = time.monotonic()
            weights = [later.weight for later in self.groups[number:]]
            until = now + (self.deadline - now) * group.weight / sum(weights)
            self._measure_group(list(islice(rows, len(group.cases))), until)
            after_group()

    def close(self) -> None:
        self._end(*self._children)
        self.log.write("end")
        self.log.file.close()

    def _measure_group(self, rows: list[BenchRow], until: float) -> None:
        counted = self._ask_limits(rows)
        waiting = list(rows)
        # Begin another cohort only if there is time for one more child at least.
        while waiting and START_SHARE * (until - time.monotonic()) > self._fastest_s:
            alive = self._admit(waiting, rows, until)
            try:
                if "limits" in self._children:
                    limits = self._collected_limits(counted, until)
                    for row in rows:
                        row.limit = limits.get(row.case.mode, _EMULATED)
                self._measure(alive, until)
            finally:
                self._end(*(row.key for row in alive))
        self._end("limits", *(row.key for row in rows))

    def _ask_limits(self, rows: list[BenchRow]) -> list[str]:
        """Let a separate process count the step of each mode while the children start.

        Counting ends before the windows begin, because nothing else may work beside them. A mode
        that is not counted by then has no limit. Returns the modes.
        """
        cases = {row.case.mode: row.case for row in rows}
        modes = [mode for mode in cases if self.device.type == "cuda" or mode == "fp32"]
        if (ceilings := self.machine.get("ceilings")) is not None:
            self._children["limits"] = child = self._child("limits")
            about = {"ceilings": ceilings, "name": device_name(self.device)}
            for mode in modes:
                child.post("limit", case=cases[mode], **about)
        return modes

    def _collected_limits(self, modes: list[str], until: float) -> dict[str, dict]:
        """Wait for the counts up to a time, then end the process; return the limits by mode."""
        by = time.monotonic() + LIMITS_SHARE * max(0.0, until - time.monotonic())
        found = dict.fromkeys(modes, {"why_not": "not counted within the budget"})
        with suppress(TimeUp):
            for mode in modes:
                try:
                    found[mode] = self._children["limits"].take(by)
                except ChildFailed as failure:
                    found[mode] = {"why_not": failure.reason}
        self._end("limits")
        return found

    def _admit(self, waiting: list[BenchRow], rows: list[BenchRow], until: float) -> list[BenchRow]:
        """Start children from the front of `waiting` until memory or time ends.

        Returns the rows that may be timed.
        """
        self._cohort += 1
        now = time.monotonic()
        start_by, first_by = (now + share * (until - now) for share in (START_SHARE, FIRST_SHARE))
        alive: list[BenchRow] = []
        partners = {row.key: row for row in rows if row.windows}
        while waiting and time.monotonic() < (start_by if alive else first_by):
            row = waiting[0]
            wanted = self.contest.partner(row.case)
            partner = partners.pop(wanted.key, None) if wanted else None
            if partner is not None and self._ready(partner, start_by):
                alive.append(partner)
            for soon in waiting[: 1 + AHEAD[self.device.type]]:
                self._start(soon)
            ready = self._ready(row, start_by if alive else first_by)
            if not ready and self._waits_for_memory(row, alive):
                break
            waiting.pop(0)
            if ready:
                alive.append(row)
                memory = row.facts["prepare"]
                if memory["free"] < ROOM * memory["held"]:
                    break
        if all(row.windows for row in alive):
            self._end(*(row.key for row in alive))  # there is no new row to compare with them
            return []
        return self._worth_timing(alive, rows)

    def _waits_for_memory(self, row: BenchRow, alive: list[BenchRow]) -> bool:
        """Return whether to retry a row alone that found no memory beside others."""
        if row.kind != "memory" or not alive or row.key in self._late:
            return False
        self._late.add(row.key)
        self.log.say(f"{row.key}: no memory beside {len(alive)} others; in turn later")
        return True

    def _ready(self, row: BenchRow, start_by: float) -> bool:
        """Build a contender, take its first steps, prepare it; return whether this succeeds."""
        child = self._start(row)
        by, began = min(start_by, self.deadline), time.monotonic()
        try:
            row.facts["build"] = child.ask(by, "build", case=row.case, device=self.device.type)
            found = child.ask(by, "first_steps")
            row.facts["prepare"] = child.ask(by, "prepare")
        except ChildFailed as failure:
            self._failed(row, failure, timed=False)
            return False
        except TimeUp:
            self._end(row.key)
            if not row.windows:
                row.failed("not measured", _LATE)
            self.log.say(f"{row.key}: {_LATE}")
            if time.monotonic() >= self.deadline:
                raise
            return False
        took = time.monotonic() - began
        self._fastest_s = min(took, self._fastest_s or took)
        row.kind = None
        row.equality = row.equality or found
        self.log.write("ready", case=row.key, equality=found, **row.facts)
        self.log.say(f"{row.key}: ready after {sum(found['seconds']):.1f} s of first steps")
        return True

    def _worth_timing(self, alive: list[BenchRow], rows: list[BenchRow]) -> list[BenchRow]:
        """Return the rows that compute the same as the others; end the rest with a reason."""
        taken = [row for row in rows if "losses" in row.equality and not row.case.real_data]
        answers = self.contest.check(taken)
        for row in taken:
            ok, reason = answers.get(row.key, (True, ""))
            row.equality |= {"ok": ok, "reason": reason}
        wrong = [row for row in alive if not row.equality.get("ok", True)]
        for row in wrong:
            self._end(row.key)
            row.failed("unequal", row.equality["reason"])
            self.log.write("unequal", case=row.key, reason=row.reason)
            self.log.say(f"{row.key}: not timed, {row.reason}")
        return [row for row in alive if row not in wrong]

    def _measure(self, alive: list[BenchRow], until: float) -> None:
        """Warm up, measure windows in turns, then the details."""
        left = max(0.0, until - time.monotonic())
        least, most = WARM_UP_S
        limit = min(max(least, 0.4 * left / max(1, len(alive))), most[self.device.type])
        more = {"limit_s": limit, "steps": self.options.steps_per_window}
        for row in alive:
            found = self._asked(row, "warm_up", {"cohort": self._cohort}, **more)
            row.warm_up = found or row.warm_up
        for number in range(self.options.windows):
            alive = [row for row in alive if row.key in self._children]
            if not self._has_time(alive, number, until):
                break
            for row in alive:
                place = {"cohort": self._cohort, "round": number}
                steps = row.warm_up["steps_per_window"]
                if found := self._asked(row, "window", place, steps=steps):
                    row.add(place | found)
                    rate, sample = found["samples"] / found["seconds"], row.facts["build"]["sample"]
                    self.log.say(f"{row.key}: {rate:,.0f} {sample}s/s")
        alive = [row for row in alive if row.key in self._children]
        for position, row in enumerate(alive):
            seconds = min(DETAILS_S, (until - time.monotonic()) / (len(alive) - position + 1))
            if seconds > 0 and not row.details:
                step_s = row.windows[-1]["seconds"] / row.windows[-1]["steps"]
                row.details = self._asked(row, "details", step_s=step_s, seconds=seconds)

    def _has_time(self, alive: list[BenchRow], number: int, until: float) -> bool:
        """Return whether a round of windows fits; after the third round with the details."""
        more = DETAILS_STEPS if number >= ROUNDS else 0
        warm = [row.warm_up for row in alive]
        length = sum((found["steps_per_window"] + more) * found["step_s"] for found in warm)
        if number and time.monotonic() + length > until:
            self.log.say(f"{number} of {self.options.windows} rounds within the budget")
            return False
        return True

    def _asked(self, row: BenchRow, do: str, place: dict | None = None, **request: Any) -> dict:
        """Return the answer and log it with its place; {} if the child fails, which ends it."""
        try:
            found = self._children[row.key].ask(self.deadline, do, **request)
        except ChildFailed as failure:
            self._failed(row, failure, timed=True)
            return {}
        self.log.write(do, case=row.key, **(place or {}), **found)
        return found

    def _failed(self, row: BenchRow, failure: ChildFailed, timed: bool) -> None:
        """End the child and note why; `timed`: it failed in measurement, not in preparation."""
        self._end(row.key)
        if timed or not row.windows:
            status = "refused" if failure.kind == "refused" else "failed"
            row.failed(status, failure.reason, failure.kind)
        self.log.write("failed", case=row.key, kind=failure.kind, reason=failure.reason)
        if timed or failure.kind != "memory":
            self.log.say(f"{row.key}: {failure.reason}")

    def _child(self, name: str) -> ChildProcess:
        return ChildProcess(self.folder / "logs" / f"{name}.log", self.contest.worker)

    def _start(self, row: BenchRow) -> ChildProcess:
        if row.key not in self._children:
            number = len(list((self.folder / "logs").glob("*.log"))) + 1
            name = f"{row.case.label}-{row.case.mode}-{row.case.contender}"
            name = "".join(c if c.isalnum() or c in "+-." else "_" for c in name)
            self._children[row.key] = self._child(f"{number:03d}-{name}")
        return self._children[row.key]

    def _end(self, *keys: str) -> None:
        for key in keys:
            if key in self._children:
                self._children.pop(key).end()


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU: {environment(device)['cpu']}"


def claimed(options: Namespace, groups: list[BenchGroup]) -> Path:
    """Return a new folder for this bench; BadInput if --out exists already."""
    if options.out is None:
        label = groups[0].label if len(groups) == 1 else "suite"
        return claim(Path("outputs/bench"), "".join(c if c.isalnum() else "_" for c in label))
    path = Path(options.out)
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        if not path.is_dir() or any(path.iterdir()):
            raise BadInput(f"--out {path}: exists and is not empty; use another folder") from None
    except OSError as error:
        raise BadInput(f"--out {path}: cannot be created ({error.strerror})") from None
    return path


def run_bench(contest: Contest, options: Namespace, started: float) -> tuple[dict, str, Path]:
    """Measure what fits into the budget; return bench.json's and bench.md's content, the folder.

    started: the time.monotonic at which the budget began.
    """
    config = compose_config(options.overrides, options.config_dir).config
    device = resolve_device(config.device)
    groups, left_out = contest.plan(options, device)
    folder = claimed(options, groups)
    deadline = started + options.budget_s - _REPORT_S
    found, ended = environment(device), "complete"
    # Mode by mode for readers; the order of measurement is another.
    places = [(g.label, real, mode) for g in groups for real in (False, True) for mode in g.modes]

    def write(ended: str) -> tuple[dict, str]:
        """Write what there is; return the content of bench.json and of bench.md."""

        def place(row: BenchRow) -> int:
            return places.index((row.case.label, row.case.real_data, row.case.mode))

        rows = sorted(session.rows, key=place)
        content = {
            "format": FORMAT,
            "ended": ended,
            "options": vars(options),
            "device_name": device_name(device),
            "driver": session.machine.get("driver"),
            "nvml": session.machine.get("nvml", {}),
            "environment": found,
            "ceilings": session.machine.get("ceilings"),
            "left_out": left_out,
            "rows": [json_values({"key": row.key, **asdict(row)}) for row in rows],
        }
        contest.summarise(content)
        content["created"] = datetime.now(UTC).isoformat(timespec="seconds")
        content["elapsed_s"] = time.monotonic() - started
        write_json(folder / "bench.json", content)
        text = contest.report(content)
        write_text(folder / "bench.md", text)
        return content, text

    with Interruption() as interruption:
        session = Session(contest, options, groups, device, folder, deadline)
        try:
            with interruption.breaks():
                session.measure_ceilings()
                # Whoever kills a long bench keeps the models that it has measured.
                session.run(partial(write, "running"))
            if any(row.status == "not measured" for row in session.rows):
                ended = "deadline"
        except TimeUp:
            ended = "deadline"
        except Stopped:
            ended = "interrupted"
        finally:
            session.close()
        content, text = write(ended)
        write_figure(folder / "bench.png", content)
    return content, text, folder
