"""The ceilings of a GPU, the least time of a counted step there, and the tables of it.

This module imports no torch: a help page lists the names of GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from mprun.errors import BadInput
from mprun.extensions.bench.roofline import FORMATS
from mprun.record.console import markdown_table
from mprun.spelling import nearest

if TYPE_CHECKING:
    from mprun.extensions.bench.roofline.count import Counted
    from mprun.extensions.bench.roofline.operations import OperationCosts
    from mprun.precision import PrecisionPolicy

LIMIT = (
    "no step can be faster than the limit, compiled or not, if the following assumptions hold. "
    "Products run one after the other, and the GPU executes all their multiply-adds. Each product "
    "reads each operand once, in the format that it multiplies, and writes its result once. The "
    "update reads gradients, and reads and writes weights and state. Work other than products and "
    "the update (casts, norms, losses) takes no time. No tensor stays in a cache for the next "
    "kernel"
)
LAUNCH_SOURCE = "assumed: 1.5 us per kernel in a CUDA graph, and 8 us in eager mode"
# Bytes per parameter and step of SGD with momentum in torch's fused kernel. In FP32 the gradient is
# written, and read beside weight and momentum, which are read and written. With FP16 copies the
# cast of the weight comes on top (6), and the FP16 gradient is written, read and widened (8 in
# place of 4). A scale takes a pass that checks and one that unscales (8 each); torch.amp's is one.
RECIPES = {"fp32": 4 + 20, "torch.amp as documented": 6 + 8 + 8 + 20}
RECIPES |= {"fp16 with masters": 6 + 8 + 20, "fp16 with masters and loss scale": 6 + 8 + 16 + 20}


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Rates that a program can reach, not those of the data sheet."""

    name: str
    source: str  # where the rates are from
    # FLOP/s of large products by number format, as far as the GPU has them. A multiply-add is 2.
    flops: dict[str, float]
    bandwidth: float  # bytes/s of a copy, read and written together
    memory: float  # bytes
    # graph_launch_s, eager_launch_s: least seconds of one kernel, an assumption.
    graph_launch_s: float = 1.5e-6
    eager_launch_s: float = 8e-6


def _gpu(
    name: str, half: float, fp32: float, others: dict[str, float], bandwidth: float, gib: float
) -> Ceilings:
    """Return the ceilings of a GPU; others: the rates of other formats over that of FP16."""
    flops = {"fp16": half, "fp32": fp32} | {form: half * over for form, over in others.items()}
    source = (
        f"assumed for {name}: FP16 products reach {half / 1e12:g} TFLOP/s and copies "
        f"{bandwidth / 1e12:g} TB/s, as observed; FP32 products reach 0.86 of the data sheet's "
        f"rate{'; FP8 products reach twice the rate of FP16' if 'fp8' in others else ''}"
    )
    return Ceilings(name, source, flops, bandwidth, gib * 2**30)


# BF16 Tensor Cores came with TF32 and run at the rate of FP16 (NVIDIA A100 data sheet).
_AMPERE = {"bf16": 1.0, "tf32": 0.5}
_HOPPER = _AMPERE | {"fp8": 2.0}  # as on the data sheets of H100 and H200: 1,979 and 989.5
# FP16 rate and bandwidth of H200 are matrix products and copies observed on one (769 to 798
# TFLOP/s, 4.3 TB/s); those of the others are the ones used to judge published training runs. FP32
# is 0.86 of the data sheet (15.7, 19.5, 67 TFLOP/s), the ratio of an H200: 57.5 of 67, the middle
# of 55 to 60.
GPUS = {
    "H200": _gpu("H200", 790e12, 57.5e12, _HOPPER, 4.3e12, 139),
    "H100": _gpu("H100", 740e12, 57.5e12, _HOPPER, 3.0e12, 79),
    "A100": _gpu("A100", 260e12, 16.7e12, _AMPERE, 1.75e12, 79),
    "V100": _gpu("V100", 100e12, 13.5e12, {}, 0.80e12, 31.5),
}


def ceilings_of(name: str) -> Ceilings:
    """Return the ceilings of a named GPU, in any case of letters; BadInput for an unknown one."""
    if name.upper() in GPUS:
        return GPUS[name.upper()]
    allowed = f"allowed: {', '.join(GPUS)}"
    if name.lower() in ("cpu", "cuda", "auto"):
        raise BadInput(f"--gpu {name}: a roofline needs the name of a GPU ({allowed})")
    raise BadInput(f"--gpu {name}: unknown{nearest(name.upper(), GPUS)} ({allowed})")


