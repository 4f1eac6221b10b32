"""One step under observation: every tensor of it counted, nothing of it changed.

Hooks only look: they return nothing, draw no random numbers and work under no_grad, outside the
modes that emulate 16-bit products. They exist during the step that is probed and at no other time.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from mprun.numerics.exponent_shares import ExponentCounts
from mprun.numerics.exponents import BINS
from mprun.numerics.lost_updates import LostUpdates, lost_updates_of_each, read_counts
from mprun.numerics.probe_record import KINDS, LearnerProbe, TensorStats
from mprun.numerics.selection import Chosen, owner
from mprun.numerics.tally import Tally
from mprun.precision import DTYPE_NAMES

_OUTCOMES = 16  # of an update, see lost_updates


class Probe:
    """Watches one training step of `task` inside a `with` block; `read` gives what it saw.

        with Probe(task, chosen) as probe:
            metrics = task.train_step(index)
        learners, (loss,) = probe.read([metrics["loss"]])

    chosen: the modules to measure, from `chosen_modules`. Costs, while it lasts, a copy of the
    weights, 4 bytes a weight for the updates and two to three training steps of time.
    """

    def __init__(self, task, chosen: Chosen):
        self.task, self.chosen = task, chosen
        self.tally = Tally()
        self.before: dict[str, list[Tensor]] = {}
        self.lost: dict[tuple[str, str], Tensor] = {}
        self._handles: list = []

    @torch.no_grad()
    def __enter__(self) -> "Probe":
        for name, learner in self.task.learners.items():
            optimizer = learner.optimizer
            self.before[name] = [updated.detach().clone() for updated in optimizer.updated]
            for module_name, module in self.chosen[name].items():
                hook = partial(self._on_output, name, module_name)
                self._handles.append(module.register_forward_hook(hook))
            for parameter_name, parameter in zip(
                optimizer.names, optimizer.parameters, strict=True
            ):
                module_name = owner(parameter_name, self.chosen[name])
                if module_name is not None:
                    hook = partial(self._on_gradient, (name, "weight_gradients", module_name))
                    self._handles.append(parameter.register_hook(hook))
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

    def _on_gradient(self, key: tuple[str, str, str], gradient: Tensor) -> None:
        with _plainly():
            self.tally.add(key, gradient)

    @torch.no_grad()
    def _count_updates(self, name: str) -> None:
        optimizer, chosen = self.task.learners[name].optimizer, self.chosen[name]
        modules, before, updates = [], [], []
        for parameter, old, new in zip(
            optimizer.names, self.before.pop(name), optimizer.updated, strict=True
        ):
            module = owner(parameter, chosen)
            if module is not None:
                modules.append(module)
                before.append(old)
                updates.append(new.detach().float() - old.float())
        for module, old, update in zip(modules, before, updates, strict=True):
            self.tally.add((name, "weights", module), old, keep=True)
            self.tally.add((name, "updates", module), update, keep=True)
        if modules:
            for module, counts in zip(modules, lost_updates_of_each(before, updates), strict=True):
                self.lost[name, module] = self.lost.get((name, module), 0) + counts

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
        lost_end = end + len(self.lost) * _OUTCOMES
        outcomes = packed[end:lost_end].reshape(-1, _OUTCOMES)
        values = packed[lost_end:].view("float64").tolist()
        stats = {
            key: TensorStats(ExponentCounts(row), amax, _names(self.tally.dtypes[key]))
            for key, row, amax in zip(keys, rows, values, strict=False)
        }
        lost = {key: read_counts(row) for key, row in zip(self.lost, outcomes, strict=True)}
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


def _names(dtypes: set[torch.dtype]) -> str:
    return "+".join(sorted(DTYPE_NAMES[dtype] for dtype in dtypes))
