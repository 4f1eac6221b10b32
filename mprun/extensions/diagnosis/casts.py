"""What the casts of linear layers' operands lose in real steps, and which changes may help.

`CastMeter` casts the operands of each product along its sum, as a layer in the asked formats would
(`mprun.precision.scaled_products`). No step computes with these casts. Of an operand x, cast and
decoded q, it sums what these are made of:

    flushed   part of the nonzero numbers that became zero
    clipped   part that lies above the largest number of its block's scale
    error     |q - x| / |x|, root mean squares: the inverse of the signal-to-noise ratio
    taken     1 - sum(q sign(x)) / sum(|x|): the part of their sum of magnitudes

A layer is judged by `taken`. Rounding to nearest flushes 5 to 15 % of the numbers of any tensor in
E2M1, and moves others up by as much: 1 % is taken. Where a block holds one large number beside many
small ones, as a gradient of logits does (p - 1 beside p), all of these go and nothing comes up.
Stochastic rounding flushes as many, has the larger error, and takes nothing on average.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from mprun.assembly import policy_from
from mprun.config.schema import MatmulConfig, PrecisionConfig
from mprun.numerics.exponent_shares import ratio
from mprun.numerics.probe import plainly
from mprun.precision import DTYPES
from mprun.precision.block_formats import SCALES, Operand, decoded, turn
from mprun.precision.module_dtypes import chosen_dtypes, those_that_match
from mprun.precision.scaled_linear import KEPT, chosen_layers
from mprun.precision.scaled_products import ScaledProducts, unobserved_cast
from mprun.torch_private import graph_task

# Normally distributed numbers lose 1 % in E2M1, hidden layers up to 2.5 %, gradients of logits 5 to
# 30 %.
TAKEN_THRESHOLD = 0.03
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
_NEAR = 1 + 2.0**-20  # a scale in FP32 is rounded: its own largest number is not clipped


class CastLoss(NamedTuple):
    """Sums over the numbers of casts, see above.

    cut: what clipping takes of magnitudes. powers: of log2(largest possible / |x|), over those that
    were flushed. Shares are NaN where all numbers are zero.
    """

    nonzero: float = 0
    zeroed: float = 0
    above: float = 0
    cut: float = 0
    size: float = 0
    kept: float = 0
    squares: float = 0
    errors: float = 0
    powers: float = 0

    @property
    def flushed(self) -> float:
        return ratio(self.zeroed, self.nonzero)

    @property
    def clipped(self) -> float:
        return ratio(self.above, self.nonzero)

    @property
    def error(self) -> float:
        return math.sqrt(ratio(self.errors, self.squares))

    @property
    def taken(self) -> float:
        return ratio(self.size - self.kept, self.size)

    @property
    def rank(self) -> float:
        """Return `taken`, by which to sort; a NaN, of no values or not finite ones, comes last."""
        return -math.inf if math.isnan(self.taken) else self.taken

    @property
    def by_clipping(self) -> bool:
        """Return whether clipping takes most of what is taken."""
        return 2 * self.cut > max(0.0, self.size - self.kept)

    @property
    def beside(self) -> float:
        """Return log2 of how much larger than a flushed number its block's largest is."""
        return ratio(self.powers, self.zeroed)

    def as_dict(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in ("flushed", "clipped", "error", "taken")}


def loss_of(matrix: Tensor, operand: Operand, dim: int, kept: Tensor | None = None) -> Tensor:
    """Return the fields of `CastLoss` for a cast of `matrix`, float64 on its device.

    kept: the numbers of a layer that `delayed_scaling` keeps; they stay as they are.
    """
    # An observer of the layers' casts would keep these alive, too.
    own = None if kept is None else kept.clone()
    found = unobserved_cast(matrix, operand, dim, kept=own)
    x = (turn(matrix, dim) if operand.turned else matrix).double()
    q, limit = decoded(found.values, found.spread).double(), found.spread.double()
    if found.whole is not None:  # two levels
        whole = found.whole.double() / (448 * operand.element.top)
        q, limit = q * whole, limit * whole
    limit, size, (n, k) = limit * operand.element.top, x.abs(), x.shape
    if limit.dim() == 4:  # of blocks, whose last ones may be cut
        down, rows, across, columns = limit.shape
        whole_blocks = nn.functional.pad(size, (0, across * columns - k, 0, down * rows - n))
        most = whole_blocks.view(limit.shape).amax((1, 3), keepdim=True)
        # A scale in E4M3 may be 0: its block is flushed, not clipped.
        limit = torch.where(limit > 0, limit, most).flatten(2).flatten(0, 1)[:n, :k]
    kept, zeroed, above = q * x.sign(), (q == 0) & (x != 0), size > limit * _NEAR
    sums = [x != 0, zeroed, above, (size - kept) * above, size, kept, x**2, (q - x) ** 2]
    sums.append(torch.where(zeroed, (limit / size).log2(), 0))
    return torch.stack([own.sum(dtype=torch.float64) for own in sums])


