"""Number formats of 8 bits and fewer, the blocks of numbers that share a scale, and their scales.

    scale  of a block with the largest magnitude amax, in a format with the largest number top
    fp32   top / amax
    pow2   the same, down to a power of two
    e8m0   a power of two near top / amax, by one of `SCALE_ROUNDINGS` (OCP MX 1.0): with rceil and
           ceil amax fits; with even and floor it may be clipped
    e4m3   two levels: top * 448 / amax of the tensor in FP32, of the block in E4M3 (NVFP4, arXiv
           2509.25149; each step rounded as in Transformer Engine's core_nvfp4.cuh)
    four_over_six  as e4m3, by which the largest number becomes 6 or 4 (`four_over_six`)
    delayed  as fp32, but of the amax of earlier updates (`delayed_scaling`)

Powers of two are made of exponent bits: a logarithm in FP32 is one off near a power of two. Ends of
a matrix that do not fill a block count as filled with zeros, which change no amax and no sum.
"""

import math
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mprun.precision import four_over_six
from mprun.precision.philox import IN_BLOCK, bits_of, micro_batches

_F32_MAX = torch.finfo(torch.float32).max
_EXPONENT = 0x7F800000  # its bits in FP32
SCALE_ROUNDINGS = ("rceil", "ceil", "even", "floor")


class Element(NamedTuple):
    """A number format.

    mantissa: its bits. emin, emax: exponents of its smallest and largest normal numbers. top: its
    largest number. dtype: holds its codes. E2M1, which torch has no cast to, is held in E4M3: all
    of its numbers are numbers of E4M3.
    """

    name: str
    mantissa: int
    emin: int
    emax: int
    top: float
    dtype: torch.dtype

    @property
    def is_cast_by_torch(self) -> bool:
        """Return whether torch rounds to the numbers of this format, and not to others."""
        return self.dtype.is_floating_point and torch.finfo(self.dtype).max == self.top


ELEMENTS = {
    element.name: element
    for element in (
        Element("e4m3", 3, -6, 8, 448.0, torch.float8_e4m3fn),
        Element("e5m2", 2, -14, 15, 57344.0, torch.float8_e5m2),
        Element("e2m1", 1, 0, 2, 6.0, torch.float8_e4m3fn),
        Element("int8", 6, 6, 6, 127.0, torch.int8),  # one exponent: neighbours are 1 apart
    )
}
Block = tuple[int, int]  # rows, columns, which run along a product's sum; 0: all
_NAMED_BLOCKS: dict[str, Block] = {"none": (0, 0), "tensor": (0, 0), "row": (1, 0)}


def block_of(granularity: str) -> Block:
    """Return the block that shares a scale; ValueError without the key if the word names none."""
    if granularity in _NAMED_BLOCKS:
        return _NAMED_BLOCKS[granularity]
    sizes = [int(size) if size.isdecimal() else 0 for size in str(granularity).split("x")]
    if len(sizes) != 2 or 0 in sizes:
        raise ValueError(f"must be one of {', '.join(_NAMED_BLOCKS)}, or ROWSxCOLUMNS like 1x32")
    return sizes[0], sizes[1]


class Operand(NamedTuple):
    """The cast of one operand of a product.

    turned: by a Hadamard matrix along the sum, before (`turn`). decoded: products multiply its
        decoded numbers; else a device multiplies the codes. stream: names the random bits of
        stochastic rounding; 0: to nearest. place: of its tensor in the numbers of a layer. native:
        decoded on a CPU alone; the GPU has codes.
    """

    element: Element
    block: Block
    scale: str
    scale_rounding: str
    turned: bool
    decoded: bool
    stream: int = 0
    place: int = 0
    native: bool = False

    @property
    def decoded_to(self) -> torch.dtype:
        """Return a dtype that a GPU multiplies and that has every decoded number."""
        return torch.bfloat16 if SCALES[self.scale].in_bf16 else torch.float32

    @property
    def largest(self) -> float:
        """Return the largest decoded number of a scale with two levels, without the tensor's."""
        return SCALES[self.scale].two_levels * self.element.top


