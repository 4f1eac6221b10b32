"""Training loops of another shape than the usual one: `LOOPS` of loops.py, continued.

What they step through by themselves: gradients that are read, combined or differentiated, several
models and optimizers, plain tensors beside a prepared model, two parts of a training, overflows.
"""

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.optim import swa_utils

from .loops import (
    IMAGES,
    INPUTS,
    LOOPS,
    TOKENS,
    VECTORS,
    WORDS,
    Forward,
    Moved,
    Recurrent,
    Script,
    adam,
    classified,
    cnn,
    critic,
    fit,
    making,
    mlp,
    new_last_layer,
    script,
    sgd,
    sparse_words,
    tensors,
    usual,
)
from .networks import reloaded


def training(make=mlp, optimizer=sgd, name=None, **options) -> Callable[[Callable], Script]:
    """Enter `body(model, optimizer)`, which trains, as a loop.

    A body that returns a model has trained that one.
    """

    def enter(body: Callable) -> Script:
        def run(prepare) -> Moved:
            model = make()
            start = tensors(model)
            trained = body(*prepare(model, optimizer(model.parameters()), **options))
            return Moved(start, tensors(model if trained is None else trained))

        LOOPS[name or body.__name__] = run
        return run

    return enter


def stepwise(make=mlp, optimizer=sgd, steps=6, name=None, **options) -> Callable:
    """Enter `body(model, optimizer, index)`, which takes one step, as a loop."""

    def enter(body: Callable) -> Script:
        def steps_of(model, own) -> None:
            for index in range(steps):
                body(model, own, index)

        return training(make, optimizer, name or body.__name__, **options)(steps_of)

    return enter


def backward(model, optimizer, inputs=INPUTS, labels=VECTORS[1]) -> None:
    optimizer.zero_grad()
    classified(model, inputs, labels).backward()


@stepwise()
def accumulated(model, optimizer, _):
    for part in range(4):
        (classified(model, *(own[part::4] for own in VECTORS)) / 4).backward()
    optimizer.step()
    optimizer.zero_grad()


@stepwise(optimizer=lambda parameters: sgd(parameters, 0.05), steps=5)
def never_zeroed(model, optimizer, _):
    classified(model, *VECTORS).backward()
    optimizer.step()


@stepwise()
def zeroed_by_the_model(model, optimizer, _):
    model.zero_grad()
    classified(model, *VECTORS).backward()
    optimizer.step()


@stepwise()
def two_losses(model, optimizer, _):
    optimizer.zero_grad()
    logits = model(INPUTS)
    F.cross_entropy(logits, VECTORS[1]).backward(retain_graph=True)
    (0.1 * logits.square().mean()).backward()
    optimizer.step()


def by_closure(model, optimizer, _):
    def loss():
        backward(model, optimizer)
        return torch.zeros(())

    optimizer.step(loss)


def _lbfgs(parameters):
    return torch.optim.LBFGS(parameters, lr=0.5, max_iter=4)


stepwise(name="closure")(by_closure)
stepwise(optimizer=_lbfgs, steps=3, name="lbfgs")(by_closure)


@stepwise()
def skips_by_itself(model, optimizer, _):
    optimizer.zero_grad()
    loss = classified(model, *VECTORS)
    if torch.isfinite(loss):
        loss.backward()
        if torch.isfinite(nn.utils.clip_grad_norm_(model.parameters(), 1.0)):
            optimizer.step()


@stepwise()
def gradients_combined(model, optimizer, _):
    backward(model, optimizer, INPUTS[:32], VECTORS[1][:32])
    first = [parameter.grad.clone() for parameter in model.parameters()]
    backward(model, optimizer, INPUTS[32:], VECTORS[1][32:])
    for parameter, other in zip(model.parameters(), first, strict=True):
        parameter.grad = parameter.grad + 0.5 * other
    optimizer.step()


@stepwise(steps=1)
def gradients_by_hand(model, optimizer, _):
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.01)
    optimizer.step()


