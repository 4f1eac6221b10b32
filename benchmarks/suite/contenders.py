"""The contenders of a benchmark by name; a missing package only matters when it is used."""

import pkgutil
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from mprun.errors import BadInput
from mprun.extensions.bench.cases import EAGER, Case
from mprun.extensions.bench.measure import Contender
from mprun.extensions.bench.runner import RunnerContender

FP32, AMP = ("fp32", "tf32"), ("amp", "amp_bf16")
WHOLE = ("fp16_naive", "bf16_naive")  # all numbers in 16 bits, as by `.half()`
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
    """A contender: its maker ("module:function" of `peers`), package, modes and tasks.

    modes: None for all of mprun's.
    """

    maker: str
    package: str | None
    modes: tuple[str, ...] | None
    tasks: tuple[str, ...] = TASKS

    def would_fit(self, task: str, mode: str) -> bool:
        """Return whether the contender has the task and the mode: then its absence is reported."""
        return task in self.tasks and (self.modes is None or mode in self.modes)


OWN = {
    "mprun": Entry("", None, None),  # as `mprun model=...` runs it
    "mprun+": Entry("", None, None),  # at its best settings for the model
    EAGER: Entry("", None, None),  # without torch.compile, where the default takes it
}
_BOTH, _IMAGES, _WORDS = (*FP32, *AMP), ("classification",), ("language_model",)
PEERS = {
    "loop": Entry("loop:make_loop", None, (*FP32, *WHOLE)),
    "loop+": Entry("loop:make_tuned_loop", None, FP32),
    "amp": Entry("amp:make_amp", None, AMP),
    "amp+": Entry("amp:make_tuned_amp", None, AMP),
    "timm": Entry("timm_step:make_timm", "timm", _BOTH, _IMAGES),
    "torchao": Entry("torchao_loop:make_torchao", "torchao", FP8, _WORDS),
    "torchao+": Entry("torchao_loop:make_tuned_torchao", "torchao", FP8, _WORDS),
    "fabric": Entry("fabric:make_fabric", "lightning", _BOTH),
    "trainer": Entry("trainer:make_trainer", "lightning", _BOTH),
    "accelerate": Entry("accelerate_loop:make_accelerate", "accelerate", _BOTH),
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
    if name in PEERS and device.type == "cpu" and mode in ("amp", "fp16_naive"):
        return (
            f"{name} would run {mode} on torch's own half kernels, on a CPU 10 to 60 times slower "
            "than FP32; there peers have fp32, amp_bf16 and bf16_naive"
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
    maker = pkgutil.resolve_name(f"benchmarks.suite.peers.{PEERS[case.contender].maker}")

    from benchmarks.suite.peers.task import pin_flags, set_up

    task = set_up(case, device)
    peer = maker(task)
    # A package may have set flags on the way.
    pin_flags(task.config)
    return peer


def _why_not_here(mode: str, task_kind: str, device: torch.device) -> str | None:
    """Return the reason why no contender can train like that on this device."""
    from mprun.precision import get_policy, why_no_lstm, why_unsupported

    policy = get_policy(mode)
    reason = why_unsupported(policy, device)
    if reason is None and task_kind == "language_model" and device.type == "cuda":
        reason = why_no_lstm(policy, device)
    return reason
