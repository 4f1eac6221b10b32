"""The error rates of `mprun compare` by simulation, through the shipped code.

    python benchmarks/error_rates.py [--draws 20000] [--only growth] [--write docs]

Every draw fills two arms of runs with final losses of known truth and calls the function behind the
command, `compare.verdict.judge`. The baseline mean is 2 nats, the margin 1 % of the baseline's mean
(which the test does not know, like in a real comparison). Seed standard deviations are in percent
of the mean. Same seeds share noise: correlation 0.3 between paired arms, more in the table
"scatter". It takes one process, a CPU and fixed seeds. It prints Markdown; --write puts
error_rates.md and error_rates.json into a folder. --only draws one of the tables there anew.

For the gaps over steps (table "growth") a draw is the curves of all seeds, tested by the functions
of `compare.gaps`. Sweeps that run until they are decided and pairs of runs are in modules of their
own, error_rates_sweeps.py and error_rates_pair.py.
"""

import argparse
import json
import math
import platform
import sys
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import scipy
from error_rates_document import document, summary
from error_rates_draws import (
    CORRELATION,
    MARGIN,
    MEAN,
    NOISES,
    SHIFTS,
    final_losses,
    paired_losses,
)
from error_rates_pair import pair_table
from error_rates_sweeps import LOOKS, correlated_table, sweep_noise_table, sweeps_table

from mprun.comparison.decision import CONCLUSIVE
from mprun.comparison.findings import VERDICTS, Arm, Question, RunData, Verdict
from mprun.comparison.gap_growth import last_half, paired_gaps, slope_interval
from mprun.comparison.looks import nominal_alpha
from mprun.comparison.verdict import judge
from mprun.errors import BadInput

QUESTION = {
    "metric": "loss",
    "higher_is_better": False,
    "relative": True,
    "margin_setting": MARGIN,
}
GAP_POINTS = 60  # of a curve of 6,000 steps
GAP_SD = 0.0005  # of a gap within a seed, relative to the loss
PLANTED = ("0", "0.0005", "0.0025")  # growth over the last half, relative to the loss
GAPS = {
    "independent": "gaps are independent from point to point",
    "AR(1) 0.95": "gaps are autoregressive, with correlation 0.95 from one point to the next",
    "random walk": "gaps follow a random walk. At the last step, their standard deviation over "
    "seeds is 4 times that of independent gaps",
    "skewed slopes": "gaps are autoregressive, and each seed has a different slope. The "
    "slopes follow a mirrored exponential distribution with mean 0, so the gap "
    "falls strongly, but only for rare seeds",
}


def arms(counts: tuple[int, int], paired: bool) -> tuple[Arm, Arm]:
    """Return arms without final losses yet; unpaired: no seed in common."""
    first = 0 if paired else counts[1]
    return _arm("amp", range(first, first + counts[0])), _arm("fp32", range(counts[1]))


def rates(
    true: float,
    sd: float,
    counts: tuple[int, int],
    draws: int,
    *,
    paired: bool = True,
    kind: str = "normal",
    looks: tuple[int, ...] = (),
    naive: bool = False,
    difference_sd: float | None = None,
) -> dict[str, float]:
    """Return the share of each verdict, "seeds" and "warned", and "refused" if any was.

    "seeds" is the mean number of seeds that a verdict used. "warned" is the share of the verdicts
    "matches" that a permutation test does not confirm.

    naive: each of `looks` tests the seeds so far in the ordinary way, until one is conclusive.
    difference_sd: that of equal seeds; `kind` is then one of SHIFTS.
    """
    if difference_sd is None:
        values = final_losses(true, sd, counts, draws, kind, CORRELATION if paired else 0.0)
    else:
        values = paired_losses(true, sd, counts[0], draws, kind, difference_sd)
    plans = [(look, look) for look in looks] if naive else [counts]
    stages = [arms(plan, paired) for plan in plans]
    found, seeds, warned = Counter(), 0, 0
    for own_values, base_values in zip(*values, strict=True):
        for own, base in stages:
            _fill(own, own_values)
            _fill(base, base_values)
            try:
                verdict, _ = judge(own, base, Question(looks=() if naive else looks, **QUESTION))
            except BadInput:  # the mean of the baseline cannot be told from 0
                verdict = Verdict("refused", "")
            if verdict.name in CONCLUSIVE:
                break
        found[verdict.name] += 1
        seeds += len(verdict.seeds)
        warned += verdict.name == "matches" and "Not confirmed" in verdict.sentence
    share = warned / max(1, found["matches"])
    more = {"seeds": seeds / draws, "warned": share}
    more |= {"refused": found["refused"] / draws} if found["refused"] else {}
    return {name: found[name] / draws for name in VERDICTS} | more


