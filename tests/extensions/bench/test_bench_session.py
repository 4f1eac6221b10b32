"""Who is alive when and whose window is next, with real child processes that compute nothing."""

import json
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.suite.contest import Suite
from mprun.extensions.bench import session
from mprun.extensions.bench.cases import BenchGroup, Case
from mprun.extensions.bench.child import ChildFailed, ChildProcess, TimeUp
from mprun.extensions.bench.command import parse
from mprun.extensions.bench.session import Session
from mprun.training.signals import Interruption, Stopped

SCRIPTED = "tests.extensions.bench.scripted_child:Scripted"


class Bench:
    """A session over scripted children, and what they were asked."""

    def __init__(self, folder: Path, budget_s: float = 300.0):
        self.folder, self.trace, self.room = folder, folder / "trace", folder / "room"
        self.trace.touch()
        self.room.mkdir()
        self.deadline = time.monotonic() + budget_s
        self.cases: list[Case] = []

    def add(self, contender: str, mode: str = "amp", **extra) -> None:
        extra = {"trace": str(self.trace), "room_folder": str(self.room), **extra}
        self.cases.append(Case("model", (), mode, contender, extra=extra))

    def run(self, windows: int = 2, check=lambda rows: {}):
        contest, options = Suite(), parse(["--windows", str(windows)])
        contest.worker, contest.check = SCRIPTED, check
        groups = [BenchGroup("model", cases=tuple(self.cases))]
        cpu = torch.device("cpu")
        found = Session(contest, options, groups, cpu, self.folder, self.deadline)
        try:
            found.run()
        finally:
            found.close()
        return found.rows

    def asked(self, what: str) -> list[str]:
        lines = [line.split(" ", 1) for line in self.trace.read_text().splitlines()]
        return [name for request, name in lines if request == what]


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path)


def test_windows_of_contenders_that_are_alive_together_alternate(bench):
    for name in ("mprun", "loop", "fabric"):
        bench.add(name)
    rows = bench.run(windows=3)
    assert bench.asked("window") == ["mprun", "loop", "fabric"] * 3
    assert bench.asked("build") == ["mprun", "loop", "fabric"]
    assert [[w["round"] for w in row.windows] for row in rows] == [[0, 1, 2]] * 3
    assert {row.status for row in rows} == {"measured"}


def test_a_child_that_dies_is_a_row_with_its_reason_and_the_rest_goes_on(bench):
    bench.add("mprun", exit_at="warm_up")
    bench.add("loop", error_at="first_steps")
    bench.add("fabric", exit_at="details")
    bench.add("trainer")
    first, second, third, last = bench.run()
    assert (first.status, first.kind) == ("failed", "error")
    assert first.reason.startswith("the process ended (exit code 7); see 001-")
    assert second.status == "failed" and second.reason.startswith("ValueError: as told")
    # It had its windows by then.
    assert third.status == "measured" and third.reason.startswith("later: the process ended")
    assert len(third.windows) == len(last.windows) == 2
    assert bench.asked("window") == ["fabric", "trainer"] * 2


def test_without_memory_for_all_the_rest_follows_beside_mprun(bench):
    for name in ("mprun", "loop", "fabric"):
        bench.add(name, room=2)
    rows = bench.run(windows=2)
    # The child that found no memory is started again, with mprun as its partner.
    assert bench.asked("build") == ["mprun", "loop", "fabric", "mprun", "fabric"]
    assert bench.asked("window") == ["mprun", "loop"] * 2 + ["mprun", "fabric"] * 2
    cohorts = {row.case.contender: [w["cohort"] for w in row.windows] for row in rows}
    assert cohorts == {"mprun": [1, 1, 2, 2], "loop": [1, 1], "fabric": [2, 2]}


