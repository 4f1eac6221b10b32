"""docs/extend.md, done as it stands: mode, scaler, optimizer, model, task, metric, verb, log."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mprun.cli import main
from mprun.config.option_files import conf_dir

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
SHORT = ("train.steps=4", "data.batch_size=4", "threads=1", "device=cpu")
LM = ("model=lstm_lm", "data.sequence_length=4")


def block(file: str) -> str:
    """The code block that follows the first mention of `file` on the page."""
    found = re.search(rf"`{re.escape(file)}`.*?```\w+\n(.*?)```", PAGE, re.DOTALL)
    assert found, file
    return found[1]


def test_every_block_of_the_page_is_used():
    here = Path(__file__)
    texts = (here, here.parents[1] / "config" / "test_components.py")
    name = re.compile(r'"((?:conf/|mprun/|perceptrons/)?[\w/]+\.(?:yaml|py|toml))"')
    files = [file for path in texts for file in name.findall(path.read_text("utf-8"))]
    used = {block(file) for file in files if f"`{file}`" in PAGE and "patient" not in file}
    assert len(used) == PAGE.count("```") // 2


@pytest.fixture
def checkout(tmp_path):
    """A copy of the package and of its options, to which files can be added."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "mprun", tmp_path / "mprun", ignore=ignored)
    shutil.copytree(conf_dir(), tmp_path / "conf")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)  # names the extensions
    return tmp_path


def add(checkout, *files):
    before = {path for path in checkout.rglob("*") if path.is_file()}
    for file in files:
        (checkout / file).parent.mkdir(exist_ok=True)
        (checkout / file).write_text(block(file), encoding="utf-8")
    added = {path for path in checkout.rglob("*") if path.is_file()} - before
    assert len(added) == len(files)


