"""The gap over steps: what is tested, what is said of it, where it is said."""

import json
import math

import numpy as np
import pytest

import mprun
from mprun.comparison.findings import Arm
from mprun.comparison.gap_growth import (
    differences,
    evaluation,
    follow_gaps,
    last_half,
    paired_gaps,
    slope_interval,
)
from mprun.comparison.report import write_folder
from mprun.comparison.text_outputs import console, group_markdown, results
from mprun.comparison.verdict import assess
from mprun.comparison.wording import gap_lines

from .made_comparison import comparison, group
from .made_runs import made_run, together

STEPS = list(range(100, 2001, 100))  # of the evaluations


def judged(base_runs, own_runs, metric="loss", margin=0.0025, looks=()):
    """The group of runs of FP32 and of a mode, with the gaps that it follows."""
    arms = [Arm("fp32", "fp32", base_runs), Arm("amp", "amp", own_runs)]
    found = assess(together(*arms, metric=metric, margin=margin), looks=looks)
    follow_gaps(found)
    return found


def followed(gaps, base=(2.0, 2.1, 1.9), seeds=None, steps=STEPS, **options):
    """FP32 and a mode whose losses lie gaps[seed](step) nats above; each baseline is flat."""
    question = {name: options.pop(name) for name in ("margin", "looks") if name in options}
    fields = options | {"steps": steps}
    base_runs = [made_run(seed, *[loss] * len(steps), **fields) for seed, loss in enumerate(base)]
    own_runs = []
    for seed, gap in zip(seeds or range(len(gaps)), gaps, strict=True):
        loss = base[seed] if seed < len(base) else base[0]
        own_runs.append(made_run(seed, *[loss + gap(at) for at in steps], mode="amp", **fields))
    return judged(base_runs, own_runs, options.get("metric", "loss"), **question)


def rising(*slopes):
    """A gap a seed that is 0 up to step 1,000 and then rises by so many nats a step."""
    return [lambda step, slope=slope: max(0, step - 1000) * slope for slope in slopes]


def test_gaps_are_relative_to_the_mean_of_the_baseline_at_that_point():
    own, base = np.array([[2.0, 4.4], [4.0, 3.6]]), np.array([[1.0, 4.0], [3.0, 4.0]])
    # Means of the baseline 2 and 4, of the gaps 1 and 0. At the first point the seeds lie 50 %
    # below and above that mean: of a gap of 50 % that is 25 either way.
    np.testing.assert_allclose(paired_gaps(own, base, True), [[75, 10], [25, -10]])
    np.testing.assert_allclose(paired_gaps(own, base, False), [[1, 0.4], [1, -0.4]])
    assert not np.isfinite(paired_gaps(own, 0 * base, True)).any()


def test_seeds_that_scatter_do_not_make_a_constant_gap_grow():
    """Each seed's loss has a slope of its own; the mode lies 0.02 nats above, nearly exactly."""
    generator, said = np.random.default_rng(2), 0
    x = np.linspace(50, 100, 11)
    for _ in range(400):
        base = 2 + 0.2 * generator.standard_normal((3, 1)) * (1 + x / 100)
        gaps = 0.02 + 1e-6 * generator.standard_normal((3, 1)) * x
        said += slope_interval(x, paired_gaps(base + gaps, base, True)).low > 0
    most = 0.05 + 4 * math.sqrt(0.05 * 0.95 / 400)
    assert said / 400 < most  # with that mean taken for known: 0.45


def test_the_last_half_is_of_the_steps_and_only_where_all_seeds_are_known():
    x = np.array([1.0, 40, 50, 60, 100, 120])
    gaps = np.arange(12.0).reshape(2, 6)
    gaps[1, 5] = np.nan
    late, of_them = last_half(x, gaps)
    np.testing.assert_array_equal(late, [50, 60, 100])
    np.testing.assert_array_equal(of_them, [[2, 3, 4], [8, 9, 10]])


