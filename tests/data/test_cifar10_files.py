"""CIFAR-10's layouts on disk: read to the same arrays, and what is refused by name."""

import hashlib
import os
import pickle
import shutil
import struct

import numpy as np
import pytest

from mprun.data.cifar10 import MD5, read_binary_batches, read_cifar10, read_python_batches
from mprun.data.source import DamagedData

from ..helpers import raises_line
from .made_images import cifar10_folders, encoded, write


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def root(tmp_path):
    return cifar10_folders(tmp_path / "data")


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
    assert (found.train.images == pixels[:5].reshape(100, 3, 32, 32)).all()
    assert (found.train.labels == labels[:5].reshape(100)).all()
    assert (found.held_out.images == pixels[5]).all()
    assert (found.held_out.labels == labels[5]).all()
    assert found.train.labels.dtype == np.int64


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


class Calls:
    """Pickles to a call of `function`."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("where", ["alone", "in a batch"])
@pytest.mark.parametrize(
    ("function", "arguments", "named"),
    [
        (os.mkdir, ("CANARY",), "posix.mkdir"),
        (exec, ("import os; os.mkdir('CANARY')",), "__builtin__.exec"),
        (np.save, ("CANARY", 1), "numpy.save"),
    ],
)
def test_a_pickle_runs_nothing(tmp_path, monkeypatch, where, function, arguments, named):
    monkeypatch.chdir(tmp_path)
    call = Calls(function, *arguments)
    batch = call if where == "alone" else {"data": call, "labels": [1]}
    _, _, md5 = python_batches(tmp_path, {"data_batch_2": pickle.dumps(batch, protocol=2)})
    with pytest.raises(DamagedData, match=f"data_batch_2: .*{named}, which is not allowed"):
        read_python_batches(str(tmp_path), md5)
    assert not list(tmp_path.glob("CANARY*"))
    # The canary is alive: plain unpickling does it.
    pickle.loads(pickle.dumps(batch))
    assert list(tmp_path.glob("CANARY*"))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"data": np.zeros((3, 3072), np.uint8)}, "labels"),
        ({"data": np.zeros((3, 3072), np.uint8), "labels": [1, 2]}, "2 labels, but pixels"),
        ({"data": np.zeros((2, 3000), np.uint8), "labels": [1, 2]}, "2 labels, but pixels"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": [1, 10]}, "one outside 0 ... 9"),
        ({"data": np.zeros((2, 3072)), "labels": [1, 2]}, "data are not bytes"),
        ([1, 2], "not a batch of CIFAR-10"),
    ],
)
def test_pickles_of_something_else(tmp_path, batch, message):
    _, _, md5 = python_batches(tmp_path, {"test_batch": pickle.dumps(batch, protocol=2)})
    with pytest.raises(DamagedData, match=f"{tmp_path}/test_batch: .*{message}"):
        read_python_batches(str(tmp_path), md5)


def test_binary_batches(tmp_path):
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    random = np.random.Generator(np.random.PCG64(5))
    for number, name in enumerate(MD5):
        records = random.integers(0, 256, (2, 3073), dtype=np.uint8)
        records[:, 0] = number, 9 - number
        path = write(folder / f"{name}.bin", records.tobytes())
        os.truncate(path, 30_730_000)  # the rest reads as class 0, black
    found = read_cifar10(str(tmp_path))
    assert found.origin == "cifar-10-batches-bin"
    assert (found.train.images.shape, found.held_out.images.shape) == (
        (50_000, 3, 32, 32),
        (10_000, 3, 32, 32),
    )
    assert found.train.labels[[0, 1, 2, 40_000, 40_001]].tolist() == [0, 9, 0, 4, 5]
    assert (found.held_out.images[1] == records[1, 1:].reshape(3, 32, 32)).all()
    path = folder / "data_batch_3.bin"
    with open(path, "r+b") as file:
        file.seek(3073 * 9999)
        file.write(b"\x0a")
    with pytest.raises(DamagedData, match=f"{path}: no labels, or one outside 0 ... 9"):
        read_binary_batches(str(folder))
    os.truncate(path, 30_729_999)
    with pytest.raises(DamagedData, match=f"{path}: 30729999 bytes, must be 30730000"):
        read_cifar10(str(folder))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (
            lambda root: write(root / "train/cat/0003.jpg", encoded(1, size=(32, 31))),
            "{root}/train/cat/0003.jpg: 32 x 31 pixels, CIFAR-10 has 32 x 32",
        ),
        (
            lambda root: [write(root / name / "x/1.jpg", LAST) for name in ("train", "test")],
            "{root}: 11 classes, CIFAR-10 has 10",
        ),
        (
            lambda root: (root / "test").rename(root / "testing"),
            "{root}: has train/ but no held-out split",
        ),
        (
            lambda root: write(root / "test/dog/0001.jpg", LAST[: len(LAST) // 2]),
            "{root}/test/dog/0001.jpg: cannot be decoded: ",
        ),
        (
            lambda root: (shutil.rmtree(root), write(root / "cifar10-jpeg.tar.xz", b"?")),
            "{root}/cifar10-jpeg.tar.xz: an archive, which mprun does not unpack; unpack it and",
        ),
        (
            lambda root: (shutil.rmtree(root), root.mkdir()),
            "{root}: no CIFAR-10 here; needs cifar-10-batches-py/, ",
        ),
    ],
)
def test_what_is_no_cifar_10_is_refused_by_name(root, damage, says):
    damage(root)
    with raises_line(DamagedData, says.format(root=root)):
        read_cifar10(str(root))
