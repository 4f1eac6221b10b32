"""Measure what modules compute between their calls of other modules, forward and backward.

The scores of attention, or a scaling that a network does itself, are no output of a layer. Each
operation is seen as it reaches its kernel, by a `Trace`. FP16's kernels accumulate sums, norms,
variances and products in FP32 and round the result, so that its magnitude decides. The rounded
result of a fused kernel is seen, and not its inside.
"""

import math
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from mprun.numerics.exponent_counter import (
    COUNTED,
    Tally,
    largest,
    sampled,
    sampling_stride,
)
from mprun.numerics.probe_record import (
    NOTABLE,
    Operations,
    OperationStats,
    Place,
    TensorStats,
    most_notable,
)
from mprun.numerics.trace import (
    LOSS,
    SINGULAR_AT_ZERO,
    UNWRITTEN,
    Collector,
    Operation,
    Phase,
    Trace,
    in_backward,
    operands,
    tensors_in,
)
from mprun.torch_private import disable_dispatch_modes, schema_of, tree_leaves

# Of a result only so many values are counted, which bounds the cost of an operation; all of them
# enter the largest one. A share is then known to 0.004 (one standard deviation of an even share).
COUNTED_OF_A_RESULT = 1 << 14
_KIND = "operations"
_NONE_MADE = {*UNWRITTEN, "_unsafe_view", "lift_fresh", "clone"}  # these compute no number
_PHASES = {Phase.FORWARD, Phase.LOSS, Phase.BACKWARD}
Key = tuple[str, str, Place]  # learner, _KIND, place


class OperationRanges(Collector):
    """Measure the operations between modules of a step of `task` inside the block.

    tally: takes the results, under the keys (learner, "operations", place).

    What a block computes anew in the backward pass is not measured a second time.
    """

    marks = True

    def __init__(self, task: Any, tally: Tally):
        self.tally = tally
        # By key: smallest divisor; calls that overflowed. By learner and module: largest ends.
        self.divisors: dict[Key, Tensor] = {}
        self._keys: dict[Key, None] = {}
        self.overflows: dict[Key, Tensor] = {}
        self.ends: dict[tuple[str, str], list[Tensor]] = {}
        self._names: dict[str, tuple[str, str]] = {}
        self._layers: set[str] = set()  # paths of those whose outputs show all that they do
        self._trace = Trace(task, self)
        for label, learner in task.learners.items():
            for name, module in learner.model.named_modules():
                path = self._trace.paths[id(module)]
                self._names.setdefault(path, (label, name))  # two optimizers may share a model
                is_torch = type(module).forward.__module__.startswith("torch.nn.")
                if is_torch and not any(module.children()):
                    self._layers.add(path)
        self._labels = [*task.learners]
        self._learner = self._labels[0]  # the one that was called last

    def __enter__(self) -> Self:
        self._trace.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._trace.__exit__(*error)

    def enter(self, module: nn.Module, inputs: tuple) -> None:
        path = self._trace.paths.get(id(module), type(module).__name__)
        self._learner = self._names.get(path, (self._learner, ""))[0]
        self._note_end(path, 0, inputs)

    def leave(self, module: nn.Module, path: str, inputs: tuple, outputs: Any) -> None:
        self._note_end(path, 1, outputs)

    def _note_end(self, path: str, end: int, tree: Any) -> None:
        """Note the largest input (0) or output (1) of a module."""
        if path not in self._names or in_backward():
            return
        with disable_dispatch_modes(), torch.no_grad():
            for tensor in _results(tree):
                amax, _ = largest_finite(tensor)
                ends = self.ends.setdefault(self._names[path], [torch.zeros_like(amax)] * 2)
                ends[end] = torch.maximum(ends[end], amax)

    def before(self, operation: Operation) -> Tensor | None:
        """Return whether the operands are finite, of a call that overwrites some."""
        if not schema_of(operation.func).is_mutable or self._place(operation) is None:
            return None
        with disable_dispatch_modes():
            return _all_finite(operation)

    def after(self, operation: Operation, kept: Tensor | None) -> None:
        key = self._place(operation)
        if key is None:
            return
        with disable_dispatch_modes():
            for tensor in _results(operation.result):
                stride = sampling_stride(tensor, COUNTED_OF_A_RESULT)
                amax, finite = largest_finite(tensor)
                self._keys[key] = None
                self.tally.add_sample(key, sampled(tensor, stride), stride, amax)
                self._note_overflow(key, operation, finite, kept)
            if operation.name in SINGULAR_AT_ZERO and not _is_power(operation):
                self._note_divisor(key, operation)

    def _place(self, operation: Operation) -> Key | None:
        """Return where a result belongs; None: it is not measured."""
        if operation.func.is_view or operation.name in _NONE_MADE:
            return None
        phase = self._trace.phase
        computed_anew = phase is Phase.BACKWARD and torch.is_grad_enabled()
        if phase not in _PHASES or computed_anew:
            return None
        path = LOSS if phase is Phase.LOSS else self._trace.module
        if path in self._layers:
            return None
        label, name = self._names.get(path, (self._learner, path))
        return label, _KIND, Place(phase.value, name, operation.name)

    def _note_overflow(
        self, key: Key, operation: Operation, finite: Tensor | None, kept: Tensor | None
    ) -> None:
        if finite is None:
            return
        given = _all_finite(operation) if kept is None else kept
        if given is not None:
            made = (given & ~finite).int()
            self.overflows[key] = self.overflows[key] + made if key in self.overflows else made

    def _note_divisor(self, key: Key, operation: Operation) -> None:
        for one in operands(operation):
            if one.singular_at_zero and one.tensor.dtype in COUNTED and one.tensor.numel():
                size = one.tensor.detach().abs()
                least = torch.where(size > 0, size, math.inf).amin().float()
                known = self.divisors.get(key)
                self.divisors[key] = least if known is None else torch.minimum(known, least)

    def dtypes(self) -> dict[tuple[str, Place], set[torch.dtype]]:
        """Return the dtypes of the results, by learner and place."""
        return {(key[0], key[2]): self.tally.dtypes[key] for key in self._keys}

    def scalars(self) -> list[Tensor]:
        """Return 0-dim tensors, to be read by `read` when they are on the host."""
        ends = [end for own in self.ends.values() for end in own]
        return [*self.divisors.values(), *self.overflows.values(), *ends]

    def read(
        self, stats: Mapping[Any, TensorStats], values: list[float]
    ) -> dict[str, tuple[Operations, dict[str, tuple[float, float]]]]:
        """Return learner -> (rows, module -> ends); values: those of `scalars`."""
        numbers = iter(values)
        divisors = {key: next(numbers) for key in self.divisors}
        overflows = {key: int(next(numbers)) for key in self.overflows}
        rows: dict[str, Operations] = {}
        reach: dict[str, dict[str, tuple[float, float]]] = {}
        for key in self._keys:
            least = divisors.get(key, math.inf)
            divisor = least if least < math.inf else None
            row = OperationStats(stats[key], divisor, overflows.get(key, 0))
            rows.setdefault(key[0], {})[key[2]] = row
        for label, name in self.ends:
            ends = next(numbers), next(numbers)
            if max(ends) >= NOTABLE:
                reach.setdefault(label, {})[name] = ends
        return {own: (most_notable(rows.get(own, {})), reach.get(own, {})) for own in self._labels}


