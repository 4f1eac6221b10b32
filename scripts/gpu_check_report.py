"""What scripts/gpu_check leaves: one summary in Markdown and JSON, figures, one archive."""

import json
import shlex
import shutil
import sys
import tarfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from gpu_check_processes import Ended, Step

MAX_FIGURES = 4
MAX_FILE = 15 * 2**20  # bytes; some remote machines hand back no file above 16 MiB
KEPT = {".json", ".jsonl", ".txt", ".md", ".xml", ".yaml", ".csv", ".html", ".svg", ".png"}
_PLAIN_LINES, _ERROR_LINES = 80, 20


def step_report(step: Step, ended: Ended, limit: float, out: Path, err: Path) -> dict:
    """A step as plain values: how it ended, what it printed, what it recorded."""
    status = "done"
    if ended.code is None:
        status = "overran its time and was ended"
    elif ended.code not in step.accepted:
        status = f"failed (exit code {ended.code})"
    command = step.command
    if command[0] == sys.executable:
        command = ["python3", *command[1:]]
    record, problem = _record(step.record)
    if problem and status == "done":
        status = f"failed ({problem})"
    return {
        "name": step.name,
        "command": shlex.join(command),
        "status": status,
        "code": ended.code,
        "seconds": ended.seconds,
        "limit_s": limit,
        "text": _text(step, out),
        "errors": "" if status == "done" else _last_lines(err, _ERROR_LINES),
        "record": record,
    }


def write_summary(summary: dict, out: Path) -> None:
    """gpu_check.json and gpu_check.md, whole, so that they are right whenever this ends."""
    text = json.dumps(summary, indent=1)
    (out / "gpu_check.json").write_text(text + "\n", encoding="utf-8")
    (out / "gpu_check.md").write_text(_markdown(summary), encoding="utf-8")


def leave_files(work: Path, out: Path) -> dict:
    """Copy figures, the report of the verdicts and the archive to `out`; names and omissions."""
    figures = [
        path
        for folder in ("bench", "verdicts", "real_data")
        # The curves over steps first: there may be more figures than can be left.
        for path in sorted((work / folder).rglob("*"), key=lambda p: ("steps" not in p.name, p))
        if path.suffix in (".png", ".svg") and path.stat().st_size <= MAX_FILE
    ]
    copied = []
    for path in figures[:MAX_FIGURES]:
        copied.append("-".join(path.relative_to(work).parts))
        shutil.copyfile(path, out / copied[-1])
    report = work / "verdicts" / "report.html"
    if report.exists() and report.stat().st_size <= MAX_FILE:
        copied.append("verdicts.html")
        shutil.copyfile(report, out / copied[-1])
    return {"copied": copied, "not in records.tar.gz": _archive(work, out / "records.tar.gz")}


def _archive(work: Path, target: Path) -> list[str]:
    """Records and logs, small ones first, up to the largest size; what was left out."""
    files = [path for path in work.rglob("*") if path.is_file() and path.suffix in KEPT]
    left_out = []
    with open(target, "wb") as raw:
        with tarfile.open(fileobj=raw, mode="w:gz") as archive:
            for path in sorted(files, key=lambda path: path.stat().st_size):
                name = str(path.relative_to(work))
                # Text shrinks; a file counts in full, so that the limit holds in any case.
                if raw.tell() + path.stat().st_size > MAX_FILE:
                    left_out.append(name)
                else:
                    archive.add(path, name)
    return left_out


def _record(path: Path | None) -> tuple[dict | list | None, str | None]:
    """What the step recorded, and why there is nothing of it."""
    if path is None:
        return None, None
    if not path.exists():
        return None, f"it left no {path.name}"
    try:
        if path.suffix == ".xml":
            return _junit(path), None
        return json.loads(path.read_text(encoding="utf-8")), None
    except (ValueError, ElementTree.ParseError) as error:
        return None, f"{path.name}: {error}"


def _junit(path: Path) -> dict:
    """Counts, and the tests that did not pass with their first line."""
    cases = list(ElementTree.parse(path).iter("testcase"))
    failed = {}
    for case in cases:
        for kind in ("failure", "error"):
            for found in case.findall(kind):
                name = f"{case.get('classname')}::{case.get('name')}"
                failed[name] = (found.get("message") or "").splitlines()[:1]
    skipped = sum(case.find("skipped") is not None for case in cases)
    passed = len(cases) - skipped - len(failed)
    return {"tests": len(cases), "passed": passed, "skipped": skipped, "failed": failed}


def _text(step: Step, out: Path) -> str:
    """Markdown for the summary: the step's table, or what it printed."""
    if step.table is not None and step.table.exists():
        return step.table.read_text(encoding="utf-8", errors="replace").strip()
    if step.plain:
        printed = _last_lines(out, _PLAIN_LINES)
        return f"```\n{printed}\n```" if printed else ""
    return out.read_text(encoding="utf-8", errors="replace").strip()


def _last_lines(path: Path, count: int) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-count:])


def _markdown(summary: dict) -> str:
    parts = summary["parts"]
    lines = [f"# gpu_check on {summary['device']}: {summary['status']}", ""]
    lines += [*_machine(parts), "| part | step | ended | s | of |", "|---|---|---|---|---|"]
    for name, part in parts.items():
        for step in part["steps"]:
            times = f"{step['seconds']:.0f} | {step['limit_s']:.0f}"
            lines.append(f"| {name} | {step['name']} | {step['status']} | {times} |")
    for name, part in parts.items():
        lines += ["", f"## {name}"]
        for step in part["steps"]:
            if step["name"] == "machine" and step["status"] == "done":
                continue
            lines += ["", f"`{step['command']}`: {step['status']}", "", *_counts(step)]
            lines.append(step["text"])
            if step["errors"]:
                lines += ["", "```", step["errors"], "```"]
    return "\n".join(lines) + "\n"


def _machine(parts: dict) -> list[str]:
    """Versions, commit and flags, from the first step of the environment."""
    steps = parts.get("environment", {}).get("steps", [])
    facts = (steps[0]["record"] if steps else None) or {}
    flat = {key: value for key, value in facts.items() if not isinstance(value, dict)}
    lines = [f"- {key}: {value}" for key, value in flat.items() if value is not None]
    for name in ("packages", "flags"):
        if name in facts:
            pairs = (f"{key} {value}" for key, value in facts[name].items())
            lines.append(f"- {name}: {', '.join(pairs)}")
    return [*lines, ""] if lines else []


def _counts(step: dict) -> list[str]:
    """Of tests: how many passed, and the names of those that did not."""
    record = step["record"]
    if not step["name"].startswith("tests") or not isinstance(record, dict):
        return []
    lines = [f"{record['passed']} of {record['tests']} passed, {record['skipped']} skipped.", ""]
    for name, message in record["failed"].items():
        lines.append(f"- {name}: {' '.join(message)}")
    return [*lines, ""] if record["failed"] else lines