def test_a_gap_that_grows_is_said_everywhere():
    # Steps 1,000 to 2,000, where the gap rises by 1e-5, 2e-5, 3e-5 nats a step on a mean of 2:
    # 0.5, 1.0, 1.5 % per 1,000 steps, less the share in the mean of seeds 5 % above and below it:
    # 0.5, 0.95, 1.55; s = sqrt((0.5^2 + 0.05^2 + 0.55^2) / 2), t(0.95, 2) = 2.919986.
    a_group = followed(rising(1e-5, 2e-5, 3e-5))
    gap = a_group.rows[0].gap
    half = 2.919986 * math.sqrt(0.2775 / 3)
    assert gap.name == "grows" and gap.per == 1000 and gap.steps == (1000, 2000)
    numbers = (gap.slope, gap.low, gap.high, gap.end)
    assert numbers == pytest.approx((1.0, 1 - half, 1 + half, 1.0), rel=1e-5)
    assert gap.sentence == (
        "the gap to FP32 grows by +1.00 % per 1,000 steps (90 % interval +0.11 to +1.89); loss of "
        "the evaluations, steps 1,000 to 2,000, seeds 0-2."
    )
    a_comparison = comparison(a_group)
    line = f"amp, over steps: {gap.sentence}"
    assert " ".join(console(a_comparison).split()).count(line) == 1
    assert line in group_markdown(a_comparison, a_group)
    mode = json.loads(json.dumps(results(a_comparison)))["groups"][0]["modes"][0]
    recorded, shown = mode["gap"], mode["verdict"]["shown"]
    assert recorded["step"] == STEPS and len(recorded["mean_low"]) == len(STEPS)
    assert recorded["mean"][-1] == pytest.approx(1.0, rel=1e-5)
    # The last evaluation is what the verdict is about.
    band = [recorded[name][-1] for name in ("mean", "mean_low", "mean_high")]
    assert band == pytest.approx([shown[name] for name in ("difference", "low", "high")], rel=1e-5)
    assert (recorded["slope"], recorded["steps"]) == (pytest.approx(1.0), [1000, 2000])


@pytest.mark.slow
def test_what_does_not_grow_is_said_in_the_report_alone(tmp_path):
    a_group = followed(rising(1e-5, -1e-5, 0.0))
    gap = a_group.rows[0].gap
    # Slopes 0.5, -0.5, 0 % per 1,000 steps.
    most = 2.919986 * 0.5 / math.sqrt(3)
    assert gap.name == "no growth seen" and gap.high == pytest.approx(most, rel=1e-6)
    assert gap.sentence.startswith("no growth seen (at most +0.84 % per 1,000 steps); loss of the")
    a_comparison = comparison(a_group)
    assert "growth" not in console(a_comparison)
    page = write_folder(a_comparison, tmp_path / "report").read_text()
    assert f"<dd>Over steps: {gap.sentence}</dd>" in page
    assert gap.sentence in (tmp_path / "report" / "report.md").read_text()


@pytest.mark.parametrize(
    ("gaps", "words"),
    [
        (rising(-1e-5, -2e-5, -3e-5), "no growth seen: -1.00 % per 1,000 steps (90 % interval -1"),
        (
            [lambda step, k=k: k * 1e-5 * (step - 3000) for k in (1, 2, 3)],
            "the lead over FP32 shrinks: +1.00 % per 1,000 steps (90 % interval +0.11 to +1.89)",
        ),
        (rising(0, 0, 0), "no growth seen (no gap changes); "),
    ],
)
def test_a_gap_below_zero_or_without_any_change(gaps, words):
    assert followed(gaps).rows[0].gap.sentence.startswith(words)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"gaps": rising(1e-5), "base": (2.0,)}, "one seed (3 are needed)"),
        ({"gaps": rising(1e-5, 2e-5), "base": (2.0, 2.1)}, "2 seeds (3 are needed)"),
        ({"gaps": rising(1, 2, 3), "looks": (5, 10)}, "3 seeds (5 are needed)"),
        ({"gaps": rising(1, 2, 3), "seeds": (5, 6, 7)}, "the runs are not paired by seed"),
        ({"gaps": rising(1, 2, 3), "status": "diverged"}, "the verdict is 'invalid baseline'"),
        ({"gaps": rising(1, 2, 3), "steps": [2000]}, "fewer than 3 recorded steps in the last"),
    ],
)
def test_what_is_not_assessed_says_why(given, words):
    gap = followed(**given).rows[0].gap
    assert gap is None or gap.sentence.startswith(f"not assessed: {words}")
    assert gap is not None or given["steps"] == [2000]  # a single evaluation, no training curve


def test_looks_test_the_slopes_as_strictly_as_the_verdict():
    gaps, base = rising(1e-5, 2e-5, 3e-5, 4e-5), (2.0, 2.1, 1.9, 2.0)
    gap = followed(gaps, base, looks=(3, 5)).rows[0].gap
    assert gap.seeds == [0, 1, 2] and gap.level > 0.90  # the fourth waits for its look
    assert gap.low < 0.16  # wider than at 90 %


