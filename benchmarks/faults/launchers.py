"""python -m benchmarks.faults.launchers OUT: launchers of ranks and faults, as OUT.json and OUT.md.

Each launcher starts two ranks of the same small run. One of them meets a fault in a certain step,
or the launcher gets a signal. The run goes on as far as the launcher takes it, and is resumed by
hand where that is not to its end. It must have the bits of a run that nothing disturbed.
"""

import argparse
import datetime
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.faults.harness import equal, leftovers

_HERE = "benchmarks.faults.launchers"
STEPS, FAULT_STEP, TIMEOUT_S = 200, 120, 8
RUN = ["device=cpu", "threads=1", "model=custom", f"model.factory={_HERE}:network"]
RUN += ["data=custom", f"data.factory={_HERE}:images", "data.batch_size=4"]
RUN += ["precision=fp16_master_scaled", "scaler.init_scale=1e7", "train.accumulate=2"]
RUN += [f"train.steps={STEPS}", "train.checkpoint_every=50", "train.log_every=50"]
RUN += ["train.eval_every=100", f"dist.timeout_s={TIMEOUT_S}"]
PATIENCE_S = 300.0
KILLED_LATER_S = 10.0  # by a batch system, a task that is left when another has failed

# What the ranks run.


def network(data: Any) -> Any:
    """`model.factory` of the run."""
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(3, 4, 3, 4), nn.ReLU(), nn.Flatten(), nn.Linear(256, data.num_classes)
    )


def images(*, batch_size: int, seed: int, device: Any) -> Any:
    """`data.factory` of the run: digits; rank FAULT_RANK meets FAULT in a certain step, once."""
    from mprun.data.augmentation import ImageForm
    from mprun.data.image_store import DigitsImages
    from mprun.data.source import Serving

    class Source(DigitsImages):
        def train_batch(self, index: int) -> Any:
            folder, rank = Path(os.environ["FAULT_FOLDER"]), os.environ["RANK_OF_FAULT"]
            own = os.environ.get("RANK", os.environ.get("SLURM_PROCID"))
            (folder / f"pid-{os.getpid()}").touch()
            if index == 2 * FAULT_STEP + int(own or 0) and not (folder / "met").exists():
                if own == rank or (rank == "-1" and own == "0"):
                    (folder / "met").touch()
                    _meets(os.environ["FAULT"])
            return super().train_batch(index)

    serving = Serving(batch_size=batch_size, seed=seed, device=device)
    return Source(ImageForm(image_size=32), serving)


def _meets(fault: str) -> None:
    if fault == "exception":
        raise KeyError("nobody expected this")
    if fault in ("SIGKILL", "SIGSTOP"):
        os.kill(os.getpid(), getattr(signal, fault))


# How they are started: command and variables of each process, the tasks of a step for srun.

Process = tuple[list[str], dict[str, str]]


class Launcher(NamedTuple):
    name: str
    processes: Callable[[list[str]], list[Process]]


def _mprun(arguments: list[str]) -> list[Process]:
    return [(["-m", "mprun", *arguments, "devices=2", "restarts=2"], {})]


def _torchrun(*options: str, **variables: str) -> Callable[[list[str]], list[Process]]:
    before = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "2"]
    return lambda arguments: [([*before, *options, "-m", "mprun", *arguments], variables)]


def _srun(arguments: list[str]) -> list[Process]:
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_NNODES": "1"}
    job |= {"SLURM_JOB_NODELIST": "localhost", "SLURM_NTASKS": "2", "SLURM_NODEID": "0"}
    tasks = [job | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in ("0", "1")]
    return [(["-m", "mprun", *arguments], task) for task in tasks]


_OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
_C10D = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:29793")
LAUNCHERS = [
    Launcher("mprun devices=2 restarts=2", _mprun),
    Launcher("torchrun, static", _torchrun("--master-port", "29791")),
    Launcher("torchrun, c10d", _torchrun(*_C10D)),
    Launcher("torchrun, c10d, own store", _torchrun(*_C10D, **_OWN_STORE)),
    Launcher("torchrun --standalone", _torchrun("--standalone")),
    Launcher("torchrun --standalone, own store", _torchrun("--standalone", **_OWN_STORE)),
    Launcher("srun, two tasks", _srun),
]
# name -> rank that meets it (-1: the launcher), and what it is.
FAULTS = {
    "kill -9 of rank 0": (0, "SIGKILL"),
    "kill -9 of rank 1": (1, "SIGKILL"),
    "SIGSTOP of rank 1": (1, "SIGSTOP"),
    "exception on rank 1": (1, "exception"),
    "SIGTERM to the launcher": (-1, "SIGTERM"),
}


