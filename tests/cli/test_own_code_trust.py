"""A run directory never makes code run: a name in it counts only where the command gives it too."""

import shutil
import sys
from pathlib import Path

import pytest
import yaml

from mprun.cli import main
from mprun.config.option_files import modes
from mprun.record.keys import config_hash
from mprun.record.run_record import Record
from mprun.sweeps.mode_table import table

from .. import helpers
from ..helpers import but, record_of, rows_of, seal_again
from ..tables import with_extensions

HONEST = """
import torch
from torch import nn
from mprun.data import DatasetSource


class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.rand(1, 8, 8), index % 3


def data(batch_size, seed, device):
    own = {"batch_size": batch_size, "seed": seed, "device": device}
    return DatasetSource(Images(), Images(), num_classes=3, **own)


def network(data, width=4):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 3))
"""
HOSTILE = "open('canary', 'w').close()\nfrom honest import data, network\n"
NAMES = ["data.factory=honest:data", "model.factory=honest:network"]
BAD = ["data.factory=hostile:data", "model.factory=hostile:network"]
RUNS_CODE = with_extensions("RUNS_CODE", [["resume=run", "train.steps=6"]])
RUN = ["model=custom", *NAMES, "device=cpu", "threads=1", "precision=fp16_master_scaled"]
RUN += ["train.steps=4", "data.batch_size=4", "train.checkpoint_every=2"]
RUN += ["numerics=probes", "numerics.every=2"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "honest.py").write_text(HONEST)
    (tmp_path / "hostile.py").write_text(HOSTILE)
    yield tmp_path
    for name in ("honest", "hostile"):
        sys.modules.pop(name, None)


@pytest.fixture
def edited(folder):
    """A run whose record names `hostile` everywhere, and is said to have diverged."""
    assert main([*RUN, "output_dir=run"]) == 0
    run = folder / "run"
    config = yaml.safe_load((run / "config.yaml").read_text().replace("honest", "hostile"))
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    record = record_of(run)
    record["overrides"] = [o.replace("honest", "hostile") for o in record["overrides"]]
    record |= {"status": "diverged", "cause": "non-finite loss", "config": config}
    record["config_hash"] = config_hash(config)  # whoever made it knows how
    seal_again(run, **record)
    return run


def refused(capsys, *arguments: str) -> str:
    """The one line of a refusal, before which nothing hostile was imported."""
    line = helpers.refused(capsys, *arguments)
    assert not Path("canary").exists() and "hostile" not in sys.modules
    return line


@pytest.mark.parametrize("arguments", RUNS_CODE)
@pytest.mark.few(2)
def test_a_record_that_names_other_code_imports_nothing(arguments, edited, capsys):
    line = refused(capsys, *arguments)
    assert "names code" in line and line.endswith(f"add {' '.join(BAD)}\n")
    # Given the names the run was really made with, it is refused as another run.
    assert "the run was made with data.factory=hostile:data" in refused(capsys, *arguments, *NAMES)
    # One of two is not enough.
    assert f"add {BAD[1]}\n" in refused(capsys, *arguments, BAD[0])


@pytest.mark.slow
def test_what_only_reads_imports_nothing(edited, capsys):
    shutil.copytree(edited, "fp32")
    record = record_of("fp32")
    record["precision"] |= {"mode": "fp32", "scaler": "none"}
    for key in ("precision", "scaler"):
        record["config"][key]["name"] = {"precision": "fp32", "scaler": "none"}[key]
    record["config"]["precision"] |= modes()["fp32"].values
    record["config"]["scaler"]["kind"] = "none"
    seal_again(Path("fp32"), **record | {"config_hash": "0"})
    assert main(["compare", "run", "fp32", "--out", "report"]) in (0, 2, 3)
    assert "hostile:network-hostile:data" in capsys.readouterr().out
    assert "fp16_master_scaled" in table([record_of(edited)])
    assert not Path("canary").exists() and "hostile" not in sys.modules


