"""`mprun -m` end to end on tiny runs: outcomes, what runs again, what does not."""

import json

from mprun.cli import main

TINY = [
    "device=cpu",
    "threads=1",
    "model=conv_autoencoder",
    "data.image_size=32",
    "data.batch_size=16",
    "model.width=2",
    "model.code_size=4",
    "train.steps=4",
    "train.log_every=2",
]
# Adam's eps is 0 in FP16, so that fp16_naive ends in NaN; two seeds of two modes.
SWEEP = ["-m", *TINY, "precision=fp16_naive,fp32", "seed=0,1", "-j", "2"]


def test_a_sweep_ends_with_a_table_and_runs_only_what_is_missing(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert main(SWEEP) == 0
    printed = capfd.readouterr()
    [last] = [line for line in printed.out.splitlines() if line.startswith("sweep: ")]
    root = tmp_path / last.removeprefix("sweep: ")
    cells = {path.name: path for path in root.iterdir()}
    assert len(cells) == 4
    records = {name: json.loads((p / "run.json").read_text()) for name, p in cells.items()}
    status = {(r["precision"]["mode"], json.dumps(r["status"])) for r in records.values()}
    # A mode that diverges does not stop the rest, and is an outcome: exit code 0.
    assert status == {("fp32", '"done"'), ("fp16_naive", '"diverged"')}
    table = [line for line in printed.out.splitlines() if line.startswith("| ")]
    assert [line.split()[1] for line in table] == ["mode", "fp32", "fp16_naive"]
    assert "diverged at step" in table[2] and "baseline" in table[1]
    assert all((path / "console.log").is_file() for path in cells.values())

    # One run was killed: only this one runs again.
    killed = next(n for n, r in records.items() if r["status"] == "done")
    record = records[killed] | {"status": "running"}
    (cells[killed] / "run.json").write_text(json.dumps(record))
    before = {n: (p / "run.json").stat().st_mtime_ns for n, p in cells.items()}
    assert main(SWEEP) == 0
    printed = capfd.readouterr()
    assert "3 finished already" in printed.err
    for name, path in cells.items():
        again = (path / "run.json").stat().st_mtime_ns != before[name]
        assert again == (name == killed), name
    # What the killed attempt left is kept beside the new one.
    aside = json.loads((root / f"{killed}.attempt1" / "run.json").read_text())
    assert aside["status"] == "running"
    # The same configuration gives the same bits in the second attempt.
    assert json.loads((cells[killed] / "run.json").read_text())["final"] == record["final"]

    # Another configuration under the same name is never mixed in.
    other = root / killed / "run.json"
    other.write_text(json.dumps(record | {"status": "done", "config_hash": "0"}))
    assert main(SWEEP) == 2
    printed = capfd.readouterr()
    assert "name=" in printed.err and printed.out == ""


def test_the_plan_names_every_cell_apart(tmp_path, monkeypatch):
    from mprun.sweep import _plan

    monkeypatch.chdir(tmp_path)
    swept = ["model=lstm_lm,dcgan", "precision=glob(fp16*)", "seed=range(0,2)"]
    cells, root = _plan(swept, None)
    assert len(cells) == len({cell.directory for cell in cells}) == 2 * 3 * 2
    assert len({cell.config_hash for cell in cells}) == len(cells)
    folders = {cell.directory.parent.name for cell in cells}
    assert folders == {"lstm_lm-docs_words", "dcgan-digits_gan"}
    assert {cell.directory.parent.parent for cell in cells} == {root}
    # One model and data set: the folder of the single runs is the folder of the sweep.
    same, root = _plan(swept[1:], None)
    assert {cell.directory.parent for cell in same} == {root}
    assert {cell.directory for cell in same} <= {cell.directory for cell in cells}
    assert list(tmp_path.iterdir()) == []
