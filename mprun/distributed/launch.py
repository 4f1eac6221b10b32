"""Starting, watching and ending the ranks of one run on this machine.

`torch.distributed.elastic.multiprocessing` starts each in its own session. torchrun's agent above
it is left out. It turns every exit code into 1, and gives the other ranks 30 s.
"""

import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std, start_processes
from torch.distributed.elastic.multiprocessing.api import PContext

from mprun import errors
from mprun.data.loader import available_cores
from mprun.distributed.rank_info import RankInfo
from mprun.distributed.store import LOST, directory_in, failure_of, leave, named, store_of
from mprun.errors import MprunError
from mprun.record.run_directory import locked
from mprun.record.run_record import read_record

GRACE_S = 8.0  # between the end of one rank and SIGKILL for those still running
_POLL_S = 0.05
_AGAIN = (errors.RESOURCE, errors.PREEMPTED)


def launch(
    overrides: Sequence[str],
    devices: int,
    *,
    config_dir: str | None = None,
    rank_info: RankInfo | None = None,
    restarts: int = 0,
    kept: Sequence[str] = (),
    module: str,
) -> int:
    """Run on `devices` ranks of this machine; return the exit code of the worst rank.

    Args:
        rank_info: of this machine among several; None: it is the only one.
        restarts: how often lost ranks are restarted from the last checkpoint. A run that diverged,
            or that bad input or damaged files ended, is not restarted.
        kept: overrides that are passed to a restart as well.
        module: module that a rank runs; its first argument is this process's id.
    """
    rank_info = rank_info or RankInfo(None, 0, 0, 1, devices, "127.0.0.1", 0, served=True)
    options = [] if config_dir is None else ["--config-dir", config_dir]
    arguments = [*overrides, *options]
    with _Asked() as asked:
        while True:
            code, directory = _once(module, arguments, rank_info, asked)
            if code not in _AGAIN or restarts == 0 or asked.number:
                return code
            restarts -= 1
            print(f"mprun: restarting the ranks ({restarts} restarts left)", file=sys.stderr)
            if directory is not None:
                arguments = [f"resume={directory}", *kept, *options]


class _Asked:
    """Note signals while active; the loop passes them on to the ranks."""

    def __init__(self) -> None:
        self.number, self.times = 0, 0
        self._before = {number: signal.getsignal(number) for number in errors.ASKING}

    def __enter__(self) -> Self:
        self.listen()
        return self

    def listen(self) -> None:
        """Install the handlers again after torch's launcher replaced them by raising ones."""
        for number, handler in self._before.items():
            if handler != signal.SIG_IGN:
                signal.signal(number, self._note)

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: object) -> None:
        self.number, self.times = number, self.times + 1


def _once(
    module: str, arguments: list[str], rank_info: RankInfo, asked: _Asked
) -> tuple[int, str | None]:
    """Run one attempt; return its exit code and its directory."""
    hosts = rank_info.node == 0
    store = store_of(rank_info, hosts)
    rank_info = replace(rank_info, port=store.port, served=True, job="")
    threads = str(max(1, available_cores() // rank_info.devices))
    environment = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)}
    ranks = range(rank_info.devices)
    envs = {rank: rank_info.environment(rank) | environment for rank in ranks}
    # Python would warn that the module's package imports it as well.
    quiet = ("-W", "ignore::RuntimeWarning:runpy")
    words = (*quiet, "-m", module, os.getpid(), *arguments)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    with TemporaryDirectory(prefix="mprun-ranks-") as folder:
        silent = {rank: Std.NONE if rank_info.node + rank == 0 else Std.ALL for rank in ranks}
        logs = DefaultLogsSpecs(log_dir=folder, redirects=silent)
        # Blocked until torch's handlers are replaced again; the ranks unblock them for themselves.
        signal.pthread_sigmask(signal.SIG_BLOCK, errors.ASKING)
        try:
            started = start_processes(
                "mprun", sys.executable, dict.fromkeys(ranks, words), envs, logs
            )
            asked.listen()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, errors.ASKING)
        try:
            codes = _watched(started, asked)
        finally:
            started.close(signal.SIGKILL, timeout=5)
        own = dist.PrefixStore("mprun/0", store)
        code, cause = _judged(codes, own, rank_info, asked.number)
        if cause is not None:
            _print_unheard(Path(folder))
    directory = directory_in(store)
    # The other machines read it, too, and their ranks may have GRACE_S to end.
    leave(store, hosts, rank_info.nodes, 0.0 if asked.number else GRACE_S + 5)
    if cause is not None:
        print(f"mprun: {cause}", file=sys.stderr)
        if directory is not None and hosts:
            # Its rank could not know the cause, or had no time to write it.
            with suppress(MprunError, OSError), locked(Path(directory)):
                record = read_record(Path(directory))
                if record["status"] in ("running", "failed"):
                    record.end("failed", cause, exit_code=code)
    return code, directory


