"""The run that a process goes on with after torchrun started it again. Imports no torch.

torchrun repeats the command after any exit code but 0, and the store of the first attempt may be
gone with its rank 0. The record of the run is not, and says which torchrun began it.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from mprun.distributed.rank_info import launched_by
from mprun.errors import BAD_INPUT, DAMAGED, DIVERGED, DONE, STATUS_EXIT_CODE, MprunError
from mprun.record.run_record import read_record

# Exit codes of an attempt that would end in the same way again.
_FINAL = (DONE, BAD_INPUT, DIVERGED, DAMAGED)


def earlier_attempt(directories: Iterable[Path]) -> tuple[Path, Mapping[str, Any]] | None:
    """Return the directory and record of the attempt that torchrun repeats; None: it began no run.

    directories: where it can be, the likeliest first.
    """
    own = launched_by()
    for directory in directories:
        with suppress(MprunError, OSError):  # of a process that was killed, or of another run
            record = read_record(directory)
            if own in record.get("launched_by", ()):
                return directory, record
    return None


def final_code(record: Mapping[str, Any]) -> int | None:
    """Return the exit code of an attempt that no other one can better; None: go on with it."""
    code = record.get("exit_code", STATUS_EXIT_CODE.get(record.get("status", "running")))
    return code if code in _FINAL else None
