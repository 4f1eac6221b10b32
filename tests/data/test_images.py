"""Digits and their synthetic twin: purity, coverage, values."""

import hashlib
import math

import numpy as np
import pytest
import torch

from mprun.data import DataError, DigitsImages, SyntheticImages, image_store, permutation
from mprun.data.image_store import load_digits


def digits(seed=0, batch_size=100, image_size=8, channels=1, value_range="tanh"):
    return DigitsImages(
        image_size,
        batch_size=batch_size,
        seed=seed,
        device="cpu",
        channels=channels,
        value_range=value_range,
    )


def synthetic(seed=0, batch_size=10, **kwargs):
    return SyntheticImages(7, 8, 64, 24, batch_size=batch_size, seed=seed, device="cpu", **kwargs)


def stored_bytes(images):
    """The 0 ... 16 pixel values again, from a tanh batch at 8 px; exact, both are dyadic."""
    return ((images + 1) * 8).to(torch.uint8)


def rows(images):
    return [bytes(image.flatten().tolist()) for image in stored_bytes(images)]


@pytest.mark.parametrize("build", [digits, synthetic])
def test_a_batch_depends_on_seed_and_index_only(build):
    source = build(seed=1)
    wanted = {i: source.train_batch(i) for i in (0, 3, 40, 7)}
    torch.manual_seed(99)
    again = build(seed=1)
    for index in (40, 7, 0, 3):
        images, labels = again.train_batch(index)
        assert torch.equal(images, wanted[index][0])
        assert torch.equal(labels, wanted[index][1])


@pytest.mark.parametrize("build", [digits, synthetic])
def test_global_random_state_is_left_alone(build):
    torch.manual_seed(7)
    np.random.seed(7)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    source = build(seed=1)
    source.train_batch(0)
    list(source.eval_batches())
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()


@pytest.mark.parametrize("build", [digits, synthetic])
def test_epochs_and_seeds_differ_in_order(build):
    source, other = build(seed=1), build(seed=2)
    n = source.batches_per_epoch
    assert not torch.equal(source.train_batch(0)[0], source.train_batch(n)[0])
    assert not torch.equal(source.train_batch(0)[0], other.train_batch(0)[0])
    assert source.sha256 == other.sha256
    for (a, b), (c, d) in zip(source.eval_batches(), other.eval_batches(), strict=True):
        assert torch.equal(a, c) and torch.equal(b, d)


def test_an_epoch_shows_every_training_digit_once_and_evaluation_the_rest_once():
    source = digits(batch_size=1437)
    assert source.batches_per_epoch == 1
    train = rows(source.train_batch(0)[0])
    assert sorted(train) == sorted(rows(source.train_batch(1)[0]))
    held_out = [row for images, _ in digits().eval_batches() for row in rows(images)]
    assert (len(train), len(held_out)) == (1437, 360)
    everything = [bytes(image.flatten().tolist()) for image in load_digits()[0]]
    # Equal as multisets: so the two splits are disjoint and nothing is lost.
    assert sorted(train + held_out) == sorted(everything)


def test_labels_stay_with_their_images():
    original = {
        bytes(image.flatten().tolist()): int(label)
        for image, label in zip(*load_digits(), strict=True)
    }
    source = digits()
    batches = [source.train_batch(i) for i in range(source.batches_per_epoch)]
    for images, labels in [*batches, *source.eval_batches()]:
        assert [original[row] for row in rows(images)] == labels.tolist()


def test_within_an_epoch_no_digit_comes_twice():
    source = digits(batch_size=100)
    assert source.batches_per_epoch == 14
    seen = [row for i in range(14) for row in rows(source.train_batch(i)[0])]
    train = rows(digits(batch_size=1437).train_batch(0)[0])
    for row in set(seen):
        assert seen.count(row) <= train.count(row)
    assert len(seen) == 1400


def test_the_last_evaluation_batch_is_partial():
    sizes = [len(labels) for _, labels in digits(batch_size=100).eval_batches()]
    assert sizes == [100, 100, 100, 60]


def test_shapes_dtypes_and_channels():
    source = digits(batch_size=3, image_size=32, channels=3)
    images, labels = source.train_batch(0)
    assert (images.shape, images.dtype) == ((3, 3, 32, 32), torch.float32)
    assert (labels.shape, labels.dtype) == ((3,), torch.int64)
    assert torch.equal(images[:, 0], images[:, 1]) and torch.equal(images[:, 0], images[:, 2])
    assert images.is_contiguous()
    assert source.samples_per_batch == 3
    assert source.num_classes == 10


def test_enlarging_is_bilinear():
    small, _ = digits(batch_size=4, image_size=8).train_batch(0)
    large, _ = digits(batch_size=4, image_size=16).train_batch(0)
    # Twice the size, half-pixel centres: an inner output lies 1/4 towards the next pixel.
    a, b = small[..., 3, 3], small[..., 3, 4]
    c, d = small[..., 4, 3], small[..., 4, 4]
    expected = (9 * a + 3 * b + 3 * c + d) / 16
    # Values are multiples of 1/8, so sixteenths of them are exact in FP32.
    assert torch.equal(large[..., 7, 7], expected)


def test_standardised_values():
    source = digits(batch_size=1437, value_range="standardised")
    images = source.train_batch(0)[0].double()
    # 91,968 values, each rounded twice by 2^-24; the mean of the errors is below one of them.
    assert abs(images.mean().item()) < 1e-6
    assert abs(images.std(correction=0).item() - 1) < 1e-6


def test_mean_subtracted_values_span_those_of_bytes():
    images = digits(batch_size=1437, value_range="mean_subtracted").train_batch(0)[0].double()
    # 0 ... 16 as 0 ... 255. 91,968 values, each rounded twice by 2^-24 of at most 255.
    assert (images.max() - images.min()).item() == pytest.approx(255, rel=2**-22)
    assert abs(images.mean().item()) < 255e-6


def test_tanh_values_fill_the_interval():
    images = digits(batch_size=1437).train_batch(0)[0]
    assert (images.min().item(), images.max().item()) == (-1.0, 1.0)
    images = synthetic(batch_size=64, value_range="tanh").train_batch(0)[0]
    assert (images.min().item(), images.max().item()) == (-1.0, 1.0)


def test_hash_is_of_the_raw_content():
    train, held_out = digits(batch_size=1437), digits(batch_size=360)
    images, labels = train.train_batch(0)
    # Undo the run's order to get the stored one.
    back = torch.argsort(permutation(0, 0, 1437))
    digest = hashlib.sha256()
    digest.update(stored_bytes(images[back]).numpy().tobytes())
    digest.update(labels[back].numpy().tobytes())
    for images, labels in held_out.eval_batches():
        digest.update(stored_bytes(images).numpy().tobytes())
        digest.update(labels.numpy().tobytes())
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


def test_descriptions_are_plain():
    for source in (digits(), synthetic()):
        assert all(type(v) in (str, int, float) for v in source.description.values())


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 1438}, "batch_size=1438 is not allowed: 1 to 1437"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_refusals(change, message):
    with pytest.raises(ValueError, match=message):
        digits(**change)
