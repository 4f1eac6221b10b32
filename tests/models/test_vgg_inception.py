"""VGG, the Inception networks, pre-activation ResNet: against torchvision, papers and by hand."""

import pytest
import torch
import torchvision
from torch import nn
from torch.nn import functional as F

from mprun.models.classifiers import VGG16, PreActivationResNet50
from mprun.models.inception import googlenet, inception_v2, inception_v3

INCEPTION = {"googlenet": googlenet, "inception_v2": inception_v2, "inception_v3": inception_v3}


def shapes(state):
    return [tuple(tensor.shape) for tensor in state.values()]


def torchvision_s_inception_v3(**arguments):
    return torchvision.models.inception_v3(weights=None, init_weights=False, **arguments)


def test_vgg_has_torchvision_s_names_and_shapes():
    with torch.device("meta"):
        ours, theirs = VGG16().state_dict(), torchvision.models.vgg16(weights=None).state_dict()
    assert list(ours) == list(theirs) and shapes(ours) == shapes(theirs)


@pytest.mark.slow
def test_vgg_starts_and_computes_as_torchvision_s():
    theirs = torchvision.models.vgg16(weights=None).eval()
    torch.manual_seed(0)
    ours = VGG16().eval()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)
    images = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        assert torch.equal(ours(images), theirs(images))


@pytest.mark.slow
def test_inception_v3_computes_as_torchvision_s():
    with torch.device("meta"):  # neither needs a start of its own
        theirs = torchvision_s_inception_v3(aux_logits=False, num_classes=7).eval()
        ours = inception_v3(num_classes=7, aux_weight=0.0).eval()
    theirs = theirs.to_empty(device="cpu")
    state = {
        # Variances around 1, and weights that keep what they multiply in bounds.
        name: tensor.uniform_(0.5, 1.5) if tensor.dim() < 2 else tensor.uniform_(-0.05, 0.05)
        for name, tensor in theirs.state_dict().items()
        if tensor.is_floating_point()
    }
    own = {name: tensor for name, tensor in ours.state_dict().items() if tensor.is_floating_point()}
    assert shapes(own) == shapes(state)
    own = dict(zip(own, state.values(), strict=True))
    ours.load_state_dict(own, strict=False, assign=True)
    images = torch.randn(1, 3, 75, 75)
    with torch.no_grad():
        assert torch.equal(ours(images), theirs(images))


@pytest.mark.slow
def test_inception_v3_s_auxiliary_head_computes_as_torchvision_s():
    theirs, ours = torchvision_s_inception_v3(dropout=0.0), inception_v3(dropout=0.0)
    # Ours has the auxiliary head behind the trunk.
    state = theirs.state_dict()
    last = {name: state.pop(name) for name in ("fc.weight", "fc.bias")}
    head = {name: state.pop(name) for name in list(state) if name.startswith("AuxLogits")}
    state |= head | last
    assert shapes(ours.state_dict()) == shapes(state)
    ours.load_state_dict(dict(zip(ours.state_dict(), state.values(), strict=True)))
    images = torch.randn(2, 3, 299, 299)
    with torch.no_grad():
        logits, auxiliary = ours(images)
        expected = theirs(images)
    assert torch.equal(logits, expected.logits)
    assert torch.equal(auxiliary, expected.aux_logits)


# Channels and side behind each block, from the tables of arXiv 1409.4842, 1502.03167, 1512.00567.
V1 = [(256, 28), (480, 28), *[(512, 14)] * 3, (528, 14), (832, 14), (832, 7), (1024, 7)]
V2 = [(256, 28), (320, 28), *[(576, 14)] * 5, (1024, 7), (1024, 7), (1024, 7)]
V3 = [(256, 35), (288, 35), (288, 35), *[(768, 17)] * 5, (1280, 8), (2048, 8), (2048, 8)]
MAPS = [*zip(INCEPTION, (224, 224, 299), (V1, V2, V3), strict=True)]


