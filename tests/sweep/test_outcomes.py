"""A sweep with an exception, a kill, a divergence and a hang: outcomes, and the rest goes on."""

import os
import signal
import threading

import pytest

from mprun.cli import main
from mprun.sweeps import attempt as processes
from mprun.sweeps.attempt import Attempt, AttemptOutcome
from mprun.sweeps.plan import plan

from ..helpers import record_of

# Longer than a process takes to start on a busy machine: that counts as no progress, too.
STALL_AFTER_S = 180
KILLED = "killed by SIGKILL"
FAILED = "failed: File exists "
HUNG = f"hung: no progress for {STALL_AFTER_S} s, killed"
DIVERGED = "diverged at step 2"


@pytest.fixture
def sabotaged(tmp_path, tiny, held_at_first_step, monkeypatch):
    """Sweep over learning rates while some of the runs are harmed: (exit code, cells, arguments).

    The 1st is killed, the 2nd fails, the 3rd hangs, the last diverges by itself.
    """

    def run(rates: list[str]):
        monkeypatch.setattr(processes, "GRACE_S", 1.0)
        fixed = [*tiny, "train.steps=150", "train.checkpoint_every=50", "name=x"]
        swept = [*fixed, f"output_root='{tmp_path / 'runs'}'", f"optim.lr={','.join(rates)}"]
        cells = [cell.directory for cell in plan(swept, None).cells]

        def kill(directory):
            os.kill(held_at_first_step(directory), signal.SIGKILL)

        def fail(directory):
            process = held_at_first_step(directory)
            (directory / "checkpoints").write_text("in the way")
            os.kill(process, signal.SIGCONT)

        each = zip((kill, fail, held_at_first_step), cells, strict=False)
        harms = [threading.Thread(target=harm, args=[cell]) for harm, cell in each]
        for harm in harms:
            harm.start()
        code = main(["-m", *swept, "-j", "2", "--stall-after", str(STALL_AFTER_S)])
        for harm in harms:
            harm.join()
        return code, dict(zip(rates, cells, strict=True)), swept

    return run


def check(code, cells, words, printed, same_as_single):
    """Expect `words` (rate -> how its run ended; else done) in every record and table."""
    rates = list(cells)
    [file] = cells[rates[0]].parent.glob("sweep-*.md")
    lines = file.read_text().splitlines()
    for rate, directory in cells.items():
        record = record_of(directory)
        ended = words.get(rate, "done").split()[0]
        status = {"killed": "failed", "failed:": "failed", "hung:": "failed"}.get(ended, ended)
        assert record["status"] == status, rate
        # One line in the file, one row in the printed table.
        [line] = [line for line in lines if line.startswith(f"| {directory.name} ")]
        assert line.split("|")[2].strip().startswith(words.get(rate, "done")), rate
        [row] = [r for r in printed.splitlines() if r.startswith(f"| fp32 optim.lr={rate} ")]
        assert words.get(rate, "done") in row, rate
        if record["status"] == "done":
            same_as_single(directory)
    # A lost worker is the worst that happened; a divergence is a result.
    assert code == 5


@pytest.mark.slow
def test_a_hang_is_killed_even_before_the_first_step(tiny, wait_for, monkeypatch):
    monkeypatch.setattr(processes, "GRACE_S", 0.5)
    [cell, _] = plan([*tiny, "seed=0,1"], None).cells
    attempt = Attempt(cell, None, stall_after=1.0)
    os.kill(attempt.process.pid, signal.SIGSTOP)
    outcome = wait_for(attempt.poll)
    assert outcome == AttemptOutcome("hung: no progress for 1 s, killed", code=5)
    assert not cell.directory.exists()


@pytest.mark.slow
def test_twelve_cells_and_the_same_command_again(sabotaged, same_as_single, capfd):
    rates = [*(f"0.00{n}" for n in range(1, 10)), "0.01", "0.02", "1e+30"]
    code, cells, arguments = sabotaged(rates)
    words = dict(zip(rates, [KILLED, FAILED, HUNG], strict=False)) | {rates[-1]: DIVERGED}
    check(code, cells, words, capfd.readouterr().out, same_as_single)

    (cells[rates[1]] / "checkpoints").unlink()  # with it the folder is damaged, and stays so
    before = {r: (d / "metrics.jsonl").stat().st_mtime_ns for r, d in cells.items()}
    assert main(["-m", *arguments, "-j", "2"]) == 0
    assert "9 finished already" in capfd.readouterr().err
    for rate, directory in cells.items():
        ran = (directory / "metrics.jsonl").stat().st_mtime_ns != before[rate]
        assert ran == (rate in rates[:3]), rate
        aside = directory.with_name(f"{directory.name}.attempt1")
        assert aside.is_dir() == ran
        if ran:
            assert record_of(aside)["status"] == "failed"
            same_as_single(directory)
