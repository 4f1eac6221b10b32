"""What FP8 would flush, told from histograms, beside what its casts do flush."""

import math

import pytest
import torch
from torch import nn

from mprun.cli import main
from mprun.config.compose import compose_config
from mprun.extensions.diagnosis.advice_report import as_text
from mprun.extensions.diagnosis.fp8 import (
    E4M3,
    E5M2,
    FLUSHED_THRESHOLD,
    OPERANDS,
    _overrides,
    fp8_advice,
)
from mprun.extensions.diagnosis.shapes import Layout, layout
from mprun.models.gpt import GPT
from mprun.numerics.exponent_counter import exponent_counts
from mprun.numerics.exponent_shares import ExponentCounts
from mprun.numerics.probe import Probe, chosen_modules
from mprun.numerics.probe_record import LearnerProbe, ProbeRecord, TensorStats
from mprun.precision.block_formats import ELEMENTS
from mprun.precision.scaled_linear import chosen_layers
from mprun.precision.scaled_products import ScaledProducts, cast

from ...helpers import TINY_GPT
from ...numerics.small_runs import as_json
from .test_advise import advice_from

LAYER = ("model", "linear")
ONE = Layout({"model": ("linear",)}, frozenset(), frozenset({LAYER}), (LAYER,))


def counts_of(tensor) -> ExponentCounts:
    return ExponentCounts(exponent_counts([tensor])[0].numpy())


def stats(tensor) -> TensorStats:
    return TensorStats(counts_of(tensor), tensor.abs().max().item(), "fp32")


def record(step=1, scale=0.0, **tensors) -> ProbeRecord:
    found = {kind: {"linear": stats(tensor)} for kind, tensor in tensors.items()}
    learner = LearnerProbe(("loss_scale",), found)
    return ProbeRecord(step, False, {"loss_scale": scale}, {"model": learner})


def of_gradient(*tensors, scale=0.0):
    """What is told of these output gradients, one a probe, beside an input and a weight of ones."""
    one = torch.ones(4)
    records = [
        record(step, scale, inputs=one, weights=one, activation_gradients=tensor)
        for step, tensor in enumerate(tensors, start=1)
    ]
    return fp8_advice(records, ONE)


def truly(tensor, format: str, granularity: str) -> float:
    """Part of the non-zero values that the cast makes zero."""
    products = ScaledProducts(ELEMENTS[format], granularity=granularity)
    values = cast(tensor.reshape(1, -1), products.operand("input", "output")).values.float()
    nonzero = tensor.reshape(1, -1) != 0
    return ((values == 0) & nonzero).sum().item() / nonzero.sum().item()


def test_how_many_are_up_to_a_limit():
    """A power of two has a bin of its own; within a bin only the larger number counts it."""
    counts = counts_of(torch.tensor([0.0, 0.25, 0.25, -0.3, 0.4999, 0.5, 0.7, 3.0, 2.0**-149]))
    for limit, least, most in (
        (2.0**-150, 0, 0),
        (2.0**-149, 1, 1),
        (0.25, 3, 3),
        (0.2500001, 3, 4),  # 0.3 lies in its bin, 0.4999 in the last before 0.5
        (0.4998, 4, 4),
        (0.49989, 4, 5),
        (0.5, 6, 6),
        (0.6, 6, 7),
        (1e30, 8, 8),
    ):
        assert counts.up_to(limit) == (least, most), limit


def test_bounds_by_hand():
    """E4M3: the largest 448 keeps its scale 1, so 2^-10 is flushed and the next number is not."""
    above = 2.0**-10 * (1 + 2.0**-10)
    operands = {
        "inputs": torch.tensor([448.0, 2.0**-10, above, above]),
        "weights": torch.tensor([2.0**9, 1.0, 1.0, 1.0]),
        "activation_gradients": torch.tensor([57344.0, 2.0**-17, 2.0**-16, 2.0**-16]),
    }
    found = fp8_advice([record(**operands)], ONE).layers["linear"]
    assert (found["input"].least, found["input"].most) == (0.25, 0.25)
    assert found["input"].unscaled == 0.25 and found["input"].saturated == 0
    # 512 is above 448 without a scale; 448 is in one bin with all up to 511.
    assert found["weight"].saturated == 0.25 and found["weight"].most == 0
    gradient = found["output gradient"]
    assert (gradient.least, gradient.most, gradient.unscaled) == (0.25, 0.25, 0.25)


DRAW = torch.Generator().manual_seed(0)
NORMAL = torch.randn(64, 512, generator=DRAW)


