"""A rank of several on the fake device: engines, modes and tasks; no step waits for the device.

DistributedDataParallel orders its buckets anew in the second step, and waits once for it.

torch's fake process group stands for NCCL, which itself is not run here: DistributedDataParallel's
buckets, its hook and streams, casts, sums' sizes and the update are.
"""

import pytest

from mprun.precision import get_policy

from .cells import MODELS, MODES

SCRIPT = """
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from mprun.assembly import build
from mprun.config.compose import compose_config
from mprun.precision import pin_math_flags
from tests.distributed.fake_ranks import FakeRanks

def answer():
    config = compose_config({overrides!r}).config
    config.devices = "2"
    pin_math_flags(config.precision.fp32_math)
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        built = build(config, torch.device("cuda"), FakeRanks(1, 2))
        for step in range(5):
            torch.cuda.set_sync_debug_mode("error" if step >= 2 else "default")
            metrics = built.stepper.eager_step(step, step == 3)
        torch.cuda.set_sync_debug_mode("default")
        networks = [type(l.network).__name__ for l in built.task.learners.values()]
        return {{"networks": networks, "metrics": sorted(metrics),
                "graph": built.stepper.description["cuda_graph"]}}
    finally:
        torch.cuda.set_sync_debug_mode("default")
        dist.destroy_process_group()
"""
# The cheapest first, which is in the default run.
TASKS = {
    "conv_autoencoder": [*MODELS["conv_autoencoder"], "train.accumulate=2"],
    "resnet50": [*MODELS["resnet50"], "train.accumulate=4"],
    "lstm_lm, 2 layers, dropout": MODELS["lstm_lm, 2 layers, dropout"],
    "dcgan": [*MODELS["dcgan"], "train.accumulate=2"],
    "gpt": [own for own in [*MODELS["gpt"], "train.accumulate=2"] if "eps" not in own],
}
ENGINES = {"ddp": "dist.engine=auto", "flat": "dist.engine=flat", "fixed": "dist.order=fixed"}
# FP8 is of linear layers, output layers left out: none but the transformer has one.
CASES = [("gpt", mode, engine) for mode in MODES if get_policy(mode).matmul for engine in ENGINES]
for place, mode in enumerate(mode for mode in MODES if not get_policy(mode).matmul):
    for turn, task in enumerate(TASKS, place):  # each mode and each task with each engine
        CASES.append((task, mode, [*ENGINES][turn % len(ENGINES)]))
CASES.sort(key=lambda case: [*TASKS].index(case[0]))


@pytest.mark.parametrize(("task", "mode", "engine"), CASES)
@pytest.mark.few(1)
def test_a_rank_in_every_mode(script, task, mode, engine):
    own = [*TASKS[task], f"precision={mode}", ENGINES[engine], "device=cuda", "threads=1"]
    if mode in ("fp16_naive", "bf16_naive"):
        own.append("optim=sgd")
    found = script(SCRIPT.format(overrides=own))
    # DistributedDataParallel sums FP32 gradients of BF16 weights not at all.
    in_fp32 = mode in ("bf16_stochastic", "bf16_kahan")
    overlapped = engine != "flat" and task != "dcgan" and not in_fp32
    assert (found["networks"][0] == "DistributedDataParallel") == overlapped
    assert "ranks exchange gradients in a step" in found["graph"]
    assert {"loss", "loss_scale"} <= set(found["metrics"])
