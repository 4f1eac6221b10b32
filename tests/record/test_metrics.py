"""metrics.jsonl: floats come back bit for bit, non-finite values too, damage is told."""

import json
import math
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mprun.errors import Damaged
from mprun.record.metrics import MetricsFile, metrics_until, read_metrics


def write(path, records):
    file = MetricsFile(path)
    for record in records:
        file.write(record)
    file.close()


def bits(value: float) -> bytes:
    return struct.pack("d", value)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(allow_nan=False), min_size=1, max_size=5))
def test_floats_round_trip(tmp_path_factory, values):
    path = tmp_path_factory.mktemp("m") / "metrics.jsonl"
    write(path, [{"step": i, "loss": v} for i, v in enumerate(values)])
    assert [bits(r["loss"]) for r in read_metrics(path)] == [bits(v) for v in values]


def test_non_finite_values_are_strings_and_come_back(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [{"step": 1, "a": math.nan, "b": math.inf, "c": -math.inf, "split": "train"}])
    # Strict JSON: a reader that knows no NaN can read the file.
    plain = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(name))
    assert plain == {"step": 1, "a": "NaN", "b": "Infinity", "c": "-Infinity", "split": "train"}
    [record] = read_metrics(path)
    assert math.isnan(record["a"]) and (record["b"], record["c"]) == (math.inf, -math.inf)
    assert record["split"] == "train"


def test_a_torn_last_line_is_left_out_and_damage_elsewhere_raises(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [{"step": i, "loss": i / 7} for i in range(1, 6)])
    whole = path.read_bytes()
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    for cut in range(last + 1, len(whole) - 1):
        path.write_bytes(whole[:cut])
        assert [r["step"] for r in read_metrics(path)] == [1, 2, 3, 4]
    path.write_bytes(whole.replace(b'"step": 2', b'"step"; 2'))
    with pytest.raises(Damaged, match="line 2"):
        read_metrics(path)


def records_of(steps: int) -> list[dict]:
    losses = {i: math.nan if i == 2 else 1 / i for i in range(1, steps + 1)}
    common = {"split": "train", "updates": 0, "skipped": 0}
    return [common | {"step": step, "loss": loss} for step, loss in losses.items()]


def written(path, steps: int, at: int) -> dict:
    """Write the records of `steps`; what a checkpoint at step `at` would say of them."""
    file, found = MetricsFile(path), {}
    for record in records_of(steps):
        file.write(record)
        found[record["step"]] = file.so_far()
    file.close()
    return found[at]


def test_what_stays_are_the_bytes_of_the_first_records(tmp_path):
    path = tmp_path / "metrics.jsonl"
    so_far = written(path, 6, at=4)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines) + b'{"step": 7, "lo')  # killed in the middle of a line
    assert metrics_until(path, 4, so_far) == b"".join(lines[:4])
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda lines: lines[:2],
        lambda lines: [lines[0], *lines[2:]],
        lambda lines: [lines[1], lines[0], *lines[2:]],
        lambda lines: [lines[0], *lines],
        lambda lines: [lines[0].replace(b"1.0", b"1.5"), *lines[1:]],
    ],
)
def test_other_records_than_the_run_wrote_are_damage(tmp_path, damage):
    path = tmp_path / "metrics.jsonl"
    so_far = written(path, 4, at=4)
    path.write_bytes(b"".join(damage(path.read_bytes().splitlines(keepends=True))))
    before = path.read_bytes()
    with pytest.raises(Damaged, match="metrics.jsonl"):
        metrics_until(path, 4, so_far)
    assert path.read_bytes() == before
