"""A directory shows the state of its cell, and a sweep acts on it: no run is started here."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import asdict
from io import StringIO
from itertools import product

import pytest

from mprun.cli import main
from mprun.errors import DAMAGED, DIVERGED, PREEMPTED, BadInput
from mprun.record.console import opening
from mprun.record.run_directory import Pulse, locked, write_config, write_json
from mprun.record.run_record import Record
from mprun.sweeps import run, status_page
from mprun.sweeps.attempt import AttemptOutcome, ProcessEnd, exit_code, outcome_of
from mprun.sweeps.batch import cell_of
from mprun.sweeps.jobs import Cell, State, damage_of, put_aside, record_of, state_of
from mprun.sweeps.plan import Plan, plan
from mprun.sweeps.status_page import StatusPage
from mprun.training.loop import Heartbeat

from ..helpers import but

RECORD = {"seed": 0, "sample": "image", "overrides": ["seed=0"], "attempts": 1, "steps": 20}
RECORD |= {"precision": {"mode": "fp32", "scaler": "none"}}


@pytest.fixture
def cell(tiny):
    return plan([*tiny, "seed=0"], None).cells[0]


def put(cell, **record):
    cell.directory.mkdir(parents=True, exist_ok=True)
    (cell.directory / ".lock").touch()
    content = RECORD | {"config_hash": cell.config_hash, "status": "running"} | record
    write_json(cell.directory / "run.json", content)


@pytest.mark.parametrize(
    ("status", "checkpoint", "expected"),
    [
        ("done", True, State.FINISHED),
        ("diverged", False, State.FINISHED),
        ("preempted", True, State.RESUMABLE),
        ("preempted", False, State.ABANDONED),
        ("running", True, State.RESUMABLE),  # the machine stopped
        ("running", False, State.ABANDONED),
        ("failed", True, State.ABANDONED),
    ],
)
def test_the_state_of_a_cell(cell, status, checkpoint, expected):
    assert state_of(cell) is State.NEW
    put(cell, status=status)
    if checkpoint:
        (cell.directory / "checkpoints" / "step-00000010").mkdir(parents=True)
    assert state_of(cell) is expected
    with locked(cell.directory):
        assert state_of(cell) is State.IN_USE
    assert state_of(cell) is expected


def test_a_directory_just_claimed_is_in_use(cell):
    cell.directory.mkdir(parents=True)
    assert state_of(cell) is State.IN_USE  # no lock yet
    (cell.directory / ".lock").touch()
    assert state_of(cell) is State.ABANDONED


def test_what_is_no_run_of_this_cell(cell):
    put(cell, config_hash="0")
    with pytest.raises(BadInput, match="another configuration; use name="):
        state_of(cell)
    (cell.directory / "run.json").write_text("{")
    assert state_of(cell) is State.DAMAGED
    put_aside(cell)
    cell.directory.write_text("a file")
    with pytest.raises(BadInput, match="not a folder"):
        state_of(cell)


def finish(cell):
    """The files of a run that is done."""
    put(cell, status="done", last_step=20)
    write_config(cell.directory, {"seed": 0})
    (cell.directory / "metrics.jsonl").write_text('{"split": "eval", "step": 20, "updates": 20}\n')


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("config.yaml", None, "contains no config.yaml"),
        ("config.yaml", "a: [", "not valid YAML"),
        ("metrics.jsonl", None, "metrics.jsonl: ends at step 0, the run at 20"),
        ("metrics.jsonl", '{"split": "eval", "step": 9, "updates": 9}', "ends at step 9, the run"),
        ("metrics.jsonl", "?\n", "metrics.jsonl: line 1 is not JSON"),
        ("run.json", "{", "run.json: "),
    ],
)
def test_a_damaged_cell_is_told_and_not_run_again(name, content, says, cell, tiny, capsys):
    finish(cell)
    assert damage_of(cell.directory) is None
    assert main(["-m", *tiny, "seed=0"]) == 0
    assert ", all finished already" in capsys.readouterr().err
    path = cell.directory / name
    path.unlink() if content is None else path.write_text(content)
    assert main(["-m", *tiny, "seed=0"]) == DAMAGED
    printed = capsys.readouterr()
    assert says in printed.err and "; the run counts as failed" in printed.err
    assert printed.err.count("--rerun-damaged") == 1
    assert "finished already" not in printed.err and "damaged: " in printed.out
    assert not cell.directory.with_name(f"{cell.directory.name}.attempt1").exists()


def test_a_damaged_cell_is_put_aside_where_that_is_asked_for(cell):
    finish(cell)
    put_aside(cell)
    assert cell.directory.exists()  # an outcome stays
    put_aside(cell, finished=True)
    assert state_of(cell) is State.NEW
    aside = cell.directory.with_name(f"{cell.directory.name}.attempt1")
    assert record_of(aside)["status"] == "done"


@pytest.mark.parametrize(
    ("key", "group"), [("data.root", "image_folder"), ("data.vocabulary", "lm1b")]
)
def test_a_run_on_data_elsewhere_is_not_this_cells(key, group, tmp_path):
    for name in "AB":
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to("A")
    model = "lstm_lm" if group == "lm1b" else "resnet50"
    fixed = ["device=cpu", f"model={model}", f"data={group}", "data.root=A", "seed=0"]
    plans = [plan(but(fixed, f"{key}={place}"), None) for place in ("A", "B", "link")]
    here, there, linked = (one.cells[0] for one in plans)
    assert here.directory == there.directory and here.config_hash == there.config_hash
    config = {"data": dict(here.data_places)}
    for status in ("done", "preempted", "failed"):
        put(here, status=status, config=config)
        assert state_of(here) is state_of(linked) is not State.NEW
        message = f"the run there has {key}=A, but this sweep has {key}=B; use name= for a"
        with pytest.raises(BadInput, match=message) as caught:
            state_of(there)
        assert "\n" not in str(caught.value)
    # Before anything is started or written.
    before = sorted(tmp_path.rglob("*"))
    assert main(["-m", *but(fixed, f"{key}=B")]) == 2
    assert sorted(tmp_path.rglob("*")) == before


def test_a_cell_is_the_same_in_a_worker(tmp_path):
    (tmp_path / "A").mkdir()
    cell = plan(["device=cpu", "model=resnet50", "data=image_folder", "data.root=A"], None).cells[0]
    assert ("root", "A") in cell.data_places
    written = json.dumps(asdict(cell) | {"directory": str(cell.directory)})
    assert cell_of(json.loads(written)) == cell
    assert len({cell, cell_of(json.loads(written))}) == 1


def test_a_run_that_nobody_saw_end_is_put_aside_as_ended(cell):
    put(cell)
    put_aside(cell)
    record = record_of(cell.directory.with_name(f"{cell.directory.name}.attempt1"))
    assert (record["status"], record["cause"]) == ("failed", "killed by an unknown cause")
    assert record["ended"]


def test_attempts_are_kept_under_numbers(cell):
    for number in (1, 2):
        put(cell, status="failed", cause=str(number))
        cell.log.write_text(f"printed {number}\n")
        put_aside(cell)
        aside = cell.directory.with_name(f"{cell.directory.name}.attempt{number}")
        assert record_of(aside)["cause"] == (aside / "console.log").read_text().split()[1]
    # Finished in the meantime: stays.
    put(cell, status="done")
    put_aside(cell)
    assert cell.directory.is_dir()
    with locked(cell.directory), pytest.raises(BadInput, match="in use"):
        put_aside(cell)


def test_a_lock_on_a_moved_directory_is_none(cell, monkeypatch):
    put(cell)
    flock = fcntl.flock

    def moved_in_between(file, operation):
        cell.directory.rename(cell.directory.with_name("moved"))
        put(cell)
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", moved_in_between)
    with pytest.raises(BadInput, match="in use"), locked(cell.directory):
        pass
    assert (cell.directory.parent / "moved" / "run.json").is_file()


BUG = "Traceback ...\nKeyError: 'x'\nmprun: this is a bug in mprun"
OWN = "KeyError: 'x'\nmprun: raised in or below a.py, line 3: an error there, or a bug in mprun"


@pytest.mark.parametrize(
    ("ended", "printed", "words", "code"),
    [
        (ProcessEnd(-9), "step 3/20", "killed by SIGKILL", 5),
        (ProcessEnd(-11), "", "killed by SIGSEGV", 5),
        (ProcessEnd(-15), "", "stopped before its first step", 5),
        (ProcessEnd(-9, hung_s=30.0), "", "hung: no progress for 30 s, killed", 5),
        (ProcessEnd(2), "x\nmprun: data.root=a: no", "failed: data.root=a: no", 2),
        (ProcessEnd(5), "mprun: out of memory: 9 GB", "failed: out of memory: 9 GB", 5),
        (ProcessEnd(1), BUG, "failed: KeyError: 'x'", 1),
        (ProcessEnd(1), OWN, "failed: KeyError: 'x'", 1),
        (ProcessEnd(7), "", "failed: exit code 7", 7),
    ],
)
@pytest.mark.few(4)
def test_the_end_of_a_process_in_words(cell, ended, printed, words, code):
    cell.log.parent.mkdir(parents=True)
    cell.log.write_text(printed)
    assert outcome_of(cell, ended, attempts_before=0) == AttemptOutcome(words, code)
    # The same with a record that still says `running`: it says how the run ended from now on.
    put(cell)
    if ended.code == -signal.SIGTERM:
        words, code = "preempted", PREEMPTED
    assert outcome_of(cell, ended, attempts_before=0) == AttemptOutcome(words, code)
    record = record_of(cell.directory)
    if ended.code == -signal.SIGTERM:
        assert record["cause"] == "SIGTERM"
        return
    assert record["status"] == "failed" and record["ended"]
    assert words.removeprefix("failed: ") == record["cause"]


def test_a_record_is_believed_where_it_is_complete(cell):
    put(cell, status="failed", cause="RuntimeError: no")
    assert outcome_of(cell, ProcessEnd(1), 0) == AttemptOutcome("failed: RuntimeError: no", 1)
    put(cell, status="diverged", last_step=12)
    assert outcome_of(cell, ProcessEnd(3), 0) == AttemptOutcome("diverged at step 12", 3)
    put(cell, status="done")
    assert outcome_of(cell, ProcessEnd(0), 0) == AttemptOutcome("done", 0)
    put(cell, status="preempted", cause="SIGTERM")
    assert outcome_of(cell, ProcessEnd(75), 0) == AttemptOutcome("preempted", 75)
    # A hang that ended with a checkpoint after all can be continued, and says that it hung.
    words = "hung: no progress for 30 s, stopped"
    assert outcome_of(cell, ProcessEnd(75, hung_s=30.0), 0) == AttemptOutcome(words, 75)
    assert record_of(cell.directory)["status"] == "preempted"
    # A continuation that wrote nothing ended by itself.
    cell.log.write_text("mprun: out of memory: 9 GB\n")
    words = "failed: out of memory: 9 GB"
    assert outcome_of(cell, ProcessEnd(5), attempts_before=1) == AttemptOutcome(words, 5)
    # Somebody else's by now.
    put(cell, status="running")
    with locked(cell.directory):
        assert outcome_of(cell, ProcessEnd(-9), 0).again


@pytest.mark.parametrize(
    ("codes", "expected"),
    [([], 0), ([0, 3, 0], 0), ([0, 2, 5], 5), ([75, 2], 2), ([75, 3], 75), ([5, 1, 4], 1)],
)
def test_the_worst_code_is_the_sweeps(codes, expected):
    assert exit_code(codes) == expected


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_stopped_sweep_ends_with_the_code_of_its_signal(number, code):
    with run.StopRequest() as stop:
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGHUP)  # one that comes later says nothing else
    assert (stop.reason, stop.exit_code) == (number.name, code)


def test_a_heartbeat_is_seen_from_outside(tmp_path, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    heart, pulse = Heartbeat(tmp_path), Pulse(tmp_path)
    now[0] += 30
    assert pulse.silent_s() == 30  # since its start: there has been none yet
    heart.beat()
    assert pulse.silent_s() == 0
    now[0] += 1
    stamp = (tmp_path / ".lock").stat().st_mtime_ns
    heart.beat()  # too early to cost a system call
    assert (tmp_path / ".lock").stat().st_mtime_ns == stamp
    assert pulse.silent_s() == 1
    now[0] += 1
    time.sleep(0.02)  # longer than the clock of the file system takes from tick to tick
    heart.beat()
    assert pulse.silent_s() == 0


@pytest.mark.parametrize(
    ("record", "code", "words"),
    [
        ({"status": "done", "final": {"loss": 0.5}}, 0, "done"),
        ({"status": "failed", "cause": "killed by SIGKILL"}, 5, "killed by SIGKILL"),
        ({"status": "failed", "cause": "ValueError: x"}, 1, "failed: ValueError: x"),
    ],
)
@pytest.mark.slow
def test_a_cell_of_another_process_is_waited_for(cell, record, code, words, capfd):
    put(cell)
    lock = locked(cell.directory)
    lock.__enter__()

    def finish():
        put(cell, last_step=20, **record)
        lock.__exit__(None, None, None)

    threading.Timer(1.5, finish).start()
    assert main(["-m", *cell.overrides]) == code
    printed = capfd.readouterr()
    assert "in use by another process; waiting for it" in printed.err
    assert words in printed.out
    assert record_of(cell.directory)["attempts"] == 1
    [file] = cell.directory.parent.glob("sweep-*.md")
    [row] = [r for r in file.read_text().splitlines() if r.startswith(f"| {cell.directory.name}")]
    assert [text.strip() for text in row.split("|")[2:4]] == [words, "20/20"]


def planned(root, modes, seeds, *more) -> Plan:
    """A sweep of those modes and seeds without composing them; more: overrides of each cell."""
    cells = []
    for mode, seed in product(modes, range(seeds)):
        words, place = (f"precision={mode}", *more), root / f"{mode}-s{seed}"
        cells.append(Cell(words, place, f"{mode}{seed}", mode, "", seed))
    return Plan(tuple(cells), root, frozenset({"precision", "seed", "optim.lr"}), None, None)


def test_a_page_reads_each_run_with_an_outcome_once(tmp_path, monkeypatch):
    sweep, read = planned(tmp_path, ["fp32", "amp"], 3), Counter()
    plain = status_page.record_of
    monkeypatch.setattr(
        status_page, "record_of", lambda folder: read.update([folder.name]) or plain(folder)
    )
    board = StatusPage(sweep, "mprun -m ...")
    for cell in sweep.cells[:5]:
        put(cell, status="done", final={"loss": 1.0}, last_step=1)
    put(sweep.cells[5], status="running")
    for _ in range(10):
        board.write(now=True)
    assert [read[cell.directory.name] for cell in sweep.cells[:5]] == [1] * 5
    assert read[sweep.cells[5].directory.name] == 20
    board.started_run(sweep.cells[0])  # again, as the user asked
    board.write(now=True)
    assert read[sweep.cells[0].directory.name] == 2


def test_the_line_of_an_ended_cell_fits_the_terminal(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("COLUMNS", "80")
    sweep = planned(tmp_path, ["fp16_master_scaled"], 6, "optim.lr=0.0" + "1" * 30, "name=x")
    board = StatusPage(sweep, "mprun -m ...")
    first, second, third, fourth, fifth, _ = sweep.cells
    for one in (first, second):
        board.started_run(one)
        board.since[one] -= 100
    put(first, status="done", final={"loss": 0.123456, "top1": 98.7654321})
    board.ended(first, AttemptOutcome("done"))
    put(second, status="diverged", last_step=123456, final={"loss": "nan"})
    board.ended(second, AttemptOutcome("diverged at step 123456", DIVERGED))
    board.started_run(third)
    put(third, status="preempted", last_step=7)
    (third.directory / "metrics.jsonl").write_text('{"split": "train", "step": 7, "loss": 5.35}\n')
    board.ended(third, AttemptOutcome("preempted", PREEMPTED))
    board.ended(fourth, AttemptOutcome("failed: ValueError: " + "x" * 100, 1))
    board.in_use(fifth)
    lines = capfd.readouterr().err.splitlines()
    cause = lines.pop(-2)
    assert cause == f"    {fourth.directory.name}: failed: ValueError: {'x' * 100}"
    assert max(map(len, lines)) <= 80
    ended = [line for line in lines if line.startswith("[")]
    # 100 s each, two at once: four cells are left, and of a fifth, that has had its time, nothing.
    # A value that does not fit is left out, no part of it is shown.
    assert ended[0] == ("[1/6] fp16_master_scaled ... s0: loss 0.12346, 0:01:40, ETA 0:03:20")
    later = "diverged at step 123456, 0:01:40, ETA 0:03:20"
    assert ended[1] == f"[2/6] fp16_master_scaled ... s1: {later}"
    assert ended[2].endswith(" s2: preempted, at step 7, 0:00:00, ETA 0:01:40")
    assert "5.35" not in board.table()  # no final evaluation


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_follows_runs_that_go_at_the_same_time(tmp_path, monkeypatch):
    """In its last line, which each other line replaces; elsewhere nothing is drawn."""
    sweep = planned(tmp_path, ["fp32", "nvfp4"], 1, "optim.lr=0.1", "name=x")
    written = {}
    for kind in (Terminal, StringIO):
        monkeypatch.setattr(sys, "stderr", kind())
        monkeypatch.setenv("COLUMNS", "80")
        page = StatusPage(sweep, "mprun -m")
        run.SweepLoop(page, jobs=2)
        for cell in sweep.cells:
            page.started_run(cell)
        put(sweep.cells[0], status="running", steps=60)
        row = '{"split": "train", "step": 40, "loss": 2.7112}\n'
        (sweep.cells[0].directory / "metrics.jsonl").write_text(row)
        page.follow()
        page.follow()  # within a second: not again
        page.tell("fp32 ends")
        written[kind] = sys.stderr.getvalue().removeprefix(f"sweep of 2 runs in {tmp_path}\n")
    cells = [f"{mode} optim.lr=0.1 s0" for mode in ("fp32", "nvfp4")]
    assert written[StringIO] == f"{cells[0]}: starts\n{cells[1]}: starts\nfp32 ends\n"
    clear = "\r\x1b[K"
    *lines, drawn, end = written[Terminal].removeprefix(clear).split(clear)
    assert "".join([*lines, end]) == written[StringIO]
    assert drawn == f"{cells[0]}: step 40/60 loss 2.7112; {cells[1]}: starting"


def test_a_finished_sweep_says_what_comes_next(tmp_path, monkeypatch, capfd):
    sweep = planned(tmp_path / "runs", ["fp32", "fp16_naive"], 21)
    for cell in sweep.cells:
        precision = {"mode": cell.mode, "scaler": "none"}
        config = {"precision": {"name": cell.mode}, "seed": cell.seed}
        config["compare"] = {"metric": "loss", "window": 1, "margin": 0.01}
        ended = {"status": "done", "last_step": 20, "final": {"loss": 1.0}}
        more = {"choices": {}, "environment": {}, "created": "2026-11-20T10:00:00+00:00"}
        put(cell, seed=cell.seed, precision=precision, config=config, **ended, **more)
        write_config(cell.directory, config)
        numbers = {"step": 20, "updates": 20, "skipped": 0, "loss": 1.0}
        lines = [json.dumps({"split": split} | numbers) for split in ("train", "eval")]
        (cell.directory / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(run, "plan", lambda overrides, config_dir: sweep)
    assert main(["-m", "precision=fp32,fp16_naive", "seed=range(0,21)"]) == 0
    assert capfd.readouterr().err.splitlines() == [
        f"sweep of 42 runs in {sweep.root}, all finished already",
        f"verdicts: mprun compare {sweep.root}",
        f"curves: tensorboard --logdir {sweep.root}/_summary",
        f"        at http://localhost:6006/{opening()}",
    ]
    # However many runs: TensorBoard ticks those of the folder that is printed, one a mode.
    curves = sorted(path.name for path in (sweep.root / "_summary").iterdir())
    assert curves == ["fp16_naive", "fp32"]


def test_a_stopped_cell_is_named_with_the_command_that_finishes_it(tiny, capsys):
    kept = [*tiny, "train.steps=2", "train.checkpoint_every=1"]
    planned = plan([*kept, "seed=0,1"], None)
    cell = planned.cells[0]
    assert main([*kept, f"output_dir='{cell.directory}'"]) == 0
    Record(cell.directory, record_of(cell.directory)).end("preempted", "SIGTERM")
    loop = run.SweepLoop(page := StatusPage(planned, "mprun -m"))
    page.words[cell] = "preempted"
    of = "fp32 s0: preempted at step 2 of 2; to go on: mprun resume="
    assert page.to_finish() == [f"{of}{cell.directory}"]
    loop.jobs = 2
    loop.start = lambda *given: subprocess.Popen(["true"])  # in place of a run
    loop._start()
    said = capsys.readouterr().err.splitlines()[-2:]
    assert said == ["fp32 s0: goes on from its checkpoint", "fp32 s1: starts"]
    for attempt in loop.running:
        attempt.process.wait()


def test_only_a_finished_run_may_be_behind_a_link(cell, tmp_path):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    cell.directory.parent.mkdir(parents=True)
    cell.directory.symlink_to(theirs)
    for look in (state_of, put_aside):
        with pytest.raises(BadInput, match="is a link, and mprun writes nothing through links"):
            look(cell)
    assert not any(theirs.iterdir())
    put(cell, status="done")
    assert state_of(cell) is State.FINISHED
