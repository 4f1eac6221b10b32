"""Continue a run in its own directory from its newest whole checkpoint."""

import os
import sys
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import msgspec
import torch

from mprun.build import Built
from mprun.config.compose import config_from_record
from mprun.config.keys import config_hash, flat, resumable_keys, role_of
from mprun.config.overrides import parse_overrides
from mprun.config.schema import RunConfig
from mprun.config.trust import Vouched, is_outside, vouched
from mprun.data.source import DamagedData
from mprun.distributed.rank_info import RankInfo
from mprun.errors import BadInput, Damaged, no_folder, raised
from mprun.precision.random_states import restore_random_states
from mprun.record import checkpoint
from mprun.record.metrics import drop_later, metrics_until, parsed_metrics
from mprun.record.run_directory import locked, read_config
from mprun.record.run_record import Record, RunRecord, read_record
from mprun.record.seal import check_seal
from mprun.training.announcements import say
from mprun.training.loop import Start
from mprun.training.run import attempt, follow, joined, prepare, resolve_device

# State is read on the host and copied into existing tensors: no second model on the GPU.
_CPU = torch.device("cpu")
# The fields of run.json that a continuation reads.
_NEEDED = (
    *("status", "steps", "attempts", "choices", "config", "config_hash", "precision.mode"),
    *("environment.device", "environment.threads", "environment.packages.torch"),
)


def resume(
    composed_overrides: tuple[str, ...],
    path: str,
    config_dir: str | None = None,
    rank_info: RankInfo | None = None,
) -> int:
    """Continue the run in directory `path` from its newest whole checkpoint; return the exit code.

    Only keys whose role allows it may be overridden; everything else comes from the run itself. The
    user has to name their own code again: the directory may come from anywhere.

    rank_info: of this process among the ranks of the run; None: it is the only one.
    """
    directory = _run_directory(path)
    with nullcontext() if rank_info is not None and rank_info.rank else locked(directory):
        record, config = _read(directory, composed_overrides, config_dir)
        device = resolve_device(record["environment"]["device"])
        _check_same_stack(record["environment"])
        ranks = joined(config, device, rank_info)

        def begun() -> Built:
            built = prepare(config, device, record["environment"]["threads"], ranks)
            _check_same_data(path, record, built)
            if config.optim.schedule != "constant" and built.steps != record["steps"]:
                raise BadInput(
                    f"train.steps={built.steps}: a run with optim.schedule="
                    f"{config.optim.schedule} keeps its length ({record['steps']})"
                )
            return built

        with ranks.watched():
            built = ranks.together(begun)
            start = ranks.together(lambda: _start(directory, built, config, record))
            if ranks.first(start.step) != start.step:
                raise Damaged(f"{directory}: rank {ranks.rank} sees other checkpoints than rank 0")
            start = ranks.first(start)
        if not ranks.is_first:
            return follow(directory, config, built, start)
        say(*_changes(record["config"], asdict(config)))
        record["config_hash"] = config_hash(asdict(config))
        record.reopen()
        with open(directory / "metrics.jsonl", "ab") as metrics:
            metrics.truncate(start.metrics_bytes)
        drop_later(directory, start.step)
        return attempt(config, built, record, start)


def continued(
    composed_overrides: tuple[str, ...], path: str, config_dir: str | None = None
) -> RunConfig:
    """Return the configuration that `resume` would continue with, or raise its error."""
    return _read(_run_directory(path), composed_overrides, config_dir)[1]


def _read(
    directory: Path, overrides: tuple[str, ...], config_dir: str | None
) -> tuple[Record, RunConfig]:
    given, record = vouched(overrides, config_dir), read_record(directory, *_NEEDED)
    check_seal(directory)
    plain = read_config(directory)
    _check_unchanged(directory, plain, record)
    return record, _checked(_with_overrides(plain, overrides), overrides, given)


def _changes(before: dict, now: dict) -> list[str]:
    """Return a line for each key that the run goes on with in another value."""
    there, here = flat(before), flat(now)
    changed = [key for key in there | here if there.get(key) != here.get(key) and key != "resume"]
    return [f"{key}: {there.get(key)}, from here on {here.get(key)}" for key in changed]


