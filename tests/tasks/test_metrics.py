"""Every metric states its direction and its unit, and what judges a run asks for them there."""

import json
import sys
from typing import get_args

import pytest
import torch

from mprun import compare
from mprun.cli import main
from mprun.cli.dispatch import verbs
from mprun.comparison.verdict import comparable
from mprun.comparison.wording import difference_text
from mprun.config.components import TASKS
from mprun.config.compose import compose_config
from mprun.config.registry import TaskKind, metric_called, task_of
from mprun.entry_points import loaded
from mprun.numerics.post_mortem import read_post_mortem
from mprun.record.metric_facts import _MARGINS, LOSS, Metric, told_by_name
from mprun.record.run_record import MetricRecord
from mprun.training.run import prepare

from ..compare.run_folders import write_run
from ..helpers import ONE_CORE, TINY_GAN, record_of, refused
from ..numerics.small_runs import SMALL
from ..tables import with_extensions

SMALL = with_extensions("SMALL", SMALL | {"dcgan": TINY_GAN})
HIGHER = {"top1", "top5", "map", "bleu"}
POINTS = HIGHER | {"cer"}


@pytest.mark.parametrize("name", TASKS)
def test_a_registered_task_declares_what_its_class_has(name):
    kind = TASKS[name]
    assert loaded(kind.builder).metrics == kind.metrics
    assert len({metric.name for metric in kind.metrics}) == len(kind.metrics)
    assert kind.metric("loss") == LOSS and kind.metric(kind.judged) is not None
    for metric in kind.metrics:
        assert metric.higher_is_better == (metric.name in HIGHER), metric
        unit = "points" if metric.name in POINTS else "relative"
        assert metric.unit == ("perplexity" if metric.name == "perplexity" else unit), metric


@pytest.mark.slow
def test_the_small_runs_have_every_task():
    assert {task_of(compose_config(own).config.model) for own in SMALL.values()} == TASKS.keys()


@pytest.mark.parametrize("name", [name for name in SMALL if name not in ("resnet50", "two_stages")])
@pytest.mark.few(1)
def test_an_evaluation_returns_what_its_task_declares(name):
    judged = ["compare.metric=sliced_wasserstein"] * (name == "dcgan")
    config = compose_config([*ONE_CORE, *SMALL[name], *judged]).config
    built = prepare(config, torch.device("cpu"), 1)
    assert set(built.task.evaluate()) == {metric.name for metric in built.task.metrics}


def test_margins_follow_from_the_unit():
    def margin(unit, data="cifar10", **more):
        return Metric("m", higher_is_better=True, unit=unit, **more).margin_on(data)

    assert [margin(unit) for unit in _MARGINS] == [0.01, 0.01, 0.5, 0.005, None]
    assert margin("points", "digits", counts_samples=True) == 1.0  # one of 360 is 0.28 points
    assert margin("fraction", "digits", counts_samples=True) == 0.01
    assert margin("points", "digits") == 0.5 and margin("own", "digits", margin=3.0) == 3.0
    assert margin("points", "digits", margin=0.7, counts_samples=True) == 0.7
    assert get_args(MetricRecord.__annotations__["unit"]) == tuple(_MARGINS)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"higher_is_better": True}, "unit"),
        ({"unit": "points"}, "higher_is_better"),
        ({"higher_is_better": True, "unit": "percent"}, "must be one of relative, perplexity"),
        ({"higher_is_better": "no", "unit": "own"}, "must be True or False"),
        ({"higher_is_better": True, "unit": "own", "margin": -1}, "must be above 0"),
    ],
)
def test_a_metric_without_direction_or_unit_is_none(facts, reason):
    with pytest.raises((TypeError, ValueError), match=reason):
        Metric("m", **facts)


@pytest.mark.parametrize(
    "facts", [{"metrics": ("loss",)}, {"metrics": (LOSS,), "judged": "f1"}, {"metrics": ()}]
)
def test_a_task_judges_what_it_declares(facts):
    with pytest.raises((TypeError, ValueError), match="task t: "):
        TaskKind(name="t", builder="a:b", **facts)


def test_only_a_plain_name_tells_its_direction():
    said = {"val/loss": False, "ppl": False, "eval_acc": True, "iou": None, "top1_err": None}
    assert {name: told_by_name(name) for name in said} == said


# A user's task

