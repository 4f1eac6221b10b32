"""`mprun bench --roofline`: the limit of a training step on a named GPU, without one."""

import json
from dataclasses import dataclass, field

from mprun.bench.roofline.ceilings import GPUS, Ceilings, ceilings_of, why_not
from mprun.bench.roofline.count import Counted, count
from mprun.bench.roofline.limits import limit
from mprun.bench.roofline.report import Line, as_dict, as_text
from mprun.config.overrides import parse_overrides
from mprun.config.rules import nearest
from mprun.config.schema import MODES
from mprun.errors import DONE, BadInput

_USAGE = f"""\
mprun bench --roofline [key=value ...] : what a training step can reach on a GPU, counted without it

Counts FLOPs and bytes of one step of the configuration, on tensors without values, and prints the
samples per second that a GPU cannot exceed, per precision mode, and the memory that it needs.

Options
  --gpu NAME         {", ".join(GPUS)} (H200)
  --mode A,B         any of the nine precision modes (default: those of fp32, tf32,
                     fp16_master_scaled, amp, bf16_master that the GPU has); or precision=MODE
                     among the keys
  --top [N]          also the N (10) most expensive kinds of operation of each mode
  --json             everything as JSON
  --config-dir DIR   options of your own, as for a run

Data are never read: sizes come from the configuration (data.image_size, model.num_classes, ...).
Exit codes: 0 done, 2 bad input, 130 interrupted.
"""
DEFAULT_MODES = ("fp32", "tf32", "fp16_master_scaled", "amp", "bf16_master")


@dataclass(slots=True)
class Options:
    """The command line."""

    overrides: list[str] = field(default_factory=list)
    gpu: str = "H200"
    mode: str | None = None
    top: int = 0
    json: bool = False
    config_dir: str | None = None


def main(arguments: list[str]) -> int:
    """Entry point, without the word --roofline; returns the exit code."""
    if "--help" in arguments or "-h" in arguments:
        print(_USAGE, end="")
        return DONE
    options = parse(arguments)
    ceilings = ceilings_of(options.gpu)
    lines, refused = roofline(options, ceilings)
    if options.json:
        print(json.dumps(as_dict(lines, ceilings, refused), indent=1, allow_nan=False))
    else:
        print(as_text(lines, ceilings, refused, options.top))
    return DONE


def roofline(options: Options, ceilings: Ceilings) -> tuple[list[Line], list[str]]:
    """A line per mode, and why modes of the default list are missing.

    BadInput for a mode that was asked for and that the GPU does not have.
    """
    lines, refused = [], []
    for mode in _modes(options):
        counted = count(options.overrides, mode, options.config_dir)
        reason = why_not(counted.policy, list(counted.overrides), ceilings)
        if reason is None:
            lines.append(Line(counted, limit(counted, ceilings)))
        elif options.mode is not None or mode is None:
            raise BadInput(f"precision={_name(counted)} --gpu {ceilings.name}: {reason}")
        else:
            refused.append(f"Without {mode}: {reason}.")
    if not lines:
        raise BadInput(f"--gpu {ceilings.name}: has none of the modes; {refused[0]}")
    return lines, refused


def parse(arguments: list[str]) -> Options:
    """The options of the command line; BadInput names what is wrong with one."""
    options, rest = Options(), list(arguments)
    while rest:
        argument = rest.pop(0)
        flag, given, value = argument.partition("=")
        if argument == "--json":
            options.json = True
        elif flag == "--top":
            if not given:
                value = rest.pop(0) if rest and rest[0].isdecimal() else "10"
            if not value.isdecimal() or not 1 <= int(value[:4]) <= 100:
                raise BadInput(f"--top {value}: must be a number from 1 to 100")
            options.top = int(value)
        elif flag in ("--gpu", "--mode", "--config-dir"):
            if not given:
                value = rest.pop(0) if rest and not rest[0].startswith("-") else ""
            if not value:
                raise BadInput(f"{flag}: needs a value (see mprun bench --roofline --help)")
            setattr(options, flag[2:].replace("-", "_"), value)
        elif argument.startswith("-"):
            known = ("--gpu", "--mode", "--top", "--json", "--config-dir")
            raise BadInput(
                f"bench --roofline {argument}: unknown option{nearest(flag, known)} "
                f"(allowed: {', '.join(known)})"
            )
        elif "=" not in argument and not argument.startswith("~"):
            raise BadInput(f"bench --roofline '{argument}': not of the form key=value")
        else:
            options.overrides.append(argument)
    _check_modes(options)
    return options


def _check_modes(options: Options) -> None:
    if options.mode is None:
        return
    if _sets_precision(options):
        raise BadInput(f"--mode {options.mode}: not together with precision=; give one of the two")
    for mode in options.mode.split(","):
        if mode not in MODES:
            raise BadInput(
                f"--mode {mode}: unknown{nearest(mode, MODES)} (allowed: {', '.join(MODES)})"
            )


def _modes(options: Options) -> list[str | None]:
    """Modes in the order asked for, each once; None: the one of the overrides."""
    if options.mode is not None:
        return list(dict.fromkeys(options.mode.split(",")))
    return [None] if _sets_precision(options) else list(DEFAULT_MODES)


def _sets_precision(options: Options) -> bool:
    return any(o.key_or_group == "precision" for o in parse_overrides(options.overrides))


def _name(counted: Counted) -> str:
    return counted.policy.name
