"""Each trap of an ordinary loop, which a half-prepared one got silently wrong, is right, or raises
one line that names the cure.
"""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.optim import optimizer as of_torch
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import mprun
from mprun.precision.audit import FIRST
from mprun.precision.emulation import HalfEmulation
from mprun.prepared import passes
from mprun.prepared.nodes import leaves
from mprun.torch_private import dispatch_modes

from ..distributed.processes import forkserver
from ..helpers import assert_same_bits, network, raises_line
from .loops import INPUTS, VECTORS, Forward, keeps_hidden
from .networks import (
    HALF_WEIGHTS,
    MODES,
    SMALL,
    WITHOUT_MASTERS,
    as_in_a_script,
    batches,
    loss_of,
    net,
    prepared,
    reloaded,
    sgd,
    take_step,
    train,
)

IMAGES = next(batches(1))[0]


class Holder:
    """It cannot be copied."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __copy__(self):
        raise TypeError("a handle of a file")


class Holds(nn.Linear):
    def forward(self, x):
        return Holder(super().forward(x))


class Unwraps(nn.Linear):
    def forward(self, holder):
        return super().forward(holder.tensor)


def with_autocast(model, _):
    with torch.autocast("cpu", torch.bfloat16):
        model(IMAGES)


def backward_with_autocast(model, _):
    """Also once nothing watches its passes."""
    for _ in range(4):
        loss_of(model).backward()
    loss = loss_of(model)
    with torch.autocast("cpu", torch.bfloat16):
        loss.backward()


def replace_parameters(model, optimizer):
    """The optimizer holds those of before."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    loss_of(model).backward()
    optimizer.step()


def with_grad_scaler(model, optimizer):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(loss_of(model) / 16).backward()
    scaler.step(optimizer)


def loss_of_a_tensor_inside(model, _):
    kept = []
    model.body.forward = lambda x, own=model.body.forward: kept.append(own(x)) or kept[-1]
    (loss_of(model) + kept[0].float().sum()).backward()


def copy_within_a_call(model, _):
    model.head.register_forward_hook(lambda *_: copy.deepcopy(model))
    model(IMAGES)


def call_of(network, inputs):
    """A call of another network in the same mode."""
    return lambda _, optimizer: prepared(mprun.state_of(optimizer).policy.name, network(4, 2))[0](
        inputs
    )


SCALED = ["amp", "fp16_master_scaled"]
MASTERS = [mode for mode in HALF_WEIGHTS if mode not in WITHOUT_MASTERS]
# What is said of what a script does, and the modes in which that is refused.
TRAPS = [
    ("torch.autocast is active", MODES, with_autocast),
    ("torch.autocast is active", MODES, lambda m, o: with_autocast(m.eval(), o)),
    ("torch.autocast is active", MODES, backward_with_autocast),
    ("no gradients", MODES, lambda m, o: o.step()),
    ("no gradients", MODES, lambda m, o: (loss_of(m).backward(), o.zero_grad(), o.step())),
    ("no gradients", MODES, replace_parameters),
    ("GradScaler", [m for m in MODES if m != "fp16_naive"], with_grad_scaler),
    (
        "now on cpu in torch.float64",
        ["fp32", "amp", "fp16_master"],
        lambda m, _: m.double()(IMAGES),
    ),
    ("now on cpu in torch.bfloat16", MASTERS, lambda m, o: (m.head.bfloat16(), m(IMAGES))),
    ("during its own call", ["fp16_master"], copy_within_a_call),
    ("from inside a prepared model", SCALED, loss_of_a_tensor_inside),
    ("copy.copy fails for a Holder", SCALED, call_of(Holds, torch.ones(2, 4))),
    (
        "copy.copy fails for a Holder, so tensors in this object would pass without a cast",
        ["fp16_naive", "bf16_master"],
        call_of(Unwraps, Holder(torch.ones(2, 4))),
    ),
    ("DataParallel", MODES, lambda m, o: m._replicate_for_data_parallel()),
]


@pytest.mark.parametrize(
    ("mode", "says", "act"), [(mode, says, act) for says, modes, act in TRAPS for mode in modes]
)
def test_what_would_go_wrong_is_refused_in_a_line_that_names_the_cure(mode, says, act):
    model, optimizer = prepared(mode)
    with raises_line((RuntimeError, ValueError), says):
        act(model, optimizer)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.few(4)
