"""`mprun explain RUN`: name the operation that broke a run, and try cures."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mprun.cli.arguments import Arguments, number
from mprun.config.compose import config_from_record, only_in_script
from mprun.config.keys import current
from mprun.config.overrides import without
from mprun.config.schema import MAX_STEPS, PrecisionConfig, RunConfig
from mprun.config.switches import in_mode, mode_at
from mprun.config.trust import NOTHING, Vouched, vouched
from mprun.errors import BadInput, Damaged
from mprun.extensions.diagnosis.commands import (
    SECONDS,
    add_seconds,
    announce,
    command,
    page,
    page_width,
    record_of,
    refused,
    say_seconds,
    split_words,
)
from mprun.numerics.exponent_shares import FP16_MAX
from mprun.numerics.post_mortem import bad_losses, power, read_post_mortem
from mprun.record.layout import aligned
from mprun.record.metrics_columns import MetricsColumns, read_columns
from mprun.record.run_directory import read_config
from mprun.record.run_record import read_record, refuse_older_state

if TYPE_CHECKING:
    from mprun.extensions.diagnosis.far_results import Far
    from mprun.extensions.diagnosis.first_nonfinite import Finding
    from mprun.extensions.diagnosis.interventions import Options
    from mprun.extensions.diagnosis.observation import Largest
    from mprun.extensions.diagnosis.trials import Budget, Tried

_MARGIN = 10  # columns of a title, left of its lines
RAMP = 12  # modules printed before the culprit
_OUTSIDE = {"forward": "(the model itself)", "loss": "(the loss)", "backward": "(no module)"}
_WHAT = """\
Why did this run diverge or end worse, and which smallest change cures it?

RUN is the directory of a run that ended as diverged. The failing step is trained again from the
state that the run kept (numerics/failure; else from its newest checkpoint or its start). Every
operation is watched, forward and backward. It prints the first operation with finite inputs and a
non-finite output, and the largest values before it. It also prints the result of each change, tried
on the same step and five more; the smallest that cures these is tried on a hundred. The run itself
is not changed.

A run in 16 bits or fewer may also be done: why did it end worse? Its first steps are trained again,
as it did, in FP32, and with each change. It prints what casts of linear layers lose and the first
operation whose results are far from FP32's. The cure is the smallest change that takes away half of
the gap to FP32.

So may any run that skipped an update because the loss itself was not finite. Its batch is looked
at; if that is sound, the run is trained again up to that step.
"""
_MORE = """\
Your own code (data=custom, model=custom) only runs if you name it as the run did.

