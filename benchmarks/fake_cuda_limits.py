"""Launches, bytes and limits of a CUDA step, mprun beside torch.amp and torchao, without a GPU.

    python -m benchmarks.fake_cuda_limits [--only GPT-2,DCGAN] [--modes fp8_rowwise] [--eager]
                                          [--blocks 2] [--out FOLDER]

Each step runs on the fake CUDA device (`tests/fake_cuda`), eager and by torch.compile. Its launches
are counted there. A dispatch mode sees its operations, a hook the Triton kernels that the compiler
made; the rules of the roofline give the bytes of both. Kernels follow one another on an H100 by the
roofline's ceilings, each in the longer of products and traffic. Beside it stands the limit that no
step passes. `--blocks` cuts GPT-2 to so many blocks, which compile in minutes. `--out` writes the
page DATE-fake-cuda-limits.md and .json there, and keeps what another call has measured that day.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.same_bits import ROOT, about, commit_of
from benchmarks.suite.contenders import PEERS, available, make
from benchmarks.suite.models import GPU_SUITE
from benchmarks.suite.peers.task import PeerTask
from mprun.config.registry import task_of
from mprun.errors import MprunError
from mprun.extensions.bench.cases import BenchGroup, Case
from mprun.extensions.bench.measure import Contender
from mprun.extensions.bench.roofline.count import Counter, count
from mprun.extensions.bench.roofline.limits import GPUS, limit
from mprun.extensions.bench.roofline.operations import OperationCosts, bytes_of
from mprun.extensions.bench.runner import compiles
from mprun.extensions.bench.worker import release
from mprun.precision.torch_update import take_for_granted
from mprun.record.console import markdown_table
from tests.fake_cuda import runtime as fake_cuda

GPU = GPUS["H100"]
CUDA = torch.device("cuda", 0)
WARM_UP, COUNTED = 5, 2  # steps
LABELS = ("DCGAN b128", "AlexNet b512", "bigLSTM b256", "GPT-2 b12", "ResNet-50 b256")
HALF = ("mprun", "mprun compiled", "amp", "amp+")
FP8 = ("mprun", "mprun compiled", "torchao", "torchao+")
NAMES = {"amp": "torch.amp", "amp+": "torch.amp compiled", "torchao+": "torchao compiled"}
NOTE = """\
No kernel ran, no value means anything, no time was measured. Launches of a step: kernels of torch
and Triton, calls of cuDNN and cuBLAS, copies and fills. MB: what these read and write, each tensor
once a kernel (`mprun/extensions/bench/roofline/operations.py`); of a kernel of the compiler all its
arguments, also where it reads a part. H100 ms: kernels one after the other, each in the longer of
products and traffic, by the ceilings of `mprun bench --roofline --gpu H100`. Limit: the time that
no step of the mode passes, whatever is fused (docs/bench.md). "compiled": `train.compile=default`
of mprun; a fused optimizer and torch.compile around peers; images in NCHW, because no device
chooses a memory format. An nn.LSTM is not compiled: torch hands it back as a whole."""


class Compiled(Counter):
    """A `Counter` that leaves casts to the compiler: an observer would be one more graph."""

    __enter__, __exit__ = TorchDispatchMode.__enter__, TorchDispatchMode.__exit__

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code run inside; under other modes torch takes the eager one, unsaid."""
        return True


@contextmanager
def kernels_of_the_compiler(counter: Counter) -> Iterator[None]:
    """Let each launch of a kernel that Inductor has made write a row."""
    launch = CachingAutotuner.run

    def run(self: Any, *args: Any, **named: Any) -> Any:
        size = 0
        for name, own in zip(self.fn.arg_names, args, strict=False):
            if isinstance(own, Tensor):
                size += bytes_of(own) * (2 if name.startswith("in_out") else 1)
        row = OperationCosts("compiled", counter.phase, "", 0, size, 1)
        counter.rows.append(row)
        return launch(self, *args, **named)

    with mock.patch.object(CachingAutotuner, "run", run):
        yield


