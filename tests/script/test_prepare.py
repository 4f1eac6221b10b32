"""Prepared objects look FP32 from outside, step and skip as under torch, and go on bit for bit."""

import copy
import dataclasses
import gc
import math
import warnings
import weakref
from functools import partial
from itertools import combinations

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F

import mprun
from mprun.precision import DynamicLossScale, DynamicRule, StaticLossScale, get_policy
from mprun.precision.muon import Muon
from mprun.precision.policy import build_policy

from ..helpers import assert_same_bits, mixed, raises_line
from .networks import (
    HALF_WEIGHTS,
    MODES,
    WITHOUT_MASTERS,
    Net,
    batches,
    loss_of,
    net,
    prepared,
    reloaded,
    sgd,
    take_step,
    train,
)

F32 = torch.float32


def test_random_bits_are_those_of_the_seed_of_the_script():
    seeds = []
    for seed in (7, 8):
        torch.manual_seed(seed)
        _, optimizer = prepared("bf16_stochastic", nn.Linear(4, 4))
        seeds.append(optimizer.state_dict()["narrow"]["seed"])
    assert seeds == [7, 8]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fp16_naive", "fp16_master_scaled", "amp", "bf16_kahan"])
def test_a_part_that_is_computed_anew_changes_no_bit(mode):
    ends = []
    for checkpoints in (False, True):
        model, optimizer = prepared(mode, net(checkpoints=checkpoints))
        ends.append((train(model, optimizer), model.state_dict()))
    assert_same_bits(*ends)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.few(4)
def test_looks_as_it_did(mode):
    model = net()
    before = dict(model.named_parameters()), list(model.state_dict())
    same, optimizer = prepared(mode, model)
    train(model, optimizer)
    policy = get_policy(mode)
    own_dtypes = (policy.param_dtype, policy.norm_dtype) if mode in WITHOUT_MASTERS else (F32, F32)
    assert same is model and isinstance(model, Net) and type(model).__name__ == "Net"
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert list(model.state_dict()) == before[1]
    for name, own in model.named_parameters():
        dtype = own_dtypes["norm" in name or name.startswith("body.1")]
        assert own is before[0][name] and own.dtype is dtype
        # Those of BF16 weights that an update widens add up, and are clipped, in FP32.
        assert own.grad.dtype is (F32 if policy.masters == "transient" else dtype)
    assert model(next(batches(1))[0]).dtype is F32
    assert model.shift.dtype is own_dtypes[0]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.few(4)
def test_eval_computes_with_the_master_weights_in_fp32(mode):
    model, optimizer = prepared(mode)
    train(model, optimizer)
    plain = Net().eval()
    plain.load_state_dict(model.state_dict())
    images, _ = next(batches(1, seed=9))
    with torch.no_grad():
        assert torch.equal(model.eval()(images), plain(images))
        assert torch.equal(model.features(images), plain.features(images))


class Drifting(Net):
    """Writes to its buffer in each call."""

    def forward(self, images):
        self.shift.mul_(0.5)
        return super().forward(images)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.few(4)
def test_inference_mode_computes_what_no_grad_does(mode):
    found = []
    for without_gradients in (torch.no_grad, torch.inference_mode):
        torch.manual_seed(0)
        model, optimizer = prepared(mode, Drifting())
        train(model, optimizer, steps=2)
        images, _ = next(batches(1, seed=9))
        with without_gradients():
            outputs = [model.eval()(images).clone(), model.train()(images).clone()]
        train(model, optimizer, steps=2)
        found.append(outputs + [*model.state_dict().values()])
    assert_same_bits(*found)


@pytest.mark.parametrize("mode", HALF_WEIGHTS)
def test_a_part_that_is_called_directly_computes_in_the_mode(mode):
    model, optimizer = prepared(mode)
    seen = []
    model.conv.register_forward_hook(lambda m, i, o: seen.append((m.weight.dtype, o.dtype)))
    images, labels = next(batches(1))
    torch.manual_seed(3)
    logits = model.head(model.body(model.features(images) + model.shift))
    half = get_policy(mode).param_dtype
    # From outside the call of a part is like that of a model.
    assert seen == [(half if mode in WITHOUT_MASTERS else F32, F32)] and logits.dtype is F32
    optimizer.zero_grad()
    F.cross_entropy(logits, labels).backward()
    assert model.conv.weight.grad.any()


