"""The Triton kernels in Triton's interpreter, which needs no GPU, and what happens without one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from mprun.precision import MixedPrecisionOptimizer  # noqa: E402
from mprun.precision.update_choice import why_not_on  # noqa: E402

SCRIPT = Path(__file__).with_name("kernels_in_interpreter.py")


@pytest.mark.slow
def test_all_of_them():
    """In a process of its own: Triton decides at the first import whether it interprets."""
    paths = os.pathsep.join([str(SCRIPT.parents[2]), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, str(SCRIPT)],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"PYTHONPATH": paths},
    )
    assert run.returncode == 0, run.stderr
    outcomes = json.loads(run.stdout.splitlines()[-1])
    failed = {label: text for label, text in outcomes.items() if text is not None}
    assert not failed, "\n".join(f"{label}:\n{text}" for label, text in failed.items())
    assert len(outcomes) == 28


def test_a_kernel_that_does_not_run_is_a_reason_not_an_error():
    """Without the interpreter Triton cannot work on tensors of a CPU."""
    reason = why_not_on(MixedPrecisionOptimizer, torch.device("cpu"), "sgd")
    assert "Triton kernel does not run here" in reason and "\n" not in reason
