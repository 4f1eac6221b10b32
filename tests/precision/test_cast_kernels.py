"""The kernels that cast in blocks and lay codes out have the bits of torch's operations."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from mprun.precision.fp8_casts import saturated
from mprun.precision.scaled_products import ScaledProducts, product, unobserved_cast

from ..helpers import printed_by

pytestmark = pytest.mark.skipif(not find_spec("triton"), reason="needs Triton")


@pytest.mark.slow
def test_bits_in_the_interpreter():
    found = printed_by(Path(__file__).with_name("block_casts_in_interpreter.py"))
    assert found["compared"] > 4_000_000 and found["laid out"] > 2_000_000
    assert found["different"] == []


# Operands of the shipped modes: block, scale, stochastic, what is written.
FORMS = {
    "mxfp8": ((1, 32), "e8m0", False, "bf16"),
    "its codes, along the other dimension": ((32, 1), "e8m0", False, "codes"),
    "nvfp4": ((16, 16), "e4m3", False, "bf16"),
    "its gradients": ((1, 16), "e4m3", True, "bf16"),
    "fp8_block": ((128, 128), "pow2", False, "bf16"),
    "in FP32": ((1, 128), "fp32", False, "fp32"),
}


def compiled(form, held, capability):
    from mprun.precision.cast_kernels_triton import cast_kernel, launch_of

    block, scale, stochastic, out = form
    constants, options = launch_of(block)
    constants |= {"SCALE": scale, "ROUNDING": "rceil", "TOP": 6.0, "EMIN": 0, "EMAX": 2}
    constants |= {"MANTISSA": 1, "STOCHASTIC": stochastic, "OUT": out, "column_step": 1}
    kinds = {"matrix": f"*{held}", "number": "*i64", "whole": "*fp32", "factors": "*fp32"}
    kinds |= dict.fromkeys(("seed", "first", "stream"), "i64")
    kinds["values"] = {"codes": "*u8", "bf16": "*u16", "fp32": "*fp32"}[out]
    aligned = ["rows", "columns", "row_step"]
    return ptx_of(cast_kernel, constants, kinds, aligned, capability, options)


def ptx_of(kernel, constants, kinds, aligned, capability, options):
    """Compile for a GPU that is not there. aligned: numbers that 16 divides, beside pointers."""
    from triton import compile as compile_kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = dict.fromkeys(names, "i32") | kinds
    aligned = [*aligned, *(name for name, kind in kinds.items() if kind.startswith("*"))]
    source = ASTSource(
        fn=kernel,
        signature=signature | dict.fromkeys(constants, "constexpr"),
        constexprs={(names.index(key),): value for key, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    target = GPUTarget("cuda", capability, 32)
    return compile_kernel(source, target=target, options=dict(options)).asm["ptx"]


@pytest.mark.slow
@pytest.mark.parametrize("capability", (80, 86, 89, 90, 100, 120))
@pytest.mark.parametrize("name", FORMS)
def test_compiled_ahead_of_time(capability, name, tmp_path, monkeypatch):
    """Nothing is contracted or approximate, and rows are read by 16 bytes."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    ptx = compiled(FORMS[name], "fp32" if name == "in FP32" else "u16", capability)
    assert not re.search(r"\bfma\.\w+\.f32|\.ftz|\.approx|div\.full|\batom|\bred\.", ptx)
    assert re.search(r"ld\.global[.\w:]*\.v4", ptx)


@pytest.mark.slow
@pytest.mark.parametrize("capability", (100, 103, 120))
@pytest.mark.parametrize("block", (16, 32))
def test_layouts_compiled_ahead_of_time(capability, block, tmp_path, monkeypatch):
    """Codes by rows are read and written by 16 bytes."""
    from mprun.precision.cast_kernels_triton import LAUNCH, lay_out_kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kinds = {"codes": "*u8", "factors": "*fp32", "values": "*u8", "scales": "*u8"}
    constants = {"BLOCK": block, "column_step": 1, "group": 1, "factor_block": 1}
    aligned = ["rows", "length", "row_step", "padded_rows", "width"]
    ptx = ptx_of(lay_out_kernel, constants, kinds, aligned, capability, LAUNCH)
    assert re.search(r"st\.global[.\w:]*\.v4", ptx)


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


@pytest.mark.gpu
@pytest.mark.parametrize("granularity", ["tensor", "row"])
def test_casts_on_a_gpu_have_the_bits_of_a_cpu(granularity):
    operand = ScaledProducts(granularity=granularity).operand("input", "output")
    matrix = torch.randn(130, 80, dtype=torch.bfloat16)
    here, there = unobserved_cast(matrix, operand), unobserved_cast(matrix.cuda(), operand)
    assert torch.equal(there.values.cpu().view(torch.uint8), here.values.view(torch.uint8))
    assert torch.equal(there.factor.cpu(), here.factor)