@pytest.mark.parametrize("power", [0, 12, 15, 19])
@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_a_planted_outlier(name, power):
    """The cast itself lies between the two numbers told, and is what a normal distribution says."""
    tensor = NORMAL.clone()
    tensor[0, 7] = 4 * 2.0**power
    format = {"e4m3": E4M3, "e5m2": E5M2}[name]
    counts, amax = counts_of(tensor), tensor.abs().max().item()
    least, most = counts.up_to(amax * format.half / format.largest)
    assert least <= truly(tensor, name, "tensor") * counts.nonzero <= most
    # They differ by a bin.
    assert most - least <= max(counts.by_exponent().values())
    if name == "e4m3":
        below = 4 * 2.0 ** (power - 10) / 448
        expected = math.erf(below / math.sqrt(2))
        deviation = math.sqrt(expected * (1 - expected) / tensor.numel())
        assert abs(truly(tensor, name, "tensor") - expected) < 4.5 * deviation + 1e-4
        assert (most / counts.nonzero > FLUSHED_THRESHOLD) == (power > 12)


@pytest.mark.parametrize("power", [-20, -12, -4, 0])
def test_without_a_scale_it_is_exact(power):
    tensor = NORMAL * 2.0**power
    found = of_gradient(tensor).layers["linear"]["output gradient"]
    assert found.unscaled == truly(tensor, "e5m2", "none")
    # Gradients that were measured with a loss scale: those of the loss itself.
    scaled = of_gradient(tensor * 2.0**9, scale=9.0).layers["linear"]["output gradient"]
    assert scaled == found


def test_a_loss_scale_that_is_enough():
    """2^-20 needs 2^4 to be above 2^-17; 2^14 may grow by 2^1 only, to stay below 57344."""
    small = torch.tensor([2.0**-20] * 9 + [2.0**-3])
    assert of_gradient(small).loss_scale == 4
    assert of_gradient(torch.tensor([2.0**-20] * 9 + [2.0**14])).loss_scale is None
    assert of_gradient(torch.ones(4)).loss_scale == 0
    # Each probe has a scale of its own: 2^-20 beside 2^-3, and nothing but 2^-20.
    both = of_gradient(small, torch.full((10,), 2.0**-20)).layers["linear"]["output gradient"]
    assert both.most == 0 and both.unscaled == 19 / 20


def test_a_tensor_that_is_not_finite_is_lost():
    found = of_gradient(torch.tensor([1.0, 2.0, float("inf")]))
    assert found.layers["linear"]["output gradient"].least == 1 and found.excluded == ["linear"]
    assert found.overrides == []


def test_a_layer_that_was_not_probed_is_left_out():
    """Of a run that chose modules, or whose probes are older than those of inputs."""
    two = Layout(
        {"model": ("linear", "other")}, frozenset(), frozenset(), (LAYER, ("model", "other"))
    )
    one = torch.ones(4)
    whole = record(inputs=one, weights=one, activation_gradients=one)
    found = fp8_advice([whole], two)
    assert (list(found.layers), found.unmeasured) == (["linear"], ["other"])
    assert found.overrides[1:] == ["precision.products.modules=[linear]"]
    none = fp8_advice([record(weights=one, activation_gradients=one)], two)
    assert (none.layers, none.overrides) == ({}, []) and none.unmeasured == ["linear", "other"]


def test_the_shorter_of_two_ways_to_name_layers():
    mode = "precision=fp8_tensorwise"
    assert _overrides(["a", "b"], []) == [mode]
    assert _overrides(["a", "b"], ["c"]) == [mode, "precision.overrides.c=fp32"]
    assert _overrides(["a"], ["b", "c"]) == [mode, "precision.products.modules=[a]"]
    assert _overrides([], ["a"]) == []


