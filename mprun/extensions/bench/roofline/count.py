"""The count of one training step of a configuration: the real task, on tensors without values.

A dispatch mode writes a row for each kernel. Recurrent layers, which no dispatcher sees, write
their rows themselves.
"""

import dataclasses
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mprun.assembly.precision import policy_from
from mprun.assembly.task import build_task
from mprun.config.compose import compose_config
from mprun.config.schema import DataConfig, RunConfig
from mprun.errors import BadInput, MprunError, raised
from mprun.extensions.bench.roofline import FORMATS
from mprun.extensions.bench.roofline.casts import CastCosts
from mprun.extensions.bench.roofline.cuda_kernels import cuda_kernels
from mprun.extensions.bench.roofline.operations import OperationCosts, bytes_of, costs
from mprun.extensions.bench.roofline.shape_only import (
    NO_END,
    SavedTensors,
    ShapeSource,
    StepMemory,
    held_bytes,
    shape_source,
    weightless,
)
from mprun.numerics.trace import Operation, in_backward, name_of, tensors_in
from mprun.precision import DTYPES, ForwardContext, PrecisionPolicy, scaled_products
from mprun.precision.philox import micro_batches
from mprun.precision.torch_update import path_of
from mprun.tasks import Learner
from mprun.torch_private import TorchDispatchMode, schema_of, storage_key


@dataclasses.dataclass(frozen=True, slots=True)
class Counted:
    """The cost of one step."""

    label: str  # the model and its size
    mode: str  # as in a run's record
    policy: PrecisionPolicy
    overrides: tuple[str, ...]  # dtype names of the module overrides
    rows: tuple[OperationCosts, ...]
    samples: int  # samples per step, in units of `sample`
    sample: str
    parameters: int
    dense: int  # number of parameters with dense gradients
    update: str  # torch's implementation of the optimizer
    memory: StepMemory
    counted_s: float  # seconds that the count took
    micro_batches: int = 1
    bucket_bytes: float = 25 * 2**20  # bytes of the FP32 gradients that ranks would sum at a time

    @property
    def flops(self) -> int:
        return sum(row.flops for row in self.rows)

    def bytes(self, phases: Sequence[str] = ("forward", "backward", "update")) -> int:
        return sum(row.bytes for row in self.rows if row.phase in phases)


def count(
    overrides: Sequence[str], mode: str | None = None, config_dir: str | None = None
) -> Counted:
    """Count a training step of `mprun [overrides]` as a GPU would execute it, without a GPU.

    It takes seconds and almost no memory for any size, and reads no data file.

    Args:
        mode: a precision mode that replaces the one of the overrides.
        config_dir: a folder with the user's options.

    Raises:
        BadInput: a configuration that cannot run, or a user's network that needs values
            (`.item()`, a loop over data).
    """
    started = time.perf_counter()
    given = [*overrides] if mode is None else [*overrides, f"precision={mode}"]
    composed = compose_config(given, config_dir, files=False)
    config = composed.config
    if config.device == "cpu":
        raise BadInput("device=cpu: a roofline needs a GPU (allowed: auto, cuda)")
    policy = policy_from(config.precision)
    source = shape_source(config)
    try:
        # torch warns about fake tensors, never about the step.
        with warnings.catch_warnings(action="ignore"):
            rows, task, memory = _step(config, policy, source)
    except MprunError:
        raise
    except Exception as error:
        raise BadInput(
            f"model={config.model.name} precision={policy.name}: the step needs the values of "
            f"tensors, so its operations cannot be counted: {raised(error)}"
        ) from error
    networks = [learner.model for learner in task.learners.values()]
    learners = [*task.learners.values()]
    tables = {own for network in networks for t in row_tables(network) for own in t.parameters()}
    return Counted(
        label=f"{config.model.name} b{config.data.batch_size}",
        mode=composed.mode,
        policy=policy,
        overrides=tuple(config.precision.overrides.values()),
        rows=tuple(rows),
        samples=task.samples_per_step,
        sample=task.sample,
        parameters=sum(p.numel() for network in networks for p in network.parameters()),
        dense=sum(p.numel() for one in learners for p in one.updated if p not in tables),
        update=path_of(learners[0].optimizer),
        memory=memory,
        counted_s=time.perf_counter() - started,
        micro_batches=config.train.accumulate,
        bucket_bytes=config.dist.bucket_mb * 2**20,
    )


