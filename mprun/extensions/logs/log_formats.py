"""Read a scalar from a log that another tool wrote: steps and values of every run in it.

`FORMATS` has the formats; the content of a log determines which one it is. An installed package
adds its own by an entry point of the group `mprun.log_formats` that names a `LogFormat`.
"""

import ast
import csv
import json
import logging
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mprun.compare.load import natural_order
from mprun.config.keys import flat
from mprun.entry_points import announced, loaded
from mprun.errors import BadInput, Damaged
from mprun.extensions.logs.wanted import (
    EXPONENT,
    MARKS,
    STEPS,
    Log,
    Row,
    Wanted,
    in_order,
    listed,
    read_numbers,
    table,
)

# A number in a text, maybe with marks of thousands.
_NUMBER = rf"[-+]?(?:\d+(?:[.,'’]\d+)*\.?{EXPONENT}|[.,]\d+{EXPONENT}|nan|inf(?:inity)?)\b"
# What Python prints for a number that is none of its literals: nan, np.float64(0.5), tensor(0.5).
_PRINTED = re.compile(r"(?:[\w.]*float\d*|tensor)\(([^(),]*)[^()]*\)|(?<![\w'])(-?(?:nan|inf))\b")


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


def read_logs(path: Path, tag: str, step: str | None = None) -> list[Log]:
    """Read every run in a file, or the one of a folder from `logs_in`; at least one.

    tag: the scalar. step: the name of the step count, if it is not a usual one.

    Raises BadInput if tag or steps are missing (it lists the existing names), and Damaged for an
    invalid number or a file that is not text.
    """
    wanted = Wanted(path, tag, step)
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
    raise wanted.no_tag(_words_before_numbers(wanted.text) or filter(None, first))


def logs_in(folder: Path) -> list[Path]:
    """Return the logs in the folder itself: those of the first format that has some."""
    entries = sorted(folder.iterdir(), key=lambda entry: natural_order(entry.name))
    found = (form.logs_in(entries) for form in formats() if form.logs_in is not None)
    return next(filter(None, found), [])


def _mlflow(wanted: Wanted) -> list[Log] | None:
    """Read the file of the tag in the folder of an MLflow run."""
    metrics = wanted.path / "metrics"
    if not _is_mlflow(wanted.path):
        return None
    names = [str(file.relative_to(metrics)) for file in metrics.rglob("*") if file.is_file()]
    if wanted.tag not in names:
        raise wanted.no_tag(sorted(names, key=natural_order))
    return read_logs(metrics / wanted.tag, wanted.tag, wanted.step)


def _is_mlflow(folder: Path) -> bool:
    return (folder / "meta.yaml").is_file() and (folder / "metrics").is_dir()


def _mlflow_in(entries: list[Path]) -> list[Path]:
    return [entry.parent for entry in entries[:1] if _is_mlflow(entry.parent)]


def _is_events(path: Path) -> bool:
    """Return whether the name is a TensorBoard event file's, by TensorBoard's own rule."""
    return "tfevents" in path.name and path.is_file()


def _events_in(entries: list[Path]) -> list[Path]:
    return [entry.parent for entry in entries if _is_events(entry)][:1]


