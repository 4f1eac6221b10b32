"""Each rank reads its share: nothing twice, nothing left out, with the same chances for all."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mprun.data.source import EpochOrder, completed
from mprun.distributed.ranks import ALONE, Ranks, seed_micro_batch

CPU = torch.device("cpu")


def ranks_of(world):
    found = []
    for rank in range(world):
        found.append(Ranks())
        found[-1].rank, found[-1].world = rank, world
    return found


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 1024), st.integers(1, 8), st.integers(0, 100), st.data())
def test_the_samples_of_the_ranks_are_those_of_the_update(world, own, step, data):
    batch, parts = data.draw(st.integers(1, 4)), world * own
    order = EpochOrder(3, batch * parts * 2 + 1, batch, CPU)
    taken = []
    for ranks in ranks_of(world):
        assert len(ranks.micro_batches(parts)) == own
        taken += [step * parts + number for number in ranks.micro_batches(parts)]
    assert taken == list(range(step * parts, (step + 1) * parts))
    assert len(order.indices(taken[0] % order.batches_per_epoch)) == batch
    streams = [stream for r in ranks_of(world) for stream in range(parts)[r.streams(parts)]]
    assert streams == list(range(parts))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 1024), st.integers(0, 3000))
def test_every_held_out_batch_is_evaluated_once(world, batches):
    source = completed(SimpleNamespace(eval_batches=lambda: iter(range(batches))))
    taken = [list(source.eval_share(ranks.rank, world)) for ranks in ranks_of(world)]
    assert sorted(number for own in taken for number in own) == list(range(batches))
    assert [number for number in range(batches)] == [
        taken[number % world][number // world] for number in range(batches)
    ]


def test_ranks_that_do_not_divide():
    with pytest.raises(ValueError, match="3 ranks cannot divide 4 micro-batches"):
        ranks_of(3)[0].micro_batches(4)


def drawn():
    return torch.rand(2).tolist(), random.random(), np.random.random()


def test_chances_are_a_function_of_seed_step_and_micro_batch():
    seed_micro_batch(CPU, 1, 2, 3)
    first = drawn()
    drawn()
    seed_micro_batch(CPU, 1, 2, 3)
    assert drawn() == first
    for other in ((2, 2, 3), (1, 3, 3), (1, 2, 4), (1, 2, 3, 1)):
        seed_micro_batch(CPU, *other)
        assert drawn() != first


def test_one_rank_alone_exchanges_nothing():
    own = torch.arange(3.0)
    assert ALONE.gather(own) is own
    assert ALONE.first("x") == "x"
    assert ALONE.together(lambda: 5) == 5
    assert ALONE.stops(15) == 15
    assert ALONE.mean([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])], 2) == [2.0, 3.0]
