"""The words of a text file, block by block: memory depends neither on the file nor on its lines."""

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from mprun.data.errors import DamagedData

# Larger blocks measured no faster: what is made of one leaves the cache of a core.
BLOCK = 1 << 18
LONGEST_WORD = 1 << 16
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_ASCII = bytes(range(128))
_BLANKS = (b" ", b"\n", b"\t", b"\r")


def word_blocks(texts: Iterable[bytes], marker: str) -> Iterator[list[str]]:
    """The words of ``texts`` (as of ``text_blocks``) in lists, ``marker`` after every line."""
    separator = f" {marker} "
    for text in texts:
        yield text.decode().replace("\n", separator).split()


def text_blocks(
    path: Path, sha256: str, *, lower: bool = False, block: int = BLOCK
) -> Iterator[bytes]:
    """The text of ``path`` in UTF-8, in pieces that end in a blank; the last ends in a line.

    Words are what ``str.split()`` takes as such; blanks outside of ASCII come as spaces. Lines end
    in LF or CRLF, a last one without an end gets it. A byte order mark is dropped. ``lower``
    lower-cases the text. ``block`` is in bytes, 3 or more.

    Raises ``DamagedData``, naming file and place, for a file that is gone or unreadable, is not
    UTF-8, has NUL bytes, holds a word of more than ``LONGEST_WORD`` bytes, no word at all, or not
    the bytes of which ``sha256`` (hex) is the hash; what was yielded before does not count then.
    """
    digest = hashlib.sha256()
    position = lines = 0  # position: of the first byte of `rest`
    rest, last, words = b"", b"\n", False
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
                text = _checked(path, data, position, lines, lower)
                words = words or bool(text.decode().strip())
                position += cut
                lines += data.count(b"\n")
                yield text
        if last != b"\n":
            text = _checked(path, rest + b"\n", position, lines, lower)
            words = words or bool(text.decode().strip())
            yield text
    except OSError as error:
        raise DamagedData(f"{path}: {error.strerror}") from error
    if digest.hexdigest() != sha256:
        raise DamagedData(f"{path}: changed while it was read")
    if not words:
        raise DamagedData(f"{path}: no words, " + ("empty lines only" if position else "0 bytes"))


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


def _checked(path: Path, data: bytes, position: int, lines: int, lower: bool) -> bytes:
    try:
        text = data.decode("utf-8")
        at, reason = data.find(b"\0"), "a NUL byte, no text file"
    except UnicodeDecodeError as error:
        at, reason = error.start, f"not UTF-8 (0x{data[error.start]:02x})"
    if at >= 0:
        line = lines + data.count(b"\n", 0, at) + 1
        raise DamagedData(f"{path}: {reason} at byte {position + at}, line {line}")
    if not text.isascii():
        others = set(data.translate(None, _ASCII).decode())
        if blanks := {ord(character): " " for character in others if character.isspace()}:
            text = text.translate(blanks)
            data = text.encode()
    return text.lower().encode() if lower else data
