"""The Triton kernels of the single pass: one that checks gradients, one that updates.

A program works on BLOCK consecutive values of one tensor. It reads from `chunks` (int32 [programs,
2]) the row of the tensor in the tables, and the number of the block in it. The tables hold
addresses as int64. `gradients` is [tensors]. `tensors` is [tensors, 7]: number of values, addresses
of master, first state, second state, copy and step, and the number of a BF16 weight without master.
Such a weight stands in the master's place, and its rounding error in the copy's. So one launch
serves any number of tensors, and a kernel needs no recompilation when addresses change. ALIGNED
promises that all addresses and numbers of values are multiples of 16.

Formulas and order of operations are those of torch.optim's foreach implementations, in FP32 with
every operation rounded once (launched with enable_fp_fusion=False). So the interpreter computes the
same bits as a GPU.

Import it only if Triton is installed.
"""

import triton
import triton.language as tl

COLUMNS = tl.constexpr(7)


@triton.jit
def _at(address, offsets, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """Return pointers to values; ALIGNED: the address is a multiple of 16, so loads are wide."""
    pointers = address.to(tl.pointer_type(DTYPE)) + offsets
    if ALIGNED:
        pointers = tl.multiple_of(tl.max_contiguous(pointers, BLOCK), 16)
    return pointers


@triton.jit
def _place(chunks, tensors, program, found_inf, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """Return (row in the tables, offsets, mask of the values to work on) of a program.

    The mask is true inside the tensor, and false everywhere if `found_inf` skips the step.
    """
    row = tl.load(chunks + 2 * program).to(tl.int64)
    start = tl.load(chunks + 2 * program + 1).to(tl.int64) * BLOCK
    offsets = start + tl.arange(0, BLOCK)
    numel = tl.load(tensors + row * COLUMNS)
    if found_inf is not None:
        numel = tl.where(tl.load(found_inf) == 0.0, numel, 0)
    if ALIGNED:
        # Otherwise each value could need a separate mask, and would be loaded alone.
        numel = tl.multiple_of(numel, 16)
    return row, offsets, offsets < numel


@triton.jit
def check_kernel(
    gradients,
    tensors,
    chunks,
    inverse,
    found_inf,
    squares,
    largest,
    GRADIENT: tl.constexpr,
    CHECK: tl.constexpr,
    NORM: tl.constexpr,
    LARGEST: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Read every gradient once: set found_inf, and each block's sum of squares and largest value.

    The caller adds up the sums in a fixed order, without atomics, so a run repeats bit for bit. All
    programs that find a non-finite value store the same 1.
    """
    program = tl.program_id(0)
    row, offsets, inside = _place(chunks, tensors, program, None, ALIGNED, BLOCK)
    pointers = _at(tl.load(gradients + row), offsets, GRADIENT, ALIGNED, BLOCK)
    gradient = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
    if CHECK:
        # False for NaN, too.
        finite = tl.abs(gradient) < float("inf")
        strange = tl.max(tl.where(finite, 0, 1), axis=0)
        tl.store(found_inf, 1.0, mask=strange != 0)
    if NORM or LARGEST:
        gradient = gradient * tl.load(inverse)
    if NORM:
        tl.store(squares + program, tl.sum(gradient * gradient, axis=0))
    if LARGEST:
        tl.store(largest + program, tl.max(tl.abs(gradient), axis=0))


@triton.jit
def _narrow(places, writes):
    """Load BF16 as FP32, by bits: the interpreter has no BF16."""
    bits = tl.load(places, mask=writes, other=0).to(tl.int32) << 16
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _bits(wide):
    """Return the bits of FP32, uint32; a NaN gets bits that stay a NaN after any addition below."""
    bits = wide.to(tl.uint32, bitcast=True)
    return tl.where(wide == wide, bits, 0x7FC00000)


@triton.jit
def nearest(wide):
    """Round FP32 to BF16, ties to even; return its 16 bits."""
    bits = _bits(wide)
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


@triton.jit
def _random_bits(block, streams, updates, weight, BLOCK: tl.constexpr):
    """Compute `RoundedWeights.random_bits` of a block: uint32 [BLOCK], eight from each counter."""
    place = (block * (BLOCK // 8) + tl.arange(0, BLOCK // 8)).to(tl.uint32)
    update, name = tl.load(updates), tl.load(streams + 1 + weight)
    update, lower, upper = place * 0 + update.to(tl.uint32), name.to(tl.uint32), (name >> 32)
    lower, upper = place * 0 + lower, place * 0 + upper.to(tl.uint32)
    one, two, three, four = tl.philox(tl.load(streams), place, update, lower, upper)
    words = tl.interleave(tl.interleave(one, three), tl.interleave(two, four))
    return tl.interleave(words & 0xFFFF, words >> 16)


@triton.jit
def _unscaled(pointers, writes, inverse, clip, UNSCALE: tl.constexpr, CLIP: tl.constexpr):
    """Load gradients in FP32, unscaled and clipped."""
    gradient = tl.load(pointers, mask=writes, other=0.0).to(tl.float32)
    if UNSCALE:
        gradient = gradient * tl.load(inverse)
    if CLIP:
        gradient = gradient * tl.load(clip)
    return gradient


@triton.jit
def update_kernel(
    gradients,
    tensors,
    chunks,
    lr,
    inverse,
    clip,
    found_inf,
    logarithms,
    streams,
    updates,
    weight_decay,
    momentum,
    beta1_rest,
    beta2,
    beta2_rest,
    eps,
    RULE: tl.constexpr,
    GRADIENT: tl.constexpr,
    COPY: tl.constexpr,
    HAS_COPY: tl.constexpr,
    UNSCALE: tl.constexpr,
    CLIP: tl.constexpr,
    DECAYS: tl.constexpr,
    MOMENTUM: tl.constexpr,
    NESTEROV: tl.constexpr,
    NARROW: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update the masters and states of one block by the formula of RULE, and write the copy.

    sgd: buffer = momentum * buffer + g; master -= lr * (g + momentum * buffer, or buffer, or g).
    adagrad: sum += g * g; master -= lr * g / (sqrt(sum) + eps).
    adam, adamw: the table's `step` already counts this step. logarithms: float64 [2], of beta1 and
    beta2: a power of beta2 = 0.999 in FP32 would leave four digits of the first corrections.
    *_rest: 1 - beta.

    NARROW: how a BF16 weight without a master is stored, "stochastic" or "kahan", see
    `rounded_weights`; "no": there is none. streams, updates: see `RoundedWeights`.
    """
    # From the end: the cache still holds the values that the check read last.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    row, offsets, writes = _place(chunks, tensors, program, found_inf, ALIGNED, BLOCK)
    pointers = _at(tl.load(gradients + row), offsets, GRADIENT, ALIGNED, BLOCK)
    gradient = _unscaled(pointers, writes, inverse, clip, UNSCALE, CLIP)
    firsts = _at(tl.load(tensors + row * COLUMNS + 2), offsets, tl.float32, ALIGNED, BLOCK)
    if NARROW == "no":
        masters = _at(tl.load(tensors + row * COLUMNS + 1), offsets, tl.float32, ALIGNED, BLOCK)
        master = tl.load(masters, mask=writes, other=0.0)
    else:
        masters = _at(tl.load(tensors + row * COLUMNS + 1), offsets, tl.uint16, ALIGNED, BLOCK)
        master = _narrow(masters, writes)
    if NARROW == "kahan":
        rests = _at(tl.load(tensors + row * COLUMNS + 4), offsets, tl.uint16, ALIGNED, BLOCK)
        master = master + _narrow(rests, writes)
    rate = tl.load(lr)
    if DECAYS:
        if RULE == "adamw":
            master = master * (1.0 - rate * weight_decay)
        else:
            gradient = gradient + master * weight_decay

    if RULE == "sgd":
        if MOMENTUM:
            buffer = tl.load(firsts, mask=writes, other=0.0) * momentum + gradient
            tl.store(firsts, buffer, mask=writes)
            if NESTEROV:
                gradient = gradient + buffer * momentum
            else:
                gradient = buffer
        master = master - rate * gradient
    elif RULE == "adagrad":
        total = tl.load(firsts, mask=writes, other=0.0) + gradient * gradient
        tl.store(firsts, total, mask=writes)
        master = master - rate * tl.div_rn(gradient, tl.sqrt_rn(total) + eps)
    else:
        steps = tl.load(tensors + row * COLUMNS + 5).to(tl.pointer_type(tl.float32))
        step = tl.load(steps).to(tl.float64)
        correction1 = (1.0 - tl.exp(step * tl.load(logarithms))).to(tl.float32)
        correction2 = (1.0 - tl.exp(step * tl.load(logarithms + 1))).to(tl.float32)
        seconds = _at(tl.load(tensors + row * COLUMNS + 3), offsets, tl.float32, ALIGNED, BLOCK)
        first = tl.load(firsts, mask=writes, other=0.0)
        second = tl.load(seconds, mask=writes, other=0.0)
        first = first + beta1_rest * (gradient - first)
        second = second * beta2 + beta2_rest * gradient * gradient
        tl.store(firsts, first, mask=writes)
        tl.store(seconds, second, mask=writes)
        deviation = tl.div_rn(tl.sqrt_rn(second), tl.sqrt_rn(correction2)) + eps
        master = master - tl.div_rn(rate, correction1) * tl.div_rn(first, deviation)

    if NARROW == "stochastic":
        block, weight = tl.load(chunks + 2 * program + 1), tl.load(tensors + row * COLUMNS + 6)
        stored = (_bits(master) + _random_bits(block, streams, updates, weight, BLOCK)) >> 16
        tl.store(masters, stored.to(tl.uint16), mask=writes)
    elif NARROW == "kahan":
        stored = nearest(master)
        rest = master - (stored << 16).to(tl.float32, bitcast=True)
        tl.store(masters, stored.to(tl.uint16), mask=writes)
        tl.store(rests, nearest(rest).to(tl.uint16), mask=writes)
    else:
        tl.store(masters, master, mask=writes)
    if HAS_COPY:
        pointers = _at(tl.load(tensors + row * COLUMNS + 4), offsets, COPY, ALIGNED, BLOCK)
        tl.store(pointers, master.to(COPY), mask=writes)
