"""BatchNorm with ReLU and the sum of a residual as one operation of autograd, on NHWC maps.

`install` lets the networks' own modules compute so while they train; nothing else changes, names
and state neither. Where a module is watched by hooks, or its maps do not fit, the separate modules
compute. With hooks these have the same bits, because every BatchNorm takes its sums here.
"""

import math
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from types import ModuleType
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from mprun.precision import CastModel
from mprun.torch_private import HOOKS

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Numbers of a tile, and those of them that are neighbours in memory: 128 bytes of 16-bit numbers.
_TILE, _WIDEST, _NARROWEST = 2048, 64, 16
_FINISHED = 8  # channels of a program that adds up chunks, with a lane for each of
FINISH_LANES = _TILE // _FINISHED
PROGRAMS = 1024  # of a launch, about: they fill a GPU, and leave few chunks to be added up
LAUNCH = {"num_warps": 8, "enable_fp_fusion": False}


class Plan(NamedTuple):
    """How a matrix [rows, channels] is divided; the sums' order, so no property of a device."""

    lanes: int  # rows of a tile
    block: int  # channels of a tile
    steps: int  # tiles of a chunk
    chunks: int

    @property
    def levels(self) -> int:
        """Halvings that add up the lanes."""
        return int(math.log2(self.lanes))


