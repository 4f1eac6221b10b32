"""Judge each recipe of low precision against FP32 and BF16 on held-out seeds, with what it costs.

    python -m benchmarks.recipes [--modes nvfp4 mxfp4] [--seeds 300 301] [--rounds 12]
                                 [--runs FOLDER] [--out FOLDER]

Trains `experiment=quickstart_low_bits` in every mode below 16 bits, in the BF16 modes and in FP32,
by `mprun -m`, whose runs that are done are kept; the tied output layer is in the format too. Every
mode is judged beside FP32 and beside `bf16_master`. Its cost is the CPU time of a step of a larger
transformer over FP32: all modes take turns in one process. `--out` writes the page
DATE-cpu-recipes.md and .json there.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.same_bits import ROOT, about, commit_of
from mprun.assembly import build
from mprun.comparison import compare
from mprun.config.compose import compose_config
from mprun.extensions.bench.summary import ratio_of
from mprun.precision import pin_math_flags
from mprun.record.console import markdown_table

EXPERIMENT = "quickstart_low_bits"
BASELINES = ("fp32", "bf16_master")
MODES = (
    *("bf16_stochastic", "bf16_kahan"),
    *("fp8_tensorwise", "fp8_rowwise", "fp8_delayed", "fp8_delayed_megatron", "fp8_unscaled"),
    *("fp8_block", "fp8_deepseek", "mxfp8", "mxfp8_floor", "mxfp8_hybrid"),
    *("int8_rowwise", "qat_int8", "fp8_attention"),
    *("mxfp4", "mxfp4_hadamard", "nvfp4", "nvfp4_4over6", "nvfp4_plain", "qat_nvfp4"),
)
SEEDS = tuple(range(300, 305))
COMMON = ["device=cpu", "threads=1"]
MATMUL = ["precision.matmul.modules=['*',output]"]
# A step of 0.1 to 0.4 s in FP32, so that products and casts are most of it.
LARGER = ["model=gpt", "model.hidden_size=256", "data=docs_chars_64", "data.batch_size=16"]
STEPS = 2  # of a window

Row = dict[str, Any]


def train(modes: Iterable[str], seeds: Iterable[int], folder: Path) -> None:
    """Train the experiment in these modes, those runs that are not done in `folder` yet."""
    words = ["-m", f"experiment={EXPERIMENT}", f"precision={','.join(modes)}", *MATMUL, *COMMON]
    words += [f"seed={','.join(map(str, seeds))}", f"output_root={folder}"]
    subprocess.run([sys.executable, "-m", "mprun", *words], cwd=ROOT, check=True)


def judged(folder: Path) -> list[Row]:
    """Return a row for each mode: its difference to both baselines, in %, with the verdicts."""
    rows: dict[str, Row] = {}
    for baseline in BASELINES:
        [group] = compare(folder / EXPERIMENT, baseline=baseline).to_dict()["groups"]
        for one in group["modes"]:
            row = rows.setdefault(one["mode"].partition("+")[0], {})
            shown = {key: one["verdict"]["shown"][key] for key in ("difference", "low", "high")}
            row[baseline] = shown | {"verdict": one["verdict"]["name"]}
            row["loss"] = one["mean"]
            row["seeds"] = one["verdict"]["seeds"]
    return [{"mode": mode} | row for mode, row in rows.items() if mode not in BASELINES]


def costs(modes: Sequence[str], rounds: int) -> dict[str, Row]:
    """Return mode -> CPU time of a step over that of FP32: median and 95 % interval."""
    steppers = {}
    for mode in ("fp32", *modes):
        config = compose_config([*LARGER, *COMMON, f"precision={mode}"]).config
        pin_math_flags(config.precision.fp32_math)
        steppers[mode] = build(config, torch.device("cpu")).stepper
        steppers[mode].step(0)
    times: dict[str, list[float]] = {mode: [] for mode in steppers}
    for number in range(rounds):
        order = [*steppers] if number % 2 else [*steppers][::-1]
        for mode in order:
            begun = time.process_time()
            for step in range(STEPS):
                steppers[mode].step(1 + STEPS * number + step)
            times[mode].append((time.process_time() - begun) / STEPS)
    return {
        mode: ratio_of(times[mode], times["fp32"], paired=True) | {"seconds": times[mode]}
        for mode in modes
    }


def page(made: dict[str, Any], rows: Sequence[Row]) -> str:
    """Return the page of results."""
    lines = [
        [f"`{row['mode']}`", *(_said(row[own]) for own in BASELINES), _cost(row)] for row in rows
    ]
    header = ["mode", "against FP32", "against `bf16_master`", "CPU time over FP32"]
    return "\n\n".join([
        f"# Recipes on held-out seeds, {made['date']}",
        f"{made['machine']}, one thread, torch {made['torch']}, Python {made['python']}, commit\n"
        f"{made['this']}; n = {len(made['seeds'])} seeds, {made['rounds']} rounds. Command:",
        f"    {made['command']}",
        "A transformer of 2 x 32 on the characters of CPython's documentation, 400 steps\n"
        "(`experiment=quickstart_low_bits`), its tied output layer in the format too. Final\n"
        "evaluation loss, in FP32, paired by seed; difference with its 90 % interval, margin 1 %.\n"
        "The cost is CPU time of a step of 2 x 256 over FP32 (median, 95 % interval): what\n"
        "emulation takes on a CPU. It says nothing of a GPU.",
        markdown_table(header, lines),
    ]) + "\n"  # fmt: skip


def _said(found: Row) -> str:
    numbers = f"{found['difference']:+.2f} % ({found['low']:+.2f} to {found['high']:+.2f})"
    return f"{found['verdict']}: {numbers}"


def _cost(row: Row) -> str:
    found = row.get("cost")
    if found is None:
        return ""
    return f"{found['median']:.2f} ({found['low']:.2f} to {found['high']:.2f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--modes", nargs="+", default=[*MODES], choices=MODES, metavar="MODE")
    parser.add_argument("--seeds", nargs="+", type=int, default=[*SEEDS])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--runs", type=Path, default=Path("outputs"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    made = about("benchmarks.recipes", *sys.argv[1:])
    made |= {"this": commit_of(ROOT), "seeds": options.seeds, "rounds": options.rounds}
    train([*BASELINES, *options.modes], options.seeds, options.runs.resolve())
    rows = judged(options.runs.resolve())
    found = costs(options.modes, options.rounds)
    rows = [row | {"cost": found.get(row["mode"])} for row in rows]
    text = page(made, rows)
    print(text)
    if options.out:
        path = options.out / f"{made['date']}-cpu-recipes.md"
        path.write_text(text, encoding="utf-8")
        dumped = json.dumps({"about": made, "rows": rows}, indent=1) + "\n"
        path.with_suffix(".json").write_text(dumped, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
