"""Which operations are products (what Tensor Cores do), and how much work one call is.

Did I get what I asked for? What `FirstStep` saw, in at most ten lines.
"""

import math
from collections.abc import Mapping
from itertools import chain
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


_NAMES = 5  # operations named in a line
_SHORT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
_KINDS = (
    "parameters",
    "master_weights",
    "gradients",
    "gradients_in_update",
    "optimizer_state",
    "buffers",
    "activations",
    "weight_copies",
)


def lines(
    operations: Mapping, memory: Mapping, flags: Mapping, mode: str, device: str
) -> list[str]:
    """At most ten lines of text: products, other operations, casts, flags, memory, warning.

    operations, memory: as in run.json. flags: as `read_math_flags` gives them. device: its type.
    """
    text = [f"step {operations['step']} of {mode} on {device} ran in:"]
    rows = operations["rows"]
    products = [row for row in rows if row["operation"] in PRODUCTS]
    text += _products(products)[:3]
    for phases, label in ((("forward", "backward"), "other"), (("update",), "update")):
        others = [
            row
            for row in rows
            if row["phase"] in phases and row not in products and "->" not in row["dtype"]
        ]
        if others:
            text.append(f"  {label:<9}{_by_dtype(others, 3)}")
    casts = _totals([row for row in rows if "->" in row["dtype"]], "dtype")
    if casts:
        parts = [f"{name} {_count(elements).strip()}" for name, elements in casts.items()]
        text.append(f"  casts    {', '.join(parts)} elements")
    text.append(f"  flags    {flag_line(flags, device)}")
    text.append(f"  memory   {memory_line(memory)}")
    if operations["not_in_16_bits"]:
        text.append(
            f"  WARNING  FP32 products that {mode} did not ask for: "
            f"{'; '.join(operations['not_in_16_bits'][:4])}"
        )
    return text


def flag_line(flags: Mapping, device: str) -> str:
    """The flags that change the numbers of products on this kind of device."""
    library = "cuda.matmul cudnn.conv cudnn.rnn" if device == "cuda" else "mkldnn.matmul"
    fp32 = {name: flags.get(f"{name}.fp32_precision", "?") for name in library.split()}
    same = set(fp32.values())
    text = "FP32 products " + (
        same.pop() if len(same) == 1 else ", ".join(f"{k} {v}" for k, v in fp32.items())
    )
    if device == "cuda":
        reduced = [k for k, v in flags.items() if k.startswith("cuda.matmul.allow") and v]
        text += f", 16-bit products reduced in {'16 bits' if reduced else 'FP32'}"
        text += f", cudnn.benchmark {'on' if flags.get('cudnn.benchmark') else 'off'}"
    return text + f", deterministic {'on' if flags.get('deterministic_algorithms') else 'off'}"


def memory_line(memory: Mapping) -> str:
    """Every kind with its bytes by dtype, integers (indices, counters) left out."""
    parts = []
    for kind in _KINDS:
        sizes = {
            _SHORT.get(dtype, dtype): size
            for dtype, size in memory.get(kind, {}).items()
            if "int" not in dtype
        }
        if sizes:
            each = " + ".join(f"{name} {_bytes(size)}" for name, size in sizes.items())
            parts.append(f"{kind.replace('_', ' ')} {each}")
    return ", ".join(parts)


def _products(rows: list[Mapping]) -> list[str]:
    """A line for each dtype with its share of the floating-point operations."""
    if not rows:
        return ["  products none seen"]
    total = sum(row.get("flops", 0) for row in rows) or 1
    by_dtype: dict[str, list[Mapping]] = {}
    for row in rows:
        by_dtype.setdefault(row["dtype"], []).append(row)
    flops = {name: sum(r.get("flops", 0) for r in found) for name, found in by_dtype.items()}
    text, label = [], "products"
    for name in sorted(by_dtype, key=lambda name: -flops[name]):
        names = list(dict.fromkeys(row["operation"] for row in by_dtype[name]))
        share = f"{100 * flops[name] / total:.3g} % of {_count(total)}FLOP"
        text.append(f"  {label:<9}{name} {share}: {_some(names)}")
        label = ""
    return text


def _by_dtype(rows: list[Mapping], names: int) -> str:
    parts = []
    for dtype in _totals(rows, "dtype"):
        own = [row for row in rows if row["dtype"] == dtype]
        parts.append(f"{dtype} {_some(list(_totals(own, 'operation')), names)}")
    return "; ".join(parts[:4])


def _totals(rows: list[Mapping], key: str) -> dict[str, int]:
    """Elements by the value of a key, the most first."""
    totals: dict[str, int] = {}
    for row in rows:
        totals[row[key]] = totals.get(row[key], 0) + row["elements"]
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


def _some(names: list[str], most: int = _NAMES) -> str:
    more = len(names) - most
    return ", ".join(chain(names[:most], [f"{more} more"] if more > 0 else []))


def _count(value: float) -> str:
    """ "1.2 M"; below 1000 with a blank behind, for the unit that follows."""
    unit = ""
    for unit in ("", "k", "M", "G", "T"):
        if value < 999.5 or unit == "T":
            break
        value /= 1000
    return f"{value:.3g} {unit}"


def _bytes(value: float) -> str:
    unit = ""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1023.5 or unit == "GiB":
            break
        value /= 1024
    return f"{value:.3g} {unit}"
