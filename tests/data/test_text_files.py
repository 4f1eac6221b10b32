"""Which files of a folder are the splits of a text."""

import pytest

from mprun.data.source import DamagedData, DataError
from mprun.data.text import find_text_files

from ..helpers import raises_line


def made(folder, *names):
    for name in names:
        (folder / name).write_text("a\n")
    return folder


@pytest.mark.parametrize(
    ("train", "valid", "test"),
    [
        ("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens"),
        ("wiki.train.raw", "wiki.valid.raw", "wiki.test.raw"),
        ("ptb.train.txt", "ptb.valid.txt", "ptb.test.txt"),
        ("train.txt", "valid.txt", "test.txt"),
        ("train.tokens", "validation.tokens", "test.tokens"),
        ("train.txt", "val.txt", "test.txt"),
        ("train.txt", "dev.txt", "test.txt"),
    ],
)
def test_recognised_names(tmp_path, train, valid, test):
    made(tmp_path, train, valid, test, "README", "train.json", "ptb.char.train.txt")
    assert find_text_files(tmp_path, ("train", "valid")) == {
        "train": tmp_path / train,
        "valid": tmp_path / valid,
    }
    assert find_text_files(str(tmp_path), ("train", "test"))["test"] == tmp_path / test


def test_only_the_splits_asked_for_are_needed(tmp_path):
    made(tmp_path, "train.txt", "test.txt")
    assert set(find_text_files(tmp_path, ("train", "test"))) == {"train", "test"}
    with pytest.raises(DataError) as caught:
        find_text_files(tmp_path, ("train", "valid"))
    assert caught.type is DataError and str(caught.value) == (
        f"data.root={tmp_path}: has no valid split: its file must be one of wiki.valid.tokens, "
        "wiki.valid.raw, ptb.valid.txt, valid.txt, valid.tokens (or validation, val, dev for "
        "valid); found test.txt, train.txt"
    )


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (
            ["wiki.train.tokens", "ptb.valid.txt"],
            "wiki.train.tokens and ptb.valid.txt follow different name patterns, so they may be",
        ),
        (
            ["wiki.train.tokens", "wiki.train.raw", "valid.txt"],
            "several files of the train split; keep only one: wiki.train.raw, wiki.train.tokens",
        ),
    ],
)
def test_what_is_not_clear(tmp_path, names, says):
    made(tmp_path, *names)
    with raises_line(DamagedData, f"{tmp_path}: ", says):
        find_text_files(tmp_path, ("train", "valid"))
    with raises_line(DamagedData, "nowhere: No such file or directory"):
        find_text_files(tmp_path / "nowhere", ("train", "valid"))


@pytest.mark.parametrize("names", [[], ["train.txt/", "valid.txt"]])
def test_a_folder_without_a_split_is_the_wrong_one(tmp_path, names):
    for name in names:
        (tmp_path / name).mkdir() if name.endswith("/") else made(tmp_path, name)
    with raises_line(DataError, f"data.root={tmp_path}: has no train split") as caught:
        find_text_files(tmp_path, ("train", "valid"))
    assert caught.type is DataError
