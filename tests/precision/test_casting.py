"""Which dtype every module has and sees, per mode and with overrides."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from mprun.models.classifiers import LocalResponseNorm
from mprun.models.lstm import LSTMLanguageModel
from mprun.precision import ForwardContext, cast_model, get_policy

from ..helpers import mixed
from ..shipped import MODES, OF_ANY_NETWORK

F32, F16 = torch.float32, torch.float16
CPU = torch.device("cpu")
SOME = pytest.mark.parametrize("mode", ["fp16_naive", "fp16_master", "amp"])
EVERY = pytest.mark.parametrize("mode", MODES)


class Probe(nn.Module):
    """Passes its input on and remembers its dtype."""

    def __init__(self):
        super().__init__()
        self.seen = None

    def forward(self, x):
        self.seen = x.dtype
        return x


class Block(nn.Module):
    """Linear layers with probes before, between and after, a norm layer in the middle."""

    def __init__(self, norm):
        super().__init__()
        self.before, self.first, self.between = Probe(), nn.Linear(4, 4), Probe()
        self.norm, self.after_norm = norm, Probe()
        self.second, self.after = nn.Linear(4, 4), Probe()

    def forward(self, x):
        x = self.between(self.first(self.before(x)))
        x = self.after_norm(self.norm(x))
        return self.after(self.second(x))


class Net(nn.Module):
    def __init__(self, norm=None):
        super().__init__()
        self.entry = nn.Linear(4, 4)
        self.block = Block(norm or nn.LayerNorm(4))
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.block(self.entry(x)))

    def seen(self):
        block = self.block
        probes = (block.before, block.between, block.after_norm, block.after)
        return tuple(probe.seen for probe in probes)


def run(net, policy, inputs=None):
    inputs = torch.randn(3, 4) if inputs is None else inputs
    forward_context = ForwardContext(policy, CPU)
    with forward_context:
        with forward_context.autocast():
            outputs = net(policy.cast_inputs(inputs))
        outputs.float().sum().backward()
    return outputs


def seen(mode, overrides=None, norm=None):
    policy = get_policy(mode)
    net = cast_model(Net(norm), policy, overrides).module
    run(net, policy)
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in net.parameters())
    return net.seen()


@EVERY
def test_what_a_module_receives_in_each_mode(mode):
    half = F16 if "fp16" in mode or mode == "amp" else torch.bfloat16
    half = F32 if mode in ("fp32", "tf32") else half
    # Before, between, after the norm layer, after. torch.autocast leaves a layer norm's in FP32.
    assert seen(mode) == (half, half, F32 if mode.startswith("amp") else half, half)


@SOME
def test_an_override_keeps_a_block_in_fp32_and_its_neighbours_in_half(mode):
    policy = get_policy(mode)
    cast = cast_model(Net(), policy, {"block": F32})
    net = cast.module
    outputs = run(net, policy)
    assert net.seen() == (F32,) * 4
    assert outputs.dtype == F16
    assert {p.dtype for p in net.block.parameters()} == {F32}
    assert net.head.weight.dtype == net.entry.weight.dtype == policy.param_dtype
    if mode == "fp16_master":
        assert cast.masters.keys() == {"entry.weight", "entry.bias", "head.weight", "head.bias"}


@SOME
def test_overrides_nest_and_the_last_match_counts(mode):
    overrides = {"block*": F32, "block.second": F16}
    assert seen(mode, overrides) == (F32, F32, F32, F32)
    policy = get_policy(mode)
    net = cast_model(Net(), policy, overrides).module
    received = []
    net.block.second.register_forward_hook(lambda m, args, out: received.append(out.dtype))
    run(net, policy)
    # The layer itself computed in half, its FP32 neighbours got FP32 back.
    second = net.block.second
    assert second.weight.dtype == (F32 if mode == "amp" else F16)
    assert seen(mode, {"block.second": F16, "block*": F32}) == (F32,) * 4


def test_a_nested_half_module_rounds_to_half():
    policy = get_policy("fp16_master")
    cast, outputs = cast_model(Net(), policy, {"block*": F32, "block.second": F16}), []
    cast.module.block.after.register_forward_pre_hook(lambda m, args: outputs.append(args[0]))
    run(cast.module, policy)
    # FP32 tensors that hold FP16 values.
    assert outputs[0].dtype == F32
    assert torch.equal(outputs[0], outputs[0].half().float())


@pytest.mark.few(16)
@pytest.mark.parametrize("mode", ["fp16_naive", "fp16_master", "amp", "bf16_master"])
@pytest.mark.parametrize("overrides", [{}, {"block": F32}, {"block": F16}, {"block.norm": F32}])
@pytest.mark.parametrize(
    "norm",
    [nn.LayerNorm, nn.RMSNorm, nn.BatchNorm1d, lambda size: nn.GroupNorm(2, size)],
    ids=["layer", "rms", "batch", "group"],
)
def test_every_norm_layer_under_every_override_trains(mode, overrides, norm):
    policy, layer = get_policy(mode), norm(4)
    seen(mode, overrides, layer)
    fp32 = policy.norm_dtype == F32 or "block.norm" in overrides or overrides.get("block") == F32
    assert layer.weight.dtype == (F32 if fp32 else policy.norm_dtype)


def test_instance_norm_counts_as_a_norm_layer():
    net = nn.Sequential(nn.Conv1d(2, 4, 1), nn.InstanceNorm1d(4, affine=True))
    policy = get_policy("fp16_master")
    cast_model(net, policy)
    assert net[1].weight.dtype == F32
    assert run(net, policy, torch.randn(3, 2, 5)).dtype == F16


def test_statistics_follow_the_norm_layer_and_counters_stay_integers():
    for mode, dtype in (("fp16_naive", F16), ("fp16_master", F32), ("amp", F32)):
        norm = cast_model(Net(nn.BatchNorm1d(4)), get_policy(mode)).module.block.norm
        assert norm.running_mean.dtype == norm.running_var.dtype == dtype
        assert norm.num_batches_tracked.dtype == torch.int64


@pytest.mark.parametrize("mode", OF_ANY_NETWORK)
def test_local_response_norm_counts_as_a_norm_layer(mode):
    policy = get_policy(mode)
    net = nn.Sequential(nn.Conv2d(3, 8, 1), LocalResponseNorm(3, 2.0), probe := Probe())
    inner = []
    original = net[1].forward
    net[1].forward = lambda x: inner.append(x.dtype) or original(x)
    cast_model(net, policy)
    forward_context = ForwardContext(policy, CPU)
    with forward_context, forward_context.autocast():
        net(policy.cast_inputs(torch.randn(2, 3, 4, 4)))
    assert inner == [policy.norm_dtype]
    assert probe.seen == (F32 if policy.autocast_dtype else policy.param_dtype)


@SOME
def test_an_lstm_kept_in_fp32(mode):
    policy = get_policy(mode)
    model = LSTMLanguageModel(16, 8, 8, 2)
    cast_model(model, policy, {"lstm": F32})
    forward_context = ForwardContext(policy, CPU)
    with forward_context:
        state = None
        for _ in range(2):
            with forward_context.autocast():
                logits, state = model(torch.randint(16, (5, 3)), state)
            state = tuple(part.detach() for part in state)
        logits.float().sum().backward()
    assert {p.dtype for p in model.lstm.parameters()} == {F32}
    assert logits.dtype == F16
    # Under autocast the state is carried on as the module left it.
    assert {part.dtype for part in state} == {F32 if mode == "amp" else F16}
    assert not any("lstm" in name for name in forward_context.rerouted())


def test_an_unknown_pattern_names_modules_that_exist():
    with pytest.raises(ValueError, match="'blok'.*block"):
        cast_model(Net(), get_policy("fp16_master"), {"blok": F32})


def test_masters_are_the_unrounded_weights():
    net = Net()
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    cast, optimizer = mixed(net, "fp16_master")
    assert cast.masters.keys() == {n for n in before if ".norm." not in n}
    for name, master in cast.masters.items():
        assert master.dtype == F32
        assert torch.equal(master, before[name])
        assert not torch.equal(master, master.half().float())
        assert torch.equal(dict(net.named_parameters())[name], master.half())
        # A second FP32 copy would cost 4 bytes a parameter for the whole run.
        assert optimizer.masters[name].data_ptr() == master.data_ptr()


@EVERY
def test_what_is_updated_are_the_parameters_themselves(mode):
    net = Net()
    before = list(net.parameters())
    masters = cast_model(net, get_policy(mode)).masters
    updated = [masters.get(name, own) for name, own in net.named_parameters()]
    assert all(a is b for a, b in zip(before, updated, strict=True))


@EVERY
def test_in_fp32_a_model_has_masters_and_statistics_and_computes_as_a_plain_one(mode):
    cast = cast_model(Net(nn.BatchNorm1d(4)), get_policy(mode), {"block.second": F32})
    inside = dict(cast.module.named_parameters())
    run(cast.module, cast.policy)
    plain = Net(nn.BatchNorm1d(4)).eval()
    with cast.in_fp32() as net:
        for name, own in net.named_parameters():
            assert own.dtype == F32
            assert torch.equal(own, cast.masters.get(name, inside[name].float()))
        assert net.block.norm.num_batches_tracked == 1
        plain.load_state_dict(net.state_dict())
        inputs = torch.randn(8, 4)
        assert torch.equal(net.eval()(inputs), plain(inputs))
    assert all(own is inside[name] for name, own in cast.module.named_parameters())


def test_in_fp32_statistics_in_16_bits_are_those_of_the_training():
    """BatchNorm moves them without a version, by which other buffers' FP32 forms are told."""
    policy = replace(get_policy("fp16_master"), norm_dtype=F16)
    cast = cast_model(nn.Sequential(nn.BatchNorm1d(4)), policy)
    with ForwardContext(policy, CPU):
        cast.module(torch.randn(8, 4).half() + 1)
    moved = cast.module[0].running_mean
    with cast.in_fp32() as net:
        assert moved.all() and torch.equal(net[0].running_mean, moved.float())


