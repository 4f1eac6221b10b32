"""The FP32 shadow of a step: nothing where there is nothing to see, planted errors as planted."""

import math
import statistics

import pytest
import torch
from torch import nn

from mprun.numerics.probe import chosen_modules
from mprun.numerics.probe_record import read_probes
from mprun.numerics.probing import Shadow

from ..helpers import assert_same_bits
from .small_runs import SMALL, watched_steps

FAST = [model for model in SMALL if model not in ("alexnet", "resnet50")]
LARGE = [pytest.param(model, marks=pytest.mark.slow) for model in ("alexnet", "resnet50")]
# Small enough not to overflow in the first step.
SCALED = {"fp16_master_scaled": ["scaler.init_scale=256"], "bf16_master": []}


def shadowed(task, step=0, measure=False):
    with Shadow(task, chosen_modules(task.learners, [])) as shadow:
        metrics = task.train_step(step, measure=measure)
    loss = shadow.run(step, metrics)
    return shadow.read(), metrics["loss"].item(), loss.item()


@pytest.mark.parametrize("model", [*FAST, *LARGE])
def test_the_shadow_of_fp32_is_the_step_itself(build_run, tmp_path, model):
    """Bit for bit: the same dropout masks, codes, carried state, micro-batches, and for a generator
    the discriminator that has just been updated. Also at a later step."""
    built = build_run(*(own for own in SMALL[model] if "clip_norm" not in own))
    watched_steps(built, tmp_path, 3, every=10, shadow_every=1)
    records = read_probes(tmp_path)
    assert len(records) == 3
    for record in records:
        assert record.loss == record.loss_fp32
        assert record.learners.keys() == built.task.learners.keys()
        for own in record.learners.values():
            assert own.tensors == {} and own.shadow
            for sums in own.shadow.values():
                assert sums.difference == 0 and sums.own == sums.fp32 == sums.dot > 0


def test_clipping_is_undone(build_run):
    """Two roundings of FP32 each way: the clip factor's product and the quotient."""
    agreements, own, fp32 = shadowed(build_run(*SMALL["lstm_lm"]).task)
    assert own == fp32
    for sums in agreements["model"].values():
        assert sums.relative_error < 2.0**-22
        assert abs(sums.norm_ratio - 1) < 2.0**-22


def smooth(task):
    """The task with tanh in place of every ReLU: a small error in stays a small error out."""
    for learner in task.learners.values():
        for parent in list(learner.model.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.ReLU | nn.LeakyReLU):
                    setattr(parent, name, nn.Tanh())
    return task


@pytest.mark.slow
@pytest.mark.parametrize("model", FAST)
def test_rounding_has_the_size_of_the_format(build_run, model):
    """BF16 has 8 significant bits, FP16 has 11: errors 8 times as large where all is smooth.

    A ReLU whose input rounds to the other side of zero adds an error of another size, so there is
    none. What is left is the chance of roundings, which a geometric mean over modules levels.
    """
    fp16, bf16 = (
        shadowed(smooth(build_run(*SMALL[model], f"precision={mode}", *SCALED[mode]).task))
        for mode in SCALED
    )
    # The loss itself: FP32 on outputs of a few roundings, so one of the two may hit it.
    assert fp16[1] == pytest.approx(fp16[2], rel=2.0**-11)
    assert bf16[1] == pytest.approx(bf16[2], rel=2.0**-8)
    assert (fp16[1], bf16[1]) != (fp16[2], bf16[2])
    ratios = []
    for learner, modules in fp16[0].items():
        for name, sums in modules.items():
            assert 2.0**-16 < sums.relative_error < 2.0**-6 and sums.cosine > 0.9999, name
            ratios.append(bf16[0][learner][name].relative_error / sums.relative_error)
    assert 4 < statistics.geometric_mean(ratios) < 16


@pytest.mark.parametrize("mode", ["fp32", "fp16_master_scaled"])
def test_a_planted_factor_is_found_in_its_module_alone(build_run, mode):
    """Gradients of one layer doubled: twice the norm, the same direction, error 1."""
    task = build_run(*SMALL["conv_autoencoder"], f"precision={mode}").task
    layer = task.learner.model.decoder.layers.conv1
    for parameter in layer.parameters():
        parameter.register_hook(lambda gradient: gradient * 2)
    agreements, _, _ = shadowed(task)
    rounding = 0 if mode == "fp32" else 0.03
    for name, sums in agreements["model"].items():
        factor = 2 if name == "decoder.layers.conv1" else 1
        assert sums.norm_ratio == pytest.approx(factor, abs=rounding)
        assert sums.cosine == pytest.approx(1, abs=max(rounding, 2.0**-50))
        assert sums.relative_error == pytest.approx(factor - 1, abs=2 * rounding)


def test_a_planted_sign_and_a_planted_zero(build_run):
    task = build_run(*SMALL["conv_autoencoder"]).task
    layers = task.learner.model.encoder.layers
    for layer, factor in ((layers.conv0, -1.0), (layers.conv1, 0.0)):
        for parameter in layer.parameters():
            parameter.register_hook(lambda gradient, factor=factor: gradient * factor)
    own = shadowed(task)[0]["model"]
    opposite, nothing = own["encoder.layers.conv0"], own["encoder.layers.conv1"]
    assert (opposite.cosine, opposite.norm_ratio) == (pytest.approx(-1), 1)
    assert opposite.relative_error == 2
    assert math.isnan(nothing.cosine)
    assert (nothing.norm_ratio, nothing.relative_error) == (0, 1)


def test_a_gradient_that_the_step_has_not_is_not_compared(build_run):
    task = build_run(*SMALL["conv_autoencoder"]).task
    layers = task.learner.model.encoder.layers
    with Shadow(task, chosen_modules(task.learners, [])) as shadow:
        metrics = task.train_step(0)
        layers.conv0.zero_grad()
        layers.conv1.weight.grad = None
    shadow.run(0, metrics)
    found = shadow.read()["model"]
    assert "encoder.layers.conv0" not in found
    assert found["encoder.layers.conv1"].own == layers.conv1.bias.grad.double().square().sum()


def test_an_overflow_shows(build_run):
    overrides = [*SMALL["conv_autoencoder"], "precision=fp16_master_scaled", "scaler=static"]
    own = shadowed(build_run(*overrides, "scaler.scale=1073741824").task)[0]["model"]
    assert not all(math.isfinite(sums.own) for sums in own.values())
    assert all(math.isfinite(sums.fp32) for sums in own.values())


@pytest.mark.parametrize("model", [*FAST, *LARGE])
def test_the_task_does_not_notice(build_run, model):
    """Gradients, random state, statistics, carried state and training mode stay as they were."""
    mode = "fp16_master_scaled"
    task = build_run(*SMALL[model], f"precision={mode}", *SCALED[mode]).task
    with Shadow(task, chosen_modules(task.learners, [])) as shadow:
        metrics = task.train_step(0)

    def everything():
        tensors = [torch.get_rng_state(), *metrics.values()]
        for learner in task.learners.values():
            tensors += learner.model.state_dict().values()
            tensors += [p.grad for p in learner.model.parameters() if p.grad is not None]
        tensors += getattr(task, "hidden", None) or ()
        return [tensor.detach().clone() for tensor in tensors]

    before = everything()
    shadow.run(0, metrics)
    assert_same_bits(before, everything())
    assert all(m.training for lr in task.learners.values() for m in lr.model.modules())
