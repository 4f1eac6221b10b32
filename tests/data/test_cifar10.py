"""CIFAR-10 in its three layouts, its order, augmentation, value ranges and cache."""

import hashlib
import io
import os
import pickle
import re
import struct

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets.folder import pil_loader
from torchvision.transforms import functional as transforms

from mprun.data.array_cache import load_arrays, store_arrays
from mprun.data.cifar10 import DEVIATION, MEAN, Cifar10
from mprun.data.cifar10_files import MD5, read_binary_batches, read_cifar10, read_python_batches
from mprun.data.errors import DamagedData
from mprun.data.padded_crop import PaddedCrop, draw

from .made_images import class_folders, encoded, write

CLASSES = "airplane automobile bird cat deer dog frog horse ship truck".split()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "mprun" / "images"


@pytest.fixture
def root(tmp_path):
    """60 training and 20 held-out images as class folders of JPEG."""
    class_folders(tmp_path / "data/train", dict.fromkeys(CLASSES, 6), size=(32, 32))
    class_folders(tmp_path / "data/test", dict.fromkeys(CLASSES, 2), 500, size=(32, 32))
    return tmp_path / "data"


def cifar10(root, **changes):
    settings = {
        "image_size": 32,
        "augmentation": "none",
        "flip": False,
        "value_range": "tanh",
        "train_size": None,
        "eval_size": None,
        "batch_size": 8,
        "seed": 0,
        "device": "cpu",
    }
    return Cifar10(str(root), **settings | changes)


def stored_bytes(images):
    """The bytes that `tanh` values in FP32 came from."""
    return (images.double() * 127.5 + 127.5).round().to(torch.uint8)


def by_pixels(images, labels):
    """Label and number of occurrences by content."""
    found = {}
    for image, label in zip(stored_bytes(images).numpy(), labels.tolist(), strict=True):
        key = hashlib.sha256(image.tobytes()).hexdigest()
        found[key] = (label, found.get(key, (label, 0))[1] + 1)
    return found


def everything(batches):
    images, labels = zip(*batches, strict=True)
    return torch.cat(images), torch.cat(labels)


def epoch_of(source):
    return everything(source.train_batch(i) for i in range(source.batches_per_epoch))


def test_class_folders_hold_the_pixels_of_torchvision(root):
    source = cifar10(root, batch_size=20)
    assert source.batches_per_epoch == 3 and source.samples_per_batch == 20
    for folder, (images, labels) in (
        ("train", epoch_of(source)),
        ("test", everything(source.eval_batches())),
    ):
        files = sorted((root / folder).glob("*/*.jpg"))
        pixels = np.stack([np.asarray(pil_loader(path)).transpose(2, 0, 1) for path in files])
        expected = by_pixels(
            torch.from_numpy(pixels).float() / 127.5 - 1,
            torch.tensor([CLASSES.index(path.parent.name) for path in files]),
        )
        assert by_pixels(images, labels) == expected
        assert (images.dtype, labels.dtype) == (torch.float32, torch.int64)


def test_a_batch_depends_on_seed_and_index_only(root):
    settings = {"augmentation": "padded_crop", "flip": True, "seed": 3}
    source = cifar10(root, **settings)
    wanted = {i: source.train_batch(i) for i in (0, 9, 40, 7)}
    torch.manual_seed(99)
    state = torch.get_rng_state()
    again = cifar10(root, **settings)
    for index in (40, 7, 0, 9):
        for a, b in zip(again.train_batch(index), wanted[index], strict=True):
            assert torch.equal(a, b)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(source.train_batch(0)[0], source.train_batch(7)[0])  # next epoch
    with pytest.raises(ValueError, match="index=-1 is not allowed"):
        source.train_batch(-1)


def test_augmentation_does_not_depend_on_the_batch_size(root):
    settings = {"augmentation": "padded_crop", "flip": True}
    small, large = (epoch_of(cifar10(root, batch_size=n, **settings)) for n in (4, 20))
    assert torch.equal(small[0], large[0]) and torch.equal(small[1], large[1])


def test_evaluation_is_in_a_fixed_order_without_augmentation(root):
    plain = everything(cifar10(root).eval_batches())
    source = cifar10(root, augmentation="padded_crop", flip=True, seed=5, batch_size=6)
    sizes = [len(labels) for _, labels in source.eval_batches()]
    assert sizes == [6, 6, 6, 2]
    assert torch.equal(everything(source.eval_batches())[0], plain[0])


