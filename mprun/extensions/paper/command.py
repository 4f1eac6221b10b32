"""`mprun paper [RUNS]`: set the tables of Mixed Precision Training (ICLR 2018) beside runs."""

import json
import shlex
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from pathlib import Path

from mprun.cli.arguments import Arguments, names, number
from mprun.cli.compare import JUDGING, add_judging, folder_beside
from mprun.comparison import compare
from mprun.comparison.text_outputs import console, markdown
from mprun.comparison.wording import seeds_text
from mprun.errors import DONE, BadInput, needing, no_folder
from mprun.extensions.paper.listing import Listing, commands_of
from mprun.extensions.paper.rows import ROWS, PaperRow, digest, held_out, seeds_of, told
from mprun.record.console import columns
from mprun.record.layout import for_terminal
from mprun.record.run_directory import refuse_link
from mprun.record.run_record import read_record
from mprun.sweeps.gpus import available_cores
from mprun.sweeps.jobs import Cell, State, state_of
from mprun.sweeps.plan import Plan, plan
from mprun.sweeps.run import SweepLoop
from mprun.sweeps.status_page import StatusPage

_WHAT = """\
  mprun paper                   the paper's results, what is finished, how long the others take
  mprun paper --only all        run every one that this machine can show, small
  mprun paper --only table2,fig3
  mprun paper --only table2 --seeds 0-4
  mprun paper --scale full --data-root DIR --only resnet50
  mprun paper RUNS              existing runs, beside the paper's rows for their networks

Without --only nothing runs. With it: runs what has no outcome yet, continues interrupted runs, and
writes paper.md, paper.html, paper.json and the figures. They show each table of Micikevicius et
al. (ICLR 2018) with its FP32 and mixed values beside ours, and whether the outcome is the same.
KEY=VALUE goes to every run.

RUNS, run directories or folders with runs, are compared as by mprun compare. It prints their
verdicts, and puts their report beside the page.
"""
_MORE = """\
Exit codes: 0 done, 2 bad input, 130 interrupted, otherwise that of the worst run; the page is
written from the existing results."""
SCALES = ("small", "full")
_OF_RUNS = (*JUDGING, "json", "markdown", "no_report")
_OF_NO_RUNS = ("list", "seeds", "data_root", "jobs", "config_dir", "overrides")
_PLACES = [name for row in ROWS for name in row.names if name != row.key]
_NAMES = [*dict.fromkeys([*_PLACES, *(row.key for row in ROWS), "all"])]  # of --only


def main(arguments: list[str]) -> int:
    """Entry point of the verb; returns the exit code."""
    options = _options(arguments)
    if options.runs:
        return _beside(options, arguments)
    rows = [row for row in ROWS if _asked(row, options)]
    reasons = {row.key: reason for row in rows if (reason := _why_not(row, options))}
    listing = Listing(rows, reasons, options)
    if options.list or not options.only:
        width = columns(1000, sys.stdout) if sys.stdout.isatty() else None
        print("\n".join(listing.lines(width)))
        return DONE
    runs = _Runs(options, [row for row in rows if row.key not in reasons], listing.estimate())
    code = runs.run(shlex.join(["mprun", "paper", *arguments]))
    with needing("cli"):
        from mprun.extensions.paper.outcomes import found_of
        from mprun.extensions.paper.page import Page
    earlier, remarks = _earlier(options, [row.key for row in rows])
    rows = [row for row in ROWS if row in rows or row.key in earlier]
    found = []
    for row in rows:
        cells = runs.cells.get(row.key, {})
        directories = {name: [cell.directory for cell in own] for name, own in cells.items()}
        probes = runs.probes.get(row.key)
        if row.key in earlier:
            directories, probes = earlier[row.key]
        own = row if options.scale == "small" else row.without_small()
        found.append(found_of(own, directories, reasons.get(row.key, ""), probes))
    ended = {cell.directory: None for cell in runs.plan.cells if state_of(cell) is State.FINISHED}
    for own_runs, _ in earlier.values():
        ended |= dict.fromkeys(run for every in own_runs.values() for run in every)
    page = Page(options.scale, found, rows, _facts([*ended], arguments), remarks)
    seeds = {*runs.seeds, *(seed for one in found for line in one.lines for seed in line.seeds)}
    if options.scale == "small" and seeds:
        page.seeds = told([row.key for row in rows], seeds)
    print(f"paper: {page.write(options.out)}")
    return code


def _earlier(
    options: Namespace, now: Collection[str]
) -> tuple[dict[str, tuple[dict[str, list[Path]], Path | None]], list[str]]:
    """Return key -> the runs and the probes of the rows that only an earlier page shows.

    A later `--only` adds its rows to the page in the same folder. The second value has a line for
    each row that cannot be shown again.
    """
    try:
        page = json.loads((options.out / "paper.json").read_text(encoding="utf-8"))
        if page["scale"] != options.scale:
            return {}, [f"the page of --scale {page['scale']} that stood here was replaced"]
        found, lost = {}, []
        for key, row in page["rows"].items():
            if key in now:
                continue
            named = row.get("runs") or {}
            every = {name: [options.out / run for run in own] for name, own in named.items()}
            there = {
                name: [run for run in own if (run / "run.json").exists()]
                for name, own in every.items()
            }
            total, left = (sum(map(len, runs.values())) for runs in (every, there))
            if left:
                probes = row.get("probes")
                found[key] = there, None if probes is None else options.out / probes
                if left < total:
                    gone = f"{total - left} of its {total} runs are not there any more"
                    lost.append(f"{key}: stood on an earlier page, but {gone}")
            elif row.get("fp32"):
                lost.append(f"{key}: stood on an earlier page, but its runs are not there any more")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}, []
    return found, lost


