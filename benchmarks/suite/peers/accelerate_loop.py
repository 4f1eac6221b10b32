"""Hugging Face Accelerate around a plain loop.

It follows the page "Add Accelerate to your code" (prepare, accelerator.backward, clip_grad_norm_ of
the accelerator) with `mixed_precision`. Accelerate has no documented example of two networks: they
are in the order of the PyTorch DCGAN tutorial. The loss scale is updated in each optimizer's step,
not once per iteration.
"""

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from benchmarks.suite.peers.equipment import plain
from benchmarks.suite.peers.peer import Peer, SkipCount
from benchmarks.suite.peers.problems import through_tool
from benchmarks.suite.peers.task import PeerTask

PRECISION = {"fp32": "no", "tf32": "no", "amp": "fp16", "amp_bf16": "bf16"}


def make_accelerate(task: PeerTask) -> Peer:
    """Accelerate's autocast and GradScaler, one device, NCHW, torch's default optimizer.

    Its state belongs to the process: one precision per process.
    """
    precision = PRECISION[task.mode]
    accelerator = Accelerator(mixed_precision=precision, cpu=task.device.type == "cpu")
    equipment = plain(task)
    skips = SkipCount(equipment.optimizers) if task.mode == "amp" else None
    pairs = zip(equipment.networks, equipment.optimizers, strict=True)
    prepared = [accelerator.prepare(network, optimizer) for network, optimizer in pairs]

    def clip(network: nn.Module, _: AcceleratedOptimizer) -> None:
        accelerator.clip_grad_norm_(network.parameters(), task.clip_norm)

    train = through_tool(task, prepared, accelerator.backward, clip)
    return Peer(task, equipment.settings | {"precision": precision}, train, skips)
