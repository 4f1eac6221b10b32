"""How the gradients of a step are applied: check, clip, apply, copy, in ways with equal results.

With torch's operations gradients arrive unscaled, in separate tensors. torch's optimizer updates
the masters, which are copied to the model: 40 bytes a parameter for SGD with momentum.

A single pass reads the gradients of a step with one loss where backward wrote them, scaled and in
its dtype: one read for the check, one pass for everything else, 22 bytes. Formulas, their order and
the names of the state are the same, so a checkpoint from one way continues in the other.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from mprun.precision.loss_scale import LossScale
from mprun.precision.rounded_weights import COMPENSATION, RoundedWeights
from mprun.precision.torch_update import STATE, rule_of, step_unless
from mprun.torch_private import (
    foreach_copy_,
    foreach_mul_,
    foreach_norm,
    sparse_values,
    unscale_and_find_inf_,
)

Gradients = list[Tensor | None]  # one for each parameter, sometimes then for each row table


class Ready(NamedTuple):
    """All gradients of a step, before they are checked and clipped."""

    # Of the parameters: unscaled, in the dtype of the update, without `inverse`; else as autograd
    # left them.
    gradients: Gradients
    inverse: Tensor | None  # 1/scale, the factor still missing, float32, 0-dim
    found_inf: Tensor | None  # float32, 0-dim, not 0 if a gradient is not finite; None: no check
    rows: Sequence[Tensor | None] = ()  # of the row tables, unscaled
    # The scale of `gradients` that nobody has read yet: a single pass checks them and tells it.
    unread: LossScale | None = None
    sparse: bool = False  # whether `gradients` has a sparse one


class Checked(NamedTuple):
    """The results of one read of the gradients; None: not asked for."""

    norms: Tensor | None  # float32 [k], L2 norms of unscaled gradients, one or several to an entry
    grad_max: Tensor | None  # float32, 0-dim, largest unscaled magnitude


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter, or a piece of one, as the kernels of a single pass take it."""

    index: int  # of the parameter
    group: int  # number of the optimizer's group
    own: Tensor  # the model computes with it; `master` itself if there is no copy
    master: Tensor
    has_copy: bool
    state: list[Tensor]  # in the kernels' order and the memory order of `master`
    step: Tensor | None  # the optimizer's counter, if it keeps one
    narrow: int | None = None  # number of a narrow weight among those
    kept: Tensor | None = None  # the error of a narrow weight's last rounding
    part: int | None = None  # number of the piece; None: the whole parameter


@dataclass(eq=False)
class ByTorch:
    """An update by torch's operations, one after the other."""

    inner: Optimizer
    parameters: Sequence[Tensor]  # the model computes with them
    updated: Sequence[Tensor]  # `inner` updates these: for each parameter its master or itself
    # For each parameter, then each row table: its gradient counts in the norm and is clipped.
    is_clipped: Sequence[bool]
    narrow: RoundedWeights | None = None  # those of `updated` that are BF16 but updated in FP32
    # The L2 norms of gradients: of the whole ones where these are shards.
    norms: Callable[[Gradients], Tensor] | None = None

    def __post_init__(self) -> None:
        self.rule = rule_of(self.inner)
        pairs = zip(self.parameters, self.updated, strict=True)
        copied = [(own, master) for own, master in pairs if own is not master]
        self._copies, self._masters = [own for own, _ in copied], [master for _, master in copied]

    def check(self, ready: Ready, norm: bool) -> Tensor | None:
        """Return the L2 norm of all unscaled gradients that count in it, float32, 0-dim, or None.

        Unscaling has already checked whether they are finite.
        """
        if not norm:
            return None
        own = ready.gradients
        if ready.sparse:
            own[:] = coalesced(own)
        pairs = zip([*own, *ready.rows], self.is_clipped, strict=False)
        counted = [gradient if counts else None for gradient, counts in pairs]
        return torch.linalg.vector_norm((self.norms or norms_of)(counted), 2)

    def clip(self, ready: Ready, factor: Tensor) -> Tensor | None:
        """Multiply the gradients in the norm by `factor` (0-dim); return the factor left over."""
        for group in by_dtype(self._clipped([*ready.gradients, *ready.rows])):
            foreach_mul_(group, factor)
        return None

    def apply(self, ready: Ready, clip: Tensor | None) -> None:
        """Update the weights of the parameters and copy them to the model, unless it is skipped."""
        own, found_inf, narrow = ready.gradients, ready.found_inf, self.narrow
        if narrow is None:
            self._step(self.updated, own, found_inf)
        else:
            for places in narrow.chunks(self.updated):
                chunk, gradients = [self.updated[n] for n in places], [own[n] for n in places]
                with narrow.in_fp32(chunk, found_inf) as wide:
                    self._step(wide, gradients, found_inf)
            narrow.count(found_inf)
        if self._copies:
            foreach_copy_(self._copies, self._masters)

    def _step(
        self, updated: Sequence[Tensor], gradients: Gradients, found_inf: Tensor | None
    ) -> None:
        """Let `inner`, which holds these, take a step."""
        for tensor, gradient in zip(updated, gradients, strict=True):
            if gradient is not tensor.grad:
                tensor.grad = None if gradient is None else gradient.to(tensor.dtype)
        if found_inf is not None:
            step_unless(self.inner, found_inf)
        else:
            self.inner.step()

    def _clipped(self, gradients: Sequence[Tensor | None], start: int = 0) -> list[Tensor]:
        """Return the gradients that count in the norm; the first one has number `start`."""
        pairs = zip(gradients, self.is_clipped[start:], strict=False)
        return [gradient for gradient, counts in pairs if counts and gradient is not None]


