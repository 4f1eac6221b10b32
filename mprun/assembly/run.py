"""Build the parts of a run that cost no file, and decide how its steps are executed."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

import torch
from torch import nn

from mprun.assembly.data import arguments_of, build_data
from mprun.assembly.precision import policy_from
from mprun.assembly.task import build_task, uses_channels_last
from mprun.config.execution_rules import refuse_on, why_no_graph, why_not_measured
from mprun.config.registry import kind_of
from mprun.config.schema import MAX_STEPS, OptimConfig, PrecisionConfig, RunConfig
from mprun.config.switches import in_mode, modes_in_turn, steps_before, told
from mprun.data import DataError
from mprun.data.source import DamagedData, Source
from mprun.distributed.ranks import ALONE, Ranks
from mprun.errors import BadInput
from mprun.execution.compiled_step import Compilation, CompiledIfFaster, CompiledStep
from mprun.execution.cuda_graph import CudaRecorder, why_not_captured
from mprun.execution.graphed_step import DRAWS, GraphedStep
from mprun.execution.step_clock import HostBound
from mprun.execution.step_runner import (
    Execution,
    InForce,
    LearningRate,
    Schedule,
    StepRunner,
)
from mprun.precision import DTYPES, ForwardContext, PrecisionPolicy, why_no_lstm, why_unsupported
from mprun.precision.policy import pin_products, why_no_switch
from mprun.tasks import Task


@dataclass(slots=True)
class Built:
    """The parts of a run that cost no file."""

    task: Task
    data: Source
    device: torch.device
    steps: int
    rate: LearningRate
    stepper: StepRunner

    @property
    def policy(self) -> PrecisionPolicy:
        """Return that of the mode in force."""
        return self.task.policy

    @property
    def forward_context(self) -> ForwardContext:
        """Return that of the mode in force."""
        return self.task.forward_context


def build(config: RunConfig, device: torch.device, ranks: Ranks = ALONE) -> Built:
    """Build data, model, optimizer, loss scale and task; raise BadInput if that is impossible.

    It draws the initial weights from the global random state.

    Args:
        ranks: those of which this process is one; a single one takes every micro-batch itself,
            regardless of `devices`.
    """
    contexts = _contexts(config, device)
    try:
        data = build_data(config.data, config.seed, device)
    except DamagedData:
        raise
    except DataError as error:
        raise BadInput(str(error)) from error
    except ValueError as error:
        # A constructor's None is null in a configuration.
        raise BadInput(f"data.{error}".replace("None", "null")) from error
    try:
        task = build_task(config, data, contexts[0], ranks)
    except DamagedData:
        raise
    except ValueError as error:
        raise BadInput(str(error)) from error
    task.seed = config.seed
    if ranks.world > 1:
        data.share_out(task.numbers, task.accumulate, ranks.rank, ranks.world)
    task.channels_last, _ = uses_channels_last(config, device)
    if task.steps_per_epoch < 1:
        none = f"the data have no full step of {task.samples_per_step} {task.sample}s"
        raise BadInput(f"data.batch_size={config.data.batch_size}: is too large, {none}")
    steps, epochs = config.train.steps, config.train.epochs
    if steps is None:
        steps = max(1, round((epochs or 0.0) * task.steps_per_epoch))
        if steps > MAX_STEPS:
            raise BadInput(
                f"train.epochs={epochs}: means {steps} steps, but at most {MAX_STEPS} are allowed"
            )
    lr = schedule_of(config.optim, steps, task.steps_per_epoch)
    rate = LearningRate(lr, [*task.learners.values()], device)
    stepper = build_step_runner(config, task, rate, device, steps, contexts)
    _try_later(task, contexts)
    return Built(task, data, device, steps, rate, stepper)


def _contexts(config: RunConfig, device: torch.device) -> list[ForwardContext]:
    """Return the context of each mode of a run in turn; BadInput if it cannot have one of them."""
    overrides = [DTYPES[name] for name in config.precision.overrides.values()]
    native, found = config.cpu_half == "native", list[ForwardContext]()
    for precision in modes_in_turn(config.precision):
        policy = policy_from(precision)
        _check_device(in_mode(config, precision), policy, device, overrides)
        if found and (reason := why_no_switch(found[-1].policy, policy)) is not None:
            raise BadInput(f"precision.switch: to={policy.name}: {reason}")
        found.append(ForwardContext(policy, device, native=native, overrides=overrides))
    return found


def _try_later(task: Task, contexts: Sequence[ForwardContext]) -> None:
    """Let the task enter each later mode once, and the first again, before anything is written."""
    for context in (*contexts[1:], *contexts[: len(contexts) > 1]):
        try:
            task.switch(context)
        except ValueError as error:
            raise BadInput(f"precision.switch: to={context.policy.name}: {error}") from error


def _check_device(
    config: RunConfig,
    policy: PrecisionPolicy,
    device: torch.device,
    overrides: Sequence[torch.dtype],
) -> None:
    """Raise BadInput for a mode that the device does not have."""
    reason = why_unsupported(policy, device, overrides)
    native_cpu = device.type == "cpu" and config.cpu_half == "native"
    if reason is None and config.model.component.recurrent:
        if device.type != "cpu" or native_cpu:
            projected = getattr(config.model, "projection_size", 0) > 0
            reason = why_no_lstm(policy, device, projected)
        if reason is not None and native_cpu:
            raise BadInput(f"cpu_half=native: {reason}; use cpu_half=emulated")
    if reason is not None:
        raise BadInput(f"precision={policy.name} device={config.device}: {reason}")


def schedule_of(optim: OptimConfig, steps: int, steps_per_epoch: int) -> list[float]:
    """Return the learning rate of each update of a run of `steps` steps."""
    settings = arguments_of(Schedule, optim)
    settings |= {"steps_per_epoch": steps_per_epoch, "constant_epochs": optim.constant_epochs or 0}
    return Schedule(**settings).rates(steps)


def build_step_runner(
    config: RunConfig,
    task: Task,
    rate: LearningRate,
    device: torch.device,
    steps: int,
    contexts: Sequence[ForwardContext] = (),
) -> StepRunner:
    """Build the step runner of a new task; BadInput for a setting impossible on `device`.

    steps: the length of the run. contexts: of its modes in turn, if it switches to others.
    """
    refuse_on(config, device.type)
    modes = modes_in_turn(config.precision)
    first = _execution(in_mode(config, modes[0]), task, rate, device, steps)
    stream = None if first.graph is None else first.graph.recorder.stream

    def entered(precision: PrecisionConfig, context: ForwardContext) -> Execution:
        pin_products(precision.fp32_math)
        task.switch(context)
        return _execution(in_mode(config, precision), task, rate, device, steps, stream)

    after = [0, *steps_before(config.precision.switch, steps)]
    names = [modes[0].name, *(name for name, _ in told(config.precision))]
    in_turn = [
        InForce(step, name, partial(entered, precision, context))
        for step, name, precision, context in zip(after, names, modes, contexts, strict=False)
    ]
    return StepRunner(task, rate, device, **first._asdict(), stream=stream, modes=in_turn)


def _execution(
    config: RunConfig,
    task: Task,
    rate: LearningRate,
    device: torch.device,
    steps: int,
    stream: torch.cuda.Stream | None = None,
) -> Execution:
    """Return what takes the steps of the mode that the task is in; stream: of earlier graphs."""
    settings = _settings(config, device)
    wanted, reason = config.train.cuda_graph, "train.cuda_graph=off"
    if wanted != "off":
        optimizers = [learner.optimizer for learner in task.learners.values()]
        why = why_no_graph(config, device.type) or why_not_captured(optimizers, rate.constant)
        why = why or (DRAWS if task.in_parts and _draws(config, task) else None)
        if why is not None and wanted == "on":
            raise BadInput(f"train.cuda_graph=on: {why} (allowed here: auto, off)")
        reason = why or ""
    compiled, settings["compile"] = _compiled(config, task, device, steps)
    graph = None
    if reason:
        settings["cuda_graph"] = f"off: {reason}"
    else:
        graph = GraphedStep(
            task,
            CudaRecorder(device, stream or torch.cuda.Stream(device)),
            required=wanted == "on",
            clock=None if wanted == "on" else HostBound(device),
            zero_state=config.model.component.zero_state,
        )
    return Execution(graph, compiled, settings)


def _draws(config: RunConfig, task: Task) -> bool:
    """Return whether a step certainly draws: a GAN's codes, or dropout in a module of torch."""
    modules = (own for one in task.learners.values() for own in one.model.modules())
    rates = (getattr(own, "p" if isinstance(own, nn.Dropout) else "dropout", 0) for own in modules)
    dropout = any(isinstance(rate, float) and rate > 0 for rate in rates)
    return dropout or kind_of(config.model).networks > 1


