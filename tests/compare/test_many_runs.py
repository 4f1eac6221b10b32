"""The cost of a comparison grows with its runs and no faster; what it draws has an upper limit."""

import json
from collections import Counter
from dataclasses import replace

import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from mprun.comparison import divergence, grouping, wording
from mprun.comparison.divergence import divergences
from mprun.comparison.findings import Arm, Row, Verdict
from mprun.comparison.grouping import group_runs
from mprun.comparison.load import load_runs
from mprun.comparison.report import write_folder
from mprun.comparison.tensorboard_summary import write_means

from .made_comparison import comparison, group
from .made_runs import made_run
from .run_folders import write_run, write_study


def counting(patch, owner, name) -> Counter:
    """Count the calls of a function of `owner`."""
    calls, plain = Counter(), getattr(owner, name)
    patch.setattr(owner, name, lambda *values: calls.update([name]) or plain(*values))
    return calls


def test_each_run_is_measured_once_for_the_progress_of_the_baseline(monkeypatch):
    runs = [made_run(seed, 1.0, train=[2.0 - s / 100 for s in range(100)]) for seed in range(40)]
    counted = counting(monkeypatch, divergence.np, "std")
    assert divergences(runs, runs, gan=False) == [None] * 40
    assert counted.total() == 40


def labelled(folder, arms: int, monkeypatch) -> int:
    """Group a baseline and so many arms of one mode; return how many values were compared."""
    write_run(folder / "fp32")
    for number in range(arms):
        write_run(folder / f"amp{number}", "amp", overrides={"scaler.init_scale": 2.0 + number})
    runs, _ = load_runs([folder])
    with monkeypatch.context() as patch:
        compared = counting(patch, grouping, "canonical")
        [found], _ = group_runs(runs)
    assert len({arm.label for arm in found.arms}) == arms
    return compared.total()


def test_labels_of_many_arms_cost_what_those_of_few_do(tmp_path, monkeypatch):
    few, many = (labelled(tmp_path / str(arms), arms, monkeypatch) for arms in (10, 40))
    assert many < 5 * few


def test_a_table_asks_each_row_a_fixed_number_of_times(monkeypatch):
    asked = Counter()
    monkeypatch.setattr(Row, "emulated", property(lambda row: asked.update(["emulated"]) or False))
    made = group(seeds=1, steps=100)
    made.rows = made.rows * 50
    wording.table(made, {})
    assert asked["emulated"] <= 6 * len(made.rows)


@pytest.mark.slow
def test_many_configurations_share_the_figures_and_the_page_says_so(tmp_path):
    one = group(seeds=1, steps=100)
    groups = [replace(one, slug=f"lr{n}", rows=one.rows[-1:]) for n in range(28)]
    page = write_folder(comparison(*groups), tmp_path / "out").read_text(encoding="utf-8")
    figures = [path.name for path in (tmp_path / "out").glob("*.png")]
    assert sorted(figures) == sorted(f"lr{n}-intervals.png" for n in range(28))
    assert "Drawn are at most 1 figures of each of the 28 configurations" in page


@pytest.mark.slow
@pytest.mark.parametrize("modes", [30, 700])
def test_of_many_modes_the_first_are_drawn_and_all_are_in_the_table(tmp_path, modes):
    made = group(seeds=1, steps=100)
    verdict = Verdict("inconclusive", "inconclusive: needs at least 3 seeds (has 1).")
    arms = [Arm(f"amp{n}", "fp32", made.rows[-1].arm.runs) for n in range(modes)]
    made.rows = [replace(made.rows[-1], arm=arm, verdict=verdict) for arm in arms]
    page = write_folder(comparison(made), tmp_path / "out").read_text(encoding="utf-8")
    assert f"amp{modes - 1}" in page
    assert "The first 24 of 30 modes." in page or modes == 700  # whose table leaves no room
    assert (tmp_path / "out" / f"{made.slug}-loss-steps.png").is_file()
    content = json.loads((tmp_path / "out" / "results.json").read_text())
    assert len(content["groups"][0]["modes"]) == modes


def test_a_mode_has_one_event_a_step(tmp_path):
    write_study(tmp_path, {"fp32": [1.0, 1.1], "amp": [1.0, 1.2]})
    write_means([tmp_path], tmp_path)
    for mode in ("fp32", "amp"):
        [path] = (tmp_path / "_summary" / mode).glob("events.*")
        events = [event for event in EventFileLoader(str(path)).Load() if event.step]
        assert [event.step for event in events] == [*range(1, 21), 30, 40]
        # The mean, its two bounds and the difference of the training loss; the same and the
        # perplexity's mean of the evaluation.
        assert [len(event.summary.value) for event in events] == [4] * 21 + [9]
