"""Derive from a run's probes what FP16 needs: master weights, a loss scale, modules in FP32.

Micikevicius et al., arXiv 1710.03740, section 3: master weights (3.1) where updates round away in
FP16 weights, loss scaling (3.2) where gradients underflow, FP32 where values exceed FP16's range.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from mprun.config.schema import OptimConfig, RunConfig
from mprun.errors import BadInput
from mprun.extensions.diagnosis.advised_regions import (
    KeepFp32,
    Key,
    Layout,
    Narrow,
    Part,
    Row,
    modules_in_fp32,
    operations_in_fp32,
    size_of,
    values_of,
)
from mprun.extensions.diagnosis.casts import CastAdvice
from mprun.extensions.diagnosis.far_results import Far
from mprun.extensions.diagnosis.trials import Mixed, Tried
from mprun.numerics.exponent_shares import (
    FORMATS,
    FP16_LOST,
    AppliedUpdates,
    LostUpdates,
    merged,
    ratio,
)
from mprun.numerics.loss_scale_range import Gradients, ScaleRange, scale_range
from mprun.numerics.probe_record import (
    GRADIENT_KINDS,
    ProbeRecord,
    tensors_of,
)
from mprun.numerics.trace import LOSS

# A lost update is lost again at the next step as long as weight, gradient and rate stay similar.
# Such weights stand still, and no later step averages that out. If one weight in a hundred loses
# its update, master weights count as needed.
LOST_THRESHOLD = 0.01
# Smaller modules count only in the total: there, single weights would decide.
FEWEST_UPDATES = 1000
# Powers of two between the recommended scale and the first overflow seen. Probes do not see the
# gradients of later steps, nor those inside a module (an LSTM's gates).
SCALE_HEADROOM = 2
_NORM_INPUT = 2.0**8  # its square is the first power of two beyond FP16
_EPS = {"adam": 1e-8, "adamw": 1e-8, "adagrad": 1e-10, "rmsprop": 1e-8}
GROWTH_INTERVAL = 2000  # of torch, apex and NVIDIA's guide: at most one skip in so many updates
ByKind = dict[str, dict[Key, Gradients]]


@dataclass(frozen=True, slots=True)
class Worst:
    """The module with the largest share, and that share (0 to 1)."""

    module: str
    share: float


@dataclass(frozen=True, slots=True)
class MasterWeights:
    """The lost updates by format ("fp16", "bf16"): over all weights, and of the worst module.

    share, worst: parts of the non-zero updates, over all probes. needed: in FP16 the share of the
    total, or of a module with 1,000 non-zero updates, is above `threshold`; or 16-bit weights took
    a smaller part of their updates than 1 - threshold. It is None if the run stored its weights
    with stochastic rounding or a compensation: single updates then say nothing; or if every update
    was zero. applied: part of
    the wanted updates that 16-bit weights took; None if weights are updated in FP32.
    """

    needed: bool | None
    threshold: float
    share: dict[str, float]
    worst: dict[str, Worst | None]
    zero_share: float
    applied: float | None = None


@dataclass(frozen=True, slots=True)
class Underflow:
    """One kind of gradients. Shares are parts of the non-zero values; true zeros are separate.

    lost, lost_sum: share of values, and of the sum of absolute values, that FP16 makes zero at
    scale 1; ..._recommended: at the recommended scale. lowest: log2 of the smallest scale that
    keeps `lost` at or below the requested share.
    """

    kind: str
    zero_share: float
    lost: float
    lost_sum: float
    worst: Worst | None
    lost_recommended: float
    lost_sum_recommended: float
    worst_recommended: Worst | None
    lowest: int | None


@dataclass(frozen=True, slots=True)
class LossScaling:
    """The loss scaling that FP16 needs.

    needed: at scale 1 a kind loses more than the share, or something overflows. range: None if all
    gradients were zero. limited_by: the module whose gradients overflow first, and their largest
    value at scale 1.
    """

    needed: bool
    range: ScaleRange | None
    kinds: list[Underflow]
    limited_by: tuple[str, str, float] | None  # kind, module, largest value
    growth_interval: int = GROWTH_INTERVAL


@dataclass(frozen=True, slots=True)
class Evidence:
    """The basis of the advice.

    left_out: probed steps whose update was skipped. of_steps: length of the whole run. lr: smallest
    and largest rate of the probed steps; schedule_lr: the same over the run. formats: dtypes of the
    measured gradients. problems: reasons to doubt the advice.
    """

    steps: list[int]
    left_out: list[int]
    of_steps: int
    lr: tuple[float, float]
    schedule_lr: tuple[float, float]
    formats: list[str]
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A mode to try, as typed after `mprun`, and why."""

    overrides: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Advice:
    """The needs of FP16, and the losses of a mode's casts.

    candidates: modes in the order in which to try them, the advised one first. overrides: the
    advised mode, as typed after `mprun`: `static` if a loss scale is needed, else a mode without
    one. static, dynamic: the mode with either scaler, empty without a gradient.
    unscaled: the same mode with scale 1 and nothing kept in FP32. casts: None if no mode with
    products was asked about. tried: candidates as they were trained, beside FP32's loss; the last
    one holds if `command` is not empty. mixed: None unless asked for. underflow: of a module's
    output gradients at scale 1, the part of the nonzero ones. far: mode -> the first results of
    its first step that are far from FP32's.
    """

    evidence: Evidence
    master_weights: MasterWeights
    loss_scaling: LossScaling
    keep_fp32: list[KeepFp32]
    largest_activation: tuple[str, float] | None
    notes: list[str]
    overrides: list[str]
    static: list[str]
    dynamic: list[str]
    unscaled: list[str]
    command: str = ""
    run: str = ""
    check: dict | None = None
    casts: CastAdvice | None = None
    candidates: list[Candidate] = field(default_factory=list)
    tried: list[Tried] = field(default_factory=list)
    mixed: Mixed | None = None
    underflow: dict[str, float] = field(default_factory=dict)
    far: dict[str, Far] = field(default_factory=dict)

    def as_dict(self) -> dict:
        content = asdict(replace(self, casts=None))
        content["casts"] = self.casts and self.casts.as_dict()
        scales = self.loss_scaling.range
        if scales is not None:
            content["loss_scaling"]["range"] |= {"top": scales.top, "fits": scales.fits}
        return content


