"""Images that many of these tests read, and a place of each test's own for what is decoded."""

import pytest

from .made_images import cifar10_folders


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "mprun" / "images"


@pytest.fixture
def root(tmp_path):
    return cifar10_folders(tmp_path / "data")
