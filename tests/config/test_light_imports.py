"""Commands that answer at once load no torch; pyproject.toml says who may import whom."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from mprun.errors import OF_EXTRAS

from ..tables import with_extensions

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# Where a module is not called as its package is.
MODULES = {"hydra-core": "hydra", "nvidia-ml-py": "pynvml", "pillow": "PIL", "pyyaml": "yaml"}
MODULES["pytorch-lightning"] = "pytorch_lightning"
# As if nothing was installed but the core.
WITHOUT_EXTRAS = f"import sys; sys.modules.update(dict.fromkeys({OF_EXTRAS}))"
ENGINE = f"""
import sys, torch
known = set(sys.modules)
import mprun
model = torch.nn.Linear(2, 2)
mprun.prepare(model, torch.optim.SGD(model.parameters()), "fp16_master_scaled")
loaded = {{*{OF_EXTRAS}, "omegaconf", "msgspec"}} & (set(sys.modules) - known)
assert not loaded, loaded
"""
LIGHT = ("config.compose", "sweeps", "sweeps.mode_table", "cli.help", "record.run_directory")
DRAWING = ("cli.compare", "comparison.report")


def ended(program, *words, cwd=None):
    """An interpreter of its own, which knows only what the program imports."""
    command = [sys.executable, "-c", program, *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd)


@pytest.mark.slow
def test_a_light_module_loads_no_torch():
    """Nor does reading runs and drawing them, which takes numpy."""
    program = f"""
import sys
from importlib import import_module
for name in {LIGHT}:
    import_module(f"mprun.{{name}}")
    assert not {{"torch", "numpy", "sklearn"}} & set(sys.modules), name
for name in {DRAWING}:
    import_module(f"mprun.{{name}}")
    assert "torch" not in sys.modules, name
"""
    assert (done := ended(program)).returncode == 0, done.stderr


def modules_of(requirements):
    names = [re.match(r"[\w-]+", line)[0] for line in requirements]
    return {MODULES.get(name, name) for name in names}


@pytest.mark.slow
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
    # torch brings triton where there is CUDA, Jinja markupsafe, TensorBoard werkzeug, notebooks
    # IPython.
    absent = modules_of(trainers) - set(with_extensions("TRAINERS", []))
    brought = {"triton", "markupsafe", "werkzeug", "IPython"}
    by_data = modules_of(extras["speech"] + extras["subword"])
    known = set(OF_EXTRAS) - absent | brought | by_data
    assert imported - core <= known <= imported | by_data | {"mprun"}


@pytest.mark.slow
def test_the_engine_needs_the_core_alone_and_a_run_loads_torchvision_for_those_that_take_it():
    run = "import mprun.assembly, mprun.training.run; assert 'torchvision' not in sys.modules"
    assert (done := ended(ENGINE + run)).returncode == 0, done.stderr


@pytest.mark.parametrize(
    "commands",
    [
        ["", "-m seed=0,1", "compare runs", *with_extensions("NEED_CLI", []), "--cfg job"],
        pytest.param(["doctor"], marks=pytest.mark.slow),  # which imports torch, as the engine does
    ],
)
def test_a_command_without_its_extra_names_it(commands, tmp_path):
    """The engine works without any."""
    program = f"""
{WITHOUT_EXTRAS}
from mprun.cli import main
for words in {commands}:
    assert main(words.split()) == 2, words
{ENGINE if "doctor" in commands else ""}
"""
    done = ended(program, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == len(commands)
    assert all("not installed; pip install 'mprun[cli]'" in line for line in lines)
    assert list(tmp_path.iterdir()) == []
