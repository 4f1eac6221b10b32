"""What the update of the weights moves: mprun's single pass, and the recipes it is judged by."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mprun.bench.roofline.rows import Write
from mprun.bench.roofline.update_bytes import amp_recipe_bytes, update_bytes
from mprun.precision import get_policy
from mprun.precision.single_pass import Checked

_SGD = "sgd_momentum"
# Bytes per parameter and step of SGD with momentum, the write of the gradient and autocast's cast
# of the weight included.
RECIPES = {
    "fp32": update_bytes(_SGD, get_policy("fp32"), path="plain", checks=False).total,
    "torch.amp as documented": amp_recipe_bytes(_SGD).total,
    "fp16 with masters, one pass": update_bytes(
        _SGD, get_policy("fp16_master"), path="single_pass", checks=False
    ).total,
    "the same scaled": update_bytes(
        _SGD, get_policy("fp16_master_scaled"), path="single_pass", checks=True
    ).total,
}


class CountedPass:
    """`mprun.precision.single_pass.SinglePass` on tensors without values: writes what it costs.

    Check: every gradient read once. Update: gradients read; weights and optimizer state read and
    written; 16-bit copies written.
    """

    def __init__(self, optimizer, write: Write):
        self._parameters, self._updated = optimizer.parameters, optimizer.updated
        self._state = optimizer.inner.state
        self._write = write

    def check(
        self,
        gradients: Sequence[Tensor | None],
        inverse: Tensor | None,
        found_inf: Tensor | None,
        *,
        norm: bool,
        grad_max: bool,
    ) -> Checked:
        """As of the protocol."""
        if found_inf is not None or norm or grad_max:
            size = sum(_size(g) for g in gradients if g is not None)
            self._write("check of gradients", torch.float32, 0, size, 1)
        return Checked(
            norms=torch.empty(len(gradients)) if norm else None,
            grad_max=torch.empty(()) if grad_max else None,
        )

    def update(
        self,
        gradients: Sequence[Tensor | None],
        inverse: Tensor | None,
        clip: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        """As of the protocol."""
        size = 0
        for gradient, own, updated in zip(gradients, self._parameters, self._updated, strict=True):
            if gradient is None:
                continue
            state = self._state[updated].values()
            held = [t for t in state if isinstance(t, Tensor) and t.shape == updated.shape]
            size += _size(gradient) + 2 * (_size(updated) + sum(map(_size, held)))
            size += _size(own) if own is not updated else 0
        self._write("update in one pass", torch.float32, 0, size, 1)


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.itemsize
