"""nanoGPT's and llm.c's files of tokens: values, boundaries, and what is refused."""

import gzip
import io

import numpy as np
import pytest
import torch

from mprun.data import TokenSource
from mprun.data.source import DamagedData, DataError

from ..helpers import ONE_CORE, configured, raises_line, run

SIZES = {"batch_size": 4, "sequence_length": 5, "seed": 3, "device": "cpu"}
WORDS = 65_536
TRAIN = (np.arange(103) * 631 + 40_000) % WORDS  # up to 65,240: beyond int16
HELD_OUT = np.arange(40, 0, -1)


def header(numbers, dtype="<i4"):
    return np.array([*numbers, *[0] * (256 - len(numbers))], dtype).tobytes()


def write(path, tokens, head=None, dtype="<u2"):
    tokens = np.asarray(tokens, dtype).tobytes()
    path.write_bytes((b"" if head is None else header(head)) + tokens)


def made(root, dtype="<u2"):
    write(root / "train.bin", TRAIN, dtype=dtype)
    write(root / "val.bin", HELD_OUT, dtype=dtype)
    return root


@pytest.fixture
def folder(tmp_path):
    return made(tmp_path)


@pytest.fixture
def shards(tmp_path):
    """llm.c's: two for training, in the order of their names."""
    parts = {"train_000002": TRAIN[60:], "train_000001": TRAIN[:60], "val_000000": HELD_OUT}
    for name, tokens in parts.items():
        write(tmp_path / f"fineweb_{name}.bin", tokens, head=(20240520, 1, len(tokens)))
    return tmp_path


@pytest.fixture
def wide(tmp_path):
    """Tokens of four bytes, as of a vocabulary of 128,256."""
    return made(tmp_path, "<u4")


@pytest.fixture
def wide_shards(tmp_path):
    """llm.c's of Llama 3: another magic, another version."""
    for split, tokens in (("train", TRAIN), ("val", HELD_OUT)):
        path = tmp_path / f"fineweb_{split}_000000.bin"
        write(path, tokens, (20240801, 7, len(tokens)), "<u4")
    return tmp_path


def source(root, vocab_size=WORDS, **options):
    return configured("token_files", root=root, vocab_size=vocab_size, **(SIZES | options))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("folder", {}),
        ("folder", {"dtype": "uint16", "vocab_size": 128_256}),
        ("shards", {}),
        ("wide", {"vocab_size": 128_256}),
        ("wide", {"dtype": "uint32"}),
        ("wide", {"dtype": "int32"}),
        ("wide_shards", {}),
    ],
)
def test_batches_are_those_of_the_tokens_in_memory(kind, options, request):
    files = source(request.getfixturevalue(kind), **options)
    memory = TokenSource(*map(torch.from_numpy, (TRAIN, HELD_OUT)), vocab_size=WORDS, **SIZES)
    assert files.batches_per_epoch == memory.batches_per_epoch == 5
    for index in range(3 * files.batches_per_epoch):
        for ours, theirs in zip(files.train_batch(index), memory.train_batch(index), strict=True):
            assert ours.dtype == torch.int64 and torch.equal(ours, theirs)
    for ours, theirs in zip(files.eval_batches(), memory.eval_batches(), strict=True):
        assert all(map(torch.equal, ours, theirs))


def test_the_vocabulary_is_padded_and_recorded(folder):
    tokens = TRAIN % 50_257
    write(folder / "train.bin", tokens)
    files = configured("token_files", root=folder, **SIZES)
    assert files.vocab_size == 50_304 and files.vocab_size % 64 == 0
    assert files.description["vocab_entries"] == 50_257
    assert (files.description["train_samples"], files.description["eval_samples"]) == (103, 40)
    assert source(folder, 65, vocab_multiple=1).vocab_size == 65


def test_the_hash_covers_every_file(folder):
    before = source(folder).sha256
    assert source(folder, batch_size=2).sha256 == before
    write(folder / "val.bin", HELD_OUT + 1)
    assert source(folder).sha256 != before


def test_a_token_beyond_the_vocabulary_is_named_where_it_is_read(folder):
    most = int(TRAIN.max())
    for index in range(5):
        source(folder, most + 1).train_batch(index)
    files = source(folder, most, rotate=False)
    place = int(TRAIN.argmax())
    with pytest.raises(DamagedData, match=rf"train.bin: token {most} at place {place}, must"):
        for index in range(5):
            files.train_batch(index)
    write(folder / "val.bin", [*HELD_OUT, 60])
    with pytest.raises(DamagedData, match=r"val.bin: token 60 at place 40, must be below"):
        list(source(folder, 60).eval_batches())


