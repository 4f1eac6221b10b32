"""Summary runs, read back by TensorBoard's own reader and by a real server."""

import json
import re
import subprocess
import sys
import time
import urllib.parse
import urllib.request

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2

from mprun.comparison import tensorboard_summary
from mprun.comparison.findings import Arm
from mprun.comparison.tensorboard_summary import write_means, write_summaries
from mprun.errors import BadInput

from ..helpers import raises_line
from .made_comparison import comparison, gan_group, group
from .made_runs import made_arm, made_run
from .run_folders import write_run, write_study

SLUG = "resnet50-digits_32"
BOUNDS = ("highest", "lowest")


def read(folder) -> EventAccumulator:
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    accumulator.Reload()
    return accumulator


def tags_of(folder) -> list[str]:
    return sorted(read(folder).Tags()["scalars"])


def names_in(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def scalars(folder, tag) -> dict[int, float]:
    return {point.step: point.value for point in read(folder).Scalars(tag)}


@pytest.fixture(scope="module")
def usual(tmp_path_factory):
    """A group and the folder of its summaries, for reading."""
    one, beside = group(steps=400), tmp_path_factory.mktemp("usual")
    folder = write_summaries(comparison(one), beside)
    assert folder == beside / "_summary"
    return one, folder


def test_one_run_per_mode_with_mean_lowest_and_highest(usual):
    one, folder = usual
    modes = ["amp", "fp16_master", "fp16_master_scaled", "fp16_naive", "fp32"]
    assert names_in(folder) == modes
    # As TensorBoard sorts them: it opens the first two sections, eval and train.
    means = [f"{name}/loss{vs}" for name in ("eval", "train") for vs in ("", " vs FP32 (%)")]
    bounds = [f"variation/{name} loss {at}" for name in ("eval", "train") for at in BOUNDS]
    for mode in modes:
        assert tags_of(folder / mode) == means + bounds
    losses = np.stack([run.evals["loss"] for run in one.baseline.arm.runs])
    tags = "eval/loss", *bounds[:2]
    for tag, values in zip(tags, (losses.mean(0), losses.max(0), losses.min(0)), strict=True):
        found = scalars(folder / "fp32", tag)
        assert list(found) == list(range(50, 401, 50))
        # Event files hold float32: half a unit in its last place is 2^-24 of the value.
        np.testing.assert_allclose(list(found.values()), values, rtol=2.0**-24)


def test_a_margin_chart_per_quantity_has_tags_that_exist_and_the_verdict_is_a_table(usual):
    accumulator = read(usual[1] / "fp32")
    (event,) = accumulator.Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])
    (category,) = layout.category
    assert category.title == SLUG
    series = [one for chart in category.chart for one in chart.margin.series]
    tags = [tag for one in series for tag in (one.value, one.lower, one.upper)]
    assert sorted(tags) == [tag for tag in tags_of(usual[1] / "fp32") if "vs" not in tag]
    assert accumulator.SummaryMetadata("verdict").plugin_data.plugin_name == "text"
    (event,) = accumulator.Tensors("verdict")
    text = event.tensor_proto.string_val[0].decode()
    assert text.startswith("| verdict ") and "| matches " in text


def test_many_runs_make_one_run_a_mode(tmp_path):
    finals = [1.0 + seed for seed in range(21)]
    write_study(tmp_path, {"fp32": finals, "amp": [1.1 * final for final in finals]})
    folder = write_means([tmp_path], tmp_path)
    assert names_in(folder) == ["amp", "fp32"]
    assert scalars(folder / "fp32", "eval/loss") == {40: 11.0}
    assert scalars(folder / "amp", "eval/loss vs FP32 (%)") == {40: pytest.approx(10)}
    assert scalars(folder / "fp32", "train/loss")[20] == pytest.approx(11.05)


def test_what_else_is_swept_makes_sections_and_no_runs(tmp_path):
    for lr in (0.1, 0.2):
        swept = {"overrides": {"optim.lr": lr}}
        write_study(tmp_path / f"{lr}", {"fp32": [lr], "amp": [lr]}, **swept)
        write_run(tmp_path / f"static{lr}", "amp", scaler="static", **swept)
    folder = write_means([tmp_path], tmp_path)
    assert names_in(folder) == ["amp", "amp__static_", "fp32"]
    for lr in (0.1, 0.2):
        tag = f"lstm_lm-docs_words-optim.lr-{lr}/eval loss"
        assert scalars(folder / "fp32", tag) == {40: pytest.approx(lr)}


def test_runs_without_an_outcome_are_in_no_mean_but_their_own(tmp_path):
    write_run(tmp_path / "s0", final=1.0)
    write_run(tmp_path / "s1", seed=1, final=5.0, status="preempted")
    write_run(tmp_path / "amp", "amp", seed=1, final=3.0, status="preempted")
    folder = write_means([tmp_path], tmp_path)
    assert scalars(folder / "fp32", "eval/loss") == {40: 1.0}
    assert scalars(folder / "amp", "eval/loss") == {40: 3.0}  # there is nothing else of it
    assert not any("vs" in tag for tag in tags_of(folder / "amp"))


