"""Which files below a folder are the splits of a text: WikiText, Penn Treebank, plain text.

Text files on disk, word by word: WikiText, Penn Treebank, plain text.
"""

import hashlib
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from mprun.data.file_streams import FileStreams
from mprun.data.source import DamagedData
from mprun.data.token_cache import TokenCache
from mprun.data.token_streams import EVAL_STREAMS, TokenBatch
from mprun.data.vocabulary import (
    END_OF_LINE,
    UNKNOWN,
    joined_words,
    read_words,
    text_blocks,
    vocabulary_of_blocks,
    word_blocks,
)
from mprun.data.word_table import WordTable, encoded_blocks

_PATTERNS = ("wiki.{}.tokens", "wiki.{}.raw", "ptb.{}.txt", "{}.txt", "{}.tokens")
_NAMES = {
    "train": ("train",),
    "valid": ("valid", "validation", "val", "dev"),
    "test": ("test",),
}


def find_text_files(root: str | Path, splits: tuple[str, ...]) -> dict[str, Path]:
    """The one file of each of ``splits`` ("train", "valid", "test") in the folder ``root``.

    Raises ``DamagedData`` where a split has no file or several, and where the files are named
    after different patterns, which may be different texts.
    """
    root = Path(root)
    try:
        present = sorted(entry.name for entry in root.iterdir() if entry.is_file())
    except OSError as error:
        raise DamagedData(f"{root}: {error.strerror}") from error
    found = {split: _one(root, split, present) for split in splits}
    patterns = {_pattern(path.name, split) for split, path in found.items()}
    if len(patterns) > 1:
        names = " and ".join(path.name for path in found.values())
        raise DamagedData(f"{root}: {names} are named as parts of different texts")
    return found


def _one(root: Path, split: str, present: list[str]) -> Path:
    candidates = [name for name in present if _pattern(name, split) is not None]
    if len(candidates) == 1:
        return root / candidates[0]
    wanted = ", ".join(pattern.format(split) for pattern in _PATTERNS)
    if candidates:
        raise DamagedData(
            f"{root}: several files of the {split} split, leave one: {', '.join(candidates)}"
        )
    others = ", ".join(_NAMES[split][1:])
    also = f" (or {others} for {split})" if others else ""
    listed = ", ".join(present[:5]) + (", ..." if len(present) > 5 else "")
    raise DamagedData(
        f"{root}: no {split} split, which is one of {wanted}{also}; found {listed or 'no file'}"
    )


def _pattern(name: str, split: str) -> str | None:
    """The pattern of which ``name`` is the file of ``split``, or None."""
    return next((p for p in _PATTERNS for alias in _NAMES[split] if p.format(alias) == name), None)


