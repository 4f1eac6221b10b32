"""Count the graphs that torch.compile makes of each network in each mode, and compare the bits.

    python -m benchmarks.compiled_graphs [--networks gpt resnet50] [--modes fp32 amp]
                                         [--backend aot_eager] [--out FILE.json]

A cell is a run's task of 8 steps on a CPU with native 16-bit kernels. Its networks are compiled
with `fullgraph=True`, so a break is an error, for one shape. Beside the numbers of networks, of
graphs and of those made after the fifth step stands whether all losses and weights have the bits of
the same steps without a compiler: `aot_eager` takes a graph apart into the operations of eager
mode. The first three calls of a network are watched and not compiled.
"""

import argparse
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters

from mprun.assembly import build
from mprun.config.compose import compose_config
from mprun.errors import BadInput
from mprun.precision import pin_math_flags
from tests.fake_cuda.cells import MODELS

STEPS, COMPILED = 8, 5  # all, and those in which all graphs are made
NETWORKS = [
    "gpt", "gpt, manual", "gpt_llama", "resnet50", "resnet50_preact", "alexnet", "vgg16",
    "googlenet", "inception_v2", "inception_v3", "dcgan", "conv_autoencoder",
]  # fmt: skip
MODES = [
    "fp32", "tf32", "amp", "amp_bf16", "fp16_master", "fp16_master_scaled", "bf16_master",
    "fp8_tensorwise", "fp8_rowwise", "fp8_delayed", "fp8_block", "mxfp8", "mxfp4", "nvfp4",
]  # fmt: skip


def steps(network: str, mode: str, backend: str | None) -> tuple[list[Any], dict[str, Any]]:
    """Return all losses and weights of some steps, and the compiler's counts; None: eager."""
    words = [*MODELS[network], f"precision={mode}", "cpu_half=native", "device=cpu", "threads=1"]
    config = compose_config(words).config
    pin_math_flags(config.precision.fp32_math)
    torch.manual_seed(config.seed)
    built = build(config, torch.device("cpu"))
    torch.compiler.reset()
    counters.clear()
    if backend is not None:
        for learner in built.task.learners.values():
            learner.network = torch.compile(
                learner.model, backend=backend, fullgraph=True, dynamic=False
            )
    made = counters["stats"]
    found: list[Any] = [built.task.train_step(index) for index in range(COMPILED)]
    first = made["unique_graphs"]
    found += [built.task.train_step(index) for index in range(COMPILED, STEPS)]
    found += [learner.model.state_dict() for learner in built.task.learners.values()]
    return found, {
        "networks": len(built.task.learners),
        "graphs": made["unique_graphs"],
        "later": made["unique_graphs"] - first,
        "breaks": sum(counters["graph_break"].values()),
    }


def cell(network: str, mode: str, backend: str) -> dict[str, Any]:
    """Return counts, "same_bits" and "largest": the largest difference of a loss or weight."""
    try:
        expected, _ = steps(network, mode, None)
    except BadInput as error:
        return {"refused": str(error)}
    try:
        found, counts = steps(network, mode, backend)
    except Exception as error:  # a break, or what a compiler cannot do
        return {"error": f"{type(error).__name__}: {error}"}
    pairs = [
        (one[key].double(), other[key].double())
        for one, other in zip(expected, found, strict=True)
        for key in one
    ]
    same = all(torch.equal(one, other) for one, other in pairs)
    largest = max((one - other).abs().nan_to_num().max().item() for one, other in pairs)
    return counts | {"same_bits": same, "largest": largest}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--networks", nargs="*", default=NETWORKS, choices=list(MODELS))
    parser.add_argument("--modes", nargs="*", default=MODES)
    parser.add_argument("--backend", default="aot_eager")
    parser.add_argument("--out", type=Path, help="JSON with all cells")
    given = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    cells: dict[str, dict[str, Any]] = {}
    for network in given.networks:
        for mode in given.modes:
            found = cells.setdefault(network, {})[mode] = cell(network, mode, given.backend)
            print(f"{network:16} {mode:20} {found}", flush=True)
            if given.out:
                given.out.write_text(json.dumps(cells, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
