"""In what arithmetic a mode's passes run: autocast, and Tensor Core arithmetic on a CPU.

Paper section 3.3: products are multiplied in FP16, summed in FP32 and stored in FP16. Native CPU
kernels break that rule, measured with torch 2.15 and AVX-512 BF16 (errors in single roundings):
float16: 8192 ones over the batch give 2048 in convolution weight gradients and embedding gradients,
    and a step takes 10 to 60 times as long as in float32;
bfloat16: 8192 ones give 256 in embedding gradients (17 roundings over 4000 tokens); an LSTM with
    projection is off by 3 to 6 roundings; linear and convolution are right, and faster than here.
So on a CPU real 16-bit tensors meet float32 arithmetic and one rounding on store, operation by
operation (`HalfEmulation`), both formats alike: a result depends neither on the format nor on the
CPU.

A mode that a device cannot honour is refused, never replaced.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from mprun.precision.autocast import cuda_lists
from mprun.precision.emulated_recurrent import emulated_recurrent
from mprun.precision.policy import DTYPE_NAMES, PrecisionPolicy
from mprun.precision.recurrent import LAYERS, RecurrentCall, own_recurrent
from mprun.precision.scaled_products import calls

aten = torch.ops.aten
F32 = torch.float32
T = TypeVar("T")
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
    on store, as a Tensor Core does; paper section 3.3), and autocast follows CUDA's lists; on CUDA
    nothing is done.

    Args:
        native: nothing is emulated on a CPU either, and autocast follows torch's lists for a CPU.
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
        self._before = calls.copy()
        self.half_dtypes = tuple(dict.fromkeys(d for d in wanted if d.itemsize == 2))
        emulated = self.half_dtypes if device.type == "cpu" and not native else ()
        # A step that is watched has one more for a while, which reroutes nothing.
        self._own = self.emulations = tuple(HalfEmulation(dtype) for dtype in emulated)
        follows = self.emulations and policy.autocast_dtype is not None
        self._lists = cuda_lists() if follows else None  # for as long as this lives

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
        found = {f"{phase} {operation}": n for (operation, phase), n in sorted(total.items())}
        return found | {name: n for name, n in sorted((calls - self._before).items())}

    def kind(self) -> str:
        """How 16-bit products are computed: "emulated-fp16", "native-bf16", ... or "none"."""
        how = "emulated" if self.emulations else "native"
        found = [f"{how}-{DTYPE_NAMES[dtype]}" for dtype in self.half_dtypes]
        how = "emulated" if self.device.type == "cpu" else "native"
        if (products := self.policy.products) is not None:
            found += [f"{how}-{DTYPE_NAMES[dtype]}" for dtype in products.formats]
        return " ".join(found) or "none"

    def missing(self) -> str | None:
        """What of the mode has not happened so far, "emulated-fp16"; None: nothing, or unknown."""
        if self.policy.products is not None and not calls - self._before:
            return " ".join(kind for kind in self.kind().split() if "-e" in kind)
        if not self._own or any(emulation.rerouted for emulation in self._own):
            return None
        return self.kind()


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
    if policy.products is not None:
        # torch documentation, torch._scaled_mm; scales by row are of Hopper's instructions.
        least = (9, 0) if policy.products.granularity == "row" else (8, 9)
        if (major, minor) < least:
            what = "FP8 products with scales by row" if least == (9, 0) else "FP8 products"
            return f"{name} has no {what}; compute capability {least[0]}.{least[1]} has them"
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
    """Within it, operations on 16-bit CPU tensors compute in float32 and round once.

    One object serves a whole run; enter it once per training step, around forward AND backward
    (outside, backward falls back to the native kernels), and around autocast:

        emulation = HalfEmulation()
        with emulation:
            loss = loss_function(model(x))
            (loss * scale).backward()

    Every operation computes as CUDA's does, 16-bit operands in float32 and one rounding on store:

    rerouted   products, convolutions, attention, norm layers and all else to their float32 kernel;
               recurrent layers to `emulated_recurrent`; cells, and layers over a packed sequence,
               through their matrix products (states rounded each step, but weight gradients added
               up over the time steps in 16 bits)
    native     what the CPU's own 16-bit kernel computes alike: element-wise functions, sums, batch
               norm with float32 parameters, pooling, and whatever only moves numbers
    refused    what CUDA has no 16-bit kernel of: NotImplementedError, as there

    docs/operations.md has each operation. Tensors on other devices pass untouched.

    Other threads do not inherit the mode.

    Args:
        dtype: torch.float16 or torch.bfloat16, the format that is emulated.

    Attributes:
        rerouted: how often each of `PRODUCTS` and each recurrent layer was, by (name, "forward" or
            "backward"), over all entries; recomputation in `torch.utils.checkpoint` counts as
            backward. Empty after a float32 run; a 16-bit run that leaves it empty was not emulated.

    Raises:
        ValueError: another dtype.
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

    def __enter__(self) -> HalfEmulation:
        self.functions.__enter__()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self.functions.__exit__(*exception)

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        # In forward the function mode below is active too and would add to the cost of each call.
        with torch._C.DisableTorchFunction():
            route = route_of(func)
            if route is None or (route[0] in _WITH_NUMBER and _is_dense_tensor(args[1])):
                return func(*args, **kwargs)
            name, run = route
            found = {t.dtype for t in _tensors((args, kwargs)) if t.is_cpu or t.dtype is F32}
            if self.dtype not in found or (F32 in found and name not in _MIXED):
                # Mixed dtypes are an error of most, and the native kernel says so.
                return func(*args, **kwargs)
            if name.removesuffix("_") in PRODUCTS:
                phase = "forward" if torch._C._current_graph_task_id() == -1 else "backward"
                self.rerouted[name, phase] += 1
            self._scratch.reset()
            return run(self, func, args, kwargs)

    def _plain(self, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
        """Every 16-bit operand widened, and every float32 result rounded that is a 16-bit one
        otherwise; None results stay None."""
        wide_args, wide_kwargs = self._widen((args, kwargs))
        return self._rounded(func, args, kwargs, func(*wide_args, **wide_kwargs))

    def _dtypes_of_results(self, func: OpOverload, args: Args, kwargs: Kwargs) -> list[torch.dtype]:
        """What the operation itself would return, asked of it on tensors without values, once."""
        key = (func, *_signature((args, kwargs)))
        if key not in self._dtypes:
            try:
                bare = _each_tensor((args, kwargs), lambda t: t.to("meta"))
                results = func(*bare[0], **bare[1])
                self._dtypes[key] = [t.dtype for t in _tensors(results)]
            except (RuntimeError, NotImplementedError):  # sizes that depend on values
                self._dtypes[key] = [self.dtype] * 8
        return self._dtypes[key]

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
        wide = _each(torch.dtype, wide, lambda dtype: F32 if dtype is self.dtype else dtype)
        results = func(*[wide[name] for name in names], **{name: wide[name] for name in kwargs})
        targets = {}
        for name in [a.name for a in arguments if a.alias_info and a.alias_info.is_write]:
            for value, target in zip(_tensors(wide[name]), _tensors(given[name]), strict=True):
                targets[id(value)] = target
                if target is not value:
                    if target.shape != value.shape:  # as an out= overload gives it
                        target.resize_(value.shape)
                    target.copy_(value)
        return self._rounded(func, args, kwargs, results, targets)

    def _index_put(self, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
        """Only where it adds up is there anything to compute."""
        if not kwargs.get("accumulate", args[3] if len(args) > 3 else False):
            return func(*args, **kwargs)
        run = HalfEmulation._writing if func._schema.is_mutable else HalfEmulation._plain
        return run(self, func, args, kwargs)

    def _batch_norm(self, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
        """With float32 parameters the CPU's kernel is right. Its schema hides that the running
        statistics, arguments 3 and 4, are written to."""
        if any(t.dtype is F32 for t in _tensors(args[1:5])):
            return func(*args, **kwargs)
        wide = self._widen(args)
        results = func(*wide, **kwargs)
        if func is aten.native_batch_norm.default:
            for target, value in zip(args[3:5], wide[3:5], strict=True):
                if target is not None:
                    target.copy_(value)
        return self._rounded(func, args, kwargs, results)

    def _rounded(
        self,
        func: OpOverload,
        args: Args,
        kwargs: Kwargs,
        results: Any,
        targets: Mapping[int, Tensor] = MappingProxyType({}),
    ) -> Any:
        """The float32 results in the dtypes that the operation itself gives, others as they are; of
        what was written to, by id(), the tensor that was given."""
        dtypes = iter(self._dtypes_of_results(func, args, kwargs))

        def one(result: Tensor) -> Tensor:
            dtype = next(dtypes, result.dtype)
            if id(result) in targets:
                return targets[id(result)]
            return result.to(dtype) if result.dtype in (F32, torch.complex64) else result

        return _each_tensor(results, one)

    def _refuse(self, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
        raise NotImplementedError(
            f"{func._schema.name}: CUDA has no {DTYPE_NAMES[self.dtype]} kernel of it; "
            "compute it in FP32 (x.float(), or its module by an override)"
        )

    def _widen(self, value: Any) -> Any:
        half, scratch = self.dtype, self._scratch
        wide = _each_tensor(value, lambda t: scratch.float(t) if t.dtype is half else t)
        return _each(torch.dtype, wide, lambda dtype: F32 if dtype is half else dtype)


class _Functions(TorchFunctionMode):
    """Sends 16-bit recurrent layers, and those autocast would cast, past the fused CPU kernels.

    Needed above autograd: `torch.lstm` never reaches a dispatch mode whole, and under float16
    autocast without a projection it asks for a oneDNN kernel that most CPUs lack (RuntimeError).

    Args:
        counts: how often a layer was computed here, by (kind, "forward" or "backward").

    Attributes:
        loss_dtype: dtype in which losses of 16-bit tensors are computed, see `Losses`; None: as
            they are.
    """

    def __init__(self, dtype: torch.dtype, counts: Counter[tuple[str, str]]) -> None:
        super().__init__()
        self._dtype = dtype
        self._counts = counts
        self.loss_dtype: torch.dtype | None = None

    def __torch_function__(self, func, types, args=(), kwargs=None) -> Any:
        kwargs = kwargs or {}
        if func not in _RECURRENT:
            if self.loss_dtype is not None and func in _LOSSES:
                args, kwargs = _each_tensor((args, kwargs), self._for_loss)
            return func(*args, **kwargs)
        if torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is self._dtype:
            args, kwargs = _each_tensor((args, kwargs), self._as_autocast)
        dtypes = {t.dtype for t in _tensors((args, kwargs)) if t.is_cpu}
        if self._dtype not in dtypes or F32 in dtypes:  # of both: an error, and torch says so
            return func(*args, **kwargs)
        with torch.autocast("cpu", enabled=False):
            if func in LAYERS and not kwargs:
                call = RecurrentCall.of(args)
                if call.batch_sizes is None and call.inputs.numel():
                    return emulated_recurrent(func, call, self._counts)
            return func(*args, **kwargs)

    def _for_loss(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.loss_dtype) if tensor.dtype is self._dtype else tensor

    def _as_autocast(self, tensor: Tensor) -> Tensor:
        """A float32 CPU tensor in the emulated format, differentiably."""
        return tensor.to(self._dtype) if tensor.dtype is F32 and tensor.is_cpu else tensor


class Losses(TorchFunctionMode):
    """Within it the losses that a model computes itself are computed in `dtype`, as those outside
    of it are. Costs about a microsecond for each call of a function of torch."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, func, types, args=(), kwargs=None) -> Any:
        if func in _LOSSES:
            args, kwargs = _each_tensor((args, kwargs or {}), self._cast)
        return func(*args, **(kwargs or {}))

    def _cast(self, tensor: Tensor) -> Tensor:
        half = tensor.is_floating_point() and tensor.dtype.itemsize == 2
        return tensor.to(self.dtype) if half else tensor


_LOSSES = frozenset(
    getattr(F, name)
    for name in (
        *("cross_entropy", "nll_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits"),
        *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "ctc_loss"),
        *("gaussian_nll_loss", "poisson_nll_loss", "cosine_embedding_loss", "soft_margin_loss"),
        *("hinge_embedding_loss", "margin_ranking_loss", "multi_margin_loss"),
        *("multilabel_margin_loss", "multilabel_soft_margin_loss", "triplet_margin_loss"),
        "triplet_margin_with_distance_loss",
    )
)
_MATRIX = ("mm", "addmm", "bmm", "baddbmm")
_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
# These take 16-bit and float32 tensors together: the log-sum-exp, statistics, parameters of norms.
_MIXED = frozenset(
    f"""
    {_ATTENTION}_backward _batch_norm_with_update _fused_rms_norm _fused_rms_norm_backward
    _native_batch_norm_legit batch_norm_backward native_batch_norm native_batch_norm_backward
    native_group_norm native_group_norm_backward native_layer_norm native_layer_norm_backward
    """.split()
)
# What Tensor Cores are for, and sums over many tokens.
PRODUCTS = (
    *(*_MATRIX, "mv", "addmv", "dot", "vdot", "addbmm", "linear", "_addmm_activation"),
    *("convolution", "convolution_overrideable", "conv_tbc", "_trilinear", "addr"),
    *("convolution_backward", "convolution_backward_overrideable", "conv_tbc_backward"),
    *("embedding_dense_backward", "_embedding_bag", "_embedding_bag_forward_only"),
    *("_embedding_bag_backward", "_embedding_bag_dense_backward"),
    *("_native_multi_head_attention", "_transformer_encoder_layer_fwd"),
    *(_ATTENTION, f"{_ATTENTION}_backward"),
)
# Native in 16 bits, tested operation by operation: what only moves or selects numbers, and what
# computes in float32 inside. Element-wise functions (torch.Tag.pointwise) are too, but for _COARSE.
_NATIVE = frozenset(
    """
    _adaptive_avg_pool2d _chunk_cat _indices _local_scalar_dense _nnz _pack_padded_sequence
    _pack_padded_sequence_backward _prelu_kernel _resize_output_ _sparse_mm_reduce_impl
    _sparse_mm_reduce_impl_backward _to_copy _to_dense _to_sparse _unique2 _unsafe_view
    _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d _values
    adaptive_max_pool2d adaptive_max_pool3d alias_copy all allclose amax amin aminmax any arange
    argmax argmin as_strided_ as_strided_copy as_strided_scatter avg_pool2d bincount block_diag
    bucketize cat channel_shuffle constant_pad_nd copy copy_ count_nonzero cummax cummin diag_embed
    diagonal_copy diagonal_scatter elu_backward embedding empty empty_like empty_permuted
    empty_strided expand_copy eye fill fill_ flip full full_like gather glu hardshrink_backward
    hardsigmoid_backward hardswish hardswish_backward hardtanh_backward hash_tensor im2col index
    index_copy index_copy_ index_fill index_fill_ index_select isin kthvalue leaky_relu_backward
    lift_fresh linspace logspace masked_fill masked_fill_ masked_scatter masked_scatter_
    masked_select max max_pool2d_with_indices max_pool3d_with_indices max_unpool2d max_unpool3d mean
    median min mode nanmedian narrow_copy new_empty new_empty_strided new_full new_ones new_zeros
    nonzero nonzero_static ones ones_like permute_copy pixel_shuffle pixel_unshuffle put
    reflection_pad1d reflection_pad2d reflection_pad3d relu repeat replication_pad1d
    replication_pad2d replication_pad3d resize_ resize_as_ roll rot90 scalar_tensor searchsorted
    select_backward select_scatter set_ slice_backward slice_scatter softplus_backward
    softshrink_backward sort split_copy split_with_sizes_copy squeeze_ squeeze_copy stack sum t_
    t_copy take topk transpose_ transpose_copy tril tril_ triu triu_ unbind_copy unfold_copy
    unique_consecutive unique_dim unsafe_split unsafe_split_with_sizes unsqueeze_ unsqueeze_copy
    upsample_nearest1d upsample_nearest2d upsample_nearest3d view_copy zero_ zeros zeros_like
    """.split()
)
# Element-wise, but the native 16-bit kernel rounds on the way.
_COARSE = frozenset(
    """
    digamma hypot ldexp log_sigmoid_backward logit logit_backward mvlgamma polygamma pow rsqrt
    sigmoid_backward special_entr special_i0e special_i1 special_i1e special_xlog1py xlogy
    """.split()
)
# Native with a tensor; of a number the CPU's kernel takes the 16-bit rounding, and of a sparse
# tensor it has none.
_WITH_NUMBER = frozenset({"add", "add_", "sub", "sub_", "rsub"})
# CUDA has no 16-bit kernel of these, whatever a CPU has (torch's operator database).
_ABSENT = frozenset(
    """
    _cdist_backward _cdist_forward _ctc_loss _ctc_loss_backward _pdist_backward _pdist_forward
    _linalg_det _linalg_eigh _linalg_slogdet _linalg_solve_ex _linalg_svd _lu_with_info
    cholesky cholesky_inverse cholesky_solve geqrf histc igamma igammac lu_solve lu_unpack ormqr
    linalg_cholesky_ex linalg_eig linalg_eigvals linalg_householder_product linalg_inv_ex
    linalg_ldl_factor_ex linalg_ldl_solve linalg_lstsq linalg_lu linalg_lu_factor_ex linalg_lu_solve
    linalg_qr linalg_solve_triangular triangular_solve
    special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1
    special_chebyshev_polynomial_t special_chebyshev_polynomial_u special_chebyshev_polynomial_v
    special_chebyshev_polynomial_w special_erfcx special_hermite_polynomial_h
    special_hermite_polynomial_he special_laguerre_polynomial_l special_legendre_polynomial_p
    special_log_ndtr special_modified_bessel_i0 special_modified_bessel_i1
    special_modified_bessel_k0 special_modified_bessel_k1 special_ndtri
    special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1
    special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u
    special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w
    special_spherical_bessel_j0 special_zeta
    """.split()
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
        if numel < self.SMALLEST or x.layout is not torch.strided or not _dense(x):
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


def _each(kind: type[T], value: Any, convert: Callable[[T], Any]) -> Any:
    """`value` with everything of that kind in it, also in nested lists, tuples and dicts,
    converted."""
    if isinstance(value, kind):
        return convert(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_each(kind, v, convert) for v in value)
    if isinstance(value, dict):
        return {key: _each(kind, v, convert) for key, v in value.items()}
    return value


_each_tensor = functools.partial(_each, Tensor)


def _is_dense_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided


def _tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _tensors(inner)
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))


def _signature(value: Any) -> Iterator[Any]:
    """What of the arguments may decide on the dtype of a result."""
    if isinstance(value, Tensor):
        yield value.dtype, value.dim() == 0
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _signature(inner)
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from _signature(inner)
    elif isinstance(value, (bool, torch.dtype)):
        yield value
    else:
        yield type(value)


@functools.cache
def route_of(func: OpOverload) -> tuple[str, Route] | None:
    """(operation name as counted, function that runs it), or None where it runs as it is."""
    name = func._schema.name.partition("::")[2]
    base = name.removesuffix("_")
    if name in PRODUCTS or base in _MATRIX + ("addmv", "addbmm"):
        pass  # before the rest: attention draws random numbers too
    elif base in _ABSENT:
        return name, HalfEmulation._refuse
    elif func.namespace not in ("aten", "torchvision") or func.is_view or name in _NATIVE:
        return None
    elif name.startswith(("_foreach_", "_fused_", "_amp_")):
        return None  # the update, which is emulated nowhere
    elif torch.Tag.nondeterministic_seeded in func.tags and base != "rrelu_with_noise":
        return None
    elif torch.Tag.pointwise in func.tags and base not in _COARSE and name not in _WITH_NUMBER:
        return None
    elif base == "scatter" and "reduce" not in func._overloadname:
        return None
    run: Route = HalfEmulation._plain
    if base in ("index_put", "_index_put_impl", "_unsafe_index_put"):
        run = HalfEmulation._index_put
    elif name in ("native_batch_norm", "native_batch_norm_backward"):
        run = HalfEmulation._batch_norm
    elif func._schema.is_mutable:
        run = HalfEmulation._writing
    elif name in _MATRIX and func._overloadname == "default":
        run = HalfEmulation._matrix
    elif name == _ATTENTION:
        run = HalfEmulation._attention
    return name, run
