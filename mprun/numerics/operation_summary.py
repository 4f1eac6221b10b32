"""Summarize `operations.FirstStep` in at most ten lines: which operations ran in which dtype.

Products are the work of Tensor Cores; their dtypes are listed with their share of the work.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from mprun.numerics.trace import Operation
from mprun.torch_private import schema_of

# One call is a whole recurrent layer; the first three are the emulated ones.
RECURRENT = frozenset(
    "lstm gru rnn _cudnn_rnn _cudnn_rnn_backward mkldnn_rnn_layer mkldnn_rnn_layer_backward "
    "miopen_rnn miopen_rnn_backward".split()
)
_LEFT_FIRST = frozenset("mm bmm linear scaled_mm _scaled_mm".split())
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
)
PRODUCTS = _MATRIX.union(_CONVOLUTION, _CONVOLUTION_BACKWARD, _OTHERS, _ATTENTION, RECURRENT)


def flops(operation: Operation) -> int:
    """Return the floating-point operations of one call, 2 for a multiplication and addition.

    It counts matrix products, convolutions and attention (`attention_flops`) with their gradients,
    and 0 for everything else (recurrent layers: `recurrent_flops`).
    """
    name, args, result = operation.name, operation.args, operation.result
    if name in _MATRIX:
        left = args[0] if name in _LEFT_FIRST else args[1]
        return 2 * result.numel() * left.shape[-1]
    if name in _CONVOLUTION:
        return convolution_flops(result, args[0], args[1], transposed=args[6])
    if name in _CONVOLUTION_BACKWARD:
        mask = operation.kwargs.get("output_mask", args[-1])
        one = convolution_flops(args[0], args[1], args[2], transposed=args[7])
        return one * (bool(mask[0]) + bool(mask[1]))
    if name in _ATTENTION:
        order = [argument.name for argument in schema_of(operation.func).arguments]
        given = dict(zip(order, args, strict=False)) | operation.kwargs
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


_NAMES = 5  # operations named in a line
_SHORT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
_KINDS = (
    "parameters master_weights gradients gradients_in_update optimizer_state buffers activations "
    "weight_copies".split()
)


def lines(
    operations: Mapping, memory: Mapping, flags: Mapping, mode: str, device: str
) -> list[str]:
    """Return at most ten lines; operations, memory: as in run.json; flags: `read_math_flags`."""
    text = [f"step {operations['step']} of {mode} on {device} ran in:"]
    groups: dict[str, list[Mapping]] = {"products": [], "other": [], "update": [], "casts": []}
    for row in operations["rows"]:
        kind = "update" if row["phase"] == "update" else "other"
        kind = "casts" if "->" in row["dtype"] else kind
        groups["products" if row["operation"] in PRODUCTS else kind].append(row)
    text += _products(groups["products"])[:3]
    text += [
        f"  {kind:<9}{_by_dtype(groups[kind], 3)}" for kind in ("other", "update") if groups[kind]
    ]
    if groups["casts"]:
        elements = _totals(groups["casts"], "dtype").items()
        parts = [f"{name} {_count(total).strip()}" for name, total in elements]
        text.append(f"  casts    {', '.join(parts)} elements")
    text.append(f"  flags    {flag_line(flags, device)}")
    text.append(f"  memory   {memory_line(memory)}")
    if operations["not_in_16_bits"]:
        found = "; ".join(operations["not_in_16_bits"][:4])
        text.append(f"  WARNING  FP32 products that {mode} did not ask for: {found}")
    if operations["overflowed"]:
        found = _some(operations["overflowed"], 3)
        text.append(f"  WARNING  overflowed to inf: {found}; divided by it, a number becomes 0")
    return text


def flag_line(flags: Mapping, device: str) -> str:
    library = "cuda.matmul cudnn.conv cudnn.rnn" if device == "cuda" else "mkldnn.matmul"
    fp32 = {name: flags.get(f"{name}.fp32_precision", "?") for name in library.split()}
    same, each = set(fp32.values()), ", ".join(f"{name} {how}" for name, how in fp32.items())
    text = f"FP32 products {same.pop() if len(same) == 1 else each}"
    if device == "cuda":
        reduced = any(on for name, on in flags.items() if name.startswith("cuda.matmul.allow"))
        text += f", 16-bit products reduced in {'16 bits' if reduced else 'FP32'}"
        text += f", cudnn.benchmark {'on' if flags.get('cudnn.benchmark') else 'off'}"
    return text + f", deterministic {'on' if flags.get('deterministic_algorithms') else 'off'}"


def memory_line(memory: Mapping) -> str:
    """Return every kind with its bytes by dtype, without integers."""
    parts = []
    for kind in _KINDS:
        floats = [one for one in memory.get(kind, {}).items() if "int" not in one[0]]
        if floats:
            each = (f"{_SHORT.get(dtype, dtype)} {_bytes(size)}" for dtype, size in floats)
            parts.append(f"{kind.replace('_', ' ')} {' + '.join(each)}")
    return ", ".join(parts)


def _products(rows: list[Mapping]) -> list[str]:
    flops = _totals(rows, "dtype", "flops")
    total, text, label = sum(flops.values()) or 1, [], "products"
    for dtype, own in flops.items():
        names = list(dict.fromkeys(row["operation"] for row in rows if row["dtype"] == dtype))
        share = f"{100 * own / total:.3g} % of {_count(total)}FLOP"
        text.append(f"  {label:<9}{dtype} {share}: {_some(names)}")
        label = ""
    return text or ["  products none seen"]


def _by_dtype(rows: list[Mapping], names: int) -> str:
    parts = []
    for dtype in [*_totals(rows, "dtype")][:4]:
        own = [row for row in rows if row["dtype"] == dtype]
        parts.append(f"{dtype} {_some(list(_totals(own, 'operation')), names)}")
    return "; ".join(parts)


def _totals(rows: list[Mapping], key: str, what: str = "elements") -> dict[str, int]:
    """Return the sums by the value of a key, the largest first."""
    totals: Counter[str] = Counter()
    for row in rows:
        totals[row[key]] += row.get(what, 0)
    return dict(totals.most_common())


def _some(names: list[str], most: int = _NAMES) -> str:
    more = len(names) - most
    return ", ".join(names[:most] + ([f"{more} more"] if more > 0 else []))


def _count(value: float) -> str:
    """Return "1.2 M"; below 1000 with a trailing blank, for the unit that follows."""
    return _in_units(value, 1000, ("", "k", "M", "G", "T"))


def _bytes(value: float) -> str:
    return _in_units(value, 1024, ("B", "KiB", "MiB", "GiB"))


def _in_units(value: float, step: int, units: tuple[str, ...]) -> str:
    power = 0
    while value >= step - 0.5 and power < len(units) - 1:
        value, power = value / step, power + 1
    return f"{value:.3g} {units[power]}"
