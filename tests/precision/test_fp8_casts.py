"""Casts by Inductor have the bits of torch's operations, which cast where nothing compiles."""

import pytest
import torch

from mprun.precision import get_policy
from mprun.precision.block_formats import cast_blocks, filled, turn
from mprun.precision.fp8_casts import CompiledCast, Form, by_operations
from mprun.precision.scaled_operators import multiplied_on_cuda

from .operations import Operations
from .test_scaled_products import skip_without_rows

pytestmark = pytest.mark.filterwarnings("ignore:.*TRITON_DEFAULT_FP_FUSION")


def matrices(dtype):
    """Yield matrices with rows of zeros, of very small and very large numbers, and of ties."""
    draw = torch.Generator().manual_seed(0)
    for n, k in ((64, 96), (37, 71)):
        made = torch.randn(n, k, generator=draw) * (4 * torch.randn(n, k, generator=draw)).exp2()
        made[1] *= 1e-30
        made[2] = 0.0
        made[3] *= 1e30
        # Times 448 / 448, halfway between two numbers of E4M3 and of E5M2.
        made[4:12] = (torch.arange(k) * 2 + 1) * 2.0 ** torch.arange(-13, 3, 2)[:, None]
        made[4:12, 0] = 448.0
        # Of all sizes at once, and of no more than one.
        yield made.to(dtype)
        yield made.roll(5, 0).clamp(-1e3, 1e3).to(dtype)


def differences(found, expected):
    """How many bytes differ."""
    bits = [[part.flatten().view(torch.uint8) for part in side] for side in (found, expected)]
    return sum(int((one != other).sum()) for one, other in zip(*bits, strict=True))


FORMS = [
    Form(element, scale, dim, True, True)
    for scale, dim in (("fp32", None), ("fp32", -1), ("pow2", -1), ("pow2", 0), ("none", None))
    for element in ("e4m3", "e5m2")
]
BLOCKS = {}
for _mode in ("mxfp8", "mxfp8_floor", "mxfp8_hybrid", "mxfp4", "fp8_block"):
    for _name in ("input", "grad_output"):
        _own = get_policy(_mode).matmul.operand(_name, "output")
        for _block in (_own.block, _own.block[::-1]):
            _how = _own.element.name, *_block, _own.scale, _own.scale_rounding, 0
            BLOCKS |= dict.fromkeys((*_how, dtype) for dtype in (None, _own.decoded_to))


def casts(matrix, forms):
    """The tensors of each cast: one graph for several, as a C++ compiler takes seconds for any."""
    return [by_operations(matrix, own) if own in FORMS else cast_blocks(matrix, *own)
            for own in forms]  # fmt: skip


# Inductor's C++ does not compile where two formats share a largest magnitude of columns in BF16.
GROUPS = [[form for form in FORMS if form.element == name] for name in ("e4m3", "e5m2")]
GROUPS += [[*BLOCKS][start : start + 7] for start in (0, 7, 14)]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("group", range(len(GROUPS)))
def test_inductor_has_the_bits_of_operations(group, dtype):
    torch._dynamo.reset()  # it compiles a function eight times in a process
    compiled, compared = torch.compile(casts, dynamic=False, fullgraph=True), 0
    for matrix in matrices(dtype):
        found, expected = (cast(matrix, GROUPS[group]) for cast in (compiled, casts))
        for form, *parts in zip(GROUPS[group], found, expected, strict=True):
            assert differences(*parts) == 0, form
            compared += parts[0][0].numel()
    assert compared > 80_000


@pytest.mark.slow
def test_where_nothing_compiles_operations_cast_and_one_warning_says_so(monkeypatch, tmp_path):
    from torch._inductor.config import patch

    monkeypatch.setattr(CompiledCast, "has_told", False)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    matrix, says = next(matrices(torch.bfloat16)), "casts to FP8 are not compiled here.*: .*ompiler"
    nowhere = patch({"cpp.cxx": (str(tmp_path / "no compiler"),)})
    with nowhere, pytest.warns(UserWarning, match=says) as told:
        found = [CompiledCast(form)(matrix) for form in FORMS[:2]]
    assert len(told) == 1
    for form, parts in zip(FORMS, found, strict=False):
        assert differences(parts, by_operations(matrix, form)) == 0


@pytest.mark.parametrize("by_row", [False, True])
def test_nothing_is_padded_by_nothing(by_row):
    """cuBLAS takes multiples of 16; torch's kernel for a CPU stands in for it."""
    skip_without_rows(by_row)
    a, b = (torch.ones(32, 48).to(torch.float8_e4m3fn) for _ in range(2))
    factors = (torch.ones(32, 1), torch.ones(1, 32)) if by_row else (torch.ones(()),) * 2
    form = None, None, torch.bfloat16, True, 0, 0.0, "e4m3 x e4m3", None
    with Operations() as seen:
        multiplied_on_cuda(a, b.t(), *factors, *form)
        turn(torch.ones(32, 32), -1)
        turn(torch.ones(32, 32), 0)
        matrix = torch.ones(3, 3)
        assert filled(matrix, 0, 0) is matrix
    assert not {"constant_pad_nd", "clone", "copy_", "cat"} & {*seen.names}
    assert filled(matrix, 1, 2, 7.0).tolist()[-1] == [7.0] * 5
