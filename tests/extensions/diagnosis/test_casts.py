"""Casts of linear layers lose values: by hand, as the layers cast, and in runs where it matters."""

import contextlib
import copy
import math
import re
import shlex
from collections import Counter
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

import mprun
from mprun.cli import main
from mprun.config.compose import compose_config
from mprun.config.schema import MatmulConfig
from mprun.extensions.diagnosis import cast_losses, trials, worse_ending
from mprun.extensions.diagnosis.cast_losses import CastLoss, RowLoss, casted, loss_from, losses_of
from mprun.extensions.diagnosis.casts import (
    CastMeter,
    cast_advice,
    cast_changes,
    sentences,
    typed,
    unsuited,
    verdicts,
    without_layers,
)
from mprun.extensions.diagnosis.commands.explain import explain
from mprun.extensions.diagnosis.interventions import options_of
from mprun.models.gpt import GPT
from mprun.numerics.replay import Steps
from mprun.precision import scaled_products
from mprun.precision.block_formats import ELEMENTS
from mprun.precision.scaled_products import ScaledProducts
from mprun.script.watched import ScriptTask

from ...helpers import ONE_CORE, TINY_GPT, TINY_MOE, assert_same_bits, refused
from ...numerics.small_runs import as_json
from .planted import NETWORKS, own_code

E2M1, E4M3 = ELEMENTS["e2m1"], ELEMENTS["e4m3"]
ALL = "precision.matmul.modules=['*',output]"
KEY = "precision.matmul"


def lost(matrix, dim=-1, **products) -> CastLoss:
    own = ScaledProducts(E2M1, E2M1, E2M1, **products)
    operand = own.operand("grad_output", "grad_input")
    return CastLoss(*casted(torch.as_tensor(matrix), operand, dim).sums.tolist())


def of_logits(p: list[float]) -> list[float]:
    """A row of the gradient of logits: -1 at the label."""
    return [-1.0, *p]


@pytest.mark.parametrize("dim", [-1, 0])
def test_one_large_number_beside_small_ones(dim):
    """MXFP4: 1 has the scale 2^-2, so 1/16 and below is a quarter step: a tie, which goes to zero.

    3/32 is 3/8 and becomes 1/2 of the scale, 1/8. The end of the block is of zeros.
    """
    row = torch.tensor([of_logits([2.0**-4] * 5 + [2.0**-5] * 5 + [3 * 2.0**-5] * 5)])
    found = lost(row if dim == -1 else row.t(), dim, granularity="1x32", scale="e8m0")
    assert (found.nonzero, found.zeroed, found.above) == (16, 10, 0)
    size = 1 + (5 * 2 + 5 + 5 * 3) / 32
    assert found.flushed == 10 / 16 and found.taken == (size - 1 - 5 / 8) / size
    errors = 5 * 2.0**-8 + 10 * 2.0**-10
    squares = 1 + 5 * (4 + 1 + 9) * 2.0**-10
    assert found.error == math.sqrt(errors / squares)
    # The block's largest number may be 6 * 2^-2.
    assert found.beside == pytest.approx((math.log2(24) + math.log2(48)) / 2)
    assert not found.by_clipping


def test_in_two_levels():
    """NVFP4: the scale of 1 is 1/6, exact in both levels; 1/24 is a tie, the next number is not."""
    tie, above = 1 / 24 - 2.0**-20, 1 / 24 + 2.0**-12
    found = lost([of_logits([tie] * 12 + [above] * 3)], granularity="1x16", scale="e4m3")
    assert (found.zeroed, found.above) == (12, 0)
    assert found.taken == pytest.approx(1 - 1.25 / (1 + 12 * tie + 3 * above), abs=1e-6)


def test_a_block_whose_scale_is_0_is_flushed_not_clipped():
    """NVFP4: beside a block with 1, the scale of 2^-20 rounds to 0 in E4M3. The end is cut."""
    row = [[*[1.0] * 16, 2.0**-20, *[2.0**-21] * 11]]
    for matrix, dim in ((torch.tensor(row), -1), (torch.tensor(row).t(), 0)):
        found = lost(matrix, dim, granularity="1x16", scale="e4m3")
        assert (found.zeroed, found.above) == (12, 0) and found.beside == 11 / 12


