"""The environment of a run: versions, commit and machine; its dtypes and update paths."""

import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mprun import __version__
from mprun.numerics.state import Learner
from mprun.precision import ForwardContext, read_math_flags
from mprun.precision.scaled_products import how_multiplied
from mprun.precision.torch_update import path_of
from mprun.precision.update import elements_by_dtype

_PACKAGES = ("torch", "torchvision", "hydra-core", "omegaconf", "tensorboard", "numpy")


def environment(device: torch.device) -> dict:
    """Return versions, source commit and machine as plain values."""
    gpu = {}
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        gpu = {
            "gpu": torch.cuda.get_device_name(device),
            "compute_capability": f"{major}.{minor}",
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
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
        **gpu,
    }


def number_formats(
    learners: Mapping[str, Learner], forward_context: ForwardContext, scaler: str
) -> dict[str, Any]:
    """Return the mode's effect on this device, for `precision` of run.json."""
    return {
        "scaler": scaler,
        "half_products": forward_context.kind(),
        "linear_products": linear_products(forward_context),
        "effective_dtypes": {name: _elements(learner) for name, learner in learners.items()},
        "update": {
            name: {"path": path_of(learner.steps.optimizer)} for name, learner in learners.items()
        },
        "flags": read_math_flags(),
    }


def linear_products(forward_context: ForwardContext) -> str | None:
    """Say what linear layers in 8 bits or fewer multiply on this device; None: there are none."""
    products = forward_context.policy.matmul
    return None if products is None else how_multiplied(products, forward_context.device)


def _elements(learner: Learner) -> dict[str, dict[str, int]]:
    """Count the elements of each dtype in which the model computes with its parameters, and makes
    their gradients, in the update, in master weights (FP32 where it computes in 16 bits) and in
    the optimizer's state; of shards the state is this rank's."""
    steps, buffers = learner.steps, learner.model.buffers()
    states = steps.state_by_name().values()
    tensors = (v for state in states for v in state.values() if isinstance(v, Tensor) and v.dim())
    inside = {id(own): dtype for own, dtype in steps.computed()}
    wanted = steps.models[0].grad_dtype  # in which gradients are unscaled; None: that of `.grad`
    parameters = [(inside.get(id(p), p.dtype), p.numel()) for p in learner.model.parameters()]
    pairs = [(own, inside[id(own)]) for own in steps.named().values()]
    return {
        "parameters": elements_by_dtype(parameters),
        "gradients": elements_by_dtype((dtype, own.numel()) for own, dtype in pairs),
        "gradients_in_update": elements_by_dtype(
            (wanted or own.grad_dtype or torch.float32, own.numel()) for own, _ in pairs
        ),
        "master_weights": _count(own for own, dtype in pairs if dtype is not own.dtype),
        "optimizer_state": _count(tensors),
        "norm_statistics": _count(buffer for buffer in buffers if buffer.dim()),
    }


def _count(tensors: Iterable[Tensor]) -> dict[str, int]:
    return elements_by_dtype((tensor.dtype, tensor.numel()) for tensor in tensors)


def _commit() -> dict:
    """Return commit and dirty flag of the checkout that the code runs from, None if installed."""
    root = Path(__file__).resolve().parents[2]

    def git(*words: str) -> str:
        # Without a lock on the index, which a run that is killed here would leave behind.
        command = ["git", "--no-optional-locks", "-C", str(root), *words]
        return subprocess.check_output(
            command, stderr=subprocess.PIPE, text=True, timeout=10
        ).strip()

    with suppress(OSError, subprocess.SubprocessError):
        if (root / ".git").exists():
            return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    return {"commit": None, "dirty": None}


def _version(package: str) -> str | None:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def _cpu_name() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
