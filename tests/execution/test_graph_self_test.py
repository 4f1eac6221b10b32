"""The self-test of CUDA graphs: it agrees with a recorder that is right, and sees what is not."""

import pytest
import torch

from mprun.execution.cuda_graph import CannotCapture
from mprun.execution.graphed_step import difference, why_no_replay_on

from .call_recorder import CallRecorder, into_one_output

CPU = torch.device("cpu")


class Waiting(CallRecorder):
    def warm(self, function):
        return function(), "the step waits for the device (norm.py:3)"


class Refusing(CallRecorder):
    def record(self, function):
        raise CannotCapture("RuntimeError: not permitted")


class Replaying(CallRecorder):
    """Replays by `replay(function)`; what is recorded is what the first step returned."""

    def __init__(self, replay):
        super().__init__()
        self._replay = replay

    def warm(self, function):
        self._loss = function()
        return self._loss, None

    def record(self, function):
        return into_one_output(lambda: self._replay(function, self._loss.clone()))


def test_a_right_recorder_differs_in_nothing():
    state = torch.get_rng_state()
    assert difference(CallRecorder(), CPU) is None
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recorder", "said"),
    [
        (Waiting(), "the step waits for the device (norm.py:3)"),
        (Refusing(), "a step cannot be captured (RuntimeError: not permitted)"),
        (Replaying(lambda step, loss: loss), "a replay leaves the weights as they were"),
        (Replaying(lambda step, loss: (step(), step())[1]), "other weights than eager ones"),
        (Replaying(lambda step, loss: (step(), loss)[1]), "replayed steps end with the loss 0."),
    ],
)
def test_what_a_wrong_recorder_does_is_said(recorder, said):
    assert said in difference(recorder, CPU)


@pytest.mark.gpu
def test_on_a_gpu_a_captured_step_is_the_eager_step():
    stream = torch.cuda.current_stream()
    assert why_no_replay_on(torch.device("cuda", torch.cuda.current_device())) is None
    assert torch.cuda.current_stream() == stream
