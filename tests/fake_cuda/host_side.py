"""Memory, launches and host time of a CUDA step: `python -m benchmarks.suite --host`.

Steps run on the fake device of `runtime.py`. torch's allocator is real and device memory is address
space: the peak of a step is exact to the byte at full size. Kernels take no time: the time of a
step is the host's. No value, device time or rate is measured here.
"""

import json
import pkgutil
import subprocess
import sys
import tempfile
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mprun.errors import DONE, BadInput, Resource
from mprun.extensions.bench.cases import REFERENCES, Case
from mprun.extensions.bench.contest import Contest
from mprun.extensions.bench.measure import Contender, host_seconds
from mprun.extensions.bench.worker import Worker, release
from mprun.precision.torch_update import take_for_granted
from mprun.record.console import markdown_table
from mprun.record.layout import for_terminal
from mprun.record.run_directory import write_json, write_text

from . import runtime as fake_cuda

WARM_UP, COUNTED, TIMED = 4, 3, 15  # steps; a graph is recorded during warm-up

NOTE = """\
Measured on a fake CUDA device: no kernel ran. Peak and reserved are bytes of torch's caching
allocator in steady training steps, including torch's workspace for cuBLAS. Evaluation, the CUDA
context and cuDNN's workspaces are not included. Two batches of synthetic images lie on the device,
as bytes. Launches a step: kernels of torch and of Triton, calls of cuDNN and cuBLAS (each launches
one or more), copies and fills. Host: median time of a step on this machine's processor, without
any device time."""
# Of one mode, eager or replayed. peak: bytes allocated in steady steps (replays allocate nothing:
# None). reserved: bytes after these. Of a step: launches, library (calls of cuDNN and cuBLAS), work
# (pieces that a replay launches at once), waits (of the host for the device), host_ms.
NUMBERS = "peak reserved launches triton library copies work waits host_ms why_not".split()


def host_row(case: Case, execution: str, **numbers: Any) -> dict[str, Any]:
    """Return a row of host.json; execution: "eager" or "replayed"; numbers: some of `NUMBERS`.

    The row's recipe is torch.amp's mode with 16-bit products of the same format.
    """
    precision = case.config().precision
    half = precision.autocast_dtype or precision.param_dtype
    place = {"label": case.label, "mode": case.mode, "contender": case.contender}
    place |= {"recipe": "amp_bf16" if half == "bf16" else "amp", "execution": execution}
    return place | dict.fromkeys(NUMBERS) | numbers


def host(contest: Contest, options: Namespace, again: list[str]) -> int:
    """Measure every case of the contest on the fake device and print the table.

    again: arguments of Python that run the same command, there in a process of its own.
    """
    if not fake_cuda.is_fake():
        return _on_device(again)
    take_for_granted()
    device, worker = torch.device("cuda", 0), pkgutil.resolve_name(contest.worker)()
    groups, left_out = contest.plan(options, device)
    # Leave out the best settings of mprun and of others: torch.compile is not covered.
    cases = [c for group in groups for c in group.cases if not c.contender.endswith("+")]
    rows: list[dict] = []
    for number, case in enumerate(cases, start=1):
        name = f"{case.label} {case.mode} {case.contender}"
        print(f"{number}/{len(cases)} {name}", file=sys.stderr, flush=True)
        rows += _measured(worker, case, device)
    facts = {"torch": torch.__version__, "note": NOTE, "rows": rows}
    text = report(rows)
    for left in left_out:
        text += f"\nleft out: {left['label']} {left['mode']} {left['contender']}: {left['reason']}"
    if options.out is not None:
        folder = Path(options.out)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "host.json", facts)
        write_text(folder / "host.md", text + "\n")
    print(json.dumps(facts, indent=1) if options.json else for_terminal(text))
    return DONE


