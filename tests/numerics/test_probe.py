"""Probes see what a step computes, and change nothing of it."""

import math
import shutil
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from mprun.cli import main
from mprun.comparison.grouping import is_no_key
from mprun.config.compose import compose_config
from mprun.errors import BadInput
from mprun.numerics.exponent_counter import exponent_counts, lost_updates, read_counts
from mprun.numerics.exponent_shares import ExponentCounts
from mprun.numerics.probe import Probe, chosen_modules, owner
from mprun.numerics.probe_record import KINDS, read_probes
from mprun.record.run_record import read_record

from ..helpers import assert_same_bits, but, numbers_of, refused, run, without_waiting
from .small_runs import SMALL, classification, probed, watched_steps

CASES = {
    f"{model}-{mode}": [*SMALL[model], f"precision={mode}"]
    for model in sorted(SMALL, key="lstm_lm".__ne__)  # the quickest first
    for mode in ("fp32", "fp16_master_scaled", "amp")
}
# Whose updates are measured.
IN_BF16 = ("bf16_stochastic", "bf16_naive", "bf16_kahan")
CASES |= {mode: [*SMALL["lstm_lm"], "optim=adam", f"precision={mode}"] for mode in IN_BF16}


def counted(*tensors) -> ExponentCounts:
    return ExponentCounts(exponent_counts(tensors).sum(0).numpy())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.few(1)
def test_a_probed_and_shadowed_run_is_bit_equal_to_one_without(build_run, tmp_path, case):
    """Losses, gradient norms, scales, weights, masters, optimizer state, statistics, random state.

    Dropout and the GAN's codes make the random state count; the clipped run covers clipping.
    """
    runs, steps = [], 4
    for every in (0, 2):
        built = build_run(*CASES[case])
        losses = watched_steps(built, tmp_path, steps, every, shadow_every=every)
        state = built.task.state_dict()
        runs.append((losses, state, torch.get_rng_state(), built.forward_context.rerouted()))
    assert_same_bits(*runs)
    records = read_probes(tmp_path)
    assert [record.step for record in records] == list(range(2, steps + 1, 2))
    if case in IN_BF16:
        assert records[1].learners["model"].total_applied().wanted > 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fp32", "fp16_naive", "fp16_master_scaled", "bf16_naive", "amp"])
def test_what_is_counted_is_what_the_step_computed(build_run, mode):
    """Against tensors kept by hand: outputs by retain_grad, weights and gradients by copies."""
    words = [*SMALL["conv_autoencoder"], f"precision={mode}", "train.accumulate=1"]
    built, twin = build_run(*words), build_run(*words)
    own = probed(built.task)["model"]

    named, outputs, gradients = twin.task.learner.named, {}, {}
    chosen = chosen_modules(twin.task.learners, [])["model"]
    for name, module in chosen.items():

        def keep(module, inputs, output, name=name):
            output.retain_grad()
            outputs[name] = (output, output.detach().clone())
            for kind, computed in module.named_parameters(recurse=False):
                hook = partial(gradients.__setitem__, f"{name}.{kind}")
                hook.sees_inside = True
                computed.register_hook(hook)

        keep.sees_inside = True  # what the mode computes with, not what it hands out
        module.register_forward_hook(keep)
    before = {name: own.detach().clone() for name, own in named.items()}
    twin.task.train_step(0)
    after = {name: own.detach().clone() for name, own in named.items()}

    assert own.tensors.keys() == set(KINDS)
    for name, (output, value) in outputs.items():
        stats = own.tensors["activations"][name]
        assert stats.counts == counted(value)
        assert stats.amax == value.float().abs().max().item()
        assert stats.dtype == DTYPES[value.dtype]
        assert own.tensors["activation_gradients"][name].counts == counted(output.grad)
    owners = {name: owner(name, chosen) for name in before}
    assert set(owners.values()) == own.tensors["weights"].keys() == own.lost_updates.keys()
    for module in own.tensors["weights"]:
        mine = [name for name in before if owners[name] == module]
        assert len(mine) == 2  # weight and bias
        updates = [after[name].float() - before[name].float() for name in mine]
        for kind, tensors in (
            ("weights", [before[name] for name in mine]),
            ("weight_gradients", [gradients[name] for name in mine]),
            ("updates", updates),
        ):
            assert own.tensors[kind][module].counts == counted(*tensors), kind
        flat = torch.cat([before[name].flatten().float() for name in mine])
        expected = lost_updates([flat], [torch.cat([u.flatten() for u in updates])])[0]
        assert own.lost_updates[module] == read_counts(expected.tolist())
    total = own.total("weights").counts
    assert total == counted(*before.values())
    assert own.total_lost().total == total.total


DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


class Blobs:
    """Labelled points; the smallest data source that a classification task takes."""

    samples_per_batch, batches_per_epoch = 6, 10

    def train_batch(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(6, 5, generator=generator), torch.arange(6) % 3


class Residual(nn.Sequential):
    """Linear, ReLU used twice, and a sum in place or not, as in a residual block."""

    def forward(self, x):
        first, relu, second, last = self
        hidden = relu(first(x))
        out = second(hidden)
        return last(relu(out.add_(hidden) if relu.inplace else out + hidden))


def classifier(inplace):
    torch.manual_seed(0)
    layers = nn.Linear(5, 8), nn.ReLU(inplace), nn.Linear(8, 8), nn.Linear(8, 3)
    return classification(Residual(*layers), Blobs())


def test_operations_in_place_hide_nothing():
    """The same counts as with operations that leave their inputs alone: before, not after them."""
    plain, inplace = (probed(classifier(inplace))["model"] for inplace in (False, True))
    rows = inplace.operations.items()
    assert plain.operations == {
        place._replace(operation=place.operation.rstrip("_")): own for place, own in rows
    }
    assert replace(plain, operations={}) == replace(inplace, operations={})
    # ReLU ran twice: 2 * 6 * 8 values. What goes into it has negative values, so it is smaller.
    assert plain.tensors["activations"]["1"].counts.total == 96
    assert plain.tensors["activations"]["1"].counts.zeros > 0
    assert plain.tensors["activations"]["0"].counts.zeros == 0


def test_of_a_large_weight_a_part_is_counted(build_run):
    """512 x 2080 = 1,064,960 values: every 7th, because 5 divides 2080."""
    overrides = [*SMALL["lstm_lm"], "model.hidden_size=512", "data.vocab_size=2080"]
    own = probed(build_run(*overrides).task)["model"]
    twin = build_run(*overrides).task  # seeded anew
    output = twin.learner.model.output
    before = output.weight.detach().flatten()[::7].clone(), output.bias.detach().clone()
    twin.train_step(0)
    weights = own.tensors["weights"]["output"]
    assert weights.stride == own.tensors["weight_gradients"]["output"].stride == 7
    expected = exponent_counts(before[:1])[0] * 7 + exponent_counts(before[1:])[0]
    assert weights.counts == ExponentCounts(expected.numpy())
    after = output.weight.detach().flatten()[::7], output.bias.detach()
    expected = [
        lost_updates([old], [new - old])[0] * weight
        for old, new, weight in zip(before, after, (7, 1), strict=True)
    ]
    assert own.lost_updates["output"] == read_counts(sum(expected).tolist())
    assert own.lost_updates["output"].total == own.tensors["updates"]["output"].counts.total
    assert own.tensors["weights"]["embedding"].stride == 1


def test_accumulated_micro_batches_are_merged(build_run):
    one = probed(build_run(*SMALL["conv_autoencoder"], "train.accumulate=1").task)["model"]
    three = probed(build_run(*SMALL["conv_autoencoder"], "train.accumulate=3").task)["model"]
    kinds = [kind for kind in KINDS if kind != "inputs"]  # it has no linear layer
    for kind, times in zip(kinds, (1, 3, 3, 3, 1), strict=True):
        assert three.total(kind).counts.total == times * one.total(kind).counts.total, kind


def test_every_call_of_a_gans_networks_counts(build_run):
    """D sees real, fake and, for G's loss, fake again, without weight gradients; G runs once."""
    built = build_run(*SMALL["dcgan"])
    learners = probed(built.task)
    generator, discriminator = learners["generator"], learners["discriminator"]
    first = "layers.conv0"
    assert discriminator.tensors["activations"][first].counts.total == 3 * 4 * 8 * 16 * 16
    assert discriminator.tensors["activation_gradients"][first].counts.total == 3 * 4 * 8 * 16 * 16
    assert discriminator.tensors["weight_gradients"][first].counts.total == 2 * 8 * 3 * 4 * 4
    assert discriminator.tensors["weights"][first].counts.total == 8 * 3 * 4 * 4
    for kind in KINDS:
        chosen = chosen_modules(built.task.learners, [])["generator"]
        assert generator.tensors[kind].keys() <= chosen.keys()
    images = generator.tensors["activations"]["layers.tanh"].counts
    assert images.total == generator.tensors["activation_gradients"]["layers.tanh"].counts.total
    assert images.total == 4 * 3 * 32 * 32
    # Losses are of D's outputs, whoever learns from them.
    phases = [{place.phase for place in own.operations} for own in (discriminator, generator)]
    assert "loss" in phases[0] and "loss" not in phases[1]


def test_an_lstm_counts_outputs_and_states(build_run):
    own = probed(build_run(*SMALL["lstm_lm"]).task)["model"]
    # outputs [5, 4, 16], h and c [2, 4, 16]; only the outputs have gradients
    assert own.tensors["activations"]["lstm"].counts.total == 5 * 4 * 16 + 2 * 2 * 4 * 16
    assert own.tensors["activation_gradients"]["lstm"].counts.total == 5 * 4 * 16
    assert own.tensors["weights"]["lstm"].counts.total == sum(
        4 * 16 * (inputs + 16 + 2) for inputs in (12, 16)
    )


def test_a_larger_loss_scale_shifts_gradients_and_nothing_else(build_run):
    """FP32 multiplies by 2^10 exactly."""
    words = [*SMALL["conv_autoencoder"], "scaler=static"]
    runs = [probed(build_run(*words, f"scaler.scale={2**k}").task)["model"] for k in (3, 13)]
    for kind in (kind for kind in KINDS if kind != "inputs"):  # it has no linear layer
        low, high = (run.total(kind).counts.by_exponent() for run in runs)
        shift = 10 if kind in ("activation_gradients", "weight_gradients") else 0
        assert high == {exponent + shift: count for exponent, count in low.items()}, kind


def test_a_skipped_step_says_so(build_run, tmp_path):
    overrides = [*SMALL["conv_autoencoder"], "precision=fp16_master_scaled", "scaler=static"]
    watched_steps(build_run(*overrides, "scaler.scale=536870912"), tmp_path, 1, every=1)
    [record] = read_probes(tmp_path)
    assert record.skipped and record.log2_loss_scale == {"loss_scale": 29.0}
    own = record.learners["model"]
    assert own.loss_scales == ("loss_scale",)
    assert own.total("weight_gradients").counts.inf > 0
    assert not math.isfinite(own.total("weight_gradients").amax)
    assert own.total_lost().zero == own.total_lost().total
    assert own.shadow is None and record.loss is None


def test_no_hook_is_left_and_none_exists_between_probes(build_run, tmp_path):
    built = build_run(*SMALL["dcgan"])

    def hooks():
        models = [learner.model for learner in built.task.learners.values()]
        inner = [learner.optimizer for learner in built.task.learners.values()]
        return (
            [module for model in models for module in model.modules() if module._forward_hooks]
            + [p for model in models for p in model.parameters() if p._backward_hooks]
            + [optimizer for optimizer in inner if optimizer._optimizer_step_pre_hooks]
        )

    seen = []
    handle = built.task.g.model.register_forward_pre_hook(lambda *_: seen.append(len(hooks())))
    watched_steps(built, tmp_path, 4, every=3, shadow_every=3)
    handle.remove()
    # The shadow's copy of the model calls the hook of this test once more.
    assert seen[:2] == [0, 0] and seen[2] > 0 and seen[3:] == [0, 0]
    assert hooks() == []


def test_hooks_go_when_a_step_fails(build_run):
    task = build_run(*SMALL["conv_autoencoder"]).task
    chosen = chosen_modules(task.learners, [])
    with pytest.raises(ValueError, match="index|negative"), Probe(task, chosen):
        task.train_step(-1)
    assert not any(module._forward_hooks for module in task.learner.model.modules())


def test_modules_by_pattern(build_run):
    task = build_run(*SMALL["conv_autoencoder"]).task
    chosen = chosen_modules(task.learners, ["encoder", "encoder.*conv1"])["model"]
    assert list(chosen) == ["encoder", "encoder.layers.conv1"]
    assert owner("encoder.layers.conv1.weight", chosen) == "encoder.layers.conv1"
    assert owner("encoder.layers.conv0.weight", chosen) == "encoder"
    assert owner("decoder.layers.conv0.weight", chosen) is None
    own = probed(task, patterns=["encoder"])["model"]
    parameters = task.learner.model.encoder.parameters()
    assert own.total("weights").counts.total == sum(p.numel() for p in parameters)
    assert own.tensors["activations"]["encoder"].counts.total == 2 * 4 * 32
    default = chosen_modules(task.learners, [])["model"]
    assert default.keys() == {
        name for name, m in task.learner.model.named_modules() if not list(m.children())
    }


def test_a_pattern_that_fits_no_module_is_refused_before_anything_is_written(tmp_path, capsys):
    path = tmp_path / "run"
    arguments = [*SMALL["dcgan"], "numerics=probes", f"output_dir={path}", "device=cpu"]
    says = "numerics.modules=layers.conv9: matches no module; some"
    refused(capsys, *arguments, "numerics.modules=[layers.conv9]", says=says)
    assert not path.exists()


def test_a_pattern_may_fit_one_network_of_two(build_run):
    task = build_run(*SMALL["dcgan"]).task
    chosen = chosen_modules(task.learners, ["layers.tanh"])
    assert (list(chosen["generator"]), list(chosen["discriminator"])) == (["layers.tanh"], [])
    learners = probed(task, patterns=["layers.tanh"])
    assert learners["discriminator"].total("weights") is None
    assert learners["generator"].total("activations").counts.total == 4 * 3 * 32 * 32
    with pytest.raises(BadInput, match="layers.tan:"):
        chosen_modules(task.learners, ["layers.tan"])


TINY = ["device=cpu", "threads=1", *SMALL["lstm_lm"], "precision=amp", "train.steps=6"]


@pytest.mark.slow
def test_a_whole_run_with_probes_has_the_same_records(tmp_path):
    plain, probed_run = tmp_path / "plain", tmp_path / "probed"
    assert run(plain, *TINY) == 0
    every = ["numerics=probes", "numerics.every=2", "numerics.shadow_every=3"]
    assert run(probed_run, *TINY, *every) == 0
    assert numbers_of(plain) == numbers_of(probed_run)
    assert not (plain / "numerics").exists()
    records = read_probes(probed_run)
    assert [record.step for record in records] == [2, 3, 4, 6]
    assert [bool(r.learners["model"].tensors) for r in records] == [True, False, True, True]
    assert [r.learners["model"].shadow is not None for r in records] == [False, True, False, True]


def test_tensorboard_shows_histograms_and_scalars(build_run, tmp_path):
    watched_steps(build_run(*SMALL["lstm_lm"]), tmp_path, 2, every=2, shadow_every=2)
    [record] = read_probes(tmp_path)
    own = record.learners["model"]
    events = EventAccumulator(str(tmp_path)).Reload()
    tags = events.Tags()
    assert set(tags["histograms"]) == {f"train_probes_exponents/{kind}" for kind in KINDS}
    [event] = events.Histograms("train_probes_exponents/weights")
    by_exponent = own.total("weights").counts.by_exponent()
    assert event.step == 2 and event.histogram_value.num == sum(by_exponent.values())
    found = dict(zip(event.histogram_value.bucket_limit, event.histogram_value.bucket, strict=True))
    assert {limit - 1: n for limit, n in found.items() if n} == by_exponent
    shown, half = event.histogram_value, {low + 0.5: n for low, n in by_exponent.items()}
    assert (shown.min, shown.max) == (min(by_exponent), max(by_exponent) + 1)
    assert shown.sum == sum(low * n for low, n in half.items())
    assert shown.sum_squares == sum(low**2 * n for low, n in half.items())

    def scalar(tag):
        [value] = events.Scalars(f"train_probes_{tag}")
        return np.float32(value.value)

    lost = own.lost_updates["lstm"]
    assert scalar("lost_updates_bf16/lstm") == np.float32(lost.share("bf16"))
    weights = own.tensors["weights"]["lstm"]
    assert scalar("weights_log2_amax/lstm") == np.float32(math.log2(weights.amax))
    assert scalar("weights_headroom/total") == own.total("weights").counts.headroom
    shares = own.total("updates").counts.shares()
    assert scalar("updates_underflow/total") == np.float32(shares.underflow)
    assert scalar("shadow_cosine/total") == np.float32(own.total_agreement().cosine)
    # TensorBoard sorts sections by their first tag, with "_" like "/": the loss comes first, and is
    # open. A GAN has two, "train/d_loss" and "train/g_loss".
    first = min(tag.replace("_", "/") for kind in ("histograms", "scalars") for tag in tags[kind])
    assert first > "train/loss"


def test_numerics_belongs_to_no_comparison():
    assert all(is_no_key(f"numerics.{key}") for key in ("probes", "every", "modules"))


def test_a_shadow_needs_numerics_on():
    with pytest.raises(BadInput, match="numerics.shadow_every=5: needs numerics=probes"):
        compose_config(["numerics.shadow_every=5"])
    config = compose_config(["numerics=probes", "numerics.shadow_every=5"]).config
    assert config.numerics.every == 100


@pytest.mark.slow
def test_a_resumed_run_writes_its_later_probes_again(tmp_path):
    path = tmp_path / "run"
    every = ["numerics=probes", "numerics.every=1", "train.checkpoint_every=2", "train.steps=3"]
    assert run(path, *but(TINY, *every)) == 0
    files = sorted((path / "numerics").iterdir())
    contents = [file.read_text() for file in files]
    read_record(path).reopen()  # as a kill leaves it, without a seal
    shutil.rmtree(path / "checkpoints" / "step-00000003")
    files[2].write_text("of an attempt that is taken back")
    files[2].with_name("step-00000009.json").write_text("of the same")
    assert main([f"resume={path}"]) == 0  # from step 2
    assert sorted((path / "numerics").iterdir()) == files
    assert [file.read_text() for file in files] == contents


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["fp32", "fp16_master_scaled", "amp"])
@pytest.mark.parametrize("model", ["resnet50", "lstm_lm", "dcgan", "conv_autoencoder"])
def test_on_a_gpu_a_probe_waits_only_when_it_is_read(build_run, model, mode):
    task = build_run(*SMALL[model], f"precision={mode}", device="cuda").task
    chosen = chosen_modules(task.learners, [])
    task.train_step(0)
    with Probe(task, chosen):
        task.train_step(1)
    with without_waiting(), Probe(task, chosen) as probe:
        metrics = task.train_step(2)
    learners, _ = probe.read([metrics["loss"]])
    for own in learners.values():
        assert own.total("weights").counts.total == own.total_lost().total > 0
