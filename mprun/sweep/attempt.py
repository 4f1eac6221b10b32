"""One attempt at a cell: continue it or start it, watch it, say how it ended.

Its process is in a group of its own, is watched for a hang and ended politely or not. A run.json
that still says `running` when the process is gone is corrected.
"""

import os
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import NoReturn, TypeAlias

from mprun.errors import (
    ASKING,
    BAD_INPUT,
    BUG,
    DAMAGED,
    DIVERGED,
    DONE,
    INTERRUPTED,
    PREEMPTED,
    RESOURCE,
    SEVERITY,
    BadInput,
)
from mprun.record.run_directory import Pulse, locked, write_json
from mprun.sweep.jobs import Cell, State, keep_log, look, outcome_words, put_aside, record_of

GRACE_S = 10.0  # between SIGTERM and SIGKILL of a process that hangs


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended.

    code: as subprocess says it. hung_s: the limit of silence it was killed for. cause: what is
    known beyond that.
    """

    code: int
    hung_s: float | None = None
    cause: str | None = None


_CODES = {"done": DONE, "diverged": DIVERGED, "preempted": PREEMPTED}


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of one attempt at a cell.

    code: an exit code of mprun's, RESOURCE for a process that was killed. again: another process
    has the cell, so that this attempt says nothing.
    """

    words: str
    code: int = DONE
    again: bool = False


def attempts_of(cell: Cell) -> int:
    """How often the run of a cell has been begun."""
    attempts: int = (record_of(cell.directory) or {}).get("attempts", 0)
    return attempts


def exit_code(codes: list[int]) -> int:
    """The exit code of a sweep: DONE if every cell has an outcome, else the worst."""
    failed = set(codes) - {DIVERGED}  # which is an outcome
    return next((code for code in SEVERITY if code in failed), DONE)


def settle(cell: Cell, ended: Ended, attempts_before: int) -> Outcome:
    """Say how the process of a cell ended, and correct a run.json that still says `running`.

    attempts_before: `attempts` of run.json before the process was started.
    """
    code = ended.code if ended.code >= 0 else RESOURCE
    record = record_of(cell.directory)
    if record is None or record.get("attempts", 0) <= attempts_before:
        # It ended before its first step.
        return Outcome(_without_record(cell, ended), code)
    if record["status"] == "running" or ended.hung_s is not None:
        try:
            with locked(cell.directory):
                record = _corrected(cell, record_of(cell.directory) or record, ended)
        except BadInput:
            return Outcome("in use by another process", again=True)
        except OSError:  # a full disk must not end the sweep as well
            return Outcome(_without_record(cell, ended), code)
    if ended.hung_s is None:
        code = _CODES.get(record["status"], code)
    return Outcome(outcome_words(record), code)


def failed_elsewhere(cell: Cell) -> Outcome | None:
    """The outcome of a cell that another process had, if it failed there; None otherwise."""
    record = record_of(cell.directory)
    if record is None or record["status"] != "failed":
        return None
    words = outcome_words(record)
    return Outcome(words, BUG if words.startswith("failed") else RESOURCE)


def _corrected(cell: Cell, record: dict, ended: Ended) -> dict:
    words = _without_record(cell, ended)
    if record["status"] == "running":
        # SIGTERM between the first record and the first step: interrupted, as a step later.
        stopped = ended.code == -signal.SIGTERM and ended.hung_s is None
        record["status"] = "preempted" if stopped else "failed"
        record["cause"] = "SIGTERM" if stopped else words.removeprefix("failed: ")
        record["ended"] = datetime.now(UTC).isoformat(timespec="seconds")
    elif record["status"] == "preempted" and ended.hung_s is not None:
        # Slow rather than dead: it has written a checkpoint after all.
        record["cause"] = f"hung: no progress for {ended.hung_s:g} s, stopped"
    write_json(cell.directory / "run.json", record)
    return record


