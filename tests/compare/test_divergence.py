"""The divergence rule, each part at its threshold."""

import numpy as np
import pytest

from mprun.comparison.divergence import divergences

from .made_runs import made_run


def one(run, baseline=(), gan=False):
    return divergences([run], list(baseline), gan=gan)[0]


def curve(start: float, end: float, scatter: float = 0.0) -> list[float]:
    """100 losses: ten at `start`, down to `end` at step 20, the last alternating by `scatter`."""
    fall = list(np.linspace(start, end, 10))
    return [start] * 10 + fall + [end + (-1) ** index * scatter for index in range(80)]


def baseline(count=3, start=2.0, end=1.0, scatter=0.0):
    return [made_run(seed, end, train=curve(start, end, scatter)) for seed in range(count)]


def test_a_recorded_divergence():
    run = made_run(0, status="diverged", cause="non-finite loss", last_step=70)
    assert one(run) == ("non-finite loss", 70)
    run.nonfinite_step = 68
    assert one(run) == ("non-finite loss", 68)
    assert one(run, baseline(), gan=True) == ("non-finite loss", 68)
    run.cause = None
    assert one(run) == ("recorded as diverged", 68)


def test_a_non_finite_loss_at_an_applied_step_of_a_run_that_went_on():
    assert one(made_run(0, 1.0, nonfinite_step=12)) == ("non-finite loss", 12)


def test_b_more_than_50_skips_in_a_row():
    assert one(made_run(0, 1.0, longest_skip_streak=50)) is None
    found = one(made_run(0, 1.0, longest_skip_streak=51, skipped=51))
    assert found == ("51 skipped updates in a row", None)  # the steps of the skips are not known
    steps = np.array([3.0, 5.0, *range(100, 160), 200.0])
    run = made_run(0, 1.0, longest_skip_streak=60, skipped=63, skip_steps=steps)
    found = one(run)  # 100 is the first, 150 the 51st
    assert found == ("60 skipped updates in a row", 150) and type(found[1]) is int


@pytest.mark.parametrize(
    ("losses", "base", "said"),
    [
        # The baseline goes from 2 to 1: a tenth of its progress ends at 1.9.
        (curve(2.0, 1.9), {}, None),
        (curve(2.0, 1.91), {}, "2 to 1.91, baseline to 1"),
        (curve(2.0, 5.0), {}, "2 to 5, baseline to 1"),
        # The falling second ten would make the start 1.75 on average, and its tenth 1.825.
        ([2.0] * 10 + [1.5] * 10 + [1.85] * 80, {}, None),
        # Random labels: 2 to 1.99 with single losses 0.05 apart; a tenth of 0.01 is noise.
        (curve(2.0, 2.0), {"end": 1.99, "scatter": 0.05}, None),
        (curve(2.0, 2.0), {"end": 1.99}, "2 to 2, baseline to 1.99"),  # without scatter it is not
        (curve(2.0, 2.5), {"end": 2.1}, None),
    ],
    ids=["a tenth", "less", "upwards", "first ten", "noise", "no noise", "baseline upwards"],
)
def test_c_less_than_a_tenth_of_the_progress(losses, base, said):
    run = made_run(9, 1.9, train=losses, last_step=100)
    expected = said and (f"learned next to nothing: training loss {said}", 100)
    assert one(run, baseline(**base)) == expected


def test_a_baseline_run_is_held_against_the_others():
    runs = baseline(3)
    runs[1] = made_run(1, 2.0, train=curve(2.0, 2.0), last_step=100)
    found = divergences(runs, runs, gan=False)
    assert [reason is not None for reason in found] == [False, True, False]
    # A lone one has nothing to be held against.
    assert one(runs[1], runs[1:2]) is None
    assert one(made_run(9, 2.0, train=curve(2.0, 2.0)), baseline(1)) is not None


def test_diverged_baseline_runs_are_no_measure_of_progress():
    runs = baseline(3)
    runs[0].nonfinite_step = 5
    runs[0].last_losses = np.array([1e9])
    assert one(made_run(9, 1.95, train=curve(2.0, 1.95)), runs) is not None


def test_gans_and_foreign_logs_have_no_progress():
    stuck = made_run(9, 2.0, train=curve(2.0, 2.0))
    assert one(stuck, baseline(), gan=True) is None
    stuck.foreign = True
    assert one(stuck, baseline()) is None


@pytest.mark.parametrize("missing", ["first_losses", "last_losses"])
def test_without_recorded_losses_progress_is_not_judged(missing):
    run = made_run(9, 2.0, train=curve(2.0, 2.0))
    setattr(run, missing, np.empty(0))
    assert one(run, baseline()) is None


def test_a_skipped_step_may_record_inf():
    run = made_run(9, 1.0, train=curve(2.0, 1.0))
    run.first_losses[0] = run.last_losses[3] = np.inf
    assert one(run, baseline()) is None
    run.last_losses[:] = np.inf
    assert one(run, baseline()) == ("no finite training loss at the end", 100)
