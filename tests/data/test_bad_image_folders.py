"""Image folders that cannot be used: refused in one line that names the file or folder."""

import os
import re
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest

from mprun.data.image_files import find_images
from mprun.data.source import DamagedData

from .made_images import class_folders, encoded, split_folders, write


def find(root, layout="classes", eval_share=0.3, imagenet=False, **options):
    return find_images(
        str(root), layout=layout, eval_share=eval_share, imagenet=imagenet, **options
    )


def refused(message, root, **options):
    """The one line of the error, which must hold `message`, literally."""
    with pytest.raises(DamagedData, match=re.escape(message)) as caught:
        find(root, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


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


def test_images_without_class_folders(tmp_path):
    write(tmp_path / "1.jpg", encoded(1))
    refused(
        f"{tmp_path}: images but no class folders in it; without labels: data.layout=", tmp_path
    )
    split_folders(tmp_path / "b", {"x": 1})
    shutil.rmtree(tmp_path / "b/val/x")
    write(tmp_path / "b/val/1.jpg", encoded(1))
    refused(f"{tmp_path}/b/val: images but no class folders", tmp_path / "b")


def test_nothing_at_all(tmp_path):
    refused(f"{tmp_path}: no class folders and no images in it", tmp_path)
    refused(f"{tmp_path}: no images in it", tmp_path, layout="flat")
    refused(f"{tmp_path}/gone: cannot be listed: No such file", tmp_path / "gone")


def test_an_image_beside_the_class_folders(tmp_path):
    split_folders(tmp_path, {"a": 1})
    write(tmp_path / "train/cover.jpg", encoded(1))
    refused(f"{tmp_path}/train/cover.jpg: an image beside the class folders", tmp_path)


@pytest.mark.parametrize("folder", ["train", "val", "."])
def test_an_empty_class_folder(tmp_path, folder):
    if folder == ".":
        class_folders(tmp_path, {"a": 3})
    else:
        split_folders(tmp_path, {"a": 1})
    write(tmp_path / folder / "empty" / "notes.txt", b"no image")
    shown = os.path.normpath(f"{tmp_path}/{folder}/empty")
    refused(f"{shown}: an empty class folder", tmp_path)


def test_classes_that_differ_between_the_splits(tmp_path):
    split_folders(tmp_path, {"a": 1, "b": 1})
    shutil.rmtree(tmp_path / "val/b")
    refused(f"{tmp_path}/train/b: a class that is not in {tmp_path}/val", tmp_path)
    class_folders(tmp_path / "val", {"b": 1, "c": 1, "d": 1})
    refused(f"{tmp_path}/val/c: a class (and 1 more) that is not in {tmp_path}/train", tmp_path)


def test_a_missing_split(tmp_path):
    class_folders(tmp_path / "train", {"a": 1})
    message = refused(f"{tmp_path}: has train/ but no held-out split", tmp_path)
    assert "val/, valid/, validation/, test/" in message
    (tmp_path / "train").rename(tmp_path / "val")
    refused(f"{tmp_path}/train: no such folder, but val/ is beside it", tmp_path)


def test_too_few_images_to_hold_one_out(tmp_path):
    class_folders(tmp_path, {"a": 1, "b": 1})
    refused(f"{tmp_path}: 2 images are too few", tmp_path, eval_share=0.001)


def test_an_empty_file(tmp_path):
    root = split_folders(tmp_path, {"a": 2})
    write(root / "val/a/0001.jpg", b"")
    refused(f"{root}/val/a/0001.jpg: an empty file (0 bytes)", root)
    kept = find(root, on_corrupt="skip")
    assert len(kept.held_out) == 2
    with pytest.raises(DamagedData, match="val/a/0001.jpg: an empty file"):
        kept.held_out.read(1)


@pytest.mark.parametrize("name", ["x.gif", "x.jpg.part", "x.npy", "x.heic"])
def test_a_file_of_unknown_kind(tmp_path, name):
    split_folders(tmp_path, {"a": 1})
    write(tmp_path / "train/a" / name, b"?")
    refused(f"{tmp_path}/train/a/{name}: neither an image of a known format", tmp_path)


def test_a_link_to_nothing_and_a_pipe(tmp_path):
    split_folders(tmp_path, {"a": 1})
    path = tmp_path / "train/a/x.jpg"
    path.symlink_to(tmp_path / "nowhere.jpg")
    refused(f"{path}: a link to nothing", tmp_path)
    path.unlink()
    os.mkfifo(path)
    refused(f"{path}: not a regular file", tmp_path)


def test_a_file_too_large_to_be_an_image(tmp_path):
    split_folders(tmp_path, {"a": 1})
    os.truncate(tmp_path / "train/a/0000.jpg", 2**28 + 1)  # sparse: takes no room
    refused(f"{tmp_path}/train/a/0000.jpg: larger than 256 MiB", tmp_path)


def test_an_unreadable_file_and_folder(readable_by_others):
    root = split_folders(readable_by_others, {"a": 1})
    file = root / "train/a/0000.jpg"
    file.chmod(0)
    with as_ordinary_user():
        refused(f"{file}: cannot be read: Permission denied", root)
        kept = find(root, on_corrupt="skip").train
        assert len(kept) == 1
        with pytest.raises(DamagedData, match="0000.jpg: cannot be read: Permission denied"):
            kept.read(0)
    file.parent.chmod(0)
    with as_ordinary_user():
        refused(f"{file.parent}: cannot be listed: Permission denied", root)
    file.parent.chmod(0o755)


def test_a_file_that_cannot_be_read(tmp_path):
    # A folder where the file was: reading fails for every user, root included.
    train = find(split_folders(tmp_path, {"a": 1})).train
    os.unlink(train.name(0))
    os.mkdir(train.name(0))
    with pytest.raises(DamagedData, match="a/0000.jpg: cannot be read: Is a directory"):
        train.read(0)


def test_files_and_folders_that_vanish(tmp_path):
    root = split_folders(tmp_path / "data", {"a": 2})
    train = find(root).train
    os.unlink(train.name(0))
    with pytest.raises(DamagedData, match=f"^{root}/train/a/0000.jpg: is gone$"):
        train.read(0)
    shutil.rmtree(root)
    with pytest.raises(DamagedData, match=f"^{root}: is gone$"):
        train.read(1)
    assert DamagedData.exit_code == 4


def test_arguments():
    with pytest.raises(ValueError, match="layout='flat' is not allowed: ImageNet"):
        find(".", layout="flat", imagenet=True)


def test_imagenet_needs_a_thousand_classes(tmp_path):
    message = refused(
        f"{tmp_path}: no ImageNet here; needs train/ and val/", tmp_path, imagenet=True
    )
    for archive in ("img_train.tar", "img_val.tar", "devkit_t12.tar.gz"):
        assert f"ILSVRC2012_{archive}" in message
    content = encoded(1)
    for folder in ("train", "val"):
        for i in range(999):
            write(tmp_path / folder / f"n{i:08d}" / "1.JPEG", content)
    refused(f"{tmp_path}/train: 999 classes, ImageNet has 1000", tmp_path, imagenet=True)
    for folder in ("train", "val"):
        class_folders(tmp_path / folder, {"n99999999": 1})
    found = find(tmp_path, imagenet=True)
    assert (len(found.classes), len(found.train), len(found.held_out)) == (1000, 1000, 1000)
