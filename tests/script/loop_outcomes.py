"""Outcomes of training loops in a precision mode, held against the plain script.

`MUST_REFUSE`, `MAY_RAISE` and `MAY_BE_FAR` name what is no training; `faults` says what contradicts
them.
"""

import gc
import sys
import traceback
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import mprun
from mprun.precision import StaticLossScale, get_policy
from mprun.precision.policy import usual_scaler

from ..shipped import MODES as SHIPPED
from . import loop_shapes  # noqa: F401  # enters its own
from .loops import LOOPS, Moved, Plain

# What is no training: a loop that is not named here must train.

ALL = frozenset(mode for mode in SHIPPED if mode != "tf32")  # which a CPU does not have
HALF = frozenset(mode for mode in ALL if get_policy(mode).half_dtype)
FP8 = frozenset(mode for mode in ALL if get_policy(mode).matmul)
# Weights are stored in 16 bits.
NARROW = frozenset(mode for mode in ALL if get_policy(mode).masters != "kept")
FP16_STORED = frozenset(mode for mode in NARROW if get_policy(mode).half_dtype == torch.float16)

# Name -> modes that refuse the loop in a line of mprun's own.
MUST_REFUSE = {
    "half_before": ALL,
    "half_after": ALL - {"fp16_naive"},  # which has it done already
    # The block is in BF16, as those modes are.
    "autocast_inside": frozenset(m for m in ALL if get_policy(m).half_dtype != torch.bfloat16),
}
# Name -> modes that may raise instead: a line of mprun's own, or torch's error.
MAY_RAISE: dict[str, frozenset[str]] = {
    "double_model": ALL,
    # FP32 weights meet 16-bit ones, as after `model.half()`.
    **dict.fromkeys(
        "head_replaced head_replaced_untrained layer_appended layer_appended_between "
        "weights_from_a_vector ema_before on_from_a_copy on_from_a_copy_of_parametrized "
        "on_from_a_copy_of_a_graph on_from_a_pickle on_from_the_whole_model "
        "loss_method".split(),
        NARROW,
    ),
    # torch has few sparse operations, in 16 bits fewer.
    "sparse_weight": HALF,
    # Nobody can say what scale the gradient of such a tensor has.
    "hidden_by_a_closure": HALF,
    "grad_scaler_left": ALL,
    # Weights that are updated chunk by chunk take no closure.
    **dict.fromkeys(
        ["closure", "lbfgs"], frozenset(m for m in ALL if get_policy(m).masters == "transient")
    ),
    # Products in FP8 are differentiable once.
    **dict.fromkeys(["gradient_penalty", "penalty_on_gradients"], FP8),
    # No linear layer is left to compute in FP8.
    **dict.fromkeys(
        "sparse_gradients sparse_adam channels_last_before channels_last_after eval_mode "
        "frozen_statistics backbone_in_eval packed_inside packed_input carried_state "
        "stochastic_weight_averaging gradients_through_a_teacher chain_of_two_scales "
        "overflow_in_batch_norm".split(),
        FP8,
    ),
}
# Name -> modes that may train to somewhere else: in FP16 squares of gradients below 2^-12 are 0,
# and so is Adam's eps.
MAY_BE_FAR = dict.fromkeys(
    "gan gan_one_by_one clip_value loaded_before loaded_after on_from_a_copy "
    "on_from_a_copy_of_parametrized on_from_a_copy_of_a_graph on_from_a_pickle "
    "on_from_its_state on_from_the_whole_model overflow overflow_in_a_second_phase second_phase "
    "sparse_adam tied clamped_critic".split()
    + [name for name in LOOPS if name.startswith("optimizer_")],
    FP16_STORED,
)
# The weight is rounded after each occurrence of a word.
MAY_BE_FAR["sparse_gradients"] = FP16_STORED


class InMode(Plain):
    """Call `mprun.prepare` with a mode."""

    def __init__(self, mode: str, prepare: Callable = mprun.prepare) -> None:
        self._mode, self._prepare = mode, prepare
        self.skips = usual_scaler(mode) != "none"

    def __call__(self, model: Any, optimizer: Any = None, *, scale: float | None = None) -> Any:
        scaler = StaticLossScale(scale) if scale and self.skips else None
        return self._prepare(model, optimizer, self._mode, scaler=scaler)


class Outcome(NamedTuple):
    """Say what a loop came to.

    kind: "equal" (every bit), "near" (inside of `tolerance`), "far", "refused" (a RuntimeError or
        ValueError of mprun's own, of one line) or "failed" (any other error).
    deviation: distance from what the plain script reached, as a share of how far that moved.
    said: the refusal or error, "" where there is none.
    warned: first lines of warnings that the plain script does not give.
    """

    kind: str
    deviation: float
    said: str = ""
    warned: tuple[str, ...] = ()


