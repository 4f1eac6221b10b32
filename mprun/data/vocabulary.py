"""The words of a text file, block by block: memory depends neither on the file nor on its lines.

Vocabularies: words by falling frequency, counted in bounded memory.
"""

import hashlib
import heapq
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path

from mprun.data.source import DamagedData, DataError

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


UNKNOWN = "<unk>"
END_OF_LINE = "<eos>"
# About 150 bytes of memory each while they are counted and looked up, and their text.
MAX_ENTRIES = 1_000_000
MAX_ENTRY_BYTES = 256 * 2**20
# Words counted in memory, and their bytes, before they go to disk; files there before a merge.
MAX_COUNTED = 1_000_000
MAX_COUNTED_BYTES = 256 * 2**20
MAX_RUNS = 64


def build_vocabulary(
    tokens: Iterable[str], special: tuple[str, ...], limit: int | None
) -> tuple[str, ...]:
    """``special``, then tokens by falling count, equal counts in alphabetical order.

    At most ``limit`` entries in all, None for no limit.
    """
    return _most_frequent(Counter(tokens).items(), special, limit)


def vocabulary_of_blocks(
    blocks: Iterable[list[str]], special: tuple[str, ...], limit: int | None, folder: Path
) -> tuple[str, ...]:
    """``build_vocabulary`` of the words in ``blocks``, in bounded memory.

    More than ``MAX_COUNTED`` different words, or ``MAX_COUNTED_BYTES`` of them, go sorted to
    temporary files in ``folder`` and are merged from there.

    Raises ``ValueError`` for a ``limit`` of more than ``MAX_ENTRIES``, ``DataError`` if without one
    there are more, or if the entries take more than ``MAX_ENTRY_BYTES``.
    """
    if limit is not None and limit > MAX_ENTRIES:
        raise ValueError(f"vocab_limit={limit} is not allowed: up to {MAX_ENTRIES}")
    with tempfile.TemporaryDirectory(prefix=".words-", dir=folder) as scratch:
        counts = _word_counts(blocks, Path(scratch))
        words = _most_frequent_in_pieces(counts, special, limit)
    if len(words) > MAX_ENTRIES:
        raise DataError(
            f"data.vocab_limit=null: the text has more than {MAX_ENTRIES} different words; set it"
        )
    return words


def joined_words(words: Iterable[str], line_end: str) -> str:
    """Text: ``words`` joined by blanks, a line break for each ``line_end``."""
    text = " ".join("\n" if word == line_end else word for word in words)
    return text.replace(" \n", "\n").replace("\n ", "\n")


def read_words(path: Path) -> tuple[str, ...]:
    """The vocabulary in a cached file, one word a line."""
    return tuple(path.read_text(encoding="utf-8").split("\n")[:-1])


def _most_frequent(
    counts: Iterable[tuple[str, int]], special: tuple[str, ...], limit: int | None
) -> tuple[str, ...]:
    others = ((-count, word) for word, count in counts if word not in special)
    if limit is None:
        ranked = sorted(others)
    else:
        ranked = heapq.nsmallest(limit - len(special), others)
    return (*special, *(word for _, word in ranked))


def _most_frequent_in_pieces(
    counts: Iterator[tuple[str, int]], special: tuple[str, ...], limit: int | None
) -> tuple[str, ...]:
    """`_most_frequent` where not even the words it chooses from need fit into memory."""
    most = MAX_ENTRIES + 1 if limit is None else limit
    ranked: list[tuple[int, str]] = []
    while piece := list(_piece(counts)):
        others = ((-count, word) for word, count in piece if word not in special)
        ranked = heapq.nsmallest(most - len(special), [*ranked, *others])
        if sum(sys.getsizeof(word) for _, word in ranked) > MAX_ENTRY_BYTES:
            shown, cure = ("null", "set it") if limit is None else (limit, "lower it")
            raise DataError(
                f"data.vocab_limit={shown}: the words take more than {MAX_ENTRY_BYTES} bytes of "
                f"memory; {cure}"
            )
    return (*special, *(word for _, word in ranked))


def _piece(counts: Iterator[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    size = 0
    for number, (word, count) in enumerate(counts, 1):
        yield word, count
        size += sys.getsizeof(word)
        if number >= MAX_COUNTED or size >= MAX_COUNTED_BYTES:
            return


def _word_counts(blocks: Iterable[list[str]], folder: Path) -> Iterator[tuple[str, int]]:
    counts: Counter[str] = Counter()
    runs: list[Path] = []
    size = 0
    for words in blocks:
        known = len(counts)
        counts.update(words)
        # The new ones: a dict keeps the order in which its keys came.
        size += sum(map(sys.getsizeof, islice(reversed(counts), len(counts) - known)))
        if len(counts) > MAX_COUNTED or size > MAX_COUNTED_BYTES:
            runs.append(_write_run(sorted(counts.items()), folder))
            counts.clear()
            size = 0
        if len(runs) == MAX_RUNS:
            merged = _write_run(_merged(map(_read_run, runs)), folder)
            for run in runs:
                run.unlink()
            runs = [merged]
    if not runs:
        return iter(counts.items())
    return _merged([*map(_read_run, runs), sorted(counts.items())])


def _merged(runs: Iterable[Iterable[tuple[str, int]]]) -> Iterator[tuple[str, int]]:
    for word, group in groupby(heapq.merge(*runs), key=itemgetter(0)):
        yield word, sum(count for _, count in group)


def _write_run(counts: Iterable[tuple[str, int]], folder: Path) -> Path:
    descriptor, path = tempfile.mkstemp(dir=folder)
    with os.fdopen(descriptor, "w", encoding="utf-8", newline="\n") as file:
        file.writelines(f"{word} {count}\n" for word, count in counts)
    return Path(path)


def _read_run(path: Path) -> Iterator[tuple[str, int]]:
    with open(path, encoding="utf-8", newline="\n") as file:
        for line in file:
            word, count = line.split(" ")
            yield word, int(count)
