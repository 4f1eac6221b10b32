"""Read a scalar from a log that another tool wrote: steps and values of every run in it.

`FORMATS` has the formats; the content of a log determines which one it is. An installed package
adds its own by an entry point of the group `mprun.log_formats` that names a `LogFormat`.
"""

import ast
import csv
import json
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mprun.comparison.load import natural_order
from mprun.entry_points import announced, loaded
from mprun.errors import BadInput, Damaged
from mprun.extensions.logs.wanted import (
    EXPONENT,
    LINE,
    STEPS,
    Log,
    Row,
    Wanted,
    in_order,
    listed,
    number_of,
    part_of,
    splits,
    table,
)
from mprun.record.keys import flat

# A number in a text, maybe with marks of thousands.
_NUMBER = rf"[-+]?(?:\d+(?:[.,'’]\d+)*\.?{EXPONENT}|[.,]\d+{EXPONENT}|nan|inf(?:inity)?)\b"
# What Python prints for a number that is none of its literals: nan, np.float64(0.5), tensor(0.5).
_PRINTED = re.compile(r"(?:[\w.]*float\d*|tensor)\(([^(),]*)[^()]*\)|(?<![\w'])(-?(?:nan|inf))\b")


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

    scalar: its name. step: the name of the step count, if it is not a usual one.

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
    raise wanted.no_scalar(_words_before_numbers(wanted.text) or filter(None, first))


def logs_in(folder: Path) -> list[Path]:
    """Return the logs in the folder itself: those of the first format that has some."""
    entries = sorted(folder.iterdir(), key=lambda entry: natural_order(entry.name))
    found = (form.logs_in(entries) for form in formats() if form.logs_in is not None)
    return next(filter(None, found), [])


def texts_in(folder: Path) -> list[Path]:
    """Return the logs that no format knows by their names: Sacred's, else files of text."""
    entries = sorted(folder.iterdir(), key=lambda entry: natural_order(entry.name))
    files = [entry for entry in entries if entry.is_file()]
    if sacred := [file for file in files if file.name == "metrics.json" and _is_sacred(file)]:
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


def _mlflow_in(entries: list[Path]) -> list[Path]:
    return [entry.parent for entry in entries[:1] if _is_mlflow(entry.parent)]


def _is_events(path: Path) -> bool:
    """Return whether the name is a TensorBoard event file's, by TensorBoard's own rule."""
    return "tfevents" in path.name and path.is_file()


def _events_in(entries: list[Path]) -> list[Path]:
    return [entry.parent for entry in entries if _is_events(entry)][:1]


def _events(wanted: Wanted) -> list[Log] | None:
    """Read the event files of torch.utils.tensorboard, TensorFlow and Keras."""
    path, scalar = wanted.path, wanted.scalar
    if not (path.is_dir() or _is_events(path)):
        return None
    if wanted.step is not None:
        raise BadInput(f"{path}: --step {wanted.step}: event files have steps of their own")
    # Imported here, so that only this function pays for it.
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.util.tensor_util import make_ndarray

    points: list[tuple[int, float]] = []
    known: dict[str, bool] = {}  # tag -> whether its values are scalars
    for file in [path] if path.is_file() else filter(_is_events, sorted(path.iterdir())):
        for event in map(Event.FromString, _records(file, wanted.notes)):
            for value in event.summary.value:
                # TensorFlow 2 writes scalars as tensors, and says so at the first one.
                plain = value.HasField("simple_value")
                is_scalar = plain or value.metadata.plugin_data.plugin_name == "scalars"
                if known.setdefault(value.tag, is_scalar) and value.tag == scalar:
                    own = value.simple_value if plain else float(make_ndarray(value.tensor))
                    points.append((event.step, own))
    if not points:
        raise wanted.no_scalar(name for name, is_scalar in known.items() if is_scalar)
    return [Log(path, "", table(points), "step")]


def _records(path: Path, notes: list[str]) -> Iterator[bytes]:
    """Yield the records of an event file; Damaged for a wrong checksum.

    A record is its length in 8 bytes, their checksum, its content, the checksum of that.
    TensorBoard takes a wrong one for the end of the file.
    """
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    def right(content: bytes) -> bool:
        return int(masked_crc32c(content[:-4])) == int.from_bytes(content[-4:], "little")

    place, size = 0, path.stat().st_size
    with open(path, "rb") as file:
        while place < size:
            head = file.read(12)
            length = int.from_bytes(head[:8], "little")
            whole = len(head) < 12 or right(head)
            if whole and place + 16 + length > size:
                notes.append(f"{path.name} ends within a record: read up to there")
                return
            if not whole or not right(content := file.read(length + 4)):
                raise Damaged(
                    f"{path}: byte {place}: a record's checksum is another; to keep what is before "
                    f"it: truncate -s {place} FILE"
                )
            yield content[:-4]
            place += 16 + length


