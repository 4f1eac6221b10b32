"""A sweep that is killed, interrupted or doubled loses nothing and runs nothing twice."""

import os
import random
import shlex
import shutil
import signal
import subprocess
import time
from functools import partial

import pytest

from mprun.cli import main
from mprun.sweeps.plan import plan

from ..helpers import LM, TINY_GAN, record_of, seal_again

# Long enough that a process is met in its training, with checkpoints on the way.
LENGTH = ["train.steps=800", "train.checkpoint_every=100", "train.log_every=50"]
CODES = {signal.SIGKILL: -9, signal.SIGINT: 130, signal.SIGTERM: 75, signal.SIGHUP: 75}


@pytest.fixture
def restarted(tmp_path, start_sweep, wait_for, same_as_single):
    """Run a sweep, end it by each of `signals` while it trains, run it again until it is done."""

    def run(arguments: list[str], signals: list[int], seed: int) -> list[dict]:
        """run.json of every cell."""
        chance = random.Random(seed)
        cells = plan(arguments, None).cells
        ever = set()  # directories that held a run, whatever they are called now

        def training() -> bool:
            present = [cell for cell in cells if (cell.directory / "run.json").exists()]
            ever.update(cell.directory.stat().st_ino for cell in present)
            begun = [one.directory for one in present if (one.directory / "metrics.jsonl").exists()]
            return any(record_of(directory)["status"] == "running" for directory in begun)

        def begun(process, printed) -> bool:
            # Its own runs: those of the sweep before may still write their checkpoints.
            return process.poll() is not None or (" starts\n" in printed.read_text() and training())

        for count, number in enumerate(signals):
            process = start_sweep([*arguments, "-j", "2"], tmp_path)
            wait_for(partial(begun, process, tmp_path / f"err{count}"))
            time.sleep(chance.uniform(0, 2))
            training()
            process.send_signal(number)
            assert process.wait() in (CODES[number], 0)
        assert start_sweep([*arguments, "-j", "2"], tmp_path).wait() == 0
        left = {path.stat().st_ino for path in cells[0].directory.parent.iterdir()}
        assert ever <= left
        for cell in cells:
            same_as_single(cell.directory)
            # Nothing is left beside the runs; what a run printed is with it.
            assert (cell.directory / "console.log").is_file() and not cell.log.exists()
        return [record_of(cell.directory) for cell in cells]

    return run


@pytest.mark.slow
def test_ctrl_c_twice_kills_what_does_not_end(tmp_path, tiny, start_sweep, held_at_first_step):
    arguments = [*tiny, *LENGTH, "seed=0"]
    [cell] = plan(arguments, None).cells
    sweep = start_sweep(arguments, tmp_path)
    process = held_at_first_step(cell.directory)  # it cannot answer a request to stop
    sweep.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        sweep.wait(timeout=1)
    sweep.send_signal(signal.SIGINT)
    assert sweep.wait(timeout=120) == 130
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)
    record = record_of(cell.directory)
    assert (record["status"], record["cause"]) == ("failed", "killed by SIGKILL")
    said = (tmp_path / "err0").read_text()
    assert "SIGINT: stopping 1 runs" in said
    # How to go on, and nothing that would take time.
    assert said.splitlines()[-1] == f"to go on: {shlex.join(['mprun', '-m', *arguments])}"
    assert (tmp_path / "out0").read_text().splitlines()[-1].startswith("sweep: ")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["autoencoder", "lm", "gan"])
def test_killed_at_random_moments(restarted, tiny, kind):
    own = {"autoencoder": tiny, "lm": [*LM, "model.dropout=0.5"], "gan": TINY_GAN}[kind]
    length = ["train.steps=400", *LENGTH[1:]] if kind == "gan" else LENGTH
    arguments = [*own, *length, "precision=fp32,fp16_master_scaled", "seed=0,1"]
    kills = [signal.SIGKILL, signal.SIGINT, signal.SIGKILL, signal.SIGTERM]
    records = restarted(arguments, kills, seed=1)
    assert sum(record["attempts"] for record in records) > len(records)


@pytest.mark.slow
def test_two_sweeps_at_once_share_the_cells(tmp_path, tiny, start_sweep):
    arguments = [*tiny, *LENGTH, "precision=fp32,fp16_naive", "seed=0,1"]
    both = [start_sweep(arguments, tmp_path) for _ in range(2)]
    assert [sweep.wait() for sweep in both] == [0, 0]
    cells = plan(arguments, None).cells
    names = {cell.directory.name for cell in cells} | {"_summary"}
    assert {p.name for p in cells[0].directory.parent.iterdir() if p.is_dir()} == names
    records = [record_of(cell.directory) for cell in cells]
    assert [record["attempts"] for record in records] == [1] * 4
    assert (tmp_path / "out0").read_text() == (tmp_path / "out1").read_text()


@pytest.mark.slow
def test_a_damaged_checkpoint_is_put_aside_and_started_over(tiny, same_as_single, capfd):
    arguments = [*tiny, "train.steps=20", "train.checkpoint_every=10", "seed=0,1"]
    cells = plan(arguments, None).cells
    for cell in cells:
        assert main([*cell.overrides, f"output_dir='{cell.directory}'"]) == 0
    interrupted = cells[0].directory
    seal_again(interrupted, status="preempted")
    for state in interrupted.glob("checkpoints/*/state.pt"):
        state.write_bytes(state.read_bytes()[:-1])
    before = (cells[1].directory / "run.json").stat().st_mtime_ns

    assert main(["-m", *arguments]) == 0
    assert "1 finished already" in capfd.readouterr().err
    aside = interrupted.with_name(f"{interrupted.name}.attempt1")
    assert record_of(aside)["status"] == "preempted"
    assert "does not match its manifest" in (aside / "console.log").read_text()
    same_as_single(interrupted)
    assert (cells[1].directory / "run.json").stat().st_mtime_ns == before
    # A directory that holds another run is never put aside.
    shutil.rmtree(interrupted)
    os.rename(cells[1].directory, interrupted)
    assert main(["-m", *arguments]) == 2
    assert "another configuration" in capfd.readouterr().err
