"""`mprun advise`: measure which loss scale and which parts in FP32 a network needs."""

import math
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from mprun.cli.arguments import Arguments, number
from mprun.config.compose import compose_config, config_from_record, only_in_script
from mprun.config.keys import PLACES, current
from mprun.config.option_files import modes
from mprun.config.overrides import without
from mprun.config.schema import MAX_STEPS
from mprun.config.trust import NOTHING, Vouched, check_vouched, outside, vouched
from mprun.errors import DIVERGED, DONE, BadInput, MprunError
from mprun.extensions.diagnosis.commands import (
    SECONDS,
    add_seconds,
    announce,
    command,
    note,
    page,
    page_width,
    record_of,
    refused,
    say_seconds,
    split_words,
    tell_switch,
    unfinished,
)
from mprun.numerics.probe_record import read_probes
from mprun.record.metrics import read_metrics
from mprun.record.run_directory import locked, read_config
from mprun.record.run_record import Record, read_record

if TYPE_CHECKING:
    from mprun.assembly import Built
    from mprun.extensions.diagnosis.advice import Advice
    from mprun.extensions.diagnosis.advised_regions import Row
    from mprun.extensions.diagnosis.casts import CastAdvice
    from mprun.extensions.diagnosis.trials import BesideFp32, Mixed, Tried

STEPS, PROBES, SHARE = 60, 12, 0.001
SEEDS = (0, 1, 2)  # for --check: no verdict with fewer than 3
_FP32 = ("precision=fp32", "scaler=none")
_WHAT = """\
  mprun advise [key=value ...]  what does FP16 need to train this configuration?
  mprun advise RUN              the same from the probes of a run (numerics=probes); repeat data.factory=... and model.factory=... if the run has your own code

Trains the first steps in FP32 with probes, in a separate run directory (advise-...). It prints
whether master weights matter, whether loss scaling matters and which scales suit, and which modules
should stay in FP32. The command line to use it all is printed once it has trained the first 20
steps beside FP32; what fails there is replaced by the next mode. Beside precision=fp8_tensorwise, nvfp4 or
another mode of products it also measures, per layer, what that mode's casts lose.
"""  # noqa: E501 - the help page breaks lines
_MORE = "Exit codes: 0 done, 2 bad input, 3 FP32 diverged, 4 damaged record, 130 interrupted."


def main(arguments: list[str]) -> int:
    options = _options(arguments)
    given = vouched(options.overrides, options.config_dir)
    casts = None
    if options.run is None:
        announce("advise: trains a few steps in FP32 first")
        base = _own(options.overrides)
        directory, code, casts = _measure(options, base)
        if code != DONE:
            if code == DIVERGED:
                note("advise: FP32 itself diverged; fix the recipe first")
            print(f"run: {directory}")
            return code
    else:
        directory = options.run
        base = _own(unfinished(_recorded(directory)).get("overrides", []))
        announce(f"advise: builds the model of {directory} and reads its probes")
    if options.check:
        _check_base(options, given, base)
    advice = advise_run(
        directory,
        share=options.share,
        given=given,
        config_dir=options.config_dir,
        seconds=SECONDS if options.seconds is None else options.seconds,
        casts=casts,
        asked=_asked(options),
        bound=None if options.budget is None else options.budget / 100,
    )
    if advice.mixed is not None:
        advice = replace(advice, mixed=_as_mode(advice.mixed, options, base))
    if options.check:
        advice = replace(advice, check=_check(options, given, advice, base, directory))
    from mprun.extensions.diagnosis.advice_report import as_text

    content, lines = advice.as_dict(), as_text(advice, page_width())
    return page(content, [*lines, f"run: {directory}"], options.json)