class Scale(NamedTuple):
    """A kind of scale.

    of: amax, element and rounding -> factor before the cast, factor after it, and if `two_levels`
    amax of the tensor. in_bf16: element times factor is a BF16 number. two_levels: the largest
    factor of a block, or 0. is_kept: `of` reads it from the numbers of the tensor that
    `delayed_scaling` keeps, its last argument. of_numbers: `of` reads a block's numbers; what it
    gets more are these, by blocks, and a function that rounds to the element.
    """

    of: Callable[..., tuple[Tensor, Tensor, Tensor | None]]
    in_bf16: bool
    two_levels: int = 0
    is_kept: bool = False
    of_numbers: bool = False


def _inverse(encode: Tensor) -> Tensor:
    """Return 1 / encode in FP32, rounded once: 53 bits are enough to round again (2 * 24 + 2).

    A GPU's compiled code divides in FP32 with an error of two units, and flushes small results.
    """
    return encode.double().reciprocal().float()


def _one(amax: Tensor, element: Element, rounding: str) -> tuple[Tensor, Tensor, None]:
    encode = (1 + 0 * amax).float()  # NaN if a value is not finite
    return encode, _inverse(encode), None


def _fp32(amax: Tensor, element: Element, rounding: str) -> tuple[Tensor, Tensor, None]:
    # At most the largest FP32 number, of zeros too, whatever their sign.
    encode = (element.top / amax.double().clamp(min=element.top / _F32_MAX)).float()
    return encode, _inverse(encode), None


def _pow2(amax: Tensor, element: Element, rounding: str) -> tuple[Tensor, Tensor, None]:
    exact, _, _ = _fp32(amax, element, rounding)
    # The mantissa cleared; a NaN stays one, in one launch.
    encode = (exact.view(torch.int32) & _EXPONENT).view(torch.float32)
    encode = torch.add(encode, exact, alpha=0)
    return encode, _inverse(encode), None


def _e8m0(amax: Tensor, element: Element, rounding: str) -> tuple[Tensor, Tensor, None]:
    if rounding == "rceil":  # the FP32 quotient, see `_inverse`, up to a power of two
        exact = amax.double() / torch.full_like(amax, element.top, dtype=torch.float64)
        bits = exact.float().view(torch.int32)
        # Up to 2^-127, which is subnormal, it is the smallest scale.
        byte = torch.where(bits <= 1 << 22, 0, (bits + 0x7FFFFF) >> 23)
    else:
        added = {"floor": 0, "ceil": 0x7FFFFF, "even": 1 << (22 - element.mantissa)}[rounding]
        byte = ((amax.view(torch.int32) + added) >> 23) - element.emax
    byte = byte.clamp(0, 254)
    # 2^-127 is the subnormal with the highest bit of the mantissa alone.
    decode = (byte << 23).clamp_(min=1 << 22).view(torch.float32)
    encode = ((254 - byte) << 23).clamp_(min=1 << 22).view(torch.float32)
    return encode, decode + 0 * amax, None


def _e4m3(amax: Tensor, element: Element, rounding: str) -> tuple[Tensor, Tensor, Tensor]:
    whole = amax.amax()
    # Not number / tensor, which torch computes as a reciprocal and a product: two roundings.
    scale = (torch.full_like(whole, 448 * element.top) / whole).clamp(max=_F32_MAX)
    scale = torch.where((whole == 0) | (scale == 0), 1.0, scale)
    stored = (amax * (scale * (1 / element.top))).clamp(max=448.0)
    stored = stored.to(torch.float8_e4m3fn).float()
    encode = (stored * scale.reciprocal()).reciprocal().clamp(max=_F32_MAX)
    return encode, stored, whole


