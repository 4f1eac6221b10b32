"""LogMaxLossScale against numpy in float64 and against numbers worked by hand."""

import numpy as np
import pytest
import torch

from mprun.precision.loss_scale import LogMaxLossScale, LogMaxRule

from .loss_scales import step

# One rounding of the float64 result to FP32.
FP32 = 2.0**-24


def run(scale: LogMaxLossScale, maxima: list[float]) -> list[float]:
    """Scale after each step; inf and NaN count as overflow."""
    return [step(scale, value) for value in maxima]


def reference(maxima, low=1.0, high=2.0**24, top=16.0, b1=0.99, b2=0.999, k=3.09, bad=16.0):
    fast = slow = square = 0.0
    after, scale, n = [], 1.0, 0
    for value in maxima:
        if value != 0:
            x = np.log2(np.float64(np.float32(value))) if np.isfinite(value) else bad
            n += 1
            fast = b1 * fast + (1 - b1) * x
            slow = b2 * slow + (1 - b2) * x
            square = b2 * square + (1 - b2) * x * x
            variance = square / (1 - b2**n) - (slow / (1 - b2**n)) ** 2
            cutoff = fast / (1 - b1**n) + k * np.sqrt(max(variance, 0.0))
            scale = float(np.clip(2.0 ** (top - cutoff), low, high))
        after.append(scale)
    return after


def test_two_steps_worked_by_hand():
    first, second = run(LogMaxLossScale(LogMaxRule(max_scale=2.0**40)), [2.0**-10, 2.0**-12])
    # One value: mu = -10, sigma = 0. The variance is a difference of two numbers near 100, so up to
    # 4 * 100 * 2**-53 / 0.001 (bias correction) of noise, sigma up to 7e-6, scale off by 2e-5.
    assert first == pytest.approx(2.0**26, rel=2e-5)
    # mu = -(0.99 * 0.01 * 10 + 0.01 * 12) / (1 - 0.99**2) = -11.00503
    # slow mu = -11.00050, E[x^2] = 122.01101, sigma = 1.0000: 16 + 11.00503 - 3.09 = 23.91503
    assert second == pytest.approx(2.0**23.91503, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("bad", [None, 2.0**16])
def test_equals_numpy_over_a_thousand_steps(bad):
    maxima = np.exp2(np.random.default_rng(0).normal(-8, 1.5, 1000))
    maxima[::400] = np.inf
    maxima[55::700] = np.nan
    maxima[10::300] = 0.0
    maxima = [float(np.float32(m)) for m in maxima]
    ours = LogMaxLossScale(LogMaxRule(overflow_log2=bad))
    got, want = run(ours, maxima), reference(maxima, bad=16.0 if bad is None else bad)
    # The exponent carries float64 noise like the first step's above, amplified by the square root;
    # past it only the rounding to FP32.
    np.testing.assert_allclose(got[:20], want[:20], rtol=2e-5)
    np.testing.assert_allclose(got[20:], want[20:], rtol=2 * FP32 if bad is None else 1e-6)
    assert ours.steps_skipped.item() == sum(not np.isfinite(m) for m in maxima)


@pytest.mark.slow
def test_overflows_stay_near_one_in_a_thousand_when_the_maximum_is_log_normal():
    x = np.random.default_rng(1).normal(-6, 1.0, 6000)
    ours, overflows = LogMaxLossScale(LogMaxRule(max_scale=2.0**40)), 0
    for number, value in enumerate(np.exp2(x)):
        overflow = value * ours.scale.item() > 2.0**16
        overflows += overflow and number >= 2000
        ours.record(torch.tensor(bool(overflow)), torch.tensor(value))
        ours.update()
    # 4000 * 0.001 = 4 expected; each overflow adds an outlier, which lowers the rate. Poisson(4)
    # exceeds 12 once in 4000.
    assert 1 <= overflows <= 12


def test_every_option_changes_the_scale_as_it_says():
    maxima = [2.0**-10, 2.0**-12, float("inf"), 2.0**-11] * 5
    wide = {"min_scale": 2.0**-100, "max_scale": 2.0**100}
    base = run(LogMaxLossScale(LogMaxRule(**wide)), maxima)[-1]
    fixed = wide | {"overflow_log2": 16.0}
    higher = run(LogMaxLossScale(LogMaxRule(log_max=17.0, **fixed)), maxima)[-1]
    assert higher == pytest.approx(2 * base, rel=4 * FP32)
    options = {"beta1": ("b1", 0.5), "beta2": ("b2", 0.5), "overflow_std_dev": ("k", 1.0)}
    for name, (short, value) in options.items():
        got = run(LogMaxLossScale(LogMaxRule(**fixed | {name: value})), maxima)[-1]
        want = reference(maxima, low=2.0**-100, high=2.0**100, **{short: value})[-1]
        assert got == pytest.approx(want, rel=1e-5)
        assert abs(got / base - 1) > 0.01
    assert run(LogMaxLossScale(LogMaxRule(max_scale=4.0)), [2.0**-10]) == [4.0]
    assert run(LogMaxLossScale(LogMaxRule(init_scale=8.0, min_scale=8.0)), [2.0**15]) == [8.0]
    assert run(LogMaxLossScale(LogMaxRule(init_scale=32.0)), [0.0]) == [32.0]


def test_several_optimizers_share_flag_and_maximum():
    shared, single = (LogMaxLossScale(LogMaxRule(max_scale=2.0**40)) for _ in range(2))
    clean = torch.tensor(0.0)
    shared.record(clean, torch.tensor(2.0**-9))
    shared.record(clean, torch.tensor([2.0**-12], dtype=torch.float64))
    shared.update()
    run(single, [2.0**-9])
    assert torch.equal(shared.scale, single.scale)
    shared.record(torch.tensor(1.0), torch.tensor(float("nan")))
    shared.record(clean, torch.tensor(1.0))
    shared.update()
    assert shared.steps_skipped.item() == 1
    assert (shared.grad_max.item(), shared.found_inf.item()) == (0.0, 0.0)
    shared.record(torch.tensor(1.0), torch.tensor(2.0**-9))  # which an overflow makes no maximum
    shared.update()
    run(single, [float("inf")] * 2)
    assert torch.equal(shared.averages, single.averages)


def test_400_overflows_reach_the_floor_and_collapse():
    ours = LogMaxLossScale(LogMaxRule(init_scale=2.0**10, max_consecutive_skips=50))
    scales = run(ours, [float("inf")] * 400)
    assert min(scales) == scales[-1] == 1.0
    assert ours.collapsed().item() and ours.inverse().item() == 1.0


def test_grad_max_is_required():
    with pytest.raises(ValueError, match="grad_max=None"):
        LogMaxLossScale().record(torch.tensor(0.0))
