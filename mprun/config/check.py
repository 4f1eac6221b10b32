"""The rules across fields: what cannot be run is refused before anything is written.

Each rule yields a line that names key, value and what is allowed; `check` raises the first of all
as BadInput. Imports no torch: what depends on the machine is asked again once its device is known
(`refuse_on`), and so is what a factory of the user's own makes. Also here: what
`auto` of an execution is.
"""

import operator
import os
from collections.abc import Iterator

from mprun.config import schema
from mprun.config.metrics import FAMILIES, IN_POINTS, METRICS
from mprun.config.option_files import named
from mprun.config.rules import fields_of, rules_of, violations
from mprun.config.schema import (
    DTYPES,
    CustomModelConfig,
    DeepSpeech2Config,
    LSTMConfig,
    RunConfig,
    task_of,
)
from mprun.config.user_code import check_own_code
from mprun.errors import BadInput


def check(config: RunConfig, *, files: bool = True) -> None:
    """Raise BadInput, with one line, for the first thing that cannot be run.

    files: look for the folder of the data too.
    """
    rules = (
        violations,
        _names,
        _data_fits_model,
        _ranks,
        _optim,
        _scaler,
        _precision,
        _length,
        _compare,
        _numerics,
        _width,
        lambda config: _refused(config, config.device),
        _images_on_disk,
        _sentence_pairs,
        _sampled_softmax,
        _row_convolution,
        _gpt,
        check_own_code,
        _embedded_data,
        *([_data_folder] if files else []),
    )
    for rule in rules:
        for line in rule(config):
            raise BadInput(line)


def _names(config: RunConfig) -> Iterator[str]:
    for group, table in (("model", schema.MODELS), ("data", schema.DATA)):
        node = getattr(config, group)
        if table.get(node.name) is not type(node):
            yield f"{group}.name={node.name}: not a value to set; choose {group}=OPTION"
    scaler, precision = config.scaler.name, config.precision.name
    for key, name in (
        ("name", config.name),
        ("scaler.name", scaler),
        ("precision.name", precision),
    ):
        if name is not None and not is_label(name):
            yield f"{key}={name[:70]!r}: must be 1 to 64 of letters, digits, . _ and -"


def is_label(text: str) -> bool:
    """Whether a file name and a table can hold `text` as it is."""
    plain = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
    return 0 < len(text) <= 64 and set(text) <= plain and not text.startswith((".", "-"))


def _data_fits_model(config: RunConfig) -> Iterator[str]:
    model, data = config.model, config.data
    if data.name == "custom":
        return  # its factory is asked when it is built
    wanted = FAMILIES.get(task_of(model), "images")
    if data.family != wanted:
        sources = {name for name, source in schema.DATA.items() if source.family == wanted}
        options = [o for o, name in named("data").items() if name in sources - {"custom"}]
        learns = f"model {model.name} learns from {wanted.replace('_', ' ')}"
        yield f"data.name={data.name}: {learns}; choose data={', '.join(options)}"
    if isinstance(data, schema.ImagesConfig):
        yield from _images_fit(model, data)


# Network -> the smallest images that it takes, in pixels, and its name.
_SMALLEST = {
    "alexnet": (63, "AlexNet"),
    "resnet50": (32, "ResNet-50"),
    "vgg16": (32, "VGG-16"),
    "googlenet": (32, "GoogLeNet"),
    "inception_v2": (32, "Inception v2"),
    "inception_v3": (75, "Inception v3"),
}


