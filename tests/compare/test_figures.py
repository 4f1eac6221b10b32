"""The curves, bars and intervals are read back from the matplotlib objects."""

import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.colors import to_hex

from mprun.comparison.figures import group_figures
from mprun.comparison.findings import Verdict, band, grid
from mprun.comparison.gap_growth import TRAINING, differences, evaluation
from mprun.plots.panel import GREY, INK, SHIPPED, inline_svg, settings, styles

from .made_comparison import gan_group, group, row, run

TOP1 = {"metric": "top1", "higher_is_better": True, "unit": "points", "relative": False}
TOP1 |= {"margin_setting": 0.5}


@pytest.fixture(autouse=True)
def drawing_settings():
    with settings():
        yield


def drawn(a_group, points=240):
    labels = [r.arm.label for r in (a_group.baseline, *a_group.rows)]
    return {d.name: d for d in group_figures(a_group, styles(labels), points)}


@pytest.fixture(scope="module")
def usual():
    """The figures of a group of five seeds with every kind of verdict, for reading."""
    with settings():
        return drawn(group())


def test_band_is_mean_and_extremes_of_the_seeds_that_still_run():
    x = np.arange(4.0)
    curves = [(x, np.array([1.0, 2, 3, 4])), (x[:2], np.array([3.0, 6]))]
    b = band(curves, grid(curves, 10))
    np.testing.assert_array_equal(b.x, x)
    np.testing.assert_array_equal(b.mean, [2, 4, 3, 4])
    np.testing.assert_array_equal(b.low, [1, 2, 3, 4])
    np.testing.assert_array_equal(b.high, [3, 6, 3, 4])


def test_more_records_than_points_become_the_means_of_the_nearest():
    curves = [(x := np.arange(1.0, 9), x * 10)]
    b = band(curves, grid(curves, 2))  # points 1 and 8; the middle is 4.5
    np.testing.assert_array_equal(b.x, [1, 8])
    np.testing.assert_array_equal(b.mean, [25, 65])  # of 10 to 40 and of 50 to 80


def test_a_record_that_is_not_finite_is_bridged_and_nothing_is_made_up_outside():
    x = np.arange(5.0)
    y = np.array([np.nan, 1, np.inf, 3, np.nan])
    np.testing.assert_array_equal(band([(x, y)], x).mean, [np.nan, 1, 2, 3, np.nan])
    empty = (np.empty(0), np.empty(0))
    assert len(band([empty], grid([empty], 5)).mean) == 0
    assert np.isnan(band([empty], np.arange(3.0)).mean).all()


@pytest.mark.slow
def test_every_figure_of_a_full_group(usual):
    names = "intervals difference difference-training loss-steps loss-updates eval-loss loss-scale"
    assert list(usual) == [*names.split(), "throughput", "memory"]
    one = group(seeds=3, steps=400)
    assert "loss-scale" not in drawn(replace(one, rows=one.rows[:2]))  # where nothing scales


def test_losses_of_a_gan_get_curves_but_no_intervals(tmp_path):
    names = [*drawn(gan_group(tmp_path, seeds=1))]
    assert names[:4] == "loss-steps loss-updates eval-d_loss eval-g_loss".split()
    assert "intervals" not in names


def curves_of(drawing) -> list:
    (axes,) = drawing.figure.axes
    lines = [line for line in axes.lines if line.get_marker() in ("None", None, ".")]
    return sorted(lines, key=lambda line: line.get_zorder())


def test_fp32_is_black_wide_and_pale_below_the_others(usual):
    base, *modes = curves_of(usual["loss-steps"])
    assert to_hex(base.get_color()) == INK and base.get_alpha() < 0.5
    assert base.get_linewidth() > 2 * max(line.get_linewidth() for line in modes)
    assert len(modes) == 4
    # It alone has a band, so that no colours mix.
    (axes,) = usual["loss-steps"].figure.axes
    assert [to_hex(patch.get_facecolor()) for patch in axes.patches] == [INK]


def test_equal_curves_come_out_striped_with_the_same_share_for_each(usual):
    lines = curves_of(usual["loss-steps"])[1:]
    patterns = [line._unscaled_dash_pattern[1] for line in lines]
    assert patterns[0] is None  # drawn whole, then three quarters, half and a quarter
    widths = [line.get_linewidth() for line in lines[1:]]
    periods = [sum(p) * width for p, width in zip(patterns[1:], widths, strict=True)]
    assert periods == pytest.approx([14, 14, 14])  # points: the stripes lie side by side
    shares = [p[0] / sum(p) for p in patterns[1:]]
    assert shares == pytest.approx([0.75, 0.5, 0.25])


