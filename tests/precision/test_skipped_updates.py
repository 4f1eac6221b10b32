"""A step with a non-finite gradient leaves everything bit for bit as it was and counts once."""

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from mprun.precision import (
    BatchNormGuard,
    DynamicLossScale,
    MixedPrecisionOptimizer,
    NoLossScale,
    StaticLossScale,
    cast_model,
    get_policy,
)
from mprun.precision.torch_update import step_unless

INF, NAN = float("inf"), float("nan")
MAKERS = {
    "sgd": lambda t, **kw: torch.optim.SGD(t, 0.05, 0.9, weight_decay=1e-2, **kw),
    "nesterov": lambda t, **kw: torch.optim.SGD(t, 0.05, 0.9, nesterov=True, **kw),
    "plain sgd": lambda t, **kw: torch.optim.SGD(t, 0.05, **kw),
    "adam": lambda t, **kw: torch.optim.Adam(t, 1e-2, **kw),
    "amsgrad": lambda t, **kw: torch.optim.Adam(t, 1e-2, amsgrad=True, **kw),
    "adamw": lambda t, **kw: torch.optim.AdamW(t, 1e-2, **kw),
    "adagrad": lambda t, **kw: torch.optim.Adagrad(t, 1e-2, **kw),
}
IMPLEMENTATIONS = {
    "fused": {"fused": True},
    "foreach": {"foreach": True, "fused": False},
    "loop": {"foreach": False, "fused": False},
}


class Run:
    """A small network with BatchNorm; `step(plant)` multiplies one gradient or the loss by it."""

    def __init__(self, optimizer="sgd", implementation="fused", mode="fp16_master", scale=None):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        self.cast = cast_model(model, get_policy(mode))
        self.model = model
        self.scale = scale or DynamicLossScale(2.0**8, growth_interval=4)
        chosen = IMPLEMENTATIONS[implementation]
        self.optimizer = MixedPrecisionOptimizer(
            self.cast,
            lambda named: MAKERS[optimizer]([t for _, t in named], **chosen),
            self.scale,
            guards=[BatchNormGuard(model)],
        )
        self.factor = 1.0
        model[3].bias.register_hook(lambda gradient: gradient * self.factor)

    def step(self, gradient=1.0, loss=1.0, inputs=1.0):
        self.factor = gradient
        generator = torch.Generator().manual_seed(7)
        x = torch.randn(5, 6, generator=generator) * inputs
        self.optimizer.zero_grad()
        outputs = self.model(self.cast.policy.cast_inputs(x)).float()
        self.optimizer.backward(outputs.square().mean() * loss)
        update = self.optimizer.step()
        self.scale.update()
        return update

    def state(self):
        both = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return tree_map(lambda t: t.clone(), both)


def same_bits(a, b):
    return all(
        x.dtype == y.dtype
        and torch.equal(x.nan_to_num(), y.nan_to_num())
        and torch.equal(x.isnan(), y.isnan())
        for x, y in zip(tree_leaves(a), tree_leaves(b), strict=True)
    )


