"""`mprun scaler-replay TRACE`: the result of every loss scaler on one overflow trace."""

import json
import math
import sys
from argparse import Namespace
from pathlib import Path

from mprun.cli.arguments import Arguments, names
from mprun.config.compose import compose_config, group_options, hydra_session
from mprun.config.fields import must_be, nearest
from mprun.config.registry import SCALERS
from mprun.config.schema import ScalerConfig
from mprun.errors import DONE, BadInput
from mprun.extensions.diagnosis.overflow_trace import OverflowTrace, read_trace_file
from mprun.record.console import markdown_table
from mprun.record.run_record import read_record

OWN = "this run's own"
MOST_CHANGES = 5000  # of one scaler in the JSON; logmax changes at every step
_WHAT = """\
What every loss scaler would have done on one overflow trace.

TRACE is a run directory, or a CSV or JSONL file with the columns

  step        ascending
  limit       largest loss scale that does not overflow at this step; or instead
  found_inf   0 or 1, with loss_scale: the scale it was seen at
  grad_max    largest unscaled gradient magnitude (optional; logmax needs it)

scaler.KEY=VALUE changes the scalers with this setting, as for a run.
"""
_MORE = """\
A run shows for each step whether it overflowed at the run's scale. For other scales the step's
neighbours decide: "assumed". If they decide nothing, the step counts as clean: "unknown". The
trace stays as it is: skipping other updates would have changed the training, which is not replayed.

Exit codes: 0 replayed, 2 bad input, 4 damaged record.
"""


def main(arguments: list[str]) -> int:
    """Entry point of the verb; returns the exit code."""
    given = _options(arguments)
    path, configs = given.trace, _configs(given.scalers, given.settings, given.config_dir)
    trace, own = _of_run(path) if path.is_dir() else (read_trace_file(path), None)
    if own is not None:
        configs = {OWN: own} | configs

    import torch

    from mprun.build.precision import build_loss_scale
    from mprun.extensions.diagnosis.scaler_replay import draw_replays, replay

    replays, left_out = {}, {}
    for name, config in configs.items():
        scale = build_loss_scale(config, torch.device("cpu"))
        if scale.needs_grad_max and trace.grad_max is None:
            left_out[name] = "needs the largest gradient of every step, which the trace lacks"
        else:
            replays[name] = replay(scale, trace)
    content = _as_json(path, trace, replays, left_out)
    if given.json:
        print(json.dumps(content, indent=1, allow_nan=False))
    else:
        _print(trace, replays, left_out)
    if not given.no_files and replays:
        given.out.mkdir(parents=True, exist_ok=True)
        figures = [given.out / "scaler-replay.png", given.out / "scaler-replay.svg"]
        draw_replays(replays, trace, figures)
        text = json.dumps(content, allow_nan=False)
        (given.out / "scaler-replay.json").write_text(text + "\n", encoding="utf-8")
        print(f"figure: {figures[0]}", file=sys.stderr)
    return DONE


def _options(arguments: list[str]) -> Namespace:
    """Parse the command line; its words become `trace` (a path) and `settings`."""
    parser = Arguments("scaler-replay", _WHAT, _MORE)
    add = parser.add_argument
    add("words", nargs="*", metavar="TRACE|scaler.KEY=VALUE", help="see above")
    every = f"options of the group scaler (all: {', '.join(scaler_names())}, and yours)"
    add("--scalers", type=names("--scalers"), metavar="NAME,NAME", help=every)
    add("--config-dir", metavar="DIR", help="your scalers, DIR/scaler/NAME.yaml")
    add("--json", action="store_true", help="print everything as JSON, no table")
    files = parser.add_mutually_exclusive_group()
    out = "folder for scaler-replay.png, .svg and .json (RUN/numerics, or the file's folder)"
    files.add_argument("--out", type=Path, metavar="DIR", help=out)
    files.add_argument("--no-files", action="store_true", help="print only")
    given = parser.parse(arguments)
    given.settings = [w for w in given.words if w.startswith("scaler.") and "=" in w]
    traces = [word for word in given.words if word not in given.settings]
    if len(traces) != 1:
        parser.error(f"needs one TRACE, got {' '.join(traces) or 'none'}")
    given.trace = Path(traces[0])
    if not given.trace.exists():
        raise BadInput(f"{given.trace}: no such file or directory")
    beside = given.trace / "numerics" if given.trace.is_dir() else given.trace.parent
    given.out = given.out or beside
    if given.out.exists() and not given.out.is_dir():
        raise BadInput(f"--out {given.out}: must be a folder")
    return given


