"""Before a sweep: the margins that its seeds could show, from a known scatter of the differences.

A difference of 0 is shown to be inside a margin if half the interval is smaller. That half is
t(1 - alpha, n - 1) * s / sqrt(n) of n pairs, where s is the scatter of earlier pairs.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mprun.comparison.equivalence import half_width, t_quantile
from mprun.comparison.findings import Question
from mprun.comparison.grouping import group_runs, is_no_key, of_arm, same
from mprun.comparison.load import load_runs, read_run_record, run_directories
from mprun.comparison.verdict import scatters
from mprun.comparison.wording import number_of, size_text
from mprun.errors import MprunError
from mprun.record.keys import flat, recorded_keys
from mprun.record.metric_facts import Metric
from mprun.record.run_record import OUTCOMES

Look = tuple[int, float]  # seeds, one-sided alpha


def earlier_scatter(
    folders: Iterable[Path], keys: Mapping[str, Any], modes: Collection[str], looks: Sequence[Look]
) -> str | None:
    """Return what seeds can show, by the runs in `folders` with an outcome; None: not known.

    Of several modes the one with the widest scatter counts. Their runs are all read.

    Args:
        folders: Those that hold runs of the configuration, if there are any.
        keys: Its flat configuration, in any mode and seed.
        modes: Precision modes of the sweep.
        looks: Numbers of seeds that are told, each with the alpha of its test.
    """
    with suppress(MprunError, OSError):
        found = [one for folder in folders for one in _alike(folder, keys, modes)]
        protos = group_runs(load_runs(found)[0])[0] if found else []
        tests = [one for proto in protos for one in scatters(proto)]
        paired = [(arm, test) for arm, test in tests if test.values.method == "paired"]
        if paired:
            alpha = looks[0][1]
            arm, test = max(paired, key=lambda one: half_width(one[1].interval, (3, 3), alpha))
            source = f"{number_of(test.values.fewest, 'earlier seed')} of {arm.label}"
            sizes = [half_width(test.interval, (n, n), alpha) for n, alpha in looks]
            return _line(test.values.question, looks, sizes, f"the scatter of {source}")
    return None


def stated_scatter(sd: float, metric: Metric, looks: Sequence[Look]) -> str | None:
    """Return what seeds can show if the gap of a pair has the standard deviation `sd`.

    Args:
        sd: Relative for a metric with a relative margin, else in its unit.
        metric: The judged one.
        looks: As for `earlier_scatter`.
    """
    question = Question(metric=metric.name, unit=metric.unit, relative=metric.relative)
    sizes = [t_quantile(alpha, n - 1) * sd / math.sqrt(n) for n, alpha in looks]
    return _line(question, looks, sizes, f"a scatter of {size_text(question, sd, sd)}")


def _line(
    question: Question, looks: Sequence[Look], sizes: Sequence[float], source: str
) -> str | None:
    if not all(0 < size < math.inf for size in sizes):
        return None
    shown = [f"±{size_text(question, size, size)}" for size in sizes]
    parts = [f"{n} seeds: {size}" for (n, _), size in zip(looks, shown, strict=True)]
    parts[0] = f"{looks[0][0]} seeds: margins from {shown[0]} could be shown with {source}"
    return "; ".join(parts)


def _alike(folder: Path, keys: Mapping[str, Any], modes: Collection[str]) -> Iterable[Path]:
    """Yield the runs with an outcome in a folder that differ from `keys` in arm and seed alone."""
    if not folder.is_dir():
        return
    wanted = {key: value for key, value in keys.items() if not (of_arm(key) or is_no_key(key))}
    for directory in run_directories(folder, lambda line: None):
        with suppress(MprunError, OSError, LookupError):
            record = read_run_record(directory)
            own = flat(recorded_keys().current(record["config"]))
            alike = all(same(own.get(key), value) for key, value in wanted.items())
            if record["status"] in OUTCOMES and own["precision.name"] in modes and alike:
                yield directory
