"""`mprun advise --check`: brief runs with the advice and without it, beside FP32.

`mprun advise`: what FP16 needs for this configuration, from probes of a few FP32 steps.
"""

import json
import math
import shlex
import sys
from collections.abc import Iterable
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from mprun.build import Built
from mprun.compare.findings import Row
from mprun.compare.grouping import group_runs
from mprun.compare.load import load_runs
from mprun.compare.verdict import assess
from mprun.config.compose import Composed, compose_config, config_from_record
from mprun.config.schema import MAX_STEPS, RunConfig
from mprun.config.user_code import (
    NOTHING,
    Vouched,
    check_vouched,
    is_factory,
    recorded_factories,
    vouched,
)
from mprun.errors import DIVERGED, DONE, BadInput, MprunError
from mprun.numerics.advice import advise
from mprun.numerics.advice_findings import Advice
from mprun.numerics.advice_text import as_text, check_as_text
from mprun.numerics.probe_record import read_probes
from mprun.numerics.shapes import idle_shapes, layout
from mprun.record.metrics import read_metrics
from mprun.record.run_directory import (
    claim,
    claim_exactly,
    config_hash,
    locked,
    read_config,
    read_json,
    run_name,
    write_config,
    write_json,
)
from mprun.sweep import sweep
from mprun.sweep.plan import plan
from mprun.training.run import attempt, prepare, resolve_device

SEEDS = (0, 1, 2)  # no verdict below 3


def check(
    advice: Advice, base: list[str], folder: Path, steps: int, config_dir: str | None
) -> dict:
    """Train FP32, the advised static scale, and scale 1, each with 3 seeds; what came of it.

    base: overrides without precision, scaler, seed and length. folder: of the runs, one process
    each; they are left there for `mprun compare`.
    """
    common = [*base, f"seed={','.join(map(str, SEEDS))}", f"train.steps={steps}"]
    common.append(f"output_root='{folder}'")
    directories = []
    arms = {"advised scale": advice.static or advice.overrides, "scale 1": advice.unscaled}
    for overrides in (["precision=fp32", "scaler=none"], *arms.values()):
        given = [*common, *overrides]
        with redirect_stdout(sys.stderr):
            code = sweep(given, config_dir)
        directories += [cell.directory for cell in plan(given, config_dir).cells]
        if code != DONE:
            raise MprunError(f"advise --check: a run did not end (exit code {code}), see {folder}")
    runs, _ = load_runs(directories)
    protos, refused = group_runs(runs)
    if not protos:
        raise MprunError(f"advise --check: {refused[0]}")
    group = assess(protos[0])
    mean = group.baseline.mean
    found = []
    for name, overrides in arms.items():
        row = next(row for row in group.rows if _is_of(row, overrides))
        difference = None
        if mean and row.mean is not None:
            difference = 100 * (row.mean - mean) / abs(mean)
        found.append(
            {
                "name": name,
                "overrides": " ".join(overrides),
                "mean": row.mean,
                "difference_percent": difference,
                "skipped": row.skipped,
                "diverged": sum(outcome.diverged is not None for outcome in row.outcomes),
                "verdict": row.verdict.sentence,
            }
        )
    return {
        "folder": str(folder),
        "seeds": len(SEEDS),
        "steps": steps,
        "metric": group.metric,
        "baseline": mean,
        "arms": found,
    }


def _is_of(row: Row, overrides: list[str]) -> bool:
    scaled = "scaler=static" in overrides
    return scaled == (row.arm.runs[0].scaler == "static")


_USAGE = """\
mprun advise [key=value ...] : what does FP16 need to train this configuration?
mprun advise RUN             : the same from the probes of a run (numerics=on); data.factory=...
                               and model.factory=... again, where the run has code of your own

Trains the first steps in FP32 with probes, in a run directory of its own (advise-...), and prints
whether master weights matter, whether loss scaling matters and which scales suit, which modules
should stay in FP32, which sizes leave Tensor Cores idle, and the command line to use it all.

Options
  --steps N          FP32 steps to train (60; at most the configuration's own)
  --every K          probe the steps divisible by K (a twelfth of the steps)
  --share X          underflow share of gradients that is accepted (0.001)
  --check            also train 3 seeds of N steps with the advice, with scale 1, and in FP32
  --json             everything as JSON
  --config-dir DIR   options of your own, as for a run

Exit codes: 0 done, 2 bad input, 3 FP32 itself diverged, 4 damaged record, 130 interrupted.
"""
STEPS, PROBES, SHARE = 60, 12, 0.001
_FP32 = ("precision=fp32", "scaler=none")


