"""Take a run's steps outside the recording loop: to rewind, reproduce, or try changes.

On a CPU a replayed step is bit-equal to the recorded one. On a GPU some kernels add in a different
order, so every replay compares the losses and reports whether they are the same.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mprun.numerics.post_mortem import StepRow
from mprun.numerics.state import nonfinite
from mprun.precision.random_states import random_states, restore_random_states
from mprun.torch_private import tree_flatten_with_path, tree_leaves

_PARTS = ("inputs", "targets")  # of a batch; a network's further ones are counts and masks


class Steps:
    """Train a built run one step at a time, eagerly; waits for the device each time.

    built: a run that has not started (`mprun.assembly.Built`). step: steps done so far. skipped:
    how many of them had a skipped update, int64, 0-dim. metrics: the result of the last step, still
    on the device.
    """

    def __init__(self, built: Any, step: int, skipped: int):
        self.built, self.step = built, step
        self.skipped = built.stepper.skipped.fill_(skipped)
        self.metrics: dict[str, Tensor] = {}

    def advance(self) -> StepRow:
        """Train the next step exactly as the training loop does."""
        self.metrics = metrics = self.built.stepper.eager_step(self.step)
        self.step += 1
        found_inf = "found_inf" in metrics and bool(metrics["found_inf"] != 0)
        loss, scale = float(metrics["loss"]), float(metrics["loss_scale"])
        return StepRow(self.step, loss, scale, found_inf, int(self.skipped))


class KeptBatch:
    """A data source with the kept batches, one per micro-batch, in place of those of one step."""

    def __init__(self, source, step: int, batches: list[tuple[Tensor, ...]], device: torch.device):
        self._source, self._first = source, step * len(batches)
        self._batches = [tuple(part.to(device) for part in batch) for batch in batches]

    def train_batch(self, index: int) -> tuple[Tensor, ...]:
        place = index - self._first
        if 0 <= place < len(self._batches):
            return self._batches[place]
        return self._source.train_batch(index)

    def __getattr__(self, name: str):
        return getattr(self._source, name)


def batches_of(task, step: int) -> list[tuple[Tensor, ...]]:
    """Return the micro-batches that `step` (from 0) trains on."""
    count = task.samples_per_step // task.data.samples_per_batch
    return [task.data.train_batch(step * count + index) for index in range(count)]


def nonfinite_batch(task, step: int) -> dict[str, str]:
    """Return what is not finite in the batch of `step` (from 0), by name, as `nonfinite` says it.

    That of a script is not known here: nothing is found in it.
    """
    if task.data is None:
        return {}
    batches = batches_of(task, step)
    found: dict[str, str] = {}
    for number, batch in enumerate(batches, start=1):
        of = f" of micro-batch {number}" if len(batches) > 1 else ""
        found |= nonfinite({f"{n}{of}": part for n, part in zip(_PARTS, batch, strict=False)})
    return found


def resume_from(built, kept: dict) -> Steps:
    """Restore batches and random states of a kept state; the task's own state is in place."""
    use_batch(built, kept)
    random = kept["random"]
    if built.device.type == "cuda" and "cuda" not in random:
        random = random | {"cuda": torch.cuda.get_rng_state(built.device)}
    restore_random_states(random, built.device)
    return Steps(built, kept["step"], kept["skipped"])


def use_batch(built, kept: dict) -> None:
    """Let the run train the kept step on the kept batch, if there is one."""
    if kept["batch"] is not None:
        built.task.data = KeptBatch(built.task.data, kept["step"], kept["batch"], built.device)


def same_loss(a: float, b: float) -> bool:
    """Return whether both are bit-equal; all NaN count as one value."""
    return a == b or (math.isnan(a) and math.isnan(b))


class Snapshot:
    """A copy, on their device, of all tensors that the next step depends on; memory is reused."""

    def __init__(self, task, device: torch.device):
        self.task, self.device = task, device
        self.step: int | None = None
        self.skipped = 0
        self._state: dict = {}
        self._random: dict = {}
        self._adopt: Callable[[int], None] | None = None

    def take(self, step: int, skipped: int) -> None:
        """Copy the state after `step` steps, `skipped` of them without an update."""
        self.take_if(None, step)
        self.settle(True, skipped)

    @torch.no_grad()
    def take_if(self, chosen: Tensor | None, step: int) -> None:
        """Replace the copy by the state after `step` steps if `chosen` (bool, 0-dim) is true.

        The device decides (None: in any case), and the host does not wait. Call `settle` with the
        value of `chosen` before any other use of this copy. It allocates memory only for tensors of
        changed form (the carried state of a language model, once) or on the host.
        """
        old = dict(tree_flatten_with_path(self._state)[0])
        new, form = tree_flatten_with_path(self.task.state_dict())
        fresh = {}
        for path, source in new:
            target = old.get(path)
            if not isinstance(target, Tensor) or not _fits(target, source, chosen):
                fresh[path] = source.detach().clone() if isinstance(source, Tensor) else source
            elif chosen is None:
                target.copy_(source)
            else:
                torch.where(chosen, source, target, out=target)
        paths, random = [path for path, _ in new], random_states(self.device)

        def adopt(skipped: int) -> None:
            leaves = old | fresh
            self._state, self._random = form.unflatten([leaves[path] for path in paths]), random
            self.step, self.skipped = step, skipped

        self._adopt = adopt

    def settle(self, chosen: bool, skipped: int) -> None:
        """Report the result of the last `take_if`; `skipped`: its steps without an update."""
        adopt, self._adopt = self._adopt, None
        if adopt is not None and chosen:
            adopt(skipped)

    def restore(self) -> None:
        """Restore the task and the random generators."""
        self.task.load_state_dict(self._state)
        restore_random_states(self._random, self.device)

    def content(self) -> dict:
        """Return the form of a checkpoint; the next `take` overwrites its tensors."""
        place = {"step": self.step, "skipped": self.skipped}
        return {"task": self._state, **place, "random": self._random}


def size_of(state: dict) -> int:
    """Return the bytes of all tensors in a nested state."""
    return sum(leaf.nbytes for leaf in tree_leaves(state) if isinstance(leaf, Tensor))


def _fits(target: Tensor, source: object, chosen: Tensor | None) -> bool:
    """Return whether `source` can be copied to `target`, on the device of `chosen` if given."""
    if not isinstance(source, Tensor) or (chosen is not None and source.device != chosen.device):
        return False
    form = (target.shape, target.dtype, target.device)
    return form == (source.shape, source.dtype, source.device)
