"""The Triton kernels of BatchNorm with ReLU and the sum of a residual, forward and backward.

Maps are NHWC: a matrix [rows, channels], a row for each pixel of each image. A program works on a
chunk of rows and a block of channels, in tiles of LANES rows, and writes two numbers a channel to
`parts`, float32 [chunks, 2, channels]. A second kernel adds up the chunks. There are no atomics,
and the order of every sum is fixed: a lane adds up its rows one after the other, then the lanes are
added in halves (`_total`). So a run repeats bit for bit, on a GPU as in the interpreter.

Every operation is rounded once, in FP32 (launched with enable_fp_fusion=False). What the separate
operations would store, maps and the sum before ReLU, is rounded to the dtype of the maps.
`mprun.extensions.fused_norm.choice` has the same computation in operations of torch.

Import it only if Triton is installed.
"""

import triton
import triton.language as tl

from mprun.precision.cast_kernels_triton import wide
from mprun.precision.single_pass_kernels import nearest


@triton.jit
def _rounded(value, like):
    """Round FP32 to the dtype that `like` points to; return FP32."""
    if like.dtype.element_ty == tl.uint16:
        return (nearest(value) << 16).to(tl.float32, bitcast=True)
    return value.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def _put(pointers, value, inside):
    if pointers.dtype.element_ty == tl.uint16:
        tl.store(pointers, nearest(value).to(tl.uint16), mask=inside)
    else:
        tl.store(pointers, value.to(pointers.dtype.element_ty), mask=inside)


@triton.jit
def _total(lanes, LANES: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr):
    """Add up [LANES, BLOCK] over the lanes, the second half to the first: [1, BLOCK].

    A sum of two has one order, whatever layout the compiler chooses.
    """
    for level in tl.static_range(LEVELS):
        lanes = tl.sum(tl.reshape(lanes, (2, LANES >> (level + 1), BLOCK)), 0)
    return lanes


@triton.jit
def _tile(steps, channels, LANES: tl.constexpr, BLOCK: tl.constexpr):
    """Return the rows of the first tile [LANES, 1] and the channels [1, BLOCK] of a program."""
    start = tl.program_id(0).to(tl.int64) * steps * LANES
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    return (start + tl.arange(0, LANES))[:, None], column[None, :], (column < channels)[None, :]


