"""`mprun compare PATH...`: a verdict per precision mode, a report, TensorBoard summary runs."""

import json
import os
import re
import sys
from argparse import Namespace
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from mprun import __version__
from mprun.cli.arguments import Arguments
from mprun.compare.equivalence import ALPHA, checked_looks, nominal_alpha
from mprun.compare.findings import Comparison, Group, RunData
from mprun.compare.grouping import group_runs
from mprun.compare.load import load_runs
from mprun.compare.paper import paper_markdown, paper_rows
from mprun.compare.text import console, markdown, results
from mprun.compare.verdict import assess
from mprun.errors import DIVERGED, DONE, BadInput

_WHAT = """\
Does each precision mode match FP32?

PATH is a run directory or a folder that holds runs (searched to any depth). Verdicts rest on
metrics.jsonl and run.json alone; the report also shows probes (numerics=on). Per mode: a
divergence rule, then an equivalence test (paired TOST over seeds) against the margin that the
runs' configuration fixed (compare.metric, compare.margin)."""
_MORE = """\
Logs of other tools, a path a run:
  mprun compare --tag train/loss fp32=base0,base1,base2 amp=amp0,amp1,amp2
  mprun compare --tag loss 'fp32=export.csv#fp32-*' 'amp=export.csv#amp-*'
  mprun compare --tag loss fp32=seed0:a.csv,seed1:b.csv amp=seed0:c.csv,seed1:d.csv

Read are TensorBoard events, tables (Lightning, Keras, timm, ultralytics; FILE#RUN is one run of
an export of Weights & Biases), trainer_state.json, JSON lines, MLflow's runs, and the logs of
torchtitan, Megatron and MLPerf. Such runs are paired only where the seed of every run is named
(seed0:PATH, or "seed0", "seed=0", "seed_0" in each path) or --paired says so; else every run
counts, unpaired (Welch). Equal curves are one run. Logs of other lengths are compared at the steps
that all have.

Exit codes: 0 compared, 2 bad input or nothing to compare, 3 --check failed, 4 damaged record."""
_FLAGS = {
    "--tensorboard": "write summary runs (mean, lower, upper, margin charts) for TensorBoard",
    "--paper": "our result beside the row of Micikevicius et al. for the same model",
    "--check": "exit code 3 unless every mode matches and nothing was left out",
    "--no-report": "print only",
    "--higher-is-better": "the --tag is an accuracy or a score (--margin is then absolute)",
    "--lower-is-better": "it is none (goes without saying for loss, error, perplexity)",
    "--absolute": "the --margin is in the metric's own unit, not relative to the baseline",
    "--paired": "runs of --tag are listed in the order of the same seeds in every label",
}


def main(words: list[str]) -> int:
    """Entry point of the verb; returns the exit code."""
    options = parse(words)
    comparison = compare(options)
    beside = _beside(options)
    report = None if options.no_report else _write(comparison, options, beside / "compare")
    if options.tensorboard:
        from mprun.compare.tensorboard_summary import write_summaries

        summaries = write_summaries(comparison, beside)
        print(f"tensorboard --logdir {summaries}", file=sys.stderr)
    if options.json:
        print(json.dumps(results(comparison), indent=1, allow_nan=False))
    else:
        print((markdown if options.markdown else console)(comparison))
        if options.paper:
            print(paper_markdown(paper_rows(comparison)))
        if report is not None:
            print(f"report: {report}")
    return DIVERGED if options.check and not _all_match(comparison) else DONE


