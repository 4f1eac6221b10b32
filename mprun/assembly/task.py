"""The task of a configuration: networks prepared for their mode, each with its optimizer.

Networks are mprun's own, or those of the user's factory, which are tried before step 1, as is the
user's data.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mprun.assembly.data import arguments_of, check_batches, check_tanh_images
from mprun.assembly.precision import build_loss_scale, optimizer_maker
from mprun.assembly.user_code import Factory, Trial
from mprun.config.components import TASKS
from mprun.config.components.custom import CustomDataConfig, CustomModelConfig
from mprun.config.execution_rules import auto_channels_last, engine_of
from mprun.config.registry import ModelConfig, kind_of, task_of
from mprun.config.schema import RunConfig
from mprun.data.source import Source, kept_random_state
from mprun.distributed.ranks import ALONE, Ranks
from mprun.distributed.reduction import FlatReduction, OverlappedReduction
from mprun.entry_points import loaded
from mprun.errors import BadInput
from mprun.precision import DTYPES, BatchStatistics, ForwardContext, LossScale, why_no_lstm
from mprun.precision.module_dtypes import matching_modules, refuse_without_effect, those_that_match
from mprun.prepared.prepared_model import PreparedModel
from mprun.tasks import Learner, OfParameters, SampleDistance, Task
from mprun.torch_private import apply_to_tensors

Network = tuple[nn.Module, dict[str, torch.dtype]]  # and its own overrides by pattern


def build_task(
    config: RunConfig, data: Source, forward_context: ForwardContext, ranks: Ranks = ALONE
) -> Task:
    """Build the task of a configuration, with its models, optimizers and loss scales.

    It draws the initial weights from the global random state. It raises BadInput, or a ValueError
    that names the key, if that is impossible.
    """
    return _Builder(config, data, forward_context, ranks).task()


@dataclass(frozen=True, slots=True)
class _Builder:
    """Build a task, and the networks and learners of it, from the same parts."""

    config: RunConfig
    data: Source
    forward_context: ForwardContext
    ranks: Ranks

    def task(self) -> Task:
        config, data, model = self.config, self.data, self.config.model
        device, policy = self.forward_context.device, self.forward_context.policy
        if isinstance(config.data, CustomDataConfig):
            check_batches(config.data, task_of(model), data, device)
            if data.batches_per_epoch and model.component.in_tanh:
                check_tanh_images(config.data, getattr(model, "image_size", 0), data)
        networks = self.networks()
        scale = build_loss_scale(config.scaler, device)
        if len(networks) > 1:
            # The first network is the generator.
            per_optimizer = config.scaler.per == "optimizer"
            own = build_loss_scale(config.scaler, device) if per_optimizer else scale
            learners = self.learners(networks, [own, scale])
            distance = self.sample_distance()
            return self.made(*learners, data, self.forward_context, sample_distance=distance)
        (learner,) = self.learners(networks, [scale])
        if any(size == "num_classes" and getattr(data, size) < 2 for size in kind_of(model).sizes):
            what = "one class, a classifier needs two; is the folder one level too high?"
            raise BadInput(f"data.root={config.data.root}: {what}")
        return self.made(learner, data, policy, self.forward_context, scale)

    def made(self, *given: Any, **more: Any) -> Task:
        """Call the task's class. A user's is imported here, after the first draw of weights."""
        name, train = task_of(self.config.model), self.config.train
        make = loaded(TASKS[name].builder) if name in TASKS else Factory("model.task", name)
        if name in TASKS:
            more |= arguments_of(partial(make, *given), self.config.model)
        in_mode = train.eval_arithmetic == "mode"
        task: Task = make(*given, eval_in_mode=in_mode, accumulate=train.accumulate, **more)
        task.ranks = self.ranks
        return task

    def networks(self) -> list[Network]:
        """Build the networks; an override must match in at least one of them."""
        config, device = self.config, self.forward_context.device
        overrides = {pattern: DTYPES[d] for pattern, d in config.precision.overrides.items()}
        networks = [network.to(device) for network in build_networks(config.model, self.data)]
        if uses_channels_last(config, device)[0]:
            networks = [put_channels_last(network) for network in networks]
        self.check_own_networks(networks, overrides)
        if config.train.activation_checkpointing:
            for block in blocks_of(config, networks[0]).values():
                recompute(block)
        if len(networks) == 1:
            return [(networks[0], overrides)]
        matching = [{p: overrides[p] for p in those_that_match(m, overrides)} for m in networks]
        if missing := [p for p in overrides if not any(p in own for own in matching)]:
            none = "matches no module of generator or discriminator"
            raise BadInput(f"precision.overrides.{missing[0]}: {none}")
        return [*zip(networks, matching, strict=True)]

    def learners(self, networks: Sequence[Network], scales: Sequence[LossScale]) -> list[Learner]:
        """Prepare each model and build its optimizer; scales: of their gradients."""
        config, ranks, context = self.config, self.ranks, self.forward_context
        train, optim, models = config.train, config.optim, [network for network, _ in networks]
        clips = _of_parameters(train.clip_norm, train.clip_modules, models, "train.clip_modules")
        averages = _of_parameters(
            optim.average_decay, optim.average_modules, models, "optim.average_modules"
        )
        in_parts = train.accumulate > 1 or ranks.world > 1
        found: list[Learner] = []
        for (network, overrides), scale, clip, average in zip(
            networks, scales, clips, averages, strict=True
        ):
            refuse_without_effect(network, context.policy, overrides, "precision.overrides")
            if ranks.world > 1 and config.dist.engine == "fsdp":
                from mprun.distributed.sharding import shard

                shard(network, [*blocks_of(config, network).values()], ranks)
            prepared = PreparedModel(
                network,
                context,
                scale,
                overrides,
                of_run=True,
                key="precision.overrides",
                seed=1009 * config.seed + len(found),
            )
            trained: list[tuple[str, Tensor]] = [
                (name, own) for name, own in network.named_parameters() if own.requires_grad
            ]
            learner = Learner(
                prepared,
                optimizer_maker(optim, context.policy, context.device, network)(trained),
                parts=train.accumulate,
                clip=clip,
                average=average,
                reduction=self.reduction(prepared),
                statistics=BatchStatistics(network) if in_parts else None,
            )
            found.append(learner)
        return found

    def reduction(self, prepared: PreparedModel) -> FlatReduction | None:
        """Return the sum over ranks of one model's gradients; None if a single rank adds each
        micro-batch as it comes."""
        config, ranks, policy = self.config, self.ranks, prepared.policy
        order, several = config.precision.reduce_order, config.train.accumulate > 1
        is_scaled = several and policy.reduce_dtype is not None
        if ranks.world == 1 and not is_scaled and order == "rank":
            return None
        engine, kind = engine_of(config, prepared.device_type)[0], FlatReduction
        if engine == "fsdp" and ranks.world > 1:
            from mprun.distributed.sharding import ShardedReduction as kind
        elif engine == "ddp" and ranks.world > 1:
            kind = OverlappedReduction
        return kind(
            ranks,
            config.train.accumulate,
            fixed=config.dist.order == "fixed" if ranks.world > 1 else order != "rank",
            order=order,
            bucket_bytes=int(config.dist.bucket_mb * 2**20),
            dtype=policy.reduce_dtype if several else None,
            divide=policy.reduce_divide,
        )

    def sample_distance(self) -> SampleDistance | None:
        """Build it only for a run judged by it: an evaluation then takes a second or two more."""
        metric, about = self.config.compare.metric, self.data.description
        if metric != "sliced_wasserstein":
            return None
        size, channels = about.get("image_size"), about.get("channels")
        if size is None or channels is None:
            raise BadInput(f"compare.metric={metric}: this metric needs square images")
        return SampleDistance(int(size), int(channels), self.forward_context.device)

    def check_own_networks(
        self, networks: Sequence[nn.Module], overrides: dict[str, torch.dtype]
    ) -> None:
        """Build the networks once more and try them, if they or their data are the user's own.

        It costs one construction and three passes of two samples, and no random number. mprun's
        LSTM is left out: it takes tokens of any data, and may be large.
        """
        config, model, data = self.config, self.config.model, self.data
        policy, device = self.forward_context.policy, self.forward_context.device
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
            own, new = ({p for one in of for p in one.parameters()} for of in (networks, copies))
            if own & new:
                raise BadInput(
                    f"{name}: returned the same network twice; each call must build a new one"
                )
            if device.type == "cuda" or native:
                _check_recurrent(f"{name} precision={policy.name}", copies, self.forward_context)
        latent_size = getattr(model, "latent_size", 0)
        trial = Trial(name, task_of(model), copies, data, latent_size, model.carries_state)
        # A separate context: the run's counts the run's operations.
        trial.run(
            ForwardContext(policy, device, native=native, overrides=overrides.values()), overrides
        )


def build_networks(config: Any, data: Source) -> list[nn.Module]:
    """Build a configuration's networks, FP32 with new random weights: one, or two that are a GAN.

    It raises BadInput for sizes that they cannot have. A user's factory is called each time.
    """
    if isinstance(config, CustomModelConfig):
        return _own_networks(config, data)
    builder = config.component.builder
    if isinstance(builder, Mapping):
        builder = builder[config.variant]
    needs = {name: _of_the_data(name, config, data) for name in config.component.needs}
    makers = map(loaded, (builder,) if isinstance(builder, str) else builder)
    try:
        return [make(**arguments_of(make, config) | needs) for make in makers]
    except ValueError as error:
        raise BadInput(f"model.{error}") from error


def _of_the_data(name: str, config: ModelConfig, data: Source) -> int:
    """Return `name` from the configuration, at least the data's value, or else from the data."""
    wanted = getattr(config, name, None)
    if name == "context_length":
        length = wanted or data.description.get("sequence_length")
        if not isinstance(length, int):
            reason = "the data do not define the length of their windows"
            raise BadInput(f"model.context_length=null: {reason}; set model.context_length=N")
        return length
    given = int(getattr(data, name) if hasattr(data, name) else data.description[name])
    if wanted is not None and wanted < given:
        raise BadInput(f"model.{name}={wanted}: must be >= {given}, the {name} of the data")
    return wanted or given


