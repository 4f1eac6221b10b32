"""Image classifiers: ResNet-50 in two forms, VGG-16, AlexNet's single tower and its two groups.

All take images ``[batch, 3, height, width]``, published for 224 px a side, and return logits
``[batch, num_classes]``. A side has 32 px or more, 63 for AlexNet. `width` is the share of the
published channels and hidden units to build. Parameters are counted at 1000 classes.

torchvision is only imported when a network is built: it takes a second, which a language model or a
GAN should not pay for.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor, nn
from torch.nn import functional as F


def resnet50(num_classes: int = 1000) -> nn.Module:
    """Build torchvision's ResNet-50 v1.5, random weights: 25,557,032 parameters.

    He et al., arXiv 1512.03385, with the stride in the 3x3 convolution.
    """
    from torchvision import models

    return models.resnet50(weights=None, num_classes=num_classes)


def scaled(size: int, width: float, multiple: int = 1) -> int:
    """Scale `size` by `width` to the nearest multiple, at least one multiple."""
    return max(1, round(size * width / multiple)) * multiple


class PreActivationResNet50(nn.Module):
    """ResNet-50 with BatchNorm and ReLU in front of the convolutions: 25,549,352 parameters.

    He et al., "Identity Mappings in Deep Residual Networks" (arXiv 1603.05027), in the form of
    their fb.resnet.torch. The first activation follows the first convolution directly, so the first
    block has no activation of its own; a second one would be 128 parameters more. The first
    activation of a stage is also before its shortcut. The stride is in the 3x3 convolution.
    """

    def __init__(self, num_classes: int = 1000, width: float = 1.0) -> None:
        super().__init__()
        channels = scaled(64, width)
        first = nn.Conv2d(3, channels, 7, 2, 3, bias=False)
        self.stem = nn.Sequential(first, *_activation(channels), nn.MaxPool2d(3, 2, 1))
        self.stages = nn.Sequential()
        for number, blocks in enumerate((3, 4, 6, 3)):
            filters = scaled(64 * 2**number, width)
            stage = nn.Sequential()
            for block in range(blocks):
                stride = 2 if number and not block else 1
                stage.append(_Bottleneck(channels, filters, stride, active=not number + block))
                channels = 4 * filters
            self.stages.append(stage)
        last = nn.Linear(channels, num_classes)
        self.head = nn.Sequential(
            *_activation(channels), nn.AdaptiveAvgPool2d(1), nn.Flatten(), last
        )
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(last.bias)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(images)))


class _Bottleneck(nn.Module):
    """A block with a shortcut. inputs: channels of its maps; active: they are activated already."""

    def __init__(self, inputs: int, filters: int, stride: int, active: bool) -> None:
        super().__init__()
        self.activation = nn.Sequential(*([] if active else _activation(inputs)))
        self.residual = nn.Sequential(
            nn.Conv2d(inputs, filters, 1, bias=False),
            *_activation(filters),
            nn.Conv2d(filters, filters, 3, stride, 1, bias=False),
            *_activation(filters),
            nn.Conv2d(filters, 4 * filters, 1, bias=False),
        )
        self.shortcut = None
        if inputs != 4 * filters:
            self.shortcut = nn.Conv2d(inputs, 4 * filters, 1, stride, bias=False)

    def forward(self, maps: Tensor) -> Tensor:
        activated = self.activation(maps)
        shortcut = maps if self.shortcut is None else self.shortcut(activated)
        return self.residual(activated) + shortcut


def _activation(channels: int) -> tuple[nn.Module, nn.Module]:
    return nn.BatchNorm2d(channels), nn.ReLU(inplace=True)


# Filters and number of the 3x3 convolutions of configuration D, by stage.
VGG_D = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))


def vgg_layers(
    stages: Sequence[tuple[int, int]], *, inplace: bool = False, ceil_mode: bool = False
) -> Iterator[nn.Module]:
    """Yield stages of VGG: 3x3 convolutions with ReLU, by filters and number, then a pooling.

    A caller can initialise each convolution before the next one draws its weights.
    """
    inputs = 3
    for filters, convolutions in stages:
        for _ in range(convolutions):
            yield nn.Conv2d(inputs, filters, 3, padding=1)
            yield nn.ReLU(inplace)
            inputs = filters
        yield nn.MaxPool2d(2, ceil_mode=ceil_mode)


def _classifier(
    inputs: int, hidden: int, num_classes: int, dropout: float, *, inplace: bool
) -> nn.Sequential:
    layers: list[nn.Module] = []
    for size in (inputs, hidden):
        layers += [nn.Linear(size, hidden), nn.ReLU(inplace), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(hidden, num_classes))


class VGG16(nn.Module):
    """VGG-D (Simonyan and Zisserman, arXiv 1409.1556): 138,357,544 parameters.

    Network, parameter names and initial weights are as in torchvision's ``vgg16``, whose weights
    can be loaded. With another width linear layers start as much larger as they have fewer inputs,
    so that signals are as large as in the published network.
    """

    def __init__(self, num_classes: int = 1000, dropout: float = 0.5, width: float = 1.0) -> None:
        super().__init__()
        stages = [(scaled(filters, width), number) for filters, number in VGG_D]
        self.features = nn.Sequential(*vgg_layers(stages, inplace=True))
        self.avgpool = MapPool((7, 7))
        self.classifier = _classifier(
            stages[-1][0] * 7 * 7, scaled(4096, width), num_classes, dropout, inplace=True
        )
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=0.01 / width**0.5)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.avgpool(self.features(images)).flatten(1))


class LocalResponseNorm(nn.LocalResponseNorm):
    """Local response normalisation across channels (Krizhevsky et al. 2012, section 3.3).

    ``y_c = x_c / (k + alpha / size * sum of x_j^2 over the window around c) ** beta``: the
    window holds ``size`` neighbouring channels, and channels outside the tensor count as 0, as in
    ``torch.nn.LocalResponseNorm`` and Caffe. torch's module goes through ``avg_pool3d``, which has
    no half kernel on a CPU; this one does not. ``size`` is odd, the other defaults are Caffe's.

    Input and output are ``[batch, channels, height, width]`` in any floating dtype, computed in
    that dtype. It subclasses torch's module, so that it counts as a norm layer.
    """

    def forward(self, x: Tensor) -> Tensor:
        # Scaled before it is squared: x * x alone is inf in FP16 from |x| = 256 on, this way it is
        # finite up to 57,000. What underflows is far below k.
        squares = (x * (self.alpha / self.size) ** 0.5).square()
        reach = self.size // 2
        windows = F.pad(squares, (0, 0, 0, 0, reach, reach)).unfold(1, self.size, 1)
        return x * (self.k + windows.sum(-1)).pow(-self.beta)


def alexnet(num_classes: int = 1000, dropout: float = 0.5) -> nn.Module:
    """Build torchvision's AlexNet with random weights: 61,100,840 parameters.

    The layout of Krizhevsky, "One weird trick" (arXiv 1404.5997): 64-192-384-256-256 filters, no
    groups, no local response normalisation.
    """
    from torchvision import models

    model = models.alexnet(weights=None, num_classes=num_classes, dropout=dropout)
    model.avgpool = MapPool((6, 6))
    return model


class MapPool(nn.AdaptiveAvgPool2d):
    """Average pooling that returns a map of the target size (at 224 px) unchanged.

    So nothing is launched for it, and `deterministic=true` is possible: the gradient of the real
    pooling has no deterministic kernel on CUDA.
    """

    def forward(self, maps: Tensor) -> Tensor:
        return maps if tuple(maps.shape[-2:]) == self.output_size else super().forward(maps)


class AlexNet2012(nn.Module):
    """The two-group AlexNet (Krizhevsky et al. 2012) as Caffe's ``bvlc_alexnet`` defines it.

    It has 60,965,224 parameters. Weights start as N(0, 0.01), but 0.005 in the first two linear
    layers; with another width they are as much larger as there are fewer inputs. Biases are 0.1 in
    convolutions 2, 4, 5 and those two linear layers, 0 elsewhere (the 2012 paper has 1 where Caffe
    has 0.1).

    The network is published for 227 px; 224 px give the same map of 6 x 6, because Caffe rounds
    pooling sizes up. For other sizes means make the map 6 x 6.
    """

    def __init__(self, num_classes: int = 1000, dropout: float = 0.5, width: float = 1.0) -> None:
        super().__init__()
        # Even, for two groups.
        first, second, third = (scaled(filters, width, 2) for filters in (96, 256, 384))
        self.features = nn.Sequential(
            nn.Conv2d(3, first, 11, stride=4),
            nn.ReLU(),
            LocalResponseNorm(5),
            nn.MaxPool2d(3, 2, ceil_mode=True),
            nn.Conv2d(first, second, 5, padding=2, groups=2),
            nn.ReLU(),
            LocalResponseNorm(5),
            nn.MaxPool2d(3, 2, ceil_mode=True),
            nn.Conv2d(second, third, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(third, third, 3, padding=1, groups=2),
            nn.ReLU(),
            nn.Conv2d(third, second, 3, padding=1, groups=2),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, ceil_mode=True),
        )
        self.avgpool = MapPool((6, 6))
        self.classifier = _classifier(
            second * 6 * 6, scaled(4096, width), num_classes, dropout, inplace=False
        )
        layers = [m for m in self.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
        weight_std = (0.01, 0.01, 0.01, 0.01, 0.01, 0.005, 0.005, 0.01)
        biases = (0.0, 0.1, 0.0, 0.1, 0.1, 0.1, 0.1, 0.0)
        for layer, std, bias in zip(layers, weight_std, biases, strict=True):
            nn.init.normal_(layer.weight, std=std if layer is layers[0] else std / width**0.5)
            if layer.bias is not None:
                nn.init.constant_(layer.bias, bias)

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.avgpool(self.features(images)).flatten(1))
