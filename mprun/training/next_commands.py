"""The table of commands that fit a run as it is now; every place that names one takes it from here.

A command is named only where it works: its verb is installed, the run has what it reads, and its
line names the code and the paths outside of the run. Needs no torch.
"""

import io
import json
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from mprun.entry_points import announced
from mprun.errors import MprunError
from mprun.file_system import is_held
from mprun.record.run_record import OUTCOMES, read_record
from mprun.record.seal import check_seal

STOPPED = ("preempted", "failed", "killed")
ENDED = (*OUTCOMES, *STOPPED)
_OF_ONE = ("seed", "name", "output_dir", "output_root")  # keys by which alike runs differ


def state_of(directory: Path, record: Mapping[str, Any]) -> str:
    """Return the recorded status; "killed" for a run that goes on in no process."""
    if record["status"] != "running":
        return record["status"]
    held: bool | None = False
    with suppress(FileNotFoundError):
        held = is_held(directory / ".lock")
    return {True: "running", False: "killed", None: "running or killed"}[held]


@dataclass(frozen=True)
class Now:
    """A run as it is now. compares: whether `mprun compare` can compare what a folder holds."""

    directory: Path
    record: Mapping[str, Any]
    compares: Callable[[Path], bool]

    @cached_property
    def status(self) -> str:
        return state_of(self.directory, self.record)

    @property
    def of_script(self) -> bool:
        return "script" in self.record

    @cached_property
    def outside(self) -> tuple[str, ...]:
        """Return what lies outside of the run, as a command has to name it."""
        from mprun.config.trust import as_overrides  # here: loads Hydra

        return as_overrides(self.record["config"])

    @property
    def keeps_checkpoint(self) -> bool:
        return any(self.directory.glob("checkpoints/step-*"))

    @cached_property
    def can_go_on(self) -> bool:
        """Return whether a resume takes the run: its files, its configuration, its torch."""
        from mprun.training.continuation import continued

        lost = "first_checkpoint" in self.record and not self.keeps_checkpoint
        return not (lost or self._other_torch) and _works(
            lambda: continued(self.outside, str(self.directory))
        )

    @property
    def _other_torch(self) -> bool:
        environment = self.record.get("environment") or {}
        recorded = (environment.get("packages") or {}).get("torch")
        try:
            return _release(version("torch")) != _release(recorded or "")
        except PackageNotFoundError:
            return True

    @cached_property
    def can_be_built(self) -> bool:
        """Return whether its network and data can be built again, by this version."""
        one = {key: value for key, value in self.record["config"].items() if key not in _OF_ONE}
        whole = _works(lambda: check_seal(self.directory))
        return whole and _can_be_built(json.dumps(one, sort_keys=True), self.outside)

    @cached_property
    def has_probes(self) -> bool:
        """Return whether a probe tells of tensors at an applied update, as advice needs one."""
        from mprun.numerics.probe_record import read_probes  # here: loads numpy

        def found() -> bool:
            probes = (probe for probe in read_probes(self.directory) if not probe.skipped)
            return any(own.tensors for probe in probes for own in probe.learners.values())

        return _works(found)

    @cached_property
    def has_bad_losses(self) -> bool:
        """Return whether the loss itself was not finite in an update that was skipped."""
        from mprun.record.metrics_columns import read_columns  # here: loads numpy

        path = self.directory / "metrics.jsonl"
        return _works(lambda: len(read_columns(path).nonfinite_skips) > 0)

    @property
    def casts(self) -> bool:
        """Return whether its linear layers multiply casts, of which `explain` tells the cost."""
        from mprun.config.keys import current  # here: reading the schema takes a moment

        precision = current(self.record["config"]).get("precision") or {}
        return bool((precision.get("matmul") or {}).get("input"))

    @property
    def is_shipped(self) -> bool:
        """Return whether all of its options are, so that a command may choose them by name."""
        from mprun.config.option_files import option_files

        choices = (self.record.get("choices") or {}).items()
        return all(option is None or option in option_files(group) for group, option in choices)

    @cached_property
    def modes_beside(self) -> set[str]:
        """Return the modes of the runs beside this one that differ from it in nothing else."""
        from mprun.config.overrides import without

        of_arm = ("precision", "scaler", "numerics", "seed", "name", "resume")
        left_out = (*of_arm, "train.steps", "train.epochs")
        record, found = self.record, {self.record["precision"]["mode"]}
        own = without(record["overrides"], *left_out)
        for path in self.directory.parent.glob("*/run.json"):
            with suppress(MprunError, OSError):  # the files may be anything
                beside = read_record(path.parent, "status", "overrides", "precision.mode", "steps")
                ended = beside["status"] in OUTCOMES and "measured_for" not in beside
                alike = without(beside["overrides"], *left_out) == own
                if ended and alike and beside["steps"] == record["steps"]:
                    found.add(beside["precision"]["mode"])
        return found

    # The commands; None where one does not fit. What is quickly known is asked first.

    def go_on(self) -> str | None:
        return self._resumed() if self.keeps_checkpoint else None

    def begin_again(self) -> str | None:
        return None if self.keeps_checkpoint else self._resumed()

    def _resumed(self) -> str | None:
        fits = _is_installed() and self.can_go_on
        return _line("mprun", f"resume={self.directory}", *self.outside) if fits else None

    def explain(self) -> str | None:
        fits = _is_installed("explain") and self.can_be_built
        return _line("mprun", "explain", self.directory, *self.outside) if fits else None

    def explain_bad_losses(self) -> str | None:
        return self.explain() if self.has_bad_losses else None

    def explain_casts(self) -> str | None:
        return self.explain() if self.casts and not self.has_bad_losses else None

    @property
    def _explains_here(self) -> bool:
        """Return whether its script can go back; one of several processes cannot."""
        return not self.record.get("ranks") and "explain" in announced("mprun.verbs")

    def explain_here(self) -> str | None:
        # The copy that the script goes back to is of some step before the bad one.
        steps = max(1, self.record.get("last_step", 1))
        line = f"run.rewind(); mprun.explain(step, optimizer, steps={steps})"
        return line if self._explains_here else None

    def explain_batch_here(self) -> str | None:
        fits = self._explains_here and self.has_bad_losses
        return "mprun.explain(step, optimizer)" if fits else None

    def show(self) -> str | None:
        return _line("mprun", "show", self.directory) if _is_installed() else None

    def watch(self) -> str | None:
        line = _line("tensorboard", "--logdir", self.directory)
        return None if find_spec("tensorboard") is None else line

    def compare(self) -> str | None:
        beside = self.directory.parent
        several = self._is_judged and sum(1 for _ in beside.glob("*/run.json")) > 1
        return _line("mprun", "compare", beside) if several and self.compares(beside) else None

    @property
    def _is_judged(self) -> bool:
        return _is_installed() and "measured_for" not in self.record

    def run_partner(self) -> str | None:
        """Return the command of the run that a comparison still lacks; None: it lacks none."""
        record, length = self.record, ("train.steps", "train.epochs")
        placed = record["config"].get("output_dir") is not None
        if placed or not (self._is_judged and self.is_shipped):
            return None
        from mprun.config.overrides import in_shell, without

        if {"fp32", record["precision"]["mode"]} <= (modes := self.modes_beside) and len(modes) > 1:
            return None
        kept = without(record["overrides"], "precision", "scaler", "resume")
        if record["attempts"] > 1:  # a resume may have changed it
            kept = [*without(kept, *length), f"train.steps={record['steps']}"]
        other = "amp" if record["precision"]["mode"] == "fp32" else "fp32"
        return f"mprun {in_shell([*kept, f'precision={other}'])}"

    def advise(self) -> str | None:
        fits = _is_installed("advise") and self.has_probes and self.can_be_built
        return _line("mprun", "advise", self.directory, *self.outside) if fits else None

    def advise_configuration(self) -> str | None:
        """Return the command that measures what FP16 needs, where no probe tells it."""
        if not _is_installed("advise") or self.has_probes or not self.is_shipped:
            return None
        from mprun.config.overrides import in_shell, without

        left_out = ("precision", "scaler", "numerics", "output_dir", "resume")
        return f"mprun advise {in_shell(without(self.record['overrides'], *left_out))}".rstrip()


