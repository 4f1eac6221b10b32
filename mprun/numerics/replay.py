"""A run's steps outside the loop that records them: to rewind, to reproduce, to try something else.

On a CPU a replayed step is bit-equal to the recorded one; on a GPU some kernels add up in another
order, so whoever replays compares the losses and says whether they are the same.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_flatten_with_path

from mprun.build import Built
from mprun.precision.random_states import random_states, restore_random_states


@dataclass(frozen=True, slots=True)
class Replayed:
    """One replayed step as numbers: what a replay needs of the metric buffer's `StepRow`."""

    step: int
    loss: float
    loss_scale: float
    found_inf: bool

    @property
    def diverged(self) -> bool:
        """A loss that is not finite although its update was applied."""
        return not self.found_inf and not math.isfinite(self.loss)


class Steps:
    """Trains a built run one step at a time, eagerly; waits for the device each time.

    Attributes:
        step: steps done so far.
        skipped: how many of them had a skipped update, int64, 0-dim.
        metrics: what the last step returned, still on the device.
    """

    def __init__(self, built: Built, step: int, skipped: int):
        self.built, self.step = built, step
        self.skipped = built.stepper.skipped.fill_(skipped)
        self.metrics: dict[str, Tensor] = {}

    def advance(self) -> Replayed:
        """Train the next step exactly as the training loop does."""
        self.metrics = metrics = self.built.stepper.eager_step(self.step)
        self.step += 1
        return Replayed(
            self.step,
            float(metrics["loss"]),
            float(metrics["loss_scale"]),
            "found_inf" in metrics and bool(metrics["found_inf"] != 0),
        )


class KeptBatch:
    """A data source in which the batches of one step are those that were kept with the state.

    batches: one per micro-batch of step `step` (from 0). Everything else is the source's own.
    """

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
    """The micro-batches that `step` (from 0) trains on."""
    count = task.samples_per_step // task.data.samples_per_batch
    return [task.data.train_batch(step * count + index) for index in range(count)]


def restore(built, kept: dict) -> Steps:
    """Put a kept state (`FailureKeeper.record`) into a run just built; what trains on from there.

    Raises ValueError where the state is of another model or precision mode.
    """
    built.task.load_state_dict(kept["task"])
    return resume_from(built, kept)


def resume_from(built, kept: dict) -> Steps:
    """Batches and random states of a kept state; the task's own state is already in place."""
    if kept["batch"] is not None:
        built.task.data = KeptBatch(built.task.data, kept["step"], kept["batch"], built.device)
    random = kept["random"]
    if built.device.type == "cuda" and "cuda" not in random:
        random = random | {"cuda": torch.cuda.get_rng_state(built.device)}
    restore_random_states(random, built.device)
    return Steps(built, kept["step"], kept["skipped"])


def same_loss(a: float, b: float) -> bool:
    """Bit-equal, all NaN counting as one value."""
    return a == b or (math.isnan(a) and math.isnan(b))


@dataclass(frozen=True, slots=True)
class _Candidate:
    """What the host knows of a copy that the device may or may not have made."""

    step: int
    random: dict
    form: TreeSpec
    paths: list[tuple]
    fresh: dict[tuple, object]


class Snapshot:
    """A copy, on their device, of all tensors that the next step depends on; memory is reused."""

    def __init__(self, task, device: torch.device):
        self.task, self.device = task, device
        self.step: int | None = None
        self.skipped = 0
        self._state: dict = {}
        self._random: dict = {}
        self._candidate: _Candidate | None = None

    @property
    def bytes(self) -> int:
        """What the copy holds."""
        return size_of(self._state)

    @torch.no_grad()
    def take(self, step: int, skipped: int) -> None:
        """Remember the state after `step` steps, `skipped` of them without an update."""
        new, form = tree_flatten(self.task.state_dict())
        old, old_form = tree_flatten(self._state)
        fits = form == old_form and all(map(_alike, old, new))
        if fits:
            for target, source in zip(old, new, strict=True):
                if isinstance(target, Tensor):
                    target.copy_(source)
        else:
            old, self._state = [], {}  # freed before the new copy takes memory
            self._state = form.unflatten([_cloned(leaf) for leaf in new])
        self._random = random_states(self.device)
        self.step, self.skipped = step, skipped

    @torch.no_grad()
    def take_if(self, chosen: Tensor, step: int) -> None:
        """Replace the copy by the state after `step` steps where `chosen` (bool, 0-dim) is true.

        The device decides and the host waits for nothing; `settle` has to be told what `chosen`
        was before anything else is asked of this copy. Takes no memory but for what has another
        form than before (the carried state of a language model, once) or lies on the host.
        """
        old = dict(tree_flatten_with_path(self._state)[0])
        new, form = tree_flatten_with_path(self.task.state_dict())
        fresh = {}
        for path, source in new:
            target = old.get(path)
            on_device = isinstance(source, Tensor) and source.device == chosen.device
            if on_device and isinstance(target, Tensor) and _alike(target, source):
                torch.where(chosen, source, target, out=target)
            else:
                fresh[path] = _cloned(source)
        random = random_states(self.device)
        self._candidate = _Candidate(step, random, form, [path for path, _ in new], fresh)

    def settle(self, chosen: bool, skipped: int) -> None:
        """What became of the last `take_if`; `skipped`: its steps without an update."""
        candidate, self._candidate = self._candidate, None
        if candidate is None or not chosen:
            return
        leaves = dict(tree_flatten_with_path(self._state)[0]) | candidate.fresh
        self._state = candidate.form.unflatten([leaves[path] for path in candidate.paths])
        self._random = candidate.random
        self.step, self.skipped = candidate.step, skipped

    def restore(self) -> None:
        """Put the task and the random generators back to where they were."""
        self.task.load_state_dict(self._state)
        restore_random_states(self._random, self.device)

    def content(self) -> dict:
        """In the form of a checkpoint; its tensors are those that the next `take` overwrites."""
        return {
            "task": self._state,
            "step": self.step,
            "skipped": self.skipped,
            "random": self._random,
        }


def size_of(state: dict) -> int:
    """Bytes of all tensors in a nested state."""
    return sum(leaf.nbytes for leaf in tree_flatten(state)[0] if isinstance(leaf, Tensor))


def _alike(old, new) -> bool:
    if isinstance(old, Tensor) and isinstance(new, Tensor):
        return (old.shape, old.dtype, old.device) == (new.shape, new.dtype, new.device)
    return type(old) is type(new) and old == new


def _cloned(leaf):
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf
