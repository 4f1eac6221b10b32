"""Pairs of sentences as batches of word ids of one shape: names of Unicode, and text on disk."""

import hashlib
import unicodedata
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mprun.data.cache import Key
from mprun.data.source import (
    Batch,
    DamagedData,
    DataError,
    Description,
    EpochOrder,
    Serving,
    Source,
    permutation,
    reading,
)
from mprun.data.token_streams import HeldTokens, TokenFile, padded
from mprun.data.vocabulary import (
    UNKNOWN,
    Encoding,
    TextFile,
    WordIds,
    Words,
    build_vocabulary,
    subwords,
)

# Ids of the first entries of each vocabulary, in their order.
PADDING_ID, BEGIN_ID, END_ID, UNKNOWN_ID = range(4)
SYMBOLS = ("<pad>", "<s>", "</s>", UNKNOWN)
Coded = tuple[list[int], list[int]]
# Pairs that are encoded before they are handed on.
BLOCK = 10_000


def encoded(pairs: Iterable[Coded], max_length: int, numbers: array) -> Iterator[np.ndarray]:
    """Yield the pairs that fit, int32: a source and its END_ID, then its target and one.

    `numbers`, zeros to begin with, gets what `Pairs` takes.
    """
    found = array("i")
    for pair in pairs:
        lengths = [len(side) for side in pair]
        if not min(lengths) or max(lengths) >= max_length:
            numbers[0] += 1
            continue
        for side in pair:
            found.extend(side)
            found.append(END_ID)
        numbers[1] += lengths[1] + 1
        numbers.append(numbers[-1] + sum(lengths) + 2)
        if len(numbers) % BLOCK == 0:
            yield np.array(found, "<i4")
            found = array("i")
    yield np.array(found, "<i4")


class Pairs:
    """A split of encoded pairs.

    Args:
        tokens: ids of all pairs, as from `encoded`.
        numbers: int64: how many pairs of the text are left out, how many target words there are
            with their ends, then where each pair begins and where the last one ends.
    """

    def __init__(self, tokens: TokenFile | HeldTokens, numbers: np.ndarray) -> None:
        self._tokens, self._starts = tokens, numbers[2:]
        self.left_out, self.words = numbers[:2].tolist()

    def __len__(self) -> int:
        return len(self._starts) - 1

    def batch(self, places: Sequence[int], max_length: int, pinned: bool) -> Tensor:
        """Return sources and targets at these places, int64 ``[2, places, max_length]`` on CPU."""
        shape = (2, len(places), max_length)
        rows = torch.zeros(shape, dtype=torch.int64, pin_memory=pinned)
        for place, source, target in zip(places, *rows.numpy(), strict=True):
            start, stop = self._starts[place : place + 2].tolist()
            pair = torch.empty(stop - start, dtype=self._tokens.dtype).numpy()
            self._tokens.read_into(pair, start)
            first = int(np.argmax(pair == END_ID)) + 1
            source[:first] = pair[:first]
            target[: len(pair) - first] = pair[first:]
        return rows


class SentencePairs(Source):
    """Batches ``(source, target)``, both int64 ``[batch, max_length]`` of word ids.

    Each sentence ends in ``END_ID``, which counts as one of its words, and is padded after it with
    ``PADDING_ID``. ``UNKNOWN_ID`` stands for words outside the vocabulary. ``BEGIN_ID`` occurs in
    no batch: a decoder gets it before a target. All batches have the same shape, so that one
    recorded step fits them all; buckets of several lengths would need one recording each. Pairs
    that do not fit into ``max_length`` are left out and counted.

    ``samples_per_batch`` is the mean number of target words of a training batch.

    Args:
        about: name and further plain values of the description.
        splits: training, and held out.
        entries: number of entries in the source and the target vocabulary; ``source_vocab_size``
            and ``target_vocab_size`` are these padded to ``vocab_multiple``.
    """

    def __init__(
        self,
        about: Description,
        splits: Sequence[Pairs],
        entries: Sequence[int],
        sha256: str,
        max_length: int,
        vocab_multiple: int,
        serving: Serving,
    ) -> None:
        self.source_vocab_size, self.target_vocab_size = (
            padded(count, vocab_multiple) for count in entries
        )
        self._device, self._batch_size = serving.device, serving.batch_size
        self._max_length = max_length
        train, held_out = self._train, self._held_out = splits
        for which, split in zip(("training", "held-out"), splits, strict=True):
            if not len(split):
                raise DataError(f"data.max_length={max_length}: leaves no {which} pair")
        cpu = torch.device("cpu")  # where the pairs are
        self._order = EpochOrder(serving.seed, len(train), self._batch_size, cpu)
        self.batches_per_epoch = self._order.batches_per_epoch
        self.samples_per_batch = round(self._batch_size * train.words / len(train))
        self.sha256 = sha256
        self.description = {
            **about,
            "train_samples": train.words,
            "eval_samples": held_out.words,
            "train_pairs": len(train),
            "eval_pairs": len(held_out),
            "train_pairs_left_out": train.left_out,
            "eval_pairs_left_out": held_out.left_out,
            "max_length": max_length,
            "source_vocab_entries": entries[0],
            "target_vocab_entries": entries[1],
            "source_vocab_size": self.source_vocab_size,
            "target_vocab_size": self.target_vocab_size,
        }

    def train_batch(self, index: int) -> Batch:
        return self._batch(self._train, self._order.indices(index).tolist())

    def eval_batches(self) -> Iterator[Batch]:
        places = range(len(self._held_out))
        for start in places[:: self._batch_size]:
            yield self._batch(self._held_out, places[start : start + self._batch_size])

    def _batch(self, pairs: Pairs, places: Sequence[int]) -> Batch:
        # From pinned memory the copy does not make the host wait; torch does not hand the memory
        # out again before the copy has run.
        rows = pairs.batch(places, self._max_length, self._device.type == "cuda")
        source, target = rows.to(self._device, non_blocking=True)
        return source, target


