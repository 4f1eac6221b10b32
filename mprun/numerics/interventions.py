"""Changes that may cure a failed step, smallest first, each tried by training that step again."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mprun.errors import BadInput, MprunError
from mprun.numerics.first_nonfinite import Finding, reason_of
from mprun.numerics.operands import BACKWARD, UNSCALE, UPDATE
from mprun.numerics.post_mortem import EXPLOSION, power
from mprun.numerics.replay import KeptBatch, Steps, all_finite, carried, resume_from, weights
from mprun.precision import MODES, NoLossScale

WORSE = 1.5  # times FP32's loss: finite, but no cure
AFTER = 5  # further steps that a cure must survive
# A scale that has to settle first may skip so many more.
PATIENCE = 40
_BF16 = {
    "fp16_naive": "bf16_naive",
    "fp16_master": "bf16_master",
    "fp16_master_scaled": "bf16_master",
    "amp": "amp_bf16",
}
Build = Callable[[dict], object]  # plain configuration -> mprun.build.Built; raises BadInput


@dataclass(frozen=True, slots=True)
class Change:
    """A configuration with one thing changed. overrides: as one would type it behind `mprun`."""

    overrides: tuple[str, ...]
    config: dict


@dataclass(frozen=True, slots=True)
class Tried:
    """What became of a change. cures: None where it could not be tried."""

    overrides: tuple[str, ...]
    cures: bool | None
    result: str
    loss: float | None = None  # the last one, where all steps were taken


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the trials start: a kept state, or (None) the start of the run.

    bad_step: from 1. kept: the state before it, also where the trials start earlier, because its
    batch is used. limit: a loss above it is no cure, None if unknown.
    """

    kept: dict
    bad_step: int
    from_start: bool = False
    limit: float | None = None


def changes(
    config: dict, finding: Finding, options: dict[str, dict], *, exploding: bool = False
) -> list[Change]:
    """What to try, smallest change first; only what differs from the run and has to do with it.

    config: the run's, as plain values. options: the `scaler` group's none, static and dynamic.
    exploding: whether the loss grew before the bad step.
    """
    found: list[Change] = []

    def add(*overrides: str, **groups: dict) -> None:
        changed = copy.deepcopy(config)
        for group, values in groups.items():
            changed[group] |= values
        if changed != config:
            found.append(Change(overrides, changed))

    precision, scaler, optim = config["precision"], config["scaler"], config["optim"]
    half = precision["autocast_dtype"] or precision["param_dtype"]
    phase = finding.event.phase if finding.event is not None else None
    modules = _modules(config, finding) if half != "fp32" else []

    def add_in_fp32(module: str) -> None:
        kept = {**precision["overrides"], module: "fp32"}
        add(f"precision.overrides.{module}=fp32", precision={"overrides": kept})

    for module in modules[:1]:
        add_in_fp32(module)
    for key in ("norm_dtype", "loss_dtype"):
        if precision[key] != "fp32":
            add(f"precision.{key}=fp32", precision={key: "fp32"})
    if half == "fp16":
        _add_scales(add, scaler, finding, phase, options)
    if phase == UPDATE and optim["name"] in ("adam", "adamw", "adagrad"):
        for eps in (1e-6, 1e-4):
            if eps > (optim["eps"] or 0.0):
                add(f"optim.eps={eps:g}", optim={"eps": eps})
    if precision["master_dtype"] is None:
        masters = {"master_dtype": "fp32", "grad_dtype": "fp32"}
        add("precision.master_dtype=fp32", "precision.grad_dtype=fp32", precision=masters)
    for module in modules[1:]:
        add_in_fp32(module)
    for factor in (0.1, 0.01, 0.001) if phase == UPDATE or exploding else (0.1,):
        lr = float(f"{optim['lr'] * factor:.6g}")
        add(f"optim.lr={lr:g}", optim={"lr": lr})
    none = options["none"]
    if precision["name"] in _BF16:
        name = _BF16[precision["name"]]
        add(f"precision={name}", precision={"name": name, **MODES[name]}, scaler=none)
    if half != "fp32":
        plain = {"name": "fp32", **MODES["fp32"], "overrides": {}}
        add("precision=fp32", precision=plain, scaler=none)
    return found


