"""Curves that mprun did not record: every point is read, and what is missing is told."""

import shutil
import subprocess
import sys

import numpy as np
import pytest
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from mprun.cli import main
from mprun.comparison.gap_growth import differences, evaluation
from mprun.comparison.verdict import assess
from mprun.errors import BadInput
from mprun.extensions.logs.external_logs import load_foreign

from ...compare.run_folders import compared
from ...helpers import raises_line, refused


def write_events(folder, curves, as_tensors=False):
    """curves: tag -> list of (step, value), as torch (or, as tensors, TensorFlow 2) writes them."""
    writer = EventFileWriter(str(folder))
    plugin = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="scalars"))
    for tag, points in curves.items():
        for step, value in points:
            content = {"simple_value": value}
            if as_tensors:
                tensor = TensorProto(dtype=1, float_val=[value], tensor_shape={})
                content = {"metadata": plugin, "tensor": tensor}
            item = Summary.Value(tag=tag, **content)
            writer.add_event(Event(step=step, wall_time=step, summary=Summary(value=[item])))
    writer.close()
    return folder


def write_csv(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def specs(**labels) -> list[str]:
    """LABEL=PATH,PATH of each label's paths, or of its only one."""
    several = {label: p if isinstance(p, list) else [p] for label, p in labels.items()}
    return [f"{label}={','.join(map(str, paths))}" for label, paths in several.items()]


def arms(specs, scalar):
    group = load_foreign(specs, scalar)
    return group, {arm.label: arm for arm in (group.baseline, *group.arms)}


@pytest.mark.parametrize(("count", "as_tensors"), [(20_000, False), (10_500, True)])
@pytest.mark.slow
def test_every_point_is_read(tmp_path, count, as_tensors):
    """TensorBoard's own reader keeps 10,000 of them, drawn at random, unless told otherwise."""
    values = np.linspace(3, 1, count, dtype=np.float32)
    points = list(enumerate(values.tolist(), start=1))
    for name in ("log", "same"):
        write_events(tmp_path / name, {"train/loss": points, "lr": [(1, 0.1)]}, as_tensors)
    _, found = arms([f"fp32={tmp_path / 'log'}", f"amp={tmp_path / 'same'}"], "train/loss")
    for arm in found.values():
        [run] = arm.runs
        assert run.evals["step"].tolist() == list(range(1, count + 1))
        np.testing.assert_array_equal(run.evals["train/loss"], values.astype(np.float64))
        assert run.last_step == count and run.foreign and len(run.last_losses) == count // 10
        assert len(run.train["step"]) == 500 and run.train["step"][-1] == count
        assert set(run.train) == {"step", "updates", "skipped", "loss", "loss_scale"}


def test_labels_become_arms_and_every_run_is_told(tmp_path):
    paths = [tmp_path / f"{name}.csv" for name in ("b0", "b1", "a0", "a1", "a2")]
    for number, path in enumerate(paths):
        write_csv(path, f"step,loss\n1,2.5\n2,{number}\n")
    b0, b1, a0, a1, a2 = paths
    group, found = arms(specs(amp=[a0, a1, a2], fp32=[b0, b1]), "loss")
    assert group.title == "loss" and group.baseline.label == "fp32"
    told = [(run.seed, run.path) for run in found["amp"].runs]
    assert told == [(0, str(a0)), (1, str(a1)), (2, str(a2))]
    assert [run.mode for run in found["fp32"].runs] == ["fp32", "fp32"]
    assert group.notes[:2] == [f"amp is 3 runs: {a0}, {a1}, {a2}", f"fp32 is 2 runs: {b0}, {b1}"]
    assert "the logs name no seeds, so runs are not paired" in group.notes[2]
    assert not group.by_seed
    assert found["amp"].runs[0].status == "done" and found["amp"].runs[0].scale_range is None


def test_the_baseline_is_the_label_of_that_name_else_the_first(tmp_path):
    log = write_csv(tmp_path / "a.csv", "step,loss\n1,2\n")
    other = write_csv(tmp_path / "b.csv", "step,loss\n1,2\n")
    for label, baseline in (("Baseline", "Baseline"), ("FP32", "FP32"), ("y", "x")):
        group, _ = arms(specs(x=log, **{label: other}), "loss")
        assert group.baseline.label == baseline
        said = any(f"the first one, {baseline}, is the baseline" in note for note in group.notes)
        assert said == (baseline == "x")


def test_a_folder_per_label_holds_its_runs_in_natural_order(tmp_path):
    for number in (10, 2, 1):
        write_events(tmp_path / "amp" / f"s{number}", {"loss": [(1, number)]})
        write_csv(tmp_path / "base" / f"s{number}.csv", f"step,loss\n1,{number}\n")
        deep = tmp_path / "deep" / f"version_{number}" / "metrics.csv"
        write_csv(deep, f"step,loss\n1,{number}\n")
    folders = {name: tmp_path / name for name in ("base", "amp", "deep")}
    _, found = arms(specs(**folders), "loss")
    for arm in found.values():
        assert [run.evals["loss"][0] for run in arm.runs] == [1, 2, 10]
        assert [run.seed for run in arm.runs] == [0, 1, 2]


def test_values_that_are_not_finite_survive_and_are_noted(tmp_path):
    points = [(1, 1.0), (2, float("nan")), (3, float("inf"))]
    events = write_events(tmp_path / "e", {"loss": points})
    log = write_csv(tmp_path / "a.csv", "step,loss\n1,1\n2,NaN\n3,-Infinity\n")
    group, found = arms(specs(fp32=log, amp=events), "loss")
    np.testing.assert_array_equal(found["fp32"].runs[0].evals["loss"], [1, np.nan, -np.inf])
    np.testing.assert_array_equal(found["amp"].runs[0].evals["loss"], [1, np.nan, np.inf])
    assert sum("2 of 3 values of loss are not finite" in note for note in group.notes) == 2
    assert found["amp"].runs[0].nonfinite_step is None


def test_a_missing_scalar_lists_what_there_is(tmp_path):
    curves = {f"train/metric{i}": [(1, 0.5)] for i in range(12)}
    events = write_events(tmp_path / "e", curves)
    listed = ", ".join(f"train/metric{i}" for i in range(10))
    told = f"{events}: --scalar train/metricc3: no such column; there are {listed} and 2 more; "
    with raises_line(BadInput, told + "did you mean 'train/metric3'?"):
        load_foreign(specs(fp32=events, amp=events), "train/metricc3")
    log = write_csv(tmp_path / "a.csv", "step,loss,lr\n1,2,3\n")
    told = "--scalar losss: no such column; there are loss, lr; did you mean 'loss'"
    with raises_line(BadInput, told):
        load_foreign(specs(fp32=log, amp=log), "losss")


def test_what_is_no_log_is_bad_input(tmp_path):
    log = write_csv(tmp_path / "a.csv", "step,loss\n1,2\n")
    other = write_csv(tmp_path / "e.csv", "step,loss\n1,3\n")
    (tmp_path / "empty").mkdir()
    for words, reason in (
        ([f"{log}", f"amp={log}"], "with --scalar pass LABEL=PATH"),
        ([f"={log}", f"amp={log}"], "with --scalar pass LABEL=PATH"),
        (["fp32=", f"amp={log}"], "with --scalar pass LABEL=PATH"),
        ([f"fp32={log}"], "needs a baseline and at least one other"),
        ([f"fp32={log}", f"fp32={log}"], "label 'fp32' appears twice"),
        ([f"fp32={log}", "amp=nowhere"], "nowhere: no such file"),
        ([f"fp32={log}", f"amp={tmp_path / 'empty'}"], "contains no log"),
        ([f"fp32={write_csv(tmp_path / 'b.csv', 'loss,lr')}", f"amp={log}"], "no column 'step'"),
        ([f"fp32={write_csv(tmp_path / 'c.csv', 'step,loss')}", f"amp={log}"], "'loss' is empty"),
        ([f"fp32={write_csv(tmp_path / 'd.csv', '')}", f"amp={log}"], "there are none"),
        ([f"fp32={log}", f"amp={log}"], "a.csv: listed twice"),
        ([f"fp32={log}", f"baseline={other}"], "two labels name a baseline"),
    ):
        with raises_line(BadInput, reason):
            load_foreign(words, "loss")


def final_values(folder, scalar="loss", **labels) -> list[str]:
    """The words of labels whose runs are a log a value, of the last step alone."""
    found = {}
    for label, values in labels.items():
        places = [folder / label / f"r{number}.csv" for number in range(len(values))]
        cells = [f"step,{scalar}\n9,{value}\n" for value in values]
        found[label] = list(map(write_csv, places, cells))
    return specs(**found)


def curve(path, final, end=100):
    """A falling loss with a tenth of a percent of noise, other for every path."""
    generator = np.random.default_rng(list(str(path.name).encode()))
    noise = final / 1000 * generator.standard_normal(end)
    rows = (f"{step},{final + 1 / step + noise[step - 1]}\n" for step in range(1, end + 1))
    return write_csv(path, "step,loss\n" + "".join(rows))


def verdict(capsys, *words, check=False) -> dict:
    """The only mode's row of results.json; `check`: what --check has to say."""
    found = compared(capsys, "--scalar", "loss", "--check", *words, code=0 if check else 3)
    [group] = found["groups"]
    [row] = group["modes"]
    return row | {"group": group, "stamps": found["stamps"]}


SIX = (1.0, 1.1, 0.9, 1.05, 0.95, 1.02)
AROUND_0 = (0.01, -0.02, 0.015, 0.003, -0.01)


def test_a_run_more_is_judged_with_the_others(tmp_path, capsys):
    """MLPerf's gpt3 at batch 3,072: six records, and the same six with one at eleven times."""
    row = verdict(capsys, *final_values(tmp_path, fp32=SIX, amp=(*SIX, 11.4)))
    assert row["verdict"]["name"] == "inconclusive" and row["verdict"]["method"] == "Welch"
    assert row["mean"] == pytest.approx((sum(SIX) + 11.4) / 7)
    assert f"One stands out: {tmp_path / 'amp/r6.csv'} of this mode" in row["verdict"]["sentence"]


def test_the_order_of_unpaired_logs_changes_nothing(tmp_path, capsys):
    base = (2.00, 2.11, 1.93, 2.07, 1.98, 2.04, 1.9, 2.1, 2.03, 1.97)
    own = (2.05, 1.92, 2.12, 1.99, 2.01, 1.95, 2.08, 2.0, 1.91, 2.1)
    found = []
    for name, order in (("listed", list), ("sorted", sorted)):
        words = final_values(tmp_path / name, fp32=order(base), amp=order(own))
        found.append(verdict(capsys, *words))
        numbers = [found[-1]["verdict"][key] for key in ("name", "low", "high")]
        assert numbers == [found[0]["verdict"][key] for key in ("name", "low", "high")]
    # Who sorts and pairs gets what he asked for.
    paired = verdict(capsys, *words, "--paired", check=True)
    assert paired["verdict"]["method"] == "paired"
    assert "(--paired), and runs with equal ones paired: fp32 0, 1, 2, " in str(paired["group"])


def test_seeds_pair_logs_where_every_run_names_its_own(tmp_path):
    def listed(form: str, count: int) -> str:
        paths = [curve(tmp_path / form.format(n), 2.0 + n / 100) for n in range(count)]
        return ",".join(map(str, paths))

    named, other = listed("a/seed_{}.csv", 3), listed("b/amp-seed{}/log.csv", 3)
    group, found = arms([f"fp32={named}", f"amp={other}"], "loss")
    assert group.by_seed and [run.seed for run in found["amp"].runs] == [0, 1, 2]
    assert group.notes[-1] == (
        "seeds are told in every path, and runs with equal ones paired: fp32 0, 1, 2; amp 0, 1, 2"
    )
    plain = listed("c/s{}.csv", 3)  # a place such as s3://, a step, a size: who knows
    assert not load_foreign([f"fp32={named}", f"amp={plain}"], "loss").by_seed
    twice = named.split(",")[0] + "," + str(curve(tmp_path / "d/seed0.csv", 2.0))
    assert not load_foreign([f"fp32={twice}", f"amp={other}"], "loss").by_seed
    given = ",".join(f"seed{7 + n}:{path}" for n, path in enumerate(plain.split(",")))
    with raises_line(BadInput, "name the seed of every run, or of none"):
        load_foreign([f"fp32={named}", f"amp={given}"], "loss")
    base = ",".join(f"seed{n}:{path}" for n, path in enumerate(named.split(",")))
    group, found = arms([f"fp32={base}", f"amp={given}"], "loss")
    assert group.by_seed and [run.seed for run in found["amp"].runs] == [7, 8, 9]
    fewer, equal = plain.rpartition(",")[0], given.replace("seed8", "seed7")
    for words, paired, reason in (
        ([f"fp32={named}", f"amp={fewer}"], True, "fp32 has 3, amp has 2"),
        ([f"fp32=seed1:{tmp_path / 'a'}", f"amp={given}"], False, "contains 3 runs"),
        ([f"fp32={base}", f"amp={equal}"], False, "two runs have the same seed"),
    ):
        with raises_line(BadInput, reason):
            load_foreign(words, "loss", paired=paired)


@pytest.mark.parametrize(
    ("words", "base", "own", "reason"),
    [
        ("accuracy --higher-is-better --margin 1", (0.76, 0.761, 0.759), (0.10, 0.101, 0.099),
         ["--margin 1: an absolute margin must be below 0.38, half of the mean"]),
        ("top1 --margin 0.4", (76, 76.1, 75.9), (70.8, 70.9, 70.7), ["its direction is unknown"]),
        ("val/score", SIX, SIX, ["--lower-is-better"]),
        ("kl", AROUND_0, AROUND_0, ["0.0004, which 5 runs cannot distinguish", "--absolute"]),
        ("loss --margin 2 --absolute", SIX, SIX, ["must be below 0.502, half of the"]),
        ("loss --lower-is-better --higher-is-better", SIX, SIX, ["give only one of the two"]),
    ],
)  # fmt: skip
def test_units_and_directions_are_asked_for(tmp_path, capsys, words, base, own, reason):
    scalar, *options = words.split()
    told = ["--scalar", scalar, *final_values(tmp_path, scalar, fp32=base, amp=own)]
    refused(capsys, "compare", "--no-report", *told, *options, says=reason)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1e150, 1e-150, 1e290, 1e-290])
