"""The networks of a configuration: mprun's own, or those of the user's factory."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mprun.assembly.data import arguments_of
from mprun.assembly.user_code import Factory
from mprun.config.components.custom import CustomModelConfig
from mprun.config.execution_rules import auto_channels_last
from mprun.config.registry import ModelConfig, kind_of
from mprun.config.schema import RunConfig
from mprun.data.source import Source
from mprun.entry_points import loaded
from mprun.errors import BadInput
from mprun.torch_private import apply_to_tensors


def build_networks(config: Any, data: Source) -> list[nn.Module]:
    """Build a configuration's networks, FP32 with new random weights: one, or two that are a GAN.

    It raises BadInput for sizes that they cannot have. A user's factory is called each time.
    """
    if isinstance(config, CustomModelConfig):
        return _own_networks(config, data)
    builder = config.component.builder
    if isinstance(builder, Mapping):
        builder = builder[config.variant]
    needs = {name: _of_the_data(name, config, data) for name in config.component.needs}
    makers = map(loaded, (builder,) if isinstance(builder, str) else builder)
    try:
        return [make(**arguments_of(make, config) | needs) for make in makers]
    except ValueError as error:
        raise BadInput(f"model.{error}") from error


def _of_the_data(name: str, config: ModelConfig, data: Source) -> int:
    """Return `name` from the configuration, at least the data's value, or else from the data."""
    wanted = getattr(config, name, None)
    if name == "context_length":
        length = wanted or data.description.get("sequence_length")
        if not isinstance(length, int):
            reason = "the data do not define the length of their windows"
            raise BadInput(f"model.context_length=null: {reason}; set model.context_length=N")
        return length
    given = int(getattr(data, name) if hasattr(data, name) else data.description[name])
    if wanted is not None and wanted < given:
        raise BadInput(f"model.{name}={wanted}: must be >= {given}, the value of the data")
    return wanted or given


def uses_channels_last(config: RunConfig, device: torch.device) -> tuple[bool, str]:
    """Return whether networks and images are NHWC in memory, and if not, why."""
    setting = config.train.channels_last
    if setting == "auto":
        return auto_channels_last(config, device.type)
    return setting == "on", "train.channels_last=off"


def blocks_of(config: RunConfig, network: nn.Module) -> dict[str, nn.Module]:
    """Return the network's blocks by name: modules that a pass calls once, one after the other."""
    name = config.model.component.blocks
    if name is None:
        return {}
    return {f"{name}.{key}": own for key, own in network.get_submodule(name).named_children()}


def recompute(block: nn.Module) -> None:
    """Let a block keep its inputs alone for the backward pass, which computes the rest anew.

    It costs a second forward pass, and changes no bit: random numbers are drawn again.
    """
    block.forward = partial(_recomputed, block.forward)


def _recomputed(forward: Callable[..., Any], *inputs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*inputs)
    return checkpoint(forward, *inputs, use_reentrant=False)


def put_channels_last(network: nn.Module) -> nn.Module:
    """Put the weights of convolutions into NHWC order, in place, before masters are created.

    Copies of them (16-bit copies, masters, optimizer state) then keep their order, so that
    operations over lists of tensors stay on their fast path.
    """
    return apply_to_tensors(
        network, lambda t: t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t
    )


def _own_networks(config: CustomModelConfig, data: Source) -> list[nn.Module]:
    factory = Factory("model.factory", config.factory)
    made = factory(data, **config.options)
    returned = f"{factory}: returned a"
    if kind_of(config).networks == 1:
        made = (made,)
    elif not isinstance(made, tuple | list) or len(made) != 2:
        raise BadInput(f"{returned} {type(made).__name__}, must be (generator, discriminator)")
    for network in made:
        if not isinstance(network, nn.Module):
            raise BadInput(f"{returned} {type(network).__name__}, must be a torch.nn.Module")
        parameters = dict(network.named_parameters())
        if not any(p.requires_grad for p in parameters.values()):
            raise BadInput(f"{factory}: the network has no parameter to train")
        for name, parameter in parameters.items():
            if isinstance(parameter, nn.UninitializedParameter):
                raise BadInput(f"{factory}: {name} is lazy; give its size")
            if parameter.is_floating_point() and parameter.dtype is not torch.float32:
                use = "build the network in float32, precision= casts it"
                raise BadInput(f"{factory}: {name} is {parameter.dtype}; {use}")
        for name, value in network.state_dict().items():
            if not isinstance(value, Tensor):
                raise BadInput(f"{factory}: {name} in its state is no tensor")
    return list(made)
