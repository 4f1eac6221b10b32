"""`mprun -m` end to end on tiny runs: outcomes, what runs again, what does not."""

import shlex
import shutil
from contextlib import chdir
from pathlib import Path

import pytest

from mprun.cli import main
from mprun.record.run_record import Record

from ..helpers import TINY_AUTOENCODER, record_of, rows_of, seal_again

TINY = [*TINY_AUTOENCODER, "train.steps=4", "train.log_every=2"]
# Adam's eps is 0 in FP16, so that fp16_naive ends in NaN; two seeds of two modes.
SWEEP = ["-m", *TINY, "precision=fp16_naive,fp32", "seed=0,1", "-j", "2"]


@pytest.mark.slow
def test_a_sweep_ends_with_a_table_and_runs_only_what_is_missing(tmp_path, capfd):
    assert main(SWEEP) == 0
    printed = capfd.readouterr()
    [last] = [line for line in printed.out.splitlines() if line.startswith("sweep: ")]
    root = tmp_path / last.removeprefix("sweep: ")
    [file] = root.glob("*.md")
    cells = {path.name: path for path in root.iterdir() if path != file}
    curves = cells.pop("_summary")
    assert sorted(path.name for path in curves.iterdir()) == ["fp16_naive", "fp32"]
    assert f"curves: tensorboard --logdir {curves.relative_to(tmp_path)}" in printed.err
    assert len(cells) == 4
    records = {name: record_of(path) for name, path in cells.items()}
    status = {(r["precision"]["mode"], r["status"]) for r in records.values()}
    # A mode that diverges does not stop the rest, and is an outcome: exit code 0.
    assert status == {("fp32", "done"), ("fp16_naive", "diverged")}
    table = [line for line in printed.out.splitlines() if line.startswith("| ")]
    assert [line.split()[1] for line in table] == ["mode", "fp32", "fp16_naive"]
    assert "diverged at step" in table[2] and "baseline" in table[1]
    assert all((path / "console.log").is_file() for path in cells.values())
    # The file holds one line a run and the printed table.
    text = file.read_text()
    assert all(f"| {name} " in text for name in cells) and all(line in text for line in table)
    assert f"mprun -m {' '.join(TINY)}" in text

    # One run was killed: only this one runs again.
    killed = next(n for n, r in records.items() if r["status"] == "done")
    record = records[killed]
    Record(cells[killed], record).reopen()
    before = {n: (p / "run.json").stat().st_mtime_ns for n, p in cells.items()}
    assert main(SWEEP) == 0
    printed = capfd.readouterr()
    assert "3 finished already" in printed.err
    for name, path in cells.items():
        again = (path / "run.json").stat().st_mtime_ns != before[name]
        assert again == (name == killed), name
    # What the killed attempt left is kept beside the new one.
    aside = record_of(root / f"{killed}.attempt1")
    assert (aside["status"], aside["cause"]) == ("failed", "killed by an unknown cause")
    # The same configuration gives the same bits in the second attempt.
    assert record_of(cells[killed])["final"] == record["final"]

    # Another configuration under the same name is never mixed in.
    seal_again(root / killed, config_hash="0")
    assert main(SWEEP) == 2
    printed = capfd.readouterr()
    assert "name=" in printed.err and printed.out == ""


TWO = ["-m", *TINY, "seed=0,1", "precision=fp32"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with a finished sweep of two runs."""
    folder = tmp_path_factory.mktemp("finished")
    with chdir(folder):
        assert main(TWO) == 0
    return folder


def cut(path):
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[: len(lines) // 2]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "damage", "says"),
    [
        ("config.yaml", Path.unlink, "is missing"),
        ("metrics.jsonl", Path.unlink, "metrics.jsonl"),
        ("metrics.jsonl", cut, "metrics.jsonl"),
        ("run.json", cut, "run.json"),
    ],
)
def test_a_damaged_cell_is_told_and_runs_again_only_if_asked(
    name, damage, says, finished, tmp_path, monkeypatch, capfd
):
    shutil.copytree(finished, tmp_path / "sweep")
    monkeypatch.chdir(tmp_path / "sweep")
    [first, second] = sorted(Path("outputs").glob("*/fp32*-s[01]"))
    whole = rows_of(first, "train")
    damage(first / name)
    before = {path: path.stat().st_mtime_ns for path in Path().rglob("*.json*")}
    for _ in range(2):
        assert main(TWO) == 4
        printed = capfd.readouterr()
        [line] = [line for line in printed.err.splitlines() if "the run counts as failed" in line]
        assert says in line and str(first) in line
        assert f"to go on: mprun {shlex.join(TWO)} --rerun-damaged" in printed.err
        assert ", 1 finished already" in printed.err and "damaged: " in printed.out
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert main([*TWO, "--rerun-damaged"]) == 0
    assert [row["loss"] for row in rows_of(first, "train")] == [row["loss"] for row in whole]
    assert first.with_name(f"{first.name}.attempt1").is_dir()
    assert main(TWO) == 0 and ", all finished already" in capfd.readouterr().err
