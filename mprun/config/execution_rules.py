"""The rules of ranks and of the execution of a step, and what `auto` of a setting means.

Rules that depend on the machine are checked again once its device is known (`refuse_on`).
"""

from collections.abc import Iterator

from mprun.config.registry import NETWORKS, kind_of, shares_streams
from mprun.config.schema import RunConfig
from mprun.errors import BadInput, shortened


def world_of(config: RunConfig) -> int | None:
    """Return the number of ranks of a run; None if `devices=auto` leaves it to the machine."""
    return None if config.devices == "auto" else int(config.devices) * config.nodes


def of_ranks(config: RunConfig) -> Iterator[str]:
    """Yield what is wrong with the number of ranks, or what so many cannot compute."""
    devices = config.devices
    if devices != "auto" and not (devices.isdecimal() and 1 <= int(devices[:6]) <= 1024):
        yield f"devices={shortened(devices, 70)}: must be a whole number from 1 to 1024, or auto"
        return
    if devices == "auto" and config.device == "cpu":
        yield "devices=auto: counts GPUs; with device=cpu give a number"
    world = world_of(config)
    if world is not None and world > 1:
        yield from why_not_on(config, world)


def why_not_on(config: RunConfig, world: int) -> Iterator[str]:
    """Yield what so many ranks cannot compute in a configuration, and what to change."""
    given = f"devices={config.devices}" + (f" nodes={config.nodes}" if config.nodes > 1 else "")
    if getattr(config.model, "sampled", False):
        yield f"{given}: model.sampled_softmax has sparse gradients, of one rank (allowed: 1)"
    yield from _why_not_shared(config, world, given)
    if config.precision.reduce_order != "rank" and config.dist.order == "fast":
        why = f"{given} add in the library's order (allowed: rank, or dist.order=fixed)"
        yield f"precision.reduce_order={config.precision.reduce_order}: {why}"
    if config.dist.engine == "ddp" and (reason := _why_no_overlap(config)) is not None:
        yield f"dist.engine=ddp: {reason} (allowed here: auto, flat)"
    if config.dist.engine == "fsdp" and (reason := _why_no_shards(config)) is not None:
        yield f"dist.engine=fsdp: {reason} (allowed here: auto, flat)"
    if getattr(config.data, "on_corrupt", None) == "skip":
        yield f"data.on_corrupt=skip: {given} would each replace files (allowed: stop)"
    if config.train.compile not in ("auto", "off"):
        yield f"train.compile={config.train.compile}: must be off or auto with {given}"
    if config.numerics.shadow_every:
        must = f"must be 0 with {given}; one device computes the same numbers"
        yield f"numerics.shadow_every={config.numerics.shadow_every}: {must}"


def _why_not_shared(config: RunConfig, world: int, given: str) -> Iterator[str]:
    """Yield why so many ranks cannot share out a step; given: their keys."""
    parts, batch = config.train.accumulate, config.data.batch_size
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
    precision = config.precision
    if precision.reduce_order == "ring":
        return "precision.reduce_order=ring adds buckets that are the same on any number of ranks"
    in_fp32 = precision.update.rounding != "nearest" or precision.update.keeps_state
    if _keeps_half(config) and in_fp32:
        mode = f"precision={precision.name}"
        return f"{mode} adds up gradients of 16-bit weights in FP32, which torch's DDP refuses"
    return _why_not_in_backward(config)


def _keeps_half(config: RunConfig) -> bool:
    return config.precision.master_dtype is None and config.precision.param_dtype != "fp32"


def _why_no_shards(config: RunConfig) -> str | None:
    precision = config.precision
    if _keeps_half(config):
        return f"precision={precision.name} keeps weights in 16 bits, without FP32 masters to shard"
    for key in ("state_dtype", "square_dtype"):
        if (form := getattr(precision.update, key)) is not None:
            state = f"precision.update.{key}={form}"
            return f"{state} stores the state of whole tensors, of which a rank has rows"
    if precision.master_dtype not in (None, "fp32"):
        return f"precision.master_dtype={precision.master_dtype} rounds whole tensors, not shards"
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


_HOOKS = "numerics=probes watches tensors with hooks"
_RECOMPUTED = "train.activation_checkpointing=true sets random states between operations"


def refuse_on(config: RunConfig, device: str) -> None:
    """Raise BadInput for the first setting of the execution that cannot work on `device`.

    With device=auto the device is only known when the run is built, which then checks again.
    """
    for line in of_execution(config, device):
        raise BadInput(line)


def of_execution(config: RunConfig, device: str) -> Iterator[str]:
    """Yield what cannot work on `device`; "auto": not known yet."""
    train = config.train
    if train.activation_checkpointing and config.model.component.blocks is None:
        having = ", ".join(name for name, network in NETWORKS.items() if network.blocks)
        none = f"no blocks of {config.model.name} are known; those of {having} are"
        yield f"train.activation_checkpointing=true: {none} (allowed: false)"
    for key, value, reason, allowed in (
        ("cuda_graph", train.cuda_graph, why_no_graph(config, device), "auto, off"),
        ("compile", train.compile, _why_not_compiled(config, device), "auto, off"),
        ("channels_last", train.channels_last, _why_no_channels_last(config), "auto, off"),
        ("autotune", train.autotune, _why_no_autotune(config, device), "auto, off"),
    ):
        if value not in ("auto", "off") and reason is not None:
            yield f"train.{key}={value}: {reason} (allowed: {allowed})"


def why_no_graph(config: RunConfig, device: str) -> str | None:
    """Return why steps cannot be replayed as a CUDA graph, as far as known; None: they can.

    device: "auto": not known yet.
    """
    if device == "cpu":
        return "a CUDA graph needs device=cuda"
    if config.numerics.probes:
        return f"{_HOOKS}, which a replay does not call"
    if config.train.activation_checkpointing:
        return _RECOMPUTED
    network = config.model.component
    if config.model.why_no_graph is not None:
        return config.model.why_no_graph
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
    if config.numerics.probes:
        return f"{_HOOKS}, which compiled code does not call"
    if config.train.activation_checkpointing:
        return _RECOMPUTED
    if device == "cpu" and config.cpu_half == "emulated" and _has_16_bits(config):
        emulated = f"precision={config.precision.name} is emulated on a CPU operation by operation"
        return f"{emulated}, which compiled code does not pass through"
    return None


def why_not_measured(config: RunConfig, device: str) -> str | None:
    """Return why `train.compile=auto` leaves steps eager on `device`; None: measured times decide.

    The times of ranks differ, and all of them need one form; so several ranks stay eager.
    """
    network = config.model.component
    if device != "cuda":
        return f"device={device}"
    if config.deterministic:
        return "deterministic=true, and a measured time would decide on bits"
    if (reason := _why_not_compiled(config, device)) is not None:
        return reason
    if world_of(config) != 1:
        return f"devices={config.devices}: ranks would measure different times"
    if network.own or config.data.component.own:
        return "a network or data of one's own may have several shapes, each compiled anew"
    if config.data.component.several_shapes:
        return f"data={config.data.name}: batches differ in length, each would be compiled anew"
    return config.model.why_no_graph


def _why_no_channels_last(config: RunConfig) -> str | None:
    has_images = kind_of(config.model).family in ("images", "boxes")
    return None if has_images else f"{config.model.name} has no images"


def _why_no_autotune(config: RunConfig, device: str) -> str | None:
    if device == "cpu":
        return "cuDNN needs device=cuda"
    if config.deterministic:
        return "it may choose another kernel in another run, deterministic=true forbids that"
    return None


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