def case_of(group: BenchGroup, mode: str, name: str, blocks: int | None) -> Case:
    """Return the case of a contender; "mprun compiled" is mprun with keys of its own."""
    more: tuple[str, ...] = ("train.cuda_graph=off", "threads=1")
    if blocks is not None and group.label.startswith("GPT"):
        more += (f"model.num_layers={blocks}",)
    if name == "mprun compiled":
        # As for peers: the compiler expects NHWC from cuDNN where no device chooses it.
        more, name = (*more, "train.compile=default", "train.channels_last=off"), "mprun"
    return Case(group.label, (*group.overrides, *more), mode, name)


def measured(case: Case, compiled: bool) -> dict[str, Any]:
    """Return launches, bytes and milliseconds of a steady step."""
    started = time.process_time()
    # No device chooses the memory format of cuDNN's results, so that compiled ones are in NCHW.
    in_nchw = mock.patch.object(PeerTask, "is_convolutional", False)
    with in_nchw if compiled else nullcontext():
        contender = make(case, CUDA)
    with contender.running():
        for _ in range(WARM_UP):
            contender.step()
        before = fake_cuda.counts()
        for _ in range(COUNTED):
            contender.step()
        counts = fake_cuda.counts() - before
        rows = rows_of(contender, case, compiled)
    if compiled and not any(row.kind == "compiled" for row in rows):
        raise RuntimeError("no kernel of the compiler was launched")
    seconds = sum(max(row.seconds(GPU.flops, GPU.bandwidth)) for row in rows)
    parts = {
        "torch": counts.launches,
        "triton": counts.driver_launches,
        "library": counts.library_calls,
        "copies": counts.copies + counts.memsets,
    }
    found: dict[str, Any] = {key: value / COUNTED for key, value in parts.items()}
    found |= {"launches": sum(found.values()), "bytes": sum(row.bytes for row in rows)}
    return found | {
        "flops": sum(row.flops for row in rows),
        "ms": 1000 * seconds,
        "cpu_s": time.process_time() - started,
        "settings": contender.settings(),
    }


def rows_of(contender: Contender, case: Case, compiled: bool) -> list[OperationCosts]:
    """Return the rows of one more step."""
    counter = (Compiled if compiled else Counter)(case.config().precision.fp32_math)
    with kernels_of_the_compiler(counter), counter:
        contender.step()
    return counter.rows


def limit_ms(case: Case) -> float:
    """Return the least milliseconds of a step, by the roofline."""
    overrides = [own for own in case.overrides if not own.startswith("threads")]
    counted = count(overrides, case.mode)
    return 1000 * counted.samples / limit(counted, GPU)["limit"]


def contenders(options: argparse.Namespace) -> Iterator[tuple[BenchGroup, str, str]]:
    """Yield the group, mode and name of each contender that is wanted."""
    groups = {group.label: group for group in GPU_SUITE}
    for label in LABELS:
        if not label.startswith(tuple(options.only.split(","))):
            continue
        modes: dict[str, tuple[str, ...]] = {"amp": HALF}
        if label.startswith("GPT"):
            modes = {"amp_bf16": HALF, "bf16_master": HALF[:2]}
            modes |= {"fp8_tensorwise": FP8, "fp8_rowwise": FP8}
        for mode, names in modes.items():
            for name in names if mode in (options.modes or modes) else ():
                if not (options.eager and name.endswith(("compiled", "+"))):
                    yield groups[label], mode, name


