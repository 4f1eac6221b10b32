"""A resumed run is the run that was never stopped, bit for bit, in every mode (CPU)."""

import re
import shutil
import sys

import pytest
import torch
import yaml

from mprun.cli import main
from mprun.record import checkpoint
from mprun.record.run_record import read_record
from mprun.recording import environment
from mprun.training import announcements

from ..helpers import (
    TINY_AUTOENCODER,
    TINY_GAN,
    TINY_GPT,
    TINY_LM,
    TINY_MOE,
    assert_same_bits,
    but,
    numbers_of,
    record_of,
    refused,
    rows_of,
    run,
)
from ..shipped import IN_BLOCKS, MODES, OF_ANY_NETWORK
from ..tables import with_extensions

COMMON = ["train.log_every=1", "train.checkpoint_every=1", "train.keep_checkpoints=99"]
ADAMW, IMAGES = ["optim=adamw", "optim.eps=1e-3"], ["optim=sgd", "data.batch_size=4"]
# Tables of which a step moves some rows, sampled classes, and an average of weights.
BIGLSTM = """
model=biglstm model.projection_size=4 model.sampled_softmax=6 model.time_reduction=sum
model.dropout=0.3 model.embedding_gradient_factor=4 train.clip_modules=[lstm] train.accumulate=2
optim.eps=1e-3 optim.average_decay=0.9 optim.average_modules=[lstm]"""
# Small enough that a step takes milliseconds, with everything that has state: dropout's random
# numbers, carried LSTM state, BatchNorm, momentum, a learning rate, two optimizers.
MODELS = {
    "lstm_lm": [*TINY_LM, "model.dropout=0.3", "optim=sgd"],
    "gpt": [*TINY_GPT, "model.positions=rotary", *ADAMW],
    "gpt_moe": [*TINY_MOE, "model.balancing=bias", "model.bias_rate=0.01", *ADAMW],
    "dcgan": [*TINY_GAN, "optim.eps=1e-3"],
    "conv_autoencoder": [*TINY_AUTOENCODER, "optim.eps=1e-3"],
    "biglstm": but(TINY_LM, *BIGLSTM.split()),
    "resnet50": [*IMAGES, "model=resnet50"],
    "inception_v3": [*IMAGES, "model=inception_v3", "model.width=0.0625", "model.dropout=0.3"],
}
MODELS = with_extensions("RESUMED", MODELS)
CASES = [
    (model, mode)
    for model in MODELS
    for mode in ((*MODES, *IN_BLOCKS) if model == "gpt" else OF_ANY_NETWORK)
    if mode != "tf32"  # which a CPU does not have
]
CASES.append(("gpt_moe", "fp8_delayed"))  # a history of each expert
QUICK = [("lstm_lm", "amp"), ("dcgan", "bf16_stochastic")]
# A scale that overflows FP16 at first and grows again every third clean step: the checkpoint
# falls between two growths, and skipped updates lie on both sides of it.
SCALER = ["scaler=dynamic", "scaler.init_scale=16777216", "scaler.growth_interval=3"]
# Few steps bring it to where it fits.
INIT_SCALE = {"biglstm": ["scaler.init_scale=1048576"], "dcgan": ["scaler.init_scale=65536"]}
# Large enough that state is kept in blocks.
WIDE = ["model.hidden_size=64", "precision.update.state_dtype=dynamic8", "train.accumulate=2"]


def last_state(directory) -> dict:
    found = checkpoint.load_newest(directory / "checkpoints", torch.device("cpu"))
    assert found.warnings == []
    computed = found.state["computed"]
    del computed["throughput"], computed["memory_by_kind"]  # of a clock and of an allocator
    # Each attempt watches its first steps: the counts differ, what is counted does not.
    computed["audit"] = sorted(computed["audit"]["products"])
    return found.state


def load(directory, step) -> dict:
    path = directory / "checkpoints" / f"step-{step:08}" / "state.pt"
    return torch.load(path, weights_only=True)