@triton.jit
def statistics_kernel(
    x, parts, rows, channels, steps,
    LANES: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Write each chunk's mean, and its sum of squared deviations from that.

    Deviations are first taken from the mean of the chunk's first tile, so that a large mean leaves
    the digits of a small variance.
    """
    row, column, known = _tile(steps, channels, LANES, BLOCK)
    start = tl.program_id(0).to(tl.int64) * steps * LANES
    first = wide(x + row * channels + column, (row < rows) & known)
    in_tile = tl.minimum(rows - start, LANES).to(tl.float32)
    shift = tl.div_rn(_total(first, LANES, BLOCK, LEVELS), in_tile)
    sums = tl.zeros((LANES, BLOCK), tl.float32)
    squares = tl.zeros((LANES, BLOCK), tl.float32)
    for step in range(steps):
        inside = (row + step * LANES < rows) & known
        value = wide(x + (row + step * LANES) * channels + column, inside)
        apart = tl.where(inside, value - shift, 0.0)
        sums += apart
        squares += apart * apart
    count = tl.minimum(rows - start, steps * LANES).to(tl.float32)
    total = _total(sums, LANES, BLOCK, LEVELS)
    square = _total(squares, LANES, BLOCK, LEVELS) - tl.div_rn(total * total, count)
    place = parts + tl.program_id(0).to(tl.int64) * 2 * channels + column
    tl.store(place, shift + tl.div_rn(total, count), mask=known)
    tl.store(place + channels, tl.where(square < 0, 0.0, square), mask=known)


@triton.jit
def finish_statistics_kernel(
    parts, statistics, running_mean, running_var, batches, momentum, rest, eps,
    rows, channels, chunks, chunk,
    LANES: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Write mean and 1 / sqrt(variance + eps), float32 [2, channels]; move the running statistics.

    A chunk has `chunk` rows, the last one the rest. running = rest * running + momentum * new.
    """
    lane = tl.arange(0, LANES)[:, None]
    column = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[None, :]
    known = column < channels
    count = rows.to(tl.float32)
    sums = tl.zeros((LANES, BLOCK), tl.float32)
    for first in range(0, chunks, LANES):
        inside = (first + lane < chunks) & known
        own = tl.minimum(rows - (first + lane) * chunk, chunk).to(tl.float32)
        mean = tl.load(parts + (first + lane) * 2 * channels + column, mask=inside, other=0.0)
        sums += tl.where(inside, tl.div_rn(own, count) * mean, 0.0)
    mean = _total(sums, LANES, BLOCK, LEVELS)
    sums = tl.zeros((LANES, BLOCK), tl.float32)
    for first in range(0, chunks, LANES):
        inside = (first + lane < chunks) & known
        own = tl.minimum(rows - (first + lane) * chunk, chunk).to(tl.float32)
        place = parts + (first + lane) * 2 * channels + column
        apart = tl.load(place, mask=inside, other=0.0) - mean
        squares = tl.load(place + channels, mask=inside, other=0.0) + own * (apart * apart)
        sums += tl.where(inside, squares, 0.0)
    squares = _total(sums, LANES, BLOCK, LEVELS)
    deviation = tl.sqrt_rn(tl.div_rn(squares, count) + eps)
    tl.store(statistics + column, mean, mask=known)
    tl.store(statistics + channels + column, tl.div_rn(1.0, deviation), mask=known)
    unbiased = tl.div_rn(squares, count - 1.0)
    old = wide(running_mean + column, known)
    _put(running_mean + column, rest * old + momentum * mean, known)
    old = wide(running_var + column, known)
    _put(running_var + column, rest * old + momentum * unbiased, known)
    if tl.program_id(0) == 0:
        tl.store(batches, tl.load(batches) + 1)


@triton.jit
def _normalised(value, mean, inverse):
    return (value - mean) * inverse


@triton.jit
def normalise_kernel(
    x, residual, y, weight, bias, statistics, rows, channels, steps,
    RELU: tl.constexpr, SUM: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y = relu(normalised x * weight + bias + residual), rounded after each of the three."""
    row, column, known = _tile(steps, channels, LANES, BLOCK)
    mean = tl.load(statistics + column, mask=known, other=0.0)
    inverse = tl.load(statistics + channels + column, mask=known, other=0.0)
    gain, shift = wide(weight + column, known), wide(bias + column, known)
    for step in range(steps):
        inside = (row + step * LANES < rows) & known
        place = (row + step * LANES) * channels + column
        value = _normalised(wide(x + place, inside), mean, inverse) * gain + shift
        if SUM:
            value = _rounded(value, y) + wide(residual + place, inside)
        if RELU:
            value = _rounded(value, y)
            value = tl.where(value <= 0, 0.0, value)  # a NaN stays one
        _put(y + place, value, inside)


@triton.jit
def _passed(gradient, value, y, place, inside, gain, shift, MASK: tl.constexpr):
    """Return the gradient that ReLU passes on: 0 where its output is, as torch does with NaN.

    MASK: "output" reads that from y, "input" computes it anew from the normalised value; "no":
    there is no ReLU.
    """
    if MASK == "output":
        gradient = tl.where(wide(y + place, inside) <= 0, 0.0, gradient)
    if MASK == "input":
        gradient = tl.where(_rounded(value * gain + shift, y) <= 0, 0.0, gradient)
    return gradient


@triton.jit
def gradient_sums_kernel(
    gradient, x, y, passed, weight, bias, statistics, parts, rows, channels, steps,
    MASK: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Write each chunk's sums of gradient and of gradient * normalised x, after ReLU's mask.

    With MASK "output" `passed` gets the masked gradient, which is the residual's.
    """
    row, column, known = _tile(steps, channels, LANES, BLOCK)
    mean = tl.load(statistics + column, mask=known, other=0.0)
    inverse = tl.load(statistics + channels + column, mask=known, other=0.0)
    gain, shift = wide(weight + column, known), wide(bias + column, known)
    sums = tl.zeros((LANES, BLOCK), tl.float32)
    products = tl.zeros((LANES, BLOCK), tl.float32)
    for step in range(steps):
        inside = (row + step * LANES < rows) & known
        place = (row + step * LANES) * channels + column
        value = _normalised(wide(x + place, inside), mean, inverse)
        own = wide(gradient + place, inside)
        own = _passed(own, value, y, place, inside, gain, shift, MASK)
        if MASK == "output":
            _put(passed + place, own, inside)
        sums += own
        products += tl.where(inside, own * value, 0.0)
    place = parts + tl.program_id(0).to(tl.int64) * 2 * channels + column
    tl.store(place, _total(sums, LANES, BLOCK, LEVELS), mask=known)
    tl.store(place + channels, _total(products, LANES, BLOCK, LEVELS), mask=known)


@triton.jit
def finish_sums_kernel(
    parts, totals, of_bias, of_weight, channels, chunks,
    LANES: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Add up the chunks: float32 [2, channels], and in the dtype of bias and weight."""
    lane = tl.arange(0, LANES)[:, None]
    column = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[None, :]
    known = column < channels
    sums = tl.zeros((LANES, BLOCK), tl.float32)
    products = tl.zeros((LANES, BLOCK), tl.float32)
    for first in range(0, chunks, LANES):
        inside = (first + lane < chunks) & known
        place = parts + (first + lane) * 2 * channels + column
        sums += tl.load(place, mask=inside, other=0.0)
        products += tl.load(place + channels, mask=inside, other=0.0)
    total, product = _total(sums, LANES, BLOCK, LEVELS), _total(products, LANES, BLOCK, LEVELS)
    tl.store(totals + column, total, mask=known)
    tl.store(totals + channels + column, product, mask=known)
    _put(of_bias + column, total, known)
    _put(of_weight + column, product, known)


@triton.jit
def gradient_kernel(
    gradient, x, y, of_x, weight, bias, statistics, totals, rows, channels, steps,
    MASK: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """of_x = (gradient - mean of them - normalised x * mean of products) * (weight / deviation)."""
    row, column, known = _tile(steps, channels, LANES, BLOCK)
    mean = tl.load(statistics + column, mask=known, other=0.0)
    inverse = tl.load(statistics + channels + column, mask=known, other=0.0)
    gain, shift = wide(weight + column, known), wide(bias + column, known)
    count = rows.to(tl.float32)
    of_mean = tl.div_rn(tl.load(totals + column, mask=known, other=0.0), count)
    product = tl.load(totals + channels + column, mask=known, other=0.0)
    of_deviation, scale = tl.div_rn(product, count), gain * inverse
    for step in range(steps):
        inside = (row + step * LANES < rows) & known
        place = (row + step * LANES) * channels + column
        value = _normalised(wide(x + place, inside), mean, inverse)
        own = wide(gradient + place, inside)
        own = _passed(own, value, y, place, inside, gain, shift, MASK)
        _put(of_x + place, (own - of_mean - value * of_deviation) * scale, inside)
