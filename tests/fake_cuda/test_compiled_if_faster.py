"""train.compile=auto on the fake device: real clocks, captures and compilers, prescribed times."""

import json
import shutil

import pytest

from mprun.execution.step_clock import STEPS as TIMED
from mprun.execution.step_clock import WARM_UP

from .cells import MODELS

MEASURED = 2 * (WARM_UP + TIMED)  # steps in which the form is chosen
STEPS = MEASURED + WARM_UP + TIMED + 4  # then the graph is, and four are replayed

# A run in which the eager steps take `times[0]` (host and device), compiled ones `times[1]`, and
# those that a graph might replay `times[2]`; compiled, if not by torch, by what changes nothing.
RUN = """
from pathlib import Path
from unittest import mock

import torch

from mprun.config.compose import compose_config
from mprun.execution import compiled_step
from mprun.execution.step_clock import HostBound
from mprun.record.run_record import read_record
from mprun.training.run import start


def no_compiler(model, **options):
    def form(*inputs):
        if {fails}:
            raise RuntimeError("no kernel image")
        return model(*inputs)

    return form


def answer():
    times, measured = iter({times}), HostBound.milliseconds
    composed = compose_config([*{overrides}, "device=cuda", "threads=1", "output_dir={folder}"])
    with (
        mock.patch.object(HostBound, "milliseconds", lambda own: measured(own) and next(times)),
        mock.patch.object(compiled_step, "LEAST_LEFT_S", 0.0),
        mock.patch.object(torch, "compile", torch.compile if {compiles} else no_compiler),
    ):
        return {{"code": start(composed), "record": read_record(Path("{folder}"))}}
"""
EAGER, HOST_BOUND, DEVICE_BOUND = (9.0, 10.0), (4.9, 5.0), (1.0, 5.0)


@pytest.fixture
def executed(script, tmp_path):
    """`executed(model, *overrides)`: how a run on the fake device took its steps."""

    def run(model, *overrides, times=(EAGER, HOST_BOUND, HOST_BOUND), fails=False, compiles=False):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        words = [*MODELS[model], f"train.steps={STEPS}", *overrides]
        how = {"times": times, "fails": fails, "compiles": compiles}
        found = script(RUN.format(overrides=words, folder=tmp_path / "run", **how))
        assert found["code"] == 0 and found["warnings"] == [] and found["counts"]["stray"] == 0
        record = found["record"]
        return record["execution"] | {"peak_bytes": record["memory"]["peak_bytes"]}

    return run


@pytest.mark.slow
def test_compiled_steps_win_and_are_captured(executed):
    found = executed("gpt", "precision=fp16_master_scaled")
    assert found["compile"] == "on: 5 ms a step, eager 10 ms" and found["compile_s"] >= 0
    assert found["cuda_graph"] == "on" and found["replayed"] == 4


@pytest.mark.slow
@pytest.mark.parametrize("model", ["dcgan", "resnet50"])
def test_compiled_steps_win_and_stay_so(executed, model):
    found = executed(model, "precision=amp", times=(EAGER, DEVICE_BOUND, DEVICE_BOUND))
    assert found["compile"] == "on: 5 ms a step, eager 10 ms"
    assert found["cuda_graph"].startswith("off: the device is the limit")


@pytest.mark.slow
@pytest.mark.parametrize("model", ["dcgan", "resnet50"])
def test_eager_steps_win_and_are_captured(executed, model):
    found = executed(model, "precision=amp", times=(HOST_BOUND, EAGER, HOST_BOUND))
    assert found["compile"] == "off: compiled steps take 10 ms, eager ones 5 ms"
    assert found["cuda_graph"] == "on" and found["replayed"] == 4


@pytest.mark.slow
def test_a_peak_of_memory_is_without_the_copy_of_the_state(executed):
    """The compiling step holds that copy."""
    overrides = ["precision=fp32", "train.cuda_graph=off", "numerics.keep_failure=false"]
    tried = executed("gpt", *overrides, times=(HOST_BOUND, EAGER))
    plain = executed("gpt", *overrides, "train.compile=off")
    assert tried["compile"].startswith("off: compiled steps take")
    assert tried["peak_bytes"] <= plain["peak_bytes"]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["dcgan", "resnet50"])
def test_what_cannot_be_compiled_is_captured_as_it_is(executed, model):
    found = executed(model, "precision=amp", times=(EAGER, HOST_BOUND), fails=True)
    assert found["compile"] == "off: RuntimeError: no kernel image"
    assert found["cuda_graph"] == "on" and "compile_s" not in found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ("deterministic=true", "deterministic=true, and a measured time would decide on bits"),
        ("train.steps=12", "12 steps are left, the measurement takes 16"),
        ("train.compile=off", ""),
    ],
)
def test_where_nothing_is_measured(executed, overrides, reason):
    found = executed("gpt", overrides, times=(HOST_BOUND,))
    assert found["compile"] == (f"off: {reason}" if reason else "off")
    assert found["cuda_graph"] == "on"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["bf16_master", "fp8_tensorwise"])
def test_what_torch_compiles_is_captured(device, executed, tmp_path, mode):
    """A resumed run goes on so, without a measurement."""
    overrides = [f"precision={mode}", "train.checkpoint_every=8", "optim.schedule=constant"]
    found = executed("gpt", *overrides, compiles=True)
    assert found["compile"] == "on: 5 ms a step, eager 10 ms" and found["compile_s"] > 0
    assert found["cuda_graph"] == "on" and found["replayed"] == 4
    device.command(f"resume={tmp_path / 'run'}", f"train.steps={STEPS + 4}")
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["execution"]["compile"] == found["compile"]
    assert record["execution"]["compile_s"] > 0
