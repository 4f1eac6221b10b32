"""Recurrent layers on a CPU, emulated in 16 bits: LSTM, GRU and plain RNN.

The decomposed native layer adds the weight gradient of T time steps in the 16-bit format. Here each
weight gradient is one float32 matrix product over all time steps, rounded once (paper section 3.3).
Rounded at every step are a layer's states: h (before and after a projection), an LSTM's c, and in
backward their gradients and the gates' gradients. In forward the gates stay float32; backward gets
16-bit copies. cuDNN's inner roundings are not published. Dropout between layers draws other random
numbers than the native layer.

Inside, tensors are transposed to (features, batch), where the CPU's matrix product is fastest.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mprun.precision.recurrent import RecurrentCall
from mprun.torch_private import (
    DisableTorchDispatch,
    DisableTorchFunction,
    disable_dispatch_modes,
)

aten = torch.ops.aten
F32 = torch.float32


def emulated_recurrent(
    function: Any, call: RecurrentCall, counts: Counter[tuple[str, str]]
) -> tuple[Tensor, ...]:
    """Compute `function` (torch.lstm, torch.gru, torch.rnn_tanh or torch.rnn_relu) in 16 bits.

    Args:
        call: no packed sequence, T > 0; all its tensors share one 16-bit dtype.
        counts: gets one (kind, "forward") and one (kind, "backward") per layer and direction; kind:
            "lstm", "gru" or "rnn".

    Returns:
        y, h_n and, for an LSTM, c_n in that dtype. A second derivative raises RuntimeError.
    """
    kind = _KINDS[function]
    x = call.inputs.transpose(0, 1) if call.batch_first else call.inputs
    states = call.hidden if kind.name == "lstm" else [call.hidden]
    directions = 2 if call.bidirectional else 1
    per_layer = len(call.weights) // (call.layers * directions)
    lasts: list[list[Tensor]] = [[] for _ in states]
    for layer in range(call.layers):
        ys = []
        for direction in range(directions):
            n = layer * directions + direction
            w_ih, w_hh, *others = call.weights[n * per_layer : (n + 1) * per_layer]
            biases = others[:2] if call.bias else (None, None)
            inputs = x.flip(0) if direction else x
            operands = [inputs, states[0][n], w_ih, w_hh, *biases]
            if kind.name == "lstm":
                operands += [states[1][n], others[-1] if len(others) in (1, 3) else None]
            tracked = any(t is not None and t.requires_grad for t in operands)
            keep = tracked and torch.is_grad_enabled()
            y, *own = _EmulatedLayer.apply(kind, keep, counts, *operands)
            ys.append(y.flip(0) if direction else y)
            for last, state in zip(lasts, own, strict=True):
                last.append(state)
        x = torch.cat(ys, -1) if call.bidirectional else ys[0]
        if call.drops and layer < call.layers - 1:
            x = torch.dropout(x, call.dropout, True)
    return x.transpose(0, 1) if call.batch_first else x, *map(torch.stack, lasts)


Results = tuple[tuple[Tensor, ...], Sequence[Tensor | None]]


class _Kind(NamedTuple):
    """The differences between the layers.

    Operands: x, h0, w_ih, w_hh, b_ih, b_hh; an LSTM adds c0, w_hr. Biases and w_hr may be None.

    forward(keep, *operands): (y, h_n, ...), and backward's inputs: x, h0, w_ih, w_hh, y, others.
    backward(kept, dy, dh_n, ...): gradients of the gates' inputs and of the recurrent product (T,
        G H, B), and of h0 (H, B); then those of the operands that only an LSTM has.
    """

    name: str
    forward: Callable[..., Results]
    backward: Callable[..., Sequence[Any]]


class _EmulatedLayer(torch.autograd.Function):
    """One layer in one direction."""

    @staticmethod
    def forward(
        ctx: Any, kind: _Kind, keep: bool, counts: Counter[tuple[str, str]], *operands: Any
    ) -> tuple[Tensor, ...]:
        # Without this each of the 12 operations a time step would pass through both modes.
        with DisableTorchFunction(), _below_modes(operands):
            results, kept = kind.forward(keep, *operands)
            counts[kind.name, "forward"] += 1
        if keep:
            ctx.save_for_backward(*kept)
            ctx.kind, ctx.counts = kind, counts
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        name = ctx.kind.name
        if torch.is_grad_enabled():
            raise RuntimeError(f"the emulated {name} has no second derivative (create_graph=True)")
        saved = ctx.saved_tensors  # which a checkpoint computes again, in all modes
        with DisableTorchFunction(), _below_modes((*saved, *gradients)):
            ctx.counts[name, "backward"] += 1
            d_inputs, d_recurrent, dh, *others = ctx.kind.backward(saved, *gradients)
            found = _gradients(ctx.needs_input_grad[3:], saved, d_inputs, d_recurrent, dh)
            return None, None, None, *found, *others


def _below_modes(operands: Iterable[Any]) -> AbstractContextManager[Any]:
    """Return a context without dispatch modes: of plain tensors without their classes' dispatch
    either, which takes 1 microsecond instead of 10."""
    plain = all(type(own) is Tensor for own in operands if isinstance(own, Tensor))
    return DisableTorchDispatch() if plain else disable_dispatch_modes()


def _transposed(t: Tensor) -> Tensor:
    """Return (..., B, F) in 16 bits as contiguous float32 (..., F, B)."""
    t = t.transpose(-1, -2)
    return torch.empty(t.shape, dtype=F32).copy_(t)


def _columns(t: Tensor) -> Tensor:
    """Return (T, F, B) as contiguous float32 (F, T * B), to multiply over all time steps."""
    t = t.transpose(0, 1)
    return torch.empty(t.shape, dtype=F32).copy_(t).flatten(1)


def _lstm_forward(keep: bool, *operands: Any) -> Results:
    """Return y (T, B, P), h_n, c_n; keep also c0, w_hr, cells (T, H, B), gates (T, 4H, B) and, with
    a projection, raw h (T, H, B)."""
    x, h0, w_ih, w_hh, b_ih, b_hh, c0, w_hr = operands
    (steps, batch, _), half = x.shape, x.dtype
    hidden = c0.shape[-1]
    bias = None if b_ih is None else b_ih.to(F32) + b_hh.to(F32)
    inputs = _input_product(x, w_ih, bias)
    w, r = w_hh.to(F32), None if w_hr is None else w_hr.to(F32)
    h, c = _transposed(h0), _transposed(c0)
    raw_h = h if r is None else torch.empty_like(c)
    tanh_c = torch.empty_like(c)
    gates = torch.empty(steps, 4 * hidden, batch, dtype=F32)
    cells = torch.empty(steps, hidden, batch, dtype=half)
    outputs = torch.empty(steps, *h.shape, dtype=half)
    raw: Any = None if w_hr is None else torch.empty_like(cells)
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
        if r is not None:
            raw_h.copy_(raw[t].copy_(raw_h))
            torch.mm(r, raw_h, out=h)
        h.copy_(output.copy_(h))
    y = outputs.transpose(1, 2).contiguous()
    kept = x, h0, w_ih, w_hh, y, c0, w_hr, cells, gates.to(half) if keep else None, raw
    return (y, y[-1].clone(), cells[-1].t().contiguous()), kept


def _lstm_backward(kept: Sequence[Any], dy: Tensor, dh_n: Tensor, dc_n: Tensor) -> Sequence[Any]:
    *_, w_hh, y, c0, w_hr, cells, gates, raw = kept
    (steps, hidden, batch), half = cells.shape, y.dtype
    of_gates, dc_factor, forget = _factors(gates, cells, c0)
    w_t, dys, dc = _transposed(w_hh), _transposed(dy), _transposed(dc_n)
    dys[-1] += _transposed(dh_n)
    r_t = None if w_hr is None else _transposed(w_hr)
    d = torch.empty_like(dc)
    # One time step in float32; all time steps rounded.
    d_gates = torch.empty(4, hidden, batch, dtype=F32)
    d_ifg, d_o, d_flat = d_gates[:3], d_gates[3], d_gates.view(4 * hidden, batch)
    half_d, half_dc = torch.empty_like(d, dtype=half), torch.empty_like(dc, dtype=half)
    d_inputs = torch.empty(steps, 4 * hidden, batch, dtype=half)
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
        d_flat.copy_(d_inputs[t].copy_(d_flat))
        dc.mul_(forget[t])
    d_w_hr = None if raw is None else (_columns(projected) @ _columns(raw).t()).to(half)
    return d_inputs, d_inputs, w_t @ d_flat, dc.to(half).t(), d_w_hr


def _factors(gates: Tensor, cells: Tensor, c0: Tensor) -> Sequence[Any]:
    """Return the factors of dc (for i, f, g) and dh (for o), (T, 4, H, B), and dc/dh, f by step.

    They do not depend on the recursion, so they are computed for all time steps at once.
    """
    steps, hidden, batch = cells.shape
    tanh_c = cells.to(F32)
    previous = torch.cat([_transposed(c0)[None], tanh_c[:-1]])
    tanh_c.tanh_()
    i, f, g, o = gates.to(F32).view(steps, 4, hidden, batch).unbind(1)
    factors = torch.empty(steps, 4, hidden, batch, dtype=F32)
    aten.sigmoid_backward(g, i, grad_input=factors[:, 0])
    aten.sigmoid_backward(previous, f, grad_input=factors[:, 1])
    aten.tanh_backward(i, g, grad_input=factors[:, 2])
    aten.sigmoid_backward(tanh_c, o, grad_input=factors[:, 3])
    return factors, aten.tanh_backward(o, tanh_c, grad_input=tanh_c).unbind(), f.unbind()


def _gru_forward(keep: bool, *operands: Any) -> Results:
    """Return y (T, B, H), h_n; keep also the gates (T, 4H, B): reset r, update z, new n, and the
    part of n that r multiplies."""
    x, h0, w_ih, w_hh, b_ih, b_hh = operands
    (steps, batch, _), hidden = x.shape, h0.shape[-1]
    inputs = _input_product(x, w_ih, b_ih)
    w, bias, h = w_hh.to(F32), _column(b_hh), _transposed(h0)
    gates = torch.empty(steps, 4 * hidden, batch, dtype=F32)
    outputs = torch.empty(steps, hidden, batch, dtype=x.dtype)
    for row, kept, output in zip(inputs.split(batch, 1), gates, outputs, strict=True):
        recurrent = w @ h if bias is None else torch.addmm(bias, w, h)
        r_z, n, of_n = kept.split([2 * hidden, hidden, hidden])
        torch.add(row[: 2 * hidden], recurrent[: 2 * hidden], out=r_z).sigmoid_()
        r, z = r_z.chunk(2)
        of_n.copy_(recurrent[2 * hidden :])
        torch.addcmul(row[2 * hidden :], r, of_n, out=n).tanh_()
        h.copy_(output.copy_(torch.lerp(n, h, z)))
    y = outputs.transpose(1, 2).contiguous()
    return (y, y[-1].clone()), (x, h0, w_ih, w_hh, y, gates.to(x.dtype) if keep else None)


def _gru_backward(kept: Sequence[Any], dy: Tensor, dh_n: Tensor) -> Sequence[Any]:
    _, h0, _, w_hh, y, gates = kept
    steps, batch, hidden = y.shape
    r, z, n, of_n = gates.to(F32).view(steps, 4, hidden, batch).unbind(1)
    before = torch.cat([_transposed(h0)[None], _transposed(y[:-1])])
    to_n = (1 - z) * (1 - n * n)
    to_z = (before - n) * z * (1 - z)
    to_r = of_n * r * (1 - r)
    w_t, half = _transposed(w_hh), y.dtype
    dh, dys = _transposed(dh_n), _transposed(dy)
    # Gradients of the gates' inputs, and of the recurrent product, whose third part r multiplies.
    d_inputs = torch.empty(steps, 3 * hidden, batch, dtype=half)
    d_recurrent = torch.empty_like(d_inputs)
    for t in range(steps - 1, -1, -1):
        dh = (dh + dys[t]).to(half).to(F32)
        d_n = dh * to_n[t]
        d_r_z = torch.cat([d_n * to_r[t], dh * to_z[t]])
        torch.cat([d_r_z, d_n], out=d_inputs[t])
        torch.cat([d_r_z, d_n * r[t]], out=d_recurrent[t])
        dh = torch.addmm(dh * z[t], w_t, d_recurrent[t].to(F32))
    return d_inputs, d_recurrent, dh


def _rnn(slope: Callable[[Tensor], Tensor], activation: Callable[[Tensor], Tensor]) -> _Kind:
    """Build the plain layer h = activation(...); slope: the derivative as a function of h."""

    def forward(keep: bool, *operands: Any) -> Results:
        x, h0, w_ih, w_hh, b_ih, b_hh = operands
        inputs = _input_product(x, w_ih, b_ih)
        w, bias, h = w_hh.to(F32), _column(b_hh), _transposed(h0)
        outputs = torch.empty(len(x), *h.shape, dtype=x.dtype)
        for row, output in zip(inputs.split(h.shape[1], 1), outputs, strict=True):
            total = torch.addmm(row if bias is None else row + bias, w, h)
            h.copy_(output.copy_(activation(total)))
        y = outputs.transpose(1, 2).contiguous()
        return (y, y[-1].clone()), (x, h0, w_ih, w_hh, y)

    def backward(kept: Sequence[Any], dy: Tensor, dh_n: Tensor) -> Sequence[Any]:
        *_, w_hh, y = kept
        slopes, dys, dh = slope(_transposed(y)), _transposed(dy), _transposed(dh_n)
        w_t, half = _transposed(w_hh), y.dtype
        d_inputs = torch.empty(slopes.shape, dtype=half)
        for t in range(len(y) - 1, -1, -1):
            dh = (dh + dys[t]).to(half).to(F32)
            dh = w_t @ d_inputs[t].copy_(dh * slopes[t]).to(F32)
        return d_inputs, d_inputs, dh

    return _Kind("rnn", forward, backward)


def _input_product(x: Tensor, w_ih: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply all time steps at once: (G H, T * B) in float32."""
    columns, w, column = x.reshape(-1, x.shape[-1]).to(F32).t(), w_ih.to(F32), _column(bias)
    return w @ columns if column is None else torch.addmm(column, w, columns)


