"""The source distribution and the wheel: what is in them, and that they run from any folder."""

import os
import subprocess
import sys
import tarfile
import zipfile
from configparser import ConfigParser
from email.parser import Parser
from pathlib import Path

import pytest

from mprun import __version__

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(names in the sdist, path of the wheel that was built from it)."""
    for module in ("hatchling", "hatch_fancy_pypi_readme"):
        pytest.importorskip(module, reason=f"{module} builds the package")
    folder = tmp_path_factory.mktemp("built")
    build(ROOT, "sdist", folder)
    [archive] = folder.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = [name.partition("/")[2] for name in opened.getnames()]
        opened.extractall(folder, filter="data")
    build(folder / f"mprun-{__version__}", "wheel", folder)
    [wheel] = folder.glob("*.whl")
    return names, wheel


def build(source, target, folder):
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
    ended = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def below(folder):
    paths = [p for p in (ROOT / folder).rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    return {path.relative_to(ROOT).as_posix() for path in paths}


def test_the_wheel_holds_the_package_and_its_options(built):
    names, wheel = built
    assert {"README.md", "LICENSE", "pyproject.toml", "constraints.txt"} <= set(names)
    assert below("mprun") | below("conf") | below("scripts") <= set(names)
    with zipfile.ZipFile(wheel) as opened:
        found = {name for name in opened.namelist() if ".dist-info/" not in name}
        about = f"mprun-{__version__}.dist-info/"
        both = (about + "entry_points.txt", about + "METADATA")
        entries, metadata = (opened.read(name).decode() for name in both)
    assert found == below("mprun") | {f"mprun/{name}" for name in below("conf")}
    scripts = ConfigParser()
    scripts.read_string(entries)
    assert dict(scripts["console_scripts"]) == {"mprun": "mprun.cli:main"}
    fields = Parser().parsestr(metadata)
    assert fields["Description-Content-Type"] == "text/markdown"
    core = [line for line in fields.get_all("Requires-Dist") if "extra ==" not in line]
    names = {line.split(">")[0].split("<")[0] for line in core}
    assert names == {"torch", "numpy", "pyyaml", "msgspec", "omegaconf", "jinja2"}
    # An index page has no files beside it.
    links = [part.partition(")")[0] for part in fields.get_payload().split("](")[1:]]
    assert links and all(link.startswith(("https://", "http://", "#")) for link in links)


def test_the_wheel_runs_from_any_folder(built, tmp_path):
    _, wheel = built
    site, work = tmp_path / "site", tmp_path / "work"
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(site)
    work.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(site)}

    def run(*words):
        command = [sys.executable, *words]
        ended = subprocess.run(command, capture_output=True, text=True, cwd=work, env=environment)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    engine = "import mprun; from mprun.precision import get_policy as get;"
    printed = run("-c", f"{engine} print(mprun.__file__, get('amp').name)").split()
    assert printed == [str(site / "mprun" / "__init__.py"), "amp"]
    assert "precision" in run("-m", "mprun", "--help")
    assert "name: lstm_lm" in run("-m", "mprun", "--cfg", "job")
    assert list(work.iterdir()) == []
    last = run("-m", "mprun", "train.steps=3", "threads=1", "device=cpu").splitlines()[-1]
    assert (work / last.removeprefix("run: ") / "metrics.jsonl").is_file()
