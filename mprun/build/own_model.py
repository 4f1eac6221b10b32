"""`model=custom`: the user's factory as a builder, and a look at what its network does."""

from collections.abc import Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from mprun import checkpoint
from mprun.build.factories import Factory, is_out_of_memory
from mprun.config.schema import CustomModelConfig
from mprun.data.sample_random import kept_random_state
from mprun.data.source import Source
from mprun.errors import BadInput, MprunError, raised

_FEW = 2  # samples (and time steps) of the batch that the network is tried on


class OwnModel:
    """Builds the user's network, or generator and discriminator, as often as it is asked.

    The first one draws its weights from the global random state. Later ones, for an evaluation in
    FP32, are built on the CPU and leave it as it was; they must have the same structure, and not be
    the same object, else BadInput.
    """

    def __init__(self, config: CustomModelConfig, data: Source):
        self.factory = Factory("model.factory", config.factory)
        self.data, self.options = data, config.options
        self.is_gan = config.task == "gan"
        self.first: Sequence[nn.Module] | None = None
        self.left: dict[int, nn.Module] = {}

    def __call__(self) -> nn.Module:
        """The network of a task with one."""
        return self.part(0)

    def part(self, number: int) -> nn.Module:
        """0: the network, or the generator; 1: the discriminator, built together with it."""
        if number not in self.left:
            self.left = dict(enumerate(self.build()))
        return self.left.pop(number)

    def build(self) -> Sequence[nn.Module]:
        """All networks of a call of the factory."""
        if self.first is None:
            self.first = self._checked(self._made())
            return self.first
        # Inside `torch.device("meta")`, where the values of tensors that are no weights would be
        # lost.
        with kept_random_state(), torch.device("cpu"):
            networks = self._made()
        if any(one is old for one in networks for old in self.first) or _parameters(
            networks
        ) & _parameters(self.first):
            raise BadInput(f"{self.factory}: returned a network twice; each call must build one")
        if list(map(_structure, networks)) != list(map(_structure, self.first)):
            raise BadInput(f"{self.factory}: built another network the second time")
        return networks

    def _made(self) -> Sequence[nn.Module]:
        made = self.factory(self.data, **self.options)
        if not self.is_gan:
            made = (made,)
        elif not isinstance(made, tuple | list) or len(made) != 2:
            raise BadInput(
                f"{self.factory}: returned a {type(made).__name__}, must be (generator, "
                "discriminator)"
            )
        for network in made:
            if not isinstance(network, nn.Module):
                raise BadInput(
                    f"{self.factory}: returned a {type(network).__name__}, must be a "
                    "torch.nn.Module"
                )
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
                    raise BadInput(
                        f"{self.factory}: {name} is {parameter.dtype}; build the network in "
                        "float32, precision= casts it"
                    )
            for name, value in network.state_dict().items():
                if not isinstance(value, Tensor):
                    raise BadInput(f"{self.factory}: {name} in its state is no tensor")
        return networks


def _structure(network: nn.Module) -> list[tuple[str, torch.Size]]:
    return [(name, tensor.shape) for name, tensor in network.state_dict().items()]


def _parameters(networks: Sequence[nn.Module]) -> set[int]:
    return {id(parameter) for network in networks for parameter in network.parameters()}


def check_forward(
    name: str, task: str, networks: Sequence[nn.Module], data: Source, device, latent_size: int = 0
) -> None:
    """Run throw-away `networks` on two samples of training batch 0; BadInput if it does not fit.

    In eval mode, FP32, without gradients; leaves every random state as it was. name: what to blame,
    "model.factory=...". task "reconstruction" is only run.
    """
    with _on(device, networks), torch.no_grad():
        first = data.train_batch(0)[0]
        if task == "language_model":
            _check_language_model(name, networks[0], first[:_FEW, :_FEW], data.vocab_size)
        elif task == "gan":
            _check_gan(name, networks, first[:_FEW], latent_size)
        else:
            logits = _run(name, "forward", networks[0], first[:_FEW])
            if task == "classification":
                _expect(name, "forward", logits, (len(first[:_FEW]), data.num_classes))


@contextmanager
def _on(device: torch.device, networks: Sequence[nn.Module]):
    before = checkpoint.random_states(device)
    try:
        for network in networks:
            network.to(device).eval()
        yield
    finally:
        checkpoint.restore_random_states(before, device)


def _check_language_model(name: str, network: nn.Module, tokens: Tensor, vocab_size: int) -> None:
    state = None
    for what in ("forward(tokens, None)", "forward(tokens, state)"):
        output = _run(name, what, network, tokens, state)
        if not isinstance(output, tuple | list) or len(output) != 2:
            raise BadInput(
                f"{name}: {what} returned a {type(output).__name__}, must be (logits, state)"
            )
        logits, new = output
        _expect(name, what, logits, (*tokens.shape, vocab_size))
        if not isinstance(new, tuple | list) or not all(isinstance(s, Tensor) for s in new):
            raise BadInput(
                f"{name}: {what} returned a state of {type(new).__name__}, must be a tuple of "
                "tensors (of none, where nothing is carried on)"
            )
        if state is not None and [s.shape for s in state] != [s.shape for s in new]:
            raise BadInput(f"{name}: the state changes its shapes from batch to batch")
        state = tuple(new)


def _check_gan(name: str, networks: Sequence[nn.Module], real: Tensor, latent_size: int) -> None:
    generator, discriminator = networks
    codes = torch.zeros(len(real), latent_size, device=real.device)
    images = _run(name, "generator(codes)", generator, codes)
    if not isinstance(images, Tensor) or images.shape != real.shape:
        raise BadInput(
            f"{name}: generator(codes {list(codes.shape)}) returned {_shape(images)}, the images "
            f"of the data are {list(real.shape)}"
        )
    logits = _run(name, "discriminator(images)", discriminator, images)
    if not isinstance(logits, Tensor) or logits.shape != real.shape[:1]:
        raise BadInput(
            f"{name}: discriminator(images {list(real.shape)}) returned {_shape(logits)}, must be "
            f"logits [{len(real)}]"
        )


def _run(name: str, what: str, network: nn.Module, *inputs):
    try:
        return network(*inputs)
    except MprunError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise BadInput(f"{name}: {what} of {_shape(inputs[0])} in FP32: {raised(error)}") from error


def _expect(name: str, what: str, logits: object, least: tuple[int, ...]) -> None:
    """The shape `least`, of whose last part there may be more (padding)."""
    fits = (
        isinstance(logits, Tensor)
        and logits.is_floating_point()
        and logits.shape[:-1] == least[:-1]
        and logits.shape[-1] >= least[-1]
    )
    if not fits:
        raise BadInput(
            f"{name}: {what} returned {_shape(logits)}, must be floating logits {list(least)}"
        )


def _shape(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return f"a {type(value).__name__}"