def test_numbers_of_any_size_compare(tmp_path, capsys, scale):
    base, worse = np.array(SIX) * scale, np.array(SIX) * 1.5 * scale
    for own, name in ((base * 1.0001, "matches"), (worse, "worse")):
        words = [*final_values(tmp_path, fp32=base, amp=own), "--margin", "0.2"]
        row = verdict(capsys, *words, check=name == "matches")
        assert row["verdict"]["name"] == name and row["verdict"]["low"] != row["verdict"]["high"]


def test_an_absolute_margin_around_zero(tmp_path, capsys):
    words = final_values(tmp_path, fp32=AROUND_0, amp=(0.011, -0.02, 0.014, 0.001, -0.012))
    row = verdict(capsys, *words, "--margin", "0.05", "--absolute", check=True)
    assert row["verdict"]["margin"] == 0.05 and "±0.050, 5 and 5 runs" in row["verdict"]["sentence"]


COPIED = [("fp32", "a"), ("amp", "b")]


def test_copies_are_one_run(tmp_path, capsys):
    for name in ("a0", "b0"):
        one = curve(tmp_path / f"{name}.csv", 2.0)
        for copy in (1, 2):
            (tmp_path / f"{name[0]}{copy}.csv").write_text(one.read_text())
    # A run and its beginning, as a checkpoint leaves it, too.
    whole = tmp_path / "a2.csv"
    whole.write_text("\n".join(whole.read_text().splitlines()[:60]) + "\n")
    paths = {label: [tmp_path / f"{name}{i}.csv" for i in range(3)] for label, name in COPIED}
    row = verdict(capsys, *specs(**paths))
    assert row["verdict"]["name"] == "one pair" and row["verdict"]["seeds"] == [0]
    said = [note for note in row["group"]["notes"] if "bit for bit: one run, not two" in note]
    assert len(said) == 4
    # Values alone: equal ones may be chance, but not if all are.
    words = final_values(tmp_path, fp32=(2, 2, 2), amp=(2, 2, 2))
    assert verdict(capsys, *words)["verdict"]["name"] == "one pair"
    words = final_values(tmp_path, fp32=(3, 3, 4, 3), amp=(3, 3, 4, 3))
    assert verdict(capsys, *words)["verdict"]["seeds"] == [0, 1, 2, 3]


