"""A sweep with an exception, a kill, a divergence and a hang: outcomes, and the rest goes on."""

import json
import os
import signal
import threading

import pytest

from mprun.cli import main
from mprun.sweep import processes

# Until the first heartbeat it must be longer than a process takes to start on a busy machine.
STALL_AFTER_S = 20


@pytest.fixture
def sabotaged(tmp_path, tiny, held_at_first_step, monkeypatch):
    """Sweep over learning rates while three of the runs are harmed; (exit code, cell by rate)."""

    def run(rates: list[str], hung: str, killed: str, failing: str):
        monkeypatch.setattr(processes, "GRACE_S", 1.0)
        folder = tmp_path / "runs" / "conv_autoencoder-digits_gray_64"
        length = ["train.steps=150", "train.checkpoint_every=50", "name=x"]
        fixed = [*tiny, *length, f"output_root='{tmp_path / 'runs'}'"]

        def cell(rate: str):
            texts = [*tiny[3:], *length[:1], f"optim.lr={rate}", "x-s0"]
            return folder / "-".join(["fp32", *texts])

        def kill():
            os.kill(held_at_first_step(cell(killed)), signal.SIGKILL)

        def fail():
            process = held_at_first_step(cell(failing))
            (cell(failing) / "checkpoints").write_text("in the way")
            os.kill(process, signal.SIGCONT)

        def hang():
            held_at_first_step(cell(hung))

        harms = [threading.Thread(target=harm) for harm in (kill, fail, hang)]
        for harm in harms:
            harm.start()
        swept = f"optim.lr={','.join(rates)}"
        code = main(["-m", *fixed, swept, "-j", "2", "--stall-after", str(STALL_AFTER_S)])
        for harm in harms:
            harm.join()
        return code, {rate: cell(rate) for rate in rates}, [*fixed, swept]

    return run


def check(code, cells, rates, printed, same_as_single):
    """Expect that the 1st rate hung, the 2nd was killed, the 3rd failed, the last diverged."""
    words = {
        rates[0]: f"hung: no progress for {STALL_AFTER_S} s, killed",
        rates[1]: "killed by SIGKILL",
        rates[2]: "failed: FileExistsError: [Errno 17] File exists: ",
        rates[-1]: "diverged at step 2",
    }
    status = {rates[0]: "failed", rates[1]: "failed", rates[2]: "failed", rates[-1]: "diverged"}
    [file] = cells[rates[0]].parent.glob("sweep-*.md")
    lines = file.read_text().splitlines()
    for rate, directory in cells.items():
        record = json.loads((directory / "run.json").read_text())
        assert record["status"] == status.get(rate, "done"), rate
        # One line in the file, one row in the printed table.
        [line] = [line for line in lines if line.startswith(f"| {directory.name} ")]
        assert line.split("|")[2].strip().startswith(words.get(rate, "done")), rate
        [row] = [r for r in printed.splitlines() if r.startswith(f"| fp32 optim.lr={rate} ")]
        assert words.get(rate, "done") in row, rate
        if record["status"] == "done":
            same_as_single(directory)
    # Lost workers are the worst that happened; a divergence is a result.
    assert code == 5


def test_the_rest_goes_on(sabotaged, same_as_single, capfd):
    rates = ["0.001", "0.002", "0.003", "0.004", "1e30"]
    code, cells, _ = sabotaged(rates, *rates[:3])
    check(code, cells, rates, capfd.readouterr().out, same_as_single)


@pytest.mark.slow
def test_twelve_cells_and_the_same_command_again(sabotaged, same_as_single, capfd):
    rates = [*(f"0.00{n}" for n in range(1, 10)), "0.01", "0.02", "1e30"]
    code, cells, arguments = sabotaged(rates, *rates[:3])
    check(code, cells, rates, capfd.readouterr().out, same_as_single)

    before = {r: (d / "metrics.jsonl").stat().st_mtime_ns for r, d in cells.items()}
    assert main(["-m", *arguments, "-j", "2"]) == 0
    assert "9 finished already" in capfd.readouterr().err
    for rate, directory in cells.items():
        ran = (directory / "metrics.jsonl").stat().st_mtime_ns != before[rate]
        assert ran == (rate in rates[:3]), rate
        aside = directory.with_name(f"{directory.name}.attempt1")
        assert aside.is_dir() == ran
        if ran:
            assert json.loads((aside / "run.json").read_text())["status"] == "failed"
            same_as_single(directory)