def _line(*words: object) -> str:
    return shlex.join(map(str, words))


@lru_cache(64)  # a tenth of a second each, and the runs of a sweep differ in their seeds
def _can_be_built(config: str, outside: tuple[str, ...]) -> bool:
    from mprun.config.compose import config_from_record
    from mprun.config.trust import vouched

    return _works(lambda: config_from_record(json.loads(config), vouched(outside)))


def _release(text: str) -> str:
    return text.partition("+")[0]


def _works(ask: Callable[[], Any]) -> bool:
    """Return whether a question that a command asks first is answered, and by no False."""
    try:
        with redirect_stderr(io.StringIO()):
            return ask() is not False
    except (MprunError, OSError, ImportError):
        return False


def _is_installed(verb: str = "") -> bool:
    """Return whether the command is installed, and this verb of an extension."""
    here = find_spec("hydra") is not None
    return here and (not verb or verb in announced("mprun.verbs"))


class Row(NamedTuple):
    """What a command is for, of which kind of run ("run", "script"), in which states.

    command: returns a line of a shell, or of the script (`in_script`); None: it does not fit.
    """

    purpose: str
    kinds: tuple[str, ...]
    statuses: tuple[str, ...]
    command: Callable[[Now], str | None]
    in_script: bool = False


RUN, SCRIPT, BOTH = ("run",), ("script",), ("run", "script")
DONE, DIVERGED = ("done",), ("diverged",)
TABLE = (
    Row("to go on", RUN, STOPPED, Now.go_on),
    Row("no checkpoint was kept; from step 1", RUN, STOPPED, Now.begin_again),
    Row("to find the cause", RUN, DIVERGED, Now.explain),
    Row("to find what made the loss not finite", RUN, DONE, Now.explain_bad_losses),
    Row("to find the cause, in the script", SCRIPT, DIVERGED, Now.explain_here, True),
    Row("on the batch of such a step, in the script", SCRIPT, DONE, Now.explain_batch_here, True),
    Row("to see the run", SCRIPT, ENDED, Now.show),
    Row("to compare", BOTH, OUTCOMES, Now.compare),
    Row("to have what it is compared with", RUN, DONE, Now.run_partner),
    Row("to find what its casts cost", RUN, DONE, Now.explain_casts),
    Row("to see what FP16 needs here", RUN, DONE, Now.advise),
    Row("to see its curves", BOTH, (*ENDED, "running"), Now.watch),
    Row("to see what FP16 needs here", RUN, DONE, Now.advise_configuration),
)


