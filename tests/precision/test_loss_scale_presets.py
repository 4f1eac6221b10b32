"""Every preset against plain Python written from the original's own bookkeeping."""

import random

import numpy as np
import pytest
import torch

from ..shipped import PUBLISHED, published_scale

LOW, HIGH = 2.0**-126, 2.0**126


class Stopped(Exception):
    """The original raises and ends the run here."""


class Original:
    """The state that the originals keep; the numbers are those of a preset."""

    number = float

    def __init__(self, p):
        self.scale, self.every = self.number(p["init_scale"]), p["growth_interval"]
        self.low, self.high = self.number(p["min_scale"]), p["max_scale"]
        self.full = self.credit = p["hysteresis"]
        self.refills, self.tolerance = p["refill_on_clean_step"], p["tolerance"]
        self.iteration, self.last_overflow, self.clean = 0, -1, 0


class TorchOrKeras(Original):
    number = np.float32

    def step(self, overflow):
        if overflow:
            self.scale, self.clean = self.scale * np.float32(0.5), 0
        elif self.clean == self.every - 1:
            self.scale, self.clean = self.scale * np.float32(2.0), 0
        else:
            self.clean += 1


class Apex(Original):
    def step(self, overflow):
        if overflow:
            self.scale /= 2.0
            self.clean = 0
        else:
            self.clean += 1
        if self.clean == self.every:
            self.scale = min(2.0**24, self.scale * 2.0)
            self.clean = 0


class Modulo(Original):
    """apex fp16_utils and OpenSeq2Seq Backoff: iterations since the last overflow, modulo."""

    def step(self, overflow):
        if overflow:
            self.scale = max(self.scale / 2.0, self.low)
            self.last_overflow = self.iteration
        elif (self.iteration - self.last_overflow) % self.every == 0:
            self.scale = min(self.scale * 2.0, self.high)
        self.iteration += 1


class DeepSpeed(Original):
    def step(self, overflow):
        if overflow:
            if self.full == 1 or self.credit == 1:
                if self.scale == self.low:
                    raise Stopped
                self.scale = max(self.scale / 2.0, self.low)
            else:
                self.credit -= 1
            self.last_overflow = self.iteration
        else:
            if self.refills:
                self.credit = self.full
            stable = self.iteration - self.last_overflow - 1
            if stable > 0 and stable % self.every == 0:
                if not self.refills:
                    self.credit = self.full
                self.scale *= 2.0
        self.iteration += 1


class Megatron(Original):
    number = np.float32

    def step(self, overflow):
        if overflow:
            self.clean = 0
            self.credit -= 1
            if self.credit <= 0:
                self.scale = max(self.scale * np.float32(0.5), self.low)
        else:
            self.clean += 1
            if self.clean == self.every:
                self.clean, self.credit = 0, self.full
                self.scale = self.scale * np.float32(2.0)


class Fairseq(Original):
    last_rescale, overflows = -1, 0

    def step(self, overflow):
        if overflow:
            before = self.scale
            age = self.iteration - self.last_rescale or 1000
            self.last_overflow = self.iteration
            self.overflows += 1
            if self.overflows / age >= self.tolerance:
                self.scale /= 2.0
                self.last_rescale, self.overflows = self.iteration, 0
            if self.scale <= 1e-4:
                self.scale = before
                raise Stopped
        elif (self.iteration - self.last_overflow) % self.every == 0:
            self.scale *= 2.0
            self.last_rescale = self.iteration
        self.iteration += 1


REFERENCE = {
    "torch": TorchOrKeras,
    "apex": Apex,
    "apex_fp16": Modulo,
    "deepspeed": DeepSpeed,
    "megatron": Megatron,
    "fairseq": Fairseq,
    "keras": TorchOrKeras,
    "openseq2seq": Modulo,
}


