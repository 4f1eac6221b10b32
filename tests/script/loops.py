"""Training loops as scripts have them: plain torch, but for one call of `prepare`.

Each of `LOOPS` builds models and optimizers, hands them to `prepare`, trains some steps and returns
`Moved`: the tensors that are compared, as they were before and after. `Plain` is the `prepare` of
the script without mprun; a mode is held against what that script does (loop_outcomes.py). Here are
loops that differ from the usual one in one thing; loops of another shape are in loop_shapes.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune
from torch.nn.utils.parametrize import register_parametrization
from torch.nn.utils.rnn import pack_padded_sequence
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint


class Moved(NamedTuple):
    """Hold compared tensors of before and after a loop, in one order."""

    start: list[Tensor]
    end: list[Tensor]


class Plain:
    """Hand back what is given; `skips`: whether a step with infinite gradients is left out."""

    skips = False

    def __call__(self, model: Any, optimizer: Any = None, *, scale: float | None = None) -> Any:
        """Take `scale` as the constant loss scale of a mode that has a dynamic one."""
        return model if optimizer is None else (model, optimizer)


Script = Callable[[Any], Moved]
LOOPS: dict[str, Script] = {}

_random = torch.Generator().manual_seed(1)
INPUTS = torch.randn(64, 32, generator=_random)
VECTORS = (INPUTS, INPUTS[:, :10].argmax(1))
IMAGES = (torch.randn(16, 3, 8, 8, generator=_random), torch.arange(16) % 10)
WORDS = torch.randint(20, (64,), generator=_random)
TOKENS = (WORDS, (WORDS + 1) % 20)
SEQUENCES = INPUTS.view(16, 4, 32)
LENGTHS = torch.tensor([4] * 8 + [3] * 8)


def script(function: Script) -> Script:
    """Enter a loop under its own name."""
    LOOPS[function.__name__] = function
    return function


# Networks.


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 10))


def cnn() -> nn.Sequential:
    torch.manual_seed(0)
    body = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


def critic(activation: Callable[[], nn.Module] = nn.Tanh) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), activation(), nn.Linear(32, 1))


class Forward(nn.Module):
    """Hold `net` and further modules, parameters and buffers, and call `act(self, *inputs)`."""

    def __init__(self, act, net=mlp, **parts) -> None:
        super().__init__()
        self.act, self.net = act, net()
        torch.manual_seed(5)
        for name, make in parts.items():
            made = make()
            if isinstance(made, Tensor) and not isinstance(made, nn.Parameter):
                self.register_buffer(name, made)
            else:
                setattr(self, name, made)

    def forward(self, *inputs, **named):
        return self.act(self, *inputs, **named)


def holding(act, **parts) -> Callable[[], Forward]:
    return lambda: Forward(act, **parts)


class Tied(nn.Module):
    """Tie the output layer to the embedding, or begin with two equal weights."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.inner = nn.Embedding(20, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embedding.weight
        if not tied:
            self.head.weight = nn.Parameter(self.embedding.weight.detach().clone())

    def forward(self, words):
        return self.head(torch.tanh(self.inner(self.embedding(words))))


def sparse_words() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(20, 16, sparse=True), nn.Linear(16, 20))


