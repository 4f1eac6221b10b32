"""msgspec takes from a metrics.jsonl exactly what json takes; damage is told."""

import dataclasses
import json
import math
from collections import Counter
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mprun.assembly import build
from mprun.config.compose import compose_config
from mprun.errors import Damaged
from mprun.record import metrics_columns
from mprun.record.metrics import read_metrics
from mprun.record.metrics_columns import _columns, _parsed, complete_lines, read_columns
from mprun.training.loop import Loop
from mprun.training.signals import Interruption

from ..helpers import TINY_LM, raises_line
from .test_metrics import write


def head(split, step, skipped):
    counts = {"updates": step - skipped, "skipped": skipped, "epoch": step / 8}
    return {"split": split, "step": step} | counts


def train(step, skipped=0, loss=1.0, scale=1.0, **extra):
    return head("train", step, skipped) | {"loss": loss, "loss_scale": scale, "lr": 0.1} | extra


def evaluation(step, skipped=0, **metrics):
    return head("eval", step, skipped) | metrics | {"seconds": 0.25}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def assert_equal(a, b):
    for field in dataclasses.fields(a):
        one, other = getattr(a, field.name), getattr(b, field.name)
        if isinstance(one, dict):
            assert list(one) == list(other), field.name
            for key in one:
                np.testing.assert_array_equal(one[key], other[key], err_msg=key, strict=True)
        else:
            np.testing.assert_array_equal(one, other, err_msg=field.name)


def parsed(path):
    """By json, line by line: the reference."""
    lines = enumerate(complete_lines(path.read_bytes()), start=1)
    return _columns(path, [_parsed(path, number, line) for number, line in lines])


def decoded(path):
    """Training records by msgspec alone."""

    def of_others(path, number, line):
        assert b"train" not in line
        return _parsed(path, number, line)

    with mock.patch.object(metrics_columns, "_parsed", of_others):
        return read_columns(path)


numbers = st.one_of(st.floats(), st.integers(-(10**9), 10**9))
scales = st.one_of(st.sampled_from([1.0, 2.0**16, 2.0**-14, 1.1754943508222875e-38, 128]), numbers)
EXTRAS = ("grad_norm", "samples_per_s", "d_loss", "g_loss_scale", "a_scale", "NaNs")


@st.composite
def files(draw):
    """Records as a trainer may write them, over several digit lengths of the step."""
    records, step = [], draw(st.sampled_from([0, 7, 95, 99_990, 9_999_990]))
    skipped = draw(st.sampled_from([0, 0, 8, 999]))
    has_scale, constant = draw(st.booleans()), draw(st.booleans())
    step, scale = max(step, skipped), draw(scales)
    for _ in range(draw(st.integers(0, 15))):
        step += draw(st.sampled_from([1, 1, 1, 2, 9]))
        skipped += draw(st.sampled_from([0, 0, 1]))
        scale = scale if constant else draw(scales)
        extra = draw(st.dictionaries(st.sampled_from(EXTRAS), st.one_of(numbers, st.none())))
        record = train(step, skipped, draw(numbers), scale, **extra)
        if not has_scale:
            del record["loss_scale"]
        if draw(st.sampled_from([True, True, True, False])):
            records.append(record)
        if draw(st.sampled_from([True, False, False])):
            names = st.sampled_from(["loss", "top1", "loss_scale"])
            records.append(evaluation(step, skipped, **draw(st.dictionaries(names, numbers))))
    return records


@settings(max_examples=15, deadline=None)
@given(records=files(), tail=st.sampled_from(["", "torn", "no newline"]))
def test_msgspec_takes_what_json_takes(tmp_path_factory, records, tail):
    path = tmp_path_factory.mktemp("m") / "metrics.jsonl"
    write(path, records)
    whole = path.read_bytes()
    if tail == "torn":
        path.write_bytes(whole + b'{"split": "train", "step": 99')
    elif tail == "no newline":
        path.write_bytes(whole[:-1])
    assert_equal(decoded(path), parsed(path))


@settings(max_examples=30, deadline=None)
@given(records=files(), order=st.permutations(list(train(1))), where=st.integers(0, 14))
@pytest.mark.slow
def test_another_order_of_the_keys_is_read_all_the_same(tmp_path_factory, records, order, where):
    assume(len(records) > where)
    path = tmp_path_factory.mktemp("m") / "metrics.jsonl"
    moved = {key: records[where][key] for key in order if key in records[where]}
    records[where] = moved | records[where]
    write(path, records)
    assert_equal(read_columns(path), parsed(path))


