"""Weights, biases and norm layers apart: the same bits as hand-made groups of a torch optimizer."""

import pytest
import torch
from torch import nn

from mprun.assembly.precision import (
    Rates,
    norm_parameter_names,
    optimizer_maker,
    parameter_groups,
)
from mprun.config.schema import OptimConfig
from mprun.precision import StaticLossScale, get_policy
from mprun.precision.torch_update import TensorFlowRMSprop

from .. import helpers
from ..helpers import assert_same_bits, one_step, without_waiting
from .rules import CONFIGURED

CPU = torch.device("cpu")
SCALE = 2.0**7
# Four groups at most: weights, biases, norm layers; here all three differ.
CAFFE = {"bias_lr_factor": 2.0, "decay_bias": False, "decay_norm": False}
# RMSprop has no fused kernel, and TensorFlow's form a single implementation.
FORMS = [
    *((kind, how) for kind in ("sgd", "adam", "adagrad") for how in ("fused", "foreach", "loop")),
    *(("rmsprop", how) for how in ("foreach", "loop")),
    ("rmsprop_tensorflow", "loop"),
]


def network() -> nn.Sequential:
    return helpers.network(hidden=8, norm=nn.BatchNorm1d)


def optim(name="sgd", **further) -> OptimConfig:
    return OptimConfig(name, lr=0.05, weight_decay=0.01, **CONFIGURED[name], **further)


def mixed(config, mode, scale=None):
    """The learner of a new network in a mode, its optimizer as configured."""
    model = network()
    return helpers.mixed(model, mode, optimizer_maker(config, get_policy(mode), CPU, model), scale)


def inputs(step: int) -> torch.Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(step))


def take_step(learner, step, factor=1.0):
    return one_step(learner, inputs(step), lambda y: y.square().mean() * factor)


def by_hand(kind, tensors, implementation=None):
    """torch's optimizer of tensors by name, with the three groups that CAFFE describes."""
    names = ("0.weight", "3.weight"), ("0.bias", "3.bias"), ("1.weight", "1.bias")
    weights, biases, norms = ({"params": [tensors[name] for name in own]} for own in names)
    groups = [weights, biases | {"lr": 0.1, "weight_decay": 0.0}, norms | {"weight_decay": 0.0}]
    implementation = implementation or dict(reversed(FORMS))[kind]  # what "auto" takes
    how = {name: implementation == name for name in ("fused", "foreach")}
    of_torch = {"sgd": {"momentum": 0.9}, "adam": {}, "adagrad": {"initial_accumulator_value": 1.0}}
    further = of_torch.get(kind, CONFIGURED[kind])
    if kind.startswith("rmsprop"):
        how = {"foreach": how["foreach"]} if kind == "rmsprop" else {}
    made = {
        "sgd": torch.optim.SGD,
        "adam": torch.optim.Adam,
        "adagrad": torch.optim.Adagrad,
        "rmsprop": torch.optim.RMSprop,
        "rmsprop_tensorflow": TensorFlowRMSprop,
    }
    return made[kind](groups, lr=0.05, weight_decay=0.01, **further, **how)


def test_names_of_norm_layers_and_biases():
    model = nn.ModuleDict(
        {
            "lstm": nn.LSTM(2, 2),
            "norm": nn.LayerNorm(2),
            "block": nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), nn.GroupNorm(1, 2)),
            "attention": nn.MultiheadAttention(2, 1),
            "plain": nn.BatchNorm1d(2, affine=False),
        }
    )
    norms = {"norm.weight", "norm.bias"}
    norms |= {f"block.{i}.{name}" for i in (1, 2) for name in ("weight", "bias")}
    assert norm_parameter_names(model) == norms
    assert norm_parameter_names(nn.BatchNorm1d(3)) == {"weight", "bias"}
    names = {id(p): name for name, p in model.named_parameters()}
    rates = Rates(lr=1.0, weight_decay=0.5, bias_lr_factor=3.0)
    groups = parameter_groups(model.named_parameters(), rates, norms)
    found = [(g["lr"], g["weight_decay"], g["lr_factor"]) for g in groups]
    assert found == [(1.0, 0.5, 1.0), (3.0, 0.5, 3.0)]
    biases = {"lstm.bias_ih_l0", "lstm.bias_hh_l0", "block.0.bias"}
    biases |= {"attention.in_proj_bias", "attention.out_proj.bias"}
    assert {names[id(p)] for p in groups[1]["params"]} == biases


@pytest.mark.parametrize(
    ("weight_decay", "choice"), [(0.01, {}), (0.0, {"decay_bias": False, "decay_norm": False})]
)
def test_one_group_in_the_order_of_the_model_where_nothing_differs(weight_decay, choice):
    model = network()
    named = list(model.named_parameters())
    rates = Rates(lr=0.1, weight_decay=weight_decay, **choice)
    (group,) = parameter_groups(named, rates, norm_parameter_names(model))
    assert all(a is b for a, (_, b) in zip(group.pop("params"), named, strict=True))
    assert group == {"lr": 0.1, "weight_decay": weight_decay, "lr_factor": 1.0}


@pytest.mark.parametrize(("kind", "implementation"), FORMS)
def test_fp32_equals_hand_made_groups(kind, implementation):
    learner = mixed(optim(kind, implementation=implementation, **CAFFE), "fp32")
    twin = network()
    theirs = by_hand(kind, dict(twin.named_parameters()), implementation)
    for step in range(4):
        take_step(learner, step)
        theirs.zero_grad()
        twin(inputs(step)).square().mean().backward()
        theirs.step()
    assert_same_bits(learner.model.state_dict(), twin.state_dict())


