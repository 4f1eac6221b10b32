"""The DCGAN step equals a hand-written loop with two optimizers, bit for bit."""

from contextlib import nullcontext

import pytest
import torch
from torch.nn import functional as F

from mprun.models.dcgan import Discriminator, Generator
from mprun.precision.emulation import HalfEmulation

from ..helpers import assert_same_bits, configured

STEPS = 4
OVERRIDES = ["model=dcgan", "data.image_size=32", "data.batch_size=4", "model.generator_width=8"]
OVERRIDES.append("model.discriminator_width=8")
# The scale grows every second step and stays where nothing overflows: with a skipped step torch's
# BatchNorm statistics move and ours do not.
AMP = ["precision=amp", "scaler.init_scale=64", "scaler.growth_interval=2"]


def bce(logits, target):
    logits = logits.float()
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, target))


@pytest.mark.parametrize(
    "overrides",
    [[], AMP, pytest.param([*AMP, "cpu_half=native"], marks=pytest.mark.slow)],
    ids=["fp32", "amp", "amp native"],
)
def test_a_step_is_that_of_a_bare_loop(build_run, overrides):
    task = build_run(*OVERRIDES, *overrides).task
    rows = [task.train_step(step) for step in range(STEPS)]

    torch.manual_seed(0)
    networks = Generator(32, 100, 8, 3), Discriminator(32, 8, 3)
    generator, discriminator = networks
    g_optimizer, d_optimizer = (
        torch.optim.Adam(network.parameters(), 2e-4, (0.5, 0.999), fused=True)
        for network in networks
    )
    data = configured("digits", batch_size=4, seed=0, device="cpu", value_range="tanh")
    amp = bool(overrides)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2, enabled=amp)
    emulated = amp and "cpu_half=native" not in overrides
    forward_context = HalfEmulation() if emulated else nullcontext()

    def of(network, inputs):
        with torch.autocast("cpu", dtype=torch.float16, enabled=amp):
            return network(inputs)

    for step in range(STEPS):
        images, _ = data.train_batch(step)
        codes = torch.randn(4, 100)
        d_optimizer.zero_grad()
        with forward_context:
            fake = of(generator, codes)
            real_loss = bce(of(discriminator, images), 1.0)
            scaler.scale(real_loss).backward()
            fake_loss = bce(of(discriminator, fake.detach()), 0.0)
            scaler.scale(fake_loss).backward()
        scaler.step(d_optimizer)
        g_optimizer.zero_grad()
        with forward_context:
            g_loss = bce(of(discriminator, fake), 1.0)
            scaler.scale(g_loss).backward()
        scaler.step(g_optimizer)
        scaler.update()
        assert torch.equal(rows[step]["d_loss"], (real_loss + fake_loss).detach())
        assert torch.equal(rows[step]["g_loss"], g_loss.detach())
    for learner, network in zip((task.g, task.d), networks, strict=True):
        assert_same_bits(dict(learner.model.state_dict()), dict(network.state_dict()))
    # 64 doubled after steps 2 and 4.
    assert not amp or task.loss_scales["loss_scale"].scale.item() == scaler.get_scale() == 256.0
