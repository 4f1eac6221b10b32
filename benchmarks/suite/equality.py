"""A check that contenders compute the same in the first 20 steps, before anything is timed.

It compares losses and the number of skipped updates. A loss rounded to 16 bits cannot show a
learning rate that is 1 % off, so it also compares the distance and direction of the weights. All
contenders start from the same weights and see the same batches. So only rounding and its growth
separate two of them.

The growth of rounding depends on the model: a tiny LSTM keeps a difference of 1e-7, ResNet-50 on 32
pixels and random labels turns it into 1e-2 in one update. So it is measured: a *twin* of the
plainest contender starts from weights multiplied by 1 + p N(0, 1) with p = max(u, 2^-20). u is half
a unit in the last place of the coarsest format in which the mode multiplies (2^-24 FP32, 2^-11 TF32
and FP16, 2^-8 BF16, 2^-4 E4M3, 2^-3 E5M2). The allowed difference at a step is

    max(floor, 4 * the twin's largest difference so far)

- floor = max(u, 2^-16), relative: every step rounds again, and FP32 kernels that transform their
  inputs (Winograd convolutions) are about 256 roundings off. For the direction, a cosine, in which
  errors of many weights cancel, it is a sixteenth of this.
- 4: p is more than a contender's roundings, so this is about ten times their effect. A single loss
  can be close to its twin's by chance: the next one counts, too.

A learning rate that is 1 % off moves the weights 1 % further in the first update. A forgotten
momentum or a missing zero_grad shows in the second. tests/benchmarks/test_equality.py plants such
errors in real models.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.suite.contenders import NEAREST_MODE, SCALES_PER_OPTIMIZER, make
from mprun.config.registry import task_of
from mprun.extensions.bench.cases import Case
from mprun.extensions.bench.contest import learns_as_fp32
from mprun.extensions.bench.measure import Contender, first_steps
from mprun.extensions.bench.runner import RunnerContender
from mprun.extensions.bench.worker import release
from mprun.precision import get_policy

_REFERENCES = ("loop", "amp", "mprun")  # the plainest first
TWINS = ("loop", "amp")  # contenders with a twin
_FLOOR, _PERTURBATION, _DRAWS = 2.0**-16, 2.0**-20, 4.0
_SAMPLED = 2**20  # elements of a tensor that are watched


@dataclass(frozen=True, slots=True)
class Trial:
    """The first steps of a contender.

    losses: loss of each step, NaN and infinities included. skipped: skipped updates in these steps.
    travel: (distance, direction) of each step as in `WeightWatch`, None if it was not watched.
    scale_per_optimizer: the loss scale is updated after each optimizer's step, so that a GAN skips
    at other steps than with one update per iteration. twin: trial of the twin (needs travel).
    """

    name: str
    mode: str
    losses: tuple[float, ...]
    skipped: int = 0
    travel: tuple[tuple[float, float], ...] | None = None
    scale_per_optimizer: bool = False
    twin: Trial | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """A result of the check.

    ok: there is no difference beyond rounding. reason: the first such difference, or why a
    comparison was not possible. loss_difference: at the last step, absolute; NaN if a loss is not
    finite.
    """

    name: str
    ok: bool
    reason: str
    loss_difference: float


def rounding_unit(mode: str) -> float:
    """Return u of the module docstring."""
    policy = get_policy(mode)
    if policy.formats:
        return max(torch.finfo(dtype).eps for dtype in policy.formats) / 2
    return 2.0**-11 if policy.fp32_math == "tf32" else 2.0**-24


def weights_of(contender: Contender) -> dict[str, Tensor]:
    """Return the tensors that a contender's optimizers update, by name."""
    if not isinstance(contender, RunnerContender):
        return contender.weights()
    found: dict[str, Tensor] = {}
    for learner, own in contender.task.learners.items():
        found |= {f"{learner}.{name}": tensor.detach() for name, tensor in own.named.items()}
    return found


