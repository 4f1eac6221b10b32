"""torch.compile around a prepared model, or around its blocks: whole graphs, eager mode's bits.

`aot_eager` takes a graph apart into the operations of eager mode, so all bits are equal.
"""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mprun

STEPS = 6  # the first three are watched operation by operation, without a compiler
MODES = ["amp", "fp16_master_scaled", "bf16_master", "fp8_delayed"]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(16), nn.Linear(16, 16)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.seen += 1
        return x + self.inner(self.norm(x)).relu()


class Writing(Block):
    def forward(self, x):
        with torch.no_grad():  # less than BF16 resolves
            self.inner.weight.mul_(1 - 2**-12)
        return super().forward(x)


class Mixed(Block):
    def forward(self, x):
        return super().forward(x) @ torch.eye(16)


def counting():
    """A backend that counts the graphs it is given, and how torch.compile takes whole ones."""
    from torch._dynamo.testing import CompileCounterWithBackend  # the compiler

    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    return counter, {"backend": counter, "fullgraph": True, "dynamic": False}


def trained(mode, compiled=None, kind=Block):
    """Losses, evaluations and the state of a model after some steps; compiled: changes it."""
    torch.manual_seed(0)
    model = nn.Sequential(*(kind() for _ in range(4)), nn.Linear(16, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, targets = torch.randn(8, 16), torch.randint(5, (8,))
    called = model if compiled is None else compiled(model)
    mprun.prepare(called, optimizer, mode, native=True)
    found = []
    for step in range(STEPS):
        loss = F.cross_entropy(called(x), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
        if step == 4:
            model.eval()
            with torch.no_grad():
                found.append(called(x))
            model.train()
    return [*found, *model.state_dict().values()]


def assert_equal(found, expected):
    assert all(map(torch.equal, found, expected)), [
        (one - other).abs().max() for one, other in zip(found, expected, strict=True)
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch 2.11's tracer has several
@pytest.mark.parametrize("mode", MODES)
def test_a_model_is_one_graph(mode):
    """One of a step, one of an evaluation; `fullgraph` would refuse a break."""
    counter, form = counting()
    found = trained(mode, lambda model: torch.compile(model, **form))
    assert_equal(found, trained(mode))
    assert counter.frame_count == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["fp16_master_scaled", "fp8_delayed"])
def test_equal_blocks_share_a_graph(mode):
    """Also what they write is their own: statistics, the largest magnitudes of delayed scales."""
    counter, form = counting()

    def compiled(model):
        for block in model[:4]:
            block.compile(**form)
        return model

    assert_equal(trained(mode, compiled), trained(mode))
    if torch.__version__ < "2.12":
        pytest.skip("torch 2.11 tells partial functions apart by identity: a graph for each block")
    assert counter.frame_count == 3  # the first one's input needs no gradient; an evaluation


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Writing, Mixed])
def test_what_a_call_needs_help_for_is_not_compiled(kind):
    """A compiler does not see what serves it; a line says so."""
    counter, form = counting()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = trained("bf16_master", lambda model: torch.compile(model, **form), kind)
        assert_equal(found, trained("bf16_master", kind=kind))
    assert counter.frame_count == 1  # the evaluation, which computes in FP32
    assert sum("is not compiled" in str(one.message) for one in told) == 1
