"""What `mprun advise` finds out, as data: the text and --json are made of it."""

import math
from dataclasses import asdict, dataclass, field

from mprun.numerics.gradient_range import ScaleRange
from mprun.numerics.shapes import IdleShape

GROWTH_INTERVAL = 2000  # of torch, apex and NVIDIA's guide: at most one skip in so many updates


@dataclass(frozen=True, slots=True)
class Worst:
    """The module with the largest share, and that share (0 to 1)."""

    module: str
    share: float


@dataclass(frozen=True, slots=True)
class MasterWeights:
    """Lost updates by format ("fp16", "bf16"): of all weights, and of the worst module.

    share, worst: parts of the non-zero updates, over all probes. needed: a share in FP16, in
    total or of a module with 1,000 non-zero updates, is above `threshold`.
    """

    needed: bool
    threshold: float
    share: dict[str, float]
    worst: dict[str, Worst | None]
    zero_share: float


@dataclass(frozen=True, slots=True)
class Underflow:
    """One kind of gradients. Shares are parts of the non-zero values; true zeros are apart.

    lost, lost_sum: share of values, and of the sum of absolute values, that FP16 makes zero at
    scale 1. lost_recommended, lost_sum_recommended: the same at the recommended scale. lowest: log2
    of the smallest scale that keeps `lost` at or below the share asked for.
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
    """needed: at scale 1 a kind loses more than the share, or something overflows.

    range: None if no gradient was different from zero. limited_by: the module whose gradients
    overflow first, and their largest value at scale 1.
    """

    needed: bool
    range: ScaleRange | None
    kinds: list[Underflow]
    limited_by: tuple[str, str, float] | None  # kind, module, largest value
    growth_interval: int = GROWTH_INTERVAL


@dataclass(frozen=True, slots=True)
class KeepFp32:
    """A module that FP16 cannot hold.

    patterns: for precision.overrides; they also take in what reads the values, because an FP32
    module hands on its result in FP16. needs_amp: this takes autocast, where FP32 results stay.
    """

    module: str
    reason: str
    patterns: tuple[str, ...]
    needs_amp: bool = False


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the advice rests on.

    steps: probed and used. left_out: probed, but their update was skipped. of_steps: length of
    the whole run. lr: smallest and largest rate of the probed steps; schedule_lr: of the run.
    formats: dtypes of the gradients measured. problems: what makes the advice doubtful.
    """

    steps: list[int]
    left_out: list[int]
    of_steps: int
    lr: tuple[float, float]
    schedule_lr: tuple[float, float]
    formats: list[str]
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Advice:
    """What FP16 needs.

    overrides: the advised mode, as one would type it behind `mprun`: `static` where a loss scale is
    needed, else a mode without one. static, dynamic: the mode with either scaler, empty without a
    gradient. unscaled: the same mode with scale 1 and nothing kept in FP32.
    """

    evidence: Evidence
    master_weights: MasterWeights
    loss_scaling: LossScaling
    keep_fp32: list[KeepFp32]
    largest_activation: tuple[str, float] | None
    notes: list[str]
    idle_shapes: list[IdleShape]
    overrides: list[str]
    static: list[str]
    dynamic: list[str]
    unscaled: list[str]
    command: str = ""
    run: str = ""
    check: list[dict] | None = None

    def as_dict(self) -> dict:
        """As plain values, non-finite numbers as text."""
        content = _plain(asdict(self))
        scales = self.loss_scaling.range
        if scales is not None:
            content["loss_scaling"]["range"] |= {"top": scales.top, "fits": scales.fits}
        return content


def _plain(value):
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
