"""Networks and data of the user's own, modes and settings: whatever runs can be counted."""

import sys
from dataclasses import replace

import pytest
import torch

from mprun.config.compose import compose_config
from mprun.errors import BadInput
from mprun.extensions.bench.roofline import FORMATS
from mprun.extensions.bench.roofline.count import count
from mprun.extensions.bench.roofline.shape_only import shape_source
from mprun.precision import get_policy
from mprun.precision.philox import micro_batches

from ...helpers import raises_line
from ...shipped import MODES

NETWORKS = """
import torch
from torch import nn

from mprun.data.dataset_source import DatasetSource


class Small(nn.Module):
    def __init__(self, classes, looks):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 16, 3), nn.GroupNorm(4, 16)
        self.drop, self.gru, self.out = nn.Dropout(0.1), nn.GRU(16, 16), nn.Linear(16, classes)
        self.looks = looks

    def forward(self, x):
        y = self.drop(torch.relu(self.norm(self.conv(x)))).flatten(2).permute(2, 0, 1)
        if self.looks and y.sum().item() > 0:
            y = y * 2
        return self.out(self.gru(y)[0].mean(0))


class Words(nn.Module):
    def __init__(self, words):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32)
        self.embed, self.layers = nn.Embedding(words, 16), nn.TransformerEncoder(layer, 2)
        self.out = nn.Linear(16, words)

    def forward(self, tokens, state):
        return self.out(self.layers(self.embed(tokens))), ()


def images(data, looks=False):
    return Small(data.num_classes, looks)


def words(data):
    return Words(data.vocab_size)


def source(batch_size, seed, device):
    some = torch.utils.data.TensorDataset(torch.rand(64, 3, 12, 12), torch.arange(64) % 5)
    return DatasetSource(
        some, some, batch_size=batch_size, seed=seed, device=device, num_classes=5
    )
"""


@pytest.fixture
def networks(tmp_path, monkeypatch):
    (tmp_path / "counted_networks.py").write_text(NETWORKS)
    monkeypatch.syspath_prepend(tmp_path)
    yield ("model=custom", "model.factory=counted_networks:images")
    sys.modules.pop("counted_networks", None)


@pytest.mark.slow
def test_own_network_and_own_data(networks):
    own = ("data=custom", "data.factory=counted_networks:source", "data.batch_size=8")
    found = count((*networks, *own), "amp")
    assert found.samples == 8
    # Convolution, GRU and linear layer, each with its weights once forward and twice backward; the
    # first layers of each have no gradient of the input to make, but the GRU's input has.
    places = 10 * 10
    conv, gru, out = places * 16 * 27, places * 2 * 16 * 48, 16 * 5
    assert found.flops == 2 * 8 * (2 * conv + 3 * gru + 3 * out)


@pytest.mark.slow
def test_own_transformer(networks):
    overrides = ("model=custom", "model.factory=counted_networks:words", "data=synthetic_tokens")
    found = count((*overrides, "model.task=language_model"), "fp16_master")
    assert found.flops > 0 and {row.phase for row in found.rows} >= {"forward", "backward"}


def test_own_network_that_looks_at_values_is_refused_in_one_line(networks):
    looking = (*networks, "++model.options.looks=true", "data=synthetic_images")
    with raises_line(
        BadInput, "values of tensors, so its operations cannot be counted", "counted_networks.py"
    ):
        count(looking, "fp32")


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_every_mode(mode):
    policy = get_policy(mode)
    # Without FP8 products: with them the largest layer has none of its own, an LSTM or the output.
    plain = replace(policy, matmul=None).formats
    wanted = FORMATS[str(plain[0])] if plain else {"ieee": "fp32", "tf32": "tf32"}[policy.fp32_math]
    small = ("data=synthetic_tokens", "data.batch_size=4")
    if policy.matmul is None:
        found = count(("model=lstm_lm", *small), mode)
        recurrent = [row for row in found.rows if row.kind.startswith("recurrent product")]
        assert {row.form for row in recurrent} == {wanted}
        return
    found = count(("model=gpt", *small), mode)
    forms = {row.kind: row.form for row in found.rows if row.flops}
    # No kernel multiplies codes of INT8; their FP64 has no ceiling of its own.
    product = {"int8 product": "fp32"} if "int8" in mode else {"fp8 product": "fp8"}
    assert forms == product | {
        "matrix product": wanted,  # the output layer's
        "attention": wanted,
        "attention backward": wanted,
    }


@pytest.mark.slow
def test_a_mode_with_random_bits_is_counted_again():
    """The number of the micro-batch, which lies on the device, has no value in a count."""
    small = ("model=gpt", "model.num_layers=1", "data=synthetic_tokens", "data.batch_size=1")
    with micro_batches.apart():  # as in a process of its own
        assert count(small, "nvfp4").flops == count(small, "nvfp4").flops


@pytest.mark.parametrize(
    "settings",
    [
        ("optim=adam", "optim.implementation=foreach", "train.clip_norm=1"),
        ("optim=adamw", "scaler=logmax", "optim.average_decay=0.99"),
        ("optim=adagrad", "train.accumulate=2"),
        ("optim.implementation=loop", "precision.overrides.output=fp32"),
    ],
)
@pytest.mark.few(1)
def test_settings_of_the_update(settings):
    small = ("model=lstm_lm", "data=synthetic_tokens", "data.batch_size=4")
    found = count((*small, *settings), "fp16_master_scaled")
    assert found.bytes(("update",)) > 18 * found.dense


@pytest.mark.slow
def test_channels_last_counts_the_same():
    small = ("model=dcgan", "data.batch_size=4")
    plain, last = (
        count((*small, f"train.channels_last={v}"), "fp16_master") for v in ("off", "on")
    )
    assert plain.flops == last.flops
    assert plain.bytes(("forward", "backward")) == last.bytes(("forward", "backward"))


def test_the_random_state_is_left_alone():
    torch.manual_seed(3)
    wanted = torch.rand(4)
    torch.manual_seed(3)
    count(("model=lstm_lm", "data=synthetic_tokens", "data.batch_size=4"), "fp32")
    assert torch.equal(torch.rand(4), wanted)


def test_one_billion_word_has_its_published_vocabulary():
    config = compose_config(["model=biglstm", "data=lm1b"], files=False).config
    assert shape_source(config).vocab_size == 793_472