@stepwise()
def gradients_by_autograd_grad(model, optimizer, _):
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(classified(model, *VECTORS), parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()


def _climb(model) -> list[Tensor]:
    """Return the step to sharper weights that SAM takes."""
    gradients = [parameter.grad for parameter in model.parameters()]
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    return [gradient * (2.0 / norm) for gradient in gradients]


@stepwise()
def sharpness_aware(model, optimizer, _):
    backward(model, optimizer)
    climbs = _climb(model)
    with torch.no_grad():
        torch._foreach_add_([*model.parameters()], climbs)
    backward(model, optimizer)
    with torch.no_grad():
        torch._foreach_sub_([*model.parameters()], climbs)
    optimizer.step()


@stepwise()
def sharpness_aware_by_data(model, optimizer, _):
    backward(model, optimizer)
    old = [parameter.data.clone() for parameter in model.parameters()]
    for parameter, climb in zip(model.parameters(), _climb(model), strict=True):
        parameter.data.add_(climb)
    backward(model, optimizer)
    for parameter, value in zip(model.parameters(), old, strict=True):
        parameter.data = value
    optimizer.step()


@stepwise()
def adversarial_by_backward(model, optimizer, _):
    shift = torch.zeros_like(INPUTS, requires_grad=True)
    classified(model, INPUTS + shift, VECTORS[1]).backward()
    backward(model, optimizer, INPUTS + 3.0 * shift.grad)
    optimizer.step()


@stepwise()
def adversarial_by_autograd_grad(model, optimizer, _):
    inputs = INPUTS.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(classified(model, inputs, VECTORS[1]), inputs)
    backward(model, optimizer, (inputs + 0.1 * gradient.sign()).detach())
    optimizer.step()


@stepwise(make=critic, optimizer=lambda parameters: sgd(parameters, 0.05), scale=16.0)
def gradient_penalty(model, optimizer, _):
    """Train as WGAN-GP does; a constant scale keeps gradients of size 1 inside of FP16."""
    optimizer.zero_grad()
    real, made = INPUTS[:, :16], INPUTS[:, 16:]
    between = (0.5 * (real + made)).requires_grad_()
    (gradient,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
    penalty = 10 * (gradient.norm(dim=1) - 1).square().mean()
    (model(made).mean() - model(real).mean() + penalty).backward()
    optimizer.step()


@stepwise(scale=16.0)
def penalty_on_gradients(model, optimizer, _):
    loss, parameters = classified(model, *VECTORS), list(model.parameters())
    gradients = torch.autograd.grad(loss, parameters, create_graph=True)
    optimizer.zero_grad()
    penalty = sum(gradient.square().sum() for gradient in gradients)
    (classified(model, *VECTORS) + penalty).backward()
    optimizer.step()


@stepwise(make=critic, optimizer=making("RMSprop", lr=1e-3), scale=16.0)
def clamped_critic(model, optimizer, _):
    optimizer.zero_grad()
    (model(INPUTS[:, 16:]).mean() - model(INPUTS[:, :16]).mean()).backward()
    optimizer.step()
    for parameter in model.parameters():
        parameter.data.clamp_(-0.1, 0.1)


@stepwise()
def backward_in_a_thread(model, optimizer, _):
    optimizer.zero_grad()
    with ThreadPoolExecutor(1) as threads:
        threads.submit(classified(model, *VECTORS).backward).result()
    optimizer.step()


@stepwise()
def failed_call(model, optimizer, _):
    try:
        model(torch.ones(3, 5))
    except RuntimeError:
        pass
    backward(model, optimizer)
    optimizer.step()


@training(Recurrent, lambda parameters: sgd(parameters, 1.0))
def carried_state(model, optimizer):
    state = None
    for _ in range(6):
        optimizer.zero_grad()
        logits, state = model(WORDS.view(8, 8), state)
        state = tuple(part.detach() for part in state)
        F.cross_entropy(logits.flatten(0, 1), TOKENS[1]).backward()
        optimizer.step()


def several(parts: Callable[[nn.Module], list], make=mlp, optimizers=(sgd, sgd), batch=VECTORS):
    """Return a loop in which optimizers share a model."""

    def run(prepare) -> Moved:
        model = make()
        start = tensors(model)
        own = [make_own(p) for make_own, p in zip(optimizers, parts(model), strict=True)]
        model, own = prepare(model, own)
        for _ in range(6):
            for optimizer in own:
                optimizer.zero_grad()
            classified(model, *batch).backward()
            for optimizer in own:
                optimizer.step()
        return Moved(start, tensors(model))

    return run


LOOPS |= {
    "two_optimizers": several(lambda m: [m[0].parameters(), m[1:].parameters()]),
    "sparse_adam": several(
        lambda m: [m[0].parameters(), m[1].parameters()],
        sparse_words,
        (making("SparseAdam", lr=1e-2), making("Adam", lr=1e-2)),
        TOKENS,
    ),
}


@script
def sparse_weight(prepare):
    model = Forward(
        lambda m, x: m.net(torch.sparse.mm(m.mixing, x.T).T),
        mixing=lambda: nn.Parameter(torch.randn(32, 32).relu().to_sparse()),
    )
    start = tensors(model.net)
    model, optimizer = prepare(model, sgd(model.parameters()))
    fit(model, optimizer)
    return Moved(start, tensors(model.net))


# What changes between two parts of a training.


@training()
def thawed(model, optimizer):
    model[0].requires_grad_(False)
    fit(model, optimizer, steps=3)
    model[0].requires_grad_(True)
    fit(model, optimizer, steps=3)


@script
def thawed_into_a_new_group(prepare):
    model = mlp()
    start = tensors(model)
    model[0].requires_grad_(False)
    model, optimizer = prepare(model, sgd(model[1:].parameters()))
    fit(model, optimizer, steps=3)
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.05})
    fit(model, optimizer, steps=3)
    return Moved(start, tensors(model))


