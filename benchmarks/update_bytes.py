"""Bytes of memory traffic of one parameter in one update, counted by hand.

Each tensor counts once for every pass that reads or writes it. Values in a cache or a register do
not count, nor does the read that a CPU does before it writes to a line.
"""

from dataclasses import dataclass

from mprun.precision.policy import PrecisionPolicy

# Read and written, all FP32.
_STATE = {"sgd": 0, "sgd_momentum": 8, "adam": 16, "adamw": 16, "adagrad": 8}
_MASTER = 8  # the weight itself, read and written


@dataclass(frozen=True, slots=True)
class UpdateBytes:
    """Bytes per parameter and step, by purpose.

    gradient: written by backward, as the tensor that the update gets. check: read for the finite
    check and the norm, and written if the check unscales in place. cast: gradients cast to separate
    tensors. clip: in place. update: gradient, master and state. copy: masters copied to the model.
    weight_cast: autocast's copies in the next forward pass.
    """

    gradient: int
    check: int
    cast: int
    clip: int
    update: int
    copy: int
    weight_cast: int

    @property
    def step(self) -> int:
        """Bytes that `step` of the optimizer moves."""
        return self.check + self.cast + self.clip + self.update + self.copy

    @property
    def total(self) -> int:
        """Bytes of the step, plus the mode's costs elsewhere for the same purpose."""
        return self.gradient + self.step + self.weight_cast


def update_bytes(
    optimizer: str,
    policy: PrecisionPolicy,
    *,
    path: str,
    checks: bool,
    norm: bool = False,
    clips: bool = False,
) -> UpdateBytes:
    """Count the bytes of a parameter in `policy.param_dtype` (in most modes norm layers have FP32).

    optimizer: "sgd", "sgd_momentum", "adam", "adamw" or "adagrad". path: "single_pass", or "plain"
    with torch's fused kernels. checks: the loss scale skips updates. norm: the gradient norm is
    measured; clips: it is also limited. Raises ValueError for other names, for modes without
    master weights, which update in 16 bits, and for narrow state, which is widened chunk by chunk:
    `mprun bench --roofline` counts those.
    """
    if optimizer not in _STATE:
        raise ValueError(f"optimizer={optimizer!r}: must be one of {', '.join(_STATE)}")
    if path not in ("single_pass", "plain"):
        raise ValueError(f"path={path!r}: must be 'single_pass' or 'plain'")
    if policy.master_dtype is None:
        raise ValueError(f"{policy.name}: has no master weights")
    if policy.state_dtype not in (None, "fp32"):
        raise ValueError(f"precision.update.state_dtype={policy.state_dtype}: state is widened")
    gradient = policy.param_dtype.itemsize
    in_16_bits = gradient == 2
    weights = _MASTER + _STATE[optimizer]
    weight_cast = 6 if policy.autocast_dtype is not None else 0
    norm = norm or clips
    if path == "single_pass":
        read = gradient if checks or norm else 0
        copied = 2 if in_16_bits else 0
        return UpdateBytes(gradient, read, 0, 0, gradient + weights, copied, weight_cast)
    check = (8 if checks else 0) + (4 if norm else 0)
    cast = 6 if in_16_bits else 0
    clip = 8 if clips else 0
    copied = 6 if in_16_bits else 0
    return UpdateBytes(gradient, check, cast, clip, 4 + weights, copied, weight_cast)


def amp_recipe_bytes(optimizer: str) -> UpdateBytes:
    """Count PyTorch's documented recipe: torch.autocast, torch.amp.GradScaler, a fused optimizer.

    The sum for SGD with momentum is 38. GradScaler reads and writes every gradient to check it
    (torch.amp.GradScaler, _unscale_grads_); autocast casts every weight once a step.
    """
    if optimizer not in _STATE:
        raise ValueError(f"optimizer={optimizer!r}: must be one of {', '.join(_STATE)}")
    return UpdateBytes(4, 8, 0, 0, 4 + _MASTER + _STATE[optimizer], 0, 6)
