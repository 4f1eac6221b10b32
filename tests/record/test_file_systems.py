"""A run goes on, or ends in one line, where a file system lacks or refuses a call.

The calls of the operating system fail as those file systems let them fail; all else is real.
"""

import errno
import fcntl
import os
import stat
import subprocess
import sys

import pytest

from mprun import file_system
from mprun.cli import main
from mprun.data.cache import Cache
from mprun.record import checkpoint
from mprun.record.run_directory import claim_exactly, locked, write_json
from mprun.record.run_record import read_record
from mprun.sweeps.batch import _unwanted

from ..helpers import TINY_LM, numbers_of, record_of, refused, rows_of, run

LOCKLESS = ["ENOLCK", "ENOSYS", "EOPNOTSUPP", "EINVAL"]
NO_FOLDERS = ["EBADF", "EINVAL", "EISDIR", "EACCES", "EPERM", "ENOSYS", "EOPNOTSUPP"]
STAY = ["EBUSY", "EACCES", "EPERM", "ENOTEMPTY", "ESTALE", "EIO", "EROFS"]
# Lustre, NFS, FUSE and damaged disks, in the first write of a run.
BROKEN = ["ESTALE", "EXDEV", "EIO", "ENOSPC", "EDQUOT", "EROFS", "ENOTCONN", "ETIMEDOUT", "EBUSY"]
BROKEN += ["EREMOTEIO", "EUCLEAN", "EBADMSG", "EACCES", "EHOSTDOWN", "ENOSYS", "EOPNOTSUPP"]
KEEPS = [*TINY_LM, "precision=amp", "train.log_every=1", "train.checkpoint_every=1"]
KEEPS += ["train.keep_checkpoints=2"]


@pytest.fixture
def failing(monkeypatch):
    """``failing(module, call, name, when)``: a call of the system that fails with that error."""
    file_system._say_once.cache_clear()

    def make(module, call, name, when=lambda *_: True):
        real, number = getattr(module, call), getattr(errno, name)

        def fails(*arguments, **options):
            if not when(*arguments):
                return real(*arguments, **options)
            path = arguments[0] if isinstance(arguments[0], str | os.PathLike) else None
            raise OSError(number, os.strerror(number), path)

        monkeypatch.setattr(module, call, fails)

    return make


def is_folder(descriptor) -> bool:
    return stat.S_ISDIR(os.fstat(descriptor).st_mode)


@pytest.mark.parametrize("name", LOCKLESS)
def test_without_locks_two_processes_are_not_kept_apart(name, failing, tmp_path, capsys):
    (tmp_path / "one").mkdir()
    failing(fcntl, "flock", name)
    for _ in range(2):
        with locked(tmp_path / "one"), locked(tmp_path / "one"):
            assert file_system.is_held(tmp_path / "one" / ".lock") is None
    why = f"no locks on this file system ({os.strerror(getattr(errno, name))})"
    line = f"mprun: {tmp_path}/one: {why}: start no second process on the same run\n"
    assert capsys.readouterr().err == line
    # Whether a sweep lives is then not known: its runs go on.
    write_json(tmp_path / "alive", {})
    assert not _unwanted(tmp_path, {"ends_with_sweep": True})
    # Nor whether a folder without a record is somebody's who is about to write it.
    with pytest.raises(Exception, match="already exists"):
        claim_exactly(tmp_path / "one")


@pytest.mark.parametrize("name", ["EWOULDBLOCK", "EACCES"])
def test_a_lock_that_another_process_has(name, failing, tmp_path):
    (tmp_path / "one").mkdir()
    failing(fcntl, "flock", name)
    with pytest.raises(Exception, match="in use by another process"), locked(tmp_path / "one"):
        pass


