"""Every peer computes what mprun computes: the same losses from the same weights and batches."""

import math
import subprocess
import sys

import pytest
import torch

from benchmarks.suite import contenders as registry
from benchmarks.suite.peers.amp import make_tuned_amp
from benchmarks.suite.peers.loop import make_tuned_loop
from benchmarks.suite.peers.peer import SkipCount
from benchmarks.suite.peers.task import pin_flags, set_up
from mprun.errors import BadInput
from mprun.extensions.bench.cases import Case
from mprun.precision.policy import read_math_flags

from .peer_cases import MODELS, TOKENS, offered, own_losses

CPU = torch.device("cpu")
STEPS = 5
PLAIN = ("loop", "loop+", "timm")
EVERY = [(kind, "fp32", name) for kind in MODELS for name in offered(kind, "fp32")]
EVERY += [(kind, "amp_bf16", name) for kind in MODELS for name in offered(kind, "amp_bf16")]


@pytest.fixture(scope="module")
def known():
    return {}


def losses_of(peer, steps=STEPS):
    return torch.stack([peer.step() for _ in range(steps)])


@pytest.mark.parametrize("kind, mode, name", EVERY)
@pytest.mark.few(1)
def test_losses_equal_mprun_s_own(make_peer, build_run, known, kind, mode, name):
    if (kind, mode) not in known:
        known[kind, mode], _ = own_losses(build_run, kind, mode, steps=STEPS)
    expected = known[kind, mode]
    peer = make_peer(kind, mode, name)
    losses = losses_of(peer)
    if name.endswith("+") and mode == "amp_bf16":
        # NHWC kernels round elsewhere: one unit in the last place of bfloat16.
        torch.testing.assert_close(losses, expected, rtol=2**-8, atol=0)
    elif kind == "gan" and mode == "fp32" and name != "loop+":
        # mprun's Adam is the fused one, which rounds elsewhere, and near a gradient of 0 a rounding
        # changes the sign of an update: 7e-6 of the loss at the fourth step.
        torch.testing.assert_close(losses, expected, rtol=2e-5, atol=0)
    else:
        assert torch.equal(losses, expected)
    assert peer.skipped() == 0 and peer.first_use_s > 0
    assert len(set(expected.tolist())) == STEPS


# Settings of mprun, who has them, and the relative difference that rounding makes.
SETTINGS = {
    # The norm is a sum in another order: a few roundings of FP32.
    "clipping and a loss summed over time": (
        "language_model",
        ("train.clip_norm=0.5", "model.time_reduction=sum", "optim.lr=0.5"),
        offered("language_model", "fp32"),
        4 * 2**-23,
    ),
    "clipping two networks": ("gan", ("train.clip_norm=0.1",), offered("gan", "fp32"), 1e-5),
    # torch's fused and looped formulas of one optimizer differ in their last roundings.
    **{
        optim: ("classification", (f"optim={optim}", "optim.lr=0.01"), PLAIN, 1e-5)
        for optim in ("adamw", "adagrad")
    },
}


@pytest.mark.parametrize(
    "settings, name", [(settings, name) for settings in SETTINGS for name in SETTINGS[settings][2]]
)
@pytest.mark.few(2)
def test_settings_of_mprun_are_those_of_its_peers(make_peer, build_run, settings, name):
    kind, overrides, _, rtol = SETTINGS[settings]
    expected, _ = own_losses(build_run, kind, "fp32", *overrides, steps=STEPS)
    losses = losses_of(make_peer(kind, "fp32", name, *overrides))
    torch.testing.assert_close(losses, expected, rtol=rtol, atol=0)


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("name", ["loop", pytest.param("accelerate", marks=pytest.mark.slow)])
def test_dense_gradients_of_tables_learn_as_sparse_ones_do(make_peer, build_run, name):
    sizes = ("model.embedding_size=16", "model.hidden_size=32", "model.projection_size=16")
    more = ("model.sampled_softmax=20", "model.embedding_gradient_factor=8", "model.dropout=0")
    overrides = ("model=biglstm", *sizes, *more, "train.clip_norm=0.5", *TOKENS)
    expected, _ = own_losses(build_run, "language_model", "fp32", *overrides, steps=STEPS)
    peer = make_peer("language_model", "fp32", name, *overrides)
    torch.testing.assert_close(losses_of(peer), expected, rtol=1e-6, atol=0)
    assert peer.task.networks[0].embedding.weight.grad.shape == (100, 16)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.few(2)
