"""The cases of a bench and their results: plain data, no torch."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mprun.errors import BadInput

if TYPE_CHECKING:
    from mprun.config.schema import RunConfig

REFERENCES = ("fp32", "tf32")  # modes to which the others are held
EAGER = "mprun eager"
# Like `mprun model=...`; with the best settings for the model; without torch.compile.
OWN = ("mprun", "mprun+", EAGER)
_REFUSED = {
    "precision": "a bench compares modes; give --modes {value}",
    "scaler": "each mode is measured with its own scaler",
    "numerics": "probes are not part of a step's speed",
    "resume": "a bench starts from fresh weights",
    "output_dir": "give --out DIR",
    "name": "give --out DIR",
}


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to measure: a contender on a model in a precision mode."""

    label: str  # the model and its size: "resnet50 b256"
    overrides: tuple[str, ...]  # as on mprun's command line, without precision and scaler
    mode: str
    contender: str
    # Train on the source itself, loading included, not on batches on the device.
    real_data: bool = False
    config_dir: str | None = None
    extra: dict = field(default_factory=dict)  # further settings for the contender

    @property
    def key(self) -> str:
        """Return the name of the case in every file of a bench."""
        end = " | end to end" if self.real_data else ""
        return f"{self.label} | {self.mode} | {self.contender}{end}"

    def config(self, *more: str) -> "RunConfig":
        """Compose the configuration that mprun would run, with further overrides."""
        from mprun.config.compose import compose_config  # here: some children only pass a case on

        overrides = (*self.overrides, f"precision={self.mode}", *more)
        config = compose_config(overrides, self.config_dir).config
        if config.precision.switch:
            raise BadInput(
                f"--modes {self.mode}: this mode switches to another; a bench measures one "
                "mode at a time"
            )
        return config


@dataclass(frozen=True, slots=True)
class BenchGroup:
    """One model at one size."""

    label: str
    overrides: tuple[str, ...] = ()
    modes: tuple[str, ...] = ()  # the modes to measure, baselines first
    weight: float = 1.0  # its share of the time budget, in parts of the sum
    # The modes that also measure mprun's best settings; None: all.
    best_modes: tuple[str, ...] | None = None
    # Whether these include torch.compile, a minute or more per mode for a ResNet-50.
    compile: bool = True
    cases: tuple[Case, ...] = ()  # the cases from `Contest.plan`, in the order of their turns


@dataclass(slots=True)
class BenchRow:
    """The results of a case so far."""

    case: Case
    status: str = "not measured"  # measured, failed, refused, unequal or not measured
    # Why it has one of the last four, or why a measured case ended early.
    reason: str = "its turn did not come within the budget"
    kind: str | None = None  # kind of a failure, "memory" or "error"
    facts: dict = field(default_factory=dict)  # the child's answers to "build" and "prepare"
    # Losses of the first steps, and the answer of the check.
    equality: dict = field(default_factory=dict)
    warm_up: dict = field(default_factory=dict)
    # As from `measure.window`, each with its cohort and round.
    windows: list[dict] = field(default_factory=list)
    details: dict = field(default_factory=dict)
    limit: dict = field(default_factory=dict)  # limit of the roofline, or {"why_not": reason}

    @property
    def key(self) -> str:
        return self.case.key

    def failed(self, status: str, reason: str, kind: str | None = None) -> None:
        """Note why this case has no results, or no further ones."""
        if self.windows:
            self.reason = f"later: {reason}"
        else:
            self.status, self.reason, self.kind = status, reason, kind

    def add(self, window: dict) -> None:
        """Keep a window; with the first one the case counts as measured."""
        self.windows.append(window)
        self.status, self.reason = "measured", ""


def check_overrides(overrides: Iterable[str]) -> None:
    """Raise BadInput for a key that the bench sets."""
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        reason = _REFUSED.get(key.partition(".")[0])
        if reason is not None:
            raise BadInput(f"{override}: {reason.format(value=value)}")


def without_device(overrides: Iterable[str]) -> tuple[str, ...]:
    """Drop the device from the overrides: a contender gets the resolved one."""
    return tuple(o for o in overrides if not o.lstrip("+").startswith("device="))