def test_logs_of_other_tools_that_name_their_seeds_are_followed(tmp_path):
    pytest.importorskip("mprun.extensions.logs")
    for seed, slope in enumerate((1e-3, 2e-3, 3e-3)):
        for label, growth in (("fp32", 0.0), ("amp", slope)):
            rows = (f"{step},{2 + 0.1 * seed + growth * step}" for step in range(1, 51))
            text = "\n".join(["step,train_loss", *rows]) + "\n"
            (tmp_path / f"{label}-seed{seed}.csv").write_text(text)
    logs = "{0}={1}/{0}-seed0.csv,{1}/{0}-seed1.csv,{1}/{0}-seed2.csv"
    words = [logs.format(label, tmp_path) for label in ("fp32", "amp")]
    found = mprun.compare(words, scalar="train_loss")
    gap = found.groups[0].rows[0].gap
    # 1e-3, 2e-3, 3e-3 a step on a mean of 2.1.
    assert gap.name == "grows" and gap.per == 10 and gap.of == "train_loss"
    assert gap.slope == pytest.approx(100 * 10 * 2e-3 / 2.1, rel=1e-6)


def test_few_evaluations_leave_it_to_the_training_loss():
    a_group = group(seeds=3, steps=400)
    for run in a_group.every_run:
        run.evals = {name: column[-2:] for name, column in run.evals.items()}
    follow_gaps(a_group)
    of = {row.arm.label: row.gap.of for row in a_group.rows}
    assert of["amp"] == "training loss" and a_group.rows[-1].gap.unit == "%"
    lines = gap_lines(a_group.rows)
    assert lines[0] == "fp16_naive, over steps: not assessed: the verdict is 'diverged'."
    gaps = [row.gap for row in a_group.rows]
    a_group.relative = False  # the training loss is shown in percent all the same
    follow_gaps(a_group)
    for row, gap in zip(a_group.rows, gaps, strict=True):
        assert row.gap.slope == gap.slope
        np.testing.assert_array_equal(row.gap.band.mean, gap.band.mean)
        row.gap = None
    a_group.gan, a_group.metric = True, "d_loss"  # of which no loss has a gap
    follow_gaps(a_group)
    assert not any(row.gap for row in a_group.rows)


def test_a_metric_in_points_keeps_its_unit_and_turns():
    falling = rising(-1e-3, -2e-3, -3e-3)
    gap = followed(falling, (70.0, 71.0, 69.0), margin=0.5, metric="top1").rows[0].gap
    # Fewer points are worse: 1, 2, 3 points per 1,000 steps.
    assert gap.unit == "points" and gap.slope == pytest.approx(2.0, rel=1e-9)
    assert "grows by +2.0 points per 1,000 steps" in gap.sentence


def test_a_perplexity_of_zero_has_no_gap_at_its_point():
    lost = [lambda step: -2.0 * (step == 100)] * 3
    gap = followed(lost, (2.0,) * 3, metric="perplexity").rows[0].gap
    assert np.isnan(gap.band.mean).nonzero()[0].tolist() == [0]


def at_intervals(every, base_every, offset, **fields):
    """Runs of FP32 and of a mode `offset` above, recorded at their own steps: from 3 to 1."""
    arms = []
    for label, interval, above in (("fp32", base_every, 0.0), ("amp", every, offset)):
        steps = list(range(interval, 991, interval))
        curves = [
            [1 + 2 * math.exp(-step / 150) + seed / 100 + above for step in steps]
            for seed in range(3)
        ]
        runs = [made_run(s, *c, mode=label, steps=steps, **fields) for s, c in enumerate(curves)]
        arms.append(runs)
    return arms


@pytest.mark.parametrize("every, last", [(25, 950), (15, 990)])
def test_logs_of_other_intervals_have_a_gap_at_their_shared_steps_alone(every, last):
    arms = at_intervals(every, 10, 0.001, foreign=True)
    shared = np.arange(math.lcm(every, 10), 991, math.lcm(every, 10), dtype=float)
    for run in (*arms[0], *arms[1]):
        run.judged = shared[-3:]
    a_group = judged(*arms)
    gap = a_group.rows[0].gap
    mean = 1.01 + 2 * np.exp(-shared / 150)
    np.testing.assert_array_equal(gap.band.x, shared)
    np.testing.assert_allclose(gap.band.mean, 0.1 / mean, rtol=1e-9)
    late = shared >= last / 2
    assert gap.steps == (shared[late][0], last)
    slope, _ = np.polyfit(shared[late], (0.1 / mean)[late], 1)
    assert gap.slope == pytest.approx(100 * slope, rel=1e-6)
    [(_, drawn, _)] = differences(a_group, evaluation("loss"), 240)  # the figure's
    np.testing.assert_array_equal(drawn.x, shared)
    np.testing.assert_allclose(drawn.mean, gap.band.mean)


