"""Pairs of sentences as batches of word ids of one shape, and a source that needs no file."""

import hashlib
import unicodedata
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from mprun.data.source import (
    Batch,
    DataError,
    Description,
    EpochOrder,
    Serving,
    Source,
    permutation,
)
from mprun.data.token_streams import HeldTokens, TokenFile, padded
from mprun.data.vocabulary import UNKNOWN, WordIds, build_vocabulary

# Ids of the first entries of each vocabulary, in their order.
PADDING_ID, BEGIN_ID, END_ID, UNKNOWN_ID = range(4)
SYMBOLS = ("<pad>", "<s>", "</s>", UNKNOWN)


Sentences = tuple[list[str], list[str]]
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

    Raises:
        ValueError: There are fewer training pairs than a batch takes.
        DataError: A split has no pair.
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
        train, held_out = self._train, self._held_out = splits
        self._max_length = max_length
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
        for start in range(0, len(self._held_out), self._batch_size):
            stop = min(start + self._batch_size, len(self._held_out))
            yield self._batch(self._held_out, range(start, stop))

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
def unicode_names() -> tuple[Sentences, ...]:
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
