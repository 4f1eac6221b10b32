"""report.md, the console and results.json."""

import json
import re
from collections import Counter
from dataclasses import replace

import pytest

from mprun.comparison.findings import Comparison, Verdict
from mprun.comparison.text_outputs import console, markdown, results
from mprun.comparison.wording import (
    cells,
    difference_text,
    level_text,
    margin_text,
    scale_text,
    seeds_text,
    signed,
    value_text,
)

from .made_comparison import comparison, gan_group, group


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("grids")
    told = {"stamps": ["--allow optim.lr"], "not_compared": ["x/amp-s0: no FP32 run"]}
    return comparison(group(steps=400), gan_group(folder), looks=[3, 5], **told)


def test_report_md_has_a_table_sentences_notes_and_stamps(made):
    text = markdown(made)
    assert text.index("--allow optim.lr") < text.index("## resnet50-digits_32")
    assert "- **amp**: matches FP32: difference +0.12 %" in text
    assert "- fp16_master_scaled: seed 3: failed (out of memory)" in text
    assert "Looks planned at 3, 5 seeds." in text
    assert text.index("## dcgan-digits_gan") < text.index("- x/amp-s0: no FP32 run")
    table = [line for line in text.splitlines() if line.startswith("|")][:7]
    assert len({line.count("|") for line in table}) == 1
    amp = [cell.strip() for cell in table[6].strip("|").split("|")]
    assert amp[:2] == ["matches", "amp"] and amp[3] == "+0.12 % (-0.31 to +0.55)"


def test_markup_in_labels_and_notes_is_escaped():
    one = group(seeds=3, steps=400)
    one.rows[0].arm.label = "a|b<i>*x*"
    one.notes = ["line one\nline two `x`"]
    text = markdown(comparison(one))
    assert "a\\|b\\<i>\\*x\\*" in text
    assert "- line one line two \\`x\\`" in text


