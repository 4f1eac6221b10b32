"""Continue a run in its own directory from its newest whole checkpoint."""

import os
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from mprun.config.compose import config_from_record
from mprun.config.overrides import parse_overrides
from mprun.config.roles import config_hash, resumable_keys, role_of
from mprun.config.user_code import is_factory, vouched
from mprun.data.source import DamagedData
from mprun.errors import BadInput, Damaged
from mprun.numerics.probe_record import drop_later_probes
from mprun.precision.random_states import restore_random_states
from mprun.record import checkpoint
from mprun.record.metrics import drop_later_grids, truncate_metrics
from mprun.record.run_directory import locked, read_config, read_json, write_config
from mprun.training.run import attempt, prepare, resolve_device

# State is read on the host and copied into tensors that exist: no second model on the GPU.
CPU = torch.device("cpu")


def resume(composed_overrides: tuple[str, ...], path: str, config_dir: str | None = None) -> int:
    """Continue the run in directory `path` from its newest whole checkpoint; the exit code.

    Only keys whose role allows it may be given beside it; everything else comes from the run
    itself. The names of the user's own code must be given again: the directory may come from
    anywhere.
    """
    given = vouched(composed_overrides, config_dir)
    directory = _run_directory(path)
    plain = read_config(directory)
    with locked(directory):
        record = _recorded(directory)
        if isinstance(plain.get("train"), dict):
            # Runs from before this setting were in NCHW, and "auto" may choose otherwise.
            plain["train"].setdefault("channels_last", "off")
        plain = _with_overrides(plain, composed_overrides)
        config = config_from_record(plain, given)
        plain = asdict(config)
        device = resolve_device(record["environment"]["device"])
        _check_same_stack(record["environment"])
        built = prepare(config, device, record["environment"]["threads"])
        _check_same_data(path, record, built)
        step, state, warnings = checkpoint.load_newest(directory / "checkpoints", CPU)
        for line in warnings:
            print(f"mprun: warning: {line}; using the one before", file=sys.stderr)
        # Where the last attempt failed in the evaluation of this step, that comes first.
        at_end = step == built.steps
        every = config.train.eval_every
        evaluate_first = record["status"] == "failed" and (at_end or (every and step % every == 0))
        if step > built.steps or (at_end and not evaluate_first):
            raise BadInput(
                f"resume={path}: already at step {step} of {built.steps}; give a larger train.steps"
            )
        try:
            built.task.load_state_dict(state["task"])
        except (ValueError, KeyError) as error:
            raise BadInput(f"resume={path}: {error}") from None
        if config.optim.schedule != "constant" and built.steps != record["steps"]:
            raise BadInput(
                f"train.steps={built.steps}: a run with optim.schedule="
                f"{config.optim.schedule} keeps its length ({record['steps']})"
            )
        record["config_hash"] = config_hash(plain)
        restore_random_states(state["random"], device)
        truncate_metrics(directory / "metrics.jsonl", step)
        drop_later_grids(directory, step)
        drop_later_probes(directory, step)
        write_config(directory, plain)
        return attempt(
            directory,
            config,
            built,
            record,
            first_step=step,
            skipped=state["skipped"],
            evaluate_first=bool(evaluate_first),
        )


def _run_directory(path: str) -> Path:
    directory = Path(path)
    if not path or not os.path.isdir(path):
        raise BadInput(f"resume={path}: no such folder")
    if not (directory / "config.yaml").is_file():
        raise BadInput(f"resume={path}: no config.yaml there; give a run directory")
    for name in ("run.json", "metrics.jsonl"):
        if not (directory / name).is_file():
            raise BadInput(f"resume={path}: no {name} there; the run never reached its first step")
    return directory


def _check_same_stack(recorded: dict) -> None:
    """A resumed run continues bit for bit only on the torch it was started with."""
    if recorded["packages"]["torch"] != torch.__version__.split("+")[0] and (
        recorded["packages"]["torch"] != torch.__version__
    ):
        raise BadInput(
            f"resume: the run used torch {recorded['packages']['torch']}, this is "
            f"{torch.__version__}; it would not continue bit for bit"
        )


def _check_same_data(path: str, record: dict, built) -> None:
    """A continuation on other data would be neither run; but a damaged file may be repaired."""
    recorded = record.get("data", {}).get("sha256")
    if recorded is None or recorded == built.data.sha256:
        return
    change = f"SHA-256 {recorded[:12]}..., now {built.data.sha256[:12]}..."
    if str(record.get("cause")).startswith(DamagedData.__name__):
        record.setdefault("data_before_repair", []).append(recorded)
        print(f"mprun: the data have changed since the run stopped ({change})", file=sys.stderr)
        return
    raise BadInput(f"resume={path}: the data are not those that the run began with ({change})")


def _recorded(directory: Path) -> dict:
    """run.json of a run to be continued; Damaged if it lacks what the continuation reads."""
    record = read_json(directory / "run.json")
    try:
        record["steps"], record["attempts"], record["choices"]
        record["environment"]["device"], record["environment"]["threads"]
        record["environment"]["packages"]["torch"], record["precision"]["mode"]
    except (KeyError, TypeError) as error:
        raise Damaged(f"{directory / 'run.json'}: not the record of a run ({error})") from None
    return record


def _in_short() -> str:
    """The keys that may be given, as a shell would abbreviate them: short enough for one line."""
    groups: dict[str, list[str]] = {"train": [], "data": []}
    for key in resumable_keys():
        group, _, field = key.partition(".")
        groups[group].append(field)
    return " ".join(f"{group}.{{{','.join(fields)}}}" for group, fields in groups.items())


def _with_overrides(plain: dict, overrides: tuple[str, ...]) -> dict:
    for override in overrides:
        key = override.partition("=")[0]
        if key.lstrip("+") == "resume" or is_factory(override):
            continue
        if not role_of(key).resumable:
            raise BadInput(
                f"{override}: a resumed run keeps its configuration (allowed: {_in_short()})"
            )
        group, _, field = key.partition(".")
        # Hydra's grammar, as for a new run: to YAML "off" is a truth value.
        (parsed,) = parse_overrides((override,))
        plain[group][field] = parsed.value()
    return plain
