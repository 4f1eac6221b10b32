"""Watch one training step: where non-finite values appear, and how large all values were.

Every operation passes a dispatch mode, in forward and in backward; module hooks and marks on
autograd's nodes tell its module. A non-finite value is followed from tensor to tensor. So one that
ends in the loss, in a gradient or in a weight leads back to the operation whose inputs were finite
and whose output was not. The step computes the same as without.
"""

import math
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from mprun.numerics.state import buffers, named_learners, optimizer_state
from mprun.numerics.trace import (
    UNWRITTEN,
    Collector,
    Operation,
    Phase,
    Trace,
    operands,
    storage_of,
    tensors_in,
)
from mprun.precision import scaled_products
from mprun.precision.policy import dtype_name
from mprun.precision.scaled_products import Cast
from mprun.torch_private import (
    disable_dispatch_modes,
    schema_of,
    sparse_values,
    tree_map,
)

INPUTS = "the inputs"  # of a model, in place of a tensor's name
_RAMPS = 50  # most events with a separate ramp
# In these operations, entry i of each list depends on entry i of the others alone.
_PER_ENTRY = ("_foreach_", "_fused_", "_amp_foreach_")
# Operations that write a number of the code's own.
_FILLS = {"masked_fill", "masked_fill_", "fill_", "full", "full_like", "new_full", "where"}
_FILLS |= {"scalar_tensor", "lift_fresh"}
_SOFTMAX = {"_softmax", "_log_softmax", "_safe_softmax"}
Output = tuple[int, int | None, Tensor]  # place among the results, place in a list, tensor


@dataclass(slots=True)
class Event:
    """The appearance of a non-finite value (`seen`), or such a value of unknown origin.

    module: path, "" for the model itself. operation: name of the ATen operation, or of an opaque
    kernel. tensor: "output", "gradient", `INPUTS`, or a weight's name. dtype: of the result.
    result: "infinity" or "NaN". count, of: number of its non-finite values, and of all.
    largest_input: largest finite absolute value read. would_be: largest value of the same operation
    on the same inputs in FP32, if it can be run. at_zero: the operation divides by, or takes the
    logarithm of, a tensor that holds a zero. is_set: the code itself sets this infinity, as a mask
    does; no operation overflowed. of_set: NaN from such infinities alone. empty: rows of softmax's
    input in which a mask left nothing. loss_scale: of the step.
    """

    order: int
    phase: str
    module: str
    operation: str
    tensor: str
    dtype: torch.dtype
    result: str
    count: int
    of: int
    seen: bool
    largest_input: float = 0.0
    would_be: float | None = None
    at_zero: bool = False
    is_set: bool = False
    of_set: bool = False
    empty: int = 0
    loss_scale: float = 1.0


class Largest(NamedTuple):
    """The largest absolute value that a module computed in one phase, and its dtype ("fp16")."""

    phase: str
    module: str
    value: float
    dtype: str


class _Inputs(NamedTuple):
    """The known facts on one tensor that is read, or on several."""

    finite: bool = True
    largest: float = 0.0
    at_zero: bool = False
    sources: Set[int] = frozenset()
    nan: bool = False


def _total(parts: Iterable[_Inputs]) -> _Inputs:
    parts = list(parts)
    return _Inputs(
        all(part.finite for part in parts),
        max((part.largest for part in parts), default=0.0),
        any(part.at_zero for part in parts),
        set().union(*(part.sources for part in parts)),
        any(part.nan for part in parts),
    )


_Given = tuple[int | None, _Inputs]
_Place = tuple[str, str, str, str]  # phase, module, operation, tensor of an event