def _images_fit(model: schema.ModelConfig, data: schema.ImagesConfig) -> Iterator[str]:
    size = data.image_size
    if isinstance(model, schema.DCGANConfig | schema.ConvAutoencoderConfig):
        if size != model.image_size:
            yield f"model.image_size={model.image_size}: must equal data.image_size ({size})"
        if data.value_range != "tanh":
            yield (
                f"data.value_range={data.value_range}: must be tanh for {model.name}, "
                "whose generator ends in tanh"
            )
    if isinstance(model, schema.SSD300Config) and size != 300:
        yield f"data.image_size={size}: the default boxes of SSD300 are those of 300 pixels"
    if isinstance(model, schema.SSDMiniConfig) and size % 8:
        yield f"data.image_size={size}: must be a multiple of 8 for ssd_mini"
    if task_of(model) == "detection" and data.channels != 3:
        yield f"data.channels={data.channels}: must be 3 for {model.name}"
    if isinstance(model, schema.FasterRCNNConfig):
        yield from _faster_rcnn_fits(model, data)
    if model.name in _SMALLEST:
        least, network = _SMALLEST[model.name]
        if size < least:
            yield f"data.image_size={size}: {network} needs at least {least} pixels"
        if data.channels != 3:
            yield f"data.channels={data.channels}: must be 3 for {model.name}"


def _faster_rcnn_fits(model: schema.FasterRCNNConfig, data: schema.ImagesConfig) -> Iterator[str]:
    size, convolutions = data.image_size, 4
    if model.variant == "small" and size % 4:
        yield f"data.image_size={size}: must be a multiple of 4 for {model.name}"
    if model.variant == "vgg16":
        convolutions = 13
        if size < 128:
            yield f"data.image_size={size}: the smallest anchors of VGG-16 take 128 pixels"
    if model.frozen > convolutions:
        yield f"model.frozen={model.frozen}: the backbone has {convolutions} convolutions"
    if data.channels != 3:
        yield f"data.channels={data.channels}: must be 3 for {model.name}"
    if model.weights is not None and model.variant != "vgg16":
        yield f"model.weights={model.weights}: only model.variant=vgg16 takes those of a VGG-16"


def _only_what_is_read(group: str, node: object, rule: str, who: str, what: str) -> Iterator[str]:
    """Fields of other rules are null, those of this one are not."""
    for name in sorted(fields_of(node) - fields_of(node, rule)):
        if getattr(node, name) is not None:
            having = " or ".join(f"{group}={one}" for one in rules_of(node, name))
            no_such = f"{group}.{name}={getattr(node, name)}: {who} has no such setting"
            yield f"{no_such}; {having} has it"
    for name in sorted(fields_of(node, rule, needed=True)):
        if getattr(node, name) is None:
            yield f"{group}.{name}=null: {who} needs a {what}"


def _optim(config: RunConfig) -> Iterator[str]:
    optim = config.optim
    yield from _only_what_is_read("optim", optim, optim.name, optim.name, "value")
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
    """torch refuses a factor of an update that its dtype cannot hold, in the middle of a step."""
    optim, precision = config.optim, config.precision
    dtypes = (precision.param_dtype, precision.norm_dtype, *precision.overrides.values())
    narrow = "fp16" in dtypes and updates_in_16_bits(precision)
    largest, dtype = (65504.0, "FP16") if narrow else (3e38, "FP32")
    # Adam's first update divides the rate by 1 - beta1.
    most_lr = largest * (1 - (optim.betas or [0.0])[0]) / max(1.0, optim.bias_lr_factor)
    for key, value, most in (
        ("lr", optim.lr, most_lr),
        ("weight_decay", optim.weight_decay, largest),
        ("eps", optim.eps, largest),
        ("initial_accumulator", optim.initial_accumulator, largest),
    ):
        if value is not None and value > most:
            yield (
                f"optim.{key}={value:g}: {precision.name} updates in {dtype}, which cannot hold it "
                f"(allowed: at most {most:.5g})"
            )


def _schedule(optim: schema.OptimConfig) -> Iterator[str]:
    if optim.milestones and optim.schedule != "step":
        yield f"optim.milestones={list(optim.milestones)}: only schedule=step reads them"
    if optim.schedule == "step" and not optim.milestones:
        yield "optim.milestones=[]: optim.schedule=step needs at least one"
    if (optim.constant_epochs is None) == (optim.schedule == "epoch_decay"):
        yield (
            f"optim.constant_epochs={_word(optim.constant_epochs)}: schedule=epoch_decay needs it, "
            "no other schedule reads it"
        )
    if optim.warmup_epochs and optim.warmup_updates:
        yield (
            f"optim.warmup_epochs={optim.warmup_epochs:g} "
            f"optim.warmup_updates={optim.warmup_updates}: give one of the two"
        )


