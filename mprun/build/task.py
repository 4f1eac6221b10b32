"""The task of a configuration: model cast, optimizer wrapped, BatchNorm guarded."""

from collections.abc import Callable
from fnmatch import fnmatchcase

from torch import nn

from mprun.build.model import gan_builders, model_builder
from mprun.build.precision import build_loss_scale, optimizer_maker
from mprun.config import schema
from mprun.config.schema import RunConfig
from mprun.errors import BadInput
from mprun.precision import (
    DTYPES,
    BatchNormGuard,
    LossScale,
    MixedPrecisionOptimizer,
    cast_model,
)
from mprun.tasks import (
    GAN,
    Classification,
    LanguageModel,
    Learner,
    Reconstruction,
    SampleDistance,
)


def build_task(config: RunConfig, data, policy, arithmetic):
    device = arithmetic.device
    overrides = {pattern: DTYPES[d] for pattern, d in config.precision.overrides.items()}
    make = optimizer_maker(config.optim, policy, device, config.scaler.kind != "none")
    train = config.train
    in_mode = train.eval_arithmetic == "mode"
    if isinstance(config.model, schema.DCGANConfig):
        return _build_gan(config, data, policy, arithmetic, overrides, make)
    builder = model_builder(config.model, data)
    scale = build_loss_scale(config.scaler, device)
    cast = cast_model(_new(builder).to(device), policy, overrides)
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
    built = [_new(builder).to(device) for builder in builders]
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
        sample_distance=_sample_distance(config, data, device),
    )


def _sample_distance(config: RunConfig, data, device) -> SampleDistance | None:
    """Only for the run that is judged by it: it costs a second or two per evaluation on a CPU."""
    if config.compare.metric != "sliced_wasserstein":
        return None
    return SampleDistance(config.model.image_size, data.description["channels"], device)


def _matching(module: nn.Module, overrides: dict) -> dict:
    names = [name for name, _ in module.named_modules() if name]
    return {p: d for p, d in overrides.items() if any(fnmatchcase(n, p) for n in names)}


def _new(builder: Callable[[], nn.Module]) -> nn.Module:
    try:
        return builder()
    except ValueError as error:
        raise BadInput(f"model.{error}") from error
