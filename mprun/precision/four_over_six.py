"""Scales of NVFP4 by which the largest number of a block becomes 6, or 4: four over six.

E2M1 has no number between 4 and 6, so what is just below the largest of a block is rounded worst.
With 4 as the largest, numbers of 3/4 of it are there. A block gets the scale whose decoded numbers
have the smaller squared error; 6, if they are equal (Cook et al., arXiv 2512.02010, and their
program fouroversix; Transformer Engine's quantize_4over6_nvfp4.cuh).

The scale of the tensor maps the largest block of 6 to 256, not 448: times 1.5, for 4, it is 384, a
number of E4M3 too. Both programs compute errors in FP32, where the squares of small gradients
underflow. Here they are compared in FP64, in which each difference is exact.
"""

from collections.abc import Callable

import torch
from torch import Tensor

BOUND = 256  # the largest scale of a block whose largest number becomes 6
_MORE = 1.5  # 6 / 4
_F32_MAX = torch.finfo(torch.float32).max


def of_both(amax: Tensor, top: float) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """Return the factors before and after the cast, of 6 and of 4, and amax of the tensor.

    Each step is one rounding in FP32.
    """
    whole = amax.amax()
    # Not number / tensor, which torch computes as a reciprocal and a product: two roundings.
    scale = (torch.full_like(whole, BOUND * top) / whole).clamp(max=_F32_MAX)
    scale = torch.where((whole == 0) | (scale == 0), 1.0, scale)
    base = amax / torch.full_like(amax, top) * scale
    found = []
    for wanted in (base, base * _MORE):
        stored = wanted.clamp(max=448.0).to(torch.float8_e4m3fn).float()
        encode = (stored * scale.reciprocal()).reciprocal().clamp(max=_F32_MAX)
        found.append((encode, stored))
    return found, whole


def better(
    wide: Tensor, amax: Tensor, top: float, rounded: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the factors of each block that has the smaller squared error, and amax of the tensor.

    wide: [blocks down, rows, blocks across, columns]. rounded: writes to its argument and returns
    the nearest numbers of the format.
    """
    (six, four), whole = of_both(amax, top)
    # Times BOUND * top, so that nothing is divided: products and difference have 53 bits at most.
    wanted = wide.double() * (BOUND * top)
    errors = []
    for encode, stored in (six, four):
        found = rounded(wide * encode).double() * (stored.double() * whole.double())
        errors.append((found - wanted).square_().sum((1, 3), keepdim=True))
    is_four = errors[1] < errors[0]
    encode, stored = (torch.where(is_four, b, a) for a, b in zip(six, four, strict=True))
    return encode, stored, whole
