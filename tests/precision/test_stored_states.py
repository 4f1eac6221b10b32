"""Optimizer state and masters in 16 bits: formats of each moment, random bits, and what decays."""

import dataclasses
import hashlib
import io
import math
from fractions import Fraction as Q

import pytest
import torch
from torch import nn

import mprun
from mprun.cli import main
from mprun.precision import StaticLossScale, build_policy, get_policy
from mprun.precision.packed_states import BLOCK, STATE_FORMATS, StateFormats, least_decay

from ..checkpoint.test_resume import COMMON, assert_same_run
from ..helpers import TINY_LM, assert_same_bits, making, mixed, one_step, run
from .test_rounded_weights import by_hand

CPU, F32, B16, F16 = torch.device("cpu"), torch.float32, torch.bfloat16, torch.float16
ADAM = {"lr": 1e-2, "weight_decay": 0.1, "fused": True}


def of(state=None, square=None, stored="nearest", mode="fp32", **more):
    """The policy of a mode with these formats of state."""
    update = {"state_dtype": state, "square_dtype": square, "state_rounding": stored}
    return dataclasses.replace(get_policy(mode), **update, **more)


def stepped(policy, rule=torch.optim.AdamW, steps=4, skip=None, seed=3, **settings):
    """A learner after some steps; that of number `skip` has an infinite gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 24), nn.LayerNorm(24), nn.Linear(24, 3))
    make = making(rule, **(settings or ADAM))
    learner = mixed(model, policy, make, StaticLossScale(4.0), seed=seed)
    draw = torch.Generator().manual_seed(1)
    for step in range(steps):
        factor = math.inf if step == skip else 1.0
        inputs = torch.randn(8, 8, generator=draw)
        one_step(learner, inputs, lambda y, factor=factor: y.square().mean() * factor)
    return learner


def states(learner):
    found = learner.steps.state_by_name().items()
    return {name: {key: own for key, own in state.items() if own.dim()} for name, state in found}


@pytest.mark.parametrize(
    ("formats", "dtypes"),
    [
        (("bf16", "fp32"), (B16, F32)),
        ((None, "bf16"), (F32, B16)),
        (("fp16", "bf16"), (F16, B16)),
        (("bf16", None), (B16, B16)),
    ],
)
def test_each_moment_has_its_format(formats, dtypes):
    """Each step is torch's in FP32, of state that is rounded when it ends."""
    learner = stepped(of(*formats), steps=0)
    weights = [own.detach().clone() for own in learner.updated]
    plain = torch.optim.AdamW(weights, **ADAM)
    draw = torch.Generator().manual_seed(1)
    for _ in range(4):
        learner.zero_grad()
        learner.network(torch.randn(8, 8, generator=draw)).square().mean().backward()
        for own, learned in zip(weights, learner.updated, strict=True):
            own.grad = learned.grad.clone()
            for key, dtype in zip(("exp_avg", "exp_avg_sq"), dtypes, strict=True):
                if key in plain.state[own]:
                    plain.state[own][key] = plain.state[own][key].to(dtype).float()
        plain.step()
        learner.end_part()
        learner.step()
    for own, learned in zip(weights, learner.updated, strict=True):
        state = learner.optimizer.state[learned]
        assert (state["exp_avg"].dtype, state["exp_avg_sq"].dtype) == dtypes
        for key, dtype in zip(("exp_avg", "exp_avg_sq"), dtypes, strict=True):
            assert torch.equal(state[key], plain.state[own][key].to(dtype))
        assert torch.equal(learned, own)


class Counted(torch.optim.Optimizer):
    """A rule that divides by how often each number had a gradient: an integer for each."""

    @torch.no_grad()
    def step(self):
        for own in [one for one in self.param_groups[0]["params"] if one.grad is not None]:
            state = self.state[own]
            state.setdefault("hits", torch.zeros_like(own, dtype=torch.int64))
            state.setdefault("average", torch.zeros_like(own))
            state["hits"] += own.grad != 0
            state["average"].lerp_(own.grad, 0.1)
            own.sub_(state["average"] / state["hits"].clamp(min=1))


