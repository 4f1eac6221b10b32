"""Sliced Wasserstein distance between two sets of images, on patches of a Laplacian pyramid.

Karras et al., Progressive Growing of GANs, ICLR 2018, section 5, in the form of the authors' code
(metrics/sliced_wasserstein.py). Patches of 7x7 pixels from every level of the pyramid down to 16x16
are projected onto random directions. On each the distance of two equally large sets is the mean
difference of their sorted values. The differences to that code are:

- A separate generator draws positions of patches and directions once, for both sets, every image
  and every run; the authors draw for every image. So equal sets are at distance 0, and the order of
  the images does not matter. The global random state is neither read nor changed.
- Both sets are centred and scaled by the real set, per channel and level. The authors scale each
  set by itself, which hides a wrong brightness or contrast and divides by zero if all generated
  patches are equal.
- An image and level has 64 patches, and there are 128 directions (the authors: 128 and 512). This
  takes a fifth of the time and shows the same differences.
- Pixel values are not rounded to bytes; the unit is one standard deviation of the real patches.

docs/sample_metric.md measures how useful the number is.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional as F

from mprun.precision import ieee_fp32

PATCH = 7  # pixels
PATCHES = 64  # per image and level
DIRECTIONS = 128
COARSEST = 16  # pixels, the last level of the pyramid
SEED = 2018
# Directions projected and sorted at a time: bounds the memory at 32 values per patch and set.
_CHUNK = 32


class SampleDistance:
    """Sliced Wasserstein distance of images [n, channels, size, size] to real ones.

    The pyramid halves the size while it is even; below 16 pixels it raises ValueError.
    """

    def __init__(
        self, image_size: int, channels: int, device: torch.device | str, *, seed: int = SEED
    ):
        self.shape = (channels, image_size, image_size)
        self.levels = pyramid_levels(image_size)
        generator = torch.Generator().manual_seed(seed)
        # For each level int64 [positions, 49]: the pixels of a patch in a flattened band.
        self.pixels = []
        for level in range(self.levels):
            size = image_size // 2**level
            places = size - PATCH + 1
            corners = torch.randperm(places**2, generator=generator)[:PATCHES]
            corners = corners // places * size + corners % places
            inside = torch.arange(PATCH)
            inside = (inside[:, None] * size + inside).flatten()
            self.pixels.append((corners[:, None] + inside).to(device))
        shape = DIRECTIONS, channels * PATCH**2
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
        drawn /= drawn.norm(dim=1, keepdim=True)
        self.directions = drawn.float().to(device)

    @torch.no_grad()
    def __call__(self, real: Iterable[Tensor], generated: Iterable[Tensor]) -> float:
        """Return the mean over the levels of `by_level`."""
        distances = self.by_level(real, generated)
        return sum(distances) / len(distances)

    @torch.no_grad()
    def by_level(self, real: Iterable[Tensor], generated: Iterable[Tensor]) -> list[float]:
        """Return the distances of the levels, finest first, in standard deviations of real patches.

        Both take batches of float images, equally many (ValueError otherwise). Products are in
        FP32, means in float64. It waits for the device once.
        """
        with ieee_fp32():
            distances: list[Tensor] = []
            for ours, theirs in zip(self._patches(real), self._patches(generated), strict=True):
                if ours.shape != theirs.shape:
                    count = len(self.pixels[len(distances)])
                    raise ValueError(
                        f"{len(ours) // count} real and {len(theirs) // count} generated images: "
                        f"must have the same number"
                    )
                ours, theirs = _standardised(ours, theirs)
                distances.append(sliced_wasserstein(ours, theirs, self.directions))
        return torch.stack(distances).tolist()

    def _patches(self, batches: Iterable[Tensor]) -> list[Tensor]:
        """Return the patches of each level, float32 [images * positions, channels, 49]."""
        found: list[list[Tensor]] = [[] for _ in range(self.levels)]
        for images in batches:
            if images.shape[1:] != self.shape:
                raise ValueError(f"images {tuple(images.shape[1:])}: must be {self.shape}")
            pyramid = laplacian_pyramid(images.float(), self.levels)
            for patches, band, pixels in zip(found, pyramid, self.pixels, strict=True):
                # [n, channels, positions, 49] -> [n * positions, channels, 49]
                chosen = band.flatten(2)[:, :, pixels].transpose(1, 2)
                patches.append(chosen.flatten(0, 1))
        return [torch.cat(patches) for patches in found]


def pyramid_levels(image_size: int) -> int:
    """Count the levels of size `image_size`, half of it, ... down to 16 pixels or just above."""
    levels = 0
    while image_size >= COARSEST:
        levels += 1
        if image_size % 2:
            break
        image_size //= 2
    if not levels:
        raise ValueError(
            f"image_size={image_size} is not allowed: must be at least {COARSEST} pixels"
        )
    return levels


def laplacian_pyramid(images: Tensor, levels: int) -> list[Tensor]:
    """Build Burt and Adelson's pyramid: differences of neighbouring sizes, and the smallest image.

    For images [n, channels, h, w] level k is [n, channels, h / 2^k, w / 2^k], which must be whole;
    `levels[k] + up(levels[k + 1])`, from the last one up, restores the images.
    """
    bands = []
    for _ in range(levels - 1):
        smaller = _blur(images)[:, :, ::2, ::2]
        bands.append(images - _up(smaller))
        images = smaller
    return [*bands, images]


def sliced_wasserstein(a: Tensor, b: Tensor, directions: Tensor) -> Tensor:
    """Return the mean over directions of the projections' 1-D Wasserstein distance (order 1).

    `a` and `b` are [points, dimension], equally many points of equal weight, `directions` [count,
    dimension] of length 1. The result is 0-dim float64, NaN if a value is NaN.
    """
    total = torch.zeros((), dtype=torch.float64, device=a.device)
    for chunk in directions.split(_CHUNK):
        # Equal weights: the best transport on a line pairs the sorted values.
        gap = (chunk @ a.T).sort(dim=1).values - (chunk @ b.T).sort(dim=1).values
        total += gap.abs().mean(dim=1, dtype=torch.float64).sum()
    return total / len(directions)


def _standardised(real: Tensor, generated: Tensor) -> tuple[Tensor, Tensor]:
    """Scale [n, channels, 49] to [n, channels * 49], both by the real set's mean and deviation."""
    std, mean = torch.std_mean(real.double(), dim=(0, 2), keepdim=True, correction=0)
    std = torch.where(std > 0, std, 1.0)  # a constant channel is not scaled
    ours, theirs = (((patches - mean) / std).float().flatten(1) for patches in (real, generated))
    return ours, theirs


def _up(images: Tensor) -> Tensor:
    """Double the size: put zeros between the pixels, blur, multiply by 4 for the zeros."""
    n, channels, height, width = images.shape
    spread = images.new_zeros(n, channels, 2 * height, 2 * width)
    spread[:, :, ::2, ::2] = images
    return _blur(spread) * 4


def _blur(images: Tensor) -> Tensor:
    """Apply the 5x5 binomial filter to each channel; mirror at the border without repeating it."""
    line = images.new_tensor([1, 4, 6, 4, 1]) / 16
    channels = images.shape[1]
    kernel = torch.outer(line, line).expand(channels, 1, 5, 5)
    return F.conv2d(F.pad(images, (2, 2, 2, 2), mode="reflect"), kernel, groups=channels)
