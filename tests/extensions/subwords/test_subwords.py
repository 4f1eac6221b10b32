"""Text in subwords: against the libraries themselves, and files that cannot be used."""

import gzip
import hashlib
import io
import json
import sys

import pytest
import torch

from mprun.data.source import DataError
from mprun.extensions.subwords.coder import Subwords

from ...data.test_text_source import held_out
from ...helpers import configured, raises_line, refused

TRAIN = "the quick brown fox\n\njumps over the lazy dog \r\n  \u00e9t\u00e9 <unk> 42\n" * 9
VALID = "the dog jumps\n\nquick fox\n" * 6
PAIRS = (["a fox", "", "the dog jumps"], ["un renard", "rien", "le chien saute"])


def made(root):
    root.mkdir()
    (root / "train.txt").write_text(TRAIN, newline="")
    (root / "valid.txt").write_text(VALID)
    return root


@pytest.fixture
def folder(tmp_path):
    return made(tmp_path / "text")


def byte_level(path, text=TRAIN, entries=300):
    """GPT-2's tokenizer trained on a text, how it encodes a line, and the token that ends one."""
    tokenizers = pytest.importorskip("tokenizers")
    found = tokenizers.Tokenizer(tokenizers.models.BPE())
    found.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=entries,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    found.train_from_iterator(text.splitlines(), trainer)
    found.save(str(path))
    encode = lambda line: found.encode(line, add_special_tokens=False).ids  # noqa: E731
    return found, encode, found.token_to_id("<|endoftext|>")


def sentences(path, text=TRAIN, entries=60):
    """A model of sentencepiece, likewise."""
    sentencepiece = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text.splitlines()),
        model_writer=model,
        vocab_size=entries,
        model_type="bpe",
        minloglevel=2,
    )
    path.write_bytes(model.getvalue())
    found = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    return found, found.encode, found.eos_id()


def words(path, names, **more):
    """A tokenizer of words between blanks, as JSON."""
    pytest.importorskip("tokenizers")
    model = {"type": "WordLevel", "vocab": numbered(names), "unk_token": "<unk>"}
    content = {"version": "1.0", "added_tokens": [], "model": model}
    content["pre_tokenizer"] = {"type": "WhitespaceSplit"}
    path.write_text(json.dumps(content | more))


def numbered(names):
    return {name: place for place, name in enumerate(names)}


def source(root, tokenizer, **options):
    sizes = {"sequence_length": 4, "batch_size": 1, "seed": 0, "device": "cpu", "rotate": False}
    given = {**sizes, "cache": root.parent / "cache", "vocab_multiple": 1, **options}
    return configured("text", root=root, tokenizer=str(tokenizer), **given)


def trained(text) -> list[int]:
    batches = [text.train_batch(number) for number in range(text.batches_per_epoch)]
    return torch.cat([tokens[:, 0] for tokens, _ in batches]).tolist()


def lines_of(text) -> list[str]:
    return [line.removesuffix("\r") for line in text.split("\n")[:-1]]


def coded(text, encode, end) -> list[int]:
    return [token for line in lines_of(text) for token in [*encode(line), end]]


def agrees(text, encode, end, train=TRAIN, valid=VALID):
    wanted, found = coded(train, encode, end), trained(text)
    assert text.train_tokens == len(wanted)
    assert found == wanted[: len(found)] and len(found) >= len(wanted) - 4
    wanted = coded(valid, encode, end)
    assert text.eval_tokens == len(wanted)
    stride, left_out = divmod(len(wanted) - 1, 16)
    assert held_out(text) == wanted[left_out : left_out + 16 * stride]
    per_token = len(valid.encode()) / len(wanted)
    assert text.description["eval_bytes_per_token"] == per_token


