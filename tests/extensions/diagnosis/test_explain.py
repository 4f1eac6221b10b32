"""Runs that fail for a known reason: `explain` names the module, the tensor and the operation."""

import functools
import json
import math

import numpy as np
import pytest
import torch
from torch import nn

from mprun.cli import main
from mprun.config.trust import vouched
from mprun.errors import BadInput
from mprun.extensions.diagnosis.commands.explain import as_dict, as_text, explain
from mprun.extensions.diagnosis.first_nonfinite import in_words
from mprun.numerics.post_mortem import read_post_mortem

from ...helpers import ONE_CORE
from ...numerics.failing_runs import (
    AUTOENCODER,
    GAN,
    LM,
    NAIVE_ADAM,
    SGD,
    multiply_weight,
    replace_in_lm,
    run,
    set_weight,
    with_data,
)
from ...tasks.test_sampled_language_model import SAMPLED
from .planted import DIGITS, Applied, own_code

FP16 = ["precision=fp16_master", *SGD]
SCALED = [*LM, "precision=fp16_master_scaled", *SGD]


@pytest.fixture
def explained(tmp_path):
    """`explained(*overrides, plant=..., steps=...)`: train, fail, and explain without cures."""

    def make(*overrides, cures=False, **how):
        directory, code = run(tmp_path, *overrides, **how)
        assert code == 3, "the planted failure did not happen"
        return explain(directory, with_cures=cures)

    return make


def culprit(explanation):
    """(phase, module, operation, tensor) of the culprit; the replay must be the run's own."""
    finding = explanation.finding
    assert finding.verdict == "operation" and finding.reproduced
    assert "bit-equal" in explanation.replay
    event = finding.event
    return event.phase, event.module, event.operation, event.tensor


def setting(weights, learner="model"):
    """A plant that fills weights, by their names."""

    def plant(built):
        for name, value in weights.items():
            set_weight(built, name, value, learner)

    return plant


# Forward


@pytest.mark.slow
def test_overflow_in_one_activation(explained):
    # |h| < 1 and 16 products of 6e4: beyond 65504 as soon as they add up to more than 1.1.
    plant = setting({"output.weight": 6e4})
    found = explained(*LM, "model.init_range=1", *FP16, plant=plant)
    assert culprit(found) == ("forward", "output", "addmm", "output")
    event = found.finding.event
    assert event.dtype is torch.float16 and event.would_be > 65504 >= event.largest_input
    assert "overflow" in as_dict(found)["culprit"]["reason"]


@pytest.mark.slow
def test_a_ramp_over_layers_with_large_weights(explained):
    def plant(built):
        for layer in ("conv1", "conv2"):
            multiply_weight(built, f"encoder.layers.{layer}.weight", factor=2e3)

    found = explained(*AUTOENCODER, *FP16, plant=plant)
    assert culprit(found)[:3] == ("forward", "encoder.layers.conv2", "convolution")
    ramp = {one.module: one.value for one in found.finding.ramp if one.phase == "forward"}
    # conv0 is as it was, conv1 2,000 times as large, and conv2 is where it ends.
    assert ramp["encoder.layers.conv1"] > 100 * ramp["encoder.layers.conv0"]
    last, value = list(ramp.items())[-1]
    assert last == "encoder.layers.conv2" and not value <= 65504


@pytest.mark.slow
@pytest.mark.parametrize("at", [2, 4])
def test_a_step_is_explained_in_the_mode_in_force(explained, at):
    """FP32 holds what FP16 does not: the run fails in the first step of its second mode, which is
    trained again from a state that the first one left."""

    def plant(built):
        multiply_weight(built, "lstm.weight_hh_l0", 0.0)
        set_weight(built, "output.weight", 3e5)  # beyond FP16's 65504
        built.task.learners["model"].optimizer.param_groups[0]["lr"] = 0.0

    switch = f"precision.switch=[{{at: {at}, to: fp16_master}}]"
    own = ["precision=fp32", switch, *SGD, "optim.lr=1e-30"]
    found = explained(*LM, *own, plant=plant, steps=6, cures=True)
    assert found.finding.step == at + 1 and "bit-equal" in found.replay
    assert found.finding.verdict == "weights" or found.finding.event.dtype is torch.float16
    assert {one.overrides: one.cures for one in found.tried}[("precision=fp32",)] is True


