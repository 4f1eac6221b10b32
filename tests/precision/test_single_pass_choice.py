"""Which way an update takes, and what is said about it."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, RMSprop

from benchmarks.update_bytes import amp_recipe_bytes, update_bytes
from mprun.config.compose import compose_config
from mprun.errors import BadInput
from mprun.precision import StaticLossScale, get_policy
from mprun.record.memory import memory_by_kind
from mprun.training.environment import number_formats

from ..helpers import making, mixed, one_step

SMALL = ["model=conv_autoencoder", "data.batch_size=2"]


def made(mode="fp16_master", make=None, update="auto", scale=8.0, **values):
    make = making(make or (lambda t: SGD(t, 0.1, fused=True)))
    scale = None if scale is None else StaticLossScale(scale)
    return mixed(nn.Linear(4, 4), mode, make, scale, update=update, **values)[1]


@pytest.mark.parametrize(
    ("mode", "scale", "path", "reason"),
    [
        ("fp16_master", None, "single_pass", "blocks"),
        ("bf16_master", None, "single_pass", "blocks"),
        ("amp", 8.0, "single_pass", "blocks"),
        ("fp32", None, "fused", "no cast and no loss scale"),
        ("amp_bf16", None, "fused", "no cast and no loss scale"),
    ],
)
def test_auto(mode, scale, path, reason):
    optimizer = made(mode, scale=scale)
    assert optimizer.update_path == path
    assert reason in optimizer.update_reason


def test_auto_takes_what_is_faster_on_a_cpu():
    """Without casts only SGD's kernel saves the pass that unscales."""
    adam = made("amp", lambda t: Adam(t, fused=True))
    assert adam.update_path == "fused" and "unscaled in place" in adam.update_reason
    assert made(make=lambda t: Adam(t, fused=True)).update_path == "single_pass"
    asked = made("amp", lambda t: Adam(t, fused=True), update="single_pass")
    assert asked.update_path == "single_pass"


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda t: RMSprop(t), "RMSprop: only SGD, Adam"),
        (lambda t: Adam(t, amsgrad=True, fused=True), "amsgrad=True"),
        (lambda t: SGD(t, 0.1, maximize=True, fused=True), "maximize=True"),
        (lambda t: Adagrad(t, lr_decay=0.1, fused=True), "lr_decay=0.1"),
        (lambda t: SGD(t, 0.1, foreach=True), "no fused kernel"),
    ],
)
def test_what_has_none_falls_back_or_is_refused(make, why):
    optimizer = made(make=make, scale=None)
    assert optimizer.update_path != "single_pass" and why in optimizer.update_reason
    with pytest.raises(ValueError, match="optim.implementation=single_pass: .*allowed: auto"):
        made(make=make, update="single_pass", scale=None)


def test_16_bit_updates_keep_their_arithmetic():
    optimizer = made("fp16_naive", lambda t: SGD(t, 0.1, foreach=True))
    assert optimizer.update_path == "foreach" and "in 16 bits" in optimizer.update_reason


def test_plain_is_plain():
    assert made(update="plain").update_path == "fused"
    with pytest.raises(ValueError, match="update='fast'"):
        made(update="fast")


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["precision=fp16_naive"], "updates in 16 bits operation"),
        (["precision=bf16_naive"], "updates in 16 bits operation"),
        (["precision=fp16_master", "precision.grad_dtype=fp16"], "unscaled in 16 bits"),
    ],
)
def test_the_configuration_refuses_what_cannot_be(overrides, reason):
    with pytest.raises(BadInput, match=f"optim.implementation=single_pass: .*{reason}"):
        compose_config([*SMALL, *overrides, "optim.implementation=single_pass"])


@pytest.mark.parametrize("implementation", ["auto", "single_pass", "fused"])
def test_a_run_says_what_it_used_and_keeps_no_cast_gradients(build_run, implementation):
    built = build_run(
        *SMALL, "precision=fp16_master_scaled", f"optim.implementation={implementation}"
    )
    built.task.train_step(0)
    own = number_formats(built.task.learners, built.forward_context, "none")["update"]["model"]
    single = implementation != "fused"
    assert (own["path"] == "single_pass") == single and own["reason"]
    memory = memory_by_kind(built.task.learners.values())
    assert ("gradients_in_update" in memory) == (not single)
    weights = memory["parameters"]["float16"]
    assert memory["gradients"]["float16"] == weights
    if not single:
        assert memory["gradients_in_update"]["float32"] == 2 * weights


@pytest.mark.parametrize(
    ("optimizer", "mode", "path", "checks", "expected"),
    [
        # 2 check + 2 gradient + 4 + 4 master + 4 + 4 momentum + 2 copy
        ("sgd_momentum", "fp16_master", "single_pass", True, 22),
        ("sgd_momentum", "fp16_master", "single_pass", False, 20),
        ("sgd_momentum", "amp", "single_pass", True, 24),
        ("adam", "bf16_master", "single_pass", True, 30),
        # 2 + 4 cast, 4 + 4 check, 4 + 16 update, 4 + 2 copy
        ("sgd_momentum", "fp16_master", "plain", True, 40),
        ("sgd_momentum", "amp", "plain", True, 28),
        ("sgd", "fp32", "plain", False, 12),
    ],
)
def test_bytes(optimizer, mode, path, checks, expected):
    assert update_bytes(optimizer, get_policy(mode), path=path, checks=checks).step == expected


def test_bytes_of_the_documented_recipe_and_of_clipping():
    assert amp_recipe_bytes("sgd_momentum").total == 38
    policy = get_policy("fp16_master")
    single = update_bytes("sgd_momentum", policy, path="single_pass", checks=True, clips=True)
    plain = update_bytes("sgd_momentum", policy, path="plain", checks=True, clips=True)
    assert (single.step, plain.step) == (22, 52)
    with pytest.raises(ValueError, match="no master weights"):
        update_bytes("sgd", get_policy("fp16_naive"), path="plain", checks=True)
    narrow = dataclasses.replace(policy, state_dtype="fp8")
    with pytest.raises(ValueError, match="state_dtype=fp8: state is widened"):
        update_bytes("sgd", narrow, path="plain", checks=True)
    with pytest.raises(ValueError, match="optimizer='rmsprop'"):
        amp_recipe_bytes("rmsprop")


def test_memory_format_of_a_parameter_may_change_later():
    """The blocks are views of storages: another storage has to be noticed."""
    results = []
    for update, how in (("plain", {"foreach": True}), ("auto", {"fused": True})):
        torch.manual_seed(1)
        model = nn.Conv2d(4, 8, 3)
        cast, optimizer = mixed(model, "fp16_master", making(SGD, 0.1, 0.9, **how), update=update)
        for step in range(3):
            if step == 1:
                model.to(memory_format=torch.channels_last)
            one_step(cast, optimizer, torch.linspace(-1, 1, 2 * 4 * 5 * 5).view(2, 4, 5, 5))
        assert torch.equal(model.weight, optimizer.masters["weight"].half())
        results.append(optimizer.masters["weight"])
    # foreach and fused round differently: 2 operations, 3 steps.
    torch.testing.assert_close(results[0], results[1], rtol=2.0**-20, atol=2.0**-22)
