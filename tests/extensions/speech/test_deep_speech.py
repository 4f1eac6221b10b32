"""Deep Speech 2: its size, and that padding has no part in a result."""

import pytest
import torch
from torch import nn

from mprun.assembly.data import arguments_of
from mprun.config.compose import compose_config
from mprun.extensions.speech.deep_speech import DeepSpeech2

from ...helpers import configured, refused

SMALL = {"frequencies": 8, "num_symbols": 5, "channels": 3, "frequency_kernels": (5, 3)}
SMALL |= {"time_kernel": 5, "hidden_size": 6, "num_layers": 2, "fully_connected": 7}
BOTH, FORWARD = {"bidirectional": True, "row_convolution": 0}, {"row_convolution": 3}


def test_the_english_network():
    """ "115 M" of the paper's section 4.4, by the sizes of the recipe at 161 bins and 29 symbols.

    Two convolutions without bias, with BatchNorm: 32*451 + 32*32*231 + 128 = 251,104; GRU layers on
    41 rows of 32 channels: 7680*(1312 + 2560) + 2*7680*(2560 + 2560) + 3*2*7680 = 108,426,240; row
    convolution 20*2560 = 51,200; 2560*2560 = 6,553,600; output 2560*29 + 29 = 74,269.
    """
    config = compose_config(["experiment=deep_speech2_librispeech"], files=False).config.model
    with torch.device("meta"):
        network = DeepSpeech2(161, 29, **arguments_of(DeepSpeech2, config))
    assert sum(p.numel() for p in network.parameters()) == 115_356_413


@pytest.mark.parametrize("form", [BOTH, FORWARD])
def test_an_utterance_alone_is_the_utterance_in_a_batch(form):
    network = configured("deep_speech2", **SMALL, **form).eval()
    features, frames = torch.randn(2, 1, 8, 30), torch.tensor([30, 17])
    features[1, ..., 17:] = 0
    together, lengths = network(features, frames)
    alone, length = network(features[1:, ..., :17], frames[1:])
    assert lengths.tolist() == [15, 9] and length.tolist() == [9]
    torch.testing.assert_close(together[:9, 1], alone[:, 0])


@pytest.mark.parametrize("form", [BOTH, FORWARD])
def test_padding_gets_no_gradient_from_an_utterance(form):
    network = configured("deep_speech2", **SMALL, **form).eval()
    features = torch.randn(2, 1, 8, 30, requires_grad=True)
    logits, lengths = network(features, torch.tensor([30, 17]))
    logits[: lengths[1], 1].sum().backward()
    # What a kernel of five frames reads behind the last one is zero in a batch.
    assert not features.grad[1, ..., 19:].any() and features.grad[1, ..., :17].any()


def test_both_directions_are_those_of_a_packed_sequence():
    sizes = SMALL | BOTH | {"num_layers": 1, "fully_connected": 0}
    network = configured("deep_speech2", **sizes).eval()
    features, frames = torch.randn(3, 1, 8, 30), torch.tensor([30, 17, 4])
    logits, lengths = network(features, frames)
    x, kept = features, frames
    for block in network.convolutions:
        x, kept = block(x, kept)
    layer = network.recurrent[0]
    reference = nn.GRU(x.shape[1] * x.shape[2], 6, bidirectional=True)
    own = [*layer.forwards.parameters(), *layer.backwards.parameters()]
    for parameter, value in zip(reference.parameters(), own, strict=True):
        parameter.data.copy_(value)
    packed = nn.utils.rnn.pack_padded_sequence(x.flatten(1, 2).permute(2, 0, 1), kept)
    y, _ = nn.utils.rnn.pad_packed_sequence(reference(packed)[0])
    expected = network.output(y[..., :6] + y[..., 6:])
    assert kept.tolist() == lengths.tolist()
    torch.testing.assert_close(logits, expected)


def test_the_row_convolution_looks_ahead_by_hand():
    network = configured("deep_speech2", **SMALL, **FORWARD)
    layer = network.row_convolution
    x, expected = torch.randn(7, 2, 6), torch.zeros(7, 2, 6)
    weight = layer.convolution.weight[:, 0]  # [units, frames]
    for t in range(7):
        for ahead in range(min(3, 7 - t)):
            expected[t] += weight[:, ahead] * x[t + ahead]
    torch.testing.assert_close(layer(x), expected.clamp(0, 20))


def test_both_directions_need_no_look_ahead(capsys):
    command = "model=deep_speech2", "model.bidirectional=true", "model.row_convolution=20"
    refused(capsys, *command, says="model.row_convolution=20: looks ahead for layers that do not")
