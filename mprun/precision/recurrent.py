"""Recurrent layers on CUDA: features of cuDNN that torch leaves unused.

On CUDA nn.LSTM, nn.GRU and nn.RNN (torch 2.11 to 2.15) fall short of other layers in three ways:

- BF16 weights are never put into one buffer (`flatten_parameters` knows half, float and double),
  so cuDNN's buffer is gathered from all weights at every forward pass;
- autocast computes them in FP16, even if it is a bfloat16 autocast;
- dropout between layers draws from a state inside cuDNN that nobody can save. torch seeds it anew,
  with a wait for the device, after every `torch.cuda.set_rng_state`. So masks could not be repeated
  from a checkpoint or beside a step.

`own_recurrent(model)` cures all three for the layers of a model, with the operation that torch
itself calls (`torch._cudnn_rnn`). In all other cases torch computes its layers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.backends.cudnn import rnn as cudnn
from torch.overrides import TorchFunctionMode

from mprun.precision.random_states import own_dropout_state
from mprun.torch_private import (
    FLAT_WEIGHT_REFS,
    FLAT_WEIGHTS,
    cudnn_rnn,
    cudnn_rnn_flatten_weight,
    dispatch_modes,
    foreach_copy_,
    function_modes,
    tree_map,
)

LAYERS = frozenset({torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu})


class RecurrentCall(NamedTuple):
    """The arguments of `torch.lstm`, `torch.gru` and the like, in either of their two forms."""

    inputs: Tensor  # (T, B, I), or (B, T, I) with `batch_first`; packed: (values, I)
    # h0 (L, B, P or H), and for an LSTM with it c0 (L, B, H); L = layers, twice that if
    # `bidirectional`.
    hidden: Any
    # Per layer and direction w_ih, w_hh, then b_ih, b_hh with `bias`, then w_hr with a projection.
    weights: list[Tensor]
    bias: bool
    layers: int
    dropout: float
    train: bool
    bidirectional: bool
    batch_first: bool = False
    batch_sizes: Tensor | None = None  # int64 [T], for a packed sequence

    @classmethod
    def of(cls, args: tuple[Any, ...]) -> Self:
        if isinstance(args[1], Tensor) and args[1].dtype is torch.int64:
            inputs, batch_sizes, *others = args
            return cls(inputs, *others)._replace(batch_sizes=batch_sizes)
        return cls(*args)

    @property
    def drops(self) -> bool:
        return self.train and self.dropout > 0 and self.layers > 1


def own_recurrent(model: nn.Module) -> nn.Module:
    """Change the recurrent layers of `model` as described above; its parameters stay the same."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase) and not isinstance(module.forward, partial):
            module.forward = partial(_forward_within, _ByCudnn(module), module.forward)
    return model


def flat_weights(weights: Iterable[Any]) -> dict[str, Any]:
    """Return the attributes in which a recurrent layer of torch keeps its weights once more.

    They include references: without these a layer takes other weights for new ones. It would move
    them into a buffer, away from the addresses that a captured graph and an optimizer know.
    """
    weights = list(weights)
    return {
        FLAT_WEIGHTS: weights,
        FLAT_WEIGHT_REFS: [None if own is None else weakref.ref(own) for own in weights],
    }


