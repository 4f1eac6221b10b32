"""Parameters that a module's own `forward` may multiply by, as linear layers do; and routers.

    self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * inner, width))     and [out, in]

A router chooses the experts of each token. Recipes leave it in the mode's dtype.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import Tensor, nn

from mprun.precision.module_dtypes import caller_of, computes
from mprun.torch_private import holds_codes, parameters_of, places_of

_CONTAINERS = (
    *(nn.Module, nn.Sequential, nn.ModuleList, nn.ModuleDict),
    *(nn.ParameterList, nn.ParameterDict),
)


class OwnWeight(NamedTuple):
    """A parameter: the module that holds it, its name there, and the module that is called."""

    owner: str
    key: str
    caller: str
    tensor: Tensor

    def matrices(self, name: str) -> list[str]:
        """Return a name for each of its matrices: that of the parameter, numbered if several."""
        if self.tensor.dim() == 2:
            return [name]
        return [f"{name}.{number}" for number in range(len(self.tensor))]


def own_weights(model: nn.Module, linears: Iterable[str]) -> dict[str, OwnWeight]:
    """Return name -> matrix, or matrices of experts, that is no weight of a layer of torch's, of
    `linears`, or of a loss."""
    modules, layers = dict(model.named_modules()), {*linears}
    taken = {
        id(own)
        for name, module in modules.items()
        if name in layers or _is_layer(module)
        for own in parameters_of(module).values()
    }
    found = {}
    for name, module in modules.items():
        for key, own in parameters_of(module).items():
            if own is None or id(own) in taken or own.dim() not in (2, 3) or len(own) == 1:
                continue
            if not (holds_codes(own) or own.is_complex()):
                taken.add(id(own))
                caller = name if computes(module) else caller_of(modules, name)
                found[f"{name}.{key}".lstrip(".")] = OwnWeight(name, key, caller, own)
    return found


def _is_layer(module: nn.Module) -> bool:
    """Return whether torch knows what a module computes, or it is a loss of this project's."""
    if getattr(module, "computes_in_fp32", False):
        return True
    kinds = (kind for kind in type(module).__mro__ if kind not in _CONTAINERS)
    return any(kind.__module__.startswith(("torch.nn.", "torchmetrics.")) for kind in kinds)


def routers(model: nn.Module, linears: Iterable[str], weights: Mapping[str, OwnWeight]) -> set[str]:
    """Return the names of the linear layers and weights that choose experts.

    Such a layer is marked by a true `is_router`, or stands beside experts, in the same module or in
    the one around them: it has a row for each expert, or a column, and the width of their input.
    """
    tables = {name: (own.owner, tuple(own.tensor.shape)) for name, own in weights.items()}
    for name in linears:
        module = model.get_submodule(name)
        if (held := held_weight(module)) is not None:
            tables[name] = name, tuple(held.shape)
        elif isinstance(module, nn.Linear):
            tables[name] = name, (module.out_features, module.in_features)
    found = {n for n, (at, _) in tables.items() if _is_marked(model, at)}
    for own in weights.values():
        if own.tensor.dim() != 3:
            continue
        around = own.owner.rpartition(".")[0]
        inside = f"{around}." if around else ""
        count, *widths = own.tensor.shape
        for name, (_, shape) in tables.items():
            if len(shape) == 2 and name.startswith(inside):
                one, other = shape
                if (one == count and other in widths) or (other == count and one in widths):
                    found.add(name)
    return found


def held_weight(module: nn.Module) -> Tensor | None:
    """Return the weight that a module holds; None: it has none, or one that is parametrized.

    To read that one would compute it, and so move the vectors of a spectral norm.
    """
    places = (*places_of(module), module.__dict__)
    return next((own for p in places if isinstance(own := p.get("weight"), Tensor)), None)


def weight_of(module: nn.Module) -> Tensor:
    """Return the weight with which a module has just computed; leave a spectral norm as it is."""
    if (own := held_weight(module)) is not None:
        return own
    norm: nn.Module = module.parametrizations.weight  # type: ignore[union-attr,assignment]
    was_training = norm.training
    try:
        norm.eval()
        return module.weight  # type: ignore[return-value]
    finally:
        norm.train(was_training)


def _is_marked(model: nn.Module, name: str) -> bool:
    return bool(getattr(model.get_submodule(name), "is_router", False))