def assert_same_run(one, other) -> None:
    assert numbers_of(one, "train") == numbers_of(other, "train")
    assert_same_bits(last_state(one), last_state(other))


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """16 steps at a scale that is halved first and grows later, with a checkpoint of each."""
    directory = tmp_path_factory.mktemp("straight") / "run"
    scaled = [*MODELS["lstm_lm"], "precision=fp16_master_scaled", *SCALER]
    assert run(directory, *COMMON, *scaled, "train.steps=16") == 0
    return directory


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize(
    ("model", "mode"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES],
)
def test_stopping_and_resuming_changes_no_bit(model, mode, tmp_path):
    scaler = [*SCALER, *INIT_SCALE.get(model, [])] if mode in ("amp", "fp16_master_scaled") else []
    if model == "gpt" and mode.startswith(("bf16", "fp8")):
        # A norm in FP16 has gradients overflow under a loss scale, which BF16's and FP8's do not.
        scaler = [*SCALER, "precision.overrides.norm=fp16"]
    stop, end = (2, 4) if model in ("resnet50", "inception_v3") else (5, 9)
    overrides = [*COMMON, *MODELS[model], f"precision={mode}", *scaler]
    if (model, mode) == ("inception_v3", "fp16_naive"):
        overrides += ["optim=sgd", "optim.lr=1e-5"]  # on some processors it diverges with its own
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    assert run(whole, *overrides, f"train.steps={end}") == 0
    assert run(resumed, *overrides, f"train.steps={stop}") == 0
    assert main([f"resume={resumed}", f"train.steps={end}"]) == 0
    assert_same_run(resumed, whole)
    # The control: the comparison sees that training goes on.
    with pytest.raises(AssertionError):
        assert_same_bits(load(whole, end - 1)["task"], last_state(whole)["task"])
    if scaler and end == 9:
        assert 0 < record_of(whole)["skipped"] < end  # else the scale's state was not needed


@pytest.mark.slow
def test_a_resume_tells_that_linear_layers_multiply_otherwise(tmp_path, monkeypatch, capsys):
    """As they may on another GPU."""
    assert run(tmp_path / "run", *COMMON, *MODELS["gpt"], "precision=mxfp8", "train.steps=1") == 0
    said = []
    for steps in (2, 3):
        capsys.readouterr()
        assert main([f"resume={tmp_path / 'run'}", f"train.steps={steps}"]) == 0
        said.append([line for line in capsys.readouterr().err.splitlines() if "linear" in line])
        monkeypatch.setattr(environment, "how_multiplied", lambda *given: "codes, by the GPU")
    before = "before: decoded numbers, in FP32 (on a CPU)"
    told = f"mprun: linear layers multiply codes, by the GPU from here on; {before}"
    assert said == [[], [told]]


COMBINED = {
    "schedule": (*SCALER, "optim.schedule=cosine", "optim.warmup_updates=2"),
    "accumulate": (*SCALER, "train.accumulate=2"),
    "adagrad": (*SCALER, "optim=adagrad"),
    "rmsprop": (*SCALER, "optim=rmsprop", "optim.momentum=0.9"),
    "tensorflow": (*SCALER, "optim=rmsprop_tensorflow", "optim.schedule=cosine"),
    "muon": (*SCALER, "optim=muon", "optim.schedule=cosine", "train.clip_norm=1", *WIDE),
    "logmax": ("scaler=logmax",),
    # At 2 x 4 tokens a step, the epoch is over after five steps.
    "epoch end": (*SCALER, "data.train_tokens=40"),
}


@pytest.mark.parametrize("more", COMBINED.values(), ids=COMBINED)
@pytest.mark.slow
def test_schedule_accumulation_and_epoch_ends(more, tmp_path):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    overrides = but([*COMMON, *MODELS["lstm_lm"], "precision=amp"], *more, "train.steps=8")
    assert run(whole, *overrides) == 0
    # A schedule belongs to a length, so the stop is a checkpoint of the whole run.
    for stop in (1, 5):
        keep_until(whole, resumed, stop)
        assert main([f"resume={resumed}"]) == 0
        assert_same_run(resumed, whole)
        shutil.rmtree(resumed)


