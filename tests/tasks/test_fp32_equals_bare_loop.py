"""An fp32 run is a bare PyTorch loop: the same losses and weights, bit for bit."""

import pytest
import torch
from torch.nn import functional as F

from mprun import models
from mprun.data import DigitsImages, SyntheticTokens

STEPS = 10
# 192 tokens in 4 streams of 8 steps: 6 batches an epoch, so that 10 steps cross its end.
TOKENS = {"vocab_size": 50, "batch_size": 4, "sequence_length": 8, "train_tokens": 192}
TOKEN_OVERRIDES = ["data=synthetic_tokens", *(f"data.{k}={v}" for k, v in TOKENS.items())]


def digits(size, **further):
    return DigitsImages(size, batch_size=4, seed=0, device="cpu", **further)


def train(task):
    return torch.stack([task.train_step(step)["loss"] for step in range(STEPS)])


def assert_same(built, losses, model, expected):
    assert torch.equal(losses, torch.stack(expected))
    ours = built.task.learner.model.state_dict()
    theirs = model.state_dict()
    assert ours.keys() == theirs.keys()
    for name in theirs:
        assert torch.equal(ours[name], theirs[name]), name


def bare_classification(model, optimizer, data):
    losses = []
    for step in range(STEPS):
        images, labels = data.train_batch(step)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


@pytest.mark.slow
def test_alexnet(build_run):
    built = build_run("model=alexnet", "optim=sgd_alexnet", "data=digits_64", "data.batch_size=4")
    losses = train(built.task)
    torch.manual_seed(0)
    model = models.alexnet(10)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, 0.9, weight_decay=5e-4, fused=True)
    # Dropout draws from the same random state.
    assert_same(built, losses, model, bare_classification(model, optimizer, digits(64)))


@pytest.mark.parametrize("implementation", ["fused", "loop"])
@pytest.mark.slow
def test_resnet50(build_run, implementation):
    built = build_run(
        "model=resnet50", "optim=sgd", "data.batch_size=4", f"optim.implementation={implementation}"
    )
    losses = train(built.task)
    torch.manual_seed(0)
    model = models.resnet50(10)
    # Without `fused`: torch's own default, the loop over the parameters on a CPU.
    chosen = {"fused": True} if implementation == "fused" else {}
    optimizer = torch.optim.SGD(model.parameters(), 0.02, 0.9, weight_decay=1e-4, **chosen)
    assert_same(built, losses, model, bare_classification(model, optimizer, digits(32)))


# torch says once that its CPU library has no projected LSTM.
@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("projection", [0, 16])
def test_lstm_lm(build_run, projection):
    built = build_run(
        "model=lstm_lm",
        f"model.projection_size={projection}",
        "train.clip_norm=0.5",
        *TOKEN_OVERRIDES,
    )
    losses = train(built.task)
    torch.manual_seed(0)
    model = models.LSTMLanguageModel(50, 200, 200, 2, projection)
    optimizer = torch.optim.SGD(model.parameters(), 1.0, fused=True)
    data = SyntheticTokens(**TOKENS, seed=0, device="cpu")
    expected = []
    for step in range(STEPS):
        tokens, targets = data.train_batch(step)
        if step % 6 == 0:
            state = None
        optimizer.zero_grad()
        logits, state = model(tokens, state)
        state = tuple(part.detach() for part in state)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        expected.append(loss.detach())
    assert_same(built, losses, model, expected)


def test_conv_autoencoder(build_run):
    built = build_run("model=conv_autoencoder", "data.batch_size=4")
    losses = train(built.task)
    torch.manual_seed(0)
    model = models.ConvAutoencoder(64, 32, 8, 1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, fused=True)
    data, expected = digits(64, channels=1, value_range="tanh"), []
    for step in range(STEPS):
        images, _ = data.train_batch(step)
        optimizer.zero_grad()
        loss = F.mse_loss(model(images), images)
        loss.backward()
        optimizer.step()
        expected.append(loss.detach())
    assert_same(built, losses, model, expected)


def test_micro_batches_accumulate_as_in_a_bare_loop(build_run):
    built = build_run("model=conv_autoencoder", "data.batch_size=4", "train.accumulate=3")
    losses = train(built.task)
    torch.manual_seed(0)
    model = models.ConvAutoencoder(64, 32, 8, 1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, fused=True)
    data, expected = digits(64, channels=1, value_range="tanh"), []
    for step in range(STEPS):
        optimizer.zero_grad()
        parts = []
        for micro_batch in range(3):
            images, _ = data.train_batch(3 * step + micro_batch)
            loss = F.mse_loss(model(images), images)
            loss.backward()
            parts.append(loss.detach())
        for parameter in model.parameters():
            parameter.grad.div_(3)
        optimizer.step()
        expected.append(torch.stack(parts).mean())
    assert_same(built, losses, model, expected)
