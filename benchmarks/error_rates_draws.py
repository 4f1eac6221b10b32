"""Draws of final losses of known truth, for error_rates.py and its tables.

The baseline mean is 2 nats, the margin 1 % of it. Deviations are relative to the mean.
"""

import json
import math
from pathlib import Path

import numpy as np

MEAN = 2.0  # nats
MARGIN = 0.01  # of the mean
CORRELATION = 0.3
NOISES = {
    "normal": "normally distributed",
    "heavy tails": "Student's t with 3 degrees of freedom, in mode and baseline",
    "skewed": "lognormal (sigma 1) in mode and baseline, with a bad seed now and then",
    "skewed mode": "lognormal noise (sigma 1) in the mode, normal noise in the baseline",
    "exponential mode": "exponential noise in the mode, normal noise in the baseline",
    "exponential difference": "the loss of the mode is the baseline's loss for the same seed plus "
    "exponential noise, so the differences themselves are skewed",
    "skewed difference": "the loss of the mode is the baseline's loss for the same seed plus "
    "lognormal noise (sigma 1). Of all kinds tried, only rare bad seeds give more false verdicts",
    "quantised": "normal, but rounded to steps of one seed standard deviation, like an accuracy "
    "on few samples",
    "MLPerf records": "runs drawn from one of 116 published references of MLPerf Training (3,753 "
    "runs, benchmarks/mlperf_records.json). The drawn runs are scaled to the mean and the standard "
    "deviation of the case",
    "rare bad seeds": "normal, but one seed in ten of the mode is bad. The bad seeds cause the "
    "whole difference of the means, so each ends worse by ten "
    "times this difference",
}
RARE = 0.1  # share of bad seeds
SHIFTS = {  # of equal seeds, beside the noise of their difference
    "additive": "every seed of the mode ends higher than its partner by the same amount",
    "scaled": "every seed of the mode ends higher than its partner by the same share",
}
RECORDS = [
    (np.array(runs, dtype=np.float64) - np.mean(runs)) / np.std(runs)
    for runs in json.loads(Path(__file__).with_name("mlperf_records.json").read_text())[
        "records"
    ].values()
]


def noise(kind: str, shape: tuple[int, ...], generator: np.random.Generator) -> np.ndarray:
    """Return independent draws of mean 0 and variance 1."""
    if kind == "heavy tails":
        return generator.standard_t(3, shape) / math.sqrt(3)
    if kind == "skewed":
        draws = np.exp(generator.standard_normal(shape))
        return (draws - math.exp(0.5)) / math.sqrt(math.e * (math.e - 1))
    if kind == "exponential":
        return generator.exponential(size=shape) - 1
    if kind == "quantised":  # rounding adds a twelfth to the variance
        return np.round(generator.standard_normal(shape)) / math.sqrt(1 + 1 / 12)
    if kind == "MLPerf records":  # each draw from one record, the same in both arms
        return np.stack(
            [generator.choice(RECORDS[n % len(RECORDS)], shape[1]) for n in range(shape[0])]
        )
    return generator.standard_normal(shape)


def paired_losses(
    true: float, sd: float, seeds: int, draws: int, shift: str, difference_sd: float
) -> tuple[np.ndarray, np.ndarray]:
    """Draw as `final_losses`, of seeds whose difference has a deviation of its own."""
    generator = np.random.default_rng(list(repr((true, sd, seeds, shift, difference_sd)).encode()))
    base = 1 + sd * generator.standard_normal((draws, seeds))
    differences = difference_sd * generator.standard_normal((draws, seeds))
    differences += true * MARGIN * (base if shift == "scaled" else 1)
    return MEAN * (base + differences), MEAN * base


def final_losses(
    true: float, sd: float, counts: tuple[int, int], draws: int, kind: str, correlation: float
) -> tuple[np.ndarray, np.ndarray]:
    """Draw float64 [draws, seeds] for the mode and for the baseline.

    true: difference of the means in margins. sd: deviation over seeds, relative to the mean.
    """
    generator = np.random.default_rng(list(repr((true, sd, counts, kind, correlation)).encode()))
    own_kind = kind.removesuffix(" mode").removesuffix(" difference")
    base_kind = kind if own_kind == kind else "normal"
    own = noise(own_kind, (draws, counts[0]), generator)
    base = noise(base_kind, (draws, counts[1]), generator)
    if kind.endswith(" difference"):
        own, base = own + base, base
    elif correlation:
        shared = math.sqrt(correlation) * noise(base_kind, (draws, counts[0]), generator)
        own, base = (shared + math.sqrt(1 - correlation) * arm for arm in (own, base))
    shift = true * MARGIN
    if kind == "rare bad seeds":
        shift = shift / RARE * (generator.random(own.shape) < RARE)
    return MEAN * (1 + shift + sd * own), MEAN * (1 + sd * base)
