"""Tensor Core arithmetic on a CPU: 16-bit operations in float32, rounded once on store.

Paper section 3.3: products are multiplied in FP16, summed in FP32 and stored in FP16. Native CPU
kernels break that rule: 8192 ones add up to 2048 in FP16 and to 256 in BF16 (docs/log/torch.md,
"16 bits on a CPU"). So on a CPU real 16-bit tensors are computed in float32 and rounded once on
store, operation by operation (`HalfEmulation`), in both formats. A result then depends on neither
the format nor the CPU.
"""

import functools
import math
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from mprun.precision.emulated_operations import (
    MATRIX,
    MIXED,
    PRODUCTS,
    WITH_NUMBER,
    is_absent,
    is_native,
    is_product,
)
from mprun.precision.emulated_recurrent import emulated_recurrent
from mprun.precision.policy import DTYPE_NAMES
from mprun.precision.recurrent import LAYERS, RecurrentCall
from mprun.torch_private import (
    DisableTorchDispatch,
    DisableTorchFunction,
    OpOverload,
    TorchDispatchMode,
    dispatch_modes,
    graph_task,
    schema_of,
)

aten = torch.ops.aten
F32 = torch.float32
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Route = Callable[["HalfEmulation", OpOverload, Args, Kwargs], Any]
_RECURRENT = LAYERS | {torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell}


