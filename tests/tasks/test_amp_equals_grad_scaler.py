"""precision=amp equals torch.autocast with torch.amp.GradScaler, bit for bit.

Both sides run inside the same CPU emulation, because a CPU has no half LSTM and its own half
convolutions are slow. Steps that overflow are included where a model has no BatchNorm: there the
two differ on purpose (torch lets a skipped step move the running statistics).
"""

import pytest
import torch
from torch.nn import functional as F

from mprun import models
from mprun.data import DigitsImages, SyntheticTokens
from mprun.precision.emulation import HalfEmulation


def run(task, steps):
    rows = [task.train_step(step) for step in range(steps)]
    return [torch.stack([row[key] for row in rows]) for key in ("loss", "loss_scale", "found_inf")]


def assert_same_model(learner, model):
    ours = learner.model.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(ours[name], tensor), name


@pytest.mark.slow
def test_resnet50(build_run):
    steps = 4
    built = build_run(
        "model=resnet50",
        "optim=sgd",
        "data.batch_size=8",
        "precision=amp",
        "scaler.init_scale=64",
        "scaler.growth_interval=2",
        "train.clip_norm=5",
    )
    losses, scales, found_inf = run(built.task, steps)
    torch.manual_seed(0)
    model = models.resnet50(10)
    optimizer = torch.optim.SGD(model.parameters(), 0.02, 0.9, weight_decay=1e-4, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    data = DigitsImages(32, batch_size=8, seed=0, device="cpu")
    emulation, expected = HalfEmulation(), []
    for step in range(steps):
        images, labels = data.train_batch(step)
        optimizer.zero_grad()
        with emulation:
            with torch.autocast("cpu", dtype=torch.float16):
                logits = model(images)
            loss = F.cross_entropy(logits.float(), labels)
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        scaler.step(optimizer)
        scaler.update()
        expected.append(loss.detach())
    assert not found_inf.any()
    assert scales.tolist() == [64.0, 64.0, 128.0, 128.0]
    assert torch.equal(losses, torch.stack(expected))
    assert_same_model(built.task.learner, model)


def test_lstm_lm(build_run):
    steps = 6
    tokens = {"vocab_size": 50, "batch_size": 4, "sequence_length": 8, "train_tokens": 160}
    built = build_run(
        "model=lstm_lm",
        "precision=amp",
        "scaler.growth_interval=2",
        "scaler.init_scale=1024",
        "data=synthetic_tokens",
        *(f"data.{k}={v}" for k, v in tokens.items()),
    )
    losses, scales, found_inf = run(built.task, steps)
    torch.manual_seed(0)
    model = models.LSTMLanguageModel(50, 200, 200, 2)
    optimizer = torch.optim.SGD(model.parameters(), 1.0, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    data = SyntheticTokens(**tokens, seed=0, device="cpu")
    emulation, expected = HalfEmulation(), []
    for step in range(steps):
        inputs, targets = data.train_batch(step)
        if step % 5 == 0:  # 160 tokens hold 5 batches
            state = None
        optimizer.zero_grad()
        with emulation:
            with torch.autocast("cpu", dtype=torch.float16):
                logits, state = model(inputs, state)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
            scaler.scale(loss).backward()
        state = tuple(part.detach() for part in state)
        scaler.step(optimizer)
        scaler.update()
        expected.append(loss.detach())
    assert not found_inf.any()
    assert scales.tolist() == [1024.0, 1024.0, 2048.0, 2048.0, 4096.0, 4096.0]
    assert torch.equal(losses, torch.stack(expected))
    assert_same_model(built.task.learner, model)


def test_skipped_steps_too(build_run):
    steps = 12
    built = build_run(
        "model=conv_autoencoder",
        "data.batch_size=2",
        "precision=amp",
        "scaler.init_scale=16777216",
        "scaler.growth_interval=3",
    )
    losses, scales, found_inf = run(built.task, steps)
    torch.manual_seed(0)
    model = models.ConvAutoencoder(64, 32, 8, 1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=3)
    data = DigitsImages(64, batch_size=2, seed=0, device="cpu", channels=1, value_range="tanh")
    emulation, expected, expected_scales = HalfEmulation(), [], []
    for step in range(steps):
        images, _ = data.train_batch(step)
        optimizer.zero_grad()
        with emulation:
            with torch.autocast("cpu", dtype=torch.float16):
                outputs = model(images)
            loss = F.mse_loss(outputs.float(), images)
            scaler.scale(loss).backward()
        expected_scales.append(scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
        expected.append(loss.detach())
    assert 0 < found_inf.sum() < steps
    assert scales.tolist() == expected_scales
    assert torch.equal(losses, torch.stack(expected))
    assert_same_model(built.task.learner, model)
