"""A rank of torch's fake process group, which exchanges nothing: numbers are wrong by design."""

import torch
import torch.distributed as dist

from mprun.distributed.ranks import Ranks


class FakeRanks(Ranks):
    """What tasks and reductions ask of a `RankGroup`; every rank has what this one has."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world, self.tensors = rank, world, None
        self.summed: list[tuple[torch.dtype, int]] = []

    def all_of(self, own):
        return [own] * self.world

    def gather(self, own):
        return torch.cat([own] * self.world)

    def largest(self, values):
        return values

    def sum(self, tensor):
        self.summed.append((tensor.dtype, tensor.numel()))
        return dist.all_reduce(tensor, async_op=True)
