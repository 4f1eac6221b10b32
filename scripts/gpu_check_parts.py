"""The parts of scripts/gpu_check and their commands."""

import ast
import importlib.util
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from gpu_check_processes import Step

ROOT = Path(__file__).resolve().parents[1]
_MODES = "fp32,tf32,fp16_naive,fp16_master,fp16_master_scaled,amp,bf16_naive,bf16_master,amp_bf16"
# Peak memory, energy and speed over FP32, beside torch.amp: a network of images, one of text.
_MEMORY = ("--only", "ResNet-50 b256,GPT-2", "--plain", "--peers", "amp", "--windows", "3")
_MEMORY += ("--modes", "fp32,amp,fp16_master_scaled,bf16_master")
_GPT_MODES = "fp32,tf32,amp_bf16,bf16_stochastic,fp8_tensorwise,fp8_rowwise,"
_GPT_MODES += "mxfp8,nvfp4"
_DOCTOR_S = 40  # a cold one compiles for minutes; its page names what this cuts
# Processes of tests and compilers: each has a CUDA context and a small network, or a compiler.
_CORES = os.cpu_count() or 1
_FIRST_TESTS = ("precision", "tasks", "execution", "synchronisation")  # of folders, in this order
_OURS = ("mprun", "benchmarks")  # packages that are not installed
# A mode that diverges is a result.
_DONE_OR_DIVERGED = (0, 3)


@dataclass(frozen=True, slots=True)
class Setting:
    """The command line of gpu_check. work: folder for everything except the summary.

    data: folder of real data, or None. device: "cuda", or "cpu" for a dry run at the smallest size.
    names: of all parts of this call. facts: of the machine, for each step's record.
    """

    work: Path
    device: str
    data: Path | None
    names: tuple[str, ...] = ()
    facts: dict[str, str] = field(default_factory=dict)

    @property
    def dry(self) -> bool:
        return self.device == "cpu"


@dataclass(frozen=True, slots=True)
class Part:
    """A part. weight: its share of the time. steps: makes commands from a setting and seconds.

    together: its steps run side by side. least: seconds without which it does not begin.
    """

    weight: float
    steps: Callable[[Setting, float], list[Step]]
    together: bool = False
    least: float = 15.0


def environment(setting: Setting, seconds: float) -> list[Step]:
    """Ask what works here, and meanwhile compile what is measured later, where nothing may wait."""
    doctor = _python("-m", "mprun", "doctor", "--json", "--budget", str(_DOCTOR_S))
    record = setting.work / "doctor.out.txt"
    steps = [Step("doctor", doctor, most=_DOCTOR_S + 15, record=record, plain=True)]
    if "ratios" in setting.names and not setting.dry:
        command = _python("-m", "benchmarks.suite", "--compile-ahead", "--budget", _budget(seconds))
        command += _asked_for() or ["--ratios"]
        threads = (("TORCHINDUCTOR_COMPILE_THREADS", "4"),)
        steps.append(Step("compile", command, environment=threads))
    return steps


def tests(setting: Setting, seconds: float) -> list[Step]:
    """Run the tests of a GPU, those of updates and casts first; compare products with a CPU's."""
    files = [name for name in gpu_test_files(ROOT / "tests") if name not in _of_ranks()]
    return [*_tests(setting, "tests", files), *fidelity(setting, seconds)]


def tests_slow(setting: Setting, seconds: float) -> list[Step]:
    """Run the slow tests: torch.compile, a whole bench."""
    files = gpu_test_files(ROOT / "tests", slow=True)
    return _tests(setting, "tests_slow", files, marks="gpu and slow")


def _tests(
    setting: Setting, name: str, files: list[str], marks: str = "gpu and not slow"
) -> list[Step]:
    """Make a test step of some files; a dry run, which skips all, collects just one file."""
    if not files:  # pytest would run all files
        return []
    log = setting.work / f"{name}.jsonl"
    command = _python("-m", "pytest", "-m", marks, "-p", "no:cacheprovider")
    command += ["-p", "gpu_check_pytest", f"--tests-log={log}", "-rfE", "--tb=short"]
    command += ["--durations=10", "--continue-on-collection-errors"]
    if importlib.util.find_spec("xdist") and not setting.dry:
        command += ["-n", str(max(2, min(12, _CORES - 4)))]
    command += files[:1] if setting.dry else files
    return [Step(name, command, record=log, plain=True)]


def _of_ranks() -> list[str]:
    return gpu_test_files(ROOT / "tests" / "distributed")


def ratios(setting: Setting, seconds: float) -> list[Step]:
    """Bench the networks of the paper, eager and compiled, beside torch.amp, plain and compiled."""
    return [_bench(setting, seconds, "ratios", ["--ratios"])]


def memory(setting: Setting, seconds: float) -> list[Step]:
    return [_bench(setting, seconds, "memory", [*_MEMORY])]


def bench_peers(setting: Setting, seconds: float) -> list[Step]:
    """Bench the whole suite beside other tools."""
    return [_bench(setting, seconds, "bench_peers", ["--peers", "all"])]


def gpt(setting: Setting, seconds: float) -> list[Step]:
    """Bench GPT-2 beside a plain loop in torch.amp and torchao's FP8, each compiled and not."""
    usual = ["--peers", "all", "--only", "GPT-2", "--modes", _GPT_MODES]
    dry = "--modes fp32,fp8_tensorwise --peers loop model=gpt data=synthetic_tokens "
    dry += "data.batch_size=2"
    return [_bench(setting, seconds, "bench_gpt", usual, dry)]


