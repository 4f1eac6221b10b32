"""Each row of docs/script/prepare.md on what is not handled is run, and happens as it says. A case
is found by the first cell of its row, so that neither can be without the other.
"""

import gc
import threading
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mprun
from mprun.precision import StaticLossScale

from .page_of_prepare import BF16, FP16, ONES, Calls, call, linear, prepared, rows

NOT_HANDLED = {}


def not_handled(name):
    def entered(function):
        NOT_HANDLED[name] = function
        return function

    return entered


@not_handled("clamps a gradient in the `backward` of its own `autograd.Function` inside the model")
def own_function():
    seen = []

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            seen.append(gradient)
            return gradient

    for scale in (1.0, 8.0):
        model = Calls(lambda self, y: Own.apply(y))
        prepared(model=model, scaler=StaticLossScale(scale))
        model(ONES).sum().backward()
    assert [one.dtype for one in seen] == [torch.float16] * 2
    assert torch.equal(8 * seen[0], seen[1])


@not_handled("changes weights without an optimizer (`p.data.add_(p.grad)`)")
def no_optimizer():
    model = mprun.prepare(linear(), precision=FP16)
    (model(ONES).sum() * 1e6).backward()
    for own in model.parameters():
        own.data.add_(own.grad, alpha=-0.1)
    assert not torch.stack([own.isfinite().all() for own in model.parameters()]).any()


@not_handled("sets an FP32 `.grad` in `fp16_naive` or `bf16_naive`")
def gradient_in_fp32():
    for mode in ("fp16_naive", "bf16_naive"):
        (own, *_) = prepared(mode)[0].parameters()
        with pytest.raises(RuntimeError, match="dtype"):
            own.grad = torch.ones(4, 4)


@not_handled(
    "mixes FP32 state with 16-bit weights, as schedule-free's `eval()` does (in the naive modes "
    "and in `bf16_stochastic`)"
)
def state_in_fp32():
    for mode in ("fp16_naive", "bf16_stochastic"):
        (own, *_) = prepared(mode)[0].parameters()
        with pytest.raises(RuntimeError, match="dtype"):
            own.data.lerp_(torch.ones(4, 4), 0.1)


@not_handled("takes the gradient with respect to an output (`autograd.grad(images, latents)`)")
def of_an_output():
    def act(self, latents):
        return self.layer(latents), latents

    images, latents = call(act)
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(images.sum(), latents)
    model, _ = prepared(model=Calls(act))
    latents = model.layer(ONES)
    assert torch.autograd.grad(model.layer(latents).sum(), latents)[0].any()


def late(calls):
    """Make FP32 in `forward` from call number `calls` on."""
    count = [0]

    def act(self, y):
        count[0] += 1
        return y if count[0] <= calls else self.layer(torch.zeros(2, 4)) + y

    return act


@not_handled(
    "uses FP32 tensors, or an operation without a 16-bit version, for the first time after the "
    "third call"
)
def fp32_after_the_third_call():
    model, _ = prepared(BF16, Calls(late(3)))
    for _ in range(3):
        model(ONES)
    with pytest.raises(RuntimeError, match="dtype"):
        model(ONES)


@not_handled(
    "changes a buffer or a weight in `forward` for the first time after the third call (the first "
    "three in `eval()`)"
)
def written_after_the_third_call():
    def act(self, y):
        if self.training:
            with torch.no_grad():
                self.follows.mul_(0.999)
        return y * self.follows

    model, _ = prepared(BF16, Calls(act, follows=torch.ones(4)))
    model.eval()
    for _ in range(3):
        model(ONES)
    model.train()
    model(ONES)
    expected = torch.ones(4).bfloat16().mul_(0.999).float()
    assert torch.equal(model.follows, expected)
    model(ONES)
    assert torch.equal(model.follows, expected * 0.999)


