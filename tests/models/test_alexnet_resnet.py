"""AlexNet in both forms and ResNet-50: shapes, initialisation, one pass, refusals."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mprun.models.classifiers import AlexNet2012, alexnet, resnet50

from .learning import assert_learns


@pytest.mark.parametrize(("build", "size"), [(alexnet, 64), (AlexNet2012, 224), (resnet50, 32)])
@pytest.mark.slow
def test_one_pass_reaches_every_parameter(build, size):
    model = build(num_classes=10)
    logits = model(torch.randn(2, 3, size, size))
    assert logits.shape == (2, 10)
    F.cross_entropy(logits, torch.tensor([1, 2])).backward()
    assert_learns(model)


@pytest.fixture(scope="module")
def alexnet2012():
    return AlexNet2012(num_classes=1000, dropout=0.0)


def test_alexnet2012_has_the_published_map_sizes():
    with torch.device("meta"):
        model, images = AlexNet2012(), torch.empty(1, 3, 227, 227)
    sizes = []
    for layer in model.features:
        images = layer(images)
        if isinstance(layer, (nn.Conv2d, nn.MaxPool2d)):
            sizes.append(tuple(images.shape[1:]))
    assert all(height == width for _, height, width in sizes)
    assert [(channels, side) for channels, side, _ in sizes] == [
        *((96, 55), (96, 27), (256, 27), (256, 13)),
        *((384, 13), (384, 13), (256, 13), (256, 6)),
    ]


@pytest.mark.slow
def test_alexnet2012_starts_as_caffe_does(alexnet2012):
    layers = [m for m in alexnet2012.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    deviations = [0.01, 0.01, 0.01, 0.01, 0.01, 0.005, 0.005, 0.01]
    biases = [0.0, 0.1, 0.0, 0.1, 0.1, 0.1, 0.1, 0.0]
    for layer, std, bias in zip(layers, deviations, biases, strict=True):
        n = layer.weight.numel()
        # Five standard errors of a mean and of a standard deviation of n normal samples.
        assert abs(layer.weight.mean().item()) < 5 * std / n**0.5
        assert abs(layer.weight.std().item() - std) < 5 * std / (2 * n) ** 0.5
        assert torch.equal(layer.bias, torch.full_like(layer.bias, bias))


@pytest.mark.slow
def test_alexnet2012_groups_do_not_mix(alexnet2012):
    second = alexnet2012.features[4]
    x = torch.zeros(1, 96, 7, 7)
    x[:, :48] = 1.0
    y = second(x) - second.bias[:, None, None]
    assert y[:, :128].abs().max() > 0
    # 0.1 - 0.1 is exact: the second tower sees zeros only.
    assert y[:, 128:].abs().max() == 0


@pytest.mark.slow
def test_alexnet2012_dropout_is_off_in_evaluation():
    model = AlexNet2012(num_classes=3, dropout=0.5)
    x = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        assert not torch.equal(model(x), model(x))
        model.eval()
        assert torch.equal(model(x), model(x))


def test_alexnet2012_of_another_size_and_width():
    with torch.device("meta"):
        model = AlexNet2012(num_classes=10, width=0.1)
        for size in (63, 64, 100, 224):
            assert model(torch.empty(1, 3, size, size)).shape == (1, 10)
    # A tenth of 96, 256, 384 as the nearest even number, of 4,096 as the nearest one.
    sizes = [m.weight.shape[0] for m in model.modules() if hasattr(m, "weight")]
    assert sizes == [10, 26, 38, 38, 26, 410, 410, 10]


def test_alexnet2012_of_a_quarter_of_the_width_starts_twice_as_large():
    hidden = AlexNet2012(width=0.25).classifier[3].weight
    # Published 0.005; five standard errors of a standard deviation of n normal samples.
    assert abs(hidden.std().item() - 0.01) < 5 * 0.01 / (2 * hidden.numel()) ** 0.5