Exit codes: 0 explained, or reported as not found; 2 bad input (as a run in FP32 that
did not diverge, with a finite loss);
4 damaged record.
"""


@dataclass(frozen=True, slots=True)
class Explanation:
    """The explanation of a failed run.

    finding, tried: None and empty for a run that failed with an exception. verdict: without a
    finding. classification: from the
    post-mortem. from_start: whether changes were tried from the start of the run instead of its bad
    step. command: the run's command with the cure. far: what is far from FP32's in the first step.
    """

    run: str
    status: str
    cause: str
    classification: list[str]
    replay: str
    finding: "Finding | None" = None
    tried: list["Tried"] = field(default_factory=list)
    from_start: bool = False
    command: str | None = None
    verdict: str = "exception"
    reasons: list[str] = field(default_factory=list)
    casts: list[list[str]] = field(default_factory=list)
    far: "Far | None" = None

    @property
    def smallest(self) -> "Tried | None":
        """Return the first change that cures, or None."""
        return next((one for one in self.tried if one.cures), None)


def main(arguments: list[str]) -> int:
    parser = Arguments("explain", _WHAT, _MORE)
    add = parser.add_argument
    what = "a run; its data.factory=, model.factory=, and the data.root= that it shall read"
    add("words", nargs="*", metavar="RUN|NAME=VALUE", help=what)
    add("--json", action="store_true", help="print all results as JSON")
    add(
        "--no-cures",
        action="store_true",
        help="only look for the cause of the failure, and try no changes against it",
    )
    most = "of a run that is done: train its first N steps (400, as far as the seconds allow)"
    add("--steps", type=number("--steps", 1, MAX_STEPS, "a number of steps", whole=True),
        metavar="N", help=most)  # fmt: skip
    add_seconds(parser)
    own = "your options that name the run's data.factory, model.factory, data.root"
    add("--config-dir", metavar="DIR", help=own)
    given = parser.parse(arguments)
    split_words(given, parser)
    if given.run is None:
        parser.error("needs a run directory")
    explanation = explain(
        given.run,
        with_cures=not given.no_cures,
        given=vouched(given.overrides, given.config_dir),
        config_dir=given.config_dir,
        steps=given.steps,
        seconds=given.seconds,
    )
    return page(as_dict(explanation), as_text(explanation), given.json)


def explain(
    directory: Path,
    *,
    with_cures: bool = True,
    given: Vouched = NOTHING,
    config_dir: str | None = None,
    steps: int | None = None,
    seconds: float | None = None,
) -> Explanation:
    """Explain a run; BadInput if there is nothing to explain, Damaged if it is not whole.

    given: code that may be imported and paths that may be used. config_dir: the user's options,
    among which a change may be found. steps: of a run that is done. seconds: for all trials, 60;
    any number of them with `steps`.
    """
    record = record_of("explain", directory)
    status, cause = record.get("status"), str(record.get("cause"))
    if status == "failed":
        replay = "not replayed: the run ended with an exception"
        if cause.startswith("IndexError"):
            replay += "; an index in the batch is outside the table it selects from (an embedding)"
        return Explanation(str(directory), "failed", cause, [f"exception: {cause}"], replay)
    if "script" in record:
        raise refused("explain", directory, record, only_in_script(record))
    bad = read_columns(directory / "metrics.jsonl") if status == "done" and steps is None else None
    skips = [] if bad is None else bad.nonfinite_skips.tolist()
    done = status == "done" and not skips
    if done:  # ended worse?
        done = _is_lower(current(read_config(directory)).get("precision", {}))
    if status != "diverged" and not done and not skips:
        raise refused("explain", directory, record, _nothing_to_explain(record))
    if steps is not None and not done:
        raise BadInput(
            f"--steps {steps}: the run diverged; --steps is only for a run that ended as done"
        )
    needed = ["environment.device", "environment.threads"]
    needed += ["last_step", "cause"] if status == "diverged" else []
    environment = read_record(directory, *needed)["environment"]
    refuse_older_state(f"explain {directory}", record)
    config = current(read_config(directory))
    checked = config_from_record(config, given)  # before torch is imported
    which = "last" if status == "diverged" else "first"
    announce(f"explain: takes the {which} steps of {directory} again")
    if seconds is None and steps is None:
        seconds = SECONDS
    if seconds is not None and (with_cures or done):
        say_seconds("explain", seconds)

    import torch

    from mprun.extensions.diagnosis.interventions import options_of
    from mprun.extensions.diagnosis.trials import Budget
    from mprun.training.run import prepare, resolve_device

    # On a CPU, with a note, if the run's GPU is missing here.
    missing = environment["device"] == "cuda" and not torch.cuda.is_available()
    device = resolve_device("cpu" if missing else environment["device"])

    def build(config: dict):
        checked, threads = config_from_record(config, given), environment["threads"]
        return prepare(checked, device, threads)

    budget = Budget() if seconds is None else Budget(seconds)
    run = _Run(directory, record, config, checked, build, missing, budget)
    options = options_of(config_dir) if with_cures else None
    if done:
        found = _of_ending(run, steps, options)
    else:
        found = _of_step(run, options, bad)
    cure = found.smallest
    return found if cure is None else replace(found, command=command_with(cure, record, config_dir))


class _Run(NamedTuple):
    """A run to be explained. config: as plain values. build: builds what such values describe."""

    directory: Path
    record: dict
    config: dict
    checked: RunConfig
    build: Callable[[dict], Any]
    without_gpu: bool
    budget: "Budget"

    @property
    def mode(self) -> PrecisionConfig:
        return self.checked.precision

    def in_mode_of(self, index: int) -> "_Run":
        """Return the run as one that is throughout in the mode of step `index` (from 0)."""
        if not self.mode.switch:
            return self
        mode = mode_at(self.checked, index, self.record["steps"])
        config = self.config | {"precision": asdict(mode)}
        return self._replace(config=config, checked=in_mode(self.checked, mode))


def _is_lower(precision: dict) -> bool:
    """Return whether a mode computes or stores anything in less than FP32."""
    matmul = precision.get("matmul") or {}
    dtypes = [precision.get(key) for key in ("autocast_dtype", "param_dtype")]
    later = any(_is_lower(one["to"]) for one in precision.get("switch", ()))
    lower = any(dtype not in (None, "fp32") for dtype in dtypes)
    return bool(matmul.get("input")) or lower or later


def _of_ending(run: _Run, steps: int | None, options: "Options | None") -> Explanation:
    """Return what its mode costs a run that is done; steps, options: as for `find_ending`."""
    from mprun.extensions.diagnosis.changes_of_mode import ChangesOfMode
    from mprun.extensions.diagnosis.worse_ending import find_ending
    from mprun.numerics.failure import recorded_rows

    rows, start = recorded_rows(run.directory), (run.build, run.config, run.mode)
    skipped, ended = run.record.get("skipped") or 0, run.record.get("last_step") or 0
    given = (run.build, run.config, run.checked, options or {})
    changes = ChangesOfMode(*given, ended, skipped)
    ending = find_ending(
        *start, rows, steps=steps, options=options, changes=changes, budget=run.budget
    )
    replay, *results = ending.in_words()
    if changes.skips_many:  # with losses that were finite
        results.append(
            f"{skipped} of {ended} updates were skipped: the loss scale did not settle in time"
        )
    elif skipped:
        results.append(f"{skipped} skipped updates while the loss scale settles are normal")
    found = Explanation(str(run.directory), "done", "", results, replay + _note(run.without_gpu))
    verdict = "casts" if run.mode.matmul.input else "mode"
    found = replace(found, casts=ending.casts, tried=ending.tried)
    found = replace(found, far=changes.far, reasons=changes.reasons)
    return replace(found, from_start=True, verdict=verdict)


def _before_the_step(run: _Run, bad: MetricsColumns | None) -> tuple[dict, dict]:
    """Return the state before the step to be explained, and what is known, as in a post-mortem."""
    from mprun.numerics.failure import kept_state, skipped_state

    if bad is None:
        kept = kept_state(run.directory, run.record, run.config, run.build)
        known = read_post_mortem(run.directory)
        return kept, known or {"classification": [], "failure": {}}
    steps = bad.nonfinite_skips.tolist()
    told = bad_losses(bad, run.record.get("bad_batches", {}))
    kept = skipped_state(run.directory, run.config, run.build, steps)
    return kept, {"classification": [told], "failure": {}}


def _of_step(run: _Run, options: "Options | None", bad: MetricsColumns | None) -> Explanation:
    """Return what broke a run, or from `bad` why the loss was not finite in skipped updates.

    options: for the changes to try, None: try none.
    """
    from mprun.extensions.diagnosis.casts import CastMeter, cast_changes, sentences
    from mprun.extensions.diagnosis.changes_of_mode import far_from_fp32
    from mprun.extensions.diagnosis.first_nonfinite import find_culprit
    from mprun.extensions.diagnosis.interventions import find_cures
    from mprun.numerics.failure import recorded_rows
    from mprun.numerics.replay import resume_from

    directory, config = run.directory, run.config
    kept, known = _before_the_step(run, bad)
    built = run.build(config)
    try:
        built.stepper.follow(kept["step"] - 1)  # the state is that of the mode until then
        built.task.load_state_dict(kept["task"])
        built.stepper.follow(kept["step"])
        run = run.in_mode_of(kept["step"])
        config = run.config  # changes are tried in the mode in force
        steps = resume_from(built, kept)
    except (ValueError, KeyError) as error:
        raise Damaged(f"numerics/failure: {error}") from None
    with CastMeter(built.task, run.mode) as meter:
        finding = find_culprit(steps, kept["kind"])
    replay = _replay_in_words(finding, known["failure"], run.without_gpu)
    status, cause = run.record["status"], run.record.get("cause") or ""
    start = (str(directory), status, str(cause), known["classification"])
    losses, matmul = meter.read(), run.mode.matmul
    found = Explanation(*start, replay, finding, casts=sentences(losses, matmul))
    curable = finding.reproduced and finding.verdict in ("operation", "not found")
    if options is None or not curable:
        return found
    rows, casts = recorded_rows(directory), cast_changes(matmul, losses)
    given = (run.build, config, kept, finding, rows, options, casts)
    tried, from_start = find_cures(*given, budget=run.budget)
    # What broke the step may have been damaged from the first one on.
    far = far_from_fp32(run.build, config) if from_start and not matmul.input else None
    return replace(found, tried=tried, from_start=from_start, far=far)


def _nothing_to_explain(record: dict) -> str:
    status = record.get("status")
    if status in ("preempted", "running"):
        return f"status {status}, no step to explain"
    return f"status {status} in FP32: no step failed, and no mode is to be explained"


def _replay_in_words(finding: "Finding", failure: dict, without_gpu: bool) -> str:
    what = "the evaluation after step" if finding.kind == "evaluation" else "step"
    again = "fails again" if finding.reproduced else "does not fail again"
    start = "on its batch" if finding.kind == "skip" else "from its kept state"
    text = f"{what} {finding.step} {start}{_note(without_gpu)}: {again}"
    if not failure.get("compared"):
        return text
    different = failure["first_difference"]
    same = "bit-equal to the run's" if different is None else f"other from step {different} on"
    return f"{text}, its losses {same}"


def _note(without_gpu: bool) -> str:
    return " (on a CPU: the run's GPU is not here)" if without_gpu else ""


def command_with(cure: "Tried", record: dict, config_dir: str | None = None) -> str:
    """Return the run's command line with the cure in it."""
    changed = [override.partition("=")[0] for override in cure.overrides]
    scaler = ["scaler"] if "precision" in changed else []  # another mode brings its own
    own = without(record["overrides"], "output_dir", "resume", *changed, *scaler)
    return command(config_dir, [*own, *cure.overrides])


