"""Runs that were there beside the paper: right row, right sign, and what cannot be said."""

import json
from dataclasses import replace

import numpy as np
import pytest

from mprun.cli.dispatch import main
from mprun.comparison.findings import Comparison, Group, Outcome, Row, Verdict
from mprun.comparison.verdict import assess
from mprun.extensions.paper import outcomes
from mprun.extensions.paper.outcomes import beside
from mprun.extensions.paper.page import HEADER, Page, tables, tables_markdown
from mprun.extensions.paper.rows import ROWS

from ...compare.made_comparison import Page as Parsed
from ...compare.made_runs import made_arm, together
from ...compare.run_folders import write_study
from ...helpers import refused

SCALERS = {"fp16_master_scaled": "dynamic", "amp": "dynamic"}


@pytest.fixture(autouse=True)
def records(monkeypatch):
    """Return the content of run.json for runs that were made without files."""
    record = {"choices": {}, "samples_per_step": 64, "data": {}}
    monkeypatch.setattr(outcomes, "read_record", lambda path: record)
    return record


def row(mode, seeds, mean, verdict, device="cpu", steps=400, **fields) -> Row:
    there = {"device": "cpu"} if device == "cpu" else {"device": "cuda", "gpu": device}
    fields = {"scaler": SCALERS.get(mode, "none"), "sample": "image"} | fields
    made = dict.fromkeys(seeds, mean)
    arm = made_arm(made, mode, steps=[steps], environment=there, **fields)
    return Row(arm, verdict, [Outcome(seed, mean) for seed in seeds], mean=mean)


def group(keys, modes, metric="loss", baseline=0.5, margin=0.01, **more) -> Group:
    points = metric in ("top1", "top5")
    return Group(
        title=more.pop("title", "a group"),
        slug="g",
        metric=metric,
        higher_is_better=points,
        unit="points" if points else "relative",
        relative=not points,
        margin_setting=margin,
        baseline=row("fp32", (0, 1, 2), baseline, Verdict("baseline", ""), **more),
        rows=[row(mode, (0, 1, 2), mean, verdict, **more) for mode, mean, verdict in modes],
        keys=keys,
    )


def found_of(*groups):
    return beside(Comparison(list(groups)))[0]


def told(found):
    """(technique, the paper's value, verdict, same outcome) of each line."""
    return [(line.technique, line.paper, line.verdict, line.same_outcome) for line in found.lines]


def cells(found):
    """Column -> cell, a line each."""
    [table] = tables([found])
    return [dict(zip(HEADER, line, strict=True)) for line in table.lines]


RESNET = {"model.name": "resnet50", "data.name": "digits", "data.image_size": 32}
LM = {"model.name": "lstm_lm", "data.name": "docs_text", "data.level": "char"}
LM |= {"model.num_layers": 1, "model.hidden_size": 64, "model.projection_size": 0}
MATCH = Verdict("matches", "", difference=-0.2, low=-0.4, high=0.0, margin=1.0)


def test_resnet_stands_beside_table_1_and_its_own_numbers():
    [made] = found_of(group(RESNET, [("fp16_master", 97.2, MATCH)], "top1", 97.0, 1.0))
    [line] = cells(made)
    assert line["network"] == "a group: ResNet-50" and line["paper: FP32"] == "75.92 top-1 (%)"
    # 76.04 - 75.92 = 0.12 points more, so -0.12 where positive is worse; ours has the same sign.
    assert line["paper (+ is worse)"] == "76.04 (-0.12 points)"
    assert line["ours: FP32"].startswith("top1 97 (") and line["ours"] == "97.2"
    assert line["difference (+ is worse)"].startswith("-0.20 points (-0.40 to ")
    assert line["margin"] == "1 points" and line["n"] == "3"
    unknown = "naive FP16 was not run"
    assert (line["verdict"], line["discriminates?"]) == ("matches", f"not known ({unknown})")
    assert line["same outcome?"] == f"yes, tells nothing ({unknown})"
    differs = "; ".join(made.row.differs)
    assert "pre-activation" in differs and "v1.5" in differs
    assert "data digits (numbers compare only if that is ILSVRC12)" in differs
    for part in ("32x32", "400 steps of 64 images", "seeds 0-2", "16-bit products emulated"):
        assert part in made.data, part
    [(_, notes)] = tables([made])[0].notes
    assert notes[0].startswith("paper: ILSVRC12; ") and "no loss scaling" in notes[0]
    keys = RESNET | {"model.variant": "preactivation", "model.width": 0.125}
    [made] = found_of(group(keys, [("amp", 97.0, MATCH)], "top1", 97.0, 1.0))
    assert made.row.differs[1:] == ("0.125 of the channels",)