def _four_over_six(
    amax: Tensor, element: Element, rounding: str, wide: Tensor, rounded: Callable[..., Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    return four_over_six.better(wide, amax, element.top, rounded)


def _delayed(
    amax: Tensor, element: Element, rounding: str, kept: Tensor | None = None
) -> tuple[Tensor, Tensor, None]:
    if kept is None:  # the first scale is 1
        return _one(amax, element, rounding)
    # No operator of its own: compiled, equal blocks would write to one of them.
    kept[1] = torch.fmax(kept[1], amax).clamp(max=_F32_MAX)
    encode = kept[0] + 0 * amax
    return encode, _inverse(encode), None


SCALES = {
    "fp32": Scale(_fp32, in_bf16=False),
    "pow2": Scale(_pow2, in_bf16=True),
    "e8m0": Scale(_e8m0, in_bf16=True),
    "e4m3": Scale(_e4m3, in_bf16=True, two_levels=448),
    "four_over_six": Scale(
        _four_over_six, in_bf16=True, two_levels=four_over_six.BOUND, of_numbers=True
    ),
    "delayed": Scale(_delayed, in_bf16=False, is_kept=True),
    "none": Scale(_one, in_bf16=True),  # of granularity none
}


def encoded(wide: Tensor, element: Element, random: Tensor | None = None) -> Tensor:
    """Return the codes of FP32 numbers: saturated, to nearest, ties to even. It writes to them.

    random: 0 to 65535 for each number, in its place in memory, for stochastic rounding: up with the
        probability of the distance from the lower neighbour (Gupta et al., arXiv 1502.02551).
    """
    wide.clamp_(-element.top, element.top)
    if random is not None or not element.is_cast_by_torch:
        # The distance of two neighbours, a power of two, by its bits.
        bits = wide.view(torch.int32) & _EXPONENT
        bits.clamp_((127 + element.emin) << 23, (127 + element.emax) << 23)
        bits.sub_(element.mantissa << 23)
        wide.mul_(((254 << 23) - bits).view(torch.float32))
        if random is None:
            wide.round_()
        else:
            up = random.view(wide.shape) * 2.0**-16
            wide = up.add_(wide.abs()).floor_().copysign_(wide)
        wide.mul_(bits.view(torch.float32))
    return wide.to(element.dtype)


def decoded(values: Tensor, factor: Tensor) -> Tensor:
    """Decode FP8 or INT8 times `factor` to FP32, rounded once; factors of blocks as of `in_blocks`.

    It moves bits, in an eighth of the time of torch's conversion: exponent and mantissa go to their
    places in FP32, whose exponent has another bias. A NaN of E4M3 comes back as 480, and a NaN of
    E5M2 also as a number; the factor of a tensor with a NaN is not finite. Numbers that their cast
    has decoded stay as they are.
    """
    if values.itemsize > 1:
        return values.float()
    wide = values.float() if values.dtype is torch.int8 else _float_from_bits(values)
    if factor.dim() < 4:
        return wide.mul_(factor)
    down, rows, across, columns = factor.shape
    (n, k), whole = wide.shape, (down * rows, across * columns)
    if (n, k) == whole:
        wide.view(factor.shape).mul_(factor)
        return wide
    return wide.mul_(factor.reshape(whole)[:n, :k])


def _float_from_bits(values: Tensor) -> Tensor:
    """Return FP8 numbers in FP32; see `decoded`."""
    # Sign-extended, so that the sign fills all bits above the other seven.
    bits = values.view(torch.int8).to(torch.int32)
    if values.dtype is torch.float8_e4m3fn:
        bits.bitwise_left_shift_(20).bitwise_and_(0x07F00000 - 2**31)
        bias = 120
    else:
        bits.bitwise_left_shift_(21).bitwise_and_(0x0FE00000 - 2**31)
        bias = 112
    return bits.view(torch.float32).mul_(2.0**bias)


def in_blocks(factor: Tensor, block: Block, size: torch.Size) -> Tensor:
    """Return factors of blocks, one each, as a view [blocks down, rows, blocks across, columns]."""
    rows, columns = (min(own or whole, whole) for own, whole in zip(block, size, strict=True))
    return factor[:, None, :, None].expand(-1, rows, -1, columns)


library = torch.library.Library("mprun", "DEF")
# One operation for a whole cast: a mode that watches operations pays for it once.
library.define(
    "cast_blocks(Tensor matrix, str element, int rows, int columns, str scale, str scale_rounding,"
    " int stream, ScalarType? decoded) -> (Tensor values, Tensor factor, Tensor whole)"
)
library.define("turn(Tensor matrix, int dim) -> Tensor")


def cast_blocks(
    matrix: Tensor, element: str, rows: int, columns: int, scale: str, rounding: str, stream: int,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Cast a matrix in blocks of rows x columns: codes, a factor of each block, amax if needed.

    dtype: of decoded numbers, which come in place of codes.
    """
    (n, k), own = matrix.shape, ELEMENTS[element]
    rows, columns = _fitted(rows, n), _fitted(columns, k)
    whole_blocks = filled(matrix, -n % rows, -k % columns).float()
    wide = whole_blocks.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    amax = wide.abs().amax((1, 3), keepdim=True)
    kind, one = SCALES[scale], amax.new_ones(())
    more = (wide, lambda numbers: decoded(encoded(numbers, own), one)) if kind.of_numbers else ()
    encode, factor, whole = kind.of(amax, own, rounding, *more)
    random = _random_bits(wide, stream) if stream else None
    values = encoded(wide * encode, own, random).flatten(0, 1).flatten(1)[:n, :k].contiguous()
    factor = factor.flatten(0, 1).flatten(1)
    if dtype is not None:
        values = decoded(values, in_blocks(factor, (rows, columns), values.shape)).to(dtype)
    # An operator has to return something.
    return values, factor, factor.new_empty(0) if whole is None else whole


def filled(matrix: Tensor, rows: int, columns: int, value: float = 0.0) -> Tensor:
    """Return a matrix with more rows and columns of a value; torch's pad copies also for none."""
    if not rows and not columns:
        return matrix
    return nn.functional.pad(matrix, (0, columns, 0, rows), value=value)


def _fitted(count: int, size: int) -> int:
    """Return the length of a block, 0 for all; a longer one is padded to a power of two at most."""
    return min(count or size, 1 << (size - 1).bit_length())


def cast_blocks_by_kernel(
    matrix: Tensor, element: str, rows: int, columns: int, scale: str, rounding: str, stream: int,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute `cast_blocks` in one launch, and one for amax of a tensor.

    Blocks that are no power of two, or large, are cast by torch's operations, and those whose scale
    is of all of their numbers.
    """
    (n, k), given = matrix.shape, (rows, columns)
    rows, columns = _fitted(rows, n), _fitted(columns, k)
    has_kernel = ELEMENTS[element].dtype.is_floating_point and not SCALES[scale].of_numbers
    count = rows * columns if all(given) and has_kernel else 0
    try:
        # Imported here: only torch for CUDA on Linux includes Triton.
        from mprun.precision import cast_kernels_triton as kernels
    except ImportError:
        count = 0
    if not 0 < count <= kernels.LARGEST or count & (count - 1) or not matrix.numel():
        return cast_blocks(matrix, element, *given, scale, rounding, stream, dtype)
    own, random, whole = ELEMENTS[element], None, None
    if SCALES[scale].two_levels:
        whole = torch.linalg.vector_norm(matrix, math.inf, dtype=torch.float32)
    if stream:
        padded = (n + -n % rows) * (k + -k % columns)
        first = micro_batches.draw(stream, -(-padded // IN_BLOCK))
        seed = micro_batches.seed
        random = seed - (seed >> 63 << 64), micro_batches.number(matrix.device), first, stream
    form = {"SCALE": scale, "ROUNDING": rounding, **kernels.of_element(own)}
    values, factor = kernels.cast(matrix, form, (rows, columns), dtype or own.dtype, random, whole)
    return values.view(dtype or own.dtype), factor, factor.new_empty(0) if whole is None else whole


def are_blocks_alike(matrix: Tensor, operand: Operand) -> bool:
    """Return whether the kernel has the bits of `cast_blocks`, along both dimensions.

    Blocks of zeros, an infinity and a NaN are put into the matrix. What is not finite may be so in
    another way, and codes in such a block say nothing.
    """
    matrix = matrix.clone()
    matrix[:40, :20] = 0.0
    spoiled = matrix.clone()
    spoiled[50, 1], spoiled[90, 30] = math.inf, math.nan
    earlier = dict(micro_batches.drawn)
    for block in (operand.block, operand.block[::-1]):
        form = operand.element.name, *block, operand.scale, operand.scale_rounding, operand.stream
        for given, dtype in ((matrix, None), (spoiled, operand.decoded_to)):
            found = []
            for cast in (cast_blocks, cast_blocks_by_kernel):
                micro_batches.drawn = dict(earlier)
                found.append([part.float() for part in cast(given, *form, dtype)])
            for one, other in zip(*found, strict=True):
                alike = (one == other) | ~(one.isfinite() | other.isfinite())
                if not alike.all():
                    return False
    return True


def _random_bits(wide: Tensor, stream: int) -> Tensor:
    """Return the present micro-batch's next bits of a stream, one for each number by rows."""
    count = -(-wide.numel() // IN_BLOCK)
    blocks = torch.arange(count, device=wide.device) + micro_batches.draw(stream, count)
    number = micro_batches.number(wide.device)
    name = torch.full_like(blocks, stream)
    bits = bits_of([blocks, number.expand_as(blocks), name, name >> 32], micro_batches.seed)
    return bits[: wide.numel()]


def _shapes_of_cast(
    matrix: Tensor, element: str, rows: int, columns: int, scale: str, rounding: str, stream: int,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    n, k = matrix.shape
    counts = -(-n // (rows or n)), -(-k // (columns or k))
    values = matrix.new_empty((n, k), dtype=dtype or ELEMENTS[element].dtype)
    whole = () if SCALES[scale].two_levels else (0,)
    factor, amax = (matrix.new_empty(size, dtype=torch.float32) for size in (counts, whole))
    return values, factor, amax


_SIZE = 16
_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)  # of Transformer Engine


@cache
def turning(device: torch.device) -> Tensor:
    """Return the orthogonal matrix by which `turn` multiplies: Sylvester's, with signs of rows."""
    places = range(_SIZE)
    rows = [[(-1) ** (i & j).bit_count() * _SIGNS[i] / 4 for j in places] for i in places]
    return torch.tensor(rows, device=device)


def turn(matrix: Tensor, dim: int) -> Tensor:
    """Turn each 16 numbers along `dim` by `turning`, rounded to BF16; zeros fill the last 16.

    A product of two matrices that are turned along its sum is that of the two, without casts. A
    large number becomes 16 smaller ones (random Hadamard transform, arXiv 2509.25149).
    """
    by, more = turning(matrix.device), -matrix.size(dim) % _SIZE
    if dim == -1:
        wide = filled(matrix.float(), 0, more).unflatten(1, (-1, _SIZE))
        return (wide @ by).flatten(1).bfloat16()
    wide = filled(matrix.float(), more, 0).unflatten(0, (-1, _SIZE))
    return (by.t() @ wide).flatten(0, 1).bfloat16()


def apart(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return an operator's kernel that torch.autocast does not reach: it would narrow FP32 sums."""

    @wraps(kernel)
    def run(matrix: Tensor, *rest: Any) -> Any:
        kind = matrix.device.type
        if not torch.is_autocast_enabled(kind):
            return kernel(matrix, *rest)
        with torch.autocast(kind, enabled=False):
            return kernel(matrix, *rest)

    return run


def _shape_of_turned(matrix: Tensor, dim: int) -> Tensor:
    n, k = matrix.shape
    more = -matrix.size(dim) % _SIZE
    size = (n, k + more) if dim == -1 else (n + more, k)
    return matrix.new_empty(size, dtype=torch.bfloat16)


for key, of_cast, of_turn in (
    ("CPU", cast_blocks, apart(turn)),
    ("CUDA", cast_blocks_by_kernel, apart(turn)),
    ("Meta", _shapes_of_cast, _shape_of_turned),
):
    library.impl("cast_blocks", of_cast, key)
    library.impl("turn", of_turn, key)
