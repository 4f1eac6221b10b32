"""`mprun advise`: planted truths come back, hand-made probes give hand-derived advice."""

import functools
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from mprun.cli import main
from mprun.errors import BadInput
from mprun.extensions.diagnosis.advice import advise
from mprun.extensions.diagnosis.advice_report import as_text
from mprun.extensions.diagnosis.advised_regions import Layout
from mprun.models.dcgan import ConvAutoencoder
from mprun.numerics.exponent_shares import AppliedUpdates, ExponentCounts, LostUpdates
from mprun.numerics.loss_scale_range import Gradients
from mprun.numerics.post_mortem import plain
from mprun.numerics.probe_record import (
    LearnerProbe,
    OperationStats,
    Place,
    ProbeRecord,
    TensorStats,
)

from ...helpers import ONE_CORE, TINY_AUTOENCODER, TINY_GPT, record_of, refused, run
from ...numerics.small_runs import SMALL, as_json
from .planted import NETWORKS

PLAIN = SimpleNamespace(optim=SimpleNamespace(name="sgd", eps=None))
LEAVES = ("features.conv", "features.norm", "features.pool", "middle", "output")
LAYOUT = Layout(
    {"model": LEAVES},
    frozenset({("model", "features.norm")}),
    frozenset(("model", name) for name in ("features.conv", "middle", "output")),
)


def powers(exponents: dict[int, int], zeros: int = 0) -> TensorStats:
    """A tensor of powers of two: exponent -> how many."""
    counts = {str(exponent): count for exponent, count in exponents.items()}
    content = {"zeros": zeros, "inf": 0, "nan": 0, "classes": [counts, {}, {}, {}]}
    return TensorStats(
        ExponentCounts.from_json(content), 2.0 ** max(exponents, default=-math.inf), "fp32"
    )


def reaching(largest: float) -> TensorStats:
    """A tensor of which only the largest magnitude is known."""
    return TensorStats(ExponentCounts(), largest, "fp32")


def probe(step=1, *, scale=0.0, skipped=False, lost=None, more=None, **tensors) -> ProbeRecord:
    """more: arguments of `LearnerProbe`."""
    learner = LearnerProbe(("loss_scale",), tensors, lost or {}, **(more or {}))
    return ProbeRecord(step, skipped, {"loss_scale": scale}, {"model": learner})


def advice_from(*records, share=0.001, config=PLAIN, rates=(0.1,) * 9):
    return advise(list(records), LAYOUT, config, rates, share=share)


# 1 of 1,000 non-zero values at 2^-30, the others at 2^-10; every weight gradient is 2^-12.
GRADIENTS = {
    "activation_gradients": {"middle": powers({-30: 1, -10: 999}, zeros=500)},
    "weight_gradients": {"middle": powers({-12: 1000})},
}


def test_range_and_recommended_scale_by_hand():
    """2^-25 is zero and 2^-24 is not; 2^-10 * 2^25 = 2^15 is finite and 2^16 is not."""
    found = advice_from(probe(**GRADIENTS), share=0.0005)
    scales = found.loss_scaling.range
    assert (scales.lowest, scales.highest, scales.top) == (6, 25, 23)
    assert scales.recommended == 15 and scales.fits  # the upper middle of 6 ... 23
    assert found.loss_scaling.needed
    assert found.loss_scaling.limited_by == ("activation_gradients", "middle", 2.0**-10)
    values, weights = found.loss_scaling.kinds
    assert (values.lost, values.lost_recommended, values.lowest) == (0.001, 0.0, 6)
    assert values.zero_share == 500 / 1500 and values.worst.module == "middle"
    assert values.lost_sum == pytest.approx(2.0**-30 / (999 * 2.0**-10 + 2.0**-30))
    assert (weights.lost, weights.lowest) == (0.0, -12)
    scaled = ["precision=fp16_master_scaled", "scaler=static", "scaler.scale=32768"]
    assert found.overrides == scaled
    assert found.dynamic[1:3] == ["scaler=dynamic", "scaler.init_scale=32768"]


