"""`mprun compare PATH...`: judge each precision mode against FP32, and write a report."""

import json
import os
import re
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from mprun.cli.arguments import Arguments, names
from mprun.comparison import checked_margin, checked_pair_sd, compare, planned_looks
from mprun.comparison.findings import Comparison, Verdict
from mprun.comparison.one_pair import decided
from mprun.comparison.text_outputs import console, markdown, results
from mprun.errors import DIVERGED, DONE, BadInput
from mprun.record.console import to_watch
from mprun.record.run_directory import refuse_link

_WHAT = """\
Does each precision mode match FP32, or another baseline?

PATH is a run directory or a folder with runs (searched to any depth). Verdicts only use
metrics.jsonl and run.json; the report also shows probes (numerics=probes). Each mode gets a
divergence rule, then an equivalence test (paired TOST over seeds). The test's margin is fixed in
the runs' configuration (compare.metric, compare.margin, compare.baseline). Which way a metric
goes, and its unit, are in each run's record, as its task declares them."""
_MORE = """\
Logs of other tools, a path a run:
  mprun compare --scalar train/loss fp32=base0,base1,base2 amp=amp0,amp1,amp2
  mprun compare --scalar loss 'fp32=export.csv#fp32-*' 'amp=export.csv#amp-*'
  mprun compare --scalar loss fp32=seed0:a.csv,seed1:b.csv amp=seed0:c.csv,seed1:d.csv

It reads TensorBoard events, tables (Lightning, Keras, timm, ultralytics; FILE#RUN is one run of
an export of Weights & Biases), trainer_state.json, JSON lines, MLflow's runs, and the logs of
torchtitan, Megatron and MLPerf. Such runs are only paired if every run's seed is named
(seed0:PATH, or "seed0", "seed=0", "seed_0" in each path), or with --paired. Otherwise every run
counts, unpaired (Welch). Equal curves count as one run. Logs of different lengths are compared at
the steps that all have.

Exit codes: 0 compared, 2 bad input or nothing to compare, 3 --check failed, 4 damaged record."""
_FLAGS = {
    "--tensorboard": "write summary runs (mean, lower, upper, margin charts) for TensorBoard",
    "--check": "exit code 3 unless every mode matches (or compare.pair_sd shows it of one "
    "pair) and nothing was left out",
    "--no-report": "print only",
    "--higher-is-better": "the --scalar, or a metric of which the runs do not say it, is an "
    "accuracy or a score (--margin is then absolute)",
    "--lower-is-better": "it is neither (the default for loss, error, perplexity)",
    "--paired": "runs of --scalar are in the order of the same seeds in every label",
    "--json": "print results.json instead of a table",
    "--markdown": "print report.md instead of a table",
}
_BASELINE = """the runs of this precision mode, or below this path, are the baseline (default: the
mode that the runs' compare.baseline names, fp32)"""
_MARGIN = """another margin than compare.margin: relative (0.01 = 1 %%) for losses and distances,
else in the metric's unit: points for top1, a fraction for one of 0 to 1 (the report says so)"""
_PAIR_SD = """of one run each: the known sd of a pair's gap, in the margin's unit (stamped;
compare.pair_sd is set before the runs)"""
_LOOKS = """verdicts at these numbers of seeds, with an error rate of 5 %% (normal noise) over all
looks"""

# Arguments of `mprun.comparison.compare` with the same name; the first ones for runs of mprun.
JUDGING = ("baseline", "allow", "metric", "margin", "looks", "absolute", "pair_sd")
_JUDGING = (*JUDGING, "scalar", "step", "higher_is_better", "lower_is_better", "paired")


def main(words: list[str]) -> int:
    options = parse(words)
    comparison = compare(options.paths, **{name: getattr(options, name) for name in _JUDGING})
    beside = folder_beside(_paths(options))
    folder = options.out or refuse_link(beside / "compare")
    report = None if options.no_report else comparison.write(folder)
    if options.tensorboard:
        from mprun.comparison.tensorboard_summary import write_summaries

        summaries = write_summaries(comparison, beside)
        print(to_watch(summaries), file=sys.stderr)
    if options.json:
        print(json.dumps(results(comparison), indent=1, allow_nan=False))
    else:
        print((markdown if options.markdown else console)(comparison))
        if report is not None:
            print(f"report: {report}")
    why = _why_not(comparison) if options.check else ""
    if why:
        print(f"--check: {why}", file=sys.stderr if options.json or options.markdown else None)
    return DIVERGED if why else DONE


