"""Ratios to other tools, and targets for an H200 checked against rows.

Absolute rates are floors for one H200; the ratios are to contenders measured in the same run.
"""

from dataclasses import dataclass

from benchmarks.suite.contenders import AMP, FP8, NEAREST_MODE
from mprun.extensions.bench.cases import OWN
from mprun.extensions.bench.report import number, table
from mprun.extensions.bench.summary import peak_ratio, ratio, timed_rows

_RECIPE_MODE = NEAREST_MODE | dict.fromkeys(FP8, "amp_bf16")  # FP8 beside what it replaces
_HALF = ("amp", "fp16_master_scaled", "amp_bf16")
_OWN = tuple(OWN)


@dataclass(frozen=True, slots=True)
class Target:
    """A bound, at least or at most, for `measure` of `label` by one of `modes` and `contenders`.

    measure: "rate" (samples/s), a name of the summary's ratios, "memory_ratio", "peak_ratio",
    "peak_over_recipe", "energy_ratio" (to FP32) or "synchronisations". For a rate the best mode and
    contender counts. For "best_peer" the worst mode counts, with the better contender. For upper
    bounds the largest value counts.
    """

    label: str
    what: str
    measure: str
    bound: float
    modes: tuple[str, ...] = _HALF
    contenders: tuple[str, ...] = _OWN
    at_most: bool = False


def _peak(label: str, bound: float, over: str = "FP32", measure: str = "peak_ratio") -> Target:
    of = "peak memory" if measure == "peak_over_recipe" else "peak memory of master weights"
    modes, contenders = ("fp16_master_scaled",), ("mprun",)
    return Target(label, f"{of} over {over}", measure, bound, modes, contenders, at_most=True)


TARGETS = (
    Target("ResNet-50 b256", "eager", "rate", 4900, contenders=("mprun",)),
    Target("ResNet-50 b256", "compiled or fused", "rate", 6000, contenders=("mprun+",)),
    Target("ResNet-50 b256", "against the best peer", "best_peer", 1.00, contenders=("mprun+",)),
    Target("ResNet-50 b256", "over the torch.amp recipe", "recipe", 1.25, contenders=("mprun+",)),
    Target("ResNet-50 b256", "TF32 against peers", "best_peer", 1.00, modes=("tf32",)),
    Target("ResNet-50 b256", "FP32 against peers", "best_peer", 1.00, modes=("fp32",)),
    Target("ResNet-50 b256", "TF32", "rate", 2300, modes=("tf32",)),
    Target("ResNet-50 b256", "FP32 (TF32 off)", "rate", 1150, modes=("fp32",)),
    Target("ResNet-50 b256", "AMP over FP32", "fp32", 3.5, modes=("amp",)),
    Target("ResNet-50 b256", "AMP over TF32", "tf32", 1.9, modes=("amp",)),
    _peak("ResNet-50 b256", 0.55),
    Target("ResNet-50 b256", "energy of AMP over FP32", "energy_ratio", 0.5, ("amp",), _OWN, True),
    Target("ResNet-50 b32", "by a graph, against the best peer", "best_peer", 1.15),
    Target("ResNet-50 b32", "rate", "rate", 3500),
    Target("AlexNet b512", "against the best peer", "best_peer", 1.05),
    Target("AlexNet b512", "rate", "rate", 50_000),
    _peak("AlexNet b512", 0.74),
    Target("AlexNet b128", "against the best peer", "best_peer", 1.08),
    Target("AlexNet b128", "rate", "rate", 35_000),
    Target("DCGAN b128", "by a graph, against the best peer", "best_peer", 1.8),
    Target("DCGAN b128", "rate", "rate", 90_000),
    Target("LSTM LM b128", "by a graph, against the best peer", "best_peer", 1.15),
    Target("bigLSTM b256", "against dense updates of peers", "best_peer", 2.0),
    Target("bigLSTM b256", "rate", "rate", 150_000),
    _peak("bigLSTM b256", 0.80, "TF32"),
    *(
        _peak(label, 1.00, "the torch.amp recipe", "peak_over_recipe")
        for label in ("ResNet-50 b256", "AlexNet b512", "AlexNet b128", "bigLSTM b256")
    ),
)