class Observation(Collector):
    """Watch operations inside the block on the task of a built run (`mprun.assembly.Built`).

    ramp: by (phase, module), in order of execution. ramps: the ramp at each of the first events.
    """

    marks = True

    def __init__(self, built):
        self.built = built
        self.events: list[Event] = []
        self.ramp: dict[tuple[str, str], Largest] = {}
        self.ramps: list[list[Largest]] = []
        self.reached: dict[str, set[int]] = {}
        self._tainted: dict[int, tuple[Tensor, Set[int]]] = {}
        self._labels: dict[int, str] = {}
        self._inputs: list[Tensor] = []  # of the models
        self._of_module: dict[str, set[int]] = {}
        # Storage of a cast to 8 bits -> the cast tensor, and the facts on its source.
        self._casts: dict[int, tuple[Tensor, _Inputs]] = {}
        self._trace = Trace(built.task, self)
        self._name(built.task)

    def __enter__(self) -> "Observation":
        # Observed from outside: its scales and scaled values are not values of the network.
        scaled_products.observer = self._see_cast
        self._trace.__enter__()
        return self

    def __exit__(self, *exception) -> None:
        self._trace.__exit__(*exception)
        scaled_products.observer = None

    def sources_of(self, tensors: Iterable[Tensor]) -> set[int]:
        """Return the orders of the events behind the non-finite values in `tensors`."""
        places = map(storage_of, tensors)
        return set().union(*(self._tainted[place][1] for place in places if place in self._tainted))

    def _name(self, task) -> None:
        for prefix, learner in named_learners(task):
            for name, own in learner.steps.named().items():
                self._labels[own.data_ptr()] = prefix + name
        for name, value in optimizer_state(task).items():
            self._labels[value.data_ptr()] = name
        for name, own in buffers(task).items():  # a mask may be one
            if has_values(own) and largest_of(own) == math.inf:
                event = self._event((Phase.INPUT, "", "buffer", name), own, _Inputs())
                event.is_set = True
                self._taint(own, {event.order})

    def enter(self, module: nn.Module, inputs: tuple) -> None:
        if not self._trace.modules:
            for own in floats(inputs):
                self._inputs.append(own)  # so that no other tensor takes its address
                self._labels[own.data_ptr()] = INPUTS

    def leave(self, module: nn.Module, path: str, inputs: tuple, outputs: Any) -> None:
        if outputs is None:
            return
        if any(module.children()):
            return
        with disable_dispatch_modes():  # the emulated LSTM, for one, shows only here
            made, read = floats(outputs), (*floats(inputs), *module.parameters(recurse=False))
            known = {order for order in self.sources_of(made) if self.events[order].seen}
            place = (Phase.FORWARD, path, type(module).__name__, "output")
            self._look_at_kernel(place, made, read, known)

    def marked(self, node: Node, path: str) -> None:
        if isinstance(node, BackwardCFunction):
            node.register_hook(partial(self._look_at_node, type(node).__name__, path))

    def _look_at_node(self, name: str, path: str, gradients: tuple, outputs: tuple) -> None:
        with disable_dispatch_modes():
            made = floats(gradients)
            for tensor in made:
                self._note_largest(Phase.BACKWARD, path, tensor)
            # Tensors saved in forward may not be finite either.
            known = self._of_module.get(path, set())
            place = (Phase.BACKWARD, path, name, "gradient")
            self._look_at_kernel(place, made, floats(outputs), known)

    def _look_at_kernel(
        self, place: _Place, made: list[Tensor], read: Iterable[Tensor], known: set[int]
    ) -> None:
        """Look at the results of a kernel whose inside is not shown; `known`: events inside."""
        bad = [tensor for tensor in made if not math.isfinite(largest_of(tensor))]
        if not bad:
            return
        given = _total(self._input(tensor.detach()) for tensor in read)
        sources = given.sources | known
        if given.finite and not sources:
            sources = {self._event(place, bad[0], given).order}
        for tensor in bad:
            self._taint(tensor, sources)

    def before(self, operation: Operation) -> list[_Given] | None:
        if not schema_of(operation.func).is_mutable:
            return None
        with disable_dispatch_modes():  # the call overwrites its inputs
            return self._given(operation)

    def after(self, operation: Operation, kept: list[_Given] | None) -> None:
        name = operation.name
        if name in UNWRITTEN or operation.func.is_view:
            return
        phase, where = self._trace.phase, self._trace.module
        with disable_dispatch_modes():
            written: list[tuple[int | None, Tensor]] = list(enumerate(floats(operation.result)))
            if kept is not None:
                written = [
                    (operand.index, values_of(operand.tensor))
                    for operand in operands(operation)
                    if operand.written and has_values(operand.tensor)
                ]
            for place, (index, tensor) in enumerate(written):
                if math.isfinite(largest_of(tensor)):
                    self._note_largest(phase, where, tensor)
                    continue
                kept = self._given(operation) if kept is None else kept
                own = index if name.startswith(_PER_ENTRY) else None
                given = _total(one for at, one in kept if own is None or at in (None, own))
                if not self._is_set(name, tensor, given):
                    self._note_largest(phase, where, tensor)
                self._trace_back(phase, where, operation, (place, index, tensor), given)

    def _is_set(self, name: str, tensor: Tensor, given: _Inputs) -> bool:
        """Return whether all infinities of a result are numbers that the code itself sets."""
        if bool(torch.isnan(tensor).any()):
            return False
        return name in _FILLS if given.finite else self._are_set(given)

    def _are_set(self, given: _Inputs) -> bool:
        of_code = (self.events[order].is_set for order in given.sources)
        return bool(given.sources) and not given.nan and all(of_code)

    def _trace_back(
        self, phase: str, where: str, operation: Operation, output: Output, given: _Inputs
    ) -> None:
        """Record where a non-finite output comes from: this operation, or its inputs."""
        (place, index, tensor), sources = output, given.sources
        if given.finite:
            label = self._label(tensor, operation, index, phase)
            event = self._event((phase, where, operation.name, label), tensor, given)
            event.is_set = self._is_set(operation.name, tensor, given)
            if not (event.is_set or schema_of(operation.func).is_mutable):
                event.would_be = in_fp32(operation, place)
            sources = {event.order}
            if phase == Phase.FORWARD:
                self._of_module.setdefault(where, set()).add(event.order)
        elif self._are_set(given) and bool(torch.isnan(tensor).any()):
            label = self._label(tensor, operation, index, phase)
            event = self._event((phase, where, operation.name, label), tensor, given)
            event.of_set, event.empty = True, _empty_rows(operation)
            sources = {event.order}
        elif not sources:
            event = self._event((phase, where, operation.name, "output"), tensor, given)
            event.seen = False
            sources = {event.order}
        self.reached.setdefault(phase, set()).update(sources)
        self._taint(tensor, sources)

    def _given(self, operation: Operation) -> list[_Given]:
        """Return the tensors that a call reads, each with its index in the list argument."""
        read = (operand for operand in operands(operation) if operand.read)
        return [(one.index, self._input(one.tensor, one.singular_at_zero)) for one in read]

    def _see_cast(self, matrix: Tensor, take: Callable[[], Cast]) -> Cast:
        with disable_dispatch_modes():
            found = take()
            given = self._input(matrix.detach())
            for own in (found.values, found.turned):
                if own is not None:
                    self._casts[storage_of(own)] = own, given
        return found

    def _input(self, tensor: Tensor, singular: bool = False) -> _Inputs:
        tensor = values_of(tensor)
        known = self._casts.get(storage_of(tensor)) if tensor.itemsize == 1 else None
        if known is not None:
            return known[1]
        if not has_values(tensor):
            return _Inputs()
        largest, at_zero = largest_of(tensor), singular and bool((tensor == 0).any())
        if math.isfinite(largest):
            return _Inputs(True, largest, at_zero)
        nan = math.isnan(largest)
        largest = largest_of(torch.where(torch.isfinite(tensor), tensor, 0))
        return _Inputs(False, largest, at_zero, self.sources_of([tensor]), nan)

    def _event(self, place: _Place, tensor: Tensor, given: _Inputs) -> Event:
        order, bad = len(self.events), int((~torch.isfinite(tensor)).sum())
        result = "NaN" if bool(torch.isnan(tensor).any()) else "infinity"
        found = (tensor.dtype, result, bad, tensor.numel())
        event = Event(order, *place, *found, True, given.largest, None, given.at_zero)
        self.events.append(event)
        if len(self.ramps) < _RAMPS:
            self.ramps.append(list(self.ramp.values()))
        self.reached.setdefault(event.phase, set()).add(order)
        return event

    def _taint(self, tensor: Tensor, sources: Set[int]) -> None:
        # The tensor is kept, so that no other one takes the same address.
        found = sources | self.sources_of([tensor])
        self._tainted[storage_of(tensor)] = (tensor.detach(), found)

    def _note_largest(self, phase: str, where: str, tensor: Tensor) -> None:
        value, known = largest_of(tensor), self.ramp.get((phase, where))
        if known is None or math.isfinite(known.value) and not value <= known.value:
            self.ramp[phase, where] = Largest(phase, where, value, dtype_name(tensor.dtype))

    def _label(self, tensor: Tensor, operation: Operation, index: int | None, phase: str) -> str:
        """Return the name of the weight, state or input that this is, or is computed with."""
        places = [tensor.data_ptr()]
        for one in operands(operation):
            if operation.name == "_to_copy" or (index is not None and one.index == index):
                places.append(values_of(one.tensor).data_ptr())
        other = "gradient" if phase in (Phase.BACKWARD, Phase.UNSCALE) else "output"
        return next((self._labels[place] for place in places if place in self._labels), other)