@pytest.mark.parametrize("kind", CONFIGURED)
def test_fp16_with_master_weights_equals_hand_made_groups_of_masters(kind):
    learner = mixed(optim(kind, **CAFFE), "fp16_master_scaled", StaticLossScale(SCALE))
    twin = network()
    masters = {name: p.detach().clone() for name, p in twin.named_parameters()}
    for layer in (twin[0], twin[3]):
        layer.half()
    theirs = by_hand(kind, masters)
    for step in range(4):
        with torch.no_grad():
            for name, parameter in twin.named_parameters():
                parameter.copy_(masters[name])
        take_step(learner, step)
        twin.zero_grad()
        (twin(inputs(step).half()).float().square().mean() * SCALE).backward()
        for name, parameter in twin.named_parameters():
            masters[name].grad = parameter.grad.float() / SCALE
        theirs.step()
    assert len(learner.optimizer.param_groups) == 3
    assert_same_bits(learner.named, masters)
    assert_same_bits(dict(learner.model.named_buffers()), dict(twin.named_buffers()))


def test_a_rate_is_set_times_the_factor_of_the_group():
    learner = mixed(optim(**CAFFE), "fp32")

    def rates():
        return [group["lr"] for group in learner.optimizer.param_groups]

    assert rates() == [0.05, 0.1, 0.05]  # weights, biases, norm layers
    learner.set_lr(0.01)
    assert rates() == [0.01, 0.02, 0.01]
    # As on CUDA: a rate tensor for each group, and a rate that is a tensor.
    for group in learner.optimizer.param_groups:
        group["lr"] = torch.zeros(())
    held = rates()
    learner.set_lr(torch.tensor(0.3))
    assert [rate.item() for rate in held] == torch.tensor([0.3, 0.6, 0.3]).tolist()
    learner.set_lr(0.5)
    assert all(a is b for a, b in zip(rates(), held, strict=True))
    assert torch.stack(held).tolist() == [0.5, 1.0, 0.5]


GROUPED = ["optim.weight_decay=0.1", "optim.bias_lr_factor=2", "optim.decay_norm=false"]


def test_both_networks_of_a_gan_have_their_groups(build_run):
    built = build_run("model=dcgan", "data.image_size=32", *GROUPED, "data.batch_size=2")
    for learner, norm_layers in (("generator", 3), ("discriminator", 2)):
        groups = built.task.learners[learner].optimizer.param_groups
        # 32 px: four convolutions without bias each; BatchNorm's shift is none either.
        assert [len(group["params"]) for group in groups] == [4, 2 * norm_layers]
        assert [group["weight_decay"] for group in groups] == [0.1, 0.0]


def test_a_schedule_reaches_each_group_with_its_factor(build_run):
    more = ("data.image_size=32", "optim.schedule=linear", "train.steps=10")
    built = build_run("model=conv_autoencoder", *GROUPED, *more)
    skipped = torch.full((), 2, dtype=torch.int64)
    built.rate.apply(5, skipped)  # after two skipped updates: the rate of update 3
    rates = [group["lr"] for group in built.task.learner.optimizer.param_groups]
    assert rates == [built.rate.rates[3], 2 * built.rate.rates[3]]
    assert built.rate.rates[3] == pytest.approx(0.7 * 0.001)


def test_a_rate_that_stays_below_the_configured_one_is_used(build_run):
    """Constant within the run, and yet not optim.lr: two steps into a long warm-up, say."""
    built = build_run("model=conv_autoencoder", "train.steps=1", "optim.warmup_updates=10")
    assert built.rate.constant
    (group,) = built.task.learner.optimizer.param_groups
    assert group["lr"] == built.rate.at(0, 0) == pytest.approx(0.0001)


@pytest.mark.gpu
def test_on_cuda_each_group_has_its_own_rate_tensor_and_nothing_waits(build_run):
    built = build_run(
        "model=conv_autoencoder",
        "optim=sgd_plain",
        "data.image_size=32",
        "data.batch_size=16",
        "precision=amp",
        "scaler.init_scale=1024",
        "optim.schedule=linear",
        "optim.bias_lr_factor=2",
        "train.steps=10",
        device="cuda",
    )
    learner, table = built.task.learner, torch.tensor(built.rate.rates)
    groups = learner.optimizer.param_groups
    assert [group["lr_factor"] for group in groups] == [1.0, 2.0]
    assert [group["lr"].item() for group in groups] == [table[0].item(), 2 * table[0].item()]
    built.task.train_step(0)  # loads kernels
    skipped = torch.full((), 2, dtype=torch.int64, device="cuda")
    before = {name: p.detach().clone() for name, p in learner.named.items()}
    with without_waiting():
        built.rate.apply(5, skipped)
        metrics = built.task.train_step(1)
    assert metrics["found_inf"] == 0
    rates = [group["lr"].item() for group in groups]
    assert rates == [table[3].item(), 2 * table[3].item()]
    # Plain SGD: the way of a parameter is its rate times its gradient, within FP32's rounding of
    # the parameter (half an ulp of values below 1) and of the product.
    for name, parameter in learner.named.items():
        rate = rates[1] if name.endswith("bias") else rates[0]
        expected = before[name].double() - rate * parameter.grad.double()
        assert (parameter.double() - expected).abs().max() <= 2.0**-23, name
