"""One Billion Word: layout, sentences, order of shards, and memory, on made corpora."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from mprun.data.source import DamagedData, DataError, permutation

from ..helpers import configured

FOLDER = "1-billion-word-language-modeling-benchmark-r13output"
VOCABULARY = "the 9\n<S> 7\na 5\n<UNK> 3\n</S> 0\n" + "".join(f"w{n} 1\n" for n in range(1, 100))
THE, S, A, UNK = range(4)


def word(n: int) -> int:
    return 4 + n


@pytest.fixture
def corpus(tmp_path):
    """Shard n says: "the wn", "a other wn", "", "wn"."""
    root = tmp_path / FOLDER
    for folder, name, numbers in (
        ("training-monolingual.tokenized.shuffled", "news.en-{:05}-of-00100", range(1, 100)),
        ("heldout-monolingual.tokenized.shuffled", "news.en.heldout-{:05}-of-00050", range(2)),
    ):
        (root / folder).mkdir(parents=True)
        for n in numbers:
            (root / folder / name.format(n)).write_text(f"the w{n}\na other w{n}\n\nw{n}\n")
    for n in range(2):
        path = root / "heldout-monolingual.tokenized.shuffled" / f"news.en.heldout-{n:05}-of-00050"
        path.write_text(("a the\n" if n else "the a\n") * 7)
    (root / "1b_word_vocab.txt").write_text(VOCABULARY)
    return root


def source(root, **options):
    sizes = {"sequence_length": 5, "batch_size": 3, "seed": 4, "device": "cpu"}
    cache = (root if root.name != FOLDER else root.parent) / "cache"
    return configured("lm1b", root=root, **{**sizes, "cache": cache, **options})


@pytest.mark.slow
def test_sentences_in_the_order_of_the_epoch(corpus):
    data = source(corpus)
    tokens = 99 * 10
    about = data.description
    assert (about["train_samples"], about["eval_samples"], about["vocab_size"]) == (tokens, 22, 104)
    assert data.batches_per_epoch == tokens // 3 // 5
    for epoch in range(3):
        ring = []
        for shard in permutation(4, epoch, 99).tolist():
            n = word(shard + 1)
            ring += [S, THE, n, S, A, UNK, n, S, S, n]
        ring.append(ring[0])
        for batch in (0, 1, 40, 65):
            got, targets = data.train_batch(epoch * 66 + batch)
            for stream in range(3):
                start = 330 * stream + 5 * batch
                assert got[:, stream].tolist() == ring[start : start + 5]
                assert targets[:, stream].tolist() == ring[start + 1 : start + 6]
    words = [data.vocabulary[i] for i in (S, THE, word(1), S, A)]
    assert words == ["<S>", "the", "w1", "<S>", "a"]


@pytest.mark.slow
def test_held_out_shards_end_in_their_marker(corpus):
    for split, (first, second) in {"valid": (A, THE), "test": (THE, A)}.items():
        ((tokens, targets),) = source(corpus, eval_split=split).eval_batches()
        wanted = [*[S, first, second] * 7, S]
        # 22 tokens, 21 targets: 5 are left out, then 16 streams of 1.
        assert tokens[0].tolist() == wanted[5:21]
        assert targets[0].tolist() == wanted[6:]


@pytest.mark.slow
def test_vocabulary_files(corpus, tmp_path):
    wanted = source(corpus)
    (corpus / "1b_word_vocab.txt").unlink()
    with pytest.raises(DamagedData, match="no vocabulary file 1b_word_vocab.txt or vocab-2016"):
        source(corpus)
    with pytest.raises(ValueError, match="vocabulary=nowhere is not allowed: no such file"):
        source(corpus, vocabulary="nowhere")
    words = "".join(line.split()[0] + "\n" for line in VOCABULARY.splitlines())
    (tmp_path / "words").write_text(words)
    named = source(corpus, vocabulary=tmp_path / "words", vocab_multiple=10)
    assert named.vocabulary == wanted.vocabulary == tuple(words.split())
    assert named.vocab_size == 110
    (tmp_path / "vocab-2016-09-10.txt").write_text(words)
    # The root is the folder or its parent.
    assert source(tmp_path).sha256 == named.sha256 != wanted.sha256
    assert torch.equal(named.train_batch(3)[0], wanted.train_batch(3)[0])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "vocab.txt: no words, 0 bytes"),
        (b"the\n", "vocab.txt: lacks <S> and <UNK>"),
        (b"the\n<S>\n", "vocab.txt: lacks <UNK>"),
        (b"the\n\n<S>\n<UNK>\n", "vocab.txt: line 2 must be one word"),
        (b"the 1 2\n<S>\n<UNK>\n", "vocab.txt: line 1 must be one word"),
        (b"the many\n<S>\n<UNK>\n", "vocab.txt: line 1 must be one word"),
        (b"the\n<S>\n<UNK>\nthe\n", "vocab.txt: line 4 repeats 'the'"),
        (b"the\n\xff\n<S>\n", r"vocab.txt: not UTF-8 \(0xff\) at byte 4, line 2"),
    ],
)
def test_bad_vocabularies(corpus, content, message):
    (corpus / "1b_word_vocab.txt").write_bytes(content)
    with pytest.raises(DamagedData, match=message):
        source(corpus)


def test_missing_files_are_named(corpus):
    held_out = corpus / "heldout-monolingual.tokenized.shuffled" / "news.en.heldout-00001-of-00050"
    held_out.unlink()
    with pytest.raises(DamagedData, match="heldout-00001-of-00050: no such file.* valid split"):
        source(corpus)
    assert source(corpus, eval_split="test").description["eval_split"] == "test"
    training = corpus / "training-monolingual.tokenized.shuffled"
    for number in (17, 40):
        (training / f"news.en-000{number}-of-00100").unlink()
    with pytest.raises(DamagedData, match="news.en-00017-of-00100: no such file; 2 of 99"):
        source(corpus)
    training.rename(corpus / "elsewhere")
    none = f"^data.root={corpus}: no folder {training.name}, here or in {FOLDER}"
    with pytest.raises(DataError, match=none) as caught:
        source(corpus)
    assert caught.type is DataError


@pytest.mark.slow
def test_an_interrupted_preparation_goes_on_where_it_was(corpus, capsys):
    damaged = corpus / "training-monolingual.tokenized.shuffled" / "news.en-00060-of-00100"
    whole = damaged.read_bytes()
    damaged.write_bytes(b"the \xff\n")
    with pytest.raises(DamagedData, match=r"news.en-00060-of-00100: not UTF-8"):
        source(corpus)
    cache = corpus.parent / "cache"
    first = {path: path.stat().st_mtime_ns for path in cache.glob("*.tokens")}
    assert len(first) == 59
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"mprun: encoding shard {n} of 100" for n in range(10, 61, 10)]
    damaged.write_bytes(whole)
    data = source(corpus)
    assert all(path.stat().st_mtime_ns == time for path, time in first.items())
    assert len(list(cache.glob("*.tokens"))) == 100
    capsys.readouterr()
    assert source(corpus).sha256 == data.sha256
    assert capsys.readouterr().err == ""


_MEMORY = """
import json, sys

