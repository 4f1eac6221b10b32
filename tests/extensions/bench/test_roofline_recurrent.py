"""Recurrent layers: the formulas by hand, and FLOPs against torch's decomposed layers."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from mprun.extensions.bench.roofline.count import Counter
from mprun.extensions.bench.roofline.cuda_kernels import cuda_kernels
from mprun.extensions.bench.roofline.shape_only import SavedTensors, weightless

T, B, D, H = 5, 3, 8, 16


def state_of(layer, dtype=torch.float32):
    """An initial state that needs gradients: cuDNN computes them in any case."""
    rows = layer.num_layers * (2 if layer.bidirectional else 1)
    h = torch.zeros(rows, B, layer.proj_size or H, dtype=dtype, requires_grad=True)
    if not isinstance(layer, nn.LSTM):
        return h
    return h, torch.zeros(rows, B, H, dtype=dtype, requires_grad=True)


def counted(layer_of, dtype=torch.float32, autocast=None, batch_first=False):
    """(rows, outputs, state, layer) of a forward and backward pass."""
    counter = Counter("ieee")
    with cuda_kernels(counter.write), weightless():
        layer = layer_of().to(dtype)
        size = (B, T, D) if batch_first else (T, B, D)
        x = torch.empty(*size, dtype=dtype, requires_grad=True)
        before = state_of(layer, dtype)
        with counter:
            with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
                outputs, state = layer(x, before)
            outputs.sum().backward()
    return counter.rows, outputs, state, layer


@pytest.mark.slow
@pytest.mark.parametrize(
    "layer_of",
    [
        lambda: nn.LSTM(D, H, 2),
        lambda: nn.LSTM(D, H, 2, proj_size=4),
        lambda: nn.LSTM(D, H, 2, bidirectional=True, batch_first=True),
        lambda: nn.GRU(D, H),
        lambda: nn.RNN(D, H, nonlinearity="relu"),
    ],
)
def test_flops_are_those_of_the_decomposed_layer(layer_of):
    torch.manual_seed(0)
    real = layer_of()
    x = torch.rand(*((B, T, D) if real.batch_first else (T, B, D)), requires_grad=True)
    with FlopCounterMode(display=False) as torchs:
        # In float64 no fused kernel hides the products from the counter.
        outputs, _ = real.double()(x.double(), state_of(real, torch.float64))
        outputs.sum().backward()
    rows, fake, state, layer = counted(layer_of, batch_first=real.batch_first)
    assert sum(row.flops for row in rows) == torchs.get_total_flops()
    assert fake.shape == outputs.shape
    assert all(p.grad.shape == p.shape for p in layer.parameters())


def test_lstm_with_projection_by_hand():
    r, gh, s = 4, 4 * H, 2
    rows, *_ = counted(lambda: nn.LSTM(D, H, proj_size=r), torch.float16)
    found = {(row.kind, row.phase): row for row in rows if "gradient" not in row.kind}
    forward = {
        "recurrent input product": (2 * T * B * D * gh, T * B * D + D * gh + T * B * gh, 1),
        "recurrent product": (T * 2 * B * r * gh, T * (B * r + r * gh + B * gh), T),
        "recurrent gates": (0, T * (2 * B * gh + 3 * B * H), T),
        "recurrent projection": (T * 2 * B * H * r, T * (B * H + H * r + B * r), T),
    }
    for kind, (flops, numbers, launches) in forward.items():
        row = found[kind, "forward"]
        assert (row.flops, row.bytes, row.launches) == (flops, s * numbers, launches), kind
        assert row.form == ("fp16" if flops else "")


def test_autocast_casts_every_weight_on_every_call():
    layer = nn.LSTM(D, H)
    weights = sum(p.numel() for p in layer.parameters())
    rows, outputs, state, _ = counted(lambda: nn.LSTM(D, H), autocast=torch.float16)
    assert outputs.dtype is torch.float16 and state[1].dtype is torch.float16
    casts = sum(row.bytes for row in rows if row.kind == "cast" and row.phase == "forward")
    assert casts == 6 * (weights + T * B * D + 2 * B * H)  # and the input and both states


def test_activation_memory_is_gates_cells_and_inputs():
    with cuda_kernels(lambda *_: None), weightless():
        layer, x = nn.LSTM(D, H), torch.empty(T, B, D)
        saved = SavedTensors(layer.parameters())
        with saved.watching():
            outputs, _ = layer(x)
        assert saved.peak == 4 * (T * B * (4 * H + H) + T * B * D + 2 * B * H)
        outputs.sum().backward()