@script
def layer_appended_between(prepare):
    model = mlp()
    model, optimizer = prepare(model, sgd(model.parameters()))
    fit(model, optimizer, steps=3)
    new_last_layer(model, optimizer)
    start = tensors(model)
    fit(model, optimizer, steps=3)
    return Moved(start, tensors(model))


@training()
def second_phase(model, optimizer):
    """Go on with a new optimizer that `prepare` never saw."""
    fit(model, optimizer, steps=3)
    fit(model, adam(model.parameters()), steps=3)


@training()
def weights_from_a_vector(model, optimizer):
    fit(model, optimizer, steps=2)
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(vector * 0.5, model.parameters())
    fit(model, optimizer, steps=3)


@training()
def best_reloaded(model, optimizer):
    fit(model, optimizer, steps=3)
    best = copy.deepcopy(model.state_dict())
    fit(model, optimizer, steps=2)
    model.load_state_dict(best)
    fit(model, optimizer, steps=3)


@training()
def loaded_by_assignment(model, _):
    """Make the optimizer afterwards: its parameters are the model's new ones."""
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    fit(model, sgd(model.parameters()))


def resumed(first: bool) -> Script:
    """Return a loop that loads what a plain one saved, before `prepare` or after it."""

    def run(prepare) -> Moved:
        other = mlp()
        before = adam(other.parameters())
        fit(other, before, steps=3)
        start = tensors(other)
        model = mlp()
        optimizer = adam(model.parameters())
        if not first:
            model, optimizer = prepare(model, optimizer)
        model.load_state_dict(other.state_dict())
        optimizer.load_state_dict(copy.deepcopy(before.state_dict()))
        if first:
            model, optimizer = prepare(model, optimizer)
        fit(model, optimizer, steps=3)
        return Moved(start, tensors(model))

    return run


LOOPS |= {"loaded_before": resumed(first=True), "loaded_after": resumed(first=False)}


def carried_on(name: str, copied: Callable, make: Callable = mlp) -> None:
    """Enter a loop that trains, and goes on with `copied(model, optimizer)`."""

    @training(make, adam, name)
    def run(model, optimizer):
        fit(model, optimizer, steps=3)
        other, own = copied(model, optimizer)
        fit(other, own, steps=3)
        return other


def through_a_file(model, optimizer):
    saved = reloaded((model.state_dict(), optimizer.state_dict()), weights_only=True)
    plain = mlp()
    own = adam(plain.parameters())
    plain.load_state_dict(saved[0])
    own.load_state_dict(saved[1])
    return plain, own


