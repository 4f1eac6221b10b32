"""One configuration is the same run on 1, 2 and 4 ranks: weights, masters, optimizer state, scale,
skips, BatchNorm statistics, metrics, evaluation, after every step, bit for bit."""

import socket
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mprun.config.option_files import option_files
from mprun.distributed.ranks import ALONE
from mprun.precision.policy import ORDERS

from ..shipped import IN_BLOCKS, OF_ANY_NETWORK
from ..tables import with_extensions
from .of_a_rank import be, found_by
from .processes import forkserver

MODES = [mode for mode in OF_ANY_NETWORK if mode != "tf32"]  # of a GPU
IMAGES = "data.batch_size=4 train.accumulate=4 dist.order=fixed"
TASKS = {
    "classification": f"model=custom model.factory=tests.distributed.of_a_rank:small "
    f"data=digits_32 {IMAGES}",
    "reconstruction": f"model=conv_autoencoder {IMAGES}",
    "gan": f"model=dcgan model.image_size=32 data=digits_32 data.value_range=tanh "
    f"model.generator_width=4 model.discriminator_width=4 {IMAGES}",
    "task of one's own": f"model=custom model.factory=tests.distributed.of_a_rank:small "
    f"model.task=tests.distributed.of_a_rank:Regression optim.lr=0.001 data=digits_32 {IMAGES}",
    "language_model": "model=lstm_lm model.embedding_size=16 model.hidden_size=16 "
    "data.batch_size=8 data.sequence_length=5 train.accumulate=2 dist.order=fixed",
    "gpt": "model=gpt model.hidden_size=16 model.num_heads=2 data=synthetic_tokens "
    f"data.vocab_size=64 data.sequence_length=5 data.eval_tokens=200 {IMAGES}",
    "gpt_moe": "model=gpt_moe model.hidden_size=16 model.num_heads=2 model.kv_heads=null "
    "model.expert_size=8 model.balancing=bias model.bias_rate=0.01 data=synthetic_tokens "
    f"data.vocab_size=64 data.sequence_length=5 data.eval_tokens=200 {IMAGES}",
}
TASKS = with_extensions("RANKS", TASKS)


def case(*overrides, plants=False) -> dict:
    """What `of_a_rank.taken` trains; plants: an infinite pixel."""
    return {"overrides": [*overrides], "plants": plants}


def cases_of(tasks, modes):
    found = {}
    for task in tasks:
        for mode in modes:
            plants = mode in ("fp16_master_scaled", "amp")
            # Adam in FP16 divides by zero: NaN, of which nothing is to be seen.
            own = ["optim=sgd"] if mode == "fp16_naive" else []
            own += [*TASKS[task].split(), f"precision={mode}"]
            found[f"{task} {mode}"] = case(*own, plants=plants)
    return found


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def on_ranks(world: int, cases: dict, folder: Path) -> list[dict]:
    """Return the results of each of `world` ranks in every case; one runs in this process."""
    return [found_by(ALONE, cases)] if world == 1 else each_rank(be, world, cases, folder)


def each_rank(be, world: int, cases, folder: Path) -> list[dict]:
    """Return the results of `world` processes `be`, each a rank."""
    folder.mkdir(parents=True, exist_ok=True)
    context, port, processes = forkserver(), free_port(), []
    for rank in range(world):
        processes.append(context.Process(target=be, args=(rank, world, port, cases, folder)))
        processes[-1].start()
    for process in processes:
        process.join(600)
    assert [process.exitcode for process in processes] == [0] * world
    return [torch.load(folder / f"{rank}.pt") for rank in range(world)]


def differences(cases, alone, ranks) -> list[str]:
    found = []
    for name in cases:
        for rank, own in enumerate(ranks):
            for what in ("digests", "losses", "skipped", "evaluation"):
                if repr(own[name][what]) != repr(alone[name][what]):
                    found.append(f"{name}: {what} of rank {rank} of {len(ranks)}")
    return found


def as_on_one_rank(cases, folder: Path, *worlds: int, differing=differences) -> dict:
    """Return what one rank finds, of which ranks of any number in `worlds` differ in no bit."""
    (alone,) = on_ranks(1, cases, folder / "1")
    for world in worlds:
        assert differing(cases, alone, on_ranks(world, cases, folder / str(world))) == []
    return alone


EXACT = [task for task in TASKS if task != "language_model"]


