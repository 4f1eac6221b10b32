"""Parallel text on disk: aligned files of two languages, encoded once into a cache."""

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from mprun.data.cache import Key
from mprun.data.source import DamagedData, DataError, Serving
from mprun.data.token_streams import TokenFile
from mprun.data.vocabulary import (
    UNKNOWN,
    Encoding,
    TextFile,
    Words,
    build_vocabulary,
    subwords,
)
from mprun.extensions.translation.sentence_pairs import (
    BLOCK,
    END_ID,
    SYMBOLS,
    UNKNOWN_ID,
    Coded,
    Pairs,
    SentencePairs,
    encoded,
)

# Names of each split's files, without the language; the last of each are WMT's.
_NAMES = {
    "train": ("train", "giga-fren.release2.fixed"),
    "valid": ("valid", "validation", "val", "dev", "newstest2013"),
    "test": ("test", "newstest2014"),
}


def find_pair_files(root: str | Path, split: str, languages: tuple[str, str]) -> tuple[Path, ...]:
    """Find the two files of a split, source first, or its one of columns; else raise DataError."""
    root = Path(root)
    try:
        present = {entry.name for entry in root.iterdir() if entry.is_file()}
    except OSError as error:
        raise DamagedData(f"{root}: {error.strerror}") from error
    found, halves = [], []
    for name in _NAMES[split]:
        ways = [_either(present, f"{name}.{language}") for language in languages]
        sides = [side for side in ways if side is not None]
        halves += sides
        if len(sides) == len(languages):
            found.append(sides)
        if columns := _either(present, f"{name}.tsv"):
            found.append([columns])
    if len(found) == 1:
        return tuple(root / name for name in found[0])
    if found:
        listed = ", ".join(name for names in found for name in names)
        raise DataError(f"{root}: several files of the {split} split, leave one: {listed}")
    wanted = " and ".join(f"{split}.{language}" for language in languages)
    alone = f" ({halves[0]} has no other side)" if halves else ""
    raise DataError(
        f"{root}: no {split} split{alone}: {wanted}, or {split}.tsv, each with .gz too; {split} "
        f"may also be {', '.join(_NAMES[split][1:])}"
    )


def _either(present: set[str], name: str) -> str | None:
    return next((one for one in (name, f"{name}.gz") if one in present), None)


def pairs_of(files: Sequence[TextFile]) -> Iterator[tuple[str, str]]:
    """Yield the pairs of lines of a split.

    Raises:
        DamagedData: The sides differ in length, a line has not two columns, or the text is refused;
            the message names file and line.
    """
    read = [chain.from_iterable(file.lines()) for file in files]
    if len(files) == 1:
        for number, line in enumerate(read[0], 1):
            columns = line.split("\t")
            if len(columns) != 2:
                wrong = f"line {number} has {len(columns)} columns, must be source, tab, target"
                raise DamagedData(f"{files[0].path}: {wrong}")
            yield columns[0], columns[1]
        return
    for number, (source, target) in enumerate(zip_longest(*read)):
        if source is None or target is None:
            short, long = (file.path for file in (files if source is None else files[::-1]))
            raise DamagedData(
                f"{short}: ends after line {number}, {long.name} goes on: sides of different length"
            )
        yield source, target


class _SideWords(Words):
    def ids(self, lines: Sequence[str]) -> list[list[int]]:
        """Return the ids of each line's words; all symbols but ``<unk>`` are ordinary words."""
        found = self.lookup
        return [[max(found[word], UNKNOWN_ID) for word in line.split()] for line in lines]