def _step(config: RunConfig, policy: PrecisionPolicy, source: ShapeSource):
    """Return (rows, task, memory) of the second step: the first one carries no state on."""
    counter = Counter(policy.fp32_math)
    seed = torch.random.get_rng_state()
    try:
        # cuda_kernels is outside: it registers kernels with the dispatcher, not on tensors.
        with cuda_kernels(counter.write), micro_batches.apart(), weightless():
            task = _built(config, policy, source)
            for learner in task.learners.values():
                learner.optimizer.register_step_pre_hook(counter.turn)
                learner.optimizer.register_step_post_hook(counter.turn)
                learner.prepared.calls = 1  # its first call would compare values, to find writes
                for name in ("zero_grad", "end_part", "step"):
                    setattr(learner, name, counter.updating()(getattr(learner, name)))
                for table in row_tables(learner.model):
                    table.register_forward_hook(counter.update_of_rows(learner))
            with counter:
                task.compute(task.load(0))
            counter.rows.clear()
            learners = [*task.learners.values()]
            held = held_bytes(learners)
            # Parameters and buffers exist anyway: a graph that keeps them costs no more memory.
            saved = SavedTensors(
                (t for one in learners for t in (*one.model.parameters(), *one.model.buffers())),
                lambda: [t for one in learners for t in one.prepared.tensors.stand_ins],
            )
            with counter, saved.watching():
                task.compute(task.load(1))
    finally:
        torch.random.set_rng_state(seed)
    return counter.rows, task, StepMemory(**held, activations=saved.peak)


def _built(config: RunConfig, policy: PrecisionPolicy, source: ShapeSource):
    """Build the task on shapes; native, because a GPU emulates nothing."""
    chosen = [DTYPES[name] for name in config.precision.overrides.values()]
    forward_context = ForwardContext(policy, torch.device("cpu"), native=True, overrides=chosen)
    # A user's source was checked before, with values.
    plain = DataConfig(name="shapes", batch_size=config.data.batch_size)
    config = dataclasses.replace(config, cpu_half="native", data=plain)
    # A user's network is tried first, which needs values, unless there is no batch.
    source.batches_per_epoch = 0
    try:
        return build_task(config, source, forward_context)
    except ValueError as error:
        raise BadInput(str(error)) from error
    finally:
        source.batches_per_epoch = NO_END


def row_tables(network: nn.Module) -> list[nn.Embedding]:
    """Return the modules with sparse gradients."""
    return [m for m in network.modules() if isinstance(m, nn.Embedding) and m.sparse]


