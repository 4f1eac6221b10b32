"""Attention in FP8: queries, keys, values and probabilities, and their gradients.

Formats and places of casts are those of Transformer Engine (`fp8_dpa` of Float8CurrentScaling; its
unfused attention emulates them by `FP8EmulationFunc`). It calls P "S", and S "P".

    S = cast(Q) cast(K)^T * scale + mask     P = softmax(S)      O = cast(P) cast(V)
    dV = cast(P)^T cast(dO)                  dP = cast(dO) cast(V)^T
    dS = P * (dP - sum(dP * P))              dQ = cast(dS) cast(K) * scale
                                             dK = cast(dS)^T cast(Q) * scale

All else is FP32; O, dQ, dK and dV are rounded once to the dtype of Q. A scale is the format's
largest number by the largest magnitude that is cast: of a sequence's head, as FlashAttention-3 has
it for Q, K and V (arXiv 2407.08608). For P, dO and dS this granularity is mprun's own. "tensor" is
that of Transformer Engine, which shares one scale among Q, K and V, where here each has its own.

It is an emulation on every device: decoded numbers are multiplied in FP32, and all scores are in
memory at once. The backward pass computes P again.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from mprun.precision.block_formats import (
    ELEMENTS,
    SCALES,
    Element,
    apart,
    decoded,
    encoded,
    library,
)
from mprun.precision.scaled_operators import Calls

GRANULARITIES = ("head", "tensor")


@dataclass(frozen=True, slots=True)
class ScaledAttention:
    """The formats of attention.

    format: of Q, K, V and P. grad_format: of dO and dS. granularity: the part of a tensor that
        shares a scale, one of `GRANULARITIES`.
    """

    format: Element = ELEMENTS["e4m3"]
    grad_format: Element = ELEMENTS["e5m2"]
    granularity: str = "head"

    @property
    def names(self) -> tuple[str, str]:
        """Return what counts and records call both passes: "e4m3-attention"."""
        return f"{self.format.name}-attention", f"{self.grad_format.name}-attention"


class _Attention(torch.autograd.Function):
    """Attention of one call. A second derivative raises RuntimeError."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool,
        scale: float, how: ScaledAttention, counted_by: int,
    ) -> Tensor:  # fmt: skip
        ctx.told, ctx.how = (is_causal, scale, counted_by), how
        ctx.save_for_backward(query, key, value, mask)
        formats = how.names[0], how.granularity, how.format.name
        found: Tensor = torch.ops.mprun.scaled_attention(
            query, key, value, mask, *ctx.told, *formats
        )
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError("attention in FP8 has no second derivative (create_graph=True)")
        how = ctx.how
        formats = how.names[1], how.granularity, how.format.name, how.grad_format.name
        saved = ctx.saved_tensors
        found = torch.ops.mprun.scaled_attention_backward(gradient, *saved, *ctx.told, *formats)
        needed = zip(found, ctx.needs_input_grad, strict=False)
        return *(own if is_needed else None for own, is_needed in needed), *(None,) * 4


