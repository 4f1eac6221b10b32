"""Formats in blocks on CUDA: launches of a cast; codes multiplied by a GPU that has them."""

import sys

import pytest

from .cells import MODELS
from .conftest import Device

CASTS = """
from mprun.precision import get_policy
from mprun.precision.philox import micro_batches
from mprun.precision.scaled_products import cast

operand = get_policy("{mode}").matmul.operand("{name}", "grad_input", "a")
matrix = torch.ones(130, 70, device="cuda", dtype=torch.bfloat16)
micro_batches.begin_step(matrix.device, 0, 0)
for dim in (-1, 0):
    for _ in range({times}):
        made = cast(matrix, operand, dim)
return {{"dtype": str(made.values.dtype)}}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "name", "launches"),
    [("mxfp8", "weight", 1), ("nvfp4", "weight", 2), ("nvfp4", "grad_output", 2)],
)
def test_a_cast_to_decoded_numbers_is_one_launch(script, mode, name, launches):
    """Two, where amax of the tensor comes first."""
    few, more = (script(CASTS.format(mode=mode, name=name, times=times)) for times in (1, 11))
    assert more["dtype"] == "torch.bfloat16"
    count = {key: more["counts"][key] - few["counts"][key] for key in few["counts"]}
    assert count["launches"] + count["driver_launches"] == 20 * launches, count


PRODUCTS = """
from mprun.precision import get_policy
from mprun.precision.scaled_products import cast, product

left, right = get_policy("{mode}").matmul.plan(device=torch.device("cuda", 0)).output
matrix = torch.ones(128, 70, device="cuda", dtype=torch.bfloat16)
a, b = cast(matrix, left), cast(matrix, right).T
for _ in range({times}):
    product(a, b, torch.bfloat16)
return {{"native": left.native}}
"""


@pytest.fixture
def blackwell(device, monkeypatch):
    monkeypatch.setenv("FAKE_CUDA_CAPABILITY", "100")
    found = Device(device.folder, sys.executable)
    yield found
    found.close()


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "launches"), [("mxfp8", 2), ("nvfp4", 6)])
def test_codes_are_laid_out_in_one_launch_each(script, blackwell, mode, launches):
    """Four more compute the factor of the tensors. The first program of three runs the check."""
    programs = [PRODUCTS.format(mode=mode, times=times) for times in (1, 1, 11)]
    _, few, more = [script(program, blackwell) for program in programs]
    assert more["native"]
    count = {key: more["counts"][key] - few["counts"][key] for key in few["counts"]}
    assert count["launches"] + count["driver_launches"] == 10 * launches, count
    assert count["library_calls"] == 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "element"), [("mxfp8", "e4m3"), ("mxfp4", "e2m1"), ("nvfp4", "e2m1")]
)
def test_codes_are_multiplied_by_a_gpu_that_has_them(blackwell, tmp_path, mode, element):
    """torch takes sizes, layouts and scales; what comes out, no fake device tells."""
    words = [*MODELS["gpt"], f"precision={mode}", "train.steps=3"]
    precision = blackwell.record(tmp_path / "run", words)["precision"]
    assert precision["linear_products"] == "codes, by the GPU"
    assert f"native-{element}" in precision["half_products"]
