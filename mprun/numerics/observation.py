"""One training step, watched: where values that are not finite appear, and how large all were.

Every operation passes a dispatch mode, in forward and in backward; module hooks and marks on
autograd's nodes say which module it belongs to. A value that is not finite is followed from tensor
to tensor, so that what ends in the loss, in a gradient or in a weight leads back to the operation
whose inputs were finite and whose output was not. The step computes what it computes anyway.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.autograd.function import BackwardCFunction
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

# Where a step is: the batch is cast, modules run, the loss is computed, its gradients propagated,
# gradients are unscaled, weights updated.
INPUT, FORWARD, LOSS, BACKWARD, UNSCALE, UPDATE = (
    "input",
    "forward",
    "loss",
    "backward",
    "unscale",
    "update",
)
# Their results are memory that nobody has written yet.
_UNWRITTEN = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_"}
# In-place operations that do not read what they overwrite.
_OVERWRITING = {"copy_", "_foreach_copy_", "fill_", "zero_", "_foreach_zero_", "normal_"} | {
    "uniform_",
    "bernoulli_",
    "random_",
    "set_",
}
# Argument that is divided by, or whose logarithm is taken.
_SINGULAR_AT_ZERO = {
    "div": 1,
    "div_": 1,
    "_foreach_div": 1,
    "_foreach_div_": 1,
    "true_divide": 1,
    "addcdiv": 2,
    "addcdiv_": 2,
    "_foreach_addcdiv": 2,
    "_foreach_addcdiv_": 2,
    "reciprocal": 0,
    "_foreach_reciprocal": 0,
    "rsqrt": 0,
    "pow": 0,
    "log": 0,
    "log2": 0,
    "log10": 0,
}
_MARK = "mprun.module"


@dataclass(slots=True)
class Event:
    """A value that is not finite appeared (`seen`), or was met without its origin.

    order: of appearance. phase: one of this module's. module: path, "" for the model itself.
    operation: name of the ATen operation, or what stands for a kernel that cannot be looked into.
    tensor: what of it, "output", or a weight's name. dtype: of the result. result: "infinity" or
    "NaN". count, of: how many of its values. largest_input: largest finite absolute value read.
    would_be: largest value of the same operation on the same inputs in FP32, where it can be run.
    at_zero: the operation divides by, or takes the logarithm of, a tensor that holds a zero.
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


