"""`mprun.load` and `mprun.compare`: what a script or a notebook gets of recorded runs."""

import json
import math
import pickle
import subprocess
import sys
from xml.etree import ElementTree

import numpy as np
import pytest

import mprun
from mprun.cli import main
from mprun.errors import BadInput, Damaged, MissingExtra
from mprun.numerics.exponent_shares import AppliedUpdates, ExponentCounts, LostUpdates
from mprun.numerics.probe_record import (
    Agreement,
    LearnerProbe,
    ProbeRecord,
    TensorStats,
    write_probe,
)
from mprun.record.metrics import MetricsFile

from ..helpers import raises_line
from .run_folders import CONFIG, change_record, compared, write_run, write_study

EVIL = "<script>alert(1)</script>"
BASE, AMP = (2.00, 2.02, 1.99), (2.002, 2.021, 1.993)


@pytest.fixture
def study(tmp_path, monkeypatch):
    """outputs/study: three seeds of fp32 and amp, and of fp16_naive, one of which diverged."""
    monkeypatch.chdir(tmp_path)
    finals = {"fp32": BASE, "amp": AMP, "fp16_naive": [1.05 * loss for loss in BASE]}
    folder = write_study(tmp_path / "outputs" / "study", finals)
    change_record(folder / "fp16_naive-s2", status="diverged", last_step=12, cause=EVIL)
    return folder


def test_a_run_has_its_record_and_every_number(study):
    run = mprun.load(study / "amp-s1").one
    assert (run.mode, run.scaler, run.seed, run.status) == ("amp", "dynamic", 1, "done")
    assert (run.cause, run.last_step) == (None, 40)
    assert run.config["optim"] == CONFIG["optim"]
    assert run.record["environment"]["packages"] == {"torch": "2.15.0"}
    # `write_run`: steps 1 to 20, 30 and 40, loss final + 1 / step and 1e-9 a seed; one evaluation.
    train, steps = run.columns("train"), [*range(1, 21), 30, 40]
    assert train["step"].tolist() == steps and train["step"].dtype == np.int64
    np.testing.assert_array_equal(train["loss"], [2.021 + 1 / step + 1e-9 for step in steps])
    assert run.metrics == {"loss": 2.021, "perplexity": 2.0}
    assert run.columns("evals")["loss"].tolist() == [2.021]
    assert run.columns("probes") == {}
    said = "amp, seed 1, done at step 40; loss 2.021, perplexity 2"
    assert repr(run) == f"<run {study / 'amp-s1'}: {said}>"


