"""The modes of a run whose mode changes: `precision.switch`, resolved, checked and told.

    precision.switch=[{at: 0.85, to: bf16_master}]                        # the last 15 % of steps
    precision.switch=[{at: 800, to: {matmul: {high_precision: [output]}}}]  # one product in BF16

Composing a configuration replaces `to` by all values of that mode: its record needs no file.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mprun.config.keys import wanted
from mprun.config.option_files import Mode, mode_values
from mprun.config.registry import MODES
from mprun.config.schema import PrecisionConfig, RunConfig, SwitchConfig
from mprun.errors import BadInput
from mprun.record.keys import flat
from mprun.spelling import became, must_be

_KEY = "precision.switch"


def resolve(config: RunConfig, known: Mapping[str, Mode]) -> None:
    """Replace each `to` by the values of its mode; known: the modes by name.

    Raises:
        BadInput: A mode or a key is unknown, or a mode needs a loss scale that the run lacks.
    """
    before = config.precision
    for one in config.precision.switch:
        given = one.to
        if isinstance(given, str):
            if given not in known:
                raise BadInput(f"{_KEY}: to={given}: {must_be(given, known, 'precision')}")
            scaler = known[given].scaler
            if scaler != "none" and config.scaler.kind == "none":
                raise BadInput(
                    f"{_KEY}: to={given}: needs a loss scale from the start of the run; choose "
                    f"scaler={scaler}, and the whole run uses this loss scale"
                )
            own = MODES[given].config if given in MODES else PrecisionConfig
            plain = own(name=given, overrides=before.overrides)
            before = _with(plain, known[given].values)
        elif isinstance(given, dict) and given:
            before = _with(before, flat(given), mode_values(before).keys())
        else:
            must = "must be a mode, or {KEY: VALUE} of the mode before"
            raise BadInput(f"{_KEY}: to={given}: {must}")
        one.to = _plain(before)


def _plain(precision: PrecisionConfig) -> dict[str, Any]:
    values = asdict(precision)
    return {key: value for key, value in values.items() if key not in ("switch", "overrides")}


def _with(
    precision: PrecisionConfig, values: Mapping[str, Any], allowed: Any = None
) -> PrecisionConfig:
    """Return a mode with other values, by dotted key; allowed: the keys that may be given."""
    node = OmegaConf.structured(replace(precision, switch=[]))
    for key, value in values.items():
        if allowed is not None and key not in allowed:
            now = became(f"precision.{key}")
            raise BadInput(f"{_KEY}: to={{{key}: ...}}: {now or 'no key of a mode'}")
        try:
            OmegaConf.update(node, key, value)
        except OmegaConfBaseException:
            line = f"{_KEY}: to={{{key}: {value}}}"
            raise BadInput(f"{line}: must be {wanted(f'precision.{key}')}") from None
    found: Any = OmegaConf.to_object(node)
    return found


def modes_in_turn(precision: PrecisionConfig) -> list[PrecisionConfig]:
    """Return the mode of a run's start and those that it switches to; they switch to none."""
    found = [replace(precision, switch=[])]
    for one in precision.switch:
        values = {key: value for key, value in one.to.items() if key != "name"}
        name = one.to.get("name", precision.name)
        own = MODES[name].config if name in MODES else PrecisionConfig
        found.append(_with(own(name=name, overrides=precision.overrides), flat(values)))
    return found


def in_mode(config: RunConfig, precision: PrecisionConfig) -> RunConfig:
    """Return the configuration of a run that is in one mode throughout."""
    return replace(config, precision=precision)


def mode_at(config: RunConfig, index: int, steps: int) -> PrecisionConfig:
    """Return the mode in which step `index` (from 0) of a run of `steps` is taken."""
    places = steps_before(config.precision.switch, steps)
    return modes_in_turn(config.precision)[sum(place <= index for place in places)]


def steps_before(switches: Sequence[SwitchConfig], steps: int) -> list[int]:
    """Return after how many steps of a run of `steps` each switch comes; BadInput if it cannot."""
    for line in _out_of_order(switches, steps):
        raise BadInput(line)
    return [_step(one.at, steps) for one in switches]


def _step(at: float, steps: int) -> int:
    return at if isinstance(at, int) else round(at * steps)


def of_switches(config: RunConfig) -> Iterator[str]:
    """Yield what is wrong with the places of switches; those of epochs are checked when built."""
    switches, steps = config.precision.switch, config.train.steps
    for one in switches:
        is_share = type(one.at) is float and 0 < one.at < 1
        if not (is_share or (type(one.at) is int and one.at >= 1)):
            must = "must be a share of the run, above 0 and below 1, or a step from 1 on"
            yield f"{_KEY}: at={one.at}: {must}"
            return
        if not isinstance(one.to, dict):
            yield f"{_KEY}: to={one.to}: must hold the values of a mode"
            return
    if steps is not None:
        yield from _out_of_order(switches, steps)
    modes = modes_in_turn(config.precision) if switches else []
    for before, after in zip(modes, modes[1:], strict=False):
        if before == after:
            yield f"{_KEY}: to={after.name}: is the mode before it"


def _out_of_order(switches: Sequence[SwitchConfig], steps: int) -> Iterator[str]:
    last = 0
    for one in switches:
        step = _step(one.at, steps)
        if not 1 <= step < steps:
            yield f"{_KEY}: at={one.at}: is step {step} of {steps}, must be one of 1 to {steps - 1}"
        if last and step <= last:
            yield f"{_KEY}: at={one.at}: is step {step}, must be after that before it, {last}"
        last = step


def told(precision: PrecisionConfig) -> list[tuple[str, str]]:
    """Return name and place of each later mode: ("bf16_master", "from 85 %").

    A mode that changes some values of the one before is named by these, too.
    """
    first, *later = modes_in_turn(precision)
    found = []
    for one, mode in zip(precision.switch, later, strict=True):
        first = first if mode.name == first.name else mode
        own, other = mode_values(mode), mode_values(first)
        changed = [f"{key}={value}" for key, value in own.items() if value != other[key]]
        at = f"after step {one.at}" if isinstance(one.at, int) else f"from {100 * one.at:g} %"
        found.append(("+".join([mode.name, *changed]), at))
    return found
