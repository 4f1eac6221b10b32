"""The share of FP16 gradients that become 0 if divided by the number of ranks before their sum.

    python -m benchmarks.ranks_underflow [--models lstm_lm,conv_autoencoder,resnet50] [--json FILE]

It takes the gradients of one step of a fresh model, FP16 with FP32 master weights, after backward
at a static loss scale: data-parallel training divides and sums these. It prints the share of
non-zero ones that become 0, and in brackets the relative L2 error of all.
"""

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor

from mprun.build import build
from mprun.config.compose import compose_config
from mprun.distributed.reduction import factors
from mprun.precision import pin_math_flags
from mprun.record.console import markdown_table

RANKS, SCALES = (2, 8, 64, 1024), (1, 1024, 65536)


def gradients(model: str, scale: int) -> list[Tensor]:
    """Return the gradients of a run's second step, times `scale`: float16, one per parameter."""
    words = ["precision=fp16_master", "device=cpu", *([] if scale == 1 else ["scaler=static"])]
    words += [] if scale == 1 else [f"scaler.scale={scale}"]
    config = compose_config([f"model={model}", *words]).config
    pin_math_flags(config.precision.fp32_math)
    torch.manual_seed(config.seed)
    task = build(config, torch.device("cpu")).task
    task.train_step(0)
    (batch,) = task.load(1)
    _, loss = task.loss(batch)
    task.learner.zero_grad()
    loss.backward()
    computed = [own for own, dtype in task.learner.steps.computed() if dtype is torch.float16]
    # FP32 gradients are those of FP16 divided by the scale, a power of two.
    return [(own.grad * scale).half() for own in computed if own.grad is not None]


def lost(made: list[Tensor], ranks: int) -> tuple[float, float]:
    """Divide by `ranks`; return (share of non-zero values that become 0, relative L2 error)."""
    before, _ = factors(ranks, "before")
    divided = [grad / before for grad in made]
    zeros = total = 0
    error = square = 0.0
    for grad, after in zip(made, divided, strict=True):
        known = grad.double() / ranks
        total += int((grad != 0).sum())
        zeros += int(((grad != 0) & (after == 0)).sum())
        error += float((after.double() - known).square().sum())
        square += float(known.square().sum())
    return zeros / total, (error / square) ** 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default="lstm_lm,conv_autoencoder,resnet50")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    rows, found = [], []
    for model in given.models.split(","):
        for scale in SCALES:
            made = gradients(model, scale)
            if not all(bool(torch.isfinite(grad).all()) for grad in made):
                continue  # this scale would be backed off
            shares = {ranks: lost(made, ranks) for ranks in RANKS}
            cells = [f"{share:.2%} ({error:.0e})" for share, error in shares.values()]
            rows.append([model, str(scale), *cells])
            found.append({"model": model, "scale": scale, "lost": shares})
    print(markdown_table(["model", "scale", *map(str, RANKS)], rows))
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
