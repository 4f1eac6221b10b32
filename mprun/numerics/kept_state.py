"""The state before the bad step of a run: as the run kept it, or found by training again."""

from pathlib import Path

import torch

from mprun.errors import BadInput, Damaged
from mprun.numerics.failure import FailureKeeper, failure_folder, report_failure
from mprun.numerics.post_mortem import LAST, read_post_mortem
from mprun.numerics.replay import all_finite, weights
from mprun.precision.random_states import restore_random_states
from mprun.record import checkpoint
from mprun.record.metrics import read_metrics

CPU = torch.device("cpu")


def kept_state(directory: Path, record: dict, plain: dict, build) -> dict:
    """The state before the bad step; found by training again where the run kept none."""
    folder = failure_folder(directory)
    if not folder.is_dir():
        _train_again(directory, record, plain, build)
    if not folder.is_dir():
        reason = read_post_mortem(directory)["failure"]["reason"]
        raise BadInput(f"explain {directory}: no state before the bad step ({reason})")
    _, kept, _ = checkpoint.load_newest(folder, CPU)
    if not {"task", "step", "skipped", "random", "kind", "batch"} <= kept.keys():
        raise Damaged(f"{folder}: not the state before a bad step")
    return kept


def _train_again(directory: Path, record: dict, plain: dict, build) -> None:
    """From the newest checkpoint whose weights are finite, or the start, to the bad step."""
    if not {"last_step", "cause"} <= record.keys():
        raise Damaged(f"{directory / 'run.json'}: no last_step or cause; not the record of a run")
    last, built, step, skipped = record["last_step"], build(plain), 0, 0
    folder = directory / "checkpoints"
    if folder.is_dir() and any(folder.iterdir()):
        step, state, _ = checkpoint.load_newest(folder, CPU)
        built.task.load_state_dict(state["task"])
        skipped = state["skipped"]
        if step < last and all_finite(weights(built.task).values()):
            restore_random_states(state["random"], built.device)
        else:
            built, step, skipped = build(plain), 0, 0
    keeper = FailureKeeper(built)
    keeper.snapshot.take(step, skipped)
    before = read_post_mortem(directory)
    rows = before["rows"] if before else recorded_rows(directory)[-LAST:]
    scaler = plain["scaler"]["kind"]
    report_failure(keeper, directory, record["cause"], last, rows, scaler_kind=scaler)


def recorded_rows(directory: Path) -> list[dict]:
    """The recorded training steps, in the form of `post_mortem.History`."""
    rows, skipped = [], 0
    for record in read_metrics(directory / "metrics.jsonl"):
        if record["split"] != "train":
            continue
        # Every step with a skipped update has a record, so a higher count is this step's own.
        row = {name: record[name] for name in ("step", "loss", "loss_scale", "skipped")}
        row["found_inf"] = record["skipped"] > skipped
        row |= {name: value for name, value in record.items() if name.endswith("grad_norm")}
        rows.append(row)
        skipped = record["skipped"]
    return rows
