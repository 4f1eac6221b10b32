"""mprun itself in a bench: its modes on one configuration, each a contender with mprun's own step.

Nothing of a run's record is written, and there are no evaluations: what is timed is the step of
the loop with the learning rate set and skipped updates counted, as `mprun.training.loop` does it.
A look inside tells where the time of an eager step goes, and its memory by kind.
"""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch

from mprun.bench.contender import Contender, RotatingSource, in_channels_last, rotating_batches
from mprun.bench.measure import attempt, first_steps, synchronise
from mprun.bench.plan import REFERENCES, Case, Entry, Group, Options, Row, without_device
from mprun.bench.report import markdown
from mprun.bench.summary import summarise
from mprun.build import Built, policy_from
from mprun.config.compose import compose_config
from mprun.config.schema import RunConfig, task_of
from mprun.errors import BadInput
from mprun.numerics.operations import FirstStep
from mprun.precision import why_no_lstm, why_unsupported
from mprun.training.run import prepare

# What is measured where no modes are given, baselines first: of a GPU that has Tensor Cores for
# BF16 and TF32, and of a CPU.
GPU_MODES = ("fp32", "tf32", "fp16_naive", "fp16_master_scaled", "amp", "amp_bf16")
CPU_MODES = ("fp32", "fp16_master_scaled", "amp")
_CONVOLUTIONAL = ("alexnet", "resnet50", "dcgan", "conv_autoencoder")
_PREPARED_STEPS = 12  # a graph is captured after fewer
_SPLIT_STEPS = 5


class Contest:
    """What a bench is of: one configuration in mprun's own modes.

    Whoever adds other contenders derives from it and names a module for the child process, which
    makes its own object of the same class and serves it (`mprun.bench.child.serve`).

    Attributes:
        command: starts a child; the id of the parent is added.
    """

    command: Sequence[str] = (sys.executable, "-m", "mprun.bench.child")

    def plan(self, options: Options, device: torch.device) -> tuple[list[Group], list[dict]]:
        """(groups to measure, what is left out: label, mode, contender, reason).

        Raises:
            BadInput: for a mode asked for that this device or configuration cannot run.
        """
        groups: list[Group] = []
        left_out: list[dict] = []
        for entry in self.entries(options, device):
            cases: list[Case] = []
            for mode in entry.modes:
                case = Case(
                    entry.label,
                    entry.overrides,
                    mode,
                    "mprun",
                    config_dir=options.config_dir,
                    extra={"compile": entry.compile},
                )
                reason = why_not(case, device)
                if reason is None:
                    names = ["mprun", *self.others(entry, case, options, device, left_out)]
                    cases += [replace(case, contender=name) for name in dict.fromkeys(names)]
                elif options.modes is not None:
                    raise BadInput(f"--modes {mode}: {reason}")
                else:
                    left_out.append(left_out_of(case, "mprun", reason))
            cases.sort(key=self.turn)
            if options.end_to_end:
                cases += [
                    replace(case, real_data=True) for case in cases if case.contender == "mprun"
                ]
            groups.append(Group(entry.label, tuple(cases), entry.weight))
        return groups, left_out

    def entries(self, options: Options, device: torch.device) -> list[Entry]:
        """The models to measure: the configuration of the command line."""
        config = compose_config(options.overrides, options.config_dir).config
        size = getattr(config.data, "image_size", None)
        shape = f" {size} px" if size else ""
        label = f"{config.model.name}{shape} b{config.data.batch_size}"
        modes = options.modes or (GPU_MODES if device.type == "cuda" else CPU_MODES)
        return [Entry(label, without_device(options.overrides), tuple(modes))]

    def others(
        self,
        entry: Entry,
        case: Case,
        options: Options,
        device: torch.device,
        left_out: list[dict],
    ) -> list[str]:
        """Names of the contenders beside mprun in the mode of `case`; notes what is left out."""
        best = device.type == "cuda" and not options.plain
        return ["mprun+"] if best and case.mode in (entry.best_modes or entry.modes) else []

    def turn(self, case: Case) -> int:
        """What cases are sorted by, so that a short budget leaves what says most: mprun as it is in
        every mode, then its best settings in 16 bits, in FP32 and TF32 last."""
        if case.contender == "mprun":
            return 0
        return 2 if case.mode in REFERENCES else 1

    def make(self, case: Case, device: torch.device) -> Contender:
        """The contender of a case, before its first step; flags pinned and weights drawn."""
        return Own(case, device)

    def first_steps(self, contender: Contender, case: Case, device: torch.device) -> dict:
        """What `check` needs of the first 20 steps, and how long each of them took."""
        return first_steps(contender, device)

    def check(self, rows: Sequence[Row]) -> dict[str, tuple[bool, str]]:
        """Row key -> (computes what the others do, why not or what could not be judged).

        mprun at its best settings is held to its defaults, and a mode that should learn as FP32
        does to FP32: in a loss that is not finite, and in one mode in the number of skipped
        updates. How far losses are apart is told and not judged, because how fast rounding grows
        is the model's own.
        """
        own = {row.case.mode: row for row in rows if row.case.contender == "mprun"}
        return {row.key: _answer(row, own) for row in rows}

    def summarise(self, bench: dict) -> None:
        """Put what follows from the windows into the content of bench.json."""
        summarise(bench["rows"])

    def report(self, bench: dict) -> str:
        """bench.md."""
        return markdown(bench)


