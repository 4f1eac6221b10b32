"""Sliced Wasserstein distance: by hand, against scipy, and that it sees what it should."""

import json

import numpy as np
import pytest
import scipy.ndimage
import torch
from scipy.stats import wasserstein_distance
from torch.nn import functional as F

from mprun.tasks.sample_distance import (
    SampleDistance,
    laplacian_pyramid,
    pyramid_levels,
    sliced_wasserstein,
)

from ..helpers import TINY_GAN, configured, numbers_of, record_of, run


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def digits_32():
    return configured("digits", batch_size=120, seed=0, device="cpu", value_range="tanh")


@pytest.fixture(scope="module")
def digits():
    """(images, labels) of the first 120 held-out digits at 32 px in [-1, 1]."""
    return next(digits_32().eval_batches())


@pytest.fixture(scope="module")
def distance():
    return SampleDistance(32, 3, "cpu")


@pytest.mark.parametrize("count", [1, 2, 37, 500])
def test_one_dimension_is_scipy_s_distance(count):
    a, b = random(count, 1, seed=1), random(count, 1, seed=2) * 3 + 1
    ours = sliced_wasserstein(a, b, torch.ones(1, 1)).item()
    theirs = wasserstein_distance(a.double().flatten().numpy(), b.double().flatten().numpy())
    # Each difference is rounded once to FP32 (2^-24 of values that are all of one size here).
    assert ours == pytest.approx(theirs, rel=2**-20)


def test_every_direction_is_scipy_s_distance_of_the_projections():
    a, b = random(200, 5, seed=3), random(200, 5, seed=4) + 0.3
    directions = F.normalize(random(70, 5, seed=5), dim=1)  # more than one chunk of them
    projected = ((own.double() @ directions.double().t()).t().numpy() for own in (a, b))
    expected = np.mean([*map(wasserstein_distance, *projected)])
    # Products of 5 terms in FP32: some 2^-22 of values up to 4, against distances near 0.2.
    assert sliced_wasserstein(a, b, directions).item() == pytest.approx(expected, rel=1e-5)


def test_a_distance_is_that_of_its_definition():
    """Patches cut out one by one, float64 projections, scipy's distance on each direction."""
    real, made = random(5, 2, 32, 32, seed=8), random(5, 2, 32, 32, seed=9) * 1.5 + 0.2
    draw, corners = torch.Generator().manual_seed(2018), []
    for places in (32 - 6, 16 - 6):
        chosen = torch.randperm(places**2, generator=draw)[:64].tolist()
        corners.append([divmod(place, places) for place in chosen])
    directions = torch.randn(128, 2 * 49, generator=draw, dtype=torch.float64).numpy()
    directions /= np.linalg.norm(directions, axis=1)[:, None]
    expected, bands = [], (laplacian_pyramid(images.double(), 2) for images in (real, made))
    for ours, theirs, own in zip(*bands, corners, strict=True):
        a, b = (
            np.stack([image[:, y : y + 7, x : x + 7] for image in band.numpy() for y, x in own])
            for band in (ours, theirs)
        )
        mean, std = (of(a, (0, 2, 3), keepdims=True) for of in (np.mean, np.std))
        a, b = (((patches - mean) / std).reshape(len(patches), -1) for patches in (a, b))
        expected.append(np.mean([wasserstein_distance(a @ d, b @ d) for d in directions]))
    own = SampleDistance(32, 2, "cpu")
    # Products of 98 terms in FP32, against distances near 0.2.
    assert own.by_level([real[:3], real[3:]], [made]) == pytest.approx(expected, rel=1e-5)
    assert own([real], [made]) == pytest.approx(np.mean(expected), rel=1e-5)


def test_the_pyramid_is_that_of_scipy_and_gives_the_images_back():
    images = random(2, 3, 32, 48, dtype=torch.float64)
    line = np.array([1, 4, 6, 4, 1]) / 16
    filters = np.outer(line, line)[None, None]
    down = scipy.ndimage.convolve(images.numpy(), filters, mode="mirror")[:, :, ::2, ::2]
    spread = np.zeros(images.shape)
    spread[:, :, ::2, ::2] = down
    up = scipy.ndimage.convolve(spread, 4 * filters, mode="mirror")
    fine, coarse = laplacian_pyramid(images, 2)
    # Sums of 25 products in float64 of values up to 4.
    np.testing.assert_allclose(coarse.numpy(), down, rtol=0, atol=1e-13)
    np.testing.assert_allclose(fine.numpy(), images.numpy() - up, rtol=0, atol=1e-13)
    np.testing.assert_allclose((fine.numpy() + up), images.numpy(), rtol=0, atol=1e-13)


def test_levels_end_at_16_pixels():
    assert [pyramid_levels(size) for size in (16, 17, 32, 48, 64, 128)] == [1, 1, 2, 2, 3, 4]
    with pytest.raises(ValueError, match="image_size=15"):
        pyramid_levels(15)


@pytest.mark.slow
def test_equal_sets_are_at_zero_in_any_order_and_in_any_batches(digits, distance):
    images, _ = digits
    shuffled = images[torch.randperm(len(images), generator=torch.Generator().manual_seed(1))]
    assert distance([images], [images.clone()]) == 0.0
    # The same values through products of other shapes: FP32 rounding, 2^-24 of values up to 60
    # standard deviations of the patches.
    assert distance([images], list(shuffled.split(50))) < 1e-5
    other = images.flip(3)
    ordered, mixed = distance([images], [other]), distance([shuffled], [other.flip(0)])
    assert ordered > 0.01 and mixed == pytest.approx(ordered, rel=1e-4)
    # Symmetric up to whose deviation is the unit; here both sets have nearly the same one.
    assert distance([other], [images]) == pytest.approx(ordered, rel=0.2)


