"""Sums over the gradients of a model, whose dtypes may differ."""

from collections.abc import Iterable

import torch
from torch import Tensor


def counted(tensors: Iterable[tuple[torch.dtype, int]]) -> dict[str, int]:
    """Number of elements by name of the dtype, from (dtype, number) pairs."""
    counts: dict[str, int] = {}
    for dtype, numel in tensors:
        name = str(dtype).removeprefix("torch.")
        counts[name] = counts.get(name, 0) + numel
    return counts


def by_dtype(tensors: Iterable[Tensor | None]) -> list[list[Tensor]]:
    """Tensors grouped by dtype, None left out: torch's foreach kernels take one dtype at a time."""
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor is not None:
            groups.setdefault(tensor.dtype, []).append(tensor)
    return list(groups.values())


def check_and_unscale(tensors: list[Tensor], found_inf: Tensor, inverse: Tensor) -> None:
    """Multiply by `inverse` in place, rounded once; set `found_inf` where a value is not finite.

    tensors: of one dtype. found_inf, inverse: float32, 0-dim. Torch's kernel takes no BF16 on CUDA
    (NotImplementedError in torch 2.15): there it works on FP32 copies, which all live at once.
    """
    if tensors[0].dtype is torch.bfloat16 and tensors[0].is_cuda:
        wide = [tensor.float() for tensor in tensors]
        torch._amp_foreach_non_finite_check_and_unscale_(wide, found_inf, inverse)
        torch._foreach_copy_(tensors, wide)
    else:
        torch._amp_foreach_non_finite_check_and_unscale_(tensors, found_inf, inverse)


def largest(tensors: Iterable[Tensor | None]) -> Tensor:
    """Largest magnitude of all, float32, 0-dim."""
    groups = by_dtype(tensors)
    norms = [n.float() for group in groups for n in torch._foreach_norm(group, float("inf"))]
    return torch.stack(norms).max()


def norms_of(gradients: list[Tensor]) -> Tensor:
    """L2 norm of each, float32 [n], by dtype: squares of FP16 values would overflow in FP16."""
    norms = [
        norm
        for group in by_dtype(gradients)
        for norm in torch._foreach_norm(group, 2, dtype=torch.float32)
    ]
    return torch.stack(norms)


def global_norm(gradients: list[Tensor]) -> Tensor:
    """L2 norm over all gradients, float32, 0-dim."""
    return torch.linalg.vector_norm(norms_of(gradients), 2)
