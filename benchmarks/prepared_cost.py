"""CPU time of a prepared step over that of a plain one, in two checkouts of mprun.

    python -m benchmarks.prepared_cost OTHER_CHECKOUT [--modes fp32 amp_bf16] [--rounds 3]
                                       [--blocks 5] [--out FOLDER]

A round has three processes of one thread: the plain script, and the prepared one of each checkout.
For each network and mode they take blocks of steps in turn, in an order that alternates. A ratio is
the median over the blocks of all rounds, with a 95 % interval as of benchmarks/step_cost.py.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy

ROOT = Path(__file__).resolve().parents[1]
MODES = ("fp32", "amp_bf16", "bf16_master", "fp16_master_scaled")
NETWORKS = ("80 small layers", "LSTM", "convolutions")
SECONDS = 0.2  # of a block
SIDES = ("plain", "there", "here")


def script(network: str, mode: str | None) -> Callable[[], None]:
    """Return a step of a plain loop, prepared in a mode if there is one."""
    import torch
    from torch import nn
    from torch.nn.functional import cross_entropy

    class Last(nn.LSTM):
        def forward(self, x: Any) -> Any:
            return super().forward(x)[0]

    torch.manual_seed(0)
    if network == "80 small layers":
        layers = [layer for _ in range(80) for layer in (nn.Linear(32, 32), nn.ReLU())]
        model, inputs = nn.Sequential(*layers, nn.Linear(32, 10)), torch.randn(16, 32)
    elif network == "LSTM":
        own = nn.Embedding(256, 64), Last(64, 128, batch_first=True), nn.Linear(128, 10)
        model, inputs = nn.Sequential(*own), torch.randint(256, (8, 16))
    else:
        sizes = [(3, 16), (16, 16), (16, 32), (32, 32), (32, 32)]
        blocks = [
            (nn.Conv2d(a, b, 3, 2 - (a == b)), nn.BatchNorm2d(b), nn.ReLU()) for a, b in sizes
        ]
        flat = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)
        model = nn.Sequential(*(layer for block in blocks for layer in block), *flat)
        inputs = torch.randn(8, 3, 40, 40)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    if mode is not None:
        import mprun

        mprun.prepare(model, optimizer, mode)

    def step() -> None:
        optimizer.zero_grad()
        outputs = model(inputs).flatten(0, -2)
        cross_entropy(outputs, torch.arange(len(outputs)) % 10).backward()
        optimizer.step()

    return step


def serve() -> None:
    """Take steps as each line of standard input asks: a network and a mode, or how many steps."""
    import torch

    torch.set_num_threads(1)
    step: Any = None

    def take(steps: int) -> float:
        begun = time.process_time()
        for _ in range(steps):
            step()
        return (time.process_time() - begun) / steps

    for line in sys.stdin:
        asked = json.loads(line)
        if isinstance(asked, list):
            step = None
            gc.collect()
            step = script(*asked)
            take(5)  # watched by the audit, and the first of everything
            print(max(1, round(SECONDS / take(3))), flush=True)
        else:
            print(take(asked), flush=True)


def ask(process: subprocess.Popen, what: Any) -> Any:
    process.stdin.write(json.dumps(what) + "\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def one_round(
    checkouts: list[Path], modes: list[str], blocks: int, place: str, first: int
) -> dict[tuple[str, str], numpy.ndarray]:
    """Return (network, mode) -> seconds a step [3 sides, blocks]."""
    processes = []
    for checkout in (checkouts[0], *checkouts):
        own = {"PYTHONPATH": f"{checkout}", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-P", __file__, "--serve"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        processes.append(subprocess.Popen(command, env=os.environ | own, cwd=place, **pipes))
    found = {}
    for network in NETWORKS:
        for mode in modes:
            steps = [
                ask(process, [network, None if side == "plain" else mode])
                for side, process in zip(SIDES, processes, strict=True)
            ]
            times = numpy.zeros((3, blocks))
            for block in range(blocks):
                for turn in range(3):
                    side = (turn + block + first) % 3
                    times[side, block] = ask(processes[side], steps[side])
            found[network, mode] = times
    for process in processes:
        process.stdin.close()
        process.wait()
    return found


def main() -> int:
    if sys.argv[1:2] == ["--serve"]:  # in the process of one checkout
        serve()
        return 0
    from benchmarks.same_bits import about, commit_of
    from benchmarks.step_cost import interval
    from mprun.record.console import markdown_table

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("other", type=Path)
    parser.add_argument("--modes", nargs="+", default=[*MODES])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    checkouts, rounds = [options.other.resolve(), ROOT], []
    with tempfile.TemporaryDirectory(prefix="prepared-cost-") as place:
        for number in range(options.rounds):
            rounds.append(one_round(checkouts, options.modes, options.blocks, place, number))
            print(f"round {number + 1} of {options.rounds}", flush=True)
    rows = []
    for network, mode in rounds[0]:
        plain, there, here = numpy.stack([own[network, mode] for own in rounds], axis=1)
        row = [network, mode, f"{1000 * numpy.median(plain):.2f}"]
        for ratio in (there / plain, here / plain, here / there):
            low, high = interval(ratio)
            row.append(f"{numpy.median(ratio):.3f} ({low:.3f} to {high:.3f})")
        rows.append(row)
    header = ["network", "mode", "plain, ms", "there / plain", "here / plain", "here / there"]
    table = markdown_table(header, rows)
    print(table)
    if options.out:
        made = about("benchmarks.prepared_cost", "OTHER_CHECKOUT")
        lines = [
            f"# What a prepared step costs in two checkouts, {made['date']}, CPU",
            f"{made['machine']}, torch {made['torch']}, Python {made['python']}, one thread. "
            f"Commits {commit_of(checkouts[0])} (there) and {commit_of(ROOT)} (here); "
            f"n = {options.rounds} rounds of three processes, {options.blocks} blocks of "
            f"{SECONDS:g} s of CPU time each, in turn:",
            f"    {made['command']}",
            table,
        ]
        path = options.out / f"{made['date']}-cpu-prepared-cost.md"
        path.write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
