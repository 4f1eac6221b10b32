"""What a step reads, by shape: batches without values, known from the configuration alone."""

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from mprun.build.data import build_data, check_batches, own_source
from mprun.config import schema
from mprun.config.schema_models import task_of
from mprun.errors import BadInput

_CLASSES = {"digits": 10, "cifar10": 10, "imagenet": 1000}
# Entries of the vocabulary file of the One Billion Word benchmark (Jozefowicz et al., arXiv
# 1602.02410, section 4.1).
_LM1B_WORDS = 793_470
NO_END = 1 << 40


class ShapeSource:
    """A `mprun.data.source.Source` whose batches have shapes and dtypes and no meaning.

    Called inside a FakeTensorMode its batches take no memory, whatever their size. There is nothing
    to evaluate.
    """

    sha256 = "shapes only"
    batches_per_epoch = NO_END

    def __init__(self, first: torch.Size, second: torch.Size, images: bool, **about: int):
        self.first, self.second, self.images = first, second, images
        self.samples_per_batch = second.numel() if not images else first[0]
        self.num_classes = about.get("num_classes", 0)
        self.vocab_size = about.get("vocab_size", 0)
        self.description = {"name": "shapes", "train_samples": 0, "eval_samples": 0, **about}

    def train_batch(self, index: int) -> tuple[Tensor, Tensor]:
        """Images float32 [batch, channels, height, width] and int64 labels [batch], or int64
        tokens and targets [time, batch]."""
        first = torch.float32 if self.images else torch.int64
        return torch.empty(self.first, dtype=first), torch.empty(self.second, dtype=torch.int64)

    def eval_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """None."""
        return iter(())


def shape_source(config: schema.RunConfig) -> ShapeSource:
    """The shapes of the training batches of a configuration; no file is read.

    Except for data=custom, whose factory is called and asked for one batch, on the CPU. BadInput
    where a size is known to the files alone.
    """
    data = config.data
    if isinstance(data, schema.CustomDataConfig):
        return _of_own_data(config, data)
    if hasattr(data, "sequence_length"):
        shape = torch.Size((data.sequence_length, data.batch_size))
        return ShapeSource(shape, shape, False, vocab_size=_vocabulary(config))
    size, channels = data.image_size, data.channels
    return ShapeSource(
        torch.Size((data.batch_size, channels, size, size)),
        torch.Size((data.batch_size,)),
        True,
        num_classes=_classes(config),
        channels=channels,
        image_size=size,
    )


def _of_own_data(config: schema.RunConfig, data: schema.CustomDataConfig) -> ShapeSource:
    device = torch.device("cpu")
    try:
        source = own_source(data, config.seed, device)
    except ValueError as error:
        raise BadInput(f"data.factory={data.factory}: {error}") from error
    check_batches(data, task_of(config.model), source, device)
    if source.batches_per_epoch < 1:
        raise BadInput(f"data.batch_size={data.batch_size}: too large, the data have no full batch")
    first, second = source.train_batch(0)
    about = {
        key: value for key, value in source.description.items() if key in ("channels", "image_size")
    }
    for key in ("num_classes", "vocab_size"):
        if isinstance(getattr(source, key, None), int):
            about[key] = getattr(source, key)
    images = first.is_floating_point()
    return ShapeSource(first.shape, second.shape, images, **about)


def _classes(config: schema.RunConfig) -> int:
    data = config.data
    if data.name in _CLASSES:
        return _CLASSES[data.name]
    if data.name == "synthetic_images":
        return data.num_classes
    if task_of(config.model) != "classification":
        return 0
    classes = getattr(config.model, "num_classes", None)
    if classes is None:
        raise BadInput(
            f"model.num_classes=null: data={data.name} has its classes in files, which a count "
            "does not read; give model.num_classes=N"
        )
    return classes


def _vocabulary(config: schema.RunConfig) -> int:
    data = config.data
    match data:
        case schema.SyntheticTokensConfig():
            return data.vocab_size
        case schema.DocsTextConfig():
            few = dataclasses.replace(data, batch_size=1, sequence_length=1)
            return build_data(few, config.seed, torch.device("cpu")).vocab_size
        case schema.Lm1bConfig():
            words = _LM1B_WORDS
        case schema.TextConfig(vocab_limit=int()):
            words = data.vocab_limit
        case _:
            words = getattr(config.model, "vocab_size", None)
            if words is None:
                raise BadInput(
                    f"model.vocab_size=null: data={data.name} has its words in files, which a "
                    "count does not read; give model.vocab_size=N or data.vocab_limit=N"
                )
    return -(-words // data.vocab_multiple) * data.vocab_multiple
