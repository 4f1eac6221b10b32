"""The single pass on a CPU: the plain way's numbers, bit for bit, and the formulas in float64."""

import copy
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD

from mprun.precision import (
    BatchNormGuard,
    DynamicLossScale,
    LogMaxLossScale,
    MixedPrecisionOptimizer,
    NoLossScale,
    StaticLossScale,
    cast_model,
    get_policy,
)
from mprun.precision.single_pass_cpu import BlockedUpdate
from mprun.precision.torch_update import initialise_state
from mprun.precision.update import Ready

from .. import helpers
from ..helpers import assert_same_bits, making, mixed
from .rules import RULES

INF, NAN = float("inf"), float("nan")
MODES = ["fp32", "fp16_master", "bf16_master", "amp"]


class Twins:
    """The same small network twice, updated in both ways by the same losses."""

    def __init__(self, optimizer="momentum", mode="fp16_master", scale=None, decay=0.01, **more):
        scale = scale or (lambda: DynamicLossScale(2.0**8, growth_interval=2))
        self.runs = {}
        for update in ("plain", "single_pass"):
            model, own = helpers.network(hidden=40, norm=nn.BatchNorm1d), scale()
            cast, guards = cast_model(model, get_policy(mode)), [BatchNormGuard(model)]
            rule = partial(RULES[optimizer], weight_decay=decay, fused=True)
            settings = {"guards": guards, "update": update} | more
            made = MixedPrecisionOptimizer(
                cast, lambda named, rule=rule: rule(_in_groups(named)), own, **settings
            )
            self.policy, self.runs[update] = cast.policy, (model, made, own)
        self.made = self.runs["single_pass"][1]

    def step(self, seed, factor=1.0, losses=1, measure=False):
        updates = []
        for model, optimizer, scale in self.runs.values():
            random = torch.Generator().manual_seed(seed)
            optimizer.zero_grad()
            for _ in range(losses):
                inputs = torch.randn(8, 6, generator=random)
                outputs = model(self.policy.cast_inputs(inputs)).float()
                optimizer.backward(outputs.square().mean() * factor)
            updates.append(optimizer.step(measure))
            scale.update()
        return updates

    def step_alike(self, *arguments, **named):
        """A step of which both say the same; what the single pass says."""
        plain, single = self.step(*arguments, **named)
        assert_same_bits(plain.metrics(), single.metrics())
        return single

    def states(self):
        runs = self.runs.values()
        return [copy.deepcopy([part.state_dict() for part in parts]) for parts in runs]

    def assert_equal(self):
        assert_same_bits(*self.states())


def _in_groups(named):
    """Biases have twice the rate, as in Caffe's AlexNet."""
    weights = [t for name, t in named if not name.endswith("bias")]
    biases = [t for name, t in named if name.endswith("bias")]
    return [{"params": weights}, {"params": biases, "lr": 0.1, "lr_factor": 2.0}]


@pytest.mark.few(8)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("optimizer", RULES)
def test_it_is_the_plain_way_bit_for_bit(optimizer, mode):
    twins = Twins(optimizer, mode, clip_norm=0.5, average_decay=0.9)
    assert twins.made.update_path == "single_pass"
    start = twins.states()[1]
    # The third overflows in FP16 and in the loss of the others.
    for seed, factor in enumerate((1.0, 3.0, INF, 0.1, 1.0)):
        single = twins.step_alike(seed, factor)
        assert single.found_inf == (factor == INF)
        twins.assert_equal()
    with pytest.raises(AssertionError):
        assert_same_bits(start, twins.states()[1])


@pytest.mark.parametrize("scale", [NoLossScale, lambda: StaticLossScale(3.0), LogMaxLossScale])
@pytest.mark.parametrize("clip_norm", [None, 1e-2, 1e6])
def test_every_scale_and_clip(scale, clip_norm):
    """3 is no power of two: unscaling rounds, and the norm is that of the rounded values."""
    for optimizer in ("momentum", "adam"):
        twins = Twins(optimizer, "fp16_master", scale, clip_norm=clip_norm)
        for seed in range(4):
            twins.step_alike(seed, measure=seed % 2 == 1)
        twins.assert_equal()


