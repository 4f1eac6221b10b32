"""Random scripts: what must not change a bit changes none, whatever meets in them."""

import copy
import itertools
import math
import random
import tempfile
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import mprun
from mprun.precision import StaticLossScale, get_policy
from mprun.prepared import passes

from ..helpers import assert_same_bits, rows_of
from ..shipped import MODES as SHIPPED
from .networks import prepared, reloaded, sgd, take_step
from .random_scripts import (
    CLASSES,
    LOSSES,
    TWICE,
    WIDTH,
    Body,
    InMode,
    Objects,
    Plain,
    Script,
    Skipping,
    evaluated,
    train,
)

SEEDS = range(100)
MODES = [mode for mode in SHIPPED if mode != "tf32"]  # which a CPU does not have
# Those whose objects can be built anew at any step.
RESUMED = [
    seed
    for seed in range(3 * len(SEEDS))
    if not any(step.event in ("append", "freeze", "unfreeze") for step in Script(seed).steps)
]


def of_scripts(seeds=SEEDS, losses=LOSSES):
    """Let a test of a script be one of many: of the first by default, and of ten in each slow case.

    A case costs a millisecond when it is collected, also where it is left out.
    """

    def over(test):
        def cases(numbers):
            for number in numbers:
                test(Script(number, losses))

        cases.__name__ = test.__name__
        tens = [seeds[first : first + 10] for first in range(0, len(seeds), 10)]
        slow = [pytest.param(own, marks=pytest.mark.slow, id=f"to {own[-1]}") for own in tens]
        return pytest.mark.parametrize("numbers", [pytest.param(seeds[:1], id="one"), *slow])(cases)

    return over


# An optimizer may take no step in the first one.
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler")


def mode_for(script):
    return InMode(MODES[script.seed % len(MODES)])


@of_scripts(losses=TWICE)
def test_fp32_has_the_bits_of_the_plain_script(script):
    assert_same_bits(train(script, InMode("fp32")), train(script, Plain()))


@of_scripts()
def test_a_power_of_two_as_loss_scale_changes_no_bit_in_the_range_of_fp32(script):
    scaled = InMode("bf16_master", lambda: StaticLossScale(2.0**10))
    expected = train(script, InMode("bf16_master"), overflows=False)
    assert_same_bits(train(script, scaled, overflows=False), expected)


@of_scripts()
def test_it_skips_the_steps_that_torch_amp_skips(script):
    expected = Skipping()
    mode = InMode("fp16_master_scaled", lambda: StaticLossScale(1.0))
    train(script, expected)
    train(script, mode)
    assert mode.skips == expected.skips


@pytest.mark.slow
@of_scripts()
def test_looks_between_two_steps_change_no_bit(script):
    draw = random.Random(script.seed)

    def look(number, objects):
        for model in objects.models:
            match draw.choice("evaluate save explain advise".split()):
                case "evaluate":
                    evaluated(model)
                case "save":
                    reloaded(model.state_dict())
                case name if script.steps[number].clears in ("none", "model"):
                    kept = [own.requires_grad for own in model.parameters()]
                    if all(kept) and not script.frozen:
                        asking(name)(step_of(objects), objects.optimizers)
        return objects

    mode = mode_for(script)
    expected = train(script, mode, overflows=False)
    assert_same_bits(train(script, mode, before=look, overflows=False), expected)


def asking(name):
    """Return `mprun.explain` or `mprun.advise`, of an extension, or skip without it."""
    pytest.importorskip("mprun.extensions.diagnosis")
    return getattr(mprun, name)


def step_of(objects):
    """A step of all optimizers, which draws random numbers, too."""

    def step():
        for optimizer in objects.optimizers:
            optimizer.zero_grad()
        x, labels = torch.randn(16, WIDTH), torch.randint(CLASSES, (16,))
        loss = sum(F.cross_entropy(objects.head(model(x)), labels) for model in objects.models)
        loss.backward()
        for optimizer in objects.optimizers:
            optimizer.step()
        return loss

    return step


@of_scripts()
def test_a_run_with_probes_changes_no_bit(script):
    runs, mode = [], mode_for(script)

    def watched(number, objects):
        if not runs:
            run = mprun.Run(folder, objects.optimizers, config={}, seed=0, probe_every=2)
            runs.append([run, 0])
        return objects

    def after(objects):
        steps = sum(mprun.state_of(own).steps for own in objects.optimizers)
        if steps > runs[0][1]:
            runs[0][0].step(0.0)
        runs[0][1] = steps

    with tempfile.TemporaryDirectory() as folder:
        found = train(script, mode, before=watched, after=after, overflows=mode.scales)
        runs[0][0].close()
    assert runs[0][0].status == "done"
    assert_same_bits(found, train(script, mode, overflows=mode.scales))