def test_what_clipping_takes():
    """OCP's floor: 1.75 has the scale 2^-2 as 1 has, and ends at 1.5; rceil takes 2^-1."""
    row = [[1.75, *[1.0] * 31]]
    floor = lost(row, granularity="1x32", scale="e8m0", scale_rounding="floor")
    assert floor.clipped == 1 / 32 and floor.taken == 0.25 / 32.75 and floor.by_clipping
    rceil = lost(row, granularity="1x32", scale="e8m0", scale_rounding="rceil")
    assert rceil.clipped == 0 and not rceil.by_clipping


def test_stochastic_rounding_takes_nothing_on_average():
    """2^-7 of the scale's half step: within 4.5 standard errors; it flushes 31 of 32 numbers."""
    p, count = 2.0**-8, 4096
    row = [of_logits([p] * 31)] * count
    found = lost(row, granularity="1x32", scale="e8m0", grad_rounding="stochastic")
    assert found.flushed == pytest.approx(31 / 32 * 31 / 32, abs=0.01)
    step, draws = 2.0**-3, 31 * count
    deviation = math.sqrt(p * (step - p) / draws) * draws
    assert abs(found.kept - found.size) < 4.5 * deviation
    nearest = lost(row, granularity="1x32", scale="e8m0")
    assert nearest.taken == 31 * p / (1 + 31 * p) and nearest.flushed == 31 / 32


@pytest.mark.slow
@pytest.mark.parametrize(
    ("network", "mode", "each"),
    [(TINY_GPT, "nvfp4_plain", 6), (TINY_GPT, "fp8_delayed", 3), (TINY_MOE, "fp8_delayed", None)],
    ids=["nvfp4_plain", "fp8_delayed", "experts"],
)
def test_the_meter_casts_as_the_layers_do(build_run, monkeypatch, network, mode, each):
    """Each cast of the second step is made twice, bit for bit: by a layer and by the meter, whose
    casts an observer of the layers does not see. A cast with one scale serves two products."""
    run = [*network, f"precision={mode}", ALL]
    built, seen, measured = build_run(*run), Counter(), Counter()

    def noted(by, found):
        parts = (found.values.float(), found.factor, found.whole)
        by[tuple(p.contiguous().numpy().tobytes() for p in parts if p is not None)] += 1
        return found

    own, steps = scaled_products.unobserved_cast, Steps(built, 0, 0)
    monkeypatch.setattr(
        cast_losses, "unobserved_cast", lambda *a, **k: noted(measured, own(*a, **k))
    )
    steps.advance()
    monkeypatch.setattr(scaled_products, "observer", lambda _, take: noted(seen, take()))
    with CastMeter(built.task, compose_config(run).config.precision, 2) as meter:
        steps.advance()
    found = meter.read()
    assert len(found) == 5 and "output" in found
    assert all(len(own) == 6 for own in found.values())
    assert set(seen) == set(measured)
    if each is not None:  # experts have products of their own, those with rows
        assert sum(seen.values()) == 5 * each and sum(measured.values()) == 5 * 6


def test_scales_that_fp32_has_not_kept_are_of_the_tensor(build_run):
    found = []
    for mode in ("fp8_delayed", "fp8_tensorwise"):
        config = compose_config([*TINY_GPT, f"precision={mode}", ALL]).config
        built = build_run(*TINY_GPT, "precision=fp32")
        with CastMeter(built.task, config.precision) as meter:
            built.task.train_step(0)
        found.append(meter.read())
    assert found[0] == found[1] and len(found[0]) == 5


@pytest.mark.slow
def test_a_measured_run_is_bit_equal(build_run):
    """Random bits of its own casts too."""
    weights, run = [], [*TINY_GPT, "precision=nvfp4", ALL]
    for measured in (False, True):
        built, mode = build_run(*run), compose_config(run).config.precision
        steps = Steps(built, 0, 0)
        with CastMeter(built.task, mode, 2 if measured else 9) as meter:
            rows = [steps.advance() for _ in range(4)]
        assert bool(meter.read()) == measured
        own = [tensor.clone() for tensor in built.task.learner.updated]
        weights.append((rows[-1].loss, own))
    assert_same_bits(*weights)


def layers_off(**off: float) -> dict[str, dict]:
    """Layers, whose weight's gradients are this far off by the cast of the output's gradient."""
    place = ("grad_weight", "grad_output")
    numbers = (100, 40, 0, 0, 1, 0.9, 1, 0.01, 200)
    return {
        name: {place: CastLoss(*numbers, rows=RowLoss(10, 1, 2, 2 * part))}
        for name, part in off.items()
    }


def test_patterns_that_leave_layers_out():
    layers = ["blocks.0.a", "blocks.1.a", "blocks.0.b", "blocks.1.b", "output"]
    for modules, out, expected in (
        (["*", "output"], ["output"], ["*", "!output"]),
        (["*"], ["blocks.1.a", "blocks.0.a"], ["*", "!blocks.*.a"]),
        (["*"], ["blocks.1.a"], ["*", "!blocks.1.a"]),
        (["!last 15%"], ["blocks.0.b"], ["!last 15%", "!blocks.0.b"]),
    ):
        found = without_layers(modules, layers, out)
        assert found == expected
        line = [*TINY_GPT, "precision=nvfp4", f"{KEY}.modules={typed(found)}"]
        assert compose_config(line).config.precision.matmul.modules == expected


def test_layers_are_left_out_by_how_far_their_products_are_off():
    products, mode = MatmulConfig("e2m1", "e2m1", "e2m1", "1x16"), ["precision=x"]
    found = cast_advice(layers_off(a=0.03, b=0.2, c=0.07), products, mode, 3)
    assert found.excluded == ["b", "c"]
    assert found.overrides == [*mode, f'{KEY}.modules=["*","!b","!c"]']
    assert cast_advice(layers_off(a=0.03), products, mode, 3).overrides == mode
    assert cast_advice(layers_off(a=0.5), products, mode, 3).overrides == []
    assert unsuited(layers_off(a=0.034, b=0.036)) == ["b"] and unsuited({}) == []
    own = found.as_dict()["layers"]["b"]["grad_output of grad_weight"]
    assert (own["off"], own["lost"]) == (pytest.approx(0.2), 0.1)
    [text, _] = sentences(layers_off(a=0.03, b=0.2, c=0.07), products)
    assert text == [
        "b: gradient of the output, cast for the weight's gradient",
        "40 % of its nonzero numbers become 0 in blocks of 1x16; the largest of a block is 2^5.0 "
        "times as large",
        "rows of the weight's gradient are 20 % off; 10 % keep less than half",
    ]
    [[text]] = sentences(layers_off(a=0.03, b=0.01), products)
    assert text.startswith("suit every layer: ") and "3 % off (a; 3.5 %" in text
    [[text]] = sentences(layers_off(a=math.nan), products)
    assert text == "not measured: no row of a product was finite and other than 0"


def test_a_cast_that_is_not_finite_hides_none():
    lost, off = CastLoss(1, rows=RowLoss(0, 0, 0, 0)), layers_off(a=0.2)["a"]
    (place,) = off
    [first, second] = verdicts({"nan": {place: lost}, "a": {("output", "input"): lost} | off})
    assert (first.name, first.place, second.name) == ("a", place, "nan") and second.suits


def test_changes_follow_from_what_was_lost():
    flushed = layers_off(a=0.01, b=0.2, c=0.1)
    plain = MatmulConfig("e2m1", "e2m1", "e2m1", "1x32", scale="e8m0", scale_rounding="even")
    assert [*cast_changes(plain, flushed)] == [
        {f"{KEY}.grad_rounding": "stochastic"},
        {f"{KEY}.modules": ["*", "!b"]},
        {f"{KEY}.modules": ["*", "!c"]},
        {f"{KEY}.modules": ["*", "!b", "!c"]},
        {f"{KEY}.granularity": "1x16"},
    ]
    stochastic = MatmulConfig("e2m1", "e2m1", "e2m1", "1x16", grad_rounding="stochastic")
    assert [*cast_changes(stochastic, layers_off(a=0.2))] == []
    assert [*cast_changes(plain, layers_off(a=0.02))] == []
    assert [*cast_changes(stochastic, layers_off(a=0.02, b=0), 0)] == [
        {f"{KEY}.modules": ["*", "!a"]}
    ]
    loss = CastLoss(100, 0, 30, 0.1, 1, 0.9, 1, 0.1, columns=RowLoss(10, 0, 1, 0.1))
    clipped = {"a": {("output", "input"): loss}}
    first = next(cast_changes(plain, clipped | layers_off(b=0.0)))
    assert first == {f"{KEY}.scale_rounding": "rceil"}
    [text] = sentences(clipped, plain)
    assert text[1:] == [
        "30 % of its nonzero numbers are clipped in blocks of 1x32 by scale_rounding=even",
        "columns of the output are 10 % off",
    ]