class InScaledAttention(TorchFunctionMode):
    """A mode in which `F.scaled_dot_product_attention` computes so.

    An override takes a module out: what has another dtype than `half` computes as without it.
    """

    def __init__(self, how: ScaledAttention, half: torch.dtype, calls: Calls):
        super().__init__()
        self._how, self._half, self._counted_by = how, half, calls.number

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = None
        if func is F.scaled_dot_product_attention:
            found = self._attention(*args, **kwargs)
        return func(*args, **kwargs) if found is None else found

    def _attention(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor | None:  # fmt: skip
        """Return None where torch's function is to compute, or to raise its error."""
        device = query.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            query, key, value = (own.to(dtype) for own in (query, key, value))
        is_empty = not (query.numel() and key.numel() and value.numel())
        if query.dtype is not self._half or is_empty or (is_causal and attn_mask is not None):
            return None
        if dropout_p:
            raise ValueError(
                f"precision.attention.format={self._how.format.name}: dropout_p={dropout_p} is not "
                "emulated; set dropout_p=0, or keep the module in fp32 (precision.overrides)"
            )
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(query.dtype)  # as torch's kernels want it
        scale = query.size(-1) ** -0.5 if scale is None else scale
        told = attn_mask, is_causal, scale, self._how, self._counted_by
        found: Tensor = _Attention.apply(query, key, value, *told)
        return found


def refuse_hidden(model: nn.Module, how: ScaledAttention) -> None:
    """Raise ValueError if attention of a module is called where no mode of functions sees it."""
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            raise ValueError(
                f"precision.attention.format={how.format.name}: {name or 'the model'} is an "
                f"{type(module).__name__}, in which mprun cannot cast the operands; use a module "
                "that calls F.scaled_dot_product_attention"
            )


def cast(numbers: Tensor, element: str, granularity: str) -> Tensor:
    """Return the FP32 numbers to which casts of [..., rows, columns] decode."""
    wide, own = numbers.float(), ELEMENTS[element]
    sizes = wide.abs()
    amax = sizes.amax() if granularity == "tensor" else sizes.amax((-2, -1), keepdim=True)
    encode, factor, _ = SCALES["fp32"].of(amax, own, "")
    return decoded(encoded(wide * encode, own), factor.new_ones(())).mul_(factor)


def _probabilities(
    query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> Tensor:
    """Return P [..., queries, keys] in FP32, zeros in rows without a key."""
    scores = query @ key.mT * scale
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None and mask.dtype is torch.bool:
        scores = scores.masked_fill(~mask, float("-inf"))
    elif mask is not None:
        scores = scores + mask
    is_empty = scores.amax(-1, keepdim=True) == float("-inf")
    return scores.softmax(-1).masked_fill(is_empty, 0.0)


def _for_queries(part: Tensor, query: Tensor) -> Tensor:
    """Return keys or values for each head of queries, of which several may share one."""
    if part.dim() < 3 or part.size(-3) in (1, query.size(-3)):
        return part
    return part.repeat_interleave(query.size(-3) // part.size(-3), -3)


def _of_shared(gradient: Tensor, part: Tensor) -> Tensor:
    """Return the gradient of `part`, the sum over all that share a number of it."""
    if part.dim() > 2 and part.size(-3) not in (1, gradient.size(-3)):
        gradient = gradient.unflatten(-3, (part.size(-3), -1)).sum(-3)
    return gradient.sum_to_size(part.shape).to(part.dtype)


def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float,
    counted_by: int, names: str, granularity: str, element: str,
) -> Tensor:  # fmt: skip
    Calls.add(counted_by, names, fast=True)
    q, k, v = (cast(own, element, granularity) for own in (query, key, value))
    found = _probabilities(q, _for_queries(k, q), mask, is_causal, scale)
    return (cast(found, element, granularity) @ _for_queries(v, q)).to(query.dtype)


def attention_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
    is_causal: bool, scale: float, counted_by: int, names: str, granularity: str, element: str,
    grad_element: str,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the gradients of query, key, value and a mask of numbers, else of nothing."""
    Calls.add(counted_by, names, fast=False)
    q, k, v = (cast(own, element, granularity) for own in (query, key, value))
    k, v = _for_queries(k, q), _for_queries(v, q)
    found = _probabilities(q, k, mask, is_causal, scale)
    of_output = cast(gradient, grad_element, granularity)
    of_value = cast(found, element, granularity).mT @ of_output
    of_found = of_output @ v.mT
    of_scores = found * (of_found - (of_found * found).sum(-1, keepdim=True))
    of_scores = cast(of_scores, grad_element, granularity)
    of_query, of_key = of_scores @ k * scale, of_scores.mT @ q * scale
    has_numbers = mask is not None and mask.is_floating_point()
    of_mask = _of_shared(of_scores, mask) if mask is not None and has_numbers else q.new_empty(0)
    pairs = (of_query, query), (of_key, key), (of_value, value)
    return *(_of_shared(of, own) for of, own in pairs), of_mask


def _promised(query: Tensor, *given: Any) -> Tensor:
    """Return an output without values, as it will be."""
    return query.new_empty((*query.shape[:-1], given[1].size(-1)))


def _promised_backward(_: Tensor, *given: Any) -> tuple[Tensor, ...]:
    mask = given[3]
    of_mask = given[0].new_empty(0, dtype=torch.float32)
    if mask is not None and mask.is_floating_point():
        of_mask = torch.empty_like(mask)
    return *(own.new_empty(own.shape) for own in given[:3]), of_mask


_TOLD = "bool is_causal, float scale, int counted_by, str names, str granularity, str element"
library.define(
    f"scaled_attention(Tensor query, Tensor key, Tensor value, Tensor? mask, {_TOLD}) -> Tensor"
)
library.define(
    "scaled_attention_backward(Tensor gradient, Tensor query, Tensor key, Tensor value,"
    f" Tensor? mask, {_TOLD}, str grad_element) -> (Tensor, Tensor, Tensor, Tensor)"
)
for _key in ("CPU", "CUDA"):
    library.impl("scaled_attention", apart(attention), _key)
    library.impl("scaled_attention_backward", apart(attention_backward), _key)
library.impl("scaled_attention", _promised, "Meta")
library.impl("scaled_attention_backward", _promised_backward, "Meta")
