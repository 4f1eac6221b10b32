"""Images per second from JPEG files to a float batch: mprun's loader and torchvision's recipe.

    python benchmarks/loader_speed.py --images DIR [--workers 1,2] [--windows 5] [--json FILE]

It first makes ImageNet-sized files: 500x400 JPEGs of quality 90, each a mosaic of 20 x 16 different
images below DIR (by name; intended for CIFAR-10's 32x32), resampled to 500x400 with a bicubic
filter. One enlarged small image would be smooth and easy to decode (20 KB). A mosaic comes near the
110 KB that ImageNet's files have on average. The mean size is printed. The files lie in the page
cache: decoding is measured, not the disk.

All sides decode, crop at random, resize to 224x224 and mirror, in batches of 64, with the same
number of workers and one torch thread in each process:

    mprun        ImageFolder(...).train_batch(i) on a CPU: float32 [64, 3, 224, 224], normalised by
                 the caller
    bytes        the same up to the transfer to a GPU: uint8 [64, 224, 224, 3]
    torchvision  datasets.ImageFolder, RandomResizedCrop, RandomHorizontalFlip, ToTensor, Normalize,
                 DataLoader(shuffle, persistent_workers), as in PyTorch's ImageNet example: the same
                 float batch

Windows of the three alternate. Before each window the others' workers get time to fill their queues
and become idle, and this side's ready batches are discarded. A ratio is the median over adjacent
windows; the lowest and the highest are beside it. Targets: at least 1.0, aim 1.5.

It also prints the CPU time of all processes of a side, which other work on the machine disturbs
less. With as many workers as cores it determines the speed.
"""

import argparse
import io
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing import active_children
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler
from torchvision import datasets, transforms

from mprun.build.data import build_data
from mprun.config.components.images import ImageFolderConfig
from mprun.data.augmentation import Augmentation
from mprun.data.image_files import find_images
from mprun.data.image_folder import ImageReader
from mprun.data.loader import BatchLoader
from mprun.record.console import markdown_table

