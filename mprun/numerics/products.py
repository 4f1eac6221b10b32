"""Which operations are products (what Tensor Cores do), and how much work one call is."""

import math
from typing import Any

from torch import Tensor, nn

# One call is a whole recurrent layer; "lstm" is the name of the emulated one.
RECURRENT = frozenset(
    {
        "lstm",
        "_cudnn_rnn",
        "_cudnn_rnn_backward",
        "mkldnn_rnn_layer",
        "mkldnn_rnn_layer_backward",
        "miopen_rnn",
        "miopen_rnn_backward",
    }
)
_MATRIX = frozenset({"mm", "addmm", "bmm", "baddbmm", "addmm_", "baddbmm_", "_addmm_activation"})
_VECTOR = frozenset({"mv", "addmv", "addmv_", "dot", "vdot"})
_CONVOLUTIONS = frozenset(
    {
        "convolution",
        "convolution_overrideable",
        "cudnn_convolution",
        "cudnn_convolution_transpose",
        "mkldnn_convolution",
        "convolution_backward",
        "convolution_backward_overrideable",
    }
)
_ATTENTION = frozenset(
    f"_scaled_dot_product_{kind}_attention{ending}"
    for kind in ("flash", "efficient", "cudnn", "fused")
    for ending in ("", "_backward", "_for_cpu", "_for_cpu_backward")
)
PRODUCTS = _MATRIX | _VECTOR | _CONVOLUTIONS | _ATTENTION | RECURRENT | {"linear", "addbmm"}


def flops(name: str, args: tuple, kwargs: dict[str, Any], result: Any) -> int:
    """Floating-point operations of one call, 2 for a multiplication and addition.

    Of matrix products and convolutions with their gradients; 0 for everything else (recurrent
    layers: `recurrent_flops`; attention is not counted).
    """
    if name in _MATRIX | {"linear"}:
        left = args[0] if name in ("mm", "bmm", "linear") else args[1]
        return 2 * result.numel() * left.shape[-1]
    if name in ("convolution", "convolution_overrideable"):
        return _convolution(result, args[0], args[1], transposed=args[6])
    if name in ("convolution_backward", "convolution_backward_overrideable"):
        mask = kwargs.get("output_mask", args[-1])
        one = _convolution(args[0], args[1], args[2], transposed=args[7])
        return one * (bool(mask[0]) + bool(mask[1]))
    return 0


def _convolution(outputs: Tensor, inputs: Tensor, weight: Tensor, transposed: bool) -> int:
    # Every element of the larger side meets each weight of one channel once. Weight: [outputs,
    # inputs / groups, ...], transposed [inputs, outputs / groups, ...].
    many = inputs if transposed else outputs
    return 2 * many.numel() * math.prod(weight.shape[1:])


def recurrent_flops(layer: nn.RNNBase, inputs: Any) -> int:
    """Of one forward pass of nn.RNN, nn.LSTM or nn.GRU: each weight meets each time step once.

    inputs: [time, batch, features], unbatched or batch-first as the layer takes them, or packed.
    """
    data = getattr(inputs, "data", inputs) if not isinstance(inputs, Tensor) else inputs
    positions = data.numel() // data.shape[-1]
    return 2 * positions * sum(w.numel() for w in layer.parameters() if w.dim() == 2)