def test_tokenizers(folder, tmp_path):
    path = tmp_path / "tokenizer.json"
    library, encode, end = byte_level(path)
    text = source(folder, path)
    agrees(text, encode, end)
    assert text.vocab_size == library.get_vocab_size() == len(text.vocabulary)
    assert text.vocabulary[5] == library.id_to_token(5)
    files = folder / "train.txt", folder / "valid.txt", path
    hashes = [hashlib.sha256(one.read_bytes()).hexdigest() for one in files]
    about = text.description
    assert about["tokenizer_sha256"] == hashes[2] and about["end_token"] == "<|endoftext|>"
    assert about["tokenizer"].startswith("tokenizer.json, tokenizers 0.")
    assert text.sha256 == hashlib.sha256("".join(hashes).encode()).hexdigest()
    assert source(folder, path, vocab_multiple=64).vocab_size == -(-len(text.vocabulary) // 64) * 64


def test_sentencepiece(folder, tmp_path):
    path = tmp_path / "m.model"
    library, encode, end = sentences(path)
    text = source(folder, path)
    agrees(text, encode, end)
    assert text.vocab_size == library.get_piece_size() == 60
    assert text.vocabulary[7] == library.id_to_piece(7)
    assert text.description["end_token"] == "</s>"
    (folder / "train.txt").write_text(TRAIN.upper())
    lower = source(folder, path, lower=True)
    agrees(lower, encode, end, TRAIN.replace("\r", ""))


def test_ids_beyond_sixteen_bits(folder, tmp_path):
    names = ["<unk>", "</s>", *(f"w{number}" for number in range(2, 100_000))]
    words(tmp_path / "t.json", names)
    (folder / "train.txt").write_text("w99999 w65536 none w65535\n" * 4)
    text = source(folder, tmp_path / "t.json")
    assert text.vocab_size == 100_000
    assert trained(text)[:5] == [99999, 65536, 0, 65535, 1]


def test_what_a_file_says_of_training_is_not_done(folder, tmp_path):
    path = tmp_path / "tokenizer.json"
    library, *_ = byte_level(path)
    plain, whole = trained(source(folder, path)), path.read_text()
    content = json.loads(whole)
    content["model"]["dropout"] = 0.9
    path.write_text(json.dumps(content))
    assert trained(source(folder, path)) == plain
    path.write_text(whole)
    cut = library.from_file(str(path))
    cut.enable_truncation(2)
    cut.enable_padding(length=9)
    cut.save(str(path))
    assert trained(source(folder, path)) == plain


def test_encoded_once_for_each_tokenizer(folder, tmp_path, monkeypatch):
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    byte_level(one)
    byte_level(other, entries=270)
    first, second = trained(source(folder, one)), trained(source(folder, other))
    assert first != second
    monkeypatch.setattr(Subwords, "ids", None)
    assert trained(source(folder, one)) == first
    assert trained(source(folder, other)) == second


def test_pairs_in_the_names_of_wmt(tmp_path):
    pytest.importorskip("mprun.extensions.translation")
    root, path = tmp_path / "wmt", tmp_path / "joint.model"
    root.mkdir()
    library, encode, _ = sentences(path, "\n".join([*PAIRS[0], *PAIRS[1]] * 9), 50)
    for side, language in zip(PAIRS, ("en", "fr"), strict=True):
        content = "\n".join([*side, ""]).encode()
        (root / f"newstest2013.{language}").write_bytes(content)
        with gzip.open(root / f"giga-fren.release2.fixed.{language}.gz", "wb") as file:
            file.write(content)
    sizes = {"batch_size": 2, "max_length": 16, "vocab_multiple": 8, "seed": 0, "device": "cpu"}
    text = configured("parallel_text", root=root, tokenizer=str(path), **sizes, cache=tmp_path)
    (batch,) = text.eval_batches()
    for side, rows in zip(PAIRS, batch, strict=True):
        for line, row in zip((side[0], side[2]), rows.tolist(), strict=True):
            wanted = [4 + token for token in encode(line)] + [2]
            assert row == wanted + [0] * (16 - len(wanted))
    assert text.source_vocab_size == text.target_vocab_size == 56
    about = text.description
    assert about["source_vocab_entries"] == about["target_vocab_entries"] == 54
    assert about["train_pairs_left_out"] == 1  # an empty side
    assert about["tokenizer"].startswith("joint.model, sentencepiece 0.")
    assert text.vocabularies[0][:5] == ("<pad>", "<s>", "</s>", "<unk>", library.id_to_piece(0))


def test_files_that_are_no_tokenizers(folder, tmp_path):
    for name, content, library in (
        ("vocab.json", b'{"the": 0}', "tokenizers"),
        ("cut.json", b'{"model": {"type": "BPE"', "tokenizers"),
        ("empty.model", b"", "sentencepiece"),
        ("tokenizer.model", b"IQ== 0\nIg== 1\n", "sentencepiece"),
        ("binary.json", b"{\xff\xfe", "tokenizers"),
    ):
        pytest.importorskip(library)
        path = tmp_path / name
        path.write_bytes(content)
        allowed = "must be a tokenizer.json or a model of sentencepiece"
        with raises_line(ValueError, f"{name}: {allowed} ({library}: "):
            source(folder, path)


def test_text_that_the_tokenizer_cannot_encode(folder, tmp_path):
    words(tmp_path / "t.json", ["the", "</s>"])
    with raises_line(DataError, "cannot encode the text: WordLevel error: Missing"):
        source(folder, tmp_path / "t.json")
    names = ["</s>", *"abcdefghijklmnopqrstuvwxyz"]
    letters = {"type": "BPE", "vocab": numbered(names), "merges": []}
    words(tmp_path / "t.json", [], model=letters)
    lost = "silently drop '2' (U+0032)"  # the first of the text's by its number
    with raises_line(DataError, f"data.tokenizer={tmp_path}/t.json: cannot encode the text", lost):
        source(folder, tmp_path / "t.json")
    # What a normaliser takes out on purpose is no loss.
    only_letters = {"type": "Replace", "pattern": {"Regex": "[^a-z ]"}, "content": ""}
    words(tmp_path / "t.json", [], model=letters, normalizer=only_letters)
    found = source(folder, tmp_path / "t.json")
    assert [found.vocabulary[i] for i in trained(found)[:4]] == [*"theq"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["data.tokenizer=nowhere.json"], "data.tokenizer=nowhere.json is not allowed: no such"),
        (["data.end_token=x"], "data.end_token=x: only with data.tokenizer"),
        (
            ["data.tokenizer=a.json", "data.vocab_limit=9"],
            "data.vocab_limit=9: only without data.tokenizer",
        ),
    ],
)
def test_refused_by_key(folder, tmp_path, capsys, monkeypatch, words, says):
    monkeypatch.chdir(tmp_path)
    command = ["data=text", f"data.root={folder}", "data.cache=c", "model=lstm_lm", "device=cpu"]
    refused(capsys, *command, *words, says=f"mprun: {says}", code=2)
    assert [path.name for path in tmp_path.iterdir() if path.name != "c"] == ["text"]


