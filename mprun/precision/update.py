"""The gradients of a step, and how they are applied: two ways that give the same numbers.

Both own what is pending between `backward` and `step`.

`PlainUpdate` takes the gradients out of `.grad` after every loss, casts and unscales them there and
then, lets torch's optimizer update the masters and copies these to the model: 40 bytes a parameter
for SGD with momentum.

`SinglePassUpdate` leaves the gradients of a step with one loss where backward wrote them, scaled
and in its dtype, until the step: one read for the check, one pass for everything else, 22 bytes.
A second loss or micro-batch of the same step takes them out first, as the plain way does after
every loss. Formulas, their order and the names of the state are the same, so a checkpoint of one
continues in the other.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from mprun.precision.loss_scale import LossScale
from mprun.precision.row_updates import RowUpdate
from mprun.precision.torch_update import STATE, rule_of, step_unless


@dataclass(frozen=True, slots=True)
class Ready:
    """The gradients of a step before clipping; None where there is none.

    Attributes:
        own: of the parameters.
        rows: of the row tables, unscaled.
        inverse: 1/scale that `own` is still to be multiplied with, float32, 0-dim; None: with
            nothing.
        norm: L2 norm of all unscaled gradients that count in it, float32, 0-dim; None: not asked
            for.
    """

    own: list[Tensor | None]
    rows: list[Tensor | None]
    inverse: Tensor | None
    norm: Tensor | None


class UpdateStrategy(Protocol):
    """What an optimizer asks of a way to update. Nothing in it waits for the device."""

    # Whether `apply` leaves the gradients as they were, so that a clip is not in them.
    keeps_gradients: bool

    def clear(self) -> None:
        """Forget what is pending: a new step begins."""
        ...

    def before_backward(self) -> None:
        """Another loss is about to add to `.grad`."""
        ...

    def after_backward(self, scale: LossScale) -> None:
        """A loss has been propagated, times `scale`."""
        ...

    def ready(self, needs_norm: bool) -> Ready:
        """All gradients of the step, checked; sets found_inf where one is not finite."""
        ...

    def apply(self, ready: Ready, clip: Tensor | None, found_inf: Tensor | None) -> None:
        """Clip, update the masters and copy them to the model; of row tables only clip.

        Args:
            clip: 0-dim factor of the gradients that count in the norm; None: nothing is clipped.
            found_inf: 0-dim; where it is not 0 nothing moves. None: everything does.
        """
        ...


@dataclass(frozen=True, slots=True)
class Checked:
    """What one read of the gradients told.

    Attributes:
        norms: float32 [k], L2 norms of the unscaled gradients that count in the norm, one or
            several tensors to an entry; None: not asked for.
        grad_max: float32, 0-dim, largest unscaled magnitude; None: not asked for.
    """

    norms: Tensor | None
    grad_max: Tensor | None


class SinglePass(Protocol):
    """The two passes, which take the same arguments.

    Args:
        gradients: as autograd left them, scaled, None where there is none.
        inverse: 1/scale, float32, 0-dim; None: not scaled.
        found_inf: float32, 0-dim; None: no check.
    """

    def check(
        self,
        gradients: Sequence[Tensor | None],
        inverse: Tensor | None,
        found_inf: Tensor | None,
        *,
        norm: bool,
        grad_max: bool,
    ) -> Checked:
        """Read the gradients once; set `found_inf` to 1 if one is not finite."""
        ...

    def update(
        self,
        gradients: Sequence[Tensor | None],
        inverse: Tensor | None,
        clip: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        """Cast, unscale, multiply by `clip` (0-dim) what is clipped, update, copy to the model.

        Where `found_inf` is not 0 nothing is written.
        """
        ...


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

    def clipped_rows(self, rows: Sequence[Tensor | None]) -> list[Tensor]:
        """The same of the row tables alone."""
        return self.clipped([*[None] * len(self.parameters), *rows])

    def ready(self, needs_norm: bool) -> "Ready":
        """Those that have been taken and unscaled, or never needed it, with their norm."""
        own, rows = self.parts()
        norm = global_norm(self.clipped([*own, *rows])) if needs_norm else None
        return Ready(own, rows, None, norm)

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
        self._accumulate(new)
        return found_inf, grad_max

    def _accumulate(self, new: list[Tensor | None]) -> None:
        pairs = list(zip(self.values, new, strict=True))
        both = [pair for pair in pairs if pair[0] is not None and pair[1] is not None]
        if both:
            torch._foreach_add_(*map(list, zip(*both, strict=True)))
        self.values = [gradient if value is None else value for value, gradient in pairs]

    def _multiply_rows(self, new: list[Tensor | None]) -> list[Tensor]:
        """Multiply the gradients of row tables by their factors; those that have one."""
        multiplied = []
        for row, gradient in zip(self.rows, new[len(self.parameters) :], strict=True):
            if gradient is not None and row.table.gradient_factor != 1:
                multiplied.append(gradient.mul_(row.table.gradient_factor))
        return multiplied


class PlainUpdate:
    """torch's operations one after another; see `UpdateStrategy`."""

    keeps_gradients = False

    def __init__(self, inner: Optimizer, gradients: Gradients, updated: Sequence[Tensor]):
        self.inner, self.gradients, self.updated = inner, gradients, updated
        pairs = list(zip(gradients.parameters, updated, strict=True))
        self._copies = [own for own, master in pairs if own is not master]
        self._masters = [master for own, master in pairs if own is not master]

    def clear(self) -> None:
        if self.gradients.collects:
            for updated in self.updated:
                updated.grad = None

    def before_backward(self) -> None:
        """Nothing: no gradient has been left in `.grad` that must not be added to."""

    def after_backward(self, scale: LossScale) -> None:
        if self.gradients.collects:
            self.gradients.add(scale)

    def ready(self, needs_norm: bool) -> Ready:
        return self.gradients.ready(needs_norm)

    def apply(self, ready: Ready, clip: Tensor | None, found_inf: Tensor | None) -> None:
        if clip is not None:
            torch._foreach_mul_(self.gradients.clipped([*ready.own, *ready.rows]), clip)
        if self.gradients.collects:
            for updated, gradient in zip(self.updated, ready.own, strict=True):
                updated.grad = None if gradient is None else gradient.to(updated.dtype)
        if found_inf is not None:
            step_unless(self.inner, found_inf)
        else:
            self.inner.step()
        if self._copies:
            torch._foreach_copy_(self._copies, self._masters)


