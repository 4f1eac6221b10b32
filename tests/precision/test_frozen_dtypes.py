"""Dtypes where not every parameter is an ordinary one: frozen layers, overrides."""

import pytest
import torch
from torch import nn

from mprun.errors import BadInput

from ..helpers import mixed, one_step

SAMPLED = (
    "model=lstm_lm",
    "model.hidden_size=16",
    "model.embedding_size=16",
    "model.sampled_softmax=64",
    "optim=adagrad",
    "optim.lr=0.1",
)


def test_an_override_without_effect_is_refused(build_run):
    message = "precision.overrides.softmax=fp16: the module computes in FP32"
    with pytest.raises(BadInput, match=message):
        build_run(*SAMPLED, "precision=fp16_master", "precision.overrides.softmax=fp16")


def test_frozen_layers_are_evaluated_unrounded():
    """They compute in FP16, although no optimizer holds them (decision 4: FP32 evaluation)."""
    model, inputs = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), torch.randn(8, 4)
    model[0].requires_grad_(False)
    original, first = model[0].weight.detach().clone(), model[0](inputs)
    seen = []
    learner = mixed(model, "fp16_master")
    model[1].register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    one_step(learner, inputs)
    with learner.evaluating(False) as evaluated:
        evaluated(inputs)
        assert torch.equal(evaluated[0].weight, original)
    rounded, exact = seen
    assert torch.equal(exact, first) and not torch.equal(rounded, first)