@of_scripts(RESUMED[: len(SEEDS)])
def test_it_goes_on_from_a_file_bit_for_bit(script):
    mode = mode_for(script)
    again = resumed(script, mode, stop_of(script))
    expected = train(script, mode, overflows=mode.scales)
    assert_same_bits(train(script, mode, before=again, overflows=mode.scales), expected)


def stop_of(script):
    """Return the number of a step that clears gradients, which no file has; 0 if there is none."""
    cleared = [n for n, step in enumerate(script.steps) if step.clears in ("none", "model")]
    return random.Random(script.seed).choice(cleared or [0])


def resumed(script, mode, stop):
    """Go on before step `stop` with new objects in `mode`, from a file."""

    def before(number, objects):
        if number != stop:
            return objects
        state, saved = torch.get_rng_state(), reloaded(objects.saved())
        again = Objects(script, mode)
        again.load(saved)
        again.batches = objects.batches
        torch.set_rng_state(state)
        return again

    return before


SWITCHES = [
    ("fp16_master_scaled", "amp"),
    ("amp", "fp16_master_scaled"),
    ("amp_bf16", "bf16_master"),
    ("bf16_master", "fp8_delayed"),
    ("fp8_delayed", "bf16_master"),
    ("fp8_tensorwise", "fp8_rowwise"),
    ("fp32", "int8_rowwise"),
]


@of_scripts(RESUMED[: len(SEEDS)])
def test_a_switch_goes_on_as_objects_of_the_other_mode_do(script):
    stop = stop_of(script)
    first, second = map(InMode, SWITCHES[script.seed % len(SWITCHES)])

    def switched(number, objects):
        if number == stop:
            for models in [[own] for own in objects.models] if script.apart else [objects.models]:
                mprun.switch(models, second.mode)
        return objects

    found = train(script, first, before=switched, overflows=first.scales)
    expected = train(script, first, before=resumed(script, second, stop), overflows=first.scales)
    assert_same_bits(found, expected)


# What they have brought to light, each as small as it can be.

INPUTS = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(0))
SCALED = ["amp", "fp16_master_scaled"]


def linear():
    torch.manual_seed(0)
    return nn.Linear(WIDTH, WIDTH)


def pair():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


def square(model, factor=1.0):
    return model(INPUTS).square().mean() * factor


@pytest.mark.parametrize("mode", SCALED)
@pytest.mark.parametrize("closure", [False, True])
def test_an_overflow_of_a_model_that_is_left_out_later_skips_one_step(mode, closure):
    encoder, *heads = linear(), linear(), linear()
    optimizer = sgd(itertools.chain(*(own.parameters() for own in (encoder, *heads))), lr=1e-3)
    mprun.prepare([encoder, *heads], [optimizer], mode)
    skips = []
    for head, factor in zip([0, 0, 1, 1], [1.0, math.inf, 1.0, 1.0], strict=True):

        def loss(head=heads[head], factor=factor):
            optimizer.zero_grad()
            value = square(nn.Sequential(encoder, head), factor)
            value.backward()
            return value

        loss()
        optimizer.step(loss if closure and factor == 1.0 else None)
        skips.append(int(mprun.state_of(optimizer).found_inf))
    assert skips == [0, 1, 0, 0]
    assert mprun.state_of(optimizer).scale.scale == 2.0**15


@pytest.mark.parametrize("mode", SCALED)
def test_an_overflow_that_is_not_cleared_skips_until_it_is(mode):
    first, second = linear(), linear()
    optimizer = sgd([*first.parameters(), *second.parameters()], lr=1e-3)
    mprun.prepare([first, second], [optimizer], mode)
    skips = []
    for model, factor, clears in [(0, math.inf, True), (1, 1.0, False), (1, 1.0, True)]:
        if clears:
            optimizer.zero_grad()
        square((first, second)[model], factor).backward()
        optimizer.step()
        skips.append(int(mprun.state_of(optimizer).found_inf))
    assert skips == [1, 1, 0]


