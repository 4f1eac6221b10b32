"""Products of codes in blocks. No GPU that has them was here: what cuBLAS reads is tested."""

import math

import pytest
import torch
from torch import nn

from mprun.precision import block_products, get_policy
from mprun.precision.block_products import difference, multiplied_in_blocks, swizzled
from mprun.precision.scaled_products import how_multiplied, why_decoded

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
MXFP8, HYBRID, NVFP4 = (get_policy(m).products for m in ("mxfp8", "mxfp8_hybrid", "nvfp4"))


def at(row, column, columns):
    """The byte of a scale, from the text on scaling factors' layouts in cuBLAS's manual."""
    tile = row // 128 * -(-columns // 4) + column // 4
    return 512 * tile + row % 32 * 16 + row % 128 // 32 * 4 + column % 4


@pytest.mark.parametrize("size", [(1, 1), (128, 4), (131, 5), (300, 9)])
def test_scales_lie_where_cublas_reads_them(size):
    rows, columns = size
    powers = torch.randint(-127, 128, size)
    powers[0, 0] = -127
    found = swizzled(powers.double().exp2().float())
    assert found.numel() == -(-rows // 128) * 128 * -(-columns // 4) * 4
    own = found.view(torch.uint8)
    place = [[at(row, column, columns) for column in range(columns)] for row in range(rows)]
    assert torch.equal(own[torch.tensor(place)].int() - 127, powers.int())
    assert math.isnan(swizzled(torch.full((1, 1), math.nan))[0].item())


@pytest.mark.slow  # the import takes a second
def test_scales_lie_where_torch_s_own_tests_put_them():
    from torch.testing._internal.common_quantized import to_blocked

    powers = torch.randint(0, 255, (300, 9), dtype=torch.int32)
    found = swizzled((powers << 23).clamp(min=1 << 22).view(torch.float32))
    assert torch.equal(to_blocked(powers.to(torch.uint8)), found.view(torch.uint8))


def stand_in(a, b, scale_a, recipe_a, scale_b, recipe_b, swizzle_a, swizzle_b, output_dtype):
    """What torch says of `scaled_mm`, from scales at the places above."""
    assert a.is_contiguous() and b.t().is_contiguous() and a.size(1) % 32 == 0
    wide = []
    for codes, scale in ((a, scale_a), (b.t(), scale_b)):
        rows, columns = codes.size(0), codes.size(1) // 32
        assert scale.numel() == -(-rows // 128) * 128 * -(-columns // 4) * 4
        place = torch.tensor([[at(i, j, columns) for j in range(columns)] for i in range(rows)])
        factor = scale.float()[place].double().repeat_interleave(32, 1)
        wide.append(codes.double() * factor)
    return (wide[0] @ wide[1].t()).to(output_dtype)


def test_the_check_passes_right_products_and_finds_wrong_ones(monkeypatch):
    monkeypatch.setattr(nn.functional, "scaled_mm", stand_in)
    pair = MXFP8.plan().grad_input
    assert difference(*pair, CPU) is None
    monkeypatch.setattr(block_products, "swizzled", lambda own: swizzled(own.roll(1, 1)))
    assert "of the sum of magnitudes off" in difference(*pair, CPU)
    monkeypatch.setattr(block_products, "swizzled", lambda own: swizzled(own.nan_to_num()))
    assert difference(*pair, CPU) == "its products of codes lose what is not finite"


@pytest.mark.parametrize("sizes", [(1, 1, 1), (33, 100, 47)])
def test_any_size_is_multiplied(sizes, monkeypatch):
    monkeypatch.setattr(nn.functional, "scaled_mm", stand_in)
    n, k, m = sizes
    left, right = torch.randint(-8, 9, (n, k)).float(), torch.randint(-8, 9, (k, m)).float()
    ones = [torch.ones(size, 1, -(-k // 32), 32) for size in (n, m)]
    codes = [own.to(torch.float8_e4m3fn) for own in (left, right)]
    found = multiplied_in_blocks(*codes, ones[0], ones[1].permute(2, 3, 0, 1), torch.float32)
    assert torch.equal(found, left @ right) and found.is_contiguous()


@pytest.mark.parametrize(
    ("products", "capability", "said"),
    [
        (MXFP8, (9, 0), "BF16 (compute capability 9.0 is not known to multiply codes in blocks)"),
        (MXFP8, (12, 0), "BF16 (compute capability 12.0 is not known"),
        (MXFP8, (10, 0), "codes, by the GPU"),
        (MXFP8, (10, 3), "codes, by the GPU"),
        (HYBRID, (10, 3), "BF16 (codes in blocks are multiplied in MXFP8 of E4M3 alone)"),
        (NVFP4, (10, 0), "BF16 (codes in blocks are multiplied in MXFP8 of E4M3 alone)"),
        (get_policy("fp8_rowwise").products, (9, 0), "codes, by the GPU"),
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
