"""`mprun bench devices=N`: a table that adds up."""

import json
import os
import subprocess
import sys

import pytest
import torch

from mprun.errors import BadInput
from mprun.extensions.bench.scaling import worlds

from ...helpers import ONE_CORE, refused

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


@pytest.mark.slow
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two cores")
@pytest.mark.parametrize("model", ["conv_autoencoder", "lstm_lm", "gpt"])
def test_a_table(model, tmp_path):
    words = [*ONE_CORE, "devices=2", f"model={model}", "data.batch_size=4", "--modes", "fp32"]
    words += ["--windows", "2", "--json", "--out", str(tmp_path / "out")]
    command = [sys.executable, "-m", "mprun", "bench", *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    content = json.loads(ended.stdout)
    assert content == json.loads((tmp_path / "out" / "scaling.json").read_text())
    one, two = content["rows"]
    assert (one["world"], two["world"]) == (1, 2)
    for row in (one, two):
        assert len(row["windows_ms"]) == len(row["windows_without_sum_ms"]) == 2
        samples = row["samples_per_s"] * row["step_ms"] / 1e3
        per_rank = {"conv_autoencoder": 4, "lstm_lm": 80, "gpt": 4 * 64}[model]
        assert samples == pytest.approx(per_rank * row["world"], rel=1e-9)
    assert one["exposed_ms"] == 0
    text = (tmp_path / "out" / "scaling.md").read_text()
    assert text.count("\n") == 4 and "| efficiency |" in text


@pytest.mark.parametrize("more", ["--plain", "--end-to-end", "devices=99"])
def test_what_does_not_go_with_it(more, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    refused(capsys, "bench", *ONE_CORE, "devices=2", more)
    assert list(tmp_path.iterdir()) == []
