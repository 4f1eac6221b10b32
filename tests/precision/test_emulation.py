import copy
import functools
from contextlib import nullcontext

import pytest
import torch
import torchvision
from torch import nn
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

from mprun.precision import ForwardContext, get_policy
from mprun.precision.emulation import HalfEmulation, Losses

from .emulated import assert_within, relative
from .operations import Operations


def conv_net():
    convolutions = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 4, 4, 2)
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(4 * 14 * 14, 5))


class EmbeddingLstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(13, 8)
        self.lstm = nn.LSTM(8, 16, proj_size=8)
        self.decoder = nn.Linear(8, 13)

    def forward(self, tokens):
        return self.decoder(self.lstm(self.embedding(tokens))[0])


@pytest.mark.parametrize("kind", ["half", "autocast"])
def test_every_product_of_the_networks_is_rerouted(kind):
    images, tokens = torch.randn(2, 3, 8, 8), torch.randint(0, 13, (5, 2))
    emulation = HalfEmulation()
    for model, x in ((conv_net(), images), (EmbeddingLstm(), tokens)):
        if kind == "half":
            model, x = model.half(), x.half() if x.is_floating_point() else x
        with emulation:
            with torch.autocast("cpu", torch.float16, enabled=kind == "autocast"):
                out = model(x)
            out.float().sum().backward()
        assert out.dtype is torch.float16
        assert all(p.grad.isfinite().all() for p in model.parameters())
    expected = {
        ("convolution", "forward"): 2,
        ("convolution_backward", "backward"): 2,
        ("addmm", "forward"): 2,
        ("mm", "backward"): 4,
        ("lstm", "forward"): 1,
        ("lstm", "backward"): 1,
    }
    if kind == "half":  # autocast leaves the embedding and its gradient in float32
        expected["embedding_dense_backward", "backward"] = 1
    assert emulation.rerouted == expected


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_float32_networks_are_left_alone():
    x, tokens = torch.randn(2, 3, 8, 8), torch.randint(0, 13, (5, 2))
    for model, inputs in ((conv_net(), x), (EmbeddingLstm(), tokens)):
        twin = copy.deepcopy(model)
        with HalfEmulation() as emulation:
            model(inputs).sum().backward()
        twin(inputs).sum().backward()
        assert not emulation.rerouted
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)


def test_bfloat16_object_leaves_float16_alone_and_other_dtypes_are_refused():
    a = torch.ones(2, 2, dtype=torch.float16)
    with HalfEmulation(torch.bfloat16) as emulation:
        a @ a
    assert not emulation.rerouted
    with pytest.raises(ValueError, match="float64"):
        HalfEmulation(torch.float64)


def test_memory_format_and_output_mask_are_kept():
    x = torch.randn(2, 16, 40, 40).half().contiguous(memory_format=torch.channels_last)
    conv = nn.Conv2d(16, 8, 3).half().to(memory_format=torch.channels_last)
    with HalfEmulation():
        out = conv(x)
        out.float().square().sum().backward()
        masked = torch.ops.aten.convolution_backward(
            *(torch.ones_like(out), x, conv.weight.detach(), None),
            *([1, 1], [0, 0], [1, 1], False, [0, 0], 1, [False, True, False]),
        )
    assert out.is_contiguous(memory_format=torch.channels_last)
    assert conv.weight.grad.dtype is torch.float16
    assert masked[0] is None and masked[2] is None and masked[1].shape == conv.weight.shape


def test_weight_used_twice_and_expanded_gradient():
    w = (torch.randn(200, 200) * 0.05).half().requires_grad_()
    w64 = w.detach().double().requires_grad_()
    x = torch.randn(200, 200).half()
    with HalfEmulation():
        ((x @ w) @ w).float().sum().backward()
    ((x.double() @ w64) @ w64).sum().backward()
    # Two stored intermediates and the sum of two gradients: four roundings.
    assert_within(4, w.grad, w64.grad)


def test_exceptions_nesting_and_many_entries_leave_no_trace():
    a = torch.ones(4, 4, dtype=torch.float16)
    emulation = HalfEmulation()
    for _ in range(300):
        with pytest.raises(KeyError), emulation:
            raise KeyError
    with emulation, pytest.raises(RuntimeError):
        a @ torch.ones(3, 3, dtype=torch.float16)
    emulation.rerouted.clear()
    with emulation, emulation:
        a @ a
    with emulation:
        a @ a
    assert emulation.rerouted == {("mm", "forward"): 2}
    a @ a
    nn.LSTM(4, 4).half()(a[None])
    assert emulation.rerouted == {("mm", "forward"): 2}


