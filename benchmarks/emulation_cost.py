"""The cost of FP16 emulation on this CPU, relative to float32.

    python benchmarks/emulation_cost.py [--only resnet50] [--repeats 15] [--dtype bfloat16]

One step is forward, loss and backward. The three contenders are float32, half weights under
emulation, and float32 weights with autocast under emulation. They take turns in one process, so
that a slow spell of the machine hits all of them. Each ratio is the median over turns of the CPU
time over float32's, so that other work on the machine counts little. Saved bytes under autocast
include the 16-bit copies of the weights, which a small batch does not outweigh.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

from mprun.precision.emulation import HalfEmulation

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass(frozen=True, slots=True)
class Workload:
    """A network, a batch of inputs, the loss on its float32 output, and the accepted cost."""

    name: str
    batch: int
    target: float
    build: Callable[[], tuple[nn.Module, Tensor, Callable[[Tensor], Tensor]]]


@dataclass(frozen=True, slots=True)
class Row:
    """CPU times in ms per step; ratios to float32; saved bytes leave the parameters out."""

    model: str
    batch: int
    fp32_ms: float
    half_weights: float
    autocast: float
    saved_half_weights: float
    saved_autocast: float
    target: float


class LstmLm(nn.Module):
    def __init__(self, vocab: int, hidden: int, projection: int) -> None:
        super().__init__()
        width = projection or hidden
        self.embedding = nn.Embedding(vocab, width)
        self.lstm = nn.LSTM(width, hidden, 2, proj_size=projection)
        self.decoder = nn.Linear(width, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.decoder(self.lstm(self.embedding(tokens))[0])


def dcgan(latent: int = 100, width: int = 64) -> nn.Sequential:
    """D(G(z)) at 64 px with the published widths."""
    layers: list[nn.Module] = []
    inputs = latent
    for i, outputs in enumerate((width * 8, width * 4, width * 2, width)):
        stride, padding = (1, 0) if i == 0 else (2, 1)
        layers.append(nn.ConvTranspose2d(inputs, outputs, 4, stride, padding, bias=False))
        layers += [nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
        inputs = outputs
    layers += [nn.ConvTranspose2d(width, 3, 4, 2, 1, bias=False), nn.Tanh()]
    inputs = 3
    for i, outputs in enumerate((width, width * 2, width * 4, width * 8)):
        layers.append(nn.Conv2d(inputs, outputs, 4, 2, 1, bias=False))
        layers += [nn.BatchNorm2d(outputs)] if i else []
        layers.append(nn.LeakyReLU(0.2, inplace=True))
        inputs = outputs
    return nn.Sequential(*layers, nn.Conv2d(inputs, 1, 4, bias=False), nn.Flatten())


def classifier(
    build: Callable[..., nn.Module], batch: int, pixels: int
) -> tuple[nn.Module, Tensor, Callable[[Tensor], Tensor]]:
    labels = torch.randint(0, 1000, (batch,))
    inputs = torch.randn(batch, 3, pixels, pixels)
    return build(weights=None), inputs, lambda y: F.cross_entropy(y, labels)


def gan(batch: int) -> tuple[nn.Module, Tensor, Callable[[Tensor], Tensor]]:
    target = torch.ones(batch, 1)
    loss = lambda y: F.binary_cross_entropy_with_logits(y, target)  # noqa: E731
    return dcgan(), torch.randn(batch, 100, 1, 1), loss


def language_model(
    steps: int, batch: int, projection: int, vocab: int = 2000
) -> tuple[nn.Module, Tensor, Callable[[Tensor], Tensor]]:
    tokens = torch.randint(0, vocab, (steps, batch))
    loss = lambda y: F.cross_entropy(y.flatten(0, 1), tokens.flatten())  # noqa: E731
    return LstmLm(vocab, 512, projection), tokens, loss


def workloads() -> list[Workload]:
    models = torchvision.models
    rows = [
        Workload("resnet50", 32, 1.3, lambda: classifier(models.resnet50, 32, 32)),
        Workload("dcgan", 32, 1.3, lambda: gan(32)),
        Workload("alexnet", 32, 1.3, lambda: classifier(models.alexnet, 32, 224)),
    ]
    for projection in (0, 128):
        for steps in (20, 35):
            for batch in (16, 64):
                name = f"lstm_lm T{steps}" + (f" proj{projection}" if projection else "")
                rows.append(
                    Workload(
                        name,
                        batch,
                        1.5,
                        lambda s=steps, b=batch, p=projection: language_model(s, b, p),
                    )
                )
    return rows


def halve(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return the model in `dtype` with its BatchNorm layers in float32."""
    model = model.to(dtype)
    for module in model.modules():
        if isinstance(module, NORMS):
            module.float()
    return model


