"""Grids of generated images in a run directory: samples/step-NNNNNNNN.png."""

import os
from pathlib import Path


def write_sample_grid(directory: Path, step: int, images) -> Path:
    """Write images, float tensor [n, channels, height, width] in [0, 1], as a grid of 8 columns.

    The file appears whole or not at all. channels: 1 or 3; 8 bits each, rounded.
    """
    # Here and not at the top: reading records must need neither torch nor Pillow.
    from PIL import Image
    from torchvision.utils import make_grid

    grid = make_grid(images, nrow=8).mul(255).add(0.5).clamp(0, 255)
    pixels = grid.permute(1, 2, 0).byte().cpu().numpy()
    path = directory / "samples" / f"step-{step:08}.png"
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "wb") as file:
        Image.fromarray(pixels).save(file, format="PNG")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    return path


def drop_later_grids(directory: Path, last_step: int) -> None:
    """Remove the grids after `last_step`, which a resumed run makes again."""
    for path in (directory / "samples").glob("step-*.png"):
        number = path.stem.removeprefix("step-")
        if number.isdecimal() and int(number) > last_step:
            path.unlink()
