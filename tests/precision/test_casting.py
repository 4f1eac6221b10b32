"""Which dtype every module computes in and sees, per mode and with overrides."""

import pytest
import torch
from torch import nn

from mprun.errors import BadInput
from mprun.models.classifiers import LocalResponseNorm
from mprun.models.lstm import LSTMLanguageModel
from mprun.precision import get_policy
from mprun.precision.casting import in_fp32

from ..helpers import mixed
from ..shipped import MODES, OF_ANY_NETWORK

F32, F16 = torch.float32, torch.float16
SOME = pytest.mark.parametrize("mode", ["fp16_naive", "fp16_master", "amp"])


class Probe(nn.Module):
    """Passes its input on; remembers its dtype, and its values, which from outside are FP32."""

    def __init__(self):
        super().__init__()
        self.seen = self.values = None

    def forward(self, x):
        self.seen, self.values = x.dtype, x
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
        self.head, self.last = nn.Linear(4, 2), Probe()

    def forward(self, x):
        return self.last(self.head(self.block(self.entry(x))))

    def seen(self):
        block = self.block
        probes = (block.before, block.between, block.after_norm, block.after)
        return tuple(probe.seen for probe in probes)


def run(net, mode, overrides=None, inputs=None):
    """Return the dtype in which each parameter was computed, by name, in a step of the mode."""
    inputs = torch.randn(3, 4) if inputs is None else inputs
    learner = mixed(net, mode, overrides=overrides)
    learner.network(inputs).sum().backward()
    assert all(own.grad.isfinite().all() for own in learner.updated)
    computed = {id(own): dtype for own, dtype in learner.steps.computed()}
    return {name: computed[id(own)] for name, own in net.named_parameters()}


def seen(mode, overrides=None, norm=None):
    run(net := Net(norm), mode, overrides)
    return net.seen()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.few(9)
def test_what_a_module_receives_in_each_mode(mode):
    half = F16 if "fp16" in mode or mode == "amp" else torch.bfloat16
    half = F32 if mode in ("fp32", "tf32") else half
    # Before, between, after the norm layer, after. torch.autocast leaves a layer norm's in FP32.
    assert seen(mode) == (half, half, F32 if mode.startswith("amp") else half, half)


@SOME
def test_an_override_keeps_a_block_in_fp32_and_its_neighbours_in_half(mode):
    net = Net()
    dtypes = run(net, mode, {"block": F32})
    assert net.seen() == (F32,) * 4
    assert net.last.seen is F16
    for name, dtype in dtypes.items():
        assert dtype is (F32 if name.startswith("block") else get_policy(mode).param_dtype)


@SOME
def test_overrides_nest_and_the_last_match_counts(mode):
    net = Net()
    dtypes = run(net, mode, {"block*": F32, "block.second": F16})
    # The layer itself computed in half, its FP32 neighbours got FP32 back.
    assert net.seen() == (F32,) * 4
    assert dtypes["block.second.weight"] is (F32 if mode == "amp" else F16)
    assert torch.equal(net.block.after.values, net.block.after.values.half().float())
    run(net := Net(), mode, {"block.second": F16, "block*": F32})
    assert not torch.equal(net.block.after.values, net.block.after.values.half().float())


@pytest.mark.few(16)
@pytest.mark.parametrize("mode", ["fp16_naive", "fp16_master", "amp", "bf16_master"])
@pytest.mark.parametrize("overrides", [{}, {"block": F32}, {"block": F16}, {"block.norm": F32}])
@pytest.mark.parametrize(
    "norm",
    [nn.LayerNorm, nn.RMSNorm, nn.BatchNorm1d, lambda size: nn.GroupNorm(2, size)],
    ids=["layer", "rms", "batch", "group"],
)
def test_every_norm_layer_under_every_override_trains(mode, overrides, norm):
    policy = get_policy(mode)
    dtypes = run(Net(norm(4)), mode, overrides)
    fp32 = policy.norm_dtype == F32 or "block.norm" in overrides or overrides.get("block") == F32
    assert dtypes["block.norm.weight"] == (F32 if fp32 else policy.norm_dtype)


def test_instance_norm_counts_as_a_norm_layer():
    net = nn.Sequential(nn.Conv1d(2, 4, 1), nn.InstanceNorm1d(4, affine=True), Probe())
    assert run(net, "fp16_master", inputs=torch.randn(3, 2, 5))["1.weight"] == F32
    assert net[2].seen == F16


def test_statistics_follow_the_norm_layer_and_counters_stay_integers():
    class Seen(nn.BatchNorm1d):
        def forward(self, x):
            self.dtypes = self.running_mean.dtype, self.num_batches_tracked.dtype
            return super().forward(x)

    for mode, dtype in (("fp16_naive", F16), ("fp16_master", F32), ("amp", F32)):
        run(Net(norm := Seen(4)), mode)
        assert norm.dtypes == (dtype, torch.int64) and norm.running_var.dtype == dtype


