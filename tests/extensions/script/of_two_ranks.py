"""Training of a prepared model on two ranks, and of one process in their place."""

import os
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ...distributed.of_a_rank import digest, environment_of
from .loop_outcomes import InMode, refusal
from .loops import VECTORS, Plain, mlp, momentum

WORLD = 2
STEPS = 6
LARGE = 2  # step in which the loss of rank 0 is too large for FP16 gradients


class Setting(NamedTuple):
    """Say how a script trains on several ranks.

    wraps: "after" or "before" `prepare`; "" where it forgets to.
    ddp: options of DistributedDataParallel; None: `fully_shard`.
    layers: of a network of Linear, norm, ReLU, Linear: those that are sharded alone.
    micro_batches: halves of a share, all but the last of them without a reduction.
    """

    wraps: str = "after"
    ddp: dict[str, bool] | None = {}  # noqa: RUF012
    norm: type[nn.Module] = nn.LayerNorm
    branches: bool = False
    micro_batches: int = 1
    overflows: bool = False
    layers: tuple[int, ...] = ()


SETTINGS = {
    "ddp": Setting(),
    "bucket view": Setting(ddp={"gradient_as_bucket_view": True}),
    "find unused": Setting(ddp={"find_unused_parameters": True}, branches=True),
    "static graph": Setting(ddp={"static_graph": True}),
    "no_sync": Setting(micro_batches=2),
    "BatchNorm": Setting(norm=nn.BatchNorm1d),
    "overflow": Setting(overflows=True),
    "overflow with BatchNorm": Setting(overflows=True, norm=nn.BatchNorm1d),
    "overflow with no_sync": Setting(overflows=True, micro_batches=2),
}
# Refused in a line that names DistributedDataParallel, the cure.
WRONG = {"DDP before": Setting(wraps="before"), "neither": Setting(wraps="")}
# Refused in a line, or right.
SHARDED = {
    "sharded": Setting(ddp=None),
    "sharded before": Setting(ddp=None, wraps="before"),
    "sharded by layer": Setting(ddp=None, layers=(0, 3)),
    "sharded by layer before": Setting(ddp=None, wraps="before", layers=(0, 3)),
}
ALL_SETTINGS = SETTINGS | WRONG | SHARDED


class Branching(nn.Module):
    """Add a branch that only some calls use."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.branch = body, nn.Linear(32, 10)

    def forward(self, inputs, branch: bool):
        return self.body(inputs) + self.branch(inputs) if branch else self.body(inputs)


class Case(NamedTuple):
    """Name a setting and a mode; None is plain torch."""

    setting: str
    mode: str | None

    @property
    def prepare(self) -> Plain:
        return Plain() if self.mode is None else InMode(self.mode)


def network(setting: Setting) -> nn.Module:
    body = mlp()
    body[1] = setting.norm(64)
    return Branching(body) if setting.branches else body


def whole(parameters) -> Tensor:
    """Return all weights as one FP64 vector, sharded ones gathered."""
    full = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in parameters]
    return torch.cat([p.detach().flatten().double() for p in full])


def share_of(model, rank: int, setting: Setting, step: int, part: int) -> Tensor:
    """Return the loss of one micro-batch of a rank, divided by their number."""
    count = setting.micro_batches
    inputs, labels = (own[rank::WORLD].chunk(count)[part] for own in VECTORS)
    branch = ((step + rank) % 2 == 0,) if setting.branches else ()
    return F.cross_entropy(model(inputs, *branch), labels) / count


def alone(case: Case) -> dict[str, Tensor]:
    """Return the weights before and after the same training in one process.

    It computes the shares of both ranks in turn, and leaves out the step that overflows.
    """
    setting = ALL_SETTINGS[case.setting]
    model = network(setting)
    start = whole(model.parameters())
    model, optimizer = case.prepare(model, momentum(model.parameters()))
    for step in range(STEPS):
        if setting.overflows and step == LARGE:
            continue
        optimizer.zero_grad()
        for rank in range(WORLD):
            for part in range(setting.micro_batches):
                (share_of(model, rank, setting, step, part) / WORLD).backward()
        optimizer.step()
    return {"start": start, "weights": whole(model.parameters())}


def wrapped(model: nn.Module, setting: Setting) -> Any:
    if setting.ddp is not None:
        return DistributedDataParallel(model, **setting.ddp)
    for layer in setting.layers:
        fully_shard(model[layer])
    return fully_shard(model)


def trained(rank: int, case: Case) -> dict:
    """Return the weights that this rank ends with, and a digest of them and the optimizer."""
    setting, prepare = ALL_SETTINGS[case.setting], case.prepare
    model = network(setting)
    called = wrapped(model, setting) if setting.wraps == "before" else model
    called, optimizer = prepare(called, momentum(called.parameters()))
    if setting.wraps == "after":
        called = wrapped(called, setting)
        if setting.ddp is None:  # its parameters are others
            optimizer = momentum(called.parameters())
    for step in range(STEPS):
        large = setting.overflows and step == LARGE
        if large and not prepare.skips:
            continue
        optimizer.zero_grad()
        for part in range(setting.micro_batches):
            last = part == setting.micro_batches - 1
            with nullcontext() if last else called.no_sync():
                loss = share_of(called, rank, setting, step, part)
                (loss * (1e9 if large and rank == 0 else 1.0)).backward()
        optimizer.step()
    weights = whole(called.parameters())
    state = optimizer.state_dict() if setting.ddp is not None else {}
    return {"weights": weights, "digest": digest([weights, state])}


def be(rank: int, world: int, port: int, cases: list[Case], out: Path) -> None:
    """Be a rank, in a process of its own, which writes what it found to `out`/RANK.pt."""
    os.environ.update(environment_of(rank, world, port))
    torch.set_num_threads(1)
    # One that waits for a rank which has raised does so no longer.
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    found = {}
    for case in cases:
        torch.manual_seed(0)
        try:
            found[case] = trained(rank, case)
        except Exception as error:  # whatever it is, it is the outcome
            refused, text = refusal(error)
            found[case] = {"refused": refused, "said": text}
        dist.barrier()
    torch.save({tuple(case): own for case, own in found.items()}, out / f"{rank}.pt")
    dist.destroy_process_group()