@pytest.mark.parametrize("mode", SCALED)
def test_an_infinity_that_a_script_sets_is_skipped_under_a_probe_too(mode):
    """torch's foreach functions count no versions below a mode that sees each operation."""
    model, optimizer = prepared(mode, linear())

    def step():
        optimizer.zero_grad()
        loss = square(model)
        loss.backward()
        torch._foreach_mul_([own.grad for own in model.parameters()], math.inf)
        optimizer.step()
        return loss

    before = model.weight.detach().clone()
    mprun.probe(step, optimizer)
    assert mprun.state_of(optimizer).found_inf == 1 and torch.equal(model.weight, before)


def test_two_optimizers_of_one_model_are_probed():
    model = pair()
    optimizers = [sgd(layer.parameters()) for layer in model]
    mprun.prepare(model, optimizers, "amp")
    record = mprun.probe(partial(take_step, optimizers, square, model), optimizers)
    found = {name: [*own.tensors["weight_gradients"]] for name, own in record.learners.items()}
    assert found == {"model0": ["0"], "model1": ["1"]}


def test_a_copy_of_a_model_under_a_probe_is_not_probed():
    model, optimizer = prepared("bf16_master", pair())
    copies = []

    def step():
        copies.append(copy.deepcopy(model))
        square(copies[-1])
        return take_step(optimizer, square, model)

    record = mprun.probe(step, optimizer)
    outputs = record.learners["model"].tensors["activations"]["0"].counts
    assert outputs.total == INPUTS.numel() and not copies[-1][0]._forward_hooks


@pytest.mark.parametrize("ask", ["explain", "advise"])
def test_a_head_beside_the_model_is_put_back(ask):
    model, head = linear(), linear()
    optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()])
    mprun.prepare(model, optimizer, "fp32")
    step = partial(take_step, optimizer, square, nn.Sequential(model, head))
    step()
    before = copy.deepcopy([head.state_dict(), optimizer.state_dict()["state"]])
    asking(ask)(step, optimizer)
    assert_same_bits([head.state_dict(), optimizer.state_dict()["state"]], before)


def test_a_run_may_begin_before_one_of_its_optimizers(tmp_path):
    """As with a critic that takes some steps first."""
    generator, critic = linear(), linear()
    optimizers = [sgd(model.parameters()) for model in (generator, critic)]
    for model, optimizer in zip((generator, critic), optimizers, strict=True):
        mprun.prepare(model, optimizer, "amp")
    with mprun.Run(tmp_path / "run", optimizers, config={}, seed=0) as run:
        run.step(take_step(optimizers[1], square, critic))
    rows = rows_of(run.directory, "train")
    assert [row["loss_scale"] for row in rows] == [2.0**16]


@pytest.mark.parametrize("mode", ["amp", "fp16_master_scaled"])
def test_a_frozen_layer_gets_no_state_of_a_fused_optimizer(mode):
    model = pair()
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    mprun.prepare(model, optimizer, mode)
    take_step(optimizer, square, model, math.inf)
    take_step(optimizer, square, model)
    assert {*optimizer.state} == {*model[1].parameters()}