def test_a_record_without_its_split_is_damage(path):
    write(path, [train(1), train(2)])
    path.write_bytes(path.read_bytes().replace(b'"split"', b'" plit"', 1))
    with raises_line(Damaged, "line 1 is not a record of a run"):
        read_columns(path)


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(records=files(), at=st.integers(0), byte=st.integers(0, 255))
def test_a_changed_byte_is_told_or_read_as_json_reads_it(tmp_path_factory, records, at, byte):
    assume(records)
    path = tmp_path_factory.mktemp("m") / "metrics.jsonl"
    write(path, records)
    data = bytearray(path.read_bytes())
    data[at % len(data)] = byte
    path.write_bytes(data)
    try:
        expected = parsed(path)
    except Damaged as damage:
        with pytest.raises(Damaged) as told:
            read_columns(path)
        assert str(told.value) == str(damage)
    else:
        assert_equal(read_columns(path), expected)


def test_what_the_columns_hold(path):
    records = [train(s, loss=10.0 - s, grad_norm=s / 2) for s in range(1, 21)]
    # Updates 31, 32, 33 and 40 are skipped; 32 has a loss that is not finite.
    records += [train(30, 0, 2.0, 65536.0), train(31, 1, 2.0, 65536.0)]
    records += [train(32, 2, math.inf, 32768.0), train(33, 3, 2.0, 16384.0)]
    records += [train(40, 4, 2.0, 8192.0), train(50, 4, 1.5, 131072.0)]
    records.append(train(60, 4, 1.25, 131072.0))
    records.insert(22, evaluation(30, loss=3.0, top1=50.0))
    records.append(evaluation(60, 4, loss=2.0, top1=75.0))
    write(path, records)
    columns = read_columns(path)
    assert columns.last_step == 60 and columns.skipped == 4
    assert columns.first_losses.tolist() == [10.0 - s for s in range(1, 21)]
    assert columns.last_losses.tolist() == [2.0, 1.5, 1.25]  # ceil(27 / 10) records
    assert columns.last_steps.tolist() == [40, 50, 60]
    assert columns.last_skips.tolist() == [True, False, False]
    assert columns.skip_steps.tolist() == [31, 32, 33, 40]
    assert columns.longest_skip_streak == 3
    assert columns.scale_range == (1.0, 131072.0)
    assert columns.nonfinite_step is None  # step 32 was skipped
    evals = {"step": [30, 60], "updates": [30, 56], "loss": [3.0, 2.0], "top1": [50.0, 75.0]}
    assert {k: v.tolist() for k, v in columns.evals.items()} == evals
    assert list(columns.train) == ["step", "updates", "skipped", "loss", "loss_scale"]
    trained = [record for record in records if record["split"] == "train"]
    for name, column in columns.train.items():
        assert column.dtype == np.float64
        assert column.tolist() == [record[name] for record in trained]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_non_finite_loss_counts_only_where_the_update_was_applied(path, value):
    records = [train(1), train(2, 1, value), train(3, 1), train(4, 1, value), train(5, 1, value)]
    write(path, records)
    assert read_columns(path).nonfinite_step == 4


def test_first_losses_end_where_a_step_is_missing(path):
    write(path, [train(s, loss=s) for s in (1, 2, 3, 5, 6)])
    assert read_columns(path).first_losses.tolist() == [1.0, 2.0, 3.0]
    write(late := path.with_name("late.jsonl"), [train(s) for s in (10, 20)])
    assert read_columns(late).first_losses.tolist() == []


def test_no_records_and_evaluations_alone(path):
    path.write_bytes(b"")
    empty = read_columns(path)
    assert empty.scale_range is None and empty.last_losses.size == 0
    assert empty.evals["step"].size == 0 and empty.train["step"].size == 0
    path.write_bytes(b'{"split": "tr')  # killed in its first line
    assert_equal(read_columns(path), empty)
    write(evals := path.with_name("e.jsonl"), [evaluation(5, loss=1.0), evaluation(10, loss=0.5)])
    columns = read_columns(evals)
    assert columns.evals["loss"].tolist() == [1.0, 0.5] and columns.last_step == 10


