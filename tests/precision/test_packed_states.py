"""Optimizer state in 8 bits: its codes, scales and updates against torchao's and by hand.

Counts, of numbers that differ from torchao: 0 of tables, codes, scales, state and weights.
"""

from bisect import bisect_left
from fractions import Fraction as Q

import pytest
import torch
from torch import nn

from mprun.precision import StaticLossScale, build_policy
from mprun.precision.packed_states import BLOCK, STATE_FORMATS, StateFormats, dynamic_numbers
from mprun.precision.rounded_weights import translated

from ..helpers import assert_same_bits, making, mixed, one_step

CPU = torch.device("cpu")
FORMATS = ("dynamic8", "fp8")
NAMES = {"exp_avg": True, "exp_avg_sq": False}  # with a sign or without


def mode(state_dtype, **more):
    return build_policy("own", {"update": {"state_dtype": state_dtype}} | more)


def published(signed):
    """The table of arXiv 2110.02861 in exact numbers."""
    found = [Q(0), Q(1)]
    for i in range(7):
        n = 2**i if signed else 2 ** (i + 1)
        middles = [(Q(1, 10) + Q(9, 10) * Q(2 * k + 1, 2 * n)) * Q(10) ** (i - 6) for k in range(n)]
        found += middles + ([-middle for middle in middles] if signed else [])
    return sorted(found)


@pytest.mark.parametrize("signed", [True, False])
def test_the_table_is_the_published_one(signed):
    exact, found = published(signed), dynamic_numbers(signed).tolist()
    assert len(exact) == len(found) == 256
    # Two edges, their sum and the power of ten are rounded: 2^-24 of at most 1 each.
    for number, own in zip(exact, found, strict=True):
        assert abs(Q(own) - number) <= 4 * Q(2) ** -24 * abs(number)


