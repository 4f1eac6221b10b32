"""python -m benchmarks.faults OUT [--only TEST,...]: the campaign, as OUT.json and OUT.md."""

import argparse
import collections
import json
import platform
import tempfile
import time
from pathlib import Path

import torch

import mprun.cli.compare
import mprun.cli.explain
import mprun.cli.scaler_replay
import mprun.training.resume  # noqa: F401  # here, so that a forked case need not import them
from benchmarks.faults import command_lines, damages, processes
from benchmarks.faults.harness import Campaign, Finding
from mprun.training.environment import environment

TESTS = {
    "kills": processes.kills,
    "signals": processes.signals,
    "terminals": processes.terminals,
    "limits": processes.limits,
    "sweeps": processes.sweeps,
    "metrics": damages.metrics_file,
    "config": damages.configuration,
    "record": damages.run_record,
    "foreign": damages.foreign_state,
    "flips": damages.flipped_state,
    "payloads": damages.payloads,
    "strangers": damages.strangers,
    "generated": command_lines.generated,
    "by_hand": command_lines.by_hand,
}


def main() -> None:
    """Run what was asked for and write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    parser.add_argument("out", type=Path, help="OUT.json and OUT.md are written")
    parser.add_argument("--only", default=",".join(TESTS), help=f"of {', '.join(TESTS)}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="faults") as folder:
        campaign = Campaign(Path(folder))
        for name in options.only.split(","):
            before = len(campaign.findings)
            TESTS[name](campaign)
            new = campaign.findings[before:]
            held = sum(finding.held for finding in new)
            print(f"{name}: {held} of {len(new)} held", flush=True)
    minutes = (time.monotonic() - started) / 60
    content = {
        "environment": environment(torch.device("cpu")),
        "minutes": round(minutes, 1),
        "findings": [
            {"test": f.test, "case": f.case, "kind": f.kind, "detail": f.detail}
            for f in campaign.findings
        ],
    }
    options.out.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(page(campaign.findings, minutes, content))


def page(findings: list[Finding], minutes: float, content: dict) -> str:
    """The table of tests, and every case that did not hold."""
    tests = dict.fromkeys(finding.test for finding in findings)
    where = content["environment"]
    lines = [
        "# A campaign of faults",
        "",
        f"`python -m benchmarks.faults OUT` at {str(where['commit'])[:7]}, torch "
        f"{where['packages']['torch']}, {platform.machine()} ({where['cpu']}), {minutes:.0f} "
        "minutes. Found: one line and exit code 2, 4 or 5. Harmless: the run ended with the same "
        "bits as one that nothing befell.",
        "",
        "| test | cases | found | harmless | did not hold |",
        "|---|---|---|---|---|",
    ]
    for test in tests:
        kinds = collections.Counter(f.kind for f in findings if f.test == test)
        bad = {kind: n for kind, n in kinds.items() if kind not in ("found", "harmless")}
        told = ", ".join(f"{n} {kind}" for kind, n in bad.items()) or "0"
        total = sum(kinds.values())
        lines.append(f"| {test} | {total} | {kinds['found']} | {kinds['harmless']} | {told} |")
    failed = [finding for finding in findings if not finding.held]
    if failed:
        lines += ["", "## Did not hold", ""]
        lines += [f"- {f.test}: `{f.case}`: {f.kind}. {f.detail}" for f in failed]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
