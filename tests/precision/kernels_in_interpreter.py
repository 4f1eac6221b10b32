"""Run as a script by test_single_pass_kernels.py, with TRITON_INTERPRET=1.

Prints one line of JSON: for each check None, or in what it failed.
"""

import json

import torch
from torch import nn
from torch.optim import SGD, Adam

from mprun.precision import LogMaxLossScale, MixedPrecisionOptimizer
from mprun.precision.rounded_weights import Piece, RoundedWeights, widen
from mprun.precision.single_pass_cpu import BlockedUpdate
from mprun.precision.single_pass_triton import KernelUpdate
from mprun.precision.torch_update import initialise_state
from mprun.precision.update import Ready
from mprun.precision.update_choice import difference, store_difference
from tests.helpers import making, mixed, outcomes_of
from tests.precision.rules import RULES

torch.set_num_threads(1)
CPU = torch.device("cpu")
# Weights of magnitude below 8 after three updates of at most eight roundings each.
CLOSE = {"rtol": 2.0**-20, "atol": 2.0**-19}


def self_test(rule):
    # Not bfloat16: the interpreter cuts bits off where a GPU rounds.
    found = difference(MixedPrecisionOptimizer, CPU, rule, (torch.float16, torch.float32))
    assert found is None, found


def self_test_notices():
    """An update without its clip factor is another update."""
    update = KernelUpdate.write
    KernelUpdate.write = lambda self, ready, clip: update(self, ready, None)
    try:
        found = difference(MixedPrecisionOptimizer, CPU, "sgd", (torch.float16, torch.float32))
    finally:
        KernelUpdate.write = update
    assert found is not None and "the weights" in found, found


def groups(tensors):
    """Two groups with rates and decays of their own, the first rate a tensor."""
    return [
        {"params": tensors[::2], "lr": torch.tensor(0.03)},
        {"params": tensors[1::2], "weight_decay": 0.2},
    ]


def against_blocks(name, dtype):
    """Odd shapes, a missing gradient, one that is not aligned, some that are not clipped."""
    shapes = [(33,), (3, 5, 4, 4), (2048,), (1,), (4100,), (8,)]
    random = torch.Generator().manual_seed(3)
    start = [torch.randn(shape, generator=random) for shape in shapes]
    start[1] = start[1].contiguous(memory_format=torch.channels_last)
    is_clipped = [True, False, True, True, False, True]
    results = []
    for kind in (KernelUpdate, BlockedUpdate):
        random.manual_seed(4)
        masters = [tensor.clone().requires_grad_() for tensor in start]
        own = [master.detach().to(dtype) for master in masters]
        inner = RULES[name](groups(masters), weight_decay=0.1, fused=True)
        initialise_state(inner)
        single = kind(inner, own, masters, is_clipped)
        norms = []
        for step in range(3):
            gradients = [(torch.randn(s, generator=random) * 16).to(dtype) for s in shapes]
            gradients[3] = None
            gradients[4] = torch.cat([gradients[4], gradients[4][:1]])[1:]
            inverse = torch.tensor(2.0**-4)
            found_inf = torch.zeros(())
            ready = Ready(gradients, inverse, found_inf)
            checked = single.read(ready, norm=True, grad_max=True)
            assert found_inf == 0
            again = single.read(ready, norm=True, grad_max=True)
            assert torch.equal(checked.norms, again.norms)
            ready = ready._replace(found_inf=None) if step else ready
            single.write(ready, torch.tensor(0.3))
            norms.append((checked.norms.norm(), checked.grad_max))
            inner.param_groups[0]["lr"].mul_(0.5)
            inner.param_groups[1]["lr"] *= 0.5
        results.append((masters, own, inner, norms))
    (masters, own, inner, norms), (expected, copies, plain, theirs) = results
    for (norm, largest), (other, most) in zip(norms, theirs, strict=True):
        # Sums of 2,048 squares in another order.
        torch.testing.assert_close(norm, other, rtol=1e-5, atol=0)
        assert largest == most
    for a, b in zip(masters, expected, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)
        for key, value in plain.state[b].items():
            mine = inner.state[a][key]
            assert mine.dtype == value.dtype and mine.stride() == value.stride()
            torch.testing.assert_close(mine, value, **CLOSE)
    for copy, master in zip(own, masters, strict=True):
        if dtype is torch.bfloat16:
            torch.testing.assert_close(copy.float(), master.detach(), rtol=2.0**-7, atol=0)
        else:
            assert torch.equal(copy, master.to(dtype))
    assert torch.equal(masters[3], start[3]) and not torch.equal(masters[4], start[4])


def adam_by_hand():
    """Three steps in float64 from the formulas of Kingma and Ba, arXiv 1412.6980, algorithm 1."""
    master = torch.linspace(-2, 2, 300).requires_grad_()
    own = master.detach().half()
    inner = Adam([master], 0.01, betas=(0.9, 0.999), eps=1e-8, fused=True)
    initialise_state(inner)
    single = KernelUpdate(inner, [own], [master], [True])
    weight, m, v = master.detach().double(), 0.0, 0.0
    random = torch.Generator().manual_seed(0)
    for t in (1, 2, 3):
        gradient = torch.randn(300, generator=random).half()
        single.write(Ready([gradient], torch.tensor(0.125), torch.zeros(())), None)
        g = gradient.double() * 0.125
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        weight -= 0.01 * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
    torch.testing.assert_close(master.detach().double(), weight, rtol=0, atol=2.0**-20)