@pytest.mark.parametrize("name", NAMES)
def test_a_code_is_the_nearest_number_half_up(name):
    table = torch.from_numpy(dynamic_numbers(NAMES[name]))
    numbers = [Q(number) for number in table.tolist()]
    middles = (table[1:].double() + table[:-1].double()) / 2
    drawn = torch.rand(2000, generator=torch.Generator().manual_seed(0)) ** 6
    tried = torch.cat([table, middles.float(), drawn, -drawn, drawn * 1e-6, torch.ones(1)])
    tried = tried[: len(tried) // BLOCK * BLOCK].clamp(min=table[0].item())
    tried[::BLOCK] = 1.0  # the scale of each block
    kept = STATE_FORMATS["dynamic8"](CPU).encode(name, tried)
    assert (kept[name + ".scale"] == 1).all()
    for number, code in zip(tried.tolist(), kept[name].tolist(), strict=True):
        place = min(bisect_left(numbers, Q(number)), 255)
        below, above = numbers[max(place - 1, 0)], numbers[place]
        distances = (Q(number) - below, above - Q(number))
        # Differences are rounded to FP32: a tie within 2^-24 of it may go either way.
        is_tie = abs(distances[0] - distances[1]) <= Q(2) ** -23 * (above - below)
        nearest = place if distances[1] <= distances[0] else max(place - 1, 0)
        assert code == nearest or (is_tie and code in (place, place - 1))


def tensors(unsigned):
    """Several sizes, some of which have no blocks, and tails that leave few codes to most."""
    draw = torch.Generator().manual_seed(1)
    for shape in ((64, 64), (16, 3, 16, 16), (4096,), (100, 256), (63, 64), (4097,), (17, 256)):
        normal = torch.randn(shape, generator=draw)
        tails = normal * torch.exp(4 * torch.randn(shape, generator=draw))
        holes = normal * (torch.rand(shape, generator=draw) < 0.01)
        for own in (normal, tails, holes, torch.zeros(shape), 1e-20 * normal):
            yield own.square() if unsigned else own


@pytest.mark.slow  # it imports torchao
@pytest.mark.parametrize("form", FORMATS)
def test_codes_and_scales_are_torchaos(form):
    optim = pytest.importorskip("torchao.optim.subclass_8bit", reason="torchao is not installed")
    quantised = pytest.importorskip("torchao.optim.subclass_fp8")
    packing, compared, packed = STATE_FORMATS[form](CPU), 0, 0
    for name, signed in NAMES.items():
        for wide in tensors(unsigned=not signed):
            kept = packing.encode(name, wide)
            decoded = packing.decode(name, kept)
            if wide.numel() < 4096 or wide.numel() % 256:  # as in _AdamBase._new_buffer
                assert decoded is wide
                continue
            if form == "dynamic8":
                theirs = optim.OptimState8bit.zeros(wide.shape, signed)
            else:
                theirs = quantised.OptimStateFp8.zeros(wide.shape)
            theirs.copy_(wide)
            assert torch.equal(kept[name], theirs.codes.view(torch.uint8))
            assert torch.equal(kept[name + ".scale"], theirs.scale)
            assert torch.equal(decoded, theirs.dequantize())
            compared, packed = compared + wide.numel(), packed + 1
    assert (packed, compared) == (50, 504_320)


@pytest.mark.parametrize("form", FORMATS)
def test_a_tensor_of_at_least_16_whole_blocks_has_some(form):
    for size in (256, 3840, 4095, 4096, 4097, 4224, 4352):
        kept = STATE_FORMATS[form](CPU).encode("exp_avg", torch.ones(size))
        assert ("exp_avg.scale" in kept) == (size in (4096, 4352)), size


class TheirRule(torch.optim.Optimizer):
    """AdamW in the arithmetic of torchao's optimizers, on FP32 tensors."""

    def step(self):
        from torchao.optim.adam import single_param_adam

        for group in self.param_groups:
            for own in group["params"]:
                if own.grad is None:  # as in torch's optimizers
                    continue
                state = self.state[own]
                if not state:
                    average = {name: torch.zeros_like(own) for name in NAMES}
                    state.update({"step": torch.tensor(0.0)} | average)
                state["step"] += 1
                average = (state["step"], state["exp_avg"], state["exp_avg_sq"], None)
                rate = torch.tensor(group["lr"])
                rest = (rate, 0.9, 0.999, 0.1, 1e-8, True, False)
                single_param_adam(own.detach(), own.grad, *average, *rest)


@pytest.mark.slow
@pytest.mark.parametrize(("form", "kind"), [("dynamic8", "AdamW8bit"), ("fp8", "AdamWFp8")])
def test_updates_are_those_of_torchaos_optimizer(form, kind):
    optim = pytest.importorskip("torchao.optim", reason="torchao is not installed")
    shapes = [(64, 64), (96, 128), (3, 256), (256,), (70, 64)]
    draw = torch.Generator().manual_seed(2)
    start = [torch.randn(shape, generator=draw) for shape in shapes]
    theirs = nn.ParameterList(own.clone() for own in start)
    reference = getattr(optim, kind)(theirs.parameters(), lr=0.01, weight_decay=0.1)
    model = nn.ParameterList(start)
    optimizer = mixed(model, mode(form), making(TheirRule, defaults={"lr": 0.01})).optimizer
    compared = different = 0
    with torch.compiler.set_stance("force_eager"):
        for _ in range(6):
            tails = [torch.exp(3 * torch.randn(shape, generator=draw)) for shape in shapes]
            gradients = [torch.randn(own.shape, generator=draw) * own for own in tails]
            optimizer.zero_grad()
            for other, gradient in zip(theirs, gradients, strict=True):
                other.grad = gradient.clone()
            for own, gradient in zip(model, gradients, strict=True):
                own.grad = gradient
            optimizer.step()
            reference.step()
            for own, other in zip(model, theirs, strict=True):
                state, kept = optimizer.state[own], reference.state[other]
                pairs = [(own, other)]
                for name in NAMES:
                    if name + ".scale" in state:
                        codes = kept[name].codes.view(torch.uint8)
                        pairs += [(state[name], codes), (state[name + ".scale"], kept[name].scale)]
                    else:
                        pairs.append((state[name], kept[name]))
                for one, two in pairs:
                    different += int((one != two).sum())
                    compared += one.numel()
    in_blocks = [own.shape for own in model if "exp_avg.scale" in optimizer.state[own]]
    assert in_blocks == [(64, 64), (96, 128)]  # 70 x 64 is no multiple of 256
    assert (different, compared) == (0, 6 * (3 * 21_888 + 2 * 64 + 768 * 0))


class Apart(nn.ModuleList):
    """Two layers beside each other, but for the layer of number `unused`."""

    def forward(self, inputs, unused=None):
        used = [layer for number, layer in enumerate(self) if number != unused]
        return torch.stack([layer(inputs).square().mean() for layer in used]).sum()


def trained(form, steps=4, rule=torch.optim.AdamW, **more):
    """A learner after some steps."""
    torch.manual_seed(0)
    model = Apart([nn.Linear(64, 64), nn.Linear(64, 80, bias=False)])
    make = making(rule, **({"lr": 0.01} | more))
    learner = mixed(model, mode(form), make, StaticLossScale(4.0), seed=3)
    advance(learner, range(steps))
    return learner


def advance(learner, steps, skip=None, unused=None):
    """Take steps: that of number `skip` is skipped, the layer `unused` has no gradient."""
    for step in steps:
        inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
        learner.zero_grad()
        (learner.network(inputs, unused) * (float("inf") if step == skip else 1.0)).backward()
        learner.step()


def state_of(learner):
    found = dict(learner.named)
    for name, state in learner.steps.state_by_name().items():
        found |= {f"{key} of {name}": torch.as_tensor(value) for key, value in state.items()}
    return {name: own.detach().clone() for name, own in found.items()}


RULES = [
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}),  # whose state appears late
    (torch.optim.RMSprop, {"foreach": True}),
    (torch.optim.Adagrad, {"initial_accumulator_value": 0.1}),
    (torch.optim.Adadelta, {}),
    (torch.optim.Adamax, {}),
    (torch.optim.NAdam, {}),
]


