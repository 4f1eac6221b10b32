"""Each row of docs/script/prepare.md on what is refused or said is run.

A case is found by the first cell of its row, so that neither can be without the other. The words
that the last cell quotes, in backticks, must come, in one line.
"""

import copy
import re
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

import mprun
from mprun.precision import StaticLossScale, get_policy
from mprun.precision.muon import Muon

from .loops import Forward
from .page_of_prepare import BF16, FP16, ONES, Calls, call, linear, prepared, rows, sgd, step


def in_8_bits(state_dtype):
    policy = replace(get_policy("nvfp4"), state_dtype=state_dtype)
    model = linear(64, 64, 64)
    mprun.prepare(model, optimizer := Muon(model.parameters(), lr=1e-3), policy)
    step(model, optimizer, torch.ones(2, 64))
    return optimizer.state_dict()


def with_state_loaded_before():
    model = linear(64, 64, 64)
    optimizer = Muon(model.parameters(), lr=1e-3)
    optimizer.load_state_dict(in_8_bits("dynamic8"))
    mprun.prepare(model, optimizer, "nvfp4")


class Uncopied:
    def __init__(self, tensor):
        self.tensor = tensor

    def __copy__(self):
        raise TypeError("not copied")


def sharing():
    layer = nn.Linear(4, 4)
    return [nn.Sequential(layer), nn.Sequential(layer, nn.ReLU())]


TO_PREPARE = {
    "a name that is not a mode": [lambda: prepared("fp17")],
    "the optimizer as first argument and the model as second": [
        lambda: mprun.prepare(sgd(model := linear()), model)
    ],
    "an empty list": [lambda: mprun.prepare([])],
    "a model in half or double precision": [
        lambda: prepared(model=linear().half()),
        lambda: prepared(model=linear().double()),
    ],
    "a prepared model, or a model that contains one": [
        lambda: prepared(model=prepared()[0]),
        lambda: prepared(model=nn.Sequential(prepared()[0])),
    ],
    "a layer whose parameters do not exist yet": [
        lambda: mprun.prepare(nn.Sequential(nn.LazyLinear(4)))
    ],
    "a `torch.jit` module": [
        lambda: mprun.prepare(torch.jit.trace(linear(), ONES)),
        lambda: mprun.prepare(torch.jit.script(linear())),
    ],
    "parameters on `meta`, or on two devices": [lambda: mprun.prepare(linear().to("meta"))],
    "models that share a module or a weight, in two calls": [
        lambda: [mprun.prepare(one) for one in sharing()]
    ],
    "an optimizer of other parameters": [lambda: mprun.prepare(linear(), sgd(linear()))],
    "an optimizer that has already loaded state in 8 bits": [with_state_loaded_before],
    "overrides with an unknown dtype, or with a pattern that matches no module": [
        lambda: prepared(overrides={"0": "fp17"}),
        lambda: prepared(overrides={"nothing": "fp32"}),
    ],
    "a mode that the device does not support": [lambda: prepared("tf32")],
    "an FP8 mode for a model whose only linear layer is its output": [
        lambda: prepared("fp8_rowwise", nn.Sequential(nn.Conv2d(1, 1, 3)))
    ],
    "a policy that sets `reduce_dtype`": [
        lambda: prepared(replace(get_policy(BF16), reduce_dtype=torch.bfloat16))
    ],
}


@torch.autocast("cpu", torch.bfloat16)
def in_autocast(function, *given):
    return function(*given)


def autocast_around_a_pass():
    model, _ = prepared()
    in_autocast(model(ONES).sum().backward)


def tf32_later():
    (own,) = mprun.state_of(prepared("fp32")[1]).models
    own.audit.forward_context.device = torch.device("cuda")  # a CPU does not read the switch
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        with own.audit.watching():
            pass
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def grad_scaler():
    model, optimizer = prepared()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(model(ONES).sum()).backward()
    scaler.step(optimizer)


def kept_outside():
    kept = []
    model, _ = prepared(model=Calls(lambda self, y: kept.append(y) or y))
    (model(ONES).sum() + kept[0].float().sum()).backward()


def enters_past_the_inputs():
    free = torch.ones(4, requires_grad=True)
    call(lambda self, y: y * free).sum().backward()


def of_weights():
    model, _ = prepared()

    def loss(weights):
        return torch.func.functional_call(model, weights, (ONES,)).sum()

    torch.func.grad(loss)({name: own.detach() for name, own in model.named_parameters()})


def second_derivative():
    model, _ = prepared("fp8_rowwise", linear(32, 32, 32))
    given = torch.ones(2, 32, requires_grad=True)
    torch.autograd.grad(model(given).sum(), given, create_graph=True)


def closures(mode, **options):
    model, optimizer = prepared(mode, **options)

    def closure():
        optimizer.zero_grad()
        loss = model(ONES).sum() * torch.inf
        loss.backward()
        return loss

    optimizer.step(closure)


def in_other_8_bits():
    policy = replace(get_policy("nvfp4"), state_dtype="fp8")
    model, optimizer = prepared(policy, linear(64, 64, 64), lambda m: Muon(m.parameters(), lr=1e-3))
    optimizer.load_state_dict(in_8_bits("dynamic8"))


