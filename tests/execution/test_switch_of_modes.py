"""A run that changes its mode: the steps of each mode, its record, and how it is gone on with."""

import shutil

import pytest
import torch

from mprun.cli import main
from mprun.comparison.grouping import cells_of
from mprun.comparison.load import load_run
from mprun.config.compose import compose_config
from mprun.config.keys import current
from mprun.errors import MprunError
from mprun.numerics.replay import Steps
from mprun.precision.random_states import restore_random_states
from mprun.record import checkpoint
from mprun.record.run_record import RunRecord, read_record
from mprun.training.run import prepare

from ..helpers import (
    TINY_GAN,
    TINY_GPT,
    TINY_LM,
    assert_same_bits,
    but,
    numbers_of,
    record_of,
    refused,
    run,
    seal_again,
)

CPU = torch.device("cpu")
COMMON = ["train.log_every=1", "train.checkpoint_every=1", "train.keep_checkpoints=99"]
AT, END = 4, 8
SCALED = ["scaler=dynamic", "scaler.init_scale=65536", "scaler.growth_interval=3"]
GPT = [*TINY_GPT, "optim=adamw", "optim.eps=1e-3", "optim.schedule=cosine"]
CASES = {
    "gpt nvfp4 bf16_master": GPT,
    "gpt bf16_master nvfp4": GPT,
    "gpt fp8_delayed fp32": GPT,
    "gpt fp16_master_scaled amp": [*GPT, *SCALED, "train.accumulate=2"],
    "lstm_lm amp fp32": [*TINY_LM, "model.dropout=0.3", "optim=sgd", *SCALED],
    "dcgan fp32 fp16_master": [*TINY_GAN, "optim.eps=1e-3"],
}


def switch(at, to) -> str:
    return f"precision.switch=[{{at: {at}, to: {to}}}]"


def state_at(directory, step) -> dict:
    return torch.load(directory / "checkpoints" / f"step-{step:08}" / "state.pt", weights_only=True)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_steps_of_each_mode_are_those_of_a_run_in_it(case, tmp_path):
    """The second part is trained by a run that never was in the first mode, from its state."""
    (_, before, after), own = case.split(), CASES[case]
    given = [*COMMON, *own, f"train.steps={END}"]
    alone, whole = tmp_path / "alone", tmp_path / "whole"
    scaler = [word for word in own if word.startswith("scaler")] or ["scaler=none"]
    assert run(alone, *given, f"precision={before}", *scaler) == 0
    assert run(whole, *given, f"precision={before}", *scaler, switch(AT, after)) == 0
    middle = state_at(alone, AT)
    assert_same_bits(state_at(whole, AT)["task"], middle["task"])
    config = compose_config([*given, f"precision={after}", *scaler]).config
    built, task = prepare(config, CPU, 1), middle["task"]
    if (hidden := task.get("hidden")) is not None:
        task["hidden"] = tuple(part.float() for part in hidden)
    built.task.load_state_dict(but_delayed(task))
    restore_random_states(middle["random"], CPU)
    steps = Steps(built, AT, middle["skipped"])
    for _ in range(AT, END):
        steps.advance()
    found, expected = state_at(whole, END)["task"], built.task.state_dict()
    assert_same_bits(but_delayed(found), but_delayed(expected))
    # The control: the mode before goes elsewhere.
    with pytest.raises(AssertionError):
        assert_same_bits(state_at(alone, END)["task"], found)


