"""`mprun scaler-replay`: against hand-worked scales, the classes step by step, and real runs."""

import json
import math

import numpy as np
import pytest
import torch

from mprun.build.precision import build_loss_scale
from mprun.cli import main
from mprun.config.compose import compose_config
from mprun.errors import BadInput, Damaged
from mprun.extensions.diagnosis.commands.scaler_replay import OWN, replay, run_trace, scaler_names
from mprun.extensions.diagnosis.overflow_trace import OverflowTrace, read_trace_file
from mprun.numerics.exponent_counter import exponent_counts
from mprun.numerics.exponent_shares import ExponentCounts
from mprun.numerics.probe_record import LearnerProbe, ProbeRecord, TensorStats, write_probe
from mprun.precision import DynamicLossScale, LogMaxLossScale, NoLossScale, StaticLossScale
from mprun.record.metrics import MetricsFile

from ...helpers import TINY_LM, assert_same_bits, raises_line, refused, rows_of, run
from ...numerics.small_runs import as_json
from ...shipped import published_scale


def build_preset(name, **changes):
    """The loss scale of an option of the group scaler, with other values of its settings."""
    settings = [f"scaler.{key}={value}" for key, value in changes.items()]
    config = compose_config([f"scaler={name}", *settings]).config.scaler
    return build_loss_scale(config, torch.device("cpu"))


def limits(values, grad_max=None):
    """A trace whose every step has a known limit."""
    values = np.asarray(values, float)
    return OverflowTrace(1, values, np.nextafter(values, np.inf), grad_max)


def test_torch_by_hand():
    scale = published_scale("torch", init_scale=2.0**12, growth_interval=3)
    found = replay(scale, limits([2.0**10] * 15))
    # Down twice, three clean steps, one step up that overflows, and so on.
    assert found.skipped.tolist() == [1, 2, 6, 10, 14]
    powers = {1: 12, 2: 11, 3: 10, 6: 11, 7: 10, 10: 11, 11: 10, 14: 11, 15: 10}
    assert found.changes == [(step, 2.0**power) for step, power in powers.items()]
    assert (found.final, found.lowest, found.highest) == (2.0**10, 2.0**10, 2.0**12)
    assert (found.known, found.assumed, found.unknown) == (15, 0, 0)
    assert found.collapsed_at is None and found.steps == 15


def test_megatron_by_hand():
    # Hysteresis 2: the first overflow only uses credit, later ones halve; growth refills it.
    scale = published_scale("megatron", init_scale=2.0**12, growth_interval=3)
    found = replay(scale, limits([2.0**10] * 13))
    assert found.skipped.tolist() == [1, 2, 3, 7, 8, 12, 13]
    powers = {1: 12, 3: 11, 4: 10, 7: 11, 9: 10, 12: 11}
    assert found.changes == [(step, 2.0**power) for step, power in powers.items()]


def test_collapse_by_hand():
    # DeepSpeed: one overflow on credit, 16 halvings to the floor of 1, and the next one ends it.
    found = replay(published_scale("deepspeed"), limits([0.0] * 100))
    assert found.collapsed_at == 18 and found.steps == 18
    assert found.lowest == found.final == 1.0
    found = replay(StaticLossScale(128.0), limits([0.0] * 100))
    assert found.collapsed_at == 50 and len(found.skipped) == 50


def step_by_step(scale, trace):
    """The reference: the shipped class, one update a step."""
    skipped, scales = [], []
    for index in range(len(trace)):
        value = scale.scale.item()
        scales.append(value)
        overflows = value >= trace.likely_overflow[index]
        largest = None
        if scale.needs_grad_max:
            largest = torch.tensor(trace.grad_max[index], dtype=torch.float32)
        scale.record(torch.tensor(float(overflows)), largest)
        scale.update()
        if overflows:
            skipped.append(index + 1)
            if scale.collapsed():
                break
    return skipped, scales, scale.state_dict()


