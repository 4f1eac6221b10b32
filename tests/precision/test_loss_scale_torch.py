"""DynamicLossScale against torch.amp.GradScaler, driven through its public interface."""

import random

import pytest
import torch

from mprun.precision.loss_scale import DynamicLossScale, DynamicRule

from ..shipped import published_scale

CLEAN, INF, NAN = 0.5, float("inf"), float("nan")


class TorchLoop:
    """One parameter, SGD and a GradScaler; `step(g)` plants the scaled gradient g."""

    def __init__(self, scale: DynamicLossScale):
        self.parameter = torch.nn.Parameter(torch.zeros(2))
        self.optimizer = torch.optim.SGD([self.parameter], lr=1e-3)
        self.scaler = torch.amp.GradScaler(
            "cpu",
            init_scale=scale.scale.item(),
            growth_factor=scale.rule.growth_factor,
            backoff_factor=scale.rule.backoff_factor,
            growth_interval=scale.rule.growth_interval,
        )
        self.scaler.scale(torch.zeros(()))

    def step(self, gradient: float) -> None:
        self.parameter.grad = torch.tensor([0.25, gradient])
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def scale_and_tracker(self) -> tuple[float, int]:
        state = self.scaler.state_dict()
        return state["scale"], state["_growth_tracker"]


def mismatches(ours: DynamicLossScale, gradients: list[float]) -> int:
    """Steps on which scale or growth tracker differ, up to where torch leaves our range."""
    theirs, wrong = TorchLoop(ours), 0
    for gradient in gradients:
        theirs.step(gradient)
        ours.record(~torch.isfinite(torch.tensor(gradient)))
        ours.update()
        scale, tracker = theirs.scale_and_tracker()
        if not ours.rule.min_scale <= scale <= ours.rule.max_scale:
            break
        wrong += (ours.scale.item(), ours.growth_tracker.item()) != (scale, tracker)
    return wrong


@pytest.mark.parametrize(("growth", "backoff"), [(2.0, 0.5), (1.7, 0.3), (1.001, 0.999)])
@pytest.mark.parametrize(
    "make",
    [lambda **kw: DynamicLossScale(DynamicRule(**kw)), lambda **kw: published_scale("torch", **kw)],
)
@pytest.mark.few(1)
def test_same_as_grad_scaler_on_random_sequences(make, growth, backoff):
    rng = random.Random(f"{growth} {backoff}")
    for _ in range(150):
        ours = make(
            init_scale=rng.choice([2.0**16, 2.0**3, 1000.0, 1.5]),
            growth_factor=growth,
            backoff_factor=backoff,
            growth_interval=rng.randint(1, 5),
        )
        bad = rng.choice([0.02, 0.3, 0.6])
        steps = [rng.choice([INF, -INF, NAN]) if rng.random() < bad else CLEAN for _ in range(12)]
        assert mismatches(ours, steps) == 0, steps


@pytest.mark.slow
def test_same_as_grad_scaler_with_the_default_constants():
    gradients = [CLEAN] * 4700
    for step in (0, 1, 2, 777, 2600):
        gradients[step] = INF
    ours = DynamicLossScale()
    assert mismatches(ours, gradients) == 0
    # Halved at 0, 1, 2, 777 and 2600 (the 1822 clean steps before it are short of 2000), doubled
    # once, by the 2000 clean steps after 2600.
    assert ours.scale.item() == 2.0**12


def test_the_inverse_is_that_of_grad_scaler():
    for scale in (2.0**16, 1000.0, 3.0, 0.1, 2.0**-14, 16777215.0):
        ours = published_scale("torch", init_scale=scale)
        theirs = TorchLoop(ours)
        theirs.parameter.grad = torch.tensor([1.0, 1.0])
        theirs.scaler.unscale_(theirs.optimizer)
        assert ours.inverse().dtype == torch.float32
        assert ours.inverse().item() == theirs.parameter.grad[0].item()
