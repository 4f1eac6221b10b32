"""The equipment of a plain PyTorch loop: tutorial defaults, or all fast settings."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from benchmarks.suite.peers.optimizers import make_optimizer
from benchmarks.suite.peers.task import PeerTask
from mprun.extensions.bench.runner import compiles
from mprun.precision.torch_update import has_fused_kernel, initialise_state


@dataclass(frozen=True, slots=True)
class Equipment:
    """The networks and optimizers of a loop.

    networks: the callables of a step. optimizers: one per network. freeze: take the discriminator's
    parameters out of the generator's step. settings: for the report.
    """

    task: PeerTask
    networks: tuple[Callable, ...]
    optimizers: tuple[Optimizer, ...]
    freeze: bool
    settings: dict


def plain(task: PeerTask) -> Equipment:
    """Use NCHW, the optimizer implementation that torch chooses, and no compilation."""
    optimizers = tuple(make_optimizer(task.config.optim, network) for network in task.networks)
    return Equipment(task, task.networks, optimizers, False, _settings(optimizers, False, None))


def tuned(task: PeerTask, channels_last: bool, compiler: str | None = None) -> Equipment:
    """Use a fused optimizer, NHWC for convolutional networks if requested, and torch.compile.

    NHWC and torch.compile are left out where they gain nothing. NHWC gains nothing outside
    convolutional networks and in FP32 without Tensor Cores. Compilation: where mprun's best
    settings have it. compiler: a backend of torch.compile to use in any case.
    """
    channels_last = channels_last and task.is_convolutional
    if channels_last:
        task = task.in_channels_last()
    fused = has_fused_kernel(task.config.optim.name, task.device)
    optimizers = tuple(make_optimizer(task.config.optim, net, fused) for net in task.networks)
    for optimizer in optimizers:
        # A fused SGD whose first step is skipped goes on with an uninitialised momentum.
        initialise_state(optimizer)
    networks: tuple[Callable, ...] = task.networks
    if compiler is None and compiles(task.config, task.device.type):
        compiler = "inductor"
    if compiler is not None:
        networks = tuple(torch.compile(network, backend=compiler) for network in networks)
    return Equipment(
        task, networks, optimizers, True, _settings(optimizers, channels_last, compiler)
    )


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@contextmanager
def frozen(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Compute no gradients for `parameters` inside."""
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


def _settings(optimizers: tuple[Optimizer, ...], channels_last: bool, compiler) -> dict:
    group = optimizers[0].param_groups[0]
    names = [name for name in ("fused", "foreach") if group.get(name)]
    return {
        "optimizer": names[0] if names else "default",
        "channels_last": channels_last,
        "compile": compiler or "off",
    }
