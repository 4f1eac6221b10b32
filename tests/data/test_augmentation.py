"""Crops: the pixels of torchvision's for the same box, and numbers that depend on the key alone."""

import math

import numpy as np
import pytest
import torch
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms import functional as F

from mprun.data.augmentation import DRAWS, Augmentation, centre_box, draws, random_resized_box

from .made_images import picture

SIDES = [(500, 400), (57, 311), (640, 91), (33, 33), (256, 256), (3, 5)]


def pixels(image) -> np.ndarray:
    return np.asarray(image)


@pytest.mark.parametrize(("width", "height"), SIDES)
def test_resized_crop_has_the_pixels_of_torchvision(width, height):
    image = picture(1, width, height)
    augmentation = Augmentation("resized_crop", 32)
    for draw in draws(0, 0, 0, 20):
        left, top, right, bottom = random_resized_box(width, height, draw)
        expected = F.resized_crop(image, top, left, bottom - top, right - left, [32, 32])
        expected = F.hflip(expected) if draw[0] < 0.5 else expected
        assert (pixels(augmentation.train(image, draw)) == pixels(expected)).all()


@pytest.mark.parametrize(("width", "height"), SIDES)
@pytest.mark.parametrize("size", [32, 33])
def test_evaluation_has_the_pixels_of_torchvision(width, height, size):
    image = picture(2, width, height)
    shorter = round(size * 8 / 7)
    expected = F.center_crop(F.resize(image, [shorter]), [size, size])
    found = Augmentation("resized_crop", size).evaluation(image)
    assert (pixels(found) == pixels(expected)).all()
    square = F.center_crop(F.resize(image, [48, 48]), [size, size])
    assert (pixels(Augmentation("crop", size, resize_to=48).evaluation(image)) == square).all()


def test_crop_resizes_the_whole_image_and_takes_every_place():
    image = picture(3, 90, 50)
    whole = pixels(F.resize(image, [10, 10]))
    augmentation, places = Augmentation("crop", 8, resize_to=10), set()
    for draw in draws(0, 0, 0, 200):
        left, top = math.floor(draw[2] * 3), math.floor(draw[1] * 3)
        expected = whole[top : top + 8, left : left + 8]
        expected = expected[:, ::-1] if draw[0] < 0.5 else expected
        assert (pixels(augmentation.train(image, draw)) == expected).all()
        places.add((top, left))
    assert len(places) == 9


@pytest.mark.parametrize(("centre_crop", "side"), [(None, 50), (30, 30), (178, 50)])
def test_centre_cuts_a_square_before_it_resizes(centre_crop, side):
    """More than the image has means its shorter side, not black borders."""
    image = picture(4, 90, 50)
    augmentation = Augmentation("centre", 16, flip=False, centre_crop=centre_crop)
    expected = F.resize(F.center_crop(image, [side, side]), [16, 16])
    draw = draws(0, 0, 0, 1)[0]
    for found in (augmentation.evaluation(image), augmentation.train(image, draw)):
        assert (pixels(found) == pixels(expected)).all()


def test_mirror_only_where_asked_and_drawn():
    image = picture(5, 16, 16)
    draw = draws(0, 0, 0, 1)[0]
    for flip, drawn, mirrored in ((True, 0.49, True), (True, 0.5, False), (False, 0.0, False)):
        draw[0] = drawn
        found = pixels(Augmentation("centre", 16, flip=flip).train(image, draw))
        assert (found == pixels(image)[:, ::-1] if mirrored else found == pixels(image)).all()


def test_one_channel_is_the_luma_of_itu_r_601():
    image = picture(6, 16, 16)
    found = pixels(Augmentation("centre", 16, channels=1).evaluation(image))
    luma = pixels(image) @ np.array([0.299, 0.587, 0.114])
    assert found.shape == (16, 16)
    assert np.abs(found - luma).max() <= 0.51  # rounded to a byte, weights to 16 bits


def test_boxes_have_the_distribution_of_torchvision():
    """Mean and deviation of width, height and place over 4,000 boxes, within 5 standard errors."""
    width, height, n = 500, 375, 4000
    image = picture(7, width, height)
    torch.manual_seed(0)
    theirs = [RandomResizedCrop.get_params(image, (0.08, 1.0), (3 / 4, 4 / 3)) for _ in range(n)]
    theirs = np.array([(left, top, w, h) for top, left, h, w in theirs], float)
    boxes = np.array([random_resized_box(width, height, d) for d in draws(3, 0, 0, n)], float)
    ours = np.concatenate([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], axis=1)
    error = np.sqrt((ours.var(0) + theirs.var(0)) / n)
    assert (np.abs(ours.mean(0) - theirs.mean(0)) < 5 * error).all()
    # The deviation of a deviation is at most sd * sqrt(kurtosis / 4n); kurtosis is below 4 here.
    assert (np.abs(ours.std(0) - theirs.std(0)) < 5 * ours.std(0) * math.sqrt(2 / n)).all()


@pytest.mark.parametrize(("width", "height"), [(1000, 20), (20, 1000)])
def test_no_try_fits_a_strip_so_its_middle_is_taken(width, height):
    image = picture(8, width, height)
    large = np.full(DRAWS, 0.999)  # areas that are too high for a strip
    left, top, right, bottom = random_resized_box(width, height, large)
    torch.manual_seed(0)
    expected = {RandomResizedCrop.get_params(image, (0.999, 1.0), (3 / 4, 4 / 3)) for _ in "ab"}
    assert {(top, left, bottom - top, right - left)} == expected


@pytest.mark.parametrize(("width", "height"), SIDES)
def test_a_box_reaches_every_edge(width, height):
    lowest, highest = (np.array([0, edge, edge, 0, *[0, 0.5] * 10]) for edge in (0, 1 - 2.0**-53))
    assert random_resized_box(width, height, lowest)[:2] == (0, 0)
    assert random_resized_box(width, height, highest)[2:] == (width, height)


def test_numbers_depend_on_seed_epoch_and_place_alone():
    whole = draws(5, 2, 0, 100)
    assert whole.shape == (100, DRAWS) and (whole >= 0).all() and (whole < 1).all()
    for first, count in ((0, 1), (17, 3), (64, 36)):
        assert (draws(5, 2, first, count) == whole[first : first + count]).all()
    others = [draws(5, 3, 0, 100), draws(6, 2, 0, 100), draws(2, 5, 0, 100)]
    assert not any((other == whole).any() for other in others)


def test_numbers_are_the_high_bits_of_the_documented_stream():
    stream = np.random.PCG64(np.random.SeedSequence([5, 2, 1]))
    raw = [int(stream.random_raw()) for _ in range(2 * DRAWS)]
    expected = [(value >> 11) / 2**53 for value in raw]
    assert draws(5, 2, 0, 2).flatten().tolist() == expected


def test_centre_box_rounds_halves_to_even_as_torchvision_does():
    assert centre_box(13, 10, 8) == (2, 1, 10, 9)  # 2.5 -> 2
    assert centre_box(15, 10, 8) == (4, 1, 12, 9)  # 3.5 -> 4
