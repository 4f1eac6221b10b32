"""The linear layers whose products are `scaled_products`: which they are, and their two passes."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mprun.precision.block_formats import SCALES, Operand
from mprun.precision.delayed_scaling import DelayedScaling
from mprun.precision.module_dtypes import called_in, forward_of
from mprun.precision.own_weights import OwnWeight, held_weight, own_weights, routers
from mprun.precision.scaled_operators import Calls
from mprun.precision.scaled_products import (
    BOTH,
    BY_ROWS,
    TURNED,
    Cast,
    Plan,
    ScaledProducts,
    cast,
    dequantized,
    product,
)
from mprun.precision.weight_products import KEPT_OF_WEIGHTS, Multiply, noting, with_weights
from mprun.torch_private import holds_codes


class _Linear(torch.autograd.Function):
    """x @ weight.T for x with any number of dimensions. A second derivative raises RuntimeError."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, plan: Plan, kept: Tensor | None, counted_by: int
    ) -> Tensor:
        rows = x.reshape(-1, x.size(-1))
        ctx.plan, ctx.kept, ctx.shape, ctx.counted_by = plan, kept, x.shape, counted_by
        # `x` and `weight`, or tensors of their casts.
        kept_x: tuple[Tensor | None, ...] = (rows,)
        kept_weight: tuple[Tensor | None, ...] = (weight,)
        if plan.output is None:
            found = rows @ weight.t()
        else:
            layouts = [BOTH if k else BY_ROWS for k in (plan.keeps_input, plan.keeps_weight)]
            own = cast(rows, plan.output[0], layouts=layouts[0], kept=kept)
            other = cast(weight, plan.output[1], layouts=layouts[1], kept=kept)
            # `other.T` has rows: a right operand reads what is turned, here the rows of `other`.
            found = _stored(own, other.T, x.dtype, counted_by, fast=True)
            kept_x = own.kept.tensors if plan.keeps_input else kept_x
            kept_weight = other.kept.tensors if plan.keeps_weight else kept_weight
        ctx.save_for_backward(*kept_x, *kept_weight)
        return found.view(*x.shape[:-1], weight.size(0))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError("products with casts have no second derivative (create_graph=True)")
        plan, kept, dtype = ctx.plan, ctx.kept, gradient.dtype
        rows = gradient.reshape(-1, gradient.size(-1))
        saved = ctx.saved_tensors  # a checkpoint returns them only once
        cut = 4 if plan.keeps_input else 1
        x, weight = saved[0], saved[cut]
        if not plan.keeps_input and ctx.needs_input_grad[1]:
            x = dequantized(x, plan.decoded_input, kept)
        if not plan.keeps_weight and ctx.needs_input_grad[0]:
            weight = dequantized(weight, plan.decoded_weight, kept)
        grad_x = grad_weight = of_gradient = None
        if ctx.needs_input_grad[0]:
            if plan.grad_input is None:
                grad_x = rows @ weight.to(dtype)
            else:
                left, right = plan.grad_input
                other = _right(right, plan.keeps_weight, [weight, *saved[cut + 1 :]], kept)
                layouts = BOTH if plan.keeps_gradient else BY_ROWS
                of_gradient = cast(rows, left, layouts=layouts, kept=kept)
                grad_x = _stored(of_gradient, other, dtype, ctx.counted_by)
            grad_x = grad_x.view(ctx.shape)
        if ctx.needs_input_grad[1]:
            if plan.grad_weight is None:
                grad_weight = rows.t() @ x.to(dtype)
            else:
                left, right = plan.grad_weight
                own = _right(right, plan.keeps_input, [x, *saved[1:cut]], kept)
                if of_gradient is None or not plan.keeps_gradient:
                    of_gradient = cast(rows, left, 0, TURNED, kept)
                grad_weight = _stored(of_gradient.T, own, dtype, ctx.counted_by)
        return grad_x, grad_weight, None, None, None


def _right(operand: Operand, is_kept: bool, saved: Sequence[Any], kept: Tensor | None) -> Cast:
    """Return the right operand of a backward product, from a cast of the forward one or anew."""
    return Cast.of_square(operand, saved) if is_kept else cast(saved[0], operand, 0, TURNED, kept)


def _stored(a: Cast, b: Cast, dtype: torch.dtype, counted_by: int, fast: bool = False) -> Tensor:
    # cuBLAS stores products with scales by row in BF16 only.
    of_rows = a.block is None and a.factor.dim() == 2 and a.values.is_floating_point()
    stored = torch.bfloat16 if of_rows else dtype
    return product(a, b, stored, fast, counted_by).to(dtype)


# Attribute of a layer: its numbers of delayed scaling. Of an attribute a compiler asks for the form
# alone, so equal layers have one graph.
KEPT = "_mprun_kept"


