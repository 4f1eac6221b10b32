"""The suite adds ratios to other tools and targets to a report, from rows written by hand."""

import pytest

from benchmarks.suite.contest import Suite
from benchmarks.suite.targets import TARGETS, against_peers, judge

from ..extensions.bench import bench_rows
from ..extensions.bench.bench_rows import bench, lines_of, row


def summarise(rows):
    bench_rows.summarise(rows)
    against_peers(rows)


def test_the_best_peer_is_the_fastest_one_paired_by_rounds():
    rows = [
        row("amp", "mprun", [4000, 4800, 6000]),
        row("amp", "loop", [3200, 3840, 4800]),
        row("amp", "amp", [2000, 2000, 2000]),
    ]
    summarise(rows)
    best = rows[0]["summary"]["ratios"]["best_peer"]
    assert best["peer"] == "loop" and best["median"] == pytest.approx(1.25) and best["paired"]
    assert "best_peer" not in rows[1]["summary"]["ratios"]


def test_the_report_has_a_column_for_it_and_the_targets():
    rows = [row("amp", "mprun", [4000.0] * 3), row("amp", "loop", [3200.0] * 3)]
    suite, content = Suite(), bench(rows)
    suite.summarise(content)
    text = suite.report(content)
    assert lines_of(text, "vs best peer") and lines_of(text, "1.250 [1.250, 1.250] loop")
    assert lines_of(text, "ResNet-50 b256", "eager", "at least 4,900", "4,000", "missed")
    elsewhere = content | {"device_name": "another GPU"}
    suite.summarise(elsewhere)
    assert content["targets"] is not None and elsewhere["targets"] is None
    assert "Targets" not in suite.report(elsewhere)


def test_a_mode_that_no_peer_has_is_held_to_the_nearest_one():
    rows = [row("fp16_master_scaled", "mprun", [4400.0]), row("amp", "amp+", [4000.0])]
    summarise(rows)
    assert rows[0]["summary"]["ratios"]["best_peer"]["peer"] == "amp+ (amp)"


def test_targets_are_judged_by_their_own_rows():
    """The best row counts for a rate, and the worst mode counts for the ratio to peers."""
    rows = [
        row("fp32", "mprun", [1200.0]),
        row("amp", "mprun", [4000.0]),
        row("amp_bf16", "mprun", [5000.0]),
        row("amp", "mprun+", [6100.0]),
        row("amp_bf16", "mprun+", [5500.0]),
        row("amp", "amp+", [6000.0]),
        row("amp_bf16", "amp+", [6000.0]),
    ]
    summarise(rows)
    judged = {(t["label"], t["what"]): t for t in judge(rows)}
    eager = judged["ResNet-50 b256", "eager"]
    assert (eager["value"], eager["row"], eager["outcome"]) == (5000, "amp_bf16, mprun", "reached")
    peers = judged["ResNet-50 b256", "against the best peer"]
    assert peers["value"] == pytest.approx(5500 / 6000) and peers["outcome"] == "missed"
    over = judged["ResNet-50 b256", "AMP over FP32"]
    assert over["value"] == pytest.approx(4000 / 1200) and over["outcome"] == "missed"
    assert judged["DCGAN b128", "rate"]["outcome"] == "not measured"
    assert judged["every model", "synchronisations per step"]["outcome"] == "not measured"
    assert len(judged) == len(TARGETS) + 1


def test_mprun_is_held_to_the_documented_recipe_in_rate_and_memory():
    """6,000 of 4,000 images/s; 95 of 100 bytes; without FP32 the peak is that over TF32."""
    rows = [
        row("tf32", "mprun", [2000.0], details={"peak": {"allocated": 190}}),
        row("amp", "amp", [4000.0], details={"peak": {"allocated": 100}}),
        row("amp", "mprun+", [6000.0], details={"peak": {"allocated": 120}}),
        row("fp16_master_scaled", "mprun", [4400.0], details={"peak": {"allocated": 95}}),
    ]
    summarise(rows)
    assert rows[2]["summary"]["ratios"]["recipe"]["median"] == pytest.approx(1.5)
    assert "recipe" not in rows[0]["summary"]["ratios"]
    assert rows[3]["summary"]["peak_ratio"] == pytest.approx(0.5)
    judged = {(t["label"], t["what"]): t for t in judge(rows)}
    memory = judged["ResNet-50 b256", "peak memory over the torch.amp recipe"]
    assert memory["value"] == pytest.approx(0.95) and memory["outcome"] == "reached"
    rate = judged["ResNet-50 b256", "over the torch.amp recipe"]
    assert rate["value"] == pytest.approx(1.5) and rate["row"] == "amp, mprun+"


def test_one_synchronisation_misses_the_target():
    rows = [
        row("amp", "mprun", [1.0], details={"synchronisations": 0}),
        row("fp32", "mprun", [1.0], details={"synchronisations": 0.2}),
        row("amp", "loop", [1.0], details={"synchronisations": 3}),
    ]
    summarise(rows)
    found = judge(rows)[-1]
    assert (found["value"], found["outcome"]) == (0.2, "missed")
