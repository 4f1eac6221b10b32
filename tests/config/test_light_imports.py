"""What answers at once loads no torch; who may import whom is the contract in pyproject.toml."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from mprun.errors import OF_EXTRAS

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# Where a module is not called as its package is.
MODULES = {
    "hydra-core": "hydra",
    "nvidia-ml-py": "pynvml",
    "pillow": "PIL",
    "pytorch-lightning": "pytorch_lightning",
    "pyyaml": "yaml",
}
# As if nothing was installed but the core.
WITHOUT_EXTRAS = f"import sys; sys.modules.update(dict.fromkeys({OF_EXTRAS})); "


@pytest.mark.parametrize(
    "module",
    [
        "mprun.config.compose",
        "mprun.sweep",
        "mprun.sweep.mode_table",
        "mprun.cli.help",
        "mprun.record.run_directory",
    ],
)
def test_a_light_module_loads_no_torch(module):
    program = f"import sys, {module}; assert not {{'torch', 'numpy', 'sklearn'}} & set(sys.modules)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_reading_runs_and_drawing_them_loads_no_torch():
    imports = "import mprun.cli.compare, mprun.compare.report"
    program = f"import sys; {imports}; assert 'torch' not in sys.modules"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_a_run_loads_torchvision_for_those_alone_that_take_it():
    program = "import sys, mprun.build, mprun.training.run; assert 'torchvision' not in sys.modules"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def modules_of(requirements):
    names = [re.match(r"[\w-]+", line)[0] for line in requirements]
    return {MODULES.get(name, name) for name in names}


def test_every_import_is_of_a_declared_package():
    imported = set()
    for path in (ROOT / "mprun").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(node.module.partition(".")[0])
    imported -= {"mprun", *sys.stdlib_module_names}
    core, extras = modules_of(PROJECT["dependencies"]), PROJECT["optional-dependencies"]
    assert not core & set(OF_EXTRAS)
    trainers = extras["lightning"] + extras["pytorch-lightning"] + extras["transformers"]
    assert modules_of(extras["cli"] + extras["notebook"] + trainers) == set(OF_EXTRAS)
    # torch brings triton where there is CUDA, and Jinja brings markupsafe.
    assert imported - core - {"triton", "markupsafe"} == set(OF_EXTRAS)


def test_the_engine_needs_the_core_alone():
    program = (
        "import torch; known = set(sys.modules); import mprun.precision as engine;"
        "policy = engine.get_policy('fp16_master_scaled');"
        "engine.cast_model(torch.nn.Linear(2, 2), policy);"
        f"loaded = {{*{OF_EXTRAS}, 'omegaconf', 'msgspec'}} & (set(sys.modules) - known);"
        "assert not loaded, loaded"
    )
    for start in ("import sys; ", WITHOUT_EXTRAS):
        ended = subprocess.run([sys.executable, "-c", start + program], capture_output=True)
        assert ended.returncode == 0, ended.stderr.decode()


@pytest.mark.parametrize(
    "words", [[], ["-m", "seed=0,1"], ["compare", "runs"], ["bench"], ["--cfg", "job"], ["doctor"]]
)
def test_a_command_without_its_extra_names_it(words, tmp_path):
    program = f"{WITHOUT_EXTRAS} from mprun.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, *words]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")
    [line] = ended.stderr.splitlines()
    assert "not installed; pip install 'mprun[cli]'" in line
    assert list(tmp_path.iterdir()) == []
