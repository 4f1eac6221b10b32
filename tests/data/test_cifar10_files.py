"""CIFAR-10's layouts on disk: read to the same arrays, and what is refused by name."""

import hashlib
import os
import pickle
import struct

import numpy as np
import pytest

from mprun.data.cifar10 import MD5, read_cifar10, read_python_batches
from mprun.data.source import DamagedData, DataError

from ..helpers import raises_line
from .made_images import encoded, write

pytestmark = pytest.mark.usefixtures("cache")


def python_2_batch(pixels, labels):
    """A batch as Python 2 wrote the published files: byte strings, numpy.core, protocol 2."""

    def text(content):
        return b"U" + bytes([len(content)]) + content

    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85" + text(b"b") + b"\x87R"
    )
    shape = b"M" + struct.pack("<H", len(pixels)) + b"M" + struct.pack("<H", 3072) + b"\x86"
    dtype = b"cnumpy\ndtype\n" + text(b"u1") + b"K\0K\x01\x87R(K\x03" + text(b"|")
    dtype += b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb"
    content = b"T" + struct.pack("<I", pixels.size) + pixels.tobytes()
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    state = b"(K\x01" + shape + dtype + b"\x89" + content + b"tb"
    return b"\x80\x02}(" + text(b"data") + array + state + text(b"labels") + numbers + b"u."


def python_batches(folder, change=None):
    """Six files of 20 images; their MD5 sums, as `change` (name -> content) leaves them."""
    random = np.random.Generator(np.random.PCG64(5))
    pixels, labels, md5 = [], [], {}
    for number, name in enumerate(MD5):
        pixels.append(random.integers(0, 256, (20, 3072), dtype=np.uint8))
        labels.append(random.integers(0, 10, 20).tolist())
        content = python_2_batch(pixels[-1], labels[-1])
        if number % 2:  # as Python 3 and NumPy 2 write it
            content = pickle.dumps({"data": pixels[-1], "labels": labels[-1]}, protocol=2)
        content = (change or {}).get(name, content)
        md5[name] = hashlib.md5(write(folder / name, content).read_bytes()).hexdigest()
    return np.stack(pixels).reshape(6, 20, 3, 32, 32), np.array(labels), md5


def test_pickled_batches(tmp_path):
    pixels, labels, md5 = python_batches(tmp_path)
    with open(tmp_path / "data_batch_1", "rb") as file:  # what was made is what Python reads
        plain = pickle.load(file, encoding="latin1")
    assert (plain["data"].reshape(20, 3, 32, 32) == pixels[0]).all()
    found = read_python_batches(str(tmp_path), md5)
    for split, own in ((found.train, slice(5)), (found.held_out, slice(5, 6))):
        assert (split.images == pixels[own].reshape(-1, 3, 32, 32)).all()
        assert (split.labels == labels[own].flatten()).all() and split.labels.dtype == np.int64


def test_pickled_batches_are_checked_by_md5_before_they_are_read(tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    _, _, md5 = python_batches(folder)
    for root in (tmp_path, folder):
        with raises_line(DamagedData, f"{folder}/data_batch_1: MD5 is {md5['data_batch_1']}"):
            read_cifar10(str(root))
    (folder / "data_batch_1").unlink()
    with pytest.raises(DamagedData, match=f"{folder}/data_batch_1: cannot be read: No such file"):
        read_cifar10(str(tmp_path))


LAST = encoded(1, size=(32, 32))


class MakesFolder:
    """Pickles to a call that makes the folder CANARY."""

    def __reduce__(self):
        return os.mkdir, ("CANARY",)


def test_a_pickle_of_another_md5_runs_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    batch = pickle.dumps({"data": MakesFolder(), "labels": [1]}, protocol=2)
    _, _, md5 = python_batches(tmp_path)
    write(tmp_path / "data_batch_2", batch)
    with raises_line(DamagedData, f"{tmp_path}/data_batch_2: MD5 is "):
        read_python_batches(str(tmp_path), md5)
    assert not (tmp_path / "CANARY").exists()
    pickle.loads(batch)  # the canary is alive
    assert (tmp_path / "CANARY").exists()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (
            lambda root: write(root / "train/cat/0003.jpg", encoded(1, size=(32, 31))),
            "{root}/train/cat/0003.jpg: has 32 x 31 pixels, must have 32 x 32 as in CIFAR-10",
        ),
        (
            lambda root: [write(root / name / "x/1.jpg", LAST) for name in ("train", "test")],
            "{root}: has 11 classes, must have 10 as in CIFAR-10",
        ),
        (
            lambda root: (root / "test").rename(root / "testing"),
            "{root}: contains train/ but no held-out split",
        ),
        (
            lambda root: write(root / "test/dog/0001.jpg", LAST[: len(LAST) // 2]),
            "{root}/test/dog/0001.jpg: cannot be decoded: ",
        ),
    ],
)
def test_what_is_no_cifar_10_is_refused_by_name(root, damage, says):
    damage(root)
    with raises_line(DamagedData, says.format(root=root)):
        read_cifar10(str(root))


@pytest.mark.parametrize(
    ("file", "says"),
    [
        (None, "no CIFAR-10 here; needs cifar-10-batches-py/, "),
        ("cifar10-jpeg.tar.xz", "cifar10-jpeg.tar.xz: an archive; extract it: needs "),
        ("data_batch_1.bin", "binary files are not read; needs cifar-10-batches-py/, or train/"),
        ("cifar-10-batches-bin/data_batch_1.bin", "torchvision.datasets.CIFAR10(root, download="),
    ],
)
def test_a_folder_without_cifar_10_is_the_wrong_one(file, says, tmp_path):
    if file is not None:
        write(tmp_path / file, b"?")
    with raises_line(DataError, "data.root: ", f"{tmp_path}", says) as caught:
        read_cifar10(str(tmp_path))
    assert caught.type is DataError and len(str(caught.value)) <= 200 + len(str(tmp_path))