def test_a_pass_of_something_else_is_not_touched(mode):
    """While the graph of a call waits for its own pass, which is then the one that is watched."""
    model, optimizer = prepared(mode)
    loss, seen = loss_of(model), []
    weight = torch.ones(4, 4, dtype=torch.bfloat16, requires_grad=True)
    (product := weight @ weight).register_hook(lambda _: seen.append(dispatch_modes()))
    with torch.autocast("cpu", torch.bfloat16):
        product.sum().backward()
    assert seen == [[]]
    audit = mprun.state_of(optimizer).models[0].audit
    assert not [name for name in audit.result()["products"] if name.startswith("backward")]
    loss.backward()
    assert [name for name in audit.result()["products"] if name.startswith("backward")]


def test_a_model_that_nothing_differentiates_is_not_waited_for_once_it_is_called_unwatched():
    """Each pass in between looks for it in its own graph, which costs time."""
    model, optimizer = prepared("fp32")
    (prepared_model,) = mprun.state_of(optimizer).models
    waited = []
    for _ in range(4):
        loss_of(model)
        torch.ones(2, requires_grad=True).sum().backward()
        waited.append(prepared_model in passes.due)
    assert waited == [True, True, True, False]


@pytest.mark.parametrize("mode", ["fp32", "amp", "fp16_master_scaled"])
def test_a_graph_of_many_paths_is_walked_once(mode):
    """Each sum doubles the paths to the model."""
    model, _ = prepared(mode)
    loss = loss_of(model)
    for _ in range(64):
        loss = loss / 2 + loss / 2
    loss.backward()
    assert all(own.grad is not None for own in model.parameters())


@pytest.mark.parametrize("mode", ["fp32", "amp_bf16"])
def test_a_pass_through_a_model_of_which_nothing_is_trained_is_watched(mode):
    model = mprun.prepare(network().requires_grad_(False), precision=mode)
    model(torch.ones(3, 6, requires_grad=True)).sum().backward()
    dtype = torch.float32 if mode == "fp32" else torch.bfloat16
    expected = {("forward", dtype): 2, ("backward", dtype): 2}
    assert model.forward.shared.audit.products == expected


@pytest.mark.parametrize("mode", ["fp32", "fp16_naive", "bf16_master", "amp", "amp_bf16"])
def test_only_the_node_that_widens_an_output_leaves_a_model(mode):
    """So `explain` tells a gradient of the loss from one of the last layer."""
    model, _ = prepared(mode, network())
    for _ in range(FIRST + 1):
        outputs = model(torch.randn(3, 6, requires_grad=True))
        found, todo = {outputs.grad_fn}, [outputs.grad_fn]
        while todo:
            before = {one for one, _ in todo.pop().next_functions if one is not None} - found
            found |= before
            todo += before
        assert [one for one in found if leaves(one)] == [outputs.grad_fn] * (mode != "fp32")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fp16_naive", "bf16_master", "amp"])
def test_a_pass_is_the_models_own_wherever_it_begins(mode):
    """At a tensor from inside, at gradients of gradients, in a pass within a pass."""

    def begun_inside(model):
        kept = []
        model.body.register_forward_hook(lambda _, given, out: kept.append(out))
        model(IMAGES)
        return kept[0].square().sum()

    def second(model):
        inputs = IMAGES.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(inputs).square().sum(), inputs, create_graph=True)
        return gradient.square().sum()

    def within(model):
        inputs = IMAGES.clone().requires_grad_()
        return checkpoint(model, inputs, use_reentrant=True).square().sum()

    for begin in begun_inside, second, within:
        model, optimizer = prepared(mode)
        loss, seen = begin(model), []
        for own in model.parameters():
            own.register_hook(lambda _, seen=seen: seen.append(dispatch_modes()))
        loss.backward()
        assert seen, begin.__name__
        for modes in seen:
            assert any(isinstance(one, HalfEmulation) for one in modes), begin.__name__


CLIPPED = ["fp32", "fp16_master_scaled", "amp", "bf16_stochastic", "bf16_kahan"]


