"""The command line of `mprun bench` as values; what is wrong with it is found without torch."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from mprun.config.schema import MODES
from mprun.errors import BadInput

LEAST_BUDGET_S = 20
_VALUES = (
    "--modes",
    "--peers",
    "--only",
    "--budget",
    "--out",
    "--windows",
    "--steps-per-window",
    "--card",
)
_FLAGS = ("--end-to-end", "--json", "--host", "--plain")
REFERENCES = ("fp32", "tf32")  # modes to which the others are held
# Keys that do not choose what is trained: the suite takes them too.
_OF_THE_SUITE = ("device", "threads", "seed", "deterministic", "cpu_half")
_REFUSED = {
    "precision": "a bench compares modes; give --modes {value}",
    "scaler": "each mode is measured with its own scaler",
    "numerics": "probes are not part of a step's speed",
    "resume": "a bench starts from fresh weights",
    "output_dir": "give --out DIR",
    "name": "give --out DIR",
}


@dataclass(slots=True)
class Options:
    """The command line. peers: names, ["all"], or None: mprun alone. only: starts of labels.

    plain: mprun with its defaults, not with its best settings as well. host: the host side alone,
    on a fake device; card_bytes: memory of the card that is asked about then.
    """

    overrides: list[str] = field(default_factory=list)
    modes: list[str] | None = None
    peers: list[str] | None = None
    only: list[str] | None = None
    budget_s: float = 540.0
    out: str | None = None
    windows: int = 5
    end_to_end: bool = False
    steps_per_window: int | None = None
    json: bool = False
    plain: bool = False
    host: bool = False
    card_bytes: int | None = None

    def as_dict(self) -> dict:
        return asdict(self)


def parse(arguments: list[str]) -> Options:
    """The options of the command line; BadInput names what is wrong with one."""
    options, rest = Options(), list(arguments)
    while rest:
        argument = rest.pop(0)
        flag, given, value = argument.partition("=")
        if argument in _FLAGS:
            setattr(options, argument[2:].replace("-", "_"), True)
        elif flag == "--peers":
            if not given:
                more = rest and not rest[0].startswith("-") and "=" not in rest[0]
                value = rest.pop(0) if more else "all"
            options.peers = _names("--peers", value)
        elif flag in _VALUES:
            if not given:
                value = rest.pop(0) if rest else ""
            _set(options, flag, value)
        elif argument.startswith("-"):
            allowed = ", ".join((*_VALUES, *_FLAGS, "--roofline"))
            raise BadInput(f"bench {argument}: unknown option (allowed: {allowed})")
        elif "=" in argument:
            options.overrides.append(argument)
        else:
            raise BadInput(f"bench {argument}: neither an option nor key=value")
    if options.card_bytes is not None and not options.host:
        raise BadInput("bench --card: goes with --host")
    if options.end_to_end and options.host:
        raise BadInput("bench --end-to-end: not with --host, which measures the step alone")
    return options


def _set(options: Options, flag: str, value: str) -> None:
    if flag == "--modes":
        options.modes = known_modes(_names(flag, value))
    elif flag == "--only":
        options.only = _names(flag, value)
    elif flag == "--out":
        if not value:
            raise BadInput("--out: needs a folder")
        options.out = value
    elif flag == "--budget":
        options.budget_s = _seconds(value)
    elif flag == "--card":
        options.card_bytes = _card(value)
    else:
        most = 10_000 if flag == "--steps-per-window" else 1000
        if not value.isdecimal() or not 1 <= int(value[:9]) <= most:
            raise BadInput(f"{flag} {value}: must be a number from 1 to {most}")
        setattr(options, flag[2:].replace("-", "_"), int(value))


def _names(flag: str, value: str) -> list[str]:
    names = [name.strip() for name in value.split(",") if name.strip()]
    if not names:
        raise BadInput(f"{flag} {value}: needs names, separated by commas")
    return names


def _card(value: str) -> int:
    try:
        gib = float(value)
    except ValueError:
        gib = math.nan
    if not 0.5 <= gib <= 4096:
        raise BadInput(f"--card {value}: must be the card's memory in GiB, 0.5 to 4096")
    return int(gib * 2**30)


def _seconds(value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not LEAST_BUDGET_S <= seconds <= 86_400:
        raise BadInput(f"--budget {value}: must be seconds from {LEAST_BUDGET_S} to 86400")
    return seconds


def device_of(overrides: Sequence[str]) -> str:
    """The device that the overrides ask for; "auto" without one."""
    chosen = [o.partition("=")[2] for o in overrides if o.lstrip("+").startswith("device=")]
    return chosen[-1] if chosen else "auto"


def asks_for_the_suite(overrides: Sequence[str]) -> bool:
    """Whether nothing on the command line chooses a configuration."""
    return all(o.lstrip("+~").partition("=")[0] in _OF_THE_SUITE for o in overrides)


def check_overrides(overrides: Sequence[str]) -> None:
    """BadInput for a key that a bench decides itself."""
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        reason = _REFUSED.get(key.partition(".")[0])
        if reason is not None:
            raise BadInput(f"{override}: {reason.format(value=value)}")


def known_modes(names: Sequence[str]) -> list[str]:
    """The modes as given; BadInput for an unknown or missing one."""
    for name in names:
        if name not in MODES:
            raise BadInput(f"--modes {name}: unknown mode (allowed: {', '.join(MODES)})")
    if not names:
        raise BadInput(f"--modes: needs modes, separated by commas (allowed: {', '.join(MODES)})")
    return sorted(dict.fromkeys(names), key=lambda name: name not in REFERENCES)
