"""A recorded step is the eager step, bit for bit; on a CPU, where replaying calls the function."""

import copy

import pytest
import torch

from mprun.errors import BadInput
from mprun.execution.cuda_graph import CannotCapture
from mprun.execution.graphed_step import GraphedStep
from mprun.execution.step_clock import WARM_UP, pays
from mprun.execution.step_runner import StepRunner

from ..helpers import assert_same_bits, raises_line
from ..numerics.failing_runs import with_data
from .call_recorder import CallRecorder
from .trained import SMALL, Training, assert_same_rows, assert_same_training, twins

# torch says that its CPU library has no LSTM with projection.
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections")
STEPS = 9
SCALED = ["fp16_master_scaled", "amp"]


def recorded(built, recorder=None, bad=(), **options):
    """A stepper that replays, and the training by its steps."""
    graph = GraphedStep(built.task, recorder or CallRecorder(), **{"required": True, **options})
    stepper = StepRunner(built.task, built.rate, built.device, graph=graph)
    return stepper, Training(built, stepper.step, bad)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "mode"), [(task, mode) for task in SMALL for mode in ("fp32", *SCALED)]
)
def test_replayed_steps_are_the_eager_ones(build_run, task, mode):
    """With skips, a schedule, dropout, epochs and logged steps."""
    overrides = [*SMALL[task], f"precision={mode}", "optim.schedule=cosine", "train.steps=20"]
    if mode in SCALED:
        overrides += ["scaler.init_scale=16", "scaler.growth_interval=2"]
    bad = {WARM_UP + 1, 6} if mode in SCALED else ()
    expected, built = twins(build_run, *overrides, bad=bad, steps=STEPS)
    stepper, run = recorded(built, bad=bad)
    assert_same_training(expected, run.steps(0, STEPS))
    assert stepper.description["cuda_graph"] == "on"
    assert stepper.description["replayed"] == STEPS - WARM_UP
    if mode in SCALED:
        assert run.skipped == len(bad)
        assert len(set(run.values("loss_scale").tolist())) > 1
    assert len(set(run.values("loss").tolist())) == STEPS


@pytest.mark.slow
@pytest.mark.parametrize("task", ["language_model", "gan"])
def test_a_checkpoint_of_replayed_steps_continues_in_another_run(build_run, task):
    overrides = [*SMALL[task], "precision=amp", "scaler.growth_interval=2"]
    expected, built = twins(build_run, *overrides, steps=STEPS)
    recorded(built)[1].steps(0, 5)
    saved, random = copy.deepcopy(built.task.state_dict()), torch.get_rng_state()
    again = build_run(*overrides)
    again.task.load_state_dict(saved)
    torch.set_rng_state(random)
    run = recorded(again)[1].steps(5, STEPS)
    assert torch.equal(run.values("loss"), expected.values("loss")[5:])
    assert_same_bits(expected.built.task.state_dict(), again.task.state_dict())


@pytest.mark.parametrize("task", ["language_model", "reconstruction"])
@pytest.mark.few(1)
def test_going_back_and_eager_steps_between_replays(build_run, task):
    """As a replay of a failure does: state restored into the same run, steps outside."""
    words = [*SMALL[task], "precision=fp16_master_scaled"]
    expected, built = twins(build_run, *words, steps=STEPS)
    stepper, run = recorded(built)
    run.steps(0, 5)
    saved, random = copy.deepcopy(built.task.state_dict()), torch.get_rng_state()
    run.steps(5, 7)
    built.task.load_state_dict(saved)
    torch.set_rng_state(random)
    run.rows = run.rows[:5]
    run.steps(5, 7)
    run.take = built.task.train_step
    run.steps(7, 8)
    built.task.evaluate()
    run.take = stepper.step
    run.steps(8, STEPS)
    assert torch.equal(run.values("loss"), expected.values("loss"))
    assert_same_bits(expected.built.task.state_dict(), built.task.state_dict())


def test_the_state_of_another_network_starts_in_an_eager_step(build_run):
    expected, built = twins(build_run, *SMALL["language_model"], steps=14)
    stepper, run = recorded(built, zero_state=False)
    assert_same_training(expected, run.steps(0, 14))
    starts = [step for step in range(14) if step % built.data.batches_per_epoch == 0]
    late = [step for step in starts if step >= WARM_UP]
    assert late and stepper.description["replayed"] == 14 - WARM_UP - len(late)


