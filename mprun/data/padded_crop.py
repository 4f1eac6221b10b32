"""Random crops of padded images and mirroring, drawn on the host and applied on the device."""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

# Keeps these draws apart from those of the order of samples, which come from (seed, epoch).
_STREAM = 1


class PaddedCrop:
    """Shifts each image by -``padding`` ... ``padding`` pixels in both directions, mirrors half.

    What torchvision's ``RandomCrop(size, padding)`` and ``RandomHorizontalFlip`` do to an image:
    zeros (black) around it, a crop of the old size at an even chance for each offset, then the
    mirror. The draw for an image is a pure function of (seed, epoch, position in the epoch): entry
    ``position`` of a PCG64 stream.

    An epoch's draws (24 bytes a sample) are made at once and lie on ``device``, so that a batch
    costs a slice and a gather, and the host waits for nothing.
    """

    def __init__(
        self, seed: int, n: int, padding: int, flip: bool, device: torch.device | str
    ) -> None:
        self._seed, self._n, self._padding, self._flip = seed, n, padding, flip
        self._device, self._epoch = torch.device(device), -1
        self._draws = torch.empty(3, 0, dtype=torch.int64, device=device)

    def __call__(self, images: Tensor, epoch: int, start: int) -> Tensor:
        """``images`` (uint8 ``[batch, channels, h, w]``), changed, as positions ``start`` on."""
        if epoch != self._epoch:
            draws = torch.from_numpy(draw(self._seed, epoch, self._n, self._padding, self._flip))
            if self._device.type == "cuda":
                # From pinned memory the copy makes the host wait for nothing.
                draws = draws.pin_memory()
            self._draws = draws.to(self._device, non_blocking=True)
            self._epoch = epoch
        batch, channels, height, width = images.shape
        down, right, mirrored = self._draws[:, start : start + batch, None]
        columns = torch.arange(width, device=self._device)
        columns = right + torch.where(mirrored.bool(), width - 1 - columns, columns)
        rows = down + torch.arange(height, device=self._device)
        pixels = rows[:, :, None] * (width + 2 * self._padding) + columns[:, None, :]
        padded = F.pad(images, (self._padding,) * 4).flatten(2)
        pixels = pixels.flatten(1)[:, None].expand(batch, channels, height * width)
        return padded.gather(2, pixels).view_as(images)


def draw(seed: int, epoch: int, n: int, padding: int, flip: bool) -> np.ndarray:
    """Rows and columns to skip in the padded image, and 1 to mirror: int64 ``[3, n]``."""
    bits = np.random.PCG64(np.random.SeedSequence([seed, epoch, _STREAM])).random_raw(n)
    low, high = bits & np.uint64(2**31 - 1), (bits >> np.uint64(31)) & np.uint64(2**31 - 1)
    offsets = np.uint64(2 * padding + 1)
    down, right = (low * offsets) >> np.uint64(31), (high * offsets) >> np.uint64(31)
    mirrored = bits >> np.uint64(63) if flip else np.zeros(n, np.uint64)
    return np.stack([down, right, mirrored]).astype(np.int64)
