"""What a device can honour; a mode that it cannot is refused, never replaced."""

import torch

from mprun.precision.policy import PrecisionPolicy


def why_unsupported(policy: PrecisionPolicy, device: torch.device) -> str | None:
    """The reason why `device` cannot run `policy` as defined, or None if it can.

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
    if policy.half_dtype is torch.bfloat16 and major < 8:
        return f"{name} has no bfloat16 products; compute capability 8.0 or later has them"
    return None
