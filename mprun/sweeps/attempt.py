"""One attempt at a cell: continue it or start it, watch it for a hang, report its end.

If run.json still says `running` when the process is gone, it is corrected.
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
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn, TypeAlias

from mprun import errors
from mprun.config.overrides import assignment
from mprun.record.run_directory import Pulse, locked
from mprun.record.run_record import Record
from mprun.sweeps.child import child
from mprun.sweeps.jobs import Cell, State, keep_log, outcome_words, put_aside, record_of, state_of

GRACE_S = 10.0  # between SIGTERM and SIGKILL of a process that hangs


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """The end of a process; its code is in subprocess's convention."""

    code: int
    hung_s: float | None = None  # the limit of silence that it was killed for
    cause: str | None = None  # further knowledge of the cause


@dataclass(frozen=True, slots=True)
class AttemptOutcome:
    """The end of one attempt at a cell."""

    words: str
    code: int = errors.DONE  # an exit code of mprun, errors.RESOURCE for a killed process
    again: bool = False  # another process has the cell, so this attempt does not count


def attempts_of(cell: Cell) -> int:
    record = record_of(cell.directory)
    return 0 if record is None else record.get("attempts", 0)


def exit_code(codes: list[int]) -> int:
    """Return the exit code of a sweep: errors.DONE if every cell has an outcome, else the worst."""
    failed = set(codes) - {errors.DIVERGED}  # a divergence is an outcome
    return next((code for code in errors.SEVERITY if code in failed), errors.DONE)


def outcome_of(cell: Cell, ended: ProcessEnd, attempts_before: int) -> AttemptOutcome:
    """Return how the process of a cell ended; correct a run.json that still says `running`.

    attempts_before: `attempts` in run.json before the process was started.
    """
    code = ended.code if ended.code >= 0 else errors.RESOURCE
    silent = AttemptOutcome(_without_record(cell, ended), code)
    record = record_of(cell.directory)
    if record is None or record.get("attempts", 0) <= attempts_before:
        return silent  # it ended before its first step
    if record["status"] == "running" or ended.hung_s is not None:
        try:
            with locked(cell.directory):
                record = record_of(cell.directory) or record
                _correct(record, ended, silent.words)
        except errors.BadInput:
            return AttemptOutcome("in use by another process", again=True)
        except OSError:  # a full disk must not end the sweep as well
            return silent
    if ended.hung_s is None and record["status"] != "failed":
        code = errors.STATUS_EXIT_CODE[record["status"]]
    return AttemptOutcome(outcome_words(record), code)


def failed_elsewhere(cell: Cell) -> AttemptOutcome | None:
    """Return the outcome of a cell that failed in another process; None if it did not."""
    record = record_of(cell.directory)
    if record is None or record["status"] != "failed":
        return None
    words = outcome_words(record)
    return AttemptOutcome(words, errors.BUG if words.startswith("failed") else errors.RESOURCE)


def _correct(record: Record, ended: ProcessEnd, words: str) -> None:
    if record["status"] == "running" and ended == ProcessEnd(-signal.SIGTERM):
        # Between the first record and the first step: interrupted, as a step later.
        record.end("preempted", "SIGTERM")
    elif record["status"] == "running":
        record.end("failed", words.removeprefix("failed: "))
    elif record["status"] == "preempted" and ended.hung_s is not None:
        # The process was slow, not dead: it has written a checkpoint after all.
        record.end("preempted", f"hung: no progress for {ended.hung_s:g} s, stopped")


def _without_record(cell: Cell, ended: ProcessEnd) -> str:
    if ended.cause is not None:
        return f"failed: {ended.cause}"
    if ended.hung_s is not None:
        return f"hung: no progress for {ended.hung_s:g} s, killed"
    if ended.code in (errors.PREEMPTED, errors.INTERRUPTED, -signal.SIGTERM):
        return "stopped before its first step"
    if ended.code < 0:
        number = -ended.code
        known = number in set(signal.Signals)  # others are real-time signals
        return f"killed by {signal.Signals(number).name if known else f'signal {number}'}"
    return f"failed: {last_line(cell) or f'exit code {ended.code}'}"


def last_line(cell: Cell) -> str:
    """Return the last line that the process of a cell printed, without the program's name."""
    log = cell.log if cell.log.exists() else cell.directory / "console.log"
    lines = printed_lines(log)
    # This line follows a traceback, whose last line says more.
    if len(lines) > 1 and lines[-1].endswith(" a bug in mprun"):
        lines.pop()
    return lines[-1].removeprefix("mprun: ") if lines else ""


def printed_lines(log: Path) -> list[str]:
    """Return the non-empty lines that a process printed; none if the log cannot be read."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return [line.strip() for line in lines if line.strip()]


def start_child(
    arguments: list[str], log: Path, environment: Mapping[str, str], module: str = child.__module__
) -> subprocess.Popen:
    """Start `python -m MODULE ARGUMENTS` in its own process group, printing into `log`.

    Only a run's stderr is logged: its stdout is the name of its directory. environment: variables
    in addition to those of this process.
    """
    with open(log, "wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL if module == child.__module__ else file,
            stderr=file,
            process_group=0,
            env={**os.environ, **environment},
        )


class Fork:
    """The process of `start_child`, but as a fork of this one; has a Popen's methods.

    It starts with this process's imports, which saves 6 s of each run if torch is among them.
    """

    def __init__(self, arguments: list[str], log: Path, environment: Mapping[str, str]):
        sys.stdout.flush()
        sys.stderr.flush()
        self.code: int | None = None
        with open(log, "wb") as file, warnings.catch_warnings():
            # Python 3.12 warns of threads: those of numpy's BLAS, which handles a fork itself.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
            if self.pid == 0:
                _become_child(arguments, file.fileno(), environment)
        with suppress(OSError):  # parent and child both do it; the first one wins
            os.setpgid(self.pid, self.pid)

    def poll(self) -> int | None:
        """Return the exit code, negative after a signal; None while it runs."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code

    def terminate(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)


