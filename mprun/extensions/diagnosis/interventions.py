"""Try changes that may cure a failed step, smallest first, by training that step again."""

import copy
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from mprun.assembly import Built
from mprun.config.compose import compose_config
from mprun.config.keys import networks_in_turn
from mprun.config.option_files import modes
from mprun.config.schema import MatmulConfig
from mprun.errors import BadInput, MprunError
from mprun.extensions.diagnosis.casts import typed
from mprun.extensions.diagnosis.first_nonfinite import Finding
from mprun.numerics.exponent_shares import FP16_MAX
from mprun.numerics.post_mortem import EXPLOSION, LAST, explosion, power
from mprun.numerics.replay import Steps, resume_from, same_loss, use_batch
from mprun.numerics.state import all_finite, carried, weights
from mprun.numerics.trace import Phase
from mprun.precision.rounded_weights import translated
from mprun.record.keys import flat
from mprun.tasks import LanguageModel

WORSE = 1.5  # times FP32's loss: finite, but not cured
AFTER = 5  # further steps that a cured run must survive
# A scale that has to settle first may skip so many more steps.
PATIENCE = 40
# A run whose loss exploded was damaged long before its last step. Changes are tried from its start
# if it reaches the bad step within this time.
LONGEST_CONTROL_S = 60.0
Build = Callable[[dict], Built]  # builds from a plain configuration; raises BadInput
Options = Mapping[str, dict[str, dict]]  # "scaler=static" -> {"scaler": its values}
# Overrides as typed after `mprun` -> the plain configuration that they change to.
Changes = dict[tuple[str, ...], dict]
Outcome = tuple[bool, str, float | None]  # as in `Tried`
FP32 = ("precision=fp32",)
_MATMUL = "precision.matmul"


