"""Give recorded runs and a comparison to programs and notebooks, as frames and as tables.

`mprun.load` and `mprun.compare` return these objects. Numbers come as pandas frames or, without
pandas, as columns of numpy arrays. In a notebook an object shows itself as a table, which links to
nothing outside the page and uses the colours of the notebook's theme, light or dark.
"""

import hashlib
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
from markupsafe import Markup

from mprun.comparison import text_outputs
from mprun.comparison import wording as text
from mprun.comparison.findings import Comparison, Group, Row
from mprun.comparison.load import read_run_record, run_directories
from mprun.errors import BadInput, needing
from mprun.numerics.probe_record import GRADIENT_KINDS, ProbeRecord, read_probes
from mprun.record.layout import aligned
from mprun.record.metrics import read_metrics
from mprun.record.metrics_columns import NO_METRIC

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

Part = Literal["train", "evals", "probes"]
Columns = dict[str, np.ndarray]  # name -> [rows]: int64, float64, bool or object
_FIGURES = ("intervals", "difference", "loss-steps")  # the figures that a notebook shows
_POINTS = 240  # points of a curve
_MOST_ROWS = 60  # most runs shown


def load(path: str | Path) -> "RecordedRuns":
    """Read the records of every run at or below a path, without importing torch.

    Args:
        path: A run directory, or a folder that is searched to any depth.

    Returns:
        All runs in the order of their names. If there is a single run, `.one` returns that run.

    Raises: BadInput: There is no run at or below the path. Damaged: A file run.json is not the
    record of a run.
    """
    return RecordedRuns([RecordedRun(directory) for directory in run_directories(Path(path))])


class _Frames(ABC):
    """The frames that a run and a sequence of runs have in common."""

    @property
    def train(self) -> "DataFrame":
        """Return every training record, with step, updates, skipped, epoch, loss, loss_scale."""
        return _frame(self.columns("train"))

    @property
    def evals(self) -> "DataFrame":
        """Return every evaluation, with step, updates and the task's metrics."""
        return _frame(self.columns("evals"))

    @property
    def probes(self) -> "DataFrame":
        """Return every probe, a row for each tensor kind of a module at a step (numerics=probes).

        amax is the largest absolute value. underflow, subnormal and overflow are parts (0 to 1) of
        the `nonzero` finite values: those that FP16 rounds to zero, below its normal range and to
        infinity; NaN without such values. underflow and overflow of what FP16 had rounded before
        are NaN too: they are among the zeros and infinities. They are taken as measured: gradients
        times 2^log2_loss_scale (the largest, if the losses have several scales). lost_fp16 and
        lost_bf16 (for updates) are the parts of the updates that round away in that format. applied
        is the sum of the updates that 16-bit weights took over the sum of the wanted ones. cosine,
        norm_ratio and relative_error (for weight gradients) compare with the FP32 shadow step.
        """
        return _frame(self.columns("probes"))

    @abstractmethod
    def columns(self, part: Part) -> Columns:
        """Return the data of `train`, `evals` or `probes` without pandas: name -> array [rows].

        A number that a record lacks is NaN. The result is empty if nothing was recorded.
        """


