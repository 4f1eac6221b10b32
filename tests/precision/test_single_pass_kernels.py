"""The Triton kernels in Triton's interpreter, which needs no GPU, and what happens without one."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from mprun.precision import MixedPrecisionOptimizer  # noqa: E402
from mprun.precision.update_choice import why_not_on  # noqa: E402

from ..helpers import printed_by  # noqa: E402

SCRIPT = Path(__file__).with_name("kernels_in_interpreter.py")


@pytest.mark.slow
def test_all_of_them():
    outcomes = printed_by(SCRIPT)
    failed = {label: text for label, text in outcomes.items() if text is not None}
    assert not failed, "\n".join(f"{label}:\n{text}" for label, text in failed.items())
    assert len(outcomes) == 28


def test_a_kernel_that_does_not_run_is_a_reason_not_an_error():
    """Without the interpreter Triton cannot work on tensors of a CPU."""
    reason = why_not_on(MixedPrecisionOptimizer, torch.device("cpu"), "sgd")
    assert "Triton kernel does not run here" in reason and "\n" not in reason
