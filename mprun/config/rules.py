"""The rules across fields: what cannot run is refused before anything is written.

Each rule yields a line that names key, value and what is allowed. Those of modes are in
`precision_rules`, those of ranks and of the execution of a step in `execution_rules`.
"""

import operator
import os
from collections.abc import Iterator
from typing import Any

from mprun.config import schema
from mprun.config.components import COMPONENTS, SOURCES, TASKS
from mprun.config.execution_rules import of_execution, of_ranks
from mprun.config.fields import is_label, violations
from mprun.config.keys import wanted
from mprun.config.option_files import named
from mprun.config.precision_rules import of_mode, updates_in_16_bits
from mprun.config.registry import kind_of, readers_of
from mprun.config.schema import RunConfig
from mprun.config.trust import check_own_code
from mprun.errors import BadInput, no_folder, shortened
from mprun.record.metric_facts import with_judged
from mprun.spelling import word


def check(config: RunConfig, *, files: bool = True) -> None:
    """Raise BadInput, with one line, for the first setting that cannot run.

    files: also check that the folder of the data exists.
    """
    rules = (
        violations,
        *(_names, _data_fits_model, of_ranks, _optim, _scaler, of_mode, _length, _compare),
        *(_numerics, _of_components),
        lambda config: of_execution(config, config.device),
        check_own_code,
        lambda config: _data(config, files),
    )
    for rule in rules:
        for line in rule(config):
            raise BadInput(line)


def _names(config: RunConfig) -> Iterator[str]:
    for group, (components, key) in COMPONENTS.items():
        node = getattr(config, group)
        name = getattr(node, key)
        known = components.get(name)
        if node.component.name not in ("", name) or (known and not isinstance(node, known.config)):
            yield f"{group}.{key}={name}: not a value to set; choose {group}=OPTION"
    of_files = {"scaler.name": config.scaler.name, "precision.name": config.precision.name}
    for key, name in {"name": config.name, **of_files}.items():
        if name is not None and not is_label(name):
            yield f"{key}={shortened(name, 70)!r}: must be 1 to 64 of letters, digits, . _ and -"


def _data_fits_model(config: RunConfig) -> Iterator[str]:
    model, data = config.model, config.data
    if data.component.own:
        return  # its factory is checked when it is built
    wanted = kind_of(model).family
    if data.component.family != wanted:
        sources = {name for name, source in SOURCES.items() if source.family == wanted}
        options = [option for option, name in named("data").items() if name in sources]
        learns = f"model {model.name} learns from {wanted.replace('_', ' ')}"
        yield f"data.name={data.name}: {learns}; choose data={', '.join(options)}"


def _of_components(config: RunConfig) -> Iterator[str]:
    for group in COMPONENTS:
        node = getattr(config, group)
        for rule in node.component.rules:
            yield from rule(node, config)


def _only_what_is_read(group: str, node: Any, who: str) -> Iterator[str]:
    """Check that keys of other update rules are null, and that those of this one are not."""
    components, _ = COMPONENTS[group]
    for key in sorted({key for one in components.values() for key in one.reads}):
        value = getattr(node, key)
        if value is not None and key not in node.component.reads:
            having = " or ".join(f"{group}={one}" for one in readers_of(group, key))
            yield f"{group}.{key}={value}: {who} has no such setting; {having} has it"
    for key in sorted(node.component.needs):
        if getattr(node, key) is None:
            needed = wanted(f"{group}.{key}").replace(", or null", "")
            yield f"{group}.{key}=null: {who} needs {needed}"


def _optim(config: RunConfig) -> Iterator[str]:
    optim = config.optim
    yield from _only_what_is_read("optim", optim, optim.name)
    if optim.betas is not None and len(optim.betas) != 2:
        yield f"optim.betas={list(optim.betas)}: must be two numbers"
    if optim.nesterov and not optim.momentum:
        yield "optim.nesterov=true: needs optim.momentum > 0"
    if optim.average_modules and optim.average_decay is None:
        yield f"optim.average_modules={list(optim.average_modules)}: needs optim.average_decay"
    if config.train.clip_modules and config.train.clip_norm is None:
        yield f"train.clip_modules={list(config.train.clip_modules)}: needs train.clip_norm"
    yield from _schedule(optim)
    yield from _implementation(config)
    yield from _representable(config)


def _representable(config: RunConfig) -> Iterator[str]:
    """Refuse a factor of an update that its dtype cannot hold: torch refuses it within a step."""
    optim, precision = config.optim, config.precision
    dtypes = (precision.param_dtype, precision.norm_dtype, *precision.overrides.values())
    narrow = "fp16" in dtypes and updates_in_16_bits(precision)
    largest, dtype = (65504.0, "FP16") if narrow else (3e38, "FP32")
    # Adam's first update divides the rate by 1 - beta1.
    most_lr = largest * (1 - (optim.betas or [0.0])[0])
    most_factor = most_lr / optim.lr
    for key, value, most in (
        ("lr", optim.lr, most_lr),
        ("bias_lr_factor", optim.bias_lr_factor, most_factor),
        ("adamw_lr_factor", optim.adamw_lr_factor, most_factor / max(1.0, optim.bias_lr_factor)),
        ("weight_decay", optim.weight_decay, largest),
        ("eps", optim.eps, largest),
        ("initial_accumulator", optim.initial_accumulator, largest),
    ):
        if value is not None and value > most:
            what = "such a rate" if "_factor" in key else "it"
            where = f"{precision.name} updates in {dtype}, which cannot hold {what}"
            yield f"optim.{key}={value:g}: {where} (allowed: at most {most:.5g})"


