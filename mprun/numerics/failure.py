"""Keep what is needed to replay a run's failure: the state before the step that went wrong.

A divergence is noticed only when the loop looks at the losses, up to `train.log_every` steps late.
By then the weights are NaN. So the run copies its state from time to time, on the device. A
diverged run goes back to that copy, trains again up to the bad step and saves that step's starting
state. No step waits for any of this: on a GPU the device itself decides whether a copy is worth
keeping, and the host learns of it later. If a run kept nothing, training again finds the state.
"""

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mprun.errors import BadInput, Damaged, MprunError
from mprun.numerics.post_mortem import LAST, StepRow, read_post_mortem, write_post_mortem
from mprun.numerics.replay import Snapshot, Steps, batches_of, nonfinite_batch, same_loss, size_of
from mprun.numerics.state import all_finite, buffers, carried, weights
from mprun.precision.random_states import restore_random_states
from mprun.record import checkpoint
from mprun.record.async_copy import PinnedRing, Sent
from mprun.record.metrics import read_metrics
from mprun.record.metrics_columns import read_columns
from mprun.record.run_record import read_record

LOOKED_AT = 3  # batches of skipped updates
LARGEST_STATE = 2**30  # bytes; a larger copy would take memory that the run may need
# A copy is taken at most once a second, and only after 200 times the duration of the last one: at
# most 0.5 % of a run's time.
SHORTEST_PAUSE_S = 1.0
PAUSE_FACTOR = 200


@dataclass(frozen=True, slots=True)
class Kept:
    """The failure of a run, and what was kept of it.

    kind: "loss" (not finite although the update was applied), "collapse" (of the loss scale),
    "evaluation" (its loss is not finite) or "state" (weights or carried LSTM state became
    non-finite in a step whose own loss was finite). step: the step that went wrong, from 1.
    replayed_from: steps done when the copy was taken. replayed: steps trained again, including the
    bad one. compared: how many of them have a recorded loss. first_difference: the first whose loss
    has other bits, or None. reason: why nothing was kept, or None. folder: relative to the run
    directory.
    """

    kind: str
    step: int
    replayed_from: int | None = None
    replayed: int = 0
    compared: int = 0
    first_difference: int | None = None
    folder: str | None = None
    reason: str | None = None


def suspect(cause: str, last_step: int, rows: Sequence[Mapping]) -> Kept:
    """Return kind and last step to replay from a run's cause of divergence and newest rows.

    For "collapse" that is the first skip in the last row of skips at which the scale was as low as
    at its end, else `last_step`. rows: mappings with step, loss_scale and found_inf, oldest first.
    """
    if "collapsed" not in cause or "evaluation" in cause:
        return Kept("evaluation" if "evaluation" in cause else "loss", last_step)
    step, floor = last_step, None
    for row in reversed(rows):
        if row["step"] > last_step:
            continue
        floor = row["loss_scale"] if floor is None else floor
        if row["step"] < step - 1 or not row["found_inf"] or row["loss_scale"] != floor:
            break
        step = row["step"]
    return Kept("collapse", step)


def failure_folder(directory: Path) -> Path:
    """Return the folder for the state before the bad step, which has the form of a checkpoint."""
    return directory / "numerics" / "failure"


def forget_failure(directory: Path) -> None:
    """Remove the files that an earlier attempt of this run left."""
    shutil.rmtree(failure_folder(directory), ignore_errors=True)
    for name in ("post-mortem.json", "post-mortem.md"):
        (directory / "numerics" / name).unlink(missing_ok=True)


def report_failure(
    keeper: "FailureKeeper | None",
    directory: Path,
    cause: str,
    step: int,
    rows: list[dict],
    *,
    scaler_kind: str,
    reason: str | None = None,
    replayable: bool = True,
) -> None:
    """Keep what can be kept of a run that ended as diverged, and write its post-mortem.

    The post-mortem reports errors of this function; the run's own end stays as it is. Without a
    keeper, for this `reason`, nothing is kept. The others are as in `write_post_mortem`.
    """
    kept = suspect(cause, step, rows)
    try:
        if keeper is not None:
            kept = keeper.record(directory, kept, {row["step"]: row["loss"] for row in rows})
            reason = kept.reason
    except (MprunError, RuntimeError, OSError) as error:
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    kept = replace(kept, reason=reason)
    write_post_mortem(directory, cause, step, rows, scaler_kind, asdict(kept), replayable)


