"""Streams from files and from memory, bit for bit against the definition."""

import os
import shutil

import numpy as np
import pytest
import torch

from mprun.data import DataError, token_streams
from mprun.data.source import DamagedData, Serving, permutation, rotation
from mprun.data.token_streams import TokenStreams, Windows


def token_file(path, tokens):
    np.asarray(tokens, "<i4").tofile(path)
    return path


@pytest.fixture
def files(tmp_path):
    train = token_file(tmp_path / "train", range(103))
    return [train], token_file(tmp_path / "held_out", range(1000, 1060))


def streams_of(train, held_out, batch=4, length=5, seed=0, device="cpu", **more) -> TokenStreams:
    serving = Serving(batch_size=batch, seed=seed, device=device)
    return TokenStreams(train, held_out, Windows(sequence_length=length, **more), serving)


def equal(first, second) -> bool:
    return all(
        a.dtype == b.dtype == torch.int64 and torch.equal(a, b)
        for a, b in zip(first, second, strict=True)
    )


def defined(index, batch_size, sequence_length):
    """A training batch of 0 ... 102 for seed 3: a turned ring cut into equal streams."""
    stride = 103 // batch_size
    epoch, batch = divmod(index, stride // sequence_length)
    ring = torch.arange(103).roll(-rotation(3, epoch, 103))
    starts = torch.arange(batch_size) * stride + batch * sequence_length
    places = torch.arange(sequence_length)[:, None] + starts
    return ring[places % 103], ring[(places + 1) % 103]


@pytest.mark.parametrize("block_tokens", [1, 45, 1 << 18])
@pytest.mark.parametrize(
    ("batch_size", "sequence_length"), [(4, 5), (1, 1), (1, 103), (103, 1), (7, 3), (3, 34)]
)
@pytest.mark.few
def test_as_from_memory_in_any_order(files, monkeypatch, batch_size, sequence_length, block_tokens):
    monkeypatch.setattr(token_streams, "BLOCK_TOKENS", block_tokens)
    sizes = (batch_size, sequence_length, 3, "cpu")
    streams = streams_of(*files, *sizes)
    memory = streams_of([torch.arange(103)], torch.arange(1000, 1060), *sizes)
    assert streams.batches_per_epoch == memory.batches_per_epoch
    evaluation = streams.eval_batches()
    for place in np.random.default_rng(0).permutation(3 * streams.batches_per_epoch):
        index = int(place)
        assert equal(streams.train_batch(index), memory.train_batch(index))
        assert equal(streams.train_batch(index), defined(index, batch_size, sequence_length))
        next(evaluation, None)
    for ours, theirs in zip(streams.eval_batches(), memory.eval_batches(), strict=True):
        assert equal(ours, theirs)


def test_without_rotation_each_epoch_starts_at_the_first_token(files):
    streams = streams_of(*files, rotate=False)
    assert streams.batches_per_epoch == 5  # 103 // 4 = 25 tokens a stream
    for epoch in (0, 1, 7):
        for batch in range(5):
            tokens, targets = streams.train_batch(5 * epoch + batch)
            first = [stream * 25 + batch * 5 for stream in range(4)]
            assert tokens.t().tolist() == [list(range(start, start + 5)) for start in first]
            assert torch.equal(targets, tokens + 1)


def test_without_rotation_the_last_target_is_the_first_token(files, tmp_path):
    held_out = files[1]
    train = token_file(tmp_path / "hundred", range(100))
    streams = streams_of([train], held_out, rotate=False)
    assert streams.train_batch(4)[1][:, 3].tolist() == [96, 97, 98, 99, 0]


@pytest.mark.parametrize("block_tokens", [1, 50, 1 << 18])
@pytest.mark.parametrize("overlap", [0, 1])
def test_files_in_an_order_of_their_own_each_epoch(tmp_path, monkeypatch, block_tokens, overlap):
    monkeypatch.setattr(token_streams, "BLOCK_TOKENS", block_tokens)
    pieces = [np.arange(length) + 100 * number for number, length in enumerate([40, 7, 1, 55, 20])]
    ends = [-1] * overlap  # the first token of the next file, which must not be read here
    train = [token_file(tmp_path / str(n), [*piece, *ends]) for n, piece in enumerate(pieces)]
    held_out = token_file(tmp_path / "held_out", range(17))
    own = {"rotate": False, "shuffle_files": True, "overlap": overlap}
    streams = streams_of(train, held_out, 4, 3, 9, "cpu", **own)
    assert streams.train_tokens == 123
    assert streams.batches_per_epoch == 10  # 123 // 4 = 30 tokens a stream
    orders = set()
    for epoch in range(6):
        order = permutation(9, epoch, 5).tolist()
        orders.add(tuple(order))
        ring = np.concatenate([pieces[number] for number in order])
        ring = np.append(ring, ring[0])
        for batch in range(10):
            tokens, targets = streams.train_batch(10 * epoch + batch)
            for stream in range(4):
                start = 30 * stream + 3 * batch
                assert tokens[:, stream].tolist() == ring[start : start + 3].tolist()
                assert targets[:, stream].tolist() == ring[start + 1 : start + 4].tolist()
    assert len(orders) > 3


def test_evaluation_on_the_first_tokens(files):
    streams = streams_of(*files, eval_tokens=34)
    assert streams.eval_tokens == 34
    ((tokens, targets),) = streams.eval_batches()
    # 33 targets: one token is left out, then 16 streams of 2.
    assert tokens.t().tolist() == [[1001 + 2 * s, 1002 + 2 * s] for s in range(16)]
    assert torch.equal(targets, tokens + 1)
    assert streams_of(*files, eval_tokens=10_000).eval_tokens == 60


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"length": 0}, ValueError, "sequence_length=0"),
        ({"batch": 104}, ValueError, "their product is at most 103, the number of training"),
        ({"batch": 26, "length": 4}, ValueError, "their product is at most 103"),
        ({"eval_tokens": 16}, DataError, "16 held-out tokens are too few"),
    ],
)
def test_refusals(files, change, error, message):
    with pytest.raises(error, match=message):
        streams_of(*files, **{"length": 1} | change)
    with pytest.raises(DamagedData, match="nowhere: No such file"):
        streams_of(files[0], files[1].with_name("nowhere"))