def test_subsets_are_prefixes_that_mix_the_classes_for_every_seed(root):
    whole = everything(cifar10(root).eval_batches())
    part = cifar10(root, train_size=24, eval_size=7, seed=8)
    images, labels = everything(part.eval_batches())
    assert torch.equal(images, whole[0][:7]) and torch.equal(labels, whole[1][:7])
    assert len(set(labels.tolist())) > 3
    used = by_pixels(*epoch_of(part))
    assert used == by_pixels(*epoch_of(cifar10(root, train_size=24, seed=1)))
    assert len({label for label, _ in used.values()}) > 5
    smaller = by_pixels(*epoch_of(cifar10(root, train_size=16)))
    assert smaller.keys() <= used.keys()
    assert part.sha256 != cifar10(root).sha256


def test_hash_is_of_the_pixels_that_are_used(root):
    source = cifar10(root)
    images, labels = source._store._train
    digest = hashlib.sha256(images.numpy().tobytes() + labels.numpy().tobytes())
    images, labels = everything(source.eval_batches())
    digest.update(stored_bytes(images).numpy().tobytes() + labels.numpy().tobytes())
    assert source.sha256 == digest.hexdigest()
    assert cifar10(root, seed=4, flip=True, value_range="standardised").sha256 == source.sha256


def test_value_ranges(root):
    bytes_ = stored_bytes(epoch_of(cifar10(root))[0]).double()
    mean, deviation = (
        torch.tensor(figures, dtype=torch.float64).view(3, 1, 1) for figures in (MEAN, DEVIATION)
    )
    # In units of 2^-24: 255 * mean carries two roundings of at most 126, the difference one of at
    # most 142; both are divided by 62 or more where the divisor, with two roundings, and the
    # quotient, with one, are relative to at most 2.4.
    offset = 2 * 126 + 142
    for value_range, expected, roundings in (
        ("standardised", (bytes_ / 255 - mean) / deviation, offset / 62 + 3 * 2.4),
        ("mean_subtracted", bytes_ - 255 * mean, offset),
        ("tanh", bytes_ / 127.5 - 1, 1),
    ):
        images = epoch_of(cifar10(root, value_range=value_range))[0].double()
        assert (images - expected).abs().max() <= roundings * 2**-24, value_range


def test_other_sizes_are_resized_after_the_augmentation(root):
    settings = {"augmentation": "padded_crop", "flip": True}
    small, _ = cifar10(root, **settings).train_batch(2)
    large, _ = cifar10(root, image_size=64, **settings).train_batch(2)
    assert large.shape == (8, 3, 64, 64)
    expected = torch.nn.functional.interpolate(small, (64, 64), mode="bilinear")
    assert torch.equal(large, expected)


def test_a_description_of_plain_values(root):
    write(root / "train/readme.txt", b"?")
    source = cifar10(root, train_size=50)
    assert source.description == {
        "name": "cifar10",
        "origin": "class folders",
        "train_samples": 50,
        "eval_samples": 20,
        "num_classes": 10,
        "image_size": 32,
        "channels": 3,
        "value_range": "tanh",
        "augmentation": "none",
        "flip": "none",
        "ignored_files": 1,
    }
    assert source.num_classes == 10


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_size": 61}, "train_size=61 is not allowed: 1 to 60"),
        ({"eval_size": 0}, "eval_size=0 is not allowed: 1 to 20"),
        ({"batch_size": 61}, "batch_size=61 is not allowed: 1 to 60"),
        ({"augmentation": "crop"}, "augmentation='crop' is not allowed: 'padded_crop' or 'none'"),
        ({"value_range": "raw"}, "value_range='raw' is not allowed: 'standardised', 'mean_subt"),
        ({"image_size": 7}, "image_size=7 is not allowed: 8 or more"),
        ({"seed": -1}, "seed=-1 is not allowed"),
    ],
)
def test_arguments(root, change, message):
    with pytest.raises(ValueError, match=message):
        cifar10(root, **change)


# Augmentation.


def test_crop_and_mirror_equal_torchvision():
    n, padding = 200, 4
    images = torch.randint(256, (n, 3, 32, 32), dtype=torch.uint8, generator=torch.manual_seed(1))
    result = PaddedCrop(7, n, padding, True, "cpu")(images, epoch=2, start=0)
    down, right, mirrored = draw(7, 2, n, padding, True)
    for i in range(n):
        # On PIL images, as the usual recipe has it: the padding is black before normalisation.
        picture = transforms.to_pil_image(images[i])
        picture = transforms.pad(picture, padding)
        picture = transforms.crop(picture, int(down[i]), int(right[i]), 32, 32)
        if mirrored[i]:
            picture = transforms.hflip(picture)
        assert (np.asarray(picture).transpose(2, 0, 1) == result[i].numpy()).all()
    assert result.dtype == torch.uint8