@pytest.mark.parametrize("mode", MODES)
def test_a_second_loss_collects_the_first(mode):
    twins = Twins("adam", mode, clip_norm=0.1)
    for seed, factor in enumerate((1.0, INF, 2.0)):
        twins.step_alike(seed, factor, losses=3)
    twins.assert_equal()


def test_losses_of_one_step_have_their_own_scales():
    scales = [[StaticLossScale(64.0), StaticLossScale(1024.0)] for _ in range(2)]
    results = []
    for update, own in zip(("plain", "single_pass"), scales, strict=True):
        torch.manual_seed(0)
        model = nn.Linear(5, 3)
        make = making(RULES["momentum"], fused=True)
        _, optimizer = mixed(model, "fp16_master", make, own, update=update)
        for factor in (1.0, INF):
            optimizer.zero_grad()
            x = torch.ones(2, 5).half()
            optimizer.backward(model(x).float().square().mean(), 0)
            optimizer.backward(model(-x).float().square().mean() * factor, 1)
            optimizer.step()
            results.append([scale.found_inf.clone() for scale in own])
        results.append(optimizer.state_dict())
    assert_same_bits(results[:3], results[3:])
    assert [float(flag) for flag in results[1]] == [0.0, 1.0]


def test_what_only_some_modules_are_clipped_by():
    twins = Twins("momentum", clip_norm=1e-3, clipped={"0.weight", "0.bias"})
    for seed in range(3):
        twins.step_alike(seed)
    twins.assert_equal()


def test_a_parameter_without_gradient_stays_and_does_not_age():
    for optimizer in ("momentum", "adam"):
        twins = Twins(optimizer, decay=0.1)
        twins.step(0)
        for model, made, _ in twins.runs.values():
            made.zero_grad()
            outputs = nn.functional.linear(torch.ones(2, 40).half(), model[3].weight)
            made.backward(outputs.float().square().mean())
            made.step()
        twins.assert_equal()
        state = twins.made.state_by_name()
        if optimizer == "adam":
            assert state["3.weight"]["step"] == 2 and state["3.bias"]["step"] == 1


def test_checkpoints_are_interchangeable():
    there, back = Twins("adam"), Twins("adam")
    there.step(0)
    plain, single = there.states()
    for (model, made, own), state in zip(back.runs.values(), (single, plain), strict=True):
        model.load_state_dict(state[0])
        made.load_state_dict(state[1])
        own.load_state_dict(state[2])
    there.step(1)
    back.step(1)
    assert_same_bits(there.states(), back.states())


@pytest.mark.parametrize("mode", MODES)
def test_the_gradients_of_a_step_can_be_asked_for(mode):
    twins = Twins("momentum", mode, clip_norm=1e-3)
    twins.step(0)
    plain, single = (made.unscaled_gradients() for _, made, _ in twins.runs.values())
    assert_same_bits(plain, single)
    assert len(single) == 6 and all(g.dtype is torch.float32 for g in single.values())
    norm = torch.stack([g.double().square().sum() for g in single.values()]).sum().sqrt()
    # 1e-6 is in the clip factor; sums of FP32 squares.
    assert norm.item() == pytest.approx(1e-3, rel=2e-3)
    twins.made.zero_grad()
    assert twins.made.unscaled_gradients() == {}


def test_an_observer_gets_torch_s_operations():
    twins = Twins("adam", clip_norm=1.0)
    twins.step(0)
    twins.made.observed = True
    twins.step(1)
    assert twins.made.updated[0].grad is not None
    twins.made.observed = False
    twins.step(2)
    assert twins.made.updated[0].grad is None
    twins.assert_equal()


# Small blocks, so that tensors are cut; 33 and 1 leave tails of the vector registers.
SHAPES = [(33,), (4, 3, 5, 5), (1,), (200,), (16, 8), (7, 64)]


