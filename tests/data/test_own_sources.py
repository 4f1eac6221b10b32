"""DatasetSource and TokenSource: the user's data in the order and with the chances of mprun."""

import hashlib
import random
import struct

import numpy as np
import pytest
import torch

from mprun.data import DatasetSource, TokenSource, permutation
from mprun.data.source import DamagedData, DataError


class Noisy(torch.utils.data.Dataset):
    """Image i is filled with i plus a number from each global generator."""

    def __init__(self, count=20, size=4):
        self.count, self.size = count, size

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        chance = random.random() + np.random.rand() + float(torch.rand(()))
        return torch.full((2, self.size, self.size), index + chance / 4), index % 5


class Bytes(Noisy):
    """Image i holds the bytes 10 i and 10 i + 1 in its two channels."""

    def __getitem__(self, index):
        image = torch.tensor([10 * index, 10 * index + 1], dtype=torch.uint8)
        return image[:, None, None].expand(2, self.size, self.size + 1), np.int64(index % 5)


class Broken(Bytes):
    """Returns `items[index]` in place of the item, or raises it."""

    def __init__(self, items):
        super().__init__()
        self.items = items

    def __getitem__(self, index):
        item = self.items.get(index, super().__getitem__(index))
        if isinstance(item, Exception):
            raise item
        return item


def source(train, held_out=None, **changes):
    own = {"batch_size": 6, "seed": 3, "device": "cpu", "num_classes": 5} | changes
    return DatasetSource(train, Noisy(7) if held_out is None else held_out, **own)


def test_the_order_is_that_of_seed_and_epoch():
    noisy = source(Noisy())
    assert (noisy.batches_per_epoch, noisy.samples_per_batch, noisy.num_classes) == (3, 6, 5)
    for epoch in (0, 1, 4):
        batches = [noisy.train_batch(3 * epoch + number) for number in range(3)]
        # A number in [0, 3/4) was added.
        seen = torch.cat([images[:, 0, 0, 0] for images, _ in batches]).floor().long()
        assert torch.equal(seen, permutation(3, epoch, 20)[:18])
        assert torch.equal(torch.cat([labels for _, labels in batches]), seen % 5)


def test_held_out_items_come_in_their_order_the_same_for_every_seed():
    one, other = (list(source(Noisy(), seed=seed).eval_batches()) for seed in (3, 4))
    assert [len(images) for images, _ in one] == [6, 1]
    seen = torch.cat([images[:, 0, 0, 0] for images, _ in one])
    assert seen.floor().tolist() == list(range(7)) and not torch.equal(seen, seen.floor())
    assert source([(GOOD, 1)], Bytes(), batch_size=1).train_batch(2)[1].tolist() == [1]
    assert all(torch.equal(a[0], b[0]) for a, b in zip(one, other, strict=True))


def test_what_an_item_draws_depends_on_seed_epoch_and_index_alone():
    straight, jumping, other = source(Noisy()), source(Noisy()), source(Noisy(), seed=4)
    batches = [straight.train_batch(number) for number in range(6)]
    torch.manual_seed(1)
    random.seed(2)
    for number in (5, 0, 3):
        assert torch.equal(jumping.train_batch(number)[0], batches[number][0])
    drawn = {}
    for epoch, found in {0: batches[:3], 1: batches[3:]}.items():
        for images, _ in found:
            for value in images[:, 0, 0, 0].tolist():
                drawn.setdefault(int(value), {})[epoch] = value
    both = [values for values in drawn.values() if len(values) == 2]
    # The two epochs share at least 16 of the 20 images, each with a draw of its own.
    assert len(both) >= 16 and all(values[0] != values[1] for values in both)
    # So has each image of an epoch: what was added to its number.
    assert len({round(values[0] % 1, 4) for values in drawn.values() if 0 in values}) == 18
    theirs = torch.cat([other.train_batch(number)[0][:, 0, 0, 0] for number in range(3)])
    assert not set(theirs.tolist()) & {value for values in drawn.values() for value in values}


def test_bytes_become_floats_on_the_device():
    images, labels = next(source(Bytes(), Bytes()).eval_batches())
    assert (images.dtype, images.shape, labels.dtype) == (torch.float32, (6, 2, 4, 5), torch.int64)
    assert images[3].unique().tolist() == torch.tensor([30 / 255, 31 / 255]).tolist()
    images, _ = next(source(Bytes(), Bytes(), offset=[30, 11], divisor=[1, 10]).eval_batches())
    assert images[3].unique().tolist() == [0, 2]


def test_the_record_says_what_the_hash_covers():
    small = source(Noisy())
    assert small.description == {
        **{"name": "Noisy", "train_samples": 20, "eval_samples": 7, "num_classes": 5},
        **{"channels": 2, "image_height": 4, "image_width": 4, "image_size": 4},
        "sha256_covers": "20 of 20 train and 7 of 7 held_out items",
    }
    large = source(Noisy(200))
    assert large.description["sha256_covers"].startswith("64 of 200 train")
    hashes = {one.sha256 for one in (small, large, source(Bytes(), Bytes()), source(Noisy(19)))}
    assert len(hashes) == 4 and all(len(text) == 64 for text in hashes)
    # Nothing that a run may vary.
    assert source(Noisy(), seed=9, batch_size=5, divisor=3.0).sha256 == small.sha256
    own = source(Noisy(), sha256="v2")
    assert (own.sha256, own.description["sha256_covers"]) == ("v2", "as stated by the factory")


