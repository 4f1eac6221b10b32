"""`mprun explain RUN`: replay the step that went wrong, name the operation, try what cures it."""

import json
import math
import shlex
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from mprun import checkpoint
from mprun.config.compose import compose_config, config_from_record
from mprun.errors import DONE, BadInput, Damaged
from mprun.numerics import cures
from mprun.numerics.culprit import Finding, find_culprit, in_words, reason_of
from mprun.numerics.failure import FailureKeeper, failure_folder, report_failure
from mprun.numerics.observation import Largest
from mprun.numerics.post_mortem import LAST, explosion, power, read_post_mortem
from mprun.numerics.replay import Steps, all_finite, restore, same_loss, weights
from mprun.precision import DTYPE_NAMES
from mprun.record.metrics import read_metrics
from mprun.record.run_directory import read_config, read_json
from mprun.run import prepare, resolve_device

_USAGE = """\
mprun explain RUN : why did this run diverge, and what is the smallest change that cures it?

RUN is the directory of a run that ended as diverged. The step that went wrong is trained again from
the state that the run kept (numerics/failure; without it from its newest checkpoint or its start),
with every operation watched, forward and backward. Printed: the first operation whose inputs were
finite and whose output was not, the largest values on the way there, and what became of each change
that was tried on the same step and five more. The run itself is not changed.

Options
  --json       everything as JSON
  --no-cures   only look for the cause

Exit codes: 0 explained, or not found and said so; 2 bad input (the run did not diverge);
4 damaged record.
"""
CPU = torch.device("cpu")
RAMP = 12  # modules printed before the culprit
_OUTSIDE = {"forward": "(the model itself)", "loss": "(the loss)", "backward": "(no module)"}
# A run whose loss exploded was damaged long before its last step: changes are tried from its start
# if it gets to the bad step within this time.
LONGEST_CONTROL_S = 60.0


@dataclass(frozen=True, slots=True)
class Explanation:
    """What is known of a run that did not end well.

    finding, tried, smallest: None and empty for a run that failed with an exception.
    classification: of the post-mortem. replay: one line about the replayed step.
    """

    run: str
    status: str
    cause: str
    classification: list[str]
    replay: str
    finding: Finding | None
    tried: list[cures.Tried]
    smallest: cures.Tried | None
    command: str | None


def main(arguments: list[str]) -> int:
    """Entry point of the verb; returns the exit code."""
    if "--help" in arguments or "-h" in arguments:
        print(_USAGE, end="")
        return DONE
    known = {"--json", "--no-cures"}
    for argument in arguments:
        if argument.startswith("-") and argument not in known:
            raise BadInput(f"explain {argument}: unknown option (allowed: --json, --no-cures)")
    paths = [argument for argument in arguments if not argument.startswith("-")]
    if len(paths) != 1:
        raise BadInput(f"explain: {len(paths)} run directories given, needs one")
    explanation = explain(Path(paths[0]), with_cures="--no-cures" not in arguments)
    if "--json" in arguments:
        print(json.dumps(as_dict(explanation), indent=1, allow_nan=False))
    else:
        print("\n".join(as_text(explanation)))
    return DONE


def explain(directory: Path, *, with_cures: bool = True) -> Explanation:
    """Explain the run in `directory`; BadInput if it neither diverged nor failed."""
    if not (directory / "run.json").is_file():
        raise BadInput(f"explain {directory}: no run.json there; give a run directory")
    record = read_json(directory / "run.json")
    status, cause = record.get("status"), str(record.get("cause"))
    if status == "failed":
        return _of_exception(directory, cause)
    if status != "diverged":
        raise BadInput(f"explain {directory}: {_why_not(record)}")
    plain = read_config(directory)
    threads = _threads(record)
    device, note = _device(record)

    def build(config: dict):
        return prepare(config_from_record(config), device, threads)

    kept = _kept_state(directory, record, plain, build)
    post_mortem = read_post_mortem(directory)
    lines = post_mortem["classification"] if post_mortem else []
    finding = _find(build, plain, kept)
    replay = _replay_in_words(kept, finding, post_mortem, note)
    tried: list[cures.Tried] = []
    if with_cures and finding.reproduced and finding.verdict in ("operation", "not found"):
        tried = _try_all(build, plain, kept, finding, directory)
    smallest = next((one for one in tried if one.cures), None)
    command = None if smallest is None else _command(record, smallest)
    return Explanation(
        str(directory), status, cause, lines, replay, finding, tried, smallest, command
    )


