"""Finding run directories and reading them: what counts, what is left out, what is told."""

import os

import pytest

from mprun.comparison.load import load_runs, missing_seeds, natural_order, run_directories
from mprun.comparison.notebook import load
from mprun.errors import BadInput, Damaged
from mprun.record.keys import flat
from mprun.training.next_commands import Next

from ..helpers import raises_line
from .run_folders import change_record, write_metrics, write_run


def seeds(runs):
    return [(run.mode, run.seed) for run in runs]


def test_a_run_as_it_was_recorded(tmp_path):
    folder = write_run(tmp_path / "amp-s3", "amp", 3, final=2.0)
    (folder / "samples").mkdir()
    for name in ("step-00000010.png", "step-00000200.png", "step-x.png"):
        (folder / "samples" / name).write_bytes(b"")
    [run], notes = load_runs([folder])
    assert notes == []
    assert (run.path, run.mode, run.scaler, run.seed) == (str(folder), "amp", "dynamic", 3)
    assert (run.status, run.cause, run.last_step, run.skipped) == ("done", None, 40, 0)
    assert run.evals["step"].tolist() == [40] and run.evals["loss"].tolist() == [2.0]
    assert run.first_losses.tolist() == [2.0 + 1 / step + 1e-9 * 3 for step in range(1, 21)]
    late = [2.0 + 1 / step + 1e-9 * 3 for step in (20, 30, 40)]  # of 22
    assert run.last_losses.tolist() == late
    assert run.scale_range == (1.0, 1.0) and run.nonfinite_step is None
    assert run.keys["optim.lr"] == 0.1 and run.keys["precision.overrides"] == {}
    assert run.choices["model"] == "lstm_lm" and run.sample == "token"
    assert (run.samples_per_s, run.peak_bytes, run.activation_bytes) == (1003.0, 10, None)
    assert run.memory_measure == "process resident set"
    assert run.environment["packages"] == {"torch": "2.15.0"} and not run.foreign
    assert run.sample_grid == str(folder / "samples" / "step-00000200.png")


def test_a_folder_is_searched_to_any_depth_in_natural_order(tmp_path):
    for seed in (10, 2, 1):
        write_run(tmp_path / "a" / "b" / f"fp32-s{seed}", seed=seed)
    write_run(tmp_path / "amp-s0", "amp")
    write_run(tmp_path / ".hidden" / "x", seed=20)
    write_run(tmp_path / "_summary" / "x", seed=21)
    write_run(tmp_path / "a" / "b" / "fp32-s1" / "inside", seed=22)  # of a run directory
    (tmp_path / "a" / "empty").mkdir()
    runs, notes = load_runs([tmp_path])
    assert seeds(runs) == [("fp32", 1), ("fp32", 2), ("fp32", 10), ("amp", 0)] and notes == []
    assert [run.scale_range for run in runs] == [None, None, None, (1.0, 1.0)]


def test_links_are_followed_but_not_in_a_circle(tmp_path):
    write_run(tmp_path / "elsewhere" / "fp32-s0")
    runs = tmp_path / "outputs"
    write_run(runs / "fp32-s1", seed=1)
    os.symlink(tmp_path / "elsewhere", runs / "more")
    os.symlink(runs, runs / "round")
    os.symlink(tmp_path, runs / "up")
    os.symlink("itself", runs / "itself")
    found, notes = load_runs([runs])
    assert sorted(seeds(found)) == [("fp32", 0), ("fp32", 1)] and notes == []


def test_a_folder_that_goes_away_while_it_is_searched(tmp_path, monkeypatch):
    write_run(tmp_path / "fp32-s0")
    (tmp_path / "gone").mkdir()
    scan = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: scan(tmp_path / "x" / path.name))
    with raises_line(BadInput, "gone: contains no run"):
        run_directories(tmp_path / "gone")
    monkeypatch.undo()
    assert seeds(load_runs([tmp_path])[0]) == [("fp32", 0)]


