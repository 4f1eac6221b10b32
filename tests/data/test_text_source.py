"""Text folders end to end: counts by hand and of WikiText-2, the cache, bad files."""

import hashlib
import os

import pytest
import torch

from mprun.data import DataError
from mprun.data.source import DamagedData

from ..helpers import configured, raises_line, refused

# b 5, <eos> 4, c 4, a 3, d 3, e 1
TRAIN = "b c a b\n\nd b a d b d c\r\nc e a c b\n"
VALID = "a x b\nE <unk> e\n" * 4


def made(root):
    (root / "train.txt").write_text(TRAIN, newline="")
    (root / "valid.txt").write_text(VALID)
    return root


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "text"
    root.mkdir()
    return made(root)


def source(root, **options):
    sizes = {"sequence_length": 4, "batch_size": 2, "seed": 0, "device": "cpu"}
    given = {**sizes, "cache": root.parent / "cache", **options}
    return configured("text", root=root, **given)


def held_out(text) -> list[int]:
    """The held-out tokens as the streams deliver them, without the last target."""
    return torch.cat([tokens for tokens, _ in text.eval_batches()]).t().flatten().tolist()


def test_by_hand(folder):
    text = source(folder, rotate=False)
    assert text.vocabulary == ("<unk>", "<eos>", "b", "c", "a", "d", "e")
    assert text.vocab_size == 8
    wanted = [2, 3, 4, 2, 1, 1, 5, 2, 4, 5, 2, 5, 3, 1, 3, 6, 4, 3, 2, 1]
    assert text.batches_per_epoch == 2  # 20 tokens in 2 streams of 10
    for batch, starts in enumerate([(0, 10), (4, 14)]):
        tokens, targets = text.train_batch(batch)
        for stream, start in enumerate(starts):
            assert tokens[:, stream].tolist() == wanted[start : start + 4]
            assert targets[:, stream].tolist() == wanted[start + 1 : start + 5]
    # 32 tokens, 31 targets: 15 are left out, then 16 streams of 1 from token 15 to 30.
    assert held_out(text) == ([4, 0, 2, 1, 0, 0, 6, 1] * 4)[15:31]
    lines = " ".join(text.vocabulary[i] for i in wanted).replace("<eos>", "\n")
    assert [line.split() for line in lines.splitlines()] == [*map(str.split, TRAIN.splitlines())]
    about = text.description
    assert (about["files"], about["train_samples"]) == ("train.txt, valid.txt", 20)
    assert (about["eval_samples"], about["eval_streams"]) == (32, 16)
    assert (about["vocab_entries"], about["vocab_size"]) == (7, 8)
    files = folder / "train.txt", folder / "valid.txt"
    hashes = "".join(hashlib.sha256(path.read_bytes()).hexdigest() for path in files)
    assert text.sha256 == hashlib.sha256(hashes.encode()).hexdigest()


def test_limit_and_case(folder):
    assert source(folder, vocab_limit=4).vocabulary == ("<unk>", "<eos>", "b", "c")
    assert source(folder, vocab_limit=4, vocab_multiple=1).vocab_size == 4
    assert held_out(source(folder, vocab_limit=4)) == ([0, 0, 2, 1, 0, 0, 0, 1] * 4)[15:31]
    assert held_out(source(folder, lower=True)) == ([4, 0, 2, 1, 6, 0, 6, 1] * 4)[15:31]
    (folder / "train.txt").write_text("B b <UNK>\n" * 5)
    assert source(folder).vocabulary == ("<unk>", "<eos>", "<UNK>", "B", "b")
    assert source(folder, lower=True).vocabulary == ("<unk>", "<eos>", "b")


def cached(folder) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in (folder.parent / "cache").iterdir()}