@pytest.mark.parametrize("mode", OF_ANY_NETWORK)
def test_local_response_norm_counts_as_a_norm_layer(mode):
    inner = []

    class Seen(LocalResponseNorm):
        def forward(self, x):
            inner.append(x.dtype)
            return super().forward(x)

    policy = get_policy(mode)
    net = nn.Sequential(nn.Conv2d(3, 8, 1), Seen(3, 2.0), probe := Probe())
    run(net, mode, inputs=torch.randn(2, 3, 4, 4))
    assert inner == [policy.norm_dtype]
    assert probe.seen == (F32 if policy.autocast_dtype else policy.param_dtype)


@SOME
def test_an_lstm_kept_in_fp32(mode):
    model = LSTMLanguageModel(16, 8, 8, 2)
    learner, state = mixed(model, mode, overrides={"lstm": F32}), None
    for _ in range(2):
        logits, state = learner.network(torch.randint(16, (5, 3)), state)
        state = tuple(part.detach() for part in state)
    logits.sum().backward()
    computed = {id(own): dtype for own, dtype in learner.steps.computed()}
    assert {computed[id(own)] for own in model.lstm.parameters()} == {F32}
    # The output layer computes in FP16, and says so in FP32.
    assert logits.dtype == F32 and torch.equal(logits, logits.half().float())
    assert {part.dtype for part in state} == {F32}
    assert not any("lstm" in name for name in learner.prepared.forward_context.rerouted())


SAMPLED = ["model=lstm_lm", "model.hidden_size=16", "model.embedding_size=16"]
SAMPLED += ["model.sampled_softmax=64", "optim=adagrad", "optim.lr=0.1"]


def test_an_override_without_effect_is_refused(build_run):
    message = "precision.overrides.softmax=fp16: the module computes in FP32"
    with pytest.raises(BadInput, match=message):
        build_run(*SAMPLED, "precision=fp16_master", "precision.overrides.softmax=fp16")


def test_an_unknown_pattern_names_modules_that_exist():
    with pytest.raises(ValueError, match="'blok'.*block"):
        mixed(Net(), "fp16_master", overrides={"blok": F32})


@pytest.mark.parametrize(
    ("mode", "follows"), [("fp16_naive", True), ("fp16_master", False), ("amp", False)]
)
def test_an_override_of_another_16_bit_dtype(mode, follows):
    """A norm layer follows that of what is around it, if its own dtype has 16 bits."""
    model = Net()
    mixed(model, mode, overrides={"block": torch.bfloat16}).network(torch.randn(3, 4))
    # Probes see what the block computes, and after the norm layer what it makes of that.
    assert {probe.seen for probe in (model.block.between, model.block.after)} == {torch.bfloat16}
    assert (model.block.norm.weight.dtype is torch.bfloat16) == follows


@pytest.mark.parametrize("mode", ["fp16_naive", "bf16_naive", "bf16_stochastic", "bf16_kahan"])
def test_what_stays_in_fp32_keeps_its_digits(mode):
    """The module around it is stored in 16 bits."""
    model = Net()
    named = dict(model.named_parameters())
    before = {name: nn.init.uniform_(own).detach().clone() for name, own in named.items()}
    mixed(model, mode, overrides={"block.norm": F32, "block.second": F32})
    for name, own in model.named_parameters():
        stays = name.startswith(("block.norm", "block.second"))
        assert torch.equal(own.float(), before[name]) == stays, name


def test_in_fp32_buffers_and_recurrent_layers_are_what_they_were():
    class Steps(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(4, 4)
            self.register_buffer("none", None)
            self.register_buffer("places", torch.arange(4.0) / 4, persistent=False)
            self.register_buffer("seen", torch.zeros(4))

        def forward(self, x):
            if self.training:
                self.seen += x.mean((0, 1))
            return self.rnn(x + self.places)[0]

    model = Steps()
    for own in model.parameters():
        own.data = own.detach().half().float()
    inputs, weights = torch.randn(3, 2, 4), [w.detach().clone() for w in model.parameters()]
    with torch.no_grad():
        expected = model.eval()(inputs)
    mixed(model.train(), "fp16_naive").network(inputs)
    in_mode = list(model.rnn._flat_weights)
    assert {weight.dtype for weight in in_mode} == {F16}
    with in_fp32(model), torch.no_grad():
        assert {own.dtype for own in model.buffers()} == {F32}
        assert torch.equal(model.seen, inputs.half().mean((0, 1)).float())  # what the mode wrote
        assert all(map(torch.equal, model.rnn._flat_weights, weights))
        assert torch.equal(model.eval()(inputs), expected)
    # The very tensors again: a captured graph knows their addresses.
    assert all(a is b for a, b in zip(model.rnn._flat_weights, in_mode, strict=True))
    averages = {name: torch.zeros_like(own, dtype=F32) for name, own in model.named_parameters()}
    with in_fp32(model, averages), torch.no_grad():
        assert not model.eval()(inputs).any()
