"""The rules across fields: what cannot run is refused before anything is written.

Each rule yields a line that names key, value and what is allowed. Those of ranks and of the
execution of a step are in `execution_rules`.
"""

import operator
import os
import re
from collections.abc import Iterator
from typing import Any

from mprun.config import schema
from mprun.config.components import COMPONENTS, SOURCES, TASKS
from mprun.config.execution_rules import of_execution, of_ranks
from mprun.config.fields import is_label, violations
from mprun.config.keys import wanted
from mprun.config.option_files import named
from mprun.config.registry import ModelConfig, kind_of, readers_of
from mprun.config.schema import DTYPES, RunConfig
from mprun.config.switches import in_mode, modes_in_turn, of_switches
from mprun.config.trust import check_own_code
from mprun.errors import BadInput, no_folder, shortened
from mprun.record.metric_facts import with_judged
from mprun.record.seed_plan import SeedPlan
from mprun.spelling import word


def check(config: RunConfig, *, files: bool = True) -> None:
    """Raise BadInput, with one line, for the first setting that cannot run.

    files: also check that the folder of the data exists.
    """
    rules = (
        violations,
        *(_names, _data_fits_model, of_ranks, _optim, _scaler, of_mode, _length, _compare),
        *(_numerics, _of_components, _execution, of_switches, _later_modes, check_own_code),
        lambda config: _data(config, files),
    )
    for rule in rules:
        for line in rule(config):
            raise BadInput(line)


def _execution(config: RunConfig) -> Iterator[str]:
    yield from of_execution(config, config.device)


def _later_modes(config: RunConfig) -> Iterator[str]:
    """Yield what the modes that a run switches to cannot compute."""
    for later in modes_in_turn(config.precision)[1:]:
        own = in_mode(config, later)
        for rule in (violations, of_ranks, _optim, of_mode, _execution):
            yield from (f"precision.switch: to={later.name}: {line}" for line in rule(own))


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
    source = (compare.pair_sd_source or "").strip()
    if compare.pair_sd is not None and not source:
        yield f"compare.pair_sd={compare.pair_sd:g}: needs compare.pair_sd_source, what it is of"
    if compare.pair_sd is None and compare.pair_sd_source is not None:
        yield f"compare.pair_sd_source={source}: needs compare.pair_sd, the scatter that it is of"
    try:
        SeedPlan.of(compare.plan)
    except ValueError as error:
        yield str(error)
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


# Of a precision mode.


def updates_in_16_bits(precision: schema.PrecisionConfig) -> bool:
    """Return whether an update is rounded operation by operation."""
    is_narrow = precision.master_dtype is None and precision.param_dtype != "fp32"
    update = precision.update
    return is_narrow and update.rounding == "nearest" and not update.keeps_state


def of_mode(config: RunConfig) -> Iterator[str]:
    """Yield what a mode cannot compute."""
    precision = config.precision
    for pattern, dtype in precision.overrides.items():
        if dtype not in DTYPES:
            yield f"precision.overrides.{pattern}={dtype}: must be one of {', '.join(DTYPES)}"
    if precision.autocast_dtype is not None and precision.param_dtype != "fp32":
        yield f"precision.param_dtype={precision.param_dtype}: must be fp32 under autocast"
    yield from _matmul(precision.matmul, precision.name)
    yield from _attention(precision, config.model)
    yield from _storage(precision)
    rounding = precision.update.rounding
    update_dtype = "fp32" if rounding != "nearest" else precision.param_dtype
    if precision.master_dtype is None and precision.grad_dtype != update_dtype:
        must = f"must be {update_dtype} without master weights, as their update is"
        yield f"precision.grad_dtype={precision.grad_dtype}: {must}"
    given = f"precision.reduce_dtype={precision.reduce_dtype}"
    if precision.reduce_dtype is not None and config.train.accumulate == 1:
        yield f"{given}: no ranks to sum over; train.accumulate=8 gives the result of 8 ranks"
    if precision.reduce_dtype is not None and kind_of(config.model).networks > 1:
        yield f"{given}: a discriminator has two losses, added up by a rank (allowed here: null)"
    if precision.reduce_dtype is None:
        read = "reduce_divide reduce_order"
        yield from _set_without_use(precision, "precision", read, "needs precision.reduce_dtype")
    norm_dtypes = {"fp32": 0} | ({} if precision.autocast_dtype else {precision.param_dtype: 0})
    if precision.norm_dtype not in norm_dtypes:
        must = f"norm layers compute in one of {', '.join(norm_dtypes)} here"
        yield f"precision.norm_dtype={precision.norm_dtype}: {must}"
    if precision.fp32_math == "tf32" and config.device == "cpu":
        needed = "TF32 needs a GPU of Ampere or later; use precision=fp32 or device=cuda"
        yield f"precision={precision.name}: {needed}"


