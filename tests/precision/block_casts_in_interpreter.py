"""Run as a script by test_cast_kernels.py, with TRITON_INTERPRET=1.

Prints one line of JSON: how many numbers of casts were compared, how many bytes of layouts for
products, and what differs.
"""

import json
from itertools import product

import numpy as np
import torch

from mprun.precision import cast_kernels_triton as kernels
from mprun.precision import get_policy
from mprun.precision.block_formats import (
    ELEMENTS,
    SCALE_ROUNDINGS,
    cast_blocks,
    cast_blocks_by_kernel,
)
from mprun.precision.block_products import laid_out
from mprun.precision.philox import micro_batches, stream_of
from mprun.precision.scaled_products import cast
from tests.shipped import IN_BLOCKS


def matrices():
    """Yield matrices of every size, with zero and non-finite blocks; ragged, and not contiguous."""
    random = torch.Generator().manual_seed(0)
    for shape in ((33, 70), (1, 1), (130, 19)):
        made = torch.randn(shape, generator=random)
        made *= (torch.randn(shape, generator=random) * 8).exp2()
        made *= (torch.randn(shape[0], 1, generator=random) * 20).exp2()
        made[: shape[0] // 3, : shape[1] // 2] = 0.0
        yield made
        yield made.half()
        yield made.bfloat16().t()
        bad = made.clone()
        bad[-1, -1], bad[shape[0] // 2, 0], bad[0, -1] = torch.inf, torch.nan, -torch.inf
        yield bad
        bad[shape[0] // 2, 0] = 1.0  # infinities alone
        yield bad.bfloat16()
    every = np.arange(2**16, dtype=np.uint16).view(np.int16)
    for dtype in (torch.float16, torch.bfloat16):
        yield torch.from_numpy(every.copy()).view(dtype).view(256, 256)
    yield torch.tensor([[448.0, 1e-45, -1e-45, 3.4e38], [7.0, -0.0, 2.0**-126, 5e-13]])


def forms():
    """Every cast of the shipped modes, along both dimensions; every pair of element and scale."""
    found = {}
    for mode in IN_BLOCKS:
        for name, of in (("input", "output"), ("weight", "output"), ("grad_output", "grad_input")):
            own = get_policy(mode).matmul.operand(name, of, "a")
            for block in (own.block, own.block[::-1]):
                found[own.element.name, *block, own.scale, own.scale_rounding, own.stream] = None
    for element, scale in product(ELEMENTS, ("fp32", "pow2", "none", "e4m3")):
        found[element, 4, 8, scale, "", stream_of("b") if scale == "pow2" else 0] = None
    for element, rounding in product(ELEMENTS, SCALE_ROUNDINGS):
        found[element, 2, 16, "e8m0", rounding, 0] = None
    return list(found)


def drawn(cast, matrix, form, dtype):
    micro_batches.begin_step(matrix.device, -(2**62) - 5, 3)
    micro_batches.drawn[form[-1]] = 2**31 + 7  # a second cast in one micro-batch
    return cast(matrix, *form, dtype), dict(micro_batches.drawn)


def apart(one, other, finite):
    """Different numbers, by their bits where they are finite; elsewhere both have to be not."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[one.itemsize]
    alike = one.contiguous().view(kind) == other.contiguous().view(kind)
    alike |= ~one.float().isfinite() & ~other.float().isfinite()
    return int((~alike & finite).sum())


def compare(matrix, form, dtype):
    """How many numbers differ; codes of a block whose factor is not finite do not count."""
    (expected, factor, whole), drew = drawn(cast_blocks, matrix, form, dtype)
    (values, own_factor, own_whole), own_drew = drawn(cast_blocks_by_kernel, matrix, form, dtype)
    assert values.shape == expected.shape and values.dtype == expected.dtype
    assert values.is_contiguous() and drew == own_drew
    n, k = matrix.shape
    spread = factor.repeat_interleave(form[1], 0)[:n].repeat_interleave(form[2], 1)[:, :k]
    wrong = apart(values, expected, spread.isfinite() | (dtype is not None))
    return sum((wrong, *(apart(a, b, True) for a, b in ((own_factor, factor), (own_whole, whole)))))


def operands(products, size):
    """Both operands of each product, as `multiplied_in_blocks` lays them out."""
    matrix = torch.randn(size) * (4 * torch.randn(size)).exp2()
    matrix[0, 0] = 0.0
    for left, right in products.plan()[:3]:
        a, b = cast(matrix, left), cast(matrix, right).T
        yield a.values, a.spread[..., 0]
        yield b.values.t(), b.spread[:, 0].permute(1, 2, 0)
        c = cast(matrix, right, 0)  # along the other dimension: columns of codes
        yield c.values.t(), c.spread[:, 0].permute(1, 2, 0)


def layouts():
    """How many bytes were compared, and what differs."""
    torch.manual_seed(0)
    compared, different = 0, []
    for mode in ("mxfp8", "mxfp4", "nvfp4"):
        for size in ((1, 1), (33, 100), (130, 261), (256, 128)):
            for codes, factor in operands(get_policy(mode).matmul, size):
                packs = mode == "nvfp4"
                made = kernels.laid_out(codes, factor, 16 if packs else 32, 32)
                for own, expected in zip(made, laid_out(codes, factor, packs), strict=True):
                    wrong = int((own != expected.view(torch.uint8)).sum())
                    compared += own.numel()
                    if wrong or own.shape != expected.shape:
                        different.append(f"layout {mode} {size} {codes.stride()}: {wrong}")
    return compared, different


if __name__ == "__main__":
    compared, different = 0, []
    for matrix in matrices():
        for form in forms()[:: 5 if matrix.numel() == 2**16 else 1]:
            # One that BF16 has not is decoded to FP32.
            for dtype in (None, torch.float32 if form[3] == "fp32" else torch.bfloat16):
                wrong = compare(matrix, form, dtype)
                compared += matrix.numel()
                if wrong:
                    what = f"{tuple(matrix.shape)} {matrix.dtype} {form} {dtype}"
                    different.append(f"{what}: {wrong}")
    laid, wrong = layouts()
    print(json.dumps({"compared": compared, "laid out": laid, "different": different + wrong}))
