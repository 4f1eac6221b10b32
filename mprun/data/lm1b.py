"""Where the files of the One Billion Word benchmark lie, and its vocabulary file.

The One Billion Word benchmark (Chelba et al., arXiv 1312.3005), shard by shard.
"""

import hashlib
import sys
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from mprun.data.file_streams import FileStreams
from mprun.data.source import DamagedData
from mprun.data.token_cache import TokenCache
from mprun.data.token_streams import EVAL_STREAMS, TokenBatch
from mprun.data.vocabulary import joined_words, read_words, text_blocks
from mprun.data.word_table import WordTable, encoded_blocks

TRAINING_SHARDS = 99
_CORPUS = "1-billion-word-language-modeling-benchmark-r13output"
_TRAINING = "training-monolingual.tokenized.shuffled"
_HELD_OUT = "heldout-monolingual.tokenized.shuffled"
_HELD_OUT_SHARD = {"valid": 1, "test": 0}
_VOCABULARIES = ("1b_word_vocab.txt", "vocab-2016-09-10.txt")


def find_shards(root: str | Path, eval_split: str) -> tuple[list[Path], Path]:
    """All training shards in the order of their numbers, and the held-out one.

    Shard 00000-of-00100 is no training shard: it is the held-out text.
    Raises ``DamagedData`` if a folder or one of the shards is missing.
    """
    folder = _corpus_folder(Path(root))
    shards = [
        folder / _TRAINING / f"news.en-{number:05}-of-00100"
        for number in range(1, TRAINING_SHARDS + 1)
    ]
    missing = [path for path in shards if not path.is_file()]
    if missing:
        raise DamagedData(
            f"{missing[0]}: no such file; {len(missing)} of {TRAINING_SHARDS} training shards "
            "are missing"
        )
    number = _HELD_OUT_SHARD[eval_split]
    held_out = folder / _HELD_OUT / f"news.en.heldout-{number:05}-of-00050"
    if not held_out.is_file():
        raise DamagedData(f"{held_out}: no such file, which is the {eval_split} split")
    return shards, held_out


def find_vocabulary(root: str | Path, named: str | Path | None) -> Path:
    """The file ``named``, or the one with a conventional name in ``root`` or the corpus' folder.

    Raises ``ValueError`` if ``named`` is no file, ``DamagedData`` if there is none to be found.
    """
    if named is not None:
        if not Path(named).is_file():
            raise ValueError(f"vocabulary={named} is not allowed: no such file")
        return Path(named)
    root = Path(root)
    for folder in (root, _corpus_folder(root)):
        for name in _VOCABULARIES:
            if (folder / name).is_file():
                return folder / name
    raise DamagedData(
        f"{root}: no vocabulary file {' or '.join(_VOCABULARIES)} (one word a line, with <S> and "
        "<UNK>): put it there, or name it in data.vocabulary"
    )


def read_vocabulary(path: Path, sha256: str, required: tuple[str, ...]) -> tuple[str, ...]:
    """The words of a vocabulary file in UTF-8: one a line, each alone or followed by its count.

    Raises ``DamagedData``, naming file and line, for a file that cannot be read or has not the
    bytes of which ``sha256`` (hex) is the hash, for any other line, for a word that stands there
    twice, and where one of ``required`` is missing.
    """
    try:
        content = path.read_bytes()
        lines = content.decode("utf-8").removeprefix("\ufeff").split("\n")
    except OSError as error:
        raise DamagedData(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DamagedData(f"{path}: not UTF-8 at byte {error.start}, line {line}") from error
    if hashlib.sha256(content).hexdigest() != sha256:
        raise DamagedData(f"{path}: changed while it was read")
    if not lines[-1]:
        lines.pop()
    words: dict[str, None] = {}
    for number, line in enumerate(lines, 1):
        fields = line.split()
        if not 1 <= len(fields) <= 2 or not all(count.isdecimal() for count in fields[1:]):
            raise DamagedData(f"{path}: line {number} is not a word, or a word and its count")
        if fields[0] in words:
            raise DamagedData(f"{path}: line {number} repeats {fields[0][:50]!r}")
        words[fields[0]] = None
    missing = [word for word in required if word not in words]
    if missing:
        raise DamagedData(f"{path}: without {' and '.join(missing)}, which the text needs")
    return tuple(words)


def _corpus_folder(root: Path) -> Path:
    for folder in (root, root / _CORPUS):
        if (folder / _TRAINING).is_dir():
            return folder
    raise DamagedData(
        f"{root}: no folder {_TRAINING}, here or in {_CORPUS}: unpack the corpus there"
    )


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