def updates_in_16_bits(precision: schema.PrecisionConfig) -> bool:
    """Whether an update is rounded operation by operation."""
    is_narrow = precision.master_dtype is None and precision.param_dtype != "fp32"
    return is_narrow and precision.update.rounding == "nearest"


def _implementation(config: RunConfig) -> Iterator[str]:
    precision, implementation = config.precision, config.optim.implementation
    in_16_bits = updates_in_16_bits(precision)
    if implementation == "fused" and in_16_bits:
        yield (
            f"optim.implementation=fused: {precision.name} updates in 16 bits operation by "
            "operation; a fused kernel would compute in FP32 (allowed: auto, foreach, loop)"
        )
    if implementation == "single_pass" and in_16_bits:
        yield (
            f"optim.implementation=single_pass: {precision.name} has no master weights and "
            "updates in 16 bits operation by operation; a single pass computes in FP32 (allowed: "
            "auto, foreach, loop)"
        )
    if implementation == "single_pass" and precision.grad_dtype != "fp32":
        yield (
            f"optim.implementation=single_pass: with precision.grad_dtype={precision.grad_dtype} "
            "gradients are unscaled in 16 bits, in a single pass in FP32 (allowed: auto, fused, "
            "foreach, loop)"
        )


def _word(value: object) -> str:
    return "null" if value is None else str(value)


def _scaler(config: RunConfig) -> Iterator[str]:
    scaler = config.scaler
    yield from _only_what_is_read("scaler", scaler, scaler.kind, f"scaler={scaler.name}", "number")
    yield from _scale_bounds(scaler)
    if scaler.tolerance and (scaler.hysteresis or 1) > 1:
        yield f"scaler.tolerance={scaler.tolerance}: must be 0 with scaler.hysteresis > 1"
    if scaler.per != "shared" and task_of(config.model) != "gan":
        yield (
            f"scaler.per={scaler.per}: {config.model.name} has one optimizer and one "
            "loss (allowed: shared)"
        )
    if scaler.per != "shared" and scaler.kind == "none":
        yield f"scaler.per={scaler.per}: scaler=none has no scale"


def _scale_bounds(scaler: schema.ScalerConfig) -> Iterator[str]:
    for key, holds, word, other in (
        ("min_scale", operator.le, "<=", "max_scale"),
        ("init_scale", operator.ge, ">=", "min_scale"),
        ("init_scale", operator.le, "<=", "max_scale"),
    ):
        value, bound = getattr(scaler, key), getattr(scaler, other)
        if value is not None and bound is not None and not holds(value, bound):
            yield f"scaler.{key}={value:g}: must be {word} scaler.{other} ({bound:g})"
    for name in ("scale", "init_scale", "min_scale", "max_scale"):
        value = getattr(scaler, name)
        if value is not None and not 2.0**-126 <= value <= 2.0**126:
            yield (
                f"scaler.{name}={value:g}: must be between 2^-126 and 2^126, so that "
                "it and its reciprocal are normal FP32 numbers"
            )