def advise(
    records: Sequence[ProbeRecord],
    layout: Layout,
    config: RunConfig,
    rates: Sequence[float],
    *,
    share: float,
    narrow: Narrow | None = None,
) -> Advice:
    """Derive the advice from the probes of one run; BadInput if none can be used.

    rates: the run's learning rate by update. share: underflow share to stay at or below. narrow:
    says what a mode computes in 16 bits; it is asked only about operations that need FP32 there.
    """
    used = [r for r in records if not r.skipped and any(o.tensors for o in r.learners.values())]
    if not used:
        raise BadInput("advice needs a probe of a step without a skip; train with numerics=probes")
    gradients = {kind: _gradients(used, kind, layout) for kind in GRADIENT_KINDS}
    kept, keep, largest = _kept(used, layout, narrow)
    scaling = _loss_scaling(gradients, share, layout, _between(used, layout, kept))
    probed = [rates[min(r.step, len(rates)) - 1] for r in used]
    dtypes = (own.dtype for kind in GRADIENT_KINDS for _, own, _ in tensors_of(used, kind))
    formats = sorted({name for dtype in dtypes for name in dtype.split("+")})
    evidence = Evidence(
        steps=[r.step for r in used],
        left_out=[r.step for r in records if r.skipped],
        of_steps=len(rates),
        lr=(min(probed), max(probed)),
        schedule_lr=(min(rates), max(rates)),
        formats=formats,
        problems=_problems(formats, gradients, layout),
    )
    masters, notes = _master_weights(used, layout), notes_on_naive(used, layout, config.optim)
    modes = _modes(scaling, keep)
    found = Advice(evidence, masters, scaling, keep, largest, notes, *modes)
    own = gradients["activation_gradients"]
    shares = {layout.named(key): gradient.underflow(0) for key, gradient in own.items()}
    found = replace(found, underflow={k: v for k, v in shares.items() if not math.isnan(v)})
    return replace(found, candidates=_candidates(found, used, layout, narrow))


def _kept(
    used: Sequence[ProbeRecord], layout: Layout, narrow: Narrow | None
) -> tuple[list[Part], list[KeepFp32], tuple[str, float] | None]:
    """Return the parts to keep in FP32 around operations, all that is kept, largest activation."""
    between = operations_in_fp32(used, layout, None)
    modules, largest = modules_in_fp32(used, layout, [part for part, _ in between])
    if between and narrow is not None:
        mode = "amp" if any(one.needs_amp for one in modules) else "fp16_master_scaled"
        between = operations_in_fp32(used, layout, narrow((f"precision={mode}",)))
        modules, largest = modules_in_fp32(used, layout, [part for part, _ in between])
    # What an output shows is not said again of the operation that made it.
    whole = [pattern for one in modules for pattern in one.patterns]
    between = [
        (part, one)
        for part, one in between
        if not any(f"{part.module}.".startswith(f"{name}.") for name in whole)
    ]
    return [part for part, _ in between], [*modules, *(one for _, one in between)], largest


