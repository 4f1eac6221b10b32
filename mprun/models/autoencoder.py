"""An autoencoder of DCGAN's two networks, whose activation gradients underflow FP16."""

from torch import Tensor, nn

from mprun.models.dcgan import Discriminator, Generator


class ConvAutoencoder(nn.Module):
    """Discriminator as the encoder, generator as the decoder, no BatchNorm.

    The gradient of a mean squared error over N pixel values is at most ``2 * error / N`` per
    pixel, and without normalisation each layer below shrinks it further: at a batch of 1,437
    three-channel 32 px images N is 2^22, so much of it lies below 2^-25, where FP16 rounds to 0.
    This is the paper's section 3.2 at a size that trains in seconds.

    Weights and biases start as torch's own convolutions do, uniform in +-1/sqrt(fan_in): DCGAN's
    N(0, 0.02) relies on BatchNorm to restore the size of the activations. Input and output
    ``[batch, channels, image_size, image_size]``, output in [-1, 1]. ``image_size`` is a power of
    two, at least 16, else ``ValueError``.
    """

    def __init__(self, image_size: int, code_size: int, width: int, channels: int) -> None:
        super().__init__()
        if code_size < 2:
            raise ValueError(f"code_size={code_size} is not allowed: 2 or more")
        self.encoder = Discriminator(image_size, width, channels, outputs=code_size, norm=False)
        self.decoder = Generator(image_size, code_size, width, channels, norm=False)
        for layer in self.modules():
            if isinstance(layer, (nn.Conv2d, nn.ConvTranspose2d)):
                layer.reset_parameters()

    def forward(self, images: Tensor) -> Tensor:
        return self.decoder(self.encoder(images))
