"""Recurrent layers on a CPU, emulated in 16 bits: LSTM, GRU and plain RNN.

The decomposed native layer adds the weight gradient of T time steps in the 16-bit format. Here each
weight gradient is one float32 matrix product over all time steps, rounded once (paper section 3.3).
Rounded at every step is what a layer keeps: h (before and after a projection), an LSTM's c, and in
backward their gradients and those of the gates. The gates themselves stay float32 in forward,
16-bit copies are kept for backward. What cuDNN rounds inside is not published. Dropout between
layers draws other random numbers than the native layer.

Inside, tensors are transposed to (features, batch), where the CPU's matrix product is fastest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from mprun.precision.recurrent import RecurrentCall

aten = torch.ops.aten
F32 = torch.float32


def emulated_recurrent(
    function: Any, call: RecurrentCall, counts: Counter[tuple[str, str]]
) -> tuple[Tensor, ...]:
    """What `function` (torch.lstm, torch.gru, torch.rnn_tanh or torch.rnn_relu) computes of 16-bit
    tensors.

    Args:
        call: not of a packed sequence, T > 0; all its tensors share one 16-bit dtype.
        counts: get one (kind, "forward") and one (kind, "backward") per layer and direction; kind:
            "lstm", "gru" or "rnn".

    Returns:
        y, h_n and, of an LSTM, c_n in that dtype. A second derivative raises RuntimeError.
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
            operands = [inputs, *(state[n] for state in states), w_ih, w_hh, *biases]
            if kind.name == "lstm":
                operands.append(others[-1] if len(others) in (1, 3) else None)
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


class _Kind(NamedTuple):
    """forward(keep, *operands): (y, h_n, ...) and what backward needs of them.

    backward(needed, kept, dy, dh_n, ...): gradients of the operands, None where not needed.
    """

    name: str
    forward: Callable[..., tuple[tuple[Tensor, ...], Sequence[Tensor | None]]]
    backward: Callable[..., tuple[Tensor | None, ...]]


class _EmulatedLayer(torch.autograd.Function):
    """One layer in one direction."""

    @staticmethod
    def forward(
        ctx: Any, kind: _Kind, keep: bool, counts: Counter[tuple[str, str]], *operands: Any
    ) -> tuple[Tensor, ...]:
        # Without this each of the 12 operations a time step would pass through both modes.
        with torch._C.DisableTorchFunction(), _disable_current_modes():
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
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            ctx.counts[name, "backward"] += 1
            needed = ctx.needs_input_grad[3:]
            return None, None, None, *ctx.kind.backward(needed, saved, *gradients)


def _transposed(t: Tensor) -> Tensor:
    """(..., B, F) in 16 bits to contiguous float32 (..., F, B)."""
    t = t.transpose(-1, -2)
    return torch.empty(t.shape, dtype=F32).copy_(t)


def _columns(t: Tensor) -> Tensor:
    """(T, F, B) to contiguous float32 (F, T * B), the operand of a product over all time steps."""
    t = t.transpose(0, 1)
    return torch.empty(t.shape, dtype=F32).copy_(t).flatten(1)


def _lstm_forward(
    keep: bool,
    x: Tensor,
    h0: Tensor,
    c0: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
    w_hr: Tensor | None,
) -> tuple[tuple[Tensor, ...], Sequence[Tensor | None]]:
    """y (T, B, P), h_n, c_n, and what backward needs: among it the cells (T, H, B), gates
    (T, 4H, B) and, with a projection, raw h (T, H, B)."""
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
    last = y[-1].clone(), cells[-1].t().contiguous()
    kept = x, h0, c0, w_ih, w_hh, w_hr, y, cells, gates.to(half) if keep else None, raw
    return (y, *last), kept


