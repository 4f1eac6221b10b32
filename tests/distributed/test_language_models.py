"""Language models without a state: ranks share out micro-batches, and every mode has the bits of
one rank, on 2, 3 and 4 of them. One with a state is shared out by streams (test_same_bits)."""

import pytest

from ..helpers import refused
from ..shipped import MODES
from .of_a_rank import STEPS
from .test_launch import resumed_elsewhere
from .test_same_bits import as_on_one_rank, case, differences, on_ranks

PARTS = "data.batch_size=2 data.sequence_length=5 train.accumulate=12 dist.order=fixed".split()
WORDS = ["data=synthetic_tokens", "data.vocab_size=64", "data.eval_tokens=500", *PARTS]
GPT = ["model=gpt", "model.hidden_size=16", "model.num_heads=2", "model.num_layers=1", *WORDS]
OWN = ["model=custom", "model.task=language_model", "model.carries_state=false", "optim=adam"]
OWN += ["model.factory=tests.distributed.of_a_rank:windows", *WORDS]


def overflowing(*words):
    """Its scale is lowered in the first steps, and raised again."""
    return [*words, "scaler.init_scale=262144", "scaler.growth_interval=2", "optim.eps=1e-3"]


def cases_of(network, modes):
    found = {}
    for mode in modes:
        own = [*network, f"precision={mode}"]
        own = overflowing(*own) if mode in ("fp16_master_scaled", "amp") else own
        found[mode] = case(*own)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("network", [GPT, OWN], ids=["gpt", "own"])
def test_every_mode_has_the_bits_of_one_rank(network, tmp_path):
    cases = cases_of(network, [mode for mode in MODES if mode != "tf32"])
    clipped = [*network, "train.clip_norm=0.1", "optim.average_decay=0.9"]
    cases["clipped"] = case(*overflowing(*clipped, "precision=fp16_master_scaled"))
    alone = as_on_one_rank(cases, tmp_path, 2, 3, 4)
    assert all(1 <= alone[name]["skipped"] < STEPS for name in ("amp", "clipped"))


@pytest.mark.slow
def test_sums_in_16_bits_and_logmax(tmp_path):
    """Which a model whose streams are split is refused; gloo adds two ranks in their order."""
    own = [*GPT, "precision=fp16_master_scaled"]
    in_fp16 = [*own, "precision.reduce_dtype=fp16"]
    two = [word for word in in_fp16 if not word.startswith(("dist", "train.acc"))]
    cases = {"fixed": case(*in_fp16), "logmax": case(*own, "scaler=logmax")}
    alone = as_on_one_rank(cases | {"gloo": case(*two, "train.accumulate=2")}, tmp_path, 2)
    assert differences(cases, alone, on_ranks(4, cases, tmp_path / "4")) == []


@pytest.mark.slow
def test_saved_on_two_ranks_resumed_on_three(tmp_path):
    own = [*overflowing(*GPT, "precision=amp"), "optim.schedule=constant"]
    own += ["device=cpu", "threads=1", "train.checkpoint_every=5"]
    resumed_elsewhere(own, tmp_path, ["devices=2"], ["devices=3"], steps=(5, 8))


def test_a_state_where_none_was_said_to_be(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    says = "return () as state with model.carries_state=false, but returned a state of 1 tensors"
    refused(capsys, *OWN, "model.options.kept=1", "device=cpu", says=says)
