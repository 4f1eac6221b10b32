"""Runs watch their own first steps: what was computed is in run.json, a contradiction ends them."""

import gc
import sys

import pytest
import torch

from mprun.cli import main
from mprun.config.compose import compose_config
from mprun.execution.graphed_step import GraphedStep
from mprun.execution.step_runner import StepRunner
from mprun.precision import get_policy
from mprun.training.announcements import notes
from mprun.training.loop import MetricLogger
from mprun.training.signals import Stopped

from ..helpers import ONE_CORE, TINY_GPT, record_of, run
from ..shipped import MODES
from .call_recorder import CallRecorder
from .trained import SMALL, Training, assert_same_training, of, twins

# torch says that its CPU library has no LSTM with projection.
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections")
ON_A_CPU = [mode for mode in MODES if get_policy(mode).fp32_math == "ieee"]
NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16"}
NAMES |= {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.int8: "int8"}
LATE = '''
import torch
from torch import nn


class Late(nn.Module):
    """From its second training step on its products are in BF16, whatever the mode says."""

    def __init__(self, classes, size):
        super().__init__()
        self.layer, self.calls = nn.Linear(size, classes), 0

    def forward(self, images):
        self.calls += self.training and len(images) > 2  # a trial has two
        with torch.autocast(images.device.type, torch.bfloat16, enabled=self.calls > 1):
            return self.layer(images.flatten(1))


class Always(Late):
    def forward(self, images):
        with torch.autocast(images.device.type, torch.bfloat16):
            return self.layer(images.flatten(1))


def late(data):
    return Late(data.num_classes, 64)


def always(data):
    return Always(data.num_classes, 64)
'''
OWN = [*ONE_CORE, *of("model=custom data=synthetic_images data.batch_size=4 train.steps=6")]
OWN += of("data.image_size=8 data.channels=1 data.train_size=32 data.eval_size=8 optim=sgd")


@pytest.fixture(autouse=True)
def _nothing_else_is_prepared():
    """A prepared model of another test, alive in a cycle, emulates in every backward pass."""
    gc.collect()


@pytest.fixture
def own_code(tmp_path, monkeypatch):
    (tmp_path / "lateautocast.py").write_text(LATE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("lateautocast", None)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ON_A_CPU)
def test_the_record_of_every_mode_says_what_was_computed(tmp_path, mode):
    assert run(tmp_path / "run", *TINY_GPT, f"precision={mode}", "train.steps=5") in (0, 3)
    audit = record_of(tmp_path / "run")["audit"]
    assert audit["watched"] == 3
    assert audit["left_the_model"] == audit["written_in_a_call"] == []
    assert audit["optimizers"] == ["AdamW"]
    computed = {name.split()[1] for name in audit["products"]}
    policy = get_policy(mode)
    wanted = {NAMES[dtype] for dtype in policy.formats} or {"fp32"}
    # Autocast leaves embeddings, whose gradient is a sum over tokens, in FP32.
    assert computed == wanted | ({"fp32"} if policy.autocast_dtype else set())
    forward = {n for name, n in audit["products"].items() if name.startswith("forward")}
    assert forward and all(n % 3 == 0 for n in forward)  # three equal steps


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fp32", "fp16_master_scaled", "amp"])
@pytest.mark.parametrize(
    "task", [t for t in SMALL if t not in ("batch_norm", "dropout")] + ["transformer in parts"]
)
def test_watched_steps_compute_the_same_bits(build_run, task, mode):
    name, _, in_parts = task.partition(" in ")
    words = [*SMALL[name], f"precision={mode}", "train.steps=20"]
    words += ["train.accumulate=2"] if in_parts else []
    expected, built = twins(build_run, *words, steps=4)
    assert_same_training(expected, Training(built, built.stepper.step).steps(0, 4))
    assert built.stepper.audit.watched == 3 and built.stepper.audit.products
    assert expected.built.stepper.audit.watched == 0
    assert not built.stepper.notes


def test_one_step_in_a_thousand_is_watched_after_the_first_three(build_run):
    built = build_run(*SMALL["transformer"], "train.steps=20")
    stepper = built.stepper
    for taken, watched in ((3, 3), (999, 3), (1000, 3), (1001, 4), (1002, 4)):
        # What is between is not computed here.
        while stepper.taken < taken - 1:
            stepper._take, take = (lambda index, measure: {}), stepper._take
            stepper.step(0)
            stepper._take = take
        if stepper.taken < taken:
            stepper.step(stepper.taken)
        assert stepper.audit.watched in (watched, stepper.taken)


@pytest.mark.slow
def test_of_replayed_steps_the_eager_ones_before_are_watched(build_run):
    built = build_run(*SMALL["transformer"], "precision=amp", "train.steps=20")
    graph = GraphedStep(built.task, CallRecorder(), required=True)
    stepper = StepRunner(built.task, built.rate, built.device, graph=graph)
    for index in range(9):
        stepper.step(index)
    assert graph.replayed == 6
    found = stepper.audit_result()
    assert found["watched"] == 3 and found["not_watched"] == "replayed steps (CUDA graph)"


