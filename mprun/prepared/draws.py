"""The numbers of a script's calls, by which models that round at random draw their bits.

A run of `mprun` numbers its micro-batches itself (`tasks/task.py`).
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from mprun.precision.philox import micro_batches
from mprun.prepared import passes


class Draws:
    """The random bits of models that round at random: each call of any of them has its own.

    calls: of all of them, on all ranks.
    """

    calls = 0

    @classmethod
    def begin(cls, device: torch.device, model: Any) -> None:
        """Take the script's seed for `model` if no other draws; a loaded state brings that of its
        run."""
        if cls._others(model):
            gc.collect()  # a model is in circles: those that the script has dropped go here
        if not cls._others(model):
            cls.calls = 0
            micro_batches.begin_step(device, torch.initial_seed(), 0)
            if model.group is not None:  # it enters such a mode after calls in another one
                cls.share_seed(device, model.group)

    @staticmethod
    def _others(model: Any) -> bool:
        return any(one.policy.draws for one in passes.alive if one is not model)

    @staticmethod
    def share_seed(device: torch.device, group: Any) -> None:
        """Take the first rank's seed on all: theirs may differ, and a checkpoint has one."""
        shared = torch.tensor(micro_batches.seed - 2**63, device=device)
        dist.broadcast(shared, group=group, group_src=0)
        micro_batches.begin_step(device, int(shared) + 2**63, 0)

    @classmethod
    def begin_call(cls, device: torch.device) -> None:
        """Give a call a number of its own."""
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        micro_batches.begin(device, cls.calls + rank)
        cls.calls += ranks

    @classmethod
    def state_dict(cls) -> dict[str, Any]:
        return {"seed": micro_batches.seed, "calls": cls.calls}

    @classmethod
    def load_state_dict(cls, device: torch.device, state: Mapping[str, Any]) -> None:
        cls.calls = state["calls"]
        micro_batches.begin_step(device, state["seed"], 0)
