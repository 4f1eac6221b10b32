"""Observe one step: count all its tensors, change nothing.

Patterns choose the measured modules; a parameter belongs to the innermost chosen one around it.
Hooks only look: they return nothing, draw no random numbers and run under no_grad, outside the
modes that emulate 16-bit products. They exist only during the probed step.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial

import torch
from torch import Tensor, nn

from mprun.errors import BadInput
from mprun.numerics.applied_updates import UpdateMeter
from mprun.numerics.exponent_counter import (
    OUTCOMES,
    Tally,
    largest,
    lost_updates,
    read_counts,
    sampled,
    sampling_stride,
)
from mprun.numerics.exponent_shares import BINS, AppliedUpdates, ExponentCounts
from mprun.numerics.probe_record import KINDS, LearnerProbe, TensorStats
from mprun.numerics.state import Learner
from mprun.precision import DTYPE_NAMES
from mprun.torch_private import DisableTorchFunction, disable_dispatch_modes, tree_leaves

Chosen = dict[str, dict[str, nn.Module]]


def chosen_modules(learners: Mapping[str, Learner], patterns: Sequence[str]) -> Chosen:
    """Return learner -> module name -> module; BadInput for a pattern that matches no module.

    patterns: glob patterns over module names, as in precision.overrides; each must match in at
    least one of the models. Without patterns: every module that has no modules inside.
    """
    names = {
        label: {name: module for name, module in learner.model.named_modules() if name}
        for label, learner in learners.items()
    }
    everything = [name for own in names.values() for name in own]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in everything):
            close = get_close_matches(pattern, everything, n=3, cutoff=0.0)
            raise BadInput(
                f"numerics.modules={pattern}: matches no module; some modules: {', '.join(close)}"
            )

    def is_chosen(name: str, module: nn.Module) -> bool:
        if patterns:
            return any(fnmatchcase(name, pattern) for pattern in patterns)
        return not any(module.children())

    return {
        label: {name: module for name, module in own.items() if is_chosen(name, module)}
        for label, own in names.items()
    }


def owner(parameter: str, chosen: Mapping[str, nn.Module]) -> str | None:
    """Return the innermost chosen module around the parameter of this name, or None."""
    while parameter:
        parameter = parameter.rpartition(".")[0]
        if parameter in chosen:
            return parameter
    return None


class Probe:
    """Watch one training step of `task` inside a `with` block; `read` returns the result.

        with Probe(task, chosen) as probe:
            metrics = task.train_step(index)
        learners, (loss,) = probe.read([metrics["loss"]])

    chosen: the modules to measure, from `chosen_modules`. Only a part of a tensor with more than
    2^18 values is counted (`sampling_stride`). A probe costs about two training steps of time and a
    copy of the counted weights; if these are updated in 16 bits, also of their state and gradients
    (`UpdateMeter`). For row tables (mprun.precision.row_updates) it counts the gradients of the
    rows that the step uses, not the weights and their updates.
    """

    def __init__(self, task, chosen: Chosen):
        self.task, self.chosen = task, chosen
        self.tally = Tally()
        # For each parameter: learner and module, values before the step, their stride, the tensor.
        self.before: list[tuple[tuple[str, str], Tensor, int, Tensor]] = []
        self.lost: dict[tuple[str, str], Tensor] = {}
        self.meters: dict[str, UpdateMeter] = {}
        self.applied: dict[tuple[str, str], Tensor] = {}
        self._handles: list = []

    @torch.no_grad()
    def __enter__(self) -> "Probe":
        for name, learner in self.task.learners.items():
            optimizer, chosen = learner.optimizer, self.chosen[name]
            for module_name, module in chosen.items():
                hook = partial(self._on_output, name, module_name)
                setattr(hook, "sees_inside", True)  # noqa: B010 - of a prepared model
                self._handles.append(module.register_forward_hook(hook))
            for parameter_name, parameter, updated in zip(
                optimizer.names, optimizer.parameters, optimizer.updated, strict=True
            ):
                inside = owner(parameter_name, chosen)
                if inside is not None:
                    hook = partial(self._on_gradient, (name, "weight_gradients", inside))
                    if parameter.requires_grad:  # a script may freeze it
                        self._handles.append(parameter.register_hook(hook))
                    stride = sampling_stride(updated)
                    values = sampled(updated, stride).clone()
                    amax = largest(updated)
                    self.tally.add_sample((name, "weights", inside), values, stride, amax)
                    self.before.append(((name, inside), values, stride, updated))
            names = [own for own in optimizer.names if owner(own, chosen) is not None]
            self.meters[name] = UpdateMeter(optimizer, names)
            for table_name, module in optimizer.tables.items():
                if table_name in chosen:
                    hook = partial(self._on_gradient, (name, "weight_gradients", table_name))
                    self._handles.append(module.register_gradient_hook(hook))
        return self

    def __exit__(self, kind, error, traceback) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if kind is None:
            self._count_updates()
            self.tally.finish()

    def _on_output(self, learner: str, name: str, module, inputs, output) -> None:
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        with _plainly():
            # FP8 products take the input too (`mprun.extensions.diagnosis.fp8`).
            if isinstance(module, nn.Linear) and inputs:
                self.tally.add((learner, "inputs", name), inputs[0])
            for tensor in tensors:
                self.tally.add((learner, "activations", name), tensor)
        # A tensor hook gets the gradient of exactly these values, even if the next module
        # overwrites them in place.
        hook = partial(self._on_gradient, (learner, "activation_gradients", name))
        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_hook(hook)

    def _on_gradient(self, key: tuple[str, str, str], gradient: Tensor | None) -> None:
        if gradient is None:  # of an unused result, beside others of one operation
            return
        with _plainly():
            self.tally.add(key, gradient)

    @torch.no_grad()
    def _count_updates(self) -> None:
        asked, updates = [], []
        for (name, module), old, stride, updated in self.before:
            update = sampled(updated, stride).float() - old.float()
            self.tally.add_sample((name, "updates", module), update, stride, largest(update))
            narrow = self.task.learners[name].optimizer.narrow
            # Single updates do not show what such a store keeps on average.
            if narrow is None or narrow.rounding == "nearest":
                asked.append(((name, module), old, stride))
                updates.append(update)
        if updates:
            outcomes = lost_updates([old for _, old, _ in asked], updates)
            for (key, _, stride), counts in zip(asked, outcomes, strict=True):
                self.lost[key] = self.lost.get(key, 0) + counts * stride
        for name, meter in self.meters.items():
            for parameter, sums in meter.sums().items():
                inside = owner(parameter, self.chosen[name])
                assert inside is not None  # only these are measured
                self.applied[name, inside] = self.applied.get((name, inside), 0) + sums
        self.before, self.meters = [], {}

    def read(self, scalars: Sequence[Tensor]) -> tuple[dict[str, LearnerProbe], list[float]]:
        """Return (learner -> measurements, `scalars` as floats).

        scalars: 0-dim tensors that the host needs too. Only this method waits for the device, in
        one transfer.
        """
        tally, keys = self.tally, list(self.tally.counts)
        singles = [x.double() for x in (*(tally.amax[key] for key in keys), *scalars)]
        floats = torch.cat([torch.stack(singles), *self.applied.values()])
        integers = [*(tally.counts[key] for key in keys), *self.lost.values()]
        packed = torch.cat([*integers, floats.view(torch.int64)]).cpu()
        sizes = [BINS] * len(keys) + [OUTCOMES] * len(self.lost) + [len(floats)]
        *rows, last = packed.split(sizes)
        values, stats = last.view(torch.float64).tolist(), {}
        for key, row, amax in zip(keys, rows, values, strict=False):
            dtypes = "+".join(sorted(DTYPE_NAMES[dtype] for dtype in tally.dtypes[key]))
            stats[key] = TensorStats(ExponentCounts(row.numpy()), amax, dtypes, tally.strides[key])
        ends = len(keys) + len(scalars)
        applied = {
            key: AppliedUpdates(*values[place : place + 3])
            for place, key in zip(range(ends, len(values), 3), self.applied, strict=True)
        }
        outcomes = zip(self.lost, rows[len(keys) :], strict=True)
        lost = {key: read_counts(row.tolist()) for key, row in outcomes}
        learners = {
            name: LearnerProbe(
                loss_scale_names(self.task, name),
                {
                    kind: {m: stats[name, kind, m] for m in own if (name, kind, m) in stats}
                    for kind in KINDS
                },
                {m: lost[name, m] for m in own if (name, m) in lost},
                applied_updates={m: applied[name, m] for m in own if (name, m) in applied},
            )
            for name, own in self.chosen.items()
        }
        return learners, values[len(keys) : ends]


def loss_scale_names(task, learner: str) -> tuple[str, ...]:
    """Return the names of the loss scales of one learner's losses, each once."""
    names = {id(scale): name for name, scale in task.loss_scales.items()}
    own = task.learners[learner].optimizer.loss_scales
    return tuple(dict.fromkeys(names[id(scale)] for scale in own))


@contextmanager
def _plainly() -> Iterator[None]:
    """Disable gradients and the emulation, which would look at every operation."""
    with torch.no_grad(), DisableTorchFunction(), disable_dispatch_modes():
        yield