def test_gradients_are_those_of_torch_where_nothing_is_rounded():
    (model, _), plain = prepared("fp32", scaler="dynamic"), net()
    for own in (model, plain):
        torch.manual_seed(3)
        loss_of(own).backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        # Powers of two: scaling and unscaling changes no bit above FP32's subnormals.
        assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("mode", ["fp16_master_scaled", "amp"])
def test_a_skipped_step_changes_nothing_but_the_scale(mode):
    model, optimizer = prepared(mode)
    train(model, optimizer)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    steps = mprun.state_of(optimizer)
    scale = float(steps.scale.scale)
    images, labels = next(batches(1))
    take_step(optimizer, lambda: F.cross_entropy(model(images) * 1e30, 0 * labels))
    assert steps.last.found_inf == 1 and float(steps.scale.scale) == scale / 2
    after = model.state_dict(), optimizer.state_dict()
    for model_state, optimizer_state in (before, after):
        model_state.pop("norm.num_batches_tracked")
        optimizer_state.pop("loss_scale")
    assert_same_bits(after, before)


def muon(parameters, lr):
    held = [*parameters]
    groups = [[own for own in held if (own.dim() == 2) is matrix] for matrix in (True, False)]
    return Muon([{"params": groups[0], "matrices": True}, {"params": groups[1]}], lr)


def test_a_checkpoint_continues_bit_for_bit_and_loads_into_plain_objects():
    model, optimizer = prepared("fp16_master_scaled", scaler=DynamicLossScale(DynamicRule(2.0**20)))
    train(model, optimizer)
    saved = reloaded({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    expected = train(model, optimizer, seed=5)
    again, continued = prepared("fp16_master_scaled", net(seed=8))
    again.load_state_dict(saved["model"])
    continued.load_state_dict(saved["optimizer"])
    assert train(again, continued, seed=5) == expected
    plain = net()
    plain.load_state_dict(saved["model"])
    sgd(plain.parameters()).load_state_dict(saved["optimizer"])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.few(4)
def test_pickled_it_is_the_plain_model_that_loads_with_weights_only(mode):
    model, optimizer = prepared(mode, nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4)))
    take_step(optimizer, lambda: model(torch.randn(2, 3, 4))[0].sum())
    with torch.serialization.safe_globals([nn.Sequential, nn.Linear, nn.LSTM]):
        loaded = reloaded(model, weights_only=True)
    assert type(loaded) is nn.Sequential and type(loaded[1]) is nn.LSTM
    assert_same_bits([*loaded.parameters()], [own.float() for own in model.parameters()])
    inputs = torch.randn(2, 3, 4)
    with torch.no_grad():
        assert torch.equal(loaded(inputs)[0], model.eval()(inputs)[0])


def adversaries(between=nn.ReLU):
    """A generator and a discriminator."""
    return nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 6), between(), nn.Linear(6, 1))