OWN = """
from torch import nn
from mprun.record.metric_facts import Metric
from mprun.tasks.supervised import Classification


def network(data):
    images, _ = data.train_batch(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(images[0].numel(), data.num_classes))


class Silent(Classification):
    def evaluate(self):
        found = super().evaluate()
        return found | {"f1": found["top1"] / 100}


class WithF1(Silent):
    metrics = (*Classification.metrics, Metric("f1", higher_is_better=True, unit="fraction"))


class Forgetful(WithF1):
    def evaluate(self):
        return Classification.evaluate(self)


class Words(WithF1):
    metrics = ("loss", "f1")


class Alone(WithF1):  # a tuple of one needs a comma
    metrics = (Metric("f1", higher_is_better=True, unit="fraction"))


class Mute(WithF1):
    def evaluate(self):
        super().evaluate()


class Twice(WithF1):
    metrics = (*WithF1.metrics, Metric("f1", higher_is_better=False, unit="fraction"))
"""
RUN = [*ONE_CORE, "model=custom", "model.factory=f1_task:network", "data=digits_32"]
RUN += ["data.batch_size=8", "train.steps=2", "optim=sgd_plain", "output_dir=run"]
F1 = "compare.metric=f1"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "f1_task.py").write_text(OWN)
    return tmp_path


# The class, what else is said, and the line.
REFUSED = [
    (
        *("Silent", [F1]),
        "compare.metric=f1: f1_task:Silent declares loss, top1, top5; for another metric set "
        "compare.higher_is_better=false, or compare.higher_is_better=true with compare.margin=X",
    ),
    (
        *("WithF1", ["compare.metric=F1"]),
        "compare.metric=F1: did you mean 'f1'? f1_task:WithF1 declares loss, top1, top5, f1; "
        "for another metric set compare.higher_is_better=false, or "
        "compare.higher_is_better=true with compare.margin=X",
    ),
    (
        *("Twice", [F1]),
        "model.task=f1_task:Twice: metrics declares f1 twice, with higher_is_better=True and "
        "False; must declare it once",
    ),
    (
        *("Silent", [F1, "compare.higher_is_better=true"]),
        "compare.margin=null: f1 needs a margin, in the unit of the metric",
    ),
    (
        *("WithF1", [F1, "compare.higher_is_better=false"]),
        "compare.higher_is_better=false: f1_task:WithF1 declares that more f1 is better "
        "(allowed: null)",
    ),
    (
        *("WithF1", ["compare.higher_is_better=true"]),
        "compare.higher_is_better=true: f1_task:WithF1 declares that less loss is better "
        "(allowed: null)",
    ),
    (
        *("WithF1", [F1, "compare.margin=0.5"]),
        "compare.margin=0.5: must be below 0.5; of a fraction half a point is 0.005",
    ),
    ("Words", [F1], "model.task=f1_task:Words: metrics must be a tuple of mprun.Metric"),
    ("Alone", [F1], "model.task=f1_task:Alone: metrics must be a tuple of mprun.Metric"),
]


@pytest.mark.few(4)
@pytest.mark.parametrize(("task", "words", "line"), REFUSED)
def test_a_metric_without_a_direction_is_refused_before_anything_is_written(
    folder, capsys, task, words, line
):
    said = refused(capsys, *RUN, f"model.task=f1_task:{task}", *words)
    assert said == f"mprun: {line}\n" and not (folder / "run").exists()


def test_a_key_that_contradicts_a_registered_task_is_refused(folder, capsys):
    said = "mprun: compare.higher_is_better=false: custom declares that more top1 is better"
    assert refused(capsys, *RUN, "compare.higher_is_better=false").startswith(said)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "words", "expected"),
    [
        ("WithF1", [], (True, "fraction", 0.005)),
        ("Silent", ["compare.higher_is_better=true", "compare.margin=0.02"], (True, "own", None)),
        ("Silent", ["compare.higher_is_better=false"], (False, "relative", 0.01)),
    ],
)
def test_a_record_tells_direction_and_unit(folder, task, words, expected):
    assert main([*RUN, f"model.task=f1_task:{task}", F1, *words]) == 0
    found = record_of("run")["metrics"]
    names = ("higher_is_better", "unit", "margin")
    assert tuple(found["f1"][name] for name in names) == expected
    assert tuple(found["top1"][name] for name in names) == (True, "points", 1.0)


def test_a_judged_metric_that_is_not_returned_ends_the_run_and_keeps_its_work(
    folder, capsys, monkeypatch
):
    task = "model.task=f1_task:Forgetful"
    assert main([*RUN, task, F1]) == 2
    line = "mprun: compare.metric=f1: the task's evaluate() returned loss, top1, top5, "
    line += "must return f1; fix it and resume the run"
    assert capsys.readouterr().err.splitlines()[-1] == line
    f1_task = sys.modules["f1_task"]
    monkeypatch.setattr(f1_task.Forgetful, "evaluate", f1_task.Silent.evaluate)
    assert main(["resume=run", task, "model.factory=f1_task:network"]) == 0
    assert "f1" in record_of("run")["final"] and record_of("run")["last_step"] == 2


def test_an_evaluation_that_returns_nothing_is_said_in_one_line(folder, capsys):
    assert main([*RUN, "model.task=f1_task:Mute", F1]) == 2
    said = "mprun: compare.metric=f1: the task's evaluate() returned nothing, "
    assert capsys.readouterr().err.splitlines()[-1].startswith(said)


