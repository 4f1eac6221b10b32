"""DCGAN's generator and discriminator; an autoencoder of the two.

Radford et al., arXiv 1511.06434. Layers, widths and initialisation follow the 4x4 stride-2 form of
the PyTorch examples; sizes other than 64 px add or drop one stage per factor of two. `image_size`
is a power of two, at least 16, else ``ValueError``. Parameters are counted with the defaults.
"""

from collections import OrderedDict
from itertools import pairwise

from torch import Tensor, nn


class Generator(nn.Module):
    """The network from codes to images: transposed convolutions, ReLU, and tanh at the end.

    Input ``[batch, latent_size]``; output ``[batch, channels, image_size, image_size]`` in
    [-1, 1]. 3,576,704 parameters.

    Args:
        generator_width: the widest layer has ``generator_width * image_size / 8`` filters.
        norm: put BatchNorm after every layer but the last, in place of biases.
    """

    def __init__(
        self,
        image_size: int = 64,
        latent_size: int = 100,
        generator_width: int = 64,
        channels: int = 3,
        norm: bool = True,
    ) -> None:
        super().__init__()
        widths = [latent_size, *_widths(image_size, generator_width)[::-1]]
        layers = OrderedDict[str, nn.Module]()
        for i, (inputs, outputs) in enumerate(pairwise(widths)):
            # The first layer turns a 1x1 code into a 4x4 map; each later one doubles the size.
            stride, padding = (1, 0) if i == 0 else (2, 1)
            convolution = nn.ConvTranspose2d(inputs, outputs, 4, stride, padding, bias=not norm)
            layers[f"conv{i}"] = convolution
            if norm:
                layers[f"norm{i}"] = nn.BatchNorm2d(outputs)
            layers[f"relu{i}"] = nn.ReLU()
        last = nn.ConvTranspose2d(widths[-1], channels, 4, 2, 1, bias=not norm)
        layers |= {f"conv{len(widths) - 1}": last, "tanh": nn.Tanh()}
        self.layers = _started(nn.Sequential(layers))

    def forward(self, codes: Tensor) -> Tensor:
        return self.layers(codes[:, :, None, None])


class Discriminator(nn.Module):
    """The network from images to logits: strided convolutions, LeakyReLU(0.2), no final sigmoid.

    Input ``[batch, channels, image_size, image_size]``; output logits ``[batch]`` if ``outputs``
    is 1, else ``[batch, outputs]``. 2,765,568 parameters. `norm`: put BatchNorm after every layer
    but the first and the last, in place of biases.
    """

    def __init__(
        self,
        image_size: int = 64,
        discriminator_width: int = 64,
        channels: int = 3,
        outputs: int = 1,
        norm: bool = True,
    ) -> None:
        super().__init__()
        widths = [channels, *_widths(image_size, discriminator_width)]
        layers = OrderedDict[str, nn.Module]()
        for i, (inputs, filters) in enumerate(pairwise(widths)):
            layers[f"conv{i}"] = nn.Conv2d(inputs, filters, 4, 2, 1, bias=not norm)
            if norm and i > 0:
                layers[f"norm{i}"] = nn.BatchNorm2d(filters)
            layers[f"relu{i}"] = nn.LeakyReLU(0.2)
        last = nn.Conv2d(widths[-1], outputs, 4, 1, 0, bias=not norm)
        layers[f"conv{len(widths) - 1}"] = last
        self.outputs, self.layers = outputs, _started(nn.Sequential(layers))

    def forward(self, images: Tensor) -> Tensor:
        logits = self.layers(images).flatten(1)
        return logits.squeeze(1) if self.outputs == 1 else logits


def _started(layers: nn.Sequential) -> nn.Sequential:
    """Initialise convolutions with N(0, 0.02), BatchNorm gains with N(1, 0.02), biases with 0.

    See section 4 of the paper; the gains are those of its published code.
    """
    for layer in layers:
        if isinstance(layer, (nn.Conv2d, nn.ConvTranspose2d, nn.BatchNorm2d)):
            mean = 1.0 if isinstance(layer, nn.BatchNorm2d) else 0.0
            nn.init.normal_(layer.weight, mean, 0.02)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return layers


def _widths(image_size: int, width: int) -> list[int]:
    """Return the filters of the layers with maps of image_size / 2, ..., 8, 4 px, in that order."""
    if image_size < 16 or image_size & (image_size - 1):
        raise ValueError(
            f"image_size={image_size} is not allowed: must be a power of two, at least 16"
        )
    return [width * 2**i for i in range(image_size.bit_length() - 3)]


class ConvAutoencoder(nn.Module):
    """Discriminator as the encoder, generator as the decoder, no BatchNorm.

    The gradient of a mean squared error over N pixel values is at most ``2 * error / N`` per
    pixel, and without normalisation each layer below shrinks it further. At a batch of 1,437
    three-channel 32 px images N is 2^22, so much of it lies below 2^-25, where FP16 rounds to 0:
    the paper's section 3.2 at a size that trains in seconds.

    Weights and biases start like torch's convolutions, uniform in +-1/sqrt(fan_in): DCGAN's
    N(0, 0.02) relies on BatchNorm to restore the size of the activations. Input and output
    ``[batch, channels, image_size, image_size]``, output in [-1, 1].
    """

    def __init__(self, image_size: int, code_size: int, width: int, channels: int) -> None:
        super().__init__()
        self.encoder = Discriminator(image_size, width, channels, outputs=code_size, norm=False)
        self.decoder = Generator(image_size, code_size, width, channels, norm=False)
        for layer in self.modules():
            if isinstance(layer, (nn.Conv2d, nn.ConvTranspose2d)):
                layer.reset_parameters()

    def forward(self, images: Tensor) -> Tensor:
        return self.decoder(self.encoder(images))