def why_not(policy: PrecisionPolicy, overrides: Sequence[str], ceilings: Ceilings) -> str | None:
    """Return the reason why this GPU has no such mode, or None; overrides: dtypes of modules.

    TF32 and BF16 products need compute capability 8.0 (NVIDIA Ampere); V100 has 7.0. FP8 products
    need 8.9, and 9.0 with scales by row: H100 and H200 have both, the others neither.
    """
    wanted = [*(FORMATS[str(dtype)] for dtype in policy.formats), *overrides]
    wanted += ["tf32"] if policy.fp32_math == "tf32" else []
    for form in wanted:
        if form not in ceilings.flops:
            has = ", ".join(sorted(ceilings.flops))
            return f"{ceilings.name} has no {form.upper()} products (it has {has})"
    return None


def limit(counted: Counted, ceilings: Ceilings) -> dict[str, Any]:
    """Return the limits of a counted step, in seconds, bytes, FLOP and samples per second.

    eager: samples per second if operations run one after the other and each takes the longer of its
    products and its traffic. fused: the same with ReLUs, residuals and their gradients folded into
    BatchNorm kernels; None if nothing can be folded. limit: the same with everything folded into
    products and update, see `LIMIT`. flop_only: products at their full rate, traffic free. These
    four include the update. memory_bound_share: part of the eager time in which traffic takes
    longer than products. step_s, update_s: the eager time, and the update's part.
    graph_launches, eager_launches: samples per second if a kernel takes its launch time alone.
    kinds: rows of one kind and phase, most expensive first. BadInput if a ceiling is missing.
    """
    lacks = {row.form for row in counted.rows if row.flops} - ceilings.flops.keys()
    if lacks:
        names = ", ".join(sorted(lacks)).upper()
        raise BadInput(
            f"{ceilings.name}: the step has {names} products, whose peak rate is unknown"
        )
    costs = [(row, row.seconds(ceilings.flops, ceilings.bandwidth)) for row in counted.rows]
    timed = [(row, max(both)) for row, both in costs]
    total = sum(seconds for _, seconds in timed)
    update = sum(seconds for row, seconds in timed if row.phase == "update")
    folded = sum(
        seconds if row.folded_bytes is None else row.folded_bytes / ceilings.bandwidth
        for row, seconds in timed
    )
    folds = any(row.folded_bytes is not None for row in counted.rows)
    least = sum(row.least_seconds(ceilings.flops, ceilings.bandwidth) for row in counted.rows)
    launches, samples = sum(row.launches for row in counted.rows), counted.samples
    return {
        "eager": samples / total,
        "fused": samples / folded if folds else None,
        "limit": samples / least,
        "flop_only": samples / sum(products for _, (products, _) in costs),
        "without_update": samples / (total - update),
        "memory_bound_share": sum(t for _, (products, t) in costs if products <= t) / total,
        "step_s": total,
        "update_s": update,
        "launches": launches,
        "graph_launches": samples / (launches * ceilings.graph_launch_s),
        "eager_launches": samples / (launches * ceilings.eager_launch_s),
        "kinds": _kinds(timed, total),
        "flops_per_sample": counted.flops / samples,
        "bytes_per_sample": counted.bytes() / samples,
        "update_bytes": counted.bytes(("update",)),
        "update": counted.update,
        "memory": asdict(counted.memory) | {"total": counted.memory.total},
        "bytes_per_parameter": counted.memory.of_weights / counted.parameters,
        "counted_s": counted.counted_s,
    }


def _kinds(timed: list[tuple[OperationCosts, float]], total: float) -> list[dict[str, Any]]:
    groups: dict[tuple[str, str], list[tuple[OperationCosts, float]]] = {}
    for row, seconds in timed:
        groups.setdefault((row.kind, row.phase), []).append((row, seconds))
    kinds = []
    for (kind, phase), group in groups.items():
        seconds = sum(s for _, s in group)
        place = {"kind": kind, "phase": phase, "seconds": seconds, "share": seconds / total}
        sums = {n: sum(getattr(r, n) for r, _ in group) for n in ("flops", "bytes", "launches")}
        kinds.append(place | sums)
    return sorted(kinds, key=lambda kind: -kind["seconds"])


def limits(steps: list[Counted], ceilings: Ceilings, refused: list[str]) -> dict[str, Any]:
    """Return the content of --json; refused: why other modes are missing."""
    modes = {step.mode: limit(step, ceilings) for step in steps}
    bases = {base: modes.get(base, {}).get("eager") for base in ("fp32", "tf32")}
    for mode in modes.values():
        mode["speedup_limit"] = {b: rate and mode["eager"] / rate for b, rate in bases.items()}
    first = steps[0]
    recipes = {name: size * first.dense / ceilings.bandwidth for name, size in RECIPES.items()}
    return {
        "what": "limits from counts, not measurements",
        "label": first.label,
        "sample": first.sample,
        "samples_per_step": first.samples,
        "parameters": first.parameters,
        "ceilings": asdict(ceilings),
        "launches": LAUNCH_SOURCE,
        "update_recipes_s": recipes,
        "modes": modes,
        "refused": refused,
    }


