"""A step of mprun beside torch.amp's and a plain one in BF16, on a CPU that multiplies in BF16.

    python -m benchmarks.native_bf16 [--only GPT,DCGAN] [--rounds 12] [--out FOLDER]

One process and one thread; all contenders of a network take turns in windows of at least 0.3 s of
processor time, which is what is compared: other programs on the machine do not count there. "+" is
compiled by torch.compile, with images in NHWC order. `--out` writes the page
DATE-cpu-native-bf16.md and .json there, after each network. Exit code 3: mprun is slower than the
best peer somewhere, by the whole interval.
"""

import argparse
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.same_bits import ROOT, about, commit_of
from benchmarks.suite.contenders import OWN, make
from benchmarks.suite.models import NATIVE_SUITE
from mprun.extensions.bench.cases import BenchGroup, Case
from mprun.extensions.bench.measure import WINDOW_S, Contender, steps_for
from mprun.extensions.bench.runner import compiles
from mprun.extensions.bench.summary import ratio_of, spread
from mprun.record.console import markdown_table

CPU = torch.device("cpu")
# Steps before anything is timed: the second one compiles. The first four have batches of their own.
WARM_UP, APART = 6, 4
CASES = (
    *(("amp_bf16", name) for name in ("mprun", "mprun+", "amp", "amp+")),
    *(("bf16_master", name) for name in ("mprun", "mprun+")),
    *(("bf16_naive", name) for name in ("mprun", "loop")),
)
PEERS = {"amp": "torch.amp", "amp+": "torch.amp compiled", "loop": "all in BF16"}
SAID = {"mprun": "mprun", "mprun+": "mprun compiled", **PEERS}
# Modes without masters are compared with those alike.
RIVALS = {"amp_bf16": ("amp", "amp+"), "bf16_master": ("amp", "amp+"), "bf16_naive": ("loop",)}
NOTE = """\
`cpu_half=native`: torch's kernels multiply in BF16, nothing is emulated. Milliseconds are processor
time of one step, since other programs ran on the machine. All contenders of a network took turns in
one process, in windows of at least 0.3 s; a ratio is the median of the rounds, with a bootstrap
95 % interval; above 1 mprun is faster. Peers have the same weights, batches and optimizer
(`benchmarks/suite/peers`). torch.amp: autocast as documented; compiled: also NHWC and a fused
optimizer. All in BF16: `.bfloat16()`, without masters. An nn.LSTM is not compiled: torch hands it
back as a whole."""
Row = dict[str, Any]


def cpu_seconds(contender: Contender, steps: int) -> float:
    """Return the seconds of this process that a step takes."""
    before = time.process_time()
    contender.run(steps)
    return (time.process_time() - before) / steps


def measured(group: BenchGroup, rounds: int) -> list[Row]:
    """Return a row of each contender: milliseconds a step in each round, and its losses."""
    alive: list[tuple[Row, Contender, int]] = []
    for mode, name in CASES:
        case = Case(group.label, (*group.overrides, "cpu_half=native", "threads=1"), mode, name)
        if name.endswith("+") and not compiles(case.config(), CPU.type):
            continue
        started = time.perf_counter()
        contender = make(case, CPU)
        losses = [float(contender.step()) for _ in range(WARM_UP)]
        steps = steps_for(min(cpu_seconds(contender, 1) for _ in range(2)), WINDOW_S)
        row = {"label": group.label, "mode": mode, "contender": name, "losses": losses}
        row |= {"settings": contender.settings(), "steps": steps, "step_ms": []}
        alive.append((row, contender, steps))
        took = time.perf_counter() - started
        print(f"{group.label} {mode} {name}: ready in {took:.0f} s", file=sys.stderr, flush=True)
    for number in range(rounds):
        # Each begins once in a while: the first of a round finds other caches.
        turn = number % len(alive)
        for row, contender, steps in alive[turn:] + alive[:turn]:
            contender.run(1)  # another one had the caches
            row["step_ms"].append(1000 * cpu_seconds(contender, steps))
    return [row for row, *_ in alive]


