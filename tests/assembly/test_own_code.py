"""The user's own data and networks are checked before step 1, and used as given if correct."""

import random
import sys

import numpy as np
import pytest
import torch

from mprun.cli import main

from ..helpers import mixed, refused

MODULE = '''
import random

import numpy as np
import torch
from torch import nn

from mprun.data import DatasetSource, TokenSource

NOT_A_FUNCTION = 3


class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.rand(1, 8, 8), index % 3


def data(batch_size, seed, device, classes=3, image_size=8):
    random.random(), np.random.rand(), torch.rand(1)  # no weight may depend on it
    own = {"batch_size": batch_size, "seed": seed, "device": device, "num_classes": classes}
    return DatasetSource(Images(), Images(), **own)


def text(batch_size, seed, device, sequence_length=4):
    ids = torch.arange(600) % 11
    own = {"batch_size": batch_size, "seed": seed, "device": device}
    return TokenSource(ids, ids[:200], vocab_size=11, sequence_length=sequence_length, **own)


class Mixed(nn.Module):
    """Convolution, norm layers, attention, dropout, a buffer outside the state."""

    def __init__(self, classes, width=8):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.inner, self.drop = nn.LayerNorm(width), nn.Dropout(0.2)
        scale = torch.linspace(0.5, 1.5, 3)[-1].item()  # no value on a meta device
        self.register_buffer("places", torch.full((64, width), scale), persistent=False)
        self.head = nn.Linear(width, classes)

    def forward(self, images):
        x = self.norm(self.conv(images)).relu().flatten(2).transpose(1, 2) + self.places
        x = self.inner(x + self.attention(x, x, x, need_weights=False)[0])
        return self.head(self.drop(x.mean(1)))


def mixed(data, width=8):
    random.random(), np.random.rand()
    return Mixed(data.num_classes, width)


class Recurrent(nn.Module):
    """A recurrent layer of any kind, input and output embedding tied."""

    def __init__(self, kind, vocab_size, width=8):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.layer = getattr(nn, kind)(width, width)
        self.logits = nn.Linear(width, vocab_size)
        self.logits.weight = self.embedding.weight
        self.single = kind != "LSTM"

    def forward(self, tokens, state):
        if self.single:
            state = None if state is None else state[0]
        outputs, state = self.layer(self.embedding(tokens), state)
        return self.logits(outputs), (state,) if self.single else state


def recurrent(data, kind="GRU"):
    return Recurrent(kind, data.vocab_size)


class Bag(nn.Module):
    """Carries nothing on."""

    def __init__(self, vocab_size):
        super().__init__()
        self.logits = nn.Sequential(nn.Embedding(vocab_size, 8), nn.Linear(8, vocab_size))

    def forward(self, tokens, state):
        return self.logits(tokens), ()


def bag(data):
    return Bag(data.vocab_size)


def sparse(data):
    network = Bag(data.vocab_size)
    next(m for m in network.modules() if isinstance(m, nn.Embedding)).sparse = True
    return network


class Fourier(Mixed):
    def __init__(self, classes):
        super().__init__(classes)
        self.filter = nn.Parameter(torch.ones(1, 1, 8, 8, dtype=torch.complex64))

    def forward(self, x):
        filtered = torch.fft.ifft2(torch.fft.fft2(x.float()) * self.filter).real
        return super().forward(filtered.to(x.dtype))


def fourier(data):
    return Fourier(data.num_classes)


def pair(data, size=8):
    image = nn.Unflatten(1, (1, size, size))
    generator = nn.Sequential(nn.Linear(5, size * size), nn.Tanh(), image)
    return generator, nn.Sequential(nn.Flatten(), nn.Linear(64, 1), nn.Flatten(0))


# Networks that do not fit.
def always(make):
    return lambda data: make()


ONLY = Mixed(3)
WIDTHS = iter(range(8, 800, 8))
same_again = always(lambda: ONLY)
grows = always(lambda: Mixed(3, next(WIDTHS)))
half = always(lambda: Mixed(3).half())
lazy = always(lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(3)))
empty = always(nn.ReLU)
few = always(lambda: Mixed(2))
fails = always(lambda: nn.Sequential(nn.Flatten(), nn.Linear(3, 3)))
no_state = always(lambda: nn.Embedding(11, 11))
bare_state = always(lambda: BareState("GRU", 11))
broken = always(lambda: {}["width"])
no_product = always(
    lambda: nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Unflatten(1, (2, 32)), Sum())
)


def shared(data):
    network = Mixed(3)
    network.head = ONLY.head
    return network


class Sum(nn.Module):
    def forward(self, x):
        return torch.stack([x.sum((1, 2))] * 3, 1)


class BareState(Recurrent):
    def forward(self, tokens, state):
        outputs, state = self.layer(self.embedding(tokens), state)
        return self.logits(outputs), state


# Sources that are none.
class Source:
    num_classes, vocab_size = 3, 11
    batches_per_epoch, samples_per_batch, sha256 = 4, 2, "x"
    description = {"name": "own", "train_samples": 8, "eval_samples": 2}

    def __init__(self, first, **changes):
        self.first = first
        for name, value in changes.items():
            setattr(self, name, value)

    def train_batch(self, index):
        return self.first()

    def eval_batches(self):
        yield self.first()


LABELS = torch.tensor([0, 2])


def good():
    return torch.ones(2, 1, 8, 8), LABELS


def made(first=good, **changes):
    return lambda **own: Source(first, **changes)


ones = made()
no_hash = made(sha256=None)
no_name = made(description={"train_samples": 8})
a_float = made(batches_per_epoch=4.0)
nothing = made(eval_batches=lambda: iter(()))
impure = made(lambda: (torch.rand(2, 1, 8, 8), LABELS))
doubles = made(lambda: (torch.ones(2, 1, 8, 8).double(), LABELS))
labels = made(lambda: (torch.ones(2, 1, 8, 8), torch.tensor([0, 3])))
alone = made(lambda: torch.ones(2, 1, 8, 8))
raises = made(lambda: [][1])
wide = made(lambda: (torch.full((2, 3, 32, 32), 1.5), LABELS))


def incomplete(**own):
    return object()
'''
COMMON = ["device=cpu", "threads=1", "train.steps=3", "data.batch_size=4"]
IMAGES = ["model=custom", "data.factory=owncode:data"]
TEXT = ["model=custom", "data.factory=owncode:text", "model.task=language_model"]


