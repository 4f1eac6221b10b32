"""The words of a text file: read block by block, counted into a vocabulary, turned into ids.

Blocks keep memory independent of the file and of the length of its lines.
"""

import gzip
import hashlib
import heapq
import io
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mprun.data.cache import Cache, Key, announce
from mprun.data.source import DamagedData, DataError
from mprun.entry_points import announced, loaded

# Larger blocks measured no faster: their words no longer fit into the cache of a core.
BLOCK = 1 << 18
LONGEST_WORD = 1 << 16
LONGEST_LINE = 1 << 20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_BLANKS = (b" ", b"\n", b"\t", b"\r")


@dataclass(frozen=True, slots=True)
class TextFile:
    """A file of UTF-8 text of known content, which is read block by block.

    Lines end in LF or CRLF; a last line without an end gets one. A byte order mark is dropped. A
    file that ends in ``.gz`` is read through gzip; positions in messages are those in its text.
    """

    path: Path
    sha256: str  # hex, of its content
    lower: bool = False  # turn the text to lower case
    block: int = BLOCK  # bytes that are read at once, 3 or more

    def blocks(self) -> Iterator[str]:
        """Yield the text in pieces that end in a blank, the last in a line break.

        Raises:
            DamagedData: The file is gone or unreadable, is not UTF-8, has NUL bytes, a word of more
                than ``LONGEST_WORD`` bytes or no word, or its hash is another. The message names
                file and position. Pieces yielded before are then invalid.
        """
        path, digest = self.path, hashlib.sha256()
        position = lines = 0  # position: that of the first byte of `rest`
        rest, last, words = b"", b"\n", False
        try:
            with open(path, "rb", buffering=0) as raw:
                announce("reading", path, os.fstat(raw.fileno()).st_size)
                file: Any = io.BufferedReader(_Hashed(raw, digest), BLOCK)
                if path.suffix == ".gz":
                    file = gzip.GzipFile(fileobj=file)
                while read := file.read(self.block) or (b"" if last == b"\n" else b"\n"):
                    last = read[-1:]
                    if position == 0 and not rest and read.startswith(_BYTE_ORDER_MARK):
                        position, read = len(_BYTE_ORDER_MARK), read[len(_BYTE_ORDER_MARK) :]
                    data = rest + read
                    cut = _cut(path, data, position)
                    data, rest = data[:cut], data[cut:]
                    text = _decoded(path, data, position, lines, self.lower)
                    words = words or bool(text.strip())
                    position += cut
                    lines += data.count(b"\n")
                    yield text
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise DamagedData(f"{path}: is not a complete gzip file ({error})") from error
        except OSError as error:
            raise DamagedData(f"{path}: {error.strerror}") from error
        if digest.hexdigest() != self.sha256:
            raise DamagedData(f"{path}: was changed while it was read")
        if not words:
            raise DamagedData(
                f"{path}: no words, " + ("empty lines only" if position else "0 bytes")
            )

    def lines(self) -> Iterator[list[str]]:
        """Yield the lines, without their ends, in lists.

        ``DamagedData`` names the file if a line has more than ``LONGEST_LINE`` characters.
        """
        rest, before = "", 0
        for text in self.blocks():
            *lines, rest = (rest + text).split("\n")
            before += len(lines)
            if len(rest) > LONGEST_LINE:
                raise DamagedData(
                    f"{self.path}: line {before + 1} has more than {LONGEST_LINE} characters, the "
                    "limit for one line"
                )
            yield lines

    def words(self, marker: str) -> Iterator[list[str]]:
        """Yield the words in lists, ``marker`` after every line."""
        for text in self.blocks():
            yield text.replace("\n", f" {marker} ").split()


class _Hashed(io.RawIOBase):  # its content also goes into a digest as it is read
    def __init__(self, raw: io.RawIOBase, digest: Any) -> None:
        self._raw, self._digest = raw, digest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        count = self._raw.readinto(buffer)
        self._digest.update(buffer[:count])
        return count


def _cut(path: Path, data: bytes, position: int) -> int:
    """Return the length of ``data`` up to its last blank, where no character or word is cut."""
    cut = 0
    while len(data) - cut > LONGEST_WORD:
        following = _after_last_blank(data, cut, cut + LONGEST_WORD + 1)
        if not following:
            at = position + cut
            raise DamagedData(
                f"{path}: contains a word of more than {LONGEST_WORD} bytes at byte {at}"
            )
        cut = following
    return _after_last_blank(data, cut, len(data)) or cut


def _after_last_blank(data: bytes, start: int, stop: int) -> int:
    return max(data.rfind(blank, start, stop) for blank in _BLANKS) + 1


