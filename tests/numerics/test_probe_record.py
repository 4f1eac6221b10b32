"""Probe files: what is written is read again, without torch, and damage is named."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest

from mprun.errors import Damaged
from mprun.numerics.exponent_shares import BINS, AppliedUpdates, ExponentCounts, LostUpdates
from mprun.numerics.probe_record import (
    Agreement,
    LearnerProbe,
    OperationStats,
    Place,
    ProbeRecord,
    TensorStats,
    read_probes,
    write_probe,
)


def stats(seed: int, amax: float = 2.0, dtype: str = "fp16") -> TensorStats:
    bins = np.random.default_rng(seed).integers(0, 3, BINS)
    bins[1:4] = 0
    return TensorStats(ExponentCounts(bins), amax, dtype, stride=seed)


def record(step: int, **fields) -> ProbeRecord:
    learner = LearnerProbe(
        loss_scales=("loss_scale",),
        tensors={
            "weights": {"a": stats(1), "b.c": stats(2, 0.1, "fp32")},
            "activations": {},
            "updates": {"a": stats(3, math.nan), "b.c": stats(4, math.inf)},
        },
        lost_updates={"a": LostUpdates(9, 1, 2, 3, 4), "b.c": LostUpdates(5, 0, 0, 5, 5)},
        applied_updates={"a": AppliedUpdates(0.5, 1.0, 2.0**-40)},
        operations={Place("loss", "loss", "mul"): OperationStats(stats(5), overflows=2)},
        shadow={"a": Agreement(0.5, 1e-300, math.inf, 2.0), "b.c": Agreement(1.0, 4.0, 1.0, 1.0)},
    )
    return ProbeRecord(step, True, {"loss_scale": -3.5}, {"model": learner}, **fields)


def test_everything_is_read_again(tmp_path):
    assert read_probes(tmp_path) == []
    first, second = record(12, loss=math.inf, loss_fp32=1 / 3), record(100_000_000)
    write_probe(tmp_path, second)
    path = write_probe(tmp_path, record(12))
    assert write_probe(tmp_path, first) == path  # replaced
    assert path.name == "step-00000012.json"
    assert [p.name for p in path.parent.iterdir() if p.name.startswith(".")] == []
    found = read_probes(tmp_path)
    assert repr(found) == repr([first, second])  # NaN equals itself in text
    [own] = [r.learners["model"].tensors["weights"] for r in found[:1]]
    assert own["a"] == stats(1)


def test_sums_over_modules():
    own = record(1).learners["model"]
    total = own.total("weights")
    assert total.counts == stats(1).counts.merge(stats(2).counts)
    assert (total.amax, total.dtype, total.stride) == (2.0, "fp16+fp32", 2)
    assert math.isnan(own.total("updates").amax)
    assert own.total("activations") is None and own.total("weight_gradients") is None
    assert own.total_lost() == LostUpdates(14, 1, 2, 8, 9)
    assert LearnerProbe().total_lost() == LostUpdates()
    assert LearnerProbe().total_agreement() is None
    assert own.total_agreement().dot == 1.5


def test_what_fp16_makes_of_a_kind_in_words():
    """Of 4 values two are zeros, one underflows and one overflows."""
    classes = [{"-25": 1, "16": 1}, {}, {}, {}]
    content = {"zeros": 2, "inf": 0, "nan": 0, "classes": classes}
    own = TensorStats(ExponentCounts.from_json(content), 2.0**16, "fp32")
    probe = LearnerProbe(tensors={"updates": {"a": own}})
    said = "underflow 50 %, subnormal 0 %, overflow 50 %"
    assert probe.in_words("updates") == f"updates (fp32): zeros 50 %; of the others in FP16: {said}"
    assert probe.in_words("weights") == ""
    after = own.shares({"fp16"})
    assert math.isnan(after.underflow) and math.isnan(after.overflow) and after.subnormal == 0


@pytest.mark.parametrize(
    ("amax", "headroom"),
    [(65519.0, 0), (65520.0, -1), (1.0, 15), (2.0**-24, 39), (2 - 2.0**-11, 14), (1.9, 15)],
)
def test_headroom_is_that_of_the_largest_value_counted_or_not(amax, headroom):
    assert TensorStats(ExponentCounts(), amax, "fp32", 7).headroom == headroom
    exact = np.ldexp(np.float64(amax), [headroom, headroom + 1])
    with np.errstate(over="ignore"):
        assert list(np.isfinite(exact.astype(np.float16))) == [True, False]


def test_headroom_without_a_largest_value():
    assert TensorStats(ExponentCounts(), 0.0, "fp32").headroom is None
    finite = stats(1).counts
    assert TensorStats(finite, math.inf, "fp32").headroom == finite.headroom


def test_agreement_by_hand():
    """Own (3, 4), FP32 (3, 0): dot 9, norms 5 and 3, difference 4."""
    sums = Agreement(9.0, 25.0, 9.0, 16.0)
    assert sums.cosine == pytest.approx(0.6, rel=2**-50)
    assert sums.norm_ratio == pytest.approx(5 / 3, rel=2**-50)
    assert sums.relative_error == pytest.approx(4 / 3, rel=2**-50)
    assert math.isnan(Agreement().cosine) and math.isnan(Agreement().relative_error)


def test_damage_is_named(tmp_path):
    path = write_probe(tmp_path, record(3))
    whole = json.loads(path.read_text())
    for damage in (
        "",
        "[]",
        json.dumps(whole)[:-40],
        json.dumps(whole | {"version": 2}),
        json.dumps(whole | {"learners": {"model": {}}}),
        json.dumps(whole | {"learners": []}),
        json.dumps(whole | {"log2_loss_scale": {"loss_scale": "x"}}),
        json.dumps({k: v for k, v in whole.items() if k != "step"}),
        json.dumps(whole).replace('"overflows": 2', '"overflows": "x"'),
        json.dumps(whole).replace('"total": 9', f'"total": {2**63}'),
        json.dumps(whole).replace('"zeros": ', '"zeros": 1' + 39 * "0", 1),  # no int64 holds it
    ):
        path.write_text(damage)
        with pytest.raises(Damaged, match="step-00000003.json"):
            read_probes(tmp_path)


def test_reading_needs_no_torch():
    program = "import sys, mprun.numerics.probe_record; assert 'torch' not in sys.modules"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
