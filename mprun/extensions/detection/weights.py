"""Files of weights that a network starts from."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn


def weights_in(path: str) -> dict[str, Tensor]:
    """Read the tensors of a torch.save file by name, to the CPU, without executing code in it.

    Raises:
        ValueError: it cannot be read or holds something else; in one line.
    """
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ValueError(f"weights={path}: cannot be read: {error.strerror or error}") from error
    except Exception as error:  # damaged files make torch raise many types
        raise ValueError(f"weights={path}: not a file of weights alone from torch.save") from error
    if not isinstance(found, dict) or not all(isinstance(v, Tensor) for v in found.values()):
        raise ValueError(f"weights={path}: must map names to tensors")
    return found


def put_weights(network: nn.Module, found: Mapping[str, Tensor], path: str) -> None:
    """Put tensors named like the network's own into it; the others stay unchanged.

    Raises:
        ValueError: a tensor has another shape; the message names the file and the tensor.
    """
    own = network.state_dict()
    for name, value in found.items():
        if value.shape != own[name].shape:
            raise ValueError(
                f"weights={path}: {name} is {list(value.shape)}, must be {list(own[name].shape)}"
            )
    network.load_state_dict(found, strict=False)
