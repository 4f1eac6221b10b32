"""The benchmark of recipes leaves out no mode; output layers have the format of the mode."""

from benchmarks.recipes import EXPERIMENT, MATMUL, MODES
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
