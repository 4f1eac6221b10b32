"""python -m benchmarks.faults.stops OUT: a stop at every boundary of a run, as OUT.json and OUT.md.

A signal is sent by the run to itself, at a boundary between two of its phases and not at a random
time. Then the run is resumed until it is done. It must end with the bits of a run that nothing
stopped, and with the same facts of what it computed.
"""

import argparse
import datetime
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.faults.harness import Answer, Campaign, Finding, equal, last_line, leftovers, mprun
from benchmarks.faults.subjects import KILLED, SCALED, TINY

STEPS = 6
RUN = [f"train.steps={STEPS}", "train.log_every=2", "train.checkpoint_every=2"]
RUN += ["train.eval_every=3"]


class Boundary(NamedTuple):
    """A place between two phases of a run: before or after a call of one of mprun's functions.

    call: which one, from 1; -1: the last one of an undisturbed run.
    """

    name: str
    function: str  # "module:Class.method"
    call: int = 1
    after: bool = False


_LOOP, _LOGGER = "mprun.training.loop:Loop", "mprun.training.loop:MetricLogger"
_RECORD, _SAVE = "mprun.record.run_record", "mprun.record.checkpoint:save"
_EVALUATED = "mprun.record.console:Progress.evaluated"
BOUNDARIES = [
    Boundary("config.yaml written", f"{_RECORD}:write_config", after=True),
    Boundary("run.json begun", f"{_RECORD}:write_json", after=True),
    Boundary("before step 1", f"{_LOOP}.advance"),
    Boundary("in step 1", "mprun.tasks.learner:Learner.end_part"),
    Boundary("after step 1", f"{_LOOP}.advance", after=True),
    Boundary("a log line", "mprun.record.console:Progress.show", 2),
    Boundary("first evaluation, begin", f"{_LOGGER}.evaluate"),
    Boundary("first evaluation, middle", _EVALUATED),
    Boundary("first evaluation, recorded", f"{_LOGGER}.write_evaluation", after=True),
    Boundary("first evaluation, end", f"{_LOOP}.evaluate", after=True),
    Boundary("a checkpoint, begin", _SAVE, 2),
    Boundary("a checkpoint, middle", "torch:save", 2, after=True),
    Boundary("a checkpoint, end", _SAVE, 2, after=True),
    Boundary("after the last step", f"{_LOOP}.advance", -1, after=True),
    Boundary("last evaluation, begin", f"{_LOGGER}.evaluate", -1),
    Boundary("last evaluation, middle", _EVALUATED, -1),
    Boundary("last evaluation, recorded", f"{_LOGGER}.write_evaluation", -1, after=True),
    Boundary("last evaluation, end", f"{_LOOP}.evaluate", -1, after=True),
    Boundary("last checkpoint, begin", _SAVE, -1),
    Boundary("last checkpoint, middle", "torch:save", -1, after=True),
    Boundary("last checkpoint, end", _SAVE, -1, after=True),
    Boundary("training ended", f"{_LOOP}.finish"),
    Boundary("before the record", f"{_RECORD}:Record.end"),
    Boundary("after the record", f"{_RECORD}:Record.end", after=True),
]
SIGNALS = ("SIGTERM", "SIGINT", "SIGKILL")
EXIT_CODES = {"SIGTERM": 75, "SIGINT": 130, "SIGKILL": -9}

_GPT = ["device=cpu", "threads=1", "model=gpt", "model.hidden_size=32", "model.num_layers=1"]
_GPT += ["model.num_heads=2", "data=synthetic_tokens", "data.vocab_size=64", "data.batch_size=4"]
_GPT += ["data.sequence_length=16", "data.train_tokens=2048", "data.eval_tokens=256"]


def cases() -> dict[str, list[str]]:
    """Return name -> overrides: every mode that a CPU has, and what else changes a stop."""
    from mprun.config.option_files import modes
    from mprun.precision import get_policy

    found = {}
    for mode in modes():
        policy = get_policy(mode)
        if policy.fp32_math == "tf32":
            continue  # which a CPU does not have
        network = _GPT if policy.matmul or policy.attention else TINY
        scaled = [*SCALED[1:]] if mode in ("fp16_master_scaled", "amp") else []  # skips at first
        found[mode] = [*network, f"precision={mode}", *scaled]
    found["dcgan amp"] = [*KILLED["dcgan amp"], "scaler.per=optimizer"]
    found["fp16_naive, evaluated in the mode"] = [
        *found["fp16_naive"],
        "train.eval_arithmetic=mode",
    ]
    return found


