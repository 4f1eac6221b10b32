"""Loader processes of a program that closes nothing."""

import subprocess
import sys
import textwrap
import time

import pytest

from .made_images import make_folder

PROGRAM = """
    import sys, torch
    from multiprocessing import active_children
    from mprun.assembly.data import build_data
    from mprun.config.components.images import ImageFolderConfig

    if __name__ == "__main__":
        config = ImageFolderConfig(root=sys.argv[1], image_size=16, batch_size=5, workers=2)
        source = build_data(config, 0, torch.device("cpu"))
        source.train_batch(0)
        print(*[child.pid for child in active_children()], flush=True)
"""


def start_program(tmp_path) -> tuple[subprocess.Popen, list[int]]:
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(PROGRAM))
    command = [sys.executable, str(script), str(make_folder(tmp_path / "data"))]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, text=True, **pipes)
    return process, [int(pid) for pid in process.stdout.readline().split()]


def running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, seconds: float = 120.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


@pytest.mark.slow
def test_a_program_that_closes_nothing_still_ends(tmp_path):
    process, workers = start_program(tmp_path)
    assert len(workers) == 2
    assert process.communicate(timeout=300) == ("", "") and process.returncode == 0
    assert wait_until(lambda: not any(map(running, workers)))
