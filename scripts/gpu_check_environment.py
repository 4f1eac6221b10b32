"""Write the machine as JSON to the named file: versions, commit, pinned flags, GPU and driver."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from mprun.precision import pin_math_flags, read_math_flags
from mprun.recording.environment import environment

_QUERY = "name,driver_version,memory.total,clocks.sm,clocks.max.sm,power.limit,persistence_mode"

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
facts = environment(device)
facts["commit"] = os.environ.get("MPRUN_COMMIT") or facts["commit"] or "unknown"
pin_math_flags("ieee")
facts["flags"] = read_math_flags()
if shutil.which("nvidia-smi"):
    asked = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"]
    answer = subprocess.run(asked, capture_output=True, text=True, timeout=20)
    facts["nvidia-smi"] = answer.stdout.strip() or answer.stderr.strip()
Path(sys.argv[1]).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