def _on_device(again: list[str]) -> int:
    """Run Python again on the fake device; return its exit code."""
    with tempfile.TemporaryDirectory(prefix="mprun-fake-cuda-") as name:
        folder = Path(name)
        try:
            fake_cuda.build(folder)
        except RuntimeError as error:
            raise BadInput(f"--host: {error}") from None
        # More than any card holds: what is reserved says what a configuration needs.
        variables = fake_cuda.environment(folder, memory_bytes=2**42)
        return subprocess.run([sys.executable, *again], env=variables).returncode


def _measured(worker: Worker, case: Case, device: torch.device) -> list[dict]:
    """Return the rows of a case: eager, and for mprun also replayed. A failed row says why."""
    rows, data, overrides = [], case.config().data, case.overrides
    if data.name == "synthetic_images":
        # They lie on the device: keep as many there as a loader would.
        overrides = (*overrides, f"data.train_size={2 * data.batch_size}")
    graphs = {"eager": ("train.cuda_graph=off",), "replayed": ("train.cuda_graph=on",)}
    for execution, graph in (graphs if case.contender == "mprun" else {"eager": ()}).items():
        asked = replace(case, real_data=True, overrides=(*overrides, *graph))
        release(device)
        try:
            numbers = _numbers(worker.make(asked, device), device, execution == "replayed")
        except (BadInput, Resource, torch.OutOfMemoryError, MemoryError) as error:
            numbers = {"why_not": str(error).partition("\n")[0]}
        finally:
            release(device)
        rows.append(host_row(case, execution, **numbers))
    return rows


def _numbers(contender: Contender, device: torch.device, replayed: bool) -> dict[str, Any]:
    with contender.running():
        for _ in range(WARM_UP):
            contender.step()
        torch.cuda.reset_peak_memory_stats(device)
        before = fake_cuda.counts()
        for _ in range(COUNTED):
            contender.step()
        counted = fake_cuda.counts() - before
        peak = torch.cuda.max_memory_allocated(device)
        reserved = torch.cuda.memory_reserved(device)
        host_s = host_seconds(contender, device, TIMED)
    return {
        "peak": None if replayed else peak,
        "reserved": reserved,
        "launches": counted.launches / COUNTED,
        "triton": counted.driver_launches / COUNTED,
        "library": counted.library_calls / COUNTED,
        "copies": (counted.copies + counted.memsets) / COUNTED,
        "work": counted.replayed / COUNTED if replayed else None,
        "waits": counted.waits / COUNTED,
        "host_ms": 1000 * host_s,
    }


def report(rows: list[dict]) -> str:
    """Return the table in Markdown and its notes."""
    header = ["model", "mode", "contender", "", "peak MiB", "of FP32", "of recipe", "reserved MiB"]
    header += ["launches", "Triton", "library", "copies", "waits", "host ms"]
    peaks = {(r["label"], r["mode"], r["contender"]): r["peak"] for r in rows if r["peak"]}
    lines = []
    for row in rows:
        cells = _cells(row, peaks) if row["why_not"] is None else [row["why_not"]]
        line = [row["label"], row["mode"], row["contender"], row["execution"], *cells]
        lines.append([*line, *[""] * (len(header) - len(line))])
    return f"{markdown_table(header, lines)}\n\n{NOTE}"


def _cells(row: dict, peaks: dict[tuple, int]) -> list[str]:
    mode, contender, peak = row["mode"], row["contender"], row["peak"]

    def over(mode: str, contender: str) -> str:
        base = peaks.get((row["label"], mode, contender))
        return f"{peak / base:.3f}" if peak and base else ""

    # mprun's need in 16 bits over that of the torch.amp recipe, if it takes part
    held = contender == "mprun" and mode not in REFERENCES
    launches, work = _count(row["launches"]), row["work"]
    return [
        _mib(peak),
        over("fp32", contender),
        over(row["recipe"], "amp") if held else "",
        _mib(row["reserved"]),
        launches if work is None else f"{launches} + {_count(work)} replayed",
        *(_count(row[name]) for name in ("triton", "library", "copies", "waits")),
        f"{row['host_ms']:.2f}",
    ]


def _mib(value: int | None) -> str:
    return "" if value is None else f"{value / 2**20:,.0f}"


def _count(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}".removesuffix(".0")