def _compiled(
    config: RunConfig, task: Task, device: torch.device, steps: int
) -> tuple[CompiledStep | None, str]:
    """Return what takes the first steps where networks may be compiled, else None and why not."""
    mode, learners = config.train.compile, task.learners.values()
    if mode == "off":
        return None, "off"
    if mode == "auto":
        reason = why_not_measured(config, device.type)
        if reason is None and find_spec("triton") is None:
            reason = "Triton is not installed"
        if reason is not None:
            return None, f"off: {reason}"
        compilation = Compilation(learners, "default", fullgraph=True)
        clocks = HostBound(device), HostBound(device)
        return CompiledIfFaster(task, compilation, steps, clocks), ""
    for learner in learners:
        if any(isinstance(module, nn.RNNBase) for module in learner.model.modules()):
            why = "the network has a recurrent layer, which torch.compile passes over"
            raise BadInput(f"train.compile={mode}: {why} (allowed: auto, off)")
    whole = not config.model.component.own
    return CompiledStep(task, Compilation(learners, mode, fullgraph=whole)), ""


def _settings(config: RunConfig, device: torch.device) -> dict[str, str]:
    channels_last, reason = uses_channels_last(config, device)
    autotune = "off: device=cpu"
    if device.type == "cuda":
        why = "deterministic=true" if config.deterministic else "train.autotune=off"
        autotune = "on" if torch.backends.cudnn.benchmark else f"off: {why}"
    return {
        "cuda_graph": "",
        "compile": "",
        "channels_last": "on" if channels_last else f"off: {reason}",
        "autotune": autotune,
    }
