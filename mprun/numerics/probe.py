"""One step under observation: every tensor of it counted, nothing of it changed.

Which modules are measured is chosen by patterns; a parameter belongs to the innermost around it.
Hooks only look: they return nothing, draw no random numbers and work under no_grad, outside the
modes that emulate 16-bit products. They exist during the step that is probed and at no other time.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from mprun.errors import BadInput
from mprun.numerics.exponent_counter import (
    OUTCOMES,
    Tally,
    largest,
    lost_updates_of_each,
    read_counts,
    sampled,
    sampling_stride,
)
from mprun.numerics.exponent_shares import BINS, ExponentCounts, LostUpdates
from mprun.numerics.probe_record import KINDS, LearnerProbe, TensorStats
from mprun.precision import DTYPE_NAMES
from mprun.tasks import TrainState

Chosen = dict[str, dict[str, nn.Module]]


def chosen_modules(learners: Mapping[str, TrainState], patterns: Sequence[str]) -> Chosen:
    """TrainState -> module name -> module; BadInput for a pattern that matches no module.

    patterns: glob patterns over module names, as in precision.overrides; each has to match in one
    of the models at least. None at all: every module that has no modules inside.
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
    """The innermost chosen module around the parameter of this name, or None."""
    name = parameter
    while name:
        name = name.rpartition(".")[0]
        if name in chosen:
            return name
    return None


class Probe:
    """Watches one training step of `task` inside a `with` block; `read` gives what it saw.

        with Probe(task, chosen) as probe:
            metrics = task.train_step(index)
        learners, (loss,) = probe.read([metrics["loss"]])

    chosen: the modules to measure, from `chosen_modules`. Of tensors of more than 2^18 values a
    part is counted (`sampling_stride`). Costs about two training steps of time and a copy of the
    weights that are counted. Of row tables (mprun.precision.row_updates) the gradients of the rows
    that the step uses are counted, not the weights and their updates.
    """

    def __init__(self, task, chosen: Chosen):
        self.task, self.chosen = task, chosen
        self.tally = Tally()
        # Of each parameter its module, values before the step, their stride, and the tensor itself.
        self.before: dict[str, list[tuple[str, Tensor, int, Tensor]]] = {}
        self.lost: dict[tuple[str, str], Tensor] = {}
        self._handles: list = []

    @torch.no_grad()
    def __enter__(self) -> "Probe":
        for name, learner in self.task.learners.items():
            optimizer = learner.optimizer
            self._keep_weights(name)
            for module_name, module in self.chosen[name].items():
                hook = partial(self._on_output, name, module_name)
                self._handles.append(module.register_forward_hook(hook))
            for parameter_name, parameter in zip(
                optimizer.names, optimizer.parameters, strict=True
            ):
                inside = owner(parameter_name, self.chosen[name])
                if inside is not None:
                    hook = partial(self._on_gradient, (name, "weight_gradients", inside))
                    self._handles.append(parameter.register_hook(hook))
            for table_name, module in optimizer.tables.items():
                if table_name in self.chosen[name]:
                    hook = partial(self._on_gradient, (name, "weight_gradients", table_name))
                    self._handles.append(module.register_gradient_hook(hook))
        return self

    def __exit__(self, kind, error, traceback) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if kind is None:
            for name in self.task.learners:
                self._count_updates(name)
            self.tally.finish()

    def _on_output(self, learner: str, name: str, module, inputs, output) -> None:
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        with _plainly():
            for tensor in tensors:
                self.tally.add((learner, "activations", name), tensor)
        # A hook of the tensor gets the gradient of these very values, also where the next module
        # overwrites them in place.
        hook = partial(self._on_gradient, (learner, "activation_gradients", name))
        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_hook(hook)

    def _on_gradient(self, key: tuple[str, str, str], gradient: Tensor | None) -> None:
        if gradient is None:  # of a result that is not used, beside others of one operation
            return
        with _plainly():
            self.tally.add(key, gradient)

    @torch.no_grad()
    def _keep_weights(self, name: str) -> None:
        optimizer = self.task.learners[name].optimizer
        self.before[name] = []
        for parameter, updated in zip(optimizer.names, optimizer.updated, strict=True):
            module = owner(parameter, self.chosen[name])
            if module is not None:
                stride = sampling_stride(updated)
                values = sampled(updated, stride).clone()
                self.tally.add_sample((name, "weights", module), values, stride, largest(updated))
                self.before[name].append((module, values, stride, updated))

    @torch.no_grad()
    def _count_updates(self, name: str) -> None:
        kept, updates = self.before.pop(name), []
        for module, old, stride, updated in kept:
            update = sampled(updated, stride).float() - old.float()
            self.tally.add_sample((name, "updates", module), update, stride, largest(update))
            updates.append(update)
        if kept:
            outcomes = lost_updates_of_each([old for _, old, _, _ in kept], updates)
            for (module, _, stride, _), counts in zip(kept, outcomes, strict=True):
                self.lost[name, module] = self.lost.get((name, module), 0) + counts * stride

    def read(self, scalars: Sequence[Tensor]) -> tuple[dict[str, LearnerProbe], list[float]]:
        """(learner -> what was measured in it, `scalars` as floats).

        scalars: 0-dim tensors that are wanted on the host too: this is the one place that waits
        for the device, in one transfer.
        """
        keys = list(self.tally.counts)
        integers = [*(self.tally.counts[key] for key in keys), *self.lost.values()]
        floats = [
            *(self.tally.amax[key].double() for key in keys),
            *(scalar.double() for scalar in scalars),
        ]
        packed = torch.cat([*integers, torch.stack(floats).view(torch.int64)]).cpu().numpy()
        end = len(keys) * BINS
        rows = packed[:end].reshape(-1, BINS)
        lost_end = end + len(self.lost) * OUTCOMES
        outcomes = packed[end:lost_end].reshape(-1, OUTCOMES)
        values = packed[lost_end:].view("float64").tolist()
        stats = {}
        for key, row, amax in zip(keys, rows, values, strict=False):
            dtypes = "+".join(sorted(DTYPE_NAMES[dtype] for dtype in self.tally.dtypes[key]))
            stats[key] = TensorStats(ExponentCounts(row), amax, dtypes, self.tally.strides[key])
        lost = {
            key: read_counts(row.tolist()) for key, row in zip(self.lost, outcomes, strict=True)
        }
        learners = {name: self._learner(name, stats, lost) for name in self.task.learners}
        return learners, values[len(keys) :]

    def _learner(self, name: str, stats: dict, lost: dict[tuple, LostUpdates]) -> LearnerProbe:
        tensors = {
            kind: {
                module: stats[name, kind, module]
                for module in self.chosen[name]
                if (name, kind, module) in stats
            }
            for kind in KINDS
        }
        own = {module: lost[name, module] for module in self.chosen[name] if (name, module) in lost}
        return LearnerProbe(loss_scale_names(self.task, name), tensors, own)


def loss_scale_names(task, learner: str) -> tuple[str, ...]:
    """Names of the loss scales that the losses of one learner are multiplied by, each once."""
    names = {id(scale): name for name, scale in task.loss_scales.items()}
    own = task.learners[learner].optimizer.loss_scales
    return tuple(dict.fromkeys(names[id(scale)] for scale in own))


@contextmanager
def _plainly() -> Iterator[None]:
    """Without gradients, and past the emulation, which would look at every operation."""
    with torch.no_grad(), torch._C.DisableTorchFunction(), _disable_current_modes():
        yield
