"""`mprun compare PATH...`: a verdict per precision mode, a report, TensorBoard summary runs."""

import argparse
import json
import os
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from mprun import __version__
from mprun.compare.assess import assess
from mprun.compare.equivalence import ALPHA, nominal_alpha
from mprun.compare.findings import Comparison, RunData
from mprun.compare.grouping import group_runs
from mprun.compare.load import load_runs
from mprun.compare.markdown import console, markdown
from mprun.compare.paper import paper_html, paper_markdown, paper_rows
from mprun.compare.results import results
from mprun.errors import DIVERGED, DONE, BadInput

_USAGE = """\
mprun compare PATH... : does each precision mode match FP32?

PATH is a run directory or a folder that holds runs (searched to any depth). Verdicts rest on
metrics.jsonl and run.json alone; the report also shows probes (numerics=on). Per mode: a
divergence rule, then an equivalence test (paired TOST over seeds)
against the margin that the runs' configuration fixed (compare.metric, compare.margin).

Options
  --baseline PATH       the runs below PATH are the baseline (default: precision=fp32, scaler=none)
  --allow KEY[,KEY...]  compare although these keys differ from the baseline's (the report says so)
  --metric NAME         another metric of the evaluation than compare.metric
  --margin X            another margin than compare.margin: relative (0.01 = 1 %) for losses and
                        distances, percentage points for top1 and top5 (the report says so)
  --looks 3,5,10        verdicts at these numbers of seeds, with an error rate of 5 % over all looks
  --tensorboard         write summary runs (mean, lower, upper, margin charts) for TensorBoard
  --paper               our result beside the row of Micikevicius et al. for the same model
  --json, --markdown    what to print on stdout (default: a table)
  --check               exit code 3 unless every mode matches
  --out DIR             folder of the report (default: compare/ beside the runs)
  --no-report           print only
Foreign logs (TensorBoard events or CSV)
  mprun compare --tag train/loss fp32=base_s0,base_s1,base_s2 amp=amp_s0,amp_s1,amp_s2
  --tag NAME            the scalar to compare; PATH is then LABEL=PATH[,PATH...], one path a seed
  --higher-is-better    the scalar is an accuracy (--margin is then absolute)

Exit codes: 0 compared, 2 bad input or nothing to compare, 3 --check failed, 4 damaged record.
"""


@dataclass(frozen=True, slots=True)
class Options:
    """The command line of `mprun compare`, checked."""

    paths: tuple[str, ...]
    baseline: Path | None = None
    allow: tuple[str, ...] = ()
    metric: str | None = None
    margin: float | None = None
    looks: list[int] = field(default_factory=list)
    tensorboard: bool = False
    paper: bool = False
    print_as: str = "table"  # table, json, markdown
    check: bool = False
    out: Path | None = None
    report: bool = True
    tag: str | None = None
    higher_is_better: bool = False


def main(arguments: list[str]) -> int:
    """Entry point of the verb; returns the exit code."""
    if "--help" in arguments or "-h" in arguments:
        print(_USAGE, end="")
        return DONE
    options = parse(arguments)
    comparison = compare(options)
    beside = _beside(options)
    report = None
    if options.report:
        report = _write(comparison, options, options.out or beside / "compare")
    if options.tensorboard:
        from mprun.compare.tensorboard_summary import write_summaries

        summaries = write_summaries(comparison, beside)
        print(f"tensorboard --logdir {summaries.parent}", file=sys.stderr)
    if options.print_as == "json":
        print(json.dumps(results(comparison), indent=1, allow_nan=False))
    else:
        print((markdown if options.print_as == "markdown" else console)(comparison))
        if options.paper:
            print(paper_markdown(paper_rows(comparison)))
        if report is not None:
            print(f"report: {report}")
    return DIVERGED if options.check and not _all_match(comparison) else DONE


def compare(options: Options) -> Comparison:
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
        from mprun.compare.external_logs import load_foreign, refuse_same_logs

        foreign, notes = load_foreign(options.paths, options.tag)
        refuse_same_logs(foreign)
        protos, refused, runs = [foreign], [], foreign.baseline.runs
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
        stamps=_stamps(options, runs),
        looks=options.looks,
        alpha=nominal_alpha(tuple(options.looks)) if options.looks else ALPHA,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        version=__version__,
    )


def _stamps(options: Options, runs: list[RunData]) -> list[str]:
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