class RecordedRun(_Frames):
    """One recorded run. Its metrics.jsonl is read on first use, and its probes are read at each
    access.

    Attributes:
        path: The run directory.
        record: The content of run.json: status, versions, commit, device, flags, timings.
        mode: The name of the precision mode.
        scaler: The name of the loss scaler.
        seed: The run's seed.
        status: done, diverged, failed, preempted or running.
        cause: The reason why the run stopped; None for a run with status done.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.record: dict[str, Any] = read_run_record(self.path)
        precision = self.record.get("precision", {})
        self.mode: str | None = precision.get("mode")
        self.scaler: str | None = precision.get("scaler")
        self.seed: int | None = self.record.get("seed")
        self.status: str | None = self.record.get("status")
        self.cause: str | None = self.record.get("cause")

    @property
    def config(self) -> dict[str, Any]:
        """Return the resolved configuration, nested; empty if no configuration was recorded."""
        return self.record.get("config", {})

    @property
    def last_step(self) -> int:
        """Return the number of the last recorded step (the first step is 1), or 0 if there is
        none."""
        if (recorded := self.record.get("last_step")) is not None:
            return recorded
        return max((record.get("step", 0) for record in self._metrics), default=0)

    @property
    def metrics(self) -> dict[str, float]:
        """Return the metrics ("loss", "top1", ...) of the final evaluation, or of the newest
        evaluation if there is no final one."""
        final = self.record.get("final")
        if final is not None:
            return {name: float(value) for name, value in final.items()}
        columns = self.columns("evals")
        return {name: float(own[-1]) for name, own in columns.items() if name not in NO_METRIC}

    def columns(self, part: Part) -> Columns:
        """Return the columns of `part` (train, evals or probes) as a mapping from name to array,
        without pandas."""
        if part == "probes":
            return _columns([row for probe in read_probes(self.path) for row in _probe_rows(probe)])
        if part not in ("train", "evals"):
            raise BadInput(f"columns {part!r}: must be train, evals or probes")
        split = part.removesuffix("s")
        columns = _columns([record for record in self._metrics if record.get("split") == split])
        columns.pop("split", None)
        return columns

    @cached_property
    def _metrics(self) -> list[dict[str, Any]]:
        return read_metrics(self.path / "metrics.jsonl")

    @property
    def _summary(self) -> dict[str, Any]:
        """Return the run's row in a table of several runs."""
        told = {name: getattr(self, name) for name in ("mode", "scaler", "seed", "status")}
        ended = {"last_step": self.last_step, **self.metrics, "cause": self.cause}
        return {"run": str(self.path), **told, **ended}

    def __repr__(self) -> str:
        metrics = ", ".join(f"{name} {text}" for name, text in _texts(self.metrics).items())
        line = f"<run {self.path}: {self.mode}, seed {self.seed}, {self.status} at step "
        return f"{line}{self.last_step}{metrics and f'; {metrics}'}>"

    def _repr_html_(self) -> str:
        return _html(tables=[text.filled([_texts(self._summary)], {})])


class RecordedRuns(_Frames, Sequence[RecordedRun]):
    """A sequence of runs; its data frames begin with the columns run, mode and seed."""

    def __init__(self, runs: Sequence[RecordedRun]):
        self._runs = list(runs)

    @overload
    def __getitem__(self, index: int) -> RecordedRun: ...
    @overload
    def __getitem__(self, index: slice) -> "RecordedRuns": ...
    def __getitem__(self, index):
        found = self._runs[index]
        return RecordedRuns(found) if isinstance(index, slice) else found

    def __len__(self) -> int:
        return len(self._runs)

    @property
    def one(self) -> RecordedRun:
        """Return the only run; raise BadInput if there is not exactly one."""
        if len(self) != 1:
            raise BadInput(f".one: there are {len(self)} runs; use [0], or load a run directory")
        return self._runs[0]

    if not TYPE_CHECKING:  # a type checker would accept any name

        def __getattr__(self, name):
            """Raise an error that says where to find an attribute of a single run."""
            line = f"RecordedRuns has no attribute {name!r}"
            if not name.startswith("_") and any(name in dir(run) for run in self._runs[:1]):
                own = f".one.{name}" if len(self) == 1 else f"[0].{name} (of {len(self)} runs)"
                line += f"; write {own}"
            raise AttributeError(line)

    @property
    def table(self) -> "DataFrame":
        """Return a row per run: path, mode, scaler, seed, status, last step, metrics, cause."""
        return _frame(_columns([run._summary for run in self]))

    def columns(self, part: Part) -> Columns:
        """Return the columns as `RecordedRun.columns` does, preceded by run, mode and seed."""
        rows = []
        for run in self:
            head = {"run": str(run.path), "mode": run.mode, "seed": run.seed}
            own = run.columns(part)
            lists = [column.tolist() for column in own.values()]
            rows += [head | dict(zip(own, row, strict=True)) for row in zip(*lists, strict=True)]
        return _columns(rows)

    def __repr__(self) -> str:
        if len(self) == 1:
            return repr(self.one)
        table, more = self._shown()
        return "\n".join([*aligned(table), *more])

    def _repr_html_(self) -> str:
        table, more = self._shown()
        return _html(tables=[table], lines=more)

    def _shown(self) -> tuple[list[list[str]], list[str]]:
        """Return the table of the first runs, and a line on the rest."""
        rest = len(self) - _MOST_ROWS
        table = text.filled([_texts(run._summary) for run in self._runs[:_MOST_ROWS]], {})
        return table, [f"... {rest} more runs"] if rest > 0 else []