def _options(arguments: list[str]) -> Namespace:
    """Parse the command line; its words become `overrides` and `run` (a path or None)."""

    def steps(flag: str):
        return number(flag, 1, MAX_STEPS, "a number of steps", whole=True)

    parser = Arguments("advise", _WHAT, _MORE)
    add = parser.add_argument
    add("words", nargs="*", metavar="RUN|KEY=VALUE", help="a run, or keys of a run to train")
    most = f"FP32 steps to train ({STEPS}; at most the configuration's number)"
    add("--steps", type=steps("--steps"), metavar="N", help=most)
    probed = "probe the steps divisible by K (a twelfth of the steps)"
    add("--every", type=steps("--every"), metavar="K", help=probed)
    part = number("--share", 0, math.nextafter(1, 0), "a part below 1,")
    accepted = f"accepted underflow share of gradients ({SHARE:g})"
    add("--share", type=part, default=SHARE, metavar="X", help=accepted)
    more = "also train 3 seeds of N steps with the advice, with scale 1, and in FP32"
    add("--check", action="store_true", help=more)
    add_seconds(parser)
    bound = "search a mixed assignment of the mode that ends at most X %% above FP32's loss"
    add("--budget", type=number("--budget", 0, 1000, "a percentage"), metavar="X", help=bound)
    add("--write", metavar="DIR", help="with --budget: write a mode file to DIR/precision")
    add("--json", action="store_true", help="print all results as JSON")
    add("--config-dir", metavar="DIR", help="folder with your own option files")
    options = parser.parse(arguments)
    split_words(options, parser)
    if options.write is not None:
        _check_write(options)
    if options.run is None:
        return options
    if options.every is not None:
        asked = f"--every {options.every}"
        raise BadInput(f"{asked}: is not allowed with {options.run}, which has probes")
    if options.steps is not None and not options.check:
        raise BadInput(f"--steps {options.steps}: is allowed with a run only if you pass --check")
    return options


def _check_write(options: Namespace) -> None:
    """Refuse, before anything is trained, what could not be written, or not be used together."""
    asked = f"--write {options.write}"
    if options.budget is None:
        raise BadInput(f"{asked}: is only allowed with --budget X")
    if options.config_dir not in (None, options.write):
        raise BadInput(f"{asked}: must be the same folder as --config-dir, {options.config_dir}")
    if (path := _mode_path(options)).exists():
        raise BadInput(f"{asked}: {path} exists already and is not overwritten")


