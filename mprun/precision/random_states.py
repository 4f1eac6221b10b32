"""The states of every global random generator of a run, cuDNN's dropout among them."""

import random

import numpy
import torch

from mprun.precision.recurrent import dropout_state, restore_dropout_state


def random_states(device: torch.device) -> dict:
    """The states of every global random generator, as tensors and plain values."""
    name, keys, position, has_gauss, cached = numpy.random.get_state()
    states = {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype("int64")), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
        states["cudnn_dropout"] = dropout_state(device)
    return states


def restore_random_states(states: dict, device: torch.device) -> None:
    """Put all generators back; to be called last, after everything that may draw."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = states["numpy"]
    numpy.random.set_state((name, keys.numpy().astype("uint32"), position, has_gauss, cached))
    torch.set_rng_state(states["torch"].cpu())
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"].cpu(), device)
        restore_dropout_state(states.get("cudnn_dropout"), device)
