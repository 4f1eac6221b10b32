"""Bytes that a rank holds after a step of `dist.engine=fsdp`, beside torch's own FSDP with AdamW.

    python -m benchmarks.shards_memory [--json FILE] [OVERRIDE ...]

Ranks are processes on gloo, 1, 2 and 4 of them. It counts storages, not the peak of a process:
weights or masters, their 16-bit copies, gradients, the optimizer's state; of the ranks the one that
holds most. torch's own: `fully_shard` on each block and the rest in the same dtypes, norm layers
with the others, `torch.optim.AdamW` on its parameters.
"""

import argparse
import json
import os
import socket
import tempfile
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from mprun.build import build
from mprun.config.compose import compose_config
from mprun.distributed.group import RankGroup
from mprun.distributed.rank_info import RankInfo
from mprun.distributed.ranks import ALONE
from mprun.record.memory import memory_by_kind
from mprun.training.environment import environment

KINDS = ("parameters", "master_weights", "gradients", "optimizer_state")
MODES = ("fp32", "fp16_master_scaled", "bf16_stochastic")
GPT = [
    *("model=gpt", "model.num_layers=4", "model.hidden_size=256", "model.num_heads=8"),
    *("data=synthetic_tokens", "data.vocab_size=4096", "data.batch_size=2"),
    *("train.accumulate=4", "dist.engine=fsdp", "device=cpu"),
]


def ours(mode: str, overrides: list[str], ranks: Any) -> dict[str, int]:
    """Return kind -> bytes after a step of the product."""
    torch.manual_seed(0)
    config = compose_config([*GPT, f"precision={mode}", *overrides]).config
    built = build(config, torch.device("cpu"), ranks)
    built.stepper.step(0)
    learner = built.task.learners["model"]
    held = {kind: sum(sizes.values()) for kind, sizes in memory_by_kind([learner]).items()}
    found = {kind: held.get(kind, 0) for kind in KINDS}
    used = [*learner.optimizer.gradients_in_use(), *(p.grad for p in learner.model.parameters())]
    return found | {"gradients": _bytes(own for own in used if own is not None)}


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args()
    found = {world: on(world, given.overrides) for world in (1, 2, 4)}
    print(
        "| KiB a rank | W | weights | masters | gradients | state | together |\n" + "|---" * 7 + "|"
    )
    for who in found[1]:
        for world, rows in found.items():
            sizes = [rows[who].get(kind, 0) for kind in KINDS]
            sizes.append(sum(sizes))
            cells = " | ".join(f"{size / 1024:,.0f}" if size else "-" for size in sizes)
            print(f"| {who} | {world} | {cells} |")
    if given.json:
        about = environment(torch.device("cpu"))
        text = json.dumps({"environment": about, "bytes": found}, indent=1)
        given.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