def _events(wanted: Wanted) -> list[Log] | None:
    """Read the event files of torch.utils.tensorboard, TensorFlow and Keras.

    Source: tensorboard.backend.event_processing.event_accumulator.
    """
    path, tag = wanted.path, wanted.tag
    if not (path.is_dir() or _is_events(path)):
        return None
    if wanted.step is not None:
        raise BadInput(f"{path}: --step {wanted.step}: event files have steps of their own")
    # Imported here, so that only this function pays for it.
    from tensorboard.backend.event_processing import event_accumulator as reader
    from tensorboard.util import tensor_util

    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    for file in [path] if path.is_file() else filter(_is_events, sorted(path.iterdir())):
        if not _ends_whole(file):
            wanted.notes.append(f"{file.name} ends within a record: read up to there")
    # 0 keeps every point; the default draws 10,000 at random. One is enough of everything else.
    limits = dict.fromkeys(reader.DEFAULT_SIZE_GUIDANCE, 1) | {reader.SCALARS: 0}
    events = reader.EventAccumulator(str(path), size_guidance=limits).Reload()
    known = events.Tags()
    if tag in known[reader.SCALARS]:
        points = [(point.step, point.value) for point in events.Scalars(tag)]
        return [Log(path, "", table(points), "step")]
    # TensorFlow 2 writes scalars as tensors.
    scalars = [
        name
        for name in known[reader.TENSORS]
        if events.SummaryMetadata(name).plugin_data.plugin_name == "scalars"
    ]
    if tag not in scalars:
        raise wanted.no_tag([*known[reader.SCALARS], *scalars])
    limits[reader.TENSORS] = 0
    events = reader.EventAccumulator(str(path), size_guidance=limits).Reload()
    read = tensor_util.make_ndarray
    points = [(point.step, float(read(point.tensor_proto))) for point in events.Tensors(tag)]
    return [Log(path, "", table(points), "step")]


def _ends_whole(path: Path) -> bool:
    """Return whether an event file ends where a record does: its length, 4 bytes, it, 4 bytes."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        while (place := file.tell()) < size:
            length = int.from_bytes(file.read(8), "little")
            if place + 16 + length > size:
                return False
            file.seek(place + 16 + length)
    return True


_BLOCK = 2**15  # of LevelDB's log format, which no record's header crosses


def _wandb(wanted: Wanted) -> list[Log] | None:
    """Read the history in the file of an offline run of Weights & Biases.

    Source: wandb/proto/wandb_internal.proto; the numbers of fields in protobuf stay as they are.
    """
    if wanted.path.suffix != ".wandb" or not wanted.path.is_file():
        return None
    rows: list[Row] = []
    for number, record in enumerate(_framed(wanted), start=1):
        row: dict[str, Any] = {}
        for history in _fields(record, 2):
            for item in _fields(history, 1):
                names = [*_fields(item, 2)] or [*_fields(item, 1)]  # nested, or one
                row[b".".join(names).decode()] = json.loads(next(_fields(item, 16), b"null"))
        rows.append((f"record {number}", flat(row)))
    return wanted.of_records(rows)


def _fields(message: bytes, wanted: int) -> Iterator[bytes]:
    """Yield the contents of a protobuf message's fields of a number: strings or messages."""
    at = 0

    def varint() -> int:
        nonlocal at
        start = at
        while message[at] & 128:
            at += 1
        at += 1
        return sum((byte & 127) << 7 * place for place, byte in enumerate(message[start:at]))

    while at < len(message):
        number, kind = divmod(varint(), 8)
        if kind == 0:
            varint()
            continue
        size = {1: 8, 5: 4}[kind] if kind != 2 else varint()
        if kind == 2 and number == wanted:
            yield message[at : at + size]
        at += size


def _framed(wanted: Wanted) -> Iterator[bytes]:
    """Yield the records of a file in LevelDB's log format behind seven bytes of wandb's own.

    A record has CRC-32, length, kind (1: whole, 2: first, 3: middle, 4: last part) and content.
    """
    data, at, content = wanted.path.read_bytes(), 7, b""
    while at < len(data):
        if (left := _BLOCK - at % _BLOCK) < 7:
            at += left
            continue
        start, stop = at + 7, at + 7 + int.from_bytes(data[at + 4 : at + 6], "little")
        if stop > len(data):
            wanted.notes.append("it ends within a record: read up to there")
            return
        if zlib.crc32(data[at + 6 : stop]) != int.from_bytes(data[at : at + 4], "little"):
            raise Damaged(f"{wanted.path}: byte {at}: a record's checksum is another")
        content += data[start:stop]
        if data[at + 6] in (1, 4):
            yield content
            content = b""
        at = stop


def _states_in(entries: list[Path]) -> list[Path]:
    """Return trainer_state.json of a Hugging Face folder, else that of the newest checkpoint."""
    newest = [entry for entry in entries[::-1] if entry.name.startswith("checkpoint-")]
    folders = [entry.parent for entry in entries[:1]] + newest
    states = (folder / "trainer_state.json" for folder in folders)
    return [state for state in states if state.is_file()][:1]


