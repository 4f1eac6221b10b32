"""Find the first operation whose results are far from FP32's, in a step of a mode.

Both take their first step from the same weights on the same batch. Each call of an operation is set
beside the same call in FP32. A result that is far although what it was computed from is near shows
where the mode loses the numbers: products that are 0, a difference of large numbers, whole numbers
that its format does not have. A cast is set beside what it casts, and in the end the state of the
optimizer beside FP32's.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import starmap
from typing import Any

import torch
from torch import Tensor

from mprun.errors import MprunError
from mprun.extensions.diagnosis.trials import FP32, Budget
from mprun.numerics.exponent_counter import sampled, sampling_stride
from mprun.numerics.replay import Steps
from mprun.numerics.state import optimizer_state
from mprun.numerics.trace import (
    LOSS,
    UNWRITTEN,
    Collector,
    Operation,
    Phase,
    Trace,
    operands,
    storage_of,
    tensors_in,
)
from mprun.precision.policy import dtype_name
from mprun.torch_private import disable_dispatch_modes

FAR = 0.1  # root mean square of the error, of FP32's results; rounding to BF16 makes 0.002
MANY = 0.5  # of one kind of the optimizer's numbers; so many that are 0 are worth a word
DIVISORS = 0.05  # of those whose root an update is divided by: each that is 0 leaves eps alone
SOME = 0.01  # of the numbers; fewer whole numbers that change are not worth a word
_VALUES = 1 << 14  # of a result are compared
_CASTS = {"_to_copy", "copy_"}
_DIVISORS = {"exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum"}  # torch's names
_NO_RESULT = {*UNWRITTEN, "_unsafe_view", "lift_fresh", "clone", "detach"}
_PLACES = {Phase.INPUT.value: "casting the inputs", Phase.UPDATE.value: "the optimizer"}
_PHASES = {Phase.INPUT, Phase.FORWARD, Phase.LOSS}
# A sum that leaves such a part of its numbers, or less, is rounding in FP32, too.
_OF_FP32 = 2.0**-18
_CANCELS = 16  # times a result: so large an operand
_SUMS = {"add", "sub", "rsub", "sum", "mean", "mm", "bmm", "addmm", "baddbmm"}


@dataclass(slots=True)
class Result:
    """A call of an operation; values: float32 on the host; of: what made its operands."""

    phase: Phase
    module: str
    name: str
    dtype: torch.dtype
    shape: torch.Size
    values: Tensor
    largest: float  # operand
    of: str
    cast: Tensor | None = None  # the values that a cast was given

    @property
    def key(self) -> tuple[Phase, str, str]:
        return self.phase, self.module, self.name


@dataclass(frozen=True, slots=True)
class Far:
    """The first results of a step that are far from FP32's.

    error: of FP32's results, as a part, root mean square. reason: what happened to the numbers.
    """

    phase: str
    module: str
    operation: str
    dtype: str
    error: float
    reason: str

    @property
    def place(self) -> str:
        """Return where it was, for a reader."""
        if self.phase in _PLACES:
            return _PLACES[self.phase]
        return "the loss" if self.phase == Phase.LOSS else self.module or "the model itself"

    def in_words(self) -> str:
        """Return a sentence on it."""
        said = self.error >= FAR and self.phase != Phase.UPDATE
        off = f" (off by {round(100 * self.error):,} % of FP32's)" if said else ""
        return f"{self.place}: {self.reason}{off}"


class _Results(Collector):
    """Keep what each operation of a step computes, up to the backward pass."""

    def __init__(self, task: Any):
        self.found: list[Result] = []
        self.is_random = False  # from here on, results differ between two steps anyway
        self._makers: dict[int, str] = {}  # storage -> operation that wrote it last
        self._trace = Trace(task, self)

    def __enter__(self) -> "_Results":
        self._trace.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._trace.__exit__(*error)

    def before(self, operation: Operation) -> tuple[float, str] | None:
        """Return the largest operand, and which operations made them."""
        if not self._is_kept(operation):
            return None
        with disable_dispatch_modes():
            read = [one.tensor for one in operands(operation) if one.read]
            numbers = [x for x in read if _has_numbers(x)]
            largest = max((float(x.abs().amax()) for x in numbers), default=0.0)
            makers = dict.fromkeys(self._makers.get(storage_of(x), "") for x in numbers)
        return largest, " and ".join(filter(None, makers))

    def after(self, operation: Operation, kept: tuple[float, str] | None) -> None:
        if kept is None:
            return
        self.is_random |= torch.Tag.nondeterministic_seeded in operation.func.tags
        results = [x for x in tensors_in(operation.result) if _has_numbers(x)]
        if self.is_random or not results:
            return
        result, name = results[0], operation.name
        with disable_dispatch_modes():
            largest, makers = kept
            of, given = makers, None
            if name in _CASTS:
                read = [one.tensor for one in operands(operation) if one.read]
                source = next((x for x in read if x.numel() and not x.is_meta), None)
                if source is not None and source.dtype != result.dtype:
                    given = _values(source)
            else:
                of = name
            if of:
                self._makers[storage_of(result)] = of
            module = LOSS if self._trace.phase is Phase.LOSS else self._trace.module
            place = self._trace.phase, module, name
            shown = result.dtype, result.shape, _values(result)
            self.found.append(Result(*place, *shown, largest, makers, given))

    def _is_kept(self, operation: Operation) -> bool:
        makes_none = operation.func.is_view or operation.name in _NO_RESULT
        return self._trace.phase in _PHASES and not makes_none


def results(built: Any) -> list[Result]:
    """Take the first step of a run that has not started; return what it computed, in order.

    A step that draws random numbers on the way is looked at up to there.
    """
    with _Results(built.task) as seen:
        row = Steps(built, 0, 0).advance()
    if not row.found_inf:
        for name, tensor in optimizer_state(built.task).items():
            key, _, of = name.partition(" of ")
            form = tensor.dtype, tensor.shape, _values(tensor)
            seen.found.append(Result(Phase.UPDATE, of, key, *form, 0.0, ""))
    return seen.found


def first_far(own: list[Result], reference: list[Result]) -> Far | None:
    """Return the first of a mode's `results` that are far from FP32's; None: none are."""
    beside: dict[tuple, list[Result]] = defaultdict(list)
    for one in reference:
        beside[one.key].append(one)
    calls, seen = Counter(one.key for one in own), Counter[tuple]()
    state: dict[str, list[tuple[Result, Result]]] = defaultdict(list)
    for one in own:
        exact = one.cast
        if one.phase == Phase.UPDATE:
            state[one.name] += [(one, other) for other in beside[one.key]]
            continue
        # Otherwise nothing says which call is which.
        if one.name not in _CASTS and calls[one.key] == len(beside[one.key]):
            other = beside[one.key][seen[one.key]]
            seen[one.key] += 1
            exact = other.values if one.shape == other.shape else None
        if exact is not None and (far := _far(one, exact)) is not None:
            return far
    return next(filter(None, starmap(_far_state, state.items())), None)


def far_in_modes(
    build: Callable[[tuple[str, ...]], Any], modes: Iterable[tuple[str, ...]], budget: Budget
) -> dict[str, Far]:
    """Return the modes whose first step is far from FP32's, as typed, and where.

    build: builds a run in a mode. A mode that cannot be built or trained is left out.
    """
    found, reference = {}, results(build(FP32))
    for mode in filter(None, dict.fromkeys(modes)):
        if budget.spent:
            break
        with suppress(MprunError, RuntimeError, ValueError):
            if (far := first_far(results(build(mode)), reference)) is not None:
                found[" ".join(mode)] = far
    return found


def _far_state(key: str, pairs: list[tuple[Result, Result]]) -> Far | None:
    """Return whether most numbers of one kind of the optimizer's state round to 0."""
    wrong, right = (torch.cat([one.values for one in side]) for side in zip(*pairs, strict=True))
    (first, _), *_ = pairs
    lost = (right != 0) & (wrong == 0)
    share = float(lost.sum() / max(1, int((right != 0).sum())))
    if share < (DIVISORS if key in _DIVISORS else MANY):
        return None
    dtype, typical = dtype_name(first.dtype), float(right[lost].abs().median())
    reason = f"its state {key} underflows: {100 * share:.2g} % of its numbers round to 0 in "
    reason += f"{dtype.upper()}, such as {typical:.2g}"
    return Far(Phase.UPDATE.value, "", key, dtype, share, reason)


