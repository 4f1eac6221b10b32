"""Training of a prepared model on two ranks, and of one process in their place."""

import os
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import mprun

from ..distributed.of_a_rank import digest, environment_of
from .loop_outcomes import InMode, refusal
from .loops import VECTORS, Plain, mlp, momentum

WORLD = 2
STEPS = 6
LARGE = 2, 0  # step and rank with gradients too large for FP16
SPIKE = 0.1


class Setting(NamedTuple):
    """Say how a script trains on several ranks.

    wraps: "after" or "before" `prepare`; "" where it forgets to.
    ddp: options of DistributedDataParallel; None: `fully_shard`.
    layers: of a network of Linear, norm, ReLU, Linear: those that are sharded alone.
    micro_batches: halves of a share, all but the last of them without a reduction.
    clip: largest norm of the gradients.
    seeded: each rank draws random numbers of its own.
    resumes: all is built anew in the middle, and loaded: from the first rank, shards from each.
    """

    wraps: str = "after"
    ddp: dict[str, bool] | None = {}  # noqa: RUF012
    norm: type[nn.Module] = nn.LayerNorm
    branches: bool = False
    micro_batches: int = 1
    overflows: bool = False
    layers: tuple[int, ...] = ()
    clip: float | None = None
    seeded: bool = False
    resumes: bool = False

    @property
    def has_exact_sums(self) -> bool:
        """Return whether one process adds up the same numbers in the same order. The norm of shards
        is added up by shards.
        """
        return self.ddp is not None or self.clip is None


SETTINGS = {
    "ddp": Setting(),
    "bucket view": Setting(ddp={"gradient_as_bucket_view": True}),
    "find unused": Setting(ddp={"find_unused_parameters": True}, branches=True),
    "static graph": Setting(ddp={"static_graph": True}),
    "no_sync": Setting(micro_batches=2),
    "BatchNorm": Setting(norm=nn.BatchNorm1d),
    "clipped": Setting(clip=0.5),
    "seeded": Setting(seeded=True),
    "resumed": Setting(seeded=True, resumes=True),
    "overflow": Setting(overflows=True),
    "overflow with BatchNorm": Setting(overflows=True, norm=nn.BatchNorm1d),
    "overflow with no_sync": Setting(overflows=True, micro_batches=2),
}
# Right, or refused in a line where parameters themselves are in 16 bits.
WITH_MASTERS = {
    "DDP before": Setting(wraps="before", overflows=True),
    "sharded": Setting(ddp=None),
    "sharded before": Setting(ddp=None, wraps="before"),
    "sharded by layer": Setting(ddp=None, layers=(0, 3), overflows=True),
    "sharded by layer before": Setting(ddp=None, wraps="before", layers=(0, 3), overflows=True),
    "sharded with no_sync": Setting(ddp=None, layers=(0, 3), micro_batches=2, overflows=True),
    "sharded and resumed": Setting(ddp=None, layers=(0, 3), overflows=True, resumes=True),
    "sharded and clipped": Setting(ddp=None, layers=(0, 3), clip=0.5),
}
# Refused in a line that names the cure.
WRONG = {"neither": Setting(wraps=""), "sharded in part": Setting(ddp=None, layers=(0,))}
ALL_SETTINGS = SETTINGS | WITH_MASTERS | WRONG


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
    logits = model(inputs, *branch)
    loss = F.cross_entropy(logits, labels) / count
    # Times the first loss scale too much for one row of the last layer, which one shard has.
    large = setting.overflows and (step, rank) == LARGE
    return loss + SPIKE * logits[:, 0].sum() if large else loss


