"""Curves that mprun did not record: every point is read, and what is missing is told."""

import struct

import numpy as np
import pytest
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from mprun.compare.external_logs import load_foreign
from mprun.errors import BadInput, Damaged


def write_events(folder, curves, as_tensors=False):
    """curves: tag -> list of (step, value), as torch (or, as tensors, TensorFlow 2) writes them."""
    writer = EventFileWriter(str(folder))
    for tag, points in curves.items():
        for step, value in points:
            if as_tensors:
                plugin = SummaryMetadata.PluginData(plugin_name="scalars")
                item = Summary.Value(
                    tag=tag,
                    metadata=SummaryMetadata(plugin_data=plugin),
                    tensor=TensorProto(dtype=1, float_val=[value], tensor_shape={}),
                )
            else:
                item = Summary.Value(tag=tag, simple_value=value)
            writer.add_event(Event(step=step, wall_time=step, summary=Summary(value=[item])))
    writer.close()
    return folder


def write_csv(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def arms(specs, tag):
    group = load_foreign(specs, tag)
    return group, {arm.label: arm for arm in (group.baseline, *group.arms)}


@pytest.mark.parametrize(("count", "as_tensors"), [(20_000, False), (10_500, True)])
@pytest.mark.slow
def test_every_point_is_read(tmp_path, count, as_tensors):
    """TensorBoard's own reader keeps 10,000 of them, drawn at random, unless told otherwise."""
    values = np.linspace(3, 1, count, dtype=np.float32)
    points = list(enumerate(values.tolist(), start=1))
    write_events(tmp_path / "log", {"train/loss": points, "lr": [(1, 0.1)]}, as_tensors)
    _, found = arms([f"fp32={tmp_path / 'log'}", f"amp={tmp_path / 'log'}"], "train/loss")
    for arm in found.values():
        [run] = arm.runs
        assert run.evals["step"].tolist() == list(range(1, count + 1))
        np.testing.assert_array_equal(run.evals["train/loss"], values.astype(np.float64))
        assert run.last_step == count and run.foreign and len(run.last_losses) == count // 10
        assert len(run.train["step"]) == 500 and run.train["step"][-1] == count
        assert set(run.train) == {"step", "updates", "skipped", "loss", "loss_scale"}


def test_labels_become_arms_and_positions_seeds(tmp_path):
    for name in ("b0", "b1", "a0", "a1", "a2"):
        write_csv(tmp_path / f"{name}.csv", f"step,loss\n1,2.5\n2,{len(name)}\n")
    b0, b1, a0, a1, a2 = (tmp_path / f"{name}.csv" for name in ("b0", "b1", "a0", "a1", "a2"))
    group, found = arms([f"amp={a0},{a1},{a2}", f"fp32={b0},{b1}"], "loss")
    assert group.title == "loss" and group.baseline.label == "fp32"
    assert [(run.seed, run.path) for run in found["amp"].runs] == [
        (0, str(a0)),
        (1, str(a1)),
        (2, str(a2)),
    ]
    assert [run.mode for run in found["fp32"].runs] == ["fp32", "fp32"]
    assert group.notes == [
        "foreign logs: runs are paired by their position in the list, not by seed"
    ]
    assert found["amp"].runs[0].status == "done" and found["amp"].runs[0].scale_range is None


def test_the_baseline_is_the_label_of_that_name_else_the_first(tmp_path):
    log = write_csv(tmp_path / "a.csv", "step,loss\n1,2\n")
    for specs, baseline in (
        (["x", "Baseline"], "Baseline"),
        (["x", "FP32"], "FP32"),
        (["x", "y"], "x"),
    ):
        group, _ = arms([f"{label}={log}" for label in specs], "loss")
        assert group.baseline.label == baseline
        said = any(f"the first one, {baseline}, is the baseline" in note for note in group.notes)
        assert said == (baseline == "x")
    with pytest.raises(BadInput, match="two labels name a baseline"):
        load_foreign([f"fp32={log}", f"baseline={log}"], "loss")


def test_a_folder_per_label_holds_its_runs_in_natural_order(tmp_path):
    for number in (10, 2, 1):
        write_events(tmp_path / "amp" / f"s{number}", {"loss": [(1, number)]})
        write_csv(tmp_path / "base" / f"s{number}.csv", f"step,loss\n1,{number}\n")
        write_csv(
            tmp_path / "deep" / f"version_{number}" / "metrics.csv", f"step,loss\n1,{number}\n"
        )
    specs = [f"fp32={tmp_path / 'base'}", f"amp={tmp_path / 'amp'}", f"deep={tmp_path / 'deep'}"]
    _, found = arms(specs, "loss")
    for arm in found.values():
        assert [run.evals["loss"][0] for run in arm.runs] == [1, 2, 10]
        assert [run.seed for run in arm.runs] == [0, 1, 2]


@pytest.mark.parametrize(
    ("text", "tag"),
    [
        ("Wall time,Step,Value\n1.5,1,0.5\n1.6,2,0.25\n", "anything"),  # TensorBoard
        ('"Step","amp-s0 - loss","amp-s0 - loss__MIN"\n"1","0.5","0"\n"2","0.25","0"\n', "loss"),
        ("\ufeffepoch,step,val,loss\r\n0,1,,0.5\r\n0,1,3,\r\n\r\n0,2,,0.25\r\n", "loss"),  # gaps
        ("loss,step\n0.25,2\n0.5,1\n", "loss"),  # not in order
    ],
)
def test_tables_of_several_tools(tmp_path, text, tag):
    log = write_csv(tmp_path / "a.csv", text)
    group, _ = arms([f"fp32={log}", f"amp={log}"], tag)
    [run] = group.baseline.runs
    assert run.evals["step"].tolist() == [1, 2] and run.evals[tag].tolist() == [0.5, 0.25]


def test_steps_written_twice_count_once_and_are_noted(tmp_path):
    log = write_csv(tmp_path / "a.csv", "step,loss\n1,9\n2,8\n3,7\n2,6\n3,5\n4,4\n")
    group, _ = arms([f"fp32={log}", f"amp={log}"], "loss")
    [run] = group.baseline.runs
    assert run.evals["step"].tolist() == [1, 2, 3, 4] and run.evals["loss"].tolist() == [9, 6, 5, 4]
    assert f"{log}: 2 steps written twice; the last value counts" in group.notes


def test_values_that_are_not_finite_survive_and_are_noted(tmp_path):
    events = write_events(
        tmp_path / "e", {"loss": [(1, 1.0), (2, float("nan")), (3, float("inf"))]}
    )
    log = write_csv(tmp_path / "a.csv", "step,loss\n1,1\n2,NaN\n3,-Infinity\n")
    group, found = arms([f"fp32={log}", f"amp={events}"], "loss")
    np.testing.assert_array_equal(found["fp32"].runs[0].evals["loss"], [1, np.nan, -np.inf])
    np.testing.assert_array_equal(found["amp"].runs[0].evals["loss"], [1, np.nan, np.inf])
    assert sum("2 of 3 values of loss are not finite" in note for note in group.notes) == 2
    assert found["amp"].runs[0].nonfinite_step is None


def test_a_missing_tag_lists_what_there_is(tmp_path):
    curves = {f"train/metric{i}": [(1, 0.5)] for i in range(12)}
    events = write_events(tmp_path / "e", curves)
    with pytest.raises(BadInput) as refused:
        load_foreign([f"fp32={events}", f"amp={events}"], "train/metricc3")
    listed = ", ".join(f"train/metric{i}" for i in range(10))
    assert str(refused.value) == (
        f"{events}: --tag train/metricc3: not there; has {listed} and 2 more; "
        "did you mean 'train/metric3'?"
    )
    log = write_csv(tmp_path / "a.csv", "step,loss,lr\n1,2,3\n")
    with pytest.raises(BadInput, match="--tag losss: not there; has loss, lr; did you mean 'loss'"):
        load_foreign([f"fp32={log}", f"amp={log}"], "losss")


def test_what_is_no_log_is_bad_input(tmp_path):
    log = write_csv(tmp_path / "a.csv", "step,loss\n1,2\n")
    (tmp_path / "empty").mkdir()
    for specs, reason in (
        ([f"{log}", f"amp={log}"], "with --tag give LABEL=PATH"),
        ([f"={log}", f"amp={log}"], "with --tag give LABEL=PATH"),
        (["fp32=", f"amp={log}"], "with --tag give LABEL=PATH"),
        ([f"fp32={log}"], "needs a baseline and at least one other"),
        ([f"fp32={log}", f"fp32={log}"], "label 'fp32' is given twice"),
        ([f"fp32={log}", "amp=nowhere"], "nowhere: no such file"),
        ([f"fp32={log}", f"amp={tmp_path / 'empty'}"], "holds neither"),
        ([f"fp32={write_csv(tmp_path / 'b.csv', 'loss,lr')}", f"amp={log}"], "no column 'step'"),
        ([f"fp32={write_csv(tmp_path / 'c.csv', 'step,loss')}", f"amp={log}"], "'loss' is empty"),
        ([f"fp32={write_csv(tmp_path / 'd.csv', '')}", f"amp={log}"], "has none"),
    ):
        with pytest.raises(BadInput, match=reason):
            load_foreign(specs, "loss")
    two = write_csv(tmp_path / "two.csv", "Step,s0 - loss,s1 - loss\n1,2,3\n")
    with pytest.raises(BadInput, match="could be s0 - loss, s1 - loss; give one"):
        load_foreign([f"fp32={two}", f"amp={two}"], "loss")
    group, _ = arms([f"fp32={two}", f"amp={two}"], "s1 - loss")
    assert group.baseline.runs[0].evals["s1 - loss"].tolist() == [3]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("step,loss\n1,2\n2,abc\n", "line 3: 'abc' is not a number"),
        ("step,loss\n1,2\n2\n", "line 3: 1 cells"),
        ("step,loss\nnan,2\n", "steps must be finite"),
        (b"step,loss\n1,2\xff\n", "not a CSV file"),
    ],
)
def test_a_damaged_table_is_told_with_the_line(tmp_path, text, reason):
    log = tmp_path / "a.csv"
    log.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(Damaged, match=f"{log}: .*{reason}"):
        load_foreign([f"fp32={log}", f"amp={log}"], "loss")


def test_a_torn_event_file_gives_what_is_whole(tmp_path):
    folder = write_events(tmp_path / "e", {"loss": [(step, step) for step in range(1, 101)]})
    [file] = folder.iterdir()
    whole = file.read_bytes()
    # A record: length (8 bytes), checksum of the length (4), data, checksum of the data (4).
    ends, at = [], 0
    while at < len(whole):
        at += 16 + struct.unpack_from("<Q", whole, at)[0]
        ends.append(at)
    file.write_bytes(whole[: ends[60] + 5])  # one record is the header: 60 points are whole
    group, _ = arms([f"fp32={folder}", f"amp={file}"], "loss")
    assert group.baseline.runs[0].evals["loss"].tolist() == list(range(1, 61))
    assert group.arms[0].runs[0].evals["loss"].tolist() == list(range(1, 61))
