"""Tensor Core arithmetic on a CPU: real float16 tensors, float32 sums inside products, one rounding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from mprun.precision.emulated_lstm import lstm

F32 = torch.float32
PRODUCTS = (
    "mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "linear",
    "convolution", "convolution_backward", "embedding_dense_backward",
)
RECURRENT = frozenset(
    (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu,
     torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell)
)

def _cast(x, src, dst):
    if isinstance(x, Tensor):
        return x.to(dst) if x.dtype is src else x
    return type(x)(_cast(y, src, dst) for y in x) if isinstance(x, (tuple, list)) else x

ROUTES = {}
for n in PRODUCTS:
    p = getattr(torch.ops.aten, n)
    for o in p.overloads():
        ROUTES[getattr(p, o)] = n


class _Recurrent(TorchFunctionMode):
    def __init__(self, dtype, counts):
        super().__init__(); self.dtype=dtype; self.counts=counts
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func not in RECURRENT:
            return func(*args, **(kwargs or {}))
        half=self.dtype
        if torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is half:
            args = _cast(args, F32, half)
        if args[0].dtype is not half:
            return func(*args, **(kwargs or {}))
        with torch.autocast("cpu", enabled=False):
            if func is torch.lstm and not isinstance(args[1], Tensor) and not args[7]:
                return lstm(*args[:7], args[8], self.counts)
            return func(*args, **(kwargs or {}))


class HalfEmulation(TorchDispatchMode):
    def __init__(self, dtype=torch.float16):
        super().__init__()
        self.dtype = dtype
        self.rerouted = Counter()
        self._rnn = _Recurrent(dtype, self.rerouted)
    def __enter__(self):
        self._rnn.__enter__()
        return super().__enter__()
    def __exit__(self, *exc):
        super().__exit__(*exc)
        self._rnn.__exit__(*exc)
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = ROUTES.get(func)
        half = self.dtype
        if name is None or not any(isinstance(a, Tensor) and a.dtype is half for a in args):
            return func(*args, **(kwargs or {}))
        self.rerouted[name, "forward" if torch._C._current_graph_task_id() == -1 else "backward"] += 1
        return _cast(func(*_cast(args, half, F32), **(kwargs or {})), F32, half)