def compare(name: str, overrides: dict, overflows: list[bool]) -> int:
    """Steps compared, all equal; ends where the original stops or leaves the FP32-safe range."""
    ours = published_scale(name, **overrides)
    theirs = REFERENCE[name](dict(PUBLISHED[name]) | overrides)
    yes, no = torch.tensor(1.0), torch.tensor(0.0)
    for step, overflow in enumerate(overflows):
        ours.record(yes if overflow else no)
        ours.update()
        try:
            theirs.step(overflow)
        except Stopped:
            assert ours.collapsed().item(), step
            assert ours.scale.item() == theirs.scale
            return step + 1
        if not LOW <= theirs.scale <= HIGH:
            return step
        assert ours.scale.item() == theirs.scale, (step, overflows[: step + 1])
        if PUBLISHED[name]["max_consecutive_skips"] == 1:
            assert not ours.collapsed().item(), step
    assert ours.steps_skipped.item() == sum(overflows)
    return len(overflows)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_every_preset_equals_its_original_on_random_sequences(name):
    rng, compared = random.Random(name), 0
    for _ in range(120):
        bad = rng.choice([0.05, 0.2, 0.5, 0.9])
        overrides = {"growth_interval": rng.randint(1, 6)}
        if name == "megatron":
            overrides["hysteresis"] = rng.randint(1, 4)
        if name == "deepspeed":
            overrides["hysteresis"] = rng.randint(1, 4)
            overrides["refill_on_clean_step"] = rng.random() < 0.5
            overrides["init_scale"] = rng.choice([2.0**16, 2.0, 1.0])
        if name == "fairseq":
            overrides["tolerance"] = rng.choice([0.0, 0.1, 0.25, 0.5, 1.0])
            overrides["init_scale"] = rng.choice([2.0**7, 2.0**-12])
        compared += compare(name, overrides, [rng.random() < bad for _ in range(60)])
    assert compared > 2000


@pytest.mark.parametrize("name", sorted(PUBLISHED))
@pytest.mark.few(1)
def test_every_preset_equals_its_original_with_its_own_constants(name):
    rng = random.Random(name)
    steps = 2 * PUBLISHED[name]["growth_interval"] + 500
    overflows = [False] * steps
    for start in [0, *(rng.randrange(steps) for _ in range(2))]:
        for step in range(start, min(start + rng.randint(1, 4), steps)):
            overflows[step] = True
    assert compare(name, {}, overflows) == steps


@pytest.mark.parametrize("name", ["deepspeed", "fairseq"])
def test_where_the_original_raises_at_the_floor_the_same_step_collapses(name):
    # Overflows only: compare() checks that collapsed() is false before the raise, true on it.
    ended = compare(name, {}, [True] * 60)
    # deepspeed: 1 absorbed, 16 halvings from 2**16 to 1, and the next raises. fairseq: 20 halvings
    # from 2**7 to 1.22e-4, and the next would reach 6.1e-5.
    assert ended == {"deepspeed": 18, "fairseq": 21}[name]


def test_deepspeed_spends_its_credit_before_it_gives_up_at_the_floor():
    scale, seen = published_scale("deepspeed", init_scale=1.0), []
    for _ in range(2):
        scale.record(torch.tensor(True))
        scale.update()
        seen.append(scale.collapsed().item())
    assert seen == [False, True]


def test_constants_are_those_of_the_originals():
    columns = ("init_scale", "growth_interval", "hysteresis", "min_scale", "max_scale")
    table = {name: tuple(preset[c] for c in columns) for name, preset in PUBLISHED.items()}
    assert table == {
        "torch": (2.0**16, 2000, 1, LOW, HIGH),
        "apex": (2.0**16, 2000, 1, LOW, 2.0**24),
        "apex_fp16": (2.0**32, 1000, 1, 1.0, HIGH),
        "deepspeed": (2.0**16, 1000, 2, 1.0, HIGH),
        "megatron": (2.0**32, 1000, 2, 1.0, HIGH),
        "fairseq": (2.0**7, 2**14, 1, 1e-4, HIGH),
        "keras": (2.0**15, 2000, 1, LOW, HIGH),
        "openseq2seq": (2.0**14, 2000, 1, 1.0, 2.0**14),
    }
    assert all((p["growth_factor"], p["backoff_factor"]) == (2.0, 0.5) for p in PUBLISHED.values())