def advise_run(
    directory: Path,
    *,
    share: float = SHARE,
    given: Vouched = NOTHING,
    config_dir: str | None = None,
    seconds: float = SECONDS,
    casts: "CastAdvice | None" = None,
    asked: tuple[str, ...] = (),
    bound: float | None = None,
) -> "Advice":
    """Return advice from the probes of the run in `directory`; BadInput if it has none.

    Its model is built again, in FP32 and on a CPU, for its modules and learning rates, and then in
    each mode that is tried. share: accepted underflow share. given: code that may be imported and
    paths that may be used, including the run's. config_dir: the user's options, for the command
    lines to use the advice. seconds: for the trials. casts: those of a mode that was asked for.
    asked: the words of a mode, or (). bound: within which a mixed one of it must end, or None.
    """
    record, plain = _recorded(directory), current(read_config(directory))
    if "script" in record:
        raise refused("advise", directory, record, only_in_script(record))
    probes = read_probes(directory)
    if not probes:
        why, numerics = "train it with numerics=probes", plain.get("numerics") or {}
        if numerics.get("probes"):
            why = f"step {numerics['every']} would have the first"
        raise refused("advise", directory, record, f"the run has no probes: {why}")
    tell_switch(config_from_record(plain, given).precision)
    matmul = plain["precision"].get("matmul") or {}
    formats = [matmul.get(operand) for operand in ("input", "weight", "grad_output")]
    fp32 = compose_config(_FP32).as_dict()
    plain |= {"device": "cpu", "numerics": {}}
    plain |= {group: fp32[group] for group in ("precision", "scaler")}
    config = config_from_record(plain, given)

    import torch

    from mprun.extensions.diagnosis.advice import advise
    from mprun.extensions.diagnosis.advised_regions import layout, seen_in_16_bits
    from mprun.extensions.diagnosis.changes_of_mode import in_turn
    from mprun.extensions.diagnosis.far_results import far_in_modes
    from mprun.extensions.diagnosis.mixed_assignment import assignment
    from mprun.extensions.diagnosis.trials import BesideFp32, Budget
    from mprun.training.run import prepare

    cpu = torch.device("cpu")
    built = prepare(config, cpu, config.threads)

    def build(mode: tuple[str, ...], place: torch.device = cpu) -> "Built":
        composed = compose_config(mode, config_dir, files=False).as_dict()
        own = plain | {group: composed[group] for group in ("precision", "scaler")}
        return prepare(config_from_record(own, given), place, config.threads)

    def narrow(mode: tuple[str, ...]) -> "dict[Row, bool]":
        return seen_in_16_bits(build(mode))

    rates, parts = built.rate.rates, layout(built.task)
    try:
        advice = advise(probes, parts, config, rates, share=share, narrow=narrow)
    except BadInput as error:
        raise BadInput(f"advise {directory}: {error}") from None
    if formats[0] is not None:
        names = "/".join(dict.fromkeys(str(name).upper() for name in formats))
        what = f"linear layers multiplied in {names}: values that it flushed were gone before the"
        advice.evidence.problems.append(f"{what} count")
    losses = [r["loss"] for r in read_metrics(directory / "metrics.jsonl") if r["split"] == "train"]
    if len(losses) > 1 and losses[-1] > 1.5 * abs(losses[0]):
        rose = f"the loss rose from {losses[0]:.4g} to {losses[-1]:.4g} over the measured steps"
        advice.notes.append(f"{rose}: the advice fits an unstable recipe; fix that first")
    on_gpu = record.get("environment", {}).get("device") == "cuda" and torch.cuda.is_available()
    place = torch.device("cuda" if on_gpu else "cpu")
    own = _own(record.get("overrides", []))
    say_seconds("advise", seconds)
    budget = Budget(seconds)
    modes = (() if casts else asked), (advice.overrides[0],), ("precision=bf16_master",)
    far = far_in_modes(build, modes, budget)
    advice = replace(advice, run=str(directory), casts=casts, far=far)
    trials = BesideFp32(lambda mode: build(mode, place), budget)

    def mix(within: float) -> "Mixed":
        return assignment(advice, asked, parts, build(_FP32), trials, within)

    advice = replace(advice, mixed=None if bound is None else mix(bound))
    return _tried(advice, trials, in_turn(parts), mix, partial(command, config_dir), own)


def _tried(
    advice: "Advice",
    trials: "BesideFp32",
    parts: Iterable[dict],
    mix: "Callable[[float], Mixed]",
    line: Callable[[list[str]], str],
    base: list[str],
) -> "Advice":
    """Try the modes that follow from the advice; return it with those that hold in its commands.

    parts: of the network, each in FP32. mix: searches layers to leave out, within a bound. line:
    the command of overrides. base: those of the run.
    """
    from mprun.extensions.diagnosis.casts import cast_changes
    from mprun.extensions.diagnosis.interventions import typed_words
    from mprun.extensions.diagnosis.trials import FP32, PART_OF_FP32

    tried: list[Tried] = []
    casts = advice.casts
    if casts is not None:
        forms = [tuple(casts.overrides)] if casts.overrides else []
        changes = cast_changes(casts.matmul, casts.losses)
        forms += [(*casts.mode, *typed_words(change)) for change in changes]
        tried += trials.until_one_holds(forms)
        held = _held(tried)
        if not held:  # no measure of casts shows it: layers leave until the loss is right
            found = advice.mixed or mix(PART_OF_FP32)
            tried += [] if advice.mixed else found.tried
            held = [*found.overrides]
        use = line([*base, *held]) if held else ""
        casts = replace(casts, overrides=held or casts.overrides, command=use)
    modes = [one.overrides for one in advice.candidates]
    start = [word for word in advice.overrides if ".overrides." not in word]
    modes += [(*start, *typed_words(part)) for part in parts]
    of_fp16 = trials.until_one_holds(dict.fromkeys([*modes, ("precision=amp_bf16",)]))
    if not _held(of_fp16) and not trials.budget.spent:  # none of them trains like FP32
        of_fp16.append(trials.result(FP32))
    else:
        tried.insert(0, trials.result(FP32))
    held = _held(of_fp16)
    use = line([*base, *held]) if held else ""
    advice = replace(advice, casts=casts, tried=[*tried, *of_fp16], command=use)
    if held and held != advice.overrides:
        advice = replace(advice, overrides=held, static=held)
    return advice


