"""The bias of experts moves once an applied update, by the tokens of all its micro-batches."""

import pytest
import torch

from mprun.errors import BadInput
from mprun.models.gpt_moe import Choice, Router
from mprun.numerics.operations import FirstStep

from ..helpers import TINY_MOE, assert_same_bits, raises_line

BALANCED = [*TINY_MOE, "model.balancing=bias", "model.bias_rate=0.25", "model.shared_size=16"]


def choice_of(task):
    [found] = (own for own in task.learner.model.modules() if isinstance(own, Choice))
    return found


def watched(choice):
    """The counts that the router returns in training, as they come."""
    counts = []
    choice.register_forward_hook(lambda m, given, made: counts.extend(made[2:3] * m.training))
    return counts


def moved(counts):
    total = torch.stack(counts).sum(0)
    return 0.25 * torch.sign(total.sum() - len(total) * total)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode", ["fp32", "fp16_master_scaled", pytest.param("fp8_rowwise", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("more", [(), ("train.accumulate=3",)], ids=["one", "three"])
def test_an_update_moves_it_once(build_run, mode, more):
    task = build_run(*BALANCED, f"precision={mode}", *more).task
    choice, expected = choice_of(task), torch.zeros(8)
    counts = watched(choice)
    for step in range(3):
        task.train_step(step)
        assert len(counts) == task.accumulate
        expected += moved(counts)
        counts.clear()
        assert torch.equal(choice.bias, expected) and choice.bias.dtype is torch.float32
        task.evaluate()
        assert torch.equal(choice.bias, expected) and not counts
        assert choice.load.count_nonzero() == 0


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("train.accumulate=2",)], ids=["one", "two"])
def test_a_skipped_update_does_not_move_it(build_run, more):
    task = build_run(*BALANCED, "precision=amp", *more).task
    choice, factor = choice_of(task), [1.0]
    task.learner.model.embedding.weight.register_hook(lambda gradient: gradient * factor[0])
    task.train_step(0)
    before, counts = choice.bias.clone(), watched(choice)
    factor[0] = float("inf")
    assert task.train_step(1)["found_inf"] == 1
    assert torch.equal(choice.bias, before) and choice.load.count_nonzero() == 0
    factor[0] = 1.0
    counts.clear()
    assert task.train_step(2)["found_inf"] == 0
    assert torch.equal(choice.bias, before + moved(counts))


@pytest.mark.slow
def test_a_recomputed_block_counts_as_it_did(build_run):
    """Both passes of a checkpoint count: loads are twice as large, and figures relative."""
    found = []
    for recomputes in ("false", "true"):
        words = [*BALANCED, "precision=bf16_master", f"train.activation_checkpointing={recomputes}"]
        task = build_run(*words).task
        metrics = [task.train_step(step, measure=True) for step in range(3)]
        states = [*task.learner.model.state_dict().values()]
        assert choice_of(task).bias.count_nonzero() > 0
        found.append([*(one for own in metrics for one in own.values()), *states])
    assert_same_bits(*found)


def test_figures_are_of_measured_steps_and_of_all_micro_batches(build_run):
    task = build_run(*BALANCED, "precision=fp32", "train.accumulate=2").task
    counts = watched(choice_of(task))
    metrics = task.train_step(0, measure=True)
    loads = torch.stack(counts).sum(0) / torch.stack(counts).sum() * 8
    assert metrics["expert_load_max"] == loads.max() and metrics["expert_load_min"] == loads.min()
    assert 0.9 < metrics["router_entropy"] <= 1 + 2**-20  # scores are nearly even at the start
    assert not any("expert" in name for name in task.train_step(1))


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode", ["amp_bf16", "bf16_master", "bf16_naive", pytest.param("nvfp4", marks=pytest.mark.slow)]
)
def test_routers_compute_in_fp32_unless_they_follow_the_mode(build_run, mode):
    for router in ("fp32", "mode"):
        built = build_run(*BALANCED, f"precision={mode}", f"model.router={router}")
        with FirstStep(built.task, built.policy, {}) as first:
            built.task.train_step(0)
        rows = first.operations()["rows"]
        wide = [own for own in rows if own.get("flops") and own["dtype"] == "fp32"]
        # 4 x 16 tokens, a width of 32, 8 experts; backward twice.
        product = 2 * 4 * 16 * 32 * 8
        assert [own["flops"] for own in wide] == ([product, 2 * product] * (router == "fp32"))
        assert first.not_in_16_bits() == []
        model = built.task.learner.model
        [weight] = (own.weight for own in model.modules() if isinstance(own, Router))
        computed = {id(own): dtype for own, dtype in built.task.learner.steps.computed()}
        is_kept = router == "fp32" or mode == "amp_bf16"
        assert computed[id(weight)] is (torch.float32 if is_kept else torch.bfloat16)


def test_an_override_of_a_router_in_fp32_is_refused(build_run):
    own = "precision.overrides.blocks.0.mlp.router=bf16"
    with raises_line(BadInput, "router=bf16: the module computes in FP32 in the mode fp16_master"):
        build_run(*BALANCED, "precision=fp16_master", own)
    task = build_run(*BALANCED, "precision=fp16_master", "model.router=mode", own).task
    assert task.train_step(0)["loss"].isfinite()
