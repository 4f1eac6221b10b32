"""A run leaves files, metrics, a TensorBoard view, run.json and streams."""

import json
import math
import re
from pathlib import Path

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mprun.cli import main
from mprun.record.keys import config_hash
from mprun.record.run_directory import write_json, write_text

from ..helpers import LM, TINY_GAN, TINY_LM, numbers_of, record_of, refused, rows_of, run

SCALED = [*LM, "precision=fp16_master_scaled", "scaler.init_scale=16777216", "optim=sgd"]
SCALED += ["train.steps=6", "train.log_every=2", "train.eval_every=3", "train.checkpoint_every=3"]


@pytest.fixture(scope="module")
def scaled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scaled") / "run"
    assert run(folder, *SCALED) == 0
    return folder


def test_the_files_of_a_run(scaled):
    names = {re.sub(r"tfevents.*", "tfevents", path.name) for path in scaled.iterdir()}
    expected = {"config.yaml", "run.json", "metrics.jsonl", "checkpoints", ".lock"}
    assert names == expected | {"events.out.tfevents"}
    checkpoints = sorted(path.name for path in (scaled / "checkpoints").iterdir())
    assert checkpoints == ["step-00000003", "step-00000006"]


def test_the_keys_and_counts_of_metrics(scaled):
    train, evals = rows_of(scaled, "train"), rows_of(scaled, "eval")
    keys = {"split", "step", "updates", "skipped", "epoch", "loss", "loss_scale", "lr"}
    for record in train:
        assert keys <= record.keys()
        assert record["updates"] == record["step"] - record["skipped"]
    for record in (r for r in train if r["step"] % 2 == 0):
        assert {"grad_norm", "samples_per_s"} <= record.keys() and record["samples_per_s"] > 0
    assert [r["step"] for r in evals] == [3, 6]
    for record in evals:
        assert math.isclose(record["perplexity"], math.exp(record["loss"]), rel_tol=1e-12)
    # 2^24 overflows FP16 at once: each skipped step has a record of its own, with its scale.
    assert train[0]["skipped"] == 1 and train[0]["loss_scale"] == 2.0**24
    assert record_of(scaled)["skipped"] == train[-1]["skipped"] > 0
    assert record_of(scaled)["final"] == {k: evals[-1][k] for k in ("loss", "perplexity")}


def events(folder) -> EventAccumulator:
    # 0: keep every point; the default would sample.
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    return accumulator


def test_tensorboard_shows_the_same_numbers(scaled):
    view, expected = events(scaled), {}
    bookkeeping = ("updates", "skipped", "seconds")  # not shown for evaluations
    for record in rows_of(scaled):
        for key, value in record.items():
            if record["split"] == "eval" and key in bookkeeping:
                continue
            if key not in ("split", "step", "epoch") and not isinstance(value, str):
                expected.setdefault(f"{record['split']}/{key}", []).append((record["step"], value))
    assert set(view.Tags()["scalars"]) == set(expected)
    for tag, points in expected.items():
        shown = view.Scalars(tag)
        assert [point.step for point in shown] == [step for step, _ in points]
        for point, (_, value) in zip(shown, points, strict=True):
            # TensorBoard stores float32: one rounding, at most 2^-24 of the value.
            same = math.isclose(point.value, value, rel_tol=2**-24)
            both_nan = math.isnan(point.value) and math.isnan(value)
            assert same or both_nan or point.value == value, tag


def test_one_tensorboard_run_with_hyper_parameters(scaled):
    assert {path.parent for path in scaled.rglob("events.*")} == {scaled}
    view = events(scaled)
    assert "_hparams_/session_start_info" in view.summary_metadata
    # The metrics of that page are the curves themselves: no section comes between eval and train.
    experiment = view.summary_metadata["_hparams_/experiment"].plugin_data.content
    assert all(tag in experiment for tag in (b"eval/loss", b"eval/perplexity", b"train/skipped"))
    content = view.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    for word in (b"precision", b"fp16_master_scaled", b"lstm_lm", b"scaler"):
        assert word in content


