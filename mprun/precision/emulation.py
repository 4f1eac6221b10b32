"""Tensor Core arithmetic on a CPU: real 16-bit tensors, float32 sums in products, one rounding.

Paper section 3.3: products are multiplied in FP16, summed in FP32 and stored in FP16. Native CPU
kernels break that rule, measured with torch 2.15 and AVX-512 BF16 (errors in single roundings):
float16: 8192 ones over the batch give 2048 in convolution weight gradients and embedding gradients,
    and a step takes 10 to 60 times as long as in float32;
bfloat16: 8192 ones give 256 in embedding gradients (17 roundings over 4000 tokens); an LSTM with
    projection is off by 3 to 6 roundings; linear and convolution are right, and faster than here.
Both formats are rerouted alike, so that a result depends neither on the format nor on the CPU.
"""

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
from mprun.precision.emulated_products import MIXED, Scratch, routes

F32 = torch.float32
_RECURRENT = frozenset(
    {
        torch.lstm,
        torch.gru,
        torch.rnn_tanh,
        torch.rnn_relu,
        torch.lstm_cell,
        torch.gru_cell,
        torch.rnn_tanh_cell,
        torch.rnn_relu_cell,
    }
)


class HalfEmulation(TorchDispatchMode):
    """Within it, products of 16-bit CPU tensors are summed in float32 and rounded once.

    dtype: torch.float16 (default) or torch.bfloat16, the format that is emulated; ValueError for
    any other. One object serves a whole run; enter it once per training step, around forward AND
    backward (outside, backward falls back to the native kernels), and around autocast:

        emulation = HalfEmulation()
        with emulation:
            loss = loss_function(model(x))
            (loss * scale).backward()

    Rerouted: matrix products, convolutions, attention and their gradients, embedding gradients,
    each to its float32 kernel; `torch.lstm` to `emulated_lstm.lstm`; GRU, plain RNN, the cells and
    an LSTM over a packed sequence through their matrix products (states rounded each step, but
    weight gradients added up over the time steps in 16 bits). Native: element-wise functions, norm
    layers, pooling, softmax and sums, which use float32 inside; `index_add` and accumulating
    `index_put` (the gradient of `w[i]`), which do not. Tensors on other devices pass untouched.

    rerouted: how often each operation was rerouted, by (name, "forward" or "backward"), over all
    entries; recomputation in `torch.utils.checkpoint` counts as backward. Empty after a float32
    run; a 16-bit run that leaves it empty was not emulated. Other threads do not inherit the mode.
    """

    def __init__(self, dtype: torch.dtype = torch.float16) -> None:
        if dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(f"dtype must be torch.float16 or torch.bfloat16, not {dtype}")
        super().__init__()
        self.dtype = dtype
        self.rerouted: Counter[tuple[str, str]] = Counter()
        self._routes = routes()
        self._scratch = Scratch()
        self._recurrent = _Recurrent(dtype, self.rerouted)

    def __enter__(self) -> HalfEmulation:
        self._recurrent.__enter__()
        return super().__enter__()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        super().__exit__(exc_type, exc, traceback)
        self._recurrent.__exit__(exc_type, exc, traceback)

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        # In backward the function mode below is active too and would add to the cost of each call.
        with torch._C.DisableTorchFunction():
            route = self._routes.get(func)
            if route is None:
                return func(*args, **kwargs)
            name, run = route
            half, found, mixed = self.dtype, False, False
            for a in args:
                if isinstance(a, Tensor):
                    if a.dtype is half and a.is_cpu:
                        found = True
                    elif a.dtype is F32:
                        mixed = True
            if not found or (mixed and name not in MIXED):
                # A product of mixed dtypes is an error, and the native kernel says so.
                return func(*args, **kwargs)
            phase = "forward" if torch._C._current_graph_task_id() == -1 else "backward"
            self.rerouted[name, phase] += 1
            self._scratch.reset()
            return run(self._scratch, half, func, args, kwargs)


class _Recurrent(TorchFunctionMode):
    """Sends 16-bit recurrent layers, and those autocast would cast, past the fused CPU kernels.

    Needed above autograd: `torch.lstm` never reaches a dispatch mode whole, and under float16
    autocast without a projection it asks for a oneDNN kernel that most CPUs lack (RuntimeError).
    """

    def __init__(self, dtype: torch.dtype, counts: Counter[tuple[str, str]]) -> None:
        super().__init__()
        self._dtype = dtype
        self._counts = counts

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _RECURRENT:
            return func(*args, **kwargs)
        if torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is self._dtype:
            args = tuple(_cast(a, self._dtype) for a in args)
            kwargs = {k: _cast(v, self._dtype) for k, v in kwargs.items()}
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        if not any(t.dtype is self._dtype and t.is_cpu for t in tensors):
            return func(*args, **kwargs)
        with torch.autocast("cpu", enabled=False):
            packed = kwargs or isinstance(args[1], Tensor)
            if func is torch.lstm and not packed and args[0].size(1 if args[8] else 0):
                return lstm(*args, self._counts)
            return func(*args, **kwargs)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Float32 CPU tensors to `dtype`, differentiably, as autocast does."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.dtype is F32 and value.is_cpu else value
    if isinstance(value, (list, tuple)):
        return type(value)(_cast(v, dtype) for v in value)
    return value