@pytest.mark.parametrize("mode", ["fp8_tensorwise", "fp8_delayed"])
def test_a_scale_of_a_tensor_may_be_of_its_rows(mode):
    config = compose_config([*TINY_GPT, f"precision={mode}"]).config
    *_, finer = cast_changes(config.precision.matmul, layers_off(a=0.2, b=0.0))
    assert finer[f"{KEY}.granularity"] == "row"
    line = [*TINY_GPT, f"precision={mode}", *(f"{k}={v}" for k, v in finer.items())]
    assert compose_config(line).config.precision.matmul.granularity == "row"


def product_of(left, right, by_size=False, **formats) -> tuple[CastLoss, CastLoss]:
    """Return the loss of a product by each cast, to E4M3 with a scale of the tensor."""
    products = ScaledProducts(E4M3, E4M3, E4M3, **formats)
    operands = (products.operand(name, "output") for name in ("input", "weight"))
    both = [casted(m, own, -1) for m, own in zip((left, right), operands, strict=True)]
    found = losses_of(*both, by_size=by_size)
    return loss_from(found[0].tolist()), loss_from(found[1].tolist())


def test_a_row_that_is_an_outlier_hides_no_other():
    """2^24 beside ones: E4M3 ends 2^18 below its largest. The other 7 rows become zero; of their
    sum of magnitudes almost nothing is taken. A scale of each row keeps all."""
    left, right = torch.ones(8, 4), torch.ones(5, 4)
    left[3] = 2.0**24
    found, other = product_of(left, right)
    assert (found.emptied, found.rows.lost) == (7 / 8, 7 / 8)
    # Their mean, and two standard errors.
    assert found.rows.off == pytest.approx((7 - 2 * math.sqrt(7)) / 8)
    assert found.taken < 1e-6 and found.columns.off < 1e-6
    assert other.rank == 0
    assert product_of(right, left)[1].columns.off == found.rows.off
    assert product_of(left, right, granularity="row")[0].rank < 1e-6
    # Counted by its size, as a sample of a gradient, the outlier is all that there is.
    assert product_of(left, right, by_size=True)[0].rows.off < 1e-6


def test_rounding_errors_do_not_show_in_a_mean():
    """Normally distributed numbers in E2M1: errors of a tenth, in any direction."""
    torch.manual_seed(0)
    left, right = torch.randn(256, 64), torch.randn(256, 64)
    products = ScaledProducts(E2M1, E2M1, E2M1, granularity="1x16", scale="e4m3")
    both = [casted(m, products.operand("input", "output"), -1) for m in (left, right)]
    loss = loss_from(losses_of(*both)[0].tolist())
    assert 0.05 < loss.error < 0.2 and loss.rank < 0.03


def test_a_large_product_is_sampled(monkeypatch):
    monkeypatch.setattr(cast_losses, "_SAMPLED", 4)
    found, _ = product_of(torch.ones(7, 4), torch.ones(9, 4))
    assert (found.rows.weight, found.columns.weight) == (4, 3)


