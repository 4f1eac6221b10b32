"""Triton kernels of casts to 8 bits and fewer, and of their codes' layout for a product.

Of numbers they have the bits of torch's operations in `block_formats`, `scaled_products` and
`block_products`, and round by bits. BF16 goes in and out as its 16 bits, so that the interpreter,
which lacks it, runs all that a GPU does.

Import it only if Triton is installed.
"""

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

LAUNCH = {"num_warps": 4, "enable_fp_fusion": False}
_TILE = 4096  # numbers of a program, or one block
LARGEST = 128 * 128  # numbers of a block
_F32_MAX = tl.constexpr(torch.finfo(torch.float32).max)
_NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}


@triton.jit
def wide(pointers, inside):
    """Load as FP32. uint16 are the bits of BF16, which the interpreter lacks."""
    value = tl.load(pointers, mask=inside, other=0)
    if pointers.dtype.element_ty == tl.uint16:
        return (value.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return value.to(tl.float32)


@triton.jit
def _float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _at_most(value, top):
    """Leave a NaN as it is."""
    return tl.where(value > top, top, value)


@triton.jit
def _inverse(value):
    return tl.div_rn(tl.full(value.shape, 1.0, tl.float32), value)


@triton.jit
def _on_grid(
    value, random, TOP: tl.constexpr, EMIN: tl.constexpr, EMAX: tl.constexpr,
    MANTISSA: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Round FP32 to a number of the format, see `block_formats.encoded`."""
    bits = value.to(tl.int32, bitcast=True)
    size = _at_most(_float(bits & 0x7FFFFFFF), TOP)
    exponent = size.to(tl.int32, bitcast=True) & 0x7F800000
    exponent = tl.minimum(tl.maximum(exponent, (127 + EMIN) << 23), (127 + EMAX) << 23)
    step = exponent - (MANTISSA << 23)
    size = size * _float((254 << 23) - step)
    size = size + random if STOCHASTIC else size
    whole = (size + 8388608.0) - 8388608.0  # 2^23, whose last digit is 1: ties to even
    if STOCHASTIC:  # down; Triton's floor flushes subnormal numbers
        whole = whole - tl.where(whole > size, 1.0, 0.0)
    size = whole * _float(step)
    return _float(size.to(tl.int32, bitcast=True) | (bits & -2147483648))


@triton.jit
def _scales(
    amax, whole, SCALE: tl.constexpr, ROUNDING: tl.constexpr, TOP: tl.constexpr,
    EMAX: tl.constexpr, MANTISSA: tl.constexpr,
):  # fmt: skip
    """Return the factors before and after the cast, see `block_formats.SCALES`."""
    if SCALE == "none":
        encode = 1.0 + amax * 0.0
        factor = _inverse(encode)
    elif SCALE == "e8m0":
        if ROUNDING == "rceil":
            bits = tl.div_rn(amax, tl.full(amax.shape, TOP, tl.float32))
            bits = bits.to(tl.int32, bitcast=True)
            byte = tl.where(bits <= 1 << 22, 0, (bits + 0x7FFFFF) >> 23)
        else:
            added = 0
            if ROUNDING == "ceil":
                added = 0x7FFFFF
            if ROUNDING == "even":
                added = 1 << (22 - MANTISSA)
            byte = ((amax.to(tl.int32, bitcast=True) + added) >> 23) - EMAX
        byte = tl.minimum(tl.maximum(byte, 0), 254)
        encode = _float(tl.maximum((254 - byte) << 23, 1 << 22))
        factor = _float(tl.maximum(byte << 23, 1 << 22)) + amax * 0.0
    elif SCALE == "e4m3":
        scale = _at_most(tl.div_rn(tl.full((1,), 448 * TOP, tl.float32), whole), _F32_MAX)
        scale = tl.where((whole == 0) | (scale == 0), 1.0, scale)
        scale = tl.broadcast_to(scale[:, None, None, None], amax.shape)
        factor = _at_most(amax * (scale * (1 / TOP)), 448.0)
        factor = _on_grid(factor, factor, 448.0, -6, 8, 3, False)
        encode = _at_most(_inverse(factor * _inverse(scale)), _F32_MAX)
    else:
        least = tl.full(amax.shape, TOP / _F32_MAX, tl.float64)
        wider = amax.to(tl.float64)
        wider = tl.where(wider < least, least, wider)
        encode = (tl.full(amax.shape, TOP, tl.float64) / wider).to(tl.float32)
        if SCALE == "pow2":  # the mantissa cleared; a NaN stays one
            encode = _float(encode.to(tl.int32, bitcast=True) & 0x7F800000) + encode * 0.0
        factor = _inverse(encode)
    return encode, factor


@triton.jit
def _random_bits(place, seed, number, first, stream):
    """Return 16 bits for the number at each place, as `philox.bits_of` for all of them."""
    block = ((place >> 3) + first).to(tl.uint32)
    stream = stream.to(tl.int64)
    of_number = block * 0 + number.to(tl.uint32)
    lower = block * 0 + stream.to(tl.uint32)
    upper = block * 0 + (stream >> 32).to(tl.uint32)
    one, two, three, four = tl.philox(seed, block, of_number, lower, upper)
    early = tl.where((place & 2) == 0, one, two)
    late = tl.where((place & 2) == 0, three, four)
    word = tl.where((place & 4) == 0, early, late)
    return tl.where((place & 1) == 0, word & 0xFFFF, word >> 16)


@triton.jit
def _codes(value, E5M2: tl.constexpr):
    """Return the 8 bits of numbers of E5M2, or of E4M3."""
    bits = value.to(tl.int32, bitcast=True)
    rest = bits & 0x7FFFFFFF
    size = _float(rest)
    if E5M2:
        found = tl.where(rest < 113 << 23, (size * 65536.0).to(tl.int32), (rest >> 21) - (112 << 2))
    else:
        found = tl.where(rest < 121 << 23, (size * 512.0).to(tl.int32), (rest >> 20) - (120 << 3))
    found = tl.where(rest > 0x7F800000, 0x7F, found)  # NaN
    return (found | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit(do_not_specialize=["seed", "first", "stream"])
def cast_kernel(
    matrix, whole, values, factors, number, rows, columns, row_step, column_step, padded, seed,
    first, stream, SCALE: tl.constexpr, ROUNDING: tl.constexpr, TOP: tl.constexpr,
    EMIN: tl.constexpr, EMAX: tl.constexpr, MANTISSA: tl.constexpr, STOCHASTIC: tl.constexpr,
    OUT: tl.constexpr, DOWN: tl.constexpr, ROWS: tl.constexpr, ACROSS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Cast DOWN x ACROSS blocks of ROWS x COLUMNS: values [rows, columns], a factor of each block.

    Random bits are computed for each number, eight times as often as needed: so a block may have
    any place.
    whole: amax of the tensor, read by scale e4m3. padded: the columns of whole blocks. OUT:
    "codes", "bf16" or "fp32".
    """
    above = tl.program_id(0).to(tl.int64) * DOWN + tl.arange(0, DOWN)
    left = tl.program_id(1).to(tl.int64) * ACROSS + tl.arange(0, ACROSS)
    down = above[:, None, None, None] * ROWS + tl.arange(0, ROWS)[None, :, None, None]
    across = left[None, None, :, None] * COLUMNS + tl.arange(0, COLUMNS)[None, None, None, :]
    inside = (down < rows) & (across < columns)
    value = wide(matrix + down * row_step + across * column_step, inside)
    # The order of bits is that of magnitudes, and a NaN is above all of them.
    sizes = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    amax = _float(tl.max(tl.max(sizes, 3, keep_dims=True), 1, keep_dims=True))
    of_tensor = tl.load(whole + tl.arange(0, 1)) if SCALE == "e4m3" else amax
    encode, factor = _scales(amax, of_tensor, SCALE, ROUNDING, TOP, EMAX, MANTISSA)
    value = value * encode
    up = value
    if STOCHASTIC:
        bits = _random_bits(down * padded + across, seed, tl.load(number), first, stream)
        up = bits.to(tl.float32) * 0.0000152587890625  # 2^-16
    value = _on_grid(value, up, TOP, EMIN, EMAX, MANTISSA, STOCHASTIC)
    if OUT == "codes":
        found = _codes(value, MANTISSA == 2)
    else:
        found = value * factor
        if OUT == "bf16":
            bits = found.to(tl.uint32, bitcast=True)
            nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            found = tl.where(found == found, nearest, 0x7FC0).to(tl.uint16)
    tl.store(values + down * columns + across, found, mask=inside)
    count = padded // COLUMNS
    at = above[:, None, None, None] * count + left[None, None, :, None]
    known = (above[:, None, None, None] * ROWS < rows) & (left[None, None, :, None] < count)
    tl.store(factors + at, factor, mask=known)


def of_element(element) -> dict[str, float | int]:
    """Return the constants of kernels that say what `block_formats.Element` numbers are cast to."""
    names = {"TOP": element.top, "EMIN": element.emin, "EMAX": element.emax}
    return names | {"MANTISSA": element.mantissa}


def _bits(matrix: Tensor) -> Tensor:
    return matrix.view(torch.uint16) if matrix.dtype is torch.bfloat16 else matrix


def _on(tensor: Tensor):
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def launch_of(block: tuple[int, int]) -> tuple[dict[str, int], dict[str, int | bool]]:
    """Return the blocks of a program, constants of `cast_kernel`, and the options of its launch."""
    rows, columns = block
    across = max(64 // columns, 1)
    down = max(_TILE // (across * columns * rows), 1)
    blocks = {"DOWN": down, "ROWS": rows, "ACROSS": across, "COLUMNS": columns}
    return blocks, {"num_warps": 8 if rows * columns > _TILE else 4, "enable_fp_fusion": False}


def cast(matrix: Tensor, form: dict, block: tuple[int, int], dtype, random, whole=None):
    """Return values, in the codes' or the decoded numbers' `dtype`, and a factor of each block.

    form: the constants of `cast_kernel` that say how. random: seed, number of the micro-batch on
    the device, first counter and stream; None: to nearest.
    """
    (n, k), (rows, columns) = matrix.shape, block
    counts = -(-n // rows), -(-k // columns)
    values = torch.empty((n, k), dtype=dtype, device=matrix.device)
    factor = torch.empty(counts, dtype=torch.float32, device=matrix.device)
    out = _NAMES.get(dtype, "codes")
    held = values if out == "fp32" else values.view(torch.uint16 if out == "bf16" else torch.uint8)
    blocks, options = launch_of(block)
    seed, number, first, stream = random or (0, factor, 0, 0)
    grid = (-(-counts[0] // blocks["DOWN"]), -(-counts[1] // blocks["ACROSS"]))
    with _on(matrix):
        cast_kernel[grid](
            _bits(matrix), factor if whole is None else whole, held, factor, number, n, k,
            *matrix.stride(), counts[1] * columns, seed, first, stream, **form,
            STOCHASTIC=random is not None, OUT=out, **blocks, **options,
        )  # fmt: skip
    return values, factor


@triton.jit
def _four(codes, down, across, inside):
    """Return the four bits of E2M1 of numbers that are held in E4M3, from 0.5 = 0x30 on."""
    bits = tl.load(codes + down + across, mask=inside, other=0).to(tl.int32)
    size = bits & 0x7F
    found = tl.maximum(size >> 2, 12) - 12 + tl.where(size == 0x30, 1, 0)
    return found | (bits >> 7) << 3


@triton.jit
def lay_out_kernel(
    codes, factors, values, scales, rows, length, row_step, column_step, group, factor_row,
    factor_block, blocks, padded_rows, width, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write 128 rows of four blocks of one operand, `width` bytes a row, and their scales.

    BLOCK: 32 codes with a power of two, or 16 numbers of E2M1, two in a byte, with one in E4M3.
    group: rows that share a factor.
    """
    WIDTH: tl.constexpr = 128 if BLOCK == 32 else 32
    place = tl.arange(0, 128)[:, None]
    row = tl.program_id(0).to(tl.int64) * 128 + place
    byte = tl.program_id(1).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)[None, :]
    down = row * row_step
    if BLOCK == 32:
        inside = (row < rows) & (byte < length)
        found = tl.load(codes + down + byte * column_step, mask=inside, other=0)
    else:
        one, other = 2 * byte, 2 * byte + 1
        lower = _four(codes, down, one * column_step, (row < rows) & (one < length))
        upper = _four(codes, down, other * column_step, (row < rows) & (other < length))
        found = (lower | upper << 4).to(tl.uint8)
    tl.store(values + row * width + byte, found, mask=(row < padded_rows) & (byte < width))
    column = tl.arange(0, 4)[None, :]
    block = tl.program_id(1).to(tl.int64) * 4 + column
    at = factors + row // group * factor_row + block * factor_block
    factor = tl.load(at, mask=(row < rows) & (block < blocks), other=0.0)
    if BLOCK == 32:
        scale = (factor.to(tl.int32, bitcast=True) >> 23 & 255).to(tl.uint8)
    else:
        scale = _codes(factor, False)
    tile = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    tl.store(scales + tile * 512 + place % 32 * 16 + place // 32 * 4 + column, scale)


def laid_out(codes: Tensor, factor: Tensor, block: int, multiple: int) -> tuple[Tensor, Tensor]:
    """Return what `block_products.laid_out` does, in bytes."""
    (rows, length), blocks = codes.shape, factor.size(2)
    padded_rows, padded_length = rows + -rows % multiple, length + -length % multiple
    width = padded_length if block == 32 else padded_length // 2
    tiles = -(-rows // 128), -(-blocks // 4)
    values, scales = (
        torch.empty(size, dtype=torch.uint8, device=codes.device)
        for size in ((padded_rows, width), tiles[0] * tiles[1] * 512)
    )
    steps = factor.size(1), factor.stride(0), factor.stride(2)
    with _on(codes):
        lay_out_kernel[tiles](
            codes.view(torch.uint8), factor, values, scales, rows, length, *codes.stride(),
            *steps, blocks, padded_rows, width, BLOCK=block, **LAUNCH,
        )  # fmt: skip
    return values, scales
