"""The benchmark of recipes leaves out no mode, and its page says what was measured."""

import pytest

from benchmarks.recipes import EXPERIMENT, MATMUL, MODES, costs, page
from mprun.config.compose import compose_config
from mprun.precision import get_policy

from ..shipped import ALL_MODES


def test_every_mode_below_16_bits_and_without_masters_is_judged():
    policies = {mode: get_policy(mode) for mode in ALL_MODES}
    few_bits = {mode for mode, own in policies.items() if own.matmul or own.attention}
    assert few_bits | {"bf16_stochastic", "bf16_kahan"} == {*MODES}


def test_the_output_layer_is_in_the_format_of_a_mode_that_has_one():
    words = [f"experiment={EXPERIMENT}", "precision=nvfp4", *MATMUL]
    assert compose_config(words).config.precision.matmul.modules == ["*", "output"]


def test_the_page_has_verdicts_beside_both_baselines_and_a_cost():
    numbers = {"difference": 0.5, "low": 0.25, "high": 0.75, "verdict": "matches"}
    cost = {"median": 1.5, "low": 1.25, "high": 1.75}
    row = {"mode": "nvfp4", "fp32": numbers, "bf16_master": numbers | {"verdict": "worse"}}
    made = dict.fromkeys(("date", "machine", "torch", "python", "this", "command"), "x")
    text = page(made | {"seeds": [1, 2], "rounds": 3}, [row | {"cost": cost}])
    said = "+0.50 % (+0.25 to +0.75)"
    assert f"| `nvfp4` | matches: {said} | worse: {said}" in " ".join(text.split())
    assert "1.50 (1.25 to 1.75)" in text and "n = 2 seeds, 3 rounds" in text


@pytest.mark.slow
def test_costs_take_turns(monkeypatch):
    smaller = ["model=gpt", "model.hidden_size=16", "model.num_layers=1", "data.batch_size=2"]
    monkeypatch.setattr("benchmarks.recipes.LARGER", smaller)
    found = costs(["fp32"], 2)["fp32"]
    assert found["n"] == 2 and found["low"] <= found["median"] <= found["high"]
