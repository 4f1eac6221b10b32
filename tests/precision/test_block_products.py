"""Products of codes in blocks. No GPU that has them was here: what cuBLAS reads is tested."""

import math
import subprocess
import sys

import pytest
import torch
from torch import nn

from mprun.precision import block_products, get_policy
from mprun.precision.block_products import difference, multiplied_in_blocks, packed, swizzled
from mprun.precision.scaled_operators import Product
from mprun.precision.scaled_products import cast, how_multiplied, product, why_decoded

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
MXFP8, HYBRID, MXFP4, NVFP4 = (
    get_policy(mode).matmul for mode in ("mxfp8", "mxfp8_hybrid", "mxfp4", "nvfp4")
)
E8M0, E4M3 = torch.float8_e8m0fnu, torch.float8_e4m3fn


def at(row, column, columns):
    """The byte of a scale, from the text on scaling factors' layouts in cuBLAS's manual."""
    tile = row // 128 * -(-columns // 4) + column // 4
    return 512 * tile + row % 32 * 16 + row % 128 // 32 * 4 + column % 4


@pytest.mark.parametrize("dtype", [E8M0, E4M3])
@pytest.mark.parametrize("size", [(1, 1), (128, 4), (131, 5), (300, 9)])
def test_scales_lie_where_cublas_reads_them(size, dtype):
    rows, columns = size
    least, most = (-127, 128) if dtype is E8M0 else (-9, 9)  # exponents of the format
    factor = torch.randint(least, most, size).double().exp2().float()
    factor[0, 0] = 2.0**least
    found = swizzled(factor, dtype)
    assert found.dtype is dtype
    assert found.numel() == -(-rows // 128) * 128 * -(-columns // 4) * 4
    place = [[at(row, column, columns) for column in range(columns)] for row in range(rows)]
    assert torch.equal(found.float()[torch.tensor(place)], factor)
    assert math.isnan(swizzled(torch.full((1, 1), math.nan), dtype)[0].item())


# A program of its own: the import forbids its process to set math flags.
AS_TORCH = """
import torch
from torch.testing._internal.common_quantized import _bfloat16_to_float4_e2m1fn_x2, to_blocked

from mprun.precision.block_formats import ELEMENTS, encoded
from mprun.precision.block_products import packed, swizzled

powers = torch.randint(0, 255, (300, 9), dtype=torch.int32)
found = swizzled((powers << 23).clamp(min=1 << 22).view(torch.float32), torch.float8_e8m0fnu)
assert torch.equal(to_blocked(powers.to(torch.uint8)), found.view(torch.uint8))
numbers = torch.randn(40, 64).mul_(3).bfloat16()
own = packed(encoded(numbers.float(), ELEMENTS["e2m1"])).view(torch.uint8)
assert torch.equal(own, _bfloat16_to_float4_e2m1fn_x2(numbers).view(torch.uint8))
"""


@pytest.mark.slow
def test_scales_and_codes_lie_where_torch_s_own_tests_put_them():
    subprocess.run([sys.executable, "-c", AS_TORCH], check=True)


# OCP MX 1.0, table of E2M1: sign, two bits of the exponent, one of the mantissa.
FOURS = [sign * own for sign in (1.0, -1.0) for own in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]


def unpacked(pairs):
    """Numbers of E2M1, the first of each byte in its lower half, as torch's kernels read them."""
    bits = pairs.contiguous().view(torch.uint8).long()
    return torch.tensor(FOURS)[torch.stack([bits & 15, bits >> 4], -1).flatten(1)]


def test_two_codes_of_four_bits_share_a_byte():
    every = torch.tensor([FOURS, FOURS[::-1]])
    found = packed(every.to(E4M3))
    assert found.shape == (2, 8) and found.dtype is torch.float4_e2m1fn_x2
    assert found.view(torch.uint8)[0].tolist() == [0x10 + 0x22 * own for own in range(8)]
    assert torch.equal(unpacked(found), every)
    assert torch.equal(unpacked(found).signbit(), every.signbit())


def stand_in(a, b, scale_a, recipe_a, scale_b, recipe_b, swizzle_a, swizzle_b, output_dtype):
    """Return torch's answer for `scaled_mm`, from scales at the places above."""
    kinds, orders = nn.functional.ScalingType, nn.functional.SwizzleType
    assert a.is_contiguous() and b.t().is_contiguous()
    assert recipe_a == recipe_b and swizzle_a == swizzle_b
    tensors = 1.0
    if isinstance(recipe_a, list):
        assert recipe_a == [kinds.BlockWise1x16, kinds.TensorWise]
        assert swizzle_a == [orders.SWIZZLE_32_4_4, orders.NO_SWIZZLE]
        (scale_a, of_a), (scale_b, of_b) = scale_a, scale_b
        assert a.dtype is b.dtype is torch.float4_e2m1fn_x2 and of_a.dtype is torch.float32
        a, b, length, tensors = unpacked(a), unpacked(b.t()).t(), 16, (of_a * of_b).double()
    else:
        assert recipe_a is kinds.BlockWise1x32 and swizzle_a is orders.SWIZZLE_32_4_4
        assert a.dtype is b.dtype is E4M3
        length = 32
    assert a.size(1) % 32 == 0 and b.size(1) % 16 == 0
    wide = []
    for codes, scale in ((a, scale_a), (b.t(), scale_b)):
        assert scale.dtype is (E8M0 if length == 32 else E4M3)
        rows, columns = codes.size(0), codes.size(1) // length
        assert scale.numel() == -(-rows // 128) * 128 * -(-columns // 4) * 4
        place = torch.tensor([[at(i, j, columns) for j in range(columns)] for i in range(rows)])
        wide.append(codes.double() * scale.float()[place].double().repeat_interleave(length, 1))
    return (wide[0] @ wide[1].t() * tensors).to(output_dtype)


@pytest.mark.parametrize("products", [MXFP8, MXFP4, NVFP4], ids=["mxfp8", "mxfp4", "nvfp4"])
def test_the_check_passes_right_products_and_finds_wrong_ones(products, monkeypatch):
    monkeypatch.setattr(nn.functional, "scaled_mm", stand_in)
    for pair in products.plan()[:3]:
        assert difference(*pair, CPU) is None
    monkeypatch.setattr(
        block_products, "swizzled", lambda own, kind: swizzled(own.roll(1, 1), kind)
    )
    assert "of the sum of magnitudes off" in difference(*pair, CPU)
    monkeypatch.setattr(block_products, "swizzled", swizzled)

    def loses(*given, output_dtype):
        return stand_in(*given, output_dtype=output_dtype).nan_to_num()

    monkeypatch.setattr(nn.functional, "scaled_mm", loses)
    assert difference(*pair, CPU) == "its products of codes lose what is not finite"


@pytest.mark.parametrize("products", [MXFP8, MXFP4, NVFP4], ids=["mxfp8", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (33, 100, 47)])
def test_any_size_is_multiplied(sizes, products, monkeypatch):
    """Against products of decoded numbers, up to FP32's rounding of the sum and of the factors."""
    monkeypatch.setattr(nn.functional, "scaled_mm", stand_in)
    n, k, m = sizes
    left, right = torch.randn(n, k).bfloat16(), torch.randn(k, m).bfloat16()
    for pair in products.plan()[:3]:
        a, b = cast(left, pair[0]), cast(right.t(), pair[1]).T
        expected = product(a, b, torch.float32)
        codes = a.values, b.values, a.spread, b.spread
        form = torch.float32, False, 0, a.operand.largest * b.operand.largest, "e2m1 x e2m1", None
        tensors = Product(*codes, a.whole, b.whole, *form).tensors
        found = multiplied_in_blocks(*codes, torch.float32, tensors)
        assert found.is_contiguous()
        magnitudes = (own._replace(values=own.values.float().abs().to(E4M3)) for own in (a, b))
        total = product(*magnitudes, torch.float32)
        assert ((found - expected).abs() <= k * 2.0**-23 * total).all()


ALONE = "BF16 (codes in blocks are multiplied in MXFP8 of E4M3, MXFP4 and NVFP4 alone)"


@pytest.mark.parametrize(
    ("products", "capability", "said"),
    [
        (MXFP8, (9, 0), "BF16 (compute capability 9.0 is not known to multiply codes in blocks)"),
        (MXFP8, (12, 0), "BF16 (compute capability 12.0 is not known"),
        (MXFP8, (10, 0), "codes, by the GPU"),
        (MXFP8, (10, 3), "codes, by the GPU"),
        (HYBRID, (10, 3), ALONE),
        (get_policy("fp8_block").matmul, (10, 0), ALONE),
        (MXFP4, (10, 0), "codes, by the GPU"),
        (NVFP4, (9, 0), "BF16 (compute capability 9.0 is not known to multiply codes in blocks)"),
        (NVFP4, (10, 3), "codes, by the GPU"),
        (get_policy("fp8_rowwise").matmul, (9, 0), "codes, by the GPU"),
    ],
)
def test_what_a_gpu_multiplies(products, capability, said, monkeypatch):
    """The GPU that answers is made; it has passed the check."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(block_products, "difference", lambda *given: None)
    block_products.why_decoded.cache_clear()
    assert said in how_multiplied(products, GPU)
    block_products.why_decoded.cache_clear()
    assert how_multiplied(products, CPU) == "decoded numbers, in FP32 (on a CPU)"
    int8 = get_policy("int8_rowwise").matmul
    assert {how_multiplied(int8, device) for device in (CPU, GPU)} == {"codes, in FP64"}


def test_a_gpu_that_fails_the_check_gets_decoded_numbers(monkeypatch):
    def refuses(*given):
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED\nat ...")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    monkeypatch.setattr(block_products, "difference", refuses)
    block_products.why_decoded.cache_clear()
    assert why_decoded(MXFP8, GPU) == "CUBLAS_STATUS_NOT_SUPPORTED"
    assert not MXFP8.plan(device=GPU).output[0].native
    block_products.why_decoded.cache_clear()
    monkeypatch.setattr(block_products, "difference", lambda *given: None)
    assert MXFP8.plan(device=GPU).output[0].native
    block_products.why_decoded.cache_clear()
    monkeypatch.setattr(torch.version, "hip", "6.4")  # whose numbers mean something else
    assert "10.0 is not known" in why_decoded(MXFP8, GPU)
    block_products.why_decoded.cache_clear()
