"""The contenders of a benchmark by name; a missing package only matters when it is used."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from mprun.errors import BadInput
from mprun.extensions.bench.cases import Case
from mprun.extensions.bench.measure import Contender
from mprun.extensions.bench.runner import RunnerContender

FP32, AMP = ("fp32", "tf32"), ("amp", "amp_bf16")
FP8 = ("fp8_tensorwise", "fp8_rowwise")
TASKS = ("classification", "reconstruction", "language_model", "gan")
# Modes that no other tool has -> the mode of its peers: same kernels, same memory formats, another
# way to the update.
NEAREST_MODE = {"fp16_master": "amp", "fp16_master_scaled": "amp", "bf16_master": "amp_bf16"}
NEAREST_MODE |= dict.fromkeys(("bf16_stochastic", "bf16_kahan"), "amp_bf16")

# With two optimizers these update the loss scale after each one's step, not once per iteration.
SCALES_PER_OPTIMIZER = ("fabric", "trainer", "accelerate")


@dataclass(frozen=True, slots=True)
class Entry:
    """A contender: a one-line description, its package, its tasks and modes.

    modes: None for all of mprun's.
    """

    text: str
    package: str | None
    modes: tuple[str, ...] | None
    tasks: tuple[str, ...] = TASKS

    def would_fit(self, task: str, mode: str) -> bool:
        """Return whether the contender has the task and the mode: then its absence is reported."""
        return task in self.tasks and (self.modes is None or mode in self.modes)


OWN = {
    "mprun": Entry("mprun as `mprun model=...` runs it", None, None),
    "mprun+": Entry("mprun at its best settings for the model", None, None),
}
PEERS = {
    "loop": Entry("plain PyTorch loop", None, (*FP32, "fp16_naive")),
    "loop+": Entry("the loop with fused optimizer and torch.compile, NHWC in TF32", None, FP32),
    "amp": Entry("torch.amp recipe of the PyTorch documentation", None, AMP),
    "amp+": Entry("the recipe with NHWC, fused optimizer and torch.compile", None, AMP),
    "timm": Entry("timm's training step", "timm", (*FP32, *AMP), ("classification",)),
    "torchao": Entry("torchao's FP8 layers in the recipe", "torchao", FP8, ("language_model",)),
    "torchao+": Entry(
        "the same with fused optimizer and torch.compile", "torchao", FP8, ("language_model",)
    ),
    "fabric": Entry("Lightning Fabric", "lightning", (*FP32, *AMP)),
    "trainer": Entry("lightning.Trainer, nothing logged", "lightning", (*FP32, *AMP)),
    "accelerate": Entry("Hugging Face Accelerate", "accelerate", (*FP32, *AMP)),
}
CONTENDERS = {**OWN, **PEERS}


def available(name: str, mode: str, task_kind: str, device: torch.device) -> str | None:
    """Return why this contender cannot train this kind of task in this mode here; None if it can.

    name: a key of `CONTENDERS`, KeyError otherwise. It imports no peer's package.
    """
    entry = CONTENDERS[name]
    if task_kind not in entry.tasks:
        return f"{name} trains {', '.join(entry.tasks)} only"
    if entry.modes is not None and mode not in entry.modes:
        nearest = NEAREST_MODE.get(mode)
        where = f"; compare with its {nearest}" if nearest in entry.modes else ""
        return f"{name} has no {mode} (it has {', '.join(entry.modes)}){where}"
    if name in PEERS and device.type == "cpu" and mode not in ("fp32", "tf32", "amp_bf16"):
        return (
            f"{name} would run {mode} on torch's own half kernels, on a CPU 10 to 60 times slower "
            "than FP32; there peers have fp32 and amp_bf16"
        )
    reason = _why_not_here(mode, task_kind, device)
    if reason is not None:
        return reason
    if entry.package is not None and find_spec(entry.package) is None:
        return f"the package {entry.package} is not installed"
    return None


def make(case: Case, device: torch.device) -> Contender:
    """Build the contender of a case before its first step: pin flags and draw weights.

    BadInput for an unknown name and for settings that its loop does not have; ImportError if its
    package is missing (see `available`).
    """
    if case.contender in OWN:
        return RunnerContender(case, device)
    if case.contender not in PEERS:
        raise BadInput(f"{case.contender}: no such contender (allowed: {', '.join(CONTENDERS)})")
    maker = _maker(case.contender)

    from benchmarks.suite.peers.task import pin_flags, set_up

    task = set_up(case, device)
    peer = maker(task)
    # A package may have set flags on the way.
    pin_flags(task.config)
    return peer


def _maker(name: str) -> Callable:
    match name:
        case "loop" | "loop+":
            from benchmarks.suite.peers.loop import make_loop, make_tuned_loop

            return make_loop if name == "loop" else make_tuned_loop
        case "amp" | "amp+":
            from benchmarks.suite.peers.amp import make_amp, make_tuned_amp

            return make_amp if name == "amp" else make_tuned_amp
        case "timm":
            from benchmarks.suite.peers.timm_step import make_timm

            return make_timm
        case "torchao" | "torchao+":
            from benchmarks.suite.peers.torchao_loop import make_torchao, make_tuned_torchao

            return make_torchao if name == "torchao" else make_tuned_torchao
        case "fabric":
            from benchmarks.suite.peers.fabric import make_fabric

            return make_fabric
        case "trainer":
            from benchmarks.suite.peers.trainer import make_trainer

            return make_trainer
        case "accelerate":
            from benchmarks.suite.peers.accelerate_loop import make_accelerate

            return make_accelerate
    raise ValueError(f"contender={name!r}: has no maker")


def _why_not_here(mode: str, task_kind: str, device: torch.device) -> str | None:
    """Return the reason why no contender can train like that on this device."""
    from mprun.precision import get_policy, why_no_lstm, why_unsupported

    policy = get_policy(mode)
    reason = why_unsupported(policy, device)
    if reason is None and task_kind == "language_model" and device.type == "cuda":
        reason = why_no_lstm(policy, device)
    return reason
