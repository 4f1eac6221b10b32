"""The options of linear layers in 8 bits or fewer, and of attention; a part of the schema."""

from dataclasses import dataclass
from typing import Any

from mprun.config.fields import count, from_zero, one_of, setting


def _format(of: str) -> Any:
    return one_of(
        "e4m3 e5m2 e2m1 int8", f"Format of {of} of linear layers; null: not cast", default=None
    )


_PRODUCTS = "output grad_input grad_weight"


@dataclass(slots=True)
class MatmulConfig:
    """Formats of the operands of linear layers' products."""

    input: str | None = _format("the input")
    weight: str | None = _format("the weight")
    grad_output: str | None = _format("the gradient of the output")
    granularity: str = setting(
        "tensor",
        "Block with one scale: tensor, row or RxC (R rows, C columns along the sum); none: scale 1",
    )
    weight_granularity: str | None = setting(
        None,
        "Granularity of weights; null: as granularity. With 16x16, all products share one cast",
    )
    scale: str = one_of(
        "fp32 pow2 e8m0 e4m3 four_over_six delayed",
        "pow2: power of two, rounded down; e8m0: MX; e4m3, four_over_six: NVFP4; delayed: past "
        "maxima",
    )
    scale_rounding: str = one_of(
        "rceil ceil even floor",
        "With scale=e8m0: rounding of the scale; rceil: never clips; floor: as in OCP MX 1.0",
    )
    history: int = count(
        1024,
        "With scale=delayed: number of past updates whose largest magnitude sets the scale",
        at_most=1_000_000,
    )
    margin: int = from_zero(
        0,
        "With scale=delayed: number of powers of two that stay free above the largest magnitude",
        at_most=64,
    )
    grad_rounding: str = one_of(
        "nearest stochastic both",
        "Rounding in gradient products; stochastic (unbiased): output gradient only; both: all "
        "operands",
    )
    hadamard: list[str] = one_of(
        _PRODUCTS,
        "Products whose operands are first multiplied by a Hadamard matrix of size 16",
        default=list,
    )
    high_precision: list[str] = one_of(
        _PRODUCTS, "Products whose operands are not cast to 8 or 4 bits", default=list
    )
    dequantized: list[str] = one_of(
        "grad_input grad_weight",
        "Gradient products that use the input or weight as rounded by the forward product's cast",
        default=list,
    )
    modules: list[str] = setting(
        lambda: ["*"],
        "Layers to cast, as patterns; output layers: full names; to exclude: !PATTERN, "
        "!last 15% (of blocks)",
    )


@dataclass(slots=True)
class AttentionConfig:
    """Formats of attention, as of `F.scaled_dot_product_attention`."""

    format: str | None = one_of(
        "e4m3 e5m2",
        "Format of queries, keys, values and probabilities; null: not cast",
        default=None,
    )
    grad_format: str = one_of(
        "e5m2 e4m3", "Format of the gradients of the output and of the scores"
    )
    granularity: str = one_of(
        "head tensor", "Part of a tensor that shares a scale; head: each head of each sequence"
    )
