"""State of the loss scales: round trip, damage, copies."""

import io
import math

import pytest
import torch

from mprun.precision.loss_scale import DynamicLossScale, DynamicRule

from ..helpers import assert_same_bits
from .loss_scales import KINDS, step, trace


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_state_cut_in_a_window_continues_identically(kind):
    pattern = "..o....o.oo.....o..oo.o....."
    for cut in range(1, len(pattern), 3):
        straight, resumed = KINDS[kind](), KINDS[kind]()
        trace(straight, pattern[:cut])
        # Cut between two optimizers' records, so that flag and maximum are part of the state.
        straight.record(torch.tensor(cut % 2), torch.tensor(2.0**-5))
        file = io.BytesIO()
        torch.save(straight.state_dict(), file)
        file.seek(0)
        resumed.load_state_dict(torch.load(file, weights_only=True))
        assert_same_bits(resumed.state_dict(), straight.state_dict())
        assert trace(resumed, pattern[cut:]) == trace(straight, pattern[cut:])
        assert_same_bits(resumed.state_dict(), straight.state_dict())


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_damaged_state_is_refused_by_key_and_changes_nothing(kind):
    source, target = KINDS[kind](), KINDS[kind]()
    trace(source, "o..o")
    untouched = KINDS[kind]()
    state = source.state_dict()
    for key in state:
        with pytest.raises(ValueError, match=f"'{key}' is missing"):
            target.load_state_dict({name: value for name, value in state.items() if name != key})
    with pytest.raises(ValueError, match="unknown key 'extra'"):
        target.load_state_dict(state | {"extra": torch.tensor(0)})
    with pytest.raises(ValueError, match="'scale' must be a torch.float32"):
        target.load_state_dict(state | {"scale": state["scale"].double()})
    for wrong in (torch.zeros(2), 0.0):
        with pytest.raises(ValueError, match="'found_inf' must be"):
            target.load_state_dict(state | {"found_inf": wrong})
    with pytest.raises(ValueError, match="kind='jmp'"):
        target.load_state_dict(state | {"kind": "jmp"})
    assert_same_bits(target.state_dict(), untouched.state_dict())


def test_state_dict_is_a_copy():
    scale = DynamicLossScale()
    state = scale.state_dict()
    step(scale, math.inf)
    assert state["scale"].item() == 2.0**16 and state["steps_skipped"].item() == 0


def test_a_state_from_a_longer_interval_still_grows():
    source = DynamicLossScale(DynamicRule(growth_interval=100))
    trace(source, "." * 60)
    scale = DynamicLossScale(DynamicRule(growth_interval=10, max_scale=2.0**20))
    scale.load_state_dict(source.state_dict())
    assert trace(scale, ".") == [2.0**17]