@pytest.mark.parametrize("form", ["{:.3f}", "{:.6g}", "{:.2e}"])
def test_copies_that_are_rounded_are_one_run(tmp_path, capsys, form):
    for label in ("a", "b"):
        whole = curve(tmp_path / f"{label}0.csv", 2.0)
        head, *rows = whole.read_text().splitlines()
        cells = (row.split(",") for row in rows)
        short = "".join(f"{step},{form.format(float(value))}\n" for step, value in cells)
        write_csv(tmp_path / f"{label}1.csv", f"{head}\n{short}")
        curve(tmp_path / f"{label}2.csv", 2.0)  # another seed, which ends closely by
    paths = {label: [tmp_path / f"{name}{i}.csv" for i in range(3)] for label, name in COPIED}
    row = verdict(capsys, *specs(**paths))
    assert row["verdict"]["name"] == "inconclusive" and row["verdict"]["seeds"] == [0, 2]
    said = [note for note in row["group"]["notes"] if "one run, not two" in note]
    assert len(said) == 2 and all("to the digits of the shorter: one run" in n for n in said)


def test_curves_of_both_labels_that_are_equal_are_told(tmp_path, capsys):
    base = [curve(tmp_path / f"a{n}.csv", 2.0) for n in range(3)]
    own = [write_csv(tmp_path / f"b{n}.csv", path.read_text()) for n, path in enumerate(base)]
    own[0] = curve(tmp_path / "b.csv", 2.0)
    notes = verdict(capsys, *specs(fp32=base, amp=own), check=True)["group"]["notes"]
    told = "2 of 3 runs of amp are runs of fp32, bit for bit"
    assert any(note.startswith(told) for note in notes)