def test_old_summaries_are_replaced_and_nothing_else_is_touched(tmp_path):
    one = group(seeds=1, steps=80)
    one.rows[0].arm.label = "old"
    write_summaries(comparison(one), tmp_path)
    stranger = tmp_path / "_summary" / "old" / "events.out.tfevents.1.host"
    stranger.write_bytes(b"of someone else")
    outside = tmp_path / "events.out.tfevents.2.host.mprun-compare"
    outside.write_bytes(b"not below _summary")
    for _ in range(2):
        folder = write_summaries(comparison(group(seeds=1, steps=80)), tmp_path)
    assert outside.is_file()
    assert [path for path in (folder / "old").rglob("*") if path.is_file()] == [stranger]
    for mode in folder.glob("*[!d]"):  # all but "old"
        assert len(list(mode.iterdir())) == 1


def test_what_is_not_finite_is_left_out(tmp_path):
    one = group(seeds=3, steps=400)
    for run in one.rows[0].arm.runs:
        run.evals["loss"] = np.full(len(run.evals["step"]), np.nan)
        run.train["loss"] = np.where(run.train["step"] > 200, np.inf, run.train["loss"])
    folder = write_summaries(comparison(one), tmp_path) / "fp16_naive"
    assert not any("eval" in tag for tag in tags_of(folder))
    points = scalars(folder, "variation/train loss highest")
    assert points and max(points) <= 201 and np.isfinite([*points.values()]).all()


def test_labels_become_folders_that_stay_below_the_summary(tmp_path):
    one = group(seeds=3, steps=400)
    for row, label in zip(one.rows, ("../x", "amp (static)", "amp [static]", "."), strict=True):
        row.arm.label = label
    folder = write_summaries(comparison(one), tmp_path)
    assert names_in(folder) == ["_", "_x", "amp__static_", "amp__static_.2", "fp32"]
    assert names_in(tmp_path) == ["_summary"]


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
    ports = (re.search(r"http://\S+:(\d+)/", line) for line in process.stderr)
    yield f"http://localhost:{next(filter(None, ports))[1]}"
    process.kill()
    process.wait()
    process.stderr.close()


def get(address: str):
    with urllib.request.urlopen(address, timeout=300) as answer:
        return json.load(answer)


@pytest.mark.slow
def test_a_real_server_lists_runs_layout_and_text(server):
    deadline = time.monotonic() + 300
    while len(get(f"{server}/data/runs")) < 5 and time.monotonic() < deadline:
        time.sleep(0.5)
    runs = get(f"{server}/data/runs")
    assert "_summary/amp" in runs and "_summary/fp32" in runs
    layout = get(f"{server}/data/plugin/custom_scalars/layout")
    charts = {category["title"]: category["chart"] for category in layout["category"]}
    assert charts.keys() == {"dcgan-digits_gan", SLUG}
    [chart] = (one for one in charts[SLUG] if one["title"].startswith("eval/"))
    tag = chart["margin"]["series"][0]["value"]
    query = urllib.parse.urlencode({"run": "_summary/amp", "tag": tag})
    points = get(f"{server}/data/plugin/scalars/scalars?{query}")
    assert len(points) == 8
    texts = get(f"{server}/data/plugin/text/tags")
    assert f"{SLUG}/verdict" in texts["_summary/fp32"]


def test_a_difference_in_percent_is_worse_above_zero_though_the_loss_is_below():
    own, base = made_arm({0: -1.0}, "amp"), made_arm({0: -2.0})
    steps, found = tensorboard_summary._percent("eval/loss", own, base)
    assert (steps.tolist(), found.tolist()) == ([100.0], [50.0])


def test_differences_are_at_the_steps_that_both_recorded():
    """One curve, 1 / step, recorded every 10 and every 25 steps, has no difference to itself."""
    arms = []
    for mode, every in (("amp", 25), ("fp32", 10)):
        steps = list(range(every, 111, every))
        finals = [1 / step for step in steps]
        arms.append(Arm(mode, mode, [made_run(0, *finals, mode=mode, steps=steps)]))
    steps, found = tensorboard_summary._percent("eval/loss", *arms)
    assert (steps.tolist(), found.tolist()) == ([50.0, 100.0], [0.0, 0.0])


@pytest.mark.parametrize("place", ["_summary", "_summary/fp32"])
def test_nothing_is_written_behind_a_link(place, tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / place).symlink_to(tmp_path / "theirs")
    with raises_line(BadInput, f"{place}: is a link, and mprun writes nothing through links"):
        write_summaries(comparison(group(steps=400)), tmp_path)
    assert not any((tmp_path / "theirs").iterdir()) and (tmp_path / place).is_symlink()