@pytest.mark.slow
def test_the_same_names_again_continue_the_run_bit_for_bit(folder, capsys):
    assert main(but(RUN, "output_dir=straight", "train.steps=6")) == 0
    assert main([*RUN, "output_dir=run"]) == 0
    assert "names code" in refused(capsys, "resume=run", "train.steps=6")
    assert main(["resume=run", "train.steps=6", *NAMES]) == 0
    rows = {}
    for run in ("straight", "run"):
        told = rows_of(folder / run, "train")
        rows[run] = {row["step"]: (row["loss"], row["loss_scale"]) for row in told}
    assert rows["run"] == rows["straight"] and max(rows["run"]) == 6
    other = refused(capsys, "resume=run", "train.steps=8", NAMES[0], "model.factory=honest:data")
    assert "the run was made with model.factory=honest:network" in other
    width = refused(capsys, "resume=run", "train.steps=8", *NAMES, "model.options.width=9")
    assert "keeps its configuration" in width
    wrong = refused(capsys, "resume=run", "train.steps=x", *NAMES)
    assert wrong.startswith("mprun: train.steps=x:")


@pytest.mark.slow
def test_names_in_the_user_s_own_option_files_count(folder, capsys):
    for group, name in (("data", "data"), ("model", "network")):
        (folder / "mine" / group).mkdir(parents=True)
        text = f"defaults: [custom]\nfactory: 'honest:{name}'\n"
        (folder / "mine" / group / "own.yaml").write_text(text)
    own = ["model=own", "data=own", *(o for o in RUN if "custom" not in o and o not in NAMES)]
    assert main(["--config-dir", "mine", *own, "output_dir=run"]) == 0
    assert "names code" in refused(capsys, "resume=run", "train.steps=6")
    assert main(["--config-dir", "mine", "resume=run", "train.steps=6"]) == 0
    for words in with_extensions("OF_A_RUN", []):
        assert main([*words, "--config-dir", "mine", "run"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("place", ["run", "data", "experiment/run"])
def test_a_run_below_the_config_dir_does_not_vouch_for_itself(place, edited, capsys):
    # As it comes, say, out of somebody's archive: with option files of its own.
    for override in BAD:
        key, name = override.split("=")
        group = edited / key.partition(".")[0]
        group.mkdir()
        (group / "own.yaml").write_text(f"factory: {name}\n")
    record = yaml.safe_load((edited / "config.yaml").read_text())
    for name in ("config.yaml", "all.yaml"):
        named = {"factory": "hostile:data"} | record
        (edited / name).write_text("# @package _global_\n" + yaml.safe_dump(named))
    seal_again(edited, config=named, config_hash=config_hash(named))
    if place != "run":
        Path(place).parent.mkdir(exist_ok=True)
        edited.rename(place)
    for words in RUNS_CODE:
        command = [word.replace("run", place) for word in words]
        assert "names code" in refused(capsys, *command, "--config-dir", ".")


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [[], ["hydra/launcher=joblib"]])
def test_a_sweep_names_the_code_for_every_run_that_it_starts_or_continues(
    launcher, folder, capsys, monkeypatch
):
    if launcher:
        pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    root = Path(__file__).resolve().parents[2]
    monkeypatch.setenv("PYTHONPATH", str(root))
    sweep = ["-m", *launcher, *RUN, "seed=0,1"]
    assert main(sweep) == 0
    runs = sorted((folder / "outputs" / "custom-custom").glob("fp16*-s?"))
    assert len(runs) == 2
    # One of them is left as a machine that died leaves it.
    record, kept = record_of(runs[1]), rows_of(runs[1])
    Record(runs[1], record).reopen()
    shutil.rmtree(next(runs[1].glob("checkpoints/step-*4")))
    assert main(sweep) == 0
    again = record_of(runs[1])
    assert (again["status"], again["attempts"]) == ("done", record["attempts"] + 1)
    assert [row["loss"] for row in rows_of(runs[1])] == [row["loss"] for row in kept]
    # A record that was edited meanwhile is not continued: the sweep starts that run anew.
    config = yaml.safe_load((runs[0] / "config.yaml").read_text())
    config["data"]["factory"] = "hostile:data"
    (runs[0] / "config.yaml").write_text(yaml.safe_dump(config))
    Record(runs[0], record_of(runs[0])).reopen()
    assert main(sweep) == 0
    assert record_of(runs[0])["attempts"] == 1
    assert not Path("canary").exists()
