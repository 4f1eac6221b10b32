"""Muon: bit for bit torch's in BF16, against singular values in float64, and in the modes."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from mprun.assembly.precision import hidden_matrices, optimizer_maker
from mprun.config.components import NETWORKS
from mprun.config.schema import OptimConfig
from mprun.errors import BadInput
from mprun.models.dcgan import Discriminator, Generator
from mprun.numerics.probe import UpdateMeter
from mprun.precision import build_policy
from mprun.precision.muon import Muon, orthogonal

from ..helpers import assert_same_bits, configured, mixed, one_step, raises_line
from ..tables import with_extensions

SHAPES = ((24, 40), (40, 24), (32, 32), (64, 1))
ADJUST = ("original", "match_rms_adamw", "spectral_unclamped")
SETTINGS = dict(momentum=0.95, nesterov=True, betas=[0.9, 0.95], eps=1e-8, weight_decay=0.1)
SETTINGS |= dict(newton_schulz_dtype="bf16", adjust_lr="original", adamw_lr_factor=0.5)


def weights_of(shapes, draw):
    return [torch.randn(shape, generator=draw) for shape in shapes]


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust_lr", ADJUST)
def test_in_bf16_every_bit_is_that_of_torch(adjust_lr, nesterov):
    """Matrices beside torch.optim.Muon, the others beside torch.optim.AdamW: 0 differ."""
    draw = torch.Generator().manual_seed(0)
    start = weights_of(SHAPES, draw) + weights_of([(40,), (5, 6, 7)], draw)
    ours, theirs = ([own.clone() for own in start] for _ in range(2))
    groups = [{"params": ours[:4], "matrices": True}, {"params": ours[4:], "lr": 0.003}]
    of_both = {"lr": 0.02, "weight_decay": 0.1, "nesterov": nesterov}
    muon = Muon(groups, adjust_lr=adjust_lr, foreach=True, **of_both)
    try:
        of_torch = torch.optim.Muon(theirs[:4], adjust_lr_fn=adjust_lr, **of_both)
    except ValueError as error:  # of 2.11
        pytest.skip(f"torch {torch.__version__}: {error}")
    adamw = torch.optim.AdamW(theirs[4:], 0.003, (0.9, 0.95), weight_decay=0.1, foreach=True)
    for step in range(5):
        for own, other in zip(ours, theirs, strict=True):
            own.grad = torch.randn(own.shape, generator=draw) * 10.0 ** -(2 * step)
            other.grad = own.grad.clone()
        muon.step()
        of_torch.step()
        adamw.step()
        assert all(map(torch.equal, ours, theirs))
        for own, other in zip(ours[:4], theirs[:4], strict=True):
            buffers = (muon.state[own], of_torch.state[other])
            assert torch.equal(*(state["momentum_buffer"] for state in buffers))


def from_zero(gradient, **how):
    """A matrix of zeros after a step of Muon: what it adds, rounded once for each rate."""
    weight = torch.zeros_like(gradient)
    weight.grad = gradient
    Muon([{"params": [weight], "matrices": True}], **how).step()
    return weight


@pytest.mark.parametrize("shape", SHAPES)
def test_the_rate_of_a_matrix_depends_on_its_shape(shape):
    """Also where torch's own Muon does not know a value."""
    rows, columns = shape
    ratios = {"match_rms_adamw": 0.2 * max(shape) ** 0.5, "spectral_unclamped": rows / columns}
    ratios["spectral_unclamped"] **= 0.5
    ratios["original"] = max(1.0, ratios["spectral_unclamped"])
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    moved = orthogonal(gradient, torch.bfloat16)
    for adjust_lr in ADJUST:
        how = {"lr": 1.0, "momentum": 0.0, "nesterov": False, "adjust_lr": adjust_lr}
        weight = from_zero(gradient, **how)
        expected = -moved.double() * ratios[adjust_lr]
        assert torch.allclose(weight.double(), expected, rtol=2.0**-22, atol=0.0)


def of_singular_values(matrix):
    """Its singular values by five steps of the polynomial, in float64."""
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / matrix.double().norm()
    for _ in range(5):
        s = 3.4445 * s - 4.775 * s**3 + 2.0315 * s**5
    return u @ torch.diag(s) @ v


# A step has a slope of 3.4445 at 0, which carries an error of the first to 3.4445^5 = 485 times it
# at most; the errors are half a unit of each of the three products of a step.
BOUNDS = {torch.float32: 485 * 2.0**-22, torch.float16: 485 * 2.0**-13, torch.bfloat16: 0.5}


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_the_polynomial_of_the_singular_values(shape, dtype):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    found, expected = orthogonal(matrix, dtype), of_singular_values(matrix)
    assert found.dtype is dtype and found.shape == matrix.shape
    assert (found.double() - expected).abs().max().item() < BOUNDS[dtype]