@dataclass(slots=True)
class Largest:
    """The largest absolute value that a module computed in one phase, and in which dtype."""

    phase: str
    module: str
    value: float
    dtype: torch.dtype


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

    events: in order of appearance. ramp: by (phase, module), in order of execution.
    """

    def __init__(self, built):
        self.built = built
        self.events: list[Event] = []
        self.ramp: dict[tuple[str, str], Largest] = {}
        self.reached: dict[str, set[int]] = {}
        self._tainted: dict[int, tuple[Tensor, set[int]]] = {}
        self._paths: dict[int, str] = {}
        self._labels: dict[int, str] = {}
        self._stack: list[str] = []
        self._forwarded = self._propagated = False
        self._where = ""
        self._of_module: dict[str, set[int]] = {}
        self._inner, self._outer = _Watch(self, inner=True), _Watch(self, inner=False)
        several = len(built.task.learners) > 1
        for learner_name, learner in built.task.learners.items():
            self._name(learner, f"{learner_name}." if several else "", learner_name)

    def __enter__(self) -> "Observation":
        arithmetic = self.built.arithmetic
        # Entered last, the watch sees an operation before the emulation takes it apart.
        arithmetic.emulations = (*arithmetic.emulations, self._inner)
        self._hooks = [
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
        ]
        self._outer.__enter__()
        return self

    def __exit__(self, *exception) -> None:
        self._outer.__exit__(*exception)
        for hook in self._hooks:
            hook.remove()
        self.built.arithmetic.emulations = self.built.arithmetic.emulations[:-1]

    def sources_of(self, tensors: Iterable[Tensor]) -> set[int]:
        """Orders of the events that the non-finite values in `tensors` come from."""
        found = set()
        for tensor in tensors:
            found |= self._tainted.get(_place(tensor), (None, set()))[1]
        return found

    @property
    def phase(self) -> str:
        """Where the step is now."""
        if torch._C._current_graph_task_id() != -1:
            return BACKWARD
        if self._stack:
            return FORWARD
        if self._propagated:
            return UNSCALE if self._inner.active else UPDATE
        return LOSS if self._forwarded else INPUT

    def _name(self, learner, prefix: str, learner_name: str) -> None:
        for name, module in learner.model.named_modules():
            self._paths[id(module)] = prefix + name if name else prefix.rstrip(".")
        optimizer = learner.optimizer
        for name, own, updated in zip(
            optimizer.names, optimizer.parameters, optimizer.updated, strict=True
        ):
            self._labels[own.data_ptr()] = prefix + name
            if updated is not own:
                self._labels[updated.data_ptr()] = f"master of {prefix}{name}"
            for key, value in optimizer.inner.state[updated].items():
                if isinstance(value, Tensor) and value.dim():
                    self._labels[value.data_ptr()] = f"{key} of {prefix}{name}"

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
        todo = [leaf.grad_fn for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
        while todo:
            node = todo.pop()
            if node is None or hasattr(node, "variable") or _MARK in node.metadata:
                continue
            node.metadata[_MARK] = path
            if isinstance(node, BackwardCFunction):
                node.register_hook(self._look_at_node(node.name(), path))
            todo.extend(before for before, _ in node.next_functions)

    def _look_at_module(self, module: nn.Module, path: str, inputs, outputs) -> None:
        """A kernel that the dispatch mode cannot look into (the emulated LSTM) shows only here."""
        if any(module.children()):
            return
        with _disable_current_modes():
            bad = [t for t in _floats(outputs) if not math.isfinite(_largest(t))]
            if not bad:
                return
            sources = self.sources_of(bad)
            given = _Inputs()
            for tensor in (*_floats(inputs), *module.parameters(recurse=False)):
                given.add(self._input(tensor.detach(), False))
            passed = given.sources
            if given.finite and not any(self.events[index].seen for index in sources):
                event = self._event(FORWARD, path, type(module).__name__, "output", bad[0], given)
                passed = {event.order}
            for tensor in bad:
                self._taint(tensor, passed)

    def _look_at_node(self, name: str, path: str):
        def look(gradients, outputs) -> None:
            with _disable_current_modes():
                bad = [t for t in _floats(gradients) if not math.isfinite(_largest(t))]
                given = _Inputs()
                for tensor in _floats(outputs):
                    given.add(self._input(tensor, False))
                for tensor in _floats(gradients):
                    self._note_largest(BACKWARD, path, tensor)
                if not bad:
                    return
                # What it kept from forward may not be finite either.
                sources = given.sources | self._of_module.get(path, set())
                if given.finite and not sources:
                    event = self._event(BACKWARD, path, name, "gradient", bad[0], given)
                    sources = {event.order}
                for tensor in bad:
                    self._taint(tensor, sources)

        return look

    # Operations

    def before(self, func: OpOverload, args, kwargs) -> "list[tuple] | None":
        """What an operation that writes in place was given; None for one that does not."""
        if not func._schema.is_mutable:
            return None
        groups: dict[int | None, _Inputs] = {}
        with _disable_current_modes():
            for index, tensor, is_input, singular, _ in _tensors(func, args, kwargs):
                if is_input:
                    given = self._input(tensor, singular)
                    groups.setdefault(index, _Inputs()).add(given)
        return groups

    def after(self, func: OpOverload, args, kwargs, result, groups) -> None:
        """Look at what an operation has computed."""
        name = func._schema.name.removeprefix("aten::")
        if name in _UNWRITTEN or _is_view(func):
            return
        phase, where = self.phase, self._module_now()
        self._propagated |= phase == BACKWARD
        with _disable_current_modes():
            if groups is None:
                outputs = list(enumerate(_floats(result)))
            else:
                outputs = [
                    (index, tensor)
                    for index, tensor, _, _, written in _tensors(func, args, kwargs)
                    if written and _has_values(tensor)
                ]
            for place, (index, tensor) in enumerate(outputs):
                self._note_largest(phase, where, tensor)
                if math.isfinite(_largest(tensor)):
                    continue
                if groups is None:
                    groups = self._given(func, args, kwargs)
                given = self._group(groups, index if _per_entry(name) else None)
                if not given.finite:
                    self._pass_on(phase, where, name, tensor, given, place)
                    continue
                label = self._label(tensor, func, args, kwargs, index, place, phase)
                event = self._event(phase, where, name, label, tensor, given)
                if not func._schema.is_mutable:
                    event.would_be = _in_fp32(func, args, kwargs, place)
                self._taint(tensor, {event.order})
                if phase == FORWARD:
                    self._of_module.setdefault(where, set()).add(event.order)

    def _given(self, func, args, kwargs) -> dict:
        groups: dict[int | None, _Inputs] = {}
        for index, tensor, is_input, singular, _ in _tensors(func, args, kwargs):
            if is_input:
                groups.setdefault(index, _Inputs()).add(self._input(tensor, singular))
        return groups

    def _group(self, groups: dict, index: int | None) -> _Inputs:
        total = _Inputs()
        for key, given in groups.items():
            if index is None or key is None or key == index:
                total.add(given)
        return total

    def _pass_on(self, phase, where, name, tensor, given, place) -> None:
        sources = given.sources
        if not sources:
            event = self._event(phase, where, name, "output", tensor, given)
            event.seen = False
            sources = {event.order}
        self.reached.setdefault(phase, set()).update(sources)
        self._taint(tensor, sources)

    def _input(self, tensor: Tensor, singular: bool) -> _Inputs:
        if not _has_values(tensor):
            return _Inputs()
        largest = _largest(tensor)
        finite = math.isfinite(largest)
        sources = set() if finite else self.sources_of([tensor])
        at_zero = singular and bool((tensor == 0).any())
        return _Inputs(finite, largest if finite else _largest_finite(tensor), at_zero, sources)

    def _event(self, phase, module, operation, label, tensor: Tensor, given: _Inputs) -> Event:
        bad = int((~torch.isfinite(tensor)).sum())
        result = "NaN" if bool(torch.isnan(tensor).any()) else "infinity"
        event = Event(
            len(self.events),
            phase,
            module,
            operation,
            label,
            tensor.dtype,
            result,
            bad,
            tensor.numel(),
            True,
            given.largest,
            at_zero=given.at_zero,
        )
        self.events.append(event)
        self.reached.setdefault(phase, set()).add(event.order)
        return event

    def _taint(self, tensor: Tensor, sources: set[int]) -> None:
        # Held, so that no other tensor comes to lie at the same place.
        known = self._tainted.get(_place(tensor), (None, set()))[1]
        self._tainted[_place(tensor)] = (tensor.detach(), known | sources)

    def _note_largest(self, phase: str, where: str, tensor: Tensor) -> None:
        value = _largest(tensor)
        known = self.ramp.get((phase, where))
        if known is None:
            self.ramp[phase, where] = Largest(phase, where, value, tensor.dtype)
        elif math.isfinite(known.value) and not value <= known.value:
            known.value, known.dtype = value, tensor.dtype

    def _module_now(self) -> str:
        if torch._C._current_graph_task_id() != -1:
            node = torch._C._current_autograd_node()
            if node is not None and not hasattr(node, "variable"):
                self._where = node.metadata.get(_MARK, "loss")
            return self._where
        if self._stack:
            return self._stack[-1]
        return ""

    def _label(self, tensor, func, args, kwargs, index, place, phase) -> str:
        label = self._labels.get(tensor.data_ptr())
        if label is None and index is not None:
            for other, candidate, _, _, _ in _tensors(func, args, kwargs):
                if other == index and candidate.data_ptr() in self._labels:
                    label = self._labels[candidate.data_ptr()]
                    break
        if label is not None:
            return label
        return "gradient" if phase in (BACKWARD, UNSCALE) else "output"


class _Watch(TorchDispatchMode):
    """Hands every operation to the observation; the outer one only what the inner does not see.

    rerouted: what `Arithmetic` expects of what stands among its emulations; stays empty.
    """

    def __init__(self, observation: Observation, inner: bool):
        super().__init__()
        self.observation, self.inner, self.active = observation, inner, False
        self.rerouted: Counter[tuple[str, str]] = Counter()

    def __enter__(self):
        self.active = True
        return super().__enter__()

    def __exit__(self, *exception):
        super().__exit__(*exception)
        self.active = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            if not self.inner and self.observation._inner.active:
                return func(*args, **kwargs)
            groups = self.observation.before(func, args, kwargs)
            result = func(*args, **kwargs)
            self.observation.after(func, args, kwargs, result, groups)
            return result


def _tensors(func, args, kwargs) -> Iterator[tuple[int | None, Tensor, bool, bool, bool]]:
    """(place in its list, tensor, is read, singular at zero, is written) of every argument."""
    name = func._schema.name.removeprefix("aten::")
    singular = _SINGULAR_AT_ZERO.get(name)
    for position, argument in enumerate(func._schema.arguments):
        if position < len(args):
            value = args[position]
        elif argument.name in kwargs:
            value = kwargs[argument.name]
        else:
            continue
        written = argument.alias_info is not None and argument.alias_info.is_write
        read = not (written and (name in _OVERWRITING or argument.kwarg_only))
        if isinstance(value, Tensor):
            yield None, value, read, position == singular, written
        elif isinstance(value, (list, tuple)):
            for index, entry in enumerate(value):
                if isinstance(entry, Tensor):
                    yield index, entry, read, position == singular, written


def _per_entry(name: str) -> bool:
    """Whether entry i of the lists that an operation takes has to do with entry i only."""
    return name.startswith(("_foreach_", "_fused_", "_amp_foreach_"))


def _is_view(func: OpOverload) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(
        value.alias_info is not None and not value.alias_info.is_write for value in returns
    )


def _floats(tree) -> list[Tensor]:
    return [leaf.detach() for leaf in tree_leaves(tree) if _has_values(leaf)]


def _has_values(leaf) -> bool:
    """Whether it is a tensor of numbers that can overflow (on the meta device there are none)."""
    if not isinstance(leaf, Tensor) or leaf.is_meta:
        return False
    return leaf.is_floating_point() and leaf.numel() > 0


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _largest(tensor: Tensor) -> float:
    """Largest absolute value, NaN if there is one."""
    return float(tensor.abs().amax())


def _largest_finite(tensor: Tensor) -> float:
    return _largest(torch.where(torch.isfinite(tensor), tensor, 0))


def _in_fp32(func, args, kwargs, place: int) -> float | None:
    """The largest absolute value of the same operation on the same inputs in FP32."""

    def widened(value):
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.float()
        if isinstance(value, (list, tuple)):
            return type(value)(widened(entry) for entry in value)
        if value is torch.float16 or value is torch.bfloat16:
            return torch.float32
        return value

    if torch.Tag.nondeterministic_seeded in func.tags:
        return None  # would draw the step's random numbers a second time
    try:
        result = func(*map(widened, args), **{name: widened(v) for name, v in kwargs.items()})
    except (RuntimeError, NotImplementedError, TypeError):
        return None  # kernels that demand a 16-bit argument
    found = _floats(result)
    return _largest(found[place]) if place < len(found) else None
