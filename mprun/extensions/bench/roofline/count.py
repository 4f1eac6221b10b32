"""The count of one training step of a configuration: the real task, on tensors without values.

A dispatch mode writes a row for each kernel. The single-pass update and recurrent layers, which no
dispatcher sees, write their rows themselves.
"""

import dataclasses
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from mprun.build.precision import policy_from
from mprun.build.task import build_task
from mprun.config.compose import compose_config
from mprun.config.schema import DataConfig, RunConfig
from mprun.errors import BadInput, MprunError, raised
from mprun.extensions.bench.roofline import FORMATS
from mprun.extensions.bench.roofline.cuda_kernels import cuda_kernels
from mprun.extensions.bench.roofline.operations import (
    OperationCosts,
    Write,
    bytes_of,
    costs,
    tensors_in,
)
from mprun.extensions.bench.roofline.shape_only import (
    NO_END,
    SavedTensors,
    ShapeSource,
    StepMemory,
    held_bytes,
    shape_source,
    weightless,
)
from mprun.numerics.trace import Operation, in_backward, name_of
from mprun.precision import DTYPES, ForwardContext, PrecisionPolicy
from mprun.precision.philox import micro_batches
from mprun.precision.update import Checked, Ready, SinglePass
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
    dense: int  # number of parameters that every update moves (not row tables)
    update: str  # path of the update, "single_pass" or one of torch's implementations
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
        raise BadInput("device=cpu: a roofline is that of a GPU (allowed: auto, cuda)")
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
            f"model={config.model.name} precision={policy.name}: cannot be counted without "
            f"values: {raised(error)}"
        ) from error
    networks = [learner.model for learner in task.learners.values()]
    optimizers = [learner.optimizer for learner in task.learners.values()]
    return Counted(
        label=f"{config.model.name} b{config.data.batch_size}",
        mode=composed.mode,
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
            for optimizer in (learner.optimizer for learner in task.learners.values()):
                if optimizer.update_path == "single_pass":
                    # The real kernels belong to one device, and no dispatcher sees them.
                    optimizer.use(CountedPass(optimizer, counter.write))
                for name in ("backward", "zero_grad", "step"):
                    setattr(optimizer, name, counter.updating()(getattr(optimizer, name)))
            with counter:
                task.compute(task.load(0))
            counter.rows.clear()
            counter._casts.clear()
            held = held_bytes(task.learners.values())
            models = [learner.model for learner in task.learners.values()]
            # Parameters and buffers exist anyway: a graph that keeps them costs no more memory.
            saved = SavedTensors(t for m in models for t in (*m.parameters(), *m.buffers()))
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
        return build_task(config, source, policy, forward_context)
    except ValueError as error:
        raise BadInput(str(error)) from error
    finally:
        source.batches_per_epoch = NO_END


class Counter(TorchDispatchMode):
    """A mode in which every operation on fake tensors adds its rows to `rows`.

    A BatchNorm kernel can fold these: a ReLU (or leaky ReLU) of a BatchNorm's output; its gradient;
    the addition of a residual to such an output (the residual is still read); the addition of the
    two gradients that meet there (one is still read). The kernels that cast a 16-bit tensor to FP8
    (widen, scale, clamp, narrow) fold into one that reads the first and writes the second.

    Args:
        fp32_math: "ieee" or "tf32", how FP32 products are computed.
    """

    def __init__(self, fp32_math: str):
        super().__init__()
        self.fp32_math, self._updating = fp32_math, False
        self.rows: list[OperationCosts] = []
        # By id of the storage. Held tensors keep their ids, and fake ones are small.
        self._normalised: dict[int, Tensor] = {}
        self._activated: dict[int, Tensor] = {}
        self._residual_shapes: set[torch.Size] = set()
        # For tensors that may become FP8: the tensor, bytes of its source, its rows.
        self._casts: dict[int, tuple[Tensor, int, list[OperationCosts]]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and self._updating:
            return 1.0  # the step counter of an optimizer, which lies on the host
        # What returns nothing only changes values, of which there are none; some such operators
        # (fused optimizers) do not know tensors without values.
        results = func(*args, **kwargs) if schema_of(func).returns else None
        for kind, flops, size in costs(Operation(func, name_of(func), args, kwargs, results)):
            kind = self._kind(kind, args, results)
            dtype = next(tensors_in(args)).dtype if flops else torch.float32
            if flops and isinstance(args[-1], torch.dtype):  # casts, decoded to it
                dtype = args[-1]
            self.write(kind, dtype, flops, size, 1)
            self.rows[-1].folded_bytes = self._folded(kind, args, results)
            self._follow_cast(kind, args, results)
        return results

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

    def write(self, kind: str, dtype: torch.dtype, flops: int, size: int, launches: int) -> None:
        """Add a row; dtype: that of its products."""
        form = FORMATS.get(str(dtype), "fp32") if flops else ""
        form = "tf32" if form == "fp32" and self.fp32_math == "tf32" else form
        self.rows.append(OperationCosts(kind, self.phase, form, flops, size, launches))

    def _kind(self, kind: str, args, results) -> str:
        if kind != "add" or not isinstance(results, Tensor) or results.dim() < 4:
            return kind
        two = sum(t.shape == results.shape for t in tensors_in(args)) == 2
        if not two or self.phase == "update":
            return kind
        return "gradient add" if self.phase == "backward" else "residual add"

    def _follow_cast(self, kind: str, args, results) -> None:
        """Note the last row if it may belong to an FP8 cast; fold its rows if it ends one."""
        if kind not in ("cast", "mul", "clamp_") or not isinstance(results, Tensor):
            return
        _, size, rows = self._casts.get(storage_key(args[0]), (None, bytes_of(args[0]), []))
        if not rows and (kind != "cast" or args[0].element_size() != 2):
            return
        rows = [*rows, self.rows[-1]]
        if results.dtype is torch.float32:
            self._casts[storage_key(results)] = results, size, rows
        elif FORMATS.get(str(results.dtype)) == "fp8":
            for row in rows:
                row.folded_bytes = 0
            self.rows[-1].folded_bytes = size + bytes_of(results)

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


class CountedPass(SinglePass):
    """A single pass on tensors without values, which writes its costs.

    The check reads every gradient once. The update reads gradients, reads and writes weights and
    optimizer state (compensation of roundings included), and writes 16-bit copies of masters.
    """

    def __init__(self, own, write: Write):
        super().__init__(own.inner, own.parameters, own.updated, own.is_clipped, own.narrow)
        self._write = write

    def read(self, ready: Ready, *, norm: bool, grad_max: bool) -> Checked:
        if ready.found_inf is not None or norm or grad_max:
            size = sum(g.nbytes for g in ready.gradients if g is not None)
            self._write("check of gradients", torch.float32, 0, size, 1)
        return Checked(
            norms=torch.empty(len(ready.gradients)) if norm else None,
            grad_max=torch.empty(()) if grad_max else None,
        )

    def write(self, ready: Ready, clip: Tensor | None) -> None:
        size = 0
        tensors = zip(ready.gradients, self.parameters, self.updated, strict=True)
        for gradient, own, updated in tensors:
            if gradient is None:
                continue
            state = self.inner.state[updated].values()
            held = [t for t in state if isinstance(t, Tensor) and t.shape == updated.shape]
            size += gradient.nbytes + 2 * sum(tensor.nbytes for tensor in (updated, *held))
            size += own.nbytes if own is not updated else 0
        self._write("update in one pass", torch.float32, 0, size, 1)
