"""Word to id for a whole block of text at once, without an object for each word."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

# Bytes of a word that are compared as two 64-bit numbers; one word in a hundred is longer.
_WIDTH = 16
_BLANK = np.zeros(256, bool)
_BLANK[[code for code in range(128) if chr(code).isspace()]] = True
_PART = np.arange(_WIDTH + 1)[:, None] > np.arange(_WIDTH)  # [length, byte] is of the word
_FIRST_MASK, _SECOND_MASK = np.where(_PART, 255, 0).astype(np.uint8).view("<u8").T.copy()
# Odd, their bits without pattern: the golden ratio's of Knuth, a prime of xxHash.
_FACTORS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F], "<u8")


class WordTable:
    """Ids 0, 1, ... of ``words``; any other word has that of ``unknown``, a line end ``marker``'s.

    A hash table with linear probing whose keys are the first 16 bytes of the words in UTF-8, zeros
    after the end, looked up for all words of a block by NumPy. A dictionary needs a Python string
    for each word and takes more than twice the time (benchmarks/text_speed.py). Words of more than
    16 bytes are in a dictionary. Memory: 20 bytes for each of 2 to 4 slots a word.
    """

    def __init__(self, words: Sequence[str], unknown: str, marker: str) -> None:
        encoded = [word.encode() for word in words]
        self._unknown, self._marker = words.index(unknown), words.index(marker)
        self._long = {word: i for i, word in enumerate(encoded) if len(word) > _WIDTH}
        short = np.array([i for i, word in enumerate(encoded) if len(word) <= _WIDTH], np.int32)
        keys = np.array([encoded[i] for i in short], f"S{_WIDTH}").view("<u8").reshape(-1, 2)
        self._bits = max(4, (2 * len(words)).bit_length())
        self._ids = np.full(1 << self._bits, -1, np.int32)
        self._first, self._second = np.zeros((2, 1 << self._bits), "<u8")
        slots = self._slots(keys[:, 0], keys[:, 1])
        rest = np.arange(len(short))
        while len(rest):
            free = rest[self._ids[slots[rest]] < 0][::-1]
            # Of several for one slot the last stays: the one of the lowest id, the most frequent.
            self._ids[slots[free]] = short[free]
            placed = self._ids[slots[rest]] == short[rest]
            at, these = slots[rest[placed]], keys[rest[placed]]
            self._first[at], self._second[at] = these[:, 0], these[:, 1]
            rest = rest[~placed]
            slots[rest] = self._next(slots[rest])

    def encode(self, text: bytes) -> np.ndarray:
        """Ids of the words of ``text`` and its line ends, int32 ``[tokens]``.

        ``text`` is UTF-8 without NUL bytes, ends in a blank, and its blanks are ASCII.
        """
        data = np.frombuffer(text + b" " * _WIDTH, np.uint8)
        blank = _BLANK.take(data)
        before = np.concatenate([[True], blank[:-1]])
        is_start = before & ~blank
        tokens = np.flatnonzero(is_start | (data == ord("\n")))
        is_word = is_start[tokens]
        starts = tokens[is_word]
        lengths = np.flatnonzero(blank & ~before) - starts
        ids = np.full(len(tokens), self._marker, "<i4")
        ids[is_word] = self._look_up(text, data, starts, lengths)
        return ids

    def _look_up(
        self, text: bytes, data: np.ndarray, starts: np.ndarray, lengths: np.ndarray
    ) -> np.ndarray:
        # All stretches of 16 bytes; as opaque items they may begin at any byte.
        stretches = np.ndarray(len(data) - _WIDTH + 1, f"V{_WIDTH}", data, strides=(1,))
        keys = stretches[starts].view("<u8").reshape(-1, 2)
        compared = np.minimum(lengths, _WIDTH)
        first = keys[:, 0] & _FIRST_MASK.take(compared)
        second = keys[:, 1] & _SECOND_MASK.take(compared)
        slots = self._slots(first, second)
        hit, on = self._compare(first, second, slots)
        found = np.where(hit, self._ids.take(slots), np.int32(self._unknown))
        rest = np.flatnonzero(on)
        while len(rest):
            slots[rest] = self._next(slots[rest])
            hit, on = self._compare(first[rest], second[rest], slots[rest])
            found[rest[hit]] = self._ids[slots[rest[hit]]]
            rest = rest[on]
        for i in np.flatnonzero(lengths > _WIDTH).tolist():
            word = text[starts[i] : starts[i] + lengths[i]]
            found[i] = self._long.get(word, self._unknown)
        return found

    def _compare(
        self, first: np.ndarray, second: np.ndarray, slots: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Which words are those in their ``slots``, and which may be in the next slot."""
        there = self._first.take(slots)
        hit = (there == first) & (self._second.take(slots) == second)
        return hit, ~hit & (there != 0)  # no word: an empty slot ends the search

    def _slots(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        mixed = first * _FACTORS[0] + second * _FACTORS[1]
        mixed ^= mixed >> np.uint64(32)
        mixed *= _FACTORS[0]
        return (mixed >> np.uint64(64 - self._bits)).astype(np.int64)

    def _next(self, slots: np.ndarray) -> np.ndarray:
        return (slots + 1) & (len(self._ids) - 1)


def encoded_blocks(texts: Iterable[bytes], table: WordTable) -> Iterator[np.ndarray]:
    """The ids of the words in ``texts``, little-endian int32 ``[tokens]`` each."""
    for text in texts:
        yield table.encode(text)
