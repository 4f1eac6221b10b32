"""Tensors without values: their mode, a step's batches, and the memory that they stand for."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mprun.assembly.data import build_data, check_batches, own_source
from mprun.config import schema
from mprun.config.registry import kind_of, task_of
from mprun.data.source import Source
from mprun.data.token_streams import padded
from mprun.entry_points import loaded
from mprun.errors import BadInput
from mprun.torch_private import FakeTensorMode, storage_key

NO_END = 1 << 40


def weightless() -> FakeTensorMode:
    """Make a mode in which every new tensor has no values.

    An operator that needs values is an error: its fallback would compute with tensors of full size.
    """
    mode = _Weightless(allow_fallback_kernels=False)
    # A dictionary with the one method that the converter calls on its memo.
    mode.fake_tensor_converter.meta_converter.tensor_memo = _Newest()  # type: ignore[assignment]
    return mode


class _Weightless(FakeTensorMode):
    def __deepcopy__(self, memo):
        # A copied module stays in the same mode (torch.nn.TransformerEncoder copies its layers).
        return self


class _Newest(dict):
    """A memo of the newest entry, which alone is ever looked up.

    The usual one has weak references to all tensors, so no parameter could change its dtype
    (torch.utils.swap_tensors).
    """

    def __setitem__(self, key, value):
        self.clear()
        super().__setitem__(key, value)


# Sizes that a source may know from its content.
_SIZES = ("num_classes", "num_symbols", "vocab_size", "source_vocab_size", "target_vocab_size")


class ShapeSource(Source):
    """A source whose batches have only shapes and dtypes; there is nothing to evaluate."""

    sha256 = "shapes only"
    batches_per_epoch = NO_END

    def __init__(self, first: torch.Size, second: torch.Size, images: bool, **about: int):
        """Set the shapes. images: the first tensor has images; a 3-dim second one has boxes."""
        self.first, self.second, self.images = first, second, images
        self.samples_per_batch = second.numel() if not images else first[0]
        for size in _SIZES:
            setattr(self, size, about.get(size, 0))
        self.description = {"name": "shapes", "train_samples": 0, "eval_samples": 0, **about}

    def train_batch(self, index: int) -> tuple[Tensor, Tensor]:
        """Return a batch without values.

        Images: float32 [batch, channels, height, width] with int64 labels [batch], or with float32
        boxes [batch, most, 6]; spectrograms with targets [batch, any]. Tokens and targets: int64
        [time, batch]; sentences: int64 [batch, words].
        """
        first = torch.float32 if self.images else torch.int64
        boxes = self.images and len(self.second) == 3
        second = torch.float32 if boxes else torch.int64
        return torch.empty(self.first, dtype=first), torch.empty(self.second, dtype=second)

    def eval_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(())


def shape_source(config: schema.RunConfig) -> ShapeSource:
    """Return the shapes of a configuration's training batches without reading a file.

    data=custom gives one batch, on the CPU. BadInput if only files determine a size.
    """
    data: Any = config.data
    about = data.component
    if about.own:
        return _of_own_data(config, data)
    if about.family == "sentence_pairs":
        shape = torch.Size((data.batch_size, data.max_length))
        words = _words(config, data, "source_vocab_size", "target_vocab_size")
        return ShapeSource(shape, shape, False, **words)
    if about.shapes:
        first, second, facts = loaded(about.shapes)(data)
        return ShapeSource(torch.Size(first), torch.Size(second), True, **facts)
    if about.family == "text":
        shape, length = torch.Size((data.sequence_length, data.batch_size)), data.sequence_length
        words = _words(config, data, "vocab_size")
        return ShapeSource(shape, shape, False, sequence_length=length, **words)
    size, channels = data.image_size, data.channels
    shape = torch.Size((data.batch_size, channels, size, size))
    sizes = {"num_classes": _classes(config), "channels": channels, "image_size": size}
    boxes = about.family == "boxes"
    second = torch.Size((data.batch_size, about.most_boxes, 6)) if boxes else shape[:1]
    return ShapeSource(shape, second, True, **sizes)


def _of_own_data(config: schema.RunConfig, data: Any) -> ShapeSource:
    device = torch.device("cpu")
    try:
        source = own_source(data, config.seed, device)
    except ValueError as error:
        raise BadInput(f"data.factory={data.factory}: {error}") from error
    check_batches(data, task_of(config.model), source, device)
    if source.batches_per_epoch < 1:
        raise BadInput(
            f"data.batch_size={data.batch_size}: is too large, the data have no full batch"
        )
    first, second = source.train_batch(0)
    kept = ("channels", "image_size", "frequencies")
    about: dict[str, Any] = {k: v for k, v in source.description.items() if k in kept}
    sizes = {key: getattr(source, key, None) for key in _SIZES}
    about |= {key: size for key, size in sizes.items() if isinstance(size, int)}
    return ShapeSource(first.shape, second.shape, first.is_floating_point(), **about)


def _classes(config: schema.RunConfig) -> int:
    data: Any = config.data
    known: int | None = data.component.num_classes or getattr(data, "num_classes", None)
    if known is not None or "num_classes" not in kind_of(config.model).sizes:
        return known or 0
    classes = getattr(config.model, "num_classes", None)
    if classes is None:
        raise BadInput(
            f"model.num_classes=null: only the files of data={data.name} tell the number of "
            "classes, and bench --roofline reads no files; set model.num_classes=N"
        )
    return classes


def _words(config: schema.RunConfig, data: Any, *names: str) -> dict[str, int]:
    """Return the number of words by the name of their size, padding included."""
    multiple = getattr(data, "vocab_multiple", 1)
    if hasattr(data, "vocab_size"):
        return {"vocab_size": padded(data.vocab_size, multiple)}
    if not data.component.on_disk:
        short = {"sequence_length": 1} if hasattr(data, "sequence_length") else {}
        few = dataclasses.replace(data, batch_size=1, **short)
        source = build_data(few, config.seed, torch.device("cpu"))
        return {name: getattr(source, name) for name in names}
    found = {}
    for name in names:
        limit = f"{name.removesuffix('size')}limit"
        words = getattr(data, limit) or getattr(config.model, name, None)
        if words is None:
            raise BadInput(
                f"model.{name}=null: only the files of data={data.name} tell the number of words, "
                f"and bench --roofline reads no files; set model.{name}=N or data.{limit}=N"
            )
        found[name] = padded(words, multiple)
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes by kind, without workspaces, temporary results and the allocator's fragments."""

    # parameters, optimizer: as held between steps; parameters with buffers and averages.
    parameters: int
    copies: int  # of weights in 16 bits, from the forward pass to the backward pass
    optimizer: int
    gradients: int  # all `.grad` at once, without those of single rows of a table
    activations: int  # the most that is kept for a backward pass at one time, inputs included

    @property
    def of_weights(self) -> int:
        """Bytes that depend only on the number of weights."""
        return self.parameters + self.copies + self.optimizer + self.gradients

    @property
    def total(self) -> int:
        return self.of_weights + self.activations