def fill_momentum(built):
    """0.9 * 6e4 + 3e4 * decay: the buffer, not the gradient, leaves FP16."""
    set_weight(built, "output.bias", 3e4)
    learner = built.task.learners["model"]
    learner.optimizer.state[learner.named["output.bias"]]["momentum_buffer"].fill_(6e4)


PLANTED = {
    # The emulated LSTM is one operation: no watch sees inside, its module is what is named.
    "projection": (
        [*LM, "model.projection_size=8", "model.init_range=1", *FP16],
        setting({"lstm.weight_hr_l0": 6e4}),
        ("forward", "lstm", "LSTM", "output"),
    ),
    # Autocast rounds the weight to FP16, where 1e6 times it does not fit.
    "autocast": (
        [*AUTOENCODER, "precision=amp", "scaler=none", *SGD],
        functools.partial(multiply_weight, name="encoder.layers.conv0.weight", factor=1e6),
        ("forward", "encoder.layers.conv0", "_to_copy|convolution"),
    ),
    # Inputs give the gates +inf, the state then -inf: their sum is NaN.
    "gates of the native LSTM": (
        [*LM, *FP16, "cpu_half=native"],
        setting({"embedding.weight": 3e4, "lstm.weight_ih_l0": 1.0, "lstm.weight_hh_l0": -6e4}),
        ("forward", "lstm"),
    ),
    # Normalised values reach 2 and more: times 6e4 that is beyond FP16.
    "output of a batch norm": (
        [*GAN, *FP16],
        setting({"layers.norm1.weight": 6e4}, "generator"),
        ("forward", "generator.layers.norm1", "native_batch_norm"),
    ),
    "logits of a discriminator": (
        [*GAN, *FP16],
        setting({"layers.conv3.weight": 6e4}, "discriminator"),
        ("forward", "discriminator.layers.conv3", "convolution"),
    ),
    # Inputs of 3e4 times gradients of 2^-8 and more, scaled by 2^10: only the weight gradient of
    # the input gates is beyond FP16.
    "weight gradient of an LSTM": (
        [*SCALED, "scaler=static", "scaler.scale=1024", "scaler.max_consecutive_skips=2"],
        setting({"embedding.weight": 3e4, "lstm.weight_ih_l0": 1e-7}),
        ("backward", "lstm", "_EmulatedLayerBackward"),
    ),
    "momentum": (
        [*LM, "precision=fp16_naive", "optim=sgd", "optim.weight_decay=1"],
        fill_momentum,
        ("update", "", "_foreach_add_|_foreach_mul_", "momentum_buffer of output.bias"),
    ),
}


@pytest.mark.parametrize("what", PLANTED)
@pytest.mark.few(2)
def test_planted_overflows_are_named(explained, what):
    overrides, plant, expected = PLANTED[what]
    found = culprit(explained(*overrides, plant=plant))
    for word, allowed in zip(found, expected, strict=False):
        assert word in allowed.split("|"), found


@pytest.mark.slow
def test_softmax_in_fp16_with_large_logits(explained):
    # 4e4 - (-4e4) = 8e4 is the log-probability's size: finite logits, infinite loss.
    plant = setting({"output.bias": torch.tensor([4e4, -4e4] * 24)})
    found = explained(*LM, *FP16, "precision.loss_dtype=fp16", plant=plant, cures=True)
    assert culprit(found) == ("loss", "", "_log_softmax", "output")
    assert found.smallest.overrides == ("precision.loss_dtype=fp32",)
    assert found.command.endswith("precision.loss_dtype=fp32")
    assert "precision=fp16_master" in found.command


class NaiveNorm(nn.LayerNorm):
    """Variance as E[x^2] - E[x]^2: in FP16 infinite from |x| = 256 on (a well-known trap)."""

    def forward(self, x):
        variance = (x * x).mean(-1, keepdim=True) - x.mean(-1, keepdim=True) ** 2
        return (x - x.mean(-1, keepdim=True)) / (variance + 1e-3).sqrt() * self.weight + self.bias


@pytest.mark.slow
def test_variance_overflow_in_a_norm_layer(explained, monkeypatch):
    replace_in_lm(monkeypatch, functools.partial(NaiveNorm, 16))
    plant = functools.partial(multiply_weight, name="embedding.weight", factor=1e4)
    found = explained(*LM, "precision=fp16_naive", *SGD, plant=plant, cures=True)
    assert culprit(found)[:3] == ("forward", "dropout", "mul")
    assert found.smallest.overrides == ("precision.overrides.dropout=fp32",)
    assert ("precision.norm_dtype=fp32",) in [one.overrides for one in found.tried if one.cures]