def saved_bytes(model: nn.Module, forward: Callable[[], Tensor]) -> int:
    """Count the bytes of distinct storages kept for backward, without parameters."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(t: Tensor) -> Tensor:
        kept.setdefault(t.untyped_storage().data_ptr(), t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = forward()
    sizes = [t.untyped_storage().nbytes() for ptr, t in kept.items() if ptr not in own]
    del loss
    return sum(sizes)


def turns(
    work: Workload, repeats: int, dtype: torch.dtype
) -> tuple[tuple[list[float], list[float], list[float]], list[int]]:
    """Return CPU seconds of each turn (float32, half weights, autocast), and saved bytes."""
    torch.manual_seed(0)
    model, inputs, loss = work.build()
    half_inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
    emulation = HalfEmulation(dtype)
    contenders = [
        (model, inputs, nullcontext, nullcontext),
        (halve(copy.deepcopy(model), dtype), half_inputs, lambda: emulation, nullcontext),
        (
            copy.deepcopy(model),
            inputs,
            lambda: emulation,
            lambda: torch.autocast("cpu", dtype),
        ),
    ]
    times: list[list[float]] = [[] for _ in contenders]
    saved = []
    for net, x, mode, cast in contenders:

        def forward(net=net, x=x, cast=cast) -> Tensor:
            with cast():
                y = net(x)
            return loss(y.float()) * 1024

        with mode():
            saved.append(saved_bytes(net, forward))
    for turn in range(repeats + 2):
        for (net, x, mode, cast), spent in zip(contenders, times, strict=True):
            net.zero_grad(set_to_none=True)
            start = time.process_time()
            with mode():
                with cast():
                    y = net(x)
                (loss(y.float()) * 1024).backward()
            if turn >= 2:
                spent.append(time.process_time() - start)
    base, half, cast = times
    return (base, half, cast), saved


def measure(work: Workload, repeats: int, dtype: torch.dtype) -> Row:
    (base, half, cast), saved = turns(work, repeats, dtype)
    return Row(
        work.name,
        work.batch,
        statistics.median(base) * 1e3,
        statistics.median(h / b for h, b in zip(half, base, strict=True)),
        statistics.median(c / b for c, b in zip(cast, base, strict=True)),
        saved[1] / saved[0],
        saved[2] / saved[0],
        work.target,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="measure only models with this in their name")
    parser.add_argument("--repeats", type=int, default=15, help="turns measured; two more warm up")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
    parser.add_argument("--json", metavar="FILE", help="also write the rows to FILE")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    columns = ("model", "batch", "fp32 ms", "half weights", "autocast")
    columns += ("saved, half", "saved, autocast", "target")
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    rows = []
    for work in workloads():
        if args.only not in work.name:
            continue
        r = measure(work, args.repeats, getattr(torch, args.dtype))
        rows.append(r)
        print(
            f"| {r.model} | {r.batch} | {r.fp32_ms:.1f} | {r.half_weights:.2f}x "
            f"| {r.autocast:.2f}x | {r.saved_half_weights:.2f}x "
            f"| {r.saved_autocast:.2f}x | {r.target} |",
            flush=True,
        )
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump([asdict(r) for r in rows], file, indent=1)


if __name__ == "__main__":
    main()
