"""Can a training step be recorded here, and does its replay compute what the eager step does?

A driver, a torch or a kernel that is a little too old must be seen before a run counts on replays.
"""

import copy

import torch
from torch import Tensor, nn
from torch.optim import SGD

from mprun.execution.cuda_graph import CannotCapture, CudaRecorder
from mprun.execution.graphed_step import WARM_UP, GraphRecorder
from mprun.precision import (
    DynamicLossScale,
    ForwardContext,
    MixedPrecisionOptimizer,
    cast_model,
    get_policy,
)
from mprun.precision.torch_update import has_fused_kernel

_WIDTH, _BATCH = 64, 32
_REPLAYS = 3


def why_no_replay_on(device: torch.device) -> str | None:
    """Why a recorded step cannot be relied on, None: it can. Waits for the device.

    Args:
        device: a CUDA device, by its index.

    Raises:
        torch.OutOfMemoryError: which says nothing of replays.
    """
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):  # which also makes `device` the current one
        return difference(CudaRecorder(device, stream), device)


def difference(recorder: GraphRecorder, device: torch.device) -> str | None:
    """In what steps recorded by `recorder` differ from eager ones; None: in no bit."""
    with torch.random.fork_rng(devices=[]):  # the random state belongs to the caller
        layer, inputs = nn.Linear(_WIDTH, _WIDTH), torch.randn(_BATCH, _WIDTH)
    eager, recorded = (
        _Training(copy.deepcopy(layer).to(device), inputs.to(device)) for _ in range(2)
    )
    for _ in range(WARM_UP + _REPLAYS):
        expected = eager.step()
    for _ in range(WARM_UP - 1):
        recorded.step()
    waits = recorder.warm(recorded.step)[1]
    if waits is not None:
        return waits
    before = recorded.on_host()
    try:
        recording = recorder.record(recorded.step)
    except CannotCapture as error:
        return f"a step cannot be captured ({error})"
    for _ in range(_REPLAYS):
        loss = recording.replay()
    after, wanted = recorded.on_host(), eager.on_host()
    if _alike(after, before):
        return "a replay leaves the weights as they were"
    if not _alike(after, wanted):
        return "replayed steps end with other weights than eager ones"
    if loss.item() != expected.item():
        return f"replayed steps end with the loss {loss.item()!r}, eager ones {expected.item()!r}"
    return None


def _alike(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


class _Training:
    """Of one linear layer, with what a run has in FP16: masters, loss scale, skipped updates."""

    def __init__(self, layer: nn.Linear, inputs: Tensor):
        policy, device = get_policy("fp16_master_scaled"), inputs.device
        fused = has_fused_kernel("sgd", device)
        cast = cast_model(layer, policy)
        self._layer, self._inputs = layer, policy.cast_inputs(inputs)
        self._arithmetic = ForwardContext(policy, device)
        self._scale = DynamicLossScale(1024.0, device=device)
        self._optimizer = MixedPrecisionOptimizer(
            cast,
            lambda named: SGD([p for _, p in named], lr=1.0, momentum=0.5, fused=fused),
            self._scale,
            update="auto",
        )
        self._weights = [*layer.parameters(), *cast.masters.values()]

    def on_host(self) -> list[Tensor]:
        """Copies of weights and masters, which the CPU compares: not what is being tested."""
        return [tensor.detach().cpu().clone() for tensor in self._weights]

    def step(self) -> Tensor:
        """One training step; its loss, float32, 0-dim."""
        self._optimizer.zero_grad()
        with self._arithmetic:
            loss = self._layer(self._inputs).float().square().mean()
            self._optimizer.backward(loss)
        self._optimizer.step()
        self._scale.update()
        return loss.detach()