def _far(one: Result, exact: Tensor) -> Far | None:
    """Return what is wrong with a result, if it is far from what is exact."""
    known = exact.isfinite() & one.values.isfinite()
    right, wrong = exact[known].double(), one.values[known].double()
    if not right.numel():
        return None
    size, off = (float(x.square().mean().sqrt()) for x in (right, wrong - right))
    error, dtype = (off / size if size else 0.0), dtype_name(one.dtype)
    zeros, changed = (right != 0) & (wrong == 0), right != wrong
    whole = bool((right == right.round()).all()) and float(changed.double().mean()) >= SOME
    done = "the cast" if one.cast is not None else one.name
    is_sum = one.name.rstrip("_") in _SUMS
    name, least = dtype.upper(), torch.finfo(one.dtype).tiny
    if whole and 1 < size:
        place = int(changed.nonzero()[0, 0])
        before, after = float(right[place]), float(wrong[place])
        reason = f"{done} loses whole numbers in {name}: {before:.9g} becomes {after:.9g}"
    elif error < FAR or is_sum and size < _OF_FP32 * one.largest:
        return None
    elif is_sum and one.largest >= _CANCELS * size:
        made = f", which {one.of} made" if one.of else ""
        reason = f"{done} cancels numbers up to {one.largest:.2g}{made}, as {name} has rounded them"
    elif zeros.any() and (typical := float(right[zeros].abs().median())) < least:
        share = float(zeros.double().mean())
        reason = f"{done} underflows: {100 * share:.2g} % of its results round to 0 in {name}"
        reason += f", such as {typical:.2g}"
    else:
        made = f", computed from what {one.of} made" if one.of else ""
        reason = f"what {done} computes differs from FP32's{made}"
    return Far(one.phase.value, one.module, one.name, dtype, error, reason)


def _has_numbers(tensor: Tensor) -> bool:
    plain = tensor.layout is torch.strided and not tensor.is_meta
    return tensor.is_floating_point() and plain and tensor.numel() > 0


def _values(tensor: Tensor) -> Tensor:
    own = sampled(tensor, sampling_stride(tensor, _VALUES))
    return own.to("cpu", torch.float32 if own.is_floating_point() else torch.float64, copy=True)
