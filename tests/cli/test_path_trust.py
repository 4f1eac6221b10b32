"""A path in a record is used only where the command names it too."""

import os
import shlex
import signal
from pathlib import Path

import pytest
import yaml

from mprun.cli import main
from mprun.record.keys import config_hash
from mprun.record.run_directory import Heartbeat
from mprun.record.run_record import read_record
from mprun.sweeps.plan import plan

from ..helpers import but, record_of, refused, rows_of, seal_again
from ..tables import with_extensions

ROOT = "data.root=texts"
RUN = ["data=text", ROOT, "data.batch_size=2", "data.sequence_length=4", "data.cache=cached"]
RUN += ["model.embedding_size=4", "model.hidden_size=4", "model.num_layers=1", "device=cpu"]
RUN += ["threads=1", "train.steps=4", "train.checkpoint_every=2"]
RUN += ["numerics=probes", "numerics.every=2"]
NAMED = ["data.cache=cached", ROOT]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    (tmp_path / "texts").mkdir()
    for split, times in (("train", 60), ("valid", 9), ("test", 9)):
        (tmp_path / "texts" / f"{split}.txt").write_text("the cat sat on a mat \n" * times)
    return tmp_path


@pytest.fixture
def run(folder):
    assert main([*RUN, "output_dir=run"]) == 0
    return folder / "run"


def edit(run: Path, **data) -> None:
    """Change paths in config.yaml and run.json, as whoever hands out a run can."""
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["data"] |= data
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    diverged = {"status": "diverged", "cause": "non-finite loss"}
    seal_again(run, **diverged, config=config, config_hash=config_hash(config))


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", with_extensions("RUNS_CODE", [["resume=run", "train.steps=6"]])
)
def test_a_record_can_make_no_command_read_or_write_elsewhere(arguments, run, folder, capsys):
    edit(run, cache=str(folder / "elsewhere"))
    line = refused(capsys, *arguments, ROOT)
    path = f"data.cache={folder}/elsewhere"
    assert line.startswith(f"mprun: {path}: the run's record names this path")
    assert line.endswith(f"add {path}\n")
    assert not (folder / "elsewhere").exists()
    # Every path has to be named, not one of them.
    assert line.count("data.root") == 0
    assert refused(capsys, *arguments).endswith(f"add data.root=texts {path}\n")


def test_nothing_is_written_where_a_record_says_that_its_run_was(run, folder):
    config = yaml.safe_load((run / "config.yaml").read_text())
    config |= {"output_root": str(folder / "else"), "output_dir": str(folder / "where")}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    seal_again(run, config=config, config_hash=config_hash(config))
    assert main(["resume=run", "train.steps=6", *NAMED]) == 0
    assert not (folder / "else").exists() and not (folder / "where").exists()


@pytest.mark.slow
def test_a_run_of_ones_own_goes_on_bit_for_bit_where_its_data_are_now(run, folder, capsys):
    assert main(but(RUN, "output_dir=straight", "train.steps=6")) == 0
    (folder / "texts").rename(folder / "moved, 2")
    refused(capsys, "resume=run", "train.steps=6", says="add data.root=texts data.cache=cached")
    assert main(["resume=run", "train.steps=6", "data.root='moved, 2'", "data.cache=null"]) == 0
    # The command's own cache folder was used, which it says; that of the record was not.
    assert "data.cache=null (mprun in the user's cache folder)" in capsys.readouterr().err
    assert any((folder / "home" / "mprun").rglob("*.tokens"))
    rows = [rows_of(folder / name, "train") for name in ("straight", "run")]
    straight, resumed = ([(row["step"], row["loss"]) for row in own] for own in rows)
    assert resumed[-1] == straight[-1] and resumed[-1][0] == 6


