"""`dist.engine=fsdp`: shards of weights, state and gradients change no bit of an unsharded run."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mprun.config.compose import compose_config
from mprun.distributed.sharding import _ALIGNED, _refuse_shared, _units, sharded
from mprun.errors import BadInput
from mprun.precision import build_policy, cast_model, get_policy

from ..helpers import raises_line, record_of
from ..shipped import IN_BLOCKS, MODES
from .of_a_rank import STEPS
from .processes import mprun
from .test_launch import state_of
from .test_same_bits import differences, on_ranks, relative

# Rows that no number of ranks divides, and shards of a few numbers: LayerNorm of 12.
GPT = "model=gpt model.hidden_size=12 model.num_heads=2 model.bias=true data=synthetic_tokens"
GPT += " data.vocab_size=61 data.eval_tokens=300 data.sequence_length=5 data.batch_size=2"
GPT = [*GPT.split(), "train.accumulate=12", "dist.order=fixed", "dist.engine=fsdp"]
IMAGES = "model=conv_autoencoder data.batch_size=4 train.accumulate=4 dist.order=fixed".split()
IMAGES += ["dist.engine=fsdp"]
# Some of its updates are skipped, others are not.
SCALED = [*GPT, "precision=fp16_master_scaled", "scaler.growth_interval=2"]

# Rows of 64, whose numbers four ranks divide into blocks of 256.
BLOCKS = [*GPT, "model.hidden_size=64", "data.vocab_size=64", "precision=bf16_stochastic"]


def case(*words, plants=False):
    return {"overrides": [*words], "plants": plants}


def cases_of(modes):
    """With clipping and without it."""
    found = {}
    for mode in modes:
        own = SCALED if mode == "fp16_master_scaled" else [*GPT, f"precision={mode}"]
        found[mode] = case(*own)
        found[f"{mode} clipped"] = case(*own, "train.clip_norm=0.1")
    return found


def differing(cases, alone, ranks):
    """Rank 0 alone makes the whole state; losses, norms, skips and evaluation are every rank's."""
    found = differences(cases, alone, ranks)
    return [one for one in found if "digests" not in one or "of rank 0 of" in one]


def test_two_ranks_are_one(tmp_path):
    every = cases_of(("fp16_master_scaled", "bf16_stochastic"))
    cases = {name: every[name] for name in ("fp16_master_scaled clipped", "bf16_stochastic")}
    (alone,) = on_ranks(1, cases, tmp_path / "1")
    assert differing(cases, alone, on_ranks(2, cases, tmp_path / "2")) == []
    assert 1 <= alone["fp16_master_scaled clipped"]["skipped"] < STEPS


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_mode_has_the_bits_of_one_rank(world, tmp_path):
    cases = cases_of([mode for mode in (*MODES, *IN_BLOCKS) if mode != "tf32"])
    (alone,) = on_ranks(1, cases, tmp_path / "1")
    assert differing(cases, alone, on_ranks(world, cases, tmp_path / "several")) == []


@pytest.mark.slow
def test_settings_have_the_bits_of_one_rank(tmp_path):
    """An update, a sum, a store, a pass of another kind; one rank's overflow skips on all."""
    in_fp16 = [*SCALED, "precision.reduce_dtype=fp16"]
    cases = {
        "images": case(*IMAGES, "precision=fp16_master_scaled", plants=True),
        "sgd": case(*GPT, "optim=sgd", "optim.momentum=0.9", "optim.weight_decay=0.1"),
        "rmsprop": case(*GPT, "optim=rmsprop", "optim.momentum=0.9", "precision=bf16_master"),
        "tensorflow": case(*SCALED, "optim=rmsprop_tensorflow", "optim.lr=0.001"),
        "kahan": case(*GPT, "optim=rmsprop_tensorflow", "precision=bf16_kahan"),
        "loop": case(*GPT, "optim.implementation=loop", "precision=bf16_master"),
        "narrow state": case(
            *GPT, "precision=bf16_stochastic", "precision.update.state_dtype=bf16"
        ),
        "blocks of state": case(*BLOCKS, "precision.update.state_dtype=dynamic8"),
        "skipped blocks": case(
            *BLOCKS, *SCALED[-2:], "precision.update.state_dtype=fp8", "train.clip_norm=0.1"
        ),
        "before": case(*in_fp16, "precision.reduce_divide=before"),
        "split": case(*in_fp16, "precision.reduce_divide=split", "train.clip_norm=0.1"),
        "in bf16": case(*GPT, "precision=bf16_master", "precision.reduce_dtype=bf16"),
        "tree": case(*in_fp16, "precision.reduce_order=tree"),
        "override": case(*SCALED, "precision.overrides.blocks.*.mlp=fp32"),
        "tied": case(*SCALED, "precision.overrides.embedding=fp32"),
        "anew": case(*SCALED, "train.activation_checkpointing=true"),
        "in its mode": case(*SCALED, "train.eval_arithmetic=mode"),
        "llama": case(*SCALED, "model.norm=rms", "model.positions=rotary", "model.mlp=swiglu"),
    }
    (alone,) = on_ranks(1, cases, tmp_path / "1")
    scaled = ("images", "skipped blocks", "before", "split", "tree", "anew")
    assert all(1 <= alone[name]["skipped"] < STEPS for name in scaled)
    assert differing(cases, alone, on_ranks(4, cases, tmp_path / "4")) == []


