"""`mprun bench`: measure speed, memory and energy of precision modes.

A bench with more contenders adds its options to `bench_parser` (benchmarks.suite).
"""

import json
import pkgutil
import sys
import time
from argparse import Namespace

from mprun.cli.arguments import Arguments, known_modes, names, number
from mprun.config.compose import compose_config
from mprun.errors import BUG, DONE, INTERRUPTED, RESOURCE, BadInput
from mprun.extensions.bench.cases import REFERENCES, check_overrides
from mprun.record.layout import for_terminal

LEAST_BUDGET_S = 20
_GONE = "gone; a checkout has python -m benchmarks.suite --host (docs/bench.md)"
_REFUSED = dict.fromkeys(("--ranks", "--link"), "goes with --roofline")
_REFUSED |= dict.fromkeys(("--host", "--card"), _GONE)
_WHAT = """\
Speed, memory and energy per precision mode of the configuration, and its share of the device's
limit. Each mode runs in a separate process. Their windows take turns, on batches that are already
on the device.

  mprun bench [key=value ...]   the modes of this configuration, measured here
  mprun bench devices=8 ...     1, 2, 4, 8 ranks: speed, efficiency, cost of summing gradients in a step
  mprun bench --roofline ...    FLOPs, bytes and limits of a step, without a GPU (mprun bench --roofline --help)"""  # noqa: E501 - the help page breaks lines
_MORE = """\
Writes bench.jsonl (windows as they are measured), bench.json, bench.md, bench.png, logs/.

Exit codes: 0 done, 2 bad input, 5 nothing measured for lack of memory or time, 130 interrupted."""


def main(arguments: list[str]) -> int:
    """Entry point of the verb; returns the exit code."""
    if arguments[:1] == ["--of-a-rank"]:  # of `_scaling`
        from mprun.extensions.bench.scaling import of_a_rank

        return of_a_rank(arguments[1:])
    if "--roofline" in arguments:
        from mprun.extensions.bench.roofline.command import main as roofline

        return roofline([argument for argument in arguments if argument != "--roofline"])
    for word in arguments:
        if reason := _REFUSED.get(word.partition("=")[0]):
            raise BadInput(f"bench {word}: {reason}")
    for word in arguments:
        if word.startswith("devices=") and word != "devices=1":
            return _scaling([a for a in arguments if a != word], word.partition("=")[2])
    started = time.monotonic()
    return bench("mprun.extensions.bench.contest:Contest", parse(arguments), started)


def _scaling(arguments: list[str], devices: str) -> int:
    options = parse(arguments)
    for name in ("end_to_end", "plain", "steps_per_window"):
        if getattr(options, name):
            raise BadInput(
                f"bench --{name.replace('_', '-')}: is not allowed with devices={devices}"
            )
    from mprun.extensions.bench.scaling import scaling

    return scaling(options, devices)


def bench_parser(what: str = _WHAT) -> Arguments:
    """Return a parser with the options that every bench has."""
    found = Arguments("bench", what, _MORE, overrides=True)
    add = found.add_argument
    add("--modes", type=names("--modes"), metavar="A,B", help="precision modes, including your own "
            "(fp32,tf32,fp16_naive,fp16_master_scaled,amp,amp_bf16 on a GPU; "
            "fp32,fp16_master_scaled,amp on a CPU)")  # fmt: skip
    add("--budget", dest="budget_s", default=540.0, metavar="SECONDS",
        type=number("--budget", LEAST_BUDGET_S, 86_400, "seconds"),
        help="seconds after which the bench ends with the results so far (540)")  # fmt: skip
    add("--out", metavar="DIR", help="output folder (outputs/bench/...), which must not exist")
    add("--windows", type=number("--windows", 1, 1000, whole=True), default=5, metavar="N",
        help="number of time windows measured for each contender (5)")  # fmt: skip
    add("--steps-per-window", type=number("--steps-per-window", 1, 10_000, whole=True),
        metavar="K", help="number of steps in a time window (as many as take 0.3 s)")  # fmt: skip
    add("--end-to-end", action="store_true",
        help="also measure steps that load the data of the configuration")  # fmt: skip
    add("--plain", action="store_true",
        help="measure mprun only with its defaults, not also with its best settings")  # fmt: skip
    add("--json", action="store_true", help="print the content of bench.json instead of the tables")
    add("--config-dir", metavar="DIR", help="folder with your own option files, as for a run")
    return found


def parse(arguments: list[str], parser: Arguments | None = None) -> Namespace:
    """Parse the options and check them and the configuration, without torch."""
    options = (parser or bench_parser()).parse(arguments)
    if options.modes is not None:
        modes = known_modes("--modes", options.modes, options.config_dir)
        options.modes = sorted(modes, key=lambda name: name not in REFERENCES)
    check_overrides(options.overrides)
    compose_config(options.overrides, options.config_dir)
    return options


def bench(contest: str, options: Namespace, started: float) -> int:
    """Measure, write and print; return the exit code.

    Args:
        contest: "module:class" of the measurement, imported here because it takes seconds.
        started: when the budget began, in time.monotonic.
    """
    from mprun.extensions.bench.session import run_bench

    content, text, folder = run_bench(pkgutil.resolve_name(contest)(), options, started)
    if options.json:
        print(json.dumps(content, indent=1, allow_nan=False))
    else:
        print(f"{for_terminal(text)}\nbench: {folder}")
    return exit_code(content)


def exit_code(bench: dict) -> int:
    """Return 130 if interrupted; if nothing was measured 1 for an error, else 5."""
    if bench["ended"] == "interrupted":
        return INTERRUPTED
    rows = bench["rows"]
    if any(row["windows"] for row in rows):
        return DONE
    kinds = {row["kind"] for row in rows if row["status"] == "failed"}
    print("mprun: bench: nothing was measured; the report says why", file=sys.stderr)
    return BUG if kinds - {"memory"} else RESOURCE
