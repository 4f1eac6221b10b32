"""Processes of this machine, read off /proc."""

from contextlib import suppress
from pathlib import Path


def with_word(text: str) -> list[int]:
    """Those with a word of their command line that is `text`, but for this one's."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if text.encode() in (folder / "cmdline").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def children_of(parent: int) -> list[int]:
    """Those that process `parent` has started and that are there."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            # pid (name) state parent ...; a name may hold spaces and brackets.
            after_name = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(after_name[1]) == parent:
                found.append(int(folder.name))
    return found
