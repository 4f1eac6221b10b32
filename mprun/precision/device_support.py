"""What a device can honour; a mode that it cannot is refused, never replaced."""

from collections.abc import Iterable

import torch
from torch import nn

from mprun.precision.policy import PrecisionPolicy
from mprun.precision.recurrent import own_recurrent


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
