"""What casts of linear layers lose: by hand, as the layers cast, and in runs where it matters."""

import math
import re
import shlex
from collections import Counter
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from mprun.cli import main
from mprun.config.compose import compose_config
from mprun.config.schema import MatmulConfig
from mprun.extensions.diagnosis import casts, worse_ending
from mprun.extensions.diagnosis.casts import (
    CastLoss,
    CastMeter,
    cast_advice,
    cast_changes,
    loss_of,
    sentences,
    taking,
    typed,
    without_layers,
    worst_place,
)
from mprun.extensions.diagnosis.commands.explain import explain
from mprun.models.gpt import GPT
from mprun.numerics.replay import Steps
from mprun.precision import scaled_products
from mprun.precision.block_formats import ELEMENTS
from mprun.precision.scaled_products import ScaledProducts

from ...helpers import ONE_CORE, TINY_GPT, refused
from ...numerics.small_runs import as_json

E2M1, E4M3 = ELEMENTS["e2m1"], ELEMENTS["e4m3"]
ALL = "precision.matmul.modules=['*',output]"
KEY = "precision.matmul"


def lost(matrix, dim=-1, **products) -> CastLoss:
    own = ScaledProducts(E2M1, E2M1, E2M1, **products)
    operand = own.operand("grad_output", "grad_input")
    return CastLoss(*loss_of(torch.as_tensor(matrix), operand, dim).tolist())


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


@pytest.mark.parametrize(("mode", "each"), [("nvfp4_plain", 6), ("fp8_delayed", 3)])
def test_the_meter_casts_as_the_layers_do(build_run, monkeypatch, mode, each):
    """Each cast of the second step is made twice, bit for bit: by a layer and by the meter, whose
    casts an observer of the layers does not see. A cast with one scale serves two products."""
    run = [*TINY_GPT, f"precision={mode}", ALL]
    built, seen, measured = build_run(*run), Counter(), Counter()

    def noted(by, found):
        parts = (found.values.float(), found.factor, found.whole)
        by[tuple(p.contiguous().numpy().tobytes() for p in parts if p is not None)] += 1
        return found

    own, steps = scaled_products.unobserved_cast, Steps(built, 0, 0)
    monkeypatch.setattr(casts, "unobserved_cast", lambda *a, **k: noted(measured, own(*a, **k)))
    steps.advance()
    monkeypatch.setattr(scaled_products, "observer", lambda _, take: noted(seen, take()))
    with CastMeter(built.task, compose_config(run).config.precision, 2) as meter:
        steps.advance()
    found = meter.read()
    assert len(found) == 5 and "output" in found
    assert all(len(own) == 6 for own in found.values())
    assert sum(seen.values()) == 5 * each and sum(measured.values()) == 5 * 6
    assert set(seen) == set(measured)


def test_scales_that_fp32_has_not_kept_are_of_the_tensor(build_run):
    found = []
    for mode in ("fp8_delayed", "fp8_tensorwise"):
        config = compose_config([*TINY_GPT, f"precision={mode}", ALL]).config
        built = build_run(*TINY_GPT, "precision=fp32")
        with CastMeter(built.task, config.precision) as meter:
            built.task.train_step(0)
        found.append(meter.read())
    assert found[0] == found[1] and len(found[0]) == 5


def test_a_measured_run_is_bit_equal(build_run):
    """Random bits of its own casts too."""
    weights = []
    for measured in (False, True):
        run = [*TINY_GPT, "precision=nvfp4", ALL]
        built, mode = build_run(*run), compose_config(run).config.precision
        steps = Steps(built, 0, 0)
        with CastMeter(built.task, mode, 2 if measured else 9) as meter:
            rows = [steps.advance() for _ in range(4)]
        assert bool(meter.read()) == measured
        own = built.task.learner.updated
        weights.append((rows[-1].loss, [tensor.clone() for tensor in own]))
    assert weights[0][0] == weights[1][0]
    assert all(map(torch.equal, weights[0][1], weights[1][1]))