def _storage(precision: schema.PrecisionConfig) -> Iterator[str]:
    """Yield what weights and state cannot be stored in."""
    update, master = precision.update, precision.master_dtype
    known = {"nearest", *(("stochastic",) if master == "bf16" else ())}
    given = f"precision.update.rounding={update.rounding}"
    if update.rounding not in known and (master, precision.param_dtype) != (None, "bf16"):
        needed = "precision.param_dtype=bf16 precision.master_dtype=null"
        yield f"{given}: needs {needed} (BF16 weights, no masters)"
    if master in ("bf16", "fp16") and precision.param_dtype == "fp32":
        needed = "needs precision.param_dtype of fp16 or bf16"
        yield f"precision.master_dtype={master}: {needed}; without masters it is null"
    if update.state_rounding != "nearest" and "bf16" not in (
        update.state_dtype,
        update.square_dtype,
    ):
        needed = "precision.update.state_dtype or square_dtype of bf16"
        yield f"precision.update.state_rounding={update.state_rounding}: needs {needed}"


def _attention(precision: schema.PrecisionConfig, model: ModelConfig) -> Iterator[str]:
    half = precision.autocast_dtype or precision.param_dtype
    given = f"precision.attention.format={precision.attention.format}"
    kernel, known = getattr(model, "attention", None), str(model.component.builder)
    if precision.attention.format is None:
        needed = f"needs precision.attention.format, which precision={precision.name} lacks"
        read = "grad_format granularity"
        yield from _set_without_use(precision.attention, "precision.attention", read, needed)
    elif half == "fp32":
        yield f"{given}: needs precision.param_dtype or autocast_dtype of fp16 or bf16"
    elif kernel != "fused" and "mprun." in known:  # of other networks nothing is known
        what = model.name if kernel is None else f"model.attention={kernel}"
        none = f"{what} does not call F.scaled_dot_product_attention"
        yield f"{given}: {none} (allowed here: null)"


# Products of a linear layer -> their operands.
_PRODUCTS = {
    "output": ("input", "weight"),
    "grad_input": ("grad_output", "weight"),
    "grad_weight": ("grad_output", "input"),
}
_OF_BLOCKS = "granularity weight_granularity grad_rounding hadamard"
_OF_CASTS = f"{_OF_BLOCKS} scale scale_rounding history margin dequantized"


def _multiplies_codes(matmul: schema.MatmulConfig) -> bool:
    """Return whether a GPU multiplies codes, not decoded numbers (`ScaledProducts.decoded`)."""
    blocks = {matmul.granularity, matmul.weight_granularity or matmul.granularity}
    return (
        (blocks <= {"none", "tensor"} or blocks == {"row"})
        and matmul.scale in ("fp32", "pow2", "delayed")
        and matmul.grad_rounding == "nearest"
        and "e2m1" not in (matmul.input, matmul.weight, matmul.grad_output)
    )