@pytest.mark.slow
def test_micro_batches_of_a_language_model_without_a_state(build_run):
    overrides = [*SMALL["transformer"], "precision=amp", "train.accumulate=2"]
    expected, built = twins(build_run, *overrides, steps=STEPS)
    stepper, run = recorded(built)
    assert_same_training(expected, run.steps(0, STEPS))
    assert stepper.description["replayed"] == STEPS - WARM_UP


def half_of_one(index, batch):
    return [own[: len(own) // 2] for own in batch] if index == 5 else batch


def test_a_batch_of_another_size_is_eager(build_run):
    words, plant = SMALL["reconstruction"], with_data(half_of_one)
    expected, built = twins(build_run, *words, steps=STEPS, plant=plant)
    stepper, run = recorded(built)
    assert_same_rows(expected, run.steps(0, STEPS))
    assert stepper.description["replayed"] == STEPS - WARM_UP - 1


class Refusing(CallRecorder):
    """Cannot capture, like a step with a host decision in it: fails in the middle of a step."""

    def __init__(self, task, waits=None):
        super().__init__()
        self.task, self.waits = task, waits

    def warm(self, function):
        return function(), self.waits

    def record(self, function):
        for learner in self.task.learners.values():
            learner.model.requires_grad_(False)
        raise CannotCapture("RuntimeError: operation not permitted when stream is capturing")


@pytest.mark.parametrize("waits", [None, "the step waits for the device (norm.py:3)"])
@pytest.mark.parametrize("task", ["gan", "language_model"])
@pytest.mark.few(1)
def test_what_cannot_be_captured_stays_eager(build_run, capsys, task, waits):
    expected, built = twins(build_run, *SMALL[task], "precision=amp", steps=STEPS)
    stepper, run = recorded(built, Refusing(built.task, waits), required=False)
    assert_same_training(expected, run.steps(0, STEPS))
    reason = waits or "RuntimeError: operation not permitted when stream is capturing"
    assert stepper.description == {"cuda_graph": f"off: {reason}"}
    lines = [line for line in capsys.readouterr().err.splitlines() if line]
    assert lines == [f"mprun: no CUDA graph: {reason}; steps stay eager"]


def test_what_cannot_be_captured_ends_a_run_that_requires_it(build_run):
    built = build_run(*SMALL["reconstruction"])
    _, run = recorded(built, Refusing(built.task))
    run.steps(0, WARM_UP)
    with raises_line(BadInput, "train.cuda_graph=on: RuntimeError", "(allowed here: auto, off)"):
        run.steps(WARM_UP, WARM_UP + 1)


class Clock:
    """Milliseconds as on a machine that is not here."""

    def __init__(self, host, device):
        self.found, self.timed = (host, device), 0

    @property
    def enough(self):
        return self.timed == 2

    def time(self, step):
        self.timed += 1
        return step()

    def milliseconds(self):
        return self.found


def test_a_step_that_the_device_limits_stays_eager(build_run, capsys):
    clock = Clock(5.0, 41.0)
    stepper, run = recorded(build_run(*SMALL["reconstruction"]), required=False, clock=clock)
    run.steps(0, STEPS)
    assert clock.timed == 2
    assert stepper.description == {
        "cuda_graph": "off: the device is the limit, 41 ms a step of which the host needs 5",
        "host_ms": 5.0,
        "device_ms": 41.0,
    }
    assert capsys.readouterr().err == ""


def test_a_step_that_the_host_limits_is_replayed(build_run):
    clock = Clock(6.0, 6.2)
    stepper, run = recorded(build_run(*SMALL["reconstruction"]), required=False, clock=clock)
    run.steps(0, STEPS)
    found = stepper.description
    assert found["cuda_graph"] == "on" and found["replayed"] == STEPS - WARM_UP - 2
    assert (found["host_ms"], found["device_ms"]) == (6.0, 6.2)


def test_where_a_graph_pays():
    assert pays(8.0, 10.0) and pays(10.0, 10.0)
    assert not pays(7.9, 10.0)


def test_a_run_that_ends_early_says_so(build_run):
    stepper, run = recorded(build_run(*SMALL["reconstruction"]), required=False)
    run.steps(0, 2)
    assert stepper.description == {"cuda_graph": "off: ended after 2 steps, before a capture"}


def test_the_cache_is_given_back_once_steps_are_replayed(build_run, monkeypatch):
    given_back = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_back.append(True))
    stepper, _ = recorded(build_run(*SMALL["language_model"]))
    for index in range(WARM_UP):
        stepper.step(index)
    stepper.give_back_cache()
    assert not given_back
    stepper.step(WARM_UP)
    stepper.give_back_cache()
    assert given_back == [True]