def test_inference_before_training_does_not_spoil_the_working_memory():
    model, x = nn.Linear(300, 300).half(), torch.randn(300, 300).half()
    emulation = HalfEmulation()
    with torch.inference_mode(), emulation:
        first = model(x)
    with emulation:
        out = model(x)
        out.sum().backward()
    assert torch.equal(first, out)
    assert_within(2, model.weight.grad, x.double().sum(0).expand(300, 300))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_segment_gives_the_same_gradients(reentrant):
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)).half()
    x, grads = torch.randn(32, 64).half(), []
    for run in (model, lambda v: checkpoint(model, v, use_reentrant=reentrant)):
        model.zero_grad()
        inputs = x.clone().requires_grad_()
        with HalfEmulation() as emulation:
            run(inputs).float().sum().backward()
        assert emulation.rerouted["mm", "backward"] == 4
        grads.append([inputs.grad, *(p.grad for p in model.parameters())])
    assert all(map(torch.equal, *grads))


class CheckpointedLstm(EmbeddingLstm):
    """Its recurrent layer, and a loss of its own, are computed again in backward."""

    reentrant = False

    def forward(self, tokens):
        states = self.embedding(tokens)
        return checkpoint(self.rest, states, tokens, use_reentrant=self.reentrant).float()

    def rest(self, states, tokens):
        logits = self.decoder(self.lstm(states)[0])
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


@pytest.mark.parametrize("mode", ["fp16_master", "amp"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_context_entered_within_itself_changes_nothing(mode, reentrant, monkeypatch):
    """Around forward, then by the engine for a plain backward(), it gives the bits, the counts and
    the operations of one around all of it, of which each part enters it again."""
    plain, tokens = CheckpointedLstm(), torch.randint(0, 13, (5, 2))
    plain.reentrant = reentrant
    policy, found, run = get_policy(mode), [], torch.autograd._engine_run_backward
    one = torch.tensor(1.0)  # which backward() would make outside of the engine
    plain.to(policy.param_dtype)
    for nested in (False, True):
        model, seen = copy.deepcopy(plain), Operations()
        context = ForwardContext(policy, tokens.device)
        context.emulations[0].functions.loss_dtype = torch.float32
        context.watchers.append(seen)

        def within(function, forward_context, *args, **kwargs):
            with forward_context:
                return function(*args, **kwargs)

        engine = functools.partial(within, run, context)
        monkeypatch.setattr(torch.autograd, "_engine_run_backward", engine)
        if nested:
            model.rest = functools.partial(within, model.rest, context)
        with context if nested else nullcontext():
            with context, context.autocast():
                loss = model(tokens)
            loss.backward(one)
        found.append(([p.grad for p in model.parameters()], context.rerouted(), len(seen.ran)))
    (gradients, *counts), (gradients_nested, *counts_nested) = found
    assert counts == counts_nested
    # Computed again in backward it is another forward pass of the layer.
    assert counts[0]["forward lstm"] == 2 and counts[0]["backward lstm"] == 1
    assert all(map(torch.equal, gradients, gradients_nested))
    assert not _get_current_dispatch_mode_stack() and not _get_current_function_mode_stack()


def stored_bytes(model, x):
    """Bytes of distinct storages of activation memory, those of parameters left out."""
    own, kept = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

    def pack(t):
        kept[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = model(x)
    return sum(t.untyped_storage().nbytes() for ptr, t in kept.items() if ptr not in own), out


def test_a_resnet_stores_half_the_activations():
    model = torchvision.models.resnet18(weights=None)
    x = torch.randn(8, 3, 32, 32)
    full, _ = stored_bytes(model, x)
    model.half()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.float()
    emulation = HalfEmulation()
    with emulation:
        half, out = stored_bytes(model, x.half())
        out.float().sum().backward()
    assert half <= 0.55 * full
    assert emulation.rerouted["convolution", "forward"] == 20
    assert emulation.rerouted["convolution_backward", "backward"] == 20


@pytest.mark.parametrize("training", [True, False])
def test_transformer_layer_leaves_no_product_native(training):
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True).half()
    layer.train(training)
    x = torch.randn(3, 10, 32).half()
    with HalfEmulation() as emulation, torch.set_grad_enabled(training):
        out = layer(x)
    expected = copy.deepcopy(layer).double()(x.double()).detach()
    assert emulation.rerouted
    # Eight stored tensors between input and output.
    assert relative(out, expected) <= 8 * 2.0**-11


def test_a_loss_and_an_attention_keep_their_keywords():
    given, targets = torch.randn(4, 5).half(), torch.tensor([0, 1, 4, 4])
    words = {"reduction": "sum", "label_smoothing": 0.25, "ignore_index": 1}
    queries, mask = torch.randn(1, 2, 6, 8).half(), torch.randn(6, 6)
    more = {"key": queries, "value": queries, "scale": 0.25}
    with Losses(torch.float32):
        loss = F.cross_entropy(given, target=targets, **words)
        found = F.scaled_dot_product_attention(query=queries, attn_mask=mask, **more)
    assert torch.equal(loss, F.cross_entropy(given.float(), targets, **words))
    expected = F.scaled_dot_product_attention(queries, attn_mask=mask.half(), **more)
    assert torch.equal(found, expected)
