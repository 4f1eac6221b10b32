"""`mprun bench --host`: memory, launches and host time of a CUDA step, on a machine without a GPU.

Steps run on the fake device of `fake_cuda`: torch's allocator is real and device memory is
address space, so the peak of a step is measured to the byte at full size; kernels take no time, so
the time of a step is the host's. No value, no time of a device and no rate is measured here.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mprun.bench import fake_cuda
from mprun.bench.plan import REFERENCES, Case, Options
from mprun.errors import DONE, INTERRUPTED, RESOURCE, BadInput
from mprun.record.console import markdown_table

if TYPE_CHECKING:
    import torch

    from mprun.bench.contender import Contender
    from mprun.bench.own import Contest

WARM_UP, COUNTED, TIMED = 4, 3, 15  # steps; a graph is recorded within the first ones
SPARED = 2**30  # bytes of a card that are not torch's: context, workspaces of cuDNN and cuBLAS
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

    Attributes:
        peak: allocated, of steady steps (replays allocate nothing: None).
        reserved: after them.
        library: calls of cuDNN and cuBLAS.
        work: pieces of work that a replay launches at once.
        waits: of the host for the device.
        why_not: why there are no numbers.
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


def on_the_fake_device(verb: list[str]) -> int:
    """Run `python -m VERB...` again on the fake device; its exit code."""
    with tempfile.TemporaryDirectory(prefix="mprun-fake-cuda-") as folder:
        try:
            fake_cuda.build(Path(folder))
        except RuntimeError as error:
            raise BadInput(f"bench --host: {error}") from None
        # Whatever the largest card holds: what fits where is said afterwards.
        environment = fake_cuda.environment(Path(folder), memory_bytes=2**42)
        child = subprocess.Popen([sys.executable, "-m", *verb], env=environment)
        while True:
            try:
                code = child.wait()
                return code if code >= 0 else RESOURCE
            except KeyboardInterrupt:
                continue  # the child has it too, and prints what there is


def host(contest: "Contest", options: Options) -> int:
    """Measure every case of the contest and print the table; in a process on the fake device."""
    import torch

    from mprun.precision.update_choice import take_for_granted

    take_for_granted()
    device = torch.device("cuda", 0)
    groups, left_out = contest.plan(options, device)
    # Without the best settings, of mprun and of others: torch.compile is not covered.
    cases = [c for group in groups for c in group.cases if not c.contender.endswith("+")]
    rows: list[HostRow] = []
    code = DONE
    try:
        for number, case in enumerate(cases, start=1):
            name = f"{case.label} {case.mode} {case.contender}"
            print(f"mprun: {number}/{len(cases)} {name}", file=sys.stderr, flush=True)
            rows += _measured(contest, case, device)
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
    return code


def _measured(contest: "Contest", case: Case, device: "torch.device") -> list[HostRow]:
    """The rows of a case: eager, and of mprun also replayed. What cannot run says why."""
    import torch

    from mprun.bench.worker import release

    own, rows = case.contender == "mprun", []
    data = case.config().data
    overrides = case.overrides
    if data.name == "synthetic_images":
        # They lie on the device: as many as a loader would have there.
        overrides = (*overrides, f"data.train_size={2 * data.batch_size}")
    for execution, graph in (("eager", "off"), ("replayed", "on")) if own else (("eager", None),):
        chosen = () if graph is None else (f"train.cuda_graph={graph}",)
        asked = replace(case, real_data=True, overrides=(*overrides, *chosen))
        row = HostRow(case.label, case.mode, case.contender, execution)
        release(device)
        try:
            row = _numbers(row, contest.make(asked, device), device)
        except (BadInput, torch.OutOfMemoryError, MemoryError) as error:
            row = replace(row, why_not=str(error).partition("\n")[0])
        finally:
            release(device)
        rows.append(row)
    return rows


def _numbers(row: HostRow, contender: "Contender", device: "torch.device") -> HostRow:
    import torch

    with contender.running():
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
    header = ["model", "mode", "contender", "", "peak MiB", "of FP32", "of recipe", "reserved MiB"]
    header += ["launches", "Triton", "library", "copies", "waits", "host ms"]
    header += [] if card is None else [f"fits {card / 2**30:g} GiB"]
    peaks = {(row.label, row.mode, row.contender): row.peak for row in rows if row.peak}
    lines = []
    for row in rows:
        cells = [row.why_not] if row.why_not is not None else _cells(row, peaks, card)
        line = [row.label, row.mode, row.contender, row.execution, *cells]
        lines.append([*line, *[""] * (len(header) - len(line))])
    text = f"{markdown_table(header, lines)}\n\n{NOTE}"
    if card is not None:
        text += f"\nFits: reserved and {SPARED / 2**30:g} GiB for what is not torch's."
    return text


def _cells(row: HostRow, peaks: dict[tuple[str, str, str], int], card: int | None) -> list[str]:
    def of(mode: str, contender: str) -> str:
        base = peaks.get((row.label, mode, contender))
        return "" if not row.peak or not base else f"{row.peak / base:.3f}"

    # Of the torch.amp recipe, where it takes part (benchmarks.suite), what mprun needs in 16 bits.
    held = row.contender == "mprun" and row.mode not in REFERENCES
    launches = _count(row.launches)
    counts = (row.triton, row.library, row.copies, row.waits)
    cells = [
        _mib(row.peak),
        of("fp32", row.contender),
        of("amp_bf16" if "bf16" in row.mode else "amp", "amp") if held else "",
        _mib(row.reserved),
        launches if row.work is None else f"{launches} + {_count(row.work)} replayed",
        *map(_count, counts),
        f"{row.host_ms:.2f}",
    ]
    if card is None:
        return cells
    return [*cells, "yes" if (row.reserved or 0) + SPARED <= card else "no"]


def _mib(value: int | None) -> str:
    return "" if value is None else f"{value / _MIB:,.0f}"


def _count(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if value == round(value) else f"{value:.1f}"