def test_differences_of_the_paper_are_those_of_its_numbers():
    """Every number pair in the facts: worse is positive, accuracies fall when they are worse."""
    results = [row.result for row in ROWS if row.key != "ssd_control"]
    values = [(one, value) for one in results for value in (one.unscaled, one.scaled)]
    pairs = [(one, value, told) for one, value in values if (told := one.difference(value))]
    # Six of table 1, two of Faster R-CNN, one of SSD, two of table 3.
    assert len(pairs) == 11
    for one, value, difference in pairs:
        expected = (float(one.fp32) - float(value)) * (-1 if "CER" in one.metric else 1)
        assert difference == f"{expected:+.2f} points"


def test_alexnet_is_another_row():
    keys = RESNET | {"model.name": "alexnet", "data.image_size": 224}
    [made] = found_of(group(keys, [("amp", 97.0, MATCH)], "top1", 97.0, 1.0))
    # AMP is no technique of the paper's, which then was not run.
    assert told(made) == [
        ("FP32 masters, no scale", "56.93", "not run", "not run"),
        ("amp", "", "matches", ""),
    ]
    assert "v1.5" not in "; ".join(made.row.differs) and "256x256" in made.row.result.scope


def test_bigger_language_models_need_more_steps_than_ours():
    worse = Verdict("worse", "", difference=0.05, low=0.04, high=0.06, margin=0.02)
    modes = [("fp16_naive", 2.1, worse), ("fp16_master", 2.0, MATCH), ("bf16_master", 2.0, MATCH)]
    big, masters = found_of(group(LM, modes, baseline=2.0))
    assert big.row.place == "fig5"
    # BF16 came after the paper.
    assert told(big) == [
        ("FP32 masters, no scale", "diverges after 300K iterations", "matches", ""),
        ("FP32 masters, scale 128", "matches FP32", "not run", "not run"),
        ("FP16 weights, no masters", "", "worse", ""),
    ]
    differs = "; ".join(big.row.differs)
    assert "a smaller relative (1 x 64 cells)" in differs
    assert "400 steps cannot show what fails after 300,000 iterations" in differs
    assert "1 x 64 cells" in big.network and "char level" in big.data
    assert told(masters) == [
        ("FP32 masters, no scale", "the curve of FP32", "matches", "yes"),
        ("FP16 weights, no masters", "80 % relative loss of accuracy", "worse", "yes"),
    ]
    assert masters.row.place == "fig2a" and "another network" in masters.row.differs[1]
    # 0.05 of a mean of 2 (margin 0.02 = 1 % of it) is 2.5 %.
    assert masters.lines[1].difference.startswith("+2.5")


def test_biglstm_itself_at_the_paper_s_length():
    keys = LM | {"model.num_layers": 2, "model.hidden_size": 8192, "model.projection_size": 1024}
    keys |= {"data.name": "one_billion_words"}
    where = {"steps": 300_000, "device": "NVIDIA H200"}
    [made] = found_of(group(keys, [("fp16_master", 3.4, MATCH)], **where))
    assert len(made.row.differs) == 1 and "if that is One Billion Word" in made.row.differs[0]
    assert "NVIDIA H200" in made.data and "emulated" not in made.data
    assert "2 x 8192 cells with projection 1024" in made.network


def test_a_static_scale_is_the_technique_of_that_scale():
    static = group(LM, [("fp16_master_scaled", 0.5, MATCH)], scaler="static")
    static.rows[0].arm.runs[0].keys["scaler.scale"] = 128.0
    [made] = found_of(static)
    [line] = [line for line in made.lines if line.technique == "FP32 masters, scale 128"]
    assert (line.paper, line.verdict) == ("matches FP32", "matches")
    assert line.same_outcome == "yes, tells nothing (naive FP16 was not run)"
    [made] = found_of(group(LM, [("fp16_master_scaled", 0.5, MATCH)], scaler="static"))
    assert ("fp16_master_scaled", "", "matches", "") in told(made)


