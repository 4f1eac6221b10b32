"""The original ImageNet archives, read in place; made here with 1,000 classes of tiny images."""

import gzip
import io
import os
import tarfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

from mprun.data import imagenet_archives
from mprun.data.imagenet_archives import Member, find_imagenet, list_members
from mprun.data.source import DamagedData

from ..helpers import raises_line
from .made_images import encoded, tar_bytes, write

TRAIN, VALIDATION = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"
DEVKIT = "ILSVRC2012_devkit_t12"
WNIDS = [f"n{7 * i + 11:08d}" for i in range(1000)]
CONTENT = [encoded(seed) for seed in range(8)]
# Image n (from 0) is of the class with this number.
TRUTH = "".join(f"{n * 3 % 1000 + 1}\n" for n in range(1000)).encode()
pytestmark = pytest.mark.usefixtures("cache")


def train_images():
    """Member name -> content by class, in an order that is not the sorted one."""
    for i in reversed(range(1000)):
        wnid = WNIDS[i]
        yield wnid, {f"{wnid}_{n}.JPEG": CONTENT[(i + n) % 8] for n in ((10, 9) if i < 3 else (1,))}


def validation_images():
    return {f"ILSVRC2012_val_{n + 1:08d}.JPEG": CONTENT[n % 5] for n in reversed(range(1000))}


