"""The task of a configuration: model cast, optimizer wrapped, BatchNorm guarded.

The user's own data and networks are tried before step 1.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mprun.build.data import arguments_of, check_batches, check_tanh_images
from mprun.build.model import (
    blocks_of,
    build_networks,
    put_channels_last,
    recompute,
    uses_channels_last,
)
from mprun.build.precision import build_loss_scale, optimizer_maker
from mprun.build.user_code import Factory, Trial
from mprun.config.components import TASKS
from mprun.config.components.custom import CustomDataConfig, CustomModelConfig
from mprun.config.execution_rules import engine_of
from mprun.config.registry import kind_of, task_of
from mprun.config.schema import RunConfig
from mprun.data.source import Source, kept_random_state
from mprun.distributed.ranks import ALONE, Ranks
from mprun.entry_points import loaded
from mprun.errors import BadInput
from mprun.precision import (
    DTYPES,
    CastModel,
    ForwardContext,
    LossScale,
    MixedPrecisionOptimizer,
    PrecisionPolicy,
    cast_model,
    why_no_lstm,
)
from mprun.precision.module_dtypes import matching_modules, those_that_match
from mprun.precision.row_updates import row_tables
from mprun.tasks import BatchStatistics, Learner, SampleDistance, Task

if TYPE_CHECKING:
    from mprun.distributed.reduction import FlatReduction


def build_task(
    config: RunConfig,
    data: Source,
    policy: PrecisionPolicy,
    forward_context: ForwardContext,
    ranks: Ranks = ALONE,
) -> Task:
    """Build the task of a configuration, with its models, optimizers and loss scales.

    It draws the initial weights from the global random state. It raises BadInput, or a ValueError
    that names the key, if that is impossible.
    """
    device, model, name = forward_context.device, config.model, task_of(config.model)
    if isinstance(config.data, CustomDataConfig):
        check_batches(config.data, name, data, device)
        if data.batches_per_epoch and model.component.in_tanh:
            check_tanh_images(config.data, getattr(model, "image_size", 0), data)
    common: dict[str, Any] = {
        "eval_in_mode": config.train.eval_arithmetic == "mode",
        "accumulate": config.train.accumulate,
    }
    make: Any = None
    if name in TASKS:
        make = loaded(TASKS[name].builder)
        common |= arguments_of(make, model)
    casts = _cast_networks(config, data, forward_context)
    if ranks.world > 1 and engine_of(config, device.type)[0] == "fsdp":
        from mprun.distributed.sharding import sharded

        casts = [sharded(casts[0], ranks, [*blocks_of(config, casts[0].module)])]
    if len(casts) > 1:
        return _in_turn(make, config, casts, data, forward_context, ranks, common)
    scale = build_loss_scale(config.scaler, device)
    keeps_statistics = scale.skips_nonfinite or config.train.accumulate > 1 or ranks.world > 1
    guards = [BatchStatistics(casts[0].module)] if keeps_statistics else []
    (learner,) = _learners(config, casts, [scale], [guards], device, ranks)
    if any(size == "num_classes" and getattr(data, size) < 2 for size in kind_of(model).sizes):
        what = "one class, a classifier needs two; is the folder one level too high?"
        raise BadInput(f"data.root={config.data.root}: {what}")
    if (every := config.numerics.shadow_every) and getattr(model, "sampled", False):
        why = "model.sampled_softmax, whose tables have no second copy for a shadow step"
        raise BadInput(f"numerics.shadow_every={every}: must be 0 with {why}")
    make = make or Factory("model.task", name)  # imported after the first draw of weights
    made: Task = make(learner, data, policy, forward_context, scale, **common)
    made.guards, made.ranks = guards, ranks
    return made


def _in_turn(
    make: Callable[..., Task],
    config: RunConfig,
    casts: Sequence[CastModel],
    data: Source,
    forward_context: ForwardContext,
    ranks: Ranks,
    common: dict[str, Any],
) -> Task:
    """Build a task of two networks, each with an optimizer: generator and discriminator."""
    per, device = config.scaler.per, forward_context.device
    count = {"shared": 1, "optimizer": 2}.get(per, 3)
    made = [build_loss_scale(config.scaler, device) for _ in range(count)]
    # For the discriminator's loss on real and on generated images, and the generator's loss.
    scales = (made[0], made[1] if per == "loss" else made[0], made[-1])
    guard_g, guard_d = (BatchStatistics(cast.module) for cast in casts)
    of_losses: list[LossScale | Sequence[LossScale]] = [scales[2], scales[:2]]
    guards = [[guard_g, guard_d], [guard_d]]
    task = make(
        *_learners(config, casts, of_losses, guards, device, ranks),
        data,
        forward_context.policy,
        forward_context,
        scales,
        (guard_g, guard_d),
        **common,
        sample_distance=_sample_distance(config, data, device),
    )
    task.ranks = ranks
    return task


def _cast_networks(
    config: RunConfig, data: Source, forward_context: ForwardContext
) -> list[CastModel]:
    """Build networks in the mode's dtypes; an override must match in at least one of them."""
    policy, device = forward_context.policy, forward_context.device
    overrides = {pattern: DTYPES[d] for pattern, d in config.precision.overrides.items()}
    networks = [network.to(device) for network in build_networks(config.model, data)]
    if uses_channels_last(config, device)[0]:
        networks = [put_channels_last(network) for network in networks]
    _check_own_network(config, networks, data, forward_context, overrides)
    if config.train.activation_checkpointing:
        for block in blocks_of(config, networks[0]).values():
            recompute(block)
    if len(networks) == 1:
        return [cast_model(networks[0], policy, overrides)]
    matching = [{p: overrides[p] for p in those_that_match(m, overrides)} for m in networks]
    if missing := [p for p in overrides if not any(p in own for own in matching)]:
        none = "matches no module of generator or discriminator"
        raise BadInput(f"precision.overrides.{missing[0]}: {none}")
    pairs = zip(networks, matching, strict=True)
    return [cast_model(network, policy, own) for network, own in pairs]


