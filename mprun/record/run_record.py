"""run.json, the record of a run: its fields, its one writer `Record` and its one reader.

Every reader takes it from `read_record`, which checks the type of every field. A field that
contradicts `RunRecord` is Damaged, named by file and key. Any field may be missing, in a run of an
earlier version say: a reader names the fields that it needs.
"""

import json
import math
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import msgspec

from mprun import __version__
from mprun.errors import INTERRUPTED, STATUS_EXIT_CODE, BadInput, Damaged
from mprun.record.run_directory import refuse_strange, write_config, write_json
from mprun.record.seal import MOST_JSON, plain_content, read_fields, seal_of

# The version of the record's form. 1, which records do not name: `config_hash` is of keys that
# nothing names. 2: `not_hashed` names the keys without a part in it. 3: checkpoints hold the state
# of a prepared model, whose parameters are the master weights.
FORM = 3
_OLDEST_STATE = 3  # the first form whose checkpoints this version reads
# Statuses of a run that has an outcome; a failed, preempted or running one has none.
OUTCOMES = ("done", "diverged")
# Of these every record has one, of any version; no other tool's run.json has.
_OF_EVERY_RECORD = {"mprun", "record_form", "config_hash", "precision"}
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
# The numbers that JSON lacks are words.
_Number = float | Literal["nan", "inf", "-inf"]


# Parts of `RunRecord`, below.
class Precision(TypedDict, total=False):
    mode: str
    usual_scaler: str | None
    scaler: str
    half_products: str | None
    effective_dtypes: dict[str, dict[str, Any]]
    update: dict[str, dict[str, str]]
    flags: dict[str, bool | str | int | None]


class Environment(TypedDict, total=False):
    mprun: str
    commit: str | None
    device: Literal["cpu", "cuda"]
    threads: Annotated[int, msgspec.Meta(ge=1, le=2**20)]
    packages: dict[str, str | None]
    cpu: str
    gpu: str
    platform: str


class Data(TypedDict, total=False):
    """The run's data. replaced*: files that data.on_corrupt=skip replaced."""

    sha256: str | None
    replaced: _Count
    replaced_files: list[str]
    replaced_places: list[str]


class Memory(TypedDict, total=False):
    peak_bytes: _Count | None
    measure: str
    activation_bytes: _Count | None
    saved_for_backward_bytes: _Count | None  # the same in earlier versions


class Throughput(TypedDict, total=False):
    samples_per_s: float | None  # of training, without evaluations
    windows: _Count
    sample: str
    data_wait: float  # share of the time; absent if the source does not read ahead


class AuditRecord(TypedDict, total=False):
    """The computations of the watched steps (`precision.audit`).

    products: "forward fp16" -> number. not_watched: the steps that could not be watched.
    unused: the format of the mode in which no product ran.
    """

    watched: _Count
    products: dict[str, _Count]
    left_the_model: list[str]
    written_in_a_call: list[str]
    rounded_in_a_call: list[str]
    destroyed_by_a_cast: list[str]
    optimizers: list[str]
    not_watched: str
    unused: str


class MetricRecord(TypedDict):
    """A metric of the evaluations, as `mprun.Metric` has it."""

    higher_is_better: bool
    unit: Literal["relative", "perplexity", "points", "fraction", "own"]
    margin: Annotated[float, msgspec.Meta(gt=0)] | None  # of "matches", where none is set
    counts_samples: bool


class RunRecord(TypedDict, total=False):
    """The content of run.json, of any attempt and however it ended."""

    mprun: str  # the version that took its last attempt
    record_form: _Count
    status: Literal["running", "done", "failed", "diverged", "preempted"]
    script: dict[str, Any]
    choices: dict[str, str | None]
    overrides: list[str]
    config_hash: str
    not_hashed: list[str]
    precision: Precision
    created: str
    attempts: _Count
    measured_for: str
    config: dict[str, Any]  # checked by the schema of the configuration
    seed: int
    initial_state: str
    steps: Annotated[int, msgspec.Meta(ge=1, le=2**53)]
    steps_per_epoch: _Count
    sample: str
    samples_per_step: _Count
    data: Data
    environment: Environment
    first_checkpoint: _Count
    cause: str | None
    ended: str
    exit_code: _Count  # of the attempt that ended, as its command has it
    launched_by: list[str]  # by which torchrun, as `rank_info.launched_by` names it
    last_step: _Count
    skipped: _Count
    switched: dict[str, str]  # first step -> the mode that the run switched to
    bad_batches: dict[str, str]  # step -> what in its batch is not finite
    updates: _Count
    metrics: dict[str, MetricRecord]
    final: dict[str, _Number]
    throughput: Throughput
    memory: Memory
    operations: dict[str, Any]
    memory_by_kind: dict[str, dict[str, _Count]]
    emulated: dict[str, _Count]
    audit: AuditRecord
    seconds: float
    execution: dict[str, str | float]  # `StepRunner.description`
    data_before_repair: list[str]
    ranks: dict[str, Any] | None
    seal: dict[str, Any]  # `record.seal`