def test_the_token_that_ends_a_line(folder, tmp_path):
    names = ["<unk>", "the", "END"]
    words(tmp_path / "t.json", names)
    for named in (None, "stop"):
        listed = "stop; " if named else "</s>, <|endoftext|>, "
        with raises_line(ValueError, f"end_token={named}: t.json has no {listed}"):
            source(folder, tmp_path / "t.json", end_token=named)
    assert trained(source(folder, tmp_path / "t.json", end_token="END"))[:6] == [1, 0, 0, 0, 2, 2]


@pytest.mark.parametrize(
    ("content", "library"), [(b"{}", "tokenizers"), (b"\n\x0f", "sentencepiece")]
)
def test_without_the_library(folder, tmp_path, capsys, monkeypatch, content, library):
    monkeypatch.setitem(sys.modules, library, None)
    path = tmp_path / "file"
    path.write_bytes(content)
    command = ["data=text", f"data.root={folder}", f"data.tokenizer={path}", "model=lstm_lm"]
    command += [f"data.cache={tmp_path}/c", "device=cpu", f"output_root={tmp_path}/runs"]
    # A line too long loses its middle.
    says = ["mprun: data.tokenizer=/", ": is read by ", "'mprun[subword]')"]
    refused(capsys, *command, says=says, code=2)
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize("make", [byte_level, sentences], ids=["tokenizers", "sentencepiece"])
def test_wikitext_2(wikitext_2, tmp_path, make):
    valid, train = ((wikitext_2 / f"wiki.{own}.tokens").read_text() for own in ("valid", "train"))
    path = tmp_path / "file"
    _, encode, end = make(path, valid, 8000)
    text = source(wikitext_2, path, cache=tmp_path / "cache", sequence_length=100_000)
    wanted = coded(train, encode, end)
    assert text.train_tokens == len(wanted) > 2_088_628  # more than its words
    assert trained(text)[-100_000:] == wanted[: len(wanted) // 100_000 * 100_000][-100_000:]
    assert text.description["eval_samples"] / (3_760 + 213_886) > 1