def gap_noise(kind: str, shape: tuple[int, int, int], generator: np.random.Generator) -> np.ndarray:
    """Draw gaps without growth, float64 [draws, seeds, points], in GAP_SD."""
    steps = generator.standard_normal(shape)
    if kind == "independent":
        return steps
    if kind == "random walk":
        return steps.cumsum(-1) * 4 / math.sqrt(shape[-1])
    for point in range(1, shape[-1]):
        steps[..., point] *= math.sqrt(1 - 0.95**2)
        steps[..., point] += 0.95 * steps[..., point - 1]
    if kind == "skewed slopes":
        own = 4 * (1 - generator.exponential(size=(*shape[:2], 1)))
        steps += own * np.linspace(0, 1, shape[-1])
    return steps


def growth(kind: str, seeds: int, planted: float, draws: int) -> float:
    """Return the share of draws whose gap is reported as growing.

    planted: true growth over the last half of the steps, relative to the loss. The curves of the
    baseline fall from 6 to 2 nats and scatter by 1 % over seeds.
    """
    generator = np.random.default_rng(list(repr((kind, seeds, planted)).encode()))
    x = np.linspace(100, 6000, GAP_POINTS)
    fall = MEAN * (1 + 2 * np.exp(-x / 1000))
    late = np.clip(x / 3000 - 1, 0, 1)
    found = 0
    for start in range(0, draws, 1000):  # to bound the memory
        many = min(1000, draws - start)
        scatter = 0.01 * generator.standard_normal((many, seeds, 1))
        base = fall * (1 + scatter)
        gaps = GAP_SD * gap_noise(kind, (many, seeds, GAP_POINTS), generator) + planted * late
        for own, other in zip(base + fall * gaps, base, strict=True):
            found += slope_interval(*last_half(x, paired_gaps(own, other, True))).low > 0
    return found / draws


def growth_table(draws: int) -> list[dict]:
    return [
        {
            "noise": kind,
            "seeds": seeds,
            "rates": {planted: growth(kind, seeds, float(planted), draws) for planted in PLANTED},
        }
        for kind in GAPS
        for seeds in (3, 5, 10)
    ]


def paired_table(draws: int) -> list[dict]:
    cells = [
        {"sd": sd, "seeds": count, "true": true}
        for sd in (0.002, 0.004, 0.006, 0.01)
        for count in (3, 5, 8, 10)
        for true in (0, 1, 2)
    ]
    for cell in cells:
        cell["rates"] = rates(cell["true"], cell["sd"], (cell["seeds"],) * 2, draws)
    return cells


def welch_table(draws: int) -> list[dict]:
    cells = [
        {"sd": sd, "seeds": own, "baseline_seeds": base, "true": true}
        for sd in (0.002, 0.004, 0.006)
        for own, base in ((3, 3), (5, 5), (5, 10), (10, 10))
        for true in (0, 1, 2)
    ]
    for cell in cells:
        counts = (cell["seeds"], cell["baseline_seeds"])
        cell["rates"] = rates(cell["true"], cell["sd"], counts, draws, paired=False)
    return cells


def scatter_table(draws: int) -> list[dict]:
    """Seeds that scatter more than the differences of equal ones, and arms of uneven size."""
    cells = [
        {"sd": sd, "difference_sd": of_difference, "shift": shift, "seeds": count, "true": true}
        for sd, of_difference, shift in (
            (0.1, 0.0005, "additive"),
            (0.2, 0.0001, "additive"),
            (0.1, 0.0005, "scaled"),
        )
        for count in (3, 5, 10)
        for true in (0, 1)
    ]
    for cell in cells:
        how = {"kind": cell["shift"], "difference_sd": cell["difference_sd"]}
        cell["rates"] = rates(cell["true"], cell["sd"], (cell["seeds"],) * 2, draws, **how)
    uneven = [
        {"sd": 0.002, "seeds": own, "baseline_seeds": 3, "true": true}
        for own in (10, 20)
        for true in (0, 1)
    ]
    for cell in uneven:
        counts = cell["seeds"], cell["baseline_seeds"]
        cell["rates"] = rates(cell["true"], cell["sd"], counts, draws, paired=False)
    return cells + uneven


