"""The cost of `mprun compare` over 100 runs (5 modes, 20 seeds) of 100,000 records each.

    python benchmarks/compare_speed.py [--what load|command|means] [--records N] [--seeds N]
        [--configurations N]

It writes 2 GB of runs into a temporary folder (deleted afterwards) and times one core. `load` reads
and groups in a separate process; `command` is `python -m mprun compare` from start to report;
`means` writes the curves for TensorBoard. Peak memory is that process's resident set. Targets for
the command: 10 s and 1 GiB; of 2,000 runs (--seeds 400 --records 40, in one configuration, or
--seeds 10 in 40) 15 s and 300 MiB.
"""

import argparse
import json
import math
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

MODES = {
    "fp32": "none",
    "fp16_naive": "none",
    "fp16_master": "none",
    "amp": "dynamic",
    "bf16_master": "none",
}
LOAD = """
import sys
from mprun.compare.grouping import group_runs
from mprun.compare.load import load_runs

runs, notes = load_runs(sys.argv[1:])
groups, lines = group_runs(runs)
print(len(runs), "runs,", len(groups), "groups,", len(notes) + len(lines), "notes")
"""
MEANS = """
import sys
from pathlib import Path
from mprun.compare.tensorboard_summary import write_means

write_means([Path(sys.argv[1])], Path(sys.argv[1]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--what", choices=("load", "command", "means"), default="load")
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--configurations", type=int, default=1, help="learning rates")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="compare_speed-"))
    try:
        size = write_runs(folder, arguments.records, arguments.seeds, arguments.configurations)
        program = MEANS if arguments.what == "means" else LOAD
        what = [sys.executable, "-c", program, str(folder)]
        if arguments.what == "command":
            what = [sys.executable, "-m", "mprun", "compare", str(folder)]
        seconds, cpu_seconds, peak = measure(what)
    finally:
        shutil.rmtree(folder)
    runs = arguments.seeds * len(MODES) * arguments.configurations
    print(
        f"{arguments.what}: {runs} runs of {arguments.records:,} records ({size / 1e9:.2f} GB): "
        f"{seconds:.2f} s ({cpu_seconds:.2f} s of CPU time, {1000 * seconds / runs:.0f} ms a run), "
        f"peak {peak / 2**20:.0f} MiB"
    )


def measure(command: list[str]) -> tuple[float, float, int]:
    """Return wall seconds, CPU seconds and peak resident bytes of a command on one core."""
    if shutil.which("taskset"):
        command = ["taskset", "-c", "0", *command]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    subprocess.run(command, check=True, env=environment, cwd=Path(__file__).parents[1])
    seconds = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    # The largest child so far; this is the only one.
    return seconds, cpu, after.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def write_runs(folder: Path, records: int, seeds: int, configurations: int) -> int:
    """Write the runs, all logged records with 9 columns; return the bytes written.

    The text of one run is made once; each run replaces the digits of the losses.
    """
    base, at = template(records)
    size = 0
    for rate, (mode, scaler), seed in product(range(configurations), MODES.items(), range(seeds)):
        directory = folder / f"lr{rate}" / f"{mode}-s{seed}"
        directory.mkdir(parents=True)
        noise = random.Random(f"{rate} {mode} {seed}").choices(b"0123456789", k=len(at))
        text = bytearray(base)
        for position, digit in zip(at, noise, strict=True):
            text[position] = digit
        (directory / "metrics.jsonl").write_bytes(text)
        record = run_record(mode, scaler, seed, records)
        record["config"]["optim"]["lr"] += rate
        record["config_hash"] += f"-{rate}"
        (directory / "run.json").write_text(json.dumps(record), encoding="utf-8")
        size += len(text)
    return size


def template(records: int) -> tuple[bytearray, list[int]]:
    """Return the metrics.jsonl of one run and the places of its losses' fourth decimals."""
    draw = random.Random(0)
    text, at, skipped, scale = bytearray(), [], 0, 65536.0
    for step in range(1, records + 1):
        if step % 2500 == 1:  # a dynamic scale that grows into an overflow and backs off
            skipped, scale = skipped + 1, scale / 2
        elif step % 2500 == 2:
            scale *= 2
        loss = 2.0 + 4.0 * math.exp(-5 * step / records) + draw.random() / 10
        line = (
            f'{{"split": "train", "step": {step}, "updates": {step - skipped}, "skipped": '
            f'{skipped}, "epoch": {step / 269:.4f}, "loss": {loss:.16f}, "loss_scale": {scale}, '
            f'"lr": 1.0, "samples_per_s": {7000 + draw.random()}, "grad_norm": {draw.random()}}}\n'
        )
        at.append(len(text) + line.index('"loss": ') + len('"loss": 2.000'))
        text += line.encode()
        if step % (records // 20) == 0:
            head = f'{{"split": "eval", "step": {step}, "updates": {step - skipped}, "skipped": '
            at.append(len(text) + len(head) + len(f'{skipped}, "epoch": 1.0, "loss": 2.000'))
            line = f'{head}{skipped}, "epoch": 1.0, "loss": {loss:.16f}, "perplexity": 9.5, '
            text += f'{line}"seconds": 0.5}}\n'.encode()
    return text, at


def run_record(mode: str, scaler: str, seed: int, steps: int) -> dict:
    """Return the run.json of a finished run, as far as a comparison reads it."""
    config = {
        "model": {"name": "lstm_lm"},
        "data": {"name": "docs_text"},
        "optim": {"lr": 1.0},
        "train": {"steps": steps},
        "precision": {"name": mode},
        "scaler": {"name": scaler},
        "compare": {"metric": "loss", "margin": 0.01, "window": 1},
        "seed": seed,
    }
    return {
        "status": "done",
        "cause": None,
        "choices": {"experiment": None, "model": "lstm_lm", "data": "docs_words"},
        "config": config,
        "config_hash": f"{mode}-{seed}",
        "created": "2026-01-01T00:00:00+00:00",
        "seed": seed,
        "steps": steps,
        "last_step": steps,
        "skipped": -(-steps // 2500),
        "sample": "token",
        "precision": {"mode": mode, "scaler": scaler, "flags": {}},
        "environment": {"packages": {"torch": "2.15.0"}, "device": "cpu", "cpu": "made up"},
        "throughput": {"samples_per_s": 7000.0},
        "memory": {"peak_bytes": 10**9, "measure": "process resident set"},
    }


if __name__ == "__main__":
    main()
