"""DatasetSource of a user's IterableDataset: its own order, whoever reads which part of it."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from mprun.data import DatasetSource
from mprun.data.source import DamagedData, DataError

from ..helpers import assert_same_bits, raises_line


class Stream(IterableDataset):
    """Item i of epoch e is an image of i + 100 e plus chances below 1, and of label i % 5."""

    def __init__(self, count=20, lengths=None):
        self.count, self.lengths, self.epoch = count, lengths or {}, 0

    def __len__(self):
        return self.count

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for i in range(self.lengths.get(self.epoch, self.count)):
            chance = (random.random() + np.random.rand() + float(torch.rand(()))) / 3
            yield torch.full((2, 4, 4), i + 100 * self.epoch + chance), i % 5


class Divided(Stream):
    """As torch's documentation has it: each loader process yields some of the items."""

    def __iter__(self):
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for i, item in enumerate(super().__iter__()):
            if i % step == first:
                yield item


class Shuffled(Stream):
    """In another order each time, drawn when the iteration begins."""

    def __iter__(self):
        items = list(super().__iter__())
        return iter([items[i] for i in torch.randperm(len(items)).tolist()])


def source(train, **changes):
    own = {"batch_size": 3, "seed": 3, "device": "cpu", "num_classes": 5} | changes
    return DatasetSource(train, own.pop("held_out", Stream(7)), **own)


def places(images):
    return images[:, 0, 0, 0].floor().int().tolist()


def test_each_epoch_is_the_stream_from_its_start():
    stream = source(Stream())
    assert (stream.batches_per_epoch, stream.samples_per_batch) == (6, 3)
    for epoch in range(3):
        batches = [stream.train_batch(6 * epoch + number) for number in range(6)]
        images, labels = map(torch.cat, zip(*batches, strict=True))
        assert places(images) == [i + 100 * epoch for i in range(18)]
        assert labels.tolist() == [i % 5 for i in range(18)]
    assert [places(images) for images, _ in stream.eval_batches()] == [[0, 1, 2], [3, 4, 5], [6]]
    about = stream.description
    assert (about["train_samples"], about["eval_samples"]) == (20, 7)
    assert about["sha256_covers"] == "20 of 20 train and 7 of 7 held_out items"


def test_a_batch_is_the_same_whatever_was_read_before():
    straight, jumping = source(Shuffled()), source(Shuffled())
    batches = [[*straight.train_batch(number)] for number in range(12)]
    for number in (7, 7, 2, 11, 3, 0):  # 7: as after a resume
        torch.manual_seed(number)
        assert_same_bits([*jumping.train_batch(number)], batches[number])
    for epoch in (0, 6):
        seen = sorted(sum((places(i) for i, _ in batches[epoch : epoch + 6]), []))
        assert len(set(seen)) == 18


@pytest.mark.parametrize(
    ("lengths", "told", "at"),
    [
        ({1: 17}, "the stream ended after 17 items in epoch 1; each epoch must have 20 items", 11),
        ({1: 19}, "the stream ended after 19 items in epoch 1", 11),  # within the tail
        ({1: 21}, "the stream has more than 20 items in epoch 1", 11),
        ({0: 10**9}, "the stream has more than 20 items in epoch 0", 5),  # as good as endless
    ],
)
def test_an_epoch_of_another_length(lengths, told, at):
    stream = source(Stream(lengths=lengths))
    for number in range(at):
        stream.train_batch(number)
    with raises_line(DamagedData, f"train: {told}"):
        stream.train_batch(at)


def test_a_held_out_stream_that_is_too_short():
    stream = source(Stream(), held_out=Stream(7, {0: 6}), sha256="known")
    with raises_line(DamagedData, "held_out: the stream ended after 6 items in epoch 0"):
        list(stream.eval_batches())


class Failing(Stream):
    def __iter__(self):
        yield from list(super().__iter__())[:4]
        raise OSError("the shard is gone")


def test_an_error_of_the_stream_names_its_place():
    stream = source(Failing(), sha256="known")
    stream.train_batch(0)
    for _ in range(2):  # the second time from its start
        with raises_line(DamagedData, "train[4]: OSError: the shard is gone"):
            stream.train_batch(1)


class Unsized:
    """Neither of torch's class nor with a length."""

    def __iter__(self):
        return iter(Stream())


class Once(IterableDataset):
    def __init__(self):
        self.items = iter(Stream())

    def __iter__(self):
        return self.items


@pytest.mark.parametrize(
    ("train", "changes", "error", "told"),
    [
        (Unsized(), {}, ValueError, "train_samples=None is not allowed: train is a stream without"),
        (iter(Stream()), {}, ValueError, "train=generator is not allowed"),
        ([(torch.zeros(2, 4, 4), 0)] * 3, {"train_samples": 3}, ValueError, "train_samples=3"),
        (Stream(), {"train_samples": 0}, DataError, "train: no item"),
        (Stream(), {"batch_size": 21}, ValueError, "batch_size=21"),
        (Once(), {"train_samples": 20}, DataError, "train[0]: a second reading gives another"),
    ],
)
def test_what_is_refused(train, changes, error, told):
    with raises_line(error, told):
        source(train, **changes)


def test_any_iterable_whose_length_is_stated():
    assert places(source(Unsized(), train_samples=20).train_batch(1)[0]) == [3, 4, 5]


@pytest.mark.slow
def test_loader_processes_read_the_whole_stream():
    alone, helped = source(Divided()), source(Divided(), workers=2)
    try:
        for number in (0, 1, 2, 3, 4, 5, 6, 7, 2, 3):
            assert_same_bits([*helped.train_batch(number)], [*alone.train_batch(number)])
        assert_same_bits([*map(list, helped.eval_batches())], [*map(list, alone.eval_batches())])
    finally:
        helped.close()
