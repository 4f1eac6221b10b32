"""How many numbers of the block formats differ from their definitions, and from torchao's.

    python -m benchmarks.block_counts [--json FILE]

The definitions are computed in exact fractions, one number after another
(tests/precision/exact_formats.py). torchao 0.18 has to be installed; what it has no code for a CPU
for (casts of NVFP4 training) has the fractions alone.
"""

import argparse
import json
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from fractions import Fraction as Q
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mprun.precision.block_formats import (
    ELEMENTS,
    SCALE_ROUNDINGS,
    SCALES,
    Element,
    decoded,
    encoded,
    turn,
    turning,
)
from mprun.precision.scaled_linear import install
from mprun.precision.scaled_products import Operand, cast
from mprun.record.console import markdown_table
from mprun.recording.environment import environment
from tests.precision import exact_formats as exact
from tests.precision.test_block_formats import E2M1, E4M3, E5M2, MX, NV, PAIRS, limits, of, sets

CPU, ONE = torch.device("cpu"), torch.ones(())
FP8 = replace(MX, granularity="1x128")
SIZE = 48, 136  # of the matrices that fractions follow: blocks of 16, 32 and 128 end inside


class Row(NamedTuple):
    """One row of the table; why: what the differing ones are."""

    what: str
    anchor: str
    compared: int
    different: int
    why: str = ""