class Counter(TorchDispatchMode):
    """A mode in which every operation on fake tensors adds its rows to `rows`.

    A BatchNorm kernel can fold these: a ReLU (or leaky ReLU) of a BatchNorm's output; its gradient;
    the addition of a residual to such an output (the residual is still read); the addition of the
    two gradients that meet there (one is still read). Casts of `scaled_products` are one kernel.

    Args:
        fp32_math: "ieee" or "tf32", how FP32 products are computed.
    """

    def __init__(self, fp32_math: str):
        super().__init__()
        self.fp32_math, self._updating = fp32_math, False
        self.rows: list[OperationCosts] = []
        self.casts = CastCosts(self.write, self.silent)
        self._silent = False  # inside of what is counted as a whole
        self._is_torchs = False  # torch's own step runs, after mprun has read whether to skip it
        # By id of the storage. Held tensors keep their ids, and fake ones are small.
        self._normalised: dict[int, Tensor] = {}
        self._activated: dict[int, Tensor] = {}
        self._residual_shapes: set[torch.Size] = set()

    def __enter__(self):
        self._others = scaled_products.observer
        scaled_products.observer = self.casts.seen
        return super().__enter__()

    def __exit__(self, *exception):
        scaled_products.observer = self._others
        super().__exit__(*exception)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and self._updating:
            # Whether to skip the step, or the step counter of an optimizer, which is on the host.
            return 1.0 if self._is_torchs else 0.0
        # What returns nothing only changes values, of which there are none; some such operators
        # (fused optimizers) do not know tensors without values.
        results = func(*args, **kwargs) if schema_of(func).returns else None
        if self._silent:
            return results
        for kind, flops, size in costs(Operation(func, name_of(func), args, kwargs, results)):
            kind = self._kind(kind, args, results)
            dtype = tensors_in(args)[0].dtype if flops else torch.float32
            if flops and isinstance(args[-1], torch.dtype):  # casts, decoded to it
                dtype = args[-1]
            self.write(kind, dtype, flops, size, 1)
            self.rows[-1].folded_bytes = self._folded(kind, args, results)
            if kind in ("fp8 product", "int8 product"):
                self.casts.read(args[0], args[1])
        return results

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Count nothing inside."""
        before, self._silent = self._silent, True
        try:
            yield
        finally:
            self._silent = before

    def turn(self, *_: Any) -> None:
        """Begin torch's own step of an optimizer, or end it; a hook of both."""
        self._is_torchs = not self._is_torchs

    def update_of_rows(self, learner: Learner) -> Callable[..., Any]:
        """Return a forward hook of a table with sparse gradients, which no such tensor passes.

        It writes what happens to the rows: their gradients are widened, those of one row added up,
        and rows of table and state read and written.
        """

        def cut(module: nn.Module, inputs: Any, outputs: Any) -> Any:
            state = [own for of in learner.optimizer.state.values() for own in of.values()]
            # Adagrad has one such tensor for each parameter, SGD none.
            tensors = 1 + any(isinstance(own, Tensor) and own.dim() > 0 for own in state)
            made = [rows.detach().requires_grad_() for rows in tensors_in(outputs)]
            with self.updating():
                for rows in made:
                    size = rows.numel() * (rows.itemsize + 4 + 8 + 4 + 8 * tensors)
                    self.write("row update", torch.float32, 0, size, 1)
            return tuple(made) if isinstance(outputs, tuple) else made[0]

        cut.sees_inside = True  # type: ignore[attr-defined]  # of a prepared model
        return cut

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Count everything inside as update, except a backward pass."""
        before, self._updating = self._updating, True
        try:
            yield
        finally:
            self._updating = before

    @property
    def phase(self) -> str:
        if in_backward():
            return "backward"
        return "update" if self._updating else "forward"

    def write(
        self,
        kind: str,
        dtype: torch.dtype,
        flops: int,
        size: int,
        launches: int,
        least: int | None = None,
    ) -> OperationCosts:
        """Add a row and return it; dtype: that of its products; least: see `Write`."""
        form = FORMATS.get(str(dtype), "fp32") if flops else ""
        form = "tf32" if form == "fp32" and self.fp32_math == "tf32" else form
        row = OperationCosts(kind, self.phase, form, flops, size, launches)
        if least is None:
            least = size if flops or kind in ("update", "row update") else 0
        row.least_bytes = least
        self.rows.append(row)
        return row

    def _kind(self, kind: str, args, results) -> str:
        if kind != "add" or not isinstance(results, Tensor) or results.dim() < 4:
            return kind
        two = sum(t.shape == results.shape for t in tensors_in(args)) == 2
        if not two or self.phase == "update":
            return kind
        return "gradient add" if self.phase == "backward" else "residual add"

    def _folded(self, kind: str, args, results) -> int | None:
        """Return the bytes left if a BatchNorm kernel can fold this kernel, otherwise None."""
        match kind:
            case "batch norm":
                self._normalised[storage_key(results[0])] = results[0]
            case "relu" | "leaky_relu" if storage_key(args[0]) in self._normalised:
                self._activated |= {storage_key(args[0]): args[0], storage_key(results): results}
                return 0
            case "relu backward" | "leaky_relu_backward":
                return 0 if storage_key(args[1]) in self._activated else None
            case "residual add" if self._normalised.keys() & map(storage_key, tensors_in(args)):
                self._normalised[storage_key(results)] = results
                self._residual_shapes.add(results.shape)
                return bytes_of(results)
            case "gradient add" if results.shape in self._residual_shapes:
                return bytes_of(results)
        return None