def test_weights_are_mprun_s_and_no_flag_moves(make_peer, build_run, kind):
    built = build_run(*MODELS[kind], "precision=fp32")
    models = [learner.model for learner in built.task.learners.values()]
    own = [parameter.detach() for model in models for parameter in model.parameters()]
    flags = read_math_flags()
    for name in offered(kind, "fp32"):
        weights = list(make_peer(kind, "fp32", name).weights().values())
        assert len(weights) == len(own)
        assert all(torch.equal(a, b) for a, b in zip(weights, own, strict=True)), name
        assert read_math_flags() == flags, name


@pytest.mark.slow
# torch.compile looks at `.grad` of the generated images.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("kind", ["classification", "gan"])
def test_a_compiled_network_computes_the_same(make_peer, build_run, tiny_network, kind):
    expected, _ = own_losses(build_run, kind, "fp32", steps=3)
    task = set_up(Case(kind, MODELS[kind], "fp32", "loop+"), CPU)
    peer = make_tuned_loop(task, compiler="eager")
    assert peer.settings() == {"optimizer": "fused", "channels_last": False, "compile": "eager"}
    assert torch.equal(losses_of(peer, 3), expected)


def test_nhwc_reaches_weights_and_images(tiny_network):
    task = set_up(Case("", MODELS["classification"], "amp_bf16", "amp+"), CPU)
    peer = make_tuned_amp(task)
    peer.step()
    images, _ = peer.task.batch(0)
    weight = peer.task.networks[0][3].weight
    for tensor in (images, weight, weight.grad):
        assert tensor.is_contiguous(memory_format=torch.channels_last)
        assert not tensor.is_contiguous()


def test_the_trainer_takes_as_many_steps_as_asked_for(make_peer, build_run):
    expected, _ = own_losses(build_run, "reconstruction", "fp32", steps=6)
    peer = make_peer("reconstruction", "fp32", "trainer")
    losses, taken = [], []
    for steps in (1, 3, 2):
        losses.append(peer.run(steps))
        taken.append(peer._trainer.global_step)
    # The loss of the last step of each window. Between windows the trainer stands still.
    assert torch.equal(torch.stack(losses), expected[[0, 3, 5]])
    assert taken == [1, 4, 6]
    peer.close()
    assert not peer._thread.is_alive()


def test_what_fails_in_the_trainer_s_thread_is_raised(make_peer):
    peer = make_peer("reconstruction", "fp32", "trainer")
    peer.step()
    peer._module.network.register_forward_hook(lambda *_: 1 / 0)
    for _ in range(2):  # the thread has ended after the first one
        with pytest.raises(ZeroDivisionError):
            peer.step()


@pytest.mark.parametrize("fused", [False, True])
def test_skipped_updates_are_counted_by_step(fused):
    parameters = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
    optimizers = [torch.optim.SGD([p], 0.1, fused=fused) for p in parameters]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    skips = SkipCount(optimizers)
    totals, inf = [], math.inf
    # Which gradients overflow: none, the first's, both, none, the second's.
    for factors in ((1, 1), (inf, 1), (inf, inf), (1, 1), (1, inf)):
        for parameter, optimizer, factor in zip(parameters, optimizers, factors, strict=True):
            optimizer.zero_grad()
            scaler.scale((parameter * factor).sum()).backward()
            scaler.step(optimizer)
        scaler.update()
        skips.end_step()
        totals.append(skips.total())
    assert totals == [0, 1, 2, 2, 3]
    assert scaler.get_scale() == 4.0 / 2**3


