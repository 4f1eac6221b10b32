"""Digits on canvases: what the boxes say is in the pixels, and never a training digit held out."""

import hashlib

import numpy as np
import torch
from torch.nn import functional as F

from mprun.data.image_store import split_digits
from mprun.extensions.detection.boxed_images import BoxSplit, Objects
from mprun.extensions.detection.boxes import overlaps
from mprun.extensions.detection.canvases import NOISE, digit_canvases

from ...helpers import configured

# Of pixels and boxes: the same canvases on every machine and in every version.
SHA256 = "02206516cc6cec81d8b169f398774385d1ce8ffd9b47fa36f80eccf482ed9544"


def source(**more):
    given = {"batch_size": 8, "seed": 0, "device": "cpu", "value_range": "tanh"} | more
    return configured("digit_canvases", **given)


def test_the_canvases_are_the_same_everywhere():
    assert source().sha256 == source(seed=5).sha256 == SHA256


def test_the_hash_of_boxes_in_files_is_that_of_earlier_records(tmp_path):
    for name in ("a.jpg", "bcd.jpg"):
        (tmp_path / name).write_bytes(b"12345" * len(name))
    boxes = np.linspace(0, 1, 18, dtype=np.float32).reshape(3, 6)
    found = [Objects((3, 4), boxes[:2]), Objects((5, 4), boxes[2:])]
    digest = hashlib.sha256()
    BoxSplit(str(tmp_path), ["a.jpg", "bcd.jpg"], found, difficult=True).add_to(digest)
    assert digest.hexdigest() == "f9b3dc5568e62ed64ceb158d9df4323ccafaa04ec01aca58c444d8c6fdf66fc6"


def test_a_batch_is_a_pair_of_float_tensors():
    images, targets = source().train_batch(3)
    assert images.shape == (8, 3, 32, 32) and targets.shape == (8, 3, 6)
    assert images.dtype is targets.dtype is torch.float32
    sizes = [len(batch[0]) for batch in source().eval_batches()]
    assert sum(sizes) == 300 and sizes[-1] == 300 % 8


def test_boxes_lie_inside_and_apart_and_hold_a_digit():
    for (canvases, targets), count in zip(digit_canvases(), (1000, 300), strict=True):
        assert len(canvases) == len(targets) == count
        there = targets[..., 4] >= 0
        assert set(there.sum(1).tolist()) == {1, 2, 3}
        assert (targets[~there] == torch.tensor([0.0, 0, 0, 0, -1, 0])).all()
        assert (targets[there][:, :4] >= 0).all() and (targets[there][:, :4] <= 1).all()
        sides = 32 * (targets[..., 2:4] - targets[..., :2])[there]
        assert (sides[:, 0] == sides[:, 1]).all()
        assert (sides.min(), sides.max()) == (8, 16)
        assert set(targets[there][:, 4].tolist()) == {*map(float, range(10))}
        apart = overlaps(targets[..., :4], targets[..., :4])
        assert (apart.triu(1) == 0).all()
        for canvas, rows in zip(canvases[:50], targets[:50], strict=True):
            outside = torch.ones(32, 32, dtype=torch.bool)
            for row in rows[rows[:, 4] >= 0]:
                left, top, right, bottom = (32 * row[:4]).int().tolist()
                outside[top:bottom, left:right] = False
                assert canvas[0, top:bottom, left:right].max() > 150
            assert canvas[0][outside].max() < NOISE


def test_a_pasted_digit_is_the_enlarged_one_of_its_own_split():
    for (canvases, targets), digits in zip(digit_canvases(), split_digits(), strict=True):
        images, labels = digits
        for canvas, rows in zip(canvases[:5], targets[:5], strict=True):
            row = rows[0]
            left, top, right, bottom = (32 * row[:4]).int().tolist()
            pasted = canvas[0, top:bottom, left:right].float()
            large = F.interpolate(images.float(), (bottom - top,) * 2, mode="bilinear")
            large = (large[:, 0] * 255 / 16).clamp(min=0)
            # Noise shows where the digit is darker; rounding moves a value by half at most.
            far = torch.where(large >= NOISE, (pasted - large).abs(), 0).amax((1, 2))
            dark = torch.where(large < NOISE, pasted, 0).amax((1, 2)) < NOISE + 1
            fits = (far <= 0.501) & dark
            assert fits.sum() == 1 and labels[fits].item() == row[4]


def test_fewer_are_the_first():
    few = source(train_size=16, eval_size=2)
    assert few.description["train_samples"] == 16
    [(images, targets)] = few.eval_batches()
    whole = next(iter(source().eval_batches()))
    assert torch.equal(targets, whole[1][:2]) and len(images) == 2
