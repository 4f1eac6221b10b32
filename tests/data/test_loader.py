"""Batches by number: the same from any number of processes, and every way a process can end."""

import os
import signal
from multiprocessing import active_children
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mprun.data import loader as loader_module
from mprun.data.augmentation import Augmentation, draws
from mprun.data.image_files import find_images
from mprun.data.image_folder import ImageReader
from mprun.data.loader import BatchLoader, Numbers, available_cores, default_workers
from mprun.data.source import DamagedData
from mprun.errors import Resource

from ..helpers import raises_line
from .made_images import make_folder

BATCH = 5
CPU = torch.device("cpu")


def readers(root, *, on_corrupt="stop", seed=3, augmentation="resized_crop"):
    """Training and evaluation readers of the folder; 24 and 10 images unless made otherwise."""
    found = find_images(str(root), layout="classes", eval_share=0.1, on_corrupt=on_corrupt)
    geometry = Augmentation(augmentation, 16)
    return (
        ImageReader(found.train, geometry, BATCH, seed=seed, on_corrupt=on_corrupt),
        ImageReader(found.held_out, geometry, BATCH, seed=None, on_corrupt=on_corrupt),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("images"))


@pytest.fixture
def loaders():
    """Loaders made with `loaders(reader, workers, ...)` are closed after the test."""
    made = []

    def make(*arguments, **keywords):
        made.append(BatchLoader(*arguments, **keywords))
        return made[-1]

    yield make
    for loader in made:
        loader.close()


def equal(a, b) -> bool:
    return torch.equal(a.images, b.images) and torch.equal(a.labels, b.labels)


def pids() -> set[int]:
    return {child.pid for child in active_children()}


def test_crops_change_from_epoch_to_epoch_and_do_not_depend_on_the_batch_size(folder):
    train = readers(folder)[0]
    whole = ImageReader(train.split, train.augmentation, 24, seed=3)
    first, second = whole.read(0), whole.read(1)
    for number in range(4):
        part = slice(BATCH * number, BATCH * (number + 1))
        read = train.read(number)
        assert torch.equal(read.images, first.images[part])
    order = [torch.unique(epoch.images.flatten(1).float().mean(1)) for epoch in (first, second)]
    assert not torch.equal(order[0], order[1])


def test_a_batch_asked_for_again_is_not_read_again(folder, loaders):
    for workers in (0, 2):
        loader = loaders(readers(folder)[0], workers)
        batches = [loader.batch(number) for number in range(3)]
        assert loader.batch(2) is batches[2] and loader.batch(1) is batches[1]
        # What lies further back is read again, and from then on as much is kept.
        again = [loader.batch(number) for number in range(3)]
        assert all(map(equal, again, batches)) and again[0] is not batches[0]
        if workers:
            assert loader.batch(0) is again[0]


def test_the_global_random_state_is_neither_read_nor_changed(folder, loaders):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = loaders(readers(folder)[0], 1).batch(0)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    assert equal(loaders(readers(folder)[0], 1).batch(0), first)


def test_evaluation_keeps_its_processes_and_can_be_left_early(folder, loaders):
    held_out = readers(folder)[1]
    held_out.batch_size = 2
    assert len(held_out) == 5
    loader = loaders(held_out, 2, numbers=Numbers(last=5))
    before = pids()
    expected = [held_out.read(number) for number in range(5)]
    assert all(equal(loader.batch(number), expected[number]) for number in range(5))
    processes = pids() - before
    assert len(processes) == 2
    assert all(equal(loader.batch(number), expected[number]) for number in range(5))
    assert pids() - before == processes
    for stop in (3, 4, 5):
        assert all(equal(loader.batch(number), expected[number]) for number in range(stop))
    with pytest.raises(ValueError, match="index=5 is not allowed: must be below 5"):
        held_out.read(5)


@pytest.mark.slow
def test_a_process_lost_between_evaluations_is_replaced(folder, loaders):
    held_out = readers(folder)[1]
    loader = loaders(held_out, 1, numbers=Numbers(last=2))
    before = pids()
    first = loader.batch(0), loader.batch(1)
    (pid,) = pids() - before
    os.kill(pid, signal.SIGKILL)
    loader._recent.clear()  # two batches are kept, and there are but two
    assert equal(loader.batch(0), first[0]) and equal(loader.batch(1), first[1])
    assert len(pids() - before) == 1 and pid not in pids()


def test_closing_ends_the_processes_and_a_closed_loader_can_be_asked_again(folder, loaders):
    loader = loaders(readers(folder)[0], 2)
    before = pids()
    first = loader.batch(0)
    assert len(pids() - before) == 2
    loader.close()
    assert pids() == before
    assert equal(loader.batch(0), first) and loader.batch(0) is not first


def test_a_damaged_file_arrives_as_one_line_with_its_own_batch(tmp_path, loaders, capfd):
    make_folder(tmp_path)
    train = readers(tmp_path)[0]
    order = [place for n in range(4) for place in train.places(n)]
    path = train.split.name(order[2 * BATCH + 1])
    os.truncate(path, 300)
    for workers in (0, 2):
        loader = loaders(readers(tmp_path)[0], workers)
        loader.batch(0), loader.batch(1)
        with raises_line(DamagedData, f"{path}: "):
            loader.batch(2)
        assert equal(loader.batch(3), train.read(3))
    assert capfd.readouterr().err == ""


