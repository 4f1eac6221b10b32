"""The numbers of a report from raw windows; works on the plain rows of bench.json.

Every ratio is above 1 if the row is faster than the other one. Intervals are percentile bootstraps
(Efron and Tibshirani, An Introduction to the Bootstrap, 1993, section 13.3) with a fixed seed. With
fewer than about ten windows they are narrower than 95 % coverage requires.
"""

from collections.abc import Sequence
from typing import Any

import numpy
from numpy.typing import NDArray

from mprun.execution.graphed_step import DEVICE_LIMITS
from mprun.extensions.bench.cases import REFERENCES

RESAMPLES, CONFIDENCE, SEED = 4000, 0.95, 20171010


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return {"median", "q1", "q3", "n"} of at least one value; quartiles are interpolated."""
    q1, median, q3 = numpy.percentile(values, (25, 50, 75)).tolist()
    return {"median": median, "q1": q1, "q3": q3, "n": len(values)}


def ratio_of(above: Sequence[float], below: Sequence[float], *, paired: bool) -> dict[str, Any]:
    """Return {"median", "low", "high", "n", "paired"}: a ratio of windows, its interval at 95 %.

    paired: the windows of a pair followed one another in the same round, so that drift of clock and
    temperature cancels, and pairs are resampled. Otherwise it is the ratio of two medians of
    windows at other times, each side resampled separately.
    """
    random = numpy.random.default_rng(SEED)

    def resampled(values: NDArray[Any]) -> NDArray[Any]:
        draws = random.integers(0, len(values), (RESAMPLES, len(values)))
        return numpy.median(values[draws], axis=1)

    upper, lower = numpy.asarray(above, dtype=float), numpy.asarray(below, dtype=float)
    if paired:
        middle, medians = numpy.median(upper / lower), resampled(upper / lower)
    else:
        middle = numpy.median(upper) / numpy.median(lower)
        medians = resampled(upper) / resampled(lower)
    tail = (1 - CONFIDENCE) / 2
    low, high = numpy.quantile(medians, (tail, 1 - tail)).tolist()
    found = {"median": float(middle), "low": low, "high": high}
    return found | {"n": min(len(upper), len(lower)), "paired": paired}


def summarise(rows: list[dict]) -> None:
    """Put "summary" into each row; None if no window of it was timed.

    rate: samples/s. ratios: to the same contender in "fp32" and "tf32". There is none if one of the
    two replays a graph and the other's update cannot: see "no_ratio". limit_share: share of the
    roofline's limit. energy_j: joules per sample. memory_bytes: weights,
    gradients, optimizer state and activation memory; memory_ratio: over FP32's.
    peak_ratio: peak allocated over FP32's (over TF32's if FP32 was not measured: the same formats).
    skipped: updates since the beginning. host_us: per step. data_wait: share of the windows' time.
    """
    timed = timed_rows(rows)
    for row in rows:
        row["summary"] = _summary(row, timed) if row["windows"] else None


def timed_rows(rows: list[dict]) -> dict[tuple, dict]:
    """Return the rows with windows, by (label, mode, contender, real_data)."""
    return {_place(row): row for row in rows if row["windows"]}


def rates(row: dict) -> list[float]:
    """Return samples per second of each window."""
    return [window["samples"] / window["seconds"] for window in row["windows"]]


def ratio(row: dict, other: dict) -> dict:
    """Return how much faster `row` is than `other`, by windows in the same rounds if there are."""
    mine, theirs = _by_round(row), _by_round(other)
    rounds = [place for place in mine if place in theirs]
    return ratio_of(
        [mine[place] for place in rounds or mine],
        [theirs[place] for place in rounds or theirs],
        paired=bool(rounds),
    )


def peak_ratio(row: dict, other: dict | None) -> float | None:
    """Return the peak allocated over that of another row."""
    both = ({} if r is None else r["details"].get("peak", {}) for r in (row, other))
    mine, theirs = (peak.get("allocated") for peak in both)
    return mine / theirs if mine and theirs else None


def _summary(row: dict, timed: dict[tuple, dict]) -> dict:
    details = row["details"]
    found: dict[str, Any] = {"rate": spread(rates(row)), "ratios": {}}
    for mode in REFERENCES:
        other = timed.get(_place(row, mode))
        if other is None or mode == row["case"]["mode"]:
            continue
        if _executed_alike(row, other):
            found["ratios"][mode] = ratio(row, other)
        else:
            found["no_ratio"] = f"no ratio to {mode}: one is replayed, the other cannot be"
    limit, fp32 = row["limit"].get("limit"), timed.get(_place(row, "fp32"))
    memory, of_fp32 = _all_kinds(row), None if fp32 is None else _all_kinds(fp32)
    long, waits = details.get("energy_window"), [w["data_wait_s"] for w in row["windows"]]
    metered = [long] if long else row["windows"]
    energies, samples = [w["energy_mj"] for w in metered], sum(w["samples"] for w in metered)
    seconds = sum(window["seconds"] for window in row["windows"])
    return found | {
        "limit_share": None if limit is None else found["rate"]["median"] / limit,
        "energy_j": None if None in energies else sum(energies) / 1000 / samples,
        "memory_bytes": memory,
        "memory_ratio": memory / of_fp32 if memory and of_fp32 else None,
        "peak_ratio": peak_ratio(row, fp32 or timed.get(_place(row, "tf32"))),
        "skipped": details.get("skipped"),
        "host_us": None if "host_s" not in details else 1e6 * details["host_s"],
        "data_wait": None if None in waits else min(1.0, sum(waits) / seconds),
    }


def _executed_alike(row: dict, other: dict) -> bool:
    """Return False if one row replays a graph that the other's update cannot have.

    A row that stays eager because its device is the limit would gain nothing from a graph.
    """
    facts = [one["facts"].get("prepare", {}) for one in (row, other)]
    if len({bool(fact.get("replays")) for fact in facts}) == 1:
        return True
    [eager] = [fact for fact in facts if not fact.get("replays")]
    reason = str(eager.get("settings", {}).get("cuda_graph"))
    return not reason.startswith("off: ") or reason.startswith(f"off: {DEVICE_LIMITS}")


def _all_kinds(row: dict) -> int | None:
    """Return the bytes of all kinds and dtypes, or None if they were not measured."""
    kinds = row["details"].get("memory_by_kind")
    if not kinds or "why_not" in kinds:
        return None
    return sum(size for sizes in kinds.values() for size in sizes.values())


def _place(row: dict, mode: str | None = None) -> tuple:
    case = row["case"]
    return case["label"], mode or case["mode"], case["contender"], case["real_data"]


def _by_round(row: dict) -> dict[tuple[int, int], float]:
    places = [(window["cohort"], window["round"]) for window in row["windows"]]
    return dict(zip(places, rates(row), strict=True))
