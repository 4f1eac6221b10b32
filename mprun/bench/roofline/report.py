"""The table of a roofline, as text and as plain values for JSON."""

from dataclasses import asdict, dataclass

from mprun.bench.roofline.count import Counted
from mprun.bench.roofline.limits import LAUNCH_SOURCE, RECIPES, Ceilings, Limit
from mprun.record.console import markdown_table


@dataclass(frozen=True, slots=True)
class Line:
    """One mode: its count and its limit."""

    counted: Counted
    limit: Limit


def as_text(lines: list[Line], ceilings: Ceilings, refused: list[str], top: int) -> str:
    """Tables and notes for a terminal."""
    first = lines[0].counted
    unit = first.sample
    parts = [
        f"{first.label}: {first.parameters / 1e6:,.2f} M parameters, {first.samples:,} {unit}s a "
        f"step, on {ceilings.name}",
        "",
        _speed(lines, unit),
        "",
        _memory(lines, ceilings),
        "",
        *_notes(lines, ceilings),
        *refused,
    ]
    for line in lines if top else ():
        parts += ["", f"{line.counted.mode}: the {top} most expensive", _kinds(line, top)]
    return "\n".join(parts)


def as_dict(lines: list[Line], ceilings: Ceilings, refused: list[str]) -> dict:
    """Everything as numbers in base units: seconds, bytes, FLOP, samples per second."""
    modes = {}
    for line in lines:
        counted, limit = line.counted, asdict(line.limit)
        limit.pop("ceilings")
        modes[counted.mode] = limit | {
            "flops_per_sample": counted.flops / counted.samples,
            "bytes_per_sample": counted.bytes() / counted.samples,
            "update_bytes": counted.bytes(("update",)),
            "update": counted.update,
            "memory": asdict(counted.memory) | {"total": counted.memory.total},
            "speedup_limit": {base: _ratio(lines, line, base) for base in ("fp32", "tf32")},
            "counted_s": counted.counted_s,
        }
    first = lines[0].counted
    return {
        "what": "limits from counts, not measurements",
        "label": first.label,
        "sample": first.sample,
        "samples_per_step": first.samples,
        "parameters": first.parameters,
        "ceilings": asdict(ceilings),
        "launches": LAUNCH_SOURCE,
        "update_recipes_s": _recipes(first, ceilings),
        "modes": modes,
        "refused": refused,
    }


def _speed(lines: list[Line], unit: str) -> str:
    header = ["mode", f"limit {unit}s/s", "BN fused", "FLOP only", f"GFLOP/{unit}", f"MB/{unit}"]
    header += ["memory-bound", "update ms", "kernels", "x fp32", "x tf32"]
    rows = []
    for line in lines:
        counted, limit = line.counted, line.limit
        ratios = [_ratio(lines, line, base) for base in ("fp32", "tf32")]
        rows.append(
            [
                counted.mode,
                _three(limit.eager),
                "-" if limit.fused is None else _three(limit.fused),
                _three(limit.flop_only),
                f"{counted.flops / counted.samples / 1e9:.3g}",
                f"{counted.bytes() / counted.samples / 1e6:.3g}",
                f"{limit.memory_bound_share:.0%}",
                f"{limit.update_s * 1e3:.3g}",
                str(limit.launches),
                *("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
            ]
        )
    return markdown_table(header, rows)


def _memory(lines: list[Line], ceilings: Ceilings) -> str:
    kinds = ("parameters", "masters", "optimizer", "gradients", "activations", "total")
    base = next((line.counted.memory for line in lines if line.counted.mode == "fp32"), None)
    fits = f"fits {ceilings.memory / 2**30:.3g} GiB"
    rows = []
    for line in lines:
        memory = line.counted.memory
        ratio = "-" if base is None else f"{memory.total / base.total:.2f}"
        sizes = [f"{getattr(memory, kind) / 2**30:.3g}" for kind in kinds]
        enough = "yes" if memory.total < ceilings.memory else "no"
        rows.append([line.counted.mode, *sizes, ratio, enough])
    return markdown_table(["memory, GiB", *kinds, "x fp32", fits], rows)


def _notes(lines: list[Line], ceilings: Ceilings) -> list[str]:
    first, unit = lines[0], lines[0].counted.sample
    graph, eager = map(_three, (first.limit.graph_launches, first.limit.eager_launches))
    paths = ", ".join(dict.fromkeys(line.counted.update for line in lines))
    seconds = _recipes(first.counted, ceilings).items()
    recipes = ", ".join(f"{name} {value * 1e3:.3g}" for name, value in seconds)
    return [
        f"Limits from counts, not measurements; ceilings {ceilings.source}.",
        "limit: each operation takes the longer of its products and its traffic, one after the "
        "other, update included; ratios are upper bounds of a speedup.",
        f"Launches alone ({first.counted.mode}): at most {graph} {unit}s/s replayed, {eager} eager "
        f"({LAUNCH_SOURCE}).",
        f"Update counted as: {paths}. SGD with momentum on these parameters, ms a step with the "
        f"gradient's write and the weights' cast: {recipes}.",
        "Memory without workspaces and results on their way.",
    ]


def _kinds(line: Line, top: int) -> str:
    unit, samples = line.counted.sample, line.counted.samples
    rows = [
        [
            kind.kind,
            kind.phase,
            f"{kind.share:.1%}",
            f"{kind.seconds * 1e3:.3g}",
            f"{kind.flops / samples / 1e9:.3g}",
            f"{kind.bytes / samples / 1e6:.3g}",
            str(kind.launches),
        ]
        for kind in line.limit.kinds[:top]
    ]
    header = ["operation", "phase", "of step", "ms", f"GFLOP/{unit}", f"MB/{unit}", "kernels"]
    return markdown_table(header, rows)


def _recipes(counted: Counted, ceilings: Ceilings) -> dict[str, float]:
    return {name: size * counted.dense / ceilings.bandwidth for name, size in RECIPES.items()}


def _ratio(lines: list[Line], line: Line, base: str) -> float | None:
    """Limit over that of the mode `base`, where it is among the lines."""
    found = [other.limit.eager for other in lines if other.counted.mode == base]
    return line.limit.eager / found[0] if found else None


def _three(value: float) -> str:
    """Three significant digits, with separators."""
    return f"{float(f'{value:.3g}'):,.0f}" if value >= 100 else f"{value:.3g}"