def _between(
    used: Sequence[ProbeRecord], layout: Layout, kept: Sequence[Part]
) -> dict[Row, Gradients]:
    """Return the gradients of operations between modules that a mode computes in 16 bits."""
    found: dict[Row, Gradients] = {}
    for record in used:
        for label, learner in record.learners.items():
            scales = [record.log2_loss_scale[scale] for scale in learner.loss_scales] or [0.0]
            for place, own in learner.operations.items():
                if place.phase != "backward" or place.module == LOSS:
                    continue
                is_wide = (label, place.module) in layout.fixed
                if not is_wide and not any(part.holds(label, place.module) for part in kept):
                    found.setdefault((label, place), Gradients()).add(own.stats, scales)
    return found


def _candidates(
    found: Advice, used: Sequence[ProbeRecord], layout: Layout, narrow: Narrow | None
) -> list[Candidate]:
    """Return the modes to try: the advised one, larger parts of it in FP32, amp, BF16."""
    start, keep = [one for one in found.overrides if ".overrides." not in one], found.keep_fp32
    modes = {tuple(found.overrides): "the advice", tuple(found.dynamic): "the scale finds itself"}
    for step in range(max((len(one.wider) for one in keep), default=0)):
        parts = [
            one.wider[min(step, len(one.wider) - 1)] if one.wider else one.patterns for one in keep
        ]
        wider = [*start, *in_fp32(pattern for part in parts for pattern in part)]
        modes.setdefault(tuple(wider), "a larger part in FP32")
    in_amp = keep
    if keep and narrow is not None:
        wide = operations_in_fp32(used, layout, narrow(("precision=amp",)))
        in_amp = [one for one in keep if not one.wider] + [one for _, one in wide]
    amp = ["precision=amp", *in_fp32(p for one in in_amp for p in one.patterns)]
    modes.setdefault(tuple(amp), "autocast computes more in FP32")
    modes.setdefault(("precision=bf16_master",), "BF16 has FP32's range")
    return [Candidate(mode, why) for mode, why in modes.items() if mode]


def notes_on_naive(used: Sequence[ProbeRecord], layout: Layout, optim: OptimConfig) -> list[str]:
    """Return notes on fp16_naive alone, with FP16 norm layers, optimizer state and updates."""
    notes = []
    eps = optim.eps if optim.eps is not None else _EPS.get(optim.name)
    if optim.name in _EPS and eps is not None and 0 < eps <= 2.0**FP16_LOST:
        notes.append(
            f"fp16_naive: eps={eps:g} of {optim.name} is 0 in FP16 (2^-25 and below): 0/0 is NaN"
        )
    sizes = {key: size_of(stats) for key, stats in values_of(used, "activations").items()}
    large = [
        (sizes[learner, before], layout.named((learner, name)))
        for learner, leaves in layout.leaves.items()
        for before, name in zip(leaves, leaves[1:], strict=False)
        if (learner, name) in layout.norms and sizes.get((learner, before), 0.0) >= _NORM_INPUT
    ]
    if large:
        size, name = max(large)
        others = f" and {len(large) - 1} more norm layers" if len(large) > 1 else ""
        notes.append(
            f"fp16_naive: {name}{others} may overflow in the variance: its input reaches "
            f"{size:.4g}, and 256 squared is beyond 65504"
        )
    return notes


def _master_weights(used: Sequence[ProbeRecord], layout: Layout) -> MasterWeights:
    by_module: dict[str, LostUpdates] = {}
    applied = AppliedUpdates()
    for learner, own in (pair for record in used for pair in record.learners.items()):
        applied = applied.merge(own.total_applied())
        for module, lost in own.lost_updates.items():
            name = layout.named((learner, module))
            by_module[name] = by_module.get(name, LostUpdates()).merge(lost)
    total = merged(by_module.values()) or LostUpdates()
    large = {name: lost for name, lost in by_module.items() if lost.nonzero >= FEWEST_UPDATES}
    worst = {f: _worst((name, lost.share(f)) for name, lost in large.items()) for f in FORMATS}
    shares = {format: total.share(format) for format in FORMATS}
    highest = max(shares["fp16"], worst["fp16"].share if worst["fp16"] else 0.0)
    zero = ratio(total.zero, total.total)
    bias = applied.ratio if applied.wanted else None
    # Updates lost by 16-bit weights are among the zeros; the meter sees them.
    needed: bool | None = highest > LOST_THRESHOLD if total.nonzero else None
    if bias is not None:
        needed = (bool(needed) or bias < 1 - LOST_THRESHOLD) if total.total else None
    return MasterWeights(needed, LOST_THRESHOLD, shares, worst, zero, bias)


