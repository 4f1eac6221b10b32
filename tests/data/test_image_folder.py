"""The source of image files: values, order, what it tells of itself, and its device side."""

import time

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import functional as F

from mprun.data.augmentation import draws, imagenet_constants, normalise, random_resized_box
from mprun.data.image_folder import ImageFolder
from mprun.data.source import permutation

from ..helpers import assert_same_bits, configured
from .made_images import make_folder, picture

CPU = torch.device("cpu")
IMAGENET = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("images"))


def source(folder, **more) -> ImageFolder:
    plain = {"image_size": 16, "batch_size": 5, "seed": 3, "device": "cpu", "workers": 0}
    return configured("image_folder", root=str(folder), **(plain | more))


def files(folder, split: str) -> list:
    return sorted((folder / split).rglob("*.jpg"))


def test_a_training_batch_is_torchvisions_for_the_same_boxes(folder):
    """Within 2 ulp of 4 (float32): both round three or four times, at values below 4."""
    names = files(folder, "train")
    images, labels = source(folder).train_batch(5)  # epoch 1, batch 1 of 4
    assert images.dtype == torch.float32 and images.is_contiguous()
    order, chances = permutation(3, 1, 24)[5:10].tolist(), draws(3, 1, 5, 5)
    for image, label, place, draw in zip(images, labels, order, chances, strict=True):
        with Image.open(names[place]) as file:
            full = file.convert("RGB")
        left, top, right, bottom = random_resized_box(*full.size, draw)
        expected = F.resized_crop(full, top, left, bottom - top, right - left, [16, 16])
        expected = F.hflip(expected) if draw[0] < 0.5 else expected
        expected = F.normalize(F.to_tensor(expected), *IMAGENET)
        torch.testing.assert_close(image, expected, rtol=0, atol=2 * 2.0**-21)
        assert label == int(names[place].parent.name[-1])


def test_evaluation_is_torchvisions(folder):
    names = files(folder, "val")
    images = [F.center_crop(F.resize(Image.open(n).convert("RGB"), [18]), [16]) for n in names]
    batches = list(source(folder, batch_size=4).eval_batches())
    assert [len(labels) for _, labels in batches] == [4, 4, 2]
    found, labels = map(torch.cat, zip(*batches, strict=True))
    expected = F.normalize(torch.stack([*map(F.to_tensor, images)]), *IMAGENET)
    torch.testing.assert_close(found, expected, rtol=0, atol=2 * 2.0**-21)
    assert labels.tolist() == [int(name.parent.name[-1]) for name in names]


def test_value_ranges_by_hand():
    pixel = torch.tensor([[[[0, 128, 255]]]], dtype=torch.uint8)
    expected = {
        "tanh": [-1.0, 0.5 / 127.5, 1.0],
        "mean_subtracted": [-123.68, 128 - 116.779, 255 - 103.939],
        "standardised": [-0.485 / 0.229, (128 / 255 - 0.456) / 0.224, (1 - 0.406) / 0.225],
    }
    for value_range, values in expected.items():
        found = normalise(pixel, *imagenet_constants(value_range, 3, CPU))
        assert found.shape == (1, 3, 1, 1)
        # Two operations on float32, and a mean of up to 124 that is itself rounded.
        np.testing.assert_allclose(found.flatten().tolist(), values, rtol=2e-6)
    luma = 0.299 * 0.485 + 0.587 * 0.456 + 0.114 * 0.406
    mean, _ = imagenet_constants("standardised", 1, CPU)
    assert mean.flatten().tolist() == pytest.approx([255 * luma], rel=1e-6)


def test_one_channel_and_flat_layout(folder):
    gray = source(folder, channels=1, layout="flat", augmentation="centre", value_range="tanh")
    images, labels = gray.train_batch(0)
    assert images.shape == (5, 1, 16, 16) and labels.tolist() == [0] * 5
    assert gray.num_classes == 1 and gray.description["num_classes"] == 1
    assert -1 <= images.min() < images.max() <= 1


def test_what_it_tells_of_itself(folder):
    made = source(folder)
    about = made.description
    assert (about["train_samples"], about["eval_samples"], about["num_classes"]) == (24, 10, 2)
    assert (about["split_rule"], about["sha256_of"]) == ("folders train and val", "content")
    assert (made.batches_per_epoch, made.samples_per_batch, made.num_classes) == (4, 5, 2)
    assert made.replaced_files() == {}


def test_replaced_files_of_both_splits_are_told(tmp_path):
    make_folder(tmp_path)
    for name in (files(tmp_path, "train")[3], files(tmp_path, "val")[7]):
        name.write_bytes(b"")
    made = source(tmp_path, on_corrupt="skip")
    for index in range(5):
        made.train_batch(index)
    list(made.eval_batches()), list(made.eval_batches())
    train, held_out = str(files(tmp_path, "train")[3]), str(files(tmp_path, "val")[7])
    assert made.replaced_files() == {"train/3": train, "held_out/7": held_out}


def test_waiting_is_what_reading_in_the_calling_thread_takes(folder):
    made = source(folder)
    started = time.perf_counter()
    for index in range(8):
        made.train_batch(index)
    elapsed = time.perf_counter() - started
    assert 0 < made.defer_wait()() < elapsed
    assert made.defer_wait()() == 0
    list(made.eval_batches())
    assert made.defer_wait()() == 0  # evaluation is no part of it


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [0, 2])
def test_on_cuda_the_same_bits_one_batch_ahead(folder, workers):
    """Subtraction and division round once on every device."""
    there, here = source(folder, device="cuda", workers=workers), source(folder)
    for index in (0, 1, 2, 3, 4, 9, 9, 8, 10):
        found = [part.cpu() for part in there.train_batch(index)]
        assert_same_bits(found, [*here.train_batch(index)])
    for found, expected in zip(there.eval_batches(), here.eval_batches(), strict=True):
        assert_same_bits([part.cpu() for part in found], [*expected])
    there.close()


@pytest.mark.gpu
def test_on_cuda_waiting_is_seen_where_the_loader_is_slow_and_only_there(tmp_path):
    for split in ("train", "val"):
        (tmp_path / split / "class0").mkdir(parents=True)
        for number in range(20):
            picture(number, 600, 600).save(tmp_path / split / "class0" / f"{number}.png")
    slow = source(tmp_path, device="cuda")
    work = torch.randn(4096, 4096, device="cuda")
    for steps_of_work, bound in ((0, True), (400, False)):
        torch.cuda.synchronize()
        slow.defer_wait()
        started = time.perf_counter()
        for index in range(8):
            slow.train_batch(index)
            for _ in range(steps_of_work):
                work @ work
        torch.cuda.synchronize()
        share = slow.defer_wait()() / (time.perf_counter() - started)
        assert (share > 0.5) is bound
    slow.close()