class HalfEmulation(TorchDispatchMode):
    """Within it, operations on 16-bit CPU tensors compute in float32 and round once, as on CUDA.

    One object serves a whole run. Enter it around forward AND backward (otherwise backward falls
    back to the native kernels), and around autocast. Other threads do not inherit it.

    rerouted   products, convolutions, attention, norm layers and all others to their float32
               kernel; recurrent layers to `emulated_recurrent`; cells, and layers over a packed
               sequence, through their matrix products (states rounded each step, but weight
               gradients added up over the time steps in 16 bits)
    native     operations whose 16-bit CPU kernel gives the same result: element-wise arithmetic,
               sums, batch norm with float32 parameters, pooling, and operations that move numbers
    refused    operations without a 16-bit kernel on CUDA: NotImplementedError, as there

    docs/reference/operations.md lists each operation. Tensors on other devices pass untouched.

    Args:
        dtype: torch.float16 or torch.bfloat16, the format that is emulated.

    Attributes:
        rerouted: calls of each of `PRODUCTS` and each recurrent layer, by (name, "forward" or
            "backward"), over all entries; recomputation in `torch.utils.checkpoint` counts as
            backward. Empty after a float32 run; a 16-bit run that leaves it empty was not emulated.

    Raises:
        ValueError: `dtype` is another dtype.
    """

    def __init__(self, dtype: torch.dtype = torch.float16) -> None:
        if dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(f"dtype must be torch.float16 or torch.bfloat16, not {dtype}")
        super().__init__()
        self.dtype = dtype
        self.rerouted: Counter[tuple[str, str]] = Counter()
        self._scratch = Scratch()
        self._dtypes: dict[tuple[Any, ...], list[torch.dtype]] = {}
        self.functions = _Functions(dtype, self.rerouted)

    def __enter__(self) -> Self:
        self.functions.__enter__()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self.functions.__exit__(*exception)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        kwargs = kwargs or {}
        # In forward the function mode below is active too and would add to the cost of each call.
        with DisableTorchFunction():
            route = route_of(func)
            if route is None:
                return func(*args, **kwargs)
            name, run = route
            if name in WITH_NUMBER and "alpha" not in kwargs:
                if isinstance(args[1], Tensor) and args[1].layout is torch.strided:
                    return func(*args, **kwargs)
            found = {t.dtype for t in _tensors((args, kwargs)) if t.is_cpu or t.dtype is F32}
            if self.dtype not in found or (F32 in found and name not in MIXED):
                # Most operations refuse mixed dtypes; the native kernel raises that error.
                return func(*args, **kwargs)
            if name.removesuffix("_") in PRODUCTS:
                phase = "forward" if graph_task() == -1 else "backward"
                self.rerouted[name, phase] += 1
            self._scratch.reset()
            return run(self, func, args, kwargs)

    def _plain(self, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
        """Widen every 16-bit operand, and round every float32 result that would be a 16-bit one;
        None results stay None."""
        wide_args, wide_kwargs = self._widen((args, kwargs))
        return self._rounded(func, args, kwargs, func(*wide_args, **wide_kwargs))

    def _dtypes_of_results(self, func: OpOverload, args: Args, kwargs: Kwargs) -> list[torch.dtype]:
        """Return the dtypes that the operation itself returns, found once on meta tensors."""
        key = (func, *map(_signature, _leaves((args, kwargs))))
        if key not in self._dtypes:
            try:
                bare = _each_tensor((args, kwargs), lambda t: t.to("meta"))
                results = func(*bare[0], **bare[1])
                self._dtypes[key] = [t.dtype for t in _tensors(results)]
            except (RuntimeError, NotImplementedError):  # sizes that depend on values
                self._dtypes[key] = [self.dtype] * 8
        return self._dtypes[key]

    def _matrix(self, func: OpOverload, args: Args, kwargs: Kwargs) -> Tensor:
        """Compute a matrix product; a large float32 result goes to scratch memory as well."""
        args = self._widen(args)
        size = (*args[-2].shape[:-1], args[-1].size(-1))
        if math.prod(size) < Scratch.SMALLEST:
            return func(*args, **kwargs).to(self.dtype)
        out = self._scratch.empty(math.prod(size)).view(size)
        return func.overloadpacket.out(*args, **kwargs, out=out).to(self.dtype)

    def _writing(self, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
        """In-place and out= overloads: run on float32 copies, then round into what was given."""
        arguments = schema_of(func).arguments
        names = [argument.name for argument in arguments[: len(args)]]
        given = dict(zip(names, args, strict=True)) | kwargs
        wide = self._widen(given, Tensor.float)
        results = func(*[wide[name] for name in names], **{name: wide[name] for name in kwargs})
        targets = {}
        for name in [a.name for a in arguments if a.alias_info and a.alias_info.is_write]:
            for value, target in zip(_tensors(wide[name]), _tensors(given[name]), strict=True):
                targets[id(value)] = target
                if target is not value:
                    if target.shape != value.shape:  # as an out= overload gives it
                        target.resize_(value.shape)
                    target.copy_(value)
        results = _each_tensor(results, lambda t: targets.get(id(t), t))
        return self._rounded(func, args, kwargs, results)

    def _index_put(self, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
        """Compute in float32 only if values add up; otherwise numbers just move."""
        if not kwargs.get("accumulate", args[3] if len(args) > 3 else False):
            return func(*args, **kwargs)
        run = HalfEmulation._writing if schema_of(func).is_mutable else HalfEmulation._plain
        return run(self, func, args, kwargs)

    def _batch_norm(self, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
        """Use the CPU's kernel with float32 parameters, where it is right. Its schema hides that it
        writes to the running statistics, arguments 3 and 4."""
        if any(t.dtype is F32 for t in _tensors(args[1:5])):
            return func(*args, **kwargs)
        wide = self._widen(args)
        results = func(*wide, **kwargs)
        if func is aten.native_batch_norm.default:
            for target, value in zip(args[3:5], wide[3:5], strict=True):
                if target is not None:
                    target.copy_(value)
        return self._rounded(func, args, kwargs, results)

    def _rounded(self, func: OpOverload, args: Args, kwargs: Kwargs, results: Any) -> Any:
        """Cast float32 results to the dtypes of the operation itself; leave others as they are."""
        dtypes = iter(self._dtypes_of_results(func, args, kwargs))

        def one(result: Tensor) -> Tensor:
            dtype = next(dtypes, result.dtype)
            return result.to(dtype) if result.dtype in (F32, torch.complex64) else result

        return _each_tensor(results, one)

    def _refuse(self, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
        raise NotImplementedError(
            f"{schema_of(func).name}: CUDA has no {DTYPE_NAMES[self.dtype]} kernel for it; compute "
            f"it in FP32: call it with x.float(), or set fp32 for its module in overrides"
        )

    def _widen(self, value: Any, widen: Callable[[Tensor], Tensor] | None = None) -> Any:
        """Convert every 16-bit tensor by `widen` (default: into scratch memory), and dtypes."""
        widen = widen or self._scratch.float

        def one(leaf: Any) -> Any:
            if leaf is self.dtype:
                return F32
            return widen(leaf) if isinstance(leaf, Tensor) and leaf.dtype is self.dtype else leaf

        return _each(one, value)


def below_emulation(tensors: Iterable[Tensor | None]) -> AbstractContextManager[Any]:
    """Return a context that leaves the emulation out of what it would only hand on: casts, scaling.

    It saves some 15 microseconds an operation. Other modes, tensors of other types and a
    differentiated pass keep seeing the operations.
    """
    modes = dispatch_modes()
    if not modes or torch.is_grad_enabled() or not all(type(m) is HalfEmulation for m in modes):
        return nullcontext()
    plain = all(own is None or type(own) is Tensor for own in tensors)
    return DisableTorchDispatch() if plain else nullcontext()


class Losses(TorchFunctionMode):
    """A mode that computes a model's losses in `loss_dtype`, like the losses outside the model.

    With None they keep the dtype of their tensors. Attention runs in the dtype of its query: CUDA's
    kernels refuse a float32 mask with a 16-bit query. Costs about a microsecond for each call of a
    torch function.
    """

    def __init__(self, loss_dtype: torch.dtype | None) -> None:
        super().__init__()
        self.loss_dtype = loss_dtype

    def __torch_function__(self, func, types, args=(), kwargs=None) -> Any:
        if self.loss_dtype is not None and func in _LOSSES:
            args, kwargs = _each_tensor((args, kwargs or {}), self._widened)
        elif func in _ATTENTIONS:
            query = args[0] if args else kwargs["query"]
            if query.dtype.itemsize == 2 and not torch.is_autocast_enabled(query.device.type):
                args, kwargs = _each_tensor(
                    (args, kwargs or {}), lambda t: t.to(query.dtype) if t.dtype is F32 else t
                )
        return func(*args, **(kwargs or {}))

    def _widened(self, tensor: Tensor) -> Tensor:
        half = tensor.dtype in (torch.float16, torch.bfloat16)
        return tensor.to(self.loss_dtype) if half else tensor


class _Functions(Losses):
    """A mode that takes 16-bit recurrent layers, also under autocast, past the fused CPU kernels.

    It must be above autograd: `torch.lstm` never reaches a dispatch mode whole. Under float16
    autocast without a projection it needs a oneDNN kernel that most CPUs lack (RuntimeError).
    `counts` gets the number of layers computed here, by (kind, "forward" or "backward").
    """

    def __init__(self, dtype: torch.dtype, counts: Counter[tuple[str, str]]) -> None:
        super().__init__(None)
        self._dtype, self._counts = dtype, counts

    def __torch_function__(self, func, types, args=(), kwargs=None) -> Any:
        if func not in _RECURRENT:
            return super().__torch_function__(func, types, args, kwargs)
        kwargs = kwargs or {}
        if torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is self._dtype:
            # Differentiably, as autocast itself would cast them.
            args, kwargs = _each_tensor(
                (args, kwargs), lambda t: t.to(self._dtype) if t.dtype is F32 and t.is_cpu else t
            )
        dtypes = {t.dtype for t in _tensors((args, kwargs)) if t.is_cpu}
        if self._dtype not in dtypes or F32 in dtypes:  # mixed dtypes: torch raises the error
            return func(*args, **kwargs)
        with torch.autocast("cpu", enabled=False):
            if func in LAYERS and not kwargs:
                call = RecurrentCall.of(args)
                if call.batch_sizes is None and call.inputs.numel():
                    return emulated_recurrent(func, call, self._counts)
            return func(*args, **kwargs)


_ATTENTIONS = (F.scaled_dot_product_attention, F.multi_head_attention_forward)
_LOSSES = frozenset(
    function
    for name, function in vars(F).items()
    if re.fullmatch(r"\w+_loss|kl_div|(binary_)?cross_entropy(_with_logits)?", name)
)


class Scratch(threading.local):
    """Float32 working memory for the operands of one operation, kept for the next operation.

    Converting into a fresh 64 MiB tensor takes eight times as long, all of it page faults. It holds
    as many bytes as the largest operation needed (AlexNet: about 150 MiB). One buffer per thread.
    """

    SMALLEST = 1 << 15  # elements; below, the allocator's own cache is as fast

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=F32)
        self._used = 0

    def reset(self) -> None:
        """Free all tensors handed out; call it when an operation starts."""
        self._used = 0

    def empty(self, numel: int) -> Tensor:
        """Return uninitialised float32 [numel]; valid until the next reset."""
        start, end = self._used, self._used + numel
        if end > self._buffer.numel():
            # Tensors handed out before keep the old buffer alive. Training could not write to an
            # inference tensor.
            with torch.inference_mode(False):
                self._buffer = torch.empty(end, dtype=F32)
        self._used = (end + 15) & ~15
        return self._buffer[start:end]

    def float(self, x: Tensor) -> Tensor:
        """Return `x` in float32 with the strides of `x`; valid until the next reset."""
        numel = x.numel()
        if numel < self.SMALLEST or x.layout is not torch.strided:
            return x.to(F32)
        # torch does not keep strides that leave gaps or overlap either.
        if not x.is_contiguous() and torch.empty_like(x, device="meta").stride() != x.stride():
            return x.to(F32)
        flat = self.empty(numel)
        return flat.as_strided(x.shape, x.stride(), flat.storage_offset()).copy_(x)


def _each(convert: Callable[[Any], Any], value: Any) -> Any:
    """Return `value` with every leaf converted, also in nested lists, tuples and dicts."""
    if isinstance(value, (list, tuple)):
        return type(value)([_each(convert, v) for v in value])
    if isinstance(value, dict):
        return {key: _each(convert, v) for key, v in value.items()} if value else {}
    return convert(value)


def _each_tensor(value: Any, convert: Callable[[Tensor], Any]) -> Any:
    return _each(lambda leaf: convert(leaf) if isinstance(leaf, Tensor) else leaf, value)


def _leaves(value: Any) -> list[Any]:
    """Return the leaves of nested lists, tuples and dicts, including keys."""
    if not isinstance(value, (list, tuple, dict)):
        return [value]
    found: list[Any] = []
    for inner in value.items() if isinstance(value, dict) else value:
        # Without a call for most: each operation of a step is looked at.
        if isinstance(inner, (list, tuple, dict)):
            found += _leaves(inner)
        else:
            found.append(inner)
    return found


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in _leaves(value) if isinstance(leaf, Tensor)]


def _signature(leaf: Any) -> Any:
    """Return the part of an argument that may decide on the dtype of a result."""
    if isinstance(leaf, Tensor):
        return leaf.dtype, leaf.dim() == 0
    return leaf if isinstance(leaf, (bool, str, torch.dtype)) else type(leaf)


@functools.cache
def route_of(func: OpOverload) -> tuple[str, Route] | None:
    """(operation name as counted, function that runs it), or None where it runs as it is."""
    name = schema_of(func).name.partition("::")[2]
    base = name.removesuffix("_")
    if not is_product(name):  # products first: attention draws random numbers too
        if is_absent(name):
            return name, HalfEmulation._refuse
        if is_native(func, name):
            return None
    if base in ("index_put", "_index_put_impl", "_unsafe_index_put"):
        return name, HalfEmulation._index_put
    if name in ("native_batch_norm", "native_batch_norm_backward"):
        return name, HalfEmulation._batch_norm
    if schema_of(func).is_mutable:
        return name, HalfEmulation._writing
    large = func.name().partition("::")[2] in MATRIX  # the overload without a name
    return name, HalfEmulation._matrix if large else HalfEmulation._plain
