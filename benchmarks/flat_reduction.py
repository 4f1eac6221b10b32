"""The cost of `dist.engine=flat` over a bare all-reduce of the same bytes, as a ratio in one run.

    python -m benchmarks.flat_reduction [--ranks N] [--mib M] [--rounds R]

Ranks are processes on gloo. In turns `FlatReduction` sums gradients of 160 tensors (as many as
ResNet-50 has) with M MiB in total, and `all_reduce` sums one tensor of M MiB. The ratio shows the
cost of flattening and of views. It prints the median over rounds and its quartiles.
"""

import argparse
import os
import statistics
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from mprun.distributed.group import RankGroup
from mprun.distributed.rank_info import RankInfo
from mprun.distributed.reduction import FlatReduction


def rank(number: int, world: int, port: int, mib: float, rounds: int) -> None:
    """Run one rank."""
    torch.set_num_threads(1)
    place = RankInfo(number, number, 0, 1, world, "127.0.0.1", port, served=False)
    group = RankGroup(place, torch.device("cpu"), 60.0)
    each = int(mib * 2**20 / 4 / 160)
    gradients = [torch.randn(each) for _ in range(160)]
    whole = torch.randn(each * 160)
    reduction = FlatReduction(group, world, fixed=False, bucket_bytes=25 * 2**20)

    def summed() -> None:
        reduction.add(gradients)
        reduction.total()

    def bare() -> None:
        dist.all_reduce(whole, group=group.tensors)

    ratios, base = [], []
    for turn in range(rounds + 2):
        seconds = []
        for work in (bare, summed):
            dist.barrier(group.host)
            started = time.perf_counter()
            work()
            dist.barrier(group.host)
            seconds.append(time.perf_counter() - started)
        if turn >= 2:  # the first two warm up
            ratios.append(seconds[1] / seconds[0])
            base.append(seconds[0])
    if number == 0:
        low, middle, high = statistics.quantiles(ratios, n=4)
        text = f"{world} ranks, {mib:g} MiB: all_reduce {1e3 * statistics.median(base):.1f} ms"
        print(f"{text}, flat x {middle:.3f} ({low:.3f} to {high:.3f}), n = {rounds}")
    group.leave(0)
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mib", type=float, default=97.5, help="ResNet-50's in FP32")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--port", type=int, default=29_777)
    options = parser.parse_args()
    arguments = (options.ranks, options.port, options.mib, options.rounds)
    mp.start_processes(rank, arguments, options.ranks, start_method="spawn")


if __name__ == "__main__":
    main()
