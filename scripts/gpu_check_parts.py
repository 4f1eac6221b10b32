"""The parts of scripts/gpu_check: which commands each of them runs."""

import ast
import importlib.util
import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gpu_check_processes import Step

ROOT = Path(__file__).resolve().parents[1]
_MODES = "fp32,tf32,fp16_naive,fp16_master,fp16_master_scaled,amp,bf16_naive,bf16_master,amp_bf16"
# A mode that diverges is a result.
_DONE_OR_DIVERGED = (0, 3)


@dataclass(frozen=True, slots=True)
class Setting:
    """What the command line of gpu_check says. work: folder for everything that is not the summary.

    data: folder of real data, or None. device: "cuda", or "cpu" for a dry run at the smallest size.
    """

    work: Path
    device: str
    data: Path | None

    @property
    def dry(self) -> bool:
        return self.device == "cpu"


@dataclass(frozen=True, slots=True)
class Part:
    """weight: its share of the time. steps: from a setting and its seconds to its commands."""

    weight: float
    steps: Callable[[Setting, float], list[Step]]


def environment(setting: Setting, seconds: float) -> list[Step]:
    record = setting.work / "machine.json"
    return [
        Step("machine", _python("scripts/gpu_check_environment.py", str(record)), record=record),
        Step("doctor", _python("-m", "mprun", "doctor"), plain=True),
    ]


def tests(setting: Setting, seconds: float) -> list[Step]:
    files = gpu_test_files(ROOT / "tests")
    if setting.dry:  # every test is skipped there; one folder shows that they are collected
        files = [name for name in files if name.startswith("tests/tasks/")]
    # The training step first and by itself: those of the bench and its peers take as long again.
    of_bench = [name for name in files if name.startswith("tests/bench/")]
    groups = {"tests": [name for name in files if name not in of_bench], "tests_bench": of_bench}
    steps = []
    for name, chosen in groups.items():
        report = setting.work / f"{name}.xml"
        command = _python("-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "-rfE")
        command += ["--tb=short", "--durations=10", "--continue-on-collection-errors"]
        command += [f"--junitxml={report}", *chosen]
        if chosen:
            steps.append(Step(name, command, record=report, plain=True))
    return steps


def bench(setting: Setting, seconds: float) -> list[Step]:
    out = setting.work / "bench"
    # It ends by its own budget; the rest is for imports and for the report.
    budget = str(int(max(seconds - 20, 10)))
    command = _python("-m", "mprun", "bench", "--budget", budget, "--out", str(out))
    smallest = "--windows 2 --steps-per-window 2 --modes fp32 --peers loop device=cpu "
    usual = smallest + "model=conv_autoencoder data.batch_size=4" if setting.dry else "--peers all"
    command += shlex.split(os.environ.get("BENCH", usual))
    return [Step("bench", command, table=out / "bench.md", record=out / "bench.json")]


def update(setting: Setting, seconds: float) -> list[Step]:
    record = setting.work / "update_speed.json"
    command = _python("benchmarks/update_speed.py", "--device", setting.device)
    if setting.dry:
        command += ["--only", "autoencoder", "--turns", "2", "--threads", "1"]
    return [Step("update_speed", [*command, "--json", str(record)], record=record)]


def questions(setting: Setting, seconds: float) -> list[Step]:
    record = setting.work / "questions.json"
    command = _python("benchmarks/cuda_questions.py", "--device", setting.device)
    command += ["--limit", str(int(seconds / 3)), "--json", str(record)]
    return [Step("questions", command, record=record)]


def fidelity(setting: Setting, seconds: float) -> list[Step]:
    record = setting.work / "fidelity.json"
    reference = "native" if setting.dry else "cuda"
    command = _python("benchmarks/half_fidelity.py", "--reference", reference)
    if setting.dry:
        command += ["--only", "linear", "--magnitude", "normal"]
    return [Step("fidelity", [*command, "--json", str(record)], record=record)]


def results(setting: Setting, seconds: float) -> list[Step]:
    runs = setting.work / "runs"
    size = ["precision=fp32,amp", "seed=0", "train.steps=2", "-j", "1", "threads=1"]
    if not setting.dry:
        # Each run needs a core of its own to launch kernels; the GPU itself is mostly idle.
        jobs = max(1, min(8, (os.cpu_count() or 1) // 2))
        size = [f"precision={_MODES}", "seed=0,1,2", "-j", str(jobs)]
    # Longest first: on a GPU the language model's 2000 steps are bound by launches.
    steps = [
        Step(
            f"quickstart_{name}",
            _python(
                *("-m", "mprun", "-m", f"experiment=quickstart_{name}", *size),
                *(f"device={setting.device}", f"output_root={runs}"),
            ),
            share=share,
            accepted=_DONE_OR_DIVERGED,
        )
        for name, share in (("lost_updates", 6.0), ("underflow", 3.0))
    ]
    out = setting.work / "verdicts"
    compare = _python("-m", "mprun", "compare", str(runs), "--out", str(out), "--markdown")
    return [*steps, Step("verdicts", compare)]


def real_data(setting: Setting, seconds: float) -> list[Step]:
    """IMAGE, TEXT, JOBS, MODES and SEEDS are scripts/real_data's own; here are shorter defaults."""
    out = setting.work / "real_data"
    defaults = {"IMAGE": "train.epochs=3", "TEXT": "train.epochs=1", "JOBS": "5"}
    if setting.dry:
        short = "train.steps=2 data.batch_size=4"
        defaults = {"IMAGE": short, "TEXT": short, "JOBS": "1", "MODES": "fp32,amp", "SEEDS": "0"}
    chosen = {name: os.environ.get(name, value) for name, value in defaults.items()}
    chosen |= {"DEVICE": setting.device, "MPRUN_PYTHON": sys.executable}
    command = ["scripts/real_data", str(setting.data), str(out)]
    table = out / "verdicts.md"
    return [Step("real_data", command, table=table, environment=tuple(chosen.items()))]


PARTS = {
    "environment": Part(3, environment),
    "tests": Part(4, tests),
    "bench": Part(7, bench),
    "update": Part(1, update),
    "questions": Part(2.5, questions),
    "fidelity": Part(1, fidelity),
    "results": Part(4, results),
    "data": Part(4, real_data),
}


def gpu_test_files(folder: Path) -> list[str]:
    """Test files with a test marked gpu whose imports are all there, relative to the repository.

    A machine without a network may lack a package that one file needs; collecting that file would
    end the whole run.
    """
    chosen = []
    for path in sorted(folder.rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        if "mark.gpu" in text and not _missing_imports(ast.parse(text)):
            chosen.append(str(path.relative_to(ROOT)))
    return chosen


def _missing_imports(tree: ast.Module) -> list[str]:
    names = set()
    for node in tree.body:
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.partition(".")[0])
    return sorted(n for n in names if n != "mprun" and importlib.util.find_spec(n) is None)


def _python(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]