HELD_OUT_PAIRS = 400
# One fixed shuffle for every seed: all runs must be judged on the same pairs.
SPLIT_SEED = 20171010


@cache
def unicode_names() -> tuple[tuple[list[str], list[str]], ...]:
    """Return (words of a character's name, words of its decomposition), by code points.

    The decomposition is one step of Unicode's: for a compatibility one the formatting tag, such as
    "<wide>", then the names of its characters. Hangul syllables and CJK ideographs, whose names
    hold their number, are left out. Every Python has Unicode 3.2 beside its current version.
    """
    unicode, found = unicodedata.ucd_3_2_0, []
    for character in map(chr, range(0x110000)):
        *tag, codes = unicode.decomposition(character).rpartition("> ")
        if not codes:
            continue
        characters = [character, *(chr(int(code, 16)) for code in codes.split())]
        name, *parts = map(unicode.name, characters)
        if not any(one.startswith("CJK ") for one in (name, *parts)):
            found.append((name.split(), ("".join(tag) + " ".join(parts)).split()))
    return tuple(found)


class UnicodeNames(SentencePairs):
    """Names of characters, to be translated into the names of their components.

    "LATIN SMALL LETTER E WITH ACUTE" becomes "LATIN SMALL LETTER E COMBINING ACUTE ACCENT", and
    "FULLWIDTH DIGIT ONE" becomes "<wide> DIGIT ONE" (`unicode_names`). The vocabularies have all
    words of the training pairs. ``sha256`` covers all pairs, before any are left out, and is the
    same with every version of Python.
    """

    def __init__(self, max_length: int, vocab_multiple: int, serving: Serving) -> None:
        pairs = unicode_names()
        order = permutation(SPLIT_SEED, 0, len(pairs)).tolist()
        train = [pairs[place] for place in order[:-HELD_OUT_PAIRS]]
        held_out = [pairs[place] for place in order[-HELD_OUT_PAIRS:]]
        self.vocabularies = tuple(
            build_vocabulary([pair[side] for pair in train], SYMBOLS, None) for side in range(2)
        )
        ids, splits = [WordIds(words, UNKNOWN) for words in self.vocabularies], []
        for split in (train, held_out):
            numbers = array("q", [0, 0, 0])
            coded = (
                ([*map(ids[0].__getitem__, one)], [*map(ids[1].__getitem__, other)])
                for one, other in split
            )
            tokens = np.concatenate([*encoded(coded, max_length, numbers)])
            splits.append(Pairs(HeldTokens(torch.from_numpy(tokens)), np.array(numbers)))
        lines = "".join(f"{' '.join(source)}\t{' '.join(target)}\n" for source, target in pairs)
        super().__init__(
            {
                "name": "unicode_names",
                "origin": "unicodedata.ucd_3_2_0",
                "unidata_version": unicodedata.ucd_3_2_0.unidata_version,
            },
            splits,
            [*map(len, self.vocabularies)],
            hashlib.sha256(lines.encode()).hexdigest(),
            max_length,
            vocab_multiple,
            serving,
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
    with reading(root):
        present = {entry.name for entry in root.iterdir() if entry.is_file()}
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
        raise DataError(f"{root}: several files of the {split} split; keep only one: {listed}")
    wanted = " and ".join(f"{split}.{language}" for language in languages)
    alone = f" ({halves[0]} has no other side)" if halves else ""
    raise DataError(
        f"{root}: has no {split} split{alone}: it needs {wanted}, or {split}.tsv. Names may also "
        f"end in .gz, and may begin with {', '.join(_NAMES[split][1:])} instead of {split}"
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
                f"{short}: ends after line {number}, but {long.name} continues; both must have "
                "the same length"
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

        def words_of(side: int, limit: int | None) -> Words:
            def ranked() -> tuple[str, ...]:
                # Both sides are read, so that a fault in either is found before anything is kept.
                words = (pair[side].split() for pair in pairs_of(files["train"]))
                return build_vocabulary(words, SYMBOLS, limit)

            key: Key = {
                "train": " ".join(hashes["train"]),
                "side": side,
                "symbols": " ".join(SYMBOLS),
                "lower": encoding.lower,
                "vocab_limit": limit,
            }
            return _SideWords(kept, key, ranked, UNKNOWN, SYMBOLS[END_ID])

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
