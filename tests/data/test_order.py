"""Order is a pure function of seed and epoch."""

import random

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mprun.data import permutation
from mprun.data.source import EpochOrder, Reader, kept_random_state, rotation, seed_sample

from ..helpers import raises_line

CPU = torch.device("cpu")


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**63), epoch=st.integers(0, 10_000), n=st.integers(0, 500))
def test_is_a_permutation_and_pure(seed, epoch, n):
    order = permutation(seed, epoch, n)
    assert order.dtype == torch.int64
    assert sorted(order.tolist()) == list(range(n))
    torch.manual_seed(epoch)
    np.random.seed(3)
    assert torch.equal(order, permutation(seed, epoch, n))
    assert 0 <= rotation(seed, epoch, n + 1) <= n


def test_seeds_and_epochs_give_different_orders():
    orders = {tuple(permutation(s, e, 30).tolist()) for s in range(20) for e in range(20)}
    # 400 of 30! orders; a mix like seed + epoch would give 39.
    assert len(orders) == 400


def test_every_place_is_equally_likely():
    draws = torch.stack([permutation(s, 0, 4) for s in range(4000)])
    counts = torch.stack([torch.bincount(draws[:, i], minlength=4) for i in range(4)])
    # Binomial(4000, 1/4): standard deviation 27; five of them, over 16 cells.
    assert (counts - 1000).abs().max() < 5 * 27.4


def test_known_values_do_not_change_between_versions():
    # A checkpoint resumed elsewhere continues with the same samples only if these stay.
    assert permutation(0, 0, 8).tolist() == [3, 2, 1, 6, 0, 7, 4, 5]
    assert permutation(3, 7, 8).tolist() == [5, 3, 2, 1, 0, 6, 7, 4]
    assert (rotation(0, 0, 1000), rotation(3, 7, 10**12)) == (271, 505081419742)


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=4))
def test_a_samples_generators_have_every_bit_of_the_documented_words(key):
    words = np.random.SeedSequence(key).generate_state(6).tolist()
    before = torch.get_rng_state()
    with kept_random_state():
        seed_sample(*key)
        assert np.random.randint(2**31) == np.random.RandomState(words[:2]).randint(2**31)
        expected = random.Random(words[2] * 2**32 + words[3])
        assert random.getrandbits(64) == expected.getrandbits(64)
        assert torch.initial_seed() == words[4] // 2 * 2**32 + words[5]
    assert torch.equal(torch.get_rng_state(), before)


def test_epoch_order_drops_the_tail_and_wraps():
    order = EpochOrder(seed=5, n=10, batch_size=3, device=CPU)
    assert order.batches_per_epoch == 3
    resumed = EpochOrder(seed=5, n=10, batch_size=3, device=CPU)
    assert torch.equal(resumed.indices(5), permutation(5, 1, 10)[6:9])
    first = torch.cat([order.indices(i) for i in range(3)])
    assert torch.equal(first, permutation(5, 0, 10)[:9])
    assert torch.equal(order.indices(4), permutation(5, 1, 10)[3:6])


def test_refusals():
    held_out = type("HeldOut", (Reader,), {"read": None})(7, "x", 3, None)
    assert [held_out.places(number) for number in range(3)] == [[0, 1, 2], [3, 4, 5], [6]]
    for make, says in (
        (lambda: permutation(-1, 0, 3), "non-negative"),
        (lambda: permutation(0, -1, 3), "non-negative"),
        (lambda: EpochOrder(0, 3, 4, CPU), "batch_size=4 is not allowed: must be 1 to 3"),
        (lambda: EpochOrder(0, 3, 0, CPU), "batch_size=0"),
        (lambda: EpochOrder(-2, 3, 1, CPU), "seed=-2"),
        (lambda: EpochOrder(0, 3, 1, CPU).indices(-1), "index=-1"),
        (lambda: held_out.places(-1), "index=-1 is not allowed: must be 0 or more"),
        (lambda: held_out.places(3), "index=3 is not allowed: must be below 3"),
    ):
        with raises_line(ValueError, says):
            make()
