"""The speed targets on a CPU, in one run and one table; exit code 1 if one is missed.

    python benchmarks/cpu_targets.py [--only runner] [--repeats 7] [--json FILE] [--markdown FILE]

Every figure is a ratio of two contenders that took turns in one process, so that a slow spell of
the machine hits both. The median over turns is judged; the spread is printed beside it.
The process keeps freed memory (runner_overhead.py says why).
    runner      mprun's loop over a bare PyTorch loop, CPU time, 1 thread (runner_overhead.py)
    emulation   emulated FP16 over FP32, forward and backward, CPU time, 1 thread
                (emulation_cost.py)
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from mprun.record.console import markdown_table

GROUPS = ("runner", "emulation")


@dataclass(frozen=True, slots=True)
class Target:
    """A target and its measurement. ratios: one for each turn. limit: the largest accepted one."""

    group: str
    name: str
    limit: float
    ratios: list[float]

    @property
    def ratio(self) -> float:
        """The median, the judged value."""
        return statistics.median(self.ratios)

    @property
    def reached(self) -> bool:
        return self.ratio <= self.limit


def main(arguments: list[str] | None = None) -> int:
    """Return 0 if every target is reached, 1 if one is missed or could not be measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=GROUPS, action="append", help="default: all")
    parser.add_argument("--case", default="", help="cases with this in their name")
    parser.add_argument("--repeats", type=int, default=7, help="turns; one more warms up")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    measured, failures, started = [], [], time.perf_counter()
    for group in options.only or GROUPS:
        try:
            measured += _MEASURE[group](options.repeats, options.case)
        except ImportError as error:  # the target of a missing benchmark is not shown
            failures.append(f"{group}: {error}")
    text = as_markdown(measured, failures)
    print(text)
    if options.markdown:
        options.markdown.write_text(text + "\n", encoding="utf-8")
    if options.json:
        rows = [asdict(t) | {"ratio": t.ratio, "reached": t.reached} for t in measured]
        record = {
            "torch": torch.__version__,
            "cpu": platform.processor(),
            "seconds": time.perf_counter() - started,
            "targets": rows,
            "not measured": failures,
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0 if measured and not failures and all(t.reached for t in measured) else 1


def as_markdown(measured: list[Target], failures: list[str]) -> str:
    """Make one row for each target."""
    rows = [
        [
            target.group,
            target.name,
            f"{target.ratio:.3f}",
            f"{min(target.ratios):.3f}-{max(target.ratios):.3f}",
            str(len(target.ratios)),
            f"{target.limit:.2f}",
            "reached" if target.reached else "missed",
        ]
        for target in measured
    ]
    header = ["group", "case", "ratio, median", "min-max", "n", "target", ""]
    lines = [markdown_table(header, rows)] if rows else []
    return "\n".join([*lines, *(f"not measured: {failure}" for failure in failures)])


def _runner(repeats: int, case: str) -> Iterator[Target]:
    from runner_overhead import CASES, measure

    torch.set_num_threads(1)
    for name in CASES:
        if case in name:
            found = measure(name, repeats)
            yield Target("runner", name, found["target"], found["ratios"])


# The table of emulation_cost.py has longer sequences and other batches.
_EMULATED = {
    ("resnet50", 32): "ResNet-50, batch 32, 32 px",
    ("dcgan", 32): "DCGAN, batch 32, 64 px",
    ("alexnet", 32): "AlexNet, batch 32, 224 px",
    ("lstm_lm T20", 64): "LSTM LM 2 x 512, batch 64, 20 steps",
    ("lstm_lm T20 proj128", 64): "LSTM LM 2 x 512 -> 128, batch 64, 20 steps",
}


def _emulation(repeats: int, case: str) -> Iterator[Target]:
    from emulation_cost import turns, workloads

    torch.set_num_threads(1)
    for work in workloads():
        name = _EMULATED.get((work.name, work.batch))
        if name is None or case not in name:
            continue
        (base, half, autocast), _ = turns(work, repeats, torch.float16)
        for kind, times in (("half weights", half), ("autocast", autocast)):
            ratios = [emulated / fp32 for emulated, fp32 in zip(times, base, strict=True)]
            yield Target("emulation", f"{name}, {kind}", work.target, ratios)


_MEASURE = {"runner": _runner, "emulation": _emulation}

if __name__ == "__main__":
    from runner_overhead import keep_freed_memory

    keep_freed_memory()
    sys.exit(main())
