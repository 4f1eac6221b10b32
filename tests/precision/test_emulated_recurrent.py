import copy
import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mprun.precision.emulation import HalfEmulation
from mprun.precision.recurrent import own_recurrent

from .emulated import HALVES, assert_within, relative


def state_shapes(rnn, batch):
    """Shapes of h0 and, for an LSTM, c0."""
    layers = rnn.num_layers * (2 if rnn.bidirectional else 1)
    shapes = [(layers, batch, getattr(rnn, "proj_size", 0) or rnn.hidden_size)]
    if isinstance(rnn, nn.LSTM):
        shapes.append((layers, batch, rnn.hidden_size))
    return shapes


def zeroed(rnn):
    for parameter in rnn.parameters():
        nn.init.zeros_(parameter)
    return rnn


def train(rnn, x, states, weights):
    """One backward pass from y, h_n and c_n together: the results, then every gradient."""
    x = x.detach().clone().requires_grad_()
    states = [s.detach().clone().requires_grad_() for s in states]
    rnn.zero_grad()
    y, last = rnn(x, tuple(states) if isinstance(rnn, nn.LSTM) else states[0])
    outputs = [y, *last] if isinstance(rnn, nn.LSTM) else [y, last]
    sum((o.double() * w).sum() for o, w in zip(outputs, weights, strict=True)).backward()
    gradients = [x.grad, *(s.grad for s in states), *(p.grad for p in rnn.parameters())]
    return [o.detach() for o in outputs], gradients


def compare(rnn, x, dtype, bound, autocast=False, of_gradients=None):
    """Checks results and gradients against float64 on the same 16-bit weights and inputs.

    bound, of_gradients (default: the same): in roundings.
    """
    half = copy.deepcopy(rnn).to(dtype)
    reference = copy.deepcopy(half).double()
    x = x.to(dtype)
    states = [(torch.randn(s) * 0.5).to(dtype) for s in state_shapes(rnn, x.shape[1])]
    if rnn.batch_first:
        x = x.transpose(0, 1).contiguous()
    shapes = [x.shape[:2] + (states[0].shape[-1] * (1 + rnn.bidirectional),)]
    shapes += [s.shape for s in states]
    weights = [torch.randn(s).to(dtype).double() for s in shapes]
    expected = train(reference, x.double(), [s.double() for s in states], weights)
    emulation = HalfEmulation(dtype)
    with emulation, torch.autocast("cpu", dtype, enabled=autocast):
        model = half.float() if autocast else half
        wide = torch.float32 if autocast else dtype
        actual = train(model, x.to(wide), [s.to(wide) for s in states], weights)
    assert all(o.dtype is dtype for o in actual[0])
    bounds = bound, of_gradients or bound
    for values, references, most in zip(actual, expected, bounds, strict=True):
        for value, reference_value in zip(values, references, strict=True):
            assert_within(most, value, reference_value, dtype)
    return emulation


@pytest.mark.few(8)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"autocast": True}], ids=str)
@pytest.mark.parametrize("projection", [0, 48])
def test_error_is_at_most_four_roundings(projection, options, dtype):
    autocast = options.get("autocast", False)  # of FP32 weights
    rnn = nn.LSTM(40, 64, 2, bias=options.get("bias", True), proj_size=projection)
    emulation = compare(rnn, torch.randn(20, 8, 40), dtype, bound=4, autocast=autocast)
    assert emulation.rerouted == {("lstm", "forward"): 2, ("lstm", "backward"): 2}


@pytest.mark.parametrize("options", [{"batch_first": True}, {"bidirectional": True}])
@pytest.mark.parametrize("projection", [0, 16])
def test_other_layouts(projection, options):
    rnn = nn.LSTM(24, 32, 2, proj_size=projection, **options)
    emulation = compare(rnn, torch.randn(12, 5, 24), torch.float16, bound=4)
    layers = 4 if rnn.bidirectional else 2
    assert emulation.rerouted == {("lstm", "forward"): layers, ("lstm", "backward"): layers}


@pytest.mark.parametrize("projection", [0, 1])
def test_every_state_is_stored_in_half(projection):
    # Two equal units, worked by hand in float64 with a rounding at each store. Gates i, f, o are
    # saturated at sigmoid(12) = 1 - 6.1e-6, so c grows by tanh(0.3) a step. The projection triples
    # the stored h of the first unit.
    rnn = zeroed(nn.LSTM(1, 2, proj_size=projection))
    with torch.no_grad():
        rnn.bias_ih_l0.copy_(torch.tensor([12.0, 12.0, 12.0, 12.0, 0.0, 0.0, 12.0, 12.0]))
        rnn.weight_ih_l0[4:6, 0] = 1.0
        if projection:
            rnn.weight_hr_l0[0, 0] = 3.0
    rnn.half()
    x = torch.full((30, 1, 1), 0.3, dtype=torch.float16)
    with torch.no_grad(), HalfEmulation():
        y, (h, c) = rnn(x)
    gate, update = 1 / (1 + math.exp(-12.0)), math.tanh(float(x[0, 0, 0]))

    def rounded(value):
        return float(torch.tensor(value, dtype=torch.float64).half())

    cell, expected = 0.0, []
    for _ in range(30):
        cell = rounded(gate * cell + gate * update)
        raw = rounded(gate * math.tanh(cell))
        expected.append(rounded(3 * raw) if projection else raw)
    assert c.flatten().tolist() == [cell, cell]
    assert y[:, 0, 0].tolist() == expected
    assert float(h[0, 0, 0]) == expected[-1]