def _forward(
    module: nn.Module, plan: Plan, counted_by: int, x: Tensor, table: Tensor | None = None
) -> Tensor:
    """Compute as `module(x)`, or as a tied layer's `module(x, table)`."""
    weight = module.weight if table is None else table.to(x.dtype)
    bias: Tensor | None = getattr(module, "bias", None)
    assert isinstance(weight, Tensor)
    return _product(module, plan, counted_by, x, weight, bias, getattr(module, KEPT, None))


def _product(
    module: nn.Module,
    plan: Plan,
    counted_by: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    kept: Tensor | None,
) -> Tensor:
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
    if not x.numel():  # no largest magnitude; the product has no rows, its gradients are zeros
        return nn.functional.linear(x, weight, None if bias is None else bias.to(x.dtype))
    if kept is not None and not (module.training or torch.is_grad_enabled()):
        kept = kept.clone()  # an evaluation leaves the scales alone
    found: Tensor = _Linear.apply(x, weight, plan, kept, counted_by)
    return found if bias is None else found + bias.to(found.dtype)


def install(
    model: nn.Module,
    products: ScaledProducts,
    chosen: Collection[str],
    mode: str = "",
    calls: Calls | None = None,
    unmet: dict[str, float] | None = None,
) -> DelayedScaling | None:
    """Let what `chosen_products` names compute so, or raise its errors; `calls` count products.

    unmet: gets the share of the model's parameters in each weight that no product has met so far.

    Returns what the layers keep from update to update, or None.
    """
    names, weights = chosen_products(model, products, chosen, mode)
    is_kept = SCALES[products.scale].is_kept
    delayed = _delayed(model, products, names, weights) if is_kept else None
    device, number = next(model.parameters()).device, 0 if calls is None else calls.number
    inside: dict[str, list[tuple[nn.Module, str, Multiply]]] = {}
    total, unmet = sum(own.numel() for own in model.parameters()), {} if unmet is None else unmet
    for name, own in weights.items():
        owner, plan = model.get_submodule(own.owner), products.plan(name, device)
        unmet[name] = own.tensor.numel() / total
        multiply = partial(noting, unmet, name, partial(_product, owner, plan, number))
        inside.setdefault(own.caller, []).append((owner, own.key, multiply))
        if delayed is not None:
            _keep(owner, own.key, [delayed.layers[one] for one in own.matrices(name)])
    for name in names:
        module = model.get_submodule(name)
        plan = products.plan(name, device)
        own = module.__dict__.get("forward", type(module).forward)
        is_plain = getattr(own, "__func__", own) is nn.Linear.forward
        if is_plain or not isinstance(module, nn.Linear):
            module.__dict__["forward"] = partial(_forward, module, plan, number)
        else:
            multiply = partial(_product, module, plan, number)
            inside.setdefault(name, []).append((module, "weight", multiply))
            if delayed is not None:
                _keep(module, "weight", [delayed.layers[name]])
        if delayed is not None:
            module.__dict__[KEPT] = delayed.layers[name]
    for name, held in inside.items():
        module = model.get_submodule(name)
        module.__dict__["forward"] = partial(with_weights, forward_of(module), tuple(held))
    return delayed


def _keep(owner: nn.Module, key: str, kept: Sequence[Tensor]) -> None:
    owner.__dict__[KEPT_OF_WEIGHTS] = {**getattr(owner, KEPT_OF_WEIGHTS, {}), key: kept}


def _delayed(
    model: nn.Module,
    products: ScaledProducts,
    layers: Sequence[str],
    weights: Mapping[str, OwnWeight],
) -> DelayedScaling | None:
    plain = (0, 0), products.scale, products.scale_rounding, False, False
    pairs = (pair for pair in products.plan()[:3] if pair is not None)
    if any(own != Operand(own.element, *plain, place=own.place) for p in pairs for own in p):
        must = "granularity=tensor, e4m3 or e5m2 to nearest, nothing turned"
        raise ValueError(f"precision.matmul.scale={products.scale}: needs {must}")
    names = [*layers, *(one for name, own in weights.items() for one in own.matrices(name))]
    return DelayedScaling(names, products, next(model.parameters()).device) if names else None


