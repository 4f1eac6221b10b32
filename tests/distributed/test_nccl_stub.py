"""torch's own ProcessGroupNCCL over a stub of libnccl, on the fake CUDA device: who hung is named.

Two ranks, started by mprun's launcher; each sees both GPUs, or one alone, as by srun
--gpus-per-task=1. A collective ends when both ranks have begun it, and nothing is exchanged: losses
mean nothing.
"""

import os
import subprocess
import sys
import time

import pytest
import torch

from ..fake_cuda import runtime as fake_cuda
from ..helpers import record_of
from .processes import ROOT, with_word

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_nccl_available(), reason="a torch without NCCL"),
]
TIMEOUT_S = 8
RUN = [
    *("model=gpt", "data=synthetic_tokens", "model.hidden_size=32", "model.num_layers=1"),
    *("model.num_heads=2", "data.batch_size=4", "data.sequence_length=16", "precision=amp"),
    *("optim.schedule=constant", "optim.warmup_updates=0", "train.steps=12", "train.log_every=1"),
    "train.accumulate=2",
    *("train.eval_every=6", "train.checkpoint_every=6", f"dist.timeout_s={TIMEOUT_S}"),
    *("devices=2", "device=cuda", "threads=1"),
]
LAUNCH = "import sys; from mprun.distributed.launch import launch; sys.exit("
LAUNCH += "launch(sys.argv[1:], 2, module='tests.distributed.nccl_rank'))"


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    """A folder with the fake CUDA runtime and the stub of NCCL."""
    folder = tmp_path_factory.mktemp("nccl")
    try:
        fake_cuda.build(folder)
    except RuntimeError as error:
        pytest.skip(f"no fake CUDA runtime: {error}")
    stub = ROOT / "tests" / "distributed" / "nccl_stub.c"
    command = ["cc", "-O1", "-shared", "-fPIC", "-w", stub, "-o", folder / "libncclstub.so", "-ldl"]
    subprocess.run(command, check=True)
    return folder


def ended(libraries, tmp_path, *words, fault="none", gpus=1):
    """A run of two ranks: the process, its record, what each rank has begun, and the last entry."""
    tmp_path.mkdir(exist_ok=True)
    board, variables = tmp_path / "board", fake_cuda.environment(libraries, devices=gpus)
    board.write_bytes(bytes(8 * 64))
    variables["LD_PRELOAD"] = f"{libraries / 'libncclstub.so'}:{variables['LD_PRELOAD']}"
    variables |= {"NCCL_STUB_BOARD": str(board), "TRITON_CACHE_DIR": str(libraries / "triton")}
    variables |= {"FAULT": fault, "FAULT_AT": str(tmp_path / "at"), "PYTHONPATH": str(ROOT)}
    arguments = [*RUN, f"output_dir={tmp_path / 'run'}", *words]
    done = subprocess.run(
        [sys.executable, "-c", LAUNCH, *arguments],
        env=variables | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (tmp_path / "run").exists(), done.stderr
    counts = memoryview(board.read_bytes()).cast("q")
    return done, record_of(tmp_path / "run"), list(counts[:2]), counts[63]


@pytest.mark.parametrize(("engine", "gpus"), [("ddp", 2), ("flat", 1), ("fsdp", 2)])
def test_to_its_end(libraries, engine, gpus, tmp_path):
    """On two GPUs each rank takes its own."""
    done, record, begun, taken_down = ended(libraries, tmp_path, f"dist.engine={engine}", gpus=gpus)
    assert done.returncode == 0, done.stderr
    assert (record["status"], record["ranks"]["backend"]) == ("done", "nccl")
    assert record["ranks"]["engine"] == engine
    assert begun[0] == begun[1] > 12
    assert taken_down == 2  # by destroy_process_group
    assert "destroy_process_group" not in done.stderr
    own = [(tmp_path / f"at-gpu-of-{rank}").read_text() for rank in range(2)]
    assert own == ["0", str(gpus - 1)]


@pytest.mark.parametrize("order", ["fast", "fixed"])
def test_exchanges_in_a_graph(libraries, order, tmp_path):
    """Three eager steps, a capture with its exchanges, and replays, which begin none anew."""
    words = ("dist.engine=flat", f"dist.order={order}", "train.cuda_graph=on")
    done, record, begun, taken_down = ended(libraries, tmp_path, *words)
    assert done.returncode == 0, done.stderr
    assert (record["status"], record["execution"]["cuda_graph"]) == ("done", "on")
    assert record["execution"]["replayed"] == 9
    _, eager, other, _ = ended(libraries, tmp_path / "eager", *words[:2])
    assert "train.cuda_graph=on dist.engine=flat" in eager["execution"]["cuda_graph"]
    assert begun[0] == begun[1] < other[0] == other[1]
    assert taken_down == 2


@pytest.mark.parametrize("kind", ["hung", "stopped"])
@pytest.mark.parametrize("engine", ["ddp", "flat", "flat, in a graph"])
def test_the_rank_that_hangs_is_named(libraries, engine, kind, tmp_path):
    """Not the one that waits for it on the device, which NCCL's watchdog would abort."""
    engine, _, graph = engine.partition(", ")
    words = [f"dist.engine={engine}", *(["train.cuda_graph=on"] if graph else [])]
    done, record, begun, _ = ended(libraries, tmp_path, *words, fault=kind)
    seconds = time.time() - os.stat(tmp_path / "at").st_mtime
    cause = f"rank 1: no answer for {TIMEOUT_S} s (dist.timeout_s)"
    assert f"mprun: {cause}" in done.stderr.splitlines()
    assert "rank 0" not in done.stderr.replace("[rank0]", "")
    assert done.returncode == 5
    assert (record["status"], record["cause"], record["exit_code"]) == ("failed", cause, 5)
    assert begun[0] > begun[1] or graph  # a replay begins none in the library
    assert TIMEOUT_S <= seconds < 60  # 15 s after the time-out on a free machine
    assert ".cpp" not in done.stderr
    assert with_word(f"output_dir={tmp_path / 'run'}") == []