def test_a_wider_dtype_is_nearer():
    matrix = torch.randn(64, 96, generator=torch.Generator().manual_seed(2))
    expected = of_singular_values(matrix)
    fp32, fp16, bf16 = [(orthogonal(matrix, d).double() - expected).norm().item() for d in BOUNDS]
    assert 100 * fp32 < fp16 < bf16 / 3  # 2^13 and 2^3 by their bits


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("size", [2.0**-18, 2.0**18])
def test_the_size_of_a_momentum_does_not_matter(dtype, size):
    """FP16 would flush the small one before its norm is known, and overflow with the large one."""
    matrix = torch.randn(24, 40, generator=torch.Generator().manual_seed(3))
    assert torch.equal(orthogonal(matrix * size, dtype), orthogonal(matrix, dtype))


def test_zero_stays_zero():
    for dtype in BOUNDS:
        assert (orthogonal(torch.zeros(4, 6), dtype) == 0).all()


def test_a_rate_on_the_device_is_the_same_rate():
    gradient = torch.randn(24, 40, generator=torch.Generator().manual_seed(4))
    rates = (0.25, torch.tensor(0.25))
    moved = [from_zero(gradient, lr=rate, weight_decay=0.5) for rate in rates]
    assert torch.equal(*moved) and moved[0].abs().max() > 0.01


def test_a_rate_on_the_device_is_not_rounded_to_the_dtype_of_a_weight():
    """0.1 in BF16 is 0.1 % more; 960 roundings of a weight leave 0.004 % of their mean."""
    gradient = torch.randn(24, 40, generator=torch.Generator().manual_seed(4)).bfloat16()
    found = [from_zero(gradient, lr=torch.tensor(rate)).double().abs().sum() for rate in (0.1, 1.0)]
    assert (found[0] / found[1]).item() == pytest.approx(0.1, rel=3e-4)


def by_muon(lr=0.02):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    matrix, *rest = model.parameters()
    return model, Muon([{"params": [matrix], "matrices": True}, {"params": rest}], lr=lr)


def step_of(model, optimizer):
    inputs = torch.linspace(-1, 1, 16).view(2, 8)

    def closure():
        optimizer.zero_grad()
        loss = model(inputs).square().sum()
        loss.backward()
        return loss

    return optimizer.step(closure)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda own: pickle.loads(pickle.dumps(own))])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_copy_goes_on_bit_for_bit(copied, steps):
    pair = by_muon()
    for _ in range(steps):
        step_of(*pair)
    other, again = copied(pair), by_muon(lr=0.5)
    for mine, saved in zip(again, pair, strict=True):
        mine.load_state_dict(copy.deepcopy(saved.state_dict()))
    for _ in range(2):
        assert step_of(*pair) == step_of(*other) == step_of(*again)
    for mine in zip(other, again, pair, strict=True):
        one, two, three = (own.state_dict() for own in mine)
        assert_same_bits(one, three)
        assert_same_bits(two, three)
    assert step_of(*pair) < step_of(*by_muon())


def test_a_step_is_one_step_to_hooks_and_schedulers():
    model, optimizer = by_muon()
    schedule, seen = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), []
    hook = register_optimizer_step_post_hook(lambda own, *_: seen.append(own))
    for _ in range(3):
        step_of(model, optimizer)
        schedule.step()
    hook.remove()
    assert seen == [optimizer] * 3
    assert [group["lr"] for group in optimizer.param_groups] == [0.02 / 8] * 2


# Network and variant -> arguments, the hidden matrices, the 2-D weights of embeddings and outputs.
_CLASSES, _WORDS = {"num_classes": 10}, {"vocab_size": 9}
_GPT = _WORDS | {"context_length": 4, "num_layers": 1}
_ATTENTION = "blocks.0.attention.inputs blocks.0.attention.output"
HIDDEN = {
    "alexnet": (_CLASSES, "classifier.1 classifier.4", "classifier.6"),
    "alexnet 2012": (_CLASSES, "classifier.0 classifier.3", "classifier.6"),
    "resnet50": (_CLASSES, "", "fc"),
    "resnet50 preactivation": (_CLASSES, "", "head.4"),
    "vgg16": (_CLASSES, "classifier.0 classifier.3", "classifier.6"),
    "googlenet": (
        _CLASSES,
        "heads.inception_4a.layers.2 heads.inception_4d.layers.2",
        "heads.inception_4a.layers.5 heads.inception_4d.layers.5 classifier.3",
    ),
    "inception_v2": (_CLASSES, "", "classifier.3"),
    "inception_v3": (_CLASSES, "", "heads.inception_6e.layers.3 classifier.3"),
    "lstm_lm": (
        _WORDS | {"num_layers": 1, "projection_size": 4},
        "lstm.weight_ih_l0 lstm.weight_hh_l0 lstm.weight_hr_l0",
        "embedding output",
    ),
    "gpt": (_GPT, f"{_ATTENTION} blocks.0.mlp.inputs blocks.0.mlp.output", "embedding positions"),
    # Experts have three dimensions.
    "gpt_moe": (_GPT, f"{_ATTENTION} blocks.0.mlp.router", "embedding positions"),
    "conv_autoencoder": ({"channels": 3}, "", ""),
}
HIDDEN = with_extensions("HIDDEN", HIDDEN)


