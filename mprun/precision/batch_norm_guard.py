"""Keep BatchNorm's running statistics out of reach of an update that is skipped.

The forward pass has moved the statistics before anybody knows that the gradients overflowed:
without this guard one infinite activation makes the evaluation NaN for ever, although the
skipped update left the weights alone.
"""

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class BatchNormGuard:
    """Remembers the running statistics of `module`, and puts them back where told to.

    The statistics of all layers are moved into one flat tensor per dtype, so that remembering and
    restoring are one operation each, on the device. One guard per module: a second one would move
    the statistics away from the first.
    """

    def __init__(self, module: nn.Module):
        homes: dict[torch.dtype, list[tuple[nn.Module, str, Tensor]]] = {}
        for layer in module.modules():
            if isinstance(layer, _BatchNorm):
                for name, buffer in layer.named_buffers(recurse=False):
                    homes.setdefault(buffer.dtype, []).append((layer, name, buffer))
        self.flat = []
        for buffers in homes.values():
            flat = torch.cat([buffer.reshape(-1) for _, _, buffer in buffers])
            parts = flat.split([buffer.numel() for _, _, buffer in buffers])
            for (layer, name, buffer), part in zip(buffers, parts, strict=True):
                setattr(layer, name, part.view(buffer.shape))
            self.flat.append(flat)
        self.saved = [flat.clone() for flat in self.flat]

    @torch.no_grad()
    def save(self) -> None:
        """Remember the statistics as they are now."""
        for saved, flat in zip(self.saved, self.flat, strict=True):
            saved.copy_(flat)

    @torch.no_grad()
    def restore_where(self, found_inf: Tensor) -> None:
        """Put the saved statistics back if `found_inf` (0-dim) is non-zero; decided on the device.

        torch.where, not arithmetic: NaN * 0 would keep the NaN.
        """
        skipped = found_inf != 0 if self.flat else None
        for saved, flat in zip(self.saved, self.flat, strict=True):
            torch.where(skipped, saved, flat, out=flat)