_BLOCK = 2**15  # of LevelDB's log format, which no record's header crosses
_WANDB = b":W&B\xe1\xbe\x00"  # name, magic number 0xBEE1, version
_EXPORT = "export its history as CSV or JSON lines instead"


def _wandb(wanted: Wanted) -> list[Log] | None:
    """Read the history in the file of an offline run of Weights & Biases.

    Source: wandb/proto/wandb_internal.proto; the numbers of fields in protobuf stay as they are.
    """
    if wanted.path.suffix != ".wandb" or not wanted.path.is_file():
        return None
    if (head := wanted.path.read_bytes()[:7]) != _WANDB:
        raise BadInput(
            f"{wanted.path}: begins with {head.hex()}, offline runs that mprun reads with "
            f"{_WANDB.hex()}; {_EXPORT}"
        )
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
    """Yield the records of a file in LevelDB's log format behind `_WANDB`.

    A record has CRC-32, length, kind (1: whole, 2: first, 3: middle, 4: last part) and content.
    """
    data, at, content = wanted.path.read_bytes(), len(_WANDB), b""
    while at < len(data):
        if (left := _BLOCK - at % _BLOCK) < 7:
            at += left
            continue
        start, stop = at + 7, at + 7 + int.from_bytes(data[at + 4 : at + 6], "little")
        if stop > len(data):
            wanted.notes.append("it ends within a record: read up to there")
            return
        if zlib.crc32(data[at + 6 : stop]) != int.from_bytes(data[at : at + 4], "little"):
            raise Damaged(f"{wanted.path}: byte {at}: a record's checksum is another; {_EXPORT}")
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
    path, scalar, first = wanted.path, wanted.scalar, wanted.text.partition("\n")[0]
    between = max(",\t;", key=lambda mark: len(next(csv.reader([first], delimiter=mark), [])))
    try:
        # ultralytics pads the names with blanks.
        header = [cell.strip() for cell in next(csv.reader([first], delimiter=between), [])]
        known = {*STEPS, scalar.lower(), "value", (wanted.step or scalar).lower()}
        if not any(n.lower() in known or n.endswith(f" - {scalar}") for n in header):
            return None
        steps = wanted.steps(list(filter(None, header)))  # an index has no name
        values = _value_names(wanted, header)
        apart = [name for name in splits(dict.fromkeys(header)) if name not in (steps, *values)]
        places = [header.index(name) for name in (steps, *values, *apart)]
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
    if scalar not in values and (told := wanted.told(rows)):
        rows, values = told, {scalar: ("", True)}
    return wanted.of_columns(rows, steps, values)


def _value_names(wanted: Wanted, names: Sequence[str]) -> dict[str, tuple[str, bool]]:
    """Return the columns of values as `Wanted.of_columns` takes them."""
    path, scalar = wanted.path, wanted.scalar
    if scalar in names:
        return {scalar: ("", True)}
    # "RUN - TAG" of Weights & Biases, beside "RUN - TAG__MIN" and "RUN - TAG__MAX".
    exported = [name for name in names if name.endswith(f" - {scalar}")]
    if exported:
        return {name: (name.removesuffix(f" - {scalar}"), True) for name in exported}
    if scalar.rpartition("/")[2] in names and splits(dict.fromkeys(names)):
        return {scalar.rpartition("/")[2]: ("", True)}
    if "Value" in names and {*names} <= {"Wall time", "Relative", "Step", "Value", ""}:
        # TensorBoard's export is called run-NAME-tag-TAG.csv, with "/" as "_".
        _, told, rest = path.name.removesuffix(".gz").removesuffix(".csv").partition("-tag-")
        if told and rest != scalar.replace("/", "_"):
            raise BadInput(f"{path}: --scalar {scalar}: the file is an export of the tag {rest}")
        return {"Value": ("", bool(told))}
    raise wanted.no_scalar(name for name in names if name.lower() not in STEPS)


