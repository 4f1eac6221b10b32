"""A resumed run is the run that was never stopped, bit for bit, in every mode (CPU)."""

import json
import shutil

import pytest
import torch
import yaml

from mprun.cli import main
from mprun.record import checkpoint
from mprun.record.metrics import read_metrics

from ..helpers import LM, ONE_CORE

COMMON = [
    "device=cpu",
    "threads=1",
    "train.log_every=1",
    "train.checkpoint_every=1",
    "train.keep_checkpoints=99",
]
# Small enough that a step takes milliseconds, with everything that has state: dropout's random
# numbers, carried LSTM state, BatchNorm, momentum, a learning rate, two optimizers.
MODELS = {
    "lstm_lm": [*LM, "model.dropout=0.3", "optim=sgd"],
    "gpt": [
        *ONE_CORE,
        "model=gpt",
        "model.hidden_size=16",
        "model.positions=rotary",
        "data.batch_size=4",
        "data.sequence_length=5",
        "optim=adamw",
        "optim.eps=1e-3",
    ],
    "seq2seq": [
        "model=seq2seq",
        "model.hidden_size=8",
        "model.embedding_size=8",
        "model.dropout=0.3",
        "data.max_length=8",
        "data.batch_size=4",
        "optim=sgd",
    ],
    "dcgan": [
        "model=dcgan",
        "data.image_size=32",
        "data.batch_size=8",
        "model.latent_size=8",
        "model.generator_width=4",
        "model.discriminator_width=4",
        "optim.eps=1e-3",
    ],
    "conv_autoencoder": [
        "model=conv_autoencoder",
        "data.image_size=32",
        "data.batch_size=8",
        "model.width=2",
        "model.code_size=4",
        "optim.eps=1e-3",
    ],
    "resnet50": ["model=resnet50", "optim=sgd", "data.batch_size=4"],
    "inception_v3": [
        "model=inception_v3",
        "model.width=0.0625",
        "model.dropout=0.3",
        "data.batch_size=4",
        "optim=sgd",
    ],
}
MODES = [
    "fp32",
    "fp16_naive",
    "fp16_master",
    "fp16_master_scaled",
    "amp",
    "bf16_naive",
    "bf16_master",
    "amp_bf16",
]
LATER = ["bf16_stochastic", "bf16_kahan", "fp8_tensorwise", "fp8_rowwise", "fp8_unscaled"]
# A scale that overflows FP16 at first and grows again every third clean step: the checkpoint
# falls between two growths, and skipped updates lie on both sides of it.
SCALER = ["scaler=dynamic", "scaler.init_scale=16777216", "scaler.growth_interval=3"]


def train(directory, *overrides) -> int:
    return main([*overrides, f"output_dir='{directory}'"])


def last_state(directory) -> dict:
    found = checkpoint.load_newest(directory / "checkpoints", torch.device("cpu"))
    assert found.warnings == []
    return found.state


def differences(one, other, path="") -> list[str]:
    """Where two states differ: in structure, type, dtype, shape or any bit."""
    if type(one) is not type(other):
        return [f"{path}: {type(one)} {type(other)}"]
    if isinstance(one, dict):
        if one.keys() != other.keys():
            return [f"{path}: keys {one.keys() ^ other.keys()}"]
        return [d for k in one for d in differences(one[k], other[k], f"{path}/{k}")]
    if isinstance(one, (list, tuple)):
        if len(one) != len(other):
            return [f"{path}: length"]
        pairs = enumerate(zip(one, other, strict=True))
        return [d for i, (a, b) in pairs for d in differences(a, b, f"{path}/{i}")]
    if isinstance(one, torch.Tensor):
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return [f"{path}: {one.dtype} {other.dtype}"]
        same = (
            one.contiguous()
            .view(-1)
            .view(torch.uint8)
            .equal(other.contiguous().view(-1).view(torch.uint8))
        )
        return [] if same else [path]
    return [] if one == other else [f"{path}: {one} {other}"]


def train_records(directory) -> list[dict]:
    """The training records without the clock; as text, so that NaN equals NaN."""
    return [
        json.dumps({k: v for k, v in record.items() if k != "samples_per_s"})
        for record in read_metrics(directory / "metrics.jsonl")
        if record["split"] == "train"
    ]