@pytest.mark.parametrize("mode", CLIPPED)
@pytest.mark.few(3)
def test_clipping_by_torch_is_that_of_a_run(mode, build_run):
    """train.clip_norm of a run, and torch's function in a script, on the same batches."""
    built = build_run(*SMALL, f"precision={mode}", "train.clip_norm=0.05", "optim.lr=0.5")
    task = built.task
    model, optimizer = as_in_a_script(built)
    for index in range(3):
        torch.manual_seed(index)
        task.train_step(index)
        images, labels = built.data.train_batch(index)
        torch.manual_seed(index)
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        assert nn.utils.clip_grad_norm_(model.parameters(), 0.05) > 0.05
        optimizer.step()
    assert_same_bits([*model.parameters()], [*task.learner.model.parameters()])


def with_its_loss(model, inputs, labels):
    """Compute the loss inside of the model, as language models do."""
    logits = model.net(inputs)
    model.seen.append(logits.dtype)
    return logits, F.cross_entropy(logits, labels)


@pytest.mark.parametrize("mode", HALF_WEIGHTS)
def test_a_loss_inside_the_model_is_computed_in_fp32(mode):
    model, optimizer = prepared(mode, Forward(with_its_loss, seen=list))
    logits, loss = model(*VECTORS)
    labels = VECTORS[1]
    assert model.seen[-1].itemsize == 2 and logits.dtype is loss.dtype is torch.float32
    # Of the very logits, in FP32; a loss in 16 bits would be off by its rounding.
    assert torch.equal(loss, F.cross_entropy(logits, labels))
    loss.backward()
    optimizer.step()


@pytest.mark.parametrize("mode", MASTERS)
def test_a_weight_penalty_outside_of_the_model_counts_in_fp32(mode):
    model, optimizer = prepared(mode, nn.Linear(4, 4))
    x = torch.ones(2, 4)
    model(x).sum().backward()
    without = model.weight.grad.clone()
    optimizer.zero_grad()
    (model(x).sum() + 0.5 * model.weight.square().sum()).backward()
    assert torch.equal(model.weight.grad, without + model.weight)


@pytest.mark.parametrize("mode", ["fp16_master", "fp16_master_scaled", "amp"])
def test_weights_that_a_script_changes_are_used(mode):
    """`.data` tells nobody, in the clipping of a Wasserstein critic for instance."""
    model, optimizer = prepared(mode, nn.Linear(4, 4, bias=False))
    take_step(optimizer, lambda: model(torch.ones(2, 4)).sum())
    model.weight.data.fill_(0.5)
    assert torch.equal(model(torch.ones(1, 4)), torch.full((1, 4), 2.0))
    for number in range(6):  # between two calls, once nothing compares values any more
        with torch.no_grad():
            model.weight.fill_(number)
        assert torch.equal(model(torch.ones(1, 4)), torch.full((1, 4), 4.0 * number))


def codebook(model, x):
    """Put another tensor in the place of a buffer, and let one grow."""
    model.average = 0.5 * model.average + 1.0
    model.rows = torch.cat([model.rows, x.detach()[:1]])
    return model.net(x) + model.average


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.few(4)
def test_buffers_that_a_call_replaces_go_on(mode):
    buffers = {"average": lambda: torch.zeros(4), "rows": lambda: torch.zeros(0, 4)}
    model, _ = prepared(mode, Forward(codebook, net=lambda: nn.Linear(4, 4), **buffers))
    for _ in range(3):
        model(torch.ones(2, 4))
    assert model.average.tolist() == [1.75] * 4 and model.rows.shape == (3, 4)
    assert model.average.dtype is (next(model.parameters()).dtype)


@pytest.mark.parametrize("mode", ["fp32", "fp16_master_scaled", "bf16_master"])
def test_a_buffer_that_a_call_gives_up_is_gone(mode):
    def once(model, x):
        shift, model.shift = model.shift, None
        return model.net(x) if shift is None else model.net(x) + shift

    buffers = {"shift": lambda: torch.full((4,), 0.5)}
    model, _ = prepared(mode, Forward(once, net=lambda: nn.Linear(4, 4), **buffers))
    first, second = (model(torch.ones(2, 4)) for _ in range(2))
    assert model.shift is None
    assert_close(first - second, torch.full((2, 4), 0.5), rtol=0, atol=4 * 2.0**-8)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.few(4)
def test_a_weight_that_is_no_number_makes_a_loss_that_is_none(mode):
    model, optimizer = prepared(mode)
    with torch.no_grad():
        model.norm.weight[0] = torch.nan
    assert take_step(optimizer, lambda: loss_of(model)).isnan()


