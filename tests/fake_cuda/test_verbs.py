"""Verbs on the fake device: doctor, explain, advise, logprobs, bench; compiled runs."""

import json
import os
import subprocess

import pytest

from . import runtime as fake_cuda
from .cells import MODELS
from .conftest import ROOT
from .test_every_mode import assert_sound

# What a run writes of itself, while its first loss is no number.
DIVERGED = """
import mprun.record.async_copy
from mprun.cli import main
from unittest import mock

read = mprun.record.async_copy.Sent.read
with mock.patch.object(
    mprun.record.async_copy.Sent, "read", lambda sent: [float("nan"), *read(sent)[1:]]
):
    return {{"code": main({arguments})}}
"""


def on_device(device, *words, **variables):
    """Return the output of `python WORDS` in a separate process on the fake device."""
    environment = fake_cuda.environment(device.folder, **variables) | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "TRITON_CACHE_DIR": str(device.folder / "triton"),
    }
    command = [device.python, *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_the_doctor_tries_what_a_gpu_has(script):
    """Each answer is the device's; none is an exception of mprun's own."""
    found = script("from mprun.cli.machine import machine_facts\nreturn machine_facts()")
    assert "error" not in found, found["trace"]
    # What a replay has computed nobody says here; that it was captured and replayed is counted.
    assert "replay" in found["cuda_graph"]["why"] and found["counts"]["graph_launches"] > 1
    assert {mode["verdict"] for mode in found["modes"].values()} == {"honoured"}
    assert found["warnings"] == []


@pytest.mark.slow
def test_the_doctor_sees_all_gpus_and_their_memory(device):
    text = on_device(device, "-m", "mprun", "doctor", "--json", memory_bytes=6 * 2**30, devices=2)
    gpus = json.loads(text)["gpus"]
    assert [(gpu["index"], gpu["total_bytes"]) for gpu in gpus] == [(0, 6 * 2**30), (1, 6 * 2**30)]


SELF_TEST = """
import torch
from mprun.precision import get_policy
from mprun.precision.scaled_products import why_no_product
from mprun.precision.torch_update import take_for_granted

take_for_granted()
why = why_no_product(get_policy("fp8_rowwise").matmul, torch.device("cuda", 1))
print(why, *(torch.cuda.max_memory_allocated(number) > 0 for number in range(2)))
"""


@pytest.mark.slow
def test_a_kernel_is_tried_on_the_device_of_its_model(device):
    """Not on the current one, the first."""
    assert on_device(device, "-c", SELF_TEST, devices=2) == "None False True\n"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["amp", "bf16_stochastic", "fp8_rowwise"])
def test_a_step_that_diverged_is_replayed_there(device, script, tmp_path, mode):
    folder = tmp_path / "run"
    arguments = [*MODELS["gpt"], f"precision={mode}", "train.steps=6", "train.log_every=2"]
    arguments += ["numerics=probes", "device=cuda", "threads=1", f"output_dir={folder}"]
    found = script(DIVERGED.format(arguments=arguments))
    assert found.get("code") == 3, found.get("trace", found["printed"])
    found = device.ask("command", arguments=["explain", str(folder)])
    assert found.get("code") == 0, found.get("trace", found["printed"])
    assert "step 1 from its kept state: does not fail again" in found["printed"]


@pytest.mark.slow
def test_advice_from_probes(device, tmp_path):
    folder = tmp_path / "run"
    overrides = [*MODELS["gpt"], "precision=fp32", "train.steps=6", "numerics=probes"]
    assert_sound(device.run(folder, [*overrides, "numerics.every=3", "train.eval_every=3"]))
    found = device.ask("command", arguments=["advise", str(folder)])
    assert found.get("code") == 0, found.get("trace", found["printed"])
    # Which modes hold is chance where nothing computes a value.
    assert "precision=fp16_master" in found["printed"]


@pytest.mark.parametrize("mode", ["amp_bf16", pytest.param("fp8_rowwise", marks=pytest.mark.slow)])
def test_two_modes_apart(device, mode):
    arguments = ["logprobs", "bf16_master", mode, *MODELS["gpt"], "device=cuda"]
    found = device.ask("command", arguments=[*arguments, "--tokens", "64", "--json"])
    assert found.get("code") == 0, found.get("trace", found["printed"])
    assert json.loads(found["printed"])


@pytest.mark.slow
def test_a_bench_with_its_children(device, tmp_path):
    words = [*MODELS["conv_autoencoder"], "device=cuda", "--modes", "amp", "--plain"]
    words += ["--windows", "2", "--steps-per-window", "2", "--out", str(tmp_path / "bench")]
    on_device(device, "-m", "mprun", "bench", *words)
    bench = json.loads((tmp_path / "bench" / "bench.json").read_text())
    [row] = bench["rows"]
    assert (row["case"]["mode"], row["status"]) == ("amp", "measured")
    assert {"fp32", "tf32", "fp16", "bf16"} < set(bench["ceilings"]["flops"])


@pytest.mark.parametrize(
    ("mode", "graph"), [("amp_bf16", "on"), ("fp8_tensorwise", "off"), ("fp8_rowwise", "on")]
)
@pytest.mark.slow
def test_compiled_steps(device, tmp_path, mode, graph):
    overrides = [*MODELS["gpt"], f"precision={mode}", "train.compile=default", "train.steps=8"]
    found = device.run(tmp_path / "run", [*overrides, f"train.cuda_graph={graph}"])
    assert_sound(found)
    execution = found["record"]["execution"]
    assert execution["compile"] == "default" and execution["compile_s"] > 0
    assert execution.get("replayed", 0) == (3 if graph == "on" else 0)
