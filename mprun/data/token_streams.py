"""Token sequences served as parallel contiguous streams, for state carried across batches.

`TokenStreams` reads them piece by piece, from files of any size or from memory. Its sources here
are the user's tokens and random ones.
"""

import hashlib
import os
import weakref
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mprun.data.source import (
    Batch,
    DamagedData,
    DataError,
    Serving,
    Source,
    at_least,
    permutation,
    reading,
    rotation,
)

# Fixed, so that the metric does not depend on the training batch size; a multiple of 8 for Tensor
# Cores.
EVAL_STREAMS = 16
# Tokens read at once, over all streams: 3 MB of memory, and few system calls a batch.
BLOCK_TOKENS = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """How batches are cut from a sequence of tokens.

    sequence_length: tokens of a batch in each stream.
    rotate: Each epoch turns the training sequence to a start drawn from (seed, epoch).
    eval_tokens: Evaluation takes the first ones of the held-out sequence; None: all.
    shuffle_files: Each epoch permutes the parts of the training sequence by (seed, epoch). If it
        neither turns nor permutes, it starts at the first token.
    overlap: Tokens at the end of each training file that the next file repeats; they are read from
        the next file.
    """

    sequence_length: int
    rotate: bool = True
    eval_tokens: int | None = None
    shuffle_files: bool = False
    overlap: int = 0


def padded(entries: int, multiple: int) -> int:
    """Return the size of a vocabulary padded to a multiple; the padding ids never occur."""
    return -(-entries // multiple) * multiple


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

    ``train`` and ``held_out`` are the parts of each sequence, in order.
    """

    def __init__(
        self,
        train: Sequence["Path | Tensor | TokenFile"],
        held_out: "Path | Tensor | list[TokenFile]",
        windows: Windows,
        serving: Serving,
    ) -> None:
        batch_size, sequence_length = serving.batch_size, windows.sequence_length
        at_least(1, batch_size=batch_size, sequence_length=sequence_length)
        at_least(0, seed=serving.seed)
        self._parts = [_opened(part, windows.overlap) for part in train]
        several = held_out if isinstance(held_out, list) else [held_out]
        self._eval_ring = _Ring([_opened(part) for part in several])
        self.train_tokens = sum(map(len, self._parts))
        every = self._eval_ring.tokens
        self.eval_tokens = min(every, windows.eval_tokens or every)
        if batch_size * sequence_length > self.train_tokens:
            raise ValueError(
                f"batch_size={batch_size} with sequence_length={sequence_length} is not allowed: "
                f"their product is at most {self.train_tokens}, the number of training tokens"
            )
        if self.eval_tokens <= EVAL_STREAMS:
            raise DataError(
                f"{self.eval_tokens} held-out tokens are too few: more than {EVAL_STREAMS} "
                "held-out tokens are needed"
            )
        self.samples_per_batch = batch_size * sequence_length
        self._serving, self._windows, self._sequence_length = serving, windows, sequence_length
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
        if index < 0:  # here: a step's path through the files is short
            raise ValueError(f"index={index} is not allowed: must be 0 or more")
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
        parts, seed = self._parts, self._serving.seed
        if self._windows.shuffle_files:
            parts = [parts[i] for i in permutation(seed, epoch, len(parts)).tolist()]
        turn = rotation(seed, epoch, self.train_tokens) if self._windows.rotate else 0
        first = turn + batch * self._sequence_length
        batches = min(self._block, self.batches_per_epoch - batch)
        starts = [first + stream * self._stride for stream in range(self._serving.batch_size)]
        return self._read(_Ring(parts), starts, batches * self._sequence_length)

    def _read(self, ring: "_Ring", starts: list[int], length: int) -> Tensor:
        """Read int64 ``[length + 1, streams]`` to the device, column b from ``starts[b]`` on."""
        # From pinned memory the copy does not make the host wait; torch does not hand the memory
        # out again before the copy has run.
        device = self._serving.device
        pinned = device.type == "cuda"
        rows = torch.empty((len(starts), length + 1), dtype=ring.dtype, pin_memory=pinned)
        for row, start in zip(rows.numpy(), starts, strict=True):
            ring.read_into(row, start)
        rows = rows.to(device, non_blocking=True)
        columns = torch.empty((length + 1, len(starts)), dtype=torch.int64, device=device)
        return columns.copy_(rows.t())


class TokenFile:
    """An open file of int32 tokens without its last ``overlap`` ones."""

    dtype = torch.int32

    def __init__(self, path: Path, overlap: int = 0) -> None:
        with reading(path):
            self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
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
        with reading(self.path):
            while rest and (done := os.preadv(self.descriptor, [rest], offset)):
                rest, offset = rest[done:], offset + done
        if rest:
            raise DamagedData(f"{self.path}: was cut short while it was in use")


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
    """A source for the user's tokens: an integer tensor ``[tokens]`` for training and another one
    of held-out tokens, with ids from 0 to below ``vocab_size``.

    Batches are int64 ``[time, batch]`` on ``device``, like the batches of `TokenStreams`.
    ``sha256`` is computed from all tokens. Training and held-out tokens are stored as int64 in
    memory, 8 bytes per token.

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
        batch_size: int,
        sequence_length: int,
        seed: int,
        device: torch.device | str,
    ) -> None:
        at_least(2, vocab_size=vocab_size)
        train = _checked("train_tokens", train_tokens, vocab_size)
        held_out = _checked("held_out_tokens", held_out_tokens, vocab_size)
        serving = Serving(batch_size=batch_size, seed=seed, device=torch.device(device))
        super().__init__([train], held_out, Windows(sequence_length=sequence_length), serving)
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


CONTENT_SEED = 20171010


class SyntheticTokens(TokenStreams):
    """Uniform random tokens: the best possible loss is ``log(vocab_size)``.

    The content comes from a fixed CPU generator; the seed sets only the starts of the epochs.
    """

    def __init__(
        self,
        vocab_size: int,
        train_tokens: int,
        eval_tokens: int,
        sequence_length: int,
        serving: Serving,
    ) -> None:
        generator = torch.Generator().manual_seed(CONTENT_SEED)
        tokens = torch.randint(vocab_size, (train_tokens + eval_tokens,), generator=generator)
        train, held_out = tokens[:train_tokens], tokens[train_tokens:]
        super().__init__([train], held_out, Windows(sequence_length=sequence_length), serving)
        self.vocab_size = vocab_size
        self.sha256 = hashlib.sha256(tokens.numpy().data).hexdigest()
        self.description |= {"name": "synthetic_tokens", "vocab_size": vocab_size}