def parse(words: Sequence[str]) -> Namespace:
    """The options, checked; BadInput for anything that is none."""
    arguments = Arguments("compare", _WHAT, _MORE)
    add = arguments.add_argument
    add("paths", nargs="*", metavar="PATH", help="with --tag: LABEL=PATH[,PATH...], a path a run")
    what = "the runs below PATH are the baseline (default: precision=fp32, scaler=none)"
    add("--baseline", type=Path, metavar="PATH", help=what)
    what = "compare although these keys differ from the baseline's (the report says so)"
    add("--allow", type=_keys, default=(), metavar="KEY[,KEY...]", help=what)
    add("--metric", metavar="NAME", help="another metric of the evaluation than compare.metric")
    what = "another margin than compare.margin: relative (0.01 = 1 %%) for losses and distances, "
    what += "percentage points for top1 and top5 (the report says so)"
    add("--margin", type=_margin, metavar="X", help=what)
    what = "verdicts at these numbers of seeds, with an error rate of 5 %% (normal noise) over all"
    what += " looks"
    add("--looks", type=_looks, default=[], metavar="3,5,10", help=what)
    add("--tag", metavar="NAME", help="compare this scalar of other tools' logs")
    what = "with --tag: what counts the steps, where it is not step, iteration or epoch"
    add("--step", metavar="COLUMN", help=what)
    what = "folder of the report (default: compare/ beside the runs)"
    add("--out", type=Path, metavar="DIR", help=what)
    for flag, what in _FLAGS.items():
        add(flag, action="store_true", help=what)
    add("--json", action="store_true", help="print results.json instead of a table")
    add("--markdown", action="store_true", help="print report.md instead of a table")
    options = arguments.parse(list(words))
    if not options.paths:
        arguments.error("needs at least one PATH, e.g. outputs")
    _check_belonging(options)
    return options


def _check_belonging(options: Namespace) -> None:
    """BadInput for options that do not go together."""
    if options.json and options.markdown:
        raise BadInput("--json, --markdown: give one of the two")
    foreign = {"higher_is_better", "lower_is_better", "paired", "step"}
    for name in sorted(foreign if options.tag is None else ()):
        if getattr(options, name):
            flag = "--" + name.replace("_", "-")
            raise BadInput(f"{flag}: only with --tag; a run of mprun knows its metrics and seeds")
    if options.higher_is_better and options.lower_is_better:
        raise BadInput("--higher-is-better, --lower-is-better: give one of the two")
    for flag, given in (
        ("--higher-is-better", options.higher_is_better),
        ("--absolute", options.absolute),
    ):
        if given and options.margin is None:
            raise BadInput(f"{flag}: needs --margin, in the unit of the metric")
    if options.tag is not None and (options.baseline or options.allow or options.metric):
        raise BadInput("--tag: foreign logs have no --baseline, --allow or --metric")


def _keys(text: str) -> tuple[str, ...]:
    return tuple(key for key in text.split(",") if key)


