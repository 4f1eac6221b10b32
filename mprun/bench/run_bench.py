"""A whole bench: ceilings first, then group after group until the deadline or an interruption."""

from dataclasses import dataclass, field
from pathlib import Path

import torch

from mprun.bench.child_process import ChildFailed, ChildProcess, Interrupted, TimeUp
from mprun.bench.equality import check
from mprun.bench.limits import Limits
from mprun.bench.options import Options
from mprun.bench.plan import Group
from mprun.bench.rows import Log, Row
from mprun.bench.session import Session
from mprun.config.compose import compose_config
from mprun.training.signals import Interruption

_CEILINGS_S = 6.0
_CEILINGS_SHARE = 0.4  # of the budget, at most, until they have to be there
_AHEAD = {"cuda": 3, "cpu": 1}  # children that import while another one is prepared


@dataclass(slots=True)
class Outcome:
    """ended: complete, deadline or interrupted. machine: ceilings, driver and NVML's refusals."""

    rows: list[Row]
    ended: str = "complete"
    machine: dict = field(default_factory=dict)


def run_bench(
    options: Options,
    device: torch.device,
    groups: list[Group],
    folder: Path,
    interruption: Interruption,
    deadline: float,
) -> Outcome:
    """Measure everything that fits; `folder` gets bench.jsonl and logs/. All children are ended."""
    log = Log(folder / "bench.jsonl", options.budget_s)
    log.write("start", options=options.as_dict())
    machine: dict = {}
    session = limits = None
    try:
        machine = _machine(options, device, folder, log, interruption, deadline)
        limits = Limits(
            machine.get("ceilings"),
            device.type,
            folder / "logs" / "limits.log",
            interruption,
            device_name(device),
        )
        session = Session(
            groups,
            device.type,
            folder,
            log,
            interruption,
            deadline,
            limits,
            check,
            windows=options.windows,
            steps_per_window=options.steps_per_window,
            ahead=_AHEAD[device.type],
        )
        session.run()
        ended = "complete"
        if any(row.status == "not measured" for row in session.all_rows()):
            ended = "deadline"
    except TimeUp:
        ended = "deadline"
    except Interrupted:
        ended = "interrupted"
    finally:
        for part in (session, limits):
            if part is not None:
                part.close()
        log.write("end")
        log.close()
    if session is None:
        rows = [Row(case) for group in groups for case in group.cases]
    else:
        rows = session.all_rows()
    return Outcome(rows, ended, machine)


def device_name(device: torch.device) -> str:
    """What a reader calls it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    from mprun.training.environment import environment

    return f"CPU: {environment(device)['cpu']}"


def _machine(options, device, folder, log, interruption, deadline: float) -> dict:
    """Ceilings, driver, and why NVML does not tell something; empty where they cannot be had."""
    child = ChildProcess(folder / "logs" / "ceilings.log", interruption)
    by = log.started + _CEILINGS_SHARE * options.budget_s
    threads = compose_config(options.overrides).config.threads
    try:
        request = {"device": device.type, "seconds": min(_CEILINGS_S, 0.1 * options.budget_s)}
        found = child.ask(min(by, deadline), "ceilings", **request, threads=threads)
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