def test_a_share_that_scale_1_meets_needs_no_scaling():
    """1 in 1,000 is not more than 0.001; the weight gradients allow scales down to 2^-12."""
    found = advice_from(probe(**GRADIENTS), share=0.001)
    assert not found.loss_scaling.needed
    assert found.loss_scaling.range.lowest == -12  # of activation gradients alone -14
    assert found.loss_scaling.range.recommended == 6
    assert found.overrides == ["precision=fp16_master"]
    assert "scaler.scale=64" in found.static and found.unscaled == ["precision=fp16_master"]


def test_where_no_scale_is_enough_it_says_so():
    """2^-40 needs 2^16 to become 2^-24; 1 overflows from 2^16 on."""
    found = advice_from(probe(activation_gradients={"middle": powers({0: 500, -40: 500})}))
    scales = found.loss_scaling.range
    assert (scales.lowest, scales.highest, scales.recommended) == (16, 15, 13)
    assert not scales.fits
    assert found.loss_scaling.kinds[0].lost_recommended == 0.5
    text = "\n".join(as_text(found))
    assert "no static scale loses at most 0.1 %" in text
    assert "50 % of activation gradients still underflow" in text


def test_gradients_that_overflow_unscaled_get_a_scale_below_1():
    found = advice_from(probe(weight_gradients={"middle": powers({18: 1000})}))
    scales = found.loss_scaling.range
    assert found.loss_scaling.needed and scales.highest == -3
    assert scales.lowest == -42 and scales.recommended == -23  # of -42 ... -5, upper middle
    assert "scaler.min_scale=7.4505805969238281e-09" in found.dynamic  # 2^-27


def test_all_zero_gradients_say_nothing():
    found = advice_from(probe(activation_gradients={"middle": powers({}, zeros=5)}))
    assert found.loss_scaling.range is None and not found.loss_scaling.needed
    lines = as_text(found)
    assert lines[0] == "FP16 needs perhaps master weights and perhaps a loss scale"
    assert any("every gradient was zero" in line for line in lines)


@pytest.mark.parametrize(
    ("scale", "lowest", "highest"),
    [(10.0, 16, 35), (-3.0, 3, 22), (math.log2(1000), 16, 34)],
)
def test_gradients_measured_with_a_loss_scale(scale, lowest, highest):
    """Times 2^s: all k move by s. Between two powers the worse of both neighbours counts."""
    found = advice_from(probe(scale=scale, **GRADIENTS), share=0.0005)
    assert (found.loss_scaling.range.lowest, found.loss_scaling.range.highest) == (lowest, highest)


def test_probes_with_different_scales_add_up():
    """The same gradients at scale 1 and at 2^8, and a largest one of 2^-6 in the second."""
    second = {"activation_gradients": {"output": powers({2: 1})}}
    found = advice_from(probe(**GRADIENTS), probe(2, scale=8.0, **second), share=0.0005)
    assert found.loss_scaling.range.highest == 21
    assert found.loss_scaling.limited_by == ("activation_gradients", "output", 2.0**-6)
    assert found.loss_scaling.kinds[0].lost == 1 / 1001
    # Of two losses the worse counts: 4 at 2^3 is 2^-1 and overflows, at 2^8 it is 2^-6.
    both = Gradients()
    both.add(powers({2: 1}), (3.0, 8.0))
    assert (both.largest, both.highest(), both.lowest(0.0)) == (2.0**-1, 16, -18)


def test_skipped_updates_and_norm_layers_are_left_out():
    """A norm layer's weights stay FP32 in every advised mode, so do their gradients."""
    overflowed = {"weight_gradients": {"middle": powers({30: 1000})}}
    norm = {"weight_gradients": {"features.norm": powers({30: 1}), "middle": powers({-12: 1000})}}
    found = advice_from(probe(1, skipped=True, **overflowed), probe(2, **norm))
    assert found.evidence.left_out == [1] and found.evidence.steps == [2]
    assert found.loss_scaling.range.highest == 27
    with pytest.raises(BadInput, match="needs a probe"):
        advice_from(probe(1, skipped=True, **overflowed))


