"""Probe, explanation and advice in a script are those of a run, hold, and leave all as it was."""

import copy
from dataclasses import asdict
from functools import partial
from operator import attrgetter

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mprun
from mprun.errors import BadInput
from mprun.numerics.probe import chosen_modules
from mprun.numerics.probing import Watched
from mprun.numerics.replay import Steps
from mprun.precision import DynamicLossScale, DynamicRule

from ..helpers import assert_same_bits, record_of
from .loops import classified
from .networks import SMALL, as_in_a_script, batches, loss_of, net, prepared, stepping

first_nonfinite = pytest.importorskip("mprun.extensions.diagnosis.first_nonfinite")
find_culprit, in_words = first_nonfinite.find_culprit, first_nonfinite.in_words


def step_in_a_script(built):
    """The first step of a built run as a script takes it, and its optimizer."""
    model, optimizer = as_in_a_script(built)
    return stepping(optimizer, lambda: classified(model, *built.data.train_batch(0))), optimizer


def test_a_criterion_that_is_a_module_is_a_part_of_the_loss():
    def operations_of(criterion):
        model, optimizer = prepared("fp32", nn.Linear(4, 3))
        loss = partial(criterion, target=torch.arange(2))
        step = stepping(optimizer, lambda: loss(model(torch.ones(2, 4))))
        return mprun.probe(step, optimizer).learners["model"].operations

    expected = operations_of(F.cross_entropy)
    found = operations_of(nn.CrossEntropyLoss())
    assert {place.phase for place in expected} == {"loss", "backward"}
    assert found.keys() == expected.keys()


def test_a_teacher_of_the_model_s_own_class_is_no_copy_of_it():
    inputs, teacher = torch.ones(2, 4), nn.Linear(4, 3)
    model, optimizer = prepared("fp32", nn.Linear(4, 3))

    def operations_of(taught):
        step = stepping(optimizer, lambda: F.mse_loss(model(inputs), taught(inputs).detach()))
        return mprun.probe(step, optimizer).learners["model"].operations

    expected = operations_of(partial(F.linear, weight=teacher.weight, bias=teacher.bias))
    assert operations_of(teacher).keys() == expected.keys()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fp32", "fp16_master_scaled", "amp", "bf16_naive", "bf16_kahan"])
def test_a_probe_is_equal_to_that_of_a_run(mode, build_run):
    built = build_run(*SMALL, f"precision={mode}")
    step, optimizer = step_in_a_script(built)
    torch.manual_seed(5)
    with Watched(built.task, chosen_modules(built.task.learners, [])) as watched:
        watched.metrics = built.task.train_step(0)
    expected = watched.record(1)
    torch.manual_seed(5)
    found = mprun.probe(step, optimizer)
    own, theirs = found.learners["model"], expected.learners["model"]
    assert found.log2_loss_scale == expected.log2_loss_scale
    measured = attrgetter("counts", "amax", "dtype", "stride")
    for kind in theirs.tensors:
        mine, stats = own.tensors[kind], theirs.tensors[kind]
        assert mine.keys() == stats.keys()
        for name in stats:
            assert measured(mine[name]) == measured(stats[name]), (kind, name)
    assert own.lost_updates == theirs.lost_updates
    assert own.applied_updates == theirs.applied_updates
    assert bool(own.applied_updates) == (mode in ("bf16_naive", "bf16_kahan"))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fp16_naive", "fp16_master_scaled", "amp"])
def test_an_explanation_is_equal_to_that_of_a_run(mode, build_run):
    built = build_run(*SMALL, f"precision={mode}")
    with torch.no_grad():  # an overflow in the middle of the network
        for own in built.task.learner.updated:
            own.mul_(16.0)
    step, optimizer = step_in_a_script(built)
    torch.manual_seed(5)
    expected = find_culprit(Steps(built, 0, 0), "step")
    torch.manual_seed(5)
    found = mprun.explain(step, optimizer)
    assert found.reproduced and expected.reproduced and expected.event.phase == "forward"
    assert in_words(found) == in_words(expected)
    assert asdict(found.event) == asdict(expected.event)
    # A run casts images as it loads them if its parameters are in 16 bits, a script in the call.
    inside = [[one for one in own.ramp if one.module] for own in (found, expected)]
    assert inside[0] == inside[1]


