"""Tensors that the modules of a model hold for a while in place of their own, as in FP32."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mprun.precision.recurrent import flat_weights
from mprun.torch_private import buffers_of, flat_weights_of, parameters_of, places_of


@contextmanager
def in_fp32(model: nn.Module, weights: Mapping[str, Tensor] | None = None) -> Iterator[None]:
    """Let modules hold FP32 tensors, in one memory layout, while the block evaluates a model.

    16-bit tensors are widened, which costs their memory in FP32.

    Args:
        weights: parameter name -> FP32 tensor that replaces the parameter.
    """
    forms = _forms(model, weights or {})
    kept = {id(own) for own in model.parameters()}
    with ExitStack() as stack:
        for module in model.modules() if forms else ():
            for place in places_of(module):
                _hold(stack, place, {k: forms[id(t)] for k, t in place.items() if id(t) in forms})
            if isinstance(module, nn.RNNBase):
                flat = [forms.get(id(weight), weight) for weight in flat_weights_of(module)]
                _hold(stack, vars(module), flat_weights(flat))
                if not {id(weight) for weight in flat} <= kept:  # else as they were built
                    module.flatten_parameters()
        yield


def _forms(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[int, Tensor]:
    """Return id -> FP32 form, for each tensor whose FP32 form is another tensor."""
    names = {id(own): name for name, own in model.named_parameters()}
    found: dict[int, Tensor] = {}
    for module in model.modules():
        for own in (*parameters_of(module).values(), *buffers_of(module).values()):
            if own is None or id(own) in found:
                continue
            name = names.get(id(own), "")
            if name in weights:
                # cuDNN's weights move into one buffer; other code may know their addresses.
                moves = isinstance(module, nn.RNNBase) and own.is_cuda
                found[id(own)] = weights[name].clone() if moves else weights[name]
            elif own.is_floating_point() and own.layout is torch.strided:
                if own.dtype.itemsize < 4 or not own.is_contiguous():
                    # Always one layout, unlike in training: kernels differ by a rounding.
                    plain = own.detach().float().contiguous()
                    found[id(own)] = plain.requires_grad_(own.requires_grad)
    return found


_NOTHING = object()


def _hold(stack: ExitStack, place: dict[str, Any], other: Mapping[str, Any]) -> None:
    """Set `place` to hold `other` under these keys until `stack` closes."""
    stack.callback(_put, place, {key: place.get(key, _NOTHING) for key in other})
    place.update(other)


def _put(place: dict[str, Any], values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if value is _NOTHING:
            place.pop(key, None)
        else:
            place[key] = value