@settings(max_examples=40, deadline=None)
@given(
    optimizer=st.sampled_from(list(RULES)),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    decay=st.sampled_from([0.0, 0.3]),
    exponent=st.integers(-3, 18),
    odd=st.booleans(),
    clip=st.sampled_from([None, 1.0, 0.37]),
    bad=st.sampled_from([None, None, INF, -INF, NAN]),
    block=st.sampled_from([32, 64, 1 << 19]),
    seed=st.integers(0, 2**16),
    channels_last=st.booleans(),
)
def test_any_blocks(optimizer, dtype, decay, exponent, odd, clip, bad, block, seed, channels_last):
    random = torch.Generator().manual_seed(seed)
    start = [torch.randn(shape, generator=random) for shape in SHAPES]
    scale = 2.0**exponent * (1.1 if odd else 1.0)
    gradients = [(torch.randn(s, generator=random) * 8).to(dtype) for s in SHAPES]
    gradients[2] = None
    if channels_last:
        start[1] = start[1].contiguous(memory_format=torch.channels_last)
    if bad is not None:
        gradients[3][150] = bad
    runs = []
    for _ in range(2):
        masters = [tensor.clone().requires_grad_() for tensor in start]
        own = masters
        if dtype is not torch.float32:
            own = [master.detach().to(dtype) for master in masters]
        groups = [{"params": masters[:3]}, {"params": masters[3:]}]
        inner = RULES[optimizer](groups, weight_decay=decay, fused=True)
        initialise_state(inner)
        runs.append((masters, own, inner))
    (masters, own, inner), (expected, copies, plain) = runs
    single = BlockedUpdate(inner, own, masters, [True] * len(own), block=block)
    inverse, found_inf = torch.tensor(1 / scale), torch.zeros(())
    ready = Ready(gradients, inverse, found_inf)
    factor = None if clip is None else torch.tensor(clip)
    for _ in range(2):
        checked = single.read(ready, norm=True, grad_max=False)
        single.write(ready, factor)
        unscaled = [None if g is None else g.float() * inverse for g in gradients]
        if bad is not None:
            break
        present = [g for g in unscaled if g is not None]
        assert torch.equal(checked.norms, torch.stack(torch._foreach_norm(present, 2)))
        for tensor, gradient in zip(expected, unscaled, strict=True):
            if gradient is not None:
                gradient = gradient if factor is None else gradient * factor
                # torch's kernel looks at no strides.
                tensor.grad = torch.empty_like(tensor).copy_(gradient)
        plain.step()
        with torch.no_grad():
            torch._foreach_copy_(copies, expected)
    assert found_inf == (bad is not None)
    assert_same_bits([masters, own], [expected, copies])
    for mine, theirs in zip(masters, expected, strict=True):
        assert_same_bits(dict(inner.state[mine]), dict(plain.state[theirs]))


def test_large_sums_are_no_overflow():
    """A sum over 2^16 in FP16 is inf although every value is finite."""
    master = torch.zeros(1 << 16).requires_grad_()
    inner = SGD([master], 1.0, fused=True)
    own = master.detach().half()
    single, found_inf = BlockedUpdate(inner, [own], [master], [True]), torch.zeros(())
    gradient = torch.full((1 << 16,), 60000.0).half()
    single.read(Ready([gradient], None, found_inf), norm=False, grad_max=False)
    assert found_inf == 0 and torch.isinf(gradient.sum())
    gradient[5] = -INF
    single.read(Ready([gradient], None, found_inf), norm=False, grad_max=False)
    assert found_inf == 1


def test_sgd_with_momentum_by_hand():
    """g = 48 / 16 + 0.5 * 2 = 4; buffer = 0.5 * 6 + 4 = 7; weight = 2 - 0.25 * 7 = 0.25."""
    master = torch.full((64,), 2.0).requires_grad_()
    inner = SGD([master], 0.25, 0.5, weight_decay=0.5, fused=True)
    inner.state[master]["momentum_buffer"] = torch.full((64,), 6.0)
    own = master.detach().half()
    single = BlockedUpdate(inner, [own], [master], [True])
    gradients = [torch.full((64,), 48.0).half()]
    single.write(Ready(gradients, torch.tensor(1 / 16), torch.zeros(())), None)
    assert master.tolist() == own.tolist() == [0.25] * 64
    assert inner.state[master]["momentum_buffer"].tolist() == [7.0] * 64


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_16_bit_parameter_moves(dtype):
    """pytorch#191763: a fused SGD leaves 16-bit parameters on a CPU as they are."""
    master = torch.ones(1000).requires_grad_()
    own = master.detach().to(dtype)
    single = BlockedUpdate(SGD([master], 0.5, fused=True), [own], [master], [True])
    single.write(Ready([torch.ones(1000, dtype=dtype)], None, None), None)
    assert own.tolist() == [0.5] * 1000
