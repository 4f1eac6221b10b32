"""Dtypes where not every parameter is an ordinary one: row tables, frozen layers, overrides."""

import pytest
import torch
from torch import nn

from mprun.errors import BadInput
from mprun.precision.emulation import ForwardContext
from mprun.tasks import Learner

from ..helpers import mixed

SAMPLED = (
    "model=lstm_lm",
    "model.hidden_size=16",
    "model.embedding_size=16",
    "model.sampled_softmax=64",
    "optim=adagrad",
    "optim.lr=0.1",
)


def test_rows_alone_in_16_bits_are_cast_before_they_are_clipped(build_run):
    """In FP16 a clip factor of 1e-4 would flush what is below 2^-25 / 1e-4."""
    built = build_run(
        *SAMPLED, "precision=fp16_master", "precision.overrides.lstm=fp32", "train.clip_norm=0.0001"
    )
    optimizer = built.task.learner.optimizer
    assert {row.row_dtype for row in optimizer.rows} == {torch.float16}
    assert set(optimizer.update_dtypes()) == {"float32"}
    built.task.train_step(0)
    gathered = [row.table.gathered.leaves[row.key] for row in optimizer.rows]
    assert gathered and all(leaf.grad is None for leaf in gathered)  # taken, and so cast


@pytest.mark.parametrize(
    ("mode", "name"), [("amp", "output"), ("fp16_master", "softmax"), ("amp", "embedding")]
)
def test_an_override_without_effect_is_refused(build_run, mode, name):
    with pytest.raises(BadInput, match=f"precision.overrides.{name}=float16: computes in FP32"):
        build_run(*SAMPLED, f"precision={mode}", f"precision.overrides.{name}=fp16")


def test_frozen_layers_are_evaluated_unrounded():
    """They have a master too, although no optimizer holds it (decision 4: FP32 evaluation)."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    original = model[0].weight.detach().clone()
    cast, optimizer = mixed(model, "fp16_master")
    assert model[0].weight.dtype is torch.float16
    assert not torch.equal(model[0].weight.float(), original)
    forward_context = ForwardContext(cast.policy, torch.device("cpu"))
    with Learner(cast, optimizer).evaluating(forward_context, False) as copy:
        assert torch.equal(copy[0].weight, original)