def test_long_records_are_not_thinned_and_hold_what_is_no_number(tmp_path):
    write_run(tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").unlink()
    file = MetricsFile(tmp_path / "run" / "metrics.jsonl")
    for step in range(1, 2001):
        head = {"split": "train", "step": step, "updates": step, "skipped": 0}
        file.write({**head, "loss": math.nan if step == 7 else 1.0, "note": "a"})
    file.write({"split": "train", "step": 2001, "updates": 1, "skipped": 0, "grad_norm": math.inf})
    file.close()
    found = mprun.load(tmp_path / "run").one.columns("train")
    assert len(found["step"]) == 2001
    # NaN where it was recorded, and where a record has no such number.
    assert np.flatnonzero(np.isnan(found["loss"])).tolist() == [6, 2000]
    assert np.isnan(found["grad_norm"][0]) and found["grad_norm"][-1] == math.inf
    assert found["note"].dtype == object and found["note"][-1] is None


def test_a_run_that_still_runs_tells_how_far_it_is(tmp_path):
    run = mprun.load(write_run(tmp_path / "run", status="running")).one
    assert (run.status, run.last_step) == ("running", 40)
    assert run.metrics == {"loss": 1.0, "perplexity": 2.0}  # of the newest evaluation
    (tmp_path / "run" / "metrics.jsonl").unlink()
    begun = mprun.load(tmp_path / "run").one
    assert (begun.last_step, begun.metrics, begun.columns("train")) == (0, {}, {})
    assert begun._repr_html_() and "running at step 0" in repr(begun)


def test_a_folder_gives_every_run_below_it(study):
    runs = mprun.load("outputs")
    assert [run.path.name for run in runs[:3]] == ["amp-s0", "amp-s1", "amp-s2"]
    assert len(runs) == 9 and len(runs[3:5]) == 2
    evals = runs.columns("evals")
    assert evals["run"][0] == "outputs/study/amp-s0" and evals["mode"][0] == "amp"
    assert evals["seed"].tolist() == [0, 1, 2] * 3
    lines = repr(runs).splitlines()
    assert len(lines) == 10 and lines[0].split()[:3] == ["run", "mode", "scaler"]


def test_a_run_directory_gives_a_sequence_of_one(study):
    """One type, whatever lies at the path; what only a single run has says where it is."""
    runs = mprun.load(study / "amp-s1")
    assert len(runs) == 1 and runs[0] is runs.one
    assert repr(runs) == repr(runs.one) and runs._repr_html_() == runs.one._repr_html_()
    assert {*runs.columns("evals")} - {*runs.one.columns("evals")} == {"run", "mode", "seed"}
    several = mprun.load(study)
    for name in ("metrics", "record"):
        with raises_line(AttributeError, f"'{name}'; write .one.{name}"):
            getattr(runs, name)
        with raises_line(AttributeError, f"'{name}'; write [0].{name} (of 9 runs)"):
            getattr(several, name)
    with raises_line(AttributeError, "no attribute 'metric'"):
        runs.metric  # noqa: B018
    for none_alone in (several, several[:0]):
        with raises_line(BadInput, f"there are {len(none_alone)} runs; use [0]"):
            none_alone.one  # noqa: B018
    for each in (runs, several, several[:0]):
        assert repr(pickle.loads(pickle.dumps(each))) == repr(each)


def stats(value: float, count: int) -> TensorStats:
    """`count` values 2^e, and one zero."""
    classes = [{str(round(math.log2(value))): count}, {}, {}, {}]
    counts = ExponentCounts.from_json({"zeros": 1, "inf": 0, "nan": 0, "classes": classes})
    return TensorStats(counts, value, "float16")


def test_probes_are_rows(tmp_path):
    folder = write_run(tmp_path / "run", "amp")
    values = {"weight_gradients": 2.0**-26, "weights": 0.5, "updates": 2.0**-12}
    learner = LearnerProbe(
        loss_scales=("loss_scale",),
        tensors={kind: {"head": stats(value, 3)} for kind, value in values.items()},
        lost_updates={"head": LostUpdates(total=4, zero=1, fp16=2, bf16=3)},
        applied_updates={"head": AppliedUpdates(applied=3.0, wanted=4.0)},
        shadow={"head": Agreement(dot=2.0, own=4.0, fp32=1.0, difference=0.25)},
    )
    write_probe(folder, ProbeRecord(5, False, {"loss_scale": 16.0}, {"model": learner}))
    shadow_alone = LearnerProbe(("loss_scale",), shadow={"head": Agreement(1.0, 1.0, 1.0, 0.0)})
    write_probe(folder, ProbeRecord(9, True, {"loss_scale": 15.0}, {"model": shadow_alone}))
    found = mprun.load(folder).one.columns("probes")
    rows = [dict(zip(found, row, strict=True)) for row in zip(*found.values(), strict=True)]
    at = {(row["step"], row["kind"]): row for row in rows}
    assert len(rows) == 4 and found["skipped"].tolist() == [False] * 3 + [True]
    gradients = at[5, "weight_gradients"]
    # 2^-26 is below half of FP16's smallest number, which is 2^-24.
    assert (gradients["underflow"], gradients["nonzero"], gradients["values"]) == (1.0, 3, 4)
    assert gradients["log2_loss_scale"] == 16 and gradients["amax"] == 2.0**-26
    assert gradients["cosine"] == 1.0 and gradients["norm_ratio"] == 2.0
    assert gradients["relative_error"] == 0.5 and math.isnan(gradients["lost_fp16"])
    assert (at[5, "updates"]["lost_fp16"], at[5, "updates"]["lost_bf16"]) == (2 / 3, 1.0)
    assert at[5, "updates"]["applied"] == 0.75 and math.isnan(at[5, "weights"]["applied"])
    assert at[5, "weights"]["underflow"] == 0 and math.isnan(at[5, "weights"]["log2_loss_scale"])
    last = at[9, "weight_gradients"]
    assert last["cosine"] == 1 and math.isnan(last["amax"])


def test_frames_are_pandas(study):
    pandas = pytest.importorskip("pandas")
    runs = mprun.load(study)
    assert isinstance(runs[0].train, pandas.DataFrame) and len(runs[0].train) == 22
    assert runs[0].evals["loss"].tolist() == [2.002] and runs[0].probes.empty
    assert len(runs.train) == 9 * 22 and list(runs.evals)[:3] == ["run", "mode", "seed"]
    assert runs.table["status"].tolist().count("diverged") == 1 and runs.probes.empty
    verdicts = mprun.compare(study).verdicts
    assert verdicts["verdict"].tolist() == ["baseline", "diverged", "matches"]


@pytest.mark.slow
def test_a_comparison_is_what_the_command_prints_and_writes(study, capsys):
    found = mprun.compare("outputs")
    assert main(["compare", "outputs", "--no-report"]) == 0
    assert capsys.readouterr().out == f"{found!r}\n"
    assert compared(capsys, "outputs") | {"created": ""} == found.to_dict() | {"created": ""}
    assert [path.name for path in study.parent.iterdir()] == ["study"]  # nothing by itself
    for _ in range(2):  # its own files are replaced
        report = found.write(study.parent / "mine")
    assert report == study.parent / "mine" / "report.html"
    written = json.loads((report.parent / "results.json").read_text())
    named = {*written.pop("figures"), "report.html", "report.md", "results.json"}
    assert {path.name for path in report.parent.iterdir()} == named
    assert written == found.to_dict()
    with raises_line(BadInput, "contains other files"):
        found.write(study)


def test_verdicts_hold_the_numbers_of_the_table(study):
    found = mprun.compare([study]).columns()
    assert found["mode"].tolist() == ["fp32", "fp16_naive", "amp"]
    assert found["verdict"].tolist() == ["baseline", "diverged", "matches"]
    mean = sum(BASE) / 3
    # Mean difference 0.002; s = 0.001; t(0.95, 2) = 2.919986; in percent of FP32's mean, whose
    # own scatter of 0.8 % moves the ends of 0.1 % by less than 0.003.
    half = 2.919986 * 0.001 / 3**0.5
    numbers = [found[name][2] for name in ("difference", "low", "high", "margin")]
    expected = [100 * value / mean for value in (0.002, 0.002 - half, 0.002 + half, mean / 100)]
    assert numbers == pytest.approx(expected, abs=0.003)
    assert found["unit"][2] == "%" and found["method"][2] == "paired" and found["runs"][2] == 3
    assert np.isnan(found["difference"][:2]).all() and found["diverged"].tolist() == [0, 1, 0]


def test_options_are_those_of_the_command(study, capsys):
    asked = {"metric": "perplexity", "margin": 0.0005, "baseline": study / "fp32-s0"}
    words = [word for name, value in asked.items() for word in (f"--{name}", value)]
    own = mprun.compare(study, **asked).to_dict()
    assert compared(capsys, study, *words) | {"created": ""} == own | {"created": ""}
    assert words[::2] == [stamp.split()[0] for stamp in own["stamps"][:3]]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"margin": -1}, "--margin -1"),
        ({"looks": [5, 3]}, "--looks 5,3"),
        ({"allow": "optim.lr0"}, "--allow optim.lr0"),
        ({"scalar": "speed"}, "--higher-is-better"),
        ({"scalar": "loss", "higher_is_better": True, "lower_is_better": True}, "one of the two"),
    ],
)
def test_bad_input_is_one_line_as_of_the_command(study, options, named):
    if "scalar" in options:
        pytest.importorskip("mprun.extensions.logs")
    with raises_line(BadInput, named):
        mprun.compare(["outputs"], **options)


