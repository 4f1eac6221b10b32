"""Look at the seeds more than once and keep the error rate: stricter alphas, and when to give up.

At the boundary the true difference equals the margin, or zero. There the joint distribution of the
t statistics of nested looks depends only on the numbers of seeds, so one simulation gives the
alphas. Both ratio tests are t tests of fixed combinations of the values, so it holds for them.

Verdicts at planned numbers of seeds (`--looks 3,5,10`) use Pocock's remedy (1977, Biometrika 64,
191-199): the same stricter nominal alpha at every look, so that the chance of any look crossing the
boundary is 5 %.

Sweeps that add seeds until they are decided look after every seed. They spend the 5 % as a power of
the share of seeds seen (Kim and DeMets 1987, Biometrika 74, 149-154): later looks, which decide
more, get more of it. Stopping early because nothing would be shown only lowers the error rate.
"""

import math
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from scipy.special import stdtr, stdtrit

from mprun.comparison.equivalence import ALPHA, Interval, half_width

DRAWS = 400_000  # standard error of the 5 %: 0.034 % (a third of a second for three looks)
SPENDING = 1.5  # the power of n / most
PATIENCE = 3  # given up is what needs more than so many times the most seeds
FEWEST_TO_GIVE_UP = 5  # seeds; the scatter of fewer says little
NEVER = 1_000_000  # seeds: stands for so many or more


@lru_cache(maxsize=16)
def nominal_alpha(looks: tuple[int, ...], alpha: float = ALPHA, seed: int = 0) -> float:
    """Return the one-sided alpha per look that gives all looks together `alpha`."""
    # The quantile of the smallest p-value, simulated for the paired t test at the boundary.
    found = p_values(looks, DRAWS, np.random.default_rng(seed))
    return float(np.quantile(np.minimum.reduce(found), alpha))


@lru_cache(maxsize=512)
def level_after_a_test(looks: tuple[int, int]) -> float:
    """Return the chance of a false "matches" if looks are planned after an undecided test.

    The first look used ALPHA, the second uses `nominal_alpha`. Simulated, to about 0.001.
    """
    first, second = p_values(looks, DRAWS // 8, np.random.default_rng(0))
    nominal = np.quantile(np.minimum(first, second), ALPHA)
    return float(np.mean((first <= ALPHA) | (second <= nominal)))


@lru_cache(maxsize=64)
def spent_alphas(first: int, most: int, seed: int = 0) -> tuple[float, ...]:
    """Return the one-sided alpha of each look at first, first + 1, ... most seeds.

    All looks up to n seeds together have the error rate ALPHA * (n / most)^1.5.

    Args:
        first: Seeds at the first look, at least 2.
        most: Seeds at the last, at least `first`.
        seed: That of the simulated paths; the same one gives the same alphas.

    Returns:
        One alpha a look, the first one exact, the others to 1e-6. Simulated: the level of all looks
        together has a standard error of 0.034 %, an alpha one of about 0.02 % (of 1 to 2 %).

    Raises:
        ValueError: There are no such looks.
    """
    if not 2 <= first <= most:
        raise ValueError(f"first={first}, most={most}: must be 2 <= first <= most")
    tests = _statistics(tuple(range(first, most + 1)), DRAWS, np.random.default_rng(seed))
    found: list[float] = []
    open_paths = np.ones(DRAWS, dtype=bool)
    for count, statistics in tests:
        spent = ALPHA * (count / most) ** SPENDING
        if found:
            left = statistics[open_paths]
            # At least one path: chance may have spent all of this look at the one before.
            rank = max(1, len(left) - round((1 - spent) * DRAWS))
            limit = float(np.partition(left, rank - 1)[rank - 1])
            # Rounded: the last bits are those of the processor's logarithm.
            found.append(round(float(stdtr(count - 1, limit)), 6))
        else:
            limit = stdtrit(count - 1, spent)
            found.append(spent)
        open_paths &= statistics > limit
    return tuple(found)


def hopeless(interval: Interval, margin: float, most: int) -> int | None:
    """Return about how many seeds it would take to decide, if that is far beyond `most`.

    So many make the half width, at ALPHA and without looks, equal to the distance of the difference
    from the margin: (t * s / (margin - |difference|))^2 for pairs. The rule is not binding: who
    goes on breaks no error rate.

    Args:
        interval: At one look; its own level plays no role.
        margin: In the interval's unit.
        most: Seeds at the last look.

    Returns:
        None: There are fewer than 5 seeds, or 3 * most or fewer would do, or the difference is no
        number. NEVER, a million, stands for itself and more: the difference is at the margin.
    """
    seeds = min(interval.counts)
    if seeds < FEWEST_TO_GIVE_UP or not math.isfinite(interval.difference):
        return None
    half = half_width(interval, interval.counts, ALPHA)
    distance = abs(margin - abs(interval.difference))
    if half * math.sqrt(seeds) <= distance * math.sqrt(PATIENCE * most):
        return None
    # Ratios before squares: a difference may be of any size.
    ratio = half / distance if half < distance * NEVER else math.inf
    return min(NEVER, math.ceil(seeds * ratio * ratio)) if ratio < math.inf else NEVER


def p_values(
    looks: tuple[int, ...], draws: int, generator: np.random.Generator
) -> list[np.ndarray]:
    """Return float64 [draws] per look: one-sided p-values of t tests at nested looks, mean 0."""
    tests = _statistics(looks, draws, generator)
    return [stdtr(count - 1, statistics) for count, statistics in tests]


def _statistics(
    looks: tuple[int, ...], draws: int, generator: np.random.Generator
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield each look and float64 [draws], the t statistics of all values up to it, of mean 0.

    Mean and sum of squares of each block of new seeds are drawn directly (normal and chi-square)
    and merged, so the cost does not depend on the number of seeds.
    """
    mean, squares, count = np.zeros(draws), np.zeros(draws), 0
    for look in looks:
        block = look - count
        block_mean = generator.standard_normal(draws) / np.sqrt(block)
        shift = block_mean - mean
        if block > 1:
            squares += generator.chisquare(block - 1, draws)
        squares += shift**2 * (count * block / look)
        mean += shift * (block / look)
        count = look
        yield count, mean / np.sqrt(squares / (count - 1) / count)