def check_resumed(model, mode, tmp_path, stop, end, *more):
    scaler = SCALER if mode in ("amp", "fp16_master_scaled") else []
    overrides = [*COMMON, *MODELS[model], f"precision={mode}", *scaler, *more]
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    assert train(straight, *overrides, f"train.steps={end}") == 0
    assert train(resumed, *overrides, f"train.steps={stop}") == 0
    assert main([f"resume={resumed}", f"train.steps={end}"]) == 0
    assert train_records(resumed) == train_records(straight)
    assert differences(last_state(resumed), last_state(straight)) == []
    # The control: the comparison sees that training goes on.
    _, before = checkpoint._found(straight / "checkpoints")[-2]
    earlier = torch.load(before / "state.pt", weights_only=True)
    assert len(differences(earlier, last_state(straight))) > 3
    return straight


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model", ["lstm_lm", "gpt", "seq2seq", "dcgan", "conv_autoencoder"])
@pytest.mark.few(2)
def test_stopping_and_resuming_changes_no_bit(model, mode, tmp_path):
    straight = check_resumed(model, mode, tmp_path, 5, 9)
    record = json.loads((straight / "run.json").read_text())
    if mode in ("amp", "fp16_master_scaled"):
        assert record["skipped"] > 0  # else the scaler's state was not put to the test


@pytest.mark.parametrize("mode", LATER)
@pytest.mark.few(1)
def test_resuming_in_the_formats_that_came_after(mode, tmp_path):
    """A norm in FP16 has gradients overflow under a loss scale, which BF16's and FP8's do not."""
    straight = check_resumed("gpt", mode, tmp_path, 5, 9, *SCALER, "precision.overrides.norm=fp16")
    record = json.loads((straight / "run.json").read_text())
    assert 0 < record["skipped"] < 9


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model", ["resnet50", "inception_v3"])
def test_classifiers_too(model, mode, tmp_path):
    check_resumed(model, mode, tmp_path, 2, 4)


@pytest.mark.parametrize(
    "more",
    [
        (*SCALER, "optim.schedule=cosine", "optim.warmup_updates=2"),
        (*SCALER, "train.accumulate=2"),
        (*SCALER, "optim=adagrad"),
        ("scaler=logmax",),
        (*SCALER, "data.batch_size=400", "data.sequence_length=50"),
    ],
    ids=["schedule", "accumulate", "adagrad", "logmax", "epoch end"],
)
@pytest.mark.slow
def test_schedule_accumulation_and_epoch_ends(more, tmp_path):
    # At 400 x 50 tokens a step, the epoch of 107,628 tokens is over after five steps.
    overrides = [*COMMON, *MODELS["lstm_lm"], "precision=amp", *more]
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    assert train(straight, *overrides, "train.steps=8") == 0
    # A schedule belongs to a length, so the stop is a checkpoint of the straight run.
    for stop in (1, 5):
        keep_until(straight, resumed, stop)
        assert main([f"resume={resumed}"]) == 0
        assert train_records(resumed) == train_records(straight)
        assert differences(last_state(resumed), last_state(straight)) == []
        shutil.rmtree(resumed)


