"""Before step 1: does what the user's own data and network are fit together?

The task of a configuration: model cast, optimizer wrapped, BatchNorm guarded.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from mprun.build.data import check_batches, check_tanh_images
from mprun.build.execution import put_channels_last, uses_channels_last
from mprun.build.model import gan_builders, model_builder
from mprun.build.precision import build_loss_scale, optimizer_maker, update_of
from mprun.build.user_code import Trial
from mprun.config import schema
from mprun.config.schema import RunConfig
from mprun.config.schema_models import task_of
from mprun.data.source import kept_random_state
from mprun.errors import BadInput
from mprun.precision import (
    DTYPES,
    Arithmetic,
    BatchNormGuard,
    LossScale,
    MixedPrecisionOptimizer,
    cast_model,
    why_no_lstm,
)
from mprun.precision.casting import matching_modules, those_that_match
from mprun.tasks import GAN, Classification, LanguageModel, Learner, Reconstruction, SampleDistance


def check_own_data(config: schema.RunConfig, data, device: torch.device) -> None:
    """Hold a source of the user's to what the model asks of it; nothing for mprun's own."""
    if not isinstance(config.data, schema.CustomDataConfig):
        return
    check_batches(config.data, task_of(config.model), data, device)
    tanh = isinstance(config.model, schema.DCGANConfig | schema.ConvAutoencoderConfig)
    if tanh and data.batches_per_epoch:
        check_tanh_images(config.data, config.model.image_size, data)


def check_own_network(
    config: schema.RunConfig,
    builders: Sequence[Callable[[], nn.Module]],
    data,
    arithmetic: Arithmetic,
    overrides: dict[str, torch.dtype],
) -> None:
    """Build the networks once more and try them, where they or their data are the user's own.

    Costs one construction and three passes of two samples, and no random number. Those of the run
    have been built. Not for mprun's LSTM, which takes tokens of any data and may be large.
    """
    own_model = isinstance(config.model, schema.CustomModelConfig)
    own_data = isinstance(config.data, schema.CustomDataConfig)
    if not (own_model or (own_data and not isinstance(config.model, schema.LSTMConfig))):
        return
    if data.batches_per_epoch < 1:
        return  # said with the batch size
    name = f"model={config.model.name}"
    with kept_random_state():
        networks = [builder() for builder in builders]
    if uses_channels_last(config, arithmetic.device)[0]:
        networks = [put_channels_last(network) for network in networks]
    policy, device, native = arithmetic.policy, arithmetic.device, config.cpu_half == "native"
    if own_model:
        name = f"model.factory={config.model.factory}"
        if device.type == "cuda" or native:
            _check_recurrent(f"{name} precision={policy.name}", networks, arithmetic)
    latent_size = getattr(config.model, "latent_size", 0)
    trial = Trial(name, task_of(config.model), networks, data, device, latent_size)
    # One of its own: the run's counts what the run computes.
    own = Arithmetic(policy, device, native=native, overrides=overrides.values())
    trial.run(policy, own, overrides)


def _check_recurrent(name: str, networks: Sequence[nn.Module], arithmetic: Arithmetic) -> None:
    """A mode in which torch's own recurrent layers compute in another dtype is refused."""
    # One routine casts all recurrent layers of a GPU; native CPU kernels differ.
    kind = nn.RNNBase if arithmetic.device.type == "cuda" else nn.LSTM
    layers = [m for network in networks for m in network.modules() if isinstance(m, kind)]
    if layers:
        projected = any(layer.proj_size for layer in layers)
        reason = why_no_lstm(arithmetic.policy, arithmetic.device, projected)
        if reason is not None:
            raise BadInput(f"{name}: {reason}")