def _column(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.to(F32)[:, None]


def _gradients(
    needed: Sequence[bool], kept: Sequence[Any], d_inputs: Tensor, d_recurrent: Tensor, dh: Tensor
) -> tuple[Tensor | None, ...]:
    """Return the first six operands' gradients, from those of gates (T, G H, B) and h0 (H, B)."""
    x, h0, w_ih, _, y, *_ = kept
    half, rows = y.dtype, x.reshape(-1, x.shape[-1])
    di = _columns(d_inputs)
    dr = di if d_recurrent is d_inputs else _columns(d_recurrent)
    grads: list[Tensor | None] = [None] * 6
    if needed[0]:
        grads[0] = (di.t() @ w_ih.to(F32)).to(half).view_as(x)
    grads[1] = dh.to(half).t()
    if needed[2]:
        grads[2] = (di @ rows.to(F32)).to(half)
    if needed[3]:
        before = torch.cat([h0[None], y[:-1]]).flatten(0, 1)
        grads[3] = (dr @ before.to(F32)).to(half)
    if needed[4] or needed[5]:
        grads[4] = di.sum(1).to(half)
        grads[5] = grads[4] if dr is di else dr.sum(1).to(half)
    return tuple(grads)


_KINDS: dict[Any, _Kind] = {
    torch.lstm: _Kind("lstm", _lstm_forward, _lstm_backward),
    torch.gru: _Kind("gru", _gru_forward, _gru_backward),
    torch.rnn_tanh: _rnn(lambda y: 1 - y * y, torch.tanh),
    torch.rnn_relu: _rnn(lambda y: (y > 0).to(F32), torch.relu),
}