class Biased(nn.Module):
    """Adds to attention what it makes itself, in FP32 or in the dtype of what it adds to."""

    def __init__(self, kind, in_fp32):
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.in_fp32 = kind, in_fp32
        self.embed, self.attention = nn.Linear(4, 8), nn.MultiheadAttention(8, 2)

    def forward(self, x):
        x = self.embed(x)
        bias = -0.1 * torch.arange(36.0).view(6, 6)
        bias = bias if self.in_fp32 else bias.to(x.dtype)
        if self.kind == "function":
            return F.scaled_dot_product_attention(x, x, x, bias)
        return self.attention(x, x, x, attn_mask=bias, need_weights=self.kind == "weights")[0]


@pytest.mark.parametrize("mode", HALF_WEIGHTS)
@pytest.mark.parametrize("kind", ["function", "layer", "weights"])
@pytest.mark.few
def test_a_mask_of_attention_is_in_the_dtype_of_the_query(mode, kind):
    """CUDA's kernels refuse another one; a CPU's take it."""
    found = []
    for in_fp32 in (True, False):
        model, _ = prepared(mode, Biased(kind, in_fp32))
        model(torch.linspace(-1, 1, 24).view(6, 4)).square().sum().backward()
        found.append([own.grad for own in model.parameters() if own.grad is not None])
    assert_same_bits(*found)


def test_backward_runs_in_the_arithmetic_of_its_own_model():
    """Whatever else was prepared before: 8192 ones are 8192, not 2048."""
    others = [prepared("fp16_master", nn.Linear(2, 2), native=True) for _ in range(8)]
    for other, _ in others:
        other(torch.ones(1, 2))
    model, optimizer = prepared("fp16_master", nn.Embedding(4, 3))
    model(torch.zeros(8192, dtype=torch.long)).sum().backward()
    assert model.weight.grad[0].tolist() == [8192.0] * 3


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.few(4)
def test_gradients_of_weights_that_no_optimizer_holds_are_unscaled_too(mode):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    plain = copy.deepcopy(model)
    inner = torch.optim.SGD(model[1].parameters(), 1.0)
    model, optimizer = mprun.prepare(model, inner, mode)
    norms = []
    for own in (model, plain):
        (own(torch.ones(2, 4)).square().mean() * 0.1).backward()
        norms.append(float(nn.utils.clip_grad_norm_(own.parameters(), 1.0)))
    # Some dozen roundings to BF16's 8 bits.
    assert norms[0] == pytest.approx(norms[1], rel=0.05)
    before = model[0].weight.detach().clone()
    optimizer.step()
    assert torch.equal(model[0].weight, before) and optimizer.state_dict()


@pytest.mark.parametrize("mode", SCALED)
@pytest.mark.parametrize("through_model", [True, False])
def test_a_script_that_steps_only_where_gradients_are_finite_gets_to_step(mode, through_model):
    model, optimizer = prepared(mode, nn.Linear(4, 2), lr=0.001)
    taken = 0
    for _ in range(20):
        (model if through_model else optimizer).zero_grad()
        (model(torch.ones(2, 4)).square().sum() * 1e3).backward()
        if nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite():
            optimizer.step()
            taken += 1
    assert taken > 5


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.few(4)
def test_a_backward_pass_that_breaks_off_leaves_gradients_as_they_were(mode):
    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ValueError("no")

    model, optimizer = prepared(mode, nn.Linear(4, 4))
    (model(torch.ones(2, 4)).square().mean() * 0.1).backward()
    before = model.weight.grad.clone()
    with pytest.raises(ValueError, match="no"):
        Breaks.apply(model(torch.ones(2, 4))).sum().backward()
    assert torch.equal(model.weight.grad, before)


def test_states_made_before_preparing_are_in_the_dtype_of_the_weights():
    model = nn.Linear(4, 4)
    model, optimizer = mprun.prepare(model, torch.optim.Adagrad(model.parameters()), "fp16_naive")
    assert all(state["sum"].dtype is torch.float16 for state in optimizer.state.values())


def test_statistics_collected_without_gradients_are_kept_by_a_skip():
    model, optimizer = prepared("amp")
    with torch.no_grad():
        model(IMAGES)
    take_step(optimizer, lambda: loss_of(model) * torch.inf)
    assert mprun.state_of(optimizer).last.found_inf == 1 and model.norm.num_batches_tracked == 1


