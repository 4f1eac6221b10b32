"""Our result beside the paper's: right row, right sign, scale of both, and what cannot be said."""

from dataclasses import replace

import pytest

from mprun.compare.findings import Comparison, Group, Outcome, Row, Verdict
from mprun.compare.paper import HEADER, paper_markdown, paper_rows
from mprun.compare.report import paper_html

from .made_comparison import Page
from .made_runs import made_arm


def row(mode, seeds, mean, verdict, device="cpu", steps=400) -> Row:
    there = {"device": "cpu"} if device == "cpu" else {"device": "cuda", "gpu": device}
    arm = made_arm(
        dict.fromkeys(seeds, mean), mode, steps=[steps], sample="image", environment=there
    )
    return Row(arm, verdict, [Outcome(seed, mean) for seed in seeds], mean=mean)


def group(keys, modes, metric="loss", baseline=0.5, margin=0.01, **more) -> Group:
    points = metric in ("top1", "top5")
    return Group(
        title=more.pop("title", "a group"),
        slug="g",
        metric=metric,
        higher_is_better=points,
        relative=not points,
        margin_setting=margin,
        baseline=row("fp32", (0, 1, 2), baseline, Verdict("baseline", ""), **more),
        rows=[row(mode, (0, 1, 2), mean, verdict, **more) for mode, mean, verdict in modes],
        keys=keys,
    )


def beside(*groups):
    return paper_rows(Comparison(list(groups)))


RESNET = {
    "model.name": "resnet50",
    "data.name": "digits",
    "data.image_size": 32,
    "data.batch_size": 32,
    "train.accumulate": 2,
}
LM = {
    "model.name": "lstm_lm",
    "model.num_layers": 1,
    "model.hidden_size": 64,
    "model.projection_size": 0,
    "data.name": "docs_text",
    "data.level": "char",
    "data.batch_size": 32,
    "data.sequence_length": 20,
}
MATCH = Verdict("matches", "", difference=-0.2, low=-0.4, high=0.0, margin=1.0)


def test_resnet_stands_beside_table_1_and_its_own_numbers():
    [made] = beside(group(RESNET, [("fp16_master", 97.2, MATCH)], "top1", 97.0, 1.0))
    assert (made.model, made.source) == ("ResNet-50", "table 1")
    paper, ours = made.lines
    assert (paper.baseline, paper.value) == ("75.92", "76.04")
    # 76.04 - 75.92 = 0.12 points more, so -0.12 where positive is worse; ours has the same sign.
    assert paper.difference == "-0.12 points" and "top-1" in paper.who
    assert (ours.mode, ours.baseline, ours.value) == ("fp16_master", "97", "97.2")
    assert ours.difference.startswith("-0.20 points (-0.40 to ") and ours.outcome == "matches"
    assert "pre-activation" in made.reading and "v1.5" in made.reading
    assert "digits instead of ILSVRC12" in made.reading and "one run" in made.reading
    for part in ("1,437", "at 32x32", "400 steps of 64 images", "3 FP32 seeds (0-2)", "emulated"):
        assert part in made.our_scale, part
    assert "ILSVRC12" in made.paper_scale and "no loss scaling" in made.paper_scale


def test_differences_of_the_paper_are_those_of_its_numbers():
    """Every number pair in the facts: worse is positive, accuracies fall when they are worse."""
    from mprun.compare import paper as paper_facts

    claims = dict.fromkeys(paper_facts.OF_MODEL.values())  # each once
    pairs = [r for c in claims for r in c.results if r.baseline and r.value]
    # Six of table 1, two of Faster R-CNN, one of SSD, two of table 3.
    assert len(pairs) == 11
    for result in pairs:
        expected = float(result.baseline) - float(result.value)
        expected *= -1 if "CER" in result.who else 1
        assert float(result.difference.removesuffix(" points")) == pytest.approx(expected)


def test_alexnet_is_another_row():
    keys = RESNET | {"model.name": "alexnet", "data.image_size": 224}
    [made] = beside(group(keys, [("amp", 97.0, MATCH)], "top1", 97.0, 1.0))
    assert made.lines[0].baseline == "56.77" and made.lines[0].value == "56.93"
    assert "v1.5" not in made.reading and "256x256" in made.paper_scale


