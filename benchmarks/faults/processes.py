"""Faults of the process: kills, signals, a terminal that goes away, limits, a full disk."""

import errno
import itertools
import json
import math
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import NamedTuple

from benchmarks.faults.harness import (
    Answer,
    Campaign,
    Child,
    equal,
    kind_of,
    last_line,
    leftovers,
    limit,
    mprun,
)
from benchmarks.faults.subjects import KILLED, SCALED, TINY

LENGTH, EVERY = 60, 5  # steps
KILLS = 72
SAID_S, ENDED_S = 2.0, 2.5  # limits until a signal is answered, and until the process ends


def kills(campaign: Campaign) -> None:
    """Kill at random moments and inside saves, again and again, then resume to the end."""
    chance = random.Random(5)
    for name, overrides in KILLED.items():
        steps = [f"train.steps={LENGTH}", f"train.checkpoint_every={EVERY}", "train.eval_every=20"]
        run = [*overrides, *steps, "train.log_every=1"]
        home = campaign.scratch("kills")
        reference = home / "reference"
        whole = mprun([*run, f"output_dir={reference}"], home, seconds=300)
        for number in range(KILLS // len(KILLED)):
            path = home / f"run{number}"
            killed = in_a_save = 0
            # A third of the runs is killed twice: the second kill hits a resumed run.
            for _ in range(1 + (number % 3 == 0)):
                again = (path / "run.json").exists()
                child = Child([f"resume={path}"] if again else [*run, f"output_dir={path}"], home)
                if number % 3 == 1:
                    in_a_save += _begins_to_save(child, path, chance.randint(0, 3))
                else:
                    if number:  # the first is killed anywhere, even before its first step
                        _begins(child, path)
                    time.sleep(chance.uniform(0.0, 0.3 * whole.seconds))
                child.signal(signal.SIGKILL)
                killed += child.wait().code == -signal.SIGKILL
                if not (path / "run.json").exists():  # no step has begun: start again
                    shutil.rmtree(path, ignore_errors=True)
            where = f"{in_a_save} in a save" if in_a_save else "anywhere"
            case = f"{name}, {number}: {killed} kills, {where}"
            if not path.is_dir():
                campaign.note("kill -9", case, "harmless", "before anything was written")
                continue
            answer = mprun([f"resume={path}"], home, seconds=300)
            over = "already at step" in answer.output
            same = equal(path, reference, LENGTH)
            kind = kind_of(answer, lambda same=same: same)
            kind = "harmless" if kind == "found" and over and same else kind
            kind = "not resumed" if kind == "found" else kind
            left = leftovers(path)
            campaign.note("kill -9", case, "leftovers" if left else kind, last_line(answer))


def _begins(child: Child, path: Path) -> None:
    """Wait for the run's first record."""
    before = _lines(path)
    until = time.monotonic() + 60
    while time.monotonic() < until and not child.over() and _lines(path) <= before:
        time.sleep(0.0005)


def _lines(path: Path) -> int:
    try:
        return (path / "metrics.jsonl").read_bytes().count(b"\n")
    except OSError:
        return 0


def _begins_to_save(child: Child, path: Path, before: int) -> bool:
    """Wait for the save that follows `before` others; return whether it is under way."""
    seen: set[str] = set()
    until = time.monotonic() + 60
    while time.monotonic() < until and not child.over():
        folder = path / "checkpoints"
        if folder.is_dir():
            seen |= {entry.name for entry in folder.iterdir() if entry.name.startswith(".step-")}
        if len(seen) > before:
            return True
        time.sleep(0.0005)
    return False


def _slow_batches() -> None:
    """Plant a delay: each batch takes 0.1 s, so that a signal hits the intended place."""
    from mprun.data.token_streams import TokenStreams

    take = TokenStreams.train_batch

    def train_batch(self, index):
        time.sleep(0.1)
        return take(self, index)

    TokenStreams.train_batch = train_batch


def _slow_evaluation() -> None:
    """Plant a delay: an evaluation takes a minute, in many batches."""
    from mprun.data.token_streams import TokenStreams

    take = TokenStreams.eval_batches

    def eval_batches(self):
        for batch in take(self):
            time.sleep(1.0)
            yield batch

    TokenStreams.eval_batches = eval_batches


def _slow_loading() -> None:
    """Plant a delay: making the data takes a minute, like indexing a million files."""
    from mprun.data.token_streams import SyntheticTokens

    make = SyntheticTokens.__init__

    @wraps(make)  # its arguments are filled by their names
    def slow(self, *args, **kwargs):
        for _ in range(600):
            time.sleep(0.1)
        make(self, *args, **kwargs)

    SyntheticTokens.__init__ = slow


def _slow_saves() -> None:
    """Plant a delay: a checkpoint takes 1.5 s to write, like one of a gigabyte."""
    import torch

    save = torch.save

    def slow(*args, **kwargs):
        for _ in range(15):
            time.sleep(0.1)
        save(*args, **kwargs)

    torch.save = slow


def _cache_of_compiler(folder: Path) -> Callable[[], None]:
    """Set the compiler's cache to `folder`; empty a folder that is called cold."""

    def prepare() -> None:
        if folder.name == "cold":
            shutil.rmtree(folder, ignore_errors=True)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)

    return prepare


