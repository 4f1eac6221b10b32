"""torch's recurrent layers on CUDA, in what cuDNN can do and torch does not ask of it.

nn.LSTM, nn.GRU and nn.RNN (torch 2.11 to 2.15) fall short of the other layers in three ways:

- BF16 weights are never put into one buffer (`flatten_parameters` knows half, float and double),
  so cuDNN's are gathered from all weights at every forward pass;
- autocast computes them in FP16, also where it is a bfloat16 one;
- dropout between layers draws from a state inside of cuDNN that nobody can save, and that torch
  seeds anew, with a wait for the device, after every `torch.cuda.set_rng_state`. So masks could
  not be repeated from a checkpoint or beside a step.

`own_recurrent(model)` does all three for the layers of a model, by the operation that torch itself
calls (`torch._cudnn_rnn`). On a CPU, and where none of this applies, layers are torch's own.
"""

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.backends.cudnn import rnn as cudnn
from torch.overrides import TorchFunctionMode

_LAYERS = frozenset({torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu})
# Device index -> the state that cuDNN draws dropout masks from: uint8, on that device.
_dropout_states: dict[int, Tensor] = {}


def own_recurrent(model: nn.Module) -> nn.Module:
    """`model`, whose recurrent layers are then as said above; parameters stay the same objects."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase) and not isinstance(module.forward, partial):
            module.forward = partial(_forward, _Layer(module), module.forward)
    return model


def dropout_state(device: torch.device) -> Tensor | None:
    """A copy of the state that masks between recurrent layers come from; None before its use."""
    state = _dropout_states.get(_index(device))
    return None if state is None else state.clone()


def restore_dropout_state(state: Tensor | None, device: torch.device) -> None:
    """Go back to what `dropout_state` gave; no synchronisation for a state on the device.

    None: to the one that the present seed of torch's generator gives. Where there is a state it is
    overwritten, as a captured graph knows its address.
    """
    own = _dropout_states.get(_index(device))
    if own is not None:
        own.copy_(_seeded_state(device) if state is None else state)
    elif state is not None:
        _dropout_states[_index(device)] = state.to(device, copy=True)


def _forward(layer: "_Layer", forward, *args, **kwargs):
    with layer:
        return forward(*args, **kwargs)


class _Layer(TorchFunctionMode):
    """Takes the one call in which a module's `forward` computes, and leaves the rest to it."""

    def __init__(self, module: nn.RNNBase):
        super().__init__()
        self.module = module
        self._addresses: list[int] = []
        self._buffer: Tensor | None = None
        self._places: list[tuple[int, torch.Size]] = []  # of BF16 copies: offset and shape

    def __torch_function__(self, func, types, args=(), kwargs=None) -> Any:
        if func not in _LAYERS or not args[0].is_cuda:
            return func(*args, **(kwargs or {}))
        packed = args[1] if isinstance(args[1], Tensor) and args[1].dtype is torch.int64 else None
        if packed is None:
            inputs, hidden, weights, bias, layers, dropout, train, both, batch_first = args
        else:
            inputs, _, hidden, weights, bias, layers, dropout, train, both = args
            batch_first = False
        autocast = torch.is_autocast_enabled("cuda")
        as_bf16 = autocast and torch.get_autocast_dtype("cuda") is torch.bfloat16
        drops = train and dropout > 0 and layers > 1
        buffer = None
        if not as_bf16 and (drops or weights[0].dtype is torch.bfloat16):
            buffer = self._flat(weights)
        if not as_bf16 and not (drops and buffer is not None):
            return func(*args, **(kwargs or {}))
        h, c = hidden if isinstance(hidden, (tuple, list)) else (hidden, None)
        if as_bf16:
            inputs, h = inputs.bfloat16(), h.bfloat16()
            c = None if c is None else c.bfloat16()
            buffer, *weights = _InOneBuffer.apply(self._bf16_places(weights), *weights)
        with torch.autocast("cuda", enabled=False) if as_bf16 else nullcontext():
            output, h, c, _, _ = torch._cudnn_rnn(
                inputs,
                weights,
                self._per_layer(weights),
                buffer,
                h,
                c,
                cudnn.get_cudnn_mode(self.module.mode),
                self.module.hidden_size,
                self.module.proj_size,
                layers,
                batch_first,
                dropout,
                train,
                both,
                [] if packed is None else packed.tolist(),
                _own_dropout_state(inputs.device) if drops else None,
            )
        return (output, h, c) if func is torch.lstm else (output, h)

    def _flat(self, weights: list[Tensor]) -> Tensor | None:
        """The one buffer in which `weights` lie, into which they are put where they do not.

        None where they cannot be: another dtype among them, or one weight used twice.
        """
        addresses = [weight.data_ptr() for weight in weights]
        if addresses != self._addresses:
            if len({weight.dtype for weight in weights}) > 1 or len(set(addresses)) < len(weights):
                return None
            with torch.no_grad():
                self._buffer = self._flatten(list(weights))
            self._addresses = [weight.data_ptr() for weight in weights]
        return self._buffer

    def _bf16_places(self, weights: list[Tensor]) -> list[tuple[int, torch.Size]]:
        """Where cuDNN wants each weight in a BF16 buffer, and last the size of that buffer."""
        if not self._places:
            with torch.no_grad():
                copies = [torch.empty_like(weight, dtype=torch.bfloat16) for weight in weights]
                size = self._flatten(copies).numel()
            self._places = [(copy.storage_offset(), copy.shape) for copy in copies]
            self._places.append((size, torch.Size()))
        return self._places

    def _flatten(self, weights: list[Tensor]) -> Tensor:
        """Move the weights, in place, into a new buffer of the order that cuDNN wants."""
        module = self.module
        return torch._cudnn_rnn_flatten_weight(
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
    def forward(ctx, places, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.dtype = weights[0].dtype
        *places, (size, _) = places
        buffer = torch.empty(size, dtype=torch.bfloat16, device=weights[0].device)
        views = [buffer[start : start + shape.numel()].view(shape) for start, shape in places]
        torch._foreach_copy_(views, list(weights))
        ctx.mark_non_differentiable(buffer)
        return buffer, *views

    @staticmethod
    def backward(ctx, _, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(None if g is None else g.to(ctx.dtype) for g in gradients)


def _own_dropout_state(device: torch.device) -> Tensor:
    """The state itself, made where there is none yet."""
    if _index(device) not in _dropout_states:
        _dropout_states[_index(device)] = _seeded_state(device)
    return _dropout_states[_index(device)]


def _seeded_state(device: torch.device) -> Tensor:
    seed = torch.cuda.default_generators[_index(device)].initial_seed() % 2**63
    # How much is dropped is said with each use; the state is the same for any share.
    return torch._cudnn_init_dropout_state(0.5, True, seed, dtype=torch.uint8, device=device)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
