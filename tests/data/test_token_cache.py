"""The cache on disk: what it finds again, and what damage it notices."""

import hashlib
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from mprun.data import DataError
from mprun.data import cache as cache_module
from mprun.data.cache import Cache
from mprun.data.source import DamagedData
from mprun.errors import Resource

from ..helpers import raises_line

KEY = {"kind": "tokens", "source": "abc", "lower": False, "vocab_limit": None}
TOKENS = np.arange(1000, dtype="<i4")


@pytest.fixture
def cache(tmp_path):
    return Cache(tmp_path / "cache")


def names(cache) -> list[str]:
    return sorted(path.name for path in cache.folder.iterdir())


def test_an_entry_is_found_by_its_key_alone(cache):
    assert cache.find(KEY) is None
    path = cache.store(KEY, [TOKENS[:7], TOKENS[7:]])
    assert path == cache.find(KEY) == Cache(cache.folder).find(dict(KEY))
    assert path.read_bytes() == TOKENS.tobytes()
    assert names(cache) == sorted([path.name, path.with_suffix(".json").name])
    for change in ({"source": "abd"}, {"lower": True}, {"vocab_limit": 7}, {"kind": "words"}):
        assert cache.find(KEY | change) is None


@pytest.mark.parametrize("above", [0, 1 << 24])
@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(path.read_bytes() + b"\0\0\0\0"),
        lambda path: path.write_bytes(b"\1" + path.read_bytes()[1:]),
        lambda path: path.unlink(),
        lambda path: path.with_suffix(".json").unlink(),
        lambda path: path.with_suffix(".json").write_bytes(b"{"),
        lambda path: path.with_suffix(".json").write_bytes(b"\xff\xfe"),
        lambda path: path.with_suffix(".json").write_bytes(b"[]"),
        lambda path: path.with_suffix(".json").write_bytes(b""),
    ],
)
@pytest.mark.few(9)
def test_damage_is_noticed_and_repaired(cache, monkeypatch, damage, above):
    monkeypatch.setattr(cache_module, "REMEMBERED_ABOVE", above)
    monkeypatch.setattr(cache_module, "_SETTLED_NS", -1)
    path = cache.store(KEY, [TOKENS])
    assert cache.find(KEY) == path
    damage(path)
    assert cache.find(KEY) is None
    cache.store(KEY, [TOKENS])
    assert cache.find(KEY) == path


@pytest.mark.parametrize("field", ["format", "key", "bytes", "sha256"])
def test_every_field_of_the_header_counts(cache, capsys, field):
    header = cache.store(KEY, [TOKENS]).with_suffix(".json")
    content = json.loads(header.read_text())
    header.write_text(json.dumps(content | {field: "x"}))
    assert cache.find(KEY) is None
    assert capsys.readouterr().err.endswith("tokens: damaged, made again\n")


def test_the_hash_of_a_large_file_is_remembered(cache, tmp_path, monkeypatch):
    path = tmp_path / "large"
    path.write_bytes(b"one")
    wanted = hashlib.sha256(b"one").hexdigest()
    assert cache.content_sha256(path) == wanted
    assert not (cache.folder / "hashes").exists()

    monkeypatch.setattr(cache_module, "REMEMBERED_ABOVE", 2)
    # A file this young may still change within one tick of the clock.
    assert cache.content_sha256(path) == wanted
    assert not (cache.folder / "hashes").exists()

    monkeypatch.setattr(cache_module, "_SETTLED_NS", -1)
    assert cache.content_sha256(path) == wanted
    (memory,) = (cache.folder / "hashes").iterdir()
    memory.write_text(memory.read_text().replace(wanted, "remembered"))
    assert cache.content_sha256(path) == "remembered"

    # Same size, same modification time: the time of the change tells.
    before = path.stat()
    time.sleep(0.02)
    path.write_bytes(b"two")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert cache.content_sha256(path) == hashlib.sha256(b"two").hexdigest()
    memory.write_text("not JSON")
    assert cache.content_sha256(path) == hashlib.sha256(b"two").hexdigest()
    path.unlink()
    with pytest.raises(DamagedData, match="large: No such file or directory"):
        cache.content_sha256(path)


def test_nothing_is_left_of_what_failed(cache):
    def blocks():
        yield TOKENS
        raise DamagedData("text: not UTF-8")

    with pytest.raises(DamagedData):
        cache.store(KEY, blocks())
    assert names(cache) == []


def test_temporary_files_of_a_killed_writer_go_after_an_hour(cache):
    path = cache.store(KEY, [TOKENS])
    old, young = (cache.folder / f".{path.name}.{n}.abc" for n in (1, 2))
    for left in (old, young):
        left.write_bytes(b"")
    os.utime(old, (time.time() - 3700,) * 2)
    cache.store(KEY, [TOKENS])
    assert not old.exists() and young.exists()


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        cache = Cache(folder)
        assert cache.find(KEY) is None
        with pytest.raises(DataError, match=rf"data\.cache={folder}: .*; name a folder"):
            cache.store(KEY, [TOKENS])


def test_a_full_disk(cache):
    cache.folder.mkdir()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(Resource, match=rf"data\.cache={cache.folder}: File too large"):
            cache.store(KEY, [TOKENS])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(cache) == []


def test_the_default_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert Cache(None).folder == tmp_path / ".cache" / "mprun" / "text"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert Cache(None).folder == tmp_path / "xdg" / "mprun" / "text"
    assert Cache("here").folder.name == "here"


def test_without_a_home_directory_a_folder_has_to_be_named(monkeypatch):
    def no_home():  # what Path says for a user id that the system does not know
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with raises_line(DataError, "data.cache=null: this user has no home directory; name a folder"):
        Cache(None)


_WRITER = """
import sys
from pathlib import Path
import numpy as np
from mprun.data.cache import Cache

cache, key = Cache(sys.argv[1]), {"kind": "tokens"}
print("ready", flush=True)
sys.stdin.readline()
for _ in range(50):
    cache.store(key, [np.arange(5000, dtype="<i4")] * 10)
    # Header and entry are two files: one may be new and the other old, but both are equal.
    assert cache.find(key) is not None
"""


@pytest.mark.slow
def test_processes_that_make_the_same_entry_at_once(cache):
    command = [sys.executable, "-c", _WRITER, str(cache.folder)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    writers = [subprocess.Popen(command, text=True, **pipes) for _ in range(2)]
    for writer in writers:
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        writer.stdin.write("\n")
        writer.stdin.flush()
    for writer in writers:
        assert writer.communicate()[1] == ""
        assert writer.returncode == 0
    path = cache.find({"kind": "tokens"})
    assert path.stat().st_size == 4 * 50_000
    assert len(names(cache)) == 2