# A separate process on the fake device: the first capture of a graph takes a second more.
_CAPTURING = """
import pathlib, sys, time
from mprun.cli import main
from mprun.execution.cuda_graph import CudaRecorder
record = CudaRecorder.record
def slowly(self, function):
    def body():
        if not pathlib.Path("capturing").exists():
            pathlib.Path("capturing").touch()
            time.sleep(1)
        return function()
    return record(self, body)
CudaRecorder.record = slowly
sys.exit(main(sys.argv[1:]))
"""


class Place(NamedTuple):
    """A place where a signal hits a run.

    Attributes:
        plant: Called in the child before mprun.
        ready: Returns whether the run in this folder, with this output, has reached the place.
        reference: An undisturbed run; None: values mean nothing.
        longest_s: Longest time from the signal to the last output.
        resumed: As `plant`, for the resumed run.
    """

    name: str
    signals: tuple[str, ...]
    run: list[str]
    plant: Callable[[], None]
    ready: Callable[[Path, Path], bool]
    reference: Path | None = None
    longest_s: float = ENDED_S
    resumed: Callable[[], None] | None = None


SIGNALS = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGXCPU", "SIGALRM")


def signals(campaign: Campaign) -> None:
    """Send signals in training, evaluation, loading, saving, compiling and capturing."""
    run = [*TINY, *SCALED, "train.steps=40", "train.checkpoint_every=10", "train.eval_every=20"]
    run += ["train.log_every=1"]
    compiled = [*KILLED["autoencoder bf16_master"][:-1], "train.compile=default"]
    compiled += ["train.steps=4", "train.log_every=1", "train.checkpoint_every=4"]
    home = campaign.scratch("signals")
    whole, warm = home / "reference", _cache_of_compiler(home / "warm")
    mprun([*run, f"output_dir={whole}"], home)
    all_of, three, two = SIGNALS, ("SIGINT", "SIGTERM", "SIGHUP"), ("SIGINT", "SIGTERM")
    places = [
        Place("training", all_of, run, _slow_batches, _metrics_of(3), whole),
        Place("an evaluation", three, run, _slow_evaluation, _metrics_of(20), whole),
        Place("loading", three, run, _slow_loading, lambda path, output: True, whole),
        Place("a save", two, run, _slow_saves, _in_a_save, whole, ENDED_S + 1.5),
    ]
    whole = home / "compiled"
    answer = mprun([*compiled, f"output_dir={whole}"], home, prepare=warm, seconds=300)
    if answer.code != 0:
        campaign.note("signals", "compiling", "not tried", last_line(answer))
    else:
        cold = _cache_of_compiler(home / "cold")
        places += [Place("compiling", two, compiled, cold, _compiling, whole, resumed=warm)]
    for place in places:
        for name in place.signals:
            _meet(campaign, place, name, home)
    for _ in range(3):
        _meet(campaign, places[0], "SIGINT", home, twice=True)
    _captures(campaign, campaign.scratch("captures"), two)