def test_the_same_run_given_twice_counts_once(tmp_path, monkeypatch):
    write_run(tmp_path / "out" / "fp32-s0")
    monkeypatch.chdir(tmp_path)
    runs, notes = load_runs(["out", "out/fp32-s0", tmp_path / "out" / ".." / "out"])
    assert [run.path for run in runs] == ["out/fp32-s0"] and notes == []


def test_what_a_sweep_put_aside_is_not_searched(tmp_path):
    write_run(tmp_path / "fp32-s0", final=1.0)
    aside = write_run(tmp_path / "fp32-s0.attempt1", final=5.0)
    orphan = write_run(tmp_path / "amp-s0.attempt1", "amp")
    runs, notes = load_runs([tmp_path])
    assert [run.path for run in runs] == [str(orphan), str(tmp_path / "fp32-s0")] and notes == []
    [run], _ = load_runs([aside])  # asked for by name
    assert run.path == str(aside)


def test_of_equal_configuration_and_seed_the_first_with_an_outcome_counts(tmp_path):
    def at(minute):
        return f"2026-11-20T10:{minute:02d}:00+00:00"

    write_run(tmp_path / "a", final=0.1, created=at(30))  # the best one, but the third
    write_run(tmp_path / "b", final=0.3, created=at(10), status="failed")
    write_run(tmp_path / "c", final=0.2, created=at(20), status="diverged")
    write_run(tmp_path / "d", seed=1, final=0.2, created=at(40))
    runs, notes = load_runs([tmp_path])
    assert [run.path for run in runs] == [str(tmp_path / "c"), str(tmp_path / "d")]
    for note, start in zip(notes, ("b: left out (failed)", "a: left out (done)"), strict=True):
        assert note.startswith(f"{tmp_path}/{start}")
    assert all(str(tmp_path / "c") in note for note in notes)
    # Of several without an outcome the newest counts.
    write_run(tmp_path / "e", seed=2, status="failed", created=at(10))
    write_run(tmp_path / "f", seed=2, status="running", created=at(11))
    assert load_runs([tmp_path])[0][-1].status == "running"


def test_equal_configurations_on_other_data_are_no_duplicates(tmp_path):
    for name, content in (("a", "1"), ("b", "2"), ("c", "2")):
        write_run(tmp_path / name, data={"sha256": content * 64})
    runs, [note] = load_runs([tmp_path])
    assert [run.path for run in runs] == [str(tmp_path / "a"), str(tmp_path / "b")]
    assert note.startswith(f"{tmp_path / 'c'}: left out (done), same configuration, data and seed")


def test_runs_of_a_given_baseline_are_told_apart_from_equal_others(tmp_path):
    write_run(tmp_path / "old" / "fp32-s0")
    write_run(tmp_path / "new" / "fp32-s0")
    runs, notes = load_runs([tmp_path / "new"], baseline=tmp_path / "old")
    places = [str(tmp_path / name / "fp32-s0") for name in ("new", "old")]
    assert [run.path for run in runs] == places and notes == []
    assert [len(found) for found in load_runs([tmp_path / "new", tmp_path / "old"])] == [1, 1]


def test_a_run_that_has_not_recorded_yet_is_read(tmp_path):
    folder = write_run(tmp_path / "run", status="running")
    (folder / "metrics.jsonl").unlink()
    [run], _ = load_runs([folder])
    assert run.last_step == 0 and run.evals["step"].size == 0
    change_record(folder, status="diverged", last_step=None)  # an end before the first step
    (folder / "metrics.jsonl").touch()
    assert load_runs([folder])[0][0].last_step == 0
    folder = write_run(tmp_path / "ended", seed=1)
    (folder / "metrics.jsonl").unlink()
    with raises_line(Damaged, "metrics.jsonl: is missing, although the run is recorded as done"):
        load_runs([folder])


