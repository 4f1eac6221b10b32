"""The audit counts what a model computes, by hand counts, and refuses what contradicts its mode."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mprun.precision import ForwardContext, get_policy, ieee_fp32, pin_math_flags
from mprun.precision.audit import Audit, Contradiction, combined, is_due, next_due

from ..helpers import mixed, network, raises_line
from ..shipped import MODES

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
ON_A_CPU = [mode for mode in MODES if get_policy(mode).fp32_math == "ieee"]


class Half(nn.Module):
    """A linear layer that computes in `dtype` whatever it is told."""

    def __init__(self, dtype):
        super().__init__()
        self.layer, self.dtype = nn.Linear(4, 4), dtype

    def forward(self, x):
        with torch.autocast("cpu", dtype=self.dtype):
            return self.layer(x)


def stepped(model, mode, inputs, **overrides):
    """The audit of one step of `model` in `mode`: as a run of mprun watches it."""
    learner = mixed(model, mode, overrides=overrides)
    audit = Audit(learner.prepared.forward_context, learner.named)
    with audit.watching(step=True), learner.prepared.forward_context:  # as a task's step then is
        learner.network(inputs).square().sum().backward()
    audit.written |= learner.prepared.audit.written  # by what a call held in place of a weight
    return audit


@pytest.mark.parametrize("mode", [m for m in ON_A_CPU if get_policy(m).matmul is None])
def test_products_of_two_layers_are_those_counted_by_hand(mode):
    """Forward one product a layer; backward two, but one of the first, whose input needs none."""
    audit = stepped(network(), mode, torch.randn(5, 6))
    dtype = get_policy(mode).half_dtype or F32
    assert audit.products == {("forward", dtype): 2, ("backward", dtype): 3}
    assert (audit.watched, audit.written) == (1, set())
    audit.check_happened()


def test_fp8_counts_by_the_format_of_the_left_operand():
    """The output layer of two stays in BF16; the weight's gradient is e5m2 times e4m3."""
    audit = stepped(network(16, 16, 16), "fp8_tensorwise", torch.randn(16, 16))
    hand = {("forward", "e4m3"): 1, ("forward", BF16): 1}
    hand |= {("backward", "e5m2"): 1, ("backward", BF16): 2}
    assert audit.products == hand
    audit.check_happened()
    assert audit.what_stays() == (  # two of five products of one size
        "fp8_tensorwise casts 40 % of the multiply-adds; others: matrix products in bf16 60 %"
    )
    assert audit.what_stays() is None  # said once


class Parts(nn.Module):
    """A convolution, attention, a recurrent layer and two linear layers on [4, 16, 16]."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
        self.mix, self.lstm = nn.Conv1d(16, 16, 1, bias=False), nn.LSTM(16, 16)

    def forward(self, x):
        x = F.scaled_dot_product_attention(*[self.first(x).unsqueeze(1)] * 3).squeeze(1)
        return self.second(self.lstm(self.mix(x))[0])


def test_what_stays_is_told_by_kind():
    """Each product of a matrix and of attention has 4 * 16^3 multiply-adds; the input needs no
    gradient, attention's backward pass computes the scores again."""
    audit = stepped(Parts(), "fp8_rowwise", torch.randn(4, 16, 16))
    # first 2, second 3, mix 3, attention 2 + 5: of 15 the first 5 are cast.
    assert audit.what_stays() == (
        "fp8_rowwise casts 33 % of the multiply-adds outside of recurrent layers; others: "
        "attention in bf16 47 %, convolutions in bf16 20 %"
    )
    deep = nn.Sequential(*(nn.Linear(16, 16) for _ in range(20)))
    assert stepped(deep, "fp8_rowwise", torch.randn(16, 16)).what_stays() is None  # 56 of 59
    assert stepped(network(), "bf16_master", torch.randn(16, 6)).what_stays() is None


def test_a_layer_that_an_override_keeps_in_fp32_counts_there():
    audit = stepped(network(), "fp16_master", torch.randn(5, 6), **{"2": F32})
    hand = {("forward", F16): 1, ("forward", F32): 1, ("backward", F16): 1, ("backward", F32): 2}
    assert audit.products == hand


