"""Recurrent layers: untouched on a CPU; on a GPU BF16 as FP16, and masks that can be repeated.

What happens on the host side of CUDA is in tests/fake_cuda.
"""

import pytest
import torch
from torch import nn

from mprun.precision.random_states import dropout_state, restore_dropout_state
from mprun.precision.recurrent import own_recurrent

KINDS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}


def pair(kind, **settings):
    """Two layers of the same weights, the second one with our part."""
    torch.manual_seed(0)
    plain = KINDS[kind](16, 24, 2, **settings)
    own = KINDS[kind](16, 24, 2, **settings)
    own.load_state_dict(plain.state_dict())
    return plain, own_recurrent(own)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_cpu_it_is_torchs_own_layer(kind, packed):
    inputs = torch.randn(5, 3, 16)
    if packed:
        inputs = nn.utils.rnn.pack_padded_sequence(inputs, torch.tensor([5, 4, 2]))
    results = []
    for layer in pair(kind, dropout=0.3, bidirectional=True):
        torch.manual_seed(1)
        outputs, _ = layer(inputs)
        values = outputs.data if packed else outputs
        values.square().sum().backward()
        results.append([values, *(p.grad for p in layer.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_given_twice_it_is_there_once():
    _, layer = pair("lstm")
    forward = layer.forward
    assert own_recurrent(layer).forward is forward


@pytest.mark.gpu
@pytest.mark.parametrize("projection", [0, 8])
@pytest.mark.parametrize("mode", ["parameters", "autocast"])
def test_bf16_on_a_gpu_is_bf16(mode, projection):
    """Against float64 on a CPU, and far from what FP16 products would give."""
    settings = {"proj_size": projection} if projection else {}
    _, layer = pair("lstm", **settings)
    reference = nn.LSTM(16, 24, 2, **settings).double()
    reference.load_state_dict(layer.state_dict())
    inputs = torch.randn(7, 4, 16)
    expected, _ = reference(inputs.double())
    expected.sum().backward()
    layer.cuda()
    if mode == "parameters":
        layer.to(torch.bfloat16)
    dtype = torch.bfloat16 if mode == "parameters" else torch.float32
    with torch.autocast("cuda", torch.bfloat16, enabled=mode == "autocast"):
        outputs, state = layer(inputs.cuda().to(dtype))
    assert outputs.dtype is torch.bfloat16 and {s.dtype for s in state} == {torch.bfloat16}
    outputs.float().sum().backward()
    # Values below 1, rounded to 8 bits a few times on the way; FP16 would be 8 times as close.
    assert 2.0**-12 < (outputs.double().cpu() - expected).abs().max() < 2.0**-5
    for own, other in zip(layer.parameters(), reference.parameters(), strict=True):
        assert own.grad.dtype is dtype
        assert (own.grad.double().cpu() - other.grad).abs().max() < 2.0**-4 * other.grad.abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_masks_come_again_from_the_saved_state(kind, dtype):
    device = torch.device("cuda", torch.cuda.current_device())
    _, layer = pair(kind, dropout=0.5)
    layer.cuda().to(dtype)
    inputs = torch.randn(5, 3, 16, device=device, dtype=dtype)
    layer(inputs)
    saved, generator = dropout_state(device), torch.cuda.get_rng_state(device)
    first, second = (layer(inputs)[0] for _ in range(2))
    restore_dropout_state(saved, device)
    torch.cuda.set_rng_state(generator, device)
    assert torch.equal(layer(inputs)[0], first) and torch.equal(layer(inputs)[0], second)
    assert not torch.equal(first, second)


@pytest.mark.gpu
def test_a_run_begins_with_the_masks_of_its_seed():
    device = torch.device("cuda", torch.cuda.current_device())
    _, layer = pair("lstm", dropout=0.5)
    layer.cuda()
    inputs, found = torch.randn(5, 3, 16, device=device), []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        restore_dropout_state(None, device)
        found.append(layer(inputs)[0])
    assert torch.equal(found[0], found[2]) and not torch.equal(found[0], found[1])


@pytest.mark.gpu
def test_the_layer_itself_computes_what_torchs_own_does():
    """Without anything to mend: the same operation of cuDNN on the same weights."""
    plain, own = (layer.cuda() for layer in pair("lstm", dropout=0.5))
    own.eval(), plain.eval()
    inputs = torch.randn(5, 3, 16, device="cuda")
    assert torch.equal(plain(inputs)[0], own(inputs)[0])
