"""Run as a script by test_fused_norm.py, with TRITON_INTERPRET=1.

Prints one line of JSON: for each check None or in what it failed, and the numbers compared.
"""

import copy
import json
from collections import Counter

import torch
from torch import nn
from torch.nn import functional as F

from mprun.extensions.fused_norm import modules
from mprun.extensions.fused_norm.choice import differences, why_not_on
from mprun.extensions.fused_norm.modules import computed, install, norm_relu, plan
from mprun.precision import cast_model, get_policy
from mprun.precision.casting import CastModel
from tests.helpers import outcomes_of

torch.set_num_threads(1)
CPU, NHWC = torch.device("cpu"), {"memory_format": torch.channels_last}
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
modules.PROGRAMS = 8  # chunks of several tiles without a large matrix
# Several chunks of several tiles, the last ones not full; many channel blocks; one pixel; one
# image; an odd number of channels; one channel; the fewest rows.
SHAPES = {
    "chunks": (30, 24, 7, 7),
    "blocks": (5, 136, 9, 11),
    "one pixel": (3, 70, 1, 1),
    "one image": (1, 33, 20, 13),
    "one channel": (2, 1, 33, 1),
    "two rows": (2, 7, 1, 1),
}
PAIRS = {"fp32": (FP32, FP32), "fp16": (FP16, FP32), "bf16": (BF16, FP32)}
PAIRS |= {"fp16_naive": (FP16, FP16), "bf16_naive": (BF16, BF16)}
compared: Counter[str] = Counter()  # numbers, by shape, dtypes and form
different: Counter[str] = Counter()


def bit_equal(shape, dtypes, form):
    """Every number of forward and backward pass; NaN, infinities and no variance among them."""
    found = differences(SHAPES[shape], form == "sum, relu", *PAIRS[dtypes], CPU, form != "plain")
    label = f"{shape}, {dtypes}, {form}"
    compared[label] = sum(of for _, of in found.values())
    different[label] = sum(apart for apart, _ in found.values())
    assert not different[label], found
    assert {"y", "of_x", "of_weight", "of_bias", "running_mean", "running_var"} <= found.keys()