@pytest.mark.parametrize(("name", "size", "expected"), MAPS, ids=INCEPTION)
@pytest.mark.few(1)
def test_maps_are_the_published_ones(name, size, expected):
    found = []
    with torch.device("meta"):
        network, maps = INCEPTION[name](), torch.empty(2, 3, size, size)
        for layer, module in network.trunk.items():
            maps = module(maps)
            if layer.startswith("inception"):
                found.append((maps.shape[1], maps.shape[-1]))
    assert found == expected


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "least"), [*zip(INCEPTION, (32, 32, 75), strict=True)])
def test_any_size_from_the_least_on(name, least):
    with torch.device("meta"):
        network = INCEPTION[name](num_classes=10, width=1 / 16)
        for size in (least, least + 1, least + 15, least + 64):
            outputs = network(torch.empty(2, 3, size, size))
            for logits in outputs if isinstance(outputs, tuple) else (outputs,):
                assert logits.shape == (2, 10)


@pytest.mark.parametrize(
    ("build", "size", "outputs"),
    [(googlenet, 32, 3), (inception_v2, 32, 1), (inception_v3, 75, 2), (VGG16, 32, 1)]
    + [(PreActivationResNet50, 32, 1)],
)
@pytest.mark.few(2)
def test_one_pass_reaches_every_parameter(build, size, outputs):
    network = build(num_classes=10, width=1 / 8)
    images, labels = torch.randn(8, 3, size, size), torch.arange(8)
    made = network(images)
    every = made if isinstance(made, tuple) else (made,)
    assert len(every) == outputs
    sum(F.cross_entropy(logits, labels) for logits in every).backward()
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name
    assert isinstance(network.eval()(images), torch.Tensor)


def test_googlenet_starts_as_caffe_does():
    network = googlenet(width=0.25)
    ends = [network.classifier[-1], *(head.layers[-1] for head in network.heads.values())]
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            # Caffe's xavier: uniform up to sqrt(3 / inputs), variance 1 / inputs.
            inputs = layer.weight[0].numel()
            assert layer.weight.abs().max() <= (3 / inputs) ** 0.5
            # The square of such a value has a standard deviation of sqrt(4/5) / inputs.
            error = 5 * (0.8 / layer.weight.numel()) ** 0.5
            assert abs(layer.weight.square().mean().item() * inputs - 1) < error
            assert (layer.bias == (0.0 if layer in ends else 0.2)).all()


def test_the_first_block_is_active_already_and_a_stage_activates_before_its_shortcut():
    """By the formulas of arXiv 1603.05027, on weights of one step of the network."""
    network = PreActivationResNet50(num_classes=10, width=1 / 16)
    state = dict(network.named_parameters())

    def active(maps, name):
        weight, bias = state[f"{name}.weight"], state[f"{name}.bias"]
        return F.relu(F.batch_norm(maps, None, None, weight, bias, training=True))

    def residual(maps, name, stride):
        maps = F.conv2d(maps, state[f"{name}.0.weight"])
        maps = F.conv2d(active(maps, f"{name}.1"), state[f"{name}.3.weight"], None, stride, 1)
        return F.conv2d(active(maps, f"{name}.4"), state[f"{name}.6.weight"])

    images = torch.randn(4, 3, 32, 32)
    maps = F.conv2d(images, state["stem.0.weight"], None, 2, 3)
    maps = F.max_pool2d(active(maps, "stem.1"), 3, 2, 1)
    for number, blocks in enumerate((3, 4, 6, 3)):
        for block in range(blocks):
            name, stride = f"stages.{number}.{block}", 2 if number and not block else 1
            first = number == block == 0
            activated = maps if first else active(maps, f"{name}.activation.0")
            if block == 0:
                maps = F.conv2d(activated, state[f"{name}.shortcut.weight"], None, stride)
            maps = maps + residual(activated, f"{name}.residual", stride)
    means = active(maps, "head.0").mean((2, 3))
    expected = F.linear(means, state["head.4.weight"], state["head.4.bias"])
    # The same operations but for the last mean, in FP32.
    torch.testing.assert_close(network(images), expected, rtol=1e-4, atol=1e-5)