@pytest.mark.slow
def test_where_the_library_adds(tmp_path):
    """With one micro-batch on each of two ranks in their order; a rank's own ones first."""
    # Without a bias of keys, whose gradient is rounding errors alone.
    fast = [word for word in GPT if not word.startswith(("dist.order", "train.acc", "model.bias"))]
    scaled = [*fast, "precision=fp16_master_scaled", "scaler.growth_interval=2"]
    in_fp16, many = [*scaled, "precision.reduce_dtype=fp16"], "train.accumulate=12"
    exact = {
        "two": case(*scaled, "train.accumulate=2", "train.clip_norm=0.1"),
        "two in fp16": case(*in_fp16, "train.accumulate=2"),
    }
    bounds = {"fp32": 1e-6, "scaled": 1e-3, "in fp16": 4e-3}  # an FP16 number is rounded by 2^-11
    others = (case(*fast, many), case(*scaled, many), case(*in_fp16, many))
    cases = exact | dict(zip(bounds, others, strict=True))
    (alone,) = on_ranks(1, cases, tmp_path / "1")
    ranks = on_ranks(2, cases, tmp_path / "2")
    assert differing(exact, alone, ranks) == []
    for name in cases:
        assert repr(ranks[0][name]["losses"]) == repr(ranks[1][name]["losses"])  # NaN is NaN
        assert ranks[0][name]["skipped"] == alone[name]["skipped"] < STEPS
    for name, bound in bounds.items():
        assert relative(ranks[0][name], alone[name]) < bound, name


@pytest.mark.slow
def test_activations_computed_anew_change_no_bit(tmp_path):
    own = [*SCALED, "train.clip_norm=0.1"]
    cases = {"kept": case(*own), "anew": case(*own, "train.activation_checkpointing=true")}
    (found,) = on_ranks(1, cases, tmp_path)
    assert found["anew"]["digests"] == found["kept"]["digests"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then"),
    [
        (["devices=2", "dist.engine=fsdp"], ["devices=1"]),
        (["devices=1"], ["devices=4", "dist.engine=fsdp"]),
        (["devices=4", "dist.engine=fsdp"], ["devices=3"]),
        (["devices=2", "dist.engine=flat"], ["devices=2", "dist.engine=fsdp"]),
    ],
    ids=lambda own: "-".join(own),
)
@pytest.mark.parametrize("mode", ["fp16_master_scaled", "bf16_stochastic"])
def test_resumed_with_other_shards_or_none(first, then, mode, tmp_path):
    own = [*SCALED, f"precision={mode}"] if mode != "bf16_stochastic" else GPT
    own = [word for word in own if not word.startswith("dist.engine")]
    own += [f"precision={mode}", "optim.schedule=constant", "device=cpu", "threads=1"]
    own += ["train.checkpoint_every=4", "numerics=on", "numerics.every=2", "train.log_every=1"]
    straight, parted = tmp_path / "straight", tmp_path / "parted"
    for folder, more in ((straight, ["train.steps=7"]), (parted, ["train.steps=4", *first])):
        ended = mprun(*own, *more, f"output_dir={folder}")
        assert ended.returncode == 0, ended.stderr
    ended = mprun(f"resume={parted}", *then, "train.steps=7")
    assert ended.returncode == 0, ended.stderr
    assert state_of(parted) == state_of(straight)
    record, whole = record_of(parted), record_of(straight)
    assert record["final"] == whole["final"]
    assert record["audit"]["products"] and record["status"] == "done"
    if "dist.engine=fsdp" in then:
        expected = "2 blocks, the rest, 5 modules in another dtype"
        assert record["ranks"]["units"] == expected
        assert (
            record["precision"]["effective_dtypes"]["model"]["parameters"]
            == (whole["precision"]["effective_dtypes"]["model"]["parameters"])
        )


