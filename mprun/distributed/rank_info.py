"""The rank of this process, read from the environment that torchrun, srun or mprun itself set.

Imports no torch, so that a contradiction is refused at once. torchrun repeats the command after any
exit code but 0, and the store of the first attempt may be gone with its rank 0. The record of the
run is not, and says which torchrun began it.
"""

import os
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mprun import errors
from mprun.errors import BadInput, MprunError

# Ports that no service uses by convention; each job of a cluster takes one.
_FIRST_PORT, _PORTS = 20_000, 40_000
_TRIED = 8  # of them, until one is free
# Exit codes of an attempt that would end in the same way again.
_FINAL = (errors.DONE, errors.BAD_INPUT, errors.DIVERGED, errors.DAMAGED)


@dataclass(frozen=True, slots=True)
class RankInfo:
    """The position of a rank among all ranks, or of a machine whose ranks are not yet started."""

    rank: int | None  # 0 ... world-1; None: this process has to start the ranks of machine `node`
    local_rank: int
    node: int
    nodes: int
    devices: int  # ranks on each machine
    address: str  # where all ranks find each other, at `port`
    port: int
    served: bool  # whether a launcher (torchrun or mprun's own) answers there
    # Name of the job of a batch system, which does not look for a free port; "": `port` was free.
    job: str = ""

    @property
    def world(self) -> int:
        return self.nodes * self.devices

    @property
    def ports(self) -> list[int]:
        """Return where the job's ranks look for each other: another job may have the first."""
        steps = (self.port + 1009 * number for number in range(1, _TRIED))
        return [self.port, *(_FIRST_PORT + port % _PORTS for port in steps)]

    @property
    def is_first(self) -> bool:
        """Return whether this rank, or machine, speaks for the whole run."""
        return self.node == 0 and self.local_rank == 0

    def environment(self, rank: int) -> dict[str, str]:
        """Return the variables that torchrun would set for rank `rank` of this machine."""
        return {
            "RANK": str(self.node * self.devices + rank),
            "WORLD_SIZE": str(self.world),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(self.devices),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_USE_AGENT_STORE": str(self.served),
        }


def completed(
    overrides: Sequence[str], rank_info: RankInfo | None
) -> tuple[tuple[str, ...], RankInfo | None]:
    """Add the environment's numbers of ranks to the overrides; return both with the rank's.

    Where one process was started for all devices of a machine, it is the machine's.
    """
    if rank_info is None:
        return tuple(overrides), None
    from mprun.config.overrides import parse_overrides

    pairs = (o.lstrip("+").partition("=") for o in overrides)
    numbers = [f"{key}={value}" for key, _, value in pairs if key in ("devices", "nodes")]
    given = {one.key_or_group: str(one.value()) for one in parse_overrides(tuple(numbers))}
    devices = given.get("devices", "auto" if rank_info.served else str(rank_info.devices))
    if rank_info.devices == 1 and devices not in ("1", "auto") and not rank_info.served:
        count = int(devices) if devices.isdecimal() else 0
        rank_info = replace(rank_info, rank=None, devices=max(1, count))
    missing = []
    for key, number in (("devices", rank_info.devices), ("nodes", rank_info.nodes)):
        if key not in given:
            missing += [f"{key}={number}"] if number > 1 else []
        elif given[key] not in (str(number), "auto"):
            raise BadInput(
                f"{key}={given[key]}: the environment has {rank_info.nodes} x {rank_info.devices} "
                f"ranks; omit {key} or use {key}={number}"
            )
    return (*overrides, *missing), rank_info


def rank_info_from(environ: Mapping[str, str] = os.environ) -> RankInfo | None:
    """Return the position of this process; None: the environment names no ranks."""
    if "RANK" in environ or "LOCAL_RANK" in environ or "TORCHELASTIC_RUN_ID" in environ:
        return _of_torchrun(environ)
    # A batch script sees the number of tasks, but only steps that srun starts are ranks.
    if "SLURM_PROCID" in environ and environ.get("SLURM_STEP_ID", "") not in ("", "4294967291"):
        return _of_slurm(environ)
    return None


