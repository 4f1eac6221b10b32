"""What the update of the weights moves: mprun's single pass, and the recipes it is judged by."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mprun.bench.roofline.rows import Write

# Bytes per parameter and step of SGD with momentum, from the write of the gradient on. FP32:
# gradient written 4, update 20 (gradient, weight and momentum read, two written). The documented
# torch.amp recipe: also the scaler's check, which reads and writes gradients, 8, and the cast of
# the weights in the next forward pass, 6. Single pass: FP16 gradient written 2 and read 2, master
# weight and momentum 16, FP16 weight written 2; with FP32 gradients 4 + 4 + 16 and no copy.
RECIPES = {
    "fp32 fused": 24,
    "torch.amp as documented": 38,
    "single pass, fp16 gradients": 22,
    "single pass, fp32 gradients": 24,
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
    ):
        """As of the protocol."""
        from mprun.precision.single_pass import Checked

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
