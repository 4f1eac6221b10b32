"""Saving and restoring running statistics, through the layers' own buffers."""

import pytest
import torch
from torch import nn

from mprun.precision import BatchNormGuard

from ..helpers import assert_same_bits


def network(dtype=torch.float32):
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.BatchNorm1d(27, momentum=None)
    return nn.Sequential(*layers).to(dtype)


def statistics(model):
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def test_the_guarded_network_computes_what_it_did():
    model, reference = network(), network()
    BatchNormGuard(model)
    assert_same_bits(statistics(model), statistics(reference))
    for _ in range(3):
        x = torch.randn(4, 1, 5, 5)
        assert torch.equal(model(x), reference(x))
    assert_same_bits(statistics(model), statistics(reference))
    assert model[1].num_batches_tracked == 3
    assert model.state_dict().keys() == reference.state_dict().keys()
    # The buffers are one block of memory per dtype.
    blocks = [own.untyped_storage() for own in (model[1].running_mean, model[3].running_var)]
    assert blocks[0].data_ptr() == blocks[1].data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("poison", [float("inf"), float("nan")])
def test_restores_where_told_to(poison, dtype):
    model = network(dtype)
    guard = BatchNormGuard(model)
    model(torch.randn(4, 1, 5, 5).to(dtype))
    guard.save()
    saved = statistics(model)
    model(torch.full((4, 1, 5, 5), poison, dtype=dtype))
    poisoned = statistics(model)
    assert model[1].running_mean.isnan().all()
    guard.restore_where(torch.zeros(()))
    assert model[1].running_mean.isnan().all()
    assert torch.equal(model[1].num_batches_tracked, poisoned["1.num_batches_tracked"])
    guard.restore_where(torch.ones(()))
    assert_same_bits(statistics(model), saved)


def test_state_loaded_into_the_model_reaches_the_guard():
    model, other = network(), network()
    guard = BatchNormGuard(model)
    other(torch.randn(4, 1, 5, 5))
    model.load_state_dict(other.state_dict())
    guard.save()
    model(torch.randn(4, 1, 5, 5))
    guard.restore_where(torch.ones(()))
    assert_same_bits(statistics(model), statistics(other))


def test_a_network_without_batch_norm_and_one_without_statistics():
    for model in (nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=False)):
        guard = BatchNormGuard(model)
        guard.save()
        guard.restore_where(torch.ones(()))
        assert guard.flat == []