def three_seeds(*own: list[float], base: list[list[float]]):
    """A group of FP32 and amp with these losses at steps 1, 2, ..., a list for each seed."""
    one = group(seeds=3, steps=400)
    arms = []
    for mode, losses in (("fp32", base), ("amp", own)):
        curves = [{"step": np.arange(1.0, len(y) + 1), "loss": np.array(y)} for y in losses]
        runs = [replace(run(mode, seed), train=curve) for seed, curve in enumerate(curves)]
        arms.append(row(runs, Verdict("matches", ".")))
    return replace(one, baseline=arms[0], rows=arms[1:])


def test_the_difference_is_paired_and_its_band_the_verdicts_interval_at_that_point():
    # Step 1: differences 0, 0.1, 0.2 of 1, 2, 3: 5 % of the mean. own - (1 + u) base has the mean
    # 0.1 - 2 u and the deviation |0.1 - u|. So the ends are u = 0.1 (c -+ 1) / (c -+ 2), where c is
    # t(0.95, 2) / sqrt(3).
    one = three_seeds([1.0, 4], [2.1, 4], [3.2, 4], base=[[1.0, 4], [2, 4], [3, 4]])
    ((found, b, _),) = differences(one, TRAINING[0], 10)
    assert found is one.rows[0]
    c = 2.91998558 / np.sqrt(3)
    low, high = 10 * (c - 1) / (c - 2), 10 * (c + 1) / (c + 2)
    np.testing.assert_allclose([b.mean, b.low, b.high], [[5, 0], [low, 0], [high, 0]])


def test_a_fall_of_an_accuracy_is_above_zero_in_points():
    one = three_seeds([70.0, 80], [70, 80], [70, 80], base=[[70.0, 81]] * 3)
    for every in one.every_run:
        every.evals = {"step": every.train["step"], "top1": every.train["loss"]}
    one = replace(one, **TOP1)
    ((_, b, _),) = differences(one, evaluation("top1"), 10)
    np.testing.assert_allclose(b.mean, [0, 1])
    drawing = drawn(one)["difference"]
    assert "±0.5 points" in drawing.caption and "amp: ends at +1.00 points" in drawing.label


