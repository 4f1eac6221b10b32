"""Channels last and torch.compile: the same steps but for rounding."""

import copy

import pytest
import torch

from mprun.errors import BadInput

from ..helpers import assert_same_bits, raises_line
from .trained import SMALL, Training

# FP32 kernels of another layout, or compiled ones, add up in another order. A sum of some 10^3
# products differs by about 10^3 * 2^-24 = 6e-5 of its size at most; the loss is a mean over many.
FP32_TOLERANCE = 1e-4
# One rounding to FP16 is 2^-11 = 5e-4; a few of them in a row, averaged in the loss.
FP16_TOLERANCE = 4e-3
# One rounding to BF16 is 2^-9.
BF16_TOLERANCE = 1e-2
NHWC = "train.channels_last=on"
IMAGE_TASKS = ["reconstruction", "gan"]


def losses(built, steps=4):
    torch.manual_seed(1)
    return Training(built, built.stepper.step).steps(0, steps).values("loss")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "tolerance"),
    [("fp32", FP32_TOLERANCE), ("fp16_master_scaled", FP16_TOLERANCE), ("amp", FP16_TOLERANCE)],
)
@pytest.mark.parametrize("task", IMAGE_TASKS)
def test_channels_last_differs_by_rounding(build_run, task, mode, tolerance):
    overrides = [*SMALL[task], "data.channels=3", f"precision={mode}", "optim.lr=1e-4"]
    if mode != "fp32":
        overrides.append("scaler.init_scale=256")
    expected = losses(build_run(*overrides, "train.channels_last=off"))
    assert torch.allclose(losses(build_run(*overrides, NHWC)), expected, rtol=tolerance, atol=0)


def test_weights_masters_state_and_images_lie_in_one_order(build_run):
    overrides = [*SMALL["reconstruction"], "data.channels=3", NHWC]
    built = build_run(*overrides, "precision=fp16_master_scaled")
    ((images, _),) = built.task.load(0)
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert not images.is_contiguous()
    built.stepper.step(0)
    learner = built.task.learner
    weights = [p for p in learner.model.parameters() if p.dim() == 4 and p.shape[1] > 1]
    assert weights and all(w.is_contiguous(memory_format=torch.channels_last) for w in weights)
    for name, weight in learner.model.named_parameters():
        assert weight.grad.stride() == weight.stride(), name
        for value in learner.steps.state_by_name()[name].values():
            assert value.dim() == 0 or value.stride() == weight.stride(), name
    assert built.stepper.description["channels_last"] == "on"


@pytest.mark.slow
@pytest.mark.parametrize("first", ["on", "off"])
def test_a_checkpoint_of_one_layout_continues_in_the_other(build_run, first):
    overrides = [*SMALL["reconstruction"], "data.channels=3", "precision=fp16_master_scaled"]
    built = build_run(*overrides, f"train.channels_last={first}")
    Training(built, built.stepper.step).steps(0, 3)
    saved = copy.deepcopy(built.task.state_dict())
    other = build_run(*overrides, f"train.channels_last={'off' if first == 'on' else 'on'}")
    other.task.load_state_dict(saved)
    assert_same_bits(saved, other.task.state_dict())
    assert built.task.evaluate() == other.task.evaluate()
    found = [one.stepper.step(3)["loss"].item() for one in (built, other)]
    assert found[0] == pytest.approx(found[1], rel=FP16_TOLERANCE)


COMPILED = {task: ([*SMALL[task], "optim.lr=1e-4"], FP32_TOLERANCE) for task in IMAGE_TASKS}
COMPILED |= {
    mode: ([*SMALL["transformer"], f"precision={mode}", "cpu_half=native"], BF16_TOLERANCE)
    for mode in ("amp_bf16", "bf16_master", "fp8_tensorwise")
}


@pytest.mark.slow
@pytest.mark.parametrize("case", COMPILED)
def test_compiled_steps_differ_by_rounding(build_run, case):
    """A break in the graph would be an error."""
    words, tolerance = COMPILED[case]
    expected = losses(build_run(*words))
    built = build_run(*words, "train.compile=default")
    found = losses(built)
    assert found[0] == expected[0]  # the first step is not compiled
    assert torch.allclose(found, expected, rtol=tolerance, atol=0)
    assert built.stepper.description["compile"] == "default"
    assert built.stepper.description["compile_s"] > 0
    assert all(learner.network is not learner.model for learner in built.task.learners.values())
    assert all(value == value for value in built.task.evaluate().values())


@pytest.mark.slow
def test_without_a_compiler_one_line_says_so(build_run):
    from torch._inductor.config import patch  # an undone attribute of its own would be missing

    torch._dynamo.reset()
    built = build_run(*SMALL["reconstruction"], "model.code_size=5", "train.compile=default")
    built.stepper.step(0)
    nowhere = {"cpp.cxx": ("/nowhere/g++",), "force_disable_caches": True}
    with patch(nowhere), raises_line(BadInput, "(allowed here: auto, off)") as error:
        built.stepper.step(1)
    assert str(error.value).startswith("train.compile=default: ")


def test_a_recurrent_network_of_ones_own_is_not_compiled(build_run, tmp_path, monkeypatch):
    (tmp_path / "own_recurrent.py").write_text(
        "from torch import nn\n\n"
        "class Rows(nn.Module):\n"
        "    def __init__(self, size, classes):\n"
        "        super().__init__()\n"
        "        self.rnn = nn.GRU(size, 8, batch_first=True)\n"
        "        self.out = nn.Linear(8, classes)\n\n"
        "    def forward(self, images):\n"
        "        return self.out(self.rnn(images[:, 0])[0][:, -1])\n\n"
        "def make(data):\n"
        "    return Rows(64, data.num_classes)\n"
    )
    monkeypatch.chdir(tmp_path)
    overrides = ["model=custom", "model.task=classification", "model.factory=own_recurrent:make"]
    with pytest.raises(BadInput, match="recurrent layer, which torch.compile passes over"):
        build_run(*overrides, "data=digits_gray_64", "train.compile=default")
