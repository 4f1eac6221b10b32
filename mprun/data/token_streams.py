"""Token sequences served as parallel contiguous streams, for state carried across batches.

`TokenStreams` reads them piece by piece, from files of any size or from memory. Its sources here
are the user's tokens, files of encoded tokens (nanoGPT's and llm.c's), and random tokens.
"""

import hashlib
import os
import weakref
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import TypedDict, Unpack

import numpy as np
import torch
from torch import Tensor

from mprun.data.cache import Cache
from mprun.data.source import Batch, DamagedData, DataError, Source, at_least, permutation, rotation

# Fixed, so that the metric does not depend on the training batch size; a multiple of 8 for Tensor
# Cores.
EVAL_STREAMS = 16
# Tokens read at once, over all streams: 3 MB of memory, and few system calls a batch.
BLOCK_TOKENS = 1 << 18


class Sizes(TypedDict):
    """The options of all streams."""

    batch_size: int
    sequence_length: int
    seed: int
    device: torch.device | str


class StreamOptions(Sizes, total=False):
    """The options of `TokenStreams` beside the tokens."""

    rotate: bool
    shuffle_files: bool
    overlap: int
    eval_tokens: int | None


class TokenStreams(Source):
    """A training and a held-out sequence cut into streams that run side by side.

    Batches are ``(tokens, targets)``, both int64 ``[time, batch]``, targets one token ahead.
    Column b of a batch continues column b of the batch before, so that an LSTM's state can be
    carried across batches; reset it when ``index % batches_per_epoch == 0``. Batches are views of
    about ``BLOCK_TOKENS`` tokens that one read per stream fetched: do not write to them.

    Training: each epoch takes the sequence as a ring from another start and cuts it into
    ``batch_size`` equal streams. The rest that fills no batch is dropped. One stream passes from
    the end of the text to its beginning. Evaluation: ``EVAL_STREAMS`` streams whatever the batch
    size, chunks of ``sequence_length``, the last one shorter. The first tokens, fewer than
    ``EVAL_STREAMS``, are left out so that the streams are equally long.

    A sequence is an integer tensor ``[tokens]`` or a file of little-endian int32; a `TokenFile` is
    a file in another format. Files are read with ``pread``: mapped pages would count as memory of
    the process. They stay open, so that deleting or replacing a folder changes nothing.

    Args:
        train, held_out: The parts of each sequence, in order.
        rotate: Each epoch turns the training sequence to a start drawn from (seed, epoch).
        shuffle_files: Each epoch permutes the parts of ``train`` by (seed, epoch). With neither,
            each epoch starts at the first token.
        overlap: Tokens at the end of each training file that the next file repeats; they are read
            from the next file.
        eval_tokens: Evaluation takes the first ones of ``held_out``; None: all.

    Raises:
        ValueError: The sizes are impossible.
        DataError: There are too few held-out tokens.
        DamagedData: A file is gone when it is opened, or cut short later.
    """

    def __init__(
        self,
        train: Sequence["Path | Tensor | TokenFile"],
        held_out: "Path | Tensor | list[TokenFile]",
        batch_size: int,
        sequence_length: int,
        seed: int,
        device: torch.device | str,
        *,
        rotate: bool = True,
        shuffle_files: bool = False,
        overlap: int = 0,
        eval_tokens: int | None = None,
    ) -> None:
        at_least(1, batch_size=batch_size, sequence_length=sequence_length)
        at_least(0, seed=seed)
        self._parts = [_opened(part, overlap) for part in train]
        several = held_out if isinstance(held_out, list) else [held_out]
        self._eval_ring = _Ring([_opened(part) for part in several])
        self.train_tokens = sum(map(len, self._parts))
        self.eval_tokens = min(self._eval_ring.tokens, eval_tokens or self._eval_ring.tokens)
        if batch_size * sequence_length > self.train_tokens:
            raise ValueError(
                f"batch_size={batch_size} with sequence_length={sequence_length} is not allowed: "
                f"their product is at most {self.train_tokens}, the number of training tokens"
            )
        if self.eval_tokens <= EVAL_STREAMS:
            few = f"{self.eval_tokens} held-out tokens are too few"
            raise DataError(f"{few}: more than {EVAL_STREAMS} are needed")
        self.samples_per_batch = batch_size * sequence_length
        self._batch_size, self._sequence_length, self._seed = batch_size, sequence_length, seed
        self._rotate, self._shuffle_files = rotate, shuffle_files
        self._device = torch.device(device)
        self._stride = self.train_tokens // batch_size
        self.batches_per_epoch = self._stride // sequence_length
        self._block = max(1, BLOCK_TOKENS // self.samples_per_batch)  # batches
        self._loaded = (-1, -1)
        self._columns = torch.empty(0)
        self.description = {
            "name": "",  # stands first
            "train_samples": self.train_tokens,
            "eval_samples": self.eval_tokens,
            "eval_streams": EVAL_STREAMS,
            "sequence_length": sequence_length,
        }

    def train_batch(self, index: int) -> Batch:
        """Return batch ``index`` of the run; raise ``ValueError`` if it is negative."""
        if index < 0:  # here: a step's path through the files is short
            raise ValueError(f"index={index} is not allowed: 0 or more")
        epoch, batch = divmod(index, self.batches_per_epoch)
        block, batch = divmod(batch, self._block)
        if (epoch, block) != self._loaded:
            self._columns = self._training_columns(epoch, block * self._block)
            self._loaded = (epoch, block)
        return self._chunk(self._columns, batch * self._sequence_length)

    def eval_batches(self) -> Iterator[Batch]:
        """Yield the held-out sequence; the last batch may be shorter in time."""
        stride, left_out = divmod(self.eval_tokens - 1, EVAL_STREAMS)
        step = self._sequence_length
        block = max(1, BLOCK_TOKENS // (EVAL_STREAMS * step)) * step
        for first in range(0, stride, block):
            length = min(block, stride - first)
            starts = [left_out + first + stream * stride for stream in range(EVAL_STREAMS)]
            columns = self._read(self._eval_ring, starts, length)
            for start in range(0, length, step):
                yield self._chunk(columns, start)

    def _chunk(self, columns: Tensor, start: int) -> Batch:
        """Return tokens and targets from row ``start`` of ``columns``; short at their end."""
        stop = min(start + self._sequence_length, len(columns) - 1)
        return columns[start:stop], columns[start + 1 : stop + 1]

    def _training_columns(self, epoch: int, batch: int) -> Tensor:
        parts = self._parts
        if self._shuffle_files:
            parts = [parts[i] for i in permutation(self._seed, epoch, len(parts)).tolist()]
        turn = rotation(self._seed, epoch, self.train_tokens) if self._rotate else 0
        first = turn + batch * self._sequence_length
        batches = min(self._block, self.batches_per_epoch - batch)
        starts = [first + stream * self._stride for stream in range(self._batch_size)]
        return self._read(_Ring(parts), starts, batches * self._sequence_length)

    def _read(self, ring: "_Ring", starts: list[int], length: int) -> Tensor:
        """Read int64 ``[length + 1, streams]`` to the device, column b from ``starts[b]`` on."""
        # From pinned memory the copy does not make the host wait; torch does not hand the memory
        # out again before the copy has run.
        pinned = self._device.type == "cuda"
        rows = torch.empty((len(starts), length + 1), dtype=ring.dtype, pin_memory=pinned)
        for row, start in zip(rows.numpy(), starts, strict=True):
            ring.read_into(row, start)
        rows = rows.to(self._device, non_blocking=True)
        columns = torch.empty((length + 1, len(starts)), dtype=torch.int64, device=self._device)
        return columns.copy_(rows.t())


class TokenFile:
    """An open file of int32 tokens without its last ``overlap`` ones."""

    dtype = torch.int32

    def __init__(self, path: Path, overlap: int = 0) -> None:
        try:
            self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise DamagedData(f"{path}: {error.strerror}") from error
        weakref.finalize(self, os.close, self.descriptor)
        self.path, self.start = path, 0  # bytes before the first token
        self.bytes = os.fstat(self.descriptor).st_size
        self.tokens = self.bytes // self.dtype.itemsize - overlap

    def __len__(self) -> int:
        return self.tokens

    def read_into(self, row: np.ndarray, position: int) -> None:
        """Fill ``row``, of this dtype, with the tokens from ``position`` on."""
        self._read_bytes(row, self.start + position * self.dtype.itemsize)

    def _read_bytes(self, row: np.ndarray, offset: int) -> None:
        rest = row.data.cast("B")
        try:
            while rest and (done := os.preadv(self.descriptor, [rest], offset)):
                rest, offset = rest[done:], offset + done
        except OSError as error:
            raise DamagedData(f"{self.path}: {error.strerror}") from error
        if rest:
            raise DamagedData(f"{self.path}: cut short while it was in use")


class HeldTokens:
    """Tokens in memory, with the interface of `TokenFile`."""

    dtype = torch.int64

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens.to("cpu", torch.int64).numpy()

    def __len__(self) -> int:
        return len(self.tokens)

    def read_into(self, row: np.ndarray, position: int) -> None:
        row[:] = self.tokens[position : position + len(row)]


def _opened(part: Path | Tensor | TokenFile, overlap: int = 0) -> TokenFile | HeldTokens:
    if isinstance(part, TokenFile):
        return part
    return HeldTokens(part) if isinstance(part, Tensor) else TokenFile(part, overlap)


class _Ring:
    """The parts of a sequence as a ring: the first follows the last."""

    def __init__(self, parts: Sequence[TokenFile | HeldTokens]) -> None:
        self._parts, self.dtype = parts, parts[0].dtype
        self._starts = list(accumulate(map(len, parts), initial=0))
        self.tokens = self._starts.pop()

    def read_into(self, row: np.ndarray, position: int) -> None:
        """Fill ``row`` with the tokens from ``position`` (modulo all) on."""
        while len(row):
            position %= self.tokens
            number = bisect_right(self._starts, position) - 1
            part, within = self._parts[number], position - self._starts[number]
            piece = row[: len(part) - within]
            part.read_into(piece, within)
            row, position = row[len(piece) :], position + len(piece)


class TokenSource(TokenStreams):
    """The user's tokens: two sequences of ids, integer ``[tokens]``, 0 to below ``vocab_size``.

    Batches are int64 ``[time, batch]`` on ``device``, as those of `TokenStreams`. ``sha256`` covers
    every token. Both sequences are held as int64 in memory, 8 bytes a token.

    Raises:
        ValueError: An argument is out of range.
        DataError: Tokens cannot be used.
    """

    def __init__(
        self,
        train_tokens: Tensor,
        held_out_tokens: Tensor,
        *,
        vocab_size: int,
        **sizes: Unpack[Sizes],
    ) -> None:
        at_least(2, vocab_size=vocab_size)
        train = _checked("train_tokens", train_tokens, vocab_size)
        held_out = _checked("held_out_tokens", held_out_tokens, vocab_size)
        super().__init__([train], held_out, **sizes)
        self.vocab_size = vocab_size
        digest = hashlib.sha256(f"{len(train)} {len(held_out)}".encode())
        for tokens in (train, held_out):
            digest.update(np.ascontiguousarray(tokens, "<i8").data)
        self.sha256 = digest.hexdigest()
        self.description |= {"name": "TokenSource", "vocab_size": vocab_size}


_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def _checked(name: str, tokens: object, vocab_size: int) -> Tensor:
    if not isinstance(tokens, Tensor) or tokens.dtype not in _INTEGERS or tokens.dim() != 1:
        got = f"{tokens.dtype} {list(tokens.shape)}" if isinstance(tokens, Tensor) else type(tokens)
        raise DataError(f"{name}: {got}, must be a tensor of integers with one dimension")
    if not len(tokens):
        raise DataError(f"{name}: no token")
    tokens = tokens.detach().cpu().to(torch.int64)
    low, high = tokens.min().item(), tokens.max().item()
    if low < 0 or high >= vocab_size:
        raise DataError(
            f"{name}: ids from {low} to {high}, must be from 0 to below vocab_size={vocab_size}"
        )
    return tokens


_NAMES = {"train": ("train.bin", "*_train_*.bin"), "val": ("val.bin", "*_val_*.bin")}
# karpathy/llm.c, dev/data/data_common.py: 256 int32; the first are magic, version and number of
# tokens. Read as tokens, the first magic begins with 55,432, beyond GPT-2's vocabulary.
_HEADER_BYTES = 1024
_VERSIONS = {20240520: (1, "uint16"), 20240801: (7, "uint32")}  # of GPT-2's tokens, of Llama 3's
# Tokens are at most 2^31 - 1: torch knows int32 on every device.
_DTYPES = {"uint16": torch.uint16, "uint32": torch.int32, "int32": torch.int32}
_LOOKED_AT = 65_536  # words, to see whether their width is right
# How files begin that are often at hand under the name of a token file.
_OTHER_FILES = {
    b"\x93NUMPY": "a NumPy array (.npy)",
    b"PK\x03\x04": "a zip archive (.npz, torch.save)",
    b"\x1f\x8b\x08": "a gzip archive",
    b"\x28\xb5\x2f\xfd": "a zstd archive",
    b"\x89HDF": "an HDF5 file",
    b"PAR1": "a Parquet file",
    b"ARROW1": "an Arrow file",
}


class TokenFiles(TokenStreams):
    """The tokens of ``train.bin`` and ``val.bin`` below ``root``, as nanoGPT prepares them.

    They hold little-endian integers and nothing else. llm.c's files work too: ``*_train_*.bin`` in
    the order of their names and ``*_val_*.bin``, with a header each. They are read in place, piece
    by piece. ``vocab_size`` is padded to ``vocab_multiple``; a token that is not below the unpadded
    size raises ``DamagedData`` when it is read, as does a missing file at the start. ``sha256``
    covers every file, in order.

    dtype: "uint16", "uint32", "int32"; "auto": the header's, without one uint16 if it holds
        ``vocab_size``, else uint32. Files whose words have another width raise ``DataError``.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        vocab_size: int,
        vocab_multiple: int,
        dtype: str,
        cache: str | Path | None,
        **options: Unpack[StreamOptions],
    ) -> None:
        train, held_out = (_found(Path(root), split) for split in _NAMES)
        paths = (*train, *held_out)
        opened: list[TokenFile] = [EncodedFile(path, vocab_size, dtype) for path in paths]
        if other := [own.path for own in opened if own.dtype is not opened[0].dtype]:
            raise DamagedData(f"{other[0]}: its tokens have another width than {train[0].name}'s")
        super().__init__(opened[: len(train)], opened[len(train) :], **options)
        hashes = "".join(map(Cache(cache).content_sha256, (*train, *held_out)))
        self.sha256 = hashlib.sha256(f"{len(train)} {hashes}".encode()).hexdigest()
        self.vocab_size = -(-vocab_size // vocab_multiple) * vocab_multiple
        self.description |= {
            "name": "token_files",
            "files": f"{train[0].name}, {held_out[0].name}",
            "vocab_entries": vocab_size,
            "vocab_size": self.vocab_size,
            "rotate": self._rotate,
        }


class EncodedFile(TokenFile):
    """An open file of tokens below ``vocab_size``, with llm.c's header or without."""

    def __init__(self, path: Path, vocab_size: int, dtype: str) -> None:
        super().__init__(path)
        self.vocab_size = vocab_size
        version, promised, headed = self._header()
        if headed is not None:
            self.start = _HEADER_BYTES
            if dtype != "auto" and _DTYPES[dtype] is not _DTYPES[headed]:
                wrong = f"data.dtype={dtype}: its header (version {version}) is that of {headed}"
                raise DataError(f"{path}: {wrong} (allowed here: auto, {headed})")
        if dtype == "auto":
            dtype = headed or ("uint16" if vocab_size <= 2**16 else "uint32")
        self.dtype = _DTYPES[dtype]
        width, rest = self.dtype.itemsize, self.bytes - self.start
        if rest % width:
            what = "an odd number of bytes" if width == 2 else "no multiple of four bytes"
            raise DamagedData(f"{path}: {what} ({self.bytes}), tokens have {width}")
        self.tokens = rest // width
        if headed and promised != self.tokens:
            raise DamagedData(
                f"{path}: {self.tokens} tokens, its header (version {version}) says {promised}"
            )
        if not self.tokens:
            raise DamagedData(f"{path}: no token")
        self._check_width(dtype)

    def _header(self) -> tuple[int, int, str | None]:
        """Return version, number of tokens and dtype of llm.c's header; without one, no dtype.

        Raises DataError for a file of another kind, DamagedData for a header of another version.
        """
        head = np.zeros(min(self.bytes, 2 * _HEADER_BYTES), np.uint8)
        self._read_bytes(head, 0)
        content = head.tobytes()
        magic, version, promised = np.frombuffer(content[:12].ljust(12, b"\0"), "<i4").tolist()
        known, headed = _VERSIONS.get(magic, (None, None))
        if headed is not None:
            if version != known or self.bytes < _HEADER_BYTES:
                raise DamagedData(
                    f"{self.path}: the header of magic {magic} has version {version} in a file of "
                    f"{self.bytes} bytes, must have version {known} and {_HEADER_BYTES} bytes"
                )
            return version, promised, headed
        what = next((what for begin, what in _OTHER_FILES.items() if content.startswith(begin)), "")
        if not what and len(content) > _HEADER_BYTES and not head[64:_HEADER_BYTES].any():
            if head.any():
                what = f"a file with a header of magic {magic}, which no file of tokens has here"
        if not what and len(content) > 64 and b"\0" not in content:
            with suppress(UnicodeDecodeError):
                content.rstrip(bytes(range(128, 256))).decode()
                what = "a text"
        if what:
            raise DataError(
                f"{self.path}: begins as {what}; must be integers and nothing else, as "
                "numpy's array.tofile writes them, or behind a header as llm.c's"
            )
        return 0, 0, None

    def _check_width(self, dtype: str) -> None:
        """Raise DataError if the first words are halves of tokens, or pairs of them."""
        words = torch.empty(min(self.tokens, _LOOKED_AT), dtype=self.dtype).numpy()
        super().read_into(words, 0)
        why = None
        if self.dtype is torch.uint16 and len(words) >= 1024:
            low, high = words[::2], words[1::2]
            if high.max() == 0 < low.max() or (high.max() < 16 and np.median(low) >= 256):
                why = f"every second word is at most {high.max()}, as in 32-bit tokens", "uint32"
        elif self.dtype is torch.int32 and np.median(words) >= self.vocab_size:
            beyond = f"most words are {self.vocab_size} or more"
            why = f"{beyond}, as pairs of 16-bit tokens", "uint16"
        if why is not None:
            raise DataError(f"{self.path}: data.dtype={dtype}: {why[0]} (allowed here: {why[1]})")

    def read_into(self, row: np.ndarray, position: int) -> None:
        super().read_into(row, position)
        if not len(row):
            return
        most = row.argmax() if row.min() >= 0 else row.argmin()
        if not 0 <= row[most] < self.vocab_size:
            raise DamagedData(
                f"{self.path}: token {row[most]} at place {position + int(most)}, must be below "
                f"data.vocab_size={self.vocab_size}"
            )


def _found(root: Path, split: str) -> list[Path]:
    try:
        found = [sorted(root.glob(pattern)) for pattern in _NAMES[split]]
    except OSError as error:
        raise DamagedData(f"{root}: {error.strerror}") from error
    if len(kinds := [files for files in found if files]) == 1:
        return kinds[0]
    names = " and ".join(_NAMES[split])
    if not kinds:
        raise DataError(f"data.root={root}: has neither of {names}, must have one")
    raise DamagedData(f"{root}: has both of {names}, must have one")


CONTENT_SEED = 20171010


class SyntheticTokens(TokenStreams):
    """Uniform random tokens: the best possible loss is ``log(vocab_size)``.

    The content comes from a fixed CPU generator; the seed sets only the starts of the epochs.
    """

    def __init__(
        self, vocab_size: int, train_tokens: int, eval_tokens: int, **sizes: Unpack[Sizes]
    ) -> None:
        generator = torch.Generator().manual_seed(CONTENT_SEED)
        tokens = torch.randint(vocab_size, (train_tokens + eval_tokens,), generator=generator)
        train, held_out = tokens[:train_tokens], tokens[train_tokens:]
        super().__init__([train], held_out, **sizes)
        self.vocab_size = vocab_size
        self.sha256 = hashlib.sha256(tokens.numpy().data).hexdigest()
        self.description |= {"name": "synthetic_tokens", "vocab_size": vocab_size}