def test_two_ranks_are_one(tmp_path):
    cases = cases_of(("classification", "gan"), ("fp16_master_scaled",))
    small = ["data.image_size=32", "model.width=2", "model.code_size=4"]
    cases["tree"] = in_16_bits("bf16", "tree", 4, "dist.order=fixed", *small)
    cases |= cases_of(("gpt",), ("nvfp4",))
    switches = "precision.switch=[{at: 2, to: bf16_master}]"
    cases["switch"] = case(*TASKS["gpt"].split(), "precision=nvfp4", switches)
    (alone,) = on_ranks(1, cases, tmp_path / "1")
    two = on_ranks(2, cases, tmp_path / "2")
    assert differences(cases, alone, two) == []
    for own in (alone, *two):  # the smaller last batch is neither padded nor counts as much
        assert torch.equal(own["exchanged"]["in order"], torch.arange(16.0).reshape(8, 2))
        assert own["exchanged"]["mean"] == [7.0, 8.0]
    one, other = alone["gpt nvfp4"]["digests"], alone["switch"]["digests"]
    assert one[:2] == other[:2] and one[2] != other[2]
    # The planted pixel reached one rank alone, and no weight of any.
    assert alone["classification fp16_master_scaled"]["skipped"] >= 1
    state = alone["classification fp16_master_scaled"]["state"]["learner"]["model"]
    assert all(tensor.isfinite().all() for tensor in state.values())


@pytest.mark.slow
def test_all_tasks_and_modes_on_two_and_four_ranks(tmp_path):
    cases = cases_of(EXACT, MODES) | cases_of(("gpt",), ("fp8_rowwise", "fp8_delayed", *IN_BLOCKS))
    as_on_one_rank(cases, tmp_path, 2, 4)


@pytest.mark.slow
def test_muon_and_state_in_blocks_on_two_ranks(tmp_path):
    own = [*TASKS["gpt"].split(), "model.hidden_size=64", "precision=fp16_master_scaled"]
    own += ["scaler.growth_interval=2"]
    in_blocks = case(*own, "precision.update.state_dtype=dynamic8")
    cases = {"muon": case(*own, "optim=muon"), "blocks": in_blocks}
    assert as_on_one_rank(cases, tmp_path, 2)["muon"]["skipped"] >= 1


def reconstruction(*overrides, plants=False):
    return case("model=conv_autoencoder", "data.batch_size=4", *overrides, plants=plants)


def in_16_bits(dtype, order, parts, *overrides):
    mode = "fp16_master_scaled" if dtype == "fp16" else "bf16_master"
    own = [f"precision={mode}", f"precision.reduce_dtype={dtype}", f"train.accumulate={parts}"]
    return reconstruction(*own, f"precision.reduce_order={order}", *overrides)


@pytest.mark.slow
def test_every_scaler_is_told_the_same(tmp_path):
    """By the sum, or by the maximum over ranks: an overflow of one rank is one of all."""
    cases = {}
    for scaler in option_files("scaler"):
        own = [f"scaler={scaler}", "precision=fp16_master_scaled", "train.accumulate=4"]
        for order in ("fixed", "fast"):
            words = [*own, f"dist.order={order}"]
            cases[f"{scaler} {order}"] = reconstruction(*words, plants=scaler != "none")
    exact = {name: case for name, case in cases.items() if name.endswith("fixed")}
    (alone,) = on_ranks(1, exact, tmp_path / "1")
    ranks = on_ranks(4, cases, tmp_path / "4")
    assert differences(exact, alone, ranks) == []
    assert differences(cases, ranks[0], ranks) == []  # also where the library adds


@pytest.mark.slow
def test_sums_in_16_bits_are_those_that_one_rank_emulates(tmp_path):
    """gloo adds two ranks in their order."""
    in_fp16 = ["precision=fp16_master_scaled", "precision.reduce_dtype=fp16"]
    cases = {}
    for divide in ("before", "after", "split"):
        own = [*in_fp16, f"precision.reduce_divide={divide}"]
        cases[f"{divide} gloo"] = reconstruction(*own, "train.accumulate=2")
        cases[f"{divide} fixed"] = reconstruction(*own, "train.accumulate=4", "dist.order=fixed")
    (alone,) = on_ranks(1, cases, tmp_path / "1")
    assert differences(cases, alone, on_ranks(2, cases, tmp_path / "2")) == []
    fixed = {name: case for name, case in cases.items() if name.endswith("fixed")}
    assert differences(fixed, alone, on_ranks(4, fixed, tmp_path / "4")) == []