def test_master_weights_by_the_share_of_lost_updates():
    """10 of 2,000 non-zero updates are 0.5 %; 20 of 1,000 in one module are 2 %."""
    few = {"middle": LostUpdates(total=3000, zero=1000, fp16=10, bf16=500)}
    found = advice_from(probe(lost=few, **GRADIENTS)).master_weights
    assert not found.needed and found.share == {"fp16": 0.005, "bf16": 0.25}
    assert found.zero_share == 1 / 3
    small = few | {"output": LostUpdates(total=100, fp16=10, bf16=10)}
    found = advice_from(probe(lost=small, **GRADIENTS)).master_weights
    assert not found.needed  # 20 of 2,100 in total; 100 updates decide nothing alone
    assert found.worst["fp16"].module == "middle"
    one = few | {"output": LostUpdates(total=500, fp16=10, bf16=500)}
    twice = [probe(step, lost=one, **GRADIENTS) for step in (1, 2)]
    found = advice_from(*twice).master_weights
    assert found.needed and found.share["fp16"] == 40 / 5000
    assert (found.worst["fp16"].module, found.worst["fp16"].share) == ("output", 0.02)
    assert found.worst["bf16"].share == 1.0


def test_weights_that_were_16_bits_wide_are_judged_by_what_they_took():
    """Their lost updates are zeros. Without any single updates nothing is told."""
    zeros = {"middle": LostUpdates(total=3000, zero=2900)}

    def judged(applied, lost=None):
        took = {"applied_updates": {"middle": AppliedUpdates(applied, 4.0)}}
        found = advice_from(probe(lost=lost, more=took, **GRADIENTS))
        return found.master_weights.needed, "\n".join(as_text(found))

    needed, text = judged(1.0, zeros)
    assert needed and "this run's 16-bit weights took 0.25 of their wanted updates" in text
    assert judged(3.99, zeros)[0] is False
    unknown, text = judged(1.0)
    assert unknown is None and "1 master weights: cannot be told from this run" in text
    assert "would lose" not in text


def test_values_beyond_fp16_are_kept_in_fp32_with_what_reads_them():
    large, fine = reaching(70000.0), reaching(16000.0)
    found = advice_from(probe(activations={"features.conv": large, "features.pool": fine}))
    [one] = found.keep_fp32
    assert (one.module, one.patterns, one.needs_amp) == ("features.conv", ("features",), False)
    assert one.reason == "activations reach 7e+04, beyond FP16's 65504"
    assert found.overrides == ["precision=fp16_master", "precision.overrides.features=fp32"]
    # Nothing around `middle` could return another dtype: autocast, where FP32 results stay.
    [one] = advice_from(probe(activations={"middle": large})).keep_fp32
    assert (one.patterns, one.needs_amp) == (("middle", "output"), True)
    # 16384 * 4 is beyond 65504, 16000 * 4 is not.
    [one] = advice_from(probe(activations={"output": reaching(16384.0), "middle": fine})).keep_fp32
    assert (one.patterns, one.needs_amp) == (("output",), True)
    assert "within 4 times" in one.reason
    [one] = advice_from(probe(weights={"middle": large})).keep_fp32
    assert (one.patterns, one.needs_amp) == (("middle",), False)
    # Named once, whatever the number of reasons.
    both = advice_from(probe(activations={"middle": large}, weights={"middle": large}))
    assert len(both.keep_fp32) == 2
    text = "\n".join(as_text(both))
    assert "FP32 in middle" in text and "middle, middle" not in text


def test_what_breaks_fp16_naive_alone():
    adam = SimpleNamespace(optim=SimpleNamespace(name="adam", eps=1e-8))
    wide = probe(activations={"features.conv": reaching(300.0)})
    eps, variance = advice_from(wide, config=adam).notes
    assert "eps=1e-08 of adam is 0 in FP16" in eps
    assert "features.norm may overflow in the variance: its input reaches 300" in variance
    larger = SimpleNamespace(optim=SimpleNamespace(name="adam", eps=2.0**-24))
    assert advice_from(probe(**GRADIENTS), config=larger).notes == []


def test_the_advice_is_plain_data():
    nan = probe(activations={"middle": reaching(math.nan)}, **GRADIENTS)
    found = plain(advice_from(nan).as_dict())
    text = json.dumps(found, allow_nan=False)
    assert json.loads(text) == found
    assert found["loss_scaling"]["range"]["top"] == 23
    assert found["keep_fp32"][0]["reason"] == "activations are not finite"


def advised(capsys, *arguments) -> dict:
    return as_json(capsys, "advise", *arguments)