@pytest.mark.slow
def test_many_records_are_thinned_for_drawing_and_nothing_else(path):
    skips = [s // 2 for s in range(1, 12_001)]  # every second update
    write(path, [train(s, k, loss=s, scale=2.0 ** (s % 7)) for s, k in enumerate(skips, 1)])
    columns = read_columns(path)
    assert_equal(columns, parsed(path))
    steps = columns.train["step"]
    assert len(steps) == 500 and (steps[0], steps[-1]) == (1, 12_000)
    assert columns.train["loss"].tolist() == steps.tolist()
    # Evenly: 11,999 / 499 = 24.05 apart, rounded.
    assert set(np.diff(steps)) <= {24.0, 25.0}
    assert len(columns.skip_steps) == 2000 and columns.skipped == 6000
    assert columns.longest_skip_streak == 1 and columns.scale_range == (1.0, 64.0)
    assert columns.last_losses.tolist() == list(range(10_801, 12_001))


def test_each_line_is_decoded_once(path, monkeypatch):
    records = [train(s, loss=s) for s in range(1, 1201)]
    records.insert(600, evaluation(600, loss=1.0))
    write(path, [*records, evaluation(1200, loss=0.5)])
    expected, decoded = read_columns(path), Counter()

    class Counting:
        def __init__(self, decode):
            self.plain = decode

        def decode(self, line, **how):
            decoded[bytes(line)] += 1
            return self.plain(line, **how)

    monkeypatch.setattr(metrics_columns, "_decoder", Counting(metrics_columns._decoder.decode))
    monkeypatch.setattr(metrics_columns.json, "loads", Counting(json.loads).decode)
    assert_equal(read_columns(path), expected)
    assert decoded.pop(b"") == 1  # what follows the last line
    assert decoded == Counter(path.read_bytes().splitlines())


def test_damage_is_told_with_the_line(path):
    records = [train(s) for s in range(1, 6)] + [evaluation(5, loss=1.0), train(6)]
    write(path, records)
    whole = path.read_bytes()
    for old, new, line in (
        (b'"step": 2', b'"step"; 2', 2),
        (b'"step": 3', b'"step": -3', 3),
        (b'"step": 3', b'"step": 1', 3),
        (b'"step": 3', b'"step": 3.5', 3),
        (b'"skipped": 0, "epoch": 0.5', b'"skipped": null, "epoch": 0.5', 4),
        (b'"loss": 1.0, "loss_scale": 1.0, "lr": 0.1}\n{"split": "eval"', b'\n{"split": "eval"', 5),
        (b'{"split": "eval", "step": 5', b'{"split": "eval", "stop": 5', 6),
        (b'"loss": 1.0, "seconds"', b'"loss": 1.0, seconds', 6),
        (b'{"split": "train", "step": 1,', b'[{"split": "train", "step": 1,', 1),
        (b'{"split": "train", "step": 1,', b"[" * 100_000, 1),
    ):
        assert whole.count(old) >= 1
        path.write_bytes(whole.replace(old, new, 1))
        with pytest.raises(Damaged, match=f"{path}: line {line}\\b"):
            read_columns(path)
    path.write_bytes(whole.replace(b'"loss": 1.0, "loss_scale"', b'"loss": null, "loss_scale"'))
    with pytest.raises(Damaged, match="line 1: loss: Expected"):
        read_columns(path)


def test_a_file_from_elsewhere_is_parsed(path):
    """Blank lines, other spaces, other splits and CRLF line ends mean the same to json."""
    other = path.with_name("other.jsonl")
    records = [train(s, loss=s / 3) for s in range(1, 30)] + [evaluation(29, loss=2.0)]
    write(path, records)
    lines = [json.dumps(record, separators=(",", ":")) for record in records]
    lines.insert(7, '{"split":"test","loss":0}')
    other.write_bytes("\r\n\n".join([*lines, ""]).encode())
    with pytest.raises(AssertionError):
        decoded(other)
    assert_equal(read_columns(path), read_columns(other))


@pytest.mark.parametrize("key", ['x"loss', 'x"loss_scale'])
def test_a_key_that_ends_like_another_is_not_taken_for_it(path, key):
    write(path, [{**train(1), key: math.inf}, {**train(2), key: math.inf}])
    columns = read_columns(path)
    assert columns.nonfinite_step is None and columns.scale_range == (1.0, 1.0)
    assert columns.train["loss"].tolist() == columns.train["loss_scale"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_bare_non_finite_values_are_read_like_the_strings(path, value):
    """JSON does not have them, but json writes and reads them unless it is told otherwise."""
    other = path.with_name("bare.jsonl")
    records = [train(1), train(2, loss=float(value), grad_norm=float(value)), train(3)]
    write(path, [*records, evaluation(3, loss=float(value))])
    other.write_text(path.read_text().replace(f'"{value}"', value))
    assert_equal(read_columns(other), read_columns(path))
    assert read_columns(other).nonfinite_step == 2


def test_what_the_trainer_writes_is_read_by_msgspec(tmp_path):
    """json would take ten times as long."""
    overrides = [*TINY_LM, "precision=amp", "scaler.init_scale=16777216", "train.steps=25"]
    overrides.append("train.eval_every=15")
    config = compose_config(overrides).config
    Loop(build(config, torch.device("cpu")), config, tmp_path, Interruption()).train()
    columns = decoded(tmp_path / "metrics.jsonl")
    assert_equal(columns, parsed(tmp_path / "metrics.jsonl"))
    assert columns.evals["step"].tolist() == [15, 25] and columns.last_step == 25
    assert len(columns.first_losses) == 20 and columns.scale_range[1] == 2.0**24


@pytest.mark.parametrize("key", ["loss", "loss_scale", "top1"])
def test_a_number_that_no_float_holds_is_damage(path, key):
    split = "eval" if key == "top1" else "train"
    record = {"split": split, "step": 1, "updates": 1, "skipped": 0, "loss": 1.0, key: 10**400}
    path.write_text(json.dumps(record) + "\n")
    for read in (read_columns, read_metrics):
        with pytest.raises(Damaged, match="line 1: a number is too large for a float"):
            read(path)