def _gradients(used: Sequence[ProbeRecord], kind: str, layout: Layout) -> dict[Key, Gradients]:
    """Collect gradients by (learner, module); leave out weights that all modes keep in FP32."""
    found: dict[Key, Gradients] = {}
    for key, stats, scales in tensors_of(used, kind):
        if kind != "weight_gradients" or key not in layout.norms:
            found.setdefault(key, Gradients()).add(stats, scales)
    return found


def _loss_scaling(
    gradients: ByKind, share: float, layout: Layout, between: Mapping[Row, Gradients]
) -> LossScaling:
    totals = {kind: Gradients() for kind in gradients}
    overflows: list[tuple[int, str, str, float]] = []
    for kind, by_module in gradients.items():
        for key, own in by_module.items():
            totals[kind].merge(own.parts)
            if (highest := own.highest()) is not None:
                overflows.append((highest, kind, layout.named(key), own.largest))
    for (learner, place), own in between.items():
        if (highest := own.highest()) is not None:
            where = layout.named((learner, str(place)))
            overflows.append((highest, "gradients", where, own.largest))
    found = scale_range(totals.values(), share, SCALE_HEADROOM, between.values())

    def lost(kind: str, k: int) -> tuple[float, float, Worst | None]:
        """Return a kind's lost share of values and of their sum at 2^k, and the worst module."""
        total = totals[kind]
        large = {key: g for key, g in gradients[kind].items() if g.nonzero >= FEWEST_UPDATES}
        worst = _worst((layout.named(key), own.underflow(k)) for key, own in large.items())
        return total.underflow(k), total.underflow_of_sum(k), worst

    best = 0 if found is None else found.recommended
    kinds = [
        Underflow(kind, own.zero_share, *lost(kind, 0), *lost(kind, best), own.lowest(share))
        for kind, own in totals.items()
    ]
    needed = found is not None and (found.lowest > 0 or found.highest < 0)
    return LossScaling(needed, found, kinds, min(overflows)[1:] if overflows else None)


def _modes(
    scaling: LossScaling, keep: list[KeepFp32]
) -> tuple[list[str], list[str], list[str], list[str]]:
    """Return `overrides`, `static`, `dynamic` and `unscaled` of `Advice`."""
    kept = in_fp32(pattern for one in keep for pattern in one.patterns)
    amp = any(one.needs_amp for one in keep)
    unscaled = ["precision=amp", "scaler=none"] if amp else ["precision=fp16_master"]
    if scaling.range is None:
        return [*unscaled, *kept], [], [], unscaled
    scaled = "precision=amp" if amp else "precision=fp16_master_scaled"
    power = scaling.range.recommended
    scale = f"{2.0**power:.17g}"
    static = [scaled, "scaler=static", f"scaler.scale={scale}", *kept]
    growth = f"scaler.growth_interval={scaling.growth_interval}"
    dynamic = [scaled, "scaler=dynamic", f"scaler.init_scale={scale}", growth]
    if power > 20:  # the ceiling of scaler=dynamic is 2^24
        dynamic.append(f"scaler.max_scale={2.0 ** (power + 4):.17g}")
    if power < -10:  # its floor is 2^-14
        dynamic.append(f"scaler.min_scale={2.0 ** (power - 4):.17g}")
    return static if scaling.needed else [*unscaled, *kept], static, [*dynamic, *kept], unscaled


def in_fp32(patterns: Iterable[str]) -> list[str]:
    """Return the overrides that compute these modules in FP32, each once."""
    return [f"precision.overrides.{pattern}=fp32" for pattern in dict.fromkeys(patterns)]


def _problems(formats: list[str], gradients: ByKind, layout: Layout) -> list[str]:
    problems = []
    narrow = [name for name in formats if name != "fp32"]
    if narrow:
        problems.append(
            f"measured in {', '.join(narrow)}: gradients that had already become zero "
            "count as zeros; advise on the configuration itself measures in FP32"
        )
    for kind, by_module in gradients.items():
        total = merged(stats for own in by_module.values() for stats in own.parts.values())
        if total is not None and (zeros := total.zeros_after(narrow)):
            problems.append(f"{words(kind)}: {zeros}")
        bad = [layout.named(key) for key, own in by_module.items() if not own.finite]
        if bad:
            problems.append(f"{words(kind)} of {', '.join(bad[:3])} are not finite at any scale")
    return problems


def _worst(shares: Iterable[tuple[str, float]]) -> Worst | None:
    return Worst(*found) if (found := max(shares, key=lambda one: one[1], default=None)) else None


def words(kind: str) -> str:
    return kind.replace("_", " ")
