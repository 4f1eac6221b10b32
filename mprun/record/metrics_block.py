"""Some lines of a metrics.jsonl as columns, cut out of the bytes by position and by key.

`MetricsFile` writes every train record with the same beginning,

    {"split": "train", "step": 7, "updates": 6, "skipped": 1, ... "loss": 2.5, "loss_scale": 8.0 ...

so that the three counters can be read by position, for all lines at once. Wherever a file is not
of that form, `Unscannable` is raised, and the caller parses it instead.
"""

import numpy as np

LOSS = b'"loss": '
_SCALE = b'"loss_scale": '
_HEAD = b'{"split": "train", "step": '
_EVAL_HEAD = b'{"split": "eval"'


class Unscannable(Exception):
    """The file is not of the form that `MetricsFile` writes."""


class Block:
    """Whole lines of a file: data[begin:end], few enough to stay in the processor's cache.

    starts, ends: int64, positions in `data` of the train records; the end is behind the brace.
    eval_starts, eval_ends: likewise. is_train: bool, for each line. step, updates, skipped: int64
    for each train record. scales: the texts of their loss_scale, each once or a few times; empty
    if none has it. nonfinite: indices of the train records whose loss is not finite.
    """

    def __init__(self, data: bytes, begin: int, end: int):
        self.data, self.begin = data, begin
        self.bytes = np.frombuffer(data, dtype=np.uint8, count=end - begin, offset=begin)
        # The 8 bytes at every position as one number: compares 8 characters at once.
        count = max(end - begin - 7, 0)
        self.words = np.ndarray((count,), "<u8", data, offset=begin if count else 0, strides=(1,))
        starts, ends = self._lines()
        self.is_train = self._are(starts, _HEAD[:16])
        evals = ~self.is_train
        if not self._are(starts[evals], _EVAL_HEAD).all():
            raise Unscannable("another beginning of a line")
        # Positions in the block; what leaves it is a position in the file.
        self.own_starts, self.own_ends = starts[self.is_train], ends[self.is_train]
        self.starts, self.ends = self.own_starts + begin, self.own_ends + begin
        self.eval_starts, self.eval_ends = starts[evals] + begin, ends[evals] + begin
        self.step, at = self._integers(self.own_starts + 16, _HEAD[16:])
        self.updates, at = self._integers(at, b', "updates": ')
        self.skipped, at = self._integers(at, b', "skipped": ')
        self.scales = self._scale_texts()
        self.nonfinite = self._nonfinite()

    def _lines(self) -> tuple[np.ndarray, np.ndarray]:
        ends = np.flatnonzero(self.bytes == ord("\n"))
        starts = np.concatenate(([0], ends + 1))
        if starts[-1] == len(self.bytes):
            starts = starts[:-1]
        else:
            ends = np.append(ends, len(self.bytes))
        if (ends - starts < len(_HEAD)).any():
            raise Unscannable("a line that is too short for a record")
        if not (self.bytes[ends - 1] == ord("}")).all():
            raise Unscannable("a line that does not end with a brace")
        return starts, ends

    def _are(self, at: np.ndarray, text: bytes) -> np.ndarray:
        """bool [len(at)]: whether `text`, 8 bytes or longer, stands at each position."""
        if len(at) and at[-1] + len(text) > len(self.bytes):
            raise Unscannable("the last line is too short")
        equal = np.ones(len(at), dtype=bool)
        for offset in {*range(0, len(text) - 7, 8), len(text) - 8}:
            word = np.frombuffer(text, "<u8", count=1, offset=offset)[0]
            equal &= self.words[at + offset] == word
        return equal

    def _integers(self, at: np.ndarray, text: bytes) -> tuple[np.ndarray, np.ndarray]:
        """The integers that follow `text` at each position, and the positions behind them."""
        if not self._are(at, text).all():
            raise Unscannable("another order of the keys")
        at = at + len(text)
        if len(at) and at[-1] >= len(self.words):
            raise Unscannable("the last line is too short")
        values, digits = leading_integers(self.words[at])
        if (digits == 0).any():
            raise Unscannable("no whole number")
        return values, at + digits

    def _scale_texts(self) -> set[bytes]:
        first = self._scale_text(0)
        if first is not None and first == self._scale_text(-1):
            # A scale seldom changes, and counting one text costs half of looking at every value.
            end = self.begin + len(self.bytes)
            if self.data.count(_SCALE + first, self.begin, end) == len(self.starts):
                return {first[:-1]}
        # "s_s" is rare, and looking for it byte by byte is cheap.
        marked = self.bytes[1:-1] == ord("_")
        marked &= self.bytes[:-2] == ord("s")
        marked &= self.bytes[2:] == ord("s")
        at = np.flatnonzero(marked) - _SCALE.index(b"s_s")
        at = at[(at >= 0) & (at + len(_SCALE) <= len(self.bytes))]
        at = at[self._are(at, _SCALE)] + len(_SCALE)
        inside, owner = self._owners(at)
        at, owner = at[inside], owner[inside]
        if not len(at):
            return set()
        if len(owner) != len(self.starts) or (owner != np.arange(len(owner))).any():
            raise Unscannable("a record without or with two loss_scale")
        changes = self._changes(at)
        return {
            value_text(self.data, start, end)
            for start, end in zip(
                (at[changes] + self.begin).tolist(), self.ends[changes].tolist(), strict=True
            )
        }

    def _scale_text(self, index: int) -> bytes | None:
        """The value in a train record with the comma behind it, or None."""
        if not len(self.starts):
            return None
        at = self.data.find(_SCALE, self.starts[index], self.ends[index])
        comma = self.data.find(b",", at, self.ends[index])
        return self.data[at + len(_SCALE) : comma + 1] if 0 <= at < comma else None

    def _changes(self, at: np.ndarray) -> np.ndarray:
        """Indices of the values that may differ from the one before: few, as a rule."""
        if at[-1] + 8 >= len(self.words):
            return np.arange(len(at))
        first, second = self.words[at], self.words[at + 8]
        changed = np.ones(len(at), dtype=bool)
        changed[1:] = (first[1:] != first[:-1]) | (second[1:] != second[:-1])
        # Equal 16 bytes are equal values only where the value ends in them.
        text = np.stack((first[changed], second[changed]), axis=1)
        marks = text.view(np.uint8).reshape(-1, 16)
        ended = ((marks == ord(",")) | (marks == ord("}"))).any(axis=1)
        changed |= ~ended[np.cumsum(changed) - 1]
        return np.flatnonzero(changed)

    def _nonfinite(self) -> np.ndarray:
        """Train records whose loss is NaN, Infinity or -Infinity, as a string or bare."""
        end = self.begin + len(self.bytes)
        if self.data.find(b"N", self.begin, end) < 0 and self.data.find(b"I", self.begin, end) < 0:
            return np.empty(0, dtype=np.int64)
        at = np.flatnonzero((self.bytes == ord("N")) | (self.bytes == ord("I")))
        at = at[at >= len(LOSS) + 2]
        found = np.zeros(len(at), dtype=bool)
        for before in (0, 1, 2):  # NaN; "NaN or -Infinity; "-Infinity
            found |= self._are(at - len(LOSS) - before, LOSS)
        inside, owner = self._owners(at[found])
        return np.unique(owner[inside])

    def _owners(self, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Whether each position lies in a train record, and the index of that record."""
        if not len(self.starts):
            return np.zeros(len(at), dtype=bool), np.zeros(len(at), dtype=np.int64)
        owner = np.searchsorted(self.own_starts, at, side="right") - 1
        return (owner >= 0) & (at < self.own_ends[owner]), owner


def value_text(data: bytes, start: int, end: int) -> bytes:
    """The value that begins at `start` in the record that ends with its brace before `end`."""
    comma = data.find(b",", start, end)
    return data[start : comma if comma >= 0 else end - 1]


def leading_integers(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Values and lengths of the decimal integers at the beginning of 8-byte texts.

    words: uint64, first character in the lowest byte. Arithmetic on all 8 digits at once (Lemire,
    "SWAR explained: parsing eight digits", 2022) takes a fifth of the time of a loop over digits.
    """
    u = np.uint64
    digits = words ^ u(0x3030303030303030)  # "0".."9" become 0..9
    # The highest bit of a byte is set from the first on that is no digit.
    other = ((digits + u(0x7676767676767676)) | digits) & u(0x8080808080808080)
    lowest = other & (~other + u(1))  # 2^(8 length + 7), 0 if all are digits
    exponents = np.frexp(lowest.astype(np.float64))[1]
    lengths = np.where(lowest == 0, 8, (exponents - 8) >> 3)
    # Zeros in front: the last digit moves to the highest byte, what follows it falls out.
    digits <<= (64 - 8 * lengths).astype(u)
    pairs = digits * u(10) + (digits >> u(8))
    low = (pairs & u(0x000000FF000000FF)) * u(100 + (1_000_000 << 32))
    high = ((pairs >> u(16)) & u(0x000000FF000000FF)) * u(1 + (10_000 << 32))
    return ((low + high) >> u(32)).astype(np.int64), lengths
