"""CUDA's choice of operations in torch's CPU build, on tensors without values.

A step is counted on fake CPU tensors: fake CUDA tensors have no backward pass without a driver
(the engine asks for the device), and meta tensors no autocast. This module corrects the differences
between CPU and CUDA, for the whole process while a count runs: the op lists of autocast, dropout as
one kernel that keeps a byte per number, and nn.LSTM, nn.GRU and nn.RNN as cuDNN computes them, one
call per layer stack, with costs per layer and direction. T is the number of time steps, B the
batch, D the input size, H the hidden size, R the recurrent width (the projection, or H without
one), G the number of gates (LSTM 4, GRU 3, RNN 1) and s the bytes per number:

forward
    one product over all time steps    2 T B D G H FLOP, s (T B D + D G H + T B G H) bytes
    T times a recurrent product        2 B R G H FLOP, s (B R + R G H + B G H) bytes
    T times the gates                  s (2 B G H + 3 B H) bytes: gates read, and stored;
                                       cell state read and written, output written
    T times a projection, if any       2 B H R FLOP, s (B H + H R + B R) bytes
backward: each product twice, for its input (time step by time step, weights read again) and for its
    weights (over all time steps at once).

So recurrent weights are read from memory in every time step: Appleyard et al., "Optimizing
Performance of Recurrent Neural Networks on GPUs", arXiv 1604.01946, sections 3.1 (the products over
all time steps) and 3.2. Persistent kernels, which keep the weights of small layers on the chip for
the whole sequence, can be faster than this.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from mprun.extensions.bench.roofline.operations import Write
from mprun.precision.autocast import half_to_float
from mprun.torch_private import replacing_kernels, scoped_library

GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}  # matrix products of a time step


@contextmanager
def cuda_kernels(write: Write) -> Iterator[None]:
    """Run on CPU tensors what CUDA would run, in every thread; recurrent layers `write` rows."""
    with half_to_float(), scoped_library("aten", "IMPL") as library:
        with replacing_kernels():
            library.impl("dropout", _dropout, "AutogradCPU")
            for name in GATES:
                library.impl(f"{name}.input", recurrent_kernel(name, write), "AutogradCPU")
        yield


def _dropout(inputs: Tensor, p: float, train: bool) -> Tensor:
    if not train or p == 0:
        return inputs
    return torch.ops.aten.native_dropout(inputs, p, True)[0]


class Layer(NamedTuple):
    """One layer and direction, with the sizes T, B, D, H, R and G of above."""

    steps: int
    batch: int
    inputs: int
    hidden: int
    recurrent: int
    gates: int

    @property
    def kept(self) -> int:
        """Return how many numbers are kept for the backward pass: gates, cells, outputs."""
        t, b, _, h, r, g = self
        return t * b * (g * h + (h if g == 4 else 0) + (h if r != h else 0))

    def forward(self, write: Write, dtype: torch.dtype) -> None:
        t, b, d, h, r, g = self
        gh = g * h
        _product(write, "recurrent input product", dtype, t * b, d, gh)
        _product(write, "recurrent product", dtype, b, r, gh, times=t)
        cells = 2 * b * h if g == 4 else 0
        _pass(write, "recurrent gates", dtype, t, 2 * b * gh + cells + b * h)
        if r != h:
            _product(write, "recurrent projection", dtype, b, h, r, times=t)

    def backward(self, write: Write, dtype: torch.dtype, needs_input: bool) -> None:
        t, b, d, h, r, g = self
        gh = g * h
        if r != h:
            _product(write, "recurrent projection backward", dtype, b, r, h, times=t)
            _product(write, "recurrent weight gradient", dtype, r, t * b, h)
        # Reads kept gates and gradients of output and cell; writes gradients of gates and cell.
        cells = 4 * b * h if g == 4 else 0
        _pass(write, "recurrent gates backward", dtype, t, 2 * b * gh + cells + b * h)
        _product(write, "recurrent product backward", dtype, b, gh, r, times=t)
        if needs_input:
            _product(write, "recurrent input product backward", dtype, t * b, gh, d)
        _product(write, "recurrent weight gradient", dtype, gh, t * b, d)
        _product(write, "recurrent weight gradient", dtype, gh, t * b, r)


def recurrent_kernel(name: str, write: Write):
    """Make a stand-in for aten's operator `name` on padded input without values."""

    def kernel(inputs, state, weights, has_biases, layers, dropout, train, both, batch_first):
        states = list(state) if name == "lstm" else [state]
        if torch.is_autocast_enabled("cpu"):
            # Cast all weights on every call, as autocast does for cuDNN.
            dtype = torch.get_autocast_dtype("cpu")
            with torch.autocast("cpu", enabled=False):
                inputs, *states = (t.to(dtype) for t in (inputs, *states))
                weights = [w.to(dtype) for w in weights]
        if batch_first:
            inputs = inputs.transpose(0, 1)
        directions = 2 if both else 1
        (steps, batch), gates = inputs.shape[:2], GATES[name]
        # Flat weights: w_ih, w_hh, maybe more for each layer and direction.
        stack = [
            Layer(steps, batch, w.shape[1], w.shape[0] // gates, states[0].shape[-1], gates)
            for w in weights[:: len(weights) // (layers * directions)]
        ]
        shared = (write, stack, directions, train and torch.is_grad_enabled(), len(states))
        outputs, *states = _Recurrent.apply(shared, inputs, *states, *weights)
        if dropout and train:
            for _ in range(layers - 1):
                _pass(write, "recurrent dropout", inputs.dtype, 1, 2 * outputs.numel())
        if batch_first:
            outputs = outputs.transpose(0, 1)
        return outputs, *states

    return kernel


class _Recurrent(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shared, inputs: Tensor, *rest: Tensor):
        write, stack, directions, keeps, states = ctx.shared = shared
        for layer in stack:
            layer.forward(write, inputs.dtype)
        reserve = inputs.new_empty(sum(layer.kept for layer in stack) if keeps else 0)
        ctx.save_for_backward(inputs, reserve, *rest)
        outputs = inputs.new_empty(*inputs.shape[:2], directions * stack[0].recurrent)
        return outputs, *(torch.empty_like(part) for part in rest[:states])

    @staticmethod
    def backward(ctx, *gradients):
        inputs, _, *rest = ctx.saved_tensors
        write, stack, directions, *_ = ctx.shared
        needs = ctx.needs_input_grad[1:]
        for number, layer in reversed(list(enumerate(stack))):
            # The input of a layer above the first one always needs its gradient.
            layer.backward(write, inputs.dtype, needs[0] or number >= directions)
        pairs = zip((inputs, *rest), needs, strict=True)
        return None, *(torch.empty_like(tensor) if need else None for tensor, need in pairs)


def _product(write: Write, kind: str, dtype, m: int, k: int, n: int, times: int = 1) -> None:
    ends, weight = (m * k + m * n) * dtype.itemsize, k * n * dtype.itemsize
    # A persistent kernel reads the weight once for all times.
    least = times * ends + weight
    write(kind, dtype, times * 2 * m * k * n, times * (ends + weight), times, least)


def _pass(write: Write, kind: str, dtype, times: int, numbers: int) -> None:
    write(kind, dtype, 0, times * numbers * dtype.itemsize, times, None)