@dataclass(slots=True)
class Options:
    """The command line."""

    overrides: list[str] = field(default_factory=list)
    run: str | None = None
    steps: int | None = None
    every: int | None = None
    share: float = SHARE
    check: bool = False
    json: bool = False
    config_dir: str | None = None


def main(arguments: list[str]) -> int:
    """Entry point of the verb; returns the exit code."""
    if "--help" in arguments or "-h" in arguments:
        print(_USAGE, end="")
        return DONE
    options = parse(arguments)
    given = vouched(options.overrides, options.config_dir)
    if options.run is None:
        base = _own(options.overrides)
        directory, code = _measure(options, base)
        if code != DONE:
            if code == DIVERGED:
                print("mprun: advise: FP32 itself diverged; fix the recipe first", file=sys.stderr)
            print(f"run: {directory}")
            return code
    else:
        directory = Path(options.run)
        base = _own(_read(directory)[0].get("overrides", []))
    advice = advise_run(directory, share=options.share, given=given)
    if options.check:
        advice = replace(advice, check=_check(options, given, advice, base, directory))
    if options.json:
        print(json.dumps(advice.as_dict(), indent=1, allow_nan=False))
        return DONE
    lines = as_text(advice) + (check_as_text(advice.check) if advice.check else [])
    print("\n".join([*lines, f"run: {directory}"]))
    return DONE


def advise_run(directory: Path, *, share: float = SHARE, given: Vouched = NOTHING) -> Advice:
    """Advice from the probes of the run in `directory`; share: accepted underflow share.

    given: the names of the user's own code that may be imported; the run's must be among them.
    Raises BadInput for a directory that holds no run or no probe, Damaged for a broken file.
    """
    record, plain = _read(directory)
    probes = read_probes(directory)
    if not probes:
        raise BadInput(f"advise {directory}: no probes there; train it with numerics=on")
    built, config = _rebuilt(plain, given)
    try:
        advice = advise(
            probes,
            layout(built.task),
            idle_shapes(built.task, config),
            config,
            built.rate.rates,
            share=share,
        )
    except BadInput as error:
        raise BadInput(f"advise {directory}: {error}") from None
    command = shlex.join(["mprun", *_own(record.get("overrides", [])), *advice.overrides])
    notes = [*advice.notes, *_unstable(directory)]
    return replace(advice, command=command, run=str(directory), notes=notes)


def _unstable(directory: Path) -> list[str]:
    """A note where the measured loss rose, so that the advice fits a recipe that fails anyway."""
    path = directory / "metrics.jsonl"
    losses = [row["loss"] for row in read_metrics(path) if row["split"] == "train"]
    if len(losses) < 2 or losses[-1] <= 1.5 * abs(losses[0]):
        return []
    return [
        f"the loss rose from {losses[0]:.4g} to {losses[-1]:.4g} over the measured steps: the "
        "advice fits an unstable recipe; mend that first"
    ]


def parse(arguments: list[str]) -> Options:
    """The options of the command line; BadInput names what is wrong with one."""
    options, rest = Options(), list(arguments)
    while rest:
        argument = rest.pop(0)
        flag, given, value = argument.partition("=")
        if argument in ("--check", "--json"):
            setattr(options, argument[2:], True)
        elif flag in ("--steps", "--every", "--share", "--config-dir"):
            if not given:
                value = rest.pop(0) if rest else ""
            name = flag[2:].replace("-", "_")
            setattr(options, name, _checked(flag, value))
        elif argument.startswith("-"):
            allowed = "--steps, --every, --share, --check, --json, --config-dir"
            raise BadInput(f"advise {argument}: unknown option (allowed: {allowed})")
        elif "=" in argument and not Path(argument).is_dir():
            options.overrides.append(argument)
        elif options.run is not None:
            raise BadInput(f"advise {argument}: a second run directory, takes one")
        else:
            options.run = argument
    others = [override for override in options.overrides if not is_factory(override)]
    if options.run is not None and others:
        raise BadInput(f"advise {options.run} {others[0]}: a run has its configuration")
    if options.run is not None and options.every is not None:
        raise BadInput(f"--every {options.every}: the probes of {options.run} are what they are")
    if options.run is not None and options.steps is not None and not options.check:
        raise BadInput(f"--steps {options.steps}: of a run only with --check")
    return options


