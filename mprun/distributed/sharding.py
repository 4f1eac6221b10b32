"""Weights, optimizer state and gradients in shards, one to a rank, by torch's `fully_shard`.

FSDP gathers the weights of a unit (a block, or what is left of the network) before they are used,
in the dtype in which the mode computes, and scatters the sum of its gradients. Between two passes a
rank has rows of each parameter: FP32 masters, or weights without masters in their dtype. It updates
these alone. All of it has the bits of an unsharded run (`order=fixed`):

- a unit's gradients are exchanged as every engine sums them, cast and unscaled first, and added in
  the order of micro-batches;
- a norm is that of a whole gradient, which one rank puts together;
- what one rank finds not finite, all hear of; random bits depend on a number's place in the whole
  parameter.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from mprun.distributed.reduction import FlatReduction, Sent, in_order
from mprun.errors import BadInput
from mprun.precision.casting import CastModel, Shard, copy_exactly, hold_forms
from mprun.precision.packed_states import BLOCK, IN_BLOCKS, fits
from mprun.precision.policy import PrecisionPolicy
from mprun.precision.update import norms_of
from mprun.torch_private import BatchNorm, disable_dispatch_modes, parameters_of, version_of

Gradients = list[Tensor | None]
# Numbers; a multiple of the registers of all processors, 32 of 16 bits at most, and of a block of
# random bits. torch rounds what is left over after the last full register otherwise.
_ALIGNED = 32


@dataclass(slots=True)
class ShardedModel(CastModel):
    """A model of which this rank has `shards`; an evaluation takes a `twin` with whole weights."""

    ranks: Any = None
    twin: CastModel = None  # type: ignore[assignment]  # its parameters have no values
    gathered: "list[Unit]" = field(default_factory=list)
    # FSDP's rows of each parameter; `shards` has the same memory, or a few numbers more.
    rows: dict[str, Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def refresh(self) -> None:
        for name, shard in self.shards.items():
            if shard.own.shape != self.rows[name].shape:
                self.rows[name].copy_(self.rows_of(name, shard.own))

    def rows_of(self, name: str, part: Tensor) -> Tensor:
        """Return a view of this rank's rows in `part`, which has the shape of the shard."""
        rows, shard = self.rows[name], self.shards[name]
        begin = _rows(shard.shape, self.ranks.rank, self.ranks.world)[0] * _row(shard.shape)
        begin -= shard.start
        return part.reshape(-1)[begin : begin + rows.numel()].view(rows.shape)

    def around(self, name: str, rows: Tensor) -> Tensor:
        """Return rows in the shape of the shard, zeros around them."""
        own = self.shards[name].own
        if own.shape == rows.shape:
            return rows
        part = torch.zeros_like(own, dtype=rows.dtype)
        self.rows_of(name, part).copy_(rows)
        return part

    def whole(self, name: str, part: Tensor) -> Tensor:
        """Return the whole tensor of which each rank has such a part; all ranks call it."""
        shape = self.shards[name].shape
        if _are_scales(part, self.shards[name].own.shape):
            spread = part.repeat_interleave(BLOCK).view(self.shards[name].own.shape)
            return self.whole(name, spread).flatten()[::BLOCK].clone()
        own = self.rows_of(name, part)
        rows = part.new_zeros(-(-shape[0] // self.ranks.world), *shape[1:])
        rows[: len(own)] = own
        return self.ranks.gather(rows)[: shape[0]]

    def saved(self, name: str, part: Tensor) -> Tensor:
        """Return the whole on the host of the rank that writes checkpoints, else nothing of it."""
        whole = self.whole(name, part)
        return whole.cpu() if self.ranks.is_first else whole.new_empty(0)

    def part(self, name: str, whole: Tensor) -> Tensor:
        shard = self.shards.get(name)
        if shard is not None and _are_scales(whole, shard.shape):
            spread = whole.repeat_interleave(BLOCK).view(shard.shape)
            return self.part(name, spread).flatten()[::BLOCK]
        if shard is None or whole.shape != shard.shape:
            return whole
        first, shape = _rows(shard.shape, self.ranks.rank, self.ranks.world)
        return self.around(name, whole[first : first + shape[0]])

    def state_dict(self) -> dict[str, Tensor]:
        """Return the whole state, on the rank that writes checkpoints."""
        own, found = self._buffers(), dict[str, Tensor]()
        for key, name in self._names_in_state().items():
            if name in self.shards:
                shard = self.shards[name]
                found[key] = self.saved(name, shard.own.detach()).to(shard.computed)
            else:
                found[key] = own[key]
        return found

    @torch.no_grad()
    def load_state_dict(self, saved: Any) -> None:
        names, buffers = self._names_in_state(), self._buffers()
        if names.keys() != saved.keys():
            raise ValueError("model state is of another model")
        for key, name in names.items():
            shard = self.shards.get(name)
            if shard is None:
                copy_exactly(key, buffers[key], saved[key])
            elif name in self.masters:  # FSDP rounds the master, which the optimizer has saved
                like = torch.empty(shard.shape, dtype=shard.computed, device="meta")
                copy_exactly(key, like, saved[key])
            else:
                copy_exactly(key, shard.own, self.part(name, saved[key]))

    def _names_in_state(self) -> dict[str, str]:
        """Return key of the state -> name of the tensor; a parameter may have several keys."""
        names = {id(own): name for name, own in self.twin.module.named_parameters()}
        state = self.twin.module.state_dict(keep_vars=True)
        return {key: names.get(id(own), key) for key, own in state.items()}

    def _buffers(self) -> dict[str, Tensor]:
        return dict(self.module.named_buffers(remove_duplicate=False))

    @contextmanager
    def in_fp32(self, weights: Any = None) -> Iterator[nn.Module]:
        """Gather the whole weights on each rank, and let the twin compute with them in FP32."""
        whole = {n: self.whole(n, s.own.detach()).float() for n, s in self.shards.items()}
        self._follow()
        with self.twin.in_fp32(whole | dict(weights or {})) as module:
            yield module

    @contextmanager
    def in_mode(self) -> Iterator[nn.Module]:
        """Gather the whole weights on each rank: their numbers of passes may differ."""
        own = dict(self.twin.module.named_parameters())
        forms = {
            id(own[n]): self.whole(n, shard.own.detach()).to(shard.computed)
            for n, shard in self.shards.items()
        }
        self._follow()
        with ExitStack() as stack:
            for module in self.twin.module.modules():
                hold_forms(stack, module, forms)
            yield self.twin.module

    def _follow(self) -> None:
        """Let the twin have the buffers of the model, and be in training or not like it."""
        twin = self.twin.module.train(self.module.training)
        with torch.no_grad():
            for own, other in zip(self.module.buffers(), twin.buffers(), strict=True):
                other.copy_(own)


class Unit:
    """A module whose parameters are gathered together, and the sum of their gradients.

    FSDP calls it (torch docs: FSDPModule.set_custom_reduce_scatter) once in a backward pass.
    """

    def __init__(self, name: str, parameters: list[nn.Parameter]):
        self.name, self.parameters = name, parameters
        self.reduction: ShardedReduction | None = None
        self.output = torch.empty(0)
        self._kept: list[Tensor] = []  # of the micro-batches so far: [ranks or 1, numbers here]

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
        assert self.reduction is not None
        with disable_dispatch_modes():  # an emulation would look at each operation
            self._kept.append(self.reduction.exchanged(self, input_tensor, group))
            self.output = output_tensor
            if self.reduction.last:
                rows = [own[rank] for rank in range(len(self._kept[0])) for own in self._kept]
                self._kept = []
                output_tensor.copy_(in_order(rows, self.reduction.order))

    def clear(self) -> None:
        self._kept = []


class ShardedReduction(FlatReduction):
    """The sums of gradients of a ShardedModel, of which each rank gets those of its shards.

    `fixed` keeps this rank's part of each micro-batch until the last: M times the memory of its
    gradients, and the traffic of M sums. Else a rank adds up its own micro-batches first, whole and
    without communication, unless `apart`: then each is summed over ranks at once.
    """

    overlaps = shards = True

    def __init__(self, model: ShardedModel, *, fixed: bool, apart: bool, order: str = "rank"):
        super().__init__(model.ranks, fixed=fixed, bucket_bytes=0, order=order)
        self.model, self.apart, self.last = model, fixed or apart, True
        self._sent: Sent | None = None
        self._number: dict[int, int] = {}  # id of a parameter -> its number
        self._sums: Gradients = []
        self._unit = {id(own): unit for unit in model.gathered for own in unit.parameters}
        self._name = {id(own): name for name, own in model.module.named_parameters()}
        for unit in model.gathered:
            unit.reduction = self

    def overlap(self, last: bool) -> None:
        self.last = last
        if not self.apart:
            self.model.module.set_requires_gradient_sync(last)  # type: ignore[operator]

    def begin(self, parameters: Sequence[Tensor], sent: Sent) -> None:
        self._number = {id(own): number for number, own in enumerate(parameters)}
        self._sent = sent

    def exchanged(self, unit: Unit, flat: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return the sums of one micro-batch of each rank, [1, numbers]; fixed: its terms."""
        assert self._sent is not None  # FSDP sums in a backward pass alone
        number = next(self._number[id(p)] for p in unit.parameters if id(p) in self._number)
        flat = self._sent(number, flat)
        if self.fixed:
            received = torch.empty_like(flat)
            dist.all_to_all_single(received, flat, group=group)
            return received.view(self.group.world, -1)
        summed = flat.new_empty(flat.numel() // self.group.world)
        dist.reduce_scatter_tensor(summed, flat, group=group)
        return summed[None]

    @torch.no_grad()
    def end(self, gradients: Gradients) -> None:
        self._sent = None
        if not self.last:
            return
        self._sums = []
        with disable_dispatch_modes():
            for own, gradient in zip(self._number, gradients, strict=True):
                rows = None if gradient is None else _in(self._unit[own].output, gradient)
                part = None if rows is None else self.model.around(self._name[own], rows)
                self._sums.append(part)
        for unit in self.model.gathered:
            unit.output = torch.empty(0)

    def total(self) -> Gradients:
        summed, self._sums = self._sums, []
        return summed

    def clear(self) -> None:
        self._sums = []
        for unit in self.model.gathered:
            unit.clear()

    @torch.no_grad()
    def norms(self, gradients: Gradients) -> Tensor:
        """Return the L2 norm of each whole gradient; each is put together by one of the ranks.

        It takes the traffic, and the memory, of this rank's gradients once more. A sum of squares
        of shards would need neither, but has other bits for each number of ranks.
        """
        names = [self._name[own] for own in self._number]
        shapes = [self.model.shards[name].shape for name in names]
        pairs = zip(names, gradients, strict=True)
        rows = [None if g is None else self.model.rows_of(name, g) for name, g in pairs]
        present = {n: own for n, own in enumerate(rows) if own is not None}
        owned: list[list[int]] = [[] for _ in range(self.group.world)]
        load = [0] * self.group.world
        for n in sorted(present, key=lambda n: -shapes[n].numel()):
            least = load.index(min(load))
            owned[least].append(n)
            load[least] += shapes[n].numel()
        found, order = dict[int, Tensor](), list[int]()
        for dtype in dict.fromkeys(own.dtype for own in present.values()):  # as `by_dtype`
            of_dtype = {n: own for n, own in present.items() if own.dtype is dtype}
            theirs = [[n for n in own if n in of_dtype] for own in owned]
            mine = self._assembled(of_dtype, theirs, shapes)
            if mine:
                found |= zip(mine, norms_of(mine.values()), strict=True)
            order += of_dtype
        zero = torch.zeros((), device=self.group.device)
        norms = torch.stack([found.get(n, zero) for n in order])
        dist.all_reduce(norms, group=self.group.tensors)  # each of one rank, plus zeros
        return norms

    def _assembled(
        self, own: dict[int, Tensor], theirs: list[list[int]], shapes: list[torch.Size]
    ) -> dict[int, Tensor]:
        """Exchange shards, all of one dtype; return the whole tensors of this rank's numbers."""
        ranks, mine = range(self.group.world), theirs[self.group.rank]
        sizes = [[_rows(shapes[n], r, len(ranks))[1].numel() for n in mine] for r in ranks]
        sent = torch.cat([own[n].flatten() for numbers in theirs for n in numbers])
        to = [sum(own[n].numel() for n in numbers) for numbers in theirs]
        received = sent.new_empty(sum(map(sum, sizes)))
        dist.all_to_all_single(received, sent, [*map(sum, sizes)], to, group=self.group.tensors)
        by_rank = received.split([size for of_rank in sizes for size in of_rank])
        count = len(mine)
        return {n: torch.cat(by_rank[place::count]).view(shapes[n]) for place, n in enumerate(mine)}


def _in(output: Tensor, gradient: Any) -> Tensor:
    """Return a parameter's part of what its unit has summed; FSDP casts `.grad` to the dtype of
    the parameter, in a tensor of the same layout."""
    like = gradient.to_local()
    return output.as_strided(like.shape, like.stride(), like.storage_offset())


def _rows(shape: torch.Size, rank: int, world: int) -> tuple[int, torch.Size]:
    """Return the first row of a rank's shard, and the shape of the shard, as FSDP divides."""
    rows = -(-shape[0] // world)
    first = min(rank * rows, shape[0])
    return first, torch.Size((min(rows, shape[0] - first), *shape[1:]))


def _are_scales(tensor: Tensor, shape: torch.Size) -> bool:
    """Return whether it has a number for each block of a tensor, not one for each number."""
    return tensor.dim() == 1 and tensor.numel() * BLOCK == shape.numel() and tensor.shape != shape


def _refuse_blocks(module: nn.Module, policy: PrecisionPolicy, ranks: Any) -> None:
    """Refuse state in blocks of which a rank would have a part: their scales would differ."""
    if policy.state_dtype not in IN_BLOCKS:
        return
    for name, own in module.named_parameters():
        rows = _rows(own.shape, 0, ranks.world)[1]
        if fits(own.numel()) and rows.numel() % BLOCK:
            key = f"precision.update.state_dtype={policy.state_dtype}"
            cut = f"{rows[0]} rows of {name} a rank are no whole blocks of {BLOCK} numbers"
            raise _impossible(f"{cut}, which {key} needs")


def _row(shape: torch.Size) -> int:
    return shape[1:].numel()


def sharded(cast: CastModel, ranks: Any, blocks: Sequence[str]) -> ShardedModel:
    """Shard a model that `cast_model` made, in place; BadInput if it cannot be.

    blocks: names of the modules that become units. The rest of the network is another one, and so
    is each module that computes in another dtype than what is around it.
    """
    module, policy = cast.module, cast.policy
    _refuse(module)
    _refuse_blocks(module, policy, ranks)
    computed = {name: own.dtype for name, own in module.named_parameters()}
    twin = _twin(cast)
    masters = {id(own): cast.masters.get(name, own) for name, own in module.named_parameters()}
    for inside in module.modules():
        place = parameters_of(inside)
        place.update({key: masters[id(own)] for key, own in place.items() if own is not None})
    mesh = DeviceMesh.from_group(ranks.tensors, ranks.device.type)
    units: list[Unit] = []
    planned = list(_units(module, computed, blocks, policy.param_dtype))
    _refuse_shared(module, [name for name, _ in planned])
    for name, dtype in planned:
        unit, before = module.get_submodule(name), {id(p) for u in units for p in u.parameters}
        dtypes = {own.dtype for own in unit.parameters() if id(own) not in before}
        summed = {_summed_in(policy, own) for own in dtypes}
        (sum_dtype,) = summed or {torch.float32}
        mixed = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=sum_dtype, cast_forward_inputs=False
        )
        # What stands beside the blocks may be read once more, as a tied embedding is.
        freed = not name or any(f"{name}.".startswith(f"{block}.") for block in blocks)
        wrapped: Any = fully_shard(unit, mesh=mesh, mp_policy=mixed, reshard_after_forward=freed)
        units.append(Unit(name, [p for p in unit.parameters() if id(p) not in before]))
        wrapped.set_gradient_divide_factor(1.0)
        wrapped.set_force_sum_reduction_for_comms(True)
        wrapped.set_custom_reduce_scatter(units[-1])
    apart = len(units) - len(blocks) - 1
    words = [f"{len(blocks)} blocks, the rest" if blocks else "one unit"]
    words += [f"{apart} modules in another dtype"] if apart else []
    made = ShardedModel(
        module,
        policy,
        {},
        cast.buffers,
        cast.forwards,
        units=", ".join(words),
        delayed=cast.delayed,
        ranks=ranks,
        twin=twin,
        gathered=units,
    )
    with torch.no_grad():
        parameters: Any = module.named_parameters()  # DTensors
        for name, own in parameters:
            rows = own.to_local().detach()
            first, shape = _rows(own.shape, ranks.rank, ranks.world)
            assert rows.shape == shape
            begin = first * _row(shape)
            start, end = begin - begin % _ALIGNED, begin + rows.numel()
            end = min(end + -end % _ALIGNED, own.shape.numel())
            fits = not rows.numel() or end - start == rows.numel()
            part = rows if fits else rows.new_zeros(end - start)
            made.rows[name] = rows
            made.shards[name] = Shard(part, start, own.shape, computed[name])
            made.rows_of(name, part).copy_(rows)
    made.masters |= {name: made.shards[name].own for name in cast.masters}
    return made


def _refuse(module: nn.Module) -> None:
    for name, inside in module.named_modules():
        if isinstance(inside, BatchNorm):
            raise _impossible(f"{name} is BatchNorm, whose statistics no rank has a shard of")
        if isinstance(inside, nn.RNNBase):
            raise _impossible(f"{name} is a recurrent layer, with its weights in a second place")
        if getattr(inside, "sparse", False):
            raise _impossible(f"{name} has sparse gradients")
    for name, own in module.named_parameters():
        if not own.dim() or own.is_complex() or not own.is_contiguous():
            raise _impossible(f"{name} is a single number, complex, or not contiguous")


def _refuse_shared(module: nn.Module, units: Sequence[str]) -> None:
    """Refuse a parameter that two units hold: FSDP would make two of it."""
    places: dict[int, str] = {}
    for path, inside in module.named_modules():
        unit = path
        while unit not in units:
            unit = unit.rpartition(".")[0]
        for key, own in _named(inside):
            if places.setdefault(id(own), unit) != unit:
                raise _impossible(f"{path}.{key} is also a weight of another block")


def _impossible(why: str) -> BadInput:
    return BadInput(f"dist.engine=fsdp: {why} (allowed: auto, flat, ddp)")


def _units(
    module: nn.Module, computed: dict[str, torch.dtype], blocks: Sequence[str], dtype: torch.dtype
) -> Iterator[tuple[str, torch.dtype]]:
    """Yield names of the units, inner ones first, and the dtypes in which they compute: `dtype`,
    but for modules whose own weights have another."""

    def visit(name: str, inside: nn.Module, around: torch.dtype) -> Iterator[Any]:
        prefix = f"{name}." if name else ""
        own = next(
            (computed[prefix + k] for k, _ in _named(inside) if prefix + k in computed), around
        )
        for key, child in inside.named_children():
            yield from visit(prefix + key, child, own)
        if own is not around or name in ("", *blocks):
            yield name, own

    yield from visit("", module, dtype)


def _named(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(module.named_parameters(recurse=False))


def _summed_in(policy: PrecisionPolicy, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients of a parameter that is updated in `dtype` are summed."""
    if policy.reduce_dtype is not None:
        return policy.reduce_dtype
    in_fp32 = policy.master_dtype is not None or policy.rounding != "nearest"
    return policy.grad_dtype if in_fp32 or policy.state_dtype is not None else dtype


def _twin(cast: CastModel) -> CastModel:
    """Return a copy of a model whose parameters have no values, and none of their memory."""
    memo: dict[int, Any] = {
        id(own): nn.Parameter(torch.empty_like(own, device="meta"), own.requires_grad)
        for own in (*cast.module.parameters(), *cast.masters.values())
    }
    if cast.delayed is not None:  # both cast by the same scales
        memo |= {id(own): own for own in cast.delayed.layers.values()}
    module = copy.deepcopy(cast.module, memo)
    both = zip(cast.module.modules(), module.modules(), strict=True)
    places = {id(own.__dict__): other.__dict__ for own, other in both}
    forwards = [(places[id(own)], before) for own, before in cast.forwards]
    buffers = [
        (memo[id(rounded)], version_of(memo[id(rounded)]), copy.deepcopy(before, memo))
        for rounded, _, before in cast.buffers
    ]
    return CastModel(module, cast.policy, {}, buffers, forwards)