class ParallelText(SentencePairs):
    """Sentence pairs below ``root``: line n of one file is the translation of line n of the other.

    A split is two files, named for their languages (train.en and train.fr), or one file of two
    columns (train.tsv: source, tab, target). Files that end in .gz are compressed by gzip. The text
    is UTF-8, already split into words between blanks; ``lower`` lower-cases them.

    Each side has a vocabulary from the training split: the four symbols of `SentencePairs`, then
    words by falling count, at most its limit in all, None for no limit. With a tokenizer both
    sides have the four symbols and then the entries of its file (`subwords`). Pairs with an empty
    side, or a side of ``max_length`` or more words, are left out, in the held-out split too.

    The files are read line by line and encoded once, into the cache (`Encoding`): the
    tokens of all pairs, and the numbers of `Pairs`, int64. Pairs are then read from there on
    demand. Memory holds 8 bytes a training pair, and an epoch's permutation of the pairs.

    Raises:
        DataError: A split is missing or empty, or the cache cannot be written.
        DamagedData: Files are unusable.
        Resource: The disk is full.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        source_language: str,
        target_language: str,
        source_vocab_limit: int | None,
        target_vocab_limit: int | None,
        max_length: int,
        encoding: Encoding,
        serving: Serving,
    ) -> None:
        kept, languages = encoding.kept, (source_language, target_language)
        files = {
            split: [*map(encoding.text, find_pair_files(root, split, languages))]
            for split in ("train", encoding.eval_split)
        }
        hashes = {split: [file.sha256 for file in own] for split, own in files.items()}

        def ranked_words(side: int, limit: int | None) -> tuple[str, ...]:
            # Both sides are read, so that a fault in either is found before anything is kept.
            words = (pair[side].split() for pair in pairs_of(files["train"]))
            return build_vocabulary(words, SYMBOLS, limit)

        def words_of(side: int, limit: int | None) -> Words:
            key: Key = {
                "train": " ".join(hashes["train"]),
                "side": side,
                "symbols": " ".join(SYMBOLS),
                "lower": encoding.lower,
                "vocab_limit": limit,
            }
            return _SideWords(
                kept, key, partial(ranked_words, side, limit), UNKNOWN, SYMBOLS[END_ID]
            )

        coders: list[Any]  # subwords or words of each side
        if encoding.tokenizer is None:
            coders = [*map(words_of, range(2), (source_vocab_limit, target_vocab_limit))]
        else:
            joint = subwords(encoding.tokenizer, kept, encoding.lower, symbols=SYMBOLS)
            coders, hashes["tokenizer"] = [joint, joint], [joint.about["tokenizer_sha256"]]
        keys = [str(sorted(coder.key.items())) for coder in coders]

        def coded(split: str) -> Iterator[Coded]:
            every = pairs_of(files[split])
            while some := [*islice(every, BLOCK)]:
                sides = zip(coders, zip(*some, strict=True), strict=True)
                yield from zip(*(coder.ids(lines) for coder, lines in sides), strict=True)

        def encoded_once(split: str) -> Pairs:
            key: Key = {
                "words": "; ".join(keys),
                "source": " ".join(hashes[split]),
                "max_length": max_length,
            }
            of_tokens, of_starts = {**key, "kind": "tokens"}, {**key, "kind": "starts"}
            tokens, places = kept.find(of_tokens), kept.find(of_starts)
            if tokens is None or places is None:
                numbers = array("q", [0, 0, 0])
                blocks = encoded(coded(split), max_length, numbers)
                tokens = kept.store(of_tokens, blocks)
                places = kept.store(of_starts, [np.array(numbers, "<i8")])
            return Pairs(TokenFile(tokens), np.fromfile(places, "<i8"))

        every = "".join(chain.from_iterable(hashes.values()))
        super().__init__(
            {
                "name": "parallel_text",
                "files": ", ".join(file.path.name for own in files.values() for file in own),
                "eval_split": encoding.eval_split,
                **coders[0].about,
            },
            [*map(encoded_once, files)],
            [coder.entries for coder in coders],
            hashlib.sha256(every.encode()).hexdigest(),
            max_length,
            encoding.vocab_multiple,
            serving,
        )
        self._coders = coders

    @property
    def vocabularies(self) -> tuple[tuple[str, ...], ...]:
        """Return all entries of each side, in the order of their ids."""
        return tuple(coder.vocabulary for coder in self._coders)
