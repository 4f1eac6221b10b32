"""torchao's FP8 training: its linear layers in the torch.amp recipe in BF16.

It follows torchao's README "torchao.float8": `convert_to_float8_training` with a recipe by name and
weights in FP32 under autocast, like nanoGPT and nanochat. Without torch.compile around it the casts
are separate kernels.
"""

import torch
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from benchmarks.suite.peers.amp import make_amp, make_tuned_amp
from benchmarks.suite.peers.peer import Peer
from benchmarks.suite.peers.task import PeerTask

RECIPES = {"fp8_tensorwise": "tensorwise", "fp8_rowwise": "rowwise"}


def make_torchao(task: PeerTask) -> Peer:
    """Build the eager loop."""
    return make_amp(_converted(task))


def make_tuned_torchao(task: PeerTask, compiler: str | None = None) -> Peer:
    """Build the loop with a fused optimizer and torch.compile."""
    return make_tuned_amp(_converted(task), compiler)


def _converted(task: PeerTask) -> PeerTask:
    config = Float8LinearConfig.from_recipe_name(RECIPES[task.mode])
    for network in task.networks:
        if isinstance(network, torch.nn.Linear):
            raise ValueError("torchao converts what is inside of a module")
        convert_to_float8_training(network, config=config)
    return task