@not_handled(
    "compiles the model, and only after its third call first hooks a tensor or changes weights in "
    "`forward`"
)
def late_in_a_compiled_model():
    seen = []

    def act(self, y):
        if self.late:
            y.register_hook(seen.append)
            with torch.no_grad():
                self.follows.mul_(0.999)
        return y * 1

    for scale in (1.0, 8.0):
        whole = Calls(act, follows=torch.ones(4))
        model, _ = prepared(FP16, whole, scaler=StaticLossScale(scale), native=True)
        torch.compiler.reset()
        called = torch.compile(model, backend="eager")
        for whole.late in (False, False, False, True):
            outputs = called(ONES)
        outputs.sum().backward()
        assert whole.follows.tolist() == [torch.tensor(0.999).half().item()] * 4
    assert seen[0].dtype is torch.float16 and torch.equal(8 * seen[0], seen[1])


@not_handled("multiplies a buffer of real numbers by positions (rotary frequencies)")
def rotary():
    frequencies = 1e4 ** (-torch.arange(0, 8, 2) / 8)
    seen = []

    def act(self, y):
        seen.append(torch.arange(512)[:, None].type_as(self.frequencies) * self.frequencies)
        return y

    for overrides in (None, {"": "fp32"}):
        model = nn.Sequential(nn.Linear(4, 4), Calls(act, frequencies=frequencies))
        overrides = overrides and {"1": "fp32"}
        prepared(BF16, model, overrides=overrides)[0](ONES)
    exact = torch.arange(512)[:, None] * frequencies
    assert (seen[0].float() - exact).abs().max() > 0.5 and torch.equal(seen[1], exact)


@not_handled("passes targets to a model that computes its loss")
def targets():
    def act(self, y, targets):
        seen.append(targets)
        return F.mse_loss(y, targets)

    seen = []
    call(act, ONES, ONES / 3)
    assert torch.equal(seen[0], (ONES / 3).half())


@not_handled("carries a state from step to step itself (an LSTM's state)")
def carried():
    model, optimizer = prepared(scaler=StaticLossScale(1.0))
    before = [own.clone() for own in model.parameters()]
    state = model(torch.full((2, 4), 7e4))  # which FP16 does not hold
    state.sum().backward()
    optimizer.step()
    assert mprun.state_of(optimizer).last.found_inf == 1
    assert all(map(torch.equal, before, model.parameters())) and not state.isfinite().all()


@not_handled("changes weights by `.data` between two calls without a backward pass in between")
def between_two_calls():
    model, _ = prepared()
    for _ in range(3):
        model(ONES).sum().backward()
    loss = model(ONES).sum()
    for own in model.parameters():
        own.data.zero_()
    assert torch.equal(model(ONES).sum(), loss)
    assert not any(own.any() for own in model.parameters())
    loss.backward()
    assert not model(ONES).any()


@not_handled(
    "calls a sharded model twice without a backward pass, and changes its shards between these "
    "calls"
)
def shards():
    pytest.skip("needs two processes")


@not_handled("calls one model from two threads at once")
def two_threads():
    found = []

    def act(self, y):
        if threading.current_thread() is threading.main_thread():
            other = threading.Thread(target=lambda: found.append(self(y.detach())))
            other.start()
            other.join()
        return y

    call(act)
    assert found[0].dtype is torch.float16


@not_handled("compiles the prepared model by `torch.jit.script`")
def jit():
    model, _ = prepared()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(Exception, match="jit|script|Forward|compile"):
            torch.jit.script(model)


@not_handled("prepares one model in `amp` on a CPU, and uses `torch.autocast` for another model")
def other_autocast():
    def dtype():
        with torch.autocast("cpu", torch.bfloat16):
            return torch.ones(2, 4, dtype=torch.bfloat16).pow(2).dtype

    gc.collect()  # earlier ones live on in cycles
    before = dtype()
    model, _ = prepared("amp")
    model(ONES)
    assert (before, dtype()) == (torch.bfloat16, torch.float32)


@not_handled(
    "runs NVFP4 matrix products (compute capability 10.0) on two streams, or on two GPUs of one "
    "process"
)
def nvfp4_on_two_streams():
    pytest.skip("needs a GPU of compute capability 10.0")


# It loads for seconds.
COMPILED = {name for name in NOT_HANDLED if name.startswith("compiles the model")}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] if n in COMPILED else []) for n in NOT_HANDLED],
)
def test_what_the_page_calls_not_handled_happens_as_it_says(name):
    NOT_HANDLED[name]()


def test_each_row_has_a_case_and_each_case_a_row():
    assert {*rows("What is not handled", "the script")} == {*NOT_HANDLED}
