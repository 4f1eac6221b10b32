"""Metrics that are read an interval later say what they say when they are read at once.

On a CPU, where nothing has to be late: `LATE` makes the same code read as it does on a GPU.
"""

import json
import math
from types import SimpleNamespace

import pytest
import torch

from mprun.numerics import failure
from mprun.numerics.post_mortem import read_post_mortem
from mprun.precision import DynamicLossScale, NoLossScale, StaticLossScale
from mprun.record import async_copy, checkpoint
from mprun.record.async_copy import PinnedRing
from mprun.recording import metric_buffer as trace_module
from mprun.recording.metric_buffer import MetricBuffer

from ..helpers import record_of, rows_of
from ..numerics.failing_runs import AUTOENCODER, CPU, GAN, LM, run, with_data

TIMES = ("samples_per_s", "seconds", "data_wait")


@pytest.fixture
def late(monkeypatch):
    monkeypatch.setitem(trace_module.LATE, "cpu", 1)


def metrics(loss, scale=1.0, found_inf=None, **more):
    values = {"loss": loss, "loss_scale": scale, **more}
    if found_inf is not None:
        values["found_inf"] = found_inf
    return {name: torch.tensor(float(value)) for name, value in values.items()}


def fill(trace, steps, logged=None, **more):
    """Add steps; logged: of the interval that they end."""
    for step in steps:
        trace.add(step, metrics(step / 4, **more))
    if logged is not None:
        trace.close(logged=logged)


# The ring


def test_slots_are_used_in_turn_and_again():
    ring = PinnedRing(CPU, 2)
    first, second = ring.send(torch.tensor([1.0, 2.0])), ring.send(torch.tensor([3.0, 4.0]))
    assert first.values.data_ptr() != second.values.data_ptr()
    assert first.read() == [1.0, 2.0]
    third = ring.send(torch.tensor([5.0]))
    assert third.values.data_ptr() == first.values.data_ptr()
    assert (second.read(), third.read()) == ([3.0, 4.0], [5.0])
    assert first.values.tolist() == [5.0, 2.0]  # overwritten: it had to be read before


def test_a_slot_grows_and_what_is_unread_stays():
    ring = PinnedRing(CPU, 1)
    small = ring.send(torch.arange(3.0))
    large = ring.send(torch.arange(500.0))
    assert small.read() == [0.0, 1.0, 2.0] and large.read()[-1] == 499.0
    again = ring.send(torch.arange(2.0))
    assert again.values.data_ptr() == large.values.data_ptr()
    assert len(ring.buffers[0]) == 500


def test_what_is_sent_is_a_copy():
    values = torch.ones(2)
    sent = PinnedRing(CPU, 1).send(values)
    values.zero_()
    assert sent.read() == [1.0, 1.0]


# The trace


def test_an_interval_is_read_when_the_next_one_ends(late):
    trace = MetricBuffer(CPU)
    fill(trace, [1, 2], logged=False)
    assert list(trace.read()) == []
    fill(trace, [3], logged=True)
    [first] = trace.read()
    assert [(row.step, row.loss) for row in first.rows] == [(1, 0.25), (2, 0.5)]
    assert not first.logged and first.metrics["loss"] == 0.5
    assert list(trace.read()) == []
    fill(trace, [4], logged=False)
    rest = list(trace.read(wait=True))
    assert [[row.step for row in interval.rows] for interval in rest] == [[3], [4]]
    assert [interval.logged for interval in rest] == [True, False]
    assert list(trace.read(wait=True)) == []


def test_at_once_where_the_numbers_are_on_the_host():
    trace = MetricBuffer(CPU)
    fill(trace, [1], logged=True)
    [interval] = trace.read()
    assert interval.rows[0].loss == 0.25 and interval.waited is None
    trace.close(logged=True)  # no step since: no interval
    assert list(trace.read(wait=True)) == []


@pytest.mark.parametrize("depth", [0, 1])
def test_intervals_of_many_lengths_keep_their_numbers(monkeypatch, depth):
    monkeypatch.setitem(trace_module.LATE, "cpu", depth)
    trace, found, step = MetricBuffer(CPU), [], 0
    for length in (1, 1, 7, 300, 2, 40):
        fill(trace, range(step + 1, step + length + 1), logged=True, scale=8.0, found_inf=0)
        step += length
        found += trace.read()
    found += trace.read(wait=True)
    assert [len(interval.rows) for interval in found] == [1, 1, 7, 300, 2, 40]
    rows = [row for interval in found for row in interval.rows]
    assert [row.step for row in rows] == list(range(1, step + 1))
    assert [row.loss for row in rows] == [number / 4 for number in range(1, step + 1)]
    assert {row.loss_scale for row in rows} == {8.0}
    assert all(interval.metrics["loss"] == interval.rows[-1].loss for interval in found)


