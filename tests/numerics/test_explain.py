"""Runs that fail for a known reason: `explain` names the module, the tensor and the operation."""

import functools
import json

import numpy as np
import pytest
import torch
from torch import nn

from mprun import models
from mprun.cli import main
from mprun.cli.explain import as_dict, as_text, explain
from mprun.errors import BadInput
from mprun.numerics.post_mortem import read_post_mortem
from mprun.record.run_directory import read_json

from .failing_runs import (
    AUTOENCODER,
    GAN,
    LM,
    SGD,
    multiply_weight,
    replace_in_lm,
    run,
    set_weight,
    with_data,
)


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


# Forward


def test_overflow_in_one_activation(explained):
    # |h| < 1 and 16 products of 6e4: beyond 65504 as soon as they add up to more than 1.1.
    plant = functools.partial(set_weight, name="output.weight", value=6e4)
    found = explained(*LM, "model.init_range=1", "precision=fp16_master", *SGD, plant=plant)
    assert culprit(found) == ("forward", "output", "addmm", "output")
    event = found.finding.event
    assert event.dtype is torch.float16 and event.would_be > 65504 >= event.largest_input
    assert "overflow" in as_dict(found)["culprit"]["reason"]


def test_the_same_in_bf16_does_not_overflow(tmp_path):
    plant = functools.partial(set_weight, name="output.weight", value=6e4)
    directory, code = run(
        tmp_path, *LM, "model.init_range=1", "precision=bf16_master", *SGD, plant=plant
    )
    assert code == 0
    with pytest.raises(BadInput, match="status done"):
        explain(directory)


def test_a_ramp_over_layers_with_large_weights(explained):
    def plant(built):
        for layer in ("conv1", "conv2"):
            multiply_weight(built, f"encoder.layers.{layer}.weight", factor=2e3)

    found = explained(*AUTOENCODER, "precision=fp16_master", *SGD, plant=plant)
    phase, module, operation, _ = culprit(found)
    assert (phase, module, operation) == ("forward", "encoder.layers.conv2", "convolution")
    ramp = {one.module: one.value for one in found.finding.ramp if one.phase == "forward"}
    # conv0 is as it was, conv1 2,000 times as large, and conv2 is where it ends.
    assert ramp["encoder.layers.conv1"] > 100 * ramp["encoder.layers.conv0"]
    assert list(ramp)[-1] == module and not ramp[module] <= 65504


def test_overflow_under_autocast(explained):
    plant = functools.partial(multiply_weight, name="encoder.layers.conv0.weight", factor=1e6)
    found = explained(*AUTOENCODER, "precision=amp", "scaler=none", *SGD, plant=plant)
    # Autocast rounds the weight to FP16, where 1e6 times it does not fit.
    phase, module, operation, _ = culprit(found)
    assert (phase, module) == ("forward", "encoder.layers.conv0")
    assert operation in ("_to_copy", "convolution")


def test_overflow_of_the_projection(explained):
    plant = functools.partial(set_weight, name="lstm.weight_hr_l0", value=6e4)
    found = explained(
        *LM,
        "model.projection_size=8",
        "model.init_range=1",
        "precision=fp16_master",
        *SGD,
        plant=plant,
    )
    # The emulated LSTM is one operation: no watch sees inside, its module is what is named.
    assert culprit(found) == ("forward", "lstm", "LSTM", "output")


def test_overflow_of_the_gates_in_the_native_lstm(explained):
    def plant(built):
        # Inputs give the gates +inf, the state then -inf: their sum is NaN.
        set_weight(built, "embedding.weight", 3e4)
        set_weight(built, "lstm.weight_ih_l0", 1.0)
        set_weight(built, "lstm.weight_hh_l0", -6e4)

    found = explained(*LM, "precision=fp16_master", "cpu_half=native", *SGD, plant=plant)
    phase, module, _, _ = culprit(found)
    assert (phase, module) == ("forward", "lstm")


def test_overflow_of_a_batch_norm_output(explained):
    # Normalised values reach 2 and more: times 6e4 that is beyond FP16.
    def plant(built):
        set_weight(built, "layers.norm1.weight", 6e4, learner="generator")

    found = explained(*GAN, "precision=fp16_master", *SGD, plant=plant)
    assert culprit(found)[:3] == ("forward", "generator.layers.norm1", "native_batch_norm")


def test_overflow_of_the_discriminator_logits(explained):
    def plant(built):
        set_weight(built, "layers.conv3.weight", 6e4, learner="discriminator")

    found = explained(*GAN, "precision=fp16_master", *SGD, plant=plant)
    assert culprit(found)[:3] == ("forward", "discriminator.layers.conv3", "convolution")