def test_skip_takes_the_next_usable_image_with_its_own_label_and_the_same_crop(tmp_path, loaders):
    make_folder(tmp_path)
    reader = readers(tmp_path, on_corrupt="skip")[0]
    whole = [reader.read(number) for number in range(4)]
    places = [reader.places(number) for number in range(4)]
    # The last of the split and the one before: both give way to the first.
    gone = [len(reader.split) - 2, len(reader.split) - 1]
    for place in gone:
        Path(reader.split.name(place)).write_bytes(b"no image")
    chances = [draws(3, 0, number * BATCH, BATCH) for number in range(4)]
    first = Image.open(reader.split.name(0)).convert("RGB")
    for workers in (0, 2):
        loader = loaders(readers(tmp_path, on_corrupt="skip")[0], workers)
        met = 0
        for number in range(4):
            batch = loader.batch(number)
            for row, place in enumerate(places[number]):
                if place not in gone:
                    assert torch.equal(batch.images[row], whole[number].images[row])
                    continue
                met += 1
                expected = reader.augmentation.train(first, chances[number][row])
                assert (batch.images[row].numpy() == np.asarray(expected)).all()
                assert batch.labels[row] == reader.split.labels[0]
        assert met >= 1
        named = set(loader.replaced.values())
        assert named and named <= {reader.split.name(place) for place in gone}


@pytest.mark.slow
def test_skip_ends_where_too_many_files_are_damaged(tmp_path, loaders):
    make_folder(tmp_path)
    split = readers(tmp_path)[0].split
    for place in (1, 7, 13, 19):
        Path(split.name(place)).write_bytes(b"no image")
    for workers in (0, 1):
        loader = loaders(readers(tmp_path, on_corrupt="skip")[0], workers)
        assert loader.reader.most_replaced == 3
        with pytest.raises(DamagedData, match="and 3 others of 24"):
            for number in range(40):
                loader.batch(number)


def test_skip_ends_where_all_files_are_gone(tmp_path, loaders):
    make_folder(tmp_path / "data")
    for workers in (0, 1):
        loader = loaders(readers(tmp_path / "data", on_corrupt="skip")[0], workers)
        (tmp_path / "data").rename(tmp_path / "elsewhere")
        gone = f"{tmp_path / 'data'}: is gone; the 3 files tried before cannot be used either"
        with pytest.raises(DamagedData, match=gone):
            loader.batch(0)
        (tmp_path / "elsewhere").rename(tmp_path / "data")


@pytest.mark.slow
def test_a_killed_process_is_a_lost_resource(folder, loaders):
    before = pids()
    loader = loaders(readers(folder)[0], 2, prefetch=1)
    loader.batch(0)
    for pid in pids() - before:
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(Resource, match="data.workers=2: a loader process is lost, killed or out"):
        for number in range(1, 9):
            loader.batch(number)
    assert pids() == before
    assert equal(loader.batch(1), loader.reader.read(1))


@pytest.mark.slow
def test_a_read_that_never_ends_is_a_lost_resource(tmp_path, loaders, monkeypatch):
    make_folder(tmp_path)
    reader = readers(tmp_path)[0]
    path = reader.split.name(reader.places(1)[0])
    os.unlink(path)
    os.mkfifo(path)  # opening it waits for a writer that never comes
    before = pids()
    monkeypatch.setattr(loader_module, "STALL_AFTER_S", 0.5)
    loader = loaders(reader, 1)
    loader.batch(0)
    with pytest.raises(Resource, match=f"{tmp_path}: no batch for 0.5 s"):
        loader.batch(1)
    assert pids() == before


def test_processes_leave_signals_to_their_parent(folder, loaders):
    before = pids()
    loader = loaders(readers(folder)[0], 2, prefetch=1)
    loader.batch(0)
    for pid in pids() - before:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            os.kill(pid, number)
    for number in range(1, 9):
        assert equal(loader.batch(number), loader.reader.read(number))


def test_a_process_has_no_threads_that_compute(folder, loaders):
    before = pids()
    loader = loaders(readers(folder)[0], 1)
    for number in range(4):
        loader.batch(number)
    (pid,) = pids() - before
    # Its own; those that feed the queue, hand over file descriptors and watch the parent, asleep.
    assert len(os.listdir(f"/proc/{pid}/task")) <= 4


def test_how_many_processes_where_none_are_asked_for():
    cores = available_cores()
    assert cores == len(os.sched_getaffinity(0))
    assert default_workers(CPU) == (1 if cores > 1 else 0)
    assert default_workers(torch.device("cuda")) == min(cores, 16)


def test_arguments_out_of_range(folder):
    with raises_line(ValueError, "workers=-1 is not allowed"):
        BatchLoader(readers(folder)[0], -1)
    with raises_line(ValueError, "prefetch=0 is not allowed"):
        BatchLoader(readers(folder)[0], 1, 0)