def _margin(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 0 < value < float("inf"):
        raise BadInput(f"--margin {text}: must be a number above 0, e.g. 0.01 for 1 %")
    return value


def _looks(text: str) -> list[int]:
    try:
        return list(checked_looks([int(part) for part in text.split(",")]))
    except ValueError:
        raise BadInput(
            f"--looks {text}: must be two or more numbers of seeds, ascending from 3, e.g. 3,5,10"
        ) from None


def compare(options: Namespace) -> Comparison:
    """Read, group and judge; writes nothing. BadInput where nothing can be compared."""
    if options.tag is None:
        runs, notes = load_runs(options.paths, options.baseline)
        protos, refused = group_runs(
            runs,
            allow=options.allow,
            baseline_path=options.baseline,
            judged_otherwise=options.metric is not None or options.margin is not None,
        )
    else:
        from mprun.compare.external_logs import load_foreign, refuse_unknown_direction

        if not (options.higher_is_better or options.lower_is_better):
            refuse_unknown_direction(options.tag)
        foreign = load_foreign(options.paths, options.tag, step=options.step, paired=options.paired)
        protos, refused, runs, notes = [foreign], [], foreign.baseline.runs, []
    if not protos:
        raise BadInput(refused[0] if refused else f"{options.paths[0]}: no runs to compare")
    groups = []
    for proto in protos:
        try:
            group = assess(
                proto,
                metric=options.metric or options.tag,
                margin=options.margin,
                looks=options.looks,
                higher_is_better=options.higher_is_better,
                absolute=options.absolute,
            )
        except BadInput as error:  # of one group: the others are compared all the same
            refused.append(f"{error} ({proto.title}: not compared)")
        else:
            groups.append(group)
    if not groups:
        raise BadInput(refused[-1].removesuffix(f" ({protos[-1].title}: not compared)"))
    return Comparison(
        groups=groups,
        not_compared=refused,
        notes=notes,
        stamps=_stamps(options, runs) + _left_out(groups),
        looks=options.looks,
        alpha=nominal_alpha(tuple(options.looks)) if options.looks else ALPHA,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        version=__version__,
    )


def _stamps(options: Namespace, runs: list[RunData]) -> list[str]:
    """What the reader must know of how the comparison was asked for."""
    stamps = []
    if options.allow:
        stamps.append(f"--allow {','.join(options.allow)}: runs that differ in more than precision")
    for name, given in (("metric", options.metric), ("margin", options.margin)):
        configured = {run.keys.get(f"compare.{name}") for run in runs} - {None}
        if given is not None and configured - {given}:
            before = ", ".join(str(value) for value in sorted(configured, key=str))
            stamps.append(f"--{name} {given}: chosen after the runs, which say {before}")
    if options.tag is not None:
        told = "the default of 1 %" if options.margin is None else f"--margin {options.margin:g}"
        stamps.append(f"foreign logs name no margin: {told} was taken when they were compared")
    if options.baseline is not None:
        stamps.append(f"--baseline {options.baseline}: chosen on the command line")
    return stamps


def _left_out(groups: Sequence[Group]) -> list[str]:
    """What no verdict is on, each once, with the modes that it is left out of."""
    found: dict[str, list[str]] = {}
    for row in (row for group in groups for row in group.rows):
        for line in row.verdict.left_out:
            found.setdefault(line, []).append(row.arm.label)
    return [f"LEFT OUT of {', '.join(modes)}: {line}" for line, modes in found.items()]


def _beside(options: Namespace) -> Path:
    """The folder that holds all runs: of one PATH itself, of several their common parent."""
    words = options.paths
    if options.tag is not None:
        words = [part for word in words for part in word.partition("=")[2].split(",")]
        words = [re.sub(r"^seed\d+:", "", word) for word in words]
    common = Path(os.path.commonpath([Path(word).resolve() for word in words]))
    if not common.is_dir() or (common / "run.json").exists():
        common = common.parent
    elif common == Path(common.anchor):
        common = Path.cwd()
    try:
        return common.relative_to(Path.cwd())
    except ValueError:
        return common


def _write(comparison: Comparison, options: Namespace, beside: Path) -> Path:
    """report.html, report.md, results.json and figures; BadInput for somebody else's folder."""
    from mprun.compare.report import write_report

    folder = options.out or beside
    if folder.exists() and not folder.is_dir():
        raise BadInput(f"--out {folder}: must be a folder")
    earlier = _earlier_figures(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"--out {folder}: cannot be made ({error.strerror})") from None
    for name in earlier:  # perhaps of other groups
        (folder / name).unlink(missing_ok=True)
    paper = paper_rows(comparison) if options.paper else []
    report = write_report(comparison, folder, paper)
    text = "\n".join([markdown(comparison), *([paper_markdown(paper)] if options.paper else [])])
    (folder / "report.md").write_text(text + "\n", encoding="utf-8")
    figures = sorted(path.name for path in folder.glob("*.png"))
    found = json.dumps(results(comparison) | {"figures": figures}, indent=1, allow_nan=False)
    (folder / "results.json").write_text(found + "\n", encoding="utf-8")
    return report


def _earlier_figures(folder: Path) -> list[str]:
    """Names of the figures of an earlier comparison in `folder`; BadInput if it is no such folder.

    Nothing but what results.json lists is ever deleted.
    """
    if not folder.is_dir() or not any(folder.iterdir()):
        return []
    try:
        content = json.loads((folder / "results.json").read_text(encoding="utf-8"))
        if content["format"] == 1 and (folder / "report.html").is_file():
            return [name for name in content["figures"] if Path(name).name == name]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise BadInput(f"--out {folder}: holds other files; choose an empty or a new folder")


def _all_match(comparison: Comparison) -> bool:
    rows = [row for group in comparison.groups for row in group.rows]
    if comparison.not_compared or any(row.arm.missing or row.verdict.left_out for row in rows):
        return False  # a crash is no accident until its cause is known
    return bool(rows) and all(row.verdict.name == "matches" for row in rows)