def _bench(
    setting: Setting,
    seconds: float,
    name: str,
    usual: list[str],
    dry: str = "--modes fp32 --peers loop model=conv_autoencoder data.batch_size=4",
) -> Step:
    out = setting.work / name
    command = _python("-m", "benchmarks.suite", "--budget", _budget(seconds), "--out", str(out))
    if setting.dry:
        usual = ["--windows", "2", "--steps-per-window", "2", "device=cpu", *dry.split()]
    return Step(
        name,
        [*command, *(_asked_for() or usual)],
        table=out / "bench.md",
        record=out / "bench.json",
    )


def tests_ranks(setting: Setting, seconds: float) -> list[Step]:
    """Compare several GPUs with one in every mode; skipped if there is only one."""
    return _tests(setting, "tests_ranks", _of_ranks())


def bench_ranks(setting: Setting, seconds: float) -> list[Step]:
    """Measure how speed grows with the GPUs; on one GPU, the cost of a rank."""
    out = setting.work / "bench_ranks"
    command = _python("-m", "mprun", "bench", "--out", str(out), f"device={setting.device}")
    command += ["devices=auto", "model=resnet50", "data=synthetic_images", "data.image_size=224"]
    command += ["data.batch_size=128", "--modes", "fp32,tf32,amp"]
    if setting.dry:
        command = _python("-m", "mprun", "bench", "--out", str(out), "devices=2", "device=cpu")
        command += ["model=conv_autoencoder", "data.batch_size=4", "--modes", "fp32"]
        command += ["--windows", "1", "threads=1"]
    return [Step("bench_ranks", command, table=out / "scaling.md", record=out / "scaling.json")]


def fidelity(setting: Setting, seconds: float) -> list[Step]:
    record, table = (setting.work / f"fidelity.{kind}" for kind in ("json", "md"))
    reference = "native" if setting.dry else "cuda"
    command = _python("benchmarks/half_fidelity.py", "--reference", reference)
    if setting.dry:
        command += ["--only", "linear", "--magnitude", "normal"]
    command += ["--json", str(record), "--markdown", str(table)]
    return [Step("fidelity", command, record=record, table=table)]


def results(setting: Setting, seconds: float) -> list[Step]:
    runs = setting.work / "runs"
    size = ["precision=fp32,amp", "seed=0", "train.steps=2", "-j", "1", "threads=1"]
    if not setting.dry:
        # Each run needs a separate core to launch kernels; the GPU itself is mostly idle.
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
    """Set shorter defaults of scripts/real_data's IMAGE, TEXT, JOBS, MODES and SEEDS."""
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


# Weights are seconds in a call of 480.
PARTS = {
    "environment": Part(75, environment, together=True, least=60),
    "ratios": Part(230, ratios, least=60),
    "tests": Part(85, tests, together=True),
    "memory": Part(65, memory, least=45),
    "tests_slow": Part(5, tests_slow, least=30),
    "results": Part(210, results),
    "data": Part(175, real_data),
    "gpt": Part(385, gpt, least=60),
    "bench_peers": Part(385, bench_peers, least=60),
    "tests_ranks": Part(120, tests_ranks),
    "bench_ranks": Part(265, bench_ranks),
}
# The parts of each call, in this order after the environment: the most important ones come first,
# and the last of the first call runs if time is left.
CALLS = {
    "first": ("ratios", "tests", "memory", "tests_slow"),
    "verdicts": ("results", "data"),
    "gpt": ("gpt",),
    "peers": ("bench_peers",),
    "ranks": ("tests_ranks", "bench_ranks"),
}


def gpu_test_files(folder: Path, slow: bool = False) -> list[str]:
    """Find test files with a quick or a slow test of a GPU, relative to the repository.

    Those that matter most come first. A machine without a network may lack a package that one file
    imports: such a file is left out, because to collect it would end the whole run.
    """
    chosen = []
    for path in folder.rglob("test_*.py"):
        text = path.read_text(encoding="utf-8")
        if "mark.gpu" not in text:
            continue
        tree = ast.parse(text)
        gpu = [own for own in _marks(tree) if "mark.gpu" in own]
        is_marked = any(("mark.slow" in own) == slow for own in gpu)
        if is_marked and not _missing_imports(tree):
            chosen.append(str(path.relative_to(ROOT)))

    def turn(name: str) -> tuple[int, bool, str]:
        place = {f"tests/{folder}/": i for i, folder in enumerate(_FIRST_TESTS)}
        first = next((place[start] for start in place if name.startswith(start)), len(place))
        return first, not name.endswith("_on_cuda.py"), name

    return sorted(chosen, key=turn)


def _marks(tree: ast.Module) -> Iterator[str]:
    """Yield the marks of each test, with those of the file, as they are written."""
    of_all = [ast.unparse(own) for own in tree.body if isinstance(own, ast.Assign)]
    for own in ast.walk(tree):
        if isinstance(own, ast.FunctionDef) and own.name.startswith("test_"):
            yield " ".join([*of_all, *map(ast.unparse, own.decorator_list)])


def _missing_imports(tree: ast.Module) -> list[str]:
    names = set()
    for node in tree.body:
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.partition(".")[0])
    return sorted(n for n in names if n not in _OURS and importlib.util.find_spec(n) is None)


def _asked_for() -> list[str]:
    return shlex.split(os.environ.get("BENCH", ""))


def _budget(seconds: float) -> str:
    """Return the budget of a bench, at least 20 s; the rest is for imports and for the report."""
    return str(int(max(seconds - 20, 20)))


def _python(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]
