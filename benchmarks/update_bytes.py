"""Bytes of memory traffic that one parameter costs in one update, counted by hand.

Each tensor counts once for every pass that reads or writes it; what stays in a cache or a register
on the way does not count, nor does the read that a CPU does before it writes to a line.
"""

from dataclasses import dataclass

from mprun.precision.policy import PrecisionPolicy

# Read and written, all FP32.
_STATE = {"sgd": 0, "sgd_momentum": 8, "adam": 16, "adamw": 16, "adagrad": 8}
_MASTER = 8  # the weight itself, read and written


@dataclass(frozen=True, slots=True)
class UpdateBytes:
    """Bytes per parameter and step, by what they are for.

    gradient: written by backward, as the tensor that the update gets. check: reading for the finite
    check and the norm, and writing where the check unscales in place. cast: of gradients to tensors
    of their own. clip: in place. update: gradient, master and state. copy: of masters to the
    model. weight_cast: autocast's copies in the next forward pass.
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
        """What `step` of the optimizer moves."""
        return self.check + self.cast + self.clip + self.update + self.copy

    @property
    def total(self) -> int:
        """With what the mode costs elsewhere for the same end."""
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
    """Of a parameter in `policy.param_dtype` (norm layers have FP32 ones in most modes).

    optimizer: "sgd", "sgd_momentum", "adam", "adamw" or "adagrad". path: "single_pass", or "plain"
    with torch's fused kernels. checks: under a loss scale that skips. norm: the gradient norm is
    measured; clips: and limited. Raises ValueError for other names and for modes without master
    weights, whose update is one of 16 bits.
    """
    if optimizer not in _STATE:
        raise ValueError(f"optimizer={optimizer!r}: must be one of {', '.join(_STATE)}")
    if path not in ("single_pass", "plain"):
        raise ValueError(f"path={path!r}: must be 'single_pass' or 'plain'")
    if policy.master_dtype is None:
        raise ValueError(f"{policy.name}: has no master weights")
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
    """Of PyTorch's documented recipe: torch.autocast, torch.amp.GradScaler, a fused optimizer.

    38 in all for SGD with momentum. GradScaler reads and writes every gradient to check it
    (torch.amp.GradScaler, _unscale_grads_), autocast casts every weight once a step.
    """
    if optimizer not in _STATE:
        raise ValueError(f"optimizer={optimizer!r}: must be one of {', '.join(_STATE)}")
    return UpdateBytes(4, 8, 0, 0, 4 + _MASTER + _STATE[optimizer], 0, 6)