class SavedTensors:
    """A counter of what autograd saves while `watching`, except `known` tensors.

    passing: others that are known as long as they live.
    peak: most bytes at one time. Views of one storage count once.
    """

    def __init__(
        self, known: Iterable[Tensor], passing: Callable[[], Iterable[Tensor]] = lambda: ()
    ):
        self.peak = self._now = 0
        self._known = {storage_key(tensor): tensor for tensor in known}
        self._passing = passing
        self._uses: Counter[int] = Counter()

    @contextmanager
    def watching(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: _Kept(tensor, self), lambda kept: kept.tensor
        ):
            yield

    def is_known(self, tensor: Tensor) -> bool:
        """Return whether a tensor is there anyway."""
        key = storage_key(tensor)
        return key in self._known or key in map(storage_key, self._passing())

    def hold(self, tensor: Tensor, places: int) -> None:
        """Count one place of the graph that holds `tensor` more, or one less (-1)."""
        key = storage_key(tensor)
        before = self._uses[key]
        self._uses[key] += places
        if before == 0 or self._uses[key] == 0:
            self._now += places * tensor.untyped_storage().nbytes()
            self.peak = max(self.peak, self._now)


class _Kept:
    """A saved tensor; it frees its bytes when the graph releases it."""

    def __init__(self, tensor: Tensor, saved: SavedTensors):
        self.tensor, self._saved = tensor, None if saved.is_known(tensor) else saved
        if self._saved is not None:
            saved.hold(tensor, 1)

    def __del__(self):
        if self._saved is not None:
            self._saved.hold(self.tensor, -1)


def held_bytes(learners) -> dict[str, int]:
    """Return parameters, copies, optimizer and gradients of a task's learners, in bytes."""
    held = dict.fromkeys(("parameters", "copies", "optimizer", "gradients"), 0)
    for learner in learners:
        model, averages = learner.model, learner.averages.values()
        parameters = list(model.parameters())
        state = [v for own in learner.steps.state_by_name().values() for v in own.values()]
        held["parameters"] += _distinct([*parameters, *model.buffers(), *averages])
        held["copies"] += sum(
            own.numel() * dtype.itemsize
            for own, dtype in learner.steps.computed()
            if dtype is not own.dtype
        )
        held["optimizer"] += _distinct(value for value in state if isinstance(value, Tensor))
        held["gradients"] += sum(
            own.numel() * (own.grad_dtype or own.dtype).itemsize
            for own in parameters
            if own.requires_grad and own.grad is not None
        )
    return held


def _distinct(tensors: Iterable[Tensor]) -> int:
    return sum({id(tensor): tensor.nbytes for tensor in tensors}.values())