def _checked(flag: str, value: str):
    if flag == "--config-dir":
        if not value:
            raise BadInput("--config-dir: needs a folder")
        return value
    if flag == "--share":
        try:
            share = float(value)
        except ValueError:
            share = math.nan
        if not 0 <= share < 1:
            raise BadInput(f"--share {value}: must be a part from 0 to below 1")
        return share
    if not value.isdecimal() or not 1 <= int(value[:9]) <= MAX_STEPS:
        raise BadInput(f"{flag} {value}: must be a number of steps from 1 to {MAX_STEPS}")
    return int(value)


def _measure(options: Options, base: list[str]) -> tuple[Path, int]:
    """Train the first steps in FP32 with probes; (run directory, exit code)."""
    for override in options.overrides:
        if _key(override) == "resume":
            raise BadInput(f"{override}: not with advise; give the run directory alone")
    place = [override for override in options.overrides if _key(override) == "output_dir"]
    dropped = [o for o in options.overrides if o not in base and o not in place]
    if dropped:
        print(f"mprun: advise measures in FP32, without {' '.join(dropped)}", file=sys.stderr)
    compose_config(options.overrides, options.config_dir)  # what is dropped must be right too
    composed = compose_config([*base, *place, *_FP32, "numerics=on"], options.config_dir)
    config = composed.config
    built = prepare(config, resolve_device(config.device), config.threads)
    whole = built.steps
    # The first steps of the whole run: a shorter train.steps would squeeze the schedule into them.
    built.steps = min(options.steps or STEPS, whole)
    config.numerics.every = options.every or max(1, built.steps // PROBES)
    if config.numerics.every > built.steps:
        raise BadInput(f"--every {config.numerics.every}: must be at most the {built.steps} steps")
    plain = composed.as_dict()
    directory = _claimed(config, plain, composed)
    with locked(directory):
        write_config(directory, plain)
        record = {
            "status": "running",
            "choices": composed.choices,
            "overrides": base,
            "config_hash": config_hash(plain),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "attempts": 0,
        }
        with redirect_stdout(sys.stderr):
            code = attempt(directory, config, built, record, first_step=0, skipped=0)
        if code == DONE and built.steps < whole:
            # A part of a run is no outcome: `mprun compare` leaves it out.
            record = read_json(directory / "run.json")
            cause = f"advise took the first {built.steps} of {whole} steps"
            write_json(directory / "run.json", record | {"status": "preempted", "cause": cause})
    return directory, code


def _claimed(config: RunConfig, plain: dict, composed: Composed) -> Path:
    if config.output_dir is not None:
        return claim_exactly(Path(config.output_dir))
    overrides = tuple(o for o in composed.overrides if o not in _FP32)
    folder, name = run_name(plain, composed.choices, overrides)
    return claim(Path(config.output_root) / folder, f"advise-{name}")


def _check(
    options: Options, given: Vouched, advice: Advice, base: list[str], directory: Path
) -> dict:
    pass

    # Of a run these are the overrides of its record, which may name code like its configuration.
    named = recorded_factories(compose_config(base, options.config_dir).as_dict())
    check_vouched(named, given)
    own = {"seed", "train.steps", "train.epochs", "output_root", "name"}
    common = [override for override in base if _key(override) not in own]
    if options.run is None:
        steps = read_json(directory / "run.json")["steps"]
    else:
        steps = options.steps or STEPS
    return check(advice, common, directory / "check", steps, options.config_dir)


def _own(overrides: Iterable[str]) -> list[str]:
    """The overrides that say what is trained, not in which precision and where it is written."""
    groups = ("precision", "scaler", "numerics", "output_dir", "resume")
    return [o for o in overrides if _key(o).partition(".")[0] not in groups]


def _key(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]


def _read(directory: Path) -> tuple[dict, dict]:
    """(run.json, configuration) of a run directory."""
    if not (directory / "run.json").is_file():
        raise BadInput(f"advise {directory}: no run.json there; give a run directory or key=value")
    return read_json(directory / "run.json"), read_config(directory)


def _rebuilt(plain: dict, given: Vouched) -> tuple[Built, RunConfig]:
    """The run's model, in FP32 and on a CPU, for its sizes and learning rates."""
    config = config_from_record(plain | {"device": "cpu", "numerics": {}} | _fp32(), given)
    return prepare(config, torch.device("cpu"), config.threads), config


def _fp32() -> dict:
    fp32 = compose_config(_FP32).as_dict()
    return {group: fp32[group] for group in ("precision", "scaler")}
