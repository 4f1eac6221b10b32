"""A run saves the state before the bad step, bit for bit, and nothing else."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from mprun.errors import Damaged
from mprun.numerics import failure
from mprun.numerics.failure import FailureKeeper, Kept, suspect
from mprun.numerics.post_mortem import read_post_mortem
from mprun.numerics.state import all_finite, nonfinite
from mprun.record import checkpoint

from ..helpers import TINY_GPT, assert_same_bits, numbers_of, record_of
from ..shipped import OF_ANY_NETWORK
from .failing_runs import AUTOENCODER, CPU, GAN, LM, NAIVE_ADAM, run, set_weight, with_data

INPUTS = "blocks.0.mlp.inputs.weight"
BAD = 8  # the step whose batch is NaN, from 1; losses are looked at after steps 5 and 10


def nan_images(index, batch):
    return (batch[0] * float("nan") if index == BAD - 1 else batch[0]), batch[1]


def kept_state(directory):
    return checkpoint.load_newest(directory / "numerics" / "failure", CPU)[:2]


@pytest.mark.slow
@pytest.mark.parametrize("mode", [mode for mode in OF_ANY_NETWORK if mode != "tf32"])
@pytest.mark.parametrize("model", ["autoencoder", "gan"])
def test_the_kept_state_is_the_one_before_the_bad_step(tmp_path, model, mode):
    overrides = AUTOENCODER if model == "autoencoder" else GAN
    scaler = ["scaler=none"] if mode in ("fp16_master_scaled", "amp") else []
    arguments = [*overrides, f"precision={mode}", *scaler, "optim=sgd", "train.log_every=5"]
    directory, code = run(tmp_path, *arguments, plant=with_data(nan_images), steps=20)
    assert code == 3
    kept = read_post_mortem(directory)["failure"]
    assert (kept["kind"], kept["step"]) == ("loss", BAD)
    # From the copy at the start, or, where five steps took a second, from that after step 5.
    assert kept["replayed_from"] in (0, 5)
    assert kept["replayed"] == kept["compared"] == BAD - kept["replayed_from"]
    assert kept["first_difference"] is None
    step, state = kept_state(directory)
    assert (step, state["step"], state["kind"]) == (BAD - 1, BAD - 1, "loss")
    [(images, _)] = state["batch"]
    assert images.isnan().all()

    # Independent: the same run without the bad batch, stopped before it, saves a checkpoint.
    saving = f"train.checkpoint_every={BAD - 1}"
    other, _ = run(tmp_path / "other", *arguments, saving, steps=BAD - 1)
    expected = checkpoint.load_newest(other / "checkpoints", CPU).state
    assert_same_bits(state["task"], expected["task"])
    for generator in ("python", "torch"):
        assert_same_bits(state["random"][generator], expected["random"][generator])


@pytest.mark.slow
def test_dropout_and_carried_state_come_back(tmp_path):
    # The loss explodes after some 20 steps; each drew random numbers and carried a state.
    arguments = [*LM, "model.dropout=0.3", "precision=fp16_master", "optim=sgd_plain"]
    directory, code = run(tmp_path, *arguments, "optim.lr=0.2", "optim.weight_decay=15", steps=60)
    assert code == 3
    kept = read_post_mortem(directory)["failure"]
    assert kept["first_difference"] is None and kept["compared"] >= 5
    _, state = kept_state(directory)
    assert state["task"]["hidden"] is not None


def test_keeping_changes_no_number_of_the_run(tmp_path):
    found = []
    for keep in ("true", "false"):
        arguments = [*LM, "model.dropout=0.3", "precision=amp", "train.checkpoint_every=12"]
        arguments += ["optim=sgd", f"numerics.keep_failure={keep}", "train.log_every=3"]
        directory, _ = run(tmp_path / keep, *arguments, steps=12)
        state = checkpoint.load_newest(directory / "checkpoints", CPU).state
        found.append([numbers_of(directory), state["task"]])
    assert_same_bits(*found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "plant"),
    [
        ([*AUTOENCODER, "precision=fp16_master", "optim=sgd"], with_data(nan_images)),
        ([*TINY_GPT, "precision=fp8_tensorwise"], partial(set_weight, name=INPUTS, value=2.0**127)),
    ],
    ids=["fp16", "fp8"],
)
def test_what_is_trained_again_is_not_counted(arguments, plant, tmp_path):
    found = []
    for keep in ("true", "false"):
        more = ["train.log_every=5", f"numerics.keep_failure={keep}"]
        directory, code = run(tmp_path / keep, *arguments, *more, plant=plant, steps=20)
        assert code == 3
        found.append(record_of(directory)["emulated"])
    assert found[0] and found[0] == found[1]


def test_a_state_that_is_too_large_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(failure, "LARGEST_STATE", 2**10)
    directory, code = run(tmp_path, *NAIVE_ADAM)
    assert code == 3 and not (directory / "numerics" / "failure").exists()
    assert "MiB" in read_post_mortem(directory)["failure"]["reason"]


def test_only_a_state_above_1_gib_is_too_large(build_run, monkeypatch):
    built = build_run(*LM, "precision=fp32")
    told = "a copy of the state takes 1536 MiB, more than is spared"
    for size, reason in ((2**30, None), (3 * 2**29, told)):
        monkeypatch.setattr(failure, "size_of", lambda _, size=size: size)
        assert FailureKeeper(built).reason == reason


def test_a_failing_disk_leaves_the_run_diverged(tmp_path):
    in_the_way = tmp_path / "run" / "numerics" / "failure"  # where the kept state belongs
    in_the_way.parent.mkdir(parents=True)
    in_the_way.touch()
    directory, code = run(tmp_path, *NAIVE_ADAM)
    assert code == 3 and record_of(directory)["status"] == "diverged"
    assert "FileExistsError" in read_post_mortem(directory)["failure"]["reason"]


def test_copies_are_taken_seldom_and_never_within_a_row_of_skips(tmp_path, build_run):
    built = build_run(*LM, "precision=fp16_master_scaled", "optim=sgd_plain", "numerics=off")
    keeper = FailureKeeper(built)
    for began, took, pause in ((8.0, 2.0**-8, 1.0), (64.0, 2.0**-6, 200 * 2.0**-6)):
        clock = iter([began, began + took])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(failure, "time", SimpleNamespace(perf_counter=clock.__next__))
            keeper.keep(0, 0)
        assert keeper._due == began + pause
    assert keeper.snapshot.step == 0 and keeper.bytes > 1000
    keeper._due = float("inf")
    keeper.keep(10, 0)
    assert keeper.snapshot.step == 0
    keeper._due = 0.0
    keeper.keep(20, 3, healthy=False)
    assert keeper.snapshot.step == 0
    keeper.keep(30, 3)
    assert (keeper.snapshot.step, keeper.snapshot.skipped) == (30, 3)
    keeper._due = 0.0
    set_weight(built, "output.bias", float("inf"))
    keeper.keep(40, 3)
    assert keeper.snapshot.step == 30


def test_a_copy_younger_than_the_failure_is_of_no_use(tmp_path, build_run):
    keeper = FailureKeeper(build_run(*LM, "precision=fp32", "optim=sgd_plain"))
    keeper.keep(7, 0)
    kept = keeper.record(tmp_path, Kept("loss", 7), {})
    assert kept.folder is None and "younger" in kept.reason


COLLAPSED = "loss_scale collapsed: {} skipped updates in a row at its floor"
AT_THE_FLOOR = [(3, 4, 0), (4, 4, 1), (5, 2, 1), (6, 1, 1), (7, 1, 1), (8, 1, 1)]


@pytest.mark.parametrize(
    ("cause", "last", "rows", "expected"),
    [
        ("non-finite loss", 12, [], Kept("loss", 12)),
        ("non-finite evaluation loss", 20, [], Kept("evaluation", 20)),
        # Skips from step 4 on, at the floor of 1 from step 6 on.
        (COLLAPSED.format(5), 8, AT_THE_FLOOR, Kept("collapse", 6)),
        # A static scale is its own floor; an earlier skip is no part of the row.
        (COLLAPSED.format(2), 8, [(5, 8, 1), (6, 8, 0), (7, 8, 1), (8, 8, 1)], Kept("collapse", 7)),
        # Steps without a record are steps without a skip.
        (COLLAPSED.format(2), 40, [(20, 8, 1), (39, 8, 1), (40, 8, 1)], Kept("collapse", 39)),
    ],
)
def test_the_step_to_replay(cause, last, rows, expected):
    rows = [
        {"step": step, "loss_scale": float(scale), "found_inf": bool(inf)}
        for step, scale, inf in rows
    ]
    assert suspect(cause, last, rows) == expected


def test_a_new_attempt_forgets_the_failure_of_the_last(tmp_path):
    directory, _ = run(tmp_path, *NAIVE_ADAM)
    failure.forget_failure(directory)
    assert list((directory / "numerics").iterdir()) == []
    failure.forget_failure(directory)  # nothing there is nothing to do


@pytest.mark.slow
def test_a_damaged_state_is_told(tmp_path):
    verb = pytest.importorskip("mprun.extensions.diagnosis.commands.explain")
    directory, _ = run(tmp_path, *NAIVE_ADAM)
    path = directory / "numerics" / "failure" / "step-00000000" / "state.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(Damaged, match="does not match its manifest"):
        verb.explain(directory)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_finite_or_not(dtype):
    def finite(*tensors):
        return bool(all_finite(tensors))

    large = torch.full((3000,), torch.finfo(dtype).max, dtype=dtype)  # its sum is not finite
    assert finite(large, torch.zeros(0), torch.arange(3)) and finite(large, torch.ones(2))
    for bad in (float("nan"), float("inf"), float("-inf")):
        spoilt = torch.ones(4000, dtype=dtype)
        spoilt[1234] = bad
        assert not finite(large, spoilt) and not finite(spoilt)
        assert not finite(torch.zeros(3), torch.cat([spoilt, -spoilt]))  # inf - inf in a sum
    named = {"a": torch.tensor([1.0, float("inf")]), "b": torch.ones(2), "c": torch.arange(2)}
    assert nonfinite(named) == {"a": "1 of 2 values are infinite"}