class Recurrent(nn.Module):
    """Carry the state of an LSTM from words to logits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.lstm = nn.Embedding(20, 16), nn.LSTM(16, 16)
        self.head = nn.Linear(16, 20)

    def forward(self, words, state):
        outputs, state = self.lstm(self.embedding(words), state)
        return self.head(outputs), state


def transformer() -> nn.Sequential:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2)
    return nn.Sequential(encoder, nn.Flatten(), nn.Linear(128, 10))


# The usual loop, and loops that differ from it in one thing.


def sgd(parameters, lr=0.1, **options):
    return torch.optim.SGD(parameters, lr, **options)


def momentum(parameters):
    return sgd(parameters, momentum=0.9)


def making(name: str, **options) -> Callable:
    return lambda parameters: getattr(torch.optim, name)(parameters, **options)


adam = making("Adam", lr=1e-3)


def tensors(*models: nn.Module) -> list[Tensor]:
    """Return copies of all floating-point parameters and buffers."""
    state = [value for model in models for value in model.state_dict().values()]
    return [v.detach().clone() for v in state if v.is_floating_point() or v.is_complex()]


def classified(model, inputs, labels):
    return F.cross_entropy(model(inputs), labels)


def fit(model, optimizer, batch=VECTORS, steps=6, loss=classified, graded=None, stepped=None):
    """Train on one batch; graded, stepped: called after each backward pass and each step."""
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model, *batch).backward()
        if graded:
            graded(model, optimizer)
        optimizer.step()
        if stepped:
            stepped(model, optimizer)


def usual(
    name,
    make=mlp,
    optimizer=sgd,
    *,
    before=None,
    prepared=None,
    after=None,
    called=None,
    **training,
) -> None:
    """Enter the loop that `fit` runs.

    before(model), after(model, optimizer): change the model before `prepare`, or after it.
    prepared(model), called(model): what is prepared, or called, in its place.
    """

    def run(prepare) -> Moved:
        model = make()
        if before:
            before(model)
        own = optimizer([p for p in model.parameters() if p.requires_grad])
        outer, own = prepare(prepared(model) if prepared else model, own)
        if after:
            after(outer, own)
        start = tensors(model)
        fit(called(outer) if called else outer, own, **training)
        return Moved(start, tensors(model))

    LOOPS[name] = run


def compiled(model):
    torch.compiler.reset()
    return torch.compile(model, backend="eager")


def compile_first_layer(model, _=None):
    model[0] = compiled(model[0])


def compile_in_place(model, _=None):
    torch.compiler.reset()
    model.compile(backend="eager")


def new_head(model, optimizer=None):
    torch.manual_seed(5)
    model[3] = nn.Linear(64, 10)
    if optimizer is not None:
        optimizer.add_param_group({"params": model[3].parameters()})


def new_last_layer(model, optimizer):
    torch.manual_seed(5)
    model.append(nn.Linear(10, 10))
    optimizer.add_param_group({"params": model[-1].parameters()})


def tie(model, _):
    model.head.weight = model.embedding.weight


def constant_weights(module) -> None:
    if type(module) is nn.Linear:
        nn.init.constant_(module.weight, 0.01)


def penalised(model, inputs, labels):
    penalty = sum(p.square().sum() for p in model.parameters())
    return classified(model, inputs, labels) + 0.1 * penalty


def clamped_at_the_output(model, inputs, labels):
    logits = model(inputs)
    logits.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    return F.cross_entropy(logits, labels)


def through_functional_call(model, inputs, labels):
    logits = functional_call(model, dict(model.named_parameters()), (inputs,))
    return F.cross_entropy(logits, labels)


def halve_rates(_, optimizer) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= 0.5


def statistics_in_place(model, inputs):
    if model.training:
        with torch.no_grad():
            model.mean.lerp_(inputs.mean(0).to(model.mean.dtype), 0.1)
            model.count += 1
    return model.net(inputs - model.mean)


def statistics_anew(model, inputs):
    if model.training:
        model.mean = 0.9 * model.mean + 0.1 * inputs.detach().mean(0)
        model.count = model.count + 1
    return model.net(inputs - model.mean)


STATISTICS = {"mean": lambda: torch.zeros(32), "count": lambda: torch.zeros((), dtype=torch.long)}


def filtered(model, inputs):
    """Multiply by complex weights between two real transforms."""
    waves = torch.fft.rfft(model.inner(inputs).float()) * model.filter
    return model.net(torch.fft.irfft(waves, 32).to(inputs.dtype))


class Reversed(torch.autograd.Function):
    """Hand on, and turn half of the gradient round."""

    @staticmethod
    def forward(_, x):
        return x.view_as(x)

    @staticmethod
    def backward(_, gradient):
        return -0.5 * gradient


def adversarial_domain(model, inputs, labels):
    logits, domain = model(inputs)
    return F.cross_entropy(logits, labels) + F.cross_entropy(domain, labels % 2)


def two_heads(model, inputs):
    logits = model.net(inputs)
    return logits, model.domain(Reversed.apply(logits))


@dataclass
class Output:
    logits: Tensor
    extra: dict[str, Tensor]


def in_a_dataclass(model, inputs):
    logits = model.net(inputs)
    return Output(logits, {"square": logits.square().mean()})


def of_a_dataclass(model, inputs, labels):
    output = model(inputs)
    return F.cross_entropy(output.logits, labels) + 0.1 * output.extra["square"]


def keeps_hidden(model, inputs):
    model.hidden = model.net[:3](inputs)
    return model.net[3](model.hidden)


def on_kept_hidden(model, inputs, labels):
    return classified(model, inputs, labels) + 0.1 * model.hidden.square().mean()


class OwnLoss(Forward):
    """Compute the loss in a method that uses a parameter of its own."""

    def __init__(self) -> None:
        super().__init__(lambda model, x: model.net(x), weight=lambda: nn.Parameter(torch.eye(10)))

    def loss(self, inputs, labels):
        return F.cross_entropy(F.linear(self.net(inputs), self.weight), labels)


def packed_inside(model, sequences):
    packed = pack_padded_sequence(sequences, LENGTHS, batch_first=True)
    return model.net(model.gru(packed)[1][-1])


def gru() -> nn.GRU:
    torch.manual_seed(0)
    return nn.GRU(32, 16, batch_first=True)


PACKING = holding(packed_inside, net=lambda: nn.Linear(16, 10), gru=gru)
PACKED = (pack_padded_sequence(SEQUENCES, LENGTHS, batch_first=True), VECTORS[1][:16])


def on_packed(model, packed, labels):
    return F.cross_entropy(model(packed)[1][-1], labels)


def codebook(model, inputs):
    """Quantise by a codebook that follows the data by writes to `.data`, as VQ-VAE does."""
    codes = model.net(inputs)
    chosen = torch.cdist(codes, model.book.to(codes.dtype)).argmin(1)
    if model.training:
        hot = F.one_hot(chosen, 16).to(codes.dtype)
        model.sizes.data.mul_(0.9).add_(hot.sum(0), alpha=0.1)
        model.sums.data.mul_(0.9).add_(hot.T @ codes.detach(), alpha=0.1)
        model.book.data.copy_(model.sums / (model.sizes.unsqueeze(1) + 1e-5))
    picked = model.book[chosen].to(codes.dtype)
    return model.decoder(codes + (picked - codes).detach())


VECTOR_QUANTISED = holding(
    codebook,
    net=lambda: nn.Linear(32, 8),
    decoder=lambda: nn.Linear(8, 32),
    book=lambda: torch.randn(16, 8),
    sizes=lambda: torch.ones(16),
    sums=lambda: torch.zeros(16, 8),
)


def drifting(write) -> Callable:
    """Return a forward that writes its buffer by `write(model, new value)`."""

    def act(model, inputs):
        if model.training:
            write(model, 0.9 * model.mean + 0.1 * inputs.detach().mean(0).to(model.mean.dtype))
        return model.net(inputs - model.mean)

    return act


class MaxNorm(nn.Linear):
    """Bound the weight in every call, by `write(layer, bounded weight)`."""

    def __init__(self, write) -> None:
        super().__init__(64, 10)
        self.write = write

    def forward(self, x):
        self.write(self, self.weight.detach().renorm(2, 0, 0.1))
        return super().forward(x)


def no_grad_copy(layer, bounded) -> None:
    with torch.no_grad():
        layer.weight.copy_(bounded)


WEIGHT_WRITES = {
    "data_assigned": lambda layer, bounded: setattr(layer.weight, "data", bounded),
    "data_copied": lambda layer, bounded: layer.weight.data.copy_(bounded),
    "no_grad_copied": no_grad_copy,
}
BUFFER_WRITES = {
    "data_copied": lambda model, new: model.mean.data.copy_(new),
    "by_index": lambda model, new: model.mean.data[:16].copy_(new[:16]),
}


def bounded_head(write) -> Callable[[], nn.Module]:
    def make():
        model = mlp()
        model[3] = MaxNorm(write)
        return model

    return make


def in_autocast(model, inputs):
    with torch.autocast("cpu", torch.bfloat16):
        return model.net(inputs)


def checkpointed(reentrant: bool) -> Callable:
    def act(model, inputs):
        return model.net[3](checkpoint(model.net[:3], inputs, use_reentrant=reentrant))

    return act


def scaled_in_a_checkpoint(reentrant: bool) -> Callable:
    """Recompute a function that reads a parameter itself, as layer scales are."""

    def act(model, inputs):
        x = checkpoint(lambda x: model.net[0](x) * model.gain, inputs, use_reentrant=reentrant)
        return model.net[1:](x)

    return act


def around(model, inputs, labels):
    return F.cross_entropy(checkpoint(model, inputs, use_reentrant=False), labels)


def with_eval_call(model, inputs, labels):
    loss = classified(model, inputs, labels)
    model.eval()
    other = classified(model, inputs, labels)
    model.train()
    return loss + other


def nested(model, inputs, *, shift):
    logits = model.net(inputs + shift["by"][0])
    return {"logits": logits, "parts": [logits[:, :2], (logits.detach(), None)], "given": inputs}


def of_nested(model, inputs, labels):
    found = model(inputs, shift={"by": (torch.zeros(32),)})
    parts = found["parts"][0].mean() + found["given"].mean()
    return F.cross_entropy(found["logits"], labels) + 0.1 * parts


def passed(model, inputs):
    return model.net(inputs), inputs, model.gain


def of_passed(model, inputs, labels):
    logits, given, gain = model(inputs)
    return F.cross_entropy(logits * gain, labels) + given.square().mean()


def double(parameter) -> None:
    parameter.grad.mul_(2)


def half_gradient(_, gradients, __):
    return tuple(None if gradient is None else gradient / 2 for gradient in gradients)


def frozen_backbone(model) -> None:
    model[:5].requires_grad_(False)


def head_in_training(model, _) -> None:
    model.eval()
    model[5].train()


def complex_filter() -> nn.Parameter:
    return nn.Parameter(torch.randn(17, dtype=torch.cfloat))


def one() -> nn.Parameter:
    return nn.Parameter(torch.ones(()))


def on_a_copy(model, inputs, labels):
    return F.cross_entropy(model(inputs.clone()), labels)


def two_matrices() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64, bias=False), nn.ReLU(), nn.Linear(64, 10, bias=False))


HALVES = (INPUTS.half(), VECTORS[1])
LEAVES = (INPUTS.clone().requires_grad_(), VECTORS[1])
SHORT = (SEQUENCES, VECTORS[1][:16])
LAST = {"memory_format": torch.channels_last}

usual("basic", optimizer=momentum)
usual("clip_norm", graded=lambda m, _: nn.utils.clip_grad_norm_(m.parameters(), 0.05))
usual("clip_value", mlp, adam, graded=lambda m, _: nn.utils.clip_grad_value_(m.parameters(), 1e-3))
usual("rates_by_hand", stepped=halve_rates)
usual("frozen_layer", before=lambda m: m[0].requires_grad_(False))
usual("tied", Tied, making("Adam", lr=1e-2), batch=TOKENS)
usual("tied_after", lambda: Tied(tied=False), after=tie, batch=TOKENS)
usual("head_replaced", after=new_head)
usual("head_replaced_untrained", after=lambda model, _: new_head(model))
usual("layer_appended", after=new_last_layer)
usual("compile_before", prepared=compiled)
usual("compile_after", called=compiled)
usual("compile_in_place_before", before=compile_in_place)
usual("compile_in_place_after", after=compile_in_place)
usual("compile_layer_after", after=compile_first_layer)
usual("data_parallel_before", prepared=nn.DataParallel)
usual("data_parallel_after", called=nn.DataParallel)
usual("data_parallel_part", before=lambda m: setattr(m, "0", nn.DataParallel(m[0])))
usual("checkpoint_non_reentrant", holding(checkpointed(False)))
usual("checkpoint_reentrant", holding(checkpointed(True)), batch=LEAVES)
usual("checkpoint_around", loss=around)
GAIN = {"gain": lambda: nn.Parameter(torch.ones(64))}
usual("checkpoint_of_a_parameter", holding(scaled_in_a_checkpoint(False), **GAIN))
usual(
    "checkpoint_of_a_parameter_reentrant",
    holding(scaled_in_a_checkpoint(True), **GAIN),
    batch=LEAVES,
)
usual("buffer_in_place", holding(statistics_in_place, **STATISTICS))
usual("buffer_assigned", holding(statistics_anew, **STATISTICS))
for _name, _write in BUFFER_WRITES.items():
    usual(f"buffer_{_name}", holding(drifting(_write), mean=STATISTICS["mean"]))
for _name, _write in WEIGHT_WRITES.items():
    usual(f"weight_{_name}", bounded_head(_write))
usual("codebook_by_data", VECTOR_QUANTISED, loss=lambda m, x, _: F.mse_loss(m(x), x))
usual("half_before", before=nn.Module.half, batch=HALVES)
usual("half_after", after=lambda m, _: m.half(), batch=HALVES)
usual("double_model", before=nn.Module.double, batch=(INPUTS.double(), VECTORS[1]))
usual("double_loss", loss=lambda m, x, y: F.cross_entropy(m(x).double(), y))
usual("complex_weights", holding(filtered, inner=lambda: nn.Linear(32, 32), filter=complex_filter))
usual("sparse_gradients", sparse_words, batch=TOKENS)
usual("channels_last_before", cnn, before=lambda m: m.to(**LAST), batch=IMAGES)
usual("channels_last_after", cnn, after=lambda m, _: m.to(**LAST), batch=IMAGES)
usual("weight_norm_before", before=lambda m: parametrizations.weight_norm(m[3]))
usual("weight_norm_after", after=lambda m, _: nn.utils.weight_norm(m[3]))
usual("old_weight_norm_before", before=lambda m: nn.utils.weight_norm(m[3]))
usual("spectral_norm_before", before=lambda m: parametrizations.spectral_norm(m[3]))
usual("old_spectral_norm_before", before=lambda m: nn.utils.spectral_norm(m[3]))
usual("parametrized_after", after=lambda m, _: register_parametrization(m[3], "weight", nn.Tanh()))
usual("pruned_before", before=lambda m: prune.l1_unstructured(m[3], "weight", 0.5))
usual("pruned_after", after=lambda m, _: prune.l1_unstructured(m[3], "weight", 0.5))
usual("functional_call", loss=through_functional_call)
usual("penalty_on_weights", loss=penalised)
usual("two_calls", loss=lambda m, x, y: F.cross_entropy(m(x) + m(x.flip(0)).flip(0), y))
usual("loss_method", OwnLoss, loss=lambda m, x, y: m.loss(x, y))
usual("eval_mode", cnn, before=nn.Module.eval, batch=IMAGES)
usual("frozen_statistics", cnn, after=lambda m, _: m[1].eval(), batch=IMAGES)
usual("backbone_in_eval", cnn, before=frozen_backbone, after=head_in_training, batch=IMAGES)
usual("module_backward_hook", after=lambda m, _: m[3].register_full_backward_hook(half_gradient))
usual("forward_hook_replaces", after=lambda m, _: m[0].register_forward_hook(lambda *a: a[2] * 2))
usual("parameter_hook_before", before=lambda m: m[0].weight.register_hook(lambda g: g * 2))
usual("parameter_hook_after", after=lambda m, _: m[0].weight.register_hook(lambda g: g * 2))
usual("accumulated_hook", after=lambda m, _: m[0].weight.register_post_accumulate_grad_hook(double))
usual("output_hook", loss=clamped_at_the_output)
usual("own_function", holding(two_heads, domain=lambda: nn.Linear(10, 2)), loss=adversarial_domain)
usual("dataclass_output", holding(in_a_dataclass), loss=of_a_dataclass)
usual("distribution", loss=lambda m, x, y: -Categorical(logits=m(x)).log_prob(y).mean())
usual("hidden_by_attribute", holding(keeps_hidden), loss=on_kept_hidden)
usual("inner_and_outer", holding(lambda m, x: m.top(m.net(x)), top=lambda: nn.Linear(10, 10)))
usual("packed_inside", PACKING, lambda parameters: sgd(parameters, 0.5), batch=SHORT)
usual("packed_input", gru, lambda parameters: sgd(parameters, 0.5), loss=on_packed, batch=PACKED)
# Adam would step by the sign of the gradient of the keys' bias, which is 0 but for rounding.
usual("transformer", transformer, momentum, after=lambda *_: torch.manual_seed(7), batch=SHORT)
usual("type_is_linear", after=lambda m, _: m.apply(constant_weights), steps=2)
usual(
    "autocast_inside", holding(in_autocast), loss=lambda m, x, y: F.cross_entropy(m(x).float(), y)
)
usual("train_and_eval_call", loss=with_eval_call)
usual("nested_outputs", holding(nested), loss=of_nested)
usual("inputs_passed_through", holding(passed, gain=one), loss=of_passed, batch=LEAVES)
usual("in_place_on_the_input", lambda: nn.Sequential(nn.ReLU(inplace=True), *mlp()), loss=on_a_copy)
usual("output_changed_in_place", loss=lambda m, x, y: F.cross_entropy(m(x).mul_(2), y))
usual("muon", two_matrices, making("Muon", lr=1e-2))


# Optimizers and schedules.


class Lion(torch.optim.Optimizer):
    """Step by the sign of a running mean: an optimizer of one's own."""

    def __init__(self, parameters, lr) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                parameter.sub_(torch.lerp(parameter.grad, mean, 0.9).sign(), alpha=group["lr"])
                mean.lerp_(parameter.grad, 0.01)


