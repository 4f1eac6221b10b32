"""The LSTM in a 16-bit format on a CPU: 16-bit states, float32 sums.

The decomposed native layer adds the weight gradient of T time steps in the 16-bit format; here each
weight gradient is one float32 matrix product over all time steps, rounded once (paper section 3.3).
Inside, tensors are transposed to (features, batch), where the CPU's matrix product is fastest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.utils._python_dispatch import _disable_current_modes

aten = torch.ops.aten
F32 = torch.float32


def lstm(
    x: Tensor,
    hx: Sequence[Tensor],
    weights: Sequence[Tensor],
    bias: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    counts: Counter[tuple[str, str]],
) -> tuple[Tensor, Tensor, Tensor]:
    """``torch.lstm`` on 16-bit tensors: the same arguments and results, plus `counts`.

    x: (T, B, I), or (B, T, I) with `batch_first`, T > 0. hx: h0 (L, B, P or H), c0 (L, B, H) with
    L = layers, twice that if `bidirectional`. weights: per layer and direction w_ih, w_hh, then
    b_ih, b_hh with `bias`, then w_hr with a projection. All tensors share one 16-bit dtype.
    Returns y, h_n, c_n in that dtype. Adds one ("lstm", "forward") and one ("lstm", "backward")
    per layer and direction to `counts`. Dropout between layers draws other random numbers than the
    native layer. A second derivative raises RuntimeError.

    Rounded at every step: h (before and after a projection), c, and in backward their gradients and
    those of the gates. The gates themselves stay float32 in forward, 16-bit copies are kept for
    backward. What cuDNN rounds inside is not published.
    """
    if batch_first:
        x = x.transpose(0, 1)
    directions = 2 if bidirectional else 1
    per_layer = len(weights) // (layers * directions)
    last_h, last_c = [], []
    for layer in range(layers):
        ys = []
        for direction in range(directions):
            n = layer * directions + direction
            w = list(weights[n * per_layer : (n + 1) * per_layer])
            w_hr = w.pop() if per_layer in (3, 5) else None
            w_ih, w_hh, b_ih, b_hh = w if bias else (*w, None, None)
            inputs = x.flip(0) if direction else x
            operands = (inputs, hx[0][n], hx[1][n], w_ih, w_hh, b_ih, b_hh, w_hr)
            tracked = any(t is not None and t.requires_grad for t in operands)
            y, h, c = _Layer.apply(*operands, tracked and torch.is_grad_enabled(), counts)
            ys.append(y.flip(0) if direction else y)
            last_h.append(h)
            last_c.append(c)
        x = torch.cat(ys, -1) if bidirectional else ys[0]
        if dropout and train and layer < layers - 1:
            x = torch.dropout(x, dropout, True)
    y = x.transpose(0, 1) if batch_first else x
    return y, torch.stack(last_h), torch.stack(last_c)


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: Tensor,
        h0: Tensor,
        c0: Tensor,
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Tensor | None,
        b_hh: Tensor | None,
        w_hr: Tensor | None,
        keep: bool,
        counts: Counter[tuple[str, str]],
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Without this each of the 12 operations a time step would pass through both modes.
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            y, cells, gates, raw = _forward(x, h0, c0, w_ih, w_hh, b_ih, b_hh, w_hr, keep)
            counts["lstm", "forward"] += 1
            last_h, last_c = y[-1].clone(), cells[-1].t().contiguous()
        if keep:
            ctx.save_for_backward(x, h0, c0, w_ih, w_hh, w_hr, y, cells, gates, raw)
            ctx.counts = counts
        return y, last_h, last_c

    @staticmethod
    def backward(ctx: FunctionCtx, dy: Tensor, dh: Tensor, dc: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("the emulated LSTM has no second derivative (create_graph=True)")
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            ctx.counts["lstm", "backward"] += 1
            return *_backward(ctx.needs_input_grad, ctx.saved_tensors, dy, dh, dc), None, None


def _transposed(t: Tensor) -> Tensor:
    """(..., B, F) in 16 bits to contiguous float32 (..., F, B)."""
    t = t.transpose(-1, -2)
    return torch.empty(t.shape, dtype=F32).copy_(t)


def _columns(t: Tensor) -> Tensor:
    """(T, F, B) to contiguous float32 (F, T * B), the operand of a product over all time steps."""
    steps, features, batch = t.shape
    out = torch.empty(features, steps, batch, dtype=F32)
    return out.copy_(t.transpose(0, 1)).view(features, steps * batch)


def _forward(
    x: Tensor,
    h0: Tensor,
    c0: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
    w_hr: Tensor | None,
    keep: bool,
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
    raw = None if r is None else torch.empty(steps, hidden, batch, dtype=half)
    by_gate = gates.view(steps, 4, hidden, batch)
    for t, (i_f, g, o, total, step_inputs, cell, output) in enumerate(
        zip(
            gates[:, : 2 * hidden].unbind(),
            by_gate[:, 2].unbind(),
            by_gate[:, 3].unbind(),
            gates.unbind(),
            inputs.split(batch, 1),
            cells.unbind(),
            outputs.unbind(),
            strict=True,
        )
    ):
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
    return y, cells, gates.to(half) if keep else None, raw


def _backward(
    needed: Sequence[bool], saved: Sequence[Tensor], dy: Tensor, dh_n: Tensor, dc_n: Tensor
) -> tuple[Tensor | None, ...]:
    """Gradients of x, h0, c0, w_ih, w_hh, b_ih, b_hh, w_hr; None where not needed."""
    x, h0, c0, w_ih, w_hh, w_hr, y, cells, gates, raw = saved
    (steps, batch, _), half, hidden = x.shape, x.dtype, c0.shape[-1]
    factors, dc_factor, forget = _factors(gates, cells, c0)
    dys = _transposed(dy)
    dys[-1] += _transposed(dh_n)
    w_t, r_t = _transposed(w_hh), None if w_hr is None else _transposed(w_hr)
    dc = _transposed(dc_n)
    d = torch.empty_like(dc)
    d_gates = torch.empty(4, hidden, batch, dtype=F32)
    d_ifg, d_o, d_flat = d_gates[:3], d_gates[3], d_gates.view(4 * hidden, batch)
    half_d, half_dc = torch.empty_like(d, dtype=half), torch.empty_like(dc, dtype=half)
    all_gates = torch.empty(steps, 4 * hidden, batch, dtype=half)
    projected = None if r_t is None else torch.empty(dys.shape, dtype=half)
    dhs, ifgs, os = dys.unbind(), factors[:, :3].unbind(), factors[:, 3].unbind()
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
    dg = _columns(all_gates)
    grads: list[Tensor | None] = [None] * 8
    if needed[0]:
        grads[0] = (dg.t() @ w_ih.to(F32)).to(half).view_as(x)
    if needed[1]:
        grads[1] = (w_t @ d_flat).to(half).t()
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


def _factors(gates: Tensor, cells: Tensor, c0: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
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
