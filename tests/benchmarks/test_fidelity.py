"""Distances in ulp by hand, rounding against numpy, and the emulation against its references."""

import itertools
import json
import math

import numpy as np
import pytest
import torch

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
INF, NAN = float("inf"), float("nan")
F64 = torch.float64
# Half a step is at most this part of a normal number. Errors of the FP32 sums add far below 1 %.
ONE_ROUNDING = {F16: 1.01 * 2.0**-11, BF16: 1.01 * 2.0**-8}


@pytest.fixture
def ulp(module):
    return module("fidelity.ulp")


@pytest.fixture
def comparison(module):
    return module("fidelity.comparison")


@pytest.fixture
def operations(module):
    return module("fidelity.operations").operations(full=False)


@pytest.mark.parametrize(
    "dtype, a, b, expected",
    [
        (F16, 1.0, 1.0, 0),
        (F16, 0.0, -0.0, 0),
        (F16, 1.0, 1.0 + 2.0**-10, 1),
        (F16, 1.0, 1.0 - 2.0**-11, 1),  # the step is half as wide below a power of two
        (F16, 1.0, 2.0, 1024),
        (F16, 0.0, 2.0**-24, 1),  # the smallest subnormal number
        (F16, -(2.0**-24), 2.0**-24, 2),
        (F16, 0.0, 2.0**-14, 1024),  # the smallest normal number is the 1024th
        (F16, 65504.0, INF, 1),
        (F16, -INF, INF, 2 * 31 * 1024),  # 31 exponents of 1024 values on each side
        (F16, NAN, NAN, 0),
        (F16, NAN, 1.0, -1),
        (F16, INF, NAN, -1),
        (BF16, 1.0, 1.0 + 2.0**-7, 1),
        (BF16, 0.0, 2.0**-133, 1),
        (BF16, 0.0, INF, 255 * 128),
        (F32, 1.0, 1.0 + 2.0**-23, 1),
        (F32, -(2.0**-149), 2.0**-149, 2),
    ],
)
def test_distances_by_hand(ulp, dtype, a, b, expected):
    a, b = (torch.tensor([value], dtype=dtype) for value in (a, b))
    assert ulp.ulp_distance(a, b).tolist() == [expected]
    assert ulp.ulp_distance(b, a).tolist() == [expected]


def test_every_float16_is_one_step_from_its_neighbour(ulp):
    """All 2 * 31744 finite values and infinities in order, by numpy's own nextafter."""
    values, end = [np.float16(-np.inf)], np.float16(np.inf)
    with np.errstate(over="ignore"):
        while values[-1] < end:
            values.append(np.nextafter(values[-1], end))
    ordered = torch.from_numpy(np.array(values))
    assert ulp.ulp_distance(ordered[1:], ordered[:-1]).eq(1).all()
    assert len(values) == 2 * 31 * 1024 + 1


def test_what_a_distance_counts(ulp):
    a = torch.tensor([1.0, 0.0, NAN, NAN, 2.0, 65504.0], dtype=F16)
    b = torch.tensor([1.0, -0.0, NAN, 1.0, 2.0 + 2.0**-8, INF], dtype=F16)
    found = ulp.distance(a, b)
    # 2 + 2^-8 is two steps of 2^-9 above 2.
    assert (found.elements, found.equal, found.within_one) == (6, 2, 4)
    assert (found.max_ulp, found.one_sided_nan) == (2, 1)
    other_payload = torch.tensor([0x7E00, 0x7E01], dtype=torch.int16).view(F16)
    assert ulp.distance(other_payload[:1], other_payload[1:]).equal == 1
    assert ulp.distance(a[:0], b[:0]).max_ulp == 0
    # Strides are of the layout, not of the value.
    square = torch.arange(6.0).half().view(2, 3)
    assert ulp.distance(square.t(), square.t().contiguous()).equal == 6


def test_distances_that_have_no_meaning_are_refused(ulp):
    one = {dtype: torch.ones(1, dtype=dtype) for dtype in (F16, BF16, F64)}
    for measure, a, b, named in (
        (ulp.ulp_distance, one[F64], one[F64], "float64"),
        (ulp.ulp_distance, one[F16], one[BF16], "ulp distance of"),
        (ulp.distance, one[F16], torch.ones(2, dtype=F16), "shapes"),
    ):
        with pytest.raises(ValueError, match=named):
            measure(a, b)


def test_rounding_is_done_once(ulp):
    tie = 1 + 2.0**-11
    values = torch.tensor([tie, tie + 2.0**-40, tie - 2.0**-40, -tie - 2.0**-40], dtype=F64)
    # A tie goes to even, what is above it goes up; by way of float32 all of these are the tie.
    assert ulp.correctly_rounded(values, F16).tolist() == [1, 1 + 2.0**-10, 1, -1 - 2.0**-10]
    assert values.to(F16).tolist() == [1, 1, 1, -1]
    subnormal = torch.tensor([2.0**-25, 2.0**-25 * (1 + 2.0**-40), 1e-300], dtype=F64)
    assert ulp.correctly_rounded(subnormal, F16).tolist() == [0, 2.0**-24, 0]
    large = torch.tensor([65519.99, 65520.0, 1e300, INF, -INF], dtype=F64)
    assert ulp.correctly_rounded(large, F16).tolist() == [65504, INF, INF, INF, -INF]
    assert ulp.correctly_rounded(torch.tensor([NAN], dtype=F64), F16).isnan().all()
    above = torch.tensor([1 + 2.0**-8 + 2.0**-50], dtype=F64)
    assert ulp.correctly_rounded(above, BF16) == 1 + 2.0**-7