def _beside(options: Options) -> Path:
    """The folder that holds all runs: of one PATH itself, of several their common parent."""
    given = [word.partition("=")[2] or word for word in options.paths] if options.tag else None
    paths = [Path(part) for word in given or options.paths for part in word.split(",")]
    common = Path(os.path.commonpath([path.resolve() for path in paths]))
    if not common.is_dir() or (common / "run.json").exists():
        common = common.parent
    elif common == Path(common.anchor):
        common = Path.cwd()
    try:
        return common.relative_to(Path.cwd())
    except ValueError:
        return common


def _write(comparison: Comparison, options: Options, folder: Path) -> Path:
    """report.html, report.md, results.json and figures; BadInput if `folder` is somebody else's."""
    from mprun.compare.html_report import write_report

    if folder.exists() and not folder.is_dir():
        raise BadInput(f"--out {folder}: must be a folder")
    earlier = _earlier_figures(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"--out {folder}: cannot be made ({error.strerror})") from None
    for name in earlier:  # perhaps of other groups
        (folder / name).unlink(missing_ok=True)
    beside_paper = paper_html(paper_rows(comparison)) if options.paper else ""
    report = write_report(comparison, folder, beside_paper)
    text = markdown(comparison)
    if options.paper:
        text += "\n" + paper_markdown(paper_rows(comparison))
    (folder / "report.md").write_text(text + "\n", encoding="utf-8")
    figures = sorted(path.name for path in folder.glob("*.png"))
    content = results(comparison) | {"figures": figures}
    found = json.dumps(content, indent=1, allow_nan=False)
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
        ours = content["format"] == 1 and (folder / "report.html").is_file()
        names = [name for name in content["figures"] if Path(name).name == name]
    except (OSError, ValueError, KeyError, TypeError):
        ours = False
    if not ours:
        raise BadInput(f"--out {folder}: holds other files; choose an empty or a new folder")
    return names


def _all_match(comparison: Comparison) -> bool:
    rows = [row for group in comparison.groups for row in group.rows]
    if comparison.not_compared:
        return False
    if any(row.arm.missing for row in rows):
        return False  # a crash is no accident until its cause is known
    return bool(rows) and all(row.verdict.name == "matches" for row in rows)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise BadInput(f"compare: {message} (see mprun compare --help)")


def parse(arguments: list[str]) -> Options:
    """The options; BadInput for anything that is none."""
    parser = _Parser(prog="mprun compare", add_help=False, allow_abbrev=False)
    parser.add_argument("paths", nargs="*")
    for name in ("--baseline", "--allow", "--metric", "--margin", "--looks", "--out", "--tag"):
        parser.add_argument(name)
    for name in ("--tensorboard", "--paper", "--json", "--markdown", "--check", "--no-report"):
        parser.add_argument(name, action="store_true")
    parser.add_argument("--higher-is-better", action="store_true")
    given = parser.parse_args(arguments)
    if not given.paths:
        raise BadInput("compare: needs at least one PATH, e.g. outputs (see mprun compare --help)")
    if given.json and given.markdown:
        raise BadInput("--json, --markdown: give one of the two")
    if given.higher_is_better and given.tag is None:
        raise BadInput("--higher-is-better: only with --tag; a run of mprun knows its metrics")
    if given.higher_is_better and given.margin is None:
        raise BadInput("--higher-is-better: needs --margin, in the unit of the tag")
    if given.tag is not None and (given.baseline or given.allow or given.metric):
        raise BadInput("--tag: foreign logs have no --baseline, --allow or --metric")
    return Options(
        paths=tuple(given.paths),
        baseline=None if given.baseline is None else Path(given.baseline),
        allow=tuple(key for key in (given.allow or "").split(",") if key),
        metric=given.metric,
        margin=_margin(given.margin),
        looks=_looks(given.looks),
        tensorboard=given.tensorboard,
        paper=given.paper,
        print_as="json" if given.json else "markdown" if given.markdown else "table",
        check=given.check,
        out=None if given.out is None else Path(given.out),
        report=not given.no_report,
        tag=given.tag,
        higher_is_better=given.higher_is_better,
    )


def _margin(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 0 < value < float("inf"):
        raise BadInput(f"--margin {text}: must be a number above 0, e.g. 0.01 for 1 %")
    return value


def _looks(text: str | None) -> list[int]:
    if text is None:
        return []
    parts = text.split(",")
    looks = [int(part) for part in parts if part.isdecimal() and len(part) < 5]
    if len(looks) < len(parts) or len(looks) < 2 or looks[0] < 3 or looks != sorted(set(looks)):
        raise BadInput(
            f"--looks {text}: must be two or more numbers of seeds, ascending from 3, e.g. 3,5,10"
        )
    return looks