def _learners(
    config: RunConfig,
    casts: Sequence[CastModel],
    scales: Sequence[LossScale | Sequence[LossScale]],
    guards: Sequence[Sequence[BatchStatistics]],
    device: torch.device,
    ranks: Ranks,
) -> list[Learner]:
    """Build each model's optimizer; scales: of the losses that are propagated through it."""
    limits = _limits(config, [cast.module for cast in casts])
    found: list[Learner] = []
    for cast, scale, guard, own in zip(casts, scales, guards, limits, strict=True):
        make = optimizer_maker(config.optim, cast.policy, device, cast.module)
        reduction = _reduction(config, cast, ranks, device)
        seed = 1009 * config.seed + len(found)
        optimizer = MixedPrecisionOptimizer(
            cast, make, scale, guards=guard, reduction=reduction, seed=seed, **own
        )
        found.append(Learner(cast, optimizer))
        if reduction is not None:
            found[-1].network = reduction.wrapped(cast.module)
    return found


def _reduction(
    config: RunConfig, cast: CastModel, ranks: Ranks, device: torch.device
) -> "FlatReduction | None":
    """Return the sum over ranks of one optimizer's gradients; None if a single rank adds each
    micro-batch as it comes."""
    order = config.precision.reduce_order
    if ranks.world == 1 and order == "rank":
        return None
    from mprun.distributed.reduction import FlatReduction, OverlappedReduction

    fixed = ranks.world == 1 or config.dist.order == "fixed"
    if cast.shards:
        from mprun.distributed.sharding import ShardedModel, ShardedReduction

        assert isinstance(cast, ShardedModel)
        apart = cast.policy.reduce_dtype is not None
        return ShardedReduction(cast, fixed=fixed, apart=apart, order=order)
    bucket_bytes = int(config.dist.bucket_mb * 2**20)
    if ranks.world > 1 and engine_of(config, device.type)[0] == "ddp":
        return OverlappedReduction(ranks, bucket_bytes=bucket_bytes)
    return FlatReduction(ranks, fixed=fixed, order=order, bucket_bytes=bucket_bytes)


def _limits(config: RunConfig, models: Sequence[nn.Module]) -> list[dict[str, Any]]:
    """Return arguments of each model's optimizer: update, clipped and averaged parameters.

    A pattern has to match in at least one of the models. A model in which none of several patterns
    matches is neither clipped nor averaged. A ValueError names a pattern without a match.
    """
    train, optim = config.train, config.optim
    # torch's implementations are the plain way.
    update = optim.implementation if optim.implementation in ("auto", "single_pass") else "plain"
    found: list[dict] = [{"update": update, "parts": train.accumulate} for _ in models]
    clipped, averaged = "train.clip_modules", "optim.average_modules"
    for key, value, names, patterns, modules in (
        ("clip_norm", train.clip_norm, "clipped", train.clip_modules, clipped),
        ("average_decay", optim.average_decay, "averaged", optim.average_modules, averaged),
    ):
        if value is None:
            continue
        matching = [those_that_match(model, patterns) for model in models]
        if missing := [one for one in patterns if not any(one in own for own in matching)]:
            weights_in(models[0], missing[:1], modules)  # it raises
        for arguments, model, own in zip(found, models, matching, strict=True):
            if own or not patterns:
                arguments |= {key: value, names: weights_in(model, own, modules)}
    return found


