"""`mprun scaler-replay TRACE`: what every loss scaler would have done on one overflow trace."""

import argparse
import json
import math
import sys
from pathlib import Path

from mprun.config.check import SCALER_FIELDS
from mprun.config.compose import compose_config
from mprun.config.rules import nearest
from mprun.config.schema import ScalerConfig
from mprun.errors import DONE, BadInput
from mprun.record.console import markdown_table

SCALERS = (
    "torch",
    "apex",
    "apex_fp16",
    "deepspeed",
    "megatron",
    "fairseq",
    "keras",
    "openseq2seq",
    "static",
    "dynamic",
    "logmax",
)
OWN = "this run's own"
MOST_CHANGES = 5000  # of one scaler in the JSON; logmax changes at every step
_USAGE = f"""\
mprun scaler-replay TRACE [scaler.KEY=VALUE...] : what every loss scaler would have done

TRACE is a run directory, or a CSV or JSONL file with the columns
  step        ascending
  limit       largest loss scale that does not overflow at this step; or instead of it
  found_inf   0 or 1, with loss_scale: the scale it was seen at
  grad_max    largest unscaled gradient magnitude (optional; logmax needs it)
scaler.KEY=VALUE changes the scalers that have this setting, as for a run.

Options
  --scalers NAME[,NAME...]   default: {",".join(SCALERS)}
  --json                     print everything as JSON instead of the table
  --out DIR                  folder for scaler-replay.png, .svg and .json
                             (default: RUN/numerics, or the folder of the file)
  --no-files                 print only

A run shows of each step whether it overflowed at the run's own scale. For other scales a step's
neighbours are asked: "assumed". Where they say nothing the step is taken as clean: "unknown". The
trace stays as it is: skipping other updates would have changed the training, which is not replayed.

Exit codes: 0 replayed, 2 bad input, 4 damaged record.
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise BadInput(f"scaler-replay: {message} (see mprun scaler-replay --help)")


def main(arguments: list[str]) -> int:
    """Entry point of the verb; returns the exit code."""
    if "--help" in arguments or "-h" in arguments:
        print(_USAGE, end="")
        return DONE
    given = _parse(arguments)
    path = Path(given.trace)
    if not path.exists():
        raise BadInput(f"{path}: no such file or directory")
    out = Path(given.out) if given.out else (path / "numerics" if path.is_dir() else path.parent)
    if out.exists() and not out.is_dir():
        raise BadInput(f"--out {out}: must be a folder")
    configs = _configs(given.names, given.settings)

    import torch

    from mprun.build.precision import build_loss_scale
    from mprun.numerics.scaler_replay import replay

    trace, own = _read(path)
    if own is not None:
        configs = {OWN: own} | configs
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
        _write(out, trace, replays, content)
    return DONE


def _read(path: Path):
    """(trace, the run's own scaler configuration or None)."""
    if not path.is_dir():
        from mprun.numerics.overflow_trace import read_trace_file

        return read_trace_file(path), None
    from mprun.build.precision import build_loss_scale
    from mprun.numerics.overflow_trace_run import run_trace
    from mprun.record.run_directory import read_json

    if not (path / "run.json").is_file():
        raise BadInput(f"{path}: no run.json there; give a run directory or a file")
    record = read_json(path / "run.json")
    try:
        own = ScalerConfig(**record["config"]["scaler"])
        scale = build_loss_scale(own, _cpu())
    except (KeyError, TypeError, ValueError):
        raise BadInput(f"{path}: recorded by another mprun (run.json: config.scaler)") from None
    return run_trace(path, record, scale), own if scale.skips_nonfinite else None


def _cpu():
    import torch

    return torch.device("cpu")


def _configs(names: list[str], settings: list[str]) -> dict[str, ScalerConfig]:
    """The configuration of each scaler, checked as for a run, with the settings that it has."""
    configs, used = {}, set()
    for name in names:
        configs[name] = compose_config([f"scaler={name}"]).config.scaler
        own = [text for text in settings if _key(text) in SCALER_FIELDS[configs[name].kind]]
        if own:
            used.update(own)
            configs[name] = compose_config([f"scaler={name}", *own]).config.scaler
    for text in settings:
        if text not in used:
            known = sorted(set().union(*SCALER_FIELDS.values()))
            raise BadInput(
                f"{text}: no scaler here has such a setting{nearest(_key(text), known)} "
                f"(allowed: {', '.join(known)})"
            )
    return configs


def _key(text: str) -> str:
    return text.partition("=")[0].removeprefix("scaler.")


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = _Parser(prog="mprun scaler-replay", add_help=False, allow_abbrev=False)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--scalers")
    parser.add_argument("--out")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--no-files", action="store_true")
    given = parser.parse_intermixed_args(arguments)
    given.settings = [word for word in given.words if word.startswith("scaler.") and "=" in word]
    traces = [word for word in given.words if word not in given.settings]
    if len(traces) != 1:
        raise BadInput(
            f"scaler-replay: needs one TRACE, got {' '.join(traces) or 'none'} "
            "(see mprun scaler-replay --help)"
        )
    given.trace = traces[0]
    if given.out is not None and given.no_files:
        raise BadInput("--out, --no-files: give one of the two")
    given.names = list(SCALERS) if given.scalers is None else given.scalers.split(",")
    for name in given.names:
        if name not in SCALERS:
            raise BadInput(
                f"--scalers {name}: must be among {', '.join(SCALERS)}{nearest(name, SCALERS)}"
            )
    if len(set(given.names)) < len(given.names):
        raise BadInput(f"--scalers {given.scalers}: a name is there twice")
    return given


def _print(trace, replays: dict, left_out: dict[str, str]) -> None:
    header = ["scaler", "skipped", "first at steps", "final scale", "min", "max", "end"]
    rows = []
    for name, found in replays.items():
        first = ", ".join(str(step) for step in found.skipped[:4].tolist())
        rows.append(
            [
                name,
                f"{len(found.skipped)}"
                + (
                    f" ({found.skipped_known} known)"
                    if found.skipped_known < len(found.skipped)
                    else ""
                ),
                first + (", ..." if len(found.skipped) > 4 else ""),
                _power(found.final),
                _power(found.lowest),
                _power(found.highest),
                "whole trace"
                if found.collapsed_at is None
                else f"collapsed at step {found.collapsed_at}",
            ]
        )
    print(markdown_table(header, rows))
    print(f"\n{len(trace)} steps. {'. '.join(_sentence(note) for note in trace.notes)}.")
    parts = {
        name: [100 * count / found.steps for count in (found.known, found.assumed, found.unknown)]
        for name, found in replays.items()
        if found.known < found.steps
    }
    if parts:
        print("Decided by the step itself / assumed from other steps / unknown, taken as clean:")
        for name, shares in parts.items():
            print(f"  {name}: " + " / ".join(f"{share:.4g} %" for share in shares))
    print("The trace is fixed: other skipped updates would have changed the training after them.")
    for name, reason in left_out.items():
        print(f"left out: {name} {reason}")


def _sentence(note: str) -> str:
    return note[:1].upper() + note[1:]


def _as_json(path: Path, trace, replays: dict, left_out: dict[str, str]) -> dict:
    return {
        "trace": str(path),
        "first_step": trace.first_step,
        "steps": len(trace),
        "notes": trace.notes,
        "scalers": {
            name: {
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
                "decided": {
                    "known": found.known,
                    "assumed": found.assumed,
                    "unknown": found.unknown,
                },
            }
            for name, found in replays.items()
        },
        "left_out": left_out,
    }


def _write(out: Path, trace, replays: dict, content: dict) -> None:
    from mprun.numerics.scaler_replay import draw_replays

    out.mkdir(parents=True, exist_ok=True)
    paths = [out / "scaler-replay.png", out / "scaler-replay.svg"]
    draw_replays(replays, trace, paths)
    text = json.dumps(content, allow_nan=False)
    (out / "scaler-replay.json").write_text(text + "\n", encoding="utf-8")
    print(f"figure: {paths[0]}", file=sys.stderr)


def _power(value: float) -> str:
    mantissa, exponent = math.frexp(value)
    if mantissa == 0.5:
        return f"2^{exponent - 1}"
    return f"{value:.6g}"
