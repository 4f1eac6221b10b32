"""A network of one weight whose gradient a test chooses."""

import torch
from torch import nn


class OneWeight(nn.Module):
    """Computes `gradient * w` in FP32, of one weight as the mode rounds it."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([value]))

    def forward(self, gradient: float) -> torch.Tensor:
        return (self.w.float() * gradient).sum()
