"""Gradients of a step and what it leaves: results, norms, checks, averages of weights."""

from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from mprun.torch_private import (
    foreach_copy_,
    foreach_norm,
    sparse_indices,
    sparse_values,
    unscale_and_find_inf_,
)


class Update(NamedTuple):
    """The results of one step, as 0-dim float32 tensors on the device."""

    loss_scale: Tensor  # of the (first) loss of this step
    found_inf: Tensor | None  # 1 if the update was skipped; None: the loss scale never skips
    # Global L2 norm of the unscaled gradients that count in it, before clipping; None: not needed.
    grad_norm: Tensor | None
    figures: Mapping[str, Tensor] = MappingProxyType({})  # of the network itself

    def metrics(self, prefix: str = "") -> dict[str, Tensor]:
        """Return all results but None; the key of a result is `prefix` + its metrics.jsonl name."""
        own = self._asdict()
        own |= own.pop("figures")
        return {prefix + name: value for name, value in own.items() if value is not None}


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


def packed(sizes: Iterable[int], most: int) -> list[list[int]]:
    """Group places in `sizes`, in order, such that each group adds up to `most` or less."""
    found: list[list[int]] = [[]]
    used = 0
    for place, size in enumerate(sizes):
        if found[-1] and used + size > most:
            found.append([])
            used = 0
        found[-1].append(place)
        used += size
    return found


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


def each_row_once(gradient: Tensor) -> Tensor:
    """Return a sparse gradient of rows, coalesced; on CUDA nothing waits for the device.

    torch's `coalesce` counts the different rows on the host. Here their number is that of the ids,
    repetitions included: rows without a gradient, with zeros, take the places that are left.
    """
    if gradient.is_coalesced() or not gradient.is_cuda:
        return gradient.coalesce()
    shape = gradient.shape
    rows, values = rows_once(sparse_indices(gradient)[0], sparse_values(gradient), shape[0])
    return torch.sparse_coo_tensor(
        rows[None], values, shape, is_coalesced=True, check_invariants=False
    )


def rows_once(ids: Tensor, values: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return min(N, `rows`) different ids below `rows`, rising, all of `ids` [N] among them; and
    the sums of `values` [N, ...] of each, added in their order."""
    every = torch.arange(rows, device=ids.device)
    is_used = torch.zeros(rows, dtype=torch.bool, device=ids.device).index_fill_(0, ids, True)
    used_before = is_used.cumsum(0)
    size = min(len(ids), rows)
    is_taken = is_used | (every - used_before < size - used_before[-1])
    place = is_taken.cumsum(0) - 1
    taken = torch.zeros(size + 1, dtype=ids.dtype, device=ids.device)
    taken.scatter_(0, torch.where(is_taken, place, size), every)  # the last is none
    sums = values.new_zeros(size, *values.shape[1:])
    return taken[:-1], sums.index_put_((place[ids],), values, accumulate=True)


def in_memory_order(tensor: Tensor) -> Tensor:
    """Return a dense tensor's values [numel] in memory order, without a copy."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def copy_exactly(what: str, own: Tensor, saved: Tensor) -> None:
    """Copy `saved` into `own`, of the same dtype and shape; ValueError names `what` otherwise."""
    if own.dtype != saved.dtype or own.shape != saved.shape:
        raise ValueError(
            f"{what}: was saved as {saved.dtype} {tuple(saved.shape)}, must be {own.dtype} "
            f"{tuple(own.shape)}"
        )
    own.copy_(saved)


def elements_by_dtype(tensors: Iterable[tuple[torch.dtype, int]]) -> dict[str, int]:
    """Return dtype name -> number of elements, from (dtype, number) pairs."""
    counts: Counter[str] = Counter()
    for dtype, numel in tensors:
        counts[str(dtype).removeprefix("torch.")] += numel
    return dict(counts)


class WeightAverage:
    """average <- decay * average + (1 - decay) * weight, once per applied update.

    It is for evaluation. The average starts at the initial weights (tf.train.
    ExponentialMovingAverage without num_updates, as in bigLSTM's published code). It is FP32 in
    every mode, because it only measures: in 16 bits 0.001 times a difference would vanish. It costs
    4 bytes for each averaged parameter. Running statistics of norm layers are not averaged.

    Args:
        weights: parameter name -> tensor that the optimizer updates (the master weight, if there is
            one).
        decay: in (0, 1).
    """

    def __init__(self, weights: Mapping[str, Tensor], decay: float):
        if not 0 < decay < 1:
            raise ValueError(f"decay={decay} is not allowed: must be above 0 and below 1")
        for name, weight in weights.items():
            if weight.is_complex():
                raise ValueError(f"optim.average_decay: {name} is complex and has no average")
        self.weights, self.decay = dict(weights), decay
        self.values = {
            name: weight.detach().to(torch.float32, copy=True) for name, weight in weights.items()
        }
        device = next(iter(self.values.values())).device
        self._rate = torch.full((), 1.0 - decay, dtype=torch.float32, device=device)

    @torch.no_grad()
    def update(self, found_inf: Tensor | None) -> None:
        """Move towards the weights, unless `found_inf` (0-dim) says that they did not move.

        Nothing waits for the device.
        """
        rate = self._rate if found_inf is None else self._rate * (found_inf == 0)
        for name, average in self.values.items():
            average.lerp_(self.weights[name].float(), rate)