def test_rounding_agrees_with_numpy_on_random_values(ulp):
    """numpy rounds float64 to float16 directly."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(20_000, generator=generator, dtype=F64)
    values *= 2.0 ** torch.randint(-30, 20, (20_000,), generator=generator).double()
    # Values beside ties, which are what a second rounding gets wrong.
    halves = values.half().double()
    ties = halves + 2.0 ** (torch.frexp(halves).exponent - 12) * (1 + 2.0**-45)
    for given in (values, ties):
        with np.errstate(over="ignore"):
            expected = torch.from_numpy(given.numpy().astype(np.float16))
        assert ulp.distance(ulp.correctly_rounded(given, F16), expected).equal == len(given)


def test_relative_errors(ulp):
    exact = torch.tensor([3.0, 4.0, INF], dtype=F64)
    assert ulp.relative_error(torch.tensor([3.0, 4.5, 0.0], dtype=F16), exact) == 0.1
    assert math.isnan(ulp.relative_error(torch.zeros(1, dtype=F16), torch.zeros(1, dtype=F64)))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_products_are_rounded_once(comparison, operations, dtype):
    """Emulated products against float64: the error of a single rounding, sums in FP32 added."""
    products = ("linear", "matmul", "bmm", "conv", "embedding")
    rows = [
        row
        for operation in operations
        if operation.name.startswith(products)
        for row in comparison.compare(operation, dtype, "normal", "float64")
    ]
    assert {row.result for row in rows} >= {"output", "grad x", "grad weight", "grad bias"}
    for row in rows:
        assert row.emulation_error < ONE_ROUNDING[dtype], row
        # 64-bit sums round to another neighbour where the FP32 sum lies beside a tie. On small
        # tensors one element is a large share.
        elements = row.emulation.elements
        assert elements - row.emulation.equal <= 0.01 * elements + 1, row
        assert row.reference is None and row.between == row.emulation


def test_native_and_emulated_agree_where_nothing_is_rerouted(comparison, operations):
    chosen = [one for one in operations if one.name in ("relu", "max_pool 3x3 s2")]
    for operation, magnitude in itertools.product(chosen, comparison.MAGNITUDES):
        for row in comparison.compare(operation, F16, magnitude, "native"):
            if operation.name == "relu" or row.result == "output":
                assert row.between.equal == row.between.elements, row


def test_native_half_sums_are_told_from_emulated_ones(comparison, operations):
    """4 rows hit 2048 times each: FP16 sums of the native CPU kernel lose what FP32 sums keep."""
    (many,) = (o for o in operations if o.size == "8192 hits on 4 rows")
    rows = {row.result: row for row in comparison.compare(many, F16, "normal", "native")}
    gradient = rows["grad x"]
    assert gradient.emulation.equal == gradient.emulation.elements
    assert gradient.reference_error > 4 * gradient.emulation_error
    assert gradient.between.equal < gradient.between.elements
    assert rows["output"].between.equal == rows["output"].between.elements


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_magnitudes_reach_both_ends_of_the_format(comparison, operations, dtype):
    (linear,) = (o for o in operations if o.name == "linear" and o.size.startswith("64x"))
    small, large = (
        comparison._inputs(linear, dtype, f"{name} inputs", torch.Generator().manual_seed(0))
        for name in ("small", "large")
    )
    smallest = torch.finfo(dtype).tiny
    assert small["x"].abs().max() < smallest and small["x"].count_nonzero() > 0
    assert small["weight"].abs().max() > smallest
    assert large["x"].isfinite().all()
    assert large["x"].abs().max() > torch.finfo(dtype).max / 2**8


def test_the_command_writes_both_forms(module, tmp_path, capsys):
    half_fidelity = module("half_fidelity")
    files = [f"--json={tmp_path / 'f.json'}", f"--markdown={tmp_path / 'f.md'}"]
    chosen = ["--only=relu", "--dtype=float16", "--reference=native"]
    assert half_fidelity.main([*chosen, *files]) == 0
    record = json.loads((tmp_path / "f.json").read_text())
    # Two kinds of ReLU, output and gradient, five magnitudes.
    assert len(record["rows"]) == 2 * 2 * 5
    assert record["flags"]["cuda.matmul.allow_fp16_reduced_precision_reduction"] is False
    text = (tmp_path / "f.md").read_text()
    assert text == capsys.readouterr().out
    assert "| leaky_relu 0.2 | grad x | 4096     | 100 %" in text
    assert half_fidelity.main(["--only=no such operation", "--reference=native"]) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CUDA reference is there")
def test_without_a_gpu_its_reference_is_refused(module, capsys):
    assert module("half_fidelity").main(["--reference=cuda"]) == 2
    assert "native or float64" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_cuda_products_are_rounded_once_too(comparison, operations, dtype):
    """Twice a single rounding is allowed: what CUDA rounds inside a kernel is not documented."""
    from mprun.precision import pin_math_flags

    pin_math_flags("ieee")
    for operation in operations:
        if operation.name in ("linear", "matmul", "bmm", "conv 3x3"):
            for row in comparison.compare(operation, dtype, "normal", "cuda"):
                assert row.reference_error < 2 * ONE_ROUNDING[dtype], row
                assert row.between.one_sided_nan == 0, row