@pytest.mark.slow
def test_a_run_without_locks_is_made_resumed_and_shown(failing, tmp_path, capsys):
    straight, folder = tmp_path / "straight", tmp_path / "run"
    assert run(straight, *KEEPS, "train.steps=4") == 0
    failing(fcntl, "flock", "ENOSYS")
    assert run(folder, *KEEPS, "train.steps=2") == 0
    assert main([f"resume={folder}", "train.steps=4"]) == 0
    assert capsys.readouterr().err.count("no locks on this file system") == 1
    assert numbers_of(folder, "train") == numbers_of(straight, "train")
    read_record(folder).reopen()  # as a kill leaves it
    assert main(["show", str(folder)]) == 0
    assert "running or killed, at step 4" in capsys.readouterr().out


@pytest.mark.parametrize("name", NO_FOLDERS)
def test_a_folder_that_cannot_be_forced_onto_the_disk(name, failing, tmp_path):
    failing(os, "fsync", name, is_folder)
    checkpoint.save(tmp_path / "checkpoints", 1, {"x": 1.0}, keep=1)
    assert Cache(tmp_path / "cache", "x").store({"kind": "words"}, ["a"]).read_text() == "a\n"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["EINVAL", "ENOSYS", "EOPNOTSUPP"])
def test_a_file_system_without_synchronisation_has_runs(name, failing, tmp_path, capsys):
    failing(os, "fsync", name)
    assert run(tmp_path / "run", *KEEPS, "train.steps=2") == 0
    assert record_of(tmp_path / "run")["status"] == "done"


@pytest.mark.parametrize("folders", [False, True])
def test_a_checkpoint_that_is_not_on_the_disk_is_none(folders, failing, tmp_path, capsys):
    failing(os, "fsync", "EIO", lambda descriptor: is_folder(descriptor) == folders)
    assert run(tmp_path / "run", *KEEPS, "train.steps=2") == 5
    assert "Input/output error" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("name", STAY)
@pytest.mark.parametrize("call", ["rename", "rmdir", "unlink"])
def test_an_old_checkpoint_that_stays_ends_no_run(call, name, failing, tmp_path, capsys):
    """The run can be resumed: what stays is whole, or does not look like a checkpoint."""
    folder = tmp_path / "run"
    failing(os, call, name, lambda path, *_: "step-0" in str(path) or str(path) == "state.pt")
    assert run(folder, *KEEPS, "train.steps=4") == 0
    said = capsys.readouterr().err
    why = f"could not be removed, and stays ({os.strerror(getattr(errno, name))})"
    assert said.count(why) == 2 and "step-00000001" in said and "Traceback" not in said
    whole = [step for step, _ in checkpoint.all_in(folder / "checkpoints")]
    assert whole == ([1, 2, 3, 4] if call == "rename" else [3, 4])
    assert main([f"resume={folder}", "train.steps=5"]) == 0
    assert rows_of(folder)[-1]["step"] == 5


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("written", ["config.yaml", "run.json"])
@pytest.mark.few(4)
def test_a_first_write_that_fails_is_one_line(written, name, failing, tmp_path, capsys):
    failing(os, "replace", name, lambda _, target: str(target).endswith(written))
    capsys.readouterr()
    assert run(tmp_path / "run", *TINY_LM) == 5
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith(f"mprun: {os.strerror(getattr(errno, name))}: {tmp_path}/run/.{written}")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_a_file_system_that_is_gone(failing, tmp_path, capsys):
    failing(os, "mkdir", "ESTALE", lambda path, *_: str(path) == f"{tmp_path}/run")
    refused(capsys, *TINY_LM, f"output_dir={tmp_path}/run", code=5, says="Stale file handle")


NO_LOCKS = """
import errno, fcntl, os

def flock(*_):
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

fcntl.flock = flock
"""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [[], ["hydra/launcher=joblib"]])
def test_a_sweep_without_locks(launcher, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(NO_LOCKS)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    words = [*TINY_LM, "train.steps=2", "precision=fp32,amp", f"output_root={tmp_path}/out"]
    if launcher:
        pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    for _ in range(2):  # the second one finds all of it done
        command = [sys.executable, "-m", "mprun", "-m", *words, *(launcher or ["-j", "2"])]
        own = os.environ | {"PYTHONPATH": path}
        ended = subprocess.run(command, env=own, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr
    assert len(list((tmp_path / "out").glob("*/*/run.json"))) == 2