def losses_of(**taken: float) -> dict[str, dict]:
    """Layers, of whose gradient's casts rounding takes these parts."""
    place = ("grad_weight", "grad_output")
    return {
        name.replace("_", "."): {place: CastLoss(100, 40, 0, 0, 1, 1 - part, 1, 0.01, 200)}
        for name, part in taken.items()
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


def test_layers_are_left_out_by_what_rounding_takes():
    products, mode = MatmulConfig("e2m1", "e2m1", "e2m1", "1x16"), ["precision=x"]
    found = cast_advice(losses_of(a=0.02, b=0.2, c=0.04), products, mode, 3)
    assert found.excluded == ["b", "c"]
    assert found.overrides == [*mode, f'{KEY}.modules=["*","!b","!c"]']
    assert cast_advice(losses_of(a=0.02), products, mode, 3).overrides == mode
    assert cast_advice(losses_of(a=0.5), products, mode, 3).overrides == []
    assert taking(losses_of(a=0.029, b=0.031)) == ["b"] and taking({}) == []
    assert found.as_dict()["layers"]["b"]["grad_output of grad_weight"]["taken"] == pytest.approx(
        0.2
    )
    [text, _] = sentences(losses_of(a=0.02, b=0.2, c=0.04), products)
    assert text == [
        "b: gradient of the output, cast for the weight's gradient",
        "40 % of its nonzero numbers become 0 in blocks of 1x16; the largest of a block is 2^5.0 "
        "times as large",
        "rounding to nearest takes 20 % of the sum of their magnitudes",
    ]


def test_a_cast_that_is_not_finite_hides_none():
    lost, (place,) = CastLoss(1, size=math.nan), losses_of(a=0.2)["a"]
    own = {("output", "input"): lost, place: losses_of(a=0.2)["a"][place]}
    assert worst_place(own) == place
    assert taking({"nan": {place: lost}, "a": own}) == ["a"]


def test_changes_follow_from_what_was_lost():
    flushed = losses_of(a=0.01, b=0.2, c=0.1)
    plain = MatmulConfig("e2m1", "e2m1", "e2m1", "1x32", scale="e8m0", scale_rounding="even")
    assert [*cast_changes(plain, flushed)] == [
        {f"{KEY}.grad_rounding": "stochastic"},
        {f"{KEY}.modules": ["*", "!b"]},
        {f"{KEY}.modules": ["*", "!b", "!c"]},
        {f"{KEY}.granularity": "1x16"},
    ]
    stochastic = MatmulConfig("e2m1", "e2m1", "e2m1", "1x16", grad_rounding="stochastic")
    assert [*cast_changes(stochastic, losses_of(a=0.2))] == []
    assert [*cast_changes(plain, losses_of(a=0.02))] == []
    clipped = {"a": {("output", "input"): CastLoss(100, 0, 30, 0.1, 1, 0.9, 1, 0.1)}}
    first = next(cast_changes(plain, clipped | losses_of(b=0.0)))
    assert first == {f"{KEY}.scale_rounding": "rceil"}
    [text] = sentences(clipped, plain)
    assert (
        text[1]
        == "30 % of its nonzero numbers are clipped in blocks of 1x32 by scale_rounding=even"
    )


def test_advice_on_a_mode_in_blocks(tmp_path, capsys):
    """It measures in FP32; the command is the asked mode without the worst layers."""
    asked = ["precision=nvfp4_plain", "precision.overrides.blocks.0.mlp.output=fp32", ALL]
    line = [*TINY_GPT, "train.steps=4", *asked, f"output_dir='{tmp_path / 'advise'}'"]
    assert main(["advise", *line]) == 0
    out, err = capsys.readouterr()
    assert f"measures in FP32, and casts as with {' '.join(asked)}" in err
    lines = out.splitlines()
    verdict = (
        r" suits \d of 4 layers: rounding takes up to \S+ % of a sum \(\S+; 3 % is the bound\)"
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


def test_an_outlier_shows_in_what_becomes_zero(tmp_path, capsys, monkeypatch):
    """One channel of a norm 2^19 as large, its column 2^-19: FP32 computes the same.

    The outlier is nearly all of the sum of magnitudes, so rounding takes little of that.
    """
    original = GPT.__init__

    def planted(self, *arguments, **named):
        original(self, *arguments, **named)
        with torch.no_grad():
            block = self.blocks[0]
            block.mlp_norm.weight[3] *= 2.0**19
            block.mlp.inputs.weight[:, 3] *= 2.0**-19

    monkeypatch.setattr(GPT, "__init__", planted)
    line = [*TINY_GPT, "optim=sgd_plain", "optim.lr=1e-12", "train.steps=4"]
    mode = "precision=fp8_tensorwise"
    assert main(["advise", *line, mode, f"output_dir='{tmp_path / 'advise'}'"]) == 0
    said = re.search(r"zero: .* at most (\S+) % \((.*)\)", capsys.readouterr().out)
    assert float(said[1]) > 90 and said[2].startswith("blocks.0.mlp.inputs, input for ")


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


def test_a_run_in_blocks_that_is_done_is_explained(tmp_path, capsys, monkeypatch):
    path = tmp_path / "run"
    line = [*TINY_GPT, "precision=mxfp4", ALL, "train.steps=6", f"output_dir='{path}'"]
    assert main(line) == 0
    capsys.readouterr()
    found = as_json(capsys, "explain", str(path), "--no-cures", "--steps", "4")
    assert found["verdict"] == "casts" and found["tried"] == []
    assert found["replay"] == "steps 1 to 4 of 6: losses bit-equal to the run's"
    assert found["casts"][0][0].startswith("output: gradient of the output")
    refused(capsys, "explain", path, "--steps", "0", says="--steps 0")
    # A minute is over before the step that was to be measured.
    monkeypatch.setattr(worse_ending, "MEASURED", 1)
    for seconds, expected in ((20, "output: gradient of the output"), (40, "not measured")):
        clock = SimpleNamespace(perf_counter=count(step=seconds).__next__)
        monkeypatch.setattr(worse_ending, "time", clock)
        assert explain(path, with_cures=False).casts[0][0].startswith(expected)


SMALL = [*ONE_CORE, "model=gpt", "model.hidden_size=32", "data=docs_chars", "data.batch_size=8"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("mode", ["nvfp4_plain", "mxfp4"])
def test_gradients_of_logits_are_named(tmp_path, mode, seed):
    """Of a small transformer whose tied output layer casts too: that is what costs, and
    stochastic rounding, or BF16 for this layer, brings it back."""
    path = tmp_path / "run"
    line = [*SMALL, "optim.lr=2e-3", "train.steps=120", f"seed={seed}", ALL, f"precision={mode}"]
    assert main([*line, f"output_dir='{path}'"]) == 0
    found = explain(path, steps=120)
    assert found.replay.endswith("losses bit-equal to the run's")
    assert found.casts[0][0].startswith("output: gradient of the output")
    tried = {one.overrides: one.cures for one in found.tried}
    assert found.smallest.overrides == (f"{KEY}.grad_rounding=stochastic",)
    assert tried[f'{KEY}.modules=["*","!output"]',] and found.command.endswith("=stochastic")
