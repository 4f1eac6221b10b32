"""Gradients of several ranks summed while backward goes on, by torch's DistributedDataParallel.

DDP decides when a bucket of gradients is complete, and a communication hook (torch docs: DDP
Communication Hooks) decides what becomes of it. DDP's own reduction would average FP16 gradients in
FP16, times the loss scale; here each bucket is first cast and unscaled as the mode says, has the
gradients of the micro-batches before added, and is summed in that dtype. What DDP then writes to
`.grad` is not used.
"""

# Without postponed annotations: DDP looks at those of its hook.
import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mprun.distributed.flat import FlatReduction
from mprun.errors import BadInput

# Which gradient it is of the optimizer's, and the flat bucket -> what is to be summed.
Sent = Callable[[int, Tensor], Tensor]


class OverlappedReduction(FlatReduction):
    """As `FlatReduction`, but the last micro-batch of this rank is summed in its backward pass.

    Args:
        group: a `mprun.distributed.group.Group`.
        bucket_bytes: of gradients that are summed at a time.
    """

    def __init__(self, group: Any, *, bucket_bytes: int):
        super().__init__(group, fixed=False, bucket_bytes=bucket_bytes)
        self._place: dict[int, int] = {}  # id of a parameter -> its number
        self._sent: Sent | None = None
        self._sums: list[Tensor | None] = []

    def wrapped(self, model: nn.Module) -> DistributedDataParallel:
        """What a step calls in place of the model; it shares its parameters."""
        # Statistics and weights are the same on all ranks as they are.
        known = inspect.signature(DistributedDataParallel).parameters
        buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        options: dict[str, Any] = {buffers: False, "bucket_cap_mb": self.bucket_bytes / 2**20}
        made = DistributedDataParallel(model, process_group=self.group.tensors, **options)
        made.register_comm_hook(self, _hook)
        # Of 1x1 convolutions in NHWC, whose strides can be written in two ways.
        warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
        return made

    def overlap(self, last: bool) -> bool:
        self.overlaps = last and not self.muted
        return self.overlaps

    def begin(self, parameters: Sequence[Tensor], sent: Sent) -> None:
        """A backward pass begins that ends with the sum over all ranks."""
        self._place = {id(parameter): place for place, parameter in enumerate(parameters)}
        self._sent, self._sums = sent, [None] * len(parameters)

    def total(self) -> list[Tensor | None]:
        if self._sent is None:
            return super().total()
        summed, self._sums, self._sent, self._kept = self._sums, [], None, []
        without = [place for place, tensor in enumerate(summed) if tensor is None]
        if without:  # DDP waits for the gradients of a whole bucket
            raise BadInput(
                f"dist.engine=ddp: {len(without)} of {len(summed)} parameters have no gradient in "
                "this step; use dist.engine=flat"
            )
        return summed

    def clear(self) -> None:
        super().clear()
        self._sent, self._sums = None, []

    def begun(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Sum one bucket; the future of what DDP puts into `.grad`."""
        buffer = bucket.buffer()
        if self._sent is None:  # of a pass that is none of a step
            return _done(buffer)
        places = [self._place.get(id(p)) for p in bucket.parameters()]
        first = next((place for place in places if place is not None), None)
        if first is None:
            return _done(buffer)
        flat = self._sent(first, buffer)
        if flat is buffer:
            flat = buffer.clone()
        offset = 0
        for place, parameter in zip(places, bucket.parameters(), strict=True):
            begin, offset = offset, offset + parameter.numel()
            if place is None:
                continue
            # In the memory order of the parameter; `bucket.gradients()` says that it is contiguous
            # (torch 2.15), which mixes up the values of a layout like NHWC.
            own = flat[begin:offset].as_strided(parameter.shape, _strides(parameter))
            before = self._kept[0][place] if self._kept else None
            if before is not None:
                own.add_(before)
            self._sums[place] = own
        work = dist.all_reduce(flat, group=self.group.tensors, async_op=True)
        assert work is not None
        return work.get_future().then(lambda _: buffer)


def _strides(parameter: Tensor) -> tuple[int, ...]:
    """Of a parameter's gradient in a bucket: its own where it is dense, else contiguous ones."""
    like = torch.empty_like(parameter, device="meta")
    return like.stride() if like.stride() == parameter.stride() else like.contiguous().stride()


def _hook(
    reduction: OverlappedReduction, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    return reduction.begun(bucket)


def _done(buffer: Tensor) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(buffer)
    return future