def try_changes(build: Build, changes: list[Change], origin: Origin) -> list[Tried]:
    """Every change tried, in order; those that end far above FP32 do not cure.

    FP32 altogether, if it is among them, goes first: a run that stays finite but ends above 1.5
    times the loss of FP32 (or of its own start, where that is larger) has not been cured.
    """
    done = {}
    for change in changes:
        if change.overrides == ("precision=fp32",):
            done[change.overrides] = reference = try_change(build, change, origin)
            if reference.cures and reference.loss is not None:
                usual = WORSE * max(abs(reference.loss), (origin.limit or 0.0) / EXPLOSION)
                limit = usual if origin.limit is None else min(usual, origin.limit)
                origin = replace(origin, limit=limit)
    return [done.get(one.overrides) or try_change(build, one, origin) for one in changes]


def try_change(build: Build, change: Change, origin: Origin) -> Tried:
    """Train the bad step and AFTER more with the change."""
    try:
        built = build(change.config)
        steps = start_from(built, origin)
        cures, result, loss = survives(steps, origin)
    except BadInput as error:
        return Tried(change.overrides, None, f"does not apply: {error}")
    except (MprunError, RuntimeError, ValueError) as error:
        return Tried(change.overrides, None, f"could not run: {str(error).partition(chr(10))[0]}")
    return Tried(change.overrides, cures, result, loss)


def start_from(built, origin: Origin) -> Steps:
    """A run just built, put to where the trials start."""
    kept = origin.kept
    if origin.from_start:
        if kept["batch"] is not None:
            task = built.task
            task.data = KeptBatch(task.data, kept["step"], kept["batch"], built.device)
        return Steps(built, 0, 0)
    transplant(built, kept["task"])
    return resume_from(built, kept)


def survives(steps: Steps, origin: Origin) -> tuple[bool, str, float | None]:
    """Train to AFTER steps behind the bad one: whether all went well, what happened, the loss."""
    built, task = steps.built, steps.built.task
    end = origin.bad_step + AFTER
    if not built.rate.constant:
        end = max(origin.bad_step, min(end, built.steps))
    in_a_row, skipped = 0, 0
    while True:
        row = steps.advance()
        if row.diverged:
            return False, f"loss {row.loss:g} at step {row.step}", None
        if not all_finite([*weights(task).values(), *carried(task).values()]):
            what = "weights or LSTM state" if carried(task) else "weights"
            return False, f"{what} not finite after step {row.step}", None
        skipped, in_a_row = skipped + row.found_inf, 0 if row.found_inf else in_a_row + 1
        if row.step < end:
            continue
        if in_a_row >= min(3, row.step - origin.bad_step + 1):
            break
        if row.step >= end + PATIENCE or not built.rate.constant:
            text = f"{skipped} updates skipped, still at loss scale {power(row.loss_scale)}"
            return False, text, row.loss
    scale = next(iter(task.loss_scales.values()))
    if skipped and scale.kind == "static":
        text = f"{skipped} updates skipped at the static loss scale {power(row.loss_scale)}"
        return False, text, row.loss
    if origin.limit is not None and row.loss > origin.limit:
        return False, f"finite, but the loss is {row.loss:.4g} at step {row.step}", row.loss
    note = f", {skipped} skipped, loss scale then {power(row.loss_scale)}" if skipped else ""
    return True, f"finite up to step {row.step}{note}; loss {row.loss:.4g}", row.loss


