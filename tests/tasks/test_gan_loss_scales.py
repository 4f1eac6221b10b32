"""DCGAN with one scale for all, or one per optimizer."""

import itertools

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

from ..helpers import TINY_GAN, assert_same_bits

INF = float("inf")
OVERRIDES = [*TINY_GAN, "data.batch_size=4", "precision=amp", "scaler.init_scale=64"]
NAMES = {"shared": ["loss_scale"], "optimizer": ["loss_scale", "loss_scale_generator"]}


class Planted:
    """A DCGAN task; `factors` multiply the gradient of D's real, D's fake and G's loss."""

    def __init__(self, task):
        self.task, self.step, self.factors = task, 0, [1.0, 1.0, 1.0]
        plain, calls = task._bce, itertools.cycle(range(3))

        def bce(logits, target):
            loss, factor = plain(logits, target), self.factors[next(calls)]
            loss.register_hook(lambda gradient: gradient * factor)
            return loss

        task._bce = bce

    def train_step(self, *factors):
        self.factors, self.step = factors, self.step + 1
        return self.task.train_step(self.step - 1)

    def scales(self):
        return [scale.scale.item() for scale in self.task.loss_scales.values()]


@pytest.mark.parametrize(
    ("per", "factors", "expected"),
    [
        ("shared", (INF, 1, 1), [32]),
        ("shared", (1, 1, INF), [32]),
        ("shared", (INF, INF, INF), [32]),
        ("optimizer", (INF, 1, 1), [32, 64]),
        ("optimizer", (1, INF, 1), [32, 64]),
        ("optimizer", (1, 1, INF), [64, 32]),
    ],
)
@pytest.mark.few(3)
def test_which_scale_moves_and_who_skips(build_run, per, factors, expected):
    run = Planted(build_run(*OVERRIDES, f"scaler.per={per}").task)
    assert run.train_step(1, 1, 1)["found_inf"] == 0
    before = {
        name: tree_map(lambda t: t.clone(), learner.state_dict())
        for name, learner in run.task.learners.items()
    }
    metrics = run.train_step(*factors)
    assert run.scales() == expected
    d_skips, g_skips = INF in factors[:2], factors[2] == INF
    assert (metrics["d_found_inf"], metrics["g_found_inf"]) == (d_skips, g_skips)
    assert metrics["found_inf"] == 1 and metrics["loss_scale"] == metrics["d_loss_scale"]
    for name, skips in (("discriminator", d_skips), ("generator", g_skips)):
        learner = run.task.learners[name]
        pairs = zip(tree_leaves(before[name]), tree_leaves(learner.state_dict()), strict=True)
        if skips and name == "generator":
            assert all(torch.equal(a, b) for a, b in pairs)
        elif skips:  # but for statistics of G's batch
            own = learner.state_dict()
            for key, _ in learner.model.named_parameters():
                assert torch.equal(before[name]["model"][key], own["model"][key])
            assert_same_bits(own["state"], before[name]["state"])
        else:
            assert not all(torch.equal(a, b) for a, b in pairs)
    # D's BatchNorm sees three batches in the clean step; then two if D's update counts and one
    # more if G's does.
    tracked = run.task.d.model.layers.norm1.num_batches_tracked
    assert tracked == 3 + (0 if d_skips else 2) + (0 if g_skips else 1)


@pytest.mark.slow
@pytest.mark.parametrize("per", NAMES)
def test_one_update_an_iteration(build_run, per):
    run = Planted(build_run(*OVERRIDES, f"scaler.per={per}", "scaler.growth_interval=2").task)
    assert list(run.task.loss_scales) == NAMES[per]
    seen = []
    for _ in range(4):
        run.train_step(1, 1, 1)
        seen.append(run.scales())
    # Two optimizers and three losses: were each to count, the scale would grow every step.
    assert seen == [[scale] * len(NAMES[per]) for scale in (64, 128, 128, 256)]
    run.train_step(INF, INF, INF)
    assert run.scales() == [128] * len(NAMES[per])
    assert [s.steps_skipped.item() for s in run.task.loss_scales.values()] == [1] * len(NAMES[per])
    assert all(p.requires_grad for p in run.task.d.model.parameters())  # after G's step again


@pytest.mark.parametrize(
    ("scales", "skips", "expected"),
    [((2.0**40, 64.0), (1, 0), [2.0**24, 64.0]), ((64.0, 2.0**40), (0, 1), [64.0, 2.0**24])],
)
def test_what_overflows_in_the_other_network_is_of_the_loss_that_was_propagated(
    build_run, scales, skips, expected
):
    """G's gradients go through D first, in G's scale: D's, too large, is none of theirs."""
    task = build_run(*OVERRIDES, "scaler.per=optimizer", "scaler.max_scale=16777216").task
    for scale, value in zip(task.loss_scales.values(), scales, strict=True):
        scale.scale.fill_(value)
    metrics = task.train_step(0)
    assert (metrics["d_found_inf"], metrics["g_found_inf"]) == skips
    assert [scale.scale.item() for scale in task.loss_scales.values()] == expected
    assert [task.d.prepared.scale, task.g.prepared.scale] == [*task.loss_scales.values()]


def test_a_generator_s_gradient_crosses_the_discriminator_at_its_own_scale(build_run):
    """D is then a part of G: nothing unscales the gradient, or widens it, between the two."""
    found = []
    for scale in (64.0, 128.0):
        task = build_run(*OVERRIDES, "scaler.per=optimizer").task
        task.loss_scales["loss_scale_generator"].scale.fill_(scale)
        made = task._made

        def watched(count, made=made):
            fake = made(count)
            fake.register_hook(found.append)
            return fake

        task._made = watched
        torch.manual_seed(5)
        task.train_step(0)
    one, two = found
    assert one.dtype is two.dtype is torch.float16 and one.any()
    # Activation gradients in FP16 keep 11 bits; the scale is a factor of 2.
    torch.testing.assert_close(two.float().norm(), 2 * one.float().norm(), rtol=2.0**-9, atol=0)


def test_a_scale_of_its_own_changes_no_update(build_run):
    """All of them powers of two: gradients differ by what underflows in FP16 alone."""
    shared, own = (
        build_run(*OVERRIDES, "cpu_half=native", f"scaler.per={per}").task for per in NAMES
    )
    for scale, value in zip(own.loss_scales.values(), (32.0, 512.0), strict=True):
        scale.scale.fill_(value)
    rows = []
    for task in (shared, own):
        torch.manual_seed(5)
        rows.append(task.train_step(0, measure=True))
    for name in ("d_grad_norm", "g_grad_norm"):
        # Activation gradients in FP16 keep 11 bits; a wrong divisor would be a factor of 2 to 16.
        torch.testing.assert_close(rows[0][name], rows[1][name], rtol=2.0**-9, atol=0)
    assert rows[1]["d_loss_scale"] == 32.0 and rows[1]["g_loss_scale"] == 512.0