def test_several_runs_in_one_log_are_refused(tmp_path):
    """Two event files in a folder are one resumed run, unless they say different things."""
    for value in (2.0, 3.0):
        write_events(tmp_path / "a", {"loss": [(step, value + 1 / step) for step in (1, 2, 3)]})
        write_events(tmp_path / "b", {"loss": [(step, 2 + 1 / step) for step in (1, 2, 3)]})
    other = curve(tmp_path / "c.csv", 2.0)
    told = "a: value 4: begins again, at step 1 after 3: there may be a second run"
    with raises_line(BadInput, told):
        load_foreign(specs(fp32=other, amp=tmp_path / "a"), "loss")
    for steps in (range(1, 21), range(15, 25)):
        write_events(
            tmp_path / "c", {"loss": [(step, 2 + 1 / (step + len(steps))) for step in steps]}
        )
    for name, told in (("b", "3 steps written twice"), ("c", "goes back to step 15 after 20")):
        group, _ = arms(specs(fp32=other, amp=tmp_path / name), "loss")
        assert any(told in note for note in group.notes)


def test_runs_that_ended_with_the_same_value_are_told(tmp_path, capsys):
    labels = ("fp32", "amp")
    for label in labels:
        for seed in range(3):
            rows = "".join(f"{s},{2 + 0.1 * seed if s < 9 else 2}\n" for s in range(1, 13))
            write_csv(tmp_path / f"{label}{seed}.csv", "step,loss\n" + rows)
    paths = {name: [tmp_path / f"{name}{seed}.csv" for seed in range(3)] for name in labels}
    row = verdict(capsys, *specs(**paths), check=True)
    assert "All 3 runs of this mode ended with the same value" in row["verdict"]["sentence"]


