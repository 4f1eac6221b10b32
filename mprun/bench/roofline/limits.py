"""From counted rows to the least time of a step on a GPU with given ceilings."""

from collections.abc import Iterable
from dataclasses import dataclass

from mprun.bench.roofline.ceilings import Ceilings
from mprun.bench.roofline.count import Counted
from mprun.bench.roofline.rows import Row


@dataclass(frozen=True, slots=True)
class Kind:
    """All rows of one kind and phase. share: of the eager time of the step."""

    kind: str
    phase: str
    seconds: float
    share: float
    flops: int
    bytes: int
    launches: int


@dataclass(frozen=True, slots=True)
class Limit:
    """Samples per second that a step cannot exceed, under different readings.

    eager: each operation takes the longer of its products and its traffic, one after the other.
    fused: the same with ReLUs, residuals and their gradients folded into BatchNorm kernels; None
    where there is nothing to fold. flop_only: products at their full rate, traffic free. Each with
    the update; without_update: eager, forward and backward alone. memory_bound_share: part of the
    eager time in which traffic takes longer than products. update_s: part of the update in the
    eager time. launches: kernels per step; graph and eager_launches: samples per second if every
    kernel takes the ceilings' launch time and nothing else. kinds: most expensive first.
    """

    ceilings: Ceilings
    eager: float
    fused: float | None
    flop_only: float
    without_update: float
    memory_bound_share: float
    step_s: float
    update_s: float
    launches: int
    graph_launches: float
    eager_launches: float
    kinds: tuple[Kind, ...]


def limit(counted: Counted, ceilings: Ceilings) -> Limit:
    """The limits of a counted step; KeyError where the GPU has no such products (`why_not`)."""
    timed = [(row, _seconds(row, ceilings)) for row in counted.rows]
    total = sum(seconds for _, seconds in timed)
    update = sum(seconds for row, seconds in timed if row.phase == "update")
    bound = sum(seconds for row, seconds in timed if not _is_product_bound(row, ceilings))
    products = sum(row.flops / ceilings.flops[row.form] for row in counted.rows if row.flops)
    launches = sum(row.launches for row in counted.rows)

    def rate(seconds: float) -> float:
        return counted.samples / seconds

    folds = any(row.folded_bytes is not None for row in counted.rows)
    folded = sum(_folded_seconds(row, ceilings) for row in counted.rows)
    return Limit(
        ceilings=ceilings,
        eager=rate(total),
        fused=rate(folded) if folds else None,
        flop_only=rate(products),
        without_update=rate(total - update),
        memory_bound_share=bound / total,
        step_s=total,
        update_s=update,
        launches=launches,
        graph_launches=rate(launches * ceilings.graph_launch_s),
        eager_launches=rate(launches * ceilings.eager_launch_s),
        kinds=tuple(_kinds(timed, total)),
    )


def _seconds(row: Row, ceilings: Ceilings) -> float:
    return max(row.seconds(ceilings.flops, ceilings.bandwidth))


def _is_product_bound(row: Row, ceilings: Ceilings) -> bool:
    products, traffic = row.seconds(ceilings.flops, ceilings.bandwidth)
    return products > traffic


def _folded_seconds(row: Row, ceilings: Ceilings) -> float:
    if row.folded_bytes is None:
        return _seconds(row, ceilings)
    return row.folded_bytes / ceilings.bandwidth


def _kinds(timed: Iterable[tuple[Row, float]], total: float) -> list[Kind]:
    groups: dict[tuple[str, str], list[tuple[Row, float]]] = {}
    for row, seconds in timed:
        groups.setdefault((row.kind, row.phase), []).append((row, seconds))
    kinds = [
        Kind(
            kind,
            phase,
            seconds := sum(s for _, s in group),
            seconds / total,
            sum(row.flops for row, _ in group),
            sum(row.bytes for row, _ in group),
            sum(row.launches for row, _ in group),
        )
        for (kind, phase), group in groups.items()
    ]
    return sorted(kinds, key=lambda kind: -kind.seconds)