@pytest.mark.slow
def test_softmax_in_fp16_with_large_logits(explained):
    # 4e4 - (-4e4) = 8e4 is the log-probability's size: finite logits, infinite loss.
    halves = torch.tensor([4e4, -4e4] * 24)
    plant = functools.partial(set_weight, name="output.bias", value=halves)
    found = explained(
        *LM, "precision=fp16_master", "precision.loss_dtype=fp16", *SGD, plant=plant, cures=True
    )
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
    phase, module, operation, _ = culprit(found)
    assert (phase, module, operation) == ("forward", "dropout", "mul")
    assert found.smallest.overrides == ("precision.overrides.dropout=fp32",)
    assert ("precision.norm_dtype=fp32",) in [one.overrides for one in found.tried if one.cures]


class Residual(nn.Module):
    """x + inner(x), in place: neither summand overflows, the sum does."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 16, bias=False)
        with torch.no_grad():
            self.inner.weight.copy_(torch.eye(16))

    def forward(self, x):
        out = self.inner(x)
        out += x
        return out


def test_overflow_of_a_residual_sum(explained, monkeypatch):
    replace_in_lm(monkeypatch, Residual)

    def plant(built):
        set_weight(built, "embedding.weight", 4e4)
        set_weight(built, "dropout.inner.weight", torch.eye(16))

    found = explained(*LM, "precision=fp16_master", *SGD, plant=plant)
    assert culprit(found)[:3] == ("forward", "dropout", "add_")
    assert found.finding.event.largest_input == 4e4


class Applied(nn.Module):
    """One function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@pytest.mark.parametrize(
    ("function", "operation", "reason"),
    [
        (lambda x: x.relu().log(), "log", "logarithm of zero"),
        (lambda x: x / x.relu(), "div", "division by zero"),
        (lambda x: x.relu().rsqrt(), "rsqrt", "division by zero"),
        (lambda x: x.sqrt(), "sqrt", "NaN from finite values"),
        (lambda x: (x * 1000).exp(), "exp", "overflow"),
        (lambda x: x.cumsum(-1) + 65000 - x.detach().abs().min() * 0 + 600, "add", "overflow"),
    ],
    ids=["log of zero", "x / 0", "1 / sqrt(0)", "root of a negative", "exp", "sum"],
)
@pytest.mark.few(3)
def test_functions_at_their_limits(explained, monkeypatch, function, operation, reason):
    replace_in_lm(monkeypatch, functools.partial(Applied, function))
    found = explained(*LM, "precision=fp16_master", *SGD)
    assert culprit(found)[:3] == ("forward", "dropout", operation)
    assert reason in as_dict(found)["culprit"]["reason"]


class Outside(torch.autograd.Function):
    """Computed where no watch can see it, as an extension's own kernel would."""

    @staticmethod
    def forward(ctx, x):
        return torch.from_numpy(np.full(x.shape, np.inf, dtype=np.float16))

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def test_a_kernel_that_cannot_be_looked_into(explained, monkeypatch):
    replace_in_lm(monkeypatch, functools.partial(Applied, Outside.apply))
    found = explained(*LM, "precision=fp16_master", *SGD)
    assert culprit(found)[:3] == ("forward", "dropout", "Applied")


# Data


def test_nan_in_a_batch(explained):
    def change(index, batch):
        images, labels = batch
        if index == 3:
            images = images.clone()
            images[1, 0, 5, 5] = float("nan")
        return images, labels

    found = explained(*AUTOENCODER, "precision=fp16_master", *SGD, plant=with_data(change))
    assert (found.finding.verdict, found.finding.step) == ("data", 4)
    assert found.finding.details == {"inputs": "1 of 4096 values are NaN"}
    assert found.tried == []


def test_values_of_a_batch_that_do_not_fit_fp16(explained):
    def change(index, batch):
        return batch[0] * (1e6 if index == 2 else 1.0), batch[1]

    found = explained(*AUTOENCODER, "precision=fp16_master", *SGD, plant=with_data(change))
    assert culprit(found)[0] in ("input", "loss") and culprit(found)[2] == "_to_copy"
    assert found.finding.step == 3


