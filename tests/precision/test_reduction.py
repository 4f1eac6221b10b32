"""Ranks divide gradients, sum them in 16 bits, and give gloo's own bits, in one process."""

import math
import os
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from mprun.distributed.ranks import ALONE
from mprun.distributed.reduction import FlatReduction, factors, in_order
from mprun.precision import ForwardContext, get_loss_scale, get_policy
from mprun.precision.loss_scale import StaticLossScale
from mprun.precision.policy import DIVIDE, ORDERS, build_policy

from ..distributed.processes import forkserver
from ..helpers import assert_same_bits, making, mixed, network

F16, B16, F32 = torch.float16, torch.bfloat16, torch.float32
SGD = making(torch.optim.SGD, 0.1)


def reduction(parts, dtype=None, divide="after", order="rank", bucket_bytes=2**20):
    """The sum over micro-batches that stand for ranks."""
    how = {"order": order, "dtype": dtype, "divide": divide, "bucket_bytes": bucket_bytes}
    return FlatReduction(ALONE, parts, fixed=True, **how)


def summed(gradients, divide="after"):
    """The sum as ranks exchange it, in FP16, before what is still to be divided by."""
    own = reduction(len(gradients), F16, divide)
    for gradient in gradients:
        leaf = torch.zeros_like(gradient)
        leaf.grad = gradient.clone()
        own.parameters = [leaf]
        own.end_part()
        assert leaf.grad is None
    return own.total()[0]


@given(st.integers(1, 4096), st.sampled_from(DIVIDE))
def test_both_divisions_together_divide_by_the_number_of_ranks(ranks, divide):
    before, after = factors(ranks, divide)
    assert before * after == ranks
    assert {"before": after == 1, "after": before == 1, "split": True}[divide]


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 12, 64, 96, 1024])
def test_split_divides_as_fsdp_does(ranks):
    fsdp = pytest.importorskip("torch.distributed.fsdp._fully_shard._fsdp_collectives")
    group = type("Group", (), {"size": lambda self: ranks})()
    theirs = fsdp._get_gradient_divide_factors(group, None, F16, "cpu")[:2]
    assert theirs == factors(ranks, "split") or theirs == (None, None)


def test_what_sums_in_fp16_lose():
    """Hand-derived: 65504 is the largest number, 2^-24 the smallest, 2048 + 1 rounds to 2048."""
    large, small = torch.tensor([40000.0]).half(), torch.tensor([2.0**-24]).half()
    assert math.isinf(summed([large, large]))
    assert summed([large, large], divide="before").item() == 40000
    assert summed([small, small]).item() == 2.0**-23
    assert summed([small, small], divide="before").item() == 0
    ones = [torch.tensor([2048.0]).half(), *[torch.ones(1).half()] * 3]
    assert summed(ones).item() == 2048  # each 1 is lost by itself
    assert summed(ones[::-1]).item() == 2052  # 2051 is none of FP16's numbers, and 3 is even


def loss_of(outputs):
    return F.mse_loss(outputs.float(), torch.ones_like(outputs).float())


def loop(policy, scale, inputs, parts, own=None):
    """The engine's gradients of a step of `parts` micro-batches, in the model's order."""
    made = StaticLossScale(scale) if scale > 1 else get_loss_scale("none")
    learner = mixed(network(8, 16, 4), policy, SGD, made, parts=parts, reduction=own)
    learner.zero_grad()
    for batch in inputs.chunk(parts):
        loss_of(learner.network(batch)).backward()
        learner.end_part()
    learner.step(measure=True)
    return list(learner.steps.unscaled_gradients().values())


def by_hand(policy, scale, inputs, parts):
    """Each micro-batch's scaled gradients, as plain torch leaves them in a rounded network."""
    found = []
    for batch in inputs.chunk(parts):
        model = network(8, 16, 4).to(policy.param_dtype)
        with ForwardContext(policy, torch.device("cpu")) as forward_context:
            with forward_context.autocast():
                outputs = model(batch.to(policy.param_dtype))
            (loss_of(outputs) * scale).backward()
        found.append([parameter.grad for parameter in model.parameters()])
    return found


@pytest.mark.parametrize("mode", ["fp32", "fp16_naive", "fp16_master", "amp", "bf16_master"])
@pytest.mark.parametrize("parts", [3, pytest.param(8, marks=pytest.mark.slow)])
def test_micro_batches_are_added_unscaled_and_divided_after(mode, parts):
    """Where autograd adds, so that a static scale acts on each as on a batch of its own."""
    inputs = torch.randn(24, 8, generator=torch.Generator().manual_seed(1))
    policy, scale = get_policy(mode), 128.0 if mode == "amp" else 1.0
    by_part = zip(*by_hand(policy, scale, inputs, parts), strict=True)
    for own, each in zip(loop(policy, scale, inputs, parts), by_part, strict=True):
        each = [gradient.to(own.dtype) / scale for gradient in each]
        assert own.dtype is policy.grad_dtype
        assert torch.equal(own, sum(each[1:], each[0]) / parts)


