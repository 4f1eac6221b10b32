"""The report's section on probes is compared with shares worked out by hand."""

import math

import numpy as np
import pytest

from mprun.comparison import compare
from mprun.comparison.numerics import exponent_shares, numerics_figures, overflow, probed_modes
from mprun.comparison.report import LIMIT, render, write_folder
from mprun.numerics.exponent_shares import AppliedUpdates, ExponentCounts, LostUpdates
from mprun.numerics.post_mortem import write_post_mortem
from mprun.numerics.probe_record import (
    Agreement,
    LearnerProbe,
    ProbeRecord,
    TensorStats,
    write_probe,
)
from mprun.numerics.probing import _scalars
from mprun.plots.panel import settings, styles

from .made_comparison import comparison, group
from .run_folders import write_run, write_study

LABELS = styles(["fp32", "fp16_naive", "fp16_master", "fp16_master_scaled", "amp"])


def counts(zeros: int, inf: int = 0, classes=({},) * 4) -> ExponentCounts:
    made = {"zeros": zeros, "inf": inf, "nan": 0, "classes": [*classes]}
    return ExponentCounts.from_json(made)


def values(shift: int = 0, dtype: str = "fp32") -> TensorStats:
    """8 zeros and, times 2^shift: 2^-25, 1.5 * 2^-25, 1.5 * 2^-20, four times 1.5, 65535.

    FP16 makes of these, without the shift: 0 (a tie, to even); two subnormals (2^-24 and
    1.5 * 2^-20); four times 1.5; infinity.
    """
    several = {str(-25 + shift): 1, str(-20 + shift): 1, str(shift): 4}
    classes = [{str(-25 + shift): 1}, several, {}, {str(15 + shift): 1}]
    return TensorStats(counts(8, classes=classes), 65535.0 * 2.0**shift, dtype)


def record(step: int, log2_scale: int = 0, skipped=False, shadow=None) -> ProbeRecord:
    learner = LearnerProbe(
        loss_scales=("loss_scale",),
        tensors={
            "weights": {"a": values()},
            # Gradients carry the loss scale.
            "weight_gradients": {"a": values(log2_scale), "b": values(log2_scale)},
            "activation_gradients": {"a": values(log2_scale - 10)},
        },
        lost_updates={"a": LostUpdates(total=10, zero=1, nonfinite=1, fp16=2, bf16=4)},
        applied_updates={"a": AppliedUpdates(applied=5.0, wanted=8.0)},
        shadow=shadow,
    )
    return ProbeRecord(step, skipped, {"loss_scale": float(log2_scale)}, {"model": learner})


@pytest.fixture
def probed_group(tmp_path):
    """FP32 probed at scale 1; amp (its seeds 1 and 2) at 2^10 and 2^12, and at a skipped update."""
    one = group(seeds=3, steps=400)
    runs = tmp_path / "runs"
    for run in one.every_run:
        folder = runs / f"{run.mode}-s{run.seed}"
        folder.mkdir(parents=True)
        run.path = str(folder)
        # Only what was probed is there to be drawn.
        run.train, run.evals, run.samples_per_s, run.peak_bytes = {}, {}, None, None
    agreement = {"a": Agreement(dot=3.0, own=9.0, fp32=4.0, difference=1.0)}
    write_probe(runs / "fp32-s0", record(10))
    for seed in (1, 2):
        write_probe(runs / f"amp-s{seed}", record(10, 10))
        write_probe(runs / f"amp-s{seed}", record(20, 12, shadow=agreement))
        write_probe(runs / f"amp-s{seed}", record(30, 13, skipped=True))
    return one


def test_one_run_of_each_mode_without_its_skipped_updates(probed_group):
    fp32, amp = probed_modes(probed_group)
    assert (fp32.label, fp32.seed, fp32.steps, fp32.scales) == ("fp32", 0, [10], (0, 0))
    assert (amp.label, amp.seed, amp.steps, amp.skipped) == ("amp", 1, [10, 20], 1)
    assert amp.scales == (10, 12)
    assert amp.lost == LostUpdates(20, 2, 2, 4, 8)
    assert fp32.cosine is None
    # 3 / (3 * 2); sqrt(1 / 4)
    assert (amp.cosine, amp.relative_error) == (0.5, 0.5)


