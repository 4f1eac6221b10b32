"""Continue a run in its own directory from its newest whole checkpoint."""

import sys
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import msgspec
import torch

from mprun.assembly import Built
from mprun.config.keys import current
from mprun.config.schema import RunConfig
from mprun.data.source import DamagedData
from mprun.distributed.rank_info import RankInfo
from mprun.errors import BadInput, Damaged, raised
from mprun.precision.random_states import restore_random_states
from mprun.record import checkpoint
from mprun.record.keys import flat, hash_fields
from mprun.record.metrics import drop_later, metrics_until, parsed_metrics
from mprun.record.run_directory import locked
from mprun.record.run_record import Record, RunRecord, of_another_version, written_by
from mprun.recording.environment import environment, linear_products
from mprun.training import run
from mprun.training.announcements import say
from mprun.training.continuation import check_length, read, run_directory
from mprun.training.loop import Start

# State is read on the host and copied into existing tensors: no second model on the GPU.
_CPU = torch.device("cpu")


def resume(
    overrides: tuple[str, ...], path: str, config_dir: str | None, rank_info: RankInfo | None
) -> int:
    """Continue the run in directory `path` from its newest whole checkpoint; return the exit code.

    Only keys whose role allows it may be overridden; everything else comes from the run itself. The
    user has to name their own code again: the directory may come from anywhere.

    rank_info: of this process among the ranks of the run; None: it is the only one.
    """
    directory = run_directory(path)
    with nullcontext() if rank_info is not None and rank_info.rank else locked(directory):
        record, config = read(directory, overrides, config_dir)
        config = run.placed(config, rank_info)
        device = run.resolve_device(record["environment"]["device"])
        _check_same_stack(record["environment"])
        ranks = run.joined(config, device, rank_info)

        def begun() -> Built:
            threads = record["environment"]["threads"]
            built = run.prepare(config, device, threads, ranks)
            _check_same_data(path, record, built)
            check_length(config, record, built.steps)
            run.metrics_of(config, built.task)
            return built

        with ranks.watched():
            built = ranks.together(begun)
            ranks.together(lambda: run.check_same_products(built))
            start = ranks.together(lambda: _start(directory, built, config, record))
            if ranks.first(start.step) != start.step:
                raise Damaged(
                    f"{directory}: rank {ranks.rank} has different checkpoints than rank 0"
                )
            start = ranks.first(start)
        if not ranks.is_first:
            return run.follow(directory, config, built, start)
        before, now = record.get("precision", {}), linear_products(built.forward_context)
        had, same = before.get("linear_products"), not built.stepper.entered_by(start.step)
        if same and had not in (None, now):
            say(f"linear layers multiply {now} from here on; before: {had}")
        there, here = flat(current(record["config"])), flat(asdict(config))
        changed = (key for key in there | here if there.get(key) != here.get(key))
        for key in [key for key in changed if key != "resume"]:
            say(f"{key}: {there.get(key)}, from here on {here.get(key)}")
        record.reopen()
        # Written with the configuration itself, by `begin`: a kill before leaves the former two.
        record.update(hash_fields(asdict(config)))
        with open(directory / "metrics.jsonl", "ab") as metrics:
            metrics.truncate(start.metrics_bytes)
        drop_later(directory, start.step)
        return run.attempt(config, built, record, start)


def _start(directory: Path, built: Built, config: RunConfig, record: Record) -> Start:
    """Restore the state of the newest checkpoint, change no file; return where the run goes on."""
    metrics, ranks = directory / "metrics.jsonl", built.task.ranks
    newest = checkpoint.load_newest(directory / "checkpoints", _CPU)
    if newest is None:
        return _from_the_beginning(directory, record, ranks.is_first)
    for line in newest.warnings:
        print(f"mprun: warning: {line}; using the one before", file=sys.stderr)
    step, every = newest.step, config.train.evaluates_every(built.steps)
    over = BadInput(
        f"resume={directory}: already at step {step} of {built.steps}; give a larger train.steps"
    )
    if step > built.steps:
        raise over
    place = f"{directory / 'checkpoints'}: step {step}"
    try:
        skipped = newest.state["skipped"]
        if newest.state["step"] != step or type(skipped) is not int or not 0 <= skipped <= step:
            raise ValueError(f"skipped {skipped} of {newest.state['step']} updates")
        computed = msgspec.convert(newest.state.get("computed", {}), RunRecord)
        built.stepper.follow(step - 1)  # the state is that of the last step's mode
        built.task.load_state_dict(newest.state["task"])
        restore_random_states(newest.state["random"], built.device)
    except Exception as error:  # of any type: the file may hold anything
        reason = f"{place}: not the state of this run ({raised(error)})"
        if written_by(record) != written_by({"environment": environment(built.device)}):
            raise BadInput(f"{reason}; {of_another_version(record)}") from error
        raise Damaged(reason) from error
    if not ranks.is_first:  # writes no records; rank 0 decides how the run goes on
        return Start(step, skipped)
    kept = metrics_until(metrics, step, newest.manifest.get("metrics", {}))
    records = parsed_metrics(metrics, kept)
    # Each step with a skipped update has a record.
    if skipped != max((one["skipped"] for one in records if one["split"] == "train"), default=0):
        raise Damaged(f"{place}: {skipped} skipped updates, but metrics.jsonl shows another number")
    # An attempt that ended in the evaluation of this step left no record of it.
    due = step == built.steps or (every > 0 and step % every == 0)
    evaluated = [one["step"] for one in records if one["split"] == "eval"][-1:] == [step]
    if step == built.steps and evaluated and record["status"] == "done":
        raise over
    return Start(step, skipped, due and not evaluated, computed, len(kept))


def _from_the_beginning(directory: Path, record: Record, is_first: bool) -> Start:
    """Return the start of a run that has no checkpoint yet.

    Raises:
        BadInput: It is done.
        Damaged: It had one.
    """
    if "first_checkpoint" in record:
        raise Damaged(
            f"{directory / 'checkpoints'}: contains no checkpoint, but the run wrote its first "
            f"one at step {record['first_checkpoint']}"
        )
    if record["status"] == "done":
        raise BadInput(
            f"resume={directory}: the run is done and has no checkpoint to continue from"
        )
    if is_first:
        print("mprun: no checkpoint yet: starting again at step 1", file=sys.stderr)
    return Start()


def _check_same_stack(recorded: dict) -> None:
    """Refuse another torch: a resumed run continues bit for bit only on its own version."""
    torch_then, torch_now = recorded["packages"]["torch"], torch.__version__
    if torch_then not in (torch_now, torch_now.split("+")[0]):
        raise BadInput(
            f"resume: the run used torch {torch_then}, but torch {torch_now} is installed; the run "
            f"would not continue bit for bit"
        )


def _check_same_data(path: str, record: dict, built) -> None:
    """Refuse other data than the run's, unless it stopped at a damaged file since repaired."""
    recorded = record.get("data", {}).get("sha256")
    if recorded is None or recorded == built.data.sha256:
        return
    change = f"SHA-256 {recorded[:12]}..., now {built.data.sha256[:12]}..."
    if str(record.get("cause")).startswith(DamagedData.__name__):
        record.setdefault("data_before_repair", []).append(recorded)
        print(f"mprun: the data have changed since the run stopped ({change})", file=sys.stderr)
        return
    raise BadInput(
        f"resume={path}: the data differ from the data at the start of the run ({change})"
    )