class Text:
    """The training split and one held-out split of a text below ``root``, as streams of words.

    Recognised names: wiki.{train,valid,test}.tokens or .raw (WikiText), ptb.{train,valid,test}.txt
    (Penn Treebank), {train,valid,test}.txt or .tokens; validation, val and dev stand for valid.
    UTF-8. Words stand between blanks; ``<eos>`` follows every line, empty lines included, as in
    the recipes of AWD-LSTM (Merity et al., arXiv 1708.02182) and of the Penn Treebank: WikiText-2
    then has 2,088,628 training tokens and 33,278 entries. ``lower`` lower-cases the words.

    The vocabulary comes from the training split: ``<unk>`` (0), ``<eos>`` (1), then words by
    falling count, equal counts in alphabetical order. ``<unk>`` in the text is that entry and
    stands for all words outside of the vocabulary, of which ``vocab_limit`` caps the entries, None
    for no cap. ``vocab_size`` is the number of entries padded to ``vocab_multiple``; the padding
    ids never occur.

    Batches are ``(tokens, targets)``, int64 ``[time, batch]``, as ``FileStreams`` describes: each
    epoch starts elsewhere (``rotate``) or at the first word, evaluation runs in 16 streams over
    the first ``eval_tokens`` of ``eval_split`` ("valid" or "test"), None for all.

    The files are read block by block and encoded once, into the folder ``cache``
    (``TokenCache``), which is all that is read afterwards: memory does not grow with the text.
    ``sha256`` stands for the contents of the two files.

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
        vocab_limit: int | None = None,
        vocab_multiple: int = 8,
        lower: bool = False,
        eval_split: str = "valid",
        rotate: bool = True,
        eval_tokens: int | None = None,
        cache: str | Path | None = None,
    ) -> None:
        if eval_split not in ("valid", "test"):
            raise ValueError(f"eval_split={eval_split!r} is not allowed: 'valid' or 'test'")
        if vocab_limit is not None and vocab_limit < 3:
            raise ValueError(f"vocab_limit={vocab_limit} is not allowed: 3 or more, or None")
        if vocab_multiple < 1:
            raise ValueError(f"vocab_multiple={vocab_multiple} is not allowed: 1 or more")
        self._options = {"lower": lower, "vocab_limit": vocab_limit}
        self._cache = TokenCache(cache)
        files = find_text_files(root, ("train", eval_split))
        hashes = {path: self._cache.content_sha256(path) for path in files.values()}
        train, held_out = files["train"], files[eval_split]
        # Words depend on the training split alone, so that both held-out splits share them.
        words_key = {"kind": "words", "train": hashes[train], **self._options}
        words = self._cache.find(words_key)
        self._words_file = words or self._cache.store(
            words_key, self._ranked_words(train, hashes[train])
        )
        tokens = []
        for path in (train, held_out):
            key = {**words_key, "kind": "tokens", "source": hashes[path]}
            entry = self._cache.find(key)
            tokens.append(entry or self._cache.store(key, self._encoded(path, hashes[path])))
        self._streams = FileStreams(
            tokens[:1],
            tokens[1],
            batch_size,
            sequence_length,
            seed,
            device,
            rotate=rotate,
            eval_tokens=eval_tokens,
        )
        entries = self._words_file.read_bytes().count(b"\n")
        self.vocab_size = -(-entries // vocab_multiple) * vocab_multiple
        self.batches_per_epoch = self._streams.batches_per_epoch
        self.samples_per_batch = batch_size * sequence_length
        self.sha256 = hashlib.sha256("".join(hashes.values()).encode()).hexdigest()
        self.description: dict[str, str | int | float] = {
            "name": "text",
            "files": f"{train.name}, {held_out.name}",
            "train_samples": self._streams.train_tokens,
            "eval_samples": self._streams.eval_tokens,
            "eval_split": eval_split,
            "eval_streams": EVAL_STREAMS,
            "sequence_length": sequence_length,
            "vocab_entries": entries,
            "vocab_size": self.vocab_size,
            "rotate": rotate,
        }

    def train_batch(self, index: int) -> TokenBatch:
        """Batch ``index`` of the run; raises ``ValueError`` if it is negative."""
        return self._streams.train_batch(index)

    def eval_batches(self) -> Iterator[TokenBatch]:
        """The held-out text in order; the last batch may be shorter in time."""
        return self._streams.eval_batches()

    @cached_property
    def vocabulary(self) -> tuple[str, ...]:
        """All entries, in the order of their ids."""
        return read_words(self._words_file)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ``ids``: words joined by blanks and ended by lines."""
        return joined_words([self.vocabulary[i] for i in ids], END_OF_LINE)

    def _blocks(self, path: Path, sha256: str) -> Iterator[bytes]:
        return text_blocks(path, sha256, lower=self._options["lower"])

    def _ranked_words(self, path: Path, sha256: str) -> Iterator[bytes]:
        words = vocabulary_of_blocks(
            word_blocks(self._blocks(path, sha256), END_OF_LINE),
            (UNKNOWN, END_OF_LINE),
            self._options["vocab_limit"],
            self._cache.folder,
        )
        yield from (f"{word}\n".encode() for word in words)

    def _encoded(self, path: Path, sha256: str) -> Iterator[np.ndarray]:
        table = WordTable(read_words(self._words_file), UNKNOWN, END_OF_LINE)
        yield from encoded_blocks(self._blocks(path, sha256), table)
