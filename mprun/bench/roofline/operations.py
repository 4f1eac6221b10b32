"""FLOPs and bytes of one operation, by its arguments and results; a `Row` is what it comes to.

Rule: a kernel reads each input once and writes each output once; what is written in place is read
too; views, empty tensors and sizes cost nothing. A tensor counts with the memory that it covers: a
number that is broadcast is one, a window that overlaps its neighbours is read once. Exceptions are
the functions below. Products are 2 FLOP per multiply-add, everything else counts as traffic alone.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from mprun.numerics.operation_summary import attention_flops

aten = torch.ops.aten

# (kind, FLOPs, bytes) of one kernel
Cost = tuple[str, int, int]
# (kind, dtype, flops, bytes, launches): whatever no dispatcher sees writes its rows by this.
Write = Callable[[str, torch.dtype, int, int, int], None]
# How products are computed, by dtype; FP32 ones may be in TF32, which the counter knows.
FORMATS = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
# Both run at one rate (NVIDIA H100 data sheet).
FORMATS |= dict.fromkeys((torch.float8_e4m3fn, torch.float8_e5m2), "fp8")


@dataclass(frozen=True, slots=True)
class Row:
    """`launches` kernels of one kind that together do `flops` and move `bytes`.

    Attributes:
        kind: "convolution", "batch norm backward", "cast", ...
        phase: "forward", "backward" or "update".
        form: number format of the products, "" where there are none.
        folded_bytes: what is left of the bytes where the kernel's work is folded into one beside
            it, of a BatchNorm or of an FP8 cast; None: it cannot be.
    """

    kind: str
    phase: str
    form: str
    flops: int
    bytes: int
    launches: int = 1
    folded_bytes: int | None = None

    def seconds(self, flops_per_s: dict[str, float], bytes_per_s: float) -> tuple[float, float]:
        """(time of the products, time of the traffic); the longer one is the row's."""
        products = self.flops / flops_per_s[self.form] if self.flops else 0.0
        return products, self.bytes / bytes_per_s


_FREE = set(
    """
    empty empty_like empty_strided new_empty new_empty_strided _unsafe_view _reshape_alias
    lift_fresh lift resize_ set_ is_same_size _has_compatible_shallow_copy_type
    sym_size sym_numel sym_stride sym_storage_offset _local_scalar_dense
    """.split()
)
# What is there before is overwritten without being read, and so is the argument after which a
# tensor is shaped.
_WRITES_ONLY = set(
    """
    zero_ fill_ copy_ _foreach_copy_ _foreach_zero_ uniform_ normal_ bernoulli_ exponential_
    random_ zeros_like ones_like full_like rand_like randn_like new_zeros new_ones new_full
    """.split()
)
_NAMES = {  # kind -> operators that are called otherwise
    "matrix product": "mm addmm bmm baddbmm",
    "cast": "_to_copy",
    "copy": "copy_ clone _foreach_copy_",
    "add": "add_",
    "relu": "relu_",
    "relu backward": "threshold_backward",
    "leaky_relu": "leaky_relu_",
    "pooling": "max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d",
    "embedding backward": "embedding_dense_backward",
    "log_softmax": "_log_softmax",
    "log_softmax backward": "_log_softmax_backward_data",
    "unscale and check": "_amp_foreach_non_finite_check_and_unscale_",
    "dropout": "native_dropout",
    "layer norm": "native_layer_norm",
}
_KINDS = {name: kind for kind, names in _NAMES.items() for name in names.split()}
_KINDS |= {
    f"{name}_backward": f"{kind} backward"
    for kind in ("pooling", "dropout", "layer norm")
    for name in _NAMES[kind].split()
}