def _printed(wanted: Wanted) -> list[Log] | None:
    """Read dictionaries, one a line, as Python prints them; None if there is none with the scalar.

    Behind other words, as fairseq writes them, they may also be JSON.
    """
    rows: list[Row] = []
    behind = re.match(r"\s*(?:\{|\[\s*[\[{])", wanted.text) is None
    for number, line in enumerate(wanted.lines(), start=1):
        start = line.find("{'")
        decoded = start < 0 and behind and (start := line.find('{"')) >= 0
        stop = line.rfind("}") + 1
        if not 0 <= start < stop:
            continue
        read = _loaded if decoded else _literal
        try:
            record = read(line[start:stop], f"{wanted.path}: line {number}")
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            if re.search(rf"['\"]{re.escape(wanted.scalar)}['\"]", line):
                raise Damaged(f"{wanted.path}: line {number}: not one dictionary") from None
            continue
        if isinstance(record, dict):
            rows.append((f"line {number}", {LINE: part_of(line[:start])} | flat(record)))
    if wanted.text.lstrip().startswith("{'"):
        return wanted.of_records(rows)
    # A summary at the end is no log of what stands in words above it.
    told = wanted.told(rows)
    return wanted.of_records(rows) if len(told) > len(_in_words(wanted)[1]) else None


def _literal(text: str, where: str) -> Any:
    """Return what Python printed; raise BadInput if a name stands twice in a dictionary."""
    try:
        told = ast.parse(text, mode="eval").body
        record = ast.literal_eval(told)
    except (ValueError, SyntaxError):
        told = ast.parse(_PRINTED.sub(r"'\1\2'", text), mode="eval").body
        record = ast.literal_eval(told)
    if isinstance(told, ast.Dict) and len(record) < len(told.keys):
        raise BadInput(f"{where}: a name stands twice in it")
    return record


def _json(wanted: Wanted) -> list[Log] | None:
    """Read records, or a list or mapping of values per name; None if the text is not JSON."""
    path, text, scalar = wanted.path, wanted.text.strip(), wanted.scalar
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
    if isinstance(content, dict) and isinstance(content.get(scalar), (list, dict)):
        content = _records_of_columns(wanted, content)
    records = content if isinstance(content, list) else [content]
    if not all(isinstance(record, dict) for record in records):
        raise Damaged(f"{path}: not a list of records")
    rows = [(f"record {place}", flat(record)) for place, record in enumerate(records, start=1)]
    if isinstance(content, dict) and not wanted.told(rows):
        raise wanted.no_scalar(content)
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


# What may stand beside the values of Megatron's golden values and Sacred's metrics.
_BESIDE = ("values", "steps", "timestamps", "start_step", "end_step", "step_interval")


def _records_of_columns(wanted: Wanted, content: dict[str, Any]) -> list[dict]:
    """Make one record a step from {"loss": [2.1, 1.9]}, and from the columns of other tools.

    Sacred has {"steps": [10], "values": [2.1]} below the name, Megatron {"values": {"10": 2.1}}. If
    nothing counts the steps, the places in the list do, under the name "".
    """
    path, scalar, step = wanted.path, wanted.scalar, wanted.step
    values, counted = content[scalar], "step"
    steps: Any
    if isinstance(column := values, dict):
        if "values" not in column:
            raise BadInput(f"{path}: {scalar!r} is a mapping; save the log as CSV or JSON lines")
        if unknown := [name for name in column if name not in _BESIDE]:
            raise BadInput(
                f"{path}: {scalar!r} has {listed(unknown)} beside its values, which may change "
                f"what they mean; known are {listed(_BESIDE[1:])}"
            )
        if step not in (None, "step", "steps"):
            raise BadInput(f"{path}: --step {step}: not there; has {listed([*column])}")
        steps, values = column.get("steps"), column["values"]
        if isinstance(values, dict):
            steps, values = [*values], [*values.values()]
    elif found := _counting(wanted, content):
        steps, counted = content[found], found
    else:
        steps, counted = [*range(1, len(values) + 1)], ""
    for name, one in ((scalar, values), (counted, steps)):
        if not isinstance(one, list):
            raise Damaged(f"{path}: {name!r} is no list of values; save it as CSV or JSON lines")
    if len(steps) != len(values):
        raise BadInput(
            f"{path}: {counted!r} has {len(steps)} values and {scalar!r} {len(values)}: must be as "
            "many"
        )
    return [{counted: at, scalar: one} for at, one in zip(steps, values, strict=True)]


