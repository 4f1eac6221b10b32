"""Try changes that may cure a failed step, smallest first, by training that step again."""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from mprun.assembly import Built
from mprun.config.compose import compose_config
from mprun.config.keys import networks_in_turn
from mprun.config.option_files import modes
from mprun.config.schema import MatmulConfig
from mprun.extensions.diagnosis.casts import typed
from mprun.extensions.diagnosis.first_nonfinite import Finding
from mprun.extensions.diagnosis.trials import (
    FP32,
    SETTLED,
    Budget,
    Course,
    Tried,
    bound,
    result_of,
    taken,
    train,
)
from mprun.numerics.exponent_shares import FP16_MAX
from mprun.numerics.post_mortem import EXPLOSION, LAST, explosion
from mprun.numerics.replay import Steps, resume_from, same_loss, use_batch
from mprun.numerics.trace import Phase
from mprun.precision.module_dtypes import own_forward
from mprun.precision.packed_states import StateFormats
from mprun.precision.rounded_weights import translated
from mprun.record.keys import flat
from mprun.tasks import LanguageModel

WORSE = 1.5  # times FP32's loss: finite, but not cured
AFTER = 5  # further steps that a cured run must survive
LONG = 100  # and those that the smallest of the cures must, as far as time allows
# A run whose loss exploded was damaged long before its last step. Changes are tried from its start
# if it reaches the bad step within this part of the seconds that are left.
CONTROL = 0.5
Build = Callable[[dict], Built]  # builds from a plain configuration; raises BadInput
Options = Mapping[str, dict[str, dict]]  # "scaler=static" -> {"scaler": its values}
# Overrides as typed after `mprun` -> the plain configuration that they change to.
Changes = dict[tuple[str, ...], dict]
_MATMUL = "precision.matmul"


@dataclass(frozen=True, slots=True)
class Origin:
    """The start of the trials: the state before the bad step, or the start of the run.

    kept: that state; its batch is used even if the trials start earlier. bad_step: from 1. limit: a
    loss above it is no cure, None if unknown.
    """

    kept: dict
    bad_step: int
    from_start: bool = False
    limit: float | None = None


def find_cures(
    build: Build,
    config: dict,
    kept: dict,
    finding: Finding,
    rows: list[dict],
    options: Options,
    casts: Iterable[dict[str, Any]] = (),
    *,
    budget: Budget,
) -> tuple[list[Tried], bool]:
    """Return the result of each change, and whether they were tried from the start of the run.

    They start there if the loss had grown before the bad step, or if nothing cures that step: the
    run was damaged earlier. config: the run's, as plain values. kept: the state before the bad step
    (`mprun.numerics.failure.kept_state`). finding: the result of replaying that step. rows: the
    steps of the run (`mprun.numerics.failure.recorded_rows`). options: from `options_of`. casts:
    changes of the casts of linear layers (`cast_changes`). budget: for all trials.
    """
    if finding.kind == "evaluation":
        return [], False
    # The loss above which the run counts as exploded, from its loss at step 1.
    first = abs(rows[0]["loss"]) if rows and rows[0]["step"] == 1 else math.inf
    limit = EXPLOSION * first if math.isfinite(first) else None
    origin = Origin(kept, finding.step, limit=limit)
    start, casts = replace(origin, from_start=True), [*casts]

    def try_from(place: Origin, exploding: bool) -> list[Tried]:
        own = proposed(config, finding, options, exploding=exploding, casts=casts)
        return try_changes(build, applied(config, own, options), place, budget)

    def starts_there() -> bool:
        return _start_leads_there(build, config, start, rows, budget.part(CONTROL))

    exploding = explosion([row for row in rows if row["step"] <= finding.step][-LAST:]) is not None
    if not (exploding and starts_there()):
        tried = try_from(origin, exploding)
        cured = any(one.cures for one in tried) or finding.step == 1
        if cured or not starts_there():
            return tried, False
    return try_from(start, True), True


def _start_leads_there(
    build: Build, config: dict, origin: Origin, rows: list[dict], budget: Budget
) -> bool:
    """Return whether training from the start, unchanged, gives the same losses and failure."""
    losses = {row["step"]: row["loss"] for row in rows}
    own = train(start_from(build(config), origin), origin.bad_step, budget)
    for step, loss in enumerate(own.losses, 1):
        if step in losses and not same_loss(loss, losses[step]):
            return False
    return bool(own.broken) or own.step == origin.bad_step and not math.isfinite(own.losses[-1])