def _held(tried: "Sequence[Tried]") -> list[str]:
    """Return the mode that holds, if one does."""
    return [*tried[-1].overrides] if tried and tried[-1].cures else []


def _measure(options: Namespace, base: list[str]) -> tuple[Path, int, "CastAdvice | None"]:
    """Train the first steps in FP32 with probes; return run directory, exit code, losses of casts.

    These are of the mode that the overrides ask for, if it has products in 8 bits or fewer, and of
    gradients times its loss scale, at its start.
    """
    place = [override for override in options.overrides if _key(override) == "output_dir"]
    dropped = [o for o in options.overrides if o not in base and o not in place]
    for override in dropped:
        if _key(override) == "resume":
            raise BadInput(f"{override}: is not allowed with a run; pass the run directory alone")
    asked = compose_config(options.overrides, options.config_dir).config  # still valid
    tell_switch(asked.precision)
    scale = asked.scaler.scale or asked.scaler.init_scale or 1.0
    composed = compose_config([*base, *place, *_FP32, "numerics=probes"], options.config_dir)
    config = composed.config

    from mprun.extensions.diagnosis.casts import CastMeter, cast_advice
    from mprun.training.run import attempt, claimed, new_record, prepare, resolve_device

    built = prepare(config, resolve_device(config.device), config.threads)
    whole = built.steps
    # The first steps of the whole run: a shorter train.steps would squeeze the schedule into them.
    built.steps = min(options.steps or STEPS, whole)
    config.numerics.every = options.every or max(1, built.steps // PROBES)
    if config.numerics.every > built.steps:
        raise BadInput(f"--every {config.numerics.every}: must be at most the {built.steps} steps")
    named = tuple(override for override in composed.overrides if override not in _FP32)
    try:
        meter = CastMeter(built.task, asked.precision, config.numerics.every, loss_scale=scale)
    except ValueError as error:
        raise BadInput(str(error)) from None
    if dropped:
        how = "and casts as with" if meter.names else "without"
        note(f"advise measures in FP32, {how} {' '.join(dropped)}")
    directory = claimed(composed, named, "advise-")
    with locked(directory, new=True):
        record = new_record(directory, composed)
        record.update(overrides=base, measured_for="advise")
        with redirect_stdout(sys.stderr), meter:
            code = attempt(config, built, record)
        if code == DONE and built.steps < whole:
            # A part of a run is not an outcome: `measured_for` keeps it out of comparisons.
            record.end("done", f"advise took the first {built.steps} of {whole} steps")
    losses, count = meter.read(), built.steps // config.numerics.every
    mode, matmul = without(_asked(options), "precision.matmul.modules"), asked.precision.matmul
    return directory, code, cast_advice(losses, matmul, mode, count) if losses else None


def _asked(options: Namespace) -> tuple[str, ...]:
    """Return the words of the mode that was asked for, the first one if it changes."""
    own = without(options.overrides, "precision.switch")
    return tuple(o for o in own if _key(o).partition(".")[0] in ("precision", "scaler"))


def _mode_path(options: Namespace) -> Path:
    """Return the path of the file of a mixed mode, below --write."""
    names = [o.partition("=")[2] for o in options.overrides if _key(o) == "precision"]
    return Path(options.write or ".") / "precision" / f"{'_'.join([*names, 'mixed'])}.yaml"


def _as_mode(mixed: "Mixed", options: Namespace, base: list[str]) -> "Mixed":
    """Return the assignment with its mode file, written if that was asked for, and the command."""
    from mprun.extensions.diagnosis.mixed_assignment import mode_file

    if mixed.out is None:
        return mixed
    composed = compose_config(mixed.overrides, options.config_dir, files=False).config
    path, precision = _mode_path(options), composed.precision
    scaler = modes(options.config_dir)[precision.name].scaler
    left = f"without {', '.join(mixed.out)}" if mixed.out else "as a whole"
    about = f"{precision.name} {left}: {100 * mixed.gap:+.2f} % from FP32's loss when it was tried"
    text = mode_file(precision, path.stem, scaler, about)
    use = command(options.config_dir, [*base, *mixed.overrides])
    if options.write is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
        own = [word for word in mixed.overrides if _key(word).partition(".")[0] == "scaler"]
        use = command(options.write, [*base, f"precision={path.stem}", *own])
    return replace(mixed, name=path.stem, file=text, command=use)


def _check(
    options: Namespace, given: Vouched, advice: "Advice", base: list[str], directory: Path
) -> dict:
    """Train FP32, the advised static scale, and scale 1, each with 3 seeds; return the results."""
    from mprun.sweeps import sweep
    from mprun.sweeps.plan import plan

    base = _check_base(options, given, base)
    steps = options.steps or STEPS
    if options.run is None:
        steps = read_record(directory)["steps"]
    folder = directory / "check"
    common = without(base, "seed", "train.steps", "train.epochs", "output_root", "name")
    common += [f"seed={','.join(map(str, SEEDS))}", f"train.steps={steps}"]
    common.append(f"output_root='{folder}'")
    arms = {"advised scale": advice.static or advice.overrides, "scale 1": advice.unscaled}
    directories: dict[str, list[Path]] = {}
    for name, overrides in {"FP32": _FP32, **arms}.items():
        cells = [*common, *overrides]
        with redirect_stdout(sys.stderr):
            code = sweep(cells, options.config_dir)
        directories[name] = [cell.directory for cell in plan(cells, options.config_dir).cells]
        if code != DONE:
            raise MprunError(f"advise --check: a run did not end (exit code {code}), see {folder}")
    return {"folder": str(folder), "seeds": len(SEEDS), "steps": steps} | _judged(directories, arms)


def _check_base(options: Namespace, given: Vouched, base: list[str]) -> list[str]:
    """Return the overrides that --check runs again.

    For a run these are the overrides of its record, which may name code and paths, too.
    """
    if options.run is not None:
        config_from_record(current(read_config(options.run)), given)
    base = [*base, *(override for override in options.overrides if _key(override) in PLACES)]
    check_vouched(outside(compose_config(base, options.config_dir).as_dict()), given)
    return base


def _judged(directories: dict[str, list[Path]], arms: dict[str, list[str]]) -> dict:
    """Return the verdicts of `mprun compare` on the runs of the arms."""
    from mprun.comparison.grouping import group_runs
    from mprun.comparison.load import load_runs
    from mprun.comparison.verdict import assess
    from mprun.comparison.wording import shown, unit

    runs, _ = load_runs(list(dict.fromkeys(chain.from_iterable(directories.values()))))
    protos, refused = group_runs(runs)
    if not protos:
        raise MprunError(f"advise --check: {refused[0]}")
    group = assess(protos[0])
    found = []
    for name, overrides in arms.items():
        own = {str(directory) for directory in directories[name]}
        row = next((row for row in group.rows if row.arm.runs[0].path in own), None)
        if row is None:  # of FP32 itself, where no 16-bit mode trains
            continue
        arm = {"name": name, "overrides": " ".join(overrides), "mean": row.mean}
        numbers = shown(group, row.verdict)
        arm |= {key: numbers[key] for key in ("difference", "margin")}
        diverged = sum(outcome.diverged is not None for outcome in row.outcomes)
        arm |= {"unit": unit(group), "skipped": row.skipped, "diverged": diverged}
        found.append(arm | {"verdict": " ".join(row.verdict.sentence.split())})
    return {"metric": group.metric, "baseline": group.baseline.mean, "arms": found}


def _own(overrides: Iterable[str]) -> list[str]:
    return without(overrides, "precision", "scaler", "numerics", "output_dir", "resume")


def _key(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]


def _recorded(directory: Path) -> Record:
    return record_of("advise", directory, "a run directory or key=value")
