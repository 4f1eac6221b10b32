"""`mprun -m`: every combination of the swept values, one process per run.

A separate process keeps peak memory, allocator state and random generators of one run away from
the next. Every combination is checked before the first one starts. A cell that diverges, fails,
hangs or is killed is an outcome in the table; the other cells go on. The same command given again
runs only the cells without an outcome, and continues the interrupted ones.

The package itself is callable: `mprun.sweep(train)` is that of mprun.script, in one
process, however the package was imported.
"""

import inspect
import sys
from types import ModuleType
from typing import Any

from mprun.entry_points import loaded, required
from mprun.sweep.run import STALL_AFTER_S, sweep

__all__ = ["STALL_AFTER_S", "sweep"]
_OF_SCRIPT = "mprun.script.sweep"


class _CallablePackage(ModuleType):
    """A callable package: Python sets it as its parent's attribute, replacing any function."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        required("mprun.sweep", _OF_SCRIPT)
        return loaded(f"{_OF_SCRIPT}:sweep")(*arguments, **options)

    @property
    def __signature__(self) -> inspect.Signature:  # shown by help and completion for the call
        return inspect.signature(loaded(f"{_OF_SCRIPT}:sweep"))


sys.modules[__name__].__class__ = _CallablePackage
