"""The Triton kernel that casts a matrix to FP8 and writes it by rows and by columns.

cuBLAS reads the left operand of an FP8 product by rows and the right one by columns, and a layer's
products use each operand in both ways. One pass over the matrix writes what they need. Numbers are
rounded by their bits, as in torch's conversion, so every GPU has torch's bits.

Import it only if Triton is installed.
"""

import triton
import triton.language as tl

TILE = 64
LAUNCH = {"num_warps": 4, "enable_fp_fusion": False}


@triton.jit
def wide(pointers, inside):
    """Load as FP32. uint16 are the bits of BF16, which the interpreter lacks."""
    value = tl.load(pointers, mask=inside, other=0)
    if pointers.dtype.element_ty == tl.uint16:
        return (value.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return value.to(tl.float32)


@triton.jit
def _rounded(value, E5M2: tl.constexpr):
    """Return the 8 bits of FP32 numbers within the format's range, ties to even.

    A number that is subnormal in FP8 is added to a power of two whose last digit is the format's
    smallest number.
    """
    bits = value.to(tl.uint32, bitcast=True)
    sign, rest = (bits >> 24) & 0x80, bits & 0x7FFFFFFF
    if E5M2:
        normal = (rest - (112 << 23) + 0xFFFFF + ((rest >> 21) & 1)) >> 21
        added = tl.full(value.shape, 134 << 23, tl.uint32)
        least = 113 << 23
    else:
        normal = (rest - (120 << 23) + 0x7FFFF + ((rest >> 20) & 1)) >> 20
        added = tl.full(value.shape, 141 << 23, tl.uint32)
        least = 121 << 23
    total = rest.to(tl.float32, bitcast=True) + added.to(tl.float32, bitcast=True)
    found = tl.where(rest < least, total.to(tl.uint32, bitcast=True) - added, normal)
    found = tl.where(rest > 0x7F800000, 0x7F, found)  # NaN
    return (found | sign).to(tl.uint8)


@triton.jit
def cast_kernel(
    matrix, scale, values, turned, rows, columns, row_step, column_step, scale_row, scale_column,
    largest, E5M2: tl.constexpr, ROWS: tl.constexpr, TURNED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """values [rows, columns], turned [columns, rows] = matrix * scale, saturated; NaN stays NaN."""
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    down, across = row[:, None], column[None, :]
    inside = (down < rows) & (across < columns)
    factor = tl.load(scale + down * scale_row + across * scale_column, mask=inside, other=0.0)
    value = wide(matrix + down * row_step + across * column_step, inside) * factor
    value = tl.where(value > largest, largest, value)
    value = tl.where(value < -largest, -largest, value)
    found = _rounded(value, E5M2)
    if ROWS:
        tl.store(values + down * columns + across, found, mask=inside)
    if TURNED:
        known = (column[:, None] < columns) & (row[None, :] < rows)
        tl.store(turned + column[:, None] * rows + row[None, :], tl.trans(found), mask=known)
