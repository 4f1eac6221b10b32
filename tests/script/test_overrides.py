"""Overrides of `prepare` mean modules, and an arm of which they leave nothing is a control."""

import pytest
import torch

import mprun

from ..precision.containers import KINDS, Shared, seen_in
from .loops import Forward
from .networks import prepared, take_step

F32 = torch.float32
DTYPES = {"fp32": F32, "bf16": torch.bfloat16}


def trained(model, mode, overrides):
    """Take two steps; return the model."""
    model, optimizer = prepared(mode, model, overrides=overrides)
    for _ in range(2):
        take_step(optimizer, lambda: model(torch.randn(3, 4)).square().mean())
    assert all(own.isfinite().all() for own in model.parameters())
    return model


@pytest.mark.parametrize("mode", ["bf16_master", "fp16_master_scaled", "bf16_naive", "amp", "fp32"])
@pytest.mark.parametrize("kind", [*KINDS, "shared"])
@pytest.mark.few(8)
def test_a_container_means_what_is_in_it(kind, mode):
    other = "bf16" if mode == "fp32" else "fp32"
    pattern = "decoder.layers" if kind == "shared" else "parts"
    model = trained(Shared() if kind == "shared" else KINDS[kind](), mode, {pattern: other})
    assert model(torch.randn(3, 4)).dtype is F32
    found = seen_in(model)
    inside = {n for n in found if n.startswith("parts") or ".layers." in n}
    assert inside and {found[name] for name in inside} == {DTYPES[other]}
    if mode != "amp":  # there a layer takes any dtype, and casts itself
        half = mprun.precision.get_policy(mode).param_dtype
        assert {found[name] for name in {*found} - inside} == {half}


@pytest.mark.parametrize("mode", ["bf16_master", "fp8_delayed", "amp"])
def test_an_arm_of_which_overrides_leave_nothing_is_said_at_its_first_step(mode, tmp_path):
    with pytest.warns(UserWarning, match=f"precision={mode}: no operation .* is a control") as said:
        model = trained(KINDS["ModuleList"](), mode, {"*": "fp32"})
    assert len(said) == 1
    assert "unused" in model.forward.shared.audit.result()


def test_a_loss_in_the_model_stays_fp32_under_a_pattern_that_matches_it():
    own = Forward(lambda m, x: m.net(x), lambda: torch.nn.Linear(4, 4), loss=torch.nn.MSELoss)
    model = mprun.prepare(own, precision="bf16_master", overrides={"loss*": "fp32"})
    targets = torch.rand(3, 4)
    outputs = model(torch.randn(3, 4))
    assert torch.equal(model.loss(outputs, targets), (outputs - targets).square().mean())


def test_state_that_does_not_decay_is_told_once_before_the_first_step():
    with pytest.warns(UserWarning, match="AdamW betas: bf16_naive keeps .* times 0.999 ") as told:
        model, optimizer = prepared("bf16_naive", torch.nn.Linear(4, 4), torch.optim.AdamW)
        for _ in range(2):
            take_step(optimizer, lambda: model(torch.randn(3, 4)).sum())
    assert len(told) == 1


@pytest.mark.parametrize("mode", ["fp8_tensorwise", "fp16_master_scaled", "nvfp4", "amp"])
def test_an_empty_first_batch_says_nothing_of_the_mode(mode):
    layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 2))
    model, optimizer = prepared(mode, layers)
    for rows in (0, 5):
        model(torch.randn(rows, 8)).sum().backward()
        optimizer.step()
    audit = model.forward.shared.audit.result()
    assert audit["watched"] and "unused" not in audit