SHARDS = ["devices=2", "train.accumulate=2", "dist.engine=fsdp"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["model=dcgan"], "dist.engine=fsdp: two networks are trained in turn"),
        (["model=lstm_lm"], "dist.engine=fsdp: model lstm_lm has recurrent layers"),
        (["model=gpt", "optim.average_decay=0.9"], "fsdp: optim.average_decay=0.9 keeps whole"),
        (["model=gpt", "optim=muon"], "fsdp: optim.name=muon needs whole matrices, of which a ra"),
        (["model=gpt", "scaler=logmax"], "dist.engine=fsdp: scaler=logmax needs the largest"),
        (["model=resnet50", "train.channels_last=on"], "fsdp: train.channels_last=on: shards are"),
    ],
)
def test_what_has_no_shards(words, told):
    with raises_line(BadInput, told):
        compose_config([*words, *SHARDS])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["model=resnet50"], "no blocks of resnet50 are known; those of gpt are (allowed: false)"),
        (["model=gpt", "device=cuda", "train.compile=default"], "train.compile=default: train.act"),
        (["model=gpt", "device=cuda", "train.cuda_graph=on"], "train.cuda_graph=on: train.activ"),
    ],
)
def test_what_is_not_computed_anew(words, told):
    with raises_line(BadInput, told):
        compose_config([*words, "train.activation_checkpointing=true"])


@pytest.mark.parametrize(
    ("network", "told"),
    [
        (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), "fsdp: 1 is BatchNorm, whose stat"),
        (nn.Sequential(nn.LSTM(4, 4)), "fsdp: 0 is a recurrent layer"),
        (nn.Sequential(nn.Embedding(4, 4, sparse=True)), "fsdp: 0 has sparse gradients"),
        (nn.ParameterList([torch.zeros(())]), "fsdp: 0 is a single number"),
    ],
)
def test_networks_without_shards(network, told):
    with raises_line(BadInput, told):
        sharded(cast_model(network, get_policy("fp32")), SimpleNamespace(), [])


def test_blocks_of_state_that_ranks_would_cut_are_refused():
    """100 rows of 64 are 25 blocks of 256 numbers, 50 rows are 12.5."""
    policy = build_policy("own", {"update": {"state_dtype": "dynamic8"}})
    cast = cast_model(nn.Linear(64, 100), policy)
    told = "fsdp: 50 rows of weight a rank are no whole blocks of 256 numbers, which precision.upd"
    with raises_line(BadInput, told):
        sharded(cast, SimpleNamespace(world=2), [])


def test_a_weight_of_two_units_is_refused():
    network = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    network[1].weight = network[0].weight
    _refuse_shared(network, [""])
    with raises_line(BadInput, "fsdp: 1.weight is also a weight of another block"):
        _refuse_shared(network, ["0", ""])


def test_units_are_blocks_the_rest_and_what_computes_in_another_dtype():
    blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)) for _ in range(2))
    network = nn.ModuleDict(
        {"first": nn.Embedding(8, 4), "blocks": blocks, "norm": nn.LayerNorm(4)}
    )
    cast = cast_model(network, get_policy("fp16_master"))
    computed = {name: own.dtype for name, own in network.named_parameters()}
    half, single = torch.float16, torch.float32
    found = list(_units(cast.module, computed, ["blocks.0", "blocks.1"], half))
    assert found == [
        *(("blocks.0.0", single), ("blocks.0", half), ("blocks.1.0", single), ("blocks.1", half)),
        *(("norm", single), ("", half)),
    ]


def test_the_last_numbers_of_a_tensor_have_other_bits():
    """Why a shard has a few numbers of its neighbours: fused kernels, and sums in 16 bits."""
    gradient = torch.Generator().manual_seed(0)
    values = torch.randn(3, 40, generator=gradient)

    def squares(begin, end):
        weight = torch.zeros(end - begin)
        optimizer = torch.optim.Adam([weight], fused=True)
        for row in values:
            weight.grad = row[begin:end].clone()
            optimizer.step()
        return optimizer.state[weight]["exp_avg_sq"]

    whole = squares(0, 40)
    for begin, end in ((0, 16), (16, 40), (16, 32), (32, 40)):
        assert torch.equal(squares(begin, end), whole[begin:end])
    for dtype in (torch.float16, torch.bfloat16):
        terms = torch.randn(2, 4096, generator=gradient).to(dtype)
        [whole] = torch._foreach_add([terms[0]], [terms[1]], alpha=-0.3)
        for part, own in zip(whole.split(_ALIGNED), terms.split(_ALIGNED, dim=1), strict=True):
            [alone] = torch._foreach_add([own[0].clone()], [own[1].clone()], alpha=-0.3)
            assert torch.equal(alone, part)
