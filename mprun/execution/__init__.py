"""Executing training steps: eagerly, through compiled networks, or as a replayed CUDA graph.

None of these changes what a step computes. A replay runs the kernels of the eager step on the same
addresses and gives the same bits. Compiled networks and the channels-last layout choose other
kernels, which round differently. Every step goes through one `StepRunner`.
"""

from mprun.execution.cuda_graph import CudaRecorder, why_not_captured
from mprun.execution.graphed_step import GraphedStep, HostBound
from mprun.execution.step_runner import Compilation, StepRunner

__all__ = [
    "Compilation",
    "CudaRecorder",
    "GraphedStep",
    "HostBound",
    "StepRunner",
    "why_not_captured",
]