def whole_through_a_file(model, _):
    """Load as torch does by default: nothing but tensors and the named classes."""
    with torch.serialization.safe_globals([type(part) for part in model.modules()]):
        loaded = reloaded(model, weights_only=True)
    return loaded, adam(loaded.parameters())


carried_on("on_from_its_state", through_a_file)
carried_on("on_from_the_whole_model", whole_through_a_file)


def normalised() -> nn.Module:
    model = mlp()
    parametrizations.weight_norm(model[0])
    return model


def both_copied(model, optimizer):
    return copy.deepcopy((model, optimizer))


carried_on("on_from_a_copy", both_copied)
# Their classes copy all of their attributes.
carried_on("on_from_a_copy_of_parametrized", both_copied, normalised)
carried_on("on_from_a_copy_of_a_graph", both_copied, lambda: torch.fx.symbolic_trace(mlp()))
carried_on("on_from_a_pickle", lambda m, o: pickle.loads(pickle.dumps((m, o))))


# Averages of weights, teachers.


def averaged(make_average: Callable, first: bool) -> Script:
    """Return a loop with an averaged model made before `prepare`, or after it."""

    def run(prepare) -> Moved:
        model = mlp()
        start = tensors(model)
        average = make_average(model) if first else None
        model, optimizer = prepare(model, sgd(model.parameters()))
        average = average or make_average(model)
        fit(model, optimizer, stepped=lambda *_: average.update_parameters(model))
        return Moved(start, tensors(average.module))

    return run


def _ema(model):
    return swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.5))


LOOPS |= {"ema_before": averaged(_ema, first=True), "ema_after": averaged(_ema, first=False)}


@training(cnn)
def stochastic_weight_averaging(model, optimizer):
    average = swa_utils.AveragedModel(model)
    fit(model, optimizer, IMAGES, stepped=lambda *_: average.update_parameters(model))
    swa_utils.update_bn([IMAGES[0]], average)
    return average.module


@torch.no_grad()
def follow(average: nn.Module, model: nn.Module) -> None:
    for own, other in zip(average.parameters(), model.parameters(), strict=True):
        own.lerp_(other, 0.5)


def follow_by_data(average: nn.Module, model: nn.Module) -> None:
    for own, other in zip(average.parameters(), model.parameters(), strict=True):
        own.data.mul_(0.5).add_(other.data, alpha=0.5)


@training()
def ema_by_hand(model, optimizer):
    average = copy.deepcopy(model)
    fit(model, optimizer, stepped=lambda *_: follow(average, model))
    return average


def taught(made: Callable, update: Callable) -> Script:
    """Return a loop in which `made(prepare, model)` teaches the model that it follows."""

    def run(prepare) -> Moved:
        model = mlp()
        start = tensors(model)
        model, optimizer = prepare(model, sgd(model.parameters()))
        teacher = made(prepare, model).requires_grad_(False)
        for _ in range(6):
            optimizer.zero_grad()
            with torch.no_grad():
                wanted = teacher(INPUTS)
            logits = model(INPUTS)
            (F.cross_entropy(logits, VECTORS[1]) + F.mse_loss(logits, wanted)).backward()
            optimizer.step()
            update(teacher, model)
        return Moved(start + start, tensors(model, teacher))

    return run


LOOPS |= {
    "mean_teacher": taught(lambda _, model: copy.deepcopy(model), follow),
    "prepared_teacher": taught(lambda prepare, _: prepare(mlp()), follow_by_data),
}


@script
def gradients_through_a_teacher(prepare):
    """Judge by a frozen network, without an optimizer, what another one makes."""
    torch.manual_seed(2)
    model = nn.Linear(32, 32)
    start = tensors(model)
    model, optimizer = prepare(model, sgd(model.parameters()))
    teacher = prepare(mlp()).requires_grad_(False)
    fit(model, optimizer, loss=lambda m, x, y: F.cross_entropy(teacher(m(x)), y))
    return Moved(start, tensors(model))


# Several models.


