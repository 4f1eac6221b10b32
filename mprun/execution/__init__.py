"""How a training step is executed: eagerly, through compiled networks, or as a replayed CUDA graph.

None of it changes what a step computes: a replay runs the kernels of the eager step on the same
addresses, so it gives the same bits; compiled networks and the channels-last layout choose other
kernels, which round differently. Every step goes through one `Stepper`.
"""

from mprun.execution.compilation import Compilation
from mprun.execution.cuda_graph import CudaRecorder
from mprun.execution.graphed_step import GraphedStep
from mprun.execution.host_bound import HostBound
from mprun.execution.step_runner import Stepper
from mprun.execution.uncapturable import why_not_captured

__all__ = [
    "Compilation",
    "CudaRecorder",
    "GraphedStep",
    "HostBound",
    "Stepper",
    "why_not_captured",
]