@pytest.mark.parametrize("generator_first", [True, False])
def test_generator_and_discriminator_share_a_scale_that_moves_once(generator_first):
    g, d = adversaries(lambda: nn.BatchNorm1d(6))
    scale = DynamicLossScale(DynamicRule(2.0**4, growth_interval=3))
    both = [g, d] if generator_first else [d, g]
    optimizers = [sgd(one.parameters()) for one in both]
    _, (of_g, of_d) = mprun.prepare(both, optimizers, "amp", scaler=scale)
    if not generator_first:
        of_g, of_d = of_d, of_g
    scales, between = [], []
    for _ in range(6):
        of_d.zero_grad()
        fake = g(torch.randn(8, 4))
        d(torch.randn(8, 6)).square().mean().backward()
        d(fake.detach()).square().mean().backward()
        of_d.step()
        between.append(float(scale.scale))
        of_g.zero_grad()
        statistics = d[1].running_mean.clone()
        d(fake).mean().backward()
        assert not torch.equal(d[1].running_mean, statistics)
        of_g.step()
        scales.append(float(scale.scale))
    assert (scales, between) == ([16, 16, 32, 32, 32, 64], [16, 16, 16, 32, 32, 32])
    # Unscaled where they ran through the other's weights too, as torch leaves them.
    assert d[0].weight.grad.abs().max() < 1
    # A generator's overflow takes back what its pass did to the discriminator's statistics.
    statistics, weight = d[1].running_mean.clone(), g.weight.detach().clone()
    take_step(of_g, lambda: d(g(torch.randn(8, 4))).mean() * math.inf)
    assert torch.equal(d[1].running_mean, statistics) and torch.equal(g.weight, weight)


def test_a_model_at_rest_is_scaled_as_the_loss_that_goes_through_it():
    """Its own scale is far too large, and nothing in that pass would lower it."""
    g, d = adversaries()
    rules = DynamicRule(2.0**4), DynamicRule(2.0**40, max_scale=2.0**60)
    scales = [*map(DynamicLossScale, rules)]
    of_g = sgd(g.parameters())
    mprun.prepare(g, of_g, "amp", scaler=scales[0])
    mprun.prepare(d, sgd(d.parameters()), "amp", scaler=scales[1])
    d.requires_grad_(False)
    before = g.weight.detach().clone()
    d(g(torch.randn(8, 4))).mean().backward()
    of_g.step()
    assert not torch.equal(g.weight, before)
    assert [float(scale.scale) for scale in scales] == [2.0**4, 2.0**40]
    # As its own again, in a pass that trains it.
    d.requires_grad_(True)
    d(torch.randn(8, 6)).mean().backward()
    assert not d[0].weight.grad.isfinite().all()


def test_a_scale_falls_for_what_overflows_in_its_model_by_the_loss_of_another():
    """As in a GAN's loop that zeroes what the generator's loss leaves in the discriminator."""
    g, d = adversaries()
    scales = [DynamicLossScale(DynamicRule(2.0**16)) for _ in "gd"]
    of_g, of_d = sgd(g.parameters(), 1e-3), sgd(d.parameters(), 1e-3)
    mprun.prepare(g, of_g, "amp", scaler=scales[0])
    mprun.prepare(d, of_d, "amp", scaler=scales[1])
    applied = []
    for _ in range(8):
        weight = d[0].weight.detach().clone()
        take_step(of_d, lambda: d(torch.randn(8, 6)).mean() / 2**10)
        assert not torch.equal(d[0].weight, weight)  # its own loss never overflows
        weight = g.weight.detach().clone()
        take_step(of_g, lambda: d(g(torch.randn(8, 4))).mean() * 2**6)
        applied.append(not torch.equal(g.weight, weight))
    skipped = applied.index(True)
    assert 0 < skipped < 8 and all(applied[skipped:])
    assert [float(scale.scale) for scale in scales] == [2.0 ** (16 - skipped)] * 2


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: mprun.prepare(nn.ReLU()), "no parameters"),
        (lambda: mprun.prepare(net(), "sgd"), "must be a torch.optim.Optimizer"),
        (lambda: mprun.prepare(nn.Linear(2, 2).half()), "build the model in float32"),
        (lambda: mprun.prepare(sgd(net().parameters()), net()), "the order is prepare(model"),
        (lambda: mprun.prepare(net(), precision=torch.float16), "must be the name of a mode"),
        (lambda: prepared("fp8_tensorwise", nn.Conv2d(1, 1, 1)), "the model has none"),
        (
            lambda: prepared("fp8_tensorwise", nn.Sequential(nn.Linear(2, 2))),
            "Sequential: precision.matmul.modules=['*']: no nn.Linear is left to compute in "
            "E4M3/E5M2; 0, the output layer, has to be named",
        ),
        (lambda: prepared("fp17"), "precision mode 'fp17': must be one of"),
        (lambda: prepared(scaler="dynamc"), "scaler 'dynamc': must be one of"),
        (lambda: prepared(overrides={"nothing": "fp32"}), "matches no module"),
        (lambda: prepared(overrides={"conv": "fp8"}), "must be one of fp32, fp16, bf16"),
    ],
)
def test_what_cannot_be_prepared_is_said(make, says):
    with raises_line(ValueError, says):
        make()


