"""DCGAN's networks and the autoencoder made of them."""

import pytest
import torch
from torch import nn

from mprun.models.dcgan import ConvAutoencoder, Discriminator, Generator

from .learning import assert_learns

CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)


@pytest.mark.parametrize("image_size", [16, 32, 64, 128])
def test_shapes_and_ranges(image_size):
    generator = Generator(image_size, 10, 4, 3)
    images = generator(torch.randn(2, 10))
    assert images.shape == (2, 3, image_size, image_size)
    assert images.abs().max() <= 1
    assert Discriminator(image_size, 4)(images).shape == (2,)
    assert Discriminator(image_size, 4, outputs=7)(images).shape == (2, 7)


def test_widths_double_down_to_the_4x4_map():
    with torch.device("meta"):
        generator, discriminator = Generator(128), Discriminator(128)
    ups = [m.out_channels for m in generator.modules() if isinstance(m, nn.ConvTranspose2d)]
    downs = [m.out_channels for m in discriminator.modules() if isinstance(m, nn.Conv2d)]
    assert ups == [1024, 512, 256, 128, 64, 3]
    assert downs == [64, 128, 256, 512, 1024, 1]


def test_logits_are_not_squashed():
    model = Discriminator(16, 4, norm=False)
    nn.init.constant_(model.layers[-1].bias, 50.0)
    assert model(torch.zeros(3, 3, 16, 16)).min() > 40


def test_batch_norm_stands_where_the_paper_has_it():
    generator, discriminator = Generator(64, 100, 4), Discriminator(64, 4)
    found = [[n for n in m.layers._modules if "norm" in n] for m in (generator, discriminator)]
    assert found == [["norm0", "norm1", "norm2", "norm3"], ["norm1", "norm2", "norm3"]]
    for model in (Generator(64, norm=False), Discriminator(64, norm=False)):
        assert not any(isinstance(m, nn.BatchNorm2d) for m in model.modules())


def test_dcgan_initialisation():
    for model in (Generator(64), Discriminator(64)):
        convolutions = [m for m in model.modules() if isinstance(m, CONVOLUTIONS)]
        weights = torch.cat([m.weight.flatten() for m in convolutions])
        gains = torch.cat([m.weight for m in model.modules() if isinstance(m, nn.BatchNorm2d)])
        biases = torch.cat([m.bias for m in model.modules() if isinstance(m, nn.BatchNorm2d)])
        for values, mean in ((weights, 0.0), (gains, 1.0)):
            n = values.numel()
            # Five standard errors of a mean and of a standard deviation of n normal samples.
            assert abs(values.mean().item() - mean) < 5 * 0.02 / n**0.5
            assert abs(values.std().item() - 0.02) < 5 * 0.02 / (2 * n) ** 0.5
        assert biases.count_nonzero() == 0


def test_one_adversarial_pass_reaches_every_parameter():
    generator, discriminator = Generator(32, 10, 8), Discriminator(32, 8)
    logits = discriminator(generator(torch.randn(4, 10)))
    nn.functional.binary_cross_entropy_with_logits(logits, torch.ones(4)).backward()
    assert_learns(generator, discriminator)


def test_autoencoder_pass_and_start():
    model = ConvAutoencoder(image_size=64, code_size=32, width=8, channels=1)
    for module in model.modules():
        assert not isinstance(module, nn.BatchNorm2d)
        if isinstance(module, CONVOLUTIONS):
            # torch's default: uniform in +-1/sqrt(fan_in), fan_in = weight.shape[1] x 16 taps. The
            # maximum of n uniform values misses the bound by 1/n of it on average.
            bound, n = (module.weight.shape[1] * 16) ** -0.5, module.weight.numel()
            assert bound * (1 - 20 / n) < module.weight.abs().max() <= bound
            assert module.bias.abs().max() <= bound
    images = torch.rand(4, 1, 64, 64) * 2 - 1
    assert model.encoder(images).shape == (4, 32)
    reconstruction = model(images)
    assert reconstruction.shape == images.shape
    nn.functional.mse_loss(reconstruction, images).backward()
    assert_learns(model)