def test_a_run_that_advise_measured_is_no_baseline(tmp_path):
    """It is FP32 with probes, of a length of its own; the runs beside it decide."""
    own = write_run(tmp_path / "advise-fp32-s0")
    change_record(own, measured_for="advise")
    write_run(tmp_path / "fp32-s0")
    runs, [note] = load_runs([tmp_path])
    assert [run.path for run in runs] == [str(tmp_path / "fp32-s0")]
    assert note == f"{own}: left out, measured by mprun advise"


def test_a_run_without_its_configuration_is_left_out_and_named(tmp_path):
    old = write_run(tmp_path / "old")
    change_record(old, config=None)
    write_run(tmp_path / "new")
    runs, [note] = load_runs([tmp_path])
    assert [run.path for run in runs] == [str(tmp_path / "new")]
    assert note.startswith(f"{old}: left out, recorded by an older mprun")
    with raises_line(BadInput, note):
        load_runs([old])


def test_what_is_no_run_is_bad_input(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    run = write_run(tmp_path / "run")
    reasons = ("no such file or directory", "contains no run", "is not a folder")
    for name, reason in zip(("nowhere", "empty", "file"), reasons, strict=True):
        for before in ([], [run]):
            with raises_line(BadInput, f"{tmp_path / name}: {reason}"):
                load_runs([*before, tmp_path / name])


def test_a_note_names_the_first_command_of_a_shell_that_acts(tmp_path, monkeypatch):
    lines = (("tensorboard --logdir x", False), ("run.rewind()", True), ("mprun show x", False))
    fits = [Next("to see", line, in_script) for line, in_script in lines]
    monkeypatch.setattr("mprun.comparison.load.commands", lambda *given: fits)
    write_run(tmp_path / "run", status="failed")
    assert missing_seeds(load_runs([tmp_path])[0]) == ["seed 0: failed; to see: mprun show x"]


TRAINED = '{"split": "train", "step": 1, "updates": 1, "skipped": 0, "loss": 1.0}'
NO_RECORDS = ('{"config": {}}', '{"config": 3, "status": "done"}')


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        *(("run.json", text, "run/run.json: ") for text in ("", "{", "[]", "\xff", *NO_RECORDS)),
        ("metrics.jsonl", f'{TRAINED}\n{{"step"; 3}}\n{TRAINED}\n', "metrics.jsonl: line 2"),
    ],
)
def test_a_damaged_record_is_told_with_its_path(tmp_path, name, content, said):
    folder = write_run(tmp_path / "run")
    (folder / name).write_bytes(content.encode("latin-1"))
    with raises_line(Damaged, said):
        load_runs([tmp_path])


def test_a_torn_last_line_of_a_killed_run_is_left_out(tmp_path):
    folder = write_run(tmp_path / "run", status="running")
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"split": "train", "step": 50, "upd')
    [run], _ = load_runs([folder])
    assert run.last_step == 40
    write_metrics(folder / "metrics.jsonl", 3.0)
    assert load_runs([folder])[0][0].evals["loss"].tolist() == [3.0]


def test_names_and_keys():
    ordered = sorted(["s10", "s2", "s1", "a", "10", "9"], key=natural_order)
    assert ordered == ["9", "10", "a", "s1", "s2", "s10"]
    assert flat({"a": {"b": {"c": 1}, "d": {}}, "e": [1]}) == {"a.b.c": 1, "a.d": {}, "e": [1]}


def test_a_run_whose_record_is_gone_is_named(tmp_path, capsys):
    write_run(tmp_path / "a")
    (write_run(tmp_path / "b", "amp") / "run.json").unlink()
    (tmp_path / "c").mkdir()
    for name in ("b", "c"):
        (tmp_path / name / "config.yaml").touch()  # no run had only this
    line = f"{tmp_path / 'b'}: left out, its run.json is gone"
    runs, notes = load_runs([tmp_path])
    assert [run.mode for run in runs] == ["fp32"] and notes == [line]
    assert len(load(tmp_path)) == 1
    assert capsys.readouterr().err == f"mprun: {line}\n"
