"""`mprun bench devices=N`: a table that adds up."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mprun.bench.ranks import worlds
from mprun.errors import BadInput

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


def test_powers_of_two_up_to_the_number(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 12)
    assert worlds("8", CPU) == [1, 2, 4, 8]
    assert worlds("12", CPU) == worlds("auto", CPU) == [1, 2, 4, 8, 12]
    assert worlds("1", CPU) == [1]


@pytest.mark.parametrize("devices", ["0", "13", "x", "-1", "", "1.5"])
def test_what_there_is_not(devices, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 12)
    with pytest.raises(BadInput, match="from 1 to 12 here, or auto"):
        worlds(devices, CPU)


def bench(folder, *arguments):
    words = [sys.executable, "-m", "mprun", "bench", "device=cpu", "threads=1", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        words, capture_output=True, text=True, env=environment, cwd=folder, timeout=300
    )


@pytest.mark.slow
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two cores")
@pytest.mark.parametrize("model", ["conv_autoencoder", "lstm_lm"])
def test_a_table(model, tmp_path):
    more = ["--modes", "fp32", "--windows", "2", "--json", "--out", str(tmp_path / "out")]
    ended = bench(tmp_path, "devices=2", f"model={model}", "data.batch_size=4", *more)
    assert ended.returncode == 0, ended.stderr
    content = json.loads(ended.stdout)
    assert content == json.loads((tmp_path / "out" / "scaling.json").read_text())
    one, two = content["rows"]
    assert (one["world"], two["world"]) == (1, 2)
    for row in (one, two):
        assert len(row["windows_ms"]) == len(row["windows_without_sum_ms"]) == 2
        samples = row["samples_per_s"] * row["step_ms"] / 1e3
        per_rank = {"conv_autoencoder": 4, "lstm_lm": 80}[model]
        assert samples == pytest.approx(per_rank * row["world"], rel=1e-9)
    assert one["exposed_ms"] == 0
    text = (tmp_path / "out" / "scaling.md").read_text()
    assert text.count("\n") == 4
    assert "| efficiency |" in text


@pytest.mark.slow
def test_what_does_not_go_with_it(tmp_path):
    for more in (["--host"], ["--end-to-end"], ["devices=99"]):
        ended = bench(tmp_path, "devices=2", *more)
        assert ended.returncode == 2, ended.stderr
        assert not (tmp_path / "outputs").exists()