def _captures(campaign: Campaign, home: Path, names: tuple[str, ...]) -> None:
    """Return the place on the fake CUDA device, whose values mean nothing."""
    from tests.fake_cuda import runtime as fake_cuda

    if (reason := fake_cuda.why_not()) is not None:
        campaign.note("signals", "capturing", "not tried", reason)
        return
    fake_cuda.build(home / "device")
    run = [*[key for key in TINY if not key.startswith("device")], "precision=amp", "device=cuda"]
    run += ["train.cuda_graph=on", "train.steps=40"]
    for name in names:
        command = [sys.executable, "-c", _CAPTURING, *run, f"output_dir={home / 'run'}"]
        variables = fake_cuda.environment(home / "device")
        variables |= {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        become = partial(os.execve, sys.executable, command, variables)
        place = Place("capturing", names, run, become, _capturing, None, ENDED_S + 1.5)
        _meet(campaign, place, name, home)


def _meet(campaign: Campaign, place: Place, name: str, home: Path, twice: bool = False) -> None:
    """Send signal `name` to a run at a place, and judge the outcome."""
    path = home / "run"
    shutil.rmtree(path, ignore_errors=True)
    for left in (".output", "capturing"):
        (home / left).unlink(missing_ok=True)
    child = Child([*place.run, f"output_dir={path}"], home, prepare=place.plant)
    until = time.monotonic() + 120
    while not place.ready(path, child.output) and time.monotonic() < until and not child.over():
        time.sleep(0.005)
    time.sleep(0.3)
    sent = time.monotonic()
    child.signal(getattr(signal, name))
    if twice:
        time.sleep(0.05)
        child.signal(signal.SIGINT)
    # Times until the answer and until the last output, without Python's exit.
    said = took = math.inf
    while math.isinf(took) and time.monotonic() < sent + 60:
        over = child.over()
        output, now = child.output.read_text("utf-8", "replace"), time.monotonic() - sent
        said = min(said, now) if f"mprun: {name}: " in output else said
        took = now if over or "\nrun: " in output else took
        time.sleep(0.005)
    answer = child.wait(sent - child.started + 60)
    kind, detail = _after_signal(answer, path, place)
    if kind in ("found", "harmless") and (said > SAID_S or took > place.longest_s):
        kind = "late"
    case = f"{name} in {place.name}{' twice' if twice else ''}"
    campaign.note("signals", case, kind, f"{detail}; said in {said:.2f} s, over in {took:.2f} s")


def _after_signal(answer: Answer, path: Path, place: Place) -> tuple[str, str]:
    """Check a stopped run: it reports the stop, has the right status, resumes to the same bits."""
    if answer.code is None:
        return "no answer", ""
    if answer.code == 0:
        return "exit code 0", "for a run that did not finish"
    if "Traceback" in answer.output:
        return "traceback", last_line(answer)
    if not path.is_dir():
        return ("harmless" if "mprun: " in answer.output else "not told"), "nothing was written"
    status = json.loads((path / "run.json").read_text()).get("status")
    if place.reference is None and status == "diverged":
        return "harmless", f"exit code {answer.code}, values mean nothing"
    if status != "preempted":
        return "dishonest", f"status {status}, exit code {answer.code}"
    if f"resume={path}" not in answer.output:
        return "not told", "how to go on"
    if place.reference is None:
        return "harmless", f"exit code {answer.code}"
    again = mprun([f"resume={path}"], path.parent, prepare=place.resumed, seconds=300)
    steps = int(next(key for key in place.run if key.startswith("train.steps")).partition("=")[2])
    same = equal(path, place.reference, steps)
    return kind_of(again, lambda: same), f"exit code {answer.code}"


def _in_a_save(path: Path, output: Path) -> bool:
    return any((path / "checkpoints").glob(".step-*"))


def _compiling(path: Path, output: Path) -> bool:
    # Step 1, which is not compiled, is over.
    return output.exists() and "ran in:" in output.read_text("utf-8", "replace")


def _capturing(path: Path, output: Path) -> bool:
    return (output.parent / "capturing").exists()


def _metrics_of(lines: int) -> Callable[[Path, Path], bool]:
    return lambda path, output: _lines(path) >= lines


def terminals(campaign: Campaign) -> None:
    """Close stdout and stderr, fill them, or end their reader: the run goes on."""
    run = [*TINY, *SCALED, "train.steps=40", "train.checkpoint_every=10"]
    home = campaign.scratch("terminals")
    reference = home / "reference"
    mprun([*run, f"output_dir={reference}"], home)
    command = f"{sys.executable} -m mprun " + " ".join(run)
    endings = {
        "stderr closed": "2>&-",
        "both closed": ">&- 2>&-",
        "all closed": "<&- >&- 2>&-",
        "stderr full": "2>/dev/full",
        "stdout full": ">/dev/full",
        "reader gone": "2>&1 | head -1",
        "stdout's reader gone": "| true",
        "stderr's reader gone": "2> >(true)",
    }
    for number, (case, ending) in enumerate(endings.items()):
        path = home / f"run{number}"
        shell = f"set -o pipefail; {command} output_dir={path} {ending}"
        done = subprocess.run(["bash", "-c", shell], cwd=Path.cwd(), capture_output=True)
        same = equal(path, reference, 40)
        kind = "harmless" if same and done.returncode == 0 else f"exit code {done.returncode}"
        campaign.note("terminal", case, kind, "" if same else "not the same bits")


def limits(campaign: Campaign) -> None:
    """Limit descriptors, file sizes, memory and disk; make a folder read-only."""
    run = [*TINY, *SCALED, "train.steps=40", "train.checkpoint_every=10", "numerics=probes"]
    run += ["numerics.every=10", "train.log_every=1"]
    home = campaign.scratch("limits")
    reference = home / "reference"
    mprun([*run, f"output_dir={reference}"], home)
    cases: dict[str, Callable[[], None]] = {}
    for amount in (0, 100, 1000, 3000, 10_000, 20_000, 40_000):
        cases[f"files of {amount} bytes"] = _with_ignored_sigxfsz(amount)
    for amount in (3, 8, 12, 16, 20, 25):
        cases[f"{amount} descriptors"] = limit(resource.RLIMIT_NOFILE, amount)
    for mib in (0, 1, 4, 16, 64):
        cases[f"{mib} MiB of memory more"] = partial(_with_memory, mib)
    for name in ("ENOSPC", "EDQUOT", "EIO", "EROFS"):
        for nth in (1, 3, 6):
            cases[f"{name} at sync {nth}"] = partial(_failing_sync, getattr(errno, name), nth)
    for number, (case, prepare) in enumerate(cases.items()):
        path = home / f"run{number}"
        answer = mprun(
            [*run, f"output_dir={path}"], home, prepare=prepare, output=home / f"out{number}"
        )
        _judge_limit(campaign, case, answer, path, reference)
    _full_disks(campaign, run, reference)


def _judge_limit(
    campaign: Campaign, case: str, answer: Answer, path: Path, reference: Path
) -> None:
    """Check that the fault is found in one line, and that the run resumes to the same bits."""
    kind = kind_of(answer, lambda: equal(path, reference, 40))
    detail = last_line(answer)
    # Missing output is no fault: the output file had the same limit.
    if kind == "no line" or (kind.startswith("exit code") and answer.code == 120):
        kind = "found"
    if kind == "found" and (path / "run.json").exists():
        again = mprun([f"resume={path}"], path.parent)
        if not (again.code == 0 and equal(path, reference, 40)):
            kind, detail = "not resumed", last_line(again)
    campaign.note("limits", case, kind, detail)


def _with_ignored_sigxfsz(amount: int) -> Callable[[], None]:
    def prepare() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (amount, resource.RLIM_INFINITY))

    return prepare


