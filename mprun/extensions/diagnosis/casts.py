"""Measure what casts of a mode's products lose in real steps, whom they suit, what may help.

`CastMeter` casts the operands of each product along its sum, as a layer in the asked formats would
(`mprun.precision.scaled_products`), and multiplies them. No step computes with these casts.
`verdicts` says of each layer whether they suit it; all that is printed follows from it.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple, Self

from torch import Tensor, nn

from mprun.assembly import policy_from
from mprun.config.schema import MatmulConfig, PrecisionConfig
from mprun.extensions.diagnosis.cast_losses import (
    Casted,
    CastLoss,
    casted,
    loss_from,
    losses_of,
)
from mprun.numerics.probe import plainly
from mprun.precision import DTYPES, weight_products
from mprun.precision.block_formats import SCALES
from mprun.precision.module_dtypes import chosen_dtypes, forward_of, those_that_match
from mprun.precision.own_weights import weight_of
from mprun.precision.scaled_linear import KEPT, chosen_products
from mprun.precision.scaled_products import PRODUCTS, ScaledProducts
from mprun.precision.weight_products import Multiply, noting, with_weights
from mprun.torch_private import graph_task

# Tiny networks that are healthy are off by at most 2.1 %, those with an outlier, or a gradient of
# logits in 4 bits, by 5.5 % or more (seed 0): docs/explain.md.
OFF_THRESHOLD = 0.035
# Product and operand -> the dimension along which the product adds up.
ALONG = {
    ("output", "input"): -1,
    ("output", "weight"): -1,
    ("grad_input", "grad_output"): -1,
    ("grad_input", "weight"): 0,
    ("grad_weight", "grad_output"): 0,
    ("grad_weight", "input"): 0,
}
Place = tuple[str, str]  # product, operand
Losses = Mapping[str, Mapping[Place, "CastLoss"]]  # by name of the layer
_FINEST = 16  # numbers in a block
_TURNS = 4  # layers that are left out each alone


class CastMeter:
    """Measure the casts of linear layers, and of products with parameters, inside the block.

    A measured step keeps the inputs of these products until its backward pass. Of products larger
    than 512 x 512 so many rows and columns are multiplied, evenly spaced. The experts of one
    parameter count as one layer.

    mode: its matmul names formats and layers; the task may compute in any. every: a step divisible
    by it, from 1, is measured. early: so is each other one up to this step. loss_scale: multiplies
    gradients, of a task without it. ValueError: as of `chosen_products`. Layers of equal names, in
    several networks, count as one, as for patterns. With scale delayed a layer's own scales are
    taken; one that has none, as in FP32, is measured with scale fp32, of the tensor itself.
    """

    def __init__(
        self,
        task: Any,
        mode: PrecisionConfig,
        every: int = 1,
        *,
        early: int = 0,
        loss_scale: float = 1.0,
    ):
        policy = policy_from(mode)
        self.task, self.every, self.matmul = task, every, policy.matmul or ScaledProducts()
        self.early, self.loss_scale = early, loss_scale
        self.dtype = policy.autocast_dtype or policy.param_dtype
        self.names: list[str] = []  # of layers and parameters, those of several networks too
        self._layers: list[tuple[str, nn.Module]] = []
        # The module in whose forward products with its parameters are: they, and their names.
        self._inside: list[tuple[nn.Module, list[tuple[nn.Module, str, Multiply]]]] = []
        dtypes = {pattern: DTYPES[name] for pattern, name in mode.overrides.items()}
        for learner in task.learners.values() if policy.matmul else ():
            model = learner.model
            own = {pattern: dtypes[pattern] for pattern in those_that_match(model, dtypes)}
            chosen = chosen_dtypes(model, own, "precision.overrides")
            names, weights = chosen_products(model, self.matmul, chosen, policy.name)
            self.names += [*names, *weights]
            self._layers += [(name, model.get_submodule(name)) for name in names]
            held: dict[str, list[tuple[nn.Module, str, Multiply]]] = {}
            for name, one in weights.items():
                multiply = partial(noting, {}, name, _multiplied)
                held.setdefault(one.caller, []).append(
                    (model.get_submodule(one.owner), one.key, multiply)
                )
            self._inside += [(model.get_submodule(name), those) for name, those in held.items()]
        self._sums: dict[tuple[str, Place], Tensor] = {}
        self._left = ExitStack()

    def __enter__(self) -> Self:
        for name, module in self._layers:
            handle = module.register_forward_hook(partial(self._on_output, name))
            self._left.callback(handle.remove)
        for module, held in self._inside:
            # A mode that casts these products has functions of its own inside, which meet them.
            own = module.__dict__.get("forward")
            module.__dict__["forward"] = partial(with_weights, forward_of(module), tuple(held))
            self._left.callback(_put_back, module, own)
        if self._inside:
            weight_products.observer = self._on_product
            self._left.callback(setattr, weight_products, "observer", None)
        return self

    def __exit__(self, *error: object) -> None:
        self._left.close()

    def read(self) -> dict[str, dict[Place, CastLoss]]:
        """Return layer -> place -> what was measured; waits for the device."""
        found: dict[str, dict[Place, CastLoss]] = {}
        for (name, place), sums in self._sums.items():
            found.setdefault(name, {})[place] = loss_from(sums.tolist())
        return found

    def _on_output(self, name: str, module: nn.Module, inputs: tuple, output: Tensor) -> None:
        (weight,) = inputs[1:] or (weight_of(module),)  # of a tied layer, or its own
        self._on_product(getattr(module, KEPT, None), name, inputs[0], weight, output)

    def _on_product(
        self, kept: Tensor | None, name: str, inputs: Tensor, weight: Tensor, output: Tensor
    ) -> None:
        step = self.task.step + 1
        due = step % self.every == 0 or (step % 2 == 0 and step <= self.early)
        # Not a block that is computed anew.
        if not due or not output.requires_grad or graph_task() != -1:
            return
        if not inputs.numel():  # an expert without rows
            return
        has_gradient, x, w = inputs.requires_grad, inputs.detach(), weight.detach()
        self._add(name, kept, "output", x, w)

        def on_gradient(gradient: Tensor) -> None:
            if has_gradient:
                self._add(name, kept, "grad_input", gradient, w)
            self._add(name, kept, "grad_weight", gradient, x)

        output.register_hook(on_gradient)

    def _add(self, name: str, kept: Tensor | None, product: str, *tensors: Tensor) -> None:
        if product in self.matmul.high_precision:
            return
        with plainly():
            left, right = (
                self._casted(name, kept, (product, operand), tensor)
                for operand, tensor in zip(PRODUCTS[product], tensors, strict=True)
            )
            sums_of_both = losses_of(left, right, by_size=product == "grad_input")
            for operand, sums in zip(PRODUCTS[product], sums_of_both, strict=True):
                key = name, (product, operand)
                self._sums[key] = self._sums.get(key, 0) + sums

    def _casted(self, name: str, kept: Tensor | None, place: Place, tensor: Tensor) -> Casted:
        matrix = tensor.detach().flatten(0, -2)
        if place[1] == "grad_output":
            matrix = matrix * self.loss_scale
        # Random bits of another name: the layer's own stay as they are.
        how = self.matmul.operand(place[1], place[0], f"measured {name}")
        if kept is None and SCALES[how.scale].is_kept:
            how = how._replace(scale="fp32")
        return casted(matrix.to(self.dtype), how, ALONG[place], kept)


def _multiplied(x: Tensor, weight: Tensor, bias: Tensor | None, kept: Tensor | None) -> Tensor:
    return nn.functional.linear(x, weight, bias)


def _put_back(module: nn.Module, forward: Any) -> None:
    """Give a module the forward of its own back that it had, or its class's for None."""
    if forward is None:
        del module.__dict__["forward"]
    else:
        module.__dict__["forward"] = forward


