"""How many files of mprun a reader has to open to follow one training step, or a verdict."""

import re
import sys
from pathlib import Path

import pytest
import torch

import mprun
from mprun.assembly import build
from mprun.cli import main
from mprun.comparison import equivalence
from mprun.config.compose import compose_config
from mprun.prepared import steps
from mprun.training.loop import Loop
from mprun.training.signals import Interruption

from ..compare.run_folders import write_run

ROOT = Path(mprun.__file__).parent
# Of what a step is made of whatever the data; the rest is the loop around it and where its data
# come from.
OWN = ("execution", "models", "precision", "prepared", "tasks")
STEP = {
    "execution": "step_runner",
    "precision": "audit batch_statistics emulation forward_context loss_scale torch_update update",
    "prepared": "border containers nodes passes prepared_model scaling shards steps tensors",
    "tasks": "learner supervised task",
}
SUPERVISED = {f"{folder}/{name}.py" for folder in STEP for name in STEP[folder].split()}
RECURRENT = {"models/lstm.py", "precision/emulated_recurrent.py", "precision/recurrent.py"}
SMALL_LM = "model=lstm_lm data=synthetic_tokens model.hidden_size=8 model.embedding_size=8"
CASES = {
    SMALL_LM: RECURRENT,
    "model=resnet50 optim=sgd data=synthetic_images data.train_size=16 data.eval_size=4": set(),
}


def files_of(function) -> set[str]:
    """The files of mprun in which a function was called, by path inside of the package."""
    found = set()

    def note(frame, event, _):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT):
            found.add(path.relative_to(ROOT).as_posix())

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return found


@pytest.mark.parametrize("model", CASES)
@pytest.mark.few(1)
def test_one_step_in_the_middle_of_a_run(model, tmp_path):
    small = ["data.batch_size=2", "train.steps=9", "precision=fp16_master_scaled"]
    config = compose_config([*model.split(), *small]).config
    loop = Loop(build(config, torch.device("cpu")), config, tmp_path, Interruption())
    try:
        for index in range(3):
            loop.advance(index)
        files = files_of(lambda: loop.advance(3))
    finally:
        loop.logger.close()
    assert {file for file in files if file.startswith(OWN)} == SUPERVISED | CASES[model]
    # The loop, what it keeps of a step, and the source of its data.
    assert len(files) <= 28


def walks():
    """The lists of files in "Two paths through the code" of docs/architecture.md."""
    page = (ROOT.parent / "docs" / "architecture.md").read_text("utf-8")
    section = page.partition("\n## Two paths through the code\n")[2].partition("\n## ")[0]
    return [re.findall(r"^ (\S+\.py) ", block, re.M) for block in section.split("```")[1::2]]


def way_to(owner, name, call, monkeypatch):
    """The most files of mprun on the stack when a function is called, from the outermost in."""
    ways, inner = [], getattr(owner, name)

    def note(*arguments, **named):
        way, frame = {}, sys._getframe(1)
        while frame is not None:
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(ROOT):
                way[path.relative_to(ROOT).as_posix()] = None
            frame = frame.f_back
        ways.append([*reversed(way)])
        return inner(*arguments, **named)

    monkeypatch.setattr(owner, name, note)
    call()
    return max(ways, key=len)


def test_the_walks_of_the_page(tmp_path, monkeypatch):
    """With the files that the page names beside a walk they are at most twelve."""
    to_step, to_verdict = walks()
    run = [*SMALL_LM.split(), "train.steps=1", "precision=fp16_master_scaled"]
    run += [f"output_root={tmp_path}"]
    assert way_to(steps, "skipping", lambda: main(run), monkeypatch) == to_step
    for mode in ("fp32", "amp"):
        for seed in range(3):
            write_run(tmp_path / "runs" / f"{mode}-s{seed}", mode, seed)
    judged = ["compare", str(tmp_path / "runs"), "--no-report"]
    found = way_to(equivalence, "_mean_and_variance", lambda: main(judged), monkeypatch)
    assert found == to_verdict