@torch.no_grad()
def transplant(built, saved: dict) -> None:
    """Put the state of a run (`task.state_dict()`) into a task of another precision or scaler.

    Weights come from the saved masters where there are some, rounded where the new dtype is
    narrower; optimizer state likewise. The state of a loss scale is taken over where its kind and
    scale are the same.
    """
    task = built.task
    for name, learner in task.learners.items():
        _transplant_learner(learner, saved["learner"] if "learner" in saved else saved[name])
    own = task.loss_scales
    theirs = saved["loss_scales"] if "loss_scales" in saved else {"loss_scale": saved["loss_scale"]}
    for name, scale in own.items():
        state = theirs.get(name)
        if state is None or state["kind"] != scale.kind or isinstance(scale, NoLossScale):
            continue
        if scale.kind != "static":
            scale.load_state_dict(state)
    if saved.get("hidden") is not None:
        dtype = None if built.policy.autocast_dtype else built.policy.param_dtype
        task.hidden = tuple(part.to(built.device, dtype) for part in saved["hidden"])


def _transplant_learner(learner, saved: dict) -> None:
    masters, state = saved["optimizer"]["masters"], saved["optimizer"]["state"]
    for name, tensor in learner.model.state_dict().items():
        tensor.copy_(masters.get(name, saved["model"][name]))
    optimizer = learner.optimizer
    for name, master in optimizer.masters.items():
        master.copy_(masters.get(name, saved["model"][name]))
    for name, average in optimizer.averages.items():
        average.copy_(saved["optimizer"]["averages"][name])
    for name, own in optimizer.state_by_name().items():
        for key, value in state[name].items():
            if key in own and isinstance(own[key], Tensor):
                own[key].copy_(value)


def _modules(config: dict, finding: Finding) -> list[str]:
    """The culprit's module, then the one around it, as patterns of precision.overrides."""
    module = finding.module
    if not module:
        return []
    model = config["model"]
    if model["name"] == "dcgan" or model.get("task") == "gan":
        # Overrides name modules inside generator and discriminator.
        module = module.partition(".")[2]
    around = module.rpartition(".")[0]
    return [name for name in (module, around) if name]


def _add_scales(add, scaler: dict, finding: Finding, phase: str | None, options: dict) -> None:
    """Static scales below (or above) the present one, a lower floor, dynamic scaling."""
    event, kind = finding.event, scaler["kind"]
    lower = [4, 8]
    if event is not None and event.would_be is not None and math.isfinite(event.would_be):
        lowest = max(1, math.ceil(math.log2(max(event.would_be, 1.0) / 65504.0)) + 1)
        lower = [lowest, lowest + 4]
    scaled = phase in (BACKWARD, UNSCALE)
    if kind == "static" and scaled:
        for exponent in lower:
            scale = scaler["scale"] * 2.0**-exponent
            add(f"scaler.scale={_typed(scale)}", scaler={"scale": scale})
    elif kind == "none" and scaled:
        for exponent in lower:
            scale = 2.0**-exponent
            static = options["static"] | {"scale": scale}
            add("scaler=static", f"scaler.scale={_typed(scale)}", scaler=static)
    elif kind == "none" and phase == UPDATE and "zero" in reason_of(event):
        static = options["static"] | {"scale": 1024.0}
        add("scaler=static", "scaler.scale=1024", scaler=static)
    if kind == "dynamic" and finding.kind == "collapse":
        floor = max(scaler["min_scale"] * 2.0**-12, 2.0**-126)
        add(f"scaler.min_scale={_typed(floor)}", scaler={"min_scale": floor})
    if kind != "dynamic":
        add("scaler=dynamic", scaler=options["dynamic"])


def _typed(number: float) -> str:
    """All digits, so that what is typed is what was tried."""
    return repr(number).removesuffix(".0")


def limit_of(first_loss: float | None) -> float | None:
    """The loss above which a run counts as exploded, from its loss at step 1."""
    if first_loss is None or not math.isfinite(first_loss):
        return None
    return EXPLOSION * abs(first_loss)
