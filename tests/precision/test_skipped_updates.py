"""A step with a non-finite gradient leaves everything bit for bit as it was and counts once."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from mprun.precision import DynamicLossScale, DynamicRule, NoLossScale, StaticLossScale
from mprun.precision.torch_update import (
    creates_late,
    host_decides,
    initialise_state,
    moved_by,
    path_of,
    skipping,
)
from mprun.tasks import OfParameters

from .. import helpers
from ..helpers import assert_same_bits, making, mixed
from .rules import IMPLEMENTATIONS, OTHERS, RULES, Foreign

INF, NAN = float("inf"), float("nan")
MAKERS = RULES | {"amsgrad": partial(torch.optim.Adam, lr=0.01, amsgrad=True)}


class Run:
    """A small network with BatchNorm; `step(plant)` multiplies one gradient or the loss by it."""

    def __init__(self, optimizer="momentum", implementation="fused", scale=None):
        self.model = model = helpers.network(hidden=8, norm=nn.BatchNorm1d)
        self.scale = scale or DynamicLossScale(DynamicRule(2.0**8, growth_interval=4))
        make = making(MAKERS[optimizer], **IMPLEMENTATIONS[implementation])
        self.learner = mixed(model, "fp16_master", make, self.scale)
        self.factor = 1.0
        model[3].bias.register_hook(lambda gradient: gradient * self.factor)

    def step(self, gradient=1.0, loss=1.0, inputs=1.0):
        self.factor = gradient
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(7)) * inputs
        return helpers.one_step(self.learner, x, lambda y: y.square().mean() * loss)

    def state(self):
        return copy.deepcopy(self.learner.state_dict())

    def has_moved(self, before):
        """Return whether any bit differs from that state."""
        pairs = zip(tree_leaves(self.state()), tree_leaves(before), strict=True)
        return not all(map(torch.equal, *zip(*pairs, strict=True)))


PLANTS = {
    "inf in one gradient": {"gradient": INF},
    "nan in one gradient": {"gradient": NAN},
    "inf in the loss": {"loss": INF},
    "overflow in the forward pass": {"inputs": 1e6},
}


@pytest.mark.few(14)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("optimizer", MAKERS)
@pytest.mark.parametrize("first", [True, False], ids=["first step", "third step"])
def test_nothing_moves(optimizer, implementation, first):
    """A first step counts, too, after which torch's fused SGD alone has an uninitialised buffer."""
    run, clean = Run(optimizer, implementation), Run(optimizer, implementation)
    for _ in range(0 if first else 2):
        assert run.step().found_inf.item() == 0.0
        clean.step()
    before = run.state()
    for count, plant in enumerate(PLANTS.values(), start=1):
        assert run.step(**plant).found_inf.item() == 1.0
        assert_same_bits(run.state(), before)
        assert run.scale.steps_skipped.item() == run.scale.consecutive_skips.item() == count
        assert run.scale.scale.item() == 2.0 ** (8 - count)
    # And afterwards it goes on as if the skipped steps had not been: an untouched twin with the
    # same scale ends in the same place.
    clean.scale.scale.copy_(run.scale.scale)
    for _ in range(3):
        assert run.step().found_inf.item() == 0.0
        clean.step()
    assert_same_bits(run.state(), clean.state())
    assert run.has_moved(before)


@pytest.mark.filterwarnings("ignore:input .* values become infinite in fp16")
def test_a_batch_norm_that_saw_inf_is_put_back_and_without_skipping_it_is_not():
    run = Run()
    run.step()
    statistics = copy.deepcopy(dict(run.model.named_buffers()))
    run.step(inputs=1e6)
    assert_same_bits(dict(run.model.named_buffers()), statistics)
    careless = Run(scale=NoLossScale())
    careless.step(inputs=1e6)
    assert not torch.isfinite(careless.model[1].running_var).all()
    assert not torch.isfinite(careless.model[0].weight).all()


