"""Ranks read every micro-batch of an epoch on exactly one of them, for any number of ranks, except
the tail that fills no batch.
"""

import zlib
from inspect import isclass, signature

import pytest
import torch

from mprun.config.components import SOURCES as REGISTERED
from mprun.data.source import EpochOrder
from mprun.data.token_streams import TokenStreams
from mprun.entry_points import loaded

from ..distributed.test_shares import ranks_of
from .test_every_source import LOADED, SOURCES

PARTS = 24  # micro-batches of an update, which each of these numbers divides
WORLDS = (1, 2, 3, 4, 8)


def of(batch):
    return [zlib.crc32(part.contiguous().numpy().tobytes()) for part in batch]


def sized(make):
    """With some 2 to 100 batches to an epoch."""
    batches, few = make(seed=1).batches_per_epoch, {}
    if batches > 100:
        few = {"batch_size": 5 * -(-batches // 100)}
    elif batches < 4:
        few = {"batch_size": 2}
    return lambda **more: make(**{"seed": 1} | few | more)


@pytest.fixture
def make(request, tmp_path, cache):
    (tmp_path / "data").mkdir()
    return sized(SOURCES[request.param](tmp_path / "data"))


def read_by_ranks(source, world, count):
    """Return the first `count` micro-batches that the ranks read, by number; none is read twice."""
    found = {}
    for ranks in ranks_of(world):
        own = ranks.micro_batches(PARTS)
        source.share_out(own, PARTS, ranks.rank, world)
        for step in range(count // PARTS):
            for number in own:
                index = step * PARTS + number
                assert index not in found
                found[index] = of(source.train_batch(index))
    return found


@pytest.mark.parametrize("make", SOURCES, indirect=True)
@pytest.mark.few(3)
def test_no_sample_is_taken_twice_or_left_out(make, monkeypatch):
    taken, samples, indices = {}, 0, EpochOrder.indices

    def noted(order, index):
        nonlocal samples
        found, samples = indices(order, index), order._n
        taken[index] = found.tolist()
        return found

    source = make()
    per_epoch = source.batches_per_epoch
    count = -(-2 * per_epoch // PARTS) * PARTS  # two epochs, and the rest of an update
    with monkeypatch.context() as patched:
        patched.setattr(EpochOrder, "indices", noted)
        alone = {index: of(source.train_batch(index)) for index in range(count)}
    for epoch in range(2) if taken else ():
        own = [sample for i in range(per_epoch) for sample in taken[epoch * per_epoch + i]]
        size = len(taken[0])
        assert len(set(own)) == len(own) == per_epoch * size > samples - size
        assert set(own) <= set(range(samples))
    if isinstance(source, TokenStreams):
        check_streams(source, make)
    held_out = [of(batch) for batch in source.eval_batches()]
    for world in WORLDS:
        assert read_by_ranks(source, world, count) == alone
        shares = [[*map(of, source.eval_share(rank, world))] for rank in range(world)]
        turns = [shares[i % world][i // world] for i in range(len(held_out))]
        assert turns == held_out and sum(map(len, shares)) == len(held_out)


def check_streams(source, make):
    """Each stream is the next piece of the ring of tokens, as a single stream reads it."""
    tokens, batch = source.train_tokens, source.train_batch(0)[0].shape[1]
    ring = make(batch_size=1, sequence_length=500 if tokens > 2000 else 1)
    for epoch in range(2):
        first = epoch * ring.batches_per_epoch
        whole = torch.cat([ring.train_batch(first + i)[0] for i in range(ring.batches_per_epoch)])
        first = epoch * source.batches_per_epoch
        parts = [source.train_batch(first + i)[0] for i in range(source.batches_per_epoch)]
        for stream, own in enumerate(torch.cat(parts).unbind(1)):
            start = stream * (tokens // batch)
            expected = whole[start : start + len(own), 0]
            assert len(expected) > 0 and torch.equal(own[: len(expected)], expected)
            assert tokens // batch - len(own) < len(parts[0])  # the rest fills no batch


@pytest.mark.slow
@pytest.mark.parametrize("make", LOADED, indirect=True)
def test_loader_processes_of_a_rank_read_its_share_alone(make):
    source = make(workers=0)
    count = -(-source.batches_per_epoch // PARTS) * PARTS
    alone = {index: of(source.train_batch(index)) for index in range(count)}
    source = make(workers=2)
    try:
        assert read_by_ranks(source, 2, count) == alone
    finally:
        source.close()


@pytest.mark.slow
def test_every_registered_source_is_among_them(tmp_path, cache):
    """Or takes batches by the same function, as the word corpora do."""
    made = set()
    for number, make in enumerate(SOURCES.values()):
        (tmp_path / str(number) / "data").mkdir(parents=True)
        made.add(type(make(tmp_path / str(number) / "data")(seed=1)).train_batch)
    for one in REGISTERED.values():
        builder = None if one.own else loaded(one.builder)
        kind = builder if isclass(builder) else builder and signature(builder).return_annotation
        assert kind is None or kind.train_batch in made, one.name
