"""Numbers that a cast to 16 bits destroys: codes and times that are whole, values that become inf.

Real numbers lose digits that training does not need. Whole ones mean something by their last digit:
a category, a timestep, a position, Unix seconds. BF16 holds them up to 256, FP16 up to 2,048.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mprun.precision import DTYPE_NAMES
from mprun.prepared.containers import tensors_of
from mprun.prepared.tensors import Part
from mprun.torch_private import buffers_of, disable_dispatch_modes, is_functorch_tensor


class ExactNumbers:
    """Tell once each input and buffer of which a cast destroys numbers.

    Attributes:
        places: "input NAME", "buffer NAME".
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.places: set[str] = set()

    def look_at_inputs(
        self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], dtype: torch.dtype
    ) -> None:
        """Look at the inputs of a call; it waits for the device."""
        for name, tensor in _named_inputs(module, args, kwargs):
            self._look(f"input {name}", tensor, dtype, "pass them as integers")

    def look_at_buffers(self, parts: Iterable[Part]) -> None:
        """Look at the buffers of modules in the dtype in which each computes; likewise."""
        names = {module: name for name, module in self.model.named_modules()}
        for module, dtype, _ in parts:
            for key, own in buffers_of(module).items():
                if own is not None and own.dtype is not dtype:
                    name = f"{names[module]}.{key}" if names.get(module) else key
                    cure = "keep them as integers, or in a module that computes in fp32 (overrides)"
                    self._look(f"buffer {name}", own, dtype, cure)

    def _look(self, place: str, tensor: Tensor, dtype: torch.dtype, cure: str) -> None:
        if place in self.places or (found := destroyed(tensor, dtype)) is None:
            return
        self.places.add(place)
        if found == "inf":
            cure = "scale them before"
        what = {"whole": "whole numbers change", "inf": "values become infinite"}[found]
        largest = tensor.detach().abs().nan_to_num(posinf=0).max().item()
        name = DTYPE_NAMES[dtype]
        warnings.warn(f"{place}: {what} in {name}, up to {largest:,.6g}; {cure}", stacklevel=2)


@torch.no_grad()
def destroyed(tensor: Tensor, dtype: torch.dtype) -> str | None:
    """Return what a cast destroys: "whole" numbers, "inf" for what becomes infinite, or None.

    Each column of the last dimension is looked at by itself: codes often stand beside real
    features. At least two different numbers have to change: a mask of one large negative number
    masks however it is rounded.
    """
    usual = tensor.layout is torch.strided and not is_functorch_tensor(tensor)
    if tensor.dtype not in (torch.float32, torch.float64) or not tensor.numel() or not usual:
        return None
    with disable_dispatch_modes():
        values = tensor.reshape(-1, tensor.shape[-1] if tensor.dim() > 1 else 1)
        finite, cast = values.isfinite(), values.to(dtype)
        changed = (cast.to(values.dtype) != values) & finite
        lowest = values.masked_fill(~changed, torch.inf).amin(0)
        largest = values.masked_fill(~changed, -torch.inf).amax(0)
        if (cast.isinf() & finite).any() and lowest.amin() < largest.amax():
            return "inf"
        whole = ((values == values.round()) | ~finite).all(0)
        return "whole" if (whole & (lowest < largest)).any() else None


def _named_inputs(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    names = [*inspect.signature(type(module).forward).parameters][1:]
    names += [str(number) for number in range(len(names) + 1, len(args) + 1)]
    for name, value in (*zip(names, args, strict=False), *kwargs.items()):
        for tensor in tensors_of(value):
            yield name, tensor