class ComparedRuns(Comparison):
    """The comparison that `mprun compare` prints and writes, as an object."""

    __slots__ = ()

    @property
    def verdicts(self) -> "DataFrame":
        """Return the numbers of the printed table, with one row for each mode of each group of
        runs. The row of the baseline is the first of its group.

        The columns difference, low, high and margin are in `unit`: "%" of the baseline's mean,
        "points", or "" (the unit of the metric). A positive difference means that the mode is
        worse than the baseline. The columns speedup, memory_ratio and activation_ratio are
        relative to the baseline. If `emulated` is true, speed and peak memory are those of the
        emulation.
        """
        return _frame(self.columns())

    @property
    def curves(self) -> "DataFrame":
        """Return the points of the report's curves: a row for each recorded step and evaluation of
        each run.

        The column `split` is "train" or "eval". A long run has at most 500 rows in each split,
        evenly spaced.
        """
        rows = []
        for group in self.groups:
            every = [(row.arm.label, run) for row in group.every_row for run in row.arm.runs]
            for (label, run), split in product(every, ("train", "eval")):
                head = {"group": group.title, "mode": label, "seed": run.seed, "split": split}
                columns = run.train if split == "train" else run.evals
                values = zip(*(column.tolist() for column in columns.values()), strict=True)
                rows += [{**head, **dict(zip(columns, own, strict=True))} for own in values]
        return _frame(_columns(rows))

    def figure(self, name: str = "loss-steps", group: int = 0) -> "Figure":
        """Return a matplotlib figure of the report: `comparison.figure().savefig("loss.png")`.

        Args:
            name: "intervals", "difference", "loss-steps", "loss-scale", ...; for an unknown name,
                the error lists the existing figures.
            group: index of the compared configuration, from 0, if there are several.

        Raises: BadInput: No such figure exists. MissingExtra: matplotlib is not installed.
        """
        with needing("notebook"):
            from mprun.comparison.figures import group_figures
            from mprun.plots.panel import settings, styles
        shown = self.groups[group]
        looks = styles(row.arm.label for row in shown.every_row)
        with settings():
            drawn = {one.name: one.figure for one in group_figures(shown, looks, _POINTS)}
        if name not in drawn:
            raise BadInput(f"figure {name!r}: must be one of {', '.join(drawn) or 'none'}")
        return drawn[name]

    def columns(self) -> Columns:
        """Return the data of `verdicts` without pandas, as a mapping from column name to array."""
        return _columns(
            [_verdict_row(group, row) for group in self.groups for row in group.every_row]
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the content of results.json (`mprun compare --json`), in JSON's own types."""
        return text_outputs.results(self)

    def write(self, folder: str | Path) -> Path:
        """Write report.html, report.md, results.json and figures, as `mprun compare` does.

        Args:
            folder: The output folder. A missing folder is created. An earlier comparison in the
                folder is replaced.

        Returns:
            The path of report.html.

        Raises: BadInput: The folder contains other files, or cannot be created. MissingExtra:
            matplotlib or Pillow is not installed.
        """
        with needing("notebook"):
            from mprun.comparison.report import write_folder
        return write_folder(self, Path(folder))

    def __repr__(self) -> str:
        return text_outputs.console(self)

    def _repr_html_(self) -> str:
        shown = [
            {
                "title": group.title,
                "judged": text.judged(self, group),
                "table": text.table(group, {"mean": group.metric, "activation memory": ""}),
                "sentences": {row.arm.label: row.verdict.sentence for row in group.rows},
                "notes": text.notes_of(group),
                "growing": text.gap_lines(row for row in group.rows if row.grows),
                "figures": [],
            }
            for group in self.groups
        ]
        try:
            for group, found in zip(self.groups, shown, strict=True):
                found["figures"] = _figures(group)
        except ModuleNotFoundError:  # without matplotlib the tables suffice
            pass
        lines = [*(f"not compared: {line}" for line in self.not_compared), *self.notes]
        return _html(groups=shown, stamps=self.stamps, heading=text.stamped(self), lines=lines)


def _verdict_row(group: Group, row: Row) -> dict[str, Any]:
    verdict = row.verdict
    found: dict[str, Any] = {"group": group.title, "mode": row.arm.label, "verdict": verdict.name}
    found |= {"metric": group.metric, "mean": row.mean, **text.shown(group, verdict)}
    found |= {"unit": text.unit(group), "level": verdict.level, "method": verdict.method}
    found["runs"] = len(verdict.seeds or row.outcomes)
    found["diverged"] = sum(outcome.diverged is not None for outcome in row.outcomes)
    found["skipped"] = row.skipped
    found["lowest_scale"], found["highest_scale"] = row.scale_range or (None, None)
    for name in ("samples_per_s", "speedup", "peak_bytes", "memory_ratio", "activation_ratio"):
        found[name] = getattr(row, name)
    found |= {"emulated": row.emulated, "sentence": verdict.sentence}
    if row is group.baseline:  # it is judged against nothing
        unknown = ("difference", "low", "high", "margin", "level", "method")
        found |= {**dict.fromkeys(unknown), "verdict": "baseline", "sentence": ""}
    return found


def _figures(group: Group) -> list[Markup]:
    """Return the deciding figures as SVG, with ids that no other output of a notebook has."""
    from mprun.comparison.figures import group_figures
    from mprun.plots.panel import inline_svg, settings, styles

    looks = styles(row.arm.label for row in group.every_row)
    paths = "\n".join(run.path for run in group.every_run)
    prefix = f"mprun-{hashlib.sha256(paths.encode()).hexdigest()[:8]}-{group.slug}"
    with settings():
        return [
            Markup(inline_svg(drawing.figure, f"{prefix}-{drawing.name}", drawing.label))
            for drawing in group_figures(group, looks, _POINTS)
            if drawing.name in _FIGURES
        ]


def _probe_rows(probe: ProbeRecord) -> Iterator[dict[str, Any]]:
    for name, learner in probe.learners.items():
        found: defaultdict[tuple[str, str], dict[str, Any]] = defaultdict(dict)
        for kind, modules in learner.tensors.items():
            halves = learner.halves_before(kind)
            for module, stats in modules.items():
                counts = stats.counts
                row = {"dtype": stats.dtype, "stride": stats.stride, "amax": stats.amax}
                row |= {"values": counts.total, "nonzero": counts.nonzero}
                row |= {"inf": counts.inf, "nan": counts.nan, **stats.shares(halves)._asdict()}
                found[kind, module] = row
        for module, lost in learner.lost_updates.items():
            shares = {"lost_fp16": lost.share("fp16"), "lost_bf16": lost.share("bf16")}
            found["updates", module] |= shares
        for module, applied in learner.applied_updates.items():
            found["updates", module]["applied"] = applied.ratio
        for module, agreement in (learner.shadow or {}).items():
            names = ("cosine", "norm_ratio", "relative_error")
            found["weight_gradients", module] |= {one: getattr(agreement, one) for one in names}
        scales = [probe.log2_loss_scale[scale] for scale in learner.loss_scales]
        head = {"step": probe.step, "skipped": probe.skipped, "learner": name}
        for (kind, module), row in found.items():
            scale = max(scales) if kind in GRADIENT_KINDS and scales else None
            yield {**head, "kind": kind, "module": module, "log2_loss_scale": scale, **row}


def _columns(rows: Sequence[dict[str, Any]]) -> Columns:
    """Turn records into columns, in the order in which their keys appear."""
    names = dict.fromkeys(key for row in rows for key in row)
    return {name: _column([row.get(name) for row in rows]) for name in names}


def _column(values: list[Any]) -> np.ndarray:
    """Return bool or int64 if all values are, float64 (None is NaN) for numbers, else object."""
    kinds = set(map(type, values))
    if kinds == {bool} or kinds == {int}:
        return np.array(values)
    if kinds <= {int, float, type(None)} and kinds != {type(None)}:
        return np.array(values, dtype=np.float64)
    found = np.empty(len(values), dtype=object)
    found[:] = values
    return found


def _frame(columns: Columns) -> "DataFrame":
    """Return the columns as a pandas frame; raise MissingExtra without pandas."""
    with needing("notebook"):
        from pandas import DataFrame
    return DataFrame(columns)


def _texts(row: dict[str, Any]) -> dict[str, str]:
    """Format the cells of a row: floats in four digits, whole numbers in full."""

    def cell(value: Any) -> str:
        shown = text.value_text(value) if isinstance(value, float | None) else str(value)
        return " ".join(shown.split())

    return {name: cell(value) for name, value in row.items()}


def _html(**given: Any) -> str:
    empty: dict[str, Any] = dict.fromkeys(("groups", "tables", "stamps", "heading", "lines"), ())
    return text.templates().get_template("notebook.html").render(**{**empty, **given})