@pytest.mark.parametrize("mode", ["fp8_tensorwise", "fp8_rowwise", "fp8_unscaled"])
def test_an_overflow_of_a_product_in_fp8_is_that_of_its_layer(mode):
    """2^70 * 2^70 * 16 is beyond BF16; casts and their scales are no values of the network."""
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 1))
    # Without a scale all saturates at 448: the third layer, in BF16, is where it ends.
    for layer, exponent in (0, 66), (2, 70), (3, 120):
        model[layer].weight.data.fill_(2.0**exponent)
    model, optimizer = prepared(mode, model)
    step = stepping(optimizer, lambda: model(torch.ones(4, 16)).float().sum())
    found = mprun.explain(step, optimizer)
    assert found.reproduced and found.event.phase == "forward"
    if mode == "fp8_unscaled":
        assert found.event.module == "3"
        return
    assert (found.event.module, found.event.operation) == ("2", "scaled_mm")
    assert found.event.largest_input == pytest.approx(2.0**70, rel=0.01)
    assert found.event.would_be == float("inf")
    [first] = [one for one in found.ramp if one.module == "0"]
    assert first.value == pytest.approx(2.0**70, rel=0.01)


def states(model, optimizer):
    return model.state_dict(), optimizer.state_dict(), torch.get_rng_state()


def test_an_explanation_names_the_module_and_puts_everything_back():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    with torch.no_grad():
        for own in model.parameters():
            own.fill_(100.0)
    model, optimizer = prepared("fp16_master", model, torch.optim.Adam)
    before = copy.deepcopy(states(model, optimizer))
    step = stepping(optimizer, lambda: model(torch.full((2, 4), 50.0)).mean())
    finding = mprun.explain(step, optimizer)
    assert (finding.verdict, finding.event.module) == ("operation", "1")
    # 100 * 100 * 50 * 4 * 4 and more: beyond FP16's 65504.
    assert finding.event.dtype is torch.float16 and finding.event.would_be > 65504
    assert_same_bits(states(model, optimizer), before)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fp16_master", "amp", "fp32"])
def test_a_step_whose_gradients_all_underflow_says_so(mode):
    """1e-8 is below half of FP16's smallest number: no scale, no gradient."""
    model, optimizer = prepared(mode, scaler=None if mode == "fp16_master" else "none")
    step = stepping(optimizer, lambda: loss_of(model) * 1e-8)
    found = mprun.explain(step, optimizer)
    probe = mprun.probe(step, optimizer)
    zeros = "zeros 100 %, measured after rounding: probe in fp32 or use numerics.shadow_every"
    assert not found.reproduced
    if mode == "fp32":
        assert str(found) == "not found: the step does not fail" and zeros not in str(probe)
        words = probe.learners["model"].in_words("weight_gradients")
        assert "; of the others in FP16: underflow 100 %" in words
        return
    assert str(found).startswith("not found: the step does not fail, but every gradient of a ")
    assert "it trains nothing; the last that were not were at most 2^-" in str(found)
    assert str(probe).count(zeros) == 2


def test_rates_and_buffers_outside_of_the_state_are_put_back_and_fp32_is_explained():
    class Counts(nn.Linear):
        def __init__(self):
            super().__init__(4, 1)
            self.register_buffer("calls", torch.zeros(()), persistent=False)

        def forward(self, x):
            self.calls += 1
            return super().forward(x)

        def state_dict(self, *arguments, **named):
            return {}

    model, optimizer = prepared("fp32", Counts())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    before = model.weight.detach().clone()

    def step():
        loss = stepping(optimizer, lambda: model(torch.ones(2, 4)).sum())()
        scheduler.step()
        return loss

    assert not mprun.explain(step, optimizer).reproduced
    assert torch.equal(model.weight, before) and model.calls == 0
    assert optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize(
    "options", [{"mode": "fp32", "scaler": "dynamic"}, {"mode": "fp16_master", "native": True}]
)
def test_the_first_step_of_all_is_explained_where_nothing_is_emulated(options):
    model, optimizer = prepared(**options)
    assert not mprun.explain(stepping(optimizer, lambda: loss_of(model)), optimizer).reproduced


def test_a_healthy_step_is_not_explained():
    model, optimizer = prepared("amp")
    stream = batches(3)
    step = stepping(optimizer, lambda: classified(model, *next(stream)))
    finding = mprun.explain(step, optimizer, steps=3)
    assert not finding.reproduced and finding.verdict == "not found"
    with pytest.raises(ValueError, match="must return the loss"):
        mprun.probe(lambda: None, optimizer)


