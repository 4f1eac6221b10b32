"""From raw windows to the numbers of a report; works on the plain rows of bench.json.

Every ratio is above 1 where the row is faster than what it is compared with.
"""

from dataclasses import asdict

from mprun.bench.registry import AMP, NEAREST_MODE, OWN
from mprun.bench.statistics import Ratio, paired_ratio, spread, unpaired_ratio
from mprun.execution.graphed_step import DEVICE_LIMITS

REFERENCES = ("fp32", "tf32")


def summarise(rows: list[dict]) -> None:
    """Put "summary" into each row; None where nothing of it was timed.

    rate: samples/s, median, quartiles, n. ratios: to the same contender in "fp32" and "tf32" (but
    where one of the two replays a graph that the other's update cannot have: see "no_ratio"); of
    mprun's own to "best_peer" of the same model and mode, with its name as "peer" (and its mode,
    where no other tool has this one and the nearest is taken), and in modes of 16 bits to "recipe",
    the torch.amp recipe as documented. A ratio pairs windows of the same
    round; of two rows that were never alive together it says paired: false. limit_share: of the
    roofline limit of eager execution. energy_j: per sample. memory_bytes: of weights, gradients,
    optimizer state and what is saved for backward; memory_ratio: the same over FP32's; peak_ratio:
    peak allocated over FP32's (over TF32's where FP32 was not measured: the same formats);
    peak_over_recipe: over that of the torch.amp recipe. skipped: updates since the beginning.
    host_us: per step. data_wait: share of the windows' time.
    """
    timed = {_place(row): row for row in rows if row["windows"]}
    for row in rows:
        row["summary"] = _summary(row, timed) if row["windows"] else None
    for row in rows:
        if row["summary"] is not None:
            _against_fp32(row, timed)


def rates(row: dict) -> list[float]:
    """Samples per second of each window."""
    return [window["samples"] / window["seconds"] for window in row["windows"]]


def ratio(row: dict, other: dict) -> Ratio:
    """How much faster `row` is than `other`, of windows in the same rounds where there are any."""
    mine, theirs = _by_round(row), _by_round(other)
    rounds = [place for place in mine if place in theirs]
    if rounds:
        return paired_ratio([mine[r] for r in rounds], [theirs[r] for r in rounds])
    return unpaired_ratio(list(mine.values()), list(theirs.values()))


def kinds_total(row: dict) -> int | None:
    """Bytes of all kinds and dtypes, or None where they were not measured."""
    kinds = row["details"].get("memory_by_kind")
    if not kinds or "why_not" in kinds:
        return None
    return sum(size for sizes in kinds.values() for size in sizes.values())


def _summary(row: dict, timed: dict) -> dict:
    case, details, own_rates = row["case"], row["details"], rates(row)
    found = {"rate": asdict(spread(own_rates)), "ratios": {}}
    for mode in REFERENCES:
        other = timed.get(_place(row, mode=mode))
        if other is None or mode == case["mode"]:
            continue
        if _executed_alike(row, other):
            found["ratios"][mode] = asdict(ratio(row, other))
        else:
            found["no_ratio"] = f"no ratio to {mode}: one is replayed, the other cannot be"
    if case["contender"] in OWN and not case["real_data"]:
        peers = _peers_of(case, timed)
        if peers:
            best = max(peers, key=lambda peer: spread(rates(peer)).median)
            other = best["case"]
            name = other["contender"] + (
                "" if other["mode"] == case["mode"] else f" ({other['mode']})"
            )
            found["ratios"]["best_peer"] = asdict(ratio(row, best)) | {"peer": name}
        recipe = _recipe(row, timed)
        if recipe is not None:
            found["ratios"]["recipe"] = asdict(ratio(row, recipe))
    eager = row["limit"].get("eager")
    found["limit_share"] = None if eager is None else found["rate"]["median"] / eager
    found["energy_j"] = _energy(row)
    found["memory_bytes"] = kinds_total(row)
    found["skipped"] = details.get("skipped")
    found["host_us"] = None if "host_s" not in details else 1e6 * details["host_s"]
    found["data_wait"] = _data_wait(row)
    return found


def _executed_alike(row: dict, other: dict) -> bool:
    """False where one of two rows of mprun replays a graph that the other's update cannot have.

    Then their ratio would be that of two ways of execution. (A row that stays eager because its
    device is the limit would gain nothing from a graph.)
    """
    facts = [one["facts"].get("prepare", {}) for one in (row, other)]
    if len({bool(fact.get("replays")) for fact in facts}) == 1:
        return True
    [eager] = [fact for fact in facts if not fact.get("replays")]
    reason = str(eager.get("settings", {}).get("cuda_graph"))
    return not reason.startswith("off: ") or reason.startswith(f"off: {DEVICE_LIMITS}")


def _against_fp32(row: dict, timed: dict) -> None:
    """Memory ratios; a peer without memory by kind has its peak alone."""
    summary, base = row["summary"], timed.get(_place(row, mode="fp32"))
    own, of_base = summary["memory_bytes"], base and base["summary"]["memory_bytes"]
    summary["memory_ratio"] = own / of_base if own and of_base else None
    base = base or timed.get(_place(row, mode="tf32"))
    summary["peak_ratio"] = _peak_ratio(row, base)
    summary["peak_over_recipe"] = _peak_ratio(row, _recipe(row, timed))


def _peak_ratio(row: dict, other: dict | None) -> float | None:
    peaks = [
        r["details"].get("peak", {}).get("allocated") if r is not None else None
        for r in (row, other)
    ]
    return peaks[0] / peaks[1] if all(peaks) else None


def _recipe(row: dict, timed: dict) -> dict | None:
    """The row of the torch.amp recipe for a mode of 16 bits; None where there is none."""
    case = row["case"]
    mode = NEAREST_MODE.get(case["mode"], case["mode"])
    if mode not in AMP or case["contender"] not in OWN or case["real_data"]:
        return None
    return timed.get((case["label"], mode, "amp", False))


def _place(row: dict, mode: str | None = None) -> tuple:
    case = row["case"]
    return case["label"], mode or case["mode"], case["contender"], case["real_data"]


def _by_round(row: dict) -> dict[tuple[int, int], float]:
    places = [(window["cohort"], window["round"]) for window in row["windows"]]
    return dict(zip(places, rates(row), strict=True))


def _peers_of(case: dict, timed: dict) -> list[dict]:
    """Timed rows of other tools on the same model: in this mode, else in the nearest one."""
    for mode in (case["mode"], NEAREST_MODE.get(case["mode"])):
        found = [
            row
            for (label, its_mode, contender, real_data), row in timed.items()
            if label == case["label"]
            and its_mode == mode
            and contender not in OWN
            and not real_data
        ]
        if found:
            return found
    return []


def _energy(row: dict) -> float | None:
    """Joules per sample of one long window, or of all timed ones; None if it cannot be read."""
    long = row["details"].get("energy_window")
    windows = [long] if long else row["windows"]
    if any(window["energy_mj"] is None for window in windows):
        return None
    return sum(w["energy_mj"] for w in windows) / 1000 / sum(w["samples"] for w in windows)


def _data_wait(row: dict) -> float | None:
    """Share of the windows' time that the device waited for data."""
    waits = [window["data_wait_s"] for window in row["windows"]]
    if any(wait is None for wait in waits):
        return None
    return min(1.0, sum(waits) / sum(window["seconds"] for window in row["windows"]))