def resident(kind):
    for line in open("/proc/self/status"):
        if line.startswith(kind):
            return int(line.split()[1]) * 1024

import torch
from mprun.assembly.data import build_data
from mprun.config.components.language import Lm1bConfig
imports = resident("VmRSS")
config = Lm1bConfig(root=sys.argv[1], cache=sys.argv[2], batch_size=128)
data = build_data(config, 0, torch.device("cpu"))
for index in range(0, 3 * data.batches_per_epoch, 97):
    data.train_batch(index)
for batch in data.eval_batches():
    pass
print(json.dumps({
    "imports": imports, "peak": resident("VmHWM"), "now": resident("VmRSS"),
    "tokens": data.description["train_samples"], "entries": data.description["vocab_entries"],
}))
"""


def make_corpus(root, entries: int, shard_words: int) -> None:
    """99 shards of random words, of which a word of rank r comes with a weight of 1/r."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 13, entries)
    letters = rng.integers(97, 123, (entries, 12), dtype=np.uint8)
    made = {
        f"{row[:length].tobytes().decode()}{n}"
        for n, (row, length) in enumerate(zip(letters, lengths, strict=True))
    }
    words = ["<S>", "</S>", "<UNK>", *sorted(made)][:entries]
    (root / "1b_word_vocab.txt").write_text("".join(f"{word}\n" for word in words))
    for folder, name, numbers in (
        ("training-monolingual.tokenized.shuffled", "news.en-{:05}-of-00100", range(1, 100)),
        ("heldout-monolingual.tokenized.shuffled", "news.en.heldout-{:05}-of-00050", range(1, 2)),
    ):
        (root / folder).mkdir()
        for n in numbers:
            ranks = np.exp(rng.random(shard_words) * np.log(entries - 3)).astype(int) + 2
            text = [words[rank] for rank in ranks.tolist()]
            lines = (" ".join(text[i : i + 25]) + "\n" for i in range(0, shard_words, 25))
            (root / folder / name.format(n)).write_text("".join(lines))


@pytest.mark.slow
def test_resident_memory_stays_below_1_gib(tmp_path):
    """With the full number of entries; torch alone takes a quarter to a half of it."""
    make_corpus(tmp_path, 793_471, 20_000)
    command = [sys.executable, "-c", _MEMORY, str(tmp_path), str(tmp_path / "cache")]
    for _ in range(2):  # encoding, then with everything in the cache
        ended = subprocess.run(command, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr
        found = json.loads(ended.stdout)
        assert found["entries"] == 793_471
        assert found["tokens"] == 99 * (20_000 + 800)
        assert found["peak"] < 2**30, found
