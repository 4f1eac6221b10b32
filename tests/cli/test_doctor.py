"""`mprun doctor`: verdicts that are what a run would meet; a page and JSON of the same facts."""

import json
import re
import signal
import time
from contextlib import suppress

import pytest
import torch

from mprun.cli import main
from mprun.cli.doctor import KEYS, page, summary
from mprun.cli.machine import _verdict, machine_facts, modes
from mprun.errors import BadInput
from mprun.precision import ForwardContext, get_policy, pin_math_flags, read_math_flags
from mprun.recording.environment import number_formats

from ..shipped import ALL_MODES, MODES

CPU = torch.device("cpu")
TINY = ["model=lstm_lm", "data=synthetic_tokens", "data.batch_size=2", "data.train_tokens=512"]


def test_every_mode_has_a_verdict_that_follows_from_its_definition():
    found = modes(CPU)
    assert list(found) == ALL_MODES
    for name, said in found.items():
        verdict, reason = said["verdict"], said["reason"]
        half = get_policy(name).half_dtype
        if name == "tf32":
            assert verdict == "refused" and "TF32" in reason
        elif half is None:
            assert (verdict, reason) == ("honoured", "FP32 products")
        else:
            assert verdict == "emulated"
            assert reason.startswith(ForwardContext(get_policy(name), CPU).kind() + " products")


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_run_meets_what_the_doctor_said(build_run, mode):
    verdict = modes(CPU)[mode]["verdict"]
    # FP8 is of linear layers, of which the LSTM's network has none but the output's.
    small = TINY if get_policy(mode).matmul is None else ["model=gpt", "data.batch_size=2"]
    if verdict == "refused":
        with pytest.raises(BadInput):
            build_run(*small, f"precision={mode}")
        return
    built = build_run(*small, f"precision={mode}")
    built.task.train_step(0)
    assert bool(built.forward_context.rerouted()) == (verdict == "emulated")
    recorded = number_formats(built.task.learners, built.forward_context, "none")
    said = recorded["linear_products"]
    assert (said is None) == (get_policy(mode).matmul is None)
    assert said is None or f"linear layers: {said}" in modes(CPU)[mode]["reason"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["amp", "amp_bf16", "bf16_master"])
def test_the_native_lstm_is_missing_exactly_where_it_is_said(build_run, mode):
    reason = modes(CPU)[mode]["reason"]
    overrides = [*TINY, f"precision={mode}", "cpu_half=native"]
    if "cpu_half=native has no LSTM here" in reason:
        with pytest.raises(BadInput, match="cpu_half=native"):
            build_run(*overrides)
    else:
        built = build_run(*overrides)
        assert torch.isfinite(built.task.train_step(0)["loss"])


@pytest.fixture(scope="module")
def facts():
    return machine_facts()


def printed(capsys, *arguments):
    assert main(["doctor", *arguments]) == 0
    return capsys.readouterr().out


def flat(text):
    """Without line breaks and columns."""
    return " ".join(text.split())


def test_the_page_names_machine_kernels_and_pinned_flags(capsys):
    text = printed(capsys)
    for word in ("CPU ", "versions ", "mprun ", "fused updates", "CUDA graph", "NVML"):
        assert f"\n{word}" in text
    for name, value in read_math_flags().items():
        assert f"\n  {name} = {value}" in text
    assert max(map(len, text.splitlines())) <= 80


def test_the_first_line_is_the_verdict_with_what_is_wrong_in_front(facts):
    calm = {**facts, "device": "cpu", "gpus": [], "modes": {"fp32": {"verdict": "honoured"}}}
    assert summary(calm) == "CPU only: modes below FP32 are emulated; nothing is missing"
    refused = {**calm, "modes": {"tf32": {"verdict": "refused"}}}
    assert summary(refused).endswith("are emulated, refused: tf32; nothing is missing")
    gpu, bad = {"index": 0, "name": "NVIDIA Made", "why": None}, {"works": False, "why": "x"}
    on_gpu = {**calm, "gpus": [gpu], "cuda_graph": bad, "nvml": bad}
    lacks = "no CUDA graphs, no energy (NVML) (see below)"
    assert summary(on_gpu) == f"{lacks}; CUDA on NVIDIA Made: 1 of 1 modes run in its arithmetic"
    full = page(facts)
    assert " ".join(full.partition("\n\n")[0].split()) == summary(facts)