def _precision(config: RunConfig) -> Iterator[str]:
    precision = config.precision
    for pattern, dtype in precision.overrides.items():
        if dtype not in DTYPES:
            allowed = ", ".join(DTYPES)
            yield f"precision.overrides.{pattern}={dtype}: must be one of {allowed}"
    if precision.autocast_dtype is not None and precision.param_dtype != "fp32":
        yield f"precision.param_dtype={precision.param_dtype}: must be fp32 under autocast"
    yield from _products(precision.products)
    rounding = precision.update.rounding
    if rounding != "nearest" and (precision.master_dtype, precision.param_dtype) != (None, "bf16"):
        yield (
            f"precision.update.rounding={rounding}: is of BF16 weights without masters, needs "
            "precision.param_dtype=bf16 and precision.master_dtype=null"
        )
    update_dtype = "fp32" if rounding != "nearest" else precision.param_dtype
    if precision.master_dtype is None and precision.grad_dtype != update_dtype:
        yield (
            f"precision.grad_dtype={precision.grad_dtype}: must be {update_dtype} without master "
            "weights, the dtype of their update"
        )
    if precision.reduce_dtype is not None and config.train.accumulate == 1:
        yield (
            f"precision.reduce_dtype={precision.reduce_dtype}: there are no ranks to sum over; use "
            "train.accumulate=8 for what 8 ranks of data.batch_size samples compute"
        )
    if precision.reduce_dtype is not None and task_of(config.model) == "gan":
        yield (
            f"precision.reduce_dtype={precision.reduce_dtype}: a discriminator has two losses in "
            "each micro-batch, which a rank adds up itself (allowed with a GAN: null)"
        )
    if precision.reduce_dtype is None and precision.reduce_divide != "after":
        yield f"precision.reduce_divide={precision.reduce_divide}: needs precision.reduce_dtype"
    norm_dtypes = ("fp32",) if precision.autocast_dtype else ("fp32", precision.param_dtype)
    if precision.norm_dtype not in norm_dtypes:
        yield (
            f"precision.norm_dtype={precision.norm_dtype}: norm layers compute in one of "
            f"{', '.join(dict.fromkeys(norm_dtypes))} here"
        )
    if precision.fp32_math == "tf32" and config.device == "cpu":
        yield (
            f"precision={precision.name}: TF32 needs a GPU of the Ampere generation or "
            "later, a CPU has none; use precision=fp32 or device=cuda"
        )


def _products(products: schema.ProductsConfig) -> Iterator[str]:
    formats = {field: getattr(products, field) for field in ("input", "weight", "grad_output")}
    missing = [field for field, own in formats.items() if own is None]
    if missing and len(missing) < len(formats):
        yield f"precision.products.{missing[0]}=null: give the format of all operands, or of none"
    if products.grad_output == "e5m2" and "e5m2" in (products.input, products.weight):
        yield (
            "precision.products.grad_output=e5m2: a GPU multiplies no two E5M2 operands "
            "(allowed: e4m3, or input and weight in e4m3)"
        )
    for name in products.high_precision:
        if name not in ("output", "grad_input", "grad_weight"):
            yield (
                f"precision.products.high_precision={list(products.high_precision)}: must be of "
                "output, grad_input, grad_weight"
            )
    if not products.modules:
        yield "precision.products.modules=[]: must name a layer, or leave the formats null"


def _length(config: RunConfig) -> Iterator[str]:
    train = config.train
    if (train.steps is None) == (train.epochs is None):
        values = f"train.steps={_word(train.steps)} train.epochs={_word(train.epochs)}"
        yield f"{values}: give one of the two and set the other to null"


