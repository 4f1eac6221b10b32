"""The size of bigLSTM, counted and, with --run, trained: 1.777 B parameters, 793,472 words.

    python benchmarks/biglstm_size.py                        bytes by kind, every mode
    python benchmarks/biglstm_size.py --run --precision fp32 [--steps 2] [--batch-size 128]

The count is arithmetic over the shapes of the model (`count`). It is checked against the bytes that
a small instance of the model holds after a step, as in run.json. --run trains the full model with
the task of a run and the settings of the published code (okuchaiev/f-lm), on tokens with a Zipf
distribution. It prints seconds per step, tokens per second and the peak of resident memory.

Measured (2 cores of a shared machine, 24 GiB, batch 128 x 20, two steps, 2026-11-20):

    fp32                held 15.48 GB as counted, peak 18.05 GB, 112 and 152 s a step, 23 tokens/s
    fp16_master_scaled  held 16.06 GB as counted, peak 18.31 GB, 69 and 47 s a step, 54 tokens/s

FP16 is faster because its LSTM is emulated with one product for all time steps, while torch's CPU
library has no LSTM with projection. The other load on the machine differed, too.
"""

import argparse
import json
import os
import time

import torch

from mprun.build import build
from mprun.config.compose import compose_config
from mprun.config.option_files import modes
from mprun.errors import BadInput
from mprun.models.lstm import SampledLSTM
from mprun.numerics.operations import FirstStep
from mprun.precision import get_policy, pin_math_flags
from mprun.record import memory

GIB = 2**30
# Measured in FP32 on a CPU (20,000 words, 128 x 20 tokens): activations and an update's memory.
BYTES_PER_TOKEN = 850_000
SPARE = 1.5 * GIB  # for other processes
PUBLISHED = [
    "model=biglstm",
    "model.time_reduction=sum",
    "model.embedding_gradient_factor=128",
    "train.clip_norm=1",
    "train.clip_modules=[lstm]",
    "optim.average_decay=0.999",
    "optim.average_modules=[lstm]",
    "data=synthetic_tokens",
    "data.sequence_length=20",
]
# model=biglstm: embedding, hidden, layers, projection; its full vocabulary.
SIZE, VOCABULARY = (1024, 8192, 2, 1024), 793_472
SMALL = ["model.embedding_size=24", "model.hidden_size=64", "model.projection_size=16"]


def shapes(vocabulary, embedding, hidden, layers, projection, candidates) -> dict[str, int]:
    """Count the parameters of the LSTM and of the tables on the meta device."""
    with torch.device("meta"):
        model = SampledLSTM(
            vocabulary,
            embedding_size=embedding,
            hidden_size=hidden,
            num_layers=layers,
            projection_size=projection,
            candidates=candidates,
        )
    lstm = sum(p.numel() for p in model.lstm.parameters())
    return {"lstm": lstm, "tables": sum(p.numel() for p in model.parameters()) - lstm}


def count(size: dict[str, int], mode: str, rows: int, tensors: int, ids: int = 0) -> dict[str, int]:
    """Count bytes by kind.

    rows: numbers in the rows of a step; tensors: of the model; ids: numbers of rows in gradients.
    """
    policy = get_policy(mode)
    width = 4 if policy.master_dtype is not None else policy.param_dtype.itemsize
    kept = width if policy.masters == "none" else 4
    if policy.rounding == "kahan":
        kept += width  # what rounding took away
    kinds = {
        "parameters": (size["lstm"] + size["tables"]) * width,
        "gradients": (size["lstm"] + rows) * policy.grad_dtype.itemsize + 8 * ids,
        "optimizer_state": (size["lstm"] + size["tables"]) * kept + 4 * tensors,
        "weight_average": size["lstm"] * 4,
    }
    return {kind: number for kind, number in kinds.items() if number}


def used_rows(embedding: int, output: int, tokens: int, candidates: int) -> int:
    """Count the numbers in a step's rows: those of tokens, targets and candidates."""
    return tokens * embedding + (tokens + candidates) * (output + 1)


def check(mode: str) -> str:
    """Compare the count of a small instance with its memory after a step; raise if they differ."""
    vocabulary, candidates, tokens = 500, 64, 4 * 20
    task = built(
        mode,
        [
            *SMALL,
            f"data.vocab_size={vocabulary}",
            "data.batch_size=4",
            f"model.sampled_softmax={candidates}",
            "data.train_tokens=1000",
        ],
    ).task
    with FirstStep(task, task.policy, {}) as first:
        task.train_step(0)
    held = {kind: sum(sizes.values()) for kind, sizes in first.memory().items()}
    lstm = list(task.learner.model.lstm.parameters())
    size = shapes(vocabulary, 24, 64, 2, 16, candidates)
    rows = used_rows(24, 16, tokens, candidates)
    expected = count(size, mode, rows, len(lstm) + 3, 3 * tokens + 2 * candidates)
    # Activations, and their casts under autocast, depend on kernels and are only measured.
    held = {kind: number for kind, number in held.items() if kind in expected}
    if held != expected:
        raise SystemExit(f"{mode}: counted {expected}, held {held}")
    return f"{mode:<20} {sum(held.values()):>9} bytes in {len(held)} kinds: as counted"


