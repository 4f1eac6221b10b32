"""Turn the records of finished runs into a verdict per precision mode; imports no torch.

load (run.json, metrics.jsonl), or for logs of other tools an entry point of `mprun.readers`
-> grouping (which runs belong together, which are baselines)
-> decision (divergence, then equivalence, of one run each one_pair) -> sentence (in words)
-> verdict (of each mode)
-> wording (console, report.md, results.json), report (report.html and its figures),
tensorboard_summary, notebook.

`findings` holds the plain data that the steps exchange; `compare` runs all of them.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mprun import __version__
from mprun.entry_points import announced, loaded
from mprun.errors import BadInput, needing

if TYPE_CHECKING:
    from mprun.comparison.findings import Group, RunData
    from mprun.comparison.notebook import ComparedRuns


def compare(
    paths: str | Path | Sequence[str | Path],
    *,
    baseline: str | Path | None = None,
    allow: str | Sequence[str] = (),
    metric: str | None = None,
    margin: float | None = None,
    looks: Sequence[int] = (),
    scalar: str | None = None,
    step: str | None = None,
    higher_is_better: bool = False,
    lower_is_better: bool = False,
    absolute: bool = False,
    paired: bool = False,
    pair_sd: float | None = None,
) -> "ComparedRuns":
    """Judge whether each precision mode matches FP32, as `mprun compare` does.

    The function writes nothing. A notebook shows the result as a table.

    Args:
        paths: Run directories, or folders that contain runs (searched to any depth). With
            `scalar`: "LABEL=PATH[,PATH...]" for each label, as on the command line.
        baseline: The precision mode of the baseline's runs, or a path that contains these runs
            (None: the mode that the runs record as compare.baseline).
        allow: Keys in which runs may nevertheless differ from the baseline.
        metric: An evaluation metric to use instead of the runs' compare.metric.
        margin: A margin to use instead of the runs' compare.margin. The margin is
            relative (0.01 = 1 %) for losses and distances, otherwise in the metric's unit, such as
            points for top1.
        looks: Planned numbers of seeds at which a verdict is computed, in ascending order, at least
            3.
        scalar: Name of the scalar to compare in logs of other tools. Without `scalar`, the function
            compares runs of mprun.
        step: The column that counts the steps; only with `scalar`.
        higher_is_better: Whether higher values of the metric are better; needs `margin`. A `scalar`
            needs `higher_is_better` or `lower_is_better`, and so does a metric whose direction the
            runs do not record.
        lower_is_better: Whether lower values of the metric are better.
        absolute: Whether the margin is in the metric's unit, not relative to the baseline.
        paired: Whether every label lists its runs in the same order of seeds; only with `scalar`.
        pair_sd: Known standard deviation of the gap between a mode's run and the baseline's run, in
            the margin's unit. It is allowed only if both have one run.

    Returns:
        The comparison: `verdicts`, `to_dict()`, `write(folder)`.

    Raises:
        BadInput: Nothing can be compared, or options contradict each other; the message names
            options as on the command line.
        Damaged: A record cannot be read.
        MissingExtra: A package of `pip install 'mprun[notebook]'` is not installed.
    """
    with needing("notebook"):  # imported here: reading one run needs no statistics
        from mprun.comparison.equivalence import ALPHA
        from mprun.comparison.gap_growth import follow_gaps
        from mprun.comparison.grouping import group_runs
        from mprun.comparison.load import load_runs
        from mprun.comparison.looks import nominal_alpha
        from mprun.comparison.notebook import ComparedRuns
        from mprun.comparison.verdict import assess
        from mprun.record.console import counted

    places = [str(path) for path in _several(paths)]
    if not places:
        raise BadInput("compare: needs at least one PATH, e.g. outputs")
    if isinstance(baseline, str) and ("/" in baseline or Path(baseline).exists()):
        baseline = Path(baseline)
    asked: dict[str, Any] = {
        "--baseline": baseline,
        "--allow": tuple(map(str, _several(allow))),
        "--metric": metric,
        "--margin": None if margin is None else checked_margin(margin),
        "--pair-sd": None if pair_sd is None else checked_pair_sd(pair_sd),
        "--absolute": absolute,
        "--scalar": scalar,
        "--higher-is-better": higher_is_better,
        "--lower-is-better": lower_is_better,
        "--paired": paired,
        "--step": step,
    }
    _refuse_contradictions(asked)
    plan = planned_looks(looks) if looks else []
    directed = higher_is_better or lower_is_better
    if scalar is None:
        runs, notes = load_runs(places, baseline if isinstance(baseline, Path) else None)
        there = sorted({run.mode for run in runs})
        if isinstance(baseline, str) and baseline not in there:
            raise BadInput(
                f"--baseline {baseline}: is neither a path nor the mode of a run; there are runs "
                f"of {', '.join(there)}"
            )
        judged_otherwise = metric is not None or margin is not None
        protos, refused = group_runs(runs, asked["--allow"], baseline, judged_otherwise)
    else:
        reader = announced("mprun.readers").get("scalar")
        if reader is None:
            raise BadInput(f"--scalar {scalar}: needs mprun.extensions.logs, which is missing here")
        foreign = loaded(reader)(places, scalar, step=step, paired=paired, directed=directed)
        protos, refused, runs, notes = [foreign], [], foreign.baseline.runs, []
        given = asked["--margin"]
        told = "the default of 1 %" if given is None else f"{given:g}, from the command line"
        notes.append(f"margin: {told}")
    if not protos:
        raise BadInput(refused[0] if refused else f"{places[0]}: no runs to compare")
    groups = []
    for proto in counted(protos, "judging configurations"):
        try:
            group = assess(
                proto,
                metric=metric or scalar,
                margin=asked["--margin"],
                looks=plan,
                higher_is_better=higher_is_better if directed else None,
                absolute=absolute,
                pair_sd=asked["--pair-sd"],
            )
        except BadInput as error:  # concerns one group; the others are still compared
            refused.append(f"{error} ({proto.title}: not compared)")
        else:
            follow_gaps(group)
            groups.append(group)
    if not groups:
        raise BadInput(refused[-1].removesuffix(f" ({protos[-1].title}: not compared)"))
    verdicts = [row.verdict for group in groups for row in group.rows]
    if asked["--pair-sd"] is not None and not any(verdict.facts for verdict in verdicts):
        raise BadInput(
            f"--pair-sd {asked['--pair-sd']:g}: needs one run of the baseline and one run of a "
            "mode with the same seed; there is no such pair"
        )
    return ComparedRuns(
        groups=groups,
        not_compared=refused,
        notes=notes,
        stamps=_stamps(asked, runs, groups),
        looks=plan,
        alpha=nominal_alpha(tuple(plan)) if plan else ALPHA,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        version=__version__,
    )


def _several(given: Any) -> list[Any]:
    return [given] if isinstance(given, (str, Path)) else list(given)


def _refuse_contradictions(asked: dict[str, Any]) -> None:
    """Raise BadInput for options that contradict each other."""
    foreign = asked["--scalar"] is not None
    for flag in ("--paired", "--step"):
        if asked[flag] and not foreign:
            raise BadInput(
                f"{flag}: is only allowed with --scalar; runs of mprun record their steps and seeds"
            )
    if asked["--higher-is-better"] and asked["--lower-is-better"]:
        raise BadInput("--higher-is-better, --lower-is-better: give only one of the two")
    for flag in ("--higher-is-better", "--absolute"):
        if asked[flag] and asked["--margin"] is None:
            raise BadInput(f"{flag}: needs --margin, in the unit of the metric")
    for flag in ("--baseline", "--allow", "--metric"):
        if foreign and asked[flag]:
            raise BadInput(f"{flag}: is not allowed with --scalar; it is only for runs of mprun")


def checked_margin(given: str | float) -> float:
    """Return the margin as a number; raise BadInput unless it is above 0 and finite."""
    return _above_zero("--margin", given, "0.01 for 1 %")


def checked_pair_sd(given: str | float) -> float:
    """Return the scatter of pairs as a number; raise BadInput unless it is above 0 and finite."""
    return _above_zero("--pair-sd", given, "0.0006 for 0.06 %")


def _above_zero(flag: str, given: str | float, example: str) -> float:
    with suppress(ValueError):
        if 0 < (value := float(given)) < float("inf"):
            return value
    raise BadInput(f"{flag} {given}: must be a number above 0, e.g. {example}")


def planned_looks(given: Iterable[str | int]) -> list[int]:
    """Return the planned numbers of seeds; raise BadInput for an invalid plan."""
    given = list(given)
    with suppress(ValueError):
        plan = [int(part) for part in given]
        if len(plan) > 1 and plan[0] >= 3 and plan == sorted(set(plan)):
            return plan
    problem = "must be two or more numbers of seeds, ascending from 3, e.g. 3,5,10"
    raise BadInput(f"--looks {','.join(map(str, given))}: {problem}")


def _stamps(asked: dict[str, Any], runs: "list[RunData]", groups: "Sequence[Group]") -> list[str]:
    """Return warnings about how the comparison was requested, and on what it leaves out."""
    stamps = []
    if asked["--allow"]:
        keys = ",".join(asked["--allow"])
        stamps.append(f"--allow {keys}: runs that differ in more than precision")
    for flag in ("--metric", "--margin", "--baseline"):
        given = asked[flag]
        configured = {run.keys.get(f"compare.{flag[2:]}") for run in runs} - {None}
        if given is not None and not isinstance(given, Path) and configured - {given}:
            before = ", ".join(str(value) for value in sorted(configured, key=str))
            stamps.append(f"{flag} {given}: chosen after the runs, which say {before}")
    if asked["--pair-sd"] is not None and asked["--scalar"] is None:
        stamps.append(f"--pair-sd {asked['--pair-sd']:g}: chosen after the runs")
    for flag in ("--higher-is-better", "--lower-is-better"):
        if asked[flag] and asked["--scalar"] is None:
            stamps.append(f"{flag}: said when the runs were compared, not by their task")
    if isinstance(asked["--baseline"], Path):
        stamps.append(f"--baseline {asked['--baseline']}: chosen on the command line")
    found: dict[tuple[str, str], list[str]] = {}  # group and what its verdicts leave out -> modes
    for group, row in [(one, row) for one in groups for row in one.rows]:
        arms = [row.arm, group.baseline.arm]
        # Of an arm's notes those on its missing seeds come first.
        ends = [f"{arm.label}, {note}" for arm in arms for note in arm.notes[: len(arm.missing)]]
        why = f" ({', '.join(ends)})" if ends else ""
        for line in row.verdict.left_out:
            found.setdefault((group.title, line + why), []).append(row.arm.label)
    return stamps + [
        f"{title}: left out of {', '.join(modes)}: {line}" for (title, line), modes in found.items()
    ]
