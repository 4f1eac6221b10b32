"""Read a scalar from a log that another tool wrote: steps and values of every run in it.

`FORMATS` has the formats; the content of a log determines which one it is. An installed package
adds its own by an entry point of the group `mprun.log_formats` that names a `LogFormat`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mprun.comparison.load import natural_order
from mprun.entry_points import announced, loaded
from mprun.errors import Damaged
from mprun.extensions.logs import binary_logs, record_logs, text_logs
from mprun.extensions.logs.wanted import Log, Wanted, in_order

_TEXTS = (".log", ".out", ".txt")  # how names of text logs end, the most telling one first


class LogFormat(NamedTuple):
    """A form in which tools write scalars."""

    name: str  # the form and its tools, in words
    # Returns every run of a log, at least one; None if the log is in another form.
    read: Callable[[Wanted], list[Log] | None]
    # Takes a folder's entries, in natural order, and returns the logs among them; their parent, if
    # the folder itself is the log.
    logs_in: Callable[[list[Path]], list[Path]] | None = None


def formats() -> tuple[LogFormat, ...]:
    """Return every format in the order of trial: those without text, installed ones, the others."""
    installed = map(loaded, announced("mprun.log_formats").values())
    return (*_NO_TEXT, *installed, *FORMATS)


def read_logs(path: Path, scalar: str, step: str | None = None) -> list[Log]:
    """Read every run in a file, or the one of a folder from `logs_in`; at least one.

    step: the name of the step count, if it is not a usual one.

    Raises BadInput if scalar or steps are missing (it lists the existing names), and Damaged for an
    invalid number or a file that is not text.
    """
    wanted = Wanted(path, scalar, step)
    for form in formats():
        wanted.notes.clear()
        found = form.read(wanted)
        if found is not None:
            for log in found:
                if not np.isfinite(log.points[:, 0]).all():
                    raise Damaged(f"{path}: {log.steps}: steps must be finite numbers")
                log.notes += [f"{path}: {note}" for note in dict.fromkeys(wanted.notes)]
                in_order(log)
            return found
    first = [cell.strip() for cell in wanted.text.partition("\n")[0].split(",")]
    raise wanted.no_scalar(text_logs.words_before_numbers(wanted.text) or filter(None, first))


def logs_in(folder: Path) -> list[Path]:
    """Return the logs in the folder itself: those of the first format that has some."""
    entries = sorted(folder.iterdir(), key=lambda entry: natural_order(entry.name))
    found = (form.logs_in(entries) for form in formats() if form.logs_in is not None)
    return next(filter(None, found), [])


def texts_in(folder: Path) -> list[Path]:
    """Return the logs that no format knows by their names: Sacred's, else files of text."""
    entries = sorted(folder.iterdir(), key=lambda entry: natural_order(entry.name))
    files = [entry for entry in entries if entry.is_file()]
    metrics = (file for file in files if file.name == "metrics.json")
    if sacred := [*filter(record_logs.is_sacred, metrics)]:
        return sacred
    names = [(file, file.name.lower().removesuffix(".gz")) for file in files]
    found = ([file for file, name in names if name.endswith(end)] for end in _TEXTS)
    return next(filter(None, found), [])


def _mlflow(wanted: Wanted) -> list[Log] | None:
    """Read the file of the scalar in the folder of an MLflow run."""
    metrics = wanted.path / "metrics"
    if not _is_mlflow(wanted.path):
        return None
    names = [str(file.relative_to(metrics)) for file in metrics.rglob("*") if file.is_file()]
    if wanted.scalar not in names:
        raise wanted.no_scalar(sorted(names, key=natural_order))
    return read_logs(metrics / wanted.scalar, wanted.scalar, wanted.step)


def _is_mlflow(folder: Path) -> bool:
    return (folder / "meta.yaml").is_file() and (folder / "metrics").is_dir()


_NO_TEXT = (
    LogFormat(
        "offline runs of Weights & Biases",
        binary_logs.wandb,
        lambda entries: [entry for entry in entries if entry.suffix == ".wandb"],
    ),
    LogFormat(
        "run folders of MLflow",
        _mlflow,
        lambda entries: [entry.parent for entry in entries[:1] if _is_mlflow(entry.parent)],
    ),
    LogFormat(
        "event files of torch, TensorFlow, Keras; one run a folder",
        binary_logs.events,
        lambda entries: [entry.parent for entry in entries if binary_logs.is_events(entry)][:1],
    ),
)
FORMATS = (
    LogFormat(
        "dictionaries as Python prints them: Hugging Face's Trainer", record_logs.dictionaries
    ),
    LogFormat(
        "JSON: Hugging Face's state, records, a list a name (Keras)",
        record_logs.json_text,
        record_logs.states_in,
    ),
    LogFormat('":::MLLOG" lines of MLPerf', record_logs.mlperf),
    LogFormat(
        "tables with a header row (commas, tabs, semicolons): Lightning, Keras, timm, ultralytics, "
        "exports of TensorBoard and of Weights & Biases (all runs in one file)",
        text_logs.cells,
        text_logs.tables_in,
    ),
    LogFormat(
        '"timestamp value step" (metric files of MLflow) or "step value"', text_logs.plain_numbers
    ),
    LogFormat(
        'names before numbers ("step: 10  loss: 2.1"): torchtitan, Megatron, nanoGPT',
        text_logs.words,
    ),
)
