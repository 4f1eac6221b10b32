"""The sum of the gradients of several ranks, in buckets: after backward, or during it.

`order=fixed` keeps the gradients of each micro-batch apart until all ranks have them. It then adds
them in the order of micro-batches, like a single rank that takes all of them. The bits are the same
for every number of ranks; the cost is the memory of M/W gradients and the traffic of M.
A single rank keeps them apart too where it adds in another order, as clusters do (`in_order`).
`order=fast` adds this rank's gradients first and leaves the rest to the library's all-reduce, which
chooses its own order.
"""

# No postponed annotations: DDP inspects the annotations of its hook.
import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mprun.errors import BadInput, MprunError
from mprun.precision.gradients import added
from mprun.precision.update import in_memory_order, norms_of

# Number of a parameter among the optimizer's, flat bucket -> flat tensor to be summed.
Sent = Callable[[int, Tensor], Tensor]


class FlatReduction:
    """Sum gradients over a RankGroup after backward; see `mprun.precision.gradients.Reduction`.

    fixed: gather the micro-batches, and add them `in_order`. bucket_bytes: size of the gradients
    summed at a time.
    """

    overlaps = shards = False
    muted = False  # for a bench: this rank's gradients are taken for the sum

    def __init__(self, group: Any, *, fixed: bool, bucket_bytes: int, order: str = "rank"):
        self.group, self.fixed, self.bucket_bytes = group, fixed, bucket_bytes
        self.order = order
        self._kept: list[list[Tensor | None]] = []
        self._used: list[bool] | None = None  # by parameter: whether any rank has a gradient

    def wrapped(self, model: nn.Module) -> nn.Module:
        """Return the module that a step calls in place of the model."""
        return model

    def overlap(self, last: bool) -> None:
        pass

    def begin(self, parameters: Sequence[Tensor], sent: Sent) -> None:
        raise RuntimeError("`overlaps` is false: FlatReduction sums after backward")

    def end(self, gradients: list[Tensor | None]) -> None:
        pass

    def add(self, tensors: list[Tensor | None]) -> None:
        for tensor in tensors:
            if tensor is not None and tensor.is_sparse:
                allowed = "allowed: devices=1 precision.reduce_order=rank"
                raise BadInput(f"sparse gradients are not summed over ranks ({allowed})")
        if self.fixed or not self._kept:
            self._kept.append(tensors)
        else:
            self._kept = [added(self._kept[0], tensors)]

    @torch.no_grad()
    def total(self) -> list[Tensor | None]:
        kept, self._kept = self._kept, []
        if self.muted:
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

    def largest(self, values: Tensor) -> Tensor:
        return values if self.muted else self.group.largest(values)

    def norms(self, gradients: list[Tensor | None]) -> Tensor:
        return norms_of(gradients)

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
                    "had one in the first step; all ranks must use the same parameters in every "
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
                parts.append(like.new_zeros(like.numel()))
                continue
            if tensor.stride() != like.stride():
                tensor = torch.empty_like(like).copy_(tensor)
            parts.append(in_memory_order(tensor))
        return torch.cat(parts)


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


class OverlappedReduction(FlatReduction):
    """A `FlatReduction` that sums the last micro-batch of this rank during its backward pass.

    DDP's own reduction would average FP16 gradients in FP16, times the loss scale. A communication
    hook (torch docs: DDP Communication Hooks) therefore sums each complete bucket: it casts and
    unscales it as the mode says, adds the gradients of the earlier micro-batches, and sums in that
    dtype. The `.grad` that DDP then writes is not used.
    """

    def __init__(self, group: Any, *, bucket_bytes: int):
        super().__init__(group, fixed=False, bucket_bytes=bucket_bytes)
        self._number: dict[int, int] = {}  # id of a parameter -> its number
        self._sent: Sent | None = None
        self._sums: list[Tensor | None] = []
        self._module: DistributedDataParallel | None = None

    def wrapped(self, model: nn.Module) -> DistributedDataParallel:
        # No buffers to broadcast: statistics and weights are already equal on all ranks.
        known = inspect.signature(DistributedDataParallel).parameters
        buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        options: dict[str, Any] = {buffers: False, "bucket_cap_mb": self.bucket_bytes / 2**20}
        made = DistributedDataParallel(model, process_group=self.group.tensors, **options)
        made.register_comm_hook(self, OverlappedReduction.begun)
        # Warned of for 1x1 convolutions in NHWC, whose strides can be written in two ways.
        warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
        self._module = made
        return made

    def overlap(self, last: bool) -> None:
        self.overlaps = last and not self.muted
        if self._module is not None:  # like DDP's `no_sync`
            self._module.require_backward_grad_sync = self.overlaps

    def begin(self, parameters: Sequence[Tensor], sent: Sent) -> None:
        """Begin a backward pass that ends with the sum over all ranks."""
        self._number = {id(parameter): number for number, parameter in enumerate(parameters)}
        self._sent, self._sums = sent, [None] * len(parameters)

    def total(self) -> list[Tensor | None]:
        if self._sent is None:
            return super().total()
        summed, self._sums, self._sent, self._kept = self._sums, [], None, []
        without = sum(tensor is None for tensor in summed)
        if without:  # DDP sums a bucket only once all of its gradients are there
            raise BadInput(
                f"dist.engine=ddp: {without} of {len(summed)} parameters have no gradient in "
                "this step; use dist.engine=flat"
            )
        return summed

    def clear(self) -> None:
        super().clear()
        self._sent, self._sums = None, []

    def begun(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Begin to sum one bucket; return the future that DDP puts into `.grad`."""
        buffer = bucket.buffer()
        numbers = [self._number.get(id(p)) for p in bucket.parameters()]
        first = next((number for number in numbers if number is not None), None)
        if self._sent is None or first is None:  # outside a step, or nothing of it
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            done.set_result(buffer)
            return done
        flat = self._sent(first, buffer)
        if flat is buffer:
            flat = buffer.clone()
        offset = 0
        for number, parameter in zip(numbers, bucket.parameters(), strict=True):
            begin, offset = offset, offset + parameter.numel()
            if number is None:
                continue
            # The bucket has the memory order of the parameter. `bucket.gradients()` takes it for
            # contiguous (torch 2.15), which mixes up the values of a layout like NHWC.
            own = flat[begin:offset].as_strided(parameter.shape, _strides(parameter))
            before = self._kept[0][number] if self._kept else None
            if before is not None:
                own.add_(before)
            self._sums[number] = own
        work = dist.all_reduce(flat, group=self.group.tensors, async_op=True)
        assert work is not None
        return work.get_future().then(lambda _: buffer)


def _strides(parameter: Tensor) -> tuple[int, ...]:
    """Return the strides of a gradient in a bucket: the parameter's if dense, else contiguous."""
    like = torch.empty_like(parameter, device="meta")
    return like.stride() if like.stride() == parameter.stride() else like.contiguous().stride()
