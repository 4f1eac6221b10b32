"""Before step 1: does what the user's own data and network are fit together?"""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from mprun.build.own_data import check_batches, check_tanh_images
from mprun.build.own_model import check_forward
from mprun.config import schema
from mprun.config.check import task_of
from mprun.data.sample_random import kept_random_state
from mprun.errors import BadInput
from mprun.precision import PrecisionPolicy, why_no_lstm


def check_own_data(config: schema.RunConfig, data, device: torch.device) -> None:
    """Hold a source of the user's to what the model asks of it; nothing for mprun's own."""
    if not isinstance(config.data, schema.CustomDataConfig):
        return
    check_batches(config.data, task_of(config.model), data, device)
    if isinstance(config.model, schema.DCGANConfig | schema.ConvAutoencoderConfig):
        check_tanh_images(config.data, config.model.image_size, data)


def check_own_network(
    config: schema.RunConfig,
    builders: Sequence[Callable[[], nn.Module]],
    data,
    policy: PrecisionPolicy,
    device: torch.device,
) -> None:
    """Build the network once more and run it on two samples, where it or its data are the user's.

    Costs one construction and two small forward passes, and no random number. The networks of the
    run have been built. Not for mprun's LSTM, which takes tokens of any data and may be large.
    """
    own_model = isinstance(config.model, schema.CustomModelConfig)
    own_data = isinstance(config.data, schema.CustomDataConfig)
    if not (own_model or (own_data and not isinstance(config.model, schema.LSTMConfig))):
        return
    if data.batches_per_epoch < 1:
        return  # said with the batch size
    name = f"model={config.model.name}"
    with kept_random_state():
        networks = [builder() for builder in builders]
    if own_model:
        name = f"model.factory={config.model.factory}"
        _check_recurrent(name, networks, config, policy, device)
    latent_size = getattr(config.model, "latent_size", 0)
    check_forward(name, task_of(config.model), networks, data, device, latent_size)


def _check_recurrent(
    name: str, networks: Sequence[nn.Module], config, policy: PrecisionPolicy, device: torch.device
) -> None:
    """A mode in which torch's own recurrent layers compute in another dtype is refused."""
    if device.type == "cpu" and config.cpu_half != "native":
        return
    # One routine casts all recurrent layers of a GPU; native CPU kernels differ.
    kind = nn.RNNBase if device.type == "cuda" else nn.LSTM
    layers = [m for network in networks for m in network.modules() if isinstance(m, kind)]
    if layers:
        reason = why_no_lstm(policy, device, any(layer.proj_size for layer in layers))
        if reason is not None:
            raise BadInput(f"{name} precision={policy.name}: {reason}")
