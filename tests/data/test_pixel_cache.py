"""Pixels kept on disk, those of CIFAR-10 as class folders: used, checked, made again."""

import json

import numpy as np
import pytest

from mprun.data.cache import Cache
from mprun.data.cifar10 import read_cifar10

from .made_images import CIFAR10_CLASSES as CLASSES
from .made_images import encoded, write

pytestmark = pytest.mark.usefixtures("cache")


def entries(cache):
    """The entries of the cache, without their headers."""
    return [path for path in cache.iterdir() if path.suffix == ".pixels"]


def key_of(entry):
    return json.loads(entry.with_suffix(".json").read_text())["key"]


def all_pixels(root):
    files = read_cifar10(str(root))
    return np.concatenate([files.train.images, files.held_out.images])


def test_decoded_pixels_are_kept_and_used(root, cache):
    first = read_cifar10(str(root))
    (kept,) = entries(cache)
    # Other pixels under the same key show that they are taken from there.
    pixels = np.fromfile(kept, np.uint8)
    assert len(pixels) == 80 * 3 * 32 * 32
    Cache(cache).store(key_of(kept), [255 - pixels])
    inverted = read_cifar10(str(root))
    assert (inverted.train.images == 255 - first.train.images).all()
    assert (inverted.train.labels == first.train.labels).all()
    path = root / "train/cat/0003.jpg"
    path.write_bytes(encoded(77, size=(32, 32)))
    changed = read_cifar10(str(root)).train.images != first.train.images
    # One image alone, the fourth cat of six.
    places = changed.reshape(60, -1).any(axis=1).nonzero()[0].tolist()
    assert places == [CLASSES.index("cat") * 6 + 3] and len(entries(cache)) == 2


def test_a_damaged_cache_is_made_again(root, cache):
    pixels = all_pixels(root)
    (kept,) = entries(cache)
    content = kept.read_bytes()
    kept.write_bytes(content[:-1])
    assert (all_pixels(root) == pixels).all()
    assert kept.read_bytes() == content
    # Whole, but of another size.
    Cache(cache).store(key_of(kept), [bytes(3 * 32 * 32)])
    assert (all_pixels(root) == pixels).all()
    assert kept.read_bytes() == content


def test_without_a_place_for_the_cache(root, cache, tmp_path, monkeypatch):
    pixels = all_pixels(root)
    blocked = write(tmp_path / "file", b"no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert (all_pixels(root) == pixels).all()
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # not allowed by the specification
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert (all_pixels(root) == pixels).all()
    assert not (tmp_path / "relative").exists()
    assert len(entries(tmp_path / "home/.cache/mprun/images")) == 1