DIED = [2000 // 3 + 50 * seed for seed in (0, 2, 4)]


def test_every_mode_has_a_row_with_the_margin_and_diverged_ones_a_cross_at_its_edge(usual):
    for name in ("difference", "difference-training"):
        (axes,) = usual[name].figure.axes
        texts = [text.get_text() for text in axes.texts]
        assert [text.partition(":")[0] for text in texts] == list(SHIPPED)[2:6]
        assert texts[0].startswith("fp16_naive: diverged in 3 of 5 runs, ends at +")
        shaded = [patch for patch in axes.patches if to_hex(patch.get_facecolor()) == GREY]
        assert len(shaded) == 4
        crosses = [line for line in axes.lines if line.get_marker() == "x"]
        assert [line.get_xdata()[0] for line in crosses] == DIED
        assert all(0 < line.get_ydata()[0] < 0.5 for line in crosses)
        caption = usual[name].caption
        assert "90 % interval" in caption and "not the verdict" in caption
    assert "which is set for the final evaluation" in caption  # of the training loss


def test_a_mode_that_died_before_the_first_evaluation_has_its_row_too():
    one = group(steps=800)
    dead = row([run("fp16_naive", s, steps=800, dies_at=40) for s in range(5)], one.rows[0].verdict)
    drawing = drawn(replace(one, rows=[dead, *one.rows[1:]]))["difference"]
    assert "fp16_naive: diverged in 5 of 5 runs;" in drawing.label


def test_arms_that_are_not_paired_say_so():
    one = group(seeds=4, steps=400)
    runs = [replace(own, seed=own.seed + 10) for own in one.rows[3].arm.runs]
    one = replace(one, rows=[row(runs, one.rows[3].verdict)])
    assert "the means over the runs, which are not paired" in drawn(one)["difference"].caption


def test_without_two_evaluations_the_difference_is_that_of_the_training_loss():
    one = group(steps=400)
    for every in one.every_run:
        every.evals = {key: values[-1:] for key, values in every.evals.items()}
    assert {"difference", "difference-training"} & drawn(one).keys() == {"difference-training"}


@pytest.mark.slow
def test_speed_and_memory_are_not_drawn_where_every_mode_is_emulated_and_marked_where_some_are():
    one = group(seeds=3, steps=400)
    for number, own in enumerate(one.rows):
        for every in own.arm.runs:
            every.half_products = "emulated-fp16" if number else "native-fp16"
    texts = [text.get_text() for text in drawn(one)["throughput"].figure.axes[0].texts]
    assert ["(emulated)" in text for text in texts] == [False, False, True, True, True]
    for every in one.rows[0].arm.runs:
        every.half_products = "emulated-fp16"
    assert not {"throughput", "memory"} & drawn(one).keys()


def test_what_a_script_is_told_are_the_values_that_are_drawn(usual):
    drawing = usual["loss-steps"]
    amp = max(curves_of(drawing), key=lambda line: line.get_zorder())
    told = drawing.values
    np.testing.assert_allclose(told["values"]["4"], amp.get_ydata(), rtol=1e-4)
    np.testing.assert_allclose(told["at"], amp.get_xdata(), rtol=1e-4)
    assert told["scale"] == "log" and told["name"] == "step"
    svg = inline_svg(drawing.figure, "x", "y")
    assert set(re.findall(r'data-series="(\d)"', svg)) == set(told["values"]) == set("01234")
    assert set(re.findall(r'data-legend="(\d)"', svg)) == set("01234")
    assert {"xtick", "ytick"} == set(re.findall(r'class="(\w+)"', svg))


def test_curves_are_thinned_by_averaging():
    one = group(seeds=2, steps=5000)
    drawing = drawn(one, points=100)["loss-steps"]
    fp32 = curves_of(drawing)[0]
    assert len(fp32.get_xdata()) == 100
    assert "100 points, each the mean of about 50 records" in drawing.caption
    # Between the ends each point stands for the records that are nearer to it than to its
    # neighbours, so the curve's mean over them is the mean of the records.
    losses = np.mean([run.train["loss"] for run in one.baseline.arm.runs], axis=0)
    step, middle = np.arange(1, 5001), fp32.get_xdata()[50]
    own = losses[abs(step - middle) < 4999 / 99 / 2]
    np.testing.assert_allclose(fp32.get_ydata()[50], own.mean(), rtol=1e-12)


def test_a_cross_where_each_run_died(usual):
    (axes,) = usual["loss-steps"].figure.axes
    crosses = [line for line in axes.lines if line.get_marker() == "x"]
    assert [line.get_xdata()[0] for line in crosses] == DIED
    low, high = axes.get_ylim()
    assert all(low < line.get_ydata()[0] < high for line in crosses)


def test_without_a_skipped_update_no_picture_is_drawn_twice():
    one = group(seeds=3, steps=400)
    unscaled = drawn(replace(one, rows=one.rows[:2]))
    assert "loss-steps" in unscaled and "loss-updates" not in unscaled


def test_updates_axis_ends_earlier_by_the_skipped_updates():
    scaled = row([run("amp", 0), run("amp", 1)], Verdict("inconclusive", "."))
    figures = drawn(replace(group(seeds=2), rows=[scaled]))
    steps, updates = (
        curves_of(figures[f"loss-{name}"])[-1].get_xdata()[-1] for name in ("steps", "updates")
    )
    # Five are skipped, and there is a point every 2000/239 updates.
    assert steps == 2000 and 1980 <= updates <= 1995


def test_intervals_lie_where_the_verdict_says(usual):
    (axes,) = usual["intervals"].figure.axes
    dots = [line.get_xdata()[0] for line in axes.lines if line.get_marker() == "o"]
    np.testing.assert_allclose(dots, [40.1, 0.6, 0.12])  # percent
    lines = [line.get_xdata() for line in axes.lines if len(line.get_xdata()) == 2]
    np.testing.assert_allclose(lines, [[38.1, 42.1], [-0.6, 1.8], [-0.31, 0.55]])
    # Far from the margin the scale is logarithmic, with a tick beyond the last mode.
    assert [text.get_text() for text in axes.get_xticklabels()] == "0 -1 -2 +1 +10 +50".split()
    assert "Logarithmic far from zero" in usual["intervals"].caption
    shaded = axes.patches[0].get_bbox()
    assert (shaded.x0, shaded.x1) == (-1, 1)
    assert "+0.60 % (-0.60 to +1.80)" in inline_svg(usual["intervals"].figure, "a", "b")


def test_a_mode_beyond_a_thousand_margins_is_an_arrow_and_near_ones_have_a_linear_scale():
    one = group(seeds=3, steps=400)
    judged = one.rows[1].verdict
    margin = judged.margin
    for times, markers, scale in ((2000, 1, "asinh"), (3, 0, "linear")):
        verdict = replace(judged, difference=times * margin, low=margin, high=times * margin)
        drawing = drawn(replace(one, rows=[replace(one.rows[1], verdict=verdict)]))["intervals"]
        (axes,) = drawing.figure.axes
        assert [line.get_marker() for line in axes.lines].count(">") == markers
        assert axes.get_xscale() == scale and ("arrow" in drawing.caption) == bool(markers)


def test_the_scale_of_the_rows_ends_at_a_tick_beyond_every_mode():
    # Differences of 3.24 % and -0.2 % of a mean of 1, where a margin of 1 % is shaded.
    one = three_seeds([1.0324] * 2, [1.0324] * 2, [1.0324] * 2, base=[[1.0] * 2] * 3)
    (axes,) = drawn(one)["difference-training"].figure.axes
    assert [text.get_text() for text in axes.get_yticklabels()] == ["-1", "0", "+1", "+5"]


def test_points_of_accuracy_are_not_turned_into_percent():
    one = group(seeds=3, steps=400)
    verdict = Verdict("matches", ".", "paired", [0], [0], 0.2, -0.1, 0.45, margin=0.5)
    one = replace(one, rows=[replace(one.rows[3], verdict=verdict)], **TOP1)
    (axes,) = drawn(one)["intervals"].figure.axes
    assert [line.get_xdata()[0] for line in axes.lines if line.get_marker() == "o"] == [0.2]
    assert axes.get_xlabel() == "difference in points, worse →"


def test_the_scale_is_drawn_as_a_power_and_skips_at_their_steps(usual):
    (axes,) = usual["loss-scale"].figure.axes
    traces = [line for line in axes.lines if line.get_drawstyle() == "steps-post"]
    assert [line.get_ydata()[-1] for line in traces] == [16, 15]
    rows = [line.get_xdata() for line in axes.lines if line.get_marker() == "|"]
    np.testing.assert_array_equal(rows, [[1, 2, 3, 4, 900]] * 2)


def broken(a_run, **columns):
    return replace(a_run, train=a_run.train | columns)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["empty", "all NaN", "constant", "zero", "giant", "one", "bare"])
