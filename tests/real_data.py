"""The real data sets that some tests use: unpacked once a session, skipped where they are missing.

They are no part of the project. Their place is `../shared/data` beside the checkout, or the folder
that MPRUN_TEST_DATA names; data/README.md there says what they are.
"""

import hashlib
import os
import tarfile
from pathlib import Path

import pytest

_FOLDER = Path(
    os.environ.get("MPRUN_TEST_DATA", Path(__file__).resolve().parents[2] / "shared" / "data")
)
_SHA256 = {
    "cifar10-jpeg": "cb47882dcf68ca0d82a910ccd5908551540371be50f2f05e7af5d5ac836c43eb",
    "wikitext-2": "f03b22aa3402015167f3d4ee63173920df21e5ef7a4bc409874549c6736d1d1b",
}


def unpacked(name: str, into: Path) -> Path:
    """The folder of data set `name`, unpacked below `into`; skips the test where it is missing."""
    archive = _FOLDER / f"{name}.tar.xz"
    if not archive.is_file():
        pytest.skip(f"needs {archive.name} in ../shared/data or $MPRUN_TEST_DATA")
    folder = into / name
    if not folder.is_dir():
        assert hashlib.sha256(archive.read_bytes()).hexdigest() == _SHA256[name]
        with tarfile.open(archive) as members:
            members.extractall(into, filter="data")
    return folder