def test_the_histogram_is_that_of_the_unscaled_gradients(probed_group):
    expected = {-25: 12.5, -20: 6.25, 0: 25.0, 15: 6.25}, 50.0
    for mode in probed_modes(probed_group):
        assert exponent_shares(mode.gradients["weight_gradients"]) == expected
        lower = {exponent - 10: share for exponent, share in expected[0].items()}, 50.0
        assert exponent_shares(mode.gradients["activation_gradients"]) == lower


def test_underflow_and_overflow_at_other_scales(probed_group):
    for mode in probed_modes(probed_group):
        own = mode.gradients["weight_gradients"]
        assert (own.underflow(0), overflow(own, 0)) == (1 / 8, 1 / 8)
        # 2^-26 and 1.5 * 2^-26 (rounds to 2^-24 * 0.375, so 0); 65535 / 2 is finite.
        assert (own.underflow(-1), overflow(own, -1)) == (1 / 8 + 1 / 8, 0)
        assert (own.underflow(1), overflow(own, 1)) == (0, 1 / 8)
        assert overflow(own, 16) == 5 / 8  # 1.5 * 2^16, too


def test_what_the_figures_show(probed_group):
    modes = probed_modes(probed_group)
    with settings():
        drawings = {drawing.name: drawing for drawing in numerics_figures(modes, LABELS)}
        names = ("activation-gradients", "weight-gradients", "scales")
        assert list(drawings) == [f"numerics-{name}" for name in names]
        (axes,) = drawings["numerics-weight-gradients"].figure.axes
        boundaries = [line.get_xdata()[0] for line in axes.lines if len(line.get_xdata()) == 2]
        assert boundaries == [-25, -14, 16]
        histogram = axes.lines[-1]
        drawn = dict(zip(histogram.get_xdata(), histogram.get_ydata(), strict=True))
        assert [drawn[e] for e in (-25, -20, 0, 15)] == [12.5, 6.25, 25, 6.25]
        assert drawn[1] < axes.get_ylim()[0]  # no value: below the frame
        bars = [patch for patch in axes.patches if patch.get_height() == 50]
        assert len(bars) == 2  # zeros of both modes, left of the smallest value
        assert max(bar.get_x() + bar.get_width() for bar in bars) < -27

        scales = drawings["numerics-scales"]
        (axes,) = scales.figure.axes
        curves = [line for line in axes.lines if len(line.get_xdata()) > 2]
        assert len(curves) == 4  # two kinds, lost to either side
        at = dict(zip(curves[2].get_xdata(), curves[2].get_ydata(), strict=True))
        np.testing.assert_allclose([at[-1], at[0]], [25, 12.5])
        marks = [(line.get_xdata()[0]) for line in axes.lines if line.get_marker() == "^"]
        assert marks == [11]  # the middle of 2^10 and 2^12
    # Activation gradients lie 2^10 lower: 2^-35 underflows up to 2^10; 65535 overflows at 2^0.
    assert "only from 2¹¹ on, and above 2⁻¹ something overflows" in scales.caption


def tables(modes) -> str:
    return render("numerics.html", probes=modes, colours=dict.fromkeys(LABELS, "red"))


def test_the_tables(probed_group):
    text = tables(probed_modes(probed_group))
    rows = [line.split("</tr>")[0] for line in text.split("<tr>")]
    weights = next(row for row in rows if ">weights</td>" in row)
    # zeros, rounded to 0, subnormal, to infinity, not finite, largest, headroom
    for cell in ("50 %", "12.5 %", "25 %", "12.5 %", "none", "6.55e+04", "2<sup>-1</sup>"):
        assert f">{cell}</td>" in weights
    (amp,) = [row for row in rows if "steps 10 to 20" in row]
    assert "2, steps 10 to 20, without 1 of skipped updates" in amp
    assert "2<sup>10</sup> to 2<sup>12</sup>" in amp
    # 2 probes of 5 of 8; 4 of 16 and 8 of 16 non-zero finite updates.
    for cell in ("0.625", "25 %", "50 %", "0.5"):
        assert f">{cell}</td>" in amp


