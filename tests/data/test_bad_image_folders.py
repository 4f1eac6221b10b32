"""Image folders that cannot be used: refused in one line that names the file or folder."""

import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest

from mprun.data.image_files import find_imagenet, find_images
from mprun.data.source import DamagedData, DataError

from ..helpers import raises_line
from .made_images import class_folders, encoded, split_folders, write


def find(root, layout="classes", eval_share=0.3, make=find_images, **options):
    return make(str(root), layout=layout, eval_share=eval_share, **options)


def refused(message, root, **options):
    """In one line, which must hold `message`."""
    with raises_line(DamagedData, message):
        find(root, **options)


@pytest.fixture
def readable_by_others():
    """A folder outside of pytest's, which only its owner may enter."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@contextmanager
def as_ordinary_user():
    """Without root's right to read everything."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


def images(root, *paths):
    for path in paths:
        write(root / path, encoded(1))


# What is done to train and val, which have an image each of the classes a and b; what is said.
DAMAGE = [
    (
        lambda root: images(root, "train/x.jpg"),
        "/train/x.jpg: is an image outside of the class folders",
    ),
    (lambda root: write(root / "val/c/x.txt", b"?"), "/val/c: an empty class folder"),
    (lambda root: write(root / "train/c/x.txt", b"?"), "/train/c: an empty class folder"),
    (
        lambda root: shutil.rmtree(root / "val/b"),
        "/train/b: is a class that does not exist in {root}/val",
    ),
    (
        lambda root: images(root, "val/c/1.jpg", "val/d/1.jpg"),
        "/val/c: is a class (and 1 more) that does not exist in {root}/train",
    ),
    (
        lambda root: shutil.rmtree(root / "val"),
        ": contains train/ but no held-out split; looked for val/, valid/, validation/, test/",
    ),
    (lambda root: shutil.rmtree(root / "train"), "/train: no such folder, but val/ exists"),
    (lambda root: write(root / "val/a/1.jpg", b""), "/val/a/1.jpg: is an empty file (0 bytes)"),
    *(
        (
            lambda root, name=name: write(root / "train/a" / name, b"?"),
            f"/train/a/{name}: is neither an image of a known format",
        )
        for name in ("x.gif", "x.jpg.part", "x.npy", "x.heic")
    ),
    (
        lambda root: (root / "train/a/x.jpg").symlink_to(root / "nowhere.jpg"),
        "/train/a/x.jpg: a link to nothing",
    ),
    (lambda root: os.mkfifo(root / "train/a/x.jpg"), "/train/a/x.jpg: is not a regular file"),
    # Sparse: takes no room.
    (
        lambda root: os.truncate(root / "train/a/0000.jpg", 2**28 + 1),
        "/train/a/0000.jpg: larger than 256 MiB",
    ),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE)
def test_a_damaged_folder_of_two_splits_is_refused_by_name(tmp_path, damage, message):
    damage(split_folders(tmp_path, {"a": 1, "b": 1}))
    refused(f"{tmp_path}{message.format(root=tmp_path)}", tmp_path)


def wrong_root(message, root, **options):
    """Nothing there is damaged: the folder holds other things than those asked for."""
    with raises_line(DataError, "data.root", message) as caught:
        find(root, **options)
    assert caught.type is DataError


def test_a_held_out_split_without_class_folders(tmp_path):
    class_folders(tmp_path / "train", {"a": 1, "b": 1})
    images(tmp_path, "val/1.jpg")
    wrong_root(f"{tmp_path}/val: contains images but no class folders", tmp_path)


def test_folders_without_splits(tmp_path):
    wrong_root(f"{tmp_path}: contains no class folders and no images", tmp_path)
    refused(f"{tmp_path}: no images in it", tmp_path, layout="flat")
    refused(f"{tmp_path}/gone: cannot be listed: No such file", tmp_path / "gone")
    images(tmp_path, "1.jpg")
    loose = f"{tmp_path}: contains images but no class folders; for images without labels set "
    wrong_root(f"{loose}data.layout=", tmp_path)
    (tmp_path / "1.jpg").unlink()
    class_folders(tmp_path, {"a": 1, "b": 1})
    refused(f"{tmp_path}: 2 images are too few", tmp_path, eval_share=0.001)
    (tmp_path / "c").mkdir()
    refused(f"{tmp_path}/c: an empty class folder", tmp_path)


def test_an_empty_file_may_be_skipped_until_it_is_read(tmp_path):
    root = split_folders(tmp_path, {"a": 2})
    write(root / "val/a/0001.jpg", b"")
    kept = find(root, on_corrupt="skip")
    assert len(kept.held_out) == 2
    with raises_line(DamagedData, "val/a/0001.jpg: is an empty file"):
        kept.held_out.read(1)


def test_an_unreadable_file_and_folder(readable_by_others):
    root = split_folders(readable_by_others, {"a": 1})
    file = root / "train/a/0000.jpg"
    file.chmod(0)
    with as_ordinary_user():
        refused(f"{file}: cannot be read: Permission denied", root)
        kept = find(root, on_corrupt="skip").train
        assert len(kept) == 1
        with raises_line(DamagedData, "0000.jpg: cannot be read: Permission denied"):
            kept.read(0)
    file.parent.chmod(0)
    with as_ordinary_user():
        refused(f"{file.parent}: cannot be listed: Permission denied", root)
    file.parent.chmod(0o755)


def test_files_and_folders_that_vanish(tmp_path):
    root = split_folders(tmp_path / "data", {"a": 2})
    train = find(root).train
    for number, gone in enumerate((root / "train/a/0000.jpg", root)):
        gone.unlink() if gone.is_file() else shutil.rmtree(gone)
        with pytest.raises(DamagedData, match=f"^{gone}: is gone$"):
            train.read(number)
    assert DamagedData.exit_code == 4


@pytest.mark.slow
def test_imagenet_needs_a_thousand_classes(tmp_path):
    with raises_line(ValueError, "layout='flat' is not allowed: ImageNet"):
        find(tmp_path, layout="flat", make=find_imagenet)
    wrong_root(f"={tmp_path}: contains no ImageNet; needs train/", tmp_path, make=find_imagenet)
    write(tmp_path / "ILSVRC2012_img_train.tar", b"")
    extract = "torchvision.datasets.ImageNet(root, split) extracts the archives into them"
    wrong_root(extract, tmp_path, make=find_imagenet)
    split_folders(tmp_path, {"n00000001": 1, "n00000002": 1})
    two = f"{tmp_path}/train: has 2 classes, must have 1000 as in ImageNet"
    refused(two, tmp_path, make=find_imagenet)
    split_folders(tmp_path, {f"n{number:08}": 1 for number in range(1000)})
    found = find(tmp_path, make=find_imagenet)
    assert found.train.labels.tolist() == found.held_out.labels.tolist() == list(range(1000))