class WeightWatch:
    """The distance of a contender's weights from their start, step by step.

    It watches at most 2^20 elements of each tensor, every n-th one, and holds copies of them: 4
    bytes each. Make it before the first step. Weights are those of `weights_of`.
    """

    def __init__(self, contender: Contender):
        self._tensors = list(weights_of(contender).values())
        self._start = [sample.clone() for sample in self._samples()]
        self._length = self._norm(self._start).sqrt()
        self._steps: list[Tensor] = []

    @torch.no_grad()
    def record(self) -> None:
        """Note the weights after a step; only the device works."""
        moved = [now.float() - then for now, then in zip(self._samples(), self._start, strict=True)]
        distance = self._norm(moved).sqrt()
        pairs = zip(moved, self._start, strict=True)
        along = sum((a.double() * b.double()).sum() for a, b in pairs)
        self._steps.append(torch.stack([distance / self._length, along / self._length / distance]))

    def travel(self) -> list[list[float]]:
        """Return [distance over the length of the start, cosine to the start] of each step.

        The cosine is 0 if nothing has moved. It waits for the device.
        """
        rows = torch.stack(self._steps).tolist()
        return [[distance, cosine if distance else 0.0] for distance, cosine in rows]

    def _samples(self) -> list[Tensor]:
        # `flatten` numbers the elements alike in NCHW and NHWC.
        return [t.detach().flatten()[:: -(-t.numel() // _SAMPLED)].float() for t in self._tensors]

    @staticmethod
    def _norm(tensors: Iterable[Tensor]) -> Tensor:
        return sum(tensor.double().square().sum() for tensor in tensors)


def watched_steps(contender: Contender, device: torch.device) -> dict:
    """Take the steps of `measure.first_steps` and add "travel" to its result.

    That is (distance, direction) of each step as in `WeightWatch`, or None if a contender does not
    show its weights.
    """
    watch = WeightWatch(contender)
    found = first_steps(contender, device, watch.record)
    return found | {"travel": watch.travel()}


def sensitivity(case: Case, device: torch.device) -> dict:
    """Run a case's twin: {"losses", "travel", "skipped"}, for the row's `equality["twin"]`.

    This is for contenders of `TWINS`. It takes 20 steps of a temporary contender.
    """
    extent = max(rounding_unit(case.mode), _PERTURBATION)
    return watched_steps(make(replace(case, extra={"perturb": extent}), device), device)


def twin_if_it_fits(case: Case, device: torch.device) -> dict | None:
    """Return `sensitivity`, or None if memory is too small.

    It needs the memory of a second contender for its 20 steps, less the first one's cached memory.
    """
    release(device)
    try:
        return sensitivity(case, device)
    except (torch.OutOfMemoryError, MemoryError):
        return None
    finally:
        release(device)


def check(rows: Sequence) -> dict[str, tuple[bool, str]]:
    """Return for each row key whether the row computes the same as the others, and a reason.

    rows: `cases.BenchRow` of one model with "losses" in their `equality`. Each is compared
    with the plainest contender of its mode (of the nearest mode if it is alone). If its mode should
    learn like FP32, it is also compared with the plainest FP32 one.
    """
    trials = {row.key: _trial(row) for row in rows}
    # Other modes change the learning: they are compared with each other, not with FP32.
    as_fp32 = {row.case.mode for row in rows if learns_as_fp32(row.case)}
    verdicts = {}
    for key, trial in trials.items():
        references = [_plainest(trials.values(), trial.mode)]
        if references[0] is trial:
            references.append(_plainest(trials.values(), NEAREST_MODE.get(trial.mode)))
        if trial.mode in as_fp32:
            references.append(_plainest(trials.values(), "fp32"))
        twins = [_plainest(trials.values(), NEAREST_MODE.get(trial.mode, trial.mode))]
        held = [r for r in references if r is not None and r is not trial]
        found = [compare(reference, [trial], twins)[0] for reference in held]
        wrong = next((verdict for verdict in found if not verdict.ok), None)
        notes = "; ".join(dict.fromkeys(v.reason for v in found if v.reason))
        verdicts[key] = (wrong is None, notes if wrong is None else wrong.reason)
    return verdicts


def compare(
    reference: Trial, others: Iterable[Trial], twins: Iterable[Trial] = ()
) -> list[Verdict]:
    """Compare each of the others with the reference.

    twins: further trials whose twin shows the growth of rounding, in the coarsest compared format.
    Without a twin differences are only noted; only skipped updates and non-finite losses count as
    wrong.
    """
    return [_verdict(reference, other, [reference, *twins]) for other in others]


def _verdict(reference: Trial, other: Trial, twins: Iterable[Trial]) -> Verdict:
    difference = abs(other.losses[-1] - reference.losses[-1])
    unit = max(rounding_unit(reference.mode), rounding_unit(other.mode))
    allowed = Allowed(unit, [t for t in twins if t is not None])
    against = f"{reference.name} in {reference.mode}"
    note, compared = "", len(reference.losses)
    if reference.skipped != other.skipped:
        text = f"{other.skipped} updates skipped, {reference.skipped} by {against}"
        same_rule = reference.scale_per_optimizer == other.scale_per_optimizer
        if same_rule and reference.mode == other.mode:
            return Verdict(other.name, False, text, difference)
        # From the first skip on the weights differ: only the first loss can be compared.
        compared, note = 1, f"only the first loss compared: {text}"
    for finding in _differences(reference, other, allowed, compared):
        if allowed.is_known or not finding.measured:
            return Verdict(other.name, False, f"{finding.text} {against}", difference)
        note = note or f"{finding.text} {against}, but no twin was run to judge it"
    return Verdict(other.name, True, note, difference)


@dataclass(frozen=True, slots=True)
class _Difference:
    text: str
    measured: bool  # a number is off by too much; otherwise a fact differs that never may


def _differences(
    reference: Trial, other: Trial, allowed: Allowed, steps: int
) -> Iterator[_Difference]:
    watched = reference.travel is not None and other.travel is not None
    for step in range(steps):
        loss, expected = other.losses[step], reference.losses[step]
        if not math.isfinite(expected):
            if math.isfinite(loss):
                yield _Difference(f"loss {loss:.5g} at step {step + 1}, {expected} in", False)
            return
        apart, limit = abs(loss - expected) / max(abs(expected), 1e-30), allowed.loss(step)
        if not apart <= limit:
            text = f"loss off by {apart:.1e} at step {step + 1} ({limit:.1e} allowed) from"
            yield _Difference(text, math.isfinite(loss))
        if not watched:
            continue
        (distance, cosine), (distance_0, cosine_0) = other.travel[step], reference.travel[step]
        if distance_0 == 0:
            if distance != 0:
                yield _Difference(f"weights moved at step {step + 1}, not in", False)
            continue
        apart, limit = distance / distance_0 - 1, allowed.distance(step)
        if not abs(apart) <= limit:
            yield _Difference(
                f"weights travelled {100 * apart:+.2g} % further by step {step + 1} "
                f"({100 * limit:.2g} % allowed) than",
                True,
            )
        apart, limit = abs(cosine - cosine_0), allowed.cosine(step)
        if not apart <= limit:
            yield _Difference(
                f"direction of the weights off by {apart:.1e} at step {step + 1} "
                f"({limit:.1e} allowed) from",
                True,
            )


class Allowed:
    """The differences that rounding explains, by step; see the module docstring.

    unit: unit of the format. trials: those with a twin in this format or a coarser one count.
    Without any, is_known is False and only the floor is left.
    """

    def __init__(self, unit: float, trials: Iterable[Trial]):
        trials = [t for t in trials if t.twin is not None and rounding_unit(t.mode) >= unit]
        self.is_known = bool(trials)
        self._floor = max(unit, _FLOOR)
        columns = [_twin_differences(trial) for trial in trials]
        # [steps, 3]: the largest of all twins, then the largest so far.
        self._twin = [
            [max(values) for values in zip(*step, strict=True)]
            for step in zip(*columns, strict=True)
        ]
        for before, now in itertools.pairwise(self._twin):
            now[:] = map(max, before, now)

    def loss(self, step: int) -> float:
        return self._allowed(min(step + 1, len(self._twin) - 1), 0, self._floor)

    def distance(self, step: int) -> float:
        return self._allowed(step, 1, self._floor)

    def cosine(self, step: int) -> float:
        return self._allowed(step, 2, self._floor / 16)

    def _allowed(self, step: int, column: int, floor: float) -> float:
        if not self._twin:
            return floor
        return max(floor, _DRAWS * self._twin[step][column])


def _twin_differences(trial: Trial) -> list[tuple[float, float, float]]:
    """Return for each step the relative differences of loss and distance, and the cosine's."""
    rows = []
    for step, (loss, twin_loss) in enumerate(zip(trial.losses, trial.twin.losses, strict=True)):
        of_loss = abs(twin_loss - loss) / max(abs(loss), 1e-30)
        distance, cosine = trial.travel[step]
        twin_distance, twin_cosine = trial.twin.travel[step]
        of_distance = abs(twin_distance / distance - 1) if distance else 0.0
        row = (of_loss, of_distance, abs(twin_cosine - cosine))
        # Nothing can be judged where the twin is not finite.
        rows.append(tuple(x if math.isfinite(x) else math.inf for x in row))
    return rows


def _plainest(trials: Iterable[Trial], mode: str | None) -> Trial | None:
    of_mode = {trial.name: trial for trial in trials if trial.mode == mode}
    names = [*(name for name in _REFERENCES if name in of_mode), *of_mode]
    return of_mode[names[0]] if names else None


def _trial(row) -> Trial:
    gan = task_of(row.case.config().model) == "gan"
    per_optimizer = gan and row.case.contender in SCALES_PER_OPTIMIZER
    twin = row.equality.get("twin")
    return trial_of(row.case, row.equality, twin, scale_per_optimizer=per_optimizer)


def trial_of(case: Case, found: Mapping, twin: Mapping | None = None, **further) -> Trial:
    """Make a Trial from the result of `watched_steps` (or of a child)."""
    travel = found.get("travel")
    return Trial(
        case.contender,
        case.mode,
        tuple(float(loss) for loss in found["losses"]),  # of a file: "nan" and "inf" are strings
        found["skipped"],
        None if travel is None else tuple((d, c) for d, c in travel),
        twin=None if twin is None or travel is None else trial_of(case, twin),
        **further,
    )