def scalers():
    """Every rule with intervals short enough to be met, and the states that presets leave out."""
    for name in scaler_names():
        if name in ("static", "logmax"):
            continue
        yield name, lambda name=name: build_preset(name, growth_interval=7)
    yield "static", lambda: StaticLossScale(2.0**12)
    tolerant = {"growth_interval": 5, "tolerance": 0.3, "hysteresis": 1}
    yield "tolerance", lambda: DynamicLossScale(2.0**14, **tolerant)
    refilled = {"growth_interval": 6, "hysteresis": 3, "growth_delay": 2}
    yield "refill", lambda: DynamicLossScale(2.0**14, **refilled, refill_on_clean_step=True)
    yield "interval of 1", lambda: DynamicLossScale(2.0**14, growth_interval=1)
    yield "logmax", LogMaxLossScale


@pytest.mark.parametrize(("name", "make"), list(scalers()))
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.few(2)
def test_clean_stretches_are_passed_exactly(name, make, seed):
    random = np.random.default_rng(seed)
    powers = np.round(12 + 2 * np.sin(np.arange(600) / 40) + random.normal(0, 1, 600))
    trace = limits(2.0**powers, 65504 / 2.0**powers)
    scale = make()
    found = replay(scale, trace)
    skipped, scales, state = step_by_step(make(), trace)
    assert found.skipped.tolist() == skipped
    starts = [step - 1 for step, _ in found.changes]
    lengths = np.diff(starts, append=found.steps)
    assert np.repeat([value for _, value in found.changes], lengths).tolist() == scales
    own = scale.state_dict()
    # The credit of the rate rule counts steps; everything else is the rule's whole state.
    assert_same_bits(own, state)


def test_logmax_needs_gradients():
    with pytest.raises(ValueError, match="largest unscaled gradient"):
        replay(LogMaxLossScale(), limits([1.0]))


# What is carried from step to step


def bounds(*steps):
    """Steps as (scale, found_inf) of a run, None for a step of which nothing is known."""
    clean = [0.0 if s is None or s[1] else s[0] for s in steps]
    overflow = [s[0] if s is not None and s[1] else math.inf for s in steps]
    return OverflowTrace(1, np.array(clean), np.array(overflow))


def test_an_overflow_is_carried_until_a_clean_step_contradicts_it():
    trace = bounds((64, 1), (32, 1), (16, 0), (16, 0), (32, 0), (64, 0))
    # From step 5 on 32 is clean, and the overflow at 64 of step 1 is the tightest bound left.
    assert trace.likely_overflow.tolist() == [64, 32, 32, 32, 64, math.inf]
    assert trace.likely_clean.tolist() == [16, 16, 16, 16, 32, 64]


def test_before_the_first_overflow_a_later_one_counts_unless_contradicted():
    assert bounds((16, 0), (16, 0), (32, 1), (16, 0)).likely_overflow.tolist() == [32] * 4
    trace = bounds((32, 0), (32, 0), (32, 1), (32, 1), (16, 0))
    assert trace.likely_overflow.tolist() == [math.inf, math.inf, 32, 32, 32]
    # A scale that was clean stays clean until it overflows twice in a row.
    assert trace.likely_clean.tolist() == [32, 32, 16, 16, 16]


def test_one_odd_batch_says_nothing_of_its_neighbours():
    trace = bounds((32, 0), (32, 1), (16, 0), (16, 0))
    assert trace.likely_overflow.tolist() == [math.inf, 32, math.inf, math.inf]
    assert trace.likely_clean.tolist() == [32, 16, 32, 32]
    known, likely = trace.decided(np.array([32.0] * 4))
    assert known.tolist() == [True, True, False, False] and likely.all()


def test_what_nothing_shows_is_unknown_and_taken_as_clean():
    trace = bounds((32, 0), None, (32, 0))
    found = replay(StaticLossScale(64.0), trace)
    assert (found.known, found.assumed, found.unknown) == (0, 0, 3)
    assert not len(found.skipped)
    found = replay(StaticLossScale(32.0), trace)
    assert (found.known, found.assumed, found.unknown) == (2, 1, 0)


# Files