def _start(directory: Path, built: Built, config: RunConfig, record: Record) -> Start:
    """Restore the state of the newest checkpoint, change no file; return where the run goes on."""
    metrics, ranks = directory / "metrics.jsonl", built.task.ranks
    newest = checkpoint.load_newest(directory / "checkpoints", _CPU)
    if newest is None:
        if "first_checkpoint" in record:
            raise Damaged(
                f"{directory / 'checkpoints'}: no checkpoint there, but the run wrote its first "
                f"one at step {record['first_checkpoint']}"
            )
        if record["status"] == "done":
            raise BadInput(f"resume={directory}: done, without a checkpoint to go on from")
        if ranks.is_first:
            print("mprun: no checkpoint yet: starting again at step 1", file=sys.stderr)
        return Start()
    for line in newest.warnings:
        print(f"mprun: warning: {line}; using the one before", file=sys.stderr)
    step, every = newest.step, config.train.eval_every
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
        built.task.load_state_dict(newest.state["task"])
        restore_random_states(newest.state["random"], built.device)
    except Exception as error:  # of any type: the file may hold anything
        raise Damaged(f"{place}: not the state of this run ({raised(error)})") from error
    if not ranks.is_first:  # writes no records; rank 0 decides how the run goes on
        return Start(step, skipped)
    kept = metrics_until(metrics, step, newest.manifest.get("metrics", {}))
    records = parsed_metrics(metrics, kept)
    # Each step with a skipped update has a record.
    if skipped != max((one["skipped"] for one in records if one["split"] == "train"), default=0):
        raise Damaged(f"{place}: {skipped} skipped updates, but metrics.jsonl has another number")
    # An attempt that ended in the evaluation of this step left no record of it.
    due = step == built.steps or (every > 0 and step % every == 0)
    evaluated = [one["step"] for one in records if one["split"] == "eval"][-1:] == [step]
    if step == built.steps and evaluated and record["status"] == "done":
        raise over
    return Start(step, skipped, due and not evaluated, computed, len(kept))


def _run_directory(path: str) -> Path:
    directory = Path(path)
    if not path or not os.path.isdir(path):
        raise BadInput(f"resume={path}: {no_folder(path)}")
    if not os.path.lexists(directory / "run.json"):
        if not os.path.lexists(directory / "config.yaml"):
            raise BadInput(f"resume={path}: no config.yaml there; give a run directory")
        raise BadInput(f"resume={path}: no run.json there; the run never reached its first step")
    return directory


def _check_unchanged(directory: Path, plain: dict, record: dict) -> None:
    """Raise Damaged unless the configurations in config.yaml and run.json are the run's own."""
    recorded = record["config"]
    if config_hash(recorded) != record["config_hash"]:
        raise Damaged(f"{directory / 'run.json'}: config does not match config_hash")
    there, here = flat(recorded), flat(plain)
    for key in there | here:
        if there.get(key) != here.get(key) and not role_of(key).resumable:
            raise Damaged(
                f"{directory / 'config.yaml'}: {key} is {here.get(key)!r}, but the run began with "
                f"{there.get(key)!r} (run.json)"
            )


def _check_same_stack(recorded: dict) -> None:
    """Refuse another torch: a resumed run continues bit for bit only on its own version."""
    torch_then, torch_now = recorded["packages"]["torch"], torch.__version__
    if torch_then not in (torch_now, torch_now.split("+")[0]):
        raise BadInput(
            f"resume: the run used torch {torch_then}, this is {torch_now}; the run would not "
            "continue bit for bit"
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
    raise BadInput(f"resume={path}: the data are not those that the run began with ({change})")


def _allowed() -> str:
    """Return the keys that may be overridden, in a shell's braces to fit on one line."""
    groups: dict[str, list[str]] = {}
    for key in resumable_keys():
        group, _, field = key.rpartition(".")
        groups.setdefault(group, []).append(field)
    top = groups.pop("")
    short = [f"{group}.{{{','.join(fields)}}}" for group, fields in groups.items()]
    return " ".join([*short, *(key for key in top if key not in groups)])


def _checked(plain: dict, overrides: tuple[str, ...], given: Vouched) -> RunConfig:
    """Check the configuration; blame a wrong override by its name, not config.yaml."""
    try:
        return config_from_record(plain, given)
    except BadInput as error:
        for override in overrides:
            of_key = f"config.yaml: {override.partition('=')[0]} does not fit "
            if str(error).startswith(of_key):
                raise BadInput(f"{override}: {str(error).split(': ', 2)[2]}") from None
        raise


def _with_overrides(plain: dict, overrides: tuple[str, ...]) -> dict:
    for override in overrides:
        key = override.partition("=")[0]
        if key.lstrip("+") == "resume" or is_outside(override):
            continue
        if not role_of(key).resumable:
            raise BadInput(
                f"{override}: a resumed run keeps its configuration (allowed: {_allowed()})"
            )
        group, _, field = key.rpartition(".")
        # Hydra's grammar, as for a new run: YAML takes "off" for false.
        (parsed,) = parse_overrides((override,))
        (plain.setdefault(group, {}) if group else plain)[field] = parsed.value()
    return plain
