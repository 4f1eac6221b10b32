"""Computations of modules between their calls of others are measured, forward and backward."""

import json
import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from mprun.numerics.exponent_shares import ExponentCounts
from mprun.numerics.probe_record import (
    MOST,
    OperationStats,
    Place,
    ProbeRecord,
    TensorStats,
    most_notable,
    read_probe,
    write_probe,
)
from mprun.numerics.trace import Operation, name_of, operands

from .small_runs import classification, probed

INF = math.inf


class Batches:
    samples_per_batch, batches_per_epoch = 6, 10

    def __init__(self, dtype=torch.float32):
        self.inputs = torch.randn(6, 4, 5, generator=torch.Generator().manual_seed(1)).to(dtype)

    def train_batch(self, index):
        return self.inputs, torch.arange(6) % 3


class Scores(nn.Module):
    def __init__(self, gain):
        super().__init__()
        self.q, self.k, self.gain = nn.Linear(5, 5), nn.Linear(5, 5), gain

    def forward(self, x):
        self.scores = self.q(x) * self.gain @ self.k(x).transpose(1, 2)
        if self.scores.requires_grad:
            self.scores.retain_grad()
        return torch.softmax(self.scores, -1) @ x


class Net(nn.Module):
    def __init__(self, inner, again=False):
        super().__init__()
        self.inner, self.head, self.again = inner, nn.Linear(5, 3), again

    def forward(self, x):
        x = checkpoint(self.inner, x, use_reentrant=False) if self.again else self.inner(x)
        self.mean = x.mean(1)
        return self.head(self.mean)


def task_of(inner, mode="fp32", again=False):
    torch.manual_seed(0)
    return classification(Net(inner(), again), Batches(), mode)


def of_inner(make):
    """Operations of a module's forward pass."""
    found = probed(task_of(make))["model"].operations.items()
    return {place.operation: own for place, own in found if place[:2] == ("forward", "inner")}


def test_magnitudes_are_those_of_a_float64_reference():
    """Forward and backward; FP32's products of 5 numbers are within 5 * 2^-24 of their sum."""
    found = probed(task_of(partial(Scores, 2.0)))["model"].operations
    torch.manual_seed(0)
    reference = Net(Scores(2.0)).double()
    inputs, labels = Batches(torch.float64).train_batch(0)
    outputs = reference(inputs)
    outputs.retain_grad()
    cross_entropy(outputs, labels).backward()
    scores, of_mean = reference.inner.scores, outputs.grad @ reference.head.weight
    close = partial(pytest.approx, rel=1e-5)
    expected = {
        ("forward", "inner", "bmm"): scores.abs().max(),
        ("forward", "", "mean"): reference.mean.abs().max(),
        ("backward", "inner", "_softmax_backward_data"): scores.grad.abs().max(),
        ("backward", "", "div"): of_mean.abs().max() / 4,  # of the mean, in front of a layer
        ("backward", "loss", "_log_softmax_backward_data"): outputs.grad.abs().max(),
    }
    assert {key: found[Place(*key)].stats.amax for key in expected} == {
        key: close(value.item()) for key, value in expected.items()
    }
    # Both products of the module: 6 x 4 x 4 and 6 x 4 x 5.
    assert found[Place("forward", "inner", "bmm")].stats.counts.total == 6 * 4 * (4 + 5)
    # Layers are measured by their outputs.
    assert not any(place.operation in ("addmm", "mm") for place in found)


def test_a_run_in_16_bits_says_what_overflowed():
    # Softmax reads the infinities of bmm.
    for inner, operation in ((partial(Scores, 3e4), "bmm"), (InPlace, "pow_")):
        found = probed(task_of(inner, "fp16_master"))["model"]
        overflows = {at: own.overflows for at, own in found.operations.items() if own.overflows}
        assert overflows == {Place("forward", "inner", operation): 1}
    assert found.reach == {}  # the layer inside is none of the model's


class InPlace(nn.Module):
    """3000 squared is beyond FP16; it goes through a layer that the model does not contain."""

    def forward(self, x):
        return x + 1 / nn.Identity()(x * 0 + 3000).pow_(2)


@pytest.mark.parametrize("gain", [1.0, 3e4])
def test_what_is_computed_anew_is_measured_once(gain):
    tasks = (task_of(partial(Scores, gain), again=again) for again in (False, True))
    once, twice = (probed(task)["model"] for task in tasks)
    assert once.operations == twice.operations
    assert once.reach == twice.reach