SGD = [*SMALL["lstm_lm"][:-1], "optim=sgd_plain", "train.clip_norm=null"]


@pytest.mark.slow
def test_scaled_gradients_shift_the_scale_by_the_same_power(tmp_path, capsys, monkeypatch):
    """Gradients times 2^-k at a learning rate times 2^k: the same weights, bit for bit."""
    original = torch.Tensor.backward
    found = {}
    for k in (0, -6, 4, 9):

        def backward(loss, k=k, **given):
            # Under a torch-function mode the original calls this once more, with its arguments.
            return original(loss if given else loss * 2.0**-k, **given)

        monkeypatch.setattr(torch.Tensor, "backward", backward)
        words = [*ONE_CORE, *SGD, f"optim.lr={0.5 * 2.0**k}", f"output_dir='{tmp_path / f'k{k}'}'"]
        found[k] = advised(capsys, *words, "--steps", "12", "--every=3")
    plain = found[0]["loss_scaling"]["range"]
    assert plain["fits"]
    for k in (-6, 4, 9):
        shifted = found[k]["loss_scaling"]["range"]
        for name in ("lowest", "highest", "recommended"):
            assert shifted[name] == plain[name] + k, (k, name)
        assert found[k]["master_weights"] == found[0]["master_weights"]
        assert f"scaler.scale={2.0 ** (plain['recommended'] + k):.17g}" in found[k]["static"]


AUTOENCODER = [*TINY_AUTOENCODER, "model.width=8", "optim=sgd_plain", "optim.lr=1e-12"]
AUTOENCODER += ["train.steps=6"]


@pytest.mark.slow
def test_a_planted_overflow_is_named_and_its_advice_works(tmp_path, capsys, monkeypatch):
    """Outputs of one convolution times 2^18, taken back by the next: FP32 computes the same."""
    original = ConvAutoencoder.__init__

    @functools.wraps(original)
    def planted(self, *arguments, **named):
        original(self, *arguments, **named)
        layers = self.encoder.layers
        layers.conv0.weight.data *= 2.0**18
        layers.conv0.bias.data *= 2.0**18
        layers.conv1.weight.data *= 2.0**-18

    monkeypatch.setattr(ConvAutoencoder, "__init__", planted)
    found = advised(capsys, *AUTOENCODER, f"output_dir='{tmp_path / 'advise'}'")
    activations = [one for one in found["keep_fp32"] if "activations" in one["reason"]]
    layers = {"encoder.layers.conv0", "encoder.layers.relu0"}
    assert {one["module"] for one in activations} == layers
    assert all("beyond FP16's 65504" in one["reason"] for one in activations)
    assert {tuple(one["patterns"]) for one in activations} == {("encoder.layers",)}
    assert run(tmp_path / "with", *AUTOENCODER, *found["static"]) == 0
    assert run(tmp_path / "without", *AUTOENCODER, "precision=fp16_master") == 3
    assert record_of(tmp_path / "with")["skipped"] == 0


@pytest.mark.slow
def test_the_run_stays_as_evidence_but_is_no_outcome(tmp_path, capsys):
    """The first steps of the whole schedule, in FP32 whatever precision was given."""
    words = [*ONE_CORE, *SMALL["lstm_lm"], "optim.schedule=cosine", "train.steps=100"]
    words += ["precision=amp", "precision.switch=[{at: 0.5, to: bf16_master}]"]
    words += [f"output_root='{tmp_path}'"]
    assert main(["advise", *words, "--steps=10", "--every=5"]) == 0
    printed = capsys.readouterr()
    assert "advise measures in FP32, without precision=amp" in printed.err
    assert "advise measures amp alone, not precision.switch (bf16_master from 50 %)" in printed.err
    lines = printed.out.splitlines()
    [path] = tmp_path.glob("*/advise-fp32*")
    assert lines[-1] == f"run: {path}" and len(lines) <= 28
    assert "steps 5 to 10 of 100" in lines[1]
    assert any("the schedule goes down to" in line for line in lines)
    assert "unstable recipe" not in printed.out
    command = lines[-2].strip()
    assert command.startswith("mprun device=cpu") and "precision=amp" not in command
    record = record_of(path)
    assert (record["status"], record["exit_code"], record["steps"]) == ("done", 0, 10)
    assert main(["ls", str(tmp_path)]) == 0 and "measured for advise" in capsys.readouterr().out
    assert record["config"]["train"]["steps"] == 100
    assert record["precision"]["mode"] == "fp32" and record["measured_for"] == "advise"
    assert "next: " not in printed.err
    assert main(["compare", str(tmp_path)]) == 2  # nothing there has an outcome
    capsys.readouterr()
    again = advised(capsys, str(path))
    assert again["command"] == command
    assert again["evidence"]["lr"] == [pytest.approx(record["config"]["optim"]["lr"], rel=0.03)] * 2