def test_metrics_may_be_overwritten_by_the_next_step(late):
    """A captured step writes to the same tensors each time."""
    trace, scaled, static = MetricBuffer(CPU), MetricBuffer(CPU), metrics(0.0, grad_norm=0.0)
    flagged = static | {"found_inf": torch.zeros(())}
    for step in (1, 2, 3):
        static["loss"].fill_(step)
        static["grad_norm"].fill_(10 * step)
        flagged["found_inf"].fill_(step == 2)
        trace.add(step, static)
        scaled.add(step, flagged)
        if step == 2:
            trace.close(logged=True)
            scaled.close(logged=True)
    for one in (trace, scaled):
        one.close(logged=True)
        first, second = one.read(wait=True)
        assert [row.loss for row in first.rows] == [1.0, 2.0]
        assert first.metrics["grad_norm"] == 20.0 and second.metrics["grad_norm"] == 30.0
    assert [row.found_inf for row in first.rows] == [False, True]


def test_skips_are_counted_on_both_sides(late):
    trace = MetricBuffer(CPU, skipped=5)
    for step, found_inf in enumerate([1, 0, 1, 1], start=1):
        trace.add(step, metrics(1.0, 2.0, found_inf))
        if step % 2 == 0:
            trace.close(logged=True)
    assert trace.host_skipped == 5
    [first] = trace.read()
    assert trace.host_skipped == 6
    [second] = trace.read(wait=True)
    assert [row.skipped for row in first.rows + second.rows] == [6, 6, 7, 8]
    assert trace.host_skipped == 8


def test_a_collapse_belongs_to_its_interval(late):
    scales = {"none": NoLossScale(), "a": StaticLossScale(2.0, 3), "b": DynamicLossScale()}
    trace = MetricBuffer(CPU, loss_scales=scales)
    for step in (1, 2, 3, 4, 5, 6):
        scales["a"].found_inf.fill_(step <= 4)
        for scale in scales.values():
            scale.update()
        trace.add(step, metrics(1.0, 2.0, float(step <= 4)))
        if step in (2, 4, 6):
            trace.close(logged=False)
    assert [interval.collapsed for interval in trace.read(wait=True)] == [None, ("a", 4), None]


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("losses", "flags", "sound"),
    [
        ([1, 2], [0, 0], True),
        ([NAN, 2], [1, 0], True),  # its update was skipped
        ([NAN, 2], [0, 0], False),
        ([1, INF], [0, 0], False),
        ([1, 2], [0, 1], False),  # the last step had no update
        ([1, 2], None, True),
        ([NAN, 2], None, False),
    ],
)
def test_what_the_device_calls_sound(losses, flags, sound, late):
    trace = MetricBuffer(CPU)
    for step, loss in enumerate(losses):
        trace.add(step + 1, metrics(loss, 1.0, None if flags is None else flags[step]))
    trace.close(logged=False)
    assert bool(trace.sound()) is sound


def test_a_collapse_is_not_sound(late):
    scale = StaticLossScale(2.0, 1)
    trace = MetricBuffer(CPU, loss_scales={"loss_scale": scale})
    for found_inf in (0, 1):
        scale.found_inf.fill_(found_inf)
        scale.update()
        trace.add(1, metrics(1.0, 2.0, 0))
        trace.close(logged=False)
        assert bool(trace.sound()) is not bool(found_inf)


def test_time_and_waiting_belong_to_their_interval(late):
    waits = iter([99.0, 0.5, 0.25])

    def defer_wait():
        waited = next(waits)
        return lambda: waited

    trace = MetricBuffer(CPU, defer_wait=defer_wait)  # takes, and drops, what was waited before
    for step in (1, 2):
        fill(trace, [step], logged=True)
    first, second = trace.read(wait=True)
    assert (first.waited, second.waited) == (0.5, 0.25)
    assert first.seconds > 0 and second.seconds > 0


# The loop