def weights_in(model: nn.Module, patterns: Sequence[str], key: str) -> set[str]:
    """Return the trained parameters in modules that match the patterns of `key`; all without any.

    It raises ValueError if a pattern matches no module, no weight is chosen, or a row table would
    be averaged: its average would have to move in every row.
    """
    tables = row_tables(model)
    around = {f"{m}." for pattern in patterns for m in matching_modules(model, pattern, key)}
    names = {
        name
        for name, own in model.named_parameters()
        if (own.requires_grad or name.rpartition(".")[0] in tables)
        and (not patterns or any(name.startswith(prefix) for prefix in around))
    }
    if not names:
        raise ValueError(f"{key}={list(patterns)}: these have no weights")
    among = [table for table in tables if any(name.startswith(f"{table}.") for name in names)]
    if among and key == "optim.average_modules":
        raise ValueError(
            f"{key}={list(patterns)}: {', '.join(among)} are updated only in the rows that a step "
            "uses and have no average; name the modules to average, e.g. [lstm]"
        )
    return names


def _sample_distance(
    config: RunConfig, data: Source, device: torch.device
) -> SampleDistance | None:
    """Build it only for a run judged by it: it costs a second or two per evaluation on a CPU."""
    if config.compare.metric != "sliced_wasserstein":
        return None
    size, channels = (data.description.get(key) for key in ("image_size", "channels"))
    if size is None or channels is None:
        raise BadInput(f"compare.metric={config.compare.metric}: needs square images")
    return SampleDistance(int(size), int(channels), device)


def _check_own_network(
    config: RunConfig,
    networks: Sequence[nn.Module],
    data: Source,
    forward_context: ForwardContext,
    overrides: dict[str, torch.dtype],
) -> None:
    """Build the networks once more and try them, if they or their data are the user's own.

    It costs one construction and three passes of two samples, and no random number. mprun's LSTM is
    left out: it takes tokens of any data, and may be large.
    """
    model, policy, device = config.model, forward_context.policy, forward_context.device
    of_tokens = kind_of(model).family in ("text", "sentence_pairs")
    if not (model.component.own or (config.data.component.own and not of_tokens)):
        return
    if data.batches_per_epoch < 1:
        return  # reported with the batch size
    # Without torch.device("cpu"), `torch.device("meta")` around it would lose the values of
    # tensors that are no weights.
    with kept_random_state(), torch.device("cpu"):
        copies = build_networks(model, data)
    if uses_channels_last(config, device)[0]:
        copies = [put_channels_last(network) for network in copies]
    native = config.cpu_half == "native"
    name = f"model={model.name}"
    if isinstance(model, CustomModelConfig):
        name = f"model.factory={model.factory}"
        if set(_parameters(networks)) & set(_parameters(copies)):
            raise BadInput(f"{name}: returned a network twice; each call must build one")
        if device.type == "cuda" or native:
            _check_recurrent(f"{name} precision={policy.name}", copies, forward_context)
    latent_size = getattr(model, "latent_size", 0)
    trial = Trial(name, task_of(model), copies, data, device, latent_size, model.carries_state)
    # A separate context: the run's counts the run's operations.
    own = ForwardContext(policy, device, native=native, overrides=overrides.values())
    trial.run(policy, own, overrides)


def _parameters(networks: Sequence[nn.Module]) -> Iterator[nn.Parameter]:
    return chain.from_iterable(network.parameters() for network in networks)


def _check_recurrent(
    name: str, networks: Sequence[nn.Module], forward_context: ForwardContext
) -> None:
    """Refuse a mode in which torch's recurrent layers compute in another dtype."""
    policy, device = forward_context.policy, forward_context.device
    # One routine casts all recurrent layers of a GPU; native CPU kernels differ.
    kind = nn.RNNBase if device.type == "cuda" else nn.LSTM
    layers = [m for network in networks for m in network.modules() if isinstance(m, kind)]
    projected = any(layer.proj_size for layer in layers)
    if layers and (reason := why_no_lstm(policy, device, projected)) is not None:
        raise BadInput(f"{name}: {reason}")