def _tables_in(entries: list[Path]) -> list[Path]:
    tables = (".csv", ".tsv", ".jsonl")
    names = ((entry, entry.name.lower().removesuffix(".gz")) for entry in entries)
    return [entry for entry, name in names if name.endswith(tables) and entry.is_file()]


def _cells(wanted: Wanted) -> list[Log] | None:
    """Read a table; None if the first line is not a header that names steps or values."""
    path, tag, first = wanted.path, wanted.tag, wanted.text.partition("\n")[0]
    between = max(",\t;", key=lambda mark: len(next(csv.reader([first], delimiter=mark), [])))
    try:
        # ultralytics pads the names with blanks.
        header = [cell.strip() for cell in next(csv.reader([first], delimiter=between), [])]
        known = {*STEPS, tag.lower(), "value", (wanted.step or tag).lower()}
        if not any(n.lower() in known or n.endswith(f" - {tag}") for n in header):
            return None
        steps = wanted.steps(list(filter(None, header)))  # an index has no name
        values = _value_names(wanted, header)
        places = [header.index(name) for name in (steps, *values)]
        for name in (steps, *values):
            if header.count(name) > 1:
                several = f"{header.count(name)} columns are called {name!r}"
                raise BadInput(f"{path}: line 1: {several}; rename all but one")
        reader = csv.reader(wanted.lines(), delimiter=between)
        rows: list[Row] = []
        for row in reader:
            # A logger that resumes after an interruption may repeat its header.
            if not row or [cell.strip() for cell in row] == header:
                continue
            if len(row) <= max(places) or "".join(row[len(header) :]).strip():
                wrong = f"{len(row)} cells, the header has {len(header)}"
                raise Damaged(f"{path}: line {reader.line_num}: {wrong}")
            found = {header[place]: row[place].strip() for place in places}
            rows.append((f"line {reader.line_num}", found))
    except csv.Error as error:
        raise Damaged(f"{path}: not a table ({error})") from None
    return wanted.of_columns(rows, steps, values)


def _value_names(wanted: Wanted, names: Sequence[str]) -> dict[str, tuple[str, bool]]:
    """Return the columns of values as `Wanted.of_columns` takes them."""
    path, tag = wanted.path, wanted.tag
    if tag in names:
        return {tag: ("", True)}
    # "RUN - TAG" of Weights & Biases, beside "RUN - TAG__MIN" and "RUN - TAG__MAX".
    exported = [name for name in names if name.endswith(f" - {tag}")]
    if exported:
        return {name: (name.removesuffix(f" - {tag}"), True) for name in exported}
    if "Value" in names:
        # TensorBoard's export is called run-NAME-tag-TAG.csv, with "/" as "_".
        _, told, rest = path.name.removesuffix(".gz").removesuffix(".csv").partition("-tag-")
        if told and rest != tag.replace("/", "_"):
            raise BadInput(f"{path}: --tag {tag}: the file is an export of the tag {rest}")
        return {"Value": ("", bool(told))}
    raise wanted.no_tag(name for name in names if name.lower() not in STEPS)


def _printed(wanted: Wanted) -> list[Log] | None:
    """Read dictionaries as Python prints them, one a line; None if there is none with the tag."""
    rows: list[Row] = []
    for number, line in enumerate(wanted.lines(), start=1):
        start, stop = line.find("{'"), line.rfind("}") + 1
        if not 0 <= start < stop:
            continue
        for text in (line[start:stop], _PRINTED.sub(r"'\1\2'", line[start:stop])):
            with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
                told = ast.parse(text, mode="eval").body
                record = ast.literal_eval(told)
                break
        else:
            if f"'{wanted.tag}'" in line:
                raise Damaged(f"{wanted.path}: line {number}: not one dictionary")
            continue
        if isinstance(told, ast.Dict) and len(record) < len(told.keys):
            raise BadInput(f"{wanted.path}: line {number}: a name stands twice in it")
        if isinstance(record, dict):
            rows.append((f"line {number}", flat(record)))
    begins = wanted.text.lstrip().startswith("{'")
    return wanted.of_records(rows) if begins or any(wanted.tag in row for _, row in rows) else None