@pytest.mark.parametrize("form", ["bf16", "fp16", "fp8"])
def test_integers_in_a_state_stay_integers(form):
    """In BF16 a count would stand still at 256, in FP8 at 16."""
    learner = stepped(of(form), Counted, steps=20, skip=2, defaults={})
    for own in learner.updated:
        state = learner.optimizer.state[own]
        assert state["hits"].dtype is torch.int64 and state["hits"].max() == 19
        assert state["average"].dtype is not F32 or form == "fp8"  # too small for blocks


def in_bf16(number):
    """Round an exact number to 8 bits of significand, ties to even."""
    if number == 0:
        return number
    unit = Q(2) ** (math.frexp(float(abs(number)))[1] - 8)
    return round(number / unit) * unit


def test_momentum_by_hand():
    """Numbers are exact in FP32, so fractions tell every bit: momentum and rate are powers of 2."""
    weight = nn.Parameter(torch.tensor([[1.0, -2.0, 0.5]]))
    model = nn.Module()
    model.weight, model.forward = weight, lambda x: x * model.weight
    learner = mixed(model, of("bf16"), making(torch.optim.SGD, lr=0.25, momentum=0.5, fused=True))
    gradients = [Q(257, 256), Q(-3, 4), Q(1, 512)]
    wanted, momenta = [Q(1), Q(-2), Q(1, 2)], [Q(0)] * 3
    for _ in range(5):
        one_step(learner, torch.tensor([[float(g) for g in gradients]]), torch.sum)
        wide = [m / 2 + g for m, g in zip(momenta, gradients, strict=True)]
        wanted = [w - m / 4 for w, m in zip(wanted, wide, strict=True)]
        momenta = [in_bf16(m) for m in wide]
    state = learner.optimizer.state[weight]["momentum_buffer"]
    assert state.dtype is B16 and [Q(own) for own in state[0].tolist()] == momenta
    assert [Q(own) for own in weight[0].tolist()] == wanted


def test_random_bits_of_state_are_those_of_its_names():
    """Eight numbers take the bits of one counter: place, update, and the names of weight and
    state; those below what BF16 keeps are added, and cut off."""
    learner = stepped(of("bf16", stored="stochastic"), steps=1)
    wide = stepped(of("fp32"), steps=1)
    name, key = "0.weight", "exp_avg"
    hashed = [hashlib.blake2b(text.encode(), digest_size=8).digest() for text in (name, key)]
    stream = int.from_bytes(hashed[0], "little") ^ int.from_bytes(hashed[1], "little")
    words = by_hand([0, 0, stream % 2**32, stream >> 32], [3, 0])
    bits = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    exact = states(wide)[name][key].flatten()[:8].view(torch.int32).tolist()
    sums = [number + more for number, more in zip(exact, bits, strict=True)]
    expected = torch.tensor([own >> 16 for own in sums], dtype=torch.int32).to(torch.int16)
    assert torch.equal(states(learner)[name][key].flatten()[:8].view(torch.int16), expected)


def test_random_bits_differ_by_state_and_seed_and_leave_skipped_steps_alone():
    policy = of("bf16", stored="stochastic")
    one, other = states(stepped(policy)), states(stepped(policy, seed=4))
    assert not torch.equal(one["0.weight"]["exp_avg"], other["0.weight"]["exp_avg"])
    before, after = stepped(policy, steps=2), stepped(policy, steps=3, skip=2)
    assert_same_bits(states(after), states(before))
    assert after.steps.narrow.updates == 2
    assert after.steps.narrow.draws and not stepped(of("bf16"), steps=0).steps.narrow.draws


@pytest.mark.parametrize("form", ["bf16", "fp16", "fp8", "dynamic8"])
@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
def test_what_sticks_is_what_is_told(form, name):
    """Numbers below the largest of a block are decayed and kept anew: all stay, or some move."""
    packing = STATE_FORMATS[form](CPU)
    wide = torch.logspace(-2, 0, 4096, dtype=torch.float64).float().view(-1, BLOCK).clone()
    wide[:, 0] = 1.0
    for decay in (0.9, 0.95, 0.965, 0.968, 0.97, 0.99, 0.996, 0.9975, 0.9985, 0.9997, 0.9999):
        kept = packing.decode(name, packing.encode(name, wide))
        moved = (kept.double() * decay).float()
        moved[:, 0] = kept[:, 0]
        again = packing.decode(name, packing.encode(name, moved))
        sticks = bool((again == kept)[(kept < 1) & (kept > 0)].all())
        assert (of(form).why_stuck(decay, name) is not None) == sticks, decay


