"""One attempt at a cell: continue it or start it, watch it, say how it ended."""

from contextlib import suppress
from pathlib import Path

from mprun.errors import BAD_INPUT, DAMAGED, BadInput
from mprun.sweep.jobs import Cell, State, keep_log, look, put_aside, record_of
from mprun.sweep.outcome import Outcome, settle
from mprun.sweep.processes import CellProcess, Ended


class Attempt:
    """Runs `cell` in a process of its own, from its checkpoint if it was interrupted."""

    def __init__(self, cell: Cell, config_dir: str | None, stall_after: float):
        self.cell, self.config_dir, self.stall_after = cell, config_dir, stall_after
        self.process: CellProcess | None = None
        self.resumed = False
        self.attempts_before = 0
        self.taken = False
        self._begin()

    @property
    def begun(self) -> bool:
        """Whether there is a process (a launcher's attempt may wait in a queue)."""
        return self.process is not None

    def poll(self) -> Outcome | None:
        """How the attempt ended, or None while it goes on."""
        if self.process is None:
            return Outcome("in use by another process", again=True)
        ended = self.process.poll()
        if ended is None:
            return None
        if self._refused(ended):
            self._begin(resume=False)
            return None if self.process is not None else self.poll()
        outcome = Outcome("", again=True) if self._of_another(ended) else None
        outcome = outcome or settle(self.cell, ended, self.attempts_before)
        if not outcome.again:
            with suppress(OSError):  # a full disk must not end the sweep as well
                keep_log(self.cell)
        return outcome

    def stop(self) -> None:
        """Ask for a checkpoint and the end."""
        if self.process is not None:
            self.process.stop()

    def kill(self) -> None:
        """End it now."""
        if self.process is not None:
            self.process.kill()

    def _begin(self, resume: bool = True) -> None:
        self.process = None
        state = look(self.cell)
        if state in (State.IN_USE, State.FINISHED):
            return
        self.resumed = resume and state is State.RESUMABLE
        if self.resumed:
            keep_log(self.cell)
            self.attempts_before = record_of(self.cell.directory).get("attempts", 0)
            # Not an override that Hydra parses: taken as it is.
            # A record vouches for no code: the sweep's own command line does.
            arguments = [f"resume={self.cell.directory}", *self.cell.factories]
        else:
            try:
                put_aside(self.cell)
            except BadInput:  # another process was faster
                return
            self.attempts_before = 0
            arguments = [*self.cell.overrides, f"output_dir={quoted(self.cell.directory)}"]
            if self.config_dir is not None:
                arguments += ["--config-dir", self.config_dir]
        self.process = CellProcess(arguments, self.cell.directory, self.cell.log, self.stall_after)

    def _refused(self, ended: Ended) -> bool:
        """Whether the run could not be continued: other torch, no whole checkpoint, ..."""
        refused = self.resumed and ended.code in (BAD_INPUT, DAMAGED)
        return refused and not self.process.stopped and look(self.cell) is State.RESUMABLE

    def _of_another(self, ended: Ended) -> bool:
        """Whether another process has claimed the cell since it was looked at."""
        if ended.code != BAD_INPUT or not self.cell.directory.exists():
            return False
        record = record_of(self.cell.directory)
        return record is None or record["status"] != "failed"


def quoted(path: Path) -> str:
    """A path as the value of an override, whatever characters it holds."""
    return "'" + str(path).replace("'", "\\'") + "'"
