"""Tensors in objects that a call takes and returns are cast and widened as those of a tuple."""

import collections
import copy
import weakref
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from torch.distributions import Independent, Normal
from torch.nn import functional as F
from torch.testing import assert_close

import mprun
from mprun.precision import get_policy
from mprun.precision.audit import FIRST
from mprun.prepared.containers import each_tensor

from ..helpers import assert_same_bits
from .loops import Forward
from .networks import HALF_WEIGHTS, MODES, prepared, take_step

EDGES = torch.randint(6, (2, 12), generator=torch.Generator().manual_seed(0))


class Store:
    """As PyG's: a mapping, and a weak reference to the object that it is the store of."""

    def __init__(self, parent, mapping):
        self._mapping, self._parent = mapping, weakref.ref(parent)

    def __copy__(self):
        own = type(self).__new__(type(self))
        own.__dict__ |= {**self.__dict__, "_mapping": {**self._mapping}}
        return own


class Graph:
    """As PyG's Data: attributes are those of its store."""

    def __init__(self, x, edges):
        self.__dict__["store"] = Store(self, {"x": x, "edges": edges})

    def __getattr__(self, name):
        if "store" in self.__dict__ and name in self.store._mapping:
            return self.store._mapping[name]
        raise AttributeError(name)

    def __setattr__(self, name, value):
        self.store._mapping[name] = value

    def __copy__(self):
        own = type(self).__new__(type(self))
        own.__dict__["store"] = copy.copy(self.store)
        own.store._parent = weakref.ref(own)
        return own


class Slotted:
    __slots__ = ("edges", "x")

    def __init__(self, x, edges):
        self.x, self.edges = x, edges


class Encoding(collections.UserDict):
    """As transformers' BatchEncoding: attributes are entries."""

    def __init__(self, x, edges):
        super().__init__({"x": x, "edges": edges})

    def __getattr__(self, name):
        try:
            return self.__dict__["data"][name]
        except KeyError:
            raise AttributeError(name) from None


class Attributes(dict):
    """A dictionary whose entries are attributes too, as of transformers' outputs."""

    def __init__(self, x, edges):
        super().__init__(x=x, edges=edges)
        self.x, self.edges = x, edges


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    edges: torch.Tensor
    made: list = field(init=False, default_factory=list)


class Circle:
    """Parts that know each other."""

    def __init__(self, x, edges):
        self.parts = [Slotted(x, edges)]
        self.around = [self, self.parts]

    x = property(lambda self: self.around[0].parts[0].x)
    edges = property(lambda self: self.around[1][0].edges)


KINDS = [Graph, Slotted, Encoding, Attributes, Frozen, Circle]