def tolerance(mode: str, weights: Tensor, moved: Tensor) -> float:
    """Return the largest `Outcome.deviation` that rounding explains; 0 in FP32.

    u is half an ulp of the mode's 16-bit format: 2^-11 in FP16, 2^-8 in BF16. Three layers, both
    ways, in six updates round some 60 times in a row: 64 u. Four products in FP8, where gradients
    have E5M2's 1/8: 0.5. Weights that are stored in 16 bits are rounded seven times, by
    u |w| / sqrt(3) in the root mean square, twice that at random: 4 u |w| of what they move.
    """
    policy = get_policy(mode)
    if policy.half_dtype is None:
        return 0.0
    half_ulp = torch.finfo(policy.half_dtype).eps / 2
    allowed = 64 * half_ulp + (0.5 if policy.matmul else 0.0)
    if policy.masters != "kept":
        stored = half_ulp * (2 if policy.rounding == "stochastic" else 1)
        allowed += 4 * stored * float(weights.norm() / moved.norm())
    return allowed


def _flat(values: list[Tensor]) -> Tensor:
    dense = [value.to_dense() if value.is_sparse else value for value in values]
    real = [torch.view_as_real(value) if value.is_complex() else value for value in dense]
    return torch.cat([value.flatten().double() for value in real])


def _run(name: str, prepare: Plain) -> tuple[Moved, tuple[str, ...]]:
    """Run a loop; return what moved, and first lines of its warnings."""
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        moved = LOOPS[name](prepare)
    return moved, tuple(sorted({str(one.message).partition("\n")[0] for one in caught}))


def refusal(error: Exception, prepare: Callable = mprun.prepare) -> tuple[bool, str]:
    """Return whether an error is one line of the package that `prepare` is of, and its text."""
    text = f"{type(error).__name__}: {error}"
    packages = mprun, sys.modules[prepare.__module__.partition(".")[0]]
    raised = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    own = any(Path(str(one.__file__)).parent in raised.parents for one in packages)
    return own and isinstance(error, RuntimeError | ValueError) and "\n" not in text, text


@cache
def plainly(name: str) -> tuple[Moved, tuple[str, ...]]:
    """Run a loop without mprun.

    Models of earlier loops live on in cycles; while one in amp does, it decides on `torch.autocast`
    of all others.
    """
    gc.collect()
    gc.freeze()  # what is left are modules, some imported by a loop: looked through only once
    return _run(name, Plain())


def outcome(name: str, mode: str, prepare: Callable = mprun.prepare) -> Outcome:
    """Return what loop `name` comes to in a mode."""
    expected, usual = plainly(name)
    try:
        found, said = _run(name, InMode(mode, prepare))
    except Exception as error:  # whatever it is, it is the outcome
        refused, text = refusal(error, prepare)
        return Outcome("refused" if refused else "failed", float("nan"), text)
    warned = tuple(line for line in said if line not in usual)
    if [end.shape for end in found.end] != [end.shape for end in expected.end]:
        return Outcome("failed", float("nan"), "the tensors have other shapes", warned)
    if all(
        one.dtype == other.dtype and torch.equal(one, other)
        for one, other in zip(found.end, expected.end, strict=True)
    ):
        return Outcome("equal", 0.0, warned=warned)
    end = _flat(expected.end)
    moved = end - _flat(expected.start)
    deviation = float((_flat(found.end) - end).norm() / moved.norm())
    near = deviation <= tolerance(mode, end, moved)
    return Outcome("near" if near else "far", deviation, warned=warned)


def fault(name: str, mode: str, found: Outcome) -> str:
    """Return what is wrong with an outcome, or ""."""
    if mode in MUST_REFUSE.get(name, ()):
        refused = found.kind == "refused"
        return "" if refused else f"{found.kind}, must be refused {found.said}".strip()
    # Every bit of FP32 in 16 bits: the mode did not happen, but where nothing is computed, or where
    # the plain script computes in BF16 as well.
    exact = get_policy(mode).half_dtype is None
    allowed = set() if exact else {"near"}
    if exact or name in ("gradients_by_hand", "autocast_inside"):
        allowed |= {"equal"}
    if mode in MAY_RAISE.get(name, ()):
        allowed |= {"refused", "failed"}
    if mode in MAY_BE_FAR.get(name, ()):
        allowed |= {"far"}
    if found.kind in allowed:
        return ""
    return f"{found.kind}: {found.said or f'deviation {found.deviation:.2g}'}"