def the_comparison_notices():
    """A kernel that leaves the residual out, and one with another order of sums."""
    launch = modules._Launches.maps

    def without(self, kernel, *arguments, **more):
        launch(self, kernel, *arguments, **{k: v and k != "SUM" for k, v in more.items()})

    modules._Launches.maps = without
    try:
        found = differences((4, 8, 5, 5), True, FP16, FP32, CPU)
    finally:
        modules._Launches.maps = launch
    assert found["y"][0] > 100 and not found["running_mean"][0], found
    assert why_not_on(CPU, get_policy("amp")) is None
    whole = modules._Launches.sums

    def halved(self, kernel, *arguments, **more):
        self.shape = (self.rows // 2, *self.shape[1:])
        return whole(self, kernel, *arguments, **more)

    modules._Launches.sums = halved
    try:
        why = why_not_on(CPU, get_policy("amp"))
    finally:
        modules._Launches.sums = whole
    assert why is not None and why.startswith("its kernels differ from separate operations"), why


def case(mean, spread, shape=(12, 24, 9, 7)):
    random = torch.Generator().manual_seed(1)
    norm = nn.BatchNorm2d(shape[1])
    norm.weight.data = torch.randn(shape[1], generator=random)
    norm.bias.data = torch.randn(shape[1], generator=random)
    x = torch.randn(shape, generator=random) * spread + mean
    gradient = torch.randn(shape, generator=random)
    return norm, x.contiguous(**NHWC), gradient.contiguous(**NHWC)


def against_float64(mean, spread):
    """Torch's own BatchNorm and ReLU in float64, with autograd.

    A sum of n terms in a tree of depth d is off by at most d * u * sum of magnitudes, u = 2^-24
    (Higham, Accuracy and Stability, section 4.2). `depth` adds the operations on each term. Terms
    of the statistics are deviations from a tile's mean, itself off by u * |mean|.
    """
    norm, x, gradient = case(mean, spread)
    exact = copy.deepcopy(norm).double()
    wide = x.double().requires_grad_()
    z = exact(wide)
    gradient = torch.where(z.abs() < 1e-3 * (1 + abs(mean)), 0, gradient)  # no mask of either kind
    F.relu(z).backward(gradient.double())

    own = x.clone().requires_grad_()
    y = computed(norm, own, None, relu=True)
    y.backward(gradient)
    rows = x.numel() // x.size(1)
    division, u = plan(rows, x.size(1)), 2.0**-24
    assert division.steps > 1 and division.chunks > 1
    depth = division.steps + division.levels + -(-division.chunks // 256) + 8 + 12
    over = (0, 2, 3)
    m, v = wide.detach().mean(over), wide.detach().var(over, correction=0)
    # Twice: the first tile's mean is a sample of at least 24 rows off the mean.
    of_mean = 2 * depth * u * v.sqrt() + 4 * u * m.abs()
    of_var = 4 * depth * u * v + 8 * u * m.abs() * v.sqrt() + (4 * u * m.abs()) ** 2
    momentum = 0.1
    moved = (norm.running_mean - exact.running_mean).abs()
    assert (moved <= momentum * of_mean + 4 * u * (1 + m.abs()) * momentum).all(), moved
    moved = (norm.running_var - exact.running_var).abs()
    assert (moved <= momentum * of_var * rows / (rows - 1) + 4 * u * (1 + v)).all(), moved

    inverse = (v + norm.eps).rsqrt()
    # Of a normalised value: by its mean, its deviation, and two roundings of x - mean and product.
    hat = ((wide.detach() - m[:, None, None]) * inverse[:, None, None]).abs()
    off = (of_mean * inverse)[:, None, None] + hat * (
        of_var / (2 * (v + norm.eps)) + 6 * u
    )[:, None, None]  # fmt: skip
    gain = norm.weight.detach().double().abs()[:, None, None]
    bound = gain * off + 4 * u * (gain * hat + norm.bias.detach().double().abs()[:, None, None])
    assert ((y.double() - F.relu(z)).abs() <= bound).all()
    passed = gradient.double().abs() * (z > 0)
    bias = passed.sum(over)
    assert ((norm.bias.grad - exact.bias.grad).abs() <= depth * u * bias).all()
    weight = (passed * (off + depth * u * hat)).sum(over)
    assert ((norm.weight.grad - exact.weight.grad).abs() <= 2 * weight).all()
    mean_of = (bias / rows, (passed * hat).sum(over) / rows, weight / rows)
    first, second, third = (one[:, None, None] for one in mean_of)
    terms = passed + first * depth + hat * second * depth
    scale = gain * inverse[:, None, None]
    relative = (of_var / (2 * (v + norm.eps)) + 8 * u)[:, None, None]
    bound = scale * (terms * (8 * u + relative) + 2 * off * second + 2 * hat * third)
    assert ((own.grad.double() - wide.grad).abs() <= bound).all()
    assert float((bound / scale).median()) < 1e-2 * float(passed.median() + 1)  # it says something


def large_mean():
    """Where a sum of squares has no digit left: mean 4096, variance 2^-6, FP32."""
    norm, x, _ = case(4096.0, 0.125)
    computed(norm, x, None, relu=False)
    exact = 0.9 + 0.1 * x.double().var((0, 2, 3))
    assert ((norm.running_var - exact).abs() < 1e-5).all()
    squares = x.square().mean((0, 2, 3)) - x.mean((0, 2, 3)).square()
    assert ((squares - x.double().var((0, 2, 3))).abs() > 0.1).any()


class Net(nn.Module):
    """Torchvision's block and stem, and a chain; everything that `install` knows."""

    def __init__(self):
        super().__init__()
        from torchvision.models import ResNet
        from torchvision.models.resnet import BasicBlock, Bottleneck

        self.net = ResNet(Bottleneck, [1, 1, 1, 1])
        # Not to maps of one pixel: either layout of these is right, and a product's path its own.
        self.net.layer3, self.net.layer4, self.net.fc = (nn.Identity() for _ in range(3))
        self.block = BasicBlock(3, 3)
        self.chain = nn.Sequential(
            nn.Conv2d(3, 5, 3, bias=False), nn.BatchNorm2d(5), nn.ReLU(inplace=True)
        )

    def forward(self, x):
        return self.net(x).sum() + self.near(x)

    def near(self, x):
        """Few layers, over which a rounding does not grow."""
        return self.chain(self.block(x)).square().sum()


def made(mode, watched=False, installs=True):
    torch.manual_seed(0)
    net = Net().to(**NHWC)
    # A CPU has no 16-bit kernel that rounds as CUDA's: the convolutions stay in FP32.
    cast = cast_model(net, get_policy(mode))
    if installs:
        install(cast, CPU)
    seen = Counter()
    if watched:
        for name, module in net.named_modules():
            if isinstance(module, nn.BatchNorm2d | nn.ReLU):
                module.register_forward_hook(lambda *_, name=name: seen.update([name]))
    return net, cast, seen


def step(net, x, loss):
    x = x.clone().requires_grad_()
    loss(x).backward()
    gradients = [p.grad for p in net.parameters() if p.grad is not None]
    return [value.detach().clone() for value in (x.grad, *gradients, *net.buffers())]


def with_hooks():
    """Watched modules compute one by one, with the same bits, and see what they saw before."""
    x = torch.randn(2, 3, 32, 32).contiguous(**NHWC)
    (net, _, _), (other, _, seen) = made("fp32"), made("fp32", watched=True)
    calls = Counter()
    norm_calls = modules.computed

    def counted(norm, *arguments, relu):
        calls[relu] += 1
        return norm_calls(norm, *arguments, relu=relu)

    modules.computed = counted
    try:
        found = step(net, x, net)
        assert calls == {True: 1 + 2 * 3 + 2 + 1}, calls
        calls.clear()
        expected = step(other, x, other)
        assert calls == {False: 10}, calls
    finally:
        modules.computed = norm_calls
    assert all(map(torch.equal, found, expected))
    assert seen["chain.1"] == 1 and seen["net.layer1.0.relu"] == 3 and seen["chain.2"] == 1
    assert int(net.chain[1].num_batches_tracked) == 1


def close_to_torch():
    """The modules of torch, whose sums have another order; evaluation is theirs."""
    x = torch.randn(2, 3, 32, 32).contiguous(**NHWC)
    (net, cast, _), (plain, _, _) = made("fp32"), made("fp32", installs=False)
    for one, other in zip(step(net, x, net.near), step(plain, x, plain.near), strict=True):
        scale = float(other.abs().max()) if other.is_floating_point() else 0.0
        torch.testing.assert_close(one, other, rtol=2.0**-10, atol=2.0**-12 * scale)
    plain.load_state_dict(net.state_dict())
    for one in (net, plain):
        one.eval()
    assert torch.equal(net(x), plain(x))
    net.train()
    plain.train()
    with cast.in_fp32() as wide, torch.no_grad():
        assert torch.equal(wide(x), plain(x))
    assert "forward" in vars(net.net.layer1[0])
    twin = copy.deepcopy(net)
    with torch.no_grad():
        twin.chain[1].weight.zero_()
    assert not torch.equal(twin.chain(x), net.chain(x))


def falls_back():
    """Maps in NCHW, of other dtypes, of other dimensions, with one row: torch's modules."""
    norm, relu = nn.BatchNorm2d(6), nn.ReLU()
    cast = CastModel(nn.Sequential(norm, relu), get_policy("fp32"), {})
    install(cast, CPU)
    x = torch.randn(2, 6, 5, 5)
    before = modules.computed
    modules.computed = None
    try:
        plain = F.batch_norm(x, None, None, norm.weight, norm.bias, True)
        assert torch.equal(cast.module(x), F.relu(plain))
        for of in (x.contiguous(**NHWC), x.double().contiguous(**NHWC)):
            norm_relu(nn.BatchNorm2d(6).to(of), relu, "cuda", of)
        norm_relu(nn.BatchNorm2d(6), relu, "cpu", x.contiguous(**NHWC), x)
        try:
            cast.module(torch.randn(1, 6, 1, 1))
        except ValueError as error:
            assert "more than 1 value per channel" in str(error)
        else:
            raise AssertionError("torch refuses one value a channel")
    finally:
        modules.computed = before


FORMS = ("relu", "sum, relu", "plain")
CHECKS = {
    f"{shape}, {dtypes}, {form}": (bit_equal, shape, dtypes, form)
    for shape in SHAPES
    for dtypes in PAIRS
    for form in FORMS
    if form != "plain" or shape == "chunks"
}
CHECKS |= {
    "the comparison notices": (the_comparison_notices,),
    "float64": (against_float64, 0.0, 1.0),
    "float64, a mean": (against_float64, 3.0, 0.5),
    "a large mean": (large_mean,),
    "with hooks": (with_hooks,),
    "close to torch": (close_to_torch,),
    "falls back": (falls_back,),
}

if __name__ == "__main__":
    outcomes = outcomes_of(CHECKS)
    print(json.dumps({"outcomes": outcomes, "compared": compared, "different": different}))
