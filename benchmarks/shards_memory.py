"""Bytes that a rank holds after a step of `dist.engine=fsdp`, beside torch's own FSDP with AdamW.

    python -m benchmarks.shards_memory [--json FILE] [OVERRIDE ...]
    python -m benchmarks.shards_memory --fake-cuda [--json FILE] [OVERRIDE ...]

Ranks are processes on gloo, 1, 2 and 4 of them. It counts storages, not the peak of a process:
weights, gradients, the optimizer's state; of the ranks the one that
holds most. torch's own: `fully_shard` on each block and the rest in the same dtypes, norm layers
with the others, `torch.optim.AdamW` on its parameters.

--fake-cuda: GPT-2 at full size on the fake CUDA device, whose allocator is torch's own: what the
first of 1 to 8 ranks holds after a step, and the peak of one. Ranks are torch's fake process group,
which exchanges nothing. Workspaces of cuBLAS do not count.
"""

import argparse
import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from mprun.build import build
from mprun.build.data import build_data
from mprun.build.model import build_networks
from mprun.config.compose import compose_config
from mprun.distributed.group import RankGroup
from mprun.distributed.rank_info import RankInfo
from mprun.distributed.ranks import ALONE, Ranks
from mprun.precision import pin_math_flags
from mprun.record.memory import memory_by_kind
from mprun.recording.environment import environment
from tests.fake_cuda import runtime as fake_cuda

KINDS = ("parameters", "gradients", "optimizer_state")
MODES = ("fp32", "fp16_master_scaled", "amp")
GPT = [
    *("model=gpt", "model.num_layers=4", "model.hidden_size=256", "model.num_heads=8"),
    *("data=synthetic_tokens", "data.vocab_size=4096", "data.batch_size=2"),
    *("train.accumulate=4", "dist.engine=fsdp", "device=cpu"),
]

GPT2 = [
    *("model=gpt2", "data=synthetic_tokens", "data.vocab_size=50304", "data.batch_size=2"),
    *("data.sequence_length=256", "data.train_tokens=100000", "data.eval_tokens=2000"),
    *("train.accumulate=8", "train.cuda_graph=off", "device=cuda"),
]
FAKE = ("fp32", "torch, fp32", "fp16_master_scaled", "torch, fp16_master_scaled")
FAKE += ("amp", "fp16_master_scaled, fixed")


def ours(mode: str, overrides: list[str], ranks: Any) -> dict[str, int]:
    """Return kind -> bytes after a step of the product."""
    torch.manual_seed(0)
    config = compose_config([*GPT, f"precision={mode}", *overrides]).config
    built = build(config, torch.device("cpu"), ranks)
    built.stepper.step(0)
    learner = built.task.learners["model"]
    held = {kind: sum(sizes.values()) for kind, sizes in memory_by_kind([learner]).items()}
    return {kind: held.get(kind, 0) for kind in KINDS}


def torchs(mode: str, overrides: list[str], ranks: Any) -> dict[str, int]:
    """Return the same of torch alone; its parameters are FP32 in each mode that it has."""
    torch.manual_seed(0)
    config = compose_config([*GPT, "precision=fp32", *overrides]).config
    task = build(config, torch.device("cpu")).task
    model = task.learners["model"].model
    if ranks.world > 1:
        mesh = DeviceMesh.from_group(ranks.tensors, "cpu")
        half = torch.float16 if mode.startswith("fp16") else None
        policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
        for block in (*model.blocks, model):
            fully_shard(block, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, 4096, (20, 2))
    model(tokens)[0].float().mean().backward()
    optimizer.step()
    states = [v for state in optimizer.state.values() for v in state.values()]
    return {
        "parameters": _bytes(model.parameters()),
        "gradients": _bytes(p.grad for p in model.parameters()),
        "optimizer_state": _bytes(states),
    }


def _bytes(tensors: Any) -> int:
    local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    return sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local}.values()
    )


def measured(overrides: list[str], ranks: Any) -> dict[str, dict[str, int]]:
    found = {mode: ours(mode, overrides, ranks) for mode in MODES}
    return found | {f"torch, {mode}": torchs(mode, overrides, ranks) for mode in MODES[:2]}


def be(rank: int, world: int, port: int, overrides: list[str], folder: Path) -> None:
    """Be a rank, which writes what it holds to `folder`."""
    torch.set_num_threads(1)
    place = RankInfo(rank, rank, 0, 1, world, "127.0.0.1", port, served=False)
    group = RankGroup(place, torch.device("cpu"), 120.0)
    (folder / f"{rank}.json").write_text(json.dumps(measured(overrides, group)))
    group.leave(0)
    os._exit(0)


