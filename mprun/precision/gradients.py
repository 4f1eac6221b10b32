"""Gradients taken out of `.grad`: cast, unscaled, checked, added up over the losses of a step."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mprun.precision.gradient_lists import by_dtype, check_and_unscale, largest
from mprun.precision.loss_scale import LossScale
from mprun.precision.row_updates import RowUpdate


class CollectedGradients:
    """values: of the parameters, then of the rows, each in its dtype; None where there is none.

    dtypes: in which each is unscaled and added up, in the same order. found_inf: float32, 0-dim,
    which becomes 1 where a gradient is not finite.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        rows: Sequence[RowUpdate],
        dtypes: Sequence[torch.dtype],
        found_inf: Tensor,
    ):
        self.parameters, self.rows = list(parameters), list(rows)
        self.dtypes, self.found_inf = list(dtypes), found_inf
        self.values: list[Tensor | None] = [None] * len(dtypes)
        self._one = torch.ones((), device=found_inf.device)

    def clear(self) -> None:
        """Forget all of them."""
        self.values = [None] * len(self.values)

    def any(self) -> bool:
        """Whether there is one."""
        return any(value is not None for value in self.values)

    def add(self, scale: LossScale) -> None:
        """Take every new gradient, those of one loss, and tell `scale` what was found in them."""
        found_inf, grad_max = self._add(scale, [*self._take_own(), *self._take_rows()])
        if scale.skips_nonfinite:
            scale.record(found_inf, grad_max)

    def add_rows(self, scale: LossScale) -> Tensor | None:
        """The same for the rows alone, `scale` being told by the caller: their largest magnitude.

        None where `scale` does not need it.
        """
        return self._add(scale, [*[None] * len(self.parameters), *self._take_rows()])[1]

    def _take_own(self) -> list[Tensor | None]:
        taken = []
        for parameter, dtype in zip(self.parameters, self.dtypes, strict=False):
            gradient, parameter.grad = parameter.grad, None
            taken.append(None if gradient is None else gradient.to(dtype))
        return taken

    def _take_rows(self) -> list[Tensor | None]:
        taken = []
        for row, dtype in zip(self.rows, self.dtypes[len(self.parameters) :], strict=True):
            gradient = row.take_gradient()
            taken.append(None if gradient is None else gradient.to(dtype))
        return taken

    def _add(self, scale: LossScale, new: list[Tensor | None]) -> tuple[Tensor, Tensor | None]:
        """Divide by the scale, check, add up: (found_inf of these, their largest magnitude)."""
        found_inf, grad_max = torch.zeros_like(self.found_inf), None
        if scale.skips_nonfinite:
            inverse = scale.inverse()
            for group in by_dtype(new):
                check_and_unscale(group, found_inf, inverse)
            if scale.needs_grad_max:
                grad_max = largest(new) if by_dtype(new) else torch.zeros_like(found_inf)
        multiplied = self._multiply_rows(new)
        if scale.skips_nonfinite:
            # A factor can take a 16-bit gradient beyond its format.
            for group in by_dtype(multiplied):
                check_and_unscale(group, found_inf, self._one)
            torch.maximum(self.found_inf, found_inf, out=self.found_inf)
        pairs = list(zip(self.values, new, strict=True))
        both = [pair for pair in pairs if pair[0] is not None and pair[1] is not None]
        if both:
            torch._foreach_add_(*map(list, zip(*both, strict=True)))
        self.values = [gradient if value is None else value for value, gradient in pairs]
        return found_inf, grad_max

    def _multiply_rows(self, new: list[Tensor | None]) -> list[Tensor]:
        """Multiply the gradients of row tables by their factors; those that have one."""
        multiplied = []
        for row, gradient in zip(self.rows, new[len(self.parameters) :], strict=True):
            if gradient is not None and row.table.gradient_factor != 1:
                multiplied.append(gradient.mul_(row.table.gradient_factor))
        return multiplied
