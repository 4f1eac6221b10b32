"""CIFAR-10 as a source of batches: order, subsets, value ranges, augmentation."""

import hashlib
import os

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets.folder import pil_loader

from mprun.data.cifar10 import DEVIATION, MEAN

from ..helpers import configured, raises_line, without_waiting
from .made_images import CIFAR10_CLASSES as CLASSES
from .made_images import write

pytestmark = pytest.mark.usefixtures("cache")


AUGMENTED = {"augmentation": "padded_crop", "flip": True}
PLAIN = {"augmentation": "none", "flip": False, "image_size": 32, "value_range": "tanh"}
PLAIN |= {"batch_size": 8, "seed": 0, "device": "cpu"}


def cifar10(root, **changes):
    return configured("cifar10", root=str(root), **PLAIN | changes)


def stored_bytes(images):
    """The bytes that `tanh` values in FP32 came from."""
    return (images.double() * 127.5 + 127.5).round().to(torch.uint8)


def by_pixels(images, labels):
    """Label and number of occurrences by content."""
    found = {}
    for image, label in zip(stored_bytes(images).numpy(), labels.tolist(), strict=True):
        key = hashlib.sha256(image.tobytes()).hexdigest()
        found[key] = (label, found.get(key, (label, 0))[1] + 1)
    return found


def everything(batches):
    images, labels = zip(*batches, strict=True)
    return torch.cat(images), torch.cat(labels)


def epoch_of(source):
    return everything(source.train_batch(i) for i in range(source.batches_per_epoch))


def test_class_folders_hold_the_pixels_of_torchvision(root):
    source = cifar10(root, batch_size=20)
    assert source.batches_per_epoch == 3 and source.samples_per_batch == 20
    for folder, (images, labels) in (
        ("train", epoch_of(source)),
        ("test", everything(source.eval_batches())),
    ):
        files = sorted((root / folder).glob("*/*.jpg"))
        pixels = np.stack([np.asarray(pil_loader(path)).transpose(2, 0, 1) for path in files])
        expected = torch.tensor([CLASSES.index(path.parent.name) for path in files])
        pixels = torch.from_numpy(pixels).float() / 127.5 - 1
        assert by_pixels(images, labels) == by_pixels(pixels, expected)
        assert (images.dtype, labels.dtype) == (torch.float32, torch.int64)


def test_augmentation_does_not_depend_on_the_batch_size(root):
    small, large = (epoch_of(cifar10(root, batch_size=n, **AUGMENTED)) for n in (4, 20))
    assert torch.equal(small[0], large[0]) and torch.equal(small[1], large[1])


def test_evaluation_is_in_a_fixed_order_without_augmentation(root):
    plain = everything(cifar10(root).eval_batches())
    source = cifar10(root, **AUGMENTED, seed=5, batch_size=6)
    assert [len(labels) for _, labels in source.eval_batches()] == [6, 6, 6, 2]
    assert torch.equal(everything(source.eval_batches())[0], plain[0])


def test_subsets_are_prefixes_that_mix_the_classes_for_every_seed(root):
    whole = everything(cifar10(root).eval_batches())
    part = cifar10(root, train_size=24, eval_size=7, seed=8)
    images, labels = everything(part.eval_batches())
    assert torch.equal(images, whole[0][:7]) and torch.equal(labels, whole[1][:7])
    assert len(set(labels.tolist())) > 3
    used = by_pixels(*epoch_of(part))
    assert used == by_pixels(*epoch_of(cifar10(root, train_size=24, seed=1)))
    assert len({label for label, _ in used.values()}) > 5
    smaller = by_pixels(*epoch_of(cifar10(root, train_size=16)))
    assert smaller.keys() <= used.keys()
    assert part.sha256 != cifar10(root).sha256


def test_hash_is_of_the_pixels_that_are_used(root):
    source = cifar10(root)
    images, labels = source._train
    digest = hashlib.sha256(images.numpy().tobytes() + labels.numpy().tobytes())
    images, labels = everything(source.eval_batches())
    digest.update(stored_bytes(images).numpy().tobytes() + labels.numpy().tobytes())
    assert source.sha256 == digest.hexdigest()
    assert cifar10(root, seed=4, flip=True, value_range="standardised").sha256 == source.sha256