def test_what_is_no_run_is_refused(study):
    (study / "empty").mkdir()
    for path in ("nowhere", study / "amp-s0" / "run.json", study / "empty"):
        for ask in (mprun.load, mprun.compare):
            with raises_line(BadInput, str(path)):
                ask(path)
    with raises_line(BadInput, "needs at least one PATH"):
        mprun.compare([])
    with raises_line(BadInput, "must be train, evals or probes"):
        mprun.load(study / "amp-s0").columns("eval")
    (study / "amp-s0" / "metrics.jsonl").write_text("7\n{}\n")
    with raises_line(Damaged, "line 1 is not a record"):
        mprun.load(study / "amp-s0").columns("train")
    (study / "amp-s0" / "run.json").write_text("{")
    with raises_line(Damaged, "amp-s0"):
        mprun.load(study / "amp-s0")
    with pytest.raises(AttributeError, match="no attribute 'compere'"):
        mprun.compere  # noqa: B018
    assert issubclass(MissingExtra, BadInput) and issubclass(MissingExtra, ImportError)


def page(shown) -> ElementTree.Element:
    """Return the page of a notebook, parsed: well-formed, with nothing that leads out or runs."""
    html = shown._repr_html_()
    assert EVIL not in html and "http" not in html.replace("http://www.w3.org/", "")
    tree = ElementTree.fromstring(html)
    assert not [element for element in tree.iter() if element.tag.endswith(("script", "link"))]
    return tree