def test_a_refused_model_can_still_be_prepared_once():
    model = net()
    with raises_line(ValueError, "must be one of"):
        prepared("fp17", model)
    prepared("amp", model.body)
    for again in (model, model.body):
        with raises_line(ValueError, "already prepared"):
            prepared("amp", again)


@pytest.mark.parametrize("mode", WITHOUT_MASTERS)
def test_a_first_layer_in_fp32_is_no_moved_model(mode):
    first = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model, optimizer = prepared(mode, first, overrides={"0": "fp32"})
    take_step(optimizer, lambda: model(torch.ones(3, 4)).sum())
    assert model[0].weight.dtype is F32 and model[1].weight.dtype is not F32


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.few(4)
def test_a_state_made_like_the_parameters_is_taken_in_training_and_evaluation(mode):
    model, optimizer = prepared(mode, nn.LSTM(4, 4))
    state = tuple(next(model.parameters()).new_zeros(1, 2, 4) for _ in "hc")
    take_step(optimizer, lambda: model(torch.randn(3, 2, 4), state)[0].sum())
    with torch.no_grad():
        outputs, (h, c) = model.eval()(torch.randn(3, 2, 4), state)
    assert outputs.dtype is h.dtype is c.dtype is F32


class InParts(nn.Module):
    """Its parts are called, by `training_step` for instance, and it keeps a term of the loss."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.decoder = nn.Linear(8, 8), nn.Linear(8, 4)

    def gradient(self):
        torch.manual_seed(1)
        hidden = self.encoder(torch.randn(16, 8))
        self.penalty = hidden.square().mean()  # between two calls: it is outside of both
        outputs = self.decoder(hidden.relu())
        (outputs.square().mean() + self.penalty).backward()
        return self.encoder.weight.grad


@pytest.mark.parametrize("mode", ["fp16_master_scaled", "amp"])
def test_what_a_script_itself_keeps_in_the_model_is_not_scaled(mode):
    plain = InParts().gradient()
    model, _ = prepared(mode, InParts(), scaler=StaticLossScale(16.0))
    # 8 roundings to 11 bits on the way; scaled twice it would be some 16 times as large.
    assert torch.allclose(model.gradient(), plain, rtol=8 * 2.0**-11, atol=2.0**-11)


@pytest.mark.parametrize("mode", MODES)
def test_a_loss_in_the_model_keeps_its_weights_of_classes_and_targets_in_fp32(mode):
    weight = torch.tensor([1.0, 1 / 3, 0.1, 0.7])  # of which 16 bits would be others
    losses = {"classes": nn.CrossEntropyLoss(weight.clone()), "numbers": nn.MSELoss()}
    model, _ = prepared(mode, nn.ModuleDict({"net": nn.Linear(8, 4), **losses}))
    outputs, targets = torch.full((2, 1), 0.5), torch.full((2, 1), 1 / 3)
    # 1/3 is off by up to 2^-12 of it in FP16.
    assert torch.equal(model["numbers"](outputs, targets), F.mse_loss(outputs, targets))
    logits, labels = model["net"](torch.randn(16, 8)), torch.randint(4, (16,))
    assert torch.equal(model["classes"](logits, labels), F.cross_entropy(logits, labels, weight))


def test_an_optimizer_that_is_dropped_is_gone_at_once():
    """Without a collector of cycles: the loss scale would wait for its step."""
    optimizer = prepared("amp")[1]
    reference = weakref.ref(optimizer)
    gc.disable()
    try:
        del optimizer
        assert reference() is None
    finally:
        gc.enable()


def test_an_optimizer_that_is_known_of_has_its_turn_before_the_scale_moves():
    """As one that was given to prepare."""
    model = prepared("amp")[0]
    late = [sgd(part.parameters()) for part in (model.conv, model.head)]
    scale = [mprun.state_of(one).scale for one in late][0]
    scale.rule, before = dataclasses.replace(scale.rule, growth_interval=1), scale.scale.item()
    for optimizer, expected in zip(late, (before, 2 * before), strict=True):
        loss_of(model).backward()
        optimizer.step()
        assert scale.scale.item() == expected


def test_autocast_around_a_part_of_what_a_trainer_calls_in_parts_is_refused():
    class Trained(Net):
        def training_step(self, images):
            return self.features(images)

    model, _ = prepared("fp32", Trained())
    with raises_line(RuntimeError, "torch.autocast is active"):
        with torch.autocast("cpu", torch.bfloat16):
            model.training_step(next(batches(1))[0])


def test_an_optimizer_is_not_skipped_for_an_overflow_of_another():
    """Two parts of one model with a loss for each, as a generator and its critic in one module."""
    model = net()
    optimizers = [sgd(part.parameters()) for part in (model.conv, model.head)]
    mprun.prepare(model, optimizers, "amp")
    of_conv, of_head = optimizers
    (loss_of(model) * 1e30).backward()  # infinite when scaled
    of_head.step()
    assert mprun.state_of(of_head).last.found_inf == 1
    of_conv.zero_grad()  # its own alone: those of the head stay infinite
    model.head.requires_grad_(False)
    loss_of(model).backward()
    before = model.conv.weight.detach().clone()
    of_conv.step()
    assert mprun.state_of(of_conv).last.found_inf == 0
    assert not torch.equal(model.conv.weight, before)


@pytest.mark.parametrize("make", [torch.optim.AdamW, muon], ids=["adamw", "muon"])
@pytest.mark.parametrize("state_dtype", [None, "dynamic8", "fp8"])
@pytest.mark.parametrize("mode", ["bf16_stochastic", "bf16_kahan"])
@pytest.mark.few
def test_a_prepared_optimizer_goes_on_bit_for_bit(mode, state_dtype, make):
    policy = dataclasses.replace(get_policy(mode), state_dtype=state_dtype)

    def made():
        torch.manual_seed(0)
        model = nn.Linear(1024, 4)
        return mprun.prepare(model, make(model.parameters(), 1e-2), policy)

    def steps(model, optimizer, numbers):
        for number in numbers:
            inputs = torch.randn(8, 1024, generator=torch.Generator().manual_seed(number))
            take_step(optimizer, lambda x: model(x).square().mean(), inputs)

    model, optimizer = made()
    steps(model, optimizer, range(3))
    saved = reloaded([model.state_dict(), optimizer.state_dict()], weights_only=True)
    steps(model, optimizer, range(3, 6))
    again, other = made()
    again.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    steps(again, other, range(3, 6))
    assert_same_bits(again.state_dict(), model.state_dict())
    assert_same_bits(other.state_dict(), optimizer.state_dict())
    assert {own.dtype for own in again.parameters()} == {torch.bfloat16}
    names = ("exp_avg", "momentum_buffer")
    dtypes = [own[name].dtype for own in other.state.values() for name in names if name in own]
    assert dtypes == [F32 if state_dtype is None else torch.uint8, F32]


def drawing(out=4):
    """(a model, its optimizer) in nvfp4, which rounds each gradient at random."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, out))
    return mprun.prepare(model, torch.optim.SGD(model.parameters(), 0.1), "nvfp4")


