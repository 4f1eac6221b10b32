"""Processes of `mprun`, and those of this machine, read off /proc."""

import os
import subprocess
import sys
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def _command(words, before=("-m", "mprun"), **environment) -> dict:
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | environment
    variables = os.environ | {name: str(value) for name, value in own.items()}
    return {"args": [sys.executable, *before, *map(str, words)], "env": variables, "text": True}


def start(*words, stderr=subprocess.DEVNULL, **more) -> subprocess.Popen:
    """`mprun WORDS` as a process; more: variables, and `before`, by what it is started."""
    return subprocess.Popen(**_command(words, **more), stdout=subprocess.DEVNULL, stderr=stderr)


def mprun(*words, **more) -> subprocess.CompletedProcess:
    """Return the result of the process that `start` starts, when it has ended."""
    return subprocess.run(**_command(words, **more), capture_output=True, timeout=300)


def done(*words, code=0, **more) -> subprocess.CompletedProcess:
    """As `mprun`, of a command that must end with `code`."""
    ended = mprun(*words, **more)
    assert ended.returncode == code, ended.stderr
    return ended


def ended(processes: list[subprocess.Popen], code: int, timeout: float = 300) -> list[str]:
    """Wait until all have ended with `code`; return their errors."""
    said = [process.communicate(timeout=timeout)[1] for process in processes]
    assert [process.returncode for process in processes] == [code] * len(processes), said
    return said


def forkserver():
    """A context whose processes have imported mprun, and computed nothing.

    Not forks of this process: autograd's threads do not survive one, and are asked for.
    """
    context = get_context("forkserver")
    # The compiler, which sharding and formats in blocks import, takes seconds in each rank.
    ranks = ["tests.distributed.of_a_rank", "tests.script.of_two_ranks"]
    context.set_forkserver_preload([*ranks, "torch._dynamo"])
    return context


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