def built(mode: str, overrides: list[str]):
    config = compose_config([*PUBLISHED, *overrides, f"precision={mode}", "device=cpu"]).config
    pin_math_flags(config.precision.fp32_math)
    torch.manual_seed(0)
    return build(config, torch.device("cpu"))


class ZipfTokens:
    """A replacement for a task's data: words with P(k) near 1 / k, the log-uniform distribution."""

    def __init__(self, source, vocabulary: int, batch_size: int, length: int):
        self._source = source
        generator = torch.Generator().manual_seed(0)
        uniform = torch.rand(8 * length + 1, batch_size, generator=generator, dtype=torch.float64)
        self._tokens = ((vocabulary + 1) ** uniform).long().sub_(1).clamp_(0, vocabulary - 1)
        self._length = length

    def train_batch(self, index: int):
        start = index % 8 * self._length
        stop = start + self._length
        return self._tokens[start:stop], self._tokens[start + 1 : stop + 1]

    def __getattr__(self, name: str):
        return getattr(self._source, name)


def run(mode: str, steps: int, batch_size: int, vocabulary: int) -> dict:
    """Train `steps` steps of the full model and measure them."""
    needed = count(
        shapes(vocabulary, *SIZE, 8192),
        mode,
        used_rows(1024, 1024, batch_size * 20, 8192),
        13,
    )
    wanted, free = sum(needed.values()) + batch_size * 20 * BYTES_PER_TOKEN, available()
    print(f"needs about {wanted / GIB:.1f} GiB, free are {free / GIB:.1f} GiB", flush=True)
    if wanted + SPARE > free:
        raise SystemExit("too little free memory: nothing was started")
    started = time.perf_counter()
    sizes = [f"data.vocab_size={vocabulary}", f"data.batch_size={batch_size}"]
    # The factor that the paper (arXiv 1710.03740) uses for bigLSTM.
    scaler = ["scaler=static", "scaler.scale=128"] if mode == "fp16_master_scaled" else []
    task = built(mode, [*sizes, *scaler]).task
    task.data = ZipfTokens(task.data, vocabulary, batch_size, 20)
    parameters = sum(p.numel() for p in task.learner.model.parameters())
    print(
        f"{parameters:,} parameters built in {time.perf_counter() - started:.0f} s, "
        f"resident {resident() / GIB:.2f} GiB",
        flush=True,
    )
    seconds = []
    for step in range(steps):
        started = time.perf_counter()
        metrics = task.train_step(step, measure=True)
        seconds.append(time.perf_counter() - started)
        values = "  ".join(f"{name} {float(value):.6g}" for name, value in metrics.items())
        print(f"step {step + 1}: {seconds[-1]:.1f} s  {values}", flush=True)
    fastest = min(seconds)
    return {
        "precision": mode,
        "parameters": parameters,
        "batch_size": batch_size,
        "sequence_length": 20,
        "threads": torch.get_num_threads(),
        "seconds": [round(s, 2) for s in seconds],
        "tokens_per_s": round(batch_size * 20 / fastest, 1),
        "held_bytes": sum(
            sum(sizes.values()) for sizes in memory.memory_by_kind([task.learner]).values()
        ),
        "peak_resident_bytes": memory.peak(torch.device("cpu"))["peak_bytes"],
    }


def available() -> int:
    with open("/proc/meminfo", encoding="utf-8") as file:
        fields = dict(line.split(":") for line in file)
    return int(fields["MemAvailable"].split()[0]) * 1024


def resident() -> int:
    with open("/proc/self/statm", encoding="utf-8") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--run", action="store_true")
    parser.add_argument("--precision", default="fp32", choices=sorted(modes()))
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json")
    options = parser.parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    if options.run:
        try:
            result = run(options.precision, options.steps, options.batch_size, options.vocabulary)
        except BadInput as error:
            raise SystemExit(str(error)) from error
    else:
        full = shapes(VOCABULARY, *SIZE, 8192)
        rows = used_rows(1024, 1024, 128 * 20, 8192)
        dense = {mode: sum(full.values()) for mode in modes()}
        print(
            f"parameters: {full['lstm']:,} in the LSTM (65,536 of them torch's second bias), "
            f"{full['tables']:,} in the tables, {dense['fp32']:,} together\n"
        )
        result = {"parameters": full, "rows": rows, "modes": {}}
        for mode in modes():
            kinds = count(full, mode, rows, 13)
            result["modes"][mode] = kinds
            text = "  ".join(f"{kind} {number / 1e9:.3f}" for kind, number in kinds.items())
            print(f"{mode:<20} {sum(kinds.values()) / 1e9:6.2f} GB: {text}")
        print("\ncheck against a small instance")
        for mode in modes():
            # TF32 is FP32 in memory, and not on a CPU; the model has no layer for FP8 and FP4.
            if mode != "tf32" and get_policy(mode).products is None:
                print(check(mode))
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)
    if options.run:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
