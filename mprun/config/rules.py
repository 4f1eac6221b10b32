"""The rules across fields: what cannot run is refused before anything is written.

Each rule yields a line that names key, value and what is allowed. Rules that depend on the machine
are checked again once its device is known (`refuse_on`). The module also decides what `auto` of an
execution setting means.
"""

import operator
import os
import re
from collections.abc import Iterator
from typing import Any

from mprun.config import schema
from mprun.config.components import COMPONENTS, SOURCES
from mprun.config.fields import is_label, violations
from mprun.config.keys import wanted
from mprun.config.metrics import IN_POINTS
from mprun.config.option_files import named
from mprun.config.registry import NETWORKS, kind_of, readers_of, shares_streams
from mprun.config.schema import DTYPES, RunConfig
from mprun.config.trust import check_own_code
from mprun.errors import BadInput, no_folder


def check(config: RunConfig, *, files: bool = True) -> None:
    """Raise BadInput, with one line, for the first setting that cannot run.

    files: also check that the folder of the data exists.
    """
    rules = (
        violations,
        *(_names, _data_fits_model, _ranks, _optim, _scaler, _precision, _length, _compare),
        *(_numerics, _of_components),
        lambda config: _refused(config, config.device),
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
            yield f"{key}={name[:70]!r}: must be 1 to 64 of letters, digits, . _ and -"


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
        yield f"optim.constant_epochs={_word(epochs)}: read and needed by schedule=epoch_decay"
    if optim.warmup_epochs and (updates := optim.warmup_updates):
        both = f"optim.warmup_epochs={optim.warmup_epochs:g} optim.warmup_updates={updates}"
        yield f"{both}: set one of the two"


def updates_in_16_bits(precision: schema.PrecisionConfig) -> bool:
    """Return whether an update is rounded operation by operation."""
    is_narrow = precision.master_dtype is None and precision.param_dtype != "fp32"
    return is_narrow and precision.update.rounding == "nearest"


def _implementation(config: RunConfig) -> Iterator[str]:
    precision, implementation = config.precision, config.optim.implementation
    if implementation in ("fused", "single_pass") and updates_in_16_bits(precision):
        yield (
            f"optim.implementation={implementation}: {precision.name} updates in 16 bits operation "
            "by operation; one kernel would compute in FP32 (allowed: auto, foreach, loop)"
        )
    if implementation == "single_pass" and precision.grad_dtype != "fp32":
        yield (
            f"optim.implementation=single_pass: with precision.grad_dtype={precision.grad_dtype} "
            "gradients are unscaled in 16 bits, not FP32 (allowed: auto, fused, foreach, loop)"
        )


def _word(value: object) -> str:
    return "null" if value is None else str(value)


def _scaler(config: RunConfig) -> Iterator[str]:
    scaler = config.scaler
    yield from _only_what_is_read("scaler", scaler, f"scaler={scaler.name}")
    for key, holds, word, other in (
        ("min_scale", operator.le, "<=", "max_scale"),
        ("init_scale", operator.ge, ">=", "min_scale"),
        ("init_scale", operator.le, "<=", "max_scale"),
    ):
        value, bound = getattr(scaler, key), getattr(scaler, other)
        if value is not None and bound is not None and not holds(value, bound):
            yield f"scaler.{key}={value:g}: must be {word} scaler.{other} ({bound:g})"
    if scaler.tolerance and (scaler.hysteresis or 1) > 1:
        yield f"scaler.tolerance={scaler.tolerance}: must be 0 with scaler.hysteresis > 1"
    if scaler.per != "shared" and kind_of(config.model).networks == 1:
        has = f"{config.model.name} has one optimizer and one loss"
        yield f"scaler.per={scaler.per}: {has} (allowed: shared)"
    if scaler.per != "shared" and scaler.kind == "none":
        yield f"scaler.per={scaler.per}: scaler=none has no scale"


def _precision(config: RunConfig) -> Iterator[str]:
    precision = config.precision
    for pattern, dtype in precision.overrides.items():
        if dtype not in DTYPES:
            yield f"precision.overrides.{pattern}={dtype}: must be one of {', '.join(DTYPES)}"
    if precision.autocast_dtype is not None and precision.param_dtype != "fp32":
        yield f"precision.param_dtype={precision.param_dtype}: must be fp32 under autocast"
    yield from _products(precision.products, precision.name)
    rounding = precision.update.rounding
    if rounding != "nearest" and (precision.master_dtype, precision.param_dtype) != (None, "bf16"):
        needed = "precision.param_dtype=bf16 precision.master_dtype=null"
        yield f"precision.update.rounding={rounding}: needs {needed} (BF16 weights, no masters)"
    update_dtype = "fp32" if rounding != "nearest" else precision.param_dtype
    if precision.master_dtype is None and precision.grad_dtype != update_dtype:
        must = f"must be {update_dtype} without master weights, as their update is"
        yield f"precision.grad_dtype={precision.grad_dtype}: {must}"
    given = f"precision.reduce_dtype={precision.reduce_dtype}"
    if precision.reduce_dtype is not None and config.train.accumulate == 1:
        yield f"{given}: no ranks to sum over; train.accumulate=8 gives the result of 8 ranks"
    if precision.reduce_dtype is not None and kind_of(config.model).networks > 1:
        yield f"{given}: a discriminator has two losses, added up by a rank (allowed here: null)"
    for key, default in (("reduce_divide", "after"), ("reduce_order", "rank")):
        if precision.reduce_dtype is None and getattr(precision, key) != default:
            yield f"precision.{key}={getattr(precision, key)}: needs precision.reduce_dtype"
    norm_dtypes = {"fp32": 0} | ({} if precision.autocast_dtype else {precision.param_dtype: 0})
    if precision.norm_dtype not in norm_dtypes:
        must = f"norm layers compute in one of {', '.join(norm_dtypes)} here"
        yield f"precision.norm_dtype={precision.norm_dtype}: {must}"
    if precision.fp32_math == "tf32" and config.device == "cpu":
        needed = "TF32 needs a GPU of Ampere or later; use precision=fp32 or device=cuda"
        yield f"precision={precision.name}: {needed}"


# Products of a linear layer -> their operands.
_PRODUCTS = {
    "output": ("input", "weight"),
    "grad_input": ("grad_output", "weight"),
    "grad_weight": ("grad_output", "input"),
}
_OF_CASTS = (
    "granularity weight_granularity scale scale_rounding history margin grad_rounding hadamard"
).split()


def _multiplies_codes(products: schema.ProductsConfig) -> bool:
    """Return whether a GPU multiplies codes, not decoded numbers (`ScaledProducts.decoded`)."""
    blocks = {products.granularity, products.weight_granularity or products.granularity}
    return (
        (blocks <= {"none", "tensor"} or blocks == {"row"})
        and products.scale in ("fp32", "pow2", "delayed")
        and products.grad_rounding == "nearest"
        and "e2m1" not in (products.input, products.weight, products.grad_output)
    )


def _products(products: schema.ProductsConfig, mode: str) -> Iterator[str]:
    formats = {field: getattr(products, field) for field in ("input", "weight", "grad_output")}
    missing = [field for field, own in formats.items() if own is None]
    if missing and len(missing) < len(formats):
        yield f"precision.products.{missing[0]}=null: set the format of all operands, or of none"
    key = "precision.products"
    for field in ("granularity", "weight_granularity"):
        own = getattr(products, field)
        if own is not None and not re.fullmatch(r"none|tensor|row|[1-9]\d*x[1-9]\d*", own):
            yield f"{key}.{field}={own}: must be one of none, tensor, row, or ROWSxCOLUMNS as 1x32"
    plain = schema.ProductsConfig()
    for field in () if len(missing) < len(formats) else _OF_CASTS:
        own = getattr(products, field)
        if own != getattr(plain, field):
            needed = f"needs {key}.input, weight and grad_output, which precision={mode} lacks"
            yield f"{key}.{field}={_word(own)}: {needed}"
    of_weights = products.weight_granularity or products.granularity
    if (of_weights == "none") != (products.granularity == "none"):
        given = f"{key}.weight_granularity={products.weight_granularity}"
        yield f"{given}: scales are 1 for all operands or none; granularity={products.granularity}"
    if products.granularity == "none" and products.scale != plain.scale:
        yield f"{key}.scale={products.scale}: every scale is 1 with {key}.granularity=none"
    if products.scale != "e8m0" and products.scale_rounding != plain.scale_rounding:
        yield f"{key}.scale_rounding={products.scale_rounding}: needs {key}.scale=e8m0"
    yield from _delayed(products, plain)
    for name, pair in _PRODUCTS.items():
        both = all(formats[operand] == "e5m2" for operand in pair) and _multiplies_codes(products)
        if both and name not in products.high_precision:
            reason = f"{name} multiplies two E5M2 operands, which no GPU does"
            allowed = f"e4m3, or {name} in precision.products.high_precision"
            yield f"precision.products.{pair[0]}=e5m2: {reason} (allowed: {allowed})"
    if len(set(products.high_precision)) == len(_PRODUCTS):
        own = f"{key}.high_precision={products.high_precision}"
        yield f"{own}: leaves no product in these formats; must name two of them at most"
    if not products.modules:
        yield "precision.products.modules=[]: must name a layer, or leave the formats null"


def _delayed(products: schema.ProductsConfig, plain: schema.ProductsConfig) -> Iterator[str]:
    """Yield what scale=delayed, of whole tensors whose codes are multiplied, does not take, or what
    another scale does not."""
    is_delayed = products.scale == "delayed"
    whole = ("granularity", "weight_granularity", "grad_rounding", "hadamard")
    for field in whole if is_delayed else ("history", "margin"):
        own, must = getattr(products, field), getattr(plain, field)
        if own != must:
            why = f"must be {_word(must)} with" if is_delayed else "needs"
            yield f"precision.products.{field}={_word(own)}: {why} precision.products.scale=delayed"
    for field in ("input", "weight", "grad_output"):
        if is_delayed and getattr(products, field) == "e2m1":
            why = "must be e4m3 or e5m2 with precision.products.scale=delayed"
            yield f"precision.products.{field}=e2m1: {why}"


def _length(config: RunConfig) -> Iterator[str]:
    train = config.train
    if (train.steps is None) == (train.epochs is None):
        values = f"train.steps={_word(train.steps)} train.epochs={_word(train.epochs)}"
        yield f"{values}: set one of the two and set the other to null"


def _compare(config: RunConfig) -> Iterator[str]:
    allowed = kind_of(config.model).metrics
    metric, margin, window = config.compare.metric, config.compare.margin, config.compare.window
    if allowed and metric not in allowed:
        must = f"must be one of {', '.join(allowed)} for {config.model.name}"
        yield f"compare.metric={metric}: {must}"
    if margin is not None and margin >= 0.5 and metric not in IN_POINTS:
        must = "must be below 0.5; relative to the baseline's mean, 0.01 means 1 %"
        yield f"compare.margin={margin:g}: {must}"
    train = config.train
    if train.steps is not None and window > 1:
        # The last step is always evaluated.
        evaluations = -(-train.steps // train.eval_every) if train.eval_every else 1
        if window > evaluations:
            run = f"{train.steps} steps with train.eval_every={train.eval_every}"
            yield f"compare.window={window}: {run} have {evaluations} (allowed: 1 to {evaluations})"


def _numerics(config: RunConfig) -> Iterator[str]:
    if (every := config.numerics.shadow_every) and not config.numerics.enabled:
        yield f"numerics.shadow_every={every}: needs numerics=on"


def world_of(config: RunConfig) -> int | None:
    """Return the number of ranks of a run; None if `devices=auto` leaves it to the machine."""
    return None if config.devices == "auto" else int(config.devices) * config.nodes


def _ranks(config: RunConfig) -> Iterator[str]:
    devices = config.devices
    if devices != "auto" and not (devices.isdecimal() and 1 <= int(devices[:6]) <= 1024):
        yield f"devices={devices[:70]}: must be a whole number from 1 to 1024, or auto"
        return
    if devices == "auto" and config.device == "cpu":
        yield "devices=auto: counts GPUs; with device=cpu give a number"
    world = world_of(config)
    if world is not None and world > 1:
        yield from why_not_on(config, world)


def why_not_on(config: RunConfig, world: int) -> Iterator[str]:
    """Yield what so many ranks cannot compute in a configuration, and what to change."""
    given = f"devices={config.devices}" + (f" nodes={config.nodes}" if config.nodes > 1 else "")
    parts, batch = config.train.accumulate, config.data.batch_size
    if getattr(config.model, "sampled", False):
        yield f"{given}: model.sampled_softmax updates rows of its tables on one rank (allowed: 1)"
    if shares_streams(config.model):
        if batch % world:
            use = f"data.batch_size={-(-batch // world) * world} or ranks that divide it"
            yield f"{given}: {world} ranks share out data.batch_size={batch} streams; use {use}"
        if config.precision.reduce_dtype is not None:
            why = "would depend on how ranks share out the streams of a recurrent language model"
            yield f"{given}: the sum in precision.reduce_dtype {why} (allowed: 1)"
        if config.scaler.kind == "logmax":
            why = "follows the largest gradient of all streams, of which each rank has some"
            yield f"{given}: scaler={config.scaler.name} {why} (allowed here: 1)"
    elif parts % world:
        more = -(-parts // world) * world
        remedy = f"use train.accumulate={more} ({more * batch:,} samples an update)"
        if parts == 1 and batch % world == 0:
            remedy += f" or data.batch_size={batch // world} train.accumulate={world} ({batch:,})"
        yield f"{given}: {world} ranks share out train.accumulate={parts} micro-batches; {remedy}"
    if config.precision.reduce_order != "rank" and config.dist.order == "fast":
        why = f"{given} add in the library's order (allowed: rank, or dist.order=fixed)"
        yield f"precision.reduce_order={config.precision.reduce_order}: {why}"
    if config.dist.engine == "ddp" and (reason := _why_no_overlap(config)) is not None:
        yield f"dist.engine=ddp: {reason} (allowed here: auto, flat)"
    if config.dist.engine == "fsdp" and (reason := _why_no_shards(config)) is not None:
        yield f"dist.engine=fsdp: {reason} (allowed here: auto, flat)"
    if getattr(config.data, "on_corrupt", None) == "skip":
        yield f"data.on_corrupt=skip: {given} would each replace files (allowed: stop)"
    if config.train.compile != "off":
        yield f"train.compile={config.train.compile}: must be off with {given}"
    if config.numerics.shadow_every:
        must = f"must be 0 with {given}; one device computes the same numbers"
        yield f"numerics.shadow_every={config.numerics.shadow_every}: {must}"


def engine_of(config: RunConfig, device: str) -> tuple[str, str]:
    """Return the value of `dist.engine` on `device`, and why it is not ddp."""
    if config.dist.engine == "fsdp":
        return "fsdp", ""
    reason = _why_no_overlap(config)
    if config.dist.engine == "auto" and reason is None and device != "cuda":
        reason = f"device={device}"
    if config.dist.engine == "auto" and config.model.component.own:
        reason = reason or "a user's network may leave a parameter without a gradient"
    if config.dist.engine == "flat":
        reason = "dist.engine=flat"
    return ("flat", reason) if reason is not None else ("ddp", "")


def _why_no_overlap(config: RunConfig) -> str | None:
    if config.dist.order == "fixed":
        return "dist.order=fixed needs the gradients of each micro-batch"
    return _why_not_in_backward(config)


def _why_no_shards(config: RunConfig) -> str | None:
    if config.optim.average_decay is not None:
        return f"optim.average_decay={config.optim.average_decay} keeps whole weights"
    if config.optim.component.of_matrices:
        return f"optim.name={config.optim.name} needs whole matrices, of which a rank has rows"
    if config.train.channels_last == "on":
        return "train.channels_last=on: shards are rows, in NCHW order"
    if config.model.component.recurrent:
        return f"model {config.model.name} has recurrent layers, with their weights in one buffer"
    if config.precision.reduce_order == "ring":
        return "precision.reduce_order=ring adds whole buckets, not the shards of each block"
    return _why_not_in_backward(config)


def _why_not_in_backward(config: RunConfig) -> str | None:
    kind = kind_of(config.model)
    if not kind.overlaps:
        return "two networks are trained in turn" if kind.networks > 1 else f"task {kind.name}"
    if config.scaler.kind == "logmax":
        return f"scaler={config.scaler.name} needs the largest gradient of each rank"
    return None


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


_HOOKS = "numerics=on watches tensors with hooks"
_RECOMPUTED = "train.activation_checkpointing=true sets random states between operations"


def refuse_on(config: RunConfig, device: str) -> None:
    """Raise BadInput for the first setting of the execution that cannot work on `device`.

    With device=auto the device is only known when the run is built, which then checks again.
    """
    for line in _refused(config, device):
        raise BadInput(line)


def _refused(config: RunConfig, device: str) -> Iterator[str]:
    train = config.train
    if train.activation_checkpointing and config.model.component.blocks is None:
        having = ", ".join(name for name, network in NETWORKS.items() if network.blocks)
        none = f"no blocks of {config.model.name} are known; those of {having} are"
        yield f"train.activation_checkpointing=true: {none} (allowed: false)"
    for key, value, reason, allowed in (
        ("cuda_graph", train.cuda_graph, why_no_graph(config, device), "auto, off"),
        ("compile", train.compile, _why_not_compiled(config, device), "off"),
        ("channels_last", train.channels_last, _why_no_channels_last(config), "auto, off"),
        ("autotune", train.autotune, _why_no_autotune(config, device), "auto, off"),
        ("fused_norm", train.fused_norm, why_no_fused_norm(config, device), "auto, off"),
    ):
        if value not in ("auto", "off") and reason is not None:
            yield f"train.{key}={value}: {reason} (allowed: {allowed})"


def why_no_graph(config: RunConfig, device: str) -> str | None:
    """Return why steps cannot be replayed as a CUDA graph, as far as known; None: they can.

    device: "auto": not known yet.
    """
    if device == "cpu":
        return "a CUDA graph needs device=cuda"
    if config.numerics.enabled:
        return f"{_HOOKS}, which a replay does not call"
    if config.train.activation_checkpointing:
        return _RECOMPUTED
    network = config.model.component
    if network.why_no_graph is not None:
        return network.why_no_graph
    if network.own and config.train.cuda_graph == "auto":
        return "a user's network may change with a number that a replay would keep"
    if world_of(config) != 1 and (reason := _why_not_over_ranks(config)) is not None:
        return reason
    if shares_streams(config.model) and (parts := config.train.accumulate) > 1:
        return f"train.accumulate={parts} with a language model carries its state on in the step"
    if config.data.component.several_shapes:
        return f"data={config.data.name}: batches differ in length, a graph has one shape"
    return None


def _why_not_over_ranks(config: RunConfig) -> str | None:
    """Return why no graph contains the exchanges of ranks; None: one on request, over NCCL."""
    given = f"devices={config.devices}: ranks exchange gradients in a step"
    if config.train.cuda_graph == "auto":
        return f"{given}; train.cuda_graph=on dist.engine=flat captures that too"
    if engine_of(config, "cuda")[0] != "flat":
        return f"{given}, which a graph contains with dist.engine=flat"
    return None


def _why_not_compiled(config: RunConfig, device: str) -> str | None:
    if config.model.component.recurrent:
        return "torch.compile passes over nn.LSTM, nn.GRU and what calls them: nothing is compiled"
    if config.numerics.enabled:
        return f"{_HOOKS}, which compiled code does not call"
    if config.train.activation_checkpointing:
        return _RECOMPUTED
    if device == "cpu" and config.cpu_half == "emulated" and _has_16_bits(config):
        emulated = f"precision={config.precision.name} is emulated on a CPU operation by operation"
        return f"{emulated}, which compiled code does not pass through"
    return None


def _why_no_channels_last(config: RunConfig) -> str | None:
    has_images = kind_of(config.model).family in ("images", "boxes")
    return None if has_images else f"{config.model.name} has no images"


def _why_no_autotune(config: RunConfig, device: str) -> str | None:
    if device == "cpu":
        return "cuDNN needs device=cuda"
    if config.deterministic:
        return "it may choose another kernel in another run, deterministic=true forbids that"
    return None


def why_no_fused_norm(config: RunConfig, device: str) -> str | None:
    """Return why no network has the kernels of BatchNorm with ReLU, as far as known, or None.

    device: "auto": not known yet.
    """
    train = config.train
    if device == "cpu":
        return "its kernels need device=cuda"
    if train.compile != "off":
        return f"train.compile={train.compile} fuses operations by itself"
    nhwc, reason = train.channels_last == "on", "train.channels_last=off"
    if train.channels_last == "auto":
        nhwc, reason = auto_channels_last(config, "cuda")
    return None if nhwc else f"its kernels need NHWC maps, train.channels_last=on ({reason})"


def auto_channels_last(config: RunConfig, device: str) -> tuple[bool, str]:
    """Return the value of train.channels_last=auto on `device`, and why it is off.

    It is on where Tensor Cores multiply, which read NHWC (1.47 to 1.56 times the speed for
    ResNet-50; slower for FP32 products).
    """
    reason = _why_no_channels_last(config)
    if reason is None and config.dist.engine == "fsdp":
        reason = "dist.engine=fsdp"
    if reason is None and device != "cuda":
        reason = f"device={device}"
    if reason is None and not _has_16_bits(config) and config.precision.fp32_math != "tf32":
        reason = "FP32 products"
    if reason is None and config.model.component.own:
        reason = "a user's network may rely on NCHW; train.channels_last=on if it does not"
    return reason is None, reason or ""


def _has_16_bits(config: RunConfig) -> bool:
    precision = config.precision
    dtypes = {precision.autocast_dtype, precision.param_dtype, *precision.overrides.values()}
    return bool(dtypes & {"fp16", "bf16"})
