"""The words of a text file, block by block: memory depends neither on the file nor on its lines."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from mprun.data.errors import DamagedData

# Half a megabyte of words at a time stays in a core's cache; larger blocks measured no faster.
BLOCK = 1 << 18
LONGEST_WORD = 1 << 16
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_BLANKS = (b" ", b"\n", b"\t", b"\r")


def word_blocks(
    path: Path, marker: str, sha256: str, *, lower: bool = False, block: int = BLOCK
) -> Iterator[list[str]]:
    """The words of ``path`` in order, in lists, with ``marker`` after every line.

    Words are what ``str.split()`` takes as such, lines end in LF or CRLF; an empty line is a
    ``marker`` alone, a last line without an end counts as one. A UTF-8 byte order mark is dropped.
    ``lower`` lower-cases the words but not the marker. ``block`` is in bytes, 3 or more.

    Raises ``DamagedData``, naming file and place, for a file that is gone or unreadable, is not
    UTF-8, has NUL bytes, holds a word of more than ``LONGEST_WORD`` bytes, no word at all, or not
    the bytes of which ``sha256`` (hex) is the hash; what was yielded before does not count then.
    """
    separator = f" {marker} "
    digest = hashlib.sha256()
    position = lines = tokens = 0  # position: of the first byte of `rest`
    rest, last = b"", b"\n"
    try:
        with open(path, "rb") as file:
            while read := file.read(block):
                digest.update(read)
                last = read[-1:]
                if position == 0 and not rest and read.startswith(_BYTE_ORDER_MARK):
                    position, read = len(_BYTE_ORDER_MARK), read[len(_BYTE_ORDER_MARK) :]
                data = rest + read
                cut = _cut(path, data, position)
                data, rest = data[:cut], data[cut:]
                text = _decoded(path, data, position, lines)
                words = (text.lower() if lower else text).replace("\n", separator).split()
                position += cut
                lines += data.count(b"\n")
                tokens += len(words)
                yield words
        if last != b"\n":
            text = _decoded(path, rest, position, lines)
            words = [*(text.lower() if lower else text).split(), marker]
            lines, tokens = lines + 1, tokens + len(words)
            yield words
    except OSError as error:
        raise DamagedData(f"{path}: {error.strerror}") from error
    if digest.hexdigest() != sha256:
        raise DamagedData(f"{path}: changed while it was read")
    if tokens == lines:
        raise DamagedData(f"{path}: no words, " + ("empty lines only" if lines else "0 bytes"))


def _cut(path: Path, data: bytes, position: int) -> int:
    """How much of ``data`` ends in a blank: no character and no word is cut apart there."""
    cut = 0
    while len(data) - cut > LONGEST_WORD:
        following = _after_last_blank(data, cut, cut + LONGEST_WORD + 1)
        if not following:
            raise DamagedData(
                f"{path}: a word of more than {LONGEST_WORD} bytes at byte {position + cut}"
            )
        cut = following
    return _after_last_blank(data, cut, len(data)) or cut


def _after_last_blank(data: bytes, start: int, stop: int) -> int:
    return max(data.rfind(blank, start, stop) for blank in _BLANKS) + 1


def _decoded(path: Path, data: bytes, position: int, lines: int) -> str:
    try:
        text = data.decode("utf-8")
        at, reason = data.find(b"\0"), "a NUL byte, no text file"
    except UnicodeDecodeError as error:
        at, reason = error.start, f"not UTF-8 (0x{data[error.start]:02x})"
    if at < 0:
        return text
    line = lines + data.count(b"\n", 0, at) + 1
    raise DamagedData(f"{path}: {reason} at byte {position + at}, line {line}")
