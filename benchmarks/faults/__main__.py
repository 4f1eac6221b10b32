"""python -m benchmarks.faults OUT [--only TEST,...]: the campaign, as OUT.json and OUT.md."""

import argparse
import collections
import gc
import json
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import tensorboard.plugins.hparams.summary_v2  # noqa: F401  # here, as all below: a forked case
import torch
import torch._dynamo  # need not import them
import torch.utils.tensorboard  # noqa: F401

import mprun.cli.compare
import mprun.extensions.diagnosis.commands.advise
import mprun.extensions.diagnosis.commands.explain
import mprun.extensions.diagnosis.commands.logprobs
import mprun.extensions.paper.command
import mprun.training.resume  # noqa: F401
from benchmarks.faults import damages, processes, stops
from benchmarks.faults.harness import Campaign, Finding
from mprun.recording.environment import environment

TESTS = {
    "kills": processes.kills,
    "signals": processes.signals,
    "stops": stops.stops,
    "terminals": processes.terminals,
    "limits": processes.limits,
    "sweeps": processes.sweeps,
    "metrics": damages.metrics_file,
    "config": damages.configuration,
    "record": damages.run_record,
    "every_file": damages.every_file,
    "foreign": damages.foreign_state,
    "flips": damages.flipped_state,
    "payloads": damages.payloads,
    "strangers": damages.strangers,
}


def main() -> None:
    """Run the requested parts one after another; write each as soon as it ends."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    what = "OUT.json and OUT.md are written; parts that OUT.json has from before stay"
    parser.add_argument("out", type=Path, help=what)
    parser.add_argument("--only", default=",".join(TESTS), help=f"of {', '.join(TESTS)}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    gc.freeze()  # freeze all objects: no fork copies them
    path = options.out.with_suffix(".json")
    parts = json.loads(path.read_text()) if path.exists() else {}
    for name in options.only.split(","):
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="faults") as folder:
            campaign = Campaign(Path(folder))
            TESTS[name](campaign)
        held = sum(finding.held for finding in campaign.findings)
        print(f"{name}: {held} of {len(campaign.findings)} held", flush=True)
        parts[name] = {
            "environment": environment(torch.device("cpu")),
            "minutes": round((time.monotonic() - started) / 60, 1),
            "findings": [asdict(finding) for finding in campaign.findings],
        }
        parts = {name: parts[name] for name in TESTS if name in parts}
        path.write_text(json.dumps(parts, indent=1) + "\n")
        options.out.with_suffix(".md").write_text(page(parts))


def page(parts: dict[str, dict]) -> str:
    """Format the table of tests, and every case that did not hold."""
    lines = [
        "| part | test | cases | found | harmless | did not hold | commit |",
        "|---|---|---|---|---|---|---|",
    ]
    failed = []
    for name, part in parts.items():
        commit = str(part["environment"]["commit"])[:7]
        for test in dict.fromkeys(finding["test"] for finding in part["findings"]):
            found = [Finding(**f) for f in part["findings"] if f["test"] == test]
            kinds = collections.Counter(finding.kind for finding in found)
            bad = {kind: n for kind, n in kinds.items() if kind not in ("found", "harmless")}
            told = ", ".join(f"{n} {kind}" for kind, n in bad.items()) or "0"
            counts = f"{len(found)} | {kinds['found']} | {kinds['harmless']} | {told}"
            lines.append(f"| {name} | {test} | {counts} | {commit} |")
            failed += [finding for finding in found if not finding.held]
    if failed:
        lines += ["", "Did not hold:", ""]
        lines += [f"- {f.test}: `{f.case}`: {f.kind}. {f.detail}" for f in failed]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