def alone(case: Case) -> dict[str, Any]:
    """Return the weights before and after the same training in one process, and the loss scale.

    It computes the shares of both ranks in turn.
    """
    setting = ALL_SETTINGS[case.setting]
    torch.manual_seed(0)
    model = network(setting)
    start = whole(model.parameters())
    model, optimizer = case.prepare(model, momentum(model.parameters()))
    if case.mode is not None and setting.ddp is not None:
        mprun.state_of(optimizer).add_up_in_16_bits()  # as DistributedDataParallel does
    parameters = [*model.parameters()]
    for step in range(STEPS):
        large = setting.overflows and step == LARGE[0]
        if large and not case.prepare.skips:
            continue
        optimizer.zero_grad()
        of_ranks: list[list[Any]] = [[None] * len(parameters) for _ in range(WORLD)]
        # Part by part, as ranks compute at the same time: so are calls counted for random bits.
        for part in range(setting.micro_batches):
            for rank, own in enumerate(of_ranks):
                share_of(model, rank, setting, step, part).backward()
                for place, p in enumerate(parameters if not large else ()):
                    if p.grad is not None:
                        own[place] = p.grad.clone() if own[place] is None else own[place] + p.grad
                        p.grad.zero_()
        for p, *gradients in zip(parameters, *of_ranks, strict=True) if not large else ():
            p.grad.copy_(sum(g for g in gradients if g is not None) / WORLD)
        clip(model, setting)
        optimizer.step()
    weights = whole(model.parameters())
    return {"start": start, "weights": weights, "scale": scale_of(case, optimizer)}


def scale_of(case: Case, optimizer: torch.optim.Optimizer) -> str:
    """Return the state of the loss scale: it has counted each step once."""
    return "" if case.mode is None else str(mprun.state_of(optimizer).scale.state_dict())


def clip(model, setting: Setting) -> None:
    if setting.clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), setting.clip)


def wrapped(model: nn.Module, setting: Setting) -> Any:
    if setting.ddp is not None:
        return DistributedDataParallel(model, **setting.ddp)
    for layer in setting.layers:
        fully_shard(model[layer])
    return model if setting == WRONG["sharded in part"] else fully_shard(model)


def built(rank: int, case: Case) -> tuple[Any, torch.optim.Optimizer]:
    """Return what a script calls, and its optimizer."""
    setting, prepare = ALL_SETTINGS[case.setting], case.prepare
    model = network(setting)
    if setting.seeded:
        torch.manual_seed(rank)
    called = wrapped(model, setting) if setting.wraps == "before" else model
    called, optimizer = prepare(called, momentum(called.parameters()))
    if setting.wraps == "after":
        called = wrapped(called, setting)
        if setting.ddp is None:  # its parameters are others
            optimizer = momentum(called.parameters())
            if case.mode is not None:
                mprun.state_of(optimizer)  # from now on its state has the loss scale
    return called, optimizer


def built_anew(rank: int, case: Case, called: Any, optimizer: Any) -> tuple[Any, Any]:
    """Return both as another start of the script would have them."""
    file = BytesIO()
    torch.save((called.state_dict(), optimizer.state_dict()), file)
    saved = [file.getvalue()]
    if ALL_SETTINGS[case.setting].ddp is not None:
        dist.broadcast_object_list(saved, 0)
    called, optimizer = built(rank, case)
    states = torch.load(BytesIO(saved[0]), weights_only=False)
    called.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])
    return called, optimizer


def trained(rank: int, case: Case) -> dict:
    """Return the weights that this rank ends with, and a digest of them and the optimizer."""
    setting, prepare = ALL_SETTINGS[case.setting], case.prepare
    called, optimizer = built(rank, case)
    for step in range(STEPS):
        if setting.overflows and step == LARGE[0] and not prepare.skips:
            continue
        if setting.resumes and step == STEPS // 2:
            called, optimizer = built_anew(rank, case, called, optimizer)
        optimizer.zero_grad()
        for part in range(setting.micro_batches):
            last = part == setting.micro_batches - 1
            with summing(called, setting, last):
                share_of(called, rank, setting, step, part).backward()
        clip(called, setting)
        optimizer.step()
    weights = whole(called.parameters())
    state = optimizer.state_dict() if setting.ddp is not None else {}
    scale = scale_of(case, optimizer)
    return {"weights": weights, "digest": digest([weights, state, scale]), "scale": scale}


def summing(model: Any, setting: Setting, sums: bool) -> AbstractContextManager[Any]:
    """Return a context in which a pass leaves gradients where they are, or adds them up."""
    if setting.ddp is None and hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(sums)
    elif setting.micro_batches > 1 and not sums:
        return model.no_sync()
    return nullcontext()


def be(rank: int, world: int, port: int, cases: list[Case], out: Path) -> None:
    """Be a rank, in a process of its own, which writes what it found to `out`/RANK.pt."""
    os.environ.update(environment_of(rank, world, port))
    torch.set_num_threads(1)
    # One that waits for a rank which has raised does so no longer.
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
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
