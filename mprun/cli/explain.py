"""`mprun explain RUN`: replay the step that went wrong, name the operation, try what cures it."""

import json
import math
import shlex
import time
from pathlib import Path

import torch

from mprun.config.compose import compose_config, config_from_record
from mprun.config.user_code import NOTHING, Vouched, is_factory, vouched
from mprun.errors import DONE, BadInput, Damaged
from mprun.numerics import interventions as cures
from mprun.numerics.explanation import Explanation, as_dict, as_text
from mprun.numerics.failure import kept_state, recorded_rows
from mprun.numerics.first_nonfinite import Finding, find_culprit
from mprun.numerics.post_mortem import LAST, explosion, read_post_mortem
from mprun.numerics.replay import Steps, all_finite, restore, same_loss, weights
from mprun.record.run_directory import read_config, read_json
from mprun.training.run import prepare, resolve_device

_USAGE = """\
mprun explain RUN [data.factory=... model.factory=...]
  why did this run diverge, and what is the smallest change that cures it?

RUN is the directory of a run that ended as diverged. The step that went wrong is trained again from
the state that the run kept (numerics/failure; without it from its newest checkpoint or its start),
with every operation watched, forward and backward. Printed: the first operation whose inputs were
finite and whose output was not, the largest values on the way there, and what became of each change
that was tried on the same step and five more. The run itself is not changed.

Options
  --json             everything as JSON
  --no-cures         only look for the cause
  --config-dir DIR   options of your own that name the run's data.factory, model.factory
Your own code (data=custom, model=custom) runs only where you name it as the run did.

Exit codes: 0 explained, or not found and said so; 2 bad input (the run did not diverge);
4 damaged record.
"""
CPU = torch.device("cpu")
# A run whose loss exploded was damaged long before its last step: changes are tried from its start
# if it gets to the bad step within this time.
LONGEST_CONTROL_S = 60.0


def main(arguments: list[str]) -> int:
    """Entry point of the verb; returns the exit code."""
    if "--help" in arguments or "-h" in arguments:
        print(_USAGE, end="")
        return DONE
    rest, config_dir = _without_config_dir(arguments)
    known = {"--json", "--no-cures"}
    for argument in rest:
        if argument.startswith("-") and argument not in known:
            allowed = "--json, --no-cures, --config-dir"
            raise BadInput(f"explain {argument}: unknown option (allowed: {allowed})")
    factories = [argument for argument in rest if is_factory(argument)]
    paths = [a for a in rest if not a.startswith("-") and a not in factories]
    if len(paths) != 1:
        raise BadInput(f"explain: {len(paths)} run directories given, needs one")
    explanation = explain(
        Path(paths[0]),
        with_cures="--no-cures" not in arguments,
        given=vouched(factories, config_dir),
    )
    if "--json" in arguments:
        print(json.dumps(as_dict(explanation), indent=1, allow_nan=False))
    else:
        print("\n".join(as_text(explanation)))
    return DONE


def _without_config_dir(arguments: list[str]) -> tuple[list[str], str | None]:
    rest, config_dir = [], None
    remaining = iter(arguments)
    for argument in remaining:
        flag, given, value = argument.partition("=")
        if flag != "--config-dir":
            rest.append(argument)
            continue
        config_dir = value if given else next(remaining, "")
        if not config_dir:
            raise BadInput("--config-dir: needs a folder")
    return rest, config_dir


def explain(directory: Path, *, with_cures: bool = True, given: Vouched = NOTHING) -> Explanation:
    """Explain the run in `directory`; BadInput if it neither diverged nor failed.

    given: the names of the user's own code that may be imported; the run's must be among them.
    """
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
        return prepare(config_from_record(config, given), device, threads)

    kept = kept_state(directory, record, plain, build)
    post_mortem = read_post_mortem(directory)
    lines = post_mortem["classification"] if post_mortem else []
    finding = _find(build, plain, kept)
    replay = _replay_in_words(kept, finding, post_mortem, note)
    tried, from_start = [], False
    if with_cures and finding.reproduced and finding.verdict in ("operation", "not found"):
        tried, from_start = _try_all(build, plain, kept, finding, directory)
    smallest = next((one for one in tried if one.cures), None)
    command = None if smallest is None else _command(record, smallest)
    return Explanation(
        str(directory), status, cause, lines, replay, finding, tried, from_start, smallest, command
    )


def _of_exception(directory: Path, cause: str) -> Explanation:
    replay = "not replayed: the run ended with an exception"
    if cause.startswith("IndexError"):
        replay += "; an index in the batch is outside the table it selects from (an embedding)"
    return Explanation(
        str(directory),
        "failed",
        cause,
        [f"exception: {cause}"],
        replay,
        None,
        [],
        False,
        None,
        None,
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


def _try_all(
    build, plain: dict, kept: dict, finding: Finding, directory: Path
) -> tuple[list[cures.Tried], bool]:
    """What became of each change, and whether they were tried from the start of the run.

    From there where the loss had grown before the bad step, or where nothing cures that step: the
    run was damaged earlier.
    """
    if finding.kind == "evaluation":
        return [], False
    rows = recorded_rows(directory)
    first = next((row["loss"] for row in rows if row["step"] == 1), None)
    origin = cures.Origin(kept, finding.step, limit=cures.limit_of(first))
    start = cures.Origin(kept, finding.step, from_start=True, limit=origin.limit)
    options = {
        name: compose_config([f"scaler={name}"]).as_dict()["scaler"]
        for name in ("none", "static", "dynamic")
    }

    def try_from(place: cures.Origin, exploding: bool) -> list[cures.Tried]:
        found = cures.changes(plain, finding, options, exploding=exploding)
        return cures.try_changes(build, found, place)

    before = [row for row in rows if row["step"] <= finding.step]
    exploding = explosion(before[-LAST:]) is not None
    if exploding and _start_leads_there(build, plain, start, rows):
        return try_from(start, exploding), True
    tried = try_from(origin, exploding)
    cured = any(one.cures for one in tried)
    if not cured and finding.step > 1 and _start_leads_there(build, plain, start, rows):
        return try_from(start, True), True
    return tried, False


def _start_leads_there(build, plain: dict, origin: cures.Origin, rows: list[dict]) -> bool:
    """Whether the run trained from its start, unchanged, gives its losses and the same failure."""
    losses = {row["step"]: row["loss"] for row in rows}
    steps: Steps = cures.start_from(build(plain), origin)
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