def _with_memory(mib: int) -> None:
    """Limit memory to that of this process plus an amount."""
    has = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    limit(resource.RLIMIT_AS, has + mib * 2**20)()


def _failing_sync(number: int, nth: int) -> None:
    """Plant a failure: from the n-th sync on, nothing reaches the disk."""
    sync, calls = os.fsync, itertools.count(1)

    def failing(descriptor: int) -> None:
        if next(calls) >= nth:
            raise OSError(number, os.strerror(number))
        sync(descriptor)

    os.fsync = failing


def _full_disks(campaign: Campaign, run: list[str], reference: Path) -> None:
    """Use small file systems, each a little larger than the last. Needs the right to mount."""
    disk = campaign.scratch("disk")
    for kib in (4, 16, 48, 96, 160, 240, 320):
        mount = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(disk)]
        if subprocess.run(mount, capture_output=True).returncode:
            campaign.note("limits", "full disk", "not tried", "no right to mount")
            return
        try:
            path = disk / "run"
            output = campaign.folder / "disk_output"
            answer = mprun([*run, f"output_dir={path}"], disk, output=output)
            subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
            _judge_limit(campaign, f"disk of {kib} KiB", answer, path, reference)
        finally:
            subprocess.run(["umount", str(disk)], check=True)
    _read_only(campaign, run, disk, reference)


