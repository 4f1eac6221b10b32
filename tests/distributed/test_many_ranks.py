"""64 and 1,024 ranks on torch's fake process group: who takes what, which buckets, which shapes.

It exchanges nothing, so that numbers are wrong by design; everything else is as with real ranks.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from mprun.distributed.reduction import FlatReduction, OverlappedReduction
from mprun.precision import get_loss_scale

from ..helpers import mixed
from .fake_ranks import FakeRanks


@pytest.fixture(params=[64, 1024])
def fake(request):
    dist.init_process_group("fake", rank=5, world_size=request.param, store=FakeStore())
    yield FakeRanks(5, request.param)
    dist.destroy_process_group()


def model_of():
    return nn.Sequential(
        nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.Flatten(), nn.Linear(64 * 36, 256)
    )


def updated(reduction, mode="fp16_master_scaled"):
    learner = mixed(model_of(), mode, None, get_loss_scale("static"), reduction=reduction)
    learner.zero_grad()
    learner.sum_at_once(True)
    learner.network(torch.randn(2, 3, 8, 8)).mean().backward()
    learner.end_part()
    learner.step()
    return learner


def test_the_flat_sum_is_in_fp32_and_in_buckets(fake):
    learner = updated(FlatReduction(fake, fake.world, fixed=False, bucket_bytes=2**20))
    numbers = sum(own.numel() for own in learner.updated)
    assert {dtype for dtype, _ in fake.summed} == {torch.float32}
    assert sum(numel for _, numel in fake.summed) == numbers
    assert len(fake.summed) == 2  # the last layer's 2.3 MB fill one


@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_ddp_hands_its_buckets_over(fake, dtype):
    own = {"fixed": False, "bucket_bytes": 2**20, "dtype": dtype}
    learner = updated(OverlappedReduction(fake, fake.world, **own))
    assert sum(numel for _, numel in fake.summed) == sum(own.numel() for own in learner.updated)
    assert {found for found, _ in fake.summed} == {dtype or torch.float32}


def test_the_fixed_order_gathers_every_micro_batch(fake):
    reduction = FlatReduction(fake, 1, fixed=True, bucket_bytes=2**20)
    for _ in range(3):
        reduction.add([torch.ones(4, 2), None, torch.ones(5)])
    total = reduction.total()
    assert total[1] is None
    # Every rank has the same in this group: the sum over 3 micro-batches of each.
    assert torch.equal(total[0], torch.full((4, 2), 3.0 * fake.world))
    assert torch.equal(total[2], torch.full((5,), 3.0 * fake.world))


def test_memory_order_is_kept(fake):
    like = torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    reduction = FlatReduction(fake, 1, fixed=True, bucket_bytes=2**20)
    reduction.add([like.clone(memory_format=torch.preserve_format), torch.randn(3)])
    total = reduction.total()
    assert total[0].stride() == like.stride()
    torch.testing.assert_close(total[0], like * fake.world, rtol=1e-4, atol=1e-4)


def test_a_rank_without_a_gradient_is_named(fake):
    reduction = FlatReduction(fake, 1, fixed=False, bucket_bytes=2**20)
    reduction.add([torch.ones(2), torch.ones(3)])
    reduction.total()
    reduction.add([torch.ones(2), None])
    with pytest.raises(Exception, match="parameter 1 has no gradient on rank 5"):
        reduction.total()


def test_sparse_gradients_are_refused(fake):
    reduction = FlatReduction(fake, 1, fixed=False, bucket_bytes=2**20)
    with pytest.raises(Exception, match="sparse gradients are not summed over ranks"):
        reduction.add([torch.eye(2).to_sparse()])