class SinglePassUpdate:
    """One pass over the weights, by the kernels of `single_pass`; see `UpdateStrategy`."""

    keeps_gradients = True

    def __init__(self, single_pass: SinglePass, gradients: Gradients):
        self.single_pass, self.gradients = single_pass, gradients
        # The scale of the loss whose gradients are still in `.grad`.
        self._pending: LossScale | None = None

    def clear(self) -> None:
        self._pending = None

    def before_backward(self) -> None:
        if self._pending is not None and self.gradients.collects:
            self.gradients.add(self._pending)
            self._pending = None

    def after_backward(self, scale: LossScale) -> None:
        if self.gradients.any():
            self.gradients.add(scale)
        else:
            self._pending = scale

    def ready(self, needs_norm: bool) -> Ready:
        if self._pending is None:
            return self.gradients.ready(needs_norm)
        scale, gradients = self._pending, self.gradients
        own: list[Tensor | None] = [parameter.grad for parameter in gradients.parameters]
        inverse = scale.inverse() if scale.skips_nonfinite else None
        checked = self.single_pass.check(
            own,
            inverse,
            gradients.found_inf if gradients.skips else None,
            norm=needs_norm,
            grad_max=scale.needs_grad_max,
        )
        grad_max = checked.grad_max
        of_rows = gradients.add_rows(scale)
        if grad_max is not None and of_rows is not None:
            grad_max = torch.maximum(grad_max, of_rows)
        if scale.skips_nonfinite:
            scale.record(gradients.found_inf, grad_max)
        rows = gradients.parts()[1]
        if checked.norms is None:
            return Ready(own, rows, inverse, None)
        norms = [checked.norms]
        if chosen := gradients.clipped_rows(rows):
            norms.append(norms_of(chosen))
        return Ready(own, rows, inverse, torch.linalg.vector_norm(torch.cat(norms)))

    def apply(self, ready: Ready, clip: Tensor | None, found_inf: Tensor | None) -> None:
        if clip is not None:
            if rows := self.gradients.clipped_rows(ready.rows):
                torch._foreach_mul_(rows, clip)
        self.single_pass.update(ready.own, ready.inverse, clip, found_inf)


def by_dtype(tensors: Iterable[Tensor | None]) -> list[list[Tensor]]:
    """Tensors grouped by dtype, None left out: torch's foreach kernels take one dtype at a time."""
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor is not None:
            groups.setdefault(tensor.dtype, []).append(tensor)
    return list(groups.values())


def check_and_unscale(tensors: list[Tensor], found_inf: Tensor, inverse: Tensor) -> None:
    """Multiply by `inverse` in place, rounded once; set `found_inf` where a value is not finite.

    Torch's kernel takes no BF16 on CUDA (NotImplementedError in torch 2.15): there it works on FP32
    copies, which all live at once.

    Args:
        tensors: of one dtype.
        found_inf, inverse: float32, 0-dim.
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


def in_memory_order(tensor: Tensor) -> Tensor:
    """A dense tensor as its [numel] values lie in memory; shares them."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def same_order(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape have their values in the same order in memory."""
    if a.stride() == b.stride():
        return True
    pairs = zip(a.stride(), b.stride(), a.shape, strict=True)
    return all(one == other for one, other, size in pairs if size > 1)


def in_order_of(like: Tensor, tensor: Tensor) -> Tensor:
    """`tensor` itself where its values lie as those of `like`, else a copy whose do."""
    if same_order(tensor, like):
        return tensor
    return torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter, or a piece of one, as the kernels of a single pass take it.

    Attributes:
        index: of the parameter.
        group: of the optimizer.
        own: what the model computes with; `master` itself where there is no copy.
        state: in the order in which kernels take it, in memory as `master` is: kernels look at no
            strides.
        step: the optimizer's counter; None: it keeps none.
        part: number of the piece; None: the whole parameter.
    """

    index: int
    group: dict
    own: Tensor
    master: Tensor
    has_copy: bool
    state: list[Tensor]
    step: Tensor | None
    part: int | None = None


def weights_with_gradient(
    inner: Optimizer,
    parameters: Sequence[Tensor],
    updated: Sequence[Tensor],
    has_gradient: Sequence[bool],
) -> Iterator[Weight]:
    """What `inner` updates, in the order of its groups."""
    index_of = {id(tensor): index for index, tensor in enumerate(updated)}
    for group in inner.param_groups:
        for master in group["params"]:
            index = index_of[id(master)]
            if not has_gradient[index]:
                continue
            own, state = parameters[index], inner.state[master]
            names = [name for name in STATE[rule_of(inner)] if name in state]
            for name in names:
                state[name] = in_order_of(master, state[name])
            ordered = [state[name] for name in names]
            yield Weight(index, group, own, master, own is not master, ordered, state.get("step"))
