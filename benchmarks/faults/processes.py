"""What befalls the process: kills, signals, a terminal that goes away, limits, a full disk."""

import json
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

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
KILLS = 54


def kills(campaign: Campaign) -> None:
    """SIGKILL at random moments, again and again, then resume to the end."""
    chance = random.Random(5)
    for name, overrides in KILLED.items():
        steps = [f"train.steps={LENGTH}", f"train.checkpoint_every={EVERY}", "train.eval_every=20"]
        run = [*overrides, *steps]
        home = campaign.scratch("kills")
        reference = home / "reference"
        whole = mprun([*run, f"output_dir={reference}"], home, seconds=300)
        for number in range(KILLS // len(KILLED)):
            path = home / f"run{number}"
            child = Child([*run, f"output_dir={path}"], home)
            killed = 0
            # Twice in one run now and then: a resumed run is killed as well.
            for _ in range(1 + (number % 3 == 0)):
                time.sleep(chance.uniform(0.05, max(0.1, whole.seconds)))
                child.signal(signal.SIGKILL)
                code = child.wait().code
                killed += code == -signal.SIGKILL
                if not path.is_dir():
                    break
                child = Child([f"resume={path}"], home)
            answer = child.wait(300)
            case = f"{name}, {number}: {killed} kills"
            if not path.is_dir():
                campaign.note("kill -9", case, "harmless", "before anything was written")
                continue
            over = "already at step" in answer.output
            same = equal(path, reference, LENGTH)
            kind = kind_of(answer, lambda same=same: same)
            kind = "harmless" if kind == "found" and over and same else kind
            kind = "not resumed" if kind == "found" else kind
            left = leftovers(path)
            campaign.note("kill -9", case, "leftovers" if left else kind, last_line(answer))


def _slow_batches() -> None:
    """Plant: each batch takes 0.1 s, so that a signal meets a run where it is meant to."""
    from mprun.data.token_streams import TokenStreams

    take = TokenStreams.train_batch

    def train_batch(self, index):
        time.sleep(0.1)
        return take(self, index)

    TokenStreams.train_batch = train_batch


def _slow_evaluation() -> None:
    """Plant: an evaluation takes a minute, in many batches."""
    from mprun.data.token_streams import TokenStreams

    take = TokenStreams.eval_batches

    def eval_batches(self):
        for batch in take(self):
            time.sleep(1.0)
            yield batch

    TokenStreams.eval_batches = eval_batches


def _slow_loading() -> None:
    """Plant: making the data takes a minute, as indexing a million files would."""
    from mprun.data.token_streams import SyntheticTokens

    make = SyntheticTokens.__init__

    def slow(self, *args, **kwargs):
        for _ in range(600):
            time.sleep(0.1)
        make(self, *args, **kwargs)

    SyntheticTokens.__init__ = slow


SIGNALS = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGXCPU", "SIGALRM")


def signals(campaign: Campaign) -> None:
    """Seven signals in training, three each in an evaluation, in loading and on the way down."""
    run = [*TINY, *SCALED, "train.steps=40", "train.checkpoint_every=10", "train.eval_every=20"]
    home = campaign.scratch("signals")
    reference = home / "reference"
    mprun([*run, f"output_dir={reference}"], home)
    cases: list[tuple[str, str, Callable[[], None], Callable[[Path], bool]]] = []
    for name in SIGNALS:
        cases.append((f"{name} in training", name, _slow_batches, _metrics_of(3)))
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        cases.append((f"{name} in an evaluation", name, _slow_evaluation, _metrics_of(20)))
        cases.append((f"{name} in loading", name, _slow_loading, lambda path: True))
    cases.append(("SIGINT twice", "SIGINT", _slow_batches, _metrics_of(3)))
    for number, (case, name, plant, ready) in enumerate(cases):
        path = home / f"run{number}"
        child = Child([*run, f"output_dir={path}"], home, prepare=plant)
        until = time.monotonic() + 30
        while not ready(path) and time.monotonic() < until:
            time.sleep(0.02)
        time.sleep(0.5)
        sent = time.monotonic()
        child.signal(getattr(signal, name))
        if case.endswith("twice"):
            time.sleep(0.05)
            child.signal(signal.SIGINT)
        answer = child.wait(child_time := time.monotonic() - child.started + 20)
        took = time.monotonic() - sent
        kind, detail = _after_signal(answer, path, reference, took)
        campaign.note("signals", case, kind, f"{detail} ({took:.1f} s, limit {child_time:.0f})")


def _after_signal(answer: Answer, path: Path, reference: Path, took: float) -> tuple[str, str]:
    """What a stopped run has to be: quick, told, honest, and resumed to the same bits."""
    if answer.code is None:
        return "no answer", ""
    if answer.code == 0:
        return "exit code 0", "for a run that did not finish"
    if "Traceback" in answer.output:
        return "traceback", last_line(answer)
    if took > 2.5:  # two seconds, and what the machine takes beside
        return "late", f"{took:.1f} s"
    if not path.is_dir():
        return ("harmless" if "mprun: " in answer.output else "not told"), "nothing was written"
    status = json.loads((path / "run.json").read_text()).get("status")
    if status != "preempted":
        return "dishonest", f"status {status}, exit code {answer.code}"
    if f"resume={path}" not in answer.output:
        return "not told", "how to go on"
    again = mprun([f"resume={path}"], path.parent)
    same = equal(path, reference, 40)
    return kind_of(again, lambda: same), f"exit code {answer.code}"


def _metrics_of(lines: int) -> Callable[[Path], bool]:
    def ready(path: Path) -> bool:
        try:
            return (path / "metrics.jsonl").read_bytes().count(b"\n") >= lines
        except OSError:
            return False

    return ready


def terminals(campaign: Campaign) -> None:
    """stdout and stderr closed, full, or with a reader that is gone: the run goes on."""
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
    """Too few descriptors, too small files, too little memory, a full disk, a read-only folder."""
    run = [*TINY, *SCALED, "train.steps=40", "train.checkpoint_every=10", "numerics=on"]
    run += ["numerics.every=10"]
    home = campaign.scratch("limits")
    reference = home / "reference"
    mprun([*run, f"output_dir={reference}"], home)
    cases: dict[str, Callable[[], None]] = {}
    for amount in (0, 100, 1000, 3000, 10_000, 20_000, 40_000):
        cases[f"files of {amount} bytes"] = _with_ignored_sigxfsz(amount)
    for amount in (3, 8, 12, 16, 20, 25):
        cases[f"{amount} descriptors"] = limit(resource.RLIMIT_NOFILE, amount)
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
    """Found in one line, and resumed to the same bits where there is something to resume."""
    kind = kind_of(answer, lambda: equal(path, reference, 40))
    detail = last_line(answer)
    # What could not be said, because the file of the output had the same limit, is no fault.
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


def _full_disks(campaign: Campaign, run: list[str], reference: Path) -> None:
    """A file system of its own, too small by a little more each time. Needs the right to mount."""
    disk = campaign.scratch("disk")
    for kib in (4, 16, 48, 96, 160, 240, 320):
        mount = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(disk)]
        if subprocess.run(mount, capture_output=True).returncode:
            campaign.note("limits", "full disk", "harmless", "not tried: no right to mount")
            return
        try:
            path = disk / "run"
            output = campaign.folder / "disk_output"
            answer = mprun([*run, f"output_dir={path}"], disk, output=output)
            subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
            _judge_limit(campaign, f"disk of {kib} KiB", answer, path, reference)
        finally:
            subprocess.run(["umount", str(disk)], check=True)


def sweeps(campaign: Campaign) -> None:
    """A sweep with -j 8, the same sweep twice at once, and one that is killed and begun again."""
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

    root = campaign.scratch("sweep_twice")
    both = [
        Child([*sweep, f"output_root={root}"], root, output=root / f".output{n}") for n in (1, 2)
    ]
    answers = [child.wait(600) for child in both]
    one = same(root) and all(answer.code in (0, 2) for answer in answers)
    campaign.note("sweeps", "two at once", "harmless" if one else "silent", last_line(answers[1]))

    for number, after in enumerate((3.0, 12.0, 25.0)):
        root = campaign.scratch("sweep_killed")
        child = Child([*sweep, "-j", "2", f"output_root={root}"], root)
        time.sleep(after)
        child.signal(signal.SIGKILL)
        child.wait()
        time.sleep(3)  # its runs end with it
        answer = mprun([*sweep, f"output_root={root}"], root, seconds=600)
        kind = kind_of(answer, lambda root=root: same(root))
        campaign.note("sweeps", f"killed {number}, begun again", kind, last_line(answer))
        shutil.rmtree(root)