def uses_channels_last(config: RunConfig, device: torch.device) -> tuple[bool, str]:
    """Return whether networks and images are NHWC in memory, and if not, why."""
    setting = config.train.channels_last
    if setting == "auto":
        return auto_channels_last(config, device.type)
    return setting == "on", "train.channels_last=off"


def blocks_of(config: RunConfig, network: nn.Module) -> dict[str, nn.Module]:
    """Return the network's blocks by name: modules that a pass calls once, one after the other."""
    name = config.model.component.blocks
    if name is None:
        return {}
    return {f"{name}.{key}": own for key, own in network.get_submodule(name).named_children()}


def recompute(block: nn.Module) -> None:
    """Let a block keep its inputs alone for the backward pass, which computes the rest anew.

    It costs a second forward pass, and changes no bit: random numbers are drawn again.
    """
    block.forward = partial(_recomputed, block.forward)


def _recomputed(forward: Callable[..., Any], *inputs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*inputs)
    return checkpoint(forward, *inputs, use_reentrant=False)


def put_channels_last(network: nn.Module) -> nn.Module:
    """Put the weights of convolutions into NHWC order, in place, before masters are created.

    Copies of them (16-bit copies, masters, optimizer state) then keep their order, so that
    operations over lists of tensors stay on their fast path.
    """
    return apply_to_tensors(
        network, lambda t: t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t
    )