def test_odd_records_are_drawn_without_an_error(case):
    base = run("fp32", 0)
    count = len(base.train["step"])
    runs = {
        "empty": replace(base, train={k: v[:0] for k, v in base.train.items()}),
        "all NaN": broken(base, loss=np.full(count, np.nan)),
        "constant": broken(base, loss=np.full(count, 0.7)),
        "zero": broken(base, loss=np.zeros(count)),
        "giant": broken(base, loss=np.geomspace(1, 1e305, count)),
        "one": replace(base, train={k: v[:1] for k, v in base.train.items()}),
        "bare": replace(base, train={}, evals={}, samples_per_s=None, peak_bytes=None),
    }
    one = group(seeds=3, steps=400)
    one.baseline.arm.runs = [runs[case]]
    assert drawn(one)
    for drawing in drawn(replace(one, rows=[])).values():
        drawing.figure.canvas.draw()


@pytest.mark.slow
def test_any_label_is_drawn_as_it_is():
    one, labels = group(seeds=3, steps=400), ["_hidden", "cost $x$ and $", "a" * 90, "<b>&\"'"]
    for a_row, label in zip(one.rows, labels, strict=True):
        a_row.arm.label = label
    svg = inline_svg(drawn(one)["loss-steps"].figure, "x", "y")
    texts = [node.text or "" for node in ET.fromstring(svg).iter() if node.tag.endswith("text")]
    assert set(labels) <= {text.strip() for text in texts}


def test_a_mode_looks_the_same_beside_any_others_and_33_labels_can_be_told_apart():
    labels = ["fp32", "amp", *(f"amp optim.lr={i}" for i in range(31))]
    assert len(set(styles(labels).values())) == 33
    assert styles(["amp"])["amp"] == styles(["fp32", "fp16_naive", "amp"])["amp"]
    # And so does one of the user's own.
    alone = styles(["fp32", "mine"])["mine"]
    assert alone == styles([*SHIPPED, "mine"])["mine"] == styles(["mine", "theirs"])["mine"]
    assert alone not in styles(SHIPPED).values() and alone.dashes == ()


def test_inline_svg_has_no_foreign_ids_sizes_or_rules_and_is_valid(usual):
    first = inline_svg(usual["loss-steps"].figure, "a", 'says "x" & 0.123')
    second = inline_svg(usual["loss-updates"].figure, "b", "y")
    texts = first, second
    ids = [set(re.findall(r' id="([^"]+)"', text)) for text in texts]
    assert ids[0] and not ids[0] & ids[1]
    for text, own in zip(texts, ids, strict=True):
        root = ET.fromstring(text)
        assert root.get("role") == "img" and root.get("width") is None
        references = re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', text)
        assert {a or b for a, b in references} == own
        assert "<style" not in text and "<metadata" not in text and INK not in text
    assert ET.fromstring(first).get("aria-label") == 'says "x" & 0.123'
