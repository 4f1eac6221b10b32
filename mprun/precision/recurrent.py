"""Recurrent layers: on CUDA what torch does not ask of cuDNN, on a CPU emulated in 16 bits.

On CUDA nn.LSTM, nn.GRU and nn.RNN (torch 2.11 to 2.15) fall short of other layers in three ways:

- BF16 weights are never put into one buffer (`flatten_parameters` knows half, float and double),
  so cuDNN's are gathered from all weights at every forward pass;
- autocast computes them in FP16, also where it is a bfloat16 one;
- dropout between layers draws from a state inside of cuDNN that nobody can save, and that torch
  seeds anew, with a wait for the device, after every `torch.cuda.set_rng_state`. So masks could
  not be repeated from a checkpoint or beside a step.

`own_recurrent(model)` does all three for the layers of a model, by the operation that torch itself
calls (`torch._cudnn_rnn`). Where none of this applies, layers are torch's own.

On a CPU the decomposed native layer adds the weight gradient of T time steps in the 16-bit format.
`emulated_lstm` makes each weight gradient one float32 matrix product over all time steps, rounded
once (paper section 3.3). Inside, tensors are transposed to (features, batch), where the CPU's
matrix product is fastest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.backends.cudnn import rnn as cudnn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from mprun.precision.random_states import own_dropout_state

aten = torch.ops.aten
F32 = torch.float32
LAYERS = frozenset({torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu})


class RecurrentCall(NamedTuple):
    """The arguments of `torch.lstm`, `torch.gru` and the like, in either of their two forms.

    Attributes:
        inputs: (T, B, I), or (B, T, I) with `batch_first`; (values, I) of a packed sequence.
        hidden: h0 (L, B, P or H) and, of an LSTM, with it c0 (L, B, H); L = layers, twice that if
            `bidirectional`.
        weights: per layer and direction w_ih, w_hh, then b_ih, b_hh with `bias`, then w_hr with a
            projection.
        batch_sizes: int64 [T], of a packed sequence.
    """

    inputs: Tensor
    hidden: Any
    weights: list[Tensor]
    bias: bool
    layers: int
    dropout: float
    train: bool
    bidirectional: bool
    batch_first: bool = False
    batch_sizes: Tensor | None = None

    @classmethod
    def of(cls, args: tuple[Any, ...]) -> RecurrentCall:
        """The call with these positional arguments."""
        if isinstance(args[1], Tensor) and args[1].dtype is torch.int64:
            inputs, batch_sizes, *others = args
            return cls(inputs, *others)._replace(batch_sizes=batch_sizes)
        return cls(*args)

    @property
    def drops(self) -> bool:
        """Whether there is dropout between layers."""
        return self.train and self.dropout > 0 and self.layers > 1


def own_recurrent(model: nn.Module) -> nn.Module:
    """`model`, whose recurrent layers are then as said above; parameters stay the same objects."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase) and not isinstance(module.forward, partial):
            module.forward = partial(_forward_within, _ByCudnn(module), module.forward)
    return model


