"""Pages of the documentation replayed: their blocks, and their commands as a shell runs them."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page, flags=re.DOTALL)


def with_programs(folder: Path, checkout: Path = ROOT) -> dict[str, str]:
    """The environment in which `mprun` is that of `checkout`, through programs in `folder`/bin.

    As the installed command: the current folder is not on Python's path by itself. No GPU, as the
    pages say.
    """
    programs = folder / "bin"
    programs.mkdir()
    python = shlex.quote(sys.executable)
    # Not -P, which mprun heeds: it would not look in the current folder for a component.
    mprun = "import sys; del sys.path[0]; from mprun.cli import main; raise SystemExit(main())"
    for name, line in (("mprun", f"{python} -c '{mprun}'"), ("python", python)):
        (programs / name).write_text(f'#!/bin/sh\nexec {line} "$@"\n')
        (programs / name).chmod(0o755)
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    python_path = os.pathsep.join(filter(None, [str(checkout), os.environ.get("PYTHONPATH", "")]))
    return os.environ | {"PATH": path, "PYTHONPATH": python_path, "CUDA_VISIBLE_DEVICES": ""}


def replay(commands: Iterable[str], folder: Path) -> dict[str, subprocess.CompletedProcess]:
    """Run commands in `folder` in their order: command -> how it ended."""
    environment = with_programs(folder)
    return {
        command: subprocess.run(
            ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True
        )
        for command in commands
    }