class Verdict(NamedTuple):
    """The one verdict on a layer: of which operand's cast a product is furthest off."""

    name: str
    place: Place
    loss: CastLoss

    @property
    def suits(self) -> bool:
        return self.loss.rank <= OFF_THRESHOLD


def _rank(one: Verdict) -> float:
    return one.loss.rank


def verdicts(losses: Losses) -> list[Verdict]:
    """Judge each layer, the worst first."""
    each = [[Verdict(name, *one) for one in own.items()] for name, own in losses.items()]
    return sorted((max(own, key=_rank) for own in each), key=_rank, reverse=True)


def unsuited(losses: Losses, bound: float = OFF_THRESHOLD) -> list[str]:
    """Return the layers that the casts do not suit, the worst first."""
    return [one.name for one in verdicts(losses) if one.loss.rank > bound]


def without_layers(modules: Iterable[str], layers: Iterable[str], out: list[str]) -> list[str]:
    """Return the patterns `modules` and those with "!" that take out `out` of all `layers`.

    One pattern stands for a layer of all numbered blocks, if all of these go.
    """
    found: dict[str, None] = {}
    for name in out:
        alike = ".".join("*" if part.isdigit() else part for part in name.split("."))
        whole = all(own in out for own in layers if fnmatchcase(own, alike))
        found[f"!{alike if whole else name}"] = None
    return [*(pattern for pattern in modules if pattern not in out), *found]


def typed(patterns: Iterable[str]) -> str:
    """Return a list as typed on a command line, between single quotes."""
    plain = (p if p.replace(".", "").replace("_", "").isalnum() else f'"{p}"' for p in patterns)
    return f"[{','.join(plain)}]"


@dataclass(frozen=True, slots=True)
class CastAdvice:
    """The losses of the casts of a mode, and the layers that it should leave out.

    mode: its overrides as typed. overrides: the same without the layers in `excluded`; empty if no
    layer is left. steps: how many were measured.
    """

    mode: list[str]
    matmul: MatmulConfig
    steps: int
    losses: Losses
    excluded: list[str]
    overrides: list[str]
    command: str = ""

    def as_dict(self) -> dict[str, Any]:
        layers = {
            name: {f"{operand} of {product}": loss.as_dict() for (product, operand), loss in own}
            for name, own in ((name, found.items()) for name, found in self.losses.items())
        }
        chosen = {key: getattr(self, key) for key in ("mode", "excluded", "overrides", "command")}
        return {"threshold": OFF_THRESHOLD, "steps": self.steps, "layers": layers} | chosen