def as_dict(explanation: Explanation) -> dict:
    from mprun.extensions.diagnosis.first_nonfinite import in_words, reason_of
    from mprun.precision.policy import dtype_name

    finding, cure = explanation.finding, explanation.smallest
    content = _chosen(explanation, "run status cause classification replay casts reasons") | {
        "verdict": finding.verdict if finding is not None else explanation.verdict,
        "far": explanation.far and asdict(explanation.far),
        "tried_from_start": explanation.from_start,
        "tried": [
            _chosen(one, "cures result steps") | {"change": one.overrides}
            for one in explanation.tried
        ],
        "smallest_cure": None if cure is None else cure.overrides,
        "command": explanation.command,
    }
    if finding is None:
        return content
    event, culprit = finding.event, None
    if event is not None:
        names = "phase module operation tensor dtype result count of largest_input"
        culprit = _chosen(event, names) | {"dtype": dtype_name(event.dtype)}
        culprit |= {"in_fp32": event.would_be, "reason": reason_of(event)}
    content |= _chosen(finding, "step kind reproduced") | {"in_words": in_words(finding)}
    content |= _chosen(finding, "details weights") | {"culprit": culprit}
    content["ramp"] = [
        _chosen(one, "phase module") | {"largest": one.value, "dtype": one.dtype}
        for one in finding.ramp
    ]
    return content