def test_in_fp32_buffers_and_recurrent_layers_are_what_they_were():
    class Steps(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(4, 4)
            self.register_buffer("places", torch.arange(4.0) / 3, persistent=False)
            self.register_buffer("seen", torch.zeros(4))

        def forward(self, x):
            if self.training:
                self.seen += x.mean((0, 1))
            return self.rnn(x + self.places)[0]

    model = Steps()
    inputs, weights = torch.randn(3, 2, 4), [w.detach().clone() for w in model.parameters()]
    with torch.no_grad():
        expected = model.eval()(inputs)
    cast = cast_model(model.train(), get_policy("fp16_master"))
    with ForwardContext(cast.policy, CPU):
        assert model(inputs.half()).dtype is F16
    in_mode = list(model.rnn._flat_weights)
    with cast.in_fp32(), torch.no_grad():
        assert torch.equal(model.eval()(inputs), expected)
        assert torch.equal(model.places, torch.arange(4.0) / 3)
        assert torch.equal(model.seen, inputs.half().mean((0, 1)).float())  # what the mode wrote
        assert all(map(torch.equal, model.rnn._flat_weights, weights))
    # The very tensors again: a captured graph knows their addresses.
    assert all(a is b for a, b in zip(model.rnn._flat_weights, in_mode, strict=True))
    averages = {name: torch.zeros_like(own) for name, own in cast.masters.items()}
    with cast.in_fp32(averages), torch.no_grad():
        assert not model.eval()(inputs).any()
