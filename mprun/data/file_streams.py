"""Token files served as parallel contiguous streams, read piece by piece."""

import os
import weakref
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mprun.data.source import DamagedData, checked_index, permutation, rotation
from mprun.data.token_streams import EVAL_STREAMS, TokenBatch, check_streams

# Read at once, over all streams: 3 MB of memory, and system calls become a small part of a batch.
BLOCK_TOKENS = 1 << 18
_ITEM = 4  # bytes of an int32


class FileStreams:
    """Batches as of ``TokenStreams``, from files of little-endian int32 tokens of any size.

    Batches are ``(tokens, targets)``, both int64 ``[time, batch]``, targets one token ahead;
    column b of a batch goes on where column b of the batch before it ended. ``train`` are files
    whose tokens, one file after the other, are the training sequence, taken as a ring. Each epoch
    ``rotate`` turns it to a start drawn from (seed, epoch), ``shuffle_files`` permutes the files
    by (seed, epoch); with neither, each epoch starts at the first token. ``overlap`` tokens at the
    end of each training file are those that the next file begins with, and are read there.
    Evaluation is on the first ``eval_tokens`` of ``held_out`` (None: all) in ``EVAL_STREAMS``
    streams, whose first tokens, fewer than ``EVAL_STREAMS``, are left out.

    Files are read with ``pread``: mapped pages would count as memory of the process. They stay
    open, so that a folder that is deleted or replaced changes nothing. Batches are views of about
    ``BLOCK_TOKENS`` tokens that one read per stream fetched: do not write to them.

    Raises ``ValueError`` for sizes out of range, ``DataError`` for too few tokens, and
    ``DamagedData`` for a file that is gone when it is opened or cut short later.
    """

    def __init__(
        self,
        train: Sequence[Path],
        held_out: Path,
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
        self._files = [_TokenFile(path, overlap) for path in train]
        self._eval_ring = _Ring([_TokenFile(held_out, 0)])
        self.train_tokens = sum(file.tokens for file in self._files)
        self.eval_tokens = min(self._eval_ring.tokens, eval_tokens or self._eval_ring.tokens)
        check_streams(batch_size, sequence_length, seed, self.train_tokens, self.eval_tokens)
        self._batch_size, self._sequence_length, self._seed = batch_size, sequence_length, seed
        self._device = torch.device(device)
        self._rotate, self._shuffle_files = rotate, shuffle_files
        self._stride = self.train_tokens // batch_size
        self.batches_per_epoch = self._stride // sequence_length
        self._block = max(1, BLOCK_TOKENS // (batch_size * sequence_length))  # batches
        self._loaded = (-1, -1)
        self._columns = torch.empty(0)

    def train_batch(self, index: int) -> TokenBatch:
        """Batch ``index`` of the run; raises ``ValueError`` if it is negative."""
        epoch, batch = divmod(checked_index(index), self.batches_per_epoch)
        block, batch = divmod(batch, self._block)
        if (epoch, block) != self._loaded:
            self._columns = self._training_columns(epoch, block * self._block)
            self._loaded = (epoch, block)
        start = batch * self._sequence_length
        return _chunk(self._columns, start, self._sequence_length)

    def eval_batches(self) -> Iterator[TokenBatch]:
        """The held-out sequence from its beginning; the last batch may be shorter in time."""
        stride, left_out = divmod(self.eval_tokens - 1, EVAL_STREAMS)
        step = self._sequence_length
        block = max(1, BLOCK_TOKENS // (EVAL_STREAMS * step)) * step
        for first in range(0, stride, block):
            length = min(block, stride - first)
            starts = [left_out + first + stream * stride for stream in range(EVAL_STREAMS)]
            columns = self._read(self._eval_ring, starts, length)
            for start in range(0, length, step):
                yield _chunk(columns, start, min(step, length - start))

    def _training_columns(self, epoch: int, batch: int) -> Tensor:
        files = self._files
        if self._shuffle_files:
            files = [files[i] for i in permutation(self._seed, epoch, len(files)).tolist()]
        turn = rotation(self._seed, epoch, self.train_tokens) if self._rotate else 0
        first = turn + batch * self._sequence_length
        batches = min(self._block, self.batches_per_epoch - batch)
        starts = [first + stream * self._stride for stream in range(self._batch_size)]
        return self._read(_Ring(files), starts, batches * self._sequence_length)

    def _read(self, ring: "_Ring", starts: list[int], length: int) -> Tensor:
        """int64 ``[length + 1, streams]`` on the device, column b from ``starts[b]`` on."""
        on_gpu = self._device.type == "cuda"
        # From pinned memory the copy makes the host wait for nothing; torch does not hand the
        # memory out again before the copy has run.
        rows = torch.empty((len(starts), length + 1), dtype=torch.int32, pin_memory=on_gpu)
        for row, start in zip(rows.numpy(), starts, strict=True):
            ring.read_into(row, start)
        rows = rows.to(self._device, non_blocking=True)
        columns = torch.empty((length + 1, len(starts)), dtype=torch.int64, device=self._device)
        return columns.copy_(rows.t())


class _TokenFile:
    """An open file of int32 tokens without its last ``overlap`` ones."""

    def __init__(self, path: Path, overlap: int) -> None:
        try:
            self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise DamagedData(f"{path}: {error.strerror}") from error
        weakref.finalize(self, os.close, self.descriptor)
        self.path = path
        self.tokens = os.fstat(self.descriptor).st_size // _ITEM - overlap

    def read_into(self, row: np.ndarray, position: int) -> None:
        """Fill ``row``, int32, with the tokens from ``position`` on."""
        rest, offset = memoryview(row).cast("B"), position * _ITEM
        try:
            while rest and (done := os.preadv(self.descriptor, [rest], offset)):
                rest, offset = rest[done:], offset + done
        except OSError as error:
            raise DamagedData(f"{self.path}: {error.strerror}") from error
        if rest:
            raise DamagedData(f"{self.path}: cut short while it was in use")


class _Ring:
    """Files one after the other; after the last comes the first."""

    def __init__(self, files: Sequence[_TokenFile]) -> None:
        self._files = files
        self._starts = list(accumulate((file.tokens for file in files), initial=0))
        self.tokens = self._starts.pop()

    def read_into(self, row: np.ndarray, position: int) -> None:
        """Fill ``row``, int32, with the tokens from ``position`` (modulo all) on."""
        while len(row):
            position %= self.tokens
            number = bisect_right(self._starts, position) - 1
            file, within = self._files[number], position - self._starts[number]
            part = row[: file.tokens - within]
            file.read_into(part, within)
            row, position = row[len(part) :], position + len(part)


def _chunk(columns: Tensor, start: int, length: int) -> TokenBatch:
    return columns[start : start + length], columns[start + 1 : start + length + 1]
