"""Networks that FP16 cannot hold between their layers: named, and cured by what is named."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import normalize

from mprun.extensions.diagnosis.advised_regions import layout, operations_in_fp32, seen_in_16_bits
from mprun.numerics.probe import Probe, chosen_modules
from mprun.numerics.probe_record import Place, ProbeRecord
from mprun.precision.loss_scale import get_loss_scale
from mprun.tasks import Classification

from ...helpers import making, mixed
from .planted import Applied

F32 = torch.float32


class Batches:
    samples_per_batch, batches_per_epoch = 8, 10

    def train_batch(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(8, 6, 8, generator=generator), torch.arange(8) % 4


class Net(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(8, 8), inner, nn.Linear(8, 4)

    def forward(self, x):
        return self.last(self.inner(torch.tanh(self.first(x))).mean(1))


class Attention(nn.Module):
    def __init__(self, gain):
        super().__init__()
        self.q, self.k, self.gain = nn.Linear(8, 8), nn.Linear(8, 8), gain

    def forward(self, x):
        q, k = self.q(x) * self.gain, self.k(x) * self.gain
        return torch.softmax(q @ k.transpose(1, 2), -1) @ x


def log_of_softmax(x):
    return torch.log(torch.softmax(x * 30, -1) + 1e-9)


def ratio(x):
    return x / (x.square().mean(-1, keepdim=True) * 1e-8) * 1e-8


class Unit(nn.Module):
    """A norm as RMSNorm has it; wide: in FP32, whatever the mode."""

    def __init__(self, wide):
        super().__init__()
        self.wide = wide

    def forward(self, x):
        own = x.float() if self.wide else x
        own = own * 1e3
        return (own * own.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt()).to(x.dtype)


class Scaled(Net):
    """It scales between its layers, one of which reads the large numbers."""

    def __init__(self):
        super().__init__(nn.Linear(8, 8))

    def forward(self, x):
        large = self.inner(torch.tanh(self.first(x)) * 3e5)
        return self.last(torch.tanh(large * 1e-5).mean(1))


class Block(nn.Module):
    """It returns a large number to the model, which hands it to a layer."""

    def __init__(self):
        super().__init__()
        self.own = nn.Linear(8, 8)

    def forward(self, x):
        return self.own(x) * 3e5


class Healthy(nn.Module):
    """Masks, tiny probabilities and norms of what may be zero in FP32: all fit into FP16."""

    def __init__(self):
        super().__init__()
        self.q, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x):
        scores = self.q(x) @ x.transpose(1, 2) / 8**0.5
        mask = torch.ones(6, 6, dtype=torch.bool).triu(1)
        lowest = scores.masked_fill(mask, torch.finfo(scores.dtype).min)
        weights = torch.softmax(scores.masked_fill(mask, -torch.inf) * 8, -1)
        return self.norm((weights + torch.softmax(lowest, -1)) @ normalize(x + 1, dim=-1))


CASES = {
    "attention scores": (lambda: Net(Attention(600)), ("inner.forward",)),
    "log(softmax)": (lambda: Net(Applied(log_of_softmax)), ("inner",)),
    "division": (lambda: Net(Applied(ratio)), ("inner",)),
    "a norm": (lambda: Net(Unit(False)), ("inner",)),
    "scaling": (Scaled, ("forward", "inner")),
    "returned": (lambda: Net(Block()), ("inner.forward", "forward", "last")),
}


def task_of(make, mode="fp32", patterns=(), scaler="none"):
    torch.manual_seed(0)
    overrides, scale = dict.fromkeys(patterns, F32), get_loss_scale(scaler, torch.device("cpu"))
    learner = mixed(make(), mode, making(torch.optim.Adam, 1e-3), scale, overrides=overrides)
    context = learner.prepared.forward_context
    return Classification(learner, Batches(), context.policy, context, scale)


def named(make, mode=None):
    """The patterns that one probed step in FP32 names; mode: looked at, too."""
    task = task_of(make)
    with Probe(task, chosen_modules(task.learners, ())) as probe:
        metrics = task.train_step(0)
    own, _ = probe.read([metrics["loss"]])
    narrow = None if mode is None else seen(task_of(make, mode))
    record = ProbeRecord(1, False, {"loss_scale": 0.0}, own)
    found = operations_in_fp32([record], layout(task), narrow)
    return [one.patterns for _, one in found]


def seen(task):
    stepper = SimpleNamespace(eager_step=task.train_step)
    return seen_in_16_bits(SimpleNamespace(task=task, stepper=stepper))


def losses(make, mode, patterns=()):
    task = task_of(make, mode, patterns, "dynamic")
    rows = [task.train_step(step) for step in range(24)]
    return torch.stack([row["loss"] for row in rows]), rows[-1]["found_inf"].item()


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_what_is_named_cures(case):
    make, expected = CASES[case]
    patterns = named(make, "fp16_master_scaled")
    assert {own for one in patterns for own in one} == set(expected)
    assert len(patterns[0]) == len(expected)
    plain, skipped = losses(make, "fp16_master_scaled")
    reference, _ = losses(make, "fp32")
    # Without it no update is applied, or the overflow of a division has taken what it computes.
    assert skipped or (plain - reference).abs().max() > 0.01
    for mode in ("fp16_master_scaled", "amp"):
        cured, skipped = losses(make, mode, expected)
        assert not skipped
        # Five roundings by 2^-11, of logits of size 1 or of the size of the loss.
        torch.testing.assert_close(cured[:1], reference[:1], rtol=2.0**-10, atol=5 * 2.0**-10)


@pytest.mark.parametrize("make", [lambda: Net(Healthy()), lambda: Net(Unit(True))])
@pytest.mark.parametrize("mode", ["fp16_master_scaled", "amp"])
def test_a_healthy_network_has_no_override(make, mode):
    assert named(make, mode) == []


def test_autocast_computes_a_logarithm_of_softmax_in_fp32():
    make, _ = CASES["log(softmax)"]
    assert named(make, "amp") == []
    rows = seen(task_of(make, "amp"))
    assert rows["model", Place("forward", "inner", "log")] is False
    assert rows["model", Place("forward", "", "tanh")] is True


def test_a_mask_that_no_fp16_tensor_takes_says_nothing():
    def mask(x):
        raise RuntimeError("value cannot be converted to type c10::Half without overflow")

    assert seen(task_of(lambda: Net(Applied(mask)), "fp16_master")) == {}