OPTIMIZERS = {
    "adadelta": making("Adadelta"),
    "adafactor": making("Adafactor", lr=1e-2),
    "adagrad": making("Adagrad", lr=1e-2),
    "adam_amsgrad": making("Adam", lr=1e-3, amsgrad=True),
    "adam_fused": making("Adam", lr=1e-3, fused=True),
    "adam_maximize": making("Adam", lr=1e-3, maximize=True),
    "adam_one_by_one": making("Adam", lr=1e-3, foreach=False),
    "adamax": making("Adamax", lr=1e-3),
    "adamw": making("AdamW", lr=1e-3),
    "asgd": making("ASGD", lr=0.1),
    "nadam": making("NAdam", lr=1e-3),
    "of_ones_own": lambda parameters: Lion(parameters, 1e-3),
    "radam": making("RAdam", lr=1e-2),
    "rmsprop": making("RMSprop", lr=1e-3),
    "rprop": making("Rprop", lr=1e-3),
}
for _name, _make in OPTIMIZERS.items():
    usual(f"optimizer_{_name}", optimizer=_make)


def _two_phases(o):
    phases = lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.5)
    return lr_scheduler.SequentialLR(o, [*phases], [2])


SCHEDULES = {
    "cosine_restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "sequential": _two_phases,
    "step": lambda o: lr_scheduler.StepLR(o, 2, 0.1),
}


def scheduled(make, first: bool) -> Script:
    """Return a loop with a schedule made before `prepare`, or after it."""

    def run(prepare) -> Moved:
        model = mlp()
        optimizer = momentum(model.parameters())
        start = tensors(model)
        schedule = make(optimizer) if first else None
        model, optimizer = prepare(model, optimizer)
        schedule = schedule or make(optimizer)
        measured = [1.0] if isinstance(schedule, lr_scheduler.ReduceLROnPlateau) else []
        fit(model, optimizer, stepped=lambda *_: schedule.step(*measured))
        return Moved(start, tensors(model))

    return run


for _name, _make in SCHEDULES.items():
    LOOPS[f"schedule_{_name}_before"] = scheduled(_make, first=True)
    LOOPS[f"schedule_{_name}_after"] = scheduled(_make, first=False)