def why_not(case: Case, device: torch.device) -> str | None:
    """Why nobody can train this case on this device; BadInput where it cannot be configured."""
    config = case.config()
    policy = policy_from(config.precision)
    reason = why_unsupported(policy, device)
    if reason is None and task_of(config.model) == "language_model" and device.type == "cuda":
        reason = why_no_lstm(policy, device)
    if reason is None:
        case.config(f"device={device.type}")
    return reason


def left_out_of(case: Case, contender: str, reason: str) -> dict:
    """What bench.json says of a case that is not measured."""
    return {"label": case.label, "mode": case.mode, "contender": contender, "reason": reason}


def learns_as_fp32(case: Case) -> bool:
    """Whether the mode loses no small updates (16 bits without masters) or FP16 gradients."""
    config = case.config()
    precision = config.precision
    loses_updates = precision.param_dtype != "fp32" and precision.master_dtype is None
    in_fp16 = "fp16" in (precision.param_dtype, precision.autocast_dtype)
    return not loses_updates and not (in_fp16 and config.scaler.kind == "none")


def _answer(row: Row, own: dict[str, Row]) -> tuple[bool, str]:
    """As of `Contest.check`. own: mprun's rows at its defaults, by mode."""
    modes = {row.case.mode: None} | ({"fp32": None} if learns_as_fp32(row.case) else {})
    others = [own[mode] for mode in modes if mode in own and own[mode] is not row]
    found = [_held_to(other, row) for other in others]
    wrong = [reason for ok, reason in found if not ok]
    notes = [reason for ok, reason in found if reason]
    return not wrong, wrong[0] if wrong else "; ".join(notes)


def _held_to(other: Row, row: Row) -> tuple[bool, str]:
    mine, theirs = (list(map(float, one.equality["losses"])) for one in (row, other))
    where = f"{other.case.contender} in {other.case.mode}"
    for step, (loss, expected) in enumerate(zip(mine, theirs, strict=True), start=1):
        if abs(expected) < float("inf") and not abs(loss) < float("inf"):
            return False, f"loss {loss} at step {step}, {expected:.5g} in {where}"
    skipped, expected_skips = row.equality["skipped"], other.equality["skipped"]
    if skipped != expected_skips:
        text = f"{skipped} updates skipped, {expected_skips} by {where}"
        return row.case.mode != other.case.mode, text
    apart = abs(mine[-1] - theirs[-1]) / max(abs(theirs[-1]), 1e-30)
    return True, f"loss {apart:.1e} apart from {where} at step {len(mine)}" if apart > 0 else ""


