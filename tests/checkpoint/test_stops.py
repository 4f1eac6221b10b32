"""A run that was stopped at a boundary of its phases ends as if nothing had stopped it."""

import os
import shutil
import signal

import pytest
import torch

from benchmarks.faults.harness import equal, leftovers
from benchmarks.faults.stops import BOUNDARIES, EXIT_CODES, RUN, STEPS, cases, planted
from mprun.cli import main
from mprun.record import checkpoint
from mprun.record.run_record import Record
from mprun.training import run as training_run

from ..helpers import record_of, refused, run

CASES = cases()
# Where there is no step, the last evaluation, and what stands between it and the record.
FEW = ("before step 1", "first evaluation, middle", "last evaluation, middle")
FEW += ("last evaluation, recorded", "last checkpoint, end", "before the record")
of_each = pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case == "amp" else pytest.mark.slow) for case in CASES]
)


def chosen(case):
    return [one for one in BOUNDARIES if case != "amp" or one.name in FEW]


def calls_of(case, directory, monkeypatch) -> dict[str, int]:
    """Make an undisturbed run; how often it comes to each boundary."""
    calls: dict[str, int] = {}
    with monkeypatch.context() as patch:
        reached = lambda boundary, number: calls.update({boundary.name: number})  # noqa: E731
        planted(BOUNDARIES, reached, patch.setattr)
        assert run(directory, *CASES[case], *RUN) == 0
    assert calls.keys() == {one.name for one in BOUNDARIES}
    return calls


def same_end(directory, whole) -> None:
    record = record_of(directory)
    assert (record["status"], record["cause"]) == ("done", None)
    assert equal(directory, whole, STEPS) and not leftovers(directory)


@pytest.mark.slow
@of_each
def test_a_kill_leaves_what_can_be_finished(case, tmp_path, monkeypatch, capsys):
    """SIGKILL leaves the files as they are: a copy of them at the boundary, in one run of all."""
    whole = tmp_path / "whole"
    calls, places = calls_of(case, whole, monkeypatch), {}

    def reached(boundary, number):
        if number == (calls[boundary.name] if boundary.call < 0 else boundary.call):
            places[boundary.name] = place = tmp_path / str(len(places))
            shutil.copytree(tmp_path / "run", place)

    with monkeypatch.context() as patch:
        planted(chosen(case), reached, patch.setattr)
        assert run(tmp_path / "run", *CASES[case], *RUN) == 0
    for name, place in places.items():
        if name == "config.yaml written":
            refused(capsys, f"resume={place}", says="contains no run.json")
        elif name == "after the record":
            refused(capsys, f"resume={place}", says="already at step 6 of 6")
        else:
            assert main([f"resume={place}"]) == 0, name
            same_end(place, whole)
    assert len(places) == len(chosen(case))


# The mode does not meet the signal's number. Of SIGINT the default run has test_exit_codes.py.
SIGNALS = [(case, "SIGTERM") for case in CASES] + [("fp32", "SIGINT"), ("dcgan amp", "SIGINT")]


@pytest.mark.parametrize(
    ("case", "name"),
    [
        pytest.param(*one, marks=() if one == ("amp", "SIGTERM") else pytest.mark.slow)
        for one in SIGNALS
    ],
)
def test_a_signal_is_answered_and_the_run_finished(case, name, tmp_path, monkeypatch):
    whole = tmp_path / "whole"
    calls = calls_of(case, whole, monkeypatch)
    for place, boundary in enumerate(chosen(case)):
        call = calls[boundary.name] if boundary.call < 0 else boundary.call

        def reached(_, number, call=call):
            if number == call:
                os.kill(os.getpid(), getattr(signal, name))

        directory = tmp_path / str(place)
        with monkeypatch.context() as patch:
            planted([boundary], reached, patch.setattr)
            code = run(directory, *CASES[case], *RUN)
        status = record_of(directory)["status"]
        assert (code, status) in ((EXIT_CODES[name], "preempted"), (0, "done")), boundary.name
        if status == "preempted":
            assert main([f"resume={directory}"]) == 0, boundary.name
        same_end(directory, whole)


@pytest.mark.slow
def test_what_was_computed_goes_on_in_an_attempt_without_a_step(tmp_path, capsys):
    """The first step has judged the mode; a checkpoint that tells of other things is no state."""
    whole = tmp_path / "whole"
    assert run(whole, *CASES["amp"], *RUN) == 0
    found = checkpoint.load_newest(whole / "checkpoints", torch.device("cpu"))
    for change, code, says in (
        ({"emulated": {"forward addmm": "many"}}, 4, "not the state of this run"),
        ({}, 0, ""),
    ):
        directory = shutil.copytree(whole, tmp_path / f"exit{code}")
        Record(directory, record_of(directory)).end("preempted", "SIGTERM")
        state = found.state | {"computed": found.state["computed"] | change}
        metrics = found.manifest["metrics"]
        checkpoint.save(directory / "checkpoints", STEPS, state, 9, metrics=metrics)
        capsys.readouterr()
        assert main([f"resume={directory}"]) == code
        assert says in capsys.readouterr().err.splitlines()[-1]
    same_end(directory, whole)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGUSR1"])
def test_a_signal_after_the_outcome_changes_no_exit_code(tmp_path, monkeypatch, name):
    """A job that was done would be queued again."""
    real, number = training_run.attempt, getattr(signal, name)
    before = signal.getsignal(number)

    def late(*given):
        code = real(*given)
        os.kill(os.getpid(), number)
        return code

    monkeypatch.setattr(training_run, "attempt", late)
    assert run(tmp_path / "run", *CASES["amp"], *RUN) == 0
    assert record_of(tmp_path / "run")["status"] == "done"
    assert signal.getsignal(number) == before