def options_of(config_dir: str | None = None) -> Options:
    """Return the possible choices: every precision mode with its scaler, and two scalers."""
    found: dict[str, dict[str, dict]] = {}
    scalers: dict[str, dict] = {}
    for name, mode in sorted(modes(config_dir).items()):
        option = f"precision={name}"
        if mode.scaler not in scalers:  # a composition takes a tenth of a second
            scalers[mode.scaler] = groups_of(option, config_dir)["scaler"]
        own = _nested(mode.values) | {"name": name, "overrides": {}, "switch": []}
        found[option] = {"precision": own, "scaler": scalers[mode.scaler]}
    for option in ("scaler=static", "scaler=dynamic"):
        found[option] = {"scaler": compose_config([option]).as_dict()["scaler"]}
    return found


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        *groups, name = key.split(".")
        reduce(lambda node, group: node.setdefault(group, {}), groups, found)[name] = value
    return found


def groups_of(option: str, config_dir: str | None = None) -> dict[str, dict]:
    """Return the values of a precision mode, and of its scaler."""
    composed = compose_config([option], config_dir, files=False).as_dict()
    return {group: composed[group] for group in ("precision", "scaler")}


def applied(config: dict, changes: Iterable[dict[str, Any]], options: Options) -> Changes:
    """Return the configurations that overrides, key -> value, make of `config`, if they change it.

    A key without a dot names an option in `options`.
    """
    found: Changes = {}
    for overrides in changes:
        changed = copy.deepcopy(config)
        for key, value in overrides.items():
            *groups, field = key.split(".", 2)
            if not groups:
                changed |= copy.deepcopy(options[f"{key}={value}"])
            else:
                reduce(dict.__getitem__, groups, changed)[field] = value
        if changed != config:
            found[typed_words(overrides)] = changed
    return found