@pytest.mark.slow
def test_advice_on_a_mode_in_blocks(tmp_path, capsys):
    """It measures in FP32; the command is the asked mode without the worst layers."""
    asked = ["precision=nvfp4_plain", "precision.overrides.blocks.0.mlp.output=fp32", ALL]
    line = [*TINY_GPT, "train.steps=4", *asked, f"output_dir='{tmp_path / 'advise'}'"]
    assert main(["advise", *line]) == 0
    out, err = capsys.readouterr()
    assert f"measures in FP32, and casts as with {' '.join(asked)}" in err
    lines = out.splitlines()
    verdict = (
        r" suits (\d) of 4 layers: the worst product's rows are \S+ % off "
        r"\(\S+; 3.5 % is the bound\)"
    )
    assert re.fullmatch(re.escape(" ".join(asked[:2])) + verdict, lines[0])
    start = lines.index(
        f"1 casts of {' '.join(asked[:2])}, 4 steps: where each layer loses most, in %"
    )
    measured = {line.split()[0] for line in lines[start + 2 : start + 6]}
    assert {"output", "blocks.0.mlp.inputs"} < measured and "blocks.0.mlp.output" not in measured
    command = shlex.split(lines[lines.index(f"use it with {' '.join(asked[:2])}") + 1])
    assert command[1 : len(TINY_GPT)] == TINY_GPT[:-1]
    compose_config(command[1:])
    line = [*TINY_GPT, "precision=nvfp4", f"{KEY}.modules=[x]", f"output_dir='{tmp_path / 'x'}'"]
    refused(capsys, "advise", *line, says="modules: 'x' matches no nn.Linear")
    assert not (tmp_path / "x").exists()


class Planted(nn.Module):
    """Two layers, of which the second meets an outlier of 2^24; FP32 computes with it.

    Of gradients 2^40: E5M2 reaches 2^32 below its largest number.
    """

    def __init__(self, operand: str):
        super().__init__()
        self.operand, self.first, self.second = operand, nn.Linear(16, 16), nn.Linear(16, 16)
        self.unused = (torch.arange(16) > 0).float()
        with torch.no_grad():
            self.second.weight[0, 0] *= 2.0**24 if operand == "weight" else 1

    def forward(self, x):
        large = torch.ones(32, 1)
        large[5] = 2.0**24 if self.operand == "input" else 1
        y = self.second(self.first(x) * self.unused * large)
        return y * (1 + 2.0**40 * (torch.arange(16) == 3) * (self.operand == "grad_output"))


@pytest.mark.parametrize("operand", ["input", "weight", "grad_output", ""])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_layer_of_an_outlier_is_named(operand, seed):
    torch.manual_seed(seed)
    learner = SimpleNamespace(model=Planted(operand))
    task = SimpleNamespace(learners={"": learner}, step=0)
    mode = compose_config(["precision=fp8_tensorwise", f"{KEY}.modules=['*',second]"]).config
    with CastMeter(task, mode.precision) as meter:
        (learner.model(torch.randn(32, 16)) * torch.randn(32, 16)).sum().backward()
    losses = meter.read()
    advice = cast_advice(losses, mode.precision.matmul, [], 1)
    named = [one.place[1] for one in verdicts(losses) if not one.suits]
    assert named == ([operand] if operand else [])
    assert advice.excluded == (["second"] if operand else [])
    said = sentences(losses, mode.precision.matmul)[0][0]
    assert said.startswith("second: " if operand else "suit every layer")
    cures = [*cast_changes(mode.precision.matmul, losses)]
    assert ({f"{KEY}.modules": ["*", "!second"]} in cures) == bool(operand)


class Experts(nn.Module):
    """Three layers, as a 3-D parameter or as an `nn.Linear` each, before an output layer.

    The second has an outlier in its weight, the last gets no rows.
    """

    def __init__(self, one_by_one: bool):
        super().__init__()
        output, weight = nn.Linear(16, 16), torch.randn(3, 16, 16)
        weight[1, 0, 0] *= 2.0**24
        self.one_by_one = one_by_one
        if one_by_one:
            self.experts = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(3))
            for layer, own in zip(self.experts, weight, strict=True):
                layer.weight = nn.Parameter(own)
        else:
            self.experts = nn.Parameter(weight)
        self.output = output  # the last module is

    def forward(self, x):
        parts = x.split([8, 24, 0])
        if self.one_by_one:
            found = [layer(part) for layer, part in zip(self.experts, parts, strict=True)]
        else:
            found = [part @ own.mT for own, part in zip(self.experts, parts, strict=True)]
        return self.output(torch.cat(found))


