"""Test whether a difference is inside the margin: intervals, and the names of verdicts.

Two one-sided tests (TOST; Schuirmann 1987, J. Pharmacokin. Biopharm. 15, 657-680): a difference is
inside +-margin with error rate alpha if its two-sided (1 - 2 alpha) interval is. Differences are
mode minus baseline, with the sign chosen so that positive is worse. All functions take and return
plain floats.

A relative margin bounds mean(own) / mean(base), both of which scatter. So the test is of
own - (1 +- margin) * base per seed. A margin computed from the mean of the same seeds and taken as
known breaks the 5 % where equal seeds differ less than seeds do. The relative interval holds the
ratios that the test does not reject (Fieller 1954, J. R. Statist. Soc. B 16, 175-185).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

import numpy as np
from scipy.special import stdtrit

# scipy.stats has the same quantile but takes ten times as long to import.

ALPHA = 0.05  # one-sided
FEWEST_SEEDS = 3
MOST_SEEDS = 50  # if more are needed, the text says "not reachable"


@dataclass(frozen=True, slots=True)
class Interval:
    """A two-sided interval for a difference, and what determined its width.

    A relative one is in fractions of |mean(base)|; it has no bounds if that cannot be told from 0.
    """

    difference: float
    low: float
    high: float
    level: float  # confidence, 1 - 2 alpha
    method: str  # "paired" or "Welch"
    counts: tuple[int, int]  # seeds of the mode and of the baseline
    # Of the two samples (if paired: of the differences, and 0), in units of 4**exponent: squares of
    # 1e-200 and 1e200 are no numbers.
    variances: tuple[float, float]
    identical: bool  # every value equals its counterpart, bit for bit
    exponent: int = 0


@lru_cache(maxsize=4096)
def t_quantile(alpha: float, degrees: float) -> float:
    """Return the value that a t-distributed number exceeds with probability alpha."""
    return float(stdtrit(degrees, 1.0 - alpha))


def estimate(
    own: Sequence[float], base: Sequence[float], method: str, relative: bool, alpha: float = ALPHA
) -> Interval:
    """Return the interval by the method, "paired" or "Welch"; relative: of |mean(base)|.

    All values are finite. ValueError for fewer than 2, and for pairs that are none.
    """
    if method == "paired":
        return (paired_ratio if relative else paired_interval)(own, base, alpha)
    return (welch_ratio if relative else welch_interval)(own, base, alpha)


def paired_interval(own: Sequence[float], base: Sequence[float], alpha: float = ALPHA) -> Interval:
    """Return the interval for the mean of own[i] - base[i], n >= 2 finite pairs, else ValueError.

    mean -/+ t(1 - alpha, n - 1) * s / sqrt(n), where s is the differences' standard deviation.
    """
    exponent = _exponent(own, base)
    pairs = zip(_scaled(own, exponent), _scaled(base, exponent), strict=True)
    differences = [a - b for a, b in pairs]
    mean, variance = _mean_and_variance(differences)
    spread = "paired", (len(differences),) * 2, (variance, 0.0)
    return _interval(mean, spread, alpha, not any(differences), exponent)


def welch_interval(own: Sequence[float], base: Sequence[float], alpha: float = ALPHA) -> Interval:
    """Return the interval for mean(own) - mean(base) of independent samples of at least 2 values.

    Variances may differ; the degrees of freedom follow Welch (1947, Biometrika 34, 28-35) and
    Satterthwaite. All values are finite. Raises ValueError for fewer values.
    """
    exponent = _exponent(own, base)
    samples = (_mean_and_variance(_scaled(values, exponent)) for values in (own, base))
    means, variances = zip(*samples, strict=True)
    mean, spread = means[0] - means[1], ("Welch", (len(own), len(base)), variances)
    return _interval(mean, spread, alpha, mean == 0.0 and not any(variances), exponent)


_Spread = tuple[str, tuple[int, int], tuple[float, float]]  # method, counts, variances


def _interval(
    mean: float, spread: _Spread, alpha: float, identical: bool, exponent: int
) -> Interval:
    half = _half_width(*spread, alpha)
    middle, low, high = _scaled((mean, mean - half, mean + half), -exponent)
    return Interval(middle, low, high, 1 - 2 * alpha, *spread, identical, exponent)


def _exponent(*samples: Sequence[float]) -> int:
    """Return the power of two that no value reaches."""
    return math.frexp(max(abs(value) for values in samples for value in values))[1]


def _scaled(values: Sequence[float], exponent: int) -> list[float]:
    """Divide by a power of two, which changes no digit; what no float can hold is infinite."""

    def divided(value: float) -> float:
        try:
            return math.ldexp(value, -exponent)
        except OverflowError:
            return math.copysign(math.inf, value)

    return [*map(divided, values)]


def paired_ratio(own: Sequence[float], base: Sequence[float], alpha: float = ALPHA) -> Interval:
    """Return the u that the t test of the values own[i] - base[i] - u * |base[i]| does not reject.

    With v = u - middle and e[i] = own[i] - base[i] - middle * |base[i]|, whose mean is 0, the ends
    solve (v * mean)^2 = t^2 / n * var(e - v * |base|), where mean is that of |base|. Here |base| is
    the baseline with the sign that makes its mean positive.
    """
    exponent = _exponent(own, base)
    pairs = zip(_scaled(own, exponent), _scaled(base, exponent), strict=True)
    differences = [a - b for a, b in pairs]
    # Differences and values may be of very different size, and squares are taken of both.
    powers, count = (_exponent(differences), _exponent(base)), len(differences)
    over, under = _scaled(differences, powers[0]), _scaled(base, powers[1])
    sign = math.copysign(1.0, math.fsum(under))
    under = [sign * value for value in under]
    (top, _), (mean, variance) = _mean_and_variance(over), _mean_and_variance(under)
    weight = t_quantile(alpha, count - 1) ** 2 / count
    known = mean * mean - weight * variance
    middle, below, above = (top / mean if mean else math.nan), -math.inf, math.inf
    rest = [a - middle * b for a, b in zip(over, under, strict=True)]
    _, scatter = _mean_and_variance(rest)
    identical = not any(differences)
    if known > 0 or (identical and mean):
        shared = math.fsum(e * (b - mean) for e, b in zip(rest, under, strict=True)) / (count - 1)
        root = math.sqrt((weight * shared) ** 2 + known * weight * scatter)
        reach = weight * shared + math.copysign(root, shared)
        if reach:  # neither end is a difference of close numbers
            below, above = sorted((-reach / known, weight * scatter / reach))
        else:
            below = above = 0.0
    power = exponent + powers[0] - powers[1]
    middle, low, high = _scaled((middle, middle + below, middle + above), -power)
    spread = "paired", (count, count), (scatter / (mean * mean) if mean else math.nan, 0.0)
    return Interval(middle, low, high, 1 - 2 * alpha, *spread, identical, power)


def welch_ratio(own: Sequence[float], base: Sequence[float], alpha: float = ALPHA) -> Interval:
    """Return the u that Welch's test of own against base + u * |base| does not reject.

    The degrees of freedom are those at each u, which changes the variance of the second sample.
    """
    exponent, counts = _exponent(own, base), (len(own), len(base))
    moments: list[float] = []
    for values in (own, base):
        power = _exponent(values)
        mean, variance = _mean_and_variance(_scaled(values, power))
        moments += _scaled((mean, math.sqrt(variance)), exponent - power)
    own_mean, own_sd, mean, sd = moments
    level, sign = abs(mean), math.copysign(1.0, mean)
    middle, below, above = ((own_mean - mean) / level if level else math.nan), -math.inf, math.inf

    def half_width(u: float) -> float:
        factored = (1 + sign * u) * sd
        return _half_width("Welch", counts, (own_sd * own_sd, factored * factored), alpha)

    if level > t_quantile(alpha, len(base) - 1) * sd / math.sqrt(len(base)):
        near = half_width(middle) / level
        below, above = (
            _crossing(lambda away: abs(away) * level - half_width(middle + away), side, near)
            for side in (-1.0, 1.0)
        )
    sds = (own_sd / level, (1 + sign * middle) * sd / level) if level else (math.nan, math.nan)
    spread = "Welch", counts, (sds[0] * sds[0], sds[1] * sds[1])
    identical = own_mean == mean and not (own_sd or sd)
    return Interval(middle, middle + below, middle + above, 1 - 2 * alpha, *spread, identical)


def _crossing(excess: Callable[[float], float], side: float, near: float) -> float:
    """Return the number of this sign, 1.0 or -1.0, at which `excess` is no longer below 0.

    It is negative at 0 unless near, where it is about 0, is 0; far away it is positive. The rule is
    false position, in the form that halves the value of an end that stays (Illinois).
    """
    low, below, high = 0.0, excess(0.0), 2 * near
    if not near:
        return 0.0
    while (above := excess(side * high)) < 0:
        low, below, high = high, above, 2 * high
    stayed = 0
    for _ in range(100):
        at = high - above * (high - low) / (above - below)
        if not low < at < high:  # to rounding; the other end may be far away
            return side * (low if at <= low else high)
        found = excess(side * at)
        if found < 0:
            low, below, above = at, found, above / 2 if stayed < 0 else above
            stayed = -1
        else:
            high, above, below = at, found, below / 2 if stayed > 0 else below
            stayed = 1
    return side * high


def permutation_p(
    name: str,
    own: Sequence[float],
    base: Sequence[float],
    paired: bool,
    margin: float | Sequence[float],
) -> tuple[float, float]:
    """Return (p of the claim `name`, the smallest p that so many values can have).

    margin: one number, or that of each value of the baseline.

    The test assumes no shape of the distribution: the signs of paired differences, or else values
    between the arms, are exchangeable. It is one-sided, as the claim: "matches" means below the
    margin and above its negative, "worse" above the margin, "better" below its negative. It is
    exact for up to 12 pairs or 14 values; beyond, it uses 4,999 drawn rearrangements and the
    observed one. Pitman (1937, Supplement to the Journal of the Royal Statistical Society 4,
    119-130).
    """
    margins = np.asarray(margin)
    tests = {"matches": ((1, -margins), (-1, margins)), "worse": ((1, margins),)}
    weights = _signs(len(own)) if paired else _labels(len(own), len(base))
    found = []
    for sign, shift in tests.get(name, ((-1, -margins),)):
        x, y = sign * np.asarray(own), sign * (np.asarray(base) + shift)
        values = x - y if paired else np.concatenate([x, y])
        sums = weights @ values
        # The first sum is the observed one; equal sums may differ by rounding.
        found.append(float(np.mean(sums >= sums[0] - 1e-12 * np.abs(values).sum())))
    return max(found), 1 / len(weights)


@lru_cache(maxsize=64)
def _signs(count: int) -> np.ndarray:
    """Return float64 [rearrangements, count] of 1 and -1; the first row changes nothing."""
    if count <= 12:
        return 1.0 - 2.0 * ((np.arange(2**count)[:, None] >> np.arange(count)) & 1)
    drawn = np.random.default_rng(0).choice([1.0, -1.0], (4999, count))
    return np.concatenate([np.ones((1, count)), drawn])


@lru_cache(maxsize=64)
def _labels(own: int, base: int) -> np.ndarray:
    """Return float64 [rearrangements, own + base]: 1 / own or -1 / base; row 0 as observed."""
    total, generator = own + base, np.random.default_rng(0)
    chosen = [list(range(own))]
    if total <= 14:
        chosen = [list(places) for places in combinations(range(total), own)]
    else:
        chosen += [generator.permutation(total)[:own].tolist() for _ in range(4999)]
    weights = np.full((len(chosen), total), -1 / base)
    np.put_along_axis(weights, np.array(chosen), 1 / own, axis=1)
    return weights


def decide(interval: Interval, margin: float) -> str:
    """Return the verdict's name (one of `findings.VERDICTS`); `margin` in the interval's unit.

    Only an interval strictly inside (-margin, margin) matches; failing to find a difference is
    never a match.
    """
    if not 0 < margin < math.inf:
        raise ValueError(f"margin {margin}: must be above 0 and finite")
    if min(interval.counts) < FEWEST_SEEDS:
        return "inconclusive"
    if -margin < interval.low and interval.high < margin:
        return "matches"
    if interval.low >= margin:
        return "worse"
    if interval.high <= -margin:
        return "better"
    if interval.low > 0:
        return "likely worse"
    if interval.high < 0:
        return "likely better"
    return "inconclusive"


def seeds_needed(interval: Interval, margin: float) -> int | None:
    """Return about how many more seeds would decide, if mean and variances stay the same.

    Inside the margin: until the interval fits into it. Outside: until its half width is half the
    difference, which shows the sign. Welch: the arm with fewer seeds grows first, then both.
    Returns None if 50 seeds are not enough.
    """
    fewest = min(interval.counts)
    if fewest < FEWEST_SEEDS:
        return FEWEST_SEEDS - fewest
    distance = abs(interval.difference)
    allowed = margin - distance if distance < margin else distance / 2
    alpha = (1 - interval.level) / 2
    for count in range(fewest + 1, MOST_SEEDS + 1):
        counts = (max(interval.counts[0], count), max(interval.counts[1], count))
        if half_width(interval, counts, alpha) <= allowed:
            return count - fewest
    return None


def half_width(interval: Interval, counts: tuple[int, int], alpha: float) -> float:
    """Return half the width of an interval of so many values with the same variances."""
    half = _half_width(interval.method, counts, interval.variances, alpha)
    return _scaled([half], -interval.exponent)[0]


def outlier(values: Sequence[float]) -> int | None:
    """Return the index of a single value far from all others, which are close together.

    Its distance to the median of the others exceeds 10 times their range (60 times if there are two
    others), which happens in less than 3 % of cases for normal values. None: there is no such
    value, or no scatter to compare with.
    """
    if len(values) < FEWEST_SEEDS:
        return None
    middle = sorted(values)[len(values) // 2]
    place = max(range(len(values)), key=lambda i: abs(values[i] - middle))
    others = sorted([*values[:place], *values[place + 1 :]])
    distance = abs(values[place] - others[len(others) // 2])
    reach = (60 if len(others) == 2 else 10) * (others[-1] - others[0])
    return place if distance > reach > 0 else None


def _mean_and_variance(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and sample variance (divided by n - 1): two passes, each sum rounded once."""
    count = len(values)
    if count < 2:
        raise ValueError(f"an interval needs at least 2 values, got {count}")
    if min(values) == max(values):  # the rounded mean of equal values may differ from them
        return values[0], 0.0
    mean = math.fsum(values) / count
    deviations = [value - mean for value in values]
    return mean, math.fsum([d * d for d in deviations]) / (count - 1)


def _half_width(
    method: str, counts: tuple[int, int], variances: tuple[float, float], alpha: float
) -> float:
    if method == "paired":
        return t_quantile(alpha, counts[0] - 1) * math.sqrt(variances[0] / counts[0])
    own, base = variances[0] / counts[0], variances[1] / counts[1]
    if own + base == 0.0:
        return 0.0
    # Computed from shares, because the square of a tiny variance is 0.
    shares = own / (own + base), base / (own + base)
    degrees = 1 / (shares[0] ** 2 / (counts[0] - 1) + shares[1] ** 2 / (counts[1] - 1))
    return t_quantile(alpha, degrees) * math.sqrt(own + base)