def as_dict(explanation: Explanation) -> dict:
    """As plain values, non-finite numbers as text."""
    finding = explanation.finding
    content = {
        "run": explanation.run,
        "status": explanation.status,
        "cause": explanation.cause,
        "classification": explanation.classification,
        "replay": explanation.replay,
        "verdict": "exception" if finding is None else finding.verdict,
        "tried": [
            {"change": list(one.overrides), "cures": one.cures, "result": one.result}
            for one in explanation.tried
        ],
        "smallest_cure": None if explanation.smallest is None else explanation.smallest.overrides,
        "command": explanation.command,
    }
    if finding is None:
        return content
    content |= {
        "step": finding.step,
        "kind": finding.kind,
        "reproduced": finding.reproduced,
        "in_words": in_words(finding),
        "details": finding.details,
        "weights": finding.weights,
        "culprit": None,
        "ramp": [
            {
                "phase": one.phase,
                "module": one.module,
                "largest": _plain(one.value),
                "dtype": _name(one.dtype),
            }
            for one in finding.ramp
        ],
    }
    event = finding.event
    if event is not None:
        content["culprit"] = {
            "phase": event.phase,
            "module": event.module,
            "operation": event.operation,
            "tensor": event.tensor,
            "dtype": _name(event.dtype),
            "result": event.result,
            "count": event.count,
            "of": event.of,
            "largest_input": _plain(event.largest_input),
            "in_fp32": _plain(event.would_be),
            "reason": reason_of(event),
        }
    return content


def as_text(explanation: Explanation) -> list[str]:
    """As lines for the console."""
    lines = [f"run       {explanation.run}: {explanation.status}: {explanation.cause}"]
    lines += [f"          {line}" for line in explanation.classification]
    finding = explanation.finding
    lines.append(f"replay    {explanation.replay}")
    if finding is None:
        return lines
    words = in_words(finding)
    lines.append(f"culprit   {words[0]}")
    lines += [f"          {line}" for line in words[1:]]
    if finding.ramp:
        lines += ["ramp      largest absolute values up to there (FP16 ends at 65504, 2^16)"]
        lines += [f"          {line}" for line in _ramp(finding.ramp)]
    if not explanation.tried:
        return lines
    width = max(len(" ".join(one.overrides)) for one in explanation.tried)
    lines.append("tried     on that step and five more")
    for one in explanation.tried:
        verdict = {True: "cures", False: "does not cure", None: "-"}[one.cures]
        lines.append(f"          {' '.join(one.overrides):<{width}}  {verdict:<13}  {one.result}")
    if explanation.smallest is None:
        lines.append("cure      none of these")
    else:
        lines.append(f"cure      {' '.join(explanation.smallest.overrides)} (the smallest of them)")
        lines.append(f"          {explanation.command}")
    return lines


def _of_exception(directory: Path, cause: str) -> Explanation:
    replay = "not replayed: the run ended with an exception"
    if cause.startswith("IndexError"):
        replay += "; an index in the batch is outside the table it selects from (an embedding)"
    return Explanation(
        str(directory), "failed", cause, [f"exception: {cause}"], replay, None, [], None, None
    )


def _why_not(record: dict) -> str:
    status, skipped = record.get("status"), record.get("skipped")
    text = f"status {status}; only a run that diverged has a step to explain"
    if status == "done" and skipped:
        text += f" ({skipped} skipped updates while the loss scale settles are normal)"
    return text


def _threads(record: dict) -> int | None:
    try:
        return record["environment"]["threads"]
    except (KeyError, TypeError):
        raise Damaged("run.json: not the record of a run (no environment)") from None


def _device(record: dict) -> tuple[torch.device, str]:
    """The run's device; a CPU, with a note, where its GPU is not here."""
    name = record["environment"]["device"]
    if name == "cuda" and not torch.cuda.is_available():
        return CPU, " (on a CPU: the run's GPU is not here)"
    return resolve_device(name), ""