def test_a_recurrent_layer_that_is_emulated_whole_counts_once_each_way():
    class Sequence(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.LSTM(4, 4)

        def forward(self, x):
            return self.layer(x)[0]

    audit = stepped(Sequence(), "fp16_master", torch.randn(3, 2, 4))
    assert audit.products == {("forward", F16): 1, ("backward", F16): 1}
    audit.check_happened()


@pytest.mark.parametrize(
    ("mode", "inside"),
    [("fp32", BF16), ("fp32", F16), ("amp", BF16), ("fp16_naive", BF16), ("amp_bf16", F16)],
)
def test_another_dtype_inside_of_the_model_is_refused(mode, inside):
    model = nn.Sequential(nn.Linear(4, 4), Half(inside))
    says = f" computes in {'fp16' if inside is F16 else 'bf16'}, must compute in "
    with raises_line(Contradiction, f"precision={mode}: ", says):
        stepped(model, mode, torch.randn(2, 4))


def test_decoded_numbers_of_a_product_of_casts_may_be_of_another_dtype():
    """A GPU multiplies those of an FP16 mode in BF16."""
    policy = dataclasses.replace(get_policy("fp16_master"), matmul=get_policy("nvfp4").matmul)
    audit = Audit(ForwardContext(policy, torch.device("cpu")))
    x, one = torch.ones(16, 16, device="meta", dtype=torch.bfloat16), torch.ones((), device="meta")
    form = torch.float16, True, 0, 36.0, "e2m1 x e2m1", torch.bfloat16
    with audit.watching():
        torch.ops.mprun.scaled_mm(x, x, one, one, one, one, *form)
    assert audit.products == {("forward", "e2m1"): 1}


@pytest.mark.parametrize("mode", [m for m in ON_A_CPU if get_policy(m).matmul is not None])
def test_formats_that_no_product_ran_in_are_named(mode):
    formats = " ".join(f"emulated-{own.name}" for own in get_policy(mode).matmul.formats)
    assert ForwardContext(get_policy(mode), CPU).missing() == formats


def test_a_contradiction_in_the_backward_pass_is_refused():
    class Back(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return (gradient.bfloat16() @ torch.eye(4, dtype=BF16)).float()

    class Model(nn.Linear):
        def forward(self, x):
            return Back.apply(super().forward(x))

    with raises_line(Contradiction, "precision=fp32: mm inside the model computes in bf16"):
        stepped(Model(4, 4), "fp32", torch.randn(2, 4))


def test_fp32_inside_of_a_mode_is_counted_and_allowed():
    class Wide(nn.Linear):
        def forward(self, x):
            return F.linear(x.float(), self.weight.float()).to(x.dtype)

    model = nn.Sequential(nn.Linear(4, 4), Wide(4, 4))
    audit = stepped(model, "fp16_master", torch.randn(2, 4))
    assert audit.products["forward", F32] == audit.products["forward", F16] == 1
    audit.check_happened()


@pytest.mark.parametrize("mode", ["fp32", "tf32", "fp16_master"])
def test_tensor_float_32_that_is_switched_later_is_refused_on_a_gpu(mode):
    """By the switches alone, which are there without a GPU too."""
    policy = get_policy(mode)
    wanted = policy.fp32_math
    other = {"ieee": "tf32", "tf32": "ieee"}[wanted]
    pin_math_flags(wanted)
    try:
        audit, of_cpu = (Audit(ForwardContext(policy, own, native=True)) for own in (CUDA, CPU))
        with audit.watching(step=True):
            pass
        torch.backends.cudnn.conv.fp32_precision = other
        with raises_line(Contradiction, "cudnn.conv.fp32_precision", f"must stay {wanted!r}"):
            with audit.watching(step=True):
                pytest.fail("the step was taken")
        with of_cpu.watching(step=True):  # which does not read them
            pass
        assert (audit.watched, of_cpu.watched) == (1, 1)
    finally:
        pin_math_flags("ieee")


def test_products_in_fp32_are_called_tf32_where_the_mode_says_so():
    pin_math_flags("tf32")
    try:
        forward_context = ForwardContext(get_policy("tf32"), CUDA)
        audit = Audit(forward_context)
        with audit.watching(step=True), forward_context:
            torch.eye(2) @ torch.eye(2)  # on a CPU: of what is counted the dtype alone matters
    finally:
        pin_math_flags("ieee")
    assert audit.result()["products"] == {"forward tf32": 1}


def test_a_model_that_writes_its_own_parameters_is_told():
    class Writes(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                self.bias.add_(1)
            return super().forward(x)

    assert stepped(Writes(4, 4), "fp16_master", torch.randn(2, 4)).written == {"bias"}


def test_evaluation_is_not_watched():
    forward_context = ForwardContext(get_policy("fp32"), CPU)
    audit = Audit(forward_context)
    with audit.watching(step=True), forward_context, ieee_fp32():
        torch.eye(2) @ torch.eye(2)
    with forward_context:
        torch.eye(2) @ torch.eye(2)
    assert audit.products == {("forward", F32): 1}


def test_a_mode_that_did_not_happen_is_refused():
    class Nothing(nn.Linear):
        def forward(self, x):
            return x * self.weight[0]

    audit = stepped(Nothing(4, 4), "fp16_master", torch.randn(2, 4))
    with raises_line(Contradiction, "no operation of the network ran in emulated-fp16"):
        audit.check_happened()


def test_a_mode_is_asked_for_where_nothing_is_emulated_too():
    """On CUDA, and a CPU's own kernels: no count of the emulation tells."""
    forward_context = ForwardContext(get_policy("amp_bf16"), CPU, native=True)
    audit, model = Audit(forward_context), nn.Linear(4, 4)
    with audit.watching(step=True), forward_context:
        model(torch.randn(2, 4))  # without the autocast of the mode
    with raises_line(Contradiction, "no operation of the network ran in native-bf16"):
        audit.check_happened()
    with audit.watching(step=True), forward_context, forward_context.autocast():
        model(torch.randn(2, 4))
    audit.check_happened()


def test_an_arithmetic_within_itself_is_watched_once():
    forward_context = ForwardContext(get_policy("fp16_master"), CPU)
    audit, model = Audit(forward_context), nn.Linear(4, 4).half()
    with audit.watching(step=True), forward_context:
        with forward_context:
            model(torch.randn(2, 4).half())
        model(torch.randn(2, 4).half())
    assert audit.result()["products"] == {"forward fp16": 2}


def test_nothing_is_said_of_what_nobody_watched_to_its_end():
    audit = Audit(ForwardContext(get_policy("fp16_master"), CPU))
    audit.check_happened()
    with pytest.raises(KeyboardInterrupt), audit.watching(step=True):
        raise KeyboardInterrupt
    audit.check_happened()
    assert audit.watched == 0 and audit.forward_context.watchers == []


def test_the_first_three_and_one_in_a_thousand():
    due = [number for number in range(3500) if is_due(number)]
    assert due == [0, 1, 2, 1000, 2000, 3000]
    assert [next_due(number) for number in due] == [*due[1:], 4000]
    assert next_due(2500) == 3000


def test_attempts_add_up():
    one = {"watched": 3, "products": {"forward fp16": 6}, "left_the_model": ["a"]}
    one |= {"rounded_in_a_call": ["lstm: lstm"]}
    one |= {"written_in_a_call": [], "optimizers": ["SGD"], "not_watched": "compiled steps"}
    other = {"watched": 2, "products": {"backward fp32": 1, "forward fp16": 4}}
    other |= {"left_the_model": ["b", "a"], "written_in_a_call": [], "optimizers": ["SGD"]}
    assert combined([one, other]) == {
        "watched": 5,
        "products": {"backward fp32": 1, "forward fp16": 10},
        "left_the_model": ["a", "b"],
        "written_in_a_call": [],
        "rounded_in_a_call": ["lstm: lstm"],
        "destroyed_by_a_cast": [],
        "optimizers": ["SGD"],
        "not_watched": "compiled steps",
    }
    assert combined([{}])["watched"] == 0  # of a record that a stranger wrote