@pytest.mark.few(5)
@pytest.mark.parametrize("divide", DIVIDE)
@pytest.mark.parametrize("mode", ["fp16_master", "fp16_master_scaled", "fp16_naive", "amp", "fp32"])
def test_a_step_reduces_as_so_many_ranks_would(mode, divide):
    parts, scale = 8, 1024.0 if mode in ("fp16_master_scaled", "amp") else 1.0
    policy = get_policy(mode)
    inputs = torch.randn(32, 8, generator=torch.Generator().manual_seed(2))
    before, after = factors(parts, divide)
    by_part = zip(*by_hand(policy, scale, inputs, parts), strict=True)
    found = loop(policy, scale, inputs, parts, reduction(parts, F16, divide))
    for own, each in zip(found, by_part, strict=True):
        total = torch.zeros_like(each[0], dtype=F16)
        for gradient in each:
            total = total + (gradient.half().float() / before).half()
        expected = total.to(own.dtype) / (scale * after)  # powers of two
        assert torch.equal(own, expected)


@pytest.mark.parametrize("order", ORDERS)
def test_a_step_adds_in_the_order_of_its_policy_and_bucket_by_bucket(order):
    policy, parts = get_policy("fp16_master"), 6
    inputs = torch.randn(24, 8, generator=torch.Generator().manual_seed(2))
    each = zip(*by_hand(policy, 1.0, inputs, parts), strict=True)
    own_parts = [torch.stack([own.to(B16).flatten() for own in part]) for part in each]
    # The last parameters first: a bucket ends with the one that fills it.
    first = in_order(torch.cat(own_parts[:0:-1], 1), order)
    totals = [in_order(own_parts[0], order), *reversed(first.split(sizes(own_parts[:0:-1])))]
    own_sum = reduction(parts, B16, order=order, bucket_bytes=2 * sum(sizes(own_parts[1:])))
    for own, expected in zip(loop(policy, 1.0, inputs, parts, own_sum), totals, strict=True):
        assert torch.equal(own.flatten(), expected.float() / parts)


def sizes(parts):
    return [part.shape[1] for part in parts]


def test_a_sum_that_overflows_on_the_wire_is_skipped_by_a_scaler_and_lands_without():
    for scale, skipped in ((StaticLossScale(2.0), True), (get_loss_scale("none"), False)):
        model = nn.Linear(1, 1, bias=False)
        learner = mixed(model, "fp16_master", scale=scale, parts=2, reduction=reduction(2, F16))
        before = model.weight.detach().clone()
        learner.zero_grad()
        for _ in range(2):
            (learner.network(torch.full((1, 1), 30000.0)).sum() * 1.2).backward()
            learner.end_part()
        update = learner.step()
        if skipped:
            assert update.found_inf.item() == 1 and torch.equal(model.weight, before)
        else:
            assert update.found_inf is None and not torch.isfinite(model.weight).any()


def numbers(rank, dtype, count=80003):
    torch.manual_seed(rank)
    return (torch.randn(count) * torch.randn(count).mul(2).exp()).to(dtype)


# (ranks, dtype, elements) of sums by gloo: some chunks are empty; segments are as long as they get.
SUMS = [(ranks, dtype, 80003) for ranks in (2, 3, 4) for dtype in (F16, B16, F32)]
SUMS += [(4, F16, 3), (3, F32, 1_900_003)]


def gradients(rank, dtype, wrapped=lambda model: model):
    """Return the gradients of a linear layer after a batch of this rank's own."""
    torch.manual_seed(9)
    model = wrapped(nn.Linear(40, 30).to(dtype))
    torch.manual_seed(rank)
    model(torch.randn(16, 40).to(dtype)).float().square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]