def test_gan_is_judged_by_eye():
    keys = RESNET | {"model.name": "dcgan"}
    [made] = found_of(group(keys, [("fp16_master", 1.4, Verdict("not assessed", ""))]))
    assert told(made) == [("FP32 masters, no scale", "looks alike", "not assessed", "undecided")]
    assert "by eye" in made.row.result.scope and "sample grids" in made.row.differs[1]
    [made] = found_of(group(keys, [("amp", 1.4, MATCH)], metric="sliced_wasserstein"))
    assert len(made.row.differs) == 1


def test_what_the_paper_does_not_have():
    keys = RESNET | {"model.name": "conv_autoencoder"}
    lost = Verdict("diverged", "diverged in 3 of 3 runs")
    modes = [("fp16_naive", None, lost), ("fp16_master_scaled", 0.2, MATCH)]
    scaling, masters = found_of(group(keys, modes))
    assert scaling.row.place == "table2" and "stand-in" in "; ".join(scaling.row.differs)
    assert told(scaling)[0] == ("FP32 masters, no scale", "diverges", "not run", "not run")
    assert told(scaling)[2:] == [
        ("FP32 masters, dynamic scale", "", "matches", ""),
        ("FP16 weights, no masters", "", "diverged", ""),
    ]
    assert masters.lines[1].mean == "" and masters.lines[1].same_outcome == "yes"
    made = Comparison([group({}, modes), group({"model.name": "gpt"}, [])])
    found, without = beside(made)
    assert found == [] and "has no such network" in without[0] and "has no gpt" in without[1]


def test_a_group_without_the_paper_s_modes_says_so():
    [made] = found_of(group(RESNET, [("amp_bf16", 0.5, MATCH)]))
    assert told(made) == [("FP32 masters, no scale", "76.04", "not run", "not run")]
    [made] = found_of(group(RESNET, [("fp16_master+norm_dtype=fp16", 0.5, MATCH)]))
    assert told(made)[1] == ("fp16_master+norm_dtype=fp16", "", "matches", "")


def test_markdown_and_html_show_every_cell_and_escape_them(tmp_path):
    odd = group(RESNET, [("fp16_master", 97.2, MATCH)], "top1", 97.0, 1.0, title="<b>|&")
    odd.rows[0].arm.label = '<i a="1">|'
    odd.rows[0].arm.mode += "+x"
    odd.rows[0].arm.runs[0] = replace(odd.rows[0].arm.runs[0], mode="fp16_master+x")
    found = found_of(odd, group(LM, [("amp", 2.0, MATCH)], baseline=2.0))
    wanted = [cell for table in tables(found) for line in table.lines for cell in line]
    assert '<i a="1">|' in wanted and "<b>|&: ResNet-50" in wanted
    Page("given", found, [], {}, ["<u>told</u>"]).write(tmp_path)
    page = Parsed((tmp_path / "paper.html").read_text(encoding="utf-8"))
    shown = [data for tag, data in page.texts if tag == "td" and data.strip()]
    assert shown == [cell for cell in wanted if cell]
    assert not {"b", "i", "u", "script"} & {tag for tag, _ in page.elements}
    assert "<u>told</u>" in page.words
    text = tables_markdown(tables(found))
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len(table) == sum(len(one.lines) for one in found) + 2 * len(tables(found))
    # A | in a cell is escaped, so every line of a table has as many cells as its header.
    assert {line.replace("\\|", "").count("|") for line in table} == {len(HEADER) + 1}


def test_nothing_compared_is_nothing_to_show():
    assert beside(Comparison([])) == ([], []) and tables_markdown([]) == ""


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """outputs/study: FP32, a master mode that matches, FP16 alone that does not."""
    monkeypatch.undo()  # these have records
    monkeypatch.chdir(tmp_path)
    losses = (2.00, 2.02, 1.99)
    finals = {"fp32": losses, "fp16_master": [2.002, 2.018, 1.991]}
    return write_study(tmp_path / "outputs" / "study", finals | {"fp16_naive": [2.2, 2.21, 2.2]})