@pytest.mark.few(7)
@pytest.mark.parametrize("network", HIDDEN)
def test_the_hidden_matrices_of_a_network(network):
    changes, hidden, others = HIDDEN[network]
    name, *variant = network.split()
    changes = changes | ({"variant": variant[0]} if variant else {})
    with torch.device("meta"):
        model = configured(name, **changes)

    def full(names):
        return {own if "weight" in own else f"{own}.weight" for own in names.split()}

    assert hidden_matrices(model) == full(hidden)
    every = {name for name, own in model.named_parameters() if own.dim() == 2}
    assert every - full(hidden) == full(others)


def test_all_networks_are_looked_at():
    """GANs are convolutions alone; the other has the user's layers."""
    assert {*NETWORKS} == {name.split()[0] for name in HIDDEN} | {"dcgan", "custom"}
    for network in (Generator(), Discriminator()):
        assert not hidden_matrices(network)


def test_which_weights_are_hidden_matrices():
    layers = [nn.Embedding(9, 8), nn.Linear(8, 8), nn.Conv2d(1, 1, 3), nn.Linear(8, 9)]
    assert hidden_matrices(nn.Sequential(*layers)) == {"1.weight"}
    assert hidden_matrices(nn.Sequential(*layers, nn.LogSoftmax(-1))) == {"1.weight"}
    layers[3].weight = layers[0].weight  # tied
    assert hidden_matrices(nn.Sequential(*layers)) == {"1.weight"}
    layers[3:] = [nn.LayerNorm((3, 8)), nn.Linear(8, 8), nn.Linear(8, 9)]  # a gain of 3 x 8
    layers[4].requires_grad_(False)
    assert hidden_matrices(nn.Sequential(*layers)) == {"1.weight"}
    layers[1].is_output = True  # and no other one is
    layers[4].requires_grad_(True)
    assert hidden_matrices(nn.Sequential(*layers)) == {"4.weight", "5.weight"}


def maker(policy, model, **changes):
    config = OptimConfig(name="muon", lr=0.02, **(SETTINGS | changes))
    return optimizer_maker(config, policy, torch.device("cpu"), model)


def test_groups_of_a_configuration():
    model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8), nn.Linear(8, 9))
    policy = build_policy("own", {})
    learner = mixed(model, policy, maker(policy, model))
    learner.set_lr(0.04)
    groups = {group["matrices"]: group for group in learner.optimizer.param_groups}
    assert [own is model[1].weight for own in groups[True]["params"]] == [True]
    assert (groups[True]["lr"], groups[False]["lr"]) == (0.04, 0.02)
    assert {len(learner.optimizer.state[own]) for own in groups[False]["params"]} == {3}
    with raises_line(BadInput, "optim.name=muon: the network has no hidden matrix"):
        maker(policy, nn.Sequential(nn.Linear(8, 9)))
    with raises_line(BadInput, "optim.implementation=fused: torch"):
        maker(policy, model, implementation="fused")


def test_its_updates_are_not_measured_by_a_part_of_a_weight():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    in_bf16 = {"param_dtype": "bf16", "master_dtype": None, "grad_dtype": "bf16"}
    policy = build_policy("own", in_bf16)
    learner = mixed(model, policy, maker(policy, model))
    one_step(learner, torch.randn(4, 8))
    meter = UpdateMeter(learner.steps, learner.named)
    one_step(learner, torch.randn(4, 8))
    assert meter.sums() == {}


def test_what_it_does_not_take_is_said():
    with pytest.raises(ValueError, match=r"shape \(3,\) is not a matrix"):
        Muon([{"params": [torch.zeros(3)], "matrices": True}])
    with pytest.raises(ValueError, match="adjust_lr=orginal: must be one of original, match_rms_"):
        Muon([torch.zeros(3)], adjust_lr="orginal")
    with pytest.raises(ValueError, match="newton_schulz_dtype=fp8: must be one of bf16, fp16, fp"):
        Muon([torch.zeros(3)], newton_schulz_dtype="fp8")
    with pytest.raises(ValueError, match="Invalid learning rate: -1"):
        Muon([torch.zeros(3)], lr=-1)
