"""One training step of a configuration counted: the real task, on tensors without values."""

import dataclasses
import time
import warnings
from collections.abc import Sequence
from contextlib import contextmanager

import torch

from mprun.bench.roofline.counter import Counter
from mprun.bench.roofline.cuda_kernels import cuda_kernels
from mprun.bench.roofline.memory import Memory, SavedTensors, held_bytes
from mprun.bench.roofline.rows import Row
from mprun.bench.roofline.shapes import NO_END, ShapeSource, shape_source
from mprun.bench.roofline.update import CountedPass
from mprun.bench.roofline.weightless import weightless
from mprun.build.precision import mode_label, policy_from
from mprun.build.task import build_task
from mprun.config.compose import compose_config
from mprun.config.schema import DataConfig, RunConfig
from mprun.errors import BadInput, MprunError, raised
from mprun.precision import DTYPES, Arithmetic, PrecisionPolicy

_CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True, slots=True)
class Counted:
    """What one step costs.

    label: the model and its size. mode: as in a run's record. overrides: dtype names of the modules
    with one of their own. samples: per step, in units of `sample`. parameters: all; dense: those
    that every update moves (not row tables). update: how, "single_pass" or which of torch's
    implementations. memory: in bytes. counted_s: how long the count took.
    """

    label: str
    mode: str
    policy: PrecisionPolicy
    overrides: tuple[str, ...]
    rows: tuple[Row, ...]
    samples: int
    sample: str
    parameters: int
    dense: int
    update: str
    memory: Memory
    counted_s: float

    @property
    def flops(self) -> int:
        """Of the whole step."""
        return sum(row.flops for row in self.rows)

    def bytes(self, phases: Sequence[str] = ("forward", "backward", "update")) -> int:
        """Read and written in these phases."""
        return sum(row.bytes for row in self.rows if row.phase in phases)


def count(
    overrides: Sequence[str], mode: str | None = None, config_dir: str | None = None
) -> Counted:
    """Count a training step of `mprun [overrides]` as a GPU would execute it; needs none.

    mode: a precision mode that replaces the one of the overrides. Takes seconds and no memory
    worth mention, whatever the sizes; reads no file of the data. The step is one in steady state:
    a language model carries its state on. Raises BadInput for a configuration that cannot run, and
    for a network of the user's own that needs values (`.item()`, a loop over data).
    """
    started = time.perf_counter()
    given = [*overrides] if mode is None else [*overrides, f"precision={mode}"]
    config = compose_config(given, config_dir, files=False).config
    if config.device == "cpu":
        raise BadInput("device=cpu: a roofline is that of a GPU (allowed: auto, cuda)")
    policy = policy_from(config.precision)
    source = shape_source(config)
    try:
        with warnings.catch_warnings():
            # Of torch about fake tensors: none of it is about the step.
            warnings.simplefilter("ignore")
            rows, task, memory = _step(config, policy, source)
    except MprunError:
        raise
    except Exception as error:
        raise BadInput(
            f"model={config.model.name} precision={policy.name}: cannot be counted without "
            f"values: {raised(error)}"
        ) from error
    networks = [learner.model for learner in task.learners.values()]
    optimizers = [learner.optimizer for learner in task.learners.values()]
    return Counted(
        label=f"{config.model.name} b{config.data.batch_size}",
        mode=mode_label(config.precision),
        policy=policy,
        overrides=tuple(config.precision.overrides.values()),
        rows=tuple(rows),
        samples=task.samples_per_step,
        sample=task.sample,
        parameters=sum(p.numel() for network in networks for p in network.parameters()),
        dense=sum(p.numel() for optimizer in optimizers for p in optimizer.parameters),
        update=optimizers[0].update_path,
        memory=memory,
        counted_s=time.perf_counter() - started,
    )


def _step(config: RunConfig, policy: PrecisionPolicy, source: ShapeSource):
    """(rows, task, memory) of the second step: the first one finds nothing carried on."""
    counter = Counter(policy.fp32_math)
    seed = torch.random.get_rng_state()
    try:
        # cuda_kernels outside: what it registers is for the dispatcher, not for tensors.
        with cuda_kernels(counter.write), weightless():
            task = _built(config, policy, source)
            optimizers = [learner.optimizer for learner in task.learners.values()]
            for learner, optimizer in zip(task.learners.values(), optimizers, strict=True):
                if optimizer.update_path == "single_pass":
                    # The kernels themselves are of one device and no dispatcher sees them.
                    optimizer.use(CountedPass(optimizer, counter.write))
                learner.optimizer = _Marked(optimizer, counter)
            with counter:
                task.compute(task.load(0))
            counter.rows.clear()
            held = held_bytes(task.learners.values())
            saved = SavedTensors(_held(task))
            with counter, saved.watching():
                task.compute(task.load(1))
    finally:
        torch.random.set_rng_state(seed)
    return counter.rows, task, Memory(**held, activations=saved.peak)


def _built(config: RunConfig, policy: PrecisionPolicy, source: ShapeSource):
    """The task on shapes; native, because a GPU emulates nothing."""
    chosen = [DTYPES[name] for name in config.precision.overrides.values()]
    arithmetic = Arithmetic(policy, _CPU, native=True, overrides=chosen)
    # A source of the user's has been held to its promises already, with values.
    plain = DataConfig(name="shapes", batch_size=config.data.batch_size)
    config = dataclasses.replace(config, cpu_half="native", data=plain)
    # Without a batch a network of the user's own is not tried first, which takes values.
    source.batches_per_epoch = 0
    try:
        return build_task(config, source, policy, arithmetic)
    except ValueError as error:
        raise BadInput(str(error)) from error
    finally:
        source.batches_per_epoch = NO_END


def _held(task) -> list[torch.Tensor]:
    """Parameters and buffers, which a graph keeps without costing anything more."""
    models = [learner.model for learner in task.learners.values()]
    return [t for model in models for t in (*model.parameters(), *model.buffers())]


class _Marked:
    """An optimizer of which the counter knows when it works on gradients and weights."""

    def __init__(self, optimizer, counter: Counter):
        self._optimizer, self._counter = optimizer, counter

    def __getattr__(self, name: str):
        return getattr(self._optimizer, name)

    def backward(self, loss: torch.Tensor, loss_index: int = 0) -> None:
        """The backward pass is not the optimizer's; casting and checking what it made is."""
        with self._updating():
            self._optimizer.backward(loss, loss_index)

    def zero_grad(self) -> None:
        with self._updating():
            self._optimizer.zero_grad()

    def step(self, measure: bool = False):
        with self._updating():
            return self._optimizer.step(measure)

    @contextmanager
    def _updating(self):
        self._counter.updating = True
        try:
            yield
        finally:
            self._counter.updating = False