def best_settings(model: str, device_type: str, compiled: bool) -> list[str]:
    """Overrides of the variant "mprun+" for a model, before what cannot be combined is left out.

    Args:
        compiled: with torch.compile, for networks and devices where it helps.
    """
    settings = ["optim.implementation=single_pass"]
    if model in _CONVOLUTIONAL:
        settings.append("train.channels_last=on")
    if device_type == "cuda":
        # torch.compile hands an nn.LSTM back to eager as a whole.
        compiled = compiled and model in _CONVOLUTIONAL
        # Beside compiled kernels a graph may gain nothing, and holds a second set of activations:
        # it is taken where the step's own times say that it pays.
        settings.append(f"train.cuda_graph={'auto' if compiled else 'on'}")
        if compiled:
            settings.append("train.compile=default")
    return settings


class Own(Contender):
    """A case as mprun runs it; BadInput for what cannot be built.

    Attributes:
        left_out: best settings that were refused -> the reason.
        built, config: what is run, for measurements that look inside.
    """

    def __init__(self, case: Case, device: torch.device):
        self.left_out: dict[str, str] = {}
        best: list[str] = []
        if case.contender == "mprun+":
            model = case.config(f"device={device.type}").model.name
            best = best_settings(model, device.type, case.extra.get("compile", True))
        self.config, self.built = self._built_with(case, device, best)
        if not case.real_data:
            source, batches = self.built.data, rotating_batches(self.built.data)
            if self.built.task.channels_last:  # as the tuned peers hold theirs
                batches = [in_channels_last(batch) for batch in batches]
            self.built.data = RotatingSource(source, batches)
            self.built.task.data = self.built.data
        self.task = self.built.task
        self.samples_per_step, self.sample = self.task.samples_per_step, self.task.sample
        self._index = 0

    def settings(self) -> dict:
        """What differs from the plainest step, as configured and as it turned out."""
        train = self.config.train
        chosen: dict[str, Any] = {
            "cuda_graph": train.cuda_graph,
            "compile": train.compile,
            "channels_last": train.channels_last,
            "autotune": train.autotune,
            "optimizer": self.config.optim.implementation,
        }
        chosen |= self.built.stepper.description
        return chosen | ({"left_out": self.left_out} if self.left_out else {})

    def replays(self) -> bool:
        return self.built.stepper.description.get("cuda_graph") == "on"

    def running(self) -> AbstractContextManager[Any]:
        """A context for many steps: all their work on one stream, without a change per step."""
        return self.built.stepper.on_stream()

    def prepare(self) -> None:
        """Take the steps within which compilation, capture and autotuning happen."""
        self.run(_PREPARED_STEPS)
        synchronise(self.built.device)

    def step(self) -> torch.Tensor:
        return self._advance(self.built.stepper.step)

    def eager_step(self) -> torch.Tensor:
        """The same by the task alone, without graph."""
        return self._advance(self.built.stepper.eager_step)

    def skipped(self) -> int:
        return int(self.built.stepper.skipped)

    def weights(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for learner, own in self.task.learners.items():
            optimizer = own.optimizer
            updated = zip(optimizer.names, optimizer.updated, strict=True)
            found |= {f"{learner}.{name}": tensor.detach() for name, tensor in updated}
            found |= {f"{learner}.{row.name}": row.tensor.detach() for row in optimizer.rows}
        return found

    def defer_wait(self) -> Callable[[], float] | None:
        defer = self.built.data.defer_wait
        return None if defer is None else defer()

    def look_inside(self, device: torch.device) -> dict:
        """Time split (where steps are eager) and memory by kind: values or {"why_not": reason}."""
        split: Any = {"why_not": "replayed as one CUDA graph"}
        if not self.replays():
            optimizers = [own.optimizer for own in self.task.learners.values()]
            split = attempt(lambda: time_split(self.step, self.built.data, optimizers, device))
        return {"time_split": split, "memory_by_kind": attempt(self._memory_by_kind)}

    def _memory_by_kind(self) -> dict:
        """Kind -> dtype -> bytes after one more step, with what that step saved for its backward.

        The step is eager and not compiled, whatever the ones that were timed.
        """
        for learner in self.task.learners.values():
            learner.network = learner.model
        overrides = self.config.precision.overrides
        with FirstStep(self.task, self.built.policy, overrides) as watched:
            self.eager_step()
        return watched.memory()

    def _advance(self, take: Callable[[int], dict[str, torch.Tensor]]) -> torch.Tensor:
        self._index += 1
        return take(self._index - 1)["loss"]

    def _built_with(
        self, case: Case, device: torch.device, best: list[str]
    ) -> tuple[RunConfig, Built]:
        """Built with as many of the best settings as go together; the others are noted."""
        while True:
            try:
                config = case.config(f"device={device.type}", *best)
                return config, prepare(config, torch.device(device.type), config.threads)
            except BadInput as error:
                key = str(error).partition("=")[0]
                refused = [setting for setting in best if setting.partition("=")[0] == key]
                if not refused:
                    raise
                self.left_out[refused[0]] = str(error)
                best = [setting for setting in best if setting not in refused]


class _Marks:
    """Pairs of moments by phase; on CUDA events, so that marking waits for nothing.

    There, where the host is slower than the device, its idle time lies in the phase it waits in.
    """

    def __init__(self, device: torch.device):
        self.on_device = device.type == "cuda"
        self.pairs: list[tuple[str, Any, Any]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = self._now()
        try:
            yield
        finally:
            self.pairs.append((name, start, self._now()))

    def around(self, method: Callable, name: str) -> Callable:
        def call(*arguments, **keywords):
            with self.phase(name):
                return method(*arguments, **keywords)

        return call

    def seconds(self) -> dict[str, float]:
        """Sum of each phase; waits for the device."""
        if self.on_device:
            torch.cuda.synchronize()
        sums: dict[str, float] = {}
        for name, start, end in self.pairs:
            length = start.elapsed_time(end) / 1000 if self.on_device else end - start
            sums[name] = sums.get(name, 0.0) + length
        return sums

    def _now(self) -> Any:
        if not self.on_device:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def time_split(
    step: Callable[[], object],
    data: object,
    optimizers: Iterable[object],
    device: torch.device,
    steps: int = _SPLIT_STEPS,
) -> dict[str, float]:
    """Seconds per step of data, forward, backward and update, and of the whole step.

    For a few steps `data.train_batch`, and `backward` and `step` of each optimizer, are replaced on
    their objects by the same methods with two marks around them; afterwards they are as before.

    Args:
        step: takes one eager training step.
        data, optimizers: the objects whose methods it calls. forward is the rest: zeroing, casting
            inputs, the forward pass and the loss.
    """
    marks = _Marks(device)
    watched = [(data, "train_batch", "data")]
    for optimizer in optimizers:
        watched += [(optimizer, "backward", "backward"), (optimizer, "step", "update")]
    try:
        for holder, method, phase in watched:
            setattr(holder, method, marks.around(getattr(holder, method), phase))
        for _ in range(steps):
            with marks.phase("step"):
                step()
    finally:
        for holder, method, _ in watched:
            vars(holder).pop(method, None)
    sums = dict.fromkeys(("data", "forward", "backward", "update", "step"), 0.0) | marks.seconds()
    inside = sum(sums[name] for name in ("data", "backward", "update"))
    sums["forward"] = max(0.0, sums["step"] - inside)
    return {name: seconds / steps for name, seconds in sums.items()}