def test_value_ranges(root):
    bytes_ = stored_bytes(epoch_of(cifar10(root))[0]).double()
    mean, deviation = (
        torch.tensor(own, dtype=torch.float64).view(3, 1, 1) for own in (MEAN, DEVIATION)
    )
    # In units of 2^-24: 255 * mean carries two roundings of at most 126, the difference one of at
    # most 142; both are divided by 62 or more where the divisor, with two roundings, and the
    # quotient, with one, are relative to at most 2.4.
    offset = 2 * 126 + 142
    for value_range, expected, roundings in (
        ("standardised", (bytes_ / 255 - mean) / deviation, offset / 62 + 3 * 2.4),
        ("mean_subtracted", bytes_ - 255 * mean, offset),
        ("tanh", bytes_ / 127.5 - 1, 1),
    ):
        images = epoch_of(cifar10(root, value_range=value_range))[0].double()
        assert (images - expected).abs().max() <= roundings * 2**-24, value_range


def test_other_sizes_are_resized_after_the_augmentation(root):
    small, _ = cifar10(root, **AUGMENTED).train_batch(2)
    large, _ = cifar10(root, image_size=64, **AUGMENTED).train_batch(2)
    assert large.shape == (8, 3, 64, 64)
    expected = torch.nn.functional.interpolate(small, (64, 64), mode="bilinear")
    assert torch.equal(large, expected)


def test_the_record_says_what_was_read(root):
    write(root / "train/readme.txt", b"?")
    about = cifar10(root, train_size=50).description
    assert (about["train_samples"], about["eval_samples"], about["num_classes"]) == (50, 20, 10)
    assert (about["origin"], about["ignored_files"]) == ("class folders", 1)
    for name, most in (("train_size", 60), ("eval_size", 20)):
        with raises_line(ValueError, f"{name}=61 is not allowed: must be 1 to {most}"):
            cifar10(root, **{name: 61})


@pytest.mark.gpu
def test_on_the_gpu_the_same_without_waiting(root):
    settings = AUGMENTED | {"value_range": "standardised"}
    host, device = cifar10(root, **settings), cifar10(root, **settings, device="cuda")
    device.train_batch(0)
    with without_waiting():
        batches = [device.train_batch(i) for i in range(16)]  # two epochs and a bit
    for i, (images, labels) in enumerate(batches):
        expected, expected_labels = host.train_batch(i)
        # Subtraction and division are rounded correctly on both.
        assert torch.equal(images.cpu(), expected)
        assert torch.equal(labels.cpu(), expected_labels)


@pytest.mark.slow
def test_the_real_images(cifar10_jpeg):
    source = cifar10(cifar10_jpeg, batch_size=500)
    assert (source.batches_per_epoch, source.description["eval_samples"]) == (100, 10_000)
    images, labels = source._train
    assert torch.bincount(labels).tolist() == [5000] * 10
    pixels = images.double() / 255
    # The published figures are those of the original files; here they went through JPEG, which
    # blurs: the deviations fall by less than 1 %.
    assert (pixels.mean(dim=(0, 2, 3)) - torch.tensor(MEAN)).abs().max() < 0.0005
    deviation = pixels.transpose(0, 1).flatten(1).std(dim=1, correction=0)
    assert (deviation / torch.tensor(DEVIATION) - 1).abs().max() < 0.01
    _, held_out = everything(source.eval_batches())
    assert torch.bincount(held_out).tolist() == [1000] * 10
    # A subset holds the classes about evenly: hypergeometric, deviation 12.9 at most.
    part = cifar10(cifar10_jpeg, train_size=2000)
    assert (torch.bincount(part._train[1]) - 200).abs().max() < 5 * 13
    path = cifar10_jpeg / "train/cat"
    first = min(os.listdir(path))
    picture = np.array(Image.open(path / first).convert("RGB")).transpose(2, 0, 1)
    assert (images[labels == 3] == torch.tensor(picture)).flatten(1).all(dim=1).sum() >= 1
