"""The Triton kernels on a GPU: against torch's operations, without waiting, and inside a graph."""

import pytest
import torch
from torch import nn
from torch.optim import SGD

from mprun.precision import (
    DynamicLossScale,
    MixedPrecisionOptimizer,
    NoLossScale,
    cast_model,
    get_policy,
)
from mprun.precision.torch_update import has_fused_kernel
from mprun.precision.update import Ready
from mprun.precision.update_choice import why_not_on

from ..helpers import making
from .rules import RULES

pytestmark = pytest.mark.gpu


class Elementwise(nn.Module):
    """No matrix product, so that equal weights give equal gradients whatever cuBLAS chooses."""

    def __init__(self):
        super().__init__()
        random = torch.Generator().manual_seed(0)
        sizes = (5003, 4096, 40)
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(size, generator=random)) for size in sizes
        )
        self.norm = nn.LayerNorm(40)

    def forward(self, inputs):
        out = [(inputs[:, : len(w)] * w).float().square().mean() for w in self.weights]
        return sum(out) + self.norm(inputs[:, :40]).float().square().mean()


class Run:
    def __init__(self, optimizer, mode, update, *, rate=None, clip_norm=0.5, scale=None):
        policy, model = get_policy(mode), Elementwise().cuda()
        rule = RULES[optimizer]
        kernel = rule.func.__name__.lower()
        chosen = {"fused": True} if has_fused_kernel(kernel, torch.device("cuda")) else {}
        self.policy, self.cast = policy, cast_model(model, policy)
        self.scale = scale or DynamicLossScale(2.0**8, growth_interval=3, device="cuda")
        self.optimizer = MixedPrecisionOptimizer(
            self.cast,
            making(rule, weight_decay=0.01, **chosen),
            self.scale,
            clip_norm=clip_norm,
            update=update,
        )
        if rate is not None:
            for group in self.optimizer.inner.param_groups:
                group["lr"] = rate

    def step(self, inputs):
        self.optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16, enabled=self.policy.autocast_dtype is not None):
            loss = self.cast.module(self.policy.cast_inputs(inputs))
        self.optimizer.backward(loss)
        update = self.optimizer.step(True)
        self.scale.update()
        return update

    def tensors(self):
        own = self.optimizer.state_dict()
        state = [v for values in own["state"].values() for v in values.values()]
        parameters = list(self.cast.module.parameters())
        return [t.detach().clone() for t in (*parameters, *own["masters"].values(), *state)]


def batches(count, seed=0):
    random = torch.Generator().manual_seed(seed)
    made = [torch.randn(4, 5003, generator=random).cuda() for _ in range(count)]
    if count > 2:
        made[2][0, 3] = float("inf")
    return made


@pytest.mark.parametrize("rule", ["sgd", "adam", "adamw", "adagrad"])
def test_the_self_test_passes(rule):
    device = torch.device("cuda", torch.cuda.current_device())
    assert why_not_on(MixedPrecisionOptimizer, device, rule) is None


@pytest.mark.parametrize("mode", ["fp16_master", "bf16_master", "amp"])
@pytest.mark.parametrize("optimizer", RULES)
def test_against_the_plain_way_without_waiting(optimizer, mode):
    plain, single = (Run(optimizer, mode, update) for update in ("plain", "single_pass"))
    assert single.optimizer.update_path == "single_pass"
    inputs, rows = batches(5), []
    single_updates = [single.step(inputs[0])]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        single_updates += [single.step(batch) for batch in inputs[1:]]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for batch, ours in zip(inputs, single_updates, strict=True):
        rows.append((plain.step(batch), ours))
    assert [float(ours.found_inf) for _, ours in rows] == [0, 0, 1, 0, 0]
    for theirs, ours in rows:
        assert theirs.found_inf == ours.found_inf and theirs.loss_scale == ours.loss_scale
        # Once a 16-bit copy has rounded the other way, gradients differ in one of 2^8 or 2^11.
        torch.testing.assert_close(
            theirs.grad_norm, ours.grad_norm, rtol=2.0**-8, atol=0, equal_nan=True
        )
    policy = single.policy
    for name, master in single.optimizer.masters.items():
        own = dict(single.cast.module.named_parameters())[name]
        assert torch.equal(own, master.to(policy.param_dtype))
    for a, b in zip(single.optimizer.updated, plain.optimizer.updated, strict=True):
        # Four updates of at most the rate, whose gradients differ as above.
        torch.testing.assert_close(a, b, rtol=2.0**-20, atol=4 * 0.05 * 2.0**-8)


@pytest.mark.parametrize("optimizer", RULES)
def test_without_a_scale(optimizer):
    plain, single = (
        Run(optimizer, "bf16_master", update, clip_norm=None, scale=NoLossScale("cuda"))
        for update in ("plain", "single_pass")
    )
    for batch in batches(2):
        assert plain.step(batch).found_inf is None and single.step(batch).found_inf is None
    for a, b in zip(single.optimizer.updated, plain.optimizer.updated, strict=True):
        torch.testing.assert_close(a, b, rtol=2.0**-20, atol=2 * 0.05 * 2.0**-8)


@pytest.mark.parametrize("optimizer", RULES)
def test_inside_a_cuda_graph(optimizer):
    """Replays compute what eager steps do, also with one between them and a rate that changes."""
    rates = [torch.full((), 0.02, device="cuda") for _ in range(2)]
    runs = [Run(optimizer, "fp16_master", "single_pass", rate=rate) for rate in rates]
    eager, graphed = runs
    static, inputs = torch.zeros(4, 5003, device="cuda"), batches(8)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for batch in inputs[:3]:
            static.copy_(batch)
            graphed.step(static)
    torch.cuda.current_stream().wait_stream(stream)
    for batch in inputs[:3]:
        eager.step(batch)
    graph = torch.cuda.CUDAGraph()
    graphed.optimizer.zero_grad()
    with torch.cuda.graph(graph):
        update = graphed.step(static)
    for number, batch in enumerate(inputs[3:]):
        for rate in rates:
            rate.mul_(0.5)
        expected = eager.step(batch)
        if number == 2:
            # An eager step in between has gradients elsewhere.
            assert graphed.step(batch).found_inf == expected.found_inf
        else:
            static.copy_(batch)
            graph.replay()
            assert update.found_inf == expected.found_inf
            assert update.loss_scale == expected.loss_scale
        torch.cuda.synchronize()
        pairs = zip(graphed.tensors(), eager.tensors(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs), number
    assert graphed.scale.steps_skipped == eager.scale.steps_skipped == 1


def test_gradients_anywhere_in_memory():
    """cuDNN's LSTM returns slices of one buffer as gradients; their addresses are what they are."""
    from mprun.precision.single_pass_triton import KernelUpdate

    masters = [torch.ones(4096, device="cuda", requires_grad=True) for _ in range(2)]
    own = [master.detach().half() for master in masters]
    single = KernelUpdate(SGD(masters, 0.5, fused=True), own, masters, [True, True])
    buffer = torch.ones(8193, device="cuda", dtype=torch.float16)
    buffer[0] = float("nan")
    for _ in range(2):
        found_inf = torch.zeros((), device="cuda")
        gradients = [buffer[1:4097], buffer[4097:]]
        ready = Ready(gradients, None, found_inf)
        single.read(ready, norm=False, grad_max=False)
        single.write(ready, None)
        assert found_inf == 0
    for tensor in (*masters, *own):
        assert torch.equal(tensor, torch.zeros_like(tensor))
