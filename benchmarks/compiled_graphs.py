"""Count the graphs that torch.compile makes of each network in each mode, and compare the bits.

    python -m benchmarks.compiled_graphs [--networks gpt] [--modes fp32 amp]

A cell is a run's task of 8 steps on a CPU with native 16-bit kernels. Its networks are compiled
with `fullgraph=True`, so a break is an error, for one shape. Beside the numbers of networks, of
graphs and of those made after the fifth step stands whether all losses and weights have the bits of
the same steps without a compiler: `aot_eager` takes a graph apart into the operations of eager
mode. The first three calls of a network are watched and not compiled.
"""

import argparse
import sys
import warnings
from typing import Any

import torch
from torch._dynamo.utils import counters

from mprun.assembly import build
from mprun.config.compose import compose_config
from mprun.errors import BadInput
from mprun.precision import pin_math_flags
from tests.fake_cuda.cells import MODELS

STEPS, COMPILED = 8, 5  # all, and those in which all graphs are made
NETWORKS = "gpt gpt_llama resnet50 resnet50_preact alexnet vgg16 googlenet inception_v2".split()
NETWORKS += ["inception_v3", "dcgan", "conv_autoencoder", "gpt_moe"]
MODES = "fp32 tf32 amp amp_bf16 fp16_master fp16_master_scaled bf16_master fp8_tensorwise"
MODES += " fp8_rowwise fp8_delayed fp8_block mxfp8 mxfp4 nvfp4"


def steps(network: str, mode: str, compiles: bool) -> tuple[list[Any], dict[str, Any]]:
    """Return all losses and weights of some steps, and the compiler's counts."""
    words = [*MODELS[network], f"precision={mode}", "cpu_half=native", "device=cpu", "threads=1"]
    config = compose_config(words).config
    pin_math_flags(config.precision.fp32_math)
    torch.manual_seed(config.seed)
    built = build(config, torch.device("cpu"))
    torch.compiler.reset()
    counters.clear()
    form: dict[str, Any] = {"backend": "aot_eager", "fullgraph": True, "dynamic": False}
    for learner in built.task.learners.values() if compiles else ():
        learner.network = torch.compile(learner.model, **form)
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


def cell(network: str, mode: str) -> dict[str, Any]:
    """Return counts and whether all bits are the same, or why there are none."""
    try:
        expected, _ = steps(network, mode, False)
    except BadInput as error:
        return {"refused": str(error)}
    try:
        found, counts = steps(network, mode, True)
    except Exception as error:  # a break, or what a compiler cannot do
        return {"error": f"{type(error).__name__}: {error}"}
    parts = zip(expected, found, strict=True)
    same = all(torch.equal(one[key], other[key]) for one, other in parts for key in one)
    return counts | {"same_bits": same}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--networks", nargs="*", default=NETWORKS, choices=list(MODELS))
    parser.add_argument("--modes", nargs="*", default=MODES.split())
    given = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    for network in given.networks:
        for mode in given.modes:
            print(f"{network:16} {mode:20} {cell(network, mode)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