class CastMeter:
    """Measure the casts of linear layers of `task` inside the block.

    mode: its matmul names formats and layers; the task may compute in any. every: a step divisible
    by it, from 1, is measured. loss_scale: multiplies gradients, of a task without it. ValueError:
    as of `chosen_layers`. Layers of equal names, in several networks, count as one, as for
    patterns. With scale delayed a layer's own scales are taken; one that has none, as in FP32, is
    measured with scale fp32, of the tensor itself.
    """

    def __init__(
        self, task: Any, mode: PrecisionConfig, every: int = 1, *, loss_scale: float = 1.0
    ):
        policy = policy_from(mode)
        self.task, self.every, self.matmul = task, every, policy.matmul or ScaledProducts()
        self.loss_scale = loss_scale
        self.dtype = policy.autocast_dtype or policy.param_dtype
        self.layers: list[tuple[str, nn.Module]] = []
        dtypes = {pattern: DTYPES[name] for pattern, name in mode.overrides.items()}
        for learner in task.learners.values() if policy.matmul else ():
            model = learner.model
            own = {pattern: dtypes[pattern] for pattern in those_that_match(model, dtypes)}
            chosen = chosen_dtypes(model, own, "precision.overrides")
            names = chosen_layers(model, self.matmul, chosen, policy.name)
            self.layers += [(name, model.get_submodule(name)) for name in names]
        self._sums: dict[tuple[str, Place], Tensor] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> Self:
        for name, module in self.layers:
            self._handles.append(module.register_forward_hook(partial(self._on_output, name)))
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def read(self) -> dict[str, dict[Place, CastLoss]]:
        """Return layer -> place -> what was measured; waits for the device."""
        found: dict[str, dict[Place, CastLoss]] = {}
        for (name, place), sums in self._sums.items():
            found.setdefault(name, {})[place] = CastLoss(*sums.tolist())
        return found

    def _on_output(self, name: str, module: nn.Module, inputs: tuple, output: Tensor) -> None:
        due = (self.task.step + 1) % self.every == 0 and output.requires_grad
        if not due or graph_task() != -1:  # or a block that is computed anew
            return
        table = inputs[1:] or (module.weight,)  # of a tied layer, or its own
        for operand, tensor in zip(("input", "weight"), (inputs[0], *table), strict=True):
            self._add(name, module, operand, tensor)
        output.register_hook(partial(self._add, name, module, "grad_output"))

    def _add(self, name: str, module: nn.Module, operand: str, tensor: Tensor) -> None:
        kept: Tensor | None = getattr(module, KEPT, None)
        with plainly():
            matrix = tensor.detach().flatten(0, -2)
            if operand == "grad_output":
                matrix = matrix * self.loss_scale
            matrix = matrix.to(self.dtype)
            for place, dim in ALONG.items():
                if place[1] == operand and place[0] not in self.matmul.high_precision:
                    # Random bits of another name: the layer's own stay as they are.
                    how = self.matmul.operand(operand, place[0], f"measured {name}")
                    if kept is None and SCALES[how.scale].is_kept:
                        how = how._replace(scale="fp32")
                    sums = loss_of(matrix, how, dim, kept)
                    self._sums[name, place] = self._sums.get((name, place), 0) + sums


def worst_place(own: Mapping[Place, CastLoss]) -> Place:
    """Return the product and operand of a layer of which rounding takes most."""
    return max(own, key=lambda place: own[place].rank)


