"""The same promises on a GPU: every peer computes what mprun computes, in every mode it has."""

import pytest
import torch

from benchmarks.suite.contenders import PEERS, available
from benchmarks.suite.equality import compare, rounding_unit, sensitivity, trial_of, watched_steps
from mprun.extensions.bench.cases import Case
from mprun.precision.policy import read_math_flags

from ..helpers import without_waiting
from .peer_cases import MODELS, own_losses

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    # Of torch.compile, where a peer has it.
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
STEPS = 5
MODES = ("fp32", "tf32", "fp16_naive", "amp", "amp_bf16")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("name", PEERS)
def test_losses_equal_mprun_s_own(make_peer, build_run, kind, mode, name):
    reason = available(name, mode, kind, torch.device("cuda"))
    if reason is not None:
        pytest.skip(reason)
    expected, built = own_losses(build_run, kind, mode, steps=STEPS, device="cuda")
    flags = read_math_flags()
    peer = make_peer(kind, mode, name, device="cuda")
    assert read_math_flags() == flags
    losses = torch.stack([peer.step() for _ in range(STEPS)])
    assert losses.device.type == "cuda"
    if mode == "amp":
        skipped = sum(scale.steps_skipped for scale in built.task.loss_scales.values())
        per_optimizer = kind == "gan" and name in ("fabric", "trainer", "accelerate")
        if not per_optimizer:
            assert peer.skipped() == int(skipped)
    # Eight units of the format: the kernels are others, and five updates add to it.
    rtol = max(8 * rounding_unit(mode), 1e-4)
    if mode == "fp16_naive":  # Adam's eps is 0 in FP16
        rtol = 0.05
    torch.testing.assert_close(losses, expected, rtol=rtol, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["loop", "loop+", "amp", "amp+"])
def test_no_step_of_a_plain_loop_waits_but_for_the_scaler(make_peer, name):
    mode = "fp32" if name.startswith("loop") else "amp_bf16"
    peer = make_peer("classification", mode, name, device="cuda")
    for _ in range(3):
        peer.step()
    with without_waiting():
        for _ in range(3):
            peer.step()


def test_a_fused_optimizer_s_skips_are_counted_without_waiting(make_peer):
    peer = make_peer("classification", "amp", "amp+", device="cuda")
    factor = torch.ones((), device="cuda")
    peer.task.networks[0][8].bias.register_hook(lambda gradient: gradient * factor)
    for _ in range(3):
        peer.step()
    before = peer.skipped()
    factor.fill_(float("inf"))
    with without_waiting():
        peer.step()
    assert peer.skipped() == before + 1


@pytest.mark.parametrize("mode", ["fp32", "tf32", "amp", "amp_bf16"])
def test_the_equality_check_accuses_nobody(make_peer, mode):
    name = "loop" if mode in ("fp32", "tf32") else "amp"
    device, kind = torch.device("cuda"), "classification"

    def watched(peer, *overrides):
        return watched_steps(make_peer(kind, mode, peer, *overrides, device="cuda"), device)

    case = Case(kind, MODELS[kind], mode, name)
    reference = trial_of(case, watched(name), sensitivity(case, device))
    others = [
        trial_of(Case(kind, (), mode, other), watched(other))
        for other in PEERS
        if other != name and available(other, mode, kind, device) is None
    ]
    verdicts = compare(reference, others)
    assert [(v.name, v.reason) for v in verdicts if not v.ok] == []
    wrong = Case(kind, (*MODELS[kind], "optim.lr=0.0202"), mode, "wrong")
    (verdict,) = compare(reference, [trial_of(wrong, watched(name, "optim.lr=0.0202"))])
    assert not verdict.ok
