"""Summary runs, read back by TensorBoard's own reader and by a real server."""

import json
import re
import subprocess
import sys
import time
import urllib.request
from dataclasses import replace

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2

from mprun.compare.tensorboard_summary import write_summaries

from .made_comparison import comparison, gan_group, group

SLUG = "resnet50-digits_32"


def read(folder) -> EventAccumulator:
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    accumulator.Reload()
    return accumulator


def test_one_run_per_mode_with_mean_lower_and_upper(tmp_path):
    one = group(steps=400)
    folder = write_summaries(comparison(one), tmp_path)
    assert folder == tmp_path / "_summary"
    modes = ["amp", "fp16_master", "fp16_master_scaled", "fp16_naive", "fp32"]
    assert sorted(path.name for path in (folder / SLUG).iterdir()) == modes
    for mode in modes:
        assert read(folder / SLUG / mode).Tags()["scalars"] == [
            f"{SLUG}/{name}/{bound}"
            for name in ("train_loss", "eval_loss")
            for bound in ("mean", "lower", "upper")
        ]
    fp32 = read(folder / SLUG / "fp32")
    losses = np.stack([run.evals["loss"] for run in one.baseline.arm.runs])
    wanted = {"mean": losses.mean(0), "lower": losses.min(0), "upper": losses.max(0)}
    for bound, values in wanted.items():
        points = fp32.Scalars(f"{SLUG}/eval_loss/{bound}")
        assert [point.step for point in points] == list(range(50, 401, 50))
        # Event files hold float32: half a unit in its last place is 2^-24 of the value.
        np.testing.assert_allclose([p.value for p in points], values, rtol=2.0**-24)


def test_the_layout_has_a_margin_chart_per_quantity_and_its_tags_exist(tmp_path):
    folder = write_summaries(comparison(group(steps=400)), tmp_path)
    accumulator = read(folder / SLUG / "fp32")
    (event,) = accumulator.Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])
    (category,) = layout.category
    assert category.title == SLUG
    tags = [
        getattr(series, bound)
        for chart in category.chart
        for series in chart.margin.series
        for bound in ("value", "lower", "upper")
    ]
    assert sorted(tags) == sorted(accumulator.Tags()["scalars"])


def test_the_verdict_is_a_markdown_table(tmp_path):
    folder = write_summaries(comparison(group(steps=400)), tmp_path)
    accumulator = read(folder / SLUG / "fp32")
    assert accumulator.SummaryMetadata(f"{SLUG}/verdict").plugin_data.plugin_name == "text"
    (event,) = accumulator.Tensors(f"{SLUG}/verdict")
    text = event.tensor_proto.string_val[0].decode()
    assert text.startswith("| verdict ") and "| matches " in text


def test_old_summaries_are_replaced_and_nothing_else_is_touched(tmp_path):
    write_summaries(comparison(replace(group(steps=400), slug="old")), tmp_path)
    stranger = tmp_path / "_summary" / "old" / "amp" / "events.out.tfevents.1.host"
    stranger.write_bytes(b"of someone else")
    outside = tmp_path / "events.out.tfevents.2.host.mprun-compare"
    outside.write_bytes(b"not below _summary")
    for _ in range(2):
        folder = write_summaries(comparison(group(steps=400)), tmp_path)
    assert outside.is_file()
    assert [path for path in (folder / "old").rglob("*") if path.is_file()] == [stranger]
    for mode in (folder / SLUG).iterdir():
        assert len(list(mode.iterdir())) == 1


def test_what_is_not_finite_is_left_out(tmp_path):
    one = group(seeds=3, steps=400)
    for run in one.rows[0].arm.runs:
        run.evals["loss"] = np.full(len(run.evals["step"]), np.nan)
        run.train["loss"] = np.where(run.train["step"] > 200, np.inf, run.train["loss"])
    folder = write_summaries(comparison(one), tmp_path)
    accumulator = read(folder / SLUG / "fp16_naive")
    assert not any("eval_loss" in tag for tag in accumulator.Tags()["scalars"])
    points = accumulator.Scalars(f"{SLUG}/train_loss/upper")
    assert points and max(point.step for point in points) <= 201
    assert np.isfinite([point.value for point in points]).all()


def test_labels_become_folders_that_stay_below_the_group(tmp_path):
    one = group(seeds=3, steps=400)
    for row, label in zip(one.rows, ("../x", "amp (static)", "amp [static]", "."), strict=True):
        row.arm.label = label
    folder = write_summaries(comparison(one), tmp_path)
    names = sorted(path.name for path in (folder / SLUG).iterdir())
    assert names == ["_", "_x", "amp__static_", "amp__static_.2", "fp32"]
    assert [path.name for path in tmp_path.iterdir()] == ["_summary"]


def test_no_torch_and_no_tensorflow_are_loaded():
    program = (
        "import sys, mprun.compare.tensorboard_summary;"
        "assert not {'torch', 'tensorflow', 'matplotlib'} & set(sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


@pytest.fixture
def server(tmp_path):
    """Address of a TensorBoard that shows the summaries of two groups."""
    logs = tmp_path / "logs"
    write_summaries(comparison(group(), gan_group(tmp_path)), logs)
    process = subprocess.Popen(
        [sys.executable, "-m", "tensorboard.main", "--logdir", str(logs), "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
    )
    address = None
    for line in process.stderr:
        if found := re.search(r"http://\S+:(\d+)/", line):
            address = f"http://localhost:{found[1]}"
            break
    yield address
    process.kill()
    process.wait()
    process.stderr.close()


def get(address: str):
    with urllib.request.urlopen(address, timeout=30) as answer:
        return json.load(answer)


@pytest.mark.slow
def test_a_real_server_lists_runs_layout_and_text(server):
    deadline = time.monotonic() + 60
    while len(get(f"{server}/data/runs")) < 8 and time.monotonic() < deadline:
        time.sleep(0.5)
    runs = get(f"{server}/data/runs")
    assert f"_summary/{SLUG}/amp" in runs and "_summary/dcgan-digits_gan/fp32" in runs
    layout = get(f"{server}/data/plugin/custom_scalars/layout")
    assert [category["title"] for category in layout["category"]] == ["dcgan-digits_gan", SLUG]
    tag = layout["category"][1]["chart"][1]["margin"]["series"][0]["value"]
    query = f"run=_summary/{SLUG}/amp&tag={tag}"
    points = get(f"{server}/data/plugin/scalars/scalars?{query}")
    assert len(points) == 8
    texts = get(f"{server}/data/plugin/text/tags")
    assert texts[f"_summary/{SLUG}/fp32"] == [f"{SLUG}/verdict"]