def typed_words(change: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a change, key -> value, as typed after `mprun`."""
    return tuple(f"{key}={_typed(value)}" for key, value in change.items())


def proposed(
    config: dict,
    finding: Finding,
    options: Options,
    *,
    exploding: bool = False,
    casts: Iterable[dict[str, Any]] = (),
) -> Iterator[dict[str, Any]]:
    """Yield the changes to try, smallest first: overrides as key -> value, some without effect.

    exploding: the loss grew before the bad step.
    """
    precision, optim = config["precision"], config["optim"]
    half = precision["autocast_dtype"] or precision["param_dtype"]
    phase = finding.event.phase if finding.event is not None else None
    modules = _modules(config, finding) if half != "fp32" else []
    for key in (*modules[:1], "precision.norm_dtype", "precision.loss_dtype"):
        yield {key: "fp32"}
    if (matmul := precision.get("matmul") or {}).get("input"):
        if matmul["granularity"] == "none":
            keys = [key for key in ("granularity", "weight_granularity") if matmul.get(key)]
            yield {f"{_MATMUL}.{key}": "tensor" for key in keys}
        yield from casts
        yield without_casts(config, options)
    if half == "fp16":
        yield from _scales(config["scaler"], finding, phase)
    if phase == Phase.UPDATE and optim["eps"] is not None:
        yield from ({"optim.eps": eps} for eps in (1e-6, 1e-4) if eps > optim["eps"])
    # Weights with transient masters are updated in FP32 already.
    if precision["master_dtype"] is None and precision["update"]["rounding"] == "nearest":
        yield {"precision.master_dtype": "fp32", "precision.grad_dtype": "fp32"}
    yield from ({key: "fp32"} for key in modules[1:])
    far = phase == Phase.UPDATE or exploding
    for factor in (0.1, 0.01, 0.001) if far else (0.1,):
        yield {"optim.lr": float(f"{optim['lr'] * factor:.6g}")}
    if half == "fp16":
        yield _in_bf16(precision, options)
    if half != "fp32":
        yield {"precision": "fp32"}


def without_casts(config: dict, options: Options) -> dict[str, Any]:
    """Return the mode that is this one but for its casts, else overrides that leave them out."""
    precision, plain = config["precision"], asdict(MatmulConfig())
    matmul = precision["matmul"]
    for option in options.values():
        other = option.get("precision", {})
        alike = precision | {"name": other.get("name"), "matmul": plain}
        if other == alike and option["scaler"] == config["scaler"]:
            return {"precision": other["name"]}
    named = [key for key, value in plain.items() if matmul.get(key, value) != value]
    # Without formats the keys of casts have no other value; the lists name layers, products.
    kept = ("high_precision", "modules")
    return {f"{_MATMUL}.{key}": plain[key] for key in named if key not in kept}


def _modules(config: dict, finding: Finding) -> list[str]:
    """Return keys of precision.overrides: of the culprit, its peers in other layers, its parent."""
    module = finding.module
    if module is None:
        return []
    if networks_in_turn(flat(config)) > 1:
        # Overrides name modules inside generator and discriminator.
        module = module.partition(".")[2]
    if not module:  # what the model computes itself
        return [f"precision.overrides.{own_forward(module)}"]
    parts, around = module.split("."), module.rpartition(".")[0]
    alike = ".".join("*" if part.isdigit() else part for part in parts)
    names = (module, alike if any(part.isalpha() for part in parts) else "", around)
    return [f"precision.overrides.{name}" for name in dict.fromkeys(names) if name]


def _in_bf16(precision: dict, options: Options) -> dict[str, Any]:
    """Return the run's mode with BF16 in place of FP16; else its dtypes."""

    def dtypes(mode: dict) -> dict:
        return {key: value for key, value in mode.items() if key not in ("name", "overrides")}

    own = options.get(f"precision={precision['name']}", {}).get("precision", precision)
    wanted = {key: "bf16" if value == "fp16" else value for key, value in dtypes(own).items()}
    for option in options.values():
        if "precision" in option and dtypes(option["precision"]) == wanted:
            return {"precision": option["precision"]["name"]}
    halves = [key for key, value in dtypes(precision).items() if value == "fp16"]
    return {f"precision.{key}": "bf16" for key in halves}


def _scales(scaler: dict, finding: Finding, phase: str | None) -> Iterator[dict[str, Any]]:
    """Yield static scales below (or above) the present one, a lower floor, dynamic scaling."""
    event, kind = finding.event, scaler["kind"]
    choice = {"scaler": "static"} if kind == "none" else {}
    if phase in (Phase.BACKWARD, Phase.UNSCALE) and kind in ("static", "none"):
        # The powers of two by which to lower it: one to spare, 4 if that is unknown.
        wanted, lowest = None if event is None else event.would_be, 4
        if wanted is not None and math.isfinite(wanted):
            lowest = max(1, math.ceil(math.log2(max(wanted, 1.0) / FP16_MAX)) + 1)
        now = scaler["scale"] if kind == "static" else 1.0
        yield from ({**choice, "scaler.scale": now * 2.0**-n} for n in (lowest, lowest + 4))
    if phase == Phase.UPDATE and kind == "none" and event is not None and event.at_zero:
        yield {**choice, "scaler.scale": 1024.0}
    if kind == "dynamic" and finding.kind == "collapse":
        yield {"scaler.min_scale": max(scaler["min_scale"] * 2.0**-12, 2.0**-126)}
    if kind != "dynamic":
        yield {"scaler": "dynamic"}


def _typed(value: str | float | list[str] | None) -> str:
    """Keep all digits of a number, so that typing it repeats the trial."""
    if value is None:
        return "null"
    if isinstance(value, list):
        return typed(value)
    return value if isinstance(value, str) else repr(value).removesuffix(".0")


def try_changes(build: Build, changes: Changes, origin: Origin, budget: Budget) -> list[Tried]:
    """Train the bad step and AFTER more with every change, then those that cure for LONG, in order,
    until one holds.

    FP32 as a whole, if listed, goes first. A run that stays finite but ends above 1.5 times the
    loss of FP32 (or of its own start, if that is larger) is not cured, nor is one that ends LONG
    steps later above FP32's bound (`mprun.extensions.diagnosis.trials`).
    """
    done: dict[tuple[str, ...], Tried] = {}
    if FP32 in changes:
        done[FP32] = reference = _tried(build, FP32, changes[FP32], origin, budget)
        if reference.cures and reference.loss is not None:
            usual = WORSE * max(abs(reference.loss), (origin.limit or 0.0) / EXPLOSION)
            limit = usual if origin.limit is None else min(usual, origin.limit)
            origin = replace(origin, limit=limit)
    for own, config in changes.items():
        done[own] = done.get(own) or _tried(build, own, config, origin, budget)
    found = {own: done[own] for own in changes}
    for own, longer in _for_longer(build, changes, found, origin, budget):
        found[own] = longer
    return [*found.values()]


def _tried(
    build: Build, own: tuple[str, ...], config: dict, origin: Origin, budget: Budget
) -> Tried:
    def run() -> Tried:
        course = survive(start_from(build(config), origin), origin, AFTER, budget)
        return taken(course, own, origin.limit, budget)

    return result_of(own, run, budget)


def _for_longer(
    build: Build,
    changes: Changes,
    short: Mapping[tuple[str, ...], Tried],
    origin: Origin,
    budget: Budget,
) -> Iterator[tuple[tuple[str, ...], Tried]]:
    """Yield the results of LONG steps, until a change holds; fewer steps if time is short."""
    cured, fp32, after = [own for own, one in short.items() if one.cures], Course(), LONG
    if not cured or budget.spent:
        return
    if (first := short.get(FP32)) is not None and first.cures:
        steps = start_from(build(changes[FP32]), origin)
        fp32 = survive(steps, origin, LONG, budget.part(1 / 3))
        fp32.cut, after = False, fp32.step - origin.bad_step
        yield FP32, taken(fp32, FP32, None, budget)

    def run(own: tuple[str, ...]) -> Tried:
        if own == FP32:
            return taken(fp32, own, None, budget)
        course = survive(start_from(build(changes[own]), origin), origin, after, budget)
        count = len(course.losses)
        if course.cut and count < short[own].steps:
            return short[own]
        course.cut, limit = False, origin.limit
        if fp32.losses and not fp32.broken:
            limit = min(bound(fp32.losses, count), math.inf if limit is None else limit)
        return taken(course, own, limit, budget)

    for own in cured:
        longer = result_of(own, partial(run, own), budget)
        if longer.cures is None:  # no time is left: what is known stays
            return
        yield own, longer
        if longer.cures:
            return


def start_from(built: Built, origin: Origin) -> Steps:
    """Put a newly built run to the start of the trials."""
    if not origin.from_start:
        transplant(built, origin.kept["task"])
        return resume_from(built, origin.kept)
    use_batch(built, origin.kept)
    return Steps(built, 0, 0)


def survive(steps: Steps, origin: Origin, after: int, budget: Budget | None = None) -> Course:
    """Train to `after` steps past the bad one, until a scale that has to settle has done so."""
    built, end = steps.built, origin.bad_step + after
    if not built.rate.constant:
        end = max(origin.bad_step, min(end, built.steps))
    settled = min(SETTLED, end - origin.bad_step + 1)
    return train(steps, end, budget, settled=settled)


@torch.no_grad()
def transplant(built: Built, saved: dict) -> None:
    """Copy the state of a run (`task.state_dict()`) into a task of another precision or scaler.

    Weights are rounded if the new dtype is narrower, as is optimizer state. The state of a loss
    scale is copied if its kind is the same.
    """
    task = built.task
    for name, learner in task.learners.items():
        theirs = saved["learner"] if "learner" in saved else saved[name]
        for key, tensor in learner.model.state_dict().items():
            tensor.copy_(theirs["model"][key])
        narrow, delayed = learner.steps.narrow, learner.prepared.delayed
        if narrow is not None and "narrow" in theirs:  # draws what the run drew
            narrow.load_state_dict(theirs["narrow"])
        if delayed is not None and "delayed" in theirs:
            delayed.take_over(theirs["delayed"])
        for key, average in learner.averages.items():
            average.copy_(theirs["averages"][key])
        to = StateFormats() if narrow is None else narrow.states
        of = StateFormats.saved(theirs.get("narrow", {}))
        for key, state in learner.steps.state_by_name().items():
            kept = translated(theirs["state"][key], of, to, learner.named[key])
            for kind, value in kept.items():
                if isinstance(state.get(kind), Tensor):
                    state[kind].copy_(value)
    scales = saved["loss_scales"] if "loss_scales" in saved else {"loss_scale": saved["loss_scale"]}
    for name, scale in task.loss_scales.items():
        moves = scale.kind not in ("none", "static")
        if moves and name in scales and scales[name]["kind"] == scale.kind:
            scale.load_state_dict(scales[name])
    if isinstance(task, LanguageModel) and saved.get("hidden") is not None:
        dtype = None if built.policy.autocast_dtype else built.policy.param_dtype
        task.hidden = tuple(part.to(built.device, dtype) for part in saved["hidden"])
