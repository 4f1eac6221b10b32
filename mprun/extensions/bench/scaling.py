"""`mprun bench devices=N`: how speed grows with the ranks, and the cost of summing gradients.

It runs 1, 2, 4, ... N ranks. Each takes micro-batches as large as those of a single rank (weak
scaling). Windows with and without the sum of gradients take turns in one run. Their difference is
exposed: backward could not hide it. Batches lie on the device.

A rank is `mprun bench --of-a-rank FILE WINDOWS OVERRIDE...`; rank 0 writes FILE.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mprun.config.compose import compose_config
from mprun.config.registry import shares_streams
from mprun.config.schema import RunConfig
from mprun.distributed.launch import launch
from mprun.distributed.rank_info import rank_info_from
from mprun.errors import DONE, BadInput, Resource
from mprun.extensions.bench.contest import Contest
from mprun.extensions.bench.measure import WINDOW_S, synchronise
from mprun.extensions.bench.session import claimed
from mprun.record.console import markdown_table
from mprun.record.layout import for_terminal
from mprun.record.run_directory import write_json, write_text
from mprun.sweeps.child import child
from mprun.training.run import joined, placed, prepare, resolve_device

WARM_UP = 12  # DistributedDataParallel orders its buckets anew in the second step


def scaling(options: Namespace, devices: str) -> int:
    """Measure, write scaling.json and scaling.md, print; return the exit code.

    devices: a number, or auto.
    """
    config = compose_config(options.overrides, options.config_dir).config
    device = resolve_device(config.device)
    counts = worlds(devices, device)
    groups, _ = Contest().plan(options, device)
    folder = claimed(options, groups)
    rows: list[dict[str, Any]] = []
    for mode in groups[0].modes:
        for world in counts:
            found = _measured((*options.overrides, f"precision={mode}"), config, world, options)
            if isinstance(found, int):
                return found
            rows.append({"mode": mode} | found)
            print(f"  {mode}, {world} ranks: {found['samples_per_s']:.4g}/s", file=sys.stderr)
            content = {"device": device.type, "overrides": list(options.overrides), "rows": rows}
            write_json(folder / "scaling.json", content)
    text = _table(rows)
    write_text(folder / "scaling.md", f"{text}\n")
    shown = f"{for_terminal(text)}\nbench: {folder}"
    print(json.dumps(content, indent=1) if options.json else shown)
    return DONE


def worlds(devices: str, device: torch.device) -> list[int]:
    """Return 1, 2, 4, ... up to the number of devices, and that number.

    Raises:
        BadInput: not a number, or more devices than exist.
    """
    count = torch.cuda.device_count() if device.type == "cuda" else os.cpu_count() or 1
    most = count if devices == "auto" else int(devices) if devices[:6].isdecimal() else 0
    if not 1 <= most <= count:
        raise BadInput(
            f"bench devices={devices}: must be a whole number from 1 to {count} here, or auto"
        )
    return sorted({*(2**power for power in range(most.bit_length())), most})


def _measured(
    overrides: Sequence[str], config: RunConfig, world: int, options: Namespace
) -> dict[str, Any] | int:
    """Return the measurement of rank 0, or the exit code if the ranks failed."""
    # Each rank gets the work of a single one.
    key, single = "train.accumulate", config.train.accumulate
    if shares_streams(config.model):
        key, single = "data.batch_size", config.data.batch_size
    with tempfile.TemporaryDirectory(prefix="mprun-bench-") as folder:
        file = Path(folder) / "found.json"
        work = (f"{key}={single * world}", f"devices={world}")
        words = ["bench", "--of-a-rank", str(file), str(options.windows), *overrides, *work]
        module = "mprun.extensions.bench.scaling"
        code = launch(words, world, config_dir=options.config_dir, module=module)
        if code != DONE:
            return code
        if not file.exists():
            raise Resource("bench: the ranks ended without a measurement")
        return json.loads(file.read_text(encoding="utf-8"))


def _table(rows: list[dict[str, Any]]) -> str:
    alone = {row["mode"]: row["samples_per_s"] for row in rows if row["world"] == 1}
    lines = []
    for row in rows:
        each, exposed = row["samples_per_s"] / row["world"], row["exposed_ms"]
        lines.append([
            row["mode"],
            str(row["world"]),
            f"{row['samples_per_s']:.4g}",
            f"{each:.4g}",
            f"{100 * (each / alone[row['mode']]):.1f} %",
            f"{row['step_ms']:.4g}",
            f"{exposed:.3g} ({100 * exposed / row['step_ms']:.1f} %)",
        ])  # fmt: skip
    header = ["mode", "ranks", "samples/s", "a rank", "efficiency", "ms a step", "exposed ms"]
    return markdown_table(header, lines)


def of_a_rank(arguments: list[str]) -> int:
    """Measure as one rank; return the exit code."""
    file, windows, *overrides = arguments
    config_dir = None
    if "--config-dir" in overrides:  # `launch` puts it last
        *overrides, _, config_dir = overrides
    rank_info = rank_info_from()
    config = placed(compose_config(overrides, config_dir).config, rank_info)
    device = resolve_device(config.device)
    ranks = joined(config, device, rank_info)
    with ranks.watched():
        built = ranks.together(lambda: prepare(config, device, config.threads, ranks))
        task = built.task
        batches = list(task.load(0))
        found_in = [learner.reduction for learner in task.learners.values()]
        reductions: list[Any] = [reduction for reduction in found_in if reduction is not None]

        def steps(count: int) -> float:
            ranks.together(lambda: None)  # all begin at once
            started = time.perf_counter()
            for _ in range(count):
                task.compute(iter(batches))
            synchronise(device)
            return time.perf_counter() - started

        with built.stepper.on_stream():
            steps(WARM_UP)
            count = ranks.first(max(1, round(WINDOW_S / (steps(3) / 3))))
            # Seconds of a step, with and without the sum of gradients.
            whole: list[float] = []
            alone: list[float] = []
            for muted in (False, True) * int(windows):
                for reduction in reductions:
                    reduction.muted = muted
                (alone if muted else whole).append(steps(count) / count)
    if ranks.is_first:
        step_s = statistics.median(whole)
        exposed = statistics.median(a - b for a, b in zip(whole, alone, strict=True))
        found = {
            "world": ranks.world,
            "sample": task.sample,
            "samples_per_s": task.samples_per_step / step_s,
            "step_ms": 1e3 * step_s,
            "exposed_ms": 1e3 * max(0.0, exposed) if ranks.world > 1 else 0.0,
            "windows_ms": [1e3 * seconds for seconds in whole],
            "windows_without_sum_ms": [1e3 * seconds for seconds in alone],
            "steps": count,
        }
        write_json(Path(file), found)
    ranks.leave(DONE)
    return DONE


if __name__ == "__main__":
    raise SystemExit(child(sys.argv[1:]))
