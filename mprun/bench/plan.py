"""From a command line to the cases to measure, in the order in which they are."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from mprun.bench.contender import Case
from mprun.bench.own import NAMES
from mprun.bench.suite import CPU_MODES, GPU_MODES, Entry, suite_of
from mprun.config.compose import compose_config
from mprun.errors import BadInput
from mprun.precision import MODES, get_policy, why_unsupported

REFERENCES = ("fp32", "tf32")  # modes to which the others are held
_REFUSED = {
    "precision": "a bench compares modes; give --modes {value}",
    "scaler": "each mode is measured with its own scaler",
    "numerics": "probes are not part of a step's speed",
    "resume": "a bench starts from fresh weights",
    "output_dir": "give --out DIR",
    "name": "give --out DIR",
}


@dataclass(frozen=True, slots=True)
class Group:
    """All cases of one model, mode by mode, mprun first. weight: share of the time budget."""

    label: str
    cases: tuple[Case, ...]
    weight: float


@dataclass(slots=True)
class Options:
    """The command line. contenders: names beside mprun's own; peers is None: none asked for."""

    overrides: list[str] = field(default_factory=list)
    modes: list[str] | None = None
    peers: list[str] | None = None
    budget_s: float = 540.0
    out: str | None = None
    windows: int = 5
    end_to_end: bool = False
    steps_per_window: int | None = None
    json: bool = False

    def as_dict(self) -> dict:
        return asdict(self)


def case_key(case: Case) -> str:
    """What names a case in every file of a bench."""
    return " | ".join((case.label, case.mode, case.contender)) + (
        " | end to end" if case.real_data else ""
    )


def plan(options: Options, device, peers: Sequence[str]) -> list[Group]:
    """The groups to measure; BadInput for what this device or configuration cannot run.

    device: a torch device. peers: names of contenders beside mprun, checked by the caller.
    """
    if options.overrides:
        entries = [_entry(options.overrides, options.modes, device)]
    else:
        entries = [_with_modes(entry, options.modes) for entry in suite_of(device.type)]
    entries = [entry for entry in entries if entry.modes]
    own = NAMES if device.type == "cuda" else NAMES[:1]
    names = list(dict.fromkeys((*own, *peers)))
    for mode in dict.fromkeys(mode for entry in entries for mode in entry.modes):
        reason = why_unsupported(get_policy(mode), device)
        if reason is not None:
            raise BadInput(f"--modes {mode}: {reason}")
    groups = []
    for entry in entries:
        for mode in entry.modes:
            compose_config([*entry.overrides, f"precision={mode}", f"device={device.type}"])
        cases = [
            Case(entry.label, entry.overrides, mode, name) for mode in entry.modes for name in names
        ]
        if options.end_to_end:
            cases += [
                Case(entry.label, entry.overrides, mode, "mprun", real_data=True)
                for mode in entry.modes
            ]
        groups.append(Group(entry.label, tuple(cases), entry.weight))
    return groups


def device_of(overrides: Sequence[str]) -> str:
    """The device that the overrides ask for; "auto" without one."""
    chosen = [o.partition("=")[2] for o in overrides if o.lstrip("+").startswith("device=")]
    return chosen[-1] if chosen else "auto"


def known_modes(names: Sequence[str]) -> list[str]:
    """The modes as given; BadInput for an unknown or missing one."""
    for name in names:
        if name not in MODES:
            raise BadInput(f"--modes {name}: unknown mode (allowed: {', '.join(MODES)})")
    if not names:
        raise BadInput(f"--modes: needs modes, separated by commas (allowed: {', '.join(MODES)})")
    return sorted(dict.fromkeys(names), key=lambda name: name not in REFERENCES)


def _entry(overrides: Sequence[str], modes: Sequence[str] | None, device) -> Entry:
    """The configuration of the command line as the one entry of a suite."""
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        reason = _REFUSED.get(key.partition(".")[0])
        if reason is not None:
            raise BadInput(f"{override}: {reason.format(value=value)}")
    config = compose_config(overrides).config
    kept = tuple(o for o in overrides if not o.lstrip("+").startswith("device="))
    if modes is None:
        default = GPU_MODES if device.type == "cuda" else CPU_MODES
        supported = [m for m in default if why_unsupported(get_policy(m), device) is None]
        modes = tuple(supported)
    size = getattr(config.data, "image_size", None)
    shape = f" {size} px" if size else ""
    return Entry(f"{config.model.name}{shape} b{config.data.batch_size}", kept, tuple(modes), 1.0)


def _with_modes(entry: Entry, modes: Sequence[str] | None) -> Entry:
    if modes is None:
        return entry
    return Entry(entry.label, entry.overrides, tuple(modes), entry.weight)