def test_bigger_language_models_need_more_steps_than_ours():
    worse = Verdict("worse", "", difference=0.05, low=0.04, high=0.06, margin=0.02)
    modes = [("fp16_naive", 2.1, worse), ("fp16_master", 2.0, MATCH), ("bf16_master", 2.0, MATCH)]
    big, masters = beside(group(LM, modes, baseline=2.0))
    assert big.source == "figure 5"
    outcomes = [(line.mode, line.outcome) for line in big.lines]
    assert outcomes[:2] == [
        ("FP16, loss scale 1", "follows FP32, diverges after 300K iterations"),
        ("FP16, loss scale 128", "matches FP32"),
    ]
    # BF16 came after the paper.
    assert [mode for mode, _ in outcomes[2:]] == ["fp16_naive", "fp16_master"]
    assert "smaller relative of bigLSTM (1 x 64 cells)" in big.reading
    assert "300,000 iterations; 400 steps cannot show that" in big.reading
    assert "32 x 20" in big.our_scale and "char level" in big.our_scale
    assert masters.source == "figure 2a" and "80 %" in masters.lines[0].outcome
    assert [line.mode for line in masters.lines[2:]] == ["fp16_naive", "fp16_master"]
    # 0.05 of a mean of 2 (margin 0.02 = 1 % of it) is 2.5 %.
    assert masters.lines[2].difference.startswith("+2.5")


def test_biglstm_itself_at_the_paper_s_length():
    keys = LM | {"model.num_layers": 2, "model.hidden_size": 8192, "model.projection_size": 1024}
    keys |= {"data.name": "one_billion_words"}
    where = {"steps": 300_000, "device": "NVIDIA H200"}
    [made] = beside(group(keys, [("fp16_master", 3.4, MATCH)], **where))
    assert "smaller relative" not in made.reading and "cannot show" not in made.reading
    assert "Numbers compare only if the data are One Billion Word." in made.reading
    assert "NVIDIA H200" in made.our_scale and "emulated" not in made.our_scale


def test_gan_is_judged_by_eye():
    keys = RESNET | {"model.name": "dcgan"}
    none = Verdict("not assessed", "")
    [made] = beside(group(keys, [("amp", 1.4, none)]))
    assert made.source == "figure 6" and "by eye" in made.lines[0].who
    assert "no outcome" in made.reading and made.lines[1].outcome == "not assessed"
    distance = group(keys, [("amp", 1.4, MATCH)], metric="sliced_wasserstein")
    [made] = beside(distance)
    assert "no outcome" not in made.reading


def test_what_the_paper_does_not_have():
    keys = RESNET | {"model.name": "conv_autoencoder"}
    lost = Verdict("diverged", "diverged in 3 of 3 runs")
    modes = [("fp16_naive", None, lost), ("fp16_master_scaled", 0.2, MATCH)]
    autoencoder, scaling, masters = beside(group(keys, modes))
    assert autoencoder.source == "" and autoencoder.lines == ()
    assert "no conv autoencoder" in autoencoder.reading
    assert scaling.source == "table 2" and scaling.lines[0].outcome == "diverges"
    assert [line.mode for line in scaling.lines[2:]] == ["fp16_master_scaled"]
    assert masters.lines[2].value == "" and masters.lines[2].outcome == "diverged"
    [foreign] = beside(group({}, modes))
    assert foreign.lines == () and "do not say which model" in foreign.reading


def test_a_group_without_the_paper_s_modes_says_so():
    [made] = beside(group(RESNET, [("amp_bf16", 0.5, MATCH)]))
    assert len(made.lines) == 1 and "None of the FP16 modes" in made.reading
    changed = group(RESNET, [("fp16_master+norm_dtype=fp16", 0.5, MATCH)])
    [made] = beside(changed)
    assert made.lines[1].mode == "fp16_master+norm_dtype=fp16"


def test_markdown_and_html_show_every_cell_and_escape_them():
    odd = group(RESNET, [("fp16_master", 97.2, MATCH)], "top1", 97.0, 1.0, title="<b>|&")
    rows = beside(odd, group(LM, [("amp", 2.0, MATCH)], baseline=2.0))
    rows[0] = replace(rows[0], lines=(*rows[0].lines, rows[0].lines[0]._replace(mode='<i a="1">|')))
    wanted = [
        [line.who, line.mode, line.baseline, line.value, line.difference, line.outcome]
        for made in rows
        for line in made.lines
    ]
    page = Page(paper_html(rows))
    shown = [data for tag, data in page.texts if tag == "td" and data.strip()]
    assert shown == [cell for cells in wanted for cell in cells if cell]
    assert not {"b", "i", "script"} & {tag for tag, _ in page.elements}
    text = paper_markdown(rows)
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len(table) == len(wanted) + 2 * len(rows)
    # A | in a cell is escaped, so every line of a table has as many cells as its header.
    for line in table:
        assert line.replace("\\|", "").count("|") == len(HEADER) + 1
    for made in rows:
        assert made.paper_scale in text and made.our_scale in text and made.reading in text


def test_nothing_compared_is_nothing_to_show():
    assert paper_rows(Comparison([])) == []
    assert paper_markdown([]) == "" and paper_html([]) == ""