def test_an_index_outside_the_embedding(tmp_path):
    def change(index, batch):
        return (batch[0] + 1000 if index == 1 else batch[0]), batch[1]

    with pytest.raises(IndexError):
        run(tmp_path, *LM, "precision=fp16_master", *SGD, plant=with_data(change))
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
    found = explained(*LM, "precision=fp16_master", *SGD, cures=True)
    phase, module, operation, tensor = culprit(found)
    assert (phase, module, operation, tensor) == ("backward", "dropout", "mul", "gradient")
    assert found.smallest is not None
    assert any(one.overrides[0].startswith("scaler=static") for one in found.tried)


@pytest.mark.slow
def test_a_static_scale_that_is_too_large(explained):
    found = explained(
        *LM,
        "precision=fp16_master_scaled",
        "scaler=static",
        f"scaler.scale={2**24}",
        "scaler.max_consecutive_skips=3",
        *SGD,
        cures=True,
    )
    # The loss's gradient, (softmax - onehot) / 24 * 2^24, is the first thing stored in FP16.
    assert culprit(found) == ("backward", "loss", "_to_copy", "gradient")
    assert found.classification == ["collapse: 6 skips in a row at the floor (loss scale 2^24)"]
    [cure] = found.smallest.overrides
    scale = float(cure.removeprefix("scaler.scale="))
    assert 2**10 <= scale <= 65504 * 24


@pytest.mark.slow
def test_a_dynamic_scale_whose_floor_is_too_high(explained):
    found = explained(
        *LM,
        "precision=fp16_master_scaled",
        "scaler=dynamic",
        f"scaler.init_scale={2**24}",
        f"scaler.min_scale={2**23}",
        "scaler.max_consecutive_skips=3",
        *SGD,
        cures=True,
    )
    assert culprit(found)[:3] == ("backward", "loss", "_to_copy")
    # Step 1 is at 2^24; the floor is reached with step 2.
    assert (found.finding.kind, found.finding.step) == ("collapse", 2)
    assert found.finding.event.largest_input < 2**23
    assert found.smallest.overrides[0].startswith("scaler.min_scale=")


def test_overflow_of_the_lstm_s_weight_gradient(explained):
    # Inputs of 3e4 times gradients of 2^-8 and more, scaled by 2^10: only the weight gradient of
    # the input gates is beyond FP16.
    def plant(built):
        set_weight(built, "embedding.weight", 3e4)
        set_weight(built, "lstm.weight_ih_l0", 1e-7)

    found = explained(
        *LM,
        "precision=fp16_master_scaled",
        "scaler=static",
        "scaler.scale=1024",
        "scaler.max_consecutive_skips=2",
        *SGD,
        plant=plant,
    )
    assert culprit(found)[:3] == ("backward", "lstm", "_EmulatedLayerBackward")


# Update


@pytest.mark.slow
def test_eps_below_the_range_of_fp16(explained):
    found = explained(*LM, "precision=fp16_naive", "optim=adam", cures=True)
    phase, _, operation, tensor = culprit(found)
    assert (phase, operation) == ("update", "_foreach_addcdiv_")
    assert tensor == "embedding.weight"
    assert "eps round to 0" in as_dict(found)["culprit"]["reason"]
    assert found.finding.step == 1
    cured = {one.overrides: one.cures for one in found.tried}
    assert cured["optim.eps=1e-06",] or cured["optim.eps=0.0001",]
    assert cured["precision.master_dtype=fp32", "precision.grad_dtype=fp32"]
    assert found.smallest.overrides[0].startswith("optim.eps=")


def test_a_last_update_that_only_the_evaluation_shows(explained):
    found = explained(*LM, "precision=fp16_naive", "optim=adam", steps=1)
    assert found.cause == "non-finite evaluation loss"
    assert (found.finding.kind, found.finding.step) == ("state", 1)
    assert culprit(found)[2] == "_foreach_addcdiv_"


def test_weights_that_do_not_fit_fp16_when_copied(explained):
    found = explained(*LM, "precision=fp16_master", "optim=sgd_plain", "optim.lr=1e8")
    phase, _, operation, tensor = culprit(found)
    assert (phase, operation, tensor) == ("update", "_foreach_copy_", "lstm.bias_ih_l0")
    assert (found.finding.kind, found.finding.step) == ("state", 1)
    assert "does not fit FP16" in as_dict(found)["culprit"]["reason"]


def test_weights_that_do_not_fit_fp16_end_a_scaled_run_as_a_collapse(explained):
    found = explained(
        *LM,
        "precision=fp16_master_scaled",
        "scaler.init_scale=1",
        "scaler.min_scale=1",
        "scaler.max_consecutive_skips=3",
        "optim=sgd_plain",
        "optim.lr=1e8",
    )
    assert found.classification[0].startswith("collapse: ")
    assert (found.finding.kind, found.finding.step) == ("state", 1)
    assert culprit(found)[2] == "_foreach_copy_"


