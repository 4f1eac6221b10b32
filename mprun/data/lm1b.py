"""The One Billion Word benchmark (Chelba et al., arXiv 1312.3005), shard by shard."""

import hashlib
import sys
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from mprun.data.file_streams import FileStreams
from mprun.data.lm1b_files import find_shards, find_vocabulary, read_vocabulary
from mprun.data.token_cache import TokenCache
from mprun.data.token_streams import EVAL_STREAMS, TokenBatch
from mprun.data.vocabulary import joined_words, read_words
from mprun.data.word_table import WordTable, encoded_blocks
from mprun.data.words import text_blocks

SENTENCE, UNKNOWN = "<S>", "<UNK>"


class Lm1b:
    """99 training shards and one held-out shard below ``root``, as streams of words.

    ``root`` is the unpacked folder 1-billion-word-language-modeling-benchmark-r13output or the one
    that holds it. Held out is news.en.heldout-00000-of-00050 for ``eval_split`` "test", the shard
    on which results are published, and 00001 for "valid". ``vocabulary`` is the file of words, one
    a line, a count after each or not; None: 1b_word_vocab.txt or vocab-2016-09-10.txt in ``root``
    or the folder. Ids are line numbers from 0, ``<UNK>`` stands for words that are not in the file.
    ``vocab_size`` is the number of lines padded to ``vocab_multiple``; the padding ids never occur.

    Sentences are ``<S> w1 ... wn``, one after the other, so that the ``<S>`` of the next one is
    the end of the one before, as in the code of Jozefowicz et al. (arXiv 1602.02410), where each
    sentence has an ``<S>`` on both sides and neighbours share theirs. ``</S>`` never occurs.

    Each epoch runs through all shards in an order drawn from (seed, epoch), each from its first to
    its last sentence, cut into ``batch_size`` streams of equal length. The makers of the corpus
    have shuffled its sentences, so neighbours do not belong together, and a state that is carried
    across them carries no context. The published code also shuffles the sentences of a shard
    anew in each epoch and deals them out to the streams one by one. Evaluation runs in 16 streams
    over the first ``eval_tokens`` of the held-out shard, None for all.

    Each shard is encoded once, into the folder ``cache`` (``TokenCache``; 3.3 GB in all), and an
    interrupted preparation goes on where it was. Memory holds one block of a shard, and while
    shards are encoded the vocabulary. ``sha256`` stands for the contents of all files used.

    Batches are ``(tokens, targets)``, int64 ``[time, batch]``, as ``FileStreams`` describes.
    Raises ``ValueError`` for an argument out of range, ``DataError`` for too little text or a
    cache that cannot be written, ``DamagedData`` for missing or unusable files, ``Resource`` for a
    full disk.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        sequence_length: int,
        batch_size: int,
        seed: int,
        device: torch.device | str,
        vocabulary: str | Path | None = None,
        vocab_multiple: int = 8,
        eval_split: str = "valid",
        eval_tokens: int | None = None,
        cache: str | Path | None = None,
    ) -> None:
        if eval_split not in ("valid", "test"):
            raise ValueError(f"eval_split={eval_split!r} is not allowed: 'valid' or 'test'")
        if vocab_multiple < 1:
            raise ValueError(f"vocab_multiple={vocab_multiple} is not allowed: 1 or more")
        shards, held_out = find_shards(root, eval_split)
        words = find_vocabulary(root, vocabulary)
        self._cache = TokenCache(cache)
        hashes = {p: self._cache.content_sha256(p) for p in (words, *shards, held_out)}
        key = {"kind": "words", "vocabulary": hashes[words]}
        self._words_file = self._cache.find(key) or self._cache.store(
            key, _checked_words(words, hashes[words])
        )
        tokens = self._encoded_shards(hashes)
        self._streams = FileStreams(
            tokens[:-1],
            tokens[-1],
            batch_size,
            sequence_length,
            seed,
            device,
            rotate=False,
            shuffle_files=True,
            overlap=1,
            eval_tokens=eval_tokens,
        )
        entries = self._words_file.read_bytes().count(b"\n")
        self.vocab_size = -(-entries // vocab_multiple) * vocab_multiple
        self.batches_per_epoch = self._streams.batches_per_epoch
        self.samples_per_batch = batch_size * sequence_length
        self.sha256 = hashlib.sha256("".join(hashes.values()).encode()).hexdigest()
        self.description: dict[str, str | int | float] = {
            "name": "lm1b",
            "files": f"{len(shards)} training shards, {held_out.name}, {words.name}",
            "train_samples": self._streams.train_tokens,
            "eval_samples": self._streams.eval_tokens,
            "eval_split": eval_split,
            "eval_streams": EVAL_STREAMS,
            "sequence_length": sequence_length,
            "vocab_entries": entries,
            "vocab_size": self.vocab_size,
            "rotate": False,
        }

    def train_batch(self, index: int) -> TokenBatch:
        """Batch ``index`` of the run; raises ``ValueError`` if it is negative."""
        return self._streams.train_batch(index)

    def eval_batches(self) -> Iterator[TokenBatch]:
        """The held-out shard in order; the last batch may be shorter in time."""
        return self._streams.eval_batches()

    @cached_property
    def vocabulary(self) -> tuple[str, ...]:
        """All entries, in the order of their ids."""
        return read_words(self._words_file)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ``ids``: words joined by blanks, one sentence a line."""
        return joined_words([self.vocabulary[i] for i in ids], SENTENCE)

    def _encoded_shards(self, hashes: dict[Path, str]) -> list[Path]:
        """Token files of all shards, made where the cache does not have them."""
        table, tokens = None, []
        (_, vocabulary), *shards = hashes.items()
        for number, (path, sha256) in enumerate(shards, 1):
            key = {"kind": "tokens", "vocabulary": vocabulary, "source": sha256}
            entry = self._cache.find(key)
            if entry is None:
                if sys.stderr.isatty() or number % 10 == 0:
                    print(f"mprun: encoding shard {number} of {len(shards)}", file=sys.stderr)
                table = table or WordTable(read_words(self._words_file), UNKNOWN, SENTENCE)
                entry = self._cache.store(key, _encoded(path, sha256, table))
            tokens.append(entry)
        return tokens


def _checked_words(path: Path, sha256: str) -> Iterator[bytes]:
    for word in read_vocabulary(path, sha256, (SENTENCE, UNKNOWN)):
        yield f"{word}\n".encode()


def _encoded(path: Path, sha256: str, table: WordTable) -> Iterator[np.ndarray]:
    """``<S>`` once at the beginning and after each sentence: one more than the shard has of it."""
    yield table.encode(b"\n")
    yield from encoded_blocks(text_blocks(path, sha256), table)