def _forward_within(mode: _ByCudnn, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with mode:
        return forward(*args, **kwargs)


class _ByCudnn(TorchFunctionMode):
    """Takes the one call in which a module's `forward` computes, and leaves the rest to it."""

    def __init__(self, module: nn.RNNBase):
        super().__init__()
        self.module = module
        self._addresses: list[int] = []
        self._buffer: Tensor | None = None
        # Of BF16 copies: offset and shape of each, and the size of the buffer.
        self._places: tuple[list[tuple[int, torch.Size]], int] | None = None

    def __torch_function__(self, func, types, args=(), kwargs=None) -> Any:
        if func not in LAYERS or not args[0].is_cuda:
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
        """What `func` returns, by the operation that it calls itself."""
        is_lstm = isinstance(call.hidden, (tuple, list))
        h, c = call.hidden if is_lstm else (call.hidden, None)
        output, h, c, _, _ = torch._cudnn_rnn(
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
        """The call with BF16 tensors, as autocast makes it in FP16, and its weights' one buffer."""
        if self._places is None:
            with torch.no_grad():
                copies = [torch.empty_like(weight, dtype=torch.bfloat16) for weight in call.weights]
                size = self._flatten(copies).numel()
            self._places = [(int(c.storage_offset()), c.shape) for c in copies], size
        inputs, hidden = tree_map(Tensor.bfloat16, (call.inputs, call.hidden))
        buffer, *weights = _InOneBuffer.apply(*self._places, *call.weights)
        return call._replace(inputs=inputs, hidden=hidden, weights=weights), buffer

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
    def forward(
        ctx: Any, places: list[tuple[int, torch.Size]], size: int, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.dtype = weights[0].dtype
        buffer = torch.empty(size, dtype=torch.bfloat16, device=weights[0].device)
        views = [buffer[start : start + shape.numel()].view(shape) for start, shape in places]
        torch._foreach_copy_(views, list(weights))
        ctx.mark_non_differentiable(buffer)
        return buffer, *views

    @staticmethod
    def backward(ctx: Any, _: Tensor, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, *(None if g is None else g.to(ctx.dtype) for g in gradients)


def emulated_lstm(
    call: RecurrentCall, counts: Counter[tuple[str, str]]
) -> tuple[Tensor, Tensor, Tensor]:
    """``torch.lstm`` on 16-bit tensors.

    Rounded at every step: h (before and after a projection), c, and in backward their gradients and
    those of the gates. The gates themselves stay float32 in forward, 16-bit copies are kept for
    backward. What cuDNN rounds inside is not published. Dropout between layers draws other random
    numbers than the native layer.

    Args:
        call: not of a packed sequence, T > 0; all its tensors share one 16-bit dtype.
        counts: get one ("lstm", "forward") and one ("lstm", "backward") per layer and direction.

    Returns:
        y, h_n, c_n in that dtype. A second derivative raises RuntimeError.
    """
    x = call.inputs.transpose(0, 1) if call.batch_first else call.inputs
    directions = 2 if call.bidirectional else 1
    per_layer = len(call.weights) // (call.layers * directions)
    hs, cs = [], []
    for layer in range(call.layers):
        ys = []
        for direction in range(directions):
            n = layer * directions + direction
            w_ih, w_hh, *others = call.weights[n * per_layer : (n + 1) * per_layer]
            b_ih, b_hh = others[:2] if call.bias else (None, None)
            w_hr = others[-1] if len(others) in (1, 3) else None
            inputs = x.flip(0) if direction else x
            h0, c0 = call.hidden[0][n], call.hidden[1][n]
            operands = (inputs, h0, c0, w_ih, w_hh, b_ih, b_hh, w_hr)
            tracked = any(t is not None and t.requires_grad for t in operands)
            keep = tracked and torch.is_grad_enabled()
            y, h, c = _EmulatedLayer.apply(keep, counts, *operands)
            ys.append(y.flip(0) if direction else y)
            hs.append(h)
            cs.append(c)
        x = torch.cat(ys, -1) if call.bidirectional else ys[0]
        if call.drops and layer < call.layers - 1:
            x = torch.dropout(x, call.dropout, True)
    return x.transpose(0, 1) if call.batch_first else x, torch.stack(hs), torch.stack(cs)


class _EmulatedLayer(torch.autograd.Function):
    """y, h_n, c_n of one layer in one direction; `operands` as of `_forward`."""

    @staticmethod
    def forward(
        ctx: Any, keep: bool, counts: Counter[tuple[str, str]], *operands: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Without this each of the 12 operations a time step would pass through both modes.
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            y, cells, gates, raw = _forward(keep, *operands)
            counts["lstm", "forward"] += 1
            last_h, last_c = y[-1].clone(), cells[-1].t().contiguous()
        if keep:
            x, h0, c0, w_ih, w_hh, _, _, w_hr = operands
            ctx.save_for_backward(x, h0, c0, w_ih, w_hh, w_hr, y, cells, gates, raw)
            ctx.counts = counts
        return y, last_h, last_c

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dh: Tensor, dc: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("the emulated LSTM has no second derivative (create_graph=True)")
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            ctx.counts["lstm", "backward"] += 1
            needed = ctx.needs_input_grad[2:]
            return None, None, *_backward(needed, ctx.saved_tensors, dy, dh, dc)


def _transposed(t: Tensor) -> Tensor:
    """(..., B, F) in 16 bits to contiguous float32 (..., F, B)."""
    t = t.transpose(-1, -2)
    return torch.empty(t.shape, dtype=F32).copy_(t)


def _columns(t: Tensor) -> Tensor:
    """(T, F, B) to contiguous float32 (F, T * B), the operand of a product over all time steps."""
    t = t.transpose(0, 1)
    return torch.empty(t.shape, dtype=F32).copy_(t).flatten(1)


def _forward(
    keep: bool,
    x: Tensor,
    h0: Tensor,
    c0: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
    w_hr: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """y (T, B, P), cells (T, H, B), gates (T, 4H, B) and, with a projection, raw h (T, H, B)."""
    (steps, batch, _), half = x.shape, x.dtype
    hidden = c0.shape[-1]
    columns = x.reshape(steps * batch, -1).to(F32).t()
    if b_ih is None or b_hh is None:
        inputs = w_ih.to(F32) @ columns
    else:
        inputs = torch.addmm((b_ih.to(F32) + b_hh.to(F32))[:, None], w_ih.to(F32), columns)
    w, r = w_hh.to(F32), None if w_hr is None else w_hr.to(F32)
    h, c = _transposed(h0), _transposed(c0)
    raw_h = h if r is None else torch.empty_like(c)
    tanh_c = torch.empty_like(c)
    gates = torch.empty(steps, 4 * hidden, batch, dtype=F32)
    cells = torch.empty(steps, hidden, batch, dtype=half)
    outputs = torch.empty(steps, *h.shape, dtype=half)
    raw = None if w_hr is None else torch.empty(steps, hidden, batch, dtype=half)
    by_gate = gates.view(steps, 4, hidden, batch)
    by_step = (gates[:, : 2 * hidden], by_gate[:, 2], by_gate[:, 3], gates, cells, outputs)
    steps_of = zip(inputs.split(batch, 1), *(part.unbind() for part in by_step), strict=True)
    for t, (step_inputs, i_f, g, o, total, cell, output) in enumerate(steps_of):
        torch.addmm(step_inputs, w, h, out=total)
        i, f = i_f.sigmoid_().chunk(2)
        g.tanh_()
        o.sigmoid_()
        cell.copy_(c.mul_(f).addcmul_(i, g))
        c.copy_(cell)
        torch.mul(o, torch.tanh(c, out=tanh_c), out=raw_h)
        if r is not None and raw is not None:
            raw_h.copy_(raw[t].copy_(raw_h))
            torch.mm(r, raw_h, out=h)
        h.copy_(output.copy_(h))
    y = outputs.transpose(1, 2).contiguous()
    return y, cells, gates.to(half) if keep else None, raw


def _backward(
    needed: Sequence[bool], saved: Sequence[Any], dy: Tensor, dh_n: Tensor, dc_n: Tensor
) -> tuple[Tensor | None, ...]:
    """Gradients of x, h0, c0, w_ih, w_hh, b_ih, b_hh, w_hr; None where not needed."""
    x, h0, c0, w_ih, w_hh, w_hr, y, cells, gates, raw = saved
    (steps, batch, _), half = x.shape, x.dtype
    w_t = _transposed(w_hh)
    d_gates, d_first, dc, projected = _through_time(
        w_t, w_hr, _factors(gates, cells, c0), dy, dh_n, dc_n
    )
    dg = _columns(d_gates)
    grads: list[Tensor | None] = [None] * 8
    if needed[0]:
        grads[0] = (dg.t() @ w_ih.to(F32)).to(half).view_as(x)
    if needed[1]:
        grads[1] = (w_t @ d_first).to(half).t()
    if needed[2]:
        grads[2] = dc.to(half).t()
    if needed[3]:
        grads[3] = (dg @ x.reshape(steps * batch, -1).to(F32)).to(half)
    if needed[4]:
        before = torch.empty_like(y, dtype=F32)
        before[0], before[1:] = h0, y[:-1]
        grads[4] = (dg @ before.view(steps * batch, -1)).to(half)
    if needed[5] or needed[6]:
        grads[5] = grads[6] = dg.sum(1).to(half)
    if needed[7]:
        grads[7] = (_columns(projected) @ _columns(raw).t()).to(half)
    return tuple(grads)


def _through_time(
    w_t: Tensor,
    w_hr: Tensor | None,
    factors: tuple[Tensor, Sequence[Tensor], Sequence[Tensor]],
    dy: Tensor,
    dh_n: Tensor,
    dc_n: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The recursion from the last time step to the first.

    Args:
        w_t: w_hh transposed, float32.
        factors: as of `_factors`.

    Returns:
        Gradients of the gates at all steps (T, 4H, B), 16-bit, and at the first one, float32; of
        c0 (H, B), float32; of h before its projection at all steps, 16-bit, empty without one.
    """
    of_gates, dc_factor, forget = factors
    steps, _, hidden, batch = of_gates.shape
    half = dy.dtype
    dys = _transposed(dy)
    dys[-1] += _transposed(dh_n)
    r_t = None if w_hr is None else _transposed(w_hr)
    dc = _transposed(dc_n)
    d = torch.empty_like(dc)
    d_gates = torch.empty(4, hidden, batch, dtype=F32)
    d_ifg, d_o, d_flat = d_gates[:3], d_gates[3], d_gates.view(4 * hidden, batch)
    half_d, half_dc = torch.empty_like(d, dtype=half), torch.empty_like(dc, dtype=half)
    all_gates = torch.empty(steps, 4 * hidden, batch, dtype=half)
    projected = torch.empty(dys.shape if r_t is not None else 0, dtype=half)
    dhs, ifgs, os = dys.unbind(), of_gates[:, :3].unbind(), of_gates[:, 3].unbind()
    for t in range(steps - 1, -1, -1):
        dh = dhs[t] if t == steps - 1 else torch.addmm(dhs[t], w_t, d_flat, out=dhs[t])
        if r_t is not None:
            dh.copy_(projected[t].copy_(dh))
            dh = torch.mm(r_t, dh, out=d)
        d.copy_(half_d.copy_(dh))
        dc.copy_(half_dc.copy_(dc.addcmul_(d, dc_factor[t])))
        torch.mul(ifgs[t], dc, out=d_ifg)
        torch.mul(os[t], d, out=d_o)
        d_flat.copy_(all_gates[t].copy_(d_flat))
        dc.mul_(forget[t])
    return all_gates, d_flat, dc, projected


def _factors(
    gates: Tensor, cells: Tensor, c0: Tensor
) -> tuple[Tensor, Sequence[Tensor], Sequence[Tensor]]:
    """Factors of dc (for i, f, g) and dh (for o), (T, 4, H, B); then dc/dh and f, by step (H, B).

    They do not depend on the recursion, so they are computed for all time steps at once.
    """
    steps, hidden, batch = cells.shape
    tanh_c = cells.to(F32)
    previous = torch.empty_like(tanh_c)
    previous[0], previous[1:] = c0.t(), tanh_c[:-1]
    tanh_c.tanh_()
    i, f, g, o = gates.to(F32).view(steps, 4, hidden, batch).unbind(1)
    factors = torch.empty(steps, 4, hidden, batch, dtype=F32)
    aten.sigmoid_backward(g, i, grad_input=factors[:, 0])
    aten.sigmoid_backward(previous, f, grad_input=factors[:, 1])
    aten.tanh_backward(i, g, grad_input=factors[:, 2])
    aten.sigmoid_backward(tanh_c, o, grad_input=factors[:, 3])
    return factors, aten.tanh_backward(o, tanh_c, grad_input=tanh_c).unbind(), f.unbind()
