"""The single pass on CUDA: tables of addresses for the Triton kernels, and their launches.

Nothing here waits for the device. A CUDA graph captures the addresses of the gradients, so the
pinned memory that they were copied from lives as long as this object.
"""

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from mprun.precision.single_pass_kernels import COLUMNS, check_kernel, update_kernel
from mprun.precision.update import Checked, Gradients, Ready, SinglePass, Weight, in_order_of
from mprun.torch_private import foreach_add_

# Spare tables of pinned memory, which must not be allocated during a capture: enough for the graphs
# that are captured one after the other without a plain step between them.
_SPARES = 4


def is_capturing(device: torch.device) -> bool:
    """Return whether launches now go into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class AddressTable:
    """An int64 [numel] on `device`, rewritten only if the addresses differ from those before.

    Gradients of an eager step mostly lie where those of the step before lay. A graph captures a
    copy from separate pinned memory into a separate table, and both are kept here while the graph
    may be replayed: eager steps would change a shared table behind the graph's back.
    """

    def __init__(self, numel: int, device: torch.device):
        self.device = device
        self._known: list[int] | None = None
        self._table = torch.empty(numel, dtype=torch.int64, device=device)
        spares = _SPARES if device.type == "cuda" and not is_capturing(device) else 0
        self._spares = [self._pinned() for _ in range(spares)]
        self._captured: list[tuple[Tensor, Tensor]] = []

    def put(self, addresses: list[int]) -> Tensor:
        """Return the table with these addresses, in the order of the current stream."""
        if is_capturing(self.device):
            pinned = self._spares.pop() if self._spares else self._pinned()
            pinned.copy_(torch.tensor(addresses, dtype=torch.int64))
            table = torch.empty_like(self._table)
            table.copy_(pinned, non_blocking=True)
            self._captured.append((pinned, table))
            return table
        if addresses != self._known:
            source = torch.tensor(addresses, dtype=torch.int64)
            source = source.pin_memory() if self.device.type == "cuda" else source
            self._table.copy_(source, non_blocking=True)
            self._known = addresses
        return self._table

    def _pinned(self) -> Tensor:
        return torch.empty(self._table.numel(), dtype=torch.int64, pin_memory=True)


# Values and warps of a program: 8 values a thread, which are 16 bytes of a 16-bit gradient.
BLOCK, WARPS = 2048, 8
_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
_LAUNCH = {"num_warps": WARPS, "enable_fp_fusion": False}


class _Kind(NamedTuple):
    """The common properties of the tensors of one launch."""

    group: int  # number of the optimizer's group
    gradient_dtype: torch.dtype
    copy_dtype: torch.dtype | None
    clipped: bool
    narrow: str  # how a BF16 weight without a master is stored; "no": there is none
    aligned: bool


@dataclass(slots=True)
class _Launch:
    """The tensors that one launch serves, all of one kind."""

    kind: _Kind
    chunks: Tensor  # int32 [programs, 2] on the device
    squares: Tensor  # gets its blocks' sums of squares
    largest: Tensor  # gets its blocks' largest values
    logarithms: Tensor | None  # of Adam's betas, see `single_pass_kernels.update_kernel`


@dataclass(slots=True)
class _Plan:
    """All launches of a step whose gradients have certain dtypes and alignments."""

    indices: list[int]  # of the parameters, by row of the tables
    tensors: Tensor
    gradients: AddressTable
    launches: list[_Launch]
    squares: Tensor  # of all launches, 0 where no block writes; likewise the largest
    largest: Tensor
    steps: list[Tensor]  # step counters of the updated tensors


# Each gradient's dtype, and whether its address is a multiple of 16; None without a gradient.
_Kinds = tuple[tuple[torch.dtype, bool] | None, ...]
# With the table of addresses, and the gradients in memory order, which have to stay alive.
_Prepared = tuple[_Plan, Tensor, Gradients]


class KernelUpdate(SinglePass):
    """The single pass on CUDA.

    On a CPU it only runs under Triton's interpreter (TRITON_INTERPRET=1), which is for tests.
    """

    def __init__(self, *of_optimizer: Any):
        super().__init__(*of_optimizer)
        self.device = self.updated[0].device
        self._one = torch.ones((), device=self.device)
        self._zero = torch.zeros((), device=self.device)
        self._addresses: list[int] = []
        self._plans: dict[tuple, _Plan] = {}
        self._rates: dict[int, tuple[float, Tensor]] = {}
        self._held: list[Tensor | _Plan] = []  # read by a captured graph
        self._checked: tuple[Ready, _Prepared] | None = None

    @torch.no_grad()
    def read(self, ready: Ready, *, norm: bool, grad_max: bool) -> Checked:
        prepared = self._prepare(ready.gradients)
        plan, table, _ = prepared
        self._checked = ready, prepared
        checks = ready.found_inf is not None
        with self._on_device():
            for launch in plan.launches:
                counts = norm and launch.kind.clipped
                if not (checks or counts or grad_max):
                    continue
                check_kernel[(len(launch.chunks),)](
                    table,
                    plan.tensors,
                    launch.chunks,
                    self._one if ready.inverse is None else ready.inverse,
                    self._zero if ready.found_inf is None else ready.found_inf,
                    launch.squares,
                    launch.largest,
                    _TYPES[launch.kind.gradient_dtype],
                    checks,
                    counts,
                    grad_max,
                    launch.kind.aligned,
                    BLOCK,
                    **_LAUNCH,
                )
        # In float64: there may be a million blocks.
        norms = plan.squares.sum(dtype=torch.float64).sqrt().float().reshape(1) if norm else None
        return Checked(norms, plan.largest.max() if grad_max else None)

    @torch.no_grad()
    def write(self, ready: Ready, clip: Tensor | None) -> None:
        checked, self._checked = self._checked, None
        known = checked[1] if checked is not None and checked[0] is ready else None
        plan, table, _ordered = known or self._prepare(ready.gradients)
        self._count_step(plan.steps, ready.found_inf)
        with self._on_device():
            for launch in plan.launches:
                kind, group = launch.kind, self.inner.param_groups[launch.kind.group]
                clips = clip is not None and kind.clipped
                beta1, beta2 = group.get("betas", (0.0, 0.0))
                update_kernel[(len(launch.chunks),)](
                    table,
                    plan.tensors,
                    launch.chunks,
                    self._rate(group),
                    self._one if ready.inverse is None else ready.inverse,
                    clip if clips else self._one,
                    self._zero if ready.found_inf is None else ready.found_inf,
                    self._zero if launch.logarithms is None else launch.logarithms,
                    self._zero if self.narrow is None else self.narrow.streams,
                    self._zero if self.narrow is None else self.narrow.updates,
                    float(group["weight_decay"]),
                    float(group.get("momentum", 0.0)),
                    1.0 - beta1,
                    float(beta2),
                    1.0 - beta2,
                    float(group.get("eps", 0.0)),
                    RULE=self.rule,
                    GRADIENT=_TYPES[kind.gradient_dtype],
                    COPY=_TYPES[kind.copy_dtype or torch.float32],
                    HAS_COPY=kind.copy_dtype is not None,
                    UNSCALE=ready.inverse is not None,
                    CLIP=clips,
                    DECAYS=group["weight_decay"] != 0,
                    MOMENTUM=group.get("momentum", 0.0) != 0,
                    NESTEROV=bool(group.get("nesterov")),
                    NARROW=kind.narrow,
                    ALIGNED=kind.aligned,
                    BLOCK=BLOCK,
                    **_LAUNCH,
                )
        if self.narrow is not None:
            self.narrow.count(ready.found_inf)

    def _count_step(self, steps: list[Tensor], found_inf: Tensor | None) -> None:
        if not steps:
            return
        # Adagrad's counter may be on the host; nothing reads it, so a skip leaves it counted.
        if found_inf is None or steps[0].device != found_inf.device:
            foreach_add_(steps, 1)
        else:
            # A list: one tensor for all of them would be read on the host, as a number.
            foreach_add_(steps, [1 - found_inf] * len(steps))

    def _rate(self, group: dict) -> Tensor:
        """Return the learning rate on the device, float32, 0-dim."""
        lr = group["lr"]
        if isinstance(lr, Tensor) and lr.device == self.device:
            return lr if lr.dtype is torch.float32 else lr.float()
        lr = float(lr)  # a number, or a tensor on the host
        if is_capturing(self.device):
            # A captured fill of the tensor below would undo later changes at every replay.
            held = torch.full((), lr, device=self.device)
            self._held.append(held)
            return held
        known, rate = self._rates.get(id(group)) or (None, torch.empty((), device=self.device))
        if known != lr:
            self._rates[id(group)] = lr, rate.fill_(lr)
        return rate

    def _prepare(self, gradients: Gradients) -> _Prepared:
        pairs = zip(gradients, self.updated, strict=True)
        ordered = [None if g is None else in_order_of(master, g) for g, master in pairs]
        addresses = [0 if gradient is None else gradient.data_ptr() for gradient in ordered]
        own = [parameter.data_ptr() for parameter in self.parameters]
        if own != self._addresses:
            self._addresses, self._plans = own, {}
        kinds = tuple(
            None if gradient is None else (gradient.dtype, address % 16 == 0)
            for gradient, address in zip(ordered, addresses, strict=True)
        )
        plan = self._plans.get(kinds) or self._plan(kinds)
        if is_capturing(self.device):
            self._held.append(plan)  # only replays fill the tables of a plan built here
        else:
            self._plans[kinds] = plan
        return plan, plan.gradients.put([addresses[index] for index in plan.indices]), ordered

    def _plan(self, kinds: _Kinds) -> _Plan:
        indices: list[int] = []
        rows: list[list[int]] = []
        steps: list[Tensor] = []
        places: dict[_Kind, list[list[int]]] = {}
        for weight in self.weights([kind is not None for kind in kinds]):
            if not weight.master.numel():
                continue
            if weight.step is not None:
                steps.append(weight.step)
            row, blocks = self._row(weight), range(-(-weight.master.numel() // BLOCK))
            chunks = places.setdefault(self._kind(weight, row, kinds), [])
            chunks.extend([len(rows), block] for block in blocks)
            rows.append(row)
            indices.append(weight.index)
        # Four floats: each launch writes to an address that is a multiple of 16.
        sizes = [-(-len(chunks) // 4) * 4 for chunks in places.values()]
        # One value more: the largest of no gradients is 0.
        squares, largest = (torch.zeros(sum(sizes) + 1, device=self.device) for _ in range(2))
        parts = zip(squares.split([*sizes, 1]), largest.split([*sizes, 1]), strict=True)
        launches = []
        for (kind, chunks), (of_squares, of_largest) in zip(places.items(), parts, strict=False):
            betas = self.inner.param_groups[kind.group].get("betas", ())
            # The smallest number for a beta of 0, whose powers are 0 as well.
            values = [math.log(beta or 5e-324) for beta in betas]
            logarithms = self._to_device(values, torch.float64) if values else None
            on_device = self._to_device(chunks, torch.int32)
            launches.append(_Launch(kind, on_device, of_squares, of_largest, logarithms))
        tensors = self._to_device(rows, torch.int64)
        table = AddressTable(len(rows), self.device)
        return _Plan(indices, tensors, table, launches, squares, largest, steps)

    def _kind(self, weight: Weight, row: list[int], kinds: _Kinds) -> _Kind:
        dtype, aligned = kinds[weight.index] or (torch.float32, False)
        return _Kind(
            weight.group,
            dtype,
            weight.own.dtype if weight.has_copy else None,
            self.is_clipped[weight.index],
            "no" if self.narrow is None or weight.narrow is None else self.narrow.rounding,
            aligned and not any(value % 16 for value in row[:5]),
        )

    def _to_device(self, values: list, dtype: torch.dtype) -> Tensor:
        """Copy without waiting; torch's CachingHostAllocator keeps the pinned source for the copy.
        During a capture both are kept here."""
        source = torch.tensor(values, dtype=dtype)
        if self.device.type != "cuda":
            return source
        source = source.pin_memory()
        tensor = source.to(self.device, non_blocking=True)
        if is_capturing(self.device):
            self._held += [source, tensor]
        return tensor

    def _on_device(self):
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def _row(self, weight: Weight) -> list[int]:
        """Return a row of the table of tensors, see `single_pass_kernels`; 0: no such tensor."""
        states = [tensor.data_ptr() for tensor in weight.state] + [0, 0]
        step, beside = weight.step, weight.own if weight.has_copy else weight.kept
        row = [
            weight.master.numel(),
            weight.master.data_ptr(),
            *states[:2],
            0 if beside is None else beside.data_ptr(),
            0 if step is None or step.device != weight.master.device else step.data_ptr(),
            weight.narrow or 0,
        ]
        assert len(row) == COLUMNS.value
        return row