def _kept_state(directory: Path, record: dict, plain: dict, build) -> dict:
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
    built, step, skipped = build(plain), 0, 0
    if (directory / "checkpoints").is_dir():
        step, state, _ = checkpoint.load_newest(directory / "checkpoints", CPU)
        built.task.load_state_dict(state["task"])
        skipped = state["skipped"]
        if all_finite(weights(built.task).values()):
            checkpoint.restore_random_states(state["random"], built.device)
        else:
            built, step, skipped = build(plain), 0, 0
    keeper = FailureKeeper(built)
    keeper.snapshot.take(step, skipped)
    rows = [row for row in _rows(directory) if row["step"] <= record["last_step"]]
    scaler, last = plain["scaler"]["kind"], record["last_step"]
    report_failure(keeper, directory, record["cause"], last, rows[-LAST:], scaler_kind=scaler)


def _rows(directory: Path) -> list[dict]:
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


def _find(build, plain: dict, kept: dict) -> Finding:
    try:
        steps = restore(build(plain), kept)
    except (ValueError, KeyError) as error:
        raise Damaged(f"numerics/failure: {error}") from None
    return find_culprit(steps, kept["kind"])


def _replay_in_words(kept: dict, finding: Finding, post_mortem: dict | None, note: str) -> str:
    what = "the evaluation after step" if kept["kind"] == "evaluation" else "step"
    text = f"{what} {finding.step} from its kept state{note}: "
    text += "fails again" if finding.reproduced else "does not fail again"
    failure = post_mortem["failure"] if post_mortem else {}
    if failure.get("compared"):
        different = failure["first_difference"]
        same = "bit-equal to the run's"
        text += f", its losses {same if different is None else f'other from step {different} on'}"
    return text


def _try_all(build, plain: dict, kept: dict, finding: Finding, directory: Path):
    rows = _rows(directory)
    first = next((row["loss"] for row in rows if row["step"] == 1), None)
    origin = cures.Origin(kept, finding.step, limit=cures.limit_of(first))
    if finding.kind == "evaluation":
        return []
    before = [row for row in rows if row["step"] <= finding.step]
    exploding = explosion(before[-LAST:]) is not None
    if exploding and _start_leads_there(build, plain, origin, rows):
        origin = cures.Origin(kept, finding.step, from_start=True, limit=origin.limit)
    options = {
        name: compose_config([f"scaler={name}"]).as_dict()["scaler"]
        for name in ("none", "static", "dynamic")
    }
    found = cures.changes(plain, finding, options, exploding=exploding)
    return [cures.try_change(build, change, origin) for change in found]


def _start_leads_there(build, plain: dict, origin: cures.Origin, rows: list[dict]) -> bool:
    """Whether the run trained from its start, unchanged, gives its losses and the same failure."""
    losses = {row["step"]: row["loss"] for row in rows}
    steps: Steps = cures.start_from(build(plain), cures.Origin(origin.kept, 0, from_start=True))
    ends = time.perf_counter() + LONGEST_CONTROL_S
    while steps.step < origin.bad_step and time.perf_counter() < ends:
        row = steps.advance()
        if row.step in losses and not same_loss(row.loss, losses[row.step]):
            return False
    finite = all_finite(weights(steps.built.task).values())
    return steps.step == origin.bad_step and not (finite and math.isfinite(row.loss))


def _command(record: dict, smallest: cures.Tried) -> str:
    """The run's own command line with the cure in it."""
    changed = {override.partition("=")[0] for override in smallest.overrides}
    left_out = {"output_dir", "resume"} | changed
    if "precision" in changed:
        left_out |= {"scaler"}
    own = [
        override
        for override in record["overrides"]
        if override.partition("=")[0].lstrip("+") not in left_out
        and not (
            "precision" in changed and override.lstrip("+").startswith(("precision.", "scaler."))
        )
    ]
    return shlex.join(["mprun", *own, *smallest.overrides])


def _ramp(ramp: list[Largest]) -> list[str]:
    shown = ramp[-RAMP - 1 :]
    rows = [
        (one.phase, one.module or _OUTSIDE[one.phase], power(one.value), _name(one.dtype))
        for one in shown
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = []
    for row, one in zip(rows, shown, strict=True):
        cells = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False))
        beyond = not one.value <= torch.finfo(torch.float16).max
        lines.append(f"{cells}  {row[3]}{'  beyond FP16' if beyond else ''}")
    if len(ramp) > len(shown):
        lines.insert(0, f"... {len(ramp) - len(shown)} before")
    return lines


def _name(dtype: torch.dtype) -> str:
    return DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))


def _plain(value: float | None):
    return str(value) if value is not None and not math.isfinite(value) else value