def bytes_of(tensor: Tensor) -> int:
    """The bytes of memory that `tensor` covers, at most those of its storage."""
    numbers = prod(n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    if 0 in tensor.shape:
        return 0
    reach = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return min(numbers, reach) * tensor.itemsize


def tensors_in(tree: object) -> Iterator[Tensor]:
    """Every tensor in nested lists, tuples and mappings."""
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def costs(operator: OpOverload, args: tuple, kwargs: dict, results: object) -> Iterator[Cost]:
    """What each kernel of an operation costs; nothing for a view."""
    name = operator._schema.name.partition("::")[2]
    if (
        operator.namespace not in ("aten", "torchvision", "mprun")
        or name in _FREE
        or _is_view(operator)
    ):
        return
    if name in _SPECIAL:
        yield from _SPECIAL[name](args, kwargs, results)
        return
    formula = flop_registry.get(operator.overloadpacket)
    flops = 0 if formula is None else int(formula(*args, **kwargs, out_val=results))
    yield _KINDS.get(name, name), flops, _traffic(operator, name, args, kwargs, results)


def _is_view(operator: OpOverload) -> bool:
    returns = operator._schema.returns
    aliases = [r.alias_info for r in returns if r.alias_info is not None]
    return bool(aliases) and not any(alias.is_write for alias in aliases)


def _traffic(operator: OpOverload, name: str, args: tuple, kwargs: dict, results: object) -> int:
    """Bytes by the rule: read, written, and written in place."""
    schema, overwrites = operator._schema, name in _WRITES_ONLY
    positional = [a for a in schema.arguments if not a.kwarg_only]
    given = list(zip(positional, args, strict=False))
    given += [(a, kwargs[a.name]) for a in schema.arguments if a.name in kwargs]
    read: list[object] = []
    in_place: list[Tensor] = []
    for argument, value in given:
        if argument.alias_info is not None and argument.alias_info.is_write:
            in_place += tensors_in(value)
            unread = overwrites or argument.is_out
        else:
            unread = overwrites and argument.name == "self"
        read += [] if unread else [value]
    return _total(*read) + (_total(in_place) if in_place else _total(results))


def _total(*trees: object) -> int:
    return sum(bytes_of(tensor) for tree in trees for tensor in tensors_in(tree))


def _convolution(args, kwargs, results) -> Iterator[Cost]:
    inputs, weight, bias, *_ = args
    flops = _convolution_flops(inputs, weight, results, args[6])
    yield "convolution", flops, _total(inputs, weight, results)
    if bias is not None:
        # ATen/native/Convolution.cpp adds it in place, after cuDNN.
        yield "convolution bias", 0, 2 * _total(results) + _total(bias)


def _convolution_backward(args, kwargs, results) -> Iterator[Cost]:
    gradient, inputs, weight, *_ = args
    flops = _convolution_flops(inputs, weight, gradient, args[7])
    of_inputs, of_weight, of_bias = args[10]
    if of_inputs:
        yield "convolution backward", flops, _total(gradient, weight, results[0])
    if of_weight:
        yield "convolution weight gradient", flops, _total(gradient, inputs, results[1])
    if of_bias:
        yield "convolution bias gradient", 0, _total(gradient, results[2])


def _convolution_flops(inputs: Tensor, weight: Tensor, outputs: Tensor, transposed: bool) -> int:
    """Of each of the three passes; torch's own formula counts groups twice in a weight gradient."""
    places = prod((inputs if transposed else outputs).shape[2:])
    return 2 * len(inputs) * places * weight.numel()


def _batch_norm(args, kwargs, results) -> Iterator[Cost]:
    training = args[5]
    once = _total(args[:5]) + _total(results)
    # Statistics first, then the values: cuDNN and ATen read a big tensor twice.
    yield "batch norm", 0, once + (_total(args[0]) + _total(args[3:5]) if training else 0)


def _batch_norm_backward(args, kwargs, results) -> Iterator[Cost]:
    again = _total(args[:2]) if args[7] else 0
    yield "batch norm backward", 0, _total(args) + again + _total(results)


def _attention(args, kwargs, results) -> Iterator[Cost]:
    flops = attention_flops(args[:3], 1, 1, causal=_given(args, 4, kwargs))
    yield "attention", flops, _total(args[:3], results[0])


def _attention_backward(args, kwargs, results) -> Iterator[Cost]:
    # Scores again, then the gradients of values, scores, queries and keys.
    flops = attention_flops(args[1:4], 3, 2, causal=_given(args, 7, kwargs))
    yield "attention backward", flops, _total(args[:5], results)


def _given(args: tuple, place: int, kwargs: dict) -> bool:
    return bool(args[place] if len(args) > place else kwargs.get("is_causal", False))


def _scaled_product(args, kwargs, results) -> Iterator[Cost]:
    """cuBLAS takes the left matrix by rows and the right by columns: what lies otherwise is copied
    (`mprun.precision.scaled_products`)."""
    a, b = args[:2]
    for operand in (a, b.t()):
        if not operand.is_contiguous():
            yield "fp8 transpose", 0, 2 * bytes_of(operand)
    yield "fp8 product", 2 * results.numel() * a.shape[-1], _total(args[:4], results)


def _fused_update(state_lists: Iterable[int]) -> Callable:
    """torch's fused optimizers: parameters and state in place, gradients read; written as well
    only where they are unscaled on the way."""

    def cost(args, kwargs, results) -> Iterator[Cost]:
        unscales = kwargs.get("grad_scale") is not None
        state = sum(_total(args[number]) for number in state_lists)
        yield "update", 0, 2 * state + _total(args[1]) * (2 if unscales else 1)

    return cost


def _rows_written(args, kwargs, results) -> Iterator[Cost]:
    yield "row update", 0, _total(args[2]) + 2 * _total(args[3])


_SPECIAL: dict[str, Callable[[tuple, dict, Any], Iterable[Cost]]] = {
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "native_batch_norm": _batch_norm,
    "_native_batch_norm_legit": _batch_norm,
    "native_batch_norm_backward": _batch_norm_backward,
    "scaled_mm": _scaled_product,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    # Rows of a table: as many as there are ids, not the table.
    "embedding": lambda args, _, out: [("embedding", 0, _total(args[1]) + 2 * _total(out))],
    "index_select": lambda args, _, out: [("index_select", 0, _total(args[2]) + 2 * _total(out))],
    "index_copy_": _rows_written,
    "index_add_": _rows_written,
    # A dense gradient: zeros everywhere, then the rows of the step are added up in it.
    "embedding_dense_backward": lambda args, _, out: [
        ("embedding backward", 0, _total(out)),
        ("embedding backward", 0, 2 * _total(args[0]) + _total(args[1])),
    ],
    # One number of each row; in the backward pass zeros everywhere before.
    "nll_loss_forward": lambda args, _, out: [("nll_loss", 0, 2 * _total(args[1]) + _total(out))],
    "nll_loss_backward": lambda args, _, out: [
        ("nll_loss backward", 0, _total(out)),
        ("nll_loss backward", 0, _total(args[0]) + 2 * _total(args[3])),
    ],
    "_fused_sgd_": _fused_update((0, 2)),
    "_fused_adam_": _fused_update((0, 2, 3, 4)),
    "_fused_adamw_": _fused_update((0, 2, 3, 4)),
    "_fused_adagrad_": _fused_update((0, 2)),
}