def _asked(row: PaperRow, options: Namespace) -> bool:
    return not options.only or bool({"all", *row.names} & set(options.only))


def _beside(options: Namespace, arguments: list[str]) -> int:
    """Put existing runs beside the paper; return the exit code."""
    comparison = compare(options.runs, **{name: getattr(options, name) for name in JUDGING})
    with needing("cli"):
        from mprun.extensions.paper.outcomes import beside
        from mprun.extensions.paper.page import Page, tables, tables_markdown
    found, without = beside(comparison)
    found = [one for one in found if _asked(one.row, options)]
    keys = {one.row.key for one in found}
    rows = [row for row in ROWS if row.key in keys]
    remarks = [*comparison.stamps, *without, *comparison.not_compared, *comparison.notes]
    paths = [Path(run.path) for group in comparison.groups for run in group.every_run]
    page = Page("given", found, rows, _facts(paths, arguments), remarks)
    if options.json:
        print(page.json())
    else:
        print((markdown if options.markdown else console)(comparison))
        print("\n".join(["", for_terminal(tables_markdown(tables(found))), *without]))
    if not options.no_report:
        out = options.out or refuse_link(folder_beside(options.runs) / "compare")
        written = [f"report: {comparison.write(out)}", f"paper: {page.write(out)}"]
        print("\n".join(written), file=sys.stderr if options.json else sys.stdout)
    return DONE


def _options(arguments: list[str]) -> Namespace:
    parser = Arguments("paper", _WHAT, _MORE)
    add = parser.add_argument
    add(
        "words",
        nargs="*",
        metavar="RUNS|KEY=VALUE",
        help="runs to judge; KEY=VALUE sets a key of the configuration, as for a run",
    )
    add("--only", type=names("--only"), metavar="A,B", help=f"run these: {', '.join(_NAMES)}")
    what = f"seeds of every run, such as 0-4,7 (small: {seeds_text(held_out())}; full: 0)"
    add("--seeds", metavar="SEEDS", help=what)
    add(
        "--scale",
        default="small",
        metavar="|".join(SCALES),
        help="small: short runs on data that mprun contains; full: the published recipes",
    )
    add("--list", action="store_true", help="list the rows of --only, and run nothing")
    what = "with --scale full: folder that contains one folder of data for each recipe"
    add("--data-root", type=Path, metavar="DIR", help=what)
    processes = number("-j", 1, 1024, "a number of processes", whole=True)
    add(
        "-j",
        "--jobs",
        type=processes,
        metavar="N",
        help="number of runs at the same time (with --scale small: one per core)",
    )
    what = "folder of the runs and of the page (outputs/paper; with RUNS: compare/ beside them)"
    add("--out", type=Path, metavar="DIR", help=what)
    add("--config-dir", metavar="DIR", help="folder with your own option files, as for a run")
    add_judging(parser)
    add("--json", action="store_true", help="with RUNS: print paper.json instead of tables")
    add("--markdown", action="store_true", help="with RUNS: also print the verdicts as Markdown")
    add("--no-report", action="store_true", help="with RUNS: only print, write nothing")
    options = parser.parse(arguments)
    options.arguments = arguments
    _sort_words(options)
    options.seeds = seeds_of(options.seeds) if options.seeds is not None else ()
    if options.scale not in SCALES:
        raise BadInput(f"--scale {options.scale}: must be one of {', '.join(SCALES)}")
    for name in options.only or ():
        if name not in _NAMES:
            raise BadInput(f"--only {name}: must be among {', '.join(_NAMES)}")
    if options.data_root is not None and options.scale == "small":
        asked = f"--data-root {options.data_root}"
        raise BadInput(
            f"{asked}: is only allowed with --scale full; small runs have their own data"
        )
    if options.data_root is not None and not options.data_root.is_dir():
        raise BadInput(f"--data-root {options.data_root}: {no_folder(options.data_root)}")
    if options.out is None and not options.runs:
        options.out = Path("outputs/paper")
    if options.out is not None and options.out.exists() and not options.out.is_dir():
        raise BadInput(f"--out {options.out}: must be a folder")
    return options