def _counting(wanted: Wanted, content: dict[str, Any]) -> str | None:
    """Return the name of the list that counts the steps of the scalar's, None if there is none.

    BadInput if only a list with a strange name may: whole numbers that rise, as many as values.
    """
    if wanted.step is not None:
        return wanted.steps(list(content))
    if found := next((name for name in STEPS if name in content and name != wanted.scalar), None):
        return found
    rising = []
    for name, own in content.items():
        if isinstance(own, list) and len(own) == len(content[wanted.scalar]) > 1:
            whole = all(isinstance(at, int) and not isinstance(at, bool) for at in own)
            if whole and all(at < after for at, after in zip(own, own[1:], strict=False)):
                rising.append(name)
    if rising and wanted.scalar not in rising:
        raise BadInput(
            f"{wanted.path}: --scalar {wanted.scalar}: does {' or '.join(map(repr, rising))} "
            f"beside it count its steps? Say so with --step {rising[0]}"
        )
    return None


def _is_sacred(path: Path) -> bool:
    with suppress(ValueError, OSError, RecursionError):
        content = json.loads(path.read_text(encoding="utf-8"))
        columns = content.values() if isinstance(content, dict) else ()
        return any(isinstance(own, dict) and {"steps", "values"} <= {*own} for own in columns)
    return False


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
    """Read "timestamp value step" (MLflow) or "step value" lines; None if it is anything else.

    MLflow adds name and digest of the dataset that a value was measured on, if it knows them.
    """
    scalar, rows = wanted.scalar, []
    columns = {2: ("step", scalar), 3: ("timestamp", scalar, "step")}
    columns[5] = (*columns[3], "dataset", "digest")
    for number, line in enumerate(wanted.lines(), start=1):
        cells = line.split()
        try:
            numbers = [number_of(cell, comma="," in cell) for cell in cells[:3]]
        except ValueError:
            return None
        if cells and len(cells) not in columns:
            return None
        if len(cells) > 2 and numbers[0] < 1e9:  # no time since 1970
            return None
        if cells:
            rows.append((f"line {number}", dict(zip(columns[len(cells)], cells, strict=True))))
    if len({len(row) for _, row in rows}) != 1:
        return None
    datasets = sorted({row.get("dataset", "") for _, row in rows})
    if len(datasets) > 1:
        raise BadInput(
            f"{wanted.path}: has values on several datasets ({listed(datasets)}); give each a "
            "metric or a file of its own"
        )
    named = str(wanted.path).endswith(f"/{scalar}")
    return wanted.of_columns(rows, "step", {scalar: ("", named)})


def _words(wanted: Wanted) -> list[Log] | None:
    """Read lines with names before their numbers; None if none holds the scalar."""
    told, rows = _in_words(wanted)
    if rows:
        return wanted.of_records(rows)
    if told:
        names = _words_before_numbers("\n".join(told))
        scalar = wanted.scalar.rpartition("/")[2].lower()
        raise wanted.no_steps([name for name in names if name.lower() != scalar])
    return None


def _in_words(wanted: Wanted) -> tuple[list[str], list[Row]]:
    """Return the lines with the scalar before a number, and the rows of those with steps, too."""
    # A name follows the line's start, a mark, a number or two blanks: "val loss" is not "loss".
    before = r"(?:^|[|,;:)\]-]\s*|\s{2,}|\d\s+)"
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in wanted.lines()]  # without colours
    told: list[tuple[str, str, re.Match, list[str]]] = []
    for scalar in dict.fromkeys((wanted.scalar, wanted.scalar.rpartition("/")[2])):
        value = re.compile(rf"{before}{re.escape(scalar)}\s*[:=]?\s*({_NUMBER})", re.IGNORECASE)
        for number, line in enumerate(lines, start=1):
            if first := value.search(line):
                told.append((f"line {number}", line, first, value.findall(line)))
        if told:
            break
    rows: list[Row] = []
    for name in (wanted.step,) if wanted.step else STEPS:
        count = re.compile(rf"{before}{re.escape(name)}\s*[:=]?\s*({_NUMBER})", re.IGNORECASE)
        for where, line, first, found in told:
            if at := count.search(line):
                if len(set(found)) > 1:
                    both = " and ".join(found)
                    raise BadInput(
                        f"{wanted.path}: {where}: {wanted.scalar} is {both}: must be one"
                    )
                kind = part_of(line[: first.start()])
                rows.append((where, {name: at[1], LINE: kind, scalar: first[1]}))
        if rows:
            break
    return [line for _, line, *_ in told], rows


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
