"""Text as streams of words: folders of text files, and CPython's own documentation.

Files (WikiText, Penn Treebank, plain text) are encoded once into a cache and read from there. The
documentation fits into memory and needs no download.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Unpack

import numpy as np
import torch

from mprun.data.cache import Cache, Key
from mprun.data.source import DamagedData, DataError
from mprun.data.token_streams import EVAL_STREAMS, Sizes, StreamOptions, TokenStreams
from mprun.data.vocabulary import (
    END_OF_LINE,
    UNKNOWN,
    WordIds,
    build_vocabulary,
    joined_words,
    read_words,
    text_blocks,
    word_blocks,
)

_PATTERNS = ("wiki.{}.tokens", "wiki.{}.raw", "ptb.{}.txt", "{}.txt", "{}.tokens")
_NAMES = {
    "train": ("train",),
    "valid": ("valid", "validation", "val", "dev"),
    "test": ("test",),
}


def find_text_files(root: str | Path, splits: tuple[str, ...]) -> dict[str, Path]:
    """Find the one file of each of ``splits`` ("train", "valid", "test") in the folder ``root``.

    Raises:
        DamagedData: A split has no file or several, or the files' names follow different patterns,
            which may be different texts.
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
    """Return the pattern by which ``name`` is a file of ``split``, or None."""
    return next((p for p in _PATTERNS for alias in _NAMES[split] if p.format(alias) == name), None)


class EncodedText(TokenStreams):
    """`TokenStreams` of encoded words, with their vocabulary.

    ``vocab_size`` is the number of entries padded to ``vocab_multiple``; the padding ids never
    occur. ``sha256`` covers the contents of the text's files.

    Args:
        name: Name of the source in the record.
        files: Description of its files in the record.
        hashes: SHA-256 (hex) of the contents of the files.
        words: The file of the vocabulary, one word a line.
        marker: The word that stands for the end of a line.
        tokens: Encoded files; the last one is the held-out split ``eval_split``.
        options: The options of `TokenStreams`.
    """

    def __init__(
        self,
        name: str,
        files: str,
        hashes: Iterable[str],
        words: Path,
        marker: str,
        tokens: list[Path],
        *,
        vocab_multiple: int,
        eval_split: str,
        **options: Unpack[StreamOptions],
    ) -> None:
        super().__init__(tokens[:-1], tokens[-1], **options)
        self._words, self._marker = words, marker
        entries = words.read_bytes().count(b"\n")
        self.vocab_size = -(-entries // vocab_multiple) * vocab_multiple
        self.sha256 = hashlib.sha256("".join(hashes).encode()).hexdigest()
        self.description = {
            "name": name,
            "files": files,
            "train_samples": self.train_tokens,
            "eval_samples": self.eval_tokens,
            "eval_split": eval_split,
            "eval_streams": EVAL_STREAMS,
            "sequence_length": self._sequence_length,
            "vocab_entries": entries,
            "vocab_size": self.vocab_size,
            "rotate": self._rotate,
        }

    @cached_property
    def vocabulary(self) -> tuple[str, ...]:
        """Return all entries, in the order of their ids."""
        return read_words(self._words)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ``ids``: words joined by blanks, lines ended by line breaks."""
        return joined_words([self.vocabulary[i] for i in ids], self._marker)


class Text(EncodedText):
    """The training split and one held-out split of a text below ``root``, as streams of words.

    Recognised names: wiki.{train,valid,test}.tokens or .raw (WikiText), ptb.{train,valid,test}.txt
    (Penn Treebank), {train,valid,test}.txt or .tokens; validation, val and dev stand for valid.
    The text is UTF-8, with blanks between words. ``<eos>`` follows every line, empty lines
    included, as in the recipes of AWD-LSTM (Merity et al., arXiv 1708.02182) and of the Penn
    Treebank: WikiText-2 then has 2,088,628 training tokens and 33,278 entries. ``lower``
    lower-cases the words.

    The vocabulary comes from the training split: ``<unk>`` (0), ``<eos>`` (1), then words by
    falling count, equal counts in alphabetical order. ``<unk>`` in the text is that entry; it
    stands for all words outside the vocabulary. ``vocab_limit`` caps the number of entries, None
    for no cap.

    Batches are those of `TokenStreams`: each epoch starts elsewhere (``rotate``) or at the first
    word. Evaluation runs over the first ``eval_tokens`` of ``eval_split`` ("valid" or "test"),
    None for all.

    The files are read block by block and encoded once, into the folder ``cache`` (`Cache`);
    afterwards only the cache is read. So memory grows with the different words of a text, not with
    its length.

    Raises:
        ValueError: An argument is out of range.
        DataError: There is too little text, or the cache cannot be written.
        DamagedData: Files are missing or unusable.
        Resource: The disk is full.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        vocab_limit: int | None,
        vocab_multiple: int,
        lower: bool,
        eval_split: str,
        cache: str | Path | None,
        **options: Unpack[StreamOptions],
    ) -> None:
        kept = Cache(cache)
        files = find_text_files(root, ("train", eval_split))
        hashes = {path: kept.content_sha256(path) for path in files.values()}
        train, held_out = files["train"], files[eval_split]

        def blocks(path: Path) -> Iterator[list[str]]:
            return word_blocks(text_blocks(path, hashes[path], lower=lower), END_OF_LINE)

        def ranked_words() -> Iterator[bytes]:
            special = (UNKNOWN, END_OF_LINE)
            for word in build_vocabulary(blocks(train), special, vocab_limit):
                yield f"{word}\n".encode()

        def encoded(path: Path) -> Iterator[np.ndarray]:
            yield from WordIds(read_words(words), UNKNOWN).encoded(blocks(path))

        # Words depend on the training split alone, so both held-out splits share them.
        key: Key = {"train": hashes[train], "lower": lower, "vocab_limit": vocab_limit}
        words = kept.made({**key, "kind": "words"}, ranked_words)
        tokens = [
            kept.made({**key, "kind": "tokens", "source": hashes[path]}, partial(encoded, path))
            for path in (train, held_out)
        ]
        super().__init__(
            "text",
            f"{train.name}, {held_out.name}",
            hashes.values(),
            words,
            END_OF_LINE,
            tokens,
            vocab_multiple=vocab_multiple,
            eval_split=eval_split,
            **options,
        )


