"""GoogLeNet, Inception v2 and Inception v3: one network and three tables.

A table names the layers of a trunk in their order. A block is a tuple of branches, each a list of
layers. The branches' maps are concatenated as channels; a branch may itself end in such a tuple
(v3). Filters are those of the published network; `width` is the share of them to build. Parameters
are counted at 1000 classes; auxiliary heads are built if `aux_weight` is above 0.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mprun.models.classifiers import LocalResponseNorm, MapPool, scaled

Size: TypeAlias = int | tuple[int, int]


class Conv(NamedTuple):
    """A convolution and its ReLU; padding None keeps the size of the map."""

    filters: int
    size: Size = 1
    stride: int = 1
    padding: int | None = None


class Pool(NamedTuple):
    """The largest or the mean of 3 x 3 values; ceil: windows that exceed the end count, too."""

    kind: str
    stride: int = 1
    padding: int = 1
    ceil: bool = False


class Norm(NamedTuple):
    """A `LocalResponseNorm` with Caffe's constants."""


Layer: TypeAlias = "Conv | Pool | Norm | Block"
Block: TypeAlias = tuple[Sequence[Layer], ...]
Trunk: TypeAlias = Mapping[str, Layer]
Head: TypeAlias = Callable[[int], "AuxiliaryHead"]


class ConvUnit(nn.Sequential):
    """Convolution and ReLU; a BatchNorm between them replaces the bias."""

    def __init__(
        self, batch_norm: bool, inputs: int, filters: int, size: Size = 1, **where: Any
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, filters, size, bias=not batch_norm, **where)
        if batch_norm:
            self.norm = nn.BatchNorm2d(filters, eps=1e-3)
        self.relu = nn.ReLU(inplace=True)


class Branches(nn.ModuleList):
    """The maps of all branches of one input, concatenated as channels."""

    def forward(self, maps: Tensor) -> Tensor:
        return torch.cat([branch(maps) for branch in self], 1)


class AuxiliaryHead(nn.Module):
    """Logits from the middle of the trunk.

    If the map is at least as large as in the published network, means over 5 x 5 values are taken
    at every third. The result becomes a map of `side` x `side`, which it already is for images of
    the published size.
    """

    def __init__(self, side: int, *layers: nn.Module) -> None:
        super().__init__()
        self.pool, self.layers = MapPool((side, side)), nn.Sequential(*layers)
        self.layers[-1].is_output = True  # type: ignore[assignment]
        self.published = 5 + 3 * (side - 1)

    def forward(self, maps: Tensor) -> Tensor:
        if min(maps.shape[-2:]) >= self.published:
            maps = F.avg_pool2d(maps, 5, 3)
        return self.layers(self.pool(maps))


class Inception(nn.Module):
    """A trunk, a classifier on the mean of its last map, and auxiliary heads in between.

    Input ``[batch, 3, height, width]``. Output logits ``[batch, num_classes]``; in training with
    auxiliary heads, the tuple of them and of each head's.

    Args:
        heads: Name of a layer of the trunk -> function that makes the head on its output, given the
            number of channels there.
    """

    def __init__(
        self,
        trunk: Trunk,
        batch_norm: bool,
        heads: Mapping[str, Head],
        num_classes: int,
        dropout: float,
        width: float,
    ) -> None:
        super().__init__()
        self.trunk, self.heads, channels = nn.ModuleDict(), nn.ModuleDict(), 3
        unit = partial(ConvUnit, batch_norm)
        for name, layer in trunk.items():
            self.trunk[name], channels = _built(layer, channels, unit, width)
            if name in heads:
                self.heads[name] = heads[name](channels)
        last = nn.Dropout(dropout), nn.Linear(channels, num_classes)
        last[-1].is_output = True  # type: ignore[assignment]
        self.classifier = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), *last)

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, ...]:
        maps, auxiliary = images, []
        for name, layer in self.trunk.items():
            maps = layer(maps)
            if self.training and name in self.heads:
                auxiliary.append(self.heads[name](maps))
        logits = self.classifier(maps)
        return (logits, *auxiliary) if auxiliary else logits


