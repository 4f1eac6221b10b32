"""The results of scripts/gpu_check: one summary in Markdown and JSON, figures, one archive."""

import io
import json
import os
import re
import shlex
import sys
import tarfile
from collections import Counter
from contextlib import suppress
from pathlib import Path

from gpu_check_processes import Running, Step

ARCHIVE, UNFINISHED = "records.tar.gz", "unfinished.part"
MAX_FIGURES = 3  # with the two summaries, the archive, verdicts and UNFINISHED at most 8 files
MAX_FILE = 15 * 2**20  # bytes; some remote machines return no file above 16 MiB
KEPT = {".json", ".jsonl", ".txt", ".md", ".yaml", ".csv", ".html", ".svg", ".png"}
_PLAIN_LINES, _ERROR_LINES = 80, 20
_MAX_TEXT = 2**18  # most text of a step in the summary; the archive has all of it


def step_report(running: Running) -> dict:
    """Return a step as plain values: its end, its output, its record."""
    step, status = running.step, "done"
    if not running.ended:
        status = "running"
    elif running.code is None:
        status = "overran its time and was ended" if running.overran else "interrupted"
    elif running.code not in step.accepted:
        status = f"failed (exit code {running.code})"
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
        "code": running.code,
        "seconds": running.seconds,
        "limit_s": running.limit,
        "text": _text(step, running.out),
        "errors": "" if status == "done" else _last_lines(running.err, _ERROR_LINES),
        "record": record,
    }


def device_of(summary: dict, asked: str) -> str:
    """Return the summary's name for the device, from the doctor's record."""
    doctor = _records(summary).get("doctor")
    if not doctor:
        return asked
    name = doctor["gpus"][0]["name"] if doctor["gpus"] else "cpu"
    if re.search("fake|shim", name, re.IGNORECASE):
        return "no GPU: a fake CUDA runtime, host side only"
    return name


def write_summary(summary: dict, out: Path) -> None:
    """Write the present gpu_check.json and gpu_check.md, each replaced atomically."""
    text = json.dumps(summary, indent=1)
    if len(text) > MAX_FILE:
        text = json.dumps(_without_records(summary), indent=1)
    _replace(out / "gpu_check.json", (text + "\n").encode())
    _replace(out / "gpu_check.md", _markdown(summary).encode())


def copy_figures(work: Path, out: Path, copied: list[str]) -> None:
    """Copy the report of the verdicts and figures to `out`; add their names to `copied`."""
    found = [work / "verdicts" / "report.html"]
    for folder in ("ratios", "memory", "bench_gpt", "bench_peers", "verdicts", "real_data"):
        # The curves over steps come first: there may be more figures than fit.
        files = sorted((work / folder).rglob("*"), key=lambda p: ("steps" not in p.name, p))
        found += [path for path in files if path.suffix in (".png", ".svg")]
    for path in found:
        name = re.sub(r"[^A-Za-z0-9._-]", "_", "-".join(path.relative_to(work).parts))
        room = name == "verdicts-report.html" or _figures(copied) < MAX_FIGURES
        if path.exists() and path.stat().st_size <= MAX_FILE and name not in copied and room:
            _replace(out / name, path.read_bytes())
            copied.append(name)


def write_archive(work: Path, out: Path) -> list[str]:
    """Replace records.tar.gz: records and logs, small ones first, up to the largest size.

    Returns the files left out. A file that a step is still writing is included as far as it exists.
    """
    files = [path for path in work.rglob("*") if path.is_file() and path.suffix in KEPT]
    left_out = []
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=6) as archive:
        for path in sorted(files, key=_size):
            name = str(path.relative_to(work))
            # Text shrinks; a file counts in full, so that the limit holds in any case.
            if packed.tell() + _size(path) > MAX_FILE:
                left_out.append(name)
                continue
            with suppress(FileNotFoundError):  # a running step may remove its files
                content = path.read_bytes()
                info = tarfile.TarInfo(name)
                info.size, info.mtime = len(content), path.stat().st_mtime
                archive.addfile(info, io.BytesIO(content))
    _replace(out / ARCHIVE, packed.getvalue())
    return left_out


