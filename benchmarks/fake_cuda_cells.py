"""Every model in every mode on the fake CUDA device, eager and replayed: the table in docs/results.

    python benchmarks/fake_cuda_cells.py OUT [PYTHON ...]

It runs the cells of tests/fake_cuda, with their exceptions, in this interpreter and in others with
another torch, and writes OUT.json and OUT.md. A cell takes about a second. No value and no time in
them means anything: see `mprun.extensions.bench.fake_cuda`.
"""

import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from mprun.record.console import markdown_table  # noqa: E402
from tests.extensions.fake_cuda.cells import EXECUTION, MODELS, MODES, overrides, refusal  # noqa: E402
from tests.extensions.fake_cuda.conftest import Device, build_with  # noqa: E402

_VERSIONS = "import torch, triton, sys; print(torch.__version__, triton.__version__, sys.version)"


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0].startswith("-"):
        print(__doc__.strip())
        return 2
    out, pythons = Path(arguments[0]), [sys.executable, *arguments[1:]]
    found = []
    for python in pythons:
        with tempfile.TemporaryDirectory(prefix="fake-cuda-") as folder:
            found.append(run_all(python, Path(folder)))
    out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    text = "\n\n".join(map(page, found))
    out.with_suffix(".md").write_text(_HEAD + text + "\n", encoding="utf-8")
    print(text)
    return 0 if all(cell["ended"] != "failed" for part in found for cell in part["cells"]) else 1


def run_all(python: str, folder: Path) -> dict:
    """Run all cells with one interpreter; return its versions and a record for each cell."""
    asked = subprocess.run([python, "-c", _VERSIONS], capture_output=True, text=True, check=True)
    torch, triton, version, *_ = asked.stdout.split()
    build_with(python, folder)
    device, cells = Device(folder, python), []
    for model in MODELS:
        for mode in MODES:
            for graph in EXECUTION:
                run = folder / f"run-{len(cells)}"
                found = device.run(run, overrides(model, mode, graph))
                cells.append({"model": model, "mode": mode, "graph": graph, **cell(found)})
                refused = refusal(model, mode, graph)
                if refused is not None and refused in found.get("error", ""):
                    cells[-1] |= {"ended": "refused", "reason": refused}
                print(f"torch {torch}: {model}, {mode}, {graph}: {cells[-1]['ended']}", flush=True)
    device.close()
    return {"torch": torch, "triton": triton, "python": version, "cells": cells}


def cell(found: dict) -> dict:
    """Return the record of a run: how it ended, its counts, its warnings, its chosen paths."""
    kept = {"counts": found["counts"], "warnings": found["warnings"]}
    if "error" in found or found["code"] != 0:
        reason = found["error"] if "error" in found else f"exit code {found['code']}"
        return kept | {"ended": "failed", "reason": reason}
    record = found["record"]
    return kept | {
        "ended": "ran",
        "update": sorted({u["path"] for u in record["precision"]["update"].values()}),
        "cuda_graph": record["execution"]["cuda_graph"],
    }


def page(part: dict) -> str:
    """Format the table of one interpreter, and its sums."""
    lines, sums, warnings = [], Counter(), 0
    for model in MODELS:
        for mode in MODES:
            own = [c for c in part["cells"] if (c["model"], c["mode"]) == (model, mode)]
            lines.append([model, mode, *(_cell_text(c) for c in own), _update(own)])
    for own in part["cells"]:
        sums.update(own["counts"])
        warnings += len(own["warnings"])
    ended = Counter(own["ended"] for own in part["cells"])
    table = markdown_table(["model", "mode", "eager", "as a graph", "update"], lines)
    return (
        f"## torch {part['torch']}, Triton {part['triton']}, Python {part['python']}\n\n{table}\n\n"
        f"{len(part['cells'])} cells: {', '.join(f'{n} {k}' for k, n in ended.items())}. "
        f"{sums['launches'] + sums['driver_launches']:,} launches "
        f"({sums['driver_launches']:,} of Triton), {sums['library_calls']:,} calls of cuDNN and "
        f"cuBLAS, {sums['graphs']} graphs captured and replayed {sums['graph_launches']} times. "
        f"Waits between evaluations: 0 (each would have ended its cell). Launches beside a "
        f"capture: {sums['stray']}. Warnings: {warnings}."
    )


def _cell_text(own: dict) -> str:
    if own["ended"] != "ran":
        return f"{own['ended']}: {own['reason']}"
    if own["graph"] == "off":
        return "ran"
    return "captured" if own["cuda_graph"] == "on" else own["cuda_graph"]


def _update(own: list[dict]) -> str:
    return ", ".join(sorted({path for c in own for path in c.get("update", [])}))


_HEAD = """\
# Every model in every mode on the fake CUDA device

The host side alone: no kernel ran, and no value means anything
(`mprun/extensions/bench/fake_cuda`). Each cell is a run of 12 steps with
evaluations and, but for AlexNet, checkpoints, in which a wait for the device between evaluations
is an error; as a graph, 3 steps are eager and 9 replayed. "single_pass":
the Triton kernels, compiled for sm_90a. Made by benchmarks/fake_cuda_cells.py.

"""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