@pytest.mark.parametrize("form", ["fp8", "dynamic8"])
def test_a_block_that_decays_as_a_whole_falls(form):
    """Codes stay, and the scale falls as in FP32: 200 roundings of it and of what it scales."""
    packing, name = STATE_FORMATS[form](CPU), "exp_avg_sq"
    first = packing.encode(name, torch.linspace(0, 1, 4096))
    kept = first
    for _ in range(200):
        kept = packing.encode(name, packing.decode(name, kept) * 0.999)
    assert torch.equal(kept[name], first[name])
    fallen = kept[f"{name}.scale"].double() / first[f"{name}.scale"].double()
    assert torch.allclose(fallen, fallen.new_tensor(0.999**200), rtol=200 * 3 * 2**-24, atol=0)


def test_stochastic_state_decays_and_state_to_nearest_does_not():
    """Gradients are 0. The mean of 4,096 numbers has 200 errors of half a unit at most, 2^-9: the
    bound is 4.5 deviations."""
    found = {}
    for rounding in ("nearest", "stochastic"):
        policy = of("bf16", stored=rounding)
        layer = nn.Linear(64, 64, bias=False)
        learner = mixed(layer, policy, making(torch.optim.Adam, lr=0.0, fused=True))
        state = learner.optimizer.state[layer.weight]
        state["exp_avg_sq"].fill_(0.75)
        for _ in range(200):
            layer.weight.grad = torch.zeros_like(layer.weight)
            learner.step()
        found[rounding] = state["exp_avg_sq"].double().mean().item()
        assert (policy.stuck({"betas": (0.9, 0.999)}) is None) == (rounding == "stochastic")
    assert found["nearest"] == 0.75
    bound = 4.5 * math.sqrt(200) * 2**-9 / math.sqrt(4096)
    assert abs(found["stochastic"] - 0.75 * 0.999**200) < bound < 0.01


def test_each_setting_is_looked_at_for_the_state_that_it_decays():
    adam = {"betas": (0.9, 0.999)}
    assert of("bf16").stuck(adam).startswith("betas: fp32 keeps optimizer state in BF16")
    assert of("bf16", "fp32").stuck(adam) is None
    assert "average of gradients" in of("bf16", "fp32").stuck({"betas": [0.999, 0.9]})
    assert of("fp16").stuck({"momentum": 0.9999}).startswith("momentum: ")
    assert of("fp8").stuck({"momentum": 0.99}) and not of("fp8").stuck({"momentum": 0.9})
    assert of("fp16").stuck({"alpha": 0.999}) is None and of("bf16").stuck({"alpha": 0.999})
    assert least_decay("fp32", True) == 0
    for form in ("bf16", "fp8"):  # in blocks the scale of a block may decay
        assert (" while the largest of its block stays" in of(form).stuck(adam)) == (form == "fp8")


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_masters_in_bf16_are_weights_in_bf16(rounding):
    """The other path has no master weights, and its update is in FP32, too."""
    plain = get_policy("bf16_stochastic")
    if rounding == "nearest":
        plain = dataclasses.replace(plain, rounding=rounding, state_dtype="fp32")
    rounded = of(mode="bf16_master", master_dtype=B16, rounding=rounding)
    one, other = stepped(rounded, skip=2), stepped(plain, skip=2)
    for own, wanted in zip(one.updated, other.updated, strict=True):
        assert own.dtype is F32 and torch.equal(own, wanted.float())
    assert not torch.equal(one.updated[2], one.updated[2].bfloat16().float())  # a norm's gain
    assert_same_bits(states(one), states(other))
    random = dataclasses.replace(rounded, state_dtype="bf16", state_rounding="stochastic")
    first, same = (stepped(policy, steps=1).updated for policy in (rounded, random))
    assert_same_bits(same, first)  # its state is rounded after the first update


