"""BF16 weights updated in FP32: stochastic rounding, Kahan's compensation, narrow state."""

import hashlib
import itertools
import math
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import nn

from mprun.precision import StaticLossScale, build_policy, rounded_weights
from mprun.precision.philox import philox
from mprun.precision.rounded_weights import Piece, RoundedWeights, choose_narrow
from mprun.tasks import OfParameters

from ..helpers import assert_same_bits, making, mixed, one_step


def of(*names, seed=20261123):
    """Weights of these names, all of one number: only their names and number matter."""
    weights = [torch.zeros(1, dtype=torch.bfloat16) for _ in names]
    return RoundedWeights(torch.optim.SGD(weights, 0.1), names, weights, "stochastic", seed=seed)


def drawn(narrow, numel, start=0, number=0):
    nothing = torch.empty(numel)
    return narrow.random_bits([Piece(number, start, nothing, nothing)])[0]


def rounded(wide):
    own = torch.empty_like(wide, dtype=torch.bfloat16)
    of("a").store([Piece(0, 0, own, wide)])
    return own


@pytest.mark.gpu
def test_on_a_gpu_the_bits_are_those_of_a_cpu():
    wide = torch.cat([torch.tensor([math.inf, math.nan, -0.0]), torch.randn(2**20)])
    own = {}
    for device in ("cpu", "cuda"):
        weight = torch.empty_like(wide, dtype=torch.bfloat16, device=device)
        rule = torch.optim.SGD([weight], 0.1)
        narrow = RoundedWeights(rule, ["a"], [weight], "stochastic", seed=20261123)
        narrow.store([Piece(0, 0, weight, wide.to(device, copy=True))])
        own[device] = weight.cpu()
    assert_same_bits(own["cuda"], own["cpu"])


@pytest.mark.parametrize("share", [0.0, 2.0**-16, 0.3, 0.5, 0.99])
@pytest.mark.parametrize("base", [1.0, -3.0, 2.0**-126, -(2.0**-130)])
def test_the_mean_is_the_number(share, base):
    """The mean of n coins that are rounded up is within 4.5 deviations (1 in 100,000)."""
    ulp = 2.0 ** (max(math.frexp(abs(base))[1] - 1, -126) - 7)
    below = abs(base)
    wide = torch.full((1 << 18,), math.copysign(below + share * ulp, base))
    exact = (abs(wide[0].double()) - below) / ulp
    up = (rounded(wide).double().abs() - below) / ulp
    assert set(up.unique().tolist()) <= {0.0, 1.0}
    assert abs(up.mean() - exact) <= 4.5 * math.sqrt(exact * (1 - exact) / len(wide))


def test_what_is_in_bf16_stays():
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    assert torch.equal(rounded(every.float()).nan_to_num(7.5), every.nan_to_num(7.5))
    nan = torch.full((64,), 0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    assert rounded(nan).isnan().all()


# DEShawResearch/random123, tests/kat_vectors, "philox4x32 10": counter, key, result.
KNOWN = """
00000000 00000000 00000000 00000000 00000000 00000000   6627e8d5 e169c58d bc57ac4c 9b00dbd8
ffffffff ffffffff ffffffff ffffffff ffffffff ffffffff   408f276d 41c83b0e a20bc7c6 6d5451fd
243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0   d16cfe09 94fdcceb 5001e420 24126ea1
"""


def by_hand(counter, key, width=32):
    """Philox4xW-10 in Python's integers, after the paper's section 3.3 and Random123's header."""
    factors, raised = {
        32: ((0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)),
        64: (
            (0xD2E7470EE14C6C93, 0xCA5A826395121157),
            (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B),
        ),
    }[width]
    c, k, words = list(counter), list(key), 2**width
    for _ in range(10):
        products = (divmod(f * c[n], words) for f, n in zip(factors, (0, 2), strict=True))
        (high0, low0), (high1, low1) = products
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(own + more) % words for own, more in zip(k, raised, strict=True)]
    return c


def test_philox_gives_the_published_vectors():
    for line in KNOWN.strip().splitlines():
        numbers = [int(word, 16) for word in line.split()]
        counter, key, expected = numbers[:4], numbers[4:6], numbers[6:]
        words = philox([torch.tensor([word]) for word in counter], key[0] | key[1] << 32)
        assert [int(word) for word in words] == expected == by_hand(counter, key)


