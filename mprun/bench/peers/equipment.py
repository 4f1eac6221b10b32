"""What a plain PyTorch loop runs on: as tutorials leave it, or with all that is known to be fast."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.optim import Optimizer

from mprun.bench.peers.optimizers import can_fuse, make_optimizer
from mprun.bench.peers.task import PeerTask
from mprun.data.source import Batch


@dataclass(frozen=True, slots=True)
class Equipment:
    """networks: what is called in a step. optimizers: one per network. freeze: take the
    discriminator's parameters out of the generator's step. settings: for the report."""

    task: PeerTask
    networks: tuple[Callable, ...]
    optimizers: tuple[Optimizer, ...]
    freeze: bool
    settings: dict


def plain(task: PeerTask) -> Equipment:
    """NCHW, the implementation of the optimizer that torch chooses, nothing compiled."""
    optimizers = tuple(make_optimizer(task.config.optim, network) for network in task.networks)
    return Equipment(task, task.networks, optimizers, False, _settings(optimizers, False, None))


def tuned(task: PeerTask, channels_last: bool, compiler: str | None = None) -> Equipment:
    """Fused optimizer; convolutional networks in NHWC, if told to, and compiled.

    NHWC and torch.compile are left out where they gain nothing: outside convolutional networks
    (torch.compile falls back to eager at nn.LSTM), NHWC in FP32 without Tensor Cores, and
    compilation on a CPU, where it takes minutes. compiler: a backend of torch.compile to use all
    the same.
    """
    channels_last = channels_last and task.is_convolutional
    if channels_last:
        for network in task.networks:
            network.to(memory_format=torch.channels_last)
        task = replace(task, batch=_channels_last(task.batch))
    fused = can_fuse(task.config.optim, task.device)
    optimizers = tuple(make_optimizer(task.config.optim, net, fused) for net in task.networks)
    networks: tuple[Callable, ...] = task.networks
    if compiler is None and task.is_convolutional and task.device.type == "cuda":
        compiler = "inductor"
    if compiler is not None:
        networks = tuple(torch.compile(network, backend=compiler) for network in networks)
    return Equipment(
        task, networks, optimizers, True, _settings(optimizers, channels_last, compiler)
    )


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _channels_last(batch: Callable[[int], Batch]) -> Callable[[int], Batch]:
    """The same batches with images in NHWC, each converted once: a loader would yield them so."""
    converted: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def in_nhwc(index: int) -> Batch:
        images, labels = batch(index)
        known = converted.get(id(images))
        if known is None:
            nhwc = images.to(memory_format=torch.channels_last)
            # Both are kept: an id means the same tensor as long as it lives.
            known = converted[id(images)] = (images, nhwc)
        return known[1], labels

    return in_nhwc


def _settings(optimizers: tuple[Optimizer, ...], channels_last: bool, compiler) -> dict:
    group = optimizers[0].param_groups[0]
    names = [name for name in ("fused", "foreach") if group.get(name)]
    return {
        "optimizer": names[0] if names else "default",
        "channels_last": channels_last,
        "compile": compiler or "off",
    }
