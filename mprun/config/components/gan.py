"""Generated images, from a generator or a decoder that ends in tanh."""

from dataclasses import replace

from mprun.config.components.images import SIDE, in_tanh
from mprun.config.fields import count, one_of, ranged
from mprun.config.registry import ModelConfig, network, task
from mprun.record.metric_facts import LOSS, Metric

task(
    "gan",
    builder="mprun.tasks.gan:GAN",
    metrics=(
        LOSS,
        replace(LOSS, name="d_loss"),
        replace(LOSS, name="g_loss"),
        # docs/sample_metric.md weighs this margin against measured noise.
        Metric("sliced_wasserstein", higher_is_better=False, unit="relative", margin=0.1),
    ),
    networks=2,
    of_own_networks=True,
)
task(
    "reconstruction",
    builder="mprun.tasks.supervised:Reconstruction",
    metrics=(LOSS,),
    overlaps=True,
)

LATENT = "Length of the random codes of the generator"


@network(
    "dcgan",
    task="gan",
    builder=("mprun.models.dcgan:Generator", "mprun.models.dcgan:Discriminator"),
    rules=(in_tanh,),
    needs=("channels",),
    in_tanh=True,
)
class DCGANConfig(ModelConfig):
    """Generator and discriminator of Radford et al.; widths in channels."""

    image_size: int = one_of((32, 64, 128), SIDE, default=64)
    latent_size: int = count(100, LATENT)
    generator_width: int = count(
        64, "Number of channels of the generator's last hidden layer; each earlier layer doubles it"
    )
    discriminator_width: int = count(
        64, "Number of channels of the discriminator's first layer; each later layer doubles it"
    )


@network(
    "conv_autoencoder",
    task="reconstruction",
    builder="mprun.models.dcgan:ConvAutoencoder",
    rules=(in_tanh,),
    needs=("channels",),
    in_tanh=True,
)
class ConvAutoencoderConfig(ModelConfig):
    """DCGAN's discriminator trunk as encoder and its generator as decoder, without BatchNorm."""

    image_size: int = one_of((32, 64, 128), SIDE, default=64)
    code_size: int = ranged(32, "Size of the code between encoder and decoder", at_least=2)
    width: int = count(
        8, "Number of channels of the encoder's first layer; each further layer doubles it"
    )
