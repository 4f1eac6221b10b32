"""Parameter counts against published ones, counted on the meta device."""

from functools import partial

import pytest
import torch

from mprun.assembly.data import arguments_of
from mprun.config.compose import compose_config
from mprun.models.classifiers import VGG16, AlexNet2012, PreActivationResNet50, alexnet, resnet50
from mprun.models.dcgan import Discriminator, Generator
from mprun.models.gpt import GPT
from mprun.models.gpt_moe import GPTMoE
from mprun.models.inception import googlenet, inception_v2, inception_v3
from mprun.models.lstm import LSTMLanguageModel


def parameters(module):
    return sum(p.numel() for p in module.parameters())


def described(kind, *words, **sizes):
    """The network that a configuration describes, for data of these sizes."""
    config = compose_config(words, files=False).config.model
    with torch.device("meta"):
        return kind(**arguments_of(kind, config) | sizes)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("build", "published"),
    [
        (alexnet, 61_100_840),  # torchvision's documentation
        (AlexNet2012, 60_965_224),  # Caffe's bvlc_alexnet
        (resnet50, 25_557_032),  # torchvision's documentation
        # v1.5 without the norms of its shortcuts, 2 x (256 + 512 + 1024 + 2048); the other norms
        # stand elsewhere and are as large. fb.resnet.torch has as many.
        (PreActivationResNet50, 25_549_352),
        (VGG16, 138_357_544),  # torchvision's documentation
        (partial(googlenet, aux_weight=0.0), 6_998_552),  # Caffe's bvlc_googlenet, deployed
        (googlenet, 13_378_280),  # and trained
        (inception_v2, 11_194_984),
        (partial(inception_v3, aux_weight=0.0), 23_834_568),
        (inception_v3, 27_161_264),  # torchvision's documentation
        (Generator, 3_576_704),  # PyTorch examples, nc=3
        (Discriminator, 2_765_568),
    ],
)
def test_published_counts(build, published):
    with torch.device("meta"):
        assert parameters(build()) == published


def test_dcgan_128_px_adds_one_stage_of_standard_width():
    with torch.device("meta"):
        generator, discriminator = Generator(128), Discriminator(128)
    # One more stage: 1024 filters at 4x4, so the code meets 1024 instead of 512 filters, a
    # 1024 x 512 x 16 kernel comes on top, and one BatchNorm of 1024.
    assert parameters(generator) == 3_576_704 + 100 * 512 * 16 + 1024 * 512 * 16 + 2 * 1024
    # The last layer reads 1024 filters instead of 512.
    assert parameters(discriminator) == 2_765_568 + 512 * 16 + 1024 * 512 * 16 + 2 * 1024


@pytest.mark.parametrize(
    ("name", "h", "dropout"),
    [("lstm_lm", 200, 0.0), ("lstm_lm_medium", 650, 0.5), ("lstm_lm_large", 1500, 0.65)],
)
def test_zaremba_sizes(name, h, dropout):
    model = described(LSTMLanguageModel, f"model={name}", vocab_size=10_000)
    assert model.dropout.p == dropout
    # Per layer 4 h (2 h) weights and, in torch, two bias vectors of 4 h; embedding and output
    # 10,000 x h each, output bias 10,000. For large: 66 M, for medium: 20 M, as published.
    assert parameters(model) == 2 * (8 * h * h + 8 * h) + 2 * 10_000 * h + 10_000


def test_biglstm():
    model = described(LSTMLanguageModel, "model=biglstm", vocab_size=793_472)
    assert model.dropout.p == 0.1
    # One layer with one bias per gate: 4*8192*(1024+1024) + 4*8192 + 8192*1024 = 75,530,240;
    # torch's second bias vector adds 32,768 per layer.
    assert parameters(model.lstm) == 2 * 75_530_240 + 2 * 32_768
    assert parameters(model.embedding) == 793_472 * 1024
    assert parameters(model.output) == 793_472 * 1024 + 793_472
    assert round(parameters(model) / 1e9, 3) == 1.777


@pytest.mark.parametrize(
    ("words", "count"),
    [
        # OpenAI's, with 50,257 words.
        (["model.bias=true"], 124_439_808),
        # Without biases: 12 x (3 + 1 + 4 + 4) x 768 of them and 25 x 768 of LayerNorm.
        ([], 124_439_808 - 12 * 12 * 768 + 12 * 3 * 768 - 25 * 768),
    ],
)
def test_gpt_2(words, count):
    assert parameters(described(GPT, "model=gpt2", *words, vocab_size=50_257)) == count


@pytest.mark.parametrize(
    ("kind", "option", "rest"),
    [
        (GPT, "gpt_llama", 3 * 128 * 384),  # 8/3 x 128 = 341.3, up to 384
        # Two norms of heads; 8 experts of three matrices, and the router.
        (GPTMoE, "gpt_moe", 2 * 32 + 8 * 3 * 128 * 192 + 8 * 128),
    ],
)
def test_llama_s_parts_have_the_counts_of_their_shapes(kind, option, rest):
    network = described(kind, f"model={option}", vocab_size=104, context_length=64)
    # Queries 128, two heads of keys and of values of 32; the output of attention, two norms.
    block = 128 * (128 + 2 * 64) + 128 * 128 + 2 * 128 + rest
    assert parameters(network) == 104 * 128 + 2 * block + 128