def test_many_steps_of_ones_in_one_batch_are_exact():
    # One step, zero weights, 8192 sequences: each adds 0.5 * 0.5 * 1 to the candidate's gradient.
    rnn = zeroed(nn.LSTM(1, 1).half())
    with HalfEmulation():
        y, _ = rnn(torch.ones(1, 8192, 1, dtype=torch.float16))
        y.backward(torch.ones_like(y))
    assert rnn.weight_ih_l0.grad.flatten().tolist() == [0.0, 0.0, 2048.0, 0.0]
    assert rnn.bias_hh_l0.grad.tolist() == [0.0, 0.0, 2048.0, 0.0]


def test_evaluation_equals_training_and_keeps_nothing():
    rnn = nn.LSTM(8, 16, 2, dropout=0.5).half().eval()
    x = torch.randn(6, 3, 8).half()
    with HalfEmulation() as emulation:
        y, _ = rnn(x)
        with torch.no_grad():
            evaluated, _ = rnn(x)
    assert y.requires_grad and not evaluated.requires_grad
    assert torch.equal(y, evaluated)
    assert emulation.rerouted == {("lstm", "forward"): 4}


def test_dropout_between_layers():
    # Dropping everything leaves the second layer with zeros, whatever the first one does.
    rnn = nn.LSTM(8, 16, 2, dropout=1.0).half()
    second = nn.LSTM(16, 16).half()
    second.load_state_dict({k: getattr(rnn, k.replace("l0", "l1")) for k in second.state_dict()})
    with HalfEmulation():
        y, _ = rnn(torch.randn(5, 3, 8).half())
        expected, _ = second(torch.zeros(5, 3, 16, dtype=torch.float16))
    assert torch.equal(y, expected)
    # Half dropped: survivors are doubled, exactly, so two draws differ and the mean stays.
    wide, x = nn.LSTM(8, 16, 2, dropout=0.5).half(), torch.randn(5, 3, 8).half()
    with HalfEmulation():
        assert not torch.equal(wide(x)[0], wide(x)[0])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_gradient_is_the_same_if_nothing_else_gets_one(kind):
    """An input, a state or a parameter gets it, and all others are frozen."""
    rnn = kind(8, 16, **({"proj_size": 8} if kind is nn.LSTM else {}))
    compare(rnn, torch.randn(5, 3, 8), torch.float16, bound=6)  # a plain layer damps no rounding
    rnn = rnn.half()
    x, states = torch.randn(5, 3, 8).half(), [torch.randn(s).half() for s in state_shapes(rnn, 3)]
    operands = [x, *states, *rnn.parameters()]

    def gradients(chosen):
        for place, own in enumerate(operands):
            own.grad = None
            own.requires_grad_(place in chosen)
        with HalfEmulation():
            rnn(x, tuple(states) if kind is nn.LSTM else states[0])[0].float().sum().backward()
        return [own.grad for own in operands]

    every = gradients(range(len(operands)))
    assert all(gradient.any() for gradient in every)
    for place, expected in enumerate(every):
        alone = gradients([place])
        assert torch.equal(alone.pop(place), expected)
        assert all(gradient is None for gradient in alone)


def test_weights_shared_by_two_calls_add_their_gradients():
    rnn, x = nn.LSTM(8, 16).half(), torch.randn(5, 3, 8).half()
    single = []
    with HalfEmulation():
        for part in (x, 2 * x):
            rnn.zero_grad()
            rnn(part)[0].float().sum().backward()
            single.append(rnn.weight_ih_l0.grad.clone())
        rnn.zero_grad()
        (rnn(x)[0].float().sum() + rnn(2 * x)[0].float().sum()).backward()
    assert torch.equal(rnn.weight_ih_l0.grad, single[0] + single[1])


def test_unbatched_input():
    rnn, x = nn.LSTM(8, 16).half(), torch.randn(5, 8).half()
    with HalfEmulation():
        y, (h, _) = rnn(x)
        batched, _ = rnn(x[:, None])
    assert h.shape == (1, 16)
    assert torch.equal(y, batched[:, 0])


def test_second_derivative_raises():
    rnn, x = nn.LSTM(8, 16).half(), torch.randn(5, 2, 8).half().requires_grad_()
    with HalfEmulation():
        y, _ = rnn(x)
        with pytest.raises(RuntimeError, match="second derivative"):
            torch.autograd.grad(y.sum(), x, create_graph=True)