def but_delayed(task) -> dict:
    """The state without the history of scales, which another mode does not have."""
    return {
        name: {k: v for k, v in part.items() if k != "delayed"} if name == "learner" else part
        for name, part in task.items()
    }


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Eight steps, the last four in BF16, with a checkpoint of each."""
    directory = tmp_path_factory.mktemp("switch") / "run"
    given = ["precision=fp8_delayed", switch(0.5, "bf16_master"), f"train.steps={END}"]
    assert run(directory, *COMMON, *but(GPT, "optim.schedule=constant"), *given) == 0
    return directory


def stopped_at(straight, folder, step):
    """A copy of a run as it was when it stopped after `step`."""
    shutil.copytree(straight, folder)
    for path in (folder / "checkpoints").glob("step-*"):
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    seal_again(folder, status="preempted")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("step", [AT, AT - 1, AT + 1])
def test_a_resume_on_both_sides_changes_no_bit(straight, step, tmp_path, capsys):
    resumed = stopped_at(straight, tmp_path / "run", step)
    assert main([f"resume={resumed}"]) == 0
    lines = capsys.readouterr().err.splitlines()
    told = [line for line in lines if "from step" in line or "from here on" in line]
    assert told == ["precision bf16_master from step 5 on"] * (step <= AT)
    assert_same_bits(state_at(resumed, END)["task"], state_at(straight, END)["task"])
    assert numbers_of(resumed) == numbers_of(straight)
    ours, theirs = record_of(resumed), record_of(straight)
    assert ours["precision"] == theirs["precision"]
    assert ours["switched"] == theirs["switched"] == {"5": "bf16_master"}
    assert ours["emulated"] == theirs["emulated"]
    assert ours["audit"]["products"].keys() == theirs["audit"]["products"].keys()


@pytest.mark.slow
def test_the_record_tells_the_schedule(straight):
    record = read_record(straight)
    assert record.keys() <= RunRecord.__annotations__.keys()
    assert record["precision"]["mode"] == "fp8_delayed, bf16_master from 50 %"
    # Three steps of each mode are watched: a layer with 4 and its products with FP8 operands.
    products = record["audit"]["products"]
    assert record["audit"]["watched"] == 6
    assert products["forward bf16"] > products["forward e4m3"] > 0
    # Its file may be gone: the record has all values of the mode.
    (entry,) = record["config"]["precision"]["switch"]
    assert entry["at"] == 0.5 and entry["to"]["param_dtype"] == "bf16"
    assert entry["to"]["matmul"]["input"] is None
    # A run of before has one mode.
    old = {key: value for key, value in record["config"]["precision"].items() if key != "switch"}
    assert current(record["config"] | {"precision": old})["precision"]["switch"] == []


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (switch(0.25, "bf16_master"), "a resumed run keeps precision.switch=[{at:0.5,to:{name:"),
        (
            "train.steps=16",
            "a resume cannot change the number of steps, of which at=0.5 of precision.switch",
        ),
    ],
)
def test_a_resume_onto_another_schedule_is_refused(straight, given, says, tmp_path, capsys):
    stopped = stopped_at(straight, tmp_path / "run", 2)
    refused(capsys, f"resume={stopped}", given, says=says)


@pytest.mark.slow
def test_runs_with_other_schedules_are_other_arms(straight, tmp_path):
    schedules = [switch(at, to) for at, to in ((2, "fp32"), (1, "fp32"), (2, "fp8_rowwise"))]
    folders = [tmp_path / str(number) for number in range(5)]
    for folder, own in zip(folders, [*schedules, "precision.switch=[]", None], strict=True):
        mode = "fp32" if own is None else "bf16_master"
        given = [] if own is None else [own]
        assert run(folder, *TINY_GPT, f"precision={mode}", *given, "train.steps=3") == 0
    runs = [load_run(one, read_record(one)) for one in folders]
    assert [one.mode for one in runs] == [
        "bf16_master, fp32 after step 2",
        "bf16_master, fp32 after step 1",
        "bf16_master, fp8_rowwise after step 2",
        "bf16_master",
        "fp32",
    ]
    cells = cells_of(runs)
    assert len(cells) == 5 and [cell.is_baseline for cell in cells] == [False] * 4 + [True]
    assert len({repr(sorted(cell.shared.items())) for cell in cells}) == 1
    # FP32 that is left later is no baseline.
    left = tmp_path / "left"
    own = ["precision=fp32", switch(2, "bf16_master")]
    assert run(left, *TINY_GPT, *own, "train.steps=3") == 0
    (cell,) = cells_of([load_run(left, read_record(left))])
    assert not cell.is_baseline


def test_one_product_alone_may_change(build_run):
    """The forward product is left to BF16: from then on only the backward ones cast."""
    to = "{matmul: {high_precision: [output]}}"
    built = build_run(*TINY_GPT, "precision=mxfp8", switch(3, to), "train.steps=6")
    counts, said = [], []
    for index in range(6):
        built.stepper.step(index)
        said += [(index, line) for line in built.stepper.notes]
        built.stepper.notes.clear()
        counts.append(dict(built.stepper.audit.products))
    of_first, of_second = counts[2], counts[5]
    layers = of_first["forward", "e4m3"] // 3
    assert layers > 0 and ("forward", "e4m3") not in of_second
    assert of_second["backward", "e4m3"] == of_first["backward", "e4m3"]
    assert of_second["forward", torch.bfloat16] == of_first["forward", torch.bfloat16] + 3 * layers
    assert [index for index, _ in said][-1] == 3 and "of the multiply-adds" in said[-1][1]


def test_a_product_in_another_dtype_is_a_contradiction_of_the_mode_in_force(build_run):
    given = ["precision=fp16_master", switch(3, "bf16_master"), "train.steps=6"]
    built = build_run(*TINY_GPT, *given)
    layer = built.task.learner.model.blocks[0].mlp
    for index in range(3):
        built.stepper.step(index)

    def in_fp16(x):
        return inner((x.half() @ x.half().transpose(-1, -2) @ x.half()).to(x.dtype))

    built.stepper.follow(3)
    inner = layer.forward.plain or type(layer).forward.__get__(layer)
    layer.forward.plain = in_fp16
    says = "precision=bf16_master: bmm .* computes in fp16"
    with pytest.raises((MprunError, NotImplementedError), match=says):
        built.stepper.step(3)


@pytest.mark.slow
def test_a_compiled_network_is_compiled_anew(build_run):
    """A compiled BF16 network differs from the eager one by roundings: 2^-9 each, a few in a row,
    averaged in the loss. The FP32 one by those of FP32 from there on."""
    given = [*GPT, "precision=bf16_master", "cpu_half=native", switch(3, "fp32"), "train.steps=6"]
    losses, executions = [], []
    for own in ("off", "default"):
        built = build_run(*given, f"train.compile={own}")
        losses.append([float(built.stepper.step(index)["loss"]) for index in range(6)])
        executions.append(built.stepper.description)
    assert losses[0][0] == losses[1][0] and losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
    assert executions[1]["compile"] == "default" and executions[1]["compile_s"] > 0
    assert built.task.learner.prepared.policy.name == "fp32"


@pytest.mark.slow
def test_a_bench_refuses_a_mode_that_changes(tmp_path, capsys):
    (tmp_path / "precision").mkdir()
    tail = "defaults: [bf16_master]\nswitch: [{at: 0.5, to: fp32}]\n"
    (tmp_path / "precision" / "tail.yaml").write_text(tail)
    composed = compose_config([*TINY_GPT, "precision=tail"], str(tmp_path))
    assert composed.mode == "tail, fp32 from 50 %"
    bench = ["bench", *TINY_GPT, "--modes", "tail", "--config-dir", tmp_path]
    says = "--modes tail: this mode switches to another; a bench measures one mode at a time"
    refused(capsys, *bench, says=says)
    refused(capsys, "bench", *TINY_GPT, switch(0.5, "fp32"), says="a bench compares modes")


def test_checkpoints_hold_the_state_of_the_mode_until_then(straight):
    assert "delayed" in state_at(straight, AT)["task"]["learner"]
    assert "delayed" not in state_at(straight, AT + 1)["task"]["learner"]
    assert checkpoint.load_newest(straight / "checkpoints", CPU).step == END
