"""Logs in files of no text: TensorBoard's events, and offline runs of Weights & Biases."""

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mprun.config.keys import flat
from mprun.errors import BadInput, Damaged
from mprun.extensions.logs.wanted import Log, Row, Wanted, table


def is_events(path: Path) -> bool:
    """Return whether the name is a TensorBoard event file's, by TensorBoard's own rule."""
    return "tfevents" in path.name and path.is_file()


def events(wanted: Wanted) -> list[Log] | None:
    """Read the event files of torch.utils.tensorboard, TensorFlow and Keras."""
    path, scalar = wanted.path, wanted.scalar
    if not (path.is_dir() or is_events(path)):
        return None
    if wanted.step is not None:
        raise BadInput(f"{path}: --step {wanted.step}: event files already contain steps; omit it")
    # Imported here, so that only this function pays for it.
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.util.tensor_util import make_ndarray

    points: list[tuple[int, float]] = []
    known: dict[str, bool] = {}  # tag -> whether its values are scalars
    for file in [path] if path.is_file() else filter(is_events, sorted(path.iterdir())):
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
                    f"{path}: byte {place}: a record has a wrong checksum; to keep the part before "
                    f"it: truncate -s {place} FILE"
                )
            yield content[:-4]
            place += 16 + length


_BLOCK = 2**15  # of LevelDB's log format, which no record's header crosses
_WANDB = b":W&B\xe1\xbe\x00"  # name, magic number 0xBEE1, version
_EXPORT = "export its history as CSV or JSON lines instead"


def wandb(wanted: Wanted) -> list[Log] | None:
    """Read the history in the file of an offline run of Weights & Biases.

    Source: wandb/proto/wandb_internal.proto; the numbers of fields in protobuf stay as they are.
    """
    if wanted.path.suffix != ".wandb" or not wanted.path.is_file():
        return None
    if (head := wanted.path.read_bytes()[:7]) != _WANDB:
        raise BadInput(
            f"{wanted.path}: begins with {head.hex()}, but an offline run that mprun can read "
            f"begins with {_WANDB.hex()}; {_EXPORT}"
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
            raise Damaged(f"{wanted.path}: byte {at}: a record has a wrong checksum; {_EXPORT}")
        content += data[start:stop]
        if data[at + 6] in (1, 4):
            yield content
            content = b""
        at = stop
