"""Which images are found, with which labels, in which split; and what is refused by name."""

import hashlib
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import IMG_EXTENSIONS

from mprun.data.image_files import IMAGE_EXTENSIONS, find_images

from .made_images import class_folders, encoded, split_folders, write


def find(root, layout="classes", eval_share=0.3, **options):
    return find_images(str(root), layout=layout, eval_share=eval_share, **options)


def names(split):
    return [split.name(i) for i in range(len(split))]


def test_extensions_are_those_of_torchvision():
    assert IMAGE_EXTENSIONS == set(IMG_EXTENSIONS)


def test_order_and_labels_are_those_of_torchvision(tmp_path):
    counts = {"zebra": 3, "Ant": 2, "bee 2": 2, "bee": 1, "éclair": 1}
    split_folders(tmp_path, counts)
    for path in ("bee/b/1.png", "bee/a/1.JPEG", "bee/a b/1.webp", "bee/a/x/1.tif", "Ant/0.BMP"):
        write(tmp_path / "train" / path, encoded(7))
    found = find(tmp_path)
    for split, folder in ((found.train, "train"), (found.held_out, "val")):
        expected = ImageFolder(tmp_path / folder)
        assert list(split.classes) == expected.classes == sorted(counts)
        assert list(zip(names(split), split.labels.tolist(), strict=True)) == expected.samples
        assert split.labels.dtype == np.int64
    assert found.train.classes == found.held_out.classes
    assert found.split_rule == "folders train and val"


@pytest.mark.parametrize("present", [("val", "test"), ("valid", "validation", "test"), ("test",)])
def test_the_first_held_out_folder_counts(tmp_path, present):
    class_folders(tmp_path / "train", {"a": 1})
    for name in present:
        class_folders(tmp_path / name, {"a": 1})
    found = find(tmp_path)
    assert names(found.held_out) == [f"{tmp_path}/{present[0]}/a/0000.jpg"]


def test_a_pickled_split_holds_no_object_per_image(tmp_path):
    root = split_folders(tmp_path, {"a": 60})
    pickled = pickle.dumps(find(root).train)
    # 3 numbers of 8 bytes and a name of 16 bytes an image; a str or int object would be more.
    assert len(pickled) < 60 * (3 * 8 + len("train/a/0000.jpg")) + 1500
    train = pickle.loads(pickled)
    for number, name in enumerate(names(train)):
        assert train.read(number) == Path(name).read_bytes()


def test_one_folder_is_split_by_the_hash_of_paths(tmp_path):
    class_folders(tmp_path, {"a": 40, "b": 40})
    found = find(tmp_path, eval_share=0.3)
    assert found.sha256 == find(tmp_path, eval_share=0.6).sha256

    def share(path):
        digest = hashlib.sha256(os.path.relpath(path, tmp_path).encode()).hexdigest()
        return int(digest[:16], 16) / 2**64

    assert all(share(name) >= 0.3 for name in names(found.train))
    assert all(share(name) < 0.3 for name in names(found.held_out))
    assert len(found.train) + len(found.held_out) == 80
    assert set(found.held_out.labels) == {0, 1}
    for split in (found.train, found.held_out):
        classes = ["ab"[label] for label in split.labels]
        assert [os.path.dirname(name)[-1] for name in names(split)] == classes


def test_another_file_moves_no_file_between_splits(tmp_path):
    class_folders(tmp_path, {"a": 30, "b": 30})
    before = find(tmp_path)
    for n in range(20):
        write(tmp_path / "a" / f"new{n}.jpg", encoded(n))
    os.unlink(before.train.name(3))
    after = find(tmp_path)
    assert set(names(before.held_out)) <= set(names(after.held_out))
    assert set(names(before.train)) - set(names(after.train)) == {before.train.name(3)}


def test_every_class_keeps_a_training_image(tmp_path):
    class_folders(tmp_path, {name: 1 for name in "abcdefgh"} | {"i": 20})
    found = find(tmp_path, eval_share=0.95)
    assert set(found.train.labels) == set(range(9))
    assert len(found.held_out) > 10