@pytest.mark.slow
def test_a_notebook_shows_tables_and_figures(study, tmp_path):
    found = mprun.compare(study)
    tree = page(found)
    [table] = tree.iter("table")
    rows = [["".join(cell.itertext()) for cell in row] for row in table.iter("tr")]
    assert rows[0][:3] == ["verdict", "mode", "loss"]
    shown = [["baseline", "fp32"], ["diverged", "fp16_naive"], ["matches", "amp"]]
    assert [row[:2] for row in rows[1:]] == shown
    assert EVIL in "".join(tree.itertext())  # the cause, as text
    figures = [element for element in tree.iter() if element.tag.endswith("svg")]
    assert len(figures) >= 2 and all(figure.get("aria-label") for figure in figures)
    # The theme's own ink, no page of its own: black on white and white on black.
    again = found._repr_html_()
    assert "currentColor" in again
    assert ElementTree.tostring(ElementTree.fromstring(again)) == ElementTree.tostring(tree)
    # Ids of two comparisons in one notebook differ.
    other = write_study(tmp_path / "other", {"fp32": BASE, "amp": BASE})
    ids = [{e.get("id") for e in t.iter()} - {None} for t in (tree, page(mprun.compare(other)))]
    assert all(ids) and not ids[0] & ids[1]
    runs = mprun.load(study)
    assert len(list(page(runs).iter("tr"))) == 10 and len(list(page(runs[0]).iter("tr"))) == 2


@pytest.mark.slow
def test_what_compares_imports_no_torch_and_the_rest_when_it_is_needed(study):
    """In one process: from the package, which loads nothing, to the command with all it writes."""
    program = """
import sys, mprun

def absent(*names):
    found = set(names) & set(sys.modules)
    assert not found, found

assert {"load", "compare"} <= set(dir(mprun))
absent("torch", "numpy", "hydra", "pandas", "scipy", "matplotlib", "jinja2")
mprun.load("outputs")._repr_html_()
absent("torch", "hydra", "scipy", "matplotlib", "tensorboard")
import mprun.comparison.grouping, mprun.comparison.tensorboard_summary
absent("torch", "tensorflow", "matplotlib", "sklearn", "scipy")
# It can be called whatever was imported first.
found = mprun.compare("outputs")
assert found.groups and mprun.comparison.load.load_runs
from mprun import compare, load
assert repr(compare("outputs")) and len(load("outputs")) == 9
absent("torch", "hydra", "pandas", "matplotlib")
found._repr_html_()
from mprun.cli import main
assert main(["compare", "outputs", "--tensorboard"]) == 0
absent("torch", "tensorflow", "pandas")
# Without pandas a frame names the extra.
sys.modules["pandas"] = None
try:
    load("outputs/study/amp-s0").one.train
except ImportError as error:
    print(error)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    told = "pandas: is not installed; pip install 'mprun[notebook]'"
    assert ended.stdout.splitlines()[-1].startswith(told)
