"""What a count consists of: one row per kernel, or per group of equal kernels."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

# How a row's products are computed, by dtype; FP32 ones may be in TF32, which the counter knows.
FORMATS = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


@dataclass(frozen=True, slots=True)
class Row:
    """`launches` kernels of one kind that together do `flops` and move `bytes`.

    kind: "convolution", "batch norm backward", "cast", ... phase: "forward", "backward" or
    "update". form: number format of the products, "" where there are none. folded_bytes: what is
    left of the bytes where the kernel's work is folded into a BatchNorm kernel beside it; None: it
    cannot be.
    """

    kind: str
    phase: str
    form: str
    flops: int
    bytes: int
    launches: int = 1
    folded_bytes: int | None = None

    def seconds(self, flops_per_s: dict[str, float], bytes_per_s: float) -> tuple[float, float]:
        """(time of the products, time of the traffic); the longer one is the row's."""
        products = self.flops / flops_per_s[self.form] if self.flops else 0.0
        return products, self.bytes / bytes_per_s


# (kind, dtype, flops, bytes, launches): whatever no dispatcher sees writes its rows by this.
Write = Callable[[str, torch.dtype, int, int, int], None]
