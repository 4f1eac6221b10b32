"""`mprun bench --host`: memory, launches and host time of a CUDA step, on a machine without a GPU.

Steps run on the fake device of `fake_cuda`: torch's allocator is real and device memory is
address space, so the peak of a step is measured to the byte at full size; kernels take no time, so
the time of a step is the host's. No value, no time of a device and no rate is measured here.
"""

import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from mprun.bench import fake_cuda
from mprun.bench.contender import Case
from mprun.bench.options import REFERENCES, Options
from mprun.config.compose import compose_config
from mprun.errors import DONE, INTERRUPTED, RESOURCE, BadInput

WARM_UP, COUNTED, TIMED = 4, 3, 15  # steps; a graph is recorded within the first ones
SPARED = 2**30  # bytes of a card that are not torch's: context, workspaces of cuDNN and cuBLAS
_NOT_COVERED = ("mprun+", "loop+", "amp+")  # torch.compile
_MIB = 2**20

NOTE = """\
Measured on a fake CUDA device: no kernel ran. Peak and reserved are bytes of torch's caching
allocator in steady training steps (torch's own workspace for cuBLAS is among them), without
evaluation, without the CUDA context and what cuDNN asks for; of synthetic images two batches lie on
the device, as bytes. Launches a step: kernels of torch, of Triton, calls of cuDNN and cuBLAS (which
launch one or more), copies and fills. Host: median time in which this machine's processor gets
through a step; no time of a device is in it."""


@dataclass(frozen=True, slots=True)
class HostRow:
    """One contender in one mode, eager or replayed. Bytes; numbers of one step; milliseconds.

    peak: allocated, of steady steps (replays allocate nothing: None). reserved: after them.
    library: calls of cuDNN and cuBLAS. work: pieces of work that a replay launches at once. waits:
    of the host for the device. why_not: why there are no numbers.
    """

    label: str
    mode: str
    contender: str
    execution: str
    peak: int | None = None
    reserved: int | None = None
    launches: float | None = None
    triton: float | None = None
    library: float | None = None
    copies: float | None = None
    work: float | None = None
    waits: float | None = None
    host_ms: float | None = None
    why_not: str | None = None


def main(arguments: list[str], options: Options) -> int:
    """The verb's part: on the fake device, in a process of its own if this one is not on it."""
    if not fake_cuda.is_fake():
        return _on_the_fake_device(arguments)
    import torch

    from mprun.bench.plan import plan
    from mprun.precision.single_pass_self_test import take_for_granted

    take_for_granted()
    device = torch.device("cuda", 0)
    groups, left_out = plan(options, device)
    cases = [c for group in groups for c in group.cases if c.contender not in _NOT_COVERED]
    rows = []
    try:
        for number, case in enumerate(cases, start=1):
            name = f"{case.label} {case.mode} {case.contender}"
            print(f"mprun: {number}/{len(cases)} {name}", file=sys.stderr, flush=True)
            rows += measured(case, device)
    except KeyboardInterrupt:
        print(report(rows, options.card_bytes))
        return INTERRUPTED
    facts = {"torch": torch.__version__, "note": NOTE, "rows": [asdict(row) for row in rows]}
    text = report(rows, options.card_bytes)
    for left in left_out:
        text += f"\nleft out: {left['label']} {left['mode']} {left['contender']}: {left['reason']}"
    if options.out is not None:
        folder = Path(options.out)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "host.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        (folder / "host.md").write_text(text + "\n", encoding="utf-8")
    print(json.dumps(facts, indent=1) if options.json else text)
    return DONE


def _on_the_fake_device(arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="mprun-fake-cuda-") as folder:
        try:
            fake_cuda.build(Path(folder))
        except RuntimeError as error:
            raise BadInput(f"bench --host: {error}") from None
        # Whatever the largest card holds: what fits where is said afterwards.
        environment = fake_cuda.environment(Path(folder), memory_bytes=2**42)
        command = [sys.executable, "-m", "mprun", "bench", *arguments]
        child = subprocess.Popen(command, env=environment)
        while True:
            try:
                code = child.wait()
                return code if code >= 0 else RESOURCE
            except KeyboardInterrupt:
                continue  # the child has it too, and prints what there is


def measured(case: Case, device) -> list[HostRow]:
    """The rows of a case: eager, and of mprun also replayed. What cannot run says why."""
    graphs = ("off", "on") if case.contender == "mprun" else (None,)
    return [_row(case, device, graph) for graph in graphs]


