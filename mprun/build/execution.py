"""How the steps of a run are executed, from its configuration."""

from collections.abc import Mapping

import torch
from torch import nn

from mprun.config.check import auto_channels_last, refuse_on, why_no_graph
from mprun.config.schema import CustomModelConfig, LSTMConfig, RunConfig
from mprun.errors import BadInput
from mprun.execution import (
    Compilation,
    CudaRecorder,
    GraphedStep,
    HostBound,
    Stepper,
    why_not_captured,
)
from mprun.execution.step_runner import LearningRate
from mprun.tasks import Learner


def uses_channels_last(config: RunConfig, device: torch.device) -> tuple[bool, str]:
    """Whether networks and images are NHWC in memory, and why not."""
    setting = config.train.channels_last
    if setting == "auto":
        return auto_channels_last(config, device.type)
    return setting == "on", "train.channels_last=off"


def put_channels_last(network: nn.Module) -> nn.Module:
    """Weights of convolutions in NHWC order, in place; to be called before masters are made.

    Everything made like them (16-bit copies, masters, optimizer state) then has their order too,
    so that operations over lists of tensors stay on their fast path.
    """
    return network._apply(
        lambda t: t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t
    )


def build_stepper(config: RunConfig, task, rate: LearningRate, device: torch.device) -> Stepper:
    """The stepper of a task just built; BadInput for a setting that cannot work on `device`."""
    refuse_on(config, device.type)
    settings = _settings(config, device)
    reason = _why_no_graph(config, task, rate, device)
    if reason is not None and config.train.cuda_graph == "on":
        raise BadInput(f"train.cuda_graph=on: {reason} (allowed here: auto, off)")
    compilation = _compilation(config, task.learners)
    if reason is not None:
        settings["cuda_graph"] = f"off: {reason}"
        return Stepper(task, rate, device, compilation=compilation, settings=settings)
    stream = torch.cuda.Stream(device)
    required = config.train.cuda_graph == "on"
    graph = GraphedStep(
        task,
        CudaRecorder(device, stream),
        required=required,
        clock=None if required else HostBound(device),
        zero_state=isinstance(config.model, LSTMConfig),
    )
    return Stepper(
        task, rate, device, graph=graph, compilation=compilation, stream=stream, settings=settings
    )


def _why_no_graph(config: RunConfig, task, rate: LearningRate, device: torch.device) -> str | None:
    if config.train.cuda_graph == "off":
        return "train.cuda_graph=off"
    optimizers = [learner.optimizer for learner in task.learners.values()]
    return why_no_graph(config, device.type) or why_not_captured(optimizers, rate.constant)


def _compilation(config: RunConfig, learners: Mapping[str, Learner]) -> Compilation | None:
    mode = config.train.compile
    if mode == "off":
        return None
    own = isinstance(config.model, CustomModelConfig)
    for learner in learners.values():
        if any(isinstance(module, nn.RNNBase) for module in learner.model.modules()):
            raise BadInput(
                f"train.compile={mode}: the network has a recurrent layer, which torch.compile "
                "passes over (allowed: off)"
            )
    # The casts around modules of another dtype are functions in place of `forward`.
    whole = not own and not config.precision.overrides
    return Compilation(learners.values(), mode, fullgraph=whole)


def _settings(config: RunConfig, device: torch.device) -> dict[str, str]:
    channels_last, reason = uses_channels_last(config, device)
    autotune = "off: device=cpu"
    if device.type == "cuda":
        why = "deterministic=true" if config.deterministic else "train.autotune=off"
        autotune = "on" if torch.backends.cudnn.benchmark else f"off: {why}"
    return {
        "cuda_graph": "",
        "compile": "off",
        "channels_last": "on" if channels_last else f"off: {reason}",
        "autotune": autotune,
    }