@pytest.mark.parametrize("ask", [mprun.explain, mprun.advise])
def test_a_run_goes_on_as_if_nobody_had_asked(ask, tmp_path):
    model, optimizer = prepared("fp32")
    step = stepping(optimizer, lambda: loss_of(model))
    with mprun.Run(tmp_path, optimizer, config={}, seed=0) as run:
        run.step(step())
        last = mprun.state_of(optimizer).last
        ask(step, optimizer, steps=2)
        assert mprun.state_of(optimizer).last is last
        run.step(step())
    assert record_of(run.directory)["last_step"] == 2


@pytest.mark.parametrize("ask", [mprun.explain, mprun.advise])
def test_gradients_of_a_step_that_raises_move_no_scale(ask):
    model, optimizer = prepared("fp16_master_scaled")

    def step(factor, ends=True):
        loss = loss_of(model) * factor
        loss.backward()
        if not ends:
            raise FloatingPointError
        optimizer.step()
        return loss

    step(1e-4)
    with pytest.raises(FloatingPointError):
        ask(lambda: step(1e9, ends=False), optimizer)
    step(1e-4)
    assert mprun.state_of(optimizer).scale.scale == 2.0**16


def test_a_step_that_raises_between_two_optimizers_counts_for_no_scale():
    scale = DynamicLossScale(DynamicRule(1024.0, growth_interval=2), device=torch.device("cpu"))
    pair = [prepared("fp16_master_scaled", net(), scaler=scale) for _ in range(2)]

    def step(ends=True):
        for model, optimizer in pair:
            loss = loss_of(model) * 1e-4
            loss.backward()
            optimizer.step()
            if not ends:
                raise FloatingPointError
        return loss

    with pytest.raises(FloatingPointError):
        mprun.explain(lambda: step(ends=False), [optimizer for _, optimizer in pair])
    scales = [(step(), float(scale.scale))[1] for _ in range(3)]
    assert scales == [1024, 2048, 2048]


# `mprun.advise`


class Scores(nn.Module):
    """Attention whose scores, of thousands times thousands, are beyond FP16."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, values):
        scores = (1000 * self.query(values)) @ (1000 * self.key(values)).mT
        return self.out(torch.softmax(scores / 1e6, -1) @ values)


def script(precision, seed=0, **options):
    torch.manual_seed(seed)
    model, optimizer = prepared(precision, Scores(), torch.optim.Adam, 1e-3, **options)
    values = torch.randn(4, 8)
    return model, optimizer, lambda: model(values).square().mean()


def test_what_it_names_trains_and_everything_is_put_back():
    model, optimizer, loss = script("fp32")
    step = stepping(optimizer, loss)
    before = copy.deepcopy(states(model, optimizer))
    found = mprun.advise(step, optimizer, steps=2)
    assert_same_bits(states(model, optimizer), before)
    assert found.overrides == {"forward": "fp32"} and found.precision.startswith("fp16_master")
    assert 'overrides={"forward": "fp32"}' in str(found) and "beyond FP16's 65504" in str(found)
    for overrides, fails in ((None, True), (found.overrides, False)):
        _, optimizer, loss = script("fp16_master", overrides=overrides)
        assert mprun.explain(stepping(optimizer, loss), optimizer).reproduced == fails


def test_of_several_models_each_is_named():
    first, one, loss = script("fp32")
    second, other, further = script("fp32", seed=1)

    def step():
        total = loss() + further()
        total.backward()
        for optimizer in (one, other):
            optimizer.step()
            optimizer.zero_grad()
        return total

    found = mprun.advise(step, {"first": one, "second": other}, steps=1)
    kept = [own.module for own in found.found.keep_fp32]
    assert kept == ["first: the model itself", "second: the model itself"]


@pytest.mark.slow
@pytest.mark.parametrize("of_script", ["fp32", "mxfp4", "fp8_rowwise"])
def test_casts_of_products_are_measured(of_script):
    torch.manual_seed(0)
    layers = nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.Linear(32, 4)
    model, optimizer = prepared(of_script, nn.Sequential(*layers))
    values = torch.randn(8, 32)
    step = stepping(optimizer, lambda: model(values).square().mean())
    asked = "mxfp4" if of_script == "fp32" else None
    casts = mprun.advise(step, optimizer, steps=2, precision=asked).found.casts
    assert casts.mode == [f"precision={asked or of_script}"] and casts.steps == 2
    assert set(casts.losses) <= {"0", "2", "3"} and "2" in casts.losses
    product = casts.losses["2"]["output", "weight"]
    assert 0 < product.error < 0.3 and product.nonzero >= 2 * 32 * 32


def test_a_mode_that_is_none_is_refused():
    _, optimizer, loss = script("fp32")
    with pytest.raises(BadInput, match="precision"):
        mprun.advise(stepping(optimizer, loss), optimizer, precision="fp5")