def test_run_json_says_what_is_needed_to_judge_the_run(scaled):
    record = record_of(scaled)
    assert (record["status"], record["cause"], record["last_step"]) == ("done", None, 6)
    assert record["updates"] + record["skipped"] == 6
    dtypes = record["precision"]["effective_dtypes"]["model"]
    elements = dtypes["parameters"]["float16"]
    assert dtypes["parameters"] == {"float16": elements}
    assert dtypes["master_weights"] == dtypes["optimizer_state"] == {"float32": elements}
    assert dtypes["gradients"] == {"float16": elements}
    assert dtypes["gradients_in_update"] == {"float32": elements}
    assert record["precision"]["mode"] == "fp16_master_scaled"
    assert record["precision"]["half_products"] == "emulated-fp16"
    flags = record["precision"]["flags"]
    assert {v for k, v in flags.items() if k.endswith("fp32_precision")} == {"ieee"}
    assert flags["cuda.matmul.allow_fp16_reduced_precision_reduction"] is False
    # Two layers, each forward and each backward pass of every step.
    assert record["emulated"]["forward lstm"] == record["emulated"]["backward lstm"] == 2 * 6
    assert re.fullmatch(r"[0-9a-f]{64}", record["data"]["sha256"])
    assert record["environment"]["packages"]["torch"] and record["environment"]["threads"] == 1
    assert record["memory"]["activation_bytes"] > 0
    plain = yaml.safe_load((scaled / "config.yaml").read_text())
    assert record["config_hash"] == config_hash(plain)
    assert "JSON" not in json.dumps(record) and "NaN" not in (scaled / "run.json").read_text()


def test_fp32_has_no_emulation_and_no_masters(tmp_path):
    assert run(tmp_path / "run", *TINY_LM, "train.steps=2") == 0
    record = record_of(tmp_path / "run")
    assert record["emulated"] == {} and record["precision"]["half_products"] == "none"
    dtypes = record["precision"]["effective_dtypes"]["model"]
    assert set(dtypes["parameters"]) == {"float32"} and dtypes["master_weights"] == {}
    # Without checkpoint_every nothing but the record is written.
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.slow
def test_a_gan_reports_both_losses_and_both_networks(tmp_path):
    directory = tmp_path / "run"
    assert run(directory, *TINY_GAN, "train.steps=4", "train.log_every=2", "precision=amp") == 0
    train = rows_of(directory, "train")
    for record in train:
        if {"d_loss", "g_loss"} <= record.keys():
            # Summed in float32 on the device: one rounding.
            total = record["d_loss"] + record["g_loss"]
            assert math.isclose(record["loss"], total, rel_tol=2**-23)
    assert any("g_loss" in record for record in train)
    dtypes = record_of(directory)["precision"]["effective_dtypes"]
    assert set(dtypes) == {"generator", "discriminator"}
    assert "eval/samples" in events(directory).Tags()["images"]


def test_the_same_command_twice_makes_two_directories_with_equal_numbers(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    paths = []
    for _ in range(2):
        assert main([*TINY_LM, "train.steps=6", "train.log_every=2"]) == 0
        printed = capsys.readouterr()
        [line] = printed.out.splitlines()
        paths.append(tmp_path / line.removeprefix("run: "))
        # Progress is on stderr, in lines: there is no terminal here.
        assert "step 6/6" in printed.err and "eval at step 6" in printed.err
        assert "\r" not in printed.err
    assert paths[1] == paths[0].with_name(paths[0].name + ".2")
    assert numbers_of(paths[0]) == numbers_of(paths[1])
    assert record_of(paths[0])["config_hash"] == record_of(paths[1])["config_hash"]


def test_an_existing_directory_is_not_touched(scaled, capsys):
    before = {path: path.stat().st_mtime_ns for path in scaled.rglob("*")}
    refused(capsys, *SCALED, f"output_dir='{scaled}'", says="already exists")
    assert {path: path.stat().st_mtime_ns for path in scaled.rglob("*")} == before


def test_pages_replace_links_and_hold_no_control_characters(tmp_path):
    theirs = tmp_path / "theirs"
    theirs.write_text("kept")
    for name, write in (("a.md", write_text), ("a.json", write_json)):
        (tmp_path / name).symlink_to(theirs)
        write(tmp_path / name, "\x1b[2J\x7f\u202e \u00fc\t|\n\rb")
        assert not (tmp_path / name).is_symlink() and theirs.read_text() == "kept"
    assert (tmp_path / "a.md").read_text() == "\\x1b[2J\\x7f\\u202e \u00fc\t|\n\\rb"
    assert json.loads((tmp_path / "a.json").read_text()) == "\x1b[2J\x7f\u202e \u00fc\t|\n\rb"
    assert all(byte >= 32 or byte == 10 for byte in (tmp_path / "a.json").read_bytes())
    assert b"\x7f" not in (tmp_path / "a.json").read_bytes()


def test_a_run_is_not_put_behind_a_link_below_the_output_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("theirs").mkdir()
    (place := Path("outputs/lstm_lm-synthetic_tokens")).parent.mkdir()
    place.symlink_to(tmp_path / "theirs")
    says = f"{place}: is a link, and mprun writes nothing through links"
    refused(capsys, *TINY_LM, "train.steps=1", says=says)
    assert not any(Path("theirs").iterdir())