def _sort_words(options: Namespace) -> None:
    """Sort the words into `runs` and `overrides`; BadInput for an option of the other kind."""
    options.runs = [word for word in options.words if Path(word).exists()]
    options.overrides = [word for word in options.words if word not in options.runs]
    for word in options.overrides:
        if "=" not in word and not word.startswith("~"):
            hint = f"; did you mean '--only {word}'?" if word in _NAMES else ""
            raise BadInput(f"paper: '{word}': is neither a path of runs nor key=value{hint}")
    when = "not with RUNS, which have run already" if options.runs else "only with RUNS"
    given = [name for name in (_OF_NO_RUNS if options.runs else _OF_RUNS) if getattr(options, name)]
    if options.runs and options.scale != "small":
        given.append("scale")
    for name in given:
        what = options.overrides[0] if name == "overrides" else f"--{name.replace('_', '-')}"
        raise BadInput(f"{what}: {when}")
    own = {override.lstrip("+~").partition("=")[0] for override in options.overrides}
    arms = {one.partition("=")[0] for row in ROWS for arm in row.arms for one in arm.overrides}
    for key in sorted(own & (arms | {"output_root", "seed", "threads", "experiment"})):
        raise BadInput(f"{key}: is not allowed with paper, which sets it (--out sets the folder)")
    if options.json and options.markdown:
        raise BadInput("--json, --markdown: choose one of the two")


def _why_not(row: PaperRow, options: Namespace) -> str:
    """Return why a row cannot run here; empty: it can."""
    if options.scale == "small":
        return "" if row.overrides else row.why_not
    if row.full is None:
        return row.why_not
    needs = []
    if options.data_root is None or not (options.data_root / row.full.folder).is_dir():
        needs.append(f"--data-root with {row.full.folder}")
    if row.full.missing and not any(o.startswith("model.weights=") for o in options.overrides):
        needs.append(row.full.missing)
    if not needs and not _has_gpu():
        needs.append("a CUDA device")
    hours = row.full.hours
    cost = ", ".join(f"{hours[mode]:.3g} h in {mode}" for mode in ("fp32", "amp") if mode in hours)
    return f"needs {' and '.join(needs)} (an H200 at its limit: {cost})" if needs else ""


def _has_gpu() -> bool:
    from mprun.training.run import resolve_device

    return resolve_device("auto").type == "cuda"


class _Runs:
    """The runs of the rows, and their folders; `estimate` is said before the long part begins."""

    def __init__(self, options: Namespace, rows: Sequence[PaperRow], estimate: str):
        self.options = options
        self.cells: dict[str, dict[str, tuple[Cell, ...]]] = {}
        self.seeds: tuple[int, ...] = ()
        self.probes: dict[str, Path] = {}
        known: dict[Path, Cell] = {}
        swept = {"experiment", "scaler.scale", "numerics"}  # shown of a run
        for row in rows:
            own = self.cells[row.key] = {}
            for technique, command in commands_of(row, options).items():
                seeds = f"seed={','.join(map(str, command.seeds))}"
                self.seeds = self.seeds or command.seeds
                basis = [f"basis=settings.yaml-{digest()}"] if options.scale == "small" else []
                planned = plan([*command.overrides, *basis, seeds], options.config_dir)
                known |= {cell.directory: cell for cell in planned.cells}
                if technique == "probes":
                    self.probes[row.key] = planned.cells[0].directory
                else:
                    own[technique] = planned.cells
                    swept |= planned.swept
            if row is rows[0]:  # each row takes as long to compose; a wrong KEY=VALUE has shown
                print(f"paper: {estimate}", file=sys.stderr, flush=True)
        self.plan = Plan(
            tuple(known.values()), options.out, frozenset(swept), options.config_dir, None
        )

    def run(self, command: str) -> int:
        """Run what has no outcome yet; return the exit code."""
        if not self.plan.cells:
            return DONE
        jobs = self.options.jobs
        if jobs is None and self.options.scale == "small":
            jobs = available_cores()
        finished = sum(state_of(cell) is State.FINISHED for cell in self.plan.cells)
        already = f", {finished} finished already" if finished else ""
        total = len(self.plan.cells)
        print(f"paper: {total} runs in {self.plan.root}{already}", file=sys.stderr)
        loop = SweepLoop(StatusPage(self.plan, command), jobs)
        code = loop.run()
        if loop.stop.reason is not None:
            print(f"to go on: {command}", file=sys.stderr)
        return code


def _facts(directories: Sequence[Path], arguments: list[str]) -> dict[str, str]:
    """Return the command, and from the records of the runs machine, versions and cost."""
    command = {"command": shlex.join(["mprun", "paper", *arguments])}
    records = [read_record(directory) for directory in directories]
    if not records:
        return command
    known = records[0]["environment"]
    packages = known.get("packages") or {}
    machine = known.get("gpu") or f"{known.get('cpu')}, {known.get('cpu_count', '?')} cores"
    seconds = sum(float(record.get("seconds") or 0) for record in records)
    named = Counter(record.get("config", {}).get("basis") for record in records)
    fixed = {
        "settings": f"settings.yaml-{digest()} is the file now; recorded: "
        + "; ".join(f"{name or 'nothing'} by {count} runs" for name, count in named.items())
    }
    return {
        "machine": machine,
        "versions": ", ".join(f"{name} {version}" for name, version in packages.items()),
        "runs": f"{len(records)}, {seconds / 60:.0f} minutes of runs in all",
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
    } | (fixed | command if any(named) else command)