@pytest.mark.slow
def test_a_metric_that_is_nan_is_told_from_the_loss(folder, capsys):
    source = (folder / "f1_task.py").read_text().replace("found | {", 'found | {"f9": torch.nan, ')
    (folder / "nan_task.py").write_text(f"import torch\n{source}")
    task = ["model.task=nan_task:WithF1", "model.factory=nan_task:network"]
    assert main([*RUN, *task, F1]) == 3
    assert record_of("run")["cause"] == "non-finite evaluation f9 = nan"
    told = "an evaluation returned f9 = nan; the loss is finite"
    assert read_post_mortem(folder / "run")["classification"][0] == told
    if "explain" in verbs():
        capsys.readouterr()
        main(["explain", "run", "--no-cures", *task])
        assert "evaluate(): the loss is finite, and no" in capsys.readouterr().out


# Reading records

FRACTION = {"higher_is_better": True, "unit": "fraction", "margin": 0.005, "counts_samples": False}


def runs_of(folder, name, fp32, amp, metrics=None, more=None):
    """Runs of both modes with three seeds each, whose last evaluations have such values."""
    for mode, value in {"fp32": fp32, "amp": amp}.items():
        for seed, noise in enumerate((-0.0003, 0.0, 0.0003)):
            keys = {"compare.metric": name, "compare.margin": None, **(more or {})}
            record = {"metrics": {name: metrics}} if metrics else {}
            run = write_run(folder / f"{mode}{seed}", mode, seed, overrides=keys, **record)
            lines, own = run / "metrics.jsonl", f'"{name}": {value * (1 + noise)}'
            lines.write_text(lines.read_text().replace('"perplexity": 2.0', own))
    return folder


def edit(folder, old, new):
    """Replace a text in the record of one run of `runs_of`."""
    path = folder / "amp1" / "run.json"
    path.write_text(path.read_text().replace(old, new))