def taking(losses: Losses) -> list[str]:
    """Return the layers of which a cast takes more than the threshold, the worst first."""
    most = {name: own[worst_place(own)].rank for name, own in losses.items()}
    return sorted((n for n in most if most[n] > TAKEN_THRESHOLD), key=lambda n: -most[n])


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
        return {"threshold": TAKEN_THRESHOLD, "steps": self.steps, "layers": layers} | chosen


def cast_advice(losses: Losses, matmul: MatmulConfig, mode: list[str], steps: int) -> CastAdvice:
    """Judge the measured layers; mode: overrides without those of matmul.modules."""
    out, modules = taking(losses), matmul.modules
    kept = without_layers(modules, losses, out) if out else modules
    named = [f"precision.matmul.modules={typed(kept)}"] if kept != ["*"] else []
    overrides = [*mode, *named] if len(out) < len(losses) else []
    return CastAdvice(mode, matmul, steps, losses, out, overrides)


def cast_changes(matmul: MatmulConfig, losses: Losses) -> Iterator[dict[str, Any]]:
    """Yield overrides, key -> value, that may cure what these casts lose, smallest first."""
    key, out = "precision.matmul", taking(losses)
    places = [(place, losses[name][place]) for name in out for place in losses[name]]
    worst = [(place, loss) for place, loss in places if loss.taken > TAKEN_THRESHOLD]
    of_gradients = [loss for (_, operand), loss in worst if operand == "grad_output"]
    nearest = matmul.grad_rounding == "nearest"
    if nearest and not all(loss.by_clipping for loss in of_gradients):
        yield {f"{key}.grad_rounding": "stochastic"}
    rounded = matmul.scale == "e8m0" and matmul.scale_rounding != "rceil"
    if rounded and any(loss.by_clipping for _, loss in worst):
        yield {f"{key}.scale_rounding": "rceil"}
    for count in dict.fromkeys((1, len(out))) if out and len(losses) > len(out) else ():
        patterns = without_layers(matmul.modules, losses, out[:count])
        yield {f"{key}.modules": patterns}
    rows, _, columns = matmul.granularity.partition("x")
    if out and columns and int(columns) > _FINEST:
        yield {f"{key}.granularity": f"{rows}x{int(columns) // 2}"}


_OPERANDS = {"input": "input", "weight": "weight", "grad_output": "gradient of the output"}
_FOR = {"output": "output", "grad_input": "input's gradient", "grad_weight": "weight's gradient"}


def in_words(name: str, own: Mapping[Place, CastLoss], matmul: MatmulConfig) -> Iterator[str]:
    """Yield what rounding does to the worst operand of a layer."""
    place = worst_place(own)
    loss, block = own[place], matmul.granularity
    if place[1] == "weight":
        block = matmul.weight_granularity or block
    part = f" in blocks of {block}" if "x" in block else ""
    yield f"{name}: {_OPERANDS[place[1]]}, cast for the {_FOR[place[0]]}"
    if not loss.by_clipping:
        beside = f"the largest of a block is 2^{loss.beside:.1f} times as large"
        yield f"{percent(loss.flushed)} of its nonzero numbers become 0{part}; {beside}"
    if loss.by_clipping:
        how = f" by scale_rounding={matmul.scale_rounding}" if matmul.scale == "e8m0" else ""
        yield f"{percent(loss.clipped)} of its nonzero numbers are clipped{part}{how}"
    stochastic = place[1] == "grad_output" and matmul.grad_rounding == "stochastic"
    how = "stochastic rounding" if stochastic else "rounding to nearest"
    yield f"{how} takes {percent(loss.taken)} of the sum of their magnitudes"


def sentences(losses: Losses, matmul: MatmulConfig) -> list[list[str]]:
    """Return sentences on each layer of which a cast takes much, the worst first."""
    return [[*in_words(name, losses[name], matmul)] for name in taking(losses)]


def percent(share: float) -> str:
    value = 100 * share
    if math.isnan(share):
        return "0 of 0"
    if 0 < value < 0.001:
        return "below 0.001 %"
    if 99.9 < value < 100:
        return "above 99.9 %"
    return f"{value:.2g} %" if value < 10 else f"{value:.3g} %"
