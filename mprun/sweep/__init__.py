"""`mprun -m`: every combination of the swept values, one process per run.

A process of its own keeps peak memory, allocator state and random generators of one run away
from the next. Every combination is checked before the first one starts. A cell that diverges,
fails, hangs or is killed is an outcome in the table; the rest goes on. The same command again
runs only what has no outcome yet, and continues what was interrupted.
"""

from mprun.sweep.run import STALL_AFTER_S, sweep

__all__ = ["STALL_AFTER_S", "sweep"]