@pytest.mark.slow
def test_weight_decay_that_overflows(explained):
    # g + decay * w = 4 * 3e4 before it is multiplied by the learning rate.
    plant = functools.partial(set_weight, name="output.bias", value=3e4)
    found = explained(
        *LM, "precision=fp16_naive", *SGD, "optim.weight_decay=4", plant=plant, cures=True
    )
    phase, _, operation, tensor = culprit(found)
    assert (phase, operation) == ("update", "_foreach_add")
    assert tensor == "output.bias"
    assert found.smallest.overrides == ("precision.overrides.output=fp32",)


def test_momentum_that_overflows(explained):
    # 0.9 * 6e4 + 3e4 * decay: the buffer, not the gradient, leaves FP16.
    def plant(built):
        set_weight(built, "output.bias", 3e4)
        optimizer = built.task.learners["model"].optimizer
        place = optimizer.names.index("output.bias")
        state = optimizer.inner.state[optimizer.updated[place]]
        state["momentum_buffer"].fill_(6e4)

    found = explained(*LM, "precision=fp16_naive", "optim=sgd", "optim.weight_decay=1", plant=plant)
    phase, _, operation, tensor = culprit(found)
    assert phase == "update" and operation in ("_foreach_add_", "_foreach_mul_")
    assert tensor == "momentum_buffer of output.bias"


@pytest.mark.slow
def test_an_exploding_learning_rate(explained):
    # Each step multiplies the weights by 1 - 0.2 * 15 = -2; a tenth of the rate by 0.7.
    found = explained(
        *LM,
        "precision=fp16_master",
        "optim=sgd_plain",
        "optim.lr=0.2",
        "optim.weight_decay=15",
        steps=60,
        cures=True,
    )
    assert any(line.startswith("exploding loss: grew by") for line in found.classification)
    assert found.smallest.overrides == ("optim.lr=0.02",)
    # Tried from the start: FP32 explodes as well.
    assert {one.overrides: one.cures for one in found.tried}[("precision=fp32",)] is False


@pytest.mark.slow
def test_where_nothing_cures_the_step_changes_are_tried_from_the_start(explained):
    # The first update makes the weights so large that the second step is beyond help, and a
    # thousandth of the rate is still too much.
    found = explained(
        *LM, "precision=fp16_master", "optim=sgd_plain", "optim.lr=3e5", cures=True, steps=4
    )
    assert found.finding.step > 1 and found.from_start
    tried = {one.overrides[0]: one.cures for one in found.tried}
    assert [tried[f"optim.lr={lr}"] for lr in (30000, 3000, 300)] == [False] * 3
    assert found.smallest is None
    text = "\n".join(as_text(found))
    assert "from the start of the run" in text and "cure      none of these" in text


# What is no culprit


def test_weights_that_were_not_finite_before(explained):
    plant = functools.partial(set_weight, name="output.bias", value=float("nan"))
    found = explained(*LM, "precision=fp16_master", *SGD, plant=plant)
    assert found.finding.verdict == "earlier"
    assert found.finding.details["output.bias"] == "48 of 48 values are NaN"


class Flaky(nn.Module):
    """Infinite in its fourth forward pass and never again: nothing that a replay could find."""

    calls = 0

    def forward(self, x):
        Flaky.calls += 1
        return x * (float("inf") if Flaky.calls == 4 else 1.0)


def test_what_does_not_come_back_is_not_found(explained, monkeypatch):
    monkeypatch.setattr(Flaky, "calls", 0)
    replace_in_lm(monkeypatch, Flaky)
    found = explained(*LM, "precision=fp16_master", *SGD, cures=True)
    assert (found.finding.verdict, found.finding.reproduced) == ("not found", False)
    assert found.tried == [] and "does not fail again" in "\n".join(as_text(found))
    assert "its losses other from step 4 on" in found.replay


def test_a_perplexity_beyond_float64_is_no_operation_s_fault(explained):
    # exp(710) is infinite although every value of the run is finite.
    plant = functools.partial(set_weight, name="output.bias", value=torch.tensor([0.0, 2e3] * 24))
    found = explained(*LM, "precision=fp32", *SGD, "optim.lr=1e-9", plant=plant)
    assert found.finding.verdict == "not found"
    assert "perplexity inf" in as_text(found)[3]