HELD_OUT_SHARE = 0.1
_WORD = re.compile(r"\w+|[^\w\s]")


class DocsText(TokenStreams):
    """The topics of ``pydoc_data.topics``, sorted by name; about half a million characters.

    The last 10 % of the text, from the start of a line on, is held out; the vocabulary is made
    from the rest. ``level="word"``: each line is lower-cased and split into runs of letters,
    digits and underscores, and single other characters. Blanks are dropped, and each line that is
    not blank ends in ``<eos>``. ``level="char"``: every character is a token, case kept. Ids are in
    order of falling frequency after ``<unk>`` (0) and, for words, ``<eos>`` (1).

    ``vocab_limit`` caps the number of entries, these two included, None for no cap; tokens outside
    are ``<unk>``. ``vocab_size`` is the number of entries padded to ``vocab_multiple``; the padding
    ids never occur.

    The text differs between Python versions: compare only runs of equal ``sha256`` (of the whole
    text in UTF-8).

    Raises:
        ValueError: An argument is out of range.
        DataError: This Python comes without ``pydoc_data``.
    """

    def __init__(
        self,
        level: str,
        vocab_limit: int | None,
        vocab_multiple: int,
        **sizes: Unpack[Sizes],
    ) -> None:
        text = load_text()
        split: Callable[[str], list[str]] = _split_words if level == "word" else list
        special = (UNKNOWN, END_OF_LINE) if level == "word" else (UNKNOWN,)
        train_text, held_out_text = split_text(text)
        train, held_out = split(train_text), split(held_out_text)
        self.level = level
        self.vocabulary: tuple[str, ...] = build_vocabulary([train], special, vocab_limit)
        self.vocab_size = -(-len(self.vocabulary) // vocab_multiple) * vocab_multiple
        self._ids = WordIds(self.vocabulary, UNKNOWN)
        super().__init__([self._encode(train)], self._encode(held_out), **sizes)
        self.sha256 = hashlib.sha256(text.encode()).hexdigest()
        self.description = {
            "name": "docs_text",
            "origin": "pydoc_data.topics",
            "level": level,
            "train_samples": len(train),
            "eval_samples": len(held_out),
            "eval_streams": EVAL_STREAMS,
            "sequence_length": self._sequence_length,
            "vocab_entries": len(self.vocabulary),
            "vocab_size": self.vocab_size,
        }

    def encode(self, text: str) -> torch.Tensor:
        """Return the token ids of ``text``, int64 ``[tokens]`` on the CPU."""
        return self._encode(_split_words(text) if self.level == "word" else text)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ``ids``: exact for characters, words joined as in `EncodedText`."""
        tokens = [self.vocabulary[i] for i in ids]
        if self.level == "char":
            return "".join(tokens)
        return joined_words(tokens, END_OF_LINE)

    def _encode(self, tokens: Iterable[str]) -> torch.Tensor:
        return torch.tensor([self._ids[token] for token in tokens], dtype=torch.int64)


def load_text() -> str:
    """Return all topics joined by newlines, in the order of their names.

    Raises:
        DataError: This Python comes without ``pydoc_data``, as in some distributions.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise DataError(
            "the documentation text needs the module pydoc_data.topics, which this Python lacks: "
            "install the standard library in full, or choose other data"
        ) from error
    return "\n".join(topics[name] for name in sorted(topics))


def split_text(text: str) -> tuple[str, str]:
    """Split into training and held-out text: the last 10 %, from the next start of a line on."""
    position = int(len(text) * (1 - HELD_OUT_SHARE))
    cut = text.find("\n", position) + 1 or position
    return text[:cut], text[cut:]


def _split_words(text: str) -> list[str]:
    tokens = []
    for line in text.lower().splitlines():
        words = _WORD.findall(line)
        if words:
            tokens += words
            tokens.append(END_OF_LINE)
    return tokens
