"""The cost of `mprun.prepare` on a CUDA device, from the host: memory, launches, milliseconds.

    python -m benchmarks.script_host [--models resnet50,gpt] [--modes fp32,amp,...]

Each cell runs in a separate process on the fake CUDA device: kernels do nothing,
but torch's allocator and launches are real. Beside the modes are plain torch in FP32 and the recipe
of torch.amp in FP16. Bytes and launches are exact. Milliseconds are the lowest of TIMED steps of
this processor, because other work only adds time.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torchvision.models import resnet50

import mprun
from tests.fake_cuda import runtime as fake_cuda

WARM_UP, COUNTED, TIMED = 6, 3, 60
PEERS = ("plain", "torch.amp")
MODES = "fp32,fp16_master,fp16_master_scaled,amp,bf16_master,amp_bf16"


class Transformer(nn.Module):
    """A decoder of GPT-2's small size from torch's layers."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(768, 12, 3072, 0.0, batch_first=True, norm_first=True)
        self.embedding, self.output = nn.Embedding(50304, 768), nn.Linear(768, 50304, bias=False)
        self.layers = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)

    def forward(self, tokens):
        return self.output(self.layers(self.embedding(tokens))).flatten(0, 1)


def model_and_batch(name: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Return a model on the device, its inputs and its labels."""
    if name == "resnet50":
        labels = torch.zeros(32, dtype=torch.long, device="cuda")
        return resnet50().cuda(), torch.zeros(32, 3, 224, 224, device="cuda"), labels
    tokens = torch.zeros(8, 512, dtype=torch.long, device="cuda")
    return Transformer().cuda(), tokens, tokens.flatten()


def step_of(name: str, mode: str) -> Callable[[], None]:
    """Return a training step in a mode or of a peer."""
    model, inputs, labels = model_and_batch(name)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    recipe = mode == "torch.amp"
    scaler = torch.amp.GradScaler("cuda", enabled=recipe)
    if mode not in PEERS:
        model, optimizer = mprun.prepare(model, optimizer, mode)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16, enabled=recipe):
            loss = F.cross_entropy(model(inputs).float(), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    def plain_step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs).float(), labels).backward()
        optimizer.step()

    return step if recipe else plain_step


def measured(name: str, mode: str) -> dict[str, float]:
    """Return the numbers of one cell, in this process."""
    step = step_of(name, mode)
    for _ in range(WARM_UP):
        step()
    torch.cuda.reset_peak_memory_stats()
    before = fake_cuda.counts()
    for _ in range(COUNTED):
        step()
    counted, peak = fake_cuda.counts() - before, torch.cuda.max_memory_allocated()
    times = []
    for _ in range(TIMED):
        started = time.perf_counter()
        step()
        times.append(1000 * (time.perf_counter() - started))
    return {
        "peak MiB": peak / 2**20,
        "launches": (counted.launches + counted.driver_launches) / COUNTED,
        "library calls": counted.library_calls / COUNTED,
        "copies": (counted.copies + counted.memsets) / COUNTED,
        "waits": counted.waits / COUNTED,
        "host ms": min(times),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default="resnet50,gpt")
    parser.add_argument("--modes", default=MODES)
    parser.add_argument("--cell", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cell:
        print(json.dumps(measured(*options.cell)))
        return
    with tempfile.TemporaryDirectory() as folder:
        fake_cuda.build(Path(folder))
        environment = fake_cuda.environment(Path(folder))
        header = None
        for name in options.models.split(","):
            for mode in (*PEERS, *options.modes.split(",")):
                command = [sys.executable, "-m", "benchmarks.script_host", "--cell", name, mode]
                done = subprocess.run(command, env=environment, capture_output=True, text=True)
                if done.returncode:
                    raise SystemExit(f"{name} {mode}: {done.stderr.strip()[-500:]}")
                found = json.loads(done.stdout.splitlines()[-1])
                if header is None:
                    header = ["model", "mode", *found]
                    print("| " + " | ".join(header) + " |")
                    print("|---" * len(header) + "|")
                cells = [
                    f"{value:,.{2 if key == 'host ms' else 0}f}" for key, value in found.items()
                ]
                print("| " + " | ".join([name, mode, *cells]) + " |", flush=True)


if __name__ == "__main__":
    main()