class OnlyInEvaluation(nn.Module):
    """Overflows, even in FP32, where it does not train."""

    def forward(self, x):
        return x if self.training else (x.abs() + 1e3).exp()


def test_an_evaluation_that_overflows(explained, monkeypatch):
    replace_in_lm(monkeypatch, OnlyInEvaluation)
    found = explained(*LM, "precision=fp16_master", *SGD)
    assert (found.finding.kind, found.finding.step) == ("evaluation", 6)
    event = found.finding.event
    assert (event.phase, event.module, event.operation) == ("forward", "dropout", "exp")
    assert event.dtype is torch.float32 and found.finding.reproduced


def test_skips_while_the_scale_settles_are_called_normal(tmp_path):
    directory, code = run(
        tmp_path, *LM, "precision=fp16_master_scaled", f"scaler.init_scale={2**24}", *SGD, steps=20
    )
    assert code == 0 and read_json(directory / "run.json")["skipped"] > 0
    with pytest.raises(BadInput, match="skipped updates while the loss scale settles are normal"):
        explain(directory)


# The run without a kept state, and the verb


def test_without_a_kept_state_the_run_is_trained_again(tmp_path):
    arguments = (*LM, "precision=fp16_naive", "optim=adam", "numerics.keep_failure=false")
    directory, code = run(tmp_path, *arguments)
    assert code == 3 and not (directory / "numerics" / "failure").exists()
    found = explain(directory, with_cures=False)
    assert culprit(found)[2] == "_foreach_addcdiv_"
    assert (directory / "numerics" / "failure" / "step-00000000").is_dir()


def test_it_is_trained_again_from_the_newest_checkpoint_that_is_whole(tmp_path):
    arguments = (*LM, "precision=fp16_master", "optim=sgd_plain", "numerics.keep_failure=false")
    directory, code = run(
        tmp_path,
        *arguments,
        "optim.lr=0.2",
        "optim.weight_decay=15",
        "train.checkpoint_every=5",
        steps=60,
    )
    assert code == 3
    found = explain(directory, with_cures=False)
    assert found.finding.verdict == "operation" and found.finding.reproduced
    failure = read_post_mortem(directory)["failure"]
    assert failure["replayed_from"] % 5 == 0 and failure["replayed_from"] >= 5
    assert failure["first_difference"] is None and failure["compared"] > 0


def test_the_verb_prints_text_and_json(tmp_path, capsys):
    directory, _ = run(tmp_path, *LM, "precision=fp16_naive", "optim=adam")
    capsys.readouterr()
    assert main(["explain", str(directory), "--no-cures"]) == 0
    printed = capsys.readouterr().out
    assert "culprit   weight update, optimizer: _foreach_addcdiv_" in printed
    assert main(["explain", str(directory), "--no-cures", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["culprit"]["operation"] == "_foreach_addcdiv_"
    assert content["ramp"][0]["phase"] == "forward"
    assert main(["explain", str(tmp_path)]) == 2
    assert main(["explain"]) == 2
    assert main(["explain", str(directory), "--all"]) == 2


@pytest.mark.slow
def test_overflow_of_a_resnet_s_residual_sum(explained):
    def plant(built):
        set_weight(built, "layer1.0.bn3.weight", 1.2e4)
        set_weight(built, "layer1.0.downsample.1.weight", 1.2e4)

    found = explained(
        "model=resnet50",
        "data=synthetic_images",
        "data.batch_size=2",
        "data.train_size=8",
        "data.eval_size=2",
        "precision=fp16_master",
        *SGD,
        plant=plant,
        steps=2,
    )
    assert culprit(found)[:3] == ("forward", "layer1.0", "add_")


@pytest.mark.slow
def test_overflow_of_alexnet_s_classifier(explained):
    plant = functools.partial(set_weight, name="classifier.6.weight", value=6e4)
    found = explained(
        "model=alexnet",
        "data=synthetic_images",
        "data.image_size=64",
        "data.batch_size=2",
        "data.train_size=8",
        "data.eval_size=2",
        "model.dropout=0",
        "precision=fp16_naive",
        *SGD,
        plant=plant,
        steps=2,
    )
    assert culprit(found)[:2] == ("forward", "classifier.6")


def test_models_are_planted_through_the_builder(monkeypatch):
    replace_in_lm(monkeypatch, Residual)
    assert isinstance(
        models.LSTMLanguageModel(
            vocab_size=8, embedding_size=16, hidden_size=4, num_layers=1
        ).dropout,
        Residual,
    )
