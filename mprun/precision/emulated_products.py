"""Operations whose sums a Tensor Core keeps in float32, run so on a CPU and rounded once on store.

`routes` maps every overload of these operations to its name and to the function that runs it in
float32. In-place and out= overloads are in it too: none is left to the native 16-bit kernel, which
in float16 is 10 to 60 times slower than float32 and adds some gradients up in 16 bits.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

F32 = torch.float32
# Operations that take 16-bit and float32 tensors together (the log-sum-exp).
MIXED = frozenset({"_scaled_dot_product_flash_attention_for_cpu_backward"})
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Route = Callable[["Scratch", torch.dtype, OpOverload, Args, Kwargs], Any]

_MATRIX = ("mm", "addmm", "bmm", "baddbmm")
_OTHER = (
    "mv",
    "addmv",
    "dot",
    "vdot",
    "addbmm",
    "linear",
    "_addmm_activation",
    "convolution",
    "convolution_overrideable",
    "convolution_backward",
    "convolution_backward_overrideable",
    "embedding_dense_backward",
    "_embedding_bag",
    "_embedding_bag_forward_only",
    "_embedding_bag_backward",
    "_embedding_bag_dense_backward",
    "_native_multi_head_attention",
    "_transformer_encoder_layer_fwd",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
)


class Scratch(threading.local):
    """Float32 working memory for the operands of one operation, kept for the next operation.

    Converting into a fresh 64 MiB tensor takes eight times as long, all of it page faults. Holds as
    many bytes as the largest operation needed (AlexNet: about 150 MiB). One buffer per thread.
    """

    SMALLEST = 1 << 15  # elements; below, the allocator's own cache is as fast

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=F32)
        self._used = 0

    def reset(self) -> None:
        """Free all tensors handed out: to be called when an operation starts."""
        self._used = 0

    def empty(self, size: tuple[int, ...], stride: tuple[int, ...], numel: int) -> Tensor:
        """Uninitialised float32 of `numel` elements without gaps; valid until the next reset."""
        start = self._used
        end = start + numel
        if end > self._buffer.numel():
            # Tensors handed out before keep the old buffer alive. An inference tensor could not be
            # written to in training.
            with torch.inference_mode(False):
                self._buffer = torch.empty(end, dtype=F32)
        self._used = (end + 15) & ~15
        return self._buffer.as_strided(size, stride, start)

    def float(self, x: Tensor) -> Tensor:
        """`x` in float32 with the strides of `x`; valid until the next reset."""
        numel = x.numel()
        if numel < self.SMALLEST or not _dense(x):
            return x.to(F32)
        return self.empty(x.shape, x.stride(), numel).copy_(x)


def _dense(x: Tensor) -> bool:
    """Whether the strides of `x` fill its storage without gaps or overlaps (the usual layouts)."""
    if x.is_contiguous():
        return True
    if x.dim() == 2:
        return x.stride(0) == 1 and x.stride(1) == x.size(0)
    if x.dim() == 4:
        return x.is_contiguous(memory_format=torch.channels_last)
    return x.dim() == 3 and x.transpose(1, 2).is_contiguous()


def _widen(value: Any, half: torch.dtype, scratch: Scratch) -> Any:
    if isinstance(value, Tensor):
        return scratch.float(value) if value.dtype is half else value
    if isinstance(value, (list, tuple)):
        return type(value)(_widen(v, half, scratch) for v in value)
    return value


def _narrow(value: Any, half: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(half) if value.dtype is F32 else value
    if isinstance(value, (list, tuple)):
        return type(value)(_narrow(v, half) for v in value)
    return value


def _plain(
    scratch: Scratch, half: torch.dtype, func: OpOverload, args: Args, kwargs: Kwargs
) -> Any:
    """Every 16-bit operand widened, every float32 result rounded; None results stay None."""
    args = tuple(_widen(a, half, scratch) for a in args)
    kwargs = {k: _widen(v, half, scratch) for k, v in kwargs.items()}
    return _narrow(func(*args, **kwargs), half)


def _matrix(
    scratch: Scratch, half: torch.dtype, func: OpOverload, args: Args, kwargs: Kwargs
) -> Tensor:
    """A matrix product whose float32 result, if large, goes to scratch memory as well."""
    args = tuple(_widen(a, half, scratch) for a in args)
    a, b = args[-2:]
    rows, columns = a.size(-2), b.size(-1)
    numel = a.numel() // max(a.size(-1), 1) * columns
    if numel < scratch.SMALLEST:
        return func(*args, **kwargs).to(half)
    size = (rows, columns) if a.dim() == 2 else (a.size(0), rows, columns)
    stride = (columns, 1) if a.dim() == 2 else (rows * columns, columns, 1)
    out = scratch.empty(size, stride, numel)
    return func._overloadpacket.out(*args, **kwargs, out=out).to(half)


def _attention(
    scratch: Scratch, half: torch.dtype, func: OpOverload, args: Args, kwargs: Kwargs
) -> tuple[Tensor, Tensor]:
    """Output rounded; the log-sum-exp kept for backward is float32 in the native kernel too.

    The probabilities are not rounded between the two products, as they are on a GPU.
    """
    args = tuple(_widen(a, half, scratch) for a in args)
    kwargs = {k: _widen(v, half, scratch) for k, v in kwargs.items()}
    out, logsumexp = func(*args, **kwargs)
    return out.to(half), logsumexp


def _writing(
    scratch: Scratch, half: torch.dtype, func: OpOverload, args: Args, kwargs: Kwargs
) -> Any:
    """An in-place or out= overload: run on float32 copies, then round into the tensors given."""
    names = {argument.name: i for i, argument in enumerate(func._schema.arguments)}
    given = {name: args[i] for name, i in names.items() if i < len(args)} | kwargs
    wide = {
        name: value.to(F32) if isinstance(value, Tensor) and value.dtype is half else value
        for name, value in given.items()
    }
    positional = (wide[name] for name, i in names.items() if i < len(args))
    func(*positional, **{name: wide[name] for name in kwargs})
    targets = []
    for argument in func._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            target, value = given[argument.name], wide[argument.name]
            if target is not value:
                if target.shape != value.shape:
                    target.resize_(value.shape)
                target.copy_(value)
            targets.append(target)
    return targets[0] if len(targets) == 1 else tuple(targets)


@functools.cache
def routes() -> dict[OpOverload, tuple[str, Route]]:
    """Overload -> (operation name as counted, function that runs it), for this torch version."""
    table: dict[OpOverload, tuple[str, Route]] = {}
    for name in _MATRIX + _OTHER:
        packet = getattr(torch.ops.aten, name, None)
        if packet is None:
            continue
        for overload in packet.overloads():
            func = getattr(packet, overload)
            run: Route = _plain
            if func._schema.is_mutable:
                run = _writing
            elif name in _MATRIX and overload == "default":
                run = _matrix
            elif name == "_scaled_dot_product_flash_attention_for_cpu":
                run = _attention
            table[func] = (name, run)
    for name in ("addmm", "baddbmm", "addmv", "addbmm"):
        func = getattr(torch.ops.aten, name + "_").default
        table[func] = (name + "_", _writing)
    return table