def test_a_batch_takes_the_draws_of_its_positions():
    images = torch.randint(256, (50, 3, 32, 32), dtype=torch.uint8, generator=torch.manual_seed(1))
    crop = PaddedCrop(7, 50, 4, True, "cpu")
    whole = crop(images, 0, 0)
    assert not torch.equal(crop(images, 1, 0), whole)
    for start in (40, 0, 10):
        assert torch.equal(crop(images[start : start + 10], 0, start), whole[start : start + 10])


def test_mirror_alone_and_crop_alone():
    images = torch.randint(256, (64, 3, 8, 8), dtype=torch.uint8, generator=torch.manual_seed(1))
    mirrored = PaddedCrop(0, 64, 0, True, "cpu")(images, 0, 0)
    equal = (mirrored == images).flatten(1).all(dim=1)
    assert torch.equal(mirrored[~equal], images[~equal].flip(-1))
    assert 0 < equal.sum() < 64
    _, _, never = draw(0, 0, 64, 4, False)
    assert not never.any()


def test_draws_are_uniform_and_independent_of_the_order():
    n = 81_000
    down, right, mirrored = draw(0, 0, n, 4, True)
    cells = np.bincount(9 * down + right, minlength=81)
    # Binomial(81000, 1/81): standard deviation 31.4; five of them, over 81 cells.
    assert len(cells) == 81 and abs(cells - 1000).max() < 5 * 31.5
    # Binomial(81000, 1/2): standard deviation 142.
    assert abs(mirrored.sum() - n / 2) < 5 * 143
    order = np.argsort(np.random.PCG64(np.random.SeedSequence([0, 0])).random_raw(n))
    # A correlation of n independent pairs has standard deviation 1 / sqrt(n) = 0.0035.
    assert abs(np.corrcoef(order, 9 * down + right)[0, 1]) < 5 * 0.0036


def test_known_draws_do_not_change_between_versions():
    # By hand from random_raw: two fields of 31 bits times 9, without their lower 31 bits; bit 63.
    known = [[2, 6, 0, 4, 6], [6, 2, 8, 2, 5], [1, 0, 1, 0, 0]]
    assert draw(1, 2, 5, 4, True).tolist() == known


@pytest.mark.gpu
def test_on_the_gpu_the_same_without_waiting(root):
    settings = {"augmentation": "padded_crop", "flip": True, "value_range": "standardised"}
    host, device = cifar10(root, **settings), cifar10(root, **settings, device="cuda")
    device.train_batch(0)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        batches = [device.train_batch(i) for i in range(16)]  # two epochs and a bit
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for i, (images, labels) in enumerate(batches):
        expected, expected_labels = host.train_batch(i)
        # Subtraction and division are rounded correctly on both.
        assert torch.equal(images.cpu(), expected)
        assert torch.equal(labels.cpu(), expected_labels)


# The files of the original distribution.


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
        with pytest.raises(
            DamagedData, match=f"{folder}/data_batch_1: MD5 is {md5['data_batch_1']}"
        ):
            read_cifar10(str(root))
    (folder / "data_batch_1").unlink()
    with pytest.raises(DamagedData, match=f"{folder}/data_batch_1: cannot be read: No such file"):
        read_cifar10(str(tmp_path))


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
        (
            {"data": np.zeros((3, 3072), np.uint8), "labels": [1, 2]},
            "2 labels, but pixels",
        ),
        (
            {"data": np.zeros((2, 3000), np.uint8), "labels": [1, 2]},
            "2 labels, but pixels",
        ),
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


# What is refused, each time in one line that names the file or folder.


def refused(root, message):
    with pytest.raises(DamagedData, match=re.escape(message)) as caught:
        cifar10(root)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["cifar-10-python.tar.gz", "cifar10-jpeg.tar.xz"])
def test_an_archive_that_is_not_unpacked(tmp_path, name):
    write(tmp_path / name, b"?")
    refused(tmp_path, f"{tmp_path}/{name}: an archive, which mprun does not unpack; unpack it and")


def test_nothing_there(tmp_path):
    refused(tmp_path, f"{tmp_path}: no CIFAR-10 here; put cifar-10-batches-py/ (torchvision's), ")


