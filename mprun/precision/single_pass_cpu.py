"""The single pass on a CPU: torch's fused kernels, block by block of what a cache holds.

A block of the gradients is cast into a buffer that stays in the cache, unscaled there, used by
torch's fused kernel, and the updated masters are copied to the model while they are still in the
cache: memory sees each gradient, master, state and copy once. Every number is the one that the
plain way computes, bit for bit: the kernels are the same, and they work element by element.

16-bit parameters are never updated by a fused kernel: that of SGD leaves them as they are on a CPU
(pytorch#191763). Only their FP32 masters are.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim import Optimizer

from mprun.precision.gradients import by_dtype
from mprun.precision.single_pass import (
    Checked,
    in_memory_order,
    in_order_of,
    ordered_state,
    rule_of,
    same_order,
)

# Elements; FP32, so 2 MB. Measured (benchmarks/update_speed.py --blocks): smaller blocks cost more
# in calls than they save in memory, those beyond 1 M no longer stay in a cache.
BLOCK = 512 * 1024
# Below this one call for all of them is faster than one each.
_SMALL = 64 * 1024
_ALIGNMENT = 16  # elements: 64 bytes, one register of AVX-512


@dataclass(slots=True)
class _Block:
    """Pieces of tensors that are updated together; lists in the same order.

    sources: (index of the parameter, part of its gradient or None for all of it). copies,
    copied: what is copied from which masters, for those that have a copy.
    """

    sources: list[tuple[int, int | None]] = field(default_factory=list)
    masters: list[Tensor] = field(default_factory=list)
    states: list[list[Tensor]] = field(default_factory=list)
    steps: list[Tensor] = field(default_factory=list)
    buffers: list[Tensor] = field(default_factory=list)
    copies: list[Tensor] = field(default_factory=list)
    copied: list[Tensor] = field(default_factory=list)
    used: int = 0  # of the buffer


@dataclass(slots=True)
class _Part:
    """The tensors of one parameter group that are clipped or not, with gradients of 32 or 16 bits.

    whole: all of them as one block without buffer, where the gradients can be used as they are and
    there is nothing to copy.
    """

    group: dict
    clipped: bool
    in_fp32: bool
    indices: list[int]
    blocks: list[_Block]
    whole: _Block | None
    steps: list[Tensor]


class BlockedUpdate:
    """The single pass of `inner`, see `mprun.precision.single_pass.SinglePass`.

    block: elements of a block. Costs a buffer of that size, and the views of the pieces.
    """

    def __init__(
        self,
        inner: Optimizer,
        parameters: Sequence[Tensor],
        updated: Sequence[Tensor],
        is_clipped: Sequence[bool],
        block: int = BLOCK,
    ):
        self.inner, self.rule = inner, rule_of(inner)
        self.parameters, self.updated = list(parameters), list(updated)
        self.is_clipped, self.block = list(is_clipped), block
        self._one = torch.ones(())
        self._key: tuple | None = None
        self._parts: list[_Part] = []

    @torch.no_grad()
    def check(
        self,
        gradients: Sequence[Tensor | None],
        inverse: Tensor | None,
        found_inf: Tensor | None,
        *,
        norm: bool,
        grad_max: bool,
    ) -> Checked:
        present = [gradient for gradient in gradients if gradient is not None]
        largest = None
        if grad_max:
            largest = _largest(present)
            finite = bool(torch.isfinite(largest))
            largest = largest if inverse is None else largest * inverse
        else:
            finite = found_inf is None or self._all_finite(present)
        if found_inf is not None and not finite:
            found_inf.fill_(1.0)
        norms = None
        if norm:
            pairs = zip(gradients, self.is_clipped, strict=True)
            counting = [gradient for gradient, counts in pairs if counts and gradient is not None]
            norms = _norms(counting, inverse, finite)
        return Checked(norms, largest)

    @torch.no_grad()
    def update(
        self,
        gradients: Sequence[Tensor | None],
        inverse: Tensor | None,
        clip: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        if found_inf is not None and _is_set(found_inf):
            return
        self._plan(gradients)
        # Reading these waits for nothing on a CPU.
        unscale = 1.0 if inverse is None else float(inverse)
        factor = 1.0 if clip is None else float(clip)
        for part in self._parts:
            if part.steps:
                torch._foreach_add_(part.steps, 1)
            factors = [] if not part.clipped or factor == 1.0 else [factor]
            settings = self._settings(part.group, unscale)
            if settings is None:
                settings = self._settings(part.group, 1.0)
                factors = [unscale, *factors]
            if part.in_fp32 and not factors and part.whole is not None:
                self._run(part.whole, gradients, factors, settings, direct=True)
                continue
            # Backwards: what the check read last is still in the cache.
            for block in reversed(part.blocks):
                direct = part.in_fp32 and not factors
                self._run(block, gradients, factors, settings, direct=direct)

    def _run(
        self,
        block: _Block,
        gradients: Sequence[Tensor | None],
        factors: list[float],
        settings: dict,
        *,
        direct: bool,
    ) -> None:
        """Update one block. direct: FP32 gradients with nothing to multiply need no buffer."""
        pieces = [self._piece(gradients, *source) for source in block.sources]
        if direct:
            pairs = zip(block.masters, pieces, strict=True)
            pieces = [in_order_of(master, piece) for master, piece in pairs]
        else:
            torch._foreach_copy_(block.buffers, pieces)
            pieces = block.buffers
            for factor in factors:
                torch._foreach_mul_(pieces, factor)
        match self.rule:
            case "sgd":
                states = block.states[0] if block.states else []
                torch._fused_sgd_(block.masters, pieces, states, **settings)
            case "adam" | "adamw":
                fused = torch._fused_adam_ if self.rule == "adam" else torch._fused_adamw_
                fused(block.masters, pieces, *block.states, [], block.steps, **settings)
            case _:
                torch._fused_adagrad_(block.masters, pieces, *block.states, block.steps, **settings)
        if block.copies:
            torch._foreach_copy_(block.copies, block.copied)

    def _piece(self, gradients: Sequence[Tensor | None], index: int, part: int | None) -> Tensor:
        gradient = gradients[index]
        if part is None:
            return gradient
        flat = in_memory_order(in_order_of(self.updated[index], gradient))
        return flat[part * self.block : (part + 1) * self.block]

    def _settings(self, group: dict, unscale: float) -> dict | None:
        """Arguments of the fused kernel for gradients that are still to be multiplied by `unscale`.

        None where the kernel cannot do that. SGD can, for a power of two: the gradient's share in
        the momentum, or the rate, carries the factor, and the weight decay its reciprocal. Then
        every product is that of the unscaled gradient, with another exponent.
        """
        common = {"weight_decay": group["weight_decay"], "maximize": False}
        common |= {"lr": float(group["lr"]), "grad_scale": None, "found_inf": None}
        if self.rule != "sgd":
            if unscale != 1.0:
                return None
            common["eps"] = group["eps"]
            if self.rule == "adagrad":
                return common | {"lr_decay": 0.0}
            beta1, beta2 = (float(beta) for beta in group["betas"])
            return common | {"beta1": beta1, "beta2": beta2, "amsgrad": False}
        common |= {
            "momentum": group["momentum"],
            "nesterov": group["nesterov"],
            "dampening": 0.0,
            "is_first_step": False,
        }
        if unscale == 1.0:
            return common
        exact = math.frexp(unscale)[0] == 0.5 and 1.0 - (1.0 - unscale) == unscale
        if not exact or group["nesterov"]:
            return None
        common["weight_decay"] = group["weight_decay"] / unscale
        if group["momentum"]:
            common["dampening"] = 1.0 - unscale
        else:
            common["lr"] *= unscale
        return common

    def _all_finite(self, gradients: list[Tensor]) -> bool:
        """One read of the gradients; small ones, which a cache holds, are written as well."""
        found = torch.zeros(())
        for group in by_dtype(g for g in gradients if g.numel() < _SMALL):
            torch._amp_foreach_non_finite_check_and_unscale_(group, found, self._one)
        large = [gradient for gradient in gradients if gradient.numel() >= _SMALL]
        # A sum is not finite where a value is not; a sum that overflowed is looked at again.
        for group in by_dtype(large):
            sums = torch.isfinite(torch.stack([gradient.sum() for gradient in group])).tolist()
            for gradient, finite in zip(group, sums, strict=True):
                if not finite and not torch.isfinite(_largest([gradient])):
                    return False
        return not found

    def _plan(self, gradients: Sequence[Tensor | None]) -> None:
        """Build the blocks anew where gradients or the model's tensors are others than before."""
        dtypes = [None if gradient is None else gradient.dtype for gradient in gradients]
        key = (dtypes, [parameter.data_ptr() for parameter in self.parameters])
        if key == self._key:
            return
        self._key, self._parts = key, []
        index_of = {id(tensor): index for index, tensor in enumerate(self.updated)}
        for group in self.inner.param_groups:
            kinds: dict[tuple[bool, bool], list[int]] = {}
            for tensor in group["params"]:
                index = index_of[id(tensor)]
                if dtypes[index] is not None:
                    kind = (self.is_clipped[index], dtypes[index] is torch.float32)
                    kinds.setdefault(kind, []).append(index)
            for (clipped, in_fp32), indices in kinds.items():
                self._parts.append(self._part(group, clipped, in_fp32, indices))
        sizes = [block.used for part in self._parts for block in part.blocks]
        buffer = torch.empty(max(sizes, default=0))
        for part in self._parts:
            for block in part.blocks:
                _place(block, buffer)

    def _part(self, group: dict, clipped: bool, in_fp32: bool, indices: list[int]) -> _Part:
        blocks, whole = [_Block()], _Block()
        has_copies = any(self.parameters[i] is not self.updated[i] for i in indices)
        steps = []
        for index in indices:
            own, master = self.parameters[index], self.updated[index]
            state = ordered_state(self.inner, master)
            step = self.inner.state[master].get("step")
            if step is not None:
                steps.append(step)
            self._append(whole, index, None, own, master, state, step)
            numel = master.numel()
            count = -(-numel // self.block) if same_order(own, master) else 1
            if count == 1:
                if blocks[-1].used + numel > self.block:
                    blocks.append(_Block())
                self._append(blocks[-1], index, None, own, master, state, step)
                continue
            parts = [in_memory_order(t).split(self.block) for t in (own, master, *state)]
            for place, (own_part, master_part, *state_parts) in enumerate(zip(*parts, strict=True)):
                if blocks[-1].used + master_part.numel() > self.block:
                    blocks.append(_Block())
                self._append(blocks[-1], index, place, own_part, master_part, state_parts, step)
        blocks = [block for block in blocks if block.sources]
        return _Part(group, clipped, in_fp32, indices, blocks, None if has_copies else whole, steps)

    def _append(
        self,
        block: _Block,
        index: int,
        part: int | None,
        own: Tensor,
        master: Tensor,
        state: list[Tensor],
        step: Tensor | None,
    ) -> None:
        block.sources.append((index, part))
        block.masters.append(master.detach())
        if not block.states:
            block.states = [[] for _ in state]
        for tensors, tensor in zip(block.states, state, strict=True):
            tensors.append(tensor)
        if step is not None:
            block.steps.append(step)
        if self.parameters[index] is not self.updated[index]:
            block.copies.append(own.detach())
            block.copied.append(master.detach())
        block.used += -(-master.numel() // _ALIGNMENT) * _ALIGNMENT


def _place(block: _Block, buffer: Tensor) -> None:
    """Give each piece its place in the buffer, with the strides of its master."""
    start = 0
    for master in block.masters:
        block.buffers.append(buffer.as_strided(master.shape, master.stride(), start))
        start += -(-master.numel() // _ALIGNMENT) * _ALIGNMENT


def _is_set(flag: Tensor) -> bool:
    """The flag on the host: free, because this module is for CPUs alone."""
    return bool(flag)


def _largest(gradients: list[Tensor]) -> Tensor:
    """Largest magnitude, float32, 0-dim; NaN where there is one."""
    filled = [gradient for gradient in gradients if gradient.numel()]
    ends = [end.float() for gradient in filled for end in torch.aminmax(gradient)]
    return torch.stack(ends).abs().max() if ends else torch.zeros(())


def _norms(gradients: list[Tensor], inverse: Tensor | None, finite: bool) -> Tensor:
    """L2 norm of each unscaled gradient, float32 [n], as the plain way computes them."""
    if not gradients:
        return torch.zeros(0)
    if inverse is None:
        return torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32))
    if math.frexp(float(inverse))[0] == 0.5:
        # A power of two goes through squares, sums and roots without a rounding.
        norms = torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32)) * inverse
        if not finite or bool(torch.isfinite(norms).all()):
            return norms
    return torch.stack([torch.linalg.vector_norm(g.float() * inverse) for g in gradients])
