"""Random crops and mirroring: torchvision's pixels, draws that depend on the position alone."""

import numpy as np
import torch
from torchvision.transforms import functional as transforms

from mprun.data.augmentation import PaddedCrop, draw


def test_crop_and_mirror_equal_torchvision():
    n, padding = 200, 4
    images = torch.randint(256, (n, 3, 32, 32), dtype=torch.uint8, generator=torch.manual_seed(1))
    result = PaddedCrop(7, n, padding, True, "cpu")(images, epoch=2, start=0)
    down, right, mirrored = draw(7, 2, n, padding, True)
    for i in range(n):
        # On PIL images, as the usual recipe has it: the padding is black before normalisation.
        picture = transforms.to_pil_image(images[i])
        picture = transforms.pad(picture, padding)
        picture = transforms.crop(picture, int(down[i]), int(right[i]), 32, 32)
        if mirrored[i]:
            picture = transforms.hflip(picture)
        assert (np.asarray(picture).transpose(2, 0, 1) == result[i].numpy()).all()
    assert result.dtype == torch.uint8


def test_a_batch_takes_the_draws_of_its_positions():
    images = torch.randint(256, (50, 3, 32, 32), dtype=torch.uint8, generator=torch.manual_seed(1))
    crop = PaddedCrop(7, 50, 4, True, "cpu")
    whole = crop(images, 0, 0)
    second = crop(images, 1, 0)
    assert not torch.equal(second, whole)
    assert torch.equal(PaddedCrop(7, 50, 4, True, "cpu")(images, 1, 0), second)  # after a resume
    for start in (40, 0, 10):
        assert torch.equal(crop(images[start : start + 10], 0, start), whole[start : start + 10])


def test_mirror_alone_and_crop_alone():
    images = torch.randint(256, (64, 3, 8, 8), dtype=torch.uint8, generator=torch.manual_seed(1))
    mirrored = PaddedCrop(0, 64, 0, True, "cpu")(images, 0, 0)
    equal = (mirrored == images).flatten(1).all(dim=1)
    assert torch.equal(mirrored[~equal], images[~equal].flip(-1))
    assert 0 < equal.sum() < 64
    _, _, never = draw(0, 0, 64, 4, False)
    assert not never.any()


def test_draws_are_uniform_and_independent_of_the_order():
    n = 81_000
    down, right, mirrored = draw(0, 0, n, 4, True)
    cells = np.bincount(9 * down + right, minlength=81)
    # Binomial(81000, 1/81): standard deviation 31.4; five of them, over 81 cells.
    assert len(cells) == 81 and abs(cells - 1000).max() < 5 * 31.5
    # Binomial(81000, 1/2): standard deviation 142.
    assert abs(mirrored.sum() - n / 2) < 5 * 143
    order = np.argsort(np.random.PCG64(np.random.SeedSequence([0, 0])).random_raw(n))
    # A correlation of n independent pairs has standard deviation 1 / sqrt(n) = 0.0035.
    assert abs(np.corrcoef(order, 9 * down + right)[0, 1]) < 5 * 0.0036


def test_known_draws_do_not_change_between_versions():
    # By hand from random_raw: two fields of 31 bits times 9, without their lower 31 bits; bit 63.
    known = [[2, 6, 0, 4, 6], [6, 2, 8, 2, 5], [1, 0, 1, 0, 0]]
    assert draw(1, 2, 5, 4, True).tolist() == known
