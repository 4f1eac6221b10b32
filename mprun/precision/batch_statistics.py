"""Buffers that forward passes move in a step that may be skipped, or has several micro-batches.

These are BatchNorm's running statistics, and the buffers that a module names in `moved_in_forward`:
the router of a mixture of experts counts the tokens that each expert has had.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from mprun.torch_private import BatchNorm, buffers_of


class BatchNormGuard:
    """A guard that keeps a skipped update from changing BatchNorm's running statistics.

    The forward pass moves the statistics before an overflow of the gradients is known. Without this
    guard one infinite activation makes the evaluation NaN for ever, although the skipped update
    left the weights alone.

    The statistics of all layers are moved into one flat tensor per dtype, so that saving and
    restoring are one operation each, on the device. A module has one guard: a second one would move
    the statistics away from the first.
    """

    def __init__(self, module: nn.Module):
        # By dtype, and whether they are counts.
        homes: dict[tuple[torch.dtype, bool], list[tuple[nn.Module, str, Tensor]]] = {}
        for layer in module.modules():
            moved = getattr(layer, "moved_in_forward", ())
            for name, buffer in layer.named_buffers(recurse=False):
                if isinstance(layer, BatchNorm) or name in moved:
                    home = homes.setdefault((buffer.dtype, name in moved), [])
                    home.append((layer, name, buffer))
        self.flat, self.are_counts = [], [are_counts for _, are_counts in homes]
        self._homes: list[tuple[nn.Module, str, Tensor]] = []
        for buffers in homes.values():
            flat = torch.cat([buffer.reshape(-1) for _, _, buffer in buffers])
            parts = flat.split([buffer.numel() for _, _, buffer in buffers])
            for (layer, name, buffer), part in zip(buffers, parts, strict=True):
                own = part.view(buffer.shape)
                setattr(layer, name, own)
                self._homes.append((layer, name, own))
            self.flat.append(flat)
        self.saved = [flat.clone() for flat in self.flat]

    def is_current(self) -> bool:
        """Return whether the layers still hold the statistics that are guarded."""
        return all(buffers_of(layer).get(name) is own for layer, name, own in self._homes)

    @torch.no_grad()
    def save(self) -> None:
        for saved, flat in zip(self.saved, self.flat, strict=True):
            saved.copy_(flat)

    @torch.no_grad()
    def restore_where(self, found_inf: Tensor | None) -> None:
        """Put the saved statistics back if `found_inf` (0-dim) is non-zero; decided on the device.

        torch.where, not arithmetic: NaN * 0 would keep the NaN.
        """
        if not self.flat or found_inf is None:
            return
        skipped = found_inf != 0
        for saved, flat in zip(self.saved, self.flat, strict=True):
            torch.where(skipped, saved, flat, out=flat)


class BatchStatistics(BatchNormGuard):
    """The buffers that forward passes move in a step of several micro-batches."""

    def __init__(self, module: nn.Module):
        super().__init__(module)
        self.parts: list[list[Tensor]] = []  # of the micro-batches of this step, by dtype

    def save(self) -> None:
        self.parts = []
        super().save()

    @torch.no_grad()
    def end_part(self) -> None:
        """End a micro-batch: keep its statistics and restore those from `save`."""
        self.parts.append([flat.clone() for flat in self.flat])
        for saved, flat in zip(self.saved, self.flat, strict=True):
            flat.copy_(saved)

    @torch.no_grad()
    def take_mean(self, gather: Callable[[Tensor], Tensor]) -> None:
        """Set the statistics to the mean of those that the micro-batches of all ranks left.

        Integers (counts of batches) are those of the first. What modules count themselves, from
        zero in each step, is added up. `gather` makes `[parts, n]` of all
        ranks, in the order of micro-batches, from those of this rank.
        """
        made, self.parts = self.parts, []
        for flat, are_counts, *own in zip(self.flat, self.are_counts, *made, strict=True):
            parts = gather(torch.stack(own)).unbind()
            flat.copy_(parts[0])
            if flat.is_floating_point():
                for part in parts[1:]:  # in a fixed order: the same bits for any number of ranks
                    flat.add_(part)
                if not are_counts:
                    flat.div_(len(parts))
