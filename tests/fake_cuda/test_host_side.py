"""`python -m benchmarks.suite --host`: memory, launches and host time without a GPU."""

import json
import subprocess
import sys

import pytest

from benchmarks.suite.__main__ import main
from mprun.extensions.bench.cases import Case
from mprun.precision.rounded_weights import CHUNK

from .conftest import ROOT
from .host_side import host_row, report


def host(device, *arguments):
    """The rows of the command; `device` skips where there is no fake runtime."""
    command = [device.python, "-m", "benchmarks.suite", "--host", "--json", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return {
        (row["label"], row["mode"], row["contender"], row["execution"]): row
        for row in json.loads(done.stdout)["rows"]
    }


@pytest.mark.slow
def test_weights_without_masters_are_in_fp32_chunk_by_chunk(device):
    """Bytes a parameter of GPT-2: 16 with masters, 14 with FP32 gradients instead of them; beside
    these what one chunk takes, here the table of the embedding."""
    tokens = ("data=synthetic_tokens", "data.vocab_size=50304", "data.sequence_length=16")
    modes = ("--modes", "bf16_master,bf16_stochastic")
    rows = host(device, "model=gpt2", *tokens, "data.batch_size=1", *modes)
    peaks = {mode: row["peak"] for (_, mode, _, how), row in rows.items() if how == "eager"}
    table = 50_304 * 768
    weights = 12 * 12 * 768**2 + table
    # The table in FP32, and what rounding makes of a piece of it: hash, bits, sum.
    assert peaks["bf16_stochastic"] < 14.1 * weights + 4 * table + 16 * CHUNK
    assert peaks["bf16_stochastic"] < peaks["bf16_master"]


@pytest.mark.slow
def test_a_model_of_ones_choice(device, tmp_path):
    # A decision on compilation waits once for the steps that it has timed.
    small = ["model=conv_autoencoder", "data.batch_size=8", "train.compile=off"]
    small += ["--modes", "fp32,fp16_naive,amp"]
    out = tmp_path / "host"
    rows = host(device, *small, "--peers", "loop,amp", "--out", str(out))
    [label] = {key[0] for key in rows}
    assert set(rows) == {
        *((label, mode, "mprun", how) for mode in ("fp32", "fp16_naive", "amp")
          for how in ("eager", "replayed")),
        (label, "fp32", "loop", "eager"),
        (label, "fp16_naive", "loop", "eager"),
        (label, "amp", "amp", "eager"),
    }  # fmt: skip
    for (_, mode, contender, how), row in rows.items():
        assert row["why_not"] is None and row["host_ms"] > 0 and row["reserved"] > 0
        assert contender != "mprun" or row["waits"] == 0, (mode, how)
    eager, replayed = (rows[label, "amp", "mprun", how] for how in ("eager", "replayed"))
    assert eager["triton"] == 0 and eager["library"] > 5
    # What an eager step launches one by one, but for the batch and the rate.
    one_by_one = sum(eager[key] for key in ("launches", "triton", "library", "copies"))
    assert replayed["work"] > 0.8 * one_by_one and replayed["launches"] < 10
    # GradScaler asks whether a gradient was infinite; ours does not.
    assert rows[label, "amp", "amp", "eager"]["waits"] >= 1
    assert eager["peak"] < rows[label, "fp32", "mprun", "eager"]["peak"]
    assert json.loads((out / "host.json").read_text())["rows"]
    assert "no kernel ran" in (out / "host.md").read_text()


@pytest.mark.slow
def test_casts_in_triton_are_counted(device):
    tokens = ("data=synthetic_tokens", "data.vocab_size=50", "data.batch_size=4")
    rows = host(device, "model=gpt", "model.hidden_size=32", *tokens, "--modes", "fp8_tensorwise")
    assert len(rows) == 2 and all(row["why_not"] is None for row in rows.values())
    [eager] = [row for (*_, how), row in rows.items() if how == "eager"]
    assert eager["triton"] >= 2


def test_what_cannot_run_says_why():
    row = host_row(Case("m b1", (), "amp", "mprun"), "eager", why_not="train.cuda_graph=on: no")
    assert "train.cuda_graph=on: no" in report([row])


@pytest.mark.skipif(sys.platform != "linux", reason="there is no fake runtime elsewhere")
@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--end-to-end"], "--end-to-end: not with --host"),
        (["model=lstm_lm", "--modes", "fp32"], "is not installed"),
    ],
)
def test_what_is_refused(monkeypatch, capsys, arguments, line):
    monkeypatch.setenv("PATH", "/nowhere")  # without a compiler
    assert main(["--host", *arguments]) == 2
    error = capsys.readouterr().err
    assert line in error and error.count("\n") == 1


@pytest.mark.slow
def test_the_targets_of_memory_at_full_size(device):
    """Targets that are reached are kept: bytes of torch's allocator, one batch on the device."""
    rows = host(
        device,
        *("--only", "ResNet-50 b256,AlexNet b512", "--peers", "loop,amp"),
        *("--modes", "fp32,fp16_master_scaled,amp"),
    )

    def peak(label, mode, contender="mprun"):
        return rows[label, mode, contender, "eager"]["peak"]

    for label, share, batch in (("ResNet-50 b256", 0.55, 256), ("AlexNet b512", 0.74, 512)):
        images = 2 * batch * 3 * 224 * 224  # bytes that lie there in every mode
        mixed, fp32 = (peak(label, mode) - images for mode in ("fp16_master_scaled", "fp32"))
        assert mixed <= share * fp32
        recipe, loop = peak(label, "amp", "amp"), peak(label, "fp32", "loop")
        # Blocks of the allocator that are not split are at most 1 MiB larger than what is asked.
        for mode, other in (("fp16_master_scaled", recipe), ("amp", recipe), ("fp32", loop)):
            assert peak(label, mode) <= other + 8 * 2**20
    for mode in ("fp32", "fp16_master_scaled", "amp"):
        eager, replayed = (
            rows["ResNet-50 b256", mode, "mprun", how]["reserved"] for how in ("eager", "replayed")
        )
        assert replayed <= 1.1 * eager
