"""The meeting place of a run's ranks, and the store that holds what must survive a lost rank.

It holds why a rank failed, how far each rank is, and the run's directory.
"""

import json
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from mprun.distributed.rank_info import RankInfo
from mprun.errors import Resource

START_S = 300.0  # for all ranks to import, build and meet
BEAT_S = 1.0  # between two beats of a rank
LOST = "lost contact"  # of a rank whose connections are closed
_ANSWER_S = 2.0  # a stranger's server may accept a connection and never answer


def store_of(rank_info: RankInfo, host: bool) -> dist.TCPStore:
    """Connect to the key-value store of the ranks; with `host` this process serves it.

    Where a batch system has chosen no free port, the store is at any free port. The first free one
    of `rank_info.ports` tells it, to those who know the job. torch's own client would wait for ever
    for a stranger's server that does not answer.
    """
    address, port = rank_info.address, rank_info.port
    try:
        if rank_info.job:
            port = 0 if host else _told_port(rank_info)
        start = timedelta(seconds=START_S)
        store = dist.TCPStore(address, port, None, host, timeout=start, wait_for_workers=False)
        if rank_info.job and host:
            _tell_port(rank_info, store.port)
        return store
    except (RuntimeError, OSError) as error:
        text = str(error).partition("\n")[0]
        raise Resource(f"{address}:{port}: the ranks did not meet ({text})") from error


def _tell_port(rank_info: RankInfo, port: int) -> None:
    """Answer every connection to the first free port: the job, and the port of its store."""
    server, both = None, socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    for own in rank_info.ports:
        with suppress(OSError):
            server = socket.create_server(("", own), family=family, dualstack_ipv6=both)
            break
    if server is None:
        raise OSError(f"ports {', '.join(map(str, rank_info.ports))} are taken; set MASTER_PORT")

    def answer() -> None:
        while True:
            with suppress(OSError), server.accept()[0] as other:
                other.sendall(f"{rank_info.job} {port}\n".encode())

    threading.Thread(target=answer, name="mprun-port", daemon=True).start()


def _told_port(rank_info: RankInfo) -> int:
    """Ask at each of the ports in turn for the store of the job, until it is there."""
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        for port in rank_info.ports:
            with (
                suppress(OSError, ValueError),
                socket.create_connection((rank_info.address, port), _ANSWER_S) as other,
            ):
                other.settimeout(_ANSWER_S)
                job, told = other.makefile("rb").readline(200).decode().split()
                if job == rank_info.job:
                    return int(told)
        time.sleep(0.2)
    raise OSError(f"no rank 0 of job {rank_info.job} has answered within {START_S:g} s")


def directory_in(store: dist.Store) -> str | None:
    """Return the run's directory; None: rank 0 has not told it, or who serves the store is gone."""
    key = "mprun/directory"
    try:
        return store.get(key).decode() if store.check([key]) else None
    except RuntimeError:
        return None


def leave(store: dist.Store, serves: bool, world: int, wait_s: float) -> None:
    """Count this process out; who serves the store waits for the others, at most `wait_s`."""
    until = time.monotonic() + wait_s
    with suppress(RuntimeError):
        left = store.add("left", 1)
        while serves and left < world and time.monotonic() < until:
            time.sleep(0.02)
            left = store.add("left", 0)


# Why a rank failed.


def fail(store: dist.Store, ranks: Sequence[int], code: int, text: str) -> None:
    """Record why these ranks end the run, unless a failure was recorded before."""
    with suppress(RuntimeError):
        store.compare_set("failed", "", json.dumps([list(ranks), code, text]))


def failure_of(store: dist.Store, wait_s: float = 0.0) -> tuple[list[int], int, str] | None:
    """Return ranks, exit code and message of the first failure; None: nobody recorded one."""
    until = time.monotonic() + wait_s
    try:
        # Not `wait`, which prints a warning when it ends.
        while not store.check(["failed"]):
            if time.monotonic() >= until:
                return None
            time.sleep(0.05)
        ranks, code, text = json.loads(store.get("failed"))
    except (RuntimeError, ValueError):
        return None
    return ranks, code, text


def named(ranks: Sequence[int]) -> str:
    """Return "rank 1", or "ranks 1, 3"."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


# How far each rank is.


def beat(store: dist.Store, rank: int, number: int, begun: int) -> None:
    """Report that this rank is alive, the `number`-th time, and has begun so many exchanges."""
    store.set(f"beat/{rank}", f"{number} {begun}")


def late_ranks(store: dist.Store, world: int, own: int | None = None) -> list[int]:
    """Return the ranks that do not beat any more; else those that have begun fewer exchanges.

    All ranks begin the same exchanges in the same order, so who hangs is behind those that wait
    for it. It takes two beats, in which the waiting ranks come to rest.
    """
    keys = [f"beat/{rank}" for rank in range(world)]
    try:
        before = [store.get(key) if store.check([key]) else b"" for key in keys]
        time.sleep(2.5 * BEAT_S)
        now = [store.get(key) if store.check([key]) else b"" for key in keys]
    except RuntimeError:  # the store is on the machine of rank 0
        return [] if own == 0 else [0]
    others = [rank for rank in range(world) if rank != own]
    if dead := [rank for rank in others if now[rank] == before[rank]]:
        return dead if len(dead) < world else []
    begun = [int(one.split()[1]) for one in now]
    return [rank for rank in others if begun[rank] == min(begun) < max(begun)]