def _json(wanted: Wanted) -> list[Log] | None:
    """Read records, or a list or mapping of values per name; None if the text is not JSON."""
    path, text, tag = wanted.path, wanted.text.strip(), wanted.tag
    if not text.startswith(("{", "[")):
        return None
    first, _, more = text.partition("\n")
    by_line = False
    with suppress(ValueError, RecursionError):
        by_line = bool(more) and isinstance(_loaded(first, f"{path}: line 1"), dict)
    if by_line:
        return wanted.of_records(_json_lines(wanted))
    try:
        content = _loaded(text, f"{path}: {'a record' if more else 'line 1'}")
    except (ValueError, RecursionError):
        if text.startswith("["):  # a text may begin like this: "[rank0]: step: 1"
            return None
        return wanted.of_records(_json_lines(wanted))
    if isinstance(content, dict) and isinstance(content.get("log_history"), list):
        content = content["log_history"]  # trainer_state.json
    if isinstance(content, dict) and isinstance(content.get(tag), (list, dict)):
        content = _records_of_columns(path, content, tag, wanted.step)
    records = content if isinstance(content, list) else [content]
    if not all(isinstance(record, dict) for record in records):
        raise Damaged(f"{path}: not a list of records")
    rows = [(f"record {place}", flat(record)) for place, record in enumerate(records, start=1)]
    return wanted.of_records(rows)


def _json_lines(wanted: Wanted) -> list[Row]:
    rows, lines = [], wanted.text.split("\n")
    for number, line in enumerate(lines, start=1):
        where = f"{wanted.path}: line {number}"
        try:
            record = _loaded(line, where) if line.strip() else {}
        except (ValueError, RecursionError):
            if number < len(lines):
                raise Damaged(f"{where}: not a JSON record") from None
            wanted.note_cut(number)
            break
        if not isinstance(record, dict):
            raise Damaged(f"{where}: not a JSON record")
        rows.append((f"line {number}", flat(record)))
    return rows


