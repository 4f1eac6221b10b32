"""Overrides mean modules: a pattern that matches a container means what is in it."""

import pytest
import torch
from torch import nn

from mprun.precision import get_policy
from mprun.precision.module_dtypes import chosen_dtypes, computes

from ..helpers import mixed, raises_line
from .containers import KINDS, Bypassed, Layer, Net, Recomputed, Scaled, Shared, in_turn, seen_in

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
MODES = ["bf16_master", "fp16_naive", "bf16_stochastic", "amp", "fp32"]


def trained(model, mode, overrides):
    """Return the learner of the model in the mode, and its outputs, after a backward pass."""
    learner = mixed(model, mode, overrides=overrides)
    outputs = learner.network(torch.randn(3, 4))
    outputs.sum().backward()
    assert all(own.grad.isfinite().all() for own in model.parameters() if own.grad is not None)
    return learner, outputs


def is_half(outputs, half):
    """Return whether FP32 outputs contain only numbers of that format."""
    return torch.equal(outputs, outputs.to(half).float())


@pytest.mark.parametrize("pattern", ["parts", "parts*", "*"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.few(8)
def test_a_container_means_what_is_in_it(kind, mode, pattern):
    half, model = get_policy(mode).half_dtype or F32, KINDS[kind]()
    other = BF16 if mode == "fp32" else F32
    _, outputs = trained(model, mode, {pattern: other})
    found, autocasts = seen_in(model), mode == "amp"
    assert len(found) >= 3
    for name, seen in found.items():
        is_inside = pattern == "*" or name.startswith("parts")
        # Under autocast a layer takes any dtype, and casts itself.
        expected = {other} if is_inside else {half, F32} if autocasts else {half}
        assert {seen} <= expected, name
    if not autocasts:
        assert is_half(outputs, half)


@pytest.mark.parametrize("mode", ["bf16_master", "amp"])
def test_a_container_is_its_layers_one_by_one(mode):
    """Bit for bit where others call these: each has a border of its own."""
    found = []
    for overrides in ({"parts": F32}, {"parts.0": F32, "parts.1": F32}):
        torch.manual_seed(0)
        found.append(trained(Net(nn.ModuleList([Layer(), Layer()]), in_turn), mode, overrides)[1])
    assert torch.equal(*found)


@pytest.mark.parametrize("pattern", ["encoder.layers", "decoder.layers", "encoder", "decoder"])
@pytest.mark.parametrize("mode", ["bf16_master", "fp16_naive"])
def test_what_two_parents_share_has_both_names(mode, pattern):
    model, half = Shared(), get_policy(mode).param_dtype
    _, outputs = trained(model, mode, {pattern: F32})
    inside = {"encoder.layers.0", "encoder.layers.1"}
    inside |= set() if pattern.endswith(".layers") else {f"{pattern}.own"}
    assert {name for name, seen in seen_in(model).items() if seen is F32} == inside
    assert is_half(outputs, half)


def test_the_last_pattern_counts_of_all_names_of_a_module():
    overrides = {"encoder.layers": F32, "decoder": BF16}
    chosen = chosen_dtypes(Shared(), overrides, "precision.overrides")
    found = {name: own.dtype for name, own in chosen.items() if name.endswith("layers.0")}
    assert found == {"encoder.layers.0": BF16}
    named = {"decoder.layers.0": F32, "encoder": BF16}  # one that matches goes before one around
    assert chosen_dtypes(Shared(), named, "")["encoder.layers.0"].dtype is F32


@pytest.mark.parametrize("mode", ["bf16_master", "fp16_naive"])
@pytest.mark.parametrize("where", ["parts.0", "*", "parts.0.layer"])
def test_parameters_in_containers_follow_the_module_that_computes_with_them(mode, where):
    model = Net(nn.ModuleList([Scaled()]), in_turn)
    learner, _ = trained(model, mode, {where: F32})
    block = model.parts[0]
    computed = {id(own): dtype for own, dtype in learner.steps.computed()}
    expected = get_policy(mode).param_dtype if where == "parts.0.layer" else F32
    assert {computed[id(own)] for own in (block.gains[1], block.shifts["a"])} == {expected}


@pytest.mark.parametrize(
    ("make", "pattern", "says"),
    [
        (lambda: Net(nn.ModuleList([Scaled()]), in_turn), "parts.0.gains", "override parts.0"),
        (
            lambda: Net(nn.ModuleList(), in_turn),
            "parts",
            "a ModuleList whose forward is never called",
        ),
        (lambda: nn.MultiheadAttention(4, 2), "out_proj", "the model itself computes with"),
    ],
)
def test_a_pattern_of_nothing_that_is_called_is_refused(make, pattern, says):
    with raises_line(ValueError, f"overrides: '{pattern}' matches {pattern}", says):
        mixed(make(), "bf16_master", overrides={pattern: F32})


def test_attention_of_torch_computes_in_its_override_with_its_output_layer():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.attention = Layer(), nn.MultiheadAttention(4, 2)

        def forward(self, x):
            x = self.first(x)
            return self.attention(x, x, x)[0]

    _, outputs = trained(Attention(), "bf16_master", {"*": F32})
    assert is_half(outputs, BF16)


@pytest.mark.parametrize("mode", ["bf16_master", "amp"])
@pytest.mark.parametrize("kind", [nn.Sequential, nn.ModuleList])
def test_a_layer_is_computed_anew_as_it_was(mode, kind):
    """Inside of a block that a checkpoint computes without what called it."""
    found = []
    for block in (Bypassed, Recomputed):
        torch.manual_seed(0)
        order = in_turn if kind is nn.ModuleList else (lambda own, x: own(x))
        parts = [block(), Layer()]
        model = Net(kind(*parts) if kind is nn.Sequential else kind(parts), order)
        trained(model, mode, {"parts": F32})
        found.append([own.grad for own in model.parameters()])
    assert all(map(torch.equal, *found))


class Between(nn.Module):
    """Layers, and between them products with a parameter that FP16 cannot hold."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = Layer(), nn.LayerNorm(4), Layer()
        self.gain = nn.Parameter(torch.full((4,), 3e5))

    def forward(self, x):
        self.given = self.first(x)
        self.scaled = self.norm(self.given) * self.gain
        return self.last(torch.tanh(self.scaled * 1e-5)) * (self.gain * 1e-4)


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.end = Between(), Layer()

    def forward(self, x):
        return self.end(self.inner(x) * 1e-2)


@pytest.mark.parametrize("mode", ["fp16_master", "fp16_naive", "amp", "bf16_stochastic"])
@pytest.mark.parametrize("patterns", [["forward"], ["forward", "inner.forward"], ["i*r.forward"]])
def test_a_forward_is_overridden_without_the_modules_that_it_calls(patterns, mode):
    """The products with 3e5 are FP32's, those of the layers in the mode."""
    half, model = get_policy(mode).half_dtype, Between() if patterns == ["forward"] else Outer()
    inner = getattr(model, "inner", model)
    _, outputs = trained(model, mode, dict.fromkeys(patterns, F32))
    assert inner.scaled.dtype is F32 and inner.scaled.abs().max() > 65504
    assert is_half(inner.given, half)
    assert is_half(outputs, half) == (inner is not model)  # its own is not rounded, either
    if mode != "amp":
        assert {own.seen for own in model.modules() if isinstance(own, Layer)} == {half}


@pytest.mark.parametrize("mode", ["fp16_master", "amp"])
def test_the_modules_inside_keep_their_own_override(mode):
    model = Between()
    trained(model, mode, {"last": BF16, "*": F32, "forward": F32})
    whole = {name: own.seen for name, own in model.named_modules() if isinstance(own, Layer)}
    assert whole == {"first": F32, "last": F32}
    chosen = chosen_dtypes(Outer(), {"inner": BF16, "inner.forward": F32}, "")
    assert chosen["inner"] == (F32, True, True)
    assert chosen["inner.first"] == (BF16, False, False)
    assert not {"", "end"} & chosen.keys()


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("parts.forward", "a ModuleList whose forward is never called"),
        ("part.forward", "no module"),
    ],
)
def test_a_forward_of_nothing_is_refused(pattern, says):
    model = Net(nn.ModuleList([Layer()]), in_turn)
    with raises_line(ValueError, f"'{pattern}'", says):
        mixed(model, "bf16_master", overrides={pattern: F32})
    with raises_line(ValueError, "'forward'", "the model is a ModuleList"):
        mixed(nn.ModuleList([Layer()]), "bf16_master", overrides={"forward": F32})
    model.part = nn.Module()
    assert not computes(model.part)
    model.part.forward = model.parts[0].forward  # of its own, which its class lacks
    assert computes(model.part)