def step_in_parts(model, *optimizers, inputs):
    """Take one step of each optimizer after two micro-batches."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    for part in inputs.split(8):
        (model(part) - part[:, :4]).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()


def test_a_prepared_model_goes_on_with_the_random_bits_of_its_state():
    """A state loaded in between changes no bit."""
    x = torch.randn(16, 16)
    model, optimizer = drawing()
    step_in_parts(model, optimizer, inputs=x)
    saved = [copy.deepcopy(own.state_dict()) for own in (model, optimizer)]
    step_in_parts(model, optimizer, inputs=x)
    expected = copy.deepcopy(model.state_dict())
    again, other = drawing()
    other.load_state_dict(saved[1])
    again.load_state_dict(saved[0])
    step_in_parts(again, other, inputs=x)
    assert_same_bits(again.state_dict(), expected)
    again.load_state_dict(saved[0])
    step_in_parts(again, other, inputs=x)  # a later micro-batch has other bits
    assert not torch.equal(again.state_dict()["0.weight"], expected["0.weight"])


def test_delayed_scales_move_once_an_update_and_are_in_the_state():
    """Also of two optimizers, micro-batches, an evaluation, a copy and a new layer."""

    def delayed_of(model):
        return mprun.state_of(sgd(model.parameters())).models[0].delayed

    def made():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.Linear(32, 4))
        model, first = mprun.prepare(model, sgd(model[:2].parameters()), "fp8_delayed")
        second = sgd(model[2:].parameters())
        mprun.state_of(second)
        return model, (first, second)

    x = torch.randn(16, 16)
    model, both = made()
    for _ in range(3):
        step_in_parts(model, *both, inputs=x)
    delayed = delayed_of(model)
    amaxes = delayed.history[:, 0, 0]
    assert amaxes[:3].tolist() == [x.bfloat16().abs().amax().item()] * 3 and not amaxes[3:].any()
    assert not delayed.present[..., 1].any()
    saved = [copy.deepcopy(own.state_dict()) for own in (model, *both)]
    with torch.no_grad():
        model.eval()(x * 100)
        model.train()
    copied = copy.deepcopy(model)
    again, others = made()
    for own, state in zip((again, *others), saved, strict=True):
        own.load_state_dict(state)
    for one, its in (model, both), (again, others):
        step_in_parts(one, *its, inputs=x)
    assert_same_bits(again.state_dict(), model.state_dict())
    assert_same_bits(others[0].state_dict(), both[0].state_dict())
    assert_same_bits(delayed_of(copied).state_dict(), saved[1]["delayed"][0])
    copied.append(nn.Linear(4, 4))  # the output layer, which "3" is no longer
    copied(x)
    kept = delayed_of(copied)
    assert [*kept.layers] == ["0", "2", "3"]
    assert kept.history[0, :2].all() and not kept.history[:, 2].any()


@pytest.mark.parametrize("mode", ["fp32", "bf16_master", "fp16_master_scaled", "amp"])
def test_the_gradient_of_each_parameter_can_be_watched(mode):
    """As the mode computes it: with its scale, norm layers and parameters in FP32 included."""
    model, optimizer = prepared(mode, net())
    steps, seen = mprun.state_of(optimizer), {}
    handles = [
        steps.watch_gradient(own, partial(seen.__setitem__, name))
        for name, own in model.named_parameters()
    ]
    loss_of(model).backward()
    scale = steps.scale.scale
    for name, own in model.named_parameters():
        assert torch.equal(seen[name].float() / scale, own.grad), name
    for handle in handles:
        handle.remove()
    seen.clear()
    loss_of(model).backward()
    assert not seen


@pytest.mark.parametrize("mode", ["fp32", "bf16_master", "fp16_master_scaled"])
def test_neither_before_a_step_nor_after_a_usual_one_was_one_skipped(mode):
    model, optimizer = prepared(mode)
    steps, flags = mprun.state_of(optimizer), []
    flags.append(steps.found_inf)
    take_step(optimizer, loss_of, model)
    flags.append(steps.found_inf)
    assert_same_bits(flags, [torch.zeros(()), torch.zeros(())])


def test_a_state_that_cannot_decay_is_warned_of_once():
    layers = nn.Linear(4, 4), nn.Linear(4, 4)
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(layers[0].parameters())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        mprun.prepare(model, optimizer, "bf16_naive")
        for _ in range(2):
            take_step(optimizer, lambda: model(torch.ones(2, 4)).square().mean())
        optimizer.add_param_group({"params": [*layers[1].parameters()]})
        take_step(optimizer, lambda: model(torch.ones(2, 4)).square().mean())
    lines = [str(one.message) for one in said if "keeps optimizer state" in str(one.message)]
    assert len(lines) == 1 and lines[0].startswith("AdamW betas: bf16_naive"), lines


@pytest.mark.parametrize("mode", ["bf16_kahan", "bf16_stochastic"])
def test_gradients_of_16_bit_weights_add_up_in_fp32(mode):
    model, _ = prepared(mode, nn.Linear(4, 4))
    for factor in (1.0, 2.0**-12):
        (model(torch.ones(1, 4)).sum() * factor).backward()
    assert {own.dtype for own in model.parameters()} == {torch.bfloat16}
    assert model.bias.grad.dtype is torch.float32 and (model.bias.grad == 1 + 2.0**-12).all()


def test_a_state_of_16_bit_weights_is_loaded_beside_masters():
    x = torch.randn(16, 4)
    saved = []
    for mode in ("bf16_stochastic", "bf16_master"):
        model, optimizer = prepared(mode, nn.Linear(4, 4))
        if saved:
            optimizer.load_state_dict(saved[0])
        take_step(optimizer, lambda model=model: model(x).square().mean())
        saved.append(optimizer.state_dict())
    assert "narrow" in saved[0] and "narrow" not in saved[1]


@pytest.mark.parametrize("in_graph", [True, False])
def test_delayed_scales_that_no_optimizer_moves_go_with_the_updates_of_others(in_graph):
    """They are those of a model with the same weights and inputs; a copy at rest keeps its own."""

    def made():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.Linear(32, 4))
        return model, sgd(model.parameters(), lr=0.0)

    x = torch.randn(16, 16) / 256
    model, optimizer = mprun.prepare(*made(), "fp8_delayed")
    teacher = mprun.prepare(made()[0].requires_grad_(False), precision="fp8_delayed")
    shared = teacher.forward.shared
    for _ in range(3):
        loss = model(x).square().mean()
        if in_graph:
            teacher(x.clone().requires_grad_()).square().mean().backward()
        else:
            with torch.no_grad():
                teacher(x)
        loss.backward()
        optimizer.step()
    kept, expected = shared.delayed, mprun.state_of(optimizer).models[0].delayed
    moved = slice(3 if in_graph else 2)  # gradients come last
    assert (expected.present[..., 0] != 1).all()
    assert_same_bits(kept.present[:, moved], expected.present[:, moved])
    assert_same_bits(kept.history[..., moved], expected.history[..., moved])
    copied = copy.deepcopy(teacher)
    model(x).sum().backward()
    optimizer.step()
    assert_same_bits(copied.forward.shared.delayed.state_dict(), kept.state_dict())


def test_delayed_scales_of_a_network_in_a_loss_move_when_an_fp32_model_steps():
    judge = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).requires_grad_(False)
    mprun.prepare(judge, precision="fp8_delayed")
    model, optimizer = prepared("fp32", nn.Linear(4, 16))
    take_step(optimizer, lambda: judge(model(torch.ones(2, 4))).square().mean())
    assert (judge.forward.shared.delayed.present[..., 0] != 1).all()


def test_a_step_moves_no_scales_of_a_run_that_was_stopped():
    """Its network may be alive still, and its casts would count among those of the next run."""
    made = lambda: nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))  # noqa: E731
    stopped = mixed(made(), "fp8_delayed").prepared
    stopped.model(torch.ones(2, 16)).sum().backward()
    kept = copy.deepcopy(stopped.delayed.state_dict())
    model, optimizer = prepared("fp8_delayed", made())
    take_step(optimizer, lambda: model(torch.ones(2, 16)).square().mean())
    assert_same_bits(stopped.delayed.state_dict(), kept)


def test_ranks_round_with_random_bits_of_their_own():
    """The process group has one process, which says what its rank is."""
    fake_pg = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    x, found = torch.randn(8, 16), []
    for rank in range(2):
        model, optimizer = drawing()
        dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=rank, world_size=2)
        try:
            model(x).square().mean().backward()
        finally:
            dist.destroy_process_group()
        found.append(model[0].weight.grad)
        state = optimizer.state_dict()
        del model, optimizer
    # One process that goes on takes the bits of neither.
    model, optimizer = drawing()
    optimizer.load_state_dict(state)
    model(x).square().mean().backward()
    for one, other in combinations([*found, model[0].weight.grad], 2):
        assert not torch.equal(one, other)


def test_two_models_of_one_script_go_on_with_the_random_bits_of_their_states():
    """Whichever state is loaded last, and whatever is prepared after that."""
    x = torch.randn(8, 16)

    def step(pairs):
        for (model, optimizer), calls in zip(pairs, (2, 1), strict=True):
            optimizer.zero_grad()
            for _ in range(calls):
                model(x).square().mean().backward()
            optimizer.step()

    pairs = [drawing(), drawing(out=2)]
    step(pairs)
    saved = [[copy.deepcopy(own.state_dict()) for own in pair] for pair in pairs]
    step(pairs)
    expected = [copy.deepcopy(model.state_dict()) for model, _ in pairs]
    for order in (0, 1), (1, 0):
        again = [drawing(), drawing(out=2)]
        for number in order:
            for own, state in zip(again[number], saved[number], strict=True):
                own.load_state_dict(state)
        drawing()
        step(again)
        for (model, _), state in zip(again, expected, strict=True):
            assert_same_bits(model.state_dict(), state)


def test_a_script_begins_anew_with_its_seed_when_its_models_are_gone():
    x, found = torch.randn(8, 16), []
    for _ in range(2):
        model, _ = drawing()
        for _ in range(2):
            model(x).square().mean().backward()
        found.append(model[0].weight.grad)
        del model
    assert torch.equal(*found)


def in_blocks(dtype):
    """(a plain model, its optimizer after two steps) with state in blocks."""
    policy = build_policy("own", {"update": {"state_dtype": dtype}})
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = mprun.prepare(model, optimizer, policy)
    for _ in range(2):
        take_step(optimizer, lambda: model(torch.randn(4, 64)).square().mean())
    assert optimizer.state[model.weight]["exp_avg"].dtype is torch.uint8
    return model, optimizer


def test_a_plain_model_keeps_its_state_in_blocks_and_no_other_format_takes_it():
    (_, optimizer), (_, other) = in_blocks("dynamic8"), in_blocks("fp8")
    optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match="state has the format fp8, must have dynamic8: load it"):
        optimizer.load_state_dict(other.state_dict())


def test_state_in_blocks_stays_when_the_groups_of_its_optimizer_change():
    """Encoded again it would be another: dynamic8 has no -1."""
    model, optimizer = in_blocks("dynamic8")
    kept = copy.deepcopy(optimizer.state[model.weight])
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    mprun.state_of(optimizer)
    assert_same_bits(optimizer.state[model.weight], kept)
    mprun.prepare(nn.Linear(2, 2))  # its parameters could be anybody's
    mprun.state_of(optimizer)
    assert_same_bits(optimizer.state[model.weight], kept)


@pytest.mark.parametrize("mode", ["fp32", "bf16_naive", "amp"])
def test_state_in_blocks_that_is_loaded_too_early_is_refused(mode):
    saved = in_blocks("fp8")[1].state_dict()
    model = nn.Linear(64, 64)
    early, late = (torch.optim.AdamW(model.parameters(), lr=1e-2) for _ in range(2))
    early.load_state_dict(saved)
    with raises_line(ValueError, "load it after prepare"):
        mprun.prepare(model, early, mode)
    mprun.prepare(model, None, mode)  # the refusal has prepared nothing
    late.load_state_dict(saved)
    model(torch.ones(4, 64)).mean().backward()
    with raises_line(ValueError, "load it after prepare"):
        late.step()
