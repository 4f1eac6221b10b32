"""Every switch that lowers the precision of products is pinned, read back and restored."""

import pytest
import torch

from mprun.precision import ieee_fp32, pin_math_flags, read_math_flags


@pytest.fixture(autouse=True)
def pinned_afterwards():
    yield
    pin_math_flags("ieee")


def by_torch():
    """The same switches by torch's own names."""
    cuda, cudnn, mkldnn = torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn
    names = [f"allow_{half}_reduced_precision_reduction" for half in ("fp16", "bf16")]
    names += ["fp32_precision", "allow_fp16_accumulation"]
    return {
        **{f"cuda.matmul.{name}": getattr(cuda.matmul, name) for name in names},
        "cudnn.conv.fp32_precision": cudnn.conv.fp32_precision,
        "cudnn.rnn.fp32_precision": cudnn.rnn.fp32_precision,
        "mkldnn.matmul.fp32_precision": mkldnn.matmul.fp32_precision,
        "mkldnn.conv.fp32_precision": mkldnn.conv.fp32_precision,
        "mkldnn.rnn.fp32_precision": mkldnn.rnn.fp32_precision,
        "cudnn.benchmark": cudnn.benchmark,
        "cudnn.deterministic": cudnn.deterministic,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
    }


def raise_every_flag():
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    cuda.matmul.fp32_precision = cudnn.conv.fp32_precision = cudnn.rnn.fp32_precision = "tf32"
    cuda.matmul.allow_fp16_reduced_precision_reduction = True
    cuda.matmul.allow_bf16_reduced_precision_reduction = True
    cuda.matmul.allow_fp16_accumulation = True
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("math", ["ieee", "tf32"])
def test_pins_and_reads_every_flag(math, deterministic):
    raise_every_flag()
    pin_math_flags(math, deterministic)
    expected = dict.fromkeys(by_torch(), False)
    for name in ("cuda.matmul", "cudnn.conv", "cudnn.rnn"):
        expected[f"{name}.fp32_precision"] = math
    for name in ("mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn"):
        expected[f"{name}.fp32_precision"] = "ieee"
    expected["cudnn.benchmark"] = not deterministic
    expected["cudnn.deterministic"] = expected["deterministic_algorithms"] = deterministic
    assert read_math_flags() == by_torch() == expected
    # torch.compile asks for the older switches, and torch raises where they say something else.
    assert torch.backends.cuda.matmul.allow_tf32 is (math == "tf32")
    assert torch.backends.cudnn.allow_tf32 is (math == "tf32")
    assert torch.get_float32_matmul_precision() == ("high" if math == "tf32" else "highest")


def test_reads_flags_that_it_did_not_set():
    raise_every_flag()
    flags = read_math_flags()
    assert flags == by_torch()
    assert flags["cudnn.rnn.fp32_precision"] == "tf32"
    assert flags["mkldnn.matmul.fp32_precision"] == "bf16"


def test_evaluation_block_is_full_fp32_and_restores_also_after_an_exception():
    pin_math_flags("tf32")
    before = read_math_flags()
    with pytest.raises(RuntimeError, match="inside"), ieee_fp32():
        inside = read_math_flags()
        raise RuntimeError("inside")
    assert all(v == "ieee" for k, v in inside.items() if k.endswith("fp32_precision"))
    assert read_math_flags() == before
    assert before["cudnn.conv.fp32_precision"] == "tf32"