def _read_only(campaign: Campaign, run: list[str], disk: Path, reference: Path) -> None:
    """Resume a killed run on a file system that became read-only."""
    home, output = campaign.folder, campaign.folder / "disk_output"
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(disk)], check=True)
    try:
        path = disk / "run"
        words = [*run, f"output_dir={path}"]
        child = Child(words, home, prepare=_slow_batches, output=output)
        while not _metrics_of(25)(path, output) and not child.over():
            time.sleep(0.01)
        child.signal(signal.SIGKILL)
        child.wait()
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        for words in ([f"resume={path}"], [*run, f"output_dir={disk / 'new'}"]):
            answer = mprun(words, home, output=output)
            kind = kind_of(answer, lambda: False)
            campaign.note("limits", f"read-only: {words[-1]}", kind, last_line(answer))
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        answer = mprun([f"resume={path}"], home, output=output)
        kind = kind_of(answer, lambda: equal(path, reference, 40))
        campaign.note("limits", "read-only, then writable", kind, last_line(answer))
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def sweeps(campaign: Campaign) -> None:
    """Run a sweep with -j 8, the same sweep twice at once, and one that is killed and repeated."""
    axes = ["precision=fp32,fp16_naive,fp16_master_scaled", "seed=0,1,2", "train.steps=20"]
    sweep = ["-m", *[part for part in TINY], *axes, "train.checkpoint_every=5"]
    reference = campaign.scratch("sweep_reference")
    mprun([*sweep, f"output_root={reference}"], reference, seconds=600)

    def same(root: Path) -> bool:
        wanted = {p.relative_to(reference) for p in reference.rglob("metrics.jsonl")}
        found = {p.relative_to(root) for p in root.rglob("metrics.jsonl")}
        ends = len(wanted) == 9 and wanted == found
        return ends and all(
            equal(root / path.parent, reference / path.parent, 20) for path in wanted
        )

    root = campaign.scratch("sweep_j8")
    answer = mprun([*sweep, "-j", "8", f"output_root={root}"], root, seconds=600)
    campaign.note("sweeps", "-j 8", kind_of(answer, lambda: same(root)), last_line(answer))
    whole = answer.seconds

    root = campaign.scratch("sweep_twice")
    both = [
        Child([*sweep, f"output_root={root}"], root, output=root / f".output{n}") for n in (1, 2)
    ]
    answers = [child.wait(600) for child in both]
    for number, answer in enumerate(answers):
        kind = kind_of(answer, lambda: same(root))
        campaign.note("sweeps", f"two at once, {number}", kind, last_line(answer))
    kind = "harmless" if same(root) else "silent"
    campaign.note("sweeps", "two at once, together", kind, last_line(answers[1]))

    for number, share in enumerate((0.1, 0.4, 0.7)):
        root = campaign.scratch("sweep_killed")
        child = Child([*sweep, "-j", "2", f"output_root={root}"], root)
        time.sleep(share * whole)
        child.signal(signal.SIGKILL)
        child.wait()
        time.sleep(5)  # its runs end with it
        answer = mprun([*sweep, f"output_root={root}"], root, seconds=600)
        kind = kind_of(answer, lambda root=root: same(root))
        campaign.note("sweeps", f"killed {number}, begun again", kind, last_line(answer))
        shutil.rmtree(root)