def work(rank, folder):
    """One of four processes of torch.distributed (gloo); the first one keeps what it has."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(f"{folder}/store", 4)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
    groups, found = {ranks: dist.new_group(range(ranks)) for ranks in (2, 3, 4)}, {}
    pair = groups[2]

    def stock(model):
        return DistributedDataParallel(model, process_group=pair)

    def compressed(model):
        model = stock(model)
        model.register_comm_hook(pair, fp16_compress_hook)
        return model

    for ranks, dtype, count in SUMS:
        if rank < ranks:
            found[ranks, dtype, count] = numbers(rank, dtype, count)
            dist.all_reduce(found[ranks, dtype, count], group=groups[ranks])
    if rank < 2:
        found["stock"] = gradients(rank, F16, stock)
        found["compressed"] = gradients(rank, F32, compressed)
    if rank == 0:
        torch.save(found, f"{folder}/found.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory):
    """Return what four ranks make of `numbers` and gradients; the server has imported torch."""
    folder = tmp_path_factory.mktemp("ranks")
    forkserver()
    how = {"join": False, "daemon": True, "start_method": "forkserver"}
    ranks = torch.multiprocessing.start_processes(work, (folder,), 4, **how)
    ends = time.monotonic() + 120
    while not ranks.join(timeout=1):
        assert time.monotonic() < ends
    return torch.load(folder / "found.pt")


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "dtype", "count"), SUMS)
def test_a_ring_has_the_bits_of_gloo(of_ranks, ranks, dtype, count):
    terms = torch.stack([numbers(rank, dtype, count) for rank in range(ranks)])
    theirs = of_ranks[ranks, dtype, count]
    assert_same_bits([in_order(terms, "ring")], [theirs])
    # Two ranks have one order; with more, each order has bits of its own.
    others = [in_order(terms, order) for order in ("rank", "tree")]
    assert [torch.equal(own, theirs) for own in others] == [ranks == 2] * 2


def rounded(values, dtype):
    """To nearest, ties to even, by the bits: numpy has no BF16."""
    if dtype is not B16:
        return values.astype({F16: np.float16, F32: np.float32}[dtype]).astype(np.float32)
    bits = values.astype(np.float32).view(np.uint32)
    return (bits + 0x7FFF + (bits >> 16 & 1) >> 16 << 16).view(np.float32)


def halves(terms, dtype):
    """A sum of neighbours in pairs, from its root: the left half is a power of two."""
    if len(terms) == 1:
        return terms[0]
    left = 2 ** ((len(terms) - 1).bit_length() - 1)
    return rounded(halves(terms[:left], dtype) + halves(terms[left:], dtype), dtype)


@pytest.mark.few(10)
@pytest.mark.parametrize("dtype", [F16, B16, F32])
@pytest.mark.parametrize("ranks", [1, 2, 3, 6, 7, 8, 13, 64, 100])
def test_sums_in_other_orders_are_those_of_numpy(ranks, dtype):
    terms = torch.stack([numbers(rank, dtype, 997) for rank in range(ranks)])
    plain = terms.float().numpy()
    assert np.array_equal(in_order(terms, "tree").float().numpy(), halves(plain, dtype))
    one_by_one = in_fp32 = plain[0]
    for term in plain[1:]:
        one_by_one, in_fp32 = rounded(one_by_one + term, dtype), in_fp32 + term
    assert np.array_equal(in_order(terms, "rank").float().numpy(), one_by_one)
    assert np.array_equal(in_order(terms, "fp32").float().numpy(), rounded(in_fp32, dtype))


def test_small_terms_survive_in_a_tree_and_in_fp32():
    """Hand-derived: 2048 + 1 rounds to 2048 in FP16, and so does 2048 + 1 of every later rank."""
    terms = torch.tensor([[2048.0]] + [[1.0]] * 15).half()
    found = {order: in_order(terms, order).item() for order in ORDERS}
    # One element is of chunk 0, which begins at the last rank: 15 ones are added up first.
    assert found == {"rank": 2048, "ring": 2064, "tree": 2062, "fp32": 2064}


@pytest.mark.slow
def test_stock_ddp_and_its_compression_divide_before_in_fp16(of_ranks):
    for name, dtype in (("stock", F16), ("compressed", F32)):
        each = [gradients(rank, dtype) for rank in range(2)]
        for pair, theirs in zip(zip(*each, strict=True), of_ranks[name], strict=True):
            assert torch.equal(summed(list(pair), "before").to(dtype), theirs)


@pytest.mark.few(4)
@pytest.mark.parametrize("scaler", ["none", "static", "dynamic", "apex", "logmax"])
@pytest.mark.parametrize(
    ("param_dtype", "reduce"),
    [  # FP32 gradients summed in FP16 are left out: one rank sums nothing, and so rounds nothing
        ("fp32", None),
        ("fp32", F32),
        ("fp16", None),
        ("fp16", F32),
        ("fp16", F16),
    ],
)
def test_the_same_micro_batch_four_times_is_that_batch_once(param_dtype, scaler, reduce):
    """To the last bit, four being a power of two: gradients, weights, scale and its counters."""
    found = []
    for parts in (1, 4):
        policy, scale = build_policy("own", {"param_dtype": param_dtype}), get_loss_scale(scaler)
        own = reduction(parts, divide="before", dtype=reduce) if reduce else None
        learner = mixed(network(6, 4), policy, SGD, scale, parts=parts, reduction=own)
        for step in range(4):
            inputs = torch.randn(5, 6) * (1e6 if step == 2 else 1)  # one overflow in FP16
            learner.zero_grad()
            for _ in range(parts):
                learner.network(inputs).square().mean().backward()
                learner.end_part()
            learner.step()
            torch.manual_seed(step)
        found.append([*learner.updated, *scale.state_dict().values()])
    assert_same_bits(*found)
