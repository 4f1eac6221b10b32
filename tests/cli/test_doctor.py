"""`mprun doctor`: one verdict per mode that is what a run would meet."""

import pytest
import torch

from mprun.cli import main
from mprun.doctor import modes
from mprun.errors import BadInput
from mprun.precision import MODES, Arithmetic, get_policy, read_math_flags

CPU = torch.device("cpu")
TINY = ["model=lstm_lm", "data=synthetic_tokens", "data.batch_size=2", "data.train_tokens=512"]


def test_every_mode_has_a_verdict_that_follows_from_its_definition():
    found = {name: (verdict, reason) for name, verdict, reason in modes(CPU)}
    assert list(found) == list(MODES)
    for name, (verdict, reason) in found.items():
        half = get_policy(name).half_dtype
        if name == "tf32":
            assert verdict == "refused" and "TF32" in reason
        elif half is None:
            assert (verdict, reason) == ("honoured", "FP32 products")
        else:
            assert verdict == "emulated"
            assert reason.startswith(Arithmetic(get_policy(name), CPU).kind() + " products")


@pytest.mark.parametrize("mode", MODES)
def test_a_run_meets_what_the_doctor_said(build_run, mode):
    verdict = {name: verdict for name, verdict, _ in modes(CPU)}[mode]
    if verdict == "refused":
        with pytest.raises(BadInput):
            build_run(*TINY, f"precision={mode}")
        return
    built = build_run(*TINY, f"precision={mode}")
    built.task.train_step(0)
    assert bool(built.arithmetic.rerouted()) == (verdict == "emulated")


@pytest.mark.parametrize("mode", ["amp", "amp_bf16", "bf16_master"])
def test_the_native_lstm_is_missing_exactly_where_it_is_said(build_run, mode):
    reason = {name: reason for name, _, reason in modes(CPU)}[mode]
    overrides = [*TINY, f"precision={mode}", "cpu_half=native"]
    if "cpu_half=native has no LSTM here" in reason:
        with pytest.raises(BadInput, match="cpu_half=native"):
            build_run(*overrides)
    else:
        built = build_run(*overrides)
        assert torch.isfinite(built.task.train_step(0)["loss"])


def test_the_page_names_machine_kernels_and_pinned_flags(capsys):
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for word in ("CPU ", "versions ", "mprun ", "fused updates", "multi_head", "addmm", "lstm"):
        assert word in text
    for name, value in read_math_flags().items():
        assert f"\n  {name} = {value}" in text


@pytest.mark.gpu
def test_on_a_gpu_nothing_is_emulated(capsys):
    assert {verdict for _, verdict, _ in modes(torch.device("cuda"))} <= {"honoured", "refused"}
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert torch.cuda.get_device_name() in text and "cuDNN" in text
    assert "emulated" not in text