def test_json_is_one_object_with_the_keys_that_help_explains(capsys):
    found = json.loads(printed(capsys, "--json"))
    assert list(found) == list(KEYS)
    page_of_help = printed(capsys, "--help")
    for key in KEYS:
        assert f"\n  {key} " in page_of_help
    # What is inside is named too, but for entries by mode, flag and optimizer.
    inner = [found["machine"], found["kernels"], *found["kernels"].values(), found["nvml"]]
    for name in {name for entry in inner if entry for name in entry}:
        assert re.search(rf"\b{name}\b", page_of_help), name


def test_the_page_is_a_view_of_the_same_facts(capsys):
    pin_math_flags("ieee")  # or the first of the two would find other flags than the second
    found = json.loads(printed(capsys, "--json"))
    assert page(found) == printed(capsys).rstrip("\n")
    text = flat(page(found))
    assert ", ".join(found["emulated_operations"]) in text
    assert found["machine"]["cpu"] in text and found["machine"]["python"] in text
    for mode, said in found["modes"].items():
        assert flat(f"{mode} {said['verdict']} {said['reason']}") in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
def test_without_a_gpu_it_says_what_cannot_be_said(facts):
    assert (facts["device"], facts["gpus"], facts["kernels"]["cuda"]) == ("cpu", [], None)
    assert facts["cuda_graph"] == {"works": None, "why": "needs a GPU"}
    assert facts["nvml"]["works"] is False and facts["nvml"]["power_w"] is None
    text = flat(page(facts))
    for reason in (facts["why_no_gpu"], facts["nvml"]["why"], "CUDA graph not tested: needs a GPU"):
        assert reason in text


