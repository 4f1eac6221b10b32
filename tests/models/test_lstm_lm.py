"""The LSTM language model against a plain float64 recurrence, its start and its state."""

import pytest
import torch
from torch.nn import functional as F

from mprun.models.lstm import LSTMLanguageModel

from ..helpers import configured
from .learning import assert_learns

# torch says once per process that oneDNN has no projected LSTM; the default kernel is meant.
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")


def small_model(projection_size=0, dropout=0.0, **kwargs):
    return LSTMLanguageModel(11, 6, 8, 2, projection_size, dropout, **kwargs)


def unrolled(model, tokens):
    """Logits from the textbook equations, one step and one layer at a time, in float64."""
    lstm = model.lstm
    weights = {name: p.detach().double() for name, p in lstm.named_parameters()}
    layer_input = model.embedding.weight.detach().double()[tokens]
    for layer in range(lstm.num_layers):
        batch = tokens.shape[1]
        h = torch.zeros(batch, lstm.proj_size or lstm.hidden_size, dtype=torch.float64)
        c = torch.zeros(batch, lstm.hidden_size, dtype=torch.float64)
        outputs = []
        for x in layer_input:
            gates = x @ weights[f"weight_ih_l{layer}"].T + weights[f"bias_ih_l{layer}"]
            gates += h @ weights[f"weight_hh_l{layer}"].T + weights[f"bias_hh_l{layer}"]
            i, f, g, o = gates.chunk(4, dim=1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            if lstm.proj_size:
                h = h @ weights[f"weight_hr_l{layer}"].T
            outputs.append(h)
        layer_input = torch.stack(outputs)
    return layer_input @ model.output.weight.detach().double().T + model.output.bias.double()


@pytest.mark.parametrize("projection_size", [0, 4])
def test_equals_the_equations(projection_size):
    model = small_model(projection_size, init_range=0.5, forget_bias=1.0)
    tokens = torch.randint(11, (9, 3), generator=torch.Generator().manual_seed(1))
    logits, _ = model(tokens)
    assert logits.shape == (9, 3, 11)
    # FP32 against float64: some 9 steps x 20 roundings of 2^-24 on values of order 1.
    torch.testing.assert_close(logits.double(), unrolled(model, tokens), rtol=0, atol=2e-5)


@pytest.mark.parametrize("projection_size", [0, 4])
def test_carried_state_equals_one_long_unroll(projection_size):
    model = small_model(projection_size).double()
    tokens = torch.randint(11, (12, 3), generator=torch.Generator().manual_seed(2))
    whole, end = model(tokens, model.initial_state(3))
    first, state = model(tokens[:5])
    second, state = model(tokens[5:], state)
    # Same products in the same order in float64; only the split of the input product differs.
    torch.testing.assert_close(torch.cat([first, second]), whole, rtol=0, atol=1e-14)
    for carried, long in zip(state, end, strict=True):
        torch.testing.assert_close(carried, long, rtol=0, atol=1e-14)


@pytest.mark.parametrize("projection_size", [0, 4])
def test_one_pass_reaches_every_parameter(projection_size):
    model = small_model(projection_size, dropout=0.3)
    tokens = torch.randint(11, (7, 64), generator=torch.Generator().manual_seed(3))
    logits, _ = model(tokens)
    F.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 0).flatten()).backward()
    assert_learns(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_initial_state_follows_the_weights(dtype):
    model = small_model(4).to(dtype)
    h, c = model.initial_state(5)
    assert (h.shape, c.shape) == ((2, 5, 4), (2, 5, 8))
    assert h.dtype == c.dtype == dtype
    assert h.count_nonzero() == c.count_nonzero() == 0
    logits, state = model(torch.zeros(2, 5, dtype=torch.int64), (h, c))
    assert logits.dtype == state[0].dtype == state[1].dtype == dtype


def test_initialisation_is_uniform_with_the_forget_bias_added():
    model = LSTMLanguageModel(500, 64, 96, 2, 32, init_range=0.05, forget_bias=1.0)
    for name, parameter in model.named_parameters():
        values = parameter.detach().clone()
        if "bias_ih" in name:
            values[96:192] -= 1.0
        # 2^-24 is what adding 1 to the forget bias may round off.
        assert values.abs().max() <= 0.05 + 2.0**-24, name
        n = values.numel()
        # Uniform on +-r has variance r^2 / 3; five standard errors of mean and of variance
        # (kurtosis 1.8, so sd(variance) = r^2 / 3 * sqrt(0.8 / n)).
        assert abs(values.mean().item()) < 5 * 0.05 / (3 * n) ** 0.5, name
        assert abs(values.var().item() / (0.05**2 / 3) - 1) < 5 * (0.8 / n) ** 0.5, name


def test_dropout_leaves_the_recurrence_alone():
    # One layer: inputs are dropped after the embedding. With the embedding at 0 that changes
    # nothing, so h and c must be those without dropout although the output is dropped.
    model = LSTMLanguageModel(11, 6, 8, 1, dropout=0.5)
    model.embedding.weight.data.zero_()
    tokens = torch.zeros(6, 4, dtype=torch.int64)
    dropped, state = model(tokens)
    model.eval()
    plain, expected = model(tokens)
    torch.testing.assert_close(state, expected, rtol=0, atol=0)
    assert not torch.equal(dropped, plain)


def test_dropout_sits_after_the_embedding_between_layers_and_before_the_output():
    model = small_model(dropout=0.25)
    seen = []
    model.dropout.register_forward_hook(lambda _m, args, _o: seen.append(tuple(args[0].shape)))
    model(torch.zeros(3, 2, dtype=torch.int64))
    assert seen == [(3, 2, 6), (3, 2, 8)]
    assert model.lstm.dropout == 0.25


@pytest.mark.parametrize(
    ("k", "projection", "padded"),
    [(8, 650, [793_472, 8, 664, 656]), (8, 0, [793_472, 8, 664, 0]), (1, 0, [793_470, 1, 657, 0])],
)
def test_sizes_are_padded(k, projection, padded):
    sizes = {"vocab_size": 793_470, "embedding_size": 1, "hidden_size": 657, "num_layers": 1}
    with torch.device("meta"):
        model = configured("lstm_lm", projection_size=projection, pad_to_multiple=k, **sizes)
    lstm = model.lstm
    assert [*model.embedding.weight.shape, lstm.hidden_size, lstm.proj_size] == padded