@pytest.mark.slow
def test_an_option_file_of_the_user_names_a_path_and_that_is_said_once(folder, capsys):
    (folder / "mine" / "experiment").mkdir(parents=True)
    text = "# @package _global_\ndefaults: [override /data: text]\n"
    text += "data: {root: texts, cache: cached}\n"
    (folder / "mine" / "experiment" / "own.yaml").write_text(text)
    own = ["experiment=own", *(word for word in RUN if word not in (*NAMED, "data=text"))]
    assert main(["--config-dir", "mine", *own, "output_dir=run"]) == 0
    refused(capsys, "resume=run", "train.steps=6", says="data.root=texts: the run's record")
    assert main(["--config-dir", "mine", "resume=run", "train.steps=6"]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "own defaults" in line]
    places = "data.root=texts (--config-dir), data.cache=cached (--config-dir)"
    assert said == [f"mprun: outside of the run, by your own defaults: {places}"]
    # A path that the file does not have is another one.
    edit(folder / "run", root="/")
    refused(capsys, "--config-dir", "mine", "resume=run", says="data.root=/: the run's record")


@pytest.mark.slow
def test_what_a_stopped_run_prints_continues_it(folder, capsys, monkeypatch):
    beats = []

    def stopping(heartbeat):  # one beat a step
        beats.append(heartbeat)
        if len(beats) == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patched:
        patched.setattr(Heartbeat, "beat", stopping)
        assert main([*RUN, "output_dir=run"]) == 75
    line = next(x for x in capsys.readouterr().err.splitlines() if "to go on: " in x)
    words = shlex.split(line.partition("to go on: ")[2])
    assert words == ["mprun", "resume=run", "data.root=texts", "data.cache=cached"]
    assert main(words[1:]) == 0
    assert record_of(folder / "run")["status"] == "done"


@pytest.mark.slow
def test_a_sweep_names_the_paths_of_the_runs_that_it_continues(folder, capsys):
    sweep = ["-m", *RUN, "precision=fp32,amp_bf16"]
    assert main(sweep) == 0
    first = next((folder / "outputs").glob("*/fp32-*"))
    read_record(first).reopen()  # as a kill leaves it
    [newest] = first.glob("checkpoints/step-*4")
    newest.rename(folder / "gone")
    assert main(sweep) == 0
    assert (record_of(first)["status"], record_of(first)["attempts"]) == ("done", 2)


# As a shell hands them over; what Hydra's grammar would read into them is not meant.
ODD = ["jürgen", "日本", "it's", 'a"b', "a&b;c", "a=b", "[x]", "{y: 1}", "f(x", "$HOME", "#1"]
ODD += ["a, b", "a:b\\c", "*?!", "true", "1e3", "~x", "'a'b", "new\nline", " blank "]


@pytest.mark.slow
@pytest.mark.parametrize("name", ODD)
def test_a_path_may_hold_any_character(name, folder, capsys):
    """Make, continue and show a run with such paths of data, cache, run and options."""
    for part in ("data", "cache", "options/experiment"):
        (folder / name / part).mkdir(parents=True)
    (folder / "texts").rename(folder / name / "data" / "t")
    text = "# @package _global_\ntrain: {log_every: 1}\n"
    (folder / name / "options" / "experiment" / "own.yaml").write_text(text)
    run, options = f"{name}/run", ["--config-dir", f"{name}/options"]
    places = [f"data.root={name}/data/t", f"data.cache={name}/cache"]
    own = [word for word in RUN if word not in NAMED]
    assert main([*options, *own, *places, "experiment=own", f"output_dir={run}"]) == 0
    assert any((folder / name / "cache").iterdir())
    says = "the run's record names this path"
    line = refused(capsys, f"resume={run}", "train.steps=5", says=says)
    words = shlex.split(line.partition("if you trust them, add ")[2])
    if "\n" not in name:  # which a line cannot show
        assert main([f"resume={run}", "train.steps=5", *words]) == 0
    assert main([f"resume={run}", "train.steps=6", *places]) == 0
    assert rows_of(folder / run)[-1]["step"] == 6
    capsys.readouterr()
    assert main(["show", run]) == 0
    assert name.strip()[:3].encode() in capsys.readouterr().out.encode() or "\n" in name
    assert main([*but(own, *places, f"output_root={name}/out")]) == 0
    assert len(list((folder / name / "out").glob("*/*/run.json"))) == 1


def test_a_comma_separates_paths_in_a_sweep(folder):
    """But not within quotes."""
    for name in ("a, 1", "it's"):
        (folder / name).symlink_to(folder / "texts")
    parsed = plan([*RUN[2:], "data=text", "data.root='a, 1',it's"], None)
    assert [dict(cell.data_places)["root"] for cell in parsed.cells] == ["a, 1", "it's"]
