"""A table of which a step reads and updates only the rows that it uses.

For embedding and softmax of huge vocabularies: with 800,000 words a dense gradient of 1024 columns
has 3.2 GB of zeros, and a dense update rewrites every row of table and optimizer state.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle


@dataclass(frozen=True, slots=True)
class Gathered:
    """The rows that one step uses, each once.

    Attributes:
        ids: int64 [N], the row of the table behind each row of the leaves, N the number of ids
            asked for.
        used: bool [N]; the number of different ids is known to the device alone, so the places
            after the last one repeat the first row, and nothing refers to them.
        leaves: "weight" [N, D] and "bias" [N], copies in row_dtype that collect the gradients.
        place: int64, in the shape of the ids asked for: where in the leaves each of them is.
    """

    ids: Tensor
    used: Tensor
    leaves: dict[str, Tensor]
    place: Tensor


class RowTable(nn.Module):
    """`rows` rows of `width` numbers, with `bias` one more number for each row.

    The table is no leaf of autograd (requires_grad is False): `gather` copies the rows that are
    needed into leaf tensors, whose gradients an optimizer that knows row tables applies to these
    rows alone (mprun.precision.row_updates). It is neither copied nor cast to 16 bits where a mode
    has master weights: the FP32 table is the master, and rows are rounded to `row_dtype` when they
    are gathered, which gives the same values as a 16-bit copy and saves 2 bytes a parameter.

    One `gather` with gradients per step: a second one before the optimizer's zero_grad raises
    RuntimeError. `forward(ids)` is the lookup of an embedding: int64 ids of any shape [...] to
    [..., width].

    Attributes:
        row_dtype: dtype of gathered rows; None: that of the table.
        gradient_factor: the optimizer multiplies the unscaled gradients by it.
    """

    is_row_table = True

    def __init__(self, rows: int, width: int, *, bias: bool = False, gradient_factor: float = 1.0):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(rows), requires_grad=False) if bias else None
        self.gradient_factor = gradient_factor
        self.row_dtype: torch.dtype | None = None
        self.gathered: Gathered | None = None
        self._gradient_hooks: OrderedDict[int, Callable[[Tensor], None]] = OrderedDict()

    def tensors(self) -> dict[str, Tensor]:
        """ "weight" [rows, width] and, with a bias, "bias" [rows]."""
        both = {"weight": self.weight, "bias": self.bias}
        return {name: tensor for name, tensor in both.items() if tensor is not None}

    def forward(self, ids: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            rows = self.weight.index_select(0, ids.flatten())
            return self.rounded(rows).view(*ids.shape, -1)
        gathered = self.gather(ids)
        # Its gradient adds up equal ids in FP32 and rounds once, natively on a GPU, by the
        # emulation on a CPU.
        return F.embedding(gathered.place, gathered.leaves["weight"])

    def gather(self, ids: Tensor) -> Gathered:
        """Copies of the rows of `ids` (int64, any shape); remembered for the optimizer.

        No number of different ids is read on the host: shapes depend on the number of ids alone.
        """
        if self.gathered is not None:
            raise RuntimeError("rows were gathered before, and not updated since (zero_grad)")
        flat = ids.flatten()
        ordered, order = flat.sort(stable=True)
        new = torch.ones_like(ordered)
        torch.ne(ordered[1:], ordered[:-1], out=new[1:])
        number = new.cumsum(0) - 1  # of the id, among the different ones
        # Equal ids write the same value to the same place, so the result is deterministic.
        unique = ordered[:1].repeat(len(flat)).scatter_(0, number, ordered)
        place = torch.empty_like(number).scatter_(0, order, number).view(ids.shape)
        used = torch.arange(len(flat), device=flat.device) <= number[-1]
        leaves = {}
        for name, tensor in self.tensors().items():
            leaf = self.rounded(tensor.detach().index_select(0, unique)).requires_grad_()
            if name == "weight":
                for hook in self._gradient_hooks.values():
                    leaf.register_hook(hook)
            leaves[name] = leaf
        self.gathered = Gathered(unique, used, leaves, place)
        return self.gathered

    def rounded(self, rows: Tensor) -> Tensor:
        """Rows in row_dtype, the same tensor where they are."""
        return rows if self.row_dtype is None else rows.to(self.row_dtype)

    def blocks(self, size: int) -> Iterator[dict[str, Tensor]]:
        """The whole table as consecutive blocks of at most `size` rows, in FP32.

        Rounded to row_dtype before. Views of an FP32 table; of a 16-bit one, one block is copied
        at a time.
        """
        for start in range(0, len(self.weight), size):
            yield {
                name: self.rounded(tensor[start : start + size]).float()
                for name, tensor in self.tensors().items()
            }

    def share(self, other: "RowTable") -> None:
        """Use the tables of `other` instead of own ones, with rows in FP32."""
        self.weight, self.bias, self.row_dtype = other.weight, other.bias, torch.float32

    def register_gradient_hook(self, hook: Callable[[Tensor], None]) -> RemovableHandle:
        """Call `hook` with the gradient of the gathered weight rows in each backward pass."""
        handle = RemovableHandle(self._gradient_hooks)
        self._gradient_hooks[handle.id] = hook
        return handle
