"""Runs (`mprun.Run`) of scripts on two ranks: what each rank sees of them."""

import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import mprun

from ..distributed.of_a_rank import environment_of

STEPS, LOG_EVERY = 6, 2
SPOILT = 3  # step, from 0


def recorded(rank: int, case: str, folder: Path) -> dict:
    """Train in a run; return what this rank has seen of it."""
    torch.manual_seed(0)
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    mprun.prepare(model, optimizer, "fp32" if case == "diverges" else "fp16_master_scaled")
    called = DistributedDataParallel(model)
    found: dict = {"evaluated": False}
    with mprun.Run(folder, optimizer, config={}, seed=0, log_every=LOG_EVERY) as run:
        found["directory"] = run.directory
        for step in range(STEPS):
            random = torch.Generator().manual_seed(10 * step + rank)
            inputs, labels = torch.randn(4, 8, generator=random), torch.arange(4) % 3
            if case == "diverges" and step == SPOILT and rank == 0:
                inputs[0, 0] = torch.nan
            optimizer.zero_grad()
            loss = F.cross_entropy(called(inputs), labels)
            loss.backward()
            optimizer.step()
            if case == "drifts" and step == SPOILT and rank == 1:
                with torch.no_grad():
                    model.bias[0] += 1e-6
            run.step(loss)
        if rank == 0 or case != "first evaluates":
            run.evaluate(loss=0.5 + rank)
        found["evaluated"] = True
    return found | {"status": run.status, "steps": run.steps}


def first_alone(rank: int, folder: Path) -> dict:
    """Make a run in the first process only, as with other loggers."""
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    mprun.prepare(model, optimizer, "fp32")
    called = DistributedDataParallel(model)
    run = mprun.Run(folder, optimizer, config={}, seed=0) if rank == 0 else None
    for _ in range(STEPS):
        loss = called(torch.ones(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        if run is not None:
            run.step(loss)
    if run is not None:
        run.close()
    return {}


def be(rank: int, world: int, port: int, cases: list[str], out: Path) -> None:
    """Be a rank, in a process of its own, which writes what it found to `out`/RANK.pt."""
    os.environ.update(environment_of(rank, world, port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    found = {}
    for case in cases:
        try:
            if case == "first alone":
                found[case] = first_alone(rank, out / case)
            else:
                found[case] = recorded(rank, case, out / case)
        except RuntimeError as error:
            found[case] = {"said": str(error)}
        dist.barrier()
    said = {case: {key: str(v) for key, v in own.items()} for case, own in found.items()}
    torch.save(said, out / f"{rank}.pt")
    dist.destroy_process_group()
