"""Ids of whole blocks of text, against a dictionary."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mprun.data.word_table import WordTable, encoded_blocks


def by_dictionary(text: str, words) -> list[int]:
    ids = {word: i for i, word in enumerate(words)}
    unknown = ids["<unk>"]
    return [ids.get(w, unknown) for w in text.replace("\n", " <eos> ").split()]


def test_by_hand():
    table = WordTable(("<unk>", "<eos>", "a", "bc"), "<unk>", "<eos>")
    encoded = table.encode(b"a x\tbc\r\n\n<unk> <eos> b ")
    assert encoded.tolist() == [2, 0, 3, 1, 1, 0, 1, 0]
    assert encoded.dtype == np.dtype("<i4")
    assert [ids.tolist() for ids in encoded_blocks([b"a\n", b"", b" ", b"bc "], table)] == [
        [2, 1],
        [],
        [],
        [3],
    ]


# Words of 0 to 40 bytes that begin alike, around the 8 and 16 bytes that are compared at once.
WORDS = st.text(st.sampled_from("abä日"), max_size=12).map(
    lambda end: "a" * (len(end) * 3 % 11) + end
)
BLANKS = st.sampled_from([" ", "\n", "\t", "\r\n", " \n ", "\x0b", "\x0c", "\x1c", "\x1f"])


@given(st.lists(WORDS, max_size=60), st.lists(st.tuples(WORDS, BLANKS), max_size=80))
def test_any_words_as_by_dictionary(known, pieces):
    words = list(dict.fromkeys(["<eos>", *filter(None, known), "<unk>"]))
    text = "".join(word + blank for word, blank in pieces) + "\n"
    encoded = WordTable(words, "<unk>", "<eos>").encode(text.encode())
    assert encoded.tolist() == by_dictionary(text, words)


@pytest.mark.parametrize("length", range(1, 20))
def test_every_length_and_its_neighbours(length):
    words = ["<unk>", "<eos>", *("x" * n for n in range(length, length + 3))]
    text = " ".join("x" * n for n in range(1, 25)) + "\n"
    assert WordTable(words, "<unk>", "<eos>").encode(text.encode()).tolist() == by_dictionary(
        text, words
    )


def test_many_words():
    rng = np.random.default_rng(0)
    words = ["<S>", "<unk>", *(f"{'w' * (n % 14)}{n}" for n in range(100_000))]
    table = WordTable(words, "<unk>", "<S>")
    wanted = rng.integers(2, len(words), 200_000)
    text = " ".join(words[i] for i in wanted.tolist()) + " "
    assert np.array_equal(table.encode(text.encode()), wanted)
    strangers = " ".join(f"v{n}" for n in range(50_000)) + "\n"
    assert table.encode(strangers.encode()).tolist() == [1] * 50_000 + [0]
