"""Products of codes in blocks, by GPUs that scale each block while they add up.

    operands              multiplied
    MXFP8, MXFP4          as E4M3, of which E2M1 is a part; one power of two for 32 numbers
    NVFP4                 two codes of E2M1 in a byte; a scale in E4M3 for 16, one in FP32 for all

Where a GPU lacks them, or fails the check below, numbers are decoded and multiplied in BF16
(`scaled_products`): the same operands, and sums that differ in their order alone. No such GPU has
run this so far. A CPU tests the layouts against cuBLAS's description of them; a GPU's first run
tests the rest.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor, nn

from mprun.precision.block_formats import Operand, filled, in_blocks
from mprun.precision.torch_update import is_granted

# Scale and numbers along the sum that share it -> elements. torch 2.15 refuses E5M2 beside E4M3.
MULTIPLIED = {
    ("e8m0", 32): ("e4m3", "e2m1"),
    ("e4m3", 16): ("e2m1",),
    ("four_over_six", 16): ("e2m1",),
}
CAPABILITIES = ((10, 0), (10, 3))  # those known to have them; of 12.0 it is not known
_MULTIPLE = 32  # of every size
_CLOSE = 2.0**-10  # of the sum of magnitudes; one scale in a wrong place is further off
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by code


@cache
def why_decoded(left: Operand, right: Operand, device: torch.device) -> str | None:
    """Return why `device`, a GPU, multiplies decoded numbers of these operands; None: codes."""
    form = left.scale, left.block[1]
    elements = {left.element.name, right.element.name}
    if form != (right.scale, right.block[1]) or not elements.issubset(MULTIPLIED.get(form, ())):
        return "codes in blocks are multiplied in MXFP8 of E4M3, MXFP4 and NVFP4 alone"
    capability = torch.cuda.get_device_capability(device)
    if torch.version.hip is not None or capability not in CAPABILITIES:
        number = ".".join(map(str, capability))
        return f"compute capability {number} is not known to multiply codes in blocks"
    if not hasattr(nn.functional, "scaled_mm"):
        return "this torch lacks torch.nn.functional.scaled_mm"
    try:
        return difference(left, right, device)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError) as error:  # of a cuBLAS without them
        return str(error).strip().partition("\n")[0]


def difference(left: Operand, right: Operand, device: torch.device) -> str | None:
    """Say how products of codes differ from those of decoded numbers, in FP64, if by too much.

    Sizes fill no block and no tile, and scales lie apart. A second matrix has an infinity.
    """
    draw = torch.Generator().manual_seed(0)
    one, other = (
        torch.randn(size, generator=draw) * (4 * torch.randn(size, generator=draw)).exp2()
        for size in ((40, 150), (150, 200))
    )
    spoiled = one.clone()
    spoiled[3, 70] = torch.inf
    for matrix, dtype in ((one, torch.float32), (spoiled, torch.bfloat16)):  # of results
        given = matrix.to(device), other.to(device)
        found, expected, total = _both_ways(*given, left, right, dtype)
        finite = expected.isfinite()
        if is_granted():
            return None
        if not torch.equal(found.isfinite(), finite):
            return "its products of codes lose what is not finite"
        error = (found - expected).abs()
        if (error > (_CLOSE + torch.finfo(dtype).eps) * total)[finite].any():
            most = (error / total)[finite].max().item()
            return f"its products of codes are {most:.1e} of the sum of magnitudes off"
    return None


def _both_ways(
    one: Tensor, other: Tensor, left: Operand, right: Operand, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return products of codes, of decoded numbers in FP64, and of their magnitudes."""
    codes, wide, tensors = [], [], []
    for matrix, operand, along in ((one, left, -1), (other, right, 0)):
        block = operand.block if along else operand.block[::-1]
        form = operand.element.name, *block, operand.scale, operand.scale_rounding, 0
        values, factor, whole = torch.ops.mprun.cast_blocks(matrix, *form, None)
        codes.append((values, in_blocks(factor, block, values.shape)))
        number = torch.ops.mprun.cast_blocks(matrix, *form, torch.float32)[0].double()
        if whole.dim() == 0:
            tensors.append(whole / operand.largest)
            number *= tensors[-1]
        wide.append(number)
    (a, factor_a), (b, factor_b) = codes
    found = multiplied_in_blocks(a, b, factor_a, factor_b, dtype, tensors)
    return found.double(), wide[0] @ wide[1], wide[0].abs() @ wide[1].abs()


