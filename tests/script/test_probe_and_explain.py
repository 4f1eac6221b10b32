"""What is measured in a script is what a run of mprun measures of the same step."""

import copy
from dataclasses import asdict

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mprun
from mprun.numerics.first_nonfinite import find_culprit, in_words
from mprun.numerics.probe import chosen_modules
from mprun.numerics.probing import Watched
from mprun.numerics.replay import Steps

from .networks import batches, net

SMALL = [
    "model=alexnet_2012",
    "model.width=0.125",
    "optim=sgd_alexnet",
    "data=digits_64",
    "data.batch_size=2",
]


def in_a_script(built):
    """The network, the optimizer and the loss scale of a built run, as a script has them."""
    task, engine = built.task, built.task.learner.optimizer
    with task.learner.cast.in_fp32() as own:
        model = copy.deepcopy(own)
    of_model = dict(zip(map(id, engine.updated), model.parameters(), strict=True))
    groups = [
        g | {"params": [of_model[id(p)] for p in g["params"]]} for g in engine.inner.param_groups
    ]
    scale = copy.deepcopy(engine.loss_scales[0])
    model, optimizer = mprun.prepare(
        model, type(engine.inner)(groups), built.policy.name, scaler=scale
    )

    def step():
        images, labels = built.data.train_batch(0)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        optimizer.backward(loss)
        optimizer.step()
        return loss

    return step, optimizer


@pytest.mark.parametrize("mode", ["fp32", "fp16_master_scaled", "amp", "bf16_naive", "bf16_kahan"])
def test_a_probe_is_equal_to_that_of_a_run(mode, build_run):
    built = build_run(*SMALL, f"precision={mode}")
    step, optimizer = in_a_script(built)
    torch.manual_seed(5)
    with Watched(built.task, chosen_modules(built.task.learners, [])) as watched:
        watched.metrics = built.task.train_step(0)
    expected = watched.record(1)
    torch.manual_seed(5)
    found = mprun.probe(step, optimizer)
    own, theirs = found.learners["model"], expected.learners["model"]
    assert found.log2_loss_scale == expected.log2_loss_scale
    for kind in theirs.tensors:
        assert own.tensors[kind].keys() == theirs.tensors[kind].keys()
        for name, stats in theirs.tensors[kind].items():
            mine = own.tensors[kind][name]
            assert mine.counts == stats.counts, (kind, name)
            assert (mine.amax, mine.dtype, mine.stride) == (stats.amax, stats.dtype, stats.stride)
    assert {n: asdict(v) for n, v in own.lost_updates.items()} == {
        n: asdict(v) for n, v in theirs.lost_updates.items()
    }
    assert own.applied_updates == theirs.applied_updates
    assert bool(own.applied_updates) == (mode in ("bf16_naive", "bf16_kahan"))


@pytest.mark.parametrize("mode", ["fp16_naive", "fp16_master_scaled", "amp"])
def test_an_explanation_is_equal_to_that_of_a_run(mode, build_run):
    built = build_run(*SMALL, f"precision={mode}")
    learner = built.task.learner
    with torch.no_grad():  # an overflow in the middle of the network
        engine = learner.optimizer
        for own, updated in zip(engine.parameters, engine.updated, strict=True):
            own.copy_(updated.mul_(16.0))
    step, optimizer = in_a_script(built)
    torch.manual_seed(5)
    expected = find_culprit(Steps(built, 0, 0), "step")
    torch.manual_seed(5)
    found = mprun.explain(step, optimizer)
    assert found.reproduced and expected.reproduced and expected.event.phase == "forward"
    assert in_words(found) == in_words(expected)
    assert asdict(found.event) == asdict(expected.event)
    # In a script the batch is cast in the call of the model.
    assert [one for one in found.ramp if one.module] == expected.ramp


@pytest.mark.parametrize("mode", ["fp8_tensorwise", "fp8_rowwise", "fp8_unscaled"])
def test_an_overflow_of_a_product_in_fp8_is_that_of_its_layer(mode):
    """2^70 * 2^70 * 16 is beyond BF16; casts and their scales are no values of the network."""
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 1))
    with torch.no_grad():
        model[0].weight.fill_(2.0**66)
        model[2].weight.fill_(2.0**70)
    # Without a scale all saturates at 448: the third layer, in BF16, is where it ends.
    model[3].weight.data.fill_(2.0**120)
    model, optimizer = mprun.prepare(model, torch.optim.SGD(model.parameters(), 0.1), mode)

    def step():
        optimizer.zero_grad()
        loss = model(torch.ones(4, 16)).float().sum()
        optimizer.backward(loss)
        optimizer.step()
        return loss

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


def test_an_explanation_names_the_module_and_puts_everything_back():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    with torch.no_grad():
        for own in model.parameters():
            own.fill_(100.0)
    inner = torch.optim.Adam(model.parameters(), 0.1)
    model, optimizer = mprun.prepare(model, inner, "fp16_master")

    def step():
        optimizer.zero_grad()
        loss = model(torch.full((2, 4), 50.0)).mean()
        optimizer.backward(loss)
        optimizer.step()
        return loss

    before = copy.deepcopy((model.state_dict(), inner.state_dict(), torch.get_rng_state()))
    finding = mprun.explain(step, optimizer)
    assert (finding.verdict, finding.event.module) == ("operation", "1")
    # 100 * 100 * 50 * 4 * 4 and more: beyond FP16's 65504.
    assert finding.event.dtype is torch.float16 and finding.event.would_be > 65504
    assert all(map(torch.equal, model.state_dict().values(), before[0].values()))
    for key, state in inner.state_dict()["state"].items():
        assert all(torch.equal(v, before[1]["state"][key][k]) for k, v in state.items())
    assert torch.equal(torch.get_rng_state(), before[2])


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

    model = Counts()
    inner = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = mprun.prepare(model, inner, "fp32")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    before = model.weight.detach().clone()

    def step():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).sum()
        optimizer.backward(loss)
        optimizer.step()
        scheduler.step()
        return loss

    assert not mprun.explain(step, optimizer).reproduced
    assert torch.equal(model.weight, before) and model.calls == 0
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_healthy_step_is_not_explained():
    model, optimizer = mprun.prepare(*_plain(), "amp")
    stream = batches(3)

    def step():
        images, labels = next(stream)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        optimizer.backward(loss)
        optimizer.step()
        return loss

    finding = mprun.explain(step, optimizer, steps=3)
    assert not finding.reproduced and finding.verdict == "not found"
    with pytest.raises(ValueError, match="must return the loss"):
        mprun.probe(lambda: None, optimizer)


def _plain():
    model = net()
    return model, torch.optim.SGD(model.parameters(), 0.1)