class Residual(nn.Linear):
    """x + Wx, in place: neither summand overflows, the sum does."""

    def forward(self, x):
        out = super().forward(x)
        out += x
        return out


@pytest.mark.slow
def test_overflow_of_a_residual_sum(explained, monkeypatch):
    replace_in_lm(monkeypatch, functools.partial(Residual, 16, 16, bias=False))
    weights = {"embedding.weight": 4e4, "dropout.weight": torch.eye(16)}
    found = explained(*LM, *FP16, plant=setting(weights))
    assert culprit(found)[:3] == ("forward", "dropout", "add_")
    assert found.finding.event.largest_input == 4e4


class Outside(torch.autograd.Function):
    """Computed where no watch can see it, as an extension's own kernel would."""

    @staticmethod
    def forward(ctx, x):
        return torch.from_numpy(np.full(x.shape, np.inf, dtype=np.float16))

    @staticmethod
    def backward(ctx, gradient):
        return gradient


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "operation", "reason"),
    [
        (lambda x: x.relu().log(), "log", "logarithm of zero"),
        (lambda x: x / x.relu(), "div", "division by zero"),
        (lambda x: x.relu().rsqrt(), "rsqrt", "division by zero"),
        (lambda x: x.sqrt(), "sqrt", "NaN from finite values"),
        (lambda x: (x * 1000).exp(), "exp", "overflow"),
        (lambda x: x.cumsum(-1) + 65000 - x.detach().abs().min() * 0 + 600, "add", "overflow"),
        (Outside.apply, "Applied", ""),  # its module is named
    ],
    ids=["log of zero", "x / 0", "1 / sqrt(0)", "root of a negative", "exp", "sum", "a kernel"],
)
def test_functions_at_their_limits(explained, monkeypatch, function, operation, reason):
    replace_in_lm(monkeypatch, functools.partial(Applied, function))
    found = explained(*LM, *FP16)
    assert culprit(found)[:3] == ("forward", "dropout", operation)
    assert reason in as_dict(found)["culprit"]["reason"]


# Data


@pytest.mark.slow
def test_nan_in_a_batch(explained):
    def change(index, batch):
        images, labels = batch
        if index == 3:
            images = images.clone()
            images[1, 0, 5, 5] = math.nan
        return images, labels

    found = explained(*AUTOENCODER, *FP16, plant=with_data(change))
    assert (found.finding.verdict, found.finding.step) == ("data", 4)
    assert found.finding.details == {"inputs": "1 of 4096 values are NaN"}
    assert found.tried == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:input .* values become infinite in fp16")
def test_values_of_a_batch_that_do_not_fit_fp16(explained):
    def change(index, batch):
        return batch[0] * (1e6 if index == 2 else 1.0), batch[1]

    found = explained(*AUTOENCODER, *FP16, plant=with_data(change))
    assert culprit(found) == ("forward", "", "_to_copy", "the inputs")
    assert found.finding.step == 3
    assert "the inputs, 2^19.9, do not fit FP16" in as_dict(found)["culprit"]["reason"]


def test_an_index_outside_the_embedding(tmp_path):
    def change(index, batch):
        return (batch[0] + 1000 if index == 1 else batch[0]), batch[1]

    with pytest.raises(IndexError):
        run(tmp_path, *LM, *FP16, plant=with_data(change))
    found = explain(tmp_path / "run")
    assert (found.status, found.finding) == ("failed", None)
    assert "index out of range" in found.cause and "embedding" in found.replay
    assert as_dict(found)["verdict"] == "exception"


# Backward


