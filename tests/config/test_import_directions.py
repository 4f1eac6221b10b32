"""Who may import whom, read from the source; and that reading needs no torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import mprun

ROOT = Path(mprun.__file__).parent


def imports_of(path: Path) -> set[str]:
    """Absolute names of all modules that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def files(part: str) -> list[Path]:
    paths = sorted((ROOT / part).rglob("*.py")) if (ROOT / part).is_dir() else [ROOT / part]
    assert paths
    return paths


def offenders(part: str, forbidden: tuple[str, ...]) -> list[tuple[str, str]]:
    return [
        (path.name, name)
        for path in files(part)
        for name in imports_of(path)
        if any(name == f or name.startswith(f + ".") for f in forbidden)
    ]


@pytest.mark.parametrize(
    ("part", "forbidden"),
    [
        ("models", "precision tasks config data training record build"),
        ("data", "precision tasks config models training record build"),
        ("precision", "models data tasks config training record build"),
        ("tasks", "config training record build"),
        ("config", "models data tasks precision training record build sweep"),
        ("record", "models data tasks config training build"),
        ("record/checkpoint.py", "models data tasks config precision training record build"),
        ("sweep/mode_table.py", "models data tasks config precision training build"),
        ("sweep", "models data tasks precision training build"),
        # What a comparison is made of: records, and the names of modes and metrics.
        ("compare", "models data tasks precision training build sweep"),
    ],
)
def test_direction(part, forbidden):
    assert offenders(part, tuple(f"mprun.{name}" for name in forbidden.split())) == []


def test_no_torch_where_bad_input_is_found():
    for part in (
        "config",
        "cli/dispatch.py",
        "cli/help.py",
        "cli/show_config.py",
        "sweep",
        "errors.py",
    ):
        assert offenders(part, ("torch", "torchvision", "numpy")) == []


def test_a_comparison_needs_no_torch():
    assert offenders("compare", ("torch", "torchvision")) == []


def test_a_comparison_takes_of_numerics_only_what_reads_the_files_of_a_run():
    readers = {"gradient_range", "lost_update_shares", "post_mortem", "probe_record"}
    taken = {name.split(".")[2] for _, name in offenders("compare", ("mprun.numerics",))}
    assert taken == readers
    imports = "import mprun.cli.compare, mprun.compare.html_report"
    program = f"import sys; {imports}; assert 'torch' not in sys.modules"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_only_the_builder_reads_both_configuration_and_parts():
    both = []
    for path in sorted(ROOT.rglob("*.py")):
        names = imports_of(path)
        schema = any(n.startswith("mprun.config.schema") for n in names)
        parts = any(n.startswith(("mprun.models", "mprun.tasks", "mprun.data")) for n in names) or (
            "mprun.models" in names
        )
        if schema and parts:
            both.append(path.parent.name)
    assert set(both) == {"build"}


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
