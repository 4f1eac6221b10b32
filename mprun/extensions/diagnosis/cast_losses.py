"""Measure what one operand's cast loses: of its numbers, and of the rows of the product.

Of an operand x, cast and decoded q:

    flushed   part of the nonzero numbers that became zero
    clipped   part that lies above the largest number of its block's scale
    error     |q - x| / |x|, root mean squares: the inverse of the signal-to-noise ratio
    taken     1 - sum(q sign(x)) / sum(|x|): the part of their sum of magnitudes
    emptied   part of the rows along the sum, of which all numbers became zero

These are shares of sums, which an outlier is. So a layer is judged by its products, each multiplied
with this cast, p', and without it, p, by rows and columns r of their own, whatever their size:

    kept      (p'_r . p_r) / |p_r|^2, at most 2: 0 of a row that is flushed
    off       |mean of kept - 1| over a step's rows, or columns, whichever are further off; less two
              standard errors, at least 0; its mean over steps
    lost      part of the rows that keep less than half

Rounding errors point anywhere, and rows that cancel are as often too long as too short: neither
shows in a mean, but by chance. What is flushed or clipped does, of a gradient of logits one way in
some steps and the other way in others. A sample of a gradient counts by its size, as a sum over
samples follows.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mprun.numerics.exponent_shares import ratio
from mprun.precision.block_formats import Operand, decoded, turn
from mprun.precision.scaled_products import unobserved_cast

_NEAR = 1 + 2.0**-20  # a scale in FP32 is rounded: its own largest number is not clipped
_SAMPLED = 512  # rows of a product, and columns, that are multiplied


class RowLoss(NamedTuple):
    """Sums over rows of a product, or its columns, of what one operand's cast changes of them.

    shortened: the weight of those that keep less than half. steps: products; sure: of `off`.
    """

    weight: float = 0
    shortened: float = 0
    steps: float = 0
    sure: float = 0

    @property
    def off(self) -> float:
        return ratio(self.sure, self.steps)

    @property
    def lost(self) -> float:
        return ratio(self.shortened, self.weight)

    @property
    def rank(self) -> float:
        """Return `off`, by which to sort; a NaN, of no values or not finite ones, comes last."""
        return -1.0 if math.isnan(self.off) else self.off


class CastLoss(NamedTuple):
    """Sums over the numbers of casts, see above.

    cut: what clipping takes of magnitudes. powers: of log2(largest possible / |x|), over those that
    were flushed. vectors, empty: rows along the sum, and those that became zero. rows, columns: of
    the product. Shares are NaN where all numbers are zero.
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
    vectors: float = 0
    empty: float = 0
    rows: RowLoss = RowLoss()
    columns: RowLoss = RowLoss()

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
    def emptied(self) -> float:
        return ratio(self.empty, self.vectors)

    @property
    def worse(self) -> RowLoss:
        """Return rows or columns, whichever are further off."""
        return max(self.rows, self.columns, key=lambda own: own.rank)

    @property
    def rank(self) -> float:
        """Return how far the product is off, to sort and to judge by."""
        return self.worse.rank

    @property
    def by_clipping(self) -> bool:
        """Return whether clipping takes most of what is taken, and no rows vanish."""
        vanish = 2 * self.emptied > max(0.0, self.rank)
        return not vanish and 2 * self.cut > max(0.0, self.size - self.kept)

    @property
    def beside(self) -> float:
        """Return log2 of how much larger than a flushed number its block's largest is."""
        return ratio(self.powers, self.zeroed)

    def as_dict(self) -> dict[str, float]:
        names = ("flushed", "clipped", "error", "taken", "emptied")
        own = {"off": self.worse.off, "lost": self.worse.lost}
        return {name: getattr(self, name) for name in names} | own


class Casted(NamedTuple):
    """A matrix and its cast, float64 [n, sum]; `sums`: the first fields of `CastLoss`."""

    exact: Tensor
    cast: Tensor
    sums: Tensor


def casted(matrix: Tensor, operand: Operand, dim: int, kept: Tensor | None = None) -> Casted:
    """Cast `matrix` for a product that adds up along `dim`.

    kept: the numbers of a layer that `delayed_scaling` keeps; they stay as they are.
    """
    # An observer of the layers' casts would keep these alive, too.
    own = None if kept is None else kept.clone()
    found = unobserved_cast(matrix, operand, dim, kept=own)
    x = (turn(matrix, dim) if operand.turned else matrix).double()
    q, limit = decoded(found.values, found.spread).double(), found.spread.double()
    if found.whole is not None:  # two levels
        whole = found.whole.double() / operand.largest
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
    vectors = (x != 0).any(dim)
    sums += [vectors, vectors & (q == 0).all(dim)]
    total = torch.stack([own.sum(dtype=torch.float64) for own in sums])
    return Casted(x, q, total) if dim == -1 else Casted(x.t(), q.t(), total)


def losses_of(left: Casted, right: Casted, *, by_size: bool = False) -> tuple[Tensor, Tensor]:
    """Return what the cast of each operand of a product loses, for `loss_from`.

    by_size: rows of the product count by their size.
    """
    a, p, b, q = map(_sampled, (left.exact, left.cast, right.exact, right.cast))
    exact = a @ b.t()

    def loss(own: Casted, cast: Tensor) -> Tensor:
        rows = _changed_rows(cast, exact, 1, by_size)
        return torch.cat([own.sums, rows, _changed_rows(cast, exact, 0)])

    return loss(left, p @ b.t()), loss(right, a @ q.t())


def loss_from(sums: list[float]) -> CastLoss:
    return CastLoss._make([*sums[:-8], RowLoss(*sums[-8:-4]), RowLoss(*sums[-4:])])


def _sampled(matrix: Tensor) -> Tensor:
    """Return at most `_SAMPLED` rows, evenly spaced."""
    return matrix[:: -(-len(matrix) // _SAMPLED)]


def _changed_rows(cast: Tensor, exact: Tensor, dim: int, by_size: bool = False) -> Tensor:
    """Return the fields of `RowLoss` of a product's vectors along `dim`; by_size: their weight."""
    squares = (exact * exact).sum(dim)
    kept = (cast * exact).sum(dim) / squares
    weight = squares.sqrt() if by_size else torch.ones_like(squares)
    weight = torch.where(kept.isfinite(), weight, 0)
    kept = kept.nan_to_num(1.0).clamp(0, 2)
    longer, total = weight * (kept - 1), weight.sum()
    sure = (longer.sum().abs() - 2 * longer.norm()).clamp(min=0) / total
    known = total > 0
    return torch.stack([total, (weight * (kept < 0.5)).sum(), known, torch.where(known, sure, 0)])