def _lstm_backward(
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


def _gru_forward(
    keep: bool, x: Tensor, h0: Tensor, w_ih: Tensor, w_hh: Tensor, *biases: Tensor | None
) -> tuple[tuple[Tensor, ...], Sequence[Tensor | None]]:
    """y (T, B, H), h_n; kept beside operands and y: gates (T, 4H, B), which are reset r, update z,
    new n and what r multiplies in it."""
    (steps, batch, _), hidden = x.shape, h0.shape[-1]
    inputs = _input_product(x, w_ih, biases[0])
    w, bias, h = w_hh.to(F32), _column(biases[1]), _transposed(h0)
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


def _gru_backward(
    needed: Sequence[bool], kept: Sequence[Any], dy: Tensor, dh_n: Tensor
) -> tuple[Tensor | None, ...]:
    """Gradients of x, h0, w_ih, w_hh, b_ih, b_hh."""
    x, h0, w_ih, w_hh, y, gates = kept
    steps, batch, hidden = y.shape
    r, z, n, of_n = gates.to(F32).view(steps, 4, hidden, batch).unbind(1)
    before = torch.cat([_transposed(h0)[None], _transposed(y[:-1])])
    to_n = (1 - z) * (1 - n * n)
    to_z = (before - n) * z * (1 - z)
    to_r = of_n * r * (1 - r)
    w_t, half = _transposed(w_hh), y.dtype
    dh, dys = _transposed(dh_n), _transposed(dy)
    # Of the gates' inputs, and of the recurrent product, whose third part r multiplies.
    d_inputs = torch.empty(steps, 3 * hidden, batch, dtype=half)
    d_recurrent = torch.empty_like(d_inputs)
    for t in range(steps - 1, -1, -1):
        dh = (dh + dys[t]).to(half).to(F32)
        d_n = dh * to_n[t]
        d_r_z = torch.cat([d_n * to_r[t], dh * to_z[t]])
        torch.cat([d_r_z, d_n], out=d_inputs[t])
        torch.cat([d_r_z, d_n * r[t]], out=d_recurrent[t])
        dh = torch.addmm(dh * z[t], w_t, d_recurrent[t].to(F32))
    return _gradients(needed, x, h0, w_ih, y, d_inputs, d_recurrent, dh)


def _rnn(slope: Callable[[Tensor], Tensor], activation: Callable[[Tensor], Tensor]) -> _Kind:
    """The plain layer h = activation(...); slope: the activation's derivative, of its result."""

    def forward(
        keep: bool, x: Tensor, h0: Tensor, w_ih: Tensor, w_hh: Tensor, *biases: Tensor | None
    ) -> tuple[tuple[Tensor, ...], Sequence[Tensor | None]]:
        steps, batch, _ = x.shape
        inputs = _input_product(x, w_ih, biases[0])
        w, bias, h = w_hh.to(F32), _column(biases[1]), _transposed(h0)
        outputs = torch.empty(steps, h0.shape[-1], batch, dtype=x.dtype)
        for row, output in zip(inputs.split(batch, 1), outputs, strict=True):
            total = torch.addmm(row if bias is None else row + bias, w, h)
            h.copy_(output.copy_(activation(total)))
        y = outputs.transpose(1, 2).contiguous()
        return (y, y[-1].clone()), (x, h0, w_ih, w_hh, y)

    def backward(
        needed: Sequence[bool], kept: Sequence[Any], dy: Tensor, dh_n: Tensor
    ) -> tuple[Tensor | None, ...]:
        x, h0, w_ih, w_hh, y = kept
        slopes, dys, dh = slope(_transposed(y)), _transposed(dy), _transposed(dh_n)
        w_t, half = _transposed(w_hh), y.dtype
        d_inputs = torch.empty(slopes.shape, dtype=half)
        for t in range(len(y) - 1, -1, -1):
            dh = (dh + dys[t]).to(half).to(F32)
            dh = w_t @ d_inputs[t].copy_(dh * slopes[t]).to(F32)
        return _gradients(needed, x, h0, w_ih, y, d_inputs, d_inputs, dh)

    return _Kind("rnn", forward, backward)


def _input_product(x: Tensor, w_ih: Tensor, bias: Tensor | None) -> Tensor:
    """Of all time steps at once, (G H, T * B) in float32."""
    columns, w = x.reshape(-1, x.shape[-1]).to(F32).t(), w_ih.to(F32)
    return w @ columns if bias is None else torch.addmm(bias.to(F32)[:, None], w, columns)


def _column(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.to(F32)[:, None]


def _gradients(
    needed: Sequence[bool],
    x: Tensor,
    h0: Tensor,
    w_ih: Tensor,
    y: Tensor,
    d_inputs: Tensor,
    d_recurrent: Tensor,
    dh: Tensor,
) -> tuple[Tensor | None, ...]:
    """Of x, h0, w_ih, w_hh, b_ih, b_hh, from those of the gates (T, G H, B) and of h0 (H, B)."""
    half, rows = y.dtype, x.reshape(-1, x.shape[-1])
    di, dr = _columns(d_inputs), _columns(d_recurrent)
    grads: list[Tensor | None] = [None] * 6
    if needed[0]:
        grads[0] = (di.t() @ w_ih.to(F32)).to(half).view_as(x)
    if needed[1]:
        grads[1] = dh.to(half).t()
    if needed[2]:
        grads[2] = (di @ rows.to(F32)).to(half)
    if needed[3]:
        before = torch.cat([h0[None], y[:-1]]).flatten(0, 1)
        grads[3] = (dr @ before.to(F32)).to(half)
    if needed[4]:
        grads[4] = di.sum(1).to(half)
    if needed[5]:
        grads[5] = dr.sum(1).to(half)
    return tuple(grads)


_KINDS: dict[Any, _Kind] = {
    torch.lstm: _Kind("lstm", _lstm_forward, _lstm_backward),
    torch.gru: _Kind("gru", _gru_forward, _gru_backward),
    torch.rnn_tanh: _rnn(lambda y: 1 - y * y, torch.tanh),
    torch.rnn_relu: _rnn(lambda y: (y > 0).to(F32), torch.relu),
}
