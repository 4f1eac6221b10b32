"""`mprun.advise` in a script: what it names holds, and nothing of the script has changed."""

import copy

import pytest
import torch
from torch import nn

import mprun
from mprun.errors import BadInput

from ..helpers import assert_same_bits
from .networks import stepping

pytest.importorskip("mprun.extensions.diagnosis.of_script")


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
    model = Scores()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    mprun.prepare(model, optimizer, precision, **options)
    values = torch.randn(4, 8)
    return model, optimizer, lambda: model(values).square().mean()


def test_what_it_names_trains_and_everything_is_put_back():
    model, optimizer, loss = script("fp32")
    step = stepping(optimizer, loss)

    def states():
        return model.state_dict(), optimizer.state_dict(), torch.get_rng_state()

    before = copy.deepcopy(states())
    found = mprun.advise(step, optimizer, steps=2)
    assert_same_bits(states(), before)
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
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mprun.prepare(model, optimizer, of_script)
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
