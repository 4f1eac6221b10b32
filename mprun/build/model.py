"""Functions that build the networks of a configuration: mprun's networks, or the user's factory."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mprun.build.data import arguments_of
from mprun.build.user_code import Factory
from mprun.config.components.custom import CustomModelConfig
from mprun.config.registry import ModelConfig, kind_of
from mprun.config.rules import auto_channels_last
from mprun.config.schema import RunConfig
from mprun.data.source import Source, kept_random_state
from mprun.entry_points import loaded
from mprun.errors import BadInput
from mprun.torch_private import apply_to_tensors

Builders = Sequence[Callable[[], nn.Module]]


def network_builders(config: Any, data: Source) -> Builders:
    """Return functions that build a configuration's networks (FP32) with new random weights.

    There is one, or two: generator and discriminator.
    """
    if isinstance(config, CustomModelConfig):
        own = OwnModel(config, data)
        return [partial(own.part, number) for number in range(kind_of(config).networks)]
    builder = config.component.builder
    if isinstance(builder, Mapping):
        builder = builder[config.variant]
    needs = {name: _of_the_data(name, config, data) for name in config.component.needs}
    makers = map(loaded, (builder,) if isinstance(builder, str) else builder)
    return [partial(make, **arguments_of(make, config) | needs) for make in makers]


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


def new_network(
    builder: Callable[[], nn.Module], device: torch.device, channels_last: bool
) -> nn.Module:
    """Build a network on the device; raise BadInput for sizes that it cannot have."""
    try:
        network = builder().to(device)
    except ValueError as error:
        raise BadInput(f"model.{error}") from error
    return put_channels_last(network) if channels_last else network


def uses_channels_last(config: RunConfig, device: torch.device) -> tuple[bool, str]:
    """Return whether networks and images are NHWC in memory, and if not, why."""
    setting = config.train.channels_last
    if setting == "auto":
        return auto_channels_last(config, device.type)
    return setting == "on", "train.channels_last=off"


def put_channels_last(network: nn.Module) -> nn.Module:
    """Put the weights of convolutions into NHWC order, in place, before masters are created.

    Copies of them (16-bit copies, masters, optimizer state) then keep their order, so that
    operations over lists of tensors stay on their fast path.
    """
    return apply_to_tensors(
        network, lambda t: t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t
    )


class OwnModel:
    """A builder of the user's network, or generator and discriminator, for any number of copies.

    The first one draws its weights from the global random state. Later ones, for an evaluation in
    FP32, are built on the CPU and restore that state. They must have the same structure and be
    another object, else BadInput.
    """

    def __init__(self, config: CustomModelConfig, data: Source):
        self.factory = Factory("model.factory", config.factory)
        self.data, self.options = data, config.options
        self.is_gan = kind_of(config).networks > 1
        self.first: Sequence[nn.Module] | None = None
        self.left: dict[int, nn.Module] = {}

    def part(self, number: int) -> nn.Module:
        """Return network 0 (the network or generator) or 1 (the discriminator built with it)."""
        if number not in self.left:
            self.left = dict(enumerate(self.build()))
        return self.left.pop(number)

    def build(self) -> Sequence[nn.Module]:
        """Return all networks of one call of the factory."""
        if self.first is None:
            self.first = self._checked(self._made())
            return self.first
        # Without torch.device("cpu"), `torch.device("meta")` around it would lose the values of
        # tensors that are no weights.
        with kept_random_state(), torch.device("cpu"):
            networks = self._made()
        again = any(one is old for one in networks for old in self.first)
        if again or _parameters(networks) & _parameters(self.first):
            raise BadInput(f"{self.factory}: returned a network twice; each call must build one")
        if _structure(networks) != _structure(self.first):
            raise BadInput(f"{self.factory}: built another network the second time")
        return networks

    def _made(self) -> Sequence[nn.Module]:
        made = self.factory(self.data, **self.options)
        returned = f"{self.factory}: returned a"
        if not self.is_gan:
            made = (made,)
        elif not isinstance(made, tuple | list) or len(made) != 2:
            raise BadInput(f"{returned} {type(made).__name__}, must be (generator, discriminator)")
        for network in made:
            if not isinstance(network, nn.Module):
                raise BadInput(f"{returned} {type(network).__name__}, must be a torch.nn.Module")
        return tuple(made)

    def _checked(self, networks: Sequence[nn.Module]) -> Sequence[nn.Module]:
        for network in networks:
            parameters = dict(network.named_parameters())
            if not any(p.requires_grad for p in parameters.values()):
                raise BadInput(f"{self.factory}: the network has no parameter to train")
            for name, parameter in parameters.items():
                if isinstance(parameter, nn.UninitializedParameter):
                    raise BadInput(f"{self.factory}: {name} is lazy; give its size")
                if parameter.is_floating_point() and parameter.dtype is not torch.float32:
                    use = "build the network in float32, precision= casts it"
                    raise BadInput(f"{self.factory}: {name} is {parameter.dtype}; {use}")
            for name, value in network.state_dict().items():
                if not isinstance(value, Tensor):
                    raise BadInput(f"{self.factory}: {name} in its state is no tensor")
        return networks


def _structure(networks: Sequence[nn.Module]) -> list[dict[str, torch.Size]]:
    return [{name: t.shape for name, t in network.state_dict().items()} for network in networks]


def _parameters(networks: Sequence[nn.Module]) -> set[int]:
    return {id(parameter) for network in networks for parameter in network.parameters()}