class Amplified(torch.autograd.Function):
    """The identity, whose gradient is multiplied."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


@pytest.mark.slow
def test_infinity_in_one_gradient(explained, monkeypatch):
    # Gradients here are around 2^-10; in two factors, because one beyond 65504 is no FP16 number.
    replace_in_lm(
        monkeypatch, lambda: Applied(lambda x: Amplified.apply(Amplified.apply(x, 6e4), 6e4))
    )
    found = explained(*LM, *FP16, cures=True)
    assert culprit(found) == ("backward", "dropout", "mul", "gradient")
    assert found.smallest is not None
    assert any(one.overrides[0].startswith("scaler=static") for one in found.tried)


@pytest.mark.slow
def test_a_static_scale_that_is_too_large(explained):
    static = ["scaler=static", f"scaler.scale={2**24}", "scaler.max_consecutive_skips=3"]
    found = explained(*SCALED, *static, cures=True)
    # The loss's gradient, (softmax - onehot) / 24 * 2^24, is the first thing stored in FP16.
    assert culprit(found) == ("backward", "loss", "_to_copy", "gradient")
    assert found.classification == ["collapse: 6 skips in a row at the floor (loss scale 2^24)"]
    [cure] = found.smallest.overrides
    scale = float(cure.removeprefix("scaler.scale="))
    assert 2**10 <= scale <= 65504 * 24


@pytest.mark.slow
def test_a_dynamic_scale_whose_floor_is_too_high(explained):
    dynamic = [f"scaler.init_scale={2**24}", f"scaler.min_scale={2**23}"]
    found = explained(*SCALED, *dynamic, "scaler.max_consecutive_skips=3", cures=True)
    assert culprit(found)[:3] == ("backward", "loss", "_to_copy")
    # Step 1 is at 2^24; the floor is reached with step 2.
    assert (found.finding.kind, found.finding.step) == ("collapse", 2)
    assert found.finding.event.largest_input < 2**23
    assert found.smallest.overrides[0].startswith("scaler.min_scale=")


# Update


@pytest.mark.slow
def test_eps_below_the_range_of_fp16(explained):
    found = explained(*NAIVE_ADAM, cures=True)
    assert culprit(found) == ("update", "", "_foreach_addcdiv_", "embedding.weight")
    assert "eps round to 0" in as_dict(found)["culprit"]["reason"]
    assert found.finding.step == 1
    cured = {one.overrides: one.cures for one in found.tried}
    assert cured["optim.eps=1e-06",] or cured["optim.eps=0.0001",]
    assert cured["precision.master_dtype=fp32", "precision.grad_dtype=fp32"]
    assert found.smallest.overrides[0].startswith("optim.eps=")


@pytest.mark.slow
def test_a_last_update_that_only_the_evaluation_shows(explained):
    found = explained(*NAIVE_ADAM, steps=1)
    assert found.cause == "non-finite evaluation loss"
    assert (found.finding.kind, found.finding.step) == ("state", 1)
    assert culprit(found)[2] == "_foreach_addcdiv_"


def test_weights_that_do_not_fit_fp16_when_copied(explained):
    found = explained(*LM, "precision=fp16_master", "optim=sgd_plain", "optim.lr=1e8")
    # The FP32 weight is finite after its update: it overflows where the next step casts it.
    assert culprit(found) == ("forward", "", "_to_copy", "output.weight")
    assert (found.finding.kind, found.finding.step) == ("loss", 2)
    assert found.finding.module == "output"
    reason = as_dict(found)["culprit"]["reason"]
    assert "the master weight, 2^" in reason and "does not fit FP16" in reason


def test_weights_that_do_not_fit_fp16_end_a_scaled_run_as_a_collapse(explained):
    floor = ["scaler.init_scale=1", "scaler.min_scale=1", "scaler.max_consecutive_skips=3"]
    found = explained(*SCALED, *floor, "optim.lr=1e8")
    assert found.classification[0].startswith("collapse: ")
    assert (found.finding.kind, found.finding.step) == ("collapse", 2)
    assert culprit(found) == ("forward", "", "_to_copy", "output.weight")


@pytest.mark.slow
def test_weight_decay_that_overflows(explained):
    # g + decay * w = 4 * 3e4 before it is multiplied by the learning rate.
    decay, plant = [*SGD, "optim.weight_decay=4"], setting({"output.bias": 3e4})
    found = explained(*LM, "precision=fp16_naive", *decay, plant=plant, cures=True)
    assert culprit(found) == ("update", "", "_foreach_add", "output.bias")
    assert found.smallest.overrides == ("precision.overrides.output=fp32",)


@pytest.mark.slow
def test_an_exploding_learning_rate(explained):
    # Each step multiplies the weights by 1 - 0.2 * 15 = -2; a tenth of the rate by 0.7.
    exploding = ["optim.lr=0.2", "optim.weight_decay=15"]
    found = explained(*LM, *FP16, *exploding, steps=60, cures=True)
    assert any(line.startswith("exploding loss: grew by") for line in found.classification)
    assert found.smallest.overrides == ("optim.lr=0.02",)
    # Tried from the start: FP32 explodes as well.
    assert {one.overrides: one.cures for one in found.tried}[("precision=fp32",)] is False


@pytest.mark.slow
def test_where_nothing_cures_the_step_changes_are_tried_from_the_start(explained):
    # The first update makes the weights so large that the second step is beyond help, and a
    # thousandth of the rate is still too much.
    found = explained(*LM, *FP16, "optim.lr=3e5", cures=True, steps=4)
    assert found.finding.step > 1 and found.from_start
    tried = {one.overrides[0]: one.cures for one in found.tried}
    assert [tried[f"optim.lr={lr}"] for lr in (30000, 3000, 300)] == [False] * 3
    assert found.smallest is None
    text = "\n".join(as_text(found))
    assert "from the start of the run" in text and "cure      none of these" in text


# What is no culprit


class Masked(nn.Module):
    """Attention's mask: -inf on some scores, of a constant, of a buffer, or of all of a row."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.register_buffer("mask", torch.full((1,), -math.inf) if how == "buffer" else None)

    def forward(self, x):
        if self.how == "buffer":
            return torch.softmax(x + self.mask, -1)
        last = torch.arange(x.shape[-1]) >= (0 if self.how == "row" else 2)
        masked = torch.softmax(x.masked_fill(last, -math.inf), -1)
        return masked * 6e4 * 8.0 if self.how == "overflow" else masked


