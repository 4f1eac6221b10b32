"""Adagrad and SGD on the rows of a table that a step used, and on no others.

For the unused rows a dense step of these two optimizers changes nothing, because their gradient is
zero. For the used rows the formulas, and with `foreach` every rounding, are those of torch.optim.
So a run with row tables gives the results of a run with dense tables, without gradients and
updates of the size of the vocabulary.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Optimizer

from mprun.precision.torch_update import put_back_where


class Gathered(Protocol):
    """The rows that a step uses (see mprun.models.lstm.Gathered)."""

    ids: Tensor
    used: Tensor
    leaves: Mapping[str, Tensor]


class RowTable(Protocol):
    """The interface of such a module: tables that are not leaves of autograd, and gathered rows.

    is_row_table marks it. The code that casts the model sets row_dtype; gradient_factor multiplies
    the unscaled gradients.
    """

    is_row_table: bool
    row_dtype: torch.dtype | None
    gradient_factor: float
    gathered: Gathered | None

    def tensors(self) -> dict[str, Tensor]:
        """Return parameter name -> table [rows, ...]."""

    def distinct(self, flat: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return each of the ids [N] once, [N]; their places in these; which of these are used."""


def row_tables(model: nn.Module) -> dict[str, RowTable]:
    """Return module name -> row table."""
    return {name: m for name, m in model.named_modules() if getattr(m, "is_row_table", False)}


class RowUpdate:
    """An update of one tensor of a row table, with the rule and settings of a torch optimizer.

    `state` has "sum" for Adagrad, with the shape and dtype of the tensor; nothing for SGD.

    Raises:
        ValueError: Another rule, or settings that would move unused rows too (momentum, weight
            decay, lr_decay).
    """

    def __init__(self, name: str, table: RowTable, key: str, optimizer: Optimizer):
        rule = type(optimizer).__name__
        if not isinstance(optimizer, (SGD, Adagrad)):
            raise ValueError(
                f"{rule}: row tables need Adagrad or SGD, whose unused rows do not move"
            )
        for setting in ("momentum", "weight_decay", "lr_decay"):
            for group in optimizer.param_groups:
                if group.get(setting):
                    raise ValueError(
                        f"{rule}: {setting}={group[setting]:g} would move unused rows of row "
                        "tables (allowed: 0)"
                    )
        self.name, self.table, self.key = name, table, key
        self.tensor = table.tensors()[key]
        self._optimizer = optimizer
        self.state: dict[str, Tensor] = {}
        # ids and used of the gradients that were taken in this step
        self._taken: list[tuple[Tensor, Tensor]] = []
        if isinstance(optimizer, Adagrad):
            start = optimizer.defaults["initial_accumulator_value"]
            self.state["sum"] = torch.full_like(self.tensor, start)

    @property
    def row_dtype(self) -> torch.dtype:
        """Return the dtype of gathered rows, and of their gradients as backward computes them."""
        return self.table.row_dtype or self.tensor.dtype

    def take_gradient(self) -> Tensor | None:
        """Remove the gradient from the gathered rows and return it: [N, ...] in row_dtype, 0 in
        unused places; None without one."""
        if self.table.gathered is None:
            return None
        leaf = self.table.gathered.leaves[self.key]
        gradient, leaf.grad = leaf.grad, None
        if gradient is not None:
            self._taken.append((self.table.gathered.ids, self.table.gathered.used))
        return gradient

    def clear(self) -> None:
        """Forget the rows whose gradients were taken."""
        self._taken = []

    def total(self, gradients: Sequence[Tensor]) -> Tensor | None:
        """Return the sum of a step's gradients, those of `take_gradient`, with each row once.

        Rows are added in FP32 and rounded once. On CUDA too the order is fixed.
        """
        if len(gradients) < 2:
            return gradients[0] if gradients else None
        values = torch.cat([*gradients])
        ids, place, used = self.table.distinct(torch.cat([own for own, _ in self._taken]))
        self._taken = [(ids, used)]
        total = torch.zeros_like(values, dtype=torch.promote_types(values.dtype, torch.float32))
        return total.index_put_((place,), values.to(total.dtype), accumulate=True).to(values.dtype)

    @torch.no_grad()
    def apply(self, gradient: Tensor, found_inf: Tensor | None) -> None:
        """Take one step on the rows of a gradient, that of `take_gradient` or `total`, unscaled; if
        `found_inf` (0-dim) is not 0 nothing moves.

        All shapes depend on the number of ids alone; nothing waits for the device. Unused places
        write the value of the first row to that row, so index_copy_ is deterministic although its
        indices repeat.
        """
        [(ids, used)] = self._taken
        used = used.view(-1, *[1] * (gradient.dim() - 1))
        gradient = torch.where(used, gradient, gradient[:1]).to(self.tensor.dtype)
        whole = [self.tensor, *self.state.values()]
        rows, *state = parts = [tensor.index_select(0, ids) for tensor in whole]
        with put_back_where(found_inf, parts):
            self._move(rows, gradient, *state)
        for tensor, part in zip(whole, parts, strict=True):
            tensor.index_copy_(0, ids, part)

    def _move(self, rows: Tensor, gradient: Tensor, total: Tensor | None = None) -> None:
        """Update in place, in the order of operations of torch.optim's foreach implementations."""
        groups = self._optimizer.param_groups
        # The group with the plain rate: biases may have another one.
        group = next((g for g in groups if g.get("lr_factor", 1.0) == 1.0), groups[0])
        lr = group["lr"]
        if total is not None:
            deviation = total.addcmul_(gradient, gradient, value=1).sqrt().add_(group["eps"])
            rows.addcdiv_(gradient * -lr, deviation)
        elif isinstance(lr, Tensor):
            rows.sub_(gradient * lr)
        else:
            rows.add_(gradient, alpha=-lr)