def against(row: Row, rows: list[Row]) -> dict[str, Any] | None:
    """Return how much faster a row of mprun is than its fastest peer, with the peer's name."""
    peers = [one for one in rows if one["contender"] in RIVALS[row["mode"]]]
    if row["contender"] not in OWN:
        return None
    best = min(peers, key=lambda peer: spread(peer["step_ms"])["median"])
    found = ratio_of(best["step_ms"], row["step_ms"], paired=True)
    return found | {"peer": SAID[best["contender"]]}


def tables(rows: list[Row]) -> tuple[str, str, list[str]]:
    """Return the table of steps, that of the best of mprun, and where this one is slower."""
    lines, best_lines, slower = [], [], []
    for label in dict.fromkeys(row["label"] for row in rows):
        own = [row for row in rows if row["label"] == label]
        for row in own:
            time_ms, ratio = spread(row["step_ms"]), against(row, own)
            lines.append([
                label, row["mode"], SAID[row["contender"]],
                f"{time_ms['median']:.1f} [{time_ms['q1']:.1f}, {time_ms['q3']:.1f}]",
                "" if ratio is None else _ratio(ratio), f"{row['losses'][APART - 1]:.4f}",
            ])  # fmt: skip
        for mode in RIVALS:
            mine = [r for r in own if r["mode"] == mode and r["contender"] in OWN]
            fastest = min(mine, key=lambda row: spread(row["step_ms"])["median"])
            ratio = against(fastest, own)
            assert ratio is not None
            verdict = "slower" if ratio["high"] < 1 else "faster" if ratio["low"] > 1 else "even"
            best_lines.append([label, mode, SAID[fastest["contender"]], _ratio(ratio), verdict])
            slower += [f"{label} {mode}"] if verdict == "slower" else []
    header = ["network", "mode", "loop", "ms a step [quartiles]", "times the best peer"]
    of_steps = markdown_table([*header, f"loss at step {APART}"], lines)
    names = ["network", "mode", "fastest of mprun", "times the best peer", ""]
    return of_steps, markdown_table(names, best_lines), slower


def _ratio(found: dict[str, Any]) -> str:
    return f"{found['median']:.3f} [{found['low']:.3f}, {found['high']:.3f}] {found['peer']}"


def page(made: dict[str, str], rows: list[Row], rounds: int) -> str:
    """Return the page of results."""
    of_steps, of_best, _ = tables(rows)
    return "\n\n".join([
        f"# BF16 by a CPU's own kernels, {made['date']}",
        f"{made['machine']}, one thread, torch {made['torch']}, Python {made['python']}, commit\n"
        f"{made['this']}; n = {rounds} rounds. Command:",
        f"    {made['command']}",
        NOTE,
        "## The fastest of mprun beside the best peer",
        of_best,
        "## All",
        of_steps,
    ]) + "\n"  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="networks whose names begin so")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    made = about("benchmarks.native_bf16", *sys.argv[1:])
    made |= {"torch": torch.__version__, "this": commit_of(ROOT)}
    rows: list[Row] = []
    for group in NATIVE_SUITE:
        if not group.label.startswith(tuple(options.only.split(","))):
            continue
        rows += measured(group, options.rounds)
        torch.compiler.reset()
        gc.collect()
        if options.out is not None:
            path = options.out / f"{made['date']}-cpu-native-bf16.md"
            path.write_text(page(made, rows, options.rounds), encoding="utf-8")
            lines = ",\n".join(map(json.dumps, rows))
            text = f'{{"about": {json.dumps(made)},\n"rows": [\n{lines}\n]}}\n'
            path.with_suffix(".json").write_text(text, encoding="utf-8")
    of_steps, of_best, slower = tables(rows)
    print(f"{of_best}\n\n{of_steps}")
    return 3 if slower else 0


if __name__ == "__main__":
    raise SystemExit(main())
