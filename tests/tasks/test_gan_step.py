"""The DCGAN step equals hand-written loops with two optimizers, bit for bit."""

from contextlib import nullcontext

import pytest
import torch
from torch.nn import functional as F

from mprun import models
from mprun.data import DigitsImages
from mprun.precision.emulation import HalfEmulation

STEPS = 10
OVERRIDES = [
    "model=dcgan",
    "data.image_size=32",
    "data.batch_size=4",
    "model.generator_width=16",
    "model.discriminator_width=16",
]


def run(task):
    rows = [task.train_step(step) for step in range(STEPS)]
    return [torch.stack([row[key] for row in rows]) for key in ("d_loss", "g_loss")]


def bare_models():
    torch.manual_seed(0)
    generator = models.Generator(32, 100, 16, 3)
    discriminator = models.Discriminator(32, 16, 3)
    optimizers = [
        torch.optim.Adam(m.parameters(), 2e-4, (0.5, 0.999), fused=True)
        for m in (generator, discriminator)
    ]
    data = DigitsImages(32, batch_size=4, seed=0, device="cpu", value_range="tanh")
    return generator, discriminator, *optimizers, data


def bce(logits, target):
    logits = logits.float()
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, target))


def assert_same(task, results, expected, generator, discriminator):
    for ours, theirs in zip(results, expected, strict=True):
        assert torch.equal(ours, torch.stack(theirs))
    for learner, model in ((task.g, generator), (task.d, discriminator)):
        ours = learner.model.state_dict()
        for name, tensor in model.state_dict().items():
            assert torch.equal(ours[name], tensor), name


def test_fp32_equals_a_bare_loop(build_run):
    task = build_run(*OVERRIDES).task
    results = run(task)
    generator, discriminator, g_optimizer, d_optimizer, data = bare_models()
    expected = [], []
    for step in range(STEPS):
        images, _ = data.train_batch(step)
        fake = generator(torch.randn(4, 100))
        d_optimizer.zero_grad()
        real_loss = bce(discriminator(images), 1.0)
        real_loss.backward()
        fake_loss = bce(discriminator(fake.detach()), 0.0)
        fake_loss.backward()
        d_optimizer.step()
        g_optimizer.zero_grad()
        g_loss = bce(discriminator(fake), 1.0)
        g_loss.backward()
        g_optimizer.step()
        expected[0].append((real_loss + fake_loss).detach())
        expected[1].append(g_loss.detach())
    assert_same(task, results, expected, generator, discriminator)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.few(1)
def test_amp_equals_autocast_and_one_grad_scaler(build_run, native):
    # The scale grows every third step and stays where nothing overflows: with a skipped step
    # torch's BatchNorm statistics move and ours do not.
    task = build_run(
        *OVERRIDES,
        "precision=amp",
        "scaler.init_scale=64",
        "scaler.growth_interval=3",
        f"cpu_half={'native' if native else 'emulated'}",
    ).task
    results = run(task)
    generator, discriminator, g_optimizer, d_optimizer, data = bare_models()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
    emulation = nullcontext() if native else HalfEmulation()
    expected = [], []
    for step in range(STEPS):
        images, _ = data.train_batch(step)
        codes = torch.randn(4, 100)
        d_optimizer.zero_grad()
        with emulation:
            with torch.autocast("cpu", dtype=torch.float16):
                fake = generator(codes)
            with torch.autocast("cpu", dtype=torch.float16):
                real_logits = discriminator(images)
            real_loss = bce(real_logits, 1.0)
            scaler.scale(real_loss).backward()
            with torch.autocast("cpu", dtype=torch.float16):
                fake_logits = discriminator(fake.detach())
            fake_loss = bce(fake_logits, 0.0)
            scaler.scale(fake_loss).backward()
        scaler.step(d_optimizer)
        g_optimizer.zero_grad()
        with emulation:
            with torch.autocast("cpu", dtype=torch.float16):
                logits = discriminator(fake)
            g_loss = bce(logits, 1.0)
            scaler.scale(g_loss).backward()
        scaler.step(g_optimizer)
        scaler.update()
        expected[0].append((real_loss + fake_loss).detach())
        expected[1].append(g_loss.detach())
    assert_same(task, results, expected, generator, discriminator)
    # 64 doubled after steps 3 and 6.
    assert task.loss_scales["loss_scale"].scale.item() == scaler.get_scale() == 512.0
