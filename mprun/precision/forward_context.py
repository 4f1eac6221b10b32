"""The context in which a mode's forward and backward passes run, and which devices can honour it.

A mode that a device cannot honour is refused, never replaced.
"""

from collections import Counter
from collections.abc import Iterable
from contextlib import nullcontext

import torch
from torch import nn

from mprun.precision.policy import DTYPE_NAMES, PrecisionPolicy
from mprun.precision.recurrent import own_recurrent


class Arithmetic:
    """Autocast and CPU emulation of one policy, entered once per training step.

        with arithmetic:                      # forward AND backward
            with arithmetic.autocast():       # forward only
                outputs = model(inputs)
            ...backward...

    On a CPU 16-bit formats are emulated (float16 or bfloat16 tensors, FP32 products rounded once
    on store, as a Tensor Core does; paper section 3.3) unless `native`; on CUDA nothing is.
    overrides: the dtypes of the policy's module overrides; their 16-bit ones are emulated too.
    """

    def __init__(
        self,
        policy: PrecisionPolicy,
        device: torch.device,
        *,
        native: bool = False,
        overrides: Iterable[torch.dtype] = (),
    ):
        self.policy, self.device = policy, device
        wanted = [dtype for dtype in (policy.half_dtype, *overrides) if dtype is not None]
        self.half_dtypes = tuple(dict.fromkeys(d for d in wanted if d.itemsize == 2))
        self.emulations: tuple = ()
        if self.half_dtypes and device.type == "cpu" and not native:
            from mprun.precision.emulation import HalfEmulation

            self.emulations = tuple(HalfEmulation(dtype) for dtype in self.half_dtypes)

    def __enter__(self) -> "Arithmetic":
        for emulation in self.emulations:
            emulation.__enter__()
        return self

    def __exit__(self, *exception) -> None:
        for emulation in reversed(self.emulations):
            emulation.__exit__(*exception)

    def autocast(self):
        """A fresh autocast block for one forward pass, or a no-op."""
        if self.policy.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.policy.autocast_dtype)

    def rerouted(self) -> dict[str, int]:
        """Calls computed by the emulation so far, by "phase operation"; empty if none."""
        total = sum((emulation.rerouted for emulation in self.emulations), Counter())
        return {f"{phase} {operation}": n for (operation, phase), n in sorted(total.items())}

    def kind(self) -> str:
        """How 16-bit products are computed: "emulated-fp16", "native-bf16", ... or "none"."""
        how = "emulated" if self.emulations else "native"
        return " ".join(f"{how}-{DTYPE_NAMES[d]}" for d in self.half_dtypes) or "none"


def why_unsupported(
    policy: PrecisionPolicy, device: torch.device, overrides: Iterable[torch.dtype] = ()
) -> str | None:
    """The reason why `device` cannot run `policy` as defined, or None if it can.

    overrides: dtypes of module overrides.

    TF32 and BF16 Tensor Cores exist from compute capability 8.0 on (NVIDIA Ampere).
    """
    if device.type == "cpu":
        if policy.fp32_math == "tf32":
            return "a CPU has no TF32; use precision=fp32, or device=cuda on a machine with a GPU"
        return None
    major, minor = torch.cuda.get_device_capability(device)
    name = f"{torch.cuda.get_device_name(device)} (compute capability {major}.{minor})"
    if policy.fp32_math == "tf32" and major < 8:
        return f"{name} has no TF32; compute capability 8.0 or later has it"
    if torch.bfloat16 in (policy.half_dtype, *overrides) and major < 8:
        return f"{name} has no bfloat16 products; compute capability 8.0 or later has them"
    return None


def why_no_lstm(
    policy: PrecisionPolicy, device: torch.device, projected: bool = False
) -> str | None:
    """The reason why torch's own LSTM on `device` does not compute in the policy's dtype, or None.

    Found by running a tiny one, as a model would: a CPU lacks the float16 layer under autocast.
    """
    wanted = policy.half_dtype
    if wanted is None:
        return None
    with torch.random.fork_rng(devices=[]):  # the random state belongs to the model
        lstm = nn.LSTM(8, 8, proj_size=4 if projected else 0).to(device, policy.param_dtype)
    own_recurrent(lstm)
    inputs = torch.zeros(2, 8, 8, device=device, dtype=policy.param_dtype)
    autocast = policy.autocast_dtype is not None
    try:
        with torch.autocast(device.type, dtype=policy.autocast_dtype, enabled=autocast):
            outputs, _ = lstm(inputs)
    except RuntimeError as error:
        return f"torch has no {wanted} LSTM here ({str(error).splitlines()[0][:60]})"
    if outputs.dtype is not wanted:
        return f"torch computes the LSTM in {outputs.dtype} here, not in {wanted}"
    return None