def test_a_folder_that_vanishes_changes_nothing(files, tmp_path, monkeypatch):
    monkeypatch.setattr(token_streams, "BLOCK_TOKENS", 1)
    streams = streams_of(*files)
    wanted = [streams.train_batch(index) for index in range(12)]
    shutil.rmtree(tmp_path)
    assert all(equal(streams.train_batch(index), wanted[index]) for index in range(12))
    assert len(list(streams.eval_batches())) == 1


def test_a_file_that_is_cut_short(files, monkeypatch):
    monkeypatch.setattr(token_streams, "BLOCK_TOKENS", 1)
    streams = streams_of(*files, rotate=False)
    streams.train_batch(0)
    os.truncate(files[0][0], 4 * 90 + 1)
    with pytest.raises(DamagedData, match="train: was cut short while it was in use"):
        streams.train_batch(4)


def test_files_are_closed_with_the_streams(files):
    def is_open(path) -> bool:
        with os.scandir("/proc/self/fd") as found:
            return str(path) in {os.readlink(entry.path) for entry in found}

    streams = streams_of(*files)
    assert is_open(files[0][0]) and is_open(files[1])
    del streams
    assert not is_open(files[0][0]) and not is_open(files[1])


@pytest.mark.gpu
def test_on_a_gpu_as_on_the_cpu(files, monkeypatch):
    monkeypatch.setattr(token_streams, "BLOCK_TOKENS", 45)
    cpu, gpu = (streams_of(*files, seed=3, device=device) for device in ("cpu", "cuda"))
    batches = [gpu.train_batch(index) for index in range(20)] + list(gpu.eval_batches())
    wanted = [cpu.train_batch(index) for index in range(20)] + list(cpu.eval_batches())
    assert all(part.is_cuda and part.stride() == (part.shape[1], 1) for b in batches for part in b)
    for ours, theirs in zip(batches, wanted, strict=True):
        assert equal([part.cpu() for part in ours], theirs)
