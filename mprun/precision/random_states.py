"""The states of every global random generator of a run, including cuDNN's dropout.

Dropout between recurrent layers draws from a state inside cuDNN that torch does not expose.
mprun's layers (`mprun.precision.recurrent`) draw from a state kept here.
"""

import random
from typing import Any

import numpy
import torch
from torch import Tensor

from mprun.torch_private import cudnn_init_dropout_state

# Device index -> the state that cuDNN draws dropout masks from: uint8, on that device.
_dropout_states: dict[int, Tensor] = {}


def random_states(device: torch.device) -> dict:
    """Return the states of every global random generator, as tensors and plain values."""
    state: Any = numpy.random.get_state()
    name, keys, position, has_gauss, cached = state
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype("int64")), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
        states["cudnn_dropout"] = dropout_state(device)
    return states


def restore_random_states(states: dict, device: torch.device) -> None:
    """Restore all generators; call it last, after everything that may draw."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = states["numpy"]
    numpy.random.set_state((name, keys.numpy().astype("uint32"), position, has_gauss, cached))
    torch.set_rng_state(states["torch"].cpu())
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"].cpu(), device)
        restore_dropout_state(states.get("cudnn_dropout"), device)


def dropout_state(device: torch.device) -> Tensor | None:
    """Copy the state behind the masks between recurrent layers; None before its first use."""
    state = _dropout_states.get(_index(device))
    return None if state is None else state.clone()


def restore_dropout_state(state: Tensor | None, device: torch.device) -> None:
    """Go back to the result of `dropout_state`; no synchronisation for a state on the device.

    None: go back to the state that the present seed of torch's generator gives. An existing state
    is overwritten, because a captured graph knows its address.
    """
    own = _dropout_states.get(_index(device))
    if own is not None:
        own.copy_(_seeded_state(device) if state is None else state)
    elif state is not None:
        _dropout_states[_index(device)] = state.to(device, copy=True)


def own_dropout_state(device: torch.device) -> Tensor:
    """Return the state itself, created on its first use."""
    if _index(device) not in _dropout_states:
        _dropout_states[_index(device)] = _seeded_state(device)
    return _dropout_states[_index(device)]


def _seeded_state(device: torch.device) -> Tensor:
    seed = torch.cuda.default_generators[_index(device)].initial_seed() % 2**63
    # How much is dropped is said with each use; the state is the same for any share.
    return cudnn_init_dropout_state(0.5, True, seed, dtype=torch.uint8, device=device)


def _index(device: torch.device) -> int:
    index: int | Any = device.index  # None for "cuda", which torch's stub does not know
    return torch.cuda.current_device() if index is None else index
