"""A whole bench: ceilings first, then group after group until the deadline or an interruption."""

import time
from datetime import UTC, datetime
from pathlib import Path

import torch

from mprun.bench.child import ChildFailed, Interrupted, TimeUp
from mprun.bench.own import Contest
from mprun.bench.plan import Group, Options, Row
from mprun.bench.report import write_figure
from mprun.bench.session import Bench, Limits, Log, Session, writable
from mprun.config.compose import compose_config
from mprun.record.run_directory import write_json
from mprun.training.environment import environment
from mprun.training.signals import Interruption

FORMAT = 1
_REPORT_S = 6.0  # kept back for tables and figure
_CEILINGS_S = 6.0
_CEILINGS_SHARE = 0.4  # of the budget, at most, until they have to be there


def run_bench(
    contest: Contest,
    options: Options,
    device: torch.device,
    plan: tuple[list[Group], list[dict]],
    folder: Path,
    started: float,
) -> tuple[dict, str]:
    """Measure everything that fits into the budget; (content of bench.json, bench.md).

    Writes bench.jsonl, bench.json, bench.md, bench.png and logs/ into `folder`. All children are
    ended. started: of time.monotonic, when the budget began.
    """
    groups, left_out = plan
    deadline = started + options.budget_s - _REPORT_S
    log = Log(folder / "bench.jsonl", options.budget_s)
    log.write("start", options=writable(options.as_dict()))
    machine: dict = {}
    session, ended = None, "complete"
    with Interruption() as interruption:
        bench = Bench(contest, options, device.type, folder, log, interruption, deadline)
        try:
            machine = _machine(bench)
            limits = Limits(bench, machine.get("ceilings"), device_name(device))
            session = Session(bench, groups, limits)
            session.run()
            if any(row.status == "not measured" for row in session.all_rows()):
                ended = "deadline"
        except TimeUp:
            ended = "deadline"
        except Interrupted:
            ended = "interrupted"
        finally:
            if session is not None:
                session.close()
            log.write("end")
            log.close()
        rows = [Row(case) for group in groups for case in group.cases]
        rows = rows if session is None else session.all_rows()
        content = {
            "format": FORMAT,
            "ended": ended,
            "options": options.as_dict(),
            "device_name": device_name(device),
            "driver": machine.get("driver"),
            "nvml": machine.get("nvml", {}),
            "environment": environment(device),
            "ceilings": machine.get("ceilings"),
            "left_out": left_out,
            "rows": [writable({"key": row.key, **row.as_dict()}) for row in _in_order(rows)],
        }
        contest.summarise(content)
        content["created"] = datetime.now(UTC).isoformat(timespec="seconds")
        content["elapsed_s"] = time.monotonic() - started
        write_json(folder / "bench.json", content)
        text = contest.report(content)
        (folder / "bench.md").write_text(text, encoding="utf-8")
        write_figure(folder / "bench.png", content)
    return content, text


def device_name(device: torch.device) -> str:
    """What a reader calls it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU: {environment(device)['cpu']}"


def _machine(bench: Bench) -> dict:
    """Ceilings, driver, and why NVML does not tell something; why there are none."""
    options, log = bench.options, bench.log
    child = bench.child("ceilings")
    by = log.started + _CEILINGS_SHARE * options.budget_s
    threads = compose_config(options.overrides, options.config_dir).config.threads
    try:
        request = {"device": bench.device, "seconds": min(_CEILINGS_S, 0.1 * options.budget_s)}
        found = child.ask(min(by, bench.deadline), "ceilings", **request, threads=threads)
    except (ChildFailed, TimeUp) as error:
        reason = error.reason if isinstance(error, ChildFailed) else "no time within the budget"
        log.say(f"ceilings: {reason}")
        found = {"why_not": reason}
    finally:
        child.end()
    log.write("ceilings", **found)
    if "ceilings" in found:
        log.say(f"copy {found['ceilings']['bandwidth'] / 1e9:,.0f} GB/s")
    return found


def _in_order(rows: list[Row]) -> list[Row]:
    """Model by model and mode by mode, for a reader; they were measured in another order."""
    cases = [row.case for row in rows]
    labels = list(dict.fromkeys(case.label for case in cases))
    modes = list(dict.fromkeys((case.label, case.real_data, case.mode) for case in cases))

    def place(row: Row) -> tuple[int, bool, int]:
        case = row.case
        found = modes.index((case.label, case.real_data, case.mode))
        return labels.index(case.label), case.real_data, found

    return sorted(rows, key=place)
