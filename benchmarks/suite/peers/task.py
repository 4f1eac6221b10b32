"""The input of every peer: mprun's configuration, initial weights and batches."""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import nn

from mprun.assembly.data import build_data
from mprun.assembly.task import build_networks
from mprun.config.registry import task_of
from mprun.config.schema import RunConfig
from mprun.data.source import Batch, Source
from mprun.errors import BadInput
from mprun.extensions.bench.cases import Case
from mprun.extensions.bench.runner import in_channels_last, rotating_batches
from mprun.models.lstm import RowTable
from mprun.precision import pin_math_flags

# The numbers of torch.amp.GradScaler, the defaults of every peer's scaler and of scaler=dynamic.
GRAD_SCALER = {
    "init_scale": 2.0**16,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 2000,
}


@dataclass(frozen=True, slots=True)
class PeerTask:
    """A model to train in plain PyTorch terms.

    kind: classification, language_model, gan or reconstruction. networks: FP32 on the device, in
    train mode; one, or generator and discriminator. source: source of real data. held: otherwise
    the rotating batches, on the device. batches_per_epoch: a language model's state starts from
    zero at multiples of it.
    """

    kind: str
    mode: str
    config: RunConfig
    device: torch.device
    networks: tuple[nn.Module, ...]
    source: Source
    held: tuple[Batch, ...]
    batches_per_epoch: int
    samples_per_step: int
    sample: str
    channels_last: bool = False

    @property
    def clip_norm(self) -> float | None:
        return self.config.train.clip_norm

    def batch(self, index: int) -> Batch:
        """Return the batch of a step number (from 0), on the device."""
        if self.held:
            return self.held[index % len(self.held)]
        batch = self.source.train_batch(index)
        return in_channels_last(batch) if self.channels_last else batch

    def weights(self) -> dict[str, torch.Tensor]:
        """Return all parameters by name, a discriminator's after the generator's."""
        return {
            f"{index}.{name}": parameter
            for index, network in enumerate(self.networks)
            for name, parameter in network.named_parameters()
        }

    def in_channels_last(self) -> "PeerTask":
        """Return the same networks and batches of images with NHWC strides."""
        for network in self.networks:
            network.to(memory_format=torch.channels_last)
        return replace(self, channels_last=True, held=tuple(map(in_channels_last, self.held)))

    @property
    def is_convolutional(self) -> bool:
        """Return whether the networks have convolutions: NHWC can help them."""
        return any(isinstance(m, nn.Conv2d) for net in self.networks for m in net.modules())


def set_up(case: Case, device: torch.device) -> PeerTask:
    """Make the task of a case: pin flags and seed like mprun, so that the weights are equal.

    The networks are built in the same order from the same random state. BadInput for settings that
    the peers' loops do not have. case.extra["perturb"]: relative perturbation of the weights
    (`benchmarks.suite.equality`).
    """
    config = case.config(f"device={device.type}")
    kind = task_of(config.model)
    _check(config)
    pin_flags(config)
    # torch warns that its CPU library has no LSTM with projection; its other one is slower.
    warnings.filterwarnings("ignore", message="LSTM with projections")
    torch.manual_seed(config.seed)
    data = build_data(config.data, config.seed, device)
    built = build_networks(config.model, data)
    networks = tuple(network.to(device).train() for network in built)
    if "perturb" in case.extra:
        _perturb(networks, case.extra["perturb"])
    return PeerTask(
        kind,
        case.mode,
        config,
        device,
        tuple(_with_dense_tables(network) for network in networks),
        data,
        () if case.real_data else tuple(rotating_batches(data)),
        data.batches_per_epoch,
        data.samples_per_batch,
        "token" if kind == "language_model" else "image",
    )


def _with_dense_tables(network: nn.Module) -> nn.Module:
    """Let row tables have dense gradients, as in every other tool; keep other networks."""
    for module in network.modules():
        if isinstance(module, RowTable):
            module.sparse = False
    return network


@torch.no_grad()
def _perturb(networks: Iterable[nn.Module], extent: float) -> None:
    """Multiply every weight by 1 + extent * N(0, 1), without touching the global random state."""
    for network in networks:
        for parameter in network.parameters():
            random = torch.Generator(parameter.device).manual_seed(2017)
            noise = torch.empty_like(parameter).normal_(generator=random)
            parameter.mul_(noise.mul_(extent).add_(1.0))


def pin_flags(config: RunConfig) -> None:
    """Set mprun's math flags in a state that torch's older readers of them accept, too.

    If only the per-operator flags are set, `torch.get_float32_matmul_precision` (Lightning) and
    `torch.backends.cudnn.allow_tf32` (Inductor) raise. The older setters bring both forms to the
    same value.
    """
    tf32 = config.precision.fp32_math == "tf32"
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32
    pin_math_flags(config.precision.fp32_math, config.deterministic)
    autotune = {"on": True, "off": False, "auto": not config.deterministic}
    torch.backends.cudnn.benchmark = autotune[config.train.autotune]


def _check(config: RunConfig) -> None:
    """Raise BadInput for settings that mprun has and a peer's loop has not."""
    train, optim, scaler = config.train, config.optim, config.scaler
    plain = {
        "train.accumulate": (train.accumulate, 1),
        "train.clip_modules": (train.clip_modules, []),
        "optim.schedule": (optim.schedule, "constant"),
        "optim.warmup_updates": (optim.warmup_updates, 0),
        "optim.warmup_epochs": (optim.warmup_epochs, 0.0),
        "optim.average_decay": (optim.average_decay, None),
        "precision.overrides": (config.precision.overrides, {}),
    }
    if scaler.kind != "none":
        plain |= {f"scaler.{k}": (getattr(scaler, k), v) for k, v in GRAD_SCALER.items()}
        plain |= {"scaler.kind": (scaler.kind, "dynamic"), "scaler.per": (scaler.per, "shared")}
        plain |= {"scaler.hysteresis": (scaler.hysteresis, 1)}
    for key, (value, allowed) in plain.items():
        if value != allowed:
            raise BadInput(
                f"{key}={value}: must be {allowed} in a benchmark with peers, whose loops know "
                "no other"
            )