def cast_advice(losses: Losses, matmul: MatmulConfig, mode: list[str], steps: int) -> CastAdvice:
    """Judge the measured layers; mode: overrides without those of matmul.modules."""
    out, modules = unsuited(losses), matmul.modules
    kept = without_layers(modules, losses, out) if out else modules
    named = [f"precision.matmul.modules={typed(kept)}"] if kept != ["*"] else []
    overrides = [*mode, *named] if len(out) < len(losses) else []
    return CastAdvice(mode, matmul, steps, losses, out, overrides)


def cast_changes(
    matmul: MatmulConfig, losses: Losses, bound: float = OFF_THRESHOLD
) -> Iterator[dict[str, Any]]:
    """Yield overrides, key -> value, that may cure what these casts lose, smallest first.

    bound: of layers that are further off than this.
    """
    key, out = "precision.matmul", unsuited(losses, bound)
    places = [(place, losses[name][place]) for name in out for place in losses[name]]
    worst = [(place, loss) for place, loss in places if loss.rank > bound]
    of_gradients = [loss for (_, operand), loss in worst if operand == "grad_output"]
    nearest = matmul.grad_rounding == "nearest" and matmul.scale != "delayed"
    if nearest and not all(loss.by_clipping for loss in of_gradients):
        yield {f"{key}.grad_rounding": "stochastic"}
    rounded = matmul.scale == "e8m0" and matmul.scale_rounding != "rceil"
    if rounded and any(loss.by_clipping for _, loss in worst):
        yield {f"{key}.scale_rounding": "rceil"}
    # One of several may be the cause; then all.
    turns = [[name] for name in out[:_TURNS]]
    for group in turns if out == out[:1] else [*turns, out]:
        if len(losses) > len(group):
            yield {f"{key}.modules": without_layers(matmul.modules, losses, group)}
    if out and (finer := _finer(matmul)):
        yield {f"{key}.{name}": value for name, value in finer.items()}


def _finer(matmul: MatmulConfig) -> dict[str, str]:
    """Return what makes scales of fewer numbers: a row's, or of blocks half as long."""
    if matmul.granularity == "tensor":
        kept = matmul.scale == "delayed"  # of earlier steps, of whole tensors alone
        return {"granularity": "row"} | ({"scale": "fp32"} if kept else {})
    rows, _, columns = matmul.granularity.partition("x")
    if columns and int(columns) > _FINEST:
        return {"granularity": f"{rows}x{int(columns) // 2}"}
    return {}


_OPERANDS = {"input": "input", "weight": "weight", "grad_output": "gradient of the output"}
_FOR = {"output": "output", "grad_input": "input's gradient", "grad_weight": "weight's gradient"}


def in_words(one: Verdict, matmul: MatmulConfig) -> Iterator[str]:
    """Yield what a cast does to the numbers of a layer's operand, and to the product."""
    (product, operand), loss, block = one.place, one.loss, matmul.granularity
    if operand == "weight":
        block = matmul.weight_granularity or block
    part, of = (f" in blocks of {block}", "of a block ") if "x" in block else ("", "")
    yield f"{one.name}: {_OPERANDS[operand]}, cast for the {_FOR[product]}"
    if loss.by_clipping:
        how = f" by scale_rounding={matmul.scale_rounding}" if matmul.scale == "e8m0" else ""
        yield f"{percent(loss.clipped)} of its nonzero numbers are clipped{part}{how}"
    else:
        beside = f"the largest {of}is 2^{loss.beside:.1f} times as large"
        yield f"{percent(loss.flushed)} of its nonzero numbers become 0{part}; {beside}"
    rows = "rows" if loss.worse is loss.rows else "columns"
    lost = f"; {percent(loss.worse.lost)} keep less than half" if loss.worse.lost else ""
    yield f"{rows} of the {_FOR[product]} are {percent(loss.worse.off)} off{lost}"


def sentences(losses: Losses, matmul: MatmulConfig) -> list[list[str]]:
    """Return sentences on each layer that the casts do not suit, the worst first, or on the worst
    of those that they suit."""
    found = verdicts(losses)
    if found and all(math.isnan(one.loss.worse.off) for one in found):
        return [["not measured: no row of a product was finite and other than 0"]]
    said = [[*in_words(one, matmul)] for one in found if not one.suits]
    return said or [[f"suit every layer: {how_far(one)}"] for one in found[:1]]


def how_far(one: Verdict) -> str:
    """Return how far the products of the worst layer are off."""
    far = f"the worst product's rows are {percent(one.loss.worse.off)} off"
    return f"{far} ({one.name}; {percent(OFF_THRESHOLD)} is the bound)"


def percent(share: float) -> str:
    value = 100 * share
    if math.isnan(share):
        return "0 of 0"
    if 0 < value < 0.001:
        return "below 0.001 %"
    if 99.9 < value < 100:
        return "above 99.9 %"
    return f"{value:.2g} %" if value < 10 else f"{value:.3g} %"
