"""Every model in every mode on the fake CUDA device, eager and replayed: the table in docs/results.

    python benchmarks/fake_cuda_cells.py OUT [PYTHON ...]

Each cell is one run with everything together (`combined` of tests/fake_cuda/cells.py),
which is then resumed. What a run with micro-batches refuses is tried again without them. The cells
run in this interpreter and, beside it, in others with another torch; OUT.json and OUT.md are
written. A cell takes about three seconds. No value and no time in them means anything: see
tests/fake_cuda/runtime.py. Exit code 1: a cell failed, warned, or launched a kernel beside
a capture.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from mprun.record.console import markdown_table  # noqa: E402
from tests.fake_cuda.cells import EXECUTION, MODELS, MODES, combined  # noqa: E402
from tests.fake_cuda.conftest import Device, build_with  # noqa: E402

_VERSIONS = "import torch, triton, sys; print(torch.__version__, triton.__version__, sys.version)"
_LONGER = ["train.steps=18"]  # of a resumed run
# In the reasons of refusals that a run with one micro-batch may not have.
_OF_MICRO_BATCHES = ("accumulate", "micro-batch")


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0].startswith("-"):
        print(__doc__.strip())
        return 2
    out, pythons = Path(arguments[0]), [sys.executable, *arguments[1:]]
    with (
        tempfile.TemporaryDirectory(prefix="fake-cuda-") as folder,
        ThreadPoolExecutor(len(pythons)) as pool,
    ):
        folders = [Path(folder, str(place)) for place in range(len(pythons))]
        found = list(pool.map(run_all, pythons, folders))
    out.with_suffix(".json").write_text(_lines(found), encoding="utf-8")
    text = "\n\n".join(map(page, found))
    out.with_suffix(".md").write_text(_HEAD + text + "\n", encoding="utf-8")
    print(text)
    return 0 if all(map(_sound, (cell for part in found for cell in _runs(part)))) else 1


def run_all(python: str, folder: Path) -> dict:
    """Run all cells with one interpreter; return its versions and a record for each cell."""
    asked = subprocess.run([python, "-c", _VERSIONS], capture_output=True, text=True, check=True)
    torch, triton, version, *_ = asked.stdout.split()
    build_with(python, folder)
    device, cells = Device(folder, python), []
    for model, mode, graph in product(MODELS, MODES, EXECUTION):
        overrides = combined(model, mode, graph)
        own = cell(device, folder / "run", overrides)
        if own["ended"] == "refused" and any(word in own["reason"] for word in _OF_MICRO_BATCHES):
            own["alone"] = cell(device, folder / "run", [*overrides, "train.accumulate=1"])
        cells.append({"model": model, "mode": mode, "graph": graph, **own})
        said = (run["ended"] for run in (own, *filter(None, [own.get("alone")])))
        print(f"torch {torch}: {model}, {mode}, {graph}: {', '.join(said)}", flush=True)
    device.close()
    return {"torch": torch, "triton": triton, "python": version, "cells": cells}


def cell(device: Device, run: Path, overrides: list[str]) -> dict:
    """Return the record of a run and its resumption: how they ended, counts, warnings, paths."""
    found = device.run(run, overrides)
    kept = {"counts": found["counts"], "warnings": found["warnings"]}
    error = found.get("error", "")
    if error.startswith("BadInput: ") and "\n" not in error and not run.exists():
        return kept | {"ended": "refused", "reason": error.removeprefix("BadInput: ")}
    if error or found["code"] != 0:
        shutil.rmtree(run, ignore_errors=True)
        return kept | {"ended": "failed", "reason": error or found["printed"][-2000:]}
    record = found["record"]
    again = device.ask("command", arguments=[f"resume={run}", *_LONGER])
    shutil.rmtree(run)
    kept["counts"] = dict(Counter(found["counts"]) + Counter(again["counts"]))
    kept["warnings"] += again["warnings"]
    if again.get("code") != 0:
        reason = again.get("error") or again["printed"][-2000:]
        return kept | {"ended": "failed", "reason": f"resume: {reason}"}
    return kept | {
        "ended": "ran",
        "update": sorted({u["path"] for u in record["precision"]["update"].values()}),
        "cuda_graph": record["execution"]["cuda_graph"],
    }


def _runs(part: dict) -> list[dict]:
    cells = part["cells"]
    return [*cells, *(cell["alone"] for cell in cells if "alone" in cell)]


def _sound(own: dict) -> bool:
    return own["ended"] != "failed" and not own["warnings"] and not own["counts"].get("stray")


def page(part: dict) -> str:
    """Format the table of one interpreter, its reasons and its sums."""
    reasons: dict[str, str] = {}
    cells = {(own["model"], own["mode"], own["graph"]): own for own in part["cells"]}

    def text(model: str, mode: str) -> str:
        said = [_cell_text(cells[model, mode, graph], reasons) for graph in reversed(EXECUTION)]
        return said[0] if len(set(said)) == 1 else " / ".join(said)

    lines = [[model, *(text(model, mode) for mode in MODES)] for model in MODELS]
    table = markdown_table(["model", *MODES], lines)
    sums = Counter()
    for own in _runs(part):
        sums.update(own["counts"])
    ended = Counter(own["ended"] for own in part["cells"])
    alone = Counter(own["alone"]["ended"] for own in part["cells"] if "alone" in own)
    notes = "\n".join(f"- **{letter}**: {reason}" for reason, letter in reasons.items())
    return (
        f"## torch {part['torch']}, Triton {part['triton']}, Python {part['python']}\n\n{table}\n\n"
        f"Refused, before anything was written:\n\n{notes}\n\n"
        f"{len(part['cells'])} cells: {_numbers(ended)}; of these again without micro-batches: "
        f"{_numbers(alone)}. {sums['launches'] + sums['driver_launches']:,} launches "
        f"({sums['driver_launches']:,} of Triton), {sums['library_calls']:,} calls of cuDNN and "
        f"cuBLAS, {sums['graphs']:,} graphs captured, replayed {sums['graph_launches']:,} times. "
        f"Waits between evaluations: 0 (each would have ended its cell). Launches beside a "
        f"capture: {sums['stray']}. Warnings: {sum(len(own['warnings']) for own in _runs(part))}."
    )


def _numbers(ended: Counter) -> str:
    return ", ".join(f"{ended[how]} {how}" for how in ("ran", "refused", "failed"))


def _cell_text(own: dict, reasons: dict[str, str]) -> str:
    """Return "ran", "captured", or the letter of a reason, with how it ended without."""
    if own["ended"] == "ran":
        how = own["cuda_graph"]
        return {"on": "captured", "off: train.cuda_graph=off": "ran"}.get(how, how)
    if own["ended"] == "failed":
        return "**failed**"
    letter = reasons.setdefault(own["reason"], chr(ord("a") + len(reasons)))
    alone = f" ({_cell_text(own['alone'], reasons)})" if "alone" in own else ""
    return letter + alone


def _lines(found: list[dict]) -> str:
    """Format JSON with a line for each cell."""
    parts = []
    for part in found:
        head = ", ".join(f'"{key}": {json.dumps(part[key])}' for key in part if key != "cells")
        cells = ",\n".join(map(json.dumps, part["cells"]))
        parts.append(f'{{{head}, "cells": [\n{cells}\n]}}')
    return "[" + ",\n".join(parts) + "]\n"


_HEAD = """\
# Every model in every mode on the fake CUDA device, everything together

The host side alone: no kernel ran, and no value means anything
(`tests/fake_cuda`). Each cell is a run of 12 steps of two micro-batches with
clipping, an average of the weights, evaluations and checkpoints, which is then resumed for 6 steps;
a wait for the device between evaluations is an error. As a graph, 3 steps of each are eager, the
others replayed. Networks are shrunk. Eager / as a graph: "ran", "captured", or the letter of the
reason why it is refused, and in brackets how the same run ended without micro-batches. Made by
benchmarks/fake_cuda_cells.py.

"""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
