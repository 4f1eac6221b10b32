"""`mprun -m`: every combination of the swept values, one process per run.

A separate process keeps peak memory, allocator state and random generators of one run away from
the next. Every combination is checked before the first one starts. A cell that diverges, fails,
hangs or is killed is an outcome in the table; the other cells go on. The same command given again
runs only the cells without an outcome, and continues the interrupted ones.
"""

from mprun.sweeps.run import STALL_AFTER_S, sweep

__all__ = ["STALL_AFTER_S", "sweep"]
