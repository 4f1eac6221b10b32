"""The copy that the device takes or leaves by itself is the copy that the host would have taken."""

import math

import pytest
import torch

from mprun.numerics.failure import FailureKeeper, Kept
from mprun.numerics.replay import Snapshot, Steps, size_of
from mprun.record import checkpoint
from mprun.recording.metric_buffer import LATE, MetricBuffer

from ..helpers import assert_same_bits
from ..shipped import OF_ANY_NETWORK
from .failing_runs import CPU, GAN, LM, set_weight

YES, NO = torch.tensor(True), torch.tensor(False)


def trained(built, steps):
    for index in range(*steps):
        built.task.train_step(index)


def taken(built, step=0):
    snapshot = Snapshot(built.task, CPU)
    snapshot.take(step, 0)
    return snapshot


@pytest.mark.slow
@pytest.mark.parametrize("model", [[*LM, "model.dropout=0.3"], GAN], ids=["lm", "gan"])
@pytest.mark.parametrize("mode", [mode for mode in OF_ANY_NETWORK if mode != "tf32"])
def test_taken_or_left(build_run, model, mode):
    built = build_run(*model, f"precision={mode}", "optim=adam", "optim.eps=1e-3")
    snapshot, before = taken(built), taken(built).content()

    trained(built, (0, 2))  # the language model now carries a state
    snapshot.take_if(NO, 2)
    snapshot.settle(False, 1)
    assert (snapshot.step, snapshot.skipped) == (0, 0)
    for part in ("task", "random"):
        assert_same_bits(snapshot.content()[part], before[part])
    after = taken(built).content()
    snapshot.take_if(YES, 2)
    trained(built, (2, 4))  # what the device has copied, later steps do not move
    snapshot.settle(True, 1)
    assert (snapshot.step, snapshot.skipped) == (2, 1)
    for part in ("task", "random"):
        assert_same_bits(snapshot.content()[part], after[part])

    later = {name: value.clone() for name, value in flat(built.task.state_dict()).items()}
    snapshot.restore()
    trained(built, (2, 4))
    assert_same_bits(flat(built.task.state_dict()), later)


def flat(state):
    leaves = torch.utils._pytree.tree_leaves_with_path(state)
    return {path: leaf for path, leaf in leaves if isinstance(leaf, torch.Tensor)}


def test_memory_is_used_again(build_run):
    built = build_run(*LM, "precision=fp16_master", "optim=sgd")
    trained(built, (0, 1))
    snapshot = taken(built, step=1)
    places = {path: leaf.data_ptr() for path, leaf in flat(snapshot.content()["task"]).items()}
    size = size_of(snapshot.content()["task"])
    for chosen in (True, False, True):
        trained(built, (1, 2))
        snapshot.take_if(torch.tensor(chosen), 2)
        snapshot.settle(chosen, 0)
        kept = flat(snapshot.content()["task"])
        assert {path: leaf.data_ptr() for path, leaf in kept.items()} == places
    assert size_of(snapshot.content()["task"]) == size


def test_nothing_is_settled_twice_or_without_a_copy(build_run):
    snapshot = taken(build_run(*LM, "precision=fp32"))
    snapshot.settle(True, 9)
    assert (snapshot.step, snapshot.skipped) == (0, 0)
    snapshot.take_if(YES, 3)
    snapshot.settle(True, 1)
    snapshot.settle(True, 2)
    assert (snapshot.step, snapshot.skipped) == (3, 1)


def test_a_replayed_step_tells_whether_its_update_was_skipped(build_run):
    words = ["precision=fp16_master_scaled", "scaler=static", "scaler.scale=16"]
    built = build_run(*LM, *words, "optim=sgd_plain")
    steps = Steps(built, 0, 0)
    row = steps.advance()
    assert row == (1, float(row.loss), 16, False, 0)
    assert {*map(type, row)} == {int, float, bool}
    set_weight(built, "output.bias", math.inf)
    row = steps.advance()
    assert (row.step, row.found_inf, row.skipped) == (2, True, 1)


def keeper_of(built):
    keeper = FailureKeeper(built)
    keeper.keep(0, 0)
    keeper._due = 0.0
    return keeper


@pytest.mark.parametrize(
    ("sound", "weight", "step"), [(True, 0.5, 4), (False, 0.5, 0), (True, math.inf, 0)]
)
def test_the_device_decides(build_run, sound, weight, step):
    built = build_run(*LM, "precision=fp16_master_scaled", "optim=sgd_plain")
    keeper = keeper_of(built)
    set_weight(built, "output.bias", weight)
    keeper.keep_if(4, torch.tensor(2), lambda: torch.tensor(sound))
    assert keeper.snapshot.step == 0  # the host has not been told yet
    keeper._settle()
    assert (keeper.snapshot.step, keeper.snapshot.skipped) == (step, 2 if step else 0)


def test_copies_are_taken_seldom(build_run):
    keeper, asked = keeper_of(build_run(*LM, "precision=fp32", "optim=sgd_plain")), []
    keeper._due = math.inf
    keeper.keep_if(1, torch.tensor(0), lambda: asked.append(1) or YES)
    assert asked == []  # too early
    keeper._due = 0.0
    keeper.keep_if(2, torch.tensor(0), lambda: asked.append(1) or YES)
    keeper.keep_if(3, torch.tensor(0), lambda: asked.append(1) or YES)
    assert asked == [1]


def test_a_new_copy_settles_the_one_before(build_run):
    built = build_run(*LM, "precision=fp32", "optim=sgd_plain")
    keeper = keeper_of(built)
    for step, sound in ((2, True), (4, False), (6, True), (8, False)):
        trained(built, (step, step + 1))
        keeper.keep_if(step, torch.tensor(0), lambda sound=sound: torch.tensor(sound))
        keeper._due = 0.0
    assert keeper.snapshot.step == 6
    keeper.keep(9, 0)
    assert keeper.snapshot.step == 9


def test_a_record_knows_which_step_the_copy_is_of(tmp_path, build_run, monkeypatch):
    """Steps 3 and 4 are trained after the copy; the replay starts from the copy all the same."""
    built = build_run(*LM, "precision=fp32", "optim=sgd_plain", "model.dropout=0.3")
    monkeypatch.setitem(LATE, "cpu", 1)  # as on a device
    keeper, trace, losses = keeper_of(built), MetricBuffer(CPU), {}
    for index in range(4):
        metrics = built.task.train_step(index)
        losses[index + 1] = metrics["loss"].item()
        trace.add(index + 1, metrics)
        if index == 1:
            trace.close(logged=False)
            keeper.keep_if(2, built.stepper.skipped, trace.sound)
    kept = keeper.record(tmp_path, Kept("loss", 4), losses)
    assert (kept.replayed_from, kept.replayed, kept.compared) == (2, 2, 2)
    assert kept.first_difference is None
    (tmp_path / "numerics").mkdir(exist_ok=True)
    assert checkpoint.load_newest(tmp_path / "numerics" / "failure", CPU).state["step"] == 3
    kept = keeper.record(tmp_path, Kept("loss", 4), {4: math.nan})
    assert (kept.compared, kept.first_difference) == (1, 4)