def test_a_skipped_micro_batch_skips_the_step():
    run = Run()
    before = run.state()
    run.learner.zero_grad()
    for loss in (1.0, INF, 1.0):
        (run.model(torch.ones(5, 6) * torch.arange(5)[:, None]).square().mean() * loss).backward()
    assert run.learner.step().found_inf.item() == 1.0
    assert_same_bits(run.state(), before)
    assert run.scale.steps_skipped.item() == 1


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("optimizer", MAKERS)
def test_a_step_that_no_host_stops_is_undone(optimizer, implementation, monkeypatch):
    """As on a GPU, where `skipping` neither knows nor asks what found_inf is."""
    monkeypatch.setattr("mprun.precision.torch_update._is_on_host", lambda flag: False)
    draw = torch.Generator().manual_seed(3)
    start = [torch.randn(3, 4, generator=draw), torch.randn(5, generator=draw)]
    kept, plain = ([own.clone() for own in start] for _ in range(2))
    how = IMPLEMENTATIONS[implementation]
    ours, theirs = (MAKERS[optimizer](own, **how) for own in (kept, plain))
    initialise_state(ours)
    for bad in (True, False, True, False):
        before = copy.deepcopy((kept, ours.state_dict()["state"]))
        for own, other in zip(kept, plain, strict=True):
            other.grad = torch.randn(own.shape, generator=draw)
            own.grad = other.grad * (INF if bad else 1.0)
        assert not host_decides(ours)
        with skipping(ours, torch.full((), float(bad))):
            ours.step()
        assert not hasattr(ours, "found_inf")  # which a later step would read
        if bad:
            assert_same_bits((kept, ours.state_dict()["state"]), before)
        else:
            theirs.step()
    assert_same_bits(kept, plain)


@pytest.mark.parametrize("optimizer", OTHERS)
def test_other_optimizers_skip_as_under_torch_amp(optimizer):
    """Bit for bit as with GradScaler, whose host decides, the first step's skip among them."""
    weights = {}
    for who in ("torch", "mprun"):
        model = helpers.network(hidden=8, activation=nn.Tanh)
        factor = [1.0]
        model[2].bias.register_hook(lambda gradient, factor=factor: gradient * factor[0])
        if who == "torch":
            inner = OTHERS[optimizer](list(model.parameters()))
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=4)
        else:
            scale = DynamicLossScale(DynamicRule(2.0**8, growth_interval=4))
            own = mixed(model, "fp32", making(OTHERS[optimizer]), scale)
        for step in range(12):
            factor[0] = INF if step in (0, 1, 6) else 1.0
            x = torch.randn(5, 6, generator=torch.Generator().manual_seed(step))
            loss = model(x).square().mean()
            if who == "torch":
                inner.zero_grad()
                scaler.scale(loss).backward()
                scaler.step(inner)
                scaler.update()
            else:
                own.zero_grad()
                loss.backward()
                own.step()
        weights[who] = [parameter.detach().clone() for parameter in model.parameters()]
    assert_same_bits(weights["mprun"], weights["torch"])
    assert all(weight.isfinite().all() for weight in weights["mprun"])


class Lookup(nn.Module):
    """Two rows of eight are used, one of them thrice."""

    def __init__(self, sparse):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(8, 4, sparse=sparse)

    def forward(self, factor):
        return self.table(torch.tensor([1, 5, 1, 1])) * factor


def looked_up(sparse, mode, make, **more):
    scale = DynamicLossScale(DynamicRule(2.0**8, growth_interval=4))
    model = Lookup(sparse)
    own, updates = mixed(model, mode, make, scale, **more), []
    for step in range(6):
        own.zero_grad()
        for part in (1.0, 2.0):  # two micro-batches
            factor = torch.tensor(INF if step in (0, 3) and part == 2 else part)
            (model(factor) * torch.arange(1.0, 5)).square().mean().backward()
        updates.append(own.step(measure=True))
    return model.table.weight.detach().clone(), [(u.found_inf.item(), u.grad_norm) for u in updates]


@pytest.mark.few(4)
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("mode", ["amp", "fp16_master", "fp16_naive"])
@pytest.mark.parametrize("rule", ["sgd", "adagrad"])
def test_sparse_gradients_are_skipped_and_clipped_as_dense_ones(rule, mode, clip):
    make = {
        "sgd": making(torch.optim.SGD, 0.05, foreach=False),
        "adagrad": making(torch.optim.Adagrad, 0.05, eps=1e-3, foreach=False),
    }[rule]
    (sparse, told), (dense, expected) = (
        looked_up(sparse, mode, make, clip=clip and OfParameters(clip)) for sparse in (True, False)
    )
    assert [found for found, _ in told] == [1, 0, 0, 1, 0, 0]
    # The three uses of a row are summed in FP32 here, by the native 16-bit kernel there.
    eps = torch.finfo(torch.float16).eps
    assert torch.allclose(sparse.double(), dense.double(), rtol=4 * eps, atol=4 * eps)
    for (_, own), (_, other) in zip(told, expected, strict=True):
        assert torch.allclose(own, other, rtol=4 * eps, equal_nan=True)


