"""From a checked configuration to the objects of a run; the only place that reads both."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mprun import models
from mprun.config import schema
from mprun.config.check import SCALER_FIELDS
from mprun.config.schema import MAX_STEPS, RunConfig
from mprun.data import DataError, DigitsImages, DocsText, SyntheticImages, SyntheticTokens
from mprun.errors import BadInput
from mprun.precision import (
    DTYPES,
    MODES,
    Arithmetic,
    BatchNormGuard,
    DynamicLossScale,
    LogMaxLossScale,
    LossScale,
    MixedPrecisionOptimizer,
    NoLossScale,
    PrecisionPolicy,
    StaticLossScale,
    build_policy,
    cast_model,
    why_unsupported,
)
from mprun.precision.inner_optimizer import has_fused_kernel
from mprun.schedule import learning_rates
from mprun.tasks import GAN, Classification, LanguageModel, Learner, Reconstruction


@dataclass(slots=True)
class Built:
    """Everything that a run needs and that costs no file."""

    task: Classification | LanguageModel | GAN | Reconstruction
    data: DigitsImages | DocsText | SyntheticImages | SyntheticTokens
    policy: PrecisionPolicy
    arithmetic: Arithmetic
    device: torch.device
    steps: int
    lr: list[float]  # learning rate by number of applied updates


def build(config: RunConfig, device: torch.device) -> Built:
    """Build data, model, optimizer, loss scale and task; raises BadInput for what cannot be.

    Draws the initial weights from the global random state (seed it first).
    """
    policy = policy_from(config.precision)
    reason = why_unsupported(policy, device)
    if reason is not None:
        raise BadInput(f"precision={policy.name} device={config.device}: {reason}")
    try:
        data = build_data(config.data, config.seed, device)
    except DataError as error:
        raise BadInput(str(error)) from error
    except ValueError as error:
        raise BadInput(f"data.{error}") from error
    overrides = [DTYPES[name] for name in config.precision.overrides.values()]
    native = config.cpu_half == "native"
    arithmetic = Arithmetic(policy, device, native=native, overrides=overrides)
    try:
        task = _build_task(config, data, policy, arithmetic)
    except ValueError as error:
        raise BadInput(str(error)) from error
    if task.steps_per_epoch < 1:
        raise BadInput(
            f"data.batch_size={config.data.batch_size}: too large, the data have no "
            f"full step of {task.samples_per_step} {task.sample}s"
        )
    steps = config.train.steps
    if steps is None:
        steps = max(1, round(config.train.epochs * task.steps_per_epoch))
        if steps > MAX_STEPS:
            raise BadInput(
                f"train.epochs={config.train.epochs}: {steps} steps, at most {MAX_STEPS}"
                " are allowed"
            )
    optim = config.optim
    lr = learning_rates(
        optim.lr,
        steps,
        schedule=optim.schedule,
        warmup_updates=optim.warmup_updates,
        final_factor=optim.final_factor,
        power=optim.power,
        milestones=tuple(optim.milestones),
        gamma=optim.gamma,
    )
    return Built(task, data, policy, arithmetic, device, steps, lr)


def mode_label(config: schema.PrecisionConfig) -> str:
    """The mode's name, with every value that differs from the mode's own and every override.

    "fp32" is a baseline; "fp32+param_dtype=fp16" is not.
    """
    own = MODES[config.name]
    changed = [
        f"{field}={getattr(config, field)}"
        for field, value in own.items()
        if getattr(config, field) != value
    ]
    changed += [f"{pattern}={dtype}" for pattern, dtype in config.overrides.items()]
    return "+".join([config.name, *changed])


def policy_from(config: schema.PrecisionConfig) -> PrecisionPolicy:
    """The precision policy that a configuration describes."""
    fields = (
        "param_dtype",
        "norm_dtype",
        "master_dtype",
        "grad_dtype",
        "loss_dtype",
        "autocast_dtype",
        "fp32_math",
    )
    return build_policy(config.name, {field: getattr(config, field) for field in fields})


def build_data(config: schema.DataConfig, seed: int, device: torch.device):
    """The data source of a configuration."""
    common = {"batch_size": config.batch_size, "seed": seed, "device": device}
    match config:
        case schema.DigitsConfig():
            return DigitsImages(
                config.image_size,
                **common,
                channels=config.channels,
                value_range=config.value_range,
            )
        case schema.DocsTextConfig():
            return DocsText(
                config.level,
                sequence_length=config.sequence_length,
                vocab_limit=config.vocab_limit,
                vocab_multiple=config.vocab_multiple,
                **common,
            )
        case schema.SyntheticImagesConfig():
            return SyntheticImages(
                config.num_classes,
                config.image_size,
                **common,
                channels=config.channels,
                train_size=config.train_size,
                eval_size=config.eval_size,
                value_range=config.value_range,
            )
        case schema.SyntheticTokensConfig():
            return SyntheticTokens(
                config.vocab_size,
                sequence_length=config.sequence_length,
                train_tokens=config.train_tokens,
                eval_tokens=config.eval_tokens,
                **common,
            )
    raise BadInput(f"data={config.name}: no builder")


def model_builder(config: schema.ModelConfig, data) -> Callable[[], nn.Module]:
    """A function that builds the (FP32) model of a configuration with new random weights.

    For DCGAN use `gan_builders`.
    """
    match config:
        case schema.AlexNetConfig():
            network = models.alexnet if config.variant == "torchvision" else models.AlexNet2012
            classes = _at_least_the_data_s("num_classes", config.num_classes, data.num_classes)
            return lambda: network(classes, config.dropout)
        case schema.ResNet50Config():
            classes = _at_least_the_data_s("num_classes", config.num_classes, data.num_classes)
            return lambda: models.resnet50(classes)
        case schema.LSTMConfig():
            vocabulary = _at_least_the_data_s("vocab_size", config.vocab_size, data.vocab_size)

            def padded(size: int) -> int:
                return models.pad_to_multiple(size, config.pad_to_multiple)

            return lambda: models.LSTMLanguageModel(
                padded(vocabulary),
                padded(config.embedding_size),
                padded(config.hidden_size),
                config.num_layers,
                padded(config.projection_size),
                config.dropout,
                config.init_range,
                config.forget_bias,
            )
        case schema.ConvAutoencoderConfig():
            channels = data.description["channels"]
            return lambda: models.ConvAutoencoder(
                config.image_size, config.code_size, config.width, channels
            )
    raise BadInput(f"model={config.name}: no builder")


def gan_builders(config: schema.DCGANConfig, channels: int):
    """Functions that build generator and discriminator with new random weights."""
    return (
        lambda: models.Generator(
            config.image_size, config.latent_size, config.generator_width, channels
        ),
        lambda: models.Discriminator(config.image_size, config.discriminator_width, channels),
    )


def build_loss_scale(config: schema.ScalerConfig, device: torch.device) -> LossScale:
    """A fresh loss scale of the configured kind."""
    arguments = {name: getattr(config, name) for name in SCALER_FIELDS[config.kind]}
    arguments = {name: value for name, value in arguments.items() if value is not None}
    kinds = {
        "none": NoLossScale,
        "static": StaticLossScale,
        "dynamic": DynamicLossScale,
        "logmax": LogMaxLossScale,
    }
    return kinds[config.kind](**arguments, device=device)


def optimizer_maker(config: schema.OptimConfig, in_16_bits: bool, device: torch.device):
    """A function from (name, tensor) pairs to a torch optimizer.

    implementation "auto" is the fused kernel, except where the update itself is in 16 bits: a
    fused kernel would compute that in FP32 registers (and torch's fused SGD does not update half
    parameters on a CPU at all).
    """
    implementation, fused = config.implementation, has_fused_kernel(config.name, device)
    if implementation == "auto":
        implementation = "fused" if fused and not in_16_bits else "foreach"
    elif implementation == "fused" and not fused:
        raise BadInput(
            f"optim.implementation=fused: torch {torch.__version__} has no fused "
            f"{config.name} on {device.type} (allowed: auto, foreach, loop)"
        )
    common = {
        "lr": config.lr,
        "weight_decay": config.weight_decay,
        "fused": implementation == "fused",
        "foreach": implementation == "foreach",
    }

    def make(named: list[tuple[str, Tensor]]) -> torch.optim.Optimizer:
        tensors = [tensor for _, tensor in named]
        match config.name:
            case "sgd":
                return torch.optim.SGD(
                    tensors,
                    momentum=config.momentum or 0.0,
                    nesterov=bool(config.nesterov),
                    **common,
                )
            case "adam" | "adamw":
                kind = torch.optim.Adam if config.name == "adam" else torch.optim.AdamW
                capturable = device.type == "cuda" and implementation != "fused"
                return kind(
                    tensors,
                    betas=tuple(config.betas or (0.9, 0.999)),
                    **common,
                    eps=1e-8 if config.eps is None else config.eps,
                    capturable=capturable,
                )
            case "adagrad":
                return torch.optim.Adagrad(
                    tensors,
                    **common,
                    initial_accumulator_value=config.initial_accumulator or 0.0,
                    eps=1e-10 if config.eps is None else config.eps,
                )
        raise BadInput(f"optim={config.name}: no builder")

    return make


def _build_task(config: RunConfig, data, policy, arithmetic):
    device = arithmetic.device
    overrides = {pattern: DTYPES[d] for pattern, d in config.precision.overrides.items()}
    make = optimizer_maker(config.optim, policy.master_dtype is None, device)
    train = config.train
    in_mode = train.eval_arithmetic == "mode"
    if isinstance(config.model, schema.DCGANConfig):
        return _build_gan(config, data, policy, arithmetic, overrides, make)
    builder = model_builder(config.model, data)
    scale = build_loss_scale(config.scaler, device)
    cast = cast_model(builder().to(device), policy, overrides)
    guards = [BatchNormGuard(cast.module)] if scale.skips_nonfinite else []
    optimizer = MixedPrecisionOptimizer(cast, make, scale, clip_norm=train.clip_norm, guards=guards)
    learner = Learner(cast, optimizer, builder)
    common = {"accumulate": train.accumulate, "eval_in_mode": in_mode}
    match config.model:
        case schema.AlexNetConfig() | schema.ResNet50Config():
            return Classification(
                learner,
                data,
                policy,
                arithmetic,
                scale,
                **common,
                label_smoothing=config.model.label_smoothing,
            )
        case schema.LSTMConfig():
            return LanguageModel(learner, data, policy, arithmetic, scale, **common)
        case schema.ConvAutoencoderConfig():
            return Reconstruction(learner, data, policy, arithmetic, scale, **common)
    raise BadInput(f"model={config.model.name}: no task")


def _build_gan(config: RunConfig, data, policy, arithmetic, overrides, make) -> GAN:
    if config.train.accumulate != 1:
        raise BadInput(
            f"train.accumulate={config.train.accumulate}: dcgan takes one batch per "
            "step (allowed: 1)"
        )
    device, clip_norm = arithmetic.device, config.train.clip_norm
    builders = gan_builders(config.model, data.description["channels"])
    built = [builder().to(device) for builder in builders]
    matching = [_matching(module, overrides) for module in built]
    for pattern in overrides:
        if not any(pattern in own for own in matching):
            raise BadInput(
                f"precision.overrides.{pattern}: matches no module of generator or discriminator"
            )
    generator, discriminator = (
        cast_model(module, policy, own) for module, own in zip(built, matching, strict=True)
    )

    def scale() -> LossScale:
        return build_loss_scale(config.scaler, device)

    match config.scaler.per:
        case "shared":
            scales = (scale(),) * 3
        case "optimizer":
            scales = (both := scale(), both, scale())
        case _:
            scales = (scale(), scale(), scale())
    guard_g, guard_d = BatchNormGuard(generator.module), BatchNormGuard(discriminator.module)
    learners = (
        Learner(
            generator,
            MixedPrecisionOptimizer(
                generator,
                make,
                scales[2],
                clip_norm=clip_norm,
                guards=[guard_g, guard_d],
            ),
            builders[0],
        ),
        Learner(
            discriminator,
            MixedPrecisionOptimizer(
                discriminator,
                make,
                scales[:2],
                clip_norm=clip_norm,
                guards=[guard_d],
            ),
            builders[1],
        ),
    )
    return GAN(
        *learners,
        data,
        policy,
        arithmetic,
        scales,
        guard_d,
        latent_size=config.model.latent_size,
        eval_in_mode=config.train.eval_arithmetic == "mode",
    )


def _matching(module: nn.Module, overrides: dict) -> dict:
    from fnmatch import fnmatchcase

    names = [name for name, _ in module.named_modules() if name]
    return {p: d for p, d in overrides.items() if any(fnmatchcase(n, p) for n in names)}


def _at_least_the_data_s(key: str, wanted: int | None, given: int) -> int:
    if wanted is not None and wanted < given:
        raise BadInput(f"model.{key}={wanted}: must be >= {given}, what the data have")
    return wanted or given
