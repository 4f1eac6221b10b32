"""Which parameters an optimizer treats alike: weights, biases, parameters of norm layers.

Caffe gives each bias twice the rate and no weight decay (`lr_mult: 2, decay_mult: 0` in its
AlexNet); recipes for ResNet-50 since Goyal et al. (arXiv 1706.02677, section 5.1) leave the
parameters of BatchNorm out of the decay.
"""

from collections.abc import Collection, Iterable

from torch import Tensor, nn

from mprun.precision.casting import NORM_LAYERS


def norm_parameter_names(module: nn.Module) -> frozenset[str]:
    """Names, as in `named_parameters`, of the parameters that belong to norm layers."""
    return frozenset(
        f"{layer_name}.{name}" if layer_name else name
        for layer_name, layer in module.named_modules()
        if isinstance(layer, NORM_LAYERS)
        for name, _ in layer.named_parameters(recurse=False)
    )


def is_bias(name: str) -> bool:
    """Whether a parameter's name is that of a bias: bias, bias_ih_l0, in_proj_bias."""
    own = name.rpartition(".")[2]
    return own.startswith("bias") or own.endswith("bias")


def parameter_groups(
    named: Iterable[tuple[str, Tensor]],
    norm_names: Collection[str],
    *,
    lr: float,
    weight_decay: float,
    bias_lr_factor: float = 1.0,
    decay_bias: bool = True,
    decay_norm: bool = True,
) -> list[dict]:
    """Groups for a torch optimizer: params, lr, weight_decay, and lr_factor for later rates.

    A bias has the rate lr * bias_lr_factor, and the decay only with decay_bias; a parameter in
    norm_names has the rate lr, and the decay only with decay_norm (its shift is no bias here).
    Parameters with the same rate and decay share a group in the order given, so that an
    optimizer without such differences has the one group that it would have without this
    function.
    """
    groups: dict[tuple[float, float], list[Tensor]] = {}
    for name, tensor in named:
        factor, decays = 1.0, True
        if name in norm_names:
            decays = decay_norm
        elif is_bias(name):
            factor, decays = bias_lr_factor, decay_bias
        groups.setdefault((factor, weight_decay if decays else 0.0), []).append(tensor)
    return [
        {"params": tensors, "lr": lr * factor, "weight_decay": decay, "lr_factor": factor}
        for (factor, decay), tensors in groups.items()
    ]
