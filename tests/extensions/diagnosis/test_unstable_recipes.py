"""Where FP32 fails as well, no verb may blame FP16 alone."""

import json

import pytest

from mprun.cli import main

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
