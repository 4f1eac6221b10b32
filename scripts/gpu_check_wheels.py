"""The packages that a machine with torch, torchvision and tensorboard alone lacks, as wheels.

`scripts/gpu_check --wheels DIR` collects them where there is a network; `WHEELS=DIR` installs them
for one call into a temporary folder, where there is none.
"""

import os
import subprocess
import sys
from pathlib import Path

# What mprun and its tests import, then the peers that such a machine lacks.
_NEEDED = (
    *("hydra-core", "omegaconf", "antlr4-python3-runtime", "msgspec", "rich", "nvidia-ml-py"),
    *("pyyaml", "expecttest", "torchao"),
)
_BUILT = ("antlr4-python3-runtime==4.9.3", "hydra-core", "omegaconf")  # one has no wheel
_PYTHON = "3.12"  # of the other machine


def collect_wheels(folder: Path) -> int:
    """Collect wheels for Python 3.12 on Linux into `folder`; return an exit code."""
    pins = Path(__file__).resolve().parents[1] / "constraints.txt"
    known = dict(line.split("==") for line in pins.read_text("utf-8").splitlines() if "==" in line)
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]

    def pinned(name: str) -> str:
        return f"{name}=={known[name]}" if name in known else name

    built = [pinned(name) for name in _BUILT]
    others = [pinned(n) for n in _NEEDED if n not in {b.partition("==")[0] for b in _BUILT}]
    binary = ["--only-binary=:all:", f"--python-version={_PYTHON}"]
    for command in (
        [*pip, "wheel", "--no-deps", "-w", str(folder), *built],
        [*pip, "download", "--no-deps", *binary, "-d", str(folder), *others],
    ):
        if code := subprocess.run(command).returncode:
            print(f"gpu_check: --wheels {folder}: pip ended with {code}", file=sys.stderr)
            return 1
    print(f"{folder}: {len(list(folder.glob('*.whl')))} wheels; on the other machine:")
    print(f"    WHEELS={folder} scripts/gpu_check OUT")
    return 0


def install_wheels(folder: Path, temporary: str) -> bool:
    """Install the wheels below `temporary` and put them on the path of all steps."""
    wheels = sorted(map(str, folder.glob("*.whl")))
    if not wheels:
        print(
            f"gpu_check: WHEELS={folder}: no wheels there (scripts/gpu_check --wheels DIR)",
            file=sys.stderr,
        )
        return False
    site = str(Path(temporary) / "site")
    pip = [sys.executable, "-m", "pip", "-q", "install", "--no-index", "--no-deps"]
    if code := subprocess.run([*pip, "--target", site, *wheels]).returncode:
        print(f"gpu_check: WHEELS={folder}: pip ended with {code}", file=sys.stderr)
        return False
    path = [site, os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    return True
