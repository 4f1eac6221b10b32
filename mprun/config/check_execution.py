"""How a step is executed: the settings that exclude each other, and what `auto` means then."""

from mprun.config.schema import CustomModelConfig, LSTMConfig, RunConfig
from mprun.config.tasks import task_of
from mprun.errors import BadInput

_HOOKS = "numerics=on watches tensors with hooks"


def check_execution(config: RunConfig) -> None:
    """BadInput for a setting that cannot work; what depends on the machine is checked later.

    With device=auto the device is known only when the run is built, and this is called again by
    `refuse_on` with it.
    """
    refuse_on(config, config.device)


def refuse_on(config: RunConfig, device: str) -> None:
    """BadInput for the first setting that cannot work on `device` (auto: not known yet)."""
    train = config.train
    for key, value, reason, allowed in (
        ("cuda_graph", train.cuda_graph, why_no_graph(config, device), "auto, off"),
        ("compile", train.compile, why_not_compiled(config, device), "off"),
        ("channels_last", train.channels_last, why_no_channels_last(config), "auto, off"),
        ("autotune", train.autotune, why_no_autotune(config, device), "auto, off"),
    ):
        asked = value not in ("auto", "off")
        if asked and reason is not None:
            raise BadInput(f"train.{key}={value}: {reason} (allowed: {allowed})")


def why_no_graph(config: RunConfig, device: str) -> str | None:
    """Why steps cannot be replayed as a CUDA graph, as far as the configuration tells; or None."""
    if device == "cpu":
        return "a CUDA graph needs device=cuda"
    if config.numerics.enabled:
        return f"{_HOOKS}, which a replay does not call"
    if isinstance(config.model, CustomModelConfig) and config.train.cuda_graph == "auto":
        return "a network of one's own may change with a number that a replay would keep"
    if task_of(config.model) == "language_model" and config.train.accumulate > 1:
        return (
            f"train.accumulate={config.train.accumulate} with a language model, whose state is "
            "carried on inside of the step"
        )
    return None


def why_not_compiled(config: RunConfig, device: str) -> str | None:
    """Why torch.compile cannot or would not compile the network; or None."""
    if isinstance(config.model, LSTMConfig):
        return "torch.compile passes over nn.LSTM and the function around it: nothing is compiled"
    if config.numerics.enabled:
        return f"{_HOOKS}, which compiled code does not call"
    if device == "cpu" and config.cpu_half == "emulated" and _has_16_bits(config):
        return (
            f"precision={config.precision.name} is emulated on a CPU, operation by operation, "
            "which compiled code does not pass through"
        )
    return None


def why_no_channels_last(config: RunConfig) -> str | None:
    """Why the network has no channels to put last; or None."""
    if task_of(config.model) == "language_model":
        return "a language model has no images"
    return None


def why_no_autotune(config: RunConfig, device: str) -> str | None:
    """Why cuDNN may not choose its kernels by trying them; or None."""
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
    reason = why_no_channels_last(config)
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
