"""The operations of one step as they reach the kernels: what each reads and writes, and how large.

Seen with a `TorchDispatchMode`, below autograd and autocast: what is seen is what is computed,
casts included. Autograd's own threads take the mode over from the thread that calls backward
(at::ThreadLocalState holds the stack of modes), so a backward pass on a GPU is seen as well.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple, Self, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from mprun.precision import DTYPE_NAMES, ForwardContext

if TYPE_CHECKING:
    from mprun.precision.emulation import HalfEmulation

See = Callable[[OpOverload, tuple, dict[str, Any], bool], Any]


class Watch:
    """Calls `see(func, args, kwargs, emulated)` in place of every operation inside the block.

    Two modes: one outside of everything, and one that the arithmetic of the task enters behind its
    emulations, so that an operation is seen before the emulation takes it apart. While that one is
    active (`active`) the outer one, which sees what the emulation makes of it, is silent.

    Args:
        arithmetic: of the task that is watched.
        see: runs the operation and returns its result; `emulated`: whether it may be emulated.
    """

    def __init__(self, arithmetic: ForwardContext, see: See):
        self.arithmetic, self.see, self.active = arithmetic, see, False
        self._outer, self._inner = _Mode(self, inner=False), _Mode(self, inner=True)

    def __enter__(self) -> Self:
        # What is used of an emulation it has: it is entered, and counts what it reroutes.
        inner = cast("HalfEmulation", self._inner)
        self.arithmetic.emulations = (*self.arithmetic.emulations, inner)
        self._outer.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._outer.__exit__(*exception)
        self.arithmetic.emulations = self.arithmetic.emulations[:-1]


class _Mode(TorchDispatchMode):
    """rerouted: what is expected of all that stands among the emulations; stays empty."""

    def __init__(self, watch: Watch, inner: bool):
        super().__init__()
        self.watch, self.inner = watch, inner
        self.rerouted: Counter[tuple[str, str]] = Counter()

    def __enter__(self):
        self.watch.active |= self.inner
        return super().__enter__()

    def __exit__(self, *exception):
        super().__exit__(*exception)
        self.watch.active &= not self.inner

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunction():
            if self.watch.active and not self.inner:
                return func(*args, **(kwargs or {}))
            return self.watch.see(func, args, kwargs or {}, self.inner)


class Phase(StrEnum):
    """Where a step is, in its order.

    The batch is cast, modules run, the loss is computed, its gradients are propagated, gradients
    are unscaled, weights updated.
    """

    INPUT = "input"
    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"
    UNSCALE = "unscale"
    UPDATE = "update"


@dataclass(slots=True)
class Event:
    """A value that is not finite appeared (`seen`), or was met without its origin.

    order: of appearance. phase: one of `Phase`. module: path, "" for the model itself.
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


class Largest(NamedTuple):
    """The largest absolute value that a module computed in one phase, and in which dtype."""

    phase: str
    module: str
    value: float
    dtype: torch.dtype


# Their results are memory that nobody has written yet.
UNWRITTEN = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_"}
# In-place operations that do not read what they overwrite.
_OVERWRITING = {"copy_", "_foreach_copy_", "fill_", "zero_", "_foreach_zero_", "set_"}
_OVERWRITING |= {"normal_", "uniform_", "bernoulli_", "random_"}
# Argument that is divided by, or whose logarithm is taken.
_SINGULAR_AT_ZERO = {
    **dict.fromkeys(("div", "div_", "_foreach_div", "_foreach_div_", "true_divide"), 1),
    **dict.fromkeys(("addcdiv", "addcdiv_", "_foreach_addcdiv", "_foreach_addcdiv_"), 2),
    **dict.fromkeys(("reciprocal", "_foreach_reciprocal", "rsqrt", "pow"), 0),
    **dict.fromkeys(("log", "log2", "log10"), 0),
}


@dataclass(frozen=True, slots=True)
class Operand:
    """One tensor argument. index: its place in the list that it is passed in, None outside lists.

    read, written: a tensor that is only overwritten is not read. singular_at_zero: the operation
    divides by it, or takes its logarithm.
    """

    index: int | None
    tensor: Tensor
    read: bool
    written: bool
    singular_at_zero: bool


def operands(func: OpOverload, args, kwargs) -> Iterator[Operand]:
    """Every tensor argument of a call, in the order of the operation's schema."""
    name = name_of(func)
    for position, argument in enumerate(func._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        written = argument.alias_info is not None and argument.alias_info.is_write
        read = not (written and (name in _OVERWRITING or argument.kwarg_only))
        how = (read, written, position == _SINGULAR_AT_ZERO.get(name))
        if isinstance(value, Tensor):
            yield Operand(None, value, *how)
        elif isinstance(value, (list, tuple)):
            for index, entry in enumerate(value):
                if isinstance(entry, Tensor):
                    yield Operand(index, entry, *how)


def name_of(func: OpOverload) -> str:
    """Of an ATen operation, "addmm"."""
    return func._schema.name.partition("::")[2]


def dtype_name(dtype: torch.dtype) -> str:
    """ "fp16", or torch's own name of what is no floating-point format of a mode."""
    return DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))


def in_backward() -> bool:
    """Whether autograd is at work."""
    return torch._C._current_graph_task_id() != -1


def per_entry(name: str) -> bool:
    """Whether entry i of the lists that an operation takes has to do with entry i only."""
    return name.startswith(("_foreach_", "_fused_", "_amp_foreach_"))


def floats(tree) -> list[Tensor]:
    """The floating-point tensors in nested lists, tuples and dicts, detached."""
    return [leaf.detach() for leaf in tree_leaves(tree) if has_values(leaf)]


def has_values(leaf) -> bool:
    """Whether it is a tensor of numbers that can overflow (on the meta device there are none).

    What is in 8 bits cannot: it was made to fit, and means something with its factor alone.
    """
    if not isinstance(leaf, Tensor) or leaf.is_meta or leaf.itemsize == 1:
        return False
    return leaf.is_floating_point() and leaf.numel() > 0


def storage_of(tensor: Tensor) -> int:
    """What tells tensors in other memory apart; views share it."""
    return tensor.untyped_storage().data_ptr()


def largest_of(tensor: Tensor) -> float:
    """Largest absolute value, NaN if there is one."""
    return float(tensor.abs().amax())


def largest_finite_of(tensor: Tensor) -> float:
    """Largest absolute value of those that are finite, 0 if none is."""
    return largest_of(torch.where(torch.isfinite(tensor), tensor, 0))


def in_fp32(func, args, kwargs, place: int) -> float | None:
    """The largest absolute value of the same operation on the same inputs in FP32."""

    def widened(value):
        if isinstance(value, Tensor) and value.is_floating_point():
            return value if value.itemsize == 1 else value.float()
        half = value is torch.float16 or value is torch.bfloat16
        return torch.float32 if half else value

    if torch.Tag.nondeterministic_seeded in func.tags:
        return None  # would draw the step's random numbers a second time
    try:
        wide_args, wide_kwargs = tree_map(widened, (args, kwargs))
        found = floats(func(*wide_args, **wide_kwargs))
    except (RuntimeError, NotImplementedError, TypeError):
        return None  # kernels that demand a 16-bit argument
    return largest_of(found[place]) if place < len(found) else None
