"""Trace one step: its operations as they reach the kernels, and the running modules.

A `TorchDispatchMode` sees them below autograd and autocast, so it sees what is really computed,
including casts. Autograd's own threads inherit the mode from the thread that calls backward
(at::ThreadLocalState holds the stack of modes), so it sees a backward pass on a GPU too.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from mprun.numerics.state import named_modules
from mprun.precision.flops import flops
from mprun.prepared.nodes import leaves
from mprun.torch_private import (
    DisableTorchFunction,
    OpOverload,
    TorchDispatchMode,
    autograd_node,
    graph_task,
    schema_of,
    tree_leaves,
)

LOSS = "loss"  # in place of a module
_MARK = "mprun.module"


class Phase(StrEnum):
    """The phases of a step, in order; in INPUT the batch is cast."""

    INPUT = "input"
    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"
    UNSCALE = "unscale"
    UPDATE = "update"


@dataclass(slots=True)
class Operation:
    """A call of an ATen operation; `result` is set once it has run."""

    func: OpOverload
    name: str
    args: tuple
    kwargs: dict[str, Any]
    result: Any = None

    @property
    def flops(self) -> int:
        return flops(self.name, self.func, self.args, self.kwargs, self.result)


class Collector:
    """Base of the observers of a `Trace`: each method does nothing.

    marks: backward operations get the module whose forward pass they belong to; each module's part
    of the graph is walked for it.
    """

    marks = False

    def before(self, operation: Operation) -> Any:
        """Look before the call writes to anything; `after` is given what this returns."""

    def after(self, operation: Operation, kept: Any) -> None:
        """Look at a call that has run."""

    def enter(self, module: nn.Module, inputs: tuple) -> None:
        """Look at a module before its forward pass; it is not yet among the trace's modules."""

    def leave(self, module: nn.Module, path: str, inputs: tuple, outputs: Any) -> None:
        """Look at a module after its forward pass; outputs: None where it raised."""

    def marked(self, node: Node, path: str) -> None:
        """Look at an operation of autograd's graph that has got a module."""


