"""Weights that a network starts from: of a file, or random ones."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn


def start_normal(layer: nn.Conv2d | nn.Linear, deviation: float) -> None:
    """Start a layer's weights as N(0, deviation^2), its biases as zeros."""
    nn.init.normal_(layer.weight, std=deviation)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


def load_weights(
    network: nn.Module, path: str, kind: str, needed: int, theirs: Mapping[str, str]
) -> None:
    """Put a torch.save file's weights into a network, without executing code in it.

    The file has all weights of such a network, or those of a VGG-16; the rest stays unchanged.

    Args:
        kind: the network's name in messages.
        needed: number of first weights of ``features`` and ``head`` that a VGG-16 must have.
        theirs: beginning of a name here -> its other spelling in such a file.

    Raises:
        ValueError: the file cannot be read, or has other weights; in one line.
    """
    try:
        read = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ValueError(f"weights={path}: cannot be read: {error.strerror or error}") from error
    except Exception as error:  # damaged files make torch raise many types
        raise ValueError(
            f"weights={path}: must be a file from torch.save that contains only weights"
        ) from error
    if not isinstance(read, dict) or not all(isinstance(v, Tensor) for v in read.values()):
        raise ValueError(f"weights={path}: must map names to tensors")
    own = network.state_dict()
    if read.keys() != own.keys():
        names = {name: name for name in own if name.startswith(("features.", "head."))}
        for here, there in theirs.items():
            other = {n: there + n.removeprefix(here) for n in names if n.startswith(here)}
            names |= {name: spelled for name, spelled in other.items() if spelled in read}
        if missing := [name for name in [*names][:needed] if names[name] not in read]:
            raise ValueError(
                f"weights={path}: is neither {kind} nor a VGG-16, because {missing[0]} is missing"
            )
        read = {name: read[spelled] for name, spelled in names.items() if spelled in read}
    for name, value in read.items():
        if value.shape != own[name].shape:
            raise ValueError(
                f"weights={path}: {name} is {list(value.shape)}, must be {list(own[name].shape)}"
            )
    network.load_state_dict(read, strict=False)
