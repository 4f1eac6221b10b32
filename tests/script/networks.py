"""Networks, batches and loops as a script has them."""

import copy
import io
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import mprun
from mprun.precision import get_policy
from mprun.prepared.copies import plain_copy

from ..shipped import OF_ANY_NETWORK
from .loops import classified

MODES = [mode for mode in OF_ANY_NETWORK if mode != "tf32"]  # which a CPU does not have
HALF_WEIGHTS = [mode for mode in MODES if get_policy(mode).param_dtype.itemsize == 2]
# Their own parameters are in 16 bits: there is no master copy that stays.
WITHOUT_MASTERS = [mode for mode in HALF_WEIGHTS if get_policy(mode).masters != "kept"]
SMALL = ["model=alexnet_2012", "model.width=0.125", "optim=sgd_alexnet"]
SMALL += ["data=digits_64", "data.batch_size=2"]


class Net(nn.Module):
    """Convolution, both kinds of norm, a buffer, dropout, and parts that are called directly."""

    def __init__(self, checkpoints=False):
        super().__init__()
        self.checkpoints = checkpoints
        self.conv = nn.Conv2d(1, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.body = nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), nn.ReLU(), nn.Dropout(0.1))
        self.head = nn.Linear(12, 4)
        self.register_buffer("shift", torch.randn(6) / 3)

    def features(self, images):
        return self.norm(self.conv(images)).relu().mean((2, 3))

    def forward(self, images):
        x = self.features(images) + self.shift
        x = checkpoint(self.body, x, use_reentrant=False) if self.checkpoints else self.body(x)
        return self.head(x)


def batches(count, size=8, seed=0):
    """(images, labels), the same for everybody."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        labels = torch.randint(4, (size,), generator=generator)
        yield torch.randn(size, 1, 5, 5, generator=generator) + 2 * labels.view(-1, 1, 1, 1), labels


def net(seed=0, **options):
    torch.manual_seed(seed)
    return Net(**options)


def loss_of(model):
    """Return the loss of the first batch."""
    return classified(model, *next(batches(1)))


def sgd(parameters, lr=0.1):
    return torch.optim.SGD(parameters, lr, momentum=0.9)


def prepared(mode="fp16_master_scaled", model=None, make=sgd, lr=0.1, **options):
    """(a model, its optimizer), prepared."""
    model = net() if model is None else model
    return mprun.prepare(model, make(model.parameters(), lr=lr), mode, **options)


def take_step(optimizers, loss_of, *given):
    """Take an ordinary step, of one optimizer or a list, by what `loss_of` returns; return it."""
    optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss = loss_of(*given)
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    return loss


def stepping(optimizer, loss_of):
    """A step as `mprun.probe` and `mprun.explain` take it, of what `loss_of` returns."""
    return partial(take_step, optimizer, loss_of)


def reloaded(value, **options):
    """Return what `torch.load` makes of the file that `torch.save` writes."""
    torch.save(value, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, **options)


def as_in_a_script(built):
    """The network and the optimizer of a built run as a script has them, with its loss scale."""
    learner = built.task.learner
    model, own = plain_copy(learner.model), learner.optimizer
    of_model = dict(zip(map(id, learner.model.parameters()), model.parameters(), strict=True))
    groups = [g | {"params": [of_model[id(p)] for p in g["params"]]} for g in own.param_groups]
    optimizer, scale = type(own)(groups), copy.deepcopy(learner.prepared.loss_scale)
    torch.manual_seed(built.task.seed)  # of random bits
    return mprun.prepare(model, optimizer, built.policy.name, scaler=scale)


def train(model, optimizer, steps=6, seed=0):
    """Losses of an ordinary loop; dropout begins at the same place for everybody."""
    torch.manual_seed(3)
    given = batches(steps, seed=seed)
    return [take_step(optimizer, classified, model, *batch).item() for batch in given]
