"""The fake CUDA device for tests: a process that runs on it, and is asked."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from . import runtime as fake_cuda

ROOT = Path(__file__).parents[2]


class Device:
    """A process on the fake device; a new one where the last has died."""

    def __init__(self, folder: Path, python: str):
        self.folder, self.python, self.process = folder, python, None
        self.log = folder / "worker.txt"

    def run(self, folder: Path, overrides: list[str]) -> dict:
        """A run of `mprun` with these overrides, recorded in `folder`."""
        return self.ask("run", folder=str(folder), overrides=list(overrides))

    def record(self, folder: Path, overrides: list[str], **more) -> dict:
        """The record of such a run, which must be sound."""
        found = self.ask("run", folder=str(folder), overrides=list(overrides), **more)
        assert_sound(found)
        return found["record"]

    def command(self, *words: str) -> dict:
        """What `mprun WORDS` answered, which must end with 0."""
        found = self.ask("command", arguments=list(words))
        assert found.get("code") == 0, found.get("trace", found["printed"])
        return found

    def ask(self, function: str, **arguments) -> dict:
        """Return the worker's answer (`worker.py`); raise AssertionError if the worker dies."""
        if self.process is None:
            self._start()
        self.process.stdin.write(json.dumps({"function": function, **arguments}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            code = self.close()
            raise AssertionError(f"the process ended ({code}): {self.log.read_text()[-2000:]}")
        return json.loads(line)

    def own_process(self, *words: str, cwd: Path = ROOT, **variables) -> str:
        """The output of `python WORDS` in a process of its own; variables of `environment`."""
        environment = fake_cuda.environment(self.folder, **variables) | {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            "TRITON_CACHE_DIR": str(self.folder / "triton"),
        }
        command = [self.python, *words]
        done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    def _start(self) -> None:
        environment = fake_cuda.environment(self.folder) | {
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "TRITON_CACHE_DIR": str(self.folder / "triton"),
        }
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [self.python, "-X", "faulthandler", str(Path(__file__).parent / "worker.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
                cwd=ROOT,
            )

    @property
    def has_oldest_torch(self) -> bool:
        return self.ask("torch_version")["torch"] < [2, 12]

    @property
    def lacks_fused_adagrad(self) -> bool:
        """torch 2.11 has the kernel, and an optimizer that refuses it on CUDA."""
        return self.has_oldest_torch

    def close(self) -> int | None:
        """End the process; its exit code."""
        process, self.process = self.process, None
        if process is None:
            return None
        process.stdin.close()
        process.stdout.close()
        return process.wait(300)


def assert_sound(found: dict) -> None:
    """No exception, no wait between evaluations, no warning, nothing launched beside a capture."""
    assert "error" not in found, found["trace"]
    assert found["code"] == 0 and found["record"]["status"] == "done"
    assert found["warnings"] == []
    assert found["counts"]["stray"] == 0


# Interpreters beside this one, with another torch and what mprun depends on: the same runs there.
OTHERS = [path for path in os.environ.get("MPRUN_OTHER_PYTHON", "").split(os.pathsep) if path]


@pytest.fixture(scope="session", params=[sys.executable, *OTHERS], ids=["own", *OTHERS])
def device(request, tmp_path_factory):
    """The fake device, in a process of this interpreter or of another one."""
    folder = tmp_path_factory.mktemp("fake_cuda")
    try:
        build_with(request.param, folder)
    except RuntimeError as error:
        pytest.skip(f"no fake CUDA runtime: {error}")
    device = Device(folder, request.param)
    yield device
    device.close()


@pytest.fixture
def asked(device, tmp_path):
    """`asked(text)`: what `answer()` of a program returns, or of its body, with its counts."""

    def ask(text, on=device):
        path = tmp_path / "script.py"
        if "def answer():" not in text:
            lines = "\n".join(f"    {line}" for line in text.strip().splitlines())
            text = f"import torch\n\ndef answer():\n{lines}\n"
        path.write_text(text)
        return on.ask("script", path=str(path))

    return ask


@pytest.fixture
def script(asked):
    """As `asked`, of a program that must raise no error."""

    def answer(*given):
        found = asked(*given)
        assert "error" not in found, found["trace"]
        return found

    return answer


def build_with(python: str, folder: Path) -> None:
    """`fake_cuda.build` for the torch of `python`; RuntimeError says why not."""
    if python == sys.executable:
        return fake_cuda.build(folder)
    code = "import pathlib, sys; from tests.fake_cuda.runtime import build"
    code += "; build(pathlib.Path(sys.argv[1]))"
    command = [python, "-c", code, str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