@pytest.mark.slow
@pytest.mark.parametrize("how", ["overflow", "row", "buffer"])
def test_a_mask_is_no_overflow_unless_it_leaves_nothing(explained, monkeypatch, how):
    replace_in_lm(monkeypatch, functools.partial(Masked, how))
    found = explained(*LM, *FP16).finding
    name, reason = found.event.operation, in_words(found)[2]
    if how == "overflow":
        assert (name, reason[:8]) == ("mul", "overflow")
    else:
        rows = found.event.empty
        assert name == "_softmax" and rows > 0
        assert reason.startswith(f"NaN: a mask left nothing in {rows} rows of its input")
    assert all(math.isfinite(one.value) for one in found.ramp[:-1])


def test_weights_that_were_not_finite_before(explained):
    found = explained(*LM, *FP16, plant=setting({"output.bias": math.nan}))
    assert found.finding.verdict == "earlier"
    assert found.finding.details["output.bias"] == "48 of 48 values are NaN"


class Flaky(nn.Module):
    """Infinite in its fourth forward pass and never again: nothing that a replay could find."""

    calls = 0

    def forward(self, x):
        Flaky.calls += 1
        return x * (float("inf") if Flaky.calls == 4 else 1.0)


@pytest.mark.slow
def test_what_does_not_come_back_is_not_found(explained, monkeypatch):
    monkeypatch.setattr(Flaky, "calls", 0)
    replace_in_lm(monkeypatch, Flaky)
    found = explained(*LM, *FP16, cures=True)
    assert (found.finding.verdict, found.finding.reproduced) == ("not found", False)
    assert found.tried == [] and "does not fail again" in "\n".join(as_text(found))
    assert "its losses other from step 4 on" in found.replay


@pytest.mark.slow
def test_a_perplexity_beyond_float64_is_no_operation_s_fault(explained):
    # exp(710) is infinite although every value of the run is finite.
    plant = setting({"output.bias": torch.tensor([0.0, 2e3] * 24)})
    found = explained(*LM, "precision=fp32", *SGD, "optim.lr=1e-9", plant=plant)
    assert found.finding.verdict == "not found"
    assert "perplexity inf" in as_text(found)[3]


class OnlyInEvaluation(nn.Module):
    """Overflows, even in FP32, where it does not train."""

    def forward(self, x):
        return x if self.training else (x.abs() + 1e3).exp()


@pytest.mark.slow
def test_an_evaluation_that_overflows(explained, monkeypatch):
    replace_in_lm(monkeypatch, OnlyInEvaluation)
    found = explained(*LM, *FP16)
    assert (found.finding.kind, found.finding.step) == ("evaluation", 6)
    event = found.finding.event
    assert (event.phase, event.module, event.operation) == ("forward", "dropout", "exp")
    assert event.dtype is torch.float32 and found.finding.reproduced


def test_a_run_in_fp32_that_did_not_fail_is_refused(tmp_path):
    directory, code = run(tmp_path, *LM, "precision=fp32", *SGD, steps=3)
    assert code == 0
    with pytest.raises(BadInput, match="status done in FP32"):
        explain(directory)