def _built(
    layer: Layer, channels: int, unit: Callable[..., ConvUnit], width: float
) -> tuple[nn.Module, int]:
    """Build a layer for so many input channels; return it with its number of output channels."""
    match layer:
        case Conv(filters, size, stride, padding):
            filters = scaled(filters, width)
            kept = tuple(n // 2 for n in size) if isinstance(size, tuple) else size // 2
            where = {"stride": stride, "padding": kept if padding is None else padding}
            return unit(channels, filters, size, **where), filters
        case Pool(kind, stride, padding, ceil):
            pool = nn.MaxPool2d if kind == "max" else nn.AvgPool2d
            return pool(3, stride, padding, ceil_mode=ceil), channels
        case Norm():
            return LocalResponseNorm(5), channels
    branches, outputs = Branches(), 0
    for branch in layer:
        made, inputs = nn.Sequential(), channels
        for part in branch:
            module, inputs = _built(part, inputs, unit, width)
            made.append(module)
        branches.append(made)
        outputs += inputs
    return branches, outputs


_CEILED = Pool("max", 2, 0, ceil=True)  # Caffe rounds sizes up


def _googlenet_block(one: int, three: tuple[int, int], five: tuple[int, int], pool: int) -> Block:
    return (
        [Conv(one)],
        [Conv(three[0]), Conv(three[1], 3)],
        [Conv(five[0]), Conv(five[1], 5)],
        [Pool("max"), Conv(pool)],
    )


_GOOGLENET: Trunk = {
    "conv1": Conv(64, 7, 2),
    "pool1": _CEILED,
    "norm1": Norm(),
    "conv2_reduce": Conv(64),
    "conv2": Conv(192, 3),
    "norm2": Norm(),
    "pool2": _CEILED,
    "inception_3a": _googlenet_block(64, (96, 128), (16, 32), 32),
    "inception_3b": _googlenet_block(128, (128, 192), (32, 96), 64),
    "pool3": _CEILED,
    "inception_4a": _googlenet_block(192, (96, 208), (16, 48), 64),
    "inception_4b": _googlenet_block(160, (112, 224), (24, 64), 64),
    "inception_4c": _googlenet_block(128, (128, 256), (24, 64), 64),
    "inception_4d": _googlenet_block(112, (144, 288), (32, 64), 64),
    "inception_4e": _googlenet_block(256, (160, 320), (32, 128), 128),
    "pool4": _CEILED,
    "inception_5a": _googlenet_block(256, (160, 320), (32, 128), 128),
    "inception_5b": _googlenet_block(384, (192, 384), (48, 128), 128),
}


def googlenet(
    num_classes: int = 1000, dropout: float = 0.4, width: float = 1.0, aux_weight: float = 0.3
) -> Inception:
    """Build GoogLeNet (Szegedy et al., arXiv 1409.4842) like Caffe's ``bvlc_googlenet``.

    It has 6,998,552 parameters, and 13,378,280 with its two auxiliary heads. Weights are uniform
    with variance 1 / inputs, biases 0.2, but 0 in the layers that give logits. Images have 32 px or
    more (published for 224). torchvision's network of that name has BatchNorm, 3 x 3 for 5 x 5 and
    no local response norm.
    """

    def head(channels: int) -> AuxiliaryHead:
        filters, hidden = scaled(128, width), scaled(1024, width)
        unit, connected = ConvUnit(False, channels, filters), nn.Linear(filters * 4 * 4, hidden)
        last = nn.ReLU(inplace=True), nn.Dropout(0.7), nn.Linear(hidden, num_classes)
        return AuxiliaryHead(4, unit, nn.Flatten(), connected, *last)

    heads = dict.fromkeys(("inception_4a", "inception_4d"), head) if aux_weight else {}
    return _started_as_caffe(Inception(_GOOGLENET, False, heads, num_classes, dropout, width))


def _started_as_caffe(network: Inception) -> Inception:
    ends = [[*_products(part)][-1] for part in (*network.heads.values(), network.classifier)]
    for layer in _products(network):
        nn.init.kaiming_uniform_(layer.weight, nonlinearity="linear")
        if layer.bias is not None:
            nn.init.constant_(layer.bias, 0.0 if layer in ends else 0.2)
    return network


def _products(network: nn.Module) -> Iterator[nn.Conv2d | nn.Linear]:
    return (m for m in network.modules() if isinstance(m, nn.Conv2d | nn.Linear))


def _v2_block(
    one: int, three: tuple[int, int], double: tuple[int, int], pool: int, kind: str = "mean"
) -> Block:
    return (
        [Conv(one)],
        [Conv(three[0]), Conv(three[1], 3)],
        [Conv(double[0]), Conv(double[1], 3), Conv(double[1], 3)],
        [Pool(kind), Conv(pool)],
    )


def _v2_reduction(three: tuple[int, int], double: tuple[int, int]) -> Block:
    """Halve the map; the pooling is padded like the convolutions, so that odd sizes fit, too."""
    return (
        [Conv(three[0]), Conv(three[1], 3, 2)],
        [Conv(double[0]), Conv(double[1], 3), Conv(double[1], 3, 2)],
        [Pool("max", 2)],
    )


_INCEPTION_V2: Trunk = {
    "conv1": Conv(64, 7, 2),
    "pool1": _CEILED,
    "conv2_reduce": Conv(64),
    "conv2": Conv(192, 3),
    "pool2": _CEILED,
    "inception_3a": _v2_block(64, (64, 64), (64, 96), 32),
    "inception_3b": _v2_block(64, (64, 96), (64, 96), 64),
    "inception_3c": _v2_reduction((128, 160), (64, 96)),
    "inception_4a": _v2_block(224, (64, 96), (96, 128), 128),
    "inception_4b": _v2_block(192, (96, 128), (96, 128), 128),
    "inception_4c": _v2_block(160, (128, 160), (128, 160), 96),
    "inception_4d": _v2_block(96, (128, 192), (160, 192), 96),
    "inception_4e": _v2_reduction((128, 192), (192, 256)),
    "inception_5a": _v2_block(352, (192, 320), (160, 224), 128),
    "inception_5b": _v2_block(352, (192, 320), (192, 224), 128, "max"),
}


def inception_v2(num_classes: int = 1000, dropout: float = 0.0, width: float = 1.0) -> Inception:
    """Build Inception v2, which is BN-Inception (Ioffe and Szegedy, arXiv 1502.03167).

    It has 11,194,984 parameters. The paper's table has 128 filters after the pooling of 4c and 4d,
    and outputs of 576 channels, to which they do not add up; with 96, as in TensorFlow's slim, they
    do. (The public port to Caffe keeps the 128: 11,285,224.) The first convolution is plain, not
    separable, there are no auxiliary heads, and weights start as in `googlenet`. Images have 32 px
    or more (published for 224).
    """
    return _started_as_caffe(Inception(_INCEPTION_V2, True, {}, num_classes, dropout, width))


def _v3_a(pool: int) -> Block:
    return (
        [Conv(64)],
        [Conv(48), Conv(64, 5)],
        [Conv(64), Conv(96, 3), Conv(96, 3)],
        [Pool("mean"), Conv(pool)],
    )


def _v3_b(narrow: int) -> Block:
    """Build 7 x 7 convolutions as 1 x 7 and 7 x 1."""
    row, column = Conv(narrow, (1, 7)), Conv(narrow, (7, 1))
    return (
        [Conv(192)],
        [Conv(narrow), row, Conv(192, (7, 1))],
        [Conv(narrow), column, row, column, Conv(192, (1, 7))],
        [Pool("mean"), Conv(192)],
    )


_ROW_AND_COLUMN: Block = ([Conv(384, (1, 3))], [Conv(384, (3, 1))])
_V3_C: Block = (
    [Conv(320)],
    [Conv(384), _ROW_AND_COLUMN],
    [Conv(448), Conv(384, 3), _ROW_AND_COLUMN],
    [Pool("mean"), Conv(192)],
)
_INCEPTION_V3: Trunk = {
    "conv1": Conv(32, 3, 2, 0),
    "conv2": Conv(32, 3, 1, 0),
    "conv3": Conv(64, 3),
    "pool1": Pool("max", 2, 0),
    "conv4": Conv(80),
    "conv5": Conv(192, 3, 1, 0),
    "pool2": Pool("max", 2, 0),
    "inception_5b": _v3_a(32),
    "inception_5c": _v3_a(64),
    "inception_5d": _v3_a(64),
    "inception_6a": (
        [Conv(384, 3, 2, 0)],
        [Conv(64), Conv(96, 3), Conv(96, 3, 2, 0)],
        [Pool("max", 2, 0)],
    ),
    "inception_6b": _v3_b(128),
    "inception_6c": _v3_b(160),
    "inception_6d": _v3_b(160),
    "inception_6e": _v3_b(192),
    "inception_7a": (
        [Conv(192), Conv(320, 3, 2, 0)],
        [Conv(192), Conv(192, (1, 7)), Conv(192, (7, 1)), Conv(192, 3, 2, 0)],
        [Pool("max", 2, 0)],
    ),
    "inception_7b": _V3_C,
    "inception_7c": _V3_C,
}


def inception_v3(
    num_classes: int = 1000, dropout: float = 0.5, width: float = 1.0, aux_weight: float = 0.4
) -> Inception:
    """Build Inception v3 (Szegedy et al., arXiv 1512.00567) like torchvision's ``inception_v3``.

    It has 23,834,568 parameters, and 27,161,264 with the auxiliary head. Weights are N(0, 0.1), in
    the auxiliary head's last two layers 0.01 and 0.001. Images have 75 px or more (published for
    299).
    """

    def head(channels: int) -> AuxiliaryHead:
        narrow, wide = scaled(128, width), scaled(768, width)
        last = nn.Linear(wide, num_classes)
        units = ConvUnit(True, channels, narrow), ConvUnit(True, narrow, wide, 5)
        return AuxiliaryHead(5, *units, nn.Flatten(), last)

    heads = {"inception_6e": head} if aux_weight else {}
    network = Inception(_INCEPTION_V3, True, heads, num_classes, dropout, width)
    for layer in _products(network):
        nn.init.normal_(layer.weight, std=0.1)
    for auxiliary in network.heads.values():
        _, wide, last = _products(auxiliary)
        nn.init.normal_(wide.weight, std=0.01)
        nn.init.normal_(last.weight, std=0.001)
    return network