def test_encoded_once_by_content(folder):
    first = source(folder)
    wanted = first.train_batch(0)[0].clone()
    entries = cached(folder)
    assert len(entries) == 6  # words, training tokens, held-out tokens, a header each
    moved = folder.rename(folder.parent / "moved")
    os.utime(moved / "train.txt", (0, 0))
    assert torch.equal(source(moved).train_batch(0)[0], wanted)
    assert cached(folder) == entries
    # The other held-out split shares words and training tokens.
    (moved / "test.txt").write_text(VALID + "b\n")
    assert source(moved, eval_split="test").description["eval_samples"] == 34
    assert len(cached(folder)) == 8
    (moved / "train.txt").write_text(TRAIN + "a\n")
    changed = source(moved)
    assert changed.description["train_samples"] == 22
    assert changed.sha256 != first.sha256


def test_passes_over_a_large_file_are_announced(folder, capfd, monkeypatch):
    monkeypatch.setattr("mprun.data.cache.REMEMBERED_ABOVE", 40)
    monkeypatch.setattr("mprun.data.cache.ANNOUNCED_ABOVE", 40)
    assert len(TRAIN) < 40 < len(VALID)
    source(folder)
    path, said = folder / "valid.txt", capfd.readouterr().err
    assert said == f"mprun: hashing {path} (0.0 GB)\nmprun: reading {path} (0.0 GB)\n"
    source(folder)
    assert "reading" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train.txt", b"", "train.txt: no words, 0 bytes"),
        ("valid.txt", b"a\0\n", "valid.txt: a NUL byte, no text file at byte 1, line 1"),
        ("ptb.train.txt", b"a\n", "several files of the train split"),
    ],
)
def test_bad_files_end_a_run_with_one_line(folder, tmp_path, capsys, name, content, message):
    (folder / name).write_bytes(content)
    command_refused(capsys, folder, (f"mprun: {folder}", message), code=4)
    assert not list((tmp_path / "cache").glob(".*"))


def test_a_folder_that_lacks_a_split_is_bad_input_not_damage(folder, capsys):
    (folder / "valid.txt").unlink()
    command_refused(capsys, folder, f"mprun: data.root={folder}: has no valid split", code=2)


def command_refused(capsys, folder, says, code):
    """A run that reads the folder ends before it has a folder of its own."""
    above = folder.parent
    command = ["data=text", f"data.root={folder}", f"data.cache={above}/cache", "model=lstm_lm"]
    refused(capsys, *command, f"output_root={above}/runs", "device=cpu", says=says, code=code)
    assert not (above / "runs").exists()


def test_a_folder_and_a_cache_that_are_none(folder):
    with raises_line(DataError, "name a folder"):
        source(folder, cache=__file__)
    with raises_line(DamagedData, "nowhere: No such file or directory"):
        source(folder / "nowhere")


@pytest.mark.slow
def test_wikitext_2(wikitext_2, tmp_path):
    sizes = {"sequence_length": 35, "batch_size": 20, "cache": tmp_path}
    text = source(wikitext_2, rotate=False, **sizes)
    # Merity et al. 2016, table 1, and one <eos> a line.
    assert text.description["train_samples"] == 2_051_910 + 36_718 == 2_088_628
    assert text.description["eval_samples"] == 213_886 + 3_760 == 217_646
    assert text.description["vocab_entries"] == text.vocab_size - 2 == 33_278
    test = source(wikitext_2, eval_split="test", eval_tokens=10**6, **sizes)
    assert test.description["eval_samples"] == 241_211 + 4_358 == 245_569

    with open(wikitext_2 / "wiki.train.tokens", encoding="utf-8") as file:
        words = [word for line in file for word in [*line.split(), "<eos>"]]
    stride = len(words) // 20
    for index in (0, 1, 1000, text.batches_per_epoch - 1):
        tokens, _ = text.train_batch(index)
        for stream in (0, 7, 19):
            start = stride * stream + 35 * index
            assert [text.vocabulary[i] for i in tokens[:, stream].tolist()] == words[start:][:35]
