"""Documentation text and its synthetic twin: split, vocabulary, streams."""

import hashlib
import sys
from collections import Counter
from pydoc_data.topics import topics

import pytest
import torch

from mprun.data import DataError, DocsText, SyntheticTokens
from mprun.data.text import load_text, split_text
from mprun.data.token_streams import EVAL_STREAMS, TokenStreams
from mprun.data.vocabulary import build_vocabulary


def sizes(batch_size, sequence_length, seed):
    return {
        "batch_size": batch_size,
        "sequence_length": sequence_length,
        "seed": seed,
        "device": "cpu",
    }


def docs(level="char", batch_size=8, sequence_length=16, seed=0, **kwargs):
    return DocsText(level, **sizes(batch_size, sequence_length, seed), **kwargs)


def numbered(n=103, held_out=40, batch_size=4, sequence_length=5, seed=0):
    """Streams over tokens that are their own positions; the held-out ones start at 1,000."""
    train, rest = torch.arange(n), torch.arange(1000, 1000 + held_out)
    return TokenStreams([train], rest, batch_size, sequence_length, seed, "cpu")


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


def test_characters_round_trip_exactly():
    source = docs()
    train, held_out = split_text(load_text())
    assert source.decode(source.encode(train).tolist()) == train
    # Held-out characters that training never saw come back as <unk>, all others as they are.
    back = source.decode(source.encode(held_out[:5000]).tolist())
    known = set(source.vocabulary)
    assert back == "".join(c if c in known else "<unk>" for c in held_out[:5000])


def test_words_by_hand():
    source = docs("word")
    text = "The if statement, x_1 = 2:\n\n   is NOT  qqzzqq\n"
    ids = source.encode(text).tolist()
    assert source.decode(ids) == "the if statement , x_1 = 2 :\nis not <unk>\n".replace(
        "x_1", "x_1" if "x_1" in source.vocabulary else "<unk>"
    )
    assert ids.count(1) == 2
    assert ids[-2:] == [0, 1]


def test_word_round_trip_is_stable():
    source = docs("word")
    once = source.encode(split_text(load_text())[0])
    assert 0 not in once
    assert torch.equal(source.encode(source.decode(once.tolist())), once)


def test_vocabulary_by_hand():
    tokens = ["b", "a", "c", "a", "b", "d", "<eos>", "<eos>", "<eos>"]
    special = ("<unk>", "<eos>")
    assert build_vocabulary([tokens], special, None) == ("<unk>", "<eos>", "a", "b", "c", "d")
    assert build_vocabulary([tokens], special, 4) == ("<unk>", "<eos>", "a", "b")


@pytest.mark.parametrize(
    ("limit", "multiple", "size"), [(1000, 8, 1000), (1001, 8, 1008), (999, 1, 999)]
)
def test_vocabulary_limit_and_padding(limit, multiple, size):
    source = docs("word", vocab_limit=limit, vocab_multiple=multiple)
    assert len(source.vocabulary) == limit
    assert source.vocab_size == size
    tokens = torch.cat([source.train_batch(i)[1].flatten() for i in range(50)])
    assert tokens.max() < limit


def test_vocabulary_holds_the_most_frequent_training_words():
    limited = docs("word", vocab_limit=100)
    full = docs("word", batch_size=1)
    ids = full.encode(split_text(load_text())[0]).tolist()
    counts = Counter(ids)
    kept = [counts[full.vocabulary.index(word)] for word in limited.vocabulary[2:]]
    assert kept == sorted(kept, reverse=True)
    dropped = set(full.vocabulary) - set(limited.vocabulary)
    assert max(counts[full.vocabulary.index(word)] for word in dropped) <= kept[-1]


@pytest.mark.parametrize("build", [lambda: docs("word"), docs, numbered])
def test_targets_are_tokens_shifted_by_one(build):
    source = build()
    batches = [source.train_batch(i) for i in range(source.batches_per_epoch)]
    for stream in (batches, list(source.eval_batches())):
        tokens = torch.cat([b[0] for b in stream])
        targets = torch.cat([b[1] for b in stream])
        assert tokens.dtype == targets.dtype == torch.int64
        # Also across batches: every column is one contiguous piece.
        assert torch.equal(tokens[1:], targets[:-1])


def test_training_batches_against_the_text_itself():
    source = docs(batch_size=4, sequence_length=50)
    text = split_text(load_text())[0]
    ring = text + text[:5000]
    for index in (0, 1, source.batches_per_epoch - 1, source.batches_per_epoch + 2):
        tokens, targets = source.train_batch(index)
        assert tokens.shape == targets.shape == (50, 4)
        for column in range(4):
            piece = source.decode([*tokens[:, column].tolist(), targets[-1, column].item()])
            assert piece in ring


