"""Exponent histograms against numpy's float16, exactly."""

import numpy as np
import pytest
import torch

from mprun.numerics.exponent_counter import exponent_counts
from mprun.numerics.exponent_shares import BINS, ExponentCounts

from ..helpers import without_waiting


def counted(values) -> ExponentCounts:
    return ExponentCounts(exponent_counts([torch.as_tensor(values)])[0].numpy())


def reference(values: np.ndarray, k: int) -> tuple[int, int, int]:
    """(underflow, subnormal, overflow) counts from numpy's conversion of the exact product.

    A float32 times 2^k with |k| <= 400 is exact in float64 (exponents -549..527, 24 bits), and
    numpy converts float64 to float16 in one rounding.
    """
    values = values[np.isfinite(values) & (values != 0)].astype(np.float64)
    with np.errstate(over="ignore", under="ignore"):
        rounded = np.ldexp(values, k).astype(np.float16)
    zero = rounded == 0
    subnormal = ~zero & (np.abs(rounded.astype(np.float64)) < 2.0**-14)
    return int(zero.sum()), int(subnormal.sum()), int(np.isinf(rounded).sum())


def assert_shares_equal(values: np.ndarray, ks) -> None:
    counts = counted(values)
    nonzero = int((np.isfinite(values) & (values != 0)).sum())
    assert counts.nonzero == nonzero
    for k in ks:
        shares = counts.shares(k)
        found = tuple(
            round(s * nonzero) for s in (shares.underflow, shares.subnormal, shares.overflow)
        )
        assert found == reference(values, k), k


@pytest.mark.parametrize("apart", [9, pytest.param(1, marks=pytest.mark.slow)])
def test_every_exponent_and_every_mantissa_near_a_boundary_at_every_scale(apart):
    """All 254 normal exponents times the mantissas at which the rounding can change."""
    ends = [0, 1, 2, 3, 2**11, 2**12 - 1, 2**12, 2**12 + 1, 2**13 - 1, 2**13, 2**13 + 1, 2**22]
    mantissas = np.array(sorted({*ends, *(2**23 - e for e in ends if e)}), np.uint32)
    fields = np.arange(1, 255, dtype=np.uint32)
    bits = (fields[:, None] << 23 | mantissas).ravel()
    values = np.concatenate([bits, bits | np.uint32(1 << 31)]).view(np.float32)
    assert_shares_equal(values, range(-160, 180, apart))


def test_all_float32_between_zero_and_a_subnormal_float16_by_stride():
    """65,536 bit patterns spread evenly over all of float32: zeros, subnormals, inf and NaN too."""
    bits = (np.arange(2**16, dtype=np.uint64) * 65537 % 2**32).astype(np.uint32)
    values = bits.view(np.float32)
    assert_shares_equal(values, (-40, -24, -1, 0, 1, 15, 40, 130))
    counts = counted(values)
    assert counts.total == 2**16
    assert counts.nan == int(np.isnan(values).sum())
    assert counts.inf == int(np.isinf(values).sum())
    assert counts.zeros == int((values == 0).sum())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_all_patterns_of_the_16_bit_formats(dtype):
    tensor = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    values = tensor.float().numpy()
    counts = counted(tensor)
    assert counts == counted(values)
    assert counts.zeros == 2
    assert counts.inf == 2
    assert counts.nan == 2 * (2 ** (10 if dtype is torch.float16 else 7) - 1)
    # At every scale: the test of every exponent.
    assert_shares_equal(values, (-45, -24, -14, -1, 0, 1, 9, 15, 31, 59))


def test_subnormals_of_float32_have_their_true_exponent():
    values = np.ldexp(1.0, np.arange(-149, -125)).astype(np.float32)
    assert counted(values).by_exponent() == dict.fromkeys(range(-149, -125), 1)
    largest = np.uint32(0x7FFFFF).view(np.float32)  # (1 - 2^-23) * 2^-126
    assert counted(np.array([largest])).by_exponent() == {-127: 1}
    assert_shares_equal(np.arange(1, 2**15, dtype=np.uint32).view(np.float32), range(100, 170))


@pytest.mark.parametrize(
    ("value", "exponent", "headroom"),
    [(65504.0, 15, 0), (65519.0, 15, 0), (65520.0, 15, -1), (32768.0, 15, 0), (1.0, 0, 15)]
    + [(2.0**-149, -149, 164), (2 - 2.0**-11, 0, 14), (2 - 2.0**-10, 0, 15), (3e38, 127, -112)],
)
def test_headroom_is_the_last_power_of_two_that_stays_finite(value, exponent, headroom):
    counts = counted(np.array([0.0, value / 2, -value, np.inf, np.nan], np.float32))
    assert (max(counts.by_exponent()), counts.headroom) == (exponent, headroom)
    exact = np.ldexp(np.float64(np.float32(value)), [headroom, headroom + 1])
    with np.errstate(over="ignore"):
        assert list(np.isfinite(exact.astype(np.float16))) == [True, False]


def test_nothing_to_count():
    empty = counted(np.zeros(0, np.float32))
    zeros = counted(np.zeros(7, np.float32))
    for counts in (empty, zeros, ExponentCounts()):
        assert counts.headroom is None
        assert np.isnan(counts.shares()).all() and counts.by_exponent() == {}
    assert (empty.total, zeros.total, zeros.zeros) == (0, 7, 7)


def test_shape_layout_and_size_do_not_matter():
    """Also over several chunks, and with strides that are not those of a dense tensor."""
    values = torch.randn(3, 5, 211, 97, generator=torch.Generator().manual_seed(0)) * 1e-6
    counts = counted(values.clone())
    assert counts.total == values.numel() > 2**18
    assert counts == counted(values.flatten())
    assert counts == counted(values.to(memory_format=torch.channels_last))
    assert counts == counted(values[..., ::2]).merge(counted(values[..., 1::2]))
    assert counted(values[0]) != counts


def test_several_tensors_at_once_and_one_by_one():
    """Small ones share their operations, large ones are cut, and dtypes may differ."""
    generator = torch.Generator().manual_seed(2)
    shapes = [(3,), (), (40, 50), (70_000,), (0,), (8, 3, 5, 5), (2**18 + 3,), (9,)]
    tensors = [torch.randn(shape, generator=generator) * 1e-5 for shape in shapes]
    tensors[2], tensors[7] = tensors[2].half(), tensors[7].bfloat16()
    tensors[5] = tensors[5].to(memory_format=torch.channels_last)
    rows = exponent_counts(tensors)
    assert rows.shape == (len(shapes), BINS)
    for row, tensor in zip(rows, tensors, strict=True):
        assert torch.equal(row, exponent_counts([tensor])[0])
        assert row.sum() == tensor.numel()


def test_json_and_back():
    values = np.array([0, -0.0, 1, 1.5, 2 - 2.0**-10, 2 - 2.0**-11, 1e-45, np.inf, np.nan, np.nan])
    counts = counted(values.astype(np.float32))
    assert counts.to_json() == {
        "zeros": 2,
        "inf": 1,
        "nan": 2,
        "classes": [{"-149": 1, "0": 1}, {"0": 1}, {"0": 1}, {"0": 1}],
    }
    back = ExponentCounts.from_json(counts.to_json())
    assert (back.zeros, back.inf, back.nan, back.total) == (2, 1, 2, 10)
    assert back == counts


@pytest.mark.parametrize(
    "damage", [{"classes": [{}] * 3}, {"classes": [{"128": 1}, {}, {}, {}]}, {"zeros": -1}]
)
def test_json_that_is_no_histogram(damage):
    content = ExponentCounts().to_json() | damage
    with pytest.raises(ValueError, match="must be|negative"):
        ExponentCounts.from_json(content)


def test_what_is_refused():
    with pytest.raises(TypeError, match="float64"):
        exponent_counts([torch.zeros(3, dtype=torch.float64)])
    with pytest.raises(ValueError, match=str(BINS)):
        ExponentCounts(np.zeros(5))


@pytest.mark.gpu
def test_the_same_on_a_gpu_without_waiting():
    bits = (torch.arange(2**18, dtype=torch.int64) * 16411 % 2**32).to(torch.int32)
    values = bits.view(torch.float32)
    on_gpu = values.cuda()
    exponent_counts([on_gpu])
    with without_waiting():
        counts = exponent_counts([on_gpu])
    assert torch.equal(counts.cpu(), exponent_counts([values]))
