"""Tensors gathered under keys: merged, sampled where they are large, as they were when added."""

import math

import pytest
import torch

from mprun.numerics.exponent_counter import SAMPLED_FROM, Tally, exponent_counts, sampling_stride
from mprun.numerics.exponent_shares import ExponentCounts


def finished(tally: Tally) -> Tally:
    tally.finish()
    return tally


def numbers(tally: Tally, key="k") -> ExponentCounts:
    return ExponentCounts(tally.counts[key].numpy())


def random(*shape, scale=1.0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(7)) * scale


@pytest.mark.parametrize(
    ("shape", "stride"),
    [
        ((SAMPLED_FROM,), 1),
        ((), 1),
        ((0, 5), 1),
        ((SAMPLED_FROM + 1,), 2),
        ((1024, 3000), 13),  # 3,072,000 values: 12 would do, but it meets a quarter of the columns
        ((2**20, 1), 5),
    ],
)
def test_strides_have_no_factor_of_a_dimension(shape, stride):
    assert sampling_stride(torch.empty(shape)) == stride


def test_a_large_tensor_is_sampled_and_weighs_as_much_as_it_has_values():
    values = random(1024, 3000, scale=1e-5)
    values[3, 5] = -70000.0  # at 9005, which no multiple of 13 is
    tally = Tally()
    tally.add("k", values)
    tally.add("k", torch.ones(100))
    found = numbers(finished(tally))
    expected = (
        exponent_counts([values.flatten()[::13]])[0] * 13 + exponent_counts([torch.ones(100)])[0]
    )
    assert found == ExponentCounts(expected.numpy())
    assert abs(found.total - values.numel() - 100) < 13
    assert tally.strides == {"k": 13} and tally.amax["k"] == 70000
    # Six standard deviations of a share p of n values: 6 * sqrt(p * (1 - p) / n).
    exact, near = (
        c.shares(-2).underflow for c in (ExponentCounts(exponent_counts([values])[0]), found)
    )
    assert abs(exact - near) < 6 * math.sqrt(exact * (1 - exact) * 13 / values.numel())


@pytest.mark.parametrize("size", [10, 20_000, 100_000])
def test_values_count_as_they_are_when_added(size):
    """Small tensors wait, so they are copied; what happens to them later does not matter."""
    values = random(size)
    expected = ExponentCounts(exponent_counts([values])[0].numpy())
    tally = Tally()
    tally.add("k", values)
    values.zero_()
    assert numbers(finished(tally)) == expected


def test_keys_dtypes_and_what_is_not_counted():
    tally = Tally()
    for number in range(300):
        tally.add(number % 3, random(number + 1))
    tally.add(0, random(5).half())
    tally.add("none", torch.zeros(0))
    tally.add("none", torch.ones(3, dtype=torch.int64))
    finished(tally)
    assert set(tally.counts) == {0, 1, 2}
    assert numbers(tally, 1).total == sum(range(2, 301, 3))
    assert tally.dtypes == {
        0: {torch.float32, torch.float16},
        1: {torch.float32},
        2: {torch.float32},
    }


def test_the_largest_value():
    tally = Tally()
    tally.add("a", torch.tensor([1.0, -3.0]))
    tally.add("a", torch.tensor([2.0]).half())
    tally.add("inf", torch.tensor([1.0, -math.inf]).bfloat16())
    tally.add("nan", torch.tensor([math.inf, math.nan]))
    tally.add("nan", torch.tensor([1.0]))
    assert (tally.amax["a"], tally.amax["inf"]) == (3, math.inf)
    assert math.isnan(tally.amax["nan"])