@pytest.mark.few(6)
@pytest.mark.parametrize(("rule", "more"), RULES)
@pytest.mark.parametrize("form", FORMATS)
def test_what_is_skipped_or_unused_stays_as_it_is(form, rule, more):
    """Encoded once more, a block whose largest number is negative would change."""
    learner = trained(form, 3, rule=rule, **more)
    state, weight = learner.optimizer.state, learner.model[0].weight
    before = state_of(learner)
    at = {key: own.data_ptr() for key, own in state[weight].items()}
    advance(learner, [3], skip=3)
    assert_same_bits(state_of(learner), before)
    advance(learner, [4], unused=0)
    after = state_of(learner)
    own = {key: value for key, value in after.items() if "0." in key}
    assert_same_bits(own, {key: before[key] for key in own})
    assert not torch.equal(after["1.weight"], before["1.weight"])
    advance(learner, [5])
    # As a captured graph knows it.
    assert at == {key: own.data_ptr() for key, own in state[weight].items()} and len(at) > 1


@pytest.mark.parametrize("form", FORMATS)
def test_blocks_are_of_the_tensor_not_of_its_memory(form):
    """Kernels write to weights in channels_last as they lie in memory; state follows them."""
    found = []
    for layout in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        layer = nn.Conv2d(16, 32, 3, bias=False).to(memory_format=layout)
        learner = mixed(layer, mode(form), making(torch.optim.AdamW, lr=0.01, fused=True))
        for step in range(3):
            weight = torch.randn(layer.weight.shape, generator=torch.Generator().manual_seed(step))
            learner.zero_grad()
            (layer.weight * weight).sum().backward()
            learner.step()
        found.append(state_of(learner))
    assert_same_bits(found[1], found[0])
    assert "exp_avg.scale of weight" in found[0]


@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
@pytest.mark.parametrize("form", FORMATS)
def test_beside_bf16_weights(form, rounding):
    """Whose state is FP32 in an update, and stays so where there are no blocks."""
    values = {"param_dtype": "bf16", "master_dtype": None}
    values["update"] = {"state_dtype": form, "rounding": rounding}
    layer = nn.Linear(64, 80)
    make = making(torch.optim.AdamW, lr=0.01, fused=True)
    learner = mixed(layer, build_policy("own", values), make, StaticLossScale(4.0))
    for factor in (1.0, float("inf"), 1.0):
        one_step(learner, torch.randn(8, 64), lambda y, f=factor: y.square().mean() * f)
    assert layer.weight.dtype is torch.bfloat16 and learner.steps.narrow.updates == 2
    dtypes = {own: learner.optimizer.state[own]["exp_avg"].dtype for own in layer.parameters()}
    assert dtypes == {layer.weight: torch.uint8, layer.bias: torch.float32}


