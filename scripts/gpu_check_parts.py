"""The parts of scripts/gpu_check and their commands."""

import ast
import importlib.util
import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from gpu_check_processes import Step

ROOT = Path(__file__).resolve().parents[1]
_MODES = "fp32,tf32,fp16_naive,fp16_master,fp16_master_scaled,amp,bf16_naive,bf16_master,amp_bf16"
# The benches of the first call: large convolutions; a small network, a recurrent one.
_BESIDE, _OWN = "ResNet-50 b256", "DCGAN b128,LSTM LM"
_OWN_MODES = "fp32,tf32,fp16_master_scaled,amp"
_RATIO_MODES = "fp32,fp16_master_scaled,amp"  # TF32 and its loop come in the call of the peers
_GPT_MODES = "fp32,tf32,amp_bf16,bf16_stochastic,fp8_tensorwise,fp8_rowwise,"
_GPT_MODES += "mxfp8,nvfp4"
# The tests of graphs in these modes can wait; "]" ends the name of a test, and distinguishes the
# mode fp16_master from fp16_master_scaled.
_LATER_MODES = ("fp16_naive", "fp16_master]", "bf16_master")
# A first import of torch takes long on a machine that has just started, or is busy.
_LEAST_S = 60.0
_OURS = ("mprun", "benchmarks")  # packages that are not installed
# A mode that diverges is a result.
_DONE_OR_DIVERGED = (0, 3)


@dataclass(frozen=True, slots=True)
class Setting:
    """The command line of gpu_check. work: folder for everything except the summary.

    data: folder of real data, or None. device: "cuda", or "cpu" for a dry run at the smallest size.
    facts: of the machine, for each step's record.
    """

    work: Path
    device: str
    data: Path | None
    facts: dict[str, str] = field(default_factory=dict)

    @property
    def dry(self) -> bool:
        return self.device == "cpu"


@dataclass(frozen=True, slots=True)
class Part:
    """A part. weight: its share of the time. steps: makes commands from a setting and seconds."""

    weight: float
    steps: Callable[[Setting, float], list[Step]]


def environment(setting: Setting, seconds: float) -> list[Step]:
    record = setting.work / "machine.json"
    return [
        Step(
            "machine",
            _python("scripts/gpu_check_environment.py", str(record)),
            record=record,
            least=_LEAST_S,
        ),
        Step("doctor", _python("-m", "mprun", "doctor"), plain=True, least=_LEAST_S),
    ]


def tests_models(setting: Setting, seconds: float) -> list[Step]:
    """Test every model in every mode."""
    return _tests(setting, "tests_models", _in_folder("tasks"))


def tests_update(setting: Setting, seconds: float) -> list[Step]:
    """Test updates, casts and loss scales."""
    return _tests(setting, "tests_update", _in_folder("precision"))


def tests_graphs(setting: Setting, seconds: float) -> list[Step]:
    """Test CUDA graphs in the most important modes."""
    chosen = "not (" + " or ".join(_LATER_MODES) + ")"
    return _tests(setting, "tests_graphs", _in_folder("execution"), "-k", chosen)


def tests_others(setting: Setting, seconds: float) -> list[Step]:
    """Run the tests that the parts above leave out, except slow ones."""
    folders = ("tasks", "precision", "execution", "distributed")
    before = [name for folder in folders for name in _in_folder(folder)]
    others = [name for name in gpu_test_files(ROOT / "tests") if name not in before]
    graphs, chosen = _in_folder("execution"), " or ".join(_LATER_MODES)
    return [
        *_tests(setting, "tests_others", others, share=8),
        *_tests(setting, "tests_other_graphs", graphs, "-k", chosen),
    ]


def tests_slow(setting: Setting, seconds: float) -> list[Step]:
    """Run the slow tests: torch.compile, a whole bench."""
    files = gpu_test_files(ROOT / "tests", also="mark.slow")
    return _tests(setting, "tests_slow", files, marks="gpu and slow")


