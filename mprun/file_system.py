"""Calls that not every file system has, or refuses at times: locks, synchronisation, removal.

The rules are those of databases. A run goes on where its data are whole, and says once what is
lost; everything else is an error, and `FAILING` ends a command in one line.
"""

import errno
import fcntl
import os
import shutil
import sys
from functools import cache
from pathlib import Path
from typing import IO

# A file system that is full, broken, gone, or without a call: no other command line cures it.
FAILING = frozenset(
    {
        *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EUCLEAN, errno.EBADMSG),
        *(errno.ESTALE, errno.EXDEV, errno.EBUSY, errno.ENOTEMPTY, errno.ENODEV, errno.ENXIO),
        *(errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EREMOTEIO),
        *(errno.ENOTCONN, errno.ESHUTDOWN, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH),
        *(errno.ENETDOWN, errno.ENETUNREACH, errno.ENOLINK, errno.ECOMM, errno.EPROTO),
    }
)
# flock(2) of Lustre without `-o flock`, of NFS without lockd, of FUSE.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL)
_NO_SYNC = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP)
# PostgreSQL's fsync_fname allows the first four for a folder: there is nothing to force there.
_NO_FOLDER_SYNC = (errno.EBADF, errno.EINVAL, errno.EISDIR, errno.EACCES, errno.EPERM, *_NO_SYNC)


def lock(file: IO, *, shared: bool = False) -> bool | None:
    """Lock an open file without waiting; return False if another process has it, None: no locks.

    Where the file system has no locks, it says so once: two processes may then have one run.
    """
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):  # EACCES: NFS, by fcntl(2)
            return False
        if error.errno not in _NO_LOCKS:
            raise OSError(error.errno, error.strerror, file.name) from error
        where = os.path.dirname(os.path.abspath(file.name))
        why = f"no locks on this file system ({error.strerror})"
        _say_once(f"{where}: {why}: start no second process on the same run")
        return None
    return True


def is_held(path: Path) -> bool | None:
    """Return whether a process holds a lock file, None: no locks; raise FileNotFoundError."""
    with open(path, "rb") as file:
        free = lock(file, shared=True)
    return None if free is None else not free


def sync(file: IO) -> None:
    """Force an open file onto the disk, where its file system can."""
    file.flush()
    try:
        os.fsync(file.fileno())
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise OSError(error.errno, error.strerror, file.name) from error


def sync_folder(path: Path) -> None:
    """Force the names in a folder onto the disk, where its file system can."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise OSError(error.errno, error.strerror, str(path)) from error


def discard(path: Path, aside: Path | None = None) -> None:
    """Remove a file or a folder that nothing needs any more; say so if it stays.

    aside: a name that it gets first, so that what remains of a folder does not look whole.
    """
    try:
        path = path if aside is None else path.rename(aside)
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    except OSError as error:
        _say_once(f"{path}: could not be removed, and stays ({error.strerror})")


@cache
def _say_once(line: str) -> None:
    print(f"mprun: {line}", file=sys.stderr)