class Filter(nn.Module):
    """A loss of complex weights."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.filter = nn.Parameter(torch.randn(4, dtype=torch.complex64))

    def forward(self, x):
        x = x.float()  # a mode has cast it: there is no such transform of 16 bits
        # Of the conjugate, whose gradient is a lazy one.
        return (torch.fft.ifft(torch.fft.fft(x) * self.filter.conj()).real - x).square().mean()


@pytest.mark.parametrize("mode", ["fp32", "amp", "fp16_master_scaled"])
def test_complex_weights_keep_both_parts(mode):
    """Against a plain loop in complex64; a loss scale of a power of two changes no bit."""
    x = torch.randn(3, 4).half().float()
    make = making(torch.optim.SGD, 0.1, 0.9, foreach=False)
    scale = StaticLossScale(64.0) if mode != "fp32" else NoLossScale()
    own, plain = mixed(Filter(), mode, make, scale, clip=OfParameters(1e3)), Filter()
    theirs = make([*plain.named_parameters()])
    for _ in range(3):
        assert helpers.one_step(own, x, lambda loss: loss, measure=True).grad_norm > 0
        theirs.zero_grad()
        plain(x).backward()
        theirs.step()
    assert torch.equal(own.model.filter, plain.filter)
    assert plain.filter.imag.abs().max() > 0


def test_a_fused_step_whose_buffer_is_still_to_appear_is_stopped_by_the_host():
    """torch's fused SGD with dampening would keep a buffer that nobody has filled."""
    own = torch.ones(3, requires_grad=True)
    optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5, fused=True)([own])
    own.grad = torch.full((3,), INF)
    with skipping(optimizer, torch.ones(())):
        optimizer.step()
    assert torch.equal(own, torch.ones(3)) and not optimizer.state[own]
    own.grad = torch.ones(3)
    with skipping(optimizer, torch.zeros(())):
        optimizer.step()
    assert torch.equal(optimizer.state[own]["momentum_buffer"], own.grad)


def test_a_counter_on_the_host_counts_where_lr_decay_reads_it():
    """Parameters without memory stand for those of a GPU."""
    own = [nn.Parameter(torch.empty(2, device="meta")) for _ in range(2)]
    plain, decaying = torch.optim.Adagrad(own), torch.optim.Adagrad(own, lr_decay=0.1)
    assert (host_decides(plain), host_decides(decaying)) == (False, True)
    found = moved_by(plain)
    assert len(found) == 4 and all(tensor.is_meta for tensor in found)


def test_a_parameter_without_a_gradient_makes_no_step_wait():
    own = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = torch.optim.NAdam(own)
    own[0].grad = torch.ones(2)
    assert host_decides(optimizer)  # its state is still to appear
    optimizer.step()
    assert not host_decides(optimizer)


def test_groups_may_have_settings_of_their_own():
    def made(name, *values):
        groups = [{"params": [nn.Parameter(torch.ones(1))], name: value} for value in values]
        return torch.optim.SGD(groups, 0.1, 0.9)

    chosen = ((True, True), (True, False), (True, None), (False, False))
    found = [path_of(made("foreach", *values)) for values in chosen]
    assert found == ["foreach", "loop", "default", "loop"]
    dampened = [creates_late(made("dampening", *own)) for own in ((0, 0), (0, 0.5), (0.5, 0))]
    assert dampened == [False, True, True]


def test_an_optimizer_from_elsewhere_that_calls_itself_fused_is_stopped_by_the_host():
    own = torch.ones(3, requires_grad=True)
    optimizer = Foreign([own])
    optimizer.param_groups[0]["fused"] = True
    own.grad = torch.full((3,), INF)
    with skipping(optimizer, torch.ones(())):
        optimizer.step()
    assert torch.equal(own, torch.ones(3)) and optimizer.param_groups[0]["count"] == 0
