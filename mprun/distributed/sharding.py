"""Weights, optimizer state and gradients in shards, one to a rank, by torch's `fully_shard`.

FSDP gathers the weights of a unit (a block, or what is left of the network) before they are used,
and scatters the sum of its gradients. In between a rank has rows of each parameter, and of its
state, and updates these alone. Here is what torch leaves open: how the gradients of a unit are
added, the norm of whole gradients, and whole weights for an evaluation.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from mprun.distributed.reduction import FlatReduction, Gradients, in_order
from mprun.errors import BadInput
from mprun.precision.update import norms_of
from mprun.prepared.prepared_model import PreparedModel
from mprun.torch_private import disable_dispatch_modes


def shard(network: nn.Module, blocks: Sequence[nn.Module], ranks: Any) -> None:
    """Shard the blocks of a network, and the rest of it, in place; BadInput if it cannot be."""
    _refuse(network, blocks)
    mesh = DeviceMesh.from_group(ranks.tensors, ranks.device.type)
    for module in (*blocks, network):
        # What stands beside the blocks may be read once more, as a tied embedding is.
        unit = fully_shard(module, mesh=mesh, reshard_after_forward=module is not network)
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)


def _refuse(network: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Refuse parameters that have no rows, or would be two after the division."""
    why = None
    for name, module in network.named_modules():
        if isinstance(module, nn.RNNBase):
            why = f"{name} is a recurrent layer, with its weights in a second place"
        if getattr(module, "sparse", False):
            why = f"{name} has sparse gradients"
    for name, own in network.named_parameters():
        if not own.dim() or own.is_complex() or not own.is_contiguous():
            why = f"{name} is a single number, complex, or not contiguous"
    inside = {module for block in blocks for module in block.modules()}
    rest = [module for module in network.modules() if module not in inside]
    held = [{*block.parameters()} for block in blocks]
    held.append({own for module in rest for own in module.parameters(recurse=False)})
    if sum(map(len, held)) > len({*network.parameters()}):
        why = "blocks share a weight with each other, or with the rest of the network"
    if why is not None:
        raise BadInput(f"dist.engine=fsdp: {why} (allowed: auto, flat, ddp)")


class ShardedReduction(FlatReduction):
    """The sums of gradients of a sharded model, of which each rank gets those of its rows.

    `fixed` keeps this rank's part of each micro-batch until the last: M times the memory of its
    gradients, and the traffic of M sums. Else a rank adds up its own micro-batches first, whole and
    without communication; with a `dtype`, each is summed over ranks at once.
    """

    def network(self, prepared: PreparedModel, parameters: Sequence[Tensor]) -> Callable[..., Any]:
        self.scale, self.parameters = prepared.scale, parameters
        self.apart, self.last = self.fixed or self.dtype is not None, True
        self.root = prepared.model
        self.units = [one for one in self.root.modules() if isinstance(one, FSDPModule)]
        self.sums = [_UnitSum(self) for _ in self.units]
        for unit, own in zip(self.units, self.sums, strict=True):
            unit.set_custom_reduce_scatter(own)  # type: ignore[arg-type]  # torch's class is private
        return prepared.model

    def overlap(self, last: bool) -> None:
        self.last = last
        if not self.apart:
            for unit in self.units:
                unit.set_requires_gradient_sync(last, recurse=False)

    def end_part(self) -> None:
        if not self.last:
            for parameter in self.parameters:
                parameter.grad = None

    def mean(self) -> None:
        """Do nothing: the last backward pass has left means in `.grad`."""

    def clear(self) -> None:
        for own in self.sums:
            own.kept = []

    def norms(self, gradients: Gradients) -> Tensor:
        """Return each whole gradient's L2 norm, float32 [n].

        `fixed`: with the bits of one rank, so that each gradient is gathered on every rank.
        """
        present: list[Any] = [gradient for gradient in gradients if gradient is not None]
        if self.fixed:
            return torch.cat([norms_of([gradient.full_tensor()]) for gradient in present])
        squares = norms_of(gradient.to_local() for gradient in present).square()
        dist.all_reduce(squares, group=self.group.tensors)
        return squares.sqrt()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Let each rank have whole weights: their numbers of calls may differ."""
        for unit in self.units:
            unit.set_reshard_after_forward(False, recurse=False)
            unit.unshard()
        try:
            yield
        finally:
            for unit in self.units:
                unit.set_reshard_after_forward(unit is not self.root, recurse=False)
                unit.reshard()


class _UnitSum:
    """The sum of the gradients of one unit, as FSDP calls it once in a backward pass.

    torch docs: FSDPModule.set_custom_reduce_scatter.
    """

    def __init__(self, reduction: ShardedReduction):
        self.reduction = reduction
        self.kept: list[Tensor] = []  # of the micro-batches so far: [ranks or 1, numbers here]

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    @torch.no_grad()
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Put the mean into the output, after the last micro-batch; before it zeros."""
        with disable_dispatch_modes():  # an emulation would look at each operation
            reduction = self.reduction
            self.kept.append(self._exchanged(input_tensor, group))
            if not reduction.last:
                output_tensor.zero_()
                return
            kept, self.kept = self.kept, []
            rows = [own[rank] for rank in range(len(kept[0])) for own in kept]
            output_tensor.copy_(in_order(rows, reduction.order))
            reduction.received([output_tensor])

    def _exchanged(self, flat: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return the sums of one micro-batch of each rank, [1, numbers]; fixed: its terms."""
        [own] = self.reduction.sent([flat])
        assert own is not None
        ranks = dist.get_world_size(group)
        if self.reduction.muted:
            return own.view(ranks, -1)[dist.get_rank(group)].clone()[None]
        if self.reduction.fixed:
            received = torch.empty_like(own)
            dist.all_to_all_single(received, own, group=group)
            return received.view(ranks, -1)
        summed = own.new_empty(own.numel() // ranks)
        dist.reduce_scatter_tensor(summed, own, group=group)
        return summed[None]