def _matmul(matmul: schema.MatmulConfig, mode: str) -> Iterator[str]:
    key = "precision.matmul"
    formats = {field: getattr(matmul, field) for field in ("input", "weight", "grad_output")}
    missing = [field for field, own in formats.items() if own is None]
    if missing and len(missing) < len(formats):
        yield f"{key}.{missing[0]}=null: set the format of all operands, or of none"
    for field in ("granularity", "weight_granularity"):
        own = getattr(matmul, field)
        if own is not None and not re.fullmatch(r"none|tensor|row|[1-9]\d*x[1-9]\d*", own):
            must = "must be one of none, tensor, row, or ROWSxCOLUMNS like 1x32"
            yield f"{key}.{field}={own}: {must}"
    if len(missing) == len(formats):
        needed = f"needs {key}.input, weight and grad_output, which precision={mode} lacks"
        yield from _set_without_use(matmul, key, _OF_CASTS, needed)
    yield from _scales(matmul, formats)
    for name, pair in _PRODUCTS.items():
        both = all(formats[operand] == "e5m2" for operand in pair) and _multiplies_codes(matmul)
        if both and name not in matmul.high_precision:
            reason = f"{name} multiplies two E5M2 operands, which no GPU does"
            allowed = f"e4m3, or {name} in {key}.high_precision"
            yield f"{key}.{pair[0]}=e5m2: {reason} (allowed: {allowed})"
    if len(set(matmul.high_precision)) == len(_PRODUCTS):
        own = f"{key}.high_precision={matmul.high_precision}"
        yield f"{own}: leaves no product in these formats; must name two of them at most"
    for field in ("high_precision", "hadamard"):
        if matmul.dequantized and "output" in getattr(matmul, field):
            given = f"{key}.dequantized={matmul.dequantized}"
            yield f"{given}: needs casts of the output; must be [] with output in {key}.{field}"
    if not matmul.modules:
        yield f"{key}.modules=[]: must name a layer, or leave the formats null"


def _scales(matmul: schema.MatmulConfig, formats: dict[str, str | None]) -> Iterator[str]:
    key, scale = "precision.matmul", "precision.matmul.scale"
    of_weights = matmul.weight_granularity or matmul.granularity
    if (of_weights == "none") != (matmul.granularity == "none"):
        given = f"{key}.weight_granularity={matmul.weight_granularity}"
        yield f"{given}: scales are 1 for all operands or none; granularity={matmul.granularity}"
    is_delayed = matmul.scale == "delayed"
    for unread, fields, why in (
        (matmul.granularity == "none", "scale", f"every scale is 1 with {key}.granularity=none"),
        (matmul.scale != "e8m0", "scale_rounding", f"needs {scale}=e8m0"),
        (not is_delayed, "history margin", f"needs {scale}=delayed"),
        (is_delayed, _OF_BLOCKS, f"must be {{}} with {scale}=delayed"),
    ):
        if unread:
            yield from _set_without_use(matmul, key, fields, why)
    others = set(formats.values()) - {"int8"}
    if "int8" in formats.values() and (others or not _multiplies_codes(matmul) or is_delayed):
        needed = f"{key}.granularity=tensor or row, scale=fp32 or pow2, grad_rounding=nearest"
        yield f"{key}.input={formats['input']}: int8 is for all operands, with {needed}"
    for field, own in formats.items():
        if matmul.scale == "four_over_six" and own not in (None, "e2m1"):
            yield f"{key}.{field}={own}: must be e2m1 with {scale}=four_over_six"
        if is_delayed and own == "e2m1":
            yield f"{key}.{field}=e2m1: must be e4m3 or e5m2 with {scale}=delayed"


def _set_without_use(node: Any, key: str, fields: str, why: str) -> Iterator[str]:
    """Yield the fields that have another value than their default, which `why` may name as {}."""
    plain = type(node)()
    for field in fields.split():
        own, default = getattr(node, field), getattr(plain, field)
        if own != default:
            yield f"{key}.{field}={word(own)}: {why.format(word(default))}"
