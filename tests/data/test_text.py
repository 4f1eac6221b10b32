"""Documentation text and its synthetic twin: split, vocabulary, streams."""

import hashlib
import sys
from pydoc_data.topics import topics

import pytest
import torch

from mprun.data import DataError
from mprun.data.source import Serving
from mprun.data.text import load_text, split_text, split_words
from mprun.data.token_streams import EVAL_STREAMS, TokenStreams, Windows

from ..helpers import configured


def source(name, batch_size, sequence_length, **changes):
    sizes = {"batch_size": batch_size, "sequence_length": sequence_length}
    return configured(name, **sizes, **{"seed": 0, "device": "cpu"} | changes)


def docs(level="char", batch_size=8, sequence_length=16, **changes):
    return source("docs_text", batch_size, sequence_length, level=level, **changes)


def numbered(n, held_out, batch_size, sequence_length):
    """Streams over tokens that are their own positions; the held-out ones start at 1,000."""
    train, rest = torch.arange(n), torch.arange(1000, 1000 + held_out)
    serving = Serving(batch_size=batch_size, seed=0, device=torch.device("cpu"))
    return TokenStreams([train], rest, Windows(sequence_length=sequence_length), serving)


def test_text_is_the_sorted_topics_and_hashed():
    text = load_text()
    assert text == "\n".join(topics[name] for name in sorted(topics))
    assert docs().sha256 == docs("word").sha256 == hashlib.sha256(text.encode()).hexdigest()


def test_split_is_at_a_line_near_90_percent_and_loses_nothing():
    text = load_text()
    train, held_out = split_text(text)
    assert train + held_out == text
    assert train.endswith("\n")
    # The next line start is at most one line away; no line of the text has 200 characters.
    assert 0 <= len(train) - int(0.9 * len(text)) < 200


def held_out_tokens(source) -> list[str]:
    """The held-out tokens as the streams deliver them, but for the first ones and the last."""
    streams = torch.cat([tokens for tokens, _ in source.eval_batches()]).t().flatten()
    return [source.vocabulary[i] for i in streams.tolist()]


@pytest.mark.parametrize(("level", "batch_size"), [("char", 8), ("word", 3)])
def test_tokens_are_those_of_the_text(level, batch_size):
    """Those held out in streams of their own, whatever the batch of training."""
    text = docs(level, batch_size)
    train, held_out = map(split_words if level == "word" else list, split_text(load_text()))
    about = text.description
    assert (about["train_samples"], about["eval_samples"]) == (len(train), len(held_out))
    known = set(text.vocabulary)
    assert known - {"<unk>"} == set(train)
    # Held-out tokens that training never saw are <unk>, all others as they are.
    wanted = [token if token in known else "<unk>" for token in held_out]
    assert held_out_tokens(text) == wanted[(len(wanted) - 1) % EVAL_STREAMS : -1]


def test_words_by_hand():
    text = "The if statement, x_1 = 2:\n\n   is NOT  qqzzqq\n"
    wanted = "the if statement , x_1 = 2 : <eos> is not qqzzqq <eos>"
    assert split_words(text) == wanted.split()
    assert docs("word").vocabulary[:2] == ("<unk>", "<eos>")


@pytest.mark.parametrize(
    ("limit", "multiple", "size"), [(1000, 8, 1000), (1001, 8, 1008), (999, 1, 999)]
)
def test_vocabulary_limit_and_padding(limit, multiple, size):
    text = docs("word", vocab_limit=limit, vocab_multiple=multiple)
    assert (len(text.vocabulary), text.vocab_size) == (limit, size)
    assert max(text.train_batch(i)[1].max() for i in range(50)) < limit


def test_training_batches_against_the_text_itself():
    made, text = docs(batch_size=4, sequence_length=50), split_text(load_text())[0]
    ring = text + text[:5000]
    for index in (0, 1, made.batches_per_epoch - 1, made.batches_per_epoch + 2):
        tokens, targets = made.train_batch(index)
        assert tokens.shape == targets.shape == (50, 4)
        for piece in torch.cat([tokens, targets[-1:]]).t().tolist():
            assert "".join(made.vocabulary[i] for i in piece) in ring


@pytest.mark.parametrize("sequence_length", [1, 5, 7, 100])
@pytest.mark.parametrize("held_out", [EVAL_STREAMS + 1, 40, 1000])
@pytest.mark.few
def test_evaluation_predicts_every_token_once(held_out, sequence_length):
    batches = list(numbered(500, held_out, 3, sequence_length).eval_batches())
    assert all(b[0].shape[1] == EVAL_STREAMS for b in batches)
    assert all(len(b[0]) == sequence_length for b in batches[:-1])
    targets = sorted(torch.cat([b[1].flatten() for b in batches]).tolist())
    # The first few, fewer than EVAL_STREAMS, are left out so that the streams are equally long.
    left_out = (held_out - 1) % EVAL_STREAMS
    assert targets == list(range(1000 + left_out + 1, 1000 + held_out))


def test_synthetic_tokens():
    given = {"vocab_size": 50, "train_tokens": 1000, "eval_tokens": 100}
    made = source("synthetic_tokens", 4, 10, **given)
    tokens, targets = made.train_batch(0)
    assert tokens.shape == targets.shape == (10, 4)
    about = made.description
    assert (about["name"], about["vocab_size"]) == ("synthetic_tokens", 50)
    assert made.samples_per_batch == 40
    seen = torch.cat([made.train_batch(i)[0].flatten() for i in range(25)])
    # 1,000 uniform draws of 50: each 20 +- 4.4; five standard deviations.
    assert (torch.bincount(seen, minlength=50) - 20).abs().max() < 22
    assert seen.max() < 50


def test_missing_pydoc_data_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(DataError, match=r"pydoc_data\.topics"):
        docs()
