"""The same promises on a GPU: every mode runs, no step waits, amp is torch's amp."""

import pytest
import torch
from torch.nn import functional as F

from mprun.models.dcgan import ConvAutoencoder
from mprun.precision import why_unsupported

from ..helpers import without_waiting
from ..shipped import MODES, OF_ANY_NETWORK

pytestmark = pytest.mark.gpu

MODELS = {
    "alexnet": ["model=alexnet", "optim=sgd_alexnet", "data=digits_64", "data.batch_size=8"],
    "alexnet_2012": ["model=alexnet_2012", "data=digits_224", "optim=sgd_alexnet"],
    "resnet50": ["model=resnet50", "optim=sgd", "data.batch_size=16"],
    "lstm_lm": ["model=lstm_lm", "data=synthetic_tokens", "data.batch_size=8"],
    "lstm_lm_projected": ["model=lstm_lm_projected", "data=synthetic_tokens", "data.batch_size=8"],
    "dcgan": ["model=dcgan", "data.batch_size=8"],
    "conv_autoencoder": ["model=conv_autoencoder", "data.batch_size=16"],
    "gpt": ["model=gpt", "data.batch_size=8"],
}
NAN_BY_DEFINITION = {"dcgan", "conv_autoencoder", "gpt"}  # Adam's eps is 0 in FP16


@pytest.mark.parametrize(
    ("model", "mode"),
    [(model, mode) for model in MODELS for mode in (MODES if model == "gpt" else OF_ANY_NETWORK)],
)
def test_three_steps_without_waiting_and_an_evaluation(build_run, model, mode):
    built = build_run(*MODELS[model], f"precision={mode}", device="cuda")
    assert why_unsupported(built.policy, built.device) is None
    # The first step loads kernels and brings the epoch's order to the device.
    losses = [built.task.train_step(0, measure=True)["loss"]]
    with without_waiting():
        for step in (1, 2):
            losses.append(built.task.train_step(step, measure=step == 1)["loss"])
    losses = torch.stack(losses)
    assert losses.device.type == "cuda"
    if mode == "fp16_naive" and model in NAN_BY_DEFINITION:
        assert not losses.isfinite().all()
    else:
        assert losses.isfinite().all()
        assert all(value == value for value in built.task.evaluate().values())
    assert built.forward_context.rerouted() == {}
    assert built.forward_context.kind().split("-")[0] in ("native", "none")


@pytest.mark.parametrize("implementation", ["fused", "foreach", "loop"])
@pytest.mark.parametrize("optim", ["sgd", "adam", "adamw"])
def test_a_skipped_step_moves_nothing_and_waits_for_nothing(build_run, optim, implementation):
    words = ["precision=fp16_master_scaled", f"optim={optim}", "scaler.init_scale=16"]
    words.append(f"optim.implementation={implementation}")
    task = build_run(*MODELS["resnet50"], *words, device="cuda").task
    factor = torch.ones((), device="cuda")
    task.learner.model.fc.bias.register_hook(lambda gradient: gradient * factor)
    assert task.train_step(0)["found_inf"] == 0
    before = [t.clone() for t in task.learner.model.state_dict().values()]
    factor.fill_(float("inf"))
    with without_waiting():
        metrics = task.train_step(1)
    assert metrics["found_inf"] == 1
    after = task.learner.model.state_dict().values()
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert task.loss_scale.steps_skipped == 1


def test_a_schedule_under_a_scale_that_skips_waits_for_nothing(build_run):
    words = ["precision=amp", "optim.schedule=linear", "train.steps=10"]
    built = build_run(*MODELS["conv_autoencoder"], *words, device="cuda")
    rate = built.rate
    skipped = torch.full((), 2, dtype=torch.int64, device="cuda")
    with without_waiting():
        rate.apply(5, skipped)
    lr = built.task.learner.optimizer.param_groups[0]["lr"]
    assert lr.item() == torch.tensor(rate.rates[3]).item()


def test_amp_equals_autocast_and_grad_scaler(build_run):
    steps = 5
    words = ["precision=amp", "scaler.init_scale=1024", "scaler.growth_interval=2"]
    # torch's fused kernel, and the layout of a plain loop.
    words += ["optim.implementation=fused", "train.channels_last=off"]
    built = build_run(*MODELS["conv_autoencoder"], *words, device="cuda")
    # One kernel per layer, and the same one on both sides.
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True
    rows = [built.task.train_step(step) for step in range(steps)]
    torch.manual_seed(0)
    model = ConvAutoencoder(64, 32, 8, 1).cuda()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, fused=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0, growth_interval=2)
    losses, scales = [], []
    for step in range(steps):
        images, _ = built.data.train_batch(step)
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            outputs = model(images)
        loss = F.mse_loss(outputs.float(), images)
        scaler.scale(loss).backward()
        scales.append(scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
    assert [row["loss_scale"].item() for row in rows] == scales
    assert torch.equal(torch.stack([row["loss"] for row in rows]), torch.stack(losses))
    for name, tensor in model.state_dict().items():
        assert torch.equal(built.task.learner.model.state_dict()[name], tensor), name


def test_fp32_is_not_tf32(build_run):
    """2^-12 is below TF32's 11 bits: 1 + 2^-12 is 1 there."""
    operands = torch.full((64, 64), 1 + 2.0**-12, device="cuda")
    exact = torch.full_like(operands, 64 * (1 + 2.0**-11 + 2.0**-24))
    build_run(*MODELS["conv_autoencoder"], device="cuda")
    assert torch.allclose(operands @ operands, exact, rtol=2.0**-20, atol=0)
    build_run(*MODELS["conv_autoencoder"], "precision=tf32", device="cuda")
    assert torch.equal(operands @ operands, torch.full_like(operands, 64.0))
