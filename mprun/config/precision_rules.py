"""The rules across the keys of a precision mode, among them those of casts in linear layers."""

import re
from collections.abc import Iterator
from typing import Any

from mprun.config import schema
from mprun.config.registry import kind_of
from mprun.config.schema import DTYPES, RunConfig
from mprun.spelling import word


def updates_in_16_bits(precision: schema.PrecisionConfig) -> bool:
    """Return whether an update is rounded operation by operation."""
    is_narrow = precision.master_dtype is None and precision.param_dtype != "fp32"
    update = precision.update
    return is_narrow and update.rounding == "nearest" and update.state_dtype is None


def of_mode(config: RunConfig) -> Iterator[str]:
    """Yield what a mode cannot compute."""
    precision = config.precision
    for pattern, dtype in precision.overrides.items():
        if dtype not in DTYPES:
            yield f"precision.overrides.{pattern}={dtype}: must be one of {', '.join(DTYPES)}"
    if precision.autocast_dtype is not None and precision.param_dtype != "fp32":
        yield f"precision.param_dtype={precision.param_dtype}: must be fp32 under autocast"
    yield from _matmul(precision.matmul, precision.name)
    rounding = precision.update.rounding
    if rounding != "nearest" and (precision.master_dtype, precision.param_dtype) != (None, "bf16"):
        needed = "precision.param_dtype=bf16 precision.master_dtype=null"
        yield f"precision.update.rounding={rounding}: needs {needed} (BF16 weights, no masters)"
    update_dtype = "fp32" if rounding != "nearest" else precision.param_dtype
    if precision.master_dtype is None and precision.grad_dtype != update_dtype:
        must = f"must be {update_dtype} without master weights, as their update is"
        yield f"precision.grad_dtype={precision.grad_dtype}: {must}"
    given = f"precision.reduce_dtype={precision.reduce_dtype}"
    if precision.reduce_dtype is not None and config.train.accumulate == 1:
        yield f"{given}: no ranks to sum over; train.accumulate=8 gives the result of 8 ranks"
    if precision.reduce_dtype is not None and kind_of(config.model).networks > 1:
        yield f"{given}: a discriminator has two losses, added up by a rank (allowed here: null)"
    if precision.reduce_dtype is None:
        read = "reduce_divide reduce_order"
        yield from _set_without_use(precision, "precision", read, "needs precision.reduce_dtype")
    norm_dtypes = {"fp32": 0} | ({} if precision.autocast_dtype else {precision.param_dtype: 0})
    if precision.norm_dtype not in norm_dtypes:
        must = f"norm layers compute in one of {', '.join(norm_dtypes)} here"
        yield f"precision.norm_dtype={precision.norm_dtype}: {must}"
    if precision.fp32_math == "tf32" and config.device == "cpu":
        needed = "TF32 needs a GPU of Ampere or later; use precision=fp32 or device=cuda"
        yield f"precision={precision.name}: {needed}"


# Products of a linear layer -> their operands.
_PRODUCTS = {
    "output": ("input", "weight"),
    "grad_input": ("grad_output", "weight"),
    "grad_weight": ("grad_output", "input"),
}
_OF_BLOCKS = "granularity weight_granularity grad_rounding hadamard"
_OF_CASTS = f"{_OF_BLOCKS} scale scale_rounding history margin"


def _multiplies_codes(matmul: schema.MatmulConfig) -> bool:
    """Return whether a GPU multiplies codes, not decoded numbers (`ScaledProducts.decoded`)."""
    blocks = {matmul.granularity, matmul.weight_granularity or matmul.granularity}
    return (
        (blocks <= {"none", "tensor"} or blocks == {"row"})
        and matmul.scale in ("fp32", "pow2", "delayed")
        and matmul.grad_rounding == "nearest"
        and "e2m1" not in (matmul.input, matmul.weight, matmul.grad_output)
    )


def _matmul(matmul: schema.MatmulConfig, mode: str) -> Iterator[str]:
    key = "precision.matmul"
    formats = {field: getattr(matmul, field) for field in ("input", "weight", "grad_output")}
    missing = [field for field, own in formats.items() if own is None]
    if missing and len(missing) < len(formats):
        yield f"{key}.{missing[0]}=null: set the format of all operands, or of none"
    for field in ("granularity", "weight_granularity"):
        own = getattr(matmul, field)
        if own is not None and not re.fullmatch(r"none|tensor|row|[1-9]\d*x[1-9]\d*", own):
            yield f"{key}.{field}={own}: must be one of none, tensor, row, or ROWSxCOLUMNS as 1x32"
    if len(missing) == len(formats):
        needed = f"needs {key}.input, weight and grad_output, which precision={mode} lacks"
        yield from _set_without_use(matmul, key, _OF_CASTS, needed)
    yield from _scales(matmul, formats)
    for name, pair in _PRODUCTS.items():
        both = all(formats[operand] == "e5m2" for operand in pair) and _multiplies_codes(matmul)
        if both and name not in matmul.high_precision:
            reason = f"{name} multiplies two E5M2 operands, which no GPU does"
            allowed = f"e4m3, or {name} in {key}.high_precision"
            yield f"{key}.{pair[0]}=e5m2: {reason} (allowed: {allowed})"
    if len(set(matmul.high_precision)) == len(_PRODUCTS):
        own = f"{key}.high_precision={matmul.high_precision}"
        yield f"{own}: leaves no product in these formats; must name two of them at most"
    if not matmul.modules:
        yield f"{key}.modules=[]: must name a layer, or leave the formats null"


def _scales(matmul: schema.MatmulConfig, formats: dict[str, str | None]) -> Iterator[str]:
    key, scale = "precision.matmul", "precision.matmul.scale"
    of_weights = matmul.weight_granularity or matmul.granularity
    if (of_weights == "none") != (matmul.granularity == "none"):
        given = f"{key}.weight_granularity={matmul.weight_granularity}"
        yield f"{given}: scales are 1 for all operands or none; granularity={matmul.granularity}"
    is_delayed = matmul.scale == "delayed"
    for unread, fields, why in (
        (matmul.granularity == "none", "scale", f"every scale is 1 with {key}.granularity=none"),
        (matmul.scale != "e8m0", "scale_rounding", f"needs {scale}=e8m0"),
        (not is_delayed, "history margin", f"needs {scale}=delayed"),
        (is_delayed, _OF_BLOCKS, f"must be {{}} with {scale}=delayed"),
    ):
        if unread:
            yield from _set_without_use(matmul, key, fields, why)
    for field, own in formats.items():
        if is_delayed and own == "e2m1":
            yield f"{key}.{field}=e2m1: must be e4m3 or e5m2 with {scale}=delayed"


def _set_without_use(node: Any, key: str, fields: str, why: str) -> Iterator[str]:
    """Yield the fields that have another value than their default, which `why` may name as {}."""
    plain = type(node)()
    for field in fields.split():
        own, default = getattr(node, field), getattr(plain, field)
        if own != default:
            yield f"{key}.{field}={word(own)}: {why.format(word(default))}"
