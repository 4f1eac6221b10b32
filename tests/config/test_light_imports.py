"""What answers at once loads no torch; who may import whom is the contract in pyproject.toml."""

import subprocess
import sys

import pytest


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
