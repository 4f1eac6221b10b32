"""FLOPs and bytes of one operation, by its arguments and results.

Rule: a kernel reads each input once and writes each output once; tensors written in place are read,
too; views, empty tensors and sizes cost nothing. A tensor counts with the memory that it covers: a
broadcast number is one number, overlapping windows are read once. The functions below are the
exceptions. Products are 2 FLOP per multiply-add; everything else counts only as traffic.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from mprun.numerics.trace import UNWRITTEN, Operation, operands, tensors_in
from mprun.precision.flops import convolution_flops

# (kind, FLOPs, bytes) of one kernel
Cost = tuple[str, int, int]
# (kind, dtype, flops, bytes, launches, bytes that no fusion saves; None: those of its kind): work
# that no dispatcher sees writes its rows with this.
Write = Callable[[str, torch.dtype, int, int, int, int | None], "OperationCosts"]


@dataclass(slots=True)
class OperationCosts:
    """`launches` kernels of one kind that together do `flops` and move `bytes`."""

    kind: str
    phase: str  # "forward", "backward" or "update"
    form: str  # number format of the products, "" if there are none
    flops: int
    bytes: int
    launches: int = 1
    # Bytes left if a neighbouring BatchNorm kernel folds this work; None: none can.
    folded_bytes: int | None = None
    # Bytes left whatever kernels fold it: those of products and of the update.
    least_bytes: int = 0

    def seconds(self, flops_per_s: dict[str, float], bytes_per_s: float) -> tuple[float, float]:
        """Return the times of products and traffic; the row takes the longer one."""
        products = self.flops / flops_per_s[self.form] if self.flops else 0.0
        return products, self.bytes / bytes_per_s

    def least_seconds(self, flops_per_s: dict[str, float], bytes_per_s: float) -> float:
        """Return the time that no fusion saves."""
        return max(self.seconds(flops_per_s, bytes_per_s)[0], self.least_bytes / bytes_per_s)


_FREE = UNWRITTEN.union(
    "_unsafe_view _reshape_alias lift_fresh lift set_ is_same_size sym_size sym_numel sym_stride "
    "sym_storage_offset _has_compatible_shallow_copy_type _local_scalar_dense".split()
)
# They shape a tensor after their argument, which is not read.
_SHAPED_AFTER = set(
    "zeros_like ones_like full_like rand_like randn_like new_zeros new_ones new_full".split()
)
_NAMES = {  # kind -> operators with other names
    "matrix product": "mm addmm bmm baddbmm",
    "cast": "_to_copy",
    "copy": "copy_ clone _foreach_copy_",
    "add": "add_",
    "mul": "_foreach_mul _foreach_mul_",
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
for _kind in ("pooling", "dropout", "layer norm"):
    _KINDS |= {f"{name}_backward": f"{_kind} backward" for name in _NAMES[_kind].split()}


# Arguments of fused optimizers that they change: parameters and state.
_STATE_LISTS: dict[str, tuple[int, ...]] = dict.fromkeys(("_fused_sgd_", "_fused_adagrad_"), (0, 2))
_STATE_LISTS |= dict.fromkeys(("_fused_adam_", "_fused_adamw_"), (0, 2, 3, 4))


def bytes_of(tensor: Tensor) -> int:
    """Return the bytes of memory that `tensor` covers, at most those of its storage."""
    numbers = prod(n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    if 0 in tensor.shape:
        return 0
    reach = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return min(numbers, reach) * tensor.itemsize


def costs(operation: Operation) -> Iterator[Cost]:
    """Yield the cost of each kernel of an operation; nothing for a view."""
    func, name = operation.func, operation.name
    if func.namespace not in ("aten", "torchvision", "mprun") or name in _FREE or func.is_view:
        return
    if name in _SPECIAL:
        yield from _SPECIAL[name](operation)
        return
    given = list(operands(operation))
    read = [one.tensor for one in given if one.read and name not in _SHAPED_AFTER]
    in_place = [one.tensor for one in given if one.written]
    size = _total(read, in_place or operation.result)
    yield _KINDS.get(name, name), operation.flops, size


def _total(*trees: object) -> int:
    return sum(bytes_of(tensor) for tree in trees for tensor in tensors_in(tree))


def _convolution(call: Operation) -> Iterator[Cost]:
    inputs, weight, bias, *_ = call.args
    yield "convolution", call.flops, _total(inputs, weight, call.result)
    if bias is not None:
        # ATen/native/Convolution.cpp adds the bias in place, after cuDNN.
        yield "convolution bias", 0, 2 * _total(call.result) + _total(bias)


def _convolution_backward(call: Operation) -> Iterator[Cost]:
    gradient, inputs, weight, *_ = call.args
    work = convolution_flops(gradient, inputs, weight, transposed=call.args[7])
    of_inputs, of_weight, of_bias = call.args[10]
    if of_inputs:
        yield "convolution backward", work, _total(gradient, weight, call.result[0])
    if of_weight:
        yield "convolution weight gradient", work, _total(gradient, inputs, call.result[1])
    if of_bias:
        yield "convolution bias gradient", 0, _total(gradient, call.result[2])


def _batch_norm(call: Operation) -> Iterator[Cost]:
    args = call.args
    once = _total(args[:5], call.result)
    # cuDNN and ATen read a big tensor twice, first for statistics, then for the values.
    yield "batch norm", 0, once + (_total(args[0], args[3:5]) if args[5] else 0)


def _batch_norm_backward(call: Operation) -> Iterator[Cost]:
    again = _total(call.args[:2]) if call.args[7] else 0
    yield "batch norm backward", 0, _total(call.args, call.result) + again


def _scaled_product(call: Operation) -> Iterator[Cost]:
    """Count a product alone: its operands were written by their casts (`casts`)."""
    a, b, *_, decoded = call.args
    if decoded is None:
        form = "int8" if a.dtype is torch.int8 else "fp8"
        yield f"{form} product", call.flops, _total(call.args[:4], call.result)
        return
    operands = (a.numel() + b.numel()) * decoded.itemsize
    # Its sums leave the kernel in FP32.
    yield "matrix product", call.flops, operands + 4 * call.result.numel()
    if call.result.element_size() < 4:
        yield "cast", 0, 4 * call.result.numel() + _total(call.result)


def _fused_update(call: Operation) -> Iterator[Cost]:
    """Count torch's fused optimizers: parameters and state in place, gradients read."""
    unscales = call.kwargs.get("grad_scale") is not None  # then it writes gradients, too
    state = sum(_total(call.args[number]) for number in _STATE_LISTS[call.name])
    yield "update", 0, 2 * state + _total(call.args[1]) * (2 if unscales else 1)