def devkit_files():
    """Class numbers run against the order of names; two inner nodes stand before the classes."""
    fields = ("ILSVRC2012_ID", "WNID", "words", "gloss", "num_children")
    rows = [(1001, "n99999998", "animal", "-", 500), (1002, "n99999999", "thing", "-", 500)]
    rows += [(1000 - i, wnid, f"class {i}", "-", 0) for i, wnid in enumerate(WNIDS)]
    synsets = np.array(rows, dtype=[(name, object) for name in fields])[:, None]
    stream = io.BytesIO()
    savemat(stream, {"synsets": synsets})
    return {
        f"{DEVKIT}/data/meta.mat": stream.getvalue(),
        f"{DEVKIT}/data/ILSVRC2012_validation_ground_truth.txt": TRUTH,
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("archives")
    inner = {f"{wnid}.tar": tar_bytes(images) for wnid, images in train_images()}
    write(folder / TRAIN, tar_bytes(inner))
    write(folder / VALIDATION, tar_bytes(validation_images()))
    write(folder / f"{DEVKIT}.tar.gz", tar_bytes(devkit_files(), "w:gz"))
    return folder


@pytest.fixture
def root(made, tmp_path):
    """A folder of links to the made archives, so that a test can replace one."""
    folder = tmp_path / "imagenet"
    folder.mkdir()
    for name in (TRAIN, VALIDATION, f"{DEVKIT}.tar.gz"):
        (folder / name).symlink_to(made / name)
    return folder


def replace(path: Path, content: bytes) -> None:
    path.unlink()
    path.write_bytes(content)


def find(root):
    return find_imagenet(str(root), layout="classes", eval_share=0.1)


def refused(root, message):
    with raises_line(DamagedData, message):
        find(root)


def test_the_same_data_set_as_the_extracted_archives(root, tmp_path):
    extracted = tmp_path / "extracted"
    for wnid, images in train_images():
        for name, content in images.items():
            write(extracted / "train" / wnid / name, content)
    for n, (name, content) in enumerate(sorted(validation_images().items())):
        # Class number c belongs to WNIDS[1000 - c].
        write(extracted / "val" / WNIDS[1000 - (n * 3 % 1000 + 1)] / name, content)
    here, there = find(root), find(extracted)
    assert here.train.classes == there.train.classes == tuple(sorted(WNIDS))
    assert (here.sha256, here.sha256_of) == (there.sha256, "content")
    for archived, plain in ((here.train, there.train), (here.held_out, there.held_out)):
        assert (archived.labels == plain.labels).all() and archived.labels.dtype == np.int64
        assert len(archived) == len(plain)
        for i in range(len(plain)):
            assert archived.read(i) == plain.read(i)
            assert os.path.basename(archived.name(i)).endswith(os.path.basename(plain.name(i)))
    assert here.train.name(0) == f"{root}/{TRAIN}:{WNIDS[0]}.tar/{WNIDS[0]}_10.JPEG"


def test_the_index_is_kept_and_made_again_where_it_or_an_archive_changes(root, tmp_path):
    first = find(root)
    (kept,) = (tmp_path / "cache/mprun/images").glob("*.npz")
    content = kept.read_bytes()
    written = kept.stat().st_mtime_ns
    # The devkit may be a folder as well.
    (root / f"{DEVKIT}.tar.gz").unlink()
    for name, devkit in devkit_files().items():
        write(root / name, devkit)
    again = find(root)
    assert kept.stat().st_mtime_ns == written
    assert (again.train.table == first.train.table).all()
    assert (again.held_out.labels == first.held_out.labels).all()
    kept.write_bytes(content[:-1] + b"?")
    assert find(root).sha256 == first.sha256
    assert kept.read_bytes() == content
    images = validation_images()
    images["ILSVRC2012_val_00000001.JPEG"] = CONTENT[7]
    replace(root / VALIDATION, tar_bytes(images))
    assert find(root).sha256 != first.sha256
    assert len(list(kept.parent.glob("*.npz"))) == 2


@pytest.mark.parametrize("missing", [TRAIN, VALIDATION, f"{DEVKIT}.tar.gz"])
def test_a_missing_archive(root, missing):
    (root / missing).unlink()
    refused(root, f"{root}/{missing}: no such file; needs train/ and val/")


def test_an_archive_cut_off_behind_its_index(root, made):
    train = find(root).train
    content = (made / TRAIN).read_bytes()
    # The first class by name lies last in the file.
    replace(root / TRAIN, content[: int(train.table["start"][0]) + 10])
    _, size, _, start = train.table[-1]
    assert train.read(len(train) - 1) == content[start:][:size]
    with raises_line(DamagedData, f"{train.name(0)}: the archive ends within"):
        train.read(0)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"n00000011.tar": b"no tar at all" * 99}, ":n00000011.tar: a damaged tar archive: "),
        ({"readme.txt": b"?"}, ":readme.txt: not the archive of a class"),
        ({"n00000011.tar": tar_bytes({})}, ":n00000011.tar: an empty class"),
        ({"n00000011.tar": tar_bytes({"x.txt": b"?"})}, "/x.txt: not an image by its name"),
        ({"n00000011.tar": tar_bytes({"x.JPEG": b""})}, "/x.JPEG: an empty file"),
        (
            {f"{wnid}.tar": tar_bytes({"x.JPEG": CONTENT[0]}) for wnid in WNIDS[:999]},
            ": 999 classes, ImageNet has 1000",
        ),
        (None, ""),
    ],
)
def test_training_archives_that_are_refused(root, made, members, message):
    whole = (made / TRAIN).read_bytes()
    replace(root / TRAIN, whole[: len(whole) // 2] if members is None else tar_bytes(members))
    with raises_line(DamagedData, f"{root}/{TRAIN}", message):
        find(root)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"truth": b"1\n2\n"}, "1000 images, but ILSVRC2012_devkit_t12/data/ILSVRC2012_validation"),
        ({"truth": b"1001\n" * 1000}, "ground_truth.txt: 1001 is not the number of a class"),
        ({"truth": b"x\n" * 1000}, "is not the number of a class"),
        # Class 4 of the classes has no image, class 1 two.
        ({"truth": TRUTH.replace(b"\n4\n", b"\n1\n")}, f"{VALIDATION}: class {WNIDS[996]} has"),
        ({"meta": b"no table"}, "data/meta.mat: cannot be read as the table of classes"),
        ({"meta": None}, "devkit_t12.tar.gz:ILSVRC2012_devkit_t12/data/meta.mat: missing"),
        ({"meta": bytes(2**24 + 1)}, "data/meta.mat: larger than 16 MiB"),
    ],
)
@pytest.mark.few(2)
def test_a_damaged_devkit(root, change, message):
    files = {
        name: change.get("meta" if "meta" in name else "truth", content)
        for name, content in devkit_files().items()
    }
    files = {name: content for name, content in files.items() if content is not None}
    replace(root / f"{DEVKIT}.tar.gz", tar_bytes(files, "w:gz"))
    refused(root, message)
    replace(root / f"{DEVKIT}.tar.gz", b"an error page\n")
    refused(root, f"{root}/{DEVKIT}.tar.gz: cannot be read: ")


def bomb(entry_type, size):
    """An archive whose only member has headers of `size` bytes; a few kB when compressed."""
    header = tarfile.TarInfo("@LongLink" if entry_type == tarfile.GNUTYPE_LONGNAME else "pax")
    header.type, header.size = entry_type, size
    record = f"{size} comment=".encode()
    content = record + b"x" * (size - len(record) - 1) + b"\n"
    return header.tobuf(tarfile.GNU_FORMAT) + content + tar_bytes({"data/meta.mat": b"?"})


HEADER_TYPES = [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME]


@pytest.mark.parametrize("entry_type", HEADER_TYPES)
def test_a_devkit_of_huge_headers(root, entry_type, monkeypatch):
    monkeypatch.setattr(imagenet_archives, "MAX_UNPACKED_BYTES", 2**22)
    path = root / f"{DEVKIT}.tar.gz"
    replace(path, gzip.compress(bomb(entry_type, 2**21), 1))
    refused(root, f"{path}: a damaged tar archive: headers of more than 1,048,576 bytes for")
    replace(path, gzip.compress(bomb(entry_type, 2**24), 1))
    tracemalloc.start()
    try:
        refused(root, f"{path}: unpacks to more than 4 MiB")
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()


