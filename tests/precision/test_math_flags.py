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


def by_older_switches():
    """Older code reads these; torch raises where a switch and a flag disagree."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return cuda.matmul.allow_tf32, cudnn.allow_tf32, torch.get_float32_matmul_precision()


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
    # As torch.compile asks for them.
    older = (True, True, "high") if math == "tf32" else (False, False, "highest")
    assert by_older_switches() == older


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
        inside, older = read_math_flags(), by_older_switches()
        raise RuntimeError("inside")
    assert all(v == "ieee" for k, v in inside.items() if k.endswith("fp32_precision"))
    assert older == (False, False, "highest")
    assert read_math_flags() == before
    assert before["cudnn.conv.fp32_precision"] == "tf32"
    assert by_older_switches() == (True, True, "high")


def test_evaluation_block_returns_to_what_a_script_has_set():
    pin_math_flags("tf32")
    torch.set_float32_matmul_precision("medium")  # which is "bf16" on a CPU
    before = read_math_flags()
    with ieee_fp32():
        assert by_older_switches() == (False, False, "highest")
    assert (read_math_flags(), by_older_switches()) == (before, (True, True, "medium"))
    torch.backends.cuda.matmul.fp32_precision = "ieee"  # torch's readers raise from here on
    before = read_math_flags()
    with ieee_fp32():
        assert by_older_switches() == (False, False, "highest")
    assert read_math_flags() == before
