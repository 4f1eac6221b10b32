"""Run mprun's command line in forked children, and judge the outcome of a case.

The parent has imported everything, so that a case costs a fork and not ten seconds of imports. The
child runs `mprun.cli.main` with separate file descriptors, signals and limits.
"""

import hashlib
import json
import os
import re
import resource
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import yaml

SPEEDS = ("samples_per_s", "seconds", "data_wait")  # keys that differ between equal runs
FOUND = (2, 4, 5)  # exit codes of an error in one line
PATIENCE_S = 60.0


class Answer(NamedTuple):
    """The result of a command. code: None if it did not end in time, -N if signal N ended it."""

    code: int | None
    output: str
    seconds: float


@dataclass(slots=True)
class Finding:
    """One case.

    Attributes:
        held: the fault was found (exit code 2, 4 or 5 and one line), or did no harm (the run ended
            with the bits of an undisturbed one).
        kind: "found", "harmless", or the failure: "silent", "traceback", "no answer", "killed",
            "outside" (something outside of the run directory was touched), ...
    """

    test: str
    case: str
    kind: str
    detail: str = ""

    @property
    def held(self) -> bool:
        return self.kind in ("found", "harmless")


@dataclass(slots=True)
class Campaign:
    """A collection of cases. folder: scratch, emptied case by case."""

    folder: Path
    findings: list[Finding] = field(default_factory=list)

    def note(self, test: str, case: str, kind: str, detail: str = "") -> None:
        """Keep the outcome of a case; print it at once if it did not hold."""
        finding = Finding(test, case, kind, " ".join(detail.split())[:300])
        self.findings.append(finding)
        if not finding.held:
            print(f"  {test}: {case}: {kind}: {finding.detail}", flush=True)

    def scratch(self, name: str = "case") -> Path:
        """Return an empty folder."""
        path = self.folder / name
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        return path


class Child:
    """A forked child that runs `mprun ARGUMENTS` in `cwd`.

    Args:
        prepare: Called in the child before mprun: limits, descriptors, planted faults.
        output: Where stdout and stderr go.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        cwd: Path,
        prepare: Callable[[], None] | None = None,
        output: Path | None = None,
    ) -> None:
        self.output = output or cwd / ".output"
        self.started = time.monotonic()
        self.pid = os.fork()
        if self.pid == 0:
            code = 70
            try:
                os.setsid()
                os.chdir(cwd)
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
                os.dup2(os.open(self.output, flags), 1)
                os.dup2(1, 2)
                if prepare is not None:
                    prepare()
                code = _command(list(arguments))
            finally:
                os._exit(code)

    def wait(self, seconds: float = PATIENCE_S) -> Answer:
        """Return the child's answer; kill a child that takes longer."""
        code = self._code(seconds)
        if code is None:
            self.signal(signal.SIGKILL)
            os.waitpid(self.pid, 0)
        text = self.output.read_text("utf-8", "replace") if self.output.exists() else ""
        return Answer(code, text, time.monotonic() - self.started)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def over(self) -> bool:
        """Return whether the child has ended; `wait` says how."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _code(self, seconds: float) -> int | None:
        until = self.started + seconds
        while time.monotonic() < until:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.002)
        return None


def _command(arguments: list[str]) -> int:
    """Run like `python -m mprun`, with Python's exit: 120 if streams cannot be flushed."""
    import sys
    import threading
    import traceback

    from mprun.cli import main

    try:
        code = main(arguments)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join(5)
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            code = 120
    return code


def mprun(arguments: Sequence[str], cwd: Path, **options) -> Answer:
    """Run a command line to its end."""
    seconds = options.pop("seconds", PATIENCE_S)
    return Child(arguments, cwd, **options).wait(seconds)


def kind_of(answer: Answer, same: Callable[[], bool]) -> str:
    """Return the kind of a case. same: whether the run ended with an undisturbed run's bits."""
    if answer.code is None:
        return "no answer"
    if "Traceback (most recent call last)" in answer.output or answer.code == 1:
        return "traceback"
    if answer.code < 0:
        return "killed"
    if answer.code in FOUND:
        lines = [line for line in answer.output.splitlines() if line.startswith("mprun: ")]
        return "found" if lines else "no line"
    if answer.code in (0, 3):
        return "harmless" if same() else "silent"
    return f"exit code {answer.code}"


def last_line(answer: Answer) -> str:
    """Return the last line printed; for a traceback its error."""
    lines = answer.output.strip().splitlines()
    if "Traceback (most recent call last)" in answer.output:
        lines = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Interrupt)\b", line)]
    return lines[-1] if lines else ""


def records(run: Path) -> list[dict]:
    """Return every record of metrics.jsonl without the keys that differ between equal runs."""
    lines = (run / "metrics.jsonl").read_text("utf-8").splitlines()
    found = [json.loads(line) for line in lines]
    return [{key: one[key] for key in one if key not in SPEEDS} for one in found]


def state(run: Path, step: int) -> dict:
    """Return the tensors of a checkpoint, flat, as bytes by name."""
    import torch

    path = run / "checkpoints" / f"step-{step:08}" / "state.pt"
    flat: dict[str, object] = {}

    def walk(value: object, name: str) -> None:
        if isinstance(value, torch.Tensor):
            flat[name] = (
                str(value.dtype),
                tuple(value.shape),
                value.reshape(-1).view(torch.uint8).numpy().tobytes(),
            )
        elif isinstance(value, dict):
            for key in value:
                walk(value[key], f"{name}.{key}")
        elif isinstance(value, list | tuple):
            for number, part in enumerate(value):
                walk(part, f"{name}.{number}")
        else:
            flat[name] = repr(value)

    # Safe: this campaign wrote it.
    content = torch.load(path, weights_only=True, map_location="cpu")
    content.pop("computed", None)  # facts of run.json, with times
    walk(content, "")
    return flat


def equal(run: Path, reference: Path, step: int) -> bool:
    """Return whether two runs are the same except for their place and their times.

    It compares every record, every tensor of the state after `step`, every key of config.yaml, and
    in run.json the ending and the facts of what was computed.
    """
    try:
        return all(
            of(run) == of(reference)
            for of in (records, _configuration, _ending, _computed, lambda path: state(path, step))
        )
    except (OSError, ValueError, KeyError):
        return False


def _configuration(run: Path) -> dict:
    content = yaml.safe_load((run / "config.yaml").read_text("utf-8"))
    of_place = ("output_dir", "output_root", "devices", "nodes", "restarts")
    return {key: content[key] for key in content if key not in of_place}


def _ending(run: Path) -> dict:
    record = json.loads((run / "run.json").read_text("utf-8"))
    ending = ("status", "seed", "steps", "last_step", "skipped", "updates", "final", "config_hash")
    return {key: record[key] for key in ending}


def _computed(run: Path) -> dict:
    record = json.loads((run / "run.json").read_text("utf-8"))
    # Each attempt watches its first steps: the counts differ, what is counted does not.
    return {
        "emulated": record["emulated"],
        "operations": record["operations"],
        "products": sorted(record["audit"]["products"]),
        "optimizers": record["audit"]["optimizers"],
    }


def tree(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file below a folder, by name."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def leftovers(run: Path) -> list[str]:
    """List temporary files and folders below a run directory; its lock is the one hidden file."""
    hidden = (p for p in run.rglob(".*") if p.name not in (".lock", ".output"))
    return sorted(str(path.relative_to(run)) for path in hidden)


def limit(what: int, amount: int) -> Callable[[], None]:
    """Return a `prepare` that sets a resource limit (setrlimit(2))."""
    return lambda: resource.setrlimit(what, (amount, amount))
