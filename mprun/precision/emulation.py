"""In what arithmetic a mode's passes run: autocast, and Tensor Core arithmetic on a CPU.

Paper section 3.3: products are multiplied in FP16, summed in FP32 and stored in FP16. Native CPU
kernels break that rule, measured with torch 2.15 and AVX-512 BF16 (errors in single roundings):
float16: 8192 ones over the batch give 2048 in convolution weight gradients and embedding gradients,
    and a step takes 10 to 60 times as long as in float32;
bfloat16: 8192 ones give 256 in embedding gradients (17 roundings over 4000 tokens); an LSTM with
    projection is off by 3 to 6 roundings; linear and convolution are right, and faster than here.
So on a CPU real 16-bit tensors meet float32 sums in products and one rounding on store, both
formats alike: a result depends neither on the format nor on the CPU.

A mode that a device cannot honour is refused, never replaced.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from mprun.precision.policy import DTYPE_NAMES, PrecisionPolicy
from mprun.precision.recurrent import LAYERS, RecurrentCall, emulated_lstm, own_recurrent

F32 = torch.float32
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Route = Callable[["HalfEmulation", OpOverload, Args, Kwargs], Any]
_RECURRENT = LAYERS | {
    torch.lstm_cell,
    torch.gru_cell,
    torch.rnn_tanh_cell,
    torch.rnn_relu_cell,
}


class ForwardContext:
    """Autocast and CPU emulation of one policy, entered once per training step.

        with arithmetic:                      # forward AND backward
            with arithmetic.autocast():       # forward only
                outputs = model(inputs)
            ...backward...

    On a CPU 16-bit formats are emulated (float16 or bfloat16 tensors, FP32 products rounded once
    on store, as a Tensor Core does; paper section 3.3); on CUDA nothing is.

    Args:
        native: nothing is emulated on a CPU either.
        overrides: the dtypes of the policy's module overrides; their 16-bit ones are emulated too.
    """

    def __init__(
        self,
        policy: PrecisionPolicy,
        device: torch.device,
        *,
        native: bool = False,
        overrides: Iterable[torch.dtype] = (),
    ):
        self.policy, self.device = policy, device
        wanted = [dtype for dtype in (policy.half_dtype, *overrides) if dtype is not None]
        self.half_dtypes = tuple(dict.fromkeys(d for d in wanted if d.itemsize == 2))
        emulated = self.half_dtypes if device.type == "cpu" and not native else ()
        self.emulations = tuple(HalfEmulation(dtype) for dtype in emulated)

    def __enter__(self) -> ForwardContext:
        for emulation in self.emulations:
            emulation.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        for emulation in reversed(self.emulations):
            emulation.__exit__(*exception)

    def autocast(self) -> AbstractContextManager[Any]:
        """A fresh autocast block for one forward pass, or a no-op."""
        if self.policy.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.policy.autocast_dtype)

    def rerouted(self) -> dict[str, int]:
        """Calls computed by the emulation so far, by "phase operation"; empty if none."""
        total: Counter[tuple[str, str]] = Counter()
        for emulation in self.emulations:
            total += emulation.rerouted
        return {f"{phase} {operation}": n for (operation, phase), n in sorted(total.items())}

    def kind(self) -> str:
        """How 16-bit products are computed: "emulated-fp16", "native-bf16", ... or "none"."""
        how = "emulated" if self.emulations else "native"
        return " ".join(f"{how}-{DTYPE_NAMES[d]}" for d in self.half_dtypes) or "none"


def why_unsupported(
    policy: PrecisionPolicy, device: torch.device, overrides: Iterable[torch.dtype] = ()
) -> str | None:
    """The reason why `device` cannot run `policy` as defined, or None if it can.

    TF32 and BF16 Tensor Cores exist from compute capability 8.0 on (NVIDIA Ampere).

    Args:
        overrides: dtypes of module overrides.
    """
    if device.type == "cpu":
        if policy.fp32_math == "tf32":
            return "a CPU has no TF32; use precision=fp32, or device=cuda on a machine with a GPU"
        return None
    major, minor = torch.cuda.get_device_capability(device)
    name = f"{torch.cuda.get_device_name(device)} (compute capability {major}.{minor})"
    if policy.fp32_math == "tf32" and major < 8:
        return f"{name} has no TF32; compute capability 8.0 or later has it"
    if torch.bfloat16 in (policy.half_dtype, *overrides) and major < 8:
        return f"{name} has no bfloat16 products; compute capability 8.0 or later has them"
    return None


def why_no_lstm(
    policy: PrecisionPolicy, device: torch.device, projected: bool = False
) -> str | None:
    """The reason why torch's own LSTM on `device` does not compute in the policy's dtype, or None.

    Found by running a tiny one, as a model would: a CPU lacks the float16 layer under autocast.
    """
    wanted = policy.half_dtype
    if wanted is None:
        return None
    with torch.random.fork_rng(devices=[]):  # the random state belongs to the model
        lstm = nn.LSTM(8, 8, proj_size=4 if projected else 0).to(device, policy.param_dtype)
    own_recurrent(lstm)
    inputs = torch.zeros(2, 8, 8, device=device, dtype=policy.param_dtype)
    autocast = policy.autocast_dtype is not None
    try:
        with torch.autocast(device.type, dtype=policy.autocast_dtype, enabled=autocast):
            outputs, _ = lstm(inputs)
    except RuntimeError as error:
        return f"torch has no {wanted} LSTM here ({str(error).splitlines()[0][:60]})"
    if outputs.dtype is not wanted:
        return f"torch computes the LSTM in {outputs.dtype} here, not in {wanted}"
    return None


class HalfEmulation(TorchDispatchMode):
    """Within it, products of 16-bit CPU tensors are summed in float32 and rounded once.

    One object serves a whole run; enter it once per training step, around forward AND backward
    (outside, backward falls back to the native kernels), and around autocast:

        emulation = HalfEmulation()
        with emulation:
            loss = loss_function(model(x))
            (loss * scale).backward()

    Rerouted: matrix products, convolutions, attention and their gradients, embedding gradients,
    each to its float32 kernel; `torch.lstm` to `recurrent.emulated_lstm`; GRU, plain RNN, the
    cells and an LSTM over a packed sequence through their matrix products (states rounded each
    step, but weight gradients added up over the time steps in 16 bits). Native: element-wise
    functions, norm layers, pooling, softmax and sums, which use float32 inside; `index_add` and
    accumulating `index_put` (the gradient of `w[i]`), which do not. Tensors on other devices pass
    untouched.

    Other threads do not inherit the mode.

    Args:
        dtype: torch.float16 or torch.bfloat16, the format that is emulated.

    Attributes:
        rerouted: how often each operation was rerouted, by (name, "forward" or "backward"), over
            all entries; recomputation in `torch.utils.checkpoint` counts as backward. Empty after a
            float32 run; a 16-bit run that leaves it empty was not emulated.

    Raises:
        ValueError: another dtype.
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

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._recurrent.__exit__(*exception)

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
            half = self.dtype
            tensors = [a for a in args if isinstance(a, Tensor)]
            found = {a.dtype for a in tensors if a.is_cpu or a.dtype is F32}
            if half not in found or (F32 in found and name not in _MIXED):
                # A product of mixed dtypes is an error, and the native kernel says so.
                return func(*args, **kwargs)
            phase = "forward" if torch._C._current_graph_task_id() == -1 else "backward"
            self.rerouted[name, phase] += 1
            self._scratch.reset()
            return run(self, func, args, kwargs)

    def _plain(self, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
        """Every 16-bit operand widened, every float32 result rounded; None results stay None."""
        args, kwargs = self._widen((args, kwargs))
        results = func(*args, **kwargs)
        return _each_tensor(results, lambda t: t.to(self.dtype) if t.dtype is F32 else t)

    def _matrix(self, func: OpOverload, args: Args, kwargs: Kwargs) -> Tensor:
        """A matrix product whose float32 result, if large, goes to scratch memory as well."""
        args = self._widen(args)
        a, b = args[-2:]
        rows, columns = a.size(-2), b.size(-1)
        numel = a.numel() // max(a.size(-1), 1) * columns
        if numel < Scratch.SMALLEST:
            return func(*args, **kwargs).to(self.dtype)
        size = (rows, columns) if a.dim() == 2 else (a.size(0), rows, columns)
        stride = (columns, 1) if a.dim() == 2 else (rows * columns, columns, 1)
        out = self._scratch.empty(size, stride, numel)
        return func._overloadpacket.out(*args, **kwargs, out=out).to(self.dtype)

    def _attention(self, func: OpOverload, args: Args, kwargs: Kwargs) -> tuple[Tensor, Tensor]:
        """Output rounded; the log-sum-exp kept for backward is float32 in the native kernel too.

        The probabilities are not rounded between the two products, as they are on a GPU.
        """
        args, kwargs = self._widen((args, kwargs))
        out, logsumexp = func(*args, **kwargs)
        return out.to(self.dtype), logsumexp

    def _writing(self, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
        """In-place and out= overloads: run on float32 copies, then round into what was given."""
        arguments = func._schema.arguments
        names = [argument.name for argument in arguments[: len(args)]]
        given = dict(zip(names, args, strict=True)) | kwargs
        wide = _each_tensor(given, lambda t: t.to(F32) if t.dtype is self.dtype else t)
        func(*[wide[name] for name in names], **{name: wide[name] for name in kwargs})
        written = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
        for value, target in ((wide[name], given[name]) for name in written):
            if target is not value:
                if target.shape != value.shape:  # as an out= overload gives it
                    target.resize_(value.shape)
                target.copy_(value)
        targets = tuple(given[name] for name in written)
        return targets[0] if len(targets) == 1 else targets

    def _widen(self, value: Any) -> Any:
        half, scratch = self.dtype, self._scratch
        return _each_tensor(value, lambda t: scratch.float(t) if t.dtype is half else t)


class _Recurrent(TorchFunctionMode):
    """Sends 16-bit recurrent layers, and those autocast would cast, past the fused CPU kernels.

    Needed above autograd: `torch.lstm` never reaches a dispatch mode whole, and under float16
    autocast without a projection it asks for a oneDNN kernel that most CPUs lack (RuntimeError).

    Args:
        counts: how often a layer was computed here, by ("lstm", "forward" or "backward").
    """

    def __init__(self, dtype: torch.dtype, counts: Counter[tuple[str, str]]) -> None:
        super().__init__()
        self._dtype = dtype
        self._counts = counts

    def __torch_function__(self, func, types, args=(), kwargs=None) -> Any:
        kwargs = kwargs or {}
        if func not in _RECURRENT:
            return func(*args, **kwargs)
        if torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is self._dtype:
            args, kwargs = _each_tensor((args, kwargs), self._as_autocast)
        if not any(self._is_emulated(value) for value in (*args, *kwargs.values())):
            return func(*args, **kwargs)
        with torch.autocast("cpu", enabled=False):
            if func is torch.lstm and not kwargs:
                call = RecurrentCall.of(args)
                if call.batch_sizes is None and call.inputs.size(1 if call.batch_first else 0):
                    return emulated_lstm(call, self._counts)
            return func(*args, **kwargs)

    def _is_emulated(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.dtype is self._dtype and value.is_cpu

    def _as_autocast(self, tensor: Tensor) -> Tensor:
        """A float32 CPU tensor in the emulated format, differentiably."""
        return tensor.to(self._dtype) if tensor.dtype is F32 and tensor.is_cpu else tensor


# Operations that take 16-bit and float32 tensors together (the log-sum-exp).
_MIXED = frozenset({"_scaled_dot_product_flash_attention_for_cpu_backward"})
_MATRIX = ("mm", "addmm", "bmm", "baddbmm")
_OTHER = (
    *("mv", "addmv", "dot", "vdot", "addbmm", "linear", "_addmm_activation"),
    *("convolution", "convolution_overrideable"),
    *("convolution_backward", "convolution_backward_overrideable"),
    *("embedding_dense_backward", "_embedding_bag", "_embedding_bag_forward_only"),
    *("_embedding_bag_backward", "_embedding_bag_dense_backward"),
    *("_native_multi_head_attention", "_transformer_encoder_layer_fwd"),
    *("_scaled_dot_product_flash_attention_for_cpu", *_MIXED),
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


def _each_tensor(value: Any, convert: Callable[[Tensor], Tensor]) -> Any:
    """`value` with every tensor in it, also in nested lists, tuples and dicts, converted."""
    if isinstance(value, Tensor):
        return convert(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_each_tensor(v, convert) for v in value)
    if isinstance(value, dict):
        return {key: _each_tensor(v, convert) for key, v in value.items()}
    return value


@functools.cache
def routes() -> dict[OpOverload, tuple[str, Route]]:
    """Overload -> (operation name as counted, function that runs it), for this torch version.

    Of the operations whose sums a Tensor Core keeps in float32. In-place and out= overloads are in
    it too: none is left to the native 16-bit kernel.
    """
    table: dict[OpOverload, tuple[str, Route]] = {}
    for name in _MATRIX + _OTHER:
        packet = getattr(torch.ops.aten, name, None)
        if packet is None:
            continue
        for overload in packet.overloads():
            func = getattr(packet, overload)
            run: Route = HalfEmulation._plain
            if func._schema.is_mutable:
                run = HalfEmulation._writing
            elif name in _MATRIX and overload == "default":
                run = HalfEmulation._matrix
            elif name == "_scaled_dot_product_flash_attention_for_cpu":
                run = HalfEmulation._attention
            table[func] = (name, run)
    for name in ("addmm", "baddbmm", "addmv", "addbmm"):
        func = getattr(torch.ops.aten, name + "_").default
        table[func] = (name + "_", HalfEmulation._writing)
    return table
