"""`dist.engine=fsdp`: shards of weights, state and gradients change no bit of an unsharded run."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mprun.config.compose import compose_config
from mprun.distributed import sharding
from mprun.distributed.sharding import shard
from mprun.errors import BadInput
from mprun.precision import get_policy
from mprun.prepared.shards import keeps_half

from ..helpers import raises_line
from ..shipped import MODES
from .of_a_rank import STEPS
from .test_launch import resumed_elsewhere
from .test_same_bits import as_on_one_rank, case, differences, on_ranks, relative

# Rows that no number of ranks divides, and shards of a few numbers: LayerNorm of 12. On a CPU
# torch's fused kernels would compute the last numbers of a shard with other roundings.
GPT = "model=gpt model.hidden_size=12 model.num_heads=2 model.bias=true data=synthetic_tokens"
GPT += " data.vocab_size=61 data.eval_tokens=300 data.sequence_length=5 data.batch_size=2"
GPT = [*GPT.split(), "train.accumulate=12", "dist.order=fixed", "dist.engine=fsdp"]
GPT += ["optim.implementation=foreach"]
MOE = ["model=gpt_moe", *GPT[1:], "model.kv_heads=null", "model.expert_size=8"]
SWITCH = "precision.switch"
IMAGES = "model=conv_autoencoder data.batch_size=4 train.accumulate=4 dist.order=fixed".split()
IMAGES += ["dist.engine=fsdp", "optim.implementation=foreach"]
# Some of its updates are skipped, others are not.
SCALED = [*GPT, "precision=fp16_master_scaled", "scaler.growth_interval=2"]

AUTO = "optim.implementation=auto"
# Rows of 64, whose shards are multiples of all registers, so that kernels may be fused.
FUSED = [*GPT, "model.hidden_size=64", "data.vocab_size=64", AUTO]
WITH_MASTERS = [mode for mode in MODES if mode != "tf32" and not keeps_half(get_policy(mode))]


DIGITS = ["model=custom", "model.factory=tests.distributed.of_a_rank:small", "data=digits_32"]
DIGITS += IMAGES[1:]


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


@pytest.mark.slow
def test_two_ranks_are_one(tmp_path):
    four = "train.accumulate=4"
    cases = {"fp16_master_scaled clipped": case(*SCALED, "train.clip_norm=0.1", four)}
    cases["fused"] = case(*FUSED, "precision=fp8_delayed", four)
    cases["BatchNorm"] = case(*DIGITS, "precision=amp", plants=True)
    alone = as_on_one_rank(cases, tmp_path, 2, differing=differing)
    assert 1 <= alone["fp16_master_scaled clipped"]["skipped"] < STEPS


@pytest.mark.parametrize("fixed", [True, False])
def test_muted_a_rank_takes_its_own_rows_for_the_sum(fixed, monkeypatch):
    """`mprun bench devices=N` times such steps; weights are gathered all the same."""
    monkeypatch.setattr(sharding.dist, "get_world_size", lambda group: 3)
    monkeypatch.setattr(sharding.dist, "get_rank", lambda group: 1)
    group = SimpleNamespace(world=3)
    reduction = sharding.ShardedReduction(group, 2, fixed=fixed, bucket_bytes=0)
    reduction.muted, own = True, sharding._UnitSum(reduction)
    output = torch.full((2,), -1.0)
    for reduction.last in (False, True):
        own(output, torch.arange(6.0), group, None)
    assert output.tolist() == [2.0, 3.0]  # the mean of two micro-batches


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_mode_has_the_bits_of_one_rank(world, tmp_path):
    as_on_one_rank(cases_of(WITH_MASTERS), tmp_path, world, differing=differing)


@pytest.mark.slow
def test_settings_have_the_bits_of_one_rank(tmp_path):
    """An update, a sum, a store, a pass of another kind; one rank's overflow skips on all."""
    in_fp16 = [*SCALED, "precision.reduce_dtype=fp16"]
    cases = {
        "images": case(*IMAGES, "precision=fp16_master_scaled", plants=True),
        "sgd": case(*GPT, "optim=sgd", "optim.momentum=0.9", "optim.weight_decay=0.1"),
        "rmsprop": case(*GPT, "optim=rmsprop", "optim.momentum=0.9", "precision=bf16_master"),
        "tensorflow": case(*SCALED, "optim=rmsprop_tensorflow", "optim.lr=0.001", AUTO),
        "fused": case(*FUSED, *SCALED[-2:], "train.clip_norm=0.1"),
        "loop": case(*GPT, "optim.implementation=loop", "precision=bf16_master"),
        "before": case(*in_fp16, "precision.reduce_divide=before"),
        "split": case(*in_fp16, "precision.reduce_divide=split", "train.clip_norm=0.1"),
        "in bf16": case(*GPT, "precision=bf16_master", "precision.reduce_dtype=bf16"),
        "tree": case(*in_fp16, "precision.reduce_order=tree"),
        "override": case(*SCALED, "precision.overrides.blocks.*.mlp=fp32"),
        "tied": case(*SCALED, "precision.overrides.embedding=fp32"),
        "anew": case(*SCALED, "train.activation_checkpointing=true"),
        "in its mode": case(*SCALED, "train.eval_arithmetic=mode"),
        "switch": case(*GPT, "precision=bf16_master", f"{SWITCH}=[{{at: 2, to: fp8_tensorwise}}]"),
        "switch back": case(*GPT, "precision=nvfp4", f"{SWITCH}=[{{at: 2, to: fp32}}]"),
        "experts": case(*MOE, "precision=fp8_tensorwise"),
        "a history of experts": case(*MOE, "precision=fp8_delayed"),
        "llama": case(*SCALED, "model.norm=rms", "model.positions=rotary", "model.mlp=swiglu"),
    }
    alone = as_on_one_rank(cases, tmp_path, 4, differing=differing)
    scaled = ("images", "fused", "before", "split", "tree", "anew")
    assert all(1 <= alone[name]["skipped"] < STEPS for name in scaled)