def test_the_tensors_of_a_gpt_step(build_run):
    """Every operand of every layer, cast by the mode's own cast."""
    built, twin = (build_run(*TINY_GPT) for _ in range(2))
    with Probe(built.task, chosen_modules(built.task.learners, [])) as probe:
        metrics = built.task.train_step(0)
    learners, _ = probe.read([metrics["loss"]])
    found = fp8_advice([ProbeRecord(1, False, {"loss_scale": 0.0}, learners)], layout(built.task))
    model = twin.task.learner.model
    names = chosen_layers(model, ScaledProducts(), {})
    assert list(found.layers) == names and len(names) == 4 and not found.unmeasured
    held = {}
    for name in names:
        module = model.get_submodule(name)

        def keep(module, inputs, output, name=name):
            held[name] = {"input": inputs[0].detach(), "weight": module.weight.detach().clone()}
            output.register_hook(lambda g: held[name].update({"output gradient": g.clone()}))

        module.register_forward_hook(keep)
    twin.task.train_step(0)
    for name in names:
        assert learners["model"].tensors["inputs"][name].counts == counts_of(held[name]["input"])
        for operand, (_, format) in OPERANDS.items():
            tensor, told = held[name][operand], found.layers[name][operand]
            assert told.least <= truly(tensor, format.name, "tensor") <= told.most
            assert told.unscaled == truly(tensor, format.name, "none")
            assert (told.saturated > 0) == bool((tensor.abs() > format.largest).any())
    # Small gradients are what a scale is for (the paper's question, a format later).
    assert found.worst("output gradient", "unscaled")[1] > 0.2
    assert found.worst("output gradient", "most")[1] < 0.01 and not found.excluded


def test_a_layer_with_an_outlier_is_left_out(tmp_path, capsys, monkeypatch, build_run):
    """One channel of a norm 2^19 as large, its column 2^-19: FP32 computes the same."""
    original = GPT.__init__

    def planted(self, *arguments, **named):
        original(self, *arguments, **named)
        with torch.no_grad():
            block = self.blocks[0]
            block.mlp_norm.weight[3] *= 2.0**19
            block.mlp.inputs.weight[:, 3] *= 2.0**-19

    monkeypatch.setattr(GPT, "__init__", planted)
    run = [*TINY_GPT, "optim=sgd_plain", "optim.lr=1e-12", "train.steps=4"]
    found = as_json(capsys, "advise", *run, f"output_dir='{tmp_path / 'advise'}'")["fp8"]
    assert found["excluded"] == ["blocks.0.mlp.inputs"] and found["unmeasured"] == []
    # Both: the input by its outlier, the weight by the column that takes it back, all but zero.
    assert found["layers"]["blocks.0.mlp.inputs"]["input"]["least"] > 0.9
    mode = ["precision=fp8_tensorwise", "precision.overrides.blocks.0.mlp.inputs=fp32"]
    assert found["overrides"] == mode and found["command"].endswith(" ".join(mode))
    model = build_run(*TINY_GPT, *mode).task.learner.model
    taken = {n for n, m in model.named_modules() if getattr(m.forward.inside, "args", None)}
    linears = {name for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    assert taken >= linears - {"blocks.0.mlp.inputs"}
    # The other way to say it is one, too.
    listed = f"precision.products.modules=[{','.join(sorted(taken - {'blocks.0.mlp.inputs'}))}]"
    compose_config([*TINY_GPT, "precision=fp8_tensorwise", listed])


# fp8_unscaled and bf16_kahan by default.
NARROW = ("fp8_unscaled", "fp8_tensorwise", "fp8_rowwise", "bf16_stochastic", "bf16_kahan")


@pytest.mark.parametrize("mode", NARROW)
@pytest.mark.few(2)
def test_the_runs_of_narrow_modes_can_be_advised_on(tmp_path, capsys, mode):
    """With probes and shadow steps; the words fit the mode."""
    run = [*TINY_GPT, f"precision={mode}", "numerics=on", "numerics.every=2", "train.steps=4"]
    path = tmp_path / "run"
    assert main([*run, "numerics.shadow_every=2", f"output_dir='{path}'"]) == 0
    err = capsys.readouterr().err
    formats = "E4M3" if mode == "fp8_rowwise" else "E4M3/E5M2"
    assert (f"those in {formats} emulated" in err) == mode.startswith("fp8")
    assert main(["advise", str(path)]) == 0
    text = capsys.readouterr().out
    assert (f"multiplied in {formats}:" in text) == mode.startswith("fp8")
    told = "cannot be told from this run" in text
    assert told == mode.startswith("bf16") == ("of their wanted updates" in text)
    if told:
        assert "would lose" not in text and "zero in FP32 too" not in text
    assert "tensor-wise scales suit 4 of 4 linear layers" in text
    assert any(line.endswith("precision=fp8_tensorwise") for line in text.splitlines())


def test_a_model_without_such_layers_says_so():
    lines = as_text(advice_from(record(weights=torch.ones(2), activations=torch.ones(2))))
    [line] = [line for line in lines if line.startswith("5 ")]
    assert line == "5 FP8 products of linear layers, without that of the output: there is none"
    assert "or with FP8 products" not in lines
    assert lines[0] == "FP16 needs perhaps master weights and perhaps a loss scale"
