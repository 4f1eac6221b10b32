"""`mprun paper` as a user types it: list, bad input, real runs, the page, going on."""

import json
import shutil
import subprocess
import sys
from argparse import Namespace

import pytest
from msgspec.structs import replace

from mprun.cli.dispatch import main
from mprun.extensions.paper import command as paper_command
from mprun.extensions.paper.listing import Listing, commands_of
from mprun.extensions.paper.rows import ROWS, digest, settings

from ...compare.run_folders import write_run
from ...helpers import refused

TINY = ["train.steps=20", "train.eval_every=10", "device=cpu"]


def test_a_list_runs_and_writes_nothing(tmp_path, capsys):
    rest = ["--seeds", "3", "--out", str(tmp_path / "new"), "train.steps=7"]
    assert main(["paper", "--list", "--only", "fig5,ssd", *rest]) == 0
    said = capsys.readouterr().out
    assert f"start them: mprun paper --only fig5,ssd {' '.join(rest)}" in said
    assert "bigLSTM" in said and "Multibox SSD" in said and "AlexNet" not in said
    assert "0 of " in said and not (tmp_path / "new").exists()


def test_without_only_nothing_is_started_or_composed(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mprun.extensions.paper.command.plan", None)  # which composes
    assert main(["paper"]) == 0 and not list(tmp_path.iterdir())
    *_, time, all_rows, _ = capsys.readouterr().out.splitlines()
    assert " runs left: about " in time and "mprun paper --only all" in all_rows


def test_a_row_is_called_by_each_of_its_names(tmp_path, capsys):
    for name, network in {"fig2b": "Mandarin", "fig3": "Multibox", "ssd": "Multibox"}.items():
        assert main(["paper", "--list", "--only", name, "--out", str(tmp_path)]) == 0
        lines = [one for one in capsys.readouterr().out.splitlines() if one.startswith("| ")]
        assert len(lines) == 2 and network in lines[1]


def test_the_time_left_is_that_of_the_missing_runs_as_fast_as_the_others_were(
    tmp_path, monkeypatch
):
    options = Namespace(out=tmp_path, scale="small", data_root=None, overrides=[], jobs=1)
    options.seeds = (0, 1)
    (row,) = (replace(row, arms=row.arms[:2]) for row in ROWS if row.key == "biglstm")
    monkeypatch.setitem(settings(), "biglstm", replace(settings()["biglstm"], seconds=10))
    nothing = Listing([row], {}, options)
    assert nothing.left(nothing.runs["biglstm"]) == "70 s"  # 3 techniques on 2 seeds and the probes
    for seed, command in enumerate(commands_of(row, options).values()):
        directory = tmp_path / "runs" / "any" / f"{seed}"
        directory.mkdir(parents=True)
        given = [*command.overrides, "seed=0", f"output_dir={directory}"]
        status = "done" if seed < 3 else "preempted"
        fields = {"status": status, "overrides": given, "seconds": 30.0}
        (directory / "run.json").write_text(json.dumps(fields))
    some = Listing([row], {}, options)
    assert len(some.finished) == 3 and some.slower == 3
    assert some.left(some.runs["biglstm"]) == "2 min"  # 4 runs of 30 s
    options.jobs = 2
    assert Listing([row], {}, options).estimate().startswith("4 runs left: about 60 s, 2 at")


def test_a_list_of_the_full_scale_names_what_is_missing(tmp_path, capsys):
    out = ["--out", str(tmp_path / "new")]
    assert main(["paper", "--list", "--scale", "full", "--only", "table1,fig2a", *out]) == 0
    lines = capsys.readouterr().out.splitlines()
    resnet = next(line for line in lines if "ResNet-50" in line)
    assert "needs --data-root with imagenet" in resnet and " h in fp32" in resnet
    assert "private data" in next(line for line in lines if "Mandarin" in line)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--only", "table9"], "--only table9: must be among table1"),
        (["--scale", "big"], "--scale big: must be one of small, full"),
        (["--seeds", "5-1"], "--seeds 5-1: 5-1 must ascend"),
        (["--data-root", "/nowhere"], "--data-root /nowhere: is only allowed with --scale full"),
        (["--scale", "full", "--data-root", "/nowhere"], "--data-root /nowhere: no such folder"),
        (["-j", "0"], "-j 0: must be"),
        (["--only", "fig5", "seed=3"], "seed: is not allowed with paper"),
        (["--only", "fig5", "precision=amp"], "precision: is not allowed with paper"),
        (["--only", "fig5", "+scaler.scale=8"], "scaler.scale: is not allowed with paper"),
        (["--only", "fig5", "train.step=3"], "train.step"),
        (["--only", "fig5", "--out", __file__], "must be a folder"),
    ],
)
def test_bad_input_is_one_line(arguments, named, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(capsys, "paper", *arguments, says=named)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_later_row_keeps_the_earlier_ones_on_the_page(tmp_path, capsys, monkeypatch):
    """The earlier rows have runs; what is asked for has none, as nothing is started here."""
    monkeypatch.setattr(paper_command._Runs, "run", lambda self, command: 0)
    out = tmp_path / "out"

    def made_by(name: str) -> dict:
        given = ["paper", "--only", name, "--seeds", "0-2", "--out", str(out)]
        assert main(given) == 0
        return json.loads((out / "paper.json").read_text(encoding="utf-8"))

    # Where the command looks for them, as its plan says.
    options = paper_command._options(["--only", "biglstm", "--seeds", "0-2", "--out", str(out)])
    (row,) = (row for row in ROWS if row.key == "biglstm")
    runs = paper_command._Runs(options, [row], "")
    assert all(f"basis=settings.yaml-{digest()}" in cell.overrides for cell in runs.plan.cells)
    finals = {"FP32": 1.0, "FP32 masters, no scale": 1.2, "FP32 masters, scale 128": 0.999}
    for technique, final in finals.items():
        for cell in runs.cells["biglstm"][technique]:
            given = {"basis": f"settings.yaml-{digest()}"}
            more = {"final": final + 0.01 * cell.seed, "config_hash": cell.config_hash}
            mode, scaler = cell.mode, cell.scaler
            write_run(cell.directory, mode, cell.seed, scaler=scaler, overrides=given, **more)
    first = made_by("biglstm")["rows"]["biglstm"]
    verdicts = {one["technique"]: one["same_outcome"] for one in first["techniques"]}
    assert verdicts["FP32 masters, no scale"] == "worse, not diverged (constructed setting)"
    assert verdicts["FP32 masters, scale 128"] == "yes" and len(first["fp32_values"]) == 3
    both = made_by("dcgan")
    assert both["rows"].keys() == {"biglstm", "dcgan"} and both["rows"]["biglstm"] == first
    assert both["facts"]["settings"].endswith(f"recorded: settings.yaml-{digest()} by 9 runs")
    page = (out / "paper.md").read_text(encoding="utf-8")
    assert "| DCGAN" in page and "constructed setting: an accumulator" in page and digest() in page
    for left, technique in ((8, "FP32 masters, scale 128"), (7, "FP32")):
        shutil.rmtree(runs.cells["biglstm"][technique][0].directory)
        fewer = made_by("dcgan")
        short = f"biglstm: stood on an earlier page, but 1 of its {left + 1} runs are not there any"
        assert fewer["remarks"] == [f"{short} more"] and "biglstm" in fewer["rows"]
        assert fewer["facts"]["settings"].endswith(f"by {left} runs")
    shutil.rmtree(out / "runs")
    gone = made_by("dcgan")
    lost = "biglstm: stood on an earlier page, but its runs are not there any more"
    assert gone["rows"].keys() == {"dcgan"} and gone["remarks"] == [lost]
    for other in ([], None, {"biglstm": None}, {"biglstm": {"runs": [1]}}):
        (out / "paper.json").write_text(json.dumps({"scale": "small", "rows": other}))
        assert made_by("dcgan")["rows"].keys() == {"dcgan"}


@pytest.mark.slow
def test_runs_a_page_and_nothing_twice(tmp_path):
    command = [sys.executable, "-m", "mprun", "paper", "--only", "fig5", "-j", "2"]
    command += ["--out", str(tmp_path / "out"), "--seeds", "0-2", *TINY]
    first = subprocess.run(command, capture_output=True, text=True)
    assert first.returncode == 0, first.stderr
    page = (tmp_path / "out" / "paper.md").read_text(encoding="utf-8")
    assert "| bigLSTM language model |" in page and "matches FP32" in page
    assert "fig5.png" in page and (tmp_path / "out" / "fig5.png").stat().st_size > 1000
    found = json.loads((tmp_path / "out" / "paper.json").read_text(encoding="utf-8"))
    techniques = found["rows"]["biglstm"]["techniques"]
    assert {len(one["values"]) for one in techniques} == {3}
    assert "confirm nothing" in page and "mechanism: an FP32 run, seed 0" in page
    assert "<svg" in (tmp_path / "out" / "paper.html").read_text(encoding="utf-8")
    records = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").glob("runs/*/*/run.json")}
    assert len(records) == 3 * (1 + len(techniques))
    again = subprocess.run(command, capture_output=True, text=True)
    every = len(records) + 1  # the probes
    assert again.returncode == 0 and f"{every} finished already" in again.stderr
    assert records == {p: p.stat().st_mtime_ns for p in records}
    # Runs of other seeds beside them are not judged.
    command[command.index("0-2")] = "1-2"
    assert subprocess.run(command, capture_output=True).returncode == 0
    found = json.loads((tmp_path / "out" / "paper.json").read_text(encoding="utf-8"))
    assert {len(one["values"]) for one in found["rows"]["biglstm"]["techniques"]} == {2}
