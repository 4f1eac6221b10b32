"""Losses of auxiliary heads: propagated by their weight, and not reported."""

import pytest
import torch
from torch.nn import functional as F

from mprun.errors import BadInput

TINY = ["model=googlenet", "model.width=0.0625", "data=synthetic_images", "data.batch_size=4"]
TINY += ["data.train_size=8", "data.eval_size=4", "data.num_classes=6"]


def test_the_loss_by_hand(build_run):
    task = build_run(*TINY, "model.label_smoothing=0.1", "model.aux_weight=0.25").task
    generator = torch.Generator().manual_seed(0)
    logits = [torch.randn(4, 6, generator=generator, requires_grad=True) for _ in range(3)]
    labels = torch.tensor([5, 0, 3, 3])
    task.learner.network = lambda images: tuple(logits)
    reported, propagated = task.loss((torch.zeros(4, 3, 32, 32), labels))
    losses = [F.cross_entropy(one, labels, label_smoothing=0.1) for one in logits]
    assert torch.equal(reported, losses[0])
    torch.testing.assert_close(propagated, losses[0] + 0.25 * (losses[1] + losses[2]))
    gradients = torch.autograd.grad(propagated, logits)
    expected = torch.autograd.grad(losses[0] + (losses[1] + losses[2]) / 4, logits)
    for one, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fp16_naive", "amp"])
def test_every_head_s_loss_is_in_fp32_but_where_the_mode_says_otherwise(build_run, mode):
    task = build_run(*TINY, f"precision={mode}").task
    batch = next(task.load(0))
    with task.forward_context:
        reported, propagated = task.loss(batch)
    assert reported.dtype is propagated.dtype is task.policy.loss_dtype
    assert propagated > reported > 0


def test_without_a_weight_there_are_no_heads(build_run):
    task = build_run(*TINY, "model.aux_weight=0").task
    assert not task.learner.model.heads
    reported, propagated = task.loss(next(task.load(0)))
    assert reported is propagated


OWN = """
from torch import nn

class Two(nn.Module):
    def __init__(self, always):
        super().__init__()
        self.one, self.other, self.always = nn.Linear(3072, 10), nn.Linear(3072, 10), always

    def forward(self, images):
        flat = images.flatten(1)
        both = self.training or self.always
        return (self.one(flat), self.other(flat)) if both else self.one(flat)

def build(data, always=False):
    return Two(always)
"""


def test_a_network_of_one_s_own_may_have_them(build_run, tmp_path, monkeypatch):
    (tmp_path / "two_heads.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    own = ["model=custom", "model.factory=two_heads:build", "data=digits_32"]
    task = build_run(*own, "model.aux_weight=0.5").task
    reported, propagated = task.loss(next(task.load(0)))
    assert reported < propagated < 2 * reported
    with pytest.raises(BadInput, match="must return floating-point logits"):
        build_run(*own, "+model.options.always=true")
