"""Where FP32 fails as well, no verb may blame FP16 alone; and traces as other tools write them."""

import json

import pytest

from mprun.cli import main
from mprun.extensions.diagnosis.overflow_trace import read_trace_file

from ...helpers import ONE_CORE, TINY_AUTOENCODER


def test_advice_from_a_rising_loss_says_so(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    # Plain SGD at this rate, unclipped, moves every weight by far more than its own size.
    model = ["model=lstm_lm", "model.hidden_size=16", "model.embedding_size=16", "data=docs_chars"]
    rate = ["optim=sgd_plain", "optim.lr=100", "train.clip_norm=null", "train.steps=6"]
    steps = ["--steps", "6", "--every", "2", "--json"]
    assert main(["advise", *ONE_CORE, *model, *rate, *steps]) == 0
    printed = capfd.readouterr().out
    notes = json.loads(printed[printed.index("{") : printed.rindex("}") + 1])["notes"]
    assert any("unstable recipe" in note for note in notes), notes


@pytest.mark.slow
def test_a_steady_recipe_gets_no_such_note(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert main(["advise", *TINY_AUTOENCODER, "train.steps=6", "--steps", "6", "--every", "2"]) == 0
    assert "unstable recipe" not in capfd.readouterr().out


def test_flags_as_python_writes_them(tmp_path):
    traces = []
    rows = "1,True,65536\n2,False,32768\n"
    # Plain, as Python writes them, and after a byte order mark.
    for text in ("1,1,65536\n2,0,32768\n", rows):
        for start in ("", "\ufeff"):
            path = tmp_path / "trace.csv"
            path.write_text(f"{start}step,found_inf,loss_scale\n{text}")
            trace = read_trace_file(path)
            traces.append((trace.clean.tolist(), trace.overflow.tolist()))
    assert traces == traces[:1] * 4
