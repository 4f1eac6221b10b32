"""train.compile=auto: eager steps and compiled ones are timed, and the faster form goes on.

On a CPU, with clocks that say what a test wants and a compiler that changes nothing.
"""

import copy
import os
import signal
import time
from importlib import import_module

import pytest
import torch

from mprun.cli import main
from mprun.execution import compiled_step
from mprun.execution.compiled_step import Compilation, CompiledIfFaster
from mprun.execution.graphed_step import GraphedStep
from mprun.execution.step_clock import LEAST_LEFT_S, STEPS, WARM_UP
from mprun.execution.step_runner import StepRunner

from ..helpers import ONE_CORE, assert_same_bits, record_of, rows_of, run
from .call_recorder import CallRecorder
from .test_recorded_steps import Clock
from .trained import SMALL, Training, assert_same_rows, assert_same_training, twins

AFTER = 2  # steps that the clocks of these tests time, of each form
COMPILES_AT = WARM_UP + AFTER
DECIDED_AT = COMPILES_AT + WARM_UP + AFTER
LONG = 10_000_000
SCALED = ["precision=fp16_master_scaled"]


class Compiler:
    """In place of torch.compile: a form calls the model, and fails in one of the first calls.

    error: what is raised there, or a function that is called.
    """

    def __init__(self, fails_at=None, error=None):
        self.calls, self.fails_at, self.error = 0, fails_at, error

    def __call__(self, model, **options):
        assert options["fullgraph"] and options["dynamic"] is False

        def form(*inputs):
            self.calls += 1
            if self.calls == self.fails_at:
                raise self.error() if callable(self.error) else self.error
            return model(*inputs)

        return form


@pytest.fixture
def compiler(monkeypatch):
    """`compiler(...)` takes the place of torch.compile."""
    monkeypatch.setattr(compiled_step, "compile_options", lambda mode: {})

    def install(*arguments):
        made = Compiler(*arguments)
        monkeypatch.setattr(torch, "compile", made)
        return made

    return install


def measured(built, eager=10.0, compiled=5.0, steps=LONG, **graph):
    """A stepper under `auto`, whose steps take so many milliseconds, and the training by it."""
    clocks = Clock(1.0, eager), Clock(1.0, compiled)
    compilation = Compilation(built.task.learners.values(), "default", fullgraph=True)
    first = CompiledIfFaster(built.task, compilation, steps, clocks)
    graphed = GraphedStep(built.task, CallRecorder(), required=False, **graph) if graph else None
    stepper = StepRunner(built.task, built.rate, built.device, compiled=first, graph=graphed)
    return stepper, Training(built, stepper.step)


def is_plain(built):
    return all(one.network is one.model for one in built.task.learners.values())


@pytest.mark.slow
@pytest.mark.parametrize("task", ["gan", "transformer"])
def test_eager_wins(build_run, compiler, capsys, task):
    """A gain within the noise of the clock is none."""
    used, steps = compiler(), DECIDED_AT + 3
    expected, built = twins(build_run, *SMALL[task], *SCALED, steps=steps)
    stepper, trained = measured(built, eager=10.0, compiled=9.6)
    trained.steps(0, DECIDED_AT)
    taken = used.calls
    assert_same_training(expected, trained.steps(DECIDED_AT, steps))
    assert 0 < taken == used.calls and is_plain(built)
    found = stepper.description
    assert found["compile"] == "off: compiled steps take 9.6 ms, eager ones 10 ms"
    assert found["compile_s"] >= 0 and "train.compile=auto" in stepper.audit_result()["not_watched"]
    assert "compiling the network" in capsys.readouterr().err


def test_compiled_steps_win(build_run, compiler):
    used, calls = compiler(), []
    expected, built = twins(build_run, *SMALL["transformer"], steps=DECIDED_AT + 2)
    stepper, trained = measured(built, eager=17.9, compiled=12.34)
    for index in range(DECIDED_AT + 2):
        assert stepper.compiles_next == (index == COMPILES_AT)
        trained.steps(index, index + 1)
        calls.append(used.calls)
    assert_same_rows(expected, trained)
    assert calls[:COMPILES_AT] == [0] * COMPILES_AT and calls[-1] == DECIDED_AT + 2 - COMPILES_AT
    assert stepper.description["compile"] == "on: 12.3 ms a step, eager 17.9 ms"
    assert stepper.decided == {"compile": "on: 12.3 ms a step, eager 17.9 ms"}
    # The first steps are watched, as without a compiler; those that are timed never.
    assert stepper.audit.watched == WARM_UP