@pytest.mark.parametrize(
    ("written", "says"),
    [
        (
            ("train.bin", TRAIN, (20240520, 1, 104)),
            "103 tokens, but its header (version 1) says 104",
        ),
        (
            ("train.bin", TRAIN, (20240520, 2, 103)),
            "train.bin: a header with magic number 20240520 must have 1024 bytes and version 1,",
        ),
        (
            ("val.bin", [20240520, 1, 9], None, "<i4"),
            "and version 1, but the file has 12 bytes and version 1",
        ),
        (("val.bin", [1, 0, 2], None, "u1"), "val.bin: an odd number of bytes (3)"),
        (("val.bin", []), "val.bin: no token"),
        (("a_val_0.bin", HELD_OUT), "contains both of val.bin and *_val_*.bin, must contain one"),
    ],
)
def test_damaged_files_are_refused(folder, written, says):
    name, *content = written
    write(folder / name, *content)
    with raises_line(DamagedData, says):
        source(folder)


REST = bytes(range(200))


def saved(write_to, *arguments):
    written = io.BytesIO()
    write_to(written, *arguments)
    return written.getvalue()


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (saved(np.save, TRAIN), "a NumPy array (.npy)"),
        (saved(np.savez, TRAIN), "a zip archive (.npz, torch.save)"),
        (gzip.compress(TRAIN.astype("<u2").tobytes()), "a gzip archive"),
        ("Größe, in the words of a text that is no file of tokens. ".encode() * 40, "a text"),
        # llm.c's weights of a network, and big-endian tokens with its header.
        (header((20240326, 3, 1024, 50257, 12, 12, 768)) + REST, "a file with a header"),
        (header((20240520, 1, 100), ">i4") + REST, "a file with a header of magic "),
    ],
)
def test_what_is_no_file_of_tokens_is_refused_by_name(folder, content, what):
    (folder / "train.bin").write_bytes(content)
    with raises_line(DataError, f"{folder / 'train.bin'}: begins as {what}") as caught:
        source(folder, 60_000)
    assert caught.type is DataError


def test_a_dtype_that_is_not_the_headers_is_refused(wide_shards):
    wrong = "data.dtype=uint16: its header (version 7) is that of uint32 (allowed here: auto, uin"
    with raises_line(DataError, f"fineweb_train_000000.bin: {wrong}"):
        source(wide_shards, dtype="uint16")
    assert source(wide_shards, dtype="int32").description["train_samples"] == 103


@pytest.mark.parametrize("most", [2, 60, 50_257, 128_256])
@pytest.mark.parametrize("dtype", ["auto", "uint16"])
def test_tokens_of_four_bytes_are_not_read_as_twice_as_many_of_two(folder, dtype, most):
    tokens = np.random.default_rng(0).integers(0, most, 5000)
    write(folder / "train.bin", tokens, dtype="<u4")
    says = "every second word is at most [01], as in 32-bit tokens \\(allowed here: uint32\\)"
    with pytest.raises(DataError, match=f"data.dtype=uint16: {says}"):
        source(folder, dtype=dtype)
    write(folder / "train.bin", tokens % WORDS)  # of two bytes these are right
    assert source(folder, dtype=dtype).description["train_samples"] == 5000


@pytest.mark.parametrize("dtype", ["uint32", "int32"])
def test_tokens_of_two_bytes_are_not_read_as_half_as_many_of_four(folder, dtype):
    write(folder / "train.bin", TRAIN[:102])
    says = "most words are 65536 or more, as pairs of 16-bit tokens (allowed here: uint16)"
    with raises_line(DataError, f"data.dtype={dtype}: {says}"):
        source(folder, dtype=dtype)


def test_what_four_bytes_alone_can_hold(wide):
    write(wide / "train.bin", [5, 6, -1, *range(50)], dtype="<i4")
    with raises_line(DamagedData, "token -1 at place 2, must be below"):
        for index in range(5):
            source(wide, dtype="int32", rotate=False).train_batch(index)
    write(wide / "val.bin", HELD_OUT)
    write(wide / "train.bin", TRAIN, (20240801, 7, 103), "<u4")
    same = "val.bin: its tokens must have the same width as those of train.bin"
    with raises_line(DamagedData, same):
        source(wide)


def test_a_folder_without_a_split_is_the_wrong_one(folder):
    (folder / "val.bin").unlink()
    with raises_line(DataError, f"data.root={folder}: contains neither of val.bin and ") as caught:
        source(folder)
    assert caught.type is DataError


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["data.vocab_size=60"], 0, ""),
        (["data.vocab_size=30"], 4, "train.bin: token "),
        (["data.vocab_size=70000"], 2, "train.bin: data.dtype=uint32: most words are 70000"),
        (["data.vocab_size=1"], 2, "data.vocab_size=1: must be"),
    ],
)
def test_a_run_reads_them_or_ends_with_one_line(folder, tmp_path, capsys, words, code, says):
    write(folder / "train.bin", np.arange(2000) % 60)
    given = ["model=gpt", "model.hidden_size=8", "model.num_layers=1", "model.num_heads=2"]
    given += ["data=token_files", f"data.root='{folder}'", "data.batch_size=2"]
    given += ["data.sequence_length=8", "train.steps=2", *words]
    assert run(tmp_path / "run", *ONE_CORE, *given) == code
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("mprun: ")]
    if code:  # a run that began has a line before it, of how to go on
        assert len(lines) == (2 if code == 4 else 1) and says in lines[-1]
