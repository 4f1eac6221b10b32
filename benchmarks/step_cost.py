"""CPU time of a training step in two checkouts of mprun, in turn, as a ratio.

    python -m benchmarks.step_cost OTHER_CHECKOUT [--networks gpt lstm_lm] [--modes fp32 amp]
                                   [--pairs 5] [--blocks 6] [--out FOLDER]

A process of each checkout builds the same run with one thread. They take blocks of steps in turn,
in an order that alternates, so that what slows a machine slows both. Reported is the ratio of the
CPU time of a block here to that there: the median over all pairs of blocks of several pairs of
processes, and a 95 % interval of it (10,000 times pairs of processes are drawn, then blocks of
each). Waiting counts for nothing; a busy machine widens the interval, because caches are shared.

Freed memory stays with each process (`MALLOC`): where glibc gives large tensors back the kernel
clears their pages anew, and one process in two pays 10 % more for the same operations.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy

ROOT = Path(__file__).resolve().parents[1]
MODES = ("fp32", "amp", "fp16_master_scaled", "bf16_master")
SECONDS = 0.4  # of a block
MALLOC = {"MALLOC_TRIM_THRESHOLD_": "10000000000", "MALLOC_MMAP_THRESHOLD_": "10000000000"}
IMAGES = ["data=synthetic_images", "data.batch_size=32", "data.train_size=64", "data.eval_size=8"]
NETWORKS = {
    # Steps of a millisecond or a few.
    "lstm_lm, tiny": "TINY_LM",
    "gpt, tiny": "TINY_GPT",
    "conv_autoencoder, tiny": "TINY_AUTOENCODER",
    "dcgan, tiny": "TINY_GAN",
    # Of 20 ms or more.
    "lstm_lm": ["model=lstm_lm", "model.hidden_size=200", "data=docs_words"],
    "gpt": ["model=gpt", "data=docs_words", "data.batch_size=8", "data.sequence_length=64"],
    "resnet50_preact": ["model=resnet50_preact", "model.width=0.25", *IMAGES],
    "alexnet_2012": ["model=alexnet_2012", "model.width=0.25", *IMAGES, "data.image_size=64"],
    "dcgan": ["model=dcgan", *IMAGES, "data.image_size=32", "data.value_range=tanh"],
}


def words_of(name: str) -> list[str]:
    """Return the command line of a network."""
    found = NETWORKS[name]
    if isinstance(found, str):
        from tests import helpers

        found = list(getattr(helpers, found))
    return [*found]


def serve(spec: dict[str, Any]) -> None:
    """Build a run; at each line of standard input take a block of steps, print its CPU time."""
    import torch

    import mprun
    from mprun.config.compose import compose_config
    from mprun.precision import pin_math_flags

    # It was called mprun.build before commit b7c3873a.
    of_now = (Path(spec["checkout"]) / "mprun" / "assembly").is_dir()
    build = import_module("mprun.assembly" if of_now else "mprun.build").build
    if not Path(mprun.__file__).is_relative_to(spec["checkout"]):
        raise SystemExit(f"{mprun.__file__} is not of {spec['checkout']}")
    torch.set_num_threads(1)
    words = [*spec["words"], "device=cpu", "train.steps=100000", f"precision={spec['mode']}"]
    config = compose_config(words).config
    pin_math_flags(config.precision.fp32_math)
    torch.manual_seed(config.seed)
    stepper = build(config, torch.device("cpu")).stepper
    index = 0

    def take(steps: int) -> float:
        nonlocal index
        begun = time.process_time()
        for _ in range(steps):
            stepper.step(index)
            index += 1
        return time.process_time() - begun

    take(5)  # watched by the audit, and the first of everything
    one = take(3) / 3
    steps = max(1, round(SECONDS / one))
    print(json.dumps({"steps": steps}), flush=True)
    for line in sys.stdin:
        print(json.dumps(take(int(line)) / int(line)), flush=True)


def times_of(
    checkouts: list[Path], name: str, mode: str, blocks: int, place: str
) -> tuple[int, numpy.ndarray] | None:
    """Return steps of a block, and seconds a step [2, blocks] of a process of each checkout.

    None: one refuses the run.
    """
    processes = []
    for checkout in checkouts:
        spec = {"checkout": str(checkout), "words": words_of(name), "mode": mode}
        own = {"PYTHONPATH": f"{checkout}", "OMP_NUM_THREADS": "1", **MALLOC}
        command = [sys.executable, "-P", __file__, "--serve", json.dumps(spec)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        process = subprocess.Popen(command, env=os.environ | own, cwd=place, **pipes)
        processes.append(process)
    said = [json.loads(process.stdout.readline() or "null") for process in processes]
    if None in said:
        for process in processes:
            process.kill()
        return None
    steps = min(one["steps"] for one in said)
    times: list[list[float]] = [[], []]
    for block in range(blocks):
        for side in (0, 1) if block % 2 else (1, 0):
            processes[side].stdin.write(f"{steps}\n")
            processes[side].stdin.flush()
            times[side].append(json.loads(processes[side].stdout.readline()))
    for process in processes:
        process.stdin.close()
        process.wait()
    return steps, numpy.array(times)


def measure(
    checkouts: list[Path], name: str, mode: str, pairs: int, blocks: int, place: str
) -> dict[str, Any]:
    """Return the times of both in ms, and the ratio of the second to the first."""
    found = [times_of(checkouts, name, mode, blocks, place) for _ in range(pairs)]
    if None in found:
        return {"network": name, "mode": mode, "refused": True}
    times = numpy.stack([own for _, own in filter(None, found)], axis=1)  # [2, pairs, blocks]
    ratios, random = times[1] / times[0], numpy.random.default_rng(0)
    drawn = ratios[random.integers(pairs, size=(10_000, pairs))]
    drawn = numpy.take_along_axis(drawn, random.integers(blocks, size=drawn.shape), axis=2)
    low, high = numpy.percentile(numpy.median(drawn, axis=(1, 2)), [2.5, 97.5])
    there, here = (1000 * float(numpy.median(side)) for side in times)
    return {
        "network": name,
        "mode": mode,
        "there_ms": round(there, 3),
        "here_ms": round(here, 3),
        "ratio": round(float(numpy.median(ratios)), 3),
        "low": round(float(low), 3),
        "high": round(float(high), 3),
        "ratio_of_each_pair": [round(float(own), 3) for own in numpy.median(ratios, axis=1)],
    }


def line_of(row: dict[str, Any]) -> list[str]:
    """Return the cells of a row of the table."""
    if row.get("refused"):
        return [row["network"], row["mode"], "refused", "", ""]
    times = f"{row['there_ms']:.2f}", f"{row['here_ms']:.2f}"
    return [
        row["network"],
        row["mode"],
        *times,
        f"{row['ratio']:.3f} ({row['low']:.3f} to {row['high']:.3f})",
    ]


def main() -> int:
    if sys.argv[1:2] == ["--serve"]:  # in the process of one checkout
        serve(json.loads(sys.argv[2]))
        return 0
    from benchmarks.same_bits import about, commit_of
    from mprun.record.console import markdown_table

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("other", type=Path)
    parser.add_argument("--networks", nargs="+", choices=[*NETWORKS], default=[*NETWORKS])
    parser.add_argument("--modes", nargs="+", default=[*MODES])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    checkouts, rows = [options.other.resolve(), ROOT], []
    with tempfile.TemporaryDirectory(prefix="step-cost-") as place:
        for name in options.networks:
            for mode in options.modes:
                rows.append(measure(checkouts, name, mode, options.pairs, options.blocks, place))
                print(*line_of(rows[-1]), sep="  ", flush=True)
    if options.out:
        made = about("benchmarks.step_cost", "OTHER_CHECKOUT")
        made |= {"other": commit_of(checkouts[0]), "this": commit_of(ROOT)}
        header = ["network", "mode", "there, ms", "here, ms", "ratio (95 % interval)"]
        lines = [
            f"# CPU time of a step in two checkouts, {made['date']}, CPU",
            f"{made['machine']}, torch {made['torch']}, Python {made['python']}, one thread. "
            f"Commits {made['other']} (there) and {made['this']} (here); "
            f"n = {options.pairs} pairs of processes, {options.blocks} pairs of blocks of "
            f"{SECONDS:g} s each, in turn; freed memory stays with a process "
            f"({' '.join(f'{key}={value}' for key, value in MALLOC.items())}):",
            f"    {made['command']}",
            markdown_table(header, [line_of(row) for row in rows]),
        ]
        path = options.out / f"{made['date']}-cpu-step-cost.md"
        path.write_text("\n\n".join(lines) + "\n", encoding="utf-8")
        found = json.dumps({"about": made, "rows": rows}, indent=1) + "\n"
        path.with_suffix(".json").write_text(found, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