@pytest.mark.slow
def test_a_page_with_probes(probed_group, tmp_path):
    (tmp_path / "runs" / "fp32-s0" / "numerics" / "step-00000010.json").write_text("{")
    text = write_folder(comparison(probed_group), tmp_path / "out").read_text(encoding="utf-8")
    # A damaged probe is told, and the rest shown.
    assert "fp32, seed 0: " in text and "not a probe record" in text
    assert "What FP16 loses of amp" in text
    assert "<summary>Numerics: what FP16 can hold</summary>" in text
    assert "<p>One run of each mode:</p>" in text
    assert len(text.encode()) < LIMIT
    names = sorted(path.name for path in (tmp_path / "out").glob("*-numerics-*.png"))
    ends = ("activation-gradients", "scales", "weight-gradients")
    assert names == [f"resnet50-digits_32-numerics-{end}.png" for end in ends]


def test_gradients_that_are_all_zero_or_infinite_have_no_figure(probed_group, tmp_path):
    tensors = {"weight_gradients": {"a": TensorStats(counts(3, inf=2), math.inf, "fp16")}}
    bad = ProbeRecord(10, True, {"loss_scale": 0.0}, {"model": LearnerProbe((), tensors)})
    write_probe(tmp_path / "runs" / "fp32-s0", bad)
    fp32 = probed_modes(probed_group)[0]
    assert fp32.only_skipped
    with settings():
        assert numerics_figures([fp32], LABELS) == []
    text = tables([fp32])
    assert "all of skipped updates" in text
    assert ">60 %</td>" in text and ">inf</td>" in text and ">2</td>" in text


@pytest.mark.parametrize("weights", ["fp16", "fp32"])  # under autocast weights are FP32
def test_zeros_after_rounding_say_so(probed_group, tmp_path, weights):
    """The underflow share is not 0 % where all gradients are 0 in FP16: it is not known."""
    dtypes = {"activation_gradients": "fp16", "weight_gradients": weights}
    tensors = {kind: {"a": TensorStats(counts(9), 0.0, of)} for kind, of in dtypes.items()}
    learner = LearnerProbe(("loss_scale",), tensors)
    found = ProbeRecord(10, False, {"loss_scale": 0.0}, {"model": learner})
    write_probe(tmp_path / "runs" / "fp32-s0", found)
    said = "measured after rounding: probe in fp32 or use numerics.shadow_every"
    for _, (_, zero, *shares) in probed_modes(probed_group)[0].measured():
        assert zero == f"100 %, {said}" and shares[:3] == ["", "", ""]
    assert str(found).count(f"zeros 100 %, {said}") == 2
    shown = {tag for tag, _, value in _scalars(learner) if value is not None and value == value}
    assert shown == {"activation_gradients_zeros", "weight_gradients_zeros"}
    plain = TensorStats(counts(9), 0.0, "fp32")
    own = LearnerProbe((), {"weight_gradients": {"a": plain}})
    assert own.in_words("weight_gradients") == "weight gradients (fp32): zeros 100 %"


def test_of_many_probes_some_are_read(probed_group, tmp_path):
    for step in range(1, 151):
        write_probe(tmp_path / "runs" / "fp32-s0", record(step))
    fp32 = probed_modes(probed_group)[0]
    assert len(set(fp32.steps)) == 100 and fp32.steps == sorted(fp32.steps)
    assert ", drawn from 150" in tables([fp32])
    assert probed_modes(probed_group)[0].steps == fp32.steps  # the same ones every time


def test_a_post_mortem_is_quoted_in_the_notes(tmp_path):
    write_study(tmp_path, {"fp32": [1.0] * 3})
    for seed, status in enumerate(("done", "diverged", "diverged")):
        write_run(tmp_path / f"amp-s{seed}", "amp", seed, status=status)
    row = {"step": 40, "loss": math.nan, "loss_scale": 1.0, "found_inf": False, "skipped": 0}
    kept = {"step": 40, "folder": None, "reason": "not asked for"}
    folder = tmp_path / "amp-s1"
    write_post_mortem(folder, "loss is nan at step 40", 40, [row], "dynamic", kept)
    (tmp_path / "amp-s2" / "numerics").mkdir()
    (tmp_path / "amp-s2" / "numerics" / "post-mortem.json").write_text("[")
    (amp,) = compare(tmp_path).groups[0].rows
    first, second = amp.notes[:2]
    # Nothing can be made of the made-up record: no command is named.
    assert first == "seed 1: non-finite loss at an applied step"
    assert second.startswith("seed 2: ") and "not a post-mortem" in second