class Net(nn.Module):
    """Sums over edges; `seen` has the dtype of its input."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.lift, self.head = nn.Linear(8, 12), nn.Linear(12, 4)

    def forward(self, x, edges):
        self.seen = x.dtype
        sums = torch.zeros_like(hidden := self.lift(x)).index_add(0, edges[1], hidden[edges[0]])
        return self.head(sums.relu())


class OfObject(Net):
    """The same of one object, whose outputs are in another."""

    def forward(self, batch):
        return type(batch)(super().forward(batch.x, batch.edges), batch.edges)


def trained(model, mode, call):
    _, optimizer = prepared(mode, model, lr=0.02)
    inputs = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))

    def loss():
        outputs = call(model, inputs)
        assert outputs.dtype is torch.float32
        return F.cross_entropy(outputs, torch.arange(6) % 4)

    for _ in range(5):
        take_step(optimizer, loss)
    return [*model.parameters()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.few(4)
def test_tensors_in_an_object_are_those_of_a_tuple(mode, kind):
    kept = kind(torch.ones(6, 8), EDGES)
    model = OfObject()
    own = trained(model, mode, lambda m, x: m(kind(x, EDGES)).x)
    assert_same_bits(own, trained(Net(), mode, lambda m, x: m(x, EDGES)))
    assert (model.seen is torch.float32) == (mode not in HALF_WEIGHTS)
    model(kept)
    assert kept.x.dtype is torch.float32 and kept.edges is EDGES


@pytest.mark.parametrize("kind", KINDS)
def test_an_object_of_which_nothing_changes_stays_itself(kind):
    own = kind(torch.ones(6, 8), EDGES)
    assert each_tensor(own, lambda tensor: tensor) is own
    with_double = each_tensor(own, lambda t: t.double() if t.is_floating_point() else t)
    assert with_double is not own and type(with_double) is kind
    assert with_double.x.dtype is torch.float64 and own.x.dtype is torch.float32
    if kind is Graph:  # its parts know the copy
        assert with_double.store._parent() is with_double and own.store._parent() is own


def mean_and_spread(model, x):
    return model.net(x), model.spread.exp().expand(6, 4)


def distribution(*parts):
    """As of reinforcement learning."""
    return Independent(Normal(*parts), 1)


# Its only linear layer is its output, which modes of 8 bits leave out.
@pytest.mark.parametrize("mode", [mode for mode in MODES if get_policy(mode).matmul is None])
@pytest.mark.few(4)
def test_a_distribution_is_of_fp32_with_unscaled_gradients(mode):
    """As of the mean and the spread that a model returns, from which the script makes it."""
    x, actions = torch.randn(6, 8), torch.randn(6, 4)
    found = []
    for act in (lambda *given: distribution(*mean_and_spread(*given)), mean_and_spread):
        torch.manual_seed(0)
        spread = {"spread": lambda: nn.Parameter(torch.zeros(4))}
        model = Forward(act, net=lambda: nn.Linear(8, 4), **spread)
        _, optimizer = prepared(mode, model, scaler="static")
        out = model(x)
        made = distribution(*out) if act is mean_and_spread else out
        assert made.base_dist.loc.dtype is torch.float32
        (-made.log_prob(actions).mean()).backward()
        optimizer.step()
        found.append([(own.detach(), own.grad) for own in model.parameters()])
    assert_same_bits(*found)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_whole_numbers_in_an_object_are_named():
    model = OfObject()
    mprun.prepare(model, None, "bf16_master")
    codes = torch.arange(48.0).view(6, 8) + 1000
    with pytest.warns(UserWarning, match="input batch: whole numbers change"):
        model(Slotted(codes, EDGES))


class Keeping(nn.Module):
    """Keeps its output in an attribute, in a list and in a dictionary of attributes."""

    def __init__(self):
        super().__init__()
        self.layer, self.own, self.listed, self.named = nn.Linear(8, 4), None, [], {}

    def forward(self, x):
        self.own = self.named["y"] = y = self.layer(x)
        self.listed[:] = [y]
        return y

    def kept(self):
        return [self.own, *self.listed, *self.named.values()]


@pytest.mark.parametrize("mode", ["bf16_master", "fp16_master_scaled", "amp"])
def test_what_a_call_keeps_in_attributes_is_an_output_too(mode):
    """In more steps than are watched, and where the script has emptied them meanwhile."""
    model = Keeping()
    _, optimizer = prepared(mode, model, lr=0.02)
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    for step in range(3 * FIRST):
        gradients = []
        for kept in ([], model.kept) if step % 2 else (model.kept, []):
            optimizer.zero_grad()
            output = model(x)
            parts = [output] * 4 if kept == [] else [output, *kept()]
            assert [part.dtype for part in parts] == [torch.float32] * 4
            torch.stack(parts).square().mean().backward()
            gradients.append(model.layer.weight.grad.clone())
        optimizer.step()
        # Three sums of 16-bit gradients, each rounded, beside one of FP32.
        assert_close(*gradients, rtol=4 * 2.0**-8, atol=0)
        model.listed.clear(), model.named.clear()


class Hooked(nn.Module):
    """Registers a hook on an activation."""

    def __init__(self, hook):
        super().__init__()
        self.first, self.second, self.hook = nn.Linear(8, 6), nn.Linear(6, 4), hook

    def forward(self, x):
        inside = self.first(x)
        inside.register_hook(hook=self.hook)
        return self.second(inside.relu())


@pytest.mark.parametrize(
    ("mode", "scaler"),
    [("bf16_master", "none"), ("fp16_master_scaled", "static"), ("amp", "static")],
)
def test_a_hook_of_an_activation_meets_and_returns_gradients_without_the_scale(mode, scaler):
    """A hook that says that it sees inside meets what is there."""

    def gradient(hook):
        torch.manual_seed(0)
        model, optimizer = prepared(mode, Hooked(hook), scaler=scaler)
        scales.add(float(mprun.state_of(optimizer).scale.scale))
        model(torch.ones(4, 8)).square().mean().backward()
        return model.first.weight.grad

    def doubled(own):
        seen.append(own.abs().max().item())
        return own * 2

    seen, scales = [], set()
    assert torch.equal(gradient(doubled), 2 * gradient(lambda own: None))
    doubled.sees_inside = True
    gradient(doubled)
    assert {seen[1] / seen[0]} == scales


class Prompted(nn.Linear):
    """Adds an attribute to its input; the mode leaves an attribute its dtype."""

    prompt: torch.Tensor

    def forward(self, x):
        return super().forward(x + self.prompt.to(x.dtype))


@pytest.mark.parametrize("mode", ["bf16_master", "fp16_master_scaled", "amp"])
def test_a_leaf_in_an_attribute_enters_as_an_input_does(mode):
    model = Prompted(8, 4)
    _, optimizer = prepared(mode, model, lr=0.02)
    for step in range(3 * FIRST):
        given = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(step))
        x, model.prompt = (one.clone().requires_grad_() for one in given)
        take_step(optimizer, lambda x=x: model(x).square().mean())
        assert x.grad.dtype is torch.float32 and torch.equal(x.grad, model.prompt.grad)
        assert 1e-4 < x.grad.abs().max() < 1  # without the loss scale


class Recurring(nn.Module):
    """Carries two states in attributes, one of them in a tuple."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.begin()

    def begin(self):
        self.own, self.pair = torch.zeros(2, 4), (torch.zeros(2, 4),)

    def forward(self, x):
        own, other = (torch.cat([x, one.to(x.dtype)], 1) for one in (self.own, *self.pair))
        self.own, self.pair = self.layer(own).tanh(), (self.layer(other).tanh(),)
        return self.own + self.pair[0]


@pytest.mark.parametrize(
    ("mode", "scaler"), [("fp32", "none"), ("bf16_master", "none"), ("amp", "static")]
)
def test_states_that_a_script_begins_anew_are_those_of_the_first_sequence(mode, scaler):
    """Whether calls are watched or not."""
    model, optimizer = prepared(mode, Recurring(), scaler=scaler)
    x, found = torch.randn(2, 4, generator=torch.Generator().manual_seed(1)), []
    for _ in range(3 * FIRST):
        outputs = [model(x), model(x)]
        assert (model.own.dtype, model.pair[0].dtype) == (torch.float32, torch.float32)
        optimizer.zero_grad()
        outputs[1].square().mean().backward()
        found.append([*(one.detach() for one in outputs), model.layer.weight.grad.clone()])
        model.begin()
    assert not torch.equal(*found[0][:2])
    for one in found[1:]:
        assert_same_bits(one, found[0])