def _become_child(arguments: list[str], log: int, environment: Mapping[str, str]) -> NoReturn:
    """Run `child` in the forked child and exit, without returning to parent code."""
    code = errors.BUG
    try:
        os.setpgid(0, 0)
        for number in errors.ASKING:  # the handlers of a new process
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor, file in enumerate((null, null, log)):
            os.dup2(file, descriptor)
        os.environ.update(environment)  # CUDA is not in use yet, so it still reads its variables
        if "OMP_NUM_THREADS" in environment:  # torch read it on import, before the fork
            sys.modules["torch"].set_num_threads(int(environment["OMP_NUM_THREADS"]))
        sys.argv = ["mprun", *arguments]
        code = child(arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


# A function that starts a process: arguments, log file, additional environment variables.
Start: TypeAlias = Callable[[list[str], Path, Mapping[str, str]], subprocess.Popen | Fork]


def quickest_start() -> Start:
    """Return the quickest way to start runs: forks of this process, after the imports they need.

    If torch is already loaded, it is `start_child`: torch may hold threads and a CUDA context,
    which a fork does not get. Libraries of systems other than Linux do not survive a fork.
    """
    if sys.platform != "linux" or "torch" in sys.modules:
        return start_child
    from mprun.training.run import import_all  # seconds, which every fork saves

    import_all()
    return Fork


class Attempt:
    """Run `cell` in a separate process, from its checkpoint if it was interrupted.

    The process has its own process group: Ctrl-C reaches the sweep alone, and the run's children
    can be killed with it. It is killed if it has no heartbeat for `stall_after` seconds (0: never).
    """

    def __init__(
        self,
        cell: Cell,
        config_dir: str | None,
        stall_after: float,
        start: Start = start_child,
        environment: Mapping[str, str] = MappingProxyType({}),
    ):
        self.cell, self.config_dir, self.stall_after = cell, config_dir, stall_after
        self.start, self.environment = start, environment
        self._begin()

    def _begin(self, resume: bool = True) -> None:
        self.process: subprocess.Popen | Fork | None = None
        self.hung_s: float | None = None  # as in ProcessEnd
        self.stopped, self.kill_at = False, 0.0
        state = state_of(self.cell)
        if state in (State.IN_USE, State.FINISHED):
            return
        self.resumed = resume and state is State.RESUMABLE
        self.attempts_before = attempts_of(self.cell) if self.resumed else 0
        if self.resumed:
            keep_log(self.cell)
            # Hydra does not parse `resume=`, so the path needs no quotes. A record vouches for no
            # code and no path; the sweep does. The run may have had more GPUs than the cell now.
            devices = f"devices={self.cell.devices}"
            arguments = [f"resume={self.cell.directory}", devices, *self.cell.outside]
        else:
            try:
                put_aside(self.cell)
            except errors.BadInput:  # another process was faster
                return
            arguments = [*self.cell.overrides, assignment("output_dir", str(self.cell.directory))]
            if self.config_dir is not None:
                arguments += ["--config-dir", self.config_dir]
        self.cell.log.parent.mkdir(parents=True, exist_ok=True)
        self.cell.log.unlink(missing_ok=True)  # perhaps a link
        self.process = self.start([str(os.getpid()), *arguments], self.cell.log, self.environment)
        self.pulse = Pulse(self.cell.directory)

    def poll(self) -> AttemptOutcome | None:
        """Return how the attempt ended, or None while it goes on; kill it if it hangs."""
        if self.process is None:
            return AttemptOutcome("in use by another process", again=True)
        code = self.process.poll()
        if code is None:
            self._watch()
            return None
        # Loader processes that outlive a killed run would keep its memory and its lock.
        self.kill()
        if self._refused(code):
            self._begin(resume=False)
            return None
        if self._of_another(code):
            return AttemptOutcome("", again=True)
        outcome = outcome_of(self.cell, ProcessEnd(code, self.hung_s), self.attempts_before)
        if not outcome.again:
            with suppress(OSError):  # a full disk must not end the sweep as well
                keep_log(self.cell)
        return outcome

    def stop(self) -> None:
        """Ask the run, once, to write a checkpoint and end."""
        if self.process is not None and not self.stopped:
            self.stopped = True
            self.process.terminate()

    def kill(self, number: int = signal.SIGKILL) -> None:
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
        """Return whether the run could not be continued: other torch, no whole checkpoint, ..."""
        refused = self.resumed and code in (errors.BAD_INPUT, errors.DAMAGED) and not self.stopped
        return refused and state_of(self.cell) is State.RESUMABLE

    def _of_another(self, code: int) -> bool:
        """Return whether another process has claimed the cell since it was found free."""
        if code != errors.BAD_INPUT or not self.cell.directory.exists():
            return False
        record = record_of(self.cell.directory)
        return record is None or record["status"] != "failed"