def keep_until(source, target, step) -> None:
    """A copy of a run as a kill after `step` would leave it, in the middle of a line."""
    shutil.copytree(source, target)
    for number, path in checkpoint._found(target / "checkpoints"):
        if number > step:
            shutil.rmtree(path)
    with open(target / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"split": "train", "st')


@pytest.mark.slow
def test_every_step_is_a_good_place_to_stop(tmp_path):
    """After a skipped update, after a growth of the scale, and at any other step."""
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    assert (
        train(straight, *COMMON, *MODELS["lstm_lm"], "precision=amp", *SCALER, "train.steps=12")
        == 0
    )
    records = [r for r in read_metrics(straight / "metrics.jsonl") if r["split"] == "train"]
    scales = [r["loss_scale"] for r in records]
    assert any(b < a for a, b in zip(scales, scales[1:], strict=False))
    assert any(b > a for a, b in zip(scales, scales[1:], strict=False))
    for stop in (1, 2, 3, 5, 7, 8, 9, 11):
        keep_until(straight, resumed, stop)
        assert main([f"resume={resumed}"]) == 0
        assert train_records(resumed) == train_records(straight), stop
        assert differences(last_state(resumed), last_state(straight)) == [], stop
        shutil.rmtree(resumed)


def forget(state: dict, what: str) -> None:
    learner = state["task"]["learner"]
    fresh = torch.Generator().manual_seed(0)
    match what:
        case "hidden state":
            state["task"]["hidden"] = None
        case "momentum":
            for own in learner["optimizer"]["state"].values():
                own["momentum_buffer"].zero_()
        case "master weights":
            for name, master in learner["optimizer"]["masters"].items():
                master.detach().copy_(learner["model"][name])
        case "loss scale":
            state["task"]["loss_scale"]["scale"].fill_(2.0)
        case "growth tracker":
            state["task"]["loss_scale"]["growth_tracker"].zero_()
        case "random state":
            state["random"]["torch"] = fresh.get_state()
        case "step":
            state["skipped"] = 0


@pytest.mark.parametrize(
    "what",
    [
        "hidden state",
        "momentum",
        "master weights",
        "loss scale",
        "growth tracker",
        "random state",
        "step",
    ],
)
@pytest.mark.few(1)
def test_forgetting_any_part_of_the_state_is_seen(what, tmp_path):
    """The negative control: each part is needed, and the comparison above would notice."""
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    assert (
        train(
            straight,
            *COMMON,
            *MODELS["lstm_lm"],
            "precision=fp16_master_scaled",
            *SCALER,
            "train.steps=16",
        )
        == 0
    )
    records = [r for r in read_metrics(straight / "metrics.jsonl") if r["split"] == "train"]
    scales = {r["step"]: r["loss_scale"] for r in records}
    # The step before the one that completes a growth window, after skipped updates.
    stop = next(step for step in range(5, 14) if scales[step + 2] > scales[step + 1])
    assert load(straight, stop)["skipped"] > 0
    keep_until(straight, resumed, stop)
    state = load(resumed, stop)
    forget(state, what)
    checkpoint.save(resumed / "checkpoints", stop, state, keep=99)
    if (code := main([f"resume={resumed}"])) == 4:
        return  # seen before a step was taken
    assert code == 0
    seen = differences(last_state(resumed), last_state(straight))
    assert seen or train_records(resumed) != train_records(straight)


def load(directory, step) -> dict:
    path = directory / "checkpoints" / f"step-{step:08}" / "state.pt"
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize("part", ["learner", "loss_scale"])
def test_a_missing_part_is_refused(part, tmp_path, capsys):
    run = tmp_path / "run"
    assert train(run, *COMMON, *MODELS["lstm_lm"], "precision=amp", "train.steps=2") == 0
    state = load(run, 2)
    del state["task"][part]
    checkpoint.save(run / "checkpoints", 2, state, keep=99)
    capsys.readouterr()
    assert main([f"resume={run}", "train.steps=3"]) == 4
    printed = capsys.readouterr()
    assert part in printed.err and printed.err.count("\n") == 1


@pytest.mark.parametrize("how", ["off", "'off'", "auto"])
@pytest.mark.few(1)
def test_how_steps_are_executed_may_change(how, tmp_path):
    """To YAML a bare off is a truth value; on the command line of a new run it is a word."""
    directory = tmp_path / "run"
    short = ["model=conv_autoencoder", "data.batch_size=4", "device=cpu", "train.steps=1"]
    assert main([*short, "train.checkpoint_every=1", f"output_dir={directory}"]) == 0
    assert main([f"resume={directory}", "train.steps=2", f"train.cuda_graph={how}"]) == 0
    assert yaml.safe_load((directory / "config.yaml").read_text())["train"]["cuda_graph"] == (
        how.strip("'")
    )


def test_a_graph_is_refused_on_a_cpu_when_resuming_too(tmp_path, capsys):
    directory = tmp_path / "run"
    short = ["model=conv_autoencoder", "data.batch_size=4", "device=cpu", "train.steps=1"]
    assert main([*short, "train.checkpoint_every=1", f"output_dir={directory}"]) == 0
    assert main([f"resume={directory}", "train.steps=2", "train.cuda_graph=on"]) == 2
    assert "train.cuda_graph=on: a CUDA graph needs device=cuda" in capsys.readouterr().err
