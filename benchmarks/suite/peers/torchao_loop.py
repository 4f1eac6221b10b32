"""torchao's FP8 training: its linear layers in the torch.amp recipe in BF16.

After torchao's README "torchao.float8": `convert_to_float8_training` with a recipe by name, weights
in FP32 under autocast, which is how nanoGPT and nanochat train; torch.compile around it, without
which its casts are kernels of their own.
"""

import torch
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from benchmarks.suite.peers.amp import make_amp, make_tuned_amp
from benchmarks.suite.peers.peer import Peer
from benchmarks.suite.peers.task import PeerTask

RECIPES = {"fp8_tensorwise": "tensorwise", "fp8_rowwise": "rowwise"}


def make_torchao(task: PeerTask) -> Peer:
    """Eager."""
    return make_amp(_converted(task))


def make_tuned_torchao(task: PeerTask, compiler: str | None = None) -> Peer:
    """With a fused optimizer and torch.compile."""
    return make_tuned_amp(_converted(task), compiler)


def _converted(task: PeerTask) -> PeerTask:
    config = Float8LinearConfig.from_recipe_name(RECIPES[task.mode])
    for network in task.networks:
        if isinstance(network, torch.nn.Linear):
            raise ValueError("torchao converts what is inside of a module")
        convert_to_float8_training(network, config=config)
    return task
