"""The GPUs of this machine, and their assignment to the runs of a sweep.

They are found without torch, which takes seconds to import and would occupy them.
"""

import os
import re
from collections.abc import Iterable
from itertools import accumulate, takewhile
from pathlib import Path

import pynvml

from mprun.errors import BadInput
from mprun.sweeps.jobs import Cell

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_NAME = re.compile(r"\d+|(GPU|MIG)-.+")
_DRIVER = Path("/proc/driver/nvidia/gpus")


def visible_gpus() -> list[str]:
    """Return the GPUs that a process started here sees, as CUDA_VISIBLE_DEVICES names them.

    If the variable is set, these are its entries up to the first that names no GPU ("-1", or
    SLURM's "NoDevFiles"), as CUDA reads it. Otherwise they are a number for each GPU of the driver.
    """
    listed = os.environ.get(_VISIBLE)
    names = map(str, range(_count())) if listed is None else map(str.strip, listed.split(","))
    return list(takewhile(_NAME.fullmatch, names))


def _count() -> int:
    try:
        pynvml.nvmlInit()
        try:
            return int(pynvml.nvmlDeviceGetCount())
        finally:
            pynvml.nvmlShutdown()  # runs are forks of this process
    except pynvml.NVMLError:  # no driver, or a container with the driver but without NVML
        return len(list(_DRIVER.glob("*")))


def available_cores() -> int:
    """Count the cores that this process may use; `mprun.data.loader` does too, but loads torch."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Gpus:
    """Give each cell its own of the GPUs `names` while it runs.

    A cell on the CPU needs none; without any GPU no cell does.
    """

    def __init__(self, names: Iterable[str]):
        self.names = list(names)
        self._taken: dict[Cell, list[str]] = {}

    def wanted(self, cell: Cell) -> int:
        """Return how many the cell takes; raise BadInput if there are fewer."""
        most = len(self.names)
        if not most or cell.device == "cpu":
            return 0
        wanted = most if cell.devices == "auto" else int(cell.devices)
        if wanted > most:
            allowed = "1" if most == 1 else f"a whole number from 1 to {most},"
            raise BadInput(
                f"devices={cell.devices}: {self._there_are()} here; must be {allowed} or auto"
            )
        return wanted

    def at_once(self, cells: Iterable[Cell]) -> int:
        """Return how many of the cells can run at once, at most; raise BadInput like `wanted`."""
        totals = accumulate(sorted(map(self.wanted, cells)))
        return sum(total <= len(self.names) for total in totals)

    def in_words(self, cells: Iterable[Cell]) -> str:
        """Return `4 GPUs hold 2 runs of devices=2 at a time`, with each number that is asked."""
        asked = {wanted: cell.devices for cell in cells if (wanted := self.wanted(cell))}
        runs = ((len(self.names) // wanted, devices) for wanted, devices in sorted(asked.items()))
        held = " or ".join(f"{n} run{'s' * (n > 1)} of devices={devices}" for n, devices in runs)
        return f"{self._there_are()} hold{'s' * (len(self.names) == 1)} {held} at a time"

    def has_room(self, cell: Cell) -> bool:
        return self.wanted(cell) <= len(self._free())

    def take(self, cell: Cell) -> dict[str, str]:
        """Assign the first free GPUs to the cell; return the environment variables for them."""
        taken = self._taken[cell] = self._free()[: self.wanted(cell)]
        return {_VISIBLE: ",".join(taken)} if taken else {}

    def give_back(self, cell: Cell) -> None:
        self._taken.pop(cell, None)

    def _free(self) -> list[str]:
        taken = {name for names in self._taken.values() for name in names}
        return [name for name in self.names if name not in taken]

    def _there_are(self) -> str:
        return f"{len(self.names)} GPU{'s' * (len(self.names) != 1)}"
