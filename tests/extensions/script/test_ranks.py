"""DistributedDataParallel around a prepared model: ranks stay equal, and train as one process does.

A pair of processes takes all cases of a test; a failure names each case that is wrong.
"""

import pytest

from ...distributed.test_same_bits import each_rank
from .loop_outcomes import ALL, tolerance
from .of_two_ranks import SETTINGS, SHARDED, WORLD, WRONG, Case, alone, be

TWO = ("fp32", "fp16_master_scaled")


def faults(cases: list[Case], folder) -> list[str]:
    """Return what is wrong with cases, a line each."""
    ranks = each_rank(be, WORLD, cases, folder)
    found = []
    for case in cases:
        said = _fault(case, [rank[tuple(case)] for rank in ranks])
        if said:
            found.append(f"{case.setting}, {case.mode or 'plain torch'}: {said}")
    return found


def _fault(case: Case, ranks: list[dict]) -> str:
    raised = [rank["said"] for rank in ranks if "said" in rank]
    if raised:
        # Weights of two dtypes, of a mode without master weights, torch itself refuses to shard.
        by_torch = case.setting in SHARDED and "uniform original parameter dtype" in raised[0]
        refused = len(raised) == WORLD and (by_torch or all(rank["refused"] for rank in ranks))
        if not refused or case.setting in SETTINGS:
            return f"raised {raised[0]}"
        if case.setting in WRONG and "DistributedDataParallel" not in raised[0]:
            return f"does not name the cure: {raised[0]}"
        return ""
    if case.setting in WRONG and case.mode is not None:
        return "was not refused"
    if len({rank["digest"] for rank in ranks}) > 1:
        return "ranks differ" if case.setting not in WRONG else ""
    one = alone(case)
    moved = one["weights"] - one["start"]
    deviation = float((ranks[0]["weights"] - one["weights"]).norm() / moved.norm())
    # FP32 sums in another order: 64 u, as `tolerance` has it of 16 bits.
    allowed = (case.mode and tolerance(case.mode, one["weights"], moved)) or 64 * 2**-24
    return "" if deviation <= allowed else f"deviation {deviation:.4f} from one process"


def test_two_ranks_train_as_one_process_or_are_refused(tmp_path):
    cases = [Case(setting, mode) for setting in SETTINGS | WRONG for mode in (None, *TWO)]
    assert faults(cases, tmp_path) == []


@pytest.mark.slow
def test_every_mode_on_two_ranks(tmp_path):
    modes = sorted(ALL.difference(TWO))
    cases = [Case(setting, mode) for setting in SETTINGS | WRONG for mode in modes]
    assert faults(cases, tmp_path) == []


@pytest.mark.slow
def test_sharded_weights_are_refused_or_right(tmp_path):
    cases = [Case(setting, mode) for setting in SHARDED for mode in (None, *sorted(ALL))]
    assert faults(cases, tmp_path) == []