def _compare(config: RunConfig) -> Iterator[str]:
    allowed = METRICS.get(task_of(config.model))
    metric, margin, window = config.compare.metric, config.compare.margin, config.compare.window
    if allowed is not None and metric not in allowed:
        yield (
            f"compare.metric={metric}: must be one of {', '.join(allowed)} for {config.model.name}"
        )
    if margin is not None and margin >= 0.5 and metric not in IN_POINTS:
        yield (
            f"compare.margin={margin:g}: is relative to the baseline's mean, 0.01 means 1 %; must "
            "be below 0.5"
        )
    train = config.train
    if train.steps is not None and window > 1:
        # The last step is always evaluated.
        evaluations = -(-train.steps // train.eval_every) if train.eval_every else 1
        if window > evaluations:
            yield (
                f"compare.window={window}: a run of {train.steps} steps with train.eval_every="
                f"{train.eval_every} has {evaluations} (allowed: 1 to {evaluations})"
            )


def _numerics(config: RunConfig) -> Iterator[str]:
    numerics = config.numerics
    if numerics.shadow_every and not numerics.enabled:
        yield f"numerics.shadow_every={numerics.shadow_every}: needs numerics=on"


def _images_on_disk(config: RunConfig) -> Iterator[str]:
    data = config.data
    if not isinstance(data, schema.ImageFolderConfig):
        return
    task = task_of(config.model)
    if data.layout == "flat" and (config.model.name == "custom" or task == "classification"):
        yield (f"data.layout=flat: images without labels; a {task} model needs data.layout=classes")
    if data.centre_crop is not None and data.augmentation != "centre":
        yield f"data.centre_crop={data.centre_crop}: only data.augmentation=centre reads it"
    if data.resize_to is not None and data.augmentation == "centre":
        yield (
            f"data.resize_to={data.resize_to}: data.augmentation=centre resizes to "
            "data.image_size; use data.centre_crop"
        )
    if data.resize_to is not None and data.resize_to < data.image_size:
        yield f"data.resize_to={data.resize_to}: must be >= data.image_size ({data.image_size})"


def _sentence_pairs(config: RunConfig) -> Iterator[str]:
    data = config.data
    if not isinstance(data, schema.ParallelTextConfig):
        return
    for key in ("source_language", "target_language"):
        if not is_label(language := getattr(data, key)):
            yield f"data.{key}={language[:70]!r}: must be 1 to 64 of letters, digits, . _ and -"
    if data.source_language == data.target_language:
        yield f"data.target_language={data.target_language}: must differ from data.source_language"


def _width(config: RunConfig) -> Iterator[str]:
    model = config.model
    if not isinstance(model, schema.AlexNetConfig | schema.ResNet50Config) or model.width == 1:
        return
    other = "2012" if isinstance(model, schema.AlexNetConfig) else "preactivation"
    if model.variant != other:
        yield (
            f"model.width={model.width:g}: model.variant={model.variant} is torchvision's, of one "
            f"width (allowed: 1; model.variant={other} has others)"
        )


def _sampled_softmax(config: RunConfig) -> Iterator[str]:
    model, optim = config.model, config.optim
    if not isinstance(model, LSTMConfig):
        return
    if model.sampled_softmax is None:
        factor = model.embedding_gradient_factor
        if factor != 1.0:
            yield f"model.embedding_gradient_factor={factor:g}: only with model.sampled_softmax"
        return
    if optim.name not in ("sgd", "adagrad") or optim.momentum or optim.weight_decay:
        yield (
            f"optim={optim.name} model.sampled_softmax={model.sampled_softmax}: rows are updated "
            "only where used (allowed: adagrad or sgd without momentum, no weight decay)"
        )
    if config.train.accumulate != 1:
        yield f"train.accumulate={config.train.accumulate}: must be 1 with model.sampled_softmax"


def _row_convolution(config: RunConfig) -> Iterator[str]:
    model = config.model
    if isinstance(model, DeepSpeech2Config) and model.bidirectional and model.row_convolution:
        yield (
            f"model.row_convolution={model.row_convolution}: looks ahead for layers that do not; "
            "must be 0 with model.bidirectional=true"
        )


def _gpt(config: RunConfig) -> Iterator[str]:
    model = config.model
    if not isinstance(model, schema.GPTConfig):
        return
    heads, kv_heads = model.num_heads, model.kv_heads
    if model.hidden_size % heads:
        yield f"model.num_heads={heads}: must divide model.hidden_size ({model.hidden_size})"
    if kv_heads is not None and heads % kv_heads:
        yield f"model.kv_heads={kv_heads}: must divide model.num_heads ({heads})"
    if model.positions == "rotary" and model.hidden_size // heads % 2:
        yield (
            f"model.positions=rotary: turns pairs of a head's units, of which there are "
            f"{model.hidden_size // heads} (model.hidden_size / model.num_heads); must be even"
        )
    length = getattr(config.data, "sequence_length", None)
    if length and model.context_length is not None and model.context_length < length:
        yield (
            f"model.context_length={model.context_length}: must be >= data.sequence_length "
            f"({length})"
        )


def world_of(config: RunConfig) -> int | None:
    """The ranks of a run; None where `devices=auto` leaves that to the machine."""
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
    """What of a configuration cannot be computed by so many ranks, and what to change."""
    given = f"devices={config.devices}" + (f" nodes={config.nodes}" if config.nodes > 1 else "")
    task = task_of(config.model)
    parts, batch = config.train.accumulate, config.data.batch_size
    if isinstance(config.model, LSTMConfig) and config.model.sampled_softmax is not None:
        yield f"{given}: model.sampled_softmax updates rows of its tables on one rank (allowed: 1)"
    if task == "language_model":
        if batch % world:
            yield (
                f"{given}: {world} ranks share out data.batch_size={batch} streams; use "
                f"data.batch_size={-(-batch // world) * world} or a number of ranks that divides it"
            )
        if config.precision.reduce_dtype is not None:
            yield (
                f"{given}: the ranks of a language model share out its streams, so that what "
                "precision.reduce_dtype sums would depend on their number (allowed: 1)"
            )
        if config.scaler.kind == "logmax":
            yield (
                f"{given}: scaler={config.scaler.name} follows the largest gradient of all "
                "streams, of which each rank has some (allowed with a language model: 1)"
            )
    elif parts % world:
        more = -(-parts // world) * world
        remedy = f"use train.accumulate={more} ({more * batch:,} samples an update)"
        if parts == 1 and batch % world == 0:
            remedy += f" or data.batch_size={batch // world} train.accumulate={world} ({batch:,})"
        yield f"{given}: {world} ranks share out train.accumulate={parts} micro-batches; {remedy}"
    if config.dist.engine == "ddp" and (reason := _why_no_overlap(config)) is not None:
        yield f"dist.engine=ddp: {reason} (allowed here: auto, flat)"
    if getattr(config.data, "on_corrupt", None) == "skip":
        yield f"data.on_corrupt=skip: {given} would each replace files (allowed: stop)"
    if config.train.cuda_graph == "on":
        yield f"train.cuda_graph=on: {given} exchange gradients in a step (allowed: auto, off)"
    if config.train.compile != "off":
        yield f"train.compile={config.train.compile}: must be off with {given}"
    if config.numerics.shadow_every:
        yield (
            f"numerics.shadow_every={config.numerics.shadow_every}: must be 0 with {given}; a run "
            "on one device computes the same numbers"
        )


def engine_of(config: RunConfig, device: str) -> tuple[str, str]:
    """What `dist.engine` is on `device`, and why it is not ddp."""
    reason = _why_no_overlap(config)
    if config.dist.engine == "auto" and reason is None and device != "cuda":
        reason = f"device={device}"
    if config.dist.engine == "auto" and isinstance(config.model, CustomModelConfig):
        reason = reason or "a network of one's own may leave a parameter without a gradient"
    if config.dist.engine == "flat":
        reason = "dist.engine=flat"
    return ("flat", reason) if reason is not None else ("ddp", "")


def _why_no_overlap(config: RunConfig) -> str | None:
    task = task_of(config.model)
    if config.dist.order == "fixed":
        return "dist.order=fixed needs the gradients of each micro-batch"
    if task not in ("classification", "reconstruction", "language_model", "speech", "detection"):
        return "two networks are trained in turn" if task == "gan" else f"task {task}"
    if config.scaler.kind == "logmax":
        return f"scaler={config.scaler.name} needs the largest gradient of each rank"
    return None


def _embedded_data(config: RunConfig) -> Iterator[str]:
    data = config.data
    if data.root is not None and not data.on_disk and data.name != "custom":
        # Not Path.exists, which raises for a name that is too long.
        if not os.path.exists(data.root):
            yield f"data.root={data.root}: no such folder"
        yield (
            f"data.root={data.root}: data.name={data.name} is embedded and "
            "reads no folder (allowed: null)"
        )
    if data.workers and not data.decodes:
        yield (
            f"data.workers={data.workers}: data.name={data.name} needs no loader process "
            "(allowed: 0 or null)"
        )


def _data_folder(config: RunConfig) -> Iterator[str]:
    data = config.data
    if not data.on_disk:
        return
    if data.root is None:
        yield (
            f"data.root=null: data={data.name} needs the folder of its files (which, says "
            "docs/recipes.md)"
        )
    elif not os.path.isdir(data.root):
        yield f"data.root={data.root}: no such folder"


_HOOKS = "numerics=on watches tensors with hooks"


def refuse_on(config: RunConfig, device: str) -> None:
    """BadInput for the first setting of the execution that cannot work on `device`.

    With device=auto the device is known only when the run is built: it is asked for again then.
    """
    for line in _refused(config, device):
        raise BadInput(line)


def _refused(config: RunConfig, device: str) -> Iterator[str]:
    train = config.train
    for key, value, reason, allowed in (
        ("cuda_graph", train.cuda_graph, why_no_graph(config, device), "auto, off"),
        ("compile", train.compile, _why_not_compiled(config, device), "off"),
        ("channels_last", train.channels_last, _why_no_channels_last(config), "auto, off"),
        ("autotune", train.autotune, _why_no_autotune(config, device), "auto, off"),
    ):
        if value not in ("auto", "off") and reason is not None:
            yield f"train.{key}={value}: {reason} (allowed: {allowed})"


def why_no_graph(config: RunConfig, device: str) -> str | None:
    """Why steps cannot be replayed as a CUDA graph, as far as the configuration tells; or None.

    device: "auto": not known yet.
    """
    if device == "cpu":
        return "a CUDA graph needs device=cuda"
    if config.numerics.enabled:
        return f"{_HOOKS}, which a replay does not call"
    if isinstance(config.model, schema.FasterRCNNConfig):
        return "of the regions that Faster R-CNN proposes only the device knows how many are left"
    if isinstance(config.model, CustomModelConfig) and config.train.cuda_graph == "auto":
        return "a network of one's own may change with a number that a replay would keep"
    if world_of(config) != 1:
        return f"devices={config.devices}: ranks exchange gradients in a step"
    if task_of(config.model) == "language_model" and config.train.accumulate > 1:
        return (
            f"train.accumulate={config.train.accumulate} with a language model, whose state is "
            "carried on inside of the step"
        )
    if isinstance(config.data, schema.SpeechManifestConfig):
        return f"data={config.data.name}: batches differ in length, a graph has one shape"
    return None


def _why_not_compiled(config: RunConfig, device: str) -> str | None:
    if config.model.recurrent:
        return (
            "torch.compile passes over nn.LSTM, nn.GRU and the function around them: nothing is "
            "compiled"
        )
    if config.numerics.enabled:
        return f"{_HOOKS}, which compiled code does not call"
    if device == "cpu" and config.cpu_half == "emulated" and _has_16_bits(config):
        return (
            f"precision={config.precision.name} is emulated on a CPU, operation by operation, "
            "which compiled code does not pass through"
        )
    return None


def _why_no_channels_last(config: RunConfig) -> str | None:
    family = FAMILIES.get(task_of(config.model), "images")
    return None if family in ("images", "boxes") else f"{config.model.name} has no images"


def _why_no_autotune(config: RunConfig, device: str) -> str | None:
    if device == "cpu":
        return "cuDNN needs device=cuda"
    if config.deterministic:
        return "it may choose another kernel in another run, deterministic=true forbids that"
    return None


def auto_channels_last(config: RunConfig, device: str) -> tuple[bool, str]:
    """What train.channels_last=auto is on `device`, and why it is off.

    On where Tensor Cores multiply, which read NHWC (1.47 to 1.56 times the speed for ResNet-50;
    slower for FP32 products).
    """
    reason = _why_no_channels_last(config)
    if reason is None and device != "cuda":
        reason = f"device={device}"
    if reason is None and not _has_16_bits(config) and config.precision.fp32_math != "tf32":
        reason = "FP32 products"
    if reason is None and isinstance(config.model, CustomModelConfig):
        reason = "a network of one's own may rely on NCHW; train.channels_last=on if it does not"
    return reason is None, reason or ""


def _has_16_bits(config: RunConfig) -> bool:
    precision = config.precision
    dtypes = {precision.autocast_dtype, precision.param_dtype, *precision.overrides.values()}
    return bool(dtypes & {"fp16", "bf16"})