@pytest.mark.slow
def test_it_grows_with_every_kind_of_damage(digits, distance):
    images, labels = digits
    floor = distance([images], [digits_32().train_batch(0)[0]])
    noise = random(*images.shape, seed=7)
    noisy = [distance([images], [images + amount * noise]) for amount in (0.05, 0.2, 0.8)]
    blurred = [distance([images], [blur(images, width)]) for width in (3, 5, 9)]
    kinds = []  # mode collapse: fewer and fewer classes, as many images
    for classes in (9, 3, 1):
        kept = images[labels < classes]
        kinds.append(distance([images], [kept[torch.arange(len(images)) % len(kept)]]))
    darker = [distance([images], [images - amount]) for amount in (0.1, 0.4)]
    for distances in (noisy, blurred, kinds, darker):
        assert distances == sorted(distances) and distances[-1] > 2 * floor, distances
    # Brightness is seen because the unit is the real set's; both sets by their own would hide it.
    assert darker[0] > floor


def blur(images, width):
    """A box filter of an odd width, mirrored at the border."""
    margin = width // 2
    padded = F.pad(images, (margin,) * 4, mode="reflect")
    return F.avg_pool2d(padded, width, stride=1)


def test_constant_images_are_finite_and_nan_is_nan(digits, distance):
    images = digits[0][:30]
    assert 0 < distance([images], [torch.full_like(images, -1.0)]) < 100
    assert distance([torch.zeros(4, 3, 32, 32)], [torch.ones(4, 3, 32, 32)]) > 0
    broken = images.clone()
    broken[5, 0, 9, 9] = float("nan")
    assert np.isnan(distance([images], [broken]))


def test_sets_that_do_not_fit_are_refused(digits, distance):
    images, _ = digits
    for others, says in ((images[:-1], "120 real and 119 generated"), (images[:, :1], "must be")):
        with pytest.raises(ValueError, match=says):
            distance([images], [others])


@pytest.mark.slow
def test_every_instance_draws_the_same_and_leaves_the_random_state_alone(digits, distance):
    images, _ = digits
    torch.manual_seed(5)
    before = torch.get_rng_state()
    again = SampleDistance(32, 3, "cpu")
    assert again([images], [images.flip(3)]) == distance([images], [images.flip(3)])
    assert torch.equal(torch.get_rng_state(), before)
    # The control: other directions and positions give another number, near the first.
    other = SampleDistance(32, 3, "cpu", seed=1)([images], [images.flip(3)])
    assert other != distance([images], [images.flip(3)])
    assert other == pytest.approx(distance([images], [images.flip(3)]), rel=0.3)


GAN = [*TINY_GAN, "data.eval_size=20", "train.steps=3", "train.eval_every=2", "train.log_every=1"]


@pytest.mark.slow
def test_a_run_records_it_and_trains_to_the_same_bits(tmp_path, build_run):
    runs = {metric: tmp_path / metric for metric in ("loss", "sliced_wasserstein")}
    for metric, directory in runs.items():
        assert run(directory, *GAN, f"compare.metric={metric}") == 0
    plain, measured = (map(json.loads, numbers_of(directory)) for directory in runs.values())
    measured = list(measured)
    distances = [r.pop("sliced_wasserstein") for r in measured if r["split"] == "eval"]
    assert len(distances) == 2 and all(0 < d < 100 for d in distances)
    assert list(plain) == measured
    recorded = record_of(runs["sliced_wasserstein"])
    assert recorded["final"]["sliced_wasserstein"] == distances[-1]
    # The same number from the parts: as many codes as there are held-out images, in the masters.
    task = build_run(*GAN, "compare.metric=sliced_wasserstein").task
    for step in range(3):
        task.train_step(step)
    real = torch.cat([images for images, _ in task.data.eval_batches()])
    codes = torch.randn(len(real), 8, generator=torch.Generator().manual_seed(2019))
    with torch.no_grad():
        generated = task.g.model.eval()(codes)
    expected = SampleDistance(32, 3, "cpu")([real], [generated])
    # One batch of 20 instead of three of up to 8: FP32 sums in another order.
    assert distances[-1] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("evaluated_in", ["fp32", "mode"])
@pytest.mark.slow
def test_training_does_not_notice_it_in_a_16_bit_mode(build_run, evaluated_in):
    rows = []
    for metric in ("loss", "sliced_wasserstein"):
        more = [f"compare.metric={metric}", f"train.eval_arithmetic={evaluated_in}"]
        task = build_run(*GAN, "precision=amp", *more).task
        losses = [task.train_step(0)["loss"]]
        values = task.evaluate()
        assert ("sliced_wasserstein" in values) == (metric == "sliced_wasserstein")
        losses += [task.train_step(step)["loss"] for step in (1, 2)]
        rows.append(torch.stack(losses))
    assert torch.equal(*rows)


@pytest.mark.gpu
def test_on_a_gpu_it_is_the_same_number(digits):
    images, _ = digits
    other = images.flip(3) * 0.9
    on_cpu = SampleDistance(32, 3, "cpu").by_level([images], [other])
    on_gpu = SampleDistance(32, 3, "cuda").by_level([images.cuda()], [other.cuda()])
    # FP32 products in full on both: sums of 147 terms in another order.
    assert on_gpu == pytest.approx(on_cpu, rel=1e-4)
