"""A rank of a run on the fake CUDA device, over torch's ProcessGroupNCCL and `nccl_stub.c`.

`python -m tests.distributed.nccl_rank PARENT WORD...` is `mprun WORD...`, as a launcher starts it.
Kernels compute nothing: what a run reads back is replaced by zeros, and comparisons of values are
left out. At the beginning of a step each rank writes which GPU is its own, and rank 1 meets the
fault FAULT (`faulty.py`).
"""

import os
import sys
from pathlib import Path
from unittest import mock

import torch

from mprun.distributed.group import RankGroup
from mprun.execution.step_runner import StepRunner
from mprun.precision.torch_update import take_for_granted
from mprun.record.async_copy import Sent
from mprun.sweeps.child import child
from mprun.training.loop import MetricLogger

from .faulty import STEP, fault


def stepped(self, index, measure=False):
    if index == STEP:
        rank = os.environ["RANK"]
        Path(f"{os.environ['FAULT_AT']}-gpu-of-{rank}").write_text(str(torch.cuda.current_device()))
        if rank == "1" and os.environ["FAULT"] != "none":
            fault(os.environ["FAULT"])
    return step(self, index, measure)


def finite(self, *arguments):
    return dict.fromkeys(evaluate(self, *arguments), 0.0)


step, evaluate, read = StepRunner.step, MetricLogger.evaluate, Sent.read

if __name__ == "__main__":
    take_for_granted()
    with (
        mock.patch.object(StepRunner, "step", stepped),
        mock.patch.object(RankGroup, "check_equal", lambda self, state, step: None),
        mock.patch(
            "torch.nn.parallel.distributed._verify_param_shape_across_processes",
            lambda *arguments, **named: True,
        ),
        mock.patch.object(MetricLogger, "evaluate", finite),
        mock.patch.object(Sent, "read", lambda sent: [0.0 for _ in read(sent)]),
    ):
        sys.exit(child(sys.argv[1:]))