def take_back(out: Path) -> None:
    """Remove the files that were written before any step ran."""
    for name in ("gpu_check.json", "gpu_check.md", ARCHIVE):
        (out / name).unlink(missing_ok=True)


def _replace(path: Path, content: bytes) -> None:
    """Write the whole content or none of it, even if killed."""
    unfinished = path.with_name(UNFINISHED)  # one name: a kill leaves one more file at most
    unfinished.write_bytes(content)
    os.replace(unfinished, path)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _figures(names: list[str]) -> int:
    return sum(not name.endswith(".html") for name in names)


def _without_records(summary: dict) -> dict:
    parts = {
        name: part | {"steps": [step | {"record": f"in {ARCHIVE}"} for step in part["steps"]]}
        for name, part in summary["parts"].items()
    }
    return summary | {"parts": parts}


def _record(path: Path | None) -> tuple[dict | list | None, str | None]:
    """Return the step's record, and why there is none."""
    if path is None:
        return None, None
    if not path.exists():
        return None, f"it left no {path.name}"
    try:
        if path.suffix == ".jsonl":
            return _tests(path), None
        return json.loads(path.read_text(encoding="utf-8")), None
    except ValueError as error:
        return None, f"{path.name}: {error}"


def _tests(path: Path) -> dict:
    """Return counts, the failed tests with their first line, and tests without an end.

    It reads the output of gpu_check_pytest.py. A test without an end is running, or was hit by a
    crash or a kill.
    """
    outcomes, failed = {}, {}
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if not line.endswith("\n"):
            break  # it is being written
        found = json.loads(line)
        outcomes[found["test"]] = found.get("outcome")
        if found.get("outcome") == "failed":
            failed[found["test"]] = found["message"]
    count = Counter(outcomes.values())
    return {
        "tests": sum(count.values()) - count[None],
        **{name: count[name] for name in ("passed", "skipped")},
        "failed": failed,
        "not ended": [name for name, outcome in outcomes.items() if outcome is None],
    }


def _text(step: Step, out: Path) -> str:
    """Return Markdown for the summary: the step's table, or its output."""
    if step.plain:
        printed = _last_lines(out, _PLAIN_LINES)
        return f"```\n{printed}\n```" if printed else ""
    text = _read(step.table if step.table is not None and step.table.exists() else out).strip()
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}\n\n(cut: see {ARCHIVE})"


def _last_lines(path: Path, count: int) -> str:
    return "\n".join(_read(path)[-_MAX_TEXT:].splitlines()[-count:])


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _markdown(summary: dict) -> str:
    parts, records = summary["parts"], _records(summary)
    lines = [f"# gpu_check on {summary['device']}: {summary['status']}", ""]
    if summary["device"].startswith("no GPU"):
        lines += ["**No value and no time on this page means anything**: kernels did nothing.", ""]
    lines += [f"{summary['seconds']:.0f} of {summary['limit_s']:.0f} s.", ""]
    lines += [*_machine(summary, records.get("doctor") or {}), ""]
    for name, what in _BENCHES.items():
        if table := _bench_table(records.get(name)):
            lines += [f"## {what}", "", *table, ""]
    lines += ["| part | step | ended | s | of |", "|---|---|---|---|---|"]
    for name, part in parts.items():
        for step in part["steps"]:
            times = f"{step['seconds']:.0f} | {step['limit_s']:.0f}"
            ended = " ".join([step["status"], *_counts(step)[:1]])
            lines.append(f"| {name} | {step['name']} | {ended} | {times} |")
        if not part["steps"]:
            lines.append(f"| {name} | | not begun, no time was left | | |")
    for name, part in parts.items():
        lines += ["", f"## {name}"]
        for step in part["steps"]:
            lines += ["", f"`{step['command']}`: {step['status']}", "", *_counts(step)]
            if step["name"] != "doctor" or not step["record"]:  # else the page begins with it
                lines.append(step["text"])
            if step["errors"]:
                lines += ["", "```", step["errors"], "```"]
    return "\n".join(lines) + "\n"


