"""The cost of probes: the same training steps with and without, in one process, in turns.

    python benchmarks/probe_cost.py [--rounds 5] [--precision fp32] [--models a,b] [--json FILE]

For each model three numbers, medians over the rounds, in CPU time of one thread (so that other work
on the machine counts little):

    probe    the time that one probe adds to the probed step, in steps
    every    the share that it adds to a run with numerics.every=100: `probe` over 100 steps
    off      a step through the training loop's test for probes, over a bare one, with numerics=off;
             beside it "noise", the same ratio of two bare steps

A probe includes the transfer, the file and the TensorBoard event. Target: every at most 3 %.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch.utils.tensorboard import SummaryWriter

from mprun.build import build
from mprun.config.compose import compose_config
from mprun.numerics.probing import Probing
from mprun.precision import pin_math_flags

MODELS = {
    "resnet50": (["model=resnet50", "optim=sgd"], 1),
    "alexnet": (["model=alexnet", "data=digits_64", "optim=sgd_alexnet"], 1),
    "lstm_lm": (["model=lstm_lm"], 5),
    "dcgan": (["model=dcgan", "data.image_size=32", "data.batch_size=16"], 3),
}
EVERY = 100


def measure(overrides: list[str], precision: str, rounds: int, steps: int) -> dict[str, float]:
    """Return seconds and ratios of one model; `steps` steps of each kind a round."""
    config = compose_config([*overrides, f"precision={precision}", "device=cpu"]).config
    pin_math_flags(config.precision.fp32_math)
    torch.manual_seed(0)
    task = build(config, torch.device("cpu")).task
    with tempfile.TemporaryDirectory() as folder:
        writer = SummaryWriter(folder)
        probing = Probing(task, Path(folder), writer, every=1)

        def bare(index: int) -> None:
            task.train_step(index)

        def off(index: int, probing: Probing | None = None) -> None:
            # The training loop's test without probes.
            if probing is not None and probing.due(index + 1):
                probing.watch(index + 1, index, lambda: task.train_step(index))
            else:
                task.train_step(index)

        def probed(index: int) -> None:
            probing.watch(index + 1, index, lambda: task.train_step(index))

        seconds = {"bare": [], "again": [], "off": [], "probed": []}
        kinds = {"bare": bare, "again": bare, "off": off, "probed": probed}
        index = 0
        for kind in kinds.values():
            kind(index)  # buffers, caches, the first allocation of everything
        for number in range(rounds):
            order = list(kinds) if number % 2 else list(reversed(kinds))
            for name in order:
                started = time.process_time()
                for _ in range(steps):
                    index += 1
                    kinds[name](index)
                seconds[name].append((time.process_time() - started) / steps)
        writer.close()
    step = statistics.median(seconds["bare"] + seconds["again"])
    extra = statistics.median(seconds["probed"]) - step
    return {
        "step_ms": 1e3 * step,
        "probe": extra / step,
        "every": extra / step / EVERY,
        "off": _ratio(seconds["off"], seconds["bare"]),
        "noise": _ratio(seconds["again"], seconds["bare"]),
    }


def _ratio(numerators: list[float], denominators: list[float]) -> float:
    ratios = [a / b - 1 for a, b in zip(numerators, denominators, strict=True)]
    return statistics.median(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    print("model       mode                 step ms   probe (steps)  every 100   off      noise")
    for name in arguments.models.split(","):
        overrides, steps = MODELS[name]
        found = measure(overrides, arguments.precision, arguments.rounds, steps)
        results[name] = found
        print(
            f"{name:<11} {arguments.precision:<20} {found['step_ms']:7.1f}   "
            f"{found['probe']:8.2f}       {found['every']:+7.2%}    {found['off']:+6.2%}   "
            f"{found['noise']:+6.2%}",
            flush=True,
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