Reached = Callable[[Boundary, int], None]


def planted(
    boundaries: Sequence[Boundary], reached: Reached, put: Callable[..., None] = setattr
) -> None:
    """Call `reached(boundary, number of the call)` at every call of the boundaries' functions."""
    for name in dict.fromkeys(one.function for one in boundaries):
        module, _, path = name.partition(":")
        *outer, last = path.split(".")
        holder: Any = import_module(module)
        for part in outer:
            holder = getattr(holder, part)
        here = [one for one in boundaries if one.function == name]
        put(holder, last, _watched(getattr(holder, last), here, reached))


def _watched(function: Callable, here: list[Boundary], reached: Reached) -> Callable:
    calls = 0

    @wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        number = calls
        for boundary in (one for one in here if not one.after):
            reached(boundary, number)
        result = function(*args, **kwargs)
        for boundary in (one for one in here if one.after):
            reached(boundary, number)
        return result

    return watched


def counted(path: Path) -> Callable[[], None]:
    """Return a `prepare` that writes the calls of each boundary to `path`, by its name."""
    calls: dict[str, int] = {}

    def reached(boundary: Boundary, number: int) -> None:
        calls[boundary.name] = number
        path.write_text(json.dumps(calls))

    return lambda: planted(BOUNDARIES, reached)


def stopped_at(boundary: Boundary, call: int, name: str) -> Callable[[], None]:
    """Return a `prepare` that sends signal `name` to the run at this call of the boundary."""

    def reached(_: Boundary, number: int) -> None:
        if number == call:
            os.kill(os.getpid(), getattr(signal, name))

    return lambda: planted([boundary], reached)


def stops(campaign: Campaign, only: Sequence[str] = ()) -> None:
    """Stop each case at each boundary, and some of them by each of the signals; resume."""
    for number, (case, overrides) in enumerate(cases().items()):
        if only and case not in only:
            continue
        home = campaign.scratch("stops")
        reference, calls = home / "reference", home / "calls.json"
        run = [*overrides, *RUN]
        whole = mprun([*run, f"output_dir={reference}"], home, prepare=counted(calls))
        if whole.code != 0:
            campaign.note(case, "not stopped", "not tried", last_line(whole))
            continue
        last = json.loads(calls.read_text())
        for place, boundary in enumerate(BOUNDARIES):
            # Each boundary and each mode meets each signal; three modes meet all at all.
            every = case in ("amp", "fp8_tensorwise", "bf16_stochastic")
            for name in SIGNALS if every else (SIGNALS[(place + number) % 3],):
                call = last[boundary.name] if boundary.call < 0 else boundary.call
                path = home / f"{place}-{name}"
                prepare = stopped_at(boundary, call, name)
                first = mprun([*run, f"output_dir={path}"], home, prepare=prepare)
                kind, detail = _outcome(first, path, reference, name)
                campaign.note(case, f"{boundary.name}: {name}", kind, detail)


def _outcome(first: Answer, path: Path, reference: Path, name: str) -> tuple[str, str]:
    """Return kind and detail of a stop: how it ended, and how the resumed run did."""
    said = f"exit code {first.code}"
    if "Traceback (most recent call last)" in first.output:
        return "traceback", last_line(first)
    recorded = (path / "run.json").exists()
    status = json.loads((path / "run.json").read_text())["status"] if recorded else None
    if not recorded:
        # No step began. What is there cannot be resumed, and says so in one line.
        again = mprun([f"resume={path}"], path.parent)
        kind = "found" if again.code == 2 and first.code == EXIT_CODES[name] else "silent"
        return kind, f"{said}, nothing recorded"
    done = status == "done"
    wanted = 0 if done and name != "SIGKILL" else EXIT_CODES[name]
    usual = {"SIGKILL": ("running", "done")}.get(name, ("preempted", "done"))
    if first.code != wanted or status not in usual:
        return "dishonest", f"{said}, status {status}; {last_line(first)}"
    said += f", {status}"
    if not done:
        again = mprun([f"resume={path}"], path.parent)
        if again.code != 0:
            return "not resumed", f"{said}; resumed: exit code {again.code}, {last_line(again)}"
        said += ", resumed"
    if left := leftovers(path):
        return "leftovers", f"{said}: {left}"
    return ("harmless" if equal(path, reference, STEPS) else "silent"), said