def _own_networks(config: CustomModelConfig, data: Source) -> list[nn.Module]:
    factory = Factory("model.factory", config.factory)
    made = factory(data, **config.options)
    if kind_of(config).networks == 1:
        made = (made,)
    elif not isinstance(made, tuple | list) or len(made) != 2:
        raise BadInput(
            f"{factory}: must return (generator, discriminator), not a {type(made).__name__}"
        )
    for network in made:
        if not isinstance(network, nn.Module):
            raise BadInput(
                f"{factory}: must return a torch.nn.Module, not a {type(network).__name__}"
            )
        parameters = dict(network.named_parameters())
        if not any(p.requires_grad for p in parameters.values()):
            raise BadInput(f"{factory}: the network has no parameter to train")
        for name, parameter in parameters.items():
            if isinstance(parameter, nn.UninitializedParameter):
                raise BadInput(f"{factory}: {name} is a lazy layer without a size; set its size")
            if parameter.is_floating_point() and parameter.dtype is not torch.float32:
                use = "build the network in float32, precision= casts it"
                raise BadInput(f"{factory}: {name} is {parameter.dtype}; {use}")
        for name, value in network.state_dict().items():
            if not isinstance(value, Tensor):
                raise BadInput(f"{factory}: {name} in its state is not a tensor")
    return list(made)


def _of_parameters(
    value: float | None, patterns: Sequence[str], models: Sequence[nn.Module], key: str
) -> list[OfParameters | None]:
    """Return `value` for each model, with the parameters in modules of these patterns of `key`.

    A pattern has to match in at least one of the models. A model in which none of several patterns
    matches gets None. A ValueError names a pattern without a match.
    """
    if value is None:
        return [None for _ in models]
    matching = [those_that_match(model, patterns) for model in models]
    if missing := [one for one in patterns if not any(one in own for own in matching)]:
        weights_in(models[0], missing[:1], key)  # it raises
    return [
        OfParameters(value, weights_in(model, own, key)) if own or not patterns else None
        for model, own in zip(models, matching, strict=True)
    ]


def weights_in(model: nn.Module, patterns: Sequence[str], key: str) -> set[str]:
    """Return the trained parameters in modules that match the patterns of `key`; all without any.

    It raises ValueError if a pattern matches no module, or no weight is chosen.
    """
    around = {f"{m}." for pattern in patterns for m in matching_modules(model, pattern, key)}
    names = {
        name
        for name, own in model.named_parameters()
        if own.requires_grad and (not patterns or any(name.startswith(one) for one in around))
    }
    if not names:
        raise ValueError(
            f"{key}={list(patterns)}: no module that matches these patterns has weights"
        )
    return names


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
