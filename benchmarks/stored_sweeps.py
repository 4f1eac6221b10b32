"""Judge stored results with ten or five seeds again, as sweeps that run until they are decided.

    python benchmarks/stored_sweeps.py [RESULTS.json ...]

A result holds the final values of each seed of the modes and of FP32. The seeds come in a chance
order: 2,000 random orders (of six seeds or fewer all) are swept as `until=decided max_seeds=10`
does, as far as there are seeds. It prints a row a mode and a rule: how often each word came, and
the mean number of seeds. Without arguments: the known truths and the FP16 gradient sums of
docs/results.
"""

import itertools
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from error_rates_sweeps import FIRST, LOOKS, MOST, UNTIL, Draw, Found, swept

from mprun.comparison.equivalence import ALPHA
from mprun.comparison.looks import nominal_alpha, spent_alphas

RESULTS = Path(__file__).parents[1] / "docs" / "results"
STORED = ("2026-11-20-cpu-known-truths.json", "2026-11-22-cpu-ranks-underflow.json")
ORDERS = 2000


def stored_arms(results: dict) -> Iterator[tuple[str, list[dict], list[dict]]]:
    """Yield label, the mode's outcomes and the baseline's: dictionaries with seed and value."""
    for row in results.get("rows", []):
        yield row["arm"], row["outcomes"], row["baseline_outcomes"]
    for group in results.get("training", {}).get("groups", []):
        for row in group["modes"]:
            yield row["label"], row["outcomes"], group["baseline"]["outcomes"]


def rules(most: int) -> dict[str, dict[int, float]]:
    """Return the alphas of each look of the rules that so many seeds allow."""
    fixed = {f"{count} seeds": {count: ALPHA} for count in (3, 5, 10) if count <= most}
    spent = zip(range(FIRST, most + 1), spent_alphas(FIRST, MOST), strict=False)
    return fixed | {
        "--looks 3,5,10": {n: nominal_alpha(LOOKS) for n in LOOKS if n <= most},
        UNTIL: dict(spent),
    }


def in_orders(
    own: Sequence[float], base: Sequence[float], alphas: dict[int, float], gives_up: bool
) -> Counter[Found]:
    """Return what a rule says of the pairs in many orders."""
    count = len(own)
    orders = list(itertools.permutations(range(count))) if count <= 6 else None
    if orders is None:
        generator = np.random.default_rng(0)
        orders = [tuple(generator.permutation(count).tolist()) for _ in range(ORDERS)]
    return Counter(
        swept(Draw([own[i] for i in order], [base[i] for i in order]), alphas)[gives_up]
        for order in orders
    )


def told(found: Counter[Found]) -> str:
    """Return the share of each word and the mean number of seeds."""
    words = Counter()
    for (word, _), times in found.items():
        words[word] += times
    total = found.total()
    seeds = sum(count * times for (_, count), times in found.items()) / total
    shares = ", ".join(f"{word} {times / total:.0%}" for word, times in words.most_common())
    return f"{shares.replace('%', ' %')} / {seeds:.1f}"


def main() -> None:
    for path in [Path(name) for name in sys.argv[1:]] or [RESULTS / name for name in STORED]:
        print(path.name)
        for label, own, base in stored_arms(json.loads(path.read_text(encoding="utf-8"))):
            if any(one["diverged"] is not None for one in own):
                print(f"  {label}: diverged, decided at once")
                continue
            values = [{one["seed"]: one["value"] for one in arm} for arm in (own, base)]
            seeds = sorted(values[0].keys() & values[1])
            if len(seeds) < 3:
                print(f"  {label}: {len(seeds)} shared seeds")
                continue
            arms = [[arm[seed] for seed in seeds] for arm in values]
            for rule, alphas in rules(len(seeds)).items():
                print(f"  {label} | {rule} | {told(in_orders(*arms, alphas, rule == UNTIL))}")


if __name__ == "__main__":
    main()