def _decoded(path: Path, data: bytes, position: int, lines: int, lower: bool) -> str:
    try:
        text = data.decode("utf-8")
        at, reason = data.find(b"\0"), "a NUL byte, no text file"
    except UnicodeDecodeError as error:
        at, reason = error.start, f"not UTF-8 (0x{data[error.start]:02x})"
    if at >= 0:
        line = lines + data.count(b"\n", 0, at) + 1
        raise DamagedData(f"{path}: {reason} at byte {position + at}, line {line}")
    return text.lower() if lower else text


class WordIds(dict[str, int]):
    """Ids 0, 1, ... of ``words``; any other word has the id of ``unknown``."""

    def __init__(self, words: Sequence[str], unknown: str) -> None:
        super().__init__(zip(words, range(len(words)), strict=True))
        self._unknown = self[unknown]

    def __missing__(self, word: str) -> int:
        return self._unknown

    def encoded(self, blocks: Iterable[list[str]]) -> Iterator[np.ndarray]:
        """Yield the ids of the words in ``blocks``, little-endian int32 ``[words]`` each."""
        for words in blocks:
            yield np.fromiter(map(self.__getitem__, words), "<i4", len(words))


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """How files of text become ids, and the folder ``cache`` where these are kept (`Cache`).

    With a ``tokenizer`` the entries of its file are the vocabulary (`subwords`), else words.
    """

    eval_split: str  # "valid" or "test"
    vocab_multiple: int
    cache: str | Path | None
    lower: bool = False
    tokenizer: str | None = None

    @property
    def kept(self) -> Cache:
        return Cache(self.cache)

    def text(self, path: Path) -> TextFile:
        """Return a file of text in its present state."""
        return TextFile(path, self.kept.content_sha256(path), self.lower)


class Coder(Protocol):
    """Turns a text into ids below ``entries``, with ends of lines."""

    key: Key  # what the ids depend on
    about: dict[str, str]  # for the record
    entries: int
    vocabulary: Any  # the entries, by ids

    def encoded(self, text: TextFile) -> Iterator[np.ndarray]: ...


class Words(Coder):
    """The words between blanks, by a vocabulary that is kept in a cache under ``key``.

    ``marker`` follows every line in `encoded`; with ``leads`` it also stands before the first.
    """

    def __init__(
        self,
        cache: Cache,
        key: Key,
        words: Callable[[], Iterable[str]],
        unknown: str,
        marker: str,
        leads: bool = False,
    ) -> None:
        self._file = cache.made({**key, "kind": "words"}, words)
        self.key, self.about, self._unknown = key, {}, unknown
        self._marker, self._leads = marker, leads
        self.entries = self._file.read_bytes().count(b"\n")

    @property
    def vocabulary(self) -> tuple[str, ...]:
        return tuple(self._file.read_text(encoding="utf-8").split("\n")[:-1])

    @cached_property
    def lookup(self) -> WordIds:  # a text in the cache needs none in memory
        return WordIds(self.vocabulary, self._unknown)

    def encoded(self, text: TextFile) -> Iterator[np.ndarray]:
        blocks = text.words(self._marker)
        return self.lookup.encoded(chain([[self._marker]], blocks) if self._leads else blocks)


def subwords(tokenizer: str, *arguments: Any, **options: Any) -> Coder:
    """Make the extension's coder; ValueError: it is not there."""
    make = announced("mprun.tokenizers").get("subwords")
    if make is None:
        raise ValueError(f"tokenizer={tokenizer}: its extension is missing here (allowed: null)")
    return loaded(make)(tokenizer, *arguments, **options)


UNKNOWN = "<unk>"
END_OF_LINE = "<eos>"
MAX_ENTRIES = 1_000_000  # each is a row of the tables that a network learns


def build_vocabulary(
    blocks: Iterable[list[str]], special: tuple[str, ...], limit: int | None
) -> tuple[str, ...]:
    """Return ``special``, then the words in ``blocks`` by falling count, ties by alphabet.

    There are at most ``limit`` entries in all. None: no limit, but ``DataError`` if there are more
    than ``MAX_ENTRIES``.
    """
    counts: Counter[str] = Counter()
    for words in blocks:
        counts.update(words)
    others = [(-count, word) for word, count in counts.items() if word not in special]
    most = (MAX_ENTRIES + 1 if limit is None else limit) - len(special)
    entries = (*special, *(word for _, word in heapq.nsmallest(most, others)))
    if limit is None and len(entries) > MAX_ENTRIES:
        raise DataError(
            f"data.vocab_limit=null: the text has more than {MAX_ENTRIES} different words; set it"
        )
    return entries