BATCH, SIZE, PREFETCH = 64, 224, 2
WIDTH, HEIGHT, QUALITY, COLUMNS, ROWS = 500, 400, 90, 20, 16
SETTLE_S = 1.0  # longer than the workers need to fill their queues
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def make_files(images: Path, folder: Path, count: int) -> float:
    """Make `count` training files in two classes and a few held-out ones; return mean KB."""
    sources = sorted(path for path in images.rglob("*") if path.suffix in (".jpg", ".png"))
    choose, sizes = np.random.default_rng(0), []
    for number in range(count + 4):
        split = "train" if number < count else "val"
        mosaic = Image.new("RGB", (32 * COLUMNS, 32 * ROWS))
        tiles = choose.choice(len(sources), COLUMNS * ROWS, replace=False)
        for place, tile in enumerate(tiles):
            with Image.open(sources[tile]) as image:
                small = image.convert("RGB").resize((32, 32))
            mosaic.paste(small, (32 * (place % COLUMNS), 32 * (place // COLUMNS)))
        path = folder / split / f"class{number % 2}" / f"{number:05}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        content = io.BytesIO()
        large = mosaic.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)
        large.save(content, "JPEG", quality=QUALITY)
        path.write_bytes(content.getvalue())
        sizes.append(len(content.getvalue()))
    return statistics.mean(sizes) / 1000


def ours(folder: Path, workers: int) -> tuple[Iterator[Tensor], Callable]:
    """Return endless batches, and a function that ends the processes."""
    config = ImageFolderConfig(
        root=str(folder), batch_size=BATCH, workers=workers, prefetch=PREFETCH
    )
    source = build_data(config, 0, torch.device("cpu"))
    return (source.train_batch(index)[0] for index in itertools.count()), source.close


def our_bytes(folder: Path, workers: int) -> tuple[Iterator[Tensor], Callable]:
    """Return the same before normalisation."""
    images = find_images(str(folder), layout="classes", eval_share=0.1).train
    reader = ImageReader(images, Augmentation("resized_crop", SIZE), BATCH, seed=0)
    loader = BatchLoader(reader, workers, PREFETCH)
    return (loader.batch(index).images for index in itertools.count()), loader.close


def torchvisions(folder: Path, workers: int) -> tuple[Iterator[Tensor], Callable]:
    """Return the same for the plain recipe."""
    transform = transforms.Compose(
        [
            transforms.RandomResizedCrop(SIZE),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, STD),
        ]
    )
    data = datasets.ImageFolder(str(folder / "train"), transform)
    loader = DataLoader(
        data,
        BATCH,
        # An epoch as long as ImageNet's: a small one would measure the ends of epochs.
        sampler=RandomSampler(data, num_samples=1_280_000),
        num_workers=workers,
        persistent_workers=True,
        prefetch_factor=PREFETCH,
    )
    batches = iter(loader)
    return (images for images, _ in batches), batches._shutdown_workers


SIDES = {"mprun": ours, "bytes": our_bytes, "torchvision": torchvisions}


def window(batches: Iterator[Tensor], processes: list[int], count: int) -> tuple[float, float]:
    """Return images per second and CPU ms per image over `count` batches, none ready before."""
    time.sleep(SETTLE_S)
    for _ in range(len(processes) * PREFETCH + 1):
        check(next(batches))
    started, used = time.perf_counter(), cpu_seconds(processes)
    for _ in range(count):
        next(batches)
    images = count * BATCH
    used = cpu_seconds(processes) - used
    return images / (time.perf_counter() - started), 1000 * used / images


def cpu_seconds(processes: list[int]) -> float:
    """Return user and system time of this process and of `processes`."""
    ticks = 0
    for process in processes:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def check(images: Tensor) -> None:
    """Check that floats are ready for a network, bytes for the transfer, and neither is black."""
    if images.dtype == torch.uint8:
        assert images.shape == (BATCH, SIZE, SIZE, 3) and images.is_shared()
    else:
        assert images.shape == (BATCH, 3, SIZE, SIZE) and abs(float(images.mean())) < 1
    assert images.is_contiguous() and float(images.float().std()) > 0.5


def measure(folder: Path, workers: int, windows: int, count: int) -> dict:
    """Return speed and cost of both, window by window, and their ratios."""
    sides, before = {}, set()
    for name, start in SIDES.items():
        batches, close = start(folder, workers)
        next(batches)
        children = {child.pid for child in active_children()}
        sides[name] = batches, close, list(children - before)
        before = children
    measured = {name: [] for name in sides}
    for _ in range(windows):
        for name, (batches, _, processes) in sides.items():
            assert len(processes) == workers
            measured[name].append(window(batches, processes, count))
    for _, close, _ in sides.values():
        close()
    baseline = measured["torchvision"]
    return {
        "workers": workers,
        "images_per_s": {name: [speed for speed, _ in values] for name, values in measured.items()},
        "cpu_ms": {name: [cost for _, cost in values] for name, values in measured.items()},
        "ratios": {
            name: [a[0] / b[0] for a, b in zip(values, baseline, strict=True)]
            for name, values in measured.items()
        },
        "cpu_ratios": {
            name: [b[1] / a[1] for a, b in zip(values, baseline, strict=True)]
            for name, values in measured.items()
        },
    }


def spread(values: list[float], digits: int) -> str:
    """Format median (lowest-highest)."""
    low, high = min(values), max(values)
    return f"{statistics.median(values):.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--count", type=int, default=512, help="files to make")
    parser.add_argument("--workers", default="1,2")
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--batches", type=int, default=8, help="of a window")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        kilobytes = make_files(arguments.images, Path(folder), arguments.count)
        results = [
            measure(Path(folder), int(workers), arguments.windows, arguments.batches)
            for workers in arguments.workers.split(",")
        ]
    cores = len(os.sched_getaffinity(0))
    print(
        f"{arguments.count} JPEGs of {WIDTH}x{HEIGHT}, quality {QUALITY}, mean {kilobytes:.0f} KB: "
        f"mosaics of {COLUMNS}x{ROWS} images resampled, none of them a photograph of this size. "
        f"{cores} cores; {arguments.windows} windows of {arguments.batches} batches of {BATCH}; "
        "median (lowest-highest); ratio: how many times better than torchvision's recipe."
    )
    header = ["workers", "side", "images/s", "ratio", "CPU ms/image", "ratio"]
    rows = []
    for result in results:
        for name in SIDES:
            cells = [("images_per_s", 0), ("ratios", 2), ("cpu_ms", 2), ("cpu_ratios", 2)]
            cells = [spread(result[key][name], digits) for key, digits in cells]
            rows.append([str(result["workers"]), name, *cells])
    print(markdown_table(header, rows))
    record = {
        "files": {
            "count": arguments.count,
            "width": WIDTH,
            "height": HEIGHT,
            "quality": QUALITY,
            "mean_kilobytes": round(kilobytes, 1),
            "made_of": f"mosaics of {COLUMNS}x{ROWS} images, resampled",
        },
        "cores": cores,
        "torch": torch.__version__,
        "pillow": Image.__version__,
        "results": results,
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    else:
        print(json.dumps(record))


if __name__ == "__main__":
    main()