def test_philox_of_another_width_is_numpys():
    """numpy has that of 64 bits; `by_hand` holds for both."""
    numbers = np.random.default_rng(0).integers(0, 2**64, 6, dtype=np.uint64).tolist()
    counter, key = numbers[:4], numbers[4:]
    before = np.array([counter[0] - 1, *counter[1:]], dtype=np.uint64)  # it adds 1 first
    numpys = np.random.Philox(counter=before, key=np.array(key, dtype=np.uint64))
    assert numpys.random_raw(4).tolist() == by_hand(counter, key, 64)
    words = [number % 2**32 for number in numbers]
    own = philox([torch.tensor([word]) for word in words[:4]], words[4] | words[5] << 32)
    assert [int(word) for word in own] == by_hand(words[:4], words[4:])


def test_random_bits_are_those_of_their_seed_name_update_and_place():
    names, seed = ("a", "layer.weight"), 2**64 - 7
    narrow = of(*names, seed=-7)
    narrow.updates += 5
    for number, place in itertools.product((0, 1), (0, 1, 12345)):
        digest = hashlib.blake2b(names[number].encode(), digest_size=8).digest()
        hashed = int.from_bytes(digest, "little")
        counter = [place // 8, 5, hashed % 2**32, hashed >> 32]
        word = by_hand(counter, [seed % 2**32, seed >> 32])[place % 8 // 2]
        expected = word >> 16 if place % 2 else word & 0xFFFF
        assert drawn(narrow, place + 3, number=number)[place] == expected
    assert int(narrow.streams[0]) % 2**64 == seed  # as other processes get it


def test_random_bits_are_uniform_and_of_their_place():
    narrow = of("a", "b")
    bits = drawn(narrow, 1 << 18)
    counts = torch.bincount(bits >> 8, minlength=256).double()
    expected = (1 << 18) / 256
    assert abs(((counts - expected) ** 2 / expected).sum().item() - 255) < 4.5 * math.sqrt(2 * 255)
    assert torch.equal(drawn(narrow, 1000, 5000), bits[5000:6000])
    weights = ((0, 1000), (1, 3), (0, 17))
    pieces = [Piece(n, 8 * n, torch.empty(size), None) for n, size in weights]
    for piece, own in zip(pieces, narrow.random_bits(pieces), strict=True):
        assert torch.equal(own, drawn(narrow, len(piece.own), piece.start, piece.number))


def test_no_streams_overlap():
    """Keys that differ in low bits, such as seeds in a row, gave the same bits in swapped places
    where the place was mixed into the key."""
    streams = []
    for seed in (0, 1, 2, 3):
        narrow = of("a", "b", seed=seed)
        for _ in range(3):
            streams += [drawn(narrow, 4096, number=number) for number in (0, 1)]
            narrow.count()
    every = torch.stack(streams)
    # Correlations of independent draws have the deviation 1/64; 276 of them.
    assert torch.corrcoef(every.float()).fill_diagonal_(0).abs().max() < 5 / 64
    # Blocks of 128 bits: with 12,288 of them a pair of equal ones has a chance of 2^-101.
    blocks = every.view(-1, 8)
    assert len(blocks.unique(dim=0)) == len(blocks)


def test_a_loaded_state_brings_the_seed_of_its_run():
    saved, other = of("a", seed=2**64 - 1), of("a", seed=4)
    saved.count()
    assert not torch.equal(drawn(other, 64), drawn(saved, 64))
    other.load_state_dict(saved.state_dict())
    assert torch.equal(drawn(other, 64), drawn(saved, 64))


def trained(mode, rule, steps=4, skip=None, scale=None, **settings):
    """The learner after some steps of a mode or policy, that of number `skip` skipped."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 37), nn.LayerNorm(37), nn.Linear(37, 3))
    loss_scale, make = None if scale is None else StaticLossScale(scale), making(rule, **settings)
    learner = mixed(model, mode, make, loss_scale, clip=OfParameters(1.0), seed=3)
    draw = torch.Generator().manual_seed(1)
    for step in range(steps):
        factor = math.inf if step == skip else 1.0
        inputs = torch.randn(8, 40, generator=draw)
        one_step(learner, inputs, lambda y, factor=factor: y.square().mean() * factor)
    return learner


ADAM = {"lr": 1e-3, "weight_decay": 0.1, "fused": True}
RULES = [
    (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1, "fused": True}),
    (torch.optim.Adam, ADAM),
    (torch.optim.AdamW, ADAM),
    (torch.optim.Adagrad, {"lr": 0.01, "fused": True}),
]


class ByHand:
    """The same training in plain torch: BF16 weights that are FP32 in their update.

    Each step widens them, calls torch's rule, and rounds them; what is random is given.
    """

    def __init__(self, learner, rule, settings):
        self.names = [*learner.named]
        self.own = [own.detach().clone() for own in learner.updated]
        self.wide = [own.float() for own in self.own]
        self.kept = [torch.zeros_like(own) for own in self.own]
        self.inner = rule(self.wide, **settings)

    def step(self, gradients, store):
        every = zip(self.wide, self.own, self.kept, gradients, strict=True)
        for wide, own, kept, gradient in every:
            if own.dtype is torch.bfloat16:
                wide.copy_(own.float() + kept.float())
            wide.grad = gradient.clone()
        self.inner.step()
        for number, (own, wide) in enumerate(zip(self.own, self.wide, strict=True)):
            if own.dtype is torch.bfloat16:
                store(self.names[number], own, wide, self.kept[number])
            else:
                own.copy_(wide)


@pytest.mark.parametrize("mode", ["bf16_stochastic", "bf16_kahan"])
@pytest.mark.parametrize(("rule", "settings"), RULES, ids=lambda x: getattr(x, "__name__", ""))
def test_an_update_is_torchs_in_fp32_and_a_store(mode, rule, settings, monkeypatch):
    """In any chunks, over a skipped step too; the state stays in FP32."""
    # A weight, of 1,480 numbers, to an update; rounded in pieces.
    monkeypatch.setattr(rounded_weights, "CHUNK", 512)
    learner = trained(mode, rule, 0, scale=64.0, **settings)
    reference = ByHand(learner, rule, settings)
    narrow = learner.steps.narrow

    def store(name, own, wide, kept):
        if mode == "bf16_kahan":
            own.copy_(wide)
            kept.copy_(wide - own)
        else:
            number = [*map(id, narrow.weights)].index(id(learner.named[name]))
            bits = drawn(narrow, own.numel(), number=number)
            rounded_weights.round_stochastically(own, wide.clone(), bits)

    draw = torch.Generator().manual_seed(1)
    for step in range(4):
        learner.zero_grad()
        loss = learner.network(torch.randn(8, 40, generator=draw)).square().mean()
        (loss * (math.inf if step == 2 else 1.0)).backward()
        gradients = [own.grad.clone() for own in learner.updated]
        assert {gradient.dtype for gradient in gradients} == {torch.float32}
        updates = narrow.updates.clone()
        norm = learner.step().grad_norm
        if step != 2:
            factor = (1.0 / (norm + 1e-6)).clamp(max=1.0)
            narrow.updates.copy_(updates)  # the random bits are those of this number
            reference.step([gradient * factor for gradient in gradients], store)
            narrow.count()
        assert_same_bits([*learner.updated], reference.own)
    assert narrow.updates == 3  # of 4 steps, one of which was skipped
    dtypes = {own.dtype for name, own in learner.named.items() if name.startswith("1.")}
    assert dtypes == {torch.float32}  # the norm layer
    assert learner.model[0].weight.dtype is torch.bfloat16
    for own, wide in zip(learner.updated, reference.wide, strict=True):
        kept = {k: v for k, v in learner.optimizer.state[own].items() if k != "compensation"}
        assert_same_bits(kept, dict(reference.inner.state[wide]))


@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
@pytest.mark.parametrize("scale", [None, 64.0])
def test_narrow_state_beside_fp32_norms(rounding, scale):
    """With a narrow state the norm layer's FP32 weights are among them, and are not rounded."""
    values = {"param_dtype": "bf16", "master_dtype": None, "update.state_dtype": "bf16"}
    policy = build_policy("own", values | {"update.rounding": rounding})
    learner = trained(policy, torch.optim.AdamW, 2, None if scale is None else 1, scale, **ADAM)
    norm = learner.model[1].weight
    state = learner.optimizer.state[norm]
    assert norm.dtype is torch.float32 and state["exp_avg"].dtype is torch.bfloat16
    assert "compensation" not in state and (norm != norm.bfloat16()).any()


@pytest.mark.parametrize("mode", ["bf16_stochastic", "bf16_kahan"])
def test_no_more_than_a_chunk_is_in_fp32(mode, monkeypatch):
    monkeypatch.setattr(rounded_weights, "CHUNK", 1500)
    sizes = []

    class Seen(RoundedWeights):
        @contextmanager
        def in_fp32(self, updated, found_inf):
            with super().in_fp32(updated, found_inf) as wide:
                assert all(tensor.dtype is torch.float32 for tensor in wide)
                sizes.append([tensor.numel() for tensor in wide])
                yield wide

    monkeypatch.setattr(rounded_weights, "RoundedWeights", Seen)
    learner = trained(mode, torch.optim.AdamW, 1, **ADAM)
    # Two linear layers, their biases, and the norm layer's weights, which are in FP32 anyway.
    assert sizes == [[1480], [37, 37, 37, 111, 3]]
    assert learner.steps.narrow.updates == 1


def test_an_unknown_optimizer_is_given_all_weights_at_once(monkeypatch):
    monkeypatch.setattr(rounded_weights, "CHUNK", 2)

    class Own(torch.optim.SGD):
        pass

    weights = [torch.zeros(4, dtype=torch.bfloat16) for _ in range(3)]
    for rule, chunks in ((torch.optim.SGD, [[0], [1], [2]]), (Own, [[0, 1, 2]])):
        narrow = RoundedWeights(rule(weights, 0.1), ["a", "b", "c"], weights, "stochastic")
        assert narrow.chunks(weights) == chunks


def test_the_update_is_that_of_fp32_but_for_one_rounding():
    """Against float64: decay and Adam's rule act on the widened weight, and are rounded once."""
    learner = trained("bf16_stochastic", torch.optim.AdamW, 0, **ADAM)
    weight = learner.model[0].weight
    before = weight.detach().double()
    one_step(learner, torch.ones(8, 40))
    gradient = learner.steps.unscaled_gradients()["0.weight"].double()
    wanted = before * (1 - 1e-4) - 1e-3 * gradient / (gradient.abs() + 1e-8)
    ulp = 2.0 ** (torch.frexp(wanted).exponent - 8)
    assert ((weight.double() - wanted).abs() < ulp * (1 + 2.0**-14)).all()  # a neighbour
    assert (weight.double() != before).any()


@pytest.mark.slow
def test_updates_far_below_the_format_add_up():
    """100 updates of 2^-9 of a unit: lost to nearest, a fifth of a unit to the others."""
    moved = {}
    for mode in ("bf16_naive", "bf16_stochastic", "bf16_kahan", "bf16_master"):
        model = nn.Linear(4096, 1, bias=False)
        nn.init.constant_(model.weight, 1.0)
        learner = mixed(model, mode, making(torch.optim.SGD, 2.0**-16), seed=5)
        for _ in range(100):
            one_step(learner, torch.full((1, 4096), -1.0), torch.sum)
        moved[mode] = (model.weight.bfloat16().double().mean() - 1).item()
    expected = 100 * 2.0**-16
    assert moved["bf16_naive"] == 0
    # 4096 weights, each a random walk of 100 coins of probability 2^-9 of 2^-7.
    deviation = 2.0**-7 * math.sqrt(100 * 2.0**-9 / 4096)
    assert abs(moved["bf16_stochastic"] - expected) < 4.5 * deviation
    # To nearest: a fifth of a unit is kept beside the weight.
    assert moved["bf16_kahan"] == 0 and abs(moved["bf16_master"]) == 0
    assert (model.weight.double() - 1 == expected).all()  # multiples of 2^-23


def test_kahan_keeps_what_the_store_takes_away():
    """A loss linear in the weights has the same gradient in every step: by hand in float64."""
    model, steps = nn.Linear(64, 8, bias=False), 50
    learner = mixed(model, "bf16_kahan", making(torch.optim.SGD, 2.0**-9, weight_decay=0.125))
    expected = model.weight.detach().double()
    inputs = torch.randn(4, 64)
    for _ in range(steps):
        one_step(learner, inputs, torch.sum)
        gradient = learner.steps.unscaled_gradients()["weight"].double()
        expected -= 2.0**-9 * (gradient + 0.125 * expected)
    kept = learner.steps.state_by_name()["weight"]["compensation"]
    assert kept.dtype is torch.bfloat16 and (kept != 0).any()
    found = model.weight.double() + kept.double()
    # Each step rounds two BF16 numbers, the second of at most half a unit (2^-9) of the first: to
    # 2^-18 of the weight, which stays below 1 here.
    assert expected.abs().max() < 1
    assert (found - expected).abs().max() < steps * 2.0**-18
    assert (model.weight.double() - expected).abs().max() > 2.0**-11


def test_refusals():
    with pytest.raises(ValueError, match=r"weight: its values must be contiguous in memory"):
        gaps = torch.zeros(4, 8, dtype=torch.bfloat16)[:, ::2]
        RoundedWeights(torch.optim.SGD([gaps], 0.1), ["weight"], [gaps], "stochastic")


def test_the_counter_of_a_weight_of_one_number_is_not_narrow():
    """In BF16 it would stand still at 256."""
    weight = torch.nn.Parameter(torch.tensor(1.0))
    optimizer = torch.optim.AdamW([weight])
    policy = build_policy("own", {"update": {"state_dtype": "bf16"}})
    choose_narrow(optimizer, {"weight": weight}, policy).initialise_state()
    state = optimizer.state[weight]
    assert state["step"].dtype is torch.float32 and state["exp_avg"].dtype is torch.bfloat16