def test_bytes_of_a_number():
    learner = trained("dynamic8", 1)
    state = learner.optimizer.state[learner.updated[0]]
    assert sum(own.nbytes for own in state.values() if own.dim()) == 2 * 64 * 64 * (1 + 4 / 256)


@pytest.mark.few(7)
@pytest.mark.parametrize(("rule", "more"), RULES)
@pytest.mark.parametrize("form", FORMATS)
def test_state_is_within_half_a_step_of_fp32_s(form, rule, more):
    """One update: each number keeps its place in its block.

    The steps of the decade below the largest number are 0.9 / 64 of it, and 0.9 / 128 where none
    is negative. Below, they are smaller; E4M3 rounds to 2^-4.
    """
    learner, exact = (trained(own, 1, rule, **more) for own in (form, None))
    packed = 0
    for own, other in zip(learner.updated, exact.updated, strict=True):
        kept, wanted = learner.optimizer.state[own], exact.optimizer.state[other]
        found = learner.steps.narrow.widened(own)
        for name in [name for name in wanted if name + ".scale" in kept]:
            unsigned = name in ("exp_avg_sq", "square_avg", "sum", "acc_delta", "exp_inf")
            bound = {"dynamic8": 0.45 / (128 if unsigned else 64), "fp8": 2.0**-4}[form]
            top = wanted[name].view(-1, BLOCK).abs().amax(1, keepdim=True)
            apart = (found[name] - wanted[name]).abs().view(-1, BLOCK)
            assert (apart <= (bound + 2.0**-20) * top).all()  # a tie is one of FP32
            assert apart.max() > 0 or not wanted[name].any()
            packed += 1
    # Two weights with one or two averages each.
    assert packed in (2, 4)


def test_state_is_translated_between_formats():
    learner = trained("dynamic8", 2)
    weight = learner.model[0].weight
    state, wide = learner.optimizer.state[weight], learner.steps.narrow.widened(weight)
    blocks, fp8 = StateFormats("dynamic8"), StateFormats("fp8")
    assert translated(state, blocks, blocks, weight) is state
    found = translated(state, blocks, StateFormats(), weight)
    assert_same_bits(dict(found), wide)
    in_fp8 = translated(found, StateFormats(), fp8, weight)
    expected = STATE_FORMATS["fp8"](CPU).encode("exp_avg", wide["exp_avg"])
    assert_same_bits({key: in_fp8[key] for key in expected}, expected)


@pytest.mark.parametrize("form", FORMATS)
def test_what_is_not_finite_does_not_become_finite(form):
    packing = STATE_FORMATS[form](CPU)
    for special in (float("nan"), float("inf"), -float("inf")):
        wide = torch.ones(8192)
        wide[7] = special
        decoded = packing.decode("exp_avg", packing.encode("exp_avg", wide))
        assert not decoded[7].isfinite() and decoded[BLOCK:].isfinite().all()


@pytest.mark.parametrize(
    ("rule", "name"), [(torch.optim.Adadelta, "acc_delta"), (torch.optim.Adamax, "exp_inf")]
)
def test_codes_with_the_sign_of_earlier_versions_are_refused(rule, name):
    """Only dynamic8 has other codes without a sign; a state of today says so."""
    says = f"optimizer state {name} in dynamic8 must be stored without a sign bit"
    for form in FORMATS:
        learner = trained(form, 2, rule)
        saved, of_script = learner.state_dict(), learner.optimizer.state_dict()
        trained(form, 1, rule).load_state_dict(saved)
        for own in (saved, of_script):
            own["narrow"] = {k: v for k, v in own["narrow"].items() if k != "unsigned"}
        if form == "dynamic8":
            with pytest.raises(ValueError, match=says):
                trained(form, 1, rule).load_state_dict(saved)
            with pytest.raises(ValueError, match=says):
                trained(form, 1, rule).optimizer.load_state_dict(of_script)
        else:
            trained(form, 1, rule).load_state_dict(saved)