@pytest.mark.slow
@pytest.mark.parametrize("wins", ["compiled", "eager"])
def test_the_graph_is_of_the_form_that_won(build_run, compiler, wins):
    used, steps = compiler(), DECIDED_AT + WARM_UP + AFTER + 4
    expected, built = twins(build_run, *SMALL["reconstruction"], steps=steps)
    times = {"eager": 10.0, "compiled": 5.0 if wins == "compiled" else 11.0}
    stepper, trained = measured(built, **times, clock=Clock(4.9, 5.0))
    trained.steps(0, steps - 4)
    before = used.calls
    assert_same_training(expected, trained.steps(steps - 4, steps))
    assert (used.calls > before) == (wins == "compiled") != is_plain(built)
    found = stepper.description
    assert found["cuda_graph"] == "on" and found["replayed"] == 4


def test_a_graph_that_would_save_nothing_is_left_out(build_run, compiler):
    compiler()
    stepper, trained = measured(build_run(*SMALL["reconstruction"]), clock=Clock(1.0, 5.0))
    trained.steps(0, DECIDED_AT + WARM_UP + AFTER + 1)
    found = stepper.description
    assert found["compile"].startswith("on: 5 ms")
    assert found["cuda_graph"].startswith("off: the device is the limit, 5 ms")


# Of a GAN the discriminator has been updated by then.
@pytest.mark.slow
@pytest.mark.parametrize(("task", "call"), [("transformer", 1), ("gan", 4)])
def test_what_cannot_be_compiled_stays_eager_with_the_same_bits(
    build_run, compiler, capsys, task, call
):
    used = compiler(call, RuntimeError("no kernel image\nfor this device"))
    overrides = [*SMALL[task], *SCALED, "scaler.growth_interval=2"]
    expected, built = twins(build_run, *overrides, steps=DECIDED_AT)
    stepper, trained = measured(built)
    assert_same_training(expected, trained.steps(0, DECIDED_AT))
    assert used.calls == call and is_plain(built)
    assert stepper.description["compile"] == "off: RuntimeError: no kernel image"
    told = "mprun: not compiled: RuntimeError: no kernel image; steps stay eager\n"
    assert capsys.readouterr().err.endswith(told)


def test_a_step_that_is_left_by_a_signal_leaves_the_state_as_it_was(build_run, compiler):
    compiler(4, KeyboardInterrupt())
    built = build_run(*SMALL["gan"])
    stepper, trained = measured(built)
    trained.steps(0, COMPILES_AT)
    before, random = copy.deepcopy(built.task.state_dict()), torch.get_rng_state()
    with pytest.raises(KeyboardInterrupt):
        trained.steps(COMPILES_AT, COMPILES_AT + 1)
    assert_same_bits(before, built.task.state_dict())
    assert torch.equal(random, torch.get_rng_state()) and stepper.takes_back


def test_a_run_too_short_to_measure(build_run, compiler):
    used, needed = compiler(), 2 * (WARM_UP + STEPS)
    built = build_run(*SMALL["reconstruction"])
    stepper, trained = measured(built, steps=needed, clock=Clock(6.0, 6.0))
    trained.steps(0, WARM_UP + AFTER + 2)
    found = stepper.description
    assert found["compile"] == f"off: {needed} steps are left, the measurement takes {needed}"
    # What it says costs no step: a graph begins where it did without `auto`.
    assert used.calls == 0 and found["replayed"] == 2


@pytest.mark.parametrize("enough", [False, True])
def test_a_run_in_which_a_compilation_does_not_pay(build_run, compiler, enough):
    used, milliseconds = compiler(), 100.0
    steps = COMPILES_AT + round(1000 * LEAST_LEFT_S / milliseconds) - (not enough)
    built = build_run(*SMALL["reconstruction"])
    stepper, trained = measured(built, eager=milliseconds, steps=steps)
    trained.steps(0, COMPILES_AT + 1)
    assert (used.calls > 0) == enough == (stepper.decided == {})
    if not enough:
        why = "off: eager steps for 600 s are left, a compilation pays from 600 s on"
        assert stepper.description["compile"] == why