def plan(rows: int, channels: int) -> Plan:
    """Return the division of a matrix."""
    block = min(_WIDEST, max(_NARROWEST, 1 << (channels - 1).bit_length()))
    lanes = _TILE // block
    wanted = max(1, PROGRAMS // -(-channels // block))
    steps = max(1, -(-rows // (lanes * wanted)))
    return Plan(lanes, block, steps, -(-rows // (lanes * steps)))


class _Launches:
    """The launches over the maps of one module, [images, channels, height, width] in NHWC order."""

    def __init__(self, x: Tensor):
        # Imported here: only torch for CUDA on Linux includes Triton.
        from mprun.extensions.fused_norm import kernels

        self.kernels: ModuleType = kernels
        self.x, self.channels = x, x.size(1)
        self.rows = x.numel() // self.channels
        self.plan = own = plan(self.rows, self.channels)
        self.on_device = torch.cuda.device(x.device) if x.is_cuda else nullcontext()
        blocks = -(-self.channels // own.block)
        self.shape = (self.rows, self.channels, own.steps)
        self.tiles = {"LANES": own.lanes, "BLOCK": own.block}
        self.grid = (own.chunks, blocks)
        self.finish_grid = (-(-self.channels // _FINISHED),)
        self.finish = {"LANES": FINISH_LANES, "BLOCK": _FINISHED}
        self.finish["LEVELS"] = int(math.log2(FINISH_LANES))

    def numbers(self, *size: int) -> Tensor:
        """Return float32 [*size, channels], to be written."""
        return self.x.new_empty((*size, self.channels), dtype=torch.float32)

    def sums(self, kernel: Any, *arguments: Tensor, **more: Any) -> Tensor:
        parts = self.numbers(self.plan.chunks, 2)
        self._launch(
            kernel, self.grid, *arguments, parts, *self.shape,
            LEVELS=self.plan.levels, **self.tiles, **more,
        )  # fmt: skip
        return parts

    def maps(self, kernel: Any, *arguments: Tensor, **more: Any) -> None:
        self._launch(kernel, self.grid, *arguments, *self.shape, **self.tiles, **more)

    def finished(self, kernel: Any, *arguments: Any) -> None:
        self._launch(kernel, self.finish_grid, *arguments, **self.finish)

    def _launch(
        self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any
    ) -> None:
        if not self.x.is_cuda:  # Triton's interpreter, for tests; it has no BF16
            arguments = tuple(map(_bits_of_bf16, arguments))
        kernel[grid](*arguments, **constants, **LAUNCH)


def _bits_of_bf16(argument: Any) -> Any:
    is_bf16 = isinstance(argument, Tensor) and argument.dtype is torch.bfloat16
    return argument.view(torch.uint16) if is_bf16 else argument


class _NormRelu(torch.autograd.Function):
    """relu(batch_norm(x) + residual), or without either; it moves the running statistics."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor,
        norm: nn.BatchNorm2d, relu: bool,
    ) -> Tensor:  # fmt: skip
        launches, momentum = _Launches(x), norm.momentum or 0.0
        kernels, y = launches.kernels, torch.empty_like(x)
        moved = (norm.running_mean, norm.running_var, norm.num_batches_tracked)
        statistics, own = launches.numbers(2), launches.plan
        with launches.on_device:
            parts = launches.sums(kernels.statistics_kernel, x)
            launches.finished(
                kernels.finish_statistics_kernel, parts, statistics, *moved,
                momentum, 1 - momentum, norm.eps,
                launches.rows, launches.channels, own.chunks, own.steps * own.lanes,
            )  # fmt: skip
            launches.maps(
                kernels.normalise_kernel,
                *(x, x if residual is None else residual, y, weight, bias, statistics),
                RELU=relu, SUM=residual is not None,
            )  # fmt: skip
        ctx.mask = ("output" if residual is not None else "input") if relu else "no"
        ctx.sums = residual is not None
        ctx.save_for_backward(x, weight, bias, statistics, *([y] if ctx.mask == "output" else []))
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, bias, statistics, *output = ctx.saved_tensors
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        launches = _Launches(x)
        kernels, y = launches.kernels, output[0] if output else x
        totals = launches.numbers(2)
        of_weight, of_bias = torch.empty_like(weight), torch.empty_like(bias)
        passed = torch.empty_like(x) if output else gradient
        of_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        known = (weight, bias, statistics)
        with launches.on_device:
            parts = launches.sums(
                kernels.gradient_sums_kernel, gradient, x, y, passed, *known, MASK=ctx.mask
            )
            launches.finished(
                kernels.finish_sums_kernel, parts, totals, of_bias, of_weight,
                launches.channels, launches.plan.chunks,
            )  # fmt: skip
            if of_x is not None:
                launches.maps(
                    kernels.gradient_kernel, passed, x, y, of_x, *known, totals,
                    MASK="no" if output else ctx.mask,
                )  # fmt: skip
        return of_x, passed if ctx.sums else None, of_weight, of_bias, None, None


def _fits(norm: nn.BatchNorm2d, device: str, x: Tensor, residual: Tensor | None) -> bool:
    """Return whether the kernels compute what the modules would with these maps."""
    return (
        norm.training
        and x.device.type == device
        and x.dtype in _DTYPES
        and norm.weight.dtype in (torch.float32, x.dtype)
        and x.dim() == 4
        and x.is_contiguous(memory_format=torch.channels_last)
        and x.numel() > x.size(1)  # otherwise torch refuses it
        and (residual is None or _alike(x, residual))
    )


def _alike(x: Tensor, other: Tensor) -> bool:
    same = x.shape == other.shape and x.dtype == other.dtype and x.device == other.device
    return same and other.is_contiguous(memory_format=torch.channels_last)


def _norm(norm: nn.BatchNorm2d, device: str, x: Tensor) -> Tensor:
    """Compute the module alone."""
    if not _fits(norm, device, x, None):
        return type(norm).forward(norm, x)
    return computed(norm, x, None, relu=False)


def computed(norm: nn.BatchNorm2d, x: Tensor, residual: Tensor | None, *, relu: bool) -> Tensor:
    """Compute relu(norm(x) + residual) by the kernels, or without either, for maps that fit."""
    found: Tensor = _NormRelu.apply(x, residual, norm.weight, norm.bias, norm, relu)
    return found


def norm_relu(
    norm: nn.Module, relu: nn.Module, device: str, x: Tensor, residual: Tensor | None = None
) -> Tensor:
    """Compute relu(norm(x) + residual), as one operation if the maps fit and nobody watches."""
    if is_pair(norm, relu) and not _watched(norm) and not _watched(relu):
        if _fits(norm, device, x, residual):
            return computed(norm, x, residual, relu=True)
    found: Tensor = norm(x)
    if residual is not None:
        found += residual
    return relu(found)


def _watched(module: nn.Module) -> bool:
    return any(getattr(module, hooks) for hooks in HOOKS)


def is_pair(norm: nn.Module, relu: nn.Module) -> TypeGuard[nn.BatchNorm2d]:
    """Return whether the kernels have the formulas of two modules, neither in another dtype."""
    forward = vars(norm).get("forward")
    return (
        type(norm) is nn.BatchNorm2d
        and (forward is None or getattr(forward, "func", None) is _norm)
        and norm.affine
        and norm.track_running_stats
        and norm.momentum is not None
        and type(relu) is nn.ReLU
        and "forward" not in vars(relu)
    )


def _sequential(chain: nn.Sequential, device: str, x: Any) -> Any:
    layers = list(chain)
    while layers:
        layer = layers.pop(0)
        if layers and is_pair(layer, layers[0]):
            x = norm_relu(layer, layers.pop(0), device, x)
        else:
            x = layer(x)
    return x


def _block(block: Any, device: str, x: Tensor) -> Tensor:
    """Compute torchvision's BasicBlock or Bottleneck."""
    found = norm_relu(block.bn1, block.relu, device, block.conv1(x))
    last, norm = block.conv2, block.bn2
    if hasattr(block, "conv3"):
        found = norm_relu(norm, block.relu, device, last(found))
        last, norm = block.conv3, block.bn3
    found = last(found)
    identity = x if block.downsample is None else block.downsample(x)
    return norm_relu(norm, block.relu, device, found, identity)


def _resnet(net: Any, device: str, x: Tensor) -> Tensor:
    """Compute torchvision's ResNet."""
    x = net.maxpool(norm_relu(net.bn1, net.relu, device, net.conv1(x)))
    x = net.layer4(net.layer3(net.layer2(net.layer1(x))))
    logits: Tensor = net.fc(torch.flatten(net.avgpool(x), 1))
    return logits


def _way(module: nn.Module) -> Callable[..., Any] | None:
    """Return what a module that has pairs inside is to compute by; None: it has none."""
    if "forward" in vars(module):
        return None
    if type(module).forward is nn.Sequential.forward:
        return _sequential
    if (of_torchvision := sys.modules.get("torchvision.models.resnet")) is None:
        return None
    if type(module) in (of_torchvision.BasicBlock, of_torchvision.Bottleneck):
        return _block
    return _resnet if type(module) is of_torchvision.ResNet else None


def pairs_of(network: nn.Module) -> list[tuple[nn.BatchNorm2d, bool]]:
    """Return each BatchNorm before a ReLU in reach, and whether a residual is added between."""
    found: list[tuple[nn.Module, nn.Module, bool]] = []
    for module in network.modules():
        own: Any = module
        way = _way(module)
        if way is _sequential:
            found += [(norm, relu, False) for norm, relu in pairwise(own)]
        elif way is not None:
            norms = [norm for key in ("bn1", "bn2", "bn3") if (norm := getattr(own, key, None))]
            sums = [way is _block and norm is norms[-1] for norm in norms]
            found += [(norm, own.relu, adds) for norm, adds in zip(norms, sums, strict=True)]
    return [(norm, adds) for norm, relu, adds in found if is_pair(norm, relu)]


def install(cast: CastModel, device: torch.device) -> None:
    """Let the `pairs_of` a model compute so on `device`. Evaluation in FP32 stays as it was."""
    norms = {norm for norm, _ in pairs_of(cast.module)}
    for module in cast.module.modules():
        way: Callable[..., Any] | None = _norm if module in norms else _way(module)
        if way is not None:
            cast.compute_by(module, partial(way, module, device.type))