class FailureKeeper:
    """Keep copies of the state of a run while it trains; built: `mprun.assembly.Built`.

    bytes: device memory of the copy, for whoever measures the peak. It is 0 if no copy is kept,
    because the state is larger than LARGEST_STATE or an eighth of a GPU's free memory. `explain`
    trains such a run again from its newest checkpoint.
    """

    def __init__(self, built):
        self.built = built
        self.snapshot = Snapshot(built.task, built.device)
        self.bytes = 0
        self._due = 0.0
        self._ring = PinnedRing(built.device, 1)
        self._unsettled: Sent | None = None
        size, room = size_of(built.task.state_dict()), LARGEST_STATE
        if built.device.type == "cuda":
            room = min(room, torch.cuda.mem_get_info(built.device)[0] // 8)
        reason = f"a copy of the state takes {size / 2**20:.0f} MiB, more than is spared"
        self.reason = reason if size > room else None

    def begin_anew(self) -> None:
        """Drop the copy, which is of another mode, and take one as soon as it may be taken."""
        self._unsettled, self._due = None, 0.0
        self.snapshot = Snapshot(self.built.task, self.built.device)

    def keep(self, step: int, skipped: int, *, healthy: bool = True) -> None:
        """Copy the state after `step` steps if it is time; call it where the loop waits.

        healthy: whether the last step had its update. Within a row of skipped updates nothing is
        copied, so that the copy precedes the first of them. Nor is anything copied once a weight is
        not finite.
        """
        started = time.perf_counter()
        if self.reason is not None or not healthy or started < self._due:
            return
        # Without any copy there would be nothing to explain.
        if self.snapshot.step is None or all_finite(weights(self.built.task).values()):
            self.snapshot.take(step, skipped)
            self._pause(started)

    @torch.no_grad()
    def keep_if(self, step: int, skipped: Tensor, sound: Callable[[], Tensor]) -> None:
        """Do the same as `keep` without waiting, before the host knows the last steps' results.

        Call it only after a first `keep`. skipped: int64, 0-dim, on the device. sound: returns
        whether no step since the last call diverged and the last one had its update, bool, 0-dim,
        on the device (from `mprun.recording.metric_buffer`).
        """
        started = time.perf_counter()
        if self.reason is not None or started < self._due:
            return
        # Settles the previous copy: at least an interval old, so the device has passed it.
        self._settle()
        chosen = sound() & all_finite(weights(self.built.task).values())
        self.snapshot.take_if(chosen, step)
        self._unsettled = self._ring.send(torch.stack((chosen, skipped)).float())
        self._pause(started)

    def _settle(self) -> None:
        if self._unsettled is not None:
            chosen, skipped = self._unsettled.read()
            self._unsettled = None
            self.snapshot.settle(chosen != 0, int(skipped))

    def _pause(self, started: float) -> None:
        self.bytes = size_of(self.snapshot.content()["task"])
        took = time.perf_counter() - started
        self._due = started + max(SHORTEST_PAUSE_S, PAUSE_FACTOR * took)

    def record(self, directory: Path, found: Kept, losses: Mapping[int, float]) -> Kept:
        """Rewind, train again to the step that went wrong, and save the state before it.

        It saves task state, random states, step and the batch of that step below `failure_folder`.
        It leaves the task in some later state: call it only for a run that has ended. found: from
        `suspect`. losses: recorded ones by step, to compare with. Raises Resource if the disk is
        full.
        """
        self._settle()
        origin = self.snapshot.step
        if origin is None:
            return replace(found, reason=self.reason or "no copy of the state")
        if origin > found.step - (found.kind != "evaluation"):
            return replace(found, reason="the copy is younger than the failure")
        # The steps trained again must not change the run's own count of emulated operations.
        set_back = self.built.forward_context.counted()
        try:
            kind, rows = self._rewind(found)
        finally:
            set_back()
        folder, state = failure_folder(directory), self.snapshot.content()
        folder.parent.mkdir(exist_ok=True)
        done, last = state["step"], kind == "evaluation"
        batch = None if last else batches_of(self.built.task, done)
        path = checkpoint.save(folder, done, state | {"kind": kind, "batch": batch}, keep=1)
        known = [row for row in rows if row.step in losses]
        other = (row.step for row in known if not same_loss(row.loss, losses[row.step]))
        return Kept(
            kind,
            done if last else done + 1,
            origin,
            replayed=len(rows),
            compared=len(known),
            first_difference=next(other, None),
            folder=str(path.relative_to(directory)),
        )

    def _rewind(self, found: Kept) -> tuple[str, list[StepRow]]:
        """Train up to the bad step and keep the state before it; return kind and trained steps."""
        task, kept, kind, rows = self.built.task, self.snapshot, found.kind, []
        self.built.stepper.follow((kept.step or 0) - 1)
        kept.restore()
        steps = Steps(self.built, kept.step or 0, kept.skipped)
        while steps.step < found.step:
            kept.take(steps.step, int(steps.skipped))
            rows.append(row := steps.advance())
            named = weights(task) | carried(task)
            named |= buffers(task) if found.kind == "evaluation" else {}
            if row.diverged or not all_finite(named.values()):
                if row.step < found.step or kind == "evaluation":
                    kind = "loss" if row.diverged else "state"
                break
        if kind == "evaluation":  # nothing went wrong before it
            kept.take(steps.step, int(steps.skipped))
        return kind, rows


def kept_state(directory: Path, record: dict, plain: dict, build) -> dict:
    """Return the state before the bad step; train again if the run kept none."""
    folder = failure_folder(directory)
    if not folder.is_dir():
        _train_again(directory, record, plain, build)
    if not folder.is_dir():
        post_mortem = read_post_mortem(directory)
        reason = post_mortem["failure"]["reason"] if post_mortem else "no post-mortem"
        raise BadInput(
            f"explain {directory}: the state before the bad step was not saved ({reason})"
        )
    found = checkpoint.load_newest(folder, torch.device("cpu"))
    wanted = {"task", "step", "skipped", "random", "kind", "batch"}
    if found is None or not wanted <= found.state.keys():
        raise Damaged(f"{folder}: is not the state before a bad step")
    return found.state


def _train_again(directory: Path, record: dict, plain: dict, build) -> None:
    """Train to the bad step from the newest checkpoint with finite weights, or from the start."""
    if not {"last_step", "cause"} <= record.keys():
        raise Damaged(
            f"{directory / 'run.json'}: contains no last_step or cause; it is not the record "
            "of a run"
        )
    last = record["last_step"]
    built, step, skipped = _started(directory, plain, build, last)
    keeper = FailureKeeper(built)
    keeper.snapshot.take(step, skipped)
    before = read_post_mortem(directory)
    rows = before["rows"] if before else recorded_rows(directory)[-LAST:]
    scaler, own = plain["scaler"]["kind"], read_record(directory)
    report_failure(keeper, directory, record["cause"], last, rows, scaler_kind=scaler)
    if "seal" in own:  # has the post-mortem, which names the state that was kept now
        own.seal()


def _started(directory: Path, plain: dict, build, last: int) -> tuple[Any, int, int]:
    """Build the run and go to its newest checkpoint before `last`, if it is finite, or the start.

    Return also the steps done there, and how many of them had a skipped update.
    """
    built = build(plain)
    found = checkpoint.load_newest(directory / "checkpoints", torch.device("cpu"))
    if found is None:
        return built, 0, 0
    built.stepper.follow(found.step - 1)
    built.task.load_state_dict(found.state["task"])
    if found.step < last and all_finite(weights(built.task).values()):
        restore_random_states(found.state["random"], built.device)
        return built, found.step, found.state["skipped"]
    return build(plain), 0, 0


def skipped_state(directory: Path, plain: dict, build, steps: Sequence[int]) -> dict:
    """Return the state before the first of the skipped updates `steps` whose loss was not finite.

    A batch that is not finite is the cause by itself: the state before the first such batch of a
    few is that of the start, which costs no step. Else the run is trained again up to the first.
    """
    built = build(plain)
    batch = next((s for s in steps[:LOOKED_AT] if nonfinite_batch(built.task, s - 1)), None)
    kept = Snapshot(built.task, built.device)
    if batch is not None:
        kept.take(batch - 1, 0)
    else:
        built, step, skipped = _started(directory, plain, build, steps[0])
        kept, taken = Snapshot(built.task, built.device), Steps(built, step, skipped)
        while taken.step < steps[0] - 1:
            taken.advance()
        kept.take(taken.step, int(taken.skipped))
    content = kept.content()
    return content | {"kind": "skip", "batch": batches_of(built.task, content["step"])}


def recorded_rows(directory: Path) -> list[dict]:
    """Return the recorded training steps, in the form of `post_mortem.History`.

    Raises Damaged for records that the run cannot have written.
    """
    path, rows, skipped = directory / "metrics.jsonl", [], 0
    read_columns(path)  # each line a record, steps in order
    for record in read_metrics(path) if path.exists() else ():
        if record["split"] != "train":
            continue
        if not isinstance(record.get("loss_scale"), float | int):
            raise Damaged(f"{path}: step {record['step']} has no loss_scale")
        # Every skipped step has a record, so a higher count means that this step skipped.
        row = {name: record[name] for name in ("step", "loss", "loss_scale", "skipped")}
        row["found_inf"] = record["skipped"] > skipped
        row |= {name: value for name, value in record.items() if name.endswith("grad_norm")}
        rows.append(row)
        skipped = record["skipped"]
    return rows