@pytest.mark.slow
def test_advice_from_a_rising_loss_says_so(tmp_path, capsys):
    """Where FP32 fails as well, FP16 alone is not to blame."""
    # Plain SGD at this rate, unclipped, moves every weight by far more than its own size.
    model = ["model=lstm_lm", "model.hidden_size=16", "model.embedding_size=16", "data=docs_chars"]
    rate = ["optim=sgd_plain", "optim.lr=100", "train.clip_norm=null", "train.steps=6"]
    steps = ["--steps", "6", "--every", "2", f"output_dir='{tmp_path / 'advise'}'"]
    notes = advised(capsys, *ONE_CORE, *model, *rate, *steps)["notes"]
    assert any("unstable recipe" in note for note in notes), notes


@pytest.mark.slow
def test_a_run_with_probes_is_read(tmp_path, capsys):
    path = tmp_path / "run"
    words = ["precision=fp16_master_scaled", "scaler=static", "numerics=probes", "numerics.every=2"]
    assert run(path, *ONE_CORE, *SGD, *words, "train.steps=6") == 0
    found = advised(capsys, str(path))
    assert found["evidence"]["steps"] == [2, 4, 6]
    assert "measured in fp16" in found["evidence"]["problems"][0]
    assert found["command"].count("precision=") == 1 and found["run"] == str(path)
    # Recorded at scale 128 and rounded to FP16, told for the loss itself: the largest gradient of
    # the same steps in FP32, up to the rounding of two runs that drift apart.
    steps = ["--every=2", f"output_dir='{tmp_path / 'fp32'}'"]
    fp32 = advised(capsys, *ONE_CORE, *SGD, "train.steps=6", *steps)["loss_scaling"]
    assert abs(found["loss_scaling"]["range"]["highest"] - fp32["range"]["highest"]) <= 1
    kept, fp32_kept = found["loss_scaling"]["limited_by"], fp32["limited_by"]
    assert kept[2] == pytest.approx(fp32_kept[2], rel=0.05)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["nowhere"], "advise nowhere: no run.json there"),
        (["--steps=0"], "--steps 0: must be"),
        (["--share", "1"], "--share 1: must be"),
        (["--every=9", "--steps=8", *ONE_CORE, *SGD], "--every 9: must be at most the 8 steps"),
        (["--stesp=8"], "unknown option"),
        (["optim.lr=0", *ONE_CORE], "optim.lr"),
        (["resume=somewhere"], "not allowed with a run;"),
        (["precision=zzz", *ONE_CORE], "precision=zzz"),  # though advise drops it
    ],
)
def test_bad_input_is_refused_before_anything_is_written(
    arguments, named, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    refused(capsys, "advise", *arguments, says=named)
    assert list(tmp_path.iterdir()) == []


NARROW = ("fp8_unscaled", "fp8_tensorwise", "fp8_rowwise", "bf16_stochastic", "bf16_kahan")


@pytest.mark.slow
@pytest.mark.parametrize("mode", NARROW)
def test_the_runs_of_narrow_modes_can_be_advised_on(tmp_path, capsys, mode):
    """With probes and shadow steps; the words fit the mode."""
    words = [*TINY_GPT, f"precision={mode}", "numerics=probes", "numerics.every=2", "train.steps=4"]
    path = tmp_path / "run"
    assert main([*words, "numerics.shadow_every=2", f"output_dir='{path}'"]) == 0
    err = capsys.readouterr().err
    formats = "E4M3" if mode == "fp8_rowwise" else "E4M3/E5M2"
    assert (f"those in {formats} emulated" in err) == mode.startswith("fp8")
    assert main(["advise", str(path)]) == 0
    text = capsys.readouterr().out
    assert (f"multiplied in {formats}:" in text) == mode.startswith("fp8")
    told = "cannot be told from this run" in text
    assert told == mode.startswith("bf16") == ("of their wanted updates" in text)
    if told:
        assert "would lose" not in text and "zero in FP32 too" not in text


@pytest.mark.slow
def test_on_the_quickstart_the_advised_scale_matches_fp32(tmp_path, capsys):
    """1,200 steps: within the margin of 1 % of FP32, no skip, and scale 1 is no better."""
    words = [*ONE_CORE, "experiment=quickstart_lost_updates"]
    found = advised(capsys, *words, f"output_dir='{tmp_path / 'advise'}'")
    assert found["master_weights"]["needed"]
    losses = {}
    modes = {"fp32": ["precision=fp32"], "static": found["static"], "unscaled": found["unscaled"]}
    for name, mode in modes.items():
        assert run(tmp_path / name, *words, *mode) == 0
        record = record_of(tmp_path / name)
        losses[name] = record["final"]["loss"]
        assert record["skipped"] == 0
    assert losses["static"] == pytest.approx(losses["fp32"], rel=0.01)
    assert losses["unscaled"] > losses["static"] - 0.01 * losses["fp32"]


@pytest.mark.slow
def test_check_trains_with_the_advice_and_without(tmp_path, capsys):
    small = ["model=lstm_lm", "model.hidden_size=16", "data=docs_chars", "optim=sgd_plain"]
    arguments = [*ONE_CORE, *small, f"output_dir='{tmp_path / 'advise'}'", "--steps=30", "--check"]
    found = advised(capsys, *arguments)["check"]
    assert (found["seeds"], found["steps"], found["metric"]) == (3, 30, "loss")
    advised_arm, scale_1 = found["arms"]
    assert "scaler=static" in advised_arm["overrides"]
    assert scale_1["overrides"] == "precision=fp16_master"
    for arm in found["arms"]:
        assert arm["skipped"] == arm["diverged"] == 0
        assert abs(arm["difference"]) < 1 and arm["unit"] == "%" and "3 seeds" in arm["verdict"]


# Operations between modules

AROUND = {("model", name): name.rpartition(".")[0] for name in (*LEAVES, "features")}
WITH_FEATURES = replace(LAYOUT, around=AROUND)


def between(*rows, reach=None, **tensors) -> ProbeRecord:
    """A probe with operations: (phase, module, operation, exponent of the results, divisor)."""
    found = {
        Place(phase, module, operation): OperationStats(powers({exponent: 8}), divisor)
        for phase, module, operation, exponent, divisor in rows
    }
    return probe(more={"operations": found, "reach": reach or {}}, **GRADIENTS | tensors)


def advice_between(record, narrow=None):
    return advise([record], WITH_FEATURES, PLAIN, (0.1,), share=0.001, narrow=narrow)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (("bmm", 17, None), "results of bmm reach 1.311e+05, beyond FP16's 65504"),
        (("mul", 14, None), "results of mul reach 1.638e+04, within 4 times of FP16's 65504"),
        (("log", 4, 2.0**-25), "log takes the logarithm of 2.98e-08, which rounds to 0 in FP16"),
        (("div", 4, 2.0**-30), "div divides by 9.313e-10, which rounds to 0 in FP16"),
        (("mul", -26, None), "FP16 loses 100 % of the sum of mul's results"),
    ],
)
def test_an_operation_is_named_with_the_smallest_part_and_larger_ones(row, reason):
    found = advice_between(between(("forward", "features", *row)))
    (kept,) = found.keep_fp32
    assert (kept.module, kept.reason) == ("features", reason)
    own = "precision.overrides.features.forward=fp32"
    assert found.overrides == ["precision=fp16_master", own]
    whole = "precision.overrides.features=fp32"
    modes = [one.overrides for one in found.candidates]
    assert modes[0] == tuple(found.overrides)
    assert modes[2:] == [
        ("precision=fp16_master", whole),
        ("precision=amp", own),
        ("precision=bf16_master",),
    ]
    assert modes[1][1] == "scaler=dynamic" and modes[1][-1] == own
    text = "\n".join(as_text(found))
    assert f"  features: {reason}\n    {own}\n" in text