def a_whole_optimizer():
    """Training steps with a scale from the largest gradient, clipping, skips and two losses."""
    results = []
    for update in ("plain", "single_pass"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 40), nn.LayerNorm(40), nn.Linear(40, 3))
        scale = LogMaxLossScale(64.0)
        make = making(RULES["adamw"], fused=True)
        _, optimizer = mixed(model, "fp16_master", make, scale, clip_norm=0.5, update=update)
        if update == "single_pass":
            optimizer.use(
                KernelUpdate(optimizer.inner, optimizer.parameters, optimizer.updated, [True] * 6)
            )
        metrics = []
        for factors in ((1.0,), (float("inf"),), (1.0, 2.0), (0.5,)):
            optimizer.zero_grad()
            for factor in factors:
                inputs = torch.randn(8, 6).half()
                optimizer.backward(model(inputs).float().square().mean() * factor)
            metrics.append(optimizer.step(True).metrics())
            scale.update()
        results.append((metrics, list(optimizer.masters.values()), scale.steps_skipped))
    (plain, expected, skipped), (single, masters, own_skipped) = results
    assert skipped == own_skipped == 1
    for a, b in zip(single, plain, strict=True):
        assert a["found_inf"] == b["found_inf"]
        # 2^-11: where a weight differs in its last bit, its FP16 copy may differ in its own.
        torch.testing.assert_close(a["loss_scale"], b["loss_scale"], rtol=2.0**-9, atol=0)
        torch.testing.assert_close(
            a["grad_norm"], b["grad_norm"], rtol=2.0**-9, atol=0, equal_nan=True
        )
    for a, b in zip(masters, expected, strict=True):
        # Adam's first updates are of the size of the rate, whatever the gradient's.
        torch.testing.assert_close(a, b, rtol=0, atol=0.01 * 2.0**-6)


def store(rule, rounding):
    found = store_difference(MixedPrecisionOptimizer, CPU, rule, rounding)
    assert found is None, found


def store_notices():
    """Random bits of the next place, which torch's operations are made to take."""
    random_bits = RoundedWeights.random_bits
    RoundedWeights.random_bits = lambda *args: [own.roll(1) for own in random_bits(*args)]
    try:
        found = store_difference(MixedPrecisionOptimizer, CPU, "sgd", "stochastic")
    finally:
        RoundedWeights.random_bits = random_bits
    assert found is not None and "stochastic store" in found, found


def store_by_hand(rounding):
    """SGD at a rate of 1 is one subtraction: then every bit is that of `RoundedWeights.store`."""
    random = torch.Generator().manual_seed(5)
    start = [torch.randn(n, generator=random).bfloat16() for n in (4100, 16, 33)]
    weights = [tensor.clone().requires_grad_() for tensor in start]
    inner = SGD(weights, 1.0, fused=True)
    narrow, other = (RoundedWeights(inner, list("abc"), weights, rounding, seed=3) for _ in "ab")
    narrow.initialise_state()
    single = KernelUpdate(inner, weights, weights, [True] * 3, narrow)
    expected = [tensor.clone() for tensor in start]
    rests = [torch.zeros_like(tensor) for tensor in start] if rounding == "kahan" else [None] * 3
    for step in range(4):
        gradients = [torch.randn(t.shape, generator=random) * 2.0**-8 for t in start]
        if step == 3:
            special = [float("inf"), float("-inf"), float("nan"), 3.4e38, -3.4e38, 2.0**-140]
            gradients[0][: len(special)] = torch.tensor(special)
        single.write(Ready(gradients, None, torch.ones(())), None)  # skipped
        single.write(Ready(gradients, None, torch.zeros(())), None)
        for number, gradient in enumerate(gradients):
            wide = widen(torch.empty_like(gradient), expected[number], rests[number]) - gradient
            other.store([Piece(number, 0, expected[number], wide, rests[number])])
        other.count()
        for number, (weight, theirs) in enumerate(zip(weights, expected, strict=True)):
            # Of a NaN not its payload.
            assert torch.equal(weight.detach().nan_to_num(7.5), theirs.nan_to_num(7.5))
            if rounding == "kahan":
                kept = inner.state[weight]["compensation"]
                torch.testing.assert_close(kept, rests[number], rtol=0, atol=0, equal_nan=True)
    assert narrow.updates == 4


CHECKS = {f"self test of {rule}": (self_test, rule) for rule in ("sgd", "adam", "adamw", "adagrad")}
CHECKS |= {
    f"{name} in {dtype}": (against_blocks, name, dtype)
    for name in RULES
    for dtype in (torch.float16, torch.bfloat16)
}
CHECKS |= {
    f"{rounding} store of {rule}": (store, rule, rounding)
    for rounding in ("stochastic", "kahan")
    for rule in ("sgd", "adamw", "adagrad")
}
CHECKS |= {
    "stochastic store by hand": (store_by_hand, "stochastic"),
    "kahan store by hand": (store_by_hand, "kahan"),
    "the test of the store notices": (store_notices,),
    "the self test notices": (self_test_notices,),
    "adam by hand": (adam_by_hand,),
    "a whole optimizer": (a_whole_optimizer,),
}

if __name__ == "__main__":
    print(json.dumps(outcomes_of(CHECKS)))