@pytest.fixture(autouse=True)
def own_modules(tmp_path, monkeypatch):
    """Modules of a user in the current folder; forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "owncode.py").write_text(MODULE)
    (tmp_path / "ownbad.py").write_text("x = 1\nraise KeyError('here')\n")
    (tmp_path / "ownexit.py").write_text("raise SystemExit(7)\n")
    (tmp_path / "ownleaves.py").write_text("import sys\n\ndef f(*a, **b):\n    sys.exit(0)\n")
    (tmp_path / "ownsyntax.py").write_text("def f(:\n")
    (tmp_path / "ownneeds.py").write_text("import no_such_library\n")
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("own"):
            del sys.modules[name]


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        # the function
        ("data.factory=ownnone:f", "data.factory=ownnone:f: no module named 'ownnone'"),
        ("data.factory=owncode.deep:f", "no module named 'owncode.deep'"),
        (
            "data.factory=ownbad:f",
            "importing the module failed: KeyError: 'here' (ownbad.py, line 2)",
        ),
        ("data.factory=ownexit:f", "importing the module failed: SystemExit: 7"),
        # A command that ends with 0 would be taken for a run that is done.
        ("data.factory=ownleaves:f", "data.factory=ownleaves:f: SystemExit: 0 (ownleaves.py, line"),
        ("model.factory=ownleaves:f", "model.factory=ownleaves:f: SystemExit: 0 (ownleaves.py"),
        ("data.factory=ownsyntax:f", "importing the module failed: SyntaxError"),
        ("data.factory=ownneeds:f", "ModuleNotFoundError: No module named 'no_such_library'"),
        ("data.factory=owncode:dato", "owncode has no 'dato'; did you mean 'data'?"),
        ("data.factory=owncode:NOT_A_FUNCTION", "is a int, must be a function"),
        ("data.factory=owncode:mixed", "missing a required argument: 'data'|batch_size, seed"),
        ("model.factory=owncode:mixed model.options.wdth=3", "keyword argument 'wdth'|data, wdth"),
        ("data.options.batch_size=3", "data.options.batch_size|set data.batch_size"),
        ("model.factory=owncode:broken", "KeyError: 'width' (owncode.py, line "),
        ("data.options.classes=0", "num_classes=0 is not allowed"),
        # the source
        ("data.factory=owncode:incomplete", "returned a object without train_batch"),
        ("data.factory=owncode:no_hash", "sha256 of its source is None"),
        ("data.factory=owncode:no_name", "description of the returned source|name"),
        ("data.factory=owncode:a_float", "batches_per_epoch of its source is 4.0"),
        ("data.factory=owncode:impure", "train_batch(0) of its source differs"),
        ("data.factory=owncode:doubles", "train_batch(0)|float64|must be float32"),
        ("data.factory=owncode:labels", "labels from 0 to 3|num_classes=3"),
        ("data.factory=owncode:alone", "must be a pair of tensors"),
        ("data.factory=owncode:raises", "train_batch(0) of its source: IndexError|owncode.py"),
        (
            "data.factory=owncode:nothing",
            "eval_batches() of its source must yield at least one batch, got none",
        ),
        ("data.factory=owncode:text", "no num_classes, which a classifier needs"),
        (
            "model=dcgan data=custom data.image_size=32",
            "images of 8x8 pixels, but model.image_size",
        ),
        (
            "model=dcgan data=custom data.factory=owncode:wide data.image_size=32",
            "values from 1.5 to 1.5, must be in [-1, 1]",
        ),
        ("model=resnet50 data=custom", "model=resnet50: forward|3 channels, but got 1"),
        ("model=lstm_lm data=custom", "no vocab_size, which a language model needs"),
        ("data.batch_size=25", "batch_size=25 is not allowed: must be 1 to 24"),
        # the network
        ("model.factory=owncode:data", "missing a required argument"),
        ("model.factory=builtins:dict", "TypeError|not iterable"),
        ("model.factory=owncode:same_again", "returned the same network twice"),
        ("model.factory=owncode:shared", "returned the same network twice"),
        ("model.factory=owncode:half", "is torch.float16; build the network in float32"),
        ("model.factory=owncode:lazy", "1.weight is a lazy layer"),
        ("model.factory=owncode:empty", "no parameter to train"),
        ("model.factory=owncode:few", "forward must return|[2, 3], but returned float32 [2, 2]"),
        ("model.factory=owncode:fails", "forward of float32 [2, 1, 8, 8] in FP32: RuntimeError"),
        ("model.factory=owncode:pair", "must return a torch.nn.Module, not a tuple"),
        ("model.task=gan", "must return (generator, discriminator), not a Mixed"),
        ("model.factory=owncode:pair model.task=gan", "generator of float32 [2, 100]"),
        (
            "model.factory=owncode:pair model.task=gan model.latent_size=5 model.options.size=4",
            "returned float32 [2, 1, 4, 4], but the images of the data are [2, 1, 8, 8]",
        ),
        ("precision=fp16_master model.factory=owncode:no_product", "no operation of the network"),
        ("precision=fp16_master precision.overrides.zz=fp32", "zz"),
    ],
)
def test_images_what_does_not_fit_is_one_line(overrides, wanted, capsys, tmp_path):
    before = sorted(tmp_path.iterdir())
    command = [*IMAGES, "model.factory=owncode:mixed", *COMMON]
    keys = {override.partition("=")[0] for override in overrides.split()}
    kept = [override for override in command if override.partition("=")[0] not in keys]
    if "model" in keys:
        kept = [override for override in kept if not override.startswith("model.")]
    line = refused(capsys, *kept, *overrides.split(), says=wanted.split("|"))
    assert len(line) <= 201
    assert sorted(p for p in tmp_path.iterdir() if p.name != "__pycache__") == before


@pytest.mark.parametrize(
    ("network", "wanted"),
    [
        ("no_state", "TypeError"),
        ("bare_state", "as a tuple of tensors (empty|returned float32 [1, 2, 8] as state"),
        ("mixed", "AttributeError|num_classes"),
    ],
)
def test_text_what_does_not_fit_is_one_line(network, wanted, capsys):
    refused(capsys, *TEXT, f"model.factory=owncode:{network}", *COMMON, says=wanted.split("|"))


MODES = ["fp32", "fp16_naive", "fp16_master_scaled", "amp", "bf16_master", "amp_bf16"]
PAIR = ["model.factory=owncode:pair", "model.task=gan"]
OWN = {
    "mixed": [*IMAGES, "model.factory=owncode:mixed", "model.label_smoothing=0.1"],
    "pair": [*IMAGES, *PAIR, "model.latent_size=5", "compare.metric=loss"],
    "bag": [*TEXT, "model.factory=owncode:bag"],
    "sparse": [*TEXT, "model.factory=owncode:sparse", "optim=sgd_plain"],
    "complex": [*IMAGES, "model.factory=owncode:fourier", "optim=sgd"],
    **{
        kind: [*TEXT, "model.factory=owncode:recurrent", f"model.options.kind={kind}"]
        for kind in ("GRU", "RNN", "LSTM")
    },
}
SOME = {("sparse", "amp"), ("complex", "fp16_master_scaled")}
SOME |= {("mixed", "amp"), ("GRU", "fp16_master_scaled"), ("bag", "fp16_naive"), ("pair", "fp32")}


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(name, mode, marks=() if (name, mode) in SOME else pytest.mark.slow)
        for name in OWN
        for mode in MODES
    ],
)
def test_every_kind_of_network_trains_and_is_evaluated_in_every_mode(name, mode, build_run):
    built = build_run(*OWN[name], *COMMON, f"precision={mode}", "data.batch_size=8")
    first = float(built.task.train_step(0)["loss"])
    for step in range(1, 6):
        loss = float(built.task.train_step(step)["loss"])
    assert np.isfinite([first, loss]).all()
    values = built.task.evaluate()
    assert np.isfinite(list(values.values())).all()
    if mode != "fp32":
        assert built.forward_context.rerouted()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fp16_master_scaled", "amp"])
def test_a_network_with_sparse_gradients_is_watched_and_probed(mode):
    command = [*OWN["sparse"], *COMMON, f"precision={mode}", "numerics=probes", "numerics.every=1"]
    assert main(command) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        ("owncode:sparse optim=adam", "optim.name=adam: torch has none for sparse gradients"),
        ("owncode:sparse optim=sgd optim.weight_decay=0.1", "optim.weight_decay=0.1: torch has"),
        (
            "owncode:sparse optim=sgd_plain optim.implementation=fused",
            "no fused kernel takes (allowed: auto",
        ),
    ],
)
def test_what_torch_cannot_update_sparsely_is_refused_before_training(overrides, wanted, capsys):
    refused(capsys, *TEXT, *COMMON, *f"model.factory={overrides}".split(), says=wanted)


def generators():
    """The states of all three generators of random numbers."""
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def test_the_trial_and_the_data_take_no_random_number_of_the_run(build_run):
    import importlib

    built = build_run(*OWN["mixed"], *COMMON)
    state = torch.get_rng_state()
    owncode = importlib.import_module("owncode")
    torch.manual_seed(0)
    expected = owncode.Mixed(3)
    assert torch.equal(torch.get_rng_state(), state)
    for name, tensor in built.task.learner.model.state_dict().items():
        assert torch.equal(tensor, expected.state_dict()[name])
    # Nor does an evaluation, though the function draws when it is called again.
    before = generators()
    built.task.evaluate()
    assert generators() == before


@pytest.mark.parametrize("mode", ["fp16_master", "fp16_naive"])
def test_an_evaluation_has_tied_weights_once_and_the_digits_that_the_mode_keeps(mode):
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.logits = torch.nn.Embedding(7, 3), torch.nn.Linear(3, 7)
            self.logits.weight = self.embedding.weight
            self.register_buffer("places", torch.arange(3.0) / 3, persistent=False)

    torch.manual_seed(0)
    model = Tied()
    exact = model.logits.weight.detach().clone(), model.places.clone()
    if mode == "fp16_naive":
        exact = tuple(own.half().float() for own in exact)
    with mixed(model, mode).evaluating(in_mode=False) as own:
        assert own.logits.weight is own.embedding.weight
        assert torch.equal(own.logits.weight, exact[0])
        assert torch.equal(own.places, exact[1])


def test_evaluation_in_fp32_is_that_of_the_network_itself(build_run):
    built = build_run(*OWN["mixed"], *COMMON)
    model, loss = built.task.learner.model.eval(), torch.nn.CrossEntropyLoss(reduction="sum")
    with torch.no_grad():
        losses = [loss(model(images), labels) for images, labels in built.data.eval_batches()]
    expected = float(sum(losses)) / 24
    # The copy holds the same FP32 numbers; the sum over batches is in float64 there.
    assert built.task.evaluate()["loss"] == pytest.approx(expected, rel=1e-6)