def exactly(operand: Operand, matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return factors before and after the cast, by block, and codes, in FP64: each is exact."""
    rows = [[Q(value) for value in row] for row in matrix.tolist()]
    (n, k), (high, wide) = matrix.shape, operand.block
    whole = max(abs(value) for row in rows for value in row)
    factors, name = [], operand.element.name
    for top, left in product(range(0, n, high), range(0, k, wide)):
        places = [*product(range(top, min(n, top + high)), range(left, min(k, left + wide)))]
        amax = max(abs(rows[i][j]) for i, j in places)
        encode, decode = exact.factors(amax, whole, name, operand.scale, operand.scale_rounding)
        factors.append((float(encode), float(decode)))
        for i, j in places:
            rows[i][j] = exact.nearest(exact.f32(rows[i][j] * encode), name)
    before, after = torch.tensor(factors, dtype=torch.float64).unbind(1)
    codes = torch.tensor([[float(value) for value in row] for row in rows], dtype=torch.float64)
    return before, after, codes


def differing(one: Tensor, other: Tensor) -> int:
    return int((one.double() != other.double()).sum())


def encode_of(operand: Operand, matrix: Tensor) -> Tensor:
    """Return the factors before the cast, by block."""
    rows, columns = operand.block
    padded = nn.functional.pad(matrix, (0, -matrix.size(1) % columns, 0, -matrix.size(0) % rows))
    blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    amax = blocks.abs().amax((1, 3), keepdim=True)
    return SCALES[operand.scale].of(amax, operand.element, operand.scale_rounding)[0].flatten()


def against_fractions(what: str, operands: Iterable[Operand]) -> Iterator[Row]:
    """Yield two rows: scales, before and after the cast; and codes."""
    counts = [0, 0, 0, 0]
    for operand, (_, matrix) in product(operands, sets(*SIZE)):
        before, after, codes = exactly(operand, matrix)
        made = cast(matrix, operand)
        counts[0] += 2 * len(before)
        counts[1] += differing(encode_of(operand, matrix), before)
        counts[1] += differing(made.factor.flatten(), after)
        counts[2] += codes.numel()
        counts[3] += differing(decoded(made.values, ONE), codes)
    yield Row(f"{what}: scales", "fractions", *counts[:2])
    yield Row(f"{what}: codes", "fractions", *counts[2:])


def scales_at_limits() -> Row:
    """Each mantissa at which a rounding turns, one unit beside it, any bits, and 0."""
    any_bits = torch.randint(0, 0x7F800000, (20_000,), dtype=torch.int32).view(torch.float32)
    amax = torch.cat([limits(range(-126, 127)), any_bits, torch.zeros(1)])
    amax = amax.clamp(max=torch.finfo(torch.float32).max)
    different = 0
    for element, how in PAIRS:
        _, decode, _ = SCALES["e8m0"].of(amax, element, how)
        powers = [exact.e8m0(Q(value), element.name, how) for value in amax.tolist()]
        different += differing(decode, torch.tensor([2.0**p for p in powers], dtype=torch.float64))
    what = "MX: scales of amax at limits, subnormal, any"
    return Row(what, "fractions", len(PAIRS) * len(amax), different)


def grids() -> Row:
    """All numbers of the three formats, and all midpoints, which go to even."""
    compared = different = 0
    for element in ELEMENTS.values():
        grid = exact.GRIDS[element.name]
        given = [*grid, *((a + b) / 2 for a, b in zip(grid, grid[1:], strict=False))]
        found = decoded(encoded(torch.tensor([float(g) for g in given]), element), ONE)
        expected = [float(exact.nearest(g, element.name)) for g in given]
        compared += len(given)
        different += differing(found, torch.tensor(expected))
    return Row("every number of a format and every midpoint", "fractions", compared, different)


def hadamard() -> Iterator[Row]:
    signs = tuple(int(sign) for sign in (turning(CPU)[:, 0] * 4).tolist())
    from torchao.prototype.moe_training.nvfp4_training.hadamard_utils import get_rht_matrix

    theirs = get_rht_matrix(signs, CPU, torch.float32, 16)
    other = differing(turning(CPU), theirs)
    yield Row("Hadamard matrix with the same signs", "torchao", 256, other)
    compared = different = 0
    by = [[Q(value) for value in row] for row in turning(CPU).t().tolist()]
    for _, matrix in sets(24, 64):
        of_bf16 = matrix.bfloat16().float()
        exact_ones = torch.tensor(
            [
                [float(sum(Q(a) * b for a, b in zip(part, column, strict=True))) for column in by]
                for part in of_bf16.reshape(-1, 16).tolist()
            ],
            dtype=torch.float64,
        )
        expected = exact_ones.reshape(matrix.shape).bfloat16()
        compared, different = (
            compared + matrix.numel(),
            different + differing(turn(of_bf16, -1), expected),
        )
    why = "sums of 16 numbers are FP32, then BF16: rounded twice"
    yield Row("turned numbers of BF16", "fractions", compared, different, why if different else "")


def numbers_of_bf16() -> Iterator[Row]:
    """All codes times all scales."""
    bytes_ = torch.arange(255, dtype=torch.float64)
    powers = torch.tensor([2.0 ** (byte - 127) for byte in bytes_.tolist()], dtype=torch.float64)
    stored = torch.tensor([float(value) for value in exact.GRIDS["e4m3"]], dtype=torch.float64)
    for what, name, scales in (
        ("MXFP8 E4M3", "e4m3", powers),
        ("MXFP8 E5M2", "e5m2", powers),
        ("MXFP4", "e2m1", powers),
        ("NVFP4", "e2m1", stored),
    ):
        grid = torch.tensor([float(value) for value in exact.GRIDS[name]], dtype=torch.float64)
        found = (grid[:, None] * scales).flatten()
        found = found[found <= torch.finfo(torch.float32).max]
        other = found.bfloat16().double() != found
        why = f"up to 2^{int(found[other].log2().max())}: below BF16's" if other.any() else ""
        row = f"{what}: codes times scales are BF16 numbers"
        yield Row(row, "BF16", len(found), int(other.sum()), why)


# torchao.


def of_torchao(matrix: Tensor, element: Element, how: str) -> tuple[Tensor, Tensor]:
    """Return the exponents of its scales, and its codes."""
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.kernels import f4_unpacked_to_f32, unpack_uint4
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    dtype = torch.float4_e2m1fn_x2 if element is E2M1 else element.dtype
    scale, codes = to_mx(matrix, dtype, 32, ScaleCalculationMode(how))
    codes = f4_unpacked_to_f32(unpack_uint4(codes)) if element is E2M1 else codes.float()
    return scale.view(torch.uint8).flatten().int() - 127, codes.view_as(matrix)


def mx_against_torchao() -> Iterator[Row]:
    amax = limits(range(-100, 101))
    at_limits = (torch.rand(len(amax), 32) * 2 - 1) * amax[:, None]
    at_limits[:, 5] = amax
    six = [matrix for name, matrix in sets(4096, 32) if name != "subnormal"]
    small = torch.randn(4096, 32) * 2.0 ** torch.randint(-149, -119, (4096, 1))
    log = "torchao's logarithm in FP32: one too small just above a power of two"
    by_1 = "all in blocks with scale 2^-127, which torchao encodes by 1: codes are 0"
    by_2 = "all in blocks with scale 2^-127, which torchao encodes by 2^126"
    others = SCALE_ROUNDINGS[1:]
    for what, given, hows, whys in (
        ("six sets", six, SCALE_ROUNDINGS, ("", "")),
        ("rceil, amax at limits", [at_limits], ("rceil",), (log, "")),
        ("the other roundings, amax at limits", [at_limits], others, ("", "")),
        ("rceil, amax below 2^-118", [small], ("rceil",), ("", by_1)),
        ("the other roundings, amax below 2^-118", [small], others, ("", by_2)),
    ):
        counts = [0, 0, 0, 0]
        for how, element, matrix in product(hows, ELEMENTS.values(), given):
            powers, codes = of_torchao(matrix, element, how)
            made = cast(matrix, of(MX, element, scale_rounding=how))
            same = made.factor[:, 0].double().log2().int() == powers
            other = decoded(made.values, ONE) != codes
            counts[0] += len(same)
            counts[1] += int((~same).sum())
            counts[2] += int(same.sum()) * 32
            counts[3] += int(other[same].sum())
            assert not whys[1] or (powers[other.any(1)] == -127).all()
        yield Row(f"MX {what}: scales", "torchao", *counts[:2], whys[0])
        yield Row(f"MX {what}: codes of equal scales", "torchao", *counts[2:], whys[1])


def mx_layers() -> Iterator[Row]:
    """Output and both gradients of a linear layer."""
    from torchao.prototype.moe_training.mxfp8_linear import mx_mm
    from torchao.prototype.mx_formats import config
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    kernels = (config.MXFP8Dim0CastKernelChoice.TORCH, config.MXFP8Dim1CastKernelChoice.TORCH)
    for dtype in (torch.float32, torch.bfloat16):
        compared, different = [0, 0, 0], [0, 0, 0]
        for how, of_gradient in product(SCALE_ROUNDINGS, (E4M3, E5M2)):
            layer = nn.Linear(96, 160, bias=False, dtype=dtype)
            install(
                nn.Sequential(layer, nn.ReLU()),
                replace(MX, grad_output=of_gradient, scale_rounding=how),
                {},
            )
            x = (torch.randn(4, 64, 96) * torch.randn(96).exp()).to(dtype)
            gradient = (torch.randn(4, 64, 160) * 1e-4).to(dtype)
            own, other = (x.clone().requires_grad_() for _ in range(2))
            weight = layer.weight.detach().clone().requires_grad_()
            found = layer(own)
            found.backward(gradient)
            chosen = (E4M3.dtype, E4M3.dtype, of_gradient.dtype, 32, KernelPreference.EMULATED)
            mode = config.ScaleCalculationMode(how)
            expected = mx_mm.apply(other, weight, *chosen, *kernels, mode, False)
            expected.backward(gradient)
            pairs = (found, expected), (own.grad, other.grad), (layer.weight.grad, weight.grad)
            for place, (one, theirs) in enumerate(pairs):
                compared[place] += one.numel()
                different[place] += differing(one, theirs)
        name = "FP32" if dtype is torch.float32 else "BF16"
        why = "the CPU's product in BF16, which torchao takes, adds up in another order"
        for what, *counts in zip("y gx gw".split(), compared, different, strict=True):
            yield Row(f"MX layer in {name}: {what}", "torchao", *counts, why if counts[1] else "")


def fp8_blocks() -> Iterator[Row]:
    from torchao.prototype.blockwise_fp8_training import kernels

    functions = {
        "1x128": kernels.torch_blockwise_scale_act_quant_lhs,
        "128x1": kernels.torch_blockwise_scale_act_quant_rhs,
        "128x128": kernels.torch_blockwise_scale_weight_quant,
    }
    counts = [0, 0, 0, 0]
    for block, dtype in product(functions, (torch.float32, torch.bfloat16)):
        x = torch.randn(512, 256) * (2 * torch.randn(512, 256)).exp()
        x[3] = 0
        codes, factor = functions[block](x.to(dtype))
        made = cast(x.to(dtype), of(MX, granularity=block, scale="fp32"))
        counts[0] += factor.numel()
        counts[1] += differing(made.factor, factor)
        counts[2] += x.numel()
        counts[3] += differing(made.values, codes)
    yield Row("FP8 1x128, 128x1, 128x128: scales", "torchao", *counts[:2])
    yield Row("the same: codes", "torchao", *counts[2:])


def nvfp4_of_inference() -> Iterator[Row]:
    from torchao.prototype.mx_formats.kernels import f4_unpacked_to_f32, unpack_uint4
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

    matrix = dict(sets(1024, 128))["heavy tails"]
    scale = per_tensor_amax_to_scale(matrix.abs().max())
    stored, *_, codes = nvfp4_quantize(matrix, 16, scale)
    made = cast(matrix, of(NV))
    why = "another recipe: a scale is at least E4M3's smallest normal number, and rounded twice"
    theirs = stored.flatten().float()
    yield Row(
        "NVFP4, heavy tails: scales", "torchao's inference", theirs.numel(),
        differing(made.factor.flatten(), theirs), why,
    )  # fmt: skip
    theirs = f4_unpacked_to_f32(unpack_uint4(codes)).view_as(matrix)
    other = differing(decoded(made.values, ONE), theirs)
    yield Row("NVFP4, heavy tails: codes", "torchao's inference", theirs.numel(), other, why)


def rows() -> Iterator[Row]:
    """Yield the table, a row as soon as it is counted."""
    yield grids()
    yield scales_at_limits()
    every = [of(MX, element, scale_rounding=how) for element, how in PAIRS]
    yield from against_fractions("MX, 3 formats, 4 roundings", every)
    for block in ("1x16", "16x16"):
        yield from against_fractions(f"NVFP4 {block}", [of(NV, granularity=block)])
    for block in ("1x128", "128x128"):
        both = [of(FP8, granularity=block, scale=scale) for scale in ("pow2", "fp32")]
        yield from against_fractions(f"FP8 {block}, scales pow2 and fp32", both)
    yield from numbers_of_bf16()
    yield from hadamard()
    yield from mx_against_torchao()
    yield from mx_layers()
    yield from fp8_blocks()
    yield from nvfp4_of_inference()


def seeded(found: Iterable[Row]) -> Iterator[Row]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for row in found:
        print(*row, sep=" | ", flush=True)
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    found = [*seeded(rows())]
    lines = [(r.what, r.anchor, f"{r.compared:,}", f"{r.different:,}", r.why) for r in found]
    print(markdown_table(["what", "anchor", "compared", "different", "why"], [*map(list, lines)]))
    if options.json:
        content = {"environment": environment(CPU), "rows": [row._asdict() for row in found]}
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