_PAGE = """\
# A stop at every boundary of a run, {date}, CPU

{cpu}, no GPU, torch {torch}, {commits}; {minutes:.0f} minutes beside other work. Command:

    python -m benchmarks.faults.stops OUT

A run of {steps} steps (a checkpoint every 2, an evaluation every 3) sends itself a signal at a
boundary between two of its phases, and is resumed until it is done. **{held} of {tried} held**:
exit code and status of the stop were right (75 or 130 and `preempted`; 0 and `done` behind the
last place to stop; one line where nothing can be resumed, before there is a run.json), and the
resumed run ended with exit code 0, with the bits of a run that nothing stopped (every record,
every tensor of the last checkpoint, config.yaml, the ending in run.json) and with the same facts
of what it computed: calls of the emulation, operations of step 1, dtypes of products.

T: SIGTERM, I: SIGINT, K: SIGKILL, a word: what happened instead.

{table}

The network is an LSTM language model; with `fp8_*` a transformer, which has linear layers beside
the output's. `dcgan` has a scale for each loss. `amp` and `fp16_master_scaled` skip their first
updates.
{failed}
## What was found, and cured

At the commit before (ef9db23) 28 of the 72 stops of `amp` held. 39 runs ended with the right
bits, but their run.json told of the last attempt alone (calls of the emulation, operations,
throughput), and of nothing where that had only evaluated. Five could not be ended, "already at
step 6 of 6": killed behind the last checkpoint, or stopped while the last evaluation was written.

## What it does not cover

- `tf32`, which a CPU does not have; compiled and replayed steps; several ranks.
- Power failure: SIGKILL leaves what was written to the page cache.
- A stop in the post-mortem of a run that diverged.
- A run that is killed before its run.json is there cannot be resumed: its folder has to be removed.
"""


def page(content: dict[str, Any]) -> str:
    """Format the table of boundaries and modes; content: as `main` writes it."""
    environment, findings = content["environment"], [Finding(**one) for one in content["findings"]]
    commits = dict.fromkeys(str(commit)[:7] for commit in content["commits"].values())
    columns = list(dict.fromkeys(one.test for one in findings))
    table = [f"| boundary | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)]
    for boundary in BOUNDARIES:
        here = [one for one in findings if one.case.startswith(f"{boundary.name}: ")]
        cells = [" ".join(_cell(one) for one in here if one.test == test) for test in columns]
        table.append(f"| {boundary.name} | {' | '.join(cells)} |")
    failed = [one for one in findings if not one.held]
    told = [f"- {one.test}, {one.case}: {one.kind}. {one.detail}" for one in failed]
    return _PAGE.format(
        date=datetime.date.today(),
        cpu=environment["cpu"],
        torch=environment["packages"]["torch"],
        commits=f"commit{'s' * (len(commits) > 1)} {', '.join(commits)}",
        minutes=content["minutes"],
        steps=STEPS,
        held=len(findings) - len(failed),
        tried=len(findings),
        table="\n".join(table),
        failed="\n".join(["", "Did not hold:", "", *told, ""]) if told else "",
    )


def _cell(finding: Finding) -> str:
    letter = finding.case.rpartition(" ")[2][3]  # of SIGTERM, SIGINT, SIGKILL
    return letter if finding.held else f"{letter} {finding.kind}"


def main() -> None:
    """Run the campaign and write its page."""
    import time

    import torch

    from benchmarks.faults import __main__ as imports  # noqa: F401 - a forked case imports nothing
    from mprun.recording.environment import environment

    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults.stops", description=__doc__)
    parser.add_argument("out", type=Path, help="OUT.json and OUT.md are written")
    what = "names of cases, separated by commas; OUT.json keeps the others"
    parser.add_argument("--only", default="", metavar="CASES", help=what)
    options = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="stops") as folder:
        campaign = Campaign(Path(folder))
        stops(campaign, options.only.split(",") if options.only else ())
    path, here = options.out.with_suffix(".json"), environment(torch.device("cpu"))
    kept = json.loads(path.read_text()) if options.only else {"minutes": 0.0, "findings": []}
    anew = {finding.test: here["commit"] for finding in campaign.findings}
    found = [one for one in kept["findings"] if one["test"] not in anew]
    found += map(asdict, campaign.findings)
    found.sort(key=lambda finding: list(cases()).index(finding["test"]))
    content = {
        "environment": here,
        "minutes": kept["minutes"] + round((time.monotonic() - began) / 60, 1),
        "commits": kept.get("commits", {}) | anew,
        "findings": found,
    }
    path.write_text(json.dumps(content, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(page(content))
    held = sum(finding.held for finding in campaign.findings)
    print(f"{held} of {len(campaign.findings)} held")
    sys.exit(held < len(campaign.findings))


if __name__ == "__main__":
    main()
