"""Each training loop is in every mode what the plain script is, or refused in one line.

In FP32 that means every bit; in the other modes weights move as in FP32 up to the mode's rounding.
"""

import pytest

from .loop_outcomes import ALL, FP8, MAY_BE_FAR, MAY_RAISE, MUST_REFUSE, fault, outcome
from .loops import LOOPS

# The baseline, and the mode with the most machinery: copies of weights and a loss scale.
TWO = ["fp32", "fp16_master_scaled"]
# A second each, nearly all of it the compiler's own.
COMPILED = {name for name in LOOPS if name.startswith("compile")} - {"compile_after"}


def cases():
    for name in LOOPS:
        for mode in sorted(ALL, key=lambda mode: (mode not in TWO, mode)):
            # Optimizers and schedules run as they are, whatever the mode.
            as_it_is = mode == "fp32" and name.startswith(("optimizer_", "schedule_"))
            slow = mode not in TWO or name in COMPILED or as_it_is
            yield pytest.param(name, mode, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.few(36)
@pytest.mark.parametrize(("name", "mode"), list(cases()))
def test_a_loop_is_what_the_plain_script_is(name, mode):
    assert not fault(name, mode, outcome(name, mode))


@pytest.mark.parametrize("name", ["input_gradient", "gradient_penalty", "prompt_by_attribute"])
def test_a_pass_that_begins_or_ends_elsewhere_is_that_of_the_plain_script(name):
    """Quick cases of the above that see what others do not."""
    assert not fault(name, "fp16_master_scaled", outcome(name, "fp16_master_scaled"))


def test_what_is_excused_is_a_loop():
    assert {*MUST_REFUSE, *MAY_RAISE, *MAY_BE_FAR} <= {*LOOPS}


def slower(model, optimizer, mode, **_):
    """Prepare nothing, and take steps of half the size."""
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
    return model, optimizer


def idle(model, optimizer, mode, **_):
    """Prepare nothing."""
    return model, optimizer


@pytest.mark.parametrize("mode", sorted(ALL))
@pytest.mark.few(5)
def test_a_wrong_engine_is_found_out(mode):
    assert not fault("basic", "fp32", outcome("basic", "fp32", idle))
    assert (mode == "fp32") != bool(fault("basic", mode, outcome("basic", mode, idle)))
    assert fault("half_before", mode, outcome("half_before", mode, idle))
    if mode not in FP8:  # whose gradients may be off by half
        assert fault("basic", mode, outcome("basic", mode, slower))
