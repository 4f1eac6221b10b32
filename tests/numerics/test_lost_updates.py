"""Lost updates against exact rational arithmetic and numpy's float16."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from mprun.numerics.exponent_counter import lost_updates, read_counts
from mprun.numerics.exponent_shares import LostUpdates

# mantissa bits, smallest exponent of a normal, largest exponent
FORMATS = {"fp16": (10, -14, 15), "bf16": (7, -126, 127)}


def rounded(value: Fraction, format: str) -> Fraction | float:
    """Round to nearest, ties to even, in exact arithmetic; infinities as floats."""
    bits, low, high = FORMATS[format]
    if value == 0:
        return Fraction(0)
    magnitude = abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if Fraction(2) ** exponent > magnitude:
        exponent -= 1
    gap = Fraction(2) ** (max(exponent, low) - bits)
    result = round(magnitude / gap) * gap  # Python rounds a Fraction's halves to even
    sign = -1 if value < 0 else 1
    return sign * math.inf if result >= Fraction(2) ** (high + 1) else sign * result


def is_lost(w: float, u: float, format: str) -> bool:
    r = rounded(Fraction(float(w)), format)
    return r in (math.inf, -math.inf) or rounded(r + Fraction(float(u)), format) == r


def counted(w, u) -> LostUpdates:
    return read_counts(lost_updates([torch.as_tensor(w)], [torch.as_tensor(u)])[0].tolist())


def assert_exact(pairs) -> None:
    """Every pair by itself: a sum of counts could hide two errors."""
    w, u = np.array(list(pairs), np.float32).T
    singles = [torch.tensor([value]) for value in w], [torch.tensor([value]) for value in u]
    for row, a, b in zip(lost_updates(*singles).tolist(), w, u, strict=True):
        found = read_counts(row)
        assert found.total == 1
        assert found.zero == (b == 0)
        if b != 0:
            assert found.fp16 == is_lost(a, b, "fp16"), (a, b)
            assert found.bf16 == is_lost(a, b, "bf16"), (a, b)


def around(value: float) -> list[np.float32]:
    """The float32 and its neighbours on both sides, of both signs."""
    value = np.float32(value)
    near = [np.nextafter(value, np.float32(0)), value, np.nextafter(value, np.float32(np.inf))]
    return [*near, *(-v for v in near)]


@pytest.mark.parametrize("format", FORMATS)
def test_ties_and_their_neighbours(format):
    """Weights even, odd and at powers of two, whose gap towards zero is half as large."""
    bits = FORMATS[format][0]
    ulp = 2.0**-bits
    weights = [1.0, 1 + ulp, 1 + 2 * ulp, 2 - ulp, 2 - 2 * ulp, 1.5]
    steps = [ulp / 4, ulp / 2, ulp, 2 * ulp]
    assert_exact((s * w, u) for s in (1, -1) for w in weights for t in steps for u in around(t))


@pytest.mark.parametrize(
    ("w", "u", "lost"),
    [
        # facts of FP16 (11 significant bits): gap above 1 is 2^-10, below 1 it is 2^-11
        (1.0, 2.0**-11, True),
        (1.0009765625, 2.0**-11, False),
        (1.0, -(2.0**-12), True),
        (1.0, -(2.0**-12) - 2.0**-30, False),
        (2.0**-14, -(2.0**-25), True),  # below the smallest normal the gap stays 2^-24
        (2.0**-24, 2.0**-25, False),  # odd: the tie goes to 2^-23
        (2.0**-25, 2.0**-25, True),  # w is 0 in FP16, and so is w + u
        (65504.0, 15.999, True),
        (65504.0, 16.0, False),  # infinity
        (65504.0, -16.0, False),
        (70000.0, -30000.0, True),  # w is infinite already
    ],
)
def test_by_hand_in_fp16(w, u, lost):
    assert counted([w], [u]).fp16 == lost
    assert is_lost(np.float32(w), np.float32(u), "fp16") == lost


def test_subnormal_and_tiny_weights():
    fp16 = [0.0, 2.0**-26, 2.0**-25, 2.0**-24, 3 * 2.0**-24, 2.0**-15, 2.0**-14 - 2.0**-24]
    fp16 += [2.0**-14, 2.0**-13]
    assert_exact((w, u) for w in fp16 for k in (-26, -25, -24) for u in around(2.0**k))
    bf16 = [2.0**-134, 2.0**-133, 3 * 2.0**-133, 2.0**-127, 2.0**-126, 2.0**-125, 2.0**-118]
    steps = [2.0**k for k in (-149, -136, -135, -134, -133, -127, -126)]
    assert_exact((w, u) for w in bf16 for step in steps for u in around(step))


def test_large_weights_and_updates():
    largest = float(np.finfo(np.float32).max)
    bf16_max = 2.0**127 * (2 - 2.0**-7)
    weights = [65504.0, 65519.0, 65520.0, 1e6, bf16_max, largest, 2.0**127]
    steps = [2.0**-149, 2.0**-126, 15.0, 16.0, 2.0**118, 2.0**119, 2.0**120, largest]
    pairs = [(s * w, t * u) for w in weights for u in steps for s in (1, -1) for t in (1, -1)]
    tiny = [(w, u) for w in (0.0, 2.0**-149, 2.0**-126, 2.0**-110) for u in (1.0, largest)]
    assert_exact(pairs + tiny)


def test_pairs_of_every_size_against_fractions():
    random = np.random.default_rng(3)
    w = np.ldexp(random.uniform(1, 2, 2000), random.integers(-150, 128, 2000))
    # About the half gap of FP16 and BF16, where it is decided.
    u = np.ldexp(w, -random.integers(6, 15, 2000)) * random.choice([-1, 1, 0.9], 2000)
    near_ties = np.ldexp(np.sign(u), np.frexp(u)[1] - 1)
    chosen = np.where(random.random(2000) < 0.5, u, near_ties)
    with np.errstate(under="ignore"):
        assert_exact(zip(w.astype(np.float32), chosen.astype(np.float32), strict=True))


def test_a_million_against_numpy():
    """A float64 holds float16 + float32 exactly here: 53 bits from 2^1 to below 2^-51."""
    random = np.random.default_rng(4)
    w = random.normal(0, 0.1, 1_000_000).astype(np.float32)
    u = (w * 2.0 ** random.uniform(-16, -6, w.size)).astype(np.float32)
    u = np.where(random.random(w.size) < 0.1, 0, np.round(u * 2.0**40) / 2.0**40)
    u = u.astype(np.float32)
    r = w.astype(np.float16)
    same = (r.astype(np.float64) + u.astype(np.float64)).astype(np.float16) == r
    found = counted(w, u)
    assert found.zero == int((u == 0).sum())
    assert found.fp16 == int((same & (u != 0)).sum())
    assert 0.1 < found.share("fp16") < found.share("bf16") < 1
    assert found.share("fp16") == found.fp16 / (w.size - found.zero)


def test_weights_in_16_bits_are_their_own_rounding():
    w = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    u = w * 2.0**-11
    for dtype in (torch.float16, torch.bfloat16):
        half = w.to(dtype)
        assert counted(half, u) == counted(half.float(), u)


def test_what_is_not_finite_counts_apart():
    inf, nan = math.inf, math.nan
    found = counted([1.0, nan, inf, 1.0, 1.0, inf, 1.0], [0.0, 1e-9, 1e-9, nan, -inf, 0.0, 1e-9])
    assert found == LostUpdates(total=7, zero=1, nonfinite=5, fp16=1, bf16=1)
    assert found.nonzero == 1 and math.isnan(LostUpdates().share("fp16"))


def test_several_tensors_at_once_and_one_by_one():
    """Small ones share their operations, large ones are cut; a channels-last one is not dense."""
    generator = torch.Generator().manual_seed(2)
    shapes = [(3,), (), (40, 50), (70_000,), (0,), (8, 3, 5, 5), (2**18 + 3,)]
    weights = [torch.randn(shape, generator=generator) for shape in shapes]
    updates = [w * 2.0**-11 for w in weights]
    weights[5] = weights[5].to(memory_format=torch.channels_last)
    rows = lost_updates(weights, updates).tolist()
    for row, w, u in zip(rows, weights, updates, strict=True):
        assert read_counts(row) == counted(w, u)
        assert read_counts(row).total == w.numel()
    whole = counted(
        torch.cat([w.flatten() for w in weights]), torch.cat([u.flatten() for u in updates])
    )
    merged = LostUpdates()
    for row in rows:
        merged = merged.merge(read_counts(row))
    assert merged == whole
    assert LostUpdates.from_json(whole.to_json()) == whole
