"""A user's IterableDataset on ranks, resumed anywhere; what ranks must have in common."""

import pytest

from .processes import done
from .test_launch import resumed_elsewhere
from .test_same_bits import as_on_one_rank, case

OF = "tests.distributed.of_a_rank"
NAMES = [f"data.factory={OF}:streamed", f"model.factory={OF}:flat"]
STREAM = ["model=custom", "data=custom", *NAMES, "data.batch_size=7", "train.accumulate=12"]
STREAM += ["dist.order=fixed", "precision=amp"]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_the_bits_of_one_rank(workers, tmp_path):
    """34 micro-batches to an epoch: updates go across its end."""
    as_on_one_rank({"stream": case(*STREAM, f"data.workers={workers}")}, tmp_path, 2, 3)


@pytest.mark.slow
def test_resumed_on_another_number_of_ranks(tmp_path):
    own = [*STREAM, "device=cpu", "threads=1", "train.checkpoint_every=4"]
    resumed_elsewhere(own, tmp_path, ["devices=2"], [*NAMES, "devices=3"], steps=(4, 6))


REFUSED = {
    "a stream that divides itself": (
        [*STREAM, "data.options.divided=true"],
        "the data differ from those of rank 0: each rank must be given all of them, and a stream "
        "must not divide itself (mprun --help data.factory)\n",
    ),
    "linear layers that multiply otherwise": (
        ["model=custom", f"model.factory={OF}:on_another_gpu", "data=custom", NAMES[0]]
        + ["train.accumulate=2", "precision=mxfp8"],
        "precision=mxfp8: on this rank linear layers multiply codes, by the GPU, but on rank 0 "
        "decoded numbers, in FP32 (on a CPU); all ranks need the same kind of GPU\n",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", REFUSED)
def test_ranks_that_differ_are_refused(what, tmp_path):
    words, line = REFUSED[what]
    ended = done(*words, "device=cpu", "devices=2", f"output_dir={tmp_path / 'x'}", code=2)
    assert ended.stderr.endswith(f"mprun: rank 1: {line}")
    assert not (tmp_path / "x").exists()
