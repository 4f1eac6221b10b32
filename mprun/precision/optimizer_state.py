"""State of an optimizer by parameter name, for checkpoints, restored bit for bit."""

from collections.abc import Mapping

import torch
from torch import Tensor


@torch.no_grad()
def restore(
    saved: Mapping,
    masters: Mapping[str, Tensor],
    state: Mapping[str, Mapping],
    averages: Mapping[str, Tensor],
) -> None:
    """Copy what `MixedPrecisionOptimizer.state_dict` saved into tensors of the same names.

    torch's own Optimizer.load_state_dict casts state to the parameter's dtype and so loses FP32
    momentum of FP16 parameters; this one copies tensor by tensor. ValueError names what does not
    fit.
    """
    if saved["masters"].keys() != masters.keys() or saved["state"].keys() != state.keys():
        raise ValueError("optimizer state is of another model or precision mode")
    saved_averages = saved.get("averages", {})
    if saved_averages.keys() != averages.keys():
        raise ValueError("optimizer state has averages of other weights (optim.average_decay)")
    for name, average in averages.items():
        _copy_exactly(f"average of {name}", average, saved_averages[name])
    for name, master in masters.items():
        _copy_exactly(f"master weights of {name}", master, saved["masters"][name])
    for name, own in state.items():
        if saved["state"][name].keys() != own.keys():
            raise ValueError(f"optimizer state of {name} is of another optimizer")
        for key, value in saved["state"][name].items():
            _copy_exactly(f"{key} of {name}", own[key], value)


def _copy_exactly(what: str, own: Tensor, saved: Tensor) -> None:
    if own.dtype != saved.dtype or own.shape != saved.shape:
        raise ValueError(
            f"{what}: saved as {saved.dtype} {tuple(saved.shape)}, "
            f"needed {own.dtype} {tuple(own.shape)}"
        )
    own.copy_(saved)