def _is_linear(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return False
    if isinstance(module, nn.Linear):
        return (own := held_weight(module)) is None or not holds_codes(own)
    return getattr(module, "is_linear", False)


def chosen_layers(
    model: nn.Module, products: ScaledProducts, chosen: Collection[str], mode: str = ""
) -> list[str]:
    """Return the names of the layers of `chosen_products`."""
    return chosen_products(model, products, chosen, mode)[0]


def linear_layers(model: nn.Module) -> list[str]:
    """Return the names of all linear layers.

    Linear is an `nn.Linear`, and a module with a true `is_linear`, whose `forward(x, table)` is a
    product with the table of another module. Layers with quantised weights multiply by themselves.
    """
    return [name for name, module in model.named_modules() if _is_linear(module)]


def chosen_products(
    model: nn.Module, products: ScaledProducts, chosen: Collection[str], mode: str = ""
) -> tuple[list[str], dict[str, OwnWeight]]:
    """Return the linear layers, and the `own_weights` of modules, that multiply as `products` say.

    Each glob pattern over names of both adds some, in order; one with "!" before it takes some
    out, and as the first one begins with all. One that matches none means those inside of
    the modules that it matches. "!last 15%" takes out those in the last 15 %
    of numbered blocks, rounded up: "blocks.11" is one. A pattern with a wildcard leaves out the
    `marked_outputs`; without any, the last module of the network, if it is linear. It leaves out
    `routers`, too, unless it matches nothing else. ValueError if a pattern matches none, or none
    is left; overrides may leave none.

    chosen: names of modules with a dtype of their own. mode: its name, if an error is to name it.
    """
    key, formats = "precision.matmul.modules", "/".join(f.name.upper() for f in products.formats)
    linears = linear_layers(model)
    weights = own_weights(model, linears)
    names = _in_order(model, linears, weights)
    if not names:
        asked = f"precision={mode}: " if mode else ""
        raise ValueError(
            f"{asked}linear layers of the mode multiply in {formats}, but the model has none "
            "(allowed: modes in 16 or 32 bits)"
        )
    everything = [*dict(model.named_modules())]
    outputs = output_layers(model)
    choosing = routers(model, linears, weights)
    left = {name: name for name in [*outputs, *choosing]}
    left |= {n: own.owner for n, own in weights.items() if own.owner in outputs and own.owner}
    patterns = products.modules
    if all(pattern.startswith("!") for pattern in patterns[:1]):
        patterns = ("*", *patterns)
    found: dict[str, None] = {}
    for pattern in patterns:
        plain = pattern.removeprefix("!")
        matched = _last_blocks(names, plain)
        if matched is None:
            matched = [name for name in names if fnmatchcase(name, plain)]
            if not matched:
                around = [f"{own}." for own in everything if own and fnmatchcase(own, plain)]
                matched = [name for name in names if name.startswith(tuple(around))]
        if not matched:
            known = ", ".join(names[:3])
            raise ValueError(f"{key}: {pattern!r} matches no nn.Linear; the model has {known}")
        if plain != pattern:
            found = {name: None for name in found if name not in matched}
        else:
            named = choosing if choosing.issuperset(matched) else ()
            found |= {
                name: None
                for name in matched
                if name not in left or pattern in (name, left[name]) or name in named
            }
    if not found:
        why = f"{outputs[-1]}, the output layer, has to be named"
        if not outputs[-1]:
            why = "the model is one layer, its output, which has no name"
        if names != outputs and any(pattern.startswith("!") for pattern in patterns):
            why = "patterns with ! take all of them out"
        none = f"no nn.Linear is left to compute in {formats}; {why}"
        raise ValueError(f"{key}={list(products.modules)}: {none}")
    return (
        [name for name in found if name not in weights and name not in chosen],
        {n: weights[n] for n in found if n in weights and weights[n].caller not in chosen},
    )


def _in_order(model: nn.Module, linears: list[str], weights: Iterable[str]) -> list[str]:
    """Return the names of both in the order of the model's modules."""
    order = {name: place for place, name in enumerate(dict(model.named_modules()))}
    owners = {name: name.rpartition(".")[0] for name in weights}
    return sorted([*linears, *weights], key=lambda name: order[owners.get(name, name)])


def marked_outputs(model: nn.Module) -> list[str]:
    """Return the names of the output layers that a network marks, with a true `is_output`."""
    return [name for name, own in model.named_modules() if getattr(own, "is_output", False)]


def output_layers(model: nn.Module) -> list[str]:
    """Return the `marked_outputs`; without any, the last module of the network, or of each of
    several that a container holds."""
    found = []
    for name, own in called_in("", model).items():
        inside = marked_outputs(own) or [*dict(own.named_modules())][-1:]
        found += [".".join(filter(None, (name, output))) for output in inside]
    return found


def _last_blocks(names: list[str], pattern: str) -> list[str] | None:
    """Return the layers in the last blocks if the pattern is "last 15%", else None."""
    if "%" not in pattern and not pattern.startswith("last "):
        return None
    share = re.fullmatch(r"last ([1-9]\d?|100)%", pattern)
    if share is None:
        must = "must be of the form '!last 15%', from 1 to 100"
        raise ValueError(f"precision.matmul.modules: '!{pattern}': {must}")
    found = {name: re.match(r"(.*?\.)?\d+(?=\.|$)", name) for name in names}
    blocks = list(dict.fromkeys(own[0] for own in found.values() if own))
    kept = blocks[: len(blocks) * (100 - int(share[1])) // 100]
    return [name for name, own in found.items() if own and own[0] not in kept]
