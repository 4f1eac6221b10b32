"""The operations of torch by name, as the CPU emulation of 16 bits treats them.

    products    `PRODUCTS`, which it counts; the `MATRIX` products have scratch memory
    native      the CPU's 16-bit kernel has the result of FP32, rounded once
    absent      CUDA has no 16-bit kernel
    others      computed in FP32

docs/reference/operations.md lists each operation of torch (benchmarks/operations_of_torch.py).
"""

import re

import torch

from mprun.torch_private import OpOverload


def _names(patterns: str) -> re.Pattern[str]:
    """Compile a pattern for names that one of the patterns matches as a whole."""
    return re.compile(rf"(?:{'|'.join(patterns.split())})\Z")


MATRIX = ("mm", "addmm", "bmm", "baddbmm")
# Its probabilities are not rounded between the two products, like on a GPU.
_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
# These take 16-bit and float32 tensors together: the log-sum-exp, statistics, parameters of norms.
MIXED = frozenset(
    f"""
    {_ATTENTION}_backward _batch_norm_with_update _fused_rms_norm _fused_rms_norm_backward
    _native_batch_norm_legit batch_norm_backward native_batch_norm native_batch_norm_backward
    native_group_norm native_group_norm_backward native_layer_norm native_layer_norm_backward
    """.split()
)
# The operations that Tensor Cores are built for, and sums over many tokens.
PRODUCTS = (
    *(*MATRIX, "mv", "addmv", "dot", "vdot", "addbmm", "linear", "_addmm_activation"),
    *("convolution", "convolution_overrideable", "conv_tbc", "_trilinear", "addr"),
    *("convolution_backward", "convolution_backward_overrideable", "conv_tbc_backward"),
    *("embedding_dense_backward", "_embedding_bag", "_embedding_bag_forward_only"),
    *("_embedding_bag_backward", "_embedding_bag_dense_backward"),
    *("_native_multi_head_attention", "_transformer_encoder_layer_fwd"),
    *(_ATTENTION, f"{_ATTENTION}_backward"),
)
# Native in 16 bits, tested operation by operation: those that only move or select numbers, or that
# compute in float32 inside. So are element-wise functions (torch.Tag.pointwise), except _COARSE.
_NATIVE = _names(
    r"""
    \w+_copy \w+_scatter_? copy_? index_(copy|fill)_? masked_fill_? masked_select tri[lu]_? fill_?
    (new_)?(empty|full|ones|zeros)(_like|_strided|_permuted)? zero_ eye arange linspace logspace
    scalar_tensor (arg|a)?(max|min) aminmax cum(max|min) (nan)?median mode kthvalue topk sort
    all any allclose isin bincount bucketize searchsorted count_nonzero nonzero(_static)?
    hash_tensor _?unique(2|_consecutive|_dim) index(_select)? take gather put embedding repeat flip
    roll rot90 cat stack block_diag diag_embed _chunk_cat constant_pad_nd
    (reflection|replication)_pad[123]d channel_shuffle pixel_(un)?shuffle im2col
    _unsafe_view unsafe_split(_with_sizes)? as_strided_ resize_(as_)? _resize_output_ set_ t_
    transpose_ (un)?squeeze_ lift_fresh _local_scalar_dense (select|slice)_backward
    _?upsample_nearest(_exact)?[123]d _pack_padded_sequence(_backward)?
    _indices _nnz _values _to_dense _to_sparse _sparse_mm_reduce_impl(_backward)? mean sum
    (_adaptive_)?avg_pool2d (adaptive_max_pool|max_unpool)[23]d max_pool[23]d_with_indices
    relu _prelu_kernel glu hardswish (elu|hardshrink|hardsigmoid|hardswish|hardtanh)_backward
    (leaky_relu|softplus|softshrink)_backward
    """
)
# Element-wise, but the native 16-bit kernel rounds in between, or approximates the function less
# closely (erf: to 5 units in FP16, 255 in BF16) or by other code than in FP32, which depends on the
# CPU. Limits are numbers that CUDA's kernels take in FP32, and may lie beyond the format.
_COARSE = _names(
    r"""
    a?(cos|sin|tan) (cos|sin|tan)h erfc? exp expm1 gelu(_backward)? lgamma log(10|1p|2)? sqrt
    clamp(_max|_min)? clip hardtanh
    digamma hypot ldexp log_sigmoid_backward logit(_backward)? mvlgamma polygamma pow rsqrt
    sigmoid_backward special_(entr|i0e|i1|i1e|xlog1py) xlogy
    """
)
# Native with a tensor. The CPU's kernel rounds a number, and `alpha`, to 16 bits; it has no kernel
# for a sparse tensor.
WITH_NUMBER = frozenset({"add", "add_", "sub", "sub_", "rsub"})
# CUDA has no 16-bit kernel for these, even if a CPU has one (torch's operator database).
_ABSENT = _names(
    r"""
    _(c|p)dist_(backward|forward) _ctc_loss(_backward)? histc igammac? cholesky(_inverse|_solve)?
    _linalg_(det|eigh|slogdet|solve_ex|svd) linalg_(eig|eigvals|lstsq|qr|householder_product)
    linalg_(cholesky|inv|ldl_factor|lu_factor)_ex linalg_(lu|ldl_solve|lu_solve|solve_triangular)
    _lu_with_info lu_(solve|unpack) geqrf ormqr triangular_solve
    special_\w+_polynomial_\w+ special_\w*bessel_\w+ special_(airy_ai|erfcx|log_ndtr|ndtri|zeta)
    """
)


def is_product(name: str) -> bool:
    """Return whether an operation is one of `PRODUCTS`, or writes one in place."""
    return name in PRODUCTS or name.removesuffix("_") in (*MATRIX, "addmv", "addbmm")


def is_absent(name: str) -> bool:
    """Return whether CUDA has no 16-bit kernel of an operation."""
    return _ABSENT.match(name.removesuffix("_")) is not None


def is_native(func: OpOverload, name: str) -> bool:
    """Return whether an operation that is not a product is left to the CPU's kernels."""
    base = name.removesuffix("_")
    if func.namespace not in ("aten", "torchvision") or func.is_view or _NATIVE.match(name):
        return True
    if name.startswith(("_foreach_", "_fused_", "_amp_")):
        return True  # the update, which is emulated nowhere
    if torch.Tag.nondeterministic_seeded in func.tags and base != "rrelu_with_noise":
        return True
    if torch.Tag.pointwise in func.tags and not _COARSE.match(base) and name not in WITH_NUMBER:
        return True
    return base == "scatter" and "reduce" not in func.name()