class Next(NamedTuple):
    """A command that fits a run: a line of a shell, or one for its script."""

    purpose: str
    command: str
    in_script: bool

    @property
    def acts(self) -> bool:
        """Return whether it does more than show the curves."""
        return not self.command.startswith("tensorboard ")

    def __str__(self) -> str:
        return f"{self.purpose}: {self.command}"


def commands(
    directory: Path, record: Mapping[str, Any], compares: Callable[[Path], bool] | None = None
) -> Iterator[Next]:
    """Yield what fits a run, the most useful first.

    record: its run.json, not damaged: for a damaged run nothing fits. compares: whether a
    comparison of what a folder holds works (`mprun.comparison.verdict.comparable`, for who may ask
    it); None: whether FP32 and another mode stand beside each other there.
    """
    if "config" not in record:  # damaged after all, by hand
        return
    now = Now(directory, record, compares or (lambda folder: _lacks_nothing(now)))
    kind = "script" if now.of_script else "run"
    for row in TABLE:
        if kind in row.kinds and now.status in row.statuses and (line := row.command(now)):
            yield Next(row.purpose, line, row.in_script)


def _lacks_nothing(now: Now) -> bool:
    if now.of_script or "fp32" not in now.modes_beside or len(now.modes_beside) < 2:
        return False
    # One damaged record is the end of a comparison.
    beside = (path.parent for path in now.directory.parent.glob("*/run.json"))
    return all(_works(partial(read_record, one, "status")) for one in beside)
