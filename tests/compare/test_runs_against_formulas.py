"""Curves and runs give what plain loops give, over generated records."""

import itertools
import math
import statistics
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from scipy import stats

from mprun.comparison.divergence import baseline_progress, divergences, nonfinite_from, outcomes
from mprun.comparison.findings import (
    Arm,
    Question,
    Verdict,
    at_shared_steps,
    band,
    curve,
    grid,
    on_grid,
)
from mprun.comparison.one_pair import pair_facts
from mprun.comparison.verdict import _check_first_steps, _row

from .made_runs import made_run

quick = settings(deadline=None, max_examples=30)
few = settings(deadline=None, max_examples=6)

steps = st.lists(st.integers(0, 30), max_size=9, unique=True).map(sorted)
losses = st.floats(-5, 5) | st.just(math.inf) | st.just(math.nan)


@st.composite
def curves(draw):
    found = [draw(steps) for _ in range(draw(st.integers(1, 4)))]
    values = [[draw(losses) for _ in x] for x in found]
    return [(np.array(x, float), np.array(y)) for x, y in zip(found, values, strict=True)]


def in_the_middle(step, points):
    """Whether two of the points are equally near to a step."""
    distances = np.abs(points - step)
    return np.sum(np.isclose(distances, distances.min())) > 1


@quick
@given(curves(), st.integers(2, 12), st.integers(5, 30))
def test_curves_meet_on_one_grid(curves, points, end):
    """Each record counts to the nearest point; a point with none lies on the line between two."""
    x = grid(curves, points)
    every = sorted({step for one, _ in curves for step in one})
    if len(every) <= points:
        assert x.tolist() == every
    else:
        even = np.linspace(every[0], every[-1], points)
        near = {float(even[np.abs(even - step).argmin()]) for step in every}
        assert any(in_the_middle(step, even) for step in every) or x.tolist() == sorted(near)
    on = [on_grid(*one, x) for one in curves]
    for (own, y), found in zip(curves, on, strict=True):
        records = [(a, b) for a, b in zip(own, y, strict=True) if math.isfinite(b)]
        if not records:
            assert np.isnan(found).all()
            continue
        if any(in_the_middle(a, x) for a, _ in records):
            continue  # such a record belongs to either
        at = defaultdict(list)
        for a, b in records:
            at[int(np.abs(x - a).argmin())].append(b)
        known = {p: statistics.fmean(values) for p, values in at.items()}
        for place, value in enumerate(found):
            before = max((p for p in known if p <= place), default=None)
            after = min((p for p in known if p >= place), default=None)
            if before is None or after is None:
                assert math.isnan(value)
            elif before == after:
                assert value == pytest.approx(known[place])
            else:
                share = (x[place] - x[before]) / (x[after] - x[before])
                line = (1 - share) * known[before] + share * known[after]
                assert value == pytest.approx(line, abs=1e-12)
    found = band(curves, x)
    for place in range(len(x)):
        values = [one[place] for one in on if not math.isnan(one[place])]
        own = [arm[place] for arm in (found.mean, found.low, found.high)]
        expected = [of(values) if values else math.nan for of in (statistics.fmean, min, max)]
        assert own == pytest.approx(expected, abs=1e-12, nan_ok=True)

    def recorded(step, own):
        """A curve has the step, or ended so long before that it would not have had it."""
        interval = statistics.median(np.diff(own)) if len(own) > 1 else 0
        return step in own or step >= own[-1] + interval

    records = [own for own, _ in curves if len(own)]
    shared = {s for s in every if s <= end and all(recorded(s, own) for own in records)}
    for (own, y), (kept, of_them) in zip(curves, at_shared_steps(curves, end), strict=True):
        assert kept.tolist() == [step for step in own if step in shared]
        np.testing.assert_array_equal(of_them, y[[step in shared for step in own]])


def test_a_curve_of_two_columns_is_bounded():
    columns = {"step": np.array([1, 2, 3, 4, 5]), "loss": np.array([1, 1e31, -1e300, np.inf, 2])}
    x, y = curve(columns, "step", "loss")
    np.testing.assert_array_equal(x, [1, 2, 3, 4, 5])
    np.testing.assert_array_equal(y, [1, 1e30, -1e30, np.nan, 2])
    for absent in ("updates", "step"):
        assert [len(one) for one in curve(columns, absent, "top1")] == [0, 0]


