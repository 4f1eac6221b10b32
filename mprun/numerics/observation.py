"""One training step, watched: where values that are not finite appear, and how large all were.

Every operation passes a dispatch mode, in forward and in backward; module hooks and marks on
autograd's nodes say which module it belongs to. A value that is not finite is followed from tensor
to tensor, so that what ends in the loss, in a gradient or in a weight leads back to the operation
whose inputs were finite and whose output was not. The step computes what it computes anyway.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from mprun.numerics.dispatch import (
    UNWRITTEN,
    Event,
    Largest,
    Phase,
    Watch,
    floats,
    has_values,
    in_backward,
    in_fp32,
    largest_finite_of,
    largest_of,
    name_of,
    operands,
    per_entry,
    storage_of,
)
from mprun.numerics.state import named_learners, named_modules, optimizer_state
from mprun.precision import scaled_products

_MARK = "mprun.module"
_RAMPS = 50  # events that have one of their own


Call = tuple[OpOverload, tuple, dict[str, Any]]
Output = tuple[int, int | None, Tensor]  # its place among the results, in a list, and the tensor


@dataclass(slots=True)
class _Inputs:
    """Of one group of inputs of an operation: all of it, or one entry of its lists."""

    finite: bool = True
    largest: float = 0.0
    at_zero: bool = False
    sources: set[int] = field(default_factory=set)

    def add(self, other: "_Inputs") -> None:
        self.finite &= other.finite
        self.largest = max(self.largest, other.largest)
        self.at_zero |= other.at_zero
        self.sources |= other.sources


class Observation:
    """Watches what runs inside the block on the task of a built run (`mprun.build.Built`).

    events: in order of appearance. ramp: by (phase, module), in order of execution. ramps: what it
    was when each of the first events appeared.
    """

    def __init__(self, built):
        self.built = built
        self.events: list[Event] = []
        self.ramp: dict[tuple[str, str], Largest] = {}
        self.ramps: list[list[Largest]] = []
        self.reached: dict[str, set[int]] = {}
        self._tainted: dict[int, tuple[Tensor, set[int]]] = {}
        self._paths: dict[int, str] = {}
        self._labels: dict[int, str] = {}
        self._stack: list[str] = []
        self._forwarded = self._propagated = False
        self._where = ""
        self._of_module: dict[str, set[int]] = {}
        self._cast = scaled_products.cast
        # By the storage of a cast to 8 bits: it, and what is known of what was cast.
        self._casts: dict[int, tuple[Tensor, _Inputs]] = {}
        self._watch = Watch(built.arithmetic, self._see)
        self._name(built.task)

    def __enter__(self) -> "Observation":
        self._hooks = [
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
        ]
        # A single pass shows neither casts nor unscaling, and on a GPU not even the update.
        for learner in self.built.task.learners.values():
            learner.optimizer.observed = True
        # Looked at from outside: its scales and scaled values are no values of the network.
        setattr(scaled_products, "cast", self._see_cast)  # noqa: B010 - for mypy no function
        self._watch.__enter__()
        return self

    def __exit__(self, *exception) -> None:
        self._watch.__exit__(*exception)
        scaled_products.cast = self._cast
        for learner in self.built.task.learners.values():
            learner.optimizer.observed = False
        for hook in self._hooks:
            hook.remove()

    def sources_of(self, tensors: Iterable[Tensor]) -> set[int]:
        """Orders of the events that the non-finite values in `tensors` come from."""
        found = set()
        for tensor in tensors:
            found |= self._tainted.get(storage_of(tensor), (None, set()))[1]
        return found

    @property
    def phase(self) -> str:
        """Where the step is now."""
        if in_backward():
            return Phase.BACKWARD
        if self._stack:
            return Phase.FORWARD
        if self._propagated:
            return Phase.UNSCALE if self._watch.active else Phase.UPDATE
        return Phase.LOSS if self._forwarded else Phase.INPUT

    def _name(self, task) -> None:
        for path, _, module in named_modules(task):
            self._paths[id(module)] = path
        for prefix, learner in named_learners(task):
            optimizer = learner.optimizer
            pairs = zip(optimizer.parameters, optimizer.updated, strict=True)
            for name, (own, updated) in zip(optimizer.names, pairs, strict=True):
                self._labels[own.data_ptr()] = prefix + name
                if updated is not own:
                    self._labels[updated.data_ptr()] = f"master of {prefix}{name}"
            for row in optimizer.rows:
                self._labels[row.tensor.data_ptr()] = prefix + row.name
        for name, value in optimizer_state(task).items():
            self._labels[value.data_ptr()] = name

    def _enter_module(self, module: nn.Module, inputs) -> None:
        if id(module) not in self._paths and not self._stack:
            # The copy of the model that an evaluation uses: same names.
            for name, inside in module.named_modules():
                self._paths.setdefault(id(inside), name)
        self._claim(inputs, self._stack[-1] if self._stack else "")
        self._forwarded, self._propagated = True, False
        self._stack.append(self._paths.get(id(module), type(module).__name__))

    def _leave_module(self, module: nn.Module, inputs, outputs) -> None:
        path = self._stack.pop()
        if outputs is None:  # the module raised
            return
        self._claim(outputs, path)
        self._look_at_module(module, path, inputs, outputs)

    def _claim(self, tree, path: str) -> None:
        """Mark autograd's nodes behind these tensors that no module inside has marked."""
        todo: list[Any] = [leaf.grad_fn for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
        while todo:
            node = todo.pop()
            if not _computes(node) or _MARK in _marks(node):
                continue
            _marks(node)[_MARK] = path
            if isinstance(node, BackwardCFunction):
                node.register_hook(self._look_at_node(type(node).__name__, path))
            todo.extend(before for before, _ in node.next_functions)

    def _look_at_module(self, module: nn.Module, path: str, inputs, outputs) -> None:
        """A kernel that the dispatch mode cannot look into (the emulated LSTM) shows only here."""
        if any(module.children()):
            return
        with _disable_current_modes():
            bad = [t for t in floats(outputs) if not math.isfinite(largest_of(t))]
            if not bad:
                return
            sources = self.sources_of(bad)
            given = self._inputs((*floats(inputs), *module.parameters(recurse=False)))
            passed = given.sources
            if given.finite and not any(self.events[index].seen for index in sources):
                name = type(module).__name__
                event = self._event(Phase.FORWARD, path, name, "output", bad[0], given)
                passed = {event.order}
            for tensor in bad:
                self._taint(tensor, passed)

    def _look_at_node(self, name: str, path: str):
        def look(gradients, outputs) -> None:
            with _disable_current_modes():
                bad = [t for t in floats(gradients) if not math.isfinite(largest_of(t))]
                given = self._inputs(floats(outputs))
                for tensor in floats(gradients):
                    self._note_largest(Phase.BACKWARD, path, tensor)
                if not bad:
                    return
                # What it kept from forward may not be finite either.
                sources = given.sources | self._of_module.get(path, set())
                if given.finite and not sources:
                    event = self._event(Phase.BACKWARD, path, name, "gradient", bad[0], given)
                    sources = {event.order}
                for tensor in bad:
                    self._taint(tensor, sources)

        return look

    # Operations

    def _see(self, func: OpOverload, args: tuple, kwargs: dict[str, Any], _: bool) -> Any:
        groups = None
        if func._schema.is_mutable:  # what it is given is gone afterwards
            with _disable_current_modes():
                groups = self._given(func, args, kwargs)
        result = func(*args, **kwargs)
        name = name_of(func)
        if name not in UNWRITTEN and not func.is_view:
            phase, where = self.phase, self._module_now()
            self._propagated |= phase == Phase.BACKWARD
            with _disable_current_modes():
                written: list[tuple[int | None, Tensor]] = list(enumerate(floats(result)))
                if groups is not None:
                    written = [
                        (operand.index, operand.tensor)
                        for operand in operands(func, args, kwargs)
                        if operand.written and has_values(operand.tensor)
                    ]
                for place, (index, tensor) in enumerate(written):
                    self._note_largest(phase, where, tensor)
                    if not math.isfinite(largest_of(tensor)):
                        groups = self._given(func, args, kwargs) if groups is None else groups
                        own = index if per_entry(name) else None
                        given = _Inputs()
                        for key, group in groups.items():
                            if own is None or key in (None, own):
                                given.add(group)
                        output = (place, index, tensor)
                        self._trace_back(phase, where, (func, args, kwargs), output, given)
        return result

    def _trace_back(self, phase: str, where: str, call: Call, output: Output, given) -> None:
        """Note where an output that is not finite comes from: this operation, or its inputs."""
        func, (place, index, tensor) = call[0], output
        name, sources = name_of(func), given.sources
        if given.finite:
            label = self._label(tensor, *call, index, phase)
            event = self._event(phase, where, name, label, tensor, given)
            if not func._schema.is_mutable:
                event.would_be = in_fp32(*call, place)
            sources = {event.order}
            if phase == Phase.FORWARD:
                self._of_module.setdefault(where, set()).add(event.order)
        elif not sources:
            event = self._event(phase, where, name, "output", tensor, given)
            event.seen = False
            sources = {event.order}
        self.reached.setdefault(phase, set()).update(sources)
        self._taint(tensor, sources)

    def _given(self, func, args, kwargs) -> dict[int | None, _Inputs]:
        """What an operation reads, by the place in its lists; None: what is in no list."""
        groups: dict[int | None, _Inputs] = {}
        for operand in operands(func, args, kwargs):
            if operand.read:
                given = self._input(operand.tensor, operand.singular_at_zero)
                groups.setdefault(operand.index, _Inputs()).add(given)
        return groups

    def _see_cast(self, matrix: Tensor, *args: Any, **kwargs: Any) -> scaled_products.Cast:
        with _disable_current_modes():
            found = self._cast(matrix, *args, **kwargs)
            given = self._input(matrix.detach(), False)
            self._casts[storage_of(found.values)] = found.values, given
        return found

    def _inputs(self, tensors: Iterable[Tensor]) -> _Inputs:
        total = _Inputs()
        for tensor in tensors:
            total.add(self._input(tensor.detach(), False))
        return total

    def _input(self, tensor: Tensor, singular: bool) -> _Inputs:
        known = self._casts.get(storage_of(tensor)) if tensor.itemsize == 1 else None
        if known is not None:
            return known[1]
        if not has_values(tensor):
            return _Inputs()
        largest = largest_of(tensor)
        finite = math.isfinite(largest)
        sources = set() if finite else self.sources_of([tensor])
        at_zero = singular and bool((tensor == 0).any())
        return _Inputs(finite, largest if finite else largest_finite_of(tensor), at_zero, sources)

    def _event(self, phase, module, operation, label, tensor: Tensor, given: _Inputs) -> Event:
        order, bad = len(self.events), int((~torch.isfinite(tensor)).sum())
        result = "NaN" if bool(torch.isnan(tensor).any()) else "infinity"
        place, size = (order, phase, module, operation, label), (bad, tensor.numel())
        event = Event(*place, tensor.dtype, result, *size, True, given.largest, None, given.at_zero)
        self.events.append(event)
        if len(self.ramps) < _RAMPS:
            self.ramps.append(list(self.ramp.values()))
        self.reached.setdefault(phase, set()).add(order)
        return event

    def _taint(self, tensor: Tensor, sources: set[int]) -> None:
        # Held, so that no other tensor comes to lie at the same place.
        known = self._tainted.get(storage_of(tensor), (None, set()))[1]
        self._tainted[storage_of(tensor)] = (tensor.detach(), known | sources)

    def _note_largest(self, phase: str, where: str, tensor: Tensor) -> None:
        value, known = largest_of(tensor), self.ramp.get((phase, where))
        if known is None or math.isfinite(known.value) and not value <= known.value:
            self.ramp[phase, where] = Largest(phase, where, value, tensor.dtype)

    def _module_now(self) -> str:
        if not in_backward():
            return self._stack[-1] if self._stack else ""
        node = torch._C._current_autograd_node()
        if _computes(node):
            self._where = _marks(node).get(_MARK, "loss")
        return self._where

    def _label(self, tensor, func, args, kwargs, index, phase) -> str:
        """The name of the weight or optimizer state that this is, or that it is computed with."""
        places = [tensor.data_ptr()]
        if index is not None:
            given = operands(func, args, kwargs)
            places += [o.tensor.data_ptr() for o in given if o.index == index]
        other = "gradient" if phase in (Phase.BACKWARD, Phase.UNSCALE) else "output"
        return next((self._labels[place] for place in places if place in self._labels), other)


def _computes(node: Node | None) -> bool:
    """Whether this is a node of an operation, not the end of the graph at a weight."""
    return node is not None and not hasattr(node, "variable")


def _marks(node: Node) -> dict[str, str]:
    return node.metadata  # type: ignore[return-value]  # declared as a method, and is a dictionary
