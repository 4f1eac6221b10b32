"""Launches of a GPT-2 step with casts, eager and compiled, on the fake CUDA device.

    python -m benchmarks.cast_launches [--layers 12] [--modes fp8_tensorwise mxfp8]
                                       [--execution eager compiled]

GPT-2 of 124M parameters at batch 12, or fewer of its layers; casts are those of its linear layers:
each operand of each product once, or once for two products that share it. Printed are a step's
launches: kernels of torch and Triton, calls of cuBLAS, copies and fills; then how many a cast costs
over `bf16_master`, which has none. No kernel runs (`tests/fake_cuda`): there are no times.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from benchmarks.suite.models import PLAIN_RATE, _tokens
from mprun.assembly import build
from mprun.config.compose import compose_config
from mprun.precision import pin_math_flags
from mprun.precision.scaled_products import Plan
from mprun.precision.torch_update import take_for_granted
from mprun.prepared.border import Forward
from mprun.record.console import markdown_table
from tests.fake_cuda import runtime as fake_cuda

BASE = "bf16_master"
MODES = (BASE, "fp8_tensorwise", "fp8_delayed", "fp8_rowwise", "fp8_block", "mxfp8")
KINDS = ("launches", "driver_launches", "library_calls", "copies")
WARM_UP, COUNTED = 5, 2  # steps; a compiler takes the second one


def casts(model: torch.nn.Module) -> int:
    """Return how many casts a step of the layers of a prepared model has."""
    found = 0
    for module in model.modules():
        forward = module.__dict__.get("forward")
        own = forward.own_function(in_mode=True) if isinstance(forward, Forward) else None
        for plan in (arg for arg in getattr(own, "args", ()) if isinstance(arg, Plan)):
            operands = sum(2 for pair in plan[:3] if pair is not None)
            found += operands - plan.keeps_input - plan.keeps_weight - plan.keeps_gradient
    return found


def measured(layers: int, mode: str, execution: str) -> dict[str, Any]:
    """Return the launches of a step, by kind."""
    compile_ = "default" if execution == "compiled" else "off"
    words = ["model=gpt2", *PLAIN_RATE, *_tokens(50_304, 1024, 12), f"model.num_layers={layers}"]
    words += [f"precision={mode}", "device=cuda", "train.cuda_graph=off", "threads=1"]
    config = compose_config([*words, f"train.compile={compile_}"]).config
    pin_math_flags(config.precision.fp32_math)
    built = build(config, torch.device("cuda", 0))
    started = time.perf_counter()
    for index in range(WARM_UP):
        built.stepper.step(index)
    seconds = time.perf_counter() - started
    before = fake_cuda.counts()
    for index in range(WARM_UP, WARM_UP + COUNTED):
        built.stepper.step(index)
    counted = fake_cuda.counts() - before
    found = {kind: getattr(counted, kind) / COUNTED for kind in KINDS}
    found["copies"] += counted.memsets / COUNTED
    [learner] = built.task.learners.values()
    return found | {"casts": casts(learner.model), "seconds": seconds}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--modes", nargs="*", default=MODES)
    parser.add_argument("--execution", nargs="*", default=("eager", "compiled"))
    given = parser.parse_args(arguments)
    if not fake_cuda.is_fake():
        with tempfile.TemporaryDirectory(prefix="mprun-fake-cuda-") as name:
            fake_cuda.build(Path(name))
            variables = fake_cuda.environment(Path(name), memory_bytes=2**42)
            command = [sys.executable, "-m", "benchmarks.cast_launches", *arguments]
            return subprocess.run(command, env=os.environ | variables).returncode
    take_for_granted()
    warnings.simplefilter("ignore")
    rows, base = [], {}
    for execution in given.execution:
        for mode in given.modes:
            torch.compiler.reset()
            found = measured(given.layers, mode, execution)
            total = sum(found[kind] for kind in KINDS)
            if mode == BASE:
                base[execution] = total
            over = total - base.get(execution, float("nan"))
            each = f"{over / found['casts']:.2f}" if found["casts"] else ""
            numbers = [f"{found[kind]:g}" for kind in KINDS]
            rows.append([mode, execution, *numbers, f"{total:g}", str(found["casts"]), each])
            print(rows[-1], f"{found['seconds']:.0f} s", file=sys.stderr, flush=True)
    header = ["mode", "", "torch", "Triton", "library", "copies, fills", "all", "casts"]
    print(markdown_table([*header, "a cast"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
