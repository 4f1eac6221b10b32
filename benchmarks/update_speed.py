"""The optimizer step of a mixed-precision mode: single pass, plain way, and torch alone.

    python benchmarks/update_speed.py [--device cuda] [--mode amp] [--blocks] [--json FILE]

The contenders work on the parameter shapes of each model, with existing gradients:

- single pass: finite check, unscaling, update of the masters and copy to the 16-bit parameters by
  mprun.precision.update;
- plain: the same by torch's operations one after another, fused optimizer included;
- reference: torch's fused optimizer on as many FP32 parameters with FP32 gradients, nothing to
  check or unscale, and one torch._foreach_copy_ of the result to 16 bits.

They take turns in one process, so that a slow spell of the machine hits all of them. A ratio is the
median over turns of two times of the same turn, with quartiles and the number of turns. GB/s are
the bytes of update_bytes.py over the median time. The share is relative to a copy measured in the
same run. --blocks measures block sizes of the CPU's single pass instead.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, Optimizer
from update_bytes import update_bytes

from mprun.models.classifiers import resnet50
from mprun.models.dcgan import ConvAutoencoder
from mprun.models.lstm import LSTMLanguageModel
from mprun.precision import (
    CastModel,
    MixedPrecisionOptimizer,
    StaticLossScale,
    cast_model,
    get_policy,
)
from mprun.precision.single_pass_cpu import BlockedUpdate
from mprun.precision.torch_update import has_fused_kernel, initialise_state

MODELS = {
    "resnet50": lambda: resnet50(1000),
    # 2 layers of 1,024 units projected to 512 on 10,000 words: 19 M parameters in 11 tensors.
    "lstm_lm": lambda: LSTMLanguageModel(10_000, 512, 1024, 2, projection_size=512),
    # As many tensors as a small network has, all in one block.
    "autoencoder": lambda: ConvAutoencoder(64, 32, 8, 1),
}
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd_momentum": lambda t, **kw: SGD(t, 1e-6, 0.9, weight_decay=1e-4, **kw),
    "adam": lambda t, **kw: Adam(t, 1e-9, **kw),
    "adagrad": lambda t, **kw: Adagrad(t, 1e-9, **kw),
}
SCALE = 1024.0
# On CUDA the device first sleeps that many of its cycles, about 50 ms, and then runs the queued
# launches. Otherwise updates of a tenth of a millisecond would be as slow as the host's launches.
# The runs are so few that they fit into CUDA's queue of about a thousand launches.
HEAD_START, QUEUED = 100_000_000, 10
BLOCKS = [1 << power for power in range(14, 23)]


@dataclass(frozen=True, slots=True)
class Ratio:
    """Median of n ratios of one turn each, with quartiles."""

    median: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.median:.2f}x [{self.low:.2f}, {self.high:.2f}]"


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table. Times in ms. bytes: per parameter, of single pass and plain way."""

    model: str
    parameters: int
    tensors: int
    optimizer: str
    mode: str
    threads: int
    path: str
    single_ms: float
    plain_ms: float
    reference_ms: float
    over_plain: Ratio
    over_reference: Ratio
    bytes: tuple[int, int]
    gb_per_s: float
    share_of_copy: float


def seconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the mean of `repeats` runs; on CUDA by the device's clock, without the host's work."""
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        return (time.perf_counter() - start) / repeats
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(HEAD_START)
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / repeats


def in_turns(
    runs: list[Callable[[], object]], device: torch.device, turns: int
) -> list[list[float]]:
    """Return the seconds of each contender, one list each, in the order of the turns."""
    once = [seconds(run, device, 2) for run in runs]
    # On a CPU windows last at least 20 ms; the first turn warms up.
    on_gpu = device.type == "cuda"
    repeats = [QUEUED if on_gpu else max(1, int(0.02 / value)) for value in once]
    times: list[list[float]] = [[] for _ in runs]
    for turn in range(turns + 1):
        for run, count, spent in zip(runs, repeats, times, strict=True):
            value = seconds(run, device, count)
            if turn:
                spent.append(value)
    return times


def ratio(ours: list[float], theirs: list[float]) -> Ratio:
    values = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    low, _, high = statistics.quantiles(values, n=4)
    return Ratio(statistics.median(values), low, high, len(values))


def copy_rate(device: torch.device) -> float:
    """Return the bytes read and written per second by a copy of 256 MiB of FP32."""
    source = torch.ones(1 << 26, device=device)
    target = torch.empty_like(source)
    seconds(lambda: target.copy_(source), device, 3)
    best = min(seconds(lambda: target.copy_(source), device, 5) for _ in range(5))
    return 2 * source.numel() * 4 / best


def fused(name: str, device: torch.device) -> dict:
    return {"fused": has_fused_kernel(name.removesuffix("_momentum"), device)}


class Step:
    """Optimizer steps over constant gradients: no backward, no new memory.

    In the plain way the gradients that it takes are put back, at almost no cost. It unscales FP32
    ones in place; scale and reciprocal take turns, so that they keep their values.
    """

    def __init__(self, cast: CastModel, name: str, update: str, device: torch.device):
        self.scale = StaticLossScale(SCALE, device=device)
        make = OPTIMIZERS[name]
        self.optimizer = MixedPrecisionOptimizer(
            cast,
            lambda named: make([t for _, t in named], **fused(name, device)),
            self.scale,
            update=update,
        )
        self.zero = torch.zeros((), device=device, requires_grad=True)
        self.gradients = [torch.randn_like(p) for p in self.optimizer.parameters]

    def __call__(self) -> None:
        optimizer = self.optimizer
        self.scale.scale.reciprocal_()
        optimizer.zero_grad()
        for parameter, gradient in zip(optimizer.parameters, self.gradients, strict=True):
            parameter.grad = gradient
        optimizer.backward(self.zero)  # depends on no parameter: the gradients do not change
        optimizer.step()


def reference(cast: CastModel, name: str, device: torch.device) -> Callable[[], None]:
    masters = [torch.randn_like(p, dtype=torch.float32) for p in cast.module.parameters()]
    half = cast.policy.half_dtype or torch.float16
    copies = [master.to(half) for master in masters]
    for master in masters:
        master.grad = torch.randn_like(master)
    optimizer = OPTIMIZERS[name](masters, **fused(name, device))
    initialise_state(optimizer)

    def run() -> None:
        optimizer.step()
        torch._foreach_copy_(copies, masters)

    return run


def model_in(name: str, mode: str, device: torch.device) -> CastModel:
    torch.manual_seed(0)
    module: nn.Module = MODELS[name]().to(device)
    return cast_model(module, get_policy(mode))


def measure(
    model: str, name: str, mode: str, device: torch.device, turns: int, copied: float
) -> Row:
    cast = model_in(model, mode, device)
    single = Step(cast, name, "auto", device)
    plain = Step(model_in(model, mode, device), name, "plain", device)
    runs = [single, plain, reference(cast, name, device)]
    ours, theirs, least = in_turns(runs, device, turns)
    parameters = list(cast.module.parameters())
    count = sum(p.numel() for p in parameters)
    both = (
        update_bytes(name, cast.policy, path=path, checks=True).step
        for path in ("single_pass", "plain")
    )
    counted = tuple(both)
    rate = counted[0] * count / statistics.median(ours)
    return Row(
        model,
        count,
        len(parameters),
        name,
        mode,
        torch.get_num_threads(),
        f"{single.optimizer.update_path}: {single.optimizer.update_reason}",
        statistics.median(ours) * 1e3,
        statistics.median(theirs) * 1e3,
        statistics.median(least) * 1e3,
        ratio(ours, theirs),
        ratio(ours, least),
        counted,
        rate / 1e9,
        rate / copied,
    )


def measure_blocks(model: str, name: str, mode: str, turns: int) -> list[tuple[int, float, Ratio]]:
    """Return (elements, ms, ratio to the reference) of each size of the CPU's blocks."""
    device, cast = torch.device("cpu"), model_in(model, mode, torch.device("cpu"))
    runs: list[Callable[[], None]] = []
    for block in BLOCKS:
        step = Step(cast, name, "single_pass", device)
        own = step.optimizer
        flags = [True] * len(own.parameters)
        own.use(BlockedUpdate(own.inner, own.parameters, own.updated, flags, block=block))
        runs.append(step)
    times = in_turns([*runs, reference(cast, name, device)], device, turns)
    return [
        (block, statistics.median(own) * 1e3, ratio(own, times[-1]))
        for block, own in zip(BLOCKS, times, strict=False)
    ]


def print_row(row: Row) -> None:
    print(
        f"| {row.model} | {row.parameters / 1e6:.1f} M in {row.tensors} | {row.optimizer} "
        f"| {row.threads} | {row.single_ms:.3g} | {row.plain_ms:.3g} | {row.reference_ms:.3g} "
        f"| {row.over_plain} | {row.over_reference} | {row.over_plain.n} | {row.bytes[0]} of "
        f"{row.bytes[1]} | {row.gb_per_s:.3g} | {row.share_of_copy:.0%} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--mode", default="fp16_master_scaled", help="a precision mode")
    parser.add_argument("--only", default="", help="only models with this in their name")
    parser.add_argument("--optimizers", nargs="+", default=["sgd_momentum", "adam"])
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--blocks", action="store_true", help="block sizes of the CPU's path")
    parser.add_argument("--json", metavar="FILE", help="also write the rows to FILE")
    args = parser.parse_args()
    device, rows = torch.device(args.device), []
    chosen = [model for model in MODELS if args.only in model]
    threads = [torch.get_num_threads()] if device.type == "cuda" else args.threads
    if not args.blocks:
        heads = ("model", "parameters", "optimizer", "threads", "single ms", "plain ms")
        heads += ("reference ms", "single : plain", "single : reference", "n", "bytes", "GB/s")
        heads += ("of copy",)
        print(f"{args.mode} on {device}\n\n| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    for count in threads:
        torch.set_num_threads(count)
        copied = 0.0 if args.blocks else copy_rate(device)
        for model in chosen:
            for name in args.optimizers:
                if args.blocks:
                    for block, ms, value in measure_blocks(model, name, args.mode, args.turns):
                        print(model, name, f"threads={count}", block, f"{ms:.3g} ms", value)
                        rows.append([model, name, count, block, ms, asdict(value)])
                    continue
                row = measure(model, name, args.mode, device, args.turns, copied)
                rows.append({**asdict(row), "copy_gb_per_s": copied / 1e9})
                print_row(row)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"device": str(device), "torch": torch.__version__, "rows": rows}, file)


if __name__ == "__main__":
    main()
