"""Run as a script by test_cast_kernels.py, with TRITON_INTERPRET=1.

Prints one line of JSON: how many bytes were compared, and what differs.
"""

import json

import numpy as np
import torch

from mprun.precision.block_formats import ELEMENTS
from mprun.precision.scaled_operators import cast_by_kernel, saturated

FORMATS = (ELEMENTS["e4m3"], ELEMENTS["e5m2"])
SHAPES = ((64, 64), (1, 1), (3, 200), (130, 67), (65, 16))


def scales(rows, columns, random):
    """Of the whole, of each row along the sum, and of each column."""
    for size in ((), (rows, 1), (1, columns)):
        yield torch.rand(size, generator=random) * 3 + 0.1
    yield torch.tensor(torch.nan)
    yield torch.tensor(0.0)


def bits_of(found):
    return found.contiguous().view(torch.uint8)


def apart(one, other):
    """Different bytes; the sign of NaN * NaN is that of either factor, so a NaN equals a NaN."""
    both_nan = one.float().isnan() & other.float().isnan()
    return int(((bits_of(one) != bits_of(other)) & ~both_nan).sum())


def of_every_half():
    """All 65,536 numbers of FP16 and BF16, which hit every tie and subnormal number of FP8."""
    every = np.arange(2**16, dtype=np.uint16).view(np.int16)
    for dtype in (torch.float16, torch.bfloat16):
        yield torch.from_numpy(every.copy()).view(dtype).view(256, 256)


def matrices():
    random = torch.Generator().manual_seed(0)
    special = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, -torch.nan, 448.0, 464.0, 57344.0]
    special += [61440.0, 2.0**-9, 2.0**-10, 2.0**-16, 2.0**-17, 1.5 * 2.0**-10, 1e-45, 3e38]
    for shape in SHAPES:
        made = torch.randn(shape, generator=random) * torch.randn(shape, generator=random).exp2()
        made.view(-1)[: len(special)] = torch.tensor(special)[: made.numel()]
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            yield made.to(dtype)
        yield made.t()  # not contiguous
    yield from of_every_half()


if __name__ == "__main__":
    compared, different = 0, []
    random = torch.Generator().manual_seed(1)
    for matrix in matrices():
        for scale in scales(*matrix.shape, random):
            for element in FORMATS:
                expected = saturated(matrix, scale, element)
                for rows, turned in ((True, True), (True, False), (False, True)):
                    found = cast_by_kernel(matrix, scale, element.dtype, rows, turned)
                    wanted = (rows, expected), (turned, expected.t())
                    for own, (asked, one) in zip(found, wanted, strict=True):
                        assert own.numel() == (one.numel() if asked else 0)
                        if asked:
                            compared += one.numel()
                            if wrong := apart(own, one):
                                what = f"{matrix.shape} {matrix.dtype} {element.name} {scale.shape}"
                                different.append(f"{what}: {wrong} of {one.numel()}")
    print(json.dumps({"compared": compared, "different": different}))
