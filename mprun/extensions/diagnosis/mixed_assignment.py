"""Search which parts of a network must leave a mode so that its loss meets a bound beside FP32's.

Parts are ordered by what the mode loses in them, the worst first. Longer and longer starts of that
list leave the mode until the bound is met; then each part that stays out returns if it can, the
dearest first. Every set is trained beside FP32, one seed each: a bound below what rounding moves by
chance is met by chance.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import yaml
from torch import Tensor, nn

from mprun.assembly import Built
from mprun.config.schema import MatmulConfig, PrecisionConfig, UpdateConfig
from mprun.extensions.diagnosis.advice import Advice, in_fp32
from mprun.extensions.diagnosis.advised_regions import Layout
from mprun.extensions.diagnosis.casts import typed, verdicts, without_layers
from mprun.extensions.diagnosis.trials import BesideFp32, Mixed, Tried

Words = tuple[str, ...]  # a mode, as typed after `mprun`


class Part(NamedTuple):
    """A part of a network; patterns: of its modules. error: what the mode loses in it. products:
    its share of those of all layers."""

    patterns: tuple[str, ...]
    error: float
    products: float


def search(
    trials: BesideFp32,
    parts: Sequence[Part],
    words: Callable[[Sequence[Part]], Words],
    bound: float,
) -> Mixed:
    """Return the set of parts that leaves the mode; words: the mode without a set of parts.

    parts: the worst first. bound: largest gap to FP32's loss, as a part of it.
    """
    last, tried = trials.fp32.ending, dict[Words, Tried]()
    limit = last + bound * abs(last)

    def meets(out: Sequence[Part]) -> bool:
        mode = words(out)
        if mode not in tried:
            tried[mode] = trials.result(mode, limit)
        return bool(tried[mode].cures)

    fails, count = -1, 0
    while not meets(parts[:count]):
        if count == len(parts) or trials.budget.spent:
            return Mixed(bound, [*tried.values()])
        fails, count = count, min(len(parts), max(1, 2 * count))
    while count - fails > 1:
        middle = (count + fails) // 2
        fails, count = (fails, middle) if meets(parts[:middle]) else (middle, count)
    out = list(parts[:count])
    for part in sorted(out, key=lambda part: -part.products)[: len(out) if len(out) > 1 else 0]:
        without = [other for other in out if other is not part]
        if not trials.budget.spent and meets(without):
            out = without
    mode = words(out)
    loss = tried[mode].loss
    gap = (last if loss is None else loss) - last
    names = [pattern for part in out for pattern in part.patterns]
    cost = sum(part.products for part in out)
    return Mixed(bound, [*tried.values()], names, mode, gap / abs(last) if last else gap, cost)


def assignment(
    advice: Advice, asked: Words, layout: Layout, built: Built, trials: BesideFp32, bound: float
) -> Mixed:
    """Search an assignment of the mode that was `asked` for, or of the advised one if none was.

    built: the run in FP32, which takes a step.
    """
    products, casts = products_of(built), advice.casts
    if casts is not None:
        losses = casts.losses
        names = [one.name for one in verdicts(losses)]
        parts = [Part((name,), 0.0, products.get(name, 0.0)) for name in names]
    else:
        parts = _parts(advice, layout, products)
    base = asked or tuple(word for word in advice.overrides if ".overrides." not in word)

    def words(out: Sequence[Part]) -> Words:
        names = [pattern for part in out for pattern in part.patterns]
        if casts is None:
            return (*base, *in_fp32(names))
        kept = without_layers(casts.matmul.modules, losses, names)
        return (*casts.mode, f"precision.matmul.modules={typed(kept)}")

    return search(trials, parts, words, bound)


def _parts(advice: Advice, layout: Layout, products: Mapping[str, float]) -> list[Part]:
    """Return what FP16 cannot hold, then layers by the part of their gradients that underflows."""

    def cost(patterns: Iterable[str]) -> float:
        return sum(
            own
            for name, own in products.items()
            if any(f"{name}.".startswith(f"{pattern}.") for pattern in patterns)
        )

    found = [Part(one.patterns, math.inf, cost(one.patterns)) for one in advice.keep_fp32]
    known = {pattern for part in found for pattern in part.patterns}
    for label, leaves in layout.leaves.items():
        for name in leaves:
            if name not in known and (label, name) not in layout.norms:
                share = advice.underflow.get(layout.named((label, name)), 0.0)
                found.append(Part((name,), share, cost((name,))))
                known.add(name)
    return sorted(found, key=lambda part: -part.error)


def products_of(built: Built) -> dict[str, float]:
    """Take a step; return the share of each layer in the multiplications of all layers."""
    counts: dict[str, float] = {}

    def count(name: str, module: nn.Module, output: Tensor) -> None:
        weight: Any = module.weight
        counts[name] = counts.get(name, 0.0) + output.numel() * weight[0].numel()

    handles = [
        module.register_forward_hook(lambda own, _, output, name=name: count(name, own, output))
        for learner in built.task.learners.values()
        for name, module in learner.model.named_modules()
        if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d))
    ]
    try:
        built.stepper.eager_step(0)
    finally:
        for handle in handles:
            handle.remove()
    total = sum(counts.values()) or 1.0
    return {name: own / total for name, own in counts.items()}


def mode_file(precision: PrecisionConfig, name: str, scaler: str, about: str) -> str:
    """Return a mode as an option file, for DIR/precision/NAME.yaml; about: its first line."""
    values = asdict(precision) | {"name": name}
    for group, usual in (("matmul", MatmulConfig()), ("update", UpdateConfig())):
        own = {k: v for k, v in values.pop(group).items() if v != getattr(usual, k)}
        values |= {group: own} if own else {}
    if not values["overrides"]:
        del values["overrides"]
    start = {"defaults": [{"override /scaler@_global_.scaler": scaler}]} if scaler != "none" else {}
    return f"# {about}\n" + yaml.safe_dump(start | values, sort_keys=False)
