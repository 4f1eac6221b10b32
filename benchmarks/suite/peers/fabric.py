"""Lightning Fabric around a plain loop.

It follows the pages "Convert PyTorch code to Fabric", "Save memory with mixed precision" and
"Methods" (clip_gradients), and for two networks the Fabric DCGAN example of the Lightning
repository. There the loss scale is updated after each optimizer's step, not once per iteration.
"""

import logging
from functools import partial

from lightning.fabric import Fabric

from benchmarks.suite.peers.equipment import plain
from benchmarks.suite.peers.peer import Peer, SkipCount
from benchmarks.suite.peers.problems import through_tool
from benchmarks.suite.peers.task import PeerTask

PRECISION = {"fp32": "32-true", "tf32": "32-true", "amp": "16-mixed", "amp_bf16": "bf16-mixed"}


def make_fabric(task: PeerTask) -> Peer:
    """Fabric's precision plugin and GradScaler, one device, NCHW, torch's default optimizer."""
    # It logs the visible GPUs, and that TF32 would be faster.
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    accelerator = "gpu" if task.device.type == "cuda" else "cpu"
    precision = PRECISION[task.mode]
    fabric = Fabric(accelerator=accelerator, devices=1, precision=precision)
    fabric.launch()
    equipment = plain(task)
    skips = SkipCount(equipment.optimizers) if task.mode == "amp" else None
    pairs = zip(equipment.networks, equipment.optimizers, strict=True)
    prepared = [fabric.setup(network, optimizer) for network, optimizer in pairs]
    clip = partial(fabric.clip_gradients, max_norm=task.clip_norm)
    train = through_tool(task, prepared, fabric.backward, clip)
    return Peer(task, equipment.settings | {"precision": precision}, train, skips)