def test_an_epoch_shows_no_token_twice_and_drops_less_than_a_batch_per_stream():
    source = numbered(n=103, batch_size=4, sequence_length=5)
    assert source.batches_per_epoch == 5
    for epoch in range(20):
        batches = [source.train_batch(5 * epoch + i) for i in range(5)]
        for part in (0, 1):
            seen = torch.cat([b[part].flatten() for b in batches]).tolist()
            assert len(seen) == len(set(seen)) == 100


def test_streams_wrap_around_the_end():
    source = numbered(n=103)
    starts = set()
    for index in range(400):
        tokens, targets = source.train_batch(index)
        assert torch.equal(targets, (tokens + 1) % 103)
        if index % 5 == 0:
            starts.add(tokens[0, 0].item())
    # 80 epochs draw from 103 starts: some 56 different ones are expected, sd below 4.
    assert len(starts) > 36


def test_every_token_is_used_when_the_product_fits():
    source = numbered(n=100, batch_size=4, sequence_length=5)
    seen = torch.cat([source.train_batch(i)[0].flatten() for i in range(5)])
    assert sorted(seen.tolist()) == list(range(100))


@pytest.mark.parametrize("sequence_length", [1, 5, 7, 100])
@pytest.mark.parametrize("held_out", [EVAL_STREAMS + 1, 40, 1000])
def test_evaluation_predicts_every_token_once(held_out, sequence_length):
    source = numbered(n=500, held_out=held_out, batch_size=3, sequence_length=sequence_length)
    batches = list(source.eval_batches())
    assert all(b[0].shape[1] == EVAL_STREAMS for b in batches)
    assert all(len(b[0]) == sequence_length for b in batches[:-1])
    targets = sorted(torch.cat([b[1].flatten() for b in batches]).tolist())
    # The first few, fewer than EVAL_STREAMS, are left out so that the streams are equally long.
    left_out = (held_out - 1) % EVAL_STREAMS
    assert targets == list(range(1000 + left_out + 1, 1000 + held_out))


def test_evaluation_does_not_depend_on_the_training_batch():
    first = torch.cat([b[1] for b in docs(batch_size=2, sequence_length=16).eval_batches()])
    other = torch.cat([b[1] for b in docs(batch_size=9, sequence_length=33).eval_batches()])
    assert torch.equal(first, other)


def tokens_twin(seed=0, **kwargs):
    return SyntheticTokens(50, 1000, 100, **sizes(4, 10, seed), **kwargs)


@pytest.mark.parametrize("build", [docs, tokens_twin])
def test_a_batch_depends_on_seed_and_index_only(build):
    source = build(seed=1)
    far = 3 * source.batches_per_epoch + 2
    wanted = {i: [part.clone() for part in source.train_batch(i)] for i in (0, far, 4)}
    torch.manual_seed(99)
    again = build(seed=1)
    for index in (far, 4, 0):
        for part, expected in zip(again.train_batch(index), wanted[index], strict=True):
            assert torch.equal(part, expected)


@pytest.mark.parametrize("build", [docs, tokens_twin])
def test_epochs_and_seeds_differ(build):
    source, other = build(seed=1), build(seed=2)
    first = source.train_batch(0)[0].clone()
    assert not torch.equal(first, source.train_batch(source.batches_per_epoch)[0])
    assert not torch.equal(first, other.train_batch(0)[0])
    assert source.sha256 == other.sha256


def test_synthetic_tokens():
    source = tokens_twin()
    tokens, targets = source.train_batch(0)
    assert tokens.shape == targets.shape == (10, 4)
    assert source.samples_per_batch == 40
    seen = torch.cat([source.train_batch(i)[0].flatten() for i in range(25)])
    # 1,000 uniform draws of 50: each 20 +- 4.4; five standard deviations.
    assert (torch.bincount(seen, minlength=50) - 20).abs().max() < 22
    assert seen.max() < 50


def test_descriptions_are_plain_and_count():
    for source in (docs("word"), tokens_twin()):
        assert all(type(v) in (str, int, float) for v in source.description.values())
    text = split_text(load_text())
    assert docs().description["train_samples"] == len(text[0])
    assert docs().description["eval_samples"] == len(text[1])


def test_missing_pydoc_data_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(DataError, match=r"pydoc_data\.topics"):
        docs()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"sequence_length": 0}, "sequence_length=0"),
        ({"sequence_length": 10**6}, "sequence_length=1000000 is not allowed"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_refusals(change, message):
    with pytest.raises(ValueError, match=message):
        docs(**change)
    with pytest.raises(ValueError, match="index=-1"):
        numbered().train_batch(-1)
    with pytest.raises(DataError, match="16 held-out tokens are too few"):
        numbered(held_out=16)
