"""Vocabularies of counted words, and the ids of their words."""

from collections import Counter

import numpy as np
import pytest

from mprun.data import DataError, vocabulary
from mprun.data.vocabulary import WordIds, build_vocabulary

SPECIAL = ("<unk>", "<eos>")


def blocks_of_words(seed=0, blocks=20, words=200):
    numbers = np.random.default_rng(seed).zipf(1.3, (blocks, words)) % 5000
    return [[f"w{n}" for n in row] for row in numbers.tolist()]


def test_by_hand():
    blocks = [["b", "a", "<eos>"], ["c", "a", "b", "d", "<eos>", "<unk>", "<unk>"]]
    assert build_vocabulary(blocks, SPECIAL, None) == (*SPECIAL, "a", "b", "c", "d")
    assert build_vocabulary(blocks, SPECIAL, 5) == (*SPECIAL, "a", "b", "c")


@pytest.mark.parametrize("limit", [None, 3, 100, 10_000])
def test_words_by_falling_count_whatever_the_blocks(limit):
    blocks = blocks_of_words()
    words = [word for block in blocks for word in block]
    counts = Counter(words)
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    wanted = (*SPECIAL, *ranked)[:limit]
    assert build_vocabulary([words], SPECIAL, limit) == wanted
    assert build_vocabulary(blocks, SPECIAL, limit) == wanted
    assert build_vocabulary([[word] for word in words], SPECIAL, limit) == wanted


def test_too_many_words_need_a_limit(monkeypatch):
    monkeypatch.setattr(vocabulary, "MAX_ENTRIES", 4)
    assert len(build_vocabulary([["a", "b"]], SPECIAL, None)) == 4
    blocks = [["a", "b", "c"]]
    with pytest.raises(DataError, match=r"data\.vocab_limit=null: .* more than 4 different words"):
        build_vocabulary(blocks, SPECIAL, None)
    assert len(build_vocabulary(blocks, SPECIAL, 4)) == 4


def test_ids_of_words_and_of_strangers():
    ids = WordIds(("<unk>", "<eos>", "a", "bc", "日本"), "<unk>")
    blocks = list(ids.encoded([["a", "x", "bc", "<eos>", "<unk>"], [], ["日本", "b"]]))
    assert [block.tolist() for block in blocks] == [[2, 0, 3, 1, 0], [], [4, 0]]
    assert all(block.dtype == np.dtype("<i4") for block in blocks)
    assert len(ids) == 5  # strangers are not remembered


def test_many_words_are_encoded():
    rng = np.random.default_rng(0)
    words = ["<S>", "<unk>", *(f"{'w' * (n % 14)}{n}" for n in range(100_000))]
    wanted = rng.integers(2, len(words), 200_000)
    (found,) = WordIds(words, "<unk>").encoded([[words[i] for i in wanted.tolist()]])
    assert np.array_equal(found, wanted)