def _schedule(optim: schema.OptimConfig) -> Iterator[str]:
    if optim.milestones and optim.schedule != "step":
        yield f"optim.milestones={list(optim.milestones)}: only schedule=step reads them"
    if optim.schedule == "step" and not optim.milestones:
        yield "optim.milestones=[]: optim.schedule=step needs at least one"
    epochs = optim.constant_epochs
    if (epochs is None) == (optim.schedule == "epoch_decay"):
        yield f"optim.constant_epochs={word(epochs)}: read and needed by schedule=epoch_decay"
    if optim.warmup_epochs and (updates := optim.warmup_updates):
        both = f"optim.warmup_epochs={optim.warmup_epochs:g} optim.warmup_updates={updates}"
        yield f"{both}: set one of the two"


def _implementation(config: RunConfig) -> Iterator[str]:
    precision, implementation = config.precision, config.optim.implementation
    if implementation == "fused" and updates_in_16_bits(precision):
        yield (
            f"optim.implementation=fused: {precision.name} updates in 16 bits operation "
            "by operation; one kernel would compute in FP32 (allowed: auto, foreach, loop)"
        )


def _scaler(config: RunConfig) -> Iterator[str]:
    scaler = config.scaler
    yield from _only_what_is_read("scaler", scaler, f"scaler={scaler.name}")
    for key, holds, sign, other in (
        ("min_scale", operator.le, "<=", "max_scale"),
        ("init_scale", operator.ge, ">=", "min_scale"),
        ("init_scale", operator.le, "<=", "max_scale"),
    ):
        value, bound = getattr(scaler, key), getattr(scaler, other)
        if value is not None and bound is not None and not holds(value, bound):
            yield f"scaler.{key}={value:g}: must be {sign} scaler.{other} ({bound:g})"
    if scaler.tolerance and (scaler.hysteresis or 1) > 1:
        yield f"scaler.tolerance={scaler.tolerance}: must be 0 with scaler.hysteresis > 1"
    if scaler.per != "shared" and kind_of(config.model).networks == 1:
        has = f"{config.model.name} has one optimizer and one loss"
        yield f"scaler.per={scaler.per}: {has} (allowed: shared)"
    if scaler.per != "shared" and scaler.kind == "none":
        yield f"scaler.per={scaler.per}: scaler=none has no scale"


def _length(config: RunConfig) -> Iterator[str]:
    train = config.train
    if (train.steps is None) == (train.epochs is None):
        values = f"train.steps={word(train.steps)} train.epochs={word(train.epochs)}"
        yield f"{values}: set one of the two and set the other to null"


def _compare(config: RunConfig) -> Iterator[str]:
    kind, compare, window = kind_of(config.model), config.compare, config.compare.window
    closed = kind.name in TASKS
    # What else a user's class declares is known once it is imported (`training.run`).
    if closed or kind.metric(str(compare.metric)) is not None:
        who = config.model.name if closed else kind.name
        with_judged(kind.metrics, compare, who, config.data.name, closed=closed)
    train = config.train
    if train.steps is not None and window > 1:
        # The last step is always evaluated.
        every = train.evaluates_every(train.steps)
        evaluations = -(-train.steps // every) if every else 1
        if window > evaluations:
            run = f"{train.steps} steps with train.eval_every={every}"
            yield f"compare.window={window}: {run} have {evaluations} (allowed: 1 to {evaluations})"


def _numerics(config: RunConfig) -> Iterator[str]:
    if (every := config.numerics.shadow_every) and not config.numerics.probes:
        yield f"numerics.shadow_every={every}: needs numerics=probes"


def _data(config: RunConfig, files: bool) -> Iterator[str]:
    data, about = config.data, config.data.component
    if data.root is not None and not (about.on_disk or about.own):
        if not os.path.isdir(data.root):
            yield f"data.root={data.root}: {no_folder(data.root)}"
        is_embedded = f"data.name={data.name} is embedded and reads no folder"
        yield f"data.root={data.root}: {is_embedded} (allowed: null)"
    if data.workers and not about.decodes:
        none = f"data.name={data.name} needs no loader process"
        yield f"data.workers={data.workers}: {none} (allowed: 0 or null)"
    if files and about.on_disk and data.root is None:
        wants = f"data={data.name} needs the folder of its files"
        yield f"data.root=null: {wants} (mprun --help experiment)"
    elif files and about.on_disk and not os.path.isdir(data.root or ""):
        yield f"data.root={data.root}: {no_folder(data.root or '')}"
