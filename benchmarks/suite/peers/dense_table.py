"""mprun's row tables as ordinary parameters, as in every other tool."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mprun.models.lstm import Gathered, RowTable


class DenseTable(nn.Module):
    """The tensors of a `RowTable` as parameters with dense gradients, used like the table.

    gradient_factor: multiplies the gradients, like the row table's optimizer.
    """

    def __init__(self, table: RowTable):
        super().__init__()
        self.weight = nn.Parameter(table.weight.detach())
        self.bias = None if table.bias is None else nn.Parameter(table.bias.detach())
        if table.gradient_factor != 1:
            factor = table.gradient_factor
            for own in self.parameters():
                own.register_hook(lambda gradient: gradient * factor)

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)

    def gather(self, ids: Tensor) -> Gathered:
        """Return the whole table: the row of each id is at the place of that id."""
        leaves = {"weight": self.weight, "bias": self.bias}
        return Gathered(ids, torch.ones_like(ids, dtype=torch.bool), leaves, ids)


def with_dense_tables(network: nn.Module) -> nn.Module:
    """Replace each RowTable of `network` by a DenseTable with its values; keep other networks."""
    for name, child in network.named_children():
        if isinstance(child, RowTable):
            setattr(network, name, DenseTable(child))
    return network