class SinglePass(ByTorch, ABC):
    """An update in one read of the gradients and one pass over the weights, by kind of device.

    Gradients that have been read before, and sparse ones, are checked as by torch's operations.
    Those also apply sparse ones, because the kernels of a single pass take every weight.
    """

    @abstractmethod
    def read(self, ready: Ready, *, norm: bool, grad_max: bool) -> Checked:
        """Read the gradients once; set `found_inf` to 1 if one is not finite."""

    @abstractmethod
    def write(self, ready: Ready, clip: Tensor | None) -> None:
        """Cast, unscale, multiply by `clip` (0-dim) if clipped, update, copy to the model.

        If `found_inf` is not 0 nothing is written.
        """

    def check(self, ready: Ready, norm: bool) -> Tensor | None:
        scale = ready.unread
        if scale is None:
            return super().check(ready, norm)
        checked = self.read(ready, norm=norm, grad_max=scale.needs_grad_max)
        if scale.skips_nonfinite and ready.found_inf is not None:
            scale.record(ready.found_inf, checked.grad_max)
        if checked.norms is None:
            return None
        rows = self._clipped(ready.rows, len(ready.gradients))
        norms = torch.cat([checked.norms, norms_of(rows)]) if rows else checked.norms
        return torch.linalg.vector_norm(norms)

    def clip(self, ready: Ready, factor: Tensor) -> Tensor | None:
        if ready.sparse:
            return super().clip(ready, factor)
        if rows := self._clipped(ready.rows, len(ready.gradients)):
            foreach_mul_(rows, factor)
        return factor

    def apply(self, ready: Ready, clip: Tensor | None) -> None:
        if ready.sparse:
            super().apply(ready, clip)
        else:
            self.write(ready, clip)

    def weights(self, has_gradient: Sequence[bool]) -> Iterator[Weight]:
        """Yield the tensors that `inner` updates, in the order of its groups."""
        index_of = {id(tensor): index for index, tensor in enumerate(self.updated)}
        for number, group in enumerate(self.inner.param_groups):
            for master in group["params"]:
                index = index_of[id(master)]
                if not has_gradient[index]:
                    continue
                own, state = self.parameters[index], self.inner.state[master]
                names = [name for name in STATE[self.rule] if name in state]
                for name in names:
                    state[name] = in_order_of(master, state[name])
                tensors, step = [state[name] for name in names], state.get("step")
                of_narrow = None if self.narrow is None else self.narrow.number(master)
                rest = (tensors, step, of_narrow, state.get(COMPENSATION))
                yield Weight(index, number, own, master, own is not master, *rest)


def any_sparse(gradients: Iterable[Tensor | None]) -> bool:
    return any(gradient is not None and gradient.is_sparse for gradient in gradients)


def coalesced(gradients: Iterable[Tensor | None]) -> Gradients:
    """Return the same; sparse ones get one entry a row, so that their values can be read."""
    return [
        own.coalesce() if own is not None and own.is_sparse and not own.is_coalesced() else own
        for own in gradients
    ]


def by_dtype(tensors: Iterable[Tensor | None]) -> list[list[Tensor]]:
    """Group the tensors' numbers by dtype, without None, because foreach kernels take one dtype.

    A coalesced sparse tensor counts with its values, a complex one with both parts. They share
    memory with the tensor."""
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor is not None:
            tensor = sparse_values(tensor) if tensor.is_sparse else tensor
            if tensor.is_complex():  # a lazy conjugate is one of the same memory
                tensor = torch.view_as_real(tensor.conj() if tensor.is_conj() else tensor)
            groups.setdefault(tensor.dtype, []).append(tensor)
    return list(groups.values())


def check_and_unscale(tensors: list[Tensor], found_inf: Tensor, inverse: Tensor) -> None:
    """Multiply by `inverse` in place, rounded once; set `found_inf` if a value is not finite.

    All `tensors` have one dtype; `found_inf` and `inverse` are float32, 0-dim. torch's kernel takes
    no BF16 on CUDA (NotImplementedError in torch 2.15): there it works on FP32 copies, which all
    live at once.
    """
    if tensors[0].dtype is torch.bfloat16 and tensors[0].is_cuda:
        wide = [tensor.float() for tensor in tensors]
        unscale_and_find_inf_(wide, found_inf, inverse)
        foreach_copy_(tensors, wide)
    else:
        unscale_and_find_inf_(tensors, found_inf, inverse)


def largest(tensors: Iterable[Tensor | None], device: torch.device) -> Tensor:
    """Return the largest magnitude of all, which are on `device`, float32, 0-dim; 0 of none."""
    found = [[tensor for tensor in group if tensor.numel()] for group in by_dtype(tensors)]
    norms = [n.float() for some in found if some for n in foreach_norm(some, float("inf"))]
    return torch.stack(norms).max() if norms else torch.zeros((), device=device)


def norms_of(gradients: Iterable[Tensor | None]) -> Tensor:
    """Return each L2 norm, float32 [n], by dtype: squares of FP16 values would overflow in FP16."""
    found = [foreach_norm(group, 2, dtype=torch.float32) for group in by_dtype(gradients)]
    return torch.stack([norm for norms in found for norm in norms])


def in_memory_order(tensor: Tensor) -> Tensor:
    """Return a dense tensor's values [numel] in memory order, without a copy."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def same_order(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors of one shape have their values in the same order in memory."""
    if a.stride() == b.stride():
        return True
    pairs = zip(a.stride(), b.stride(), a.shape, strict=True)
    return all(one == other for one, other, size in pairs if size > 1)


def in_order_of(like: Tensor, tensor: Tensor) -> Tensor:
    """Return `tensor` if its values are in the order of those of `like`, else a copy that is."""
    if same_order(tensor, like):
        return tensor
    return torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)