@pytest.mark.parametrize(
    "row",
    [
        ("forward", "features", "bmm", 13, None),
        ("forward", "features", "log", 4, 2.0**-24),
        ("loss", "loss", "mul", 20, None),
        ("backward", "loss", "mul", 40, None),
        ("backward", "features", "mul", -40, None),
    ],
)
def test_what_fp16_holds_needs_no_override(row):
    found, without = advice_between(between(row)), advice_between(probe(**GRADIENTS))
    assert found.as_dict() == without.as_dict()
    modes = [one.overrides[-1] for one in found.candidates]
    assert modes[2:] == ["precision=amp", "precision=bf16_master"]


def test_whatever_reads_a_large_number_is_fp32_too():
    """The model hands 2^17 to `middle`; `features` returns 2^17 to the model, which hands it on."""
    large = ("forward", "", "mul", 17, None)
    found = advice_between(between(large, reach={"middle": (2.0**17, 2.0**17)}))
    assert found.keep_fp32[0].module == "the model itself"
    assert found.keep_fp32[0].patterns == ("forward", "middle")
    inside = ("forward", "features", "mul", 17, None)
    ends = {"features": (1.0, 2.0**17), "output": (2.0**17, 1.0)}
    found = advice_between(between(inside, reach=ends))
    assert found.keep_fp32[0].patterns == ("features.forward", "forward", "output")


