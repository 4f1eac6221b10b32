"""The runner's cost per step over a bare PyTorch loop: same process, same batches, in turns.

    python benchmarks/runner_overhead.py [--pairs 7] [--json FILE]

Each pair is one bare loop and one `mprun.training.loop.train` of the same length in FP32, in
alternating order. The ratio is taken pair by pair (a machine's drift cancels); the result is the
median. It uses CPU time of one thread, so that other work on the machine counts little. The
runner's time includes logging every 10 (ResNet-50) or 50 steps to metrics.jsonl and TensorBoard,
and the set-up of a run; the one evaluation at the end is subtracted. The process keeps freed
memory. Otherwise the kernel's page faults, up to a tenth of the time, hit the side that comes first
after a model was built. Targets: at most 1.03 for ResNet-50 (batch 32, 32 px, 30 steps) and at most
1.10 for a tiny language model (3,000 steps).
"""

import argparse
import contextlib
import io
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch.nn import functional as F

from mprun.build import build
from mprun.config.compose import compose_config
from mprun.training.loop import Loop
from mprun.training.signals import Interruption

CASES = {
    "ResNet-50, batch 32, 32 px": (
        ["model=resnet50", "optim=sgd", "train.steps=30", "train.log_every=10"],
        1.03,
    ),
    "tiny LM, 1 x 32, 8 x 16 tokens": (
        [
            "model=lstm_lm",
            "data=docs_chars",
            "data.batch_size=8",
            "data.sequence_length=16",
            "model.embedding_size=16",
            "model.hidden_size=32",
            "model.num_layers=1",
            "train.steps=3000",
            "train.log_every=50",
            "train.clip_norm=null",
        ],
        1.10,
    ),
}


def keep_freed_memory() -> None:
    """Restart this process once with a glibc that returns no memory (mallopt(3))."""
    if "MALLOC_TRIM_THRESHOLD_" not in os.environ:
        os.environ |= {"MALLOC_TRIM_THRESHOLD_": str(2**34), "MALLOC_MMAP_MAX_": "0"}
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def bare_loop(built, config) -> float:
    """Return the seconds of the same steps as in PyTorch's tutorial (fused optimizer)."""
    task, optim = built.task, config.optim
    model, data = task.learner.model, task.data
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=optim.lr,
        momentum=optim.momentum,
        weight_decay=optim.weight_decay,
        fused=True,
    )
    language_model = config.model.name == "lstm_lm"
    state = None
    started = time.process_time()
    for step in range(built.steps):
        inputs, targets = data.train_batch(step)
        optimizer.zero_grad()
        if language_model:
            if step % data.batches_per_epoch == 0:
                state = None
            logits, state = model(inputs, state)
            state = tuple(part.detach() for part in state)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        else:
            loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
    loss.item()
    return time.process_time() - started


def with_runner(built, config) -> float:
    """Return the runner's seconds for the same steps, without its final evaluation."""
    evaluate, evaluation = built.task.evaluate, []

    def timed() -> dict[str, float]:
        before = time.process_time()
        values = evaluate()
        evaluation.append(time.process_time() - before)
        return values

    built.task.evaluate = timed
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        started = time.process_time()
        Loop(built, config, Path(folder), Interruption()).train()
        return time.process_time() - started - sum(evaluation)


def measure(name: str, pairs: int) -> dict:
    """Measure one case in `pairs` pairs after a warm-up: times in ms per step, ratio by pair."""
    overrides, target = CASES[name]
    config = compose_config([*overrides, "device=cpu"]).config
    ratios, bare, runner = [], [], []
    for pair in range(pairs + 1):
        times = {}
        for contender in (bare_loop, with_runner)[:: 1 if pair % 2 else -1]:
            torch.manual_seed(0)
            built = build(config, torch.device("cpu"))
            times[contender] = contender(built, config)
        if pair == 0:
            continue  # warm-up
        ratios.append(times[with_runner] / times[bare_loop])
        bare.append(1000 * times[bare_loop] / built.steps)
        runner.append(1000 * times[with_runner] / built.steps)
    return {
        "case": name,
        "bare_ms": bare,
        "runner_ms": runner,
        "ratios": ratios,
        "ratio": statistics.median(ratios),
        "target": target,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    print("| case | bare ms/step | runner ms/step | ratio | min-max | target |")
    print("|---|---|---|---|---|---|")
    for name in CASES:
        found = measure(name, arguments.pairs)
        results.append(found)
        ratios = found["ratios"]
        print(
            f"| {name} | {statistics.median(found['bare_ms']):.3f} "
            f"| {statistics.median(found['runner_ms']):.3f} | {found['ratio']:.3f} "
            f"| {min(ratios):.3f}-{max(ratios):.3f} | {found['target']} |",
            flush=True,
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    keep_freed_memory()
    main()