@dataclass(frozen=True, slots=True)
class Tried:
    """The result of a change, its overrides as typed. cures: None if it could not be tried."""

    overrides: tuple[str, ...]
    cures: bool | None
    result: str
    loss: float | None = None  # the last one, if all steps were taken

    @property
    def change(self) -> str:
        """Return its overrides for a reader; formats that are taken away are said in words."""
        nulls = f"{_MATMUL}.input=null" in self.overrides
        return "linear layers without casts" if nulls else " ".join(self.overrides)


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
) -> tuple[list[Tried], bool]:
    """Return the result of each change, and whether they were tried from the start of the run.

    They start there if the loss had grown before the bad step, or if nothing cures that step: the
    run was damaged earlier. config: the run's, as plain values. kept: the state before the bad step
    (`mprun.numerics.failure.kept_state`). finding: the result of replaying that step. rows: the
    steps of the run (`mprun.numerics.failure.recorded_rows`). options: from `options_of`. casts:
    changes of the casts of linear layers (`cast_changes`).
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
        return try_changes(build, applied(config, own, options), place)

    exploding = explosion([row for row in rows if row["step"] <= finding.step][-LAST:]) is not None
    if not (exploding and _start_leads_there(build, config, start, rows)):
        tried = try_from(origin, exploding)
        cured = any(one.cures for one in tried) or finding.step == 1
        if cured or not _start_leads_there(build, config, start, rows):
            return tried, False
    return try_from(start, True), True


def _start_leads_there(build: Build, config: dict, origin: Origin, rows: list[dict]) -> bool:
    """Return whether training from the start, unchanged, gives the same losses and failure."""
    losses = {row["step"]: row["loss"] for row in rows}
    steps, loss = start_from(build(config), origin), math.nan
    ends = time.perf_counter() + LONGEST_CONTROL_S
    while steps.step < origin.bad_step and time.perf_counter() < ends:
        row = steps.advance()
        loss = row.loss
        if row.step in losses and not same_loss(loss, losses[row.step]):
            return False
    finite = bool(all_finite(weights(steps.built.task).values()))
    return steps.step == origin.bad_step and not (finite and math.isfinite(loss))


def options_of(config_dir: str | None = None) -> Options:
    """Return the possible choices: every precision mode with its scaler, and two scalers."""
    found: dict[str, dict[str, dict]] = {}
    scalers: dict[str, dict] = {}
    for name, mode in sorted(modes(config_dir).items()):
        option = f"precision={name}"
        if mode.scaler not in scalers:  # a composition takes a tenth of a second
            scalers[mode.scaler] = groups_of(option, config_dir)["scaler"]
        own = _nested(mode.values) | {"name": name, "overrides": {}}
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
            found[tuple(f"{key}={_typed(value)}" for key, value in overrides.items())] = changed
    return found


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
    if not module:
        return []
    if networks_in_turn(flat(config)) > 1:
        # Overrides name modules inside generator and discriminator.
        module = module.partition(".")[2]
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


def try_changes(build: Build, changes: Changes, origin: Origin) -> list[Tried]:
    """Train the bad step and AFTER more with every change, in order.

    FP32 as a whole, if listed, goes first. A run that stays finite but ends above 1.5 times the
    loss of FP32 (or of its own start, if that is larger) is not cured.
    """

    def trial(own: tuple[str, ...], config: dict) -> Tried:
        return result_of(own, lambda: survives(start_from(build(config), origin), origin))

    done: dict[tuple[str, ...], Tried] = {}
    if FP32 in changes:
        done[FP32] = reference = trial(FP32, changes[FP32])
        if reference.cures and reference.loss is not None:
            usual = WORSE * max(abs(reference.loss), (origin.limit or 0.0) / EXPLOSION)
            limit = usual if origin.limit is None else min(usual, origin.limit)
            origin = replace(origin, limit=limit)
    return [done.get(own) or trial(own, config) for own, config in changes.items()]


def result_of(overrides: tuple[str, ...], train: Callable[[], Outcome]) -> Tried:
    """Return what `train` does with a change, or why it could not be tried."""
    try:
        return Tried(overrides, *train())
    except BadInput as error:
        return Tried(overrides, None, f"does not apply: {error}")
    except (MprunError, RuntimeError, ValueError) as error:
        return Tried(overrides, None, f"could not run: {str(error).partition(chr(10))[0]}")


def start_from(built: Built, origin: Origin) -> Steps:
    """Put a newly built run to the start of the trials."""
    if not origin.from_start:
        transplant(built, origin.kept["task"])
        return resume_from(built, origin.kept)
    use_batch(built, origin.kept)
    return Steps(built, 0, 0)


def survives(steps: Steps, origin: Origin) -> Outcome:
    """Train to AFTER steps past the bad one; return whether all went well, a result, the loss."""
    built, task = steps.built, steps.built.task
    end = origin.bad_step + AFTER
    if not built.rate.constant:
        end = max(origin.bad_step, min(end, built.steps))
    applied, skipped = 0, 0  # in a row; in all
    while True:
        row = steps.advance()
        if row.diverged:
            return False, f"loss {row.loss:g} at step {row.step}", None
        if not all_finite((weights(task) | carried(task)).values()):
            what = "weights or LSTM state" if carried(task) else "weights"
            return False, f"{what} not finite after step {row.step}", None
        skipped, applied = skipped + row.found_inf, 0 if row.found_inf else applied + 1
        if row.step < end:
            continue
        if applied >= min(3, row.step - origin.bad_step + 1):
            break
        if row.step >= end + PATIENCE or not built.rate.constant:
            text = f"{skipped} updates skipped, still at loss scale {power(row.loss_scale)}"
            return False, text, row.loss
    # The run stayed finite; now decide whether that is a cure.
    scale = power(row.loss_scale)
    if skipped and next(iter(task.loss_scales.values())).kind == "static":
        return False, f"{skipped} updates skipped at the static loss scale {scale}", row.loss
    if origin.limit is not None and row.loss > origin.limit:
        return False, f"finite, but the loss is {row.loss:.4g} at step {row.step}", row.loss
    note = f", {skipped} skipped, loss scale then {scale}" if skipped else ""
    return True, f"finite up to step {row.step}{note}; loss {row.loss:.4g}", row.loss


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
        to = None if narrow is None else narrow.state_dtype
        of = theirs.get("narrow", {}).get("state_dtype")
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