def looks_table(draws: int) -> list[dict]:
    ways = {
        "fixed n = 10": {},
        "naive looks": {"looks": LOOKS, "naive": True},
        "--looks": {"looks": LOOKS},
        "--looks, Welch": {"looks": LOOKS, "paired": False},
    }
    cells = [
        {"sd": sd, "way": way, "true": true}
        for sd in (0.002, 0.004, 0.006, 0.01)
        for way in ways
        for true in (0, 1)
    ]
    for cell in cells:
        counts = (LOOKS[-1], LOOKS[-1])
        cell["rates"] = rates(cell["true"], cell["sd"], counts, draws, **ways[cell["way"]])
    return cells


def noise_table(draws: int) -> list[dict]:
    cells = [
        {"noise": kind, "seeds": count, "looks": list(looks), "true": true}
        for kind in NOISES
        for count, looks in ((3, ()), (5, ()), (10, ()), (10, LOOKS))
        for true in (0, 1)
    ]
    for cell in cells:
        counts = (cell["seeds"], cell["seeds"])
        cell["rates"] = rates(
            cell["true"], 0.004, counts, draws, kind=cell["noise"], looks=tuple(cell["looks"])
        )
    return cells


def _arm(mode: str, seeds: range) -> Arm:
    runs = [
        RunData(
            path=f"{mode}/s{seed}",
            mode=mode,
            scaler="none",
            seed=seed,
            status="done",
            cause=None,
            last_step=1000,
            evals={"step": np.array([1000.0]), "updates": np.array([1000.0]), "loss": np.zeros(1)},
            train={},
            # Without training losses the divergence rule has nothing to judge.
            first_losses=np.empty(0),
            last_losses=np.empty(0),
        )
        for seed in seeds
    ]
    return Arm(label=mode, mode=mode, runs=runs)


def _fill(arm: Arm, values: np.ndarray) -> None:
    """Set the final losses to the first len(arm.runs) values."""
    for run, value in zip(arm.runs, values, strict=False):
        run.evals["loss"][0] = value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=20_000, help="per cell")
    parser.add_argument("--write", type=Path, metavar="DIR")
    tables = {
        "paired": paired_table,
        "welch": welch_table,
        "looks": looks_table,
        "noise": noise_table,
        "scatter": scatter_table,
        "growth": growth_table,
        "sweeps": sweeps_table,
        "sweep_noise": sweep_noise_table,
        "correlated": correlated_table,
        "pair": lambda draws: pair_table(draws, arms((1, 1), paired=True)),
    }
    parser.add_argument("--only", choices=tables, help="the other tables are those of --write DIR")
    arguments = parser.parse_args()
    if arguments.only and not arguments.write:
        parser.error("--only: needs --write")
    started = time.perf_counter()
    results = {
        "command": "python benchmarks/error_rates.py "
        + (f"--draws {arguments.draws} " if arguments.draws != 20_000 else "")
        + "--write docs",
        "draws": arguments.draws,
        "versions": f"Python {platform.python_version()}, numpy {np.__version__}, "
        f"scipy {scipy.__version__}",
        "nominal_alpha": nominal_alpha(LOOKS),
        "drawn": {},
    }
    if arguments.only:
        results = json.loads((arguments.write / "error_rates.json").read_text(encoding="utf-8"))
        arguments.draws = results["draws"]
    for name, table in tables.items():
        if arguments.only in (None, name):
            results[name] = table(arguments.draws)
            results["drawn"][name] = f"{datetime.now(UTC):%Y-%m-%d}"
            print(f"{name}: {time.perf_counter() - started:.0f} s", file=sys.stderr)
    if not arguments.only:
        results["seconds"] = round(time.perf_counter() - started)
    results["noises"], results["gaps"], results["shifts"] = NOISES, GAPS, SHIFTS
    results["summary"] = summary(results)
    text = document(results)
    print(text)
    if arguments.write:
        (arguments.write / "error_rates.md").write_text(text, encoding="utf-8")
        (arguments.write / "error_rates.json").write_text(
            json.dumps(results, indent=1) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