def generator_and_critic() -> tuple[nn.Module, ...]:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
    return made, nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))


def adversarial(together: bool) -> Script:
    """Return a GAN's loop; its networks are prepared together, or one after the other."""

    def run(prepare) -> Moved:
        models = generator_and_critic()
        start = tensors(*models)
        optimizers = [making("Adam", lr=1e-3, eps=1e-4)(m.parameters()) for m in models]
        if together:
            (made, judge), (of_made, of_judge) = prepare(models, optimizers)
        else:
            pairs = [prepare(*pair) for pair in zip(models, optimizers, strict=True)]
            (made, of_made), (judge, of_judge) = pairs
        noise, real = INPUTS[:32, 24:], INPUTS[:32, :16]
        for _ in range(6):
            judge.requires_grad_(True)
            judge.zero_grad()
            fake = made(noise)
            F.softplus(-judge(real)).mean().backward()
            F.softplus(judge(fake.detach())).mean().backward()
            of_judge.step()
            judge.requires_grad_(together)  # a judge at rest, or one whose gradients are zeroed
            made.zero_grad()
            F.softplus(-judge(fake)).mean().backward()
            of_made.step()
        return Moved(start, tensors(made, judge))

    return run


LOOPS |= {"gan": adversarial(together=True), "gan_one_by_one": adversarial(together=False)}


@script
def chain_of_two_scales(prepare):
    """Train two prepared models, each with its own loss scale, by one loss."""
    torch.manual_seed(2)
    first, second = nn.Linear(32, 32), mlp()
    start = tensors(first, second)
    first, of_first = prepare(first, sgd(first.parameters()))
    second, of_second = prepare(second, sgd(second.parameters()))
    for _ in range(6):
        of_first.zero_grad()
        of_second.zero_grad()
        classified(second, first(INPUTS), VECTORS[1]).backward()
        of_first.step()
        of_second.step()
    return Moved(start, tensors(first, second))


# A prepared model beside plain tensors with optimizers of their own.


def beside(part: Callable[[], nn.Module], logits: Callable, graded=None, overflow=None) -> Script:
    """Return a loop of a prepared model and a plain part, both trained.

    logits(model, part): of VECTORS.
    overflow: the second loss is too large for a mode that then skips the step of the model, and of
        a part "before" it, whose gradients come out of the model; one "behind" it steps. The script
        leaves these steps out by hand where nothing overflows.
    """

    def run(prepare) -> Moved:
        torch.manual_seed(4)
        model, plain = mlp(), part()
        start = tensors(model, plain)
        of_plain = sgd(plain.parameters(), 0.05 if overflow is None else 0.01)
        model, optimizer = prepare(model, sgd(model.parameters()))
        for index in range(6):
            too_large = overflow is not None and index == 1
            optimizer.zero_grad()
            of_plain.zero_grad()
            loss = F.cross_entropy(logits(model, plain), VECTORS[1])
            (loss * (1000.0 if too_large else 1.0)).backward()
            if graded:
                graded([*model.parameters(), *plain.parameters()])
            by_hand = too_large and not prepare.skips
            if not by_hand:
                optimizer.step()
            if not by_hand or overflow == "behind":
                of_plain.step()
        return Moved(start, tensors(model, plain))

    return run