def test_masters_in_fp16_are_rounded_at_the_start_and_after_each_update():
    policy = of(mode="bf16_master", master_dtype=F16)
    for steps in (0, 3):
        learner = stepped(policy, steps=steps)
        weights = {name: own for name, own in learner.named.items() if not name.startswith("1.")}
        assert all(torch.equal(own, own.half().float()) for own in weights.values())
        assert any(not torch.equal(own, own.bfloat16().float()) for own in weights.values())
    before, one = stepped(policy, steps=2), stepped(policy, steps=3)
    exact = stepped(get_policy("bf16_master"), steps=0)
    with torch.no_grad():
        for own, given in zip(exact.updated, before.updated, strict=True):
            own.copy_(given)
            for key, value in before.optimizer.state[given].items():
                exact.optimizer.state[own][key] = value.clone()
    draw = torch.Generator().manual_seed(1)
    inputs = [torch.randn(8, 8, generator=draw) for _ in range(3)][-1]
    one_step(exact, inputs, lambda y: y.square().mean())
    for (name, own), wanted in zip(one.named.items(), exact.updated, strict=True):
        assert torch.equal(own, wanted if name.startswith("1.") else wanted.half().float())


ALL = of("bf16", "bf16", "stochastic", "fp8_tensorwise", master_dtype=B16, rounding="stochastic")


@pytest.mark.parametrize("policy", [of("bf16", "fp8"), of("fp16", "bf16", "stochastic"), ALL])
def test_a_script_goes_on_bit_for_bit(policy):
    def made():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4))
        return mprun.prepare(model, torch.optim.AdamW(model.parameters(), betas=(0.9, 0.9)), policy)

    def step(model, optimizer, number):
        optimizer.zero_grad()
        inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(number))
        model(inputs).square().mean().backward()
        optimizer.step()

    model, optimizer = made()
    for number in range(2):
        step(model, optimizer, number)
    torch.save([model.state_dict(), optimizer.state_dict()], buffer := io.BytesIO())
    buffer.seek(0)
    torch.manual_seed(5)  # the seed travels in the state
    again, other = made()
    for own, saved in zip((again, other), torch.load(buffer, weights_only=True), strict=True):
        own.load_state_dict(saved)
    for number in range(2, 4):
        step(model, optimizer, number)
        step(again, other, number)
    assert_same_bits(again.state_dict(), model.state_dict())
    assert_same_bits(other.state_dict(), optimizer.state_dict())


def test_state_in_blocks_is_not_loaded_into_another_format():
    saved = stepped(of("bf16", "fp8")).optimizer.state_dict()
    other = stepped(of("bf16"), steps=0).optimizer
    with pytest.raises(ValueError, match=r"format bf16 \(squares fp8\), must have bf16: load it"):
        other.load_state_dict(saved)


@pytest.mark.slow
def test_a_run_goes_on_bit_for_bit(tmp_path):
    update = {"state_dtype": "bf16", "state_rounding": "stochastic", "rounding": "stochastic"}
    words = [f"precision.update.{key}={value}" for key, value in update.items()]
    words += ["precision=bf16_master", "precision.master_dtype=bf16", *COMMON, *TINY_LM]
    words += ["optim=adamw"]
    assert run(tmp_path / "whole", *words, "train.steps=6") == 0
    assert run(tmp_path / "resumed", *words, "train.steps=3") == 0
    assert main([f"resume={tmp_path / 'resumed'}", "train.steps=6"]) == 0
    assert_same_run(tmp_path / "resumed", tmp_path / "whole")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"update.state_rounding": "stochastic"}, "needs a state_dtype or square_dtype of bf16"),
        ({"master_dtype": "fp16"}, "master_dtype=fp16: needs a param_dtype of 16 bits"),
        (
            {"param_dtype": "bf16", "master_dtype": "fp16", "update.rounding": "stochastic"},
            "rounding=stochastic: needs BF16 weights, or a master_dtype of bf16",
        ),
    ],
)
def test_what_no_policy_can_be(values, said):
    with pytest.raises(ValueError, match=said):
        build_policy("own", values)


def test_formats_by_name():
    formats = StateFormats("bf16", "fp32", "stochastic")
    assert [formats.of(name) for name in ("momentum_buffer", "sum")] == ["bf16", "fp32"]
    assert formats.is_random("exp_avg") and not formats.is_random("square_avg")
