"""On a GPU: the loop between evaluations never makes the host wait, in any mode, for any task."""

import pytest
import torch

from mprun.config.compose import compose_config
from mprun.numerics import failure
from mprun.numerics.failure import FailureKeeper
from mprun.record.async_copy import Moment, PinnedRing
from mprun.record.metrics import read_metrics
from mprun.training.loop import Loop
from mprun.training.run import prepare
from mprun.training.signals import Interruption

from ..execution.trained import SMALL
from ..numerics.failing_runs import with_data
from ..shipped import OF_ANY_NETWORK

CUDA = torch.device("cuda")
LOGGED = ["train.log_every=5", "train.cuda_graph=off"]


def run_train(tmp_path, overrides, steps=16, before=None):
    """(outcome, built, records) of training; `before(built)` is called first."""
    overrides = [*overrides, "device=cuda", f"train.steps={steps}", "train.checkpoint_every=0"]
    config = compose_config(overrides).config
    built = prepare(config, CUDA, 1)
    if before is not None:
        before(built)
    with built.stepper.on_stream():
        outcome = Loop(built, config, tmp_path, Interruption()).train()
    return outcome, built, read_metrics(tmp_path / "metrics.jsonl")


def errors_between_evaluations(built):
    """From the second step to the evaluation: the first one is watched and loads kernels."""
    step, evaluate = built.stepper.step, built.task.evaluate

    def watched(index, measure=False):
        if index == 1:
            torch.cuda.set_sync_debug_mode("error")
        return step(index, measure)

    def unwatched():
        torch.cuda.set_sync_debug_mode("default")
        return evaluate()

    built.stepper.step, built.task.evaluate = watched, unwatched


@pytest.fixture
def default_mode_afterwards():
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("mode", OF_ANY_NETWORK)
@pytest.mark.parametrize("model", SMALL)
def test_three_intervals_and_copies_for_a_replay(
    tmp_path, monkeypatch, default_mode_afterwards, model, mode
):
    monkeypatch.setattr(failure, "SHORTEST_PAUSE_S", 0.0)
    monkeypatch.setattr(failure, "PAUSE_FACTOR", 0.0)
    kept = []
    own = FailureKeeper.keep_if

    def keep_if(self, step, *arguments):
        own(self, step, *arguments)
        kept.append(step)

    monkeypatch.setattr(FailureKeeper, "keep_if", keep_if)
    overrides = [*SMALL[model], f"precision={mode}", *LOGGED, "train.eval_every=0"]
    outcome, built, records = run_train(tmp_path, overrides, before=errors_between_evaluations)
    assert kept[0] == 5
    logged = [r for r in records if r["split"] == "train" and "samples_per_s" in r]
    assert all(r["samples_per_s"] > 0 for r in logged)
    # Some modes diverge by definition: Adam's eps is 0 in FP16.
    if outcome.status == "done":
        assert kept == [r["step"] for r in logged] == [5, 10, 15, 16]


@pytest.mark.gpu
def test_a_divergence_is_noticed_late_and_told_at_its_step(tmp_path):
    plant = with_data(lambda i, batch: (batch[0] * float("nan") if i == 7 else batch[0], batch[1]))
    overrides = [*SMALL["reconstruction"], "precision=fp32", *LOGGED, "optim=sgd"]
    outcome, _, records = run_train(tmp_path, overrides, steps=40, before=plant)
    assert (outcome.status, outcome.step) == ("diverged", 8)
    assert max(record["step"] for record in records) == 8


@pytest.mark.gpu
def test_the_clock_is_that_of_the_device(tmp_path):
    """The host runs ahead: by its clock the steps of an interval would seem to take no time."""
    sleep_cycles = 20_000_000  # about 10 ms at 2 GHz

    def plant(built):
        own = built.task.train_step

        def train_step(step, measure=False):
            torch.cuda._sleep(sleep_cycles)
            return own(step, measure)

        built.task.train_step = train_step

    overrides = [*SMALL["reconstruction"], *LOGGED]
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(1000)
    begin.record()
    torch.cuda._sleep(sleep_cycles)
    end.record()
    end.synchronize()
    seconds = begin.elapsed_time(end) / 1000
    _, built, records = run_train(tmp_path, overrides, steps=20, before=plant)
    fastest = built.task.samples_per_step / seconds
    speeds = [r["samples_per_s"] for r in records if "samples_per_s" in r]
    # A GPU's clock may rise by less than this factor between the two measurements.
    assert len(speeds) == 4 and max(speeds) < 1.5 * fastest


@pytest.mark.gpu
def test_reading_a_copy_waits_for_it_and_for_nothing_behind_it():
    ring = PinnedRing(CUDA, 2)
    values = torch.arange(4.0, device=CUDA)
    sent = ring.send(values)
    assert all(buffer.is_pinned() for buffer in ring.buffers if len(buffer))
    torch.cuda._sleep(2_000_000_000)  # about a second
    behind = Moment(CUDA)
    assert sent.read() == [0.0, 1.0, 2.0, 3.0]
    assert not behind.event.query()
    behind.wait()
    assert behind.seconds_since(sent.arrived) > 0.1


@pytest.mark.gpu
def test_a_generators_state_is_read_without_waiting():
    torch.cuda._sleep(2_000_000_000)
    behind = Moment(CUDA)
    torch.cuda.get_rng_state(CUDA)
    assert not behind.event.query()
    behind.wait()
