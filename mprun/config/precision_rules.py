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
    yield from _products(precision.products, precision.name)
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


def _multiplies_codes(products: schema.ProductsConfig) -> bool:
    """Return whether a GPU multiplies codes, not decoded numbers (`ScaledProducts.decoded`)."""
    blocks = {products.granularity, products.weight_granularity or products.granularity}
    return (
        (blocks <= {"none", "tensor"} or blocks == {"row"})
        and products.scale in ("fp32", "pow2", "delayed")
        and products.grad_rounding == "nearest"
        and "e2m1" not in (products.input, products.weight, products.grad_output)
    )


def _products(products: schema.ProductsConfig, mode: str) -> Iterator[str]:
    key = "precision.products"
    formats = {field: getattr(products, field) for field in ("input", "weight", "grad_output")}
    missing = [field for field, own in formats.items() if own is None]
    if missing and len(missing) < len(formats):
        yield f"{key}.{missing[0]}=null: set the format of all operands, or of none"
    for field in ("granularity", "weight_granularity"):
        own = getattr(products, field)
        if own is not None and not re.fullmatch(r"none|tensor|row|[1-9]\d*x[1-9]\d*", own):
            yield f"{key}.{field}={own}: must be one of none, tensor, row, or ROWSxCOLUMNS as 1x32"
    if len(missing) == len(formats):
        needed = f"needs {key}.input, weight and grad_output, which precision={mode} lacks"
        yield from _set_without_use(products, key, _OF_CASTS, needed)
    yield from _scales(products, formats)
    for name, pair in _PRODUCTS.items():
        both = all(formats[operand] == "e5m2" for operand in pair) and _multiplies_codes(products)
        if both and name not in products.high_precision:
            reason = f"{name} multiplies two E5M2 operands, which no GPU does"
            allowed = f"e4m3, or {name} in {key}.high_precision"
            yield f"{key}.{pair[0]}=e5m2: {reason} (allowed: {allowed})"
    if len(set(products.high_precision)) == len(_PRODUCTS):
        own = f"{key}.high_precision={products.high_precision}"
        yield f"{own}: leaves no product in these formats; must name two of them at most"
    if not products.modules:
        yield f"{key}.modules=[]: must name a layer, or leave the formats null"


def _scales(products: schema.ProductsConfig, formats: dict[str, str | None]) -> Iterator[str]:
    key, scale = "precision.products", "precision.products.scale"
    of_weights = products.weight_granularity or products.granularity
    if (of_weights == "none") != (products.granularity == "none"):
        given = f"{key}.weight_granularity={products.weight_granularity}"
        yield f"{given}: scales are 1 for all operands or none; granularity={products.granularity}"
    is_delayed = products.scale == "delayed"
    for unread, fields, why in (
        (products.granularity == "none", "scale", f"every scale is 1 with {key}.granularity=none"),
        (products.scale != "e8m0", "scale_rounding", f"needs {scale}=e8m0"),
        (not is_delayed, "history margin", f"needs {scale}=delayed"),
        (is_delayed, _OF_BLOCKS, f"must be {{}} with {scale}=delayed"),
    ):
        if unread:
            yield from _set_without_use(products, key, fields, why)
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