def test_packed_sequence_takes_the_stepwise_path():
    rnn, x = nn.LSTM(8, 16).half(), torch.randn(6, 3, 8).half()
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([6, 4, 2]))
    with HalfEmulation() as emulation:
        y, lengths = nn.utils.rnn.pad_packed_sequence(rnn(packed)[0])
        y.float().sum().backward()
    expected = copy.deepcopy(rnn).double()(x.double())[0]
    assert emulation.rerouted["addmm", "forward"] > 0 and emulation.rerouted["mm", "backward"] > 0
    for n, length in enumerate(lengths.tolist()):
        # Six stored values a step at most six steps deep, damped by the gates: four roundings.
        assert relative(y[:length, n], expected[:length, n].detach()) <= 4 * 2.0**-11


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", ["GRU", "tanh", "relu"])
@pytest.mark.few(15)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"bias": False}, {"bidirectional": True, "num_layers": 2, "batch_first": True}]
)
def test_gru_and_plain_rnn_are_off_by_few_roundings(kind, options, autocast, dtype):
    # A plain layer's states pass on their rounding undamped by gates.
    rnn = nn.GRU(24, 32, **options)
    if kind != "GRU":
        rnn = nn.RNN(24, 32, nonlinearity=kind, **options)
    bound = (4 if kind == "GRU" else 6) * rnn.num_layers
    # A ReLU that so many roundings carry to the other side of 0 has a gradient that is off by all
    # of it, and so have those that it feeds: twice the root of their share. A rounding is eps / 4.
    root = 2 * math.sqrt(4 * bound / torch.finfo(dtype).eps) if kind == "relu" else None
    emulation = compare(rnn, torch.randn(20, 5, 24), dtype, bound, autocast, root)
    name, layers = "gru" if kind == "GRU" else "rnn", 4 if rnn.bidirectional else 1
    assert emulation.rerouted == {(name, "forward"): layers, (name, "backward"): layers}


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_weight_gradient_over_4096_time_steps_is_one_sum(kind):
    # A plain unit whose gradient is the same in every step: h = tanh(0) = 0, dh = 1, so that the
    # input's weight gets slope times the number of steps. Added up in half it ends at 2048 slopes.
    rnn = zeroed(kind(1, 1).half())
    with HalfEmulation():
        outputs, _ = rnn(torch.ones(4096, 1, 1).half())
        outputs.sum().backward()
    grown = rnn.weight_ih_l0.grad.double().abs().max()
    # RNN: slope 1. GRU: n' (1 - z) = 0.5, and h passes on half of its gradient: sum 1. LSTM: o g'
    # i = 0.25, and c passes on half: 0.5. In the last steps less.
    slope = {nn.LSTM: 0.5, nn.GRU: 1.0, nn.RNN: 1.0}[kind]
    assert abs(grown / (4096 * slope) - 1) < 2.0**-10


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell])
def test_cells(kind, autocast):
    cell = kind(24, 32).half()
    x, h, c = torch.randn(7, 24).half(), torch.randn(7, 32).half(), torch.randn(7, 32).half()
    double = (h.double(), c.double())
    reference = copy.deepcopy(cell).double()
    if autocast:
        cell.float()
    with HalfEmulation() as emulation, torch.autocast("cpu", torch.float16, enabled=autocast):
        out = cell(x, (h, c) if kind is nn.LSTMCell else h)
        first = out[0] if isinstance(out, tuple) else out
        first.float().sum().backward()
    expected = reference(x.double(), double if kind is nn.LSTMCell else double[0])
    expected = expected[0] if isinstance(expected, tuple) else expected
    expected.sum().backward()
    assert emulation.rerouted["addmm", "forward"] + emulation.rerouted["mm", "forward"] == 2
    assert relative(first, expected.detach()) <= 8 * 2.0**-11
    for p, q in zip(cell.parameters(), reference.parameters(), strict=True):
        assert relative(p.grad, q.grad) <= 8 * 2.0**-11


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_layer_that_is_computed_again_in_backward_is_emulated_there_too(kind, autocast):
    """torch.utils.checkpoint in both of its forms, and a layer as a prepared model has it."""
    rnn = own_recurrent(kind(8, 8))
    rnn = rnn if autocast else rnn.half()
    x, gradients = torch.randn(3, 2, 8).to(rnn.weight_ih_l0.dtype), []
    for how in ({}, {"use_reentrant": True}, {"use_reentrant": False}):
        rnn.zero_grad()
        own = x.clone().requires_grad_()
        with HalfEmulation() as emulation:
            with torch.autocast("cpu", torch.float16, enabled=autocast):
                y = checkpoint(lambda t: rnn(t)[0], own, **how) if how else rnn(own)[0]
            y.float().sum().backward()
        gradients.append([own.grad, *(p.grad.clone() for p in rnn.parameters())])
        name = {nn.LSTM: "lstm", nn.GRU: "gru", nn.RNN: "rnn"}[kind]
        assert emulation.rerouted == {(name, "forward"): (2 if how else 1), (name, "backward"): 1}
    for again in gradients[1:]:
        assert all(torch.equal(a, b) for a, b in zip(again, gradients[0], strict=True))
