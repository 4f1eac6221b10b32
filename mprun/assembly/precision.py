"""Policies, loss scales and optimizers from configurations.

Weights, biases and parameters of norm layers are groups of an optimizer if the configuration treats
them differently. Caffe gives each bias twice the rate and no weight decay (`lr_mult: 2, decay_mult:
0` in its AlexNet). Recipes for ResNet-50 since Goyal et al. (arXiv 1706.02677, section 5.1) leave
the parameters of BatchNorm out of the decay.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, fields
from inspect import signature
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from mprun.assembly.data import arguments_of
from mprun.config import schema
from mprun.config.option_files import mode_values
from mprun.entry_points import loaded
from mprun.errors import BadInput
from mprun.precision import LossScale, PrecisionPolicy
from mprun.precision.module_dtypes import NORM_LAYERS
from mprun.precision.scaled_linear import marked_outputs
from mprun.precision.torch_update import STATE, has_fused_kernel
from mprun.prepared.shards import is_shard


def policy_from(config: schema.PrecisionConfig) -> PrecisionPolicy:
    return loaded(config.component.builder)(config.name, mode_values(config))


def build_loss_scale(config: schema.ScalerConfig, device: torch.device) -> LossScale:
    """Build a fresh loss scale of the configured kind."""
    make = loaded(config.component.builder)
    return make(**_set_of(make, config), device=device)


def _set_of(make: Callable, config: schema.ScalerConfig | schema.OptimConfig) -> dict[str, Any]:
    """Return the arguments of `make` that are set."""
    known = ((own.name, getattr(config, own.name)) for own in fields(config))
    return arguments_of(make, SimpleNamespace(**{k: v for k, v in known if v is not None}))


def adagrad(
    groups: list[dict], *, eps: float, initial_accumulator: float, fused: bool, foreach: bool
) -> torch.optim.Adagrad:
    """Build torch's Adagrad, whose settings have the names of the schema here."""
    return torch.optim.Adagrad(
        groups, eps=eps, initial_accumulator_value=initial_accumulator, fused=fused, foreach=foreach
    )


def optimizer_maker(
    config: schema.OptimConfig, policy: PrecisionPolicy, device: torch.device, module: nn.Module
) -> Callable[[list[tuple[str, Tensor]]], torch.optim.Optimizer]:
    """Return a function from the (name, tensor) pairs of `module` to a torch optimizer.

    implementation "auto" means the fused kernel, unless the update itself is in 16 bits. A fused
    kernel would compute that in FP32 registers (and torch's fused SGD does not update half
    parameters on a CPU at all).
    """
    implementation = config.implementation
    build = loaded(config.component.builder)
    taken = signature(build).parameters
    without = f"(allowed: auto, {'foreach, ' * ('foreach' in taken)}loop)"
    if implementation == "foreach" and "foreach" not in taken:
        form = "optim.implementation=foreach"
        raise BadInput(f"{form}: {config.name} has no foreach implementation {without}")
    fused = config.name in STATE and has_fused_kernel(config.name, device)
    if why := _why_unfused(config, module):
        if implementation == "fused":
            raise BadInput(f"optim.implementation=fused: {why} {without}")
        fused = False
    if implementation == "auto":
        in_16_bits = policy.masters == "none" and policy.param_dtype.itemsize == 2
        implementation = "fused" if fused and not in_16_bits else "foreach"
    elif implementation == "fused" and not fused:
        none = f"torch {torch.__version__} has no fused {config.name} on {device.type}"
        raise BadInput(f"optim.implementation=fused: {none} {without}")
    norm_names = norm_parameter_names(module)
    matrices = hidden_matrices(module) if config.component.of_matrices else frozenset()
    if config.component.of_matrices and not matrices:
        others = ", ".join(name for name, own in schema.OPTIMIZERS.items() if not own.of_matrices)
        none = f"optim.name={config.name}: the network has no hidden matrix"
        raise BadInput(f"{none} (allowed: {others})")
    how = {
        "fused": implementation == "fused",
        "foreach": implementation == "foreach",
        # The formula that counts updates on the device; it rounds differently. In all runs on CUDA,
        # since a scaler that skips needs it, and a comparison of scalers must not change it.
        "capturable": device.type == "cuda",
    }
    settings = {name: v for name, v in how.items() if name in taken} | _set_of(build, config)
    if "betas" in settings:
        settings["betas"] = tuple(settings["betas"])

    def make(named: list[tuple[str, Tensor]]) -> torch.optim.Optimizer:
        rates = Rates(**arguments_of(Rates, config))
        return build(parameter_groups(named, rates, norm_names, matrices), **settings)

    return make