def test_what_cuda_cannot_compute_in_fp16_an_override_computes():
    def step(**options):
        model = nn.Sequential(parametrizations.orthogonal(nn.Linear(4, 8)), nn.Linear(8, 1))
        model, optimizer = prepared("fp16_master", model, **options)
        take_step(optimizer, lambda: model(torch.randn(2, 4)).sum())

    with pytest.raises(NotImplementedError, match="set fp32 for its module in overrides"):
        step()
    step(overrides={"0": "fp32"})


@pytest.mark.parametrize("mode", ["fp16_naive", "bf16_stochastic"])
def test_torch_func_differentiates_a_model_without_a_scale(mode):
    model = nn.Linear(32, 32).requires_grad_(False)
    mprun.prepare(model, precision=mode)
    given = torch.randn(4, 32, requires_grad=True)
    model(given).sum().backward()
    found = torch.func.grad(lambda x: model(x).sum())(given.detach())
    assert torch.equal(found, given.grad)


def test_a_layer_of_another_dtype_is_refused_at_the_next_call():
    model, _ = prepared("fp16_master_scaled", nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    model[1] = nn.Linear(8, 8).half()
    with pytest.raises(RuntimeError, match="float16"):
        model(torch.ones(1, 8))


class Bounded(nn.Linear):
    """A layer that bounds the norm of its weight in `forward`, by `.data` or a counted write."""

    by_data = False

    def forward(self, given):
        with torch.no_grad():
            bounded = torch.renorm(self.weight, 2, 0, 0.25)
            if self.by_data:
                self.weight.data = bounded
            else:
                self.weight.copy_(bounded)
        # Autograd keeps the FP32 weight itself.
        return given @ (self.weight * self.weight.square().sum(1, keepdim=True).rsqrt()).t()


@pytest.mark.parametrize("by_data", [False, True], ids=["copied", "by_data"])
@pytest.mark.parametrize(
    "mode, overrides",
    [("amp", None), ("fp16_master_scaled", {"1": "fp32"}), ("bf16_master", {"1": "fp32"})],
    ids=["amp", "half_weights", "no_scale"],
)
@pytest.mark.few
def test_an_fp32_weight_written_in_forward_is_none_of_torchs_in_place_errors(
    mode, overrides, by_data
):
    """Autograd counts a write once, the script's own: the weight is used after it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Bounded(8, 4, bias=False))
    model[1].by_data = by_data
    _, optimizer = prepared(mode, model, overrides=overrides)
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(2):  # the second call of a step has the stand-in of the first
            model(torch.randn(16, 8)).square().mean().backward()
        norms = model[1].weight.detach().norm(dim=1)
        # renorm multiplies by 0.25 / (norm + 1e-7); a norm of 8 values rounds at most 8 times.
        assert bool((norms <= 0.25 * (1 + 9 * 2**-24)).all())
        optimizer.step()
    assert mprun.state_of(optimizer).last.found_inf in (None, 0)


def leaves_torch_as_it_was():
    before = torch.autograd._engine_run_backward

    def train(mode):
        model, optimizer = prepared(mode, nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 2)))
        take_step(optimizer, lambda: model(torch.ones(1, 16)).sum())
        assert torch.autograd._engine_run_backward is not before

    # Both draw random bits: what is left of the first goes while the second is made.
    for mode in ("nvfp4", "nvfp4"):
        train(mode)
    gc.collect()
    assert torch.autograd._engine_run_backward is before
    assert not of_torch._global_optimizer_pre_hooks and not of_torch._global_optimizer_post_hooks


@pytest.mark.slow
def test_torch_is_as_it_was_once_the_last_model_is_gone():
    process = forkserver().Process(target=leaves_torch_as_it_was)
    process.start()
    process.join()
    assert process.exitcode == 0


@pytest.mark.parametrize("mode", ["fp32", "amp", "fp16_master_scaled", "bf16_stochastic"])
def test_a_dropped_model_goes_though_nothing_was_propagated_and_its_loss_can_be(mode):
    gradients = []
    for drops in (False, True):
        torch.manual_seed(0)
        model, optimizer = prepared(mode, Forward(keeps_hidden))  # in an attribute
        model(INPUTS)
        loss = model(INPUTS).square().mean()
        weight, gone = model.net[0].weight, weakref.ref(model)
        if drops:
            del model, optimizer
            gc.collect()
            assert gone() is None
        loss.backward()
        gradients.append(weight.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.few(4)
def test_hooks_of_a_parameter_that_no_pass_reaches_are_not_called(mode):
    model = net()
    model.unused = nn.Linear(2, 2)
    called = []
    model, _ = prepared(mode, model)
    model.unused.weight.register_hook(called.append)
    model.unused.weight.register_post_accumulate_grad_hook(called.append)
    loss_of(model).backward()
    assert not called and model.unused.weight.grad is None


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fp32", "amp", "fp16_master_scaled", "fp8_rowwise"])
def test_an_exported_program_is_the_learned_model_in_fp32(mode):
    model, optimizer = prepared(mode)
    train(model, optimizer, steps=2)
    model.eval()
    with torch.no_grad():
        program = torch.export.export(model, (IMAGES,))
        assert torch.equal(program.module()(IMAGES), model(IMAGES))
    train(model.train(), optimizer, steps=1)  # it goes on in its mode


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("mode", ["fp32", "amp", "fp16_master_scaled", "fp8_rowwise"])
@pytest.mark.parametrize("steps", [0, 2, 5])
def test_a_traced_model_is_the_learned_one_in_fp32(mode, steps):
    """torch.onnx.export without dynamo traces, too."""
    model, optimizer = prepared(mode)
    train(model, optimizer, steps=steps)
    model.eval()
    for context in (torch.no_grad, torch.enable_grad):
        with context():
            traced = torch.jit.trace(model, (IMAGES,))
        with torch.no_grad():
            assert torch.equal(traced(IMAGES), model(IMAGES))
    train(model.train(), optimizer, steps=1)


@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("mode", ["fp32", "fp16_master_scaled", "fp16_naive"])
def test_what_scripts_a_model_is_told_to_script_the_saved_one(mode):
    model, _ = prepared(mode, nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    with raises_line(AttributeError, "torch.jit.script", "torch.save"):
        torch.jit.script(model)
    with torch.no_grad():
        scripted = torch.jit.script(reloaded(model, weights_only=False))
        assert torch.equal(scripted(torch.ones(2, 4)), model.eval()(torch.ones(2, 4)))


@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning", "ignore::DeprecationWarning")
def test_16_bit_weights_are_exported_by_the_plain_model_that_loads():
    model, _ = prepared("fp16_naive")
    model.eval()
    for export in (torch.export.export, torch.jit.trace):
        with raises_line(RuntimeError, "save the model"):
            export(model, (IMAGES,))
    with torch.no_grad():
        program = torch.export.export(reloaded(model, weights_only=False), (IMAGES,))
        assert torch.equal(program.module()(IMAGES), model(IMAGES))


class Lookahead(torch.optim.Optimizer):
    """As timm's: it shares groups with the optimizer that it wraps, and does not call __init__."""

    def __init__(self, base):
        self._base_optimizer = base
        self.param_groups, self.defaults, self.state = base.param_groups, base.defaults, {}
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}
        self.slow = {own: own.detach().clone() for own in base.param_groups[0]["params"]}

    @torch.no_grad()
    def step(self, closure=None):
        self._base_optimizer.step(closure)
        for own, slow in self.slow.items():
            own.copy_(slow.add_(own - slow, alpha=0.5))

    def state_dict(self):
        return self._base_optimizer.state_dict()


@pytest.mark.parametrize("mode", [None, "amp", "fp16_master_scaled"])
def test_a_wrapper_steps_through_the_optimizer_that_it_wraps(mode):
    """With bits of the plain script in FP32; skips, and keeps the loss scale in the state."""
    losses = []
    for own in ("fp32", mode):
        model = net()
        wrapper = Lookahead(sgd(model.parameters()))
        if own is not None:
            assert mprun.prepare(model, wrapper, own) == (model, wrapper)
        losses.append(train(model, wrapper))
    if mode is None:
        assert losses[0] == losses[1]
        return
    assert losses[0] == pytest.approx(losses[1], rel=0.05)  # some roundings to 11 bits a step
    assert mprun.state_of(wrapper).optimizer is wrapper._base_optimizer
    before = [own.detach().clone() for own in model.parameters()]
    slow = {own: one.clone() for own, one in wrapper.slow.items()}
    take_step(wrapper, lambda: loss_of(model) * torch.inf)
    for own, was in zip(model.parameters(), before, strict=True):
        assert torch.equal(own, slow[own] + 0.5 * (was - slow[own]))
    assert "loss_scale" in wrapper.state_dict()
