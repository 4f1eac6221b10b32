"""Vocabularies in bounded memory."""

import tracemalloc
from collections import Counter

import numpy as np
import pytest

from mprun.data import DataError, vocabulary
from mprun.data.vocabulary import build_vocabulary, joined_words, vocabulary_of_blocks

SPECIAL = ("<unk>", "<eos>")
SHORT = [f"w{n:02d}" for n in range(100)]


def blocks_of_words(seed=0, blocks=40, words=500):
    numbers = np.random.default_rng(seed).zipf(1.3, (blocks, words)) % 5000
    return [[f"w{n}" for n in row] for row in numbers.tolist()]


def test_by_hand(tmp_path):
    blocks = [["b", "a", "<eos>"], ["c", "a", "b", "d", "<eos>", "<unk>", "<unk>"]]
    assert vocabulary_of_blocks(blocks, SPECIAL, None, tmp_path) == (*SPECIAL, "a", "b", "c", "d")
    assert vocabulary_of_blocks(blocks, SPECIAL, 5, tmp_path) == (*SPECIAL, "a", "b", "c")


@pytest.mark.parametrize("limit", [None, 3, 100, 10_000])
def test_counting_on_disk_changes_nothing(tmp_path, monkeypatch, limit):
    blocks = blocks_of_words()
    wanted = build_vocabulary((word for block in blocks for word in block), SPECIAL, limit)
    counts = Counter(word for block in blocks for word in block)
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    assert wanted == (*SPECIAL, *ranked)[:limit]
    assert vocabulary_of_blocks(blocks, SPECIAL, limit, tmp_path) == wanted
    # 40 blocks of some 280 words each: files after every block, merged after every third.
    monkeypatch.setattr(vocabulary, "MAX_COUNTED", 100)
    monkeypatch.setattr(vocabulary, "MAX_RUNS", 3)
    assert vocabulary_of_blocks(blocks, SPECIAL, limit, tmp_path) == wanted
    assert list(tmp_path.iterdir()) == []


def test_too_many_words_need_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(vocabulary, "MAX_ENTRIES", 4)
    assert len(vocabulary_of_blocks([["a", "b"]], SPECIAL, None, tmp_path)) == 4
    blocks = [["a", "b", "c"]]
    with pytest.raises(DataError, match=r"data\.vocab_limit=null: .* more than 4 different words"):
        vocabulary_of_blocks(blocks, SPECIAL, None, tmp_path)
    assert len(vocabulary_of_blocks(blocks, SPECIAL, 4, tmp_path)) == 4
    with pytest.raises(ValueError, match=r"^vocab_limit=5 is not allowed: up to 4$"):
        vocabulary_of_blocks(blocks, SPECIAL, 5, tmp_path)


def of_long_words():
    """3,000 words of 10 kB, which are 30 MB, each once; the short ones come 30 times."""
    for block in range(100):
        long = [f"{n:05d}" * 2_000 for n in range(30 * block, 30 * block + 30)]
        yield long + SHORT * (block < 30)


@pytest.mark.parametrize("limit", [None, 50])
def test_long_words_do_not_take_more_memory(tmp_path, monkeypatch, limit):
    monkeypatch.setattr(vocabulary, "MAX_COUNTED_BYTES", 2**20)
    monkeypatch.setattr(vocabulary, "MAX_ENTRY_BYTES", 2**21)
    tracemalloc.start()
    try:
        if limit is None:
            with pytest.raises(
                DataError, match=r"data\.vocab_limit=null: the words take more than"
            ):
                vocabulary_of_blocks(of_long_words(), SPECIAL, limit, tmp_path)
        else:
            found = vocabulary_of_blocks(of_long_words(), SPECIAL, limit, tmp_path)
            assert found == (*SPECIAL, *SHORT[:48])
        assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    finally:
        tracemalloc.stop()
    assert list(tmp_path.iterdir()) == []


def test_words_as_text():
    assert joined_words(["a", "b", "<eos>", "<eos>", "a", "<eos>"], "<eos>") == "a b\n\na\n"
