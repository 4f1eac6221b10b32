"""The environment of a run: versions, commit and machine; its dtypes and update paths."""

import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mprun import __version__
from mprun.numerics.state import Learner
from mprun.precision import ForwardContext, read_math_flags
from mprun.precision.optimizer import elements_by_dtype

_PACKAGES = ("torch", "torchvision", "hydra-core", "omegaconf", "tensorboard", "numpy")


def environment(device: torch.device) -> dict:
    """Return versions, source commit and machine as plain values."""
    return {
        "mprun": __version__,
        **_commit(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": device.type,
        **(_cuda(device) if device.type == "cuda" else {}),
    }


def number_formats(
    learners: Mapping[str, Learner], forward_context: ForwardContext, scaler: str
) -> dict[str, Any]:
    """Return the mode's effect on this device, for `precision` of run.json."""
    return {
        "scaler": scaler,
        "half_products": forward_context.kind(),
        "effective_dtypes": _effective_dtypes(learners),
        "update": updates(learners),
        "flags": read_math_flags(),
    }


def _effective_dtypes(learners: Mapping[str, Learner]) -> dict:
    """Count the elements of each dtype in parameters, masters and optimizer state, by learner."""
    return {
        name: {
            "parameters": _count(learner.model.parameters()),
            "gradients": learner.optimizer.gradient_dtypes(),
            "gradients_in_update": learner.optimizer.update_dtypes(),
            "master_weights": _count(learner.optimizer.masters.values()),
            "optimizer_state": _count(
                value
                for state in learner.optimizer.state_by_name().values()
                for value in state.values()
                if isinstance(value, Tensor) and value.dim()
            ),
            "norm_statistics": _count(b for b in learner.model.buffers() if b.dim()),
        }
        for name, learner in learners.items()
    }


def updates(learners: Mapping[str, Learner]) -> dict:
    """Return each learner's update path, and the reason for it."""
    return {
        name: {"path": learner.optimizer.update_path, "reason": learner.optimizer.update_reason}
        for name, learner in learners.items()
    }


def _count(tensors: Iterable[Tensor]) -> dict[str, int]:
    return elements_by_dtype((tensor.dtype, tensor.numel()) for tensor in tensors)


def _commit() -> dict:
    """Return commit and dirty flag of the checkout that the code runs from, None if installed."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return {"commit": None, "dirty": None}

    def git(*words: str) -> str:
        command = ["git", "-C", str(root), *words]
        return subprocess.check_output(
            command, stderr=subprocess.PIPE, text=True, timeout=10
        ).strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "dirty": None}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def _cuda(device: torch.device) -> dict:
    major, minor = torch.cuda.get_device_capability(device)
    return {
        "gpu": torch.cuda.get_device_name(device),
        "compute_capability": f"{major}.{minor}",
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }
