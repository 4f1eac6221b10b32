"""Block formats by their definitions, one number after another in exact fractions; no torch."""

from fractions import Fraction as Q
from typing import NamedTuple


class Form(NamedTuple):
    exponent_bits: int
    mantissa: int
    bias: int
    top: int
    emax: int


FORMS = {
    "e4m3": Form(4, 3, 7, 448, 8),
    "e5m2": Form(5, 2, 15, 57344, 15),
    "e2m1": Form(2, 1, 1, 6, 2),
}
F32_MAX = Q(2) ** 128 - Q(2) ** 104


def grid(name: str) -> list[Q]:
    """All finite numbers from 0 on, in order; an even place has an even mantissa."""
    form = FORMS[name]
    steps = 2**form.mantissa
    found = []
    for exponent in range(2**form.exponent_bits):
        for fraction in range(steps):
            lead, power = (1, exponent) if exponent else (0, 1)
            found.append((lead + Q(fraction, steps)) * Q(2) ** (power - form.bias))
    return [value for value in found if value <= form.top]


GRIDS = {name: grid(name) for name in FORMS}


def nearest(value: Q, name: str) -> Q:
    """To the nearest number of the format, ties to even, saturated."""
    numbers, size = GRIDS[name], abs(value)
    if size >= numbers[-1]:
        found = numbers[-1]
    else:
        low, high = 0, len(numbers) - 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if numbers[middle] <= size else (low, middle)
        apart = (size - numbers[low]) - (numbers[high] - size)
        found = numbers[low] if apart < 0 or (apart == 0 and low % 2 == 0) else numbers[high]
    return -found if value < 0 else found


def log2_floor(value: Q) -> int:
    power = value.numerator.bit_length() - value.denominator.bit_length()
    return power if Q(2) ** power <= value else power - 1


def log2_ceil(value: Q) -> int:
    power = log2_floor(value)
    return power + (Q(2) ** power < value)


def f32(value: Q) -> Q:
    """The nearest FP32 number, ties to even, without a limit."""
    if value == 0:
        return value
    step = Q(2) ** (max(log2_floor(abs(value)), -126) - 23)
    return round(value / step) * step  # Python rounds halves of a fraction to even


def e8m0(amax: Q, name: str, how: str) -> int:
    """The exponent of the scale."""
    form = FORMS[name]
    if amax == 0:
        return -127
    if how == "rceil":
        quotient = f32(amax / form.top)
        found = log2_ceil(quotient) if quotient else -127
    elif how == "ceil":
        found = log2_ceil(amax) - form.emax
    elif how == "even":  # amax to the mantissa of the format first, halves up
        step = Q(2) ** (log2_floor(amax) - form.mantissa)
        found = log2_floor((amax / step + Q(1, 2)).__floor__() * step) - form.emax
    else:
        found = log2_floor(amax) - form.emax
    return max(-127, min(127, found))


def factors(amax: Q, whole: Q, name: str, scale: str, how: str) -> tuple[Q, Q]:
    """The factor before the cast of a block, and after it; whole: amax of the tensor, whose own
    factor, whole / (448 * top), is left to the product."""
    top = Q(FORMS[name].top)
    if scale == "e8m0":
        power = e8m0(amax, name, how)
        return Q(2) ** -power, Q(2) ** power
    if scale == "e4m3":
        first = min(f32(448 * top / whole), F32_MAX) if whole else Q(1)
        stored = nearest(min(f32(amax * f32(first * f32(1 / top))), Q(448)), "e4m3")
        before = f32(stored * f32(1 / first))
        encode = min(f32(1 / before), F32_MAX) if before else F32_MAX
        return encode, stored
    encode = min(f32(top / amax), F32_MAX) if amax else F32_MAX
    encode = Q(2) ** log2_floor(encode) if scale == "pow2" else encode
    return encode, f32(1 / encode)


def four_over_six(values: list[Q], whole: Q, name: str) -> tuple[Q, Q]:
    """The factors before and after the cast of a block, of 6 or of 4: the smaller squared error."""
    top = FORMS[name].top
    first = min(f32(256 * top / whole), F32_MAX) if whole else Q(1)
    base = f32(f32(max(map(abs, values)) / top) * first)
    found = []
    for times in (Q(1), Q(3, 2)):
        stored = nearest(min(f32(base * times), Q(448)), "e4m3")
        before = f32(stored * f32(1 / first))
        encode = min(f32(1 / before), F32_MAX) if before else F32_MAX
        decoded = [nearest(f32(v * encode), name) * stored * whole / (256 * top) for v in values]
        error = sum((a - b) ** 2 for a, b in zip(decoded, values, strict=True))
        found.append((error, encode, stored))
    return min(found, key=lambda one: one[0])[1:]  # the first of equal ones: 6


def in_blocks(
    rows: list[list[float]], block: tuple[int, int], name: str, scale: str, how: str
) -> list[list[Q]]:
    """A matrix of FP32 numbers, cast in blocks along its rows and decoded."""
    n, k = len(rows), len(rows[0])
    high, wide = block[0] or n, block[1] or k
    found = [[Q(value) for value in row] for row in rows]
    whole = max(abs(value) for row in found for value in row)
    for top in range(0, n, high):
        for left in range(0, k, wide):
            places = [
                (i, j)
                for i in range(top, min(n, top + high))
                for j in range(left, min(k, left + wide))
            ]
            amax = max(abs(found[i][j]) for i, j in places)
            if scale == "four_over_six":
                encode, decode = four_over_six([found[i][j] for i, j in places], whole, name)
            else:
                encode, decode = factors(amax, whole, name, scale, how)
            for i, j in places:
                found[i][j] = nearest(f32(found[i][j] * encode), name) * decode
    return found
