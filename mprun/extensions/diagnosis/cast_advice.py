"""What the losses of casts say: layers to leave out, changes that may help, sentences."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from mprun.config.schema import MatmulConfig
from mprun.extensions.diagnosis.casts import (
    TAKEN_THRESHOLD,
    CastLoss,
    Losses,
    Place,
    taking,
    worst_place,
)

_FINEST = 16  # numbers in a block


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