def as_text(found: dict[str, Any], top: int) -> str:
    """Format `limits` for a terminal; top: operations shown for each mode."""
    modes, unit = found["modes"], found["sample"]
    title = (
        f"{found['label']}: {found['parameters'] / 1e6:,.2f} M parameters, "
        f"{found['samples_per_step']:,} {unit}s a step, on {found['ceilings']['name']}"
    )
    memory = _memory(modes, found["ceilings"]["memory"])
    parts = [title, "", _speed(modes, unit), "", memory, "", *_notes(found), *found["refused"]]
    for mode, line in modes.items() if top else ():
        kinds = _most_expensive(line["kinds"][:top], unit, found["samples_per_step"])
        parts += ["", f"{mode}: the {top} most expensive", kinds]
    return "\n".join(parts)


def _speed(modes: dict[str, dict], unit: str) -> str:
    header = ["mode", f"limit {unit}s/s", "eager", "fused", "FLOP only"]
    header += [f"GFLOP/{unit}", f"MB/{unit}"]
    header += ["memory-bound", "update ms", "kernels", "x fp32", "x tf32"]
    rows = [
        [
            mode,
            three(line["limit"]),
            three(line["eager"]),
            "-" if line["fused"] is None else three(line["fused"]),
            three(line["flop_only"]),
            f"{line['flops_per_sample'] / 1e9:.3g}",
            f"{line['bytes_per_sample'] / 1e6:.3g}",
            f"{line['memory_bound_share']:.0%}",
            f"{line['update_s'] * 1e3:.3g}",
            str(line["launches"]),
            *("-" if x is None else f"{x:.2f}" for x in line["speedup_limit"].values()),
        ]
        for mode, line in modes.items()
    ]
    return markdown_table(header, rows)


def _memory(modes: dict[str, dict], card: float) -> str:
    rows = []
    for mode, line in modes.items():
        total = line["memory"]["total"]
        of_fp32 = f"{total / modes['fp32']['memory']['total']:.2f}" if "fp32" in modes else "-"
        sizes = [f"{size / 2**30:.3g}" for size in line["memory"].values()]
        each = f"{line['bytes_per_parameter']:.3g}"
        rows.append([mode, *sizes, each, of_fp32, "yes" if total < card else "no"])
    kinds = next(iter(modes.values()))["memory"]
    header = ["memory, GiB", *kinds, "B/parameter", "x fp32", f"fits {card / 2**30:.3g} GiB"]
    return markdown_table(header, rows)


def _notes(found: dict[str, Any]) -> list[str]:
    unit, (mode, first) = found["sample"], next(iter(found["modes"].items()))
    graph, eager = three(first["graph_launches"]), three(first["eager_launches"])
    paths = ", ".join(dict.fromkeys(line["update"] for line in found["modes"].values()))
    recipes = ", ".join(f"{of} {s * 1e3:.3g}" for of, s in found["update_recipes_s"].items())
    return [
        "The rates are limits, computed from counted operations and not measured. The ceilings "
        f"are {found['ceilings']['source']}.",
        f"Limit: {LIMIT}.",
        "Eager: all operations, including the update, run one after the other. The time of each "
        "operation is the longer of its compute time and its memory time. The ratios (x fp32) "
        "compare eager steps.",
        f"Kernel launches alone limit {mode} to {graph} {unit}s/s in a replayed CUDA graph, and to "
        f"{eager} {unit}s/s in eager mode. Times of launches are {LAUNCH_SOURCE}.",
        f"The counts assume this implementation of the update: {paths}. SGD with momentum on the "
        f"parameters of this model takes the following times, in ms per step: {recipes}. The "
        "times of SGD include writing gradients and casting weights.",
        "Memory excludes workspaces and temporary results; B/parameter excludes activations.",
    ]


def _most_expensive(kinds: list[dict], unit: str, samples: int) -> str:
    rows = [
        [
            kind["kind"],
            kind["phase"],
            f"{kind['share']:.1%}",
            f"{kind['seconds'] * 1e3:.3g}",
            f"{kind['flops'] / samples / 1e9:.3g}",
            f"{kind['bytes'] / samples / 1e6:.3g}",
            str(kind["launches"]),
        ]
        for kind in kinds
    ]
    header = ["operation", "phase", "of step", "ms", f"GFLOP/{unit}", f"MB/{unit}", "kernels"]
    return markdown_table(header, rows)


def three(value: float) -> str:
    """Return three significant digits, with separators."""
    return f"{float(f'{value:.3g}'):,.0f}" if value >= 100 else f"{value:.3g}"