def _row(case: Case, device, graph: str | None) -> HostRow:
    import torch

    from mprun.bench.registry import make

    execution = "replayed" if graph == "on" else "eager"
    row = HostRow(case.label, case.mode, case.contender, execution)
    if graph is not None:
        case = replace(case, overrides=(*case.overrides, f"train.cuda_graph={graph}"))
    case = replace(case, real_data=True, overrides=(*case.overrides, *_two_batches(case)))
    _release(torch, device)
    try:
        return _measure(row, make(case, device), device)
    except (BadInput, torch.OutOfMemoryError, MemoryError) as error:
        return replace(row, why_not=str(error).partition("\n")[0])
    finally:
        _release(torch, device)


def _two_batches(case: Case) -> list[str]:
    """Of synthetic images, which lie on the device, as many as a loader would have there."""
    data = compose_config(case.overrides).config.data
    return [f"data.train_size={2 * data.batch_size}"] if data.name == "synthetic_images" else []


def _measure(row: HostRow, contender, device) -> HostRow:
    import torch

    with getattr(contender, "running", nullcontext)():
        for _ in range(WARM_UP):
            contender.step()
        torch.cuda.reset_peak_memory_stats(device)
        before = fake_cuda.counts()
        for _ in range(COUNTED):
            contender.step()
        counted = fake_cuda.counts() - before
        peak, reserved = (
            torch.cuda.max_memory_allocated(device),
            torch.cuda.memory_reserved(device),
        )
        times = []
        for _ in range(TIMED):
            started = time.perf_counter()
            contender.step()
            times.append(1000 * (time.perf_counter() - started))
    replayed = row.execution == "replayed"
    return replace(
        row,
        peak=None if replayed else peak,
        reserved=reserved,
        launches=counted.launches / COUNTED,
        triton=counted.driver_launches / COUNTED,
        library=counted.library_calls / COUNTED,
        copies=(counted.copies + counted.memsets) / COUNTED,
        work=counted.replayed / COUNTED if replayed else None,
        waits=counted.waits / COUNTED,
        host_ms=statistics.median(times),
    )


def report(rows: list[HostRow], card: int | None) -> str:
    """The table in Markdown, and what it is. card: bytes of a card that is asked about."""
    from mprun.record.console import markdown_table

    fp32 = {(r.label, r.contender): r.peak for r in rows if r.mode == "fp32" and r.peak}
    recipe = {(r.label, r.mode): r.peak for r in rows if r.contender == "amp"}
    header = ["model", "mode", "contender", "", "peak MiB", "of FP32", "of recipe", "reserved MiB"]
    header += ["launches", "Triton", "library", "copies", "waits", "host ms"]
    if card is not None:
        header.append(f"fits {card / 2**30:g} GiB")
    lines = []
    for row in rows:
        names = [row.label, row.mode, row.contender, row.execution]
        if row.why_not is not None:
            lines.append([*names, row.why_not, *[""] * (len(header) - len(names) - 1)])
            continue
        of_recipe = row.contender == "mprun" and row.mode not in REFERENCES
        nearest = "amp_bf16" if "bf16" in row.mode else "amp"
        line = [
            *names,
            _mib(row.peak),
            _ratio(row.peak, fp32.get((row.label, row.contender))),
            _ratio(row.peak, recipe.get((row.label, nearest))) if of_recipe else "",
            _mib(row.reserved),
            *map(_count, (row.launches, row.triton, row.library, row.copies, row.waits)),
            f"{row.host_ms:.2f}",
        ]
        if row.work is not None:
            line[8] = f"{_count(row.launches)} + {_count(row.work)} replayed"
        if card is not None:
            line.append("yes" if row.reserved + SPARED <= card else "no")
        lines.append(line)
    text = f"{markdown_table(header, lines)}\n\n{NOTE}"
    if card is not None:
        text += f"\nFits: reserved and {SPARED / 2**30:g} GiB for what is not torch's."
    return text


def _release(torch, device) -> None:
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()


def _mib(value: int | None) -> str:
    return "" if value is None else f"{value / _MIB:,.0f}"


def _ratio(value: int | None, base: int | None) -> str:
    return "" if not value or not base else f"{value / base:.3f}"


def _count(value: float) -> str:
    return f"{value:.0f}" if value == round(value) else f"{value:.1f}"