def test_a_contradiction_in_a_later_step_ends_the_run_in_one_line(tmp_path, own_code, capsys):
    words = [*OWN, "model.factory=lateautocast:late", "precision=fp32"]
    assert run(tmp_path / "run", *words) == 1
    lines = capsys.readouterr().err.splitlines()
    said = "precision=fp32: addmm inside the model computes in bf16, must compute in fp32; "
    assert lines[-1].startswith(f"mprun: {said}") and not any("Traceback" in one for one in lines)
    record = record_of(tmp_path / "run")
    assert record["status"] == "failed" and said in record["cause"]
    assert record["audit"]["watched"] == 1
    assert record["audit"]["products"] == {"backward fp32": 1, "forward bf16": 1, "forward fp32": 1}


def test_a_contradiction_in_every_step_is_refused_before_the_run(tmp_path, own_code, capsys):
    words = [*OWN, "model.factory=lateautocast:always", "precision=fp32"]
    assert run(tmp_path / "run", *words) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "model.factory=lateautocast:always precision=fp32: addmm inside the model" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["bf16_stochastic", "amp", "fp8_tensorwise"])
def test_an_arm_of_which_overrides_leave_nothing_is_a_control(tmp_path, capsys, mode):
    """It is said at step 1, and the run goes on to its end."""
    words = [*TINY_GPT, f"precision={mode}", "precision.overrides.*=fp32", "train.steps=2"]
    assert run(tmp_path / "sweep" / "own", *words) == 0
    shown = capsys.readouterr().err
    assert shown.index(" because of overrides; this arm is a control") < shown.index("step 2/2")
    assert "FP32 products that" not in shown
    record, missing = record_of(tmp_path / "sweep" / "own"), "e4m3 emulated-e5m2"
    assert record["status"] == "done"
    half = get_policy(mode).half_dtype
    unused = f"emulated-{missing if mode.startswith('fp8') else NAMES[half]}"
    assert record["audit"]["unused"] == unused
    assert main(["show", str(tmp_path / "sweep" / "own")]) == 0
    assert f"no product ran in {unused}" in capsys.readouterr().out
    assert run(tmp_path / "sweep" / "fp32", *TINY_GPT, "precision=fp32", "train.steps=2") == 0
    main(["compare", str(tmp_path / "sweep")])
    assert f"no product ran in {unused}" in " ".join(capsys.readouterr().out.split())


def test_a_container_in_fp32_is_no_product_that_was_not_asked_for(tmp_path, capsys):
    words = [*TINY_GPT, "precision=bf16_master", "precision.overrides.blocks=fp32", "train.steps=1"]
    assert run(tmp_path / "run", *words) == 0
    shown = capsys.readouterr().err
    assert "FP32 products that" not in shown and "control" not in shown
    assert {"forward bf16", "forward fp32"} <= {*record_of(tmp_path / "run")["audit"]["products"]}


@pytest.mark.slow
def test_attempts_of_a_resumed_run_add_up(tmp_path):
    words = [*TINY_GPT, "precision=amp", "train.checkpoint_every=2", "optim.schedule=constant"]
    assert run(tmp_path / "run", *words, "train.steps=4") == 0
    first = record_of(tmp_path / "run")["audit"]
    assert main([f"resume={tmp_path / 'run'}", "train.steps=6"]) == 0
    both = record_of(tmp_path / "run")["audit"]
    assert (first["watched"], both["watched"]) == (3, 5)
    once, twice = (audit["products"]["forward fp16"] for audit in (first, both))
    assert 3 * twice == 5 * once > 0


@pytest.mark.slow
def test_an_attempt_without_a_step_does_not_fail(tmp_path, monkeypatch):
    """A run that was stopped in its last evaluation has only the evaluation left."""

    def stopped(self, step, *more):
        raise Stopped("SIGTERM")

    words = [*TINY_GPT, "precision=fp16_master_scaled", "train.steps=3"]
    with monkeypatch.context() as patch:
        patch.setattr(MetricLogger, "evaluate", stopped)
        assert run(tmp_path / "run", *words) == 75
    assert main([f"resume={tmp_path / 'run'}"]) == 0
    record = record_of(tmp_path / "run")
    assert (record["status"], record["attempts"], record["audit"]["watched"]) == ("done", 2, 3)


def test_layers_beside_a_mode_that_casts_none_are_said(build_run):
    says = ["precision.matmul.modules changes nothing in fp32: it casts no products"]
    for mode, expected in (("fp32", says), ("mxfp8", [])):
        words = [*TINY_GPT, f"precision={mode}", "precision.matmul.modules=['*',output]"]
        found = notes(compose_config(words).config, build_run(*words))
        assert [line for line in found if "matmul" in line] == expected
