"""Differences between CUDA and the emulation: FP8 products, stochastic rounding."""

import torch

from mprun.precision.block_formats import decoded
from mprun.precision.rounded_weights import Piece, RoundedWeights
from mprun.precision.scaled_products import ScaledProducts, cast, product
from questions.answer import Answer

_SIZES = ((2048, 768, 3072), (12_288, 768, 768), (768, 12_288, 3072))  # n, k, m of GPT-2
_SEED = 20261123


def fp8_products(device: torch.device) -> Answer:
    """Measure the share of an FP8 product's elements that is bit-equal to the CPU's emulation."""
    recipes = {
        "tensor E4M3": (ScaledProducts(), torch.float32),
        "row E4M3": (ScaledProducts(granularity="row", scale="pow2"), torch.bfloat16),
    }
    if device.type != "cuda":
        recipes = {name: (own, torch.float32) for name, (own, _) in recipes.items()}
    rows, numbers = [], {}
    for n, k, m in _SIZES if device.type == "cuda" else ((32, 64, 48),):
        a, b = torch.randn(n, k).bfloat16(), torch.randn(m, k).bfloat16()
        for name, (products, dtype) in recipes.items():
            operand = products.operand("input", "output")
            left, right = (cast(matrix, operand) for matrix in (a, b))
            emulated = product(left, right.T, dtype)
            # The other order: sums of unscaled products, scaled once.
            one = torch.ones(())
            sums = decoded(left.values, one) @ decoded(right.T.values, one)
            scaled_last = (sums * (left.factor * right.T.factor)).to(dtype)
            there = [
                own._replace(values=own.values.to(device), factor=own.factor.to(device))
                for own in (left, right)
            ]
            casts = [cast(x.to(device), operand) for x in (a, b)]
            same_casts = all(
                torch.equal(ours.values.cpu().view(torch.uint8), own.values.view(torch.uint8))
                and torch.equal(ours.factor.cpu(), own.factor)
                for ours, own in zip(casts, (left, right), strict=True)
            )
            for fast in (False, True):
                found = product(there[0], there[1].T, dtype, fast).cpu()
                off = (found.double() - emulated.double()).abs().max() / emulated.abs().max()
                shares = {
                    "bit-equal": (found == emulated).double().mean().item(),
                    "bit-equal, scaled last": (found == scaled_last).double().mean().item(),
                    "largest difference": off.item(),
                    "casts equal": same_casts,
                }
                key = f"{name} {n}x{k}x{m} {'fast' if fast else 'exact'}"
                numbers[key] = shares
                equal, last, apart, _ = shares.values()
                rows.append((key, f"{equal:.2%}", f"{last:.2%}", f"{apart:.1e}", str(same_casts)))
    first = next(iter(numbers.values()))
    text = (
        f"{first['bit-equal']:.1%} of the elements with operands scaled first, "
        f"{first['bit-equal, scaled last']:.1%} with sums scaled last; casts "
        f"{'equal' if all(n['casts equal'] for n in numbers.values()) else 'DIFFER'}."
    )
    header = ("product", "bit-equal", "sums scaled last", "largest difference", "casts equal")
    return Answer(text, numbers, header, tuple(rows))


def stochastic_rounding(device: torch.device) -> Answer:
    """Find out whether stochastic rounding gives the same bits on CUDA and on a CPU."""
    numel = 2**20 + 3
    wide = torch.randn(numel)
    wide[:3] = torch.tensor([float("inf"), float("nan"), -0.0])
    found = {}
    for place in (torch.device("cpu"), device):
        own = torch.empty(numel, dtype=torch.bfloat16, device=place)
        rule = torch.optim.SGD([own], 0.1)
        narrow = RoundedWeights(rule, ["weight"], [own], "stochastic", seed=_SEED)
        piece = Piece(0, 2**21, own, wide.to(place, copy=True))
        bits = narrow.random_bits([piece])[0].cpu()
        narrow.store([piece])
        found[place.type] = (bits, own.cpu().view(torch.int16))
    (bits, stored), (other_bits, other) = found["cpu"], found[device.type]
    numbers = {
        "random bits equal": torch.equal(bits, other_bits),
        "weights equal": torch.equal(stored, other),
    }
    text = f"{'Yes' if all(numbers.values()) else 'NO'}: of {numel:,} numbers, "
    text += ", ".join(f"{name}: {value}" for name, value in numbers.items())
    return Answer(text + ".", numbers)