@pytest.mark.parametrize("parts", [("train", "validation"), ("rank0", "rank1")])
def test_parts_of_runs_are_no_runs(tmp_path, parts):
    """Keras writes train/ and validation/ into the folder of each run."""
    for run in ("k0", "k1", "m0", "m1"):
        for part in parts:
            curve(tmp_path / run / part / f"{run}{part}.csv", 2.0)
    k0, k1, m0, m1 = (tmp_path / run for run in ("k0", "k1", "m0", "m1"))
    words = specs(fp32=[k0, k1], amp=[m0, m1])
    with raises_line(BadInput, "runs, or parts of one"):
        load_foreign(words, "loss")
    for run in (k0, k1, m0, m1):  # one part each is the run itself
        shutil.rmtree(run / parts[1])
    first = [path / parts[0] for path in (k0, k1, m0, m1)]
    for one in (words, specs(fp32=first[:2], amp=first[2:])):
        assert [len(arm.runs) for arm in arms(one, "loss")[1].values()] == [2, 2]


def test_a_divergence_begins_where_the_values_end(tmp_path, capsys):
    paths = {label: [curve(tmp_path / f"{label}{n}.csv", 2.0) for n in range(3)] for label in "ab"}
    lines = paths["b"][1].read_text().splitlines()
    lines[10] = "10,nan"  # and finite again
    lines[40:] = [f"{step},nan" for step in range(40, 101)]
    paths["b"][1].write_text("\n".join(lines) + "\n")
    row = verdict(capsys, *specs(fp32=paths["a"], amp=paths["b"]))
    told = "diverged in 1 of 3 runs (first at step 40: non-finite loss)"
    assert row["verdict"]["sentence"].startswith(told)
    row = verdict(capsys, *specs(fp32=paths["b"], amp=paths["a"]))
    assert "FP32 itself diverged in 1 of 3 runs (first at step 40" in row["verdict"]["sentence"]
    assert any("cut them off if they only fill the log up" in n for n in row["group"]["notes"])