def record_of(checkout, *words):
    """run.json of `mprun WORDS`, run from the copy."""
    command = [sys.executable, "-m", "mprun", *words, *SHORT]
    run = subprocess.run(command, cwd=checkout, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    folder = checkout / run.stdout.strip().splitlines()[-1].removeprefix("run: ")
    return json.loads((folder / "run.json").read_text(encoding="utf-8"))


@pytest.mark.slow
def test_a_mode_is_one_file(checkout):
    add(checkout, "conf/precision/mine.yaml")
    record = record_of(checkout, *LM, "precision=mine")
    assert (record["status"], record["precision"]["mode"]) == ("done", "mine")
    dtypes = record["precision"]["effective_dtypes"]["model"]
    assert set(dtypes["parameters"]) == {"bfloat16"}
    assert set(dtypes["master_weights"]) == {"float32"}
    assert set(dtypes["gradients_in_update"]) == {"bfloat16"}


@pytest.mark.slow
def test_a_scaler_is_one_file(checkout):
    text = (checkout / "conf/scaler/dynamic.yaml").read_text(encoding="utf-8")
    text = re.sub(r"growth_interval: .*", "growth_interval: 2", text)
    patient = re.sub(r"name: .*", "name: patient", text, count=1)
    (checkout / "conf/scaler/patient.yaml").write_text(patient, encoding="utf-8")
    record = record_of(checkout, *LM, "precision=fp16_master_scaled", "scaler=patient")
    assert (record["status"], record["precision"]["scaler"]) == ("done", "patient")
    assert record["config"]["scaler"]["growth_interval"] == 2


@pytest.mark.slow
def test_an_optimizer_is_one_file(checkout):
    add(checkout, "conf/optim/sgd_nesterov.yaml")
    record = record_of(checkout, *LM, "precision=fp16_master", "optim=sgd_nesterov")
    assert (record["status"], record["choices"]["optim"]) == ("done", "sgd_nesterov")
    assert record["config"]["optim"]["nesterov"] is True


@pytest.mark.slow
def test_a_model_is_two_files_and_a_task_one(checkout):
    add(checkout, "mprun/models/mlp.py", "conf/model/mlp.yaml")
    record = record_of(checkout, "model=mlp", "precision=fp16_master_scaled")
    assert record["status"] == "done" and "top1" in record["final"]
    add(checkout, "mprun/tasks/regression.py")
    task = "model.task=mprun.tasks.regression:Regression"
    record = record_of(checkout, "model=mlp", "precision=fp16_master_scaled", task)
    assert record["status"] == "done" and set(record["final"]) == {"loss"}


def test_a_metric_is_declared_by_its_task(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "with_f1.py").write_text(block("with_f1.py"), encoding="utf-8")
    (tmp_path / "its_mlp.py").write_text(block("mprun/models/mlp.py"), encoding="utf-8")
    own = ("model=custom", "model.factory=its_mlp:build", "data=digits_32", "output_dir=run")
    words = (*own, "model.task=with_f1:WithF1", "compare.metric=f1", "optim=sgd", *SHORT)
    assert main([*words]) == 0
    record = json.loads((tmp_path / "run" / "run.json").read_text(encoding="utf-8"))
    assert record["metrics"]["f1"]["higher_is_better"] and 0 < record["final"]["f1"] < 1
    units = re.findall(r"^\| `(\w+)` \|.* \| (0\.\d+|none)\b.*$", PAGE, re.MULTILINE)
    usual = {unit: float(margin) for unit, margin in units if margin != "none"}
    assert {unit for unit, _ in units} - usual.keys() == {"own"}
    for name, unit in (("loss", "relative"), ("top1", "points"), ("f1", "fraction")):
        found = record["metrics"][name]
        counted = 2 if found["counts_samples"] else 1  # on 360 digits
        assert (found["unit"], found["margin"]) == (unit, counted * usual[unit])


@pytest.mark.slow
def test_a_verb_is_an_entry_point(checkout):
    header, line = '[project.entry-points."mprun.verbs"]', 'ended = "perceptrons.ended:main"'
    assert f"`{line}`" in PAGE and f"`{header}`" in PAGE
    add(checkout, "perceptrons/ended.py")
    project = checkout / "pyproject.toml"
    project.write_text(project.read_text("utf-8").replace(header, f"{header}\n{line}"), "utf-8")
    (checkout / "run").mkdir()
    (checkout / "run" / "run.json").write_text('{"status": "running"}')

    def mprun(*words):
        command = [sys.executable, "-m", "mprun", *words]
        done = subprocess.run(command, cwd=checkout, capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    assert mprun("ended", "run") == (0, "running\n", "")
    code, page, _ = mprun("--help")
    assert code == 0 and re.search(r"  mprun ended +how a run ended\n", page)
    for words in (["ended"], ["ended", "nowhere"], ["ended", "run", "--x"]):
        code, said, line = mprun(*words)
        assert (code, said, line.count("\n")) == (2, "", 1), line


CAFFE = """\
I1126 10:00:00.000000  1 solver.cpp:218] Iteration 0 (0 iter/s, 0s/10 iters), loss = 9
I1126 10:00:00.000000  1 solver.cpp:237]     Train net output #0: loss = 2.5 (* 1 = 2.5 loss)
I1126 10:00:01.000000  1 solver.cpp:218] Iteration 10 (9 iter/s, 1s/10 iters), loss = 9
I1126 10:00:01.000000  1 solver.cpp:237]     Train net output #0: loss = 0.5 (* 1 = 0.5 loss)
I1126 10:00:02.000000  1 solver.cpp:218] Iteration 20 (9 iter/s, 1s/10 iters), loss = 9
I1126 10:00:02.000000  1 solver.cpp:237]     Train net output #0: loss = 0.2"""  # cut off


@pytest.mark.slow
def test_a_log_format_is_an_entry_point(checkout):
    pytest.importorskip("mprun.extensions.logs")
    header, line = '[project.entry-points."mprun.log_formats"]', 'caffe = "perceptrons.logs:CAFFE"'
    assert f"`{line}`" in PAGE and f"`{header}`" in PAGE
    add(checkout, "perceptrons/logs.py")
    with open(checkout / "pyproject.toml", "a", encoding="utf-8") as project:
        project.write(f"\n{header}\n{line}\n")
    (checkout / "a.log").write_text(CAFFE, encoding="utf-8")
    program = "from pathlib import Path; from mprun.extensions.logs.log_formats import read_logs\n"
    program += "[log] = read_logs(Path('a.log'), 'loss'); print(log.steps, log.points.tolist())"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True)
    assert done.stdout == "iteration [[0.0, 2.5], [10.0, 0.5]]\n", done.stderr
