"""The usefulness of the sliced Wasserstein distance of DCGAN's samples, on the digits.

    python benchmarks/sample_metric.py [--part sets|gan|choices] [--size 32] [--points 0,100,300]
        [--seeds 3] [--json FILE]

sets: the distance of the held-out digits to training digits (the floor: equally many images of the
same distribution) and to damaged copies of themselves. gan: the distance to DCGAN's samples after
each of --points steps of FP32 training, with the standard deviation over seeds of the last point
and of the mean of the last five. choices: the effect of the numbers of patches and directions, and
the cost of an evaluation. docs/sample_metric.md quotes it. All parts take about four minutes on one
core.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from torch.nn import functional as F

from mprun.build import build
from mprun.config.compose import compose_config
from mprun.data import DigitsImages
from mprun.precision import pin_math_flags
from mprun.tasks import SampleDistance


def digits(size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (held out, training images, labels of the training images, labels held out)."""
    data = DigitsImages(size, batch_size=360, seed=0, device="cpu", value_range="tanh")
    [(held_out, held_labels)] = data.eval_batches()
    batches = [data.train_batch(index) for index in range(data.batches_per_epoch)]
    images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    return held_out, images, labels, held_labels


def image_sets(size: int) -> dict[str, torch.Tensor]:
    """Yield the sets to compare with the held-out digits, 360 images each."""
    real, train, labels, _ = digits(size)
    random = torch.Generator().manual_seed(0)
    noise = torch.randn(real.shape, generator=random)
    one = train[labels == 3]
    box = F.avg_pool2d(F.pad(real, (2, 2, 2, 2), mode="reflect"), 5, 1)
    parts = train[: 360 * (len(train) // 360)].split(360)
    sets = {f"training digits, part {i + 1}": part for i, part in enumerate(parts)}
    sets["the same digits, mirrored left to right"] = real.flip(3)
    sets["the same digits, upside down"] = real.flip(2)
    sets["the same digits, shifted by 4 pixels"] = real.roll(4, dims=3)
    sets["the same digits, memorised: each of 36 ten times"] = real[:36].repeat(10, 1, 1, 1)
    sets["one class only (3)"] = one[torch.arange(360) % len(one)]
    sets["one image 360 times"] = real[:1].expand_as(real)
    sets["pixel values + 0.05"] = real + 0.05
    sets["pixel values + 0.2"] = real + 0.2
    sets["contrast 0.9"] = real * 0.9
    sets["blurred, 5x5 box"] = box
    sets["noise of sd 0.02 added"] = real + 0.02 * noise
    sets["noise of sd 0.1 added"] = real + 0.1 * noise
    sets["a constant (the background)"] = torch.full_like(real, -1.0)
    sets["noise, uniform in -1..1"] = torch.rand(real.shape, generator=random) * 2 - 1
    return sets


def gan_distances(size: int, points: list[int], seed: int) -> list[float]:
    """Return the metric of an FP32 run of DCGAN at each of `points` (steps)."""
    config = compose_config(
        [
            "model=dcgan",
            "compare.metric=sliced_wasserstein",
            "device=cpu",
            f"data.image_size={size}",
            f"train.steps={max(points)}",
            f"seed={seed}",
        ]
    ).config
    pin_math_flags("ieee")
    torch.manual_seed(seed)
    task = build(config, torch.device("cpu")).task
    found = []
    for step in range(max(points) + 1):
        if step in points:
            found.append(task.evaluate()["sliced_wasserstein"])
        if step < max(points):
            task.train_step(step)
    return found


def measure_sets(size: int) -> dict:
    real, _, _, _ = digits(size)
    distance, found = SampleDistance(size, 3, "cpu"), {}
    print(f"{size}x{size}: distance to the 360 held-out digits, mean (levels, finest first)")
    for name, images in image_sets(size).items():
        levels = distance.by_level([real], [images])
        mean = statistics.fmean(levels)
        found[name] = {"mean": mean, "levels": levels}
        print(f"  {name:50} {mean:8.4f}   {' '.join(f'{v:.4f}' for v in levels)}", flush=True)
    return found


def measure_gan(size: int, points: list[int], seeds: int) -> dict:
    print(f"{size}x{size}: DCGAN, FP32, after {points} steps")
    found = {}
    for seed in range(seeds):
        started = time.perf_counter()
        found[seed] = gan_distances(size, points, seed)
        seconds = time.perf_counter() - started
        shown = " ".join(f"{v:.4f}" for v in found[seed])
        print(f"  seed {seed}: {shown}  ({seconds:.0f} s)", flush=True)
    for last in (1, 5):
        if len(points) > last and seeds > 1:
            ends = [statistics.fmean(values[-last:]) for values in found.values()]
            mean, deviation = statistics.fmean(ends), statistics.stdev(ends)
            print(
                f"  mean of the last {last}: {mean:.4f}, sd over seeds {deviation:.4f} "
                f"({100 * deviation / mean:.1f} %)"
            )
    return found


def measure_choices(size: int) -> dict:
    print("patches x directions: floor and one class over 4 draws of them, mean +- sd, seconds")
    real, train, _, _ = digits(size)
    one = image_sets(size)["one class only (3)"]
    found = {}
    for patches, directions in ((128, 512), (64, 128), (16, 64)):
        rows, started = [], time.perf_counter()
        for seed in range(4):
            own = SampleDistance(size, 3, "cpu", patches=patches, directions=directions, seed=seed)
            rows.append([own([real], [images]) for images in (train[:360], one)])
        seconds = (time.perf_counter() - started) / (2 * len(rows))
        found[f"{patches} x {directions}"] = {"rows": rows, "seconds": seconds}
        text = "  ".join(
            f"{statistics.fmean(v):.4f} +- {statistics.stdev(v):.4f}"
            for v in zip(*rows, strict=True)
        )
        print(f"  {patches:4} x {directions:3}:  {text}  {seconds:.2f} s", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", choices=("sets", "gan", "choices"), action="append")
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--points", default="0,100,300")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    parts = options.part or ["sets", "gan", "choices"]
    results: dict = {"size": options.size}
    if "sets" in parts:
        results["sets"] = measure_sets(options.size)
    if "gan" in parts:
        points = sorted({int(point) for point in options.points.split(",")})
        results["gan"] = measure_gan(options.size, points, options.seeds)
    if "choices" in parts:
        results["choices"] = measure_choices(options.size)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