def floats(tree) -> list[Tensor]:
    """Return the floating-point tensors in nested lists, tuples and dicts, detached."""
    return [values_of(tensor.detach()) for tensor in tensors_in(tree) if has_values(tensor)]


def values_of(tensor: Tensor) -> Tensor:
    """Return the numbers that a tensor holds: those of its rows if it is a sparse gradient."""
    return sparse_values(tensor) if tensor.is_sparse else tensor


def has_values(tensor: Tensor) -> bool:
    """Return whether the tensor has numbers that can overflow; none on "meta" has."""
    # 8-bit values were scaled to fit, and mean something only with their factor.
    usual = tensor.is_floating_point() and tensor.itemsize > 1
    return usual and not tensor.is_meta and values_of(tensor).numel() > 0


def largest_of(tensor: Tensor) -> float:
    """Return the largest absolute value, NaN if there is one."""
    return float(values_of(tensor).abs().amax())


def _empty_rows(operation: Operation) -> int:
    """Return in how many rows every input of a softmax is -inf."""
    if operation.name not in _SOFTMAX:
        return 0
    given, dim = operation.args[:2]
    return int((given == -math.inf).all(dim).sum())


def in_fp32(operation: Operation, place: int) -> float | None:
    """Return the largest absolute value of the same call on the same inputs in FP32."""

    def widened(value):
        if isinstance(value, Tensor) and value.is_floating_point():
            return value if value.itemsize == 1 else value.float()
        half = value is torch.float16 or value is torch.bfloat16
        return torch.float32 if half else value

    if torch.Tag.nondeterministic_seeded in operation.func.tags:
        return None  # would draw the step's random numbers a second time
    try:
        wide_args, wide_kwargs = tree_map(widened, (operation.args, operation.kwargs))
        found = floats(operation.func(*wide_args, **wide_kwargs))
    except (RuntimeError, NotImplementedError, TypeError):
        return None  # kernels that demand a 16-bit argument
    return largest_of(found[place]) if place < len(found) else None