@pytest.mark.slow
def test_micro_batches_in_a_ring_are_ranks_on_gloo(tmp_path):
    """In buckets of parameters, of which a ring takes one at a time."""
    for world in (3, 4):
        own = [("fp16", "dist.bucket_mb=0.1"), ("bf16", "dist.bucket_mb=25")]
        ring = {dtype: in_16_bits(dtype, "ring", world, bucket) for dtype, bucket in own}
        gloo = {dtype: in_16_bits(dtype, "rank", world, bucket) for dtype, bucket in own}
        (alone,) = on_ranks(1, ring, tmp_path / f"{world} alone")
        assert differences(ring, alone, on_ranks(world, gloo, tmp_path / str(world))) == []


@pytest.mark.slow
def test_gathered_micro_batches_are_added_in_any_order_on_any_number_of_ranks(tmp_path):
    cases = {order: in_16_bits("bf16", order, 4, "dist.order=fixed") for order in ORDERS}
    alone = as_on_one_rank(cases, tmp_path, 2, 4)
    assert len({alone[order]["digests"][-1] for order in ORDERS}) == len(ORDERS)


def weights_of(found):
    return found["state"]["learner"]["model"]


def relative(found, alone) -> float:
    """Largest difference of a weight tensor, relative L2."""
    pairs = [(own.float(), weights_of(alone)[name]) for name, own in weights_of(found).items()]
    return max(float((a - b).norm() / b.float().norm().clamp(min=1e-30)) for a, b in pairs)


@pytest.mark.slow
def test_sums_in_another_order_and_while_backward_goes_on(tmp_path):
    """FP32 sums in another order differ by roundings, 2^-24 each; streams that are split besides
    by the order in which a product adds over the batch."""
    fp32 = cases_of(("classification", "reconstruction", "language_model"), ("fp32",))
    cases = {}
    for name, exact in fp32.items():
        own = [override for override in exact["overrides"] if override != "dist.order=fixed"]
        for engine in ("flat", "ddp"):
            cases[f"{name} {engine}"] = case(*own, f"dist.engine={engine}")
        if "reconstruction" in name:  # buckets in the memory order of the weights
            cases[f"{name} nhwc"] = case(*own, "dist.engine=ddp", "train.channels_last=on")
    (alone,) = on_ranks(1, fp32, tmp_path / "1")
    for world in (2, 4):
        ranks = on_ranks(world, cases, tmp_path / str(world))
        assert differences(cases, ranks[0], ranks) == []
        for name in cases:
            assert relative(ranks[0][name], alone[name.rpartition(" ")[0]]) < 1e-6, (name, world)


@pytest.mark.slow
def test_a_scaled_mode_skips_alike_while_backward_goes_on(tmp_path):
    own, engines = ["precision=fp16_master_scaled", "train.accumulate=4"], ("flat", "ddp")
    cases = {how: reconstruction(*own, f"dist.engine={how}", plants=True) for how in engines}
    ranks = on_ranks(2, cases, tmp_path)
    assert differences(cases, ranks[0], ranks) == []
    assert ranks[0]["ddp"]["skipped"] == ranks[0]["flat"]["skipped"] >= 1
    assert relative(ranks[0]["ddp"], ranks[0]["flat"]) < 1e-3  # one FP16 rounding: 2^-11


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_read_ahead_is_the_share_of_the_rank(workers, tmp_path):
    random = np.random.default_rng(1)
    for split, count in (("train", 50), ("val", 11)):
        for label in "ab":
            folder = tmp_path / "data" / split / label
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(0, 256, (40, 40, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number:03}.png")
    own = ["model=custom", "model.factory=tests.distributed.of_a_rank:small", "data=image_folder"]
    own += [f"data.root={tmp_path / 'data'}", "data.image_size=32", f"data.workers={workers}"]
    own += ["data.batch_size=4", "train.accumulate=4", "dist.order=fixed"]
    as_on_one_rank({"images": case(*own)}, tmp_path, 2, 4)


@pytest.mark.slow
def test_split_streams_have_gradients_as_large_as_whole_ones(tmp_path):
    """So that a loss scale moves as on one rank, but for what FP16 rounds before the sum: the
    gradient of a weight, of some of the streams instead of all."""
    own = [*TASKS["language_model"].split(), "model.dropout=0", "precision=fp16_master_scaled"]
    cases = {"dynamic": case(*own, "scaler.init_scale=16777216")}
    alone, two, four = (
        on_ranks(world, cases, tmp_path / str(world))[0]["dynamic"] for world in (1, 2, 4)
    )
    for found in (two, four):
        for own_step, expected in zip(found["losses"], alone["losses"], strict=True):
            assert 0.5 <= own_step["loss_scale"] / expected["loss_scale"] <= 2
        assert abs(found["skipped"] - alone["skipped"]) <= 1
    assert alone["skipped"] > 0
