"""Before step 1: does what the user's own data and network are fit together?"""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from mprun.build.execution import put_channels_last, uses_channels_last
from mprun.build.trial import Trial
from mprun.build.user_data import check_batches, check_tanh_images
from mprun.config import schema
from mprun.config.tasks import task_of
from mprun.data.sample_random import kept_random_state
from mprun.errors import BadInput
from mprun.precision import Arithmetic, why_no_lstm


def check_own_data(config: schema.RunConfig, data, device: torch.device) -> None:
    """Hold a source of the user's to what the model asks of it; nothing for mprun's own."""
    if not isinstance(config.data, schema.CustomDataConfig):
        return
    check_batches(config.data, task_of(config.model), data, device)
    tanh = isinstance(config.model, schema.DCGANConfig | schema.ConvAutoencoderConfig)
    if tanh and data.batches_per_epoch:
        check_tanh_images(config.data, config.model.image_size, data)


def check_own_network(
    config: schema.RunConfig,
    builders: Sequence[Callable[[], nn.Module]],
    data,
    arithmetic: Arithmetic,
    overrides: dict[str, torch.dtype],
) -> None:
    """Build the networks once more and try them, where they or their data are the user's own.

    Costs one construction and three passes of two samples, and no random number. Those of the run
    have been built. Not for mprun's LSTM, which takes tokens of any data and may be large.
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
    if uses_channels_last(config, arithmetic.device)[0]:
        networks = [put_channels_last(network) for network in networks]
    policy, device, native = arithmetic.policy, arithmetic.device, config.cpu_half == "native"
    if own_model:
        name = f"model.factory={config.model.factory}"
        if device.type == "cuda" or native:
            _check_recurrent(f"{name} precision={policy.name}", networks, arithmetic)
    latent_size = getattr(config.model, "latent_size", 0)
    trial = Trial(name, task_of(config.model), networks, data, device, latent_size)
    # One of its own: the run's counts what the run computes.
    own = Arithmetic(policy, device, native=native, overrides=overrides.values())
    trial.run(policy, own, overrides)


def _check_recurrent(name: str, networks: Sequence[nn.Module], arithmetic: Arithmetic) -> None:
    """A mode in which torch's own recurrent layers compute in another dtype is refused."""
    # One routine casts all recurrent layers of a GPU; native CPU kernels differ.
    kind = nn.RNNBase if arithmetic.device.type == "cuda" else nn.LSTM
    layers = [m for network in networks for m in network.modules() if isinstance(m, kind)]
    if layers:
        projected = any(layer.proj_size for layer in layers)
        reason = why_no_lstm(arithmetic.policy, arithmetic.device, projected)
        if reason is not None:
            raise BadInput(f"{name}: {reason}")
