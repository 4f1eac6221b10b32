"""precision=amp equals torch.autocast with torch.amp.GradScaler, bit for bit.

Both sides run inside the same CPU emulation, because a CPU has no half LSTM and its own half
convolutions are slow. Steps that overflow are included where a model has no BatchNorm: there the
two differ on purpose (torch lets a skipped step move the running statistics).
"""

import pytest
import torch

from mprun.models.classifiers import resnet50
from mprun.models.dcgan import ConvAutoencoder
from mprun.models.lstm import LSTMLanguageModel

from .test_fp32_equals_bare_loop import (
    AUTOENCODER,
    LM,
    assert_same,
    bare_loop,
    digits,
    of_classes,
    of_pixels,
    of_words,
    one_channel,
    tokens,
    trained,
)


def scaling(init, growth_interval):
    """The same scale as overrides of a run and as torch's class."""
    words = ["precision=amp", f"scaler.init_scale={init}"]
    words.append(f"scaler.growth_interval={growth_interval}")
    return words, torch.amp.GradScaler("cpu", init_scale=init, growth_interval=growth_interval)


@pytest.mark.slow
def test_resnet50(build_run):
    words, scaler = scaling(64.0, 2)
    words += ["optim=sgd", "data.batch_size=8", "train.clip_norm=5"]
    built = build_run("model=resnet50", *words)
    losses, scales, found_inf = trained(built, 4)
    model = resnet50(10)
    optimizer = torch.optim.SGD(model.parameters(), 0.02, 0.9, weight_decay=1e-4, fused=True)
    expected = bare_loop(model, optimizer, digits(32, 8), of_classes, 4, scaler, clip=5.0)
    assert not found_inf.any()
    assert scales.tolist() == expected[1] == [64.0, 64.0, 128.0, 128.0]
    assert_same(built, losses, model, expected)


def test_lstm_lm(build_run):
    words, scaler = scaling(1024.0, 2)
    built = build_run(*LM, *words, "train.clip_norm=null")
    losses, scales, found_inf = trained(built)
    model = LSTMLanguageModel(50, 24, 24, 2)
    optimizer = torch.optim.SGD(model.parameters(), 1.0, fused=True)
    expected = bare_loop(model, optimizer, tokens(), of_words, scaler=scaler)
    assert not found_inf.any()
    assert scales.tolist() == expected[1] == [1024, 1024, 2048, 2048, 4096, 4096, 8192]
    assert_same(built, losses, model, expected)


def test_skipped_steps_too(build_run):
    words, scaler = scaling(2.0**24, 3)
    built = build_run(*AUTOENCODER, *words, "data.batch_size=2")
    losses, scales, found_inf = trained(built, 12)
    model = ConvAutoencoder(32, 32, 8, 1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, fused=True)
    expected = bare_loop(model, optimizer, one_channel(2), of_pixels, 12, scaler)
    assert 0 < found_inf.sum() < 12
    assert scales.tolist() == expected[1]
    assert_same(built, losses, model, expected)
