"""DistributedDataParallel around a prepared model, and shards of one: ranks stay equal, and train
what one process trains, to the last bit.

A pair of processes takes all cases of a test; a failure names each case that is wrong.
"""

import pytest
import torch

from mprun.precision import get_policy
from mprun.prepared.shards import keeps_half

from ..distributed.test_same_bits import each_rank
from ..shipped import IN_BLOCKS
from .loop_outcomes import ALL, tolerance
from .of_two_ranks import ALL_SETTINGS, WITH_MASTERS, WORLD, WRONG, Case, alone, be

# The mode with the most machinery; FP32, which has none, where most can go wrong around it.
MOST = "fp16_master_scaled"
PLAIN = [Case(setting, "fp32") for setting in ("resumed", "sharded and resumed", "neither")]
DRAWING = [("seeded", "bf16_stochastic"), ("clipped", "bf16_kahan")]
DRAWING += [(setting, "nvfp4") for setting in ("no_sync", "resumed", "sharded by layer")]
FP32_SUMS = 64 * 2**-24  # of what weights move; sums in another order


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
    wrong = case.setting in WRONG and case.mode is not None
    keeps = case.mode is not None and keeps_half(get_policy(case.mode))
    raised = [rank["said"] for rank in ranks if "said" in rank]
    if raised:
        # Weights of two dtypes torch itself refuses to shard.
        by_torch = keeps and "uniform original parameter dtype" in raised[0]
        refused = len(raised) == WORLD and (by_torch or all(rank["refused"] for rank in ranks))
        if not refused or not (wrong or (keeps and case.setting in WITH_MASTERS)):
            return f"raised {raised[0]}"
        if not by_torch and "DistributedDataParallel" not in raised[0]:
            return f"does not name the cure: {raised[0]}"
        return ""
    if wrong or (keeps and case.setting in WITH_MASTERS):
        return "was not refused"
    if case.setting in WRONG:
        return ""
    if len({rank["digest"] for rank in ranks}) > 1:
        return "ranks differ"
    weights, one = ranks[0]["weights"], alone(case)
    if ranks[0]["scale"] != one["scale"]:
        return f"loss scale {ranks[0]['scale']}, of one process {one['scale']}"
    if torch.equal(weights, one["weights"]):
        return ""
    moved = one["weights"] - one["start"]
    deviation = float((weights - one["weights"]).norm() / moved.norm())
    # A norm that is another in its last bit moves some roundings to 16 bits.
    allowed = (case.mode and tolerance(case.mode, one["weights"], moved)) or FP32_SUMS
    # DistributedDataParallel adds up gradients of BF16 weights in BF16, one process in FP32.
    sums_alike = case.mode is None or get_policy(case.mode).masters != "transient"
    is_exact = ALL_SETTINGS[case.setting].has_exact_sums and sums_alike
    if is_exact or deviation > allowed:
        return f"deviation {deviation:.2g} from one process"
    return ""


@pytest.mark.slow
def test_two_ranks_train_as_one_process_or_are_refused(tmp_path):
    cases = [*PLAIN, *(Case(setting, MOST) for setting in ALL_SETTINGS)]
    # Which draw random bits, for the weights and for gradients in products.
    cases += [Case(*case) for case in DRAWING]
    cases.append(Case("no_sync", "fp8_delayed"))  # whose scales are of all micro-batches and ranks
    assert faults(cases, tmp_path) == []


@pytest.mark.slow
def test_every_mode_on_two_ranks(tmp_path):
    modes = [None, *sorted(ALL - {MOST}), *IN_BLOCKS, "fp8_delayed"]
    cases = [Case(setting, mode) for setting in ALL_SETTINGS for mode in modes]
    assert faults(cases, tmp_path) == []
