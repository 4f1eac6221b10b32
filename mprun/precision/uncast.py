"""One line on what a mode of products leaves in another dtype, said when a model is prepared."""

import re
from collections import Counter
from typing import NamedTuple

import torch
from torch import nn

from mprun.precision.module_dtypes import Chosen
from mprun.precision.own_weights import own_weights, routers
from mprun.precision.policy import DTYPE_NAMES, PrecisionPolicy
from mprun.precision.scaled_linear import chosen_products, linear_layers, output_layers
from mprun.torch_private import parameters_of

_NEARLY_ALL = 0.9  # of the weights; then nothing is said


class _Kind(NamedTuple):
    dtype: torch.dtype
    why: str


def what_stays(model: nn.Module, policy: PrecisionPolicy, chosen: Chosen) -> str | None:
    """Return a line if the products of less than nine tenths of a model's weights are cast.

    Weights are parameters with two dimensions or more. Tables that are read by rows have no
    product. Equal blocks count as one part of the model.

    chosen: the overrides of modules.
    """
    products = policy.matmul
    if products is None:
        return None
    layers, own = chosen_products(model, products, chosen, policy.name)
    linears, outputs = linear_layers(model), output_layers(model)
    inside = own_weights(model, linears)
    choosing = routers(model, linears, inside)
    usual = policy.autocast_dtype or policy.param_dtype
    cast, sizes, left = 0, Counter[tuple[str, _Kind]](), dict[tuple[str, _Kind], list[str]]()
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            continue
        for own_name, tensor in parameters_of(module).items():
            if tensor is None or tensor.dim() < 2:
                continue
            part = f"{name}.{own_name}".lstrip(".")
            if name in layers or part in own:
                cast += tensor.numel()
                continue
            dtype = chosen[name].dtype if name in chosen else usual
            if name in choosing or part in choosing:
                why = "a router"
            elif name in chosen:
                why = "an override"
            elif name not in linears and part not in inside:
                why = f"{type(module).__name__} is no linear layer"
            elif name in outputs:
                why = "an output layer, which precision.matmul.modules has to name"
            else:
                why = "precision.matmul.modules leaves it out"
            alike = re.sub(r"(?<![^.])\d+(?![^.])", "*", part)
            key = alike, _Kind(dtype, why)
            sizes[key] += tensor.numel()
            left.setdefault(key, []).append(part)
    total = cast + sizes.total()
    if not sizes or cast >= _NEARLY_ALL * total:
        return None
    [((alike, kind), size)] = sizes.most_common(1)
    first, *others = left[alike, kind]
    stays = f"{alike if others else first} ({percent(size, total)})"
    return (
        f"{policy.name} casts the products of {percent(cast, total)} of the weights; {stays} "
        f"{'stay' if others else 'stays'} in {DTYPE_NAMES[kind.dtype]}: {kind.why}"
    )


def percent(part: int, whole: int) -> str:
    """Return a share as text, "31 %"."""
    share = 100 * part / whole
    return f"{share:.0f} %" if share >= 1 or not part else f"{share:.1g} %"