def test_the_page_of_a_gpu(facts):
    """Made facts: what the page does with answers that this machine does not give."""
    gpu = {"index": 0, "name": "NVIDIA Made", "compute_capability": "9.0", "multiprocessors": 132}
    gpu |= {"total_bytes": 150 * 2**30, "free_bytes": 149 * 2**30, "why": None}
    full = {**gpu, "index": 1, "free_bytes": None, "why": "CUDA error: out of memory"}
    cuda = {"version": "13.2", "driver": "580.65.06", "cudnn": 92600, "tf32": True, "bf16": False}
    missing = {"temperature_c": "Not Supported", "process_memory": "another space"}
    nvml = {"works": True, "why": None, "energy_mj": 5, "power_w": 80.4, "sm_clock_mhz": 1980.0}
    nvml |= {"temperature_c": None, "process_bytes": None, "missing": missing}
    passed = {"works": True, "why": None}
    made = {"device": "cuda:0", "why_no_gpu": None, "gpus": [gpu, full], "nvml": nvml}
    made |= {"kernels": {"cpu": facts["kernels"]["cpu"], "cuda": cuda}, "cuda_graph": passed}
    text = page({**facts, **made, "emulated_operations": []})
    assert max(map(len, text.splitlines())) <= 80
    for said in (
        "GPU 0 NVIDIA Made, compute capability 9.0, 132 multiprocessors, 150.0 GiB, "
        "free: 149.0 GiB GPU 1",
        "150.0 GiB, free: unknown (CUDA error: out of memory)",
        "CUDA 13.2, driver 580.65.06, cuDNN 92600, TF32, no BF16",
        "CUDA graph a training step is captured, and replays alike",
        "NVML 80 W, 1980 MHz, an energy counter; no temperature_c: Not Supported; "
        "no process_memory: another space",
    ):
        assert said in flat(text)
    assert "no GPU" not in text and "\nemulated" not in text


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "without"), [("fp32", True), ("pow2", False)])
def test_numbers_that_bf16_does_not_have_are_not_multiplied_on_tensor_cores(
    tmp_path, monkeypatch, scale, without
):
    """The GPU that answers is made."""
    (tmp_path / "precision").mkdir()
    matmul = dict.fromkeys(("input", "weight", "grad_output"), "e4m3")
    matmul |= {"granularity": "1x128", "scale": scale}
    mode = {"param_dtype": "bf16", "matmul": matmul}
    (tmp_path / "precision/mine.yaml").write_text(json.dumps(mode))
    monkeypatch.setattr("mprun.cli.machine.why_unsupported", lambda policy, device: None)
    monkeypatch.setattr("mprun.cli.machine.why_no_lstm", lambda policy, device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    verdict, reason = _verdict("mine", torch.device("cuda", 0), str(tmp_path))
    assert verdict == "honoured" and "decoded-e4m3 products on Tensor Cores" in reason
    assert ("decoded numbers, in FP32 (" in reason) == without


def test_a_check_that_fails_is_an_answer(monkeypatch):
    """Every question may raise if another process uses the GPU."""

    def raising(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.\nmore")

    monkeypatch.setattr("mprun.cli.machine.has_fused_kernel", raising)
    monkeypatch.setattr("mprun.cli.machine.why_no_lstm", raising)
    found = machine_facts()
    no = {"works": False, "why": "CUDA out of memory"}
    assert found["fused_updates"] == dict.fromkeys(("sgd", "adam", "adamw", "adagrad"), no)
    assert found["modes"]["fp16_master"]["verdict"] in ("emulated", "honoured")


def test_an_end_of_the_time_cuts_the_test_under_way_and_the_page_names_what_is_left(monkeypatch):
    def compiling(*arguments):
        while True:  # a compiler, of which every `except Exception` takes what is raised
            with suppress(Exception):
                time.sleep(0.01)

    monkeypatch.setattr("mprun.cli.machine.why_unsupported", compiling)
    # What is asked before has its answer at once: an end within torch's first import of a package
    # would leave half of the package to whatever this process does next.
    monkeypatch.setattr("mprun.cli.machine.has_fused_kernel", lambda *_: True)
    found = machine_facts(ends=time.monotonic() + 0.5)
    untested = {name for name, mode in found["modes"].items() if mode["verdict"] == "untested"}
    assert untested == set(ALL_MODES) and "untested  no time left" in page(found)
    assert summary(found).startswith("not tested for lack of time: fp32, tf32, ")
    # Nothing of the limit stays in this process.
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    late = machine_facts(ends=time.monotonic())
    assert {answer["why"] for answer in late["fused_updates"].values()} == {"no time left"}
    assert "fused sgd" in summary(late)


@pytest.mark.gpu
def test_on_a_gpu_kernels_graphs_and_memory_are_what_was_tried(capsys):
    assert {m["verdict"] for m in modes(torch.device("cuda")).values()} <= {"honoured", "refused"}
    found = json.loads(printed(capsys, "--json"))
    assert found["cuda_graph"] == {"works": True, "why": None}
    assert found["device"] == "cuda:0" and found["why_no_gpu"] is None
    assert len(found["gpus"]) == torch.cuda.device_count()
    gpu = found["gpus"][0]
    assert gpu["name"] == torch.cuda.get_device_name(0)
    assert 0 < gpu["free_bytes"] <= gpu["total_bytes"]
    assert found["kernels"]["cuda"]["cudnn"] == torch.backends.cudnn.version()
    assert found["nvml"]["works"] == (found["nvml"]["why"] is None)
    assert found["nvml"]["works"] == (found["kernels"]["cuda"]["driver"] is not None)
    text = page(found)
    assert gpu["name"] in text and "cuDNN" in text
    assert "emulated" not in text
