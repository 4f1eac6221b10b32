"""Products of codes in blocks, by GPUs that scale each block while they add up: MXFP8's.

Where a GPU lacks them, or fails the check below, numbers are decoded and multiplied in BF16
(`scaled_products`): the same operands, and sums that differ in their order alone. No such GPU has
run this so far. A CPU tests the layouts against cuBLAS's description of them; a GPU's first run
tests the rest.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from mprun.precision.block_formats import ELEMENTS, Operand, in_blocks
from mprun.precision.torch_update import is_granted

# Compute capability -> (block, scale) of its products of E4M3; torch 2.15 refuses E5M2 beside it.
# Of 12.0 it is not known.
MXFP8 = ((1, 32), "e8m0")
MULTIPLIED = {(10, 0): (MXFP8,), (10, 3): (MXFP8,)}
_MULTIPLE = 32  # of every size
_CLOSE = 2.0**-10  # of the sum of magnitudes; one scale in a wrong place is further off


@cache
def why_decoded(left: Operand, right: Operand, device: torch.device) -> str | None:
    """Return why `device`, a GPU, multiplies decoded numbers of these operands; None: codes."""
    for own in (left, right):
        if (own.block, own.scale) != MXFP8 or own.element is not ELEMENTS["e4m3"]:
            return "codes in blocks are multiplied in MXFP8 of E4M3 alone"
    capability = torch.cuda.get_device_capability(device)
    if torch.version.hip is not None or MXFP8 not in MULTIPLIED.get(capability, ()):
        number = ".".join(map(str, capability))
        return f"compute capability {number} is not known to multiply codes in blocks"
    if not hasattr(nn.functional, "scaled_mm"):
        return "this torch lacks torch.nn.functional.scaled_mm"
    try:
        return difference(left, right, device)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError) as error:  # of a cuBLAS without them
        return str(error).strip().partition("\n")[0][:100]


def difference(left: Operand, right: Operand, device: torch.device) -> str | None:
    """Say how products of codes differ from those of decoded numbers, in FP64, if by too much.

    Sizes fill no block and no tile, scales lie apart, and one block has an infinity.
    """
    draw = torch.Generator().manual_seed(0)
    matrices = [
        torch.randn(size, generator=draw) * (4 * torch.randn(size, generator=draw)).exp2()
        for size in ((40, 150), (150, 200))
    ]
    matrices[0][3, 70] = torch.inf
    codes, wide = [], []
    for matrix, operand, along in zip(matrices, (left, right), ((1, 32), (32, 1)), strict=True):
        form = operand.element.name, *along, operand.scale, operand.scale_rounding, 0
        values, factor, _ = torch.ops.mprun.cast_blocks(matrix.to(device), *form, None)
        codes.append((values, in_blocks(factor, along, values.shape)))
        number = torch.ops.mprun.cast_blocks(matrix.to(device), *form, torch.float32)[0]
        wide.append(number.double())
    (a, factor_a), (b, factor_b) = codes
    found = multiplied_in_blocks(a, b, factor_a, factor_b, torch.float32).double()
    expected, total = wide[0] @ wide[1], wide[0].abs() @ wide[1].abs()
    finite = expected.isfinite()
    if is_granted():
        return None
    if not torch.equal(found.isfinite(), finite):
        return "its products of codes lose what is not finite"
    most = ((found - expected).abs() / total)[finite].max().item()
    if not most <= _CLOSE:
        return f"its products of codes are {most:.1e} of the sum of magnitudes off"
    return None


def multiplied_in_blocks(
    a: Tensor, b: Tensor, factor_a: Tensor, factor_b: Tensor, dtype: torch.dtype
) -> Tensor:
    """Multiply codes [n, k] and [k, m]; factors as of `in_blocks`, of 32 numbers along the sum."""
    (n, k), m = a.shape, b.size(1)
    more_n, more_k, more_m = (-size % _MULTIPLE for size in (n, k, m))
    left, right = padded(a, more_n, more_k), padded(b.t(), more_m, more_k)
    scales = swizzled(factor_a[:, 0, :, 0]), swizzled(factor_b[:, 0, :, 0].t())
    recipe = nn.functional.ScalingType.BlockWise1x32
    order = nn.functional.SwizzleType.SWIZZLE_32_4_4
    found = nn.functional.scaled_mm(
        left, right.t(), scales[0], recipe, scales[1], recipe, order, order, output_dtype=dtype
    )
    return found[:n, :m].contiguous()


def swizzled(factor: Tensor) -> Tensor:
    """Return powers of two [rows, blocks along the sum] as cuBLAS reads them, one byte each.

    Tiles of 128 x 4 follow each other by rows; in a tile, row r and column c is at byte
    16 * (r % 32) + 4 * (r // 32) + c. The byte is the exponent of FP32; 255 is NaN.
    """
    rows, columns = factor.shape
    bits = (factor.contiguous().view(torch.int32) >> 23).bitwise_and_(255).to(torch.uint8)
    bits = nn.functional.pad(bits, (0, -columns % 4, 0, -rows % 128))
    tiles = bits.view(-(-rows // 128), 4, 32, -(-columns // 4), 4)
    return tiles.permute(0, 3, 2, 1, 4).flatten().view(torch.float8_e8m0fnu)


def padded(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """Return codes by rows, with more rows and columns of zeros."""
    matrix = matrix.contiguous()
    if not rows and not columns:
        return matrix
    bits = nn.functional.pad(matrix.view(torch.uint8), (0, columns, 0, rows))
    return bits.view(matrix.dtype)
