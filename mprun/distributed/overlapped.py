"""Gradients of several ranks summed during backward, by torch's DistributedDataParallel.

DDP's own reduction would average FP16 gradients in FP16, times the loss scale. A communication hook
(torch docs: DDP Communication Hooks) therefore sums each complete bucket: it casts and unscales it
as the mode says, adds the gradients of the earlier micro-batches, and sums in that dtype. The
`.grad` that DDP then writes is not used.
"""

# No postponed annotations: DDP inspects the annotations of its hook.
import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mprun.distributed.flat_gradients import FlatReduction
from mprun.errors import BadInput

# Number of a parameter among the optimizer's, flat bucket -> flat tensor to be summed.
Sent = Callable[[int, Tensor], Tensor]


class OverlappedReduction(FlatReduction):
    """A `FlatReduction` that sums the last micro-batch of this rank during its backward pass."""

    def __init__(self, group: Any, *, bucket_bytes: int):
        super().__init__(group, fixed=False, bucket_bytes=bucket_bytes)
        self._number: dict[int, int] = {}  # id of a parameter -> its number
        self._sent: Sent | None = None
        self._sums: list[Tensor | None] = []

    def wrapped(self, model: nn.Module) -> DistributedDataParallel:
        """Return the module that a step calls in place of the model; both share parameters."""
        # No buffers to broadcast: statistics and weights are already equal on all ranks.
        known = inspect.signature(DistributedDataParallel).parameters
        buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        options: dict[str, Any] = {buffers: False, "bucket_cap_mb": self.bucket_bytes / 2**20}
        made = DistributedDataParallel(model, process_group=self.group.tensors, **options)
        made.register_comm_hook(self, _hook)
        # Warned of for 1x1 convolutions in NHWC, whose strides can be written in two ways.
        warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
        return made

    def overlap(self, last: bool) -> bool:
        self.overlaps = last and not self.muted
        return self.overlaps

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

    def begun(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Begin to sum one bucket; return the future that DDP puts into `.grad`."""
        buffer = bucket.buffer()
        numbers = [self._number.get(id(p)) for p in bucket.parameters()]
        first = next((number for number in numbers if number is not None), None)
        if self._sent is None or first is None:  # outside a step, or nothing of it
            done: torch.futures.Future[Tensor] = torch.futures.Future()
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


def _hook(
    reduction: OverlappedReduction, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    return reduction.begun(bucket)