def written(tmp_path, text, name="trace.csv"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def replayed(capsys, *arguments):
    return as_json(capsys, "scaler-replay", *arguments)


def test_the_command_on_a_csv_file(tmp_path, capsys):
    lines = "\n".join(f"{step},1024" for step in range(1, 16))
    path = written(tmp_path, f"step,limit\n{lines}\n")
    settings = ["--scalers", "torch,static", "scaler.growth_interval=3", "scaler.init_scale=4096"]
    found = replayed(capsys, path, *settings)
    assert found["scalers"]["torch"]["skip_steps"] == [1, 2, 6, 10, 14]
    assert found["scalers"]["torch"]["final_scale"] == 1024
    assert found["scalers"]["static"]["skipped"] == 0
    assert [one.name for one in tmp_path.iterdir()] == ["trace.csv"]  # nothing unasked
    assert replayed(capsys, path, *settings, "--out", tmp_path / "new") == found
    stored = json.loads((tmp_path / "new" / "scaler-replay.json").read_text())
    assert stored == found
    assert (tmp_path / "new" / "scaler-replay.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "new" / "scaler-replay.svg").read_text(encoding="utf-8")


@pytest.mark.slow
def test_all_scalers_and_the_table(tmp_path, capsys):
    path = written(tmp_path, "step,limit\n1,4096\n2,4096\n3,\n4,inf\n")
    assert main(["scaler-replay", str(path)]) == 0
    text = capsys.readouterr().out
    for name in set(scaler_names()) - {"logmax"}:
        assert f"\n| {name} " in text
    assert "Left out: logmax needs the largest gradient" in text
    assert "seen, " in text and "assumed from other steps" in text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["trace.csv"]


@pytest.mark.slow
def test_a_scaler_of_the_users_own_is_replayed_like_the_shipped_ones(tmp_path, capsys):
    folder = tmp_path / "mine" / "scaler"
    folder.mkdir(parents=True)
    (folder / "gentle.yaml").write_text(
        "name: static\nkind: static\nscale: 32.0\nmax_consecutive_skips: 50\n"
    )
    (folder / "off.yaml").write_text("name: none\nkind: none\n")
    path = written(tmp_path, "step,limit\n1,64\n2,16\n")
    command = [path, "--config-dir", tmp_path / "mine"]
    found = replayed(capsys, *command)["scalers"]
    assert found["gentle"]["skip_steps"] == [2]
    # Of its kind there is nothing to replay.
    assert "off" not in found and "none" not in found and "torch" in found
    found = replayed(capsys, *command, "--scalers", "gentle", "scaler.scale=8")["scalers"]
    assert list(found) == ["gentle"] and found["gentle"]["skip_steps"] == []


def test_jsonl_with_found_inf_at_a_scale(tmp_path):
    rows = [(5, 64, 1), (6, 32, 0), (9, 32, 0)]
    text = "\n".join(
        json.dumps({"step": s, "loss_scale": scale, "found_inf": found, "loss": 1.0})
        for s, scale, found in rows
    )
    trace = read_trace_file(written(tmp_path, text, "trace.jsonl"))
    assert (trace.first_step, len(trace)) == (5, 5)
    assert trace.clean.tolist() == [0, 32, 0, 0, 32]
    assert trace.overflow.tolist() == [64] + [math.inf] * 4
    assert any("2 steps are not in the file" in note for note in trace.notes)


def test_found_inf_without_a_scale_overflows_at_every_scale(tmp_path):
    trace = read_trace_file(written(tmp_path, "step, found_inf\n0, 0\n1, 1\n2, 0\n"))
    for scale in (1e-30, 1.0, 1e30):
        assert trace.next_overflow(scale, 0) == 1
        assert trace.next_overflow(scale, 2) == 3
    assert any("every scale" in note for note in trace.notes)


def test_largest_gradients_come_from_their_column_or_from_the_limit(tmp_path):
    trace = read_trace_file(written(tmp_path, "step,limit,grad_max\n1,32,7\n2,64,5\n"))
    assert trace.grad_max.tolist() == [7, 5]
    trace = read_trace_file(written(tmp_path, "step,limit\n1,32\n2,64\n"))
    assert trace.grad_max.tolist() == [65504 / 32, 65504 / 64]


BAD_FILES = {
    "": "no steps",
    "step,limit\n": "no steps",
    "step,loss\n1,2\n": "found_inf",
    "limit\n1\n": "step",
    "step,limit\n2,1\n1,1\n": "line 3: step=1 after 2",
    "step,limit\n1,-4\n": "line 2: limit=-4",
    "step,limit\n1,nan\n": "limit=nan",
    "step,limit\n1.5,4\n": "step=1.5",
    "step,limit\n1,4,5\n": "line 2",
    "step,found_inf\n1,2\n": "found_inf=2",
    "step,found_inf,loss_scale\n1,0,\n": "loss_scale=None",
    "step,limit\n1,1\n100000000,1\n": "at most 10000000",
    '{"step": 1, "limit": 2}\nnope\n': "line 2 is not JSON",
    '{"step": 1, "limit": [2]}\n': "limit=[2]",
    '{"split": "train", "step": 1}\n': "run directory",
}


@pytest.mark.parametrize(("text", "message"), list(BAD_FILES.items()))
def test_a_bad_file_is_named_with_its_line(tmp_path, text, message):
    with raises_line(BadInput, message):
        read_trace_file(written(tmp_path, text))


BAD_COMMANDS = {
    "": "needs one TRACE",
    "a b": "needs one TRACE",
    "TRACE --bogus": "--bogus",
    "TRACE --scalers torhc": "did you mean 'torch'",
    "TRACE --scalers torch,torch": "twice",
    "TRACE --scalers static scaler.growth_interval=3": "scaler.growth_interval=3",
    "TRACE scaler.growth_interval=0": "growth_interval",
    "TRACE scaler.bogus=1": "scaler.bogus=1",
    "missing.csv": "no such file",
    ".": "run.json",
}


def test_a_bad_command_is_one_line_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    written(tmp_path, "step,limit\n1,1\n", "TRACE")
    for command, message in BAD_COMMANDS.items():
        refused(capsys, "scaler-replay", *command.split(), says=message)
    assert [p.name for p in tmp_path.iterdir()] == ["TRACE"]


# Runs

SMALL_RUN = [
    *TINY_LM,
    "data.vocab_size=50",
    "data.batch_size=4",
    "data.train_tokens=20000",
    "precision=fp16_master_scaled",
    "train.log_every=25",
]
OWN_SCALERS = {
    "torch": ["scaler=torch", "scaler.growth_interval=4", "scaler.init_scale=4194304"],
    "megatron": ["scaler=megatron", "scaler.growth_interval=3", "scaler.init_scale=16777216"],
    "static": ["scaler=static", "scaler.scale=1048576", "scaler.max_consecutive_skips=1000"],
}


@pytest.mark.parametrize("scaler", OWN_SCALERS)
@pytest.mark.slow
def test_a_run_replayed_with_its_own_scaler_skips_what_it_skipped(tmp_path, capsys, scaler):
    directory = tmp_path / "run"
    assert run(directory, *SMALL_RUN, *OWN_SCALERS[scaler], "train.steps=90") == 0
    capsys.readouterr()
    found = replayed(capsys, directory)
    rows = rows_of(directory, "train")
    more = np.flatnonzero(np.diff([0] + [row["skipped"] for row in rows]))
    skips = [rows[index]["step"] for index in more]
    assert 3 <= len(skips) < 90  # or the run shows nothing
    own = found["scalers"][OWN]
    assert own["skip_steps"] == skips
    assert own["decided"] == {"known": 90, "assumed": 0, "unknown": 0}
    changes = own["scale_changes"]
    for row in rows:
        assert [v for step, v in changes if step <= row["step"]][-1] == row["loss_scale"]
    assert found["scalers"]["fairseq"]["skipped_known"] == 0
    assert not list(directory.glob("**/scaler-replay*"))


def made_run(tmp_path, rows, scaler=None):
    """A record of (step, scale, skipped so far) and what run.json needs."""
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    for step, scale, skipped in rows:
        metrics.write(
            {"split": "train", "step": step, "updates": step - skipped, "skipped": skipped}
            | {"loss_scale": scale, "loss": 1.0}
        )
    metrics.close()
    return {"config": {"scaler": scaler or {"name": "torch", "kind": "dynamic"}}}


def test_scales_between_records_follow_from_the_runs_rule(tmp_path):
    own = DynamicLossScale(64.0, growth_interval=3)
    record = made_run(tmp_path, [(1, 64.0, 1), (4, 32.0, 1), (8, 128.0, 2), (10, 64.0, 2)])
    trace = run_trace(tmp_path, record, own)
    # 64 overflows; three steps at 32; three at 64; 128 overflows at step 8; then 64.
    assert trace.clean.tolist() == [0, 32, 32, 32, 64, 64, 64, 0, 64, 64]
    assert trace.overflow[[0, 7]].tolist() == [64, 128]


def test_records_that_do_not_fit_the_rule_are_believed_and_said(tmp_path):
    record = made_run(tmp_path, [(1, 64.0, 0), (4, 64.0, 0), (6, 16.0, 0)])
    trace = run_trace(tmp_path, record, DynamicLossScale(64.0, growth_interval=3))
    assert trace.clean.tolist() == [64, 64, 64, 64, 0, 16]
    assert any("step 4 is not that of the run's own rule" in note for note in trace.notes)


def test_runs_without_an_answer_are_refused(tmp_path):
    record = made_run(tmp_path, [(1, 64.0, 0), (4, 32.0, 2)])
    with pytest.raises(BadInput, match="scaler=none"):
        run_trace(tmp_path, record, NoLossScale())
    with pytest.raises(Damaged, match="2 skipped updates, 1 of them recorded"):
        run_trace(tmp_path, record, DynamicLossScale(64.0))
    record["config"]["scaler"]["per"] = "loss"
    with pytest.raises(BadInput, match="scaler.per=loss"):
        run_trace(tmp_path, record, DynamicLossScale())


def probe(tmp_path, step, values, dtype="fp16", log2_scale=5):
    """A probe whose weight gradients, times 2^log2_scale, are `values`."""
    counts = exponent_counts([torch.tensor(values)])[0]
    stats = TensorStats(ExponentCounts(counts.numpy()), max(map(abs, values)), dtype)
    learner = LearnerProbe(("loss_scale",), {"weight_gradients": {"output": stats}})
    write_probe(
        tmp_path, ProbeRecord(step, False, {"loss_scale": float(log2_scale)}, {"model": learner})
    )


def test_probes_show_how_far_other_scales_can_go(tmp_path):
    # 1000 at scale 2^5: times 2^6 it is 64000, times 2^7 too large. So 2^11, and not 2^12.
    record = made_run(tmp_path, [(step, 32.0, 0) for step in range(1, 5)])
    probe(tmp_path, 2, [1000.0, -3.0])
    trace = run_trace(tmp_path, record, DynamicLossScale(32.0))
    assert trace.clean.tolist() == [32] * 4
    assert trace.overflow.tolist() == [math.inf, 2.0**12, math.inf, math.inf]
    assert trace.likely_overflow.tolist() == [2.0**12] * 4
    assert trace.likely_clean.tolist() == [2.0**11] * 4
    assert trace.grad_max.tolist() == [1000 / 32] * 4
    found = replay(StaticLossScale(2.0**12), trace)
    assert found.skipped.tolist() == [1, 2, 3, 4] and found.skipped_known == 1


def test_fp32_gradients_count_only_in_a_run_that_has_no_fp16(tmp_path):
    record = made_run(tmp_path, [(1, 1.0, 0), (2, 1.0, 0)])
    probe(tmp_path, 1, [1000.0], dtype="fp32", log2_scale=0)
    trace = run_trace(tmp_path, record, NoLossScale())
    assert trace.likely_overflow.tolist() == [2.0**7] * 2
    trace = run_trace(tmp_path, record, DynamicLossScale(1.0, min_scale=1.0))
    assert trace.likely_overflow.tolist() == [math.inf] * 2


def test_a_count_that_no_machine_holds_is_damage_and_a_limit_bad_input(tmp_path, capsys):
    run(tmp_path / "a", *TINY_LM, "train.steps=2", "numerics=on", "numerics.every=2")
    path = tmp_path / "a" / "numerics" / "step-00000002.json"
    content = json.loads(path.read_text())
    kinds = content["learners"]["model"]["tensors"]
    next(iter(kinds["weight_gradients"].values()))["zeros"] = 10**39
    path.write_text(json.dumps(content))
    record = json.loads((tmp_path / "a" / "run.json").read_text())
    del record["seal"]
    (tmp_path / "a" / "run.json").write_text(json.dumps(record))
    capsys.readouterr()
    assert main(["scaler-replay", str(tmp_path / "a")]) == 4
    assert "not a probe record (OverflowError" in capsys.readouterr().err
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps({"step": 0, "limit": 10**400}))
    refused(capsys, "scaler-replay", trace, says="limit=1000")
