"""Deep Speech 2: convolutions over a spectrogram, recurrent layers over time, symbols per frame."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mprun.models.reversal import reordered, reversed_order

CLIP = 20.0  # of the rectifier min(max(x, 0), 20), section 3.1 of the source


@dataclass(frozen=True, slots=True)
class Convolutions:
    """Channels, kernels and strides of the convolutions; the first one alone strides over time."""

    channels: int
    frequency_kernels: Sequence[int]  # rows, one a convolution
    time_kernel: int
    frequency_stride: int
    time_stride: int


@dataclass(frozen=True, slots=True)
class Recurrence:
    """Units and layers of the GRUs, and frames of the row convolution behind them, 0 for none."""

    hidden_size: int
    num_layers: int
    bidirectional: bool
    row_convolution: int


class DeepSpeech2(nn.Module):
    """Amodei et al., arXiv 1512.02595: the network of table 3 of the mixed-precision paper.

    The network has convolutions with BatchNorm and a clipped rectifier, then GRU layers, all but
    the first behind a BatchNorm over frames and utterances (section 3.2: sequence-wise). The
    forward form has a row convolution over each frame and the next ones (section 3.7), the
    bidirectional form the sum of both directions. Layers before a BatchNorm have no bias, and
    BatchNorm before a GRU has no gain and no shift: the product that follows has both.

    ``forward(features, frames)``: ``features`` ``[n, 1, frequencies, time]``, of which the first
    ``frames`` (int64 ``[n]``) of each utterance count. It returns logits ``[time, n, num_symbols]``
    of fewer frames, and int64 ``[n]``, how many of them count.

    Padding: positions after an utterance are zero after every convolution, rectifier and recurrent
    layer. The backward direction begins at an utterance's own last frame, by reading reordered
    frames; a packed sequence would need lengths on the host. Evaluation therefore gives the same
    result however far an utterance is padded. In training the zeros are part of BatchNorm's
    statistics, as in published implementations, which mask alike.

    ``frequencies`` are the rows of a spectrogram, ``num_symbols`` include the blank (0); the other
    arguments are the fields of `DeepSpeech2Config`. With an ``init_range`` BatchNorm starts as
    usual. Without one a layer starts like torch's, in +-1/sqrt(inputs), a GRU in +-1/sqrt(units).
    """

    def __init__(
        self,
        frequencies: int,
        num_symbols: int,
        convolved: Convolutions,
        recurrence: Recurrence,
        fully_connected: int,
        init_range: float | None,
    ) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList()
        rows, below = frequencies, 1
        for number, rows_of_kernel in enumerate(convolved.frequency_kernels):
            kernel = rows_of_kernel, convolved.time_kernel
            stride = convolved.frequency_stride, convolved.time_stride if number == 0 else 1
            block = _Convolution(below, convolved.channels, kernel, stride)
            self.convolutions.append(block)
            rows, below = block.sizes(rows, 0), convolved.channels
        hidden_size = recurrence.hidden_size
        sizes = [rows * below] + [hidden_size] * (recurrence.num_layers - 1)
        self.recurrent = nn.ModuleList(
            _Recurrent(size, hidden_size, recurrence.bidirectional, normed=layer > 0)
            for layer, size in enumerate(sizes)
        )
        self.row_convolution = None
        if recurrence.row_convolution:
            self.row_convolution = _RowConvolution(hidden_size, recurrence.row_convolution)
        self.connected: nn.Module = nn.Identity()
        if fully_connected:
            layer = nn.Linear(hidden_size, fully_connected, bias=False)
            self.connected = nn.Sequential(layer, nn.Hardtanh(0.0, CLIP))
        self.output = nn.Linear(fully_connected or hidden_size, num_symbols)
        if init_range is not None:
            for module in self.modules():
                if not isinstance(module, nn.BatchNorm2d):
                    for parameter in module.parameters(recurse=False):
                        nn.init.uniform_(parameter, -init_range, init_range)

    def forward(self, features: Tensor, frames: Tensor) -> tuple[Tensor, Tensor]:
        x = features
        for block in self.convolutions:
            x, frames = block(x, frames)
        x = x.flatten(1, 2).permute(2, 0, 1)  # [time, n, rows * channels]
        padding = _padding(frames, len(x)).t()
        for layer in self.recurrent:
            x = layer(x, padding)
        if self.row_convolution is not None:
            x = self.row_convolution(x)
        return self.output(self.connected(x)), frames


def _padding(frames: Tensor, time: int) -> Tensor:
    """Return which frames lie after an utterance, bool ``[n, time]``."""
    return torch.arange(time, device=frames.device) >= frames[:, None]


class _Convolution(nn.Module):
    """A convolution padded by half a kernel, BatchNorm and a clipped rectifier."""

    def __init__(
        self, inputs: int, outputs: int, kernel: tuple[int, int], stride: tuple[int, int]
    ) -> None:
        super().__init__()
        half = kernel[0] // 2, kernel[1] // 2
        self.convolution = nn.Conv2d(inputs, outputs, kernel, stride, half, bias=False)
        self.norm = nn.BatchNorm2d(outputs)
        self.rectifier = nn.Hardtanh(0.0, CLIP)

    def sizes(self, before, axis: int):
        """Return the rows (axis 0) or frames (axis 1) after the convolution: int or tensor."""
        own = self.convolution
        half, kernel, stride = own.padding[axis], own.kernel_size[axis], own.stride[axis]
        return (before + 2 * half - kernel) // stride + 1

    def forward(self, x: Tensor, frames: Tensor) -> tuple[Tensor, Tensor]:
        x = self.convolution(x)
        frames = self.sizes(frames, 1)
        padding = _padding(frames, x.shape[3])[:, None, None]
        x = self.norm(x.masked_fill(padding, 0.0))
        return self.rectifier(x).masked_fill(padding, 0.0), frames


class _Recurrent(nn.Module):
    """BatchNorm over frames and utterances if ``normed``, and a GRU in one or two directions."""

    def __init__(self, inputs: int, hidden: int, bidirectional: bool, normed: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(inputs, affine=False) if normed else None
        self.forwards = nn.GRU(inputs, hidden)
        self.backwards = nn.GRU(inputs, hidden) if bidirectional else None

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        if self.norm is not None:
            x = self.norm(x.flatten(0, 1)).view(x.shape)
        y, _ = self.forwards(x)
        if self.backwards is not None:
            order = reversed_order(padding.t()).t()
            other, _ = self.backwards(reordered(x, order))
            y = y + reordered(other, order)
        return y.masked_fill(padding[..., None], 0.0)


class _RowConvolution(nn.Module):
    """Each unit's weighted sum over this frame and the next ones, and a clipped rectifier."""

    def __init__(self, units: int, frames: int) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(units, units, frames, groups=units, bias=False)
        self.rectifier = nn.Hardtanh(0.0, CLIP)

    def forward(self, x: Tensor) -> Tensor:
        ahead = self.convolution.kernel_size[0] - 1
        x = self.convolution(F.pad(x.permute(1, 2, 0), (0, ahead)))
        return self.rectifier(x).permute(2, 0, 1)