PLANTS = {
    "inf in one gradient": {"gradient": INF},
    "nan in one gradient": {"gradient": NAN},
    "inf in the loss": {"loss": INF},
    "overflow in the forward pass": {"inputs": 1e6},
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("optimizer", MAKERS)
@pytest.mark.parametrize("first", [True, False], ids=["first step", "third step"])
def test_nothing_moves(optimizer, implementation, first):
    run, clean = Run(optimizer, implementation), Run(optimizer, implementation)
    for _ in range(0 if first else 2):
        assert run.step().found_inf.item() == 0.0
        clean.step()
    before = run.state()
    for count, plant in enumerate(PLANTS.values(), start=1):
        assert run.step(**plant).found_inf.item() == 1.0
        assert same_bits(run.state(), before), plant
        assert run.scale.steps_skipped.item() == run.scale.consecutive_skips.item() == count
        assert run.scale.scale.item() == 2.0 ** (8 - count)
    # And afterwards it goes on as if the skipped steps had not been: an untouched twin with the
    # same scale ends in the same place.
    clean.scale.scale.copy_(run.scale.scale)
    for _ in range(3):
        assert run.step().found_inf.item() == 0.0
        clean.step()
    assert same_bits(run.state(), clean.state())
    assert not same_bits(run.state(), before)


@pytest.mark.parametrize("mode", ["fp32", "fp16_naive", "fp16_master", "bf16_master", "amp"])
def test_nothing_moves_in_any_mode(mode):
    implementation = "foreach" if mode == "fp16_naive" else "fused"
    run = Run("sgd", implementation, mode, StaticLossScale(64.0))
    run.step()
    before = run.state()
    for plant in ({"gradient": INF}, {"loss": NAN}):
        assert run.step(**plant).found_inf.item() == 1.0
        assert same_bits(run.state(), before)
    assert run.scale.steps_skipped.item() == 2
    assert run.scale.scale.item() == 64.0


def test_a_batch_norm_that_saw_inf_is_put_back_and_without_skipping_it_is_not():
    run = Run()
    run.step()
    statistics = {name: b.clone() for name, b in run.model.named_buffers()}
    run.step(inputs=1e6)
    for name, buffer in run.model.named_buffers():
        assert torch.equal(buffer, statistics[name]), name
    careless = Run(scale=NoLossScale())
    careless.step(inputs=1e6)
    assert not torch.isfinite(careless.model[1].running_var).all()
    assert not torch.isfinite(careless.model[0].weight).all()


def test_a_skipped_micro_batch_skips_the_step():
    run = Run()
    before = run.state()
    run.optimizer.zero_grad()
    for loss in (1.0, INF, 1.0):
        outputs = run.model(torch.ones(5, 6).half() * torch.arange(5).half()[:, None]).float()
        run.optimizer.backward(outputs.square().mean() * loss)
    assert run.optimizer.step().found_inf.item() == 1.0
    run.scale.update()
    assert same_bits(run.state(), before)
    assert run.scale.steps_skipped.item() == 1


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_400_overflows_and_a_finite_step(optimizer):
    run = Run(optimizer)
    before = run.state()
    for _ in range(400):
        run.step(gradient=INF)
    assert same_bits(run.state(), before)
    assert run.scale.scale.item() == run.scale.min_scale > 0
    assert bool(run.scale.collapsed())
    run.step()
    assert all(torch.isfinite(t).all() for t in tree_leaves(run.state()))
    assert not same_bits(run.state(), before)


def test_torch_s_fused_sgd_alone_keeps_an_uninitialised_buffer():
    """The trap that `initialise_state` closes: the buffer that a skipped first step leaves behind
    is not the zero (or gradient) that the next step needs."""
    own, expected = (nn.Parameter(torch.ones(4096)) for _ in range(2))
    made = [torch.optim.SGD([p], 0.1, 0.9, fused=True) for p in (own, expected)]
    own.grad = torch.full_like(own, INF)
    made[0].found_inf = torch.ones(())
    # Memory that holds something, so that "uninitialised" shows.
    junk = [torch.full((4096,), 7.0) for _ in range(64)]
    del junk
    made[0].step()
    del made[0].found_inf
    # torch says only that the buffer exists now; a first step would have made it the gradient.
    assert "momentum_buffer" in made[0].state[own]
    assert torch.equal(own, torch.ones(4096))

    run, clean = Run("sgd", "fused"), Run("sgd", "fused")
    run.step(gradient=INF)
    for state in run.optimizer.inner.state.values():
        assert torch.equal(state["momentum_buffer"], torch.zeros_like(state["momentum_buffer"]))
    clean.scale.scale.copy_(run.scale.scale)
    run.step()
    clean.step()
    assert same_bits(run.state(), clean.state())


def test_an_optimizer_that_cannot_be_skipped_is_refused():
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    with pytest.raises(ValueError, match="RMSprop.*SGD, Adam"):
        step_unless(torch.optim.RMSprop([parameter]), torch.zeros(()))


def test_a_rate_that_decays_with_skipped_steps_is_refused():
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    with pytest.raises(ValueError, match="lr_decay"):
        step_unless(torch.optim.Adagrad([parameter], lr_decay=0.1), torch.zeros(()))


def test_dampening_is_refused():
    with pytest.raises(ValueError, match="dampening=0.5"):
        MixedPrecisionOptimizer(
            cast_model(nn.Linear(2, 2), get_policy("amp")),
            lambda named: torch.optim.SGD([t for _, t in named], 0.1, 0.9, dampening=0.5),
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("implementation", ["foreach", "loop"])
def test_16_bit_parameters_do_move(dtype, implementation):
    """torch's fused SGD leaves half parameters on a CPU as they are, without a word."""
    mode = "fp16_naive" if dtype == torch.float16 else "bf16_naive"
    run = Run("sgd", implementation, mode, StaticLossScale(64.0))
    before = [p.clone() for p in run.model.parameters()]
    run.step()
    # The bias in front of BatchNorm has no gradient.
    moved = [not torch.equal(a, b) for a, b in zip(before, run.model.parameters(), strict=True)]
    assert moved[0] and moved[-2] and moved[-1]
