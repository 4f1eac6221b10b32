"""Floating-point operations of matrix products, convolutions, attention and recurrent layers."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from mprun.torch_private import OpOverload, schema_of

# One call is a whole recurrent layer; the first three are the emulated ones.
RECURRENT = frozenset(
    "lstm gru rnn _cudnn_rnn _cudnn_rnn_backward mkldnn_rnn_layer mkldnn_rnn_layer_backward "
    "miopen_rnn miopen_rnn_backward".split()
)
_LEFT_FIRST = frozenset("mm bmm linear mkldnn_linear scaled_mm _scaled_mm".split())
_MATRIX = _LEFT_FIRST.union("addmm baddbmm addmm_ baddbmm_ _addmm_activation".split())
_CONVOLUTION, _CONVOLUTION_BACKWARD = (
    (f"convolution{ending}", f"convolution{ending}_overrideable") for ending in ("", "_backward")
)
_OTHERS = (
    "mv addmv addmv_ dot vdot addbmm cudnn_convolution cudnn_convolution_transpose "
    "mkldnn_convolution".split()
)
_ATTENTION = frozenset(
    f"_scaled_dot_product_{kind}_attention{ending}"
    for kind in ("flash", "efficient", "cudnn", "fused")
    for ending in ("", "_backward", "_for_cpu", "_for_cpu_backward")
).union(("scaled_attention", "scaled_attention_backward"))
PRODUCTS = _MATRIX.union(_CONVOLUTION, _CONVOLUTION_BACKWARD, _OTHERS, _ATTENTION, RECURRENT)


def flops(
    name: str, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> int:
    """Return the floating-point operations of a call of `name`, 2 for a multiply-add.

    It counts matrix products, convolutions and attention (`attention_flops`) with their gradients,
    and 0 for everything else (recurrent layers: `recurrent_flops`).
    """
    if name in _MATRIX:
        left = args[0] if name in _LEFT_FIRST else args[1]
        return 2 * result.numel() * left.shape[-1]
    if name in _CONVOLUTION:
        return convolution_flops(result, args[0], args[1], transposed=args[6])
    if name in _CONVOLUTION_BACKWARD:
        mask = kwargs.get("output_mask", args[-1])
        one = convolution_flops(args[0], args[1], args[2], transposed=args[7])
        return one * (bool(mask[0]) + bool(mask[1]))
    if name in _ATTENTION:
        order = [argument.name for argument in schema_of(func).arguments]
        given = dict(zip(order, args, strict=False)) | {**kwargs}
        causal = bool(given.get("is_causal"))
        if "backward" in name:  # scores again; gradients of values, weights, queries and keys
            return attention_flops(args[1:4], 3, 2, causal=causal)
        return attention_flops(args[:3], 1, 1, causal=causal)
    return 0


def attention_flops(
    tensors: Sequence[Tensor], of_keys: int, of_values: int, *, causal: bool
) -> int:
    """Return the FLOPs of products over all pairs of a query and a key.

    With a causal mask only the remaining pairs count, as a fused kernel multiplies them (Dao, arXiv
    2307.08691, section 3.1); torch's FlopCounterMode counts all pairs. tensors: queries, keys,
    values, ``[batch, heads, tokens, size]`` each. of_keys, of_values: number of products over the
    size of keys, and of values.
    """
    query, key, value = tensors
    queries, keys = query.shape[-2], key.shape[-2]
    pairs = queries * keys
    if causal:
        few = min(queries, keys)
        pairs = few * (few + 1) // 2 + (queries - few) * keys
    pairs *= query.shape[:-2].numel()
    return 2 * pairs * (of_keys * query.shape[-1] + of_values * value.shape[-1])


def convolution_flops(outputs: Tensor, inputs: Tensor, weight: Tensor, *, transposed: bool) -> int:
    """Return the FLOPs of each of the three passes of a convolution."""
    # Every element of the larger side meets each weight of one channel once. Weight: [outputs,
    # inputs / groups, ...], transposed [inputs, outputs / groups, ...].
    many = inputs if transposed else outputs
    return 2 * many.numel() * math.prod(weight.shape[1:])


def recurrent_flops(layer: nn.RNNBase, inputs: Any) -> int:
    """Return the FLOPs of one forward pass of nn.RNN, nn.LSTM or nn.GRU on inputs that it takes."""
    data = inputs if isinstance(inputs, Tensor) else inputs.data  # packed
    positions = data.numel() // data.shape[-1]
    # Each weight meets each time step once.
    return 2 * positions * sum(w.numel() for w in layer.parameters() if w.dim() == 2)
