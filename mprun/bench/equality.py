"""Do contenders compute the same? Asked of the first 20 steps, before anything is timed.

Compared are the losses, the number of skipped updates and, because a loss that is rounded to 16
bits cannot show a learning rate that is 1 % off, how far the weights have travelled and in what
direction. All contenders start from the same weights and see the same batches, so what is left
between two of them is rounding and its growth.

Tolerance, relative, after k updates, u being half a unit in the last place of the format in which
the mode multiplies (2^-24 FP32, 2^-11 TF32 and FP16, 2^-8 BF16):

    min(2^-7 * max(1, 2^((k - 5) / 4)), max(2 u, 2^-16 * 4^k))

- 2 u: every step rounds anew. Tiny models differ by up to 0.7 u (losses) and 1 u (travel).
- 2^-16 * 4^k: 256 roundings of FP32 to begin with (kernels that transform their inputs, as
  Winograd convolutions do, cost as many), and training amplifies a difference: up to fourfold a
  step where a sign flips (ReLU; Adam on a gradient near 0), as tiny DCGANs show in FP32.
- 2^-7: a learning rate that is 1 % off moves the weights 1 % further in the first update, a
  forgotten momentum shows in the second, a missing zero_grad too. So the first five updates decide;
  later ones may drift apart, because they do in any chaotic run, but not for ever.

tests/bench/test_equality.py plants such errors in real models.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mprun.bench.contender import Contender
from mprun.bench.registry import NEAREST_MODE, SCALES_PER_OPTIMIZER
from mprun.config.compose import compose_config
from mprun.config.tasks import task_of
from mprun.precision import get_policy

# Modes that change what is learned: without master weights updates are lost, without loss scaling
# FP16 gradients are. Their contenders are compared with each other, not with FP32.
UNLIKE_FP32 = ("fp16_naive", "fp16_master", "bf16_naive")
_REFERENCES = ("loop", "amp", "mprun")  # the plainest first
_SAMPLED = 2**20  # elements of a tensor that are watched


@dataclass(frozen=True, slots=True)
class Trial:
    """The first steps of a contender.

    losses: of each step, NaN and infinities included. skipped: updates in these steps. travel: of
    each step (distance, direction) as of `WeightWatch`, None where it was not watched.
    scale_per_optimizer: the loss scale is updated after each optimizer's step, so that a GAN's
    skips come at other steps than with one update per iteration.
    """

    name: str
    mode: str
    losses: tuple[float, ...]
    skipped: int = 0
    travel: tuple[tuple[float, float], ...] | None = None
    scale_per_optimizer: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """ok: no difference beyond rounding; reason: the first one, or what could not be compared.

    loss_difference: at the last step, absolute; NaN where a loss is not finite.
    """

    name: str
    ok: bool
    reason: str
    loss_difference: float


class WeightWatch:
    """How far a contender's weights are from where they started, step by step.

    Watches at most 2^20 elements of each tensor, every n-th one, and holds copies of them: 4 bytes
    each. To be made before the first step. A contender shows its weights by `weights()`: those
    that its optimizer updates (master weights where there are some) by name.
    """

    def __init__(self, contender: Contender):
        self._tensors = list(contender.weights().values())
        self._start = [sample.clone() for sample in self._samples()]
        self._length = self._norm(self._start).sqrt()
        self._steps: list[Tensor] = []

    @torch.no_grad()
    def record(self) -> None:
        """Note where the weights are after a step; work for the device alone."""
        moved = [now.float() - then for now, then in zip(self._samples(), self._start, strict=True)]
        distance = self._norm(moved).sqrt()
        pairs = zip(moved, self._start, strict=True)
        along = sum((a.double() * b.double()).sum() for a, b in pairs)
        self._steps.append(torch.stack([distance / self._length, along / self._length / distance]))

    def travel(self) -> list[list[float]]:
        """[distance over the length of the start, cosine to the start] of each step.

        The cosine is 0 where nothing has moved. Waits for the device.
        """
        rows = torch.stack(self._steps).tolist()
        return [[distance, cosine if distance else 0.0] for distance, cosine in rows]

    def _samples(self) -> list[Tensor]:
        # `flatten` numbers the elements alike in NCHW and NHWC.
        return [t.detach().flatten()[:: -(-t.numel() // _SAMPLED)].float() for t in self._tensors]

    @staticmethod
    def _norm(tensors: Iterable[Tensor]) -> Tensor:
        return sum(tensor.double().square().sum() for tensor in tensors)


def rounding_unit(mode: str) -> float:
    """u of the module docstring."""
    policy = get_policy(mode)
    if policy.half_dtype is not None:
        return torch.finfo(policy.half_dtype).eps / 2
    return 2.0**-11 if policy.fp32_math == "tf32" else 2.0**-24


def tolerance(unit: float, updates: int) -> float:
    """The relative difference that is allowed after so many updates; see the module docstring."""
    chaos = 2.0**-7 * max(1.0, 2.0 ** ((updates - 5) / 4))
    return min(chaos, max(2 * unit, 2.0 ** (2 * min(updates, 20) - 16)))


def compare(reference: Trial, others: Iterable[Trial]) -> list[Verdict]:
    """Hold each of the others to the reference, with the coarser of their two formats."""
    return [_verdict(reference, other) for other in others]


def check(rows: Sequence) -> dict[str, tuple[bool, str]]:
    """Row key -> (computes what the others do, why not or what could not be compared).

    rows: `mprun.bench.rows.Row` of one model, those with "losses" in their `equality`. Each is held
    to the plainest contender of its mode (of the nearest mode where it is alone), and where its
    mode should learn as FP32 does to the plainest FP32 one.
    """
    trials = {row.key: _trial(row) for row in rows}
    verdicts = {}
    for key, trial in trials.items():
        references = [_plainest(trials.values(), trial.mode)]
        if references[0] is trial:
            references.append(_plainest(trials.values(), NEAREST_MODE.get(trial.mode)))
        if trial.mode not in UNLIKE_FP32:
            references.append(_plainest(trials.values(), "fp32"))
        held = [r for r in references if r is not None and r is not trial]
        found = [_verdict(reference, trial) for reference in held]
        wrong = next((verdict for verdict in found if not verdict.ok), None)
        notes = "; ".join(dict.fromkeys(v.reason for v in found if v.reason))
        verdicts[key] = (wrong is None, notes if wrong is None else wrong.reason)
    return verdicts


def _verdict(reference: Trial, other: Trial) -> Verdict:
    difference = abs(other.losses[-1] - reference.losses[-1])
    unit = max(rounding_unit(reference.mode), rounding_unit(other.mode))
    against = f"{reference.name} in {reference.mode}"
    ok, reason, compared = True, "", len(reference.losses)
    if reference.skipped != other.skipped:
        same_rule = reference.scale_per_optimizer == other.scale_per_optimizer
        if same_rule and reference.mode == other.mode:
            text = f"{other.skipped} updates skipped, {reference.skipped} by {against}"
            return Verdict(other.name, False, text, difference)
        # From the first skip on the weights are others: only the first loss can be compared.
        compared = 1
        reason = (
            f"only the first loss compared with {against}: {other.skipped} and "
            f"{reference.skipped} updates skipped"
        )
    found = _first_difference(reference, other, unit, compared)
    if found is not None:
        ok, reason = False, f"{found} {against}"
    return Verdict(other.name, ok, reason, difference)


def _first_difference(reference: Trial, other: Trial, unit: float, steps: int) -> str | None:
    watched = reference.travel is not None and other.travel is not None
    updates = 0
    for step in range(steps):
        allowed = tolerance(unit, updates)
        ours, theirs = other.losses[step], reference.losses[step]
        if not math.isfinite(theirs):
            if math.isfinite(ours):
                return f"loss {ours:.5g} at step {step + 1}, {theirs} in"
            return None
        apart = abs(ours - theirs) / max(abs(theirs), 1e-30)
        if not apart <= allowed:
            return f"loss off by {apart:.1e} at step {step + 1} ({allowed:.1e} allowed) from"
        if not watched:
            updates += 1
            continue
        (distance, cosine), (distance_0, cosine_0) = other.travel[step], reference.travel[step]
        if distance_0 == 0:
            if distance != 0:
                return f"weights moved at step {step + 1}, not in"
            continue
        updates += 1
        allowed = tolerance(unit, updates)
        apart = abs(distance / distance_0 - 1)
        if not apart <= allowed:
            return (
                f"weights travelled {distance / distance_0 - 1:+.1e} further by step {step + 1} "
                f"({allowed:.1e} allowed) than"
            )
        if not abs(cosine - cosine_0) <= allowed:
            return (
                f"direction of the weights off by {abs(cosine - cosine_0):.1e} at step "
                f"{step + 1} ({allowed:.1e} allowed) from"
            )
    return None


def _plainest(trials: Iterable[Trial], mode: str | None) -> Trial | None:
    of_mode = {trial.name: trial for trial in trials if trial.mode == mode}
    names = [*(name for name in _REFERENCES if name in of_mode), *of_mode]
    return of_mode[names[0]] if names else None


def _trial(row) -> Trial:
    found: Mapping = row.equality
    travel = found.get("travel")
    gan = task_of(compose_config(row.case.overrides).config.model) == "gan"
    return Trial(
        row.case.contender,
        row.case.mode,
        tuple(float(loss) for loss in found["losses"]),  # "nan" and "inf" are strings
        found["skipped"],
        None if travel is None else tuple((d, c) for d, c in travel),
        gan and row.case.contender in SCALES_PER_OPTIMIZER,
    )