def _of_run(directory: Path) -> tuple[OverflowTrace, ScalerConfig | None]:
    """Return the trace of a run directory, and the run's scaler if that skips."""
    if not (directory / "run.json").is_file():
        raise BadInput(f"{directory}: no run.json there; pass a run directory or a file")
    record = read_record(directory)

    import torch

    from mprun.build.precision import build_loss_scale
    from mprun.extensions.diagnosis.scaler_replay import run_trace

    try:
        config = ScalerConfig(**record["config"]["scaler"])
        own = build_loss_scale(config, torch.device("cpu"))
    except (KeyError, TypeError, ValueError):
        other = "recorded by another mprun (run.json: config.scaler)"
        raise BadInput(f"{directory}: {other}") from None
    return run_trace(directory, record, own), config if own.skips_nonfinite else None


def scaler_names(config_dir: str | None = None) -> list[str]:
    """List the options of the group scaler, including `config_dir`, without `none`."""
    with hydra_session(config_dir):
        return [name for name in group_options("scaler") if name != "none"]


def _configs(
    chosen: list[str] | None, settings: list[str], config_dir: str | None
) -> dict[str, ScalerConfig]:
    """Return the configuration of each scaler, checked as for a run, with its settings."""
    known = scaler_names(config_dir)
    chosen = known if chosen is None else chosen
    for name in chosen:
        if name not in known:
            raise BadInput(f"--scalers {name}: {must_be(name, known)}")
    if len(set(chosen)) < len(chosen):
        raise BadInput(f"--scalers {','.join(chosen)}: a name is there twice")
    configs: dict[str, ScalerConfig] = {}
    unused = list(settings)
    for name in chosen:
        config = compose_config([f"scaler={name}"], config_dir).config.scaler
        own = [text for text in settings if _key(text) in config.component.reads]
        if own:
            unused = [text for text in unused if text not in own]
            config = compose_config([f"scaler={name}", *own], config_dir).config.scaler
        if config.kind != "none":  # a user's option that skips nothing
            configs[name] = config
    for text in unused:
        keys = sorted({key for rule in SCALERS.values() for key in rule.reads})
        close = f"{nearest(_key(text), keys)} (allowed: {', '.join(keys)})"
        raise BadInput(f"{text}: no scaler here has such a setting{close}")
    return configs


def _key(text: str) -> str:
    return text.partition("=")[0].removeprefix("scaler.")


def _print(trace, replays: dict, left_out: dict[str, str]) -> None:
    header = ["scaler", "skipped", "first at steps", "final scale", "min", "max", "end"]
    print(markdown_table(header, [_row(name, found) for name, found in replays.items()]))
    notes = ". ".join(note[:1].upper() + note[1:] for note in trace.notes)
    print(f"\n{len(trace)} steps. {notes}.")
    partly = {name: found for name, found in replays.items() if found.known < found.steps}
    if partly:
        print("Decided by the step itself / assumed from other steps / unknown, taken as clean:")
    for name, found in partly.items():
        counts = (found.known, found.assumed, found.unknown)
        print(f"  {name}: " + " / ".join(f"{100 * count / found.steps:.4g} %" for count in counts))
    print("The trace is fixed: other skipped updates would have changed the training after them.")
    for name, reason in left_out.items():
        print(f"left out: {name} {reason}")


def _row(name: str, found) -> list[str]:
    first, count = [str(step) for step in found.skipped[:4].tolist()], len(found.skipped)
    of_them = f" ({found.skipped_known} known)" if found.skipped_known < count else ""
    scales = (found.final, found.lowest, found.highest)
    at = found.collapsed_at
    end = "whole trace" if at is None else f"collapsed at step {at}"
    first_steps = ", ".join([*first, "..."] if count > 4 else first)
    return [name, f"{count}{of_them}", first_steps, *map(_power, scales), end]


def _as_json(path: Path, trace, replays: dict, left_out: dict[str, str]) -> dict:
    scalers = {}
    for name, found in replays.items():
        scalers[name] = {
            "skipped": len(found.skipped),
            "skipped_known": found.skipped_known,
            "skip_steps": found.skipped.tolist(),
            "scale_changes": [list(change) for change in found.changes[:MOST_CHANGES]],
            "scale_changes_left_out": max(0, len(found.changes) - MOST_CHANGES),
            "final_scale": found.final,
            "min_scale": found.lowest,
            "max_scale": found.highest,
            "collapsed_at": found.collapsed_at,
            "steps": found.steps,
            "decided": {kind: getattr(found, kind) for kind in ("known", "assumed", "unknown")},
        }
    place = {"trace": str(path), "first_step": trace.first_step, "steps": len(trace)}
    return {**place, "notes": trace.notes, "scalers": scalers, "left_out": left_out}


def _power(value: float) -> str:
    mantissa, exponent = math.frexp(value)
    return f"2^{exponent - 1}" if mantissa == 0.5 else f"{value:.6g}"
