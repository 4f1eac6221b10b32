"""The translation network: against packed sequences, under padding, in half, word by word."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from mprun.assembly.data import arguments_of
from mprun.config.compose import compose_config
from mprun.extensions.translation.seq2seq import Attention, Seq2Seq, reversed_order
from mprun.models import reversal

from ...helpers import configured

WORDS = 11
VOCABULARIES = {"source_vocab_size": WORDS, "target_vocab_size": 13}


@pytest.fixture
def network():
    sizes = {"embedding_size": 6, "hidden_size": 5, "num_layers": 2, "init_range": 0.5}
    return configured("seq2seq", **VOCABULARIES, **sizes).eval()


SOURCE = torch.tensor([[4, 5, 6, 2, 0, 0], [7, 2, 0, 0, 0, 0], [8, 9, 10, 4, 5, 2]])
INPUTS = torch.tensor([[1, 4, 5], [1, 6, 2], [1, 12, 11]])


def test_words_come_in_reverse_within_each_row():
    found = SOURCE.gather(1, reversed_order(SOURCE == 0)).tolist()
    assert found == [[2, 6, 5, 4, 0, 0], [2, 7, 0, 0, 0, 0], [2, 5, 4, 10, 9, 8]]


def test_the_encoder_is_torch_s_bidirectional_layer_over_packed_sequences(network):
    packed_layer = nn.LSTM(6, 5, bidirectional=True, batch_first=True)
    for name, parameter in network.forwards.named_parameters():
        getattr(packed_layer, name).data.copy_(parameter)
        reverse = dict(network.backwards.named_parameters())[name]
        getattr(packed_layer, f"{name}_reverse").data.copy_(reverse)
    lengths = (SOURCE != 0).sum(1)
    with torch.no_grad():
        embedded = network.source_embedding(SOURCE)
        packed = pack_padded_sequence(embedded, lengths, batch_first=True, enforce_sorted=False)
        outputs, (h, _) = packed_layer(packed)
        both, _ = pad_packed_sequence(outputs, batch_first=True)
        memory, _ = network.upper(both.transpose(0, 1))
        found = network.encode(SOURCE)
    real = SOURCE != 0
    # FP32 sums of 6 and 5 products in another order.
    torch.testing.assert_close(found.memory[real], memory.transpose(0, 1)[real], rtol=0, atol=1e-6)
    start = torch.tanh(network.bridge(h[1])).view(3, 2, 5).transpose(0, 1)
    torch.testing.assert_close(found.state[0], start, rtol=0, atol=1e-6)
    assert not found.state[1].any()


def test_padding_changes_neither_outputs_nor_gradients(network):
    wider = torch.cat([SOURCE, torch.zeros(3, 4, dtype=torch.int64)], 1)
    gradients = []
    for source in (SOURCE, wider):
        network.zero_grad()
        logits = network(source, INPUTS)
        logits.square().sum().backward()
        gradients.append([logits.detach(), *(p.grad.clone() for p in network.parameters())])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert not network.source_embedding.weight.grad[0].any()


def test_the_gradient_is_that_of_gather(network, monkeypatch):
    factors = torch.randn(3, 3)

    def gradients():
        network.zero_grad()
        (network(SOURCE, INPUTS)[..., 0] * factors).sum().backward()
        return [p.grad.clone() for p in network.parameters()]

    own = gradients()
    gathered = lambda v, o: v.gather(0, o[..., None].expand_as(v))  # noqa: E731
    monkeypatch.setattr(reversal._Reordered, "apply", gathered)
    assert all(map(torch.equal, own, gradients()))


def test_attention_by_hand():
    attention = Attention(2)
    # The attended half and the query half are added.
    attention.combine.weight.data = torch.tensor([[1.0, 0, 1, 0], [0, 1, 0, 1]])
    keys = torch.tensor([[[0.0, 0], [3, 0], [9, 9]]])
    memory = torch.tensor([[[0.1, 0.2], [0.3, 0.4], [7.0, 7.0]]])
    padding = torch.tensor([[[False, False, True]]])
    found = attention(torch.tensor([[[1.0, 0.0]]]), keys, memory, padding)
    share = torch.tensor(3.0).sigmoid()
    expected = torch.tanh(torch.stack([1 + 0.1 + 0.2 * share, 0.2 + 0.2 * share]))
    torch.testing.assert_close(found[0, 0], expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_in_16_bits_padding_has_no_weight_and_nothing_is_infinite(network, dtype):
    seen = []
    half = network.attention.to(dtype)
    queries = torch.full((1, 1, 5), -100.0, dtype=dtype)
    keys = torch.full((1, 3, 5), 100.0, dtype=dtype)  # scores of -50,000
    memory = torch.tensor([[[1.0], [3.0], [500.0]]]).expand(1, 3, 5).to(dtype)
    half.combine.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    found = half(queries, keys, memory, torch.tensor([[[False, False, True]]]))
    assert found.isfinite().all() and seen[0][0, 0, :5].tolist() == [2.0] * 5


def test_greedy_words_are_the_most_likely_ones_after_those_before(network):
    found = network.translate(SOURCE, 7, 1, 2)
    assert found.shape == (3, 7)
    inputs = torch.cat([torch.ones(3, 1, dtype=torch.int64), found[:, :-1]], 1)
    with torch.no_grad():
        best = network(SOURCE, inputs).argmax(-1)
    ended = torch.zeros(3, dtype=torch.bool)
    for place in range(7):
        assert torch.equal(found[:, place], torch.where(ended, 0, best[:, place]))
        ended |= found[:, place] == 2


def test_what_follows_the_end_is_padding(network):
    network.output.bias.data[2] = 100.0
    assert network.translate(SOURCE, 3, 1, 2).tolist() == [[2, 0, 0]] * 3


def test_one_layer_and_dropout():
    sizes = {"embedding_size": 4, "hidden_size": 3, "num_layers": 1, "dropout": 0.5}
    network = configured("seq2seq", **VOCABULARIES, **sizes)
    one, other = network(SOURCE, INPUTS), network(SOURCE, INPUTS)
    assert one.shape == (3, 3, 13) and not torch.equal(one, other)
    assert torch.equal(network.eval()(SOURCE, INPUTS), network(SOURCE, INPUTS))


@pytest.mark.parametrize(
    ("name", "layers", "count"),
    [("seq2seq_3x1024", 3, 253_626_432), ("seq2seq_5x1024", 5, 289_312_832)],
)
def test_counts_of_the_paper_s_sizes(name, layers, count):
    config = compose_config([f"model={name}"], files=False).config.model
    words = {"source_vocab_size": 100_000, "target_vocab_size": 40_000}
    with torch.device("meta"):
        model = Seq2Seq(**arguments_of(Seq2Seq, config) | words)
    h = 1024
    # Two weights and, in torch, two bias vectors; the second layer of the encoder reads both
    # directions of the first.
    lstm = 8 * h * h + 8 * h
    encoder = 2 * lstm + (layers - 1) * lstm + 4 * h * h
    # Keys and the combination of what is attended to and the query; the decoder's start.
    attention, bridge = h * h + 2 * h * h, layers * (h * h + h)
    tables = 100_000 * h + 40_000 * h + 40_000 * h + 40_000
    # Ours: the paper gives no number.
    assert count == encoder + layers * lstm + attention + bridge + tables
    assert sum(p.numel() for p in model.parameters()) == count
