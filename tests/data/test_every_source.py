"""Every source of batches keeps the rules of order, randomness, evaluation, record, refusals."""

import random
from functools import partial

import numpy as np
import pytest
import torch

from mprun.data import DatasetSource, TokenSource

from ..helpers import assert_same_bits, configured, raises_line
from ..tables import with_extensions
from . import (
    test_cifar10,
    test_image_folder,
    test_own_sources,
    test_own_streams,
    test_text_source,
    test_token_files,
)
from .made_images import cifar10_folders, make_folder

TOKENS = {"sequence_length": 6, "batch_size": 3, "device": "cpu"}
IMAGES = {"batch_size": 5, "device": "cpu"}
FEW = {"num_classes": 7, "image_size": 8, "train_size": 64, "eval_size": 24, **IMAGES}
LITTLE = {"vocab_size": 50, "train_tokens": 1000, "eval_tokens": 100, **TOKENS}
NUMBERS = {"vocab_size": 90, **TOKENS}


def of_items(kind):
    """What makes the source of a class of data set."""
    return lambda **more: DatasetSource(kind(), kind(7), **IMAGES | {"num_classes": 5} | more)


# Of a folder: what makes the source with these options, seed and batch_size among them.
SOURCES = {
    "digits": lambda _: partial(configured, "digits", image_size=8, **IMAGES),
    "synthetic images": lambda _: partial(configured, "synthetic_images", **FEW),
    "characters": lambda _: partial(configured, "docs_text", level="char", **TOKENS),
    "words": lambda _: partial(configured, "docs_text", level="word", **TOKENS),
    "synthetic tokens": lambda _: partial(configured, "synthetic_tokens", **LITTLE),
    "tokens": lambda _: partial(TokenSource, torch.arange(90), torch.arange(50), **NUMBERS),
    "data set": lambda _: of_items(test_own_sources.Noisy),
    "stream": lambda _: of_items(test_own_streams.Stream),
    "image folder": lambda root: partial(test_image_folder.source, make_folder(root)),
    "cifar10": lambda root: partial(
        test_cifar10.cifar10, cifar10_folders(root), augmentation="padded_crop", flip=True
    ),
    "text": lambda root: partial(test_text_source.source, test_text_source.made(root)),
    "token files": lambda root: partial(test_token_files.source, test_token_files.made(root)),
}
SOURCES = with_extensions("SOURCES", SOURCES, "sources")
LOADED = [own for own in ("data set", "stream", "image folder", "voc", "speech") if own in SOURCES]


def random_states():
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()


@pytest.fixture(params=SOURCES)
def make(request, tmp_path, cache):
    (tmp_path / "data").mkdir()
    return SOURCES[request.param](tmp_path / "data")


def test_what_every_source_holds_to(make):
    """Batches of seed and number alone, one evaluation, plain records, refusals in one line."""
    before = random_states()
    source = make(seed=1)
    numbers = [0, 3 * source.batches_per_epoch + 1, source.batches_per_epoch, 1]
    batches = [[part.clone() for part in source.train_batch(number)] for number in numbers]
    held_out = [[part.clone() for part in batch] for batch in source.eval_batches()]
    assert_same_bits(random_states(), before)
    torch.manual_seed(99), np.random.seed(99), random.seed(99)
    again, other = make(seed=1), make(seed=2)
    for number, batch in reversed([*zip(numbers, batches, strict=True)]):
        assert_same_bits([*again.train_batch(number)], batch)
    for own in (again, other):
        assert_same_bits([[*batch] for batch in own.eval_batches()], held_out)
    assert source.sha256 == again.sha256 == other.sha256

    def differ(one, two):
        return any(a.shape != b.shape or not a.equal(b) for a, b in zip(one, two, strict=True))

    assert differ(batches[0], batches[2])  # another epoch
    assert differ(batches[0], other.train_batch(0))
    about = source.description
    assert all(type(value) in (str, int, float, bool) for value in about.values())
    assert about["train_samples"] > 0 and about["eval_samples"] > 0 and source.samples_per_batch > 0
    with raises_line(ValueError, "index=-1"):
        source.train_batch(-1)
    for name, value in (("seed", -1), ("batch_size", 0), ("batch_size", 10**6)):
        with raises_line(ValueError, f"{name}={value}"):
            make(**{"seed": 0, name: value})


@pytest.mark.slow
@pytest.mark.parametrize("make", LOADED, indirect=True)
def test_any_number_of_loader_processes_gives_the_same(make):
    found = []
    for workers in (0, 1, 2):
        source = make(seed=3, workers=workers)
        # On into the next epoch, ahead, and back.
        numbers = (*range(source.batches_per_epoch + 2), 9, 10, 2, 3)
        found.append([*map(source.train_batch, numbers), *source.eval_batches()])
        source.close()
    assert_same_bits(found[1], found[0])
    assert_same_bits(found[2], found[0])