def _forward_within(mode: _ByCudnn, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if getattr(args[0] if args else kwargs.get("input"), "is_cuda", False):
        with mode:
            return forward(*args, **kwargs)
    # A backward pass that computes the forward pass again (torch.utils.checkpoint) has lost the
    # function modes, an emulation's own among them, and kept the dispatch modes.
    for one in reversed(dispatch_modes()):
        lost = getattr(one, "functions", None)
        if lost is not None and lost not in function_modes():
            with lost:
                return forward(*args, **kwargs)
    return forward(*args, **kwargs)


class _ByCudnn(TorchFunctionMode):
    """A mode that takes the one call in which a module's `forward` computes, and no other."""

    def __init__(self, module: nn.RNNBase):
        super().__init__()
        self.module = module
        self._addresses: list[int] = []
        self._buffer: Tensor | None = None
        # For BF16 copies: offset and shape of each, and the size of the buffer.
        self._places: tuple[list[tuple[int, torch.Size]], int] | None = None

    def __torch_function__(self, func, types, args=(), kwargs=None) -> Any:
        if func not in LAYERS:
            return func(*args, **(kwargs or {}))
        call = RecurrentCall.of(args)
        if torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") is torch.bfloat16:
            call, buffer = self._rounded_to_bf16(call)
            with torch.autocast("cuda", enabled=False):
                return self._compute(func, call, buffer)
        if call.drops or call.weights[0].dtype is torch.bfloat16:
            flat = self._flat(call.weights)
            if call.drops and flat is not None:
                return self._compute(func, call, flat)
        return func(*args, **(kwargs or {}))

    def _compute(self, func: Any, call: RecurrentCall, buffer: Tensor) -> tuple[Tensor, ...]:
        """Compute the result of `func` with the operation that it calls itself."""
        is_lstm = isinstance(call.hidden, (tuple, list))
        h, c = call.hidden if is_lstm else (call.hidden, None)
        output, h, c, _, _ = cudnn_rnn(
            call.inputs,
            call.weights,
            self._per_layer(call.weights),
            buffer,
            h,
            c,
            cudnn.get_cudnn_mode(self.module.mode),
            self.module.hidden_size,
            self.module.proj_size,
            call.layers,
            call.batch_first,
            call.dropout,
            call.train,
            call.bidirectional,
            [] if call.batch_sizes is None else call.batch_sizes.tolist(),
            own_dropout_state(call.inputs.device) if call.drops else None,
        )
        return (output, h, c) if func is torch.lstm else (output, h)

    def _rounded_to_bf16(self, call: RecurrentCall) -> tuple[RecurrentCall, Tensor]:
        """Return the call in BF16, as autocast does for FP16, and the one buffer of its weights."""
        if self._places is None:
            with torch.no_grad():
                copies = [torch.empty_like(weight, dtype=torch.bfloat16) for weight in call.weights]
                size = self._flatten(copies).numel()
            self._places = [(int(c.storage_offset()), c.shape) for c in copies], size
        inputs, hidden = tree_map(Tensor.bfloat16, (call.inputs, call.hidden))
        buffer, *weights = _InOneBuffer.apply(*self._places, *call.weights)
        return call._replace(inputs=inputs, hidden=hidden, weights=weights), buffer

    def _flat(self, weights: list[Tensor]) -> Tensor | None:
        """Return the one buffer of `weights`, and move them into it if necessary.

        None if that is impossible: dtypes differ, or one weight is used twice.
        """
        addresses = [weight.data_ptr() for weight in weights]
        if addresses != self._addresses:
            if len({weight.dtype for weight in weights}) > 1 or len(set(addresses)) < len(weights):
                return None
            with torch.no_grad():
                self._buffer = self._flatten(list(weights))
            self._addresses = [weight.data_ptr() for weight in weights]
        return self._buffer

    def _flatten(self, weights: list[Tensor]) -> Tensor:
        """Move the weights, in place, into a new buffer in cuDNN's order."""
        module = self.module
        return cudnn_rnn_flatten_weight(
            weights,
            self._per_layer(weights),
            module.input_size,
            cudnn.get_cudnn_mode(module.mode),
            module.hidden_size,
            module.proj_size,
            module.num_layers,
            module.batch_first,
            bool(module.bidirectional),
        )

    def _per_layer(self, weights: list[Tensor]) -> int:
        return len(weights) // (self.module.num_layers * (2 if self.module.bidirectional else 1))


class _InOneBuffer(torch.autograd.Function):
    """(buffer, *views of it): the weights rounded to BF16, as autocast does it in FP16."""

    @staticmethod
    def forward(
        ctx: Any, places: list[tuple[int, torch.Size]], size: int, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.dtype = weights[0].dtype
        buffer = torch.empty(size, dtype=torch.bfloat16, device=weights[0].device)
        views = [buffer[start : start + shape.numel()].view(shape) for start, shape in places]
        foreach_copy_(views, list(weights))
        ctx.mark_non_differentiable(buffer)
        return buffer, *views

    @staticmethod
    def backward(ctx: Any, _: Tensor, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, *(None if g is None else g.to(ctx.dtype) for g in gradients)
