"""A skipped step leaves statistics, hidden state and schedule alone, beyond the weights."""

import pytest
import torch
from torch.utils._pytree import tree_map

from mprun.execution.step_runner import LearningRate, StepRunner
from mprun.recording.metric_buffer import MetricBuffer

from ..helpers import TINY_AUTOENCODER, TINY_LM, assert_same_bits
from ..numerics.failing_runs import with_data

TOKENS = [*TINY_LM, "data.train_tokens=40"]
BATCHES_PER_EPOCH = 5


def plant(parameter):
    """Multiply the parameter's gradient by the returned list's only entry."""
    factor = [1.0]
    parameter.register_hook(lambda gradient: gradient * factor[0])
    return factor


def copy_of(task):
    state = {k: v for k, v in task.state_dict().items() if "scale" not in k}
    return tree_map(lambda t: t.clone() if torch.is_tensor(t) else t, state)


@pytest.mark.parametrize("mode", ["fp16_master_scaled", "amp"])
@pytest.mark.parametrize("step", [0, 2, BATCHES_PER_EPOCH])
def test_the_hidden_state_of_a_skipped_step_is_not_carried_on(build_run, mode, step):
    task = build_run(*TOKENS, f"precision={mode}").task
    factor = plant(task.learner.model.output.bias)
    for index in range(step):
        assert task.train_step(index)["found_inf"] == 0
    before = copy_of(task)
    factor[0] = float("inf")
    assert task.train_step(step)["found_inf"] == 1
    after = copy_of(task)
    if step % BATCHES_PER_EPOCH == 0:
        # An epoch starts from zeros, and goes on from zeros.
        assert [part.abs().max().item() for part in task.hidden] == [0.0, 0.0]
        del before["hidden"], after["hidden"]
    else:
        assert task.hidden[0].abs().max() > 0
    assert_same_bits(before, after)
    assert task.loss_scale.steps_skipped == 1


def test_a_forward_pass_that_is_nan_poisons_neither_state_nor_later_steps(build_run):
    task = build_run(*TOKENS, "precision=amp").task
    embedding = task.learner.model.embedding
    poison = embedding.register_forward_hook(lambda m, args, out: out * float("nan"))
    metrics = task.train_step(0)
    assert metrics["found_inf"] == 1 and metrics["loss"].isnan()
    poison.remove()
    for step in range(1, 4):
        metrics = task.train_step(step)
        assert metrics["found_inf"] == 0 and metrics["loss"].isfinite()


@pytest.mark.parametrize("mode", ["fp16_master_scaled", "amp"])
@pytest.mark.slow
def test_resnet50_after_an_overflow_in_the_forward_pass(build_run, mode):
    words = ["model=resnet50", "optim=sgd", "data.batch_size=8", "scaler.init_scale=16"]
    built = build_run(*words, f"precision={mode}")
    task = built.task
    assert task.train_step(0)["found_inf"] == 0
    before = copy_of(task)
    # The images of one batch times 1e6: beyond FP16.
    with_data(lambda index, batch: (batch[0] * 1e6, batch[1]))(built)
    assert task.train_step(1)["found_inf"] == 1
    assert_same_bits(before, copy_of(task))
    assert task.learner.model.bn1.num_batches_tracked == 1


def test_the_schedule_counts_applied_updates(build_run):
    task = build_run(
        *TINY_AUTOENCODER, "precision=amp", "scaler.init_scale=16", "optim.implementation=loop"
    ).task
    factor = plant(task.learner.model.decoder.layers.conv0.bias)
    learner, device = task.learner, torch.device("cpu")
    rate, buffer = LearningRate([4e-4, 3e-4, 2e-4, 1e-4], [learner], device), MetricBuffer(device)
    runner = StepRunner(task, rate, device)
    rates = []
    for step, bad in enumerate([False, True, True, False, True, False]):
        factor[0] = float("inf") if bad else 1.0
        buffer.add(step + 1, runner.step(step))
        rates.append(learner.optimizer.param_groups[0]["lr"])
    assert rates == [4e-4, 3e-4, 3e-4, 3e-4, 2e-4, 2e-4]
    assert runner.skipped == task.loss_scale.steps_skipped == 3
    # Adam's own counter counts applied updates too: its bias correction depends on it.
    steps = {state["step"].item() for state in learner.optimizer.state.values()}
    assert steps == {3.0}
    buffer.close(logged=False)
    [interval] = buffer.read()
    assert [row.skipped for row in interval.rows] == [0, 1, 2, 2, 3, 3]