def _watched(started: PContext, asked: _Asked) -> dict[int, int | None]:
    """Wait for the ranks; return their exit codes, negative after a signal, None: still alive."""
    pids = started.pids()
    codes: dict[int, int | None] = dict.fromkeys(pids)
    passed_on, kill_at = 0, float("inf")
    while None in codes.values() and time.monotonic() < kill_at:
        for rank, pid in pids.items():
            if codes[rank] is None:
                codes[rank] = _ended(pid)
        if kill_at == float("inf") and set(codes.values()) - {None, errors.DONE}:
            kill_at = time.monotonic() + GRACE_S
        if asked.times > passed_on:
            passed_on = asked.times
            if passed_on > 2:  # neither the first nor the second time was enough
                break
            for rank, pid in pids.items():
                if codes[rank] is None:
                    with suppress(ProcessLookupError):
                        os.kill(pid, asked.number)
        time.sleep(_POLL_S)
    return codes


def _ended(pid: int) -> int | None:
    """Return a child's exit code without reaping the child; None: it still runs."""
    found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def _judged(
    codes: dict[int, int | None], store: dist.Store, rank_info: RankInfo, asked: int
) -> tuple[int, str | None]:
    """Return the exit code of the run, and the message that its ranks could not print themselves.

    asked: the signal that asked the ranks to end, 0: none did.
    """
    first = rank_info.node * rank_info.devices
    if asked:  # a rank without a handler yet was ended by the signal
        of_it = errors.exit_code_after(asked)
        codes = {rank: of_it if code == -asked else code for rank, code in codes.items()}
    killed = {first + r: -c for r, c in codes.items() if c is not None and c < 0}
    hung = [first + rank for rank, code in codes.items() if code is None]
    said = failure_of(store)
    # NCCL's watchdog aborts the ranks that wait, which have not failed.
    aborted = set(killed.values()) == {signal.SIGABRT} and bool(said or hung)
    # Who was lost to the others was killed from outside; who did not answer, by them.
    if killed and not aborted and (said is None or said[2].startswith(LOST)):
        (rank, number), *_ = killed.items()
        name = signal.Signals(number).name if number in set(signal.Signals) else str(number)
        return errors.RESOURCE, f"rank {rank} was killed ({name})"
    if said is not None:
        ranks, code, text = said
        first_code = codes[0]
        # Rank 0 has printed it, unless it was aborted.
        told = rank_info.node > 0 or (first_code is not None and first_code >= 0)
        return code, None if told else f"{named(ranks)}: {text}"
    # A rank that hangs after another ended by itself did not fail first.
    by_itself = set(codes.values()) - {None, errors.DONE, errors.RESOURCE, -signal.SIGABRT}
    if hung and not by_itself:
        return errors.RESOURCE, f"{named(hung)} did not answer, and was killed"
    ended = {code for code in codes.values() if code is not None}
    return next((code for code in errors.SEVERITY if code in ended), max(ended)), None


def _print_unheard(folder: Path) -> None:
    """After a failure, print what the ranks wrote before they had their own log."""
    for log in sorted(folder.rglob("*.log")):
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        for line in lines[-3:]:
            print(f"  {log.parent.name}: {line}", file=sys.stderr)
