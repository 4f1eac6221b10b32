"""Real runs whose right verdict is known beforehand (benchmarks/known_truths.py), in full."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "known_truths.py"


@pytest.mark.slow
def test_no_truth_is_broken(tmp_path):
    command = [sys.executable, str(SCRIPT), str(tmp_path / "runs")]
    ended = subprocess.run(command, capture_output=True, text=True)
    lines = ended.stdout.splitlines()
    assert ended.returncode == 0 and len(lines) == 7, ended.stdout + ended.stderr
    assert all(line.startswith("ok ") for line in lines)
    said = {line.split(":")[0].removeprefix("ok").strip(): line for line in lines}
    # Correct modes at equal seeds are decided; a planted defect is never passed.
    assert ": matches:" in said["fp16_master_scaled"] and ": matches:" in said["amp"]
    assert ": diverged:" in said["masters_not_copied"]
