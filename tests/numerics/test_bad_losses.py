"""A loss that is itself not finite in a skipped update is told everywhere, and not as normal."""

import math

import numpy as np
import pytest

from mprun.cli import main
from mprun.numerics.post_mortem import bad_losses, classify
from mprun.record.metrics_columns import read_columns

from ..helpers import record_of, rows_of, run
from .failing_runs import GAN, with_data
from .failing_runs import run as run_planted
from .spoilt_data import RUN


def bad_steps(folder) -> list[int]:
    return [row["step"] for row in rows_of(folder, "train") if not math.isfinite(row["loss"])]


@pytest.mark.slow
def test_the_record_names_the_steps_and_what_their_batches_hold(tmp_path, monkeypatch):
    """A run is done, though a batch of each epoch holds NaN."""
    monkeypatch.setenv("SPOILT_WITH", "nan")
    spoilt = tmp_path / "amp"
    assert run(spoilt, *RUN) == 0
    steps = bad_steps(spoilt)  # one in each epoch of six
    assert len(steps) == 2
    assert read_columns(spoilt / "metrics.jsonl").nonfinite_skips.tolist() == steps
    record = record_of(spoilt)
    assert (record["status"], record["skipped"]) == ("done", 2)
    assert record["bad_batches"] == {str(s): "inputs: 3 of 256 values are NaN" for s in steps}


@pytest.mark.slow
def test_the_end_of_the_run_show_and_compare_tell_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SPOILT_WITH", "inf")
    assert run(tmp_path / "amp", *RUN) == 0
    ended = capsys.readouterr().err
    steps = ", ".join(map(str, bad_steps(tmp_path / "amp")))
    told = (
        f"the loss itself was not finite in 2 of 2 skipped updates, steps {steps}: no loss scale "
        f"cures that (the data of steps {steps}: inputs: 3 of 256 values are infinite)"
    )
    assert f"mprun: {told}\n" in ended and "finds its level" not in ended
    assert main(["show", str(tmp_path / "amp")]) == 0
    assert told in " ".join(capsys.readouterr().out.split())
    fp32 = [word for word in RUN if word != "precision=amp"]
    monkeypatch.setenv("SPOILT_WITH", "0.5")  # a baseline needs sound data
    assert run(tmp_path / "fp32", *fp32) == 0
    assert main(["compare", str(tmp_path), "--allow", "data.sha256", "--no-report"]) == 0
    assert told in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_a_source_that_refuses_to_go_back_takes_no_outcome(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SPOILT_WITH", "nan")
    words = [word.replace("spoilt_data:data", "spoilt_data:stream") for word in RUN]
    assert run(tmp_path / "amp", *words) == 0
    record, (step, *_) = record_of(tmp_path / "amp"), bad_steps(tmp_path / "amp")
    assert record["status"] == "done" and "bad_batches" not in record
    said = f"mprun: the batch of step {step} could not be read again: a stream has no way back\n"
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_either_loss_of_a_gan_counts(tmp_path):
    def spoil(index, batch):
        images, *rest = batch
        return (images * math.nan if index == 4 else images, *rest)

    folder, code = run_planted(tmp_path, *GAN, "precision=amp", plant=with_data(spoil))
    assert code == 0 and bad_steps(folder) == [5]
    assert list(record_of(folder)["bad_batches"]) == ["5"]


@pytest.mark.slow
def test_sound_skips_are_as_they_were(tmp_path, capsys, monkeypatch):
    """2^24 is too large a scale for the gradients, not for the loss."""
    monkeypatch.setenv("SPOILT_WITH", "0.5")
    assert run(tmp_path / "amp", *RUN, "scaler.init_scale=16777216") == 0
    printed, record = capsys.readouterr().err, record_of(tmp_path / "amp")
    assert "finds its level" in printed and "the loss itself" not in printed
    assert record["skipped"] and "bad_batches" not in record


def test_a_post_mortem_does_not_call_them_normal():
    row = {"loss": 1.0, "loss_scale": 8.0, "found_inf": False}
    skipped = row | {"loss": math.nan, "found_inf": True}
    rows = [own | {"step": step} for step, own in enumerate([row, skipped, row, skipped, row], 1)]
    [_, line] = classify("non-finite loss", rows, "dynamic", 5)
    assert line == (
        "2 skipped updates before: the loss itself was not finite in 2 of them, which no loss "
        "scale cures"
    )


def test_many_steps_are_named_by_the_first_and_the_last(tmp_path):
    found = read_columns(tmp_path / "none.jsonl")
    assert bad_losses(found, {}) == ""
    found.nonfinite_skips, found.skipped = np.arange(3, 11), 20
    told = "in 8 of 20 skipped updates, steps 3, 4, 5, 6, 7, ... 10: no loss scale cures that"
    assert bad_losses(found, {}) == f"the loss itself was not finite {told}"
