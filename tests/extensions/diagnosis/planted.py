"""Networks with a planted cause, as a user types them, and runs of them."""

from torch import nn

from benchmarks.planted_causes.causes import networks

NETWORKS = networks()
DIGITS = NETWORKS["healthy.perceptron_bf16"].words


def own_code(words: list[str]) -> list[str]:
    """Return the words that name code."""
    return [word for word in words if "factory=" in word]


class Applied(nn.Module):
    """One function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)