def multiplied_in_blocks(
    a: Tensor, b: Tensor, factor_a: Tensor, factor_b: Tensor, dtype: torch.dtype,
    tensors: Sequence[Tensor] = (),
) -> Tensor:  # fmt: skip
    """Multiply codes [n, k] and [k, m], whose factors are as of `in_blocks`.

    tensors: two FP32 numbers that the sums are multiplied by, for scale e4m3; none for e8m0.
    """
    n, m = a.size(0), b.size(1)
    left, scale_a = laid_out(a, factor_a[..., 0], bool(tensors))
    right, scale_b = laid_out(b.t(), factor_b[:, 0].permute(1, 2, 0), bool(tensors))
    kinds, order = nn.functional.ScalingType, nn.functional.SwizzleType
    if not tensors:
        found = nn.functional.scaled_mm(
            left, right.t(), scale_a, kinds.BlockWise1x32, scale_b, kinds.BlockWise1x32,
            order.SWIZZLE_32_4_4, order.SWIZZLE_32_4_4, output_dtype=dtype,
        )  # fmt: skip
    else:
        recipe = [kinds.BlockWise1x16, kinds.TensorWise]
        orders = [order.SWIZZLE_32_4_4, order.NO_SWIZZLE]
        found = nn.functional.scaled_mm(
            left, right.t(), [scale_a, tensors[0]], recipe, [scale_b, tensors[1]], recipe, orders,
            orders, output_dtype=dtype,
        )  # fmt: skip
    return found[:n, :m].contiguous()


def laid_out(codes: Tensor, factor: Tensor, packs: bool) -> tuple[Tensor, Tensor]:
    """Return codes and scales of an operand as cuBLAS reads them, up to `_MULTIPLE` with zeros.

    codes: [rows, k], of any strides. factor: [blocks of rows, rows of one, blocks of k]. packs: two
    numbers of E2M1 in a byte, with scales in E4M3; else codes, with scales in E8M0.
    """
    scale = torch.float8_e4m3fn if packs else torch.float8_e8m0fnu
    values_in = torch.float4_e2m1fn_x2 if packs else codes.dtype
    if codes.is_cuda:
        try:
            # Imported here: only torch for CUDA on Linux includes Triton.
            from mprun.precision import cast_kernels_triton as kernels

            values, scales = kernels.laid_out(codes, factor, 16 if packs else 32, _MULTIPLE)
            return values.view(values_in), scales.view(scale)
        except ImportError:
            pass
    rows, length = codes.shape
    scales = swizzled(factor.flatten(0, 1)[:rows], scale)
    values = padded(codes, -rows % _MULTIPLE, -length % _MULTIPLE)
    return packed(values) if packs else values, scales


def swizzled(factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return factors [rows, blocks along the sum] as cuBLAS reads them, one byte each.

    Tiles of 128 x 4 follow each other by rows; in a tile, row r and column c is at byte
    16 * (r % 32) + 4 * (r // 32) + c. A power of two, E8M0, is the exponent of FP32; 255 is NaN.
    """
    rows, columns = factor.shape
    if dtype is torch.float8_e8m0fnu:
        bits = (factor.contiguous().view(torch.int32) >> 23).bitwise_and_(255).to(torch.uint8)
    else:
        bits = factor.to(dtype).contiguous().view(torch.uint8)
    bits = filled(bits, -rows % 128, -columns % 4)
    tiles = bits.view(-(-rows // 128), 4, 32, -(-columns // 4), 4)
    return tiles.permute(0, 3, 2, 1, 4).flatten().view(dtype)


def padded(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """Return codes by rows, with more rows and columns of zeros."""
    bits = filled(matrix.contiguous().view(torch.uint8), rows, columns)
    return bits.view(matrix.dtype)


def packed(codes: Tensor) -> Tensor:
    """Return numbers of E2M1, held in E4M3 [n, k], two in a byte: the first in its lower half."""
    found = _fours(codes.device)[codes.view(torch.uint8).int()]
    return (found[:, ::2] | found[:, 1::2] << 4).view(torch.float4_e2m1fn_x2)


@cache
def _fours(device: torch.device) -> Tensor:
    """Return the four bits of E2M1 for each byte of E4M3; of what is no number of E2M1, zero."""
    numbers = torch.tensor([*_E2M1, *(-own for own in _E2M1)]).to(torch.float8_e4m3fn)
    fours = torch.zeros(256, dtype=torch.uint8)
    fours[numbers.view(torch.uint8).long()] = torch.arange(16, dtype=torch.uint8)
    return fours.to(device)