def _of_torchrun(environ: Mapping[str, str]) -> RankInfo | None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        if name not in environ:
            raise BadInput(
                f"{name}: is not set, but other rank variables are (RANK, WORLD_SIZE, ...)"
            )
    rank, world = _number(environ, "RANK"), _number(environ, "WORLD_SIZE", 1)
    local = _number(environ, "LOCAL_RANK")
    devices = _number(environ, "LOCAL_WORLD_SIZE", 1, default=world)
    if rank >= world:
        raise BadInput(f"RANK={rank}: must be below WORLD_SIZE={world}")
    if local >= devices:
        raise BadInput(f"LOCAL_RANK={local}: must be below LOCAL_WORLD_SIZE={devices}")
    if world % devices:
        raise BadInput(
            f"WORLD_SIZE={world}: must be a multiple of LOCAL_WORLD_SIZE={devices}; each machine "
            "needs the same number of ranks"
        )
    if world == 1:
        return None
    if rank % devices != local:
        raise BadInput(
            f"RANK={rank} LOCAL_RANK={local}: ranks must be numbered machine by machine, "
            f"{devices} on each"
        )
    if "MASTER_ADDR" not in environ:
        raise BadInput(
            "MASTER_ADDR: is not set, but WORLD_SIZE is; it must name the machine of rank 0"
        )
    port = _number(environ, "MASTER_PORT", 1, 65_536)
    served = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    node, nodes = rank // devices, world // devices
    return RankInfo(rank, local, node, nodes, devices, environ["MASTER_ADDR"], port, served)


def _of_slurm(environ: Mapping[str, str]) -> RankInfo | None:
    tasks = _number(environ, "SLURM_STEP_NUM_TASKS", 1, default=_number(environ, "SLURM_NTASKS", 1))
    nodes = _number(environ, "SLURM_STEP_NUM_NODES", 1, default=_number(environ, "SLURM_NNODES", 1))
    if tasks == 1:
        return None
    rank, local = _number(environ, "SLURM_PROCID"), _number(environ, "SLURM_LOCALID")
    node = _number(environ, "SLURM_NODEID")
    if tasks % nodes:
        raise BadInput(f"SLURM_NTASKS={tasks}: must be a multiple of {nodes} machines")
    devices = tasks // nodes
    if rank != node * devices + local:
        raise BadInput(
            f"SLURM_PROCID={rank} SLURM_NODEID={node} SLURM_LOCALID={local}: ranks must be "
            "numbered machine by machine (srun --distribution=block)"
        )
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    address = environ.get("MASTER_ADDR") or first_host(hosts)
    job, step = (_number(environ, f"SLURM_{name}_ID", default=0) for name in ("JOB", "STEP"))
    default = _FIRST_PORT + (job + step) % _PORTS
    port = _number(environ, "MASTER_PORT", 1, 65_536, default=default)
    name = f"{job}.{step}"
    return RankInfo(rank, local, node, nodes, devices, address, port, served=False, job=name)


def launched_by(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return what distinguishes the torchrun above this process from all others; None: none is.

    Its run id alone does not: it is "none" unless the user gives one. The agent of each machine
    keeps the errors of all its attempts in a folder with a random name, RUNID_RANDOM.
    """
    run_id = environ.get("TORCHELASTIC_RUN_ID")
    if run_id is None:
        return None
    found = re.search(r"([^/]+)/attempt_\d+/", environ.get("TORCHELASTIC_ERROR_FILE", ""))
    return found[1] if found else f"{run_id}_{socket.gethostname()}_{os.getppid()}"


def is_restart(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether torchrun has started this process again (--max-restarts)."""
    return _number(environ, "TORCHELASTIC_RESTART_COUNT", default=0) > 0


def earlier_attempt(directories: Iterable[Path]) -> tuple[Path, Mapping[str, Any]] | None:
    """Return the directory and record of the attempt that torchrun repeats; None: it began no run.

    directories: where it can be, the likeliest first.
    """
    from mprun.record.run_record import read_record

    own = launched_by()
    for directory in directories:
        with suppress(MprunError, OSError):  # of a process that was killed, or of another run
            record = read_record(directory)
            if own in record.get("launched_by", ()):
                return directory, record
    return None


def final_code(record: Mapping[str, Any]) -> int | None:
    """Return the exit code of an attempt that no other one can better; None: go on with it."""
    of_status = errors.STATUS_EXIT_CODE.get(record.get("status", "running"))
    code = record.get("exit_code", of_status)
    return code if code in _FINAL else None


def first_host(hosts: str) -> str:
    """Return the first machine of SLURM's list: `gpu[003-010,012],login` gives `gpu003`."""
    found = re.match(r"([^,\[\]]+)(?:\[(\d+)[^\]]*\])?", hosts)
    if found is None:
        raise BadInput(f"SLURM_JOB_NODELIST={hosts!r}: names no machine; set MASTER_ADDR")
    return found[1] + (found[2] or "")


def _number(
    environ: Mapping[str, str],
    name: str,
    least: int = 0,
    below: int = 2**31,
    default: int | None = None,
) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal() or not least <= int(text[:12]) < below:
        allowed = f"a whole number of at least {least}" + (f", below {below}" * (below < 2**31))
        raise BadInput(f"{name}={text if text is not None else ''}: must be {allowed}")
    return int(text)
