"""Tiny real models for contenders: one of each kind of task, a second's work each."""

import pytest
import torch

from benchmarks.suite import contenders as registry
from mprun.config.compose import compose_config
from mprun.extensions.bench.cases import Case
from mprun.extensions.bench.runner import RotatingSource, rotating_batches
from mprun.precision import get_policy, pin_math_flags, why_no_lstm

# Momentum, weight decay and BatchNorm: what SGD can get wrong.
NETWORK = """
from torch import nn

def cnn(data):
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, data.num_classes),
    )
"""
IMAGES = ("data=synthetic_images", "data.num_classes=10")
TOKENS = (
    "data=synthetic_tokens",
    "data.vocab_size=100",
    "data.batch_size=8",
    "data.sequence_length=8",
    "data.train_tokens=200",  # three batches an epoch: the state starts anew within a test
)
SIZES = ("data.image_size=32", "data.batch_size=8")
MODELS = {
    "classification": (
        *("model=custom", "model.factory=peer_network:cnn", "optim.weight_decay=0.0005"),
        *(*IMAGES, "data.image_size=16", "data.batch_size=32", "data.train_size=128"),
    ),
    "reconstruction": ("model=conv_autoencoder", "model.width=4", *SIZES),
    "language_model": ("model=lstm_lm", "model.embedding_size=32", "model.hidden_size=32", *TOKENS),
    "gan": (
        *("model=dcgan", "model.generator_width=8", "model.discriminator_width=8"),
        *(*IMAGES, *SIZES, "data.value_range=tanh"),
    ),
}


@pytest.fixture
def tiny_network(tmp_path, monkeypatch):
    """Makes the factory of MODELS["classification"] importable."""
    (tmp_path / "peer_network.py").write_text(NETWORK)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.fixture
def make_peer(tiny_network):
    """``make_peer(kind, mode, name, *overrides, device="cpu")``; ends what it made."""
    made = []

    def make(kind, mode, name, *overrides, device="cpu"):
        if (package := registry.CONTENDERS[name].package) is not None:
            pytest.importorskip(package, reason=f"{name} needs the package {package}")
        if name == "accelerate":
            forget_accelerate()
        case = Case(kind, (*MODELS[kind], *overrides), mode, name)
        peer = registry.make(case, torch.device(device))
        made.append(peer)
        return peer

    yield make
    for peer in made:
        if hasattr(peer, "close"):
            peer.close()
    # Flags are process-wide: no test may hand its own to the next one.
    torch.set_float32_matmul_precision("highest")
    pin_math_flags("ieee")


def forget_accelerate():
    """Accelerate keeps one precision per process; a child of the bench has one case."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def needs_kernels(kind, mode, device="cpu"):
    """Skip an LSTM in 16 bits where torch has none: most CPUs lack one."""
    if kind == "language_model" and (why := why_no_lstm(get_policy(mode), torch.device(device))):
        pytest.skip(why)


def own_losses(build_run, kind, mode, *overrides, steps, device="cpu"):
    """(losses of mprun's own task on the same rotating batches, the run)."""
    native = ["cpu_half=native"] if device == "cpu" else []
    needs_kernels(kind, mode, device)
    every = [*MODELS[kind], f"precision={mode}", *native, *overrides]
    assert compose_config(every).config.precision.name == mode
    built = build_run(*every, device=device)
    built.task.data = RotatingSource(built.data, rotating_batches(built.data))
    rows = [built.task.train_step(step) for step in range(steps)]
    return torch.stack([row["loss"] for row in rows]), built


def offered(kind, mode, device="cpu"):
    """The names of the peers that can train this kind in this mode."""
    names = registry.PEERS
    return [n for n in names if registry.available(n, mode, kind, torch.device(device)) is None]