def against_peers(rows: list[dict]) -> None:
    """Add the comparison with other tools to the summaries of mprun's rows.

    ratios: one to "best_peer" of the same model and mode, with its name as "peer" (and its mode, if
    no other tool has this one and the nearest is used). Below FP32 also one to "recipe", the
    documented torch.amp recipe, and to "recipe+", the same compiled. peak_over_recipe: peak
    allocated over that of the recipe.
    """
    timed = timed_rows(rows)
    for row in timed.values():
        case, summary = row["case"], row["summary"]
        summary["peak_over_recipe"] = None
        if case["contender"] not in OWN or case["real_data"]:
            continue
        peers = _peers_of(case, timed)
        if peers:
            best = max(peers, key=lambda peer: peer["summary"]["rate"]["median"])
            other = best["case"]
            mode = "" if other["mode"] == case["mode"] else f" ({other['mode']})"
            found = ratio(row, best) | {"peer": f"{other['contender']}{mode}"}
            summary["ratios"]["best_peer"] = found
        for name, contender in (("recipe", "amp"), ("recipe+", "amp+")):
            if (recipe := _recipe(case, contender, timed)) is not None:
                summary["ratios"][name] = ratio(row, recipe)
                if name == "recipe":
                    summary["peak_over_recipe"] = peak_ratio(row, recipe)


def _recipe(case: dict, contender: str, timed: dict) -> dict | None:
    """Return the row of a torch.amp recipe for a mode below FP32; None if there is none."""
    mode = _RECIPE_MODE.get(case["mode"], case["mode"])
    return timed.get((case["label"], mode, contender, False)) if mode in AMP else None


def _peers_of(case: dict, timed: dict) -> list[dict]:
    """Return timed rows of other tools on the same model in this mode, or in the nearest one."""
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


def judge(rows: list[dict]) -> list[dict]:
    """Return each target with its value, its row, and "reached", "missed" or "not measured".

    rows: with their summaries. Synchronisations must be 0 in every row of mprun.
    """
    judged = [_judged(target, rows) for target in TARGETS]
    return judged + [_judged_synchronisations(rows)]


def _judged(target: Target, rows: list[dict]) -> dict:
    found = []
    for row in rows:
        case = row["case"]
        if (
            row["summary"] is not None
            and case["label"] == target.label
            and case["mode"] in target.modes
            and case["contender"] in target.contenders
            and not case["real_data"]
        ):
            value = _value(target.measure, row, rows)
            if value is not None:
                found.append((value, f"{case['mode']}, {case['contender']}"))
    answer = {
        "label": target.label,
        "what": target.what,
        "measure": target.measure,
        "bound": target.bound,
        "at_most": target.at_most,
    }
    if not found:
        return answer | {"value": None, "row": None, "outcome": "not measured"}
    if target.measure == "best_peer":
        modes = {where.partition(",")[0] for _, where in found}
        found = [max(f for f in found if f[1].startswith(f"{mode},")) for mode in modes]
        value, where = min(found)
    else:
        value, where = max(found)
    reached = value <= target.bound if target.at_most else value >= target.bound
    outcome = "reached" if reached else "missed"
    return answer | {"value": value, "row": where, "outcome": outcome}


def _value(measure: str, row: dict, rows: list[dict]) -> float | None:
    summary = row["summary"]
    if measure == "rate":
        return summary["rate"]["median"]
    if measure in ("memory_ratio", "peak_ratio", "peak_over_recipe"):
        return summary[measure]
    if measure == "energy_ratio":
        wanted = row["case"] | {"mode": "fp32"}
        base = next((r for r in rows if r["case"] == wanted and r["summary"]), None)
        energies = summary["energy_j"], base and base["summary"]["energy_j"]
        return energies[0] / energies[1] if all(energies) else None
    found = summary["ratios"].get(measure)
    return None if found is None else found["median"]


def _judged_synchronisations(rows: list[dict]) -> dict:
    own = [row for row in rows if row["case"]["contender"] in _OWN and row["summary"]]
    counts = [
        (row["details"]["synchronisations"], row["key"])
        for row in own
        if isinstance(row["details"].get("synchronisations"), int | float)
    ]
    answer = {
        "label": "every model",
        "what": "synchronisations per step",
        "measure": "synchronisations",
        "bound": 0,
        "at_most": True,
    }
    if not counts:
        return answer | {"value": None, "row": None, "outcome": "not measured"}
    value, where = max(counts)
    outcome = "missed" if value else "reached"
    return answer | {"value": value, "row": where, "outcome": outcome}


def as_table(judged: list[dict]) -> str:
    """Format the result of `judge` as a table for bench.md."""
    lines = []
    for target in judged:
        sign = "at most" if target["at_most"] else "at least"
        value = number(target["value"], ",.4g")
        bound = f"{sign} {target['bound']:,g}"
        where = target["row"] or ""
        lines.append([target["label"], target["what"], bound, value, where, target["outcome"]])
    return table(["model", "what", "target", "measured", "of", "outcome"], lines)