def test_nan_between_the_values_of_a_sparse_column_only_fills_it(tmp_path):
    def sparse(name: str, end: int) -> str:
        values = [2 + 1 / s if s % 10 == 5 and s < end else "nan" for s in range(1, 101)]
        rows = "".join(f"{s},{value}\n" for s, value in enumerate(values, 1))
        return str(write_csv(tmp_path / name, "step,loss\n" + rows))

    group, found = arms([f"fp32={sparse('a.csv', 101)}", f"amp={sparse('b.csv', 50)}"], "loss")
    assert group.baseline.runs[0].evals["step"].tolist() == list(range(5, 101, 10))
    values = found["amp"].runs[0].evals["loss"]
    assert np.isfinite(values[:5]).all() and np.isnan(values[5:]).all() and len(values) == 60


def test_a_short_log_shortens_the_comparison_and_fails_the_check(tmp_path, capsys):
    ends = {"fp32": (100, 100, 100), "amp": (100, 100, 60)}
    paths = {
        label: [curve(tmp_path / f"{label}{n}.csv", 2.0, end) for n, end in enumerate(own)]
        for label, own in ends.items()
    }
    row = verdict(capsys, *specs(**paths))
    assert row["verdict"]["name"] == "matches" and row["outcomes"][0]["value"] > 2.01  # 1 / 60
    [left] = row["verdict"]["left_out"]
    assert left == (
        f"compared up to step 60 of 100, at the 60 steps that all logs have: {tmp_path}/amp2.csv "
        "ends at 60"
    )
    assert f"loss: left out of amp: {left}" in row["stamps"]
    assert row["verdict"]["sentence"].endswith(f" Left out: {left}.")