@pytest.mark.parametrize("mode", ["bf16_naive", "bf16_kahan", "fp16_naive"])
def test_a_number_beside_a_16_bit_weight_keeps_its_digits_in_a_file(mode):
    model, optimizer = prepared(mode, linear(), lambda own, lr: torch.optim.NAdam(own, lr))
    take_step(optimizer, square, model)
    saved = reloaded(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    product = optimizer.state[model.weight]["mu_product"]
    assert product.dtype is torch.float32 and product == saved["state"][0]["mu_product"]


@pytest.mark.parametrize("mode", ["bf16_master", "amp", "fp16_master_scaled"])
def test_the_gradient_of_a_last_layer_alone_takes_no_way_through_the_others(mode):
    """As the adaptive weight of VQGAN asks for it, at each step."""
    model, optimizer = prepared(mode, pair())
    passed = []

    def layers(model, inputs):
        hidden = model[0](inputs)
        hidden.register_hook(passed.append)
        return model[1](hidden)

    model.forward = partial(layers, model)
    for _ in range(2):
        loss = square(model)
        passed.clear()
        torch.autograd.grad(loss, model[1].weight, retain_graph=True)
        seen = len(passed)
        loss.backward()
    assert (seen, len(passed)) == (0, 1)


@pytest.mark.parametrize("mode", ["bf16_master", "amp", "fp8_rowwise"])
def test_a_normalised_weight_that_a_script_reads_is_in_fp32_and_no_call(mode):
    model = pair()
    parametrizations.weight_norm(model[0])
    expected = model[0].weight.detach().clone()
    optimizer = sgd(model.parameters())
    policy = get_policy(mode)
    mprun.prepare(model, optimizer, policy if policy.matmul is None else every_layer(policy))
    for _ in range(3):
        found = model[0].weight
    assert_same_bits(found.detach(), expected)
    take_step(optimizer, lambda: square(model) + model[0].weight.square().mean())
    (alive,) = {one for one in passes.alive if one.model is model}
    assert alive.calls == 1 and alive.audit.products


def every_layer(policy):
    return replace(policy, matmul=replace(policy.matmul, modules=("*",)))


def test_no_norm_of_a_weight_moves_when_a_mode_is_entered():
    model = pair()
    parametrizations.spectral_norm(model[0])
    before = copy.deepcopy(model.state_dict())
    mprun.prepare(model, precision="fp8_rowwise")
    mprun.switch(model, "bf16_master")
    assert_same_bits(model.state_dict(), before)


def test_a_buffer_of_a_part_that_is_called_late_is_written_in_fp32():
    model = nn.ModuleList([linear(), Body("mean", None, None)])
    mprun.prepare(model, precision="bf16_master")
    for _ in range(4):
        model[0](INPUTS)
    model[1](INPUTS)
    mean = model[1].mean.clone()
    assert not torch.equal(mean, mean.bfloat16().float())


@pytest.mark.parametrize("mode", ["fp32", "bf16_master"])
def test_one_call_in_a_thousand_is_watched(mode):
    model = mprun.prepare(linear(), precision=mode)
    (audit,) = {one.audit for one in passes.alive if one.model is model}
    watched = []
    for _ in range(1002):
        model(INPUTS[:1])
        watched.append(audit.watched)
    assert [watched[n] for n in (0, 2, 999, 1000, 1001)] == [1, 3, 3, 4, 4]


def test_the_largest_gradient_of_a_model_that_is_left_out_moves_no_scale():
    """The scaler `logmax` averages the largest gradients of the steps that are taken."""

    def scales(prepared_together):
        models = linear(), linear()
        optimizers = [sgd(itertools.chain(*(own.parameters() for own in models)), lr=1e-3)]
        if prepared_together:
            mprun.prepare([*models], optimizers, "amp", scaler="logmax")
        else:  # one model, of which a part is called
            mprun.prepare(nn.ModuleList(models), optimizers[0], "amp", scaler="logmax")
        found = []
        for model, factor in [(0, 100.0), (1, 1.0), (1, 1.0)]:
            take_step(optimizers, square, models[model], factor)
            found.append(mprun.state_of(optimizers[0]).scale.scale.item())
        return found

    assert scales(True) == scales(False)


@pytest.mark.parametrize("mode", SCALED)
def test_an_infinite_gradient_of_a_head_beside_the_model_is_skipped(mode):
    """The model's own weights are frozen, or another optimizer's."""
    model, head = pair(), linear()
    model[0].requires_grad_(False)
    optimizers = [sgd(model[1].parameters()), sgd([*model[0].parameters(), *head.parameters()])]
    mprun.prepare(model, optimizers, mode)
    kept = head.weight.detach().clone()
    take_step(optimizers[1], square, nn.Sequential(model, head), math.inf)
    assert mprun.state_of(optimizers[1]).found_inf and torch.equal(head.weight, kept)


def test_an_overflow_of_an_earlier_iteration_skips_no_step_of_an_optimizer_that_was_idle():
    models = linear(), linear()
    optimizers = [sgd(model.parameters(), lr=1e-3) for model in models]
    mprun.prepare([*models], optimizers, "amp")
    square(nn.Sequential(*models), math.inf).backward()
    optimizers[0].step()
    optimizers[1].zero_grad(set_to_none=False)
    take_step(optimizers[0], square, models[0])
    optimizers[1].step()
    assert [int(mprun.state_of(own).found_inf) for own in optimizers] == [0, 0]


def test_a_layer_that_is_added_late_is_probed_in_fp32():
    model, optimizer = prepared("fp32", pair())
    for _ in range(3):
        take_step(optimizer, square, model)
    model.append(linear())
    optimizer.add_param_group({"params": model[-1].parameters()})
    record = mprun.probe(partial(take_step, optimizer, square, model), optimizer)
    assert {*record.learners["model"].tensors["weight_gradients"]} == {"0", "1", "2"}