GOOD = torch.zeros(2, 4, 5, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("item", "wanted"),
    [
        (KeyError("x"), r"train\[11\]: KeyError: 'x' \(test_own_sources.py, line \d+\)"),
        (GOOD, r"train\[11\]: is a Tensor, must be \(image, label\)"),
        ((GOOD, 1, 2), r"train\[11\]: is a tuple, must be \(image, label\)"),
        ((GOOD.numpy(), 1), r"train\[11\]: image is ndarray, must be a tensor"),
        ((GOOD[0], 1), r"train\[11\]: image is \[4, 5\], must be a tensor"),
        ((GOOD.long(), 1), r"train\[11\]: image has dtype torch.int64"),
        ((GOOD.float(), 1), r"train\[11\]: image torch.float32 .*train\[0\] is torch.uint8"),
        ((GOOD[:, :3], 1), r"train\[11\]: image torch.uint8 \[2, 3, 5\], train\[0\]"),
        ((GOOD, 5), r"train\[11\]: label 5, must be from 0 to 4"),
        ((GOOD, -1), r"train\[11\]: label -1"),
        ((GOOD, 1.5), r"train\[11\]: label 1.5, must be an integer"),
    ],
)
def test_an_item_that_cannot_be_used_is_named(item, wanted):
    broken = source(Broken({11: item}), Bytes(), batch_size=20, sha256="given")
    with pytest.raises(DamagedData, match=wanted):
        broken.train_batch(0)


def test_chances_from_elsewhere_are_refused():
    class Entropy(Noisy):
        def __getitem__(self, index):
            return torch.from_numpy(np.random.default_rng().random((1, 2, 2))), 0

    with pytest.raises(DataError, match=r"train\[0\]: a second reading gives another image"):
        source(Entropy())


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"num_classes": 0}, "num_classes=0"),
        ({"divisor": [1, 2, 3]}, "divisor=.* one number or 2"),
        ({"held_out": [1][:0]}, "held_out: no item"),
        ({"held_out": iter([1])}, "held_out=list_iterator is not allowed"),
    ],
)
def test_arguments_out_of_range(changes, wanted):
    held_out = changes.pop("held_out", None)
    with pytest.raises(ValueError, match=wanted):
        source(Noisy(), held_out, **changes)


def tokens(train, held_out, **changes):
    own = {"vocab_size": 50, "batch_size": 2, "sequence_length": 4, "seed": 0, "device": "cpu"}
    return TokenSource(train, held_out, **own | changes)


def test_tokens_are_served_as_streams_whatever_their_integer_type():
    ids = torch.arange(40)
    found = [tokens(ids.to(dtype), ids.to(dtype)) for dtype in (torch.uint8, torch.int64)]
    assert found[0].sha256 == found[1].sha256 != tokens(ids, ids[1:]).sha256
    assert found[0].sha256 != tokens(ids[1:], ids).sha256
    other, bytes_of = ids.flip(0), "<40q"
    content = struct.pack(bytes_of, *ids) + struct.pack(bytes_of, *other)
    assert tokens(ids, other).sha256 == hashlib.sha256(b"40 40" + content).hexdigest()
    assert found[0].vocab_size == found[0].description["vocab_size"] == 50
    inputs, targets = found[0].train_batch(0)
    assert inputs.dtype == torch.int64 and inputs.shape == targets.shape == (4, 2)
    assert torch.equal((inputs + 1) % 40, targets)  # a ring of consecutive numbers
    assert torch.equal(found[0].train_batch(1)[0][0], targets[-1])
    assert found[0].samples_per_batch == 8 and found[0].batches_per_epoch == 5
    assert found[0].description["train_samples"] == 40


@pytest.mark.parametrize(
    ("train", "changes", "wanted"),
    [
        (torch.arange(60), {}, "train_tokens: ids from 0 to 59, must be from 0 to below .*=50"),
        (torch.arange(-1, 40), {}, "train_tokens: ids from -1 to 39"),
        (torch.arange(40.0), {}, "train_tokens: torch.float32 .40., must be a tensor of integers"),
        (torch.arange(40)[None], {}, "one dimension"),
        (list(range(40)), {}, "must be a tensor of integers"),
        (torch.arange(0), {}, "train_tokens: no token"),
        (torch.arange(40), {"vocab_size": 1}, "vocab_size=1 is not allowed: must be 2 or more"),
    ],
)
def test_tokens_that_cannot_be_used(train, changes, wanted):
    with pytest.raises(ValueError, match=wanted):
        tokens(train, torch.arange(40), **changes)


def test_a_network_that_writes_to_its_input_does_not_change_the_data():
    """On a CPU floating images come from the loader, which hands them out again."""
    own = source([(torch.full((1, 4, 4), float(n)), 0) for n in range(8)])
    first = own.train_batch(0)[0]
    before = first.clone()
    first.zero_()
    assert torch.equal(own.train_batch(0)[0], before)
