"""bench.json, bench.md and bench.png."""

from pathlib import Path

import torch

from mprun.bench.figure import write_figure
from mprun.bench.options import Options
from mprun.bench.report import markdown
from mprun.bench.rows import Row, writable
from mprun.bench.run_bench import Outcome, device_name
from mprun.bench.summary import summarise
from mprun.bench.targets import judge
from mprun.record.run_directory import write_json
from mprun.training.environment import environment

FORMAT = 1


def assemble(
    options: Options, device: torch.device, outcome: Outcome, left_out: list[dict]
) -> dict:
    """Everything that is known, as plain values: what bench.json holds.

    Raw windows are in each row, the figures of the report in its "summary". Targets are those of an
    H200 and judged on no other device.
    """
    rows = [writable({"key": row.key, **row.as_dict()}) for row in _in_order(outcome.rows)]
    summarise(rows)
    name = device_name(device)
    return {
        "format": FORMAT,
        "ended": outcome.ended,
        "options": options.as_dict(),
        "device_name": name,
        "driver": outcome.machine.get("driver"),
        "nvml": outcome.machine.get("nvml", {}),
        "environment": environment(device),
        "ceilings": outcome.machine.get("ceilings"),
        "left_out": left_out,
        "rows": rows,
        "targets": judge(rows) if "H200" in name else None,
    }


def _in_order(rows: list[Row]) -> list[Row]:
    """Model by model and mode by mode, for a reader; they were measured in another order."""
    cases = [row.case for row in rows]
    places = list(dict.fromkeys((case.label, case.real_data, case.mode) for case in cases))
    labels = list(dict.fromkeys(case.label for case in cases))

    def place(row: Row) -> tuple:
        case = row.case
        found = places.index((case.label, case.real_data, case.mode))
        return labels.index(case.label), case.real_data, found

    return sorted(rows, key=place)


def write_all(folder: Path, bench: dict) -> str:
    """Write the three files; the Markdown."""
    write_json(folder / "bench.json", bench)
    text = markdown(bench)
    (folder / "bench.md").write_text(text, encoding="utf-8")
    write_figure(folder / "bench.png", bench)
    return text
