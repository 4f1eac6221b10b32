"""The outcome of a run follows from the window of evaluations, and errors name the run."""

import math

import numpy as np
import pytest

from mprun.comparison.divergence import outcomes
from mprun.comparison.findings import Arm, Question
from mprun.comparison.grouping import group_runs
from mprun.comparison.load import load_runs
from mprun.comparison.verdict import assess
from mprun.errors import BadInput

from ..helpers import raises_line
from .made_runs import made_arm, made_run
from .run_folders import write_run


def outcome(*values, window=1, **fields):
    """The outcome of a run that was evaluated to these values."""
    metric = fields.get("metric", "loss")
    unit = "perplexity" if metric == "perplexity" else "relative"
    arm = Arm("fp32", "fp32", [made_run(0, *values, **fields)])
    [found] = outcomes(arm, arm, Question(metric=metric, unit=unit, window=window))
    return found


def test_window():
    values = [100.0, 1.0, 2.0, 6.0]
    assert [outcome(*values, window=window).value for window in (1, 3)] == [6.0, 3.0]
    with raises_line(BadInput, "compare.window=5: must be at most 4, the number of evaluations"):
        outcome(*values, window=5)


def test_window_of_perplexity_is_the_mean_loss():
    found = outcome(2.0, 8.0, metric="perplexity", window=2)
    assert found.value == pytest.approx(4.0, rel=1e-15)  # sqrt(2 * 8), not 5
    assert outcome(1.0, metric="perplexity").value == 1.0  # the least that a model can reach


def test_nan_before_the_window_is_no_outcome():
    assert outcome(math.nan, 8.0).value == 8.0
    found = outcome(math.nan, 8.0, window=2)
    assert (found.diverged, found.step) == ("non-finite loss in an evaluation", 100)


def test_foreign_logs_average_their_last_tenth():
    # A tenth of 40 is 4: the mean of 37, 38, 39, 40. The window does not matter.
    assert outcome(*map(float, range(1, 41)), foreign=True).value == 38.5
    assert outcome(1.0, 2.0, foreign=True).value == 1.5
    assert made_arm({0: 1.0}, foreign=True).foreign


EMPTY = {"step": np.empty(0), "updates": np.empty(0)}


@pytest.mark.parametrize(
    ("values", "fields", "metric", "said"),
    [
        ((), {}, "loss", "compare.metric=loss: the run has no evalua"),
        ((), {"evals": EMPTY}, "loss", "must be one of (none)"),
        ((2.0,), {}, "top1", "=top1: is not in the run's evaluations; must be one of loss"),
        ((0.0,), {"metric": "perplexity"}, "perplexity", "must be above 0"),
        ((2.0,), {"foreign": True}, "val/loss", "--scalar=val/loss: is not in the run's eval"),
    ],
)
def test_a_run_without_an_outcome_is_named(values, fields, metric, said):
    own = made_arm({0: 2.0, 1: 2.0}, mode="amp", metric=metric)
    own.runs[1] = made_run(1, *values, mode="amp", **fields)
    with raises_line(BadInput, "runs/amp/s1", said):
        outcomes(own, own, Question(metric=metric, unit="perplexity"))


def test_an_error_rate_is_judged_in_points_and_lower_is_better(tmp_path):
    pytest.importorskip("mprun.extensions.speech")  # which declares it
    for mode, rates in {"fp32": (1.7, 1.8, 1.9), "amp": (2.7, 2.8, 2.9)}.items():
        for seed, rate in enumerate(rates):
            more = {"compare.metric": "cer", "compare.margin": 0.5}
            run = write_run(tmp_path / f"{mode}{seed}", mode, seed, overrides=more)
            metrics = run / "metrics.jsonl"
            metrics.write_text(metrics.read_text().replace('"perplexity": 2.0', f'"cer": {rate}'))
    runs, _ = load_runs([tmp_path])
    [proto], _ = group_runs(runs)
    group = assess(proto)
    assert not group.relative and not group.higher_is_better
    [row] = group.rows
    assert row.verdict.name == "worse" and "+1.00 points" in row.verdict.sentence


@pytest.mark.parametrize("lowest", [0.0, -1.0])
def test_a_perplexity_that_is_none_is_refused(lowest):
    with raises_line(BadInput, f"is {lowest:g}; a perplexity must be above 0"):
        outcome(lowest, 8.0, metric="perplexity", window=2)