@st.composite
def trained(draw):
    """Draw runs of 30 losses that fall and scatter by so much, some non-finite."""
    found = []
    for seed in range(draw(st.integers(1, 4))):
        generator = np.random.default_rng(draw(st.integers(0, 2**32)))
        fall, scatter = draw(st.sampled_from([0.0, 0.3, 1.0])), draw(st.sampled_from([0.01, 0.6]))
        train = 2 - fall * np.linspace(0, 1, 30) + scatter * generator.standard_normal(30)
        train[draw(st.integers(0, 29))] = draw(st.sampled_from([1.0, math.inf]))
        found.append(
            made_run(
                seed, 1.0, train=train.tolist(), last_step=30 + seed,
                last_losses=train[-draw(st.integers(1, 9)) :],
                longest_skip_streak=draw(st.sampled_from([0, 50, 51])),
            )
        )  # fmt: skip
    return found


def mean_of_finite(values):
    finite = [value for value in values if math.isfinite(value)]
    return (statistics.fmean(finite), statistics.pstdev(finite)) if finite else (None, None)


@quick
@given(trained(), trained())
def test_a_run_without_a_tenth_of_the_baseline_s_progress_diverged(runs, baseline):
    for arm in (runs, baseline):
        told = divergences(arm, baseline, gan=False)
        for run, found in zip(arm, told, strict=True):
            if run.longest_skip_streak > 50:
                assert found == ("51 skipped updates in a row", None)
                continue
            others = [
                mean_of_finite(one.last_losses)
                for one in baseline
                if one is not run and one.longest_skip_streak <= 50
            ]
            others = [one for one in others if one[0] is not None]
            start, final = mean_of_finite(run.first_losses[:10])[0], mean_of_finite(run.last_losses)
            diverged = final[0] is None
            if others and not diverged:
                end, scatter = (statistics.fmean(column) for column in zip(*others, strict=True))
                if start - end > scatter:
                    limit = start - 0.1 * (start - end)
                    assume(abs(final[0] - limit) > 1e-12)
                    diverged = final[0] > limit
            assert (found is not None) == diverged
            assert found is None or found[1] == run.last_step


# Falls by 0.92 with a scatter of 1: enough for means of ten losses (0.89), not of nine (0.94).
JUST_LEARNED = made_run(0, 1.0, train=[5.92] * 20, last_losses=np.array([4.0, 6.0] * 5))


@quick
@given(trained())
@example([JUST_LEARNED])
def test_the_baseline_learned_if_its_loss_fell_by_two_standard_errors(runs):
    first = [mean_of_finite(run.first_losses[:10])[0] for run in runs]
    last = [mean_of_finite(run.last_losses) for run in runs]
    found = baseline_progress(runs, "loss", gan=False)
    if any(mean is None for mean, _ in last):
        assert found is None
        return
    start, end = statistics.fmean(first), statistics.fmean(mean for mean, _ in last)
    count = min(10, *(len(run.last_losses) for run in runs))
    error = statistics.fmean(sd for _, sd in last) * math.sqrt(1 / count + 1 / count)
    assume(abs(start - end - 2 * error) > 1e-12)
    assert (found is None) == (start - end > 2 * error)
    assert found is None or found == f"training loss {start:.4g} to {end:.4g}"


@quick
@given(st.lists(losses | st.sampled_from([1e301, -1e301]), min_size=1, max_size=14), st.data())
def test_a_metric_is_not_finite_from_the_start_of_the_stretch_on(values, data):
    foreign = data.draw(st.booleans())
    window = data.draw(st.integers(1, len(values)))
    run = made_run(0, *values, foreign=foreign)
    width = min(len(values), max(3, math.ceil(len(values) / 10))) if foreign else window
    bad = [not abs(value) < 1e300 for value in values]
    places = [place for place in range(len(values) - width, len(values)) if bad[place]]
    expected = None
    if places:
        place = places[0]
        while place > 0 and bad[place - 1]:
            place -= 1
        expected = 100.0 * (place + 1)
    assert nonfinite_from(run, "loss", window) == expected