def _tests(
    setting: Setting,
    name: str,
    files: list[str],
    *more: str,
    marks: str = "gpu and not slow",
    share: float = 1.0,
) -> list[Step]:
    """Make a test step of some files; a dry run, which skips all, collects just one file."""
    if not files:  # pytest would run all files
        return []
    log = setting.work / f"{name}.jsonl"
    command = _python("-m", "pytest", "-m", marks, *more, "-p", "no:cacheprovider")
    command += ["-p", "gpu_check_pytest", f"--tests-log={log}", "-rfE", "--tb=short"]
    command += ["--durations=10", "--continue-on-collection-errors"]
    command += files[:1] if setting.dry else files
    return [Step(name, command, share=share, record=log, plain=True)]


def _in_folder(name: str) -> list[str]:
    return gpu_test_files(ROOT / "tests" / name)


def ratios(setting: Setting, seconds: float) -> list[Step]:
    """Bench the most important model beside what a user would write: the question of speed."""
    usual = ["--peers", "loop,amp,amp+", "--only", _BESIDE, "--modes", _RATIO_MODES, "--plain"]
    return [_bench(setting, seconds, "ratios", usual)]


def bench(setting: Setting, seconds: float) -> list[Step]:
    """Bench mprun alone without its best settings, which include a minute of torch.compile."""
    return [_bench(setting, seconds, "bench", ["--plain", "--only", _OWN, "--modes", _OWN_MODES])]


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
    # The bench ends by its budget of at least 20 s; the rest is for imports and for the report.
    budget = str(int(max(seconds - 20, 20)))
    command = _python("-m", "benchmarks.suite", "--budget", budget, "--out", str(out))
    if "BENCH" in os.environ:
        usual = shlex.split(os.environ["BENCH"])
    elif setting.dry:
        usual = ["--windows", "2", "--steps-per-window", "2", "device=cpu", *dry.split()]
    return Step(name, [*command, *usual], table=out / "bench.md", record=out / "bench.json")


def tests_ranks(setting: Setting, seconds: float) -> list[Step]:
    """Compare several GPUs with one in every mode; skipped if there is only one."""
    return _tests(setting, "tests_ranks", _in_folder("distributed"))


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


# Weights are seconds in a call of 540.
PARTS = {
    "environment": Part(20, environment),
    "tests_update": Part(40, tests_update),
    "ratios": Part(150, ratios),
    "tests_models": Part(110, tests_models),
    "tests_graphs": Part(75, tests_graphs),
    "bench": Part(110, bench),
    "fidelity": Part(20, fidelity),
    "results": Part(280, results),
    "data": Part(225, real_data),
    "gpt": Part(505, gpt),
    "bench_peers": Part(220, bench_peers),
    "tests_others": Part(135, tests_others),
    "tests_slow": Part(150, tests_slow),
    "tests_ranks": Part(150, tests_ranks),
    "bench_ranks": Part(355, bench_ranks),
}
# The parts of each call, in this order after the environment: the most important ones come first.
CALLS = {
    "first": ("tests_update", "ratios", "tests_models", "tests_graphs", "bench", "fidelity"),
    "verdicts": ("results", "data"),
    "gpt": ("gpt",),
    "peers": ("bench_peers", "tests_others", "tests_slow"),
    "ranks": ("tests_ranks", "bench_ranks"),
}


def gpu_test_files(folder: Path, also: str = "mark.gpu") -> list[str]:
    """Find test files with a test marked gpu whose imports all exist, relative to the repository.

    Files that are only about CUDA come first. A machine without a network may lack a package that
    one file needs; collecting that file would end the whole run. also: another text in the files.
    """
    chosen = []
    for path in folder.rglob("test_*.py"):
        text = path.read_text(encoding="utf-8")
        if "mark.gpu" in text and also in text and not _missing_imports(ast.parse(text)):
            chosen.append(str(path.relative_to(ROOT)))
    return sorted(chosen, key=lambda name: (not name.endswith("_on_cuda.py"), name))


def _missing_imports(tree: ast.Module) -> list[str]:
    names = set()
    for node in tree.body:
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.partition(".")[0])
    return sorted(n for n in names if n not in _OURS and importlib.util.find_spec(n) is None)


def _python(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]