@pytest.mark.parametrize("scalar", ["perplexity", "eval/ppl"])
def test_a_perplexity_is_judged_as_its_logarithm_and_it_is_said(tmp_path, capsys, scalar):
    base = np.array([4.0, 4.01, 3.99])
    words = final_values(tmp_path, scalar, fp32=np.exp(base), amp=np.exp(1.05 * base))
    assert main(["compare", "--no-report", "--scalar", scalar, *words]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "lower is better, as its logarithm, margin ±1 % of FP32's mean logarithm" in printed
    assert "difference +5.00 %" in printed


def test_one_run_each_gives_facts(tmp_path, capsys):
    rows = [(step, 2 + 1 / step) for step in range(1, 101)]
    text = "step,loss\n" + "".join(f"{step},{value!r}\n" for step, value in rows)
    a, b = (write_csv(tmp_path / name, text) for name in ("a.csv", "b.csv"))
    found = verdict(capsys, *specs(fp32=a, amp=b))["verdict"]
    assert found["name"] == "one pair" and found["facts"]["identical"]
    about = "one pair (equal at all 100 compared steps, bit for bit): facts, no verdict."
    assert found["sentence"].startswith(about)
    # A gap of (step - 1/2) / 50 percent; the last ten steps, in parts of 3, 3, 2 and 2, are 92, 95,
    # 97.5 and 99.5 in the mean.
    text = "step,loss\n" + "".join(f"{s},{v * (1 + (s - 0.5) / 5000)!r}\n" for s, v in rows)
    b.write_text(text)
    found = verdict(capsys, *specs(fp32=a, amp=b))["verdict"]
    first, second, third = found["sentence"].split("\n")
    assert first == "one pair (+0.0003 at step 1): facts, no verdict."  # 3 / 10,000
    assert second == (
        "Over the last tenth of the records (10 matched steps, 91 to 100): loss +1.90 % (+0.038), "
        "its quarters +1.83 +1.89 +1.94 +1.98 %; bar 1 %: this gap is outside by 0.90 %."
    )
    assert third.endswith("three runs of each give a verdict.")


@pytest.mark.slow
def test_a_bar_and_a_scatter_of_one_pair_of_logs_are_said_on_the_line(
    tmp_path, capsys, monkeypatch
):
    """The numbers of a published pair of 24,000 steps: +0.0040 against a bar of 0.01."""
    monkeypatch.setenv("COLUMNS", "80")
    steps = range(10, 24_001, 10)
    for name, gap in (("fp32", 0.0), ("amp", 0.004)):
        rows = "".join(f"{step},{2.6 + 1 / step + gap:.6f}\n" for step in steps)
        write_csv(tmp_path / f"{name}.csv", "step,loss\n" + rows)
    monkeypatch.chdir(tmp_path)
    words = ["compare", "--scalar", "loss", "fp32=fp32.csv", "amp=amp.csv", "--bar", "0.01"]
    words += ["--absolute", "--pair-sd", "0.0019"]
    assert main([*words, "--out", "report"]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    for said in (
        "Over the last tenth of the records (240 matched steps, 21,610 to 24,000): loss +0.0040 "
        "(+0.15 %), its quarters +0.0040 +0.0040 +0.0040 +0.0040; bar 0.01: this gap is inside by "
        "0.0060.",
        # 0.004 + 1.6449 * 0.0019 = 0.007125
        "Inside 0.01 at 5 % if the scatter of pairs is 0.0019 (--pair-sd, chosen after the runs): "
        "0.004 + 1.645 * 0.0019 = 0.007125.",
    ):
        assert said in " ".join(printed.split())
    page = (tmp_path / "report/report.html").read_text()
    assert 'aria-label="Difference to FP32 over steps: loss. amp: ends at +0.0040.' in page
    assert "<br>Inside 0.01 at 5 %" in page
    # A scatter that is said after the runs decides nothing.
    assert main([*words, "--no-report", "--check"]) == 3
    assert "--check: amp: one pair\n" in capsys.readouterr().out


@pytest.mark.parametrize("pair", [("seed0:a.csv", "seed1:b.csv"), ("a.csv,c.csv", "b.csv")])
def test_a_scatter_of_pairs_needs_one_pair(tmp_path, capsys, monkeypatch, pair):
    monkeypatch.chdir(tmp_path)
    for name in "abc":
        curve(tmp_path / f"{name}.csv", 2.0)
    words = [f"{label}={paths}" for label, paths in zip(("fp32", "amp"), pair, strict=True)]
    says = "--pair-sd 0.001: needs one run of the baseline and one run of a mode with the same seed"
    refused(capsys, "compare", "--scalar", "loss", *words, "--pair-sd", "0.001", says=says)


def test_the_gap_of_two_runs_is_drawn(tmp_path):
    paths = [curve(tmp_path / f"{name}.csv", 2.0) for name in "ab"]
    group = assess(load_foreign(specs(fp32=paths[0], amp=paths[1]), "loss"), metric="loss")
    [(_, band, _)] = differences(group, evaluation("loss"), 240)
    own, base = (group.every_run[i].evals["loss"] for i in (1, 0))
    np.testing.assert_allclose(band.mean, 100 * (own / base - 1), atol=1e-9)


def csv_logs(folder, name: str, every: int, count: int = 3) -> str:
    """Logs of a falling loss over 1,000 steps; their names with commas between."""
    names = []
    for seed in range(count):
        lines = ["step,loss"]
        steps = range(every, 1001, every)
        lines += [f"{step},{(2 + seed / 100) * (1.2 - step / 5000)}" for step in steps]
        names.append(f"{name}{seed}.csv")
        (folder / names[-1]).write_text("\n".join(lines) + "\n")
    return ",".join(names)


def test_logs_of_other_intervals_are_not_averaged_over_other_stretches(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    # The last tenth of 1,000 steps against the last three of five values: from 920 and from 600.
    dense, sparse = csv_logs(tmp_path, "dense", 10), csv_logs(tmp_path, "sparse", 200)
    [group] = compared(capsys, "--scalar", "loss", f"fp32={sparse}", f"same={dense}")["groups"]
    assert "logs of unequal steps: compared at the 5 steps that all have" in group["notes"]
    assert group["modes"][0]["mean"] == group["baseline"]["mean"]
    offset = csv_logs(tmp_path, "offset", 333)  # 333, 666, 999
    words = ["compare", "--scalar", "loss", f"fp32={sparse}", f"same={offset}"]
    refused(capsys, *words, says="0 steps in common")


@pytest.mark.slow
def test_what_was_averaged_and_whose_margin_it_is_are_told(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    base, own = csv_logs(tmp_path, "one", 20), csv_logs(tmp_path, "other", 20)  # 50 values each
    words = ["--scalar", "loss", "--paired", f"fp32={base}", f"amp={own}", "--margin", "0.005"]
    found = compared(capsys, *words)
    [group] = found["groups"]
    assert group["judged_steps"] == [920, 940, 960, 980, 1000] and group["window"] == 5
    assert found["stamps"] == [] and "margin: 0.005, from the command line" in found["notes"]
    assert main(["compare", *words]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Judged: loss, mean of steps 920 to 1000 (5 values), lower is better" in shown
    assert "set up for" not in shown
    page = " ".join((tmp_path / "compare/report.html").read_text().split())
    assert "chosen when the logs were compared" in page and "steps 920 to 1000" in page
    assert "fixed in the configuration" not in page and "set up for" not in page


def test_a_failed_check_ends_with_its_reason(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    logs = [f"fp32={csv_logs(tmp_path, 'fp32', 10)}", f"amp={csv_logs(tmp_path, 'amp', 15)}"]
    for path in tmp_path.glob("amp*.csv"):  # ends early
        path.write_text("\n".join(path.read_text().split("\n")[:40]) + "\n")
    words = ["compare", "--scalar", "loss", "--paired", "--no-report", *logs]
    assert main(words) == 0 and "--check" not in capsys.readouterr().out
    assert main([*words, "--check"]) == 3
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("--check: amp: left out, compared up to step 570 of 1000")


def test_a_tag_that_is_not_in_the_file_name_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["compare", "--scalar", "eval/loss", "--no-report"]
    for name in ("a", "b"):
        for seed in range(3):
            rows = "".join(f"0,{s},{2 + seed / 100}\n" for s in range(1, 9))
            text = "Wall time,Step,Value\n" + rows
            (tmp_path / f"run-{name}{seed}-tag-train_loss.csv").write_text(text)
            (tmp_path / f"{name}{seed}.csv").write_text(text)
    arms = [
        f"{label}=" + ",".join(f"run-{label[0]}{seed}-tag-train_loss.csv" for seed in range(3))
        for label in ("a_base", "b_mode")
    ]
    refused(capsys, *words, *arms, says="train_loss")
    arms = ["baseline=a0.csv,a1.csv,a2.csv", "b=b0.csv,b1.csv,b2.csv"]
    assert main([*words, *arms]) == 0
    assert "names no scalar; taken for eval/loss" in capsys.readouterr().out


@pytest.mark.slow
def test_the_reader_loads_what_it_reads_with_alone():
    program = "import sys, mprun.extensions.logs.external_logs\n"
    absent = {"torch", "tensorboard", "tensorflow", "matplotlib", "sklearn", "scipy"}
    program += f"assert not (found := {absent} & set(sys.modules)), found"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