@pytest.mark.parametrize("whole", [2.0, -2.0, 0.0])
@pytest.mark.parametrize(
    ("metric", "unit", "relative"),
    [("loss", "relative", True), ("loss", "relative", False), ("top1", "points", False),
     ("perplexity", "perplexity", True), ("bleu", "relative", True)],
)  # fmt: skip
@few
@given(data=st.data())
def test_one_pair_s_numbers_are_those_of_the_matched_steps(metric, unit, relative, whole, data):
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    arms = []
    for _ in range(2):
        own = sorted(data.draw(st.sets(st.integers(1, 12), min_size=1)))
        values = 2 + generator.standard_normal(len(own))
        values[data.draw(st.integers(0, len(own) - 1))] = data.draw(st.sampled_from([1.5, np.inf]))
        skipped = np.array([data.draw(st.booleans()) and data.draw(st.booleans()) for _ in own])
        of_last = {"last_steps": np.array(own), "last_losses": values, "last_skips": skipped}
        arms.append(made_run(3, 2.0, **of_last))
        arms[-1].train = {"step": np.array(own, float), "loss": values}
    margin = data.draw(st.sampled_from([0.05, 0.4]))
    gap, how = 0.3, {"margin_setting": margin, "pair_sd": 0.1}
    question = Question(metric=metric, unit=unit, relative=relative, **how)
    facts = pair_facts(*arms, question, (gap, whole))
    own, base = (dict(zip(arm.last_steps.tolist(), arm.last_losses, strict=True)) for arm in arms)
    skips = {step for arm in arms for step in arm.last_steps[arm.last_skips].tolist()}
    both = sorted(own.keys() & base.keys())
    finite = [step for step in both if math.isfinite(own[step]) and math.isfinite(base[step])]
    kept = [(s, own[s] - base[s], base[s]) for s in finite if s not in skips]
    assert facts["compared"] == len(both)
    assert facts["first_step"] == (finite[0] if finite else None)
    if finite:
        assert facts["first"] == own[finite[0]] - base[finite[0]]
    assert facts["identical"] == all(own[step] == base[step] for step in both)
    if not kept:
        assert facts["steps"] is None
    else:
        at, gaps, theirs = (list(column) for column in zip(*kept, strict=True))
        mean, level = statistics.fmean(gaps), abs(statistics.fmean(theirs))
        if metric in ("loss", "perplexity"):
            gap, whole = mean, level
        found = facts["steps"]
        assert (found["first"], found["last"], found["count"]) == (at[0], at[-1], len(at))
        assert found["left_out"] == len(both) - len(at)
        assert facts["difference"] == pytest.approx(mean, abs=1e-12)
        assert facts["level"] == pytest.approx(level, abs=1e-12)
        assert (found["sd"] is None) == (len(gaps) < 2)
        if len(gaps) > 1:
            assert found["sd"] == pytest.approx(statistics.stdev(gaps), abs=1e-12)
            around = [one - mean for one in gaps]
            ahead = sum(a * b for a, b in itertools.pairwise(around))
            assert found["lag1"] == pytest.approx(ahead / sum(a * a for a in around), abs=1e-9)
        sizes = [len(part) for part in np.array_split(range(len(gaps)), 4)]
        assert len(facts["quarters"]) == (4 if len(gaps) > 3 else 0)
        for number, part in enumerate(facts["quarters"]):
            begin = sum(sizes[:number])
            own = statistics.fmean(gaps[begin : begin + sizes[number]])
            assert part == pytest.approx(own, abs=1e-12)
    if relative and not whole:
        assert facts["bar"] is None
        return
    gap /= abs(whole) if relative else 1.0
    assert facts["bar"]["of"] == (
        "training loss" if kept and metric in ("loss", "perplexity") else metric
    )
    assert facts["bar"]["gap"] == pytest.approx(gap, rel=1e-9, abs=1e-12)
    assert facts["bar"]["inside"] == (abs(gap) < margin)
    bound = abs(gap) + stats.norm.ppf(0.95) * 0.1
    assert facts["test"]["bound"] == pytest.approx(bound, rel=1e-9)
    assert facts["test"]["inside"] == (bound < margin)