# Members by themselves.


@pytest.mark.parametrize("entry_type", HEADER_TYPES)
def test_huge_headers(tmp_path, entry_type):
    path = write(tmp_path / "x.tar", bomb(entry_type, 2**24))
    tracemalloc.start()
    try:
        with raises_line(DamagedData, "x.tar: a damaged tar archive: headers of more than"):
            list_members(str(path))
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()
    small = write(tmp_path / "y.tar", bomb(entry_type, 5120))
    assert len(list_members(str(small))) == 1


def test_headers_for_headers(tmp_path):
    longname = tarfile.TarInfo("@LongLink")
    longname.type = tarfile.GNUTYPE_LONGNAME
    chain = longname.tobuf(tarfile.GNU_FORMAT) * 1900  # below the bound on their bytes
    path = write(tmp_path / "x.tar", chain + tar_bytes({"a": b"1"}))
    with pytest.raises(DamagedData, match="x.tar: a damaged tar archive: no valid header"):
        list_members(str(path))


def tar_of(path, *entries):
    with tarfile.open(path, "w") as tar:
        for entry in entries:
            tar.addfile(entry, io.BytesIO(bytes(entry.size)) if entry.isreg() else None)
    return str(path)


def entry(name, type=tarfile.REGTYPE, size=0, linkname=""):
    made = tarfile.TarInfo(name)
    made.type, made.size, made.linkname = type, size, linkname
    return made


def test_members_are_where_they_are_said_to_be(tmp_path):
    contents = {"b": b"second", "a": b"first", "long" * 40: b"third", "./c/d": b""}
    path = write(tmp_path / "x.tar", tar_bytes(contents))
    whole = path.read_bytes()
    found = {m.name: whole[m.start : m.start + m.size] for m in list_members(str(path))}
    assert found == {name.removeprefix("./"): content for name, content in contents.items()}
    outer = write(tmp_path / "y.tar", tar_bytes({"x.tar": whole}))
    (inside,) = list_members(str(outer))
    members = list_members(str(outer), inside)
    whole = outer.read_bytes()
    assert {m.name: whole[m.start : m.start + m.size] for m in members} == found
    assert [m.name for m in members] == sorted(found)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (entry("x", tarfile.SYMTYPE, linkname="/etc/passwd"), "x: not a regular file"),
        (entry("x", tarfile.LNKTYPE, linkname="ok"), "x: not a regular file"),
        (entry("x", tarfile.CHRTYPE), "x: not a regular file"),
        (entry("x", tarfile.FIFOTYPE), "x: not a regular file"),
        (entry("x", tarfile.CONTTYPE), "x: not a regular file"),
        (entry("/etc/x"), "/etc/x: a path that is absolute or has '..'"),
        (entry("a/../../x"), "a/../../x: a path that is absolute or has '..'"),
        (entry("ok"), "ok: a name that comes twice"),
        (entry("two\nlines", tarfile.SYMTYPE), "two\\nlines: not a regular file"),
    ],
)
def test_members_that_are_refused(tmp_path, bad, message):
    path = tar_of(tmp_path / "x.tar", entry("ok", size=5), bad)
    with raises_line(DamagedData, f"{path}:{message}"):
        list_members(path)


def test_a_damaged_header_does_not_end_the_list(tmp_path):
    path = write(tmp_path / "x.tar", tar_bytes({name: b"content" for name in "abc"}))
    content = bytearray(path.read_bytes())
    content[2 * 512 + 3] ^= 1  # within the header of b, which its checksum covers
    path.write_bytes(content)
    with tarfile.open(path) as tar:
        assert tar.getnames() == ["a"]  # the trap
    with pytest.raises(DamagedData, match="x.tar: a damaged tar archive: no valid header at byte"):
        list_members(str(path))


@pytest.mark.parametrize("length", [0, 100, 700, 1024, 1536, 2000])
def test_truncated_archives(tmp_path, length):
    content = tar_bytes({"a": b"1" * 600, "b": b"2" * 600})
    path = write(tmp_path / "x.tar", content[:length])
    with pytest.raises(DamagedData, match="x.tar"):
        list_members(str(path))


def test_a_member_that_claims_to_be_larger_than_its_archive(tmp_path):
    inner = bytearray(tar_bytes({"a": b"1"}))
    huge = tarfile.TarInfo("a")
    huge.size = 2**40
    inner[:512] = huge.tobuf(tarfile.GNU_FORMAT)[:512]
    path = write(tmp_path / "x.tar", tar_bytes({"in.tar": bytes(inner), "next": b"2" * 9999}))
    (inside, _) = list_members(str(path))
    assert isinstance(inside, Member)
    with pytest.raises(DamagedData, match="x.tar:in.tar"):
        list_members(str(path), inside)