@pytest.mark.parametrize("trained", ["fp32", "fp8_tensorwise"])
def test_experts_of_one_parameter_are_measured_as_layers_are(trained):
    found = []
    mode = compose_config(["precision=fp8_tensorwise"]).config.precision
    for one_by_one in (False, True):
        torch.manual_seed(0)
        model = Experts(one_by_one)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model, optimizer = mprun.prepare(model, optimizer, precision=trained)
        forwards = [module.__dict__.get("forward") for module in model.modules()]
        torch.manual_seed(1)
        with CastMeter(ScriptTask(optimizer), mode) as meter:
            (model(torch.randn(32, 16)) * torch.randn(32, 16)).sum().backward()
        assert [module.__dict__.get("forward") for module in model.modules()] == forwards
        found.append(meter.read())
    [(name, own)], layers = found[0].items(), found[1]
    assert name == "experts" and set(layers) == {"experts.0", "experts.1"}
    for place, loss in own.items():
        parts = [layers[each][place] for each in layers]
        for field in ("nonzero", "zeroed", "size", "errors", "vectors"):
            assert getattr(loss, field) == sum(getattr(part, field) for part in parts), place
        assert loss.rows.steps == sum(part.rows.steps for part in parts)
        assert loss.rows.sure == sum(part.rows.sure for part in parts)
    assert unsuited(found[0]) == ["experts"] and unsuited(layers) == ["experts.1"]


@pytest.fixture
def outlier(monkeypatch) -> list[str]:
    """One channel of a norm 2^19 as large, its column 2^-19: FP32 computes the same."""
    original = GPT.__init__

    def planted(self, *arguments, **named):
        original(self, *arguments, **named)
        with torch.no_grad():
            block = self.blocks[0]
            block.mlp_norm.weight[3] *= 2.0**19
            block.mlp.inputs.weight[:, 3] *= 2.0**-19

    monkeypatch.setattr(GPT, "__init__", planted)
    return [*TINY_GPT, "optim=sgd_plain", "optim.lr=1e-12", "precision=fp8_tensorwise"]


