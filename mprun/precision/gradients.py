"""The gradients of a step, whose dtypes may differ: cast, unscaled, checked, added up, measured."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from mprun.precision.loss_scale import LossScale
from mprun.precision.row_updates import RowUpdate


def counted(tensors: Iterable[tuple[torch.dtype, int]]) -> dict[str, int]:
    """Number of elements by name of the dtype, from (dtype, number) pairs."""
    counts: dict[str, int] = {}
    for dtype, numel in tensors:
        name = str(dtype).removeprefix("torch.")
        counts[name] = counts.get(name, 0) + numel
    return counts


def by_dtype(tensors: Iterable[Tensor | None]) -> list[list[Tensor]]:
    """Tensors grouped by dtype, None left out: torch's foreach kernels take one dtype at a time."""
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor is not None:
            groups.setdefault(tensor.dtype, []).append(tensor)
    return list(groups.values())


def check_and_unscale(tensors: list[Tensor], found_inf: Tensor, inverse: Tensor) -> None:
    """Multiply by `inverse` in place, rounded once; set `found_inf` where a value is not finite.

    tensors: of one dtype. found_inf, inverse: float32, 0-dim. Torch's kernel takes no BF16 on CUDA
    (NotImplementedError in torch 2.15): there it works on FP32 copies, which all live at once.
    """
    if tensors[0].dtype is torch.bfloat16 and tensors[0].is_cuda:
        wide = [tensor.float() for tensor in tensors]
        torch._amp_foreach_non_finite_check_and_unscale_(wide, found_inf, inverse)
        torch._foreach_copy_(tensors, wide)
    else:
        torch._amp_foreach_non_finite_check_and_unscale_(tensors, found_inf, inverse)


def largest(tensors: Iterable[Tensor | None]) -> Tensor:
    """Largest magnitude of all, float32, 0-dim."""
    groups = by_dtype(tensors)
    norms = [n.float() for group in groups for n in torch._foreach_norm(group, float("inf"))]
    return torch.stack(norms).max()


def norms_of(gradients: list[Tensor]) -> Tensor:
    """L2 norm of each, float32 [n], by dtype: squares of FP16 values would overflow in FP16."""
    norms = [
        norm
        for group in by_dtype(gradients)
        for norm in torch._foreach_norm(group, 2, dtype=torch.float32)
    ]
    return torch.stack(norms)


def global_norm(gradients: list[Tensor]) -> Tensor:
    """L2 norm over all gradients, float32, 0-dim."""
    return torch.linalg.vector_norm(norms_of(gradients), 2)


class Gradients:
    """The gradients of a step on their way from backward to the update.

    Attributes:
        values: of the parameters, then of the rows, each in its dtype; None where there is none.
        dtypes: in which each is unscaled and added up, in the same order.
        is_clipped: whether each counts in the norm and is clipped, in the same order.
        collects: whether they are taken out of `.grad`; those that need neither cast nor scale
            stay where autograd accumulates them.
        skips: whether a step with a gradient that is not finite is skipped.
        found_inf: float32, 0-dim, which becomes 1 where a gradient is not finite.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        rows: Sequence[RowUpdate],
        dtypes: Sequence[torch.dtype],
        is_clipped: Sequence[bool],
        *,
        collects: bool,
        skips: bool,
        device: torch.device,
    ):
        self.parameters, self.rows = list(parameters), list(rows)
        self.dtypes, self.is_clipped = list(dtypes), list(is_clipped)
        self.collects, self.skips = collects, skips
        self.found_inf = torch.zeros((), device=device)
        self.values: list[Tensor | None] = [None] * len(self.dtypes)
        self._one = torch.ones((), device=device)

    def clear(self) -> None:
        """Forget all of them, in `.grad` too."""
        for parameter in self.parameters:
            parameter.grad = None
        self.values = [None] * len(self.values)
        if self.skips:
            self.found_inf.zero_()

    def any(self) -> bool:
        """Whether one has been taken out of `.grad`."""
        return any(value is not None for value in self.values)

    def parts(self) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Those of the parameters and those of the rows, as they are."""
        if not self.collects:
            return [p.grad for p in self.parameters], [row.gradient for row in self.rows]
        count = len(self.parameters)
        return self.values[:count], self.values[count:]

    def clipped(self, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """Those that count in the norm and are clipped; in the order of `values`."""
        pairs = zip(gradients, self.is_clipped, strict=True)
        return [gradient for gradient, counts in pairs if counts and gradient is not None]

    def add(self, scale: LossScale) -> None:
        """Take every new gradient, those of one loss, and tell `scale` what was found in them."""
        found_inf, grad_max = self._add(scale, [*self._take_own(), *self._take_rows()])
        if scale.skips_nonfinite:
            scale.record(found_inf, grad_max)

    def add_rows(self, scale: LossScale) -> Tensor | None:
        """The same for the rows alone, `scale` being told by the caller: their largest magnitude.

        None where `scale` does not need it, and where there is nothing to take.
        """
        if not self.rows or not self.collects:
            return None
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