def keep_until(source, target, step) -> None:
    """A copy of a run as a kill after `step` would leave it, in the middle of a line."""
    shutil.copytree(source, target)
    read_record(target).reopen()  # nobody has sealed it
    for number, path in checkpoint.all_in(target / "checkpoints"):
        if number > step:
            shutil.rmtree(path)
    with open(target / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"split": "train", "st')


@pytest.mark.slow
def test_every_step_is_a_good_place_to_stop(straight, tmp_path):
    """After a skipped update, after a growth of the scale, and at any other step."""
    scales = [row["loss_scale"] for row in rows_of(straight, "train")]
    pairs = list(zip(scales, scales[1:], strict=False))
    assert any(b < a for a, b in pairs) and any(b > a for a, b in pairs)
    for stop in (1, 2, 3, 5, 7, 8, 9, 11, 13, 15):
        resumed = tmp_path / str(stop)
        keep_until(straight, resumed, stop)
        assert main([f"resume={resumed}"]) == 0
        assert_same_run(resumed, straight)


def forget(state: dict, what: str) -> None:
    learner = state["task"]["learner"]
    match what:
        case "hidden state":
            state["task"]["hidden"] = None
        case "momentum":
            for own in learner["state"].values():
                own["momentum_buffer"].zero_()
        case "master weights":
            for own in learner["model"].values():
                own.copy_(own.half())  # what the 16-bit copies have of them
        case "loss scale":
            state["task"]["loss_scale"]["scale"].fill_(2.0)
        case "growth tracker":
            state["task"]["loss_scale"]["growth_tracker"].zero_()
        case "random state":
            state["random"]["torch"] = torch.Generator().manual_seed(0).get_state()
        case "step":
            state["skipped"] = 0


PARTS = ["hidden state", "momentum", "master weights", "loss scale", "growth tracker"]


@pytest.mark.slow
@pytest.mark.parametrize("what", [*PARTS, "random state", "step"])
def test_forgetting_any_part_of_the_state_is_seen(what, straight, tmp_path):
    """The negative control: each part is needed, and the comparison above would notice."""
    resumed = tmp_path / "resumed"
    scales = {row["step"]: row["loss_scale"] for row in rows_of(straight, "train")}
    # The step before the one that completes a growth window, after skipped updates.
    stop = next(step for step in range(5, 14) if scales[step + 2] > scales[step + 1])
    keep_until(straight, resumed, stop)
    state = load(resumed, stop)
    assert state["skipped"] > 0
    forget(state, what)
    checkpoint.save(resumed / "checkpoints", stop, state, keep=99)
    if (code := main([f"resume={resumed}"])) == 4:
        return  # seen before a step was taken
    assert code == 0
    with pytest.raises(AssertionError):
        assert_same_run(resumed, straight)


@pytest.mark.parametrize("part", ["learner", "loss_scale"])
def test_a_missing_part_is_refused(part, straight, tmp_path, capsys):
    directory = shutil.copytree(straight, tmp_path / "run")
    state = load(directory, 16)
    del state["task"][part]
    checkpoint.save(directory / "checkpoints", 16, state, keep=99)
    refused(capsys, f"resume={directory}", "train.steps=17", says=part, code=4)


@pytest.mark.parametrize("how", ["off", "'off'", "auto"])
@pytest.mark.few(1)
def test_how_steps_are_executed_may_change(how, straight, tmp_path):
    """To YAML a bare off is a truth value; on the command line of a new run it is a word."""
    directory = shutil.copytree(straight, tmp_path / "run")
    assert main([f"resume={directory}", "train.steps=17", f"train.cuda_graph={how}"]) == 0
    config = yaml.safe_load((directory / "config.yaml").read_text())
    assert config["train"]["cuda_graph"] == how.strip("'")


def test_a_graph_is_refused_on_a_cpu_when_resuming_too(straight, capsys):
    says = "train.cuda_graph=on: a CUDA graph needs device=cuda"
    refused(capsys, f"resume={straight}", "train.steps=17", "train.cuda_graph=on", says=says)


def longer(capsys) -> str:
    [line] = re.findall("^mprun: to train longer: (.*)$", capsys.readouterr().err, re.MULTILINE)
    return line


def test_the_end_of_a_run_has_the_command_that_extends_it(tmp_path, capsys):
    words = [*TINY_LM, "precision=fp32", "train.steps=2", "train.checkpoint_every=2"]
    assert run(tmp_path / "r", *words) == 0
    command = longer(capsys)
    assert command == f"mprun resume={tmp_path / 'r'} train.steps=4"
    assert main(command.split()[1:]) == 0 and record_of(tmp_path / "r")["last_step"] == 4


def test_a_terminal_gets_whole_words(monkeypatch):
    text = "begin again with train.steps=4, or with train.checkpoint_every=N"
    assert announcements._whole_words(text) == text  # a program reads one line
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    lines = f"mprun: to train longer: {announcements._whole_words(text)}".splitlines()
    assert " ".join(map(str.strip, lines)) == f"mprun: to train longer: {text}"
    assert len(lines) == 2 and max(map(len, lines)) < 60


def test_a_rate_that_was_laid_over_the_length_keeps_it_and_says_so(tmp_path, capsys, monkeypatch):
    words = [*TINY_LM, "optim.schedule=cosine", "train.steps=2", "train.checkpoint_every=1"]
    assert run(tmp_path / "r", *words) == 0
    said = "optim.schedule=cosine was computed for 2 steps, so a resume cannot extend the run"
    end = "; begin with train.steps=4, or with optim.schedule=constant to extend it later"
    assert longer(capsys) == said + end
    monkeypatch.setitem(sys.modules, "mprun.training.resume", None)  # which loads torch, and more
    refused(capsys, f"resume={tmp_path / 'r'}", "train.steps=4", says=f"train.steps=4: {said}{end}")
