"""The user's own tokens as a source: two sequences of ids, served as parallel streams."""

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

from mprun.data.errors import DataError
from mprun.data.token_streams import EVAL_STREAMS, TokenBatch, TokenStreams

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