def test_flat_takes_any_depth_and_has_no_labels(tmp_path):
    for path in ("1.jpg", "x/2.png", "x/y/z/3.JPG", "b/4.webp"):
        write(tmp_path / path, encoded(1))
    write(tmp_path / "list_attr.txt", b"side file")
    found = find(tmp_path, layout="flat", eval_share=0.5)
    everything = names(found.train) + names(found.held_out)
    paths = sorted(os.path.relpath(name, tmp_path) for name in everything)
    assert paths == ["1.jpg", "b/4.webp", "x/2.png", "x/y/z/3.JPG"]
    assert found.train.classes == found.held_out.classes == ()
    assert not found.train.labels.any() and found.train.labels.dtype == np.int64
    assert found.ignored == 1


def test_flat_uses_split_folders_if_both_exist(tmp_path):
    write(tmp_path / "train/1.jpg", encoded(1))
    write(tmp_path / "train/deep/2.jpg", encoded(1))
    everything = find(tmp_path, layout="flat", eval_share=0.5)
    assert everything.split_rule.startswith("SHA-256")
    write(tmp_path / "test/3.jpg", encoded(1))
    found = find(tmp_path, layout="flat")
    assert names(found.train) == [f"{tmp_path}/train/1.jpg", f"{tmp_path}/train/deep/2.jpg"]
    assert names(found.held_out) == [f"{tmp_path}/test/3.jpg"]


def test_hidden_and_side_files_are_passed_over(tmp_path):
    split_folders(tmp_path, {"a": 2})
    write(tmp_path / "train/a/._0000.jpg", b"macOS")
    write(tmp_path / "train/a/.hidden.jpg", b"")
    write(tmp_path / "train/.git/x.jpg", b"")
    for n, name in enumerate(("labels.csv", "README", "a.xml", "Thumbs.db")):
        write(tmp_path / ("train/a" if n % 2 else "train") / name, b"text")
    found = find(tmp_path)
    assert (len(found.train), found.ignored) == (2, 4)
    assert found.train.classes == ("a",)


def test_the_hash_is_of_names_and_content_wherever_they_lie(tmp_path):
    first = split_folders(tmp_path / "one", {"a": 2, "b": 1})
    second = shutil.copytree(first, tmp_path / "elsewhere" / "two")
    digest = hashlib.sha256(b"1:a1:b")
    for path in sorted(path for path in first.rglob("*") if path.is_file()):
        for part in (os.path.relpath(path, first).encode(), path.read_bytes()):
            digest.update(b"%d:" % len(part) + part)
    assert find(first).sha256 == find(second).sha256 == digest.hexdigest()
    assert find(first).sha256_of == "content"
    changed = second / "val/b/0000.jpg"
    changed.write_bytes(changed.read_bytes()[:-1] + b"\0")
    assert find(second).sha256 != find(first).sha256


def test_large_data_are_hashed_by_names_and_sizes(tmp_path):
    root = split_folders(tmp_path, {"a": 1})
    for folder, size in (("train", 2**27), ("val", 2**27 + 1)):
        os.truncate(root / folder / "a/0000.jpg", size)  # sparse: takes no room
    found = find(root)
    expected = hashlib.sha256(b"1:a16:train/a/0000.jpg134217728\n14:val/a/0000.jpg134217729\n")
    assert (found.sha256, found.sha256_of) == (expected.hexdigest(), "names and sizes")


def test_links_are_followed_and_loops_end(tmp_path):
    root = split_folders(tmp_path / "data", {"a": 1})
    outside = write(tmp_path / "outside.jpg", encoded(5))
    class_folders(tmp_path / "far", {"b": 1})
    for link, to in (
        *(("train/a/link.jpg", outside), ("train/b", tmp_path / "far/b")),
        *(("train/a/loop", root / "train/a"), ("train/a/up", root / "train")),
        *(("train/a/top", root), ("val/b", tmp_path / "far/b")),
    ):
        (root / link).symlink_to(to)
    train = find(root).train
    paths = [os.path.relpath(name, root) for name in names(train)]
    assert paths == ["train/a/0000.jpg", "train/a/link.jpg", "train/b/0000.jpg"]
    assert train.read(1) == outside.read_bytes()


def test_names_that_are_no_utf8_or_hold_a_line_break(tmp_path):
    folder = split_folders(tmp_path, {"a": 1}) / "train/a"
    for name in (b"\xff.jpg", b"two\nlines.jpg"):
        write(folder / os.fsdecode(name), encoded(3))
    train = find(tmp_path).train
    assert names(train)[1:] == [f"{folder}/two\\nlines.jpg", f"{folder}/\\xff.jpg"]
    assert train.read(1) == train.read(2) == encoded(3)