@dataclass(slots=True)
class Outcome:
    """The end of a run, and its results."""

    status: str  # done, diverged or preempted
    step: int  # the last one, from 1
    cause: str | None = None
    skipped: int = 0
    final: dict[str, float] = field(default_factory=dict)
    throughput: dict = field(default_factory=dict)
    memory: dict = field(default_factory=dict)
    first_step: dict = field(default_factory=dict)  # what was counted in it, as fields of run.json
    bad_batches: dict[str, str] = field(default_factory=dict)

    def diverged(self, step: int, cause: str) -> bool:
        """Note that the run diverged; return False: it does not go on."""
        self.status, self.step, self.cause = "diverged", step, cause
        return False

    @property
    def exit_code(self) -> int:
        """Return the exit code of a process that ended so."""
        interrupted = self.status == "preempted" and self.cause == "SIGINT"
        return INTERRUPTED if interrupted else STATUS_EXIT_CODE[self.status]

    def results(self) -> dict[str, Any]:
        """Return the fields of the record."""
        return {
            "last_step": self.step,
            "skipped": self.skipped,
            "updates": self.step - self.skipped,
            "final": {k: v if math.isfinite(v) else str(v) for k, v in self.final.items()},
            "throughput": self.throughput,
            "memory": self.memory,
            **self.first_step,
            **({"bad_batches": self.bad_batches} if self.bad_batches else {}),
        }


# The first keys of each record.
_VERSIONS: dict[str, Any] = {"mprun": __version__, "record_form": FORM}


class Record(dict[str, Any]):
    """The content of run.json, and all that writes it; the fields are those of `RunRecord`."""

    def __init__(self, directory: Path, fields: Mapping[str, Any]):
        super().__init__(fields)
        self.directory, self._began = directory, time.perf_counter()

    @classmethod
    def new(cls, directory: Path, **fields: Any) -> "Record":
        """Return the record of a run that has not begun; writes nothing."""
        begun = {"status": "running", **fields, "created": now(), "attempts": 0}
        return cls(directory, _VERSIONS | begun)

    def begin(self, config: dict[str, Any], **fields: Any) -> None:
        """Write config.yaml and the start of an attempt: what is known before its first step."""
        self._began = time.perf_counter()
        write_config(self.directory, config)
        begun = {"status": "running", "cause": None, "config": config, "seed": config["seed"]}
        others = {key: value for key, value in self.items() if key not in _VERSIONS}
        self.clear()
        self.update(_VERSIONS | others | begun, **fields)
        self["attempts"] += 1
        write_json(self.directory / "run.json", self)

    def checkpointed(self, step: int) -> None:
        """Note the first checkpoint: from then on a run without any has lost them."""
        if "first_checkpoint" not in self:
            self["first_checkpoint"] = step
            write_json(self.directory / "run.json", self)

    def switched(self, step: int, mode: str, **fields: Any) -> None:
        """Note that the run trains in another mode from `step` on; fields: that change with it."""
        self["switched"] = self.get("switched", {}) | {str(step): mode}
        self.update(fields)
        if "config" in fields:
            write_config(self.directory, fields["config"])
        write_json(self.directory / "run.json", self)

    def reopen(self) -> None:
        """Take the seal off, before a further attempt changes the first of the sealed files."""
        for key in ("seal", "last_step", "exit_code"):
            self.pop(key, None)
        self["status"] = "running"
        write_json(self.directory / "run.json", self)

    def end(
        self, status: str, cause: str | None, results: Mapping[str, Any] | None = None, **more: Any
    ) -> None:
        """Write the end of an attempt, whatever way it ended and whoever says so, and seal the run.

        results: fields of a run that came to its own end, which then has its seconds, too. Without
        `last_step` among the fields, it is the newest one known.
        """
        if results is None:
            known = max(self.get("last_step", 0), _last_recorded(self.directory))
            results = {"last_step": known}
        else:
            results = {**results, "seconds": round(time.perf_counter() - self._began, 3)}
        self.update({"status": status, "cause": cause, **results, "ended": now()}, **more)
        self.seal()

    def seal(self) -> None:
        """Write run.json with the seal of the files as they are now."""
        self.pop("seal", None)
        self["seal"] = seal_of(self.directory, self)
        write_json(self.directory / "run.json", self)