@pytest.mark.slow
def test_runs_are_judged_printed_and_left_beside_them(runs, capsys):
    assert main(["paper", "outputs/study"]) == 0
    printed = capsys.readouterr().out
    assert "| lstm_lm-docs_words: bigLSTM language model" in printed and "80 % relative" in printed
    # The verdicts as `mprun compare` prints them come first.
    assert printed.index("Judged: loss") < printed.index("## Figure 2a")
    folder = runs / "compare"
    ends = ["report: outputs/study/compare/report.html", "paper: outputs/study/compare/paper.md"]
    assert printed.splitlines()[-2:] == ends
    found = json.loads((folder / "paper.json").read_text(encoding="utf-8"))
    rows = found["rows"]
    assert list(rows) == ["biglstm-lstm_lm-docs_words", "mandarin_weights-lstm_lm-docs_words"]
    techniques = {one["technique"]: one for one in rows[list(rows)[1]]["techniques"]}
    assert list(techniques) == ["FP32 masters, no scale", "FP16 weights, no masters"]
    assert [one["same_outcome"] for one in techniques.values()] == ["yes", "yes"]
    assert techniques["FP16 weights, no masters"]["verdict"] == "worse"
    assert found["facts"]["command"] == "mprun paper outputs/study"
    assert (folder / "fig5-lstm_lm-docs_words.png").stat().st_size > 1000
    # The figures of the paper are not those of the comparison: each replaces its own.
    listed = json.loads((folder / "results.json").read_text(encoding="utf-8"))["figures"]
    assert listed and not [name for name in listed if name.startswith("fig")]
    assert main(["paper", "outputs", "--only", "fig5", "--json", "--no-report"]) == 0
    assert list(json.loads(capsys.readouterr().out)["rows"]) == [list(rows)[0]]


@pytest.mark.slow
def test_what_is_chosen_after_the_runs_is_said_on_the_page(runs, capsys):
    assert main(["paper", "outputs", "--margin", "0.3", "--out", "mine"]) == 0
    page = (runs.parent.parent / "mine" / "paper.md").read_text(encoding="utf-8")
    assert "## Remarks" in page and "- --margin 0.3: chosen after the runs" in page
    assert main(["paper", "outputs", "--no-report", "--markdown"]) == 0
    assert "# Does lower precision match FP32?" in capsys.readouterr().out
    assert not (runs.parent / "compare").exists()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["outputs", "--list"], "--list: not with RUNS"),
        (["outputs", "seed=3"], "seed=3: not with RUNS"),
        (["outputs", "-j", "2"], "--jobs: not with RUNS"),
        (["outputs", "--scale", "full"], "--scale: not with RUNS"),
        (["--margin", "0.5"], "--margin: only with RUNS"),
        (["--json"], "--json: only with RUNS"),
        (["outputs", "--json", "--markdown"], "choose one of the two"),
        (["nowhere"], "'nowhere': is neither a path of runs nor key=value"),
        (["fig5"], "did you mean '--only fig5'?"),
    ],
)
def test_options_of_the_other_kind_are_refused(words, named, runs, capsys):
    refused(capsys, "paper", *words, says=named)
    assert [path.name for path in runs.parent.parent.iterdir()] == ["outputs"]
    assert [path.name for path in runs.parent.iterdir()] == ["study"]


def test_another_metric_has_a_verdict_of_its_own():
    losses = {0: 1.0, 1: 1.1, 2: 1.2}
    base, own = made_arm(losses), made_arm(losses, "amp")
    for arm, values in ((base, (90.0, 91.0, 92.0)), (own, (89.0, 93.0, 91.0))):
        for run, value in zip(arm.runs, values, strict=True):
            run.evals["top1"] = np.array([value])
    group = assess(together(base, own))
    assert group.rows[0].verdict.name == "matches"
    # Differences 1, -2, 1 points: s = sqrt(3), so that the half width is t(0.95, 2) = 2.92.
    found = outcomes._by_metric(group, "top1")
    assert found == {"amp": "inconclusive, 0.00 points (-2.92 to +2.92)"}
    assert outcomes._by_metric(group, "loss") == {} == outcomes._by_metric(group, "cer")