@pytest.mark.slow
def test_where_the_library_adds(tmp_path):
    """With one micro-batch on each of two ranks in their order; a rank's own ones first.

    A norm is that of shards, with other roundings than the norm of whole gradients.
    """
    # Without a bias of keys, whose gradient is rounding errors alone.
    fast = [word for word in GPT if not word.startswith(("dist.order", "train.acc", "model.bias"))]
    scaled = [*fast, "precision=fp16_master_scaled", "scaler.growth_interval=2"]
    in_fp16, many = [*scaled, "precision.reduce_dtype=fp16"], "train.accumulate=12"
    exact = {
        "two": case(*scaled, "train.accumulate=2", "train.clip_norm=null"),
        "two in fp16": case(*in_fp16, "train.accumulate=2", "train.clip_norm=null"),
    }
    bounds = {"fp32": 1e-6, "scaled": 1e-3, "in fp16": 4e-3}  # an FP16 number is rounded by 2^-11
    others = (case(*fast, many), case(*scaled, many), case(*in_fp16, many))
    cases = exact | dict(zip(bounds, others, strict=True))
    (alone,) = on_ranks(1, cases, tmp_path / "1")
    ranks = on_ranks(2, cases, tmp_path / "2")
    assert all(ranks[0][name]["digests"] == alone[name]["digests"] for name in exact)
    for name in cases:
        norms = [own[name]["losses"][2].pop("grad_norm") for own in (alone, ranks[0])]
        assert norms[1] == pytest.approx(norms[0], rel=2 * bounds.get(name, 1e-6))
        ranks[1][name]["losses"][2].pop("grad_norm")
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
@pytest.mark.parametrize("mode", ["fp16_master_scaled", "amp"])
def test_resumed_with_other_shards_or_none(first, then, mode, tmp_path):
    own = [word for word in SCALED if not word.startswith(("dist.engine", "precision"))]
    own += [f"precision={mode}", "optim.schedule=constant", "device=cpu", "threads=1"]
    own += ["train.checkpoint_every=4", "numerics=probes", "numerics.every=2", "train.log_every=1"]
    record, whole = resumed_elsewhere(own, tmp_path, first, then, steps=(4, 7))
    assert record["audit"]["products"] and record["status"] == "done"
    if "dist.engine=fsdp" in then:
        assert record["ranks"]["engine"] == "fsdp"
        sharded, plain = (own["precision"]["effective_dtypes"]["model"] for own in (record, whole))
        assert sharded["parameters"] == plain["parameters"]


SHARDS = ["devices=2", "train.accumulate=2", "dist.engine=fsdp"]


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["model=dcgan"], "dist.engine=fsdp: two networks are trained in turn"),
        (["model=lstm_lm"], "dist.engine=fsdp: model lstm_lm has recurrent layers"),
        (["model=gpt", "optim.average_decay=0.9"], "fsdp: optim.average_decay=0.9 keeps whole"),
        (["model=gpt", "optim=muon"], "fsdp: optim.name=muon needs whole matrices, of which a ra"),
        (["model=gpt", "scaler=logmax"], "dist.engine=fsdp: scaler=logmax needs the largest"),
        (["model=gpt", "precision=fp16_naive"], "fsdp: precision=fp16_naive keeps weights in 1"),
        (["model=gpt", "precision=bf16_stochastic"], "fsdp: precision=bf16_stochastic keeps w"),
        (["model=gpt", "precision.update.state_dtype=fp8"], "state_dtype=fp8 stores the state"),
        (["model=gpt", "precision.update.square_dtype=bf16"], "square_dtype=bf16 stores the state"),
        (
            ["model=gpt", "precision=bf16_master", "precision.master_dtype=bf16"],
            "precision.master_dtype=bf16 rounds whole tensors",
        ),
        (["model=resnet50", "train.channels_last=on"], "fsdp: train.channels_last=on: shards are"),
    ],
)
def test_what_has_no_shards(words, told):
    with raises_line(BadInput, told):
        compose_config([*words, *SHARDS])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["model=resnet50"],
            "no blocks of resnet50 are known; those of gpt, gpt_moe are (allowed: false)",
        ),
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
        (nn.Sequential(nn.LSTM(4, 4)), "fsdp: 0 is a recurrent layer"),
        (nn.Sequential(nn.Embedding(4, 4, sparse=True)), "fsdp: 0 has sparse gradients"),
        (nn.ParameterList([torch.zeros(())]), "fsdp: 0 is a single number"),
    ],
)
def test_networks_without_shards(network, told):
    with raises_line(BadInput, told):
        shard(network, [], SimpleNamespace())


def test_a_weight_of_two_units_is_refused():
    """fully_shard would make two of it."""
    network = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    network[1].weight = network[0].weight
    with raises_line(BadInput, "fsdp: blocks share a weight with each other, or with the rest"):
        shard(network, [network[0]], SimpleNamespace())
