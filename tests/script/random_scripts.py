"""Random training scripts: networks, optimizers and steps that meet in ways nobody has thought of.

`Script(seed)` is one, and `train` runs it. It is held against another run of the same script:
without a mode, or with something that must not change a bit.
"""

import copy
import itertools
import math
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parametrizations
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

import mprun
from mprun.precision.policy import usual_scaler
from mprun.precision.torch_update import held_by

WIDTH, CLASSES = 16, 4  # FP8 takes multiples of 16


class Body(nn.Module):
    """A linear layer, then a part of some kind, and a part that bodies may share."""

    def __init__(self, kind: str, shared: nn.Module | None, recomputes: bool | None) -> None:
        super().__init__()
        self.kind, self.shared, self.recomputes = kind, shared, recomputes
        self.first = nn.Linear(WIDTH, WIDTH)
        self.inner, self.gain = KINDS[kind](self.first), None
        if kind == "gain":
            self.gain = nn.Parameter(torch.ones(WIDTH))
        if kind == "mean":
            self.register_buffer("mean", torch.zeros(WIDTH))

    def part(self, x):
        if self.kind == "lstm":
            return self.inner(x.view(-1, 2, WIDTH // 2))[0][:, -1]
        if self.kind == "mean":
            if self.training:
                with torch.no_grad():
                    self.mean.lerp_(x.mean(0).to(self.mean.dtype), 0.1)
            x = x - self.mean
        return self.inner(x) if self.gain is None else self.inner(x) * self.gain

    def forward(self, x):
        x = self.first(x)
        if self.recomputes is None:
            x = self.part(x)
        else:
            x = checkpoint(self.part, x, use_reentrant=self.recomputes)
        return x if self.shared is None else x + self.shared(x)


def between(*layers: nn.Module, around=lambda layer: layer) -> nn.Sequential:
    """Put layers of twice the width between two linear ones."""
    outer = around(nn.Linear(WIDTH, 2 * WIDTH)), nn.Linear(2 * WIDTH, WIDTH)
    return nn.Sequential(outer[0], *layers, outer[1])


def tied(first: nn.Linear) -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    layer.weight = first.weight
    return layer


class Attention(nn.Sequential):
    """Attention over sequences of one."""

    def __init__(self) -> None:
        super().__init__(nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, 0.1, batch_first=True))

    def forward(self, x):
        return super().forward(x[:, None])[:, 0]


def convolutions() -> nn.Module:
    layers = nn.Conv1d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU(), nn.Flatten()
    return nn.Sequential(nn.Unflatten(1, (2, -1)), *layers, nn.Linear(2 * WIDTH, WIDTH))


# Name -> what makes the part, given the layer before it.
KINDS: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "batch norm": lambda _: between(nn.BatchNorm1d(2 * WIDTH), nn.ReLU()),
    "layer norm": lambda _: between(nn.LayerNorm(2 * WIDTH), nn.GELU(), nn.Dropout(0.2)),
    "convolution": lambda _: convolutions(),
    "lstm": lambda _: nn.LSTM(WIDTH // 2, WIDTH, batch_first=True),
    "weight norm": lambda _: between(nn.Tanh(), around=parametrizations.weight_norm),
    "spectral norm": lambda _: between(nn.Tanh(), around=parametrizations.spectral_norm),
    "attention": lambda _: Attention(),
    "tied": tied,
    "gain": lambda _: nn.Linear(WIDTH, WIDTH),
    "mean": lambda _: nn.Linear(WIDTH, WIDTH),
}
ONCE_DIFFERENTIABLE = {"lstm", "attention"}
OPTIMIZERS: dict[str, Callable[[list[Any]], torch.optim.Optimizer]] = {
    "momentum": lambda own: torch.optim.SGD(own, 0.05, momentum=0.9),
    "nesterov": lambda own: torch.optim.SGD(
        own, 0.05, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "maximize": lambda own: torch.optim.SGD(own, 0.01, maximize=True),
    "adam": lambda own: torch.optim.Adam(own, 1e-2, amsgrad=True),
    "adamw": lambda own: torch.optim.AdamW(own, 1e-2, foreach=False),
    "fused": lambda own: torch.optim.AdamW(own, 1e-2, fused=True),
    "nadam": lambda own: torch.optim.NAdam(own, 1e-2),
    "rmsprop": lambda own: torch.optim.RMSprop(own, 1e-3, momentum=0.5),
    "adagrad": lambda own: torch.optim.Adagrad(own, 1e-2),
    "adadelta": lambda own: torch.optim.Adadelta(own),
}
LOSSES = "chain sum apart gan grad penalty".split()
# A pass that is differentiated adds in an order of torch's own where it is watched.
TWICE = [*LOSSES, "second", "second"]
# What happens once, before a step or within it.
EVENTS = "freeze unfreeze reload data rates evaluate append copy hook halve part twice eval".split()


class Step(NamedTuple):
    """One step: how its losses are made, and what else is done."""

    batches: int
    size: int
    clears: str  # "none", "zeros", "model", or "nothing"
    losses: str
    overflows: bool
    clips: str | None
    event: str | None
    idle: int | None  # number of an optimizer that takes no step
    reverses: bool  # the optimizers


class Script:
    """Models, optimizers and steps, all drawn from a seed."""

    def __init__(self, seed: int, losses: list[str] = LOSSES) -> None:
        draw = random.Random(seed)
        self.seed = seed
        self.kinds = draw.choices([*KINDS], k=draw.choice([1, 1, 2, 3]))
        self.recomputes = [draw.choice([None, None, None, False]) for _ in self.kinds]
        several = len(self.kinds) > 1
        self.shares = several and draw.random() < 0.3
        self.layout = draw.choice(["one", "each", "halves"])
        self.optimizers = draw.choices([*OPTIMIZERS], k=3)
        self.late = draw.random() < 0.3  # optimizers come after `prepare`
        each = several and self.layout == "each"
        self.apart = each and not self.shares and draw.random() < 0.4  # a `prepare` for each
        self.trains_head = draw.random() < 0.4  # which is in no model
        self.schedules, self.frozen = draw.random() < 0.4, draw.random() < 0.2
        self.steps = [self._step(draw, losses) for _ in range(draw.randint(4, 8))]

    @staticmethod
    def _step(draw: random.Random, losses: list[str]) -> Step:
        return Step(
            draw.choice([1, 1, 1, 2, 3]),
            draw.choice([16, 16, 32]),
            draw.choice(["none", "none", "zeros", "model", "nothing"]),
            draw.choice(losses),
            draw.random() < 0.12,
            draw.choice([None, None, "norm", "value"]),
            draw.choice([*itertools.repeat(None, 8), *EVENTS]),
            draw.choice([None, None, None, 0, 1]),
            draw.random() < 0.3,
        )


class Plain:
    """Prepare nothing; skips: for each step of an optimizer whether it was skipped."""

    def __init__(self) -> None:
        self.skips: list[bool] = []

    def prepare(self, models: Any, optimizers: Any) -> None: ...

    def know(self, optimizer: torch.optim.Optimizer) -> None:
        """Hear of an optimizer that comes later."""

    def look(self, optimizers: list[torch.optim.Optimizer]) -> None:
        """Look at the gradients as passes have made them."""

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()


class Skipping(Plain):
    """Skip as torch.amp does: each optimizer looks at its own gradients, before they are clipped.

    A script may change them afterwards, so it looks again.
    """

    def look(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.found = {optimizer: self._overflows(optimizer) for optimizer in optimizers}

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        self.skips.append(self.found[optimizer] or self._overflows(optimizer))
        if not self.skips[-1]:
            optimizer.step()

    @staticmethod
    def _overflows(optimizer: torch.optim.Optimizer) -> bool:
        gradients = [own.grad for own in held_by(optimizer) if own.grad is not None]
        return not all(gradient.isfinite().all() for gradient in gradients)


class InMode(Plain):
    """Prepare in a mode, with the loss scale that `scaler` makes."""

    def __init__(self, mode: str, scaler: Callable[[], Any] = lambda: None) -> None:
        super().__init__()
        self.mode, self.scaler = mode, scaler
        self.scales = scaler() is not None or usual_scaler(mode) != "none"

    def prepare(self, models: Any, optimizers: Any) -> None:
        mprun.prepare(models, optimizers, self.mode, scaler=self.scaler())

    def know(self, optimizer: torch.optim.Optimizer) -> None:
        mprun.state_of(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        self.skips.append(bool(mprun.state_of(optimizer).found_inf))


class Objects:
    """The models, the head and the optimizers of a script."""

    def __init__(self, script: Script, mode: Plain) -> None:
        torch.manual_seed(script.seed)
        self.mode = mode
        shared = nn.Linear(WIDTH, WIDTH) if script.shares else None
        made = [*zip(script.kinds, script.recomputes, strict=True)]
        self.models = [Body(kind, shared, recomputes) for kind, recomputes in made]
        self.head = nn.Linear(WIDTH, CLASSES)
        self.models[0].first.requires_grad_(not script.frozen)
        self.optimizers = [] if script.late else self._optimizers(script)
        if script.apart:
            own = self.optimizers or [None] * len(self.models)
            for model, optimizer in zip(self.models, own, strict=True):
                mode.prepare(model, optimizer)
        else:
            mode.prepare(self.models, self.optimizers or None)
        if script.late:
            self.optimizers = self._optimizers(script)
            for own in self.optimizers:
                mode.know(own)
        rated = self.optimizers if script.schedules else []
        self.schedules = [lr_scheduler.StepLR(optimizer, 2, 0.5) for optimizer in rated]
        self.batches = torch.Generator().manual_seed(script.seed)

    def _optimizers(self, script: Script) -> list[torch.optim.Optimizer]:
        models = self.models
        each = [[*dict.fromkeys(model.parameters())] for model in models]
        held = [*dict.fromkeys(itertools.chain(*each))]
        head = [*self.head.parameters()] if script.trains_head else []
        if script.layout == "one":
            parts: list[Any] = [held + head]
        elif script.layout == "each":
            seen: set[Tensor] = set()
            parts = []
            for own in each:
                parts.append([one for one in own if one not in seen])
                seen.update(own)
            parts[0] += head
        else:
            half = len(held) // 2
            rest = [{"params": held[half : half + 1]}, {"params": held[half + 1 :], "lr": 1e-3}]
            parts = [held[:half] + head, rest]
        return [OPTIMIZERS[name](own) for name, own in zip(script.optimizers, parts, strict=False)]

    def held(self) -> list[Tensor]:
        return [own for optimizer in self.optimizers for own in held_by(optimizer)]

    def saved(self) -> list[Any]:
        parts = [*self.models, self.head, *self.optimizers, *self.schedules]
        return copy.deepcopy([part.state_dict() for part in parts])

    def load(self, saved: list[Any]) -> None:
        parts = [*self.models, self.head, *self.optimizers, *self.schedules]
        for part, state in zip(parts, saved, strict=True):
            part.load_state_dict(state)


def train(
    script: Script,
    mode: Plain,
    *,
    before: Callable[[int, Objects], Objects] = lambda _, objects: objects,
    after: Callable[[Objects], None] = lambda _: None,
    overflows: bool = True,
) -> list[Any]:
    """Train; return losses and norms, and the end of all weights, buffers and optimizer states.

    before(step, objects): called before each step, returns the objects with which it goes on.
    after(objects): called after each step. overflows: let losses overflow where a step says so.
    """
    objects, seen = Objects(script, mode), list[Tensor]()
    for number, step in enumerate(script.steps):
        objects = before(number, objects)
        seen += take(step, objects, overflows)
        after(objects)
    models = [module.state_dict() for module in (*objects.models, objects.head)]
    states = [own.state_dict()["state"].items() for own in objects.optimizers]
    return [seen, models, [sorted(pair for pair in own if pair[1]) for own in states]]


def take(step: Step, objects: Objects, overflows: bool) -> list[Tensor]:
    """Take a step; return its losses, norms and what it evaluates."""
    seen, undo = list[Tensor](), list[Callable[[], Any]]()
    happen(step.event, objects, seen, undo)
    if step.clears == "model":
        for module in (*objects.models, objects.head):
            module.zero_grad()
    elif step.clears != "nothing":
        for optimizer in objects.optimizers:
            optimizer.zero_grad(set_to_none=step.clears == "none")
    for number in range(step.batches):
        overflowing = step.overflows and overflows and number == 0
        seen += backward(step, objects, math.inf if overflowing else 1.0)
    for one in undo:
        one()
    objects.mode.look(objects.optimizers)
    given = [own for own in objects.held() if own.grad is not None]
    if step.event == "halve":
        for own in given:
            own.grad.mul_(0.5)
    if step.clips == "norm":
        seen.append(clip_grad_norm_(given, 1.0).detach().clone())
    elif step.clips == "value":
        clip_grad_value_(given, 0.1)
    numbered = [*enumerate(objects.optimizers)]
    for number, optimizer in reversed(numbered) if step.reverses else numbered:
        has_gradients = any(one.grad is not None for one in held_by(optimizer))
        if has_gradients and (number != step.idle or len(numbered) == 1):
            objects.mode.step(optimizer)
    for schedule in objects.schedules:
        schedule.step()
    return seen


def backward(step: Step, objects: Objects, factor: float) -> list[Tensor]:
    """Differentiate the losses of a batch, times `factor`; return them."""
    models, head = objects.models, objects.head
    x = torch.randn(step.size, WIDTH, generator=objects.batches)
    labels = torch.randint(CLASSES, (step.size,), generator=objects.batches)
    if step.event == "part":
        x = models[0].first(x)
    losses = made_by(step.losses, models, x, lambda y: F.cross_entropy(head(y), labels) * factor)
    if step.losses == "grad":
        for model, loss in zip(models, losses, strict=True):
            own = [one for one in dict.fromkeys(model.parameters()) if one.requires_grad]
            found = torch.autograd.grad(loss, own, retain_graph=True, allow_unused=True)
            for one, gradient in zip(own, found, strict=True):
                if gradient is not None:
                    one.grad = gradient if one.grad is None else one.grad + gradient
    else:
        for loss in losses:
            loss.backward(retain_graph=loss is not losses[-1] or step.event == "twice")
        if step.event == "twice":
            losses[-1].backward()
    return [loss.detach().clone() for loss in losses]


def happen(event, objects: Objects, seen: list[Tensor], undo: list[Callable[[], Any]]) -> None:
    """Let an event happen before a step; what is put off until after its passes goes to `undo`."""
    models, first = objects.models, objects.models[0]
    if event == "freeze":
        models[-1].first.requires_grad_(False)
    elif event == "unfreeze":
        first.requires_grad_(True)
    elif event == "reload":
        objects.load(objects.saved())
    elif event == "data":
        first.first.bias.data.mul_(0.5)
    elif event == "rates":
        for group in itertools.chain(*(one.param_groups for one in objects.optimizers)):
            group["lr"] *= 0.7
    elif event == "evaluate":
        seen += [evaluated(model) for model in models]
    elif event == "append" and isinstance(first.inner, nn.Sequential):
        layer = nn.Linear(WIDTH, WIDTH)
        first.inner.append(layer)
        objects.optimizers[0].add_param_group({"params": layer.parameters()})
    elif event == "copy":
        seen.append(evaluated(copy.deepcopy(first)))
    elif event == "hook" and first.first.bias.requires_grad:
        undo.append(first.first.bias.register_hook(lambda gradient: gradient * 2).remove)
    elif event == "eval":
        first.eval()
        undo.append(first.train)


def evaluated(model: nn.Module) -> Tensor:
    """Return the output without gradients, and leave the model in training mode."""
    with torch.no_grad():
        found = model.eval()(torch.ones(16, WIDTH)).clone()
    model.train()
    return found


def made_by(name: str, models: list[Any], x: Tensor, loss: Callable[[Tensor], Tensor]) -> list:
    """Return the losses of a batch that need gradients."""
    first, last = models[0], models[-1]
    if name == "chain":
        found = [loss(nn.Sequential(*models)(x))]
    elif name == "sum":
        found = [sum(loss(model(x)) for model in models)]
    elif name == "gan" and len(models) > 1:
        made = first(x)
        found = [loss(last(made.detach())), loss(last(made))]
    elif name == "penalty":
        found = [loss(first(x)) + 0.1 * sum(own.square().sum() for own in first.parameters())]
    elif name == "second" and first.kind not in ONCE_DIFFERENTIABLE and first.recomputes is None:
        given = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(first(given).sum(), given, create_graph=True)
        found = [loss(first(given)) + slope.square().mean()]
    else:
        found = [loss(model(x)) for model in models]
    return found