def _without_record(cell: Cell, ended: Ended) -> str:
    if ended.cause is not None:
        return f"failed: {ended.cause}"
    if ended.hung_s is not None:
        return f"hung: no progress for {ended.hung_s:g} s, killed"
    if ended.code in (PREEMPTED, INTERRUPTED, -signal.SIGTERM):
        return "stopped before its first step"
    if ended.code < 0:
        return f"killed by {_signal_name(-ended.code)}"
    return f"failed: {last_line(cell) or f'exit code {ended.code}'}"


def last_line(cell: Cell) -> str:
    """The last line that the process of a cell printed, without the name of the program."""
    log = cell.log if cell.log.exists() else cell.directory / "console.log"
    lines = printed_lines(log)
    # Behind a traceback, whose own last line says more.
    if len(lines) > 1 and lines[-1] == "mprun: this is a bug in mprun":
        lines.pop()
    return lines[-1].removeprefix("mprun: ") if lines else ""


def printed_lines(log: Path) -> list[str]:
    """What a process printed, without empty lines; none if it cannot be read."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return [line.strip() for line in lines if line.strip()]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


class Attempt:
    """Runs `cell` in a process of its own, from its checkpoint if it was interrupted.

    In a process group of its own Ctrl-C reaches the sweep alone, and what the run has started can
    be killed with it. A process without a heartbeat for `stall_after` seconds (0: never) is killed.
    `environment`: variables of the process beside those of this one.
    """

    def __init__(
        self,
        cell: Cell,
        config_dir: str | None,
        stall_after: float,
        start: "Start | None" = None,
        environment: Mapping[str, str] | None = None,
    ):
        self.cell, self.config_dir, self.stall_after = cell, config_dir, stall_after
        self.start, self.environment = start or start_child, environment or {}
        self._begin()

    def _begin(self, resume: bool = True) -> None:
        self.process: subprocess.Popen | Fork | None = None
        self.hung_s: float | None = None  # the limit of silence it was killed for
        self.stopped, self.kill_at = False, 0.0
        state = look(self.cell)
        if state in (State.IN_USE, State.FINISHED):
            return
        self.resumed = resume and state is State.RESUMABLE
        self.attempts_before = attempts_of(self.cell) if self.resumed else 0
        if self.resumed:
            keep_log(self.cell)
            # Not an override that Hydra parses: taken as it is.
            # A record vouches for no code: the sweep's own command line does. And it may have been
            # on more GPUs than the cell has now.
            devices = f"devices={self.cell.devices}"
            arguments = [f"resume={self.cell.directory}", devices, *self.cell.factories]
        else:
            try:
                put_aside(self.cell)
            except BadInput:  # another process was faster
                return
            quoted = str(self.cell.directory).replace("'", "\\'")
            arguments = [*self.cell.overrides, f"output_dir='{quoted}'"]
            if self.config_dir is not None:
                arguments += ["--config-dir", self.config_dir]
        arguments = [str(os.getpid()), *arguments]
        self.process = self.start(arguments, self.cell.log, self.environment)
        self.pulse = Pulse(self.cell.directory)

    @property
    def begun(self) -> bool:
        """Whether there is a process (a launcher's attempt may wait in a queue)."""
        return self.process is not None

    def poll(self) -> Outcome | None:
        """How the attempt ended, or None while it goes on; kills it if it hangs."""
        if self.process is None:
            return Outcome("in use by another process", again=True)
        code = self.process.poll()
        if code is None:
            self._watch()
            return None
        # Loader processes that outlive a killed run would hold its memory and its lock.
        self.kill()
        if self._refused(code):
            self._begin(resume=False)
            return self.poll() if not self.begun else None
        if self._of_another(code):
            return Outcome("", again=True)
        outcome = settle(self.cell, Ended(code, self.hung_s), self.attempts_before)
        if not outcome.again:
            with suppress(OSError):  # a full disk must not end the sweep as well
                keep_log(self.cell)
        return outcome

    def stop(self) -> None:
        """Ask, once, for a checkpoint and the end."""
        if self.process is not None and not self.stopped:
            self.stopped = True
            self.process.terminate()

    def kill(self, number: int = signal.SIGKILL) -> None:
        """End it and all that it has started, now."""
        with suppress(ProcessLookupError, PermissionError):
            if self.process is not None:
                os.killpg(self.process.pid, number)

    def _watch(self) -> None:
        if self.hung_s is not None:
            if time.monotonic() >= self.kill_at:
                self.kill()
        elif self.stall_after and self.pulse.silent_s() > self.stall_after:
            self.hung_s, self.kill_at = self.stall_after, time.monotonic() + GRACE_S
            self.kill(signal.SIGTERM)

    def _refused(self, code: int) -> bool:
        """Whether the run could not be continued: other torch, no whole checkpoint, ..."""
        refused = self.resumed and code in (BAD_INPUT, DAMAGED)
        return refused and not self.stopped and look(self.cell) is State.RESUMABLE

    def _of_another(self, code: int) -> bool:
        """Whether another process has claimed the cell since it was looked at."""
        if code != BAD_INPUT or not self.cell.directory.exists():
            return False
        record = record_of(self.cell.directory)
        return record is None or record["status"] != "failed"


def start_child(
    arguments: list[str], log: Path, environment: Mapping[str, str]
) -> subprocess.Popen:
    """`python -m mprun.cli.child ARGUMENTS` in a process group of its own, printing into `log`.

    Of a run only stderr: it prints the name of its directory as its result. environment: variables
    beside those of this process.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "mprun.cli.child", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=file if arguments[0] == "--launch" else subprocess.DEVNULL,
            stderr=file,
            process_group=0,
            env={**os.environ, **environment},
        )


class Fork:
    """What `start_child` starts, as a copy of this process; the same methods as of a Popen.

    It has imported what this process has: 6 s of each run, where that is torch.
    """

    def __init__(self, arguments: list[str], log: Path, environment: Mapping[str, str]):
        log.parent.mkdir(parents=True, exist_ok=True)
        sys.stdout.flush()
        sys.stderr.flush()
        self.code: int | None = None
        with open(log, "wb") as file, warnings.catch_warnings():
            # Python 3.12 tells of threads: those of numpy's BLAS, which looks after itself.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
            if self.pid == 0:
                _become_child(arguments, file.fileno(), environment)
        with suppress(OSError):  # both do it: whoever comes first
            os.setpgid(self.pid, self.pid)

    def poll(self) -> int | None:
        """The exit code, negative after a signal; None while it runs."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code

    def terminate(self) -> None:
        """Send SIGTERM, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)


def _become_child(arguments: list[str], log: int, environment: Mapping[str, str]) -> NoReturn:
    """Be `python -m mprun.cli.child`, in the child of a fork; nothing of the parent's goes on."""
    code = BUG
    try:
        os.setpgid(0, 0)
        for number in ASKING:  # as a new process would have them
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor, file in enumerate((null, null, log)):
            os.dup2(file, descriptor)
        os.environ.update(environment)  # CUDA reads it when it is first used, which was not yet
        if "OMP_NUM_THREADS" in environment:  # that was read when torch was loaded, before the copy
            sys.modules["torch"].set_num_threads(int(environment["OMP_NUM_THREADS"]))
        sys.argv = ["mprun", *arguments]
        code = import_module("mprun.cli.child").child(arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


# Starts a process with arguments, a file to print into, and more variables of its environment.
Start: TypeAlias = Callable[[list[str], Path, Mapping[str, str]], subprocess.Popen | Fork]


def quickest_start() -> Start:
    """How to start runs: as copies of this process, once it has imported what they need.

    Not where torch is loaded already, which may hold threads and a CUDA context that no copy has,
    nor beside Linux, where system libraries do not bear it.
    """
    if sys.platform != "linux" or "torch" in sys.modules:
        return start_child
    # The second: what torch's optimizers import when the first is made.
    for module in ("mprun.training.run", "torch._dynamo", "torch.utils.tensorboard"):
        import_module(module)
    return Fork
