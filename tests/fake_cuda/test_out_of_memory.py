"""Memory that ends at any moment of a run on CUDA: exit code 5, one line, and all is given back."""

import re

import pytest

from .cells import MODELS

SMALL = [*MODELS["lstm_lm"], "precision=fp32", "train.steps=6", "train.eval_every=5"]
# Leaves the card what is in use then, and so many bytes.
PROGRAM = """
import gc, os
import mprun.record.checkpoint, mprun.training.run
from mprun.cli import main
from mprun.execution.cuda_graph import CudaRecorder
from mprun.execution.step_runner import StepRunner
from mprun.training.loop import MetricLogger
from unittest import mock

def tight(spared=0):
    free, total = torch.cuda.mem_get_info()
    os.environ["FAKE_CUDA_MEMORY"] = str(total - free + spared)

reserve = []

def fill():  # what is left of the memory that torch has taken
    try:
        while not torch.cuda.is_current_stream_capturing():
            reserve.append(torch.empty(512, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError:
        pass

def at_first(holder, name):
    whole = getattr(holder, name)
    def tightened(*arguments, **named):
        if not torch.cuda.is_current_stream_capturing():
            torch.cuda.empty_cache()
        tight()
        fill()
        return whole(*arguments, **named)
    return mock.patch.object(holder, name, tightened)

def collect():  # what the nodes of a graph hold is found once these are gone
    while gc.collect():
        pass

in_use = torch.zeros(1, device="cuda")
collect()
torch.cuda.empty_cache()
before = torch.cuda.memory_allocated()
os.environ.pop("FAKE_CUDA_MEMORY", None)
try:
    with {where}:
        code = main({arguments})
finally:
    os.environ.pop("FAKE_CUDA_MEMORY", None)
    reserve.clear()
collect()
return {{"code": code, "held": torch.cuda.memory_allocated() - before}}
"""
PLACES = {
    "a step": 'at_first(StepRunner, "step")',
    "the middle of a step": 'at_first(torch.nn.Linear, "forward")',
    "an evaluation": 'at_first(MetricLogger, "evaluate")',
    "a capture": 'at_first(CudaRecorder, "record")',
    "the weights": 'at_first(mprun.training.run, "build")',
}
LINE = (
    r"mprun: out of memory: asked for [\d.]+ [KMG]iB, with 0\.\d\d of 0\.\d\d GiB of the GPU "
    r"and [\d.]+ GiB of the host free; try {less}"
)


OUTLIVES = "torch 2.11: a network outlives its step that failed; by whom is not known"


def last_line(found):
    """What a command said at its end that ran out of memory, of which nothing is held."""
    assert (found["code"], found["held"]) == (5, 0), found["printed"]
    return found["printed"].strip().splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("where", PLACES)
def test_a_full_card(device, script, tmp_path, where):
    if device.has_oldest_torch:
        pytest.skip(OUTLIVES)
    graph = "on" if where == "a capture" else "off"
    arguments = [*SMALL, "device=cuda", "threads=1", f"train.cuda_graph={graph}"]
    arguments += [f"output_dir={tmp_path / 'run'}"]
    line = last_line(script(PROGRAM.format(where=PLACES[where], arguments=arguments)))
    assert re.fullmatch(LINE.format(less=r"data\.batch_size=\d+ or precision=amp"), line), line


OWN = """
import torch
from torch import nn

class Large(nn.Module):
    def __init__(self, data=None):
        super().__init__()
        self.a, self.b = nn.Linear(3 * 32 * 32, 64), nn.Linear(64, 10)

    def forward(self, images):
        h = self.a(images.flatten(1))
        return self.b((h[:, None] * torch.ones(1, 50_000, 1, device=h.device)).sum(1))

def refused(data=None):
    raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`")
"""


@pytest.mark.parametrize("factory", ["Large", "refused"])
def test_a_network_of_ones_own(device, script, tmp_path, factory):
    if device.has_oldest_torch and factory == "Large":
        pytest.skip(OUTLIVES)
    (tmp_path / f"own_{factory}.py").write_text(OWN)
    arguments = ["model=custom", f"model.factory=own_{factory}:{factory}", "data=synthetic_images"]
    arguments += ["data.batch_size=32", "data.train_size=64", "data.eval_size=32", "precision=amp"]
    arguments += ["device=cuda", "threads=1", "train.steps=2", f"output_dir={tmp_path / 'run'}"]
    where = f"mock.patch('sys.path', [{str(tmp_path)!r}, *__import__('sys').path])"
    body = PROGRAM.format(where=where, arguments=arguments).replace(
        'os.environ.pop("FAKE_CUDA_MEMORY", None)\ntry:', "tight(100 * 2**20)\ntry:"
    )
    line = last_line(script(body))
    assert "out of memory: " in line and "data.batch_size=16 train.accumulate=2" in line


REFUSED_IN_A_CAPTURE = """
from mprun.cli import main
from mprun.tasks.supervised import Supervised
from unittest import mock

whole = Supervised.compute
def compute(self, *arguments):
    if torch.cuda.is_current_stream_capturing():
        raise torch.AcceleratorError("CUDA error: out of memory")
    return whole(self, *arguments)

with mock.patch.object(Supervised, "compute", compute):
    return {{"code": main({arguments})}}
"""


@pytest.mark.slow
@pytest.mark.parametrize(("graph", "code"), [("on", 5), ("auto", 0)])
def test_a_capture_that_the_driver_refuses(script, tmp_path, graph, code):
    arguments = [*SMALL, "device=cuda", "threads=1", f"train.cuda_graph={graph}"]
    arguments += ["train.steps=40", f"output_dir={tmp_path / 'run'}"]
    found = script(REFUSED_IN_A_CAPTURE.format(arguments=arguments))
    assert found["code"] == code, found["printed"]
    told = "mprun: out of memory: " if code else "mprun: no CUDA graph: CUDA error: out of memory"
    assert told in found["printed"]


REFUSED_BETWEEN_TWO = """
from collections import Counter
from mprun.cli import main
from mprun.precision.loss_scale import DynamicLossScale
from mprun.tasks.learner import Learner
from unittest import mock

step, update, stepped, updates = Learner.step, DynamicLossScale.update, [], Counter()
def refused(self, measure=False):
    if torch.cuda.is_current_stream_capturing():
        if stepped:
            raise torch.AcceleratorError("CUDA error: out of memory")
        stepped.append(self)
    return step(self, measure)

def counted(self):
    updates[id(self)] += 1
    update(self)

with (
    mock.patch.object(Learner, "step", refused),
    mock.patch.object(DynamicLossScale, "update", counted),
):
    return {{"code": main({arguments}), "updates": [*updates.values()]}}
"""


@pytest.mark.slow
def test_a_scale_of_two_optimizers_moves_once_a_step_after_a_capture_in_which_one_has_stepped(
    script, tmp_path
):
    arguments = [*MODELS["dcgan"], "precision=fp16_master_scaled", "device=cuda", "threads=1"]
    arguments += ["train.steps=40", "train.cuda_graph=auto", f"output_dir={tmp_path / 'run'}"]
    found = script(REFUSED_BETWEEN_TWO.format(arguments=arguments))
    assert "mprun: no CUDA graph: CUDA error: out of memory" in found["printed"]
    assert (found["code"], found["updates"]) == (0, [40]), found["printed"]