class Held(nn.Module):
    """Hold one parameter."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.zeros(shape))


ON_A_HEAD = lambda: nn.Linear(10, 10), lambda model, head: head(model(INPUTS))
AFTER_A_PROMPT = lambda: Held(64, 32), lambda model, held: model(INPUTS + held.value)


LOOPS |= {
    "plain_head": beside(*ON_A_HEAD),
    "plain_head_overflow": beside(*ON_A_HEAD, overflow="behind"),
    "loss_with_parameters": beside(
        *ON_A_HEAD, graded=lambda all_own: nn.utils.clip_grad_norm_(all_own, 0.5)
    ),
    "temperature": beside(Held, lambda model, held: model(INPUTS) * held.value.exp()),
    "soft_prompt": beside(*AFTER_A_PROMPT),
    "soft_prompt_overflow": beside(*AFTER_A_PROMPT, overflow="before"),
}


@script
def prompt_by_attribute(prepare):
    """Hand a plain leaf to the model past its arguments."""
    model, leaf = Forward(lambda m, x: m.net(x + m.kept[0].to(x.dtype))), torch.zeros(64, 32)
    start = [*tensors(model), leaf.clone()]
    model.kept = [leaf.requires_grad_()]
    model, optimizer = prepare(model, sgd(model.parameters()))
    of_leaf = sgd([leaf])
    fit(model, optimizer, graded=lambda *_: (of_leaf.step(), of_leaf.zero_grad()))
    return Moved(start, [*tensors(model), leaf.detach()])


def overflowing(make=mlp, optimizer=sgd, graded=None, batch=VECTORS, second=None) -> Script:
    """Return a loop whose second step overflows where a mode then skips it.

    second: makes the optimizer that takes the steps, in place of the prepared one.
    """

    def run(prepare) -> Moved:
        model = make()
        start = tensors(model)
        model, own = prepare(model, optimizer(model.parameters()))
        own = second(model.parameters()) if second else own
        for index in range(6):
            if index == 1 and not prepare.skips:
                continue
            own.zero_grad()
            (classified(model, *batch) * (1e9 if index == 1 else 1.0)).backward()
            if graded:
                graded(model)
            own.step()
        return Moved(start, tensors(model))

    return run


LOOPS |= {
    "overflow": overflowing(optimizer=adam),
    "overflow_clipped_by_value": overflowing(
        graded=lambda model: nn.utils.clip_grad_value_(model.parameters(), 1e-2)
    ),
    "overflow_in_batch_norm": overflowing(cnn, batch=IMAGES),
    "overflow_in_a_second_phase": overflowing(second=adam),
}


# Gradients that are read, tensors that leave by another way than the output.


def of_one_pass(read: Callable) -> Script:
    """Return a script that compares what `read(model)` returns after one step."""

    def run(prepare) -> Moved:
        model = mlp()
        model, optimizer = prepare(model, sgd(model.parameters()))
        fit(model, optimizer, steps=1)
        optimizer.zero_grad()
        found = [part.detach().clone() for part in read(model)]
        return Moved([torch.zeros_like(part) for part in found], found)

    return run


def retained(model):
    logits = model(INPUTS)
    logits.retain_grad()
    F.cross_entropy(logits, VECTORS[1]).backward()
    return [logits.grad]


def of_the_inputs(model):
    inputs = INPUTS.clone().requires_grad_()
    classified(model, inputs, VECTORS[1]).backward()
    return [inputs.grad, *(parameter.grad for parameter in model.parameters())]


def seen_by_a_hook(model):
    seen = []
    model[0].weight.register_hook(seen.append)
    classified(model, *VECTORS).backward()
    return [seen[0].clone()]


LOOPS |= {
    "output_gradient": of_one_pass(retained),
    "input_gradient": of_one_pass(of_the_inputs),
    "parameter_hook_reads": of_one_pass(seen_by_a_hook),
}


def leaking(name: str, make: Callable[[list], nn.Module]) -> None:
    """Enter a loop whose loss uses a tensor from inside of the model, which lies in a list."""
    seen: list[Tensor] = []

    def loss(model, inputs, labels):
        seen.clear()
        return classified(model, inputs, labels) + 0.1 * seen[0].float().square().mean()

    usual(name, lambda: make(seen), loss=loss)


def with_a_forward_hook(seen: list) -> nn.Module:
    model = mlp()
    model[2].register_forward_hook(lambda _, __, hidden: seen.append(hidden))
    return model


def with_a_closure(seen: list) -> nn.Module:
    def act(model, inputs):
        hidden = model.net[:3](inputs)
        seen.append(hidden)
        return model.net[3](hidden)

    return Forward(act)


leaking("hidden_by_a_hook", with_a_forward_hook)
leaking("hidden_by_a_closure", with_a_closure)


@training()
def grad_scaler_left(model, optimizer):
    """Keep the loss scaler of torch that the script had before."""
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(6):
        optimizer.zero_grad()
        scaler.scale(classified(model, *VECTORS)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
