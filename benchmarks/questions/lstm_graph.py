"""Can cuDNN's LSTM be captured in a CUDA graph: forward, backward, update and carried state?"""

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from questions.answer import Answer, milliseconds

TIME_STEPS, BATCH, INPUTS, HIDDEN, PROJECTION = 20, 32, 256, 512, 256
STEPS, WARM_UP = 10, 3
LOSS_SCALE = 1024.0


@dataclass(frozen=True, slots=True)
class _Kind:
    """A way to train: dtype of the weights, with autocast or not, with projection or not."""

    name: str
    dtype: torch.dtype
    autocast: bool = False
    projection: int = PROJECTION


_KINDS = (
    _Kind("FP16 weights", torch.float16, projection=0),
    _Kind("FP16 weights, projected", torch.float16),
    _Kind("BF16 weights, projected", torch.bfloat16),
    _Kind("FP32, projected", torch.float32),
    _Kind("FP16 autocast, projected", torch.float32, autocast=True),
)


def lstm_graph(device: torch.device) -> Answer:
    """Capture a cuDNN LSTM with projection, and compare replays with eager steps."""
    torch.backends.cudnn.deterministic = True
    rows, numbers = [], {}
    for kind in _KINDS:
        found = _one(kind, device)
        numbers[kind.name] = found
        cells = [kind.name, "yes" if found["captured"] else f"no: {found['error']}"]
        if found["captured"]:
            same = "bit for bit" if found["equal"] else f"within {found['largest difference']:.1e}"
            repeat = "bit for bit" if found["eager repeats"] else "no"
            cells += [same, repeat, f"{found['eager_ms']:.3f}", f"{found['graph_ms']:.3f}"]
        else:
            cells += ["-"] * 4
        rows.append(tuple(cells))
    captured = [name for name, found in numbers.items() if found["captured"]]
    equal = [name for name in captured if numbers[name]["equal"]]
    text = (
        f"Captured: {', '.join(captured) or 'none'} of {len(_KINDS)} kinds; after {STEPS} steps "
        f"replays equal eager steps bit for bit in {', '.join(equal) or 'none'}"
    )
    if captured:
        gains = [numbers[name]["eager_ms"] / numbers[name]["graph_ms"] for name in captured]
        text += f"; eager over replay time {min(gains):.2f} to {max(gains):.2f}"
    header = ("kind", "captured", "replay = eager", "eager = eager", "eager ms", "replay ms")
    return Answer(text + ".", numbers, header, tuple(rows))


class _Training:
    """A two-layer LSTM with carried state, its loss and its update, all on static tensors."""

    def __init__(self, kind: _Kind, device: torch.device):
        torch.manual_seed(0)
        width = kind.projection or HIDDEN
        self.lstm = nn.LSTM(INPUTS, HIDDEN, 2, proj_size=kind.projection).to(device, kind.dtype)
        self.head = nn.Linear(width, INPUTS).to(device, kind.dtype)
        self.weights = [*self.lstm.parameters(), *self.head.parameters()]
        self.x = torch.randn(TIME_STEPS, BATCH, INPUTS).to(device, kind.dtype)
        self.target = torch.randn(TIME_STEPS, BATCH, INPUTS).to(device)
        state_dtype = torch.float16 if kind.autocast else kind.dtype
        self.h = torch.zeros(2, BATCH, width, device=device, dtype=state_dtype)
        self.c = torch.zeros(2, BATCH, HIDDEN, device=device, dtype=state_dtype)
        self.autocast = kind.autocast
        self.initial = [t.detach().clone() for t in self.tensors()]

    def tensors(self) -> list[Tensor]:
        """Return everything that a step changes."""
        return [*self.weights, self.h, self.c]

    @torch.no_grad()
    def restart(self) -> None:
        for tensor, initial in zip(self.tensors(), self.initial, strict=True):
            tensor.copy_(initial)

    def step(self) -> Tensor:
        # A cached cast would be made only at capture, from weights that change later.
        cast = torch.autocast("cuda", torch.float16, cache_enabled=False)
        with cast if self.autocast else nullcontext():
            y, (h, c) = self.lstm(self.x, (self.h, self.c))
            outputs = self.head(y)
        loss = (outputs.float() - self.target).square().mean()
        gradients = torch.autograd.grad(loss * LOSS_SCALE, self.weights)
        with torch.no_grad():
            torch._foreach_add_(self.weights, gradients, alpha=-0.1 / LOSS_SCALE)
            self.h.copy_(h)
            self.c.copy_(c)
        return loss.detach()


def _one(kind: _Kind, device: torch.device) -> dict:
    training = _Training(kind, device)
    first, second = (_after_steps(training, training.step) for _ in range(2))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            training.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            training.step()
    except RuntimeError as error:
        torch.cuda.synchronize()  # raises if the device is unusable: the process must end
        # Ending the capture fails, too; the first failure is the reason.
        while error.__context__ is not None:
            error = error.__context__
        return {"captured": False, "error": (str(error) or type(error).__name__).splitlines()[0]}
    replayed = _after_steps(training, graph.replay)
    return {
        "captured": True,
        "equal": _equal(first, replayed),
        "eager repeats": _equal(first, second),
        "largest difference": max(
            float((a.double() - b.double()).abs().max())
            for a, b in zip(first, replayed, strict=True)
        ),
        "moved": not _equal(training.initial, replayed),
        "eager_ms": milliseconds(training.step),
        "graph_ms": milliseconds(graph.replay),
    }


def _after_steps(training: _Training, step) -> list[Tensor]:
    """Return weights and state after `STEPS` steps from the beginning."""
    training.restart()
    for _ in range(STEPS):
        step()
    return [tensor.detach().clone() for tensor in training.tensors()]


def _equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