def read_record(directory: Path, *needed: str) -> Record:
    """Read run.json; the fields `needed` ("steps", "environment.device") must be there.

    Raises:
        BadInput: Another tool wrote it, or a later version in a form that this one does not know.
        BrokenSeal: It is not what the run wrote at its end.
        Damaged: It is not JSON, or a field is missing or contradicts `RunRecord`.
        FileNotFoundError: There is none.
    """
    path = directory / "run.json"
    if is_foreign(directory):
        raise BadInput(f"{directory}: is not a run of mprun, although it has a run.json")
    refuse_strange(directory)
    try:
        record = read_fields(directory)
        msgspec.convert(record, RunRecord)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Damaged(f"{path}: {in_words(error)}") from None
    if (form := record.get("record_form", 1)) > FORM:
        raise BadInput(
            f"{path}: has record format {form}, but mprun {__version__} reads formats up to "
            f"{FORM}; use {written_by(record)}, which wrote this run"
        )
    for key in needed:
        found: Any = record
        for name in key.split("."):
            found = found.get(name) if isinstance(found, dict) else None
        if found is None:
            raise Damaged(f"{path}: is not the record of a run (no {key})")
    return Record(directory, record)


def activation_bytes(memory: Mapping[str, Any]) -> int | None:
    """Return the activation memory of a record's `memory`, of an earlier version's, too."""
    return memory.get("activation_bytes", memory.get("saved_for_backward_bytes"))


_STATUSES = (*OUTCOMES, "running", "failed", "preempted")


def is_foreign(directory: Path) -> bool:
    """Return whether run.json is that of another tool, as Sacred has one; a torn one is not."""
    if any((directory / name).exists() for name in ("config.yaml", "metrics.jsonl")):
        return False
    with suppress(OSError, ValueError, RecursionError, Damaged):
        record = json.loads(plain_content(directory / "run.json", MOST_JSON))
        other = isinstance(record, dict) and record.get("status", "done") not in _STATUSES
        return other and not _OF_EVERY_RECORD & record.keys()
    return False


def written_by(record: Mapping[str, Any]) -> str:
    """Return "mprun 0.1.0 (commit 0ddec8ebd4fa)": the version that wrote a record last."""
    environment = record.get("environment") or {}
    version = record.get("mprun") or environment.get("mprun")
    commit = environment.get("commit")
    name = f"mprun {version}" if version else f"a version before mprun {__version__}"
    return f"{name} (commit {commit[:12]})" if commit else name


def refuse_older_state(what: str, record: Mapping[str, Any]) -> None:
    """Raise BadInput if a run's checkpoints are of an older form; what: begins the line."""
    if record.get("record_form", 1) < _OLDEST_STATE:
        raise BadInput(
            f"{what}: this version of mprun cannot read the checkpoints of this run, "
            f"{of_another_version(record)}"
        )


def of_another_version(record: Mapping[str, Any]) -> str:
    """Return what to do with a run that this version cannot go on with."""
    return f"written by {written_by(record)}: go on with that version, or begin a new run"


def _last_recorded(directory: Path) -> int:
    """Return the step of the newest whole record, 0 without one."""
    with suppress(FileNotFoundError):
        for line in reversed(plain_content(directory / "metrics.jsonl").split(b"\n")):
            with suppress(ValueError, LookupError, TypeError):  # torn, or of another kind
                return int(json.loads(line)["step"])
    return 0


def in_words(error: Exception) -> str:
    """Put the key first: "environment.threads: Expected `int`, got `str`"."""
    text = str(error) or "nested too deeply"
    what, _, where = text.partition(" - at `$")
    return f"{where.strip('.`')}: {what}" if where else f"not the record of a run ({what})"


def product_shares(*audits: Mapping[str, Any]) -> dict[str, float]:
    """Return dtype -> its share of the products of both passes, by calls, the largest first.

    One definition for every place: a call is a product, whatever its size.
    """
    counts: Counter[str] = Counter()
    for audit in audits:
        for name, count in audit.get("products", {}).items():
            counts[name.rpartition(" ")[2]] += count
    return {dtype: count / counts.total() for dtype, count in counts.most_common() if count}


def shares_text(shares: Mapping[str, float]) -> str:
    """Return shares in whole per cent; only exact 1 is "100 %", and none is "0 %"."""

    def text(share: float) -> str:
        if share == 1:
            return "100 %"
        return "<1 %" if share < 0.005 else ">99 %" if share >= 0.995 else f"{100 * share:.0f} %"

    return ", ".join(f"{dtype} {text(share)}" for dtype, share in shares.items()) or "none"


def now() -> str:
    """Return the time as text, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")
