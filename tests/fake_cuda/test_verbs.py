"""Verbs on the fake device: doctor, explain, advise, logprobs, bench; sweeps; compiled runs."""

import json

import pytest

from mprun.record.run_record import read_record

from .cells import MODELS

# What a run writes of itself, while its first loss is no number.
DIVERGED = """
from mprun.cli import main
from mprun.record.async_copy import Sent
from unittest import mock

read = Sent.read
with mock.patch.object(Sent, "read", lambda sent: [float("nan"), *read(sent)[1:]]):
    return {{"code": main({arguments})}}
"""


@pytest.mark.slow
def test_the_doctor_tries_what_a_gpu_has(script):
    """Each answer is the device's; none is an exception of mprun's own."""
    found = script("from mprun.cli.machine import machine_facts\nreturn machine_facts()")
    # What a replay has computed nobody says here; that it was captured and replayed is counted.
    assert "replay" in found["cuda_graph"]["why"] and found["counts"]["graph_launches"] > 1
    assert {mode["verdict"] for mode in found["modes"].values()} == {"honoured"}
    assert found["warnings"] == []


@pytest.mark.slow
def test_the_doctor_sees_all_gpus_and_their_memory(device):
    text = device.own_process("-m", "mprun", "doctor", "--json", memory_bytes=6 * 2**30, devices=2)
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
    assert device.own_process("-c", SELF_TEST, devices=2) == "None False True\n"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["amp", "bf16_stochastic", "fp8_rowwise"])
def test_a_step_that_diverged_is_replayed_there(device, script, tmp_path, mode):
    folder = tmp_path / "run"
    arguments = [*MODELS["gpt"], f"precision={mode}", "train.steps=6", "train.log_every=2"]
    arguments += ["numerics=probes", "device=cuda", "threads=1", f"output_dir={folder}"]
    found = script(DIVERGED.format(arguments=arguments))
    assert found["code"] == 3, found["printed"]
    found = device.command("explain", str(folder))
    assert "step 1 from its kept state: does not fail again" in found["printed"]


@pytest.mark.slow
def test_advice_from_probes(device, tmp_path):
    folder = tmp_path / "run"
    overrides = [*MODELS["gpt"], "precision=fp32", "train.steps=6", "numerics=probes"]
    device.record(folder, [*overrides, "numerics.every=3", "train.eval_every=3"])
    # Which modes hold is chance where nothing computes a value.
    assert "precision=fp16_master" in device.command("advise", str(folder))["printed"]


@pytest.mark.parametrize("mode", ["amp_bf16", pytest.param("fp8_rowwise", marks=pytest.mark.slow)])
def test_two_modes_apart(device, mode):
    words = ["bf16_master", mode, *MODELS["gpt"], "device=cuda", "--tokens", "64", "--json"]
    assert json.loads(device.command("logprobs", *words)["printed"])


@pytest.mark.slow
def test_a_bench_with_its_children(device, tmp_path):
    words = [*MODELS["conv_autoencoder"], "device=cuda", "--modes", "amp", "--plain"]
    words += ["--windows", "2", "--steps-per-window", "2", "--out", str(tmp_path / "bench")]
    device.own_process("-m", "mprun", "bench", *words)
    bench = json.loads((tmp_path / "bench" / "bench.json").read_text())
    [row] = bench["rows"]
    assert (row["case"]["mode"], row["status"]) == ("amp", "measured")
    assert {"fp32", "tf32", "fp16", "bf16"} < set(bench["ceilings"]["flops"])


@pytest.mark.slow
def test_copies_of_a_sweep_take_the_device(device, tmp_path):
    """A process that was forked from one with a CUDA context can make none of its own."""
    words = [*MODELS["conv_autoencoder"], "device=cuda", "threads=1", "train.steps=3"]
    device.own_process("-m", "mprun", "-m", "-j", "2", *words, "precision=fp32,amp", cwd=tmp_path)
    records = [read_record(path.parent) for path in tmp_path.glob("outputs/*/*/run.json")]
    found = [(record["status"], record["environment"]["device"]) for record in records]
    assert found == [("done", "cuda")] * 2


@pytest.mark.parametrize(
    ("mode", "graph"), [("amp_bf16", "on"), ("fp8_tensorwise", "off"), ("fp8_rowwise", "on")]
)
@pytest.mark.slow
def test_compiled_steps(device, tmp_path, mode, graph):
    overrides = [*MODELS["gpt"], f"precision={mode}", "train.compile=default", "train.steps=8"]
    overrides.append(f"train.cuda_graph={graph}")
    execution = device.record(tmp_path / "run", overrides)["execution"]
    assert execution["compile"] == "default" and execution["compile_s"] > 0
    assert execution.get("replayed", 0) == (3 if graph == "on" else 0)
