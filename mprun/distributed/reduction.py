"""The mean of the gradients of several micro-batches and ranks: after backward, or during it.

`order=fixed` keeps the gradients of each micro-batch apart until all ranks have them. It then adds
them in the order of micro-batches, like a single rank that takes all of them. The bits are the same
for every number of ranks; the cost is the memory of M/W gradients and the traffic of M.
A single rank keeps them apart too where it adds in another order, as clusters do (`in_order`).
`order=fast` adds this rank's gradients first and leaves the rest to the library's all-reduce, which
chooses its own order.

Gradients are unscaled FP32 between a backward pass and this sum. A mode with a `reduce_dtype` sums
them scaled, in that dtype, as torch's DistributedDataParallel does with 16-bit parameters.
"""

# No postponed annotations: DDP inspects the annotations of its hook.
import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mprun.errors import BadInput, MprunError
from mprun.precision import LossScale
from mprun.precision.policy import DIVIDE
from mprun.precision.update import by_dtype, in_memory_order, norms_of
from mprun.prepared.prepared_model import PreparedModel
from mprun.torch_private import disable_dispatch_modes, foreach_add_, foreach_div_, foreach_mul_

Gradients = list[Tensor | None]  # one for each parameter


class FlatReduction:
    """Mean of a step's gradients over its micro-batches, summed over ranks after backward.

    Args:
        group: the ranks, a RankGroup.
        parts: micro-batches of a step, on all ranks.
        fixed: gather the micro-batches, and add them `in_order`; else this rank's are added first.
        bucket_bytes: size of the gradients that are summed at a time.
        dtype: sum scaled gradients in it; None: unscaled ones in their own.
        divide: where such a sum is divided, see `factors`.
    """

    muted = False  # for a bench: this rank's gradients are taken for the sum

    def __init__(
        self,
        group: Any,
        parts: int,
        *,
        fixed: bool,
        bucket_bytes: int,
        order: str = "rank",
        dtype: torch.dtype | None = None,
        divide: str = "after",
    ):
        self.group, self.fixed, self.bucket_bytes = group, fixed, bucket_bytes
        self.order, self.dtype = order, dtype
        self.before, self.after = (1, parts) if dtype is None else factors(parts, divide)
        self.scale: LossScale | None = None  # of a sum of scaled gradients
        self.parameters: Sequence[Tensor] = ()
        self._kept: list[Gradients] = []
        self._used: list[bool] | None = None  # by parameter: whether any rank has a gradient

    def network(self, prepared: PreparedModel, parameters: Sequence[Tensor]) -> Callable[..., Any]:
        """Take the model whose gradients are summed; return what a step calls in its place."""
        self.scale, self.parameters = prepared.scale, parameters
        prepared.group = self.group.tensors
        return prepared.model

    def overlap(self, last: bool) -> None:
        """Announce whether the next backward pass is the last of a step."""

    @torch.no_grad()
    def end_part(self) -> None:
        """Take the gradients of a backward pass out of `.grad`, unless they may stay."""
        own = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        self.add(self.sent(own))

    @torch.no_grad()
    def mean(self) -> None:
        """Put the mean over all micro-batches into `.grad`."""
        pairs = zip(self.parameters, self.total(), strict=True)
        found = [g if g is None else g.to(own.grad_dtype or own.dtype) for own, g in pairs]
        self.received(found)
        for parameter, gradient in zip(self.parameters, found, strict=True):
            parameter.grad = gradient

    def sent(self, own: Gradients) -> Gradients:
        """Return the terms of the sum for gradients, which it may change."""
        if self.dtype is not None:
            if self.scale is not None:
                for group in by_dtype(own):
                    foreach_mul_(group, self.scale.scale)
            own = [None if one is None else one.to(self.dtype) for one in own]
        if self.before > 1:
            for group in by_dtype(own):
                foreach_div_(group, self.before)
        return own

    def received(self, sums: Gradients) -> None:
        """Make mean gradients of sums, in place; they have the dtype of gradients again."""
        for group in by_dtype(sums):
            if self.dtype is not None and self.scale is not None:
                foreach_mul_(group, self.scale.inverse())
            if self.after > 1:
                foreach_div_(group, self.after)

    def add(self, tensors: Gradients) -> None:
        """Add the gradients of a micro-batch, a tensor or None for each parameter."""
        for tensor in tensors:
            if tensor is not None and tensor.is_sparse:
                allowed = "allowed: devices=1 precision.reduce_order=rank"
                raise BadInput(f"sparse gradients are not summed over ranks ({allowed})")
        if self.fixed or not self._kept:
            self._kept.append(tensors)
        else:
            self._kept = [added(self._kept[0], tensors)]

    @torch.no_grad()
    def total(self) -> Gradients:
        """Return the sum over all micro-batches of all ranks, bit-equal on each."""
        kept, self._kept = self._kept, []
        if self.muted or (self.group.world == 1 and not self.fixed):
            return kept[0]
        likes = self._likes(kept)
        whole: list[Tensor | None] = [None] * len(kept[0])
        # Flattening a bucket overlaps with the all-reduce of the buckets before it.
        begun = []
        for bucket in self._buckets(likes):
            rows = [self._flattened(bucket, own, likes) for own in kept]
            # What is gathered is flat, so that a ring's chunks are those of the bucket.
            gathered = self.group.gather(torch.stack(rows)) if self.fixed else None
            flat = rows[0] if gathered is None else in_order(gathered, self.order)
            begun.append((bucket, flat, None if self.fixed else self.group.sum(flat)))
        for bucket, flat, work in begun:
            if work is not None:
                work.wait()
            parts = flat.split([likes[number].numel() for number in bucket])
            for number, part in zip(bucket, parts, strict=True):
                like = likes[number]
                whole[number] = part.as_strided(like.shape, like.stride(), part.storage_offset())
        return whole

    def clear(self) -> None:
        self._kept = []

    def norms(self, gradients: Gradients) -> Tensor:
        """Return each whole gradient's L2 norm, float32 [n]."""
        return norms_of(gradients)

    def gathered(self) -> AbstractContextManager[Any]:
        """Return a context in which each rank has whole weights, and may call the model alone."""
        return nullcontext()

    def _likes(self, kept: list[list[Tensor | None]]) -> dict[int, Tensor]:
        """Return a gradient of this rank for each parameter that has one on some rank.

        The ranks agree once on which parameters have gradients; it must not change afterwards.
        """
        likes = [next((t for t in own if t is not None), None) for own in zip(*kept, strict=True)]
        has = [like is not None for like in likes]
        if self._used is None:
            self._used = [any(ranks) for ranks in zip(*self.group.all_of(has), strict=True)]
        for number, (own, used) in enumerate(zip(has, self._used, strict=True)):
            if own and not used:
                raise MprunError(
                    f"parameter {number} has a gradient for the first time after the first step; "
                    "on several ranks the same parameters must be used in every step"
                )
            if used and not own:
                raise MprunError(
                    f"parameter {number} has no gradient on rank {self.group.rank}, but some rank "
                    "had one in the first step. All ranks must use the same parameters in every "
                    "step"
                )
        return {number: like for number, like in enumerate(likes) if like is not None}

    def _buckets(self, likes: dict[int, Tensor]) -> Iterator[list[int]]:
        """Yield consecutive parameters of one dtype, the last first, as backward finishes."""
        bucket: list[int] = []
        size, dtype = 0, None
        for number, like in reversed(likes.items()):
            if bucket and (like.dtype is not dtype or size >= self.bucket_bytes):
                yield bucket
                bucket, size = [], 0
            bucket.append(number)
            size, dtype = size + like.numel() * like.element_size(), like.dtype
        if bucket:
            yield bucket

    def _flattened(
        self, bucket: list[int], own: list[Tensor | None], likes: dict[int, Tensor]
    ) -> Tensor:
        parts = []
        for number in bucket:
            like, tensor = likes[number], own[number]
            if tensor is None:
                parts.append(like.new_zeros(like.numel(), dtype=self.dtype))
                continue
            if tensor.stride() != like.stride():
                tensor = torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)
            parts.append(in_memory_order(tensor))
        return torch.cat(parts)