def parse(words: Sequence[str]) -> Namespace:
    """Parse and check the options; BadInput for an unknown one."""
    arguments = Arguments("compare", _WHAT, _MORE)
    add = arguments.add_argument
    add(
        "paths",
        nargs="*",
        metavar="PATH",
        help="with --scalar: LABEL=PATH[,PATH...], one path for each run",
    )
    add_judging(arguments)
    add("--scalar", metavar="NAME", help="name of the scalar to compare in logs of other tools")
    step = "with --scalar: the step counter, unless it is step, iteration or epoch"
    add("--step", metavar="COLUMN", help=step)
    out = "folder of the report (default: compare/ beside the runs)"
    add("--out", type=Path, metavar="DIR", help=out)
    for flag, what in _FLAGS.items():
        add(flag, action="store_true", help=what)
    options = arguments.parse(list(words))
    if not options.paths:
        arguments.error("needs at least one PATH, e.g. outputs")
    if options.json and options.markdown:
        raise BadInput("--json, --markdown: choose one of the two")
    return options


def add_judging(arguments: Arguments) -> None:
    add = arguments.add_argument
    add("--baseline", metavar="MODE|PATH", help=_BASELINE)
    allow = "compare although these keys differ from the baseline's (the report says so)"
    add("--allow", type=names("--allow"), default=(), metavar="KEY[,KEY...]", help=allow)
    add(
        "--metric", metavar="NAME", help="metric of the evaluation to use instead of compare.metric"
    )
    add("--bar", "--margin", dest="margin", type=checked_margin, metavar="X", help=_MARGIN)
    add("--pair-sd", type=checked_pair_sd, metavar="S", help=_PAIR_SD)
    add("--looks", type=_looks, default=[], metavar="3,5,10", help=_LOOKS)
    absolute = "the --margin is in the metric's own unit, not relative to the baseline"
    add("--absolute", action="store_true", help=absolute)


def _looks(text: str) -> list[int]:
    return planned_looks(text.split(","))


def _paths(options: Namespace) -> list[str]:
    """Return the paths of runs, without labels and seeds of logs."""
    if options.scalar is None:
        return options.paths
    words = [part for word in options.paths for part in word.partition("=")[2].split(",")]
    return [re.sub(r"^seed\d+:", "", word) for word in words]


def folder_beside(words: Sequence[str]) -> Path:
    """Return the folder of all runs: a single path itself, or the common parent of several."""
    common = Path(os.path.commonpath([Path(word).resolve() for word in words]))
    if not common.is_dir() or (common / "run.json").exists():
        common = common.parent
    elif common == Path(common.anchor):
        common = Path.cwd()
    return common.relative_to(Path.cwd()) if common.is_relative_to(Path.cwd()) else common


def _why_not(comparison: Comparison) -> str:
    """Return why --check fails; empty if every mode matches and nothing was left out.

    A crash is no accident until its cause is known.
    """
    rows = [row for group in comparison.groups for row in group.rows]
    words: dict[str, list[str]] = {}
    for row in rows:
        words.setdefault(_not_shown(row.verdict), []).append(row.arm.label)
    found = [f"{', '.join(labels)}: {word}" for word, labels in words.items() if word]
    for row in rows:
        lost = [f"no outcome of {len(row.arm.missing)} of its runs"] * bool(row.arm.missing)
        parts = [*lost, *row.verdict.left_out]
        found += [f"{row.arm.label}: left out, {'; '.join(parts)}"] * bool(parts)
    found += [f"not compared: {line}" for line in comparison.not_compared]
    return "; ".join(found) if rows else "no mode to compare"


def _not_shown(verdict: Verdict) -> str:
    """Return the word of a mode that is not shown to match; of one pair a fixed scatter decides."""
    if verdict.name == "matches" or decided(verdict.facts):
        return ""
    test = verdict.facts.get("test")
    fixed = test is not None and test["fixed"]
    return f"{verdict.name}{', not shown inside the bar' if fixed else ''}"