def on(world: int, overrides: list[str]) -> dict[str, dict[str, int]]:
    """Return what the rank with the most bytes holds, by contender and kind."""
    if world == 1:
        return measured(overrides, ALONE)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    with tempfile.TemporaryDirectory() as name:
        context, folder = get_context("spawn"), Path(name)
        processes = [
            context.Process(target=be, args=(rank, world, port, overrides, folder))
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]
    return {
        who: max((own[who] for own in ranks), key=lambda one: sum(one.values())) for who in ranks[0]
    }


class FakeRanks(Ranks):
    """The first of several ranks, whose exchanges give back what they got."""

    def __init__(self, world: int, device: torch.device):
        self.rank, self.world, self.device = 0, world, device
        dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
        self.tensors = dist.group.WORLD

    def all_of(self, own: Any) -> list[Any]:
        return [own] * self.world

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        return torch.cat([own] * self.world)

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        return values


def be_fake(world: int, who: str, overrides: list[str]) -> None:
    """Be the first of `world` ranks on the fake device; print bytes held and at the peak."""
    device = torch.device("cuda", 0)
    ranks = FakeRanks(world, device) if world > 1 else ALONE
    mode, _, order = who.removeprefix("torch, ").partition(", ")
    words = [*GPT2, f"precision={mode}", f"dist.order={order or 'fast'}", *overrides]
    config = compose_config(words).config
    pin_math_flags(config.precision.fp32_math)
    if who.startswith("torch"):
        step = torchs_step(config, ranks)
    else:
        config = replace(config, devices=str(world))
        config.dist.engine = "fsdp" if world > 1 else "auto"
        built = build(config, device, ranks)
        step = partial(built.stepper.eager_step, measure=False)
    for index in range(3):
        torch.cuda.reset_peak_memory_stats()
        step(index)
    gc.collect()
    found = {"held": torch.cuda.memory_allocated(), "peak": torch.cuda.max_memory_allocated()}
    print(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)


def torchs_step(config: Any, ranks: Any) -> Callable[[int], Any]:
    """Return a step of torch alone: AdamW on FP32 parameters, each rank's micro-batches summed
    without communication until the last."""
    half = torch.float16 if config.precision.param_dtype == "fp16" else None
    device = torch.device("cuda", 0)
    data = build_data(config.data, config.seed, device)
    [model] = build_networks(config.model, data)
    model.to(device)
    if ranks.world > 1:
        mesh = DeviceMesh.from_group(ranks.tensors, "cuda")
        policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
        for block in (*model.blocks, model):
            fully_shard(block, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    own = config.train.accumulate // ranks.world

    def step(index: int) -> None:
        optimizer.zero_grad()
        for number in range(own):
            if ranks.world > 1:
                model.set_requires_gradient_sync(number == own - 1)
            tokens, targets = data.train_batch(number)
            logits = model(tokens)[0].flatten(0, 1)
            torch.nn.functional.cross_entropy(logits.float(), targets.flatten()).backward()
        optimizer.step()

    return step


def print_fake(overrides: list[str]) -> dict[str, Any]:
    """Print the table of the fake device; return its figures."""
    found: dict[str, Any] = {}
    print("| MiB a rank | W | held | peak |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        fake_cuda.build(Path(name))
        variables = os.environ | fake_cuda.environment(Path(name))
        for who in FAKE:
            for world in (1, 2, 4, 8):
                words = ["--child", f"{world}", "--who", who, "--", *overrides]
                command = [sys.executable, "-m", "benchmarks.shards_memory", *words]
                ended = subprocess.run(command, env=variables, capture_output=True, text=True)
                if ended.returncode:
                    raise SystemExit(f"{who} on {world}: {ended.stderr[-2000:]}")
                own = found.setdefault(who, {})[world] = json.loads(ended.stdout)
                held, peak = (f"{own[key] / 2**20:,.0f}" for key in ("held", "peak"))
                print(f"| {who} | {world} | {held} | {peak} |", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--fake-cuda", action="store_true")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--who", help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args()
    if given.child:
        be_fake(given.child, given.who, given.overrides)
    if given.fake_cuda:
        write(given.json, {"bytes": print_fake(given.overrides)})
        return
    found = {world: on(world, given.overrides) for world in (1, 2, 4)}
    print("| KiB a rank | W | weights | gradients | state | together |\n" + "|---" * 6 + "|")
    for who in found[1]:
        for world, rows in found.items():
            sizes = [rows[who].get(kind, 0) for kind in KINDS]
            sizes.append(sum(sizes))
            cells = " | ".join(f"{size / 1024:,.0f}" if size else "-" for size in sizes)
            print(f"| {who} | {world} | {cells} |")
    write(given.json, {"bytes": found})


def write(path: Path | None, found: dict[str, Any]) -> None:
    if path is not None:
        about = environment(torch.device("cpu"))
        path.write_text(json.dumps({"environment": about} | found, indent=1) + "\n")


if __name__ == "__main__":
    main()