def test_gradients_of_operations_bound_the_scale_unless_these_are_fp32():
    """2^8 overflows from 2^8 on; the gradients of layers, 2^-10, from 2^26 on."""
    gradient = ("backward", "features", "mul", 8, None)
    found = advice_between(between(gradient)).loss_scaling
    assert found.range.highest == 7
    assert found.limited_by == ("gradients", "mul in features", 2.0**8)
    kept = advice_between(between(gradient, ("forward", "features", "mul", 17, None)))
    assert kept.loss_scaling.range.highest == 25


def test_what_a_mode_computes_in_fp32_is_left_alone():
    row = ("forward", "features", "log", 17, None)
    place, asked = ("model", Place(*row[:3])), []

    def narrow(mode):
        asked.append(mode)
        return {place: mode != ("precision=amp",)}

    found = advice_between(between(row), narrow)
    assert asked == [("precision=fp16_master_scaled",), ("precision=amp",)]
    assert found.overrides[1:] == ["precision.overrides.features.forward=fp32"]
    assert ("precision=amp",) in [one.overrides for one in found.candidates]
    assert advice_between(between(row), lambda mode: {place: False}).keep_fp32 == []
    asked.clear()
    assert advice_between(probe(**GRADIENTS), narrow).keep_fp32 == asked == []


@pytest.mark.slow
def test_a_mode_that_fails_is_replaced_by_the_next(tmp_path, capsys):
    """Odd integers from 2049 on are no FP16 numbers. The advised mode casts them, amp does not."""
    line = NETWORKS["positions_beyond_2048.a"].words
    line += [f"output_dir='{tmp_path / 'run'}'", "--seconds", "600"]
    found = as_json(capsys, "advise", *line)
    first, *others, last = found["tried"]
    assert first["overrides"] == ["precision=fp32"] and last["overrides"] == ["precision=amp"]
    assert others[0]["overrides"] == ["precision=fp16_master"]
    assert all(one["cures"] is False and one["steps"] == 100 for one in others)
    assert last["cures"] and last["loss"] < 1.1 * first["loss"] < others[0]["loss"]
    assert found["overrides"] == ["precision=amp"] and found["command"].endswith("precision=amp")


@pytest.mark.slow
def test_no_command_is_printed_that_was_not_tried(tmp_path, capsys):
    line = [*TINY_GPT, *ONE_CORE, f"output_dir='{tmp_path / 'run'}'", "--steps", "4"]
    assert main(["advise", *line, "--seconds", "0"]) == 0
    out, err = capsys.readouterr()
    assert "mprun: advise: tries changes for at most 0 seconds (--seconds S)\n" in err
    assert "no command: no mode was tried to its end and held" in out
    assert "not tried, the 0 seconds are used up" in out
    assert not any(line.strip().startswith("mprun ") for line in out.splitlines())