def row_of(group: BenchGroup, mode: str, name: str, blocks: int | None) -> dict[str, Any]:
    """Return the row of a contender; a failed one says why."""
    case, compiled = case_of(group, mode, name, blocks), name.endswith(("compiled", "+"))
    label = group.label
    if blocks is not None and label.startswith("GPT"):
        label += f", {blocks} blocks"
    row: dict[str, Any] = {"label": label, "mode": mode, "contender": name, "why_not": None}
    config = case_of(group, mode, "mprun", blocks).config()
    if compiled and not compiles(config, "cuda"):
        return row | {"why_not": "an nn.LSTM is not compiled"}
    if case.contender in PEERS:
        why = available(case.contender, mode, task_of(config.model), CUDA)
        if why is not None:
            return row | {"why_not": why}
    release(CUDA)
    torch.compiler.reset()
    try:
        row |= measured(case, compiled)
    except (MprunError, RuntimeError, ValueError, ImportError) as error:
        row["why_not"] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return row | {"limit_ms": limit_ms(case_of(group, mode, "mprun", blocks))}


def table(rows: list[dict[str, Any]]) -> str:
    """Return the table of the page."""
    lines = []
    for row in rows:
        place = [row["label"], row["mode"], NAMES.get(row["contender"], row["contender"])]
        if row["why_not"] is not None:
            lines.append([*place, row["why_not"], *[""] * 5])
            continue
        parts = " + ".join(f"{row[key]:,.0f}" for key in ("torch", "triton", "library", "copies"))
        lines.append([
            *place, f"{row['launches']:,.0f}", parts, f"{row['bytes'] / 1e6:,.0f}",
            f"{row['flops'] / 1e9:,.0f}", f"{row['ms']:.3g}", f"{row['limit_ms']:.3g}",
        ])  # fmt: skip
    header = ["model", "mode", "loop", "launches", "torch + Triton + library + copies", "MB"]
    return markdown_table([*header, "GFLOP", "H100 ms", "limit ms"], lines)


def page(made: dict[str, str], rows: list[dict[str, Any]]) -> str:
    """Return the page of results."""
    return "\n\n".join([
        f"# Launches, bytes and limits of a CUDA step, {made['date']}",
        f"{made['machine']}, no GPU, torch {made['torch']}, Python {made['python']}, commit\n"
        f"{made['this']}; n = {COUNTED} steps after {WARM_UP}. Command:",
        f"    {made['command']}",
        NOTE,
        table(rows),
    ]) + "\n"  # fmt: skip


def on_device() -> int:
    """Run this command again on the fake device; return its exit code."""
    with tempfile.TemporaryDirectory(prefix="mprun-fake-cuda-") as name:
        folder = Path(name)
        fake_cuda.build(folder)
        variables = fake_cuda.environment(folder, memory_bytes=2**42)
        again = [sys.executable, "-m", "benchmarks.fake_cuda_limits", *sys.argv[1:]]
        return subprocess.run(again, env=variables).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="models whose names begin so")
    parser.add_argument("--modes", nargs="+", help="modes that are wanted (all)")
    parser.add_argument("--eager", action="store_true", help="nothing is compiled")
    parser.add_argument("--blocks", type=int, help="blocks of GPT-2")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not fake_cuda.is_fake():
        return on_device()
    take_for_granted()
    torch._inductor.config.layout_optimization = False
    made = about("benchmarks.fake_cuda_limits", *sys.argv[1:])
    made |= {"torch": torch.__version__, "this": commit_of(ROOT)}
    path = options.out and options.out / f"{made['date']}-fake-cuda-limits.json"
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    if path and path.exists():
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
            rows[row["label"], row["mode"], row["contender"]] = row
    for group, mode, name in contenders(options):
        row = row_of(group, mode, name, options.blocks)
        rows[row["label"], mode, name] = row
        print(json.dumps(row), file=sys.stderr, flush=True)
        if path:
            lines = ",\n".join(map(json.dumps, rows.values()))
            text = f'{{"about": {json.dumps(made)},\n"rows": [\n{lines}\n]}}\n'
            path.write_text(text, encoding="utf-8")
            path.with_suffix(".md").write_text(page(made, [*rows.values()]), encoding="utf-8")
    print(table([*rows.values()]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