def test_tf32_flags_can_be_read_by_the_older_functions_too(tiny_network):
    config = set_up(Case("", MODELS["classification"], "fp32", "loop"), CPU).config
    try:
        for math, precision in (("tf32", "high"), ("ieee", "highest")):
            config.precision.fp32_math = math
            pin_flags(config)
            assert torch.get_float32_matmul_precision() == precision
            for backend in (torch.backends.cuda.matmul, torch.backends.cudnn):
                assert backend.allow_tf32 == (math == "tf32")
            assert read_math_flags()["cudnn.rnn.fp32_precision"] == math
    finally:
        config.precision.fp32_math = "ieee"
        pin_flags(config)


@pytest.mark.parametrize(
    "override", ["optim.schedule=cosine", "train.accumulate=2", "optim.average_decay=0.9"]
)
def test_settings_that_no_peer_has_are_refused(tiny_network, override):
    case = Case("", (*MODELS["classification"], override), "fp32", "loop")
    with pytest.raises(BadInput, match=override.partition("=")[0]):
        registry.make(case, CPU)


def test_who_can_do_what(monkeypatch):
    def why(name, mode, kind="classification"):
        return registry.available(name, mode, kind, CPU)

    monkeypatch.setattr(
        registry, "find_spec", lambda package: None if package.endswith("has") else package
    )
    assert why("timm", "fp32") is None
    assert "classification only" in why("timm", "fp32", "gan")
    assert "compare with its amp" in why("fabric", "fp16_master_scaled")
    assert "10 to 60 times" in why("amp", "amp")
    assert "no TF32" in why("loop", "tf32")
    missing = registry.Entry("", "package_that_nobody_has", ("fp32",))
    monkeypatch.setitem(registry.PEERS, "nobody", missing)
    monkeypatch.setitem(registry.CONTENDERS, "nobody", missing)
    assert "not installed" in why("nobody", "fp32")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fp8_tensorwise", "fp8_rowwise"])
def test_torchao_trains_the_same_layers_in_fp8(mode):
    float8 = pytest.importorskip("torchao.float8.float8_linear")
    constant = ("optim.schedule=constant", "optim.warmup_updates=0", "data.batch_size=2")
    own, peer = (
        registry.make(Case("gpt", ("model=gpt", *TOKENS[:2], *constant), mode, name), CPU)
        for name in ("mprun", "torchao")
    )
    (network,) = peer.task.networks
    converted = {n for n, m in network.named_modules() if isinstance(m, float8.Float8Linear)}
    (learner,) = own.task.learners.values()
    layers = {n for n, m in learner.model.named_modules() if isinstance(m, torch.nn.Linear)}
    assert converted == layers
    losses = [[float(contender.step()) for _ in range(STEPS)] for contender in (own, peer)]
    # Weights are in BF16 in one and in FP32 in the other: a rounding of BF16 in each step.
    assert losses[0][0] == pytest.approx(losses[1][0], rel=2**-8)
    assert losses[0] == pytest.approx(losses[1], rel=STEPS * 2**-8)


@pytest.mark.slow
def test_a_plain_loop_loads_no_package_of_a_peer():
    script = (
        "import sys, torch\n"
        "from benchmarks.suite import contenders as registry\n"
        "from mprun.extensions.bench.cases import Case\n"
        "for name in registry.PEERS:\n"
        "    registry.available(name, 'fp32', 'reconstruction', torch.device('cpu'))\n"
        "case = Case('', ('model=conv_autoencoder', 'model.width=1'), 'fp32', 'loop')\n"
        "registry.make(case, torch.device('cpu'))\n"
        "print({'timm', 'lightning', 'accelerate'} & set(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr
