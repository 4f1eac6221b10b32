"""Loss scales: rules worked by hand, bounds, shared flags, arguments."""

import math

import pytest
import torch

from mprun.precision.loss_scale import (
    DynamicLossScale,
    DynamicRule,
    LogMaxLossScale,
    LogMaxRule,
    NoLossScale,
    StaticLossScale,
)

from ..shipped import PUBLISHED, published_scale
from .loss_scales import step, trace


def collapses(scale, pattern):
    """After which steps of the pattern the scale has collapsed: `c`."""
    return "".join("c" if trace(scale, one) and scale.collapsed() else "." for one in pattern)


def test_none_lets_everything_through_at_no_cost():
    scale = NoLossScale()
    assert scale.inverse().item() == 1.0 and scale.skips_nonfinite is False
    assert trace(scale, "o" * 100) == [1.0] * 100
    assert (scale.steps_skipped.item(), scale.collapsed().item()) == (0, False)
    assert scale.found_inf.item() == 0


def test_static_never_moves_and_collapses_on_its_fixed_value():
    scale = StaticLossScale(100.0, max_consecutive_skips=3)
    assert trace(scale, "." * 2500) == [100.0] * 2500
    assert collapses(scale, "oo.ooo.") == ".....c."
    assert scale.scale.item() == 100.0
    assert scale.steps_skipped.item() == 5 and scale.skips_nonfinite is True


def test_growth_comes_on_exactly_the_nth_clean_step():
    rule = DynamicRule(init_scale=8, growth_interval=3)
    assert trace(DynamicLossScale(rule), "......") == [8, 8, 16, 16, 16, 32]
    assert trace(DynamicLossScale(rule), "..o..o...") == [8, 8, 4, 4, 4, 2, 2, 2, 4]


def test_megatron_overflows_far_apart_add_up():
    scale = published_scale("megatron", init_scale=8.0, growth_interval=3)
    # The first o spends the spare credit, two clean steps do not refill it; growth does.
    assert trace(scale, "o..oo...o..o") == [8, 8, 8, 4, 2, 2, 2, 4, 4, 4, 4, 2]
    assert scale.hysteresis_credit.item() == 0


def test_deepspeed_credit_refills_on_growth_or_on_every_clean_step():
    def new(refill):
        more = {"init_scale": 8.0, "growth_interval": 3, "refill_on_clean_step": refill}
        return published_scale("deepspeed", **more)

    assert trace(new(False), "o.o.o") == [8, 8, 4, 4, 2]
    assert trace(new(True), "o.o.o") == [8, 8, 8, 8, 8]
    assert trace(new(True), "oo.oo") == [8, 4, 4, 4, 2]
    # First growth after start or overflow takes one clean step more than later ones.
    assert trace(new(False), ".......o....") == [8, 8, 8, 16, 16, 16, 32, 32, 32, 32, 32, 64]


def test_fairseq_tolerates_overflows_below_the_rate():
    scale = published_scale("fairseq", init_scale=8.0, tolerance=0.25)
    # Rates at the o's: 1/1, 1/5, 2/7.
    assert trace(scale, "o....o.o") == [4, 4, 4, 4, 4, 4, 4, 2]
    # 1/1 and 1/4, the rate itself.
    scale = published_scale("fairseq", init_scale=8.0, tolerance=0.25)
    assert trace(scale, "o...o") == [4, 4, 4, 4, 2]


def test_fairseq_does_not_reach_its_floor_the_others_sit_on_it():
    hold = DynamicLossScale(DynamicRule(init_scale=8, min_scale=1, hold_at_floor=True))
    assert trace(hold, "ooooo") == [4, 2, 2, 2, 2]
    clamp = DynamicLossScale(DynamicRule(init_scale=6, min_scale=1))
    assert trace(clamp, "ooooo") == [3, 1.5, 1, 1, 1]


def test_collapse_needs_the_floor_and_the_skips_in_a_row():
    scale = DynamicLossScale(DynamicRule(init_scale=4, min_scale=1, max_consecutive_skips=4))
    assert collapses(scale, "oooo.ooooo") == "...c....cc"
    far_from_floor = DynamicLossScale(DynamicRule(max_consecutive_skips=4))
    assert collapses(far_from_floor, "o" * 10) == "." * 10


