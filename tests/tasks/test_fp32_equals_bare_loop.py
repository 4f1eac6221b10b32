"""An fp32 run is a bare PyTorch loop: the same losses and weights, bit for bit."""

from contextlib import nullcontext

import pytest
import torch
from torch.nn import functional as F

from mprun.models.classifiers import alexnet, resnet50
from mprun.models.dcgan import ConvAutoencoder
from mprun.models.lstm import LSTMLanguageModel
from mprun.precision.emulation import HalfEmulation

from ..helpers import assert_same_bits, configured

STEPS = 7
# 192 tokens in 4 streams of 8 steps: 6 batches an epoch, so that 7 steps cross its end.
TOKENS = {"vocab_size": 50, "batch_size": 4, "sequence_length": 8, "train_tokens": 192}
LM = ["model=lstm_lm", "model.embedding_size=24", "model.hidden_size=24", "data=synthetic_tokens"]
LM += [f"data.{name}={value}" for name, value in TOKENS.items()]
AUTOENCODER = ["model=conv_autoencoder", "data.image_size=32", "data.batch_size=4"]


def digits(size, batch_size=4, **further):
    given = {"image_size": size, "batch_size": batch_size, "seed": 0, "device": "cpu"}
    return configured("digits", **given, **further)


def one_channel(batch_size=4):
    return digits(32, batch_size, channels=1, value_range="tanh")


def tokens():
    return configured("synthetic_tokens", **TOKENS, seed=0, device="cpu")


def of_classes(logits, inputs, labels):
    return F.cross_entropy(logits, labels)


def of_words(logits, inputs, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def of_pixels(outputs, images, labels):
    return F.mse_loss(outputs, images)


def bare_loop(model, optimizer, data, loss_of, steps=STEPS, scaler=None, clip=None, parts=1):
    """(losses, loss scales) of the loop a user of torch writes; scaler: under autocast to FP16."""
    amp = scaler is not None
    scaler = scaler if amp else torch.amp.GradScaler("cpu", enabled=False)
    forward_context = HalfEmulation() if amp else nullcontext()
    losses, scales, state = [], [], None
    for step in range(steps):
        optimizer.zero_grad()
        own = []
        for part in range(parts):
            inputs, targets = data.train_batch(parts * step + part)
            with forward_context:
                with torch.autocast("cpu", torch.float16, enabled=amp):
                    if loss_of is of_words:
                        state = None if step % 6 == 0 else state
                        outputs, state = model(inputs, state)
                        state = tuple(part.detach() for part in state)
                    else:
                        outputs = model(inputs)
                loss = loss_of(outputs.float(), inputs, targets)
                scaler.scale(loss).backward()
            own.append(loss.detach())
        if parts > 1:
            for parameter in model.parameters():
                parameter.grad.div_(parts)
        if clip is not None:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        scales.append(scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
        losses.append(torch.stack(own).mean())
    return torch.stack(losses), scales


def trained(built, steps=STEPS):
    """(losses, loss scales, skips) of a run; afterwards the seed is that of its beginning."""
    rows = [built.task.train_step(step) for step in range(steps)]
    torch.manual_seed(0)
    keys = ("loss", "loss_scale", "found_inf")
    return [torch.stack([row[key] for row in rows]) for key in keys if key in rows[0]]


def assert_same(built, losses, model, expected):
    assert torch.equal(losses, expected[0])
    assert_same_bits(dict(built.task.learner.model.state_dict()), dict(model.state_dict()))


@pytest.mark.slow
def test_alexnet(build_run):
    built = build_run("model=alexnet", "optim=sgd_alexnet", "data=digits_64", "data.batch_size=4")
    losses, *_ = trained(built)
    model = alexnet(10)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, 0.9, weight_decay=5e-4, fused=True)
    # Dropout draws from the same random state.
    assert_same(built, losses, model, bare_loop(model, optimizer, digits(64), of_classes))


@pytest.mark.parametrize("implementation", ["fused", "loop"])
@pytest.mark.slow
def test_resnet50(build_run, implementation):
    built = build_run(
        "model=resnet50", "optim=sgd", "data.batch_size=4", f"optim.implementation={implementation}"
    )
    losses, *_ = trained(built)
    model = resnet50(10)
    # Without `fused`: torch's own default, the loop over the parameters on a CPU.
    chosen = {"fused": True} if implementation == "fused" else {}
    optimizer = torch.optim.SGD(model.parameters(), 0.02, 0.9, weight_decay=1e-4, **chosen)
    assert_same(built, losses, model, bare_loop(model, optimizer, digits(32), of_classes))


# torch says once that its CPU library has no projected LSTM.
@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("projection", [0, 16])
def test_lstm_lm(build_run, projection):
    built = build_run(*LM, f"model.projection_size={projection}", "train.clip_norm=0.5")
    losses, *_ = trained(built)
    model = LSTMLanguageModel(50, 24, 24, 2, projection)
    optimizer = torch.optim.SGD(model.parameters(), 1.0, fused=True)
    assert_same(built, losses, model, bare_loop(model, optimizer, tokens(), of_words, clip=0.5))


@pytest.mark.parametrize("parts", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_conv_autoencoder_in_one_or_in_several_micro_batches(build_run, parts):
    built = build_run(*AUTOENCODER, f"train.accumulate={parts}")
    losses, *_ = trained(built)
    model = ConvAutoencoder(32, 32, 8, 1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, fused=True)
    expected = bare_loop(model, optimizer, one_channel(), of_pixels, parts=parts)
    assert_same(built, losses, model, expected)
