"""Image classifiers: ResNet-50 and AlexNet, its single tower of 2014 and its two groups of 2012.

torchvision is imported where a network is built: it takes a second, which a language model or a GAN
should not pay for.
"""

from torch import Tensor, nn
from torch.nn import functional as F


def resnet50(num_classes: int = 1000) -> nn.Module:
    """torchvision's ResNet-50 v1.5 with random weights: 25,557,032 parameters at 1000 classes.

    Input ``[batch, 3, height, width]``, 32 px or more (published for 224); output logits
    ``[batch, num_classes]``. He et al., arXiv 1512.03385, with the stride in the 3x3 convolution.
    """
    from torchvision.models import resnet50 as torchvision_resnet50

    return torchvision_resnet50(weights=None, num_classes=num_classes)


class LocalResponseNorm(nn.LocalResponseNorm):
    """Normalisation across channels (Krizhevsky et al. 2012, section 3.3).

    ``y_c = x_c / (k + alpha / size * sum of x_j^2 over the window around c) ** beta``: the
    window holds ``size`` neighbouring channels, and channels outside the tensor count as 0, as in
    ``torch.nn.LocalResponseNorm`` and Caffe. torch's module goes through ``avg_pool3d``, which has
    no half kernel on a CPU; this one does not.

    Input and output: ``[batch, channels, height, width]``, any floating dtype, computed in that
    dtype. A subclass of torch's, so that it counts as a norm layer.

    Raises:
        ValueError: ``size`` is not odd and positive.
    """

    def __init__(
        self, size: int = 5, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0
    ) -> None:
        super().__init__(size, alpha, beta, k)
        if size < 1 or size % 2 == 0:
            raise ValueError(f"size={size} is not allowed: an odd number, at least 1")

    def forward(self, x: Tensor) -> Tensor:
        # Scaled before it is squared: x * x alone is inf in FP16 from |x| = 256 on, this way it is
        # finite up to 57,000. What underflows is far below k.
        squares = (x * (self.alpha / self.size) ** 0.5).square()
        reach = self.size // 2
        windows = F.pad(squares, (0, 0, 0, 0, reach, reach)).unfold(1, self.size, 1)
        return x * (self.k + windows.sum(-1)).pow(-self.beta)


def alexnet(num_classes: int = 1000, dropout: float = 0.5) -> nn.Module:
    """torchvision's AlexNet with random weights: 61,100,840 parameters at 1000 classes.

    The layout of Krizhevsky, "One weird trick" (arXiv 1404.5997): 64-192-384-256-256 filters, no
    groups, no local response normalisation.

    Input ``[batch, 3, height, width]``, 63 px or more (published for 224); output logits
    ``[batch, num_classes]``.
    """
    from torchvision.models import alexnet as torchvision_alexnet

    model = torchvision_alexnet(weights=None, num_classes=num_classes, dropout=dropout)
    model.avgpool = _Pool((6, 6))
    return model


class _Pool(nn.AdaptiveAvgPool2d):
    """Means over a map of that size already, as 224 px give it, are the map itself.

    So nothing is launched for them, and `deterministic=true` is possible: the gradient of the real
    pooling has no deterministic kernel on CUDA.
    """

    def forward(self, maps: Tensor) -> Tensor:
        return maps if tuple(maps.shape[-2:]) == self.output_size else super().forward(maps)


class AlexNet2012(nn.Module):
    """The two-group AlexNet (Krizhevsky et al. 2012) as Caffe's ``bvlc_alexnet`` defines it.

    60,965,224 parameters at 1000 classes. Groups of 2 in convolutions 2, 4 and 5, local response
    normalisation after the first two, overlapping 3/2 pooling. Weights N(0, 0.01), but 0.005 in
    the first two linear layers; biases 0.1 in convolutions 2, 4, 5 and those two linear layers,
    0 elsewhere (the 2012 paper has 1 where Caffe has 0.1).

    Input ``[batch, 3, 227, 227]`` or ``[batch, 3, 224, 224]``: Caffe rounds pooling sizes up, so
    both end in a 6 x 6 map. Output logits ``[batch, num_classes]``.

    Raises:
        ValueError: another size of images, on the first forward pass.
    """

    def __init__(self, num_classes: int = 1000, dropout: float = 0.5) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 96, 11, stride=4),
            nn.ReLU(),
            LocalResponseNorm(5, 1e-4, 0.75, k=1.0),
            nn.MaxPool2d(3, 2, ceil_mode=True),
            nn.Conv2d(96, 256, 5, padding=2, groups=2),
            nn.ReLU(),
            LocalResponseNorm(5, 1e-4, 0.75, k=1.0),
            nn.MaxPool2d(3, 2, ceil_mode=True),
            nn.Conv2d(256, 384, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(384, 384, 3, padding=1, groups=2),
            nn.ReLU(),
            nn.Conv2d(384, 256, 3, padding=1, groups=2),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, ceil_mode=True),
        )
        self.classifier = nn.Sequential(
            nn.Linear(256 * 6 * 6, 4096),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(4096, 4096),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(4096, num_classes),
        )
        layers = [m for m in self.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
        weight_std = (0.01, 0.01, 0.01, 0.01, 0.01, 0.005, 0.005, 0.01)
        biases = (0.0, 0.1, 0.0, 0.1, 0.1, 0.1, 0.1, 0.0)
        for layer, std, bias in zip(layers, weight_std, biases, strict=True):
            nn.init.normal_(layer.weight, std=std)
            if layer.bias is not None:
                nn.init.constant_(layer.bias, bias)

    def forward(self, images: Tensor) -> Tensor:
        maps = self.features(images)
        if maps.shape[-2:] != (6, 6):
            size = tuple(images.shape[-2:])
            raise ValueError(f"image size {size} is not allowed: 227 x 227 or 224 x 224 px")
        return self.classifier(maps.flatten(1))
