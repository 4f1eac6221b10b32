"""Logs of records: JSON in its forms, dictionaries as Python prints them, MLPerf's lines."""

import ast
import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from mprun.config.keys import flat
from mprun.errors import BadInput, Damaged
from mprun.extensions.logs.text_logs import in_words
from mprun.extensions.logs.wanted import LINE, STEPS, Log, Row, Wanted, listed, part_of

# What Python prints for a number that is none of its literals: nan, np.float64(0.5), tensor(0.5).
_PRINTED = re.compile(r"(?:[\w.]*float\d*|tensor)\(([^(),]*)[^()]*\)|(?<![\w'])(-?(?:nan|inf))\b")


def states_in(entries: list[Path]) -> list[Path]:
    """Return trainer_state.json of a Hugging Face folder, else that of the newest checkpoint."""
    newest = [entry for entry in entries[::-1] if entry.name.startswith("checkpoint-")]
    folders = [entry.parent for entry in entries[:1]] + newest
    states = (folder / "trainer_state.json" for folder in folders)
    return [state for state in states if state.is_file()][:1]


def dictionaries(wanted: Wanted) -> list[Log] | None:
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
                raise Damaged(f"{wanted.path}: line {number}: is not a single dictionary") from None
            continue
        if isinstance(record, dict):
            rows.append((f"line {number}", {LINE: part_of(line[:start])} | flat(record)))
    if wanted.text.lstrip().startswith("{'"):
        return wanted.of_records(rows)
    # A summary at the end is no log of what stands in words above it.
    told = wanted.told(rows)
    return wanted.of_records(rows) if len(told) > len(in_words(wanted)[1]) else None


def _literal(text: str, where: str) -> Any:
    """Return what Python printed; raise BadInput if a name stands twice in a dictionary."""
    try:
        told = ast.parse(text, mode="eval").body
        record = ast.literal_eval(told)
    except (ValueError, SyntaxError):
        told = ast.parse(_PRINTED.sub(r"'\1\2'", text), mode="eval").body
        record = ast.literal_eval(told)
    if isinstance(told, ast.Dict) and len(record) < len(told.keys):
        raise BadInput(f"{where}: contains a name twice")
    return record


def json_text(wanted: Wanted) -> list[Log] | None:
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
        raise Damaged(f"{path}: is not a list of records")
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
                raise Damaged(f"{where}: is not a JSON record") from None
            wanted.note_cut(number)
            break
        if not isinstance(record, dict):
            raise Damaged(f"{where}: is not a JSON record")
        rows.append((f"line {number}", flat(record)))
    return rows


def _loaded(text: str, where: str) -> Any:
    """Decode JSON; raise BadInput if a name stands twice in a record."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        record = dict(pairs)
        if len(record) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise BadInput(f"{where}: contains {twice!r} twice")
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
                f"{path}: {scalar!r} also has the fields {listed(unknown)}, which may change the "
                f"meaning of its values; known fields are {listed(_BESIDE[1:])}"
            )
        if step not in (None, "step", "steps"):
            raise BadInput(f"{path}: --step {step}: no such column; there are {listed([*column])}")
        steps, values = column.get("steps"), column["values"]
        if isinstance(values, dict):
            steps, values = [*values], [*values.values()]
    elif found := _counting(wanted, content):
        steps, counted = content[found], found
    else:
        steps, counted = [*range(1, len(values) + 1)], ""
    for name, one in ((scalar, values), (counted, steps)):
        if not isinstance(one, list):
            raise Damaged(
                f"{path}: {name!r} must be a list of values; save it as CSV or JSON lines"
            )
    if len(steps) != len(values):
        raise BadInput(
            f"{path}: {counted!r} and {scalar!r} must have equally many values, got {len(steps)} "
            f"and {len(values)}"
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
            f"{wanted.path}: --scalar {wanted.scalar}: {' or '.join(map(repr, rising))} may count "
            f"its steps; if so, add --step {rising[0]}"
        )
    return None


def is_sacred(path: Path) -> bool:
    """Return whether a file of JSON has Sacred's columns of steps and values."""
    with suppress(ValueError, OSError, RecursionError):
        content = json.loads(path.read_text(encoding="utf-8"))
        columns = content.values() if isinstance(content, dict) else ()
        return any(isinstance(own, dict) and {"steps", "values"} <= {*own} for own in columns)
    return False


def mlperf(wanted: Wanted) -> list[Log] | None:
    """Read lines ":::MLLOG {"key": ..., "value": ..., "metadata": {...}}"; None without one."""
    rows: list[Row] = []
    for number, line in enumerate(wanted.lines(), start=1):
        _, told, rest = line.partition(":::MLLOG ")
        if told:
            try:
                entry = json.loads(rest)
                rows.append((f"line {number}", {**entry["metadata"], entry["key"]: entry["value"]}))
            except (ValueError, KeyError, TypeError):
                raise Damaged(f"{wanted.path}: line {number}: is not an entry of MLPerf") from None
    return wanted.of_records(rows) if rows else None