def _records(summary: dict) -> dict:
    """Return the records of the steps so far by name."""
    steps = [step for part in summary["parts"].values() for step in part["steps"]]
    return {step["name"]: step["record"] for step in steps if isinstance(step["record"], dict)}


def _machine(summary: dict, doctor: dict) -> list[str]:
    """Return what was told of the machine at once, then what the doctor has found."""
    lines = [f"- {name}: {value}" for name, value in summary.get("machine", {}).items()]
    if not doctor:
        return lines

    def pairs(found: dict) -> str:
        return ", ".join(f"{name} {value}" for name, value in found.items())

    lines.append(f"- packages: {pairs(doctor['machine']['packages'])}")
    flags = {name: flag["pinned"] for name, flag in doctor["flags"].items()}
    lines.append(f"- flags: {pairs(flags)}")
    modes: dict[str, list[str]] = {}
    for name, mode in doctor["modes"].items():
        reason = f" ({mode['reason']})" if mode["verdict"] == "refused" else ""
        modes.setdefault(mode["verdict"], []).append(f"{name}{reason}")
    lines += [f"- modes {verdict}: {', '.join(names)}" for verdict, names in modes.items()]
    tested = {"CUDA graph": doctor["cuda_graph"], "NVML": doctor["nvml"]}
    tested |= {f"fused {rule}": answer for rule, answer in doctor["fused_updates"].items()}
    said = (f"{what} {'works' if one['works'] else one['why']}" for what, one in tested.items())
    return [*lines, f"- {'; '.join(said)}"]


_BENCHES = {"ratios": "Speed beside torch.amp", "memory": "Memory and energy"}


def _bench_table(bench: dict | None) -> list[str]:
    """Return a row for each contender that was timed, of the record of a bench."""
    rows = [row for row in (bench or {}).get("rows", ()) if row["summary"]]
    if not rows:
        return []
    head = ["model", "mode", "contender", "samples/s [quartiles]", "n", "over torch.amp"]
    head += ["over torch.amp compiled", "over FP32", "peak MiB", "of torch.amp's", "of FP32's"]
    head += ["J a sample", "first use s"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in rows:
        case, found = row["case"], row["summary"]
        rate, ratios = found["rate"], found["ratios"]
        cells = [case["label"], case["mode"], case["contender"]]
        cells += ["{median:,.0f} [{q1:,.0f}, {q3:,.0f}]".format(**rate), str(rate["n"])]
        cells += [_ratio(ratios.get(name)) for name in ("recipe", "recipe+", "fp32")]
        peak = row["details"].get("peak", {}).get("allocated")
        cells.append(f"{peak / 2**20:,.0f}" if peak else "")
        cells += [_number(found[name], ".2f") for name in ("peak_over_recipe", "peak_ratio")]
        cells.append(_number(found["energy_j"], ".4g"))
        cells.append(_number(row["facts"]["prepare"]["first_use_s"], ".1f"))
        lines.append(f"| {' | '.join(cells)} |")
    note = "Medians of n windows that took turns; ratios of paired windows with 95 % intervals."
    return [*lines, "", note]


def _ratio(found: dict | None) -> str:
    return "{median:.3f} [{low:.3f}, {high:.3f}]".format(**found) if found else ""


def _number(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def _counts(step: dict) -> list[str]:
    """Summarise tests: how many passed, and the names of those that did not."""
    record = step["record"]
    if not isinstance(record, dict) or "not ended" not in record:
        return []
    lines = [f"{record['passed']} of {record['tests']} passed, {record['skipped']} skipped.", ""]
    told = [f"- {name}: {message}" for name, message in record["failed"].items()]
    told += [f"- {name}: has not ended" for name in record["not ended"]]
    return [*lines, *told, ""] if told else lines
