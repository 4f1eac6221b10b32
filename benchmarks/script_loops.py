"""Every training loop of the tests in every mode that a CPU has, against the plain script.

    python -m benchmarks.script_loops [--modes fp32,amp,...] [--loops NAME,...] [--out FOLDER]

It writes FOLDER/<date>-cpu-script-loops.json and .md: each loop's outcome by mode
(`tests/script/loop_outcomes.py`), the number of each outcome by mode, and contradictions to the
tests. It takes about two minutes on one core.
"""

import argparse
import json
import math
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import torch

from mprun.record.console import markdown_table
from mprun.recording.environment import environment
from tests.script.loop_outcomes import ALL, Outcome, fault, outcome, plainly
from tests.script.loops import LOOPS

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
KINDS = ("equal", "near", "refused", "far", "failed")
WORDS = {"equal": "=", "refused": "refused", "failed": "**error**"}


def cell(found: dict) -> str:
    """Return an outcome in a word: "=", its deviation, or its kind."""
    if found["kind"] in WORDS:
        return WORDS[found["kind"]]
    text = "NaN" if found["deviation"] is None else f"{found['deviation']:.2g}"
    return text if found["kind"] == "near" else f"**far {text}**"


def as_values(name: str, mode: str, found: Outcome) -> dict:
    """Return an outcome for JSON; a deviation that is no number is None."""
    deviation = found.deviation if math.isfinite(found.deviation) else None
    return found._asdict() | {"deviation": deviation, "fault": fault(name, mode, found)}


def page(found: dict) -> str:
    """Return the result as a page."""
    machine, modes, loops = found["environment"], found["modes"], found["loops"]
    counts = {mode: Counter(by_mode[mode]["kind"] for by_mode in loops.values()) for mode in modes}
    by_kind = [[mode, *(str(counts[mode][kind]) for kind in KINDS)] for mode in modes]
    cells = [[name, *(cell(by_mode[mode]) for mode in modes)] for name, by_mode in loops.items()]
    said: dict[str, list[str]] = {}
    faults: dict[tuple[str, str], list[str]] = {}
    for name, by_mode in loops.items():
        for mode, one in by_mode.items():
            if one["said"]:
                said.setdefault(_line(one["said"]), []).append(f"{name} ({mode})")
            if one["fault"]:
                faults.setdefault((name, _line(one["fault"])), []).append(mode)
    lines = [f"- {line}\n  {len(where)}: {_few(where)}" for line, where in said.items()]
    wrong = [f"- {name}: {line}: {', '.join(where)}" for (name, line), where in faults.items()]
    parts = [
        _HEAD.format(
            **machine,
            torch=machine["packages"]["torch"],
            count=len(loops),
            date=found["date"],
            command=found["command"],
        ),
        markdown_table(["mode", *KINDS], by_kind),
        "Contradicting what the tests demand:",
        "\n".join(wrong) or "Nothing.",
        "What was said in place of a result, and how often:",
        "\n".join(lines) or "Nothing.",
        "Each loop (=: every bit of every compared tensor; a number: deviation as above):",
        markdown_table(["loop", *modes], cells),
    ]
    return "\n\n".join(parts) + "\n"


def _line(text: str) -> str:
    """Return the first line, short enough for a page."""
    first = text.partition("\n")[0]
    return first if len(first) <= 120 else first[:117] + "..."


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


_HEAD = """# Training loops of one's own in every mode, {date}, CPU

{count} training loops as scripts have them (`loops.py` and `loop_shapes.py` in
`tests/script`), with one line that calls `mprun.prepare`, against the same script
without it; {cpu}, {cpu_count} cores, torch {torch}, Python {python}, commit {commit}:

    {command}

A deviation is the distance between both ends, as a share of how far the plain script moved.
`tolerance` in `tests/script/loop_outcomes.py` derives what rounding explains; beyond
it is far. A refusal is one line of mprun's own; an error is any other exception."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--modes", default="fp32," + ",".join(sorted(ALL - {"fp32"})))
    parser.add_argument("--loops", default=",".join(LOOPS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    modes, loops = given.modes.split(","), {}
    for name in given.loops.split(","):
        plainly(name)  # before any mode: it must not depend on one
    for name in given.loops.split(","):
        loops[name] = {mode: as_values(name, mode, outcome(name, mode)) for mode in modes}
        print(name, *(cell(found) for found in loops[name].values()), flush=True)
    own = environment(torch.device("cpu"))
    date = datetime.now(UTC).date().isoformat()
    found = {
        "date": date,
        "command": "python -m benchmarks.script_loops",
        "environment": own,
        "modes": modes,
        "loops": loops,
    }
    path = given.out / f"{date}-cpu-script-loops"
    text = json.dumps(found, indent=1, allow_nan=False)
    path.with_suffix(".json").write_text(text + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(page(found), encoding="utf-8")
    print(path.with_suffix(".md"))


if __name__ == "__main__":
    main()
