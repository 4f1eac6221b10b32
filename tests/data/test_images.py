"""Digits and their synthetic twin: purity, coverage, values."""

import hashlib
import math

import pytest
import torch

from mprun.data import DataError, image_store, permutation
from mprun.data.image_store import load_digits

from ..helpers import configured


def digits(**changes):
    own = {"image_size": 8, "channels": 1, "value_range": "tanh"}
    own |= {"batch_size": 100, "seed": 0, "device": "cpu"}
    return configured("digits", **own | changes)


def synthetic(batch_size=10, **changes):
    sizes = {"num_classes": 7, "image_size": 8, "train_size": 64, "eval_size": 24}
    given = {"batch_size": batch_size, "seed": 0, "device": "cpu"} | changes
    return configured("synthetic_images", **sizes, **given)


def stored_bytes(images):
    """The 0 ... 16 pixel values again, from a tanh batch at 8 px; exact, both are dyadic."""
    return ((images + 1) * 8).to(torch.uint8)


def samples(images, labels):
    """Each image as bytes with its label, sorted."""
    return sorted(
        (bytes(i.flatten().tolist()), int(k)) for i, k in zip(images, labels, strict=True)
    )


def shown(batches):
    images, labels = map(torch.cat, zip(*batches, strict=True))
    return samples(stored_bytes(images), labels)


def test_an_epoch_shows_every_training_digit_once_and_evaluation_the_rest_once():
    """With their labels. Equal as multisets: so both splits are disjoint and nothing is lost."""
    source = digits(batch_size=479)
    assert source.batches_per_epoch == 3
    train, again = (shown([source.train_batch(i + k) for k in range(3)]) for i in (0, 3))
    assert train == again
    batches = list(digits().eval_batches())
    assert [len(images) for images, _ in batches] == [100, 100, 100, 60]
    held_out = shown(batches)
    assert (len(train), len(held_out)) == (1437, 360)
    assert sorted(train + held_out) == samples(*load_digits())


def test_shapes_dtypes_and_channels():
    source = digits(batch_size=3, image_size=32, channels=3)
    images, labels = source.train_batch(0)
    assert (images.shape, images.dtype) == ((3, 3, 32, 32), torch.float32)
    assert (labels.shape, labels.dtype) == ((3,), torch.int64)
    assert torch.equal(images[:, 0], images[:, 1]) and torch.equal(images[:, 0], images[:, 2])
    assert images.is_contiguous() and (source.samples_per_batch, source.num_classes) == (3, 10)


def test_enlarging_is_bilinear():
    small, _ = digits(batch_size=4, image_size=8).train_batch(0)
    large, _ = digits(batch_size=4, image_size=16).train_batch(0)
    # Twice the size, half-pixel centres: an inner output lies 1/4 towards the next pixel.
    a, b = small[..., 3, 3], small[..., 3, 4]
    c, d = small[..., 4, 3], small[..., 4, 4]
    expected = (9 * a + 3 * b + 3 * c + d) / 16
    # Values are multiples of 1/8, so sixteenths of them are exact in FP32.
    assert torch.equal(large[..., 7, 7], expected)


@pytest.mark.parametrize(
    ("value_range", "mean", "spread", "unit"),
    [
        ("tanh", None, 2, 1),
        ("standardised", 0, None, 1),
        ("mean_subtracted", 0, 255, 255),  # 0 ... 16 as 0 ... 255
    ],
)
def test_values_of_every_range(value_range, mean, spread, unit):
    """91,968 values, each rounded twice by 2^-24 of a unit; their mean is off by less."""
    images = digits(batch_size=1437, value_range=value_range).train_batch(0)[0].double()
    if mean is not None:
        assert abs(images.mean().item() - mean) < 1e-6 * unit
    if spread is not None:
        assert (images.max() - images.min()).item() == pytest.approx(spread, rel=2**-22)
    if value_range == "standardised":
        assert abs(images.std(correction=0).item() - 1) < 1e-6
    if value_range == "tanh":
        assert (images.min(), images.max()) == (-1, 1)


def test_hash_is_of_the_raw_content():
    train, held_out = digits(batch_size=1437), digits(batch_size=360)
    # Undo the run's order to get the stored one.
    back = torch.argsort(permutation(0, 0, 1437))
    stored = [part[back] for part in train.train_batch(0)]
    digest = hashlib.sha256()
    for images, labels in (stored, *held_out.eval_batches()):
        digest.update(stored_bytes(images).numpy().tobytes() + labels.numpy().tobytes())
    assert train.sha256 == held_out.sha256 == digest.hexdigest()
    assert synthetic().sha256 != synthetic(channels=1).sha256


def test_synthetic_content():
    source = synthetic(batch_size=64, value_range="tanh")
    images, labels = source.train_batch(0)
    assert images.shape == (64, 3, 8, 8)
    assert set(labels.tolist()) <= set(range(7))
    bytes_ = (images * 127.5 + 127.5).round()
    # Uniform on 0 ... 255: mean 127.5, standard deviation 73.9, 12,288 values, five errors.
    assert abs(bytes_.mean().item() - 127.5) < 5 * 73.9 / math.sqrt(12_288)
    assert sum(len(labels) for _, labels in source.eval_batches()) == 24


def test_the_file_holds_what_runs_have_recorded_and_scikit_learn_distributes():
    recorded = "0a0dc3d18fe2ef0f2012b63efe6ee98027843286fd97baa764154ba946b78070"
    assert digits().sha256 == digits(image_size=32, channels=3, seed=5).sha256 == recorded
    images, labels = load_digits()
    assert (images.shape, images.dtype) == ((1797, 1, 8, 8), torch.uint8)
    assert (images.min(), images.max(), labels.dtype) == (0, 16, torch.int64)
    theirs = pytest.importorskip("sklearn.datasets").load_digits()
    assert (images[:, 0].numpy() == theirs.images).all()
    assert (labels.numpy() == theirs.target).all()


@pytest.mark.parametrize("content", [None, b"", b"no archive", "cut"])
def test_a_missing_or_damaged_file_is_said(monkeypatch, tmp_path, content):
    path = tmp_path / "digits.npz"
    if content is not None:
        whole = image_store._DIGITS.read_bytes()
        path.write_bytes(whole[: len(whole) // 2] if content == "cut" else content)
    monkeypatch.setattr(image_store, "_DIGITS", path)
    with pytest.raises(DataError, match=f"{path}: the digits cannot be read"):
        digits()