def _rows_written(call: Operation) -> Iterator[Cost]:
    yield "row update", 0, _total(call.args[2]) + 2 * _total(call.args[3])


def _rows_read(call: Operation) -> Iterator[Cost]:
    """Count as many rows of the table as there are ids."""
    ids = call.args[1 if call.name == "embedding" else 2]
    yield call.name, 0, _total(ids) + 2 * _total(call.result)


_SPECIAL: dict[str, Callable[[Operation], Iterable[Cost]]] = {
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "native_batch_norm": _batch_norm,
    "_native_batch_norm_legit": _batch_norm,
    "native_batch_norm_backward": _batch_norm_backward,
    "scaled_mm": _scaled_product,
    "_scaled_dot_product_flash_attention_for_cpu": lambda call: [
        ("attention", call.flops, _total(call.args[:3], call.result[0]))
    ],
    "_scaled_dot_product_flash_attention_for_cpu_backward": lambda call: [
        ("attention backward", call.flops, _total(call.args[:5], call.result))
    ],
    "embedding": _rows_read,
    "index_select": _rows_read,
    "index_copy_": _rows_written,
    "index_add_": _rows_written,
    # A dense gradient: zeros everywhere, then the step's rows are added to it.
    "embedding_dense_backward": lambda call: [
        ("embedding backward", 0, _total(call.result)),
        ("embedding backward", 0, 2 * _total(call.args[0]) + _total(call.args[1])),
    ],
    # One number of each row; the backward pass first writes zeros everywhere.
    "nll_loss_forward": lambda call: [
        ("nll_loss", 0, 2 * _total(call.args[1]) + _total(call.result))
    ],
    "nll_loss_backward": lambda call: [
        ("nll_loss backward", 0, _total(call.result)),
        ("nll_loss backward", 0, _total(call.args[0]) + 2 * _total(call.args[3])),
    ],
    **dict.fromkeys(_STATE_LISTS, _fused_update),
}