@pytest.mark.parametrize("name", ["default", *sorted(PUBLISHED)])
def test_400_overflows_never_give_zero_inf_or_nan(name):
    scale = DynamicLossScale() if name == "default" else published_scale(name)
    tiny = torch.finfo(torch.float32).tiny
    for _ in range(400):
        value = step(scale, math.inf)
        assert math.isfinite(value) and value >= scale.rule.min_scale
        assert tiny <= scale.inverse().item() < math.inf
    assert scale.collapsed().item() and scale.steps_skipped.item() == 400
    # fairseq's rule stops above 1e-4: 2**-13 is 1.22e-4.
    assert value == (2.0**-13 if name == "fairseq" else scale.rule.min_scale)


def test_growth_for_ever_stops_at_the_ceiling():
    scale = published_scale("torch", growth_interval=1)
    assert trace(scale, "." * 400)[-1] == 2.0**126
    assert scale.inverse().item() == 2.0**-126


def test_two_optimizers_share_one_flag_and_one_update():
    scale = DynamicLossScale(DynamicRule(growth_interval=1))
    for first, second in ([0.0, 1.0], [1.0, 0.0], [True, False], [math.nan, 0.0], [math.inf, 1.0]):
        before = scale.scale.item()
        scale.record(torch.tensor(first))
        scale.record(torch.tensor([second]))
        assert scale.found_inf.item() == 1.0
        scale.update()
        assert (scale.found_inf.item(), scale.scale.item()) == (0.0, before / 2)
    scale.record(torch.tensor(0.0))
    scale.record(torch.tensor(False))
    scale.update()
    assert (scale.scale.item(), scale.steps_skipped.item()) == (2.0**16 / 2**5 * 2, 5)


# By kind and argument: values that are refused.
REFUSED = {
    DynamicRule: {
        "growth_factor": [1.0, math.inf, math.nan, "2"],
        "backoff_factor": [0.0, 1.0, math.nan],
        "growth_interval": [0, 2.5, True, 2**31],
        "hysteresis": [0, 2**31],
        "max_consecutive_skips": [0, 2**31],
        "growth_delay": [-1, 2**31],
        "tolerance": [-0.5, 1.5],
        "min_scale": [0.0, -1.0, 2.0**-127],
        "max_scale": [2.0**127, 2.0**-15],
        "init_scale": [2.0**25, 2.0**-15, math.nan, math.inf],
    },
    StaticLossScale: {"scale": [0.0, -1.0, math.inf, math.nan, 2.0**127, 1e-40]},
    LogMaxRule: {
        "beta1": [0.0, 1.0],
        "beta2": [0.0, 1.0],
        "log_max": [math.inf, 2.0**31 + 1, -(2.0**31) - 1],
        "overflow_std_dev": [-1.0, 100.5],
        "overflow_log2": [math.nan, 2.0**31 + 1, -(2.0**31) - 1],
        "min_scale": [0.0],
        "max_scale": [2.0**127],
        "init_scale": [0.5],
        "max_consecutive_skips": [0],
    },
}


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, values in REFUSED.items() for name in values]
)
def test_bad_arguments_are_refused_by_name_with_what_is_allowed(kind, name):
    for value in REFUSED[kind][name]:
        with pytest.raises(ValueError, match=f"^{name}=.*: must be an? (number|integer) "):
            kind(**{name: value})


def test_the_ends_of_what_is_allowed_are_allowed():
    ends = {"min_scale": 2.0**-126, "init_scale": 2.0**126, "max_scale": 2.0**126}
    most = dict.fromkeys(("growth_interval", "growth_delay", "max_consecutive_skips"), 2**31 - 1)
    for tolerance in (0.0, 1.0):
        DynamicRule(tolerance=tolerance, **ends, **most)
    for value in (-(2.0**31), 2.0**31):
        LogMaxRule(log_max=value, overflow_log2=value, overflow_std_dev=100.0, **ends)
    LogMaxRule(overflow_std_dev=0.0)


@pytest.mark.parametrize("kind", [DynamicLossScale, LogMaxLossScale])
@pytest.mark.parametrize(("given", "named"), [((2.0**8,), {}), ((), {"init_scale": 2.0**8})])
def test_the_numbers_of_a_rule_are_refused_where_the_rule_is_wanted(kind, given, named):
    rule = kind.__name__.replace("LossScale", "Rule")
    with pytest.raises(TypeError, match=f"^rule: must be a {rule}$"):
        kind(*given, **named)


def test_tolerance_with_hysteresis_is_refused():
    with pytest.raises(ValueError, match="^tolerance=0.5"):
        DynamicLossScale(DynamicRule(tolerance=0.5, hysteresis=2))