class Recomputed(torch.autograd.Function):
    """A checkpoint as DeepSpeed and fairscale have their own."""

    @staticmethod
    def forward(ctx, function, x):
        ctx.function = function
        ctx.save_for_backward(x)
        return function(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            again = ctx.function(x)
        torch.autograd.backward(again, gradient)
        return None, x.grad


def recomputed_by_itself():
    model = Calls(lambda self, y: Recomputed.apply(lambda x: x * self.gain, y))
    model.gain = nn.Parameter(torch.ones(4))
    step(*prepared(model=model))


def no_products():
    ones = {"weight": lambda: nn.Parameter(torch.ones(4))}
    step(*prepared(model=Forward(lambda m, x: x * m.weight, net=nn.Identity, **ones)))


IN_THE_LOOP = {
    "`torch.autocast` around a call": [lambda: in_autocast(prepared()[0], ONES)],
    "`torch.autocast` around a backward pass": [autocast_around_a_pass],
    "`torch.autocast` to another dtype inside `forward`": [
        lambda: call(lambda self, y: in_autocast(self.layer, y))
    ],
    "TF32 switched on later": [tf32_later],
    "`step()` without a gradient": [lambda: prepared()[1].step()],
    "a `GradScaler`": [grad_scaler],
    "the model is moved or cast after `prepare`": [
        lambda: prepared()[0].double()(ONES),
        lambda: prepared()[0].half()(ONES),
    ],
    "`nn.DataParallel` over several devices": [
        lambda: prepared()[0]._replicate_for_data_parallel()
    ],
    "a copy of the model, made while its `forward` runs": [
        lambda: call(lambda self, y: copy.deepcopy(self).layer(y))
    ],
    "a loss that uses an inner tensor which is neither an output nor an attribute": [kept_outside],
    "a tensor that needs gradients and is used in `forward` without being an input": [
        enters_past_the_inputs
    ],
    "a checkpoint function of its own around code that reads parameters itself": [
        recomputed_by_itself
    ],
    "tensors in an object that `copy.copy` cannot copy": [
        lambda: call(lambda self, y: Uncopied(y)),
        lambda: call(lambda self, y, other: y, ONES, Uncopied(ONES)),
    ],
    "`torch.func` over weights": [of_weights],
    "an operation that torch does not support in 16 bits (an FFT)": [
        lambda: call(lambda self, y: torch.fft.rfft(y), mode=BF16)
    ],
    "an operation that CUDA does not support in 16 bits (a matrix inverse)": [
        lambda: call(lambda self, y: torch.linalg.inv(y), torch.eye(4))
    ],
    "a second derivative through FP8 products": [second_derivative],
    "no operation of the network runs in the mode": [no_products],
    "a closure in a mode without master weights (`bf16_stochastic`)": [
        lambda: closures("bf16_stochastic")
    ],
    "a closure with infinite gradients at a constant scale": [
        lambda: closures(FP16, scaler=StaticLossScale(8.0))
    ],
    "loaded optimizer state that was saved in another 8-bit format": [in_other_8_bits],
    "`torch.export` of 16-bit weights": [
        lambda: torch.export.export(prepared("fp16_naive")[0].eval(), (ONES,))
    ],
    "`mprun.state_of` for an optimizer that mprun did not prepare": [
        lambda: mprun.state_of(sgd(linear()))
    ],
    "`mprun.switch` to or from a mode without FP32 master weights": [
        lambda: mprun.switch(prepared("bf16_stochastic")[0], "fp32"),
        lambda: mprun.switch(prepared("fp32")[0], "fp16_naive"),
    ],
}


def quoted(title, head, name):
    """The words that the page quotes of a line, at least some."""
    parts = re.findall(r"`([^`]+)`", rows(title, head)[name])
    assert parts
    return parts


REFUSALS = [("given to `prepare`", TO_PREPARE), ("in the loop", IN_THE_LOOP)]


@pytest.mark.few(17)
@pytest.mark.parametrize(
    ("head", "name"), [(head, name) for head, table in REFUSALS for name in table]
)
def test_what_the_page_calls_refused_is_refused_in_the_line_that_it_quotes(head, name):
    parts = quoted("What is refused", head, name)
    for act in dict(REFUSALS)[head][name]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises((ValueError, RuntimeError)) as caught:
                act()
        said = str(caught.value)
        assert "\n" not in said and all(part in said for part in parts), said


# What is said


def betas():
    step(*prepared("bf16_naive", make=lambda m: torch.optim.AdamW(m.parameters())))


def spread(*numbers):
    return torch.tensor(numbers).view(-1, 1).expand(-1, 4).contiguous()


def compiled():
    """Compile a model that makes FP32 in `forward`; its first three calls are not compiled."""
    model, _ = prepared(BF16, Calls(lambda self, y: self.layer(torch.zeros(2, 4)) + y), native=True)
    model = torch.compile(model, backend="eager")
    for _ in range(4):
        model(ONES)


SAID = {
    "mixes FP32 with 16 bits in `forward`": lambda: call(
        lambda self, y: self.layer(torch.zeros(2, 4)) + y
    ),
    "passes whole numbers as floats that 16 bits cannot represent": lambda: prepared()[0](
        spread(4097.0, 4099.0)
    ),
    "passes numbers that become infinite": lambda: prepared()[0](spread(1e5, 1e6)),
    "stores averages that cannot decay in 16 bits (`betas` of 0.999 in BF16)": betas,
    "has overrides that leave no module in the mode": lambda: step(
        *prepared(overrides={"*": "fp32"})
    ),
    "compiles a model whose `forward` mixes FP32 with 16 bits, hooks a tensor or changes "
    "weights": compiled,
}


@pytest.mark.parametrize("name", SAID)
def test_what_the_page_calls_said_is_said_in_the_line_that_it_quotes(name):
    parts = quoted("What is said", "the script", name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        SAID[name]()
    lines = [str(one.message) for one in caught]
    assert any(all(part in line for part in parts) for line in lines), lines


@pytest.mark.parametrize(
    ("title", "head", "cases"),
    [
        *(("What is refused", head, table) for head, table in REFUSALS),
        ("What is said", "the script", SAID),
    ],
)
def test_each_row_has_a_case_and_each_case_a_row(title, head, cases):
    assert {*rows(title, head)} == {*cases}