def test_an_image_of_another_size(root):
    path = write(root / "train/cat/0003.jpg", encoded(1, size=(32, 31)))
    refused(root, f"{path}: 32 x 31 pixels, CIFAR-10 has 32 x 32")


def test_another_number_of_classes(root):
    for folder in ("train", "test"):
        write(root / folder / "unicorn/1.jpg", encoded(1, size=(32, 32)))
    refused(root, f"{root}: 11 classes, CIFAR-10 has 10")


def test_no_held_out_folder(root):
    (root / "test").rename(root / "testing")
    refused(root, f"{root}: has train/ but no held-out split")


def test_a_truncated_image(root):
    path = root / "test/dog/0001.jpg"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    refused(root, f"{path}: cannot be decoded: ")


# The cache.


def test_decoded_pixels_are_kept_and_used(root, cache):
    first = cifar10(root)
    (kept,) = cache.iterdir()
    # Other pixels under the same key show that they are taken from there.
    (pixels,) = load_arrays(kept.name)
    assert (pixels.shape, pixels.dtype) == ((80, 3, 32, 32), np.uint8)
    store_arrays(kept.name, [255 - pixels])
    inverted = cifar10(root)
    assert torch.equal(inverted.train_batch(0)[0], -first.train_batch(0)[0])
    path = root / "train/cat/0003.jpg"
    path.write_bytes(encoded(77, size=(32, 32)))
    assert cifar10(root).sha256 not in (first.sha256, inverted.sha256)
    assert len(list(cache.iterdir())) == 2


def test_a_damaged_cache_is_made_again(root, cache):
    sha256 = cifar10(root).sha256
    (kept,) = cache.iterdir()
    content = kept.read_bytes()
    for damaged in (b"", content[:100], content[:-1], content[:-1] + b"?", content + b"?"):
        kept.write_bytes(damaged)
        assert cifar10(root).sha256 == sha256
        assert kept.read_bytes() == content
    store_arrays(kept.name, [np.zeros((1, 3, 32, 32), np.uint8)])
    assert cifar10(root).sha256 == sha256


def test_a_cache_with_objects_runs_nothing(root, cache, tmp_path):
    sha256 = cifar10(root).sha256
    (kept,) = cache.iterdir()
    stream = io.BytesIO()
    canary = Calls(os.mkdir, str(tmp_path / "canary"))
    np.lib.format.write_array(stream, np.array([canary], object), allow_pickle=True)
    body = stream.getvalue()
    header = b"mprun arrays 1\n" + struct.pack("<Q", len(body)) + hashlib.sha256(body).digest()
    kept.write_bytes(header + body)
    assert cifar10(root).sha256 == sha256
    assert not (tmp_path / "canary").exists()


def test_without_a_place_for_the_cache(root, cache, tmp_path, monkeypatch):
    sha256 = cifar10(root).sha256
    blocked = write(tmp_path / "file", b"no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert cifar10(root).sha256 == sha256
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # not allowed by the specification
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert cifar10(root).sha256 == sha256
    assert not (tmp_path / "relative").exists()
    assert len(list((tmp_path / "home/.cache/mprun/images").iterdir())) == 1


@pytest.mark.slow
def test_the_real_images(cifar10_jpeg):
    source = cifar10(cifar10_jpeg, batch_size=500)
    assert (source.batches_per_epoch, source.description["eval_samples"]) == (100, 10_000)
    images, labels = source._store._train
    assert torch.bincount(labels).tolist() == [5000] * 10
    pixels = images.double() / 255
    # The published figures are those of the original files; here they went through JPEG, which
    # blurs: the deviations fall by less than 1 %.
    assert (pixels.mean(dim=(0, 2, 3)) - torch.tensor(MEAN)).abs().max() < 0.0005
    deviation = pixels.transpose(0, 1).flatten(1).std(dim=1, correction=0)
    assert (deviation / torch.tensor(DEVIATION) - 1).abs().max() < 0.01
    _, held_out = everything(source.eval_batches())
    assert torch.bincount(held_out).tolist() == [1000] * 10
    # A subset holds the classes about evenly: hypergeometric, deviation 12.9 at most.
    part = cifar10(cifar10_jpeg, train_size=2000)
    assert (torch.bincount(part._store._train[1]) - 200).abs().max() < 5 * 13
    path = cifar10_jpeg / "train/cat"
    first = min(os.listdir(path))
    picture = np.array(Image.open(path / first).convert("RGB")).transpose(2, 0, 1)
    assert (images[labels == 3] == torch.tensor(picture)).flatten(1).all(dim=1).sum() >= 1