def _loaded(text: str, where: str) -> Any:
    """Decode JSON; raise BadInput if a name stands twice in a record."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        record = dict(pairs)
        if len(record) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise BadInput(f"{where}: {twice!r} stands twice in it")
        return record

    return json.loads(text, object_pairs_hook=once)


def _records_of_columns(path: Path, content: dict, tag: str, step: str | None) -> list[dict]:
    """Make one record a step from {"loss": [2.1, 1.9]}, {"loss": {"10": 2.1}} or Megatron's.

    If nothing counts the steps, the places in the list do, under the name "".
    """
    column = content[tag]
    steps: Iterable[Any]
    counted = step or "step"
    if isinstance(column, dict) and "values" in column:  # Megatron
        values = column["values"]
        first, every = column.get("start_step", 1), column.get("step_interval", 1)
        steps = values if isinstance(values, dict) else range(first, 10**12, max(1, every))
    else:
        values, steps = column, column if isinstance(column, dict) else range(1, 10**12)
        counted = counted if isinstance(column, dict) else ""
        for name in [step] if step else [n for n in STEPS if n in content and n != tag]:
            if name not in content:
                raise BadInput(f"{path}: --step {name}: not there; has {listed(list(content))}")
            steps = content[name]
            steps, counted = (steps.values() if isinstance(steps, dict) else steps), name
            break
    values = values.values() if isinstance(values, dict) else values
    if not isinstance(values, Iterable) or isinstance(values, str):
        raise Damaged(f"{path}: {tag!r} is no list of values")
    return [{counted: at, tag: one} for at, one in zip(steps, values, strict=False)]


def _mlperf(wanted: Wanted) -> list[Log] | None:
    """Read lines ":::MLLOG {"key": ..., "value": ..., "metadata": {...}}"; None without one."""
    rows: list[Row] = []
    for number, line in enumerate(wanted.lines(), start=1):
        _, told, rest = line.partition(":::MLLOG ")
        if told:
            try:
                entry = json.loads(rest)
                rows.append((f"line {number}", {**entry["metadata"], entry["key"]: entry["value"]}))
            except (ValueError, KeyError, TypeError):
                raise Damaged(f"{wanted.path}: line {number}: not an entry of MLPerf") from None
    return wanted.of_records(rows) if rows else None


def _plain_numbers(wanted: Wanted) -> list[Log] | None:
    """Read "timestamp value step" (MLflow) or "step value" lines; None if it is anything else."""
    tag, rows = wanted.tag, []
    columns = {2: ("step", tag), 3: ("timestamp", tag, "step")}
    for number, line in enumerate(wanted.lines(), start=1):
        cells = line.split()
        if all(len(read_numbers(cells, decimal)) < len(cells) for decimal in MARKS):
            return None
        if cells and len(cells) not in columns:
            return None
        if cells:
            rows.append((f"line {number}", dict(zip(columns[len(cells)], cells, strict=True))))
    if len({len(row) for _, row in rows}) != 1:
        return None
    # A timestamp is a time since 1970.
    if max(read_numbers([rows[0][1].get("timestamp", 1e9)], "."), default=0.0) < 1e9:
        return None
    named = str(wanted.path).endswith(f"/{tag}")
    return wanted.of_columns(rows, "step", {tag: ("", named)})


def _words(wanted: Wanted) -> list[Log] | None:
    """Read lines with names before their numbers; None if none holds steps and values."""
    # A name follows the line's start, a mark, a number or two blanks: "val loss" is not "loss".
    before = r"(?:^|[|,;:)\]-]\s*|\s{2,}|\d\s+)"
    value = re.compile(rf"{before}{re.escape(wanted.tag)}\s*[:=]?\s*({_NUMBER})", re.IGNORECASE)
    told = []
    for number, line in enumerate(wanted.lines(), start=1):
        line = re.sub(r"\x1b\[[0-9;]*m", "", line)  # colours
        if found := value.findall(line):
            told.append((f"line {number}", line, found))
    for name in (wanted.step,) if wanted.step else STEPS:
        count = re.compile(rf"{before}{re.escape(name)}\s*[:=]?\s*({_NUMBER})", re.IGNORECASE)
        rows: list[Row] = []
        for where, line, found in told:
            if at := count.search(line):
                if len(set(found)) > 1:
                    both = " and ".join(found)
                    raise BadInput(f"{wanted.path}: {where}: {wanted.tag} is {both}: must be one")
                rows.append((where, {name: at[1], wanted.tag: found[0]}))
        if rows:
            return wanted.of_columns(rows, name, {wanted.tag: ("", True)})
    return None


def _words_before_numbers(text: str) -> list[str]:
    names = re.findall(rf"([A-Za-z][\w/.@ -]*?)\s*[:=]\s*{_NUMBER}", text[:100_000])
    return [name for name in dict.fromkeys(names) if name.lower() not in STEPS]


_NO_TEXT = (
    LogFormat(
        "offline runs of Weights & Biases",
        _wandb,
        lambda entries: [entry for entry in entries if entry.suffix == ".wandb"],
    ),
    LogFormat("run folders of MLflow", _mlflow, _mlflow_in),
    LogFormat("event files of torch, TensorFlow, Keras; one run a folder", _events, _events_in),
)
FORMATS = (
    LogFormat("dictionaries as Python prints them: Hugging Face's Trainer", _printed),
    LogFormat("JSON: Hugging Face's state, records, a list a name (Keras)", _json, _states_in),
    LogFormat('":::MLLOG" lines of MLPerf', _mlperf),
    LogFormat(
        "tables with a header row (commas, tabs, semicolons): Lightning, Keras, timm, ultralytics, "
        "exports of TensorBoard and of Weights & Biases (all runs in one file)",
        _cells,
        _tables_in,
    ),
    LogFormat('"timestamp value step" (metric files of MLflow) or "step value"', _plain_numbers),
    LogFormat(
        'names before numbers ("step: 10  loss: 2.1"): torchtitan, Megatron, nanoGPT', _words
    ),
)
