"""A user's IterableDataset on ranks, resumed anywhere; what ranks must have in common."""

import pytest

from .processes import mprun
from .test_launch import state_of
from .test_same_bits import differences, on_ranks

OF = "tests.distributed.of_a_rank"
NAMES = [f"data.factory={OF}:streamed", f"model.factory={OF}:flat"]
STREAM = ["model=custom", "data=custom", *NAMES, "data.batch_size=7", "train.accumulate=12"]
STREAM += ["dist.order=fixed", "precision=amp"]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_the_bits_of_one_rank(workers, tmp_path):
    """34 micro-batches to an epoch: updates go across its end."""
    cases = {"stream": {"overrides": [*STREAM, f"data.workers={workers}"], "plants": False}}
    (alone,) = on_ranks(1, cases, tmp_path / "1")
    for world in (2, 3):
        assert differences(cases, alone, on_ranks(world, cases, tmp_path / str(world))) == []


@pytest.mark.slow
def test_resumed_on_another_number_of_ranks(tmp_path):
    own = [*STREAM, "device=cpu", "threads=1", "train.checkpoint_every=4"]
    straight, parted = tmp_path / "straight", tmp_path / "parted"
    for folder, more in ((straight, ["train.steps=6"]), (parted, ["train.steps=4", "devices=2"])):
        ended = mprun(*own, *more, f"output_dir={folder}")
        assert ended.returncode == 0, ended.stderr
    ended = mprun(f"resume={parted}", *NAMES, "devices=3", "train.steps=6")
    assert ended.returncode == 0, ended.stderr
    assert state_of(parted) == state_of(straight)


@pytest.mark.slow
def test_a_stream_that_divides_itself_is_refused(tmp_path):
    words = ["data.options.divided=true", "device=cpu", "devices=2", f"output_dir={tmp_path / 'x'}"]
    ended = mprun(*STREAM, *words)
    assert ended.returncode == 2
    assert ended.stderr.endswith(
        "mprun: rank 1: the data differ from those of rank 0: each rank must be given all of "
        "them, and a stream must not divide itself (mprun --help data.factory)\n"
    )
    assert not (tmp_path / "x").exists()


@pytest.mark.slow
def test_ranks_whose_linear_layers_multiply_otherwise_are_refused(tmp_path):
    words = ["model=custom", f"model.factory={OF}:on_another_gpu", "data=custom", NAMES[0]]
    words += [
        "train.accumulate=2",
        "precision=mxfp8",
        "device=cpu",
        "devices=2",
        f"output_dir={tmp_path / 'x'}",
    ]
    ended = mprun(*words)
    assert ended.returncode == 2
    assert ended.stderr.endswith(
        "mprun: rank 1: precision=mxfp8: on this rank linear layers multiply codes, by the GPU, "
        "but on rank 0 decoded numbers, in FP32 (on a CPU); all ranks need the same kind of GPU\n"
    )
    assert not (tmp_path / "x").exists()