def test_throughput_is_of_training_alone(tmp_path, monkeypatch):
    """On a clock of its own: a batch takes a second, an evaluation and a checkpoint an hour."""
    clock, save = [0.0], checkpoint.save
    monkeypatch.setattr(async_copy, "time", SimpleNamespace(perf_counter=lambda: clock[0]))

    def taking(seconds, done):
        clock[0] += seconds
        return done

    def plant(built):
        with_data(lambda _, batch: taking(1, batch))(built)
        evaluate = built.task.evaluate
        built.task.evaluate = lambda: taking(3600, evaluate())

    monkeypatch.setattr(checkpoint, "save", lambda *a, **k: taking(3600, save(*a, **k)))
    settings = ["train.log_every=1", "train.checkpoint_every=2", "train.eval_every=3"]
    directory, code = run(tmp_path, *AUTOENCODER, *settings, plant=plant, steps=6)
    record = record_of(directory)
    assert code == 0 and record["throughput"]["samples_per_s"] == record["samples_per_step"]
    speeds = [row["samples_per_s"] for row in rows_of(directory, "train")]
    assert speeds == [record["samples_per_step"]] * 6


def nan_at(bad):
    def change(index, batch):
        return (batch[0] * float("nan") if index == bad - 1 else batch[0]), batch[1]

    return with_data(change)


SETTINGS = {
    "skips": ([*LM, "model.dropout=0.3", "precision=amp", "scaler.init_scale=16777216"], None),
    "gan": ([*GAN, "precision=fp16_master_scaled", "scaler.init_scale=16777216"], None),
    "no scale": ([*AUTOENCODER, "precision=bf16_master", "optim=sgd"], None),
    "diverges": ([*AUTOENCODER, "precision=fp32", "optim=sgd"], nan_at(8)),
    "diverges at the end": ([*AUTOENCODER, "precision=amp", "scaler=none"], nan_at(21)),
    "collapses": (
        [*AUTOENCODER, "precision=fp16_master_scaled", "scaler.min_scale=65536"]
        + ["scaler.max_consecutive_skips=2", "scaler.init_scale=65536"],
        with_data(lambda i, batch: (batch[0] * (1e6 if i >= 6 else 1), batch[1])),
    ),
}
CASES = [(5, name) for name in SETTINGS]
CASES += [(1, "diverges"), (1, "collapses")]
CASES += [pytest.param(1, name, marks=pytest.mark.slow) for name in ("skips", "gan", "no scale")]


@pytest.mark.slow
@pytest.mark.parametrize(("every", "name"), CASES)
def test_a_run_is_recorded_alike(tmp_path, monkeypatch, name, every):
    overrides, plant = SETTINGS[name]
    monkeypatch.setattr(failure, "SHORTEST_PAUSE_S", 0.0)
    monkeypatch.setattr(failure, "PAUSE_FACTOR", 0.0)
    intervals = [f"train.log_every={every}", "train.eval_every=12", "train.checkpoint_every=9"]
    found = []
    for depth in (0, 1):
        monkeypatch.setitem(trace_module.LATE, "cpu", depth)
        folder = tmp_path / str(depth)
        folder.mkdir()
        directory, code = run(folder, *overrides, *intervals, plant=plant, steps=22)
        lines = (directory / "metrics.jsonl").read_text().splitlines()
        rows = [list(json.loads(line).items()) for line in lines]
        rows = [[(key, v if key not in TIMES else 0) for key, v in row] for row in rows]
        record = record_of(directory)
        ended = {key: record[key] for key in ("status", "cause", "last_step", "skipped", "final")}
        saved = sorted(path.name for path in (directory / "checkpoints").glob("*"))
        kept = read_post_mortem(directory) or {}
        kept = {key: kept["failure"][key] for key in ("kind", "step", "folder")} if kept else {}
        found.append((code, rows, ended, saved, kept, record["throughput"]["windows"]))
    assert found[0] == found[1]
    code, rows, ended, saved, kept, _ = found[0]
    assert (code == 3) == ("diverges" in name or "collapses" in name)
    assert kept == {} or kept["folder"] is not None
    if name == "diverges":
        assert ended["last_step"] == 8 and dict(rows[-1])["step"] == 8 and saved == []


def test_an_evaluation_sees_nothing_unread(tmp_path, monkeypatch, late):
    unread, traces, make = [], [], MetricBuffer.__init__

    def remember(self, *arguments, **keywords):
        make(self, *arguments, **keywords)
        traces.append(self)

    def plant(built):
        own = built.task.evaluate

        def evaluate():
            [trace] = traces
            unread.append(len(trace.unread) + len(trace.rows))
            return own()

        built.task.evaluate = evaluate
        monkeypatch.setattr(MetricBuffer, "__init__", remember)

    run(tmp_path, *LM, "train.log_every=2", "train.eval_every=3", plant=plant, steps=7)
    assert unread == [0, 0, 0]