class Trace:
    """Show a collector each operation and module of a step of `task` inside the block.

    An emulated operation is shown as the network calls it, and not again as the emulation computes
    it. There are two modes: the context enters one below its emulations, and the other is silent
    for that time. `modules`: paths of the running modules, the outermost first. `paths`: those of
    all modules, by id.
    """

    def __init__(self, task: Any, collector: Collector):
        self.forward_context, self.collector = task.forward_context, collector
        self.modules: list[str] = []
        self.paths = {id(module): path for path, _, module in named_modules(task)}
        self._backward_of = ""
        self._forwarded = self._propagated = False
        self._inner, self._outer = _Mode(self._run), _Mode(self._run_outside)

    def __enter__(self) -> Self:
        self._hooks = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        self.forward_context.watchers.append(self._inner)
        self._outer.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._outer.__exit__(*exception)
        self.forward_context.watchers.remove(self._inner)
        for hook in self._hooks:
            hook.remove()

    @property
    def module(self) -> str:
        """Return the path of the innermost running module, "" outside of modules.

        In a backward pass it is the one whose forward pass it belongs to, or LOSS; "" without
        marks.
        """
        if not (in_backward() and self.collector.marks):
            return self.modules[-1] if self.modules else ""
        node = autograd_node()
        if _computes(node):
            self._backward_of = _marks(node).get(_MARK, LOSS)
        return self._backward_of

    @property
    def phase(self) -> Phase:
        """Return the current phase of the step."""
        if in_backward():
            return Phase.BACKWARD
        if self.modules:
            return Phase.FORWARD
        if self._propagated:
            return Phase.UNSCALE if self._inner.is_entered else Phase.UPDATE
        return Phase.LOSS if self._forwarded else Phase.INPUT

    def _run_outside(self, func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
        if self._inner.is_entered:
            return func(*args, **kwargs)
        return self._run(func, args, kwargs)

    def _run(self, func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
        operation = Operation(func, name_of(func), args, kwargs)
        self._propagated |= in_backward()
        kept = self.collector.before(operation)
        operation.result = func(*args, **kwargs)
        self.collector.after(operation, kept)
        return operation.result

    def _enter(self, module: nn.Module, inputs: tuple) -> None:
        if self._is_outside(module):
            return
        if self.collector.marks:
            self._mark(inputs, self.modules[-1] if self.modules else "")
        self.collector.enter(module, inputs)
        self._forwarded, self._propagated = True, False
        self.modules.append(self.paths.get(id(module), type(module).__name__))

    def _is_outside(self, module: nn.Module) -> bool:
        """Return whether no model contains or calls it: a criterion is a part of the loss."""
        return not self.modules and id(module) not in self.paths

    def _leave(self, module: nn.Module, inputs: tuple, outputs: Any) -> None:
        if self._is_outside(module):
            return
        path = self.modules.pop()
        if self.collector.marks:
            self._mark(outputs, path)
        self.collector.leave(module, path, inputs, outputs)

    def _mark(self, tree: Any, path: str) -> None:
        """Mark autograd's nodes behind these tensors, unless an inner module has marked them."""
        todo: list[Any] = [tensor.grad_fn for tensor in tensors_in(tree)]
        while todo:
            node = todo.pop()
            if not _computes(node) or _MARK in _marks(node):
                continue
            # At the end of a model the gradient is still that of the loss.
            where = _marks(node)[_MARK] = LOSS if leaves(node) else path
            self.collector.marked(node, where)
            todo.extend(before for before, _ in node.next_functions)


def _computes(node: Node | None) -> bool:
    """Return whether the node is an operation, not the end of the graph at a weight."""
    return node is not None and not hasattr(node, "variable")


def _marks(node: Node) -> dict[str, str]:
    return node.metadata  # type: ignore[return-value]  # declared as a method, and is a dictionary


class _Mode(TorchDispatchMode):
    """A dispatch mode that lets `run` run every operation."""

    def __init__(self, run: Callable[[OpOverload, tuple, dict[str, Any]], Any]):
        super().__init__()
        self.run, self.is_entered = run, False

    def __enter__(self) -> Self:
        self.is_entered = True
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self.is_entered = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with DisableTorchFunction():
            return self.run(func, args, kwargs or {})


# Operations that return uninitialized memory.
UNWRITTEN = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_"}
# In-place operations that do not read what they overwrite.
_OVERWRITING = {"copy_", "_foreach_copy_", "fill_", "zero_", "_foreach_zero_", "set_"}
_OVERWRITING |= {"normal_", "uniform_", "bernoulli_", "exponential_", "random_"}
# The argument that is divided by, or whose logarithm is taken.
SINGULAR_AT_ZERO = {
    **dict.fromkeys(("div", "div_", "_foreach_div", "_foreach_div_", "true_divide"), 1),
    **dict.fromkeys(("addcdiv", "addcdiv_", "_foreach_addcdiv", "_foreach_addcdiv_"), 2),
    **dict.fromkeys(("reciprocal", "_foreach_reciprocal", "rsqrt", "pow"), 0),
    **dict.fromkeys(("log", "log2", "log10"), 0),
}


@dataclass(frozen=True, slots=True)
class Operand:
    """One tensor argument.

    index: its place in the list argument, None outside lists. singular_at_zero: the operation
    divides by it, or takes its logarithm. A tensor that is only overwritten is not read.
    """

    index: int | None
    tensor: Tensor
    read: bool
    written: bool
    singular_at_zero: bool


def operands(operation: Operation) -> Iterator[Operand]:
    """Yield every tensor argument of a call, in the order of the operation's schema."""
    args, name = operation.args, operation.name
    for position, argument in enumerate(schema_of(operation.func).arguments):
        value = args[position] if position < len(args) else operation.kwargs.get(argument.name)
        written = argument.alias_info is not None and argument.alias_info.is_write
        read = not (written and (name in _OVERWRITING or argument.kwarg_only))
        singular = position == SINGULAR_AT_ZERO.get(name)
        listed = value if isinstance(value, (list, tuple)) else None
        for index, entry in enumerate([value] if listed is None else listed):
            if isinstance(entry, Tensor):
                place = None if listed is None else index
                yield Operand(place, entry, read, written, singular)


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors in nested lists, tuples and dicts."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def name_of(func: OpOverload) -> str:
    """Return the name of an ATen operation, "addmm"."""
    return schema_of(func).name.partition("::")[2]


def in_backward() -> bool:
    """Return whether autograd is running a backward pass."""
    return graph_task() != -1


def storage_of(tensor: Tensor) -> int:
    """Return an address that differs between tensors in different memory; views share it."""
    return tensor.untyped_storage().data_ptr()