def tried(launcher: Launcher, fault: str, home: Path, reference: Path) -> dict[str, Any]:
    """Run one case; return what happened."""
    rank, kind = FAULTS[fault]
    folder = home / re.sub(r"\W+", "-", f"{launcher.name} {fault}")
    folder.mkdir()
    run, log = folder / "run", folder / "log"
    own = {"FAULT": kind, "RANK_OF_FAULT": str(rank), "FAULT_FOLDER": str(folder)}
    started = [
        _started(arguments, own | more, log)
        for arguments, more in launcher.processes([*RUN, f"output_dir={run}"])
    ]
    began = time.monotonic()
    gone, signalled, left_at, ranks = None, False, None, set[str]()
    while any(one.poll() is None for one in started) and time.monotonic() < began + PATIENCE_S:
        time.sleep(0.05)
        if not (folder / "met").exists():
            continue
        met = (folder / "met").stat().st_mtime
        ranks = ranks or {path.name[4:] for path in folder.glob("pid-*")}
        if kind == "SIGTERM" and not signalled:
            signalled = True
            for one in started:
                one.terminate()
        if gone is None and not any(map(_lives, ranks)):
            gone = time.time() - met
        if left_at is None and any(one.poll() is not None for one in started):
            left_at = time.monotonic()
        if left_at is not None and time.monotonic() > left_at + KILLED_LATER_S:
            for one in started:
                one.kill()
    for one in started:
        one.kill()
    text = log.read_text("utf-8", "replace")
    record = json.loads((run / "run.json").read_text())
    found = {
        "launcher": launcher.name,
        "fault": fault,
        "exit_code": max(one.wait() for one in started),
        "status": record["status"],
        "attempts": record["attempts"],
        "seconds": None if gone is None else round(gone, 1),
        "message": _message(text) or "none",
        "lines_of_cpp": len(re.findall(r"^frame #|^\[.*\.cpp:\d+\]", text, re.MULTILINE)),
    }
    if record["status"] != "done":
        words = ["-m", "mprun", f"resume={run}", f"model.factory={_HERE}:network"]
        words += [f"data.factory={_HERE}:images", "devices=2"]
        found["resumed"] = _started(words, own, log).wait(PATIENCE_S)
    left = [name for name in leftovers(run) if not name.startswith("ranks")]
    found["equal"] = equal(run, reference, STEPS) and not left
    return found


def _started(arguments: list[str], variables: dict[str, str], log: Path) -> subprocess.Popen:
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    with open(log, "ab") as file:
        return subprocess.Popen(
            [sys.executable, *arguments], env=environment, stdout=file, stderr=file
        )


def _lives(pid: str) -> bool:
    with suppress(OSError):
        return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def _message(text: str) -> str:
    lines = [line for line in text.splitlines() if line.startswith("mprun: ")]
    others = re.compile(
        r"mprun: (next|restarting|to go on|to train longer|no checkpoint was kept|SIG\w+: stopping)"
    )
    told = [line[7:] for line in lines if not others.match(line)]
    return " / ".join(dict.fromkeys(told))


_PAGE = """\
# Launchers of ranks and faults, {date}, CPU

{cpu}, no GPU, torch {torch}, Python {python}, commits {commits};
n = 1 of each, {minutes:.0f} minutes beside other work on the same two cores. Command:

    python -m benchmarks.faults.launchers OUT

Two ranks over gloo train a small network in {steps} steps, with a checkpoint every 50 and
`dist.timeout_s={timeout}`. In step {fault_step} one of them meets the fault, once.
**{held} of {tried} ended with the bits of a run that nothing disturbed**: every record, every
tensor of the last checkpoint, config.yaml, and the ending in run.json. Where the launcher did not
bring the run to its end, `mprun resume=RUN devices=2` did.

*Seconds*: from the fault until all ranks of that attempt were gone. *Code*: the launcher's own.
*Attempts*: by the launcher alone. *Message*: lines of mprun on stderr.

{tables}
Lines of C++ (frames, `file.cpp:`) on stderr, over all: {cpp}.

## Notes

- A stopped rank can hear nothing: those beside it on its machine kill it.
- torchrun's exit code is 0 or 1; `exit_code` of run.json is mprun's. Under torchrun a
  rank other than 0 prints into its log in the run's directory: of rank 0's death nobody tells here.
- mprun does not start again after an exception (exit code 1), torchrun does.
- Nothing starts again after SIGTERM to the launcher.
- Own store: with `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`, where the store of an attempt is gone with
  its rank 0.
- srun is two processes with its variables; there was no SLURM. SIGTERM goes to both.
{failed}
## What it does not show

- NCCL: torch's side of it, over a stub, is in tests/distributed/test_nccl_stub.py.
- Several machines.
- Faults before the first checkpoint, and in evaluations: tests/distributed/test_faults.py.
"""


