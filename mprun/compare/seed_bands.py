"""Curves of several seeds on one grid: their mean and the range between the extreme seeds."""

import warnings
from dataclasses import dataclass

import numpy as np

Curve = tuple[np.ndarray, np.ndarray]  # x ascending, y; float64 [records]


@dataclass(slots=True)
class Band:
    """Mean, lowest and highest seed at each x, float64 [points]; NaN where no seed has a value."""

    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def grid(curves: list[Curve], points: int) -> np.ndarray:
    """The x of the curves, or `points` equally spaced ones where there are more than that."""
    known = [x[np.isfinite(x)] for x, _ in curves]
    known = [x for x in known if len(x)]
    if not known:
        return np.empty(0)
    if max(len(x) for x in known) <= points:
        every = np.unique(np.concatenate(known))
        if len(every) <= points:
            return every
    return np.linspace(min(x.min() for x in known), max(x.max() for x in known), points)


def band(curves: list[Curve], x: np.ndarray) -> Band:
    """Put each curve on the grid `x` and take mean and range over those that have a value there.

    A seed that ended early counts up to its end; the mean goes on with the others.
    """
    if not len(x) or not curves:
        empty = np.full(len(x), np.nan)
        return Band(x, empty, empty.copy(), empty.copy())
    values = np.stack([on_grid(own_x, y, x) for own_x, y in curves])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a point that no seed has stays NaN
        return Band(x, np.nanmean(values, 0), np.nanmin(values, 0), np.nanmax(values, 0))


def on_grid(x: np.ndarray, y: np.ndarray, points: np.ndarray) -> np.ndarray:
    """The curve at `points`, float64 [points]: the mean of the records nearest to each point.

    A point without a record is interpolated between its neighbours; before the first and after the
    last record it is NaN. Records that are not finite are left out.
    """
    finite = np.isfinite(x) & np.isfinite(y)
    x, y = x[finite], y[finite]
    if not len(x) or not len(points):
        return np.full(len(points), np.nan)
    nearest = np.searchsorted((points[1:] + points[:-1]) / 2, x)
    count = np.bincount(nearest, minlength=len(points))
    total = np.bincount(nearest, weights=y, minlength=len(points))
    filled = np.flatnonzero(count)
    return np.interp(
        points, points[filled], total[filled] / count[filled], left=np.nan, right=np.nan
    )


def curve(columns: dict[str, np.ndarray], x: str, y: str) -> Curve:
    """Two columns as float64, empty where one is missing; y without infinities and giants.

    A loss can reach 1e300 before it is no number; twice that is more than an axis can have.
    """
    if x not in columns or y not in columns:
        return np.empty(0), np.empty(0)
    values = np.asarray(columns[y], float)
    values = np.where(np.isfinite(values), np.clip(values, -1e30, 1e30), np.nan)
    return np.asarray(columns[x], float), values