@pytest.mark.slow
def test_skips_while_a_scale_settles_are_no_worse_ending(tmp_path):
    directory, code = run(tmp_path, *SCALED, f"scaler.init_scale={2**24}", steps=20)
    assert code == 0
    found = explain(directory)
    ended, skips = found.classification
    assert ended.endswith("nothing to explain; more seeds: mprun compare")
    assert "skipped updates while the loss scale settles are normal" in skips
    assert (found.verdict, found.tried, found.command) == ("mode", [], None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("planted", "why", "cure"),
    [
        # 20000 is added and subtracted: BF16 keeps 8 bits of the sum.
        (
            "precision=bf16_master model.options.part=offset model.options.at=shift "
            "model.options.by=20000",
            "shift: sub cancels numbers up to 2e+04, which add made",
            "precision.overrides.shift=fp32",
        ),
        # A scale of 2^-30 sinks every gradient below FP16's 2^-25.
        (
            f"precision=fp16_master_scaled scaler=static scaler.scale={2.0**-30}",
            None,
            "scaler=dynamic",
        ),
        # Each update makes the scale 1024 times as large, and the next ones are skipped.
        (
            "precision=amp scaler=dynamic scaler.growth_interval=1 scaler.growth_factor=1024",
            "loss scale: it grows 1024-fold after 1 step without a skip",
            "scaler=dynamic",
        ),
    ],
)
def test_a_run_that_ended_worse_in_16_bits_is_explained(tmp_path, planted, why, cure):
    directory, code = run(tmp_path, *DIGITS, *planted.split(), steps=60)
    assert code == 0
    found = explain(directory, given=vouched(own_code(DIGITS)), seconds=600)
    assert found.verdict == "mode" and found.replay.endswith("losses bit-equal to the run's")
    told = [*found.reasons, found.far.in_words() if found.far else ""]
    assert why is None or any(one.startswith(why) for one in told)
    cures = {" ".join(one.overrides): one.cures for one in found.tried}
    smallest = " ".join(found.smallest.overrides)
    assert cures[cure] and cures.get("precision.overrides.head=fp32", False) is False
    assert cures[smallest] and smallest in found.command
    assert all(one.steps == 60 for one in found.tried)


@pytest.mark.slow
def test_one_skipped_update_of_a_loss_that_falls_is_nothing_to_explain(tmp_path):
    """The dynamic scale starts one power too high: the run is one update behind FP32."""
    directory, code = run(tmp_path, *DIGITS, "precision=fp16_master_scaled", steps=100)
    assert code == 0
    found = explain(directory, given=vouched(own_code(DIGITS)), seconds=600)
    assert "1 skipped updates" in found.classification[1]
    assert "nothing to explain" in found.classification[0] and found.command is None


# The run without a kept state, and the verb


def test_without_a_kept_state_the_run_is_trained_again(tmp_path):
    directory, code = run(tmp_path, *NAIVE_ADAM, "numerics.keep_failure=false")
    assert code == 3 and not (directory / "numerics" / "failure").exists()
    kept = read_post_mortem(directory)["failure"]
    assert (kept["folder"], kept["reason"]) == (None, "numerics.keep_failure=false")
    found = explain(directory, with_cures=False)
    assert culprit(found)[2] == "_foreach_addcdiv_"
    assert (directory / "numerics" / "failure" / "step-00000000").is_dir()


@pytest.mark.slow
def test_it_is_trained_again_from_the_newest_checkpoint_that_is_whole(tmp_path):
    exploding = ["numerics.keep_failure=false", "optim.lr=0.2", "optim.weight_decay=15"]
    directory, code = run(tmp_path, *LM, *FP16, *exploding, "train.checkpoint_every=5", steps=60)
    assert code == 3
    found = explain(directory, with_cures=False)
    assert found.finding.verdict == "operation" and found.finding.reproduced
    failure = read_post_mortem(directory)["failure"]
    assert failure["replayed_from"] % 5 == 0 and failure["replayed_from"] >= 5
    assert failure["first_difference"] is None and failure["compared"] > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_a_model_with_a_sampled_softmax(tmp_path, capsys):
    overrides = [*SAMPLED, *ONE_CORE, "precision=fp16_naive", "optim.lr=6e4", "train.log_every=1"]
    folder = tmp_path / "run"
    assert main([*overrides, f"output_dir='{folder}'", "train.steps=30"]) == 3
    capsys.readouterr()
    assert main(["explain", str(folder), "--no-cures", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "lstm" in json.dumps(found) and "fails again" in json.dumps(found)