class OverlappedReduction(FlatReduction):
    """A `FlatReduction` that sums the last micro-batch of this rank during its backward pass.

    It is a communication hook of torch's DistributedDataParallel (torch docs: DDP Communication
    Hooks): a bucket is summed as soon as backward has all of it, with what this rank has kept of
    its earlier micro-batches. DDP puts the mean that the hook returns into `.grad`.
    """

    _summed = 0  # parameters in the buckets of this step

    def network(self, prepared: PreparedModel, parameters: Sequence[Tensor]) -> Callable[..., Any]:
        super().network(prepared, parameters)
        # No buffers to broadcast: statistics and weights are already equal on all ranks.
        known = inspect.signature(DistributedDataParallel).parameters
        buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        options: dict[str, Any] = {buffers: False, "bucket_cap_mb": self.bucket_bytes / 2**20}
        # Warned of for 1x1 convolutions in NHWC, whose strides can be written in two ways.
        warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
        made = DistributedDataParallel(prepared.model, process_group=self.group.tensors, **options)
        made.register_comm_hook(self, OverlappedReduction.begun)
        self._number = {id(own): number for number, own in enumerate(parameters)}
        self._module = made
        return made

    def overlap(self, last: bool) -> None:
        self._module.require_backward_grad_sync = last and not self.muted  # like DDP's `no_sync`

    def end_part(self) -> None:
        if not self._module.require_backward_grad_sync:
            super().end_part()

    def mean(self) -> None:
        if not self._module.require_backward_grad_sync:
            return super().mean()
        self._kept = []
        if self._summed < len(self.parameters):  # DDP waits for all of a bucket
            without = len(self.parameters) - self._summed
            raise BadInput(
                f"dist.engine=ddp: {without} of {len(self.parameters)} parameters have no gradient "
                "in this step; use dist.engine=flat"
            )

    def clear(self) -> None:
        super().clear()
        self._summed = 0

    @torch.no_grad()
    def begun(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Begin to sum one bucket; return the future that DDP puts into `.grad`."""
        buffer, parameters = bucket.buffer(), bucket.parameters()
        numbers = [self._number[id(own)] for own in parameters]
        self._summed += len(numbers)
        with disable_dispatch_modes():  # an emulation would look at each operation
            # A bucket has the memory order of its parameters; `bucket.gradients()` takes it for
            # contiguous (torch 2.15), which mixes up the values of a layout like NHWC.
            parts = buffer.split([own.numel() for own in parameters])
            likes = dict(zip(numbers, map(_as, parameters, parts), strict=True))
            rows = [self._flattened(numbers, own, likes) for own in self._kept]
            rows += [row for row in self.sent([buffer.clone()]) if row is not None]
            if self.fixed:
                flat = in_order(self.group.gather(torch.stack(rows)), self.order)
                work: torch.futures.Future[Any] = torch.futures.Future()
                work.set_result(None)
            else:
                flat = rows[0] if len(rows) == 1 else rows[0].add_(rows[1])
                work = self.group.sum(flat).get_future()

        def ended(_: Any) -> Tensor:
            with torch.no_grad(), disable_dispatch_modes():
                buffer.copy_(flat)
                self.received([buffer])
            return buffer

        return work.then(ended)


def _as(parameter: Tensor, flat: Tensor) -> Tensor:
    """Return a part of a bucket as the gradient that it is: laid out as a dense parameter, else
    contiguous."""
    like = torch.empty_like(parameter, device="meta")
    strides = like.stride() if like.stride() == parameter.stride() else like.contiguous().stride()
    return flat.as_strided(parameter.shape, strides, flat.storage_offset())


def in_order(parts: Tensor | list[Tensor], order: str) -> Tensor:
    """Return the sum `[n]` of the `[M, n]` terms of M ranks; each addition rounds to their dtype.

    rank: from the first rank to the last.
    ring: as gloo's all-reduce of M ranks adds a tensor of n elements.
    tree: in pairs of neighbours, then pairs of these sums; of an odd number the last one waits.
    fp32: as rank, but in FP32, and rounded once. 16 bits are on the wire alone, as with Megatron's
        `reduce_scatter_with_fp32_accumulation`.
    """
    if order in ("ring", "tree"):
        terms = parts if isinstance(parts, Tensor) else torch.stack(parts)
        if order == "ring":
            return _around_a_ring(terms)
        while len(terms) > 1:
            pairs = terms[:-1:2] + terms[1::2]
            terms = torch.cat([pairs, terms[-1:]]) if len(terms) % 2 else pairs
        return terms[0]
    dtype = parts[0].dtype
    total = parts[0].to(torch.float32 if order == "fp32" else dtype, copy=True)
    for part in parts[1:]:
        total.add_(part)
    return total.to(dtype)


_RING_SEGMENT = 2**20  # gloo/allreduce.h, kMaxSegmentSize: most bytes sent at a time


def _around_a_ring(parts: Tensor) -> Tensor:
    """Add as gloo's ring in torch 2.15: chunk c begins at rank c - 1 and goes down to rank c.

    There are M chunks of one length, of as many segments each, two or more; the last chunks may be
    shorter or empty. Another gloo cuts what is longer than 2M segments of 1 MiB elsewhere.
    """
    ranks, numel = parts.shape
    size = parts.element_size()
    segments = max(math.ceil(numel * size / _RING_SEGMENT), 2 * ranks)
    of_a_chunk = math.ceil(segments / ranks)
    bytes_of_one = math.ceil(numel * size / (of_a_chunk * ranks))
    length = of_a_chunk * math.ceil(bytes_of_one / size)
    by_chunk = nn.functional.pad(parts, (0, ranks * length - numel)).view(ranks, ranks, length)
    total = parts.new_full((ranks, length), -0.0)  # -0 + x is x, whatever x
    for step in range(1, ranks + 1):
        total[step:] += by_chunk.diagonal(step).T  # of rank c - step
        total[:step] += by_chunk.diagonal(step - ranks).T  # the same, below 0: modulo M
    return total.view(-1)[:numel]


def added(known: Gradients, new: Gradients) -> Gradients:
    """Return sums of gradients, in the tensors of `known` if both exist."""
    sums: Gradients = []
    groups: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
    for one, other in zip(known, new, strict=True):
        if one is not None and other is not None:
            groups.setdefault(one.dtype, []).append((one, other))
        sums.append(other if one is None else one)
    for group in groups.values():
        foreach_add_([one for one, _ in group], [other for _, other in group])
    return sums


def factors(ranks: int, divide: str) -> tuple[int, int]:
    """Return the divisors of gradients before and after their sum; the product is `ranks`.

    ValueError unless `divide` is one of `DIVIDE`.

    Each addition in 16 bits rounds. Divided before, small gradients underflow, more of them with
    more ranks; divided after, large ones overflow.

    "split": about the square root before, in powers of two, as torch's FSDP divides FP16 gradients
    (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, `_get_gradient_divide_factors`).
    """
    if divide not in DIVIDE:
        raise ValueError(f"divide={divide!r}: must be one of {', '.join(DIVIDE)}")
    if divide != "split":
        return (ranks, 1) if divide == "before" else (1, ranks)
    before = 1
    while ranks % before == 0 and ranks / before > before:
        before *= 2
    return (before, ranks // before) if ranks % before == 0 else (1, ranks)