def page(content: dict[str, Any]) -> str:
    """Format a table for each launcher; content: as `main` writes it."""
    cases, tables = content["cases"], []
    for name in dict.fromkeys(one["launcher"] for one in cases):
        tables += [
            f"**{name}**",
            "",
            "| fault | seconds | code | status | attempts | message | equal |",
        ]
        tables.append("|---|---|---|---|---|---|---|")
        for one in (case for case in cases if case["launcher"] == name):
            words = [one["fault"], one["seconds"], one["exit_code"], one["status"], one["attempts"]]
            words += [one["message"].replace("|", "/"), _equality(one)]
            tables.append(f"| {' | '.join(map(str, words))} |")
        tables.append("")
    failed = [
        f"- {one['launcher']}, {one['fault']}: not equal" for one in cases if not one["equal"]
    ]
    environment = content["environment"]
    return _PAGE.format(
        date=datetime.date.today(),
        cpu=environment["cpu"],
        torch=environment["packages"]["torch"],
        python=environment["python"],
        commits=", ".join(dict.fromkeys(str(one["commit"])[:7] for one in cases)),
        minutes=content["minutes"],
        steps=STEPS,
        timeout=TIMEOUT_S,
        fault_step=FAULT_STEP,
        held=sum(one["equal"] for one in cases),
        tried=len(cases),
        tables="\n".join(tables),
        cpp=sum(one["lines_of_cpp"] for one in cases),
        failed="\n".join(["", "Did not hold:", "", *failed, ""]) if failed else "",
    )


def _equality(one: dict[str, Any]) -> str:
    how = "" if "resumed" not in one else ", resumed by hand"
    return f"{'yes' if one['equal'] else 'NO'}{how}"


def main() -> None:
    """Run the cases and write their page."""
    import torch

    from mprun.recording.environment import environment

    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults.launchers")
    parser.add_argument("out", type=Path, help="OUT.json and OUT.md are written")
    what = "launchers whose name has this; OUT.json keeps the others"
    parser.add_argument("--only", default="", metavar="TEXT", help=what)
    options = parser.parse_args()
    path, here = options.out.with_suffix(".json"), environment(torch.device("cpu"))
    kept = json.loads(path.read_text()) if options.only else {"minutes": 0.0, "cases": []}
    chosen = [launcher for launcher in LAUNCHERS if options.only in launcher.name]
    names = [launcher.name for launcher in LAUNCHERS]
    others = [one for one in kept["cases"] if one["launcher"] not in {own.name for own in chosen}]
    began, cases = time.monotonic(), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory(prefix="launchers") as folder:
        home = Path(folder)
        none = {"FAULT": "none", "RANK_OF_FAULT": "none", "FAULT_FOLDER": folder}
        words = ["-m", "mprun", *RUN, "devices=2", f"output_dir={home / 'reference'}"]
        if code := _started(words, none, home / "log").wait(PATIENCE_S):
            sys.exit(f"the undisturbed run ended with {code}: {(home / 'log').read_text()}")
        for launcher in chosen:
            for fault in FAULTS:
                cases.append(tried(launcher, fault, home, home / "reference"))
                cases[-1]["commit"] = here["commit"]
                print(cases[-1], flush=True)
                all_of_them = sorted(
                    [*others, *cases], key=lambda one: names.index(one["launcher"])
                )
                content = {
                    "environment": here,
                    "minutes": kept["minutes"] + round((time.monotonic() - began) / 60, 1),
                    "cases": all_of_them,
                }
                path.write_text(json.dumps(content, indent=1) + "\n")
                options.out.with_suffix(".md").write_text(page(content))
    sys.exit(not all(one["equal"] for one in cases))


if __name__ == "__main__":
    main()
