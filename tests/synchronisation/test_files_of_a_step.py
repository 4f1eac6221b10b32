"""How many files of mprun a reader has to open to follow one training step."""

import sys
from pathlib import Path

import pytest
import torch

import mprun
from mprun.assembly import build
from mprun.config.compose import compose_config
from mprun.training.loop import Loop
from mprun.training.signals import Interruption

ROOT = Path(mprun.__file__).parent
# Of what a step is made of whatever the data; the rest is the loop around it and where its data
# come from.
OWN = ("execution", "models", "precision", "prepared", "tasks")
SUPERVISED = {
    "execution/step_runner.py",
    "precision/audit.py",
    "precision/batch_statistics.py",
    "precision/emulation.py",
    "precision/forward_context.py",
    "precision/loss_scale.py",
    "precision/torch_update.py",
    "precision/update.py",
    "prepared/border.py",
    "prepared/nodes.py",
    "prepared/passes.py",
    "prepared/prepared_model.py",
    "prepared/shards.py",
    "prepared/skip.py",
    "prepared/steps.py",
    "prepared/tensors.py",
    "tasks/learner.py",
    "tasks/supervised.py",
    "tasks/task.py",
}
RECURRENT = {
    "models/lstm.py",
    "precision/emulated_recurrent.py",
    "precision/recurrent.py",
}
CASES = {
    "model=lstm_lm data=synthetic_tokens model.hidden_size=8 model.embedding_size=8": RECURRENT,
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