@pytest.mark.slow
def test_advice_leaves_the_layer_of_an_outlier_out(tmp_path, capsys, outlier):
    """In one output: the verdict, the table and the command."""
    line = [*outlier, "train.steps=4", f"output_dir='{tmp_path / 'advise'}'"]
    assert main(["advise", *line]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("precision=fp8_tensorwise suits 7 of 8 layers: ")
    assert "(blocks.0.mlp.inputs; 3.5 % is the bound)" in lines[0]
    named = [line for line in lines if line.startswith("  not ")]
    assert len(named) == 1 and named[0].startswith("  not blocks.0.mlp.inputs: input, cast for ")
    command = lines[lines.index("use it with precision=fp8_tensorwise") + 1]
    assert '["*","!blocks.0.mlp.inputs"]' in command


@pytest.mark.slow
def test_advice_measures_at_the_loss_scale_that_is_asked_for(tmp_path, capsys):
    """A gradient of logits, at most 1/64 here, is mostly flushed by E5M2 at scale 2^-12."""
    flushed = []
    for power in (-12, 12):
        mode = ["precision=fp8_unscaled", "scaler=static", f"scaler.scale={2.0**power}"]
        line = [*TINY_GPT, "train.steps=1", *mode, ALL, f"output_dir='{tmp_path / str(power)}'"]
        casts = as_json(capsys, "advise", *line)["casts"]
        flushed.append(casts["layers"]["output"]["grad_output of grad_weight"]["flushed"])
        assert casts["mode"] == mode
    assert flushed[0] > 0.9 and flushed[1] < 0.1


def later(after, budget):
    """Return whether a budget is spent: when it is asked for the `after`-th time."""
    budget.asked = getattr(budget, "asked", 0) + 1
    return budget.asked >= after


@pytest.mark.slow
def test_a_run_in_8_bits_that_is_done_is_explained(tmp_path, capsys, monkeypatch, outlier):
    path = tmp_path / "run"
    assert main([*outlier, "train.steps=6", f"output_dir='{path}'"]) == 0
    capsys.readouterr()
    found = as_json(capsys, "explain", str(path), "--no-cures", "--steps", "4")
    assert found["verdict"] == "casts" and found["tried"] == []
    assert found["replay"] == "steps 1 to 4 of 6: losses bit-equal to the run's"
    expected = "blocks.0.mlp.inputs: input, cast for the "
    [casts] = found["casts"]
    assert casts[0].startswith(expected)
    refused(capsys, "explain", path, "--steps", "0", says="--steps 0")
    # The time is over before the step that was to be measured, or before the second.
    monkeypatch.setattr(worse_ending, "MEASURED", 1)
    for after, said in ((2, expected), (1, "not measured")):
        monkeypatch.setattr(trials.Budget, "spent", property(partial(later, after)))
        assert explain(path, with_cures=False).casts[0][0].startswith(said)


class Runs:
    """Runs whose loss is told by their layers and products in 8 bits; 4 steps of 10 seconds."""

    def __init__(self, monkeypatch, layers: str, loss_of):
        self.layers, self.seconds, self.trained = [*layers], 0.0, []
        monkeypatch.setattr(trials, "time", SimpleNamespace(perf_counter=self.now))
        monkeypatch.setattr(worse_ending, "CastMeter", self.meter)
        monkeypatch.setattr(worse_ending, "Steps", lambda built, *_: SimpleNamespace(built=built))
        monkeypatch.setattr(worse_ending, "train", self.train)
        self.loss_of = loss_of

    def now(self):
        return self.seconds

    def meter(self, *_, early):
        meter = contextlib.nullcontext(SimpleNamespace(names=self.layers, read=dict))
        meter.names = self.layers
        return meter

    def build(self, config):
        return SimpleNamespace(config=config, steps=4, task=None)

    def train(self, steps, count, budget=None):
        built, ends = steps.built, math.inf if budget is None else budget.ends
        cut, self.seconds = self.seconds + 10 > ends, min(ends, self.seconds + 10)
        matmul = built.config["precision"]["matmul"]
        out = {pattern[1:] for pattern in matmul["modules"] if pattern.startswith("!")}
        cast = {name for name in self.layers if name not in out} if matmul.get("input") else set()
        products = {"output", "grad_input", "grad_weight"} - {*matmul["high_precision"]}
        self.trained.append(built.config)
        return trials.Course([self.loss_of(cast, products)] * 4, cut=cut)

    def find(self, mode="fp8_tensorwise", **named):
        found = compose_config([*TINY_GPT, f"precision={mode}"])
        config = found.as_dict()
        named = {"steps": 4, "options": options_of(), "budget": trials.Budget()} | named
        return worse_ending.find_ending(self.build, config, found.config.precision, [], **named)


def test_the_layer_that_costs_is_found_by_halves(monkeypatch):
    """No layer was measured; one of 16 takes 1 % alone, all others together 0.1 %."""
    cost = lambda cast, _: 1 + 0.01 * ("k" in cast) + 0.001 * bool(cast)  # noqa: E731
    runs = Runs(monkeypatch, "abcdefghijklmnop", cost)
    found = runs.find()
    assert found.gap == pytest.approx(0.011)
    first = next(one for one in found.tried if one.cures)
    assert first.overrides == (f'{KEY}.modules=["*","!k"]',)
    assert first.result == "+0.10 %, 91 % of the gap taken away"
    assert found.tried[-1].overrides == ("precision=bf16_master",)
    # Halves of 16 and 8, four in turn, three products, no casts; the run's own and FP32.
    assert len(found.tried) == 2 + 2 + 4 + 3 + 1 and len(runs.trained) == len(found.tried) + 2


def test_products_take_their_share_of_a_gap(monkeypatch):
    """Two layers cost alike: none takes half away alone; a product does."""
    cost = lambda cast, products: 1 + 0.01 * len(cast) * ("grad_input" in products)  # noqa: E731
    found = Runs(monkeypatch, "abcde", cost).find()
    cures = [one.change for one in found.tried if one.cures]
    assert cures[-2:] == [f"{KEY}.high_precision=[grad_input]", "precision=bf16_master"]
    [product] = [one for one in found.tried if one.change == cures[-2]]
    assert product.result == "+0.00 %, 100 % of the gap taken away"


def test_a_gap_that_no_change_takes_away_is_not_found(monkeypatch):
    found = Runs(monkeypatch, "ab", lambda cast, _: 1.01 - 0.001 * (not cast)).find()
    assert not [one for one in found.tried if one.cures]


@pytest.mark.parametrize(
    ("steps", "said"), [(1, "too few steps to tell"), (20, "nothing to explain")]
)
def test_an_equal_loss_of_few_steps_says_nothing(steps, said):
    ending = worse_ending.Ending(steps, 25, None, 1.0, 1.0, [])
    assert said in ending.in_words()[1]


def test_a_budget_of_seconds_is_kept(monkeypatch):
    """The run's own steps and FP32's take 20 s of 45; two changes more, and half of a third."""
    losses = iter([1.1, 1.0, *[1.09] * 3])
    runs = Runs(monkeypatch, "", lambda *_: next(losses))
    changes = [{"optim.lr": rate} for rate in (1.0, 2.0, 3.0, 4.0)]
    found = runs.find("bf16_kahan", changes=changes, budget=trials.Budget(45))
    assert runs.seconds == 45 and not any(one.cures for one in found.tried)
    assert [one.result.partition(" ")[0] for one in found.tried] == ["+9.00", "+9.00", "cut", "not"]


def test_a_16_bit_run_takes_its_changes_from_outside(monkeypatch):
    """No layer casts: nothing is said of casts, nor tried."""
    losses = iter([1.1, 1.0, 1.02])
    runs = Runs(monkeypatch, "", lambda *_: next(losses))
    found = runs.find("bf16_kahan", changes=[{"precision.master_dtype": "fp32"}])
    [one] = found.tried
    assert found.casts == []
    assert one.cures and one.result == "+2.00 %, 80 % of the gap taken away"


SMALL = [*ONE_CORE, "model=gpt", "model.hidden_size=32", "data=docs_chars", "data.batch_size=8"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("mode", ["nvfp4_plain", "mxfp4"])
def test_gradients_of_logits_are_named(tmp_path, mode, seed):
    """A small transformer casts its tied output layer: its loss disappears with stochastic
    rounding, or with BF16 for this layer.
    """
    path = tmp_path / "run"
    line = [*SMALL, "optim.lr=2e-3", "train.steps=120", f"seed={seed}", ALL, f"precision={mode}"]
    assert main([*line, f"output_dir='{path}'"]) == 0
    found = explain(path, steps=120)
    assert found.replay.endswith("losses bit-equal to the run's")
    assert found.casts[0][0].startswith("output: gradient of the output")
    tried = {one.overrides: one.cures for one in found.tried}
    assert found.smallest.overrides == (f"{KEY}.grad_rounding=stochastic",)
    assert tried[f'{KEY}.modules=["*","!output"]',] and found.command.endswith("=stochastic")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cause", "layer"),
    [
        ("outlier_sample.a", "first"),
        ("outlier_weight.b", "embed"),
        ("stale_delayed_scale.a", "first"),
        ("inputs_in_4_bits.a", "first"),
        ("healthy.perceptron_fp8", ""),
        ("healthy.rows_fp8_rowwise", ""),
    ],
)
def test_planted_outliers_are_named_alike_by_both(tmp_path, capsys, cause, layer):
    cell = NETWORKS[cause]
    line = [*cell.words, f"precision={cell.mode}", "seed=1"]
    advice = as_json(capsys, "advise", *line, "--steps", "24", f"output_dir='{tmp_path / 'a'}'")
    assert advice["casts"]["excluded"] == [layer] * bool(layer)
    assert main([*line, f"output_dir='{tmp_path / 'run'}'"]) == 0
    capsys.readouterr()
    own = own_code(line) + ["--no-cures"] * (not layer)
    found = as_json(capsys, "explain", str(tmp_path / "run"), *own)
    assert found["casts"][0][0].startswith(f"{layer or 'suit every layer'}: ")
    if layer:
        assert found["smallest_cure"] == [f'{KEY}.modules=["*","!{layer}"]']


def test_a_weight_that_is_computed_is_measured_as_it_was_used():
    """To read it once more would move the vectors of a spectral norm."""
    torch.manual_seed(0)
    model = nn.Sequential(spectral_norm(nn.Linear(16, 16)), nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters())
    mprun.prepare(model, optimizer, "fp32")
    expected = copy.deepcopy(model)
    inputs = torch.randn(16, 16)
    expected(inputs)
    mode = compose_config(["precision=mxfp8"]).config.precision
    with CastMeter(ScriptTask(optimizer), mode) as meter:
        model(inputs).sum().backward()
    assert_same_bits(model.state_dict(), expected.state_dict())
    (found,) = (own for place, own in meter.read()["0"].items() if place == ("output", "weight"))
    assert 0 < found.errors <= 2**-8 * found.squares  # half an ulp of E4M3 is 2^-4, squared
