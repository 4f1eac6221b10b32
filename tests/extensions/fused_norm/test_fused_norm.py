"""BatchNorm with ReLU as one kernel each way: the same bits as separate operations."""

from pathlib import Path

import pytest
import torch
from torch import nn

from mprun.errors import BadInput
from mprun.extensions.fused_norm.modules import install, pairs_of, plan
from mprun.models.classifiers import PreActivationResNet50, resnet50
from mprun.models.dcgan import Discriminator, Generator
from mprun.precision import get_policy
from mprun.precision.casting import CastModel

from ...execution.trained import SMALL, Training
from ...helpers import printed_by, raises_line

SCRIPT = Path(__file__).with_name("norms_in_interpreter.py")
TRITON = pytest.mark.skipif(
    not __import__("importlib.util").util.find_spec("triton"), reason="needs Triton"
)


@TRITON
@pytest.mark.slow
def test_all_of_them_in_the_interpreter():
    found = printed_by(SCRIPT)
    failed = {label: text for label, text in found["outcomes"].items() if text is not None}
    assert not failed, "\n".join(f"{label}:\n{text}" for label, text in failed.items())
    assert len(found["outcomes"]) == 72
    assert sum(found["compared"].values()) > 3_000_000 and not any(found["different"].values())


@TRITON
@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_compiled_ahead_of_time(capability, tmp_path, monkeypatch):
    """Every form: rounded to the nearest, nothing contracted, wide loads, no atomics."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from .norms_compiled import outcomes

    found = outcomes(capability)
    assert len(found) == 48 and not any(found.values()), found


@pytest.mark.parametrize(
    ("make", "alone", "with_a_sum"),
    [(Generator, 4, 0), (resnet50, 33, 16), (PreActivationResNet50, 49, 0), (Discriminator, 0, 0)],
)
@pytest.mark.slow
def test_the_layers_in_reach(make, alone, with_a_sum):
    """All but the four of ResNet-50 on its shortcuts; LeakyReLU has no kernel."""
    with torch.device("meta"):
        network = make()
    found = [adds for _, adds in pairs_of(network)]
    assert (found.count(False), found.count(True)) == (alone, with_a_sum)


def test_a_module_with_its_own_forward_is_left_alone():
    """Other casts around it, or a network that takes its layers one by one."""
    norm, relu = nn.BatchNorm2d(4), nn.ReLU()
    chain = nn.Sequential(norm, relu)
    assert [own for own, _ in pairs_of(chain)] == [norm]
    install(CastModel(chain, get_policy("fp32"), {}), torch.device("cuda"))
    x = torch.randn(2, 4, 3, 3)
    expected = nn.BatchNorm2d(4)(x)
    assert torch.equal(chain[:1](x), expected) and torch.equal(chain(x), expected.relu())
    other = nn.Sequential(nn.BatchNorm2d(4), nn.ReLU())
    other[0].__dict__["forward"] = lambda x: x
    assert not pairs_of(other)
    for changed in (nn.BatchNorm2d(4, affine=False), nn.BatchNorm2d(4, momentum=None)):
        assert not pairs_of(nn.Sequential(changed, nn.ReLU()))
    assert not pairs_of(nn.Sequential(nn.BatchNorm2d(4), nn.ReLU6()))


@pytest.mark.parametrize("there", [True, False])
def test_auto_without_a_gpu_or_without_this_extension(build_run, monkeypatch, there):
    overrides = [*SMALL["reconstruction"], "train.fused_norm=auto"]
    if there:
        built = build_run(*overrides)
        assert built.stepper.description["fused_norm"] == "off: its kernels need device=cuda"
        return
    monkeypatch.setattr("mprun.build.run.announced", lambda group: {})
    with raises_line(BadInput, "train.fused_norm=auto: its extension is missing here"):
        build_run(*overrides)


def test_every_row_is_in_one_chunk():
    for rows, channels in [(2, 1), (802_816, 64), (12_544, 2048), (3_211_264, 64), (49, 24)]:
        lanes, block, steps, chunks = plan(rows, channels)
        assert (chunks - 1) * steps * lanes < rows <= chunks * steps * lanes
        assert lanes * block == 2048 and chunks * -(-channels // block) <= 1024


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["fp32", "amp", "fp16_naive", "amp_bf16", "bf16_naive"])
def test_the_bits_of_separate_operations_on_a_gpu(mode):
    from mprun.extensions.fused_norm.choice import why_not_on

    assert why_not_on(torch.device("cuda"), get_policy(mode)) is None


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["fp32", "fp16_master_scaled", "amp"])
def test_steps_on_a_gpu_are_close_to_cudnn_s_and_a_replay_is_equal(build_run, mode):
    overrides = [*SMALL["batch_norm"], f"precision={mode}", "train.channels_last=on"]
    losses = []
    for more in (["on", "off"], ["on", "on"], ["off", "off"]):
        keys = zip(("train.fused_norm", "train.cuda_graph"), more, strict=True)
        built = build_run(*overrides, *(f"{key}={own}" for key, own in keys), device="cuda")
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True
        with built.stepper.on_stream():
            found = Training(built, built.stepper.step).steps(0, 8).values("loss")
        losses.append(found.cpu())
    assert torch.equal(losses[0], losses[1])
    torch.testing.assert_close(losses[0], losses[2], rtol=2e-2, atol=0)