@pytest.mark.parametrize("changed", [None, "device", "processor", "threads", "probes"])
@pytest.mark.parametrize("processor", [{"cpu": "one"}, {"cpu": "one", "gpu": "H100"}])
@few
@given(data=st.data())
def test_a_row_s_speeds_and_memory_are_ratios_to_the_baseline(changed, processor, data):
    """The median speed and the largest memory count, on one device with the same probes."""

    def costly(mode, seeds):
        memory = data.draw(st.sampled_from([[None], [None, 100, 300]]))  # of a whole arm, or none
        return [
            made_run(
                seed, data.draw(st.floats(1, 2)), mode=mode,
                samples_per_s=data.draw(st.sampled_from([None, 10.0, 20.0, 50.0])),
                peak_bytes=data.draw(st.sampled_from(memory)),
                activation_bytes=data.draw(st.sampled_from([None, 7, 9])),
                scale_range=data.draw(st.sampled_from([None, (2.0, 8.0), (1.0, 4.0)])),
                skipped=data.draw(st.integers(0, 3)),
                environment={"device": "cpu", "threads": 1} | processor,
            )
            for seed in seeds
        ]  # fmt: skip

    arms = [Arm(mode, mode, costly(mode, range(3))) for mode in ("amp", "fp32")]
    named = [*processor][-1]  # with a GPU the processor does not matter
    changed = named if changed == "processor" else changed
    first, second, _ = arms[0].runs
    if named == "gpu":
        first.environment = first.environment | {"cpu": "other"}
    second.keys = {"numerics.every": 5}  # of no probes
    if changed == "probes":
        second.keys["numerics.probes"] = True
    elif changed:
        second.environment = second.environment | {changed: "other"}
    judged = data.draw(st.sampled_from([[], [0, 2]]))
    ends = outcomes(arms[0], arms[0], Question(metric="loss"))
    row = _row(*arms, Verdict("inconclusive", "", seeds=judged), ends)

    def known(arm, name, of):
        values = [value for run in arm.runs if (value := getattr(run, name)) is not None]
        return of(values) if values else None

    for name, of, ratio in (
        ("samples_per_s", statistics.median, row.speedup),
        ("peak_bytes", max, row.memory_ratio),
        ("activation_bytes", max, row.activation_ratio),
    ):
        own, base = (known(arm, name, of) for arm in arms)
        assert ratio == (None if own is None or base is None or changed else own / base)
        assert name == "activation_bytes" or getattr(row, name) == own
    values = [run.evals["loss"][-1] for run in arms[0].runs if run.seed in (judged or [0, 1, 2])]
    assert row.mean == pytest.approx(statistics.fmean(values))
    assert row.skipped == sum(run.skipped for run in arms[0].runs)
    scales = [end for run in arms[0].runs for end in run.scale_range or ()]
    assert row.scale_range == ((min(scales), max(scales)) if scales else None)


@quick
@given(st.data())
def test_the_first_steps_are_the_median_distance_at_equal_seeds(data):
    def begun(mode):
        return Arm(mode, mode, [
            made_run(
                seed, 1.0, mode=mode,
                first_losses=np.array(data.draw(st.lists(
                    st.sampled_from([1.0, 1.04, 1.2, -2.0, math.nan]), max_size=4
                ))),
                skip_steps=np.array(data.draw(st.sampled_from([[], [2.0], [3.0], [50.0]]))),
            )
            for seed in data.draw(st.sets(st.integers(0, 3), min_size=1))
        ])  # fmt: skip

    own, base = begun("amp"), begun("fp32")
    row = _row(own, base, Verdict("inconclusive", ""), [])
    _check_first_steps(row, base)
    medians = []
    for run in own.runs:
        for other in base.runs:
            count = min(len(run.first_losses), len(other.first_losses))
            skips = [*run.skip_steps, *other.skip_steps]
            if run.seed != other.seed or count < 2 or min(skips, default=99) <= count:
                continue
            apart = [
                abs(a - b) / abs(b)
                for a, b in zip(run.first_losses, other.first_losses, strict=False)
                if math.isfinite(a) and math.isfinite(b)
            ]
            medians += [statistics.median(apart)] if apart else []
    expected = statistics.median(medians) if medians else None
    assert row.first_steps == (expected and pytest.approx(expected, abs=1e-12))
    assert bool(row.notes) == (expected is not None and expected > 0.05)
