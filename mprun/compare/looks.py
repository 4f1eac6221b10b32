"""Verdicts at planned numbers of seeds (`--looks 3,5,10`) whose error rates hold over all looks.

Whoever tests again after each few seeds gets more chances to be wrong than the 5 % of one test.
The remedy is Pocock's (1977, Biometrika 64, 191-199): the same stricter nominal alpha at every
look, such that the chance that any look crosses the boundary is 5 %. At the boundary (a true
difference equal to the margin, or to zero) the t statistics of nested looks have a joint
distribution that depends on nothing but the numbers of seeds, so the nominal alpha is found by
simulation once.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from scipy.special import stdtr

from mprun.compare.equivalence import ALPHA, FEWEST_SEEDS

DRAWS = 400_000  # standard error of the 5 %: 0.034 % (a third of a second for three looks)


def checked_looks(looks: Sequence[int]) -> tuple[int, ...]:
    """The looks as a tuple; ValueError unless there are two or more, ascending from 3 or above."""
    plan = tuple(looks)
    if len(plan) < 2:
        raise ValueError(f"looks {_text(plan)}: must be two or more numbers of seeds")
    if plan[0] < FEWEST_SEEDS:
        raise ValueError(f"looks {_text(plan)}: the first must be at least {FEWEST_SEEDS} seeds")
    if any(later <= earlier for earlier, later in zip(plan, plan[1:], strict=False)):
        raise ValueError(f"looks {_text(plan)}: must ascend")
    return plan


@lru_cache(maxsize=16)
def nominal_alpha(looks: tuple[int, ...], alpha: float = ALPHA, seed: int = 0) -> float:
    """The one-sided alpha to use at each look so that all looks together have `alpha`.

    It is the alpha-quantile of the smallest p-value over the looks, simulated for the paired t
    test under the boundary. `looks` as from `checked_looks`; deterministic for a given `seed`.
    """
    smallest = smallest_p_values(checked_looks(looks), DRAWS, np.random.default_rng(seed))
    return float(np.quantile(smallest, alpha))


def smallest_p_values(
    looks: tuple[int, ...], draws: int, generator: np.random.Generator
) -> np.ndarray:
    """float64 [draws]: the smallest one-sided p-value of the t tests at nested looks, mean 0.

    Mean and sum of squares of each block of new seeds are drawn directly (normal and chi-square)
    and merged, so that the cost does not depend on the number of seeds.
    """
    mean, squares, count = np.zeros(draws), np.zeros(draws), 0
    smallest = np.ones(draws)
    for look in looks:
        block = look - count
        block_mean = generator.standard_normal(draws) / np.sqrt(block)
        shift = block_mean - mean
        if block > 1:
            squares += generator.chisquare(block - 1, draws)
        squares += shift**2 * (count * block / look)
        mean += shift * (block / look)
        count = look
        statistic = mean / np.sqrt(squares / (count - 1) / count)
        np.minimum(smallest, stdtr(count - 1, statistic), out=smallest)
    return smallest


def _text(looks: tuple[int, ...]) -> str:
    return ",".join(str(look) for look in looks)