def test_nothing_is_said_beyond_the_last_compared_step():
    """One log of the mode ends early; the others go on alone."""
    arms = at_intervals(10, 10, 0.001, foreign=True)
    short = arms[1][2]
    short.evals = {name: values[:60] for name, values in short.evals.items()}
    for run in (*arms[0], *arms[1]):
        run.judged = short.evals["step"][-6:]
    gap = judged(*arms).rows[0].gap
    assert gap.band.x[-1] == gap.steps[1] == 600


def test_training_losses_written_at_other_intervals_are_compared_where_both_are():
    arms = at_intervals(25, 10, 0.0)
    for run in (*arms[0], *arms[1]):
        run.train, run.last_step = run.evals, 990
        run.evals = {"step": np.array([990.0]), "loss": run.train["loss"][-1:]}
    gap = judged(*arms).rows[0].gap
    assert gap.of == "training loss" and gap.band.x.tolist() == list(range(50, 951, 50))
    np.testing.assert_array_equal(gap.band.mean, 0)


def test_too_few_shared_steps_are_not_assessed():
    arms = at_intervals(110, 90, 0.0, foreign=True)  # 990 alone
    said = "not assessed: fewer than 3 steps of the last half are in all curves."
    assert judged(*arms).rows[0].gap.sentence == said


@pytest.mark.parametrize("size, says", [(1e-11, False), (1e-5, True)])
def test_differences_of_rounding_are_neither_growth_nor_consistent(size, says):
    gaps = [lambda step, scale=1 + seed / 100: scale * size * step / 2000 for seed in range(3)]
    row = followed(gaps).rows[0]
    assert row.grows == says and row.verdict.name == "matches"
    assert ("consistent difference" in row.verdict.sentence) == says
    assert ("no more than rounding" in row.gap.sentence) != says


@pytest.mark.parametrize(("share", "name"), [(0.8, "no growth seen"), (1.25, "grows")])
@pytest.mark.parametrize(
    ("metric", "margin", "of_evaluations", "size"),
    [
        ("loss", 0.0025, True, 2.0 * 0.0025),
        ("top1", 0.5, True, 0.5),
        ("loss", 0.0025, False, 2.0 * 0.0025),
        ("top1", 0.5, False, 2.0 * 0.01),  # the training loss beside points has a margin of 1 %
    ],
)
def test_growth_below_a_millionth_of_the_margin_is_rounding(
    metric, margin, of_evaluations, size, share, name
):
    """Equal slopes have no scatter, so the growth over the tested steps alone decides."""
    x = np.arange(1.0, 2001)
    rise = 1e-6 * share * size * np.clip(x / 1000 - 1, 0, 1)
    steps = STEPS if of_evaluations else STEPS[-2:]
    arms = []
    for gap in (0 * rise, rise):
        worse = -gap if metric == "top1" else gap
        finals = 2 + worse[np.array(steps) - 1] if of_evaluations else [2.0, 2.0]
        arms.append([made_run(seed, *finals, steps=steps, metric=metric) for seed in range(3)])
        for run in arms[-1]:
            run.train = {} if of_evaluations else {"step": x, "loss": 2 + gap}
    gap = judged(*arms, metric, margin).rows[0].gap
    assert gap.name == name, gap.sentence
    assert ("no more than rounding" in gap.sentence) == (name != "grows")


@pytest.mark.parametrize(("late", "of"), [(1500, "training loss"), (1499, "loss")])
def test_three_evaluations_of_the_last_half_are_followed(late, of):
    """Half of the steps is in it: of 2,000 steps the evaluations at 1,000 and later."""
    steps = [500, 1000, late, 2000] if of == "loss" else [500, 999, late, 2000]
    arms = [[made_run(s, *[final] * 4, steps=steps) for s in range(3)] for final in (2.0, 2.01)]
    for run in sum(arms, []):
        run.train = {"step": np.arange(1.0, 2001), "loss": np.linspace(3, 2, 2000)}
    assert judged(*arms).rows[0].gap.of.startswith(of)