def test_the_console_puts_the_verdict_first_in_aligned_columns(made, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    lines = console(made).splitlines()
    assert max(map(len, lines)) <= 120
    start = next(i for i, line in enumerate(lines) if line.startswith("  verdict"))
    table = lines[start : start + 6]
    verdicts = ["verdict", "baseline", "diverged", "worse", "inconclusive", "matches"]
    assert [line.split()[0] for line in table] == verdicts
    column = table[0].index("mode")
    modes = ["fp32", "fp16_naive", "fp16_master", "fp16_master_scaled", "amp"]
    assert [line[column:].split()[0] for line in table[1:]] == modes
    text = " ".join(" ".join(lines).split())
    assert "amp: matches FP32: difference +0.12 %" in text
    assert text.index("--allow optim.lr") < text.index("resnet50-digits_32")


def test_a_verdict_table_fits_80_columns_with_every_number(made, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    wide = console(made)
    monkeypatch.setenv("COLUMNS", "80")
    narrow = console(made)
    assert max(map(len, narrow.splitlines())) <= 80 < max(map(len, wide.splitlines()))
    assert not Counter(wide.split()) - Counter(narrow.split())
    # What does not fit stands below, beside the modes again.
    below = r"^ *fp16_master_scaled +20  2\^12 to 2\^15 +1.26x +0.75x$"
    assert re.search(below, narrow, re.MULTILINE)


def test_results_are_plain_json_with_the_numbers_of_the_findings(made):
    text = json.dumps(results(made), allow_nan=False)
    one = json.loads(text)["groups"][0]
    assert one["margin"] == 0.01 and one["baseline"]["verdict"] is None
    amp = one["modes"][3]
    assert amp["label"] == "amp" and amp["verdict"]["name"] == "matches"
    shown = {"unit": "%", "difference": 0.12, "low": -0.31, "high": 0.55, "margin": 1.0}
    assert amp["verdict"]["shown"] == pytest.approx(shown)
    assert amp["runs"] == [f"outputs/made/amp-s{seed}" for seed in range(5)]
    naive = one["modes"][0]
    assert naive["outcomes"][0]["value"] == "nan" and naive["outcomes"][0]["step"] == 133
    assert amp["scale_range"] == [2.0**11, 2.0**14]
    assert "train" not in text.replace("train.steps", "")


def shown(verdict: Verdict, **changes) -> str:
    return difference_text(replace(group(seeds=3, steps=400), **changes), verdict)


def test_differences_have_the_unit_and_the_digits_of_the_margin():
    # Margin 1 % of the baseline is 0.003, so the baseline's mean is 0.3.
    relative = Verdict("matches", ".", difference=0.0006, low=-0.0003, high=0.0015, margin=0.003)
    assert shown(relative) == "+0.20 % (-0.10 to +0.50)"
    points = Verdict("matches", ".", difference=0.2, low=-0.1, high=0.45, margin=0.5)
    changes = {"metric": "top1", "unit": "points", "relative": False, "margin_setting": 0.5}
    assert shown(points, **changes) == "+0.20 points (-0.10 to +0.45)"
    assert shown(replace(points, low=None, high=None), **changes) == "+0.20 points"
    assert shown(Verdict("diverged", ".")) == ""


def test_zero_has_no_sign_and_identical_runs_are_said_to_be():
    one = Verdict("matches", ".", difference=-3e-9, low=-0.0006, high=0.0003, margin=0.003)
    assert shown(one) == "0.00 % (-0.20 to +0.10)"
    # All of it rounds to zero: as many digits as the widest needs.
    assert shown(replace(one, low=-6e-6, high=3e-6)) == "0.000 % (-0.002 to +0.001)"
    tiny = replace(one, difference=0.0, low=-4e-15, high=4e-15)
    assert shown(tiny) == "0.000000 % (0.000000 to 0.000000)"
    assert shown(replace(one, difference=0.0, low=0.0, high=-0.0)) == "0 (identical)"
    assert "-0.00" not in signed(-1e-9, 0.01, [0.005], 100)


def test_a_mean_over_some_seeds_names_them_everywhere():
    one = group(seeds=5, steps=400)
    _, some, every, *_ = cells(one)
    assert some["mean"].endswith(" (seeds 1, 3)") and every["mean"].count("(") == 0
    assert "  fp16_naive: mean over seeds 1, 3\n" in console(comparison(one))


def test_emulated_speed_stands_beside_no_verdict_unmarked():
    one = group(seeds=3, steps=400)
    for run in (run for row in one.rows for run in row.arm.runs):
        run.half_products = "emulated-fp16"
    made = comparison(one)
    left_out = "speed and peak memory are left out: 16-bit products were emulated"
    for text in (markdown(made), console(made)):
        assert left_out in " ".join(text.split())
        assert "0.76x" not in text and "1,001/s" not in text and "MiB" not in text
    assert [mode["emulated"] for mode in results(made)["groups"][0]["modes"]] == [True] * 4
    for run in one.rows[0].arm.runs:
        run.half_products = "native-fp16"
    speeds = ["1,001/s", "0.98x", "0.94x (emulated)", "1.26x (emulated)", "0.76x (emulated)"]
    assert [row["speed"] for row in cells(one)] == speeds
    assert cells(one)[4]["peak memory"] == "0.75x (emulated)"
    assert "(emulated): the emulation's, not the mode's" in markdown(made)


def test_small_texts():
    assert console(Comparison([])) == "nothing was compared"
    assert markdown(Comparison([])).startswith("# ")
    assert seeds_text([2, 0, 1, 5, 7, 8]) == "0-2, 5, 7-8"
    assert scale_text((2.0**9, 2.0**16)) == "2^9 to 2^16"
    assert scale_text((128.0, 128.0)) == "2^7"
    assert scale_text((1.0, 3000.0)) == "1 to 3000"
    assert value_text(float("nan")) == "nan" and value_text(0.123456) == "0.1235"
    assert margin_text(group(seeds=3, steps=400)) == "1 % of FP32's mean"
    assert level_text(group(seeds=3, steps=400)) == "90 %"