def _is_power(operation: Operation) -> bool:
    """Return whether it is a power that needs no division: "pow" with an exponent from 0 on."""
    exponent = operation.args[1] if operation.name == "pow" else -1
    return not isinstance(exponent, (int, float)) or exponent >= 0


def _results(tree: Any) -> list[Tensor]:
    """Return the tensors that can be counted; of a subclass none, which may ask other processes."""
    return [
        tensor
        for tensor in tensors_in(tree)
        if type(tensor) in (Tensor, nn.Parameter)
        and tensor.dtype in COUNTED
        and tensor.layout is torch.strided
        and tensor.numel()
        and not tensor.is_meta
    ]


def largest_finite(tensor: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the largest finite magnitude (0-dim float32), and whether all are finite (None: yes).

    The largest number of the dtype counts as infinite: code that adapts to a dtype masks with it.
    It waits for no GPU.
    """
    tensor, limit = tensor.detach(), torch.finfo(tensor.dtype).max
    whole = largest(tensor)
    if tensor.device.type == "cpu" and whole < limit:
        return whole, None
    size = tensor.abs()
    return torch.where(size < limit, size, 0).amax().float(), whole.isfinite()


def _all_finite(operation: Operation) -> Tensor | None:
    """Return whether all numbers that a call reads are finite; None: it reads none, or infinity."""
    leaves = tree_leaves((operation.args, operation.kwargs))
    if any(isinstance(leaf, float) and math.isinf(leaf) for leaf in leaves):
        return None
    read = [
        one.tensor for one in operands(operation) if one.read and one.tensor.is_floating_point()
    ]
    found = [largest(tensor).isfinite() for tensor in _results(read)]
    return torch.stack([one.to(found[0].device) for one in found]).all() if found else None
