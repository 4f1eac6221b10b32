"""Images with boxes on disk: their files, their objects, the changes of training.

`annotations` finds them; `canvases` describes a batch.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mprun.data.augmentation import CAFFE_MEAN, ImageForm, imagenet_constants, normalise
from mprun.data.image_files import ImageSplit, image_table, size_of
from mprun.data.image_folder import decode_rgb
from mprun.data.loader import LoadedSource
from mprun.data.source import (
    DamagedData,
    ReadBatch,
    Reader,
    Serving,
    kept_random_state,
    seed_sample,
)
from mprun.extensions.detection.boxes import CLASS, DIFFICULT
from mprun.extensions.detection.canvases import FIELDS, NOTHING

_STREAM = 2  # separates the draws of augmentation from others of (seed, epoch)


class Objects(NamedTuple):
    """The objects of an image, float32 ``[n, 6]`` as a target, and its width and height, pixels."""

    size: tuple[int, int]
    rows: np.ndarray


class BoxSplit:
    """Images below `root`, by their names there, and their objects; holds no open file.

    `difficult`: keep objects that are marked. Objects lie one behind the other, because the image
    with most of them has many times those of another.
    """

    def __init__(
        self, root: str, names: Sequence[str], found: Sequence[Objects], difficult: bool
    ) -> None:
        rows = [(os.fsencode(name), size_of(os.path.join(root, name)), 0) for name in names]
        self.images = ImageSplit(root, image_table(rows), ())
        self.sizes = np.array([own.size for own in found], np.int64)
        kept = [own.rows if difficult else own.rows[own.rows[:, DIFFICULT] == 0] for own in found]
        self.rows = np.concatenate(kept)
        self.starts = np.cumsum([0, *map(len, kept)])
        self.most = int(np.diff(self.starts).max())

    def target(self, place: int) -> np.ndarray:
        """Return the objects of an image, float32 ``[most, 6]``."""
        rows = self.rows[self.starts[place] : self.starts[place + 1]]
        target = np.zeros((self.most, FIELDS), np.float32)
        target[:, CLASS] = NOTHING
        target[: len(rows)] = rows
        return target

    def add_to(self, digest: Any) -> None:
        """Add names, sizes and objects to a hash, as in the records of earlier versions."""
        for row in self.images.table:  # they ended in the image's place in an archive
            digest.update(row.tobytes() + bytes(8))
        digest.update(self.sizes.tobytes())
        for place in range(len(self.images)):
            digest.update(self.target(place).tobytes())

    def image(self, place: int) -> Any:
        """Decode the image at a place; its size must be that of its annotation."""
        image = decode_rgb(self.images.read(place), self.images.name(place))
        said = tuple(self.sizes[place].tolist())
        if image.size != said:
            raise DamagedData(
                f"{self.images.name(place)}: has {image.size[0]} x {image.size[1]} pixels, but "
                f"its annotation says {said[0]} x {said[1]}"
            )
        return image


def first_repeated(values: Sequence[Any]) -> list[Any]:
    """Return the first of the values that stands there twice, in a list; an empty one if none."""
    counts = Counter(values)
    return [value for value in values if counts[value] > 1][:1]


class BoxReader(Reader):
    """Batches of images uint8 ``[batch, size, size, 3]`` and targets float32 ``[batch, most, 6]``.

    With a ``seed`` half of them are mirrored. Before that ``augmentation`` "ssd" applies SSD's
    changes (section 3.6 of arXiv 1512.02325, by torchvision's transforms of that name): colours, an
    image of up to four times the side around it, a crop with a least overlap. For the sample at
    place p of an epoch all this depends on (seed, epoch, p) alone. Objects that the crop removes
    are left out.
    """

    def __init__(
        self, image_size: int, augmentation: str, batch_size: int, split: BoxSplit, seed: int | None
    ):
        super().__init__(len(split.images), split.images.source, batch_size, seed)
        self.split, self.image_size, self.seed = split, image_size, seed
        self.augmentation = augmentation

    def read(self, number: int) -> ReadBatch:
        places = self.places(number)
        size = self.image_size
        images = torch.empty((len(places), size, size, 3), dtype=torch.uint8)
        targets = torch.from_numpy(np.stack([self.split.target(place) for place in places]))
        with kept_random_state():
            for row, place in enumerate(places):
                image = self.split.image(place)
                if self.seed is not None:
                    epoch, batch = divmod(number, len(self))
                    seed_sample(self.seed, epoch, batch * self.batch_size + row, _STREAM)
                    images[row], targets[row] = self._augmented(image, targets[row])
                else:
                    resized = image.resize((size, size), 2)  # bilinear
                    images[row] = torch.from_numpy(np.array(resized))
        return ReadBatch(images, targets, {})

    def _augmented(self, image: Any, target: Tensor) -> tuple[Tensor, Tensor]:
        from torchvision import tv_tensors
        from torchvision.transforms import v2

        width, height = image.size
        sides = torch.tensor([width, height, width, height])
        own = target[target[:, CLASS] >= 0]
        boxes: Any = tv_tensors.BoundingBoxes(
            own[:, :CLASS] * sides, format="XYXY", canvas_size=(height, width)
        )
        changes = [v2.RandomHorizontalFlip(), v2.Resize((self.image_size,) * 2, antialias=True)]
        if self.augmentation == "ssd":
            fill = {tv_tensors.Image: tuple(round(mean) for mean in CAFFE_MEAN), "others": 0}
            labels_kept = v2.SanitizeBoundingBoxes(labels_getter=lambda sample: sample[2])
            zoom = v2.RandomZoomOut(fill=fill)
            changes[:0] = [v2.RandomPhotometricDistort(), zoom, v2.RandomIoUCrop(), labels_kept]
        pixels = tv_tensors.Image(torch.from_numpy(np.array(image)).permute(2, 0, 1))
        pixels, boxes, named = v2.Compose(changes)(pixels, boxes, own[:, CLASS:])
        left = torch.zeros_like(target)
        left[:, CLASS] = NOTHING
        left[: len(boxes), :CLASS] = (boxes.as_subclass(Tensor) / self.image_size).clamp(0, 1)
        left[: len(boxes), CLASS:] = named
        return pixels.as_subclass(Tensor).permute(1, 2, 0), left


class BoxedImages(LoadedSource):
    """Images with boxes for training, and others held out, normalised as their form says.

    ``augmentation`` is as in ``BoxReader``. ``sha256`` is over names, sizes of files and objects.
    ``about`` is added to the description.
    """

    def __init__(
        self,
        train: BoxSplit,
        held_out: BoxSplit,
        num_classes: int,
        about: Mapping[str, Any],
        augmentation: str,
        form: ImageForm,
        serving: Serving,
    ) -> None:
        constants = imagenet_constants(form.value_range, form.channels, serving.device)
        self._offset, self._divisor = constants
        reader = partial(BoxReader, form.image_size, augmentation, serving.batch_size)
        super().__init__(reader(train, serving.seed), reader(held_out, None), serving)
        self.num_classes = num_classes
        digest = hashlib.sha256()
        for split in (train, held_out):
            split.add_to(digest)
        self.sha256 = digest.hexdigest()
        self.description = {
            "train_samples": len(train.images),
            "eval_samples": len(held_out.images),
            "num_classes": num_classes,
            **asdict(form),
            "augmentation": augmentation,
            "most_boxes": max(train.most, held_out.most),
            "sha256_of": "names, sizes and objects",
            **about,
        }

    def _float(self, images: Tensor) -> Tensor:
        return normalise(images, self._offset, self._divisor)