class Divides(nn.Module):
    """Powers of two, so that all is exact; x is only a shape."""

    def forward(self, x):
        ones = x * 0 + 1
        large = ones * 2.0**17
        ratio = large / (ones * 2.0**-30)
        return torch.log2(ratio) * ones + torch.rsqrt(ones * 2.0**-40) + ones.pow(2)


class Masks(nn.Module):
    """Masks as code sets them: infinite, and the smallest number of the dtype."""

    def forward(self, x):
        where = torch.ones(4, 5, dtype=torch.bool).triu(1)
        first = (x * 0 + 3).masked_fill(where, -INF)
        second = first + torch.full((4, 5), -INF).triu(1).nan_to_num(0.0, 0.0, -INF)
        third = torch.where(where, torch.finfo(x.dtype).min, x * 0 + 2)
        return torch.softmax(second, -1) + torch.softmax(third, -1)


def test_divisors_by_hand():
    rows = of_inner(Divides)
    assert rows["div"].stats.amax == 2.0**47
    assert rows["div"].divisor == 2.0**-30
    assert rows["log2"].divisor == 2.0**47
    assert rows["rsqrt"].divisor == 2.0**-40
    assert rows["mul"].stats.amax == 2.0**17
    assert rows["pow"].divisor is None
    assert rows["mul"].divisor is None
    # 2^17 twice in a net's x * 0 + 1, and what of 2^-40 is left.
    assert rows["mul"].lost() == pytest.approx(0, abs=1e-6)


def test_masks_are_no_results():
    rows = of_inner(Masks)
    assert rows["masked_fill"].stats.amax == rows["add"].stats.amax == 3
    assert rows["masked_fill"].stats.counts.inf == 6 * 10
    assert rows["where"].stats.amax == 2
    assert not any(own.overflows for own in rows.values())


class Calls(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = operands(Operation(func, name_of(func), args, kwargs or {}))
        self.operands = [("r" * o.read + "w" * o.written + "0" * o.singular_at_zero) for o in found]
        return func(*args, **(kwargs or {}))


OPERANDS = {
    "a.add_(b)": ["rw", "r"],
    "a.copy_(b)": ["w", "r"],
    "a.fill_(2.0)": ["w"],
    "a.uniform_()": ["w"],
    "torch.add(a, b, out=c)": ["r", "r", "w"],
    "torch._foreach_add_([a, b], [b, c])": ["rw", "rw", "r", "r"],
    "torch._foreach_copy_([a, b], [b, c])": ["w", "w", "r", "r"],
    "a / b": ["r", "r0"],
    "torch.addcdiv(a, b, c)": ["r", "r", "r0"],
    "a.rsqrt()": ["r0"],
    "a.exp()": ["r"],
    "a.view(2, 1)": ["r"],
}


@pytest.mark.parametrize("call", OPERANDS)
def test_what_a_call_reads_writes_and_divides_by(call):
    names = dict(zip("abc", torch.ones(3, 2).unbind(), strict=True)) | {"torch": torch}
    with Calls() as calls:
        eval(call, names)
    assert calls.operands == OPERANDS[call]


def stats(amax, **more):
    exponent = {str(math.frexp(amax)[1] - 1): 1}
    content = {"zeros": 0, "inf": 0, "nan": 0, "classes": [exponent, {}, {}, {}]}
    return OperationStats(TensorStats(ExponentCounts.from_json(content), amax, "fp32"), **more)


def test_a_probe_keeps_the_most_notable_rows_in_order(tmp_path):
    rows = {Place("forward", f"{n:02}", "mul"): stats(2.0**-n) for n in range(60)}
    rows[Place("forward", "59", "div")] = stats(2.0**-20, divisor=2.0**-60)
    rows[Place("backward", "", "sum")] = stats(2.0**-20, overflows=3)
    rows[Place("backward", "", "mul")] = stats(0.0)
    kept = most_notable(rows)
    assert [place.module for place in kept][:MOST] == [f"{n:02}" for n in range(MOST)]
    assert len([place for place, own in kept.items() if own.lost() == 1]) == MOST
    assert Place("forward", "59", "div") in kept
    assert Place("backward", "", "sum") in kept
    assert len(kept) == 2 * MOST + 2
    own = probed(task_of(partial(Scores, 3e4)))["model"]
    record = ProbeRecord(1, False, {"loss_scale": 0.0}, {"model": own})
    path = write_probe(tmp_path, record)
    assert read_probe(path) == record
    assert "beyond" not in str(record)
    assert "by bmm in inner" in str(record)
    # Of an earlier mprun.
    content = json.loads(path.read_text())
    for learner in content["learners"].values():
        del learner["operations"], learner["reach"]
    path.write_text(json.dumps(content))
    assert read_probe(path).learners["model"].operations == {}
