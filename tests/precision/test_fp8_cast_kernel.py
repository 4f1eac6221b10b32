"""The kernel that casts to FP8 in both layouts has the bits of torch's operations."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from mprun.precision.scaled_products import ScaledProducts, product, saturated, unobserved_cast

from ..helpers import printed_by

SCRIPT = Path(__file__).with_name("casts_in_interpreter.py")
pytestmark = pytest.mark.skipif(not find_spec("triton"), reason="needs Triton")


@pytest.mark.slow
def test_bits_in_the_interpreter():
    found = printed_by(SCRIPT)
    assert found["compared"] > 5_000_000 and found["different"] == []


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 89, 90, 120])
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_compiled_ahead_of_time(capability, dtype, tmp_path, monkeypatch):
    """Nothing is contracted, and a tile of 16-bit numbers is read by 16 bytes."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from triton import compile as compile_kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from mprun.precision import fp8_cast_triton as kernels

    names = kernels.cast_kernel.arg_names
    for e5m2 in (True, False):
        constants = {"E5M2": e5m2, "ROWS": True, "TURNED": True, "TILE": kernels.TILE}
        constants |= {"column_step": 1}
        signature = dict.fromkeys(names, "i32") | {"matrix": f"*{dtype}", "scale": "*fp32"}
        signature |= {"values": "*u8", "turned": "*u8", "largest": "fp32"}
        signature |= dict.fromkeys(constants, "constexpr")
        wide = {
            (names.index(k),): [["tt.divisibility", 16]] for k in ("matrix", "values", "turned")
        }
        wide |= {
            (names.index(k),): [["tt.divisibility", 16]] for k in ("rows", "columns", "row_step")
        }
        places = {(names.index(key),): value for key, value in constants.items()}
        source = ASTSource(
            fn=kernels.cast_kernel, signature=signature, constexprs=places, attrs=wide
        )
        target = GPUTarget("cuda", capability, 32)
        ptx = compile_kernel(source, target=target, options=dict(kernels.LAUNCH)).asm["ptx"]
        assert "fma.rn.f32" not in ptx and "mul.rn.f32" in ptx.replace("mul.f32", "mul.rn.f32")
        assert "ld.global.v4" in ptx


@pytest.mark.gpu
@pytest.mark.parametrize("granularity", ["tensor", "row"])
def test_casts_and_products_on_a_gpu(granularity):
    operand = ScaledProducts(granularity=granularity).operand("input", "output")
    matrix = torch.randn(130, 80, device="cuda", dtype=torch.bfloat16)
    found = unobserved_cast(matrix, operand)
    again = saturated(matrix, found.factor.reciprocal(), operand.element)
    assert torch.equal(found.values.view(torch.uint8), again.view(torch.uint8))
    assert torch.equal(found.turned.view(torch.uint8), again.view(torch.uint8).t())
    plain = found._replace(turned=None)
    for one, other in ((found, plain), (found.kept, plain)):
        made = product(plain, one.T, torch.bfloat16, fast=True)
        assert torch.equal(made, product(plain, other.T, torch.bfloat16, fast=True))
