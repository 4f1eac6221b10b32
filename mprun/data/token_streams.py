"""A token sequence served as parallel contiguous streams, for state carried across batches.

The user's own tokens as a source: two sequences of ids, served as parallel streams.
"""

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

from mprun.data.source import DataError, checked_index, rotation

TokenBatch = tuple[Tensor, Tensor]

# Fixed, so that the metric does not depend on the training batch size. A multiple of 8 for the
# sake of Tensor Cores.
EVAL_STREAMS = 16


class TokenStreams:
    """A training and a held-out sequence cut into streams that run side by side.

    Batches are ``(tokens, targets)``, both int64 ``[time, batch]``, targets one token ahead;
    column b of a batch goes on where column b of the batch before it ended, so an LSTM's state can
    be carried from one batch to the next within an epoch. Reset it where
    ``index % batches_per_epoch == 0``.

    Training: each epoch turns the sequence, taken as a ring, to a start drawn from (seed, epoch)
    and cuts it into ``batch_size`` equal streams; what does not fill a batch is dropped, a
    different piece each epoch. One stream passes from the end of the text to its beginning.
    Evaluation: ``EVAL_STREAMS`` streams whatever the batch size, chunks of ``sequence_length``, the
    last one shorter. The first tokens of the held-out sequence, fewer than ``EVAL_STREAMS``, are
    left out so that the streams are equally long.

    Batches are views of a stored tensor: do not write to them.
    """

    def __init__(
        self,
        train: Tensor,
        held_out: Tensor,
        batch_size: int,
        sequence_length: int,
        seed: int,
        device: torch.device | str,
    ) -> None:
        check_streams(batch_size, sequence_length, seed, len(train), len(held_out))
        self._train, self._seed = train.to(device), seed
        self._batch_size, self._sequence_length = batch_size, sequence_length
        self._stride = len(train) // batch_size
        self.batches_per_epoch = self._stride // sequence_length
        self._epoch = -1
        self._columns = self._train[:0]

        length = (len(held_out) - 1) // EVAL_STREAMS
        start = (len(held_out) - 1) % EVAL_STREAMS
        self._eval_columns = _columns(held_out[start:].to(device), EVAL_STREAMS, length, length)

    def train_batch(self, index: int) -> TokenBatch:
        """Batch ``index`` of the run; raises ``ValueError`` if it is negative."""
        epoch, batch = divmod(checked_index(index), self.batches_per_epoch)
        if epoch != self._epoch:
            ring = self._train.roll(-rotation(self._seed, epoch, len(self._train)))
            ring = torch.cat([ring, ring[:1]])
            length = self.batches_per_epoch * self._sequence_length
            self._columns = _columns(ring, self._batch_size, self._stride, length)
            self._epoch = epoch
        return _chunk(self._columns, batch * self._sequence_length, self._sequence_length)

    def eval_batches(self) -> Iterator[TokenBatch]:
        """The held-out sequence from its beginning; the last batch may be shorter in time."""
        for start in range(0, len(self._eval_columns) - 1, self._sequence_length):
            yield _chunk(self._eval_columns, start, self._sequence_length)


def check_streams(
    batch_size: int, sequence_length: int, seed: int, train_tokens: int, held_out_tokens: int
) -> None:
    """Raise ``ValueError`` for sizes that no streams have, ``DataError`` for too few tokens."""
    for name, value in {"batch_size": batch_size, "sequence_length": sequence_length}.items():
        if value < 1:
            raise ValueError(f"{name}={value} is not allowed: 1 or more")
    if seed < 0:
        raise ValueError(f"seed={seed} is not allowed: 0 or more")
    if batch_size * sequence_length > train_tokens:
        raise ValueError(
            f"batch_size={batch_size} with sequence_length={sequence_length} is not allowed: "
            f"their product is at most {train_tokens}, the number of training tokens"
        )
    if held_out_tokens <= EVAL_STREAMS:
        raise DataError(
            f"{held_out_tokens} held-out tokens are too few: more than {EVAL_STREAMS} are needed"
        )


def _columns(sequence: Tensor, streams: int, stride: int, length: int) -> Tensor:
    """``[length + 1, streams]``: column b is ``sequence[b * stride : b * stride + length + 1]``."""
    return sequence.as_strided((length + 1, streams), (1, stride)).contiguous()


def _chunk(columns: Tensor, start: int, length: int) -> TokenBatch:
    stop = min(start + length, len(columns) - 1)
    return columns[start:stop], columns[start + 1 : stop + 1]


_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class TokenSource:
    """A training and a held-out sequence of ids, integer ``[tokens]``, 0 to below ``vocab_size``.

    Batches are ``(tokens, targets)``, int64 ``[time, batch]`` on ``device``, as ``TokenStreams``
    describes: the state of a recurrent model is carried from one batch to the next. ``sha256``
    covers every token. Both sequences are held as int64 on the device, 8 bytes a token.

    Raises ``ValueError`` for an argument out of range, ``DataError`` for tokens that cannot be
    used.
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
        if vocab_size < 2:
            raise ValueError(f"vocab_size={vocab_size} is not allowed: 2 or more")
        train = _checked("train_tokens", train_tokens, vocab_size)
        held_out = _checked("held_out_tokens", held_out_tokens, vocab_size)
        self._streams = TokenStreams(train, held_out, batch_size, sequence_length, seed, device)
        self.vocab_size = vocab_size
        self.batches_per_epoch = self._streams.batches_per_epoch
        self.samples_per_batch = batch_size * sequence_length
        self.sha256 = _sha256(train, held_out)
        self.description: dict[str, str | int | float] = {
            "name": "TokenSource",
            "train_samples": len(train),
            "eval_samples": len(held_out),
            "eval_streams": EVAL_STREAMS,
            "sequence_length": sequence_length,
            "vocab_size": vocab_size,
        }

    def train_batch(self, index: int) -> TokenBatch:
        """Batch ``index`` of the run; raises ``ValueError`` if it is negative."""
        return self._streams.train_batch(index)

    def eval_batches(self) -> Iterator[TokenBatch]:
        """The held-out tokens in order; the last batch may be shorter in time."""
        return self._streams.eval_batches()


def _checked(name: str, tokens: Tensor, vocab_size: int) -> Tensor:
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


def _sha256(train: Tensor, held_out: Tensor) -> str:
    digest = hashlib.sha256(f"{len(train)} {len(held_out)}".encode())
    for tokens in (train, held_out):
        digest.update(tokens.contiguous().numpy().astype("<i8"))
    return digest.hexdigest()
