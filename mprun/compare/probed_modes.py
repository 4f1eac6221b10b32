"""What the probes of a group's runs measured, summed up per mode: one run of each."""

import math
import statistics
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mprun.compare.findings import Group, Row
from mprun.errors import Damaged
from mprun.numerics.exponent_shares import LostUpdates
from mprun.numerics.gradient_range import Gradients
from mprun.numerics.probe_record import FOLDER, ProbeRecord, TensorStats, read_probe

GRADIENTS = ("activation_gradients", "weight_gradients")
_MOST = 100  # files read of a run; each costs about 0.1 ms per KB


@dataclass(slots=True)
class ProbedMode:
    """The probes of one run, over all its models and modules.

    tensors: kind -> what was measured, at the loss scale of the run. gradients: kind -> the same
    with the scale of each probe, to ask for other scales. steps: those that are summed up, without
    skipped updates unless `only_skipped`. recorded: files that the run has, of which at most 100
    are read, drawn at random. scales: log2 of the smallest and the largest loss scale. cosine,
    relative_error: medians over the shadow steps, None without one.
    """

    label: str
    seed: int
    recorded: int
    steps: list[int] = field(default_factory=list)
    skipped: int = 0
    only_skipped: bool = False
    scales: tuple[float, float] | None = None
    tensors: dict[str, TensorStats] = field(default_factory=dict)
    gradients: dict[str, Gradients] = field(default_factory=dict)
    lost: LostUpdates = LostUpdates()
    cosine: float | None = None
    relative_error: float | None = None
    damage: str | None = None  # why the probes could not be read


def probed_modes(group: Group) -> list[ProbedMode]:
    """One entry per mode that has probes, the baseline first: its run of the lowest seed.

    A mode whose probes are damaged has an entry that says so: the verdicts do not rest on them.
    """
    found = (_of_row(row) for row in (group.baseline, *group.rows))
    return [mode for mode in found if mode is not None]


def _of_row(row: Row) -> ProbedMode | None:
    for run in sorted(row.arm.runs, key=lambda run: run.seed):
        folder = Path(run.path) / FOLDER
        # Most runs have none: this costs one look at the file system for each.
        if run.foreign or not folder.is_dir():
            continue
        paths = sorted(folder.glob("step-*.json"))
        if paths:
            return _of_run(ProbedMode(row.arm.label, run.seed, len(paths)), paths)
    return None


def _of_run(mode: ProbedMode, paths: list[Path]) -> ProbedMode:
    if len(paths) > _MOST:
        # Not every n-th: shadow steps come at an interval, too, and could all be missed.
        chosen = np.random.default_rng(0).choice(len(paths), _MOST, replace=False)
        paths = [paths[i] for i in sorted(chosen)]
    try:
        records = [read_probe(path) for path in paths]
    except (Damaged, OSError) as error:
        mode.damage = str(error)
        return mode
    kept = [record for record in records if not record.skipped]
    mode.skipped = len(records) - len(kept)
    mode.only_skipped = not kept
    agreements = []
    for record in kept or records:
        mode.steps.append(record.step)
        _add_tensors(mode, record)
        agreements += _agreement(record)
    if agreements:
        mode.cosine = statistics.median(a.cosine for a in agreements)
        mode.relative_error = statistics.median(a.relative_error for a in agreements)
    return mode


def _add_tensors(mode: ProbedMode, record: ProbeRecord) -> None:
    for learner in record.learners.values():
        scales = [record.log2_loss_scale.get(name, 0.0) for name in learner.loss_scales]
        scales = [scale for scale in scales if math.isfinite(scale)] or [0.0]
        low, high = mode.scales or (scales[0], scales[0])
        mode.scales = (min(low, *scales), max(high, *scales))
        mode.lost = mode.lost.merge(learner.total_lost())
        for kind in learner.tensors:
            total = learner.total(kind)
            if total is None:
                continue
            before = mode.tensors.get(kind)
            mode.tensors[kind] = total if before is None else before.merge(total)
            if kind in GRADIENTS:
                mode.gradients.setdefault(kind, Gradients()).add(total, scales)


def _agreement(record: ProbeRecord) -> list:
    """Of all models of the step together: a list of one, or of none without a shadow."""
    found = [learner.total_agreement() for learner in record.learners.values()]
    found = [agreement for agreement in found if agreement is not None]
    while len(found) > 1:
        found = [found[0].merge(found[1]), *found[2:]]
    return found