@pytest.mark.parametrize(
    "recorded",
    [
        "on: 12.3 ms a step, eager 17.9 ms",
        "off: compiled steps take 19 ms, eager ones 17.9 ms",
        "off: 12 steps are left, the measurement takes 16",
    ],
)
def test_a_resumed_run_goes_on_in_the_form_that_it_had(build_run, compiler, recorded):
    """Its clocks would say otherwise."""
    used, is_on = compiler(), recorded.startswith("on")
    built = build_run(*SMALL["transformer"])
    stepper, trained = measured(built, compiled=99.0 if is_on else 1.0, steps=20)
    stepper.go_on({"compile": recorded})
    trained.steps(10, 11)
    # A checkpoint that a signal leaves now keeps it.
    assert stepper.decided == {"compile": recorded} and used.calls == 0
    assert stepper.compiles_next == is_on
    trained.steps(11, 15)
    assert stepper.description["compile"] == recorded and stepper.compiled.clock.timed == 0
    assert used.calls == (4 if is_on else 0) and is_plain(built) != is_on


def test_a_resumed_run_that_can_no_longer_be_compiled_says_so(build_run, compiler):
    compiler(1, RuntimeError("no compiler"))
    stepper, trained = measured(build_run(*SMALL["transformer"]))
    stepper.go_on({"compile": "on: 1 ms a step, eager 2 ms"})
    trained.steps(10, 13)
    assert stepper.decided == {"compile": "off: RuntimeError: no compiler"}


def test_a_run_that_ends_before_the_decision(build_run, compiler):
    compiler()
    stepper, trained = measured(build_run(*SMALL["transformer"]))
    trained.steps(0, 2)
    assert stepper.description == {"compile": "off: ended after 2 steps, before the decision"}
    assert stepper.decided == {}


def terminated():
    """Meet SIGTERM, as in a long step."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0)  # a signal is met here at the latest
    return AssertionError("goes on")


@pytest.fixture
def as_on_a_gpu(monkeypatch, compiler):
    """Runs on a CPU measure as they would on a GPU, with prescribed times."""
    assembly = import_module("mprun.assembly.run")
    monkeypatch.setattr(assembly, "why_not_measured", lambda config, device: None)
    monkeypatch.setattr(assembly, "find_spec", lambda name: name)
    monkeypatch.setattr(compiled_step, "LEAST_LEFT_S", 0.0)

    def times(eager, compiled):
        left = [eager, compiled]
        monkeypatch.setattr(assembly, "HostBound", lambda device: Clock(1.0, left.pop(0)))

    return times


RUN = [*SMALL["transformer"], *ONE_CORE, "optim.schedule=constant", "train.checkpoint_every=4"]


@pytest.mark.slow
@pytest.mark.parametrize("wins", ["compiled", "eager"])
def test_a_record_keeps_the_form_for_a_resume(tmp_path, compiler, as_on_a_gpu, wins):
    used, directory = compiler(), tmp_path / "run"
    times = (10.0, 5.0 if wins == "compiled" else 10.0)
    as_on_a_gpu(*times)
    assert run(directory, *RUN, "train.steps=24") == 0
    told = record_of(directory)["execution"]["compile"]
    assert told.startswith("on: 5 ms" if wins == "compiled" else "off: compiled steps take 10 ms")
    before = used.calls
    as_on_a_gpu(*reversed(times))
    assert main([f"resume={directory}", "train.steps=28"]) == 0
    assert record_of(directory)["execution"]["compile"] == told
    # The first step of an attempt is watched, operation by operation.
    assert used.calls - before == (3 if wins == "compiled" else 0)


@pytest.mark.slow
def test_a_signal_in_the_step_that_compiles_loses_no_step(tmp_path, compiler, as_on_a_gpu):
    whole, directory = tmp_path / "whole", tmp_path / "run"
    assert run(whole, *RUN, "train.steps=24", "train.compile=off", "train.log_every=1") == 0
    compiler(1, terminated)
    as_on_a_gpu(10.0, 5.0)
    assert run(directory, *RUN, "train.steps=24", "train.log_every=1") == 75
    record = record_of(directory)
    assert (record["status"], record["last_step"]) == ("preempted", COMPILES_AT)
    compiler()
    as_on_a_gpu(10.0, 5.0)
    assert main([f"resume={directory}"]) == 0
    losses = [[line["loss"] for line in rows_of(path)] for path in (directory, whole)]
    assert losses[0] == losses[1]