def shown_by(capsys, *command, code=0):
    """What a command prints, with single blanks for all space."""
    assert main([*map(str, command)]) == code
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_every_output_has_the_direction_and_the_unit_of_the_record(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    runs_of(tmp_path, "f1", 0.212, 0.148, FRACTION)
    shown = shown_by(capsys, "compare", tmp_path, "--check", "--tensorboard", code=3)
    assert "Judged: f1, higher is better, margin ±0.005;" in shown and "points" not in shown
    assert "worse amp 0.148 +0.0640 (" in shown
    [group] = json.loads((tmp_path / "compare" / "results.json").read_text())["groups"]
    [mode] = group["modes"]
    assert (group["higher_is_better"], group["relative"], group["margin"]) == (True, False, 0.005)
    assert mode["verdict"]["name"] == "worse" and mode["verdict"]["shown"]["unit"] == ""
    report = (tmp_path / "compare" / "report.html").read_text()
    assert "amp is worse than FP32." in report and "higher is better" in report
    found = compare(tmp_path).columns()
    assert found["verdict"][1] == "worse" and found["difference"][1] == pytest.approx(0.064)


@pytest.mark.parametrize(
    ("name", "fp32", "amp", "verdict"),
    [
        ("top1", 70.0, 60.0, "+10.00 points"),
        ("map", 70.0, 60.0, "+10.00 points"),
        ("cer", 3.0, 4.0, "+1.00 points"),
        ("perplexity", 8.0, 9.0, " %"),
        ("sliced_wasserstein", 1.0, 1.5, "+50.0 %"),
    ],
)
def test_an_older_record_with_a_known_name_reads_as_before(tmp_path, name, fp32, amp, verdict):
    if metric_called(name) is None:
        pytest.skip("its extension is not there")
    [group] = compare(runs_of(tmp_path, name, fp32, amp)).groups
    assert group.rows[0].verdict.name == "worse"
    assert verdict in group.rows[0].verdict.sentence, group.rows[0].verdict.sentence


def test_an_older_record_with_an_unknown_name_is_asked_about(tmp_path, capsys):
    runs_of(tmp_path, "f1", 0.212, 0.148, more={"compare.margin": 0.01})
    words = ["compare", str(tmp_path), "--no-report"]
    error = refused(capsys, *words)
    assert error.startswith("mprun: compare.metric=f1: the runs record no direction")
    told = [*words, "--check", "--margin", "0.01"]
    said = "mprun: compare.metric=F1: is not in the runs' evaluations; did you mean 'f1'? It must "
    for direction in ([], ["--higher-is-better"]):
        error = refused(capsys, *told, "--metric", "F1", *direction)
        assert error.startswith(f"{said}be one of ")
    shown = shown_by(capsys, *told, "--higher-is-better", code=3)
    assert "worse amp 0.148 +0.0640" in shown and "--higher-is-better: said when" in shown
    shown = shown_by(capsys, *words, "--check", "--lower-is-better", code=3)
    assert "better amp 0.148 -30.19 %" in shown


@pytest.mark.parametrize(
    ("name", "higher", "difference"), [("top1", True, "+0.100 ("), ("cer", False, "-12.5 % (")]
)
def test_a_script_whose_metric_has_the_name_of_a_task_keeps_its_own_unit(
    tmp_path, capsys, name, higher, difference
):
    unit = "own" if higher else "relative"
    own = FRACTION | {"higher_is_better": higher, "unit": unit, "margin": 0.01}
    runs_of(tmp_path, name, 0.8, 0.7, own, {"compare.margin": 0.02})
    shown = shown_by(capsys, "compare", tmp_path, "--no-report")
    assert difference in shown and "points" not in shown


@pytest.mark.parametrize(
    ("name", "said", "verdict"),
    [("accuracy", True, "worse"), ("distance", None, "better"), ("cer", None, "better")],
)
def test_a_script_of_an_earlier_version_said_the_direction(tmp_path, name, said, verdict):
    more = {"script": {"file": "own.py"}, "compare.margin": 0.01, "compare.higher_is_better": said}
    [group] = compare(runs_of(tmp_path, name, 0.8, 0.7, more=more)).groups
    assert (group.higher_is_better, group.relative) == (bool(said), not said)
    assert group.rows[0].verdict.name == verdict


def test_runs_and_command_that_contradict_each_other_are_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a long path would hide the end of the line
    runs_of(tmp_path / "a", "f1", 0.2, 0.1, FRACTION)
    words = ["compare", "a", "--no-report"]
    said = "mprun: --lower-is-better: contradicts "
    assert refused(capsys, *words, "--lower-is-better").startswith(said)
    edit(tmp_path / "a", '"higher_is_better": true', '"higher_is_better": false')
    first = "f1: runs contradict each other: more is better (unit: fraction) in the first"
    refused(capsys, *words, says=(first, "less is better (unit: "))
    assert not comparable(tmp_path)


def test_margins_that_the_runs_declare_are_one(tmp_path, capsys):
    runs_of(tmp_path, "f1", 0.2, 0.1, FRACTION)
    edit(tmp_path, '"margin": 0.005', '"margin": 0.2')
    words = ["compare", str(tmp_path), "--no-report"]
    said = "mprun: the runs differ in the margin of f1 (0.005, 0.2): pass --margin"
    assert refused(capsys, *words).startswith(said)
    assert main([*words, "--margin", "0.005"]) == 0


@pytest.mark.parametrize(
    ("metrics", "fp32", "works"),
    [
        (FRACTION, 0.2, True),
        (FRACTION | {"unit": "own", "margin": None}, 0.2, False),
        (FRACTION | {"unit": "relative", "margin": 0.01}, 0.0, False),  # of a mean near 0
    ],
)
def test_a_comparison_is_named_where_it_judges(tmp_path, capsys, metrics, fp32, works):
    runs_of(tmp_path, "f1", fp32, 0.1, metrics)
    assert comparable(tmp_path) == works
    assert main(["compare", str(tmp_path), "--no-report"]) == (0 if works else 2)
    capsys.readouterr()
    assert ("mprun compare" in shown_by(capsys, "ls", tmp_path)) == works


def test_a_record_with_a_metric_of_no_unit_is_damaged(tmp_path, capsys):
    runs_of(tmp_path, "f1", 0.2, 0.1, FRACTION | {"unit": "furlongs"})
    refused(capsys, "compare", tmp_path, says="run.json: metrics", code=4)


def test_a_gan_whose_metric_rises_has_learned():
    from mprun.comparison.divergence import baseline_progress

    from ..compare.made_runs import made_run

    rising = [made_run(0, 1.0, 2.0, metric="score")]
    assert baseline_progress(rising, "score", gan=True) == "score 1 to 2"
    assert baseline_progress(rising, "score", gan=True, higher_is_better=True) is None
    falling = [made_run(0, 2.0, 1.0, metric="score")]
    assert baseline_progress(falling, "score", gan=True, higher_is_better=True) == "score 2 to 1"


@pytest.mark.parametrize(
    ("own", "word", "shown"),
    [(30.001, "matches", "-0.003 %"), (27.0, "worse", "+10.00 %"), (33.0, "better", "-10.00 %")],
)
def test_more_may_be_better_of_a_relative_metric(tmp_path, own, word, shown):
    record = FRACTION | {"unit": "relative", "margin": 0.01}
    [group] = compare(runs_of(tmp_path, "psnr", 30.0, own, record)).groups
    [row] = group.rows
    assert row.verdict.name == word
    assert difference_text(group, row.verdict).startswith(shown)