def _why_unfused(config: schema.OptimConfig, module: nn.Module) -> str | None:
    """Return what torch's fused kernels refuse in the network; BadInput if all kernels do."""
    for name, layer in module.named_modules():
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse:
            allowed = "sgd or adagrad without weight decay; or sparse=False in the network"
            is_dense = config.name not in ("sgd", "adagrad")
            if is_dense or config.weight_decay:
                key = f"name={config.name}" if is_dense else f"weight_decay={config.weight_decay}"
                none = f"torch has none for sparse gradients, as {name} has"
                raise BadInput(f"optim.{key}: {none} (allowed: {allowed})")
            return f"{name} has sparse gradients, which no fused kernel takes"
    for name, parameter in module.named_parameters():
        if is_shard(parameter) and config.name not in ("adam", "adamw"):
            return f"torch's fused {config.name} takes no shards (dist.engine=fsdp)"
        if parameter.is_complex():
            return f"{name} is complex, which no fused kernel takes"
    return None


def norm_parameter_names(module: nn.Module) -> frozenset[str]:
    """Return the names, as in `named_parameters`, of the parameters of norm layers."""
    return frozenset(
        f"{layer_name}.{name}" if layer_name else name
        for layer_name, layer in module.named_modules()
        if isinstance(layer, NORM_LAYERS)
        for name, _ in layer.named_parameters(recurse=False)
    )


def hidden_matrices(module: nn.Module) -> frozenset[str]:
    """Return the names of the trained 2-D weights that are no gain, no embedding and not of an
    output layer: the `marked_outputs`, else the last module with parameters of its own."""
    *_, last = (own for own in module.modules() if any(True for _ in own.parameters(recurse=False)))
    outputs = [module.get_submodule(name) for name in marked_outputs(module)] or [last]
    kinds = (nn.Embedding, nn.EmbeddingBag, *NORM_LAYERS)
    ends = [*outputs, *(own for own in module.modules() if isinstance(own, kinds))]
    outside = {id(own) for end in ends for own in end.parameters()}
    return frozenset(
        name
        for name, own in module.named_parameters()
        if own.dim() == 2 and own.requires_grad and not own.is_complex() and id(own) not in outside
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The rate and the decay of a weight, and in what others differ.

    A bias has the rate lr * bias_lr_factor, and the decay only with decay_bias. A parameter of a
    norm layer has the rate lr, and the decay only with decay_norm (its shift is no bias here).
    Where hidden matrices are moved as such, adamw_lr_factor is the rate of all others over theirs.
    """

    lr: float
    weight_decay: float
    bias_lr_factor: float = 1.0
    decay_bias: bool = True
    decay_norm: bool = True
    adamw_lr_factor: float | None = None


def parameter_groups(
    named: Iterable[tuple[str, Tensor]],
    rates: Rates,
    norm_names: Collection[str],
    matrices: Collection[str] = (),
) -> list[dict]:
    """Build groups for a torch optimizer: params, lr, weight_decay, and lr_factor for later rates.

    Parameters with the same rate and decay share a group, in the given order; those in `matrices`
    have groups of their own (`mprun.precision.muon`). So an optimizer without such differences has
    the same single group as without this function.

    norm_names: of the parameters of norm layers.
    """
    groups: dict[tuple[float, float, bool], list[Tensor]] = {}
    for name, tensor in named:
        factor, decays = 1.0, True
        own = name.rpartition(".")[2]
        if name in norm_names:
            decays = rates.decay_norm
        elif own.startswith("bias") or own.endswith("bias"):  # bias_ih_l0, in_proj_bias
            factor, decays = rates.bias_lr_factor, rates.decay_bias
        if name not in matrices:
            factor *= rates.adamw_lr_factor or 1.0
        key = factor, rates.weight_decay if decays else 0.0, name in matrices
        groups.setdefault(key, []).append(tensor)
    return [
        {"params": tensors, "lr": rates.lr * factor, "weight_decay": decay, "lr_factor": factor}
        | ({"matrices": True} if is_matrix else {})
        for (factor, decay, is_matrix), tensors in groups.items()
    ]