def build_task(config: RunConfig, data, policy, arithmetic):
    device = arithmetic.device
    overrides = {pattern: DTYPES[d] for pattern, d in config.precision.overrides.items()}
    make = partial(optimizer_maker, config.optim, policy, device, config.scaler.kind != "none")
    train = config.train
    in_mode = train.eval_arithmetic == "mode"
    check_own_data(config, data, device)
    if task_of(config.model) == "gan":
        return _build_gan(config, data, policy, arithmetic, overrides, make)
    builder = model_builder(config.model, data)
    scale = build_loss_scale(config.scaler, device)
    channels_last, _ = uses_channels_last(config, device)
    model = _new(builder, device, channels_last)
    check_own_network(config, [builder], data, arithmetic, overrides)
    cast = cast_model(model, policy, overrides)
    guards = [BatchNormGuard(cast.module)] if scale.skips_nonfinite else []
    (limits,) = _limits(config, [cast.module])
    optimizer = MixedPrecisionOptimizer(cast, make(cast.module), scale, guards=guards, **limits)
    learner = Learner(cast, optimizer, builder)
    common = {"accumulate": train.accumulate, "eval_in_mode": in_mode}
    match task_of(config.model):
        case "classification":
            if data.num_classes < 2:
                raise BadInput(
                    f"data.root={config.data.root}: one class, a classifier needs two; is the "
                    "folder one level too high?"
                )
            return Classification(
                learner,
                data,
                policy,
                arithmetic,
                scale,
                **common,
                label_smoothing=config.model.label_smoothing,
            )
        case "language_model":
            return LanguageModel(
                learner,
                data,
                policy,
                arithmetic,
                scale,
                **common,
                sampled=_samples(config),
                time_reduction=config.model.time_reduction,
            )
        case "reconstruction":
            return Reconstruction(learner, data, policy, arithmetic, scale, **common)
    raise BadInput(f"model={config.model.name}: no task")


def _build_gan(config: RunConfig, data, policy, arithmetic, overrides, make) -> GAN:
    if config.train.accumulate != 1:
        raise BadInput(
            f"train.accumulate={config.train.accumulate}: {config.model.name} takes one batch "
            "per step (allowed: 1)"
        )
    device = arithmetic.device
    builders = gan_builders(config.model, data)
    channels_last, _ = uses_channels_last(config, device)
    built = [_new(builder, device, channels_last) for builder in builders]
    check_own_network(config, builders, data, arithmetic, overrides)
    matching = [{p: overrides[p] for p in those_that_match(m, overrides)} for m in built]
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
    limits_g, limits_d = _limits(config, [generator.module, discriminator.module])
    guard_g, guard_d = BatchNormGuard(generator.module), BatchNormGuard(discriminator.module)
    learners = (
        Learner(
            generator,
            MixedPrecisionOptimizer(
                generator,
                make(generator.module),
                scales[2],
                guards=[guard_g, guard_d],
                **limits_g,
            ),
            builders[0],
        ),
        Learner(
            discriminator,
            MixedPrecisionOptimizer(
                discriminator,
                make(discriminator.module),
                scales[:2],
                guards=[guard_d],
                **limits_d,
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


def _samples(config: RunConfig) -> bool:
    """Whether the softmax is sampled; BadInput for what cannot be measured of such a model."""
    if getattr(config.model, "sampled_softmax", None) is None:
        return False
    if config.numerics.shadow_every:
        raise BadInput(
            f"numerics.shadow_every={config.numerics.shadow_every}: must be 0 with "
            "model.sampled_softmax, whose tables have no second copy for a shadow step"
        )
    return True


def _limits(config: RunConfig, models: list[nn.Module]) -> list[dict]:
    """How each model is updated and what of it is clipped and averaged: arguments of its optimizer.

    A pattern has to match in one of the models at least; a model in which none of several patterns
    matches is neither clipped nor averaged. ValueError names a pattern without a match.
    """
    train, optim = config.train, config.optim
    found: list[dict] = [{"update": update_of(optim)} for _ in models]
    for what, value, key, patterns in (
        ("clip", train.clip_norm, "train.clip_modules", train.clip_modules),
        ("average", optim.average_decay, "optim.average_modules", optim.average_modules),
    ):
        if value is None:
            continue
        matching = [those_that_match(model, patterns) for model in models]
        for pattern in patterns:
            if not any(pattern in own for own in matching):
                matching_modules(models[0], pattern, key)
        for arguments, own in zip(found, matching, strict=True):
            if own or not patterns:
                name = "clip_norm" if what == "clip" else "average_decay"
                arguments |= {name: value, f"{what}_modules": own}
    return found


def _sample_distance(config: RunConfig, data, device) -> SampleDistance | None:
    """Only for the run that is judged by it: it costs a second or two per evaluation on a CPU."""
    if config.compare.metric != "sliced_wasserstein":
        return None
    size, channels = (data.description.get(key) for key in ("image_size", "channels"))
    if size is None:
        raise BadInput(f"compare.metric={config.compare.metric}: needs square images")
    return SampleDistance(size, channels, device)


def _new(builder: Callable[[], nn.Module], device: torch.device, channels_last: bool) -> nn.Module:
    try:
        network = builder().to(device)
    except ValueError as error:
        raise BadInput(f"model.{error}") from error
    return put_channels_last(network) if channels_last else network