@pytest.mark.slow
def test_each_mode_of_a_later_cohort_has_mprun_beside_it(bench):
    for name, mode in (("mprun", "fp32"), ("mprun", "amp"), ("amp", "amp"), ("loop", "fp32")):
        bench.add(name, mode, room=2)
    rows = bench.run(windows=1)
    cohorts = {(r.case.mode, r.case.contender): [w["cohort"] for w in r.windows] for r in rows}
    assert cohorts == {
        ("fp32", "mprun"): [1, 3],
        ("amp", "mprun"): [1, 2],
        ("amp", "amp"): [2],
        ("fp32", "loop"): [3],
    }
    assert all(row.status == "measured" and row.reason == "" for row in rows)


def test_a_child_that_has_no_memory_beside_mprun_alone_is_given_up(bench):
    for name in ("mprun", "loop"):
        bench.add(name, room=1)
    mprun, loop = bench.run()
    assert mprun.status == "measured"
    assert (loop.status, loop.kind, loop.reason) == ("failed", "memory", "out of memory: as told")


def test_what_does_not_compute_the_same_is_not_timed(bench):
    bench.add("mprun")
    bench.add("loop", loss=2.0)

    def check(rows):
        return {row.key: (row.equality["losses"][-1] == 1.0, "loss 2 instead of 1") for row in rows}

    mprun, loop = bench.run(check=check)
    assert (loop.status, loop.reason) == ("unequal", "loss 2 instead of 1")
    assert loop.equality["ok"] is False and mprun.equality["ok"] is True
    assert bench.asked("window") == ["mprun"] * 2


@pytest.mark.slow
def test_a_bench_that_is_killed_leaves_the_models_before(bench, tmp_path):
    contest, out = Suite(), tmp_path / "out"
    bench.add("mprun", mode="fp32")
    [case] = bench.cases
    second = replace(case, label="second")
    groups = [BenchGroup(c.label, modes=("fp32",), cases=(c,)) for c in (case, second)]
    seen = []

    def check(rows):
        if rows[0].case.label == "second":
            seen.append(json.loads((out / "bench.json").read_text()))
        return {}

    contest.worker, contest.check, contest.plan = SCRIPTED, check, lambda *_: (groups, [])
    options = parse(["--windows=1", f"--out={out}", "device=cpu", "--plain"])
    session.run_bench(contest, options, time.monotonic())
    [before], after = seen, json.loads((out / "bench.json").read_text())
    assert [bench["ended"] for bench in (before, after)] == ["running", "complete"]
    assert [row["status"] for row in before["rows"]] == ["measured", "not measured"]
    assert "Still under way" not in (out / "bench.md").read_text()


@pytest.mark.slow
def test_the_deadline_ends_a_child_that_hangs_and_keeps_what_is_there(tmp_path):
    bench = Bench(tmp_path, budget_s=5.0)
    bench.add("mprun")
    bench.add("loop", hang_at="window")
    started = time.monotonic()
    with pytest.raises(TimeUp):
        bench.run(windows=1000)
    assert time.monotonic() - started < 60
    lines = (tmp_path / "bench.jsonl").read_text().splitlines()
    assert sum('"event": "window"' in line for line in lines) == 1  # mprun's first


@pytest.mark.slow
def test_an_interruption_ends_the_bench_at_once(bench):
    bench.add("mprun", hang_at="warm_up")
    with Interruption() as interruption:
        signal.setitimer(signal.ITIMER_REAL, 1.5)
        before = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGTERM))
        try:
            with pytest.raises(Stopped, match="SIGTERM"), interruption.breaks():
                bench.run()
        finally:
            signal.signal(signal.SIGALRM, before)


def test_a_killed_process_counts_as_want_of_memory(tmp_path):
    child = ChildProcess(tmp_path / "log", SCRIPTED)
    child.process.kill()
    with pytest.raises(ChildFailed, match="killed by the system") as failure:
        child.ask(time.monotonic() + 10, "build")
    child.end()
    assert failure.value.kind == "memory"