def _chosen(record: object, names: str) -> dict:
    return {name: getattr(record, name) for name in names.split()}


def as_text(explanation: Explanation) -> list[str]:
    from mprun.extensions.diagnosis.casts import percent
    from mprun.extensions.diagnosis.first_nonfinite import in_words
    from mprun.extensions.diagnosis.interventions import LONG, WORSE
    from mprun.extensions.diagnosis.trials import FP32, PART_OF_FP32
    from mprun.extensions.diagnosis.worse_ending import PART

    start = ": ".join(filter(None, (explanation.run, explanation.status, explanation.cause)))
    finding, tried, cure = explanation.finding, explanation.tried, explanation.smallest
    parts = {"run": [start, *explanation.classification], "replay": [explanation.replay]}
    if finding is not None:
        parts |= {"culprit": in_words(finding), "ramp": _ramp(finding.ramp)}
    far = [] if explanation.far is None else [explanation.far.in_words()]
    if why := far + explanation.reasons:
        parts["why"] = why
    if explanation.casts:
        parts["casts"] = [
            f"{'  ' * (n > 0)}{line}" for own in explanation.casts for n, line in enumerate(own)
        ]
    if tried:
        since = "from the start of the run up to" if explanation.from_start else "on"
        verdicts = {True: "cures", False: "does not cure", None: "-"}
        rows = [(o.change, f"{verdicts[o.cures]:<13}", o.taken, o.result) for o in tried]
        rules = [
            f"{since} that step and five more; cures: finite, at most {WORSE:g} times FP32's loss",
            f"the smallest that cures up to {LONG} more: at most {percent(PART_OF_FP32)} above "
            "FP32, or of what FP32 learnt",
        ]
        if finding is None:
            rule = f"the same steps; cures: takes away {percent(PART)} of the gap to FP32, and "
            rules = [f"{rule}leaves at most {percent(PART_OF_FP32)}; parts need not add up"]
        parts["tried"] = [*rules, *aligned(rows, width=page_width(beside=_MARGIN))]
        fp32 = any(one.overrides == FP32 and one.cures is False for one in tried)
        fails_too = "; FP32 fails as well: the recipe is at fault, not the precision"
        none = "none of these" if finding else f"not found: none takes away {percent(PART)}"
        parts["cure"] = [f"{none}{fails_too if fp32 else ''}"]
    if cure is not None:
        smallest = "the smallest of them" if finding else f"the smallest change; {cure.result}"
        found = f"{cure.change} ({smallest})"
        parts["cure"] = [found, str(explanation.command)]
    return [
        f"{title if row == 0 else '':<{_MARGIN}}{line}"
        for title, lines in parts.items()
        for row, line in enumerate(lines)
    ]


def _ramp(ramp: list["Largest"]) -> list[str]:
    if not ramp:
        return []
    lines, shown = ["largest absolute values up to there (FP16 ends at 65504, 2^16)"], []
    for one in ramp[-RAMP - 1 :]:
        dtype = f"{one.dtype}{'' if abs(one.value) <= FP16_MAX else '  beyond FP16'}"
        place = "(the loss)" if one.module == "loss" else one.module or _OUTSIDE[one.phase]
        shown.append((one.phase, place, power(one.value), dtype))
    if (before := len(ramp) - len(shown)) > 0:
        lines.append(f"... {before} before")
    return lines + aligned(shown, width=page_width(beside=_MARGIN))
